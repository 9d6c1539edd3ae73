"""What every implementation of paged GQA attention of chunks must do."""

import dataclasses
from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import implementations
from pallas_kernels.gqa_decode import KVScales, gqa_decode
from pallas_kernels.gqa_prefill import gqa_prefill
from pallas_kernels.read_source import PageTable, TokenStream, VirtualPages
from tests.deviceless import CAPTURE_LOOPS, TARGETS, compile_for, requires_plugin, shape
from tests.kernels.chunk_case import Chunk, make_chunk
from tests.kernels.chunk_mosaic_interpreter import CASES
from tests.kernels.delivered import ABSURD, DELIVERIES, spoil
from tests.kernels.own_process import output_of
from tests.kernels.paged_case import run_or_skip

IMPLEMENTATIONS = [
    "xla",
    pytest.param("triton", marks=pytest.mark.gpu),
    pytest.param("mosaic", marks=pytest.mark.gpu),
]
# No prefix, one past page and block borders, a single new token, a row without any, one that fills the chunk.
CACHED, NEW, TOKENS = [0, 63, 129, 40, 17, 0], [40, 1, 33, 0, 24, 1], 40


def problem(implementation: str, cached=CACHED, new=NEW, tokens: int = TOKENS, **options) -> Chunk:
    """XLA computes in float32, and is asked for 1e-5; the kernel is asked in bfloat16."""
    return make_chunk(
        cached, new, tokens, **{"dtype": "float32" if implementation == "xla" else "bfloat16"} | options
    )


def must_serve(implementation: str, case: Chunk, delivery: str) -> bool:
    """May the implementation not decline this problem on an H200? (Others it may, with a reason.)"""
    if implementation == "mosaic":
        head_dim, kv_dtype = case.q.shape[3], case.options["kv_dtype"]
        return (
            delivery != "stream"
            and case.q.dtype == kv_dtype == jnp.bfloat16
            and case.page_size in (8, 16, 32, 64, 128)
            and head_dim == case.options["v_head_dim"]
            and head_dim in (64, 128, 256)
            and case.options["sm_scale"] > 0
            and case.options["relative_bias"] is None
        )
    return True


run = partial(run_or_skip, must_serve)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 4), (6, 2), (16, 1), (5, 1)], ids=str)
def test_groups(implementation, heads, kv_heads):
    case = problem(implementation, heads=heads, kv_heads=kv_heads)
    case.check(*run(implementation, case))


@pytest.mark.parametrize(
    "head_dim, v_head_dim", [(96, 96), (128, 128), (256, 256), (512, 512), (192, 128), (80, 512), (96, 256)]
)
def test_head_dims(implementation, head_dim, v_head_dim):
    case = problem(implementation, head_dim=head_dim, v_head_dim=v_head_dim)
    case.check(*run(implementation, case))


def test_k_then_v_rows_of_one_width(implementation):
    case = problem(implementation, one_row=True)
    case.check(*run(implementation, case))


