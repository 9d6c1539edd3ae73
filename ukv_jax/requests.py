"""Requests on top of pages: reserve, append, release, park, attach, window release and rebind, capacity.

Functions work on many rows in one call. A `rows` argument is Int32[n], a row of the request maps in each lane, -1 in
idle lanes; of lanes that name the same row the first counts, the others are faults. Errors that a run-time value causes
change nothing, come back in the outcome and are counted in `state.counters`.
"""

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from pallas_kernels import implementations
from ukv_jax import chain, pool, views
from ukv_jax.layout import PoolLayout
from ukv_jax.pool import ACTIVE, FREE, PARKED, RELEASING, UNBOUND, PoolState, count

RELEASE_CHUNK = 256  # pages a trip of a complete release
RESERVE, RELEASE_PENDING, RELEASE = (
    {"xla": ("ukv_jax.requests", f"_{name}"), "mosaic": ("ukv_jax.requests_gpu", name)}
    for name in ("reserve", "release_pending", "release")
)


class Reserved(NamedTuple):
    """granted: the row has what it asked for. refused: it did not fit now. fault: it could never be served as asked.
    pages: new pages taken by each lane."""

    granted: Bool[Array, " lanes"]
    refused: Bool[Array, " lanes"]
    fault: Bool[Array, " lanes"]
    pages: Int32[Array, " lanes"]


def tokens_per_page(layout: PoolLayout) -> int:
    """Virtual token ids that one page of the request maps stands for: page_size, times the ranks under DCP."""
    return layout.page_size * layout.dcp


def _ceil(tokens, layout: PoolLayout):
    return (tokens + (tokens_per_page(layout) - 1)) // tokens_per_page(layout)


def own_row(
    state: PoolState, rows: Int32[Array, " lanes"]
) -> tuple[Bool[Array, " lanes"], Int32[Array, " lanes"]]:
    """Which lanes name a row of their own, and the row, with a harmless one in the other lanes.

    Of lanes that name one row the first has it; the others are as good as out of range.
    """
    limit = state.layout.max_requests
    inside = (rows >= 0) & (rows < limit)
    lane = jnp.arange(rows.shape[0], dtype=jnp.int32)
    first = (
        jnp.full(limit, rows.shape[0], jnp.int32).at[jnp.where(inside, rows, limit)].min(lane, mode="drop")
    )
    row = jnp.where(inside, rows, 0)
    return inside & (first[row] == lane), row


def _set(array: Array, rows: Int32[Array, " lanes"], mask: Bool[Array, " lanes"], value) -> Array:
    return array.at[jnp.where(mask, rows, array.shape[0])].set(value, mode="drop")


def _spread(
    counts: Int32[Array, " n"], lanes: int
) -> tuple[Bool[Array, " lanes"], Int32[Array, " lanes"], Int32[Array, " lanes"]]:
    """A flat worklist over n bins of `counts` items: which of the first `lanes` items exist, their bin, their index in it."""
    ends = jnp.cumsum(counts)
    lane = jnp.arange(lanes, dtype=jnp.int32)
    # All are compared: one launch, where a search is a loop of them.
    at = jnp.searchsorted(ends, lane, side="right", method="compare_all")
    bins = jnp.minimum(at, counts.shape[0] - 1).astype(jnp.int32)
    return lane < ends[-1], bins, lane - (ends[bins] - counts[bins])


class _Demand(NamedTuple):
    row: Int32[Array, " lanes"]
    asked: Bool[Array, " lanes"]
    fault: Bool[Array, " lanes"]
    pages: Int32[Array, " lanes"]
    slots: Int32[Array, " lanes"]


