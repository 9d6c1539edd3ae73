"""A byte buffer as rows of values, for XLA code.

A `[rows, elements]` view of the whole buffer in the rows' own dtype costs nothing on a GPU. The CPU compiler would copy the
buffer at every use of such a view, so there rows are gathered and scattered as stored bytes, and only they are bitcast.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int32, UInt8

from pallas_kernels import device


def to_bytes(x: Array) -> UInt8[Array, "... bytes"]:
    """`[..., n]` of any stored dtype as `[..., n * itemsize]` bytes."""
    raw = lax.bitcast_convert_type(x, jnp.uint8)
    return raw if raw.ndim == x.ndim else raw.reshape(*x.shape[:-1], -1)


def from_bytes(raw: UInt8[Array, "... bytes"], dtype: DTypeLike) -> Array:
    """`[..., n * itemsize]` bytes as `[..., n]` of `dtype`."""
    item = np.dtype(dtype)
    if item.itemsize > 1:
        raw = raw.reshape(*raw.shape[:-1], -1, item.itemsize)
    return lax.bitcast_convert_type(raw, item)


def _views_are_free() -> bool:
    return device.target()[0] == "cuda"


def read_rows(
    buffer: UInt8[Array, " total"], dtype: DTypeLike, elements: int, index: Int32[Array, "..."]
) -> Array:
    """Rows of `elements` values of `dtype`, `[..., elements]`; row i starts at byte i * row bytes. Indices must be in range."""
    item = np.dtype(dtype)
    if _views_are_free():
        return from_bytes(buffer, item).reshape(-1, elements).at[index].get(mode="promise_in_bounds")
    raw = buffer.reshape(-1, elements * item.itemsize).at[index].get(mode="promise_in_bounds")
    return from_bytes(raw, item)


def write_rows(
    buffer: UInt8[Array, " total"], index: Int32[Array, " n"], rows: Array
) -> UInt8[Array, " total"]:
    """Writes rows `[n, elements]` where `read_rows` finds them; a negative index drops its row."""
    return _write(buffer, (), (index,), rows)


def write_slots(
    buffer: UInt8[Array, " total"],
    block: Int32[Array, " n"],
    slot: Int32[Array, " n"],
    slots: int,
    rows: Array,
) -> UInt8[Array, " total"]:
    """Writes rows `[n, elements]` at row ``block * slots + slot``, a number that need not fit int32 where its two parts do;
    a negative block drops its row."""
    return _write(buffer, (slots,), (block, slot), rows)


def _write(
    buffer: UInt8[Array, " total"], inner: tuple[int, ...], index: tuple[Int32[Array, " n"], ...], rows: Array
) -> UInt8[Array, " total"]:
    """Writes rows into the buffer seen as `[-1, *inner, elements]`; a negative first index drops its row."""
    if _views_are_free():
        view = from_bytes(buffer, rows.dtype).reshape(-1, *inner, rows.shape[1])
    else:
        rows = to_bytes(rows)
        view = buffer.reshape(-1, *inner, rows.shape[1])
    first = jnp.where(index[0] < 0, view.shape[0], index[0])
    return to_bytes(view.at[first, *index[1:]].set(rows, mode="drop").reshape(-1))
