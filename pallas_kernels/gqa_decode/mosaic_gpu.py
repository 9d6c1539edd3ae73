"""Paged GQA decode for Hopper in Pallas Mosaic GPU: persistent workers over a schedule that they find themselves.

A worker owns one KV head, or several narrow ones, one tile of 64 query rows (the heads that share the KV head, of s_q
queries, padded) and a share of the batch's KV tiles of 64 positions. It is one warpgroup that loads K and V of a tile by TMA,
or single rows by cp.async, into two rings, and one that computes: S = Q K^T, softmax, O += P V with P in registers. Up to 128
columns leave room for two workers in a thread block: the products of one run beside the softmax of the other. V wider than
256 is shared by two computing warpgroups. What lies whole in a share is final; a row cut between workers leaves f32 partials
for `mosaic_merge`.
Rows of e4m3 have a kernel of their own, `mosaic_fp8`. docs/gqa_decode.md has the numbers behind it.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels import device, paged_mosaic
from pallas_kernels.gqa_decode import mosaic_fp8
from pallas_kernels.gqa_decode.mosaic_bias import add_bias
from pallas_kernels.gqa_decode.mosaic_rows import Call, Rows
from pallas_kernels.mla_decode import mosaic_gather, mosaic_merge, mosaic_schedule
from pallas_kernels.mla_decode.mosaic_registers import (
    add_products,
    rescale,
    round_pairs,
    store_rows,
    sync_warpgroup,
    widen,
)
from pallas_kernels.mla_decode.mosaic_schedule import TILE
from pallas_kernels.read_source import ReadSource

if TYPE_CHECKING:
    from pallas_kernels.gqa_decode.api import KVScales

M = 64  # query rows of a worker: the M of one warpgroup's WGMMA
_SMEM_BYTES = 224 << 10  # what q and the rings may take
# On its way to a block. With more, all multiprocessors get what DRAM gives, but the fast ones end far before the slow ones.
_RING_BYTES = 128 << 10
_MAX_STAGES = 8
_ACC = plgpu.Layout.WGMMA
_ROWS = _ACC.reduce(1)
_SLACK = 8.0  # P stays below 2**8
_MASKED = -1e30  # below every score, and finite: a difference of two of them is 0, not NaN


@dataclass(frozen=True)
class TuningConfig:
    """Launch parameters.

    `blocks`: thread blocks; None for one a multiprocessor. The interpreter's tests run few.
    """

    blocks: int | None = None

    def __post_init__(self) -> None:
        if self.blocks is not None and self.blocks < 1:
            raise ValueError(f"blocks must be at least 1, got {self.blocks}")


@dataclass(frozen=True)
class _Plan:
    """Workers in a thread block, warpgroups that share the columns of V in each, tiles in the ring of each."""

    workers: int
    parts: int
    stages: int

    @staticmethod
    def make(head_dim: int, v_head_dim: int) -> "_Plan":
        parts = 2 if v_head_dim > 256 else 1

        def stages(workers: int) -> int:
            room = _SMEM_BYTES // workers - 2 * M * head_dim
            tile = 2 * TILE * (head_dim + v_head_dim)
            return min(room // tile, max(_RING_BYTES // workers // tile, 2), _MAX_STAGES)

        # ptxas refuses a WGMMA of more than 192 columns in a block of 512 threads.
        workers = 2 if parts == 1 and v_head_dim <= 192 and stages(2) >= 2 else 1
        return _Plan(workers, parts, stages(workers))


def gqa_decode_mosaic(
    q: Float[Array, "rows s_q heads head_dim"],
    buffer: UInt8[Array, " total_bytes"],
    source: ReadSource,
    k_offset: Int32[Array, ""],
    v_offset: Int32[Array, ""] | None,
    *,
    kv_dtype: DTypeLike,
    num_kv_heads: int,
    v_head_dim: int,
    sm_scale: float,
    scales: "KVScales | None" = None,
    window: int | None = None,
    sinks: Float[Array, " heads"] | None = None,
    logit_cap: float | None = None,
    relative_bias: Float[Array, "rows s_q heads extent"] | None = None,
    q_start: Int32[Array, " rows"] | None = None,
    config: TuningConfig | None = None,
) -> tuple[Float[Array, "rows s_q heads v_head_dim"], Float[Array, "rows s_q heads"]]:
    """See `pallas_kernels.gqa_decode.api.gqa_decode`. Raises NotImplementedError for what this kernel does not serve."""
    rows, s_q, heads, head_dim = q.shape
    row_width = num_kv_heads * (head_dim if v_offset is not None else head_dim + v_head_dim)
    v_column = 0 if v_offset is not None else num_kv_heads * head_dim
    _decline(q, source, kv_dtype, v_head_dim, sm_scale)
    blocks = (config or TuningConfig()).blocks or device.core_count()
    if scales is not None:
        mosaic_fp8.decline(source, heads, num_kv_heads, s_q, head_dim, v_head_dim, relative_bias is not None)
        return mosaic_fp8.gqa_decode_fp8(
            q, buffer, source, k_offset, v_offset, num_kv_heads=num_kv_heads, v_head_dim=v_head_dim, sm_scale=sm_scale,
            scales=scales, window=window, sinks=sinks, logit_cap=logit_cap, q_start=q_start, blocks=blocks,
        )  # fmt: skip
    sharing = heads // num_kv_heads
    queries = s_q * sharing
    q_tiles = -(-queries // M)
    # The queries of a KV head side by side. A load brings whole tiles of 8 lines: where 8 heads are the sharers of some KV
    # heads, a worker takes those 8, its own among them; else each KV head's queries are padded to such tiles.
    shared_lines = s_q == 1 and heads % 8 == 0 and 8 % sharing == 0
    padded = 8 if shared_lines else -(-queries // 8) * 8
    pack = _pack(num_kv_heads, padded, max(head_dim, v_head_dim), relative_bias is not None)
    plan = _Plan.make(pack * head_dim, pack * v_head_dim)
    # Workers that go through one share side by side, each with its heads and queries.
    lanes = num_kv_heads // pack * q_tiles
    groups = blocks * plan.workers // lanes
    if groups < 1:
        raise NotImplementedError(
            f"{num_kv_heads} KV heads, {pack} a worker, and {q_tiles} tiles of queries need more than "
            f"{blocks * plan.workers} workers"
        )
    # Two blocks of a cluster are neighbours on the chip and as fast as each other. Where both go through the same share, each
    # with its heads, they read the two halves of a line of the pool at about the same time. Nothing is gained where rows are
    # few and cut into many parts, and a cluster starts later.
    peers = 2 if 2 * rows > groups and blocks % 2 == 0 and lanes % (2 * plan.workers) == 0 else 1
    if rows == 0:
        return jnp.zeros((0, s_q, heads, v_head_dim), q.dtype), jnp.zeros((0, s_q, heads), jnp.float32)

    page_size = source.page_size
    call = Call(source, q_start, rows, s_q, window, groups)
    pool = lax.bitcast_convert_type(buffer.reshape(-1, 2), jnp.bfloat16)
    pool = pool.reshape(-1, row_width) if call.single else pool.reshape(-1, page_size, row_width)
    num_blocks = pool.size // (page_size * row_width)
    if shared_lines:
        grouped = q.reshape(rows * heads // 8, 8, head_dim)
    else:
        grouped = q.reshape(rows, s_q, num_kv_heads, sharing, head_dim).swapaxes(1, 2)
        grouped = grouped.reshape(rows * num_kv_heads, queries, head_dim)
        grouped = jnp.pad(grouped, ((0, 0), (0, padded - queries), (0, 0)))
    sets = grouped.shape[0] // rows  # of queries, a row
    box = min(M, padded)
    # A part of the columns is contiguous in shared memory within 8 lines.
    q_rows = box if pack == 1 else 8
    q_loads = box // q_rows
    sink_rows = []
    if sinks is not None:
        line = np.arange(q_tiles * M)
        kv_head_of = np.arange(num_kv_heads // pack)[:, None] * pack
        if pack > 1:
            kv_head_of, line = kv_head_of + np.minimum(line // padded, pack - 1), line % padded
        line = line - kv_head_of * sharing % (8 if sets < num_kv_heads else 1)
        sink_rows = [sinks.astype(jnp.float32)[kv_head_of * sharing + line % sharing].reshape(lanes, M)]
    bias, extent = [], 0
    if relative_bias is not None:
        extent = relative_bias.shape[-1]
        by_kv_head = relative_bias.astype(jnp.float32).reshape(rows, s_q, num_kv_heads, sharing, extent)
        bias = [by_kv_head.swapaxes(1, 2).reshape(rows * num_kv_heads * queries, extent)]
    offsets = [jnp.asarray(k_offset, jnp.int32).reshape(1)]
    if v_offset is not None:
        offsets.append(jnp.asarray(v_offset, jnp.int32).reshape(1))

    load_rows = TILE if call.single else min(page_size, TILE)  # of one TMA
    loads = TILE // load_rows
    stages = plan.stages
    k_width, v_width = pack * head_dim, pack * v_head_dim  # of a worker
    part_width = v_width // plan.parts
    k_chunk, chunk = _tile_columns(head_dim), _tile_columns(v_head_dim // plan.parts, v_column)
    log2e = math.log2(math.e)
    to_log2 = log2e if logit_cap is not None else sm_scale * log2e

    full = lambda shape, value, layout: plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
    across = lambda x, like: lax.broadcast_in_dim(x, like.shape, [0])

    def kernel(*refs):
        remaining = iter(refs)
        take = lambda n: [next(remaining) for _ in range(n)]
        q_ref, pool_ref = take(2)
        offset_refs, sink_refs, bias_refs = take(len(offsets)), take(len(sink_rows)), take(len(bias))
        range_refs, id_refs = take(len(call.ranges)), take(len(call.ids))
        out_ref, lse_ref, part_ref, part_lse_ref, lead_ref = take(5)
        q_smem, k_smem, v_smem, share_smem = take(4)
        share_ready, q_ready, q_free, k_ready, k_free, v_ready, v_free = take(7)
        warpgroup = lax.axis_index("warpgroup")
        worker, role = lax.div(warpgroup, 1 + plan.parts), lax.rem(warpgroup, 1 + plan.parts)
        block = lax.axis_index("cluster") * peers + lax.axis_index("peer")
        number = block * plan.workers + worker
        group, lane = lax.div(number, lanes), lax.rem(number, lanes)
        kv_head, q_tile = lax.div(lane, q_tiles) * pack, lax.rem(lane, q_tiles)

        work = Rows(call, range_refs, id_refs, lead_ref, group)

        def own_lines(j):
            """Where the queries of the worker's j-th KV head begin in its tile, and end."""
            first = j * padded + (lax.rem((kv_head + j) * sharing, 8) if sets < num_kv_heads else 0)
            return first, first + jnp.minimum(queries - q_tile * M, M)

        def query_of(row):
            """Which of the s_q queries a row of the tile belongs to."""
            return lax.div(row + q_tile * M if pack == 1 else lax.rem(row, padded), sharing)

        k_block, v_block = offset_refs[0][0], offset_refs[-1][0]

        def fits(entry):
            block = entry + jnp.maximum(k_block, v_block)
            return (block >= 0) & (block < num_blocks)

        def place(n):
            """Index of ring place n of this worker."""
            return worker * stages + lax.rem(n, stages)

        @pl.when(role == 0)
        def load():
            if box < M:  # the rows that no load ever writes
                q_smem[worker] = plgpu.layout_cast(jnp.zeros((M, k_width), jnp.bfloat16), _ACC)
                plgpu.commit_smem()
                sync_warpgroup()
            plgpu.griddepcontrol_launch_dependents()  # the merge may be launched as soon as blocks leave
            work.find_share(share_smem.at[worker])
            plgpu.barrier_arrive(share_ready.at[worker])
            if plan.workers * plan.parts > 1:
                plgpu.set_max_registers(40 if call.single else 24, action="decrease")
            share = mosaic_schedule.read_share(share_smem.at[worker])

            def segment(b, start, stop, first_tile, tiles, carry):
                kv_first, kv_stop = work.visible(b)
                first_column, last_column = lax.div(kv_first, page_size), lax.div(kv_stop - 1, page_size)

                def entries_of(tile):
                    column = lax.div((first_tile + tile) * TILE, page_size)
                    # Pages of the tile outside the row's range load a neighbour again: their ids may be anything.
                    return tuple(
                        work.page_entry(b, jnp.clip(column + j, first_column, last_column), fits)
                        for j in range(loads)
                    )

                def queries_of_row(segments):  # after the first tile, which need not wait for the row before
                    pl.when(segments > 0)(lambda: plgpu.barrier_wait(q_free.at[worker]))
                    for i in range(pack * q_loads):
                        j, line = i // q_loads, i % q_loads * q_rows
                        plgpu.copy_gmem_to_smem(
                            q_ref.at[
                                b * sets + lax.div((kv_head + j) * sets, num_kv_heads),
                                pl.ds(q_tile * M + line, q_rows),
                            ],
                            q_smem.at[worker, pl.ds(i * q_rows, q_rows), pl.ds(j * head_dim, head_dim)],
                            q_ready.at[worker],
                        )

                def free_places(n):
                    """(place of K or V in the ring, its barrier, its block in a page, its first column), once it is free."""
                    at = place(n)
                    for smem, ready, free, block, column in (
                        (k_smem, k_ready, k_free, k_block, kv_head * head_dim),
                        (v_smem, v_ready, v_free, v_block, v_column + kv_head * v_head_dim),
                    ):
                        pl.when(n >= stages)(lambda free=free: plgpu.barrier_wait(free.at[at]))
                        yield smem.at[at], ready.at[at], block, column

                def by_pages(i, carry):
                    n, segments, entries = carry
                    row = lax.rem((first_tile + i) * TILE, page_size) if page_size > TILE else 0
                    for tile, ready, block, column in free_places(n):
                        for j, entry in enumerate(entries):
                            plgpu.copy_gmem_to_smem(
                                pool_ref.at[
                                    entry + block, pl.ds(row, load_rows), pl.ds(column, tile.shape[1])
                                ],
                                tile.at[pl.ds(j * load_rows, load_rows)],
                                ready,
                            )
                    pl.when(i == start)(lambda: queries_of_row(segments))
                    return n + 1, segments, entries_of(jnp.minimum(i + 1, stop - 1))

                tokens = work.tokens(b, kv_first, kv_stop, k_block, num_blocks) if call.single else None

                def positions(tile):
                    return tokens.positions((first_tile + tile) * TILE)

                def by_rows(i, carry):
                    n, segments, ids = carry
                    # The next tile's are on their way while this tile is asked for.
                    later = tokens.load_ids(positions(jnp.minimum(i + 1, stop - 1)))
                    for (tile, ready, block, column), transforms in zip(
                        free_places(n), (k_tiled, v_tiled), strict=True
                    ):
                        lines = replace(tokens, block_offset=block).rows(ids, positions(i))
                        mosaic_gather.copy_rows(pool_ref, lines, tile, column, transforms)
                        mosaic_gather.report(ready)
                    pl.when(i == start)(lambda: queries_of_row(segments))
                    return n + 1, segments, later

                n, segments = carry
                one, ids = (
                    (by_rows, tokens.load_ids(positions(start)))
                    if call.single
                    else (by_pages, entries_of(start))
                )
                n, segments, _ = lax.fori_loop(start, stop, one, (n, segments, ids))
                return n, segments + 1

            work.for_segments(share, segment, (jnp.int32(0), jnp.int32(0)), empty_rows=False)

        def mask(s, position, kv_first, kv_stop, q_position):
            token = plgpu.broadcasted_iota(jnp.int32, (M, TILE), 1, layout=_ACC) + position
            keep = (token >= kv_first) & (token < kv_stop)
            if s_q > 1:
                at = q_position + query_of(plgpu.broadcasted_iota(jnp.int32, (M, TILE), 0, layout=_ACC))
                keep &= token <= at
                if window is not None:
                    keep &= token > at - window
            return jnp.where(keep, s, -jnp.inf)

        def clear(at, column, first, stop):
            """Zeroes V of the positions outside [first, stop): P is 0 there, but 0 * NaN is NaN."""

            # A loop that the compiler can't unroll: this runs rarely, and instructions that run once come slowly.
            @pl.loop(0, part_width // chunk + jnp.minimum(stop, 0))  # stop >= 1
            def columns_(c):
                values = v_smem.at[at, :, pl.ds(column + c * chunk, chunk)]
                token = plgpu.broadcasted_iota(jnp.int32, (TILE, chunk), 0, layout=_ACC)
                value = plgpu.load(values, layout=_ACC)
                values[...] = jnp.where((token >= first) & (token < stop), value, jnp.bfloat16(0))

            plgpu.commit_smem()
            sync_warpgroup()

        @pl.when(role > 0)
        def compute():
            if plan.workers * plan.parts > 1:
                plgpu.set_max_registers(216 if call.single else 232, action="increase")
            column = (role - 1) * part_width
            first_part = role == 1
            tells_leads = first_part & (lane == 0) & (group < groups)
            plgpu.barrier_wait(share_ready.at[worker])
            share = mosaic_schedule.read_share(share_smem.at[worker])
            work.begin_leads(share, tells_leads)

            def first_sums(b, start, kv_first, kv_stop, q_position):
                """Peak and sum before the first tile: the sink's, in the part that holds the start of a row."""
                if sinks is None:
                    return full((M,), _MASKED, _ROWS), full((M,), 0, _ROWS)
                sink = plgpu.load(sink_refs[0].at[lane], layout=_ROWS, optimized=False)
                query = (
                    plgpu.layout_cast(query_of(lax.iota(jnp.int32, M)), _ROWS)
                    if s_q > 1
                    else plgpu.layout_cast(jnp.full((M,), 0, jnp.int32), _ROWS)
                )
                at = q_position + query
                lower, upper = kv_first, jnp.minimum(at + 1, kv_stop)
                if window is not None:
                    lower = jnp.maximum(at - (window - 1), kv_first)
                sees = (start == 0) & (upper > lower)
                peak = jnp.where(sees, jnp.maximum(sink * (log2e / to_log2), _MASKED), _MASKED)
                return peak, jnp.where(sees, 1.0, 0.0)

            def segment(b, start, stop, first_tile, tiles, n):
                kv_first, kv_stop = work.visible(b)
                q_position = work.q_position(b)
                work.tell_lead(share, tells_leads, b, start, stop, tiles)
                pl.when(stop > start)(lambda: plgpu.barrier_wait(q_ready.at[worker]))

                def one(i, carry):
                    peak, total, weight, acc, n = carry
                    at = place(n)
                    position = (first_tile + i) * TILE
                    plgpu.barrier_wait(k_ready.at[at])
                    if call.single:
                        mosaic_gather.order_reads()

                    def product(s_ref):
                        plgpu.wgmma(s_ref, q_smem.at[worker], k_smem.at[at].transpose((1, 0)))
                        return s_ref[...]

                    s = pl.run_scoped(product, plgpu.ACC((M, TILE), jnp.float32))
                    plgpu.barrier_arrive(k_free.at[at])
                    pl.when(i == stop - 1)(lambda: plgpu.barrier_arrive(q_free.at[worker]))
                    if logit_cap is not None:
                        # tanh by exp2: the hardware's own tanh has 11 bits.
                        scale = 2 * sm_scale * log2e / logit_cap
                        s = logit_cap - (2 * logit_cap) / (1 + jnp.exp2(s * scale))
                    if bias:

                        def with_bias(s):
                            return add_bias(
                                s,
                                bias_refs[0],
                                (b * num_kv_heads + kv_head) * queries + q_tile * M - own_lines(0)[0],
                                own_lines(0),
                                q_position - position,
                                q_tile * M,
                                sharing=sharing if s_q > 1 else None,
                                unit=log2e / to_log2,
                            )

                        near = position + TILE > q_position - extent + 1
                        s = lax.cond(near, with_bias, lambda s: s, s)
                    tail = (position < kv_first) | (position + TILE > kv_stop)
                    edge = tail
                    if s_q > 1:
                        edge |= position + TILE > q_position + 1
                        if window is not None:
                            edge |= position < q_position + s_q - window
                    s = lax.cond(
                        edge, lambda s: mask(s, position, kv_first, kv_stop, q_position), lambda s: s, s
                    )
                    # The subtrahend follows the maximum only when it falls behind by 2**_SLACK: most tiles rescale nothing.
                    tile_peak = s.max(axis=1)
                    new_peak = jnp.where(tile_peak > peak + _SLACK / to_log2, tile_peak, peak)
                    decay = jnp.exp2((peak - new_peak) * to_log2)
                    p = jnp.exp2(s * to_log2 - across(new_peak * to_log2, s))
                    total = total * decay + p.sum(axis=1)
                    # V is multiplied by rounded weights, so their own sum divides: a weight that outweighs the others
                    # then loses its rounding, up to 2**-8, where the subtrahend is another token's score.
                    p = round_pairs(p)
                    weight = weight * decay + widen(p).sum(axis=1)
                    plgpu.barrier_wait(v_ready.at[at])
                    if call.single:
                        mosaic_gather.order_reads()
                    pl.when(tail)(lambda: clear(at, column, kv_first - position, kv_stop - position))
                    (acc,) = rescale([acc], decay)
                    values = v_smem.at[at, :, pl.ds(column, part_width)]
                    (acc,) = add_products([acc], p, [values])
                    plgpu.barrier_arrive(v_free.at[at])
                    return new_peak, total, weight, acc, n + 1

                peak, total = first_sums(b, start, kv_first, kv_stop, q_position)
                peak, total, weight, acc, n = lax.fori_loop(
                    start, stop, one, (peak, total, total, full((M, part_width), 0, _ACC), n)
                )
                seen = total > 0
                safe = jnp.where(seen, total, 1)
                acc = acc * across(jnp.where(seen, 1 / jnp.where(seen, weight, 1), 0), acc)
                log = peak * to_log2 + jnp.log2(safe)
                whole = (start == 0) & (stop == tiles)

                def store(out, values, lse, logs, row):
                    """Results of each of the worker's KV heads, to the lines of `row`."""
                    for j in range(pack):
                        first, end = own_lines(j)
                        line = (row * num_kv_heads + kv_head + j) * queries + q_tile * M - first
                        mine = values[:, j * v_head_dim : (j + 1) * v_head_dim] if pack > 1 else values
                        store_rows(out, mine, line, end, column, first)
                        pl.when(first_part)(lambda: store_rows(lse, logs, line, end, 0, first))

                @pl.when(whole)
                def final():
                    natural = jnp.where(seen, log * math.log(2), jnp.inf)
                    store(out_ref, acc.astype(jnp.bfloat16), lse_ref, natural, b)

                @pl.when(jnp.logical_not(whole))
                def partial_():
                    slot = jnp.where(start == 0, groups + group, group)
                    store(part_ref, acc, part_lse_ref, jnp.where(seen, log, -jnp.inf), slot)

                return n

            work.for_segments(share, segment, jnp.int32(0), empty_rows=True)

    barrier = plgpu.Barrier
    k_tiled, v_tiled = (
        (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns))
        for columns in (k_chunk, chunk)
    )
    lines = num_kv_heads * queries
    places = plan.workers * stages
    out, lse, part, part_lse, leads = plgpu.kernel(
        kernel,
        out_type=call.results(lines, v_head_dim),
        grid=(blocks // peers,),
        grid_names=("cluster",),
        cluster=(peers,),
        cluster_names=("peer",),
        num_threads=plan.workers * (1 + plan.parts),
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((plan.workers, M, k_width), jnp.bfloat16, transforms=k_tiled),
            plgpu.SMEM((places, TILE, k_width), jnp.bfloat16, transforms=k_tiled),
            plgpu.SMEM((places, TILE, v_width), jnp.bfloat16, transforms=v_tiled),
            plgpu.SMEM((plan.workers, 8), jnp.int32),
            barrier(num_barriers=plan.workers),
            barrier(num_arrivals=pack * q_loads, num_barriers=plan.workers),
            barrier(num_arrivals=plan.parts, num_barriers=plan.workers),
            barrier(num_arrivals=loads, num_barriers=places),
            barrier(num_arrivals=plan.parts, num_barriers=places),
            barrier(num_arrivals=loads, num_barriers=places),
            barrier(num_arrivals=plan.parts, num_barriers=places),
        ],
        # No reduction here crosses warps; the default scratch for those would not fit. What threads write to shared memory
        # others read behind a barrier of ours: Pallas need not add its own around every load and store.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
    )(grouped, pool, *offsets, *sink_rows, *bias, *call.ranges, *call.ids)
    out, lse = mosaic_merge.merge(out, lse, part, part_lse, leads, queries=lines, groups=groups)
    # Both are no copies for s_q of 1.
    out = out.reshape(rows, num_kv_heads, s_q, sharing, v_head_dim).swapaxes(1, 2)
    lse = lse.reshape(rows, num_kv_heads, s_q, sharing).swapaxes(1, 2)
    return out.reshape(rows, s_q, heads, v_head_dim), lse.reshape(rows, s_q, heads)