def lane_demand(layout: PoolLayout, pages_per_row: int, asked, inside, status, page_count, slot, target_len):
    """Whether a lane asks for what can never be, and the pages and slots that it lacks: elementwise, also in a kernel.

    slot is not looked at where the layout has no state.
    """
    servable = (status == FREE) | (status == ACTIVE)
    # Bounded before the ceiling, so that no target overflows.
    most = layout.max_pages * tokens_per_page(layout)
    pages = jnp.maximum(_ceil(jnp.minimum(target_len, most), layout) - page_count, 0)
    fault = asked & (~inside | ~servable | (target_len > most) | (pages > pages_per_row))
    good = asked & ~fault
    slots = (good & (slot == 0)).astype(jnp.int32) if layout.state is not None else jnp.zeros_like(pages)
    return fault, jnp.where(good, pages, 0), slots


def _demand(state: PoolState, rows, target_len, pages_per_row: int) -> _Demand:
    r = state.requests
    inside, row = own_row(state, rows)
    asked = (rows != UNBOUND) & (target_len > 0)
    lanes = r.status[row], r.page_count[row], r.slots[row], target_len
    return _Demand(row, asked, *lane_demand(state.layout, pages_per_row, asked, inside, *lanes))


def chain_demand(layout: PoolLayout, pages, slots) -> tuple:
    """Pages of every sub-pool: a new token page takes one of the full sub-pool and one of each window."""
    return tuple(slots if s.is_state else pages for s in layout.subpools)


def available(
    state: PoolState, rows: Int32[Array, " lanes"], target_len: Int32[Array, " lanes"], *, pages_per_row: int
) -> Bool[Array, " lanes"]:
    """What `reserve` with the same arguments would grant now: admission and allocation are one predicate."""
    d = _demand(state, rows, target_len, pages_per_row)
    return _granted(state, d)


def demand(
    state: PoolState, rows: Int32[Array, " lanes"], target_len: Int32[Array, " lanes"], *, pages_per_row: int
) -> tuple[Int32[Array, ""], ...]:
    """Pages of every sub-pool, in chain order, that moves could make room for: what `compaction.relieve` should be asked.

    The demand of the longest list of lanes that `reserve` with the same arguments would grant if nothing were in the way.
    """
    d = _demand(state, rows, target_len, pages_per_row)
    prefixes = chain_demand(state.layout, jnp.cumsum(d.pages), jnp.cumsum(d.slots))
    could = _first_that_fit(chain.fits_compacted(state.layout, state.usage, prefixes), d)
    return chain_demand(
        state.layout, jnp.sum(jnp.where(could, d.pages, 0)), jnp.sum(jnp.where(could, d.slots, 0))
    )


def _first_that_fit(fits: Bool[Array, "..."], d: _Demand) -> Bool[Array, " lanes"]:
    """The first lane whose prefix does not fit refuses itself and all later lanes that need something."""
    needs = (d.pages > 0) | (d.slots > 0)
    prefix = lax.cummin((jnp.broadcast_to(fits, needs.shape) | ~needs).astype(jnp.int32)) > 0
    return d.asked & ~d.fault & (prefix | ~needs)


def _granted(state: PoolState, d: _Demand) -> Bool[Array, " lanes"]:
    prefixes = chain_demand(state.layout, jnp.cumsum(d.pages), jnp.cumsum(d.slots))
    return _first_that_fit(chain.plan(state.layout, state.usage, prefixes)[0], d)


def reserve(
    state: PoolState,
    rows: Int32[Array, " lanes"],
    target_len: Int32[Array, " lanes"],
    *,
    pages_per_row: int,
    implementation: str | None = None,
) -> tuple[PoolState, Reserved]:
    """Takes the pages (and the state slot) that each row lacks to hold `target_len` tokens in all.

    A row is served whole or not at all. Rows are considered in lane order: the first that does not fit refuses itself
    and every later row that needs something; rows that need nothing always pass. A granted FREE row becomes ACTIVE.
    A new state slot is cleared.

    Args:
      rows: request rows, -1 in idle lanes.
      target_len: tokens that the row shall be able to hold; 0 or less asks for nothing.
      pages_per_row: static bound of the new pages of one row in this call; more is a fault.
      implementation: "xla", "mosaic" (one kernel; up to 1024 lanes and rows), or None for the best on the default device.

    Faults: a row outside the maps, PARKED or RELEASING; a target beyond max_tokens; more than pages_per_row new pages.
    """
    if pages_per_row < 1:
        raise ValueError(f"pages_per_row must be at least 1, got {pages_per_row}")
    return implementations.run("reserve", RESERVE, implementation)(state, rows, target_len, pages_per_row)


