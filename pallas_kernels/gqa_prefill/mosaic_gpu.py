"""Paged GQA attention of chunks for Hopper in Pallas Mosaic GPU: softmax of one half beside products of another.

A work item is a tile of lines (query, query head) that share a KV head, and all the positions that they see. Blocks draw
items from a device-side queue. One warpgroup loads: the queries of an item, and K and V in blocks of positions straight from
the pool's pages, by TMA, into rings. The others own 64 lines each and compute (`pallas_kernels.mosaic_prefill`). Blocks with
positions that some line does not see come first; the others have no masks.

Blocks are positions, not places: block j holds positions j * keys onward, wherever its pages lie. In shared memory a block
lies in chunks of 64 columns whose rows are 128 bytes, the width of the swizzle, so that any part of a page is a TMA box.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels import device, paged_mosaic
from pallas_kernels import mosaic_prefill as pipeline
from pallas_kernels.mla_decode import mosaic_gather
from pallas_kernels.mla_prefill import mosaic_inline as inline
from pallas_kernels.mosaic_prefill import ACC, CHUNK, HALF, MASKED, ROWS, SWIZZLED, across, filled
from pallas_kernels.read_source import ReadSource
from pallas_kernels.xla_attention import merge_partials

if TYPE_CHECKING:
    from pallas_kernels.gqa_decode.api import KVScales

HEAD_DIMS = (64, 128, 256)
_SMEM_BYTES = 225 << 10  # what queries and rings may take
_SECTION_BYTES = 44 << 20  # K and V that are worked on together: see `mla_prefill.schedule`
_MOST_PARTS = 16  # of a tile's positions
_FIELDS = 16  # an Item as int32 in shared memory, padded


@dataclass(frozen=True)
class TuningConfig:
    """Launch parameters; None for what the kernel takes by itself. Tests run small forms of it by them, and the timings of
    docs/gqa_prefill.md other ones.

    `keys`: positions of a step, 64 or 128. `stages`: of K and of V in flight. `queries`: items whose queries lie in shared
    memory, 1 or 2. `warpgroups`: that compute, 2 or 3. `parts`: work items among which the positions of a tile are dealt.
    `blocks`: thread blocks.
    """

    keys: int | None = None
    stages: int | None = None
    queries: int | None = None
    warpgroups: int | None = None
    parts: int | None = None
    blocks: int | None = None


class Item(NamedTuple):
    """A work item: lines ``i < lines`` of KV head `head`, line i being head ``i % sharing`` of token ``first + i // sharing``.

    Its token t sits at position ``q_position + t``; those from `valid` on are padding. Lines see positions from `begin` to
    below `end`, in `steps` blocks: `masked` ones that some line does not see whole, of which `high` go down from block `last`,
    then those upward from block `lowest`.
    """

    first: Array
    lines: Array
    head: Array
    q_position: Array
    valid: Array
    part: Array
    begin: Array
    end: Array
    last: Array
    lowest: Array
    high: Array
    masked: Array
    steps: Array

    @classmethod
    def read(cls, ref) -> "Item":  # type: ignore[no-untyped-def]
        return cls(*(ref[i] for i in range(len(cls._fields))))

    @classmethod
    def stop(cls) -> "Item":
        """What stands for the end of the queue: an item without lines."""
        return cls(*(jnp.int32(0) for _ in cls._fields))

    def block(self, i):  # type: ignore[no-untyped-def]
        """Which block of positions step i is for."""
        return jnp.where(i < self.high, self.last - i, self.lowest + (i - self.high))


def gqa_prefill_mosaic(
    q: Float[Array, "rows tokens heads head_dim"],
    buffer: UInt8[Array, " total_bytes"],
    source: ReadSource,
    k_offset: Int32[Array, ""],
    v_offset: Int32[Array, ""] | None,
    q_start: Int32[Array, " rows"],
    *,
    kv_dtype: jnp.dtype,
    num_kv_heads: int,
    v_head_dim: int,
    sm_scale: float,
    scales: "KVScales | None" = None,
    window: int | None = None,
    sinks: Float[Array, " heads"] | None = None,
    logit_cap: float | None = None,
    relative_bias: Float[Array, "rows tokens heads extent"] | None = None,
    config: TuningConfig | None = None,
) -> tuple[Float[Array, "rows tokens heads v_head_dim"], Float[Array, "rows tokens heads"]]:
    """See `pallas_kernels.gqa_prefill.api.gqa_prefill`. Hopper GPUs; page tables and virtual ids over pages of 8 to 128.

    q and KV in bfloat16, heads 64, 128 or 256 wide, no relative bias. Temporaries where there are few tiles of queries: f32
    parts of the output, 264 tiles of them at most.
    """
    rows, tokens, heads, head_dim = q.shape
    sharing = heads // num_kv_heads
    _decline(q, source, kv_dtype, v_head_dim, sharing, sm_scale, relative_bias)
    ids = mosaic_gather.id_operands(source)
    if rows * tokens == 0:
        return jnp.zeros((rows, tokens, heads, v_head_dim), q.dtype), jnp.zeros(
            (rows, tokens, heads), jnp.float32
        )
    page_size = source.page_size
    config = config or TuningConfig()
    plan = _Plan.make(config, head_dim, sharing, window, page_size)
    keys, stages, q_slots, taken, warpgroups = (
        plan.keys, plan.stages, plan.queries, plan.tokens, plan.warpgroups
    )  # fmt: skip
    chunks = head_dim // CHUNK
    row_width = num_kv_heads * head_dim * (1 if v_offset is not None else 2)
    v_column = 0 if v_offset is not None else num_kv_heads * head_dim
    pool = lax.bitcast_convert_type(buffer.reshape(-1, 2), jnp.bfloat16).reshape(-1, page_size, row_width)
    num_blocks = pool.shape[0]
    grouped = q.reshape(rows * tokens, num_kv_heads, sharing, head_dim)
    offsets = [jnp.asarray(x, jnp.int32).reshape(1) for x in (k_offset, v_offset) if x is not None]
    load_rows = min(page_size, keys)  # of one TMA
    loads = keys // load_rows
    tile_tokens = warpgroups * taken
    tiles = -(-tokens // tile_tokens)
    pairs = rows * num_kv_heads
    cover = min(ids[0].shape[1] * page_size, 2**31 - 2 * keys)
    cores, whole_items = config.blocks or device.core_count(), pairs * tiles
    # Too few for the card: the positions of each are dealt to several blocks. Not by the width of the table, on which results
    # must not depend.
    parts = config.parts or (1 if 2 * whole_items > cores else min(2 * cores // whole_items, _MOST_PARTS))
    items = whole_items * parts
    if items >= 2**31 - 2**20:
        raise NotImplementedError(f"{items} tiles of queries are too many to count in int32")
    sink_lines = []
    if sinks is not None and parts == 1:
        line = np.arange(HALF) % sharing + np.arange(num_kv_heads)[:, None] * sharing
        sink_lines = [sinks.astype(jnp.float32)[line]]
    blocks = min(cores, items)
    log2e = math.log2(math.e)
    to_log2 = log2e if logit_cap is not None else sm_scale * log2e
    vector = lambda value: plgpu.layout_cast(jnp.full((HALF,), value, jnp.int32), ROWS)

    def kernel(*refs):
        remaining = iter(refs)
        take = lambda n: [next(remaining) for _ in range(n)]
        q_ref, pool_ref = take(2)
        offset_refs, sink_refs = take(len(offsets)), take(len(sink_lines))
        kv_start_ref, kv_end_ref, q_start_ref = take(3)
        id_refs = take(len(ids))
        queue_ref, out_ref, lse_ref = take(3)
        q_box, k_box, v_box, item_smem, ticket_smem = take(5)
        q_ready, q_free, k_ready, k_free, v_ready, v_landed, v_free, turn = take(8)
        me = lax.axis_index("role")

        def page_entry(b, column, largest):
            """Entry of page `column` of row b; the padding page's, 0, for an id that names nothing."""
            entry = paged_mosaic.page_entry(source, id_refs, b, column)
            block = entry + largest
            return jnp.where((entry >= 0) & (block >= 0) & (block < num_blocks), entry, 0)

        def item_of(ticket):
            """(item, its row, begin and end of what any query of that row sees)."""
            section = queue_ref[1]  # pairs of a section
            size = section * (tiles * parts)
            number = lax.div(ticket, size)
            within, first_pair = ticket - number * size, number * section
            here = jnp.minimum(section, pairs - first_pair)
            behind = lax.div(within, here)
            pair, part = first_pair + (within - behind * here), lax.rem(behind, parts)
            tile = tiles - 1 - lax.div(behind, parts)  # the longest first
            b = lax.div(pair, num_kv_heads)
            begin, end, origin = jnp.maximum(kv_start_ref[b], 0), kv_end_ref[b], q_start_ref[b]
            token = tile * tile_tokens
            position, present = origin + token, jnp.minimum(tokens - token, tile_tokens)
            valid = jnp.clip(end - position, 0, present)
            last_position = position + valid - 1
            row_end = jnp.minimum(jnp.minimum(end, cover), origin + tokens)
            stop = jnp.minimum(row_end, last_position + 1)
            row_begin = start = whole_from = begin
            if window is not None:
                row_begin = jnp.maximum(begin, origin - (window - 1))
                start = jnp.maximum(begin, position - (window - 1))
                whole_from = jnp.maximum(begin, last_position - (window - 1))
            some = (valid > 0) & (stop > start)
            lowest, last = lax.div(start, keys), lax.div(stop - 1, keys)
            steps = jnp.where(some, last + 1 - lowest, 0)
            if parts > 1:
                of, left = lax.div(steps, parts), lax.rem(steps, parts)
                lowest += part * of + jnp.minimum(part, left)
                steps = of + jnp.where(part < left, 1, 0)
                last = lowest + steps - 1
                start, stop = jnp.maximum(start, lowest * keys), jnp.minimum(stop, (last + 1) * keys)
            # Blocks from `lower` to below `upper` are seen whole by every line.
            upper = lax.div(jnp.minimum(stop, position + 1), keys)
            lower = lax.div(whole_from + (keys - 1), keys)
            high = jnp.clip(last + 1 - upper, 1, jnp.maximum(steps, 1))
            masked = jnp.minimum(high + jnp.maximum(lower - lowest, 0), steps)
            item = Item(
                b * tokens + token, present * sharing, pair - b * num_kv_heads, position, valid, part, start, stop, last, lowest,
                high, masked, steps,
            )  # fmt: skip
            return item, b, row_begin, row_end

        @pl.when(me == warpgroups)
        def load():
            plgpu.set_max_registers(plan.registers[0], action="decrease")
            k_block, v_block = offset_refs[0][0], offset_refs[-1][0]
            largest = jnp.maximum(k_block, v_block)

            def claim(free, n):
                """Waits until the ring's next slot is free and returns it."""
                slot = lax.rem(n, stages)
                pl.when(n >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                return slot

            def load_item(item, b, row_begin, row_end, queries, n):
                first_column, last_column = lax.div(row_begin, page_size), lax.div(row_end - 1, page_size)

                def entries_of(i):
                    column = lax.div(item.block(i) * keys, page_size)
                    # Pages outside what the row sees load a neighbour again: their ids may be anything.
                    return tuple(
                        page_entry(b, jnp.clip(column + j, first_column, last_column), largest)
                        for j in range(loads)
                    )

                def load_rows_of(box, entries, block, first_row, column, barrier):
                    for j, entry in enumerate(entries):
                        for c in range(chunks):
                            plgpu.copy_gmem_to_smem(
                                pool_ref.at[
                                    entry + block,
                                    pl.ds(first_row, load_rows),
                                    pl.ds(column + c * CHUNK, CHUNK),
                                ],
                                box.at[c, pl.ds(j * load_rows, load_rows)],
                                barrier,
                            )

                def one(i, carry):
                    n, entries = carry
                    position = item.block(i) * keys
                    row = lax.rem(position, page_size) if page_size > keys else 0
                    column = item.head * head_dim
                    slot = claim(k_free, n)
                    load_rows_of(k_box.at[slot], entries, k_block, row, column, k_ready.at[slot])
                    if q_slots == 1:
                        pl.when(i == 0)(queries)
                    slot = claim(v_free, n)
                    cut = (position + keys > row_end) | (position < row_begin)

                    @pl.when(jnp.logical_not(cut))
                    def whole():
                        load_rows_of(
                            v_box.at[slot], entries, v_block, row, v_column + column, v_ready.at[slot]
                        )

                    @pl.when(cut)
                    def in_part():
                        # P is 0 outside what the row sees, but 0 * NaN is NaN: V must be 0 there.
                        load_rows_of(v_box.at[slot], entries, v_block, row, v_column + column, v_landed)
                        plgpu.barrier_wait(v_landed)
                        inline.zero_rows(v_box.at[slot], row_end - position, SWIZZLED, row_begin - position)
                        plgpu.commit_smem()
                        for _ in range(chunks * loads):
                            plgpu.barrier_arrive(v_ready.at[slot])

                    return n + 1, entries_of(jnp.minimum(i + 1, item.steps - 1))

                if q_slots > 1:
                    queries()
                n, _ = lax.fori_loop(0, item.steps, one, (n, entries_of(0)))
                return n

            def write_item(m, item):
                """The place is that of item m - 2, which both warpgroups have left when one of them may read queries m - 1."""
                if q_slots > 1:
                    wait_queries(m)
                inline.store_words(item_smem.at[lax.rem(m, 2)], item)

            def wait_queries(m):
                """Waits until queries m may be loaded."""
                pl.when(m >= q_slots)(lambda: plgpu.barrier_wait(q_free.at[lax.rem(m, q_slots)]))

            def hand_over(m):
                """Items without steps, and the end: nothing is loaded."""
                if q_slots == 1:
                    wait_queries(m)
                for _ in range(warpgroups * chunks):
                    plgpu.barrier_arrive(q_ready.at[lax.rem(m, q_slots)])

            def visit(carry):
                ticket, m, n = carry
                drawn = inline.draw_ticket(queue_ref)
                item, b, row_begin, row_end = item_of(ticket)
                write_item(m, item)

                def queries():
                    slot = lax.rem(m, q_slots)
                    if q_slots == 1:
                        wait_queries(m)
                    for w in range(warpgroups):
                        for c in range(chunks):
                            box = q_box.at[slot, w, c]
                            plgpu.copy_gmem_to_smem(
                                q_ref.at[
                                    pl.ds(item.first + w * taken, taken),
                                    item.head,
                                    :,
                                    pl.ds(c * CHUNK, CHUNK),
                                ],
                                box.at[pl.ds(0, taken)] if plan.held > taken else box,
                                q_ready.at[slot],
                            )

                pl.when(item.steps == 0)(lambda: hand_over(m))
                n = lax.cond(
                    item.steps > 0,
                    lambda n: load_item(item, b, row_begin, row_end, queries, n),
                    lambda n: n,
                    n,
                )
                return inline.ticket(drawn, ticket_smem) + blocks, m + 1, n

            start = lax.axis_index("block"), jnp.int32(0), jnp.int32(0)
            _, m, _ = lax.while_loop(lambda carry: carry[0] < items, visit, start)
            write_item(m, Item.stop())
            hand_over(m)

        @pl.when(me < warpgroups)
        def compute():
            plgpu.set_max_registers(plan.registers[1], action="increase")
            pl.when(me == warpgroups - 1)(lambda: plgpu.barrier_arrive(turn.at[0]))

            def token_of_line():
                line = plgpu.broadcasted_iota(jnp.int32, (HALF,), 0, layout=ROWS)
                return lax.div(line, vector(sharing)) + me * taken

            def capped(s):
                if logit_cap is None:
                    return s
                # tanh by exp2: the hardware's own tanh has 11 bits.
                return logit_cap - (2 * logit_cap) / (1 + jnp.exp2(s * (2 * sm_scale * log2e / logit_cap)))

            def mask(s, item, i):
                position = item.block(i) * keys
                at = token_of_line() + item.q_position
                upper = jnp.minimum(at, item.end - 1) - position
                lower = vector(item.begin - position)
                if window is not None:
                    lower = jnp.maximum(lower, at - (window - 1) - position)
                return inline.keep_columns(s, lower, upper)

            def attend(item, m, n):
                """(sum of P V, maximum, sum of P, the item again) of an item whose K and V begin at place n of the rings."""

                def queries_read():
                    later = Item.read(item_smem.at[lax.rem(m, 2)])  # not held in registers until now
                    plgpu.barrier_arrive(q_free.at[lax.rem(m, q_slots)])
                    return later

                return pipeline.attend(
                    q_box.at[lax.rem(m, q_slots), me],
                    pipeline.Rings(k_box, v_box, k_ready, k_free, v_ready, v_free, turn),
                    n,
                    item.steps,
                    me=me,
                    following=lax.rem(me + 1, warpgroups),
                    v_width=head_dim,
                    to_log2=to_log2,
                    mask=lambda s, i: mask(s, Item.read(item_smem.at[lax.rem(m, 2)]), i),
                    masked=item.masked,
                    score=capped,
                    queries_read=queries_read,
                )

            def visit(carry):
                m, n, item = carry

                def store(item, out, lse):
                    first, head = item.first + me * taken + item.part * (rows * tokens), item.head * sharing
                    lines = jnp.minimum(item.lines - me * (taken * sharing), taken * sharing)
                    inline.store_rows(out_ref, out.astype(out_ref.dtype), first, head, lines, sharing)
                    inline.store_rows(lse_ref, lse, first, head, lines, sharing)

                @pl.when(item.steps > 0)
                def some():
                    acc, peak, total, later = attend(item, m, n)
                    # A padding query may be NaN, and then so are its sums.
                    seen = (total > 0) & (token_of_line() < later.valid)
                    if sink_lines:
                        sink = plgpu.load(sink_refs[0].at[later.head], layout=ROWS, optimized=False)
                        sink = jnp.maximum(sink * (log2e / to_log2), MASKED)
                        new_peak = jnp.maximum(peak, sink)
                        decay = jnp.exp2((peak - new_peak) * to_log2)
                        total = total * decay + jnp.exp2((sink - new_peak) * to_log2)
                        peak, acc = new_peak, acc * across(decay, acc)
                    safe = jnp.where(seen, total, 1)
                    lse = jnp.where(seen, (peak * to_log2 + jnp.log2(safe)) * math.log(2), jnp.inf)
                    store(later, jnp.where(across(seen, acc), acc * across(1 / safe, acc), 0), lse)

                @pl.when(item.steps == 0)
                def none():
                    plgpu.barrier_arrive(q_free.at[lax.rem(m, q_slots)])
                    store(item, filled((HALF, head_dim), 0, ACC), filled((HALF,), jnp.inf, ROWS))

                return m + 1, n + item.steps, wait_item(m + 1)

            def wait_item(m):
                plgpu.barrier_wait(q_ready.at[lax.rem(m, q_slots)])
                return Item.read(item_smem.at[lax.rem(m, 2)])

            lax.while_loop(
                lambda carry: carry[2].lines > 0, visit, (jnp.int32(0), jnp.int32(0), wait_item(jnp.int32(0)))
            )

    def ring(*dims):
        return plgpu.SMEM((*dims, CHUNK), jnp.bfloat16, transforms=SWIZZLED)

    barrier = plgpu.Barrier
    call = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct(
                (parts * rows * tokens, heads, head_dim), jnp.bfloat16 if parts == 1 else jnp.float32
            ),
            jax.ShapeDtypeStruct((parts * rows * tokens, heads), jnp.float32),
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="role",
        scratch_types=[
            ring(q_slots, warpgroups, chunks, plan.held, sharing),
            ring(stages, chunks, keys),
            ring(stages, chunks, keys),
            plgpu.SMEM((2, _FIELDS), jnp.int32),
            plgpu.SMEM((1,), jnp.int32),
            barrier(num_arrivals=warpgroups * chunks, num_barriers=q_slots),
            barrier(num_arrivals=warpgroups, num_barriers=q_slots),
            barrier(num_arrivals=chunks * loads, num_barriers=stages),
            barrier(num_arrivals=warpgroups, num_barriers=stages),
            barrier(num_arrivals=chunks * loads, num_barriers=stages),
            barrier(num_arrivals=chunks * loads),
            barrier(num_arrivals=warpgroups, num_barriers=stages),
            barrier(num_barriers=warpgroups),
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    bounds = source.kv_start, source.kv_end, q_start
    queue = jax.new_ref(jnp.stack([jnp.int32(0), _section(source, pairs, 4 * head_dim)]))
    out, lse = call(grouped, pool, *offsets, *sink_lines, *bounds, *ids, queue)
    if parts > 1:
        out, lse = merge_partials(out.reshape(parts, -1, heads, head_dim), lse.reshape(parts, -1, heads))
        if sinks is not None:
            some = jnp.isfinite(lse)
            joined = jnp.where(some, jnp.logaddexp(lse, sinks.astype(jnp.float32)), jnp.inf)
            out, lse = out * jnp.where(some, jnp.exp(lse - joined), 0)[..., None], joined
        out = out.astype(q.dtype)
    return out.reshape(rows, tokens, heads, head_dim), lse.reshape(rows, tokens, heads)


@dataclass(frozen=True)
class _Plan:
    """The kernel's sizes. tokens: whose lines a warpgroup owns, 64 at most; there is room for those of `held`."""

    keys: int
    stages: int
    queries: int
    warpgroups: int
    tokens: int
    held: int
    registers: tuple[int, int]  # of a thread that loads, and of one that computes

    @staticmethod
    def make(
        config: TuningConfig, head_dim: int, sharing: int, window: int | None, page_size: int
    ) -> "_Plan":
        tokens = held = HALF // sharing
        # A WGMMA reads 64 lines, and chunks begin at whole swizzle patterns of 8 lines.
        while held * sharing < HALF or held * sharing % 8:
            held += 1
        # Of a wide block few positions lie in a narrow window.
        narrow = window is not None and window <= 256
        keys = config.keys or (64 if narrow or head_dim > 128 else 128)
        stages = config.stages or (2 if head_dim > 64 else 4)
        warpgroups = config.warpgroups or (3 if head_dim == 64 else 2)
        one = 2 * warpgroups * held * sharing * head_dim  # bytes of an item's queries
        rings = 4 * stages * keys * head_dim
        queries = config.queries or (2 if rings + 2 * one <= _SMEM_BYTES else 1)
        if rings + queries * one > _SMEM_BYTES:
            raise NotImplementedError(
                f"{sharing} heads of {head_dim} that share a KV head need {rings + queries * one} bytes of shared "
                f"memory, there are {_SMEM_BYTES}"
            )
        if warpgroups == 3:
            registers = (32, 160)
        else:
            # Ids of many pages a block take registers.
            registers = (56, 224) if head_dim == 64 or page_size <= 16 else (40, 232)
        return _Plan(keys, stages, queries, warpgroups, tokens, held, registers)


def _section(source: ReadSource, pairs: int, position_bytes: int) -> Array:
    """How many pairs of row and KV head are worked on together, so that their K and V stay in L2."""
    length = jnp.clip(source.kv_end - jnp.maximum(source.kv_start, 0), 0).astype(jnp.float32).mean()
    fit = jnp.maximum(_SECTION_BYTES / jnp.maximum(length * position_bytes, 1), 1)
    sections = jnp.ceil(pairs / fit)  # of equal size
    return jnp.ceil(pairs / sections).astype(jnp.int32)


def _decline(q, source, kv_dtype, v_head_dim, sharing, sm_scale, relative_bias) -> None:  # type: ignore[no-untyped-def]
    paged_mosaic.decline(1, source, sm_scale)
    head_dim = q.shape[3]
    if q.dtype != jnp.bfloat16 or jnp.dtype(kv_dtype) != jnp.bfloat16:
        raise NotImplementedError(f"q and KV must be bfloat16, got {q.dtype} and {jnp.dtype(kv_dtype)}")
    if head_dim not in HEAD_DIMS or v_head_dim != head_dim:
        raise NotImplementedError(
            f"heads of K and V must be {', '.join(map(str, HEAD_DIMS))} wide alike, got {head_dim} and {v_head_dim}"
        )
    if sharing > HALF:
        raise NotImplementedError(f"at most {HALF} heads may share a KV head, got {sharing}")
    if relative_bias is not None:
        raise NotImplementedError("it adds no relative bias")
