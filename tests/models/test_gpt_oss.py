"""gpt-oss against transformers on a tiny random checkpoint (tools/make_golden_gpt_oss.py), and its published format."""

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
from ukv_jax.models.quantization import MXFP4_VALUES
from ukv_jax.models.weights import abstract_params, load_model

PAGE = 16  # pages that leave the window of 20 tokens all along
CACHES = parity.caches(PAGE)
run = cache(lambda kind: parity.run("gpt_oss", CACHES[kind]))


def test_the_data_spans_pages_and_windows_and_has_no_ties():
    golden = parity.load_golden("gpt_oss")
    config = load_config(parity.GOLDEN / "gpt_oss")
    assert config.mixers == ("swa", "gqa", "swa", "gqa")
    assert len(golden["ids"]) > max(2 * 64, config.swa.window, config.gqa.rope.scaling.original_max_position)
    assert len(golden["greedy"]) == 64
    assert golden["margin"] > 1e-3 > 1e-4 * np.abs(golden["greedy_logits"]).max()


@pytest.mark.parametrize("kind", CACHES)
def test_logits_layers_and_tokens(kind):
    parity.check_run(run(kind), parity.load_golden("gpt_oss"))


@pytest.mark.parametrize("kind", [k for k in CACHES if k.startswith("unified")])
def test_unified_pools_equal_the_static_one_bit_for_bit(kind):
    parity.check_same_bits(run(kind), run("static-table"))


# The published format.

# The values of openai/gpt-oss-20b.
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
}  # fmt: skip


def write_config(directory, **changes):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(GPT_OSS_20B | changes))
    return directory


