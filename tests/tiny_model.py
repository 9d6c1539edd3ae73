"""A Kimi-Linear model of two layers and random weights, for tests that need a model but no words."""

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ukv_jax.engine import Model
from ukv_jax.models.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from ukv_jax.models.families import FAMILIES
from ukv_jax.models.weights import build_tree

CONFIG = ModelConfig(
    family="kimi_linear",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    rms_norm_eps=1e-5,
    mixers=("kda", "mla"),
    mlps=("dense", "moe"),
    dtype="bfloat16",
    max_position=4096,
    mla=MLAConfig(num_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8),
    kda=KDAConfig(num_heads=2, head_dim=8, conv_kernel=4),
    moe=MoEConfig(
        num_experts=4,
        experts_per_token=2,
        intermediate_size=16,
        num_shared_experts=1,
        renormalize=True,
        scaling_factor=1.5,
    ),
)


def letters() -> Tokenizer:
    """Id i is the character chr(32 + i)."""
    tokenizer = Tokenizer(models.BPE(vocab={chr(32 + i): i for i in range(CONFIG.vocab_size)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def random_weights(seed: int = 0, config: ModelConfig = CONFIG) -> dict[str, np.ndarray]:
    """Under their published names, float32 values that bfloat16 can hold."""
    rng = np.random.default_rng(seed)

    def weight(tensor):
        if tensor.name.endswith("A_log"):
            return np.log(rng.uniform(1, 16, tensor.shape))
        if tensor.name.endswith("dt_bias"):
            return rng.normal(-3, 1, tensor.shape)
        if len(tensor.shape) == 1:
            return rng.uniform(0.5, 1.5, tensor.shape)
        return rng.normal(size=tensor.shape) * 2 * tensor.shape[-1] ** -0.5

    tensors = FAMILIES[config.family].tensors(config)
    return {t.name: weight(t).astype(ml_dtypes.bfloat16).astype(np.float32) for t in tensors}


def random_model(seed: int = 0, config: ModelConfig = CONFIG) -> Model:
    weights = random_weights(seed, config)
    tensors = FAMILIES[config.family].tensors(config)
    params = build_tree(tensors, lambda t: jnp.asarray(weights[t.name]), config.dtype)
    return Model(params, config, letters(), config.dtype)


def save_checkpoint(directory: Path) -> None:
    """The same model as a Hugging Face checkpoint directory."""
    mla, kda, moe = CONFIG.mla, CONFIG.kda, CONFIG.moe
    config = {
        "model_type": CONFIG.family,
        "torch_dtype": CONFIG.dtype,
        "vocab_size": CONFIG.vocab_size,
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size,
        "num_hidden_layers": CONFIG.num_layers,
        "num_attention_heads": mla.num_heads,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": kda.num_heads,
            "head_dim": kda.head_dim,
            "short_conv_kernel_size": kda.conv_kernel,
        },
        "first_k_dense_replace": 1,
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.experts_per_token,
        "num_shared_experts": moe.num_shared_experts,
        "moe_intermediate_size": moe.intermediate_size,
        "moe_renormalize": moe.renormalize,
        "routed_scaling_factor": moe.scaling_factor,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    bf16 = {name: w.astype(ml_dtypes.bfloat16) for name, w in random_weights().items()}
    save_file(bf16, directory / "model.safetensors")
    letters().save(str(directory / "tokenizer.json"))
