"""The two writers of a sub-pool's page maps, each fused into one pass over a list of pages.

v2p Int32[num_virtual + 1] and p2v Int32[num_pages + 1] are inverses on live pages: v2p[v] = p and p2v[p] = v.
Row 0 belongs to the padding page and stays 0; -1 marks an unbound page (a tombstone), and the extra last row
stays -1. Free ids and holes are stacks: an array and the count of entries in use.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_kernels import implementations

_PACKAGE = "pallas_kernels.bind_pages"
BIND, TOMBSTONE = (
    {"xla": (f"{_PACKAGE}.reference", function), "mosaic": (f"{_PACKAGE}.mosaic_gpu", function)}
    for function in ("bind", "tombstone")
)


def bind(
    v2p: Int32[Array, " virtual_rows"],
    p2v: Int32[Array, " physical_rows"],
    virtual: Int32[Array, " n"],
    physical: Int32[Array, " n"],
    *,
    implementation: str | None = None,
) -> tuple[Int32[Array, " virtual_rows"], Int32[Array, " physical_rows"]]:
    """Binds virtual[i] to physical[i]: v2p[virtual] = physical and p2v[physical] = virtual.

    A lane is dropped where either page is <= 0 or has no row of its own (the last row is none). Live lanes
    must name distinct, unbound pages; the allocator's free lists see to that.

    Args:
      v2p, p2v: the maps; donate them to update in place.
      virtual, physical: pairs of pages.
      implementation: "xla", "mosaic", or None for the best on the default device.

    Raises:
      ValueError: shapes or dtypes that do not fit together.
    """
    name = "bind"
    _check_maps(name, v2p, p2v)
    _check_int32(name, virtual=virtual, physical=physical)
    if virtual.shape != physical.shape:
        raise ValueError(f"{name}: {virtual.shape[0]} virtual pages for {physical.shape[0]} physical ones")
    if virtual.shape[0] == 0:
        return v2p, p2v
    return implementations.run(name, BIND, implementation)(v2p, p2v, virtual, physical)


def tombstone(
    v2p: Int32[Array, " virtual_rows"],
    p2v: Int32[Array, " physical_rows"],
    free_ids: Int32[Array, " id_slots"] | None,
    free_count: Int32[Array, ""] | None,
    holes: Int32[Array, " hole_slots"],
    hole_count: Int32[Array, ""],
    virtual: Int32[Array, " n"],
    *,
    push_ids: bool = True,
    implementation: str | None = None,
) -> tuple[
    Int32[Array, " virtual_rows"],
    Int32[Array, " physical_rows"],
    Int32[Array, " id_slots"] | None,
    Int32[Array, ""] | None,
    Int32[Array, " hole_slots"],
    Int32[Array, ""],
    Bool[Array, " n"],
    Int32[Array, ""],
]:
    """Unbinds pages and gives both of their ids back.

    Reads p = v2p[v]; where p > 0, writes -1 to v2p[v] and p2v[p] and pushes v on free_ids and p on holes.

    Pushes keep the order of the lanes. A lane whose page is -1 is idle. A lane that frees nothing is a fault:
    a page that is already dead, page 0, a page out of range, and every lane but the first that names the same
    page.

    Args:
      v2p, p2v: the maps; donate them to update in place.
      free_ids, free_count: stack of free virtual ids; returned as they are where push_ids is False.
      holes, hole_count: stack of free physical pages.
      virtual: pages to unbind.
      push_ids: whether the sub-pool owns its virtual ids. A sliding-window sub-pool shares those of the full
        pool: its release leaves holes, but frees no id.
      implementation: "xla", "mosaic", or None for the best on the default device.

    Returns:
      (v2p, p2v, free_ids, free_count, holes, hole_count, freed, faults): freed[i] tells whether lane i freed
      its page, faults counts the faulty lanes.

    Raises:
      ValueError: shapes or dtypes that do not fit together, or id lists missing where push_ids is True.
    """
    name = "tombstone"
    _check_maps(name, v2p, p2v)
    _check_int32(name, holes=holes, virtual=virtual)
    hole_count = _check_count(name, "hole_count", hole_count)
    if push_ids:
        if free_ids is None or free_count is None:
            raise ValueError(f"{name}: push_ids=True needs free_ids and free_count")
        _check_int32(name, free_ids=free_ids)
        free_count = _check_count(name, "free_count", free_count)
    if virtual.shape[0] == 0:
        idle = jnp.zeros((0,), bool)
        return v2p, p2v, free_ids, free_count, holes, hole_count, idle, jnp.zeros((), jnp.int32)
    unbind = implementations.run(name, TOMBSTONE, implementation)
    if push_ids:
        return unbind(v2p, p2v, free_ids, free_count, holes, hole_count, virtual)
    v2p, p2v, _, _, *rest = unbind(v2p, p2v, None, None, holes, hole_count, virtual)
    return v2p, p2v, free_ids, free_count, *rest


def _check_int32(name: str, **arrays: jax.Array) -> None:
    for label, array in arrays.items():
        if array.ndim != 1 or array.dtype != jnp.int32:
            raise ValueError(
                f"{name}: {label} is {array.dtype}{list(array.shape)}, need int32 of one dimension"
            )


def _check_maps(name: str, v2p: jax.Array, p2v: jax.Array) -> None:
    _check_int32(name, v2p=v2p, p2v=p2v)
    if v2p.shape[0] < 2 or p2v.shape[0] < 2:
        raise ValueError(f"{name}: v2p and p2v have {v2p.shape[0]} and {p2v.shape[0]} rows, need 2 or more")


def _check_count(name: str, label: str, count: jax.Array) -> jax.Array:
    count = jnp.asarray(count, jnp.int32)
    if count.shape:
        raise ValueError(f"{name}: {label} has shape {list(count.shape)}, need a scalar")
    return count
