"""The Mosaic MLA decode kernel compiled for an H200 that need not be here, and what it declines.

How it computes is in test_mla_decode.py (on a GPU), test_mla_interpreter.py and test_mla_schedule.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_decode.mosaic_few import MOST_QUERIES
from pallas_kernels.mla_decode.mosaic_gpu import TuningConfig, mla_decode_mosaic
from tests.deviceless import requires_plugin, shape
from tests.kernels.abstract import MLA_DECLINES, check_side_by_side, compile_mla, source
from tests.kernels.mla_case import make_case

OPTIONS = {"kv_dtype": "bfloat16", "row_width": 576, "v_width": 512, "sm_scale": 0.1}
BLOCKS = 132


def compiled(rows, heads, delivery="table", page_size=64, s_q=1, logit_cap=None, v_width=512):
    """From a pool of 100 GB: a copy of it, or a byte for each of its rows, is more than all that the tests allow."""
    options = {**OPTIONS, "row_width": v_width + 64, "v_width": v_width, "logit_cap": logit_cap}
    row_bytes = 2 * (v_width + 64)
    pool_blocks = 100_000_000_000 // (page_size * row_bytes)
    return compile_mla(rows, heads, delivery, page_size, s_q, pool_blocks, row_bytes, **options)


@pytest.mark.deviceless
@requires_plugin
@pytest.mark.parametrize(
    "rows, heads, options",
    [
        (300, 16, {}),
        (5, 9, {"delivery": "virtual", "page_size": 8}),
        (4, 128, {"s_q": 8, "page_size": 128, "logit_cap": 30.0}),
        (40, 32, {"v_width": 256}),
    ],
    ids=["table", "virtual ids, pages of 8", "draft of 8, 16 query tiles", "half as wide"],
)
def test_fits_the_gpu(rows, heads, options):
    """Shared memory and registers in budget; two kernels, and no temporaries but the parts of cut rows: no copy of the pool."""
    program = compiled(rows, heads, **options)
    queries = options.get("s_q", 1) * heads
    groups = BLOCKS // -(-queries // 64)
    padded = -(-queries // 8) * 8
    lines = padded if queries <= MOST_QUERIES else queries  # of parts; that kernel's results are padded too
    parts = 2 * groups * lines * 4 * (512 + 1)
    padded_arrays = rows * padded * (576 * 2 + 512 * 2 + 4)
    assert program.temp_bytes <= parts + padded_arrays + 16 * (rows + groups) + 4096
    assert sum(thunk.kind == "kCustomCall" for thunk in program.thunks) == 2


@pytest.mark.deviceless
@requires_plugin
@pytest.mark.parametrize("rows, heads", [(64, 64), (64, 128)])
def test_products_run_side_by_side(rows, heads, ptxas_reports):
    """For want of registers, or in a branch that it takes for divergent, ptxas waits after each WGMMA: a third slower."""
    compiled(rows, heads)
    check_side_by_side(ptxas_reports())


GOOD = dict(
    q=shape((2, 1, 16, 576), "bfloat16"),
    buffer=shape((64 * 1152,), "uint8"),
    source=source("table", 2, 64),
    block_offset=0,
)


@pytest.mark.parametrize(
    "changes, reason",
    [
        *MLA_DECLINES,
        ({"q": shape((2, 1, 16, 576), "float32")}, "must be bfloat16, got float32"),
        ({"kv_dtype": jnp.float8_e4m3fn}, "float8_e4m3fn"),
        ({"row_width": 640}, "must be v_width \\+ 64, got 640, 576 and v_width 512"),
        (
            {"q": shape((2, 1, 16, 192), "bfloat16"), "row_width": 192, "v_width": 128},
            "v_width must be 256 or 512, got 128",
        ),
    ],
)
def test_declines_with_the_reason(changes, reason):
    with pytest.raises(NotImplementedError, match=reason):
        mla_decode_mosaic(**{**GOOD, **OPTIONS, **changes})


@pytest.mark.gpu
@pytest.mark.parametrize("heads, s_q, logit_cap", [(128, 1, None), (100, 1, 30.0), (33, 3, None)])
def test_rows_of_many_heads(heads, s_q, logit_cap):
    """In one group of blocks all rows lie whole, in five some are cut. 7 rows are merged at the kernel's end, 11 before."""
    more = [130, 700, 0, 64] if heads != 100 else []
    case = make_case([0, 1, 63, 64, 65, 200, 1000, *more], heads=heads, s_q=s_q, logit_cap=logit_cap)
    arrays = jnp.asarray(case.q), jnp.asarray(case.pool), case.source("table"), np.int32(case.block_offset)
    for blocks in (2, 10):
        attend = jax.jit(partial(mla_decode_mosaic, config=TuningConfig(blocks=blocks), **case.options))
        out, lse = attend(*arrays)
        case.check(np.asarray(out, np.float64), np.asarray(lse, np.float64))


@pytest.mark.parametrize("field, value", [("blocks", 0), ("q_boxes_in_registers", 4)])
def test_config_is_checked(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .* got {value}"):
        TuningConfig(**{field: value})
