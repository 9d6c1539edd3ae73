"""Paged MLA decode in bf16: against the floor, and against FlashMLA and SGLang's Triton kernel where they are installed.

Rows of 576 (512 + 64) in pages of 64 tokens, placed at random; every unused slot is NaN and the tails of the tables hold
an absurd id. Each candidate is checked against float32 before it is timed. The floor is the larger of bytes / 4.35 TB/s
and FLOPs / 790 TFLOP/s, the rates that a copy and a large matrix product reach on an H200; bytes are the KV rows, q and
out, FLOPs 2 * heads * (576 + 512) a token. A name after a shape is a model that has it: its heads on one GPU.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import timing
from pallas_kernels.mla_decode import mla_decode
from pallas_kernels.read_source import PageTable, VirtualPages

PAGE_SIZE, ROW, VALUE = 64, 576, 512
SM_SCALE = 192**-0.5
BYTES_PER_S, FLOPS_PER_S = 4.35e12, 790e12
ABSURD = 2**31 - 8
OPTIONS = dict(kv_dtype=jnp.bfloat16, row_width=ROW, v_width=VALUE, sm_scale=SM_SCALE)
# (rows, heads, context, lengths drawn from [context / 4, context], what has this shape)
SHAPES = [
    (1, 32, 8192, False, "Kimi-Linear-48B"),
    (1, 32, 131072, False, "Kimi-Linear-48B"),
    (8, 32, 8192, False, "Kimi-Linear-48B"),
    (8, 32, 32768, False, "Kimi-Linear-48B"),
    (32, 32, 8192, False, "Kimi-Linear-48B"),
    (64, 32, 8192, True, "Kimi-Linear-48B"),
    (128, 32, 4096, False, "Kimi-Linear-48B"),
    (128, 32, 8192, True, "Kimi-Linear-48B"),
    (256, 32, 8192, True, "Kimi-Linear-48B"),
    (64, 16, 8192, True, "DeepSeek-V3 over 8 GPUs; DeepSeek-V2-Lite"),
    (64, 64, 8192, True, "Kimi-K2"),
    (128, 128, 4096, False, "DeepSeek-V3"),
    (32, 128, 8192, True, "DeepSeek-V3"),
    (1, 128, 131072, False, "DeepSeek-V3"),
]
# Beside the reference shapes, so that nothing is tuned to them alone.
MORE_SHAPES = [
    (4, 16, 16384, False, "DeepSeek-V2-Lite"),
    (16, 32, 65536, True, "Kimi-Linear-48B"),
    (48, 24, 6000, True, ""),
    (200, 32, 3000, True, "Kimi-Linear-48B"),
    (24, 64, 30000, True, "Kimi-K2"),
    (100, 128, 5000, True, "DeepSeek-V3"),
]


@dataclass(frozen=True)
class Batch:
    """A decode batch on the device. `pages` are physical; virtual pages name them through `v2p`."""

    q: jax.Array  # bf16 [rows, 1, heads, 576]
    pool: jax.Array  # uint8
    table: jax.Array  # int32 [rows, width]: entries of one layer a page
    virtual: VirtualPages
    lengths: np.ndarray
    entries: np.ndarray

    @staticmethod
    def draw(rows: int, heads: int, context: int, varied: bool, seed: int = 0) -> "Batch":
        rng = np.random.default_rng(seed)
        lengths = rng.integers(context // 4, context + 1, rows) if varied else np.full(rows, context)
        columns = -(-lengths // PAGE_SIZE)
        total = int(columns.sum())
        num_pages = total + total // 10 + 2
        order = (rng.permutation(num_pages - 1) + 1).astype(np.int32)
        entries = np.full((rows, int(columns.max()) + 1), ABSURD, np.int32)
        slots = np.full(num_pages, 0, np.int32)  # live rows of each page
        v2p = np.concatenate([[0], rng.permutation(num_pages - 1) + 1, [-1]]).astype(np.int32)
        p2v = np.argsort(v2p[:-1]).astype(np.int32)
        virtual = np.full_like(entries, -7)
        taken = 0
        for b in range(rows):
            mine = order[taken : taken + columns[b]]
            taken += columns[b]
            entries[b, : columns[b]], virtual[b, : columns[b]] = mine, p2v[mine]
            slots[mine] = PAGE_SIZE
            slots[mine[-1]] = lengths[b] - (columns[b] - 1) * PAGE_SIZE
        pool = _draw_pool(jax.random.key(seed), jnp.asarray(slots))
        q = jax.random.normal(jax.random.key(seed + 1), (rows, 1, heads, ROW), jnp.bfloat16)
        kv_start, kv_end = jnp.zeros(rows, jnp.int32), jnp.asarray(lengths, jnp.int32)
        row_ids = rng.permutation(rows).astype(np.int32)
        requests = np.empty_like(virtual)
        requests[row_ids] = virtual
        source = VirtualPages(
            jnp.asarray(requests), jnp.asarray(row_ids), jnp.asarray(v2p), kv_start, kv_end,
            page_size=PAGE_SIZE, blocks_per_page=1,
        )  # fmt: skip
        return Batch(q, pool, jnp.asarray(entries), source, lengths, entries)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def kv_bytes(self) -> int:
        return 2 * ROW * self.tokens

    @property
    def bytes(self) -> int:
        return self.kv_bytes + 2 * self.q.shape[0] * self.q.shape[2] * (ROW + VALUE)

    @property
    def flops(self) -> int:
        return 2 * self.tokens * self.q.shape[2] * (ROW + VALUE)

    @property
    def floor_us(self) -> float:
        return max(self.bytes / BYTES_PER_S, self.flops / FLOPS_PER_S) * 1e6

    def check(self, name: str, out: Any) -> float:
        """Largest relative error (norm of the difference over the norm) among some rows against float32 attention."""
        rows = len(self.lengths)
        worst = 0.0
        for b in sorted({0, rows // 3, rows // 2, rows - 1}):
            expected = _reference_row(self.q[b, 0], self.pool, self.table[b], int(self.lengths[b]))
            got = jnp.asarray(np.asarray(out[b], np.float32).reshape(expected.shape))
            worst = max(worst, float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected)))
        if not worst <= 3e-3:
            raise AssertionError(f"{name}: relative error {worst:.3g} above 3e-3")
        return worst


@jax.jit
def _draw_pool(key, slots):
    """uint8 pool of blocks [64, 576] bf16, normal values in the first slots[page] rows of each page and NaN elsewhere."""
    value = jax.random.normal(key, (len(slots), PAGE_SIZE, ROW), jnp.bfloat16)
    live = jnp.arange(PAGE_SIZE) < slots[:, None]
    value = jnp.where(live[..., None], value, jnp.nan)
    return jax.lax.bitcast_convert_type(value, jnp.uint8).reshape(-1)


@jax.jit
def _reference_row(q, pool, entries, length):
    """f32 attention of one row. The length is a run-time value, so that a batch compiles one program."""
    blocks = jax.lax.bitcast_convert_type(pool.reshape(-1, 2), jnp.bfloat16).reshape(-1, PAGE_SIZE, ROW)
    kv = blocks.at[entries].get(mode="clip").reshape(-1, ROW)
    live = jnp.arange(len(kv)) < length
    kv = jnp.where(live[:, None], kv, 0).astype(jnp.float32)
    dot = partial(jnp.dot, precision=jax.lax.Precision.HIGHEST)
    scores = jnp.where(live, dot(q.astype(jnp.float32), kv.T) * SM_SCALE, -jnp.inf)
    return dot(jax.nn.softmax(scores, axis=-1), kv[:, :VALUE])


def candidates(batch: Batch, peers: Any) -> dict[str, Callable[[], Any]]:
    """Name -> call that launches the kernels of one decode and returns its output first."""
    table = PageTable(batch.table, batch.virtual.kv_start, batch.virtual.kv_end, page_size=PAGE_SIZE)
    calls: dict[str, Callable[[], Any]] = {}
    for name, source in (("ours", table), ("ours, virtual ids", batch.virtual)):
        run = jax.jit(
            lambda q, pool, source: mla_decode(q, pool, source, 0, implementation="mosaic", **OPTIONS)
        )
        calls[name] = partial(run, batch.q, batch.pool, source)
    if peers is None:
        return calls
    torch = importlib.import_module("torch")

    q, lengths, entries = (peers.as_torch(x) for x in (batch.q, table.kv_end, batch.table))
    cache = peers.as_torch(batch.pool).view(torch.bfloat16).view(-1, PAGE_SIZE, ROW)
    plan = peers.flash_mla_metadata(lengths, q.shape[2])
    calls["FlashMLA"] = lambda: peers.flash_mla(q, cache, entries, lengths, SM_SCALE, plan)
    calls["FlashMLA schedule"] = lambda: peers.flash_mla_metadata(lengths, q.shape[2], plan=plan)
    position = [np.arange(length) for length in batch.lengths]
    ids = np.concatenate(
        [batch.entries[b, p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for b, p in enumerate(position)]
    )
    indptr = np.concatenate([[0], np.cumsum(batch.lengths)]).astype(np.int32)
    ids, indptr = peers.as_torch(ids.astype(np.int64)), peers.as_torch(indptr)
    splits = peers.sglang_mla_plan(lengths, q.shape[2])
    calls["SGLang Triton"] = lambda: (
        peers.sglang_mla_decode(q[:, 0], cache, indptr, ids, lengths, SM_SCALE, splits),
    )
    return calls


def bench(shape: tuple[Any, ...], iters: int, peers: Any) -> dict[str, Any]:
    rows, heads, context, varied, model = shape
    batch = Batch.draw(rows, heads, context, varied)
    calls = candidates(batch, peers)
    errors = {}
    for name, call in calls.items():
        if name != "FlashMLA schedule":
            out = call()[0]
            errors[name] = batch.check(name, out if isinstance(out, jax.Array) else out.float().cpu())
    times = timing.flat(timing.measure(calls, iters, peers))
    for name, t in times.items():
        if name in errors:
            t["relative_error"] = float(f"{errors[name]:.2e}")
            t["GB/s"] = round(batch.bytes / t["us"] / 1e3)
            t["TFLOP/s"] = round(batch.flops / t["us"] / 1e6)
            t["over_floor"] = round(t["us"] / batch.floor_us, 3)
    return dict(
        rows=rows, heads=heads, context=context, varied=varied, model=model, kv_bytes=batch.kv_bytes,
        floor_us=round(batch.floor_us, 2), times=times,
    )  # fmt: skip


def show(row: dict[str, Any]) -> None:
    varied = " varied" if row["varied"] else ""
    print(
        f"{row['rows']} x {row['heads']} heads x {row['context']}{varied}, floor {row['floor_us']} us  {row['model']}"
    )
    ours = row["times"]["ours"]["us"]
    for name, t in row["times"].items():
        rates = (
            f"{t['GB/s']:>6} GB/s {t['TFLOP/s']:>4} TFLOP/s {t['over_floor']:>6.2f} x floor"
            if "GB/s" in t
            else ""
        )
        print(f"    {name:<18}{t['us']:>9.2f} us  ours / it {ours / t['us']:.3f} {rates}", flush=True)


def main(argv: list[str]) -> None:
    parser = timing.arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--more", action="store_true", help="the shapes beside the reference table instead of it"
    )
    parser.add_argument("--only", type=int, nargs="*", help="indices of shapes (default: all)")
    options = parser.parse_args(argv)
    peers = timing.load_peers(options.peers)
    shapes = MORE_SHAPES if options.more else SHAPES
    rows = []
    for i in options.only if options.only is not None else range(len(shapes)):
        rows.append(bench(shapes[i], options.iters, peers))
        show(rows[-1])
    timing.write(options.json, timing.record("mla", rows, peers))
