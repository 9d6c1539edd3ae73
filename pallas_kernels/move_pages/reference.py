"""Page moves in plain XLA, as a gather and a scatter of blocks."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.move_pages import addressing

DROP = jnp.iinfo(jnp.int32).max  # a block that no buffer has
WORDS = {4: jnp.uint32, 2: jnp.uint16, 1: jnp.uint8}


def move(
    buffer: jax.Array, src: jax.Array, dst: jax.Array, *, page_bytes: int, block_bytes: int
) -> jax.Array:
    # A GPU thread moves one element, so elements should be wide there, and a view in words is free. On a CPU the same
    # view would rewrite the whole buffer.
    word = max(size for size in WORDS if block_bytes % size == 0)
    forms = (partial(_move, page_bytes=page_bytes, block_bytes=block_bytes, word=size) for size in (1, word))
    on_cpu, elsewhere = forms
    return lax.platform_dependent(buffer, src, dst, cpu=on_cpu, default=elsewhere)


def _move(
    buffer: jax.Array, src: jax.Array, dst: jax.Array, *, page_bytes: int, block_bytes: int, word: int
) -> jax.Array:
    # Block numbers fit int32 where byte offsets do not.
    blocks = buffer.reshape(-1, block_bytes)
    if word > 1:
        blocks = lax.bitcast_convert_type(buffer.reshape(-1, block_bytes // word, word), WORDS[word])
    blocks_of_page = page_bytes // block_bytes
    live = addressing.is_movable(src, dst, buffer.shape[0] // page_bytes)
    block = jnp.arange(blocks_of_page, dtype=jnp.int32)
    source = jnp.where(live, src, 0)[:, None] * blocks_of_page + block
    target = jnp.where(live[:, None], dst[:, None] * blocks_of_page + block, DROP)
    # Without the barrier XLA may fuse the gather into the scatter, and copies the whole buffer to be safe.
    blocks, moved = lax.optimization_barrier((blocks, blocks[source]))
    blocks = blocks.at[target].set(moved, mode="drop")
    return lax.bitcast_convert_type(blocks, jnp.uint8).reshape(buffer.shape)
