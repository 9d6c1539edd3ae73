"""The fp8 MLA decode kernel for 17 to 32 query columns: two warpgroups for scores and softmax, two for half of V each.

Tiles go to the scores' warpgroups in turn: while one is in its softmax, the other has the tensor cores. They hand P^T and the
factors of rescaling over through shared memory. The running maximum passes from one to the other with the turn, so that
the accumulators see one sequence of tiles; each keeps a sum of its own tiles' weights.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode.mosaic_block import ACC, COLUMNS, LOAD, MASKED, SLACK, down, full
from pallas_kernels.mla_decode.mosaic_fp8_block import BYTES, P_TILED, SMEM_BYTES, Fp8Block, Fp8Call
from pallas_kernels.mla_decode.mosaic_fp8_registers import (
    add_values,
    add_weights,
    any_above,
    load_queries,
    reduce_columns,
)
from pallas_kernels.mla_decode.mosaic_schedule import TILE

_SCORES, _LEFT = 1, 3  # the first of two warpgroups each
_PAIR = 2
_AT_ONCE = 2  # blocks of O^T
_STATS = 8 + 4 * _PAIR  # rows of what has one value a column


def decode_pairs(call: Fp8Call):
    """(out, lse) of ``rows * queries`` lines. `call.columns` is 32."""
    columns = call.columns
    room = SMEM_BYTES - 2 * columns * call.row_bytes - _PAIR * 2 * TILE * columns
    return call.run(
        _kernel,
        num_threads=1 + 2 * _PAIR,
        slots=min(4, room // call.tile_bytes),
        readers=3,
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
        ],
    )


def _kernel(
    block: Fp8Block, q_smem, p_smem, stats_smem, p_ready, p_free, turn, met, end_ready, end_free
) -> None:
    call, role = block.call, block.role
    columns, half = call.columns, call.v_width // 2
    v_blocks = half // 64
    inverse_smem, unit_smem, peak_smem, decays_smem = (stats_smem.at[i] for i in range(4))
    factor_smem, ends_smem = stats_smem.at[pl.ds(4, _PAIR)], stats_smem.at[pl.ds(4 + _PAIR, 2)]
    pl.when(role == LOAD)(block.load)

    @pl.when((role == _SCORES) | (role == _SCORES + 1))
    def scores():
        me = role - _SCORES
        first = me == 0
        scratch = stats_smem.at[pl.ds(8 + 4 * me, 4)]
        plgpu.set_max_registers(112, action="increase")
        share = block.get_share()
        pl.when(first)(lambda: plgpu.barrier_arrive(turn.at[0]))

        def meet():
            """Waits for the other one."""
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)

        def reset(ref):
            ref[...] = full((columns,), MASKED, COLUMNS)

        def segment(b, start, stop, first_tile, tiles, n):
            seen = (*block.visible(b), block.q_position(b))

            load_queries(block.q, block.line(b), block.live, q_smem, unit_smem, BYTES, me, _PAIR)
            pl.when(first)(lambda: reset(peak_smem))
            plgpu.commit_smem()
            meet()
            skip = lax.rem(n + me, _PAIR)
            count = lax.div(stop - start - skip + 1, _PAIR)

            def one(k, carry):
                old_peak, weights = carry
                i = skip + _PAIR * k
                slot = lax.rem(n + i, block.slots)
                plgpu.barrier_wait(block.kv_ready.at[slot])
                position = (first_tile + start + i) * TILE
                s, inverse = block.exponents(slot, q_smem, unit_smem, position, seen)
                plgpu.barrier_wait(turn.at[me])
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
                plgpu.barrier_arrive(turn.at[1 - me])
                p = jnp.exp2(s - down(peak, s))
                pl.when(n + i >= _PAIR)(lambda: plgpu.barrier_wait(p_free.at[me]))
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

            return n + stop - start

        block.for_segments(share, segment, jnp.int32(0))

    @pl.when(role >= _LEFT)
    def values():
        left = role == _LEFT
        column = jnp.where(left, 0, half)
        plgpu.set_max_registers(112, action="increase")
        share = block.get_share()
        # These warpgroups have time at the start, the scores have none.
        pl.when(left)(lambda: block.begin_records(share))
        plgpu.barrier_arrive(end_free)  # the place of 1 / total is free

        def segment(b, start, stop, first_tile, tiles, n):
            pl.when(left)(lambda: block.record(share, b, start, stop, tiles))

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
