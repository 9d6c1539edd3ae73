"""The buffer as blocks and rows, for XLA code.

The buffer is read and written as stored bytes: rows of a `[rows, row_bytes]` reshape are gathered or scattered, and only
what was gathered is bitcast. (A typed view of the whole buffer is free on a GPU, but the CPU compiler copies it.)
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, UInt8

from ukv_jax.layout import PADDING, PoolLayout, SubPool, _dtype


def to_bytes(x: Array) -> UInt8[Array, "... bytes"]:
    """`[..., n]` of any stored dtype as `[..., n * itemsize]` bytes."""
    raw = lax.bitcast_convert_type(x, jnp.uint8)
    return raw if raw.ndim == x.ndim else raw.reshape(*x.shape[:-1], -1)


def from_bytes(raw: UInt8[Array, "... bytes"], dtype: str) -> Array:
    """`[..., n * itemsize]` bytes as `[..., n]` of `dtype`."""
    item = _dtype(dtype)
    if item.itemsize > 1:
        raw = raw.reshape(*raw.shape[:-1], -1, item.itemsize)
    return lax.bitcast_convert_type(raw, item)


def read_rows(buffer: UInt8[Array, " total"], row_bytes: int, index: Int32[Array, "..."]) -> UInt8[Array, "... row_bytes"]:
    """Rows of the `[total / row_bytes, row_bytes]` reshape. Indices must be in range."""
    return buffer.reshape(-1, row_bytes).at[index].get(mode="promise_in_bounds")


def write_rows(buffer: UInt8[Array, " total"], index: Int32[Array, " n"], rows: UInt8[Array, "n row_bytes"]) -> UInt8[Array, " total"]:
    """Writes rows of the `[total / row_bytes, row_bytes]` reshape; a negative index drops its row."""
    view = buffer.reshape(-1, rows.shape[-1])
    target = jnp.where(index < 0, view.shape[0], index)
    return view.at[target].set(rows, mode="drop").reshape(-1)


def clear_pages(
    layout: PoolLayout, subpool: SubPool, buffer: UInt8[Array, " total"], pages: Int32[Array, " n"], count: Int32[Array, ""]
) -> UInt8[Array, " total"]:
    """Zeroes the first `count` of `pages` in every region. A trip a page, so the zeros never exist as an array."""

    def clear(i, buffer):
        page = pages[i]
        for region in subpool.regions:
            blocks = subpool.block_offset(0, region.name) + np.arange(region.count) * _block_step(subpool)
            index = page * subpool.stride(region.name) + jnp.asarray(blocks, jnp.int32)
            index = jnp.where(page > PADDING, index, -1)
            buffer = write_rows(buffer, index, jnp.zeros((region.count, region.block_bytes), jnp.uint8))
        return buffer

    return lax.fori_loop(0, count, clear, buffer)


def _block_step(subpool: SubPool) -> int:
    """Blocks from one block of a page to the next block of the same page."""
    return 1 if subpool.base is None else subpool.num_pages
