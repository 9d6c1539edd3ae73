"""How the MLA decode kernel deals work to thread blocks: a split of a cost line, which one warp of each block finds.

Row b of the batch costs ``tiles(b) + overhead``: its KV tiles of 64 positions and a fixed price for starting a row (query
load, output store). Rows lie end to end on a line of ``total`` units; group g of thread blocks takes the units
``[g * size, (g + 1) * size)``. Nothing comes from the host and nothing is stored: every block finds its own two ends. A
row that lies across ends is cut there, and its parts are merged afterwards.

`size` is ``ceil(total / groups)``, with one exception. Rows of one length are not cut at odd places: if each can have the
same number of whole groups, or each group the same number of whole rows, at a cost in balance of at most 1/16, `size` and
`overhead` are set so that cuts and ends of rows meet. A cut costs a partial result that is written, read and merged.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, nvvm, scf

from pallas_kernels import kernel_start

TILE = 64  # KV positions a tile
_OVERHEAD = 4  # tiles' worth of fixed work for each row that a block touches
_NEVER = 2**31 - 1
_LANES = 32
_IN_FLIGHT = 4  # rows of a lane whose lengths are loaded together


class Share(NamedTuple):
    """A group's part of the line: from `first_offset` units into row `first` to `last_offset` units into row `last`.

    `last` may equal the number of rows, with offset 0. `size` is the length of every share but the last ones, `overhead`
    the fixed cost of a row, which lies before its first tile.
    """

    first: jax.Array
    first_offset: jax.Array
    last: jax.Array
    last_offset: jax.Array
    size: jax.Array
    overhead: jax.Array


def tile_range(start, stop):
    """(first tile, number of tiles) that hold the KV positions [start, stop); none if it is empty. start >= 0."""
    first = lax.div(start, TILE)
    return first, jnp.where(stop > start, lax.div(stop + (TILE - 1), TILE) - first, 0)


def segment_tiles(share: Share, row, tiles):
    """(start, stop) of the tiles of `row` that belong to `share`, counted from the row's first tile."""
    start = jnp.where(row == share.first, jnp.maximum(share.first_offset - share.overhead, 0), 0)
    stop = jnp.where(row == share.last, jnp.maximum(share.last_offset - share.overhead, 0), tiles)
    return start, stop


def owns_start(share: Share, row):
    """Whether the first unit of `row` lies in `share`; exactly one share owns each row."""
    return ((row > share.first) | (share.first_offset == 0)) & ((row < share.last) | (share.last_offset > 0))


def find_share(
    row_range_refs, batch: int, group, groups: int, out_ref, *, width_tokens: int, s_q: int,
    reach: int | None = None, indptr_ref=None, capacity: int = 0, overhead: int = _OVERHEAD, cut_evenly: bool = True,
) -> None:  # fmt: skip
    """Writes the numbers of this group's `Share` to the int32[8] shared-memory ref `out_ref`.

    Run by one warpgroup of a kernel that waits for no other before (`kernel_start.insertion_point`); each of its warps does the
    same work. `row_range_refs` are the int32[batch] refs of kv_start, kv_end and, if given, q_start. `reach`: positions before
    the end of a row's queries that some of them sees, None for all. `indptr_ref`, `capacity`: bounds of the rows in a token
    stream and its length; a row has no more positions than ids.
    `overhead`: what a row costs a group beside its tiles, in tiles, where rows are of several lengths.
    `cut_evenly`: whether the same number of groups for each row of one length is worth 1/16 in balance where that cuts rows.
    This warpgroup may read them at once, another behind a barrier at which this one arrives, without `plgpu.commit_smem`: that is
    for TMA.
    """
    ranges, ref = tuple(row_range_refs), plgpu.RefType()
    indptrs = () if indptr_ref is None else (indptr_ref,)

    @plgpu.inline_mgpu(
        arg_types=((ref,) * len(ranges), (ref,) * len(indptrs), ref, plgpu.Layout.WG_SPLAT(())),
        return_type=None,
    )
    def find(_, ranges, indptrs, out, group):
        _emit_find_share(
            ranges,
            batch,
            group.registers.item(),
            groups,
            out,
            width_tokens,
            s_q,
            reach,
            *indptrs,
            capacity=capacity,
            overhead=overhead,
            cut_evenly=cut_evenly,
        )
        mgpu.utils.warpgroup_barrier()  # each warp has written the same, and reads it

    find(ranges, indptrs, out_ref, group)


def read_share(ref) -> Share:
    """The `Share` that `find_share` wrote."""
    return Share(*(ref[i] for i in range(len(Share._fields))))


