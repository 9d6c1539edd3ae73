"""The short causal convolution in front of recurrent mixers (KDA, GDN, Mamba-2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def short_conv(
    x: Float[Array, "rows tokens channels"],
    state: Float[Array, "rows kernel-1 channels"],
    weight: Float[Array, "channels kernel"],
    new_len: Int32[Array, " rows"],
    bias: Float[Array, " channels"] | None = None,
) -> tuple[Float[Array, "rows tokens channels"], Float[Array, "rows kernel-1 channels"]]:
    """Causal depthwise convolution with silu; `state` holds the last kernel-1 inputs of each row, oldest first.

    Returns the outputs and the state after the first `new_len` tokens of each row.
    """
    kernel, tokens = weight.shape[-1], x.shape[1]
    window = jnp.concatenate([state.astype(x.dtype), x], axis=1)
    taps = weight.astype(jnp.float32)
    y = sum(window[:, i : i + tokens].astype(jnp.float32) * taps[:, i] for i in range(kernel))
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    last = new_len[:, None] + jnp.arange(kernel - 1, dtype=jnp.int32)
    new_state = jnp.take_along_axis(window, last[:, :, None], axis=1).astype(state.dtype)
    return jax.nn.silu(y).astype(x.dtype), new_state
