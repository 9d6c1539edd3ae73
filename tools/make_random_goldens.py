"""Runs transformers on models of random shape and writes golden data (see tools/golden.py) that our tests then read.

    pip install torch transformers==5.24.0    (an environment of its own)
    python -m tools.make_random_goldens --out DIR [--family qwen3_5] [--count 20] [--seed 0]
    UKV_RANDOM_GOLDENS=DIR pytest tests/models/test_random_goldens.py

A case is a directory FAMILY-SEED; case.json beside the checkpoint holds the page size to run it with.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tools import golden, make_golden_falcon_h1, make_golden_gemma4, make_golden_gpt_oss, make_golden_qwen3_5

VOCAB, STEPS = 96, 24
Sampled = tuple[torch.nn.Module, Callable, Callable]  # model, special values, its layers


def qwen3_5(rng: np.random.Generator) -> Sampled:
    """Dense or with experts; at least one layer of each kind, in any order."""
    pick = lambda *values: values[rng.integers(len(values))]
    moe, tied = bool(pick(0, 1)), bool(pick(0, 1))
    kinds = ["linear_attention", "full_attention"]
    types = rng.permutation([*kinds, *(pick(*kinds) for _ in range(pick(0, 1, 2)))]).tolist()
    kv_heads, key_heads, size = pick(1, 2, 3), pick(1, 2, 3), pick(8, 12)
    text: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": pick(24, 40, 48),
        "num_hidden_layers": len(types),
        "layer_types": types,
        "num_attention_heads": kv_heads * pick(1, 2, 4),
        "num_key_value_heads": kv_heads,
        "head_dim": pick(8, 16, 32),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * pick(1, 2, 3),
        "linear_key_head_dim": pick(4, 8, 16),
        "linear_value_head_dim": pick(4, 8, 16),
        "linear_conv_kernel_dim": pick(2, 3, 4),
        "tie_word_embeddings": tied,
        "eos_token_id": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": pick(100.0, 1e4, 1e7),
            "partial_rotary_factor": pick(0.25, 0.5, 1.0),
        },
    }
    if moe:
        text |= {
            "moe_intermediate_size": size,
            "shared_expert_intermediate_size": size * pick(1, 2),
            "num_experts": pick(4, 7),
            "num_experts_per_tok": pick(1, 2, 4),
        }
    else:
        text["intermediate_size"] = pick(20, 64)
    name = "Qwen3_5Moe" if moe else "Qwen3_5"
    config = getattr(transformers, f"{name}TextConfig")(**text)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    return model, make_golden_qwen3_5.special, lambda m: m.model.layers


def falcon_h1(rng: np.random.Generator) -> Sampled:
    pick = lambda *values: values[rng.integers(len(values))]
    scale = lambda: float(rng.uniform(0.5, 1.5))
    kv_heads, heads, head_dim = pick(1, 2, 3), pick(2, 4, 6), pick(4, 8, 16)
    config = transformers.FalconH1Config(
        vocab_size=VOCAB,
        hidden_size=pick(24, 48),
        intermediate_size=pick(20, 64),
        num_hidden_layers=pick(1, 2),
        num_attention_heads=kv_heads * pick(1, 2, 4),
        num_key_value_heads=kv_heads,
        head_dim=pick(8, 16, 32),
        rope_theta=pick(100.0, 1e4, 1e11),
        tie_word_embeddings=bool(pick(0, 1)),
        mamba_d_ssm=heads * head_dim,
        mamba_n_heads=heads,
        mamba_d_head=head_dim,
        mamba_n_groups=pick(1, 2),
        mamba_d_state=pick(4, 8, 16),
        mamba_d_conv=pick(2, 3, 4),
        mamba_chunk_size=pick(8, 64),
        mamba_conv_bias=bool(pick(0, 1)),
        mamba_rms_norm=bool(pick(0, 1)),
        mamba_norm_before_gate=bool(pick(0, 1)),
        attention_in_multiplier=scale(),
        attention_out_multiplier=scale(),
        embedding_multiplier=scale(),
        key_multiplier=scale(),
        lm_head_multiplier=scale(),
        mlp_multipliers=[scale(), scale()],
        ssm_in_multiplier=scale(),
        ssm_multipliers=[scale() for _ in range(5)],
        ssm_out_multiplier=scale(),
    )
    return (
        transformers.FalconH1ForCausalLM(config),
        make_golden_falcon_h1.special,
        lambda m: m.model.layers,
    )


def gpt_oss(rng: np.random.Generator) -> Sampled:
    """At least one full layer. No window of 1: transformers 5.24 then decodes with the whole cache."""
    pick = lambda *values: values[rng.integers(len(values))]
    kinds = ["sliding_attention", "full_attention"]
    types = rng.permutation(["full_attention", *(pick(*kinds) for _ in range(pick(0, 1, 2)))]).tolist()
    kv_heads = pick(1, 2, 3)
    rope = {"rope_type": "default", "rope_theta": pick(100.0, 1e4, 1.5e5)}
    if pick(0, 1):
        factor = pick(2.0, 8.0)
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": int(1024 / factor)}
        rope |= yarn | {"truncate": bool(pick(0, 1)), "beta_fast": pick(8.0, 32.0), "beta_slow": 1.0}
    config = transformers.GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=pick(24, 40, 48),
        intermediate_size=pick(8, 20, 32),
        num_hidden_layers=len(types),
        layer_types=types,
        sliding_window=pick(2, 7, 32, 100),
        num_attention_heads=kv_heads * pick(1, 2, 8),
        num_key_value_heads=kv_heads,
        head_dim=pick(8, 16, 32),
        num_local_experts=pick(4, 7),
        num_experts_per_tok=pick(1, 2, 4),
        swiglu_limit=pick(1.0, 7.0),
        tie_word_embeddings=bool(pick(0, 1)),
        max_position_embeddings=1024,
        rope_parameters=rope,
        eos_token_id=1,
    )
    return transformers.GptOssForCausalLM(config), make_golden_gpt_oss.special, lambda m: m.model.layers


def gemma4(rng: np.random.Generator) -> Sampled:
    """Ends in a full layer; caches are shared where both kinds come early enough."""
    pick = lambda *values: values[rng.integers(len(values))]
    types = [pick("sliding_attention", "full_attention") for _ in range(pick(0, 1, 3))] + ["full_attention"]
    shared = pick(0, 1, 2)
    if set(types) != set(types[: len(types) - shared]):
        shared = 0
    kv_heads, width = pick(1, 2), pick(0, 8)
    config = transformers.Gemma4TextConfig(
        vocab_size=VOCAB,
        hidden_size=pick(24, 40, 48),
        intermediate_size=pick(20, 64),
        num_hidden_layers=len(types),
        layer_types=types,
        sliding_window=pick(2, 7, 32, 100),
        num_attention_heads=2 * kv_heads * pick(1, 2),
        num_key_value_heads=kv_heads,
        head_dim=pick(8, 16),
        global_head_dim=pick(8, 32),
        num_global_key_value_heads=pick(1, 2),
        attention_k_eq_v=bool(pick(0, 1)),
        num_kv_shared_layers=shared,
        use_double_wide_mlp=bool(pick(0, 1)),
        hidden_size_per_layer_input=width,
        vocab_size_per_layer_input=VOCAB,
        final_logit_softcapping=pick(None, 10.0),
        max_position_embeddings=1024,
    )
    return transformers.Gemma4ForCausalLM(config), make_golden_gemma4.special, lambda m: m.model.layers


FAMILIES: dict[str, Callable[[np.random.Generator], Sampled]] = {
    "falcon_h1": falcon_h1,
    "gemma4": gemma4,
    "gpt_oss": gpt_oss,
    "qwen3_5": qwen3_5,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--family", choices=sorted(FAMILIES), action="append", help="default: all")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    args = parser.parse_args()
    for family in args.family or FAMILIES:
        for seed in range(args.seed, args.seed + args.count):
            rng = np.random.default_rng([seed, *family.encode()])
            model, special, layers = FAMILIES[family](rng)
            directory = args.out / f"{family}-{seed}"
            prompt, page_size = int(rng.integers(1, 140)), int(rng.choice([1, 16, 64]))
            golden.write(
                directory, model.eval(), special, layers, VOCAB, prompt=prompt, steps=STEPS, seed=seed
            )
            (directory / "case.json").write_text(json.dumps({"page_size": page_size}))


if __name__ == "__main__":
    main()
