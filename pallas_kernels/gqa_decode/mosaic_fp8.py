"""Paged GQA decode over e4m3 rows for Hopper in Pallas Mosaic GPU: each warp has a KV head, rows come by TMA.

A thread block takes a share of the batch's KV tiles, as in `mosaic_gpu`, and as many KV heads as it has warps that compute,
so that a row of the pool is read in one piece; where there are fewer heads, warps share one and take its tokens in turn.
One warpgroup loads K, V and their scales into two rings; the others' warps go through them without a word to each other
(`mosaic_fp8_warp`). docs/gqa_decode.md has the numbers behind it.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import gmem, paged_mosaic
from pallas_kernels.gqa_decode import mosaic_fp8_warp
from pallas_kernels.gqa_decode.mosaic_fp8_warp import MASKED, Warp
from pallas_kernels.gqa_decode.mosaic_rows import Call, Rows
from pallas_kernels.mla_decode import mosaic_merge, mosaic_schedule
from pallas_kernels.mla_decode.mosaic_schedule import TILE

if TYPE_CHECKING:
    from pallas_kernels.gqa_decode.api import KVScales

_SMEM_BYTES = 224 << 10  # what the rings and sums that warps exchange may take
_MAX_STAGES = 8
_BYTES = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))
_SCALAR = plgpu.Layout.WG_SPLAT(())
_WIDTHS = (64, 128, 192, 256)


@dataclass(frozen=True)
class _Plan:
    """KV heads of a block, warps that share one, rows that a warp takes at a time, warpgroups that compute, tiles in a ring."""

    heads: int
    sharing: int
    tokens: int
    consumers: int
    stages: int

    @property
    def rows(self) -> int:
        """Of a tile."""
        return self.tokens * self.sharing

    @staticmethod
    def make(kv_heads: int, queries: int, k_width: int, v_width: int) -> "_Plan":
        warps = 8 if k_width + v_width <= 256 else 4
        heads = math.gcd(kv_heads, warps)
        if warps // heads > 4:  # those of one head meet within a warpgroup
            warps = 4 * heads
        sharing = warps // heads
        tokens = 64 if k_width + v_width <= 128 else 32  # narrow heads: as much work between two waits
        stage = tokens * sharing * (heads * (k_width + v_width) + 8 * kv_heads)
        sums = 0 if sharing == 1 else warps // sharing * (_lines(queries) * (v_width + 8) * 4)
        return _Plan(heads, sharing, tokens, warps // 4, min((_SMEM_BYTES - sums) // stage, _MAX_STAGES))


def _lines(queries: int) -> int:
    return 8 if queries <= 8 else 16


def decline(source, heads: int, kv_heads: int, s_q: int, k_width: int, v_width: int, bias: bool) -> None:
    """NotImplementedError, with the reason, for what this kernel does not serve beyond `mosaic_gpu`'s own."""
    paged_mosaic.decline_source(source)
    if bias:
        raise NotImplementedError("e4m3 rows take no relative bias here")
    if k_width not in _WIDTHS or v_width not in _WIDTHS:
        raise NotImplementedError(
            f"heads of e4m3 must be 64, 128, 192 or 256 wide, got {k_width} and {v_width}"
        )
    if s_q * heads // kv_heads > 16:
        raise NotImplementedError(
            f"at most 16 query lines a KV head over e4m3 rows, got {s_q * heads // kv_heads}"
        )
    plan = _Plan.make(kv_heads, s_q * heads // kv_heads, k_width, v_width)
    if plan.heads * k_width % 128 or plan.heads * v_width % 128:
        raise NotImplementedError(
            f"{kv_heads} KV heads of {k_width} and {v_width} bytes are no whole lines of 128"
        )
    if min(source.page_size, plan.rows, TILE) * kv_heads % 32:
        raise NotImplementedError(
            f"scales of {source.page_size} rows of {kv_heads} KV heads are no whole 128 bytes: TMA can't place them"
        )
    if plan.stages < 2:
        raise NotImplementedError(f"no room for two tiles of {plan.heads} heads of {k_width} and {v_width}")


def gqa_decode_fp8(
    q, buffer, source, k_offset, v_offset, *, num_kv_heads: int, v_head_dim: int, sm_scale: float, scales: "KVScales",
    window: int | None, sinks, logit_cap: float | None, q_start, blocks: int,
):  # fmt: skip
    """See `pallas_kernels.gqa_decode.api.gqa_decode`; what `decline` and `mosaic_gpu` let pass."""
    rows, s_q, heads, head_dim = q.shape
    page_size = source.page_size
    row_width = num_kv_heads * (head_dim if v_offset is not None else head_dim + v_head_dim)
    v_column = 0 if v_offset is not None else num_kv_heads * head_dim
    sharing = heads // num_kv_heads
    queries = s_q * sharing
    plan = _Plan.make(num_kv_heads, queries, head_dim, v_head_dim)
    lanes = num_kv_heads // plan.heads
    groups = blocks // lanes
    if groups < 1:
        raise NotImplementedError(
            f"{num_kv_heads} KV heads, {plan.heads} a block, need more than {blocks} blocks"
        )
    if rows == 0:
        return jnp.zeros((0, s_q, heads, v_head_dim), q.dtype), jnp.zeros((0, s_q, heads), jnp.float32)
    warp = Warp(
        heads=plan.heads,
        sharing=plan.sharing,
        tokens=plan.tokens,
        lines=_lines(queries),
        queries_a_head=sharing,
        k_width=head_dim,
        v_width=v_head_dim,
        scale_heads=num_kv_heads,
        s_q=s_q,
        sm_scale=sm_scale,
        window=window,
        logit_cap=logit_cap,
    )

    pool = buffer.reshape(-1, page_size, row_width)
    scale_pool = lax.bitcast_convert_type(buffer.reshape(-1, 4), jnp.float32)
    load_rows = min(page_size, plan.rows, TILE)  # of one TMA: shares begin at whole tiles of the schedule
    loads = plan.rows // load_rows
    # A box has at most 256 elements each way.
    scale_box = math.gcd(load_rows * num_kv_heads, 256)
    scale_lines = load_rows * num_kv_heads // scale_box
    scale_pool = scale_pool.reshape(-1, page_size * num_kv_heads // scale_box, scale_box)
    num_blocks, num_scale_blocks = pool.shape[0], scale_pool.shape[0]
    # An operand each: to put them into one array would be a launch.
    offsets = [
        jnp.asarray(x, jnp.int32).reshape(1)
        for x in (k_offset, k_offset if v_offset is None else v_offset, scales.k_offset, scales.v_offset)
    ]
    sink_rows = [] if sinks is None else [sinks.astype(jnp.float32)]
    call = Call(source, q_start, rows, s_q, window, groups)
    vector_of = lambda count, value: plgpu.layout_cast(
        jnp.full((gmem.WARPGROUP * count,), value, jnp.float32), gmem.lanes(gmem.WARPGROUP * count)
    )

    def kernel(*refs):
        remaining = iter(refs)
        take = lambda n: [next(remaining) for _ in range(n)]
        q_ref, pool_ref, scale_ref = take(3)
        offset_refs, sink_refs = take(len(offsets)), take(len(sink_rows))
        range_refs, id_refs = take(len(call.ranges)), take(len(call.ids))
        out_ref, lse_ref, part_ref, part_lse_ref, lead_ref = take(5)
        k_smem, v_smem, k_scale_smem, v_scale_smem, sum_smem, share_smem = take(6)
        share_ready, k_ready, k_free, v_ready, v_free = take(5)
        role = lax.axis_index("warpgroup")
        group, lane = lax.div(lax.axis_index("block"), lanes), lax.rem(lax.axis_index("block"), lanes)
        kv_head = lane * plan.heads
        work = Rows(call, range_refs, id_refs, lead_ref, group)
        k_block, v_block, *scale_blocks = (ref[0] for ref in offset_refs)

        def fits(entry):
            block = entry + jnp.maximum(k_block, v_block)
            scale_block = entry * scales.blocks_per_entry + jnp.maximum(*scale_blocks)
            return (block >= 0) & (block < num_blocks) & (scale_block >= 0) & (scale_block < num_scale_blocks)

        def span(b, start, stop, first_tile):
            """(position of the first tile of ours, positions that the row sees in this part of it, number of our tiles)."""
            base = (first_tile + start) * TILE
            kv_first, kv_stop = work.visible(b)
            kv_stop = jnp.minimum(kv_stop, (first_tile + stop) * TILE)
            count = jnp.where(stop > start, lax.div(kv_stop - base + (plan.rows - 1), plan.rows), 0)
            return base, jnp.maximum(kv_first, base), kv_stop, count

        @pl.when(role == 0)
        def load():
            plgpu.griddepcontrol_launch_dependents()  # the merge may be launched as soon as blocks leave
            work.find_share(share_smem)
            plgpu.barrier_arrive(share_ready)
            if plan.consumers > 1:
                plgpu.set_max_registers(24, action="decrease")
            share = mosaic_schedule.read_share(share_smem)

            def segment(b, start, stop, first_tile, tiles, n):
                base, kv_first, kv_stop, count = span(b, start, stop, first_tile)
                first_column, last_column = lax.div(kv_first, page_size), lax.div(kv_stop - 1, page_size)

                def positions(i):
                    return [base + i * plan.rows + j * load_rows for j in range(loads)]

                def entries_of(i):
                    # Pages of the tile outside the row's range load a neighbour again: their ids may be anything.
                    columns = [
                        jnp.clip(lax.div(p, page_size), first_column, last_column) for p in positions(i)
                    ]
                    return tuple(work.page_entry(b, column, fits) for column in columns)

                def one(i, carry):
                    n, entries = carry
                    pages = [
                        (entry, lax.rem(position, page_size) if page_size > load_rows else 0)
                        for entry, position in zip(entries, positions(i), strict=True)
                    ]
                    at = lax.rem(n, plan.stages)
                    k_scale_block, v_scale_block = scale_blocks
                    k_first, v_first = kv_head * head_dim, v_column + kv_head * v_head_dim
                    for smem, scale_smem, ready, free, block, scale_block, column, width in (
                        (k_smem, k_scale_smem, k_ready, k_free, k_block, k_scale_block, k_first, head_dim),
                        (v_smem, v_scale_smem, v_ready, v_free, v_block, v_scale_block, v_first, v_head_dim),
                    ):
                        pl.when(n >= plan.stages)(lambda free=free: plgpu.barrier_wait(free.at[at]))
                        for j, (entry, row) in enumerate(pages):
                            here = pl.ds(j * load_rows, load_rows)
                            scales_here = pl.ds(j * scale_lines, scale_lines)
                            plgpu.copy_gmem_to_smem(
                                pool_ref.at[
                                    entry + block, pl.ds(row, load_rows), pl.ds(column, plan.heads * width)
                                ],
                                smem.at[at, here],
                                ready.at[at],
                            )
                            plgpu.copy_gmem_to_smem(
                                scale_ref.at[
                                    entry * scales.blocks_per_entry + scale_block,
                                    pl.ds(lax.div(row, load_rows) * scale_lines, scale_lines),
                                ],
                                scale_smem.at[at, scales_here],
                                ready.at[at],
                            )
                    return n + 1, entries_of(jnp.minimum(i + 1, count - 1))

                return lax.fori_loop(0, count, one, (n, entries_of(0)))[0]

            work.for_segments(share, segment, jnp.int32(0), empty_rows=False)

        @pl.when(role > 0)
        def compute():
            if plan.consumers > 1:
                plgpu.set_max_registers(240, action="increase")
            me = role - 1
            tells_leads = (role == 1) & (lane == 0) & (group < groups)
            plgpu.barrier_wait(share_ready)
            share = mosaic_schedule.read_share(share_smem)
            work.begin_leads(share, tells_leads)

            def segment(b, start, stop, first_tile, tiles, n):
                base, _, kv_stop, count = span(b, start, stop, first_tile)
                kv_first, kv_end = work.visible(b)
                q_position = work.q_position(b)
                work.tell_lead(share, tells_leads, b, start, stop, tiles)
                fragments, units = load_queries(warp, q_ref, b, kv_head, queries, me)

                def one(i, carry):
                    at = lax.rem(n + i, plan.stages)
                    plgpu.barrier_wait(k_ready.at[at])
                    plgpu.barrier_wait(v_ready.at[at])
                    carry = step(
                        warp, fragments, units, carry, k_smem.at[at], v_smem.at[at], k_scale_smem.at[at], v_scale_smem.at[at],
                        (base + i * plan.rows, kv_first, kv_stop, q_position), kv_head, me,
                    )  # fmt: skip
                    plgpu.barrier_arrive(k_free.at[at])
                    plgpu.barrier_arrive(v_free.at[at])
                    return carry

                carry = lax.fori_loop(
                    0, count, one,
                    (vector_of(warp.halves, MASKED), vector_of(warp.halves, 0), vector_of(warp.sums, 0)),
                )  # fmt: skip
                whole = (start == 0) & (stop == tiles)
                slot = jnp.where(start == 0, groups + group, group)
                finish(
                    warp, carry, sum_smem.at[me], [sink_refs[0]] if sinks is not None else [],
                    (out_ref, lse_ref, part_ref, part_lse_ref), queries,
                    (kv_head, me, b, slot, whole, start == 0, kv_first, kv_end, q_position),
                )  # fmt: skip
                return n + count

            work.for_segments(share, segment, jnp.int32(0), empty_rows=True)

    barrier = plgpu.Barrier
    lines = s_q * heads
    slots = 4 // plan.sharing if plan.sharing > 1 else 0
    out, lse, part, part_lse, leads = plgpu.kernel(
        kernel,
        out_type=call.results(lines, v_head_dim),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=1 + plan.consumers,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((plan.stages, plan.rows, plan.heads * head_dim), jnp.uint8, transforms=_BYTES),
            plgpu.SMEM((plan.stages, plan.rows, plan.heads * v_head_dim), jnp.uint8, transforms=_BYTES),
            plgpu.SMEM((plan.stages, loads * scale_lines, scale_box), jnp.float32),
            plgpu.SMEM((plan.stages, loads * scale_lines, scale_box), jnp.float32),
            plgpu.SMEM(
                (plan.consumers, max(slots, 1), (warp.sums + 2 * warp.halves) if slots else 1, 32),
                jnp.float32,
            ),
            plgpu.SMEM((8,), jnp.int32),
            barrier(),
            barrier(num_arrivals=2 * loads, num_barriers=plan.stages),
            barrier(num_arrivals=plan.consumers, num_barriers=plan.stages),
            barrier(num_arrivals=2 * loads, num_barriers=plan.stages),
            barrier(num_arrivals=plan.consumers, num_barriers=plan.stages),
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
    )(q.reshape(rows * lines, head_dim), pool, scale_pool, *offsets, *sink_rows, *call.ranges, *call.ids)
    out, lse = mosaic_merge.merge(out, lse, part, part_lse, leads, queries=lines, groups=groups)
    return out.reshape(rows, s_q, heads, v_head_dim), lse.reshape(rows, s_q, heads)


def load_queries(warp: Warp, q_ref, b, kv_head, queries: int, warpgroup):
    """`Warp.queries` of row b, from bf16 [rows * s_q * heads, k_width]; lines past the last are zero."""
    scalars = [jnp.int32(x) for x in (b, kv_head, warpgroup)]
    types = tuple(
        _lanes_type(count, dtype) for count, dtype in ((warp.q_words, jnp.int32), (warp.halves, jnp.float32))
    )

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[_SCALAR] * 3), return_type=types)
    def load(_, q, *scalars):
        b, kv_head, warpgroup = (x.registers.item() for x in scalars)
        ops = mosaic_fp8_warp.OPS
        g, lane, head, _ = warp.place(warpgroup)
        base = llvm.ptrtoint(_i64(), utils.memref_ptr(q))
        words = []
        for r in range(warp.halves):
            line = ops.add(g, ops.i(8 * r))
            inside = ops.less(line, ops.i(queries))
            line = ops.select(inside, line, ops.i(0))
            at = _wide_mul(_line_in_row(warp, b, ops.add(kv_head, head), line, queries), 2 * warp.k_width)
            at = arith.addi(arith.addi(base, at), arith.extui(_i64(), ops.shl(lane, ops.i(5))))
            found = [
                word
                for chunk in range(warp.k_width // 64)
                for half in (0, 16)
                for word in utils.inline_ptx(
                    f"ld.global.nc.v4.b32 {{$0, $1, $2, $3}}, [$4+{128 * chunk + half}];",
                    at, result_types=[_i32()] * 4, has_side_effects=True,
                )
            ]  # fmt: skip
            words.append([ops.select(inside, word, ops.i(0)) for word in found])
        fragments, units = warp.queries(words)
        return _give(fragments), _give(units)

    return load(q_ref, *scalars)


def step(warp: Warp, q, units, carry, k, v, k_scale, v_scale, at, kv_head, warpgroup):
    """`Warp.step` on arrays in the layout of `gmem.lanes`, an element a thread, and refs of one tile.

    carry: the peaks, totals and sums; at: `Warp.step`'s.
    """
    count = lambda x: x.shape[0] // gmem.WARPGROUP
    scalars = [jnp.int32(x) for x in (*at, kv_head, warpgroup)]
    arrays = (q, units, *carry)
    layouts = tuple(gmem.lanes(x.shape[0]) for x in arrays)

    @plgpu.inline_mgpu(
        arg_types=(
            layouts, plgpu.RefType(_BYTES), plgpu.RefType(_BYTES), plgpu.RefType(), plgpu.RefType(), (_SCALAR,) * 6,
        ),
        return_type=tuple(_lanes_type(count(x), jnp.float32) for x in carry),
    )  # fmt: skip
    def go(_, arrays, k, v, k_scale, v_scale, scalars):
        *at, kv_head, warpgroup = (x.registers.item() for x in scalars)
        ops = mosaic_fp8_warp.OPS
        shared = lambda ref: llvm.ptrtoint(_i32(), utils.memref_ptr(ref))
        scales = [ops.add(shared(ref), ops.shl(kv_head, ops.i(2))) for ref in (k_scale, v_scale)]
        results = warp.step(
            *(_take(x) for x in arrays),
            tiles=[shared(k), shared(v)],
            scales=scales,
            at=at,
            warpgroup=warpgroup,
        )
        return tuple(_give(x) for x in results)

    return go(arrays, k, v, k_scale, v_scale, tuple(scalars))


def finish(warp: Warp, carry, sum_smem, sinks, targets, queries: int, scalars):
    """Stores a part of a row: final where it is whole, else f32 and a base-2 logarithm for the merge.

    Where warps share a head, the first of them adds what the others leave in `sum_smem`.
    """
    layouts = tuple(gmem.lanes(x.shape[0]) for x in carry)
    scalars = tuple(jnp.int32(x) for x in scalars)
    refs = (*targets, sum_smem, *sinks)

    @plgpu.inline_mgpu(
        arg_types=(layouts, (plgpu.RefType(),) * len(refs), (_SCALAR,) * len(scalars)), return_type=None
    )
    def go(_, arrays, refs, scalars):
        out, lse, part, part_lse, scratch, *sinks = refs
        kv_head, warpgroup, b, slot, whole, starts, kv_first, kv_end, q_position = (
            x.registers.item() for x in scalars
        )
        ops = mosaic_fp8_warp.OPS
        g, lane, head, first_row = warp.place(warpgroup)
        peaks, totals, sums = (_take(x) for x in arrays)
        halves = range(warp.halves)
        peaks = [ops.fsub(x, ops.f(mosaic_fp8_warp.LIFT)) for x in peaks]
        for distance in (1, 2):
            totals = [ops.fadd(x, ops.shuffle(x, distance)) for x in totals]
        part_of_head = ops.div(first_row, ops.i(warp.tokens))
        if warp.sharing > 1:
            within = ops.land(ops.shr(ops.thread(), ops.i(5)), ops.i(3))
            place = ops.div(within, ops.i(warp.sharing))
            values = [*peaks, *totals, *sums]
            at = ops.add(
                ops.mul(place, ops.i(128 * len(values))), ops.shl(ops.land(ops.thread(), ops.i(31)), ops.i(2))
            )
            at = ops.add(llvm.ptrtoint(_i32(), utils.memref_ptr(scratch)), at)
            for other in range(1, warp.sharing):
                with utils.when(_equal(part_of_head, other)):
                    for i, value in enumerate(values):
                        utils.inline_ptx(
                            f"st.shared.b32 [$0+{128 * i}], $1;", at, ops.bits(value), has_side_effects=True
                        )
                utils.warpgroup_barrier()
                theirs = [ops.number(ops.shared(at, 128 * i, 1)[0]) for i in range(len(values))]
                utils.warpgroup_barrier()
                common = [ops.fmax(peaks[r], theirs[r]) for r in halves]
                mine = [ops.exp2(ops.fsub(peaks[r], common[r])) for r in halves]
                factor = [ops.exp2(ops.fsub(theirs[r], common[r])) for r in halves]
                added = [
                    ops.fadd(ops.fmul(x, mine[r]), ops.fmul(y, factor[r]))
                    for i, (x, y) in enumerate(zip([*totals, *sums], theirs[warp.halves :], strict=True))
                    for r in (warp.line_of(i),)
                ]
                peaks, totals, sums = common, added[: warp.halves], added[warp.halves :]
        is_first = _equal(part_of_head, 0)
        is_whole = arith.cmpi(arith.CmpIPredicate.ne, whole, ops.i(0))
        for r in halves:
            line = ops.add(g, ops.i(8 * r))
            query = ops.div(line, ops.i(warp.queries_a_head))
            live = arith.andi(ops.less(line, ops.i(queries)), is_first)
            peak, total, factor = peaks[r], totals[r], ops.f(1.0)
            if sinks:
                at = ops.add(q_position, query)
                upper = ops.imin(ops.add(at, ops.i(1)), kv_end)
                lower = kv_first
                if warp.window is not None:
                    lower = ops.imax(ops.sub(at, ops.i(warp.window - 1)), lower)
                sees = ops.land(ops.less(lower, upper), arith.cmpi(arith.CmpIPredicate.ne, starts, ops.i(0)))
                column = ops.add(
                    ops.mul(ops.add(kv_head, head), ops.i(warp.queries_a_head)),
                    ops.rem(line, ops.i(warp.queries_a_head)),
                )
                column = ops.select(live, column, ops.i(0))
                address = arith.addi(llvm.ptrtoint(_i64(), utils.memref_ptr(sinks[0])), _wide_mul(column, 4))
                sink = ops.number(
                    utils.inline_ptx(
                        "ld.global.nc.b32 $0, [$1];", address, result_types=_i32(), has_side_effects=True
                    )
                )
                sink = ops.fmax(ops.fmul(sink, ops.f(math.log2(math.e))), ops.f(MASKED))
                common = ops.select(sees, ops.fmax(peak, sink), peak)
                factor = ops.exp2(ops.fsub(peak, common))
                own = ops.select(sees, ops.exp2(ops.fsub(sink, common)), ops.f(0.0))
                total, peak = ops.fadd(ops.fmul(total, factor), own), common
            seen = ops.above(total, ops.f(0.0))
            safe = ops.select(seen, total, ops.f(1.0))
            factor = ops.select(seen, ops.fmul(factor, ops.inverse(safe)), ops.f(0.0))
            log = ops.fadd(peak, ops.log2(safe))
            for is_target, target, log_target, row, value in (
                (is_whole, out, lse, b, ops.select(seen, ops.fmul(log, ops.f(math.log(2))), ops.f(math.inf))),
                (
                    arith.xori(is_whole, utils.c(1, ir.IntegerType.get_signless(1))),
                    part, part_lse, slot, ops.select(seen, log, ops.f(-math.inf)),
                ),
            ):  # fmt: skip
                with utils.when(arith.andi(live, is_target)):
                    index = _line_in_row(warp, row, ops.add(kv_head, head), line, queries)
                    element = ir.MemRefType(target.type).element_type
                    for column, values in warp.columns_of(lane, r, sums):
                        vec = llvm.mlir_undef(ir.VectorType.get((len(values),), _f32()))
                        for i, x in enumerate(values):
                            vec = llvm.insertelement(vec, ops.fmul(x, factor), ops.i(i))
                        if element != _f32():
                            vec = arith.truncf(ir.VectorType.get((len(values),), element), vec)
                        at = arith.addi(_wide_mul(index, warp.v_width), arith.extui(_i64(), column))
                        llvm.store(
                            vec, utils.getelementptr(utils.memref_ptr(target), [at], element), alignment=16
                        )
                    with utils.when(_equal(lane, 0)):
                        pointer = utils.getelementptr(
                            utils.memref_ptr(log_target), [arith.extsi(_i64(), index)], _f32()
                        )
                        llvm.store(value, pointer)

    go(carry, refs, scalars)


def _line_in_row(warp: Warp, row, kv_head, line, queries: int):
    """Index of a KV head's query line among those of all rows: [row, query, head]."""
    ops = mosaic_fp8_warp.OPS
    heads = warp.scale_heads * warp.queries_a_head
    query, of_head = ops.div(line, ops.i(warp.queries_a_head)), ops.rem(line, ops.i(warp.queries_a_head))
    index = ops.add(ops.mul(row, ops.i(warp.s_q)), query)
    index = ops.add(ops.mul(index, ops.i(heads)), ops.mul(kv_head, ops.i(warp.queries_a_head)))
    return ops.add(index, of_head)


def _lanes_type(count: int, dtype):
    return plgpu.ShapeDtypeStruct((gmem.WARPGROUP * count,), dtype, layout=gmem.lanes(gmem.WARPGROUP * count))


def _take(x: FragmentedArray) -> list[ir.Value]:
    return [
        vector.extract(r, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
        for r in x.registers.flat
    ]


def _give(values: list[ir.Value]) -> FragmentedArray:
    layout = gmem.lanes(gmem.WARPGROUP * len(values)).to_mgpu()
    kind = values[0].type
    registers = np.empty(layout.registers_shape((gmem.WARPGROUP * len(values),)), dtype=object)
    for i, value in enumerate(values):
        registers.flat[i] = vector.broadcast(ir.VectorType.get((1,), kind), value)
    return FragmentedArray(_registers=registers, _layout=layout, _is_signed=True if kind == _i32() else None)


def _equal(a: ir.Value, b: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, a, utils.c(b, _i32()))


def _wide_mul(a: ir.Value, b: int) -> ir.Value:
    return arith.muli(arith.extsi(_i64(), a), utils.c(b, _i64()))


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _f32() -> ir.Type:
    return ir.F32Type.get()
