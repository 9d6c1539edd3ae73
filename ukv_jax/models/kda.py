"""Kimi delta attention (arXiv 2510.26692): short convolutions, then a gated delta rule with one decay per key channel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ukv_jax.cache import StatePart
from ukv_jax.models.config import KDAConfig, ModelConfig
from ukv_jax.models.delta_rule import gated_delta_rule
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
    layer: int,
    x: Float[Array, "rows tokens hidden"],
    cache: Any,
) -> tuple[Float[Array, "rows tokens hidden"], Any]:
    """The whole layer, over state parts conv [rows, kernel - 1, 3 * channels] (inputs of the q, k and v convolutions side by
    side, model dtype) and recurrent [rows, heads, head_dim, head_dim] (float32) of `layer`.

    Tokens beyond cache.new_len change neither state nor the outputs of valid tokens; a row with new_len 0 keeps its state
    bit for bit.
    """
    rows, tokens = x.shape[:2]
    heads = (rows, tokens, config.num_heads, config.head_dim)
    valid = jnp.arange(tokens, dtype=jnp.int32) < cache.new_len[:, None]
    x = jnp.where(valid[..., None], x, 0)
    qkv, cache = short_conv(linear(x, params["qkv_proj"]), params["conv"], layer, cache)
    f = linear(linear(x, params["f_a_proj"]), params["f_b_proj"]).reshape(heads)
    b = linear(x, params["b_proj"])
    dt_bias, piece = params["dt_bias"].reshape(heads[2:]), (config.head_dim, config.head_dim)
    out, cache = gated_delta_rule(qkv, f, b, params["A_log"], dt_bias, piece, layer, cache)

    gate = linear(linear(x, params["g_a_proj"]), params["g_b_proj"]).reshape(heads).astype(jnp.float32)
    out = rms_normalize(out, norm_eps) * params["o_norm"].astype(jnp.float32) * jax.nn.sigmoid(gate)
    return linear(out.astype(x.dtype).reshape(rows, tokens, -1), params["o_proj"]), cache


def apply(
    params: dict[str, Array], config: ModelConfig, layer: int, x: Array, cache: Any
) -> tuple[Array, Any]:
    """Mixer interface of the decoder; `layer` counts the KDA layers."""
    assert config.kda is not None
    return attend(params, config.kda, config.rms_norm_eps, layer, x, cache)
