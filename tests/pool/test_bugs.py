"""One test for each bug that memory pools of this kind keep having."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.oracle import bands
from tests.pool import cases
from tests.pool.cases import LAYOUTS, Contents, craft, holes, ints, operations, page_bytes_of, placed
from ukv_jax import chain, compaction, pool, requests, translator, verify
from ukv_jax.layout import KVSpec, MLASpec, StatePart, StateSpec, StaticLayout, UnifiedLayout
from ukv_jax.pool import ACTIVE, FREE, PARKED

pytestmark = pytest.mark.long
UNIFIED = [name for name, layout in LAYOUTS.items() if isinstance(layout, UnifiedLayout)]


def lanes(*rows: int) -> jax.Array:
    return ints(list(rows) + [-1] * (cases.LANES - len(rows)))


def lengths(*n: int) -> jax.Array:
    return ints(list(n) + [0] * (cases.LANES - len(n)))


def tree_equal(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


def filled(name: str, rows: int = cases.LANES, tokens: int = 16):
    """A pool of `rows` requests with `tokens` tokens each (as many as fit), and what was written to it."""
    do, state = operations(name), pool.init(LAYOUTS[name])
    tokens = min(tokens, cases.PAGES_PER_ROW * requests.tokens_per_page(LAYOUTS[name]))
    state, out, _ = do.reserve(state, lanes(*range(rows)), lengths(*[tokens] * rows))
    left = tokens
    while left > 0:
        n = min(left, cases.APPEND_TOKENS)
        state, _ = do.append(state, jnp.where(out.granted, lanes(*range(rows)), -1), lengths(*[n] * rows))
        left -= n
    contents = Contents(LAYOUTS[name])
    return contents.follow(state), contents, do


# Moves.


@pytest.mark.parametrize("name", ["mla_state_dcp", "state_swa_full"])
def test_capped_compaction_near_full_leaves_no_ghosts(name):
    """Full, then every second request goes; one page at a time is moved, and allocation goes on in between."""
    state, contents, do = filled(name)
    state, _ = do.release(state, lanes(0, 2))
    contents.follow(state)
    for n in range(12):
        state, _ = do.compact["full", False](state)
        verify.check(state)
        contents.check(state)
        state, _, _ = do.reserve(state, lanes(n % 2 * 2), lengths(4 * (n + 1)))
        state = contents.follow(state)
        verify.check(state)
        if n % 5 == 4:
            state, _ = do.release(state, lanes(n % 2 * 2))
            state = contents.follow(state)
    for s in LAYOUTS[name].subpools:
        state, _ = do.compact[s.name, True](state)
        assert holes(state, s.name) == []
    verify.check(state)
    contents.check(state)


@pytest.mark.parametrize("name", UNIFIED)
def test_held_gate_stops_every_move(name):
    state, contents, do = filled(name)
    state, _ = do.release(state, lanes(0))
    state = do.hold(contents.follow(state))
    where = [placed(state, s.name) for s in LAYOUTS[name].subpools]
    demand = tuple(ints(3) for _ in LAYOUTS[name].subpools)
    for complete in (False, True):
        for s in LAYOUTS[name].subpools:
            after, moved = do.compact[s.name, complete](state)
            assert int(moved) == 0
            assert tree_equal(after, state)
        after, _ = do.relieve[complete](state, demand)
        assert [placed(after, s.name) for s in LAYOUTS[name].subpools] == where
    for (float_name, side), slide in do.make_room.items():
        after, room = slide(state, ints(100_000))
        assert bool(room.refused), (float_name, side)
        assert tree_equal(after, state)
    state = do.unhold(state)
    _, moved = do.compact["full", True](state)
    assert int(state.gate) == 0
    contents.check(state)
    assert int(moved) > 0 or holes(state, "full") == [] or len(placed(state, "full")) < 5


def test_holes_of_a_neighbour_count_only_while_moves_are_allowed():
    name = "state_swa_full"
    state, _, do = filled(name)
    state, _ = do.release(state, lanes(0, 1))
    now, after = (
        int(requests.capacity(state, "state", "swa", "full", after_compaction=a)) for a in (False, True)
    )
    held, held_after = (
        int(requests.capacity(do.hold(state), "state", "swa", "full", after_compaction=a))
        for a in (False, True)
    )
    assert now <= after
    alone = int(requests.capacity(state, "swa", after_compaction=True))
    assert alone > int(requests.capacity(state, "swa")), "the full sub-pool has holes to give"
    assert held == held_after == now
    assert int(requests.capacity(do.hold(state), "swa", after_compaction=True)) == int(
        requests.capacity(state, "swa")
    )


def test_move_bound_below_a_page_is_an_error():
    state = pool.init(LAYOUTS["mla"])
    with pytest.raises(
        ValueError, match="191 bytes a call move no page of sub-pool 'full': one has 192 bytes"
    ):
        compaction.compact(state, "full", max_bytes=191)


def test_only_floats_slide():
    state = pool.init(LAYOUTS["state_swa_full"])
    with pytest.raises(ValueError, match="only a float of a unified chain slides; 'full' is not one"):
        compaction.make_room(state, "full", "low", 0)
    with pytest.raises(ValueError, match="side must be 'low' or 'high', got 'up'"):
        compaction.make_room(state, "swa", "up", 0)
    with pytest.raises(ValueError, match="only a float"):
        compaction.make_room(pool.init(LAYOUTS["static"]), "swa", "low", 0)


# 64-byte pages everywhere: state up, window float, full down, 40 pages.
EVEN = UnifiedLayout.from_bytes(
    (
        StateSpec((StatePart("recurrent", 1, 1, (4, 4), "float32"),)),
        KVSpec(1, 1, 4, window=4, name="swa"),
        KVSpec(1, 1, 4),
    ),
    total_bytes=40 * 64,
    page_size=4,
    max_requests=32,
    max_tokens=32,
)


def even_state(swa: dict[int, int], band: tuple[int, int], full_low: int = 32):
    """State slots 1 and 2; full pages [full_low, 40) hold virtual pages 1 to 8 of row 0; the window lies as given."""
    full = {v: full_low + v - 1 for v in range(1, 9)}
    return craft(
        EVEN,
        [list(range(1, 9)), []],
        {"state": {1: 1, 2: 2}, "swa": swa, "full": full},
        {"state": (1, 3), "swa": band, "full": (full_low, 40)},
    )


def test_a_float_begins_in_the_middle_of_its_gap():
    state = craft(EVEN, [[], []], {"state": {1: 1, 2: 2}}, {"state": (1, 3)})
    state, _ = requests.reserve(state, ints([0]), ints([32]), pages_per_row=8)
    p = state.subpool("swa")
    # The gap is [3, 32), 29 pages, of which it takes 8: 10 below it, 11 above.
    assert (int(p.low), int(p.high)) == (13, 21)
    verify.check(state)


def test_an_emptied_float_begins_in_the_middle_again():
    state = even_state({8: 4}, (4, 5))
    state, _ = requests.release(state, ints([0]))
    state, _ = requests.reserve(state, ints([0]), ints([4]), pages_per_row=8)
    low = int(state.subpool("swa").low)
    # State slot 2 (of row 1) stays at page 2 and slot 1 is handed out again; full takes page 39: the gap is [3, 39).
    assert low == 3 + (39 - 3 - 1) // 2
    verify.check(state)


def test_a_float_grows_on_the_side_with_the_larger_gap():
    # Below: [3, 5), above: [9, 32).
    state = even_state({5: 5, 6: 6, 7: 7, 8: 8}, (5, 9))
    ok, growth = chain.plan(EVEN, state.usage, (ints(0), ints(3), ints(0)))
    assert bool(ok)
    assert (int(growth[1].grow_low), int(growth[1].grow_high)) == (0, 3)
    # Below: [3, 26), above: [30, 32), and more than one side has.
    state = even_state({5: 26, 6: 27, 7: 28, 8: 29}, (26, 30))
    ok, growth = chain.plan(EVEN, state.usage, (ints(0), ints(24), ints(0)))
    assert bool(ok)
    assert (int(growth[1].grow_low), int(growth[1].grow_high)) == (23, 1)
    assert not bool(chain.plan(EVEN, state.usage, (ints(0), ints(26), ints(0)))[0])


@pytest.mark.parametrize(
    "side, pages, moves",
    [
        ("low", 6, {5, 6}),  # physical pages 5 and 7 must leave [3, 9)
        ("low", 2, set()),  # already open
        ("high", 14, {8}),  # page 19 must leave [18, 32)
        ("high", 15, {7, 8}),
        ("high", 12, set()),
    ],
)
def test_slides(side, pages, moves):
    """Window band [5, 20): live 5 7 17 19, so holes lie everywhere between."""
    live = {5: 5, 6: 7, 7: 17, 8: 19}
    state = even_state(live, (5, 20))
    contents = Contents(EVEN)
    state = contents.follow(state)
    after, room = compaction.make_room(state, "swa", side, pages, unit=64)
    verify.check(after)
    contents.check(after)
    assert bool(room.done)
    assert int(room.moved) == len(moves)
    p = after.subpool("swa")
    assert (int(p.low) - 3 if side == "low" else 32 - int(p.high)) >= pages
    now = placed(after, "swa")
    assert {v for v in live if now[v] != live[v]} == moves
    sources, targets = {live[v] for v in moves}, {now[v] for v in moves}
    assert not sources & targets


def test_a_slide_that_both_sides_cannot_take_changes_nothing():
    """The gap is zero-sum: 29 pages between the neighbours, 4 of them live."""
    state = even_state({5: 5, 6: 7, 7: 17, 8: 19}, (5, 20))
    for side in ("low", "high"):
        after, room = compaction.make_room(state, "swa", side, 26, unit=64)
        assert bool(room.refused)
        assert not bool(room.done)
        assert tree_equal(after, state)
        after, room = compaction.make_room(state, "swa", side, 25, unit=64)
        assert bool(room.done)
        verify.check(after)


def test_a_bounded_slide_is_finished_by_later_calls():
    state = even_state({5: 5, 6: 7, 7: 17, 8: 19}, (5, 20))
    contents = Contents(EVEN)
    state = contents.follow(state)
    done = []
    while not any(done):
        state, room = compaction.make_room(state, "swa", "high", 25, unit=64, max_bytes=64)
        verify.check(state)
        contents.check(state)
        assert int(room.moved) == 1
        done.append(bool(room.done))
    assert done == [False, False, True]  # pages 19, 17 and 7 leave; page 5 may stay
    assert (int(state.subpool("swa").low), int(state.subpool("swa").high)) == (3, 7)


def test_shortage_compacts_the_neighbour_not_the_one_that_is_short():
    """Full wants to grow and has nothing to gain from its own holes; the state sub-pool below has them."""
    layout = LAYOUTS["mla_state_dcp"]
    full, slot = layout["full"], layout["state"]
    state = craft(
        layout,
        [[1, 2], [3], []],
        {"state": {1: 1, 2: 6}, "full": {1: 17, 2: 16, 3: 14}},
        {"state": (1, 7), "full": (14, 18)},
    )
    assert full.page_bytes * 14 == slot.page_bytes * 7  # no gap
    demand = (ints(0), ints(3))  # one hole, so two pages must come from the gap
    assert not bool(chain.plan(layout, state.usage, demand)[0])
    after, progress = compaction.relieve(state, demand, complete=True)
    assert int(progress) > 0
    assert placed(after, "full") == placed(state, "full"), "compacting oneself gains nothing"
    assert sorted(placed(after, "state").values()) == [1, 2]
    assert bool(chain.plan(layout, after.usage, demand)[0])
    verify.check(after)


def test_relief_for_some_where_there_is_none_for_all():
    """Six requests want in and one fits, once the float in its way has moved: that one must not wait with the others."""
    kwargs = dict(total_bytes=40 * 64, page_size=4, max_requests=8, max_tokens=32)
    layout = UnifiedLayout.from_bytes(tuple(s.spec for s in EVEN.subpools), **kwargs)
    state = craft(
        layout,
        [list(range(1, 9)), list(range(9, 17))],
        {
            "state": {1: 1, 2: 2},
            "swa": {v: 7 + v for v in range(1, 17)},
            "full": {v: 23 + v for v in range(1, 17)},
        },
        {"state": (1, 3), "swa": (8, 24), "full": (24, 40)},
    )
    rows, target = ints(range(2, 8)), ints([4] * 6)
    _, out = requests.reserve(state, rows, target, pages_per_row=1)
    assert not out.granted.any(), "the float leaves no gap to the full sub-pool"
    demand = requests.demand(state, rows, target, pages_per_row=1)
    assert [int(n) for n in demand] == [1, 1, 1]  # 5 free pages: one request of 3 pages
    state, progress = jax.jit(functools.partial(compaction.relieve, complete=True))(state, demand)
    assert int(progress) > 0
    state, out = requests.reserve(state, rows, target, pages_per_row=1)
    assert out.granted.tolist() == [True] + [False] * 5
    verify.check(state)


def test_relief_that_cannot_succeed_ends():
    """Both ends want more than a float between them leaves: sliding it to and fro would never end."""
    state = even_state({5: 5, 6: 6, 7: 7, 8: 8}, (5, 9))
    relieve = jax.jit(functools.partial(compaction.relieve, complete=True))
    demand = (ints(15), ints(0), ints(15))  # 29 pages of gap, 4 of them the float's
    after, progress = relieve(state, demand)
    assert int(progress) == 0
    assert placed(after, "swa") == placed(state, "swa")
    demand = (ints(12), ints(0), ints(13))
    after, progress = relieve(state, demand)
    assert bool(chain.plan(EVEN, after.usage, demand)[0])
    assert sorted(placed(after, "swa").values()) == [15, 16, 17, 18]
    verify.check(after)


# Ids.


def test_ids_run_out_before_pages():
    name = "mla_state_dcp"
    state, _, do = filled(name, rows=1)
    assert int(state.subpool("full").free_count) == 10 - 2
    state, out, ready = do.reserve(state, lanes(3, 0), lengths(32, 48))
    assert out.granted.tolist() == ready.tolist() == [True, True, False, False]
    assert int(state.subpool("full").free_count) == 0
    slots, full = bands(state)
    assert full.low * 192 - slots.high * 384 >= 2 * 192, "pages are left"
    state, out, ready = do.reserve(state, lanes(3, 0), lengths(40, 48))
    assert ready.tolist() == out.granted.tolist() == [False, True, False, False]
    assert out.refused.tolist() == [True, False, False, False]
    verify.check(state)


def test_pages_run_out_before_ids():
    state, _, do = filled("state_swa_full", rows=4, tokens=16)
    state, out, _ = do.reserve(state, lanes(4, 5), lengths(16, 16))
    assert out.refused.tolist() == [False, True, False, False] or out.refused.tolist() == [
        True,
        True,
        False,
        False,
    ]
    assert int(state.subpool("full").free_count) > 0
    verify.check(state)


def test_window_ids_outlive_their_page_count():
    """A window sub-pool with fewer pages than its owner has ids: ids beyond its pages come up once windows have moved on."""
    layout, do = LAYOUTS["static"], operations("static")
    assert layout["swa"].num_pages < layout.full.num_virtual
    state, contents, seen = pool.init(layout), Contents(layout), set()
    for row in (0, 1):
        for target in range(4, 25, 4):
            state, out, _ = do.reserve(state, lanes(row), lengths(target))
            assert bool(out.granted[0])
            state, _ = do.append(contents.follow(state), lanes(row), lengths(4))
            seen |= set(placed(state, "swa"))
            state, _ = do.release_window(state)
            verify.check(state)
            contents.written = {k: v for k, v in contents.written.items() if k[1] in placed(state, k[0])}
            contents.check(state)
    assert max(seen) >= layout["swa"].num_pages


@pytest.mark.parametrize("window", [7, 6, 5, 2])
def test_a_static_window_needs_the_pages_that_one_token_sees(window):
    """Token by token, its older pages pay for the next: no page is left unused, and one page less is an error."""
    swa = KVSpec(1, 1, 4, window=window, name="swa")
    least = {7: 3, 6: 3, 5: 2, 2: 2}[window]
    kwargs = dict(page_size=4, max_requests=1, max_tokens=32)
    with pytest.raises(
        ValueError, match=f"'swa' has {least - 1} pages; one request of 32 tokens takes {least}"
    ):
        StaticLayout.from_pages((swa, cases.FULL), pages={"swa": least - 1, "full": 8}, **kwargs)
    layout = StaticLayout.from_pages((swa, cases.FULL), pages={"swa": least, "full": 8}, **kwargs)

    def step(carry, _):
        state, most = carry
        state, _ = requests.release_window(state, max_pages=1)
        state, out = requests.reserve(state, ints([0]), state.requests.seq_len + 1, pages_per_row=1)
        state, _ = requests.append(state, jnp.where(out.granted, 0, -1), ints([1]), max_tokens=1)
        return (state, jnp.maximum(most, jnp.sum(state.subpool("swa").v2p > 0))), out.granted[0]

    run = jax.jit(lambda state: lax.scan(step, (state, ints(0)), length=32))
    (state, most), granted = run(pool.init(layout))
    assert granted.all()
    assert int(most) == least
    verify.check(state)


def test_page_ids_beyond_32768():
    """Scattered pages of a wide grid, moved and read back."""
    layout = UnifiedLayout.from_bytes(
        (MLASpec(1, 2, 0),), total_bytes=4 * 80_000, page_size=1, max_requests=3, max_tokens=26_000
    )
    reserve = jax.jit(functools.partial(requests.reserve, pages_per_row=26_000))
    state, out = reserve(pool.init(layout), ints([0, 1, 2]), ints([26_000, 26_000, 26_000]))
    assert out.granted.all()
    pages = np.asarray(state.requests.pages)
    marks = np.arange(1, 3 * 26_000 + 1, dtype=np.uint32)
    buffer = np.zeros(layout.total_bytes // 4, np.uint32)
    buffer[np.asarray(state.subpool("full").v2p)[pages.reshape(-1)]] = marks
    state = jax.tree.map(lambda x: x, state)
    state = pool.replace(state, buffer=jnp.asarray(buffer.view(np.uint8)))
    state, _ = jax.jit(requests.release)(state, ints([0, -1, -1]))
    state, moved = jax.jit(functools.partial(compaction.compact, name="full", complete=True))(state)
    assert int(moved) > 20_000
    verify.check(state)
    kept = pages[1:].reshape(-1)
    words = np.asarray(state.buffer).view(np.uint32)
    assert kept.max() > 2**15
    np.testing.assert_array_equal(words[np.asarray(state.subpool("full").v2p)[kept]], marks[26_000:])


def test_byte_arithmetic_of_a_huge_pool_does_not_wrap():
    """1.8 * 2**30 granules: a demand of a whole grid on top of what is used passes 2**31."""
    specs = (KVSpec(1, 1, 256, window=8, name="swa"), KVSpec(1, 1, 257))
    layout = UnifiedLayout.from_bytes(
        specs, total_bytes=8_000_000_000, page_size=1, max_requests=1, max_tokens=16
    )
    swa, full = layout.subpools
    assert layout.total_bytes // layout.granule > 1.8 * 2**30
    half = chain.Usage(ints(swa.first_page), ints(swa.num_pages // 2), ints(0), ints(0))
    down = chain.Usage(ints(full.num_pages - 5), ints(full.num_pages), ints(0), ints(full.num_virtual - 6))
    for n in (swa.num_pages // 2, swa.num_pages, 2**31 - 1):
        assert not bool(chain.plan(layout, (half, down), (ints(n), ints(0)))[0]), n
        assert not bool(chain.fits_compacted(layout, (half, down), (ints(n), ints(0)))), n
    for n in (full.num_pages // 2, full.num_pages, 2**31 - 1):
        assert not bool(chain.plan(layout, (half, down), (ints(0), ints(n)))[0]), n
    assert bool(chain.plan(layout, (half, down), (ints(swa.num_pages // 2 - 10), ints(0)))[0])


def test_one_mla_layer_is_not_a_static_pool():
    """A rank with one MLA layer has one block a page: unified all the same, its pages move."""
    layout = UnifiedLayout.from_bytes(
        (MLASpec(1, 8, 4),), total_bytes=96 * 12, page_size=4, max_requests=2, max_tokens=16
    )
    assert layout.full.stride() == 1
    state = craft(layout, [[1, 2]], {"full": {1: 7, 2: 3}}, {"full": (1, 8)})
    state, moved = compaction.compact(state, "full", complete=True)
    assert int(moved) == 2
    assert sorted(placed(state, "full").values()) == [1, 2]


# Requests.


def test_double_free_pushes_nothing():
    state, _, do = filled("state_swa_full")
    state, ended = do.release(state, lanes(1, 1))
    assert ended.tolist() == [True, False, False, False]
    assert int(state.counters.faults) == 1
    verify.check(state)
    after, ended = do.release(state, lanes(1))
    assert not ended.any()
    assert int(after.counters.faults) == 2
    assert tree_equal(
        (after.subpools, after.requests, after.buffer), (state.subpools, state.requests, state.buffer)
    )


@pytest.mark.parametrize("row", [cases.MAX_REQUESTS, 2**31 - 1, -2, -(2**31)])
def test_rows_out_of_range_are_faults(row):
    state, _, do = filled("state_swa_full")
    for call in (
        lambda s: do.reserve(s, lanes(row), lengths(4)),
        lambda s: do.append(s, lanes(row), lengths(1)),
        lambda s: do.release(s, lanes(row)),
        lambda s: do.park(s, lanes(row)),
        lambda s: do.resume(s, lanes(row)),
        lambda s: do.rebind_window(s, lanes(row)),
        lambda s: do.attach(s, lanes(row), jnp.full((cases.LANES, cases.ATTACH_WIDTH), -1), lengths(4)),
    ):
        after = call(state)[0]
        assert int(after.counters.faults) == 1
        assert tree_equal(
            (after.subpools, after.requests, after.buffer), (state.subpools, state.requests, state.buffer)
        )


def test_a_reserve_beyond_the_request_row_is_a_fault():
    """A speculative step may ask for more columns than the row has: nothing is cut and nothing spills into the next row."""
    state, _, do = filled("mla", rows=2)
    longest = LAYOUTS["mla"].max_tokens
    for target in (longest + 1, 2**31 - 1):
        after, out, _ = do.reserve(state, lanes(0), lengths(target))
        assert bool(out.fault[0])
        assert tree_equal(after.requests, state.requests)
    after, out, _ = do.reserve(state, lanes(0), lengths(longest))
    assert bool(out.granted[0])
    verify.check(after)


def test_admission_says_what_allocation_does_and_leaks_nothing():
    """Two pools must both give pages; the one that is short must not leave the other's behind."""
    layout, do = LAYOUTS["static"], operations("static")
    state = pool.init(layout)
    state, out, _ = do.reserve(state, lanes(0, 1), lengths(16, 12))
    assert out.granted.tolist()[:2] == [True, True]
    before = bands(state)
    assert before[1].high == 8, "one window page is left, many full ones"
    after, out, ready = do.reserve(state, lanes(2), lengths(8))
    assert not ready.any()
    assert bool(out.refused[0])
    assert tree_equal((after.subpools, after.requests), (state.subpools, state.requests))
    after, out, ready = do.reserve(state, lanes(2), lengths(4))
    assert bool(ready[0])
    assert bool(out.granted[0])


