"""Paged MLA decode in bf16 for up to 32 query lines a row, for Hopper in Pallas Mosaic GPU: products transposed.

The schedule is that of `mosaic_gpu`; parts of cut rows and their merge are in `mosaic_parts`, that of very few rows in
`mosaic_spread`. What differs: heads are columns, as few as there are (in eights), not 64 padded rows. S^T = K Q^T and O^T =
V^T P^T take K and V^T straight from the tile in shared memory, so that a tile needs half of the tensor cores' time and leaves
its place early enough for a block that fell behind to catch up.

Four warpgroups: one loads pages by TMA, or single rows (`mosaic_gather`), one computes scores and softmax and hands P^T and
the factors of rescaling over through shared memory, two accumulate half of V's columns each. docs/mla_decode.md derives the
numbers.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode import mosaic_gather, mosaic_schedule
from pallas_kernels.mla_decode.mosaic_block import LOAD, MASKED, SLACK, Block, Call
from pallas_kernels.mla_decode.mosaic_columns import ACC, COLUMNS, down, full
from pallas_kernels.mla_decode.mosaic_fp8_registers import any_above, reduce_columns, zero_rows
from pallas_kernels.mla_decode.mosaic_registers import sync_warpgroup, uniform
from pallas_kernels.mla_decode.mosaic_schedule import TILE
from pallas_kernels.read_source import TokenStream

MOST_QUERIES = 32  # of a row: what leaves room for two tiles and two sets of queries in shared memory
_LEFT, _SCORES = 1, 2  # roles of the warpgroups; the last one has V's right half
_ROW = 1  # price of a row in tiles
_SLOTS = 2  # of the rings of KV tiles, queries and P
_PIECES = 4  # of a tile in which a row ends
_PIECE = TILE // _PIECES  # rows
_CHUNK = 64  # columns of a swizzled line, and the M of a WGMMA
_TILED = (plgpu.TilingTransform((8, _CHUNK)), plgpu.SwizzleTransform(128))


def decode_few(q, pool, source, block_offset, q_start, *, s_q, heads, v_width, sm_scale, logit_cap, blocks):
    """As `mosaic_gpu._decode`: q [rows, s_q * heads padded to 8, width], pool [blocks, page_size, width] -> out, lse."""
    rows, queries = q.shape[0], s_q * heads
    call = FewCall(
        q=q,
        pool=pool,
        source=source,
        block_offset=block_offset,
        q_start=q_start,
        rows=rows,
        s_q=s_q,
        heads=heads,
        columns=q.shape[1],
        v_width=v_width,
        sm_scale=sm_scale,
        logit_cap=logit_cap,
        blocks=blocks,
    )
    out, lse = call.run()
    if queries == call.queries:
        return out, lse
    cut = lambda x: x.reshape(rows, call.queries, *x.shape[1:])[:, :queries]
    return cut(out), cut(lse)


def add_products(accumulators, lefts, right):
    """``[acc + left.T @ right.T for acc, left in zip(accumulators, lefts)]`` by WGMMA, all in flight together."""

    def products(refs):
        for ref, left in zip(refs, lefts, strict=True):
            plgpu.wgmma(ref, left.transpose((1, 0)), right.transpose((1, 0)))

    return list(pl.run_state(products)(tuple(plgpu.ACC.init(acc) for acc in accumulators)))


@dataclass(frozen=True)
class FewCall(Call):
    """q is [rows, queries padded to 8, width], pool [blocks, page_size, width], both bf16."""

    @property
    def queries(self) -> int:
        return self.q.shape[1]

    @property
    def width(self) -> int:
        return self.q.shape[2]

    @property
    def single(self) -> bool:
        """Whether rows come one by one."""
        return mosaic_gather.needed(self.source)

    @property
    def loads(self) -> int:
        return 1 if self.single else super().loads

    @property
    def arrivals(self) -> int:
        """At the barrier of a box. A tile that lies in one page comes in pieces where the row ends in it."""
        return _PIECES if self.loads == 1 and not self.single else self.loads

    @property
    def width_tokens(self) -> int:
        return 2**31 - TILE if isinstance(self.source, TokenStream) else super().width_tokens

    @property
    def half(self) -> int:
        """Columns of V in a box of a tile; a third box has the columns behind V. Each arrives by itself.

        More boxes would need more barriers, which are made before anything else.
        """
        return self.v_width // 2

    def run(self):
        """(out, lse) of ``rows * queries`` lines."""
        barrier, columns, width = plgpu.Barrier, self.columns, self.width
        return self.launch(
            _kernel,
            FewBlock,
            num_threads=4,
            slots=_SLOTS,
            scratch_types=[
                plgpu.SMEM((_SLOTS, 2, TILE, self.half), jnp.bfloat16, transforms=_TILED),
                barrier(num_arrivals=self.arrivals, num_barriers=_SLOTS * 3),
                barrier(num_arrivals=2, num_barriers=_SLOTS),
                plgpu.SMEM((8,), jnp.int32),
                barrier(),
                plgpu.SMEM((_SLOTS, TILE, width - self.v_width), jnp.bfloat16, transforms=_TILED),
                plgpu.SMEM((_SLOTS, columns, width), jnp.bfloat16, transforms=_TILED),
                plgpu.SMEM((_SLOTS, columns, TILE), jnp.bfloat16, transforms=_TILED),
                plgpu.SMEM((_SLOTS + 6, columns), jnp.float32),  # one array: each takes a whole KiB
                barrier(num_barriers=_SLOTS),
                barrier(num_barriers=_SLOTS),
                barrier(num_barriers=_SLOTS),
                barrier(),
                barrier(num_arrivals=2),
            ],
            pool=self.pool.reshape(-1, width) if self.single else None,
        )


@dataclass(frozen=True)
class FewBlock(Block):
    """`kv_smem` holds the boxes of V, and `kv_ready` has a barrier for each box of a slot, the one behind V last."""

    call: FewCall

    def visible(self, b):
        first, stop = super().visible(b)
        if isinstance(self.call.source, TokenStream):
            ids, indptr = self.ids
            stop = jnp.minimum(stop, self.ranges[0][b] + jnp.minimum(indptr[b + 1], ids.shape[0]) - indptr[b])
        return first, stop

    def boxes(self, slot, rest_smem):
        """(box of the tile in `slot`, its first column, columns, its barrier), for each box."""
        half, v_width = self.call.half, self.call.v_width
        for g in range(2):
            yield self.kv_smem.at[slot, g], g * half, half, self.kv_ready.at[slot * 3 + g]
        yield rest_smem.at[slot], v_width, self.call.width - v_width, self.kv_ready.at[slot * 3 + 2]

    def load_tiles(self, rest_smem, q_smem, q_ready, q_free) -> None:
        """The warpgroup that finds the share and loads queries and tiles."""
        call, page_size = self.call, self.call.source.page_size
        load_rows = TILE // call.loads
        stream = {}
        if isinstance(call.source, TokenStream):
            stream = {"indptr_ref": self.ids[1], "capacity": self.ids[0].shape[0]}
        self.begin_loading(registers=40, overhead=_ROW, **stream)

        def segment(b, start, stop, first_tile, tiles, carry):
            n, k = carry
            kv_first, kv_stop = self.visible(b)

            def free_boxes(n):
                slot = lax.rem(n, _SLOTS)
                pl.when(n >= _SLOTS)(lambda: plgpu.barrier_wait(self.kv_free.at[slot]))
                yield from self.boxes(slot, rest_smem)

            def by_pages(i, carry):
                n, translated, *later = carry
                ahead: tuple[Any, ...] = ()
                if later:  # on their way while this tile is asked for
                    ahead = self.translate(*later), ids_of(jnp.minimum(i + 2, stop - 1))
                blocks = [self.block_of(page) for page in translated]
                position = (first_tile + i) * TILE
                row = lax.rem(position, page_size) if page_size > TILE else 0
                boxes = list(free_boxes(n))

                def pages():
                    for box, first, width, ready in boxes:
                        for j, block in enumerate(blocks):
                            plgpu.copy_gmem_to_smem(
                                self.pool.at[block, pl.ds(row, load_rows), pl.ds(first, width)],
                                box.at[pl.ds(j * load_rows, load_rows)],
                                ready,
                            )
                        for _ in range(call.arrivals - call.loads):
                            plgpu.barrier_arrive(ready)

                def pieces():
                    for box, first, width, ready in boxes:

                        @pl.loop(0, _PIECES)
                        def piece(j, box=box, first=first, width=width, ready=ready):
                            at = pl.multiple_of(j * _PIECE, _PIECE)
                            needed = position + at < kv_stop
                            plgpu.barrier_arrive(ready, predicate=jnp.logical_not(needed))

                            @pl.when(needed)
                            def copy():
                                plgpu.copy_gmem_to_smem(
                                    self.pool.at[blocks[0], pl.ds(row + at, _PIECE), pl.ds(first, width)],
                                    box.at[pl.ds(at, _PIECE)],
                                    ready,
                                )

                if call.arrivals == call.loads:
                    pages()
                else:
                    lax.cond(position + (TILE - _PIECE) < kv_stop, pages, pieces)
                if not later:
                    ahead = (self.translate(ids_of(jnp.minimum(i + 1, stop - 1))),)
                return n + 1, *ahead

            if call.single:
                line = mosaic_gather.line(call.source, self.ids, self.ranges[0], b)
                tokens = mosaic_gather.Tokens(
                    call.source, self.ids, line, kv_first, kv_stop, self.offset[0], call.pool.shape[0]
                )

            def positions(tile):
                return tokens.positions((first_tile + tile) * TILE)

            def by_rows(i, carry):
                n, ids = carry
                # The next tile's are on their way while this tile is asked for.
                later = tokens.load_ids(positions(jnp.minimum(i + 1, stop - 1)))
                rows = tokens.rows(ids, positions(i))
                for box, first, _, ready in free_boxes(n):
                    mosaic_gather.copy_rows(self.pool, rows, box, first, _TILED, once=True)
                    mosaic_gather.report(ready)
                return n + 1, later

            q_slot = lax.rem(k, _SLOTS)
            pl.when(k >= _SLOTS)(lambda: plgpu.barrier_wait(q_free.at[q_slot]))
            # Queries are asked for while ids are on their way.
            copy_queries = lambda: plgpu.copy_gmem_to_smem(
                self.q.at[b], q_smem.at[q_slot], q_ready.at[q_slot]
            )
            if call.single:
                ids = tokens.load_ids(positions(start))
                copy_queries()
                n, _ = lax.fori_loop(start, stop, by_rows, (n, ids))
            else:
                ids_of = self.page_ids(b, first_tile, kv_first, kv_stop)
                # Ids are read two tiles ahead, and what `v2p` has for them one: of several pages a tile, that would take too many
                # registers.
                ids, *later = [
                    ids_of(jnp.minimum(start + i, stop - 1)) for i in range(2 if call.loads == 1 else 1)
                ]
                copy_queries()
                n, *_ = lax.fori_loop(start, stop, by_pages, (n, self.translate(ids), *later))
            return n, k + 1

        self.for_segments(mosaic_schedule.read_share(self.share_smem), segment, (jnp.int32(0), jnp.int32(0)))


def _kernel(
    block: FewBlock, rest_smem, q_smem, p_smem, factor_smem, q_ready, q_free, p_ready, end_ready, end_free
) -> None:  # fmt: skip
    call, role = block.call, block.role
    columns, half = call.columns, call.half
    blocks_of_half = half // _CHUNK
    inverse_smem, lse_smem = factor_smem.at[_SLOTS], factor_smem.at[_SLOTS + 1]
    scratch_smem = factor_smem.at[pl.ds(_SLOTS + 2, 4)]
    log2e = math.log2(math.e)
    pl.when(role == LOAD)(lambda: block.load_tiles(rest_smem, q_smem, q_ready, q_free))

    @pl.when(role == _SCORES)
    def scores():
        plgpu.set_max_registers(200, action="increase")
        share = block.get_share()

        def segment(b, start, stop, first_tile, tiles, carry):
            n, k = carry
            kv_first, kv_stop = block.visible(b)
            q_position = block.q_position(b)
            q_slot = lax.rem(k, _SLOTS)
            plgpu.barrier_wait(q_ready.at[q_slot])

            def one(i, carry):
                peak, total, n = carry
                slot, q_now = uniform(lax.rem(n, _SLOTS)), uniform(q_slot)
                position = (first_tile + i) * TILE

                def product(s_ref):
                    for box, first, width, ready in block.boxes(slot, rest_smem):
                        plgpu.barrier_wait(ready)
                        if call.single:
                            mosaic_gather.order_reads()
                        plgpu.wgmma(s_ref, box, q_smem.at[q_now, :, pl.ds(first, width)].transpose((1, 0)))
                    return s_ref[...]

                s = pl.run_scoped(product, plgpu.ACC((TILE, columns), jnp.float32))
                if call.logit_cap is None:
                    s = s * (call.sm_scale * log2e)
                else:
                    # tanh by exp2: the hardware's own tanh has 11 bits.
                    cap = call.logit_cap * log2e
                    s = cap - (2 * cap) / (1 + jnp.exp2(s * (2 * log2e * call.sm_scale / call.logit_cap)))
                tail = block.is_tail(position, kv_first, kv_stop)

                @pl.when(tail)
                def clear():
                    sync_warpgroup()  # every warp has read K

                    # P is 0 in those rows, but 0 * NaN is NaN. A loop that the compiler can't unroll: this runs rarely, and
                    # instructions that run once come slowly.
                    @pl.loop(0, 2 + jnp.minimum(kv_stop, 0))  # kv_stop >= 1
                    def box(g):
                        zero_rows(block.kv_smem.at[slot, g], kv_first - position, kv_stop - position, _TILED)

                edge = tail | ((position + TILE > q_position + 1) if call.s_q > 1 else False)
                s = lax.cond(
                    edge, lambda s: block.mask(s, position, kv_first, kv_stop, q_position), lambda s: s, s
                )

                # The subtrahend follows the maximum only when it falls behind by 2**SLACK: most tiles rescale nothing.
                def follow(s, peak):
                    tile_peak = reduce_columns(s, scratch_smem, largest=True)
                    new_peak = jnp.where(tile_peak > peak + SLACK, tile_peak, peak)
                    return new_peak, jnp.exp2(peak - new_peak)

                stay = lambda s, peak: (peak, full((columns,), 1.0, COLUMNS))
                peak, decay = lax.cond(any_above(s, peak + SLACK) > 0, follow, stay, s, peak)
                p = jnp.exp2(s - down(peak, s))
                rounded = p.astype(jnp.bfloat16)
                # P's place is free: this tile was asked for when both halves of V had let go of the tile before, and of its P.
                p_smem.at[slot].transpose((1, 0))[...] = rounded
                factor_smem[slot] = decay
                plgpu.commit_smem()
                plgpu.barrier_arrive(p_ready.at[slot])
                # V is multiplied by rounded weights, so their own sum divides: see `mosaic_gpu`.
                return peak, total * down(decay, s) + rounded.astype(jnp.float32), n + 1

            nothing = full((columns,), MASKED, COLUMNS), full((TILE, columns), 0, ACC)
            peak, total, n = lax.fori_loop(start, stop, one, (*nothing, n))
            plgpu.barrier_arrive(q_free.at[q_slot])
            total = reduce_columns(total, scratch_smem, largest=False)
            any_seen = total > 0
            safe = jnp.where(any_seen, total, 1)
            plgpu.barrier_wait(end_free)
            inverse_smem[...] = jnp.where(any_seen, 1 / safe, 0)
            lse_smem[...] = jnp.where(any_seen, peak + jnp.log2(safe), -jnp.inf)
            plgpu.commit_smem()
            plgpu.barrier_arrive(end_ready)
            return n, k + 1

        block.for_segments(share, segment, (jnp.int32(0), jnp.int32(0)))

    @pl.when((role != LOAD) & (role != _SCORES))
    def values():
        left = role == _LEFT
        side = jnp.where(left, 0, 1)
        plgpu.set_max_registers(136, action="increase")
        share = block.get_share()
        # These warpgroups have time at the start, the scores have none.
        pl.when(left)(lambda: block.begin_records(share))
        plgpu.barrier_arrive(end_free)  # the place of 1 / weight is free

        def place(slot, c, rows=TILE):
            """Block c of this half of V."""
            return block.kv_smem.at[slot, side, pl.ds(0, rows), pl.ds(c * _CHUNK, _CHUNK)]

        def segment(b, start, stop, first_tile, tiles, n):
            whole, part_slot = block.destination(start, stop, tiles)

            def one(i, carry):
                *accs, n = carry
                slot = uniform(lax.rem(n, _SLOTS))
                plgpu.barrier_wait(p_ready.at[slot])
                decay = plgpu.load(factor_smem.at[slot], layout=COLUMNS)
                accs = [acc * down(decay, acc) for acc in accs]
                accs = add_products(accs, [place(slot, c) for c in range(blocks_of_half)], p_smem.at[slot])
                # A whole row leaves by way of its last tile's place.
                pl.when((i < stop - 1) | jnp.logical_not(whole))(
                    lambda: plgpu.barrier_arrive(block.kv_free.at[slot])
                )
                return *accs, n + 1

            *accs, n = lax.fori_loop(
                start, stop, one, (*[full((_CHUNK, columns), 0, ACC)] * blocks_of_half, n)
            )
            plgpu.barrier_wait(end_ready)
            inverse, lse = (plgpu.load(ref, layout=COLUMNS) for ref in (inverse_smem, lse_smem))
            accs = [acc * down(inverse, acc) for acc in accs]
            plgpu.barrier_arrive(end_free)
            last = lax.rem(n - 1, _SLOTS)

            @pl.when(whole)
            def final():
                sync_warpgroup()  # every warp is done with V of the last tile: its place serves the way out
                for c, acc in enumerate(accs):
                    place(last, c, columns).transpose((1, 0))[...] = acc.astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    block.kv_smem.at[last, side, pl.ds(0, columns)],
                    block.out.at[pl.ds(block.line(b), columns), pl.ds(side * half, half)],
                )
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(block.kv_free.at[last])

            pl.when(jnp.logical_not(whole))(lambda: block.leave_part(accs, side, part_slot))
            pl.when(left)(lambda: block.store_lse(lse, b, whole, part_slot))
            block.tell_part(whole, part_slot)
            return n

        block.for_segments(share, segment, jnp.int32(0))
