"""The Mosaic GQA decode kernel compiled for an H200 that need not be here, and what it declines.

How it computes is in test_gqa_decode.py (on a GPU) and test_gqa_interpreter.py.
"""

from functools import partial

import jax.numpy as jnp
import pytest

from pallas_kernels.gqa_decode import KVScales, gqa_decode
from pallas_kernels.gqa_decode.mosaic_gpu import TuningConfig, gqa_decode_mosaic
from pallas_kernels.read_source import TokenStream
from tests.deviceless import compile_for, requires_plugin, shape
from tests.kernels.abstract import int32, source


def compiled(
    rows, heads, kv_heads, head_dim, v_head_dim=None, *,
    delivery="table", page_size=64, s_q=1, blocks=1000, sinks=False, extent=None, **options,
):  # fmt: skip
    v_head_dim = v_head_dim or head_dim
    one_row = v_head_dim != head_dim
    pool = blocks * page_size * kv_heads * (head_dim + v_head_dim) * 2

    def attention(q, pool, source, k_offset, v_offset, q_start, sinks, bias):
        return gqa_decode(
            q, pool, source, k_offset, None if one_row else v_offset, kv_dtype="bfloat16",
            num_kv_heads=kv_heads, v_head_dim=v_head_dim, sm_scale=0.1, q_start=q_start, sinks=sinks,
            relative_bias=bias, implementation="mosaic", **options,
        )  # fmt: skip

    return compile_for(
        attention,
        shape((rows, s_q, heads, head_dim), "bfloat16"),
        shape((pool,), "uint8"),
        source(delivery, rows, page_size),
        int32(()),
        int32(()),
        int32((rows,)) if s_q > 1 else None,
        shape((heads,), "float32") if sinks else None,
        shape((rows, s_q, heads, extent), "bfloat16") if extent else None,
    )


