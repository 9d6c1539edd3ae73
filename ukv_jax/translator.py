"""The one place where virtual ids become addresses.

Everything above speaks virtual ids; attention kernels and KV writers speak kernel-facing ones. This module alone turns
the former into the latter, once a step, for all layers:

* reads: a `ReadSource` that consumers pass on to a kernel without looking inside: a page table, a packed token stream, or
  the raw maps for a kernel that translates itself;
* writes: `KernelTokens`, one row index a token, 0 = drop;
* state: physical slots, -1 = dead row.

Ids carry their space in their type, so a translated array cannot be translated again. A static split hands its ids
through unchanged (multiplier 1, and reads need no map for a sub-pool that owns its ids).
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from pallas_kernels.gather_translate import api as gather_translate
from pallas_kernels.read_source import PageTable, ReadSource, TokenStream, VirtualPages
from ukv_jax import pool
from ukv_jax.layout import PoolLayout, SubPool
from ukv_jax.pool import PoolState
from ukv_jax.requests import tokens_per_page

Delivery = Literal["table", "stream", "virtual"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class VirtualTokens:
    """Virtual token ids, `page * page_size + offset` (widened by `dcp` under decode context parallelism)."""

    ids: Int32[Array, "..."]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KernelTokens:
    """Kernel-facing token ids, `entry * page_size + offset`; 0 = nothing there (a write is dropped)."""

    ids: Int32[Array, "..."]


def _virtual(name: str, tokens: VirtualTokens) -> Int32[Array, "..."]:
    if isinstance(tokens, KernelTokens):
        raise TypeError(
            f"{name} got ids that are translated already (KernelTokens); pass the VirtualTokens they came from"
        )
    if not isinstance(tokens, VirtualTokens):
        raise TypeError(f"{name} takes VirtualTokens, got {type(tokens).__name__}")
    return tokens.ids


def _map(state: PoolState, subpool: SubPool) -> Int32[Array, " num_virtual+1"] | None:
    """v2p of a sub-pool for reads, None where virtual and physical pages are the same."""
    return None if pool.pages_are_ids(state.layout, subpool) else state.subpool(subpool.name).v2p


def _kv(state: PoolState, name: str | None) -> SubPool:
    subpool = state.layout.full if name is None else state.layout[name]
    if subpool.is_state:
        raise ValueError(f"sub-pool {name!r} holds state; its slots come from translate_state_slots")
    return subpool


def virtual_tokens(
    state: PoolState, rows: Int32[Array, " rows"], positions: Int32[Array, "rows n"]
) -> VirtualTokens:
    """Virtual ids of positions of requests; positions without a page get -1."""
    layout, tpp = state.layout, tokens_per_page(state.layout)
    inside = (rows >= 0) & (rows < layout.max_requests)
    column = jnp.where(positions >= 0, positions, 0) // tpp
    page = state.requests.pages[
        jnp.where(inside, rows, 0)[:, None], jnp.minimum(column, layout.max_pages - 1)
    ]
    held = inside[:, None] & (positions >= 0) & (column < layout.max_pages) & (page > 0)
    return VirtualTokens(jnp.where(held, page * tpp + positions % tpp, pool.UNBOUND))


def translate_write_locs(
    state: PoolState,
    locs: VirtualTokens,
    name: str | None = None,
    *,
    live: Int32[Array, ""] | int | None = None,
    dcp_rank: Int32[Array, ""] | int = 0,
    implementation: str | None = None,
) -> KernelTokens:
    """Where a step writes its new rows in sub-pool `name` (default: the full one), for every layer.

    0 drops the write: padding page, hole, tombstone, out of range, not owned by this DCP rank, or a lane past `live`.
    Window pools are replicated under DCP: every rank writes every token of theirs.
    """
    subpool = _kv(state, name)
    ids = _virtual("translate_write_locs", locs)
    flat = gather_translate.translate_write_locs(
        ids.reshape(-1),
        # In a static split too: the map tells which pages are live, and an id past its range would hit another layer.
        state.subpool(subpool.name).v2p,
        page_size=subpool.page_size,
        blocks_per_page=subpool.stride(),
        live=live,
        dcp_rank=dcp_rank if subpool.owns_ids else 0,
        dcp_size=state.layout.dcp if subpool.owns_ids else 1,
        implementation=implementation,
    )
    return KernelTokens(flat.reshape(ids.shape))


def translate_state_slots(state: PoolState, rows: Int32[Array, " rows"]) -> Int32[Array, " rows"]:
    """Physical state slot of each row; -1 for a dead row, which a kernel skips."""
    layout = state.layout
    if layout.state is None:
        raise ValueError("this layout has no state sub-pool")
    inside = (rows >= 0) & (rows < layout.max_requests)
    slot = state.requests.slots[jnp.where(inside, rows, 0)]
    v2p = _map(state, layout.state)
    physical = slot if v2p is None else v2p[slot]
    return jnp.where(inside & (slot > 0) & (physical > 0), physical, -1)


def translate_dcp_read_ids(
    state: PoolState, tokens: VirtualTokens, *, dcp_rank: Int32[Array, ""] | int
) -> tuple[KernelTokens, Bool[Array, "..."]]:
    """A rank's share of widened virtual token ids: kernel-facing ids, and which of the ids this rank stores.

    Other ranks' ids give 0 and False. Merge the ranks' partial outputs by log-sum-exp.
    """
    full = state.layout.full
    ids, own = gather_translate.translate_dcp_read_ids(
        _virtual("translate_dcp_read_ids", tokens),
        # In a static split too: these ids come from a caller, and one past the map would hit another layer.
        state.subpool(full.name).v2p,
        page_size=full.page_size,
        blocks_per_page=full.stride(),
        dcp_rank=dcp_rank,
        dcp_size=state.layout.dcp,
    )
    return KernelTokens(ids), own


def fill_read_table(
    state: PoolState,
    rows: Int32[Array, " rows"] | None,
    kv_end: Int32[Array, " rows"],
    name: str | None = None,
    *,
    kv_start: Int32[Array, " rows"] | None = None,
    seq_len_delta: int | Int32[Array, " rows"] = 0,
    width: int | None = None,
    out: Int32[Array, "out_rows width"] | None = None,
    zero_tail: bool = False,
    implementation: str | None = None,
) -> PageTable:
    """Page table of a batch: kernel entries of each row's pages, absolute columns.

    rows: request row of each table row; None = all request rows in order (in a static split the request map is then
    handed through without a copy). kv_end: tokens of each row, before `seq_len_delta`. kv_start: first visible position
    (a sliding window). Other arguments as in `pallas_kernels.gather_translate.fill_read_table`. The source carries the
    effective lengths.
    """
    subpool = _kv(state, name)
    _not_widened(state, subpool, "fill_read_table")
    v2p = _map(state, subpool)
    table = state.requests.pages
    whole = rows is None and kv_end.shape[0] == table.shape[0] and width in (None, table.shape[1])
    if v2p is None and whole and out is None and not zero_tail:
        delta = jnp.where(kv_end > 0, seq_len_delta, 0)
        end = jnp.clip(kv_end + delta, 0, table.shape[1] * subpool.page_size)
    else:
        table, end = gather_translate.fill_read_table(
            table,
            v2p,
            kv_end,
            page_size=subpool.page_size,
            blocks_per_page=subpool.stride(),
            width=width,
            row_ids=rows,
            seq_len_delta=seq_len_delta,
            out=out,
            zero_tail=zero_tail,
            implementation=implementation,
        )
        end = jnp.pad(end, (0, table.shape[0] - end.shape[0]))
    start = _start(kv_start, end)
    return PageTable(table, start, end, subpool.page_size)


def fill_read_tables(
    state: PoolState,
    rows: Int32[Array, " rows"] | None,
    kv_end: Int32[Array, " rows"],
    *,
    q_start: Int32[Array, " rows"] | None = None,
    seq_len_delta: int | Int32[Array, " rows"] = 0,
    width: int | None = None,
    zero_tail: bool = False,
    implementation: str | None = None,
) -> dict[str, PageTable]:
    """Page tables of the full and of every sliding-window sub-pool, in one pass over the request map, by name.

    A window's table has the same absolute columns; its `kv_start` is the first position that the query at q_start
    (default: the last token of the row) still sees.
    """
    _not_widened(state, state.layout.full, "fill_read_tables")
    subpools = (state.layout.full, *state.layout.windows)
    tables, end = gather_translate.fill_read_tables(
        state.requests.pages,
        [_map(state, s) for s in subpools],
        kv_end,
        page_size=state.layout.page_size,
        blocks_per_page=[s.stride() for s in subpools],
        width=width,
        row_ids=rows,
        seq_len_delta=seq_len_delta,
        zero_tail=zero_tail,
        implementation=implementation,
    )
    first_query = end - 1 if q_start is None else q_start
    starts = [_window_start(s, first_query) for s in subpools]
    return {
        s.name: PageTable(table, start, end, s.page_size) for s, table, start in zip(subpools, tables, starts)
    }


def fill_packed_read_stream(
    state: PoolState,
    rows: Int32[Array, " rows"] | None,
    kv_end: Int32[Array, " rows"],
    name: str | None = None,
    *,
    capacity: int,
    kv_start: Int32[Array, " rows"] | None = None,
    seq_len_delta: int | Int32[Array, " rows"] = 0,
    out: Int32[Array, " capacity"] | None = None,
    implementation: str | None = None,
) -> TokenStream:
    """Packed stream of kernel-facing token ids: positions [kv_start, kv_end + delta) of each row, one after the other.

    capacity: tokens of the stream; a pool never holds more than its pages, so the pool bounds it, not rows * context.
    A row is cut where the stream ends (rows that share pages count them each: `stream_capacity`); the source carries the
    effective lengths. The rows' tokens must come to less than 2**31.
    """
    subpool = _kv(state, name)
    _not_widened(state, subpool, "fill_packed_read_stream")
    begin = jnp.zeros_like(kv_end) if kv_start is None else jnp.maximum(kv_start, 0)
    wanted = jnp.where(kv_end > 0, kv_end + seq_len_delta - begin, 0)
    indptr = gather_translate.packed_indptr(jnp.minimum(wanted, state.layout.max_tokens))
    ids, length = gather_translate.fill_packed_read_stream(
        state.requests.pages,
        _map(state, subpool),
        kv_end,
        indptr,
        page_size=subpool.page_size,
        blocks_per_page=subpool.stride(),
        capacity=capacity,
        row_ids=rows,
        kv_start=begin,
        seq_len_delta=seq_len_delta,
        out=out,
        implementation=implementation,
    )
    return TokenStream(ids, indptr, begin, begin + length, subpool.page_size)


def virtual_source(
    state: PoolState,
    rows: Int32[Array, " rows"],
    kv_end: Int32[Array, " rows"],
    name: str | None = None,
    *,
    kv_start: Int32[Array, " rows"] | None = None,
    seq_len_delta: int | Int32[Array, " rows"] = 0,
) -> VirtualPages:
    """The maps themselves, for a kernel that translates as it reads: no table, no stream, no launch."""
    subpool = _kv(state, name)
    _not_widened(state, subpool, "virtual_source")
    inside = (rows >= 0) & (rows < state.layout.max_requests)
    end = jnp.where(inside & (kv_end > 0), kv_end + seq_len_delta, 0)
    end = jnp.clip(end, 0, state.layout.max_pages * subpool.page_size)
    return VirtualPages(
        state.requests.pages,
        jnp.where(inside, rows, 0),
        state.subpool(subpool.name).v2p,
        _start(kv_start, end),
        end,
        subpool.page_size,
        subpool.stride(),
    )


def read_source(
    state: PoolState,
    rows: Int32[Array, " rows"],
    kv_end: Int32[Array, " rows"],
    name: str | None = None,
    *,
    delivery: Delivery,
    capacity: int | None = None,
    kv_start: Int32[Array, " rows"] | None = None,
    seq_len_delta: int | Int32[Array, " rows"] = 0,
    implementation: str | None = None,
) -> ReadSource:
    """One of the three deliveries, by name. capacity: of a stream; default: `stream_capacity`."""
    options: dict[str, Any] = {"kv_start": kv_start, "seq_len_delta": seq_len_delta}
    if delivery == "table":
        return fill_read_table(state, rows, kv_end, name, implementation=implementation, **options)
    if delivery == "stream":
        s = _kv(state, name)
        size = capacity or stream_capacity(state.layout, s, rows.shape[0])
        return fill_packed_read_stream(
            state, rows, kv_end, name, capacity=size, implementation=implementation, **options
        )
    if delivery == "virtual":
        return virtual_source(state, rows, kv_end, name, **options)
    raise ValueError(f"delivery must be 'table', 'stream' or 'virtual', got {delivery!r}")


def stream_capacity(layout: PoolLayout, subpool: SubPool, rows: int) -> int:
    """Tokens that a stream of `rows` rows has room for by default: those that the sub-pool, or that many requests, hold.

    Rows that share pages (`requests.attach`) stand in a stream once each, so together they can need more.
    """
    return min((subpool.num_pages - subpool.first_page) * subpool.page_size, rows * layout.max_tokens)


def fit_in_streams(
    state: PoolState, kv_end: Int32[Array, " rows"], *, q_start: Int32[Array, " rows"]
) -> Bool[Array, " rows"]:
    """Whether the tokens of each row fit the streams that `read_sources` would make of the same rows.

    Rows are taken in order: the first that does not fit leaves no room for itself and later ones; rows without tokens
    always fit.
    """
    layout = state.layout
    fits = jnp.ones(kv_end.shape, bool)
    for s in (layout.full, *layout.windows):
        tokens = jnp.maximum(kv_end - _window_start(s, q_start), 0)
        ends = jnp.cumsum(jnp.where(kv_end > 0, tokens, 0), dtype=jnp.int32)
        # A sum that passes 2**31 is negative first, and what comes behind it does not fit either.
        fits &= (ends >= 0) & (ends <= stream_capacity(layout, s, kv_end.shape[0]))
    return (lax.cummin(fits.astype(jnp.int32)) > 0) | (kv_end <= 0)


def read_sources(
    state: PoolState,
    rows: Int32[Array, " rows"],
    kv_end: Int32[Array, " rows"],
    *,
    q_start: Int32[Array, " rows"],
    delivery: Delivery,
    implementation: str | None = None,
) -> dict[str, ReadSource]:
    """Sources of the full and of every sliding-window sub-pool, by name, for queries at q_start to kv_end - 1."""
    subpools = (state.layout.full, *state.layout.windows)
    if delivery == "table" and len(subpools) > 1:
        return dict(fill_read_tables(state, rows, kv_end, q_start=q_start, implementation=implementation))
    return {
        s.name: read_source(
            state,
            rows,
            kv_end,
            s.name,
            delivery=delivery,
            kv_start=None if s.window is None else jnp.minimum(_window_start(s, q_start), kv_end),
            implementation=implementation,
        )
        for s in subpools
    }


def _window_start(subpool: SubPool, position: Int32[Array, " rows"]) -> Int32[Array, " rows"]:
    """First position that a query sees: a window of w tokens ends with the query's own."""
    if subpool.window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - (subpool.window - 1), 0)


