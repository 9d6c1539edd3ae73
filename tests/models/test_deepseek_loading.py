"""DeepSeek directories as published: configs, names, e4m3 weights with block scales, prediction layers; refusals."""

from __future__ import annotations

import json
import math
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from ukv_jax.models.config import load_config
from ukv_jax.models.decoder import cache_spec
from ukv_jax.models.families import FAMILIES
from ukv_jax.models.weights import abstract_params, load_model

# The values of deepseek-ai/DeepSeek-V3, -V2 and -V2-Lite.
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3,
    "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
    "topk_method": "noaux_tc", "transformers_version": "4.46.3", "use_cache": True, "v_head_dim": 128,
    "vocab_size": 129280,
}  # fmt: skip
V2 = {
    k: v for k, v in V3.items() if k not in ("quantization_config", "num_nextn_predict_layers")
} | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "aux_loss_alpha": 0.001,
    "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_size": 5120,
    "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160, "n_shared_experts": 2,
    "norm_topk_prob": False, "num_experts_per_tok": 6, "num_hidden_layers": 60, "pretraining_tp": 1,
    "routed_scaling_factor": 16.0, "scoring_func": "softmax", "seq_aux": True, "topk_group": 3,
    "topk_method": "group_limited_greedy", "vocab_size": 102400,
}  # fmt: skip
V2_LITE = V2 | {
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1,
    "n_routed_experts": 64, "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "q_lora_rank": None, "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "greedy",
    "rope_scaling": V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
# One dense and one sparse layer with the latent width of the published models, so that 576 rows are 4.5 blocks.
SMALL = V3 | {
    "hidden_size": 192, "intermediate_size": 144, "moe_intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 136, "n_routed_experts": 4, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "vocab_size": 40,
}  # fmt: skip
KV_A = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"


def write(directory, config, tensors=None):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, directory / "model.safetensors")
    return directory


