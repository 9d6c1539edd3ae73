"""Arrays of the MLA decode kernels with transposed products, in which a query is a column."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

ACC = plgpu.Layout.WGMMA
COLUMNS = ACC.reduce(0)  # layout of one value a column


def full(shape, value, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def down(x, like):
    """One value a column, for every row of `like`."""
    return lax.broadcast_in_dim(x, like.shape, [1])