@pytest.mark.parametrize(
    "page_size, delivery",
    [(1, "table"), (1, "stream"), (1, "virtual"), (8, "table"), (64, "virtual"), (128, "stream")],
)
def test_page_sizes(implementation, page_size, delivery):
    case = problem(implementation, page_size=page_size)
    case.check(*run(implementation, case, delivery))


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
def test_deliveries_agree_to_the_bit(implementation, page_size, kv_dtype):
    """A row may begin past 0, here also inside a page and past a whole block."""
    case = problem(
        implementation, kv_start=[0, 3, 70, 0, 17, 0], sinks=True, page_size=page_size, kv_dtype=kv_dtype
    )
    forms = [form for form in DELIVERIES if implementation != "mosaic" or form != "stream"]
    first, *others = [run(implementation, case, delivery) for delivery in forms]
    case.check(*first)
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("tokens", [9, 100])
def test_lengths_of_chunks(implementation, tokens):
    """A short chunk after a long prefix; a chunk of many tiles, whose last ones are padding in some rows."""
    case = problem(implementation, [300, 0, 64], [tokens, tokens // 3, 0], tokens, heads=8)
    case.check(*run(implementation, case))


@pytest.mark.parametrize("window, page_size", [(1, 16), (20, 64), (64, 16), (150, 64)])
def test_sliding_window(implementation, window, page_size):
    """Each query has a window of its own; what lies before the first query's is NaN in the pool."""
    case = problem(implementation, [0, 90, 300], [40, 30, 40], window=window, page_size=page_size)
    case.check(*run(implementation, case))


@pytest.mark.parametrize("delivery", ["table", "stream"])
def test_window_and_kv_start(implementation, delivery):
    cached = np.array([100, 0, 64])
    case = problem(implementation, cached, [40, 21, 7], window=20, kv_start=np.maximum(cached - 19, 0))
    case.check(*run(implementation, case, delivery))


@pytest.mark.parametrize("options", [{}, {"window": 12}])
def test_sinks(implementation, options):
    case = problem(implementation, sinks=True, heads=6, **options)
    case.check(*run(implementation, case))


@pytest.mark.parametrize("sink", [-1e30, -80.0, 80.0, 200.0])
def test_extreme_sinks(implementation, sink):
    case = problem(implementation, [40, 0], [0, 24], 24, sinks=True)
    case = dataclasses.replace(case, options=case.options | {"sinks": np.full(4, sink, np.float32)})
    out, lse = run(implementation, case)
    want, want_lse = case.expected()
    close = 1e-4 if implementation == "xla" else 1e-2
    np.testing.assert_allclose(out, want, rtol=close, atol=max(1e-30, close * np.abs(want).max()))
    np.testing.assert_allclose(lse, want_lse, rtol=close / 10)


def test_logit_cap(implementation):
    case = problem(implementation, logit_cap=2.0, sinks=True)
    case.check(*run(implementation, case))


@pytest.mark.parametrize("extent", [1, 10, 100, 400])
def test_relative_bias(implementation, extent):
    case = problem(implementation, bias_extent=extent, logit_cap=20.0)
    case.check(*run(implementation, case))


def test_negative_scale(implementation):
    case = problem(implementation)
    case = dataclasses.replace(case, options=case.options | {"sm_scale": -0.2})
    case.check(*run(implementation, case))


@pytest.mark.parametrize("dtype, kv_dtype", [("float16", "float16"), ("float32", "bfloat16")])
def test_dtypes(implementation, dtype, kv_dtype):
    case = problem(implementation, dtype=dtype, kv_dtype=kv_dtype)
    if implementation == "triton" and dtype == "float32":
        with pytest.raises(NotImplementedError, match="got float32 and bfloat16"):
            case.run(implementation)
    else:
        case.check(*run(implementation, case))


@pytest.mark.parametrize(
    "options", [{"v_head_dim": 128}, {"window": 20, "sinks": True, "page_size": 1}, {"kv_heads": 1, "page_size": 64}]
)  # fmt: skip
def test_float8_rows(implementation, options):
    case = problem(implementation, kv_dtype="float8_e4m3fn", **options)
    case.check(*run(implementation, case))


def test_place_of_pages_does_not_matter(implementation):
    """The same rows at other places, in a wider table with other neighbours: the same bits."""
    case = problem(implementation)
    again = problem(implementation, spare_pages=40, blocks_per_page=9, offsets=(6, 3))
    assert not np.array_equal(case.pages, again.pages)
    for a, b in zip(run(implementation, case), run(implementation, again, extra_columns=9), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "delivery, page_size", [("table", 16), ("table", 64), ("stream", 64), ("virtual", 64)]
)
def test_bad_ids_read_the_padding_page(implementation, delivery, page_size):
    """Live columns with ids that name nothing read the zero rows of page 0, never a byte outside the pool."""
    cached = 4 * page_size - 24
    case = problem(implementation, [cached, cached], [24, 24], 24, page_size=page_size)
    if not must_serve(implementation, case, delivery):
        pytest.skip(f"{implementation} takes no {delivery}")
    bad = (1, 3)  # columns of row 0
    source = spoil(case.source(delivery), bad)
    for column in bad:
        case.k[0][column * page_size : (column + 1) * page_size] = 0
        case.v[0][column * page_size : (column + 1) * page_size] = 0
    case.check(*case.run_on(case.pool, implementation, source))


def test_ids_that_end_early(implementation):
    """A table of fewer columns than kv_end: what it does not name is not seen, by any query."""
    case = problem(implementation, [100, 8], [40, 24], heads=2)
    cut = dataclasses.replace(case, pages=case.pages[:, :7])
    out, lse = run(implementation, cut)
    # Queries 12 to 39 of row 0 lie past the 112 positions that it names: their own tokens are no keys of theirs.
    k, v, q = case.k[0][:112, 0], case.v[0][:112, 0], case.q[0, 12:, 0].astype(np.float64)
    s = q @ k.T * case.options["sm_scale"]
    p = np.exp(s - s.max(axis=1, keepdims=True))
    want = (p / p.sum(axis=1, keepdims=True)) @ v
    tolerance = 1e-5 if implementation == "xla" else 3e-3
    assert np.linalg.norm(out[0, 12:, 0] - want) <= tolerance * np.linalg.norm(want)
    want_lse = s.max(axis=1) + np.log(p.sum(axis=1))
    np.testing.assert_allclose(lse[0, 12:, 0], want_lse, atol=tolerance)


def test_one_program_serves_layers_and_batches(implementation):
    """Offsets, lengths and starts are run-time operands: a small batch after a large one, other layers."""
    options = {"blocks_per_page": 6, "window": 70}
    layers = [
        problem(implementation, [65, 0, 130, 5], [40, 7, 40, 9], offsets=o, seed=o[0], **options)
        for o in ((0, 1), (2, 3), (5, 0))
    ]
    program = jax.jit(partial(gqa_prefill, implementation=implementation, **layers[0].options))
    for case, live in ((layers[0], 4), (layers[1], 1), (layers[2], 4), (layers[0], 2)):
        lanes = np.arange(4) < live
        part = dataclasses.replace(
            case,
            kv_end=np.where(lanes, case.kv_end, 0).astype(np.int32),
            pages=np.where(lanes[:, None], case.pages, ABSURD[1]),
        )
        arrays = jnp.asarray(part.q), jnp.asarray(part.pool), part.source("table")
        k, v = part.offsets
        out, lse = program(*arrays, jnp.int32(k), jnp.int32(v), jnp.asarray(part.q_start))
        part.check(np.asarray(out, np.float64), np.asarray(lse, np.float64))
    assert program._cache_size() == 1


@pytest.mark.parametrize("decoder", ["xla", pytest.param("triton", marks=pytest.mark.gpu),
                                     pytest.param("mosaic", marks=pytest.mark.gpu)])  # fmt: skip
def test_decode_goes_on_where_a_chunk_ended(implementation, decoder):
    """The last query of a chunk, asked for as a chunk and as a step of decode: one answer."""
    options = {"sinks": True, "window": 100, "heads": 8, "kv_heads": 1, "head_dim": 128}
    case = problem(implementation, [0, 200, 64], [40, 17, 1], dtype="bfloat16", **options)
    out, lse = run(implementation, case)
    last = case.kv_end - case.q_start - 1
    rows = np.arange(3)
    try:
        queries = case.q[rows, last][:, None]
        offsets = map(np.int32, case.offsets)
        step, step_lse = dataclasses.replace(case, q=queries).call(
            gqa_decode, decoder, queries, case.pool, case.source("table"), *offsets
        )
    except NotImplementedError as reason:
        assert decoder == "mosaic"
        pytest.skip(str(reason))
    one, other = out[rows, last], step[:, 0]
    assert np.linalg.norm(one - other) <= 5e-3 * np.linalg.norm(other)
    np.testing.assert_allclose(lse[rows, last], step_lse[:, 0], atol=5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"heads": 16, "kv_heads": 2, "head_dim": 128},
        {"heads": 8, "kv_heads": 1, "head_dim": 64, "window": 128, "sinks": True},
        {"heads": 4, "kv_heads": 2, "head_dim": 256, "logit_cap": 10.0},
        {"heads": 7, "kv_heads": 1, "head_dim": 128, "window": 200, "logit_cap": 5.0},
        {"heads": 2, "kv_heads": 1, "head_dim": 512},
        {"heads": 4, "kv_heads": 2, "bias_extent": 128},
    ],
    ids=str,
)
def test_long_chunks(implementation, options):
    """Every kind of block: before all windows, whole, cut by a window or the diagonal, in range of the bias."""
    case = problem(
        implementation, [1000, 0, 77], [500, 333, 4], 500, page_size=64, blocks_per_page=2, offsets=(0, 1),
        **options,
    )  # fmt: skip
    case.check(*run(implementation, case, "virtual"))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"window": 3000, "sinks": True}], ids=str)
