"""gemma-4 text against transformers on tiny random checkpoints (tools/make_golden_gemma4.py), and its published format."""

from __future__ import annotations

import json
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.models import parity
from ukv_jax.attention import pool_specs
from ukv_jax.models.config import load_config
from ukv_jax.models.decoder import cache_spec
from ukv_jax.models.families import FAMILIES
from ukv_jax.models.weights import abstract_params, load_model

MODELS, PAGE = ("gemma4", "gemma4_plain", "gemma4_moe"), 16
CACHES = parity.caches(PAGE)
RUNS = [(m, c) for m in MODELS for c in CACHES if m == "gemma4" or c == "dense"]
run = cache(lambda model, kind: parity.run(model, CACHES[kind]))


@pytest.mark.parametrize("model", MODELS)
def test_the_data_spans_pages_and_windows_and_has_no_ties(model):
    golden, config = parity.load_golden(model), load_config(parity.GOLDEN / model)
    assert len(golden["ids"]) > max(2 * 64, config.swa.window)
    assert len(set(golden["greedy"].tolist())) > 16
    assert golden["margin"] > 1e-4 * np.abs(golden["greedy_logits"]).max()


@pytest.mark.parametrize(("model", "kind"), RUNS)
def test_logits_layers_and_tokens(model, kind):
    parity.check_run(run(model, kind), parity.load_golden(model))


@pytest.mark.parametrize("kind", [k for k in CACHES if k.startswith("unified")])
def test_unified_pools_equal_the_static_one_bit_for_bit(kind):
    parity.check_same_bits(run("gemma4", kind), run("gemma4", "static-table"))


def test_layers_that_share_a_cache():
    """The last layers have no cache layer of their own; heads of full layers are wider, in a sub-pool of their own."""
    config = load_config(parity.GOLDEN / "gemma4")
    assert config.mixers == ("swa", "gqa") * 3
    assert [config.cache_layer(i) for i in range(6)] == [0, 0, 1, 1, 1, 1]
    swa, full = sorted(pool_specs(cache_spec(config)), key=lambda spec: spec.window is None)
    assert (full.num_layers, full.num_kv_heads, full.head_dim) == (2, 2, 16)
    assert (swa.num_layers, swa.num_kv_heads, swa.head_dim, swa.window) == (2, 2, 8, 20)


# The published format.

# The values of google/gemma-4-E2B.
GEMMA_E2B = {
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "tie_word_embeddings": True,
    "dtype": "bfloat16", "eos_token_id": [1, 106], "image_token_id": 258880, "audio_token_id": 258881,
    "video_token_id": 258884, "boi_token_id": 255999, "eoi_token_id": 258882, "boa_token_id": 256000,
    "eoa_token_id": 258883, "vision_soft_tokens_per_image": 280, "vision_config": {"hidden_size": 768},
    "audio_config": {"hidden_size": 1024}, "initializer_range": 0.02,
    "text_config": {
        "model_type": "gemma4_text", "dtype": "bfloat16", "hidden_size": 1536, "intermediate_size": 6144,
        "num_hidden_layers": 35, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "num_attention_heads": 8, "num_key_value_heads": 1, "num_global_key_value_heads": None, "head_dim": 256,
        "global_head_dim": 512, "attention_k_eq_v": False, "attention_bias": False, "attention_dropout": 0.0,
        "sliding_window": 512, "use_bidirectional_attention": None, "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True, "enable_moe_block": False, "expert_intermediate_size": None,
        "num_experts": None, "top_k_experts": None, "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144, "vocab_size": 262144, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-06, "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "tie_word_embeddings": True, "use_cache": True,
        "initializer_range": 0.02,
    },
}  # fmt: skip


def test_the_published_e2b_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_E2B))
    config = load_config(tmp_path)
    assert config.mixers == (*["swa"] * 4, "gqa") * 7
    # Of the first 15 layers, which have caches of their own, 3 are full.
    assert [config.cache_layer(i) for i in (0, 4, 13, 14, 15, 19, 34)] == [0, 0, 11, 2, 11, 2, 2]
    assert (config.gqa.rope.theta, config.swa.rope.theta, config.final_logit_cap) == (1e6, 1e4, 30.0)
    assert (config.per_layer_width, config.per_layer_vocab, config.shared_mlp_factor) == (256, 262144, 2)
    swa, full = sorted(pool_specs(cache_spec(config)), key=lambda spec: spec.window is None)
    assert (full.num_layers, full.num_kv_heads, full.head_dim) == (3, 1, 512)
    assert (swa.num_layers, swa.num_kv_heads, swa.head_dim, swa.window) == (12, 1, 256, 512)
    # The model card: 5.1 billion with embeddings, vision and audio among them.
    total = sum(x.size for x in jax.tree.leaves(abstract_params(config)))
    assert 4.6e9 < total < 5.1e9


