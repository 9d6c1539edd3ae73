"""Makes a tiny random gpt-oss checkpoint and golden data (see tools/golden.py).

    pip install torch transformers==5.24.0    (an environment of its own)
    python -m tools.make_golden_gpt_oss

Sliding-window and full layers alternate; the prompt is longer than the window and than the length that YaRN starts from,
and the limit of the experts' activation is low enough to be reached.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers

from tools import golden

VOCAB = 96
CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 20,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "swiglu_limit": 2.0,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 128,
    },
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def special(name: str, noise: torch.Tensor) -> torch.Tensor | None:
    if "norm" in name:
        return 1 + 0.2 * noise
    if name.endswith("sinks"):
        return 1 + noise
    if "bias" in name:
        return 0.3 * noise
    if "experts" in name:  # [experts, in, out]
        return 2 * noise / noise.shape[1] ** 0.5
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("tests/models/golden"))
    args = parser.parse_args()
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**CONFIG)).eval()
    golden.write(args.out / "gpt_oss", model, special, lambda model: model.model.layers, VOCAB)


if __name__ == "__main__":
    main()
