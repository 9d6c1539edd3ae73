"""What the Mosaic GPU kernels of paged attention decline alike, and how they find a page. Needs no Mosaic."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mla_decode.api import MAX_DRAFT
from pallas_kernels.read_source import PageTable, ReadSource, TokenStream, VirtualPages

PAGE_SIZES = (8, 16, 32, 64, 128)  # whole pages, or whole parts of one, make a TMA box of 64 rows


def decline(s_q: int, source: ReadSource, sm_scale: float) -> None:
    """NotImplementedError, with the reason, for queries, sources and scales that no kernel of whole pages serves."""
    decline_queries(s_q, sm_scale)
    decline_source(source)


def decline_source(source: ReadSource) -> None:
    """The same of the source alone."""
    if isinstance(source, TokenStream):
        raise NotImplementedError("the Mosaic kernel reads whole pages by TMA: it takes no token stream")
    if source.page_size not in PAGE_SIZES:
        raise NotImplementedError(
            f"page_size must be {', '.join(map(str, PAGE_SIZES[:-1]))} or {PAGE_SIZES[-1]}, got {source.page_size}"
        )


def decline_queries(s_q: int, sm_scale: float) -> None:
    """The same for what no kernel serves, however its rows come."""
    if s_q > MAX_DRAFT:
        raise NotImplementedError(
            f"made for decode and for drafts of at most {MAX_DRAFT} queries a row, got {s_q}"
        )
    if not sm_scale > 0:
        raise NotImplementedError(f"sm_scale must be positive, got {sm_scale}")


def decline_latent(s_q: int, heads: int, v_width: int, lines: int, blocks: int) -> None:
    """The same for latent rows: V of another width, or more tiles of `lines` queries in a row than there are blocks."""
    if v_width not in (256, 512):
        raise NotImplementedError(f"v_width must be 256 or 512, got {v_width}")
    tiles = -(-s_q * heads // lines)
    if tiles > blocks:
        raise NotImplementedError(
            f"s_q * heads = {s_q * heads} needs {tiles} blocks a row, more than {blocks}"
        )


def page_entry(source: ReadSource, refs: Any, b: jax.Array, column: jax.Array) -> jax.Array:
    """Entry of page `column` of row b, inside a kernel; a table's is what stands there, and may be anything.

    refs: of the source's arrays, in the order of its fields. An id that names no virtual page has the padding page's entry.
    """
    return entry_of(source, translate(source, refs, refs[0][line_of(source, refs, b), column]))


def line_of(source: ReadSource, refs: Any, b: jax.Array) -> jax.Array:
    """The line of the table, or of the request map, that names the pages of row b."""
    if isinstance(source, PageTable):
        return b
    assert isinstance(source, VirtualPages), "a stream names no pages"
    requests, row_ids, _ = refs
    return jnp.clip(row_ids[b], 0, requests.shape[0] - 1)


def translate(source: ReadSource, refs: Any, page: jax.Array) -> jax.Array:
    """What `v2p` holds for a page of the request map; in a table stand entries already."""
    if isinstance(source, PageTable):
        return page
    v2p = refs[2]
    return v2p[jnp.where((page >= 0) & (page < v2p.shape[0] - 1), page, 0)]


def block_of(source: ReadSource, translated: jax.Array, offset_ref: Any, num_blocks: int) -> jax.Array:
    """The block of a pool of `num_blocks` that holds a translated page; the padding page's for one that names nothing.

    offset_ref: of int32[1], the block of the padding page.
    """
    entry = entry_of(source, translated)
    block = entry + offset_ref[0]
    good = (entry >= 0) & (block >= 0) & (block < num_blocks)
    return jnp.where(good, block, offset_ref[0])


def entry_of(source: ReadSource, translated: jax.Array) -> jax.Array:
    """The entry, once it was translated. Apart from it, so that code may go on while memory answers."""
    if isinstance(source, PageTable):
        return translated
    assert isinstance(source, VirtualPages), "a stream names no pages"
    return jnp.maximum(translated, 0) * source.blocks_per_page
