"""What `mla_extend` holds beside its arguments: expanded K and V of a part of the prefix, within a bound."""

from functools import partial

import jax
import ml_dtypes  # noqa: F401, float8 by its name
import numpy as np
import pytest

from pallas_kernels.mla_prefill import Rows, mla_extend, prefix
from pallas_kernels.read_source import PageTable
from tests.deviceless import shape
from tests.kernels.test_mla_prefill import check_extend, make_chunk

RANK, NOPE, ROPE, V, PAGE = 512, 128, 64, 128, 64


@pytest.mark.parametrize(
    ("rows", "heads", "expected"),
    [
        (1, 32, (4096, 32)),
        (8, 32, (2048, 32)),
        (64, 128, (128, 64)),
        (256, 32, (128, 32 // 2)),
        (256, 128, (128, 16)),
        (512, 128, (128, 8)),
        (512, 63, (128, 7)),
        (4096, 31, (128, 1)),
        (100_000, 8, (4, 1)),
    ],
)
def test_pieces_stay_within_the_bound(rows, heads, expected):
    each = rows * (NOPE + V) * 2
    chunk, group = prefix._pieces(each, heads)
    assert (chunk, group) == expected
    assert chunk * group * each <= 256 << 20


def temporaries(rows, heads, pool_rows, form="expanded", kv_dtype="float32"):
    """Bytes that a program for the CPU holds beside its arguments and results: 9 new tokens a row, q in float32."""
    new, width = 9, 640 if kv_dtype == "float8_e4m3fn" else RANK + ROPE
    tokens = rows * new
    f32, int32 = partial(shape, dtype="float32"), partial(shape, dtype="int32")
    source = PageTable(int32((rows, 64)), int32((rows,)), int32((rows,)), page_size=PAGE)
    options = dict(max_new=new, sm_scale=0.07, kv_dtype=kv_dtype, row_width=width, prefix_form=form)
    extend = partial(mla_extend, **options, implementation="xla", decode_implementation="xla")
    program = jax.jit(extend).lower(
        f32((tokens, heads, NOPE + ROPE)), f32((tokens, heads, NOPE)), f32((tokens, ROPE)), f32((tokens, heads, V)),
        Rows(int32((rows,)), int32((rows,))), shape((pool_rows * width * np.dtype(kv_dtype).itemsize,), "uint8"), source,
        0, f32((heads, NOPE, RANK)), f32((heads, V, RANK)),
    )  # fmt: skip
    return program.compile().memory_analysis().temp_size_in_bytes


def test_temporaries_of_many_rows():
    """128 positions of all 128 heads would be 1074 MB. What grows with the new tokens is theirs: q and partial results."""
    rows, heads = 64, 128
    new_tokens = 4 * 9 * rows * heads * (2 * NOPE + ROPE + V)
    assert temporaries(rows, heads, 1 << 16) < (256 << 20) + 4 * new_tokens


@pytest.mark.parametrize("kv_dtype", ["float32", "float8_e4m3fn"])
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_no_copy_of_the_pool(form, kv_dtype):
    found = [temporaries(3, 2, pool_rows, form, kv_dtype) for pool_rows in (1 << 16, 1 << 17)]
    assert found[0] == found[1]


def test_groups_of_heads_give_the_same(monkeypatch):
    heads, sizes = 6, ([0, 300, 64, 130], [13, 3, 65, 17])
    chunk = make_chunk(*sizes, heads=heads, dtype="float32")
    whole = chunk.run("xla", "xla", "expanded", "table")
    each = 4 * (chunk.w_uk.shape[1] + chunk.w_uv.shape[1]) * 4
    monkeypatch.setattr(prefix, "_CHUNK_BYTES", 2 * prefix._MIN_CHUNK * each)
    assert prefix._pieces(each, heads) == (prefix._MIN_CHUNK, 2)
    check_extend(chunk, "xla", "xla", "expanded", 1e-5)
    for a, b in zip(whole, chunk.run("xla", "xla", "expanded", "table"), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
