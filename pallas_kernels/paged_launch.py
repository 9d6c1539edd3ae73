"""What the launchers of the Triton kernels of paged attention share. Needs no triton."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Int32

from pallas_kernels.mla_decode.api import MAX_DRAFT
from pallas_kernels.read_source import PageTable, ReadSource, TokenStream, VirtualPages

MAX_ROWS = 4096  # a program of a decode kernel holds the lengths of all rows at once


@dataclass(frozen=True)
class Operands:
    """A source as the kernels take it: ids by its kind, and bounds where the kind has none (they are not read).

    cover: SOURCE (the kind) and COVER, positions that a table row holds or ids that the stream holds. pages: constants
    that lead from a position to a block.
    """

    ids: Int32[Array, "..."]
    indptr: Int32[Array, "..."]
    row_ids: Int32[Array, " rows"]
    v2p: Int32[Array, "..."]
    cover: dict[str, Any]
    pages: dict[str, Any]


def operands(source: ReadSource) -> Operands:
    ps, none = source.page_size, source.kv_end
    indptr = row_ids = v2p = none
    pages: dict[str, Any] = {"PS": ps, "WIDTH": 1, "REQUESTS": 1, "NUM_VIRTUAL": 0, "BLOCKS_PER_PAGE": 1}
    match source:
        case PageTable(table=ids):
            kind, cover = 0, ids.shape[1] * ps
            pages["WIDTH"] = ids.shape[1]
        case TokenStream(ids=ids, indptr=indptr):
            kind, cover = 1, ids.shape[0]
        case VirtualPages(req_to_page=ids, row_ids=row_ids, v2p=v2p):
            kind, cover = 2, ids.shape[1] * ps
            pages["REQUESTS"], pages["WIDTH"] = ids.shape
            pages |= {"NUM_VIRTUAL": v2p.shape[0] - 1, "BLOCKS_PER_PAGE": source.blocks_per_page}
    return Operands(ids, indptr, row_ids, v2p, {"SOURCE": kind, "COVER": min(cover, 2**31 - 1)}, pages)


def decline(rows: int, s_q: int) -> None:
    """NotImplementedError, with the reason, for batches that the decode kernels are not made for. Every tile of queries reads
    its row's KV anew: chunks are for the prefill kernels."""
    if not 1 <= rows <= MAX_ROWS:
        raise NotImplementedError(f"the Triton kernel serves 1 to {MAX_ROWS} rows, got {rows}")
    if s_q > MAX_DRAFT:
        raise NotImplementedError(
            f"made for decode and for drafts of at most {MAX_DRAFT} queries a row, got {s_q}"
        )


def power_of_two(n: int) -> int:
    """The smallest that is at least n."""
    return 1 << (n - 1).bit_length()
