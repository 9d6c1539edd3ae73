"""The fp8 MLA decode kernel for more than 16 query columns, 32 a block: two warpgroups for scores and softmax, two for V.

Tiles go to the scores' warpgroups in turn: while one is in its softmax, the other has the tensor cores. They hand P^T and the
factors of rescaling over through shared memory. The running maximum passes from one to the other with the turn, so that
the accumulators see one sequence of tiles; each keeps a sum of its own tiles' weights.
"""

from dataclasses import replace

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode import mosaic_schedule
from pallas_kernels.mla_decode.mosaic_block import ACC, COLUMNS, LOAD, MASKED, SLACK, down, full
from pallas_kernels.mla_decode.mosaic_fp8_block import BYTES, P_TILED, SMEM_BYTES, Fp8Block, Fp8Call
from pallas_kernels.mla_decode.mosaic_fp8_registers import (
    add_values,
    add_weights,
    any_above,
    reduce_columns,
    split_queries,
)
from pallas_kernels.mla_decode.mosaic_schedule import TILE

_SCORES, _LEFT = 1, 3  # the first of two warpgroups each
_PAIR = 2
_AT_ONCE = 2  # blocks of O^T
_READERS = 3  # of a tile
_STATS = 8 + 4 * _PAIR  # rows of what has one value a column


class _Block(Fp8Block):
    """`call.q` is bytes [rows, queries padded to 8, 2 * width]."""

    def load_with_queries(self, q_ready) -> None:
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


def decode_pairs(call: Fp8Call):
    """(out, lse) of ``rows * queries`` lines. `call.columns` is 32: of more queries each tile of 32 has blocks of its own."""
    columns = call.columns
    q = call.q.reshape(call.rows, call.queries, call.width)
    if call.queries % 8:  # a load brings whole swizzle tiles of 8 rows
        q = jnp.pad(q, ((0, 0), (0, -call.queries % 8), (0, 0)))
    q = lax.bitcast_convert_type(q, jnp.uint8)
    call = replace(call, q=q.reshape(*q.shape[:2], 2 * call.width))
    room = SMEM_BYTES - 2 * columns * call.row_bytes - _PAIR * 2 * TILE * columns
    return call.run(
        _kernel,
        block_type=_Block,
        num_threads=1 + 2 * _PAIR,
        slots=min(4, room // call.tile_bytes),
        readers=_READERS,
        scratch_types=[
            plgpu.SMEM(call.q_shape, jnp.uint8, transforms=BYTES),
            plgpu.SMEM((_PAIR, TILE, columns), jnp.float16, transforms=P_TILED),
            plgpu.SMEM((_STATS, columns), jnp.float32),  # one array: each takes a whole KiB
            plgpu.Barrier(num_barriers=_PAIR),
            plgpu.Barrier(num_arrivals=2, num_barriers=_PAIR),
            plgpu.Barrier(num_barriers=_PAIR),
            plgpu.Barrier(num_arrivals=_PAIR),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
        ],
    )


def _kernel(
    block: _Block, q_smem, p_smem, stats_smem, p_ready, p_free, turn, met, end_ready, end_free, q_ready
) -> None:
    call, role = block.call, block.role
    columns, half = call.columns, call.v_width // 2
    v_blocks = half // 64
    inverse_smem, unit_smem, peak_smem, decays_smem = (stats_smem.at[i] for i in range(4))
    factor_smem, ends_smem = stats_smem.at[pl.ds(4, _PAIR)], stats_smem.at[pl.ds(4 + _PAIR, 2)]
    pl.when(role == LOAD)(lambda: block.load_with_queries(q_ready))

    @pl.when((role == _SCORES) | (role == _SCORES + 1))
    def scores():
        me = role - _SCORES
        first = me == 0
        scratch = stats_smem.at[pl.ds(8 + 4 * me, 4)]
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
            split_queries(block.kv_smem.at[q_slot], block.live, me, _PAIR, q_smem, unit_smem, BYTES)
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
                plgpu.commit_smem()
                plgpu.barrier_arrive(end_ready)
                whole, slot = block.destination(start, stop, tiles)
                block.store_lse(last_peak + jnp.log2(safe), any_seen, b, whole, slot)

            return n + stop - start, rows + 1

        block.for_segments(share, segment, (jnp.int32(0), jnp.int32(0)))

    @pl.when(role >= _LEFT)
    def values():
        left = role == _LEFT
        column = jnp.where(left, 0, half)
        plgpu.set_max_registers(112, action="increase")
        share = block.get_share()
        # These warpgroups have time at the start, the scores have none.
        pl.when(left)(lambda: block.begin_records(share))
        for place in (end_free, *(p_free.at[i] for i in range(_PAIR))):
            plgpu.barrier_arrive(place)  # it is free

        def segment(b, start, stop, first_tile, tiles, n):
            pl.when(left)(lambda: block.record(share, b, start, stop, tiles))
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
                accs = add_values(accs, tile, p_smem.at[p_slot], column, min(_AT_ONCE, v_blocks), BYTES)
                plgpu.barrier_arrive(block.kv_free.at[slot])
                plgpu.barrier_arrive(p_free.at[p_slot])
                return *accs, n + 1

            *accs, n = lax.fori_loop(start, stop, one, (*[full((64, columns), 0, ACC)] * v_blocks, n))
            plgpu.barrier_wait(end_ready)
            inverse = plgpu.load(inverse_smem, layout=COLUMNS)
            accs = [acc * down(inverse, acc) for acc in accs]
            plgpu.barrier_arrive(end_free)
            whole, slot = block.destination(start, stop, tiles)
            block.store_values(accs, b, whole, slot, column)
            return n

        block.for_segments(share, segment, jnp.int32(0))
