"""Paged GQA decode: against the rate of DRAM, torch's SDPA over a dense copy and SGLang's Triton kernel.

K and V of one layer in pages of 64 tokens placed at random; every unused slot is NaN and the tails of the tables hold an
absurd id. Each candidate is checked against float32 before it is timed. The floor is KV bytes / 4.35 TB/s, the rate that a
copy reaches on an H200. SDPA reads a dense copy of the same KV, [rows, kv_heads, context, head_dim]: no pages, no ids. It
and SGLang's kernel take part where the module `peers` offers them. A name after a shape is a model that has it.

The candidates named e4m3 read rows of that dtype with a scale for each token and head, in pages that lie alike, and are
checked against the values that those rows stand for; their bytes count the scales. All others are bf16.
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
from pallas_kernels.gqa_decode import KVScales, gqa_decode
from pallas_kernels.read_source import PageTable, TokenStream, VirtualPages

PAGE_SIZE = 64
BYTES_PER_S = 4.35e12
ABSURD = 2**31 - 8
DELIVERIES = {
    "mosaic": ("", ", virtual ids", ", stream"),
    "triton": ("", ", stream"),
    "xla": ("",),
}  # that are timed
E4M3 = jnp.dtype(jnp.float8_e4m3fn)
LARGEST = 448.0  # finite value of it
# (rows, heads, kv_heads, head_dim, context, lengths drawn from [context / 4, context], what has this shape)
SHAPES = [
    (64, 32, 8, 128, 8192, False, "Llama-3.1-8B, Qwen3-8B"),
    (8, 32, 8, 128, 32768, False, "Llama-3.1-8B, Qwen3-8B"),
    (64, 64, 8, 64, 8192, False, "gpt-oss"),
    (128, 64, 8, 128, 4096, False, "Llama-3.1-70B, Qwen3-32B"),
    (32, 8, 4, 256, 8192, False, ""),
    (1, 32, 8, 128, 131072, False, "Llama-3.1-8B, Qwen3-8B"),
]
# Beside the reference shapes, so that nothing is tuned to them alone.
MORE_SHAPES = [
    (64, 32, 8, 128, 8192, True, "Llama-3.1-8B, Qwen3-8B"),
    (200, 64, 8, 64, 3000, True, "gpt-oss"),
    (16, 16, 2, 256, 16384, True, "Qwen3.5-0.8B has 8 and 2"),
    (32, 8, 1, 512, 8192, False, "gemma-4 E2B, full layers"),
    (48, 12, 2, 128, 6000, True, "Falcon-H1-1.5B has 8 and 2"),
    (24, 16, 16, 96, 4000, True, "Phi-3-mini has 32 and 32"),
]


@dataclass(frozen=True)
class Batch:
    """A decode batch on the device. The table's pages are physical; virtual ones name them through `v2p`."""

    q: jax.Array  # bf16 [rows, 1, heads, head_dim]
    pool: (
        jax.Array
    )  # uint8: pages of blocks K and V, and of e4m3 a third one, which begins with the scales of both
    table: PageTable
    stream: TokenStream
    virtual: VirtualPages
    kv_heads: int
    lengths: np.ndarray
    kv_dtype: Any

    @staticmethod
    def draw(
        rows: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        context: int,
        varied: bool,
        kv_dtype: Any = jnp.bfloat16,
        seed: int = 0,
    ) -> "Batch":
        """Batches of one seed and both dtypes differ in nothing but the pool and the pages' multiplier."""
        blocks = 3 if kv_dtype == E4M3 else 2
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
        taken, ids = 0, []
        for b in range(rows):
            mine = order[taken : taken + columns[b]]
            taken += columns[b]
            entries[b, : columns[b]], virtual[b, : columns[b]] = blocks * mine, p2v[mine]
            slots[mine] = PAGE_SIZE
            slots[mine[-1]] = lengths[b] - (columns[b] - 1) * PAGE_SIZE
            position = np.arange(lengths[b])
            ids.append(entries[b, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE)
        draw = _draw_e4m3_pool if kv_dtype == E4M3 else _draw_pool
        pool = draw(jax.random.key(seed), jnp.asarray(slots), kv_heads=kv_heads, head_dim=head_dim)
        q = jax.random.normal(jax.random.key(seed + 1), (rows, 1, heads, head_dim), jnp.bfloat16)
        bounds = jnp.zeros(rows, jnp.int32), jnp.asarray(lengths, jnp.int32)
        row_ids = rng.permutation(rows).astype(np.int32)
        requests = np.empty_like(virtual)
        requests[row_ids] = virtual
        maps = jnp.asarray(requests), jnp.asarray(row_ids), jnp.asarray(v2p)
        indptr = jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)
        return Batch(
            q,
            pool,
            PageTable(jnp.asarray(entries), *bounds, page_size=PAGE_SIZE),
            TokenStream(jnp.asarray(np.concatenate(ids), jnp.int32), indptr, *bounds, page_size=PAGE_SIZE),
            VirtualPages(*maps, *bounds, page_size=PAGE_SIZE, blocks_per_page=blocks),
            kv_heads,
            lengths,
            kv_dtype,
        )

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

    @property
    def kv_bytes(self) -> int:
        head = self.head_dim + 4 if self.kv_dtype == E4M3 else 2 * self.head_dim
        return 2 * self.kv_heads * head * int(self.lengths.sum())

    @property
    def floor_us(self) -> float:
        return self.kv_bytes / BYTES_PER_S * 1e6

    def row(self, b: int) -> jax.Array:
        """K and V of one row, bf16 or what e4m3 stands for in f32, [2, columns * page_size, kv_heads, head_dim], zeros past
        its length."""
        read = _e4m3_row if self.kv_dtype == E4M3 else _row
        return read(self.pool, self.table.table[b], self.table.kv_end[b], self.kv_heads, self.head_dim)

    def check(self, name: str, out: Any) -> float:
        """Largest relative error (norm of the difference over the norm) among some rows against float32 attention."""
        rows = len(self.lengths)
        worst = 0.0
        for b in sorted({0, rows // 3, rows // 2, rows - 1}):
            expected = _reference_row(self.q[b, 0], self.row(b), self.table.kv_end[b])
            got = jnp.asarray(np.asarray(out[b], np.float32).reshape(expected.shape))
            worst = max(worst, float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected)))
        if not worst <= 4e-3:
            raise AssertionError(f"{name}: relative error {worst:.3g} above 4e-3")
        return worst


