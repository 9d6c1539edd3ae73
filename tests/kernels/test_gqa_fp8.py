"""What a warp of the e4m3 GQA decode kernel computes, lane by lane in numpy, and the kernel compiled for an H200."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gqa_decode import KVScales, gqa_decode, mosaic_fp8_warp
from pallas_kernels.gqa_decode.mosaic_fp8_warp import LIFT, MASKED, Warp
from tests.deviceless import compile_for, requires_plugin, shape
from tests.kernels.abstract import int32, source
from tests.kernels.gqa_fp8_lanes import LANES, Lanes


def swizzled(rows: np.ndarray) -> np.ndarray:
    """uint8 [n, width] as TMA lays it: boxes of 8 rows of 128 bytes side by side, 16-byte chunks exchanged by the row."""
    n, width = rows.shape
    boxes = rows.reshape(n // 8, 8, width // 128, 8, 16).swapaxes(1, 2)
    row, chunk = np.arange(8)[:, None], np.arange(8)
    out = np.empty_like(boxes)
    out[:, :, row, chunk ^ row] = boxes[:, :, row, chunk]
    return out.reshape(-1)


@pytest.mark.parametrize(
    "sizes",
    [
        dict(heads=5, sharing=1, tokens=32, lines=8, queries=4, k_width=128, v_width=128),
        dict(heads=2, sharing=2, tokens=32, lines=16, queries=6, k_width=256, v_width=256, s_q=2, window=50),
        dict(heads=2, sharing=1, tokens=64, lines=8, queries=8, k_width=64, v_width=64, logit_cap=3.0),
        dict(heads=2, sharing=4, tokens=32, lines=8, queries=2, k_width=192, v_width=64, s_q=3),
    ],
    ids=str,
)
def test_warps_compute_attention(sizes, monkeypatch):
    sizes = dict(sizes)
    queries, s_q = sizes.pop("queries"), sizes.pop("s_q", 1)
    window, cap = sizes.pop("window", None), sizes.pop("logit_cap", None)
    warp = Warp(
        **sizes, queries_a_head=queries, scale_heads=sizes["heads"] + 3, s_q=s_q, sm_scale=0.07, window=window, logit_cap=cap
    )  # fmt: skip
    heads, rows = warp.heads, warp.tokens * warp.sharing
    rng = np.random.default_rng(0)
    tiles, first, q_position = 2, 5, rows + 11
    stop = q_position + s_q
    used = queries * s_q
    q = (rng.normal(size=(heads, 16, warp.k_width)) * 3).astype(jnp.bfloat16)
    q[:, used:] = 0
    raw, scale = {}, {}
    for name, width in (("k", warp.k_width), ("v", warp.v_width)):
        raw[name] = rng.normal(size=(tiles * rows, heads * width)).astype(jnp.float8_e4m3fn).view(np.uint8)
        scale[name] = rng.uniform(0.01, 2, (tiles * rows, warp.scale_heads)).astype(np.float32)
        for x in (raw[name].view(np.uint8), scale[name].view(np.uint8).reshape(tiles * rows, -1)):
            x[:first], x[stop:] = 0xFF, 0xFF
    found = {}
    for w in range(heads * warp.sharing):
        state = None
        for t in range(tiles):
            part = slice(t * rows, (t + 1) * rows)
            pieces = [swizzled(raw["k"][part]), swizzled(raw["v"][part])]
            pieces += [scale[name][part].view(np.uint8).reshape(-1) for name in "kv"]
            starts = np.cumsum([0] + [len(p) for p in pieces])
            ops = Lanes(np.concatenate(pieces).view(np.int32), w % 4)
            monkeypatch.setattr(mosaic_fp8_warp, "OPS", ops)
            group = ops.i(w // 4)
            g, lane, head, _ = warp.place(group)
            if state is None:
                lines = [q[head, g + 8 * r] for r in range(warp.halves)]
                columns = 64 * np.arange(warp.k_width // 64)[:, None] + np.arange(16)
                words = [
                    list(
                        np.stack([line[i, (columns + 16 * lane[i]).reshape(-1)] for i in range(LANES)])
                        .view(np.int32)
                        .T
                    )
                    for line in lines
                ]
                fragments, units = warp.queries(words)
                state = [ops.f(MASKED)] * warp.halves, [ops.f(0)] * warp.halves, [ops.f(0)] * warp.sums
            with np.errstate(all="ignore"):
                state = warp.step(
                    fragments,
                    units,
                    *state,
                    tiles=[ops.i(starts[0]), ops.i(starts[1])],
                    scales=[ops.i(starts[2]), ops.i(starts[3])],
                    at=[ops.i(x) for x in (t * rows, first, stop, q_position)],
                    warpgroup=group,
                )
        peaks, totals, sums = state
        for r in range(warp.halves):
            total = sum(ops.shuffle(totals[r], d) for d in range(4))
            out = np.zeros((8, warp.v_width))
            for column, elements in warp.columns_of(lane, r, sums):
                out[g[:, None], column[:, None] + np.arange(len(elements))] = np.stack(elements, 1)
            found[int(head[0]), w % warp.sharing, r] = peaks[r][::4] - LIFT, total[::4], out
    k, v = (
        raw[n].view(jnp.float8_e4m3fn).astype(np.float64).reshape(tiles * rows, heads, -1)
        * scale[n][:, :heads, None]
        for n in "kv"
    )
    token = np.arange(tiles * rows)
    for h in range(heads):
        for line in range(used):
            at = q_position + line // queries
            keep = (token >= first) & (token < stop) & (token <= at)
            if window is not None:
                keep &= token > at - window
            s = k[keep, h] @ q[h, line].astype(np.float64) * warp.sm_scale
            if cap is not None:
                s = cap * np.tanh(s / cap)
            p = np.exp(s - s.max())
            parts = [found[h, part, line // 8] for part in range(warp.sharing)]
            peak = max(p[0][line % 8] for p in parts)
            factors = [np.exp2(np.float64(p[0][line % 8]) - peak) for p in parts]
            total = sum(f * p[1][line % 8] for f, p in zip(factors, parts, strict=True))
            out = sum(f * p[2][line % 8] for f, p in zip(factors, parts, strict=True)) / total
            expected = p @ v[keep, h] / p.sum()
            assert np.linalg.norm(out - expected) <= 1e-3 * np.linalg.norm(expected)
            assert abs((peak + np.log2(total)) * np.log(2) - (s.max() + np.log(p.sum()))) < 1e-4


@pytest.mark.deviceless
@requires_plugin
@pytest.mark.parametrize(
    "sizes, options",
    [
        ((64, 32, 8, 128), {}),
        ((300, 64, 8, 64), {"sinks": True, "window": 128}),
        ((16, 16, 2, 256), {"page_size": 128}),
        (
            (5, 12, 4, 128),
            {"s_q": 3, "delivery": "virtual", "page_size": 8, "logit_cap": 30.0, "window": 100},
        ),
        ((9, 6, 2, 192, 128), {"page_size": 16}),
    ],
    ids=str,
)
def test_fits_the_gpu(sizes, options, ptxas_reports):
    """Two kernels of ours, no temporaries but parts of rows, and little spilled."""
    options = dict(options)
    rows, heads, kv_heads, k_width = sizes[:4]
    v_width, s_q, page_size = sizes[-1], options.pop("s_q", 1), options.pop("page_size", 64)
    one_row = k_width != v_width
    row = kv_heads * (k_width + v_width if one_row else k_width)
    delivery, with_sinks = options.pop("delivery", "table"), options.pop("sinks", False)

    def attention(q, pool, source, k, v, k_scale, v_scale, sinks):
        return gqa_decode(
            q, pool, source, k, None if one_row else v, kv_dtype="float8_e4m3fn", num_kv_heads=kv_heads, v_head_dim=v_width,
            sm_scale=0.1, scales=KVScales(k_scale, v_scale, 3), sinks=sinks, implementation="mosaic", **options,
        )  # fmt: skip

    program = compile_for(
        attention,
        shape((rows, s_q, heads, k_width), "bfloat16"),
        shape((1000 * page_size * row * 4 * kv_heads,), "uint8"),
        source(delivery, rows, page_size),
        *[int32(())] * 4,
        shape((heads,), "float32") if with_sinks else None,
    )
    parts = 2 * 132 * s_q * heads * 4 * (v_width + 1)
    results = rows * s_q * heads * (2 * v_width + 4)
    assert program.temp_bytes <= parts + results + 16 * (rows + 132) + 65536
    assert len(program.launches) == 2
    spilled = [int(n) for report in ptxas_reports() for n in re.findall(r"(\d+) bytes spill stores", report)]
    assert spilled
    assert max(spilled) <= (128 if k_width + v_width > 256 else 32)
