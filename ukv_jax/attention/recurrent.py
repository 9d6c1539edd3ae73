"""Recurrent state in the pool: one slot a request, every part of every layer in blocks of that slot."""

import math
from collections.abc import Iterable
from typing import cast

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, UInt8

from pallas_kernels.state_step import StateBlocks
from ukv_jax import views
from ukv_jax.layout import PADDING, StatePart, StateSpec, SubPool


def blocks(subpool: SubPool, part: str, layer: int) -> StateBlocks:
    """Where the pieces of `part` at cache-layer `layer` lie, for a kernel that reads and writes them in place."""
    [spec] = _parts(subpool, [part])
    first = subpool.block_offset(layer * spec.blocks_per_layer, part)
    return StateBlocks(
        jnp.int32(first),
        subpool.stride(part),
        views.block_step(subpool),
        spec.dtype,
        (spec.blocks_per_layer, *spec.block_shape),
    )


def _block_index(
    subpool: SubPool, part: StatePart, layer: int, slots: Int32[Array, " rows"]
) -> Int32[Array, "rows blocks"]:
    """Block of every piece of `part` at cache-layer `layer`; the padding slot's for a dead row."""
    where = blocks(subpool, part.name, layer)
    pieces = jnp.arange(part.blocks_per_layer, dtype=jnp.int32) * where.piece_stride
    return jnp.maximum(slots, PADDING)[:, None] * where.slot_stride + where.first + pieces


def _parts(subpool: SubPool, names: Iterable[str] | None) -> list[StatePart]:
    """The parts of these names (None: all)."""
    parts = {p.name: p for p in cast(StateSpec, subpool.spec).parts}
    names = list(parts if names is None else names)
    if unknown := sorted(set(names) - set(parts)):
        raise ValueError(f"no state parts {unknown}; sub-pool {subpool.name!r} has {sorted(parts)}")
    return [parts[name] for name in names]


def read(
    subpool: SubPool,
    buffer: UInt8[Array, " total"],
    layer: int,
    slots: Int32[Array, " rows"],
    parts: Iterable[str] | None = None,
) -> dict[str, Array]:
    """These parts (None: all) of one layer, [rows, blocks_per_layer, *block_shape]; a dead row (slot -1) reads zeros."""
    state = {}
    for part in _parts(subpool, parts):
        index = _block_index(subpool, part, layer, slots)
        values = views.read_rows(buffer, part.dtype, math.prod(part.block_shape), index)
        state[part.name] = values.reshape(*index.shape, *part.block_shape)
    return state


def write(
    subpool: SubPool,
    buffer: UInt8[Array, " total"],
    layer: int,
    slots: Int32[Array, " rows"],
    state: dict[str, Array],
) -> UInt8[Array, " total"]:
    """Stores what `read` gave, changed. Dead rows write nothing. Unknown parts and other shapes are a ValueError."""
    parts = _parts(subpool, state)
    # All of the new state exists before the first write: no read of the old buffer is left that would copy the pool.
    buffer, state = lax.optimization_barrier((buffer, state))
    for part in parts:
        value = state[part.name]
        want = (slots.shape[0], part.blocks_per_layer, *part.block_shape)
        if value.shape != want:
            raise ValueError(f"state part {part.name!r} has shape {value.shape}, the pool stores {want}")
        index = _block_index(subpool, part, layer, slots)
        index = jnp.where(slots[:, None] > PADDING, index, -1)
        rows = value.astype(part.dtype).reshape(-1, math.prod(part.block_shape))
        buffer = views.write_rows(buffer, index.reshape(-1), rows)
    return buffer
