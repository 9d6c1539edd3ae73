"""Bind and tombstone in plain XLA: cost and temporaries grow with the lanes, not with the pool."""

import jax
import jax.numpy as jnp
from jax import lax

DROP = jnp.iinfo(jnp.int32).max  # a scatter index that no table has


def bind(
    v2p: jax.Array, p2v: jax.Array, virtual: jax.Array, physical: jax.Array
) -> tuple[jax.Array, jax.Array]:
    live = is_page(virtual, v2p.shape[0]) & is_page(physical, p2v.shape[0])
    v2p = v2p.at[jnp.where(live, virtual, DROP)].set(physical, mode="drop")
    p2v = p2v.at[jnp.where(live, physical, DROP)].set(virtual, mode="drop")
    return v2p, p2v


def is_page(page: jax.Array, table_rows: int) -> jax.Array:
    """Whether a page has a row of its own: not the padding page 0, not the extra last row."""
    return (page > 0) & (page < table_rows - 1)


def tombstone(
    v2p: jax.Array,
    p2v: jax.Array,
    free_ids: jax.Array | None,
    free_count: jax.Array | None,
    holes: jax.Array,
    hole_count: jax.Array,
    virtual: jax.Array,
):
    lanes = virtual.shape[0]
    inside = is_page(virtual, v2p.shape[0])
    physical = jnp.where(inside, v2p[jnp.where(inside, virtual, 0)], -1)
    bound = is_page(physical, p2v.shape[0])
    # Every lane claims its row with a value below all that v2p can hold, the first lane's being the lowest:
    # the minimum leaves the first lane of a duplicate as the row's winner, whatever the order of the scatter.
    # The barrier keeps the gather above before the first write, so that v2p is updated in place.
    v2p, physical = lax.optimization_barrier((v2p, physical))
    claim = jnp.arange(lanes, dtype=jnp.int32) - (lanes + 1)
    row = jnp.where(bound, virtual, DROP)
    claimed = v2p.at[row].min(claim, mode="drop")
    freed = bound & (claimed.at[row].get(mode="fill", fill_value=0) == claim)
    claimed, freed = lax.optimization_barrier((claimed, freed))
    v2p = claimed.at[row].set(-1, mode="drop")
    p2v = p2v.at[jnp.where(freed, physical, DROP)].set(-1, mode="drop")

    rank = jnp.cumsum(freed, dtype=jnp.int32) - 1
    count = jnp.sum(freed, dtype=jnp.int32)
    holes = holes.at[jnp.where(freed, hole_count + rank, DROP)].set(physical, mode="drop")
    hole_count = hole_count + count
    if free_ids is not None:
        free_ids = free_ids.at[jnp.where(freed, free_count + rank, DROP)].set(virtual, mode="drop")
        free_count = free_count + count
    faults = jnp.sum((virtual != -1) & ~freed, dtype=jnp.int32)
    return v2p, p2v, free_ids, free_count, holes, hole_count, freed, faults
