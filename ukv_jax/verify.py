"""Is this state sound? Everything that must hold after every operation, checked on the host.

`verify` reads the whole state (ids and padding bytes, not the other bytes of the buffer) and returns one message for each
broken rule; it is for tests, for debugging and for a service's health check, never for the step path.
"""

import jax
import numpy as np

from ukv_jax import views
from ukv_jax.layout import PADDING, PoolLayout, SubPool, UnifiedLayout
from ukv_jax.pool import ACTIVE, FREE, PARKED, RELEASING, UNBOUND, PoolState, SubPoolState, pages_are_ids
from ukv_jax.requests import tokens_per_page

SHOWN = 6  # ids that one message lists


def verify(state: PoolState) -> list[str]:
    """Messages, one for each broken rule; empty if the state is sound.

    Checked: v2p and p2v are inverse on live pages; live pages and holes fill the band; free ids, holes and live pages are
    disjoint and complete; bands are ordered, inside the buffer and disjoint in bytes; padding rows are 0, last rows -1
    and padding bytes zero; request rows, reference counts and page_to_req agree.
    """
    messages = []
    for index, (spec, pool) in enumerate(zip(state.layout.subpools, state.subpools)):
        host = _host(pool)
        wrong = _shapes(spec, host)
        if not wrong:
            wrong = _maps(spec, host) + _ids(spec, host)
            wrong += _pages(state.layout, spec, host) + _padding_bytes(state, index)
        messages += [f"{spec.name}: {message}" for message in wrong]
    return messages + _bands(state) + _requests(state) + _counters(state)


def check(state: PoolState) -> None:
    """Raises AssertionError with every message of `verify`, if there is one."""
    messages = verify(state)
    if messages:
        raise AssertionError(f"{len(messages)} broken rules:\n" + "\n".join(messages))


def _host(pool: SubPoolState) -> dict[str, np.ndarray]:
    return {name: np.asarray(getattr(pool, name)) for name in pool.__dataclass_fields__}


def _some(ids) -> str:
    """The first few ids, and how many there are."""
    ids = np.asarray(ids).reshape(-1)
    more = f" and {ids.size - SHOWN} more" if ids.size > SHOWN else ""
    return ", ".join(str(int(i)) for i in ids[:SHOWN]) + more


def _shapes(spec: SubPool, pool: dict[str, np.ndarray]) -> list[str]:
    expected = {
        "v2p": (spec.num_virtual + 1,),
        "p2v": (spec.num_pages + 1,),
        "refs": (spec.num_virtual,),
        "free_ids": (spec.num_virtual,),
        "holes": (spec.num_pages,),
        "free_count": (),
        "hole_count": (),
        "low": (),
        "high": (),
    }
    return [
        f"{name} is {pool[name].dtype}{list(pool[name].shape)}, expected int32{list(shape)}"
        for name, shape in expected.items()
        if pool[name].shape != shape or pool[name].dtype != np.int32
    ]


def _maps(spec: SubPool, pool: dict[str, np.ndarray]) -> list[str]:
    wrong = []
    v2p, p2v = pool["v2p"], pool["p2v"]
    for name, table in (("v2p", v2p), ("p2v", p2v)):
        if table[PADDING] != 0:
            wrong.append(f"{name}[0] is {table[PADDING]}, the padding row must be 0")
        if table[-1] != UNBOUND:
            wrong.append(f"{name}[{table.size - 1}] is {table[-1]}, the last row must be -1")
    for name, table, limit in (("v2p", v2p, spec.num_pages), ("p2v", p2v, spec.num_virtual)):
        rows = table[1:-1]
        bad = np.flatnonzero((rows != UNBOUND) & ((rows <= 0) | (rows >= limit))) + 1
        if bad.size:
            wrong.append(f"{name} rows {_some(bad)} hold {_some(table[bad])}: neither -1 nor in [1, {limit})")
    if wrong:
        return wrong
    virtual = np.flatnonzero(v2p[:-1] > 0)
    astray = virtual[p2v[v2p[virtual]] != virtual]
    wrong += [f"v2p[{v}] = {v2p[v]}, but p2v[{v2p[v]}] = {p2v[v2p[v]]}" for v in astray[:SHOWN]]
    physical = np.flatnonzero(p2v[:-1] > 0)
    astray = physical[v2p[p2v[physical]] != physical]
    wrong += [f"p2v[{p}] = {p2v[p]}, but v2p[{p2v[p]}] = {v2p[p2v[p]]}" for p in astray[:SHOWN]]
    return wrong


