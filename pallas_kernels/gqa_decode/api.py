"""Paged GQA attention: the public function and the table of its implementations."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels import implementations
from pallas_kernels.read_source import ReadSource, check_source

KV_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")

# Every function takes what `gqa_decode` takes, less `implementation`, and raises NotImplementedError with the reason, at
# trace time, when it cannot serve.
IMPLEMENTATIONS = {
    "mosaic": ("pallas_kernels.gqa_decode.mosaic_gpu", "gqa_decode_mosaic"),
    "triton": ("pallas_kernels.gqa_decode.triton", "gqa_decode_triton"),
    "xla": ("pallas_kernels.gqa_decode.reference", "gqa_decode_xla"),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVScales:
    """Where the f32 scales of fp8 rows lie: blocks of [page_size, num_kv_heads] in the same pages, one for K, one for V.

    The scales of the page with entry e are in blocks ``e * blocks_per_entry + k_offset`` and ``... + v_offset`` of the
    buffer seen as blocks of that size: offsets are run-time operands, blocks_per_entry is the static ratio of the two
    multipliers (in a page-major pool the number of scale blocks that fill a KV block, 1 in a layer-major one). Blocks are
    numbered in int32 over the whole buffer; rows of scales may be more than that.
    """

    k_offset: Int32[Array, ""] | int
    v_offset: Int32[Array, ""] | int
    blocks_per_entry: int = field(metadata={"static": True})


def gqa_decode(
    q: Float[Array, "rows s_q heads head_dim"],
    buffer: UInt8[Array, " total_bytes"],
    source: ReadSource,
    k_offset: Int32[Array, ""] | int,
    v_offset: Int32[Array, ""] | int | None,
    *,
    kv_dtype: DTypeLike,
    num_kv_heads: int,
    v_head_dim: int | None = None,
    sm_scale: float,
    scales: KVScales | None = None,
    window: int | None = None,
    sinks: Float[Array, " heads"] | None = None,
    logit_cap: float | None = None,
    relative_bias: Float[Array, "rows s_q heads extent"] | None = None,
    q_start: Int32[Array, " rows"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows s_q heads v_head_dim"], Float[Array, "rows s_q heads"]]:
    """Attention of new queries to the K and V rows of their requests; query head h reads KV head h // (heads / kv_heads).

    ``out = softmax(cap(sm_scale * q @ K^T) + bias) @ V``, accumulated in f32.

    Args:
      q: queries. s_q is 1 for decode, a draft's length for verify, a chunk for prefill and extend.
      buffer: the whole byte pool.
      source: where the rows of each request lie, and ``kv_start``, ``kv_end`` of each.
      k_offset, v_offset: int32 scalars added to every entry: the blocks of this layer's K and V rows in a page. A block
        is ``page_size`` rows of num_kv_heads * head_dim elements; blocks must fill the buffer. v_offset None: one row
        holds K and, behind it, V (the form for v_head_dim != head_dim), and k_offset is its block.
      kv_dtype: bfloat16, float16, float32 or float8_e4m3fn (which needs `scales`, and takes them alone).
      num_kv_heads: divides heads. 1 is MQA, `heads` is MHA.
      v_head_dim: width of a V head, default head_dim.
      sm_scale: multiplies the scores (1 / sqrt(head_dim) for a plain model).
      window: a query at position p sees positions p - window + 1 to p. None: all.
      sinks: a logit for each head that joins the softmax's sum and has no value (gpt-oss; arXiv 2309.17453 learns it
        as a token). Not scaled, not capped.
      logit_cap: if given, scores become ``logit_cap * tanh(scores / logit_cap)`` after scaling.
      relative_bias: added to the capped score of a key ``distance`` positions back; 0 from `extent` on.
      q_start: position of each row's first query, default ``kv_end - s_q``. Query i sits at ``q_start[b] + i`` and sees
        the positions p with ``kv_start[b] <= p < kv_end[b]`` and ``p <= q_start[b] + i``. For right-padded chunks pass
        ``kv_end - new_len``: what padding queries give is finite and of no use.
      implementation: "mosaic", "triton" or "xla". None takes the first that can serve of those preferred for the device at hand
        (`pallas_kernels.implementations.run`).

    Returns:
      out in q.dtype, and lse f32: the natural log of the sum of exp(score) over visible positions, the sink included
      (so parts merge by log-sum-exp if one of those that see something has the sink). A query that sees nothing gets
      out 0 and lse +inf, sink or not. Results do not depend on bytes that no query of the row can see, NaN included,
      nor on ids beyond a row's range; the three kinds of source give bit-identical results for the same rows. An entry
      that is negative or past the pool reads the padding page.

    Raises:
      ValueError: shapes, dtypes or sizes that do not fit each other, or an unknown implementation. TypeError: a source
        of another class.
      NotImplementedError: the named implementation cannot serve this call on this device; the text says why.
    """
    operands, options = arguments(
        q, buffer, source, k_offset, v_offset, q_start, kv_dtype=kv_dtype, num_kv_heads=num_kv_heads,
        v_head_dim=v_head_dim, sm_scale=sm_scale, scales=scales, window=window, sinks=sinks, logit_cap=logit_cap,
        relative_bias=relative_bias,
    )  # fmt: skip
    call = implementations.run("gqa_decode", IMPLEMENTATIONS, implementation)
    return call(*operands, q_start=q_start, **options)  # type: ignore[no-any-return]


def arguments(  # type: ignore[no-untyped-def]
    q, buffer, source, k_offset, v_offset, q_start, *, kv_dtype, num_kv_heads, v_head_dim, sm_scale, scales, window,
    sinks, logit_cap, relative_bias,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Arguments of `gqa_decode` and `gqa_prefill`, checked and as implementations take them, less q_start."""
    kv_dtype = jnp.dtype(kv_dtype)
    width = v_head_dim or q.shape[-1]
    _check(
        q, buffer, source, v_offset, kv_dtype, num_kv_heads, width, scales, window, sinks, logit_cap, relative_bias, q_start
    )  # fmt: skip
    offsets = jnp.asarray(k_offset, jnp.int32), None if v_offset is None else jnp.asarray(v_offset, jnp.int32)
    return (q, buffer, source, *offsets), dict(
        kv_dtype=kv_dtype,
        num_kv_heads=num_kv_heads,
        v_head_dim=width,
        sm_scale=float(sm_scale),
        scales=scales,
        window=window,
        sinks=sinks,
        logit_cap=None if logit_cap is None else float(logit_cap),
        relative_bias=relative_bias,
    )


