"""Triton kernel of paged GQA attention of chunks. `triton.py` imports it when it is first needed: triton may be absent.

Scores stay [queries, positions]: a tile packs the query heads that share a KV head, of as many tokens as fit, into the
rows of a matrix product. K and V come from their pages straight into shared memory.
"""

import triton
import triton.language as tl

from pallas_kernels.gqa_decode.triton_kernels import LOG2_E, _bf16_of_e4m3
from pallas_kernels.paged_triton import STREAM, capped, columns, entries


@triton.jit
def _sweep(q_tile, peak, total, acc, low_block, low_count, high_block, count, b, start, stop, position, lower, upper,
           line, used, kv_head, first_v, pool, scale_pool, ids, indptr, row_ids, v2p, kv_start, k_block, v_block, k_scale_block,
           v_scale_block, bias,
           MASKED: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
           K: tl.constexpr, K_P2: tl.constexpr, V: tl.constexpr, V_COLS: tl.constexpr, ROW: tl.constexpr,
           V_COLUMN: tl.constexpr, SOURCE: tl.constexpr, PS: tl.constexpr, WIDTH: tl.constexpr,
           REQUESTS: tl.constexpr, NUM_VIRTUAL: tl.constexpr, BLOCKS_PER_PAGE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
           SCALE_RATIO: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, EXTENT: tl.constexpr,
           NATIVE: tl.constexpr):  # fmt: skip
    """The softmax (peak, total, acc) of a tile after `count` more blocks of positions: `low_count` from `low_block` on,
    then from `high_block` on. Not MASKED: every row of the tile sees all of them, and none has a bias there."""
    IN_ONE_PAGE: tl.constexpr = PS % BLOCK == 0
    # With a positive factor alone the largest score is the factor times the largest product.
    PLAIN: tl.constexpr = (SCALE > 0) & (CAP == 0) & (SCALE_RATIO == 0) & ((EXTENT == 0) | (not MASKED))
    lane = tl.arange(0, BLOCK)
    at_k = tl.arange(0, K_P2)
    at_v = first_v + tl.arange(0, V_COLS)
    last_block = tl.maximum(k_block, v_block)

    first = tl.where(low_count > 0, low_block, high_block) * BLOCK
    if IN_ONE_PAGE:
        of = tl.maximum(first, start)
    else:
        of = first + lane
    # The ids of a block are loaded one block ahead: they are two or three dependent loads.
    entry = entries(
        of, (of >= start) & (of < stop), b, kv_start, ids, indptr, row_ids, v2p, last_block, SOURCE, PS, WIDTH,
        REQUESTS, NUM_VIRTUAL, BLOCKS_PER_PAGE, NUM_BLOCKS,
    )  # fmt: skip
    for i in tl.range(0, count, num_stages=STAGES):
        pos = first + lane
        if IN_ONE_PAGE:
            k_row = ((entry + k_block) * PS + first % PS).to(tl.int64)
            v_row = ((entry + v_block) * PS + first % PS).to(tl.int64)
            k_at = pool + (k_row * ROW + kv_head * K) + (lane[:, None] * ROW + at_k[None, :])
            v_at = pool + (v_row * ROW + (V_COLUMN + kv_head * V)) + (lane[:, None] * ROW + at_v[None, :])
        else:
            k_row = ((entry + k_block) * PS + pos % PS).to(tl.int64)
            v_row = ((entry + v_block) * PS + pos % PS).to(tl.int64)
            k_at = pool + k_row[:, None] * ROW + (kv_head * K + at_k)[None, :]
            v_at = pool + v_row[:, None] * ROW + (V_COLUMN + kv_head * V + at_v)[None, :]
        live = (pos >= start) & (pos < stop)
        # What is not live may hold NaN: it must not be loaded, since 0 * NaN is NaN.
        if MASKED:
            k = tl.load(k_at, mask=live[:, None] & (at_k < K)[None, :], other=0)
            v = tl.load(v_at, mask=live[:, None] & (at_v < V)[None, :], other=0)
        else:
            if K == K_P2:
                k = tl.load(k_at)
            else:
                k = tl.load(k_at, mask=(at_k < K)[None, :], other=0)
            if V % V_COLS == 0:
                v = tl.load(v_at)
            else:
                v = tl.load(v_at, mask=(at_v < V)[None, :], other=0)
        if SCALE_RATIO > 0:
            k, v = _bf16_of_e4m3(k, NATIVE), _bf16_of_e4m3(v, NATIVE)
            slot = pos % PS
            k_scale_row = (entry * SCALE_RATIO + k_scale_block).to(tl.int64) * PS + slot
            v_scale_row = (entry * SCALE_RATIO + v_scale_block).to(tl.int64) * PS + slot
            k_scale = tl.load(scale_pool + k_scale_row * KV_HEADS + kv_head, mask=live, other=0.0)
            v_scale = tl.load(scale_pool + v_scale_row * KV_HEADS + kv_head, mask=live, other=0.0)
        s = tl.dot(q_tile, tl.trans(k))
        if not PLAIN:
            s = s * SCALE
        if SCALE_RATIO > 0:
            s = s * k_scale[None, :]
        if CAP > 0:
            s = capped(s, CAP)
        if MASKED:
            if EXTENT > 0:
                distance = position[:, None] - pos[None, :]
                near = used[:, None] & (distance >= 0) & (distance < EXTENT)
                s += (
                    tl.load(bias + line[:, None] * EXTENT + distance, mask=near, other=0.0).to(tl.float32)
                    * LOG2_E
                )
            s = tl.where((pos[None, :] >= lower[:, None]) & (pos[None, :] < upper[:, None]), s, float("-inf"))
        if PLAIN:
            next_peak = tl.maximum(peak, tl.max(s, 1) * SCALE)
        else:
            next_peak = tl.maximum(peak, tl.max(s, 1))
        shift = tl.where(next_peak == float("-inf"), 0.0, next_peak)  # -inf - -inf would be NaN
        if PLAIN:
            p = tl.exp2(s * SCALE - shift[:, None])
        else:
            p = tl.exp2(s - shift[:, None])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(p, 1)
        acc = acc * decay[:, None]
        if SCALE_RATIO > 0:
            p = p * v_scale[None, :]
        acc = tl.dot(p.to(v.dtype), v, acc)
        peak = next_peak

        first = tl.where(i + 1 < low_count, low_block, high_block - low_count) * BLOCK + (i + 1) * BLOCK
        if IN_ONE_PAGE:
            of = tl.maximum(first, start)
        else:
            of = first + lane
        entry = entries(
            of, (of >= start) & (of < stop), b, kv_start, ids, indptr, row_ids, v2p, last_block, SOURCE, PS, WIDTH,
            REQUESTS, NUM_VIRTUAL, BLOCKS_PER_PAGE, NUM_BLOCKS,
        )  # fmt: skip
    return peak, total, acc


