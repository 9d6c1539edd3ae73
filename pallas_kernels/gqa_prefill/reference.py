"""Paged GQA attention of chunks in plain XLA: that of decode, whose queries may be any number, less padding queries."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels.gqa_decode.reference import gqa_decode_xla
from pallas_kernels.read_source import ReadSource


def gqa_prefill_xla(
    q: Float[Array, "rows tokens heads head_dim"],
    buffer: UInt8[Array, " total_bytes"],
    source: ReadSource,
    k_offset: Int32[Array, ""],
    v_offset: Int32[Array, ""] | None,
    q_start: Int32[Array, " rows"],
    **options: Any,
) -> tuple[Float[Array, "rows tokens heads v_head_dim"], Float[Array, "rows tokens heads"]]:
    """See `pallas_kernels.gqa_prefill.api.gqa_prefill`. Runs on every backend.

    Temporaries: f32 scores of the whole chunk and 32 to 256 positions, f32 rows of as many, and the f32 output.
    """
    tokens = q.shape[1]
    real = q_start[:, None] + jnp.arange(tokens, dtype=jnp.int32) < source.kv_end[:, None]
    q = jnp.where(real[..., None, None], q, 0)
    out, lse = gqa_decode_xla(q, buffer, source, k_offset, v_offset, q_start=q_start, **options)
    return jnp.where(real[..., None, None], out, 0), jnp.where(real[..., None], lse, jnp.inf)
