"""What every implementation of paged GQA attention must do."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device
from pallas_kernels.gqa_decode import KVScales, gqa_decode, merge_partials
from pallas_kernels.read_source import PageTable
from tests.deviceless import compile_for, requires_plugin, shape
from tests.kernels.delivered import ABSURD, DELIVERIES, spoil
from tests.kernels.gqa_case import Case, make_case
from tests.kernels.paged_case import CAPTURED, or_skip, run_or_skip

IMPLEMENTATIONS = [
    "xla",
    pytest.param("triton", marks=pytest.mark.gpu),
    pytest.param("mosaic", marks=pytest.mark.gpu),
]
EDGES = [0, 1, 15, 16, 17, 50]


def must_serve(implementation: str, case: Case, delivery: str) -> bool:
    """May the implementation not decline this problem on an H200? (Others it may, with a reason.)"""
    if implementation == "xla":
        return True
    kv_dtype = case.options["kv_dtype"]
    if implementation == "mosaic":
        widths = case.q.shape[3], case.options["v_head_dim"]
        pages = delivery != "stream" and case.page_size in (8, 16, 32, 64, 128)
        group = case.q.shape[2] // case.options["num_kv_heads"]
        if kv_dtype == jnp.float8_e4m3fn:
            kind = widths[0] in (128, 256) and pages and case.q.shape[1] * group <= 16
            kind = kind and case.options["relative_bias"] is None
            kind = kind and case.page_size * case.options["num_kv_heads"] % 32 == 0
        else:
            kind = kv_dtype == jnp.bfloat16 and widths[0] % (32 if pages else 64) == 0
        return (
            kind
            and case.q.dtype == jnp.bfloat16
            and case.q.shape[1] <= 8
            and widths[1] % 128 == 0  # others where lines can be merged side by side
        )
    return (
        case.q.dtype == jnp.bfloat16
        and kv_dtype in (jnp.bfloat16, jnp.float8_e4m3fn)
        and case.q.shape[1] <= 8
    )


def problem(implementation: str, lengths, **options) -> Case:
    """XLA computes in float32, and is asked for 1e-5; the kernels are asked in bfloat16."""
    return make_case(lengths, **{"dtype": "float32" if implementation == "xla" else "bfloat16"} | options)


run = partial(run_or_skip, must_serve)
may_decline = partial(or_skip, must_serve)  # for tests that call `gqa_decode` themselves


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 4), (6, 2), (16, 1), (5, 1)], ids=lambda n: str(n))
def test_groups(implementation, heads, kv_heads):
    case = problem(implementation, EDGES, heads=heads, kv_heads=kv_heads)
    case.check(*run(implementation, case))


@pytest.mark.parametrize(
    "head_dim, v_head_dim",
    [(32, 32), (96, 96), (128, 128), (256, 256), (512, 512), (192, 128), (80, 512), (96, 256)],
)
def test_head_dims(implementation, head_dim, v_head_dim):
    case = problem(implementation, EDGES, head_dim=head_dim, v_head_dim=v_head_dim)
    case.check(*run(implementation, case))


# Attention of published models: config.json of Qwen3.5-0.8B, Falcon-H1-1.5B, gpt-oss-20b (full and sliding), gemma-4-E2B
# (sliding and full) and Inkling-Small.
PUBLISHED = {
    "qwen3.5": dict(heads=8, kv_heads=2, head_dim=256),
    "falcon-h1": dict(heads=8, kv_heads=2, head_dim=128),
    "gpt-oss": dict(heads=64, kv_heads=8, head_dim=64, sinks=True),
    "gpt-oss-sliding": dict(heads=64, kv_heads=8, head_dim=64, sinks=True, window=128),
    "gemma-4-sliding": dict(heads=8, kv_heads=1, head_dim=256, window=512),
    "gemma-4": dict(heads=8, kv_heads=1, head_dim=512),
    "inkling": dict(heads=32, kv_heads=8, head_dim=128, bias_extent=1024),
}


@pytest.mark.gpu
@pytest.mark.parametrize("model", PUBLISHED)
def test_published_models_take_the_mosaic_kernel(model):
    """From untranslated ids, as the step reads them. Nothing is skipped: on Hopper these may not be declined."""
    if device.target() != ("cuda", (9, 0)):
        pytest.skip("no Hopper GPU")
    case = problem("mosaic", [0, 1, 63, 64, 65, 700], page_size=64, **PUBLISHED[model])
    case.check(*case.run("mosaic", "virtual"))


def test_k_then_v_rows_of_one_width(implementation):
    case = problem(implementation, EDGES, one_row=True)
    case.check(*run(implementation, case))


@pytest.mark.parametrize(
    "page_size, delivery", [(1, "table"), (1, "stream"), (1, "virtual"), (64, "virtual")]
)
def test_page_sizes(implementation, page_size, delivery):
    case = problem(implementation, [0, 1, 63, 64, 65, 200], page_size=page_size)
    case.check(*run(implementation, case, delivery))


@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
def test_deliveries_agree_to_the_bit(implementation, s_q, kv_dtype):
    case = problem(
        implementation, [77, 0, 130, 64], s_q=s_q, kv_start=[3, 0, 65, 0], sinks=True, kv_dtype=kv_dtype
    )
    results = []
    for delivery in DELIVERIES:
        try:
            results.append(case.run(implementation, delivery))
        except NotImplementedError:
            assert not must_serve(implementation, case, delivery)
    if len(results) < 2:
        pytest.skip(f"{implementation} serves {len(results)} of the deliveries")
    first, *others = results
    case.check(*first)
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("s_q", [2, 8])
def test_queries_are_causal(implementation, s_q):
    """Lengths below s_q too: the first queries then sit before the first token and see nothing."""
    case = problem(implementation, [0, 1, 2, 5, 8, 64, 67, 129], s_q=s_q)
    case.check(*run(implementation, case))


@pytest.mark.parametrize("window, s_q", [(1, 1), (16, 1), (7, 4), (20, 40)])
def test_sliding_window(implementation, window, s_q):
    """Each query has a window of its own; what lies before the first query's is NaN in the pool."""
    case = problem(implementation, [0, 3, 16, 90, 128], window=window, s_q=s_q)
    case.check(*run(implementation, case))


