"""What the Mosaic GPU kernels of paged attention decline alike. Needs no Mosaic."""

from pallas_kernels.mla_decode.api import MAX_DRAFT
from pallas_kernels.read_source import ReadSource, TokenStream

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