def test_prefix_rule():
    """The first that does not fit refuses later ones that need pages, even small ones; who needs none always passes."""
    state, _, do = filled("mla", rows=4)  # 16 of 17 pages
    state, out, _ = do.reserve(state, lanes(4, 0, 5, 1), lengths(8, 16, 4, 3))
    assert out.refused.tolist() == [True, False, True, False]
    assert out.granted.tolist() == [False, True, False, True]
    assert int(state.counters.refused) == 2
    state, out, _ = do.reserve(state, lanes(5), lengths(4))
    assert bool(out.granted[0])


def test_new_state_slots_are_zero_and_neighbours_keep_theirs():
    """Recycled slots hold another request's NaN; the clearing of one must not touch the next."""
    name = "state_swa_full"
    layout, do = LAYOUTS[name], operations(name)
    state, contents, _ = filled(name, rows=3, tokens=4)
    slot = placed(state, "state")[int(state.requests.slots[1])]
    where = page_bytes_of(layout["state"], slot)
    state = pool.replace(state, buffer=state.buffer.at[where].set(0xFF))  # NaN in bfloat16 and float32
    state, _ = do.release(state, lanes(1))
    state, _, _ = do.reserve(state, lanes(5), lengths(4))
    assert placed(state, "state")[int(state.requests.slots[5])] == slot
    assert not np.asarray(state.buffer)[where].any()
    contents.written = {
        key: value for key, value in contents.written.items() if key[1] in placed(state, key[0])
    }
    del contents.written["state", int(state.requests.slots[5])]
    keys = {("swa", int(v)) for v in state.requests.pages[5] if v > 0} | {
        ("full", int(v)) for v in state.requests.pages[5] if v > 0
    }
    for key in keys:
        contents.written.pop(key, None)
    contents.check(state)


