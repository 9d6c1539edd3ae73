"""Translation in Pallas Mosaic GPU: one launch for each call, in place where the caller passes a buffer.

A row of the grid takes a row of the batch, and its blocks walk the row in trips of a few items a thread. What
bounds the time: of small batches, the chain length -> page -> v2p -> store of dependent memory accesses; of
streams of big pages, the bytes written, hence stores of 16 bytes; of streams at page size 1, the rate at
which L2 serves random words of v2p.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import gmem
from pallas_kernels.gather_translate import addressing
from pallas_kernels.gather_translate.addressing import Granularity

# Measured on an H200: half as many blocks cost 2 to 3 % on long rows, 8 items 10 % on rows of 8k tokens.
BLOCKS = 8448  # of a grid at most: 64 for each of 132 SMs
ITEMS = 4  # of a thread in one trip: independent chains of loads


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
    _check_dtype(dtype)
    (max_requests, words), rows = request_table.shape, kv_end.shape[0]
    limit = min(addressing.row_tokens(words, page_size, granularity), width * page_size)
    stride = addressing.column_stride(page_size, granularity)
    columns = width if zero_tail else min(width, -(-words // stride))
    block, programs = _split(rows, columns)

    def read_table(refs: dict[str, Any]) -> None:
        b, program = lax.axis_index("row"), lax.axis_index("program")
        row = b if row_ids is None else refs["row_ids"][b]
        tokens = addressing.readable_end(refs["kv_end"][b], _delta(refs, delta, b), row, max_requests, limit)
        live_columns = addressing.table_columns(tokens, page_size)
        request = refs["request_table"].at[addressing.in_range(row, max_requests)]
        pl.when(program == 0)(lambda: gmem.store_scalar(refs["tokens"], b, tokens))

        def trip(first):
            column = first + gmem.iota(block)
            live = column < live_columns
            words = gmem.load(request, jnp.clip(column, 0, jnp.maximum(live_columns - 1, 0)) * stride)
            page = addressing.page_of_word(words, page_size, granularity)
            for v2p, blocks, out in zip(refs["v2ps"], blocks_per_page, refs["tables"], strict=True):
                entry = jnp.where(live, addressing.entry(_physical(v2p, page), blocks), 0)
                gmem.store(out.at[b], column, entry, gmem.mask(column < columns if zero_tail else live))

        _walk(columns if zero_tail else live_columns, block, programs, trip)

    fresh = tuple(_int32(rows, width) for _ in v2ps)
    made = gmem.launch(
        read_table,
        inputs=dict(
            request_table=request_table, v2ps=v2ps, kv_end=kv_end, row_ids=row_ids, delta=_array(delta)
        ),
        in_place=dict(tables=outs) if outs is not None else {},
        outputs=dict(tokens=_int32(rows)) | (dict(tables=fresh) if outs is None else {}),
        grid=dict(row=rows, program=programs),
    )
    return made["tables"], made["tokens"]


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
    _check_dtype(dtype)
    (max_requests, words), rows = request_table.shape, kv_end.shape[0]
    limit = addressing.row_tokens(words, page_size, granularity)
    stride = addressing.column_stride(page_size, granularity)
    by_quads = page_size % 4 == 0
    most = min(limit, capacity)
    if by_quads:
        most = (most + 6) // 4  # of groups of four, wherever the row starts
    block, programs = _split(rows, most)

    def read_stream(refs: dict[str, Any]) -> None:
        b, program = lax.axis_index("row"), lax.axis_index("program")
        row = b if row_ids is None else refs["row_ids"][b]
        at, next_at = refs["indptr"][b], refs["indptr"][b + 1]
        end = addressing.readable_end(refs["kv_end"][b], _delta(refs, delta, b), row, max_requests, limit)
        first_position = 0 if kv_start is None else refs["kv_start"][b]
        start, length = addressing.stream_span(first_position, end, at, next_at, capacity)
        request = refs["request_table"].at[addressing.in_range(row, max_requests)]
        pl.when(program == 0)(lambda: gmem.store_scalar(refs["length"], b, length))

        def entry(column):
            page = addressing.page_of_word(gmem.load(request, column * stride), page_size, granularity)
            return addressing.entry(_physical(refs["v2p"], page), blocks_per_page)

        def single(first):
            nth = first + gmem.iota(block)
            position = start + jnp.minimum(nth, length - 1)
            value = addressing.stream_id(entry(addressing.divide(position, page_size)), position, page_size)
            gmem.store(refs["ids"], at + nth, value, gmem.mask(nth < length))

        def quads(first):
            quad = first + gmem.iota(block)
            entries = tuple(map(entry, addressing.quad_columns(quad, start, length, at, page_size)))
            ids, live = addressing.quad_ids(quad, entries, start, length, at, page_size)
            gmem.store_quads(refs["ids"], at - (at & 3) + 4 * quad, ids, [gmem.mask(m) for m in live])

        count = addressing.quad_count(length, at) if by_quads else length
        _walk(count, block, programs, quads if by_quads else single)

    made = gmem.launch(
        read_stream,
        inputs=dict(
            request_table=request_table,
            v2p=v2p,
            kv_start=kv_start,
            kv_end=kv_end,
            indptr=indptr,
            row_ids=row_ids,
            delta=_array(delta),
        ),
        in_place=dict(ids=out) if out is not None else {},
        outputs=dict(length=_int32(rows)) | (dict(ids=_int32(capacity)) if out is None else {}),
        grid=dict(row=rows, program=programs),
    )
    return made["ids"], made["length"]


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
    count = locs.shape[0]

    def write_locations(refs: dict[str, Any]) -> None:
        lane = lax.axis_index("block") * gmem.WARPGROUP + gmem.iota(gmem.WARPGROUP)
        loc = gmem.load(refs["locs"], jnp.minimum(lane, count - 1))
        lanes_in_use = refs["live"][0] if isinstance(live, jax.Array) else live
        rank = refs["rank"][0] if isinstance(dcp_rank, jax.Array) else dcp_rank
        num_rows = None if v2p is None else v2p.shape[0]
        page, offset = addressing.write_page(loc, lane < lanes_in_use, page_size, num_rows, rank, dcp_size)
        value = addressing.write_loc(_physical(refs["v2p"], page), offset, page_size, blocks_per_page)
        gmem.store(refs["out"], lane, value, gmem.mask(lane < count))

    return gmem.launch(
        write_locations,
        inputs=dict(locs=locs, v2p=v2p, live=_array(live), rank=_array(dcp_rank)),
        in_place={},
        outputs=dict(out=_int32(count)),
        grid=dict(block=-(-count // gmem.WARPGROUP)),
    )["out"]


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _array(value: jax.Array | int) -> jax.Array | None:
    """An operand for a run-time value (a scalar becomes [1]); a static one needs none."""
    return value.reshape(-1) if isinstance(value, jax.Array) else None


def _delta(refs: dict[str, Any], delta: jax.Array | int, b):
    """Tokens that row b reads beyond its kv_end."""
    if not isinstance(delta, jax.Array):
        return delta
    return refs["delta"][b if delta.ndim else 0]


def _split(rows: int, items: int) -> tuple[int, int]:
    """Items of a block in one trip, and blocks for each row of the grid."""
    block = gmem.WARPGROUP * min(ITEMS, -(-items // gmem.WARPGROUP))
    return block, max(1, min(-(-items // block), BLOCKS // rows))


def _walk(count: jax.Array | int, block: int, programs: int, trip: Callable[[jax.Array], None]) -> None:
    """Calls trip with the first item of each of this block's trips through `count` items; the blocks' trips interleave.

    Fetching the words of the next trip ahead gained 1 to 2 % of long rows' time, and is not worth its lines: the many
    blocks of an SM overlap already.
    """
    own, step = lax.axis_index("program") * block, programs * block
    trips = jnp.where(count > own, addressing.divide(jnp.maximum(count - own - 1, 0), step) + 1, 0)

    def body(i, carry):
        trip(i * step + own)
        return carry

    lax.fori_loop(0, trips, body, ())


def _physical(v2p, page: jax.Array) -> jax.Array:
    return page if v2p is None else gmem.load(v2p, addressing.in_range(page, v2p.shape[0]))


def _check_dtype(dtype: jnp.dtype) -> None:
    if dtype != jnp.int32:
        raise NotImplementedError(f"the mosaic form writes int32 ids, not {jnp.dtype(dtype)}")
