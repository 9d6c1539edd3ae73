"""Paged MLA attention: the public function and the table of its implementations."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels import implementations
from pallas_kernels.read_source import ReadSource, check_source

KV_DTYPES = ("bfloat16", "float32", "float8_e4m3fn")
MAX_DRAFT = 8  # queries a row that decode kernels are made for: one, or a draft to verify; more are `mla_prefill` work

# Name -> module and function. Imported at first use: the GPU backends need packages that a CPU machine may lack.
# Every function takes what `mla_decode` takes, less `implementation`, and raises NotImplementedError with the reason,
# at trace time, when it cannot serve.
IMPLEMENTATIONS = {
    "mosaic": ("pallas_kernels.mla_decode.mosaic_gpu", "mla_decode_mosaic"),
    "triton": ("pallas_kernels.mla_decode.triton", "mla_decode_triton"),
    "xla": ("pallas_kernels.mla_decode.reference", "mla_decode_xla"),
}
# Implementations that have another function for e4m3 rows.
_FP8 = {"mosaic": ("pallas_kernels.mla_decode.mosaic_fp8", "mla_decode_mosaic_fp8")}


def mla_decode(
    q: Float[Array, "rows s_q heads qk_width"],
    buffer: UInt8[Array, " total_bytes"],
    source: ReadSource,
    block_offset: Int32[Array, ""] | int,
    *,
    kv_dtype: DTypeLike,
    row_width: int,
    v_width: int,
    sm_scale: float,
    logit_cap: float | None = None,
    q_start: Int32[Array, " rows"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows s_q heads v_width"], Float[Array, "rows s_q heads"]]:
    """MLA attention of new queries to the latent rows of their requests, K and V from the same row.

    ``out = softmax(cap(sm_scale * q @ K^T)) @ V`` with K the first `qk_width` elements of a row, V its first `v_width`
    (the absorbed form of DeepSeek-V2, arXiv:2405.04434, section 2.1). Accumulates in f32.

    Args:
      q: queries ``[q_nope @ W_uk, q_pe]``, qk_width = kv_lora_rank + qk_rope_head_dim. s_q is 1 for decode, a draft's
        length for verify, a chunk for prefill and extend.
      buffer: the whole byte pool. Seen as blocks of ``page_size * row_width`` elements, which must divide it.
      source: where the rows of each request lie, and ``kv_start``, ``kv_end`` of each.
      block_offset: int32 scalar added to every entry: the layer's block within a page's envelope.
      kv_dtype: bfloat16, float32 or float8_e4m3fn. An fp8 row holds qk_width e4m3 values, then one f32 scale that
        multiplies them (at byte qk_width, a multiple of 4), then padding up to row_width bytes.
      row_width: elements of a stored row, at least qk_width.
      v_width: width of V, at most qk_width.
      sm_scale: multiplies the scores (1 / sqrt(qk_nope_head_dim + qk_rope_head_dim) for a plain MLA model).
      logit_cap: if given, scores become ``logit_cap * tanh(scores / logit_cap)`` after scaling.
      q_start: position of each row's first query, default ``kv_end - s_q``. Query i sits at ``q_start[b] + i`` and sees
        the positions p with ``kv_start[b] <= p < kv_end[b]`` and ``p <= q_start[b] + i``. For right-padded chunks pass
        ``kv_end - new_len``: the padding queries then see all of the row, so their results are finite and of no use.
      implementation: "mosaic", "triton" or "xla". None takes the first that can serve of those preferred for the
        device at hand (`pallas_kernels.implementations.run`).

    Returns:
      out in q.dtype, and lse f32: the natural log of the sum of exp(score) over visible positions. A query that sees
      nothing gets out 0 and lse +inf. With bf16 queries lse may be off by 2**-8: over bf16 rows "mosaic" gives that of
      weights rounded to bf16, and over e4m3 rows Hopper adds products in about 14 bits. Results do not depend on bytes
      that no query of the row can see, NaN included, nor on ids beyond a row's range; with one implementation the three
      kinds of source give bit-identical results for the same rows. An entry that is negative or past the pool reads the
      padding page.

    Raises:
      ValueError: shapes, dtypes or sizes that do not fit each other, or an unknown implementation. TypeError: a source
        of another class.
      NotImplementedError: the named implementation cannot serve this call on this device; the text says why.
    """
    kv_dtype = jnp.dtype(kv_dtype)
    _check(q, buffer, source, kv_dtype, row_width, v_width, logit_cap, q_start)
    table = IMPLEMENTATIONS | (_FP8 if kv_dtype == jnp.float8_e4m3fn else {})
    attend = implementations.run("mla_decode", table, implementation)
    return attend(  # type: ignore[no-any-return]
        q,
        buffer,
        source,
        jnp.asarray(block_offset, jnp.int32),
        kv_dtype=kv_dtype,
        row_width=row_width,
        v_width=v_width,
        sm_scale=float(sm_scale),
        logit_cap=None if logit_cap is None else float(logit_cap),
        q_start=q_start,
    )


def _check(q, buffer, source, kv_dtype, row_width, v_width, logit_cap, q_start) -> None:  # type: ignore[no-untyped-def]
    if kv_dtype.name not in KV_DTYPES:
        raise ValueError(f"kv_dtype must be one of {KV_DTYPES}, got {kv_dtype.name}")
    if buffer.ndim != 1 or buffer.dtype != jnp.uint8:
        raise ValueError(f"buffer must be uint8[total_bytes], got {buffer.dtype}{list(buffer.shape)}")
    if q.ndim != 4 or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q must be floating [rows, s_q, heads, qk_width], got {q.dtype}{list(q.shape)}")
    rows, s_q, heads, qk_width = q.shape
    check_source(source, rows, q_start)
    if min(s_q, heads, v_width) < 1 or not v_width <= qk_width <= row_width:
        raise ValueError(
            f"need s_q, heads >= 1 and 1 <= v_width <= qk_width <= row_width, got s_q {s_q}, heads {heads}, "
            f"v_width {v_width}, qk_width {qk_width}, row_width {row_width}"
        )
    if kv_dtype.itemsize == 1 and (qk_width % 4 or row_width < qk_width + 4):
        raise ValueError(
            f"an fp8 row needs qk_width a multiple of 4 and room for an f32 scale behind it: got qk_width {qk_width}, "
            f"row_width {row_width}"
        )
    ps = source.page_size
    block = ps * row_width * kv_dtype.itemsize
    if buffer.shape[0] == 0 or buffer.shape[0] % block:
        raise ValueError(f"buffer of {buffer.shape[0]} bytes is no whole number of blocks of {block} bytes")
    if buffer.shape[0] // block * ps >= 2**31:
        raise ValueError(f"{buffer.shape[0] // block} blocks of {ps} rows: row ids would not fit int32")
    if logit_cap is not None and not logit_cap > 0:
        raise ValueError(f"logit_cap must be positive, got {logit_cap}")