@partial(jax.jit, static_argnames=("kv_heads", "head_dim"))
def _draw_pool(key, slots, kv_heads, head_dim):
    """uint8 pool of pages [2, 64, kv_heads, head_dim] bf16, normal values in the first slots[page] rows and NaN elsewhere."""
    value = jax.random.normal(key, (len(slots), 2, PAGE_SIZE, kv_heads * head_dim), jnp.bfloat16)
    live = jnp.arange(PAGE_SIZE) < slots[:, None, None]
    value = jnp.where(live[..., None], value, jnp.nan)
    return jax.lax.bitcast_convert_type(value, jnp.uint8).reshape(-1)


@partial(jax.jit, static_argnames=("kv_heads", "head_dim"))
def _draw_e4m3_pool(key, slots, kv_heads, head_dim):
    """The same in e4m3, pages [3, 64, kv_heads, head_dim]: scaled so that the largest value of a head becomes 448; the third
    block begins with the scales, f32 [2, 64, kv_heads], and is NaN else."""
    value = jax.random.normal(key, (len(slots), 2, PAGE_SIZE, kv_heads, head_dim), jnp.bfloat16)
    live = jnp.arange(PAGE_SIZE)[:, None] < slots[:, None, None, None]
    scale = jnp.abs(value).max(axis=-1).astype(jnp.float32) / LARGEST
    rows = jnp.where(live[..., None], value / scale[..., None], jnp.nan).astype(E4M3)
    rows = jax.lax.bitcast_convert_type(rows, jnp.uint8).reshape(len(slots), 2, -1)
    scale = jax.lax.bitcast_convert_type(jnp.where(live, scale, jnp.nan), jnp.uint8).reshape(len(slots), -1)
    rest = jnp.full((len(slots), rows.shape[2] - scale.shape[1]), 0xFF, jnp.uint8)
    return jnp.concatenate([rows.reshape(len(slots), -1), scale, rest], axis=1).reshape(-1)


