"""MLA attention of new tokens: the public functions and the table of their implementations."""

from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels import implementations
from pallas_kernels.mla_prefill import prefix
from pallas_kernels.mla_prefill.rows import Rows
from pallas_kernels.read_source import ReadSource

# Name -> module and function. Every function takes what `mla_attention_xla` takes, and raises NotImplementedError with
# the reason, at trace time, when it cannot serve.
IMPLEMENTATIONS = {
    "mosaic": ("pallas_kernels.mla_prefill.mosaic_gpu", "mla_attention_mosaic"),
    "xla": ("pallas_kernels.mla_prefill.reference", "mla_attention_xla"),
}


def mla_prefill(
    q: Float[Array, "tokens heads qk_width"],
    k_nope: Float[Array, "tokens heads nope"],
    k_pe: Float[Array, "tokens rope"],
    v: Float[Array, "tokens heads v_width"],
    rows: Rows,
    *,
    sm_scale: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens heads v_width"], Float[Array, "tokens heads"]]:
    """Causal attention of new tokens among themselves, K and V expanded for each head.

    ``out = softmax(sm_scale * q @ [k_nope, k_pe]^T) @ v`` (DeepSeek-V2, arXiv:2405.04434, section 2.1), token i of a
    row over tokens 0..i of the same row, accumulated in f32. k_pe serves all heads and is not copied for each.

    Args:
      q: queries, qk_width = nope + rope.
      k_nope, v: the up-projected latents, k_nope = kv_c @ W_uk and v = kv_c @ W_uv. k_pe: the positional key.
      rows: which tokens make up each row. Any ragged batch fits: packed rows and right-padded chunks (see `Rows`).
        Tokens of no row may hold anything, NaN included.
      sm_scale: multiplies the scores (1 / sqrt(qk_width) for a plain MLA model).
      implementation: "mosaic" or "xla". None takes "mosaic" on Hopper GPUs where it can serve, else "xla".

    Returns:
      out in q.dtype, and lse f32: the natural log of the sum of exp(score). A token of no row gets 0 and +inf.

    Raises:
      ValueError: shapes or dtypes that do not fit each other, or an unknown implementation.
      NotImplementedError: the named implementation cannot serve this call on this device; the text says why.
    """
    _check(q, k_nope, k_pe, v, rows, implementation)
    attention = implementations.run("mla_prefill", IMPLEMENTATIONS, implementation)
    return attention(q, k_nope, k_pe, v, rows, rows, causal=True, sm_scale=float(sm_scale))  # type: ignore[no-any-return]


def mla_extend(
    q: Float[Array, "tokens heads qk_width"],
    k_nope: Float[Array, "tokens heads nope"],
    k_pe: Float[Array, "tokens rope"],
    v: Float[Array, "tokens heads v_width"],
    rows: Rows,
    buffer: UInt8[Array, " total_bytes"],
    source: ReadSource,
    block_offset: Int32[Array, ""] | int,
    w_uk: Float[Array, "heads nope kv_lora_rank"],
    w_uv: Float[Array, "heads v_width kv_lora_rank"],
    *,
    max_new: int,
    kv_dtype: DTypeLike,
    row_width: int,
    sm_scale: float,
    prefix_form: Literal["absorbed", "expanded"] | None = None,
    implementation: str | None = None,
    decode_implementation: str | None = None,
) -> tuple[Float[Array, "tokens heads v_width"], Float[Array, "tokens heads"]]:
    """`mla_prefill`, and each row's new tokens also see the cached rows that `source` names; merged by log-sum-exp.

    Args:
      q, k_nope, k_pe, v, rows, sm_scale, implementation: as in `mla_prefill`.
      buffer, source, block_offset, kv_dtype, row_width: the pool, as in `mla_decode`. The source covers the cached
        prefix alone, positions kv_start <= p < kv_end, all of them before the new tokens.
      w_uk, w_uv: up-projections of the latent.
      max_new: static bound on rows.length.
      prefix_form: how the prefix is read. "absorbed": by `mla_decode` on latent queries. "expanded": in chunks whose
        latents are gathered and up-projected, then attended to by the prefill kernel. A pair of query and cached row
        costs 2 * (2 * kv_lora_rank + rope) FLOPs a head in the first and 2 * (qk_width + v_width) in the second, which
        also pays 2 * kv_lora_rank * (nope + v_width) FLOPs a head for each cached row. None takes the cheaper one for
        max_new queries: at 512 + 64 and 192 / 128 "expanded" from 171 on; on a GPU from 9 on, where the decode kernels
        end.
      decode_implementation: of `mla_decode`, for the absorbed form.

    Returns and raises as `mla_prefill`. With one form and implementation results do not depend on where pages lie, to
    the bit.
    """
    _check(q, k_nope, k_pe, v, rows, implementation)
    heads, nope, v_width, rank = q.shape[1], k_nope.shape[2], v.shape[2], w_uk.shape[-1]
    if w_uk.shape != (heads, nope, rank) or w_uv.shape != (heads, v_width, rank):
        raise ValueError(
            f"w_uk must be [{heads}, {nope}, kv_lora_rank] and w_uv [{heads}, {v_width}, kv_lora_rank], "
            f"got {list(w_uk.shape)} and {list(w_uv.shape)}"
        )
    if row_width < rank + k_pe.shape[1]:
        raise ValueError(f"row_width {row_width} is less than kv_lora_rank {rank} + rope {k_pe.shape[1]}")
    if source.kv_end.shape != rows.length.shape:
        raise ValueError(f"source has {source.kv_end.shape[0]} rows, the new tokens {rows.length.shape[0]}")
    if max_new < 1:
        raise ValueError(f"max_new must be at least 1, got {max_new}")
    if prefix_form is None:
        prefix_form = prefix.preferred_form(
            max_new, rank=rank, nope=nope, rope=k_pe.shape[1], v_width=v_width
        )
    attention = implementations.run("mla_extend", IMPLEMENTATIONS, implementation)
    scale = float(sm_scale)
    new = attention(q, k_nope, k_pe, v, rows, rows, causal=True, sm_scale=scale)
    pool = dict(
        buffer=buffer, source=source, block_offset=block_offset, kv_dtype=kv_dtype, row_width=row_width
    )
    if prefix_form == "absorbed":
        cached = prefix.absorbed(
            q, rows, w_uk, w_uv, pool, max_new=max_new, sm_scale=scale, implementation=decode_implementation
        )
        return prefix.merge([new, cached], q.dtype)
    if prefix_form == "expanded":
        return prefix.expanded(q, rows, w_uk, w_uv, pool, new, sm_scale=scale, attention=attention)
    raise ValueError(f"prefix_form must be None, 'absorbed' or 'expanded', got {prefix_form!r}")


def _check(q, k_nope, k_pe, v, rows, implementation) -> None:  # type: ignore[no-untyped-def]
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be None or one of {sorted(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    arrays = {"q": q, "k_nope": k_nope, "k_pe": k_pe, "v": v}
    shapes = ", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in arrays.items())
    if q.ndim != 3 or k_nope.ndim != 3 or k_pe.ndim != 2 or v.ndim != 3:
        raise ValueError(f"need q, k_nope and v [tokens, heads, width] and k_pe [tokens, rope], got {shapes}")
    tokens, heads, width = q.shape
    fits = k_nope.shape[:2] == v.shape[:2] == (tokens, heads) and k_pe.shape[0] == tokens
    if not fits or width != k_nope.shape[2] + k_pe.shape[1] or min(heads, v.shape[2]) < 1:
        raise ValueError(f"shapes do not fit each other: {shapes}")
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in arrays.values()):
        raise ValueError(f"need floating arrays, got {shapes}")
    start, length = rows
    if start.ndim != 1 or start.shape != length.shape or not start.dtype == length.dtype == jnp.int32:
        raise ValueError(
            f"rows.start and rows.length must be int32[rows], got {start.dtype}{list(start.shape)} and "
            f"{length.dtype}{list(length.shape)}"
        )
