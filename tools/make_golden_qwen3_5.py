"""Makes tiny random Qwen3.5 checkpoints, dense and with experts, and golden data (see tools/golden.py).

    pip install torch transformers==5.24.0    (an environment of its own)
    python -m tools.make_golden_qwen3_5

They are multimodal ones, as published: text under text_config and model.language_model, and vision tensors beside it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers

from tools import golden

VOCAB = 96
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 1024,
    "eos_token_id": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 1,
    "patch_size": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 4,
}
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "qwen3_5": (
        transformers.Qwen3_5Config,
        transformers.Qwen3_5ForConditionalGeneration,
        {"intermediate_size": 64, "tie_word_embeddings": True},
    ),
    "qwen3_5_moe": (
        transformers.Qwen3_5MoeConfig,
        transformers.Qwen3_5MoeForConditionalGeneration,
        {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
        },
    ),
}


def special(name: str, noise: torch.Tensor) -> torch.Tensor | None:
    if name.endswith("A_log"):
        return (noise - 1).clamp(max=2)
    if name.endswith("linear_attn.norm.weight"):
        return 1 + 0.2 * noise
    if "norm" in name or name.endswith("dt_bias"):  # the other norms multiply by 1 + weight
        return 0.2 * noise
    if "experts" in name:
        return 2 * noise / noise.shape[-1] ** 0.5
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("tests/models/golden"))
    args = parser.parse_args()
    for name, (make_config, make_model, fields) in MODELS.items():
        tied = fields.pop("tie_word_embeddings", False)
        config = make_config(
            text_config={**TEXT, **fields, "tie_word_embeddings": tied},
            vision_config=VISION,
            tie_word_embeddings=tied,
            image_token_id=VOCAB,  # no token of the prompt
            video_token_id=VOCAB + 1,
            vision_start_token_id=VOCAB + 2,
            vision_end_token_id=VOCAB + 3,
        )
        layers = lambda model: model.model.language_model.layers
        golden.write(args.out / name, make_model(config).eval(), special, layers, VOCAB)


if __name__ == "__main__":
    main()