def test_short_chunk_after_a_long_prefix(implementation, options):
    """So few tiles of queries that blocks share the positions of one."""
    case = problem(
        implementation, [5000, 4097, 0], [17, 1, 3], 17, heads=8, kv_heads=1, page_size=64, blocks_per_page=2,
        offsets=(0, 1), **options,
    )  # fmt: skip
    case.check(*run(implementation, case, "virtual"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"heads": 16, "head_dim": 64, "sinks": True, "window": 70},
        {"heads": 24, "head_dim": 128, "sinks": True},
        {"heads": 8, "head_dim": 256, "logit_cap": 5.0, "page_size": 64},
    ],
    ids=str,
)
def test_more_tiles_than_multiprocessors(implementation, options):
    """Where tiles fill the card, Mosaic deals no tile's positions to several blocks: results come from one launch."""
    case = problem(
        implementation, [*CACHED, 200, 0, 5, 64, 0, 3], [*NEW, 40, 17, 40, 2, 33, 0], kv_heads=8, **options
    )
    case.check(*run(implementation, case))


@pytest.mark.gpu
@pytest.mark.parametrize("delivery", DELIVERIES)
def test_rows_past_two_to_the_32_bytes(implementation, delivery):
    """Live pages at the far end of a pool of 6 GiB: no product of ids overflows."""
    case = problem(implementation, page_size=64, blocks_per_page=2, offsets=(0, 1))
    if not must_serve(implementation, case, delivery):
        pytest.skip(f"{implementation} takes no {delivery}")
    page = case.pool.size // case.num_pages
    high = (6 << 30) // page  # the copy of page p lies at page `high + p`
    # Compiled, so that there is one pool of this size at a time.
    fill = jax.jit(lambda last: jnp.concatenate([jnp.zeros(high * page, jnp.uint8), last]))
    absurd = np.isin(case.pages, ABSURD)
    moved = dataclasses.replace(
        case, pages=np.where(absurd, case.pages, case.pages + high), num_pages=case.num_pages + high
    )
    case.check(*case.run_on(fill(case.pool), implementation, moved.source(delivery)))


