"""Makes tiny random gemma-4 text checkpoints and golden data (see tools/golden.py).

    pip install torch transformers==5.24.0    (an environment of its own)
    python -m tools.make_golden_gemma4

gemma4 has all that E2B has (per-layer inputs, layers that read another layer's cache, wider MLPs there), gemma4_plain what
the dense larger models have (keys that serve as values in full attention, fewer KV heads there), gemma4_moe the experts of
26B-A4B.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers

from tools import golden

VOCAB = 96
SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "sliding_window": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "max_position_embeddings": 1024,
    "final_logit_softcapping": 10.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "gemma4": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
    },
    "gemma4_plain": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
    },
    "gemma4_moe": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
}


def special(name: str, noise: torch.Tensor) -> torch.Tensor | None:
    if "norm" in name or name.endswith(("router.scale", "per_expert_scale")):
        return 1 + 0.2 * noise
    if name.endswith(
        "embed_tokens.weight"
    ):  # also the head's: larger ones would repeat the last token for ever
        return 0.3 * noise / noise.shape[-1] ** 0.5
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("tests/models/golden"))
    args = parser.parse_args()
    for name, fields in MODELS.items():
        model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**SHARED, **fields)).eval()
        for i, layer in enumerate(model.model.layers):
            layer.layer_scalar.fill_(1.25 - 0.125 * i)
        golden.write(args.out / name, model, special, lambda model: model.model.layers, VOCAB)


if __name__ == "__main__":
    main()
