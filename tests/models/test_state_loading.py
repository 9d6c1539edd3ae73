"""Qwen3.5 and Falcon-H1 directories as published: nested configs, names, what is skipped; refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ukv_jax.cache import HeadKV, StatePart
from ukv_jax.models.config import load_config
from ukv_jax.models.decoder import cache_spec
from ukv_jax.models.weights import abstract_params, load_model

GOLDEN = Path(__file__).parent / "golden"
pytestmark = pytest.mark.filterwarnings("ignore:.* tensors model.visual.* not loaded")

# The sizes of Qwen/Qwen3.5-0.8B, in the form that it is published in.
QWEN = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "image_token_id": 248056,
    "video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054,
    "tie_word_embeddings": True, "transformers_version": "4.57.0.dev0", "vision_config": {"depth": 12},
    "text_config": {
        "model_type": "qwen3_5_text", "dtype": "bfloat16", "vocab_size": 248320, "hidden_size": 1024,
        "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "hidden_act": "silu", "max_position_embeddings": 262144, "rms_norm_eps": 1e-06,
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "eos_token_id": 248044,
        "full_attention_interval": 4, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16, "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "tie_word_embeddings": True,
        "use_cache": True, "initializer_range": 0.02, "mlp_only_layers": [],
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
            "rope_theta": 10000000, "partial_rotary_factor": 0.25,
        },
    },
}  # fmt: skip

# The sizes of tiiuae/Falcon-H1-0.5B-Base.
FALCON = {
    "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "torch_dtype": "bfloat16",
    "vocab_size": 32784, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 36,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu",
    "max_position_embeddings": 16384, "rms_norm_eps": 1e-05, "rope_theta": 100000000000.0, "rope_scaling": None,
    "attention_bias": False, "mlp_bias": False, "projectors_bias": False, "tie_word_embeddings": False,
    "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 128, "mamba_conv_bias": True,
    "mamba_proj_bias": False, "mamba_norm_before_gate": False, "mamba_rms_norm": False, "mamba_use_mlp": True,
    "mlp_expansion_factor": 8, "attn_layer_indices": None, "num_logits_to_keep": 1, "time_step_floor": 0.0001,
    "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": "auto",
    "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "embedding_multiplier": 5.656854249492381,
    "key_multiplier": 0.390625, "lm_head_multiplier": 0.0390625, "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.23570226039551587, "mlp_multipliers": [0.8838834764831845, 0.5859375],
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "bos_token_id": 1, "eos_token_id": 11, "pad_token_id": 0,
}  # fmt: skip

# The sizes of tiiuae/Falcon-H1-1.5B-Base; its multipliers are not among them.
FALCON_1_5B = FALCON | {
    "vocab_size": 65537, "hidden_size": 2048, "intermediate_size": 4608, "num_hidden_layers": 24, "head_dim": 128,
    "max_position_embeddings": 131072, "mamba_d_ssm": 3072, "mamba_n_heads": 48, "mamba_d_state": 256,
}  # fmt: skip


def write_config(directory, config):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def parameters(config):
    return sum(x.size for x in jax.tree.leaves(abstract_params(config)))


def test_the_published_qwen_config(tmp_path):
    config = load_config(write_config(tmp_path / "model", QWEN))
    assert [i for i, kind in enumerate(config.mixers) if kind == "gqa"] == [3, 7, 11, 15, 19, 23]
    assert (config.gqa.rope.dim, config.gqa.rope.theta) == (64, 1e7)
    assert (config.mtp_layers, config.eos_token_ids) == (1, (248044,))
    assert parameters(config) == pytest.approx(0.752e9, rel=1e-3)  # without the vision encoder
    spec = cache_spec(config)
    assert spec.kv == (HeadKV(6, 2, 256, "bfloat16"),)
    assert spec.state == (
        StatePart("conv", 18, 3, (6144,), "bfloat16"),
        StatePart("recurrent", 18, 16, (128, 128), "float32"),
    )


def test_the_state_is_kept_in_the_dtype_that_the_config_says(tmp_path):
    """Beside it the convolution's inputs, in the model's own."""
    changed = QWEN | {"text_config": QWEN["text_config"] | {"mamba_ssm_dtype": "bfloat16"}}
    config = load_config(write_config(tmp_path / "model", changed))
    conv, recurrent = cache_spec(config, "float32").state
    assert (conv.dtype, recurrent.dtype) == ("float32", "bfloat16")


def test_text_alone_and_the_usual_pattern_of_layers(tmp_path):
    published = load_config(write_config(tmp_path / "a", QWEN))
    text = {k: v for k, v in QWEN["text_config"].items() if k != "layer_types"}
    assert load_config(write_config(tmp_path / "b", text)) == published


def test_the_published_falcon_config(tmp_path):
    config = load_config(write_config(tmp_path / "model", FALCON))
    assert parameters(config) == pytest.approx(0.521e9, rel=1e-3)
    assert config.gqa.scale == 0.390625 / 8
    assert config.mamba2.norm_before_gate is None
    spec = cache_spec(config)
    assert spec.kv == (HeadKV(36, 2, 64, "bfloat16"),)
    assert spec.state == (
        StatePart("conv", 36, 3, (1792,), "bfloat16"),
        StatePart("recurrent", 36, 24, (64, 128), "float32"),
    )


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_where_qwen_tensors_land():
    params, _ = load_model(GOLDEN / "qwen3_5")
    stored = load_file(GOLDEN / "qwen3_5" / "model.safetensors")
    at = "model.language_model.layers"
    norm = stored[f"{at}.0.input_layernorm.weight"].astype(np.float32)
    np.testing.assert_array_equal(params["layers"][0]["mixer_norm"], 1 + norm)
    assert params["layers"][0]["mixer_norm"].dtype == jnp.float32
    q = stored[f"{at}.1.self_attn.q_proj.weight"].reshape(4, 2, 16, 48)
    mixer = params["layers"][1]["mixer"]
    np.testing.assert_array_equal(mixer["q_proj"], q[:, 0].reshape(64, 48))
    np.testing.assert_array_equal(mixer["gate_proj"], q[:, 1].reshape(64, 48))
    b, a = (stored[f"{at}.0.linear_attn.in_proj_{x}.weight"] for x in "ba")
    np.testing.assert_array_equal(params["layers"][0]["mixer"]["ba_proj"], np.concatenate([b, a]))
    assert "lm_head" not in params


def test_text_saved_on_its_own(tmp_path):
    config = json.loads((GOLDEN / "qwen3_5" / "config.json").read_text())
    write_config(tmp_path, config["text_config"] | {"dtype": "bfloat16"})
    stored = load_file(GOLDEN / "qwen3_5" / "model.safetensors")
    text = {k.replace(".language_model", ""): v for k, v in stored.items() if ".visual." not in k}
    save_file(text, tmp_path / "model.safetensors")
    same(load_model(tmp_path)[0], load_model(GOLDEN / "qwen3_5")[0])


def test_experts_in_one_tensor_or_one_by_one(tmp_path):
    source = GOLDEN / "qwen3_5_moe"
    write_config(tmp_path, json.loads((source / "config.json").read_text()))
    stored = load_file(source / "model.safetensors")
    for layer in range(2):
        at = f"model.language_model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([stored.pop(f"{at}.{e}.{x}_proj.weight") for e in range(8)])
            for x in ("gate", "up", "down")
        )
        stored |= {f"{at}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{at}.down_proj": down}
    save_file(stored, tmp_path / "model.safetensors")
    same(load_model(tmp_path)[0], load_model(source)[0])

    del stored[f"{at}.down_proj"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(f"missing {at}.down_proj, wanted [8, 48, 16]")):
        load_model(tmp_path)


def test_what_text_does_not_need_is_skipped_with_a_note(tmp_path):
    source = GOLDEN / "qwen3_5"
    write_config(tmp_path, json.loads((source / "config.json").read_text()))
    stored = load_file(source / "model.safetensors")
    stored["mtp.fc.weight"] = np.zeros((2, 2), np.float32)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="not loaded") as notes:
        load_model(tmp_path)
    text = " ".join(str(note.message) for note in notes)
    assert "21 tensors model.visual.* not loaded: the vision encoder" in text
    assert "1 tensors mtp.* not loaded: layers for multi-token prediction" in text


def text_config(**changes):
    return QWEN | {"text_config": QWEN["text_config"] | changes}


def moe_config(**changes):
    sizes = {
        "model_type": "qwen3_5_moe_text", "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    }  # fmt: skip
    return text_config(**(sizes | changes)) | {"model_type": "qwen3_5_moe"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (text_config(attn_output_gate=False), "text_config: attn_output_gate = False is not implemented"),
        (text_config(attention_bias=True), "attention_bias = True is not implemented"),
        (text_config(sliding_window=128), "text_config: fields that are not implemented: {'sliding_window': 128}"),
        (QWEN | {"quantization_config": {"bits": 4}}, "not implemented: {'quantization_config': {'bits': 4}}"),
        (text_config(tie_word_embeddings=False), "tie_word_embeddings = False is not implemented; implemented: [True]"),
        (text_config(model_type="qwen3_next"), "model_type = 'qwen3_next' is not implemented"),
        (text_config(layer_types=["sliding_attention"] * 24), "found 24 with unknown kinds ['sliding_attention']"),
        (text_config(layer_types=["full_attention"]), "layer_types: 24 entries"),
        (text_config(linear_num_value_heads=24), "linear_num_value_heads 24 is not a multiple"),
        (text_config(num_key_value_heads=3), "num_attention_heads 8 is not a multiple of num_key_value_heads 3"),
        (text_config(rope_parameters={"rope_type": "longrope"}), "rope_type 'longrope' is not implemented"),
        (text_config(mamba_ssm_dtype="float16"), "mamba_ssm_dtype = 'float16' is not implemented"),
        (moe_config(shared_expert_intermediate_size=300), "300 is not a multiple of moe_intermediate_size 512"),
        (moe_config(num_experts_per_tok=9), "9 experts a token wanted"),
        (moe_config(mlp_only_layers=[0]), "mlp_only_layers = [0] is not implemented"),
        (FALCON | {"mamba_proj_bias": True}, "mamba_proj_bias = True is not implemented"),
        (FALCON | {"projectors_bias": True}, "projectors_bias = True is not implemented"),
        (FALCON | {"mamba_use_mlp": False}, "mamba_use_mlp = False is not implemented"),
        (FALCON | {"time_step_limit": [0.0, 0.5]}, "time_step_limit = [0.0, 0.5] is not implemented"),
        (FALCON | {"mamba_d_head": 32}, "mamba_n_heads 24 of mamba_d_head 32 do not make mamba_d_ssm 1536"),
        (FALCON | {"mamba_n_groups": 5}, "mamba_n_heads 24 is not a multiple of mamba_n_groups 5"),
        (FALCON | {"ssm_multipliers": [1.0]}, "ssm_multipliers must have 5 entries, found [1.0]"),
        (FALCON | {"logit_cap": 30.0}, "fields that are not implemented: {'logit_cap': 30.0}"),
    ],
)  # fmt: skip
def test_refused_configs(tmp_path, config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config(write_config(tmp_path / "model", config))


def test_infinity_as_transformers_writes_it(tmp_path):
    limit = {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    found = load_config(write_config(tmp_path / "a", FALCON | limit))
    assert found == load_config(write_config(tmp_path / "b", FALCON))
