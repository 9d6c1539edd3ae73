"""Makes tiny random DeepSeek-V2 and -V3 checkpoints and golden data (see tools/golden.py).

pip install torch transformers==5.24.0    (an environment of its own)
python -m tools.make_golden_deepseek
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers

from tools import golden

SHARED = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
YARN = {
    "type": "yarn",
    "factor": 8.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 128,
}
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        transformers.DeepseekV3ForCausalLM,
        {
            "q_lora_rank": 24,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rope_theta": 10000.0,
            "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v2": (
        transformers.DeepseekV2Config,
        transformers.DeepseekV2ForCausalLM,
        {
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
            "rope_theta": 10000.0,
            "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v2_lite": (
        transformers.DeepseekV2Config,
        transformers.DeepseekV2ForCausalLM,
        {"q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 1.0, "rope_theta": 500.0},
    ),
}


def random_values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of parameters and of the buffer that biases the choice of experts, large enough that every part shows."""
    generator = torch.Generator().manual_seed(0)
    values = {}
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            values[name] = 1 + 0.2 * noise
        elif "correction_bias" in name:
            values[name] = 0.2 * noise
        else:
            values[name] = 1.5 * noise / tensor.shape[-1] ** 0.5
    return values


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("tests/models/golden"))
    args = parser.parse_args()
    for name, (make_config, make_model, fields) in MODELS.items():
        model = make_model(make_config(**(SHARED | fields))).eval()
        values = random_values(model)
        for buffer, tensor in model.named_buffers():
            if buffer in values:
                tensor.copy_(values[buffer])
        golden.write(
            args.out / name,
            model,
            lambda name, noise, values=values: values[name],
            lambda model: model.model.layers,
            SHARED["vocab_size"],
        )


if __name__ == "__main__":
    main()
