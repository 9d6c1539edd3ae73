"""What every implementation of paged MLA attention must do.

`pytest -m gpu` on a machine with a GPU runs the GPU kernels through the same tests.
"""

import dataclasses
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_decode import merge_partials, mla_decode
from pallas_kernels.read_source import PageTable, VirtualPages
from tests.deviceless import compile_for, requires_plugin, shape
from tests.kernels.delivered import ABSURD, DELIVERIES, spoil
from tests.kernels.mla_case import make_case, must_serve
from tests.kernels.paged_case import CAPTURED, run_or_skip

gpu = pytest.mark.gpu
every_implementation = pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("triton", marks=gpu), pytest.param("mosaic", marks=gpu)]
)
# Of the reference, fp8 rows are tests of their own: it reads every dtype by one line.
every_kernel = pytest.mark.parametrize(
    "implementation, kv_dtype",
    [
        ("xla", "bfloat16"),
        *(
            pytest.param(name, dtype, marks=gpu)
            for name, dtype in product(("triton", "mosaic"), ("bfloat16", "float8_e4m3fn"))
        ),
    ],
)
EDGES = [0, 1, 63, 64, 65, 200]


run = partial(run_or_skip, must_serve)


@every_kernel
@pytest.mark.parametrize("heads", [1, 3, 9, 16, 31, 63, 64, 126, 128])
def test_head_counts(implementation, kv_dtype, heads):
    case = make_case(EDGES, heads=heads, kv_dtype=kv_dtype)
    case.check(*run(implementation, case))


@every_kernel
@pytest.mark.parametrize("page_size", [2, 16, 32])
def test_page_sizes(implementation, kv_dtype, page_size):
    case = make_case(EDGES, heads=8, page_size=page_size, kv_dtype=kv_dtype)
    case.check(*run(implementation, case))


@every_kernel
@pytest.mark.parametrize("page_size, s_q", [(1, 1), (1, 3), (8, 1), (64, 1), (64, 3), (128, 2)])
def test_deliveries_agree_to_the_bit(implementation, kv_dtype, page_size, s_q):
    """Lengths around the tiles, and windows that start anywhere in them."""
    case = make_case(
        [*EDGES, 77, 130, 100, 100, 64, 300, 9],
        kv_start=[0] * len(EDGES) + [3, 65, 1, 63, 64, 128, 8],
        heads=16,
        s_q=s_q,
        page_size=page_size,
        kv_dtype=kv_dtype,
    )
    results = {}
    for delivery in DELIVERIES:
        try:
            results[delivery] = case.run(implementation, delivery)
        except NotImplementedError:
            assert not must_serve(implementation, case, delivery)
    if not results:
        pytest.skip(f"{implementation} serves none of the deliveries")
    first, *others = results.values()
    case.check(*first)
    for other in others:
        np.testing.assert_array_equal(other[0], first[0])
        np.testing.assert_array_equal(other[1], first[1])


@every_kernel
@pytest.mark.parametrize("s_q", range(2, 9))
def test_queries_are_causal(implementation, kv_dtype, s_q):
    """Lengths below s_q too: the first queries then sit before the first token and see nothing."""
    case = make_case([0, 1, 2, 5, 8, 64, 67, 129], heads=4, s_q=s_q, kv_dtype=kv_dtype)
    case.check(*run(implementation, case))


@gpu
@every_kernel
@pytest.mark.parametrize("heads, s_q", [(9, 7), (63, 3), (128, 8)])
def test_drafts_of_many_heads(implementation, kv_dtype, heads, s_q):
    """Query lines that fill several tiles, the last one partly; deliveries give the same bits."""
    case = make_case([0, 2, 8, 64, 67, 200], heads=heads, s_q=s_q, kv_dtype=kv_dtype)
    results = run(implementation, case)
    case.check(*results)
    for a, b in zip(results, run(implementation, case, "virtual"), strict=True):
        np.testing.assert_array_equal(a, b)


