"""Runs the Mosaic kernel of chunks in Pallas' GPU interpreter, with race detection.

Run it as `python -m tests.kernels.chunk_mosaic_interpreter`.

What is replaced by its meaning, and why: `tests.kernels.mla_interpreter`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gqa_prefill import mosaic_gpu
from pallas_kernels.gqa_prefill.mosaic_gpu import TuningConfig
from pallas_kernels.mla_prefill import mosaic_inline as inline
from pallas_kernels.mosaic_prefill import HALF
from tests.kernels import mla_interpreter
from tests.kernels.chunk_case import make_chunk

# Rows without a prefix, past borders of blocks, with one new token and with none; pages of every relation to a block.
ROWS = {"cached": [0, 250, 40], "new": [40, 1, 0], "tokens": 40}
CASES = {
    "two rounds of queries": (dict(heads=8, kv_heads=2, head_dim=64, page_size=32), {}),
    "window, sinks, a row that begins late": (
        dict(heads=6, kv_heads=1, head_dim=64, page_size=16, window=70, sinks=True, kv_start=[3, 0, 0]),
        dict(keys=64, stages=2),
    ),
    "pages of two blocks, capped": (
        dict(heads=2, kv_heads=2, head_dim=128, page_size=128, logit_cap=5.0),
        dict(keys=64, queries=1),
    ),
    "three warpgroups, positions in two parts": (
        dict(heads=6, kv_heads=1, head_dim=64, page_size=16, window=150, sinks=True, kv_start=[3, 0, 0]),
        dict(keys=64, stages=2, parts=2, warpgroups=3),
    ),
    "K and V in one row": (
        dict(heads=16, kv_heads=1, head_dim=64, page_size=64, one_row=True),
        dict(stages=2),
    ),
}


def matrix(ref):
    """Columns of all chunks side by side."""
    values = ref[...]
    chunks, width = values.shape[0], values.shape[-1]
    return jnp.swapaxes(values.reshape(chunks, -1, width), 0, 1).reshape(-1, chunks * width)


def issue_products(q_ref, k_ref, v_ref, p, acc, transforms):
    """By plain reads, which unlike a WGMMA's have to be fenced from the TMA write that follows."""
    results = []
    if q_ref is not None:
        q = matrix(q_ref)[:HALF].astype(jnp.float32)
        results.append(jnp.einsum("qd,kd->qk", q, matrix(k_ref).astype(jnp.float32)))
    if v_ref is not None:
        results.append(acc + p.astype(jnp.float32) @ matrix(v_ref).astype(jnp.float32))
    plgpu.commit_smem()
    return results


def keep_columns(x, first, last):
    column = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where((column >= first[:, None]) & (column <= last[:, None]), x, -jnp.inf)


def zero_rows(ref, first, transforms, before=None):
    row = lax.broadcasted_iota(jnp.int32, ref.shape, 1)
    ref[...] = jnp.where((row >= first) | (row < before), 0, ref[...])


def store_words(ref, words):
    for i, word in enumerate(words):
        ref[i] = jnp.int32(word)
    plgpu.commit_smem()


def store_rows(ref, values, first, head, rows, sharing=1):
    @pl.loop(0, rows)
    def line(i):
        value = lax.dynamic_index_in_dim(values, i, 0, keepdims=False)
        ref[first + lax.div(i, sharing), head + lax.rem(i, sharing)] = value


def draw_ticket(queue_ref):
    """For a grid of one block."""
    ticket = queue_ref[0]
    queue_ref[0] = ticket + 1
    return ticket


def main() -> None:
    mla_interpreter.substitute(mosaic_gpu, None)
    for function in (issue_products, keep_columns, zero_rows, store_words, store_rows, draw_ticket):
        setattr(inline, function.__name__, function)
    inline.settle = lambda x: x
    inline.ticket = lambda drawn, scratch_ref: drawn
    plgpu.wgmma_wait = lambda n: None
    for name in sys.argv[1:] or CASES:
        options, tuning = CASES[name]
        rows = dict(ROWS)
        case = make_chunk(rows["cached"], rows["new"], rows["tokens"], dtype="bfloat16", **options)
        arguments = {
            key: jnp.asarray(value) if isinstance(value, np.ndarray) else value
            for key, value in case.options.items()
        }
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            out, lse = mosaic_gpu.gqa_prefill_mosaic(
                jnp.asarray(case.q),
                jnp.asarray(case.pool),
                case.source("virtual"),
                *[None if x is None else jnp.int32(x) for x in case.offsets],
                jnp.asarray(case.q_start),
                config=TuningConfig(blocks=1, **tuning),
                **arguments,
            )
            jax.block_until_ready(out)
        case.check(np.asarray(out, np.float64), np.asarray(lse, np.float64))
        print(f"{name}: right", flush=True)


if __name__ == "__main__":
    main()
