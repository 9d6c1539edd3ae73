"""Where bands may grow: arithmetic on a few scalars, the one predicate behind admission and allocation.

A sub-pool's *band* is the page range [low, high) that it occupies: live pages and holes. In a unified chain the first
sub-pool grows up, the last grows down and those between float. A static split has fixed ranges instead.

Bytes are counted in granules (`PoolLayout.granule`), which keeps int32 exact. Every demand may carry leading axes: the
prefix rule plans all prefixes of a list of requests at once.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from ukv_jax.layout import PoolLayout, SubPool, UnifiedLayout


class Usage(NamedTuple):
    """What allocation needs to know of one sub-pool, as int32 scalars."""

    low: Int32[Array, ""]
    high: Int32[Array, ""]
    holes: Int32[Array, ""]
    free_ids: Int32[Array, ""]  # of an owner; ignored for a window sub-pool


class Growth(NamedTuple):
    """How one sub-pool meets a demand: `grow_high` new pages from `high` up, `grow_low` from `low - 1` down, after its holes.

    low and high are the band before growth: an empty float moves first.
    """

    low: Int32[Array, "..."]
    high: Int32[Array, "..."]
    grow_low: Int32[Array, "..."]
    grow_high: Int32[Array, "..."]


def unit(layout: PoolLayout, subpool: SubPool) -> int:
    """Granules of one page."""
    return subpool.page_bytes // layout.granule


def initial_band(layout: PoolLayout, index: int) -> tuple[int, int]:
    """The empty band of a sub-pool."""
    s = layout.subpools[index]
    if index > 0 and index == len(layout.subpools) - 1 and isinstance(layout, UnifiedLayout):
        return s.num_pages, s.num_pages
    return s.first_page, s.first_page


def _ceil(value, divisor: int):
    return (value + (divisor - 1)) // divisor


def plan(layout: PoolLayout, usage: tuple[Usage, ...], demand: tuple) -> tuple[Bool[Array, "..."], tuple[Growth, ...]]:
    """Whether `demand[i]` more pages fit in every sub-pool i at once, and where they go.

    demand: one int32 array (all of one shape) a sub-pool, in chain order. Growth is meaningful where the first result
    is True. Holes are used first; an end of the chain then grows at its frontier, a float on the side with the larger
    gap and, that side full, on the other; an empty float is placed in the middle of its gap.
    """
    ids_ok = jnp.bool_(True)
    for s, u, d in zip(layout.subpools, usage, demand):
        if s.owns_ids:
            ids_ok &= d <= u.free_ids
    if not isinstance(layout, UnifiedLayout):
        return _plan_static(layout, usage, demand, ids_ok)

    pools = layout.subpools
    # A demand beyond the grid is refused anyway; clipping it keeps granules in int32.
    extra = [jnp.clip(d - u.holes, 0, s.num_pages) for s, u, d in zip(pools, usage, demand)]
    last = len(pools) - 1
    top = jnp.int32(pools[last].num_pages * unit(layout, pools[last]))
    zero = jnp.zeros_like(extra[0])

    growths: list[Growth] = [Growth(usage[0].low, usage[0].high, zero, extra[0])]
    edge = (usage[0].high + extra[0]) * unit(layout, pools[0])
    if last > 0:
        top = (usage[last].low - extra[last]) * unit(layout, pools[last])
    ok = ids_ok & (edge <= top)

    # The lowest occupied granule above each float.
    above = [top] * (last + 1)
    for i in range(last - 1, 0, -1):
        occupied = usage[i].high > usage[i].low
        above[i - 1] = jnp.where(occupied, usage[i].low * unit(layout, pools[i]), above[i])
    for i in range(1, last):
        c, u, e = unit(layout, pools[i]), usage[i], extra[i]
        empty = u.high == u.low
        first, stop = _ceil(edge, c), above[i] // c
        middle = first + jnp.maximum(stop - first - e, 0) // 2
        room_low, room_high = u.low - first, stop - u.high
        high_first = above[i] - u.high * c >= u.low * c - edge
        up = jnp.where(high_first, jnp.minimum(e, room_high), e - jnp.minimum(e, room_low))
        ok &= jnp.where(empty, (e == 0) | (stop - first >= e), (room_low >= 0) & (room_high >= 0) & (room_low + room_high >= e))
        grow_high = jnp.where(empty, e, up)
        low = jnp.where(empty, jnp.where(e > 0, middle, u.low), u.low)
        high = jnp.where(empty, low, u.high)
        growths.append(Growth(low, high, e - grow_high, grow_high))
        occupied = ~empty | (e > 0)
        edge = jnp.where(occupied, (high + grow_high) * c, edge)
    if last > 0:
        ok &= edge <= top
        growths.append(Growth(usage[last].low, usage[last].high, extra[last], zero))
    return ok, tuple(growths)


def _plan_static(layout, usage, demand, ok):
    growths = []
    for s, u, d in zip(layout.subpools, usage, demand):
        extra = jnp.maximum(d - u.holes, 0)
        if s.owns_ids:  # physical page = virtual page: the ids are the pages
            extra = jnp.zeros_like(d)
        ok &= extra <= s.num_pages - u.high
        growths.append(Growth(u.low, u.high, jnp.zeros_like(extra), extra))
    return ok, tuple(growths)


def fits_compacted(layout: PoolLayout, usage: tuple[Usage, ...], demand: tuple) -> Bool[Array, "..."]:
    """Whether the demand fits once every hole is squeezed out and floats have slid to where they take least room."""
    if not isinstance(layout, UnifiedLayout):
        return plan(layout, usage, demand)[0]
    ok = jnp.bool_(True)
    edge = jnp.int32(0)
    for i, (s, u, d) in enumerate(zip(layout.subpools, usage, demand)):
        c = unit(layout, s)
        if s.owns_ids:
            ok &= d <= u.free_ids
        pages = u.high - u.low - u.holes + jnp.minimum(d, s.num_pages)
        ok &= pages <= s.num_pages
        first = s.first_page if i == 0 else jnp.where(pages > 0, _ceil(edge, c), 0)
        stop = first + pages
        ok &= stop <= s.num_pages
        edge = jnp.where(stop > first, stop * c, edge)
    return ok


def largest(fits, limit: int) -> Int32[Array, ""]:
    """The largest n in [0, limit] for which the monotone predicate `fits(n)` holds (fits(0) is taken as True)."""

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low + 1) // 2
        good = fits(middle)
        return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

    low, _ = lax.fori_loop(0, limit.bit_length() + 1, halve, (jnp.int32(0), jnp.int32(limit)))
    return low
