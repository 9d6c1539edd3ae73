"""K and V caches in the pool against plain arrays: full and sliding-window layers side by side, chunks, then steps."""

import dataclasses
import mmap
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gqa_decode import KVScales, gqa_decode
from pallas_kernels.read_source import PageTable
from tests.models.dense_cache import make_dense_cache
from tests.models.pool_cache import make_pool_cache
from ukv_jax import pool, requests
from ukv_jax.attention import begin_step
from ukv_jax.attention.fp8 import quantize
from ukv_jax.cache import CacheSpec, HeadKV
from ukv_jax.layout import KVSpec, UnifiedLayout

ROWS, HEADS, WINDOW, PAGE = 3, 4, 7, 4
STEPS = [(9, [9, 4, 0]), (9, [9, 9, 5])] + [(1, [1, 1, 1])] * 8 + [(1, [1, 0, 1])] * 3
ON_CPU_AND_GPU = ["xla", pytest.param("triton", marks=pytest.mark.gpu)]
KINDS = {"float32 k-then-v": ("float32", 24), "fp8": ("float8_e4m3fn", None)}  # dtype, v_head_dim


def make_spec(dtype, v_head_dim):
    full = HeadKV(2, 2, 16, dtype, v_head_dim)
    return CacheSpec(None, (), (full, HeadKV(3, 1, 32, dtype, v_head_dim, WINDOW, "swa")))


def inputs(spec, seed=0):
    """Random q, k, v of the last cache layer of each kind in every step."""
    rng = np.random.default_rng(seed)
    steps = []
    for tokens, new_len in STEPS:
        layers = []
        for kv in spec.kv:
            q, k = (HEADS, kv.head_dim), (kv.num_kv_heads, kv.head_dim)
            v = kv.num_kv_heads, kv.v_head_dim or kv.head_dim
            arrays = [rng.normal(size=(ROWS, tokens, *shape)).astype(np.float32) for shape in (q, k, v)]
            layers.append((kv.name, kv.num_layers - 1, arrays))
        steps.append((tokens, np.asarray(new_len, np.int32), layers))
    return steps


SINKS = np.linspace(-1, 2, HEADS).astype(np.float32)


def run(cache, steps, implementations=(None, None)):
    """What every layer attends to, padding cut off, and the cache. implementations: of chunks and of single tokens."""

    names = tuple((name, layer) for name, layer, _ in steps[0][2])
    found = []
    for tokens, new_len, layers in steps:
        arrays = [arrays for _, _, arrays in layers]
        outs, cache = one_step(cache, new_len, arrays, names, implementations[tokens == 1])
        found += [np.asarray(out)[row, :n] for out in outs for row, n in enumerate(new_len)]
    return found, cache


@partial(jax.jit, static_argnums=(3, 4))
def one_step(cache, new_len, layers, names, implementation):
    cache, outs = cache.begin(layers[0][0].shape[1], new_len), []
    if implementation:
        step = dataclasses.replace(cache.step, implementation=implementation)
        cache = dataclasses.replace(cache, step=step)
    for (name, layer), arrays in zip(names, layers, strict=True):
        out, cache = cache.gqa(
            layer, *arrays, pool=name, sm_scale=0.3, sinks=jnp.asarray(SINKS), logit_cap=20.0
        )
        outs.append(out)
    return outs, cache.end()