@pytest.mark.deviceless
@requires_plugin
@pytest.mark.parametrize(
    "sizes, options",
    [
        ((64, 32, 8, 128), {}),
        ((300, 64, 8, 64), {"sinks": True, "window": 128}),
        ((32, 8, 4, 256), {"page_size": 128}),
        ((9, 8, 1, 512), {"page_size": 32}),
        (
            (5, 16, 1, 128),
            {"s_q": 8, "delivery": "virtual", "page_size": 16, "window": 100, "logit_cap": 30.0},
        ),
        ((40, 16, 16, 96), {"page_size": 8}),
        ((5, 8, 2, 192, 128), {"s_q": 3}),
        ((6, 12, 4, 32), {"s_q": 3, "window": 70, "sinks": True}),
        ((6, 8, 2, 96, 256), {}),
        ((20, 32, 4, 128), {"extent": 1024, "window": 512, "s_q": 2}),
    ],
    ids=str,
)
def test_fits_the_gpu(sizes, options):
    """Shared memory and registers in budget; two kernels of ours, and no temporaries but parts, queries and results."""
    program = compiled(*sizes, **options)
    rows, heads, kv_heads, head_dim = sizes[:4]
    v_width, s_q = sizes[-1], options.get("s_q", 1)
    abreast = max(1, 256 // max(head_dim, v_width))  # KV heads of a worker at most
    parts = 2 * (264 * abreast // kv_heads) * s_q * heads * 4 * (v_width + 1)
    queries = rows * kv_heads * -(-s_q * heads // kv_heads // 8) * 8 * head_dim * 2
    results = 0 if s_q == 1 else rows * s_q * heads * (2 * v_width + 4)
    bias = rows * s_q * heads * options.get("extent", 0) * (4 + 4)  # in f32, by KV head
    assert program.temp_bytes <= parts + queries + results + bias + 16 * (rows + 264) + 65536
    assert sum(thunk.kind == "kCustomCall" for thunk in program.thunks) == 2


@pytest.mark.deviceless
@requires_plugin
def test_copies_no_pool():
    temps = [compiled(4, 16, 2, 128, blocks=blocks).temp_bytes for blocks in (50_000, 1_400_000)]
    assert temps[0] == temps[1]


@pytest.mark.deviceless
@requires_plugin
@pytest.mark.parametrize(
    "target, dtype, delivery, custom_call",
    [
        ("h200", "bfloat16", "table", "mosaic_gpu"),
        ("h200", "bfloat16", "stream", "mosaic_gpu"),
        ("a100", "bfloat16", "table", "triton"),
        ("h200", "float32", "table", None),
    ],
)
def test_what_runs_where_none_is_named(target, dtype, delivery, custom_call):
    if custom_call == "triton":
        pytest.importorskip("jax_triton")
    if delivery == "stream":
        ids = TokenStream(int32((4096,)), int32((5,)), int32((4,)), int32((4,)), page_size=64)
    else:
        ids = source("table", 4, 64)
    call = partial(gqa_decode, kv_dtype=dtype, num_kv_heads=2, sm_scale=0.1)
    pool = shape((512 * 64 * 1024,), "uint8")
    program = compile_for(call, shape((4, 1, 16, 128), dtype), pool, ids, int32(()), int32(()), target=target)
    text = program.compiled.as_text()
    assert [name for name in ("mosaic_gpu", "triton") if f'custom_call_target="{name}' in text] == (
        [custom_call] if custom_call else []
    )


GOOD = dict(
    q=shape((2, 1, 16, 128), "bfloat16"),
    buffer=shape((64 * 1024,), "uint8"),
    source=source("table", 2, 64),
    k_offset=0,
    v_offset=1,
    kv_dtype="bfloat16",
    num_kv_heads=2,
    v_head_dim=128,
    sm_scale=0.1,
)
STREAM = TokenStream(int32((9,)), int32((3,)), *[int32((2,))] * 2, page_size=64)
FP8 = {"kv_dtype": jnp.float8_e4m3fn, "scales": KVScales(0, 1, 1)}


@pytest.mark.parametrize(
    "changes, reason",
    [
        (
            {
                "source": source("table", 2, 4),
                "q": shape((2, 1, 16, 96), "bfloat16"),
                "v_head_dim": 96,
            },
            "multiples of 64 wide, got 96 and 96",
        ),
        ({"source": STREAM, **FP8}, "no token stream"),
        ({"source": source("table", 2, 4), **FP8}, "page_size must be 8, 16, 32, 64 or 128, got 4"),
        ({"v_head_dim": 32, "v_offset": None, **FP8}, "must be 64, 128, 192 or 256 wide, got 128 and 32"),
        ({"q": shape((2, 3, 16, 128), "bfloat16"), **FP8}, "at most 16 query lines a KV head .* got 24"),
        (
            {"num_kv_heads": 1, "q": shape((2, 1, 16, 64), "bfloat16"), "v_head_dim": 64, **FP8},
            "1 KV heads of 64 and 64 bytes",
        ),
        ({"source": source("table", 2, 8), **FP8}, "scales of 8 rows of 2 KV heads"),
        ({"relative_bias": shape((2, 1, 16, 9), "float32"), **FP8}, "no relative bias"),
        ({"q": shape((2, 1, 16, 128), "float32")}, "q must be bfloat16, .* got float32"),
        ({"kv_dtype": jnp.float16}, "got bfloat16 and float16"),
        ({"q": shape((2, 1, 16, 80), "bfloat16")}, "multiples of 32 up to 512 wide, got 80 and 128"),
        ({"q": shape((2, 9, 16, 128), "bfloat16")}, "at most 8 queries a row, got 9"),
        ({"q": shape((2, 8, 600, 128), "bfloat16"), "num_kv_heads": 300}, "need more than 132 workers"),
        ({"sm_scale": -1.0}, "sm_scale must be positive, got -1"),
    ],
)
def test_declines_with_the_reason(changes, reason):
    with pytest.raises(NotImplementedError, match=reason):
        gqa_decode_mosaic(**{**GOOD, **changes})


def test_config_is_checked():
    with pytest.raises(ValueError, match="blocks must be at least 1, got 0"):
        TuningConfig(blocks=0)
