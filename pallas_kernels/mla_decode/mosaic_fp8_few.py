"""The fp8 MLA decode kernel for up to 16 query columns: each of two warpgroups takes whole tiles in turn.

Few columns leave room for all of O^T [v_width, columns] in the registers of one warpgroup. So a consumer goes through a tile
alone, from scores to P V, with no hand-over: while one is in its softmax, the other has the tensor cores. Each has a peak
and a sum of its own; at the end of a row's part they agree on one peak, exchange halves of O^T and store one each.
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
    receive,
    reduce_columns,
    send,
)
from pallas_kernels.mla_decode.mosaic_schedule import TILE

_FIRST, _CONSUMERS = 1, 2


def decode_few(call: Fp8Call):
    """(out, lse) of ``rows * queries`` lines. `call.columns` is 16."""
    columns = call.columns
    room = SMEM_BYTES - 2 * columns * call.row_bytes - _CONSUMERS * 2 * TILE * columns
    slots = 4 if room >= 4 * call.tile_bytes else 2  # even: a slot is always read by the same consumer
    return call.run(
        _kernel,
        num_threads=1 + _CONSUMERS,
        slots=slots,
        readers=1,
        scratch_types=[
            plgpu.SMEM(call.q_shape, jnp.uint8, transforms=BYTES),
            plgpu.SMEM((_CONSUMERS, TILE, columns), jnp.float16, transforms=P_TILED),
            plgpu.SMEM((columns,), jnp.float32),
            plgpu.SMEM((_CONSUMERS, 2, columns), jnp.float32),
            plgpu.SMEM((_CONSUMERS, 4, columns), jnp.float32),
            plgpu.Barrier(num_arrivals=_CONSUMERS),
        ],
    )


def _kernel(block: Fp8Block, q_smem, p_smem, unit_smem, stat_smem, scratch_smem, met) -> None:
    call, role = block.call, block.role
    columns, v_blocks = call.columns, call.v_width // 64
    first, second = role == _FIRST, role != _FIRST
    pl.when(role == LOAD)(block.load)

    def meet():
        """Waits for the other consumer."""
        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)

    @pl.when(role >= _FIRST)
    def consume():
        me = role - _FIRST
        scratch = scratch_smem.at[me]
        plgpu.set_max_registers(240, action="increase")
        share = block.get_share()
        pl.when(first)(lambda: block.begin_records(share))

        def segment(b, start, stop, first_tile, tiles, n):
            seen = (*block.visible(b), block.q_position(b))
            pl.when(first)(lambda: block.record(share, b, start, stop, tiles))
            meet()  # the other has read what it was sent: the place of q is free

            load_queries(block.q, block.line(b), block.live, q_smem, unit_smem, BYTES, me, _CONSUMERS)
            plgpu.commit_smem()
            meet()
            # Tiles go to the consumers in turn, in the order of loading.
            skip = lax.rem(n + me, 2)
            count = lax.div(stop - start - skip + 1, 2)

            def one(k, carry):
                peak, weights, *accs = carry
                i = skip + 2 * k
                slot = lax.rem(n + i, block.slots)
                plgpu.barrier_wait(block.kv_ready.at[slot])
                position = (first_tile + start + i) * TILE
                s, inverse = block.exponents(slot, q_smem, unit_smem, position, seen)

                # The subtrahend follows the maximum only when it falls behind by 2**SLACK: most tiles rescale nothing.
                def follow(s, peak, weights, *accs):
                    tile_peak = reduce_columns(s, scratch, largest=True)
                    new_peak = jnp.where(tile_peak > peak + SLACK, tile_peak, peak)
                    decay = jnp.exp2(peak - new_peak)
                    return new_peak, weights * decay, *(acc * down(decay, acc) for acc in accs)

                stay = lambda s, *others: others
                behind = any_above(s, peak + SLACK) > 0
                peak, weights, *accs = lax.cond(behind, follow, stay, s, peak, weights, *accs)
                p = jnp.exp2(s - down(peak, s))
                p_smem[me] = p.astype(jnp.float16)
                plgpu.commit_smem()
                weights = add_weights(weights, p, inverse)
                accs = add_values(accs, block.kv_smem.at[slot], p_smem.at[me], 0, 4, BYTES)
                plgpu.barrier_arrive(block.kv_free.at[slot])
                return peak, weights, *accs

            nothing = [full((columns,), 0, COLUMNS), *[full((64, columns), 0, ACC)] * v_blocks]
            peak, weights, *accs = lax.fori_loop(0, count, one, (full((columns,), MASKED, COLUMNS), *nothing))
            stat_smem[me, 0] = peak
            stat_smem[me, 1] = reduce_columns(weights, scratch, largest=False)
            plgpu.commit_smem()
            meet()
            peaks, totals = (
                [plgpu.load(stat_smem.at[c, kind], layout=COLUMNS) for c in range(_CONSUMERS)]
                for kind in range(2)
            )
            common = jnp.maximum(*peaks)
            total = sum(t * jnp.exp2(p - common) for t, p in zip(totals, peaks, strict=True))
            any_seen = total > 0
            safe = jnp.where(any_seen, total, 1)
            part_of_mine = jnp.where(any_seen, jnp.exp2(peak - common) / safe, 0)
            accs = [acc * down(part_of_mine, acc) for acc in accs]
            whole, slot = block.destination(start, stop, tiles)
            pl.when(first)(lambda: block.store_lse(common + jnp.log2(safe), any_seen, b, whole, slot))

            def finish(some, first_block):
                block.store_values(receive(some, q_smem, BYTES), b, whole, slot, 0, v_blocks, first_block)

            half = v_blocks // 2
            pl.when(second)(lambda: send(accs[:half], q_smem, BYTES))
            plgpu.commit_smem()
            meet()

            @pl.when(first)
            def first_half():
                finish(accs[:half], 0)
                send(accs[half:], q_smem, BYTES)  # each thread over what it has read itself

            plgpu.commit_smem()
            meet()
            pl.when(second)(lambda: finish(accs[half:], half))
            return n + stop - start

        block.for_segments(share, segment, jnp.int32(0))
