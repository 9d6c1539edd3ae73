"""Qwen3.5, the text model: gated delta nets with a layer of gated grouped-query attention after every few, and a dense
MLP or experts.

Field and tensor names are those of Qwen/Qwen3.5-0.8B and its larger siblings, as transformers (5.24, models/qwen3_5 and
qwen3_5_moe) has them. A published checkpoint is a multimodal one: the text model's fields are under text_config and its
tensors under model.language_model; vision and multi-token prediction are left alone. Text alone, saved on its own, is
read too. For text the three axes of its rotary embedding hold the same position, so their sections change nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ukv_jax.models.config import (
    INERT_FIELDS,
    ConfigReader,
    GDNConfig,
    GQAConfig,
    ModelConfig,
    MoEConfig,
    read_dtype,
)
from ukv_jax.models.families.common import (
    Path,
    check_groups,
    experts,
    gated,
    layer_kinds,
    or_on_its_own,
    stacked,
    whole,
)
from ukv_jax.models.families.family import Family
from ukv_jax.models.rope import read_rope
from ukv_jax.models.weights import Place, Tensor

MIXER_OF_LAYER_TYPE = {"full_attention": "gqa", "linear_attention": "gdn"}
PREFIX = "model.language_model"
MULTIMODAL = (
    "vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
)  # fmt: skip


def read_dense(reader: ConfigReader) -> ModelConfig:
    """Maps a config.json of model_type qwen3_5 or qwen3_5_text; raises ValueError for what is not implemented."""
    return _read(reader, "qwen3_5")


def read_moe(reader: ConfigReader) -> ModelConfig:
    """Maps a config.json of model_type qwen3_5_moe or qwen3_5_moe_text."""
    return _read(reader, "qwen3_5_moe")


def _read(top: ConfigReader, family: str) -> ModelConfig:
    nested = top.get("text_config") is not None
    reader = top.section("text_config") if nested else top
    if nested:
        top.inert(MULTIMODAL)
        reader.inert(INERT_FIELDS)
        reader.only("model_type", f"{family}_text")
        reader.only("tie_word_embeddings", top.flag("tie_word_embeddings", default=False))
    layers, gqa, gdn = reader.positive("num_hidden_layers"), _attention(reader), _delta_net(reader)
    moe = _moe(reader) if family == "qwen3_5_moe" else None
    reader.only("hidden_act", "silu")
    reader.only("mlp_only_layers", [])
    mixers = _mixers(reader, layers)
    config = ModelConfig(
        family=family,
        vocab_size=reader.positive("vocab_size"),
        hidden_size=reader.positive("hidden_size"),
        intermediate_size=moe.intermediate_size if moe else reader.positive("intermediate_size"),
        rms_norm_eps=reader.number("rms_norm_eps", default=1e-6),
        mixers=mixers,
        mlps=("moe" if moe else "dense",) * layers,
        dtype=read_dtype(reader if reader.get("dtype", "torch_dtype") is not None else top),
        max_position=reader.positive("max_position_embeddings"),
        eos_token_ids=reader.token_ids("eos_token_id"),
        bos_token_id=reader.token_id("bos_token_id"),
        pad_token_id=reader.token_id("pad_token_id"),
        tie_word_embeddings=top.flag("tie_word_embeddings", default=False),
        gqa=gqa if "gqa" in mixers else None,
        gdn=gdn if "gdn" in mixers else None,
        moe=moe,
        mtp_layers=reader.natural("mtp_num_hidden_layers", default=0),
    )
    reader.inert(("mtp_use_dedicated_embeddings",))
    top.get("dtype", "torch_dtype")
    if nested:
        reader.finish()
    return config


def _attention(reader: ConfigReader) -> GQAConfig:
    heads, kv_heads = reader.positive("num_attention_heads"), reader.positive("num_key_value_heads")
    head_dim = reader.positive("head_dim")
    if heads % kv_heads:
        raise reader.fail(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    reader.only("attention_bias", False)
    reader.only("attn_output_gate", True)
    rope = read_rope(reader, head_dim, default_partial=0.25, inert=("mrope_section", "mrope_interleaved"))
    return GQAConfig(heads, kv_heads, head_dim, rope=rope)


def _delta_net(reader: ConfigReader) -> GDNConfig:
    reader.only("mamba_ssm_dtype", "float32", "bfloat16")
    gdn = GDNConfig(
        num_k_heads=reader.positive("linear_num_key_heads"),
        num_v_heads=reader.positive("linear_num_value_heads"),
        k_head_dim=reader.positive("linear_key_head_dim"),
        v_head_dim=reader.positive("linear_value_head_dim"),
        conv_kernel=reader.positive("linear_conv_kernel_dim"),
        state_dtype=reader.get("mamba_ssm_dtype", default="float32"),
    )
    if gdn.num_v_heads % gdn.num_k_heads:
        raise reader.fail(
            f"linear_num_value_heads {gdn.num_v_heads} is not a multiple of linear_num_key_heads {gdn.num_k_heads}"
        )
    return gdn


def _moe(reader: ConfigReader) -> MoEConfig:
    size = reader.positive("moe_intermediate_size")
    shared = reader.positive("shared_expert_intermediate_size")
    if shared % size:
        raise reader.fail(
            f"shared_expert_intermediate_size {shared} is not a multiple of moe_intermediate_size {size}: not implemented"
        )
    reader.only("norm_topk_prob", True)
    reader.only("decoder_sparse_step", 1)
    reader.inert(("intermediate_size",))  # of dense layers, which there are none of
    moe = MoEConfig(
        num_experts=reader.positive("num_experts"),
        experts_per_token=reader.positive("num_experts_per_tok"),
        intermediate_size=size,
        num_shared_experts=shared // size,
        renormalize=True,
        scaling_factor=1.0,
        score_function="softmax",
    )
    return check_groups(reader, moe)


def _mixers(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    types, interval = (
        reader.maybe_list_of(str, "layer_types"),
        reader.positive("full_attention_interval", default=4),
    )
    if types is None:
        types = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    return layer_kinds(reader, "layer_types", types, MIXER_OF_LAYER_TYPE, layers)


def tensors(config: ModelConfig) -> list[Tensor]:
    """Every tensor of the published checkpoint and where it goes in the decoder's parameters."""
    hidden = config.hidden_size
    out = [
        whole(f"{PREFIX}.embed_tokens.weight", ("embed",), (config.vocab_size, hidden)),
        _norm(f"{PREFIX}.norm.weight", ("final_norm",), hidden),
    ]
    if not config.tie_word_embeddings:
        out.append(whole("lm_head.weight", ("lm_head",), (config.vocab_size, hidden)))
    for i, (mixer, mlp) in enumerate(zip(config.mixers, config.mlps, strict=True)):
        name, path = f"{PREFIX}.layers.{i}", ("layers", i)
        out.append(_norm(f"{name}.input_layernorm.weight", (*path, "mixer_norm"), hidden))
        out.append(_norm(f"{name}.post_attention_layernorm.weight", (*path, "mlp_norm"), hidden))
        if mixer == "gqa":
            out += _attention_tensors(config, f"{name}.self_attn", (*path, "mixer"))
        else:
            out += _delta_net_tensors(config, f"{name}.linear_attn", (*path, "mixer"))
        if mlp == "dense":
            out += gated(f"{name}.mlp", (*path, "mlp"), "gate_up", "down", hidden, config.intermediate_size)
        else:
            out += _expert_tensors(config, f"{name}.mlp", (*path, "mlp"))
    return [or_on_its_own(tensor, PREFIX) for tensor in out]


