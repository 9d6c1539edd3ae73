"""Paged MLA attention in plain XLA: an online softmax over chunks of KV positions.

The pool is gathered as stored bytes and the gathered rows are bitcast: a typed view of the whole pool costs nothing on
a GPU but is copied at every use on CPU. Temporaries are bounded by rows x chunk; the trip count is a run-time value, so
the work follows the longest live context and not the width of the tables.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32, UInt8

from pallas_kernels.read_source import ReadSource
from pallas_kernels.xla_attention import Softmax, chunk_range, chunk_tokens, dot, row_index


# Jitted by itself: called eagerly, the closures of its loop would be compiled anew at every call.
@partial(jax.jit, static_argnames=("kv_dtype", "row_width", "v_width", "sm_scale", "logit_cap"))
def mla_decode_xla(
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
) -> tuple[Float[Array, "rows s_q heads v_width"], Float[Array, "rows s_q heads"]]:
    """See `pallas_kernels.mla_decode.api.mla_decode`. Runs on every backend."""
    rows, s_q, heads, qk_width = q.shape
    pool = buffer.reshape(-1, row_width * jnp.dtype(kv_dtype).itemsize)
    row_of, kv_end = row_index(source, block_offset, pool.shape[0])
    if q_start is None:
        q_start = source.kv_end - s_q
    # A position that no query of the row reaches is as dead as one past the end: its bytes may be anything.
    kv_stop = jnp.minimum(kv_end, q_start + s_q)
    q_pos = q_start[:, None] + jnp.arange(s_q, dtype=jnp.int32)
    scaled_q = q.astype(jnp.float32) * sm_scale
    chunk = chunk_tokens(rows, s_q * heads, row_width)

    def body(c, softmax):
        pos = jnp.broadcast_to(c * chunk + jnp.arange(chunk, dtype=jnp.int32), (rows, chunk))
        live = (pos >= source.kv_start[:, None]) & (pos < kv_stop[:, None])
        kv = load_rows(pool, row_of(pos), live, kv_dtype, qk_width)
        s = dot("bqhd,bkd->bqhk", scaled_q, kv)
        if logit_cap is not None:
            s = logit_cap * jnp.tanh(s / logit_cap)
        visible = live[:, None, None, :] & (pos[:, None, None, :] <= q_pos[:, :, None, None])
        s = jnp.where(visible, s, -jnp.inf)
        return softmax.add(s, lambda p: dot("bqhk,bkd->bqhd", p, kv[..., :v_width]))

    first, last = chunk_range(source.kv_start, kv_stop, chunk)
    out, lse = lax.fori_loop(first, last, body, Softmax.begin((rows, s_q, heads), v_width)).result()
    return out.astype(q.dtype), lse


def load_rows(
    pool: UInt8[Array, "num_rows row_bytes"],
    index: Int32[Array, "rows chunk"],
    live: Bool[Array, "rows chunk"],
    kv_dtype: DTypeLike,
    width: int,
) -> Float[Array, "rows chunk width"]:
    """First `width` elements of the pool rows at `index` in f32; rows that are not live read as 0, NaN included."""
    itemsize = jnp.dtype(kv_dtype).itemsize
    raw = pool.at[index].get(mode="clip")
    if itemsize == 1:
        kv = lax.bitcast_convert_type(raw[..., :width], kv_dtype).astype(jnp.float32)
        scale = lax.bitcast_convert_type(raw[..., width : width + 4], jnp.float32)
        kv = kv * scale[..., None]
    else:
        values = raw[..., : width * itemsize].reshape(*index.shape, width, itemsize)
        kv = lax.bitcast_convert_type(values, kv_dtype).astype(jnp.float32)
    return jnp.where(live[..., None], kv, 0.0)