def reads_are_translated(source: ReadSource | VirtualTokens | KernelTokens) -> bool:
    """Whether a consumer may use the ids as addresses. False: translation is deferred (in-kernel, or under DCP)."""
    if isinstance(source, PageTable | TokenStream | KernelTokens):
        return True
    if isinstance(source, VirtualPages | VirtualTokens):
        return False
    raise TypeError(f"not ids of a pool: {type(source).__name__}")


def require_translated(source: ReadSource | VirtualTokens | KernelTokens, consumer: str) -> None:
    """Raises ValueError where `consumer` cannot defer and the ids are still virtual."""
    if not reads_are_translated(source):
        raise ValueError(
            f"{consumer} reads kernel-facing ids and got a {type(source).__name__}, whose translation is deferred"
        )


def _start(kv_start, end: Int32[Array, " rows"]) -> Int32[Array, " rows"]:
    if kv_start is None:
        return jnp.zeros_like(end)
    return jnp.pad(jnp.maximum(kv_start, 0), (0, end.shape[0] - kv_start.shape[0]))


def _not_widened(state: PoolState, subpool: SubPool, name: str) -> None:
    """Window pools are replicated: their pages hold every token that a virtual page stands for, and can be read."""
    if state.layout.dcp > 1 and subpool.owns_ids:
        raise ValueError(
            f"{name}: under DCP ({state.layout.dcp} ranks) request maps hold widened ids, and no rank can read a table of "
            f"them; take the rank's share with translate_dcp_read_ids"
        )
