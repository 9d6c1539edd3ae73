"""Writes the tables and the picture of bench/results/h200/*.json into README.md and docs/*.md.

A table stands between two comments, ``<!-- bench: NAME -->`` and ``<!-- /bench -->``; what is between them is replaced.
``--check`` writes nothing and fails if a file would change. `tests/test_report.py` runs it.
"""

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results" / "h200"
PLOT = ROOT / "docs" / "mla_decode.png"
DIGEST = "Description"  # of the PNG: sha256 of the results that it shows
BLOCK = re.compile(r"(<!-- bench: (\w+) -->\n).*?(<!-- /bench -->)", re.DOTALL)

Row = dict[str, Any]
Results = dict[str, dict[str, Any]]  # benchmark -> contents of its file


def load(folder: Path = RESULTS) -> Results:
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    line = lambda cells: f"| {' | '.join(map(str, cells))} |"
    return "\n".join([line(header), "|" + "---|" * len(header), *map(line, rows)])


def source(result: dict[str, Any], command: str) -> str:
    """Where, when and with what the figures were taken, and what else must be known of them."""
    versions = result["versions"]
    driver = f", driver {result['driver']}" if "driver" in result else ""
    named = ", ".join(f"{name} {versions[name]}" for name in versions if name not in ("jaxlib", "python"))
    notes = f" {result['notes']}" if "notes" in result else ""
    commit = f", commit {result['commit']}" if "commit" in result else ""
    return f"{result['card']}{driver}, {named}; {result['date']}{commit}, `python -m bench {command}`.{notes}"


def digits(x: float) -> str:
    return f"{x:.2f}" if x < 10 else f"{x:.1f}" if x < 1000 else f"{x:,.0f}"


def us(t: Row | None) -> str:
    return "" if t is None else digits(t["us"])


def ratio(t: Row | None, other: Row | None) -> str:
    return "" if t is None or other is None else f"{t['us'] / other['us']:.2f}"


def mla_shape(row: Row) -> str:
    varied = ", varied" if row["varied"] else ""
    return f"{row['rows']} x {row['heads']} x {row['context']}{varied}"


def mla(results: Results) -> str:
    peers = ("FlashMLA", "FlashMLA with schedule", "SGLang Triton")
    first, second = [], []
    for row in results["mla"]["rows"]:
        t = row["times"].get
        ours, single, triton, other = (
            t(n)
            for n in ("ours", "ours, page size 1", "ours, page size 1, Triton", "SGLang Triton, page size 1")
        )
        rates = [f"{ours['over_floor']:.2f}", ours["GB/s"], ours["TFLOP/s"]] if ours else [""] * 3
        against = [cell for name in peers for cell in (us(t(name)), ratio(ours, t(name)))]
        first.append([mla_shape(row), digits(row["floor_us"]), us(ours), *rates, *against])
        fp8 = t("ours, fp8")
        over_floor = f"{fp8['over_floor']:.2f}" if fp8 else ""
        second.append([
            mla_shape(row), us(ours), us(t("ours, virtual ids")), us(single), us(other), ratio(single, other),
            us(triton), ratio(triton, other),
            us(fp8), ratio(fp8, ours), over_floor,
        ])  # fmt: skip
    header = ("rows x heads x context", "floor", "ours", "x floor", "GB/s", "TFLOP/s")
    named = [cell for name in ("FlashMLA", "with its schedule", "SGLang") for cell in (name, "ours / it")]
    forms = (
        "rows x heads x context",
        "page table",
        "virtual ids",
        "page size 1",
        "SGLang, page size 1",
        "ours / it",
        "our Triton, page size 1",
        "it / SGLang",
        "page table, fp8",
        "fp8 / bf16",
        "x floor of fp8",
    )
    parts = (
        table((*header, *named), first),
        table(forms, second),
        f"Times in us. {source(results['mla'], 'mla')}",
        f"![]({PLOT.name})",
    )
    return "\n\n".join(parts)


