"""Command line: generate text, compare the two kinds of pool, plan a pool, run the demo.

Bad input ends in one line on stderr and exit code 2.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from ukv_jax.layout import PoolLayout, Spec

CACHE_VARIABLE = "UKV_JAX_COMPILE_CACHE"
KV_DTYPES = {"auto": None, "fp8": "float8_e4m3fn"}
UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def size(text: str) -> int:
    """Bytes: a number with an optional unit, binary (K or KiB, M, G, T) or decimal (KB, MB, GB, TB)."""
    digits = text.strip().upper().removesuffix("IB")
    decimal = digits[-2:-1].isalpha() and digits.endswith("B")
    digits = digits.removesuffix("B") if decimal else digits
    unit = digits[-1:] if digits[-1:].isalpha() else ""
    try:
        factor = 1000 ** ("KMGT".index(unit) + 1) if decimal else UNITS[unit]
        value = float(digits.removesuffix(unit)) * factor
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 300000, 512M or 1.5G") from None
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"a size must be positive and finite, got {text!r}")
    return int(value)


def use_compile_cache(where: str | None) -> Path | None:
    """Keeps compiled programs on disk. `where`: a directory, or "off".

    None: $UKV_JAX_COMPILE_CACHE, else what JAX itself was told, else a directory in the user's cache.
    """
    import jax

    where = where or os.environ.get(CACHE_VARIABLE) or jax.config.jax_compilation_cache_dir
    if where == "off":
        jax.config.update("jax_compilation_cache_dir", None)
        return None
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ukv_jax" / "compiled"
    path = Path(where) if where else default
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"compile cache {path}: {error.strerror}; give another with --compile-cache, or off"
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return path


def _layout(
    specs: "tuple[Spec, ...]",
    kind: str,
    pool_bytes: int | None,
    tokens: list[int],
    page_size: int,
    rows: int,
    longest: int,
) -> "PoolLayout":
    """The pool for requests of these `tokens`; without a byte budget the smallest that holds the `rows` longest at once."""
    from ukv_jax.layout import StateSpec, StaticLayout, UnifiedLayout

    if page_size < 1:
        raise ValueError(f"page size must be at least 1 token, got {page_size}")
    sizes = dict(page_size=page_size, max_requests=rows, max_tokens=longest)
    if pool_bytes is not None:
        if kind == "unified":
            return UnifiedLayout.from_bytes(specs, total_bytes=pool_bytes, **sizes)
        return StaticLayout.from_bytes(
            specs, total_bytes=pool_bytes, mean_tokens=sum(tokens) / len(tokens), **sizes
        )
    pages = sum(-(-n // page_size) for n in sorted(tokens)[-rows:])
    pages = max(pages, -(-longest // page_size))
    if kind == "unified":
        return UnifiedLayout.from_tokens(specs, tokens=pages * page_size, requests=rows, **sizes)
    return StaticLayout.from_pages(
        specs, pages={s.name: rows if isinstance(s, StateSpec) else pages for s in specs}, **sizes
    )


def _prompts(args: argparse.Namespace) -> list[str | list[int]]:
    prompts: list[str | list[int]] = list(args.prompt or [])
    for text in args.prompt_ids or []:
        try:
            prompts.append([int(t) for t in text.replace(",", " ").split()])
        except ValueError:
            raise ValueError(f"--prompt-ids takes token ids such as '17 4 256', got {text!r}") from None
    if args.prompts is not None:
        text = sys.stdin.read() if args.prompts == "-" else _read(args.prompts)
        prompts += [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ValueError("no prompt given; use --prompt TEXT, --prompt-ids or --prompts FILE")
    return prompts


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error})") from error


@contextmanager
def _bar(label: str, total: int, shown: bool) -> Iterator[Callable[[int, str], None]]:
    """A progress bar on stderr; yields a function of (done, note)."""
    if not shown:
        yield lambda done, note: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(
        *columns, TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=Console(stderr=True)
    ) as bar:
        task = bar.add_task(label, total=total, note="")
        yield lambda done, note: bar.update(task, completed=done, note=note)


def generate(args: argparse.Namespace) -> int:
    from ukv_jax.engine import Engine, Model, Sampling, cache_specs, load_tokenizer
    from ukv_jax.models.config import load_config

    wishes = Sampling(
        args.max_new_tokens,
        args.temperature,
        args.top_k,
        args.top_p,
        args.seed,
        tuple(args.stop_id or ()),
        tuple(args.stop or ()),
        args.ignore_eos,
    )
    prompts = _prompts(args)
    # What can be refused is refused before the weights are read.
    config, tokenizer = load_config(args.model), load_tokenizer(args.model)
    dtype = args.dtype or config.dtype
    model = Model({}, config, tokenizer, dtype, kv_dtype=KV_DTYPES[args.kv_dtype])
    ids = [model.encode(p) if isinstance(p, str) else p for p in prompts]
    if args.bos:
        if config.bos_token_id is None:
            raise ValueError(f"--bos: {args.model} names no bos_token_id")
        ids = [[config.bos_token_id, *p] for p in ids]
    tokens = [len(p) + args.max_new_tokens for p in ids]
    rows = min(len(ids), 64) if args.max_requests is None else args.max_requests
    longest = max(tokens) if args.context is None else args.context
    layout = _layout(
        cache_specs(config, dtype, KV_DTYPES[args.kv_dtype]),
        args.pool,
        args.pool_bytes,
        tokens,
        args.page_size,
        rows,
        longest,
    )
    model = replace(model, params=Model.load(args.model, dtype=args.dtype).params)

    engine = Engine(
        model,
        layout,
        max_new_tokens=args.max_new_tokens,
        stops=max(8, len(wishes.stop_ids) + len(config.eos_token_ids)),
        headroom=args.headroom,
        delivery=args.delivery,
        implementation=args.implementation,
    )
    begin = time.perf_counter()
    total = args.max_new_tokens * len(ids)
    shown = sys.stderr.isatty() and not args.json and total >= 256
    with _bar("generating", total, shown) as advance:
        results = engine.generate(
            ids, wishes, on_progress=lambda p: advance(p.tokens, f"{p.running} running, {p.waiting} waiting")
        )
    seconds = time.perf_counter() - begin

    if args.json:
        out = [{"prompt": p, **asdict(r)} for p, r in zip(prompts, results)]
        pool = {"kind": args.pool, "bytes": layout.total_bytes, "page_size": layout.page_size}
        pool |= {"pages": {s.name: s.num_pages - s.first_page for s in layout.subpools}}
        run = {
            "steps": engine.decode_steps,
            "requests_at_once": engine.peak_requests,
            "seconds": round(seconds, 3),
        }
        print(json.dumps({"results": out, "pool": pool, "run": run}, ensure_ascii=False))
    else:
        for i, (prompt, r) in enumerate(zip(prompts, results)):
            if r.error is None:
                if len(prompts) > 1:
                    print(f"[{i}] {prompt!r}")
                print(r.text if r.text is not None else " ".join(map(str, r.tokens)))
    for i, r in enumerate(results):
        if r.error is not None:
            print(f"error: prompt {i}: {r.error}", file=sys.stderr)
    return 2 if any(r.error for r in results) else 0


def compare(args: argparse.Namespace) -> int:
    from ukv_jax.compare import compare as run
    from ukv_jax.engine import Model, cache_specs, load_tokenizer
    from ukv_jax.models.config import load_config

    config, tokenizer = load_config(args.model), load_tokenizer(args.model)
    if args.chunk < 1 or args.requests < 1 or args.context < 2:
        raise ValueError(
            "--chunk and --requests must be at least 1 and --context at least 2, "
            f"got {args.chunk}, {args.requests}, {args.context}"
        )
    dtype = args.dtype or config.dtype
    text = Model({}, config, tokenizer, dtype).encode(_read(args.text))
    rows = max(1, min(args.requests, -(-len(text) // args.context)))
    width = min(args.context, max(len(text), 2))
    specs = cache_specs(config, dtype, KV_DTYPES[args.kv_dtype])
    layouts = [
        _layout(specs, kind, None, [width] * rows, args.page_size, rows, width)
        for kind in ("unified", "static")
    ]
    model = Model.load(args.model, dtype=args.dtype)
    with _bar("comparing", len(text), sys.stderr.isatty() and not args.json) as advance:
        options = dict(chunk=args.chunk, delivery=args.delivery, implementation=args.implementation)
        result = run(
            model, (layouts[0], layouts[1]), text, on_progress=lambda n, _: advance(n, ""), **options
        )
    if args.json:
        unified, static = result.perplexity
        print(json.dumps(asdict(result) | {"perplexity": {"unified": unified, "static": static}}))
        return 0
    print(
        f"{result.tokens} predictions, {rows} requests of up to {width} tokens side by side, {args.chunk} tokens a step"
    )
    print(f"perplexity: unified {result.perplexity[0]:.6f}, static {result.perplexity[1]:.6f}")
    same = "bit-identical" if result.identical else f"differ by at most {result.max_difference:.3g}"
    print(f"next token agrees at {result.agreement:.4%} of positions; logits {same}")
    return 0


def plan(args: argparse.Namespace) -> int:
    from ukv_jax import plan as planning

    found = planning.plan(
        args.model,
        args.bytes,
        page_size=args.page_size,
        dtype=args.dtype,
        kv_dtype=KV_DTYPES[args.kv_dtype],
        short=args.short,
        long=args.long,
    )
    print(json.dumps(asdict(found)) if args.json else "\n".join(planning.lines(found)))
    return 0


def demo(args: argparse.Namespace) -> int:
    from rich.console import Console

    from ukv_jax import demo as show

    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("the demo draws a picture: pip install matplotlib (extra 'plot')") from None
    summary = show.run(
        Path(args.model) if args.model else show.CHECKPOINT, Path(args.picture), Console(highlight=False)
    )
    print(json.dumps(summary))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m ukv_jax", description="A unified KV memory pool for JAX.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        sub.add_argument(
            "--compile-cache",
            metavar="DIR",
            help=f"where compiled programs are kept between runs, or off (default: ${CACHE_VARIABLE}, or the user's cache)",
        )
        return sub

    def kv_dtype(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--kv-dtype",
            choices=tuple(KV_DTYPES),
            default="auto",
            help="of cached KV rows: auto is the model's, fp8 is e4m3 with scales",
        )

    def kernels(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--page-size", type=int, default=64, help="tokens a page (64; what a kernel refuses it says)"
        )
        sub.add_argument(
            "--dtype",
            choices=("bfloat16", "float16", "float32"),
            help="default: the checkpoint's (float16: not for latent attention)",
        )
        kv_dtype(sub)
        sub.add_argument(
            "--delivery",
            choices=("table", "stream", "virtual"),
            default="table",
            help="addresses for attention",
        )
        sub.add_argument(
            "--implementation",
            choices=("mosaic", "triton", "xla"),
            help="of attention and recurrent state (default: the one preferred on the device). A decode step that it cannot "
            "serve is refused; these take the preferred one all the same: by the name triton chunks of MLA and steps of "
            "recurrent state, by the name mosaic chunks of GQA",
        )
        sub.add_argument("--json", action="store_true", help="one JSON object on stdout")

    g = command("generate", generate, "Generate text from a Hugging Face checkpoint directory.")
    g.add_argument("--model", required=True, metavar="DIR")
    g.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times")
    g.add_argument("--prompt-ids", action="append", metavar="IDS", help="a prompt as token ids: '17 4 256'")
    g.add_argument("--prompts", metavar="FILE", help="a prompt a line; - reads stdin")
    g.add_argument("--bos", action="store_true", help="put the model's bos id before each prompt")
    g.add_argument("--max-new-tokens", type=int, default=64)
    g.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    g.add_argument("--top-k", type=int, default=0, help="0 = all")
    g.add_argument("--top-p", type=float, default=1.0)
    g.add_argument("--seed", type=int, default=0, help="prompt i takes seed + i")
    g.add_argument("--stop", action="append", metavar="TEXT", help="ends the text before this string")
    g.add_argument("--stop-id", action="append", type=int, metavar="ID")
    g.add_argument("--ignore-eos", action="store_true")
    g.add_argument("--pool", choices=("unified", "static"), default="unified")
    g.add_argument(
        "--pool-bytes",
        type=size,
        metavar="SIZE",
        help="such as 512M or 20G (default: all requests fit at once)",
    )
    g.add_argument("--max-requests", type=int, help="that decode side by side (default: all, 64 at most)")
    g.add_argument("--context", type=int, help="longest request in tokens (default: the longest one given)")
    g.add_argument(
        "--headroom", type=int, default=0, help="tokens beyond the prompt that must have room at admission"
    )
    kernels(g)

    c = command(
        "compare",
        compare,
        "Perplexity and next-token agreement of a unified pool and a static split, teacher forced.",
    )
    c.add_argument("--model", required=True, metavar="DIR")
    c.add_argument("--text", required=True, metavar="FILE")
    c.add_argument("--context", type=int, default=1024, help="tokens of one request (1024)")
    c.add_argument("--requests", type=int, default=4, help="requests side by side (4)")
    c.add_argument("--chunk", type=int, default=64, help="tokens a step (64); 1 takes the decode path")
    kernels(c)

    p = command("plan", plan, "What a pool of a given size holds for a model, from its config.json alone.")
    p.add_argument("--model", required=True, metavar="DIR_OR_CONFIG")
    p.add_argument(
        "--bytes", required=True, type=size, metavar="SIZE", help="such as 100GB (10^9) or 100G (2^30)"
    )
    p.add_argument("--page-size", type=int, default=64, help="tokens a page (64)")
    p.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="of weights and cache (the checkpoint's)"
    )
    kv_dtype(p)
    p.add_argument("--short", type=int, default=1024, metavar="TOKENS", help="of a short request (1024)")
    p.add_argument(
        "--long",
        type=int,
        default=65536,
        metavar="TOKENS",
        help="of a long one (65536, or the model's maximum)",
    )
    p.add_argument("--json", action="store_true", help="one JSON object on stdout")

    d = command(
        "demo",
        demo,
        "A skewed set of requests from one shared pool and from a static split of as many bytes.",
    )
    d.add_argument("--model", metavar="DIR", help="default: the tiny checkpoint of this repository")
    d.add_argument(
        "--picture", default="build/occupancy.png", metavar="PNG", help="where it goes (build/occupancy.png)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit code: 0, or 2 for bad input."""
    args = _parser().parse_args(argv)
    try:
        use_compile_cache(args.compile_cache)
        return args.run(args)
    except (ValueError, NotImplementedError, OSError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
