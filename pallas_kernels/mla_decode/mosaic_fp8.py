"""Paged MLA decode over e4m3 rows for Hopper in Pallas Mosaic GPU: products transposed, operands converted in registers.

The schedule is that of the bf16 kernel: persistent blocks, each with one tile of query columns and a share of the batch's
KV tiles of 64 positions, which it finds itself; rows cut between blocks leave f32 partials for `mosaic_merge`. What differs
follows from the bytes. A tile comes in 1.2 us, so neither padding few heads to 64 rows nor writing f16 back to shared
memory is affordable. Hence S^T = K Q^T and O^T = V^T P^T: heads are columns, as few as there are, and K and V are the left
operands, which WGMMA takes from registers (`mosaic_fp8_registers`). One warpgroup loads, one computes scores and softmax,
two own half of V's columns each. docs/mla_decode.md derives the numbers.

Products are of f16, which holds e4m3 exactly. q is brought into f16's range by a power of two for each query and head. A
token's scale multiplies its scores; for P V it is part of the exponent: P = exp2(s + log2(scale) - peak) with the peak of
that sum, and the sum of weights takes it out again. So P fits f16 for scales of any size.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels.mla_decode import mosaic_merge, mosaic_schedule
from pallas_kernels.mla_decode.mosaic_fp8_registers import (
    add_values,
    first_values,
    load_queries,
    scores_of,
    store_columns,
    store_vector,
    token_of,
    token_scales,
    zero_rows,
)
from pallas_kernels.mla_decode.mosaic_registers import sync_warpgroup
from pallas_kernels.mla_decode.mosaic_schedule import TILE
from pallas_kernels.read_source import ReadSource, TokenStream, VirtualPages

MAX_S_Q = 8
ROPE = 64
_P_SLOTS = 2
_SMEM_BYTES = 224 << 10  # what tiles, q and P may take
_SMS = 132
_LOAD, _SCORES, _LEFT = 0, 1, 2  # roles of the warpgroups; the last one has V's right half
_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # f16
_BYTES = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))
_P_TILED = (
    plgpu.TilingTransform((8, 16)),
    plgpu.SwizzleTransform(32),
)  # so that 16 tokens are a WGMMA's operand
_ACC = plgpu.Layout.WGMMA
_TOKENS, _COLUMNS = _ACC.reduce(1), _ACC.reduce(0)
_SLACK = 8.0  # P stays below 2**8
_MASKED = -1e30  # below every score, and finite: a difference of two of them is 0, not NaN


@dataclass(frozen=True)
class TuningConfig:
    """Launch parameters. `blocks`: thread blocks, one a multiprocessor. `max_tiles`: of the ring of KV tiles."""

    blocks: int = _SMS
    max_tiles: int = 5
    k_bit_chunks: int = 0
    v_by_bits: bool = False

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"blocks must be at least 1, got {self.blocks}")
        if self.max_tiles < 2:
            raise ValueError(f"max_tiles must be at least 2, got {self.max_tiles}")


def mla_decode_mosaic_fp8(
    q: Float[Array, "rows s_q heads qk_width"],
    buffer: UInt8[Array, " total_bytes"],
    source: ReadSource,
    block_offset: Int32[Array, ""] | int,
    *,
    kv_dtype: DTypeLike,
    row_width: int,
    v_width: int,
    sm_scale: float,
    logit_cap: float | None = None,
    q_start: Int32[Array, " rows"] | None = None,
    config: TuningConfig | None = None,
) -> tuple[Float[Array, "rows s_q heads v_width"], Float[Array, "rows s_q heads"]]:
    """See `pallas_kernels.mla_decode.api.mla_decode`. Raises NotImplementedError for what this kernel does not serve."""
    rows, s_q, heads, qk_width = q.shape
    _decline(q, source, kv_dtype, row_width, v_width, sm_scale)
    config = config or TuningConfig()
    queries = s_q * heads
    columns = 16 if queries <= 16 else 32 if queries <= 32 else 64
    tiles = -(-queries // columns)
    if tiles > config.blocks:
        raise NotImplementedError(
            f"s_q * heads = {queries} needs {tiles} blocks a row, more than {config.blocks}"
        )
    if rows == 0:
        return jnp.zeros((0, s_q, heads, v_width), q.dtype), jnp.zeros((0, s_q, heads), jnp.float32)
    pool = buffer.reshape(-1, source.page_size, row_width)
    offset = jnp.asarray(block_offset, jnp.int32).reshape(1)
    call = partial(
        _decode,
        rows=rows,
        s_q=s_q,
        heads=heads,
        columns=columns,
        v_width=v_width,
        sm_scale=sm_scale,
        logit_cap=logit_cap,
        config=config,
    )
    out, lse = call(q.reshape(rows * queries, qk_width), pool, source, offset, q_start)
    return out.reshape(rows, s_q, heads, v_width), lse.reshape(rows, s_q, heads)


def _decline(q, source, kv_dtype, row_width, v_width, sm_scale) -> None:  # type: ignore[no-untyped-def]
    s_q, qk_width = q.shape[1], q.shape[-1]
    if s_q > MAX_S_Q:
        raise NotImplementedError(
            f"made for decode and for drafts of at most {MAX_S_Q} queries a row, got {s_q}"
        )
    if isinstance(source, TokenStream):
        raise NotImplementedError("the Mosaic kernel reads whole pages by TMA: it takes no token stream")
    if q.dtype != jnp.bfloat16 or jnp.dtype(kv_dtype) != jnp.float8_e4m3fn:
        raise NotImplementedError(
            f"q must be bfloat16 and KV float8_e4m3fn, got {q.dtype} and {jnp.dtype(kv_dtype)}"
        )
    if source.page_size not in (8, 16, 32, 64, 128):
        raise NotImplementedError(f"page_size must be 8, 16, 32, 64 or 128, got {source.page_size}")
    if v_width not in (256, 512):
        raise NotImplementedError(f"v_width must be 256 or 512, got {v_width}")
    if qk_width != v_width + ROPE or row_width != v_width + 2 * ROPE:
        raise NotImplementedError(
            f"qk_width must be v_width + 64 and row_width v_width + 128, got {qk_width}, {row_width} and v_width {v_width}"
        )
    if not sm_scale > 0:
        raise NotImplementedError(f"sm_scale must be positive, got {sm_scale}")


def _decode(
    q, pool, source, block_offset, q_start, *, rows, s_q, heads, columns, v_width, sm_scale, logit_cap, config
):
    """q [rows * queries, width], pool uint8 [blocks, page_size, row bytes] -> out, lse of [rows * queries]."""
    num_blocks, page_size, row_bytes = pool.shape
    width = q.shape[1]
    queries = s_q * heads
    q_tiles = -(-queries // columns)
    groups = config.blocks // q_tiles  # the blocks of a group hold the query tiles of one share
    half = v_width // 2
    v_blocks = half // 64  # blocks of 64 rows of O^T in a warpgroup
    # Registers a thread. With 64 columns the accumulators take 128, and one step's V is all that fits beside them.
    few = columns < 64
    scores_registers, values_registers, in_flight = (168, 160, v_blocks) if few else (152, 168, 0)
    room = _SMEM_BYTES - 2 * columns * width - _P_SLOTS * 2 * TILE * columns
    slots = min(config.max_tiles, room // (TILE * row_bytes))
    leads_by_row = rows < groups  # the shorter table of the rows that are cut
    load_rows = min(page_size, TILE)  # of one TMA
    loads = TILE // load_rows
    log2e = math.log2(math.e)
    translate = isinstance(source, VirtualPages)
    table_columns = source.req_to_page.shape[1] if translate else source.table.shape[1]
    width_tokens = min(table_columns * page_size, 2**31 - TILE)
    ranges = [source.kv_start, source.kv_end] + ([] if q_start is None else [q_start])
    ids = [source.req_to_page, source.row_ids, source.v2p] if translate else [source.table]

    full = lambda shape, value, layout: plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
    down = lambda x, like: lax.broadcast_in_dim(x, like.shape, [1])  # one value a column
    across = lambda x, like: lax.broadcast_in_dim(x, like.shape, [0])  # one value a token

    def kernel(*refs):
        remaining = iter(refs)
        take = lambda n: [next(remaining) for _ in range(n)]
        q_ref, pool_ref, offset_ref = take(3)
        range_refs, id_refs = take(len(ranges)), take(len(ids))
        out_ref, lse_ref, part_ref, part_lse_ref, lead_ref = take(5)
        kv_smem, q_smem, p_smem, factor_smem, share_smem = take(5)
        inverse_smem, unit_smem = (factor_smem.at[_P_SLOTS + i] for i in range(2))
        share_ready, kv_ready, kv_free = take(3)
        p_ready, p_free, end_ready, end_free = take(4)
        group, q_tile, role = lax.axis_index("group"), lax.axis_index("q_tile"), lax.axis_index("role")
        live = jnp.minimum(queries - q_tile * columns, columns)

        def visible(b):
            """(first, end) of the KV positions that some query of row b sees."""
            stop = jnp.minimum(range_refs[1][b], width_tokens)
            if q_start is not None:
                stop = jnp.minimum(stop, range_refs[2][b] + s_q)
            return jnp.maximum(range_refs[0][b], 0), stop

        def for_segments(share, run, carry):
            """Calls run(b, tile_start, tile_stop, first_tile, tiles, carry) for each part of a row in this share."""

            def visit(b, carry):
                first_tile, tiles = mosaic_schedule.tile_range(*visible(b))
                start, stop = mosaic_schedule.segment_tiles(share, b, tiles)
                return lax.cond(
                    stop > start, lambda n: run(b, start, stop, first_tile, tiles, n), lambda n: n, carry
                )

            return lax.fori_loop(share.first, jnp.minimum(share.last + 1, rows), visit, carry)

        def get_share():
            plgpu.barrier_wait(share_ready)
            return mosaic_schedule.read_share(share_smem)

        def for_empty_rows(share, write):
            """Calls write(b) for each row that sees nothing and starts in this share."""

            @pl.loop(share.first, jnp.minimum(share.last + 1, rows))
            def visit(b):
                _, tiles = mosaic_schedule.tile_range(*visible(b))
                pl.when((tiles == 0) & mosaic_schedule.owns_start(share, b))(lambda: write(b))

        def destination(start, stop, tiles):
            """(whether the row is whole here, slot of its partial otherwise)."""
            return (start == 0) & (stop == tiles), jnp.where(start == 0, groups + group, group)

        def block_of(b, column):
            """Block of the pool that holds page `column` of row b; the padding page's for an id that names nothing."""
            if translate:
                request = jnp.clip(id_refs[1][b], 0, id_refs[0].shape[0] - 1)
                page = id_refs[0][request, column]
                num_virtual = id_refs[2].shape[0] - 1
                page = jnp.where((page >= 0) & (page < num_virtual), page, 0)
                entry = jnp.maximum(id_refs[2][page], 0) * source.blocks_per_page
            else:
                entry = id_refs[0][b, column]
            block = entry + offset_ref[0]
            good = (entry >= 0) & (block >= 0) & (block < num_blocks)
            return jnp.where(good, block, offset_ref[0])

        def mask(x, position, kv_first, kv_stop, q_position):
            token = token_of(plgpu.broadcasted_iota(jnp.int32, (TILE, columns), 0, layout=_ACC)) + position
            keep = (token >= kv_first) & (token < kv_stop)
            if s_q > 1:
                query = plgpu.broadcasted_iota(jnp.int32, (TILE, columns), 1, layout=_ACC) + q_tile * columns
                keep &= token <= q_position + lax.div(query, heads)
            return jnp.where(keep, x, -jnp.inf)

        def write_lead(index, row, last):
            """Tells the merge that the parts of `row`, or of none if -1, lie in this group and those to `last`."""

            @pl.when((q_tile == 0) & (role == _LEFT))
            def write():
                lead_ref[index, 0], lead_ref[index, 1], lead_ref[index, 2] = row, group, last

        def write_lead_of_group(share):
            b = jnp.minimum(share.last, rows - 1)
            _, tiles = mosaic_schedule.tile_range(*visible(b))
            start, stop = mosaic_schedule.segment_tiles(share, b, tiles)
            leads = (share.last < rows) & (stop > 0) & (stop < tiles) & (start == 0)
            write_lead(
                group,
                jnp.where(leads, b, -1),
                lax.div(mosaic_schedule.row_end(share, group, tiles) - 1, share.size),
            )

        @pl.when(role == _LOAD)
        def load():
            plgpu.griddepcontrol_launch_dependents()  # the merge may be launched as soon as blocks leave
            mosaic_schedule.find_share(
                range_refs, rows, group, groups, share_smem, width_tokens=width_tokens, s_q=s_q
            )
            plgpu.commit_smem()
            plgpu.barrier_arrive(share_ready)
            plgpu.set_max_registers(24, action="decrease")
            share = mosaic_schedule.read_share(share_smem)

            def segment(b, start, stop, first_tile, tiles, n):
                kv_first, kv_stop = visible(b)
                first_column, last_column = lax.div(kv_first, page_size), lax.div(kv_stop - 1, page_size)

                def blocks_of(tile):
                    column = lax.div((first_tile + tile) * TILE, page_size)
                    # Pages of the tile outside the row's range load a neighbour again: their ids may be anything.
                    return tuple(
                        block_of(b, jnp.clip(column + j, first_column, last_column)) for j in range(loads)
                    )

                def one(i, carry):
                    n, blocks = carry
                    row = lax.rem((first_tile + i) * TILE, page_size) if page_size > TILE else 0
                    slot = lax.rem(n, slots)
                    pl.when(n >= slots)(lambda: plgpu.barrier_wait(kv_free.at[slot]))
                    for j, block in enumerate(blocks):
                        plgpu.copy_gmem_to_smem(
                            pool_ref.at[block, pl.ds(row, load_rows)],
                            kv_smem.at[slot, pl.ds(j * load_rows, load_rows)],
                            kv_ready.at[slot],
                        )
                    return n + 1, blocks_of(jnp.minimum(i + 1, stop - 1))

                n, _ = lax.fori_loop(start, stop, one, (n, blocks_of(start)))
                return n

            for_segments(share, segment, jnp.int32(0))

        @pl.when(role == _SCORES)
        def scores():
            plgpu.set_max_registers(scores_registers, action="increase")
            share = get_share()

            def segment(b, start, stop, first_tile, tiles, n):
                kv_first, kv_stop = visible(b)
                q_position = (range_refs[1][b] - s_q) if q_start is None else range_refs[2][b]
                load_queries(
                    q_ref,
                    b * queries + q_tile * columns,
                    live,
                    q_smem,
                    unit_smem,
                    config.k_bit_chunks,
                    _SWIZZLED,
                )
                plgpu.commit_smem()

                def one(i, carry):
                    peak, weights, n = carry
                    slot, p_slot = lax.rem(n, slots), lax.rem(n, _P_SLOTS)
                    position = (first_tile + i) * TILE
                    tile = kv_smem.at[slot]
                    plgpu.barrier_wait(kv_ready.at[slot])

                    scale = token_scales(tile, width, _BYTES)
                    scale = jnp.where(
                        scale > 0, scale, 1.0
                    )  # the padding page's rows; NaN where nothing was written
                    factor, exponent, inverse = scale * (sm_scale * log2e), jnp.log2(scale), 1 / scale
                    s = scores_of(tile, q_smem, config.k_bit_chunks, _BYTES)
                    unit = plgpu.load(unit_smem, layout=_COLUMNS)
                    s = s * across(factor, s) * down(unit, s)
                    if logit_cap is not None:
                        # tanh by exp2: the hardware's own tanh has 11 bits.
                        cap = logit_cap * log2e
                        s = cap - (2 * cap) / (1 + jnp.exp2(s * (2 * log2e / cap)))
                    s = s + across(exponent, s)
                    tail = (position < kv_first) | (position + TILE > kv_stop)

                    @pl.when(tail)
                    def clear():
                        sync_warpgroup()  # every warp has read K and its scales
                        # P is 0 in those rows, but 0 * NaN is NaN.
                        zero_rows(tile, kv_first - position, kv_stop - position, _BYTES)

                    edge = tail | ((position + TILE > q_position + 1) if s_q > 1 else False)
                    s = lax.cond(
                        edge, lambda s: mask(s, position, kv_first, kv_stop, q_position), lambda s: s, s
                    )
                    # The subtrahend follows the maximum only when it falls behind by 2**_SLACK: most tiles rescale nothing.
                    tile_peak = s.max(axis=0)
                    new_peak = jnp.where(tile_peak > peak + _SLACK, tile_peak, peak)
                    decay = jnp.exp2(peak - new_peak)
                    p = jnp.exp2(s - down(new_peak, s))
                    pl.when(n >= _P_SLOTS)(lambda: plgpu.barrier_wait(p_free.at[p_slot]))
                    p_smem[p_slot] = p.astype(jnp.float16)
                    factor_smem[p_slot] = decay
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(p_ready.at[p_slot])
                    plgpu.barrier_arrive(kv_free.at[slot])
                    weights = weights * down(decay, s) + p * across(inverse, s)
                    return new_peak, weights, n + 1

                peak, weights, n = lax.fori_loop(
                    start, stop, one, (full((columns,), _MASKED, _COLUMNS), full((TILE, columns), 0, _ACC), n)
                )
                total = weights.sum(axis=0)
                seen = total > 0
                safe = jnp.where(seen, total, 1)
                plgpu.barrier_wait(end_free)
                inverse_smem[...] = jnp.where(seen, (256.0 if config.v_by_bits else 1.0) / safe, 0)
                plgpu.commit_smem()
                plgpu.barrier_arrive(end_ready)
                whole, slot = destination(start, stop, tiles)
                lse = peak + jnp.log2(safe)

                @pl.when(whole)
                def final():
                    natural = jnp.where(seen, lse * math.log(2), jnp.inf)
                    store_vector(lse_ref, natural, b * queries + q_tile * columns, live)

                @pl.when(jnp.logical_not(whole))
                def partial_():
                    store_vector(
                        part_lse_ref, jnp.where(seen, lse, -jnp.inf), slot * queries + q_tile * columns, live
                    )

                return n

            for_segments(share, segment, jnp.int32(0))

        @pl.when(role >= _LEFT)
        def values():
            column = (role - _LEFT) * half
            plgpu.set_max_registers(values_registers, action="increase")
            share = get_share()

            # These warpgroups have time at the start, the scores have none.
            if not leads_by_row:
                write_lead_of_group(share)

            def empty(b):
                if leads_by_row:
                    write_lead(b, jnp.int32(-1), group)

                @pl.loop(0, live)
                def line(i):
                    zeros = plgpu.layout_cast(
                        jnp.zeros((half,), jnp.bfloat16), plgpu.Layout.WG_STRIDED((half,), half // 128)
                    )
                    line_of_out = b * queries + q_tile * columns + i
                    out_ref[line_of_out, pl.ds(column, half)] = zeros

                    @pl.when(role == _LEFT)
                    def nothing_seen():
                        lse_ref[line_of_out] = jnp.float32(jnp.inf)

            for_empty_rows(share, empty)
            plgpu.barrier_arrive(end_free)  # the place of 1 / total is free

            def segment(b, start, stop, first_tile, tiles, n):
                kv_first, kv_stop = visible(b)
                if leads_by_row:
                    last = lax.div(mosaic_schedule.row_end(share, group, tiles) - 1, share.size)
                    pl.when(start == 0)(lambda: write_lead(b, jnp.where(stop < tiles, b, -1), last))

                def one(i, carry):
                    *accs, n = carry
                    slot, p_slot = lax.rem(n, slots), lax.rem(n, _P_SLOTS)
                    tile = kv_smem.at[slot]
                    position = (first_tile + i) * TILE
                    make_first = lambda _=None: first_values(tile, column, v_blocks, config.v_by_bits, _BYTES)
                    plgpu.barrier_wait(kv_ready.at[slot])
                    first = make_first()
                    plgpu.barrier_wait(p_ready.at[p_slot])
                    decay = plgpu.load(factor_smem.at[p_slot], layout=_COLUMNS)
                    accs = [acc * down(decay, acc) for acc in accs]
                    tail = (position < kv_first) | (position + TILE > kv_stop)
                    first = lax.cond(tail, make_first, lambda x: x, first)  # rows have been zeroed since
                    accs = add_values(
                        accs,
                        tile,
                        p_smem.at[p_slot],
                        first,
                        column,
                        in_flight,
                        config.v_by_bits,
                        _BYTES,
                    )
                    plgpu.barrier_arrive(kv_free.at[slot])
                    plgpu.barrier_arrive(p_free.at[p_slot])
                    return *accs, n + 1

                *accs, n = lax.fori_loop(start, stop, one, (*[full((64, columns), 0, _ACC)] * v_blocks, n))
                plgpu.barrier_wait(end_ready)
                inverse = plgpu.load(inverse_smem, layout=_COLUMNS)
                accs = [acc * down(inverse, acc) for acc in accs]
                plgpu.barrier_arrive(end_free)
                whole, slot = destination(start, stop, tiles)
                line = lambda of: of * queries + q_tile * columns
                pl.when(whole)(lambda: store_columns(out_ref, accs, line(b), live, column))
                pl.when(jnp.logical_not(whole))(
                    lambda: store_columns(part_ref, accs, line(slot), live, column)
                )
                return n

            for_segments(share, segment, jnp.int32(0))

    array, barrier = jax.ShapeDtypeStruct, plgpu.Barrier
    call = plgpu.kernel(
        kernel,
        out_type=[
            array((rows * queries, v_width), jnp.bfloat16),
            array((rows * queries,), jnp.float32),
            array((2 * groups * queries, v_width), jnp.float32),
            array((2 * groups * queries,), jnp.float32),
            array((rows if leads_by_row else groups, 3), jnp.int32),
        ],
        grid=(groups, q_tiles),
        grid_names=("group", "q_tile"),
        num_threads=4,
        thread_name="role",
        scratch_types=[
            plgpu.SMEM((slots, TILE, row_bytes), jnp.uint8, transforms=_BYTES),
            plgpu.SMEM((columns, width), jnp.float16, transforms=_SWIZZLED),
            plgpu.SMEM((_P_SLOTS, TILE, columns), jnp.float16, transforms=_P_TILED),
            plgpu.SMEM((_P_SLOTS + 2, columns), jnp.float32),
            plgpu.SMEM((8,), jnp.int32),
            barrier(),
            barrier(num_arrivals=loads, num_barriers=slots),
            barrier(num_arrivals=3, num_barriers=slots),
            barrier(num_barriers=_P_SLOTS),
            barrier(num_arrivals=2, num_barriers=_P_SLOTS),
            barrier(),
            barrier(num_arrivals=2),
        ],
        # Reductions over tokens cross the warps of one warpgroup, the scores'. What threads write to shared memory others
        # read behind a barrier of ours: Pallas need not add its own around every load and store.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=2048, unsafe_no_auto_barriers=True
        ),
    )
    out, lse, part, part_lse, leads = call(q, pool, block_offset, *ranges, *ids)
    return mosaic_merge.merge(out, lse, part, part_lse, leads, queries=queries, groups=groups)
