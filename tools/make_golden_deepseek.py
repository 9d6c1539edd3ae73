"""Makes tiny random DeepSeek checkpoints with transformers and writes what it computes with them, in float32 on the CPU.

    pip install torch transformers==5.24.0    (an environment of its own)
    python tools/make_golden_deepseek.py

Each directory holds a checkpoint in published naming (bfloat16, and a name for each expert) and golden.npz: ids
Int32[n] (a prompt over two pages of 64), logits Float32[n, vocab], hidden Float32[layers + 1, p, hidden] (embedding
and output of each layer at `positions` Int32[p]), greedy Int32[64] (the tokens that follow), greedy_logits
Float32[64, vocab] (those that each was chosen by) and margin, the smallest gap between best and second on that way.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

PROMPT, STEPS = 150, 64
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


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Values large enough that every part shows in the logits; rounded to bfloat16, as they are stored."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            tensor.copy_((1 + 0.2 * noise).bfloat16())
        elif "correction_bias" in name:
            tensor.copy_((0.2 * noise).bfloat16())
        else:
            tensor.copy_((1.5 * noise / tensor.shape[-1] ** 0.5).bfloat16())


@torch.no_grad()
def golden(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """One pass over the prompt, then STEPS greedy tokens through transformers' own cache."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, model.config.vocab_size, (1, PROMPT), generator=generator)
    out = model(input_ids=ids, use_cache=True)
    layers = _layer_outputs(model, ids)
    positions = sorted({*range(0, PROMPT, 8), PROMPT - 1})
    logits, greedy, greedy_logits = out.logits[0], [], []
    for _ in range(STEPS):
        greedy_logits.append(out.logits[0, -1].numpy())
        greedy.append(int(greedy_logits[-1].argmax()))
        out = model(input_ids=torch.tensor([[greedy[-1]]]), cache=out.cache, use_cache=True)
    best = np.sort(np.stack(greedy_logits), axis=1)[:, -2:]
    return {
        "ids": ids[0].numpy().astype(np.int32),
        "positions": np.asarray(positions, np.int32),
        "logits": logits.numpy(),
        "hidden": np.stack([x[0, positions].numpy() for x in layers]),
        "greedy": np.asarray(greedy, np.int32),
        "greedy_logits": np.stack(greedy_logits),
        "margin": np.float32((best[:, 1] - best[:, 0]).min()),
    }


def _layer_outputs(model: torch.nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """Embedding and what each layer hands to the next (hidden_states would hold the last one normed)."""
    found: list[torch.Tensor] = []
    keep = lambda module, args, out: found.append(out[0] if isinstance(out, tuple) else out)
    hooks = [m.register_forward_hook(keep) for m in (model.model.embed_tokens, *model.model.layers)]
    model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("tests/models/golden"))
    args = parser.parse_args()
    torch.set_num_threads(1)  # tiny matrices, and results that don't depend on the number of cores
    for name, (make_config, make_model, fields) in MODELS.items():
        directory = args.out / name
        model = make_model(make_config(**(SHARED | fields))).eval()
        randomize(model)
        model.to(torch.bfloat16).save_pretrained(directory)
        model = make_model.from_pretrained(directory, dtype=torch.float32).eval()
        found = golden(model)
        np.savez_compressed(
            directory / "golden.npz", versions=f"transformers {transformers.__version__}", **found
        )
        size = sum(path.stat().st_size for path in directory.iterdir())
        print(f"{name}: {size / 1e3:.0f} kB, margin {found['margin']:.2e}, greedy {found['greedy'].tolist()}")


if __name__ == "__main__":
    main()