def test_parked_requests_keep_everything_until_dropped():
    state, contents, do = filled("state_swa_full", rows=2)
    state, ok = do.park(state, lanes(0))
    assert bool(ok[0])
    state, out, _ = do.reserve(state, lanes(0), lengths(20))
    assert bool(out.fault[0]), "a parked request grows no more"
    state, out = do.append(state, lanes(0), lengths(1))
    assert not bool(out.ok[0])
    state, dropped = do.release_window(state)
    assert int(state.requests.window_first[0, 0]) == 0, "nor does its window move on"
    assert int(dropped) > 0
    state, _ = do.compact["full", True](state)
    contents.written = {k: v for k, v in contents.written.items() if k[1] in placed(state, k[0])}
    contents.check(state)
    resumed, ok = do.resume(state, lanes(0))
    assert int(resumed.requests.status[0]) == ACTIVE
    state, ok = do.release(state, lanes(0))
    assert bool(ok[0])
    assert state.requests.status.tolist() == [FREE, ACTIVE] + [FREE] * 4
    assert PARKED not in state.requests.status.tolist()
    verify.check(state)


def test_release_in_the_loop_takes_a_bounded_number_of_pages():
    state, _, do = filled("mla", rows=3)
    state, _ = do.mark_release(state, lanes(0, 2))
    left = []
    while bool(requests.pending(state)):
        state = do.release_pending(state)
        left.append(len(placed(state, "full")))
        verify.check(state)
    assert left == [9, 6, 4]


