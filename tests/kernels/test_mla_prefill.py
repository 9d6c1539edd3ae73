"""What every implementation of MLA attention of new tokens must do, alone and together with every decode implementation.

`pytest -m gpu` on a machine with a GPU runs the GPU kernels through the same tests.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_decode import mla_decode
from pallas_kernels.mla_prefill import Rows, mla_extend, mla_prefill
from pallas_kernels.mla_prefill.prefix import preferred_form
from pallas_kernels.mla_prefill.schedule import TILE, choose_section, make_schedule
from pallas_kernels.read_source import PageTable
from tests.deviceless import compile_for, requires_plugin, shape
from tests.kernels.delivered import DELIVERIES
from tests.kernels.mla_case import make_case, must_serve
from tests.kernels.prefill_case import make_prefill
from ukv_jax.attention.mla import encode_rows
from ukv_jax.layout import MLASpec

gpu = pytest.mark.gpu
IMPLEMENTATIONS = ["xla", pytest.param("mosaic", marks=gpu)]
DECODERS = ["xla", pytest.param("triton", marks=gpu), pytest.param("mosaic", marks=gpu)]
EDGES = [0, 1, 63, 64, 65, 200, 0, 128, 129]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


@pytest.mark.parametrize("heads", [1, 3, 31, 32])
def test_head_counts(implementation, heads):
    case = make_prefill([0, 1, 65, 130], heads=heads)
    case.check(*case.run(implementation))


@pytest.mark.parametrize("layout", [{}, {"gap": 5}, {"width": 201}, {"width": 256}], ids=str)
def test_ragged_rows(implementation, layout):
    """Lengths around the tiles, packed at any offset or right-padded; what belongs to no row is NaN."""
    case = make_prefill(EDGES, **layout)
    case.check(*case.run(implementation))


def test_no_tokens(implementation):
    case = make_prefill([0, 0, 0], width=130)
    case.check(*case.run(implementation))
    case = make_prefill([0])
    assert case.run(implementation)[0].shape == (0, 2, 128)


@pytest.mark.parametrize("widths", [(64, 64, 64), (128, 64, 64), (64, 64, 128)], ids=str)
def test_other_widths(implementation, widths):
    nope, rope, v_width = widths
    case = make_prefill([65, 200, 7], nope=nope, rope=rope, v_width=v_width)
    case.check(*case.run(implementation))


def test_small_float32_model():
    case = make_prefill(EDGES, nope=24, rope=8, v_width=20, dtype="float32")
    case.check(*case.run("xla"))


def test_large_scores(implementation):
    """Scores of both signs beyond what exp of them could hold; the softmax is close to an argmax."""
    case = make_prefill([200, 65])
    case = dataclasses.replace(case, q=(case.q.astype(np.float32) * 64).astype(case.q.dtype))
    out, lse = case.run(implementation)
    want, want_lse = case.expected()
    np.testing.assert_allclose(lse, want_lse, rtol=1e-4, atol=1e-2)
    assert np.linalg.norm(out - want) <= 1e-2 * np.linalg.norm(want)


@gpu
def test_a_row_does_not_depend_on_the_others():
    """The same bits alone, in a batch, and at another offset. (The reference chooses its tile by the whole batch.)"""
    batch = make_prefill([77, 300, 5], gap=3)
    alone = make_prefill([300], gap=0)
    at = batch.row(1)
    alone = dataclasses.replace(
        alone, **{name: getattr(batch, name)[at] for name in ("q", "k_nope", "k_pe", "v")}
    )
    for a, b in zip(batch.run("mosaic"), alone.run("mosaic"), strict=True):
        np.testing.assert_array_equal(a[at], b)


def test_later_tokens_do_not_matter(implementation):
    """Causal: NaN in a later token leaves the earlier results as they are, to the bit."""
    case = make_prefill([300])
    out, lse = case.run(implementation)
    changed = dataclasses.replace(
        case, **{name: getattr(case, name).copy() for name in ("k_nope", "k_pe", "v")}
    )
    for array in (changed.k_nope, changed.k_pe):
        array[250:] = 7
    changed.v[250:] = -9
    out2, lse2 = changed.run(implementation)
    np.testing.assert_array_equal(out[:250], out2[:250])
    np.testing.assert_array_equal(lse[:250], lse2[:250])


@pytest.mark.parametrize("lengths", [[2500], [900, 1024, 1]], ids=str)
def test_longer_rows(implementation, lengths):
    case = make_prefill(lengths, heads=1)
    case.check(*case.run(implementation))


@gpu
def test_large_batch():
    """More work items than thread blocks, 64 rows in several sections, against the reference on the same device."""
    case = make_prefill(np.random.default_rng(3).integers(0, 1500, 64), heads=8, width=1500)
    out, lse = case.run("mosaic")
    want, want_lse = case.run("xla")
    np.testing.assert_array_equal(np.isposinf(lse), np.isposinf(want_lse))
    assert not np.any(out[np.isposinf(lse)])
    seen = np.isfinite(want_lse)
    np.testing.assert_allclose(lse[seen], want_lse[seen], rtol=0, atol=3e-3)
    for b in range(64):
        at = case.row(b)
        assert np.linalg.norm(out[at] - want[at]) <= 4e-3 * np.linalg.norm(want[at])


@gpu
def test_replays_give_the_same_bits():
    """Which block takes an item differs between runs; results may not."""
    case = make_prefill([1000, 1300, 2, 700], heads=16)
    program = jax.jit(partial(mla_prefill, sm_scale=case.sm_scale, implementation="mosaic"))
    first = program(*case.arrays, case.rows)
    for _ in range(20):
        for a, b in zip(first, program(*case.arrays, case.rows), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# Prefill and decode over one pool.

RANK, ROPE, NOPE, V_WIDTH = 512, 64, 128, 128
PAGE = 64


@dataclasses.dataclass(frozen=True)
class Chunk:
    """New tokens of rows that have a cached prefix, and the weights that expand the latents."""

    case: object  # pool and sources of the whole rows, prefix and new tokens
    prefill: object
    w_uk: np.ndarray
    w_uv: np.ndarray
    cached: np.ndarray

    def prefix(self):
        """K and V of each row's prefix in f64."""
        w_uk, w_uv = self.w_uk.astype(np.float64), self.w_uv.astype(np.float64)
        expanded = []
        for b, n in enumerate(self.cached):
            latent, pe = self.case.kv[b][:n, :RANK], self.case.kv[b][:n, RANK:]
            k = np.einsum("tl,hnl->thn", latent, w_uk, optimize=True)
            k = np.concatenate([k, np.broadcast_to(pe[:, None], (*k.shape[:2], ROPE))], axis=-1)
            expanded.append((k, np.einsum("tl,hvl->thv", latent, w_uv, optimize=True)))
        return expanded

    def source(self, delivery: str, case=None):
        """The prefix alone, read out of pages that hold the new tokens too."""
        case = dataclasses.replace(case or self.case, kv_end=self.cached)
        return case.source(delivery)

    def run(self, implementation, decoder, form, delivery="table", case=None):
        case = case or self.case
        options = {name: case.options[name] for name in ("kv_dtype", "row_width")}
        extend = partial(
            mla_extend,
            max_new=int(self.prefill.length.max()),
            sm_scale=self.prefill.sm_scale,
            prefix_form=form,
            implementation=implementation,
            decode_implementation=decoder,
            **options,
        )
        out, lse = jax.jit(extend)(
            *self.prefill.arrays,
            self.prefill.rows,
            jnp.asarray(case.pool),
            self.source(delivery, case),
            case.block_offset,
            jnp.asarray(self.w_uk),
            jnp.asarray(self.w_uv),
        )
        assert out.dtype == self.prefill.q.dtype
        return np.asarray(out, np.float64), np.asarray(lse, np.float64)