def dequantized(weight, scale):
    """By elements, in plain loops over blocks."""
    out = np.zeros(weight.shape, np.float32)
    for i, j in np.ndindex(scale.shape):
        block = np.s_[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
        out[block] = weight[block].astype(np.float32) * scale[i, j]
    return out


@pytest.fixture
def fp8(tmp_path):
    """The small model as V3 is published: e4m3 projections with scales, the rest bfloat16, a prediction layer."""
    rng = np.random.default_rng(0)
    config = load_config(write(tmp_path / "names", SMALL | {"quantization_config": None}))
    tensors = {}

    def add(name, shape):
        values = rng.normal(size=shape).astype(np.float32)
        kept = len(shape) == 1 or not name.startswith("model.layers.") or name.endswith(".gate.weight")
        if name.endswith("e_score_correction_bias"):
            tensors[name] = values
        elif kept:
            tensors[name] = values.astype(ml_dtypes.bfloat16)
        else:
            grid = [-(-n // 128) for n in shape]
            tensors[name] = (values * 40).astype(ml_dtypes.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = rng.uniform(1e-4, 1e-3, grid).astype(np.float32)

    for t in FAMILIES["deepseek_v3"].tensors(config):
        add(t.name, t.shape)
        if t.name.startswith("model.layers.1."):
            add(t.name.replace(".1.", ".2.", 1), t.shape)
    for name, shape in {"enorm": (192,), "eh_proj": (192, 384), "shared_head.head": (40, 192)}.items():
        add(f"model.layers.2.{name}.weight", shape)
    return write(tmp_path / "model", SMALL, tensors), tensors


def test_the_published_v3_config(tmp_path):
    config = load_config(write(tmp_path / "model", V3))
    assert config.mlps == ("dense",) * 3 + ("moe",) * 58
    assert config.mla.sm_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert round(sum(x.size for x in jax.tree.leaves(abstract_params(config))) / 1e9) == 671
    spec = cache_spec(config)
    assert (spec.latent.num_layers, spec.latent.kv_lora_rank + spec.latent.qk_rope_head_dim) == (61, 576)
    assert not spec.state
    parts = {
        p.name: p.shape for t in FAMILIES["deepseek_v3"].tensors(config) if t.packed for p in t.packed.parts
    }
    assert parts[f"{KV_A}_scale_inv"] == (5, 56)
    assert parts["model.layers.60.mlp.experts.255.down_proj.weight_scale_inv"] == (56, 16)
    assert parts["model.layers.0.self_attn.q_b_proj.weight"] == (24576, 1536)


@pytest.mark.parametrize(("published", "billions", "groups"), [(V2, 235.7, (8, 3)), (V2_LITE, 15.7, (1, 1))])
def test_the_published_v2_configs(tmp_path, published, billions, groups):
    config = load_config(write(tmp_path / "model", published))
    assert round(sum(x.size for x in jax.tree.leaves(abstract_params(config))) / 1e9, 1) == billions
    assert (config.moe.num_groups, config.moe.groups_per_token) == groups
    assert (config.moe.score_function, config.moe.group_rank) == ("softmax", "max")
    assert "router_bias" not in abstract_params(config)["layers"][1]["mlp"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_block_scales(fp8, tmp_path, dtype):
    """Every tensor as numpy dequantises it, read back from a plain directory."""
    directory, tensors = fp8
    plain = {
        name: dequantized(x, tensors[f"{name}_scale_inv"]) if f"{name}_scale_inv" in tensors else x
        for name, x in tensors.items()
        if not name.endswith("_scale_inv") and not name.startswith("model.layers.2.")
    }
    assert tensors[KV_A].shape == (576, 192)
    assert tensors[f"{KV_A}_scale_inv"].shape == (5, 2)
    count = sum(name.startswith("model.layers.2.") for name in tensors)
    note = f"{directory}: {count} tensors model.layers.2.* not loaded: a layer for multi-token prediction"
    with pytest.warns(UserWarning, match=re.escape(note)):
        found, _ = load_model(directory, dtype=dtype)
    expected, _ = load_model(
        write(
            tmp_path / "plain", SMALL | {"quantization_config": None, "num_nextn_predict_layers": 0}, plain
        ),
        dtype=dtype,
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, expected)
    kv_a = dequantized(tensors[KV_A], tensors[f"{KV_A}_scale_inv"]).astype(dtype)
    np.testing.assert_array_equal(found["layers"][1]["mixer"]["kv_a_proj"], kv_a)


@pytest.mark.filterwarnings("ignore:.*multi-token prediction")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{KV_A}_scale_inv": None}, f"missing {KV_A}_scale_inv, wanted [5, 2]"),
        (
            {f"{KV_A}_scale_inv": np.ones((4, 2), np.float32)},
            f"{KV_A}_scale_inv has shape [4, 2], wanted [5, 2]",
        ),
        (
            {f"{KV_A}_scale_inv": np.ones((5, 2), ml_dtypes.bfloat16)},
            f"{KV_A}_scale_inv has dtype BF16, wanted F32",
        ),
        (
            {KV_A: np.ones((512, 192), ml_dtypes.float8_e4m3fn)},
            f"{KV_A} has shape [512, 192], wanted [576, 192]",
        ),
        ({KV_A: np.ones((576, 192), np.uint8)}, f"{KV_A} has dtype U8, wanted one of ['BF16', 'F16', 'F32']"),
        ({KV_A: np.ones((576, 192), np.float32)}, f"unexpected {KV_A}_scale_inv"),
        (
            {"model.norm.weight": np.ones(192, ml_dtypes.float8_e4m3fn)},
            "model.norm.weight has dtype F8_E4M3, wanted one of",
        ),
        ({"model.layers.3.enorm.weight": np.ones(3, np.float32)}, "unexpected model.layers.3.enorm.weight"),
    ],
)
def test_refused_tensors(fp8, change, message):
    directory, tensors = fp8
    tensors = {name: x for name, x in (tensors | change).items() if x is not None}
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(message)):
        load_model(directory)


def test_fp8_weights_want_a_quantization_config(fp8):
    directory, _ = fp8
    write(directory, SMALL | {"quantization_config": None})
    with (
        pytest.warns(UserWarning, match="multi-token"),
        pytest.raises(ValueError, match=r"q_a_proj.weight has dtype F8_E4M3, wanted one of"),
    ):
        load_model(directory)


def quantization(**changes):
    return {"quantization_config": V3["quantization_config"] | changes}


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (V3, {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not implemented; implemented: ['sigmoid']"),
        (V3, {"topk_method": "greedy"}, "topk_method = 'greedy' is not implemented"),
        (V3, {"attention_bias": True}, "attention_bias = True is not implemented"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq = 2 is not implemented; implemented: [1]"),
        (V3, {"n_group": 7}, "256 experts do not make 7 groups of at least 2"),
        (V3, {"topk_group": 8, "n_group": 256}, "256 experts do not make 256 groups of at least 2"),
        (V3, {"topk_group": 1, "num_experts_per_tok": 33}, "33 experts a token wanted, but 1 groups hold 32"),
        (V3, {"num_key_value_heads": 1}, "num_key_value_heads = 1 is not implemented"),
        (V3, {"qk_rope_head_dim": 63}, "wants an even number of dimensions above 0, found 63"),
        (V3, {"rope_scaling": V3["rope_scaling"] | {"type": "dynamic"}}, "rope_type 'dynamic' is not implemented"),
        (V3, {"rope_scaling": V3["rope_scaling"] | {"warmup": 3}}, "fields that are not implemented: {'warmup': 3}"),
        (V3, {"index_topk": 2048}, "fields that are not implemented: {'index_topk': 2048}"),
        (V3, quantization(quant_method="awq"), "quant_method 'awq' is not implemented; implemented: 'fp8'"),
        (V3, quantization(fmt="e5m2"), "quantization_config: fmt = 'e5m2' is not implemented"),
        (V3, quantization(activation_scheme="static"), "activation_scheme = 'static' is not implemented"),
        (V3, quantization(weight_block_size=None), "weight_block_size must be two integers above 0, found None"),
        (V3, quantization(bits=8), "quantization_config: fields that are not implemented: {'bits': 8}"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob = True is not implemented; implemented: [False]"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not implemented; implemented: greedy, group"),
        (V2, {"n_group": None}, "n_group must be an integer above 0, found None"),
        (V2, {"mlp_bias": True}, "mlp_bias = True is not implemented"),
        (V2, {"model_type": "deepseek_v4"}, "model_type 'deepseek_v4' is not implemented; families: ['deepseek_v2'"),
    ],
)  # fmt: skip
def test_refused_configs(tmp_path, base, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config(write(tmp_path / "model", base | changes))
