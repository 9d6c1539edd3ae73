"""Reserve and release as one kernel leave, to the bit, what their plain XLA forms leave: over random lives of small pools."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.deviceless import compile_for, requires_plugin
from tests.kernels.emulation import emulated
from tests.pool import cases
from tests.pool.cases import LANES, LAYOUTS, MAX_REQUESTS, ints, operations
from ukv_jax import pool, requests
from ukv_jax.layout import MLASpec, UnifiedLayout


def cases_of(*emulated, gpu):
    """(implementation, case): on a GPU some cases, since each compiles a dozen programs."""
    on_gpu = [pytest.param("mosaic", case, marks=pytest.mark.gpu) for case in gpu]
    return [("emulated", case) for case in emulated] + on_gpu


def run(implementation: str, function, *args, **static):
    """Calls one of the three operations; "emulated" runs the kernel's body on NumPy."""
    if implementation == "emulated":
        with emulated():
            return function(*args, **static, implementation="mosaic")
    return _compiled(function, implementation, tuple(static.items()))(*args)


@cache
def _compiled(function, implementation, static):
    on_cpu = jax.default_backend() == "cpu"
    quick = {"compiler_options": {"xla_backend_optimization_level": 0}} if on_cpu else {}
    return jax.jit(partial(function, **dict(static), implementation=implementation), **quick)


def assert_same(got, expected) -> None:
    left, right = (jax.tree_util.tree_leaves_with_path(x) for x in (got, expected))
    for (path, x), (_, y) in zip(left, right, strict=True):
        assert x.dtype == y.dtype, path
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


def check(implementation, function, *args, **static):
    """Runs an operation both ways; returns what it made."""
    expected = run("xla", function, *args, **static)
    assert_same(run(implementation, function, *args, **static), expected)
    return expected


class Life:
    """Random calls on one pool."""

    def __init__(self, name: str, seed: int):
        self.layout, self.do = LAYOUTS[name], operations(name)
        self.state = pool.init(self.layout)
        self.rng = np.random.default_rng(seed)

    def rows(self):
        """Any lanes: rows that exist mostly, idle, out of range, twice."""
        known = self.rng.permutation(MAX_REQUESTS)[:LANES]
        odd = self.rng.choice([-1, -2, MAX_REQUESTS, 2**30, *range(MAX_REQUESTS)], LANES)
        return ints(np.where(self.rng.random(LANES) < 0.2, odd, known))

    def targets(self, most: int):
        return ints(self.rng.integers(-1, most * self.layout.page_size * self.layout.dcp, LANES))

    def longer(self, rows):
        """One token more than each row has pages for, or fewer, or 0, as a decode loop asks."""
        held = np.asarray(self.state.requests.page_count)[np.clip(rows, 0, MAX_REQUESTS - 1)]
        full = held * self.layout.page_size * self.layout.dcp
        return ints(np.where(self.rng.random(LANES) < 0.7, full + 1, self.rng.integers(0, 3, LANES)))

    def live(self) -> None:
        """Some calls that are not under test."""
        for _ in range(self.rng.integers(1, 4)):
            rows, what = self.rows(), self.rng.integers(7)
            if what == 0:
                self.state = self.do.reserve(self.state, rows, self.targets(5))[0]
            elif what == 1:
                self.state, _ = self.do.append(self.state, rows, ints(self.rng.integers(0, 9, LANES)))
            elif what == 2:
                self.share()
            elif what == 3:
                self.state, _ = self.do.park(self.state, rows)
            elif what == 4:
                self.state, _ = self.do.release_window(self.state)
            elif what == 5:
                self.state, _ = self.do.mark_release(self.state, rows)
            else:
                demand = self.do.demand(self.state, rows, self.targets(3))
                self.state = self.do.relieve[False](self.state, demand)[0]

    def share(self) -> None:
        """Free rows take the pages of others."""
        r = jax.tree.map(np.asarray, self.state.requests)
        free = np.flatnonzero(r.status == pool.FREE)[:LANES]
        givers = np.flatnonzero((r.status == pool.ACTIVE) & (r.page_count > 0))
        if not len(free) or not len(givers):
            return
        rows = np.full(LANES, -1)
        rows[: len(free)] = free
        pages, length = np.full((LANES, cases.ATTACH_WIDTH), -1), np.zeros(LANES, int)
        for lane in range(len(free)):
            giver = self.rng.choice(givers)
            n = min(cases.ATTACH_WIDTH, int(r.page_count[giver]))
            pages[lane, :n] = r.pages[giver, :n]
            length[lane] = n * requests.tokens_per_page(self.layout)
        self.state, _ = self.do.attach(self.state, ints(rows), ints(pages), ints(length))


@pytest.mark.long
@pytest.mark.parametrize("implementation, name", cases_of(*LAYOUTS, gpu=["two_floats", "static"]))
def test_a_random_life(implementation, name):
    life = Life(name, len(name))
    test = partial(check, implementation)
    for _ in range(6 if implementation == "emulated" else 40):
        rows = life.rows()
        life.state, _ = test(requests.reserve, life.state, rows, life.longer(rows), pages_per_row=1)
        life.state, _ = test(requests.reserve, life.state, life.rows(), life.targets(5), pages_per_row=4)
        life.live()
        life.state = test(requests.release_pending, life.state, max_pages=3)
        life.live()
        if life.rng.random() < 0.5:
            life.state, _ = test(requests.release, life.state, life.rows())


