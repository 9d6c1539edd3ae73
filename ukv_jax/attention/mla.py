"""MLA over the pool: store latent rows, then attend to all rows of the request."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels.mla_decode import api as mla_decode
from pallas_kernels.mla_prefill import api as mla_prefill
from pallas_kernels.mla_prefill.rows import Rows
from pallas_kernels.read_source import ReadSource
from ukv_jax import views
from ukv_jax.attention.fp8 import quantize
from ukv_jax.layout import MLASpec, SubPool
from ukv_jax.translator import KernelTokens


def latent_spec(subpool: SubPool) -> MLASpec:
    """The spec of a sub-pool of latent rows; ValueError for another kind."""
    if not isinstance(subpool.spec, MLASpec):
        raise ValueError(f"sub-pool {subpool.name!r} holds {type(subpool.spec).__name__}, not MLA rows")
    return subpool.spec


def encode_rows(spec: MLASpec, row_width: int, kv: Float[Array, "n width"]) -> Array:
    """Rows as they are stored, `[n, row_width]` of the sub-pool's dtype.

    fp8 (as bytes): `width` e4m3 values that saturate at +-448, one f32 scale (largest magnitude / 448; 1 for a row of
    zeros), zero padding. value = e4m3 * scale.
    """
    if spec.dtype != "float8_e4m3fn":
        return kv.astype(spec.dtype)
    values, scale = quantize(kv)
    row = jnp.concatenate([views.to_bytes(values), views.to_bytes(scale[..., None])], axis=-1)
    return jnp.pad(row, ((0, 0), (0, row_width - row.shape[-1])))


def write(
    subpool: SubPool, buffer: UInt8[Array, " total"], layer: int, locs: KernelTokens, kv_c: Array, k_pe: Array
) -> UInt8[Array, " total"]:
    """Stores one latent row a token at cache-layer `layer`; kv_c and k_pe are [rows, tokens, width], loc 0 drops."""
    region, spec = subpool.region(), latent_spec(subpool)
    kv = jnp.concatenate([kv_c, k_pe], axis=-1)
    stored = encode_rows(spec, region.block_shape[-1], kv.reshape(-1, kv.shape[-1]))
    loc = locs.ids.reshape(-1)
    offset = subpool.block_offset(layer) * subpool.page_size
    return views.write_rows(buffer, jnp.where(loc > 0, loc + offset, -1), stored)


def attend(
    subpool: SubPool,
    buffer: UInt8[Array, " total"],
    layer: int,
    source: ReadSource,
    ql_nope: Float[Array, "rows tokens heads kv_lora_rank"],
    q_pe: Float[Array, "rows tokens heads rope"],
    q_start: Int32[Array, " rows"],
    *,
    sm_scale: float,
    implementation: str | None,
) -> tuple[Float[Array, "rows tokens heads kv_lora_rank"], Float[Array, "rows tokens heads"]]:
    """Output in the latent space and log-sum-exp of each query, query i of a row at position q_start + i."""
    region, spec = subpool.region(), latent_spec(subpool)
    return mla_decode.mla_decode(
        jnp.concatenate([ql_nope, q_pe], axis=-1),
        buffer,
        source,
        jnp.int32(subpool.block_offset(layer)),
        kv_dtype=spec.dtype,
        row_width=region.block_shape[-1],
        v_width=spec.kv_lora_rank,
        sm_scale=sm_scale,
        q_start=q_start,
        implementation=implementation,
    )


def extend(
    subpool: SubPool,
    buffer: UInt8[Array, " total"],
    layer: int,
    source: ReadSource,
    q: Float[Array, "rows tokens heads nope_and_rope"],
    kv_c: Float[Array, "rows tokens kv_lora_rank"],
    k_pe: Float[Array, "rows tokens rope"],
    w_uk: Float[Array, "heads nope kv_lora_rank"],
    w_uv: Float[Array, "heads v kv_lora_rank"],
    q_start: Int32[Array, " rows"],
    new_len: Int32[Array, " rows"],
    *,
    sm_scale: float,
    implementation: str | None,
) -> Float[Array, "rows tokens heads v"]:
    """Attention of a chunk, K and V of its own tokens expanded for each head and not read back from the pool.

    The first new_len tokens of a row stand at q_start onward; `source` may cover them, what it names from q_start on is
    not read. A pool narrower than kv_c (bfloat16 under float32, fp8) therefore rounds a token for later steps and not for
    those of its own chunk.
    """
    region, spec = subpool.region(), latent_spec(subpool)
    rows, tokens, heads, _ = q.shape
    out, _ = mla_prefill.mla_extend(
        q.reshape(rows * tokens, heads, -1),
        jnp.einsum("rtl,hnl->rthn", kv_c, w_uk).reshape(rows * tokens, heads, -1),
        k_pe.reshape(rows * tokens, -1),
        jnp.einsum("rtl,hvl->rthv", kv_c, w_uv).reshape(rows * tokens, heads, -1),
        Rows(jnp.arange(rows, dtype=jnp.int32) * tokens, new_len),
        buffer,
        replace(source, kv_end=jnp.minimum(source.kv_end, q_start)),
        jnp.int32(subpool.block_offset(layer)),
        w_uk,
        w_uv,
        max_new=tokens,
        kv_dtype=spec.dtype,
        row_width=region.block_shape[-1],
        sm_scale=sm_scale,
        # There is no Triton form for new tokens: by that name the chunk takes the one preferred on the device.
        implementation=None if implementation == "triton" else implementation,
        decode_implementation=implementation,
    )
    return out.reshape(rows, tokens, heads, -1)
