"""Kimi delta attention (arXiv 2510.26692): short convolutions, then a gated delta rule with one decay per key channel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from ukv_jax.cache import StatePart
from ukv_jax.models.config import KDAConfig, ModelConfig
from ukv_jax.models.delta_rule import chunked, recurrent_step, unit
from ukv_jax.models.layers import linear, rms_normalize
from ukv_jax.models.short_conv import short_conv


def state_parts(config: KDAConfig, layers: int, dtype: str) -> tuple[StatePart, ...]:
    """What `layers` layers keep of each request."""
    return (
        StatePart("conv", layers, config.conv_kernel - 1, (3 * config.channels,), dtype),
        StatePart("recurrent", layers, config.num_heads, (config.head_dim, config.head_dim), "float32"),
    )


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
    q, k = unit(q) * config.head_dim**-0.5, unit(k)

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