def _pack(kv_heads: int, lines: int, width: int, bias: bool) -> int:
    """KV heads of a worker: several narrow ones, so that a tile is as large as that of a head of 256, if their lines fit.

    Their queries lie on the diagonal of one matrix: the zeros beside them keep the heads apart in S. Of O, each line uses
    the columns of its own head.
    """
    pack = 1
    while not bias and 256 % (2 * pack * width) == 0 and kv_heads % (2 * pack) == 0 and 2 * pack * lines <= M:
        pack *= 2
    return pack


def _tile_columns(width: int, column: int = 0) -> int:
    """Columns of a swizzled tile, at most 64: heads are whole tiles, and the first starts at `column` of a row."""
    return math.gcd(width, column, 64)


def _decline(q, source, kv_dtype, v_head_dim, sm_scale) -> None:  # type: ignore[no-untyped-def]
    paged_mosaic.decline_queries(q.shape[1], sm_scale)
    head_dim = q.shape[3]
    if (
        mosaic_gather.needed(source)
        and jnp.dtype(kv_dtype) == jnp.bfloat16
        and (head_dim % 64 or v_head_dim % 64)
    ):
        raise NotImplementedError(
            f"single rows want heads that are multiples of 64 wide, got {head_dim} and {v_head_dim}"
        )
    if q.dtype != jnp.bfloat16 or jnp.dtype(kv_dtype) not in (jnp.bfloat16, jnp.float8_e4m3fn):
        raise NotImplementedError(
            f"q must be bfloat16, and KV too or float8_e4m3fn, got {q.dtype} and {jnp.dtype(kv_dtype)}"
        )
    if head_dim % 32 or v_head_dim % 32 or max(head_dim, v_head_dim) > 512:
        raise NotImplementedError(
            f"heads must be multiples of 32 up to 512 wide, got {head_dim} and {v_head_dim}"
        )
