"""Grouped product in plain XLA: one tile after the other, each with the matrix of its group."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.grouped_matmul.api import GroupedRows


def multiply(x: Array, matrices: Array, rows: GroupedRows) -> Array:
    """See `grouped_matmul`. Unused tiles are skipped: they stay 0."""
    tile, width = rows.tile, matrices.shape[1]

    def body(t: Array, out: Array) -> Array:
        part = lax.dynamic_slice_in_dim(x, t * tile, tile)
        product = lax.dot_general(
            part, matrices[rows.tile_group[t]], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        return lax.dynamic_update_slice_in_dim(out, product.astype(x.dtype), t * tile, 0)

    out = jnp.zeros((x.shape[0], width), x.dtype)
    return lax.fori_loop(0, rows.num_tiles, body, out)
