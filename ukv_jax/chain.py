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


def plan(
    layout: PoolLayout, usage: tuple[Usage, ...], demand: tuple
) -> tuple[Bool[Array, "..."], tuple[Growth, ...]]:
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
    extra = [
        jnp.clip(d - u.holes, 0, s.num_pages + 1 - (u.high - u.low)) for s, u, d in zip(pools, usage, demand)
    ]
    last = len(pools) - 1
    zero = jnp.zeros_like(extra[0])
    edge = (usage[0].high + extra[0]) * unit(layout, pools[0])
    if last == 0:
        fits = edge <= pools[0].num_pages * unit(layout, pools[0])
        return ids_ok & fits, (Growth(usage[0].low, usage[0].high, zero, extra[0]),)
    top = (usage[last].low - extra[last]) * unit(layout, pools[last])

    # Down the chain, every float as high as it can go: below[i] is what that leaves to the sub-pools under float i.
    ok, below = ids_ok, [top] * (last + 1)
    for i in range(last - 1, 0, -1):
        c, u, e, limit = unit(layout, pools[i]), usage[i], extra[i], below[i + 1]
        empty = u.high == u.low
        up = jnp.minimum(e, limit // c - u.high)
        ok &= empty | (up >= 0)
        lowest = jnp.where(empty, limit // c - e, u.low - (e - up))
        below[i] = jnp.where(empty & (e == 0), limit, lowest * c)
    ok &= edge <= below[1]

    # Up the chain, every float where it likes best within what those above it need.
    growths = [Growth(usage[0].low, usage[0].high, zero, extra[0])]
    for i in range(1, last):
        c, u, e = unit(layout, pools[i]), usage[i], extra[i]
        empty = u.high == u.low
        neighbour = _next_low(layout, usage, i, top)
        first, stop = _ceil(edge, c), below[i + 1] // c
        middle = jnp.minimum(first + jnp.maximum(neighbour // c - first - e, 0) // 2, stop - e)
        high_first = neighbour - u.high * c >= u.low * c - edge
        up = jnp.where(high_first, jnp.minimum(e, stop - u.high), e - jnp.minimum(e, u.low - first))
        grow_high = jnp.where(empty, e, up)
        low = jnp.where(empty & (e > 0), middle, u.low)
        high = jnp.where(empty, low, u.high)
        growths.append(Growth(low, high, e - grow_high, grow_high))
        edge = jnp.where(empty & (e == 0), edge, (high + grow_high) * c)
    growths.append(Growth(usage[last].low, usage[last].high, extra[last], zero))
    return ok, tuple(growths)


def _next_low(layout: PoolLayout, usage: tuple[Usage, ...], index: int, top):
    """The lowest occupied granule above float `index`."""
    edge = top
    for i in range(len(usage) - 2, index, -1):
        edge = jnp.where(usage[i].high > usage[i].low, usage[i].low * unit(layout, layout.subpools[i]), edge)
    return edge


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
    last = len(layout.subpools) - 1
    ok, edge = jnp.bool_(True), jnp.int32(0)
    for i, (s, u, d) in enumerate(zip(layout.subpools, usage, demand)):
        c = unit(layout, s)
        if s.owns_ids:
            ok &= d <= u.free_ids
        pages = u.high - u.low - u.holes + jnp.clip(d, 0, s.num_pages)
        ok &= pages <= s.num_pages  # and so the granules below fit int32
        pages = jnp.minimum(pages, s.num_pages)
        if i == last > 0:
            return ok & (edge <= (s.num_pages - pages) * c)
        first = s.first_page if i == 0 else _ceil(edge, c)
        stop = first + pages
        holds = (i == 0) | (pages > 0)
        ok &= ~holds | (stop <= s.num_pages)
        edge = jnp.where(holds, jnp.minimum(stop, s.num_pages) * c, edge)
    return ok


class Place(NamedTuple):
    """Where a float may lie: its pages in [first, stop). live: it holds pages now."""

    first: Int32[Array, ""]
    stop: Int32[Array, ""]
    live: Bool[Array, ""]


def float_places(
    layout: PoolLayout, usage: tuple[Usage, ...], demand: tuple
) -> tuple[Bool[Array, ""], dict[int, Place]]:
    """Whether the demand fits if floats may slide while both ends stay, and the widest place of each float then.

    Its pages and those it is to get fit between the ends if every float below lies as low, and every float above as
    high, as it can.
    """
    pools, last = layout.subpools, len(layout.subpools) - 1
    extra = [
        jnp.clip(d - u.holes, 0, s.num_pages + 1 - (u.high - u.low)) for s, u, d in zip(pools, usage, demand)
    ]
    live = [u.high - u.low - u.holes for u in usage]
    pages = [
        jnp.minimum(n + jnp.clip(d, 0, s.num_pages), s.num_pages) for s, n, d in zip(pools, live, demand)
    ]
    edge = (usage[0].high + extra[0]) * unit(layout, pools[0])
    top = (usage[last].low - extra[last]) * unit(layout, pools[last])
    ok, first, stop = jnp.bool_(True), {}, {}
    for i in range(1, last):
        c = unit(layout, pools[i])
        first[i] = _ceil(edge, c)
        ok &= (pages[i] == 0) | (first[i] + pages[i] <= pools[i].num_pages)
        edge = jnp.where(pages[i] > 0, jnp.minimum(first[i] + pages[i], pools[i].num_pages) * c, edge)
    ok &= edge <= top
    for i in range(last - 1, 0, -1):
        c = unit(layout, pools[i])
        stop[i] = top // c
        top = jnp.where(pages[i] > 0, (stop[i] - pages[i]) * c, top)
    return ok, {i: Place(first[i], stop[i], live[i] > 0) for i in range(1, last)}


def largest(fits, limit: int) -> Int32[Array, ""]:
    """The largest n in [0, limit] for which the monotone predicate `fits(n)` holds (fits(0) is taken as True)."""

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low + 1) // 2
        good = fits(middle)
        return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

    low, _ = lax.fori_loop(0, limit.bit_length() + 1, halve, (jnp.int32(0), jnp.int32(limit)))
    return low