def test_prefix_pages_live_as_long_as_their_last_holder():
    state, contents, do = filled("state_swa_full", rows=1)
    shared = state.requests.pages[0, :3].tolist()
    pages = jnp.full((cases.LANES, cases.ATTACH_WIDTH), -1).at[0].set(ints(shared))
    state, ok = do.attach(state, lanes(4), pages, lengths(12))
    assert bool(ok[0])
    state, out = do.rebind_window(
        state, lanes(4)
    )  # 12 tokens, window 7: columns 1 and 2, still held by row 0
    assert bool(out.granted[0])
    assert int(out.pages[0]) == 0
    state, _ = do.release(state, lanes(0))
    assert sorted(placed(state, "full")) == sorted(shared)
    assert sorted(placed(state, "swa")) == sorted(shared[1:])
    verify.check(state)
    contents.written = {k: v for k, v in contents.written.items() if k[1] in placed(state, k[0])}
    contents.check(state)
    state, _ = do.release(state, lanes(4))
    assert placed(state, "full") == placed(state, "swa") == {}
    verify.check(state)


def test_two_requests_regain_one_dead_window_page():
    """Both rebind it in one call: it gets one page, and both hold it."""
    state, contents, do = filled("state_swa_full", rows=1)
    state, _ = do.release_window(state)
    state = contents.follow(state)
    assert len(placed(state, "swa")) == 2  # 16 tokens, window 7: columns 2 and 3
    shared = state.requests.pages[0, :2].tolist()
    pages = jnp.full((cases.LANES, cases.ATTACH_WIDTH), -1).at[:2, :2].set(ints(shared))
    state, ok = do.attach(state, lanes(4, 5), pages, lengths(8, 8))
    assert ok.tolist() == [True, True, False, False]
    state, out = do.rebind_window(state, lanes(4, 5))  # 8 tokens: columns 0 and 1
    assert out.granted.tolist() == [True, True, False, False]
    assert out.pages.tolist() == [2, 0, 0, 0]
    assert [int(state.subpool("swa").refs[v]) for v in shared] == [2, 2]
    verify.check(state)
    contents.check(state)
    state, _ = do.release(state, lanes(4))
    state, _ = do.release(state, lanes(0))
    assert sorted(placed(state, "swa")) == sorted(placed(state, "full")) == sorted(shared)
    verify.check(state)


