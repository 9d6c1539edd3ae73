"""Small layouts that run short of everything, their jitted operations, and pages full of random bytes."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from ukv_jax import chain, compaction, pool, requests, verify
from ukv_jax.layout import (
    KVSpec,
    MLASpec,
    PoolLayout,
    StatePart,
    StateSpec,
    StaticLayout,
    SubPool,
    UnifiedLayout,
)
from ukv_jax.pool import ACTIVE, PoolState

PAGE_SIZE = 4
MAX_REQUESTS = 6
MAX_TOKENS = 24
LANES = 4  # of every call
PAGES_PER_ROW = 4
APPEND_TOKENS = 9
ATTACH_WIDTH = 3
REBIND_PAGES = 2
RELEASE_PAGES = 3
WINDOW_PAGES = 3

MLA = MLASpec(num_layers=2, kv_lora_rank=8, qk_rope_head_dim=4)  # 192 bytes a page
# Blocks of 12 and 64 bytes: the second part begins at 128 instead of 72, and the envelope is 384 instead of 256.
STATE = StateSpec(
    (StatePart("conv", 2, 3, (6,), "bfloat16"), StatePart("recurrent", 2, 1, (4, 4), "float32"))
)
FULL = KVSpec(num_layers=1, num_kv_heads=1, head_dim=10)  # 160
FULL_WIDE = KVSpec(num_layers=1, num_kv_heads=2, head_dim=4, v_head_dim=6, dtype="float32")  # 320
SWA = KVSpec(num_layers=2, num_kv_heads=1, head_dim=4, window=7, name="swa")  # 128
LONG_SWA = KVSpec(num_layers=1, num_kv_heads=1, head_dim=6, window=14, name="swa_long")  # 96

COMMON = dict(page_size=PAGE_SIZE, max_requests=MAX_REQUESTS, max_tokens=MAX_TOKENS)

LAYOUTS: dict[str, PoolLayout] = {
    "mla": UnifiedLayout.from_bytes((MLA,), total_bytes=192 * 18, **COMMON),
    # 10 ids: they run out before the pages do.
    "mla_state_dcp": UnifiedLayout.from_bytes(
        (MLA, STATE), total_bytes=192 * 18, num_virtual=11, dcp=2, **COMMON | {"max_tokens": 48}
    ),
    "swa_full": UnifiedLayout.from_bytes((FULL_WIDE, SWA), total_bytes=6400, **COMMON),
    "state_swa_full": UnifiedLayout.from_bytes((STATE, SWA, FULL), total_bytes=5760, **COMMON),
    "two_floats": UnifiedLayout.from_bytes((STATE, LONG_SWA, SWA, FULL), total_bytes=7680, **COMMON),
    "static": StaticLayout.from_pages((STATE, SWA, FULL), pages={"state": 4, "swa": 8, "full": 14}, **COMMON),
}


def craft(
    layout: PoolLayout,
    rows: list[list[int]],
    maps: dict[str, dict[int, int]],
    bands: dict[str, tuple[int, int]],
    *,
    lengths: list[int] | None = None,
) -> PoolState:
    """A sound state with these virtual pages in each row, placed as `maps[sub-pool][virtual] = physical` says.

    A page that is in no window map is a tombstone there; those of one row must come first. State slots: slots 1, 2, ...
    of rows 0, 1, ... where the state sub-pool has a map.
    """
    state = pool.init(layout)
    pools, r = list(state.subpools), state.requests
    for i, spec in enumerate(layout.subpools):
        live = maps.get(spec.name, {})
        low, high = bands.get(spec.name, chain.initial_band(layout, i))
        v2p, p2v, refs = np.array(pools[i].v2p), np.array(pools[i].p2v), np.array(pools[i].refs)
        for v, physical in live.items():
            v2p[v], p2v[physical] = physical, v
            refs[v] = 1 if spec.is_state else sum(row.count(v) for row in rows)
        holes = [page for page in range(low, high) if p2v[page] < 0]
        free = [v for v in range(spec.num_virtual - 1, 0, -1) if v not in live]
        pools[i] = replace(
            pools[i],
            v2p=ints(v2p),
            p2v=ints(p2v),
            refs=ints(refs),
            holes=ints(holes + [0] * (spec.num_pages - len(holes))),
            hole_count=ints(len(holes)),
            low=ints(low),
            high=ints(high),
        )
        if spec.owns_ids:
            free_ids = ints(free + [0] * (spec.num_virtual - len(free)))
            pools[i] = replace(pools[i], free_ids=free_ids, free_count=ints(len(free)))
    pages, count, length = np.array(r.pages), np.array(r.page_count), np.array(r.seq_len)
    status, slots, first = np.array(r.status), np.array(r.slots), np.array(r.window_first)
    for b, row in enumerate(rows):
        pages[b, : len(row)], count[b], status[b] = row, len(row), ACTIVE
        length[b] = len(row) * layout.page_size * layout.dcp if lengths is None else lengths[b]
        for w, spec in enumerate(layout.windows):
            first[w, b] = sum(v not in maps.get(spec.name, {}) for v in row)
        slots[b] = b + 1 if layout.state is not None and b + 1 in maps.get(layout.state.name, {}) else 0
    requests_ = replace(
        r,
        pages=ints(pages),
        page_count=ints(count),
        seq_len=ints(length),
        status=ints(status),
        slots=ints(slots),
        window_first=ints(first),
    )
    state = replace(state, subpools=tuple(pools), requests=requests_)
    verify.check(state)
    return state


def placed(state: PoolState, name: str) -> dict[int, int]:
    """virtual -> physical of the live pages of one sub-pool."""
    v2p = np.asarray(state.subpool(name).v2p)[:-1]
    return {int(v): int(v2p[v]) for v in np.flatnonzero(v2p > 0)}


def holes(state: PoolState, name: str) -> list[int]:
    p = state.subpool(name)
    return sorted(np.asarray(p.holes)[: int(p.hole_count)].tolist())


class Operations:
    """The functions of one layout, jitted once, with every static argument fixed."""

    def __init__(self, layout: PoolLayout):
        self.layout = layout
        jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

        def reserve(state, rows, target):
            ready = requests.available(state, rows, target, pages_per_row=PAGES_PER_ROW)
            return *requests.reserve(state, rows, target, pages_per_row=PAGES_PER_ROW), ready

        def demand(state, rows, target):
            return requests.demand(state, rows, target, pages_per_row=PAGES_PER_ROW)

        self.reserve, self.demand = jit(reserve), jit(demand)
        self.append = jit(functools.partial(requests.append, max_tokens=APPEND_TOKENS))
        self.park, self.resume, self.mark_release = (
            jit(requests.park),
            jit(requests.resume),
            jit(requests.mark_release),
        )
        self.release = jit(requests.release)
        self.release_pending = jit(functools.partial(requests.release_pending, max_pages=RELEASE_PAGES))
        self.attach = jit(requests.attach)
        self.release_window = jit(functools.partial(requests.release_window, max_pages=WINDOW_PAGES))
        self.rebind_window = jit(functools.partial(requests.rebind_window, pages_per_row=REBIND_PAGES))
        self.hold, self.unhold, self.reset = jit(pool.hold), jit(pool.unhold), jit(pool.reset)
        self.relieve = {c: jit(functools.partial(compaction.relieve, complete=c)) for c in (False, True)}
        self.compact, self.make_room = {}, {}
        for s in layout.subpools:
            one = functools.partial(compaction.compact, name=s.name, max_bytes=s.page_bytes)
            self.compact[s.name, False] = jit(one)
            self.compact[s.name, True] = jit(
                functools.partial(compaction.compact, name=s.name, complete=True)
            )
        for s in self.floats:
            for side in ("low", "high"):
                slide = functools.partial(compaction.make_room, max_bytes=2 * s.page_bytes)
                self.make_room[s.name, side] = jit(
                    lambda state, n, f=slide, name=s.name, side=side: f(state, name, side, n)
                )
        self.names = [(s.name,) for s in layout.subpools]
        if len(layout.subpools) > 1:
            self.names.append(tuple(s.name for s in layout.subpools if not s.is_state))

        def capacities(state):
            return [
                [requests.capacity(state, *names, after_compaction=after) for after in (False, True)]
                for names in self.names
            ]

        self.capacities = jit(capacities)
        self.plan = jit(lambda state, demand: chain.plan(layout, state.usage, demand)[0])

    @property
    def floats(self) -> tuple[SubPool, ...]:
        return self.layout.subpools[1:-1] if isinstance(self.layout, UnifiedLayout) else ()


@functools.cache
def operations(name: str) -> Operations:
    return Operations(LAYOUTS[name])


def ints(values) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def page_bytes_of(spec: SubPool, page: int) -> np.ndarray:
    """Byte offsets of everything that page `page` stores, block by block, by a kernel's own arithmetic."""
    blocks = []
    for region in spec.regions:
        for j in range(region.count):
            block = page * spec.stride(region.name) + spec.block_offset(j, region.name)
            blocks.append(np.arange(block * region.block_bytes, (block + 1) * region.block_bytes))
    return np.concatenate(blocks)