def _stack(name: str, stack: np.ndarray, count: int, limit: int, live: np.ndarray) -> list[str]:
    """Rules of a free list: its ids are in [1, limit), distinct and not live."""
    if not 0 <= count <= stack.size:
        return [f"{name} count {count} is outside [0, {stack.size}]"]
    wrong, ids = [], stack[:count]
    outside = ids[(ids <= 0) | (ids >= limit)]
    if outside.size:
        wrong.append(f"{name} hold {_some(outside)}: outside [1, {limit})")
    values, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        wrong.append(f"{name} hold {_some(values[counts > 1])} more than once")
    both = np.intersect1d(ids, live)
    if both.size:
        wrong.append(f"{name} hold {_some(both)}, which are live")
    return wrong


def _ids(spec: SubPool, pool: dict[str, np.ndarray]) -> list[str]:
    live = np.flatnonzero(pool["v2p"][:-1] > 0)
    refs, wrong = pool["refs"], []
    if (refs < 0).any():
        wrong.append(f"refs of pages {_some(np.flatnonzero(refs < 0))} are negative")
    held = np.flatnonzero(refs > 0)
    for ids, text in (
        (np.setdiff1d(live, held), "are live and have no holder"),
        (np.setdiff1d(held, live), "have holders and are not live"),
    ):
        if ids.size:
            wrong.append(f"virtual pages {_some(ids)} {text}")
    if spec.owns_ids:
        count = int(pool["free_count"])
        wrong += _stack("free ids", pool["free_ids"], count, spec.num_virtual, live)
        if live.size + count != spec.num_virtual - 1:
            wrong.append(
                f"{live.size} live ids + {count} free ids are not the {spec.num_virtual - 1} ids of the sub-pool"
            )
    return wrong


def _pages(layout: PoolLayout, spec: SubPool, pool: dict[str, np.ndarray]) -> list[str]:
    virtual = np.flatnonzero(pool["v2p"][:-1] > 0)
    live = np.sort(pool["v2p"][virtual])
    if pages_are_ids(layout, spec):
        moved = virtual[pool["v2p"][virtual] != virtual]
        wrong = (
            [f"virtual pages {_some(moved)} are not their own physical pages in a static split"]
            if moved.size
            else []
        )
        if pool["hole_count"]:
            wrong.append(f"{pool['hole_count']} holes listed, a static owner keeps none")
        return wrong
    low, high, holes = int(pool["low"]), int(pool["high"]), int(pool["hole_count"])
    wrong = _stack("holes", pool["holes"], holes, spec.num_pages, live)
    if not spec.first_page <= low <= high <= spec.num_pages:
        wrong.append(f"band [{low}, {high}) does not lie in [{spec.first_page}, {spec.num_pages})")
    if wrong:
        return wrong
    for name, pages in (("live pages", live), ("holes", pool["holes"][:holes])):
        outside = pages[(pages < low) | (pages >= high)]
        if outside.size:
            wrong.append(f"{name} {_some(outside)} lie outside the band [{low}, {high})")
    if live.size + holes != high - low:
        wrong.append(
            f"{live.size} live pages + {holes} holes are not the {high - low} pages of the band [{low}, {high})"
        )
    return wrong


_read_rows = jax.jit(views.read_rows, static_argnums=(1, 2))


def _padding_bytes(state: PoolState, index: int) -> list[str]:
    spec, wrong = state.layout.subpools[index], []
    for region in spec.regions:
        blocks = np.array([spec.block_offset(j, region.name) for j in range(region.count)], np.int32)
        stored = np.asarray(_read_rows(state.buffer, "uint8", region.block_bytes, blocks))
        dirty = np.flatnonzero(stored.any(axis=1))
        if dirty.size:
            wrong.append(
                f"padding page has bytes that are not zero in blocks {_some(dirty)} of region {region.name!r}"
            )
    return wrong