def test_a_shared_page_is_never_written_by_two():
    """A prefix ends with a whole page: the next token of the new request goes to a page of its own."""
    state, _, do = filled("mla", rows=1, tokens=14)
    pages = jnp.full((cases.LANES, cases.ATTACH_WIDTH), -1).at[0, :2].set(state.requests.pages[0, :2])
    _, ok = do.attach(state, lanes(4), pages, lengths(7))
    assert not bool(ok[0])
    state, ok = do.attach(state, lanes(4), pages, lengths(8))
    assert bool(ok[0])
    state, _, _ = do.reserve(state, lanes(4), lengths(9))
    state, _ = do.append(state, lanes(4), lengths(1))
    fresh = int(state.requests.pages[4, 2])
    assert int(state.requests.page_to_req[fresh]) == 4
    assert int(state.subpool("full").refs[fresh]) == 1
    assert state.requests.page_to_req[state.requests.pages[0, :2]].tolist() == [0, 0]


def test_a_replicated_window_holds_every_token_of_its_page():
    """Under DCP a virtual page stands for page_size * dcp tokens: the window stores all of them on every rank."""
    layout = UnifiedLayout.from_bytes(
        (cases.SWA, cases.FULL), total_bytes=8192, page_size=4, max_requests=2, max_tokens=32, dcp=2
    )
    state, _ = requests.reserve(pool.init(layout), ints([1]), ints([12]), pages_per_row=2)
    tokens = translator.virtual_tokens(state, ints([1]), jnp.arange(12)[None])
    stride = layout["swa"].stride()
    first, second = (placed(state, "swa")[v] for v in state.requests.pages[1, :2].tolist())
    expected = [first * stride * 8 + n for n in range(8)] + [second * stride * 8 + n for n in range(4)]
    for rank in (0, 1):
        locs = translator.translate_write_locs(state, tokens, "swa", dcp_rank=rank)
        assert locs.ids[0].tolist() == expected
    table = translator.fill_read_table(state, ints([1]), ints([12]), "swa", zero_tail=True)
    assert (table.page_size, table.kv_end.tolist()) == (8, [12])
    assert table.table[0, :2].tolist() == [first * stride, second * stride]
    stream = translator.fill_packed_read_stream(state, ints([1]), ints([12]), "swa", capacity=16)
    assert stream.ids[:12].tolist() == expected
    with pytest.raises(ValueError, match="under DCP"):
        translator.fill_read_table(state, ints([1]), ints([12]))