# Errors that are known when tracing.


def arguments(**changes):
    table = PageTable(jnp.ones((2, 3), jnp.int32), *[jnp.zeros(2, jnp.int32)] * 2, page_size=4)
    good = {
        "q": jnp.zeros((2, 9, 4, 64)), "buffer": jnp.zeros(4096, jnp.uint8), "source": table, "k_offset": 0,
        "v_offset": 1, "q_start": jnp.zeros(2, jnp.int32), "kv_dtype": "bfloat16", "num_kv_heads": 2, "sm_scale": 0.1,
    }  # fmt: skip
    return good | changes


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_kv_heads": 3}, "heads 4, head_dim 64, v_head_dim 64, num_kv_heads 3"),
        ({"sinks": jnp.zeros(2)}, r"sinks must be \[4\]"),
        ({"relative_bias": jnp.zeros((2, 1, 4, 9))}, r"relative_bias must be \[2, 9, 4, extent\]"),
        ({"q_start": jnp.zeros(3, jnp.int32)}, r"q_start must be int32\[2\]"),
        ({"implementation": "cutlass"}, r"'cutlass' is not one of \['mosaic', 'triton', 'xla'\]"),
    ],
)
def test_errors_name_the_numbers(changes, words):
    with pytest.raises(ValueError, match=words):
        gqa_prefill(**arguments(**changes))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU serves it")
def test_named_implementation_does_not_fall_back():
    with pytest.raises(NotImplementedError, match="needs a GPU of compute capability"):
        gqa_prefill(**arguments(implementation="triton"))


# What compilers make of it.


