"""The Mosaic MLA decode kernel for few query lines, without a GPU: in the interpreter, and compiled for an H200.

What it computes on a GPU is in test_mla_decode.py; what it shares with the kernel for more lines in test_mla_mosaic.py.
"""

import re

import jax.numpy as jnp
import pytest

from tests.deviceless import requires_plugin
from tests.kernels.abstract import compile_mla
from tests.kernels.own_process import output_of


@pytest.mark.slow
def test_kernel_in_the_interpreter():
    assert "no races" in output_of("mla_few_interpreter", devices=16)


@pytest.mark.deviceless
@requires_plugin
@pytest.mark.parametrize(
    "heads, options",
    [
        (32, {}),
        (24, {}),
        (16, {"delivery": "virtual", "page_size": 16}),
        (3, {"page_size": 8, "v_width": 256}),
        (4, {"s_q": 8, "page_size": 128, "logit_cap": 30.0}),
    ],
    ids=["32", "24", "16, virtual ids", "3, half as wide, pages of 8", "drafts of 8"],
)
def test_compiles_without_spills_or_serialization(heads, options, ptxas_reports):
    options = {"delivery": "table", "page_size": 64, "s_q": 1, "v_width": 512, "logit_cap": None} | options
    width = options["v_width"] + 64
    program = compile_mla(
        64, heads, pool_blocks=1000, row_bytes=2 * width, kv_dtype="bfloat16", row_width=width, sm_scale=0.1, **options
    )  # fmt: skip
    reports = ptxas_reports()
    assert len(reports) == sum(thunk.kind == "kCustomCall" for thunk in program.launches) == 2
    for report in reports:
        assert " 0 bytes spill stores" in report
        assert "serialized" not in report


@pytest.mark.deviceless
@requires_plugin
@pytest.mark.parametrize(
    "heads, kv_dtype, once",
    [
        (32, "bfloat16", True),
        (48, "bfloat16", True),
        (128, "bfloat16", False),
        (32, "float8_e4m3fn", True),
        (64, "float8_e4m3fn", False),
    ],
)
def test_l2_gives_kv_up_first_where_one_block_reads_it(heads, kv_dtype, once, capfd, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    width = 576 if kv_dtype == "bfloat16" else 640
    compile_mla(
        64, heads, "virtual", 64, s_q=1, pool_blocks=1000, row_bytes=width * jnp.dtype(kv_dtype).itemsize,
        kv_dtype=kv_dtype, row_width=width, v_width=512, sm_scale=0.1,
    )  # fmt: skip
    loads = re.findall(r"cp\.async\.bulk\.tensor\S*shared\S*global\S*", capfd.readouterr().out)
    assert len(loads) >= 2
    hinted = ["cache_hint" in load for load in loads]
    assert all(hinted) if once else not any(hinted)
