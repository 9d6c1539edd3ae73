"""The fp8 MLA decode kernel for tiles of 64 queries: two warpgroups take the tiles' scores in turn, each has half of V.

O^T [v_width, 64] takes half of the registers of two warpgroups. One does scores and softmax of even tiles, the other of odd
ones; each hands P over through shared memory, and both multiply every P by their half of V. So one's softmax runs beside
the other's products, and no warpgroup has the whole chain. They agree on one peak, which goes from tile to tile with P.
A row's queries travel through the ring of tiles, so the next row's are loaded while this one is computed.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode import mosaic_schedule
from pallas_kernels.mla_decode.mosaic_block import ACC, COLUMNS, LOAD, MASKED, SLACK, down, full
from pallas_kernels.mla_decode.mosaic_fp8_block import (
    BYTES,
    P_TILED,
    SMEM_BYTES,
    Fp8Block,
    Fp8Call,
    across,
)
from pallas_kernels.mla_decode.mosaic_fp8_many_registers import (
    add_row_values,
    add_row_weights,
    any_flag,
    convert_queries,
    exp2,
    flag_changes,
    row_scores,
    whole_rows,
)
from pallas_kernels.mla_decode.mosaic_fp8_registers import zero_rows
from pallas_kernels.mla_decode.mosaic_registers import sync_warpgroup
from pallas_kernels.mla_decode.mosaic_schedule import TILE

_FIRST, _CONSUMERS = 1, 2
_ROWS = ACC.reduce(1)
_AT_ONCE = 2  # blocks of O^T: more fragments of V do not fit the registers
_FACTOR, _EXPONENT, _INVERSE = range(3)  # of a token: see `Fp8Block.token_numbers`
_PEAK, _DECAY = range(2)


def decode_many(call: Fp8Call):
    """(out, lse) of ``rows * queries`` lines. `call.columns` is 64."""
    columns = call.columns
    q = call.q.reshape(call.rows, call.queries, call.width)
    if call.queries % 8:  # a load brings whole swizzle tiles of 8 rows
        q = jnp.pad(q, ((0, 0), (0, -call.queries % 8), (0, 0)))
    q = lax.bitcast_convert_type(q, jnp.uint8)
    call = replace(call, q=q.reshape(*q.shape[:2], 2 * call.width))
    room = SMEM_BYTES - 2 * columns * call.row_bytes - _CONSUMERS * 2 * TILE * columns
    slots = min(5, room // call.tile_bytes)
    return call.launch(
        _kernel,
        _Block,
        part=jax.ShapeDtypeStruct((2 * call.groups * call.queries, call.v_width), jnp.float32),
        num_threads=1 + _CONSUMERS,
        slots=slots,
        scratch_types=[
            plgpu.SMEM((slots, TILE, call.row_bytes), jnp.uint8, transforms=BYTES),
            plgpu.Barrier(num_arrivals=call.loads, num_barriers=slots),
            plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=slots),
            plgpu.SMEM((8,), jnp.int32),
            plgpu.Barrier(),
            plgpu.SMEM(call.q_shape, jnp.uint8, transforms=BYTES),
            plgpu.SMEM((_CONSUMERS, columns, TILE), jnp.float16, transforms=P_TILED),
            plgpu.SMEM((columns,), jnp.float32),
            plgpu.SMEM((_CONSUMERS, 3, TILE), jnp.float32),
            plgpu.SMEM((_CONSUMERS, 2, columns), jnp.float32),
            plgpu.SMEM((_CONSUMERS, 4), jnp.int32),
            plgpu.SMEM((_CONSUMERS, 2, columns), jnp.float32),
            plgpu.Barrier(num_barriers=_CONSUMERS),
            plgpu.Barrier(num_arrivals=_CONSUMERS),
        ],
    )


class _Block(Fp8Block):
    """`call.q` is bytes [rows, queries padded to 8, 2 * width]."""

    def load(self) -> None:
        """The warpgroup that finds the share and loads its tiles by TMA, and before a row's tiles its queries as two more."""
        call, page_size = self.call, self.call.source.page_size
        load_rows = TILE // call.loads
        box = min(call.columns, call.q.shape[1])
        self.begin_loading(registers=24)

        def free_slot(n):
            slot = lax.rem(n, self.slots)
            pl.when(n >= self.slots)(lambda: plgpu.barrier_wait(self.kv_free.at[slot]))
            return self.kv_smem.at[slot], self.kv_ready.at[slot]

        def segment(b, start, stop, first_tile, tiles, n):
            kv_first, kv_stop = self.visible(b)
            blocks_of = self.blocks_of(b, first_tile, kv_first, kv_stop)
            for column in (0, call.v_width):
                target, ready = free_slot(n)
                lines = pl.ds(self.q_tile * call.columns, box)
                plgpu.copy_gmem_to_smem(
                    self.q.at[b, lines, pl.ds(column, call.row_bytes)], target.at[pl.ds(0, box)], ready
                )
                for _ in range(call.loads - 1):
                    plgpu.barrier_arrive(ready)
                n = n + 1

            def one(i, carry):
                n, blocks = carry
                row = lax.rem((first_tile + i) * TILE, page_size) if page_size > TILE else 0
                target, ready = free_slot(n)
                for j, block in enumerate(blocks):
                    plgpu.copy_gmem_to_smem(
                        self.pool.at[block, pl.ds(row, load_rows)],
                        target.at[pl.ds(j * load_rows, load_rows)],
                        ready,
                    )
                return n + 1, blocks_of(jnp.minimum(i + 1, stop - 1))

            return lax.fori_loop(start, stop, one, (n, blocks_of(start)))[0]

        self.for_segments(mosaic_schedule.read_share(self.share_smem), segment, jnp.int32(0))


