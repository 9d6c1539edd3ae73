"""Matrix products whose matrix depends on the row: the public functions and the table of implementations."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels import implementations

MULTIPLY = {
    "mosaic": ("pallas_kernels.grouped_matmul.mosaic_gpu", "multiply"),
    "xla": ("pallas_kernels.grouped_matmul.reference", "multiply"),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GroupedRows:
    """Rows sorted by group, every group padded to whole tiles of `tile` rows.

    source: which row lies in each slot; slots that nothing lies in repeat row 0.
    slot: where each row lies; rows without a group have a slot past the end.
    tile_group: group of each tile. num_tiles: tiles in use, the first ones.
    """

    source: Int32[Array, " slots"]
    slot: Int32[Array, " rows"]
    tile_group: Int32[Array, " tiles"]
    num_tiles: Int32[Array, ""]
    tile: int = field(metadata={"static": True})


def group_rows(group: Int32[Array, " rows"], num_groups: int, *, tile: int) -> GroupedRows:
    """Sorts rows by group. A row with a group outside [0, num_groups) lies nowhere.

    There are at most rows // tile + min(rows, num_groups) tiles: each group wastes less than one.
    """
    rows = group.shape[0]
    tiles = rows // tile + min(rows, num_groups)
    known = (group >= 0) & (group < num_groups)
    sizes = (group[:, None] == jnp.arange(num_groups, dtype=jnp.int32)).sum(axis=0, dtype=jnp.int32)
    tile_ends = jnp.cumsum((sizes + tile - 1) // tile, dtype=jnp.int32)
    first_tile = tile_ends - (sizes + tile - 1) // tile
    at = first_tile[jnp.clip(group, 0, num_groups - 1)] * tile + _rank_in_group(group)
    slot = jnp.where(known, at, tiles * tile)
    index = jnp.arange(rows, dtype=jnp.int32)
    source = jnp.zeros(tiles * tile, jnp.int32).at[slot].set(index, mode="drop")
    tile_group = (tile_ends <= jnp.arange(tiles, dtype=jnp.int32)[:, None]).sum(axis=1, dtype=jnp.int32)
    return GroupedRows(source, slot, jnp.minimum(tile_group, num_groups - 1), tile_ends[-1], tile)


def _rank_in_group(group: Int32[Array, " rows"]) -> Int32[Array, " rows"]:
    """How many earlier rows are in the same group."""
    rows = group.shape[0]
    index = jnp.arange(rows, dtype=jnp.int32)
    if rows <= 2048:  # one fused kernel instead of the many launches of a sort
        return ((group == group[:, None]) & (index < index[:, None])).sum(axis=1, dtype=jnp.int32)
    order = jnp.argsort(group, stable=True).astype(jnp.int32)
    ordered = group[order]
    starts = jnp.where(ordered != jnp.roll(ordered, 1), index, 0).at[0].set(0)
    rank = index - lax.cummax(starts)
    return jnp.zeros(rows, jnp.int32).at[order].set(rank, unique_indices=True)


def grouped_matmul(
    x: Float[Array, "slots inner"],
    matrices: Float[Array, "groups outer inner"],
    rows: GroupedRows,
    *,
    implementation: str | None = None,
) -> Float[Array, "slots outer"]:
    """``out[s] = x[s] @ matrices[tile_group[s // tile]].T``, accumulated in float32, in the dtype of x.

    Args:
      x: rows in the order of `rows.source`.
      implementation: "mosaic" (Hopper; bfloat16 or float16, sizes in multiples of 64, tile 64 or 128), "xla" (a loop
        over tiles), or None for the best on the device at hand.

    Slots past `rows.num_tiles` tiles are left undefined.

    Raises:
      ValueError: shapes or dtypes that do not fit. NotImplementedError: the named implementation cannot serve them.
    """
    slots = rows.source.shape[0]
    if x.ndim != 2 or x.shape[0] != slots:
        raise ValueError(f"grouped_matmul: x has shape {list(x.shape)}, need [{slots}, inner]")
    if matrices.ndim != 3 or matrices.shape[2] != x.shape[1]:
        raise ValueError(
            f"grouped_matmul: matrices have shape {list(matrices.shape)}, need [groups, outer, {x.shape[1]}]"
        )
    if matrices.dtype != x.dtype:
        raise ValueError(f"grouped_matmul: x is {x.dtype} but the matrices are {matrices.dtype}")
    return implementations.run("grouped_matmul", MULTIPLY, implementation)(x, matrices, rows)