def program_arguments(
    heads, kv_heads, width, *, source="table", tokens=256, rows=8, pool_blocks=1000, columns=64
):
    int32 = partial(shape, dtype="int32")
    bounds = int32((rows,)), int32((rows,))
    sources = {
        "table": lambda: PageTable(int32((rows, columns)), *bounds, page_size=64),
        "stream": lambda: TokenStream(int32((64 * columns,)), int32((rows + 1,)), *bounds, page_size=1),
        "virtual": lambda: VirtualPages(
            int32((256, columns)), bounds[0], int32((10_001,)), *bounds, page_size=16, blocks_per_page=27
        ),
    }
    pool = shape((pool_blocks * 64 * kv_heads * width * 2,), "uint8")
    q = shape((rows, tokens, heads, width), "bfloat16")
    return q, pool, sources[source](), int32(()), int32(()), int32((rows,))


def test_temporaries_follow_the_chunk():
    """XLA: neither a pool of twice the bytes nor rows of 16 times the pages takes more; a chunk twice as long may."""

    def call(*args):
        return gqa_prefill(
            *args, kv_dtype="bfloat16", num_kv_heads=8, sm_scale=0.1, window=128, implementation="xla"
        )

    temps = []
    for changes in ({}, {"pool_blocks": 2000}, {"columns": 1024}):
        program = jax.jit(call).lower(*program_arguments(64, 8, 64, tokens=32, **changes)).compile()
        temps.append(program.memory_analysis().temp_size_in_bytes)
    assert temps[0] == temps[1] == temps[2]
    q = 8 * 32 * 64 * 64 * 4  # f32
    assert temps[0] <= 12 * q


def mosaic(**options):
    """A call of good shapes, which `program_arguments` have, by the Mosaic kernel."""
    return partial(
        gqa_prefill, **{"kv_dtype": "bfloat16", "sm_scale": 0.1, "implementation": "mosaic"} | options
    )


@pytest.mark.deviceless
@requires_plugin
@pytest.mark.parametrize(
    "heads, kv_heads, width, source, options",
    [
        (32, 8, 128, "table", {}),
        (64, 8, 64, "virtual", {"window": 128, "logit_cap": 30.0}),
        (16, 4, 256, "table", {}),
        (12, 2, 256, "virtual", {"window": 1024, "logit_cap": 30.0}),
    ],
)
def test_mosaic_fits_the_gpu(heads, kv_heads, width, source, options, ptxas_reports):
    """One launch and the count of items beside it; no register spilled, no WGMMA that waits for the one before."""
    program = compile_for(
        mosaic(num_kv_heads=kv_heads, **options), *program_arguments(heads, kv_heads, width, source=source)
    )
    assert program.temp_bytes <= 1024
    assert [thunk.kind for thunk in program.launches].count("kCustomCall") == 1
    (report,) = ptxas_reports()
    assert " 0 bytes spill stores" in report
    assert "serialized" not in report


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"source": "stream"}, "no token stream"),
        ({"width": 96}, "must be 64, 128, 256 wide alike, got 96 and 96"),
        ({"heads": 130, "kv_heads": 2}, "at most 64 heads may share a KV head, got 65"),
        ({"sm_scale": -1.0}, "sm_scale must be positive, got -1"),
        ({"bias": True}, "adds no relative bias"),
    ],
    ids=str,
)
def test_mosaic_declines(changes, words, named_for_hopper):
    shapes = {"heads": 8, "kv_heads": 2, "width": 64, "source": "table"} | changes
    options = {"sm_scale": shapes.pop("sm_scale", 0.1)}
    bias = shape((8, 256, shapes["heads"], 9), "bfloat16") if shapes.pop("bias", False) else None
    call = mosaic(num_kv_heads=shapes["kv_heads"], **options)
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(
            lambda bias, *args: call(*args, relative_bias=bias), bias, *program_arguments(**shapes)
        )


