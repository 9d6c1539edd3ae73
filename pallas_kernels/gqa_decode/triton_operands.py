"""What the launchers of the two Triton kernels of GQA, decode and chunks, share. Needs no triton."""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels.paged_launch import Operands, operands, power_of_two
from pallas_kernels.read_source import ReadSource

if TYPE_CHECKING:
    from pallas_kernels.gqa_decode.api import KVScales

_LOG2_E = math.log2(math.e)
_MAX_WIDTH = 512


def decline(q: Array, kv_dtype: jnp.dtype, v_head_dim: int, fp8: bool) -> None:
    """NotImplementedError, with the reason, for dtypes and widths that neither kernel serves."""
    if q.dtype not in (jnp.bfloat16, jnp.float16) or kv_dtype != (jnp.float8_e4m3fn if fp8 else q.dtype):
        raise NotImplementedError(
            f"the Triton kernel serves q and KV in bfloat16 or float16, and float8_e4m3fn KV, got {q.dtype} and {kv_dtype}"
        )
    if fp8 and q.dtype != jnp.bfloat16:
        raise NotImplementedError(f"the Triton kernel serves bfloat16 q over float8_e4m3fn KV, got {q.dtype}")
    if max(q.shape[3], v_head_dim) > _MAX_WIDTH:
        raise NotImplementedError(
            f"the Triton kernel serves heads up to {_MAX_WIDTH} wide, got {q.shape[3]} and {v_head_dim}"
        )


def padded_widths(head_dim: int, v_head_dim: int) -> tuple[int, int]:
    """Columns that the kernels work with: powers of two, at least 16."""
    return max(16, power_of_two(head_dim)), max(16, power_of_two(v_head_dim))


class Launch(NamedTuple):
    """arrays and constants of `attend`, as far as both kernels have them; read: the source, which the merge needs too."""

    arrays: list[Array]
    constants: dict[str, Any]
    read: Operands


def prepare(
    q: Float[Array, "rows s_q heads head_dim"],
    buffer: UInt8[Array, " total_bytes"],
    source: ReadSource,
    k_offset: Int32[Array, ""],
    v_offset: Int32[Array, ""] | None,
    first_query: Int32[Array, " rows"],
    *,
    kv_dtype: jnp.dtype,
    num_kv_heads: int,
    v_head_dim: int,
    sm_scale: float,
    scales: "KVScales | None",
    window: int | None,
    sinks: Float[Array, " heads"] | None,
    logit_cap: float | None,
    relative_bias: Array | None,
    capability: tuple[int, int],
) -> Launch:
    head_dim = q.shape[3]
    fp8 = scales is not None
    row_width = num_kv_heads * (head_dim if v_offset is not None else head_dim + v_head_dim)
    none = source.kv_end  # stands in for arrays that this call does not have
    scale_pool = k_scale = v_scale = none
    if scales is not None:
        scale_pool = lax.bitcast_convert_type(buffer.reshape(-1, 4), jnp.float32)
        k_scale, v_scale = (jnp.asarray(x, jnp.int32) for x in (scales.k_offset, scales.v_offset))
    read = operands(source)
    arrays = [
        q,
        buffer if fp8 else lax.bitcast_convert_type(buffer.reshape(-1, 2), kv_dtype).reshape(-1),
        scale_pool,
        read.ids,
        read.indptr,
        read.row_ids,
        read.v2p,
        source.kv_start,
        source.kv_end,
        first_query,
        k_offset,
        k_offset if v_offset is None else v_offset,
        k_scale,
        v_scale,
        none if sinks is None else sinks.astype(jnp.float32),
        none if relative_bias is None else relative_bias,
    ]
    constants = {
        "K": head_dim,
        "K_P2": padded_widths(head_dim, v_head_dim)[0],
        "ROW": row_width,
        "V_COLUMN": 0 if v_offset is not None else num_kv_heads * head_dim,
        **read.pages,
        "NUM_BLOCKS": buffer.shape[0] // (row_width * kv_dtype.itemsize * source.page_size),
        "SCALE_RATIO": scales.blocks_per_entry if scales is not None else 0,
        "WINDOW": 0 if window is None else min(window, 2**31 - 1),
        "SCALE": sm_scale * _LOG2_E,
        "CAP": 0.0 if logit_cap is None else logit_cap * _LOG2_E,
        "EXTENT": 0 if relative_bias is None else relative_bias.shape[-1],
        "SINKS": sinks is not None,
        "NATIVE": capability >= (8, 9),
    }
    return Launch(arrays, constants, read)
