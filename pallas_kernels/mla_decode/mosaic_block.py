"""What the MLA decode kernels with transposed products share: the launch, and a thread block's work on its part of the batch.

`mosaic_few` for bf16 rows, `mosaic_fp8_pairs` for rows of e4m3. Parts of cut rows and their merge are in `mosaic_parts`.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import kernel_start, l2_hints, paged_mosaic
from pallas_kernels.mla_decode import mosaic_gather, mosaic_parts, mosaic_schedule, mosaic_signals
from pallas_kernels.mla_decode.mosaic_columns import ACC
from pallas_kernels.mla_decode.mosaic_fp8_registers import store_vector
from pallas_kernels.mla_decode.mosaic_schedule import TILE

LOAD = 0  # role of the warpgroup that loads
SLACK = 8.0  # P stays below 2**8
MASKED = -1e30  # below every score, and finite: a difference of two of them is 0, not NaN


@dataclass(frozen=True)
class Call:
    """Static numbers and operands of one call. pool is [blocks, page_size, elements of a row]."""

    q: Any
    pool: Any
    source: Any
    block_offset: Any
    q_start: Any
    rows: int
    s_q: int
    heads: int
    columns: int  # query columns of a thread block
    v_width: int
    sm_scale: float
    logit_cap: float | None
    blocks: int  # thread blocks

    @property
    def queries(self) -> int:
        return self.s_q * self.heads

    @property
    def q_tiles(self) -> int:
        return -(-self.queries // self.columns)

    @property
    def groups(self) -> int:
        """Groups of thread blocks; those of a group hold the query tiles of one share."""
        return self.blocks // self.q_tiles

    @property
    def part_columns(self) -> int:
        """Query columns of a thread block that a part has."""
        return min(self.columns, -(-self.queries // 8) * 8)

    @property
    def part_queries(self) -> int:
        return self.q_tiles * self.part_columns

    @property
    def loads(self) -> int:
        """TMA copies of a tile."""
        return TILE // min(self.source.page_size, TILE)

    @property
    def ids(self) -> list:
        return mosaic_gather.id_operands(self.source)

    @property
    def ranges(self) -> list:
        return [self.source.kv_start, self.source.kv_end] + ([] if self.q_start is None else [self.q_start])

    @property
    def width_tokens(self) -> int:
        """Positions that a row of the table holds."""
        return min(self.ids[0].shape[1] * self.source.page_size, 2**31 - TILE)

    @property
    def leads_by_row(self) -> bool:
        """Whether the table of rows that are cut has a line a row: the shorter one."""
        return self.rows < self.groups

    def launch(
        self,
        kernel,
        block_type,
        *,
        num_threads: int,
        slots: int,
        scratch_types,
        pool=None,
        paired: bool = False,
    ):
        """Launches ``kernel(block, *scratch)`` and the merge: (out, lse) of ``rows * queries`` lines.

        `scratch_types`: first the block's own, from `kv_smem` to `share_ready`. `pool`: as the kernel sees it, if not as it is
        here. `paired`: as of `mosaic_parts.merge`.
        """
        array = jax.ShapeDtypeStruct
        inputs = len(self.ranges) + len(self.ids)
        part_slots = 2 * self.groups
        part_tiles = part_slots * self.q_tiles

        def body(q, pool, offset, *rest):
            ranges, ids = rest[: len(self.ranges)], rest[len(self.ranges) : inputs]
            outputs, scratch = rest[inputs : inputs + 7], rest[inputs + 7 :]
            if self.q_tiles == 1:  # or another block wants the same pages
                l2_hints.bring_once()  # so parts of rows stay in L2 until they are merged
            kernel_start.fetch([*ranges, offset], ids, self.blocks)
            block = block_type(self, slots, q, pool, offset, ranges, ids, *outputs, *scratch[:5])
            kernel(block, *scratch[5:])

        launch = plgpu.kernel(
            body,
            out_type=[
                array((self.rows * self.queries, self.v_width), jnp.bfloat16),
                array((self.rows * self.queries,), jnp.float32),
                mosaic_parts.part_type(part_slots, self.part_queries, self.v_width),
                array((part_slots * self.part_queries,), jnp.float32),
                array((self.rows if self.leads_by_row else self.groups, 3), jnp.int32),
                array((part_tiles,), jnp.int32),
                mosaic_parts.scales_type(part_tiles),
            ],
            grid=(self.groups, self.q_tiles),
            grid_names=("group", "q_tile"),
            num_threads=num_threads,
            thread_name="role",
            scratch_types=scratch_types,
            # What threads write to shared memory others read behind a barrier of ours: Pallas need not add its own around
            # every load and store.
            compiler_params=plgpu.CompilerParams(
                approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
            ),
        )
        pool = self.pool if pool is None else pool
        return mosaic_parts.merge(
            *launch(self.q, pool, self.block_offset, *self.ranges, *self.ids),
            queries=self.queries, groups=self.groups, columns=self.part_columns, q_tiles=self.q_tiles, paired=paired,
        )  # fmt: skip


@dataclass(frozen=True)
class Block:
    """Inside the kernel: refs of a thread block, and its loops."""

    call: Call
    slots: int  # of the ring of KV tiles
    q: Any
    pool: Any
    offset: Any
    ranges: Any
    ids: Any
    out: Any
    lse: Any
    part: Any
    part_lse: Any
    leads: Any
    counts: Any  # of the warpgroups that have left their half of a part, for each slot and query tile
    scales: Any  # of parts
    kv_smem: Any
    kv_ready: Any
    kv_free: Any
    share_smem: Any
    share_ready: Any

    @property
    def group(self):
        return lax.axis_index("group")

    @property
    def q_tile(self):
        return lax.axis_index("q_tile")

    @property
    def role(self):
        return lax.axis_index("role")

    @property
    def live(self):
        """Query columns that there are."""
        return jnp.minimum(self.call.queries - self.q_tile * self.call.columns, self.call.columns)

    def line(self, of):
        """First line of this query tile in row `of`."""
        return of * self.call.queries + self.q_tile * self.call.columns

    def part_of(self, slot):
        """Number of this query tile's part in `slot`."""
        return slot * self.call.q_tiles + self.q_tile

    def visible(self, b):
        """(first, end) of the KV positions that some query of row b sees."""
        stop = jnp.minimum(self.ranges[1][b], self.call.width_tokens)
        if self.call.q_start is not None:
            stop = jnp.minimum(stop, self.ranges[2][b] + self.call.s_q)
        return jnp.maximum(self.ranges[0][b], 0), stop

    def q_position(self, b):
        """Position of row b's first query."""
        if self.call.q_start is None:
            return self.ranges[1][b] - self.call.s_q
        return self.ranges[2][b]

    def get_share(self):
        plgpu.barrier_wait(self.share_ready)
        return mosaic_schedule.read_share(self.share_smem)

    def for_segments(self, share, run, carry):
        """Calls run(b, tile_start, tile_stop, first_tile, tiles, carry) for each part of a row in this share."""

        def visit(b, carry):
            first_tile, tiles = mosaic_schedule.tile_range(*self.visible(b))
            start, stop = mosaic_schedule.segment_tiles(share, b, tiles)
            return lax.cond(
                stop > start, lambda n: run(b, start, stop, first_tile, tiles, n), lambda n: n, carry
            )

        return lax.fori_loop(share.first, jnp.minimum(share.last + 1, self.call.rows), visit, carry)

    def destination(self, start, stop, tiles):
        """(whether the row is whole here, slot of its partial otherwise)."""
        slot = jnp.where(start == 0, self.call.groups + self.group, self.group)
        return (start == 0) & (stop == tiles), slot

    def begin_loading(self, registers: int, **options) -> None:
        """What the warpgroup that loads does first: finds the share, gives registers away. `options`: of `find_share`."""
        call = self.call
        if not mosaic_parts.merged_early(call.rows):  # as soon as blocks leave
            plgpu.griddepcontrol_launch_dependents()
        mosaic_schedule.find_share(
            self.ranges,
            call.rows,
            self.group,
            call.groups,
            self.share_smem,
            width_tokens=call.width_tokens,
            s_q=call.s_q,
            **options,
        )
        plgpu.barrier_arrive(self.share_ready)
        plgpu.set_max_registers(registers, action="decrease")

    def blocks_of(self, b, first_tile, kv_first, kv_stop):
        """A function from a tile of a segment of row b to the blocks of the pool that hold its pages."""
        ids_of = self.page_ids(b, first_tile, kv_first, kv_stop)
        return lambda tile: tuple(self.block_of(page) for page in self.translate(ids_of(tile)))

    def page_ids(self, b, first_tile, kv_first, kv_stop):
        """A function from a tile of a segment of row b to what the table, or the request map, has for its pages."""
        page_size = self.call.source.page_size
        first_column, last_column = lax.div(kv_first, page_size), lax.div(kv_stop - 1, page_size)
        line = paged_mosaic.line_of(self.call.source, self.ids, b)

        def ids_of(tile):
            column = lax.div((first_tile + tile) * TILE, page_size)
            # Pages of the tile outside the row's range load a neighbour again: their ids may be anything.
            return tuple(
                self.ids[0][line, jnp.clip(column + j, first_column, last_column)]
                for j in range(self.call.loads)
            )

        return ids_of

    def translate(self, ids):
        """What `v2p` has for them, which `block_of` takes."""
        return tuple(paged_mosaic.translate(self.call.source, self.ids, page) for page in ids)

    def block_of(self, translated):
        """Block of the pool of a page; the padding page's for an id that names nothing."""
        return paged_mosaic.block_of(self.call.source, translated, self.offset, self.pool.shape[0])

    def mask(self, s, position, kv_first, kv_stop, q_position):
        """Scores of the tile at `position`, a token a row, -inf where a query does not see the token."""
        call = self.call
        token = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=ACC) + position
        keep = (token >= kv_first) & (token < kv_stop)
        if call.s_q > 1:
            query = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=ACC) + self.q_tile * call.columns
            keep &= token <= q_position + lax.div(query, call.heads)
        return jnp.where(keep, s, -jnp.inf)

    @staticmethod
    def is_tail(position, kv_first, kv_stop):
        """Whether some row of the tile at `position` is outside what the row of the batch sees."""
        return (position < kv_first) | (position + TILE > kv_stop)

    def begin_records(self, share) -> None:
        """Where this share starts rows that see nothing, and which rows it cuts. For one warpgroup.

        The merge may be launched behind this and not wait for the kernel's end.
        """
        early = mosaic_parts.merged_early(self.call.rows)
        if early:
            for slot in (self.group, self.call.groups + self.group):
                self.counts[self.part_of(slot)] = jnp.int32(0)
        if not self.call.leads_by_row:
            b = jnp.minimum(share.last, self.call.rows - 1)
            _, tiles = mosaic_schedule.tile_range(*self.visible(b))
            start, stop = mosaic_schedule.segment_tiles(share, b, tiles)
            leads = (share.last < self.call.rows) & (stop > 0) & (stop < tiles) & (start == 0)
            self._write_lead(self.group, jnp.where(leads, b, -1), self._last_group(share, tiles))

        @pl.loop(share.first, jnp.minimum(share.last + 1, self.call.rows))
        def visit(b):
            _, tiles = mosaic_schedule.tile_range(*self.visible(b))
            pl.when((tiles == 0) & mosaic_schedule.owns_start(share, b))(lambda: self._write_nothing(b))
            if self.call.leads_by_row:
                start, stop = mosaic_schedule.segment_tiles(share, b, tiles)
                row = jnp.where(stop < tiles, b, -1)
                pl.when((stop > start) & (start == 0))(
                    lambda: self._write_lead(b, row, self._last_group(share, tiles))
                )

        if early:
            mosaic_signals.launch_merge()

    def leave_part(self, accs, side, slot) -> None:
        """Leaves O^T of half `side` of V as this query tile's part in `slot`, in one of two warpgroups."""
        call = self.call
        first_block = side * (call.v_width // 64 // 2)
        line = mosaic_parts.line_of(slot, first_block, call.part_queries, call.v_width)
        if call.q_tiles > 1:
            line += self.q_tile * (call.part_columns // 8)
        mosaic_parts.leave(
            accs, self.part, line, self.scales, mosaic_parts.first_scale(self.part_of(slot), side),
            pitch=call.part_queries, queries=call.part_columns,
        )  # fmt: skip

    def store_lse(self, lse, b, whole, slot) -> None:
        """Base-2 `lse` of this tile's columns, -inf where nothing was seen: of row b if it is whole here, else of its part."""
        natural = jnp.where(lse > -jnp.inf, lse * math.log(2), jnp.inf)
        part_line = slot * self.call.part_queries + self.q_tile * self.call.part_columns
        pl.when(whole)(lambda: store_vector(self.lse, natural, self.line(b), self.live))
        pl.when(jnp.logical_not(whole))(lambda: store_vector(self.part_lse, lse, part_line, self.live))

    def tell_part(self, whole, slot) -> None:
        """Tells the merge, if it waits for that, that this warpgroup has left its half of the part in `slot`."""
        if mosaic_parts.merged_early(self.call.rows):
            pl.when(jnp.logical_not(whole))(lambda: mosaic_signals.tell(self.counts, self.part_of(slot)))

    def _last_group(self, share, tiles):
        return lax.div(mosaic_schedule.row_end(share, self.group, tiles) - 1, share.size)

    def _write_lead(self, index, row, last) -> None:
        """Tells the merge that the parts of `row`, or of none if -1, lie in this group and those to `last`."""

        @pl.when(self.q_tile == 0)
        def write():
            self.leads[index, 0], self.leads[index, 1], self.leads[index, 2] = row, self.group, last

    def _write_nothing(self, b) -> None:
        if self.call.leads_by_row:
            self._write_lead(b, jnp.int32(-1), self.group)
        width = self.call.v_width

        @pl.loop(0, self.live)
        def fill(i):
            self.out[self.line(b) + i] = plgpu.layout_cast(
                jnp.zeros((width,), jnp.bfloat16), plgpu.Layout.WG_STRIDED((width,), width // 128)
            )
            self.lse[self.line(b) + i] = jnp.float32(jnp.inf)
