"""DeepSeek-V2 and -V3: latent attention with rotary embedding, dense layers first, then experts in groups.

Field and tensor names are those of deepseek-ai/DeepSeek-V2, -V2-Lite and -V3; fields may also carry the names that
transformers (5.24, models/deepseek_v2 and deepseek_v3) gives them. Weights may be stored as e4m3 with a scale for each
128 x 128 block (V3). V3's layers for multi-token prediction are left alone.
"""

from __future__ import annotations

from typing import Literal

from ukv_jax.models.config import ConfigReader, ModelConfig, MoEConfig, read_dtype
from ukv_jax.models.families.common import (
    check_groups,
    dense_then_moe,
    ends,
    experts,
    gated,
    mla,
    norms,
    read_mla,
)
from ukv_jax.models.families.family import Family
from ukv_jax.models.quantization import block_scaled, read_fp8_block
from ukv_jax.models.rope import read_rope
from ukv_jax.models.weights import Tensor


def read_v2(reader: ConfigReader) -> ModelConfig:
    """Maps a config.json of model_type deepseek_v2; raises ValueError for what is not implemented."""
    reader.only("scoring_func", "softmax")
    # Published models leave weights as they are; whether renormalised ones are scaled too is told differently.
    reader.only("norm_topk_prob", False)
    method = reader.get("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise reader.fail(
            f"topk_method {method!r} is not implemented; implemented: greedy, group_limited_greedy"
        )
    reader.only("mlp_bias", False)
    grouped = method == "group_limited_greedy"
    reader.inert(("n_group", "topk_group"))  # not used by greedy
    return _read(
        reader,
        "deepseek_v2",
        MoEConfig(
            **_experts(reader),
            renormalize=False,
            num_groups=reader.positive("n_group") if grouped else 1,
            groups_per_token=reader.positive("topk_group") if grouped else 1,
            score_function="softmax",
            group_rank="max",
        ),
        interleaved=True,
    )


def read_v3(reader: ConfigReader) -> ModelConfig:
    """Maps a config.json of model_type deepseek_v3; raises ValueError for what is not implemented."""
    reader.only("scoring_func", "sigmoid")
    reader.only("topk_method", "noaux_tc")
    return _read(
        reader,
        "deepseek_v3",
        MoEConfig(
            **_experts(reader),
            renormalize=reader.flag("norm_topk_prob", default=True),
            num_groups=reader.positive("n_group"),
            groups_per_token=reader.positive("topk_group"),
            score_function="sigmoid",
            group_rank="top2",
        ),
        interleaved=reader.flag("rope_interleave", default=True),
    )


def _experts(reader: ConfigReader) -> dict:
    return {
        "num_experts": reader.positive("n_routed_experts", "num_local_experts", "num_experts"),
        "experts_per_token": reader.positive("num_experts_per_tok"),
        "intermediate_size": reader.positive("moe_intermediate_size"),
        "num_shared_experts": reader.natural("n_shared_experts", default=0),
        "scaling_factor": reader.number("routed_scaling_factor", default=1.0),
    }


def _read(
    reader: ConfigReader, family: Literal["deepseek_v2", "deepseek_v3"], moe: MoEConfig, interleaved: bool
) -> ModelConfig:
    layers = reader.positive("num_hidden_layers")
    reader.only("moe_layer_freq", 1)
    reader.only("hidden_act", "silu")
    rope = read_rope(reader, reader.positive("qk_rope_head_dim"), interleaved=interleaved)
    return ModelConfig(
        family=family,
        vocab_size=reader.positive("vocab_size"),
        hidden_size=reader.positive("hidden_size"),
        intermediate_size=reader.positive("intermediate_size"),
        rms_norm_eps=reader.number("rms_norm_eps", default=1e-6),
        mixers=("mla",) * layers,
        mlps=dense_then_moe(layers, reader.natural("first_k_dense_replace", default=0)),
        dtype=read_dtype(reader),
        max_position=reader.positive("max_position_embeddings"),
        eos_token_ids=reader.token_ids("eos_token_id"),
        bos_token_id=reader.token_id("bos_token_id"),
        pad_token_id=reader.token_id("pad_token_id"),
        tie_word_embeddings=reader.flag("tie_word_embeddings", default=False),
        mla=read_mla(reader, rope),
        moe=check_groups(reader, moe),
        mtp_layers=reader.natural("num_nextn_predict_layers", "num_mtp_layers", default=0),
        fp8_block=read_fp8_block(reader),
    )


def tensors(config: ModelConfig) -> list[Tensor]:
    """Every tensor of the published checkpoint and where it goes in the decoder's parameters."""
    out = ends(config)
    for i, mlp in enumerate(config.mlps):
        name, path = f"model.layers.{i}", ("layers", i)
        out += norms(config, name, path)
        out += mla(config, f"{name}.self_attn", (*path, "mixer"))
        if mlp == "dense":
            out += gated(
                f"{name}.mlp",
                (*path, "mlp"),
                "gate_up",
                "down",
                config.hidden_size,
                config.intermediate_size,
            )
        else:
            out += experts(
                config,
                f"{name}.mlp",
                (*path, "mlp"),
                names=("gate_proj", "up_proj", "down_proj"),
                bias=config.family == "deepseek_v3",
            )
    return block_scaled(out, config.fp8_block)


def skipped(config: ModelConfig) -> dict[str, str]:
    """Layers for multi-token prediction come after the model's own."""
    first = config.num_layers
    return {
        f"model.layers.{first + i}.": "a layer for multi-token prediction" for i in range(config.mtp_layers)
    }


V2 = Family(read_config=read_v2, tensors=tensors)
V3 = Family(read_config=read_v3, tensors=tensors, skipped=skipped)