def row_end(share: Share, group, tiles):
    """Unit at which row `share.last`, of `tiles` tiles, ends on the line."""
    return (group + 1) * share.size - share.last_offset + tiles + share.overhead


def _emit_find_share(
    ranges,
    batch,
    group,
    groups,
    out,
    width_tokens,
    s_q,
    reach=None,
    indptr=None,
    *,
    capacity=0,
    overhead=_OVERHEAD,
    cut_evenly=True,
):
    i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
    const = lambda value: arith.constant(i32, ir.IntegerAttr.get(i32, value))
    constant = lambda value: arith.constant(index, ir.IntegerAttr.get(index, value))
    less = lambda a, b: arith.cmpi(arith.CmpIPredicate.slt, a, b)
    everyone, zero, none = const(-1), const(0), const(batch)
    lane_of_warp = lambda: arith.remui(arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x)), const(_LANES))
    lane = lane_of_warp()

    def numbers_of(row, ranges, indptr):
        """What the arrays say of the row, or of another if there is no such row."""
        at = [arith.index_cast(index, arith.select(less(row, const(batch)), row, const(0)))]
        bounds = (
            [] if indptr is None else [memref.load(indptr, [arith.addi(at[0], constant(i))]) for i in (0, 1)]
        )
        return [memref.load(ref, at) for ref in ranges], bounds

    def tiles_of(row, numbers=None):
        """(tiles of the row, whether there is such a row)."""
        inside = less(row, none)
        (kv_start, kv_end, *q_starts), bounds = numbers or numbers_of(row, ranges, indptr)
        start = arith.maxsi(kv_start, zero)
        q_stop = kv_end
        stop = arith.minsi(kv_end, const(width_tokens))
        if indptr is not None:
            begin, end = bounds
            ids = arith.subi(arith.minsi(end, const(capacity)), begin)
            stop = arith.minsi(stop, arith.addi(kv_start, ids))
        if q_starts:
            q_stop = arith.addi(q_starts[0], const(s_q))
            stop = arith.minsi(stop, q_stop)
        if reach is not None:
            start = arith.maxsi(start, arith.subi(q_stop, const(reach)))
        tiles = arith.subi(
            arith.divui(arith.addi(stop, const(TILE - 1)), const(TILE)), arith.divui(start, const(TILE))
        )
        return arith.select(arith.andi(inside, less(start, stop)), tiles, zero), inside

    # Each lane counts some rows that lie together: two scans find a row among them, however many there are.
    rows_each = -(-batch // _LANES)
    first_row = arith.muli(lane, const(rows_each))
    in_flight = min(rows_each, _IN_FLIGHT)
    early = [None] * in_flight
    if rows_each == in_flight:  # all that the survey reads is asked for at the start of the kernel
        outer = kernel_start.outer
        outside = [outer(ref) for ref in ranges], None if indptr is None else outer(indptr)
        with kernel_start.insertion_point():
            first = arith.muli(lane_of_warp(), const(rows_each))
            early = [numbers_of(arith.addi(first, const(j)), *outside) for j in range(rows_each)]

    def survey(i, carry):
        mine, least, most = carry
        first = arith.muli(i, const(in_flight))
        for tiles, inside in [row_of_lane(arith.addi(first, const(j)), early[j]) for j in range(in_flight)]:
            mine = arith.addi(mine, tiles)
            least = arith.minui(least, arith.select(inside, tiles, const(_NEVER)))
            most = arith.maxui(most, tiles)
        return [mine, least, most]

    def row_of_lane(i, numbers):
        row = arith.addi(first_row, i)
        # Rows past this lane's are the next one's.
        return tiles_of(arith.select(less(i, const(rows_each)), row, none), numbers)

    mine, least, most = _repeat(-(-rows_each // in_flight), [zero, const(_NEVER), zero], survey)
    redux, kinds = mgpu.utils.redux, mgpu.utils.ReductionKind
    total = redux(mine, everyone, kinds.ADD)
    # Signed, as both are below 2**31.
    least, most = redux(least, everyone, kinds.MIN), redux(most, everyone, kinds.MAX)

    up = lambda a, b: arith.divui(arith.addi(a, arith.subi(b, const(1))), b)
    # Rows of one length: whole groups a row, or whole rows a group.
    if batch <= groups:
        parts = arith.maxui(arith.minui(const(groups // batch), most), const(1))
        even_size = arith.maxui(up(most, parts), const(1))
        even_overhead = arith.subi(arith.muli(parts, even_size), most)
    else:
        even_size, even_overhead = arith.muli(const(-(-batch // groups)), most), zero
    balanced = up(total, const(groups))
    slack = 17 if cut_evenly or groups // batch < 2 else 16
    even = arith.andi(
        arith.andi(arith.cmpi(arith.CmpIPredicate.eq, least, most), less(zero, most)),
        arith.cmpi(
            arith.CmpIPredicate.ule, arith.muli(even_size, const(16)), arith.muli(balanced, const(slack))
        ),
    )
    overhead = arith.select(even, even_overhead, const(overhead))
    total = arith.addi(total, arith.muli(overhead, none))
    size = arith.select(even, even_size, arith.maxui(up(total, const(groups)), const(1)))
    ends = [arith.minui(arith.muli(arith.addi(group, const(i)), size), total) for i in (0, 1)]

    shuffle = lambda value, other, kind, clamp: nvvm.shfl_sync(everyone, value, other, const(clamp), kind)

    def through(cost, lanes):
        """Sum of the costs of the lanes up to this one, if it is among the first `lanes`; others cost nothing and get less."""
        for distance in [d for d in (1, 2, 4, 8, 16) if d < lanes]:
            before = shuffle(cost, const(distance), nvvm.ShflKind.up, 0)
            cost = arith.addi(cost, arith.select(less(lane, const(distance)), zero, before))
        return cost

    def first_past(at, start, cost):
        """(whether some lane's part of the line ends past `at`, the first such lane, its start)."""
        hits = nvvm.vote_sync(everyone, less(at, arith.addi(start, cost)), nvvm.VoteSyncKind.ballot)
        hit = arith.minui(llvm.intr_cttz(hits, False), const(_LANES - 1))
        return arith.cmpi(arith.CmpIPredicate.ne, hits, zero), hit, shuffle(start, hit, nvvm.ShflKind.idx, 31)

    # First the lane whose rows hold an end, then the row.
    rows_here = arith.maxsi(arith.minsi(arith.subi(none, first_row), const(rows_each)), zero)
    cost = arith.addi(mine, arith.muli(overhead, rows_here))
    start = arith.subi(through(cost, -(-batch // rows_each)), cost)
    found = []
    for at in ends:
        some, hit, base = first_past(at, start, cost)
        found.append((at, some, arith.muli(hit, const(rows_each)), base))

    def scan(chunk, carry):  # of a lane's rows, 32 at a time
        after = []
        for (at, _, first, _), (base, row, offset) in zip(found, zip(*[iter(carry)] * 3), strict=True):
            i = arith.addi(arith.muli(chunk, const(_LANES)), lane)
            row_here = arith.select(less(i, const(rows_each)), arith.addi(first, i), none)
            tiles, inside = tiles_of(row_here)  # in the L1 cache by now
            cost = arith.select(inside, arith.addi(tiles, overhead), zero)
            end = arith.addi(base, through(cost, rows_each))
            some, hit, hit_start = first_past(at, arith.subi(end, cost), cost)
            fresh = arith.andi(arith.cmpi(arith.CmpIPredicate.eq, row, none), some)
            hit = arith.addi(arith.addi(first, arith.muli(chunk, const(_LANES))), hit)
            after += [
                shuffle(end, const(_LANES - 1), nvvm.ShflKind.idx, 31),
                arith.select(fresh, hit, row),
                arith.select(fresh, arith.subi(at, hit_start), offset),
            ]
        return after

    if rows_each > 1:
        carry = [x for _, _, _, base in found for x in (base, none, zero)]
        ends_found = _repeat(-(-rows_each // _LANES), carry, scan)
        rows_found = [(ends_found[1], ends_found[2]), (ends_found[4], ends_found[5])]
    else:
        rows_found = [(first, arith.subi(at, base)) for at, _, first, base in found]
    found = [
        x
        for (_, some, _, _), (row, offset) in zip(found, rows_found, strict=True)
        for x in (arith.select(some, row, none), arith.select(some, offset, zero))
    ]
    for i, value in enumerate([*found, size, overhead]):
        memref.store(value, out, [constant(i)])


def _repeat(trips: int, carry, body):
    """Emits ``for i in range(trips): carry = body(i, carry)`` with int32 i."""
    i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
    if trips == 1:
        return body(arith.constant(i32, ir.IntegerAttr.get(i32, 0)), carry)
    start, stop, step = (arith.constant(index, ir.IntegerAttr.get(index, i)) for i in (0, trips, 1))
    for_op = scf.ForOp(start, stop, step, carry)
    with ir.InsertionPoint(for_op.body):
        scf.yield_(body(arith.index_cast(i32, for_op.induction_variable), list(for_op.inner_iter_args)))
    return list(for_op.results)
