"""Paged MLA decode in bf16 and fp8: against the floor, and against FlashMLA and SGLang's Triton kernel where they are installed.

Rows of 576 (512 + 64) in pages of 64 tokens, placed at random; every unused slot is NaN and the tails of the tables hold
an absurd id. The forms that name single tokens (page size 1) read each request's tokens in random order. Each candidate is
checked against float32 before it is timed. The floor is the larger of bytes / 4.35 TB/s and FLOPs / 790 TFLOP/s, the rates
that a copy and a large matrix product reach on an H200; bytes are the KV rows, q and out, FLOPs 2 * heads * (576 + 512) a
token. The fp8 form reads the same tokens from rows of 640 bytes, e4m3 with a scale a token, and has a floor and a reference
of its own. Ours contain their schedule; FlashMLA, which schedules once a step for all layers, is timed without its schedule
kernel and with it.
"""

import importlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import timing
from pallas_kernels.mla_decode import mla_decode
from pallas_kernels.read_source import PageTable, ReadSource, TokenStream, VirtualPages

PAGE_SIZE, ROW, VALUE = 64, 576, 512
SM_SCALE = 192**-0.5
BYTES_PER_S, FLOPS_PER_S = 4.35e12, 790e12
ABSURD = 2**31 - 8
TOLERANCE = 3e-3
OPTIONS = dict(kv_dtype=jnp.bfloat16, row_width=ROW, v_width=VALUE, sm_scale=SM_SCALE)
FP8, FP8_ROW = "ours, fp8", ROW + 64  # scale and padding behind the columns
FP8_OPTIONS = OPTIONS | dict(kv_dtype=jnp.float8_e4m3fn, row_width=FP8_ROW)


@dataclass(frozen=True)
class Shape:
    """A decode batch. `model` has such heads on one GPU."""

    rows: int
    heads: int
    context: int
    varied: bool  # lengths drawn from [context / 4, context]
    model: str = ""
    all_forms: bool = True  # of reading, or pages by a table alone

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.heads}x{self.context}{'v' if self.varied else ''}"


KIMI, K2, V2_LITE, V3 = "Kimi-Linear-48B", "Kimi-K2 over 2 GPUs", "DeepSeek-V2-Lite", "DeepSeek-V3"
SHAPES = [
    Shape(1, 32, 8192, False, KIMI),
    Shape(1, 32, 131072, False, KIMI),
    Shape(8, 32, 8192, False, KIMI),
    Shape(8, 32, 32768, False, KIMI),
    Shape(32, 32, 8192, False, KIMI),
    Shape(64, 32, 8192, True, KIMI),
    Shape(128, 32, 4096, False, KIMI),
    Shape(128, 32, 8192, True, KIMI),
    Shape(256, 32, 8192, True, KIMI),
    Shape(64, 16, 8192, True, "DeepSeek-V3 over 8 GPUs; DeepSeek-V2-Lite"),
    Shape(64, 64, 8192, True, K2),
    Shape(128, 128, 4096, False, V3),
    Shape(32, 128, 8192, True, V3),
    Shape(1, 128, 131072, False, V3),
    # Beside the shapes that the kernels were tuned at.
    Shape(4, 16, 16384, False, V2_LITE, all_forms=False),
    Shape(16, 32, 16384, False, KIMI, all_forms=False),
    Shape(16, 32, 65536, True, KIMI, all_forms=False),
    Shape(200, 32, 3000, True, KIMI, all_forms=False),
    Shape(48, 24, 6000, True, all_forms=False),
    Shape(96, 48, 6144, True, all_forms=False),
    Shape(24, 64, 30000, True, K2, all_forms=False),
    Shape(48, 128, 2048, False, V3, all_forms=False),
    Shape(100, 128, 5000, True, V3, all_forms=False),
]


