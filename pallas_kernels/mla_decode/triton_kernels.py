"""Triton kernel of paged MLA attention. `triton.py` imports it when it is first needed: triton may be absent.

Scores are kept transposed: S^T = K Q^T and O^T = V^T P^T, the KV tile being the left operand of both products. Few
heads then cost few columns instead of padding a tile of 64 rows, and the tile that served as K serves again as V
without another read. How work is dealt and merged: `pallas_kernels.paged_triton`.
"""

import triton
import triton.language as tl

from pallas_kernels.paged_triton import ROW_COST, capped, deal, entries, span


@triton.jit
def _f16_of_e4m3(byte, NATIVE: tl.constexpr):
    """The f16 values of stored e4m3 bytes, exact. Not NATIVE (no conversion instruction): by the bits."""
    if NATIVE:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    # e4m3's exponent has bias 7, f16's 15: the bits in place are 2**-8 of the value, subnormals too.
    bits = byte.to(tl.uint16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _power_for_f16(peak):
    """(power of two that takes `peak` to [2**14, 2**15) if f32 has one, its inverse): f16 holds what is below the peak."""
    exponent = (peak.to(tl.int32, bitcast=True) >> 23) & 0xFF
    up = tl.maximum(tl.minimum(268 - exponent, 253), 1)
    return (up << 23).to(tl.float32, bitcast=True), ((254 - up) << 23).to(tl.float32, bitcast=True)


@triton.jit
def attend(q, pool, ids, indptr, row_ids, v2p, kv_start, kv_end, q_start, block_offset, out, lse, part, part_lse,
           ROWS: tl.constexpr, ROWS_P2: tl.constexpr, S_Q: tl.constexpr, HEADS: tl.constexpr, COLS: tl.constexpr,
           GROUPS: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
           QK: tl.constexpr, V: tl.constexpr, V_P2: tl.constexpr, ROPE_P2: tl.constexpr, ROW: tl.constexpr,
           SOURCE: tl.constexpr, PS: tl.constexpr, WIDTH: tl.constexpr, COVER: tl.constexpr, REQUESTS: tl.constexpr,
           NUM_VIRTUAL: tl.constexpr, BLOCKS_PER_PAGE: tl.constexpr, NUM_BLOCKS: tl.constexpr, Q_STOP: tl.constexpr,
           SCALE: tl.constexpr, CAP: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """Program (g, group): its columns of every row of slice g.

    q [ROWS, S_Q * HEADS, QK], pool [NUM_BLOCKS * PS, ROW], out [ROWS, S_Q * HEADS, V], lse [ROWS, S_Q * HEADS] f32;
    part [2 * SLICES, GROUPS, COLS, V_P2] f32 and part_lse [2 * SLICES, GROUPS, COLS] f32, base 2, -inf where empty.
    SCALE turns a product into a base-2 exponent; CAP is in the same unit, 0 for none.

    FP8: pool is uint8, a row QK e4m3 values and their f32 scale. Products are of f16, which holds e4m3 exactly: q is
    brought into its range by a power of two for each column; a token's scale multiplies its scores and its weights, the
    latter relative to the largest scale so far.
    """
    group = tl.program_id(0) % GROUPS
    g = tl.program_id(0) // GROUPS
    units, share = deal(
        kv_start, kv_end, q_start, indptr, ROWS, ROWS_P2, SLICES, SOURCE, COVER, Q_STOP, 0, BLOCK
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
        start, stop, first, blocks = span(
            b, b < ROWS, kv_start, kv_end, q_start, indptr, SOURCE, COVER, Q_STOP, 0, BLOCK
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
            if FP8:
                q_peak = tl.max(tl.abs(q_v.to(tl.float32)), 0)
                if ROPE_P2 > 0:
                    q_peak = tl.maximum(q_peak, tl.max(tl.abs(q_rope.to(tl.float32)), 0))
                q_power, q_unit = _power_for_f16(q_peak)
                q_v = (q_v.to(tl.float32) * q_power[None, :]).to(tl.float16)
                if ROPE_P2 > 0:
                    q_rope = (q_rope.to(tl.float32) * q_power[None, :]).to(tl.float16)
                largest = 1.1754943508222875e-38  # smallest normal f32; the padding page's rows have scale 0
            # A column sees positions below its limit.
            limit = tl.minimum(stop, tl.load(q_start + b) + Q_STOP - S_Q + 1 + column // HEADS)
            peak = tl.full((COLS,), float("-inf"), tl.float32)
            weights = tl.zeros((BLOCK, COLS), tl.float32)  # summed over tokens once, at the end
            acc = tl.zeros((V_P2, COLS), tl.float32)

            # The ids of a block are loaded one block ahead: they are two or three dependent loads.
            pos = (first + begin) * BLOCK + tl.arange(0, BLOCK)
            entry = entries(
                pos, (pos >= start) & (pos < stop), b, kv_start, ids, indptr, row_ids, v2p, offset, SOURCE, PS,
                WIDTH, REQUESTS, NUM_VIRTUAL, BLOCKS_PER_PAGE, NUM_BLOCKS,
            )  # fmt: skip
            for _ in tl.range(begin, end, num_stages=STAGES):
                live = (pos >= start) & (pos < stop)
                row = ((entry + offset) * PS + pos % PS).to(tl.int64)
                at_kv = pool + row * ROW
                # What is not live may hold NaN: it must not be loaded, since 0 * NaN is NaN.
                kv = tl.load(
                    at_kv[:, None] + at_v[None, :], mask=live[:, None] & (at_v < V)[None, :], other=0
                )
                if FP8:
                    kv = _f16_of_e4m3(kv, NATIVE)
                    at_scale = pool.to(tl.pointer_type(tl.float32)) + row * (ROW // 4)
                    scale = tl.load(at_scale + QK // 4, mask=live, other=0.0)
                s = tl.dot(kv, q_v)
                if ROPE_P2 > 0:
                    k_rope = tl.load(
                        at_kv[:, None] + V + at_rope[None, :],
                        mask=live[:, None] & (V + at_rope < QK)[None, :],
                        other=0,
                    )
                    if FP8:
                        k_rope = _f16_of_e4m3(k_rope, NATIVE)
                    s = tl.dot(k_rope, q_rope, s)
                s = s * SCALE
                if FP8:
                    s = s * (scale[:, None] * q_unit[None, :])
                if CAP > 0:
                    s = capped(s, CAP)
                s = tl.where((pos[:, None] < limit[None, :]) & live[:, None], s, float("-inf"))
                next_peak = tl.maximum(peak, tl.max(s, 0))
                shift = tl.where(next_peak == float("-inf"), 0.0, next_peak)  # -inf - -inf would be NaN
                p = tl.exp2(s - shift[None, :])
                decay = tl.exp2(peak - shift)
                weights = weights * decay[None, :] + p
                if FP8:
                    next_largest = tl.maximum(largest, tl.max(scale, 0))
                    p = p * (scale / next_largest)[:, None]
                    decay = decay * (largest / next_largest)
                    largest = next_largest
                acc = acc * decay[None, :]
                acc = tl.dot(tl.trans(kv), p.to(kv.dtype), acc)
                peak = next_peak

                pos += BLOCK
                entry = entries(
                    pos, (pos >= start) & (pos < stop), b, kv_start, ids, indptr, row_ids, v2p, offset, SOURCE, PS,
                    WIDTH, REQUESTS, NUM_VIRTUAL, BLOCKS_PER_PAGE, NUM_BLOCKS,
                )  # fmt: skip

            total = tl.sum(weights, 0)
            empty = total == 0
            if FP8:
                acc = acc * largest
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