@functools.cache
def _byte_table(spec: SubPool) -> np.ndarray:
    return np.stack([page_bytes_of(spec, page) for page in range(spec.num_pages)])


class Contents:
    """Random bytes written to every live page through its virtual id, and read back through it."""

    def __init__(self, layout: PoolLayout, seed: int = 0):
        self.layout = layout
        self.random = np.random.default_rng(seed)
        self.written: dict[tuple[str, int], np.ndarray] = {}

    def check(self, state: PoolState) -> None:
        """Every page that was written still holds what was written."""
        buffer = np.asarray(state.buffer)
        for spec, p in zip(self.layout.subpools, state.subpools):
            v2p = np.asarray(p.v2p)
            for (name, v), expected in self.written.items():
                if name == spec.name:
                    assert v2p[v] > 0, f"{name}: page {v} is not live"
                    found = buffer[_byte_table(spec)[v2p[v]]]
                    assert (found == expected).all(), f"{name}: page {v} at {v2p[v]} lost its bytes"

    def follow(self, state: PoolState) -> PoolState:
        """Forgets pages that died and fills those that came to life; a new state slot must read as zero."""
        live = {
            (s.name, v): physical
            for s in self.layout.subpools
            for v, physical in placed(state, s.name).items()
        }
        self.written = {key: value for key, value in self.written.items() if key in live}
        new = live.keys() - self.written.keys()
        return self.write(state, {key: live[key] for key in new}, fresh=True) if new else state

    def write(self, state: PoolState, pages: dict[tuple[str, int], int], *, fresh: bool = False) -> PoolState:
        buffer = np.array(state.buffer)
        for (name, v), physical in pages.items():
            spec = self.layout[name]
            where = _byte_table(spec)[physical]
            if fresh and spec.is_state:
                assert not buffer[where].any(), f"new state slot {v} at {physical} is not zero"
            self.written[name, v] = buffer[where] = self.random.integers(1, 256, where.size, np.uint8)
        return replace(state, buffer=jnp.asarray(buffer))
