"""The pool's state and its page-level functions: take, bind, drop.

`PoolState` is an immutable pytree. Every function takes a state (or one sub-pool's) and returns a new one; shapes are
fixed, lanes that do nothing are masked, and nothing is read by the host. Free ids and holes are stacks in arrays, so
the cost of an operation grows with the pages it touches.

A virtual page id stays the same for the life of an allocation. `v2p` and `p2v` say where it lies now; only this module
and `compaction` write them.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, UInt8

from pallas_kernels.bind_pages import api as bind_pages
from ukv_jax import chain
from ukv_jax.layout import PADDING, PoolLayout, StaticLayout, SubPool

FREE, ACTIVE, PARKED, RELEASING = range(4)  # status of a request row
UNBOUND = -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SubPoolState:
    """Maps, reference counts and free lists of one sub-pool.

    v2p: physical page of each virtual one; row 0 is 0, unbound rows (tombstones) and the extra last row are -1.
    p2v: the inverse. refs: holders of each virtual page. free_ids[:free_count] and holes[:hole_count] are stacks.
    [low, high) is the band of pages in use or holes.
    """

    v2p: Int32[Array, "num_virtual+1"]
    p2v: Int32[Array, "num_pages+1"]
    refs: Int32[Array, " num_virtual"]
    free_ids: Int32[Array, " num_virtual"]
    free_count: Int32[Array, ""]
    holes: Int32[Array, " num_pages"]
    hole_count: Int32[Array, ""]
    low: Int32[Array, ""]
    high: Int32[Array, ""]

    @property
    def usage(self) -> chain.Usage:
        return chain.Usage(self.low, self.high, self.hole_count, self.free_count)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RequestState:
    """The request maps. Row r is one request; its pages are columns [0, page_count[r]) of `pages`.

    pages: virtual pages, -1 = hole. slots: virtual state slot, 0 = none. seq_len: tokens written. status: FREE, ACTIVE,
    PARKED or RELEASING. window_first[w, r]: first column whose page row r still holds in window sub-pool w.
    page_to_req: the last request that wrote each virtual page, -1 = none.
    """

    pages: Int32[Array, "max_requests max_pages"]
    page_count: Int32[Array, " max_requests"]
    slots: Int32[Array, " max_requests"]
    seq_len: Int32[Array, " max_requests"]
    status: Int32[Array, " max_requests"]
    window_first: Int32[Array, "windows max_requests"]
    page_to_req: Int32[Array, " num_virtual"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Counters:
    """faults: broken calls that changed nothing (double free, id out of range, dead request). refused: requests that did
    not fit. moved: pages that compaction and slides moved. Int32 scalars, summed since `init`."""

    faults: Int32[Array, ""]
    refused: Int32[Array, ""]
    moved: Int32[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PoolState:
    """Everything. `gate` > 0 forbids moves while something outside JAX reads the buffer."""

    buffer: UInt8[Array, " total_bytes"]
    subpools: tuple[SubPoolState, ...]
    requests: RequestState
    counters: Counters
    gate: Int32[Array, ""]
    layout: PoolLayout = field(metadata={"static": True})

    def subpool(self, name: str) -> SubPoolState:
        return self.subpools[self.layout.index(name)]

    @property
    def usage(self) -> tuple[chain.Usage, ...]:
        return tuple(s.usage for s in self.subpools)


def _init_subpool(layout: PoolLayout, index: int) -> SubPoolState:
    s = layout.subpools[index]
    low, high = chain.initial_band(layout, index)
    ids = (
        jnp.arange(s.num_virtual, 0, -1, dtype=jnp.int32) - 1
    )  # the stack's top is id 1; its last word is unused
    return SubPoolState(
        v2p=jnp.full(s.num_virtual + 1, UNBOUND, jnp.int32).at[PADDING].set(0),
        p2v=jnp.full(s.num_pages + 1, UNBOUND, jnp.int32).at[PADDING].set(0),
        refs=jnp.zeros(s.num_virtual, jnp.int32),
        free_ids=ids,
        free_count=jnp.int32(s.num_virtual - 1),
        holes=jnp.zeros(s.num_pages, jnp.int32),
        hole_count=jnp.int32(0),
        low=jnp.int32(low),
        high=jnp.int32(high),
    )


def _init_requests(layout: PoolLayout) -> RequestState:
    rows = layout.max_requests
    zeros = jnp.zeros(rows, jnp.int32)
    return RequestState(
        pages=jnp.full((rows, layout.max_pages), UNBOUND, jnp.int32),
        page_count=zeros,
        slots=jnp.zeros_like(zeros),
        seq_len=jnp.zeros_like(zeros),
        status=jnp.full(rows, FREE, jnp.int32),
        window_first=jnp.zeros((len(layout.windows), rows), jnp.int32),
        page_to_req=jnp.full(layout.full.num_virtual, UNBOUND, jnp.int32),
    )


def init(layout: PoolLayout) -> PoolState:
    """An empty pool: `layout.total_bytes` zero bytes on the default device, every id free."""
    return PoolState(
        buffer=jnp.zeros(layout.total_bytes, jnp.uint8),
        subpools=tuple(_init_subpool(layout, i) for i in range(len(layout.subpools))),
        requests=_init_requests(layout),
        counters=Counters(jnp.int32(0), jnp.int32(0), jnp.int32(0)),
        gate=jnp.int32(0),
        layout=layout,
    )


def reset(state: PoolState) -> PoolState:
    """Ends every request and frees every id at once. Bytes stay as they are (readers mask them); counters and gate too."""
    return replace(
        state,
        subpools=tuple(_init_subpool(state.layout, i) for i in range(len(state.subpools))),
        requests=_init_requests(state.layout),
    )


def hold(state: PoolState) -> PoolState:
    """Forbids moves until a matching `unhold`: for readers outside JAX (dlpack, RDMA) that know physical addresses."""
    return replace(state, gate=state.gate + 1)


def unhold(state: PoolState) -> PoolState:
    """Takes one `hold` back. One too many changes nothing and counts as a fault."""
    wrong = (state.gate <= 0).astype(jnp.int32)
    counters = replace(state.counters, faults=state.counters.faults + wrong)
    return replace(state, gate=jnp.maximum(state.gate - 1, 0), counters=counters)


def with_subpool(state: PoolState, index: int, subpool: SubPoolState) -> PoolState:
    pools = list(state.subpools)
    pools[index] = subpool
    return replace(state, subpools=tuple(pools))


def count(state: PoolState, *, faults=0, refused=0, moved=0) -> PoolState:
    c = state.counters
    return replace(state, counters=Counters(c.faults + faults, c.refused + refused, c.moved + moved))


def pages_are_ids(layout: PoolLayout, subpool: SubPool) -> bool:
    """In a static split an owner's physical page is its virtual id."""
    return isinstance(layout, StaticLayout) and subpool.owns_ids


