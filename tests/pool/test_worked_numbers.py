"""Compaction, capacity and tombstones on examples whose answers were worked out by hand."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from tests.pool.cases import Contents, craft, holes, ints, placed
from ukv_jax import compaction, pool, requests, verify
from ukv_jax.layout import KVSpec, UnifiedLayout

# 64-byte window pages that grow up from page 2, 128-byte full pages that grow down from page 12.
SWA = KVSpec(1, 1, 4, window=4, name="swa")
FULL = KVSpec(1, 1, 8)
PAIR = UnifiedLayout.from_bytes(
    (SWA, FULL), total_bytes=12 * 128, page_size=4, max_requests=2, max_tokens=16, num_virtual=12
)


def pair_state():
    """Window band [2, 9): live 2 3 5 8, holes 4 6 7. Full band [5, 12): live 5 8 10 11, holes 6 7 9."""
    return craft(
        PAIR,
        [[1, 2, 3, 4]],
        {"swa": {1: 3, 2: 8, 3: 2, 4: 5}, "full": {1: 10, 2: 5, 3: 8, 4: 11}},
        {"swa": (2, 9), "full": (5, 12)},
    )


def band(state, name):
    p = state.subpool(name)
    return int(p.low), int(p.high)


@pytest.mark.parametrize(
    "name, before, after, new_band",
    [
        ("swa", [4, 6, 7], {1: 3, 2: 4, 3: 2, 4: 5}, (2, 6)),  # grows up: page 8 goes to 4
        ("full", [6, 7, 9], {1: 10, 2: 9, 3: 8, 4: 11}, (8, 12)),  # grows down: page 5 goes to 9
    ],
)
def test_complete_compaction(name, before, after, new_band):
    contents = Contents(PAIR)
    state = contents.follow(pair_state())
    assert holes(state, name) == before
    state, moved = compaction.compact(state, name, complete=True)
    assert int(moved) == 1
    assert placed(state, name) == after
    assert band(state, name) == new_band
    assert holes(state, name) == []
    verify.check(state)
    contents.check(state)


def test_bounded_compaction_leaves_the_frontier_to_the_next_pass():
    contents = Contents(PAIR)
    state, moved = compaction.compact(contents.follow(pair_state()), "swa", max_bytes=64)
    assert int(moved) == 1
    assert band(state, "swa") == (2, 9)
    assert holes(state, "swa") == [6, 7, 8]
    verify.check(state)
    state, moved = compaction.compact(state, "swa", max_bytes=64)
    assert int(moved) == 0
    assert band(state, "swa") == (2, 6)
    assert holes(state, "swa") == []
    verify.check(state)
    contents.check(state)


def test_joint_capacity():
    """Pages of 3 and 2 units, a gap of 11 units, holes 1 and 3: 4 pages on both sides."""
    specs = (KVSpec(1, 1, 3, window=2, name="swa"), KVSpec(1, 1, 2))
    layout = UnifiedLayout.from_bytes(specs, total_bytes=120, page_size=1, max_requests=2, max_tokens=4)
    assert [s.page_bytes for s in layout.subpools] == [12, 8]
    state = craft(
        layout, [[1, 2]], {"swa": {2: 2}, "full": {1: 10, 2: 14}}, {"swa": (1, 3), "full": (10, 15)}
    )
    assert holes(state, "swa") == [1]
    assert holes(state, "full") == [11, 12, 13]
    assert int(requests.capacity(state, "swa", "full")) == 4
    # One side alone: its holes and the whole gap.
    assert int(requests.capacity(state, "swa")) == 1 + 11 // 3
    assert int(requests.capacity(state, "full")) == 3 + 11 // 2
    # After compaction the holes of the neighbour are bytes of the gap: 11 + 3 * 2 below, 11 + 1 * 3 above.
    assert int(requests.capacity(state, "swa", after_compaction=True)) == 1 + 17 // 3
    assert int(requests.capacity(state, "full", after_compaction=True)) == 3 + 14 // 2
    held = pool.hold(state)
    assert int(requests.capacity(held, "swa", after_compaction=True)) == 1 + 11 // 3, (
        "nothing moves while the gate is held"
    )


def test_joint_capacity_is_what_reserve_gives():
    specs = (KVSpec(1, 1, 3, window=2, name="swa"), KVSpec(1, 1, 2))
    layout = UnifiedLayout.from_bytes(specs, total_bytes=120, page_size=1, max_requests=3, max_tokens=4)
    state = craft(
        layout, [[1, 2]], {"swa": {2: 2}, "full": {1: 10, 2: 14}}, {"swa": (1, 3), "full": (10, 15)}
    )
    after, out = requests.reserve(state, ints([1, 2]), ints([4, 1]), pages_per_row=4)
    assert out.granted.tolist() == [True, False]
    assert out.refused.tolist() == [False, True]
    verify.check(after)


# Tombstones.


def test_window_release_leaves_the_full_page_alive():
    state = pair_state()
    state, dropped = requests.release_window(state, max_pages=8)
    # 16 tokens, window 4: the next token, at 16, sees 13, 14, 15 and itself. Columns 0, 1, 2 end at 11.
    assert int(dropped) == 3
    assert [int(state.subpool("swa").v2p[v]) for v in (1, 2, 3, 4)] == [-1, -1, -1, 5]
    assert [int(state.subpool("swa").p2v[p]) for p in (3, 8, 2, 5)] == [-1, -1, -1, 4]
    assert placed(state, "full") == {1: 10, 2: 5, 3: 8, 4: 11}
    assert int(state.subpool("full").free_count) == 11 - 4, "a window page gives no id back"
    assert holes(state, "swa") == [2, 3, 4, 6, 7, 8]
    verify.check(state)
    again, dropped = requests.release_window(state, max_pages=8)
    assert int(dropped) == 0
    assert int(again.counters.faults) == 0, "a page already given back is not given back twice"


def test_tombstone_is_cleared_by_the_next_bind():
    state = pair_state()
    state, _ = requests.release_window(state, max_pages=8)
    state, _ = requests.release(state, ints([0]))
    verify.check(state)
    assert placed(state, "swa") == placed(state, "full") == {}
    assert band(state, "swa") == (2, 2)
    state, out = requests.reserve(state, ints([1]), ints([16]), pages_per_row=4)
    assert bool(out.granted[0])
    assert sorted(placed(state, "swa")) == sorted(placed(state, "full"))
    verify.check(state)


@pytest.mark.parametrize("name", ["swa", "full"])
def test_drop_pushes_nothing_for_what_is_not_live(name):
    """Page 0, a tombstone, ids out of range, -1: nothing on a free list. Of a duplicate the first lane wins."""
    state = pair_state()
    index = PAIR.index(name)
    before = state.subpools[index]
    lanes = ints([2, 0, 2, -1, 7, 12, 99, -5, 4])
    after, freed, faults = pool.drop(PAIR, index, before, lanes)
    assert freed.tolist() == [True, False, False, False, False, False, False, False, True]
    assert int(faults) == 6  # the padding page, a second 2, a dead page, three out of range
    assert int(after.hole_count) == int(before.hole_count) + 2
    pushed = np.asarray(after.holes)[int(before.hole_count) : int(after.hole_count)].tolist()
    assert sorted(pushed) == sorted(int(before.v2p[v]) for v in (2, 4))
    assert int(after.free_count) == int(before.free_count) + (2 if name == "full" else 0)
    if name == "full":
        ids = np.asarray(after.free_ids)[int(before.free_count) : int(after.free_count)].tolist()
        assert sorted(ids) == [2, 4]
    assert [int(after.v2p[v]) for v in (0, 2, 4, 12)] == [0, -1, -1, -1]
    assert [int(after.p2v[int(before.v2p[v])]) for v in (2, 4)] == [-1, -1]


def test_drop_counts_more_drops_than_holders():
    state = pair_state()
    index = PAIR.index("full")
    shared = replace(state.subpools[index], refs=state.subpools[index].refs.at[3].set(2))
    after, freed, faults = pool.drop(PAIR, index, shared, ints([3]))
    assert (freed.tolist(), int(faults), int(after.refs[3])) == ([False], 0, 1)
    after, freed, faults = pool.drop(PAIR, index, shared, ints([3, 3, 3, 3]))
    assert (freed.tolist(), int(faults), int(after.refs[3])) == ([True, False, False, False], 2, 0)


def test_reset_makes_every_id_free():
    state = pool.reset(pair_state())
    verify.check(state)
    fresh = pool.init(PAIR)
    for a, b in zip(state.subpools, fresh.subpools):
        assert all(jnp.array_equal(getattr(a, f), getattr(b, f)) for f in a.__dataclass_fields__)
