"""A pool in plain Python: dicts, lists and sets, one request at a time. Slow, and meant to be obviously right.

It predicts who holds which virtual page, every status, length and reference count, which calls are faults and which
requests are refused. It does not predict which free id or page is handed out, nor where a page lies: it takes those from
the state that it is compared with, and says what they must not be.
"""

from dataclasses import dataclass, field

import numpy as np

from ukv_jax.layout import PoolLayout, SubPool, UnifiedLayout
from ukv_jax.pool import ACTIVE, FREE, PARKED, RELEASING, PoolState

IDLE = -1


@dataclass
class Row:
    status: int = FREE
    pages: list[int] = field(default_factory=list)
    slot: int = 0
    length: int = 0
    first: dict[str, int] = field(
        default_factory=dict
    )  # of each window: the first column that it still holds


@dataclass
class Band:
    """What a state says of one sub-pool's pages."""

    low: int
    high: int
    holes: int
    free_ids: int

    @property
    def live(self) -> int:
        return self.high - self.low - self.holes


def bands(state: PoolState) -> list[Band]:
    return [Band(int(p.low), int(p.high), int(p.hole_count), int(p.free_count)) for p in state.subpools]


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def fits(layout: PoolLayout, now: list[Band], demand: list[int]) -> bool:
    """Whether there is any place for `demand[i]` more pages of each sub-pool, nothing being moved."""
    for s, b, d in zip(layout.subpools, now, demand):
        if s.owns_ids and d > b.free_ids:
            return False
    if not isinstance(layout, UnifiedLayout):
        return all(
            s.owns_ids or max(d - b.holes, 0) <= s.num_pages - b.high
            for s, b, d in zip(layout.subpools, now, demand)
        )
    extra = [max(d - b.holes, 0) for b, d in zip(now, demand)]
    first, last = layout.subpools[0], layout.subpools[-1]
    edge = (now[0].high + extra[0]) * first.page_bytes
    if len(layout.subpools) == 1:
        return edge <= first.num_pages * first.page_bytes
    # Every float as low as it can go leaves the most to those above it.
    for s, b, e in list(zip(layout.subpools, now, extra))[1:-1]:
        if b.low == b.high:
            if e:
                edge = (_ceil(edge, s.page_bytes) + e) * s.page_bytes
            continue
        room_below = b.low - _ceil(edge, s.page_bytes)
        if room_below < 0:
            return False
        edge = (b.high + max(e - room_below, 0)) * s.page_bytes
    return edge <= (now[-1].low - extra[-1]) * last.page_bytes


def fits_compacted(layout: PoolLayout, now: list[Band], demand: list[int]) -> bool:
    """Whether `demand` fits once all pages lie as low as they can (the last sub-pool as high)."""
    if not isinstance(layout, UnifiedLayout):
        return fits(layout, now, demand)
    for s, b, d in zip(layout.subpools, now, demand):
        if s.owns_ids and d > b.free_ids:
            return False
    first, last = layout.subpools[0], layout.subpools[-1]
    edge = first.first_page * first.page_bytes
    for s, b, d in zip(layout.subpools, now, demand):
        pages = b.live + d
        if s is last and len(layout.subpools) > 1:
            return edge <= (s.num_pages - pages) * s.page_bytes
        if pages:
            edge = (_ceil(edge, s.page_bytes) + pages) * s.page_bytes
    return edge <= first.num_pages * first.page_bytes