# Programs.


@pytest.mark.parametrize(
    "specs",
    [
        (cases.MLA,),
        (cases.MLA, cases.STATE),
        (cases.SWA, cases.FULL_WIDE),
        (cases.STATE, cases.SWA, cases.FULL),
        (cases.STATE, cases.LONG_SWA, cases.SWA, cases.FULL),
    ],
    ids=["mla", "mla-state", "swa-full", "state-swa-full", "two-floats"],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_the_smallest_pool_serves_its_longest_request(specs, at_once):
    """At once, and token by token with compaction where it is short."""
    kwargs = dict(page_size=4, max_requests=2, max_tokens=24)
    with pytest.raises(ValueError) as error:
        UnifiedLayout.from_bytes(specs, total_bytes=1, **kwargs)
    layout = UnifiedLayout.from_bytes(
        specs, total_bytes=int(str(error.value).split("has ")[-1].split(" bytes")[0]), **kwargs
    )
    reserve = jax.jit(functools.partial(requests.reserve, pages_per_row=6))
    relieve = jax.jit(functools.partial(compaction.relieve, complete=True))
    state, contents = pool.init(layout), Contents(layout)
    for target in [24] if at_once else range(4, 25, 4):
        rows, demand = ints([1]), tuple(ints(int(not s.is_state)) for s in layout.subpools)
        for _ in range(9):
            after, out = reserve(state, rows, ints([target]))
            if bool(out.granted[0]):
                break
            state, _ = relieve(state, demand)
            contents.check(state)
        assert bool(out.granted[0]), target
        state = contents.follow(after)
        verify.check(state)


@pytest.mark.parametrize("name", ["state_swa_full", "static"])
def test_operations_compose_in_one_compiled_loop(name):
    """reserve, append, window release, end, release, compact and relieve inside a while_loop: no host in between."""
    layout = LAYOUTS[name]

    def step(carry):
        state, n = carry
        row = ints([n % 4, (n + 1) % 4])
        target = state.requests.seq_len[row] + 3
        state, out = requests.reserve(state, row, target, pages_per_row=2)
        state, _ = requests.append(state, jnp.where(out.granted, row, -1), jnp.full(2, 3), max_tokens=3)
        state, _ = requests.release_window(state, max_pages=2)
        over = state.requests.seq_len[row] > 15
        state, _ = requests.mark_release(state, jnp.where(over, row, -1))
        state = requests.release_pending(state, max_pages=2)
        state, _ = compaction.relieve(state, tuple(ints(1) for _ in layout.subpools))
        state, _ = compaction.compact(state, "full")
        return state, n + 1

    @functools.partial(jax.jit, donate_argnums=0)
    def run(state):
        return lax.while_loop(lambda c: c[1] < 200, step, (state, jnp.int32(0)))

    state, _ = run(pool.init(layout))
    verify.check(state)
    assert int(state.requests.seq_len.sum()) > 0
    if name != "static":
        assert int(state.counters.moved) > 0


def test_lengths_do_not_recompile():
    do, state = operations("mla"), pool.init(LAYOUTS["mla"])

    def step(state, n):
        state, _, _ = do.reserve(state, lanes(n % 3, 3), lengths(n, n + 1))
        state, _ = do.append(state, lanes(n % 3), lengths(1))
        state, _ = do.release(state, lanes(n % 4))
        return state

    def compiled():
        return [f._cache_size() for f in (do.reserve, do.append, do.release)]

    state = step(state, 1)
    before = compiled()
    for n in range(2, 9):
        state = step(state, n)
    assert compiled() == before


def _big_results(jaxpr, size: int, found: set[str]) -> set[str]:
    """Primitives whose result has `size` elements or more, inner programs included."""
    for eqn in jaxpr.eqns:
        inner = [
            x
            for value in eqn.params.values()
            for x in (value if isinstance(value, tuple | list) else [value])
        ]
        inner = [x.jaxpr if hasattr(x, "jaxpr") and hasattr(x.jaxpr, "eqns") else x for x in inner]
        inner = [x for x in inner if hasattr(x, "eqns")]
        for x in inner:
            _big_results(x, size, found)
        if not inner and any(getattr(v.aval, "size", 0) >= size for v in eqn.outvars):
            found.add(eqn.primitive.name)
    return found


@pytest.mark.parametrize("static", [False, True], ids=["unified", "static"])
def test_cost_grows_with_the_pages_touched_not_with_the_pool(static):
    """Reserve and release make no array as long as the pool's id space, except by writing single words into one."""
    specs, kwargs = (cases.STATE, cases.SWA, cases.FULL), dict(page_size=4, max_requests=8, max_tokens=64)
    if static:
        layout = StaticLayout.from_pages(specs, pages={"state": 9, "swa": 20_000, "full": 30_000}, **kwargs)
    else:
        layout = UnifiedLayout.from_bytes(specs, total_bytes=160 * 40_000, **kwargs)
    state = jax.eval_shape(lambda: pool.init(layout))
    rows = jax.ShapeDtypeStruct((4,), jnp.int32)
    allowed = {
        "scatter",
        "scatter-add",
        "scatter_add",
        "scatter-min",
        "scatter_min",
        "reshape",
        "optimization_barrier",
    }
    allowed |= {"bitcast_convert_type"}  # the view of the buffer in a state part's dtype
    programs = {
        "reserve": lambda s, r: requests.reserve(s, r, r, pages_per_row=4),
        "append": lambda s, r: requests.append(s, r, r, max_tokens=4),
        "release_pending": lambda s, r: requests.release_pending(s, max_pages=8),
        "release": lambda s, r: requests.release(s, r),
        "release_window": lambda s, r: requests.release_window(s, max_pages=8),
        "rebind_window": lambda s, r: requests.rebind_window(s, r, pages_per_row=2),
    }
    for name, program in programs.items():
        found = _big_results(jax.make_jaxpr(program)(state, rows).jaxpr, 19_000, set())
        assert found <= allowed, f"{name}: {found - allowed} make arrays of the pool's size"
