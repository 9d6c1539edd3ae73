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
        (32, {"delivery": "virtual"}),
        (3, {"page_size": 8, "v_width": 256}),
        (4, {"s_q": 8, "page_size": 128, "logit_cap": 30.0}),
    ],
    ids=[
        "32",
        "24",
        "16, virtual ids",
        "32, virtual ids",
        "3, half as wide, pages of 8",
        "drafts of 8",
    ],
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


@pytest.mark.deviceless
@requires_plugin
@pytest.mark.parametrize("heads, once", [(32, True), (48, True), (128, False)])
def test_l2_gives_single_rows_up_first_where_one_block_reads_them(heads, once, capfd, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    compile_mla(
        64, heads, "stream", 1, s_q=1, pool_blocks=100_000, row_bytes=1152,
        kv_dtype="bfloat16", row_width=576, v_width=512, sm_scale=0.1,
    )  # fmt: skip
    ptx = capfd.readouterr().out
    loads = re.findall(r"cp\.async\.cg\.shared\.global(\S*) \[(%r\d+)\+", ptx)
    assert len(loads) >= 36
    for hint, address in loads:
        assert hint == (".L2::cache_hint" if once else ".L2::128B")
        # Of a plain sum ptxas makes an instruction that no card runs: see `mosaic_gather.copy_rows`.
        assert not once or re.search(rf"max\.u32\s+{address},", ptx)


@pytest.mark.deviceless
@requires_plugin
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize(
    "delivery, lines",
    [
        ("table", [1, 2, 2, 64 * 128 // 32]),
        ("virtual", [1, 2, 2, 2, 67 * 128 // 32, -(-10_001 // 32)]),
        ("stream", [1, 2, 2, 3]),  # 4 MB of ids are too many
    ],
)
def test_asks_for_ids_and_lengths_before_barriers_are_made(heads, delivery, lines, capfd, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    compile_mla(
        64, heads, delivery, 1 if delivery == "stream" else 64, s_q=1, pool_blocks=1000, row_bytes=1152,
        kv_dtype="bfloat16", row_width=576, v_width=512, sm_scale=0.1,
    )  # fmt: skip
    kernels = re.split(r"\.visible \.entry", capfd.readouterr().out)
    start = next(kernel for kernel in kernels if "wgmma" in kernel).split("mbarrier.init")[0]
    limits = re.findall(r"setp\.lt\.u32 p, line, (\d+); @p prefetch\.global\.L2", start)
    assert sorted(map(int, limits)) == lines
    # Two rows a lane, of kv_start, kv_end and both ends in `indptr`.
    assert len(re.findall(r"ld\.global", start)) >= (4 if delivery == "stream" else 2)
