"""Kimi delta attention: short convolutions, then a gated delta rule with one decay per key channel.

Per head, with state S [k, v], decay a_t = exp(g_t) and step size beta_t (arXiv 2510.26692, section 3):

    S_t = (I - beta_t k_t k_t^T) diag(a_t) S_{t-1} + beta_t k_t v_t^T        o_t = S_t^T q_t

`recurrent_step` is that formula; `chunked` computes the same for many tokens in matrix products. Both are pure in
the state. A padded token is one with g = 0 and beta = 0: it leaves the state as it was.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from ukv_jax.models.config import KDAConfig, ModelConfig
from ukv_jax.models.layers import linear, rms_normalize

CHUNK = 64
# The state lives for the whole request: no TF32 where it is read or updated.
PRECISION = lax.Precision.HIGHEST


def _einsum(spec: str, *operands: Array) -> Array:
    return jnp.einsum(spec, *operands, precision=PRECISION)


def short_conv(
    x: Float[Array, "rows tokens channels"],
    state: Float[Array, "rows kernel-1 channels"],
    weight: Float[Array, "channels kernel"],
    new_len: Int32[Array, " rows"],
) -> tuple[Float[Array, "rows tokens channels"], Float[Array, "rows kernel-1 channels"]]:
    """Causal depthwise convolution with silu; `state` holds the last kernel-1 inputs of each row, oldest first.

    Returns the outputs and the state after the first `new_len` tokens of each row.
    """
    kernel, tokens = weight.shape[-1], x.shape[1]
    window = jnp.concatenate([state.astype(x.dtype), x], axis=1)
    taps = weight.astype(jnp.float32)
    y = sum(window[:, i : i + tokens].astype(jnp.float32) * taps[:, i] for i in range(kernel))
    last = new_len[:, None] + jnp.arange(kernel - 1, dtype=jnp.int32)
    new_state = jnp.take_along_axis(window, last[:, :, None], axis=1).astype(state.dtype)
    return jax.nn.silu(y).astype(x.dtype), new_state


def recurrent_step(
    q: Float[Array, "rows heads k"],
    k: Float[Array, "rows heads k"],
    v: Float[Array, "rows heads v"],
    g: Float[Array, "rows heads k"],
    beta: Float[Array, "rows heads"],
    state: Float[Array, "rows heads k v"],
) -> tuple[Float[Array, "rows heads v"], Float[Array, "rows heads k v"]]:
    """One token for every row, all in float32. g is the log of the decay (<= 0)."""
    state = state * jnp.exp(g)[..., None]
    delta = (v - _einsum("rhkv,rhk->rhv", state, k)) * beta[..., None]
    state = state + k[..., None] * delta[..., None, :]
    return _einsum("rhkv,rhk->rhv", state, q), state


def _halves(x: Array, size: int) -> tuple[Array, Array]:
    """Splits the token axis (-2) into blocks of 2 * size and each block into its first and second half."""
    pairs = x.reshape(*x.shape[:-2], x.shape[-2] // (2 * size), 2, size, x.shape[-1])
    return pairs[..., 0, :, :], pairs[..., 1, :, :]


def _sum_after(g: Array) -> Array:
    """Along axis -2: sum of the entries after each one."""
    return lax.cumsum(g, axis=g.ndim - 2, reverse=True) - g


def _sum_to(g: Array) -> Array:
    """Along axis -2: sum of the entries up to and with each one."""
    return lax.cumsum(g, axis=g.ndim - 2)


def _chunk_products(q: Array, k: Array, g: Array, beta: Array) -> tuple[Array, Array]:
    """Decayed products within one chunk; arguments [..., chunk, k] and beta [..., chunk].

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
        k_lo = k_lo * jnp.exp(_sum_after(g_lo))
        to_hi = jnp.exp(_sum_to(g_hi))
        score = _einsum("...ik,...jk->...ij", q_hi * to_hi, k_lo)
        a = _einsum("...ik,...jk->...ij", k_hi * to_hi * beta_hi, k_lo)
        inverse_lo, inverse_hi = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -_einsum("...ij,...jk,...kl->...il", inverse_hi, a, inverse_lo)
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
    g: Float[Array, "rows tokens heads k"],
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
    rows, tokens = q.shape[:2]
    chunk = min(chunk, 1 << (tokens - 1).bit_length())
    num_chunks = -(-tokens // chunk)

    def split(x: Array) -> Array:
        """[rows, tokens, heads, ...] -> [chunks, rows, heads, chunk, ...], zero padded: g = 0, beta = 0."""
        x = jnp.pad(x, [(0, 0), (0, num_chunks * chunk - tokens)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(rows, num_chunks, chunk, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, 3)

    q, k, v, g, beta = (split(x) for x in (q, k, v, g, beta))
    scores, inverse = _chunk_products(q, k, g, beta)
    from_start = jnp.exp(_sum_to(g))
    # What does not depend on the state, for all chunks at once: writes = fresh - recalled S_0.
    fresh = _einsum("...ij,...jv->...iv", inverse, beta[..., None] * v)
    recalled = _einsum("...ij,...jk->...ik", inverse, beta[..., None] * k * from_start)
    blocks = (scores, fresh, recalled, q * from_start, k * jnp.exp(_sum_after(g)), from_start[..., -1, :])

    def body(state: Array, block: tuple[Array, ...]) -> tuple[Array, Array]:
        scores, fresh, recalled, q, k, decay = block
        writes = fresh - _einsum("rhik,rhkv->rhiv", recalled, state)
        out = _einsum("rhik,rhkv->rhiv", q, state) + _einsum("rhij,rhjv->rhiv", scores, writes)
        return state * decay[..., None] + _einsum("rhik,rhiv->rhkv", k, writes), out

    state, out = lax.scan(body, state, blocks)
    out = jnp.moveaxis(jnp.moveaxis(out, 3, 2), 0, 1)  # [rows, chunks, chunk, heads, v]
    return out.reshape(rows, num_chunks * chunk, *out.shape[3:])[:, :tokens], state


def _unit(x: Array, eps: float = 1e-6) -> Array:
    return x * lax.rsqrt((x * x).sum(-1, keepdims=True) + eps)


def attend(
    params: dict[str, Array],
    config: KDAConfig,
    norm_eps: float,
    x: Float[Array, "rows tokens hidden"],
    state: dict[str, Array],
    valid: Bool[Array, "rows tokens"],
    new_len: Int32[Array, " rows"],
) -> tuple[Float[Array, "rows tokens hidden"], dict[str, Array]]:
    """The whole layer over explicit state: conv [rows, kernel - 1, 3 * channels] (inputs of the q, k and v
    convolutions side by side, model dtype) and recurrent [rows, heads, head_dim, head_dim] (float32).

    Tokens beyond new_len change neither state nor the outputs of valid tokens; a row with new_len 0 keeps its state
    bit for bit.
    """
    rows, tokens = x.shape[:2]
    heads = (rows, tokens, config.num_heads, config.head_dim)
    x = jnp.where(valid[..., None], x, 0)
    qkv, conv = short_conv(linear(x, params["qkv_proj"]), state["conv"], params["conv"], new_len)
    q, k, v = (part.reshape(heads).astype(jnp.float32) for part in jnp.split(qkv, 3, axis=-1))
    q, k = _unit(q) * config.head_dim**-0.5, _unit(k)

    f = linear(linear(x, params["f_a_proj"]), params["f_b_proj"]).astype(jnp.float32) + params["dt_bias"]
    g = -jnp.exp(params["A_log"])[:, None] * jax.nn.softplus(f).reshape(heads)
    beta = jax.nn.sigmoid(linear(x, params["b_proj"]).astype(jnp.float32))
    g = jnp.where(valid[..., None, None], g, 0)
    beta = jnp.where(valid[..., None], beta, 0)

    if tokens == 1:
        q, k, v, g, beta = (part[:, 0] for part in (q, k, v, g, beta))
        out, recurrent = recurrent_step(q, k, v, g, beta, state["recurrent"])
        out = out[:, None]
    else:
        out, recurrent = chunked(q, k, v, g, beta, state["recurrent"])
    recurrent = jnp.where((new_len > 0)[:, None, None, None], recurrent, state["recurrent"])

    gate = linear(linear(x, params["g_a_proj"]), params["g_b_proj"]).reshape(heads).astype(jnp.float32)
    out = rms_normalize(out, norm_eps) * params["o_norm"].astype(jnp.float32) * jax.nn.sigmoid(gate)
    out = linear(out.astype(x.dtype).reshape(rows, tokens, -1), params["o_proj"])
    return out, {"conv": conv, "recurrent": recurrent}


def apply(
    params: dict[str, Array], config: ModelConfig, layer: int, x: Array, cache: Any
) -> tuple[Array, Any]:
    """Mixer interface of the decoder; `layer` counts the KDA layers."""
    assert config.kda is not None
    valid = jnp.arange(x.shape[1], dtype=jnp.int32) < cache.new_len[:, None]
    state = cache.read_state(layer)
    out, state = attend(params, config.kda, config.rms_norm_eps, x, state, valid, cache.new_len)
    return out, cache.write_state(layer, state)
