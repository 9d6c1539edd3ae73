"""The fp8 MLA decode kernel, for 16 or 32 query columns a block: two warpgroups for scores and softmax, two for V.

Tiles go to the scores' warpgroups in turn: while one is in its softmax, the other has the tensor cores. They hand P^T and the
factors of rescaling over through shared memory. The running maximum passes from one to the other with the turn, so that
the accumulators see one sequence of tiles; each keeps a sum of its own tiles' weights.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode import mosaic_schedule
from pallas_kernels.mla_decode.mosaic_block import LOAD, MASKED, SLACK, Block, Call
from pallas_kernels.mla_decode.mosaic_columns import ACC, COLUMNS, down, full
from pallas_kernels.mla_decode.mosaic_fp8_registers import (
    add_values,
    add_weights,
    any_above,
    reduce_columns,
    scores_of,
    split_queries,
    store_columns,
    token_scales,
    zero_rows,
)
from pallas_kernels.mla_decode.mosaic_registers import sync_warpgroup
from pallas_kernels.mla_decode.mosaic_schedule import TILE

_SCORES, _LEFT = 1, 3  # the first of two warpgroups each
_PAIR = 2
_AT_ONCE = 2  # blocks of O^T
_READERS = 3  # of a tile
_STATS = 9 + 4 * _PAIR  # rows of what has one value a column
_LOG2E = math.log2(math.e)
_MIN_SCALE = float(jnp.finfo(jnp.float32).tiny)  # no written scale is smaller
_BYTES = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))
_P_TILED = (
    plgpu.TilingTransform((8, 16)),
    plgpu.SwizzleTransform(32),
)  # so that 16 tokens are a WGMMA's operand
_SMEM_BYTES = 224 << 10  # what tiles, q and P may take


def _across(x, like):
    """One value a row, for every column of `like`."""
    return lax.broadcast_in_dim(x, like.shape, [0])


@dataclass(frozen=True)
class Fp8Call(Call):
    """q is bytes [rows, queries padded to 8, 2 * width], pool bytes [blocks, page_size, row_bytes]."""

    @property
    def row_bytes(self) -> int:
        return self.pool.shape[2]

    @property
    def tile_bytes(self) -> int:
        return TILE * self.row_bytes

    def run(self):
        """(out, lse) of ``rows * queries`` lines. Of more than 32 queries each tile of 32 has blocks of its own."""
        barrier, columns = plgpu.Barrier, self.columns
        room = _SMEM_BYTES - 2 * columns * self.row_bytes - _PAIR * 2 * TILE * columns
        slots = min(4, room // self.tile_bytes)
        return self.launch(
            _kernel,
            Fp8Block,
            num_threads=1 + 2 * _PAIR,
            slots=slots,
            scratch_types=[
                plgpu.SMEM((slots, TILE, self.row_bytes), jnp.uint8, transforms=_BYTES),
                barrier(num_arrivals=self.loads, num_barriers=slots),
                barrier(num_arrivals=_READERS, num_barriers=slots),
                plgpu.SMEM((8,), jnp.int32),
                barrier(),
                # Two terms of each query, in rows as wide as the tile's.
                plgpu.SMEM((2 * columns, self.row_bytes), jnp.uint8, transforms=_BYTES),
                plgpu.SMEM((_PAIR, TILE, columns), jnp.float16, transforms=_P_TILED),
                plgpu.SMEM((_STATS, columns), jnp.float32),  # one array: each takes a whole KiB
                barrier(num_barriers=_PAIR),
                barrier(num_arrivals=2, num_barriers=_PAIR),
                barrier(num_barriers=_PAIR),
                barrier(num_arrivals=_PAIR),
                barrier(),
                barrier(num_arrivals=2),
                barrier(num_arrivals=2, num_barriers=2),
            ],
            paired=True,
        )


class Fp8Block(Block):
    call: Fp8Call

    def load(self, q_ready) -> None:
        """The warpgroup that finds the share and loads its tiles by TMA, and before a row's tiles its queries as one more.

        A line of bf16 is wider than a row of a tile: see `split_queries`. `q_ready`: two barriers in turn, since a row's queries
        may come before those of the last row are seen.
        """
        call = self.call
        box = min(call.columns, call.q.shape[1])
        self.begin_loading(registers=24)

        def segment(b, start, stop, first_tile, tiles, carry):
            n, rows = carry
            kv_first, kv_stop = self.visible(b)
            slot = self.free_slot(n)
            lines = pl.ds(self.q_tile * call.columns, box)
            for half, column in enumerate((0, call.v_width)):
                plgpu.copy_gmem_to_smem(
                    self.q.at[b, lines, pl.ds(column, call.row_bytes)],
                    self.kv_smem.at[slot, pl.ds(half * TILE // 2, box)],
                    q_ready.at[lax.rem(rows, 2)],
                )
            blocks_of = self.blocks_of(b, first_tile, kv_first, kv_stop)

            return self.load_tiles(start, stop, first_tile, blocks_of, n + 1), rows + 1

        share = mosaic_schedule.read_share(self.share_smem)
        self.for_segments(share, segment, (jnp.int32(0), jnp.int32(0)))

    def load_tiles(self, start, stop, first_tile, blocks_of, n):
        """Loads a segment's tiles into the places of the ring from the n-th on. Returns the number of the next place."""
        page_size, load_rows = self.call.source.page_size, TILE // self.call.loads

        def one(i, carry):
            n, blocks = carry
            row = lax.rem((first_tile + i) * TILE, page_size) if page_size > TILE else 0
            slot = self.free_slot(n)
            for j, block in enumerate(blocks):
                plgpu.copy_gmem_to_smem(
                    self.pool.at[block, pl.ds(row, load_rows)],
                    self.kv_smem.at[slot, pl.ds(j * load_rows, load_rows)],
                    self.kv_ready.at[slot],
                )
            return n + 1, blocks_of(jnp.minimum(i + 1, stop - 1))

        return lax.fori_loop(start, stop, one, (n, blocks_of(start)))[0]

    def free_slot(self, n):
        """The slot of the ring's n-th place, once it is free."""
        slot = lax.rem(n, self.slots)
        pl.when(n >= self.slots)(lambda: plgpu.barrier_wait(self.kv_free.at[slot]))
        return slot

    def token_numbers(self, tile):
        """For each token of a tile: what makes base-2 exponents of its scores, log2 of its scale, 1 / scale."""
        scale = token_scales(tile, self.call.v_width + 64, _BYTES)
        # 0 in the padding page, anything in slots that nobody wrote: NaN, or a subnormal whose inverse is infinite. A
        # written scale is a normal number.
        scale = jnp.where((scale >= _MIN_SCALE) & (scale < jnp.inf), scale, 1.0)
        return scale * (self.call.sm_scale * _LOG2E), jnp.log2(scale), 1 / scale

    def capped(self, s):
        """Base-2 exponents `s` under the logit cap, if there is one."""
        if self.call.logit_cap is None:
            return s
        # tanh by exp2: the hardware's own tanh has 11 bits.
        cap = self.call.logit_cap * _LOG2E
        return cap - (2 * cap) / (1 + jnp.exp2(s * (2 * _LOG2E / cap)))

    def exponents(self, slot, q_smem, unit_smem, position, seen):
        """(base-2 exponents of P^T [TILE, columns] with the token's scale in them, 1 / scale of each token).

        `seen` is (kv_first, kv_stop, q_position). Leaves zeros in the rows of the tile that no query of the row sees.
        """
        call, tile = self.call, self.kv_smem.at[slot]
        kv_first, kv_stop, q_position = seen
        factor, exponent, inverse = self.token_numbers(tile)
        s = scores_of(tile, q_smem, _BYTES)
        s = s * _across(factor, s) * down(plgpu.load(unit_smem, layout=COLUMNS), s)
        s = self.capped(s) + _across(exponent, s)
        tail = self.is_tail(position, kv_first, kv_stop)

        @pl.when(tail)
        def clear():
            sync_warpgroup()  # every warp has read K and its scales
            # P is 0 in those rows, but 0 * NaN is NaN.
            zero_rows(tile, kv_first - position, kv_stop - position, _BYTES)

        edge = tail | ((position + TILE > q_position + 1) if call.s_q > 1 else False)
        s = lax.cond(edge, lambda s: self.mask(s, position, *seen), lambda s: s, s)
        return s, inverse