def _reserve(state: PoolState, rows, target_len, pages_per_row: int) -> tuple[PoolState, Reserved]:
    layout = state.layout
    d = _demand(state, rows, target_len, pages_per_row)
    granted = _granted(state, d)
    pages, slots = jnp.where(granted, d.pages, 0), jnp.where(granted, d.slots, 0)
    total = chain_demand(layout, jnp.sum(pages), jnp.sum(slots))
    _, growth = chain.plan(layout, state.usage, total)

    lanes = min(rows.shape[0] * pages_per_row, layout.max_requests * layout.max_pages)
    live, lane, nth = _spread(pages, lanes)
    virtual = jnp.zeros(lanes, jnp.int32)
    pools, fresh_slots, slot_lane = list(state.subpools), None, None
    for i in reversed(range(len(pools))):  # the owner's ids first: it is last in the chain
        spec = layout.subpools[i]
        if spec.is_state:
            slot_live, slot_lane, _ = _spread(slots, min(rows.shape[0], layout.max_requests))
            p, ids, physical = pool.take(layout, i, pools[i], growth[i], total[i], slot_live.shape[0])
            pools[i] = pool.bind(p, ids, physical)
            fresh_slots = jnp.where(slot_live, ids, 0), jnp.where(slot_live, physical, 0)
        else:
            p, ids, physical = pool.take(layout, i, pools[i], growth[i], total[i], lanes)
            virtual = ids if spec.owns_ids else virtual
            pools[i] = pool.bind(p, virtual, physical)

    r = state.requests
    column = r.page_count[d.row[lane]] + nth
    request = jnp.where(live, d.row[lane], layout.max_requests)
    new = replace(
        r,
        pages=r.pages.at[request, column].set(virtual, mode="drop"),
        page_count=r.page_count.at[jnp.where(granted, d.row, layout.max_requests)].add(pages, mode="drop"),
        status=_set(r.status, d.row, granted, ACTIVE),
    )
    state = replace(state, subpools=tuple(pools), requests=new)
    if fresh_slots is not None:
        ids, physical = fresh_slots
        taken = ids > 0
        state = replace(state, requests=replace(new, slots=_set(new.slots, d.row[slot_lane], taken, ids)))
        state = replace(
            state, buffer=views.clear_pages(layout, layout.state, state.buffer, physical, jnp.sum(taken))
        )
    refused = d.asked & ~d.fault & ~granted
    state = count(state, faults=jnp.sum(d.fault), refused=jnp.sum(refused))
    return state, Reserved(granted, refused, d.fault, pages)


class Appended(NamedTuple):
    """ok: the row took its tokens. start: its length before, the position of the first new token."""

    ok: Bool[Array, " lanes"]
    start: Int32[Array, " lanes"]