@dataclass(frozen=True)
class Batch:
    """A batch's ids on the host. `entries` are physical pages; virtual pages name them through `v2p`."""

    shape: Shape
    lengths: np.ndarray  # [rows]
    entries: np.ndarray  # int32 [rows, width]
    virtual: np.ndarray  # int32 [rows, width]
    v2p: np.ndarray  # int32 [pages + 1]
    row_ids: np.ndarray
    slots: np.ndarray  # int32 [pages]: live rows of each page

    @staticmethod
    def draw_lengths(shape: Shape, seed: int = 0) -> np.ndarray:
        if not shape.varied:
            return np.full(shape.rows, shape.context)
        return np.random.default_rng(seed).integers(shape.context // 4, shape.context + 1, shape.rows)

    @staticmethod
    def draw(shape: Shape, num_pages: int, seed: int = 0) -> "Batch":
        lengths = Batch.draw_lengths(shape, seed)
        rng = np.random.default_rng(seed + 1)
        columns = -(-lengths // PAGE_SIZE)
        order = (rng.permutation(num_pages - 1) + 1).astype(np.int32)
        entries = np.full((shape.rows, int(columns.max()) + 1), ABSURD, np.int32)
        slots = np.zeros(num_pages, np.int32)
        v2p = np.concatenate([[0], rng.permutation(num_pages - 1) + 1, [-1]]).astype(np.int32)
        p2v = np.argsort(v2p[:-1]).astype(np.int32)
        virtual = np.full_like(entries, -7)
        taken = 0
        for b, count in enumerate(columns):
            mine = order[taken : taken + count]
            taken += count
            entries[b, :count], virtual[b, :count] = mine, p2v[mine]
            slots[mine] = PAGE_SIZE
            slots[mine[-1]] = lengths[b] - (count - 1) * PAGE_SIZE
        return Batch(
            shape, lengths, entries, virtual, v2p, rng.permutation(shape.rows).astype(np.int32), slots
        )

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def bytes_with(self, row_bytes: int) -> int:
        """KV rows of `row_bytes` bytes, q and out."""
        return row_bytes * self.tokens + 2 * self.shape.rows * self.shape.heads * (ROW + VALUE)

    @property
    def bytes(self) -> int:
        return self.bytes_with(2 * ROW)

    @property
    def flops(self) -> int:
        return 2 * self.tokens * self.shape.heads * (ROW + VALUE)

    def floor_with(self, num_bytes: int) -> float:
        return max(num_bytes / BYTES_PER_S, self.flops / FLOPS_PER_S) * 1e6

    @property
    def floor_us(self) -> float:
        return self.floor_with(self.bytes)

    def token_ids(self, b: int) -> np.ndarray:
        position = np.arange(self.lengths[b])
        return self.entries[b, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE

    def stream(self, shuffled: bool) -> np.ndarray:
        """int32 token ids of all rows, in each row's order or in a random one."""
        rng = np.random.default_rng(7)
        rows = (self.token_ids(b) for b in range(self.shape.rows))
        return np.concatenate([rng.permutation(ids) if shuffled else ids for ids in rows])

    @cached_property
    def forms(self) -> list[tuple[str, ReadSource, str, Callable[..., jax.Array], dict[str, Any]]]:
        """Name of a candidate, the same rows delivered its way, implementation, what draws its pool, options."""
        start = jnp.asarray(np.zeros(self.shape.rows, np.int32))
        end = jnp.asarray(self.lengths, jnp.int32)
        table = PageTable(jnp.asarray(self.entries), start, end, page_size=PAGE_SIZE)
        by_table = [
            ("ours", table, "mosaic", draw_pool, OPTIONS),
            (FP8, table, "mosaic", draw_fp8_pool, FP8_OPTIONS),
        ]
        if not self.shape.all_forms:
            return by_table
        requests = np.empty_like(self.virtual)
        requests[self.row_ids] = self.virtual
        virtual = VirtualPages(
            jnp.asarray(requests), jnp.asarray(self.row_ids), jnp.asarray(self.v2p), start, end,
            page_size=PAGE_SIZE, blocks_per_page=1,
        )  # fmt: skip
        indptr = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)
        ids = jnp.asarray(self.stream(shuffled=True))
        stream = TokenStream(ids, jnp.asarray(indptr), start, end, page_size=1)
        return [
            *by_table,
            ("ours, virtual ids", virtual, "mosaic", draw_pool, OPTIONS),
            ("ours, page size 1", stream, "mosaic", draw_pool, OPTIONS),
            ("ours, page size 1, Triton", stream, "triton", draw_pool, OPTIONS),
        ]

    @cached_property
    def queries(self) -> np.ndarray:
        """bf16 [rows, 1, heads, 576]"""
        shape = (self.shape.rows, 1, self.shape.heads, ROW)
        return np.random.default_rng(2).standard_normal(shape, np.float32).astype(jnp.bfloat16)


@jax.jit
def draw_pool(slots):
    """uint8 pool of blocks [64, 576] bf16, normal values in the first slots[page] rows of each page and NaN elsewhere."""
    value = jax.random.normal(jax.random.key(0), (len(slots), PAGE_SIZE, ROW), jnp.bfloat16)
    live = jnp.arange(PAGE_SIZE) < slots[:, None]
    value = jnp.where(live[..., None], value, jnp.nan)
    return jax.lax.bitcast_convert_type(value, jnp.uint8).reshape(-1)


@jax.jit
def draw_fp8_pool(slots):
    """As `draw_pool`, blocks [64, 640] of 576 e4m3, an f32 scale within a factor of 2 of 1/32 and NaN."""
    value = 32 * jax.random.normal(jax.random.key(0), (len(slots), PAGE_SIZE, ROW), jnp.float32)
    spread = jax.random.uniform(jax.random.key(1), (len(slots), PAGE_SIZE, 1), minval=-1.0)
    live = (jnp.arange(PAGE_SIZE) < slots[:, None])[..., None]
    value = jnp.where(live, value.clip(-448, 448), jnp.nan).astype(jnp.float8_e4m3fn)
    scale = jnp.where(live, jnp.exp2(spread) / 32, jnp.nan)
    to_bytes = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:2], -1)
    padding = jnp.full((len(slots), PAGE_SIZE, FP8_ROW - ROW - 4), 0x7F, jnp.uint8)
    return jnp.concatenate([to_bytes(value), to_bytes(scale), padding], axis=-1).reshape(-1)


