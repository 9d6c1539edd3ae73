"""Moves: which live pages go where so that holes become free bytes again.

A move carries one whole envelope and rewrites two words of v2p and p2v; virtual ids never change. Ranks come from
cumsums over the sub-pool's grid. Nothing moves while `state.gate` is held, and a static split never moves.

In a jitted step, call these first, before anything else touches the buffer: the barrier in the page mover then keeps
XLA from copying the pool.
"""

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from pallas_kernels.move_pages import api as move_pages
from ukv_jax import chain, pool
from ukv_jax.layout import PoolLayout, UnifiedLayout
from ukv_jax.pool import UNBOUND, PoolState, SubPoolState


def moves_per_call(layout: PoolLayout, index: int, max_bytes: int | None = None) -> int:
    """Pages of one sub-pool that `max_bytes` (default: the layout's move_bytes) let one bounded call move."""
    spec = layout.subpools[index]
    bound = layout.move_bytes if max_bytes is None else max_bytes
    if bound < spec.page_bytes:
        raise ValueError(
            f"{bound} bytes a call move no page of sub-pool {spec.name!r}: one has {spec.page_bytes} bytes"
        )
    return min(bound // spec.page_bytes, spec.num_pages)


class _Ranks(NamedTuple):
    """Pages of a grid, counted."""

    page: Int32[Array, " num_pages"]
    live: Bool[Array, " num_pages"]
    hole: Bool[Array, " num_pages"]


def _scan(pool: SubPoolState) -> _Ranks:
    page = jnp.arange(pool.p2v.shape[0] - 1, dtype=jnp.int32)
    band = (page >= pool.low) & (page < pool.high)
    bound = pool.p2v[:-1] > 0
    return _Ranks(page, band & bound, band & ~bound)


def _list(mask: Bool[Array, " n"], lanes: int, *, reverse: bool) -> Int32[Array, " lanes"]:
    """The first (last, if reverse) `lanes` indices of a mask in ascending (descending) order; 0 behind them."""
    rank = lax.cumsum(mask.astype(jnp.int32), reverse=reverse) - 1
    index = jnp.arange(mask.shape[0], dtype=jnp.int32)
    return jnp.zeros(lanes, jnp.int32).at[jnp.where(mask, rank, lanes)].set(index, mode="drop")


def _absorb(pool: SubPoolState, *, low: bool, high: bool) -> SubPoolState:
    """Gives holes at the named ends of the band back to the gap and lists the others anew."""
    scan = _scan(pool)
    size = scan.page.shape[0]
    any_live = jnp.any(scan.live)
    first = jnp.min(jnp.where(scan.live, scan.page, size))
    stop = jnp.max(jnp.where(scan.live, scan.page, -1)) + 1
    new_low = jnp.where(any_live, first, pool.low if high else pool.high) if low else pool.low
    new_high = jnp.where(any_live, stop, new_low) if high else pool.high
    hole = scan.hole & (scan.page >= new_low) & (scan.page < new_high)
    return replace(
        pool,
        low=new_low,
        high=new_high,
        holes=_list(hole, size, reverse=False),
        hole_count=jnp.sum(hole).astype(jnp.int32),
    )


def _ends(layout: PoolLayout, index: int) -> dict[str, bool]:
    """Which ends of a sub-pool's band border on a gap."""
    last = len(layout.subpools) - 1
    return {"low": index > 0, "high": index < last or last == 0}


def _move(state: PoolState, index: int, src: Int32[Array, " n"], dst: Int32[Array, " n"]) -> PoolState:
    """Moves live pages onto free ones; lanes with src 0 do nothing. Bands and hole lists are the caller's to mend."""
    spec, p = state.layout.subpools[index], state.subpools[index]
    live = src > 0
    virtual = jnp.where(live, p.p2v[src], 0)
    # A region's blocks divide the page and the buffer, so the widest of them can be the unit of the move.
    block = max(r.block_bytes for r in spec.regions)
    buffer = move_pages.move_pages(
        state.buffer, jnp.where(live, src, UNBOUND), dst, page_bytes=spec.page_bytes, block_bytes=block
    )
    rows = p.p2v.shape[0]
    p2v = p.p2v.at[jnp.where(live, src, rows)].set(UNBOUND, mode="drop")
    p2v = p2v.at[jnp.where(live, dst, rows)].set(virtual, mode="drop")
    v2p = p.v2p.at[jnp.where(live, virtual, p.v2p.shape[0])].set(dst, mode="drop")
    state = replace(pool.with_subpool(state, index, replace(p, v2p=v2p, p2v=p2v)), buffer=buffer)
    return pool.count(state, moved=jnp.sum(live))


def _pass(state: PoolState, index: int, lanes: int) -> tuple[PoolState, Int32[Array, ""]]:
    """Absorbs border holes, then moves at most `lanes` pages: the page nearest the frontier into the deepest hole."""
    grows_down = _ends(state.layout, index) == {"low": True, "high": False}
    state = pool.with_subpool(state, index, _absorb(state.subpools[index], **_ends(state.layout, index)))
    scan = _scan(state.subpools[index])
    src = _list(scan.live, lanes, reverse=not grows_down)
    dst = _list(scan.hole, lanes, reverse=grows_down)
    useful = (src > 0) & (dst > 0) & ((src < dst) if grows_down else (src > dst))
    state = _move(state, index, jnp.where(useful, src, 0), jnp.where(useful, dst, 0))
    p = state.subpools[index]
    holes = _list(_scan(p).hole, p.holes.shape[0], reverse=False)
    return pool.with_subpool(state, index, replace(p, holes=holes)), jnp.sum(useful).astype(jnp.int32)


def compact(
    state: PoolState, name: str, *, max_bytes: int | None = None, complete: bool = False
) -> tuple[PoolState, Int32[Array, ""]]:
    """Squeezes holes out of one sub-pool, toward the end of the buffer that it grows from (a float: toward low bytes).

    One bounded pass gives border holes back to the gap and then moves at most `max_bytes` (default: the layout's
    move_bytes); the border holes that its moves leave are absorbed by the next pass. `complete` repeats passes until no
    page can move and absorbs at the end. Returns the state and the pages moved. No effect while the gate is held or in
    a static split.

    Raises ValueError where max_bytes is less than one page.
    """
    layout, index = state.layout, state.layout.index(name)
    lanes = moves_per_call(layout, index, max_bytes)
    if not isinstance(layout, UnifiedLayout):
        return state, jnp.int32(0)

    def once(state):
        return _pass(state, index, lanes)

    def run(state):
        if not complete:
            return once(state)

        def again(carry):
            state, total, _ = carry
            state, moved = once(state)
            return state, total + moved, moved

        # The pass that finds nothing to move has absorbed what the one before it left.
        state, total, _ = lax.while_loop(lambda c: c[2] > 0, again, (state, jnp.int32(0), jnp.int32(1)))
        return state, total

    return _gated(state, run)


def _gated(state: PoolState, run):
    """Runs `run` unless the gate is held. The barrier keeps the conditional from copying the pool."""
    state = replace(state, buffer=lax.optimization_barrier(state.buffer))
    return lax.cond(state.gate == 0, run, lambda s: (s, jnp.int32(0)), state)


class Room(NamedTuple):
    """done: the bytes are open now. refused: no slide can open them (both sides short, or the gate is held). moved: pages."""

    done: Bool[Array, ""]
    refused: Bool[Array, ""]
    moved: Int32[Array, ""]


def make_room(
    state: PoolState,
    name: str,
    side: str,
    num_bytes: Int32[Array, ""] | int,
    *,
    max_bytes: int | None = None,
    unit: int | None = None,
) -> tuple[PoolState, Room]:
    """Slides a float so that `num_bytes` in all lie open between it and its neighbour on `side` ("low" or "high").

    Pages nearest that side go into holes beyond all sources, then to the gap on the other side; sources and
    destinations of one slide are disjoint. If the other side cannot take them (the sum of both is short) nothing
    changes. At most `max_bytes` move in a call (default: the layout's move_bytes): call again until `done`.

    num_bytes: in units of `unit` bytes (default: the layout's granule), an int32 scalar, since bytes do not fit int32.
    """
    layout, index = state.layout, state.layout.index(name)
    if not (isinstance(layout, UnifiedLayout) and 0 < index < len(layout.subpools) - 1):
        raise ValueError(
            f"only a float of a unified chain slides; {name!r} is not one of {[s.name for s in layout.subpools]}"
        )
    if side not in ("low", "high"):
        raise ValueError(f"side must be 'low' or 'high', got {side!r}")
    if unit is not None and unit % layout.granule:
        raise ValueError(f"unit {unit} is no multiple of the granule {layout.granule}")
    factor = (unit or layout.granule) // layout.granule
    want = (
        jnp.clip(jnp.int32(num_bytes), 0, (layout.total_bytes // layout.granule + 1) // factor + 1) * factor
    )
    lanes = moves_per_call(layout, index, max_bytes)
    c = chain.unit(layout, layout.subpools[index])
    below, above = _gap(state, index)
    p = _absorb(state.subpools[index], low=True, high=True)
    scan = _scan(p)
    toward_low = side == "low"
    short = want > above - below  # more than there is between the neighbours
    want = jnp.minimum(want, above - below)
    if toward_low:
        border = (below + want + c - 1) // c  # first page that may stay
        leaving = scan.live & (scan.page < border)
    else:
        border = (above - want) // c  # first page that must not stay
        leaving = scan.live & (scan.page >= border)
    open_now = ~short & ~jnp.any(leaving)
    beyond_holes = scan.hole & ((scan.page >= border) if toward_low else (scan.page < border))
    outside = _far_room(p, scan, border, below, above, c, toward_low)
    fits = jnp.sum(leaving) <= jnp.sum(beyond_holes) + jnp.sum(outside)
    possible = (
        ~short & fits & (state.gate == 0) & ((border * c <= above) if toward_low else (border * c >= below))
    )
    # Nearest pages first; the destinations lie beyond every source of the whole slide, so any prefix is a valid slide.
    src = _list(leaving, lanes, reverse=not toward_low)
    inside = _list(beyond_holes, lanes, reverse=toward_low)
    far = _list(outside, lanes, reverse=not toward_low)
    lane = jnp.arange(lanes, dtype=jnp.int32)
    n_inside = jnp.sum(beyond_holes)
    dst = jnp.where(lane < n_inside, inside, far[jnp.clip(lane - n_inside, 0, lanes - 1)])
    go = (src > 0) & possible & ~open_now
    refused = ~open_now & ~possible
    # A refusal leaves the band as it was; otherwise its border holes are given back.
    band = {
        name: jnp.where(refused, getattr(state.subpools[index], name), getattr(p, name))
        for name in ("low", "high", "holes", "hole_count")
    }
    state = pool.with_subpool(state, index, replace(p, **band))

    def slide(state):
        state = _move(state, index, jnp.where(go, src, 0), jnp.where(go, dst, 0))
        p = state.subpools[index]
        used = jnp.where(go, dst, UNBOUND)
        low = jnp.minimum(p.low, jnp.min(jnp.where(go, dst, p.low)))
        high = jnp.maximum(p.high, jnp.max(used) + 1)
        return pool.with_subpool(state, index, _absorb(replace(p, low=low, high=high), low=True, high=True))

    state = replace(state, buffer=lax.optimization_barrier(state.buffer))
    state = lax.cond(jnp.any(go), slide, lambda s: s, state)
    moved = jnp.sum(go).astype(jnp.int32)
    done = open_now | (possible & (moved == jnp.sum(leaving)))
    return state, Room(done, refused, moved)


def _gap(state: PoolState, index: int) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
    """Granules at which the nearest occupied neighbours of a float end and begin."""
    layout, pools = state.layout, state.subpools
    below = pools[0].high * chain.unit(layout, layout.subpools[0])
    for i in range(1, index):
        occupied = pools[i].high > pools[i].low
        below = jnp.where(occupied, pools[i].high * chain.unit(layout, layout.subpools[i]), below)
    last = len(pools) - 1
    above = pools[last].low * chain.unit(layout, layout.subpools[last])
    for i in range(last - 1, index, -1):
        occupied = pools[i].high > pools[i].low
        above = jnp.where(occupied, pools[i].low * chain.unit(layout, layout.subpools[i]), above)
    return below, above


def _far_room(
    p: SubPoolState, scan: _Ranks, border, below, above, c: int, toward_low: bool
) -> Bool[Array, " num_pages"]:
    """Pages outside the band, on the side away from the opened one, that a slide may take."""
    if toward_low:
        return (scan.page >= jnp.maximum(p.high, border)) & (scan.page < above // c)
    return (scan.page < jnp.minimum(p.low, border)) & (scan.page >= (below + c - 1) // c)


def relieve(state: PoolState, demand: tuple, *, complete: bool = False) -> tuple[PoolState, Int32[Array, ""]]:
    """Makes room for `demand` pages in each sub-pool (int32 scalars in chain order): the shortage ladder short of refusal.

    Compacts the neighbours of every sub-pool that must grow (compacting itself gains it nothing; where several must
    grow, each of them too); once that is enough, slides the floats to where all of the demand fits. One pass is bounded
    by the layout's move_bytes a sub-pool and float side; `complete` repeats it until the demand fits or nothing is
    gained. Returns the state and a progress count: 0 means that nothing more can be gained.

    A demand that cannot fit moves no float, so ask for what can (`requests.demand`).
    """
    layout = state.layout
    if not isinstance(layout, UnifiedLayout) or len(layout.subpools) == 1:
        return state, jnp.int32(0)
    if not complete:
        return _relief_pass(state, demand)

    def short(carry):
        state, _, progress = carry
        return (progress > 0) & ~chain.plan(layout, state.usage, demand)[0]

    def again(carry):
        state, total, _ = carry
        state, progress = _relief_pass(state, demand)
        return state, total + progress, progress

    state = replace(state, buffer=lax.optimization_barrier(state.buffer))
    state, total, _ = lax.while_loop(short, again, (state, jnp.int32(0), jnp.int32(1)))
    return state, total


def _relief_pass(state: PoolState, demand: tuple) -> tuple[PoolState, Int32[Array, ""]]:
    layout = state.layout
    last = len(layout.subpools) - 1
    grows = jnp.stack([d > u.holes for d, u in zip(demand, state.usage)])
    before = _used_granules(state)
    moved = jnp.int32(0)
    for i in (0, last):
        others = jnp.any(jnp.delete(grows, i))
        wanted = others & (state.subpools[i].hole_count > 0) & (state.gate == 0)
        state = replace(state, buffer=lax.optimization_barrier(state.buffer))

        def shrink(s, i=i):
            return compact(s, layout.subpools[i].name)

        state, n = lax.cond(wanted, shrink, lambda s: (s, jnp.int32(0)), state)
        moved += n
    fits, places = chain.float_places(layout, state.usage, demand)
    # What must go up goes from the top float down, and what must go down from the lowest up, so that none is in the way.
    for i in reversed(range(1, last)):
        below, _ = _gap(state, i)
        need = places[i].first * chain.unit(layout, layout.subpools[i]) - below
        state, room = make_room(
            state, layout.subpools[i].name, "low", jnp.where(fits & places[i].live, need, 0)
        )
        moved += room.moved
    for i in range(1, last):
        _, above = _gap(state, i)
        need = above - places[i].stop * chain.unit(layout, layout.subpools[i])
        state, room = make_room(
            state, layout.subpools[i].name, "high", jnp.where(fits & places[i].live, need, 0)
        )
        moved += room.moved
    return state, moved + (_used_granules(state) < before)


def _used_granules(state: PoolState) -> Int32[Array, ""]:
    """Granules inside bands, summed."""
    return sum(
        (
            (p.high - p.low) * chain.unit(state.layout, s)
            for s, p in zip(state.layout.subpools, state.subpools)
        ),
        jnp.int32(0),
    )
