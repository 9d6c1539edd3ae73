"""The fp8 MLA decode kernel for tiles of 64 query columns: one warpgroup for scores and softmax, two for half of V each.

O^T [v_width, 64] takes the registers of two warpgroups. The scores' warpgroup hands P and the factors of rescaling over
through shared memory, and goes on with the next tile.
"""

import math

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
    store_columns,
    store_vector,
)
from pallas_kernels.mla_decode.mosaic_schedule import TILE

_SCORES, _LEFT = 2, 1  # the last one has V's right half
_P_SLOTS = 2
_AT_ONCE = 2  # blocks of O^T: more fragments of V do not fit the registers


def decode_many(call: Fp8Call):
    """(out, lse) of ``rows * queries`` lines. `call.columns` is 64."""
    columns = call.columns
    room = SMEM_BYTES - 2 * columns * call.row_bytes - _P_SLOTS * 2 * TILE * columns
    return call.run(
        _kernel,
        num_threads=4,
        slots=min(5, room // call.tile_bytes),
        readers=3,
        scratch_types=[
            plgpu.SMEM(call.q_shape, jnp.uint8, transforms=BYTES),
            plgpu.SMEM((_P_SLOTS, TILE, columns), jnp.float16, transforms=P_TILED),
            plgpu.SMEM((_P_SLOTS + 2, columns), jnp.float32),
            plgpu.SMEM((_P_SLOTS,), jnp.int32),
            plgpu.SMEM((4, columns), jnp.float32),
            plgpu.Barrier(num_barriers=_P_SLOTS),
            plgpu.Barrier(num_arrivals=2, num_barriers=_P_SLOTS),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=2),
        ],
    )


def _kernel(
    block: Fp8Block,
    q_smem,
    p_smem,
    factor_smem,
    decays_smem,
    scratch_smem,
    p_ready,
    p_free,
    end_ready,
    end_free,
) -> None:
    call, role = block.call, block.role
    columns, half = call.columns, call.v_width // 2
    v_blocks = half // 64
    inverse_smem, unit_smem = (factor_smem.at[_P_SLOTS + i] for i in range(2))
    pl.when(role == LOAD)(block.load)

    @pl.when(role == _SCORES)
    def scores():
        plgpu.set_max_registers(136, action="increase")
        share = block.get_share()

        def segment(b, start, stop, first_tile, tiles, n):
            seen = (*block.visible(b), block.q_position(b))
            load_queries(block.q, block.line(b), block.live, q_smem, unit_smem, BYTES)
            plgpu.commit_smem()

            def one(i, carry):
                peak, weights, n = carry
                slot, p_slot = lax.rem(n, block.slots), lax.rem(n, _P_SLOTS)
                plgpu.barrier_wait(block.kv_ready.at[slot])
                position = (first_tile + i) * TILE
                s, inverse = block.exponents(slot, q_smem, unit_smem, position, seen)

                # The subtrahend follows the maximum only when it falls behind by 2**SLACK: most tiles rescale nothing.
                def follow(s, peak):
                    tile_peak = reduce_columns(s, scratch_smem, largest=True)
                    new_peak = jnp.where(tile_peak > peak + SLACK, tile_peak, peak)
                    return new_peak, jnp.exp2(peak - new_peak)

                stay = lambda s, peak: (peak, full((columns,), 1.0, COLUMNS))
                behind = any_above(s, peak + SLACK)
                peak, decay = lax.cond(behind > 0, follow, stay, s, peak)
                p = jnp.exp2(s - down(peak, s))
                pl.when(n >= _P_SLOTS)(lambda: plgpu.barrier_wait(p_free.at[p_slot]))
                p_smem[p_slot] = p.astype(jnp.float16)
                factor_smem[p_slot] = decay
                decays_smem[p_slot] = behind
                plgpu.commit_smem()
                plgpu.barrier_arrive(p_ready.at[p_slot])
                plgpu.barrier_arrive(block.kv_free.at[slot])
                return peak, add_weights(weights * decay, p, inverse), n + 1

            peak, weights, n = lax.fori_loop(
                start, stop, one, (full((columns,), MASKED, COLUMNS), full((columns,), 0, COLUMNS), n)
            )
            total = reduce_columns(weights, scratch_smem, largest=False)
            any_seen = total > 0
            safe = jnp.where(any_seen, total, 1)
            plgpu.barrier_wait(end_free)
            inverse_smem[...] = jnp.where(any_seen, 1 / safe, 0)
            plgpu.commit_smem()
            plgpu.barrier_arrive(end_ready)
            whole, slot = block.destination(start, stop, tiles)
            cut = jnp.logical_not(whole)
            lse = peak + jnp.log2(safe)
            natural = jnp.where(any_seen, lse * math.log(2), jnp.inf)
            partial = jnp.where(any_seen, lse, -jnp.inf)
            pl.when(whole)(lambda: store_vector(block.lse, natural, block.line(b), block.live))
            pl.when(cut)(lambda: store_vector(block.part_lse, partial, block.line(slot), block.live))
            return n

        block.for_segments(share, segment, jnp.int32(0))

    @pl.when((role != LOAD) & (role != _SCORES))
    def values():
        left = role == _LEFT
        column = jnp.where(left, 0, half)
        plgpu.set_max_registers(176, action="increase")
        share = block.get_share()
        # These warpgroups have time at the start, the scores have none.
        pl.when(left)(lambda: block.begin_records(share))
        plgpu.barrier_arrive(end_free)  # the place of 1 / total is free

        def segment(b, start, stop, first_tile, tiles, n):
            pl.when(left)(lambda: block.record(share, b, start, stop, tiles))

            def one(i, carry):
                *accs, n = carry
                slot, p_slot = lax.rem(n, block.slots), lax.rem(n, _P_SLOTS)
                tile = block.kv_smem.at[slot]
                plgpu.barrier_wait(p_ready.at[p_slot])

                def rescale(*accs):
                    decay = plgpu.load(factor_smem.at[p_slot], layout=COLUMNS)
                    return tuple(acc * down(decay, acc) for acc in accs)

                accs = lax.cond(decays_smem[p_slot] > 0, rescale, lambda *accs: accs, *accs)
                accs = add_values(accs, tile, p_smem.at[p_slot], column, _AT_ONCE, BYTES)
                plgpu.barrier_arrive(block.kv_free.at[slot])
                plgpu.barrier_arrive(p_free.at[p_slot])
                return *accs, n + 1

            *accs, n = lax.fori_loop(start, stop, one, (*[full((64, columns), 0, ACC)] * v_blocks, n))
            plgpu.barrier_wait(end_ready)
            inverse = plgpu.load(inverse_smem, layout=COLUMNS)
            accs = [acc * down(inverse, acc) for acc in accs]
            plgpu.barrier_arrive(end_free)
            whole, slot = block.destination(start, stop, tiles)
            store = lambda ref, of: store_columns(ref, accs, block.line(of), block.live, column)
            pl.when(whole)(lambda: store(block.out, b))
            pl.when(jnp.logical_not(whole))(lambda: store(block.part, slot))
            return n

        block.for_segments(share, segment, jnp.int32(0))