def _kernel(
    block: Fp8Block, q_smem, p_smem, stats_smem, p_ready, p_free, turn, met, end_ready, end_free, q_ready
) -> None:
    call, role = block.call, block.role
    columns, half = call.columns, call.v_width // 2
    v_blocks = half // 64
    inverse_smem, unit_smem, peak_smem, decays_smem, lse_smem = (stats_smem.at[i] for i in range(5))
    factor_smem, ends_smem = stats_smem.at[pl.ds(5, _PAIR)], stats_smem.at[pl.ds(5 + _PAIR, 2)]
    pl.when(role == LOAD)(lambda: block.load(q_ready))

    @pl.when((role == _SCORES) | (role == _SCORES + 1))
    def scores():
        me = role - _SCORES
        first = me == 0
        scratch = stats_smem.at[pl.ds(9 + 4 * me, 4)]
        plgpu.set_max_registers(112, action="increase")
        share = block.get_share()

        def meet():
            """Waits for the other one."""
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)

        def reset(ref):
            ref[...] = full((columns,), MASKED, COLUMNS)

        def segment(b, start, stop, first_tile, tiles, carry):
            n, rows = carry
            seen = (*block.visible(b), block.q_position(b))

            q_slot = lax.rem(n, block.slots)
            plgpu.barrier_wait(q_ready.at[lax.rem(rows, 2)])
            split_queries(block.kv_smem.at[q_slot], block.live, me, _PAIR, q_smem, unit_smem, _BYTES)
            pl.when(first)(lambda: reset(peak_smem))
            plgpu.commit_smem()
            meet()

            @pl.when(first)
            def free():
                for _ in range(_READERS):
                    plgpu.barrier_arrive(block.kv_free.at[q_slot])

            n = n + 1
            skip = lax.rem(n + me, _PAIR)
            count = lax.div(stop - start - skip + 1, _PAIR)

            def one(k, carry):
                old_peak, weights = carry
                i = skip + _PAIR * k
                slot = lax.rem(n + i, block.slots)
                plgpu.barrier_wait(block.kv_ready.at[slot])
                position = (first_tile + start + i) * TILE
                s, inverse = block.exponents(slot, q_smem, unit_smem, position, seen)
                pl.when(i > 0)(lambda: plgpu.barrier_wait(turn.at[me]))
                peak = plgpu.load(peak_smem, layout=COLUMNS)

                # The subtrahend follows the maximum only when it falls behind by 2**SLACK: most tiles rescale nothing.
                def follow(s, peak):
                    tile_peak = reduce_columns(s, scratch, largest=True)
                    new_peak = jnp.where(tile_peak > peak + SLACK, tile_peak, peak)
                    peak_smem[...] = new_peak
                    plgpu.commit_smem()
                    return new_peak, jnp.exp2(peak - new_peak)

                stay = lambda s, peak: (peak, full((columns,), 1.0, COLUMNS))
                behind = any_above(s, peak + SLACK)
                peak, decay = lax.cond(behind > 0, follow, stay, s, peak)
                pl.when(i + 1 < stop - start)(lambda: plgpu.barrier_arrive(turn.at[1 - me]))
                p = jnp.exp2(s - down(peak, s))
                plgpu.barrier_wait(p_free.at[me])
                p_smem[me] = p.astype(jnp.float16)
                factor_smem[me] = decay
                decays_smem[me] = behind.astype(jnp.float32)
                plgpu.commit_smem()
                plgpu.barrier_arrive(p_ready.at[me])
                plgpu.barrier_arrive(block.kv_free.at[slot])
                return peak, add_weights(weights * jnp.exp2(old_peak - peak), p, inverse)

            start_peak = full((columns,), MASKED, COLUMNS)
            peak, weights = lax.fori_loop(0, count, one, (start_peak, full((columns,), 0, COLUMNS)))
            weights = reduce_columns(weights, scratch, largest=False)

            @pl.when(me == 1)
            def tell():
                ends_smem[0], ends_smem[1] = peak, weights
                plgpu.commit_smem()

            meet()

            @pl.when(first)
            def finish():
                other_peak, other = (plgpu.load(ends_smem.at[k], layout=COLUMNS) for k in range(2))
                last_peak = jnp.maximum(peak, other_peak)
                total = weights * jnp.exp2(peak - last_peak) + other * jnp.exp2(other_peak - last_peak)
                any_seen = total > 0
                safe = jnp.where(any_seen, total, 1)
                plgpu.barrier_wait(end_free)
                inverse_smem[...] = jnp.where(any_seen, 1 / safe, 0)
                lse_smem[...] = jnp.where(any_seen, last_peak + jnp.log2(safe), -jnp.inf)
                plgpu.commit_smem()
                plgpu.barrier_arrive(end_ready)

            return n + stop - start, rows + 1

        block.for_segments(share, segment, (jnp.int32(0), jnp.int32(0)))

    @pl.when(role >= _LEFT)
    def values():
        left = role == _LEFT
        side = jnp.where(left, 0, 1)
        plgpu.set_max_registers(112, action="increase")
        share = block.get_share()
        # These warpgroups have time at the start, the scores have none.
        pl.when(left)(lambda: block.begin_records(share))
        for place in (end_free, *(p_free.at[i] for i in range(_PAIR))):
            plgpu.barrier_arrive(place)  # it is free

        def segment(b, start, stop, first_tile, tiles, n):
            n = n + 1  # past the queries

            def one(i, carry):
                *accs, n = carry
                slot, p_slot = lax.rem(n, block.slots), lax.rem(n, _PAIR)
                tile = block.kv_smem.at[slot]
                plgpu.barrier_wait(p_ready.at[p_slot])

                def rescale(*accs):
                    decay = plgpu.load(factor_smem.at[p_slot], layout=COLUMNS)
                    return tuple(acc * down(decay, acc) for acc in accs)

                accs = lax.cond(decays_smem[p_slot] > 0, rescale, lambda *accs: accs, *accs)
                accs = add_values(accs, tile, p_smem.at[p_slot], side * half, _AT_ONCE, _BYTES)
                plgpu.barrier_arrive(block.kv_free.at[slot])
                plgpu.barrier_arrive(p_free.at[p_slot])
                return *accs, n + 1

            *accs, n = lax.fori_loop(start, stop, one, (*[full((64, columns), 0, ACC)] * v_blocks, n))
            plgpu.barrier_wait(end_ready)
            inverse, lse = (plgpu.load(ref, layout=COLUMNS) for ref in (inverse_smem, lse_smem))
            accs = [acc * down(inverse, acc) for acc in accs]
            plgpu.barrier_arrive(end_free)
            whole, slot = block.destination(start, stop, tiles)
            pl.when(whole)(lambda: store_columns(block.out, accs, block.line(b), block.live, side * half))
            pl.when(jnp.logical_not(whole))(lambda: block.leave_part(accs, side, slot))
            pl.when(left)(lambda: block.store_lse(lse, b, whole, slot))
            block.tell_part(whole, slot)
            return n

        block.for_segments(share, segment, jnp.int32(0))