def spoiled(state, rng):
    """The state with numbers in it that no call leaves: the kernels must make of them what XLA makes."""
    r = state.requests
    pages = np.array(r.pages)
    held = np.arange(pages.shape[1]) < np.asarray(r.page_count)[:, None]
    odd = rng.choice([-1, -7, 0, 1, 2, 3, state.layout.full.num_virtual, 2**30], pages.shape)
    spoil = held & (rng.random(pages.shape) < 0.3)
    return replace(state, requests=replace(r, pages=ints(np.where(spoil, odd, pages))))


@pytest.mark.long
@pytest.mark.parametrize("implementation, name", cases_of("mla", "state_swa_full", gpu=["two_floats"]))
def test_broken_request_maps(implementation, name):
    """Ids out of range, holes, pages named again and again: faults are counted alike."""
    for seed in range(3):
        life = Life(name, seed)
        life.state = life.do.reserve(life.state, ints([0, 1, 2, 3]), ints([16, 12, 9, 5]))[0]
        state, _ = life.do.mark_release(spoiled(life.state, life.rng), ints([0, 1, 2, 3]))
        counted = int(state.counters.faults)
        for _ in range(2):
            state = check(implementation, requests.release_pending, state, max_pages=3)
        state, _ = check(implementation, requests.release, state, ints([5, -1, 3, 0]))
        assert int(state.counters.faults) > counted


def many(rows: int) -> UnifiedLayout:
    spec = MLASpec(num_layers=1, kv_lora_rank=8, qk_rope_head_dim=4)
    return UnifiedLayout.from_bytes(
        (spec,), total_bytes=96 * (4 * rows + 100), page_size=4, max_requests=rows, max_tokens=64
    )


@pytest.mark.long
@pytest.mark.parametrize("implementation, rows", cases_of(256, 1000, gpu=[256]))
def test_many_requests(implementation, rows):
    """Several warpgroups, several trips, and a pool that is short for the last lanes."""
    rng = np.random.default_rng(rows)
    state, test = pool.init(many(rows)), partial(check, implementation)
    every = ints(rng.permutation(rows))
    for n in (1, 2):
        state, got = test(requests.reserve, state, every, jnp.full(rows, 4 * n, jnp.int32), pages_per_row=1)
        assert bool(got.granted.all())
    state, got = test(requests.reserve, state, every, ints(rng.integers(0, 26, rows)), pages_per_row=8)
    assert 0 < int(got.granted.sum()) < rows
    ends = ints(np.where(rng.random(rows) < 0.5, rng.permutation(rows), -1))
    state, _ = test(requests.release, state, ends)
    state, _ = test(requests.reserve, state, every, jnp.full(rows, 25, jnp.int32), pages_per_row=8)
    state, _ = requests.mark_release(state, every)
    state = test(requests.release_pending, state, max_pages=1000)
    state, _ = test(requests.release, state, every)
    assert not int(state.requests.page_count.sum())


def test_what_the_kernels_decline():
    large, small = (jax.eval_shape(partial(pool.init, many(rows))) for rows in (1025, 8))
    rows = jax.ShapeDtypeStruct((4,), jnp.int32)
    end, take = (partial(f, implementation="mosaic") for f in (requests.release, requests.reserve))
    pending = partial(requests.release_pending, max_pages=2000, implementation="mosaic")
    with emulated():
        with pytest.raises(NotImplementedError, match="1025 rows"):
            jax.eval_shape(end, large, rows)
        with pytest.raises(NotImplementedError, match="0 lanes"):
            jax.eval_shape(end, small, jax.ShapeDtypeStruct((0,), jnp.int32))
        with pytest.raises(NotImplementedError, match="2000 pages"):
            jax.eval_shape(pending, small)
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU"):
        jax.eval_shape(partial(take, pages_per_row=1), small, rows, rows)


@pytest.mark.deviceless
@requires_plugin
@pytest.mark.parametrize("name", ["mla", "two_floats", "static"])
def test_one_kernel_in_place(name):
    layout = LAYOUTS[name]
    state = jax.eval_shape(partial(pool.init, layout))
    lanes = jax.ShapeDtypeStruct((LANES,), jnp.int32)
    for operation, args in (
        (partial(requests.reserve, pages_per_row=1), (lanes, lanes)),
        (partial(requests.release_pending, max_pages=64), ()),
        (requests.release, (lanes,)),
    ):
        program = compile_for(partial(operation, implementation="mosaic"), state, *args, donate=0)
        assert program.alias_bytes == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        kernels = [t for t in program.launches if t.kind == "kCustomCall"]
        assert len(kernels) == 1
        others = [t for t in program.launches if t.kind not in ("kCustomCall", "kCopy")]
        assert not others or (layout.state is not None and len(args) == 2), others  # which clears new slots
