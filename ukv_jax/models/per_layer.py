"""Per-layer inputs (gemma-4 E2B): every layer gets a small vector of each token besides the hidden state.

It is half looked up in a table of its own and half projected from the token's embedding; a gate from the hidden state
weighs it, and it is added to the hidden state behind the layer's MLP.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from ukv_jax.models.config import ModelConfig
from ukv_jax.models.layers import ACTIVATIONS, linear, rms_norm


def inputs(
    params: dict[str, Array],
    config: ModelConfig,
    tokens: Int32[Array, "rows tokens"],
    embedded: Float[Array, "rows tokens hidden"],
) -> Float[Array, "rows tokens layers width"]:
    """What the layers get of each token; padding may hold any token id.

    embedded: the (scaled) embeddings that the first layer gets.
    """
    shape = (*tokens.shape, config.num_layers, config.per_layer_width)
    known = jnp.clip(tokens, 0, config.per_layer_vocab - 1)
    looked_up = (params["embed"][known] * config.per_layer_width**0.5).reshape(shape)
    projected = (linear(embedded, params["proj"]) * config.hidden_size**-0.5).reshape(shape)
    return (rms_norm(projected, params["norm"], config.rms_norm_eps) + looked_up) * 2**-0.5


def apply(
    params: dict[str, Array],
    config: ModelConfig,
    x: Float[Array, "rows tokens hidden"],
    given: Float[Array, "rows tokens width"],
) -> Float[Array, "rows tokens hidden"]:
    """The hidden state with one layer's part added."""
    gate: Array = ACTIVATIONS[config.activation](linear(x, params["gate"]))
    return x + rms_norm(linear(gate * given, params["proj"]), params["norm"], config.rms_norm_eps)
