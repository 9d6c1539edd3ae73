"""Triton kernels of paged MLA attention. `triton.py` imports them when they are first needed: triton may be absent.

Scores are kept transposed: S^T = K Q^T and O^T = V^T P^T, the KV tile being the left operand of both products. Few
heads then cost few columns instead of padding a tile of 64 rows, and the tile that served as K serves again as V
without another read.

Work is dealt on the device. Row b of the batch costs ``blocks(b) + ROW_COST`` units; rows lie end to end on a line, and
slice g of it goes to one program for each group of columns (a column is a query head). What lies whole in one slice is
final; a row that is cut leaves f32 partials, in slot 2g if it is the first row of slice g, else in 2g + 1, and `merge`
combines them.
"""

import triton
import triton.language as tl

TABLE, STREAM, VIRTUAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # kinds of source
ROW_COST = tl.constexpr(3)  # in KV blocks: loading q and storing the result


@triton.jit
def _span(b, ok, kv_start, kv_end, q_start, indptr, SOURCE: tl.constexpr, COVER: tl.constexpr, Q_STOP: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """(start, stop, first KV block, number of KV blocks) of rows b: the positions that a query of theirs can see.

    COVER: positions that a table row holds, or ids that the stream holds. Q_STOP: end of the queries less `q_start`.
    """
    begin = tl.load(kv_start + b, mask=ok, other=0)
    stop = tl.load(kv_end + b, mask=ok, other=0)
    if SOURCE == STREAM:
        end = tl.minimum(tl.load(indptr + b + 1, mask=ok, other=0), COVER)
        stop = tl.minimum(stop, begin + end - tl.load(indptr + b, mask=ok, other=0))
    else:
        stop = tl.minimum(stop, COVER)
    stop = tl.minimum(stop, tl.load(q_start + b, mask=ok, other=0) + Q_STOP)
    start = tl.maximum(begin, 0)
    first = start // BLOCK
    return start, stop, first, tl.where(stop > start, (stop + BLOCK - 1) // BLOCK - first, 0)


@triton.jit
def _pool_rows(pos, live, b, kv_start, ids, indptr, row_ids, v2p, block_offset, SOURCE: tl.constexpr, PS: tl.constexpr,
               WIDTH: tl.constexpr, REQUESTS: tl.constexpr, NUM_VIRTUAL: tl.constexpr, BLOCKS_PER_PAGE: tl.constexpr,
               NUM_BLOCKS: tl.constexpr):  # fmt: skip
    """Index of the pool row of each live position. Ids that name nothing lead to the padding page, entry 0."""
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
    block = tl.where((entry >= 0) & (block >= 0) & (block < NUM_BLOCKS), block, block_offset)
    return block * PS + pos % PS


@triton.jit
def _deal(kv_start, kv_end, q_start, indptr, ROWS: tl.constexpr, ROWS_P2: tl.constexpr, SLICES: tl.constexpr,
          SOURCE: tl.constexpr, COVER: tl.constexpr, Q_STOP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """(units of every row, units in a slice)."""
    lane = tl.arange(0, ROWS_P2)
    ok = lane < ROWS
    _, _, _, blocks = _span(lane, ok, kv_start, kv_end, q_start, indptr, SOURCE, COVER, Q_STOP, BLOCK)
    units = tl.where(ok, blocks + ROW_COST, 0)
    return units, (tl.sum(units, 0) + SLICES - 1) // SLICES


@triton.jit
def attend(q, pool, ids, indptr, row_ids, v2p, kv_start, kv_end, q_start, block_offset, out, lse, part, part_lse,
           ROWS: tl.constexpr, ROWS_P2: tl.constexpr, S_Q: tl.constexpr, HEADS: tl.constexpr, COLS: tl.constexpr,
           GROUPS: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
           QK: tl.constexpr, V: tl.constexpr, V_P2: tl.constexpr, ROPE_P2: tl.constexpr, ROW: tl.constexpr,
           SOURCE: tl.constexpr, PS: tl.constexpr, WIDTH: tl.constexpr, COVER: tl.constexpr, REQUESTS: tl.constexpr,
           NUM_VIRTUAL: tl.constexpr, BLOCKS_PER_PAGE: tl.constexpr, NUM_BLOCKS: tl.constexpr, Q_STOP: tl.constexpr,
           SCALE: tl.constexpr, CAP: tl.constexpr):  # fmt: skip
    """Program (g, group): its columns of every row of slice g.

    q [ROWS, S_Q * HEADS, QK], pool [NUM_BLOCKS * PS, ROW], out [ROWS, S_Q * HEADS, V], lse [ROWS, S_Q * HEADS] f32;
    part [2 * SLICES, GROUPS, COLS, V_P2] f32 and part_lse [2 * SLICES, GROUPS, COLS] f32, base 2, -inf where empty.
    SCALE turns a product into a base-2 exponent; CAP is in the same unit, 0 for none.
    """
    group = tl.program_id(0) % GROUPS
    g = tl.program_id(0) // GROUPS
    units, share = _deal(
        kv_start, kv_end, q_start, indptr, ROWS, ROWS_P2, SLICES, SOURCE, COVER, Q_STOP, BLOCK
    )  # fmt: skip
    low = g * share
    lane = tl.arange(0, ROWS_P2)
    first_row = tl.sum(((tl.cumsum(units, 0) <= low) & (lane < ROWS)).to(tl.int32), 0)
    base = tl.sum(tl.where(lane < first_row, units, 0), 0)
    offset = tl.load(block_offset)

    local = tl.arange(0, COLS)
    column = group * COLS + local
    used = column < S_Q * HEADS
    at_v = tl.arange(0, V_P2)
    at_rope = tl.arange(0, ROPE_P2 if ROPE_P2 > 0 else 1)

    b = first_row
    while (b < ROWS) & (base < low + share):
        start, stop, first, blocks = _span(
            b, b < ROWS, kv_start, kv_end, q_start, indptr, SOURCE, COVER, Q_STOP, BLOCK
        )  # fmt: skip
        begin = tl.minimum(tl.maximum(low - base - ROW_COST, 0), blocks)
        end = tl.minimum(tl.maximum(low + share - base - ROW_COST, 0), blocks)
        if (end > begin) | (blocks == 0):
            at_q = q + (b.to(tl.int64) * (S_Q * HEADS) + column) * QK
            q_v = tl.load(at_q[None, :] + at_v[:, None], mask=used[None, :] & (at_v < V)[:, None], other=0.0)
            if ROPE_P2 > 0:
                q_rope = tl.load(
                    at_q[None, :] + V + at_rope[:, None],
                    mask=used[None, :] & (V + at_rope < QK)[:, None],
                    other=0.0,
                )
            # A column sees positions below its limit.
            limit = tl.minimum(stop, tl.load(q_start + b) + Q_STOP - S_Q + 1 + column // HEADS)
            peak = tl.full((COLS,), float("-inf"), tl.float32)
            weights = tl.zeros((BLOCK, COLS), tl.float32)  # summed over tokens once, at the end
            acc = tl.zeros((V_P2, COLS), tl.float32)

            # The ids of a block are loaded one block ahead: they are two or three dependent loads.
            pos = (first + begin) * BLOCK + tl.arange(0, BLOCK)
            row = _pool_rows(
                pos, (pos >= start) & (pos < stop), b, kv_start, ids, indptr, row_ids, v2p, offset, SOURCE, PS,
                WIDTH, REQUESTS, NUM_VIRTUAL, BLOCKS_PER_PAGE, NUM_BLOCKS,
            )  # fmt: skip
            for _ in tl.range(begin, end, num_stages=STAGES):
                live = (pos >= start) & (pos < stop)
                at_kv = pool + row.to(tl.int64) * ROW
                # What is not live may hold NaN: it must not be loaded, since 0 * NaN is NaN.
                kv = tl.load(
                    at_kv[:, None] + at_v[None, :], mask=live[:, None] & (at_v < V)[None, :], other=0.0
                )
                s = tl.dot(kv, q_v)
                if ROPE_P2 > 0:
                    k_rope = tl.load(
                        at_kv[:, None] + V + at_rope[None, :],
                        mask=live[:, None] & (V + at_rope < QK)[None, :],
                        other=0.0,
                    )
                    s = tl.dot(k_rope, q_rope, s)
                s = s * SCALE
                if CAP > 0:
                    s = CAP * (1 - 2 / (1 + tl.exp2(s * (2.8853900817779268 / CAP))))  # tanh; 2 * log2(e)
                s = tl.where((pos[:, None] < limit[None, :]) & live[:, None], s, float("-inf"))
                next_peak = tl.maximum(peak, tl.max(s, 0))
                shift = tl.where(next_peak == float("-inf"), 0.0, next_peak)  # -inf - -inf would be NaN
                p = tl.exp2(s - shift[None, :])
                decay = tl.exp2(peak - shift)
                weights = weights * decay[None, :] + p
                acc = acc * decay[None, :]
                acc = tl.dot(tl.trans(kv), p.to(kv.dtype), acc)
                peak = next_peak

                pos += BLOCK
                row = _pool_rows(
                    pos, (pos >= start) & (pos < stop), b, kv_start, ids, indptr, row_ids, v2p, offset, SOURCE, PS,
                    WIDTH, REQUESTS, NUM_VIRTUAL, BLOCKS_PER_PAGE, NUM_BLOCKS,
                )  # fmt: skip

            total = tl.sum(weights, 0)
            empty = total == 0
            acc = acc * tl.where(empty, 0.0, 1 / tl.where(empty, 1.0, total))[None, :]
            log = peak + tl.log2(tl.where(empty, 1.0, total))
            if (begin == 0) & (end == blocks):
                at_out = b.to(tl.int64) * (S_Q * HEADS) + column
                tl.store(
                    out + at_out[None, :] * V + at_v[:, None],
                    acc.to(out.dtype.element_ty),
                    mask=used[None, :] & (at_v < V)[:, None],
                )
                tl.store(lse + at_out, tl.where(empty, float("inf"), log * 0.6931471805599453), mask=used)
            else:
                slot = (2 * g + (b != first_row).to(tl.int32)) * GROUPS + group
                at_part = slot * COLS + local
                tl.store(part + at_part[None, :] * V_P2 + at_v[:, None], acc)
                tl.store(part_lse + at_part, tl.where(empty, float("-inf"), log))
        base += blocks + ROW_COST
        b += 1


@triton.jit
def merge(indptr, kv_start, kv_end, q_start, part, part_lse, out, lse,
          ROWS: tl.constexpr, ROWS_P2: tl.constexpr, COLUMNS: tl.constexpr, COLS: tl.constexpr, GROUPS: tl.constexpr,
          SLICES: tl.constexpr, BLOCK: tl.constexpr, V: tl.constexpr, V_P2: tl.constexpr, V_TILE: tl.constexpr,
          CHUNK: tl.constexpr, SOURCE: tl.constexpr, COVER: tl.constexpr, Q_STOP: tl.constexpr):  # fmt: skip
    """Program (row, group, tile of V): replaces `out` and `lse` of a row that was cut by the sum of its partials."""
    b = tl.program_id(0)
    group = tl.program_id(1)
    units, share = _deal(
        kv_start, kv_end, q_start, indptr, ROWS, ROWS_P2, SLICES, SOURCE, COVER, Q_STOP, BLOCK
    )  # fmt: skip
    lane = tl.arange(0, ROWS_P2)
    base = tl.sum(tl.where(lane < b, units, 0), 0)
    _, _, _, blocks = _span(b, b < ROWS, kv_start, kv_end, q_start, indptr, SOURCE, COVER, Q_STOP, BLOCK)
    # Slices that hold blocks of this row: its units ROW_COST .. ROW_COST + blocks - 1.
    g_first = (base + ROW_COST) // share
    g_last = (base + ROW_COST + blocks - 1) // share
    if (blocks > 0) & (g_last > g_first):
        local = tl.arange(0, COLS)
        column = group * COLS + local
        used = column < COLUMNS
        at_v = tl.program_id(2) * V_TILE + tl.arange(0, V_TILE)
        peak = tl.full((COLS,), float("-inf"), tl.float32)
        total = tl.zeros((COLS,), tl.float32)
        acc = tl.zeros((COLS, V_TILE), tl.float32)
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
        at_out = b.to(tl.int64) * COLUMNS + column
        tl.store(
            out + at_out[:, None] * V + at_v[None, :],
            acc.to(out.dtype.element_ty),
            mask=used[:, None] & (at_v < V)[None, :],
        )
        if tl.program_id(2) == 0:
            log = peak + tl.log2(tl.where(empty, 1.0, total))
            tl.store(lse + at_out, tl.where(empty, float("inf"), log * 0.6931471805599453), mask=used)