CHUNK = 8192


@partial(jax.jit, static_argnames="fp8")
def reference_row(q, pool, ids, length, fp8=False):
    """f32 attention of one row: q [heads, 576], ids int32 [capacity], of which `length` count. One program for all rows."""
    if fp8:
        rows = pool.reshape(-1, FP8_ROW)
    else:
        rows = jax.lax.bitcast_convert_type(pool.reshape(-1, 2), jnp.bfloat16).reshape(-1, ROW)

    def read(ids):
        if not fp8:
            return rows[ids].astype(jnp.float32)
        row = rows[ids]
        scale = jax.lax.bitcast_convert_type(row[:, ROW : ROW + 4], jnp.float32)
        value = jax.lax.bitcast_convert_type(row[:, :ROW], jnp.float8_e4m3fn).astype(jnp.float32)
        return value * scale[:, None]

    dot = partial(jnp.dot, precision=jax.lax.Precision.HIGHEST)

    def chunk(i, carry):
        top, total, out = carry
        at = i * CHUNK
        kv = read(jax.lax.dynamic_slice(ids, (at,), (CHUNK,)))
        live = at + jnp.arange(CHUNK) < length
        kv = jnp.where(live[:, None], kv, 0)
        scores = jnp.where(live, dot(q.astype(jnp.float32), kv.T) * SM_SCALE, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(-1))
        p, shrink = jnp.exp(scores - new_top[:, None]), jnp.exp(top - new_top)
        return new_top, total * shrink + p.sum(-1), out * shrink[:, None] + dot(p, kv[:, :VALUE])

    heads = q.shape[0]
    empty = jnp.full(heads, -jnp.inf), jnp.zeros(heads), jnp.zeros((heads, VALUE))
    _, total, out = jax.lax.fori_loop(0, (length + CHUNK - 1) // CHUNK, chunk, empty)
    return out / total[:, None]


class Reference:
    """Expected outputs of some rows of a batch. All batches share one program, made for `heads` and `capacity` tokens."""

    def __init__(
        self, batch: Batch, q: np.ndarray, pool: jax.Array, capacity: int, heads: int, fp8: bool = False
    ) -> None:
        rows = batch.shape.rows
        self.expected = {}
        for b in sorted({0, rows // 3, rows // 2, rows - 1}):
            ids = np.zeros(capacity, np.int32)
            ids[: batch.lengths[b]] = batch.token_ids(b)
            padded = np.zeros((heads, ROW), q.dtype)
            padded[: batch.shape.heads] = q[b, 0]
            out = reference_row(padded, pool, ids, np.int32(batch.lengths[b]), fp8=fp8)
            self.expected[b] = np.asarray(out)[: batch.shape.heads]

    def check(self, name: str, out: Any) -> float:
        """Largest relative error of a row: norm of the difference over the norm. out: [rows, ..., heads, 512]."""
        worst, out = 0.0, np.asarray(out)
        for b, expected in self.expected.items():
            got = out[b].astype(np.float32).reshape(expected.shape)
            error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
            worst = max(worst, error if np.isfinite(error) else np.inf)
        if not worst <= TOLERANCE:
            raise AssertionError(f"{name}: relative error {worst:.3g} above {TOLERANCE}")
        return worst


def compiled(arguments: tuple[Any, ...], implementation: str, options: dict[str, Any]) -> Callable[..., Any]:
    """The compiled call for abstract (q, pool, source)."""
    call = jax.jit(partial(mla_decode, block_offset=0, implementation=implementation, **options))
    return call.lower(*arguments).compile()


def peer_calls(batch: Batch, q: jax.Array, pool: jax.Array, peers: Any) -> dict[str, Callable[[], Any]]:
    torch = importlib.import_module("torch")
    q, lengths, entries = (
        peers.as_torch(x) for x in (q, jnp.asarray(batch.lengths, jnp.int32), jnp.asarray(batch.entries))
    )
    heads = batch.shape.heads
    cache = peers.as_torch(pool).view(torch.bfloat16).view(-1, PAGE_SIZE, ROW)
    plan = peers.flash_mla_metadata(lengths, heads)

    def flash_mla():
        return peers.flash_mla(q, cache, entries, lengths, SM_SCALE, plan)

    def flash_mla_with_schedule():
        peers.flash_mla_metadata(lengths, heads, plan=plan)
        return flash_mla()

    calls: dict[str, Callable[[], Any]] = {
        "FlashMLA": flash_mla,
        "FlashMLA with schedule": flash_mla_with_schedule,
    }
    indptr = peers.as_torch(np.concatenate([[0], np.cumsum(batch.lengths)]).astype(np.int32))
    splits = peers.sglang_mla_plan(lengths, heads)
    forms = {"SGLang Triton": False} | ({"SGLang Triton, page size 1": True} if batch.shape.all_forms else {})
    for name, shuffled in forms.items():
        ids = peers.as_torch(batch.stream(shuffled).astype(np.int64))
        calls[name] = lambda ids=ids: (
            peers.sglang_mla_decode(q[:, 0], cache, indptr, ids, lengths, SM_SCALE, splits),
        )
    return calls


def bench(
    batch: Batch, programs: dict[str, Future[Any]], capacity: int, heads: int, iters: int, peers: Any
) -> dict[str, Any]:
    shape = batch.shape
    pool = draw_pool(jnp.asarray(batch.slots))
    fp8_pool = draw_fp8_pool(jnp.asarray(batch.slots))
    reference = Reference(batch, batch.queries, pool, capacity, heads)
    fp8_reference = Reference(batch, batch.queries, fp8_pool, capacity, heads, fp8=True)
    q = jnp.asarray(batch.queries)
    calls: dict[str, Callable[[], Any]] = {}
    about: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    for name, source, implementation, *_ in batch.forms:
        try:
            call = programs[name].result()
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"
        else:
            calls[name] = partial(call, q, fp8_pool if name == FP8 else pool, source)
            about[name] = {"implementation": implementation}
    if peers is not None:
        calls |= peer_calls(batch, q, pool, peers)
    for name in list(calls):
        try:
            out = calls[name]()[0]
            expected = fp8_reference if name == FP8 else reference
            found = expected.check(name, out if isinstance(out, jax.Array) else out.float().cpu())
            about.setdefault(name, {})["relative_error"] = float(f"{found:.2e}")
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"
            del calls[name]
    times = timing.flat(timing.measure(calls, iters, peers))
    for name, t in times.items():
        t.update(about[name])
        num_bytes = batch.bytes_with(FP8_ROW) if name == FP8 else batch.bytes
        t["GB/s"] = round(num_bytes / t["us"] / 1e3)
        t["TFLOP/s"] = round(batch.flops / t["us"] / 1e6)
        t["over_floor"] = round(t["us"] / batch.floor_with(num_bytes), 3)
    row = dict(
        rows=shape.rows, heads=shape.heads, context=shape.context, varied=shape.varied, model=shape.model,
        tokens=batch.tokens, bytes=batch.bytes, flops=batch.flops, floor_us=round(batch.floor_us, 2), times=times,
    )  # fmt: skip
    return row | ({"failures": failures} if failures else {})


def show(row: dict[str, Any]) -> None:
    varied = " varied" if row["varied"] else ""
    print(
        f"{row['rows']} x {row['heads']} heads x {row['context']}{varied}, floor {row['floor_us']} us  {row['model']}"
    )
    ours = row["times"].get("ours", {}).get("us", np.nan)
    for name, t in row["times"].items():
        print(
            f"    {name:<27}{t['us']:>9.2f} us [{t['p10']:.1f}, {t['p90']:.1f}]  ours / it {ours / t['us']:.3f} "
            f"{t['GB/s']:>6} GB/s {t['TFLOP/s']:>4} TFLOP/s {t['over_floor']:>6.2f} x floor  "
            f"error {t['relative_error']:.1e}  {t['launches']} launches {t.get('implementation', '')}",
            flush=True,
        )
    for name, reason in row.get("failures", {}).items():
        print(f"    {name:<27}FAILED {reason[:400]}", flush=True)


def main(argv: list[str]) -> None:
    parser = timing.arguments(__doc__.splitlines()[0])
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--rows", nargs="*", default=names, metavar="NAME", help=f"of {', '.join(names)}")
    options = parser.parse_args(argv)
    if unknown := set(options.rows) - set(names):
        parser.error(f"no such rows: {', '.join(sorted(unknown))}")
    peers = timing.load_peers(options.peers)
    shapes = [shape for shape in SHAPES if shape.name in options.rows]
    pages = max(int((-(-Batch.draw_lengths(shape) // PAGE_SIZE)).sum()) for shape in shapes)
    batches = [Batch.draw(shape, pages + pages // 10 + 2) for shape in shapes]
    capacity = -(-max(shape.context for shape in shapes) // CHUNK) * CHUNK
    heads = max(shape.heads for shape in shapes)
    abstract = partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        programs = [
            {
                name: pool.submit(
                    compiled, abstract((batch.queries, jax.eval_shape(draw, batch.slots), source)),
                    implementation, options,
                )
                for name, source, implementation, draw, options in batch.forms
            }
            for batch in batches
        ]  # fmt: skip
    print(f"compiled {sum(map(len, programs))} programs in {time.monotonic() - began:.0f} s", flush=True)
    for batch, mine in zip(batches, programs, strict=True):
        rows.append(bench(batch, mine, capacity, heads, options.iters, peers))
        show(rows[-1])
        timing.write(options.json, timing.record("mla", rows, peers), quiet=len(rows) < len(batches))
    if any("failures" in row for row in rows):
        raise SystemExit("some candidates failed, see above")
