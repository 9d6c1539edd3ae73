"""The Mosaic MLA decode kernel for few query lines: in the interpreter, compiled for an H200, and its merges on a GPU.

What else it computes on a GPU is in test_mla_decode.py; what it shares with the kernel for more lines in test_mla_mosaic.py.
"""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from tests.deviceless import requires_plugin
from tests.kernels.abstract import compile_mla
from tests.kernels.mla_case import make_case
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
        (32, {"rows": 1}),
        (3, {"rows": 1, "v_width": 256}),
        (8, {"rows": 2, "s_q": 4}),
        (32, {"rows": 4}),
        (32, {"rows": 8}),
        (32, {"rows": 24}),
    ],
    ids=[
        "32",
        "24",
        "16, virtual ids",
        "32, virtual ids",
        "3, half as wide, pages of 8",
        "drafts of 8",
        "one row",
        "one row, half as wide",
        "two rows",
        "four rows",
        "eight rows",
        "24 rows",
    ],
)
def test_compiles_without_spills_or_serialization(heads, options, ptxas_reports):
    options = {
        "rows": 64,
        "delivery": "table",
        "page_size": 64,
        "s_q": 1,
        "v_width": 512,
        "logit_cap": None,
    } | options
    width = options["v_width"] + 64
    program = compile_mla(
        heads=heads, pool_blocks=1000, row_bytes=2 * width, kv_dtype="bfloat16", row_width=width, sm_scale=0.1, **options
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


def check(lengths, heads, delivery="table", steep=1, **options) -> None:
    """`steep`: factor of all logits."""
    v_width = options.setdefault("v_width", 512)
    scaled = options.get("kv_dtype") == "float8_e4m3fn"
    widths = {"qk_width": v_width + 64, "row_width": v_width + (128 if scaled else 64)}
    case = make_case(lengths, heads=heads, blocks_per_page=1, block_offset=0, **widths, **options)
    scale = case.options["sm_scale"] * steep
    case = dataclasses.replace(case, options={**case.options, "sm_scale": scale})
    # Tables of one width, so that lengths share a program.
    case.check(*case.run("mosaic", delivery, extra_columns=max(320 - case.pages.shape[1], 0)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads, s_q, v_width", [(3, 1, 512), (8, 1, 256), (32, 1, 512), (3, 4, 256), (8, 4, 512)]
)
@pytest.mark.parametrize(
    "lengths",
    [
        [64],  # whole
        [150],
        [132 * 64],  # a part for each of 132 blocks
        [131 * 64 + 1],  # of the last part most queries of a draft see nothing
        [20_000],
        [66 * 64, 66 * 64],
        [0, 130 * 64],  # 130 parts of one row: more than are loaded at once
        [130 * 64, 0],
        [8000, 65],
        [700, 3000],
    ],
    ids=str,
)
def test_few_rows_in_very_many_parts(lengths, heads, s_q, v_width):
    check(lengths, heads, s_q=s_q, v_width=v_width)


@pytest.mark.gpu
def test_a_short_row_beside_a_very_long_one():
    check([64, 100_000], 32)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[132 * 64], [0, 9000], [4500, 4500]], ids=str)
@pytest.mark.parametrize("steep", [0.01, 8])
def test_parts_that_outweigh_each_other(lengths, steep):
    check(lengths, 16, steep=steep)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[9000], [9000, 0, 3000, 700, 64, 65]], ids=str)
@pytest.mark.parametrize("exponent", [-100, -40, 60, 110])
def test_parts_of_values_far_from_one(lengths, exponent):
    """Parts lie in f16, whose largest number is 65504."""
    case = make_case(lengths, heads=16, blocks_per_page=1, block_offset=0)
    rows = case.pool.view(jnp.bfloat16).reshape(-1, 576)
    rows[:, :512] = (rows[:, :512].astype(np.float32) * 2.0**exponent).astype(jnp.bfloat16)
    kv = [np.hstack([values[:, :512] * 2.0**exponent, values[:, 512:]]) for values in case.kv]
    q = case.q.copy()
    q[..., :512] = (q[..., :512].astype(np.float32) * 2.0**-exponent).astype(jnp.bfloat16)
    case = dataclasses.replace(case, kv=kv, q=q)
    case.check(*case.run("mosaic"))


@pytest.mark.gpu
def test_windows_in_many_parts():
    """The first two queries of the last problem are before its window: its two parts hold nothing for them."""
    check([9000], 8, s_q=4, kv_start=[700])
    check([9000, 3001], 8, s_q=4, kv_start=[8990, 65])
    check([129], 8, s_q=4, kv_start=[127])


@pytest.mark.gpu
@pytest.mark.parametrize("delivery", ["stream", "virtual"])
def test_single_tokens_in_many_parts(delivery):
    check([9000], 16, delivery, page_size=1)
    check([70, 9000], 16, delivery, page_size=1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads, s_q, kv_dtype",
    [
        (3, 1, "bfloat16"),
        (32, 1, "bfloat16"),
        (8, 4, "bfloat16"),
        (3, 1, "float8_e4m3fn"),
        (32, 1, "float8_e4m3fn"),
        (35, 1, "float8_e4m3fn"),
    ],
)
@pytest.mark.parametrize("rows", [3, 16, 17, 24, 33, 34])
def test_each_form_of_the_merge(rows, heads, s_q, kv_dtype):
    """By the number of rows: of one length, which are cut evenly, and of several, one of them in most of the parts."""
    check([1280] * rows, heads, s_q=s_q, kv_dtype=kv_dtype)
    lengths = np.random.default_rng(rows).integers(0, 300, rows)
    lengths[rows // 2] = 20_000
    check(lengths, heads, s_q=s_q, kv_dtype=kv_dtype)
