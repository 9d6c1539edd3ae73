"""MLA decode from token streams and small pages: which rows are named, where their bytes go, and the kernel for an H200.

What it computes is in test_mla_decode.py (on a GPU) and test_mla_interpreter.py.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gmem
from pallas_kernels.mla_decode import mosaic_gather
from pallas_kernels.read_source import TokenStream
from pallas_kernels.xla_attention import row_index
from tests.deviceless import requires_plugin
from tests.kernels.abstract import check_side_by_side, compile_mla
from tests.kernels.delivered import DELIVERIES, deliver, spoil
from tests.kernels.mla_case import make_case
from tests.kernels.paged_case import shuffle_pages

OPTIONS = {"kv_dtype": "bfloat16", "row_width": 576, "v_width": 512, "sm_scale": 0.1}
ROW_BYTES = 2 * 576
POOL_ROWS = 100_000_000_000 // ROW_BYTES


class Ref:
    """An array that can be sliced as a ref of Pallas'."""

    def __init__(self, array):
        self.array, self.shape, self.at = array, array.shape, self

    def __getitem__(self, index):
        return self.array[index]


@pytest.mark.parametrize(
    "page_size, delivery", [(1, d) for d in DELIVERIES] + [(3, "table"), (4, "virtual"), (64, "stream")]
)
@pytest.mark.parametrize("bad", [False, True])
def test_names_the_rows_that_the_reference_reads(page_size, delivery, bad, monkeypatch):
    monkeypatch.setattr(gmem, "load", lambda ref, index: ref[index])
    blocks_per_page, offset = 5, 3
    kv_start, kv_end = np.array([0, 70, 0], np.int32), np.array([300, 131, 0], np.int32)
    pages, num_pages = shuffle_pages(kv_end, page_size, 4, seed=0)
    source = deliver(
        delivery, pages, kv_start, kv_end,
        page_size=page_size, blocks_per_page=blocks_per_page, num_pages=num_pages,
    )  # fmt: skip
    if bad:
        source = spoil(source, (1, 2))
    num_blocks = num_pages * blocks_per_page
    expected = row_index(source, offset, num_blocks * page_size)[0](jnp.arange(300)[None].repeat(3, 0))
    refs = [Ref(x) for x in mosaic_gather.id_operands(source)]
    for b in range(2):
        position = jnp.arange(kv_start[b], kv_end[b])
        tokens = mosaic_gather.Tokens(
            source,
            refs,
            mosaic_gather.line(source, refs, source.kv_start, b),
            kv_start[b],
            kv_end[b],
            offset,
            num_blocks,
        )
        rows = tokens.rows(tokens.load_ids(position), position)
        padding = rows // page_size == offset  # all of its rows are 0
        want = expected[b, position]
        np.testing.assert_array_equal(padding, want // page_size == offset)
        assert int(padding.sum()) == (2 * page_size if bad and b == 0 else 0)
        np.testing.assert_array_equal(jnp.where(padding, 0, rows), jnp.where(padding, 0, want))


def test_a_sum_past_two_to_the_31_is_a_bad_id():
    source = TokenStream(*[jnp.zeros(1, jnp.int32)] * 4, page_size=1)
    tokens = mosaic_gather.Tokens(source, [], 0, 0, 4, jnp.int32(2), 2**31 - 1)
    rows = tokens.rows(jnp.array([2**31 - 1, 2**31 - 3, 5, -1], jnp.int32), jnp.arange(4))
    np.testing.assert_array_equal(rows, [2, 2, 7, 2])


@pytest.mark.parametrize("start", [0, 64, 128, 192])
def test_positions_that_nobody_sees_are_replaced(start, monkeypatch):
    monkeypatch.setattr(gmem, "iota", jnp.arange)
    tokens = mosaic_gather.Tokens(None, [], 0, 70, 200, 0, 0)
    want = np.clip(start + np.arange(512) // 8, 70, 199)
    np.testing.assert_array_equal(tokens.positions(start), want)


@pytest.mark.parametrize("chunks", [1, 2])
def test_bytes_lie_where_the_swizzle_wants_them(chunks):
    """128-byte swizzle: bits 4 to 6 of an address in shared memory are xored with bits 7 to 9."""
    thread = np.arange(128)
    piece, at = mosaic_gather.place(thread, chunks * 1024)
    row = thread // 8
    np.testing.assert_array_equal(np.bincount(row * 8 + piece), 1)
    plain = at ^ ((at >> 7 & 7) << 4)
    np.testing.assert_array_equal(plain, row // 8 * chunks * 1024 + row % 8 * 128 + piece * 16)


@pytest.mark.deviceless
@requires_plugin
@pytest.mark.parametrize(
    "rows, heads, delivery, page_size, s_q",
    [
        (64, 32, "stream", 1, 1),
        (64, 128, "stream", 64, 1),
        (66, 128, "stream", 1, 1),
        (5, 9, "virtual", 4, 8),
        (300, 16, "table", 1, 1),
    ],
)
def test_compiles_for_the_gpu(rows, heads, delivery, page_size, s_q, ptxas_reports):
    """In budget, without a copy of a pool of 100 GB or a byte for each of its rows, and no WGMMA waits for the one before, as
    ptxas makes it for want of registers."""
    pool_blocks = POOL_ROWS // page_size
    program = compile_mla(rows, heads, delivery, page_size, s_q, pool_blocks, ROW_BYTES, **OPTIONS)
    assert program.temp_bytes < POOL_ROWS
    check_side_by_side(ptxas_reports())


def test_declines_on_a_jax_without_its_barriers(monkeypatch):
    monkeypatch.delattr("jax._src.pallas.mosaic_gpu.primitives._get_barrier_base_index")
    mosaic_gather._report_primitive.cache_clear()
    with pytest.raises(NotImplementedError, match="parts of jax"):
        mosaic_gather._report_primitive()


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [300, 330])
def test_a_stream_ends_rows_too(capacity):
    """A row has no more positions than ids, whether its part of the stream is short or the stream itself."""
    case = make_case([77, 200, 130], heads=16, page_size=1)
    source = case.source("stream")
    indptr = jnp.asarray(
        np.asarray(source.indptr) - np.array([0, 7, 0, 0], np.int32)
    )  # the ids of row 1 begin 7 earlier: they name rows of row 0 first
    cut = TokenStream(source.ids[:capacity], indptr, source.kv_start, source.kv_end, page_size=1)
    (out, lse), (want, want_lse) = (case.run_on(case.pool, name, cut) for name in ("mosaic", "xla"))
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=3e-3)
    for got, wanted in zip(out, want, strict=True):  # both round to bf16
        assert np.linalg.norm(got - wanted) <= 4e-3 * np.linalg.norm(wanted)
