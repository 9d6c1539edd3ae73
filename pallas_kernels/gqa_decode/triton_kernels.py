"""Triton kernel of paged GQA attention. `triton.py` imports it when it is first needed: triton may be absent.

As in the MLA kernel scores are kept transposed, S^T = K Q^T and O^T = V^T P^T: the query heads that share a KV head are
few, and as columns they are padded to 16 at most. How work is dealt and merged: `pallas_kernels.paged_triton`.
"""

import triton
import triton.language as tl

from pallas_kernels.paged_triton import ROW_COST, capped, columns, deal, entries, span

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _bf16_of_e4m3(x, NATIVE: tl.constexpr):
    """The value of e4m3 bytes, which bf16 holds exactly. NATIVE: the GPU converts (8.9 and later)."""
    if NATIVE:
        value = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:  # the bits of an f16 2^8 times as small
        bits = x.to(tl.int16)
        value = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return value.to(tl.float32).to(tl.bfloat16)


@triton.jit
def attend(q, pool, scale_pool, ids, indptr, row_ids, v2p, kv_start, kv_end, q_start, k_offset, v_offset, k_scale_offset,
           v_scale_offset, sinks, bias, out, lse, part, part_lse,
           ROWS: tl.constexpr, ROWS_P2: tl.constexpr, S_Q: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
           COLS: tl.constexpr, GROUPS: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
           K: tl.constexpr, K_P2: tl.constexpr, V: tl.constexpr, V_P2: tl.constexpr, ROW: tl.constexpr,
           V_COLUMN: tl.constexpr, SOURCE: tl.constexpr, PS: tl.constexpr, WIDTH: tl.constexpr, COVER: tl.constexpr,
           REQUESTS: tl.constexpr, NUM_VIRTUAL: tl.constexpr, BLOCKS_PER_PAGE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
           SCALE_RATIO: tl.constexpr, Q_STOP: tl.constexpr, REACH: tl.constexpr, WINDOW: tl.constexpr,
           SCALE: tl.constexpr, CAP: tl.constexpr, EXTENT: tl.constexpr, SINKS: tl.constexpr,
           NATIVE: tl.constexpr):  # fmt: skip
    """Program (g, group): its columns of every row of slice g.

    q [ROWS, S_Q, HEADS, K], pool [NUM_BLOCKS * PS, ROW], out [ROWS, S_Q, HEADS, V], lse [ROWS, S_Q, HEADS] f32;
    part [2 * SLICES, GROUPS, COLS, V_P2] f32 and part_lse [2 * SLICES, GROUPS, COLS] f32, base 2, -inf where empty.
    V_COLUMN: where V begins in a row at v_offset. SCALE turns a product into a base-2 exponent; CAP is in the same unit, 0
    for none. WINDOW and EXTENT (of bias [ROWS, S_Q, HEADS, EXTENT]) are 0 for none. SCALE_RATIO: blocks of scale_pool
    [.., KV_HEADS] an entry, where pool holds e4m3 bytes; 0 where it does not.
    """
    group = tl.program_id(0) % GROUPS
    g = tl.program_id(0) // GROUPS
    units, share = deal(
        kv_start, kv_end, q_start, indptr, ROWS, ROWS_P2, SLICES, SOURCE, COVER, Q_STOP, REACH, BLOCK
    )  # fmt: skip
    low = g * share
    lane = tl.arange(0, ROWS_P2)
    first_row = tl.sum(((tl.cumsum(units, 0) <= low) & (lane < ROWS)).to(tl.int32), 0)
    base = tl.sum(tl.where(lane < first_row, units, 0), 0)
    k_block, v_block = tl.load(k_offset), tl.load(v_offset)
    last_block = tl.maximum(k_block, v_block)
    if SCALE_RATIO > 0:
        k_scale_block, v_scale_block = tl.load(k_scale_offset), tl.load(v_scale_offset)

    query, head, used, kv_head = columns(group, S_Q, HEADS, KV_HEADS, COLS)
    at_k = tl.arange(0, K_P2)
    at_v = tl.arange(0, V_P2)

    b = first_row
    while (b < ROWS) & (base < low + share):
        start, stop, first, blocks = span(
            b, b < ROWS, kv_start, kv_end, q_start, indptr, SOURCE, COVER, Q_STOP, REACH, BLOCK
        )  # fmt: skip
        begin = tl.minimum(tl.maximum(low - base - ROW_COST, 0), blocks)
        end = tl.minimum(tl.maximum(low + share - base - ROW_COST, 0), blocks)
        if (end > begin) | (blocks == 0):
            line = (b.to(tl.int64) * S_Q + query) * HEADS + head
            q_t = tl.load(
                q + line[None, :] * K + at_k[:, None], mask=used[None, :] & (at_k < K)[:, None], other=0.0
            )
            # A column sees the positions from `lower` to below `upper`.
            position = tl.load(q_start + b) + Q_STOP - S_Q + query
            upper = tl.minimum(stop, position + 1)
            lower = start + tl.zeros_like(position)
            if WINDOW > 0:
                lower = tl.maximum(lower, position - (WINDOW - 1))
            peak = tl.full((COLS,), float("-inf"), tl.float32)
            total = tl.zeros((COLS,), tl.float32)
            if SINKS:  # counts as seen before the first position, by those that see any
                with_sink = used & (begin == 0) & (lower < upper)
                sink = tl.load(sinks + head, mask=with_sink, other=float("-inf")) * LOG2_E
                peak = tl.where(with_sink, sink, peak)
                total = tl.where(peak == float("-inf"), 0.0, 1.0)
            weights = tl.zeros((BLOCK, COLS), tl.float32)  # summed over tokens once, at the end
            acc = tl.zeros((V_P2, COLS), tl.float32)

            run_begin, run_end = begin, end
            if S_Q > 1:  # blocks that no column here sees
                run_begin = tl.maximum(begin, tl.min(tl.where(used, lower, 2147483647), 0) // BLOCK - first)
                run_end = tl.minimum(
                    end, (tl.max(tl.where(used, upper, 0), 0) + BLOCK - 1) // BLOCK - first
                )  # fmt: skip

            # The ids of a block are loaded one block ahead: they are two or three dependent loads.
            pos = (first + run_begin) * BLOCK + tl.arange(0, BLOCK)
            entry = entries(
                pos, (pos >= start) & (pos < stop), b, kv_start, ids, indptr, row_ids, v2p, last_block, SOURCE, PS,
                WIDTH, REQUESTS, NUM_VIRTUAL, BLOCKS_PER_PAGE, NUM_BLOCKS,
            )  # fmt: skip
            for _ in tl.range(run_begin, run_end, num_stages=STAGES):
                live = (pos >= start) & (pos < stop)
                k_row = ((entry + k_block) * PS + pos % PS).to(tl.int64)
                v_row = ((entry + v_block) * PS + pos % PS).to(tl.int64)
                # What is not live may hold NaN: it must not be loaded, since 0 * NaN is NaN.
                k = tl.load(
                    pool + k_row[:, None] * ROW + (kv_head * K + at_k)[None, :],
                    mask=live[:, None] & (at_k < K)[None, :],
                    other=0,
                )
                v = tl.load(
                    pool + v_row[:, None] * ROW + (V_COLUMN + kv_head * V + at_v)[None, :],
                    mask=live[:, None] & (at_v < V)[None, :],
                    other=0,
                )
                if SCALE_RATIO > 0:
                    k, v = _bf16_of_e4m3(k, NATIVE), _bf16_of_e4m3(v, NATIVE)
                    scale_entry = entry * SCALE_RATIO
                    k_scale_row = (scale_entry + k_scale_block).to(tl.int64) * PS + pos % PS
                    v_scale_row = (scale_entry + v_scale_block).to(tl.int64) * PS + pos % PS
                    k_scale = tl.load(scale_pool + k_scale_row * KV_HEADS + kv_head, mask=live, other=0.0)
                    v_scale = tl.load(scale_pool + v_scale_row * KV_HEADS + kv_head, mask=live, other=0.0)
                s = tl.dot(k, q_t) * SCALE
                if SCALE_RATIO > 0:
                    s = s * k_scale[:, None]
                if CAP > 0:
                    s = capped(s, CAP)
                if EXTENT > 0:
                    distance = position[None, :] - pos[:, None]
                    near = used[None, :] & (distance >= 0) & (distance < EXTENT)
                    s += (
                        tl.load(bias + line[None, :] * EXTENT + distance, mask=near, other=0.0).to(tl.float32)
                        * LOG2_E
                    )
                s = tl.where(
                    (pos[:, None] >= lower[None, :]) & (pos[:, None] < upper[None, :]), s, float("-inf")
                )
                next_peak = tl.maximum(peak, tl.max(s, 0))
                shift = tl.where(next_peak == float("-inf"), 0.0, next_peak)  # -inf - -inf would be NaN
                p = tl.exp2(s - shift[None, :])
                decay = tl.exp2(peak - shift)
                weights = weights * decay[None, :] + p
                total = total * decay
                acc = acc * decay[None, :]
                if SCALE_RATIO > 0:
                    p = p * v_scale[:, None]
                acc = tl.dot(tl.trans(v), p.to(v.dtype), acc)
                peak = next_peak

                pos += BLOCK
                entry = entries(
                    pos, (pos >= start) & (pos < stop), b, kv_start, ids, indptr, row_ids, v2p, last_block, SOURCE,
                    PS, WIDTH, REQUESTS, NUM_VIRTUAL, BLOCKS_PER_PAGE, NUM_BLOCKS,
                )  # fmt: skip

            total += tl.sum(weights, 0)
            empty = total == 0
            acc = acc * tl.where(empty, 0.0, 1 / tl.where(empty, 1.0, total))[None, :]
            log = peak + tl.log2(tl.where(empty, 1.0, total))
            if (begin == 0) & (end == blocks):
                tl.store(
                    out + line[None, :] * V + at_v[:, None],
                    acc.to(out.dtype.element_ty),
                    mask=used[None, :] & (at_v < V)[:, None],
                )
                tl.store(lse + line, tl.where(empty, float("inf"), log * 0.6931471805599453), mask=used)
            else:
                slot = (2 * g + (b != first_row).to(tl.int32)) * GROUPS + group
                at_part = slot * COLS + tl.arange(0, COLS)
                tl.store(part + at_part[None, :] * V_P2 + at_v[:, None], acc)
                tl.store(part_lse + at_part, tl.where(empty, float("-inf"), log))
        base += blocks + ROW_COST
        b += 1
