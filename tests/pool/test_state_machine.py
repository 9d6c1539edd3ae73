"""The jitted pool against the plain-Python one, operation by operation, with every rule checked after each.

UKV_MACHINE_EXAMPLES=500 runs longer, UKV_MACHINE_SEED=n runs other examples than the default ones, and
UKV_MACHINE_SHRINK=1 looks for the shortest run that fails (which takes minutes).
"""

import copy
import os

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.oracle import Oracle, bands, fits, fits_compacted
from tests.pool import cases
from tests.pool.cases import LAYOUTS, Contents, ints, operations
from ukv_jax import pool, verify
from ukv_jax.layout import UnifiedLayout
from ukv_jax.pool import ACTIVE, FREE, PARKED

pytestmark = pytest.mark.long
EXAMPLES = int(os.environ.get("UKV_MACHINE_EXAMPLES", "12"))
SEED = os.environ.get("UKV_MACHINE_SEED")
SHRINK = bool(os.environ.get("UKV_MACHINE_SHRINK"))

# Any row: mostly a real one, sometimes idle or out of range, duplicates included.
ROW = st.sampled_from(
    [-1, *range(cases.MAX_REQUESTS), *range(cases.MAX_REQUESTS), cases.MAX_REQUESTS, -2, 2**30]
)
ROWS = st.lists(ROW, min_size=cases.LANES, max_size=cases.LANES)