@pytest.mark.parametrize("delivery", ["table", "stream"])
def test_window_and_kv_start(implementation, delivery):
    kv_end = np.array([100, 40, 64])
    case = problem(implementation, kv_end, window=20, s_q=6, kv_start=np.maximum(kv_end - 6 - 19, 0))
    case.check(*run(implementation, case, delivery))


@pytest.mark.parametrize("window", [None, 9])
def test_padded_chunk(implementation, window):
    """Right-padded chunks: what padding queries give is finite; the others are exact."""
    new = np.array([8, 3, 1, 0, 5])
    kv_end = np.array([8, 70, 1, 0, 200])
    case = problem(implementation, kv_end, s_q=8, q_start=kv_end - new, window=window, sinks=True)
    out, lse = run(implementation, case)
    case.check(out, lse)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("options", [{}, {"window": 12, "s_q": 3}])
def test_sinks(implementation, options):
    case = problem(implementation, EDGES, sinks=True, heads=6, **options)
    case.check(*run(implementation, case))


@pytest.mark.parametrize("sink", [-1e30, -80.0, 80.0, 200.0])
def test_extreme_sinks(implementation, sink):
    case = problem(implementation, [40, 0, 3], sinks=True)
    case = dataclasses.replace(case, options=case.options | {"sinks": np.full(4, sink, np.float32)})
    out, lse = run(implementation, case)
    want, want_lse = case.expected()
    close = 1e-4 if implementation == "xla" else 1e-2
    np.testing.assert_allclose(out, want, rtol=close, atol=max(1e-30, close * np.abs(want).max()))
    np.testing.assert_allclose(lse, want_lse, rtol=close / 10)


