"""Named ways to run routed experts; all give the same result up to rounding.

Each takes x [tokens, hidden], chosen Int32[tokens, k] (`num_experts` = no expert), weights Float32[tokens, k],
gate_up [experts, 2 * size, hidden], down [experts, hidden, size], options, and returns the weighted sums [tokens, hidden].
None allocates a product of every token with every expert on the platform that it is for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels import device
from pallas_kernels.grouped_matmul import group_rows, grouped_matmul
from ukv_jax.models.layers import gated_product

ExpertsFn = Callable[..., Array]


class Options(NamedTuple):
    """product: (gate, up) -> the gated activation. Biases [experts, 2 * size] and [experts, hidden], or none."""

    product: Callable[[Array, Array], Array] = gated_product
    gate_up_bias: Array | None = None
    down_bias: Array | None = None

    def activate(self, both: Array, expert: Array) -> Array:
        """Of gate and up, one after the other in the last axis, of pairs with these experts."""
        return self.product(*jnp.split(_biased(both, self.gate_up_bias, expert), 2, axis=-1))

    def finish(self, out: Array, expert: Array) -> Array:
        return _biased(out, self.down_bias, expert)


PLAIN = Options()


def _biased(x: Array, bias: Array | None, expert: Array) -> Array:
    return x if bias is None else x + bias[expert].astype(x.dtype)


def ragged_dot(
    x: Array, chosen: Array, weights: Array, gate_up: Array, down: Array, options: Options = PLAIN
) -> Array:
    """`jax.lax.ragged_dot` over (token, choice) pairs sorted by expert. For CPU; XLA for GPU multiplies every token
    with every expert instead."""
    num_experts, k = gate_up.shape[0], chosen.shape[1]
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    expert = jnp.minimum(flat[order], num_experts - 1)
    sizes = jnp.zeros(num_experts, jnp.int32).at[flat].add(1, mode="drop")
    both = lax.ragged_dot(x[order // k], gate_up.swapaxes(1, 2), sizes)
    out = lax.ragged_dot(options.activate(both, expert), down.swapaxes(1, 2), sizes)
    out = options.finish(out, expert)
    pairs = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
    return _weighted_sum(pairs.reshape(*chosen.shape, -1), chosen, weights, num_experts).astype(x.dtype)


def grouped(
    x: Array, chosen: Array, weights: Array, gate_up: Array, down: Array, options: Options = PLAIN
) -> Array:
    """`pallas_kernels.grouped_matmul` over (token, choice) pairs, every expert's padded to whole tiles. For GPU; reads
    each chosen expert once for every tile of its rows."""
    tokens, k = chosen.shape
    rows = group_rows(chosen.reshape(-1), gate_up.shape[0], tile=64 if tokens * k < 4096 else 128)
    expert = jnp.repeat(rows.tile_group, rows.tile)
    both = grouped_matmul(x[rows.source // k], gate_up, rows)
    out = options.finish(grouped_matmul(options.activate(both, expert), down, rows), expert)
    slot = jnp.minimum(rows.slot, out.shape[0] - 1)
    return _weighted_sum(out[slot].reshape(tokens, k, -1), chosen, weights, gate_up.shape[0]).astype(x.dtype)


def gather(
    x: Array, chosen: Array, weights: Array, gate_up: Array, down: Array, options: Options = PLAIN
) -> Array:
    """Multiplies and sums each token with the rows of its own experts, read where they lie. For a few tokens on a
    GPU: XLA fuses the gather into the sum, and an expert that n tokens want is read n times."""
    expert = jnp.minimum(chosen, gate_up.shape[0] - 1)
    rows = x.astype(jnp.float32)[:, None, None, :]
    both = (gate_up[expert].astype(jnp.float32) * rows).sum(-1)
    hidden = options.activate(both, expert)[:, :, None, :]
    out = options.finish((down[expert].astype(jnp.float32) * hidden).sum(-1), expert)
    return _weighted_sum(out, chosen, weights, gate_up.shape[0]).astype(x.dtype)


EXPERTS: dict[str, ExpertsFn] = {"ragged_dot": ragged_dot, "grouped": grouped, "gather": gather}
# Pairs of token and expert up to which reading an expert once for each pair beats sorting the pairs. Measured on an
# H200 (bench/results/h200/experts.json): 437 against 466 us at 128 pairs, 862 against 700 at 256.
FEW_PAIRS = 128


def preferred(pairs: int) -> str:
    """The implementation to use for so many (token, expert) pairs on the device that is traced for."""
    platform, _ = device.target()
    if platform not in ("cuda", "rocm"):
        return "ragged_dot"
    return "gather" if pairs <= FEW_PAIRS else "grouped"


def _weighted_sum(pairs: Array, chosen: Array, weights: Array, num_experts: int) -> Array:
    """Sum over a token's choices; what a kernel left in the row of a pair without an expert is undefined."""
    known = (chosen < num_experts)[..., None]
    return jnp.where(known, pairs.astype(jnp.float32) * weights[..., None], 0).sum(axis=1)
