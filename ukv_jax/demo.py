"""Many requests on a small hybrid model, once from one shared pool and once from a static split of as many bytes.

The prompts come with Python itself (`pydoc_data.topics`, the help texts of the `help()` function): many short headings
and a few long pages.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from ukv_jax.engine import Engine, Model, Result, Sampling, Trace
from ukv_jax.inspect import HOLE_COLOUR, human
from ukv_jax.layout import PoolLayout, StaticLayout, UnifiedLayout

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHECKPOINT = Path(__file__).parent.parent / "checkpoints" / "kimi-linear-tiny"
PAGE_SIZE = 16  # tokens
MAX_REQUESTS = 32  # rows that may decode side by side; see Engine for why a multiple of 16
SHORT, LONG = 44, 4  # requests of each kind
LONG_PROMPT = 4400  # bytes of the shortest long prompt
STATIC_REQUESTS = 14  # mean requests that the static split is sized for
COLOURS = {"state": "#d95f02", "full": "#1b9e77"}
LABELS = {"state": "KDA state", "full": "MLA latents"}
FREE_COLOUR = "#f2f2f2"


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    sampling: Sampling


def requests_of(model: Model) -> list[Request]:
    """A skewed set: short requests, among whose second half come a few long ones. Odd ones are sampled, even ones greedy."""
    names = sorted(topics.topics, key=lambda name: (len(topics.topics[name]), name))
    bos = [] if model.config.bos_token_id is None else [model.config.bos_token_id]
    long = [topics.topics[name][: LONG_PROMPT + 160 * i] for i, name in enumerate(names[-LONG:])]
    texts = [_heading(topics.topics[name]) for name in names[:SHORT]]
    for i, text in enumerate(long):
        texts.insert(SHORT // 2 + i * (SHORT // 2 // LONG), text)
    out = []
    for i, text in enumerate(texts):
        temperature = 0.7 if i % 2 else 0.0
        sampling = Sampling(48 + 16 * (i % 4), temperature, top_p=0.95, seed=i)
        out.append(Request(bos + model.encode(text), sampling))
    return out


def _heading(topic: str) -> str:
    """Title, underline, and the first words below them."""
    head = topic[: topic.index("\n\n") + 2]
    words = topic[len(head) :].split(" ")
    return head + " ".join(words[:4]) + " "


def layouts(model: Model, requests: list[Request]) -> tuple[UnifiedLayout, StaticLayout]:
    """A static split for STATIC_REQUESTS mean requests of this trace, and a unified pool of as many bytes."""
    tokens = [len(r.prompt) + r.sampling.max_new_tokens for r in requests]
    sizes = dict(page_size=PAGE_SIZE, max_requests=MAX_REQUESTS, max_tokens=max(tokens))
    mean = sum(tokens) / len(tokens)
    whole = UnifiedLayout.from_tokens(
        model.specs, tokens=round(mean * STATIC_REQUESTS), requests=STATIC_REQUESTS, **sizes
    )
    static = StaticLayout.from_bytes(model.specs, total_bytes=whole.total_bytes, mean_tokens=mean, **sizes)
    unified = UnifiedLayout.from_bytes(model.specs, total_bytes=static.total_bytes, **sizes)
    return unified, static


def run(checkpoint: Path, picture: Path, console: Console) -> dict[str, object]:
    """Runs both pools, prints what happened and draws the picture. Returns the summary."""
    model = Model.load(checkpoint)
    requests = requests_of(model)
    unified, static = layouts(model, requests)
    tokens = [len(r.prompt) + r.sampling.max_new_tokens for r in requests]
    console.print(
        f"[bold]{checkpoint.name}[/]: {model.config.mixers.count('kda')} KDA layers with recurrent state, "
        f"{model.config.mixers.count('mla')} MLA layers with latent KV"
    )
    console.print(
        f"{len(requests)} requests of {min(tokens)} to {max(tokens)} tokens, {sum(tokens) / len(tokens):.0f} on average"
    )
    console.print(f"two pools of {human(unified.total_bytes)}")
    console.print("the static split, in proportion to the mean request:")
    for spec in static.subpools:
        size = spec.num_pages * spec.page_bytes
        what = "slots" if spec.is_state else f"pages of {spec.page_size} tokens"
        share = f"{size / static.total_bytes:4.0%}  {human(size)}"
        console.print(f"  {LABELS[spec.name]:11} {share}, {spec.num_pages - 1} {what}")

    def engine(layout: PoolLayout) -> Engine:
        longest = max(r.sampling.max_new_tokens for r in requests)
        e = Engine(
            model, layout, max_new_tokens=longest, prefill_lanes=2, prefill_chunk=128, headroom=PAGE_SIZE
        )
        e.compile()
        return e

    with console.status("compiling the two programs"), ThreadPoolExecutor(2) as threads:
        engines = list(threads.map(engine, (unified, static)))
    results = []
    for e, name in zip(engines, ("one shared pool", "static split")):
        with console.status(f"decoding from {name}"):
            results.append(e.generate([r.prompt for r in requests], [r.sampling for r in requests]))
    ours, theirs = results
    failed = [r.error for r in ours + theirs if r.error]
    if failed:
        raise ValueError(failed[0])

    _print_texts(model, requests, ours, console)
    same_tokens = sum(a.tokens == b.tokens for a, b in zip(ours, theirs))
    same_bits = sum(a.logprobs == b.logprobs for a, b in zip(ours, theirs))
    _print_table(engines, results, console)
    console.print(
        f"tokens equal in {same_tokens} of {len(requests)} requests, log-probabilities to the last bit in {same_bits}"
    )
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw(engines, picture)
    u, s = engines
    return {
        "identical": same_tokens == len(requests) and same_bits == len(requests),
        "requests_unified": u.peak_requests,
        "requests_static": s.peak_requests,
        "pool_bytes": unified.total_bytes,
        "steps_per_s": round(u.decode_steps / u.decode_seconds, 1),
        "steps_per_s_static": round(s.decode_steps / s.decode_seconds, 1),
        "steps_unified": u.decode_steps,
        "steps_static": s.decode_steps,
        "tokens": sum(len(r.tokens) for r in ours),
        "picture": str(picture),
    }


def _print_texts(model: Model, requests: list[Request], results: list[Result], console: Console) -> None:
    longest = max(range(len(requests)), key=lambda i: len(requests[i].prompt))
    for i in (5, 12, 23, longest):
        prompt = model.decode(requests[i].prompt) or ""
        shown = prompt if len(prompt) < 160 else f"[... {len(prompt) - 100} characters ...]{prompt[-100:]}"
        how = "greedy" if requests[i].sampling.temperature == 0 else "sampled"
        console.rule(f"request {i}, {how}", style="dim", align="left")
        console.print(shown, style="dim", end="", markup=False, highlight=False)
        console.print(results[i].text, style="bold", markup=False, highlight=False)
    console.rule(style="dim")


def _print_table(engines: list[Engine], results: list[list[Result]], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("", "shared pool", "static split"):
        table.add_column(column, justify="left" if not column else "right")
    traces = [e.trace() for e in engines]

    def row(name: str, values) -> None:
        table.add_row(name, *map(str, values))

    row("bytes", [f"{e.layout.total_bytes:,}" for e in engines])
    row("requests at once, most", [e.peak_requests for e in engines])
    row("requests at once, mean", [f"{t.active.mean():.1f}" for t in traces])
    row("decode steps", [e.decode_steps for e in engines])
    row("decode steps a second", [f"{e.decode_steps / e.decode_seconds:.1f}" for e in engines])
    row("pages moved by compaction", [int(e.state.counters.moved) for e in engines])
    row("stalls (lane x step)", [t.stalled.sum() for t in traces])
    row("retractions", [sum(r.retractions for r in rs) for rs in results])
    console.print(table)


def draw(engines: list[Engine], path: Path) -> None:
    """Bytes in use over time in both pools, and how many requests decode at once."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(
        3, 1, figsize=(9, 7.2), sharex=True, height_ratios=(3, 3, 1.7), layout="constrained"
    )
    traces = [e.trace() for e in engines]
    names = ("one shared pool", "static split")
    for ax, e, trace, name in zip(axes, engines, traces, names):
        _draw_pool(ax, e.layout, trace)
        title = f"{name}: at most {e.peak_requests} requests at once, all done after {e.decode_steps} steps"
        ax.set_title(title, loc="left", fontsize=10, weight="bold")
    for trace, name, colour in zip(traces, names, ("#222222", "#999999")):
        axes[2].step(range(len(trace.active)), trace.active, where="post", color=colour, label=name, lw=1.6)
    axes[2].set_ylim(bottom=0)
    axes[2].set(xlabel="decode step", ylabel="requests\ndecoding", xmargin=0)
    axes[2].legend(frameon=False, fontsize=8, loc="upper right", ncols=2)
    handles = {h.get_label(): h for ax in axes[:2] for h in ax.get_legend_handles_labels()[0]}
    handles["free"] = Patch(color=FREE_COLOUR, label="free")
    figure.legend(
        handles=list(handles.values()),
        loc="outside upper right",
        ncols=len(handles),
        frameon=False,
        fontsize=9,
    )
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_pool(ax: "Axes", layout: PoolLayout, trace: Trace) -> None:
    """State from the bottom, KV from the top where the pool is shared; each from the bottom of its range in a split."""
    scale, x = 1 << 20, np.arange(len(trace.active))
    total = layout.total_bytes / scale
    ax.axhspan(0, total, color=FREE_COLOUR, lw=0, zorder=0)

    def band(low, high, colour, label, **style):
        ax.fill_between(x, low, high, step="post", color=colour, lw=0, label=label, **style)

    for i, spec in enumerate(layout.subpools):
        live, holes = (a[:, i] * spec.page_bytes / scale for a in (trace.pages, trace.holes))
        colour, label = COLOURS[spec.name], LABELS[spec.name]
        if spec.base is not None:
            base = spec.base / scale
            band(base, base + live, colour, label)
            ax.axhline(base + spec.num_pages * spec.page_bytes / scale, color="0.2", lw=1, ls="--")
        elif spec.is_state:
            base = layout.largest_page / scale
            band(base, base + live, colour, label)
            band(base + live, base + live + holes, HOLE_COLOUR, "holes")
        else:
            band(total - live, total, colour, label)
            band(total - live - holes, total - live, HOLE_COLOUR, "holes")
    ax.set(ylim=(0, total), ylabel="MiB", xmargin=0)
