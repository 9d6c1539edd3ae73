"""Reading a Hugging Face directory: what is accepted, where it lands, and what each refusal says."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from ukv_jax.models.config import load_config
from ukv_jax.models.decoder import cache_spec
from ukv_jax.models.families import FAMILIES
from ukv_jax.models.weights import CheckpointFiles, abstract_params, load_model

TINY = {
    "model_type": "kimi_linear", "vocab_size": 10, "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 2, "kv_lora_rank": 6, "q_lora_rank": 5, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2, "v_head_dim": 3, "mla_use_nope": True, "torch_dtype": "bfloat16",
    "linear_attn_config": {
        "kda_layers": [1], "full_attn_layers": [2], "num_heads": 2, "head_dim": 4, "short_conv_kernel_size": 4,
    },
    "first_k_dense_replace": 1, "num_experts": 3, "num_experts_per_token": 2, "num_shared_experts": 1,
    "moe_intermediate_size": 5, "routed_scaling_factor": 2.0, "moe_router_activation_func": "sigmoid",
    "eos_token_id": [1, 2],
}  # fmt: skip

# The values of moonshotai/Kimi-Linear-48B-A3B-Instruct.
KIMI_48B = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "torch_dtype": "bfloat16",
    "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72, "hidden_act": "silu",
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "mla_use_nope": True, "rope_theta": 10000.0, "rope_scaling": None, "model_max_length": 1048576,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
    },
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_experts": 256, "num_experts_per_token": 8,
    "num_shared_experts": 1, "moe_intermediate_size": 1024, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.446, "use_grouped_topk": True,
    "num_expert_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-05, "initializer_range": 0.02, "use_cache": True, "pad_token_id": 163839,
    "bos_token_id": 163584, "eos_token_id": 163586, "transformers_version": "4.56.0",
}  # fmt: skip


def write_config(directory, config):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def checkpoint(tmp_path):
    """A small directory with random bfloat16 tensors, and the tensors by name."""
    directory = write_config(tmp_path / "model", TINY)
    config = load_config(directory)
    rng = np.random.default_rng(0)
    tensors = {
        t.name: rng.normal(size=t.shape).astype(ml_dtypes.bfloat16)
        for t in FAMILIES["kimi_linear"].tensors(config)
    }
    save_file(tensors, directory / "model.safetensors")
    return directory, tensors


def rewrite(directory, tensors):
    save_file(tensors, directory / "model.safetensors")


def test_every_tensor_lands_where_it_belongs(checkpoint):
    directory, t = checkpoint
    params, config = load_model(directory)
    np.testing.assert_array_equal(params["embed"], t["model.embed_tokens.weight"])
    kda, mla = params["layers"][0]["mixer"], params["layers"][1]["mixer"]
    at = "model.layers.0.self_attn"
    np.testing.assert_array_equal(
        kda["qkv_proj"], np.concatenate([t[f"{at}.{x}_proj.weight"] for x in "qkv"])
    )
    np.testing.assert_array_equal(
        kda["conv"], np.concatenate([t[f"{at}.{x}_conv1d.weight"][:, 0] for x in "qkv"])
    )
    assert kda["A_log"].dtype == kda["dt_bias"].dtype == jnp.float32
    kv_b = t["model.layers.1.self_attn.kv_b_proj.weight"].reshape(2, 7, 6)
    np.testing.assert_array_equal(mla["w_uk"], kv_b[:, :4])
    np.testing.assert_array_equal(mla["w_uv"], kv_b[:, 4:])
    moe, at = params["layers"][1]["mlp"], "model.layers.1.block_sparse_moe"
    for e in range(3):
        one = [t[f"{at}.experts.{e}.{w}.weight"] for w in ("w1", "w3")]
        np.testing.assert_array_equal(moe["experts_gate_up"][e], np.concatenate(one))
        np.testing.assert_array_equal(moe["experts_down"][e], t[f"{at}.experts.{e}.w2.weight"])
    assert moe["router_bias"].dtype == jnp.float32
    assert config.eos_token_ids == (1, 2)
    expected = jax.tree.map(lambda x: (x.shape, x.dtype), abstract_params(config))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == expected


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_shards_give_the_same(checkpoint):
    directory, tensors = checkpoint
    whole, _ = load_model(directory)
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    same(load_model(directory)[0], whole)
    (directory / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names files that are absent: \['b.safetensors'\]"):
        load_model(directory)


def test_several_files_want_an_index(checkpoint):
    directory, _ = checkpoint
    save_file({"x": np.zeros(1, np.float32)}, directory / "other.safetensors")
    with pytest.raises(ValueError, match=r"several safetensors files .* but no model.safetensors.index.json"):
        load_model(directory)


def test_cast_to_float32(checkpoint):
    directory, tensors = checkpoint
    params, _ = load_model(directory, dtype="float32")
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    np.testing.assert_array_equal(params["lm_head"], tensors["lm_head.weight"].astype(np.float32))


def test_tensors_are_views_of_the_mapped_file(checkpoint):
    files = CheckpointFiles(checkpoint[0])
    base = files.read("lm_head.weight")
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)


def test_names_that_transformers_saves(checkpoint):
    directory, tensors = checkpoint
    whole, _ = load_model(directory)
    rewrite(directory, {name.replace(".0.mlp.", ".0.block_sparse_moe."): x for name, x in tensors.items()})
    same(load_model(directory)[0], whole)


def test_missing_unexpected_and_misshapen_tensors_are_named_together(checkpoint):
    directory, tensors = checkpoint
    bad = dict(tensors)
    del bad["model.norm.weight"]
    bad["lm_head.weight"] = np.zeros((10, 9), ml_dtypes.bfloat16)
    bad["model.embed_tokens.weight"] = np.zeros((10, 8), np.int8)
    bad["model.layers.7.extra"] = np.zeros(3, np.float32)
    rewrite(directory, bad)
    with pytest.raises(ValueError) as error:
        load_model(directory)
    for text in (
        "missing model.norm.weight, wanted [8]",
        "lm_head.weight has shape [10, 9], wanted [10, 8]",
        "model.embed_tokens.weight has dtype I8, wanted one of ['BF16', 'F16', 'F32']",
        "unexpected model.layers.7.extra",
    ):
        assert text in str(error.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_unread(checkpoint, name):
    directory, _ = checkpoint
    (directory / "model.safetensors").unlink()
    (directory / name).write_bytes(b"not even a pickle")
    with pytest.raises(
        ValueError, match=rf"only pickle checkpoints \['{name}'\].*only safetensors are allowed"
    ):
        load_model(directory)


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_a_cut_file(checkpoint, keep):
    directory, _ = checkpoint
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"cut short|but the file has"):
        load_model(directory)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([1], "the safetensors header is no object, found list"),
        (
            {"a": {"dtype": "BF16", "shape": [2]}},
            "tensor a wants dtype, shape and data_offsets, found {'dtype'",
        ),
        ({"a": {"dtype": "BF16", "shape": 2, "data_offsets": [0, 4]}}, "tensor a wants dtype, shape"),
        ({"a": {"dtype": "BF16", "shape": [2], "data_offsets": [4]}}, "tensor a wants dtype, shape"),
        ({"a": 5}, "tensor a wants dtype, shape and data_offsets, found 5"),
    ],
)
def test_a_malformed_header(tmp_path, header, message):
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(ValueError, match=re.escape(message)):
        CheckpointFiles(tmp_path)


def test_nothing_to_load(tmp_path):
    with pytest.raises(ValueError, match=r"no config.json found"):
        load_config(tmp_path)
    with pytest.raises(ValueError, match=r"no .safetensors file found"):
        load_model(write_config(tmp_path / "model", TINY))


def broken(**changes):
    return {**TINY, **changes}


def linear(**changes):
    return broken(linear_attn_config={**TINY["linear_attn_config"], **changes})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            broken(model_type="gpt_bigcode"),
            "model_type 'gpt_bigcode' is not implemented; families: [",
        ),
        ({}, "model_type None is not implemented"),
        (broken(hidden_act="gelu"), "hidden_act = 'gelu' is not implemented; implemented: ['silu']"),
        (broken(mla_use_nope=False), "mla_use_nope = False is not implemented"),
        (broken(num_nextn_predict_layers=1), "num_nextn_predict_layers = 1 is not implemented"),
        (broken(moe_router_activation_func="softmax"), "moe_router_activation_func = 'softmax'"),
        (broken(num_key_value_heads=1), "num_key_value_heads = 1"),
        (
            broken(quantization_config={"bits": 4}, logit_cap=30.0),
            "{'quantization_config': {'bits': 4}, 'logit_cap'",
        ),
        (broken(hidden_size=None), "hidden_size must be an integer above 0, found None"),
        (broken(kv_lora_rank=-1), "kv_lora_rank must be an integer above 0, found -1"),
        (
            broken(num_local_experts=4),
            "fields that mean the same disagree: {'num_experts': 3, 'num_local_experts': 4}",
        ),
        (broken(num_expert_group=2), "3 experts do not make 2 groups"),
        (broken(num_experts_per_token=4), "4 experts a token wanted, but 1 groups hold 3"),
        (broken(torch_dtype="float8_e4m3fn"), "dtype 'float8_e4m3fn' is not implemented"),
        (broken(layer_types=["full_attention"] * 2), "contradict full_attn_layers [2]"),
        (
            broken(mlp_layer_types=["dense"]),
            "mlp_layer_types: 2 entries out of ['dense', 'sparse'] wanted, found 1",
        ),
        (linear(kda_layers=[1, 2]), "do not name layers 1 to 2 once each"),
        (
            linear(gate_lower_bound=-5.0),
            "linear_attn_config: fields that are not implemented: {'gate_lower_bound': -5.0}",
        ),
        (linear(head_dim=None), "linear_attn_config.head_dim (or linear_head_dim) must be one integer"),
    ],
)
def test_refused_configs(tmp_path, config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config(write_config(tmp_path / "model", config))


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_malformed_json(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"not valid JSON|a JSON object is wanted"):
        load_config(tmp_path)


def test_the_published_48b_config(tmp_path):
    config = load_config(write_config(tmp_path / "model", KIMI_48B))
    assert [i for i, kind in enumerate(config.mixers) if kind == "mla"] == [3, 7, 11, 15, 19, 23, 26]
    assert config.mlps == ("dense",) + ("moe",) * 26
    assert [config.cache_layer(i) for i in (0, 3, 4, 26)] == [0, 0, 3, 6]
    sizes = [x.size for x in jax.tree.leaves(abstract_params(config))]
    assert round(sum(sizes) / 1e9, 1) == 49.1
    spec = cache_spec(config)
    assert spec.latent.num_layers == 7
    assert spec.latent.kv_lora_rank + spec.latent.qk_rope_head_dim == 576
    slot = {
        p.name: p.num_layers * p.blocks_per_layer * int(np.prod(p.block_shape)) * jnp.dtype(p.dtype).itemsize
        for p in spec.state
    }
    assert slot == {"conv": 20 * 3 * 12288 * 2, "recurrent": 20 * 32 * 128 * 128 * 4}
    assert sum(slot.values()) == 43_417_600
    names = {t.name for t in FAMILIES["kimi_linear"].tensors(config)}
    assert {
        "model.layers.0.self_attn.q_conv1d.weight", "model.layers.3.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.0.mlp.gate_proj.weight", "model.layers.26.block_sparse_moe.experts.255.w2.weight",
        "model.layers.1.block_sparse_moe.gate.e_score_correction_bias",
        "model.layers.1.block_sparse_moe.shared_experts.down_proj.weight",
    } <= names  # fmt: skip


def test_the_names_of_transformers_config(tmp_path):
    """The same model as transformers 5 writes it: other field names, lists of layer kinds."""
    renamed = {
        "moe_renormalize": "norm_topk_prob", "num_expert_group": "n_group", "num_experts": "num_local_experts",
        "num_experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts",
        "torch_dtype": "dtype", "model_max_length": "max_position_embeddings",
    }  # fmt: skip
    published = load_config(write_config(tmp_path / "a", KIMI_48B))
    config = {renamed.get(k, k): v for k, v in KIMI_48B.items()}
    nested = config.pop("linear_attn_config")
    config |= {
        "linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4, "qk_head_dim": 192,
        "layer_types": [
            "full_attention" if i + 1 in nested["full_attn_layers"] else "linear_attention" for i in range(27)
        ],
        "mlp_layer_types": ["dense"] + ["sparse"] * 26,
    }  # fmt: skip
    assert load_config(write_config(tmp_path / "b", config)) == published