def append(
    state: PoolState, rows: Int32[Array, " lanes"], tokens: Int32[Array, " lanes"], *, max_tokens: int
) -> tuple[PoolState, Appended]:
    """Counts `tokens` new tokens (0 to max_tokens, static) into each row and notes it as last writer of their pages.

    Faults, which change nothing: a row that is not ACTIVE, fewer than 0 or more than max_tokens tokens, or more tokens
    than the row has pages for.
    """
    layout, r = state.layout, state.requests
    inside, row = own_row(state, rows)
    start = r.seq_len[row]
    room = r.page_count[row] * tokens_per_page(layout) - start
    asked = (rows != UNBOUND) & (tokens != 0)
    ok = asked & inside & (r.status[row] == ACTIVE) & (tokens > 0) & (tokens <= max_tokens) & (tokens <= room)
    first = start // tokens_per_page(layout)
    touched = (max_tokens - 1) // tokens_per_page(layout) + 2
    column = first[:, None] + jnp.arange(touched, dtype=jnp.int32)
    last = (start + jnp.where(ok, tokens, 1) - 1) // tokens_per_page(layout)
    page = r.pages[row[:, None], jnp.minimum(column, layout.max_pages - 1)]
    page = jnp.where(ok[:, None] & (column <= last[:, None]) & (page > 0), page, r.page_to_req.shape[0])
    owner = jnp.broadcast_to(row[:, None], page.shape)
    new = replace(
        r,
        seq_len=r.seq_len.at[jnp.where(ok, row, layout.max_requests)].add(tokens, mode="drop"),
        page_to_req=r.page_to_req.at[page].set(owner, mode="drop"),
    )
    state = count(replace(state, requests=new), faults=jnp.sum(asked & ~ok))
    return state, Appended(ok, jnp.where(inside, start, 0))


def _change_status(
    state: PoolState, rows, source: tuple[int, ...], target: int
) -> tuple[PoolState, Bool[Array, " lanes"]]:
    inside, row = own_row(state, rows)
    status = state.requests.status
    ok = inside & jnp.isin(status[row], jnp.array(source, jnp.int32))
    state = replace(state, requests=replace(state.requests, status=_set(status, row, ok, target)))
    return count(state, faults=jnp.sum((rows != UNBOUND) & ~ok)), ok


def park(state: PoolState, rows: Int32[Array, " lanes"]) -> tuple[PoolState, Bool[Array, " lanes"]]:
    """Keeps the pages and the slot of finished requests until the host has taken or dropped them. Returns which were ACTIVE."""
    return _change_status(state, rows, (ACTIVE,), PARKED)


def resume(state: PoolState, rows: Int32[Array, " lanes"]) -> tuple[PoolState, Bool[Array, " lanes"]]:
    """Makes parked requests ACTIVE again. Returns which were PARKED."""
    return _change_status(state, rows, (PARKED,), ACTIVE)


def mark_release(state: PoolState, rows: Int32[Array, " lanes"]) -> tuple[PoolState, Bool[Array, " lanes"]]:
    """Ends ACTIVE or PARKED requests; `release_pending` then takes their pages. Returns which rows it ended."""
    return _change_status(state, rows, (ACTIVE, PARKED), RELEASING)


def pending(state: PoolState) -> Bool[Array, ""]:
    """Whether an ended request still holds pages or its row."""
    return jnp.any(state.requests.status == RELEASING)


def release_pending(state: PoolState, *, max_pages: int, implementation: str | None = None) -> PoolState:
    """Takes at most `max_pages` pages (static) from RELEASING rows; a row without pages gives its slot back and is FREE.

    A flat worklist over all releasing rows, pages of a row from its end. Costs max_requests + max_pages, not the pool.
    implementation: "xla", "mosaic" (one kernel; up to 1024 rows and pages), or None for the best on the default device.
    """
    return implementations.run("release_pending", RELEASE_PENDING, implementation)(state, max_pages)


