"""A Kimi-Linear model of a few thousand random parameters, for tests that need a model but no words."""

import jax.numpy as jnp
import numpy as np

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
    mixers=("kda", "mla", "kda", "mla"),
    mlps=("dense", "moe", "moe", "moe"),
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


def random_model(seed: int = 0, config: ModelConfig = CONFIG, dtype: str = "bfloat16") -> Model:
    rng = np.random.default_rng(seed)

    def weight(tensor):
        if tensor.name.endswith("A_log"):
            value = np.log(rng.uniform(1, 16, tensor.shape))
        elif tensor.name.endswith("dt_bias"):
            value = rng.normal(-3, 1, tensor.shape)
        elif len(tensor.shape) == 1:
            value = rng.uniform(0.5, 1.5, tensor.shape)
        else:
            value = rng.normal(size=tensor.shape) * 2 * tensor.shape[-1] ** -0.5
        return jnp.asarray(value, jnp.float32)

    params = build_tree(FAMILIES[config.family].tensors(config), weight, dtype)
    return Model(params, config, dtype=dtype)