def mla_prefill(results: Results) -> str:
    lines, extensions = [], []
    for row in results["mla_prefill"]["rows"]:
        t = row["times"]
        if row["operation"] == "prefill":
            ours, theirs = t["mosaic"], t["cudnn"]
            varied = (
                "" if row["new_tokens"] == row["rows"] * row["width"] else f", {row['new_tokens']:,} tokens"
            )
            lines.append([
                f"{row['rows']} x {row['width']} x {row['heads']}{varied}", us(ours), f"{ours['tflops']:.0f}",
                us(theirs), f"{theirs['tflops']:.0f}", ratio(ours, theirs), f"{ours['error']:.1e}",
            ])  # fmt: skip
        else:
            shape = f"{row['rows']} x {row['new']} after {row['cached']} x {row['heads']}"
            extensions.append([shape, us(t.get("absorbed")), us(t["expanded"]), f"{row['apart']:.1e}"])
    first = table(
        ("rows x width x heads", "ours", "TFLOP/s", "cuDNN", "TFLOP/s", "ours / it", "relative error"), lines
    )
    second = table(
        ("extend: rows x new tokens x heads", "absorbed", "expanded", "relative difference"), extensions
    )
    return f"{first}\n\n{second}\n\nTimes in us. {source(results['mla_prefill'], 'mla_prefill')}"


def index_forms(results: Results) -> Iterable[tuple[str, Row, Row]]:
    """(shape, times of the stream, times of the table) of the read operations."""
    reads: dict[str, dict[str, Row]] = {}
    for row in results["index"]["rows"]:
        if row["operation"] in ("stream", "table"):
            shape = f"{row['rows']} x {row['seq']}, {row['page_size']}"
            reads.setdefault(shape, {})[row["operation"]] = row["times"]
    return ((shape, forms["stream"], forms["table"]) for shape, forms in reads.items())


def index(results: Results) -> str:
    lines = []
    for shape, *forms in index_forms(results):
        for name, words in (("mosaic", "page"), ("mosaic (token)", "token")):
            if name in forms[0]:
                label = f"{shape}, {words}" if "mosaic (token)" in forms[0] else shape
                cells = [
                    cell
                    for t in forms
                    for cell in (
                        us(t[name]),
                        ratio(t[name], t["sglang"]),
                        us(t[name.replace("mosaic", "xla")]),
                    )
                ]
                lines.append([label, *cells])
    header = ("rows x seq, page size", "stream", "ours / SGLang's", "XLA", "table", "ours / SGLang's", "XLA")
    return f"{table(header, lines)}\n\nTimes in us. {source(results['index'], 'index')}"


def move(results: Results) -> str:
    lines = []
    for row in results["move"]["rows"]:
        t = row["times"]
        copy = t["copy (ceiling)"]
        lines.append([
            row["layout"], row["pages"], us(t["mosaic"]), f"{t['mosaic']['gb_per_s']:.0f}",
            f"{t['mosaic']['gb_per_s'] / copy['gb_per_s']:.2f}", f"{t['xla']['gb_per_s']:.0f}",
        ])  # fmt: skip
    header = ("layout", "pages", "us", "GB/s", "of a copy's", "XLA, GB/s")
    return f"{table(header, lines)}\n\n{source(results['move'], 'move')}"


def candidates(rows: Iterable[Row]) -> list[str]:
    """Names in the order in which they first occur."""
    return list(dict.fromkeys(name for row in rows for name in row["times"]))


def gqa_ours(results: Results) -> str:
    return "mosaic" if "mosaic" in candidates(results["gqa"]["rows"]) else "triton"


def gqa_shape(row: Row) -> str:
    varied = ", varied" if row["varied"] else ""
    return (
        f"{row['rows']} x {row['heads']} / {row['kv_heads']} x {row['head_dim']} x {row['context']}{varied}"
    )


def gqa(results: Results) -> str:
    rows, ours = results["gqa"]["rows"], gqa_ours(results)
    narrow = [name for name in candidates(rows) if name.endswith(", e4m3")]
    names = [name for name in candidates(rows) if name not in narrow]
    peers = [name for name in names if name.startswith(("torch", "SGLang"))]
    lines, narrow_lines = [], []
    for row in rows:
        t = row["times"].get
        shape = gqa_shape(row)
        rates = [f"{t(ours)['over_floor']:.2f}", t(ours)["GB/s"]] if t(ours) else ["", ""]
        forms = [us(t(name)) for name in names if name not in (ours, *peers)]
        against = [cell for name in peers for cell in (us(t(name)), ratio(t(ours), t(name)))]
        lines.append([shape, digits(row["floor_us"]), us(t(ours)), *rates, *forms, *against])
        if narrow:
            floor = digits(row["e4m3_floor_us"]) if "e4m3_floor_us" in row else ""
            narrow_lines.append([shape, floor, *gqa_narrow(t, narrow, ours)])
    header = ["rows x heads / KV heads x head_dim x context", "floor", ours, "x floor", "GB/s"]
    header += [name for name in names if name not in (ours, *peers)]
    header += [cell for name in peers for cell in (name, f"{ours} / it")]
    tables = [table(header, lines)]
    if narrow:
        own = f"{ours}, e4m3"
        header = [header[0], "floor of e4m3", own, "x floor", "GB/s", "relative error", f"it / {ours}"]
        header += [cell for name in narrow if name != own for cell in (name, f"{own} / it")]
        tables.append(table(header, narrow_lines))
    return "\n\n".join([*tables, f"Times in us. {source(results['gqa'], 'gqa')}"])


