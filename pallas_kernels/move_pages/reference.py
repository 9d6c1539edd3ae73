"""Page moves in plain XLA, as a gather and a scatter of rows of bytes."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.move_pages import addressing

DROP = jnp.iinfo(jnp.int32).max  # a row that no buffer has


def move(
    buffer: jax.Array, src: jax.Array, dst: jax.Array, *, page_bytes: int, block_bytes: int
) -> jax.Array:
    rows = buffer.reshape(-1, block_bytes)  # row numbers fit int32 where byte offsets do not
    blocks = page_bytes // block_bytes
    pages = buffer.shape[0] // page_bytes
    live = addressing.is_movable(src, dst, pages)
    block = jnp.arange(blocks, dtype=jnp.int32)
    source = jnp.where(live, src, 0)[:, None] * blocks + block
    target = jnp.where(live[:, None], dst[:, None] * blocks + block, DROP)
    # Without the barrier XLA may fuse the gather into the scatter, and copies the whole buffer to be safe.
    rows, moved = lax.optimization_barrier((rows, rows[source]))
    return rows.at[target].set(moved, mode="drop", unique_indices=False).reshape(buffer.shape)