def make_chunk(cached, new, *, heads=4, dtype="bfloat16", kv_dtype=None, width=None, **options) -> Chunk:
    rng = np.random.default_rng(5)
    cached, new = np.asarray(cached, np.int32), np.asarray(new, np.int32)
    case = make_case(cached + new, heads=heads, dtype=dtype, kv_dtype=kv_dtype, page_size=PAGE, **options)
    w_uk = (rng.normal(size=(heads, NOPE, RANK)) * RANK**-0.5).astype(jnp.dtype(dtype))
    w_uv = (rng.normal(size=(heads, V_WIDTH, RANK)) * RANK**-0.5).astype(jnp.dtype(dtype))
    prefill = make_prefill(new, heads=heads, dtype=dtype, width=width)
    k_nope, k_pe, v = (x.copy() for x in (prefill.k_nope, prefill.k_pe, prefill.v))
    for b in range(len(new)):
        at, latent = prefill.row(b), case.kv[b][cached[b] :]
        k_nope[at], v[at] = (
            np.einsum("tl,hnl->thn", latent[:, :RANK], w.astype(np.float64), optimize=True).astype(w.dtype)
            for w in (w_uk, w_uv)
        )
        k_pe[at] = latent[:, RANK:].astype(k_pe.dtype)
    return Chunk(case, dataclasses.replace(prefill, k_nope=k_nope, k_pe=k_pe, v=v), w_uk, w_uv, cached)


