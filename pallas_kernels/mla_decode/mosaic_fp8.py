"""Paged MLA decode over e4m3 rows for Hopper in Pallas Mosaic GPU: products transposed, V converted in registers.

The schedule is that of the bf16 kernel: persistent blocks, each with one tile of query columns and a share of the batch's
KV tiles of 64 positions, which it finds itself; rows cut between blocks leave parts for `mosaic_parts` to merge. What differs
follows from the bytes. A tile comes in 1.2 us, so neither padding few heads to 64 rows nor writing f16 back to shared
memory is affordable. Hence S^T = K Q^T and O^T = V^T P^T: heads are columns, as few as there are. K is an e4m3 operand as
it lies in shared memory, and the 8 bits of a bf16 query are two e4m3 terms. V, which e4m3 products would want the other
way round, becomes f16 in registers (`mosaic_fp8_registers`). docs/mla_decode_fp8.md derives the numbers.

q is brought into e4m3's range by a power of two for each query and head. A token's scale multiplies its scores; for P V,
whose products are of f16, it is part of the exponent: P = exp2(s + log2(scale) - peak) with the peak of that sum, and the
sum of weights takes it out again. So P fits f16 for scales of any size.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels import paged_mosaic
from pallas_kernels.mla_decode.mosaic_fp8_pairs import Fp8Call
from pallas_kernels.read_source import ReadSource

_ROPE = 64  # columns behind V; a row has as many bytes again for its scale and padding
_SMS = 132


@dataclass(frozen=True)
class TuningConfig:
    """Launch parameters. `blocks`: thread blocks, one a multiprocessor."""

    blocks: int = _SMS

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"blocks must be at least 1, got {self.blocks}")


def mla_decode_mosaic_fp8(
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
    config: TuningConfig | None = None,
) -> tuple[Float[Array, "rows s_q heads v_width"], Float[Array, "rows s_q heads"]]:
    """See `pallas_kernels.mla_decode.api.mla_decode`. Raises NotImplementedError for what this kernel does not serve."""
    rows, s_q, heads, qk_width = q.shape
    _decline(q, source, kv_dtype, row_width, v_width, sm_scale)
    config = config or TuningConfig()
    queries = s_q * heads
    columns = 16 if queries <= 16 else 32
    paged_mosaic.decline_latent(s_q, heads, v_width, columns, config.blocks)
    if rows == 0:
        return jnp.zeros((0, s_q, heads, v_width), q.dtype), jnp.zeros((0, s_q, heads), jnp.float32)
    # A load brings whole swizzle tiles of 8 rows.
    lines = jnp.pad(q.reshape(rows, queries, qk_width), ((0, 0), (0, -queries % 8), (0, 0)))
    call = Fp8Call(
        q=lax.bitcast_convert_type(lines, jnp.uint8).reshape(rows, -1, 2 * qk_width),
        pool=buffer.reshape(-1, source.page_size, row_width),
        source=source,
        block_offset=jnp.asarray(block_offset, jnp.int32).reshape(1),
        q_start=q_start,
        rows=rows,
        s_q=s_q,
        heads=heads,
        columns=columns,
        v_width=v_width,
        sm_scale=sm_scale,
        logit_cap=logit_cap,
        blocks=config.blocks,
    )
    out, lse = call.run()
    return out.reshape(rows, s_q, heads, v_width), lse.reshape(rows, s_q, heads)


def _decline(q, source, kv_dtype, row_width, v_width, sm_scale) -> None:  # type: ignore[no-untyped-def]
    paged_mosaic.decline(q.shape[1], source, sm_scale)
    qk_width = q.shape[-1]
    if q.dtype != jnp.bfloat16 or jnp.dtype(kv_dtype) != jnp.float8_e4m3fn:
        raise NotImplementedError(
            f"q must be bfloat16 and KV float8_e4m3fn, got {q.dtype} and {jnp.dtype(kv_dtype)}"
        )
    if qk_width != v_width + _ROPE or row_width != v_width + 2 * _ROPE:
        raise NotImplementedError(
            f"qk_width must be v_width + 64 and row_width v_width + 128, got {qk_width}, {row_width} and v_width {v_width}"
        )