def _bands(state: PoolState) -> list[str]:
    layout = state.layout
    if not isinstance(layout, UnifiedLayout):
        return []
    wrong, edge, below = [], layout.reserved_bytes, "the reserved bottom"
    last = len(layout.subpools) - 1
    for i, (spec, pool) in enumerate(zip(layout.subpools, state.subpools)):
        low, high = int(pool.low), int(pool.high)
        if i == 0 and low != spec.first_page:
            wrong.append(f"{spec.name}: grows up from page {spec.first_page}, its band begins at {low}")
        if i == last > 0 and high != spec.num_pages:
            wrong.append(f"{spec.name}: grows down from page {spec.num_pages}, its band ends at {high}")
        if low >= high:
            continue
        if low * spec.page_bytes < edge:
            wrong.append(f"{spec.name}: band begins at byte {low * spec.page_bytes}, {below} ends at {edge}")
        edge, below = high * spec.page_bytes, spec.name
        if edge > layout.total_bytes:
            wrong.append(f"{spec.name}: band ends at byte {edge}, the buffer has {layout.total_bytes}")
    return wrong


def _requests(state: PoolState) -> list[str]:
    layout, r = state.layout, state.requests
    pages, count, slots = np.asarray(r.pages), np.asarray(r.page_count), np.asarray(r.slots)
    status, length, first = np.asarray(r.status), np.asarray(r.seq_len), np.asarray(r.window_first)
    wrong = []

    def complain(rows: np.ndarray, text: str) -> None:
        if rows.any():
            wrong.append(f"requests {_some(np.flatnonzero(rows))} {text}")

    complain(~np.isin(status, (FREE, ACTIVE, PARKED, RELEASING)), "have no known status")
    complain((count < 0) | (count > layout.max_pages), f"have a page count outside [0, {layout.max_pages}]")
    column = np.arange(layout.max_pages)
    used = column < count[:, None]
    complain((used & (pages <= 0)).any(axis=1), "have a hole or the padding page among their pages")
    complain((~used & (pages != UNBOUND)).any(axis=1), "name pages behind their page count")
    complain(
        (status == FREE) & ((count != 0) | (slots != 0) | (length != 0) | (first != 0).any(axis=0)),
        "are free, yet hold something",
    )
    kept = (status == ACTIVE) | (status == PARKED)
    complain(
        kept & ((length < 0) | (length > count * tokens_per_page(layout))), "are longer than their pages"
    )
    complain(
        (first < 0).any(axis=0) | (kept & (first > count).any(axis=0)),
        "begin their window behind their pages",
    )
    if layout.state is None:
        complain(slots != 0, "hold a state slot, the layout has none")
    if wrong:
        return wrong

    row, col = np.nonzero(used)
    window = 0
    for spec, pool in zip(layout.subpools, state.subpools):
        if spec.is_state:
            ids = slots[slots != 0]
        elif spec.owns_ids:
            ids = pages[row, col]
        else:
            ids = pages[row, col][col >= first[window, row]]
            window += 1
        outside = ids[(ids < 0) | (ids >= spec.num_virtual)]
        if outside.size:
            wrong.append(f"{spec.name}: requests hold ids {_some(outside)}, outside [1, {spec.num_virtual})")
            continue
        holders = np.bincount(ids, minlength=spec.num_virtual)
        refs = np.asarray(pool.refs)
        wrong += [
            f"{spec.name}: refs[{v}] is {refs[v]}, {holders[v]} requests hold the page"
            for v in np.flatnonzero(holders != refs)[:SHOWN]
        ]
    repeated = [b for b in range(layout.max_requests) if len(set(pages[b, : count[b]].tolist())) < count[b]]
    if repeated:
        wrong.append(f"requests {_some(repeated)} hold a page twice")

    writer = np.asarray(r.page_to_req)
    if writer[PADDING] != UNBOUND:
        wrong.append(f"page_to_req[0] is {writer[PADDING]}, nobody writes the padding page")
    for v in np.flatnonzero(writer[1:] >= 0) + 1:
        b = writer[v]
        if b >= layout.max_requests or v not in pages[b, : count[b]]:
            wrong.append(f"page_to_req[{v}] is {b}, which does not hold the page")
    return wrong


def _counters(state: PoolState) -> list[str]:
    values = {"gate": state.gate} | {
        name: getattr(state.counters, name) for name in ("faults", "refused", "moved")
    }
    return [f"{name} is {int(value)}, below zero" for name, value in values.items() if int(value) < 0]