def gqa_narrow(t: Callable[[str], Row | None], names: list[str], ours: str) -> list[object]:
    """Cells of one shape over e4m3 rows: our time, how good it is, its ratio to that over bf16 rows, and the others'."""
    own = t(f"{ours}, e4m3")
    rates = [f"{own['over_floor']:.2f}", own["GB/s"], f"{own['relative_error']:.1e}"] if own else [""] * 3
    others = [name for name in names if name != f"{ours}, e4m3"]
    against = [cell for name in others for cell in (us(t(name)), ratio(own, t(name)))]
    return [us(own), *rates, ratio(own, t(ours)), *against]


def gqa_close(results: Results) -> str:
    """Of decode by Mosaic: its time over SDPA's to a thousandth, what other sources cost, and Triton's form over SGLang's."""
    lines = []
    for row in results["gqa"]["rows"]:
        t = row["times"].get
        ours, dense, stream, peer = (
            t(name) for name in ("mosaic", "torch SDPA, dense", "triton, stream", "SGLang Triton")
        )
        if ours is None:
            continue
        more = [
            f"{100 * (other['us'] / ours['us'] - 1):+.1f} %" if other else ""
            for other in (t("mosaic, virtual ids"), t("mosaic, stream"))
        ]
        over = f"{ours['us'] / dense['us']:.3f}" if dense else ""
        rate = f"{ours['GB/s'] / 1e3:.2f}"
        lines.append([gqa_shape(row), digits(ours["us"]), rate, over, *more, ratio(stream, peer)])
    header = (
        "rows x heads / KV heads x head_dim x context", "us", "TB/s", "over SDPA", "virtual ids", "token stream",
        "Triton / SGLang, both streams",
    )  # fmt: skip
    return f"{table(header, lines)}\n\n{source(results['gqa'], 'gqa')}"


def gqa_prefill_ours(row: dict[str, Any]) -> dict[str, Any]:
    """The row with a candidate "ours": Mosaic where it serves, else Triton, which is then no other one."""
    t = dict(row["times"])
    name = "mosaic" if "mosaic" in t else "triton"
    t["ours"] = t[name] if name == "mosaic" else t.pop(name)
    if f"{name}, virtual ids" in t:
        t["ours, virtual ids"] = t[f"{name}, virtual ids"]
    return row | {"times": t}


def gqa_prefill(results: Results) -> str:
    rows = [gqa_prefill_ours(row) for row in results["gqa_prefill"]["rows"]]
    ours_too = ("ours", "ours, virtual ids", "mosaic", "mosaic, virtual ids", "triton, virtual ids")
    others = [name for name in candidates(rows) if name not in ours_too]
    lines = []
    for row in rows:
        t = row["times"]
        shape = f"{row['rows']} x {row['new']} after {row['cached']}, {row['heads']} / {row['kv_heads']} x {row['head_dim']}"
        shape += f", window {row['window']}" if row["window"] else ""
        shape += ", sinks" if row.get("sinks") else ""
        shape += f", bias of {row['bias']}" if row.get("bias") else ""
        ours = t["ours"]
        line = [shape, us(ours), f"{ours['tflops']:.0f}", us(t.get("ours, virtual ids"))]
        against = [cell for name in others for cell in (us(t.get(name)), ratio(ours, t.get(name)))]
        lines.append([*line, *against, f"{ours['relative_error']:.1e}"])
    header = [
        "rows x new after cached tokens, heads / KV heads x head_dim",
        "ours",
        "TFLOP/s",
        "from virtual ids",
    ]
    header += [cell for name in others for cell in (name, "ours / it")]
    header.append("relative error")
    return f"{table(header, lines)}\n\nTimes in us. {source(results['gqa_prefill'], 'gqa_prefill')}"


def state(results: Results) -> str:
    rows = results["state"]["rows"]
    others = [name for name in candidates(rows) if name not in ("mosaic", "update")]
    lines = []
    for row in rows:
        t = row["times"]
        line = [row["case"], row["rows"], f"{row['moved_bytes'] / 1e6:.1f}", us(t["mosaic"])]
        line += [f"{t['mosaic']['gb_per_s']:.0f}", us(t["update"]), ratio(t["mosaic"], t["update"])]
        lines.append(
            [*line, *(cell for name in others for cell in (us(t.get(name)), ratio(t["mosaic"], t.get(name))))]
        )
    header = ["state", "rows", "MB", "ours", "GB/s", "elementwise update", "ours / it"]
    header += [cell for name in others for cell in ({"xla": "XLA"}.get(name, name), "ours / it")]
    return f"{table(header, lines)}\n\nTimes in us. {source(results['state'], 'state')}"


