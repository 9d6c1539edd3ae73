"""The gated delta rule, shared by KDA (one decay per key channel) and GDN (one per head).

Per head, with state S [k, v], decay a_t = exp(g_t) and step size beta_t (arXiv 2412.06464, equation 10, for a decay per
head; arXiv 2510.26692, section 3, for one per key channel):

    S_t = (I - beta_t k_t k_t^T) diag(a_t) S_{t-1} + beta_t k_t v_t^T        o_t = S_t^T q_t

`pallas_kernels.state_step` is that formula for one token; `chunked` computes the same for many in matrix products. A padded
token is one with g = 0 and beta = 0: it leaves the state as it was. g has a last axis of k channels, or of 1 where the whole
head decays at one rate.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from pallas_kernels.state_step.formulas import einsum, gates, split_qkv

CHUNK = 64


def gated_delta_rule(
    qkv: Float[Array, "rows tokens channels"],
    f: Float[Array, "rows tokens heads #k"],
    b: Float[Array, "rows tokens heads"],
    a_log: Float32[Array, " heads"],
    dt_bias: Float32[Array, " heads #k"],
    piece: tuple[int, int],
    layer: int,
    cache: Any,
) -> tuple[Float32[Array, "rows tokens heads v"], Any]:
    """Over a state of [heads, *piece] that the cache keeps in part "recurrent" of `layer`; the other arguments are those of
    `pallas_kernels.state_step.delta_step`.

    One token a row is one step in place; more are read, run in chunks and written back.
    """
    if qkv.shape[1] == 1:
        one = (qkv[:, 0], f[:, 0], b[:, 0], a_log, dt_bias)
        out, cache = cache.delta_step(layer, "recurrent", *one, piece=piece)
        return out[:, None], cache
    valid = jnp.arange(qkv.shape[1], dtype=jnp.int32) < cache.new_len[:, None]
    g, beta = gates(f, b, a_log, dt_bias)
    g = jnp.where(valid[..., None, None], g, 0)
    beta = jnp.where(valid[..., None], beta, 0)
    q, k, v = split_qkv(qkv, b.shape[2], piece)
    group = v.shape[2] // q.shape[2]
    if group > 1:
        q, k = (jnp.repeat(part, group, axis=2) for part in (q, k))
    state = cache.read_state(layer, ("recurrent",))["recurrent"]
    out, new = chunked(q, k, v, g, beta, state.astype(jnp.float32))
    new = jnp.where((cache.new_len > 0)[:, None, None, None], new.astype(state.dtype), state)
    return out, cache.write_state(layer, {"recurrent": new})


def split_chunks(x: Float[Array, "rows tokens heads *rest"], chunk: int) -> Array:
    """[rows, tokens, heads, ...] -> [chunks, rows, heads, chunk, ...], zero padded to whole chunks. A chunk is no longer
    than the next power of two of the tokens."""
    rows, tokens = x.shape[:2]
    chunk = min(chunk, 1 << (tokens - 1).bit_length())
    count = -(-tokens // chunk)
    x = jnp.pad(x, [(0, 0), (0, count * chunk - tokens)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(rows, count, chunk, *x.shape[2:])
    return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, 3)


def join_chunks(x: Float[Array, "chunks rows heads chunk width"], tokens: int) -> Array:
    """Inverse of `split_chunks`: [rows, tokens, heads, width]."""
    x = jnp.moveaxis(jnp.moveaxis(x, 3, 2), 0, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])[:, :tokens]


def _halves(x: Array, size: int) -> tuple[Array, Array]:
    """Splits the token axis (-2) into blocks of 2 * size and each block into its first and second half."""
    pairs = x.reshape(*x.shape[:-2], x.shape[-2] // (2 * size), 2, size, x.shape[-1])
    return pairs[..., 0, :, :], pairs[..., 1, :, :]


def sum_after(g: Array) -> Array:
    """Along axis -2: sum of the entries after each one, without a difference that a large entry would spoil."""
    sums = lax.cumsum(g, axis=g.ndim - 2, reverse=True)
    return jnp.concatenate([sums[..., 1:, :], jnp.zeros_like(sums[..., :1, :])], axis=-2)


def _sum_to(g: Array) -> Array:
    """Along axis -2: sum of the entries up to and with each one."""
    return lax.cumsum(g, axis=g.ndim - 2)


def _chunk_products(q: Array, k: Array, g: Array, beta: Array) -> tuple[Array, Array]:
    """Decayed products within one chunk; arguments [..., chunk, k] (g also [..., chunk, 1]) and beta [..., chunk].

    With D[i, j] = exp(sum of g over (j, i]), returns [..., chunk, chunk]
      scores[i, j]  = q_i . (D[i, j] * k_j) for j <= i, else 0, and
      inverse = (I + A)^-1 with A[i, j] = beta_i k_i . (D[i, j] * k_j) for j < i, else 0.

    exp(-sum g) can overflow, so D is never split at the chunk's start. The chunk is halved again and again instead:
    for i in a second half and j in the first half beside it, D splits at the border between them into two factors
    that are both at most 1. The inverse of a block lower triangular matrix follows from those of its halves.
    """
    chunk = q.shape[-2]
    scores = (q * k).sum(-1)[..., None, None]
    inverse = jnp.ones_like(scores)
    size = 1
    while size < chunk:
        _, q_hi = _halves(q, size)
        k_lo, k_hi = _halves(k, size)
        g_lo, g_hi = _halves(g, size)
        _, beta_hi = _halves(beta[..., None], size)
        k_lo = k_lo * jnp.exp(sum_after(g_lo))
        to_hi = jnp.exp(_sum_to(g_hi))
        score = einsum("...ik,...jk->...ij", q_hi * to_hi, k_lo)
        a = einsum("...ik,...jk->...ij", k_hi * to_hi * beta_hi, k_lo)
        inverse_lo, inverse_hi = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -einsum("...ij,...jk,...kl->...il", inverse_hi, a, inverse_lo)
        scores = _join(scores[..., 0::2, :, :], score, scores[..., 1::2, :, :])
        inverse = _join(inverse_lo, corner, inverse_hi)
        size *= 2
    return scores[..., 0, :, :], inverse[..., 0, :, :]


def _join(upper_left: Array, lower_left: Array, lower_right: Array) -> Array:
    upper = jnp.concatenate([upper_left, jnp.zeros_like(upper_left)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([lower_left, lower_right], axis=-1)], axis=-2)


def chunked(
    q: Float[Array, "rows tokens heads k"],
    k: Float[Array, "rows tokens heads k"],
    v: Float[Array, "rows tokens heads v"],
    g: Float[Array, "rows tokens heads #k"],
    beta: Float[Array, "rows tokens heads"],
    state: Float[Array, "rows heads k v"],
    chunk: int = CHUNK,
) -> tuple[Float[Array, "rows tokens heads v"], Float[Array, "rows heads k v"]]:
    """The recurrence over many tokens, `chunk` (a power of two) at a time, all in float32.

    Within a chunk the writes of the delta rule solve (I + A) U = beta * (V - decayed K S_0), A strictly lower
    triangular (WY form; arXiv 2406.06484 for the ungated rule).
    """
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"chunk must be a power of two, found {chunk}")
    tokens = q.shape[1]
    # Zero padded: g = 0, beta = 0.
    q, k, v, g, beta = (split_chunks(x, chunk) for x in (q, k, v, g, beta))
    scores, inverse = _chunk_products(q, k, g, beta)
    from_start = jnp.exp(_sum_to(g))
    # What does not depend on the state, for all chunks at once: writes = fresh - recalled S_0.
    fresh = einsum("...ij,...jv->...iv", inverse, beta[..., None] * v)
    recalled = einsum("...ij,...jk->...ik", inverse, beta[..., None] * k * from_start)
    blocks = (scores, fresh, recalled, q * from_start, k * jnp.exp(sum_after(g)), from_start[..., -1, :])

    def body(state: Array, block: tuple[Array, ...]) -> tuple[Array, Array]:
        scores, fresh, recalled, q, k, decay = block
        writes = fresh - einsum("rhik,rhkv->rhiv", recalled, state)
        out = einsum("rhik,rhkv->rhiv", q, state) + einsum("rhij,rhjv->rhiv", scores, writes)
        return state * decay[..., None] + einsum("rhik,rhiv->rhkv", k, writes), out

    state, out = lax.scan(body, state, blocks)
    return join_chunks(out, tokens), state
