"""MLA attention of new tokens: among themselves, and to a cached prefix.

TFLOP/s count the causal products alone, 2 * (192 + 128) * length^2 / 2 for each row and head: no padding, no masked half
of a diagonal tile. cuDNN takes V no narrower than K here, so V is padded to 192. Every candidate is checked against dense
f32 attention of sampled rows and heads first.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import timing
from pallas_kernels.mla_decode import MAX_DRAFT
from pallas_kernels.mla_prefill import Rows, mla_extend, mla_prefill
from pallas_kernels.read_source import PageTable

NOPE, ROPE, V_WIDTH, RANK = 128, 64, 128, 512
SCALE = (NOPE + ROPE) ** -0.5
PAGE = 64
TOLERANCE = 4e-3
_TORCH = Lock()  # its choice of backend is a global setting

# rows, width of a right-padded row, heads, lengths drawn from [width / 4, width]
SHAPES = [
    (16, 4096, 32, False),
    (16, 4096, 32, True),
    (1, 4096, 32, False),
    (1, 16384, 32, False),
    (64, 1024, 32, False),
    (8, 2048, 128, False),
]
# rows, new tokens of each, cached tokens of each, heads
EXTENSIONS = [(16, 8, 8192, 32), (16, 64, 8192, 32), (16, 256, 8192, 32)]


def draw(rows: int, width: int, heads: int, ragged: bool, seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    keys = jax.random.split(jax.random.key(seed), 4)
    tokens = rows * width
    normal = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)
    length = rng.integers(width // 4, width + 1, rows) if ragged else np.full(rows, width)
    return dict(
        q=normal(keys[0], tokens, heads, NOPE + ROPE),
        k_nope=normal(keys[1], tokens, heads, NOPE),
        k_pe=normal(keys[2], tokens, ROPE),
        v=normal(keys[3], tokens, heads, V_WIDTH),
        start=jnp.arange(rows, dtype=jnp.int32) * width,
        length=jnp.asarray(length, jnp.int32),
    )


@jax.jit
def dense(q, k, v):
    """One row and head in f32: q, k [n, 192], v [n, 128]."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    s = jnp.einsum("qd,kd->qk", q * SCALE, k, precision="highest")
    p = jax.nn.softmax(jnp.where(jnp.tri(len(q), dtype=bool), s, -jnp.inf))
    return jnp.einsum("qk,kd->qd", p, v, precision="highest")


def check(name: str, out: Any, x: dict[str, jax.Array]) -> float:
    """Largest relative error over sampled rows and heads. out: [tokens, heads, >= 128]."""
    worst = 0.0
    for b, h in {(0, 0), (len(x["length"]) - 1, x["q"].shape[1] - 1)}:
        first = int(x["start"][b])
        at = slice(first, first + int(x["length"][b]))
        k = jnp.concatenate([x["k_nope"][at, h], x["k_pe"][at]], axis=-1)
        want = dense(x["q"][at, h], k, x["v"][at, h])
        got = jnp.asarray(out[at, h, :V_WIDTH]).astype(jnp.float32)
        worst = max(worst, float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)))
    if not worst <= TOLERANCE:
        raise AssertionError(f"{name}: relative error {worst:.3g} is over {TOLERANCE}")
    return worst


def cudnn_call(x: dict[str, jax.Array], rows: int) -> Callable[[], jax.Array]:
    """jax.nn.dot_product_attention by cuDNN on [rows, width, heads, 192]; K and V are made beforehand."""
    shape = lambda a: a.reshape(rows, -1, *a.shape[1:])
    pe = jnp.broadcast_to(x["k_pe"][:, None], (*x["k_nope"].shape[:2], ROPE))
    k = shape(jnp.concatenate([x["k_nope"], pe], axis=-1))
    v = shape(jnp.pad(x["v"], ((0, 0), (0, 0), (0, NOPE + ROPE - V_WIDTH))))
    attention = jax.jit(
        partial(jax.nn.dot_product_attention, scale=SCALE, is_causal=True, implementation="cudnn")
    )
    lengths = x["length"]
    if int(lengths.min()) == k.shape[1]:
        return partial(attention, shape(x["q"]), k, v)
    return partial(attention, shape(x["q"]), k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths)


