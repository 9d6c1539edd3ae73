"""What a computing warpgroup of the Mosaic prefill kernels does with a work item: softmax of one beside products of the others.

Each owns `HALF` lines of queries; one more warpgroup loads K and V into rings. In every step a warpgroup issues Q K^T of the
next block of keys and P V of the current one, hands the tensor core to the following warpgroup, and computes its softmax
while both run; the turns keep the warpgroups apart (the schedule of FlashAttention-3, arXiv:2407.08608, section 3).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_prefill import mosaic_inline as inline

HALF = 64  # lines of a warpgroup: the M of one WGMMA
CHUNK = 64  # columns of a TMA box
SWIZZLED = (plgpu.SwizzleTransform(128),)
ACC = plgpu.Layout.WGMMA
ROWS = ACC.reduce(1)
MASKED = -1e30  # below every score, and finite: a difference of two of them is 0, not NaN


class Rings(NamedTuple):
    """K and V in shared memory, [stages, chunks, keys, CHUNK] each, and the barriers that say what is there and what is read.

    turn: one barrier a computing warpgroup, on which it waits before it issues products.
    """

    k: Any
    v: Any
    k_ready: Any
    k_free: Any
    v_ready: Any
    v_free: Any
    turn: Any


def across(x: jax.Array, like: jax.Array) -> jax.Array:
    """A value for each line, in all columns of `like`."""
    return lax.broadcast_in_dim(x, like.shape, [0])


def filled(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def attend(
    queries,
    rings: Rings,
    n: jax.Array,
    steps: jax.Array,
    *,
    me: jax.Array,
    following: jax.Array,
    v_width: int,
    to_log2: float,
    mask: Callable[[jax.Array, Any], jax.Array],
    masked: jax.Array | int,
    score: Callable[[jax.Array], jax.Array],
    queries_read: Callable[[], Any],
) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    """(sum of P V, maximum, sum of P, what `queries_read` returned) of `steps` blocks from the n-th place of the rings on.

    Maximum and sums are of scores in units of 1 / to_log2.

    Args:
      queries: of this warpgroup, [chunks, at least HALF lines, CHUNK] in shared memory.
      me, following: this warpgroup, and the one that it hands the tensor core to.
      mask: (scores, step) -> scores, -inf where a line does not see the key. Called in the first `masked` steps, at least one.
      score: products -> scores.
      queries_read: called when all products with the queries have been read.
    """
    stages = rings.k.shape[0]

    def softmax(s, peak, total):
        """(P, new maximum, new sum, decay of what was summed before)."""
        new_peak = jnp.maximum(peak, s.max(axis=1))
        decay = jnp.exp2((peak - new_peak) * to_log2)
        p = jnp.exp2(s * to_log2 - across(new_peak * to_log2, s))
        return p, new_peak, total * decay + p.sum(axis=1), decay

    slot = lax.rem(n, stages)
    plgpu.barrier_wait(rings.k_ready.at[slot])
    plgpu.barrier_wait(rings.turn.at[me])
    (s,) = inline.issue_products(queries, rings.k.at[slot], None, None, None, SWIZZLED)
    plgpu.barrier_arrive(rings.turn.at[following])
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(rings.k_free.at[slot])
    s = mask(score(inline.settle(s)), 0)
    p, peak, total, _ = softmax(s, filled((HALF,), MASKED, ROWS), filled((HALF,), 0, ROWS))
    p = p.astype(jnp.bfloat16)

    def step(i, carry, mask):
        acc, p, peak, total = carry
        slot, before = lax.rem(n + i, stages), lax.rem(n + i - 1, stages)
        plgpu.barrier_wait(rings.v_ready.at[before])
        plgpu.barrier_wait(rings.k_ready.at[slot])
        plgpu.barrier_wait(rings.turn.at[me])
        s, acc = inline.issue_products(queries, rings.k.at[slot], rings.v.at[before], p, acc, SWIZZLED)
        plgpu.barrier_arrive(rings.turn.at[following])
        plgpu.wgmma_wait(1)  # S is there, P V may still run
        plgpu.barrier_arrive(rings.k_free.at[slot])
        s = score(inline.settle(s))
        if mask is not None:
            s = mask(s, i)
        p, peak, total, decay = lax.optimization_barrier(softmax(s, peak, total))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(rings.v_free.at[before])
        acc = inline.settle(acc)
        # Not before the wait: P V reads the registers of the old P until then.
        p = inline.settle(p).astype(jnp.bfloat16)
        return acc * across(decay, acc), p, peak, total

    carry = filled((HALF, v_width), 0, ACC), p, peak, total
    if not isinstance(masked, int):
        carry = lax.fori_loop(1, masked, lambda i, carry: step(i, carry, mask), carry)
    acc, p, peak, total = lax.fori_loop(
        masked if isinstance(masked, int) else jnp.maximum(masked, 1),
        steps,
        lambda i, carry: step(i, carry, None),
        carry,
    )
    result = queries_read()
    last = lax.rem(n + steps - 1, stages)
    plgpu.barrier_wait(rings.v_ready.at[last])
    (acc,) = inline.issue_products(None, None, rings.v.at[last], p, acc, SWIZZLED)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(rings.v_free.at[last])
    return inline.settle(acc), peak, total, result