# Latent queries are rounded to bf16 after W_uk has spread each over 512 elements: the absorbed form's own loss.
BF16_TOLERANCE = {"absorbed": 2.5e-2, "expanded": 8e-3}


def check_extend(chunk: Chunk, implementation, decoder, form, tolerance, delivery="table") -> None:
    try:
        out, lse = chunk.run(implementation, decoder, form, delivery)
    except NotImplementedError as reason:
        if form != "absorbed":  # the decoder has no part in it
            raise
        rows, _, heads, width = chunk.case.q.shape
        queries = np.zeros((rows, chunk.prefill.length.max(), heads, width), chunk.case.q.dtype)
        assert not must_serve(decoder or "xla", dataclasses.replace(chunk.case, q=queries), delivery)
        chunk.prefill.run(implementation)  # so it is the decoder that declines
        pytest.skip(f"{decoder} declines: {reason}")
    # A row with one key has that key's score as its lse: no average hides the rounding of a latent query or key.
    chunk.prefill.check(out, lse, prefix=chunk.prefix(), tolerance=tolerance, lse_tolerance=10 * tolerance)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_extend(implementation, decoder, form):
    """Rows with neither, either and both of prefix and new tokens."""
    chunk = make_chunk([0, 64, 0, 1, 130, 63], [0, 0, 9, 64, 65, 1], width=70)
    check_extend(chunk, implementation, decoder, form, BF16_TOLERANCE[form])


@gpu
@pytest.mark.parametrize("decoder", ["triton", "mosaic"])
@pytest.mark.parametrize("heads, delivery", [(4, "table"), (63, "virtual")])
def test_extend_by_a_draft(implementation, decoder, heads, delivery):
    """Few enough new tokens for every decode kernel to read the prefix with latent queries."""
    chunk = make_chunk([0, 64, 0, 1, 130, 63], [0, 0, 3, 8, 5, 1], heads=heads, width=70)
    check_extend(chunk, implementation, decoder, "absorbed", BF16_TOLERANCE["absorbed"], delivery)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("delivery", DELIVERIES)