def test_logit_cap(implementation):
    case = problem(implementation, EDGES, logit_cap=2.0, sinks=True)
    case.check(*run(implementation, case))


@pytest.mark.parametrize("extent, s_q", [(1, 1), (10, 5), (300, 1)])
def test_relative_bias(implementation, extent, s_q):
    case = problem(implementation, [0, 4, 33, 120], bias_extent=extent, s_q=s_q, logit_cap=20.0)
    case.check(*run(implementation, case))


@pytest.mark.parametrize(
    "dtype, kv_dtype", [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float16")]
)
def test_dtypes(implementation, dtype, kv_dtype):
    case = problem(implementation, EDGES, dtype=dtype, kv_dtype=kv_dtype)
    case.check(*run(implementation, case))


@pytest.mark.parametrize(
    "options",
    [
        {"v_head_dim": 128},
        {"window": 20, "s_q": 3, "sinks": True},
        {"kv_heads": 1},
        {"heads": 32, "kv_heads": 16, "head_dim": 128, "page_size": 32},
        {"heads": 8, "head_dim": 192, "v_head_dim": 128, "window": 20},
        {"heads": 6, "kv_heads": 1, "head_dim": 256, "page_size": 128, "s_q": 2, "logit_cap": 3.0},
        {"heads": 64, "kv_heads": 8, "s_q": 2, "page_size": 64, "sinks": True},
    ],
    ids=str,
)
def test_float8_rows(implementation, options):
    case = problem(implementation, EDGES, kv_dtype="float8_e4m3fn", **options)
    case.check(*run(implementation, case))


def test_place_of_pages_does_not_matter(implementation):
    """The same rows at other places, in a wider table with other neighbours: the same bits."""
    case = problem(implementation, [500, 3, 64])
    again = problem(implementation, [500, 3, 64], spare_pages=40, blocks_per_page=9, offsets=(6, 3))
    assert not np.array_equal(case.pages, again.pages)
    for a, b in zip(run(implementation, case), run(implementation, again, extra_columns=9), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "delivery, kv_dtype", [("table", "float8_e4m3fn"), ("stream", None), ("virtual", None)]
)
def test_bad_ids_read_the_padding_page(implementation, delivery, kv_dtype):
    """Live columns with ids that name nothing read the zero rows of page 0, never a byte outside the pool."""
    case = problem(implementation, [64, 64], kv_dtype=kv_dtype)
    bad = (1, 3)
    source = spoil(case.source(delivery), bad)
    for column in bad:
        case.k[0][column * 16 : (column + 1) * 16] = 0
        case.v[0][column * 16 : (column + 1) * 16] = 0
    with may_decline(implementation, case, delivery):
        out, lse = case.run_on(case.pool, implementation, source)
    case.check(out, lse)


def test_block_offsets_are_run_time_operands(implementation):
    """One program reads every layer; K and V need not be neighbours."""
    layers = [
        problem(implementation, EDGES, offsets=o, blocks_per_page=6, seed=o[0])
        for o in ((0, 1), (2, 3), (5, 0))
    ]
    program = jax.jit(partial(gqa_decode, implementation=implementation, **layers[0].options))
    for case in layers:
        k, v = case.offsets
        arrays = jnp.asarray(case.q), jnp.asarray(case.pool), case.source("table")
        with may_decline(implementation, case):
            out, lse = program(*arrays, jnp.int32(k), jnp.int32(v))
        case.check(np.asarray(out, np.float64), np.asarray(lse, np.float64))
    assert program._cache_size() == 1


@pytest.mark.parametrize("delivery", ["table", "virtual"])
def test_small_batch_after_a_large_one(implementation, delivery):
    """One program of 8 lanes, on a GPU a captured one, of which 8, 3, 8, 1, 8 are live: lanes past the batch have length 0
    and absurd ids."""
    case = problem(implementation, [65, 1, 130, 64, 128, 7, 63, 90], window=70)
    program = jax.jit(
        partial(gqa_decode, implementation=implementation, **case.options), compiler_options=CAPTURED
    )
    for live in (8, 3, 8, 1, 8):
        lanes = np.arange(8) < live
        part = dataclasses.replace(
            case,
            kv_end=np.where(lanes, case.kv_end, 0).astype(np.int32),
            pages=np.where(lanes[:, None], case.pages, ABSURD[1]),
        )
        arrays = jnp.asarray(part.q), jnp.asarray(part.pool), part.source(delivery)
        with may_decline(implementation, case, delivery):
            out, lse = program(*arrays, jnp.int32(part.offsets[0]), jnp.int32(part.offsets[1]))
        part.check(np.asarray(out, np.float64), np.asarray(lse, np.float64))
    assert program._cache_size() == 1


def test_parts_merge_if_one_has_the_sink(implementation):
    whole = problem(implementation, [200, 64, 9, 0], sinks=True)
    parts = []
    for start, end in ((0, 8), (8, 70), (70, 200)):
        part = dataclasses.replace(
            whole,
            kv_start=np.minimum(start, whole.kv_end).astype(np.int32),
            kv_end=np.minimum(whole.kv_end, end).astype(np.int32),
            q_start=(whole.kv_end - 1).astype(np.int32),
            options=whole.options | ({} if start == 0 else {"sinks": None}),
        )
        parts.append(run(implementation, part))
    out, lse = merge_partials(*(jnp.asarray(np.stack(x), jnp.float32) for x in zip(*parts, strict=True)))
    whole.check(np.asarray(out, np.float64), np.asarray(lse, np.float64))


def test_a_distant_window_is_all_that_is_read(implementation):
    case = problem(implementation, [3000, 2500], window=100, heads=2, kv_heads=1)
    case.check(*run(implementation, case))


@cache
def very_long(kind: str) -> Case:
    """Of "xla" or another. Takes seconds and half a GiB: made once by the worker that has these tests."""
    return problem(kind, [100_000, 1, 99_999], heads=8, page_size=64, blocks_per_page=2, offsets=(0, 1))


@pytest.mark.gpu
@pytest.mark.xdist_group("GQA over 100,000 tokens")
@pytest.mark.parametrize("delivery", DELIVERIES)
def test_very_long_context(implementation, delivery):
    case = very_long("xla" if implementation == "xla" else "kernels")
    case.check(*run(implementation, case, delivery))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"head_dim": 64, "heads": 8, "sinks": True},
        {"head_dim": 32, "heads": 12, "kv_heads": 4, "s_q": 3, "window": 3000, "sinks": True},
        {"head_dim": 128, "heads": 16, "s_q": 8, "kv_heads": 1},
        {"head_dim": 256, "window": 3000, "s_q": 2},
        {"head_dim": 96, "heads": 12, "kv_heads": 12, "logit_cap": 3.0},
        {"head_dim": 512, "kv_heads": 1, "heads": 8},
    ],
    ids=str,
)
def test_cut_rows(implementation, options):
    """Rows that are cut between thread blocks and merged."""
    case = problem(
        implementation, [20_000, 0, 700, 9000], page_size=64, blocks_per_page=2, offsets=(0, 1), **options
    )
    case.check(*run(implementation, case, "virtual"))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_large_batch(implementation, head_dim):
    lengths = np.random.default_rng(0).integers(0, 400, 512)
    case = problem(implementation, lengths, heads=8, head_dim=head_dim, blocks_per_page=2, offsets=(0, 1))
    case.check(*run(implementation, case))