@every_kernel
def test_padded_chunk(implementation, kv_dtype):
    """Right-padded chunks: q_start = kv_end - new_len. What padding queries give is finite; the others are exact."""
    new = np.array([8, 3, 1, 0, 5])
    kv_end = np.array([8, 70, 1, 0, 200])
    case = make_case(kv_end, heads=4, s_q=8, q_start=kv_end - new, kv_dtype=kv_dtype)
    out, lse = run(implementation, case)
    case.check(out, lse)
    assert np.isfinite(out).all()


@every_kernel
@pytest.mark.parametrize("cap", [5.0, 50.0])
def test_logit_cap(implementation, kv_dtype, cap):
    case = make_case(EDGES, heads=8, logit_cap=cap, kv_dtype=kv_dtype)
    case.check(*run(implementation, case))


@every_implementation
@pytest.mark.parametrize("delivery", DELIVERIES)
def test_float32(implementation, delivery):
    case = make_case(EDGES, heads=3, dtype="float32", page_size=16)
    case.check(*run(implementation, case, delivery))


@every_implementation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float32_queries_over_bfloat16_rows_and_the_reverse(implementation, dtype):
    other = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]
    case = make_case([70, 5], heads=3, dtype=dtype, kv_dtype=other)
    case.check(*run(implementation, case))


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_reference_reads_float8_rows(delivery):
    case = make_case(EDGES, heads=8, kv_dtype="float8_e4m3fn")
    case.check(*case.run("xla", delivery))


@every_implementation
def test_float8_scales_of_any_size(implementation):
    """Scales from 1e-6 to 10 side by side in a row; values stay of order 1."""
    case = make_case([200, 64, 300], heads=8, kv_dtype="float8_e4m3fn", log10_scales=(-6, 1))
    case.check(*run(implementation, case))


@every_kernel
@pytest.mark.parametrize("power", [-30, 30])
def test_queries_of_any_size(implementation, kv_dtype, power):
    """Far outside f16's range, with a softmax scale that brings the scores back."""
    case = make_case(EDGES, heads=8, kv_dtype=kv_dtype)
    far = dataclasses.replace(
        case,
        q=(case.q.astype(np.float32) * 2.0**power).astype(case.q.dtype),
        options={**case.options, "sm_scale": case.options["sm_scale"] * 2.0**-power},
    )
    far.check(*run(implementation, far))


@every_kernel
@pytest.mark.parametrize(
    "widths",
    [(40, 32, 48), (64, 64, 64), (160, 128, 160), (288, 256, 288)],
    ids=lambda w: "x".join(map(str, w)),
)
def test_small_models(implementation, kv_dtype, widths):
    qk_width, v_width, row_width = widths
    if kv_dtype == "float8_e4m3fn":
        row_width += 16  # for the scale
    case = make_case(
        EDGES,
        heads=4,
        qk_width=qk_width,
        v_width=v_width,
        row_width=row_width,
        page_size=16,
        kv_dtype=kv_dtype,
    )
    case.check(*run(implementation, case))


@every_kernel
def test_place_of_pages_does_not_matter(implementation, kv_dtype):
    """The same rows at other places, in a wider table with other neighbours: the same bits."""
    case = make_case([500, 3, 64], heads=16, kv_dtype=kv_dtype)
    again = make_case(
        [500, 3, 64], heads=16, spare_pages=40, blocks_per_page=5, block_offset=4, kv_dtype=kv_dtype
    )
    assert not np.array_equal(case.pages, again.pages)
    for a, b in zip(run(implementation, case), run(implementation, again, extra_columns=9), strict=True):
        np.testing.assert_array_equal(a, b)


