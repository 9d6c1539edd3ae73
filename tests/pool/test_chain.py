"""The arithmetic of bands on thousands of random pools: what fits must fit, what does not must not, nothing may overlap."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracle import Band, fits, fits_compacted
from tests.pool.cases import LAYOUTS
from ukv_jax import chain

POOLS = 2000
NAMES = ["mla", "mla_state_dcp", "swa_full", "state_swa_full", "two_floats", "static"]


def random_bands(layout, random) -> list[Band]:
    """Bands in chain order with random gaps; floats are often empty, ends sometimes."""
    if layout.subpools[0].base is not None:
        return [
            Band(
                1,
                high := int(random.integers(1, s.num_pages + 1)),
                int(random.integers(0, high)),
                s.num_virtual // 2,
            )
            if s.window
            else Band(1, 1, 0, int(random.integers(0, s.num_virtual)))
            for s in layout.subpools
        ]
    last = len(layout.subpools) - 1
    cuts = np.sort(random.integers(layout.reserved_bytes, layout.total_bytes + 1, 2 * last))
    if random.integers(2):  # crowded: gaps of a few bytes
        cuts[1::2] = np.minimum(
            cuts[0::2] + random.integers(0, 400, last), np.append(cuts[2::2], layout.total_bytes)
        )
    borders = np.concatenate([[0], cuts, [layout.total_bytes]])
    bands = []
    for i, s in enumerate(layout.subpools):
        low = s.first_page if i == 0 else max(-(-int(borders[2 * i]) // s.page_bytes), s.first_page)
        high = s.num_pages if i == last > 0 else min(int(borders[2 * i + 1]) // s.page_bytes, s.num_pages)
        if high <= low or (i in range(1, last) and random.integers(2)):
            low = high = s.num_pages if i == last > 0 else s.first_page
        holes = int(random.integers(0, high - low)) if high > low else 0
        bands.append(Band(low, high, holes, int(random.integers(0, 200))))
    return bands


def demand_at_the_border(layout, bands, random) -> list[int]:
    """A demand that fits as it is with not a page to spare in one sub-pool, or one page more than that."""
    demand = [int(random.integers(0, random.choice([1, 4, 10]))) for _ in layout.subpools]
    index = int(random.integers(0, len(demand)))
    demand[index] = 0
    while demand[index] < 60 and fits(layout, bands, demand):
        demand[index] += 1
    demand[index] = max(demand[index] - int(random.integers(0, 2)), 0)
    return demand


@functools.cache
def pools(name):
    """(bands of each pool, a demand of each pool)"""
    layout, random = LAYOUTS[name], np.random.default_rng(1)
    bands = [random_bands(layout, random) for _ in range(POOLS)]
    return bands, [demand_at_the_border(layout, b, random) for b in bands]


def usage_of(bands):
    """Usage of every pool at once: fields [pools]."""
    fields = np.array([[(b.low, b.high, b.holes, b.free_ids) for b in pool] for pool in bands], np.int32)
    return tuple(chain.Usage(*fields[:, i].T) for i in range(fields.shape[1]))


def many(fn):
    """fn of every pool at once, as numpy arrays."""
    run = jax.jit(jax.vmap(fn))
    return lambda *args: jax.tree.map(np.asarray, run(*args))


@pytest.mark.parametrize("name", NAMES)
def test_plan_finds_room_wherever_there_is_some(name):
    layout, (bands, demands) = LAYOUTS[name], pools(name)
    demand = tuple(np.array(demands, np.int32).T)
    ok, growth = many(functools.partial(chain.plan, layout))(usage_of(bands), demand)
    expected = [fits(layout, b, d) for b, d in zip(bands, demands)]
    assert 0.1 < np.mean(expected) < 0.9, "most pools say the same: the test says little"
    np.testing.assert_array_equal(ok, expected)
    for n in np.flatnonzero(ok):
        edge = layout.subpools[0].first_page * layout.subpools[0].page_bytes
        for i, (s, b, d) in enumerate(zip(layout.subpools, bands[n], demands[n])):
            g = jax.tree.map(lambda x, n=n: int(x[n]), growth[i])
            if s.base is not None and s.owns_ids:
                continue
            assert g.grow_low >= 0
            assert g.grow_high >= 0
            assert g.grow_low + g.grow_high == max(d - b.holes, 0)
            assert (g.low, g.high) == (b.low, b.high) or b.low == b.high, (
                "only an empty band may be put elsewhere"
            )
            low, high = g.low - g.grow_low, g.high + g.grow_high
            if s.base is not None:
                assert high <= s.num_pages
            elif high > low:
                assert low * s.page_bytes >= edge, f"{s.name} overlaps what lies below it"
                edge = high * s.page_bytes
                assert low >= s.first_page
                assert high <= s.num_pages


@pytest.mark.parametrize("name", NAMES)
def test_fits_compacted_finds_room_wherever_moves_could_make_some(name):
    layout, (bands, demands) = LAYOUTS[name], pools(name)
    demand = tuple(np.array(demands, np.int32).T)
    ok = many(functools.partial(chain.fits_compacted, layout))(usage_of(bands), demand)
    np.testing.assert_array_equal(ok, [fits_compacted(layout, b, d) for b, d in zip(bands, demands)])


@pytest.mark.parametrize("name", NAMES)
def test_less_always_fits_where_more_does(name):
    """Capacity is found by halving: the predicate must be monotone, alone and jointly."""
    layout, (bands, _) = LAYOUTS[name], pools(name)
    usage, n = usage_of(bands), np.arange(30, dtype=np.int32)
    groups = [[i] for i in range(len(layout.subpools))] + [list(range(len(layout.subpools)))]
    for group in groups:
        for predicate in (
            lambda *a: chain.plan(layout, *a)[0],
            functools.partial(chain.fits_compacted, layout),
        ):

            def fit(usage, predicate=predicate, group=group):
                return predicate(
                    usage, tuple(n if i in group else jnp.zeros_like(n) for i in range(len(usage)))
                )

            good = many(fit)(usage)
            assert (good[:, 1:] <= good[:, :-1]).all(), group


@pytest.mark.parametrize("name", ["state_swa_full", "two_floats"])
def test_places_of_floats(name):
    """Where the demand fits with floats sliding, every float has a place wide enough, and the places keep their order."""
    layout, (bands, demands) = LAYOUTS[name], pools(name)
    demand = tuple(np.array(demands, np.int32).T)
    ok, places = many(functools.partial(chain.float_places, layout))(usage_of(bands), demand)
    still = many(functools.partial(chain.plan, layout))(usage_of(bands), demand)[0]
    ids = [
        all(d <= b.free_ids or not s.owns_ids for s, b, d in zip(layout.subpools, p, q))
        for p, q in zip(bands, demands)
    ]
    assert ok[still].all(), "what fits as it is fits with slides"
    assert (ok & np.array(ids) & ~still).any(), "no pool needs a slide: the test says little"
    for n in np.flatnonzero(ok):
        edge = (bands[n][0].high + max(demands[n][0] - bands[n][0].holes, 0)) * layout.subpools[0].page_bytes
        for i, place in places.items():
            s, pages = layout.subpools[i], bands[n][i].live + demands[n][i]
            if pages:
                assert int(place.first[n]) * s.page_bytes >= edge
                assert int(place.first[n]) + pages <= int(place.stop[n])
                edge = (int(place.first[n]) + pages) * s.page_bytes