def _release_pending(state: PoolState, max_pages: int) -> PoolState:
    layout, r = state.layout, state.requests
    todo = jnp.where(r.status == RELEASING, r.page_count, 0)
    live, row, nth = _spread(todo, max_pages)
    column = jnp.maximum(r.page_count[row] - 1 - nth, 0)
    virtual = jnp.where(live, r.pages[row, column], UNBOUND)

    pools, faults = list(state.subpools), jnp.int32(0)
    gone = jnp.zeros(max_pages, bool)
    window = 0
    for i, s in enumerate(layout.subpools):
        if s.is_state:
            continue
        mine = virtual
        if not s.owns_ids:
            mine = jnp.where(column >= r.window_first[window, row], virtual, UNBOUND)
            window += 1
        pools[i], freed, f = pool.drop(layout, i, pools[i], mine)
        faults += f
        gone = freed if s.owns_ids else gone

    page = jnp.where(virtual > 0, virtual, 0)
    unowned = (virtual > 0) & (gone | (r.page_to_req[page] == row))
    starts = jnp.cumsum(todo) - todo
    taken = jnp.clip(max_pages - starts, 0, todo)
    page_count = r.page_count - taken
    done = (r.status == RELEASING) & (page_count == 0)
    if layout.state is not None:
        i = layout.index(layout.state.name)
        pools[i], _, f = pool.drop(layout, i, pools[i], jnp.where(done & (r.slots > 0), r.slots, UNBOUND))
        faults += f
    new = replace(
        r,
        pages=r.pages.at[jnp.where(live, row, layout.max_requests), column].set(UNBOUND, mode="drop"),
        page_count=page_count,
        page_to_req=_set(r.page_to_req, page, unowned, UNBOUND),
        slots=jnp.where(done, 0, r.slots),
        seq_len=jnp.where(done, 0, r.seq_len),
        status=jnp.where(done, FREE, r.status),
        window_first=jnp.where(done, 0, r.window_first),
    )
    return count(replace(state, subpools=tuple(pools), requests=new), faults=faults)


def release(
    state: PoolState, rows: Int32[Array, " lanes"], *, implementation: str | None = None
) -> tuple[PoolState, Bool[Array, " lanes"]]:
    """Ends requests and takes all their pages, in chunks. Rows that are FREE or RELEASING count as faults.

    implementation: "xla", "mosaic" (one kernel; up to 1024 lanes and rows), or None for the best on the default device.
    Returns the state and which rows it ended.
    """
    return implementations.run("release", RELEASE, implementation)(state, rows)


def _release(state: PoolState, rows) -> tuple[PoolState, Bool[Array, " lanes"]]:
    state, ended = mark_release(state, rows)
    state = lax.while_loop(pending, lambda s: _release_pending(s, RELEASE_CHUNK), state)
    return state, ended


def attach(
    state: PoolState,
    rows: Int32[Array, " lanes"],
    pages: Int32[Array, "lanes width"],
    seq_len: Int32[Array, " lanes"],
) -> tuple[PoolState, Bool[Array, " lanes"]]:
    """Starts FREE rows on live pages of other requests (a prefix hit): each page gets one more holder.

    pages: virtual pages in columns 0, 1, ..., -1 behind the last. seq_len: tokens that those pages hold, which must fill
    them: the row's next token goes to a page of its own, never into a shared one. Window sub-pools are not held yet
    (`rebind_window`). A state slot comes with the next `reserve`, cleared: recurrent state is not shared with the pages, so
    where a model has any the caller must write the prefix's own before it decodes. Faults, which change nothing for that
    row: a row that is not FREE, a page that is dead or named twice, a length that is not that of whole pages.
    """
    layout, r = state.layout, state.requests
    if pages.shape[1] > layout.max_pages:
        raise ValueError(f"pages has {pages.shape[1]} columns, a request row has {layout.max_pages}")
    inside, row = own_row(state, rows)
    held = jnp.cumsum(pages == UNBOUND, axis=1) == 0
    n = jnp.sum(held, axis=1).astype(jnp.int32)
    i = layout.index(layout.full.name)
    live = pool.is_live(state.subpools[i], pages.reshape(-1)).reshape(pages.shape)
    ok = inside & (r.status[row] == FREE) & (n > 0) & jnp.all(live | ~held, axis=1)
    ordered = jnp.sort(pages, axis=1)
    twice = jnp.any((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] > 0), axis=1)
    ok &= jnp.all(held | (pages == UNBOUND), axis=1) & ~twice & (seq_len == n * tokens_per_page(layout))
    take = held & ok[:, None]
    full = pool.add_refs(state.subpools[i], pages.reshape(-1), take.reshape(-1))
    request = jnp.where(take, row[:, None], layout.max_requests)
    column = jnp.arange(pages.shape[1], dtype=jnp.int32)[None, :]
    new = replace(
        r,
        pages=r.pages.at[request, column].set(pages, mode="drop"),
        page_count=_set(r.page_count, row, ok, n),
        seq_len=_set(r.seq_len, row, ok, seq_len),
        status=_set(r.status, row, ok, ACTIVE),
        window_first=r.window_first.at[:, jnp.where(ok, row, layout.max_requests)].set(n, mode="drop"),
    )
    state = replace(pool.with_subpool(state, i, full), requests=new)
    return count(state, faults=jnp.sum((rows != UNBOUND) & ~ok)), ok


