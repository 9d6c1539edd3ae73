"""What the GQA decode kernels over bf16 and over e4m3 rows share: a worker's part of the batch, and the pages of its rows."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import paged_mosaic
from pallas_kernels.mla_decode import mosaic_gather, mosaic_schedule
from pallas_kernels.mla_decode.mosaic_schedule import TILE, Share
from pallas_kernels.read_source import TokenStream


@dataclass(frozen=True)
class Call:
    """Static numbers and operands of one call. groups: of workers, each with a share of the batch."""

    source: Any
    q_start: Any
    rows: int
    s_q: int
    window: int | None
    groups: int

    @property
    def single(self) -> bool:
        """Whether KV rows come one by one."""
        return mosaic_gather.needed(self.source)

    @property
    def ids(self) -> list[jax.Array]:
        return mosaic_gather.id_operands(self.source)

    @property
    def ranges(self) -> list[jax.Array]:
        return [self.source.kv_start, self.source.kv_end] + ([] if self.q_start is None else [self.q_start])

    @property
    def width_tokens(self) -> int:
        """Positions that a row of the table holds; indptr bounds those of a stream."""
        if isinstance(self.source, TokenStream):
            return 2**31 - TILE
        return min(self.ids[0].shape[1] * self.source.page_size, 2**31 - TILE)

    @property
    def reach(self) -> int | None:
        """Positions before the end of the queries that some query of a row sees; None for all."""
        if self.window is None or self.window + self.s_q > 2**31 - 1:
            return None
        return self.window + self.s_q - 1

    @property
    def leads_by_row(self) -> bool:
        """Whether the table of rows that are cut has a line a row: the shorter one."""
        return self.rows < self.groups

    def results(self, lines: int, v_width: int) -> list[jax.ShapeDtypeStruct]:
        """What a kernel writes: out, lse, parts of cut rows, their lse, and which rows are cut, for `mosaic_merge`."""
        array, slots = jax.ShapeDtypeStruct, 2 * self.groups
        return [
            array((self.rows * lines, v_width), jnp.bfloat16),
            array((self.rows * lines,), jnp.float32),
            array((slots * lines, v_width), jnp.float32),
            array((slots * lines,), jnp.float32),
            array((self.rows if self.leads_by_row else self.groups, 3), jnp.int32),
        ]


@dataclass(frozen=True)
class Rows:
    """Inside the kernel: the refs of `ranges`, of `ids` and of the table of cut rows, and the worker's group."""

    call: Call
    ranges: Any
    ids: Any
    leads: Any
    group: Any

    def find_share(self, ref) -> None:
        """Leaves the group's share in shared memory, for `mosaic_schedule.read_share` behind a barrier."""
        call, stream = self.call, {}
        if isinstance(call.source, TokenStream):
            stream = {"indptr_ref": self.ids[1], "capacity": self.ids[0].shape[0]}
        mosaic_schedule.find_share(
            self.ranges, call.rows, self.group, call.groups, ref, width_tokens=call.width_tokens, s_q=call.s_q,
            reach=call.reach, cut_evenly=False, **stream,
        )  # fmt: skip
        plgpu.commit_smem()

    def visible(self, b):
        """(first, end) of the KV positions that some query of row b sees."""
        call, ranges = self.call, self.ranges
        q_stop = ranges[1][b] if call.q_start is None else ranges[2][b] + call.s_q
        start, stop = ranges[0][b], jnp.minimum(ranges[1][b], call.width_tokens)
        if isinstance(call.source, TokenStream):
            ids, indptr = self.ids
            stop = jnp.minimum(stop, start + jnp.minimum(indptr[b + 1], ids.shape[0]) - indptr[b])
        start = jnp.maximum(start, 0)
        if call.reach is not None:
            start = jnp.maximum(start, q_stop - call.reach)
        return start, stop if call.q_start is None else jnp.minimum(stop, q_stop)

    def q_position(self, b):
        """Position of row b's first query."""
        return (self.ranges[1][b] - self.call.s_q) if self.call.q_start is None else self.ranges[2][b]

    def for_segments(self, share: Share, run, carry, *, empty_rows: bool):
        """Calls run(b, tile_start, tile_stop, first_tile, tiles, carry) for each part of a row in this share.

        empty_rows: also, without tiles, for the rows that see nothing and start in this share.
        """

        def visit(b, carry):
            first_tile, tiles = mosaic_schedule.tile_range(*self.visible(b))
            start, stop = mosaic_schedule.segment_tiles(share, b, tiles)
            wanted = stop > start
            if empty_rows:
                wanted |= (tiles == 0) & mosaic_schedule.owns_start(share, b)
            return lax.cond(wanted, lambda c: run(b, start, stop, first_tile, tiles, c), lambda c: c, carry)

        return lax.fori_loop(share.first, jnp.minimum(share.last + 1, self.call.rows), visit, carry)

    def page_entry(self, b, column, fits):
        """Entry of page `column` of row b; the padding page's, 0, for an id that names nothing or an entry not fits(entry)."""
        entry = paged_mosaic.page_entry(self.call.source, self.ids, b, column)
        return jnp.where((entry >= 0) & fits(entry), entry, 0)

    def tokens(self, b, kv_first, kv_stop, offset, num_blocks: int) -> mosaic_gather.Tokens:
        """Where the rows of row b lie whose block in a page is `offset`, where they come one by one."""
        line = mosaic_gather.line(self.call.source, self.ids, self.ranges[0], b)
        return mosaic_gather.Tokens(self.call.source, self.ids, line, kv_first, kv_stop, offset, num_blocks)

    def begin_leads(self, share: Share, mine) -> None:
        """Tells the merge, where `mine`, which row this group cuts; by row, `tell_lead` does."""
        if self.call.leads_by_row:
            return

        @pl.when(mine)
        def tell():
            b = jnp.minimum(share.last, self.call.rows - 1)
            _, tiles = mosaic_schedule.tile_range(*self.visible(b))
            start, stop = mosaic_schedule.segment_tiles(share, b, tiles)
            leads = (share.last < self.call.rows) & (stop > 0) & (stop < tiles) & (start == 0)
            self._write_lead(self.group, jnp.where(leads, b, -1), share, tiles)

    def tell_lead(self, share: Share, mine, b, start, stop, tiles) -> None:
        """The same of a part of row b, if the table is by row."""
        if self.call.leads_by_row:
            pl.when(mine & (start == 0))(
                lambda: self._write_lead(b, jnp.where(stop < tiles, b, -1), share, tiles)
            )

    def _write_lead(self, index, row, share: Share, tiles) -> None:
        """The parts of `row`, or of none if -1, lie in this group and those to the last."""
        last = lax.div(mosaic_schedule.row_end(share, self.group, tiles) - 1, share.size)
        self.leads[index, 0], self.leads[index, 1], self.leads[index, 2] = row, self.group, last
