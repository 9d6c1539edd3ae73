"""How an attention kernel is told where the KV rows of a request lie.

Three deliveries of the same addresses. An *entry* is the block index of a page's cache-layer 0; the kernel adds a
run-time block offset for the layer at hand. A *kernel-facing token id* is ``entry * page_size + slot``.

Every class is a pytree whose `page_size` (and `blocks_per_page`) are static. Row b may see the KV positions
``kv_start[b] <= position < kv_end[b]``. Ids outside that range are never looked at, whatever they hold.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


def _static() -> int:
    return field(metadata={"static": True})  # type: ignore[no-any-return]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PageTable:
    """One entry a page. Column c serves positions [c * page_size, (c + 1) * page_size), whatever `kv_start` is."""

    table: Int32[Array, "rows width"]
    kv_start: Int32[Array, " rows"]
    kv_end: Int32[Array, " rows"]
    page_size: int = _static()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenStream:
    """One kernel-facing id a token, rows packed one after the other.

    ``ids[indptr[b] + i]`` is the id of position ``kv_start[b] + i`` for ``i < kv_end[b] - kv_start[b]``.
    """

    ids: Int32[Array, " capacity"]
    indptr: Int32[Array, " rows_plus_1"]
    kv_start: Int32[Array, " rows"]
    kv_end: Int32[Array, " rows"]
    page_size: int = _static()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class VirtualPages:
    """Untranslated request map; the reader translates as it goes.

    The virtual page of column c of row b is ``req_to_page[row_ids[b], c]`` (-1 = hole) and its entry
    ``max(v2p[page], 0) * blocks_per_page``. A page outside [0, num_virtual) reads page 0, the padding page.
    """

    req_to_page: Int32[Array, "max_requests max_pages"]
    row_ids: Int32[Array, " rows"]
    v2p: Int32[Array, " num_virtual_plus_1"]
    kv_start: Int32[Array, " rows"]
    kv_end: Int32[Array, " rows"]
    page_size: int = _static()
    blocks_per_page: int = _static()


ReadSource = PageTable | TokenStream | VirtualPages


def check_source(source: ReadSource, rows: int, q_start: Int32[Array, " rows"] | None) -> None:
    """TypeError for another class, ValueError with the shapes where ids or bounds do not fit `rows` rows of queries."""
    if not isinstance(source, PageTable | TokenStream | VirtualPages):
        raise TypeError(
            f"source must be a PageTable, TokenStream or VirtualPages, got {type(source).__name__}"
        )
    if source.page_size < 1:
        raise ValueError(f"page_size must be at least 1, got {source.page_size}")
    lengths = {"kv_start": source.kv_start, "kv_end": source.kv_end}
    if q_start is not None:
        lengths["q_start"] = q_start
    if isinstance(source, VirtualPages):
        lengths["row_ids"] = source.row_ids
    for name, value in lengths.items():
        if value.shape != (rows,) or value.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32[{rows}] to match q, got {value.dtype}{list(value.shape)}")
    match source:
        case PageTable():
            ids, good = {"table": source.table}, source.table.ndim == 2 and source.table.shape[0] == rows
        case TokenStream():
            ids, good = {"ids": source.ids, "indptr": source.indptr}, source.indptr.shape == (rows + 1,)
        case VirtualPages():
            ids, good = {"req_to_page": source.req_to_page, "v2p": source.v2p}, source.req_to_page.ndim == 2
    shown = ", ".join(f"{name} {value.dtype}{list(value.shape)}" for name, value in ids.items())
    if not good or any(value.size == 0 or value.dtype != jnp.int32 for value in ids.values()):
        raise ValueError(f"{type(source).__name__} for {rows} rows does not fit or is not int32: {shown}")
