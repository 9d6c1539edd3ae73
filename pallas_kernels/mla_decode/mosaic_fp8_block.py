"""What the fp8 MLA decode kernels share: rows of e4m3 with their scales, in shared memory and out of it."""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode import mosaic_merge, mosaic_schedule
from pallas_kernels.mla_decode.mosaic_block import COLUMNS, Block, Call, down
from pallas_kernels.mla_decode.mosaic_fp8_registers import (
    prefetch_queries,
    scores_of,
    store_columns,
    store_vector,
    token_scales,
    zero_rows,
)
from pallas_kernels.mla_decode.mosaic_registers import sync_warpgroup
from pallas_kernels.mla_decode.mosaic_schedule import TILE

_LOG2E = math.log2(math.e)
_MIN_SCALE = float(jnp.finfo(jnp.float32).tiny)  # no written scale is smaller
BYTES = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))
P_TILED = (
    plgpu.TilingTransform((8, 16)),
    plgpu.SwizzleTransform(32),
)  # so that 16 tokens are a WGMMA's operand
SMEM_BYTES = 224 << 10  # what tiles, q and P may take


def across(x, like):
    """One value a row, for every column of `like`."""
    return lax.broadcast_in_dim(x, like.shape, [0])


@dataclass(frozen=True)
class Fp8Call(Call):
    """q is [rows * queries, width] in bf16, pool bytes [blocks, page_size, row_bytes]."""

    @property
    def row_bytes(self) -> int:
        return self.pool.shape[2]

    @property
    def tile_bytes(self) -> int:
        return TILE * self.row_bytes

    @property
    def q_shape(self) -> tuple[int, int]:
        """Of the query columns in shared memory, in bytes: two terms of each, in rows as wide as the tile's."""
        return 2 * self.columns, self.row_bytes

    def run(
        self,
        kernel,
        *,
        num_threads: int,
        slots: int,
        readers: int,
        scratch_types,
        block_type: type | None = None,
    ):
        """(out, lse) of ``rows * queries`` lines by ``kernel(block, *scratch)``. `readers`: warpgroups that free a slot.

        `block_type`: of `block`, `Fp8Block` if it is not given.
        """
        return self.launch(
            kernel,
            block_type or Fp8Block,
            part=jax.ShapeDtypeStruct((2 * self.groups * self.queries, self.v_width), jnp.float32),
            num_threads=num_threads,
            slots=slots,
            scratch_types=[
                plgpu.SMEM((slots, TILE, self.row_bytes), jnp.uint8, transforms=BYTES),
                plgpu.Barrier(num_arrivals=self.loads, num_barriers=slots),
                plgpu.Barrier(num_arrivals=readers, num_barriers=slots),
                plgpu.SMEM((8,), jnp.int32),
                plgpu.Barrier(),
                *scratch_types,
            ],
            # As in bf16: where a row has few parts, the merge waits for its code.
            merge=partial(mosaic_merge.merge, unroll=2 if self.groups // self.rows <= 16 else 8),
        )


class Fp8Block(Block):
    call: Fp8Call

    def load(self) -> None:
        """The warpgroup that finds the share and loads its tiles by TMA."""
        self.begin_loading(registers=24)

        def segment(b, start, stop, first_tile, tiles, n):
            kv_first, kv_stop = self.visible(b)
            blocks_of = self.blocks_of(b, first_tile, kv_first, kv_stop)

            prefetch_queries(self.q, self.line(b), self.live, self.call.columns)
            return self.load_tiles(start, stop, first_tile, blocks_of, n)

        self.for_segments(mosaic_schedule.read_share(self.share_smem), segment, jnp.int32(0))

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
        scale = token_scales(tile, self.call.v_width + 64, BYTES)
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

    def store_lse(self, lse, any_seen, b, whole, slot) -> None:
        """Base-2 `lse` of this tile's columns: of row b if it is whole here, else of its part in `slot`."""
        natural = jnp.where(any_seen, lse * math.log(2), jnp.inf)
        partial_lse = jnp.where(any_seen, lse, -jnp.inf)
        pl.when(whole)(lambda: store_vector(self.lse, natural, self.line(b), self.live))
        pl.when(jnp.logical_not(whole))(
            lambda: store_vector(self.part_lse, partial_lse, self.line(slot), self.live)
        )

    def store_values(self, blocks, b, whole, slot, *columns) -> None:
        """O^T likewise; `columns` as of `store_columns`."""
        store = lambda ref, of: store_columns(ref, blocks, self.line(of), self.live, *columns)
        pl.when(whole)(lambda: store(self.out, b))
        pl.when(jnp.logical_not(whole))(lambda: store(self.part, slot))

    def exponents(self, slot, q_smem, unit_smem, position, seen):
        """(base-2 exponents of P^T [TILE, columns] with the token's scale in them, 1 / scale of each token).

        `seen` is (kv_first, kv_stop, q_position). Leaves zeros in the rows of the tile that no query of the row sees.
        """
        call, tile = self.call, self.kv_smem.at[slot]
        kv_first, kv_stop, q_position = seen
        factor, exponent, inverse = self.token_numbers(tile)
        s = scores_of(tile, q_smem, BYTES)
        s = s * across(factor, s) * down(plgpu.load(unit_smem, layout=COLUMNS), s)
        s = self.capped(s) + across(exponent, s)
        tail = self.is_tail(position, kv_first, kv_stop)

        @pl.when(tail)
        def clear():
            sync_warpgroup()  # every warp has read K and its scales
            # P is 0 in those rows, but 0 * NaN is NaN.
            zero_rows(tile, kv_first - position, kv_stop - position, BYTES)

        edge = tail | ((position + TILE > q_position + 1) if call.s_q > 1 else False)
        s = lax.cond(edge, lambda s: self.mask(s, position, *seen), lambda s: s, s)
        return s, inverse
