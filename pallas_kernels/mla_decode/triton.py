"""Paged MLA attention by jax-triton: for GPUs and shapes that the Mosaic kernel declines."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels import device, paged_launch
from pallas_kernels.jax_triton_call import triton_call
from pallas_kernels.paged_launch import operands, power_of_two
from pallas_kernels.read_source import ReadSource

_LOG2_E = math.log2(math.e)
_FEW_GROUPS = 8


def mla_decode_triton(
    q: Float[Array, "rows s_q heads qk_width"],
    buffer: UInt8[Array, " total_bytes"],
    source: ReadSource,
    block_offset: Int32[Array, ""],
    *,
    kv_dtype: jnp.dtype,
    row_width: int,
    v_width: int,
    sm_scale: float,
    logit_cap: float | None = None,
    q_start: Int32[Array, " rows"] | None = None,
) -> tuple[Float[Array, "rows s_q heads v_width"], Float[Array, "rows s_q heads"]]:
    """See `pallas_kernels.mla_decode.api.mla_decode`. NVIDIA GPUs from Ampere on, any page size, s_q to 8.

    q in bfloat16, KV in bfloat16 or float8_e4m3fn. Fp8 rows become f16 in registers, exactly.
    """
    rows, s_q, heads, qk_width = q.shape
    capability = device.target()[1]
    fp8 = kv_dtype == jnp.float8_e4m3fn
    if q.dtype != jnp.bfloat16 or not (fp8 or kv_dtype == jnp.bfloat16):
        raise NotImplementedError(
            f"the Triton kernel serves bfloat16 q, and KV in bfloat16 or float8_e4m3fn, got {q.dtype} and {kv_dtype}"
        )
    if fp8 and row_width % 4:
        raise NotImplementedError(
            f"the Triton kernel reads a row's scale as a word: row_width must be a multiple of 4, got {row_width}"
        )
    paged_launch.decline(rows, s_q)
    if v_width > 512 or qk_width - v_width > 128:
        raise NotImplementedError(
            f"the Triton kernel serves V to 512 and K to 128 more, got {v_width}, {qk_width}"
        )

    from pallas_kernels import paged_triton
    from pallas_kernels.mla_decode import triton_kernels

    columns = s_q * heads
    tile = tile_sizes(capability, columns, fp8)
    groups = -(-columns // tile["COLS"])
    slices = max(1, tile["PER_CORE"] * device.core_count() // groups)
    ps = source.page_size
    pool = buffer if fp8 else lax.bitcast_convert_type(buffer.reshape(-1, 2), jnp.bfloat16)
    pool = pool.reshape(-1, row_width)
    read = operands(source)
    # Without q_start the queries end at kv_end.
    first_query, q_stop = (source.kv_end, 0) if q_start is None else (q_start, s_q)
    deal: dict[str, Any] = {
        "ROWS": rows,
        "ROWS_P2": power_of_two(rows),
        "S_Q": s_q,
        "HEADS": heads,
        "COLS": tile["COLS"],
        "GROUPS": groups,
        "SLICES": slices,
        "BLOCK": tile["BLOCK"],
        "V": v_width,
        "V_P2": max(16, power_of_two(v_width)),
        **read.cover,
        "Q_STOP": q_stop,
    }
    scale = sm_scale * _LOG2_E
    f32 = jnp.float32
    out, lse, part, part_lse = triton_call(
        triton_kernels.attend,
        [
            q,
            pool,
            read.ids,
            read.indptr,
            read.row_ids,
            read.v2p,
            source.kv_start,
            source.kv_end,
            first_query,
            block_offset,
        ],
        [
            jax.ShapeDtypeStruct((rows, s_q, heads, v_width), q.dtype),
            jax.ShapeDtypeStruct((rows, s_q, heads), f32),
            jax.ShapeDtypeStruct((2 * slices, groups, tile["COLS"], deal["V_P2"]), f32),
            jax.ShapeDtypeStruct((2 * slices, groups, tile["COLS"]), f32),
        ],
        grid=(slices * groups,),
        compute_capability=capability,
        num_warps=tile["WARPS"],
        num_stages=tile["STAGES"],
        **deal,
        STAGES=tile["STAGES"],
        QK=qk_width,
        ROPE_P2=0 if qk_width == v_width else max(16, power_of_two(qk_width - v_width)),
        ROW=row_width,
        **read.pages,
        NUM_BLOCKS=pool.shape[0] // ps,
        SCALE=scale,
        CAP=0.0 if logit_cap is None else logit_cap * _LOG2_E,
        FP8=fp8,
        NATIVE=capability >= (8, 9),
    )
    v_tile, chunk, lines = merge_sizes(rows * groups, device.core_count(), tile["COLS"])
    v_tile = min(v_tile, deal["V_P2"])
    out, lse = triton_call(
        paged_triton.merge,
        [read.indptr, source.kv_start, source.kv_end, first_query, part, part_lse],
        update=[out, lse],
        grid=(rows, groups * (tile["COLS"] // lines), deal["V_P2"] // v_tile),
        compute_capability=capability,
        num_warps=4,
        num_stages=1,
        **deal,
        KV_HEADS=1,
        REACH=0,
        V_TILE=v_tile,
        CHUNK=chunk,
        LINES=lines,
    )
    return out, lse


def tile_sizes(capability: tuple[int, int], columns: int, fp8: bool = False) -> dict[str, int]:
    """COLS query heads a program, BLOCK tokens a step, STAGES of KV in shared memory, WARPS, programs PER_CORE.

    Limits of shared memory, in KiB: 227 (9.0, 10.0), 163 (8.0), 99 (8.6, 8.9, 12.0). At 576 x bf16 a stage takes
    1.125 KiB a token, q 1.125 KiB a column.
    """
    cols = 16 if columns <= 16 else 32 if columns <= 32 else 64
    if capability[0] == 9:
        # Measured on an H200, with an earlier form of the merge: 0.59 (16 heads), 0.49 (32) and 0.37 (128) of the time
        # of SGLang's Triton kernel.
        # fp8 at 32 columns: blocks of 32 with two programs a core took half the time of a block of 64.
        if cols == 16 or (fp8 and cols == 32):
            return {"COLS": cols, "BLOCK": 32, "STAGES": 2, "WARPS": 4, "PER_CORE": 2}
        return {"COLS": cols, "BLOCK": 64, "STAGES": 2, "WARPS": 4 if cols == 32 else 8, "PER_CORE": 1}
    if capability[0] == 10:
        return {"COLS": min(cols, 32), "BLOCK": 32, "STAGES": 2, "WARPS": 8, "PER_CORE": 1}
    if capability == (8, 0):
        return {"COLS": min(cols, 32), "BLOCK": 32, "STAGES": 3, "WARPS": 8, "PER_CORE": 1}
    return {"COLS": 16, "BLOCK": 32, "STAGES": 2, "WARPS": 4, "PER_CORE": 1}


def merge_sizes(groups: int, cores: int, columns: int) -> tuple[int, int, int]:
    """V_TILE, CHUNK and LINES of the merge, for so many groups of `columns` columns in the whole batch.

    Few rows have many parts each: small tiles for enough programs, and many parts at a time. On an H200 the merge of 128
    parts of one row of 32 heads took 51 us with (32, 8, 32), 4.7 us with (64, 64, 2).
    """
    if groups <= _FEW_GROUPS:
        return 64, 64, 2
    return (128, 2, columns) if groups >= cores else (32, 8, columns)
