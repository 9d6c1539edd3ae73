"""The buffer as rows of values, for XLA code; and whole pages of it set to zero."""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, UInt8

from pallas_kernels.byte_rows import from_bytes, read_rows, to_bytes, write_rows, write_slots
from ukv_jax.layout import PADDING, PoolLayout, SubPool

__all__ = ["clear_pages", "from_bytes", "read_rows", "to_bytes", "write_rows", "write_slots"]


def clear_pages(
    layout: PoolLayout,
    subpool: SubPool,
    buffer: UInt8[Array, " total"],
    pages: Int32[Array, " n"],
    count: Int32[Array, ""],
) -> UInt8[Array, " total"]:
    """Zeroes the first `count` of `pages` in every region. A trip a page, so the zeros never exist as an array."""

    def clear(i, buffer):
        page = pages[i]
        for region in subpool.regions:
            blocks = subpool.block_offset(0, region.name) + np.arange(region.count) * block_step(subpool)
            index = page * subpool.stride(region.name) + jnp.asarray(blocks, jnp.int32)
            index = jnp.where(page > PADDING, index, -1)
            zeros = jnp.zeros((region.count, math.prod(region.block_shape)), region.dtype)
            buffer = write_rows(buffer, index, zeros)
        return buffer

    return lax.fori_loop(0, count, clear, buffer)


def block_step(subpool: SubPool) -> int:
    """Blocks from one block of a page to the next block of the same page."""
    return 1 if subpool.base is None else subpool.num_pages