def _window_needs(layout: PoolLayout, seq_len: Int32[Array, " n"], window: int) -> Int32[Array, " n"]:
    """First column that the next token may still see: a query at p sees keys from p - window + 1 on."""
    return jnp.maximum(seq_len - window + 1, 0) // tokens_per_page(layout)


def release_window(state: PoolState, *, max_pages: int) -> tuple[PoolState, Int32[Array, ""]]:
    """Gives back window pages that no later token of their ACTIVE row can see, at most `max_pages` a sub-pool.

    The full sub-pool's pages stay. Returns the state and how many page holders were dropped. A layout without windows is
    returned as it is.
    """
    layout, dropped = state.layout, jnp.int32(0)
    for w, spec in enumerate(layout.windows):
        r = state.requests
        first = r.window_first[w]
        stop = jnp.minimum(_window_needs(layout, r.seq_len, spec.window), r.page_count)
        todo = jnp.where(r.status == ACTIVE, jnp.maximum(stop - first, 0), 0)
        live, row, nth = _spread(todo, max_pages)
        virtual = jnp.where(live, r.pages[row, jnp.minimum(first[row] + nth, layout.max_pages - 1)], UNBOUND)
        i = layout.index(spec.name)
        swa, _, faults = pool.drop(layout, i, state.subpools[i], virtual)
        taken = jnp.clip(max_pages - (jnp.cumsum(todo) - todo), 0, todo)
        new = replace(r, window_first=r.window_first.at[w].add(taken))
        state = count(replace(pool.with_subpool(state, i, swa), requests=new), faults=faults)
        dropped += jnp.sum(taken)
    return state, dropped


def _first_of_equals(x: Int32[Array, " n"]) -> Bool[Array, " n"]:
    """Whether each lane is the first that holds its value."""
    order = jnp.argsort(x, stable=True)
    ordered = x[order]
    first = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    return jnp.zeros(x.shape, bool).at[order].set(first, unique_indices=True)


