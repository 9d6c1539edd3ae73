"""One decode step of recurrent state, one layer, in place in a pool of 12 GB with the slots of a whole model.

Slots are drawn at random over the pool. Bandwidth counts the bytes of the state, read and written (for the convolution also
its inputs and results, a third as many); the ceiling of an update in place is 4.24 TB/s on an H200
(measured: an elementwise update of a large array). "update" is that, over as many bytes as the step moves, in the same run.
Ours are checked first against float64, and other slots against what they held.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import timing
from pallas_kernels.state_step import StateBlocks, conv_step, delta_step, ssm_step

POOL = 12 << 30
CEILING = 4240  # GB/s
BATCHES = (1, 8, 64, 256)
Inputs = Callable[[Callable[..., jax.Array], int], tuple[jax.Array, ...]]


@dataclass(frozen=True)
class Case:
    """inputs: (normal(*shape), rows) -> the arguments after `blocks`. slot_bytes: of all layers of the model."""

    function: Callable[..., Any]
    pieces: int
    piece: tuple[int, ...]
    slot_bytes: int
    inputs: Inputs
    dtype: str = "float32"
    batches: tuple[int, ...] = BATCHES
    options: tuple[tuple[str, Any], ...] = ()
    peers: bool = False

    @property
    def piece_bytes(self) -> int:
        return int(np.prod(self.piece)) * jnp.dtype(self.dtype).itemsize


def _delta(key_heads: int, heads: int, depth: int, width: int, channels: int) -> Inputs:
    def make(normal, rows):
        shapes = (rows, 2 * key_heads * depth + heads * width), (rows, heads, channels), (rows, heads)
        computed = (normal(*shape).astype(jnp.bfloat16) for shape in shapes)
        return *computed, normal(heads) * 0.1, normal(heads, channels) - 3

    return make


def _ssm(heads: int, head_dim: int, groups: int, width: int) -> Inputs:
    def make(normal, rows):
        x, dt, a = normal(rows, heads, head_dim), jnp.abs(normal(rows, heads)) * 0.1, -jnp.abs(normal(heads))
        return x, dt, a, normal(rows, groups, width), normal(rows, groups, width)

    return make


def _conv(channels: int, kernel: int) -> Inputs:
    def make(normal, rows):
        return normal(rows, channels).astype(jnp.bfloat16), normal(kernel, channels).astype(jnp.bfloat16)

    return make


def _conv_by_taps(buffer, slots, blocks, x, taps, **options):
    """With the weights a tap a row, as XLA keeps them outside of a decode loop."""
    return conv_step(buffer, slots, blocks, x, taps.T, **options)


# Sizes from the models' config.json files; a slot holds 20, 18, 36 and 20 layers. Fewer slots where a pool has not enough.
SQUARE = (("piece", (128, 128)),)
CASES = {
    "KDA, Kimi-Linear-48B": Case(
        delta_step, 32, (128, 128), 43_450_368, _delta(32, 32, 128, 128, 128), options=SQUARE, peers=True
    ),
    "convolution, Kimi-Linear-48B": Case(
        _conv_by_taps, 3, (12288,), 43_450_368, _conv(12288, 4), "bfloat16", (1, 8, 64, 256, 512)
    ),
    "GDN, Qwen3.5-0.8B": Case(
        delta_step, 16, (128, 128), 18 << 20, _delta(16, 16, 128, 128, 1), options=SQUARE
    ),
    "Mamba-2, Falcon-H1-0.5B": Case(ssm_step, 24, (64, 128), 36 * 24 << 15, _ssm(24, 64, 1, 128)),
    "Mamba-2, 48 heads of 64 x 256": Case(ssm_step, 48, (64, 256), 24 * 48 << 16, _ssm(48, 64, 1, 256)),
}


@dataclass(frozen=True)
class Work:
    """A case at one number of rows: what its steps get, and their programs, which compile in threads of their own.

    index: [rows, pieces] numbers of the blocks that a step changes.
    """

    rows: int
    slots: jax.Array
    blocks: StateBlocks
    inputs: tuple[jax.Array, ...]
    index: np.ndarray
    programs: dict[str, Future[Any]]


def prepare(case: Case, rows: int, threads: ThreadPoolExecutor) -> Work:
    size, total = case.piece_bytes, _pool_bytes(case)
    stride = case.slot_bytes // size
    if rows >= POOL // case.slot_bytes:
        # More requests than slots of the whole model: those of one layer in twenty.
        stride //= 20
    slots = np.random.default_rng(rows).choice(np.arange(1, total // (stride * size)), rows, replace=False)
    slots_on_card = jnp.asarray(slots, jnp.int32)
    first = 2 * case.pieces if 3 * case.pieces <= stride else 0
    blocks = StateBlocks(jnp.int32(first), stride, 1, case.dtype)
    keys = iter(jax.random.split(jax.random.key(rows), 16))
    inputs = case.inputs(lambda *shape: jax.random.normal(next(keys), shape, jnp.float32), rows)
    arguments = jax.ShapeDtypeStruct((total,), jnp.uint8), slots_on_card, blocks, *inputs
    programs = {}
    for implementation in ("mosaic", "xla"):
        step = partial(case.function, implementation=implementation, **dict(case.options))
        programs[implementation] = threads.submit(jax.jit(step, donate_argnums=0).lower(*arguments).compile)
    index = slots[:, None] * stride + first + np.arange(case.pieces)
    return Work(rows, slots_on_card, blocks, inputs, index, programs)


def bench(
    name: str, case: Case, work: Work, pool: dict[str, jax.Array], iters: int, peers: Any
) -> dict[str, Any]:
    """pool: holds the buffer under its only name, for each step takes it and leaves another."""
    rows, inputs, index = work.rows, work.inputs, work.index
    beside = np.stack([index[:4, 0] - 1, index[:4, -1] + 1], 1)
    view = partial(_gather, dtype=case.dtype, piece=case.piece)
    candidates: dict[str, Callable[[], Any]] = {}

    def run(step):
        pool["buffer"], out = step(pool["buffer"], work.slots, work.blocks, *inputs)
        return out

    for implementation, program in work.programs.items():
        call = partial(run, program.result())
        before, still = np.asarray(view(pool["buffer"], index[:4])), np.asarray(view(pool["buffer"], beside))
        out = np.asarray(call()[:4])
        after = np.asarray(view(pool["buffer"], index[:4]))
        few = [np.asarray(x[:4] if x.shape[0] == rows and x.ndim > 1 else x) for x in inputs]
        _check(case, few, before, out, after)
        np.testing.assert_array_equal(
            view(pool["buffer"], beside), still, err_msg=f"{implementation}: blocks beside the slots"
        )
        candidates[implementation] = call
    moved = 2 * rows * case.pieces * case.piece_bytes
    if case.function is _conv_by_taps:
        moved += 2 * inputs[0].nbytes
    plain = {"x": jnp.ones(moved // 8, jnp.float32)}

    def in_place():
        plain["x"] = _halve(plain["x"])
        return plain["x"]

    candidates["update"] = in_place
    if peers is not None and case.peers:
        candidates |= _sglang(peers, inputs, case)
    times = timing.flat(timing.measure(candidates, iters, peers))
    for t in times.values():
        t["gb_per_s"] = round(moved / t["us"] / 1e3, 1)
        t["of_ceiling"] = round(t["gb_per_s"] / CEILING, 3)
    return dict(operation="state", case=name, rows=rows, moved_bytes=moved, times=times)


def _sglang(peers, inputs: tuple[jax.Array, ...], case: Case) -> dict[str, Callable[[], Any]]:  # type: ignore[no-untyped-def]
    """SGLang's kernels take the same inputs as ours; their outputs are bfloat16, their state lies in a pool of its own."""
    qkv, f, b, a_log, dt_bias = inputs
    rows, (depth, width) = len(qkv), case.piece
    theirs = [peers.as_torch(x) for x in (qkv, f.reshape(rows, -1), b, a_log, dt_bias.reshape(-1))]
    state = peers.as_torch(jax.random.normal(jax.random.key(1), (rows + 3, case.pieces, width, depth)))
    slots = peers.as_torch(np.random.default_rng(0).permutation(rows + 3)[:rows].astype(np.int32))
    return {
        "SGLang Triton": lambda: peers.sglang_kda_decode(*theirs, state, slots, depth**-0.5),
        "SGLang CUDA": lambda: peers.sglang_kda_decode_cuda(*theirs, state, slots, depth**-0.5),
    }