def test_the_published_26b_a4b_config(tmp_path):
    """Experts beside the dense MLP of every layer; its sizes as google/gemma-4-26B-A4B has them."""
    text = GEMMA_E2B["text_config"] | {
        "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
        "num_key_value_heads": 8, "num_global_key_value_heads": 2, "attention_k_eq_v": True, "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5, "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False, "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision",
        "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
        "max_position_embeddings": 262144,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_E2B | {"text_config": text}))
    config = load_config(tmp_path)
    assert config.mlps == ("dense_moe",) * 30
    assert (config.gqa.num_kv_heads, config.gqa.head_dim, config.swa.num_kv_heads) == (2, 512, 8)
    sizes = [x.size for x in jax.tree.leaves(abstract_params(config))]
    assert round(sum(sizes) / 1e9, 1) == 25.2  # the model card's total


@pytest.fixture
def published(tmp_path):
    """The tiny checkpoint as a multimodal one: nested config, other prefix, vision beside it, idle projections."""
    source = parity.GOLDEN / "gemma4"
    text = json.loads((source / "config.json").read_text())
    for name in ("architectures", "transformers_version"):
        text.pop(name)
    text |= {
        "global_head_dim": text.pop("per_layer_config")["1"]["head_dim"],
        "num_global_key_value_heads": None,
    }
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text,
        "vision_config": {"hidden_size": 8}, "audio_config": None, "image_token_id": 99, "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()}
    tensors["model.vision_tower.patch.weight"] = np.zeros(3, np.float32)
    tensors["model.language_model.layers.5.self_attn.k_proj.weight"] = np.zeros((32, 48), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path, config, tensors


def test_a_multimodal_checkpoint_gives_the_text_model(published):
    directory, _, _ = published
    with pytest.warns(UserWarning, match="not loaded") as notes:
        params, config = load_model(directory)
    assert sorted(str(n.message).split(": ", 1)[1] for n in notes) == [
        "1 tensors model.language_model.layers.5.self_attn.k_proj.* not loaded: this layer reads another layer's cache",
        "1 tensors model.vision_tower.* not loaded: vision and audio",
    ]
    expected, alone = load_model(parity.GOLDEN / "gemma4")
    assert config == alone
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), abstract_params(config))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == shapes
    assert params["layers"][5]["mlp"]["gate_up"].shape == (2 * 128, 48)
    assert params["layers"][0]["mlp"]["gate_up"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_activation": "silu"}, "hidden_activation = 'silu' is not implemented"),
        ({"enable_moe_block": True}, "num_experts must be an integer above 0, found None"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not implemented"),
        (
            {"layer_types": ["full_attention", "sliding_attention"] * 3},
            "the last of layer_types must be full",
        ),
        ({"layer_types": ["linear_attention"] * 6}, "unknown kinds ['linear_attention']"),
        ({"num_kv_shared_layers": 5}, "no earlier layer is of the kinds ['gqa']"),
        ({"per_layer_config": {"1": {"head_dim": 16}}}, "alone and alike, found {'1'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 4"),
        ({"rope_parameters": None}, "text_config: rope_parameters must be given"),
        ({"num_kv_shared_layers": 1.5}, "num_kv_shared_layers must be an integer of 0 or more, found 1.5"),
        ({"per_layer_config": 5}, "per_layer_config must be an object, found 5"),
        ({"altup_num_inputs": 4}, "fields that are not implemented: {'altup_num_inputs': 4}"),
    ],
)
def test_refused_configs(published, changes, message):
    directory, config, _ = published
    config["text_config"] |= changes
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config(directory)


def test_missing_tensors_are_named(published):
    directory, _, tensors = published
    name = "model.language_model.layers.1.self_attn.v_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != name}, directory / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(f"missing {name}, wanted [32, 48]")), pytest.warns():
        load_model(directory)


def test_keys_that_are_values_have_no_projection():
    config = load_config(parity.GOLDEN / "gemma4_plain")
    names = {t.name for t in FAMILIES["gemma4"].tensors(config)}
    assert "model.language_model.layers.0.self_attn.v_proj.weight" in names
    assert "model.language_model.layers.2.self_attn.v_proj.weight" not in names
    assert (config.gqa.num_kv_heads, config.swa.num_kv_heads, config.per_layer_width) == (1, 2, 0)
