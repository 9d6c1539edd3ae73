"""Norm, linear map and gated MLP, shared by every layer kind. Weights are stored as published: [out, in]."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def linear(x: Float[Array, "*batch in"], weight: Float[Array, "out in"]) -> Float[Array, "*batch out"]:
    """x @ weight.T in the dtype of x, without a transposed copy of the weight."""
    return lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))


def rms_normalize(x: Float[Array, "*batch width"], eps: float) -> Float[Array, "*batch width"]:
    """x / sqrt(mean(x^2) + eps) in float32, before any weight."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def rms_norm(
    x: Float[Array, "*batch width"], weight: Float[Array, " width"], eps: float
) -> Float[Array, "*batch width"]:
    """Root mean square norm: statistics in float32, weight applied in its own dtype, result in the dtype of x."""
    return (weight * rms_normalize(x, eps).astype(weight.dtype)).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def gated_mlp(
    x: Float[Array, "*batch hidden"],
    gate_up: Float[Array, "2*width hidden"],
    down: Float[Array, "hidden width"],
    *,
    activation: str = "silu",
    gate_multiplier: float = 1.0,
    inner_weights: Float[Array, "*batch width"] | None = None,
) -> Float[Array, "*batch hidden"]:
    """down(activation(gate_multiplier * gate(x)) * up(x) * inner_weights); gate and up stacked along the output axis.
    activation: a key of ACTIVATIONS."""
    gate, up = jnp.split(linear(x, gate_up), 2, axis=-1)
    inner = ACTIVATIONS[activation](gate * gate_multiplier) * up
    return linear(inner if inner_weights is None else inner * inner_weights, down)


def gated_product(
    gate: Float[Array, "*batch width"], up: Float[Array, "*batch width"], activation: str = "silu"
) -> Float[Array, "*batch width"]:
    """The gated activation of most models: activation(gate) * up, activation a key of ACTIVATIONS."""
    return ACTIVATIONS[activation](gate) * up


def clamped_product(
    gate: Float[Array, "*batch width"], up: Float[Array, "*batch width"], gain: float, limit: float
) -> Float[Array, "*batch width"]:
    """gpt-oss's gated activation: gate * sigmoid(gain * gate) * (up + 1), gate at most limit, up within +-limit."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(gate * gain) * (up + 1)
