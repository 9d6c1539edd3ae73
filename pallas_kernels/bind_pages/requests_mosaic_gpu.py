"""Reserve and release of requests in Pallas Mosaic GPU: each one launch of one block.

What the block does is what `ukv_jax.requests` says in plain XLA, lane for lane: who is served is decided by the same
functions, which come as arguments and run here over 128 lanes a warpgroup. Arrays come flat. A thread has one lane of
the call, one request row and one page of a trip; so the kernels take up to 1024 of each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import gmem
from pallas_kernels.bind_pages.reference import is_page

MAX_THREADS = 1024  # the most that a block can have
IDLE = -1


@dataclass(frozen=True)
class Kind:
    """What the kernels need to know of one sub-pool. empty: its band without pages."""

    is_state: bool
    owns_ids: bool
    pages_are_ids: bool
    empty: tuple[int, int]


@dataclass(frozen=True)
class Rules:
    """Static facts of a pool. The four numbers of `status` are those of the states of a request row."""

    kinds: tuple[Kind, ...]
    max_requests: int
    max_pages: int
    free: int
    active: int
    parked: int
    releasing: int

    @property
    def state(self) -> int | None:
        """Index of the sub-pool of state slots."""
        return next((i for i, kind in enumerate(self.kinds) if kind.is_state), None)


def reserve(
    rules: Rules,
    demand: Callable[..., tuple],
    plan: Callable[..., tuple],
    state: tuple,
    *,
    rows: jax.Array,
    target: jax.Array,
    pages_per_row: int,
) -> dict[str, Any]:
    """Takes pages and a slot for rows, whole rows in lane order.

    demand(asked, inside, status, page_count, slot, target) gives (fault, pages, slots) of each lane; plan(usage, pages,
    slots) whether so many fit, and how each sub-pool grows. state: (pools, requests, counters). Returns the updated `pools`,
    `requests`, `counters`; the lanes' `granted`, `refused`, `fault` and `taken` pages; `fresh` physical slots and their
    `fresh_count`.
    """
    pools, requests, counters = state
    lanes, limit = rows.shape[0], rules.max_requests
    threads = _threads(lanes=lanes, rows=limit)
    warpgroups = threads // gmem.WARPGROUP
    _check_request_map(rules)
    one_trip = pages_per_row == 1
    fresh_slots = min(lanes, limit)

    def reserve_pages(refs: dict[str, Any], first, words, ends, row_of, held_of, **sums) -> None:
        p, r = refs["pools"], refs["requests"]
        me = _thread(warpgroups)
        in_list, at = me < lanes, jnp.minimum(me, lanes - 1)
        named, wanted = gmem.load(refs["rows"], at), gmem.load(refs["target"], at)
        usage = tuple((q.low[0], q.high[0], q.hole_count[0], q.free_count[0]) for q in p)
        inside, row = _own_row(first, named, in_list, me, limit, lanes, threads)
        status, held = gmem.load(r.status, row), gmem.load(r.page_count, row)
        slot = gmem.load(r.slots, row) if rules.state is not None else None
        asked = in_list & (named != IDLE) & (wanted > 0)
        fault, pages, slots = demand(asked, inside, status, held, slot, wanted)

        before, total = gmem.block_scan(pages, sums["page_sums"], warpgroups)
        slots_before, total_slots = gmem.splat(0), gmem.splat(0)
        if rules.state is not None:
            slots_before, total_slots = gmem.block_scan(slots, sums["slot_sums"], warpgroups)
        fits, _ = plan(usage, before + pages, slots_before + slots)
        needs = (pages > 0) | (slots > 0)
        short = needs & jnp.logical_not(fits)
        earlier, all_short = gmem.block_rank(gmem.mask(short), sums["short_sums"], warpgroups)
        # What lies before the first lane that is short is what all granted lanes take.
        cut = gmem.mask(short & (earlier == 0))
        gmem.shared_store(words, gmem.splat(0), before, cut)
        gmem.shared_store(words, gmem.splat(1), slots_before, cut)
        granted = asked & jnp.logical_not(fault) & (((earlier == 0) & jnp.logical_not(short)) | ~needs)
        live = gmem.mask(granted)
        taken = jnp.where(granted, pages, 0)
        gmem.block_barrier()
        whole = all_short == 0
        total = jnp.where(whole, total, gmem.shared_load(words, gmem.splat(0)))
        total_slots = jnp.where(whole, total_slots, gmem.shared_load(words, gmem.splat(1)))
        _, growth = plan(usage, total, total_slots)

        def page_of(i, k, live):
            """The k-th id and page that sub-pool i gives; 0 where not live."""
            kind, (_, _, holes, ids), grow = rules.kinds[i], usage[i], growth[i]
            virtual = gmem.splat(0)
            if kind.owns_ids:
                virtual = gmem.load(p[i].free_ids, _clip(ids - 1 - k, p[i].free_ids.shape[0]))
                virtual = jnp.where(live, virtual, 0)
            if kind.pages_are_ids:
                return virtual, virtual
            hole = gmem.load(p[i].holes, _clip(holes - 1 - k, p[i].holes.shape[0]))
            from_holes = jnp.minimum(total_slots if kind.is_state else total, holes)
            n = k - from_holes
            fresh = jnp.where(n < grow.grow_high, grow.high + n, grow.low - 1 - (n - grow.grow_high))
            return virtual, jnp.where(live, jnp.where(k < from_holes, hole, fresh), 0)

        def bind(i, virtual, physical):
            both = is_page(virtual, p[i].v2p.shape[0]) & is_page(physical, p[i].p2v.shape[0])
            gmem.store(p[i].v2p, virtual, physical, gmem.mask(both))
            gmem.store(p[i].p2v, physical, virtual, gmem.mask(both))
            held = (virtual > 0) & (virtual < p[i].refs.shape[0])
            gmem.store(p[i].refs, virtual, gmem.splat(1), gmem.mask(held))

        def bind_pages(k, live, row, column):
            virtual = gmem.splat(0)
            for i in reversed(range(len(p))):  # the owner's ids first: it is last in the chain
                if not rules.kinds[i].is_state:
                    ids, physical = page_of(i, k, live)
                    virtual = ids if rules.kinds[i].owns_ids else virtual
                    bind(i, virtual, physical)
            gmem.store(r.pages, row * rules.max_pages + column, virtual, gmem.mask(live))

        if one_trip:
            bind_pages(before, taken > 0, row, held)
        else:
            gmem.shared_store(ends, at, jnp.minimum(before + pages, total), gmem.mask(in_list))
            gmem.shared_store(row_of, at, row, gmem.mask(in_list))
            gmem.shared_store(held_of, at, held, gmem.mask(in_list))
            gmem.shared_store(words, gmem.splat(2), total, gmem.mask(me == 0))
            gmem.block_barrier()

            def trip(t, _):
                k = t * threads + me
                lane, start = _bin(ends, lanes, k)
                row, held = gmem.shared_load(row_of, lane), gmem.shared_load(held_of, lane)
                bind_pages(k, k < total, row, held + k - start)

            lax.fori_loop(0, (words[2] + (threads - 1)) // threads, trip, None)

        if (i := rules.state) is not None:
            takes = granted & (slots > 0)
            ids, physical = page_of(i, slots_before, takes)
            bind(i, ids, physical)
            gmem.store(r.slots, row, ids, gmem.mask(takes & (ids > 0)))
            gmem.store(refs["fresh"], me, gmem.splat(0), gmem.mask((me >= total_slots) & (me < fresh_slots)))
            gmem.store(refs["fresh"], slots_before, physical, gmem.mask(takes))

        gmem.store(r.page_count, row, held + taken, live)
        gmem.store(r.status, row, gmem.splat(rules.active), live)
        refused = gmem.mask(asked & jnp.logical_not(fault) & jnp.logical_not(granted))
        for name, value in dict(granted=live, refused=refused, fault=gmem.mask(fault)).items():
            gmem.store_bool(refs[name], me, value, gmem.mask(in_list))
        gmem.store(refs["taken"], me, taken, gmem.mask(in_list))
        nothing, one = gmem.splat(0), gmem.splat(1)
        gmem.atomic_add(refs["counters"].faults, nothing, one, gmem.mask(fault))
        gmem.atomic_add(refs["counters"].refused, nothing, one, refused)
        leader = gmem.mask(me == 0)
        gmem.store(refs["fresh_count"], nothing, total_slots, leader)
        for i, kind in enumerate(rules.kinds):
            _, _, holes, ids = usage[i]
            n = total_slots if kind.is_state else total
            if kind.owns_ids:
                gmem.store(p[i].free_count, nothing, ids - n, leader)
            if not kind.pages_are_ids:
                gmem.store(p[i].hole_count, nothing, holes - jnp.minimum(n, holes), leader)
                gmem.store(p[i].low, nothing, nothing + growth[i].low - growth[i].grow_low, leader)
                gmem.store(p[i].high, nothing, nothing + growth[i].high + growth[i].grow_high, leader)

    answer = jax.ShapeDtypeStruct((lanes,), jnp.bool_)
    return gmem.launch(
        reserve_pages,
        inputs=dict(rows=rows, target=target),
        in_place=dict(pools=pools, requests=requests, counters=counters),
        outputs=dict(
            granted=answer,
            refused=answer,
            fault=answer,
            taken=jax.ShapeDtypeStruct((lanes,), jnp.int32),
            fresh=jax.ShapeDtypeStruct((fresh_slots,), jnp.int32),
            fresh_count=jax.ShapeDtypeStruct((1,), jnp.int32),
        ),
        grid=dict(block=1),
        warpgroups=warpgroups,
        scratch=dict(
            first=_shared(limit),
            words=_shared(3),
            ends=_shared(1 if one_trip else lanes),
            row_of=_shared(1 if one_trip else lanes),
            held_of=_shared(1 if one_trip else lanes),
            **{name: _shared(4 * warpgroups) for name in ("page_sums", "slot_sums", "short_sums")},
        ),
    )


def release(
    rules: Rules,
    state: tuple,
    *,
    rows: jax.Array | None,
    max_pages: int,
) -> dict[str, Any]:
    """Takes pages of ended requests, `max_pages` a trip.

    state: (pools, requests, counters). rows: requests to end first; then all pages of ended requests go, in trips. None:
    one trip. Returns the updated `pools`, `requests`, `counters`, and with rows which of them `ended`.
    """
    pools, requests, counters = state
    limit = rules.max_requests
    lanes = 0 if rows is None else rows.shape[0]
    named_lanes = {} if rows is None else {"lanes": lanes}
    threads = _threads(**named_lanes, rows=limit, pages=max_pages)
    warpgroups = threads // gmem.WARPGROUP
    _check_request_map(rules)
    windows = [i for i, kind in enumerate(rules.kinds) if not kind.owns_ids]

    def release_pages(refs: dict[str, Any], first, words, ends, page_sums, **sums) -> None:
        p, r = refs["pools"], refs["requests"]
        me = _thread(warpgroups)
        has_row, own = me < limit, jnp.minimum(me, limit - 1)
        status, held = gmem.load(r.status, own), gmem.load(r.page_count, own)
        slot = gmem.load(r.slots, own) if rules.state is not None else None
        tops = tuple((q.hole_count[0], q.free_count[0]) for q in p)
        sizes = [q.high[0] - q.low[0] for q in p]
        faults = gmem.splat(0)
        if rows is not None:
            in_list = me < lanes
            named = gmem.load(refs["rows"], jnp.minimum(me, lanes - 1))
            inside, row = _own_row(first, named, in_list, me, limit, lanes, threads)
            ends_here = inside & _may_end(rules, gmem.load(r.status, row))
            faults += gmem.mask(in_list & (named != IDLE) & jnp.logical_not(ends_here))
            gmem.store_bool(refs["ended"], me, gmem.mask(ends_here), gmem.mask(in_list))
            is_named = gmem.shared_load(first, own) < lanes
            status = jnp.where(is_named & _may_end(rules, status), rules.releasing, status)
        releasing = has_row & (status == rules.releasing)
        held = jnp.where(releasing, held, 0)

        _, total = gmem.block_scan(held, sums["all_sums"], warpgroups)
        _, rows_left = gmem.block_rank(gmem.mask(releasing), sums["row_sums"], warpgroups)
        trips = jnp.maximum((total + (max_pages - 1)) // max_pages, 1) if rows is not None else 1
        gmem.shared_store(words, gmem.splat(0), jnp.where(rows_left > 0, trips, 0), gmem.mask(me == 0))
        gmem.block_barrier()

        def trip(_, carry):
            held, waits, pushed, faults = carry
            before, total = gmem.block_scan(held, page_sums, warpgroups)
            gmem.shared_store(ends, own, before + held, gmem.mask(has_row))
            gmem.block_barrier()
            live = (me < max_pages) & (me < total)
            row, _ = _bin(ends, limit, me)
            column = gmem.shared_load(ends, row) - 1 - me
            column = jnp.where(live, column, 0)
            at = row * rules.max_pages + column
            page = jnp.where(live, gmem.load(r.pages, at), IDLE)
            gmem.store(r.pages, at, gmem.splat(IDLE), gmem.mask(live))
            taken = jnp.clip(max_pages - before, 0, held)
            held -= taken
            done = (waits != 0) & (held == 0)

            given = []
            for i, kind in enumerate(rules.kinds):
                if kind.is_state:
                    given.append(jnp.where(done & (slot > 0), slot, IDLE))
                elif kind.owns_ids:
                    given.append(page)
                else:
                    window = gmem.load(r.window_first, windows.index(i) * limit + row)
                    given.append(jnp.where(column >= window, page, IDLE))
            known = jnp.where(page > 0, jnp.minimum(page, r.page_to_req.shape[0] - 1), 0)
            writer = gmem.load_coherent(r.page_to_req, known)
            freed, pushed, found = _drop(rules, p, given, tops, pushed, me, threads, sums, warpgroups)
            [gone] = [f for f, kind in zip(freed, rules.kinds) if kind.owns_ids and not kind.is_state]
            unowned = (page > 0) & (gone | (writer == row)) & (page < r.page_to_req.shape[0])
            # Several lanes may name one page.
            gmem.atomic_min(r.page_to_req, known, gmem.splat(IDLE), gmem.mask(unowned))
            return held, gmem.mask((waits != 0) & jnp.logical_not(done)), pushed, faults + found

        nothing = gmem.splat(0)
        waits = gmem.mask(releasing)
        carry = held, waits, tuple(nothing for _ in p), faults
        left, waits, pushed, faults = lax.fori_loop(0, words[0], trip, carry)

        changed = gmem.mask(releasing)
        done = gmem.mask(releasing & (waits == 0))
        gmem.store(r.page_count, own, left, changed)
        gmem.store(r.status, own, jnp.where(done != 0, rules.free, rules.releasing), changed)
        for array in (r.seq_len, *([r.slots] if rules.state is not None else [])):
            gmem.store(array, own, nothing, done)
        for w in range(len(windows)):
            gmem.store(r.window_first, w * limit + own, nothing, done)
        gmem.atomic_add(refs["counters"].faults, nothing, faults, gmem.mask(faults != 0))
        leader = me == 0
        for i, kind in enumerate(rules.kinds):
            hole_top, id_top = tops[i]
            if kind.owns_ids:
                gmem.store(p[i].free_count, nothing, id_top + pushed[i], gmem.mask(leader))
            if not kind.pages_are_ids:
                # The last live page gone, the band is empty again and so are its holes.
                holes = hole_top + pushed[i]
                empty = sizes[i] == holes
                if rows is not None:
                    empty &= rows_left > 0
                gmem.store(p[i].hole_count, nothing, jnp.where(empty, 0, holes), gmem.mask(leader))
                low, high = kind.empty
                gmem.store(p[i].low, nothing, gmem.splat(low), gmem.mask(leader & empty))
                gmem.store(p[i].high, nothing, gmem.splat(high), gmem.mask(leader & empty))

    sums = [f"sums_{i}" for i in range(len(pools))]
    return gmem.launch(
        release_pages,
        inputs={} if rows is None else dict(rows=rows),
        in_place=dict(pools=pools, requests=requests, counters=counters),
        outputs={} if rows is None else dict(ended=jax.ShapeDtypeStruct((lanes,), jnp.bool_)),
        grid=dict(block=1),
        warpgroups=warpgroups,
        scratch=dict(
            first=_shared(1 if rows is None else limit),
            words=_shared(1),
            ends=_shared(limit),
            **{name: _shared(4 * warpgroups) for name in ("page_sums", "all_sums", "row_sums", *sums)},
        ),
    )


def _drop(rules, pools, given, tops, pushed, me, threads, sums, warpgroups):
    """Takes one holder from each lane's page in every sub-pool at once; a page without holders becomes a tombstone.

    Returns, of each sub-pool, which lanes freed their page and the pages freed so far; and the faults of each lane.
    """
    faults, lanes = gmem.splat(0), []
    for q, virtual in zip(pools, given, strict=True):
        inside = (virtual > 0) & (virtual < q.refs.shape[0])
        row = jnp.where(inside, virtual, 0)
        physical = gmem.load_coherent(q.v2p, row)
        live = inside & (physical > 0)
        gmem.atomic_add(q.refs, row, gmem.splat(-1), gmem.mask(live))
        faults += gmem.mask((virtual != IDLE) & jnp.logical_not(live))
        lanes.append((row, physical, live))
    gmem.block_barrier()  # all have read the pages before the first claim, and all holders are gone
    # Lanes claim their row with values below all pages, the first lane's lowest: see `reference.tombstone`.
    claim = me - (threads + 1)
    claims = []
    for q, (row, physical, live) in zip(pools, lanes):
        left = gmem.load_coherent(q.refs, row)
        dead = live & (left <= 0) & is_page(physical, q.p2v.shape[0])
        gmem.atomic_min(q.v2p, row, claim, gmem.mask(dead))
        claims.append((left, dead))
    gmem.block_barrier()
    freed, counts = [], []
    for i, (q, (row, physical, _), (left, dead)) in enumerate(zip(pools, lanes, claims)):
        kind, (hole_top, id_top) = rules.kinds[i], tops[i]
        wins = dead & (gmem.load_coherent(q.v2p, row) == claim)
        faults += jnp.where(wins, -left, 0)
        # The ranks' barrier lies between the last look at a claim and its end.
        rank, count = gmem.block_rank(gmem.mask(wins), sums[f"sums_{i}"], warpgroups)
        live = gmem.mask(wins)
        gmem.store(q.v2p, row, gmem.splat(IDLE), live)
        gmem.store(q.p2v, physical, gmem.splat(IDLE), live)
        gmem.store(q.refs, row, gmem.splat(0), live)
        if not kind.pages_are_ids:
            place = hole_top + pushed[i] + rank
            gmem.store(q.holes, place, physical, gmem.mask(wins & (place < q.holes.shape[0])))
        if kind.owns_ids:
            place = id_top + pushed[i] + rank
            gmem.store(q.free_ids, place, row, gmem.mask(wins & (place < q.free_ids.shape[0])))
        freed.append(wins)
        counts.append(pushed[i] + count)
    gmem.block_barrier()  # the next trip reads what this one wrote
    return freed, tuple(counts), faults


def _threads(**counts: int) -> int:
    for name, count in counts.items():
        if not 0 < count <= MAX_THREADS:
            raise NotImplementedError(f"{count} {name}: the kernel takes 1 to {MAX_THREADS}, one a thread")
    most = max(counts.values())
    return -(-most // gmem.WARPGROUP) * gmem.WARPGROUP


def _check_request_map(rules: Rules) -> None:
    if rules.max_requests * rules.max_pages >= 2**31:
        raise NotImplementedError(f"a request map of {rules.max_requests} x {rules.max_pages}, past int32")


def _thread(warpgroups: int) -> jax.Array:
    warpgroup = lax.axis_index("warpgroup") if warpgroups > 1 else 0
    return warpgroup * gmem.WARPGROUP + gmem.iota(gmem.WARPGROUP)


def _shared(words: int):
    return plgpu.SMEM((words,), jnp.int32)


def _clip(index: jax.Array, size: int) -> jax.Array:
    return jnp.clip(index, 0, size - 1)


def _may_end(rules: Rules, status: jax.Array) -> jax.Array:
    return (status == rules.active) | (status == rules.parked)


def _own_row(first, named, in_list, me, limit, lanes, threads) -> tuple[jax.Array, jax.Array]:
    """Which lanes name a row of their own, and the row, with row 0 in lanes out of range. first: the first lane of each
    row afterwards, `lanes` where none names it."""
    inside = in_list & (named >= 0) & (named < limit)
    row = jnp.where(inside, named, 0)
    for start in range(0, limit, threads):
        at = start + me
        gmem.shared_store(first, jnp.minimum(at, limit - 1), gmem.splat(lanes), gmem.mask(at < limit))
    gmem.block_barrier()
    gmem.shared_min(first, row, me, gmem.mask(inside))
    gmem.block_barrier()
    return inside & (gmem.shared_load(first, row) == me), row


def _bin(ends, count: int, item: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The bin of an item of a flat worklist, whose bins end at `ends` (in shared memory), and the first item of the bin.
    Items past the last end are put into the last bin."""
    passed, step = gmem.splat(0), 1 << (count.bit_length() - 1)
    start = gmem.splat(0)
    while step:
        probe = passed + step
        end = gmem.shared_load(ends, jnp.minimum(probe, count) - 1)
        below = (probe <= count) & (end <= item)
        passed, start = jnp.where(below, probe, passed), jnp.where(below, end, start)
        step //= 2
    return jnp.minimum(passed, count - 1), start