@pytest.mark.parametrize(
    "changes, name",
    [({}, "mosaic"), ({"source": "virtual"}, "mosaic"), ({"source": "stream"}, "triton"), ({"width": 96}, "triton")],
    ids=str,
)  # fmt: skip
def test_what_runs_on_hopper_where_none_is_named(changes, name, named_for_hopper, monkeypatch):
    """The first that does not decline: Mosaic is traced, what would come after it stands for itself."""
    served, load = [], implementations._load

    def other(q, *_, **__):
        served.append("triton")
        return q, q[..., 0].astype(jnp.float32)

    monkeypatch.setattr(
        implementations, "_load", lambda module, f: load(module, f) if "mosaic" in module else other
    )
    shapes = {"heads": 8, "kv_heads": 2, "width": 64, "source": "table"} | changes
    call = mosaic(num_kv_heads=2, implementation=None)
    out, lse = jax.eval_shape(call, *program_arguments(**shapes))
    assert (out.shape, lse.shape) == ((8, 256, 8, shapes["width"]), (8, 256, 8))
    assert (served or ["mosaic"]) == [name]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if i else ()) for i, name in enumerate(CASES)]
)
def test_mosaic_kernel_in_the_interpreter(name):
    output = output_of("chunk_mosaic_interpreter", name, devices=16)
    assert "right" in output
    assert "RACE DETECTED" not in output


requires_triton = pytest.mark.skipif(
    find_spec("jax_triton") is None or find_spec("triton") is None, reason="jax-triton is absent"
)
# Bytes of shared memory that one block may ask for (CUDA C++ Programming Guide, compute capabilities 8.0 to 10.0).
SHARED_MEMORY = {"h200": 227 << 10, "a100": 163 << 10, "rtx4090": 99 << 10, "b200": 227 << 10}


@pytest.fixture
def artifacts(tmp_path, monkeypatch):
    """Folder where jax-triton leaves what it compiles."""
    from jax_triton import triton_lib

    monkeypatch.setattr(triton_lib, "_JAX_TRITON_DUMP_DIR", str(tmp_path))
    if hasattr(triton_lib, "_COMPILED_KERNEL_CACHE"):  # 0.3.1
        monkeypatch.setattr(triton_lib, "_COMPILED_KERNEL_CACHE", {})
    return tmp_path


@pytest.mark.deviceless
@requires_plugin
@requires_triton
@pytest.mark.parametrize(
    "target, heads, kv_heads, width",
    [
        *((target, 32, 8, 128) for target in TARGETS),
        *((target, 4, 1, 512) for target in TARGETS),
        ("h200", 16, 4, 256),
        ("rtx4090", 16, 4, 256),
    ],
)
def test_fits_shared_memory(target, heads, kv_heads, width, artifacts):
    call = partial(
        gqa_prefill, kv_dtype="bfloat16", num_kv_heads=kv_heads, sm_scale=0.1, implementation="triton"
    )
    program = compile_for(call, *program_arguments(heads, kv_heads, width), target=target)
    assert [thunk.kind for thunk in program.launches] == ["kCustomCall"]
    (info,) = artifacts.glob("*/attend.compile_info")
    assert int(info.read_text().rsplit(":", 1)[1]) <= SHARED_MEMORY[target]


@pytest.mark.deviceless
@requires_plugin
@requires_triton
@pytest.mark.parametrize("source", ["table", "stream", "virtual"])
def test_triton_needs_no_temporaries(source):
    """Every source; fp8, window, sinks, cap: one launch that is captured."""
    scales = KVScales(shape((), "int32"), shape((), "int32"), 16)

    def call(q, pool, source, k, v, q_start, scales, sinks):
        return gqa_prefill(
            q, pool, source, k, v, q_start, kv_dtype="float8_e4m3fn", num_kv_heads=8, sm_scale=0.1, scales=scales,
            window=1024, sinks=sinks, logit_cap=30.0, implementation="triton",
        )  # fmt: skip

    arguments = (
        *program_arguments(64, 8, 64, source=source, pool_blocks=80_000),
        scales,
        shape((64,), "float32"),
    )
    program = compile_for(call, *arguments, options=CAPTURE_LOOPS)
    assert program.temp_bytes == 0
    assert [thunk.captured for thunk in program.launches] == [True]


@pytest.mark.deviceless
@requires_triton
def test_triton_kernel_in_the_interpreter():
    """Triton reads at import whether it interprets."""
    output = output_of("chunk_interpreter", timeout=900)
    assert output.count("right") == 4