def test_the_published_20b_config(tmp_path):
    config = load_config(write_config(tmp_path / "model"))
    assert config.mixers == ("swa", "gqa") * 12
    assert (config.gqa.window, config.swa.window, config.moe.clamp) == (None, 128, (1.702, 7.0))
    assert config.gqa.rope.theta == 150000
    sizes = [x.size for x in jax.tree.leaves(abstract_params(config))]
    assert round(sum(sizes) / 1e9, 2) == 20.91  # what the model card says (arXiv 2508.10925, table 1)
    swa, full = sorted(pool_specs(cache_spec(config)), key=lambda spec: spec.window is None)
    assert (full.name, full.num_layers, full.num_kv_heads, full.head_dim, full.window) == (
        "full",
        12,
        8,
        64,
        None,
    )
    assert (swa.name, swa.num_layers, swa.window) == ("swa", 12, 128)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented"),
        ({"attention_bias": False}, "attention_bias = False is not implemented"),
        ({"layer_types": ["chunked_attention"] * 24}, "found 24 with unknown kinds ['chunked_attention']"),
        ({"layer_types": ["sliding_attention"] * 24}, "without full_attention are not implemented"),
        ({"num_key_value_heads": 7}, "num_key_value_heads 7 does not divide num_attention_heads 64"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq' is not implemented"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type 'longrope' is not implemented"),
        ({"rope_scaling": None}, "rope_scaling or rope_parameters must be given"),
        ({"rope_theta": None}, "rope_theta must be a number above 0, found None"),
        ({"sparse_rows": 3}, "fields that are not implemented: {'sparse_rows': 3}"),
    ],
)
def test_refused_configs(tmp_path, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config(write_config(tmp_path / "model", **changes))


@pytest.fixture
def packed(tmp_path):
    """A directory with the published names: experts as MXFP4 blocks and scales, and their values by hand."""
    sizes = {"hidden_size": 96, "intermediate_size": 64, "num_local_experts": 3, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 20}
    directory = write_config(
        tmp_path / "packed", **sizes, experts_per_token=2, num_experts_per_tok=2, layer_types=None
    )
    rng = np.random.default_rng(0)
    tensors, values = {}, {}
    normal = lambda *shape: rng.normal(size=shape).astype(jnp.bfloat16)
    for i in range(2):
        at = f"model.layers.{i}"
        for name, shape in (("q", (32, 96)), ("k", (16, 96)), ("v", (16, 96)), ("o", (96, 32))):
            tensors[f"{at}.self_attn.{name}_proj.weight"] = normal(*shape)
            tensors[f"{at}.self_attn.{name}_proj.bias"] = normal(shape[0])
        tensors[f"{at}.self_attn.sinks"] = normal(4)
        tensors[f"{at}.mlp.router.weight"], tensors[f"{at}.mlp.router.bias"] = normal(3, 96), normal(3)
        for name, outer, inner in (("gate_up_proj", 128, 96), ("down_proj", 96, 64)):
            blocks = rng.integers(0, 256, (3, outer, inner // 32, 16), np.uint8)
            scales = rng.integers(110, 135, (3, outer, inner // 32), np.uint8)
            expert = f"{at}.mlp.experts.{name}"
            tensors |= {
                f"{expert}_blocks": blocks,
                f"{expert}_scales": scales,
                f"{expert}_bias": normal(3, outer),
            }
            values[expert] = np.zeros((3, inner, outer), np.float32)
            for e, o, g, byte in np.ndindex(blocks.shape):
                for half, code in enumerate((blocks[e, o, g, byte] & 15, blocks[e, o, g, byte] >> 4)):
                    value = MXFP4_VALUES[code] * 2.0 ** (int(scales[e, o, g]) - 127)
                    values[expert][e, 32 * g + 2 * byte + half, o] = value
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = normal(96)
    tensors |= {"model.embed_tokens.weight": normal(20, 96), "model.norm.weight": normal(96)}
    tensors["lm_head.weight"] = normal(20, 96)
    save_file(tensors, directory / "model.safetensors")
    return directory, tensors, values


def test_mxfp4_blocks_and_scales(packed):
    directory, tensors, values = packed
    params, config = load_model(directory)
    assert config.mixers == ("swa", "gqa")
    at = "model.layers.1.mlp.experts"
    mlp = params["layers"][1]["mlp"]
    up = values[f"{at}.gate_up_proj"]
    np.testing.assert_array_equal(
        mlp["experts_gate_up"].astype(np.float32)[:, :64], up[..., 0::2].swapaxes(1, 2)
    )
    np.testing.assert_array_equal(
        mlp["experts_gate_up"].astype(np.float32)[:, 64:], up[..., 1::2].swapaxes(1, 2)
    )
    np.testing.assert_array_equal(
        mlp["experts_down"].astype(np.float32), values[f"{at}.down_proj"].swapaxes(1, 2)
    )
    bias = tensors[f"{at}.gate_up_proj_bias"]
    np.testing.assert_array_equal(
        mlp["experts_gate_up_bias"], np.concatenate([bias[:, 0::2], bias[:, 1::2]], axis=1)
    )
    assert mlp["experts_gate_up"].dtype == jnp.bfloat16
    assert params["layers"][1]["mixer"]["sinks"].dtype == jnp.float32


def test_a_checkpoint_may_hold_plain_experts_instead(packed):
    directory, tensors, values = packed
    from_packed, _ = load_model(directory)
    plain = {n: t for n, t in tensors.items() if not n.endswith(("_blocks", "_scales"))}
    plain |= {name: value.astype(jnp.bfloat16) for name, value in values.items()}
    save_file(plain, directory / "model.safetensors")
    from_plain, _ = load_model(directory)
    jax.tree.map(np.testing.assert_array_equal, from_packed, from_plain)


def test_misshapen_blocks_are_named(packed):
    directory, tensors, _ = packed
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file(tensors | {name: tensors[name][:, :, :1].copy()}, directory / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(f"{name} has shape [3, 96, 1], wanted [3, 96, 2]")):
        load_model(directory)
    assert load_file(directory / "model.safetensors")[name].dtype == np.uint8
