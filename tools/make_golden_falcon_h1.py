"""Makes tiny random Falcon-H1 checkpoints, without and with a gated norm, and golden data (see tools/golden.py).

    pip install torch transformers==5.24.0    (an environment of its own)
    python -m tools.make_golden_falcon_h1

The first has what the published models have; every constant that scales activations is another than 1.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers

from tools import golden

SHARED: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rope_theta": 1e11,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "mamba_d_ssm": 48,
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 32,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.9375,
    "embedding_multiplier": 1.7,
    "key_multiplier": 0.5,
    "lm_head_multiplier": 0.6,
    "mlp_multipliers": [0.88, 0.7],
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.9, 0.75, 0.6, 1.1, 0.8],
    "ssm_out_multiplier": 0.85,
}
MODELS: dict[str, dict[str, Any]] = {
    "falcon_h1": {},
    "falcon_h1_norm": {
        "num_hidden_layers": 2,
        "mamba_n_groups": 2,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "tie_word_embeddings": True,
    },
}


def special(name: str, noise: torch.Tensor) -> torch.Tensor | None:
    if name.endswith("A_log"):
        return (noise - 1).clamp(max=2)
    if name.endswith(("dt_bias", "conv1d.bias")):
        return 0.3 * noise
    if "norm" in name or name.endswith(".D"):
        return 1 + 0.2 * noise
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("tests/models/golden"))
    args = parser.parse_args()
    for name, fields in MODELS.items():
        config = transformers.FalconH1Config(**(SHARED | fields))
        model = transformers.FalconH1ForCausalLM(config).eval()
        golden.write(args.out / name, model, special, lambda m: m.model.layers, config.vocab_size)


if __name__ == "__main__":
    main()