def _norm(name: str, path: Path, width: int) -> Tensor:
    """These norms multiply by 1 + weight, in float32."""
    place = Place(path, (width,), view=lambda x: 1 + x.astype(np.float32))
    return Tensor(name, (width,), (place,), float32=True)


def _attention_tensors(config: ModelConfig, name: str, path: Path) -> list[Tensor]:
    gqa, hidden = config.gqa, config.hidden_size
    assert gqa is not None
    dim, width, kv_width = gqa.head_dim, gqa.num_heads * gqa.head_dim, gqa.num_kv_heads * gqa.head_dim

    def half(which: int):
        """q_proj holds query and gate of each head one after the other."""
        return lambda x: x.reshape(gqa.num_heads, 2, dim, hidden)[:, which].reshape(width, hidden)

    places = tuple(
        Place((*path, to), (width, hidden), view=half(i)) for i, to in enumerate(("q_proj", "gate_proj"))
    )
    return [
        Tensor(f"{name}.q_proj.weight", (2 * width, hidden), places),
        whole(f"{name}.k_proj.weight", (*path, "k_proj"), (kv_width, hidden)),
        whole(f"{name}.v_proj.weight", (*path, "v_proj"), (kv_width, hidden)),
        whole(f"{name}.o_proj.weight", (*path, "o_proj"), (hidden, width)),
        _norm(f"{name}.q_norm.weight", (*path, "q_norm"), dim),
        _norm(f"{name}.k_norm.weight", (*path, "k_norm"), dim),
    ]


