"""State steps in plain XLA: the state of the rows is gathered, changed and scattered."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import byte_rows
from pallas_kernels.state_step import formulas
from pallas_kernels.state_step.api import StateBlocks, last_slot


def delta_step(
    buffer: jax.Array,
    slots: jax.Array,
    blocks: StateBlocks,
    qkv: jax.Array,
    f: jax.Array,
    b: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    *,
    piece: tuple[int, int],
) -> tuple[jax.Array, jax.Array]:
    def change(state):
        return formulas.delta_rule(qkv, f, b, a_log, dt_bias, state)

    return _step(buffer, slots, blocks, b.shape[1], piece, change)


def ssm_step(
    buffer: jax.Array,
    slots: jax.Array,
    blocks: StateBlocks,
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    piece = (x.shape[-1], b.shape[-1])
    return _step(buffer, slots, blocks, x.shape[1], piece, lambda state: formulas.ssm(x, dt, a, b, c, state))


def conv_step(
    buffer: jax.Array,
    slots: jax.Array,
    blocks: StateBlocks,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    *,
    residual: bool,
) -> tuple[jax.Array, jax.Array]:
    def change(state):
        return formulas.convolution(x, weight, bias, state, residual=residual)

    return _step(buffer, slots, blocks, weight.shape[1] - 1, x.shape[1:], change)


def _step(
    buffer: jax.Array,
    slots: jax.Array,
    blocks: StateBlocks,
    pieces: int,
    piece: tuple[int, ...],
    change: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
    """`change`: state [rows, pieces, *piece] -> (out [rows, ...], state). The stored dtype is seen here alone."""
    rows, size = slots.shape[0], math.prod(piece)
    num_blocks = buffer.shape[0] // (size * np.dtype(blocks.dtype).itemsize)
    live = (slots > 0) & (slots <= last_slot(blocks, num_blocks, blocks.first, pieces))
    offsets = blocks.first + jnp.arange(pieces, dtype=jnp.int32) * blocks.piece_stride
    index = jnp.where(live, slots, 0)[:, None] * blocks.slot_stride + offsets
    state = byte_rows.read_rows(buffer, blocks.dtype, size, index).reshape(rows, pieces, *piece)
    widened: Any = state.astype(jnp.float32) if len(piece) == 2 else state
    out, widened = change(widened)
    new = widened.astype(blocks.dtype).reshape(-1, size)
    # All of the new state exists before the first write: no read of the old buffer is left that would copy the pool.
    buffer, new, out = lax.optimization_barrier((buffer, new, out))
    buffer = byte_rows.write_rows(buffer, jnp.where(live[:, None], index, -1).reshape(-1), new)
    return buffer, jnp.where(live.reshape(-1, *(1,) * (out.ndim - 1)), out, 0)
