"""Falcon-H1: Mamba-2 and grouped-query attention side by side in every layer, and constants that scale activations.

Field and tensor names are those of tiiuae/Falcon-H1-0.5B-Base and its larger siblings, as transformers (5.24,
models/falcon_h1) has them.
"""

from __future__ import annotations

import math

from ukv_jax.models.config import (
    ConfigReader,
    GQAConfig,
    Mamba2Config,
    ModelConfig,
    Multipliers,
    is_number,
    read_dtype,
)
from ukv_jax.models.families.common import Path, gated, gqa, whole
from ukv_jax.models.families.family import Family
from ukv_jax.models.rope import read_rope
from ukv_jax.models.weights import Tensor


def read_config(reader: ConfigReader) -> ModelConfig:
    """Maps config.json; raises ValueError for what the layer kinds here don't compute."""
    layers, hidden = reader.positive("num_hidden_layers"), reader.positive("hidden_size")
    for name in ("hidden_act", "projectors_bias", "mlp_bias", "attn_layer_indices", "mamba_use_mlp"):
        reader.only(name, {"hidden_act": "silu", "mamba_use_mlp": True}.get(name, False))
    for name in ("layer_types", "layers_block_type"):
        reader.only(name, ["hybrid"] * layers)
    # Sizes of training kernels, starting values, and what generation keeps.
    reader.inert(
        (
            "mamba_chunk_size",
            "expansion_factor",
            "mlp_expansion_factor",
            "num_logits_to_keep",
            "time_step_floor",
        )
    )
    reader.inert(("time_step_min", "time_step_max", "time_step_rank"))
    mlp = _numbers(reader, "mlp_multipliers", 2)
    return ModelConfig(
        family="falcon_h1",
        vocab_size=reader.positive("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.positive("intermediate_size"),
        rms_norm_eps=reader.number("rms_norm_eps", default=1e-5),
        mixers=("mamba2_gqa",) * layers,
        mlps=("dense",) * layers,
        dtype=read_dtype(reader),
        max_position=reader.positive("max_position_embeddings"),
        eos_token_ids=reader.token_ids("eos_token_id"),
        bos_token_id=reader.token_id("bos_token_id"),
        pad_token_id=reader.token_id("pad_token_id"),
        tie_word_embeddings=reader.flag("tie_word_embeddings", default=False),
        gqa=_attention(reader, hidden),
        mamba2=_mamba2(reader, hidden),
        multipliers=Multipliers(
            embedding=reader.real("embedding_multiplier", default=1.0),
            logits=reader.real("lm_head_multiplier", default=1.0),
            mlp_gate=mlp[0],
            mlp_out=mlp[1],
            attention_in=reader.real("attention_in_multiplier", default=1.0),
            attention_out=reader.real("attention_out_multiplier", default=1.0),
            mamba_out=reader.real("ssm_out_multiplier", default=1.0),
        ),
    )


def _numbers(reader: ConfigReader, name: str, count: int) -> tuple[float, ...]:
    values = reader.get(name, default=[1.0] * count)
    if not isinstance(values, list) or not all(map(is_number, values)):
        raise reader.fail(f"{name} must be a list of numbers, found {values!r}")
    if len(values) != count:
        raise reader.fail(f"{name} must have {count} entries, found {values}")
    return tuple(float(value) for value in values)


def _attention(reader: ConfigReader, hidden: int) -> GQAConfig:
    heads = reader.positive("num_attention_heads")
    kv_heads = reader.positive("num_key_value_heads", default=heads)
    head_dim = reader.positive("head_dim", default=hidden // heads)
    if heads % kv_heads:
        raise reader.fail(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    reader.only("attention_bias", False)
    # Scaled keys mean scaled scores.
    scale = head_dim**-0.5 * reader.real("key_multiplier", default=1.0)
    return GQAConfig(heads, kv_heads, head_dim, rope=read_rope(reader, head_dim), sm_scale=scale)


def _mamba2(reader: ConfigReader, hidden: int) -> Mamba2Config:
    channels = reader.positive("mamba_d_ssm", default=reader.positive("mamba_expand", default=2) * hidden)
    heads = reader.positive("mamba_n_heads")
    automatic = reader.get("mamba_d_head", default="auto") == "auto"
    head_dim = channels // heads if automatic else reader.positive("mamba_d_head")
    if heads * head_dim != channels:
        raise reader.fail(
            f"mamba_n_heads {heads} of mamba_d_head {head_dim} do not make mamba_d_ssm {channels}"
        )
    groups = reader.positive("mamba_n_groups", default=1)
    if heads % groups:
        raise reader.fail(f"mamba_n_heads {heads} is not a multiple of mamba_n_groups {groups}")
    reader.only("mamba_proj_bias", False)
    limit = reader.get("time_step_limit", default=[0.0, math.inf])
    # Infinity is written as itself, as an object (transformers) or as text.
    infinite = [math.inf, {"__float__": "Infinity"}, "inf", "Infinity"]
    if not (isinstance(limit, list | tuple) and len(limit) == 2 and limit[0] == 0 and limit[1] in infinite):
        raise reader.fail(f"time_step_limit = {limit} is not implemented; implemented: 0 to infinity")
    norm_before_gate = reader.flag("mamba_norm_before_gate", default=True)
    return Mamba2Config(
        num_heads=heads,
        head_dim=head_dim,
        state_size=reader.positive("mamba_d_state"),
        num_groups=groups,
        conv_kernel=reader.positive("mamba_d_conv", default=4),
        conv_bias=reader.flag("mamba_conv_bias", default=True),
        norm_before_gate=norm_before_gate if reader.flag("mamba_rms_norm", default=False) else None,
        in_multiplier=reader.real("ssm_in_multiplier", default=1.0),
        multipliers=_numbers(reader, "ssm_multipliers", 5),
    )


def tensors(config: ModelConfig) -> list[Tensor]:
    """Every tensor of the published checkpoint and where it goes in the decoder's parameters."""
    hidden = config.hidden_size
    assert config.gqa is not None
    out = [
        whole("model.embed_tokens.weight", ("embed",), (config.vocab_size, hidden)),
        whole("model.final_layernorm.weight", ("final_norm",), (hidden,)),
    ]
    if not config.tie_word_embeddings:
        out.append(whole("lm_head.weight", ("lm_head",), (config.vocab_size, hidden)))
    for i in range(config.num_layers):
        name, path = f"model.layers.{i}", ("layers", i)
        mlp = gated(
            f"{name}.feed_forward", (*path, "mlp"), "gate_up", "down", hidden, config.intermediate_size
        )
        out += [
            whole(f"{name}.input_layernorm.weight", (*path, "mixer_norm"), (hidden,)),
            whole(f"{name}.pre_ff_layernorm.weight", (*path, "mlp_norm"), (hidden,)),
            *_mamba2_tensors(config, f"{name}.mamba", (*path, "mixer", "mamba2")),
            *gqa(config.gqa, hidden, f"{name}.self_attn", (*path, "mixer", "gqa")),
            *mlp,
        ]
    return out


def _mamba2_tensors(config: ModelConfig, name: str, path: Path) -> list[Tensor]:
    mamba2, hidden = config.mamba2, config.hidden_size
    assert mamba2 is not None
    heads, channels, conv = mamba2.num_heads, mamba2.channels, mamba2.conv_channels
    kernel = mamba2.conv_kernel
    out = [
        whole(f"{name}.in_proj.weight", (*path, "in_proj"), (channels + conv + heads, hidden)),
        whole(f"{name}.conv1d.weight", (*path, "conv"), (conv, 1, kernel), (conv, kernel)),
        whole(f"{name}.A_log", (*path, "A_log"), (heads,), float32=True),
        whole(f"{name}.dt_bias", (*path, "dt_bias"), (heads,), float32=True),
        whole(f"{name}.D", (*path, "D"), (heads,), float32=True),
        whole(f"{name}.out_proj.weight", (*path, "out_proj"), (hidden, channels)),
    ]
    if mamba2.conv_bias:
        out.append(whole(f"{name}.conv1d.bias", (*path, "conv_bias"), (conv,)))
    if mamba2.norm_before_gate is not None:
        out.append(whole(f"{name}.norm.weight", (*path, "norm"), (channels,)))
    return out


FAMILY = Family(read_config=read_config, tensors=tensors)
