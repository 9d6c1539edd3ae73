"""Runs the Mosaic GQA decode kernel in Pallas' GPU interpreter, with race detection: `python -m tests.kernels.gqa_interpreter`.

What is replaced by its meaning, and why: `tests.kernels.mla_interpreter`. P stays in registers here, so its product with V
is replaced too.
"""

import sys

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gqa_decode import mosaic_gpu
from tests.kernels.gqa_case import make_case
from tests.kernels.mla_interpreter import substitute

# Rows cut between workers, windows, an empty row, drafts of three queries, ids translated in the kernel.
LENGTHS = [77, 0, 130, 64, 300]
CASES = {
    "two workers a block": dict(
        heads=8, kv_heads=2, head_dim=64, page_size=32, kv_start=[3, 0, 65, 0, 129], sinks=True
    ),
    "drafts in a window": dict(
        heads=8, kv_heads=1, head_dim=128, s_q=3, window=70, page_size=64, sinks=True, logit_cap=5.0
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


def main() -> None:
    substitute(mosaic_gpu, add_products)
    for name in sys.argv[1:] or CASES:
        case = make_case(LENGTHS, dtype="bfloat16", **CASES[name])
        options = {key: value for key, value in case.options.items() if key != "sinks"}
        sinks = case.options["sinks"]
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            out, lse = mosaic_gpu.gqa_decode_mosaic(
                jnp.asarray(case.q),
                jnp.asarray(case.pool),
                case.source("virtual"),
                jnp.int32(case.offsets[0]),
                None if case.offsets[1] is None else jnp.int32(case.offsets[1]),
                sinks=None if sinks is None else jnp.asarray(sinks),
                config=mosaic_gpu.TuningConfig(blocks=3),
                **options,
            )
            out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
        case.check(out, lse)
        print(f"{name}: right", flush=True)


if __name__ == "__main__":
    main()
