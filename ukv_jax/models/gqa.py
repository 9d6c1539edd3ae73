"""Multi-head, grouped-query or multi-query attention, over all positions or a sliding window.

A layer does what its parameters say: biases (q_bias, k_bias, v_bias, o_bias), norms of each query and key head (q_norm,
k_norm), short convolutions over keys and values (kv_conv), a relative-position bias (r_proj, relative), an output gate
(gate_proj) and attention sinks (sinks) are there or not. A layer without k_proj reads the keys and values that an earlier
layer has stored.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from ukv_jax.models.config import GQAConfig, ModelConfig
from ukv_jax.models.layers import linear, rms_norm, rms_normalize
from ukv_jax.models.rope import apply_rope
from ukv_jax.models.short_conv import residual_conv


def apply(
    params: dict[str, Array], config: ModelConfig, layer: int, x: Array, cache: Any
) -> tuple[Array, Any]:
    """Mixer interface of the decoder for layers that see all positions; `layer` counts them."""
    assert config.gqa is not None
    return attend(params, config.gqa, config.rms_norm_eps, layer, x, cache, pool="full")


def apply_window(
    params: dict[str, Array], config: ModelConfig, layer: int, x: Array, cache: Any
) -> tuple[Array, Any]:
    """Mixer interface of the decoder for sliding-window layers; `layer` counts them."""
    assert config.swa is not None
    return attend(params, config.swa, config.rms_norm_eps, layer, x, cache, pool="swa")


def attend(
    params: dict[str, Array], config: GQAConfig, eps: float, layer: int, x: Array, cache: Any, *, pool: str
) -> tuple[Array, Any]:
    """x and result [rows, tokens, hidden].

    The cache gets q [rows, tokens, heads, head_dim], k [rows, tokens, kv_heads, head_dim] and v [rows, tokens, kv_heads,
    v_head_dim] (or None for both), stores the latter two at `cache.positions` of its cache `pool` and returns
    [rows, tokens, heads, v_head_dim].
    """

    def project(name: str, count: int) -> Array:
        y = linear(x, params[f"{name}_proj"])
        if f"{name}_bias" in params:
            y = y + params[f"{name}_bias"]
        return y.reshape(*x.shape[:2], count, -1)

    def place(name: str, y: Array) -> Array:
        """Queries or keys at their positions."""
        if f"{name}_norm" in params:
            y = rms_norm(y, params[f"{name}_norm"], eps)
        return y if config.rope is None else apply_rope(config.rope, y, cache.positions)

    q, k, v = place("q", project("q", config.num_heads)), None, None
    if "k_proj" in params:
        k = project("k", config.num_kv_heads)
        v = k if config.k_is_v else project("v", config.num_kv_heads)
        if "kv_conv" in params:
            k, v, cache = _convolve(k, v, params["kv_conv"], layer, f"{pool}_conv", cache)
        if config.v_norm:
            v = rms_normalize(v, eps).astype(v.dtype)
        k = place("k", k)
    bias = None
    if "r_proj" in params:
        relative = linear(x, params["r_proj"]).reshape(*q.shape[:3], -1)
        bias = jnp.einsum("rthd,de->rthe", relative, params["relative"].astype(x.dtype))
    if config.log_scaling is not None:
        q, bias = (None if y is None else _grow(y, config.log_scaling, cache.positions) for y in (q, bias))
    out, cache = cache.gqa(
        layer,
        q,
        k,
        v,
        pool=pool,
        sm_scale=config.scale,
        sinks=params.get("sinks"),
        logit_cap=config.logit_cap,
        relative_bias=bias,
    )
    out = out.astype(x.dtype).reshape(*x.shape[:2], -1)
    if "gate_proj" in params:
        out = out * jax.nn.sigmoid(linear(x, params["gate_proj"]))
    out = linear(out, params["o_proj"])
    return (out + params["o_bias"] if "o_bias" in params else out), cache


def _convolve(
    k: Array, v: Array, weight: Array, layer: int, part: str, cache: Any
) -> tuple[Array, Array, Any]:
    """Keys and values through their short convolutions, which share one part of the state."""
    flat = [y.reshape(*y.shape[:2], -1) for y in (k, v)]
    both, cache = residual_conv(jnp.concatenate(flat, axis=-1), weight, layer, part, cache)
    new_k, new_v = jnp.split(both, (flat[0].shape[-1],), axis=-1)
    return new_k.reshape(k.shape), new_v.reshape(v.shape), cache


def _grow(y: Array, log_scaling: tuple[int, float], positions: Int32[Array, "rows tokens"]) -> Array:
    """y [rows, tokens, ...] times 1 + gain * log((position + 1) / floor), where that is above 1."""
    floor, gain = log_scaling
    seen = (positions + 1).astype(jnp.float32)
    factor = 1 + gain * jnp.log(jnp.maximum(seen / floor, 1.0))
    return (y.astype(jnp.float32) * factor.reshape(*factor.shape, *(1,) * (y.ndim - 2))).astype(y.dtype)
