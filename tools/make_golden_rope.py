"""Writes the inverse frequencies and cosine multipliers that transformers derives from rope parameters.

    pip install torch transformers==5.24.0    (an environment of its own)
    python tools/make_golden_rope.py

The file holds for each case `config_NAME` (config.json as text), `inv_freq_NAME` Float32[dim / 2] and `amplitude_NAME`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {  # head_dim, max_position_embeddings, rope_parameters
    "plain": (128, 4096, {"rope_type": "default", "rope_theta": 1e11}),
    "partial": (256, 4096, {"rope_type": "linear", "factor": 1.0, "rope_theta": 1e7, "partial_rotary_factor": 0.25}),
    "linear": (64, 8192, {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}),
    "llama3": (
        64,
        131072,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 5e5,
        },
    ),
    "deepseek_v3": (64, 163840, {**YARN, "rope_theta": 1e4, "beta_fast": 32, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "deepseek_v2_lite": (64, 163840, {**YARN, "rope_theta": 1e4, "mscale": 0.707, "mscale_all_dim": 0.707}),
    "yarn_mscales": (64, 163840, {**YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0.5}),
    "gpt_oss": (64, 131072, {**YARN, "factor": 32.0, "rope_theta": 150000, "beta_slow": 1.0, "truncate": False}),
    "yarn_named_attention": (32, 16384, {**YARN, "factor": 4.0, "rope_theta": 1e6, "attention_factor": 0.75}),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("tests/models/golden/rope.npz"))
    args = parser.parse_args()
    arrays: dict[str, Any] = {}
    for name, (head_dim, longest, parameters) in CASES.items():
        fields = {"head_dim": head_dim, "max_position_embeddings": longest, "rope_parameters": parameters}
        config = transformers.LlamaConfig(
            hidden_size=head_dim, num_attention_heads=1, **json.loads(json.dumps(fields))
        )
        kind = parameters["rope_type"]
        derive = (
            LlamaRotaryEmbedding.compute_default_rope_parameters
            if kind == "default"
            else ROPE_INIT_FUNCTIONS[kind]
        )
        inv_freq, amplitude = derive(config)
        arrays |= {
            f"config_{name}": json.dumps(fields),
            f"inv_freq_{name}": inv_freq.numpy(),
            f"amplitude_{name}": np.float64(amplitude),
        }
    np.savez_compressed(args.out, versions=f"transformers {transformers.__version__}", **arrays)


if __name__ == "__main__":
    main()
