"""Index operations: read tables, token streams, write locations, bind and tombstone, reserve and release.

Rows of 8k and 131k tokens, lengths drawn from [seq / 2, seq], pages scattered over the pool; B = 7, the MLA layers of
Kimi-Linear-48B. Every candidate is checked against NumPy before it is timed. SGLang's kernels read a token-granular
request table and an int64 v2p; ours are timed on that request table ("token") and on the pages that this project keeps.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import timing
from pallas_kernels.bind_pages import bind, tombstone
from pallas_kernels.gather_translate import (
    fill_packed_read_stream,
    fill_read_table,
    translate_write_locs,
)
from ukv_jax import pool, requests
from ukv_jax.layout import MLASpec, UnifiedLayout
from ukv_jax.pool import PoolState

BLOCKS_PER_PAGE = 7
SHAPES = [
    (8, 8192, 1),
    (64, 8192, 1),
    (256, 8192, 1),
    (64, 131072, 1),
    (64, 8192, 64),
    (256, 8192, 64),
    (256, 131072, 64),
]


@dataclass(frozen=True)
class Batch:
    """Random ids of a batch, on the host."""

    page_size: int
    pages: np.ndarray  # int32 [rows, seq / page_size], virtual
    row_ids: np.ndarray
    lengths: np.ndarray
    v2p: np.ndarray  # int32 [pages + 2]

    @classmethod
    def draw(cls, rows: int, seq: int, page_size: int, seed: int = 0) -> "Batch":
        rng = np.random.default_rng(seed)
        width = seq // page_size
        total = rows * width
        return cls(
            page_size,
            rng.permutation(np.arange(1, total + 1, dtype=np.int32)).reshape(rows, width),
            rng.permutation(rows).astype(np.int32),
            rng.integers(seq // 2, seq + 1, rows).astype(np.int32),
            np.concatenate([[0], rng.permutation(total) + 1, [-1]]).astype(np.int32),
        )

    @property
    def tokens(self) -> np.ndarray:
        """The token-granular request table."""
        offsets = np.arange(self.page_size, dtype=np.int32)
        return (self.pages[:, :, None] * self.page_size + offsets).reshape(len(self.pages), -1)

    @property
    def indptr(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)

    def entries(self, b: int) -> np.ndarray:
        columns = -(-int(self.lengths[b]) // self.page_size)
        return self.v2p[self.pages[self.row_ids[b], :columns]]

    def stream(self, multiplier: int) -> np.ndarray:
        ps = self.page_size
        rows = []
        for b, length in enumerate(self.lengths):
            position = np.arange(length)
            rows.append(self.entries(b)[position // ps] * (multiplier * ps) + position % ps)
        return np.concatenate(rows)


def bench_reads(batch: Batch, iters: int, peers) -> list[dict[str, Any]]:  # type: ignore[no-untyped-def]
    """A table row and a stream row of the results."""
    ps, capacity, width = batch.page_size, int(batch.indptr[-1]), batch.pages.shape[1]
    device = {name: jnp.asarray(value) for name, value in [
        ("pages", batch.pages), ("tokens", batch.tokens), ("v2p", batch.v2p), ("lengths", batch.lengths),
        ("row_ids", batch.row_ids), ("indptr", batch.indptr),
    ]}  # fmt: skip
    common = dict(page_size=ps, blocks_per_page=BLOCKS_PER_PAGE)

    def table(table, v2p, lengths, row_ids, **options):
        return fill_read_table(table, v2p, lengths, row_ids=row_ids, **common, **options)[0]

    def stream(table, v2p, lengths, row_ids, indptr, **options):
        return fill_packed_read_stream(
            table, v2p, lengths, indptr, row_ids=row_ids, capacity=capacity, **common, **options
        )[0]

    def repack(table, v2p, lengths, row_ids, indptr):
        """The two steps that a direct stream replaces: a table, then ids out of its rows."""
        entries, _ = fill_read_table(table, v2p, lengths, row_ids=row_ids, **common, implementation="mosaic")
        item = jnp.arange(capacity, dtype=jnp.int32)
        row = jnp.searchsorted(indptr, item, side="right") - 1
        position = item - indptr[row]
        return entries[row, position // ps] * ps + position % ps

    tables, streams = {}, {}
    for granularity in ("page", "token") if ps > 1 else ("page",):
        words = device[f"{granularity}s"]
        label = "" if granularity == "page" else " (token)"
        for implementation in ("mosaic", "xla"):
            options = dict(granularity=granularity, implementation=implementation)
            args = [words, device["v2p"], device["lengths"], device["row_ids"]]
            tables[implementation + label] = partial(jax.jit(partial(table, **options)), *args)
            streams[implementation + label] = partial(
                jax.jit(partial(stream, **options)), *args, device["indptr"]
            )
    streams["table + repack"] = partial(
        jax.jit(repack),
        device["pages"],
        device["v2p"],
        device["lengths"],
        device["row_ids"],
        device["indptr"],
    )
    multiplier = dict.fromkeys([*tables, *streams], BLOCKS_PER_PAGE)
    if peers is not None:
        theirs = {name: peers.as_torch(value) for name, value in device.items()}
        theirs["v2p"], theirs["row_ids"] = theirs["v2p"].long(), theirs["row_ids"].long()
        args = theirs["tokens"], theirs["row_ids"], theirs["lengths"], theirs["v2p"]
        out_table = peers.as_torch(jnp.full((len(batch.lengths), width), -5, jnp.int32)).clone()
        out_stream = peers.as_torch(jnp.full((capacity,), -5, jnp.int32)).clone()
        tables["sglang"] = lambda: peers.sglang_fill_table(*args, ps, out_table)
        streams["sglang"] = lambda: peers.sglang_fill_stream(*args, theirs["indptr"], ps, out_stream)
        multiplier["sglang"] = 1  # its pool is token-major

    for name, call in tables.items():
        got = np.asarray(call().cpu() if name == "sglang" else call())
        for b in range(len(batch.lengths)):
            expected = batch.entries(b) * multiplier[name]
            np.testing.assert_array_equal(
                got[b, : len(expected)], expected, err_msg=f"table, {name}, row {b}"
            )
    expected = {m: batch.stream(m) for m in set(multiplier.values())}
    for name, call in streams.items():
        got = np.asarray(call().cpu() if name == "sglang" else call())
        np.testing.assert_array_equal(got, expected[multiplier[name]], err_msg=f"stream, {name}")

    shape = dict(rows=len(batch.lengths), seq=width * ps, page_size=ps, ids=capacity)
    return [
        dict(operation=operation, **shape, times=timing.flat(timing.measure(candidates, iters, peers)))
        for operation, candidates in (("table", tables), ("stream", streams))
    ]


def bench_writes(lanes: int, iters: int, peers) -> dict[str, Any]:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(lanes)
    pages = 1 << 17
    v2p = np.concatenate([[0], rng.permutation(pages) + 1, [-1]]).astype(np.int32)
    locs = rng.integers(-64, 64 * (pages + 2), lanes).astype(np.int32)
    live = lanes - lanes // 8
    page = np.clip(locs // 64, 0, pages + 1)
    bad = (page <= 0) | (v2p[page] <= 0) | (np.arange(lanes) >= live)
    expected = np.where(bad, 0, v2p[page] * (64 * BLOCKS_PER_PAGE) + locs % 64)
    candidates = {}
    for implementation in ("mosaic", "xla"):
        write = jax.jit(partial(
            translate_write_locs, page_size=64, blocks_per_page=BLOCKS_PER_PAGE, implementation=implementation
        ))  # fmt: skip
        candidates[implementation] = partial(write, jnp.asarray(locs), jnp.asarray(v2p), live=jnp.int32(live))
        np.testing.assert_array_equal(candidates[implementation](), expected)
    return dict(operation="write", lanes=lanes, times=timing.flat(timing.measure(candidates, iters, peers)))


def bench_pages(lanes: int, iters: int, peers) -> list[dict[str, Any]]:  # type: ignore[no-untyped-def]
    """Release of one page for each of `lanes` requests, and binding them again, in place on maps of a million pages."""
    rng = np.random.default_rng(lanes)
    pages = 1 << 20
    v2p = np.concatenate([[0], rng.permutation(pages) + 1, [-1]]).astype(np.int32)
    p2v = np.full(pages + 2, -1, np.int32)
    p2v[v2p[:-1]] = np.arange(pages + 1)
    stack = np.full(pages, -5, np.int32)
    victims = rng.choice(np.arange(1, pages + 1, dtype=np.int32), lanes, replace=False)
    timings: dict[str, dict[str, Callable[[], Any]]] = {"tombstone": {}, "bind": {}}
    for implementation in ("mosaic", "xla"):
        free = jax.jit(partial(tombstone, implementation=implementation), donate_argnums=range(6))
        rebind = jax.jit(partial(bind, implementation=implementation), donate_argnums=(0, 1))
        maps = jnp.asarray(v2p), jnp.asarray(p2v)
        *state, freed, faults = free(
            *maps, jnp.asarray(stack), jnp.int32(0), jnp.asarray(stack), jnp.int32(0), jnp.asarray(victims)
        )
        np.testing.assert_array_equal(np.asarray(state[2])[:lanes], victims)
        np.testing.assert_array_equal(np.asarray(state[4])[:lanes], v2p[victims])
        assert bool(freed.all())
        assert int(faults) == 0
        assert (np.asarray(state[0])[victims] == -1).all()
        ids, holes = (jnp.asarray(np.asarray(state[i])[:lanes]) for i in (2, 4))
        state[:2] = rebind(state[0], state[1], ids, holes)
        np.testing.assert_array_equal(state[0], v2p)
        np.testing.assert_array_equal(state[1], p2v)
        # Timed calls see new pages each time, as a decode loop does: no page is dead, none is in the cache.
        rounds = iter(
            rng.permutation(np.arange(1, pages + 1, dtype=np.int32))[: lanes * 100].reshape(100, lanes)
        )

        def release(state=state, free=free, rounds=rounds):
            *state[:], freed, _ = free(*state, jnp.asarray(next(rounds)))
            return freed

        def reserve(state=state, rebind=rebind, ids=ids, holes=holes):
            state[:2] = rebind(state[0], state[1], ids, holes)
            return state[0]

        timings["tombstone"][implementation] = release
        timings["bind"][implementation] = reserve
    return [
        dict(operation=operation, lanes=lanes, times=timing.flat(timing.measure(candidates, iters, peers)))
        for operation, candidates in timings.items()
    ]


def bench_requests(
    lanes: int, iters: int, peers, implementations: tuple[str, ...] = ("mosaic", "xla")
) -> list[dict[str, Any]]:  # type: ignore[no-untyped-def]
    """The pool's own operations: one page more for each of `lanes` requests, and the end of `lanes` requests that hold one
    page each. In place on a pool of one kind."""
    calls = iters + 10  # the timer's warm-up among them
    layout = UnifiedLayout.from_bytes(
        (MLASpec(1, 512, 64, "bfloat16"),),
        total_bytes=(lanes * calls + 64) * 64 * 1152,
        page_size=64,
        max_requests=lanes,
        max_tokens=64 * calls,
    )
    rows = jnp.arange(lanes, dtype=jnp.int32)

    def held(state: PoolState) -> int:
        return int(jnp.sum(state.requests.page_count))

    growing: dict[str, Callable[[], Any]] = {}
    ending: dict[str, Callable[[], Any]] = {}
    kept: dict[str, PoolState] = {}
    for name in implementations:
        reserve = jax.jit(partial(requests.reserve, pages_per_row=1, implementation=name), donate_argnums=0)
        release = jax.jit(partial(requests.release, implementation=name), donate_argnums=0)
        empty = pool.init(layout)
        empty = replace(empty, buffer=jnp.zeros(0, jnp.uint8))  # which neither reads
        state, answer = reserve(empty, rows, jnp.full(lanes, 64, jnp.int32))
        assert bool(answer.granted.all())
        assert held(state) == lanes
        # A state is given away by the call that changes it, so each call that is timed has one of its own.
        spare = [jax.tree.map(jnp.copy, state) for _ in range(calls)]
        last, ended = release(spare.pop(), rows)
        assert bool(ended.all())
        assert held(last) == 0
        kept[name], targets = state, iter([jnp.full(lanes, 64 * n, jnp.int32) for n in range(2, calls + 2)])

        def grow(name=name, reserve=reserve, targets=targets) -> Any:
            kept[name], answer = reserve(kept[name], rows, next(targets))
            return answer

        def end(spare=spare, release=release) -> Any:
            return release(spare.pop(), rows)[1]

        growing[name], ending[name] = grow, end
    times = {
        operation: timing.measure(candidates, iters, peers)
        for operation, candidates in (("reserve", growing), ("release", ending))
    }
    assert all(held(state) >= lanes * (iters + 1) for state in kept.values())
    return [dict(operation=name, lanes=lanes, times=timing.flat(t)) for name, t in times.items()]


def show(row: dict[str, Any]) -> None:
    where = " ".join(f"{k} {v}" for k, v in row.items() if k not in ("operation", "times"))
    print(f"{row['operation']:<10}{where}")
    best = row["times"]["mosaic"]["us"]
    for name, t in row["times"].items():
        print(
            f"    {name:<18}{t['us']:>9.2f} us  x{t['us'] / best:.2f}  {t['launches']} launches", flush=True
        )


def main(argv: list[str]) -> None:
    parser = timing.arguments(__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the small shapes alone")
    options = parser.parse_args(argv)
    peers = timing.load_peers(options.peers)
    rows: list[dict[str, Any]] = []
    for shape in SHAPES[:3] if options.quick else SHAPES:
        rows += bench_reads(Batch.draw(*shape), options.iters, peers)
        for row in rows[-2:]:
            show(row)
    for lanes in (64, 256, 4096):
        rows.append(bench_writes(lanes, options.iters, peers))
        show(rows[-1])
    for lanes in (256,):
        rows += bench_pages(lanes, options.iters, peers)
        rows += bench_requests(lanes, options.iters, peers)
        for row in rows[-4:]:
            show(row)
    timing.write(options.json, timing.record("index", rows, peers))
