"""Abstract arguments of paged attention: to compile kernels without running them, and to ask what they decline."""

from functools import partial

from pallas_kernels.mla_decode import mla_decode
from pallas_kernels.read_source import PageTable, TokenStream, VirtualPages
from tests.deviceless import compile_for, shape

int32 = partial(shape, dtype="int32")


def source(delivery, rows, page_size):
    """128 columns; of virtual ids, 10,000 of them in pages of 27 blocks."""
    bounds = int32((rows,)), int32((rows,))
    if delivery == "table":
        return PageTable(int32((rows, 128)), *bounds, page_size=page_size)
    if delivery == "stream":
        return TokenStream(int32((1 << 20,)), int32((rows + 1,)), *bounds, page_size=page_size)
    ids = int32((rows + 3, 128)), int32((rows,)), int32((10_001,))
    return VirtualPages(*ids, *bounds, page_size=page_size, blocks_per_page=27)


def sources(rows):
    """One of each delivery, of different page sizes."""
    bounds = int32((rows,)), int32((rows,))
    return {
        "table": PageTable(int32((rows, 128)), *bounds, page_size=64),
        "stream": TokenStream(int32((1 << 20,)), int32((rows + 1,)), *bounds, page_size=1),
        "virtual": VirtualPages(
            int32((256, 128)), bounds[0], int32((10_001,)), *bounds, page_size=16, blocks_per_page=27
        ),
    }


def compile_mla(rows, heads, delivery, page_size, s_q, pool_blocks, row_bytes, **options):
    """The Mosaic MLA decode kernel for an H200, rows of v_width + 64 columns in row_bytes bytes."""

    def attention(q, pool, source, block_offset, q_start):
        return mla_decode(q, pool, source, block_offset, q_start=q_start, implementation="mosaic", **options)

    return compile_for(
        attention,
        shape((rows, s_q, heads, options["v_width"] + 64), "bfloat16"),
        shape((pool_blocks * page_size * row_bytes,), "uint8"),
        source(delivery, rows, page_size),
        int32(()),
        int32((rows,)) if s_q > 1 else None,
    )


# Changes to good arguments of a Mosaic kernel that reads whole pages, and what it says of them.
PAGE_DECLINES = [
    ({"source": source("table", 2, 4)}, "page_size must be 8, 16, 32, 64 or 128, got 4"),
    ({"source": TokenStream(int32((9,)), int32((3,)), *[int32((2,))] * 2, page_size=64)}, "no token stream"),
]
# The same for any Mosaic MLA decode kernel.
MLA_DECLINES = [
    ({"q": shape((2, 9, 16, 576), "bfloat16")}, "at most 8 queries a row, got 9"),
    ({"q": shape((2, 8, 1100, 576), "bfloat16")}, "needs (138|275) blocks a row, more than 132"),
    ({"sm_scale": -1.0}, "sm_scale must be positive, got -1"),
]


def check_side_by_side(ptxas_reports: list[str]) -> None:
    """ptxas did not make a WGMMA wait for the one before it, as for want of registers, or in a branch it takes for divergent."""
    assert any("Used 128 registers" in report for report in ptxas_reports)
    assert not any("serialized" in report for report in ptxas_reports)