def step(results: Results) -> str:
    lines = []
    for row in results["step"]["rows"]:
        d, t = row["difference"], row["us_per_step"]
        lines.append([
            f"{row['rows']} x {row['context']}", row["layers"], *(f"{t[n]['median']:,.1f}" for n in ("unified", "static")),
            f"{d['median_pct']:+.2f} % [{d['low_pct']:+.2f}, {d['high_pct']:+.2f}]",
            f"{row['equal_tokens']:.2%}", f"{row['equal_logprob_bits']:.2%}",
        ])  # fmt: skip
    header = (
        "rows x context", "layers", "shared pool", "static split", "difference, 95 % interval", "equal tokens",
        "log-probabilities equal to the last bit",
    )  # fmt: skip
    return f"{table(header, lines)}\n\nWall clock, us a decode step. {source(results['step'], 'step')}"


def experts(results: Results) -> str:
    lines = []
    for row in results["experts"]["rows"]:
        t = row["times"]
        grouped = t["grouped"]
        rates = [f"{grouped['gb_per_s']:,.0f}", f"{grouped['tflop_per_s']:.0f}"]
        lines.append([row["tokens"], row["experts_read"], us(grouped), *rates, us(t.get("gather"))])
    header = ("tokens", "experts read", "grouped", "GB/s", "TFLOP/s", "gather")
    return f"{table(header, lines)}\n\nTimes in us. {source(results['experts'], 'experts')}"


def summary(results: Results) -> str:
    """One line an operation and opponent: our time over theirs, over all shapes measured."""
    lines = []

    def line(operation: str, opponent: str, ratios: Iterable[float]) -> None:
        values = sorted(ratios)
        if values:
            shown = f"{median(values):.2f}", f"{values[0]:.2f} to {values[-1]:.2f}", len(values)
            lines.append([operation, opponent, *shown])

    def over(rows: Iterable[Row], ours: str, theirs: str) -> list[float]:
        return [
            r["times"][ours]["us"] / r["times"][theirs]["us"]
            for r in rows
            if {ours, theirs} <= r["times"].keys()
        ]

    if "mla" in results:
        rows = results["mla"]["rows"]
        line("MLA decode", "FlashMLA", over(rows, "ours", "FlashMLA"))
        line("", "FlashMLA with its schedule kernel", over(rows, "ours", "FlashMLA with schedule"))
        line("", "SGLang, Triton", over(rows, "ours", "SGLang Triton"))
        line(
            "MLA decode, page size 1",
            "SGLang, Triton",
            over(rows, "ours, page size 1", "SGLang Triton, page size 1"),
        )
    if "gqa" in results:
        rows, ours = results["gqa"]["rows"], gqa_ours(results)
        line("GQA decode", "torch SDPA over a dense copy", over(rows, ours, "torch SDPA, dense"))
        line("", "SGLang, Triton", over(rows, ours, "SGLang Triton"))
    if "gqa_prefill" in results:
        rows = [gqa_prefill_ours(row) for row in results["gqa_prefill"]["rows"]]
        line("GQA prefill", "cuDNN over dense K and V", over(rows, "ours", "cuDNN, dense"))
    if "state" in results:
        rows = results["state"]["rows"]
        line("recurrent state, a step", "elementwise update of as many bytes", over(rows, "mosaic", "update"))
        line("", "SGLang, Triton (KDA)", over(rows, "mosaic", "SGLang Triton"))
        line("", "SGLang, CUDA (KDA)", over(rows, "mosaic", "SGLang CUDA"))
    if "mla_prefill" in results:
        rows = [r for r in results["mla_prefill"]["rows"] if r["operation"] == "prefill"]
        line("MLA prefill", "cuDNN, V padded to 192", over(rows, "mosaic", "cudnn"))
    if "index" in results:
        for operation, name in (("stream", "token streams"), ("table", "page tables")):
            rows = [r for r in results["index"]["rows"] if r["operation"] == operation]
            line(f"{name}, translated", "SGLang, Triton", over(rows, "mosaic", "sglang"))
    if "move" in results:
        line(
            "page moves",
            "elementwise copy of as many bytes",
            over(results["move"]["rows"], "mosaic", "copy (ceiling)"),
        )
    header = ("operation", "against", "ours / theirs, median", "least to most", "shapes")
    cards = " and ".join(sorted({result["card"] for result in results.values()}))
    notes = "".join(
        f"\n- {name}: commit {result.get('commit', 'unknown')}. {result.get('notes', '')}".rstrip()
        for name, result in results.items()
        if name in ("mla", "gqa", "gqa_prefill", "state", "mla_prefill", "index", "move")
    )
    return (
        f"{table(header, lines)}\n\n{cards}. Versions, dates and all figures: "
        f"[bench/results/h200](bench/results/h200).\n{notes}"
    )