@pytest.mark.gpu
@pytest.mark.parametrize("delivery", DELIVERIES)
def test_rows_past_two_to_the_32_bytes(implementation, delivery):
    """Live pages at the far end of a pool of 6 GiB: no product of ids overflows."""
    case = problem(implementation, [300, 64], page_size=64, blocks_per_page=2, offsets=(0, 1))
    page = case.pool.size // case.num_pages
    high = (6 << 30) // page  # the copy of page p lies at page `high + p`
    # Compiled, so that there is one pool of this size at a time.
    fill = jax.jit(lambda last: jnp.concatenate([jnp.zeros(high * page, jnp.uint8), last]))
    absurd = np.isin(case.pages, ABSURD)
    moved = dataclasses.replace(
        case, pages=np.where(absurd, case.pages, case.pages + high), num_pages=case.num_pages + high
    )
    source = moved.source(delivery)
    with may_decline(implementation, case, delivery):
        out, lse = case.run_on(fill(case.pool), implementation, source)
    case.check(out, lse)


# Errors that are known when tracing.


def arguments(**changes):
    table = PageTable(jnp.ones((2, 3), jnp.int32), *[jnp.zeros(2, jnp.int32)] * 2, page_size=4)
    good = {
        "q": jnp.zeros((2, 1, 4, 64)), "buffer": jnp.zeros(4096, jnp.uint8), "source": table, "k_offset": 0,
        "v_offset": 1, "kv_dtype": "bfloat16", "num_kv_heads": 2, "sm_scale": 0.1,
    }  # fmt: skip
    return good | changes


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"kv_dtype": "int8"}, "int8"),
        ({"num_kv_heads": 3}, "heads 4, head_dim 64, v_head_dim 64, num_kv_heads 3"),
        ({"v_head_dim": 32}, "head_dim 64 and v_head_dim 32"),
        ({"buffer": jnp.zeros(4095, jnp.uint8)}, "4095 bytes is no whole number of blocks of 1024"),
        ({"kv_dtype": "float8_e4m3fn"}, "fp8 rows need scales"),
        ({"scales": KVScales(0, 1, 16)}, "bfloat16"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"window": 2**31}, "window must fit int32, got 2147483648"),
        ({"logit_cap": 0.0}, "logit_cap must be positive"),
        ({"sinks": jnp.zeros(2)}, r"sinks must be \[4\]"),
        ({"relative_bias": jnp.zeros((2, 1, 2, 9))}, r"relative_bias must be \[2, 1, 4, extent\]"),
        ({"q": jnp.zeros((3, 1, 4, 64))}, r"int32\[3\] to match q"),
        ({"q_start": jnp.zeros(3, jnp.int32)}, r"q_start must be int32\[2\]"),
        ({"implementation": "cutlass"}, "cutlass"),
    ],
)
def test_errors_name_the_numbers(changes, words):
    with pytest.raises(ValueError, match=words):
        gqa_decode(**arguments(**changes))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU serves it")
