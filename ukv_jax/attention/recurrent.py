"""Recurrent state in the pool: one slot a request, every part of every layer in blocks of that slot."""

import math
from collections.abc import Iterable
from typing import cast

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, UInt8

from ukv_jax import views
from ukv_jax.layout import PADDING, StatePart, StateSpec, SubPool


def _block_index(
    subpool: SubPool, part: str, layer: int, slots: Int32[Array, " rows"]
) -> Int32[Array, "rows blocks"]:
    """Block of every piece of `part` at cache-layer `layer`; the padding slot's for a dead row."""
    parts = cast(StateSpec, subpool.spec).parts
    per_layer = next(p for p in parts if p.name == part).blocks_per_layer
    offsets = np.array(
        [subpool.block_offset(layer * per_layer + j, part) for j in range(per_layer)], np.int32
    )
    return jnp.maximum(slots, PADDING)[:, None] * subpool.stride(part) + offsets


def _parts(subpool: SubPool, names: Iterable[str] | None) -> list[StatePart]:
    """The parts of these names (None: all)."""
    assert isinstance(subpool.spec, StateSpec)
    parts = {p.name: p for p in subpool.spec.parts}
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
        index = _block_index(subpool, part.name, layer, slots)
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
        index = _block_index(subpool, part.name, layer, slots)
        index = jnp.where(slots[:, None] > PADDING, index, -1)
        rows = value.astype(part.dtype).reshape(-1, math.prod(part.block_shape))
        buffer = views.write_rows(buffer, index.reshape(-1), rows)
    return buffer
