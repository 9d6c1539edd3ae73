"""`requests.reserve`, `release_pending` and `release` as one GPU kernel each: the state in and out of flat arrays."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.bind_pages import requests_mosaic_gpu as kernels
from ukv_jax import chain, pool, requests, views
from ukv_jax.layout import PoolLayout
from ukv_jax.pool import PoolState, RequestState
from ukv_jax.requests import Reserved


def reserve(state: PoolState, rows, target_len, pages_per_row: int) -> tuple[PoolState, Reserved]:
    layout, r = state.layout, state.requests

    def demand(*lanes):
        return requests.lane_demand(layout, pages_per_row, *lanes)

    def plan(usage, pages, slots):
        return chain.plan(
            layout, tuple(chain.Usage(*u) for u in usage), requests.chain_demand(layout, pages, slots)
        )

    maps = RequestState(
        pages=r.pages,
        page_count=r.page_count,
        slots=r.slots if layout.state is not None else None,
        seq_len=None,
        status=r.status,
        window_first=None,
        page_to_req=None,
    )
    counters = replace(state.counters, moved=None)
    given = state.subpools, maps, counters
    made = kernels.reserve(
        _rules(layout), demand, plan, _flat(given), rows=rows, target=target_len, pages_per_row=pages_per_row
    )
    state = _updated(state, given, made)
    if layout.state is not None:
        buffer = views.clear_pages(
            layout, layout.state, state.buffer, made["fresh"], made["fresh_count"].reshape(())
        )
        state = replace(state, buffer=buffer)
    return state, Reserved(made["granted"], made["refused"], made["fault"], made["taken"])


def release_pending(state: PoolState, max_pages: int) -> PoolState:
    return _release(state, None, max_pages)[0]


def release(state: PoolState, rows) -> tuple[PoolState, jax.Array]:
    state, made = _release(state, rows, requests.RELEASE_CHUNK)
    return state, made["ended"]


def _release(state: PoolState, rows, max_pages: int) -> tuple[PoolState, dict]:
    layout, r = state.layout, state.requests
    maps = replace(
        r,
        slots=r.slots if layout.state is not None else None,
        window_first=r.window_first if layout.windows else None,
    )
    given = state.subpools, maps, replace(state.counters, refused=None, moved=None)
    made = kernels.release(_rules(layout), _flat(given), rows=rows, max_pages=max_pages)
    return _updated(state, given, made), made


def _rules(layout: PoolLayout) -> kernels.Rules:
    kinds = tuple(
        kernels.Kind(s.is_state, s.owns_ids, pool.pages_are_ids(layout, s), chain.initial_band(layout, i))
        for i, s in enumerate(layout.subpools)
    )
    return kernels.Rules(
        kinds, layout.max_requests, layout.max_pages, pool.FREE, pool.ACTIVE, pool.PARKED, pool.RELEASING
    )


def _flat(tree: tuple) -> tuple:
    return jax.tree.map(jnp.ravel, tree)


def _updated(state: PoolState, given: tuple, made: dict) -> PoolState:
    """The state with the arrays that a kernel was given in its place."""
    new = tuple(made[name] for name in ("pools", "requests", "counters"))
    subpools, maps, counters = jax.tree.map(lambda old, x: x.reshape(old.shape), given, new)

    def merge(old, new):
        kept = {name: value for name, value in vars(new).items() if value is not None}
        return replace(old, **kept)

    return replace(
        state,
        subpools=subpools,
        requests=merge(state.requests, maps),
        counters=merge(state.counters, counters),
    )