def take(
    layout: PoolLayout,
    index: int,
    pool: SubPoolState,
    growth: chain.Growth,
    count: Int32[Array, ""],
    lanes: int,
) -> tuple[SubPoolState, Int32[Array, " lanes"], Int32[Array, " lanes"]]:
    """Takes `count` (at most `lanes`) free ids and pages, as planned in `growth`; holes first, then the frontier.

    Returns the sub-pool without them, virtual ids (of an owner; zeros for a window sub-pool) and physical pages, 0 in
    lanes past `count`. Nothing is bound yet.
    """
    spec = layout.subpools[index]
    lane = jnp.arange(lanes, dtype=jnp.int32)
    live = lane < count
    virtual = jnp.zeros(lanes, jnp.int32)
    if spec.owns_ids:
        virtual = jnp.where(live, pool.free_ids[jnp.maximum(pool.free_count - 1 - lane, 0)], 0)
        pool = replace(pool, free_count=pool.free_count - count)
    if pages_are_ids(layout, spec):
        return pool, virtual, virtual
    from_holes = jnp.minimum(count, pool.hole_count)
    hole = pool.holes[jnp.maximum(pool.hole_count - 1 - lane, 0)]
    k = lane - from_holes
    fresh = jnp.where(k < growth.grow_high, growth.high + k, growth.low - 1 - (k - growth.grow_high))
    physical = jnp.where(live, jnp.where(lane < from_holes, hole, fresh), 0)
    pool = replace(
        pool,
        hole_count=pool.hole_count - from_holes,
        low=growth.low - growth.grow_low,
        high=growth.high + growth.grow_high,
    )
    return pool, virtual, physical