@pytest.mark.parametrize("kind", KINDS)
def test_pools_see_what_plain_arrays_hold(kind):
    dtype, v_head_dim = KINDS[kind]
    spec = make_spec(dtype, v_head_dim)
    steps = inputs(spec)
    plain = dataclasses.replace(spec, kv=tuple(dataclasses.replace(kv, dtype="float32") for kv in spec.kv))
    expected, _ = run(make_dense_cache(plain, ROWS, 40), rounded(steps, dtype))
    found = [
        run(make_pool_cache(spec, ROWS, 40, unified=unified, page_size=PAGE), steps)
        for unified in (True, False)
    ]
    for out, want in zip(found[0][0], expected, strict=True):
        np.testing.assert_allclose(out, want, rtol=0, atol=2e-5)
    for unified, static in zip(found[0][0], found[1][0], strict=True):
        np.testing.assert_array_equal(unified, static)
    for _, cache in found:
        lengths = np.asarray(cache.state.requests.seq_len)
        np.testing.assert_array_equal(lengths, np.sum([n for _, n in STEPS], axis=0))
        # Released up to what the last step saw: the pages before its window.
        last = lengths - np.asarray(STEPS[-1][1])
        first = np.asarray(cache.state.requests.window_first[0])
        np.testing.assert_array_equal(first, np.maximum(last - WINDOW + 1, 0) // PAGE)
        assert int(cache.state.counters.faults) == 0


def rounded(steps, dtype):
    """K and V as the pool stores them."""

    def store(x):
        if dtype != "float8_e4m3fn":
            return x.astype(jnp.dtype(dtype)).astype(np.float32)
        values, scale = quantize(jnp.asarray(x))
        return np.asarray(values.astype(jnp.float32) * scale[..., None])

    return [
        (tokens, new_len, [(name, layer, [q, store(k), store(v)]) for name, layer, (q, k, v) in layers])
        for tokens, new_len, layers in steps
    ]


def test_stream_and_virtual_ids_give_the_same_bits():
    spec = make_spec("float32", None)
    steps = inputs(spec, 1)
    runs = [
        run(make_pool_cache(spec, ROWS, 40, unified=True, page_size=PAGE, delivery=delivery), steps)[0]
        for delivery in ("table", "stream", "virtual")
    ]
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


# One worker has a dtype's pairs: three programs for chunks and three for steps serve the nine.
PAIRED = [
    pytest.param(dtype, marks=pytest.mark.xdist_group(f"GQA pairs over {dtype}"))
    for dtype in ("bfloat16", "float8_e4m3fn")
]


@lru_cache
def pairs(dtype):
    """(spec, steps, what plain arrays give)"""
    heads = HeadKV(1, 2, 128, dtype), HeadKV(1, 1, 128, dtype, None, WINDOW, "swa")
    spec = CacheSpec(None, (), heads)
    steps = [
        (
            tokens,
            new_len,
            [(*name, [jnp.asarray(x, jnp.bfloat16) for x in arrays]) for *name, arrays in layers],
        )
        for tokens, new_len, layers in inputs(spec, 2)
    ]
    plain = dataclasses.replace(spec, kv=tuple(dataclasses.replace(kv, dtype="float32") for kv in spec.kv))
    in_f32 = [
        (tokens, new_len, [(*name, [np.asarray(x, np.float32) for x in arrays]) for *name, arrays in layers])
        for tokens, new_len, layers in steps
    ]
    return spec, steps, run(make_dense_cache(plain, ROWS, 40), rounded(in_f32, dtype))[0]


@pytest.mark.parametrize("decode", [pytest.param("mosaic", marks=pytest.mark.gpu), *ON_CPU_AND_GPU])
@pytest.mark.parametrize("prefill", [pytest.param("mosaic", marks=pytest.mark.gpu), *ON_CPU_AND_GPU])
@pytest.mark.parametrize("dtype", PAIRED)
def test_every_decode_goes_on_after_every_prefill(prefill, decode, dtype):
    """Chunks by one implementation, then steps by another, against plain arrays."""
    spec, steps, expected = pairs(dtype)
    try:
        found, _ = run(make_pool_cache(spec, ROWS, 40, unified=True, page_size=16), steps, (prefill, decode))
    except NotImplementedError as reason:
        assert decode == "mosaic"
        assert "float8" in dtype
        pytest.skip(str(reason))
    for out, want in zip(found, expected, strict=True):
        assert np.linalg.norm(out.astype(np.float32) - want) <= 3e-3 * np.linalg.norm(want)


def test_fp8_saturates():
    rows = [[3e38, -1.0, 0.0, 0.0], [0.0] * 4, [1e-44] * 4, [1.0, -jnp.inf, 3e38, jnp.inf]]
    values, scale = quantize(jnp.asarray(rows))
    values, scale = np.asarray(values, np.float32), np.asarray(scale)
    assert np.isfinite(values).all()
    assert np.isfinite(scale).all()
    assert values[0, 0] == 448
    np.testing.assert_allclose(values[0, 0] * scale[0], 3e38, rtol=1e-3)
    np.testing.assert_array_equal(values[3, [0, 1, 3]], [0, -448, 448])
    np.testing.assert_allclose(values[3, 2] * scale[3], 3e38, rtol=0.07)  # 4 bits
    assert not values[1].any()


# More rows of scales than int32 counts: 2**31 of one KV head are 8.6 GB.


@pytest.mark.parametrize("heads, width", [(8, 64), (8, 128), (2, 256), (1, 512)])
@pytest.mark.parametrize("tokens", [1, 16])
def test_an_fp8_pool_of_100_gb_is_traced(heads, width, tokens):
    spec = KVSpec(12, heads, width, dtype="float8_e4m3fn")
    layout = UnifiedLayout.from_bytes(
        (spec,), total_bytes=100 * 10**9, page_size=64, max_requests=ROWS, max_tokens=1024
    )

    def step(state, q, kv):
        step = begin_step(state, jnp.arange(ROWS), jnp.ones(ROWS, jnp.int32), tokens=tokens)
        return step.gqa(11, q, kv, kv, sm_scale=0.1)[0]

    shape = lambda heads: jax.ShapeDtypeStruct((ROWS, tokens, heads, width), jnp.bfloat16)
    out = jax.eval_shape(step, jax.eval_shape(partial(pool.init, layout)), shape(2 * heads), shape(heads))
    assert out.shape == (ROWS, tokens, 2 * heads, width)


def test_scales_are_read_past_two_to_the_31_rows():
    """The same rows at the far end of 8.6 GB, of which only what is read is ever in memory, and near its beginning."""
    heads, width, page, blocks = 1, 64, 64, 3  # a page: K, V, scales of both
    block = page * heads * width
    pages = 2**33 // (blocks * block) + 8
    buffer = np.frombuffer(mmap.mmap(-1, pages * blocks * block), np.uint8)
    rows = np.random.default_rng(0).normal(size=(2, page, heads, width)).astype(np.float32)
    values, scales = (np.array(x) for x in quantize(jnp.asarray(rows)))
    stored = np.concatenate([values.view(np.uint8).reshape(-1), scales.view(np.uint8).reshape(-1)])
    outs = []
    for at in (3, pages - 1):
        buffer[at * blocks * block :][: len(stored)] = stored
        table = jnp.asarray([[at * blocks]], jnp.int32)
        source = PageTable(table, jnp.zeros(1, jnp.int32), jnp.full(1, page, jnp.int32), page)
        ratio = block // (page * heads * 4)
        outs.append(
            gqa_decode(
                jnp.ones((1, 1, 2, width)), jax.device_put(buffer, may_alias=True), source, 0, 1,
                kv_dtype="float8_e4m3fn", num_kv_heads=heads, sm_scale=0.1,
                scales=KVScales(2 * ratio, 2 * ratio + 1, ratio), implementation="xla",
            )[0]
        )  # fmt: skip
    assert np.abs(outs[0]).max() > 0.01
    np.testing.assert_array_equal(*outs)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_scales_are_written_and_read_past_two_to_the_31_rows(implementation):
    """Full attention takes pages from the top: a small pool and one of 9 GB, a chunk and then a token."""
    rng = np.random.default_rng(0)
    spec = KVSpec(1, 1, 64, dtype="float8_e4m3fn")
    chunks = [
        [jnp.asarray(rng.normal(size=(1, n, heads, 64)), jnp.bfloat16) for heads in (4, 1, 1)]
        for n in (70, 1)
    ]
    outs = []
    for total in (1 << 20, 9 * 10**9):
        layout = UnifiedLayout.from_bytes(
            (spec,), total_bytes=total, page_size=64, max_requests=1, max_tokens=128
        )
        state, row = pool.init(layout), jnp.zeros(1, jnp.int32)
        state, got = jax.jit(partial(requests.reserve, pages_per_row=2), donate_argnums=0)(
            state, row, jnp.full(1, 128, jnp.int32)
        )
        assert bool(got.granted.all())

        @partial(jax.jit, donate_argnums=0)
        def run(state, q, k, v):
            new_len = jnp.full(1, q.shape[1], jnp.int32)
            step = begin_step(
                state, jnp.zeros(1, jnp.int32), new_len, tokens=q.shape[1], implementation=implementation
            )
            out, step = step.gqa(0, q, k, v, sm_scale=0.1)
            state = dataclasses.replace(state, buffer=step.buffer)
            state, _ = requests.append(state, jnp.zeros(1, jnp.int32), new_len, max_tokens=q.shape[1])
            return out, state

        for chunk in chunks:
            out, state = run(state, *chunk)
            outs.append(np.asarray(out, np.float32))
    for near, far in zip(outs[:2], outs[2:], strict=True):
        assert np.abs(near).max() > 0.01
        np.testing.assert_array_equal(near, far)


def test_errors_name_the_sub_pool():
    spec = make_spec("float32", None)
    cache = make_pool_cache(spec, ROWS, 40, unified=True, page_size=PAGE).begin(1, [1, 1, 1])
    q, k = jnp.zeros((ROWS, 1, HEADS, 16)), jnp.zeros((ROWS, 1, 2, 16))
    with pytest.raises(ValueError, match=r"no KV sub-pool 'local'; this layout has \['full', 'swa'\]"):
        cache.gqa(0, q, k, k, pool="local", sm_scale=1.0)
    with pytest.raises(ValueError, match="both be given or both be None; v is missing"):
        cache.gqa(0, q, k, None, sm_scale=1.0)
    with pytest.raises(
        ValueError, match=r"'swa' stores K and V of .* \[1, 32\] and \[1, 32\], got \[2, 16\]"
    ):
        cache.gqa(0, q, k, k, pool="swa", sm_scale=1.0)
