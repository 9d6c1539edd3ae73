"""Inkling text against transformers on a tiny random checkpoint (tools/make_golden_inkling.py), and its published format."""

from __future__ import annotations

import json
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.models import parity
from ukv_jax.attention import pool_specs
from ukv_jax.layout import UnifiedLayout
from ukv_jax.models import moe
from ukv_jax.models.config import MoEConfig, load_config
from ukv_jax.models.decoder import cache_spec
from ukv_jax.models.weights import abstract_params, load_model

PAGE = 16  # pages that leave the window of 20 tokens all along
CACHES = parity.caches(PAGE)
pytestmark = pytest.mark.filterwarnings("ignore:.*not loaded.*")
run = cache(lambda kind: parity.run("inkling", CACHES[kind]))
on_pools = partial(parity.exact_on_pools, slow=True)


def test_the_data_spans_pages_windows_and_biases_and_has_no_ties():
    golden, config = parity.load_golden("inkling"), load_config(parity.GOLDEN / "inkling")
    assert config.mixers == ("swa", "gqa", "swa", "gqa")
    assert config.mlps == ("dense", "moe", "moe", "moe")
    assert config.swa.relative == (4, 20)
    assert config.gqa.relative == (4, 40)
    assert config.gqa.log_scaling == (32, 0.1)
    assert len(golden["ids"]) > max(2 * 64, config.swa.window, config.gqa.relative[1])
    assert len(set(golden["greedy"].tolist())) > 16
    assert golden["margin"] > 1e-4 * np.abs(golden["greedy_logits"]).max()


@pytest.mark.parametrize("kind", [on_pools(kind) for kind in CACHES])
def test_logits_layers_and_tokens(kind):
    parity.check_run(run(kind), parity.load_golden("inkling"))


@pytest.mark.parametrize("kind", [on_pools(kind) for kind in CACHES if kind.startswith("unified")])
def test_unified_pools_equal_the_static_one_bit_for_bit(kind):
    parity.check_same_bits(run(kind), run("static-table"))


def test_three_kinds_of_memory_in_one_chain():
    """Convolution inputs grow up, the window floats, full attention grows down. Every state byte is a layer's own."""
    config = load_config(parity.GOLDEN / "inkling")
    specs = pool_specs(cache_spec(config, "bfloat16"))
    layout = UnifiedLayout.from_tokens(specs, tokens=256, page_size=16, requests=2, max_tokens=128)
    assert [s.name for s in layout.subpools] == ["state", "swa", "full"]
    assert [s.owns_ids for s in layout.subpools] == [True, False, True]
    state = {p.name: (p.num_layers, p.blocks_per_layer, p.block_shape) for p in layout.state.spec.parts}
    assert state == {
        "mixer_conv": (4, 3, (48,)),
        "mlp_conv": (4, 3, (48,)),
        "full_conv": (2, 3, (2 * 2 * 8,)),
        "swa_conv": (2, 3, (2 * 3 * 8,)),
    }
    rows = sum(layers * blocks * width for layers, blocks, (width,) in state.values())
    assert 2 * rows <= layout.state.page_bytes < 2 * rows + 2 * 3 * 96  # aligned to whole blocks


def test_scores_of_shared_experts_join_the_sum():
    """The router of Inkling by hand: sigmoids of chosen and shared experts, divided by their sum."""
    config = MoEConfig(5, 2, 8, 2, True, 3.0, shared_sink=True)
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(4, 6)).astype(np.float32), rng.normal(size=(7, 6)).astype(np.float32)
    bias = np.array([0, 9, 0, 0, -9], np.float32)
    chosen, weights, shared = moe.route(x, jnp.asarray(weight), bias, config, scale=jnp.float32([0.5]))
    scores = 1 / (1 + np.exp(-x.astype(np.float64) @ weight.T))
    for t in range(4):
        best = np.argsort(-(scores[t, :5] + bias))[:2]
        assert chosen[t].tolist() == best.tolist()
        total = scores[t, best].sum() + scores[t, 5:].sum()
        np.testing.assert_allclose(weights[t], 1.5 * scores[t, best] / total, rtol=1e-5)
        np.testing.assert_allclose(shared[t], 1.5 * scores[t, 5:] / total, rtol=1e-5)


# The published format.

