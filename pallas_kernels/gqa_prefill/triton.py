"""Paged GQA attention of chunks by jax-triton."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels import device
from pallas_kernels.gqa_decode.triton_operands import decline, padded_widths, prepare
from pallas_kernels.jax_triton_call import triton_call
from pallas_kernels.paged_launch import power_of_two
from pallas_kernels.read_source import ReadSource

if TYPE_CHECKING:
    from pallas_kernels.gqa_decode.api import KVScales


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
    decline(q, kv_dtype, v_head_dim, scales is not None)

    from pallas_kernels.gqa_prefill import triton_kernels

    lines = tokens * heads // num_kv_heads
    k_p2, v_p2 = padded_widths(head_dim, v_head_dim)
    tile = tile_sizes(capability, lines, k_p2, v_p2)
    tiles = -(-lines // tile["COLS"])
    programs = rows * num_kv_heads * -(-v_head_dim // tile["V_COLS"]) * tiles
    if not 1 <= programs < 2**31:
        raise NotImplementedError(f"the Triton kernel serves 1 to 2^31 - 1 tiles of queries, got {programs}")
    arrays, constants, read = prepare(
        q,
        buffer,
        source,
        k_offset,
        v_offset,
        q_start,
        kv_dtype=kv_dtype,
        num_kv_heads=num_kv_heads,
        v_head_dim=v_head_dim,
        sm_scale=sm_scale,
        scales=scales,
        window=window,
        sinks=sinks,
        logit_cap=logit_cap,
        relative_bias=relative_bias,
        capability=capability,
    )
    out, lse = triton_call(
        triton_kernels.attend,
        arrays,
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
        V=v_head_dim,
        V_COLS=tile["V_COLS"],
        **read.cover,
        **constants,
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
        cols, block, stages, warps = 128, 64, 3 if max(k_width, v_cols) <= 64 else 2, 8
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
