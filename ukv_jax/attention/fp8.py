"""Stored fp8 values and their scales."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ukv_jax.layout import FP8_MAX


def quantize(x: Float[Array, "*batch width"]) -> tuple[Array, Float[Array, " *batch"]]:
    """(e4m3 values that saturate at +-448, their f32 scale: largest magnitude / 448, or 1 for zeros); x = value * scale.

    An infinity counts as the largest finite f32; NaN stays what it is."""
    largest = jnp.finfo(jnp.float32).max
    x = jnp.clip(x.astype(jnp.float32), -largest, largest)
    peak = jnp.max(jnp.abs(x), axis=-1)
    # Not below the smallest normal f32: a subnormal scale is flushed to 0 and divides by it.
    scale = jnp.where(peak > 0, jnp.maximum(peak / FP8_MAX, jnp.finfo(jnp.float32).tiny), 1.0)
    return jnp.clip(x / scale[..., None], -FP8_MAX, FP8_MAX).astype(jnp.float8_e4m3fn), scale
