"""The jax-triton kernel compiled for GPUs that need not be here. How it computes is in test_mla_decode.py, on a GPU."""

from functools import partial
from importlib.util import find_spec

import pytest

from pallas_kernels.mla_decode import mla_decode
from pallas_kernels.mla_decode.triton import tile_sizes
from pallas_kernels.read_source import PageTable
from tests.deviceless import CAPTURE_LOOPS, TARGETS, compile_for, requires_plugin, shape
from tests.kernels.abstract import int32, sources

pytestmark = [
    pytest.mark.deviceless,
    requires_plugin,
    pytest.mark.skipif(
        find_spec("jax_triton") is None or find_spec("triton") is None, reason="jax-triton is absent"
    ),
]

# Bytes of shared memory that one block may ask for (CUDA C++ Programming Guide, compute capabilities 8.0 to 10.0).
SHARED_MEMORY = {"h200": 227 << 10, "a100": 163 << 10, "rtx4090": 99 << 10, "b200": 227 << 10}
ROWS = 64
SOURCES = sources(ROWS)


def attention(q, pool, source, block_offset, fp8=False, **options):
    rows = (
        {"kv_dtype": "float8_e4m3fn", "row_width": 640} if fp8 else {"kv_dtype": "bfloat16", "row_width": 576}
    )
    return mla_decode(
        q, pool, source, block_offset, v_width=512, sm_scale=0.1, implementation="triton", **rows, **options
    )


def arguments(heads, source="table", s_q=1, pool_bytes=1000 * 128 * 1152):
    return (
        shape((ROWS, s_q, heads, 576), "bfloat16"),
        shape((pool_bytes,), "uint8"),
        SOURCES[source],
        int32(()),
    )


@pytest.fixture
def artifacts(tmp_path, monkeypatch):
    """Folder where jax-triton leaves what it compiles."""
    from jax_triton import triton_lib

    monkeypatch.setattr(triton_lib, "_JAX_TRITON_DUMP_DIR", str(tmp_path))
    if hasattr(triton_lib, "_COMPILED_KERNEL_CACHE"):  # 0.3.1
        monkeypatch.setattr(triton_lib, "_COMPILED_KERNEL_CACHE", {})
    return tmp_path


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    "target, heads", [("h200", 16), ("h200", 128), *((target, 32) for target in TARGETS)]
)
def test_fits_shared_memory(target, heads, fp8, artifacts):
    """fp8 also where there is no instruction for it (A100)."""
    program = compile_for(partial(attention, fp8=fp8), *arguments(heads), target=target)
    assert [thunk.kind for thunk in program.launches] == ["kCustomCall"] * 2
    (info,) = artifacts.glob("*/attend.compile_info")
    used = int(info.read_text().rsplit(":", 1)[1])
    capability = {"h200": (9, 0), "a100": (8, 0), "rtx4090": (8, 9), "b200": (10, 0)}[target]
    assert tile_sizes(capability, heads, fp8)["PER_CORE"] * used <= SHARED_MEMORY[target]


@pytest.mark.parametrize("source, fp8", [*((source, False) for source in SOURCES), ("virtual", True)])
def test_no_copy_and_captured(source, fp8):
    """Every source; speculative queries, cap and q_start. Temporaries have no room for a byte of each of the pool's rows."""
    pool_rows = 64 * 1_250_000  # 92 GB in bf16
    args = arguments(8, source, s_q=3, pool_bytes=pool_rows * (640 if fp8 else 1152))
    call = partial(attention, logit_cap=30.0, fp8=fp8)
    program = compile_for(
        lambda *args: call(*args[:-1], q_start=args[-1]), *args, int32((ROWS,)), options=CAPTURE_LOOPS
    )
    assert all(thunk.captured for thunk in program.launches)
    assert program.temp_bytes < pool_rows


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"q": shape((ROWS, 1, 8, 576), "float32")},
            "serves bfloat16 q, and KV in bfloat16 or float8_e4m3fn, got float32",
        ),
        ({"q": shape((5000, 1, 8, 576), "bfloat16")}, "4096 rows, got 5000"),
        ({"q": shape((ROWS, 9, 8, 576), "bfloat16")}, "at most 8 queries a row, got 9"),
    ],
)
def test_declines_with_the_reason(changes, words):
    q, pool, source, offset = arguments(8)
    q = changes["q"]
    rows = q.shape[0]
    source = PageTable(int32((rows, 128)), int32((rows,)), int32((rows,)), page_size=64)
    with pytest.raises(NotImplementedError, match=words):
        compile_for(attention, q, pool, source, offset)
