"""Gated delta net (arXiv 2412.06464) as Qwen3-Next and Qwen3.5 have it: a short convolution, then the gated delta rule
with one decay per value head. Each key head serves num_v_heads / num_k_heads consecutive value heads."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ukv_jax.cache import StatePart
from ukv_jax.models.config import GDNConfig, ModelConfig
from ukv_jax.models.delta_rule import gated_delta_rule
from ukv_jax.models.layers import linear, rms_normalize
from ukv_jax.models.short_conv import short_conv


def state_parts(config: GDNConfig, layers: int, dtype: str) -> tuple[StatePart, ...]:
    """What `layers` layers keep of each request."""
    piece = (config.k_head_dim, config.v_head_dim)
    return (
        StatePart("conv", layers, config.conv_kernel - 1, (config.conv_channels,), dtype),
        StatePart("recurrent", layers, config.num_v_heads, piece, config.state_dtype),
    )


def attend(
    params: dict[str, Array],
    config: GDNConfig,
    norm_eps: float,
    layer: int,
    x: Float[Array, "rows tokens hidden"],
    cache: Any,
) -> tuple[Float[Array, "rows tokens hidden"], Any]:
    """The whole layer, over state parts conv [rows, kernel - 1, q, k and v channels] (inputs of the convolution, model dtype)
    and recurrent [rows, num_v_heads, k_head_dim, v_head_dim] (config.state_dtype) of `layer`.

    Tokens beyond cache.new_len change neither state nor the outputs of valid tokens; a row with new_len 0 keeps its state
    bit for bit.
    """
    rows, tokens = x.shape[:2]
    valid = jnp.arange(tokens, dtype=jnp.int32) < cache.new_len[:, None]
    x = jnp.where(valid[..., None], x, 0)
    qkv, cache = short_conv(linear(x, params["qkv_proj"]), params["conv"], layer, cache)
    b, f = jnp.split(linear(x, params["ba_proj"]), 2, axis=-1)
    dt_bias, piece = params["dt_bias"][:, None], (config.k_head_dim, config.v_head_dim)
    out, cache = gated_delta_rule(qkv, f[..., None], b, params["A_log"], dt_bias, piece, layer, cache)

    gate = linear(x, params["z_proj"]).astype(jnp.float32).reshape(out.shape)
    out = rms_normalize(out, norm_eps) * params["o_norm"].astype(jnp.float32) * jax.nn.silu(gate)
    return linear(out.astype(x.dtype).reshape(rows, tokens, -1), params["o_proj"]), cache


def apply(
    params: dict[str, Array], config: ModelConfig, layer: int, x: Array, cache: Any
) -> tuple[Array, Any]:
    """Mixer interface of the decoder; `layer` counts the GDN layers."""
    assert config.gdn is not None
    return attend(params, config.gdn, config.rms_norm_eps, layer, x, cache)
