"""Mixture of experts: routing, and several named ways to run the experts.

Every implementation takes the same arguments and gives the same result up to rounding; none is chosen silently.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from ukv_jax.models.config import MoEConfig
from ukv_jax.models.layers import swiglu


def route(
    x: Float[Array, "tokens hidden"],
    weight: Float[Array, "experts hidden"],
    bias: Float[Array, " experts"],
    config: MoEConfig,
) -> tuple[Int32[Array, "tokens k"], Float[Array, "tokens k"]]:
    """Experts of each token and their weights (float32).

    Scores are sigmoids; `bias` takes part in the choice only (arXiv 2412.19437, section 2.1.2). With groups, only the
    best `groups_per_token` groups compete, a group being ranked by the sum of its two best experts.
    """
    logits = lax.dot_general(
        x.astype(jnp.float32), weight, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST
    )
    scores = jax.nn.sigmoid(logits)
    choice = scores + bias
    if config.num_groups > 1:
        groups = choice.reshape(x.shape[0], config.num_groups, -1)
        rank = lax.top_k(groups, 2)[0].sum(-1)
        best = lax.top_k(rank, config.groups_per_token)[1]
        kept = (best[..., None] == jnp.arange(config.num_groups)).any(axis=1)
        choice = jnp.where(kept[..., None], groups, -jnp.inf).reshape(choice.shape)
    experts = lax.top_k(choice, config.experts_per_token)[1]
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if config.renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return experts.astype(jnp.int32), weights * config.scaling_factor


def experts_ragged_dot(x: Array, experts: Array, weights: Array, gate_up: Array, down: Array) -> Array:
    """`jax.lax.ragged_dot` over tokens sorted by expert. For CPU: XLA for GPU expands it to a dense product over all
    experts, so lowering it for another platform is refused."""
    order, group_sizes = _sort_by_expert(experts, gate_up.shape[0])
    rows = x[order // experts.shape[1]]

    def grouped(lhs: Array, rhs: Array) -> Array:
        return lax.ragged_dot(lhs, rhs.swapaxes(1, 2), group_sizes)

    gate, up = jnp.split(grouped(rows, gate_up), 2, axis=-1)
    out = grouped(jax.nn.silu(gate) * up, down)
    return _combine(out, order, experts, weights, gate_up.shape[0], x)


def _sort_by_expert(experts: Array, num_experts: int) -> tuple[Array, Array]:
    """Order of the flattened (token, choice) pairs by expert, and the size of each expert's group."""
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    group_sizes = jnp.zeros(num_experts, jnp.int32).at[flat].add(1, mode="drop")
    return order, group_sizes


def _combine(out: Array, order: Array, experts: Array, weights: Array, num_experts: int, x: Array) -> Array:
    """Weighted sum over the choices of each token of rows that are in sorted order."""
    pairs = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
    pairs = pairs.reshape(*experts.shape, -1)
    # A pair without an expert lies in no group: what a kernel leaves in its row is undefined.
    pairs = jnp.where((experts < num_experts)[..., None], pairs.astype(jnp.float32) * weights[..., None], 0)
    return pairs.sum(axis=1).astype(x.dtype)


ExpertsFn = Callable[[Array, Array, Array, Array, Array], Array]
EXPERTS: dict[str, ExpertsFn] = {"ragged_dot": experts_ragged_dot}


def apply(
    params: dict[str, Array],
    config: MoEConfig,
    x: Float[Array, "rows tokens hidden"],
    valid: Bool[Array, "rows tokens"],
    experts: str,
) -> Float[Array, "rows tokens hidden"]:
    """Routed experts plus shared experts. Padded tokens are given to no expert."""
    if experts not in EXPERTS:
        raise ValueError(f"experts={experts!r} is not an implementation; there are: {sorted(EXPERTS)}")
    flat = x.reshape(-1, x.shape[-1])
    chosen, weights = route(flat, params["router"], params["router_bias"], config)
    chosen = jnp.where(valid.reshape(-1, 1), chosen, config.num_experts)
    routed = EXPERTS[experts](flat, chosen, weights, params["experts_gate_up"], params["experts_down"])
    out = routed.reshape(x.shape)
    if config.num_shared_experts:
        out = out + swiglu(x, params["shared_gate_up"], params["shared_down"])
    return out