@every_kernel
@pytest.mark.parametrize("delivery", DELIVERIES)
def test_bad_ids_read_the_padding_page(implementation, kv_dtype, delivery):
    """Live columns with ids that name nothing read the zero rows of page 0, never a byte outside the pool."""
    case = make_case([256, 256], heads=4, kv_dtype=kv_dtype)
    bad = (1, 3)
    source = spoil(case.source(delivery), bad)
    for column in bad:
        case.kv[0][column * 64 : (column + 1) * 64] = 0
    try:
        out, lse = case.run_on(case.pool, implementation, source)
    except NotImplementedError as reason:
        assert not must_serve(implementation, case, delivery)
        pytest.skip(f"{implementation} declines: {reason}")
    case.check(out, lse)


@every_implementation
def test_block_offset_is_a_run_time_operand(implementation):
    """One program reads every layer."""
    case = make_case(EDGES, heads=4, block_offset=0)
    rng = np.random.default_rng(3)
    blocks = case.pool.reshape(case.num_pages, case.blocks_per_page, -1)
    layers = [case]
    for layer in range(1, case.blocks_per_page):
        blocks[:, layer] = blocks[:, layer - 1]
        live = blocks[:, layer].view(jnp.bfloat16)
        factor = np.where(np.isnan(live.astype(np.float32)), 1, rng.choice([-2.0, -0.5, 0.5, 2.0])).astype(
            live.dtype
        )
        live *= factor
        scale = np.unique(factor.astype(np.float64))
        scale = scale[scale != 1]
        assert scale.size == 1
        layers.append(
            dataclasses.replace(layers[-1], kv=[kv * scale for kv in layers[-1].kv], block_offset=layer)
        )
    program = jax.jit(partial(mla_decode, implementation=implementation, **case.options))
    q, pool, source = jnp.asarray(case.q), jnp.asarray(case.pool), case.source("table")
    for layer in layers:
        out, lse = program(q, pool, source, jnp.int32(layer.block_offset))
        layer.check(np.asarray(out, np.float64), np.asarray(lse, np.float64))
    assert program._cache_size() == 1


@every_kernel
@pytest.mark.parametrize("delivery", ["table", "virtual"])
def test_small_batch_after_a_large_one(implementation, kv_dtype, delivery):
    """One program of 8 lanes, on a GPU a captured one, of which 8, 3, 8, 1, 8 are live: lanes past the batch have length 0
    and absurd ids."""
    case = make_case([65, 1, 300, 64, 128, 7, 63, 90], heads=8, kv_dtype=kv_dtype)
    replay(case, implementation, delivery, (8, 3, 8, 1, 8))


@gpu
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("heads", [16, 35, 128])
def test_replays_whose_rows_are_merged_early(heads, kv_dtype):
    """Above 8 rows, or 4, Mosaic counts the parts of a row: counts of the replay before must not pass for this one's."""
    case = make_case([65, 1, 3000, 64, 128, 7, 2000, 90, 500, 0, 1500, 64], heads=heads, kv_dtype=kv_dtype)
    replay(case, "mosaic", "table", (12, 5, 12, 1, 12))


@gpu
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("heads", [3, 32, 35, 128])
@pytest.mark.parametrize("lengths", [[20_000], [70, 30_000, 0], [9000] * 5])
def test_few_rows_in_many_parts(lengths, heads, kv_dtype):
    case = make_case(lengths, heads=heads, kv_dtype=kv_dtype)
    case.check(*run("mosaic", case))


def replay(case, implementation: str, delivery: str, batches) -> None:
    """Runs and checks one captured program of which so many rows are live."""
    program = jax.jit(
        partial(mla_decode, implementation=implementation, **case.options), compiler_options=CAPTURED
    )
    for live in batches:
        lanes = np.arange(len(case.kv_end)) < live
        part = dataclasses.replace(
            case,
            kv_end=np.where(lanes, case.kv_end, 0).astype(np.int32),
            pages=np.where(lanes[:, None], case.pages, ABSURD[1]),
        )
        q, pool = jnp.asarray(part.q), jnp.asarray(part.pool)
        out, lse = program(q, pool, part.source(delivery), jnp.int32(1))
        part.check(np.asarray(out, np.float64), np.asarray(lse, np.float64))
    assert program._cache_size() == 1


