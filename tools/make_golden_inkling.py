"""Makes a tiny random Inkling checkpoint and golden data (see tools/golden.py).

    pip install torch transformers==5.24.0    (an environment of its own)
    python -m tools.make_golden_inkling

It is a multimodal one under the published tensor names, with vision and audio beside the text. Heads of full and of
sliding-window layers differ in number; the prompt is longer than the window, than the extents of both biases and than the
length that log scaling starts from.
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
    "unpadded_vocab_size": 90,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "local_layer_ids": [0, 2],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "swa_num_attention_heads": 6,
    "swa_num_key_value_heads": 3,
    "swa_head_dim": 8,
    "sliding_window_size": 20,
    "d_rel": 4,
    "rel_extent": 40,
    "log_scaling_n_floor": 32,
    "log_scaling_alpha": 0.1,
    "dense_mlp_idx": 1,
    "dense_intermediate_size": 64,
    "intermediate_size": 16,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "route_scale": 2.0,
    "conv_kernel_size": 4,
    "logits_mup_width_multiplier": 3.0,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
VISION = {"patch_size": 2, "temporal_patch_size": 2, "num_channels": 1, "num_hidden_layers": 3}
AUDIO = {"n_mel_bins": 2, "mel_vocab_size": 2}


def special(name: str, noise: torch.Tensor) -> torch.Tensor | None:
    if "norm" in name or name.endswith("global_scale"):
        return 1 + 0.2 * noise
    if "sconv" in name:
        return 0.4 * noise
    if name.endswith(("rel_logits_proj.proj", "r_proj.weight")):  # a bias of about one
        return noise / noise.shape[-1 if name.endswith("weight") else 0] ** 0.5
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("tests/models/golden"))
    args = parser.parse_args()
    config = transformers.InklingConfig(text_config=TEXT, vision_config=VISION, audio_config=AUDIO)
    model = transformers.InklingForConditionalGeneration(config).eval()
    golden.bias_choice(model)
    layers = lambda model: model.model.language_model.layers
    golden.write(args.out / "inkling", model, special, layers, VOCAB)


if __name__ == "__main__":
    main()