def _kernel(
    block: _Block,
    q_smem,
    p_smem,
    unit_smem,
    token_smem,
    peak_smem,
    flags_smem,
    end_smem,
    p_ready,
    met,
) -> None:
    call, role = block.call, block.role
    columns, half = call.columns, call.v_width // 2
    v_blocks = half // 64
    first = role == _FIRST
    pl.when(role == LOAD)(block.load)

    def meet():
        """Waits for the other consumer."""
        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)

    @pl.when(role >= _FIRST)
    def consume():
        me = role - _FIRST
        other = 1 - me
        column = me * half
        plgpu.set_max_registers(240, action="increase")
        share = block.get_share()
        pl.when(first)(lambda: block.begin_records(share))

        def segment(b, start, stop, first_tile, tiles, n):
            kv_first, kv_stop = block.visible(b)
            seen = kv_first, kv_stop, block.q_position(b)
            count = stop - start
            pl.when(first)(lambda: block.record(share, b, start, stop, tiles))
            meet()  # the other is done with the queries and the peak before
            peak_smem[me, _PEAK] = full((columns,), MASKED, _ROWS)
            q_slots = [lax.rem(n + i, block.slots) for i in range(2)]
            for slot in q_slots:
                plgpu.barrier_wait(block.kv_ready.at[slot])
            early, late = (block.kv_smem.at[slot] for slot in q_slots)
            convert_queries(early, late, block.live, me, q_smem, unit_smem, BYTES)
            for slot in q_slots:
                plgpu.barrier_arrive(block.kv_free.at[slot])
            n = n + 2
            plgpu.commit_smem()
            meet()

            def add(accs, slot, whose):
                """P V of the tile in `slot`, and of the rest before it what its peak makes of it."""

                def rescale(*accs):
                    decay = plgpu.load(peak_smem.at[whose, _DECAY], layout=COLUMNS)
                    return tuple(acc * down(decay, acc) for acc in accs)

                accs = lax.cond(any_flag(flags_smem.at[whose]) > 0, rescale, lambda *accs: accs, *accs)
                accs = add_row_values(accs, block.kv_smem.at[slot], p_smem.at[whose], column, _AT_ONCE, BYTES)
                plgpu.barrier_arrive(block.kv_free.at[slot])
                return tuple(accs)

            def theirs(i, accs):
                slot = lax.rem(n + i, block.slots)
                # This one has passed, but every warpgroup counts the phases of a barrier.
                plgpu.barrier_wait(block.kv_ready.at[slot])
                plgpu.barrier_wait(p_ready.at[other])
                return add(accs, slot, other)

            def one(k, carry):
                mine, weights, *accs = carry
                i = me + 2 * k
                slot = lax.rem(n + i, block.slots)
                tile = block.kv_smem.at[slot]
                position = (first_tile + start + i) * TILE
                plgpu.barrier_wait(block.kv_ready.at[slot])
                sync_warpgroup()  # every warp is done with the tokens' numbers of two tiles ago
                for kind, numbers in enumerate(block.token_numbers(tile)):
                    token_smem[me, kind] = numbers
                s = row_scores(q_smem, tile, BYTES)
                sync_warpgroup()  # every warp has read K and written what it found of the tokens
                # The tile before, none at first. Later it would keep its place in the ring too long.
                accs = lax.fori_loop(jnp.maximum(i - 1, 0), i, theirs, tuple(accs))
                of_token = lambda kind: plgpu.load(token_smem.at[me, kind], layout=COLUMNS)
                unit = plgpu.load(unit_smem, layout=_ROWS)
                s = s * across(unit, s) * down(of_token(_FACTOR), s)
                s = block.capped(s) + down(of_token(_EXPONENT), s)
                tail = block.is_tail(position, kv_first, kv_stop)
                # P is 0 in those rows, but 0 * NaN is NaN.
                pl.when(tail)(lambda: zero_rows(tile, kv_first - position, kv_stop - position, BYTES))
                edge = tail | ((position + TILE > seen[2] + 1) if call.s_q > 1 else False)
                s = lax.cond(edge, lambda s: block.mask(s, position, *seen, tokens=1), lambda s: s, s)
                # The subtrahend follows the maximum only when it falls behind by 2**SLACK: most tiles rescale nothing.
                tile_peak = s.max(axis=1)
                before = plgpu.load(peak_smem.at[other, _PEAK], layout=_ROWS)
                peak = jnp.where(tile_peak > before + SLACK, tile_peak, before)
                decay = jnp.exp2(before - peak)
                p = exp2(s - across(peak, s))
                p_smem[me] = p.astype(jnp.float16)  # the other is past the last P: its own has come since
                peak_smem[me, _PEAK] = peak
                peak_smem[me, _DECAY] = decay
                flag_changes(decay, flags_smem.at[me])
                plgpu.commit_smem()
                plgpu.barrier_arrive(p_ready.at[me])
                weights = add_row_weights(weights * jnp.exp2(mine - peak), p, token_smem.at[me, _INVERSE])
                return peak, weights, *add(accs, slot, me)

            zeros = [full((columns,), 0, _ROWS), *[full((64, columns), 0, ACC)] * v_blocks]
            mine, weights, *accs = lax.fori_loop(
                0, lax.div(count - me + 1, 2), one, (full((columns,), MASKED, _ROWS), *zeros)
            )
            last = jnp.where(lax.rem(count - 1, 2) == me, count, count - 1)
            accs = lax.fori_loop(last, count, theirs, tuple(accs))
            end_smem[me, 0] = mine
            end_smem[me, 1] = whole_rows(weights)
            plgpu.commit_smem()
            meet()
            peaks, totals = (
                [plgpu.load(end_smem.at[c, kind], layout=COLUMNS) for c in range(_CONSUMERS)]
                for kind in range(2)
            )
            peak = jnp.maximum(*peaks)
            total = sum(t * jnp.exp2(p - peak) for t, p in zip(totals, peaks, strict=True))
            any_seen = total > 0
            safe = jnp.where(any_seen, total, 1)
            inverse = jnp.where(any_seen, 1 / safe, 0)
            accs = [acc * down(inverse, acc) for acc in accs]
            whole, slot = block.destination(start, stop, tiles)
            pl.when(first)(lambda: block.store_lse(peak + jnp.log2(safe), any_seen, b, whole, slot))
            block.store_values(accs, b, whole, slot, column)
            return n + count

        block.for_segments(share, segment, jnp.int32(0))