@partial(jax.jit, static_argnames=("kv_heads", "head_dim"))
def _row(pool, entries, length, kv_heads, head_dim):
    pages = jax.lax.bitcast_convert_type(pool.reshape(-1, 2), jnp.bfloat16)
    pages = pages.reshape(-1, 2, PAGE_SIZE, kv_heads, head_dim)
    return _in_order(pages.at[entries // 2].get(mode="clip"), length)


@partial(jax.jit, static_argnames=("kv_heads", "head_dim"))
def _e4m3_row(pool, entries, length, kv_heads, head_dim):
    pages = pool.reshape(-1, 3, PAGE_SIZE * kv_heads * head_dim).at[entries // 3].get(mode="clip")
    scale = pages[:, 2, : 8 * PAGE_SIZE * kv_heads].reshape(len(entries), 2, PAGE_SIZE, kv_heads, 4)
    rows = jax.lax.bitcast_convert_type(pages[:, :2], E4M3).astype(jnp.float32)
    rows = rows.reshape(len(entries), 2, PAGE_SIZE, kv_heads, head_dim)
    return _in_order(rows * jax.lax.bitcast_convert_type(scale, jnp.float32)[..., None], length)


def _in_order(pages, length):
    """[2, positions, kv_heads, head_dim] of the pages of a row, zeros past its length."""
    kv = jnp.moveaxis(pages, 1, 0).reshape(2, -1, *pages.shape[3:])
    return jnp.where((jnp.arange(kv.shape[1]) < length)[:, None, None], kv, 0)


@jax.jit
def _reference_row(q, kv, length):
    """f32 attention of one row. The length is a run-time value, so that a batch compiles one program."""
    k, v = kv.astype(jnp.float32)
    q = q.astype(jnp.float32).reshape(k.shape[1], -1, k.shape[2])
    dot = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    scores = dot("hgd,khd->hgk", q, k) * k.shape[2] ** -0.5
    scores = jnp.where(jnp.arange(k.shape[0]) < length, scores, -jnp.inf)
    return dot("hgk,khd->hgd", jax.nn.softmax(scores, axis=-1), v)


def candidates(batch: Batch, peers: Any, names: list[str]) -> dict[str, Callable[[], Any]]:
    """Name -> call that launches the kernels of one decode of a bf16 batch and returns its output first."""
    calls = {
        implementation + delivery: _ours(batch, implementation, delivery)
        for implementation in names
        for delivery in DELIVERIES[implementation]
    }
    if peers is None:
        return calls
    torch = importlib.import_module("torch")
    scale, q = batch.head_dim**-0.5, peers.as_torch(batch.q)
    if len(set(batch.lengths.tolist())) == 1:
        rows = len(batch.lengths)
        k, v = (
            torch.empty(
                (rows, batch.kv_heads, int(batch.lengths[0]), batch.head_dim), dtype=q.dtype, device="cuda"
            )
            for _ in range(2)
        )
        for b in range(rows):
            dense = peers.as_torch(batch.row(b))[:, : batch.lengths[b]].transpose(1, 2)
            k[b], v[b] = dense[0], dense[1]
        query = q.transpose(1, 2)
        calls["torch SDPA, dense"] = lambda: (peers.torch_sdpa(query, k, v, scale),)
    lengths, indptr = (peers.as_torch(x) for x in (batch.table.kv_end, batch.stream.indptr))
    pages = peers.as_torch(batch.pool).view(torch.bfloat16)
    pages = pages.view(-1, PAGE_SIZE, batch.kv_heads, batch.head_dim)
    ids = peers.as_torch(batch.stream.ids).long()
    plan = peers.sglang_gqa_plan(lengths, q.shape[2], batch.kv_heads)
    calls["SGLang Triton"] = lambda: (
        peers.sglang_gqa_decode(q[:, 0], pages, indptr, ids, lengths, scale, plan),
    )
    return calls


def _ours(batch: Batch, implementation: str, delivery: str = "") -> Callable[[], Any]:
    scales = None
    if batch.kv_dtype == E4M3:
        ratio = batch.head_dim // 4  # blocks of scales in one of rows
        scales = KVScales(2 * ratio, 2 * ratio + 1, ratio)
    run = jax.jit(
        partial(
            gqa_decode,
            kv_dtype=batch.kv_dtype,
            num_kv_heads=batch.kv_heads,
            sm_scale=batch.head_dim**-0.5,
            scales=scales,
            implementation=implementation,
        )
    )
    source = {"": batch.table, ", virtual ids": batch.virtual, ", stream": batch.stream}[delivery]
    return partial(run, batch.q, batch.pool, source, jnp.int32(0), jnp.int32(1))


def bench(
    shape: tuple[Any, ...], iters: int, peers: Any, names: list[str], e4m3: bool = True
) -> dict[str, Any]:
    """One row of the results. A candidate that declines the shape is told of and left out."""
    rows, heads, kv_heads, head_dim, context, varied, model = shape
    draw = partial(Batch.draw, rows, heads, kv_heads, head_dim, context, varied)
    batch = draw()
    found = {name: (batch, call) for name, call in candidates(batch, peers, names).items()}
    if e4m3:
        narrow = draw(kv_dtype=E4M3)
        found |= {f"{name}, e4m3": (narrow, _ours(narrow, name)) for name in names}
    calls, errors = {}, {}
    for name, (its, call) in found.items():
        try:
            out = call()[0]
        except NotImplementedError as reason:
            print(f"{name} declined: {reason}", flush=True)
            continue
        errors[name] = its.check(name, out if isinstance(out, jax.Array) else out.float().cpu())
        calls[name] = call
    times = timing.flat(timing.measure(calls, iters, peers))
    for name, t in times.items():
        its, _ = found[name]
        t["relative_error"] = float(f"{errors[name]:.2e}")
        t["GB/s"] = round(its.kv_bytes / t["us"] / 1e3)
        t["over_floor"] = round(t["us"] / its.floor_us, 3)
    row = dict(
        rows=rows, heads=heads, kv_heads=kv_heads, head_dim=head_dim, context=context, varied=varied, model=model,
        kv_bytes=batch.kv_bytes, floor_us=round(batch.floor_us, 2),
    )  # fmt: skip
    if e4m3:
        row |= dict(e4m3_bytes=narrow.kv_bytes, e4m3_floor_us=round(narrow.floor_us, 2))
    return row | dict(times=times)


def show(row: dict[str, Any]) -> None:
    varied = " varied" if row["varied"] else ""
    heads = f"{row['heads']} / {row['kv_heads']} heads of {row['head_dim']}"
    floors = f"floor {row['floor_us']} us"
    if "e4m3_floor_us" in row:
        floors += f", of e4m3 {row['e4m3_floor_us']} us"
    print(f"{row['rows']} x {heads} x {row['context']}{varied}, {floors}  {row['model']}")
    for name, t in row["times"].items():
        print(
            f"    {name:<22}{t['us']:>9.2f} us {t['GB/s']:>6} GB/s {t['over_floor']:>6.2f} x floor "
            f"{t['launches']} launches, error {t['relative_error']:.1e}",
            flush=True,
        )


def main(argv: list[str]) -> None:
    parser = timing.arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--more", action="store_true", help="the shapes beside the reference table instead of it"
    )
    parser.add_argument("--only", type=int, nargs="*", help="indices of shapes (default: all)")
    parser.add_argument(
        "--implementations",
        nargs="*",
        choices=DELIVERIES,
        default=["mosaic", "triton"],
        help="default: %(default)s",
    )
    parser.add_argument("--no-e4m3", action="store_true", help="leave out the candidates over e4m3 rows")
    options = parser.parse_args(argv)
    peers = timing.load_peers(options.peers)
    shapes = MORE_SHAPES if options.more else SHAPES
    rows = []
    for i in options.only if options.only is not None else range(len(shapes)):
        rows.append(bench(shapes[i], options.iters, peers, options.implementations, not options.no_e4m3))
        show(rows[-1])
        timing.write(
            options.json, timing.record("gqa", rows, peers)
        )  # a run that is cut short keeps its rows