def torch_calls(peers: Any, x: dict[str, jax.Array], rows: int) -> dict[str, Callable[[], Any]]:
    """torch's scaled_dot_product_attention on [rows, heads, width, ...], backends that take these widths."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    pe = jnp.broadcast_to(x["k_pe"][:, None], (*x["k_nope"].shape[:2], ROPE))
    arrays = [x["q"], jnp.concatenate([x["k_nope"], pe], axis=-1), x["v"]]
    q, k, v = (peers.as_torch(a).view(rows, -1, *a.shape[1:]).transpose(1, 2) for a in arrays)
    calls = {}
    for name, backend in (
        ("torch cudnn", SDPBackend.CUDNN_ATTENTION),
        ("torch flash", SDPBackend.FLASH_ATTENTION),
    ):

        def call(backend=backend):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)

        try:
            call()
        except RuntimeError as reason:
            print(f"    {name}: not available for these widths ({str(reason).splitlines()[0][:80]})")
            continue
        calls[name] = call
    return calls


@dataclass(frozen=True)
class Problem:
    """Candidates that were checked and compiled, and what a row of the results says about them."""

    candidates: dict[str, Callable[[], Any]]
    row: dict[str, Any]
    flops: float | None = None
    errors: dict[str, float] = field(default_factory=dict)

    def measure(self, iters: int, peers: Any) -> dict[str, Any]:
        times = timing.flat(timing.measure(self.candidates, iters, peers))
        for name, t in times.items():
            if self.flops is not None:
                t["tflops"] = round(self.flops / t["us"] / 1e6, 1)
            if name in self.errors:
                t["error"] = float(f"{self.errors[name]:.3g}")
        return {**self.row, "times": times}


def prepare_prefill(shape: tuple[int, int, int, bool], peers: Any) -> Problem:
    rows, width, heads, ragged = shape
    x = draw(*shape)
    call = jax.jit(partial(mla_prefill, sm_scale=SCALE, implementation="mosaic"))
    candidates = {
        "mosaic": partial(call, x["q"], x["k_nope"], x["k_pe"], x["v"], Rows(x["start"], x["length"])),
        "cudnn": cudnn_call(x, rows),
    }
    out = candidates["cudnn"]()
    errors = {"mosaic": check("mosaic", candidates["mosaic"]()[0], x)}
    errors["cudnn"] = check("cudnn", out.reshape(-1, *out.shape[2:]), x)
    if peers is not None and not ragged:
        with _TORCH:
            for name, theirs in torch_calls(peers, x, rows).items():
                out = peers.as_jax(theirs().transpose(1, 2).contiguous())
                errors[name] = check(name, out.reshape(-1, *out.shape[2:]), x)
                candidates[name] = theirs
    lengths = np.asarray(x["length"], np.float64)
    flops = 2 * (NOPE + ROPE + V_WIDTH) * float((lengths**2).sum()) / 2 * heads
    row = dict(operation="prefill", rows=rows, width=width, heads=heads, new_tokens=int(lengths.sum()))
    return Problem(candidates, row, flops, errors)


def prepare_extend(shape: tuple[int, int, int, int], peers: Any) -> Problem:
    """Both forms of reading the prefix, on the same problem; each must agree with the other. The absorbed one is timed where
    a kernel decodes that many queries: beyond, `mla_decode` is XLA's on a GPU too, and nobody takes it."""
    rows, new, cached, heads = shape
    x = draw(rows, new, heads, False)
    rng = np.random.default_rng(1)
    columns = -(-(cached + new) // PAGE)
    blocks = rows * columns + 1
    pool = jax.random.normal(jax.random.key(7), (blocks, PAGE, RANK + ROPE), jnp.bfloat16)
    buffer = jax.lax.bitcast_convert_type(pool, jnp.uint8).reshape(-1)
    table = rng.permutation(np.arange(1, blocks, dtype=np.int32)).reshape(rows, columns)
    source = PageTable(
        jnp.asarray(table), jnp.zeros(rows, jnp.int32), jnp.full(rows, cached, jnp.int32), page_size=PAGE
    )
    # Unit-variance keys and values, as in `draw`.
    weights = [
        (jax.random.normal(jax.random.key(8 + i), (heads, 128, RANK)) * RANK**-0.5).astype(jnp.bfloat16)
        for i in range(2)
    ]
    new_rows = Rows(x["start"], x["length"])
    candidates: dict[str, Callable[[], Any]] = {}
    outs = {}
    for form in ("absorbed", "expanded"):
        call = jax.jit(partial(
            mla_extend, max_new=new, kv_dtype=jnp.bfloat16, row_width=RANK + ROPE, sm_scale=SCALE, prefix_form=form
        ))  # fmt: skip
        arrays = x["q"], x["k_nope"], x["k_pe"], x["v"], new_rows, buffer, source, jnp.int32(0), *weights
        run = partial(call, *arrays)
        outs[form] = run()[0].astype(jnp.float32)
        if form == "expanded" or new <= MAX_DRAFT:
            candidates[form] = run
    apart = float(jnp.linalg.norm(outs["absorbed"] - outs["expanded"]) / jnp.linalg.norm(outs["expanded"]))
    if not apart <= 3e-2:
        raise AssertionError(f"the two forms differ by {apart:.3g}")
    row = dict(
        operation="extend", rows=rows, new=new, cached=cached, heads=heads, apart=float(f"{apart:.3g}")
    )
    return Problem(candidates, row)


def prepare(quick: bool, peers: Any) -> list[Future[Problem]]:
    """All problems, compiled side by side."""
    jobs = [(prepare_prefill, shape) for shape in SHAPES] + [(prepare_extend, shape) for shape in EXTENSIONS]
    if quick:
        jobs = [jobs[0], jobs[len(SHAPES)]]
    with ThreadPoolExecutor(8) as pool:
        return [pool.submit(job, shape, peers) for job, shape in jobs]


def show(row: dict[str, Any]) -> None:
    print(row["operation"], " ".join(f"{k} {v}" for k, v in row.items() if k not in ("operation", "times")))
    for name, t in row["times"].items():
        rate = f"{t['tflops']:>8.1f} TFLOP/s" if "tflops" in t else ""
        error = f"  error {t['error']:.1e}" if "error" in t else ""
        print(f"    {name:<14}{t['us']:>10.1f} us{rate}{error}  {t['launches']} launches", flush=True)


def main(argv: list[str]) -> None:
    parser = timing.arguments(__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the first shape of each kind alone")
    options = parser.parse_args(argv)
    peers = timing.load_peers(options.peers)
    rows: list[dict[str, Any]] = []
    failed = 0
    for problem in prepare(options.quick, peers):
        if reason := problem.exception():
            failed += 1
            print(f"FAILED {type(reason).__name__}: {str(reason)[:1000]}", flush=True)
            continue
        rows.append(problem.result().measure(options.iters, peers))
        show(rows[-1])
        timing.write(options.json, timing.record("mla_prefill", rows, peers), quiet=True)
    if failed:
        raise SystemExit(f"{failed} problems failed, see above")