def _delta_net_tensors(config: ModelConfig, name: str, path: Path) -> list[Tensor]:
    gdn, hidden = config.gdn, config.hidden_size
    assert gdn is not None
    channels, kernel = gdn.conv_channels, gdn.conv_kernel
    heads, width = gdn.num_v_heads, gdn.num_v_heads * gdn.v_head_dim
    steps = [f"{name}.in_proj_{x}.weight" for x in "ba"]
    return [
        whole(f"{name}.in_proj_qkv.weight", (*path, "qkv_proj"), (channels, hidden)),
        whole(f"{name}.in_proj_z.weight", (*path, "z_proj"), (width, hidden)),
        *stacked(steps, (*path, "ba_proj"), (heads, hidden), (heads, hidden)),
        whole(f"{name}.conv1d.weight", (*path, "conv"), (channels, 1, kernel), (channels, kernel)),
        whole(f"{name}.A_log", (*path, "A_log"), (heads,), float32=True),
        whole(f"{name}.dt_bias", (*path, "dt_bias"), (heads,), float32=True),
        whole(f"{name}.norm.weight", (*path, "o_norm"), (gdn.v_head_dim,)),
        whole(f"{name}.out_proj.weight", (*path, "o_proj"), (hidden, width)),
    ]


def _expert_tensors(config: ModelConfig, name: str, path: Path) -> list[Tensor]:
    """Published checkpoints hold all experts of a layer in two tensors, those that transformers saves one by one."""
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    count, size = moe.num_experts, moe.intermediate_size
    names = ("gate_proj", "up_proj", "down_proj")
    out = experts(config, name, path, names, bias=False, shared_name="shared_expert")
    single = [t for t in out if f"{name}.experts." in t.name]
    gate_up = whole(f"{name}.experts.gate_up_proj", (*path, "experts_gate_up"), (count, 2 * size, hidden))
    down = whole(f"{name}.experts.down_proj", (*path, "experts_down"), (count, hidden, size))
    return [
        *(t for t in out if t not in single),
        replace(gate_up, split=tuple(t for t in single if ".down_proj" not in t.name)),
        replace(down, split=tuple(t for t in single if ".down_proj" in t.name)),
        whole(f"{name}.shared_expert_gate.weight", (*path, "shared_gate"), (1, hidden)),
    ]


def skipped(config: ModelConfig) -> dict[str, str]:
    """Parts of a multimodal checkpoint that text does not need."""
    return {"model.visual.": "the vision encoder", "mtp.": "layers for multi-token prediction"}


DENSE = Family(read_config=read_dense, tensors=tensors, skipped=skipped)
MOE = Family(read_config=read_moe, tensors=tensors, skipped=skipped)
