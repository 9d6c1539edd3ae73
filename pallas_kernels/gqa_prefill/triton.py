"""Paged GQA attention of chunks by jax-triton."""

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels import device
from pallas_kernels.jax_triton_call import triton_call
from pallas_kernels.paged_launch import operands, power_of_two
from pallas_kernels.read_source import ReadSource

if TYPE_CHECKING:
    from pallas_kernels.gqa_decode.api import KVScales

_LOG2_E = math.log2(math.e)
_MAX_WIDTH = 512


def gqa_prefill_triton(
    q: Float[Array, "rows tokens heads head_dim"],
    buffer: UInt8[Array, " total_bytes"],
    source: ReadSource,
    k_offset: Int32[Array, ""],
    v_offset: Int32[Array, ""] | None,
    q_start: Int32[Array, " rows"],
    *,
    kv_dtype: jnp.dtype,
    num_kv_heads: int,
    v_head_dim: int,
    sm_scale: float,
    scales: "KVScales | None" = None,
    window: int | None = None,
    sinks: Float[Array, " heads"] | None = None,
    logit_cap: float | None = None,
    relative_bias: Float[Array, "rows tokens heads extent"] | None = None,
) -> tuple[Float[Array, "rows tokens heads v_head_dim"], Float[Array, "rows tokens heads"]]:
    """See `pallas_kernels.gqa_prefill.api.gqa_prefill`. NVIDIA GPUs from Ampere on, every source and page size.

    q and KV in bfloat16 or both in float16; KV in float8_e4m3fn under bfloat16 q. Heads up to 512 wide. No temporaries.
    """
    rows, tokens, heads, head_dim = q.shape
    capability = device.target()[1]
    fp8 = scales is not None
    if q.dtype not in (jnp.bfloat16, jnp.float16) or kv_dtype != (jnp.float8_e4m3fn if fp8 else q.dtype):
        raise NotImplementedError(
            f"the Triton kernel serves q and KV in bfloat16 or float16, and float8_e4m3fn KV, got {q.dtype} and {kv_dtype}"
        )
    if fp8 and q.dtype != jnp.bfloat16:
        raise NotImplementedError(f"the Triton kernel serves bfloat16 q over float8_e4m3fn KV, got {q.dtype}")
    if max(head_dim, v_head_dim) > _MAX_WIDTH:
        raise NotImplementedError(
            f"the Triton kernel serves heads up to {_MAX_WIDTH} wide, got {head_dim} and {v_head_dim}"
        )

    from pallas_kernels.gqa_prefill import triton_kernels

    lines = tokens * heads // num_kv_heads
    k_p2, v_p2 = (max(16, power_of_two(width)) for width in (head_dim, v_head_dim))
    tile = tile_sizes(capability, lines, k_p2, v_p2)
    tiles = -(-lines // tile["COLS"])
    programs = rows * num_kv_heads * -(-v_head_dim // tile["V_COLS"]) * tiles
    if not 1 <= programs < 2**31:
        raise NotImplementedError(f"the Triton kernel serves 1 to 2^31 - 1 tiles of queries, got {programs}")
    ps = source.page_size
    row_width = num_kv_heads * (head_dim if v_offset is not None else head_dim + v_head_dim)
    pool = buffer if fp8 else lax.bitcast_convert_type(buffer.reshape(-1, 2), kv_dtype).reshape(-1)
    none = source.kv_end  # stands in for arrays that this call does not have
    read = operands(source)
    if fp8:
        scale_pool = lax.bitcast_convert_type(buffer.reshape(-1, 4), jnp.float32)
        k_scale, v_scale = (jnp.asarray(x, jnp.int32) for x in (scales.k_offset, scales.v_offset))
    else:
        scale_pool = k_scale = v_scale = none
    out, lse = triton_call(
        triton_kernels.attend,
        [
            q,
            pool,
            scale_pool,
            read.ids,
            read.indptr,
            read.row_ids,
            read.v2p,
            source.kv_start,
            source.kv_end,
            q_start,
            k_offset,
            k_offset if v_offset is None else v_offset,
            k_scale,
            v_scale,
            none if sinks is None else sinks.astype(jnp.float32),
            none if relative_bias is None else relative_bias,
        ],
        [
            jax.ShapeDtypeStruct((rows, tokens, heads, v_head_dim), q.dtype),
            jax.ShapeDtypeStruct((rows, tokens, heads), jnp.float32),
        ],
        grid=(programs,),
        compute_capability=capability,
        num_warps=tile["WARPS"],
        num_stages=tile["STAGES"],
        TOKENS=tokens,
        HEADS=heads,
        KV_HEADS=num_kv_heads,
        COLS=tile["COLS"],
        TILES=tiles,
        BLOCK=tile["BLOCK"],
        STAGES=tile["STAGES"],
        K=head_dim,
        K_P2=k_p2,
        V=v_head_dim,
        V_COLS=tile["V_COLS"],
        ROW=row_width,
        V_COLUMN=0 if v_offset is not None else num_kv_heads * head_dim,
        **read.cover,
        **read.pages,
        NUM_BLOCKS=buffer.shape[0] // (row_width * kv_dtype.itemsize * ps),
        SCALE_RATIO=scales.blocks_per_entry if fp8 else 0,
        WINDOW=0 if window is None else min(window, 2**31 - 1),
        SCALE=sm_scale * _LOG2_E,
        CAP=0.0 if logit_cap is None else logit_cap * _LOG2_E,
        EXTENT=0 if relative_bias is None else relative_bias.shape[-1],
        SINKS=sinks is not None,
        NATIVE=capability >= (8, 9),
    )
    return out, lse


def tile_sizes(capability: tuple[int, int], lines: int, k_width: int, v_width: int) -> dict[str, int]:
    """COLS lines (query, query head) and V_COLS columns of V a program, BLOCK positions a step, STAGES of K and V in
    shared memory, WARPS.

    A thread holds its share of COLS x V_COLS sums in registers, which ends at 256 columns: more are dealt to programs
    that each compute the scores.

    lines: of a row that read one KV head; widths: of K and V of a head, padded to powers of two. Limits of shared
    memory, in KiB: 227 (9.0, 10.0), 163 (8.0), 99 (8.6, 8.9, 12.0).
    """
    limit = 227 if capability[0] in (9, 10) else 163 if capability == (8, 0) else 99
    v_cols = min(v_width, 256)
    if max(k_width, v_cols) <= 128:
        cols, block, stages, warps = 128, 64, 2, 8
    elif k_width <= 256:
        cols, block, stages, warps = 64, 64, 2, 4
    else:
        cols, block, stages, warps = 64, 32, 2, 4
    if limit == 99:
        cols, block = min(cols, 64), block // 2
    cols = min(cols, max(16, power_of_two(lines)))
    return {
        "COLS": cols, "BLOCK": block, "STAGES": stages, "WARPS": min(warps, max(4, cols // 16)), "V_COLS": v_cols
    }  # fmt: skip
