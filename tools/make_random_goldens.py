"""Runs transformers on models of random shape and writes golden data (see tools/golden.py) that our tests then read.

    make random-goldens     in an environment of its own, and then the tests; or by hand:

    pip install torch transformers==5.24.0
    python -m tools.make_random_goldens --out DIR [--family qwen3_5] [--count 20] [--seed 0] [--draw SEED]
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
from transformers.utils import logging

from tools import (
    golden,
    make_golden_falcon_h1,
    make_golden_gemma4,
    make_golden_gpt_oss,
    make_golden_inkling,
    make_golden_kimi,
    make_golden_qwen3_5,
)

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
    """At least one full layer."""
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
        sliding_window=pick(1, 7, 32, 100),
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
    """Ends in a full layer; caches are shared where both kinds come early enough. Half of them have experts."""
    more = rng.spawn(1)[0]
    pick = lambda *values: values[rng.integers(len(values))]
    types = [pick("sliding_attention", "full_attention") for _ in range(pick(0, 1, 3))] + ["full_attention"]
    shared = pick(0, 1, 2)
    if set(types) != set(types[: len(types) - shared]):
        shared = 0
    # Without per-layer inputs, transformers 5.24 cannot run layers that share caches.
    kv_heads, width = pick(1, 2), 8 if shared else pick(0, 8)
    config = transformers.Gemma4TextConfig(
        vocab_size=VOCAB,
        hidden_size=pick(24, 40, 48),
        intermediate_size=pick(20, 64),
        num_hidden_layers=len(types),
        layer_types=types,
        sliding_window=pick(1, 7, 32, 100),
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
        enable_moe_block=bool(more.integers(2)),
        num_experts=int(more.integers(4, 8)),
        top_k_experts=int(more.integers(1, 4)),
        moe_intermediate_size=int(more.choice([8, 12])),
    )
    return transformers.Gemma4ForCausalLM(config), make_golden_gemma4.special, lambda m: m.model.layers


def inkling(rng: np.random.Generator) -> Sampled:
    """At least one full layer; heads of full and of sliding-window layers differ."""
    pick = lambda *values: values[rng.integers(len(values))]
    kinds = ["hybrid_sliding", "hybrid"]
    types = rng.permutation(["hybrid", *(pick(*kinds) for _ in range(pick(0, 1, 2)))]).tolist()
    kv_heads, swa_heads = pick(1, 2, 3), pick(1, 2, 3)
    config = transformers.InklingTextConfig(
        vocab_size=VOCAB,
        unpadded_vocab_size=pick(None, 77),
        hidden_size=pick(24, 40, 48),
        num_hidden_layers=len(types),
        layer_types=types,
        mlp_layer_types=[pick("dense", "sparse") for _ in types],
        num_attention_heads=kv_heads * pick(1, 2, 4),
        num_key_value_heads=kv_heads,
        head_dim=pick(8, 16, 32),
        swa_num_attention_heads=swa_heads * pick(1, 2, 4),
        swa_num_key_value_heads=swa_heads,
        swa_head_dim=pick(8, 16, 32),
        sliding_window_size=pick(1, 7, 32, 100),
        d_rel=pick(2, 8),
        rel_extent=pick(1, 20, 200),
        log_scaling_n_floor=pick(None, 10, 50),
        log_scaling_alpha=pick(0.1, 0.5),
        conv_kernel_size=pick(2, 3, 4),
        intermediate_size=pick(20, 64),
        moe_intermediate_size=pick(8, 12),
        n_routed_experts=pick(4, 7),
        num_experts_per_tok=pick(1, 2, 4),
        n_shared_experts=pick(1, 2),
        route_scale=pick(1.0, 3.0),
        logits_mup_width_multiplier=pick(1.0, 3.0),
        max_position_embeddings=1024,
        eos_token_id=1,
    )
    model = transformers.InklingForCausalLM(config)
    golden.bias_choice(model)
    return model, make_golden_inkling.special, lambda m: m.model.layers


def kimi_linear(rng: np.random.Generator) -> Sampled:
    """At least one layer of each kind, in any order."""
    pick = lambda *values: values[rng.integers(len(values))]
    kinds = ["linear_attention", "full_attention"]
    types = rng.permutation([*kinds, *(pick(*kinds) for _ in range(pick(0, 1)))]).tolist()
    groups, per_group = pick((1, 7), (2, 3), (4, 2))
    config = transformers.KimiLinearConfig(
        vocab_size=VOCAB,
        num_hidden_layers=len(types),
        layer_types=types,
        mlp_layer_types=[pick("dense", "sparse") for _ in types],
        linear_num_heads=pick(1, 2, 3),
        linear_head_dim=pick(4, 8, 16),
        linear_conv_kernel_dim=pick(2, 3, 4),
        n_group=groups,
        num_local_experts=groups * per_group,
        norm_topk_prob=bool(pick(0, 1)),
        **_latent(rng),
        **_experts(rng, groups),
    )
    model = transformers.KimiLinearForCausalLM(config)
    golden.bias_choice(model)
    return model, make_golden_kimi.special, lambda m: m.model.layers


def deepseek_v3(rng: np.random.Generator) -> Sampled:
    pick = lambda *values: values[rng.integers(len(values))]
    groups, per_group = pick((1, 7), (2, 3), (4, 2))
    layers = pick(1, 2)
    config = transformers.DeepseekV3Config(
        vocab_size=VOCAB,
        num_hidden_layers=layers,
        first_k_dense_replace=pick(0, 1, layers),
        n_group=groups,
        n_routed_experts=groups * per_group,
        norm_topk_prob=bool(pick(0, 1)),
        rope_interleave=bool(pick(0, 1)),
        rope_parameters=_rope(rng),
        tie_word_embeddings=bool(pick(0, 1)),
        **_latent(rng),
        **_experts(rng, groups),
    )
    model = transformers.DeepseekV3ForCausalLM(config)
    golden.bias_choice(model)
    return model, _norms_about_one, lambda m: m.model.layers


def deepseek_v2(rng: np.random.Generator) -> Sampled:
    pick = lambda *values: values[rng.integers(len(values))]
    groups, per_group = pick((1, 7), (2, 3), (4, 2))
    layers, grouped = pick(1, 2), groups > 1
    config = transformers.DeepseekV2Config(
        vocab_size=VOCAB,
        num_hidden_layers=layers,
        first_k_dense_replace=pick(0, 1, layers),
        topk_method="group_limited_greedy" if grouped else "greedy",
        n_group=groups if grouped else None,
        n_routed_experts=groups * per_group,
        rope_parameters=_rope(rng),
        tie_word_embeddings=bool(pick(0, 1)),
        **_latent(rng),
        **_experts(rng, groups),
    )
    return transformers.DeepseekV2ForCausalLM(config), _norms_about_one, lambda m: m.model.layers


def _latent(rng: np.random.Generator) -> dict[str, Any]:
    """Fields of latent attention, and the width of the model."""
    pick = lambda *values: values[rng.integers(len(values))]
    heads = pick(1, 2, 4)
    return {
        "hidden_size": pick(24, 40, 48),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": pick(8, 24, 32),
        "q_lora_rank": pick(None, 12),
        "qk_nope_head_dim": pick(8, 12, 16),
        "qk_rope_head_dim": pick(4, 8),
        "v_head_dim": pick(8, 12, 16),
        "max_position_embeddings": 1024,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }


def _experts(rng: np.random.Generator, groups: int) -> dict[str, Any]:
    """Fields of experts in so many groups of two or more."""
    pick = lambda *values: values[rng.integers(len(values))]
    kept = int(rng.integers(1, groups + 1))
    return {
        "intermediate_size": pick(20, 64),
        "moe_intermediate_size": pick(8, 12),
        "n_shared_experts": pick(1, 2),
        "num_experts_per_tok": pick(1, 2),
        "topk_group": kept,
        "routed_scaling_factor": pick(1.0, 2.5),
    }


def _rope(rng: np.random.Generator) -> dict[str, Any]:
    pick = lambda *values: values[rng.integers(len(values))]
    rope = {"rope_type": "default", "rope_theta": pick(100.0, 1e4)}
    if pick(0, 1):
        factor = pick(2.0, 8.0)
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": int(1024 / factor)}
        rope |= yarn | {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": pick(0.707, 1.0),
        }
    return rope


def _norms_about_one(name: str, noise: torch.Tensor) -> torch.Tensor | None:
    return 1 + 0.2 * noise if "norm" in name else None


FAMILIES: dict[str, Callable[[np.random.Generator], Sampled]] = {
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "falcon_h1": falcon_h1,
    "gemma4": gemma4,
    "gpt_oss": gpt_oss,
    "inkling": inkling,
    "kimi_linear": kimi_linear,
    "qwen3_5": qwen3_5,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--family", choices=sorted(FAMILIES), action="append", help="default: all")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument(
        "--draw",
        type=int,
        help="write but two of them, drawn by this seed: a multiple of ten and one that is not",
    )
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for family in args.family or FAMILIES:
        for seed in drawn(range(args.seed, args.seed + args.count), family, args.draw):
            write_case(family, seed, args.out / f"{family}-{seed}")


def drawn(seeds: range, family: str, draw: int | None) -> list[int]:
    """Multiples of ten are those that run from both kinds of pool (tests/models/test_random_goldens.py)."""
    if draw is None:
        return list(seeds)
    rng = np.random.default_rng([draw, *family.encode()])
    kinds = ([s for s in seeds if s % 10 == 0], [s for s in seeds if s % 10])
    return [int(rng.choice(kind)) for kind in kinds if kind]


def write_case(family: str, seed: int, directory: Path) -> None:
    """One case, with other weights where the greedy tokens would hang on rounding, or float32 is off by itself."""
    rng = np.random.default_rng([seed, *family.encode()])
    model, special, layers = FAMILIES[family](rng)
    prompt, page_size = int(rng.integers(1, 140)), int(rng.choice([1, 16, 64]))
    # With a window of 1, transformers 5.24 keeps the whole cache and decodes with all of it.
    config = model.config.get_text_config()
    cached = 1 not in (getattr(config, "sliding_window", None), getattr(config, "sliding_window_size", None))
    for weights in range(seed, seed + 1000, 100):
        options = dict(prompt=prompt, steps=STEPS, seed=weights, cached=cached)
        margin, spread = golden.write(directory, model.eval(), special, layers, VOCAB, **options)
        if margin > 1e-3 and spread < 3e-5:
            break
    else:
        raise RuntimeError(f"{directory.name}: ten sets of weights with close choices or large rounding")
    (directory / "case.json").write_text(json.dumps({"page_size": page_size}))


if __name__ == "__main__":
    main()