def rebind_window(
    state: PoolState, rows: Int32[Array, " lanes"], *, pages_per_row: int
) -> tuple[PoolState, Reserved]:
    """Holds again the window pages that each ACTIVE row's next token sees (after `attach` or a resume).

    Columns that another row still holds are shared; tombstones get a fresh page, whose bytes the caller must write.
    All or nothing for each row, in every window sub-pool, with the prefix rule of `reserve`.

    Args:
      pages_per_row: static bound of the columns one row regains in one sub-pool; more is a fault.
    """
    layout = state.layout
    inside, row = own_row(state, rows)
    active = inside & (state.requests.status[row] == ACTIVE)
    asked = rows != UNBOUND
    lanes = rows.shape[0]
    gain, works = jnp.zeros(lanes, jnp.int32), []
    fault = asked & ~active
    for w, spec in enumerate(layout.windows):
        r = state.requests
        first = jnp.minimum(_window_needs(layout, r.seq_len[row], spec.window), r.window_first[w, row])
        stop = jnp.minimum(r.window_first[w, row], r.page_count[row])
        n = jnp.where(active, jnp.maximum(stop - first, 0), 0)
        fault |= n > pages_per_row
        works.append((w, spec, first, n))
    demands = [jnp.zeros(lanes, jnp.int32) for _ in layout.subpools]
    plans = []
    for w, spec, first, n in works:
        i = layout.index(spec.name)
        swa = state.subpools[i]
        column = first[:, None] + jnp.arange(pages_per_row, dtype=jnp.int32)
        held = (jnp.arange(pages_per_row) < n[:, None]) & ~fault[:, None]
        virtual = state.requests.pages[row[:, None], jnp.minimum(column, layout.max_pages - 1)]
        virtual = jnp.where(held, virtual, UNBOUND).reshape(-1)
        dead = (virtual > 0) & ~pool.is_live(swa, virtual)
        # Two rows may share a dead page: the first lane binds it, the others join.
        binds = dead & _first_of_equals(virtual)
        demands[i] = jnp.sum(binds.reshape(lanes, pages_per_row), axis=1).astype(jnp.int32)
        gain += jnp.sum(dead.reshape(lanes, pages_per_row), axis=1)
        plans.append((w, i, virtual, binds, first))
    fits, _ = chain.plan(layout, state.usage, tuple(jnp.cumsum(d) for d in demands))
    needs = gain > 0
    prefix = lax.cummin((jnp.broadcast_to(fits, needs.shape) | ~needs).astype(jnp.int32)) > 0
    granted = asked & ~fault & (prefix | ~needs)
    total = tuple(jnp.sum(jnp.where(granted, d, 0)) for d in demands)
    _, growth = chain.plan(layout, state.usage, total)
    pages = jnp.zeros(lanes, jnp.int32)
    for w, i, virtual, binds, first in plans:
        mine = jnp.repeat(granted, pages_per_row)
        binds &= mine
        swa, _, physical = pool.take(layout, i, state.subpools[i], growth[i], total[i], virtual.shape[0])
        nth = jnp.cumsum(binds) - 1
        swa = pool.bind(swa, jnp.where(binds, virtual, 0), physical[jnp.maximum(nth, 0)])
        swa = pool.add_refs(swa, virtual, mine & (virtual > 0) & ~binds)
        r = state.requests
        target = jnp.where(granted, row, layout.max_requests)
        new = replace(r, window_first=r.window_first.at[w, target].set(first, mode="drop"))
        state = replace(pool.with_subpool(state, i, swa), requests=new)
        pages += jnp.sum(binds.reshape(lanes, pages_per_row), axis=1).astype(jnp.int32)
    refused = asked & ~fault & ~granted
    state = count(state, faults=jnp.sum(fault), refused=jnp.sum(refused))
    return state, Reserved(granted, refused, fault, pages)


def capacity(state: PoolState, *names: str, after_compaction: bool = False) -> Int32[Array, ""]:
    """Pages that all named sub-pools could take at once, each: own holes, own ids and the free bytes between bands.

    A neighbour's holes count only with `after_compaction`, and then only while moves are allowed (`hold`). One name
    gives that sub-pool's own capacity, several the joint one.
    """
    layout = state.layout
    wanted = {layout.index(name) for name in names}
    if not wanted:
        raise ValueError(f"name at least one sub-pool of {[s.name for s in layout.subpools]}")

    def each(n):
        return tuple(n if i in wanted else jnp.int32(0) for i in range(len(layout.subpools)))

    def fits(n):
        now = chain.plan(layout, state.usage, each(n))[0]
        if not after_compaction:
            return now
        return now | ((state.gate == 0) & chain.fits_compacted(layout, state.usage, each(n)))

    return chain.largest(fits, max(layout.subpools[i].num_pages for i in wanted))
