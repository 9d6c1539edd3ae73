"""Bind and tombstone in Pallas Mosaic GPU: one launch each, the maps and stacks updated in place."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import gmem
from pallas_kernels.bind_pages.reference import is_page

MAX_WARPGROUPS = 8  # 1024 lanes a trip, the most threads that a block can have


def bind(
    v2p: jax.Array, p2v: jax.Array, virtual: jax.Array, physical: jax.Array
) -> tuple[jax.Array, jax.Array]:
    count = virtual.shape[0]

    def bind_pages(refs: dict[str, Any]) -> None:
        lane = lax.axis_index("block") * gmem.WARPGROUP + gmem.iota(gmem.WARPGROUP)
        at = jnp.minimum(lane, count - 1)
        v, p = gmem.load(refs["virtual"], at), gmem.load(refs["physical"], at)
        live = gmem.mask((lane < count) & is_page(v, v2p.shape[0]) & is_page(p, p2v.shape[0]))
        gmem.store(refs["v2p"], v, p, live)
        gmem.store(refs["p2v"], p, v, live)

    maps = gmem.launch(
        bind_pages,
        inputs=dict(virtual=virtual, physical=physical),
        in_place=dict(v2p=v2p, p2v=p2v),
        outputs={},
        grid=dict(block=-(-count // gmem.WARPGROUP)),
    )
    return maps["v2p"], maps["p2v"]


def tombstone(
    v2p: jax.Array,
    p2v: jax.Array,
    free_ids: jax.Array | None,
    free_count: jax.Array | None,
    holes: jax.Array,
    hole_count: jax.Array,
    virtual: jax.Array,
):
    """One block walks the pages in trips of up to 1024 lanes, in order, so that pushes keep the order of the lanes."""
    count = virtual.shape[0]
    warpgroups = min(MAX_WARPGROUPS, -(-count // gmem.WARPGROUP))
    lanes_of_trip = warpgroups * gmem.WARPGROUP

    def tombstone_pages(refs: dict[str, Any], warp_counts) -> None:
        warpgroup = lax.axis_index("warpgroup") if warpgroups > 1 else 0
        thread = gmem.iota(gmem.WARPGROUP)
        id_top = 0 if free_ids is None else refs["free_count"][0]
        hole_top = refs["hole_count"][0]

        def trip(i, totals):
            pushed, faults = totals
            lane = i * lanes_of_trip + warpgroup * gmem.WARPGROUP + thread
            in_list = lane < count
            v = gmem.load(refs["virtual"], jnp.minimum(lane, count - 1))
            inside = in_list & is_page(v, v2p.shape[0])
            row = jnp.where(inside, v, 0)
            p = gmem.load_coherent(refs["v2p"], row)
            bound = inside & is_page(p, p2v.shape[0])
            gmem.block_barrier()  # all have read the pages before the first claim
            # As in the reference: lanes claim their row with values below all pages, the first lane's lowest.
            claim = lane - (count + 1)
            gmem.atomic_min(refs["v2p"], row, claim, gmem.mask(bound))
            gmem.block_barrier()
            freed = bound & (gmem.load_coherent(refs["v2p"], row) == claim)
            rank, freed_in_trip = gmem.block_rank(gmem.mask(freed), warp_counts, warpgroups)
            # The ranks' barrier lies between the last look at a claim and its end.
            live = gmem.mask(freed)
            gmem.store(refs["v2p"], row, gmem.splat(-1), live)
            gmem.store(refs["p2v"], p, gmem.splat(-1), live)
            place = hole_top + pushed + rank
            gmem.store(refs["holes"], place, p, gmem.mask(freed & (place < holes.shape[0])))
            if free_ids is not None:
                place = id_top + pushed + rank
                gmem.store(refs["free_ids"], place, v, gmem.mask(freed & (place < free_ids.shape[0])))
            gmem.store(refs["freed"], lane, live, gmem.mask(in_list))
            gmem.block_barrier()
            _, busy = gmem.block_rank(gmem.mask(in_list & (v != -1)), warp_counts, warpgroups)
            gmem.block_barrier()
            return pushed + freed_in_trip, faults + busy - freed_in_trip

        nothing = gmem.splat(0)
        pushed, faults = lax.fori_loop(0, -(-count // lanes_of_trip), trip, (nothing, nothing))
        first = gmem.mask((thread == 0) & (warpgroup == 0))
        gmem.store(refs["faults"], nothing, faults, first)
        gmem.store(refs["hole_count"], nothing, hole_top + pushed, first)
        if free_ids is not None:
            gmem.store(refs["free_count"], nothing, id_top + pushed, first)

    in_place = dict(v2p=v2p, p2v=p2v, holes=holes, hole_count=hole_count.reshape(1))
    if free_ids is not None:
        in_place |= dict(free_ids=free_ids, free_count=free_count.reshape(1))
    made = gmem.launch(
        tombstone_pages,
        inputs=dict(virtual=virtual),
        in_place=in_place,
        outputs=dict(
            freed=jax.ShapeDtypeStruct((count,), jnp.int32), faults=jax.ShapeDtypeStruct((1,), jnp.int32)
        ),
        grid=dict(block=1),
        warpgroups=warpgroups,
        scratch=dict(warp_counts=plgpu.SMEM((4 * warpgroups,), jnp.int32)),
    )
    return (
        made["v2p"],
        made["p2v"],
        made.get("free_ids"),
        made["free_count"].reshape(()) if free_ids is not None else None,
        made["holes"],
        made["hole_count"].reshape(()),
        made["freed"] != 0,
        made["faults"].reshape(()),
    )
