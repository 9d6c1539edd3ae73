"""Runs the Triton kernel of chunks in Triton's interpreter (see `triton_interpreter`).

Run it as `python -m tests.kernels.chunk_interpreter`.
"""

import jax
import numpy as np

from pallas_kernels.gqa_prefill import triton as chunks
from tests.kernels import triton_interpreter
from tests.kernels.chunk_case import make_chunk
from tests.kernels.delivered import DELIVERIES

# Small, so that few tokens make tiles, blocks and columns of V of every kind.
TILE = {"COLS": 32, "BLOCK": 16, "V_COLS": 32, "STAGES": 2, "WARPS": 4}
CASES = (
    {"heads": 6, "kv_heads": 2, "sinks": True, "window": 40, "page_size": 8},
    {"heads": 4, "kv_heads": 1, "head_dim": 96, "v_head_dim": 64, "kv_start": [0, 3, 0], "logit_cap": 2.0},
    {"heads": 5, "kv_heads": 1, "bias_extent": 20, "page_size": 1},
    {"kv_dtype": "float8_e4m3fn", "page_size": 32, "window": 50},
)


def main() -> None:
    triton_interpreter.substitute(cores=3)
    chunks.triton_call = triton_interpreter.call
    chunks.tile_sizes = lambda *_: TILE
    for options in CASES:
        case = make_chunk([0, 40, 90], [40, 1, 17], 40, dtype="bfloat16", **options)
        with jax.disable_jit():
            results = [case.run("triton", delivery) for delivery in DELIVERIES]
        case.check(*results[0], tolerance=8e-3)  # this interpreter cuts bits off where a GPU rounds
        for result in results[1:]:
            for one, other in zip(result, results[0], strict=True):
                np.testing.assert_array_equal(one, other)
        print("right:", options, flush=True)


if __name__ == "__main__":
    main()
