"""What the Triton kernels of paged attention share: bounds, ids, the dealing of work, and the merge of its parts.

The operations' launchers import it when it is first needed: triton may be absent.

Work is dealt on the device. Row b of the batch costs ``blocks(b) + ROW_COST`` units; rows lie end to end on a line, and
slice g of it goes to one program for each group of columns. A column is one query head of one query; a group holds COLS
columns that read one KV head. What lies whole in one slice is final; a row that is cut leaves f32 partials, in slot 2g if
it is the first row of slice g, else in 2g + 1, and `merge` combines them.
"""

import triton
import triton.language as tl

TABLE, STREAM, VIRTUAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # kinds of source
ROW_COST = tl.constexpr(3)  # in KV blocks: loading q and storing the result


@triton.jit
def span(b, ok, kv_start, kv_end, q_start, indptr, SOURCE: tl.constexpr, COVER: tl.constexpr, Q_STOP: tl.constexpr,
         REACH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """(start, stop, first KV block, number of KV blocks) of rows b: the positions that a query of theirs can see.

    COVER: positions that a table row holds, or ids that the stream holds. Q_STOP: end of the queries less `q_start`.
    REACH: positions before the end of the queries that some query sees, 0 for all.
    """
    begin = tl.load(kv_start + b, mask=ok, other=0)
    stop = tl.load(kv_end + b, mask=ok, other=0)
    if SOURCE == STREAM:
        end = tl.minimum(tl.load(indptr + b + 1, mask=ok, other=0), COVER)
        stop = tl.minimum(stop, begin + end - tl.load(indptr + b, mask=ok, other=0))
    else:
        stop = tl.minimum(stop, COVER)
    q_stop = tl.load(q_start + b, mask=ok, other=0) + Q_STOP
    stop = tl.minimum(stop, q_stop)
    start = tl.maximum(begin, 0)
    if REACH > 0:
        start = tl.maximum(start, q_stop - REACH)
    first = start // BLOCK
    return start, stop, first, tl.where(stop > start, (stop + BLOCK - 1) // BLOCK - first, 0)


@triton.jit
def entries(pos, live, b, kv_start, ids, indptr, row_ids, v2p, block_offset, SOURCE: tl.constexpr, PS: tl.constexpr,
            WIDTH: tl.constexpr, REQUESTS: tl.constexpr, NUM_VIRTUAL: tl.constexpr, BLOCKS_PER_PAGE: tl.constexpr,
            NUM_BLOCKS: tl.constexpr):  # fmt: skip
    """Entry of the page of each live position. Ids that name nothing lead to the padding page, entry 0.

    block_offset: the largest one that will be added to an entry.
    """
    if SOURCE == TABLE:
        entry = tl.load(ids + b.to(tl.int64) * WIDTH + pos // PS, mask=live, other=0)
    elif SOURCE == STREAM:
        token = tl.load(ids + tl.load(indptr + b) + pos - tl.load(kv_start + b), mask=live, other=0)
        entry = tl.where(token < 0, -1, token // PS)
    else:
        request = tl.minimum(tl.maximum(tl.load(row_ids + b), 0), REQUESTS - 1).to(tl.int64)
        page = tl.load(ids + request * WIDTH + pos // PS, mask=live, other=0)
        named = live & (page >= 0) & (page < NUM_VIRTUAL)
        entry = tl.maximum(tl.load(v2p + tl.where(named, page, 0), mask=named, other=0), 0) * BLOCKS_PER_PAGE
    block = entry + block_offset
    # A sum past 2^31 wraps below 0.
    return tl.where((entry >= 0) & (block >= 0) & (block < NUM_BLOCKS), entry, 0)


@triton.jit
def deal(kv_start, kv_end, q_start, indptr, ROWS: tl.constexpr, ROWS_P2: tl.constexpr, SLICES: tl.constexpr,
         SOURCE: tl.constexpr, COVER: tl.constexpr, Q_STOP: tl.constexpr, REACH: tl.constexpr,
         BLOCK: tl.constexpr):  # fmt: skip
    """(units of every row, units in a slice)."""
    lane = tl.arange(0, ROWS_P2)
    ok = lane < ROWS
    _, _, _, blocks = span(lane, ok, kv_start, kv_end, q_start, indptr, SOURCE, COVER, Q_STOP, REACH, BLOCK)
    units = tl.where(ok, blocks + ROW_COST, 0)
    return units, (tl.sum(units, 0) + SLICES - 1) // SLICES


@triton.jit
def columns(group, S_Q: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, COLS: tl.constexpr):
    """(query, query head, whether there is one) of each column of a group, and the group's KV head."""
    return some_columns(group, tl.arange(0, COLS), S_Q, HEADS, KV_HEADS, COLS)


@triton.jit
def some_columns(
    group, local, S_Q: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, COLS: tl.constexpr
):
    """The same of the columns `local` of a group."""
    SHARING: tl.constexpr = HEADS // KV_HEADS
    TILES: tl.constexpr = (S_Q * SHARING + COLS - 1) // COLS
    kv_head = group // TILES
    column = group % TILES * COLS + local
    return column // SHARING, kv_head * SHARING + column % SHARING, column < S_Q * SHARING, kv_head


@triton.jit
def capped(s, CAP: tl.constexpr):
    """CAP * tanh(s / CAP), for a positive CAP. By exp2: the hardware's own tanh has 11 bits."""
    return CAP * (1 - 2 / (1 + tl.exp2(s * (2.8853900817779268 / CAP))))  # 2 * log2(e)


@triton.jit
def merge(indptr, kv_start, kv_end, q_start, part, part_lse, out, lse,
          ROWS: tl.constexpr, ROWS_P2: tl.constexpr, S_Q: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
          COLS: tl.constexpr, GROUPS: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr, V: tl.constexpr,
          V_P2: tl.constexpr, V_TILE: tl.constexpr, CHUNK: tl.constexpr, LINES: tl.constexpr, SOURCE: tl.constexpr,
          COVER: tl.constexpr, Q_STOP: tl.constexpr, REACH: tl.constexpr):  # fmt: skip
    """Program (row, LINES columns of a group, tile of V): replaces `out` and `lse` of a row that was cut by its parts' sum.

    CHUNK parts are read at a time.
    """
    b = tl.program_id(0)
    group = tl.program_id(1) // (COLS // LINES)
    units, share = deal(
        kv_start, kv_end, q_start, indptr, ROWS, ROWS_P2, SLICES, SOURCE, COVER, Q_STOP, REACH, BLOCK
    )  # fmt: skip
    lane = tl.arange(0, ROWS_P2)
    base = tl.sum(tl.where(lane < b, units, 0), 0)
    _, _, _, blocks = span(
        b, b < ROWS, kv_start, kv_end, q_start, indptr, SOURCE, COVER, Q_STOP, REACH, BLOCK
    )
    # Slices that hold blocks of this row: its units ROW_COST .. ROW_COST + blocks - 1.
    g_first = (base + ROW_COST) // share
    g_last = (base + ROW_COST + blocks - 1) // share
    if (blocks > 0) & (g_last > g_first):
        local = tl.program_id(1) % (COLS // LINES) * LINES + tl.arange(0, LINES)
        query, head, used, _ = some_columns(group, local, S_Q, HEADS, KV_HEADS, COLS)
        at_v = tl.program_id(2) * V_TILE + tl.arange(0, V_TILE)
        peak = tl.full((LINES,), float("-inf"), tl.float32)
        total = tl.zeros((LINES,), tl.float32)
        acc = tl.zeros((LINES, V_TILE), tl.float32)
        for g_chunk in range(g_first, g_last + 1, CHUNK):
            g = g_chunk + tl.arange(0, CHUNK)
            there = g <= g_last
            # The first row of slice g is this one where the slice starts at or after it.
            slot = (2 * g + (g * share < base).to(tl.int32)) * GROUPS + group
            at_part = slot[:, None] * COLS + local[None, :]
            log = tl.load(part_lse + at_part, mask=there[:, None], other=float("-inf"))
            next_peak = tl.maximum(peak, tl.max(log, 0))
            shift = tl.where(next_peak == float("-inf"), 0.0, next_peak)
            weight = tl.exp2(log - shift[None, :])
            decay = tl.exp2(peak - shift)
            values = tl.load(
                part + at_part[:, :, None] * V_P2 + at_v[None, None, :], mask=there[:, None, None], other=0.0
            )
            acc = acc * decay[:, None] + tl.sum(values * weight[:, :, None], 0)
            total = total * decay + tl.sum(weight, 0)
            peak = next_peak
        empty = total == 0
        acc = acc * tl.where(empty, 0.0, 1 / tl.where(empty, 1.0, total))[:, None]
        at_out = (b.to(tl.int64) * S_Q + query) * HEADS + head
        tl.store(
            out + at_out[:, None] * V + at_v[None, :],
            acc.to(out.dtype.element_ty),
            mask=used[:, None] & (at_v < V)[None, :],
        )
        if tl.program_id(2) == 0:
            log = peak + tl.log2(tl.where(empty, 1.0, total))
            tl.store(lse + at_out, tl.where(empty, float("inf"), log * 0.6931471805599453), mask=used)
