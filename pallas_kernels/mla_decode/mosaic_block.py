"""What the MLA decode kernels with transposed products share: the launch, and a thread block's work on its part of the batch.

`mosaic_few` for bf16 rows, `mosaic_fp8_few` and `mosaic_fp8_pairs` for rows of e4m3.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import kernel_start, l2_hints, paged_mosaic
from pallas_kernels.mla_decode import mosaic_gather, mosaic_merge, mosaic_schedule
from pallas_kernels.mla_decode.mosaic_schedule import TILE

LOAD = 0  # role of the warpgroup that loads; the one behind it keeps the records
ACC = plgpu.Layout.WGMMA
COLUMNS = ACC.reduce(0)  # layout of one value a column
SLACK = 8.0  # P stays below 2**8
MASKED = -1e30  # below every score, and finite: a difference of two of them is 0, not NaN


def full(shape, value, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def down(x, like):
    """One value a column, for every row of `like`."""
    return lax.broadcast_in_dim(x, like.shape, [1])


@dataclass(frozen=True)
class Call:
    """Static numbers and operands of one call. q has lines of `width`, pool is [blocks, page_size, elements of a row]."""

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
    def width(self) -> int:
        return self.q.shape[-1]

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
        part,
        num_threads: int,
        slots: int,
        scratch_types,
        extra=(),
        pool=None,
        merge=mosaic_merge.merge,
    ):
        """Launches ``kernel(block, *scratch)`` and the merge: (out, lse) of ``rows * queries`` lines.

        `part`: the array for parts of cut rows. `scratch_types`: first the block's own, from `kv_smem` to `share_ready`.
        `extra`: further arrays that the block's class and the merge know, behind the others.
        `pool`: as the kernel sees it, if not as it is here. `merge`: of parts in that array, called as `mosaic_merge.merge`.
        """
        array = jax.ShapeDtypeStruct
        inputs = len(self.ranges) + len(self.ids)

        def body(q, pool, offset, *rest):
            ranges, ids = rest[: len(self.ranges)], rest[len(self.ranges) : inputs]
            first_extra = inputs + 5
            outputs, scratch = rest[inputs:first_extra], rest[first_extra + len(extra) :]
            more = rest[first_extra : first_extra + len(extra)]
            if self.q_tiles == 1:  # or another block wants the same pages
                l2_hints.bring_once()  # so parts of rows stay in L2 until they are merged
            kernel_start.fetch([*ranges, offset], ids, self.blocks)
            block = block_type(self, slots, q, pool, offset, ranges, ids, *outputs, *scratch[:5], *more)
            kernel(block, *scratch[5:])

        launch = plgpu.kernel(
            body,
            out_type=[
                array((self.rows * self.queries, self.v_width), jnp.bfloat16),
                array((self.rows * self.queries,), jnp.float32),
                part,
                array((2 * self.groups * self.queries,), jnp.float32),
                array((self.rows if self.leads_by_row else self.groups, 3), jnp.int32),
                *extra,
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
        out, lse, part, part_lse, leads, *more = launch(
            self.q, pool, self.block_offset, *self.ranges, *self.ids
        )
        return merge(out, lse, part, part_lse, leads, *more, queries=self.queries, groups=self.groups)


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
        """First line of this query tile in row, or slot of partials, `of`."""
        return of * self.call.queries + self.q_tile * self.call.columns

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

    def begin_loading(self, registers: int, launch_merge: bool = True, **options) -> None:
        """What the warpgroup that loads does first: finds the share, gives registers away. `options`: of `find_share`."""
        call = self.call
        if launch_merge:  # as soon as blocks leave
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
        """Where this share starts rows that see nothing, and which rows it cuts. For the warpgroup after the loading one."""
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

    def record(self, share, b, start, stop, tiles) -> None:
        """Of a segment, as `begin_records`."""
        if self.call.leads_by_row:
            row = jnp.where(stop < tiles, b, -1)
            pl.when(start == 0)(lambda: self._write_lead(b, row, self._last_group(share, tiles)))

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