@every_kernel
def test_long_context(implementation, kv_dtype):
    case = make_case([5000, 17, 2048], heads=2, kv_start=[0, 0, 1900], kv_dtype=kv_dtype)
    case.check(*run(implementation, case))


@cache
def very_long(kv_dtype: str):
    """Takes ten seconds and a GiB: made once by the worker that has these tests."""
    return make_case([100_000, 1, 99_999], heads=16, blocks_per_page=1, block_offset=0, kv_dtype=kv_dtype)


@gpu
@every_kernel
@pytest.mark.xdist_group("MLA over 100,000 tokens")
@pytest.mark.parametrize("delivery", DELIVERIES)
def test_very_long_context(implementation, kv_dtype, delivery):
    case = very_long(kv_dtype)
    case.check(*run(implementation, case, delivery))


@gpu
@every_kernel
def test_large_batch(implementation, kv_dtype):
    case = make_case(np.random.default_rng(0).integers(0, 400, 512), heads=32, kv_dtype=kv_dtype)
    case.check(*run(implementation, case))


@gpu
@every_kernel
@pytest.mark.parametrize("delivery", DELIVERIES)
def test_rows_past_two_to_the_32_bytes(implementation, kv_dtype, delivery):
    """Live pages at both ends of a pool of 6 GiB: no product of ids overflows."""
    case = make_case([300, 64], heads=16, blocks_per_page=1, block_offset=0, kv_dtype=kv_dtype)
    block = case.pool.size // case.num_pages
    high = (6 << 30) // block  # the copy of page p lies at page `high + p`
    pages = np.where(case.pages == ABSURD[1], case.pages, case.pages + high)
    total = high * block + case.pool.size
    moved = dataclasses.replace(case, pages=pages, pool=np.broadcast_to(np.uint8(0), total))
    # Compiled, so that there is one pool of this size at a time.
    fill = jax.jit(lambda last: jnp.concatenate([jnp.zeros(high * block, jnp.uint8), last]))
    try:
        out, lse = moved.run_on(fill(case.pool), implementation, moved.source(delivery))
    except NotImplementedError as reason:
        assert not must_serve(implementation, case, delivery)
        pytest.skip(f"{implementation} declines: {reason}")
    case.check(out, lse)


# Merging of partial results.


def test_merge_of_parts_is_the_whole():
    whole = make_case([200, 64, 9, 0], heads=4, dtype="float32")
    parts = []
    for start, end in ((0, 64), (64, 70), (70, 200)):
        kv_start = np.minimum(start, whole.kv_end)
        part = dataclasses.replace(
            whole,
            kv_start=kv_start.astype(np.int32),
            kv_end=np.minimum(whole.kv_end, end),
            q_start=(whole.kv_end - 1).astype(np.int32),
        )
        parts.append(part.run("xla"))
    out, lse = merge_partials(*(jnp.asarray(np.stack(x), jnp.float32) for x in zip(*parts, strict=True)))
    whole.check(np.asarray(out, np.float64), np.asarray(lse, np.float64))


@pytest.mark.parametrize("empty", [np.inf, -np.inf])
def test_merge_ignores_empty_parts(empty):
    outs = jnp.array([[[1.0, 2.0], [np.nan, np.nan]], [[np.nan, np.nan], [np.nan, np.nan]]])
    lses = jnp.array([[0.5, empty], [empty, empty]])
    out, lse = merge_partials(outs, lses)
    np.testing.assert_array_equal(out, [[1, 2], [0, 0]])
    np.testing.assert_array_equal(lse, [0.5, np.inf])


def test_merge_far_apart():
    """exp of either lse alone would overflow or vanish."""
    out, lse = merge_partials(jnp.array([[1.0], [3.0]]), jnp.array([2000.0, 2000.0 + np.log(3)]))
    np.testing.assert_allclose(out, [2.5], rtol=1e-3)  # f32 keeps 2000 + log 3 to 1e-4
    np.testing.assert_allclose(lse, 2000 + np.log(4), rtol=1e-6)


