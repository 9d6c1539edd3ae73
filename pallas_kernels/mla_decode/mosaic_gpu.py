"""Paged MLA decode for Hopper in Pallas Mosaic GPU: persistent blocks over a schedule that they find themselves.

A block owns one tile of 64 query rows (the heads of s_q queries, padded) and a share of the batch's KV tiles of 64
positions. Four warpgroups: one translates ids and loads pages by TMA, or single rows (`mosaic_gather`), one computes scores
and softmax and hands P and the rescale factors over through shared memory, two accumulate half of V's columns each. P of a
tile is handed over when Q K^T of the next has been issued but for its last box, so that P V runs beside the softmax. A tile
lies in shared memory as boxes: V's columns in a ring of 11, the columns behind V in a ring of three, where P takes their
place. Each box is free when its own product is there. A row of the batch that lies inside one block is final; a row cut
between blocks leaves partials that `mosaic_merge` combines by log-sum-exp. Results leave through the boxes of the row's last
tile. Up to 32 query rows go to `mosaic_few`. The design and its measurements: docs/mla_decode.md.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels import kernel_start, l2_hints, paged_mosaic
from pallas_kernels.mla_decode import mosaic_few, mosaic_gather, mosaic_merge, mosaic_schedule, mosaic_signals
from pallas_kernels.mla_decode.mosaic_registers import (
    add_products,
    fold,
    lower_half,
    raise_peak,
    rescale,
    round_pairs,
    store_rows,
    sync_warpgroup,
    upper_half,
)
from pallas_kernels.mla_decode.mosaic_schedule import TILE
from pallas_kernels.read_source import ReadSource, TokenStream, VirtualPages

M = 64  # query rows of a block: the M of one warpgroup's WGMMA
GROUP = 128  # columns of a box of V; also the N of a WGMMA (ptxas refuses 256 in a kernel of 512 threads)
PIECES = 4  # of a tile in which a row ends
SLOTS = 3  # of the ring for the columns behind V, and for P
_SMEM_BYTES = 224 << 10  # what the rings and q may take
_SMS = 132
_LOAD, _SCORES, _LEFT = 0, 1, 2  # roles of the warpgroups; the last one has V's right half
_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_ACC = plgpu.Layout.WGMMA
_ROWS = _ACC.reduce(1)
_SLACK = 8.0  # P stays below 2**8
_MASKED = -1e30  # below every score, and finite: a difference of two of them is 0, not NaN


class Place(NamedTuple):
    """Where a tile lies: `number` tiles of this block were loaded before it, a row's queries counting as one."""

    number: jax.Array
    box: jax.Array  # the first, in the ring of V's columns
    slot: jax.Array  # in the ring of the columns behind V


@dataclass(frozen=True)
class TuningConfig:
    """Launch parameters.

    `blocks`: thread blocks, one a multiprocessor. `q_boxes_in_registers`: how many boxes of 128 columns of q the warpgroup
    of the scores keeps in registers; what they free of shared memory goes to the ring of KV boxes.
    No matter up to 32 query rows, which another kernel serves.
    """

    blocks: int = _SMS
    q_boxes_in_registers: int = 3

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"blocks must be at least 1, got {self.blocks}")
        if not 0 <= self.q_boxes_in_registers <= 3:
            raise ValueError(f"q_boxes_in_registers must be 0 to 3, got {self.q_boxes_in_registers}")


