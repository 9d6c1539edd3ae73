"""The jax-triton GQA kernel compiled for GPUs that need not be here, and run by Triton's interpreter.

How the GPU computes is in test_gqa_decode.py.
"""

from functools import partial
from importlib.util import find_spec

import pytest

from pallas_kernels.gqa_decode import KVScales, gqa_decode
from pallas_kernels.gqa_decode.triton import tile_sizes
from tests.deviceless import CAPTURE_LOOPS, TARGETS, compile_for, requires_plugin, shape
from tests.kernels.abstract import int32, sources
from tests.kernels.own_process import output_of

pytestmark = [
    pytest.mark.deviceless,
    requires_plugin,
    pytest.mark.skipif(
        find_spec("jax_triton") is None or find_spec("triton") is None, reason="jax-triton is absent"
    ),
]

# Bytes of shared memory that one block may ask for (CUDA C++ Programming Guide, compute capabilities 8.0 to 10.0).
SHARED_MEMORY = {"h200": 227 << 10, "a100": 163 << 10, "rtx4090": 99 << 10, "b200": 227 << 10}
CAPABILITY = {"h200": (9, 0), "a100": (8, 0), "rtx4090": (8, 9), "b200": (10, 0)}
ROWS = 64
SOURCES = sources(ROWS)


def arguments(heads, kv_heads, width, source="table", s_q=1, blocks=1000):
    row = 2 * kv_heads * width
    pool = shape((blocks * 64 * row,), "uint8")
    return shape((ROWS, s_q, heads, width), "bfloat16"), pool, SOURCES[source], int32(()), int32(())


@pytest.fixture
def artifacts(tmp_path, monkeypatch):
    """Folder where jax-triton leaves what it compiles."""
    from jax_triton import triton_lib

    monkeypatch.setattr(triton_lib, "_JAX_TRITON_DUMP_DIR", str(tmp_path))
    if hasattr(triton_lib, "_COMPILED_KERNEL_CACHE"):  # 0.3.1
        monkeypatch.setattr(triton_lib, "_COMPILED_KERNEL_CACHE", {})
    return tmp_path


@pytest.mark.parametrize(
    "target, heads, kv_heads, width, s_q",
    [
        ("h200", 8, 4, 256, 1),
        ("h200", 64, 8, 64, 8),
        ("a100", 8, 1, 512, 1),
        ("rtx4090", 8, 1, 512, 1),
        *((target, 32, 8, 128, 1) for target in TARGETS),
    ],
)
def test_fits_shared_memory(target, heads, kv_heads, width, s_q, artifacts):
    call = partial(
        gqa_decode, kv_dtype="bfloat16", num_kv_heads=kv_heads, sm_scale=0.1, implementation="triton"
    )
    program = compile_for(call, *arguments(heads, kv_heads, width, s_q=s_q), target=target)
    assert [thunk.kind for thunk in program.launches] == ["kCustomCall"] * 2
    (info,) = artifacts.glob("*/attend.compile_info")
    used = int(info.read_text().rsplit(":", 1)[1])
    tile = tile_sizes(CAPABILITY[target], s_q * heads // kv_heads, 4 * width, width)
    assert tile["PER_CORE"] * used <= SHARED_MEMORY[target]


@pytest.mark.parametrize("source", SOURCES)
def test_no_copy_and_captured(source):
    """Every source; speculative queries, fp8, window, sinks, cap. Temporaries have no room for a byte of each row of K."""
    blocks = 500_000  # 65 GB: blocks of 32 bytes, as the scales have, are counted by int32
    scales = KVScales(int32(()), int32(()), 32)

    def call(q, pool, source, k, v, scales, q_start, sinks):
        return gqa_decode(
            q, pool, source, k, v, kv_dtype="float8_e4m3fn", num_kv_heads=8, sm_scale=0.1, scales=scales,
            window=1024, sinks=sinks, logit_cap=30.0, q_start=q_start, implementation="triton",
        )  # fmt: skip

    args = (
        *arguments(32, 8, 128, source, s_q=3, blocks=blocks),
        scales,
        int32((ROWS,)),
        shape((32,), "float32"),
    )
    program = compile_for(call, *args, options=CAPTURE_LOOPS)
    assert all(thunk.captured for thunk in program.launches)
    assert program.temp_bytes < 64 * blocks


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"q": shape((ROWS, 1, 32, 128), "float32")}, "got float32 and bfloat16"),
        ({"q": shape((ROWS, 9, 32, 128), "bfloat16")}, "at most 8 queries a row, got 9"),
        ({"kv_dtype": "float16"}, "got bfloat16 and float16"),
        ({"q": shape((ROWS, 1, 8, 576), "bfloat16"), "num_kv_heads": 1}, "up to 512 wide, got 576 and 576"),
    ],
)
def test_declines_with_the_reason(changes, words):
    q, pool, source, k, v = arguments(32, 8, 128)
    options = {"kv_dtype": "bfloat16", "num_kv_heads": 8} | changes
    q = options.pop("q", q)
    pool = shape((64 * 1024 * 576,), "uint8")
    with pytest.raises(NotImplementedError, match=words):
        compile_for(
            partial(gqa_decode, sm_scale=0.1, implementation="triton", **options), q, pool, source, k, v
        )


def test_kernels_in_the_interpreter():
    """Triton reads at import whether it interprets."""
    output = output_of("triton_interpreter")
    assert output.count("right") == 4