# Errors that are known when tracing.

GOOD = {"kv_dtype": "bfloat16", "row_width": 64, "v_width": 32, "sm_scale": 0.1}


def arguments(**changes):
    table = PageTable(jnp.ones((2, 3), jnp.int32), *[jnp.zeros(2, jnp.int32)] * 2, page_size=4)
    good = {
        "q": jnp.zeros((2, 1, 4, 64)),
        "buffer": jnp.zeros(4096, jnp.uint8),
        "source": table,
        "block_offset": 0,
    }
    return {**good, **GOOD, **changes}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"kv_dtype": "float16"}, "float16"),
        ({"buffer": jnp.zeros(4095, jnp.uint8)}, "4095 bytes is no whole number of blocks of 512"),
        ({"buffer": jnp.zeros((8, 512), jnp.uint8)}, r"\[8, 512\]"),
        ({"q": jnp.zeros((3, 1, 4, 64))}, r"int32\[3\] to match q"),
        ({"q": jnp.zeros((2, 1, 4, 80))}, "qk_width 80, row_width 64"),
        ({"v_width": 65}, "v_width 65"),
        ({"kv_dtype": "float8_e4m3fn"}, "room for an f32 scale"),
        ({"logit_cap": -1.0}, "logit_cap must be positive, got -1"),
        ({"q_start": jnp.zeros(3, jnp.int32)}, r"q_start must be int32\[2\]"),
        ({"implementation": "cutlass"}, "cutlass"),
        (
            {"source": PageTable(jnp.ones((2, 3)), *[jnp.zeros(2, jnp.int32)] * 2, page_size=4)},
            r"float32\[2, 3\]",
        ),
        (
            {"source": VirtualPages(*[jnp.zeros(2, jnp.int32)] * 5, page_size=4, blocks_per_page=1)},
            r"req_to_page int32\[2\]",
        ),
    ],
)
def test_errors_name_the_numbers(changes, words):
    with pytest.raises(ValueError, match=words):
        mla_decode(**arguments(**changes))


def test_another_class_is_no_source():
    with pytest.raises(TypeError, match="dict"):
        mla_decode(**arguments(source={}))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU serves it")
@pytest.mark.parametrize("name", ["triton", "mosaic"])
def test_named_implementation_does_not_fall_back(name):
    with pytest.raises(
        NotImplementedError, match=rf"'{name}' needs a (Hopper GPU|GPU of compute capability 8.0)"
    ):
        mla_decode(**arguments(implementation=name))


# No copy of the pool.


def pool_arguments(pool_bytes, rows=4, pages=16):
    int32 = partial(shape, dtype="int32")
    source = PageTable(int32((rows, pages)), int32((rows,)), int32((rows,)), page_size=64)
    return shape((rows, 1, 16, 576), "bfloat16"), shape((pool_bytes,), "uint8"), source, int32(())


def call_xla(q, pool, source, block_offset):
    return mla_decode(
        q,
        pool,
        source,
        block_offset,
        kv_dtype="bfloat16",
        row_width=576,
        v_width=512,
        sm_scale=0.1,
        implementation="xla",
    )


def test_cpu_program_copies_no_pool():
    block = 64 * 576 * 2
    temps = []
    for blocks in (1000, 2000):
        program = jax.jit(call_xla).lower(*pool_arguments(blocks * block)).compile()
        temps.append(program.memory_analysis().temp_size_in_bytes)
    assert temps[0] == temps[1]


@pytest.mark.deviceless
@requires_plugin
def test_gpu_program_copies_no_pool():
    block = 64 * 576 * 2
    temps = [
        compile_for(call_xla, *pool_arguments(blocks * block)).temp_bytes for blocks in (50_000, 100_000)
    ]
    assert temps[0] == temps[1]