# The values of thinkingmachines/Inkling-Small.
INKLING_SMALL = {
    "architectures": ["InklingForConditionalGeneration"], "model_type": "inkling_mm_model", "eos_token_id": 200006,
    "text_config": {
        "model_max_length": 1048576, "torch_dtype": "bfloat16", "hidden_size": 4096, "num_hidden_layers": 42,
        "vocab_size": 201024, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "d_rel": 16,
        "rel_extent": 1024, "q_bias": False, "o_bias": False, "log_scaling_n_floor": 128000, "log_scaling_alpha": 0.1,
        "rms_norm_eps": 1e-06, "use_embed_norm": True, "local_layer_ids": [i for i in range(42) if i % 6 != 5],
        "dense_mlp_idx": 2, "use_sconv": True, "sconv_kernel_size": 4, "unpadded_vocab_size": 200058,
        "logits_mup_width_multiplier": 16.0, "final_logit_softcapping": None, "swa_head_dim": 128,
        "swa_num_attention_heads": 32, "swa_num_key_value_heads": 8, "sliding_window_size": 512,
        "n_routed_experts": 256, "num_experts_per_tok": 6, "n_shared_experts": 2, "shared_expert_sink": True,
        "dense_intermediate_size": 16384, "intermediate_size": 2048, "route_scale": 8.0, "use_gate_bias": True,
        "gate_activation": "sigmoid", "norm_after_topk": True, "use_global_scale": True,
    },
    "audio_config": {"decoder_dmodel": 4096, "n_mel_bins": 80, "mel_vocab_size": 16},
    "vision_config": {"vision_encoder_type": "hmlp", "decoder_dmodel": 4096, "patch_size": 40, "n_layers": 4},
    "mtp_config": {"num_nextn_predict_layers": 8, "local_layer_ids": [0, 2, 4, 5, 6, 7]},
}  # fmt: skip


def write_config(directory, **text):
    config = INKLING_SMALL | {"text_config": INKLING_SMALL["text_config"] | text}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_the_published_small_config(tmp_path):
    config = load_config(write_config(tmp_path))
    assert config.mixers == (*["swa"] * 5, "gqa") * 7
    assert config.mlps == ("dense",) * 2 + ("moe",) * 40
    assert (config.intermediate_size, config.moe.intermediate_size, config.moe.router_outputs) == (
        16384,
        2048,
        258,
    )
    assert (config.eos_token_ids, config.max_position) == ((200006,), 1048576)
    # The checkpoint's 531,912,898,740 bytes hold towers and multi-token prediction too.
    total = sum(x.size for x in jax.tree.leaves(abstract_params(config)))
    assert 0.95 < 2 * total / 531_912_898_740 < 1
    state, swa, full = (
        next(s for s in pool_specs(cache_spec(config)) if s.name == n) for n in ("state", "swa", "full")
    )
    assert (full.num_layers, full.num_kv_heads, full.head_dim) == (7, 8, 128)
    assert (swa.num_layers, swa.num_kv_heads, swa.head_dim, swa.window) == (35, 8, 128, 512)
    assert {p.name: p.num_layers for p in state.parts} == {
        "mixer_conv": 42, "mlp_conv": 42, "full_conv": 7, "swa_conv": 35,
    }  # fmt: skip


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"use_sconv": False}, "use_sconv = False is not implemented"),
        ({"use_embed_norm": False}, "use_embed_norm = False is not implemented"),
        ({"shared_expert_sink": False}, "shared_expert_sink = False is not implemented"),
        ({"gate_activation": "softmax"}, "gate_activation = 'softmax' is not implemented"),
        ({"q_bias": True}, "q_bias = True is not implemented"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not implemented"),
        ({"local_layer_ids": list(range(42))}, "without 'hybrid' are not implemented"),
        ({"local_layer_ids": [0, 0, 1]}, "each at most once, found [0, 0, 1]"),
        (
            {"local_layer_ids": [1, 42]},
            "local_layer_ids must name layers 0 to 41, each at most once, found [1, 42]",
        ),
        ({"layer_types": ["full_attention"] * 42}, "found 42 with unknown kinds ['full_attention']"),
        (
            {"layer_types": ["hybrid"] * 42, "local_layer_ids": [0, 2]},
            f"layer_types {['hybrid'] * 42} contradict local_layer_ids [0, 2]",
        ),
        ({"log_scaling_n_floor": 0}, "log_scaling_n_floor must be an integer above 0, found 0"),
        ({"log_scaling_n_floor": "128k"}, "log_scaling_n_floor must be an integer above 0, found '128k'"),
        ({"log_scaling_alpha": -0.1}, "log_scaling_alpha must be a number above 0, found -0.1"),
        ({"swa_num_key_value_heads": 7}, "num_key_value_heads 7 does not divide num_attention_heads 32"),
        (
            {"moe_intermediate_size": 1024},
            "moe_intermediate_size = 1024 is not implemented; implemented: [2048]",
        ),
        (
            {"dense_intermediate_size": None, "moe_intermediate_size": 0},
            "moe_intermediate_size must be an integer above 0, found 0",
        ),
        ({"sconv_kernel_size": 1}, "sconv_kernel_size = 1 is not implemented"),
        ({"unpadded_vocab_size": 201025}, "unpadded_vocab_size 201025 must lie within vocab_size 201024"),
        ({"rope_theta": 1e4}, "fields that are not implemented: {'rope_theta': 10000.0}"),
    ],
)
def test_refused_configs(tmp_path, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config(write_config(tmp_path, **changes))


def test_both_lists_of_layers_may_stand_if_they_agree(tmp_path):
    types = ["hybrid" if i % 6 == 5 else "hybrid_sliding" for i in range(42)]
    given = load_config(write_config(tmp_path, layer_types=types))
    assert given == load_config(write_config(tmp_path, layer_types=types, local_layer_ids=None))
    assert given == load_config(write_config(tmp_path))


def test_published_names_and_what_is_left_out(tmp_path):
    source = parity.GOLDEN / "inkling"
    tensors = load_file(source / "model.safetensors")
    assert "model.llm.layers.1.attn.wr_du.weight" in tensors
    save_file(
        tensors | {"model.mtp.layers.0.input_proj.weight": np.zeros(3, np.float32)},
        tmp_path / "m.safetensors",
    )
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.warns(UserWarning, match="not loaded") as notes:
        params, config = load_model(tmp_path)
    assert sorted(str(n.message).split(": ", 1)[1].split("tensors ")[1] for n in notes) == [
        "model.audio.* not loaded: vision and audio",
        "model.mtp.* not loaded: layers for multi-token prediction",
        "model.visual.* not loaded: vision and audio",
    ]
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), abstract_params(config))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == shapes
    assert params["lm_head"].shape == (90, 48)  # without the rows that pad the vocabulary