def mla_decode_mosaic(
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
    _decline(q, kv_dtype, row_width, v_width, sm_scale)
    queries = s_q * heads
    config = config or TuningConfig()
    paged_mosaic.decline_latent(s_q, heads, v_width, M, config.blocks)
    if rows == 0:
        return jnp.zeros((0, s_q, heads, v_width), q.dtype), jnp.zeros((0, s_q, heads), jnp.float32)
    pool = lax.bitcast_convert_type(buffer.reshape(-1, 2), jnp.bfloat16).reshape(
        -1, source.page_size, row_width
    )
    padded = -(-queries // 8) * 8  # a load brings whole swizzle tiles of 8 rows
    queries_of_row = q.reshape(rows, queries, qk_width)
    if padded != queries:
        queries_of_row = jnp.pad(queries_of_row, ((0, 0), (0, padded - queries), (0, 0)))
    if queries <= mosaic_few.MOST_QUERIES:
        decode = partial(mosaic_few.decode_few, blocks=config.blocks)
    else:
        decode = partial(_decode, rows=rows, config=config)
    offset = jnp.asarray(block_offset, jnp.int32).reshape(1)
    out, lse = decode(
        queries_of_row, pool, source, offset, q_start,
        s_q=s_q, heads=heads, v_width=v_width, sm_scale=sm_scale, logit_cap=logit_cap,
    )  # fmt: skip
    return out.reshape(rows, s_q, heads, v_width), lse.reshape(rows, s_q, heads)


def _decline(q, kv_dtype, row_width, v_width, sm_scale) -> None:  # type: ignore[no-untyped-def]
    paged_mosaic.decline_queries(q.shape[1], sm_scale)
    qk_width = q.shape[-1]
    if q.dtype != jnp.bfloat16 or jnp.dtype(kv_dtype) != jnp.bfloat16:
        raise NotImplementedError(f"q and KV must be bfloat16, got {q.dtype} and {jnp.dtype(kv_dtype)}")
    if not row_width == qk_width == v_width + 64:
        raise NotImplementedError(
            f"row_width and qk_width must be v_width + 64, got {row_width}, {qk_width} and v_width {v_width}"
        )


def _decode(
    q, pool, source, block_offset, q_start, *, rows, s_q, heads, v_width, sm_scale, logit_cap, config
):
    """q [rows, s_q * heads padded to 8, width], pool [blocks, page_size, width] -> out, lse of [rows * s_q * heads]."""
    num_blocks, page_size, width = pool.shape
    queries = s_q * heads
    q_tiles = -(-queries // M)
    groups = config.blocks // q_tiles  # the blocks of a group hold the query tiles of one share
    box = min(M, q.shape[1])
    half = v_width // 2
    staged = queries % 8 == 0  # results leave by TMA, in whole swizzle tiles of 8 rows
    v_groups = v_width // GROUP  # a KV tile arrives as boxes of GROUP columns of V, and one of the rest
    rest = width - v_width
    kept = min(config.q_boxes_in_registers, v_groups - 1)  # the others, at least one, lie in shared memory
    q_smem_bytes = 2 * M * ((v_groups - kept) * GROUP + rest)
    boxes = (_SMEM_BYTES - q_smem_bytes - 2 * SLOTS * TILE * rest) // (2 * TILE * GROUP)  # of the ring of V
    leads_by_row = rows < groups  # the shorter table of the rows that are cut
    early_merge = mosaic_signals.used(rows)
    page_rows = min(page_size, TILE)  # of one TMA
    single = mosaic_gather.needed(source)  # rows come one by one
    pages_of_tile = 1 if single else TILE // page_rows
    # A tile that lies in one page comes in pieces where the row ends in it.
    loads = PIECES if not single and pages_of_tile == 1 else pages_of_tile
    log2e = math.log2(math.e)
    to_log2 = log2e if logit_cap is not None else sm_scale * log2e
    translate = isinstance(source, VirtualPages)
    stream = isinstance(source, TokenStream)
    columns = (
        source.ids.shape[0] if stream else source.req_to_page.shape[1] if translate else source.table.shape[1]
    )
    width_tokens = 2**31 - TILE if stream else min(columns * page_size, 2**31 - TILE)
    ranges = [source.kv_start, source.kv_end] + ([] if q_start is None else [q_start])
    ids = mosaic_gather.id_operands(source)
    if single:
        pool = pool.reshape(-1, width)

    full = lambda shape, value, layout: plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
    across = lambda x, like: lax.broadcast_in_dim(x, like.shape, [0])

    def kernel(*refs):
        remaining = iter(refs)
        take = lambda n: [next(remaining) for _ in range(n)]
        q_ref, pool_ref, offset_ref = take(3)
        range_refs, id_refs = take(len(ranges)), take(len(ids))
        out_ref, lse_ref, part_ref, part_lse_ref, lead_ref, counts_ref = take(6)
        v_smem, rest_smem, q_v_smem, q_rest_smem, factor_smem, share_smem = take(6)
        inverse_smem = factor_smem.at[SLOTS]
        share_ready, v_ready, rest_ready, v_free, rest_free = take(5)
        p_ready, end_ready, end_free, first_read = take(4)
        group, q_tile, role = lax.axis_index("group"), lax.axis_index("q_tile"), lax.axis_index("role")
        live_rows = jnp.minimum(queries - q_tile * M, M)

        def visible(b):
            """(first, end) of the KV positions that some query of row b sees."""
            stop = jnp.minimum(range_refs[1][b], width_tokens)
            if q_start is not None:
                stop = jnp.minimum(stop, range_refs[2][b] + s_q)
            if stream:
                indptr = id_refs[1]
                stop = jnp.minimum(stop, range_refs[0][b] + jnp.minimum(indptr[b + 1], columns) - indptr[b])
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

        wrap = lambda at, size: jnp.where(at >= size, at - size, at)
        origin = Place(*[jnp.int32(0)] * 3)

        def step(n, tiles=1):
            """The place of the tile that is `tiles` after the one at n."""
            box, slot = n.box + (tiles * v_groups) % boxes, n.slot + tiles % SLOTS
            return Place(n.number + tiles, wrap(box, boxes), wrap(slot, SLOTS))

        def v_box(n, g):
            """Index in the ring of box g of the tile at n."""
            return wrap(n.box + g, boxes)

        def destination(start, stop, tiles):
            """(whether the row is whole here, slot of its partial otherwise)."""
            return (start == 0) & (stop == tiles), jnp.where(start == 0, groups + group, group)

        def translated(pages):
            """What `v2p` has for them, which `block_of` takes."""
            return [paged_mosaic.translate(source, id_refs, page) for page in pages]

        def block_of(page):
            """Block of the pool of a translated page; the padding page's for one that names nothing."""
            return paged_mosaic.block_of(source, page, offset_ref, num_blocks)

        def mask(s, position, kv_first, kv_stop, q_position):
            token = plgpu.broadcasted_iota(jnp.int32, (M, TILE), 1, layout=_ACC) + position
            keep = (token >= kv_first) & (token < kv_stop)
            if s_q > 1:
                query = plgpu.broadcasted_iota(jnp.int32, (M, TILE), 0, layout=_ACC) + q_tile * M
                keep &= token <= q_position + lax.div(query, heads)
            return jnp.where(keep, s, -jnp.inf)

        def clear(n, first, stop):
            """Zeroes V of the positions outside [first, stop): P is 0 there, but 0 * NaN is NaN."""

            # A loop that the compiler can't unroll: this runs rarely, and instructions that run once come slowly.
            @pl.loop(0, v_groups + jnp.minimum(stop, 0))  # stop >= 1
            def box(g):
                for c in range(GROUP // 64):
                    chunk = v_smem.at[v_box(n, g), :, pl.ds(c * 64, 64)]
                    token = plgpu.broadcasted_iota(jnp.int32, (TILE, 64), 0, layout=_ACC)
                    value = plgpu.load(chunk, layout=_ACC)
                    chunk[...] = jnp.where((token >= first) & (token < stop), value, jnp.bfloat16(0))

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

        if q_tiles == 1:  # or another block wants the same pages
            l2_hints.bring_once()  # so parts of rows stay in L2 until they are merged

        kernel_start.fetch([*range_refs, offset_ref], id_refs, config.blocks)

        @pl.when(role == _LOAD)
        def load():
            mosaic_schedule.find_share(
                range_refs, rows, group, groups, share_smem, width_tokens=width_tokens, s_q=s_q,
                indptr_ref=id_refs[1] if stream else None, capacity=columns,
            )  # fmt: skip
            plgpu.barrier_arrive(share_ready)
            plgpu.set_max_registers(32 if single else 24, action="decrease")
            share = mosaic_schedule.read_share(share_smem)

            def free_boxes(n):
                """(box, its columns, its barrier) for each of the tile at n, in turn, when its place is free."""
                for g in range(v_groups):
                    if g == v_groups - 1:  # its place is free last
                        slot = n.slot
                        pl.when(n.number >= SLOTS)(lambda: plgpu.barrier_wait(rest_free.at[slot]))
                        yield rest_smem.at[slot], pl.ds(v_width, rest), rest_ready.at[slot]
                    at = v_box(n, g)
                    pl.when(n.number * v_groups + g >= boxes)(lambda at=at: plgpu.barrier_wait(v_free.at[at]))
                    yield v_smem.at[at], pl.ds(g * GROUP, GROUP), v_ready.at[at]

            def load_pages(n, sources, rows_each):
                """Fills the boxes of tile n: `sources` are [rows_each, width] views, as many as a full tile of pages has."""
                for target, columns, ready in free_boxes(n):
                    for j in range(loads):
                        if j < len(sources):
                            plgpu.copy_gmem_to_smem(
                                sources[j].at[:, columns], target.at[pl.ds(j * rows_each, rows_each)], ready
                            )
                        else:
                            plgpu.barrier_arrive(ready)

            def load_pieces(n, source, live):
                """The same of one page, of which `live` rows are needed, in pieces."""
                height = TILE // PIECES
                for target, columns, ready in free_boxes(n):

                    @pl.loop(0, PIECES)
                    def piece(j, target=target, columns=columns, ready=ready):
                        span = pl.ds(pl.multiple_of(j * height, height), height)
                        needed = j * height < live
                        plgpu.barrier_arrive(ready, predicate=jnp.logical_not(needed))
                        pl.when(needed)(
                            lambda: plgpu.copy_gmem_to_smem(source.at[span, columns], target.at[span], ready)
                        )

            def load_rows(n, lines):
                """The same with these rows of the pool, each by itself."""
                for target, columns, ready in free_boxes(n):
                    mosaic_gather.copy_rows(pool_ref, lines, target, columns.start, _TILED, once=q_tiles == 1)
                    mosaic_gather.report(ready)

            def segment(b, start, stop, first_tile, tiles, n):
                kv_first, kv_stop = visible(b)

                def by_pages(i, carry):
                    n, entries, later = carry
                    row = lax.rem((first_tile + i) * TILE, page_size) if page_size > TILE else 0
                    # On their way before this tile's places are waited for: afterwards the next tile's are soon free.
                    carry = translated(later), ids_of(i + 2)
                    pages = [pool_ref.at[block_of(page), pl.ds(row, page_rows)] for page in entries]
                    if q_tiles > 1:  # what is asked for last is missed first
                        for page in pages:
                            plgpu.async_prefetch(page.at[:, pl.ds(v_width - GROUP, GROUP)])
                            plgpu.async_prefetch(page.at[:, pl.ds(v_width, rest)])
                    live = kv_stop - (first_tile + i) * TILE
                    if loads == pages_of_tile:
                        load_pages(n, pages, page_rows)
                    else:
                        lax.cond(
                            live > TILE - TILE // PIECES,
                            lambda: load_pages(n, pages, page_rows),
                            lambda: load_pieces(n, pages[0], live),
                        )
                    return step(n), *carry

                def by_rows(i, carry):
                    n, ids = carry
                    # The next tile's are on their way while this tile is asked for.
                    later = tokens.load_ids(positions(jnp.minimum(i + 1, stop - 1)))
                    load_rows(n, tokens.rows(ids, positions(i)))
                    return step(n), later

                # Queries are asked for while ids are on their way.
                load_queries = lambda: load_pages(n, [q_ref.at[b, pl.ds(q_tile * M, box)]], box)
                ids: tuple[Any, ...]
                if single:
                    line = mosaic_gather.line(source, id_refs, range_refs[0], b)
                    tokens = mosaic_gather.Tokens(
                        source, id_refs, line, kv_first, kv_stop, offset_ref[0], num_blocks
                    )
                    positions = lambda tile: tokens.positions((first_tile + tile) * TILE)
                    body, ids = by_rows, (tokens.load_ids(positions(start)),)
                    load_queries()
                else:
                    first_column, last_column = lax.div(kv_first, page_size), lax.div(kv_stop - 1, page_size)
                    line = paged_mosaic.line_of(source, id_refs, b)

                    def ids_of(tile):
                        """What the table, or the request map, has for a tile: entries, or virtual pages."""
                        column = lax.div((first_tile + jnp.minimum(tile, stop - 1)) * TILE, page_size)
                        # Pages of the tile outside the row's range load a neighbour again: their ids may be anything.
                        return [
                            id_refs[0][line, jnp.clip(column + j, first_column, last_column)]
                            for j in range(pages_of_tile)
                        ]

                    pages, later = ids_of(start), ids_of(start + 1)
                    load_queries()
                    body, ids = by_pages, (translated(pages), later)
                n, *_ = lax.fori_loop(start, stop, body, (step(n), *ids))
                return n

            for_segments(share, segment, origin)

        @pl.when(role == _SCORES)
        def scores():
            plgpu.set_max_registers(160 if single else 168, action="increase")
            share = get_share()

            def segment(b, start, stop, first_tile, tiles, n):
                kv_first, kv_stop = visible(b)
                q_position = (range_refs[1][b] - s_q) if q_start is None else range_refs[2][b]
                q_kept = []
                for g in range(v_groups):
                    at = v_box(n, g)
                    plgpu.barrier_wait(v_ready.at[at])
                    value = plgpu.load(v_smem.at[at], layout=_ACC)
                    if g < kept:
                        q_kept.append(value)
                    else:
                        q_v_smem[g - kept] = value
                plgpu.barrier_wait(rest_ready.at[n.slot])
                q_rest_smem[...] = plgpu.load(rest_smem.at[n.slot], layout=_ACC)
                plgpu.commit_smem()
                for g in range(v_groups):
                    plgpu.barrier_arrive(v_free.at[v_box(n, g)])
                for _ in range(2):  # for the two warpgroups that have no use for q
                    plgpu.barrier_arrive(rest_free.at[n.slot])

                def arrived(ready):
                    plgpu.barrier_wait(ready)
                    if single:
                        mosaic_gather.order_reads()

                def scores_of(n, before_last):
                    """Q K^T of the tile at n; before_last() is called before its last box is waited for."""

                    def product(s_ref):
                        for g in range(v_groups):
                            if g == v_groups - 1:
                                arrived(rest_ready.at[n.slot])
                                plgpu.wgmma(s_ref, q_rest_smem, rest_smem.at[n.slot].transpose((1, 0)))
                                before_last()
                            at = v_box(n, g)
                            arrived(v_ready.at[at])
                            # The index is known; a descriptor that does not change would take registers all the time.
                            queries_ = (
                                q_kept[g] if g < kept else q_v_smem.at[g - kept + jnp.minimum(n.number, 0)]
                            )
                            plgpu.wgmma(s_ref, queries_, v_smem.at[at].transpose((1, 0)))
                        return s_ref[...]

                    return pl.run_scoped(product, plgpu.ACC((M, TILE), jnp.float32))

                def hand_over(slot, predicate=None):
                    """P and factors, which this warpgroup has written, to the other two."""
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(p_ready.at[slot], predicate=predicate)

                before = lambda n: wrap(n.slot + (SLOTS - 1), SLOTS)  # slot of the tile before

                def one(i, carry):
                    peak, total, n = carry
                    position = (first_tile + i) * TILE
                    s = scores_of(n, lambda: hand_over(before(n), predicate=i > start))
                    if logit_cap is not None:
                        # tanh by exp2: the hardware's own tanh has 11 bits.
                        scale = 2 * sm_scale * log2e / logit_cap
                        s = logit_cap - (2 * logit_cap) / (1 + jnp.exp2(s * scale))

                    sync_warpgroup()  # every warp has read K: P and zeros may be written over it
                    tail = (position < kv_first) | (position + TILE > kv_stop)
                    pl.when(tail)(lambda: clear(n, kv_first - position, kv_stop - position))
                    edge = tail | ((position + TILE > q_position + 1) if s_q > 1 else False)
                    s = lax.cond(
                        edge, lambda s: mask(s, position, kv_first, kv_stop, q_position), lambda s: s, s
                    )
                    # The subtrahend follows the maximum only when it falls behind by 2**_SLACK: most tiles rescale nothing.
                    peak, decay = raise_peak(s, peak, _SLACK / to_log2, to_log2)
                    p = round_pairs(jnp.exp2(s * to_log2 - across(peak * to_log2, s)))
                    rest_smem[n.slot] = p  # those columns of K are no longer needed
                    factor_smem[n.slot] = decay
                    # V is multiplied by rounded weights, so their own sum divides: a weight that outweighs the others
                    # then loses its rounding, up to 2**-8, where the subtrahend is another token's score.
                    return peak, total * across(decay, total) + fold(p), step(n)

                peak, total, n = lax.fori_loop(
                    start, stop, one, (full((M,), _MASKED, _ROWS), full((M, 8), 0, _ACC), step(n))
                )
                total = total.sum(axis=1)
                hand_over(before(n))
                seen = total > 0
                safe = jnp.where(seen, total, 1)
                plgpu.barrier_wait(end_free)
                inverse_smem[...] = jnp.where(seen, 1 / safe, 0)
                plgpu.commit_smem()
                plgpu.barrier_arrive(end_ready)
                whole, slot = destination(start, stop, tiles)
                lse = peak * to_log2 + jnp.log2(safe)

                @pl.when(whole)
                def final():
                    natural = jnp.where(seen, lse * math.log(2), jnp.inf)
                    store_rows(lse_ref, natural, b * queries + q_tile * M, live_rows)

                @pl.when(jnp.logical_not(whole))
                def partial_():
                    store_rows(
                        part_lse_ref, jnp.where(seen, lse, -jnp.inf), slot * queries + q_tile * M, live_rows
                    )
                    if early_merge:
                        mosaic_signals.tell(counts_ref, slot * q_tiles + q_tile)

                return n

            for_segments(share, segment, origin)

        @pl.when(role >= _LEFT)
        def values():
            first_box = (role - _LEFT) * (half // GROUP)
            column = first_box * GROUP
            plgpu.set_max_registers(160, action="increase")
            share = get_share()

            # These warpgroups have time at the start, the scores have none.
            if not leads_by_row:
                write_lead_of_group(share)
            else:

                @pl.loop(share.first, jnp.minimum(share.last + 1, rows))
                def lead_of_row(b):
                    _, tiles = mosaic_schedule.tile_range(*visible(b))
                    start, stop = mosaic_schedule.segment_tiles(share, b, tiles)
                    last = lax.div(mosaic_schedule.row_end(share, group, tiles) - 1, share.size)
                    pl.when((start == 0) & (stop > start))(
                        lambda: write_lead(b, jnp.where(stop < tiles, b, -1), last)
                    )

            def empty(b):
                if leads_by_row:
                    write_lead(b, jnp.int32(-1), group)

                @pl.loop(0, live_rows + jnp.minimum(share.size, 0))  # not unrolled, see `clear`; size >= 1
                def line(i):
                    zeros = plgpu.layout_cast(
                        jnp.zeros((half,), jnp.bfloat16), plgpu.Layout.WG_STRIDED((half,), half // 128)
                    )
                    line_of_out = b * queries + q_tile * M + i
                    out_ref[line_of_out, pl.ds(column, half)] = zeros

                    @pl.when(role == _LEFT)
                    def never():
                        lse_ref[line_of_out] = jnp.float32(jnp.inf)

            for_empty_rows(share, empty)

            @pl.when(role == _LEFT)
            def launch_merge():
                if not early_merge:
                    plgpu.griddepcontrol_launch_dependents()
                    return
                for slot in (group, groups + group):
                    counts_ref[slot * q_tiles + q_tile] = jnp.int32(0)
                mosaic_signals.launch_merge()

            plgpu.barrier_arrive(end_free)  # the place of 1 / total is free

            def send(values, n, ref, row):
                """Stores the live rows of values [M, GROUP] by way of the boxes of tile n, which must be free."""
                if not staged:
                    for c, value in enumerate(values):
                        store_rows(ref, value, row, live_rows, column + c * GROUP)
                    return
                for c, value in enumerate(values):
                    v_smem[v_box(n, first_box + c)] = value
                plgpu.commit_smem()
                for height in {min(M, queries), queries % M or M}:

                    @pl.loop(0, jnp.where(live_rows == height, half // GROUP, 0))
                    def copy(c, height=height):
                        plgpu.copy_smem_to_gmem(
                            v_smem.at[v_box(n, first_box + c), pl.ds(0, height)],
                            ref.at[pl.ds(row, height), pl.ds(column + c * GROUP, GROUP)],
                        )

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            def segment(b, start, stop, first_tile, tiles, n):
                def free(n):
                    for c in range(half // GROUP):
                        plgpu.barrier_arrive(v_free.at[v_box(n, first_box + c)])

                def one(i, carry):
                    *accs, n = carry
                    slot = n.slot
                    plgpu.barrier_wait(p_ready.at[slot])
                    decay = plgpu.load(factor_smem.at[slot], layout=_ROWS)
                    accs = rescale(accs, decay)
                    at = [v_box(n, first_box + c) for c in range(half // GROUP)]

                    def done(c):
                        plgpu.barrier_arrive(v_free.at[at[c]], predicate=i < stop - 1)
                        if c == 0:
                            plgpu.barrier_arrive(first_read.at[slot], predicate=role == _LEFT)

                    # The loader waits for the left half's first box: the right half leaves it the tensor cores.
                    pl.when(role != _LEFT)(lambda: plgpu.barrier_wait(first_read.at[slot]))
                    boxes_here = [v_smem.at[box] for box in at]
                    accs = add_products(accs, rest_smem.at[slot], boxes_here, done)
                    plgpu.barrier_arrive(rest_free.at[slot])
                    return *accs, step(n)

                *accs, n = lax.fori_loop(
                    start, stop, one, (*[full((M, GROUP), 0, _ACC)] * (half // GROUP), step(n))
                )
                plgpu.barrier_wait(end_ready)
                inverse = plgpu.load(inverse_smem, layout=_ROWS)
                accs = [acc * across(inverse, acc) for acc in accs]
                plgpu.barrier_arrive(end_free)
                whole, slot = destination(start, stop, tiles)
                row, part_row = b * queries + q_tile * M, slot * queries + q_tile * M
                if staged:
                    sync_warpgroup()  # every warp is done with V of the last tile: its place serves the way out

                @pl.when(whole)
                def final():
                    send([acc.astype(jnp.bfloat16) for acc in accs], step(n, -1), out_ref, row)

                @pl.when(jnp.logical_not(whole))
                def partial_():
                    send([upper_half(acc) for acc in accs], step(n, -1), part_ref.at[0], part_row)
                    send([lower_half(acc) for acc in accs], step(n, -1), part_ref.at[1], part_row)

                free(step(n, -1))

                if early_merge:

                    @pl.when(jnp.logical_not(whole))
                    def told():
                        if staged:
                            plgpu.wait_smem_to_gmem(0)
                        mosaic_signals.tell(counts_ref, slot * q_tiles + q_tile)

                return n

            for_segments(share, segment, origin)

    array, barrier = jax.ShapeDtypeStruct, plgpu.Barrier
    call = plgpu.kernel(
        kernel,
        out_type=[
            array((rows * queries, v_width), jnp.bfloat16),
            array((rows * queries,), jnp.float32),
            array((2, 2 * groups * queries, v_width), jnp.bfloat16),
            array((2 * groups * queries,), jnp.float32),
            array((rows if leads_by_row else groups, 3), jnp.int32),
            array((2 * groups * q_tiles,), jnp.int32),
        ],
        grid=(groups, q_tiles),
        grid_names=("group", "q_tile"),
        num_threads=4,
        thread_name="role",
        scratch_types=[
            plgpu.SMEM((boxes, TILE, GROUP), jnp.bfloat16, transforms=_TILED),
            plgpu.SMEM((SLOTS, TILE, rest), jnp.bfloat16, transforms=_TILED),
            plgpu.SMEM((v_groups - kept, M, GROUP), jnp.bfloat16, transforms=_TILED),
            plgpu.SMEM((M, rest), jnp.bfloat16, transforms=_TILED),
            plgpu.SMEM((SLOTS + 1, M), jnp.float32),
            plgpu.SMEM((8,), jnp.int32),
            barrier(),
            barrier(num_arrivals=loads, num_barriers=boxes),
            barrier(num_arrivals=loads, num_barriers=SLOTS),
            barrier(num_barriers=boxes),
            barrier(num_arrivals=2, num_barriers=SLOTS),
            barrier(num_barriers=SLOTS),
            barrier(),
            barrier(num_arrivals=2),
            barrier(num_barriers=SLOTS),
        ],
        # No reduction here crosses warps; the default scratch for those would not fit. What threads write to shared memory
        # others read behind a barrier of ours: Pallas need not add its own around every load and store.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
    )
    out, lse, part, part_lse, leads, counts = call(q, pool, block_offset, *ranges, *ids)
    counts = counts if early_merge else None
    return mosaic_merge.merge(
        out, lse, part, part_lse, leads, queries=queries, groups=groups, counts=counts, tile=M
    )
