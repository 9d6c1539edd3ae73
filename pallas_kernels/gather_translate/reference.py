"""Translation in plain XLA."""

import jax
import jax.numpy as jnp

from pallas_kernels.gather_translate import addressing
from pallas_kernels.gather_translate.addressing import Granularity


def _physical(v2p: jax.Array | None, page: jax.Array) -> jax.Array:
    """Physical page of a virtual one; without a v2p the two are the same."""
    return page if v2p is None else v2p[addressing.in_range(page, v2p.shape[0])]


def fill_tables(
    request_table: jax.Array,
    v2ps: tuple[jax.Array | None, ...],
    kv_end: jax.Array,
    row_ids: jax.Array | None,
    delta: jax.Array | int,
    outs: tuple[jax.Array, ...] | None,
    *,
    width: int,
    page_size: int,
    blocks_per_page: tuple[int, ...],
    zero_tail: bool,
    granularity: Granularity,
    dtype: jnp.dtype,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    (max_requests, words), rows = request_table.shape, kv_end.shape[0]
    row_ids = jnp.arange(rows, dtype=jnp.int32) if row_ids is None else row_ids
    if outs is None:
        outs = tuple(jnp.zeros((rows, width), dtype) for _ in v2ps)
    limit = min(addressing.row_tokens(words, page_size, granularity), width * page_size)
    tokens = addressing.readable_end(kv_end, delta, row_ids, max_requests, limit)
    stride = addressing.column_stride(page_size, granularity)
    used = min(width, -(-words // stride))
    column = jnp.arange(used, dtype=jnp.int32)
    live = column < addressing.table_columns(tokens, page_size)[:, None]
    row = addressing.in_range(row_ids, max_requests)
    page = addressing.page_of_word(request_table[row[:, None], column * stride], page_size, granularity)
    page = jnp.where(live, page, 0)
    tables = []
    for v2p, blocks, out in zip(v2ps, blocks_per_page, outs, strict=True):
        value = addressing.entry(_physical(v2p, page).astype(out.dtype), blocks)
        if zero_tail:
            value = jnp.pad(jnp.where(live, value, 0), ((0, 0), (0, width - used)))
            table = value if out.shape[0] == rows else out.at[:rows].set(value)
        else:
            table = out.at[:rows, :used].set(jnp.where(live, value, out[:rows, :used]))
        tables.append(table)
    return tuple(tables), tokens


def fill_stream(
    request_table: jax.Array,
    v2p: jax.Array | None,
    kv_start: jax.Array | None,
    kv_end: jax.Array,
    indptr: jax.Array,
    row_ids: jax.Array | None,
    delta: jax.Array | int,
    out: jax.Array | None,
    *,
    capacity: int,
    page_size: int,
    blocks_per_page: int,
    granularity: Granularity,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    (max_requests, words), rows = request_table.shape, kv_end.shape[0]
    row_ids = jnp.arange(rows, dtype=jnp.int32) if row_ids is None else row_ids
    out = jnp.zeros((capacity,), dtype) if out is None else out
    limit = addressing.row_tokens(words, page_size, granularity)
    end = addressing.readable_end(kv_end, delta, row_ids, max_requests, limit)
    first = jnp.zeros_like(kv_end) if kv_start is None else kv_start
    start, length = addressing.stream_span(first, end, indptr[:-1], indptr[1:], capacity)
    item = jnp.arange(capacity, dtype=jnp.int32)
    row = jnp.clip(jnp.searchsorted(indptr, item, side="right").astype(jnp.int32) - 1, 0, rows - 1)
    nth = item - indptr[row]
    live = (nth >= 0) & (nth < length[row])
    position = jnp.where(live, start[row] + nth, 0)
    column = addressing.divide(position, page_size) * addressing.column_stride(page_size, granularity)
    word = request_table[addressing.in_range(row_ids, max_requests)[row], column]
    page = jnp.where(live, addressing.page_of_word(word, page_size, granularity), 0)
    entry = addressing.entry(_physical(v2p, page).astype(out.dtype), blocks_per_page)
    return jnp.where(live, addressing.stream_id(entry, position, page_size).astype(out.dtype), out), length


def write_locs(
    locs: jax.Array,
    v2p: jax.Array | None,
    live: jax.Array | int,
    dcp_rank: jax.Array | int,
    *,
    page_size: int,
    blocks_per_page: int,
    dcp_size: int,
) -> jax.Array:
    lane = jnp.arange(locs.shape[0], dtype=jnp.int32)
    num_rows = None if v2p is None else v2p.shape[0]
    page, offset = addressing.write_page(locs, lane < live, page_size, num_rows, dcp_rank, dcp_size)
    return addressing.write_loc(_physical(v2p, page), offset, page_size, blocks_per_page)
