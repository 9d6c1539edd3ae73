"""The pool as a cache for tests that run a model outside the decode loop: unified or static, by any delivery."""

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ukv_jax import pool, requests, verify
from ukv_jax.attention import PoolStep, begin_step, pool_specs
from ukv_jax.cache import CacheSpec
from ukv_jax.layout import PoolLayout, StateSpec, StaticLayout, UnifiedLayout
from ukv_jax.pool import PoolState

# Large programs for tiny inputs: LLVM's passes would take longer than all that runs.
jit = (
    partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    if jax.default_backend() == "cpu"
    else jax.jit
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PoolCache:
    """Wraps a state and the step that is open on it, in the form that `dense_cache.DenseCache` has."""

    state: PoolState
    step: PoolStep | None
    delivery: str = field(metadata={"static": True})

    @property
    def rows(self):
        return jnp.arange(self.state.layout.max_requests, dtype=jnp.int32)

    @property
    def positions(self):
        return self.step.positions

    @property
    def new_len(self):
        return self.step.new_len

    def begin(self, tokens, new_len):
        state, _ = requests.release_window(self.state, max_pages=self.state.layout.max_requests * 64)
        step = begin_step(
            state, self.rows, jnp.asarray(new_len, jnp.int32), tokens=tokens, delivery=self.delivery
        )
        # One owner of the buffer at a time, so that it is updated in place.
        return replace(self, state=replace(state, buffer=jnp.zeros(0, jnp.uint8)), step=step)

    def end(self):
        state = replace(self.state, buffer=self.step.buffer)
        state, _ = requests.append(
            state, self.rows, self.step.new_len, max_tokens=self.step.positions.shape[1]
        )
        return replace(self, state=state, step=None)

    def mla(self, *args, **options):
        out, step = self.step.mla(*args, **options)
        return out, replace(self, step=step)

    def gqa(self, *args, **options):
        out, step = self.step.gqa(*args, **options)
        return out, replace(self, step=step)

    def conv_step(self, *args, **options):
        out, step = self.step.conv_step(*args, **options)
        return out, replace(self, step=step)

    def delta_step(self, *args, **options):
        out, step = self.step.delta_step(*args, **options)
        return out, replace(self, step=step)

    def ssm_step(self, *args):
        out, step = self.step.ssm_step(*args)
        return out, replace(self, step=step)

    def read_state(self, layer, parts=None):
        return self.step.read_state(layer, parts)

    def write_state(self, layer, state):
        return replace(self, step=self.step.write_state(layer, state))


def make_pool_cache(
    spec: CacheSpec, rows: int, max_len: int, *, unified: bool, delivery: str = "table", page_size: int = 64
) -> PoolCache:
    """A pool whose pages are scattered and whose free bytes are NaN, with room for `rows` requests of max_len tokens."""
    limits = dict(page_size=page_size, max_requests=rows, max_tokens=max_len)
    specs = pool_specs(spec)
    pages = -(-max_len // page_size)
    layout: PoolLayout
    if unified:
        limits.pop("max_requests")
        layout = UnifiedLayout.from_tokens(
            specs, tokens=(rows + 2) * pages * page_size, requests=rows, **limits
        )
    else:
        counts = {s.name: rows + 1 if isinstance(s, StateSpec) else rows * pages + 7 for s in specs}
        layout = StaticLayout.from_pages(specs, pages=counts, **limits)
    empty = jit(lambda: pool.init(layout))()  # one program in the place of one for every shape of an array
    state = scatter_free_pages(poison_free_bytes(empty), seed=0)
    lanes = jnp.arange(rows, dtype=jnp.int32)
    reserve = jit(partial(requests.reserve, pages_per_row=pages), donate_argnums=0)
    state, got = reserve(state, lanes, jnp.full(rows, max_len, jnp.int32))
    assert bool(got.granted.all())
    verify.check(state)
    return PoolCache(state, None, delivery)


def poison_free_bytes(state: PoolState) -> PoolState:
    """0xFF in every byte that no padding page covers: NaN in every float dtype."""
    bytes_ = np.full(state.layout.total_bytes, 0xFF, np.uint8)
    for s in state.layout.subpools:
        if s.base is None:
            bytes_[: s.page_bytes] = 0
            continue
        for region in s.regions:
            for j in range(region.count):
                at = s.block_offset(j, region.name) * region.block_bytes
                bytes_[at : at + region.block_bytes] = 0
    return replace(state, buffer=jnp.asarray(bytes_))


def scatter_free_pages(state: PoolState, seed: int) -> PoolState:
    """Shuffles free ids, and in a unified pool opens a band of shuffled holes for half of all pages: no request is
    contiguous."""
    rng = np.random.default_rng(seed)
    pools = []
    for i, (spec, p) in enumerate(zip(state.layout.subpools, state.subpools)):
        count = int(p.free_count)
        ids = np.asarray(p.free_ids).copy()
        ids[:count] = rng.permutation(ids[:count])
        p = replace(p, free_ids=jnp.asarray(ids))
        last = 0 < i == len(state.layout.subpools) - 1  # the only one grows up
        if spec.base is None and not spec.is_state and (i == 0 or last):
            size = state.layout.max_requests * state.layout.max_pages // 2
            low, high = (int(p.high) - size, int(p.high)) if last else (int(p.low), int(p.low) + size)
            holes = np.zeros(spec.num_pages, np.int32)
            holes[:size] = rng.permutation(np.arange(low, high))
            p = replace(
                p,
                low=jnp.int32(low),
                high=jnp.int32(high),
                holes=jnp.asarray(holes),
                hole_count=jnp.int32(size),
            )
        pools.append(p)
    return replace(state, subpools=tuple(pools))