def bind(
    pool: SubPoolState, virtual: Int32[Array, " lanes"], physical: Int32[Array, " lanes"]
) -> SubPoolState:
    """Binds unbound virtual pages to free physical ones, with one holder each. Lanes with virtual <= 0 do nothing."""
    v2p, p2v = bind_pages.bind(pool.v2p, pool.p2v, virtual, physical)
    target = jnp.where(virtual > 0, virtual, pool.refs.shape[0])
    return replace(pool, v2p=v2p, p2v=p2v, refs=pool.refs.at[target].set(1, mode="drop"))


def is_live(pool: SubPoolState, virtual: Int32[Array, " lanes"]) -> Bool[Array, " lanes"]:
    """Whether each lane names a bound virtual page other than the padding page."""
    inside = (virtual > 0) & (virtual < pool.refs.shape[0])
    return inside & (pool.v2p[jnp.where(inside, virtual, 0)] > 0)


def add_refs(
    pool: SubPoolState, virtual: Int32[Array, " lanes"], mask: Bool[Array, " lanes"]
) -> SubPoolState:
    """One more holder for each masked lane's page (which must be live)."""
    target = jnp.where(mask, virtual, pool.refs.shape[0])
    return replace(pool, refs=pool.refs.at[target].add(1, mode="drop"))


def drop(
    layout: PoolLayout, index: int, pool: SubPoolState, virtual: Int32[Array, " lanes"]
) -> tuple[SubPoolState, Bool[Array, " lanes"], Int32[Array, ""]]:
    """Takes one holder from each lane's page; a page without holders becomes a tombstone and a hole.

    Lanes with virtual == -1 are idle. Page 0, ids out of range, unbound pages and one holder too many change nothing and
    are counted. Returns the sub-pool, which lanes freed their page, and the number of faults.
    """
    spec = layout.subpools[index]
    live = is_live(pool, virtual)
    target = jnp.where(live, virtual, pool.refs.shape[0])
    refs = pool.refs.at[target].add(-1, mode="drop")
    left = refs[jnp.where(live, virtual, 0)]
    # What is read of a map is read before the map changes: it is then updated in place, not copied.
    old_v2p, refs, live, left = lax.optimization_barrier((pool.v2p, refs, live, left))
    dead = live & (left <= 0)
    v2p, p2v, free_ids, free_count, holes, hole_count, freed, _ = bind_pages.tombstone(
        old_v2p,
        pool.p2v,
        pool.free_ids,
        pool.free_count,
        pool.holes,
        pool.hole_count,
        jnp.where(dead, virtual, UNBOUND),
        push_ids=spec.owns_ids,
    )
    # A page with r holders that n > r lanes drop ends at r - n: those n - r lanes are faults.
    over = jnp.sum(jnp.where(freed, -left, 0))
    refs = refs.at[jnp.where(freed, virtual, refs.shape[0])].set(0, mode="drop")
    faults = jnp.sum((virtual != UNBOUND) & ~live) + over
    pool = replace(pool, v2p=v2p, p2v=p2v, refs=refs, free_ids=free_ids, free_count=free_count)
    if not pages_are_ids(layout, spec):
        # The last live page gone, the band is empty again and so are its holes.
        empty = pool.high - pool.low == hole_count
        low, high = chain.initial_band(layout, index)
        pool = replace(
            pool,
            holes=holes,
            hole_count=jnp.where(empty, 0, hole_count),
            low=jnp.where(empty, low, pool.low),
            high=jnp.where(empty, high, pool.high),
        )
    return pool, freed, faults.astype(jnp.int32)