def test_extend_float32(form, delivery):
    chunk = make_chunk([0, 64, 1, 130, 63], [9, 0, 64, 65, 1], heads=2, dtype="float32")
    check_extend(chunk, "xla", "xla", form, 1e-5, delivery=delivery)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_extend_reads_fp8_rows(implementation, form):
    chunk = make_chunk([0, 64, 130], [9, 5, 65], kv_dtype="float8_e4m3fn")
    check_extend(chunk, implementation, None, form, BF16_TOLERANCE[form])


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_extend_does_not_depend_on_the_place_of_pages(implementation, form):
    """Other pages, neighbours, layers and deliveries: the same bits."""
    sizes = [0, 300, 64, 130], [130, 3, 65, 17]
    chunk = make_chunk(*sizes)
    again = make_chunk(*sizes, spare_pages=40, blocks_per_page=5, block_offset=4)
    assert not np.array_equal(chunk.case.pages, again.case.pages)
    first = chunk.run(implementation, "xla", form)
    for delivery in DELIVERIES:
        for a, b in zip(first, chunk.run(implementation, "xla", form, delivery, again.case), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_decode_continues_what_prefill_wrote(implementation, decoder, kv_dtype):
    """The last new token computed twice: by prefill, and by decode out of the rows that the KV writer made."""
    lengths, heads = np.array([1, 63, 64, 65, 200]), 16
    rng = np.random.default_rng(2)
    spec = MLASpec(1, RANK, ROPE, kv_dtype)
    row_bytes = 640 if kv_dtype == "float8_e4m3fn" else 2 * (RANK + ROPE)
    latents = [rng.normal(size=(n, RANK + ROPE)).astype(jnp.bfloat16) for n in lengths]
    chunk = make_chunk(np.zeros(5, np.int32), lengths, heads=heads)
    w_uk, w_uv = jnp.asarray(chunk.w_uk), jnp.asarray(chunk.w_uv)
    packed = jnp.asarray(np.concatenate(latents))
    q, rows, scale = jnp.asarray(chunk.prefill.q), chunk.prefill.rows, chunk.prefill.sm_scale

    @jax.jit
    def prefill(packed):
        k_nope = jnp.einsum("tl,hnl->thn", packed[:, :RANK], w_uk)
        v = jnp.einsum("tl,hvl->thv", packed[:, :RANK], w_uv)
        results = mla_prefill(
            q, k_nope, packed[:, RANK:], v, rows, sm_scale=scale, implementation=implementation
        )
        return *results, encode_rows(spec, row_bytes, packed)

    prefilled, lse, stored = prefill(packed)
    stored = np.asarray(stored).view(np.uint8)
    width = int(-(-lengths.max() // PAGE))
    table = rng.permutation(np.arange(1, 5 * width + 1, dtype=np.int32)).reshape(5, width)
    pool = np.full((5 * width + 1, PAGE, row_bytes), 0xFF, np.uint8)  # NaN where nothing is written
    for b, start in enumerate(chunk.prefill.start):
        position = np.arange(lengths[b])
        pool[table[b, position // PAGE], position % PAGE] = stored[start + position]
    last = q[rows.start + rows.length - 1]
    source = PageTable(
        jnp.asarray(table), jnp.zeros(5, jnp.int32), jnp.asarray(lengths, jnp.int32), page_size=PAGE
    )

    @jax.jit
    def decode(last, pool):
        latent_q = jnp.einsum("rhn,hnl->rhl", last[..., :NOPE], w_uk).astype(q.dtype)
        out, lse = mla_decode(
            jnp.concatenate([latent_q, last[..., NOPE:]], axis=-1)[:, None],
            pool,
            source,
            0,
            kv_dtype=kv_dtype,
            row_width=row_bytes // jnp.dtype(kv_dtype).itemsize,
            v_width=RANK,
            sm_scale=scale,
            implementation=decoder,
        )
        return jnp.einsum("rhl,hvl->rhv", out[:, 0], w_uv), lse

    try:
        decoded, decode_lse = decode(last, pool.reshape(-1))
    except NotImplementedError as reason:
        question = make_case(lengths, heads=heads, dtype="bfloat16", kv_dtype=kv_dtype, page_size=PAGE)
        assert not must_serve(decoder, question, "table")
        pytest.skip(f"{decoder} declines: {reason}")
    decoded = np.asarray(decoded, np.float64)
    at = rows.start + rows.length - 1
    expected = np.asarray(prefilled[at], np.float64)
    tolerance = (
        BF16_TOLERANCE["absorbed"] if kv_dtype == "bfloat16" else 6e-2
    )  # e4m3 keeps 4 bits: a relative rounding of up to 1 / 16
    for b in range(5):
        assert np.linalg.norm(decoded[b] - expected[b]) <= tolerance * np.linalg.norm(expected[b])
    np.testing.assert_allclose(decode_lse[:, 0], lse[at], rtol=0, atol=3 * tolerance)


def test_preferred_form_is_where_the_docstring_says():
    widths = dict(rank=512, nope=128, rope=64, v_width=128)
    assert preferred_form(170, **widths) == "absorbed"
    assert preferred_form(171, **widths) == "expanded"


# The schedule of the Mosaic kernel, on the host.


@pytest.mark.parametrize("layout", [{}, {"gap": 5}, {"width": 300}], ids=str)
@pytest.mark.parametrize("causal, kv_bytes", [(True, 640), (True, 40_000), (False, 100_000)])
def test_schedule_visits_every_token_once(layout, causal, kv_bytes):
    case = make_prefill([*EDGES, 300, 1, 40, 0] * 2, heads=1, nope=64, v_width=64, **layout)
    tokens, heads = len(case.q), 12
    schedule = make_schedule(
        case.rows, case.rows, tokens, tokens, causal=causal, heads=heads, kv_bytes=kv_bytes
    )
    section = choose_section(len(case.start), heads, -(-tokens // len(case.start)) * kv_bytes)
    assert section.heads == schedule.section_heads
    items = np.asarray(schedule.items)
    count = items[-1, 0]
    tickets = schedule.item(items, jnp.arange(count * heads, dtype=jnp.int32))
    visited = np.zeros((tokens, heads), int)
    previous = None
    for item in zip(*(np.asarray(field).tolist() for field in tickets), strict=True):
        first, n, position, kv_first, kv_length, kv_tiles, head = item
        assert 0 < n <= TILE
        visited[first : first + n, head] += 1
        owner = [b for b in range(len(case.start)) if case.row(b).start <= first < case.row(b).stop]
        if owner:
            row = case.row(owner[0])
            assert (kv_first, kv_length, position) == (row.start, row.stop - row.start, first - row.start)
            assert kv_tiles == -(-(min(position + TILE, kv_length) if causal else kv_length) // TILE)
        else:
            assert kv_tiles == 0
        # A row's gap lies behind it and belongs to the same section.
        row = max([b for b in range(len(case.start)) if case.start[b] <= first], default=0)
        number = head // section.heads, row // section.rows
        assert previous is None or number != previous[0] or kv_tiles <= previous[1]
        assert previous is None or number >= previous[0]
        previous = number, kv_tiles
    assert (visited == 1).all()


def test_sections_hold_what_fits():
    pair = 4096 * 640
    assert choose_section(16, 32, pair) == (16, 1)
    assert choose_section(24, 32, pair) == (12, 1)  # two equal sections, not 17 rows and 7
    assert choose_section(4, 32, pair) == (4, 4)
    assert choose_section(1, 32, pair) == (1, 16)
    assert choose_section(1, 31, pair) == (1, 1)  # a prime number of heads has no other divisor that fits
    assert choose_section(1, 32, 32 * pair) == (1, 1)
    assert choose_section(3, 2, 640) == (3, 2)


def test_rows_that_leave_the_array_are_cut():
    case = make_prefill([64, 64], heads=1, nope=64, v_width=64)
    rows = Rows(jnp.array([0, 64], jnp.int32), jnp.array([64, 1 << 30], jnp.int32))
    for name in ("xla",):
        out, lse = mla_prefill(*case.arrays, rows, sm_scale=case.sm_scale, implementation=name)
        case.check(np.asarray(out, np.float64), np.asarray(lse, np.float64))
    items = np.asarray(make_schedule(rows, rows, 128, 128, causal=True, heads=1, kv_bytes=640).items)
    assert (items[: items[-1, 0], :2].sum(axis=1) <= 128).all()


# Errors that are known when tracing.


def arguments(**changes):
    good = {
        "q": jnp.zeros((8, 2, 24)),
        "k_nope": jnp.zeros((8, 2, 16)),
        "k_pe": jnp.zeros((8, 8)),
        "v": jnp.zeros((8, 2, 16)),
        "rows": Rows(jnp.zeros(1, jnp.int32), jnp.full(1, 8, jnp.int32)),
        "sm_scale": 0.1,
    }
    return {**good, **changes}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"q": jnp.zeros((8, 2, 25))}, r"q float32\[8, 2, 25\]"),
        ({"k_pe": jnp.zeros((7, 8))}, r"k_pe float32\[7, 8\]"),
        ({"k_pe": jnp.zeros((8, 2, 8))}, r"k_pe \[tokens, rope\]"),
        ({"v": jnp.zeros((8, 3, 16))}, r"v float32\[8, 3, 16\]"),
        ({"v": jnp.zeros((8, 2, 16), jnp.int32)}, "need floating"),
        ({"rows": Rows(jnp.zeros(1), jnp.zeros(1))}, r"float32\[1\]"),
        ({"rows": Rows(jnp.zeros(1, jnp.int32), jnp.zeros(2, jnp.int32))}, r"int32\[2\]"),
        ({"implementation": "cutlass"}, "cutlass"),
    ],
)
def test_errors_name_the_numbers(changes, words):
    with pytest.raises(ValueError, match=words):
        mla_prefill(**arguments(**changes))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"w_uk": jnp.zeros((2, 16, 31))}, r"\[2, 16, 31\] and \[2, 16, 32\]"),
        ({"row_width": 39}, "row_width 39 is less than kv_lora_rank 32"),
        ({"max_new": 0}, "max_new must be at least 1, got 0"),
        ({"prefix_form": "folded"}, "folded"),
    ],
)
def test_extend_errors_name_the_numbers(changes, words):
    source = PageTable(jnp.zeros((1, 1), jnp.int32), *[jnp.zeros(1, jnp.int32)] * 2, page_size=4)
    good = dict(
        buffer=jnp.zeros(4 * 40 * 4, jnp.uint8),
        source=source,
        block_offset=0,
        w_uk=jnp.zeros((2, 16, 32)),
        w_uv=jnp.zeros((2, 16, 32)),
        max_new=8,
        kv_dtype="float32",
        row_width=40,
    )
    with pytest.raises(ValueError, match=words):
        mla_extend(**arguments(), **{**good, **changes})


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU serves it")
def test_named_implementation_does_not_fall_back():
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU"):
        mla_prefill(**arguments(implementation="mosaic"))


# What the compiler makes of it.


def prefill_shapes(rows, width, heads=32):
    tokens, bf16 = rows * width, "bfloat16"
    row = Rows(shape((rows,), "int32"), shape((rows,), "int32"))
    return (
        shape((tokens, heads, 192), bf16),
        shape((tokens, heads, 128), bf16),
        shape((tokens, 64), bf16),
        shape((tokens, heads, 128), bf16),
        row,
    )


@pytest.mark.deviceless
@requires_plugin
def test_kernel_fits_the_gpu():
    """Shared memory in budget, and no temporaries but the schedule's: an item is six words."""
    program = compile_for(
        partial(mla_prefill, sm_scale=0.07, implementation="mosaic"), *prefill_shapes(16, 4096)
    )
    assert program.temp_bytes <= 64 * (16 * 4096 // TILE + 33)


def test_reference_has_bounded_temporaries():
    attention = partial(mla_prefill, sm_scale=0.07, implementation="xla")
    temps = [
        jax.jit(attention).lower(*prefill_shapes(4, width)).compile().memory_analysis().temp_size_in_bytes
        for width in (2048, 8192)
    ]
    assert temps[1] <= 1.1 * temps[0]