@triton.jit
def attend(q, pool, scale_pool, ids, indptr, row_ids, v2p, kv_start, kv_end, q_start, k_offset, v_offset, k_scale_offset,
           v_scale_offset, sinks, bias, out, lse,
           TOKENS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, COLS: tl.constexpr, TILES: tl.constexpr,
           BLOCK: tl.constexpr, STAGES: tl.constexpr, K: tl.constexpr, K_P2: tl.constexpr, V: tl.constexpr,
           V_COLS: tl.constexpr, ROW: tl.constexpr, V_COLUMN: tl.constexpr, SOURCE: tl.constexpr, PS: tl.constexpr,
           WIDTH: tl.constexpr, COVER: tl.constexpr, REQUESTS: tl.constexpr, NUM_VIRTUAL: tl.constexpr,
           BLOCKS_PER_PAGE: tl.constexpr, NUM_BLOCKS: tl.constexpr, SCALE_RATIO: tl.constexpr, WINDOW: tl.constexpr,
           SCALE: tl.constexpr, CAP: tl.constexpr, EXTENT: tl.constexpr, SINKS: tl.constexpr,
           NATIVE: tl.constexpr):  # fmt: skip
    """Program (row, KV head, V_COLS columns of V, tile), tiles side by side and the last one first.

    q [rows, TOKENS, HEADS, K], pool [NUM_BLOCKS * PS, ROW], out [rows, TOKENS, HEADS, V], lse [rows, TOKENS, HEADS] f32.
    A tile is COLS lines (query, query head) of one KV head. The other parameters: `gqa_decode.triton_kernels.attend`.
    """
    pid = tl.program_id(0)
    tile = TILES - 1 - pid % TILES  # the longest first
    V_TILES: tl.constexpr = (V + V_COLS - 1) // V_COLS
    first_v = pid // TILES % V_TILES * V_COLS
    kv_head = pid // (TILES * V_TILES) % KV_HEADS
    b = pid // (TILES * V_TILES * KV_HEADS)
    query, head, used, _ = columns(kv_head * TILES + tile, TOKENS, HEADS, KV_HEADS, COLS)
    line = (b.to(tl.int64) * TOKENS + query) * HEADS + head
    at_v = first_v + tl.arange(0, V_COLS)
    begin, end, origin = tl.load(kv_start + b), tl.load(kv_end + b), tl.load(q_start + b)
    position = origin + query
    valid = used & (position < end)
    SHARING: tl.constexpr = HEADS // KV_HEADS
    first_pos = origin + tile * COLS // SHARING
    peak = tl.full((COLS,), float("-inf"), tl.float32)
    total = tl.zeros((COLS,), tl.float32)
    acc = tl.zeros((COLS, V_COLS), tl.float32)
    if first_pos < end:
        last_pos = tl.minimum(origin + tl.minimum((tile * COLS + COLS - 1) // SHARING, TOKENS - 1), end - 1)
        stop = end
        if SOURCE == STREAM:
            ids_end = tl.minimum(tl.load(indptr + b + 1), COVER)
            stop = tl.minimum(stop, begin + ids_end - tl.load(indptr + b))
        else:
            stop = tl.minimum(stop, COVER)
        # What lies past the last query's reach, or before the first one's window, is not looked at either.
        stop = tl.minimum(stop, last_pos + 1)
        start = tl.maximum(begin, 0)
        last_start = start  # where the window of the last query begins
        if WINDOW > 0:
            last_start = tl.maximum(start, last_pos - (WINDOW - 1))
            start = tl.maximum(start, first_pos - (WINDOW - 1))
        # A line sees the positions from `lower` to below `upper`.
        upper = tl.minimum(stop, position + 1)
        lower = start + tl.zeros_like(position)
        if WINDOW > 0:
            lower = tl.maximum(lower, position - (WINDOW - 1))
        # Blocks: `low` ones that some window cuts, then those that every line sees whole, then `high` ones.
        low_block = start // BLOCK
        end_block = tl.maximum((tl.maximum(stop, 0) + BLOCK - 1) // BLOCK, low_block)
        whole = tl.maximum(tl.minimum(stop, first_pos + 1 - EXTENT), 0) // BLOCK
        whole_block = tl.minimum((last_start + BLOCK - 1) // BLOCK, end_block)
        high_block = tl.minimum(tl.maximum(whole, whole_block), end_block)
        low_count = whole_block - low_block

        if SINKS:  # counts as seen before the first position, by those that see any
            with_sink = valid & (lower < upper)
            sink = tl.load(sinks + head, mask=with_sink, other=float("-inf")) * LOG2_E
            peak = tl.where(with_sink, sink, peak)
            total = tl.where(with_sink, 1.0, 0.0)
        k_block, v_block = tl.load(k_offset), tl.load(v_offset)
        k_scale_block, v_scale_block = k_block, v_block
        if SCALE_RATIO > 0:
            k_scale_block, v_scale_block = tl.load(k_scale_offset), tl.load(v_scale_offset)
        at_k = tl.arange(0, K_P2)
        q_tile = tl.load(
            q + line[:, None] * K + at_k[None, :], mask=valid[:, None] & (at_k < K)[None, :], other=0.0
        )
        peak, total, acc = _sweep(
            q_tile, peak, total, acc, whole_block, high_block - whole_block, whole_block, high_block - whole_block, b,
            start, stop, position, lower, upper, line, valid, kv_head, first_v, pool, scale_pool, ids, indptr, row_ids, v2p,
            kv_start, k_block, v_block, k_scale_block, v_scale_block, bias, False, KV_HEADS, BLOCK, STAGES, K, K_P2, V,
            V_COLS, ROW, V_COLUMN, SOURCE, PS, WIDTH, REQUESTS, NUM_VIRTUAL, BLOCKS_PER_PAGE, NUM_BLOCKS, SCALE_RATIO,
            SCALE, CAP, EXTENT, NATIVE,
        )  # fmt: skip
        peak, total, acc = _sweep(
            q_tile, peak, total, acc, low_block, low_count, high_block, low_count + end_block - high_block, b, start,
            stop, position, lower, upper, line, valid, kv_head, first_v, pool, scale_pool, ids, indptr, row_ids, v2p, kv_start,
            k_block, v_block, k_scale_block, v_scale_block, bias, True, KV_HEADS, BLOCK, STAGES, K, K_P2, V, V_COLS, ROW,
            V_COLUMN, SOURCE, PS, WIDTH, REQUESTS, NUM_VIRTUAL, BLOCKS_PER_PAGE, NUM_BLOCKS, SCALE_RATIO, SCALE, CAP,
            EXTENT, NATIVE,
        )  # fmt: skip
    total = tl.where(valid, total, 0.0)
    empty = total == 0
    acc = acc * tl.where(empty, 0.0, 1 / tl.where(empty, 1.0, total))[:, None]
    tl.store(
        out + line[:, None] * V + at_v[None, :],
        acc.to(out.dtype.element_ty),
        mask=used[:, None] & (at_v < V)[None, :],
    )
    if first_v == 0:
        log = peak + tl.log2(tl.where(empty, 1.0, total))
        tl.store(lse + line, tl.where(empty, float("inf"), log * 0.6931471805599453), mask=used)
