"""From virtual ids to the ids that attention kernels and KV writers take.

Notation: ps = page_size, tokens a page. B = blocks_per_page, blocks (cache-layer envelopes' rows) a page.
`v2p` Int32[num_virtual + 1] maps a virtual page to its physical page: 0 for the padding page 0, -1 where
unbound (a tombstone), and -1 in the extra last row. An **entry** is v2p[page] * B; a kernel-facing token id
is entry * ps + offset in the page. Both are int32: the pool's layout keeps num_pages * B * ps below 2**31.
Without a v2p (None) virtual and physical pages are the same, as in a static pool.

`request_table` names the pages of each request: Int32[max_requests, max_pages] of virtual pages (granularity
"page"), or Int32[max_requests, max_tokens] of virtual token ids (granularity "token"), of which only the
first token of each page is read. A negative word is a hole. Holes, tombstones and ids out of range read as
the padding page: entry 0.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from pallas_kernels import implementations
from pallas_kernels.gather_translate import addressing
from pallas_kernels.gather_translate.addressing import Granularity

_PACKAGE = "pallas_kernels.gather_translate"
FILL_TABLES, FILL_STREAM, WRITE_LOCS = (
    {"xla": (f"{_PACKAGE}.reference", function), "mosaic": (f"{_PACKAGE}.mosaic_gpu", function)}
    for function in ("fill_tables", "fill_stream", "write_locs")
)


def fill_read_table(
    request_table: Int32[Array, "max_requests words"],
    v2p: Int32[Array, " virtual_rows"] | None,
    kv_end: Int32[Array, " rows"],
    *,
    page_size: int,
    blocks_per_page: int,
    width: int | None = None,
    row_ids: Int32[Array, " rows"] | None = None,
    seq_len_delta: int | Int32[Array, " rows"] = 0,
    out: Int[Array, "out_rows width"] | None = None,
    zero_tail: bool = False,
    granularity: Granularity = "page",
    dtype: jnp.dtype = jnp.int32,
    implementation: str | None = None,
) -> tuple[Int[Array, "out_rows width"], Int32[Array, " rows"]]:
    """Builds the page table of a batch.

    table[b, c] = max(v2p[page(b, c)], 0) * B for c < ceil(length[b] / ps), where page(b, c) is column c of
    request row row_ids[b]. The length of row b is kv_end[b] + seq_len_delta tokens, cut at the table's width
    and at the request row's width; a row with kv_end <= 0 or with a row id out of range
    is padding: its length is 0 whatever the delta.

    Args:
      request_table: pages of each request; see the module's head.
      v2p: virtual to physical pages, or None where both are the same.
      kv_end: tokens of each row.
      page_size: tokens a page.
      blocks_per_page: B, the multiplier of an entry.
      width: columns of the table; default: those of `out`, else one for each page of a request row.
      row_ids: request row of each table row; default: row b is request b.
      seq_len_delta: tokens added to the length of every row, or one number for each row (a verify step reads
        its draft tokens back).
      out: a buffer to fill. Only live prefixes are written: the rest of a row, and rows past the batch, stay
        as they were. Donate it, or the caller's copy stays alive beside the result.
      zero_tail: write 0 from the live prefix to the end of each row of the batch.
      granularity: whether request_table holds pages or tokens.
      dtype: int32, or int64 where jax_enable_x64 is set.
      implementation: "xla", "mosaic", or None for the best on the default device.

    Returns:
      The table, and the length of each row in tokens after all cuts: what a reader must use as kv_end.
      Without `out` and `zero_tail` the values outside the live prefixes are unspecified.

    Raises:
      ValueError: shapes, dtypes or numbers that do not fit together.
    """
    (table,), tokens = fill_read_tables(
        request_table,
        (v2p,),
        kv_end,
        page_size=page_size,
        blocks_per_page=(blocks_per_page,),
        width=width,
        row_ids=row_ids,
        seq_len_delta=seq_len_delta,
        out=None if out is None else (out,),
        zero_tail=zero_tail,
        granularity=granularity,
        dtype=dtype,
        implementation=implementation,
    )
    return table, tokens


def fill_read_tables(
    request_table: Int32[Array, "max_requests words"],
    v2ps: Sequence[Int32[Array, " virtual_rows"] | None],
    kv_end: Int32[Array, " rows"],
    *,
    page_size: int,
    blocks_per_page: Sequence[int],
    width: int | None = None,
    row_ids: Int32[Array, " rows"] | None = None,
    seq_len_delta: int | Int32[Array, " rows"] = 0,
    out: Sequence[Int[Array, "out_rows width"]] | None = None,
    zero_tail: bool = False,
    granularity: Granularity = "page",
    dtype: jnp.dtype = jnp.int32,
    implementation: str | None = None,
) -> tuple[tuple[Int[Array, "out_rows width"], ...], Int32[Array, " rows"]]:
    """`fill_read_table` for several sub-pools that share virtual ids (full and window KV), in one pass.

    The request table is read once; v2ps[k] and blocks_per_page[k] give table k. Everything else is as in
    `fill_read_table`.
    """
    name = "fill_read_tables"
    dtype = _id_dtype(dtype, name)
    rows = _check_rows(name, request_table, kv_end, row_ids, page_size, granularity)
    if not v2ps or len(v2ps) != len(blocks_per_page):
        raise ValueError(
            f"{name}: {len(v2ps)} v2p tables and {len(blocks_per_page)} multipliers, need as many of both"
        )
    for v2p, blocks in zip(v2ps, blocks_per_page, strict=True):
        _check_target(name, v2p, blocks)
    if out is not None:
        out = tuple(out)
        width = out[0].shape[1] if width is None and out and out[0].ndim == 2 else width
        if len(out) != len(v2ps):
            raise ValueError(f"{name}: {len(out)} buffers for {len(v2ps)} tables")
        for buffer in out:
            if (
                buffer.ndim != 2
                or buffer.shape[0] < rows
                or buffer.shape[1] != width
                or buffer.dtype != dtype
            ):
                raise ValueError(
                    f"{name}: out is {buffer.dtype}{list(buffer.shape)}, need {dtype}[>= {rows}, {width}]"
                )
    elif width is None:
        width = -(-request_table.shape[1] // addressing.column_stride(page_size, granularity))
    if width < 1:
        raise ValueError(f"{name}: width={width} must be at least 1")
    if rows == 0:
        return out or tuple(jnp.zeros((0, width), dtype) for _ in v2ps), jnp.zeros((0,), jnp.int32)
    fill = implementations.run(name, FILL_TABLES, implementation)
    return fill(
        request_table,
        tuple(v2ps),
        kv_end.astype(jnp.int32),
        row_ids if row_ids is None else row_ids.astype(jnp.int32),
        _delta(name, seq_len_delta, rows),
        out,
        width=width,
        page_size=page_size,
        blocks_per_page=tuple(blocks_per_page),
        zero_tail=zero_tail,
        granularity=granularity,
        dtype=dtype,
    )


def fill_packed_read_stream(
    request_table: Int32[Array, "max_requests words"],
    v2p: Int32[Array, " virtual_rows"] | None,
    kv_end: Int32[Array, " rows"],
    indptr: Int32[Array, "rows+1"],
    *,
    page_size: int,
    blocks_per_page: int,
    capacity: int | None = None,
    row_ids: Int32[Array, " rows"] | None = None,
    kv_start: Int32[Array, " rows"] | None = None,
    seq_len_delta: int | Int32[Array, " rows"] = 0,
    out: Int[Array, " capacity"] | None = None,
    granularity: Granularity = "page",
    dtype: jnp.dtype = jnp.int32,
    implementation: str | None = None,
) -> tuple[Int[Array, " capacity"], Int32[Array, " rows"]]:
    """Builds the packed token stream of a batch: ids[indptr[b] + i] = entry(b, pos // ps) * ps + pos % ps.

    pos = kv_start[b] + i for i < length[b], and entry(b, c) is the value that `fill_read_table` puts in
    column c. The length of row b is kv_end[b] + seq_len_delta - kv_start[b] tokens, after these cuts: kv_end
    + delta at the request row's width; the length at min(indptr[b + 1], capacity) - indptr[b]. A row with
    kv_end <= 0, with a row id out of range or with an indptr outside the stream is padding: its length is 0
    whatever the delta. A position in a hole, a tombstone or a bad page has id pos % ps, a row of the padding
    page.

    Args:
      request_table, v2p, kv_end, page_size, blocks_per_page, row_ids, seq_len_delta, granularity, dtype,
        implementation: as in `fill_read_table`.
      indptr: where each row starts in the stream, not decreasing; `packed_indptr` makes it from lengths.
      capacity: tokens that the stream can hold; default: those of `out`.
      kv_start: first position of each row that is read (a sliding window; any alignment); default 0.
      out: a buffer to fill; what lies outside the rows' live tokens stays as it was.

    Returns:
      The ids, and the length of each row in tokens after all cuts. Without `out` the ids outside the rows'
      live tokens are unspecified.

    Raises:
      ValueError: shapes, dtypes or numbers that do not fit together.
    """
    name = "fill_packed_read_stream"
    dtype = _id_dtype(dtype, name)
    rows = _check_rows(name, request_table, kv_end, row_ids, page_size, granularity)
    _check_target(name, v2p, blocks_per_page)
    if indptr.shape != (rows + 1,):
        raise ValueError(f"{name}: indptr is {list(indptr.shape)}, need [{rows + 1}] for {rows} rows")
    if kv_start is not None and kv_start.shape != (rows,):
        raise ValueError(f"{name}: kv_start is {list(kv_start.shape)}, need [{rows}]")
    if out is not None:
        capacity = out.shape[0] if capacity is None and out.ndim == 1 else capacity
        if out.shape != (capacity,) or out.dtype != dtype:
            raise ValueError(f"{name}: out is {out.dtype}{list(out.shape)}, need {dtype}[{capacity}]")
    if capacity is None or not 1 <= capacity <= addressing.MAX_ITEMS:
        raise ValueError(f"{name}: capacity={capacity} must lie in [1, {addressing.MAX_ITEMS}]")
    if rows == 0:
        return jnp.zeros((capacity,), dtype) if out is None else out, jnp.zeros((0,), jnp.int32)
    fill = implementations.run(name, FILL_STREAM, implementation)
    return fill(
        request_table,
        v2p,
        kv_start if kv_start is None else kv_start.astype(jnp.int32),
        kv_end.astype(jnp.int32),
        indptr.astype(jnp.int32),
        row_ids if row_ids is None else row_ids.astype(jnp.int32),
        _delta(name, seq_len_delta, rows),
        out,
        capacity=capacity,
        page_size=page_size,
        blocks_per_page=blocks_per_page,
        granularity=granularity,
        dtype=dtype,
    )


def packed_indptr(lengths: Int32[Array, " rows"]) -> Int32[Array, "rows+1"]:
    """Starts of packed rows of these lengths, and the total: [0, l0, l0 + l1, ...].

    A negative length counts as 0. The total must be less than 2**31, else the ends wrap round; the rows of a pool hold
    fewer tokens (its layout sees to it) unless they share pages.
    """
    ends = jnp.cumsum(jnp.maximum(lengths, 0), dtype=jnp.int32)
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])


def translate_write_locs(
    locs: Int[Array, " n"],
    v2p: Int32[Array, " virtual_rows"] | None,
    *,
    page_size: int,
    blocks_per_page: int,
    live: int | Int32[Array, ""] | None = None,
    dcp_rank: int | Int32[Array, ""] = 0,
    dcp_size: int = 1,
    implementation: str | None = None,
) -> Int32[Array, " n"]:
    """Kernel-facing ids of the tokens that a step writes; 0 means that the write is dropped.

    A loc t is a virtual token id, page * ps + offset. Under decode context parallelism it is a widened one:
    rank t % dcp_size owns it and stores it as row t // dcp_size, and every other rank drops it. Dropped too:
    lanes from `live` on, pages <= 0 (t < ps * dcp_size, negative ids), pages past the table, tombstones. Ids
    other than 0 are unique where the locs are.

    Args:
      locs: virtual token ids.
      v2p: virtual to physical pages, or None where both are the same.
      page_size: tokens a page on one rank.
      blocks_per_page: B.
      live: lanes in use; default: all.
      dcp_rank: this rank, a number or a traced scalar.
      dcp_size: ranks that share the tokens.
      implementation: "xla", "mosaic", or None for the best on the default device.

    Raises:
      ValueError: shapes, dtypes or numbers that do not fit together.
    """
    name = "translate_write_locs"
    if locs.ndim != 1 or not jnp.issubdtype(locs.dtype, jnp.signedinteger):
        raise ValueError(
            f"{name}: locs is {locs.dtype}{list(locs.shape)}, need signed integers of one dimension"
        )
    _check_page_size(name, page_size)
    _check_target(name, v2p, blocks_per_page)
    rank = _check_dcp(name, dcp_rank, dcp_size)
    if live is None:
        live = locs.shape[0]
    if not isinstance(live, int):
        if live.ndim:
            raise ValueError(f"{name}: live has shape {list(live.shape)}, need a scalar count")
        live = live.astype(jnp.int32)
    if locs.shape[0] == 0:
        return jnp.zeros((0,), jnp.int32)
    translate = implementations.run(name, WRITE_LOCS, implementation)
    return translate(
        _int32_ids(locs),
        v2p,
        live,
        rank,
        page_size=page_size,
        blocks_per_page=blocks_per_page,
        dcp_size=dcp_size,
    )


def translate_dcp_read_ids(
    ids: Int[Array, "*shape"],
    v2p: Int32[Array, " virtual_rows"] | None,
    *,
    page_size: int,
    blocks_per_page: int,
    dcp_rank: int | Int32[Array, ""],
    dcp_size: int,
) -> tuple[Int32[Array, "*shape"], Bool[Array, "*shape"]]:
    """Kernel-facing ids of one rank's share of widened virtual token ids, and which ids are its own.

    Rank t % dcp_size owns id t and stores it as row t // dcp_size, whose page is translated as every read is:
    unbound and bad pages give a row of the padding page, negative ids 0. Ids of other ranks give 0 and False.
    Because a widened page starts at a multiple of dcp_size, position p of a request belongs to rank p %
    dcp_size: its share of a packed stream is every dcp_size-th id, from the first that it owns.

    Raises:
      ValueError: shapes, dtypes or numbers that do not fit together.
    """
    name = "translate_dcp_read_ids"
    if not jnp.issubdtype(ids.dtype, jnp.signedinteger):
        raise ValueError(f"{name}: ids are {ids.dtype}, need signed integers")
    _check_page_size(name, page_size)
    _check_target(name, v2p, blocks_per_page)
    rank = _check_dcp(name, dcp_rank, dcp_size)
    ids = _int32_ids(ids)
    own = (ids >= 0) & (addressing.remainder(jnp.maximum(ids, 0), dcp_size) == rank)
    row = addressing.divide(jnp.where(own, ids, 0), dcp_size)
    page = addressing.divide(row, page_size)
    physical = page if v2p is None else v2p[addressing.in_range(page, v2p.shape[0])]
    value = addressing.stream_id(addressing.entry(physical, blocks_per_page), row, page_size)
    return jnp.where(own, value, 0), own


def _id_dtype(dtype: jnp.dtype, name: str) -> jnp.dtype:
    dtype = jnp.dtype(dtype)
    if dtype == jnp.int64 and not jax.config.jax_enable_x64:
        raise ValueError(f"{name}: int64 ids need jax_enable_x64, which is off; JAX would cut them to int32")
    if dtype not in (jnp.int32, jnp.int64):
        raise ValueError(f"{name}: dtype={dtype} must be int32 or int64")
    return dtype


def _check_page_size(name: str, page_size: int) -> None:
    if page_size < 1:
        raise ValueError(f"{name}: page_size={page_size} must be at least 1")


def _check_rows(name, request_table, kv_end, row_ids, page_size: int, granularity: str) -> int:
    """Checks what tables and streams have in common; returns the number of rows of the batch."""
    _check_page_size(name, page_size)
    if granularity not in ("page", "token"):
        raise ValueError(f"{name}: granularity={granularity!r} must be 'page' or 'token'")
    if request_table.ndim != 2 or request_table.dtype != jnp.int32 or 0 in request_table.shape:
        raise ValueError(
            f"{name}: request_table is {request_table.dtype}{list(request_table.shape)}, "
            "need int32[requests, words]"
        )
    if kv_end.ndim != 1:
        raise ValueError(f"{name}: kv_end is {list(kv_end.shape)}, need [rows]")
    rows = kv_end.shape[0]
    if row_ids is None and rows > request_table.shape[0]:
        raise ValueError(
            f"{name}: {rows} rows without row_ids, but request_table has {request_table.shape[0]}"
        )
    if row_ids is not None and row_ids.shape != (rows,):
        raise ValueError(f"{name}: row_ids is {list(row_ids.shape)}, need [{rows}]")
    return rows


def _check_target(name: str, v2p, blocks_per_page: int) -> None:
    if v2p is not None and (v2p.ndim != 1 or v2p.dtype != jnp.int32 or v2p.shape[0] < 2):
        raise ValueError(f"{name}: v2p is {v2p.dtype}{list(v2p.shape)}, need int32[num_virtual + 1]")
    if blocks_per_page < 1:
        raise ValueError(f"{name}: blocks_per_page={blocks_per_page} must be at least 1")


def _check_dcp(name: str, dcp_rank, dcp_size: int) -> jax.Array | int:
    if dcp_size < 1:
        raise ValueError(f"{name}: dcp_size={dcp_size} must be at least 1")
    if not isinstance(dcp_rank, int):
        return jnp.asarray(dcp_rank, jnp.int32)
    if not 0 <= dcp_rank < dcp_size:
        raise ValueError(f"{name}: dcp_rank={dcp_rank} must lie in [0, {dcp_size})")
    return dcp_rank


def _int32_ids(ids: jax.Array) -> jax.Array:
    """Ids as int32; what does not fit is bad, and becomes -1 instead of wrapping round to a live id."""
    if jnp.iinfo(ids.dtype).bits > 32:
        ids = jnp.where(ids > jnp.iinfo(jnp.int32).max, -1, jnp.maximum(ids, -1))
    return ids.astype(jnp.int32)


def _delta(name: str, delta, rows: int) -> jax.Array | int:
    if isinstance(delta, int):
        return delta
    delta = jnp.asarray(delta, jnp.int32)
    if delta.shape not in ((), (rows,)):
        raise ValueError(f"{name}: seq_len_delta is {list(delta.shape)}, need a number or [{rows}]")
    return delta
