"""Named ways to run routed experts; all give the same result up to rounding.

Each takes x [tokens, hidden], chosen Int32[tokens, k] (`num_experts` = no expert), weights Float32[tokens, k],
gate_up [experts, 2 * size, hidden] and down [experts, hidden, size], and returns the weighted sums [tokens, hidden].
None allocates a product of every token with every expert on the platform that it is for.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

ExpertsFn = Callable[[Array, Array, Array, Array, Array], Array]


def ragged_dot(x: Array, chosen: Array, weights: Array, gate_up: Array, down: Array) -> Array:
    """`jax.lax.ragged_dot` over tokens sorted by expert. For CPU; XLA for GPU multiplies every token with every
    expert instead."""

    def multiply(rows: Array, matrices: Array, group_sizes: Array) -> Array:
        return lax.ragged_dot(rows, matrices.swapaxes(1, 2), group_sizes)

    return _sorted(multiply, x, chosen, weights, gate_up, down)


def mosaic(x: Array, chosen: Array, weights: Array, gate_up: Array, down: Array) -> Array:
    """jax's Mosaic GPU grouped matrix product over tokens sorted by expert. For Hopper, bfloat16 or float16, hidden
    and expert sizes in multiples of 64."""
    # Imports CUDA-only modules of jax.
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot as grouped

    hidden, size = gate_up.shape[2], down.shape[2]
    if x.dtype not in (jnp.bfloat16, jnp.float16) or hidden % 64 or size % 64:
        raise NotImplementedError(
            f"mosaic experts want bfloat16 or float16 and sizes in multiples of 64, found {x.dtype}, hidden {hidden}, "
            f"expert size {size}"
        )

    def multiply(rows: Array, matrices: Array, group_sizes: Array) -> Array:
        width = matrices.shape[1]
        return grouped(
            rows,
            matrices,
            group_sizes=group_sizes,
            block_m=64,
            block_n=128 if width % 128 == 0 else 64,
            block_k=64,
            max_concurrent_steps=4,
            grid_block_n=1,
            transpose_rhs=True,
        )

    return _sorted(multiply, x, chosen, weights, gate_up, down)


def gather(x: Array, chosen: Array, weights: Array, gate_up: Array, down: Array) -> Array:
    """Multiplies and sums each token with the rows of its own experts, read where they lie. For a few tokens on a
    GPU: XLA fuses the gather into the sum, and an expert that n tokens want is read n times."""
    expert = jnp.minimum(chosen, gate_up.shape[0] - 1)
    rows = x.astype(jnp.float32)[:, None, None, :]
    both = (gate_up[expert].astype(jnp.float32) * rows).sum(-1)
    gate, up = jnp.split(both, 2, axis=-1)
    hidden = (jax.nn.silu(gate) * up)[:, :, None, :]
    out = (down[expert].astype(jnp.float32) * hidden).sum(-1)
    return _weighted_sum(out, chosen, weights, gate_up.shape[0]).astype(x.dtype)


EXPERTS: dict[str, ExpertsFn] = {"ragged_dot": ragged_dot, "mosaic": mosaic, "gather": gather}
GPU_ONLY = frozenset({"mosaic"})


def _sorted(
    multiply: Callable[[Array, Array, Array], Array],
    x: Array,
    chosen: Array,
    weights: Array,
    gate_up: Array,
    down: Array,
) -> Array:
    """Runs the experts over (token, choice) pairs sorted by expert; multiply(rows, [experts, out, in], group_sizes)."""
    num_experts = gate_up.shape[0]
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    group_sizes = jnp.zeros(num_experts, jnp.int32).at[flat].add(1, mode="drop")
    gate, up = jnp.split(multiply(x[order // chosen.shape[1]], gate_up, group_sizes), 2, axis=-1)
    out = multiply(jax.nn.silu(gate) * up, down, group_sizes)
    pairs = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
    return _weighted_sum(pairs.reshape(*chosen.shape, -1), chosen, weights, num_experts).astype(x.dtype)


def _weighted_sum(pairs: Array, chosen: Array, weights: Array, num_experts: int) -> Array:
    """Sum over a token's choices; what a kernel left in the row of a pair without an expert is undefined."""
    known = (chosen < num_experts)[..., None]
    return jnp.where(known, pairs.astype(jnp.float32) * weights[..., None], 0).sum(axis=1)