class Oracle:
    """The model. Its methods take what the jitted functions take, as plain lists, and return their expected outcome."""

    def __init__(self, layout: PoolLayout):
        self.layout = layout
        self.tokens_per_page = layout.page_size * layout.dcp
        self.faults = self.refused = 0
        self.gate = 0
        self.reset()

    def reset(self) -> None:
        self.rows = [
            Row(first={s.name: 0 for s in self.layout.windows}) for _ in range(self.layout.max_requests)
        ]
        self.writer: dict[int, int] = {}

    # What follows from the rows.

    def holders(self, spec: SubPool) -> dict[int, int]:
        """References to each virtual page (or slot) of a sub-pool."""
        count: dict[int, int] = {}
        for row in self.rows:
            if spec.is_state:
                ids = [row.slot] if row.slot else []
            elif spec.owns_ids:
                ids = row.pages
            else:
                ids = row.pages[row.first[spec.name] :]
            for v in ids:
                count[v] = count.get(v, 0) + 1
        return count

    def pages_for(self, tokens: int) -> int:
        return _ceil(max(tokens, 0), self.tokens_per_page)

    @property
    def max_tokens(self) -> int:
        return self.layout.max_pages * self.tokens_per_page

    def _lanes(self, rows: list[int]):
        """(lane, row number, row or None if the lane names no row of its own) of the lanes that are not idle."""
        seen = set()
        for lane, r in enumerate(rows):
            if r == IDLE:
                continue
            known = 0 <= r < len(self.rows) and r not in seen
            seen.add(r)
            yield lane, r, self.rows[r] if known else None

    def _demand(self, pages: int, slots: int) -> list[int]:
        return [slots if s.is_state else pages for s in self.layout.subpools]

    # Operations.

    def reserve(self, rows: list[int], target: list[int], pages_per_row: int, now: list[Band], fits=fits):
        """Outcome of each lane: None (idle), "fault", "refused", or (pages, slots) that it is granted."""
        outcome: list = [None] * len(rows)
        total_pages = total_slots = 0
        short = False
        for lane, _, row in self._lanes(rows):
            if target[lane] <= 0:
                continue
            if row is None or row.status not in (FREE, ACTIVE) or target[lane] > self.max_tokens:
                outcome[lane] = "fault"
                continue
            pages = max(self.pages_for(target[lane]) - len(row.pages), 0)
            slots = int(self.layout.state is not None and row.slot == 0)
            if pages > pages_per_row:
                outcome[lane] = "fault"
                continue
            if not pages and not slots:
                outcome[lane] = (0, 0)
                continue
            short = short or not fits(
                self.layout, now, self._demand(total_pages + pages, total_slots + slots)
            )
            if short:
                outcome[lane] = "refused"
                continue
            total_pages, total_slots = total_pages + pages, total_slots + slots
            outcome[lane] = (pages, slots)
        self.faults += outcome.count("fault")
        self.refused += outcome.count("refused")
        return outcome

    def grant(self, r: int, pages: list[int], slot: int) -> None:
        """Row r got these pages and, if slot is not 0, this slot: they must have been free."""
        row = self.rows[r]
        taken = self.holders(self.layout.full)
        for v in pages:
            assert 0 < v < self.layout.full.num_virtual, f"row {r} got page {v}"
            assert v not in taken, f"row {r} got page {v}, which is held"
        assert len(set(pages)) == len(pages)
        row.pages += pages
        row.status = ACTIVE
        if slot:
            assert self.layout.state is not None
            assert 0 < slot < self.layout.state.num_virtual
            assert slot not in self.holders(self.layout.state), f"row {r} got slot {slot}, which is held"
            row.slot = slot

    def append(self, rows: list[int], tokens: list[int], max_tokens: int) -> list[bool]:
        ok = [False] * len(rows)
        for lane, r, row in self._lanes(rows):
            n = tokens[lane]
            if n == 0:
                continue
            if row is None or row.status != ACTIVE or not 0 < n <= max_tokens:
                self.faults += 1
                continue
            if row.length + n > len(row.pages) * self.tokens_per_page:
                self.faults += 1
                continue
            for position in range(row.length, row.length + n):
                self.writer[row.pages[position // self.tokens_per_page]] = r
            row.length += n
            ok[lane] = True
        return ok

    def change(self, rows: list[int], source: tuple[int, ...], target: int) -> list[bool]:
        """park, resume and mark_release."""
        ok = [False] * len(rows)
        for lane, _, row in self._lanes(rows):
            if row is None or row.status not in source:
                self.faults += 1
                continue
            row.status = target
            ok[lane] = True
        return ok

    def park(self, rows):
        return self.change(rows, (ACTIVE,), PARKED)

    def resume(self, rows):
        return self.change(rows, (PARKED,), ACTIVE)

    def mark_release(self, rows):
        return self.change(rows, (ACTIVE, PARKED), RELEASING)

    def release_pending(self, max_pages: int) -> None:
        """Rows in order, the pages of each from its end."""
        for r, row in enumerate(self.rows):
            if row.status != RELEASING:
                continue
            while row.pages and max_pages:
                v = row.pages.pop()
                max_pages -= 1
                if self.writer.get(v) == r or v not in self.holders(self.layout.full):
                    self.writer.pop(v, None)
            if not row.pages:
                self.rows[r] = Row(first={s.name: 0 for s in self.layout.windows})

    def release(self, rows):
        ok = self.mark_release(rows)
        self.release_pending(10**9)
        return ok

    def attach(self, rows: list[int], pages: list[list[int]], lengths: list[int]) -> list[bool]:
        ok = [False] * len(rows)
        live = set(self.holders(self.layout.full))
        for lane, _, row in self._lanes(rows):
            wanted = [v for v in pages[lane] if v != IDLE]
            behind = pages[lane][len(wanted) :]
            sound = row is not None and row.status == FREE and wanted and all(v == IDLE for v in behind)
            sound = sound and set(wanted) <= live and len(set(wanted)) == len(wanted)
            if not (sound and lengths[lane] == len(wanted) * self.tokens_per_page):
                self.faults += 1
                continue
            row.status, row.pages, row.length = ACTIVE, wanted, lengths[lane]
            row.first = dict.fromkeys(row.first, len(wanted))
            ok[lane] = True
        return ok

    def needed_from(self, row: Row, spec: SubPool) -> int:
        """First column of a window that the row's next token can see."""
        oldest = row.length - spec.window + 1
        return max(oldest, 0) // self.tokens_per_page

    def release_window(self, max_pages: int) -> int:
        dropped = 0
        for spec in self.layout.windows:
            left = max_pages
            for row in self.rows:
                while (
                    row.status == ACTIVE
                    and left
                    and row.first[spec.name] < min(self.needed_from(row, spec), len(row.pages))
                ):
                    row.first[spec.name] += 1
                    left -= 1
                    dropped += 1
        return dropped

    def rebind_window(self, rows: list[int], pages_per_row: int, now: list[Band]):
        """Outcome of each lane: None, "fault", "refused", or the number of fresh pages; rows change where granted."""
        outcome: list = [None] * len(rows)
        fresh: dict[str, set[int]] = {s.name: set() for s in self.layout.windows}
        live = {s.name: set(self.holders(s)) for s in self.layout.windows}
        short = False
        for lane, _, row in self._lanes(rows):
            if row is None or row.status != ACTIVE:
                outcome[lane] = "fault"
                continue
            regain = {}
            for s in self.layout.windows:
                first = min(self.needed_from(row, s), row.first[s.name])
                regain[s.name] = row.pages[first : row.first[s.name]]
            if any(len(pages) > pages_per_row for pages in regain.values()):
                outcome[lane] = "fault"
                continue
            dead = {name: [v for v in pages if v not in live[name]] for name, pages in regain.items()}
            if any(dead.values()):
                wanted = {name: fresh[name] | set(dead[name]) for name in fresh}
                demand = [len(wanted[s.name]) if s.name in wanted else 0 for s in self.layout.subpools]
                short = short or not fits(self.layout, now, demand)
                if short:
                    outcome[lane] = "refused"
                    continue
                outcome[lane] = sum(len(wanted[name] - fresh[name]) for name in fresh)
                fresh = wanted
            else:
                outcome[lane] = 0
            for s in self.layout.windows:
                row.first[s.name] -= len(regain[s.name])
        self.faults += outcome.count("fault")
        self.refused += outcome.count("refused")
        return outcome

    def unhold(self) -> None:
        if self.gate:
            self.gate -= 1
        else:
            self.faults += 1

    # Comparison.

    def compare(self, state: PoolState) -> None:
        """Raises AssertionError where the state says something else."""
        r = state.requests
        status, pages, count = np.asarray(r.status), np.asarray(r.pages), np.asarray(r.page_count)
        slots, length, first = np.asarray(r.slots), np.asarray(r.seq_len), np.asarray(r.window_first)
        for i, row in enumerate(self.rows):
            seen = (int(status[i]), pages[i, : count[i]].tolist(), int(slots[i]), int(length[i]))
            assert seen == (row.status, row.pages, row.slot, row.length), (
                f"request {i}: {seen}, expected {row}"
            )
            windows = {s.name: int(first[w, i]) for w, s in enumerate(self.layout.windows)}
            assert windows == row.first, f"request {i}: windows begin at {windows}, expected {row.first}"
        for spec, pool in zip(self.layout.subpools, state.subpools):
            refs = np.asarray(pool.refs)
            seen = {int(v): int(refs[v]) for v in np.flatnonzero(refs)}
            assert seen == self.holders(spec), f"{spec.name}: refs {seen}, expected {self.holders(spec)}"
            live = set(np.flatnonzero(np.asarray(pool.v2p)[:-1] > 0).tolist())
            assert live == set(seen), f"{spec.name}: live {live}, expected {set(seen)}"
        writer = np.asarray(r.page_to_req)
        seen = {int(v): int(writer[v]) for v in np.flatnonzero(writer >= 0)}
        assert seen == self.writer, f"page_to_req {seen}, expected {self.writer}"
        counters = (int(state.counters.faults), int(state.counters.refused), int(state.gate))
        assert counters == (self.faults, self.refused, self.gate), (
            f"faults, refused, gate {counters}, expected {(self.faults, self.refused, self.gate)}"
        )