def test_text_as_transformers_saves_it_on_its_own(tmp_path):
    """Its names, and gate and up one after the other instead of in turn."""
    source = parity.GOLDEN / "inkling"
    config = json.loads((source / "config.json").read_text())
    text = config["text_config"] | {"architectures": ["InklingForCausalLM"], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(text))
    names = {
        ".attn.wq_du": ".self_attn.q_proj", ".attn.wk_dv": ".self_attn.k_proj", ".attn.wv_dv": ".self_attn.v_proj",
        ".attn.wr_du": ".self_attn.r_proj", ".attn.wo_ud": ".self_attn.o_proj", ".attn.": ".self_attn.",
        "sconv.weight": "sconv.conv1d.weight", "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
        "gate.bias": "gate.e_score_correction_bias", "w2_md": "down_proj", "shared_w2_weight": "down_proj",
        "w2_weight": "down_proj", "llm.embed_norm": "embed_tokens.embed_norm", "llm.embed.": "embed_tokens.",
        "model.llm.unembed": "lm_head", "model.llm.": "model.", "shared_w13_weight": "gate_up", "w13_dn": "gate_up",
        "w13_weight": "gate_up_proj",
    }  # fmt: skip
    saved = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.startswith("model.llm."):
            continue
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        if "gate_up" not in name:
            saved[name] = tensor
            continue
        halves = tensor[..., 0::2, :].copy(), tensor[..., 1::2, :].copy()
        if name.endswith("gate_up_proj"):
            saved[name] = np.concatenate(halves, axis=-2)
        else:
            saved |= {name.replace("gate_up", x): y for x, y in zip(("gate_proj", "up_proj"), halves)}
    save_file(saved, tmp_path / "model.safetensors")
    params, alone = load_model(tmp_path)
    expected, nested = load_model(source)
    assert alone == nested
    jax.tree.map(np.testing.assert_array_equal, params, expected)