TABLES: dict[str, Callable[[Results], str]] = {
    "summary": summary,
    "mla": mla,
    "mla_prefill": mla_prefill,
    "gqa": gqa,
    "gqa_close": gqa_close,
    "gqa_prefill": gqa_prefill,
    "state": state,
    "experts": experts,
    "index": index,
    "move": move,
    "step": step,
}


OF = {"gqa_close": "gqa"}  # the benchmark of a table that is named otherwise


def render(text: str, results: Results) -> str:
    """The text with every table made anew, or a word where its results are missing.

    ValueError: a table that nobody makes, or a comment without its pair.
    """

    def replace(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        if name not in TABLES:
            raise ValueError(f"no table named {name!r}; there are {', '.join(TABLES)}")
        measured = results if name == "summary" else OF.get(name, name) in results
        return f"{begin}{TABLES[name](results) if measured else 'Not measured yet.'}\n{end}"

    if len(BLOCK.findall(text)) != text.count("<!-- bench: ") or text.count("<!-- /bench -->") != text.count(
        "<!-- bench: "
    ):
        raise ValueError("every <!-- bench: NAME --> needs its own <!-- /bench --> behind it")
    return BLOCK.sub(replace, text)


def documents() -> list[Path]:
    """The Markdown files that hold tables."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [path for path in paths if "<!-- bench: " in path.read_text()]


def digest(result: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()


def plot(result: dict[str, Any], path: Path) -> None:
    """Times of MLA decode over the floor, a line of dots for each shape."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = result["rows"]
    marks = {
        "SGLang Triton": ("SGLang (Triton)", "#b9b2a8", "s"),
        "FlashMLA with schedule": ("FlashMLA with its schedule kernel", "#8fb3d9", "D"),
        "FlashMLA": ("FlashMLA without it", "#2f6db3", "D"),
        "ours": ("ours, schedule included", "#d1495b", "o"),
    }
    figure, ax = plt.subplots(figsize=(8.5, 1.4 + 0.3 * len(rows)), layout="constrained")
    places = range(len(rows))[::-1]
    for name, (label, colour, mark) in marks.items():
        seen = [
            (row["times"][name]["us"] / row["floor_us"], y)
            for row, y in zip(rows, places)
            if name in row["times"]
        ]
        if seen:
            ax.scatter(*zip(*seen), s=34, color=colour, marker=mark, label=label, linewidths=0, zorder=2)
    ax.axvline(1, color="0.2", lw=1)
    ax.set_xscale("log")
    ticks = [1, 1.5, 2, 3, 5, 10, 20, 50]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_xlim(
        0.95,
        1.1
        * max(row["times"][n]["us"] / row["floor_us"] for row in rows for n in marks if n in row["times"]),
    )
    ax.set_yticks(places, [f"{mla_shape(row)}  ({digits(row['floor_us'])} us)" for row in rows], fontsize=8)
    ax.set_ylim(-0.7, len(rows) - 0.3)
    ax.grid(axis="y", color="#eeeeee", lw=0.8)
    ax.set_axisbelow(True)
    ax.set_xlabel("time / floor  (floor: bytes at 4.35 TB/s or FLOPs at 790 TFLOP/s)")
    ax.set_title(
        "Paged MLA decode, bf16, rows x heads x context (floor)", loc="left", fontsize=10, weight="bold"
    )
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    ax.tick_params(length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path, dpi=110, metadata={DIGEST: digest(result)})
    plt.close(figure)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file would change")
    options = parser.parse_args(argv)
    results = load()
    stale = []
    for path in documents():
        text = path.read_text()
        if (new := render(text, results)) != text:
            stale.append(path.relative_to(ROOT))
            if not options.check:
                path.write_text(new)
    if options.check and stale:
        raise SystemExit(f"stale: {', '.join(map(str, stale))}; run python -m bench report")
    if "mla" in results and not options.check:
        plot(results["mla"], PLOT)
        stale.append(PLOT.relative_to(ROOT))
    for path in stale:
        print(f"wrote {path}")
