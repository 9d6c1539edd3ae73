"""Runs the Mosaic GQA decode kernel in Pallas' GPU interpreter, with race detection: `python -m tests.kernels.gqa_interpreter`.

What is replaced by its meaning, and why: `tests.kernels.mla_interpreter`. P stays in registers here, so its product with V
is replaced too.
"""

import sys

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gqa_decode import mosaic_gpu
from tests.kernels.gqa_case import make_case
from tests.kernels.mla_interpreter import substitute

# Rows cut between workers, windows, an empty row, drafts of three queries, ids translated in the kernel.
LENGTHS = [77, 0, 130, 64, 300]
CASES = {
    "two workers a block": dict(
        lengths=[*LENGTHS, *[9] * 13, 200],
        kv_start=[3, 0, 65, 0, 129, *[0] * 14],
        heads=8,
        kv_heads=2,
        head_dim=64,
        page_size=32,
        sinks=True,
    ),
    "drafts in a window": dict(
        heads=8, kv_heads=1, head_dim=128, s_q=3, window=70, page_size=64, sinks=True, logit_cap=5.0
    ),
    "four narrow heads a worker, drafts": dict(
        heads=12, kv_heads=4, head_dim=32, s_q=3, window=70, page_size=64, sinks=True
    ),
    "bias by distance": dict(
        heads=10, kv_heads=2, head_dim=64, s_q=2, bias_extent=90, logit_cap=9.0, page_size=64
    ),
    "single rows of a stream": dict(
        heads=8,
        kv_heads=2,
        head_dim=64,
        page_size=4,
        kv_start=[3, 0, 65, 0, 129],
        sinks=True,
        delivery="stream",
    ),
    "two blocks of a cluster, each with half of the heads": dict(
        heads=16, kv_heads=8, head_dim=64, page_size=64, sinks=True, blocks=4
    ),
    "wide V in two parts, behind K": dict(heads=8, kv_heads=1, head_dim=96, v_head_dim=512, page_size=16),
}


def add_products(accumulators, left, rights):
    """By plain reads, which unlike a WGMMA's have to be fenced from the TMA write that follows."""
    sums = [
        acc + jnp.dot(left, right[...], preferred_element_type=jnp.float32)
        for acc, right in zip(accumulators, rights, strict=True)
    ]
    plgpu.commit_smem()
    return sums


def add_bias(scores, bias_ref, line, rows, distance, first_query_row, *, sharing, unit):
    row, column = (lax.broadcasted_iota(jnp.int32, scores.shape, axis) for axis in (0, 1))
    query = 0 if sharing is None else (first_query_row + row) // sharing
    d = distance + query - column
    bias = bias_ref[...]
    lines, extent = bias.shape
    inside = (row >= rows[0]) & (row < rows[1]) & (d >= 0) & (d < extent)
    value = bias.reshape(-1)[jnp.clip((line + row) * extent + d, 0, lines * extent - 1)]
    return scores + unit * jnp.where(inside, value, 0)


def main() -> None:
    substitute(mosaic_gpu, add_products)
    mosaic_gpu.add_bias = add_bias
    for name in sys.argv[1:] or CASES:
        problem = {"lengths": LENGTHS, "dtype": "bfloat16", "delivery": "virtual"} | CASES[name]
        delivery, blocks = problem.pop("delivery"), problem.pop("blocks", 3)
        case = make_case(**problem)
        options = {
            key: jnp.asarray(value) if isinstance(value, np.ndarray) else value
            for key, value in case.options.items()
        }
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            out, lse = mosaic_gpu.gqa_decode_mosaic(
                jnp.asarray(case.q),
                jnp.asarray(case.pool),
                case.source(delivery),
                jnp.int32(case.offsets[0]),
                None if case.offsets[1] is None else jnp.int32(case.offsets[1]),
                config=mosaic_gpu.TuningConfig(blocks=blocks),
                **options,
            )
            out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
        case.check(out, lse)
        print(f"{name}: right", flush=True)


if __name__ == "__main__":
    main()
