"""Makes the golden data of Kimi-Linear with transformers, in float32 on the CPU.

    pip install torch transformers==5.24.0    (an environment of its own)
    python -m tools.make_golden_kimi [--only random | trained]

random: a tiny random checkpoint and what it computes (see tools/golden.py). Its config.json is in the published form, with
every field of Kimi-Linear-48B-A3B's, the same values for all that is not a size, and layers in the order of its last ones.

trained: kimi_linear_tiny.npz for the trained checkpoint. It holds, for each prompt i: ids_i Int32[n], positions_i Int32[p],
logits_i Float32[p, vocab] of those positions (every position of short prompts), greedy_i Int32[256] (the tokens that
follow, ends of text included) and margin_i, the smallest gap between the best and the second logit on that way.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tools import golden

RANDOM: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "torch_dtype": "bfloat16",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "hidden_act": "silu",
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "mla_use_nope": True,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "model_max_length": 1024,
    "linear_attn_config": {
        "full_attn_layers": [3, 6],
        "kda_layers": [1, 2, 4, 5],
        "num_heads": 4,
        "head_dim": 12,
        "short_conv_kernel_size": 4,
    },
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 1,
    "moe_intermediate_size": 16,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 2.446,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-05,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

PROMPTS = [
    "T",
    "The for",
    "A class is defined by its body, and its attributes are looked up",
    "The import statement finds a module, loads it and binds a name in the local scope. When the module is not "
    "found, an error is raised. Note that the order in which",
    "Lists are mutable sequences, typically used to hold items of the same kind. A tuple is immutable: once it "
    "was made, it can't be changed. Both support indexing, slicing and iteration, and both compare item by item. "
    "Expressions are evaluated from left to right. While an assignment is evaluated, the right side comes first.",
]
STEPS = 256


def special(name: str, noise: torch.Tensor) -> torch.Tensor | None:
    if name.endswith("A_log"):
        return (noise - 1).clamp(max=2)
    if name.endswith("dt_bias"):
        return 0.3 * noise
    return 1 + 0.2 * noise if "norm" in name else None


def write_random(directory: Path) -> None:
    config = transformers.KimiLinearConfig(**RANDOM)
    model = transformers.KimiLinearForCausalLM(config).eval()
    golden.bias_choice(model)
    # Of five seeds the one whose float32 logits are nearest to float64: 1.2e-5 of the largest (seed 0: 4.0e-5).
    options = dict(seed=3, published=RANDOM)
    golden.write(directory, model, special, lambda m: m.model.layers, RANDOM["vocab_size"], **options)


@torch.no_grad()
def continued(model: torch.nn.Module, ids: list[int]) -> dict[str, np.ndarray]:
    """One pass over the prompt, then STEPS greedy tokens through transformers' own cache."""
    out = model(input_ids=torch.tensor([ids]), use_cache=True)
    logits = out.logits[0]
    keep = list(range(len(ids))) if len(ids) <= 64 else sorted({*range(0, len(ids), 16), len(ids) - 1})
    greedy, margin = [], float("inf")
    for _ in range(STEPS):
        best = out.logits[0, -1].topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        greedy.append(int(best.indices[0]))
        out = model(input_ids=best.indices[None, :1], cache=out.cache, use_cache=True)
    return {
        "ids": np.asarray(ids, np.int32),
        "positions": np.asarray(keep, np.int32),
        "logits": logits[keep].numpy(),
        "greedy": np.asarray(greedy, np.int32),
        "margin": np.float32(margin),
    }


def write_trained(checkpoint: Path, out: Path) -> None:
    torch.set_num_threads(1)  # tiny matrices, and results that don't depend on the number of cores
    model = transformers.KimiLinearForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    arrays = {}
    for i, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt)["input_ids"]
        found = continued(model, ids)
        print(f"{len(ids)} tokens, margin {found['margin']:.2e}: {prompt!r}")
        print("   ", repr(tokenizer.decode(found["greedy"])))
        arrays |= {f"{name}_{i}": value for name, value in found.items()}
    np.savez_compressed(out, versions=f"transformers {transformers.__version__}", **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("tests/models/golden"))
    parser.add_argument("--only", choices=["random", "trained"], help="default: both")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/kimi-linear-tiny"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.only != "trained":
        write_random(args.out / "kimi_linear")
    if args.only != "random":
        write_trained(args.checkpoint, args.out / "kimi_linear_tiny.npz")


if __name__ == "__main__":
    main()