def _check(  # type: ignore[no-untyped-def]
    q, buffer, source, v_offset, kv_dtype, kv_heads, v_head_dim, scales, window, sinks, logit_cap, relative_bias, q_start
) -> None:  # fmt: skip
    """Raises what `gqa_decode` and `gqa_prefill` say of arguments that do not fit each other."""
    if kv_dtype.name not in KV_DTYPES:
        raise ValueError(f"kv_dtype must be one of {KV_DTYPES}, got {kv_dtype.name}")
    if buffer.ndim != 1 or buffer.dtype != jnp.uint8:
        raise ValueError(f"buffer must be uint8[total_bytes], got {buffer.dtype}{list(buffer.shape)}")
    if q.ndim != 4 or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q must be floating [rows, s_q, heads, head_dim], got {q.dtype}{list(q.shape)}")
    rows, s_q, heads, head_dim = q.shape
    check_source(source, rows, q_start)
    if min(s_q, heads, head_dim, kv_heads, v_head_dim) < 1 or heads % kv_heads:
        raise ValueError(
            f"need s_q, heads, head_dim, v_head_dim >= 1 and heads a multiple of num_kv_heads, got s_q {s_q}, heads "
            f"{heads}, head_dim {head_dim}, v_head_dim {v_head_dim}, num_kv_heads {kv_heads}"
        )
    if v_offset is not None and v_head_dim != head_dim:
        raise ValueError(
            f"K and V in blocks of their own need one width, got head_dim {head_dim} and v_head_dim {v_head_dim}; "
            f"for K-then-V rows pass v_offset None"
        )
    if (scales is not None) != (kv_dtype.itemsize == 1):
        raise ValueError(f"fp8 rows need scales and others have none, got kv_dtype {kv_dtype.name}, {scales}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if window is not None and window >= 2**31:
        raise ValueError(f"window must fit int32, got {window}")
    if logit_cap is not None and not logit_cap > 0:
        raise ValueError(f"logit_cap must be positive, got {logit_cap}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks must be [{heads}] to match q, got {list(sinks.shape)}")
    if relative_bias is not None and (
        relative_bias.ndim != 4 or relative_bias.shape[:3] != (rows, s_q, heads) or relative_bias.shape[3] < 1
    ):
        raise ValueError(
            f"relative_bias must be [{rows}, {s_q}, {heads}, extent], got {list(relative_bias.shape)}"
        )
    row = kv_heads * (head_dim if v_offset is not None else head_dim + v_head_dim)
    # What has an id in int32: rows of K and V, but whole blocks of scales, whose rows of a few bytes would be too many.
    numbered = [("rows", row * kv_dtype.itemsize, source.page_size)]
    if scales is not None:
        numbered.append(("blocks of scales", 4 * kv_heads * source.page_size, 1))
    for what, size, in_block in numbered:
        if buffer.shape[0] == 0 or buffer.shape[0] % (size * in_block):
            raise ValueError(
                f"buffer of {buffer.shape[0]} bytes is no whole number of blocks of {size * in_block} bytes"
            )
        if buffer.shape[0] // size >= 2**31:
            raise ValueError(
                f"{buffer.shape[0] // size} {what} of {size} bytes: their ids would not fit int32"
            )
