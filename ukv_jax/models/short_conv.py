"""The short causal convolution: in front of recurrent mixers (KDA, GDN, Mamba-2), and over what passes between layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from ukv_jax.cache import StatePart
from ukv_jax.models.config import ModelConfig


def _causal_conv(
    x: Float[Array, "rows tokens channels"],
    state: Float[Array, "rows kernel-1 channels"],
    weight: Float[Array, "channels kernel"],
    new_len: Int32[Array, " rows"],
) -> tuple[Float32[Array, "rows tokens channels"], Float[Array, "rows kernel-1 channels"]]:
    """Causal depthwise convolution in float32; `state` holds the last kernel-1 inputs of each row, oldest first.

    Returns the outputs and the state after the first `new_len` tokens of each row.
    """
    kernel, tokens = weight.shape[-1], x.shape[1]
    window = jnp.concatenate([state.astype(x.dtype), x], axis=1)
    taps = weight.astype(jnp.float32)
    y = sum(window[:, i : i + tokens].astype(jnp.float32) * taps[:, i] for i in range(kernel))
    last = new_len[:, None] + jnp.arange(kernel - 1, dtype=jnp.int32)
    new_state = jnp.take_along_axis(window, last[:, :, None], axis=1).astype(state.dtype)
    return y, new_state


def short_conv(
    x: Float[Array, "rows tokens channels"],
    weight: Float[Array, "channels kernel"],
    layer: int,
    cache: Any,
    bias: Float[Array, " channels"] | None = None,
    *,
    part: str = "conv",
) -> tuple[Float[Array, "rows tokens channels"], Any]:
    """silu of a causal depthwise convolution, whose last inputs the cache keeps in state part `part` of `layer`.

    One token a row is one step in place; more are read, convolved and written back. Float32, out in the dtype of x.
    """
    if x.shape[1] == 1:
        y, cache = cache.conv_step(layer, part, x[:, 0], weight, bias)
        return y[:, None], cache
    state = cache.read_state(layer, (part,))[part]
    y, state = _causal_conv(x, state, weight, cache.new_len)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return jax.nn.silu(y).astype(x.dtype), cache.write_state(layer, {part: state})


def residual_conv(
    x: Float[Array, "rows tokens channels"],
    weight: Float[Array, "channels kernel"],
    layer: int,
    part: str,
    cache: Any,
) -> tuple[Float[Array, "rows tokens channels"], Any]:
    """x plus its causal convolution, otherwise as `short_conv`."""
    if x.shape[1] == 1:
        y, cache = cache.conv_step(layer, part, x[:, 0], weight, residual=True)
        return y[:, None], cache
    state = cache.read_state(layer, (part,))[part]
    y, state = _causal_conv(x, state, weight, cache.new_len)
    return (x.astype(jnp.float32) + y).astype(x.dtype), cache.write_state(layer, {part: state})


def residual_state_parts(config: ModelConfig, dtype: str) -> tuple[StatePart, ...]:
    """What the convolutions of `residual_conv` keep of each request: inputs of those over K and V (side by side) of full
    and of sliding-window layers, and of those over every layer's two sublayers."""
    kernel = config.residual_conv_kernel
    widths = {"mixer_conv": config.hidden_size, "mlp_conv": config.hidden_size}
    layers = dict.fromkeys(widths, config.num_layers)
    for kind, pool, c in (("gqa", "full", config.gqa), ("swa", "swa", config.swa)):
        if kind in config.mixers:
            assert c is not None
            layers[f"{pool}_conv"] = config.mixers.count(kind)
            widths[f"{pool}_conv"] = c.num_kv_heads * (c.head_dim + (c.v_head_dim or c.head_dim))
    return tuple(StatePart(name, layers[name], kernel - 1, (width,), dtype) for name, width in widths.items())