def _pool_bytes(case: Case) -> int:
    return POOL // case.piece_bytes * case.piece_bytes


@partial(jax.jit, donate_argnums=0)
def _halve(x: jax.Array) -> jax.Array:
    return x * 0.5


@partial(jax.jit, static_argnums=(0, 1))
def _fill(total: int, dtype: str) -> jax.Array:
    """Values of the state's own dtype, about as large as a state's."""
    count = total // jnp.dtype(dtype).itemsize
    noise = (jnp.arange(count, dtype=jnp.uint32) * jnp.uint32(2654435761) >> 8).astype(jnp.float32)
    values = (noise * 2.0**-23 - 1).astype(dtype)
    return jax.lax.bitcast_convert_type(values, jnp.uint8).reshape(-1)


@partial(jax.jit, static_argnames=("dtype", "piece"))
def _gather(buffer: jax.Array, index: jax.Array, *, dtype: str, piece: tuple[int, ...]) -> jax.Array:
    item = jnp.dtype(dtype).itemsize
    values = jax.lax.bitcast_convert_type(buffer.reshape(-1, item), dtype)
    return values.reshape(-1, *piece)[index].astype(jnp.float32)


def _check(
    case: Case, inputs: list[np.ndarray], before: np.ndarray, out: np.ndarray, after: np.ndarray
) -> None:
    """Against the same step in float64."""
    inputs = [x.astype(np.float64) for x in inputs]
    state = before.astype(np.float64)
    if case.function is delta_step:
        qkv, f, b, a_log, dt_bias = inputs
        g, beta = -np.exp(a_log)[:, None] * np.log1p(np.exp(f + dt_bias)), 1 / (1 + np.exp(-b))
        (rows, heads), (depth, width) = b.shape, case.piece
        v = qkv[:, -heads * width :].reshape(rows, heads, width)
        q, k = qkv[:, : -heads * width].reshape(rows, 2, -1, depth).swapaxes(0, 1)
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        q, k = (np.repeat(x, heads // x.shape[1], 1) for x in (q * depth**-0.5, k))
        state = state * np.exp(g)[..., None]
        delta = (v - np.einsum("rhkv,rhk->rhv", state, k)) * beta[..., None]
        state = state + k[..., None] * delta[:, :, None]
        expected = np.einsum("rhkv,rhk->rhv", state, q)
    elif case.function is ssm_step:
        x, dt, a, b, c = inputs
        b, c = (np.repeat(y, x.shape[1] // y.shape[1], 1) for y in (b, c))
        state = state * np.exp(dt * a)[..., None, None] + (dt[..., None] * x)[..., None] * b[:, :, None]
        expected = np.einsum("rhpn,rhn->rhp", state, c)
    else:
        x, taps = inputs
        window = np.concatenate([state, x[:, None]], 1)
        y = np.einsum("rkc,kc->rc", window, taps)
        expected, state = y / (1 + np.exp(-y)), window[:, 1:]
    limit = 1e-6 if case.dtype == "float32" else 4e-3
    for what, found, wanted in (("out", out, expected), ("state", after, state)):
        error = np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(wanted)
        if not error < limit:
            raise AssertionError(f"{case.function.__name__}: {what} is off by {error:.1e}")


def main(argv: list[str]) -> None:
    parser = timing.arguments(__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=list(CASES), help="by the start of their names")
    options = parser.parse_args(argv)
    peers = timing.load_peers(options.peers)
    rows = []
    for name, case in CASES.items():
        if not name.startswith(tuple(options.cases)):
            continue
        with ThreadPoolExecutor() as threads:
            works = [prepare(case, batch, threads) for batch in case.batches]
        pool = {"buffer": _fill(_pool_bytes(case), case.dtype)}
        for work in works:
            rows.append(bench(name, case, work, pool, options.iters, peers))
            print(f"{name}, {work.rows} rows, {rows[-1]['moved_bytes'] / 1e6:.1f} MB")
            for candidate, t in rows[-1]["times"].items():
                print(
                    f"    {candidate:<22}{t['us']:>9.2f} us  {t['gb_per_s']:>7.0f} GB/s  {t['of_ceiling']:.3f}  "
                    f"{t['launches']} launches",
                    flush=True,
                )
        timing.write(options.json, timing.record("state", rows, peers))  # a run that is cut short keeps these


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
