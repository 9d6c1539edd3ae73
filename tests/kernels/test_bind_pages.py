"""Bind and tombstone against plain Python, for every implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.bind_pages import bind, tombstone
from tests.kernels.emulation import IMPLEMENTATIONS, run

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
VIRTUAL, PHYSICAL = 400, 500
POISON = -777


def ints(*values) -> jax.Array:
    return jnp.array(values, jnp.int32)


def random_maps(rng, live: int) -> tuple[np.ndarray, np.ndarray]:
    """v2p and p2v with `live` bound pages at random places."""
    v2p, p2v = np.full(VIRTUAL + 1, -1), np.full(PHYSICAL + 1, -1)
    v2p[0] = p2v[0] = 0
    virtual = rng.choice(np.arange(1, VIRTUAL), live, replace=False)
    physical = rng.choice(np.arange(1, PHYSICAL), live, replace=False)
    v2p[virtual], p2v[physical] = physical, virtual
    return v2p, p2v


def tombstone_in_python(v2p, p2v, free_ids, free_count, holes, hole_count, virtual):
    """The rule, one page after another."""
    v2p, p2v, free_ids, holes = (np.array(x) for x in (v2p, p2v, free_ids, holes))
    freed, faults = [], 0
    for v in virtual:
        physical = v2p[v] if 0 < v < len(v2p) - 1 else -1
        freed.append(physical > 0)
        if physical > 0:
            v2p[v] = p2v[physical] = -1
            free_ids[free_count], holes[hole_count] = v, physical
            free_count, hole_count = free_count + 1, hole_count + 1
        elif v != -1:
            faults += 1
    return v2p, p2v, free_ids, free_count, holes, hole_count, freed, faults


def check(got, expected) -> None:
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.array(x), np.array(y))


def call(implementation, v2p, p2v, free_count, hole_count, virtual, **options):
    """Tombstones on stacks that hold poison above their counts; returns the results and the expected ones."""
    free_ids = np.full(2 * VIRTUAL, POISON)
    holes = np.full(2 * PHYSICAL, POISON)
    state = (
        ints(*v2p),
        ints(*p2v),
        ints(*free_ids),
        jnp.int32(free_count),
        ints(*holes),
        jnp.int32(hole_count),
    )
    got = run(implementation, tombstone, *state, ints(*virtual), **options)
    return got, tombstone_in_python(v2p, p2v, free_ids, free_count, holes, hole_count, virtual)


@every_implementation
class TestBind:
    def test_dropped_lanes(self, implementation):
        v2p, p2v = ints(0, -1, -1, -1, -1), ints(0, -1, -1, -1, -1, -1)
        virtual, physical = ints(3, -1, 0, 1, 2, 4, 2**31 - 1, 2), ints(4, 1, 2, 0, -1, 3, 1, 5)
        got = run(implementation, bind, v2p, p2v, virtual, physical)
        assert got[0].tolist() == [0, -1, -1, 4, -1]
        assert got[1].tolist() == [0, -1, -1, -1, 3, -1]

    @given(seed=st.integers(0, 2**32 - 1))
    @settings(max_examples=10)
    @pytest.mark.parametrize("lanes", [1, 128, 300])
    def test_any_pages(self, implementation, lanes, seed):
        rng = np.random.default_rng(seed)
        v2p, p2v = random_maps(rng, 60)
        virtual = rng.permutation(np.flatnonzero(v2p[:-1] < 0))[:lanes]
        physical = rng.permutation(np.flatnonzero(p2v[:-1] < 0))[:lanes]
        idle = rng.random(lanes) < 0.2
        virtual[idle] = rng.choice([-1, 0, -9], idle.sum())
        got = run(implementation, bind, ints(*v2p), ints(*p2v), ints(*virtual), ints(*physical))
        v2p[virtual[~idle]], p2v[physical[~idle]] = physical[~idle], virtual[~idle]
        check(got, (v2p, p2v))

    def test_no_lanes(self, implementation):
        nothing = jnp.zeros((0,), jnp.int32)
        v2p, p2v = run(implementation, bind, ints(0, -1, -1), ints(0, -1, -1), nothing, nothing)
        assert (v2p.tolist(), p2v.tolist()) == ([0, -1, -1], [0, -1, -1])

    def test_lane_counts_that_differ(self, implementation):
        with pytest.raises(ValueError, match="2 virtual pages for 1 physical"):
            run(implementation, bind, ints(0, -1, -1), ints(0, -1, -1), ints(1, 1), ints(1))


@every_implementation
class TestTombstone:
    def test_every_kind_of_lane(self, implementation):
        v2p, p2v = ints(0, 5, 3, -1, 7, -1), ints(0, -1, -1, 2, -1, 1, -1, 4, -1)
        free_ids, holes = ints(3, 0, 0, 0), ints(1, 2, 0, 0, 0)
        virtual = ints(4, -1, 2, 4, 3, 0, 5, 99, -2, 2)
        got = run(implementation, tombstone, v2p, p2v, free_ids, jnp.int32(1), holes, jnp.int32(2), virtual)
        v2p, p2v, free_ids, free_count, holes, hole_count, freed, faults = got
        assert v2p.tolist() == [0, 5, -1, -1, -1, -1]
        assert p2v.tolist() == [0, -1, -1, -1, -1, 1, -1, -1, -1]
        assert (free_ids.tolist(), int(free_count)) == ([3, 4, 2, 0], 3)
        assert (holes.tolist(), int(hole_count)) == ([1, 2, 7, 3, 0], 4)
        assert freed.tolist() == [True, False, True] + [False] * 7
        assert int(faults) == 7  # all but the two freed pages and the idle lane

    @given(seed=st.integers(0, 2**32 - 1))
    @settings(max_examples=8)
    @pytest.mark.parametrize("lanes", [1, 127, 128, 256, 1500])
    def test_any_pages(self, implementation, lanes, seed):
        """Many duplicates, over several warps, warpgroups and trips."""
        rng = np.random.default_rng(seed)
        v2p, p2v = random_maps(rng, 250)
        virtual = rng.integers(-3, VIRTUAL + 4, lanes)
        check(*call(implementation, v2p, p2v, 17, 0, virtual))

    def test_one_page_named_by_every_lane(self, implementation):
        v2p, p2v = random_maps(np.random.default_rng(1), 20)
        page = int(np.flatnonzero(v2p > 0)[0])
        got, expected = call(implementation, v2p, p2v, 0, 0, [page] * 1100)
        check(got, expected)
        assert got[6].tolist() == [True] + [False] * 1099

    def test_second_release_is_a_fault_and_changes_nothing(self, implementation):
        v2p, p2v = random_maps(np.random.default_rng(2), 20)
        pages = np.flatnonzero(v2p > 0)
        first, _ = call(implementation, v2p, p2v, 0, 0, pages)
        second = run(implementation, tombstone, *first[:6], ints(*pages))
        check(second[:6], first[:6])
        assert int(second[7]) == len(pages)

    def test_non_owner_frees_no_ids(self, implementation):
        v2p, p2v = random_maps(np.random.default_rng(3), 30)
        pages = np.flatnonzero(v2p > 0)[:5]
        got, expected = call(implementation, v2p, p2v, 3, 0, pages, push_ids=False)
        assert int(got[3]) == 3
        assert (got[2] == POISON).all()
        check(got[:2] + got[4:], expected[:2] + expected[4:])
        got = run(
            implementation, tombstone, ints(*v2p), ints(*p2v), None, None, ints(*[0] * 9), jnp.int32(0),
            ints(*pages), push_ids=False,
        )  # fmt: skip
        assert got[2] is None
        assert int(got[5]) == 5

    def test_bound_pages_return_to_bind(self, implementation):
        """Release and bind again: the maps stay inverses."""
        rng = np.random.default_rng(4)
        v2p, p2v = random_maps(rng, 50)
        pages = rng.permutation(np.flatnonzero(v2p > 0))[:40]
        got, _ = call(implementation, v2p, p2v, 0, 0, pages)
        v2p, p2v = run(implementation, bind, got[0], got[1], got[2][:40], got[4][39::-1])
        v2p, p2v = np.array(v2p), np.array(p2v)
        live = np.flatnonzero(v2p > 0)
        assert len(live) == 50
        np.testing.assert_array_equal(p2v[v2p[live]], live)
        assert (p2v > 0).sum() == 50

    def test_owner_needs_its_lists(self, implementation):
        with pytest.raises(ValueError, match="push_ids=True needs"):
            run(
                implementation,
                tombstone,
                ints(0, -1),
                ints(0, -1),
                None,
                None,
                ints(0),
                jnp.int32(0),
                ints(1),
            )


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="asks the CPU compiler")
def test_cost_does_not_grow_with_the_pool_on_a_cpu():
    def memory(pages):
        table, lanes, count = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((pages,), (256,), ()))
        free = jax.jit(lambda *args: tombstone(*args, implementation="xla"), donate_argnums=range(6))
        return free.lower(table, table, table, count, table, count, lanes).compile().memory_analysis()

    small, large = memory(1 << 12), memory(1 << 22)
    assert large.alias_size_in_bytes == 4 * (4 << 22) + 8
    assert large.temp_size_in_bytes == small.temp_size_in_bytes < 64 * 256
