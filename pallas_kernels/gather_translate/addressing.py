"""The arithmetic of translation, as plain functions on int32 scalars or arrays.

The XLA reference and the Mosaic GPU kernels call the same functions, so that tests on a CPU hold for both.
Divisions here see no negative number: the sign is tested first, because floor and truncation differ below
zero (-1 // 1).

Names: ps = page_size (tokens a page), B = blocks_per_page. A virtual page v lies in physical page v2p[v]; its
kernel-facing entry is v2p[v] * B, and token offset o of it has the kernel-facing id v2p[v] * B * ps + o.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

MAX_ITEMS = 2**31 - 2**12  # ids of a row or stream: their indices, and a trip's beyond them, fit int32

type Int = int | jax.Array
type Granularity = Literal["page", "token"]


def divide(x: Int, by: int) -> jax.Array:
    """x // by for x >= 0; a shift where `by` is a power of two."""
    value = jnp.asarray(x)
    if by == 1:
        return value
    if by & (by - 1) == 0:
        return lax.shift_right_logical(value, jnp.full_like(value, by.bit_length() - 1))
    return lax.div(value, jnp.full_like(value, by))


def remainder(x: Int, by: int) -> jax.Array:
    """x % by for x >= 0."""
    x = jnp.asarray(x)
    if by & (by - 1) == 0:
        return jnp.bitwise_and(x, jnp.full_like(x, by - 1))
    return lax.rem(x, jnp.full_like(x, by))


def in_range(page: Int, num_rows: int) -> jax.Array:
    """Page, or the padding page 0 where it is negative or past the table."""
    return jnp.where((page < 0) | (page >= num_rows), 0, page)


def page_of_word(word: Int, page_size: int, granularity: Granularity) -> jax.Array:
    """Virtual page of a request table's word: the word itself, or the page of the token id that it holds."""
    if granularity == "page":
        return jnp.maximum(word, 0)
    return divide(jnp.maximum(word, 0), page_size)


def column_stride(page_size: int, granularity: Granularity) -> int:
    """Words between two pages' columns of a request table; only the first token of a page is read."""
    return page_size if granularity == "token" else 1


def row_tokens(table_width: int, page_size: int, granularity: Granularity) -> int:
    """Tokens that one row of a request table can describe, cut so that sums with a trip's items fit int32."""
    tokens = table_width if granularity == "token" else table_width * page_size
    return min(tokens, MAX_ITEMS)


def entry(physical: Int, blocks_per_page: int) -> jax.Array:
    """Kernel-facing entry of a v2p value; unbound (-1) gives the padding page's entry 0."""
    return jnp.maximum(physical, 0) * blocks_per_page


def readable_end(kv_end: Int, delta: Int, row: Int, max_requests: int, limit: int) -> jax.Array:
    """Tokens of a row that can be read: kv_end + delta, cut at `limit`.

    A row with kv_end <= 0 is padding and a row id outside the request table has no pages: both stay empty,
    whatever the delta says.
    """
    alive = (kv_end > 0) & (row >= 0) & (row < max_requests)
    return jnp.where(alive, jnp.clip(kv_end + delta, 0, limit), 0)


def table_columns(tokens: Int, page_size: int) -> jax.Array:
    """Columns of the live prefix of a row."""
    return divide(tokens + (page_size - 1), page_size)


def stream_span(
    kv_start: Int, end: Int, indptr: Int, indptr_next: Int, capacity: int
) -> tuple[jax.Array, jax.Array]:
    """First position and token count of a stream row whose readable tokens end at `end`.

    The row is cut at the next row's start and at the capacity; one that starts outside the stream is empty. An empty
    row starts at 0, so that its first position is one that the request table has.
    """
    start = jnp.maximum(kv_start, 0)
    room = jnp.where(indptr < 0, 0, jnp.minimum(indptr_next, capacity) - indptr)
    length = jnp.maximum(jnp.minimum(end - start, room), 0)
    return jnp.where(length > 0, start, 0), length


def stream_id(entry: Int, position: Int, page_size: int) -> jax.Array:
    """Kernel-facing token id of a position in the page with this entry."""
    return entry * page_size + remainder(position, page_size)


def quad_count(length: Int, indptr: Int) -> jax.Array:
    """Aligned groups of four ids that a stream row of `length` ids from `indptr` touches."""
    return jnp.where(length > 0, divide((indptr & 3) + length + 3, 4), 0)


def quad_columns(
    quad: Int, start: Int, length: Int, indptr: Int, page_size: int
) -> tuple[jax.Array, jax.Array]:
    """Table columns of the first and the last live id of a group; for page sizes of 4 and more there are no others.

    Group q of a row holds the ids at 4 * (indptr // 4 + q) to 3 further on, whose first may lie before the row.
    """
    first = 4 * quad - (indptr & 3)
    last_live = jnp.maximum(length - 1, 0)
    low, high = (divide(start + jnp.clip(nth, 0, last_live), page_size) for nth in (first, first + 3))
    return low, high


def quad_ids(
    quad: Int, entries: tuple[Int, Int], start: Int, length: Int, indptr: Int, page_size: int
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The four kernel-facing ids of a group, from the entries at its `quad_columns`, and which of them are live."""
    first = 4 * quad - (indptr & 3)
    # A group may start up to 3 tokens before position 0, hence the added page.
    offset = remainder(start + first + page_size, page_size)
    ids: list[jax.Array] = []
    live: list[jax.Array] = []
    for e in range(4):
        crosses = offset + e >= page_size
        here, there = entries[0] * page_size, (entries[1] - 1) * page_size
        ids.append(jnp.where(crosses, there, here) + offset + e)
        live.append(jnp.logical_and(first + e >= 0, first + e < length))
    return ids, live


def write_page(loc: Int, live: Int, page_size: int, num_rows: int | None, dcp_rank: Int, dcp_size: int):
    """Virtual page and offset in it of a write location; page 0 where nothing may be written.

    `live` is a bool. Under decode context parallelism (DCP) token id t belongs to rank t % dcp_size, which
    stores it as row t // dcp_size.
    """
    loc = jnp.where(live, jnp.maximum(loc, 0), 0)
    row = divide(loc, dcp_size)
    page = divide(row, page_size)
    if num_rows is not None:
        page = in_range(page, num_rows)
    if dcp_size > 1:
        page = jnp.where(remainder(loc, dcp_size) == dcp_rank, page, 0)
    return page, remainder(row, page_size)


def write_loc(physical: Int, offset: Int, page_size: int, blocks_per_page: int) -> jax.Array:
    """Kernel-facing id of a write, or 0, which means that the write is dropped."""
    return jnp.where(physical > 0, entry(physical, blocks_per_page) * page_size + offset, 0)
