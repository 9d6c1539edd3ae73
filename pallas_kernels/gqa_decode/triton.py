"""Paged GQA attention by jax-triton: for GPUs, shapes and options that the Mosaic kernel declines."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels import device, paged_launch
from pallas_kernels.gqa_decode.triton_operands import decline, padded_widths, prepare
from pallas_kernels.jax_triton_call import triton_call
from pallas_kernels.paged_launch import power_of_two
from pallas_kernels.read_source import ReadSource

if TYPE_CHECKING:
    from pallas_kernels.gqa_decode.api import KVScales


def gqa_decode_triton(
    q: Float[Array, "rows s_q heads head_dim"],
    buffer: UInt8[Array, " total_bytes"],
    source: ReadSource,
    k_offset: Int32[Array, ""],
    v_offset: Int32[Array, ""] | None,
    *,
    kv_dtype: jnp.dtype,
    num_kv_heads: int,
    v_head_dim: int,
    sm_scale: float,
    scales: "KVScales | None" = None,
    window: int | None = None,
    sinks: Float[Array, " heads"] | None = None,
    logit_cap: float | None = None,
    relative_bias: Float[Array, "rows s_q heads extent"] | None = None,
    q_start: Int32[Array, " rows"] | None = None,
) -> tuple[Float[Array, "rows s_q heads v_head_dim"], Float[Array, "rows s_q heads"]]:
    """See `pallas_kernels.gqa_decode.api.gqa_decode`. NVIDIA GPUs from Ampere on, every source and page size, s_q to 8.

    q and KV in bfloat16 or both in float16; KV in float8_e4m3fn under bfloat16 q. Heads up to 512 wide. Temporaries are
    f32 partials of the output: twice its elements, or those of 2 to 4 lines a multiprocessor and query head.
    """
    rows, s_q, heads, head_dim = q.shape
    capability = device.target()[1]
    decline(q, kv_dtype, v_head_dim, scales is not None)
    paged_launch.decline(rows, s_q)

    from pallas_kernels import paged_triton
    from pallas_kernels.gqa_decode import triton_kernels

    sharing = s_q * heads // num_kv_heads
    k_p2, v_p2 = padded_widths(head_dim, v_head_dim)
    tile = tile_sizes(capability, sharing, (k_p2 + v_p2) * kv_dtype.itemsize, v_p2)
    groups = num_kv_heads * -(-sharing // tile["COLS"])
    slices = max(1, tile["PER_CORE"] * device.core_count() // groups)
    # Without q_start the queries end at kv_end.
    first_query, q_stop = (source.kv_end, 0) if q_start is None else (q_start, s_q)
    arrays, constants, read = prepare(
        q,
        buffer,
        source,
        k_offset,
        v_offset,
        first_query,
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
    deal: dict[str, Any] = {
        "ROWS": rows,
        "ROWS_P2": power_of_two(rows),
        "S_Q": s_q,
        "HEADS": heads,
        "KV_HEADS": num_kv_heads,
        "COLS": tile["COLS"],
        "GROUPS": groups,
        "SLICES": slices,
        "BLOCK": tile["BLOCK"],
        "V": v_head_dim,
        "V_P2": v_p2,
        **read.cover,
        "Q_STOP": q_stop,
        "REACH": 0 if window is None else min(window + s_q - 1, 2**31 - 1),
    }
    f32 = jnp.float32
    out, lse, part, part_lse = triton_call(
        triton_kernels.attend,
        arrays,
        [
            jax.ShapeDtypeStruct((rows, s_q, heads, v_head_dim), q.dtype),
            jax.ShapeDtypeStruct((rows, s_q, heads), f32),
            jax.ShapeDtypeStruct((2 * slices, groups, tile["COLS"], v_p2), f32),
            jax.ShapeDtypeStruct((2 * slices, groups, tile["COLS"]), f32),
        ],
        grid=(slices * groups,),
        compute_capability=capability,
        num_warps=tile["WARPS"],
        num_stages=tile["STAGES"],
        **deal,
        STAGES=tile["STAGES"],
        **constants,
    )
    # Few rows have many parts each: small tiles of V for enough programs, and many parts at a time.
    v_tile, chunk = (128, 2) if rows * groups >= device.core_count() else (32, 8)
    v_tile = min(v_tile, v_p2)
    out, lse = triton_call(
        paged_triton.merge,
        [read.indptr, source.kv_start, source.kv_end, first_query, part, part_lse],
        update=[out, lse],
        grid=(rows, groups, v_p2 // v_tile),
        compute_capability=capability,
        num_warps=4,
        num_stages=1,
        **deal,
        V_TILE=v_tile,
        CHUNK=chunk,
        LINES=tile["COLS"],
    )
    return out, lse


def tile_sizes(capability: tuple[int, int], sharing: int, token_bytes: int, v_width: int) -> dict[str, int]:
    """COLS query heads a program, BLOCK tokens a step, STAGES of K and V in shared memory, WARPS, programs PER_CORE.

    sharing: columns that read one KV head; token_bytes: of K and V of one head, widths padded to powers of two. Limits
    of shared memory, in KiB: 227 (9.0, 10.0), 163 (8.0), 99 (8.6, 8.9, 12.0).
    """
    limit = 227 if capability[0] in (9, 10) else 163 if capability == (8, 0) else 99
    cols = 16 if sharing <= 16 else 32 if sharing <= 32 else 64
    if limit == 99 or v_width >= 256:
        cols = min(cols, 32 if v_width <= 256 and limit > 99 else 16)
    # A stage of at most 32 KiB; what is left of shared memory holds q, P and the ids.
    block = 64
    while block > 16 and block * token_bytes > (32 << 10 if limit > 99 else 16 << 10):
        block //= 2
    stage = block * token_bytes
    # Measured on an H200, 64 x 32 / 8 heads of 128 x 8192: 2 stages and 2 programs 550 us, 3 and 2 671, 4 and 1 1131; 64 x
    # 64 / 8 heads of 64 x 8192: 3 and 4 327, 4 and 3 387, 3 and 2 506.
    stages, most = (2, 2) if capability[0] == 9 and stage > 16 << 10 else (3, 4 if capability[0] == 9 else 2)
    per_core = max(1, min(most, ((limit - 30) << 10) // (stages * stage))) if cols == 16 else 1
    return {"COLS": cols, "BLOCK": block, "STAGES": stages, "WARPS": 4, "PER_CORE": per_core}