def same(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


class PoolMachine(RuleBasedStateMachine):
    name: str

    def __init__(self):
        super().__init__()
        self.layout = LAYOUTS[self.name]
        self.do = operations(self.name)
        self.model = Oracle(self.layout)
        self.contents = Contents(self.layout)
        self.state = pool.init(self.layout)
        self.moved = 0

    def step(self, state, *, moved: int = 0) -> None:
        """Takes the new state, after every rule held for it."""
        old, self.state = self.state, state
        self.moved += moved
        verify.check(state)
        self.model.compare(state)
        assert int(state.counters.moved) == self.moved
        self.check_bands(bands(state))
        self.contents.written = {
            (name, v): value
            for (name, v), value in self.contents.written.items()
            if v in self.model.holders(self.layout[name])
        }
        self.contents.check(state)
        self.state = self.contents.follow(state)
        if not moved:
            for p, q in zip(old.subpools, state.subpools):
                a, b = np.asarray(p.v2p), np.asarray(q.v2p)
                assert ((a == b) | (a == -1) | (b == -1)).all(), "a live page moved"

    def check_bands(self, new) -> None:
        for spec, b in zip(self.layout.subpools, new):
            if pool.pages_are_ids(self.layout, spec):
                continue
            live = len(self.model.holders(spec))
            assert b.live == live, f"{spec.name}: {b.live} live pages in the band, {live} expected"
            if not live and isinstance(self.layout, UnifiedLayout):
                assert b.low == b.high, f"{spec.name}: nothing is live, the band is [{b.low}, {b.high})"

    def grow_by_holes_first(self, before, taken) -> None:
        """The band grows by no more than what its holes could not give."""
        for spec, old, new, n in zip(self.layout.subpools, before, bands(self.state), taken):
            if not pool.pages_are_ids(self.layout, spec):
                assert new.high - new.low == old.high - old.low + max(n - old.holes, 0)

    # Requests.

    def rows(self, data, *status) -> list[int]:
        """Lanes that name rows of these states, one time in five anything."""
        if data.draw(st.integers(0, 4)) == 0:
            return data.draw(ROWS)
        known = [r for r, row in enumerate(self.model.rows) if row.status in status]
        rows = data.draw(st.permutations(known))[: data.draw(st.integers(1, cases.LANES))] if known else []
        return rows + [-1] * (cases.LANES - len(rows))

    @initialize(
        lengths=st.lists(st.integers(1, 16), min_size=cases.MAX_REQUESTS, max_size=cases.MAX_REQUESTS)
    )
    def fill(self, lengths):
        """Some requests to begin with, so that soon something is short."""
        for first in range(0, cases.MAX_REQUESTS, cases.LANES):
            rows = (list(range(cases.MAX_REQUESTS))[first : first + cases.LANES] + [-1] * cases.LANES)[
                : cases.LANES
            ]
            target = [lengths[r] * self.layout.dcp if r >= 0 else 0 for r in rows]
            self._reserve(rows, target)
            for left in (target, [max(n - cases.APPEND_TOKENS, 0) for n in target]):
                self._append(rows, [min(n, cases.APPEND_TOKENS) for n in left])

    @rule(
        data=st.data(),
        lengths=st.lists(st.integers(-1, cases.MAX_TOKENS + 3), min_size=cases.LANES, max_size=cases.LANES),
    )
    def reserve(self, data, lengths):
        self._reserve(self.rows(data, FREE, ACTIVE), [n * self.layout.dcp for n in lengths])

    def _reserve(self, rows, target):
        before = bands(self.state)
        expected = self.model.reserve(rows, target, cases.PAGES_PER_ROW, before)
        state, out, ready = self.do.reserve(self.state, ints(rows), ints(target))
        granted = [isinstance(e, tuple) for e in expected]
        assert np.asarray(out.granted).tolist() == granted, expected
        assert np.asarray(ready).tolist() == granted, "admission and allocation differ"
        assert np.asarray(out.refused).tolist() == [e == "refused" for e in expected]
        assert np.asarray(out.fault).tolist() == [e == "fault" for e in expected]
        pages, count, slots = (
            np.asarray(x) for x in (state.requests.pages, state.requests.page_count, state.requests.slots)
        )
        for lane, e in enumerate(expected):
            r = rows[lane]
            assert int(out.pages[lane]) == (e[0] if granted[lane] else 0)
            if granted[lane]:
                had = len(self.model.rows[r].pages)
                assert count[r] == had + e[0]
                self.model.grant(r, pages[r, had : count[r]].tolist(), int(slots[r]) if e[1] else 0)
        if not any(granted):
            assert same(state.subpools, self.state.subpools)
            assert same(state.requests, self.state.requests)
            assert same(state.buffer, self.state.buffer)
        taken = [sum(e[s.is_state] for e in expected if isinstance(e, tuple)) for s in self.layout.subpools]
        self.step(state)
        self.grow_by_holes_first(before, taken)
        return expected

    @rule(
        data=st.data(),
        tokens=st.lists(st.integers(-1, cases.APPEND_TOKENS + 1), min_size=cases.LANES, max_size=cases.LANES),
    )
    def append(self, data, tokens):
        self._append(self.rows(data, ACTIVE), tokens)

    def _append(self, rows, tokens):
        start = [self.model.rows[r].length if 0 <= r < cases.MAX_REQUESTS else 0 for r in rows]
        expected = self.model.append(rows, tokens, cases.APPEND_TOKENS)
        state, out = self.do.append(self.state, ints(rows), ints(tokens))
        assert np.asarray(out.ok).tolist() == expected
        assert all(int(out.start[lane]) == start[lane] for lane, ok in enumerate(expected) if ok)
        self.step(state)

    @rule(data=st.data(), tokens=st.integers(1, cases.APPEND_TOKENS), window=st.booleans())
    def decode(self, data, tokens, window):
        """What a loop does: rows that run get room, then tokens, and their windows move on."""
        rows = self.rows(data, FREE, ACTIVE)
        n = min(tokens * self.layout.dcp, cases.APPEND_TOKENS)
        target = [self.model.rows[r].length + n if 0 <= r < cases.MAX_REQUESTS else 0 for r in rows]
        self._reserve(rows, target)
        self._append(rows, [n] * cases.LANES)
        if window and self.layout.windows:
            self._release_window()

    def change(self, name: str, rows: list[int]) -> None:
        """release, mark_release, park and resume."""
        expected = getattr(self.model, name)(rows)
        state, ok = getattr(self.do, name)(self.state, ints(rows))
        assert np.asarray(ok).tolist() == expected
        self.step(state)

    @rule(data=st.data())
    def release(self, data):
        self.change("release", self.rows(data, ACTIVE, PARKED))

    @rule(data=st.data())
    def mark_release(self, data):
        self.change("mark_release", self.rows(data, ACTIVE, PARKED))

    @rule()
    def release_pending(self):
        before = sum(len(row.pages) for row in self.model.rows)
        self.model.release_pending(cases.RELEASE_PAGES)
        assert before - sum(len(row.pages) for row in self.model.rows) <= cases.RELEASE_PAGES
        self.step(self.do.release_pending(self.state))

    @rule(data=st.data(), resume=st.booleans())
    def park(self, data, resume):
        if resume:
            self.change("resume", self.rows(data, PARKED))
        else:
            self.change("park", self.rows(data, ACTIVE))

    @rule(data=st.data())
    def attach(self, data):
        """Prefixes of other requests, some of them spoilt."""
        rows, pages, lengths = [], [], []
        donors = [row for row in self.model.rows if row.length >= self.model.tokens_per_page]
        free = [r for r, row in enumerate(self.model.rows) if row.status == FREE]
        for lane in range(cases.LANES):
            good = donors and free and data.draw(st.integers(0, 3)) > 0
            rows.append(free[lane % len(free)] if good else data.draw(ROW))
            wanted = []
            if donors:
                donor = data.draw(st.sampled_from(donors))
                most = min(len(donor.pages), donor.length // self.model.tokens_per_page, cases.ATTACH_WIDTH)
                wanted = donor.pages[: data.draw(st.integers(1, most))]
            length = len(wanted) * self.model.tokens_per_page
            wanted = wanted + [-1] * (cases.ATTACH_WIDTH - len(wanted))
            if not good:
                at = data.draw(st.integers(0, cases.ATTACH_WIDTH - 1))
                wanted[at] = data.draw(
                    st.sampled_from([-1, 0, 1, 2, wanted[0], self.layout.full.num_virtual, 2**30, -7])
                )
                length += data.draw(st.sampled_from([0, 0, 1, -1]))
            pages.append(wanted)
            lengths.append(length)
        expected = self.model.attach(rows, pages, lengths)
        state, ok = self.do.attach(self.state, ints(rows), ints(pages), ints(lengths))
        assert np.asarray(ok).tolist() == expected
        self.step(state)

    @precondition(lambda self: self.layout.windows)
    @rule()
    def release_window(self):
        self._release_window()

    def _release_window(self):
        expected = self.model.release_window(cases.WINDOW_PAGES)
        state, dropped = self.do.release_window(self.state)
        assert int(dropped) == expected
        self.step(state)

    @precondition(lambda self: self.layout.windows)
    @rule(data=st.data())
    def rebind_window(self, data):
        rows = self.rows(data, ACTIVE)
        before = bands(self.state)
        expected = self.model.rebind_window(rows, cases.REBIND_PAGES, before)
        state, out = self.do.rebind_window(self.state, ints(rows))
        granted = [isinstance(e, int) for e in expected]
        assert np.asarray(out.granted).tolist() == granted, expected
        assert np.asarray(out.refused).tolist() == [e == "refused" for e in expected]
        assert np.asarray(out.fault).tolist() == [e == "fault" for e in expected]
        assert np.asarray(out.pages).tolist() == [e if isinstance(e, int) else 0 for e in expected]
        self.step(state)

    # Moves.

    @rule(data=st.data())
    def compact(self, data):
        self._compact(data, False)

    @rule(data=st.data())
    def compact_all(self, data):
        self._compact(data, True)

    @rule(
        data=st.data(),
        rows=st.lists(st.integers(0, cases.MAX_REQUESTS - 1), min_size=1, max_size=3, unique=True),
    )
    def churn(self, data, rows):
        """Requests end, others take their place, holes are left, a pass squeezes some."""
        lanes = rows + [-1] * (cases.LANES - len(rows))
        self.change("release", lanes)
        self._reserve(lanes, [self.model.tokens_per_page] * cases.LANES)
        self._append(lanes, [1] * cases.LANES)
        self._compact(data, False)

    def _compact(self, data, complete):
        names = [s.name for s in self.layout.subpools]
        porous = [name for name, b in zip(names, bands(self.state)) if b.holes]
        name = data.draw(st.sampled_from(2 * porous + names))
        before = bands(self.state)[self.layout.index(name)]
        state, moved = self.do.compact[name, complete](self.state)
        after = bands(state)[self.layout.index(name)]
        if self.model.gate or not isinstance(self.layout, UnifiedLayout):
            assert int(moved) == 0
            assert same(state, self.state)
        elif complete:
            assert int(moved) == self.out_of_place(name), "a page moved that need not"
            assert after.holes == 0
            assert after.high - after.low == before.live
        else:
            assert int(moved) == min(self.out_of_place(name), 1)
            assert after.high - after.low <= before.high - before.low
            assert after.holes == 0 or int(moved) == 1, "holes are left and nothing moved"
        self.step(state, moved=int(moved))

    def out_of_place(self, name) -> int:
        """Live pages beyond the band that complete compaction leaves: each must move once."""
        index = self.layout.index(name)
        b, pages = bands(self.state)[index], sorted(cases.placed(self.state, name).values())
        if index == len(self.layout.subpools) - 1 > 0:
            return sum(page < b.high - len(pages) for page in pages)
        low = (
            b.low if index == 0 or not pages else pages[0]
        )  # a float gives the holes below its first page back
        return sum(page >= low + len(pages) for page in pages)

    @precondition(lambda self: self.do.floats)
    @rule(
        data=st.data(),
        side=st.sampled_from(["low", "high"]),
        pages=st.integers(0, 40),
        huge=st.integers(0, 19),
    )
    def make_room(self, data, side, pages, huge):
        spec = data.draw(st.sampled_from(self.do.floats))
        index = self.layout.index(spec.name)
        want = pages * 32 // self.layout.granule if huge else 2**31 - 1
        below, above = self.borders(index)
        state, room = self.do.make_room[spec.name, side](self.state, ints(want))
        after = bands(state)[index]
        low, high = after.low * spec.page_bytes, after.high * spec.page_bytes
        if after.low == after.high:
            is_open = above - below >= want * self.layout.granule
        else:
            is_open = (low - below if side == "low" else above - high) >= want * self.layout.granule
        assert bool(room.done) == is_open
        assert not (bool(room.done) and bool(room.refused))
        if bool(room.refused):
            assert int(room.moved) == 0
            assert same(state, self.state), "a refused slide changed something"
            gap = (
                (above - want * self.layout.granule) if side == "high" else below + want * self.layout.granule
            )
            live = len(self.model.holders(spec))
            first, stop = -(-below // spec.page_bytes), above // spec.page_bytes
            room_left = stop - -(-gap // spec.page_bytes) if side == "low" else gap // spec.page_bytes - first
            assert self.model.gate or room_left < live, "refused, and there was room"
        else:
            assert bool(room.done) or int(room.moved) > 0, "neither done nor refused, and nothing moved"
        assert int(room.moved) <= 2
        self.step(state, moved=int(room.moved))

    def borders(self, index) -> tuple[int, int]:
        """Bytes between which a float lies: the ends of its nearest neighbours that hold pages."""
        chain = list(zip(self.layout.subpools, bands(self.state)))
        below = [b.high * s.page_bytes for s, b in chain[:index] if b.high > b.low]
        above = [b.low * s.page_bytes for s, b in chain[index + 1 :] if b.high > b.low]
        first, last = chain[0][0], chain[-1][0]
        bottom, top = first.first_page * first.page_bytes, last.num_pages * last.page_bytes
        return max(below, default=bottom), min(above, default=top)

    @rule(data=st.data(), complete=st.booleans())
    def relieve(self, data, complete):
        """Asks for room until nothing more can be gained: what compaction could open must then be open."""
        pages, slots = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 2))
        demand = [slots if s.is_state else pages for s in self.layout.subpools]
        if data.draw(st.booleans()):  # one sub-pool alone
            alone = data.draw(st.integers(0, len(demand) - 1))
            demand = [n if i == alone else 0 for i, n in enumerate(demand)]
        could = fits(self.layout, bands(self.state), demand)
        if not self.model.gate:
            could = could or fits_compacted(self.layout, bands(self.state), demand)
        self.make_way(demand, complete)
        now = fits(self.layout, bands(self.state), demand)
        # With the gate held, border holes of a float are still given back: that moves nothing.
        assert now >= could if self.model.gate else now == could, (
            f"demand {demand}: room {now}, expected {could}"
        )

    def make_way(self, demand, complete) -> None:
        """Passes of relieve until the demand fits or nothing more is gained."""
        for _ in range(60):
            if bool(self.do.plan(self.state, tuple(ints(n) for n in demand))):
                return
            moved = int(self.state.counters.moved)
            state, progress = self.do.relieve[complete](self.state, tuple(ints(n) for n in demand))
            self.step(state, moved=int(state.counters.moved) - moved)
            if int(progress) == 0:
                return
        raise AssertionError("relieve makes progress for ever")

    @rule(data=st.data(), pages=st.lists(st.integers(0, 4), min_size=cases.LANES, max_size=cases.LANES))
    def reserve_with_relief(self, data, pages):
        """Admission under shortage: as many lanes as could be served with everything compacted are served."""
        rows, per_page = self.rows(data, FREE, ACTIVE), self.model.tokens_per_page
        had = [len(self.model.rows[r].pages) if 0 <= r < cases.MAX_REQUESTS else 0 for r in rows]
        target = [(n + new) * per_page for n, new in zip(had, pages)]
        trial = copy.deepcopy(self.model)
        fit = fits if self.model.gate else fits_compacted
        expected = trial.reserve(rows, target, cases.PAGES_PER_ROW, bands(self.state), fit)
        granted = [e for e in expected if isinstance(e, tuple)]
        want = [sum(e[s.is_state] for e in granted) for s in self.layout.subpools]
        if not self.model.gate:
            asked = self.do.demand(self.state, ints(rows), ints(target))
            assert [int(n) for n in asked] == want
        self.make_way(want, True)
        outcome = self._reserve(rows, target)
        assert self.model.gate or outcome == expected

    # The rest.

    @rule()
    def capacities(self):
        now = bands(self.state)
        for names, (own, after) in zip(self.do.names, self.do.capacities(self.state)):

            def demand(n, names=names):
                return [n if s.name in names else 0 for s in self.layout.subpools]

            def compacted(n, demand=demand):
                return fits(self.layout, now, demand(n)) or (
                    self.model.gate == 0 and fits_compacted(self.layout, now, demand(n))
                )

            assert fits(self.layout, now, demand(int(own)))
            assert not fits(self.layout, now, demand(int(own) + 1)), f"{names}: {own} and one more fit"
            assert compacted(int(after))
            assert not compacted(int(after) + 1), f"{names}: {after} and one more fit after compaction"

    @rule(data=st.data())
    def write(self, data):
        """New bytes through the id of a live page."""
        live = sorted(self.contents.written)
        if live:
            name, v = data.draw(st.sampled_from(live))
            physical = int(self.state.subpool(name).v2p[v])
            self.state = self.contents.write(self.state, {(name, v): physical})

    @rule(up=st.integers(0, 3))
    def gate(self, up):
        """Held now and then, never for long."""
        if up == 0:
            self.model.gate += 1
            self.step(self.do.hold(self.state))
        else:
            self.model.unhold()
            self.step(self.do.unhold(self.state))

    @rule(sure=st.integers(0, 9))
    def reset(self, sure):
        if sure == 0:
            self.model.reset()
            self.step(self.do.reset(self.state))


@pytest.mark.parametrize("name", LAYOUTS)
def test_pool_against_plain_python(name):
    machine = type(f"Machine_{name}", (PoolMachine,), {"name": name})
    profile = settings(
        max_examples=EXAMPLES,
        stateful_step_count=50,
        derandomize=SEED is None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[phase for phase in Phase if SHRINK or phase != Phase.shrink],
    )
    if SEED is not None:
        seed(int(SEED))(machine)
    run_state_machine_as_test(machine, settings=profile)