@pytest.mark.parametrize("name", ["triton", "mosaic"])
def test_named_implementation_does_not_fall_back(name):
    with pytest.raises(NotImplementedError, match=r"needs a (GPU of compute capability|Hopper GPU)"):
        gqa_decode(**arguments(implementation=name))


def test_another_class_is_no_source():
    with pytest.raises(TypeError, match="dict"):
        gqa_decode(**arguments(source={}))


# No copy of the pool.


def pool_program(q, pool, source, k, v):
    return gqa_decode(q, pool, source, k, v, kv_dtype="bfloat16", num_kv_heads=8, sm_scale=0.1, window=128)


def pool_arguments(blocks, rows=4, pages=16):
    int32 = partial(shape, dtype="int32")
    source = PageTable(int32((rows, pages)), int32((rows,)), int32((rows,)), page_size=64)
    pool = shape((blocks * 64 * 8 * 64 * 2,), "uint8")
    return shape((rows, 1, 64, 64), "bfloat16"), pool, source, int32(()), int32(())


def test_cpu_program_copies_no_pool():
    programs = [jax.jit(pool_program).lower(*pool_arguments(blocks)).compile() for blocks in (1000, 2000)]
    temps = [program.memory_analysis().temp_size_in_bytes for program in programs]
    assert temps[0] == temps[1]


@pytest.mark.deviceless
@requires_plugin
def test_gpu_program_copies_no_pool():
    temps = [compile_for(pool_program, *pool_arguments(blocks)).temp_bytes for blocks in (50_000, 100_000)]
    assert temps[0] == temps[1]
