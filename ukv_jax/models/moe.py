"""Mixture of experts: routing, routed experts (experts.py) and shared experts, gated as a whole if there is a shared_gate."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from ukv_jax.models.config import MoEConfig
from ukv_jax.models.experts import EXPERTS, Options, preferred
from ukv_jax.models.layers import clamped_product, gated_mlp, gated_product, linear, rms_norm


def route(
    x: Float[Array, "tokens hidden"],
    weight: Float[Array, "outputs hidden"],
    bias: Float[Array, " experts"] | None,
    config: MoEConfig,
    logit_bias: Float[Array, " outputs"] | None = None,
    scale: Float[Array, " 1"] | float = 1.0,
) -> tuple[Int32[Array, "tokens k"], Float[Array, "tokens k"], Float[Array, "tokens shared"] | None]:
    """Experts of each token, their weights (float32), and those of the shared experts (None unless shared_sink).

    logit_bias is part of the router's linear map, scale multiplies all weights; `bias` takes part in the choice only
    (arXiv 2412.19437, section 2.1.2). With groups, only the best `groups_per_token` groups compete, a group being ranked by
    the sum of its two best experts (V3) or by its best (arXiv 2405.04434, section 2.2.2).
    """
    logits = lax.dot_general(
        x.astype(jnp.float32), weight, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST
    )
    if logit_bias is not None:
        logits = logits + logit_bias
    scores = jax.nn.sigmoid(logits) if config.score_function == "sigmoid" else jax.nn.softmax(logits)
    scores, shared = scores[:, : config.num_experts], scores[:, config.num_experts :]
    choice = scores if bias is None else scores + bias
    if config.num_groups > 1:
        groups = choice.reshape(x.shape[0], config.num_groups, -1)
        rank = lax.top_k(groups, 2 if config.group_rank == "top2" else 1)[0].sum(-1)
        best = lax.top_k(rank, config.groups_per_token)[1]
        kept = (best[..., None] == jnp.arange(config.num_groups)).any(axis=1)
        choice = jnp.where(kept[..., None], groups, -jnp.inf).reshape(choice.shape)
    experts = lax.top_k(choice, config.experts_per_token)[1]
    weights = jnp.concatenate([jnp.take_along_axis(scores, experts, axis=1), shared], axis=1)
    if config.renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    weights, shared = jnp.split(
        weights * (config.scaling_factor * scale), (config.experts_per_token,), axis=1
    )
    return experts.astype(jnp.int32), weights, shared if config.shared_sink else None


def apply(
    params: dict[str, Array],
    config: MoEConfig,
    x: Float[Array, "rows tokens hidden"],
    valid: Bool[Array, "rows tokens"],
    experts: str | None = None,
    router_input: Float[Array, "rows tokens hidden"] | None = None,
) -> Float[Array, "rows tokens hidden"]:
    """Routed experts plus shared experts. Padded tokens are given to no expert. experts: an implementation by name, or
    None for the one preferred on the device at hand. router_input: what the router sees, if not x."""
    if experts is None:
        experts = preferred(x.shape[0] * x.shape[1] * config.experts_per_token)
    if experts not in EXPERTS:
        raise ValueError(f"experts={experts!r} is not an implementation; there are: {sorted(EXPERTS)}")
    flat = x.reshape(-1, x.shape[-1])
    biases = params.get("router_bias"), params.get("router_logit_bias")
    scale = params.get("router_scale", 1.0)
    seen = flat if router_input is None else router_input.reshape(flat.shape)
    chosen, weights, shared_weights = route(seen, params["router"], biases[0], config, biases[1], scale)
    if "expert_scale" in params:
        weights = weights * params["expert_scale"][chosen]
    chosen = jnp.where(valid.reshape(-1, 1), chosen, config.num_experts)
    product = partial(gated_product, activation=config.activation)
    if config.clamp is not None:
        product = partial(clamped_product, gain=config.clamp[0], limit=config.clamp[1])
    options = Options(product, params.get("experts_gate_up_bias"), params.get("experts_down_bias"))
    gate_up, down = params["experts_gate_up"], params["experts_down"]
    routed = EXPERTS[experts](flat, chosen, weights, gate_up, down, options)
    out = routed.reshape(x.shape)
    if config.num_shared_experts:
        inner = None
        if shared_weights is not None:
            inner = jnp.repeat(shared_weights, config.intermediate_size, axis=1)
            inner = inner.reshape(*x.shape[:2], -1).astype(x.dtype)
        shared = gated_mlp(x, params["shared_gate_up"], params["shared_down"], inner_weights=inner)
        if "shared_gate" in params:
            shared = shared * jax.nn.sigmoid(linear(x, params["shared_gate"]))
        out = out + shared
    return out


def beside_dense(
    params: dict[str, Array],
    config: MoEConfig,
    eps: float,
    x: Float[Array, "rows tokens hidden"],
    dense: Float[Array, "rows tokens hidden"],
    valid: Bool[Array, "rows tokens"],
    experts: str | None = None,
) -> Float[Array, "rows tokens hidden"]:
    """Experts on the hidden state x, added to what a dense MLP made of it, each behind a norm of its own (gemma-4
    26B-A4B). Router and experts get x through different norms."""
    routed = apply(
        params,
        config,
        rms_norm(x, params["experts_norm"], eps),
        valid,
        experts,
        router_input=rms_norm(x, params["router_norm"], eps),
    )
    dense = rms_norm(dense, params["dense_post_norm"], eps)
    return dense + rms_norm(routed, params["experts_post_norm"], eps)
