"""Ragged MLA attention in plain XLA: an online softmax over tiles of keys for each tile of queries, f32 throughout.

Tiles of all rows are worked on together; trip counts are run-time values, so the work follows the longest live row, and
temporaries are bounded by rows x tile.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.mla_prefill.rows import Rows

_TILE_BYTES = 64 << 20  # f32 scores and operands of one step stay within this
_MIN_TILE, _MAX_TILE = 16, 256

# f32 products on every backend: the default precision of a GPU would round the operands to TF32.
_dot = partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


# Jitted by itself: called eagerly, the closures of its loops would be compiled anew at every call.
@partial(jax.jit, static_argnames=("causal", "sm_scale"))
def mla_attention_xla(
    q: Float[Array, "tokens heads qk_width"],
    k_nope: Float[Array, "kv_tokens heads nope"],
    k_pe: Float[Array, "kv_tokens rope"],
    v: Float[Array, "kv_tokens heads v_width"],
    queries: Rows,
    keys: Rows,
    *,
    causal: bool,
    sm_scale: float,
) -> tuple[Float[Array, "tokens heads v_width"], Float[Array, "tokens heads"]]:
    """Attention of each row's queries to the same row's keys, K of a head = [k_nope, k_pe].

    causal: query i of a row sees the keys j <= i; else all of them. Returns out in q.dtype and the natural log of the
    sum of exp(score); a query that sees nothing, and a token of no row, gets 0 and +inf. What lies outside the rows has no
    effect.
    """
    (tokens, heads, qk_width), (kv_tokens, _, v_width) = q.shape, v.shape
    rows = queries.start.shape[0]
    out = jnp.zeros((tokens, heads, v_width), q.dtype)
    lse = jnp.full((tokens, heads), jnp.inf, jnp.float32)
    if 0 in (tokens, kv_tokens, rows):
        return out, lse
    queries, keys = queries.clipped(tokens), keys.clipped(kv_tokens)
    tile = _tile(rows, heads, qk_width + v_width, max(tokens, kv_tokens))
    lane = jnp.arange(tile, dtype=jnp.int32)

    def take(array, rows: Rows, first, dtype=jnp.float32):
        """(tokens first... of each row [rows, tile, ...] with 0 past its end, their positions, which are live)."""
        position = jnp.broadcast_to(first + lane, (rows.start.shape[0], tile))
        live = position < rows.length[:, None]
        taken = array.at[rows.start[:, None] + position].get(mode="clip").astype(dtype)
        return jnp.where(live.reshape(*live.shape, *[1] * (array.ndim - 1)), taken, 0), position, live

    def query_tile(t, results):
        q_tile, q_pos, q_live = take(q, queries, t * tile)
        q_tile *= sm_scale
        reach = jnp.where(queries.length > t * tile, keys.length, 0)
        if causal:
            reach = jnp.minimum(reach, (t + 1) * tile)

        def key_tile(c, carry):
            peak, total, acc = carry
            nope, kv_pos, kv_live = take(k_nope, keys, c * tile)
            pe, value = take(k_pe, keys, c * tile)[0], take(v, keys, c * tile)[0]
            s = _dot("bqhd,bkhd->bqhk", q_tile[..., : nope.shape[-1]], nope)
            s += _dot("bqhd,bkd->bqhk", q_tile[..., nope.shape[-1] :], pe)
            visible = kv_live[:, None, :] & q_live[:, :, None]
            if causal:
                visible &= kv_pos[:, None, :] <= q_pos[:, :, None]
            s = jnp.where(visible[:, :, None, :], s, -jnp.inf)
            new_peak = jnp.maximum(peak, s.max(axis=-1))
            # Nothing visible yet: -inf - -inf would be NaN.
            base = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
            p = jnp.exp(s - base[..., None])
            decay = jnp.exp(peak - base)
            acc = acc * decay[..., None] + _dot("bqhk,bkhd->bqhd", p, value)
            return new_peak, total * decay + p.sum(axis=-1), acc

        shape = (rows, tile, heads)
        start = (
            jnp.full(shape, -jnp.inf, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, v_width), jnp.float32),
        )
        peak, total, acc = lax.fori_loop(0, -(-jnp.max(reach) // tile), key_tile, start)
        empty = total == 0
        safe = jnp.where(empty, 1.0, total)
        at = jnp.where(q_live, queries.start[:, None] + q_pos, tokens)
        out, lse = results
        out = out.at[at].set((acc / safe[..., None]).astype(q.dtype), mode="drop")
        return out, lse.at[at].set(jnp.where(empty, jnp.inf, peak + jnp.log(safe)), mode="drop")

    return lax.fori_loop(0, -(-jnp.max(queries.length) // tile), query_tile, (out, lse))


def _tile(rows: int, heads: int, width: int, longest: int) -> int:
    """Queries and keys of a step: a power of two that keeps their f32 arrays within `_TILE_BYTES`."""
    tile = _MIN_TILE
    while (
        2 * tile <= _MAX_TILE
        and tile < longest
        and 8 * rows * heads * tile * (width + 2 * tile) <= _TILE_BYTES
    ):
        tile *= 2
    return tile
