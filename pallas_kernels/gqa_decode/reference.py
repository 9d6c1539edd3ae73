"""Paged GQA attention in plain XLA: an online softmax over chunks of KV positions.

As in `pallas_kernels.mla_decode.reference` rows are gathered as stored bytes, temporaries are bounded by rows x chunk,
and the trip count is a run-time value that starts where the first row's window does.
"""

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels.read_source import ReadSource
from pallas_kernels.xla_attention import Softmax, chunk_range, chunk_tokens, dot, page_entries

if TYPE_CHECKING:
    from pallas_kernels.gqa_decode.api import KVScales


# Jitted by itself: called eagerly, the closures of its loop would be compiled anew at every call.
@partial(
    jax.jit, static_argnames=("kv_dtype", "num_kv_heads", "v_head_dim", "sm_scale", "window", "logit_cap")
)
def gqa_decode_xla(
    q: Float[Array, "rows s_q heads head_dim"],
    buffer: UInt8[Array, " total_bytes"],
    source: ReadSource,
    k_offset: Int32[Array, ""],
    v_offset: Int32[Array, ""] | None,
    *,
    kv_dtype: DTypeLike,
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
    """See `pallas_kernels.gqa_decode.api.gqa_decode`. Runs on every backend."""
    rows, s_q, heads, head_dim = q.shape
    ps, itemsize = source.page_size, jnp.dtype(kv_dtype).itemsize
    k_row, v_row = num_kv_heads * head_dim, num_kv_heads * v_head_dim
    row_width = k_row if v_offset is not None else k_row + v_row
    pool = buffer.reshape(-1, row_width * itemsize)
    last_offset = k_offset if v_offset is None else jnp.maximum(k_offset, v_offset)
    entry_of, kv_end = page_entries(source, pool.shape[0] // ps - last_offset)
    if q_start is None:
        q_start = source.kv_end - s_q
    # A position that no query of the row reaches is as dead as one past the end: its bytes may be anything.
    kv_start = source.kv_start
    if window is not None:
        kv_start = jnp.maximum(kv_start, q_start - (window - 1))
    kv_stop = jnp.minimum(kv_end, q_start + s_q)
    q_pos = q_start[:, None] + jnp.arange(s_q, dtype=jnp.int32)
    grouped_q = (q.astype(jnp.float32) * sm_scale).reshape(rows, s_q, num_kv_heads, -1, head_dim)
    chunk = chunk_tokens(rows, s_q * heads, k_row + v_row)

    def load(raw, width, live, scale_offset, entry, slot):
        """Stored bytes of K or V as f32 [rows, chunk, kv_heads, width]; dead positions read as 0, NaN included."""
        raw = raw.reshape(rows, chunk, num_kv_heads, width, itemsize)
        values = lax.bitcast_convert_type(raw if itemsize > 1 else raw[..., 0], kv_dtype).astype(jnp.float32)
        if scales is not None:
            # By block and slot: rows of a few bytes may be more than int32 counts.
            scale_pool = buffer.reshape(-1, ps, num_kv_heads * 4)
            block = entry * scales.blocks_per_entry + scale_offset
            scale = scale_pool.at[block, slot].get(mode="clip").reshape(rows, chunk, num_kv_heads, 4)
            values = values * lax.bitcast_convert_type(scale, jnp.float32)[..., None]
        return jnp.where(live[..., None, None], values, 0.0)

    def body(c, softmax):
        pos = jnp.broadcast_to(c * chunk + jnp.arange(chunk, dtype=jnp.int32), (rows, chunk))
        live = (pos >= kv_start[:, None]) & (pos < kv_stop[:, None])
        entry, slot = entry_of(pos), pos % ps
        k_raw = pool.at[(entry + k_offset) * ps + slot].get(mode="clip")
        if v_offset is None:
            k_raw, v_raw = k_raw[..., : k_row * itemsize], k_raw[..., k_row * itemsize :]
        else:
            v_raw = pool.at[(entry + v_offset) * ps + slot].get(mode="clip")
        k = load(k_raw, head_dim, live, None if scales is None else scales.k_offset, entry, slot)
        v = load(v_raw, v_head_dim, live, None if scales is None else scales.v_offset, entry, slot)
        s = dot("bqhgd,bkhd->bqhgk", grouped_q, k).reshape(rows, s_q, heads, chunk)
        if logit_cap is not None:
            s = logit_cap * jnp.tanh(s / logit_cap)
        distance = (q_pos[:, :, None] - pos[:, None, :])[:, :, None, :]
        if relative_bias is not None:
            extent = relative_bias.shape[-1]
            near = jnp.broadcast_to(jnp.clip(distance, 0, extent - 1), (*s.shape[:2], 1, chunk))
            bias = jnp.take_along_axis(relative_bias.astype(jnp.float32), near, axis=-1)
            s = s + jnp.where(distance < extent, bias, 0.0)
        visible = live[:, None, None, :] & (distance >= 0)
        if window is not None:
            visible &= distance < window
        s = jnp.where(visible, s, -jnp.inf)

        def weigh(p):
            p = p.reshape(rows, s_q, num_kv_heads, -1, chunk)
            return dot("bqhgk,bkhd->bqhgd", p, v).reshape(rows, s_q, heads, v_head_dim)

        return softmax.add(s, weigh)

    first, last = chunk_range(kv_start, kv_stop, chunk)
    softmax = lax.fori_loop(first, last, body, Softmax.begin((rows, s_q, heads), v_head_dim))
    if sinks is not None:
        softmax = softmax.with_sink(sinks.astype(jnp.float32))
    out, lse = softmax.result()
    return out.astype(q.dtype), lse
