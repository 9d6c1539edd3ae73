"""Inkling, the text model: sliding-window layers with a full one after every few, short convolutions over keys, values
and the result of every sublayer, and a relative-position bias in place of rotary embedding.

Field and tensor names are those of thinkingmachines/Inkling-Small and Inkling, as transformers (5.24, models/inkling and
conversion_mapping.py) has them. A published checkpoint is a multimodal one: the text model's fields are under text_config
and its tensors under model.llm; vision, audio and multi-token prediction are left alone. Text alone, as transformers saves
it under its own names, is read too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ukv_jax.models.config import (
    INERT_FIELDS,
    ConfigReader,
    GQAConfig,
    ModelConfig,
    MoEConfig,
    Multipliers,
    read_dtype,
)
from ukv_jax.models.families.common import Path, check_groups, check_heads, layer_kinds, whole
from ukv_jax.models.families.family import Family
from ukv_jax.models.weights import Place, Tensor

MIXER_OF_LAYER_TYPE = {"hybrid_sliding": "swa", "hybrid": "gqa"}
MLP_OF_LAYER_TYPE = {"dense": "dense", "sparse": "moe"}
MULTIMODAL = (
    "vision_config", "audio_config", "image_token_id", "audio_token_id", "image_bos_token_id", "audio_bos_token_id",
    "mtp_config",
)  # fmt: skip
# Fields that mean nothing where no layer has experts.
MOE_FIELDS = (
    "shared_expert_sink", "use_gate_bias", "norm_after_topk", "use_global_scale", "gate_activation", "n_routed_experts",
    "num_local_experts", "num_experts_per_tok", "n_shared_experts", "route_scale",
)  # fmt: skip
# Four convolutions a layer, an epsilon that no layer uses, multi-token prediction.
INERT = (
    "number_of_conv_states", "rms_norm_eps_moe_gate", "num_mtp_layers", "chain_hidden_post_norm",
    "mtp_hidden_states_first", "mtp_local_layer_ids",
)  # fmt: skip


def read_config(top: ConfigReader) -> ModelConfig:
    """Maps config.json; raises ValueError for what the layer kinds here don't compute."""
    nested = top.get("text_config") is not None
    reader = top.section("text_config") if nested else top
    if nested:
        top.inert(MULTIMODAL)
        top.only("tie_word_embeddings", False)
        reader.inert(INERT_FIELDS)
        reader.only("model_type", "inkling_text")
    layers = reader.positive("num_hidden_layers")
    mixers, mlps = _mixers(reader, layers), _mlps(reader, layers)
    full, swa = _attention(reader, mixers)
    dense_size, moe_size = _mlp_sizes(reader)
    moe = _moe(reader, moe_size) if "moe" in mlps else None
    reader.inert(MOE_FIELDS)
    for name in ("use_sconv", "use_embed_norm"):
        reader.only(name, True)
    reader.only("hidden_act", "silu")
    reader.only("final_logit_softcapping")
    reader.only("tie_word_embeddings", False)
    reader.inert(INERT)
    unpadded = reader.get("unpadded_vocab_size") is not None
    config = ModelConfig(
        family="inkling_text",
        vocab_size=reader.positive("vocab_size"),
        hidden_size=reader.positive("hidden_size"),
        intermediate_size=dense_size,
        rms_norm_eps=reader.number("rms_norm_eps", default=1e-6),
        mixers=mixers,
        mlps=mlps,
        dtype=read_dtype(reader if reader.get("dtype", "torch_dtype") is not None else top),
        max_position=reader.positive("max_position_embeddings", "model_max_length"),
        eos_token_ids=reader.token_ids("eos_token_id") or top.token_ids("eos_token_id"),
        bos_token_id=_first(reader.token_id("bos_token_id"), top.token_id("bos_token_id")),
        pad_token_id=_first(reader.token_id("pad_token_id"), top.token_id("pad_token_id")),
        gqa=full,
        swa=swa,
        moe=moe,
        multipliers=Multipliers(logits=1 / reader.number("logits_mup_width_multiplier")),
        residual_conv_kernel=reader.positive("sconv_kernel_size", "conv_kernel_size"),
        logits_width=reader.positive("unpadded_vocab_size") if unpadded else None,
    )
    if config.residual_conv_kernel < 2:
        raise reader.fail("sconv_kernel_size = 1 is not implemented: such a convolution remembers nothing")
    if config.logits_width is not None and not 0 < config.logits_width <= config.vocab_size:
        raise reader.fail(
            f"unpadded_vocab_size {config.logits_width} must lie within vocab_size {config.vocab_size}"
        )
    top.get("dtype", "torch_dtype")
    if nested:
        reader.finish()
    return config


def _first(a: int | None, b: int | None) -> int | None:
    return b if a is None else a


def _mixers(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    """Layer kinds from `layer_types` or `local_layer_ids`, which must not contradict each other; else every sixth is full."""
    local, types = reader.maybe_list_of(int, "local_layer_ids"), reader.maybe_list_of(str, "layer_types")
    if local is not None and sorted(local) != [i for i in range(layers) if i in local]:
        raise reader.fail(
            f"local_layer_ids must name layers 0 to {layers - 1}, each at most once, found {local}"
        )
    if types is None:
        local = [i for i in range(layers) if (i + 1) % 6] if local is None else local
        types = ["hybrid_sliding" if i in local else "hybrid" for i in range(layers)]
    mixers = layer_kinds(reader, "layer_types", types, MIXER_OF_LAYER_TYPE, layers)
    if local is not None and sorted(local) != [i for i, kind in enumerate(mixers) if kind == "swa"]:
        raise reader.fail(f"layer_types {types} contradict local_layer_ids {local}")
    if "gqa" not in mixers:
        raise reader.fail("layer_types without 'hybrid' are not implemented: a pool has full attention")
    return mixers


def _mlps(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    dense, types = reader.natural("dense_mlp_idx", default=0), reader.maybe_list_of(str, "mlp_layer_types")
    if types is None:
        types = ["dense" if i < dense else "sparse" for i in range(layers)]
    return layer_kinds(reader, "mlp_layer_types", types, MLP_OF_LAYER_TYPE, layers)


def _attention(reader: ConfigReader, mixers: tuple[str, ...]) -> tuple[GQAConfig, GQAConfig | None]:
    """Attention of full layers and of sliding-window ones, whose bias reaches as far as they see."""
    for name in ("q_bias", "o_bias", "attention_bias"):
        reader.only(name, False)
    gain = reader.number("log_scaling_alpha", default=0.1)
    scaled = reader.get("log_scaling_n_floor") is not None
    log_scaling = (reader.positive("log_scaling_n_floor"), gain) if scaled else None
    width, extent = reader.positive("d_rel"), reader.positive("rel_extent")
    full = _heads(reader, "", relative=(width, extent), log_scaling=log_scaling)
    if "swa" not in mixers:
        reader.inert(("sliding_window_size", "sliding_window"))
        reader.inert(("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim"))
        return full, None
    window = reader.positive("sliding_window_size", "sliding_window")
    return full, _heads(reader, "swa_", relative=(width, window), window=window)


def _heads(reader: ConfigReader, prefix: str, **more: Any) -> GQAConfig:
    fields = ("num_attention_heads", "num_key_value_heads", "head_dim")
    heads, kv_heads, head_dim = (reader.positive(prefix + field) for field in fields)
    # Queries and keys are normalised, so scores are divided by the head dim and not by its root.
    return check_heads(reader, GQAConfig(heads, kv_heads, head_dim, sm_scale=1 / head_dim, **more))


def _mlp_sizes(reader: ConfigReader) -> tuple[int, int]:
    """Widths of dense MLPs and of one expert: intermediate_size is the latter where dense_intermediate_size is given."""
    size, dense = reader.positive("intermediate_size"), reader.get("dense_intermediate_size")
    if dense is None:
        return size, reader.positive("moe_intermediate_size", default=size)
    reader.only("moe_intermediate_size", size)
    return reader.positive("dense_intermediate_size"), size


def _moe(reader: ConfigReader, size: int) -> MoEConfig:
    for name in ("shared_expert_sink", "use_gate_bias", "norm_after_topk", "use_global_scale"):
        reader.only(name, True)
    reader.only("gate_activation", "sigmoid")
    return check_groups(
        reader,
        MoEConfig(
            num_experts=reader.positive("n_routed_experts", "num_local_experts"),
            experts_per_token=reader.positive("num_experts_per_tok"),
            intermediate_size=size,
            num_shared_experts=reader.positive("n_shared_experts"),
            renormalize=True,
            scaling_factor=reader.number("route_scale"),
            shared_sink=True,
        ),
    )


def tensors(config: ModelConfig) -> list[Tensor]:
    """Every tensor of the published checkpoint and where it goes in the decoder's parameters."""
    hidden, rows = config.hidden_size, config.logits_width or config.vocab_size
    head = Place(("lm_head",), (rows, hidden), view=lambda x: x[:rows])
    out = [
        _named("embed.weight", "embed_tokens.weight", ("embed",), (config.vocab_size, hidden)),
        _named("embed_norm.weight", "embed_tokens.embed_norm.weight", ("embed_norm",), (hidden,)),
        _named("norm.weight", "norm.weight", ("final_norm",), (hidden,)),
        Tensor("model.llm.unembed.weight", (config.vocab_size, hidden), (head,), alias="lm_head.weight"),
    ]
    for i in range(config.num_layers):
        out += _layer(config, i)
    return out


def _named(
    published: str,
    saved: str,
    path: Path,
    shape: tuple[int, ...],
    to: tuple[int, ...] | None = None,
    float32: bool = False,
) -> Tensor:
    """A tensor under its published name and the one that transformers saves it under."""
    return replace(whole(f"model.llm.{published}", path, shape, to, float32), alias=f"model.{saved}")


def _layer(config: ModelConfig, i: int) -> list[Tensor]:
    name, path, hidden = f"layers.{i}", ("layers", i), config.hidden_size
    kernel = config.residual_conv_kernel
    attention = config.gqa if config.mixers[i] == "gqa" else config.swa
    assert attention is not None
    conv = (hidden, 1, kernel), (hidden, kernel)
    mlp = _dense if config.mlps[i] == "dense" else _experts
    return [
        _named(
            f"{name}.attn_norm.weight", f"{name}.input_layernorm.weight", (*path, "mixer_norm"), (hidden,)
        ),
        _named(
            f"{name}.mlp_norm.weight",
            f"{name}.post_attention_layernorm.weight",
            (*path, "mlp_norm"),
            (hidden,),
        ),
        *(
            _named(
                f"{name}.{published}_sconv.weight",
                f"{name}.{published}_sconv.conv1d.weight",
                (*path, f"{to}_conv"),
                *conv,
                float32=True,
            )
            for published, to in (("attn", "mixer"), ("mlp", "mlp"))
        ),
        *_attention_tensors(attention, hidden, kernel, name, (*path, "mixer")),
        *mlp(config, f"{name}.mlp", (*path, "mlp")),
    ]


def _attention_tensors(config: GQAConfig, hidden: int, kernel: int, name: str, path: Path) -> list[Tensor]:
    assert config.relative is not None
    dim, (width, extent) = config.head_dim, config.relative
    q_width, kv_width = config.num_heads * dim, config.num_kv_heads * dim
    projections = {
        "wq_du": ("q_proj", (q_width, hidden)),
        "wk_dv": ("k_proj", (kv_width, hidden)),
        "wv_dv": ("v_proj", (kv_width, hidden)),
        "wr_du": ("r_proj", (config.num_heads * width, hidden)),
        "wo_ud": ("o_proj", (hidden, q_width)),
    }
    published, saved = f"{name}.attn", f"{name}.self_attn"
    out = [
        _named(f"{published}.{theirs}.weight", f"{saved}.{ours}.weight", (*path, ours), shape)
        for theirs, (ours, shape) in projections.items()
    ]
    out += [
        _named(f"{published}.{x}.weight", f"{saved}.{x}.weight", (*path, x), (dim,))
        for x in ("q_norm", "k_norm")
    ]
    bias = "rel_logits_proj.proj"
    out.append(_named(f"{published}.{bias}", f"{saved}.{bias}", (*path, "relative"), (width, extent)))
    for i, x in enumerate("kv"):
        place = Place(
            (*path, "kv_conv"),
            (2 * kv_width, kernel),
            (i * kv_width, 0),
            lambda y: y.reshape(kv_width, kernel),
        )
        out.append(
            Tensor(
                f"model.llm.{published}.{x}_sconv.weight",
                (kv_width, 1, kernel),
                (place,),
                float32=True,
                alias=f"model.{saved}.{x}_sconv.conv1d.weight",
            )
        )
    return out


def _gate_up(
    published: str, saved: tuple[str, str], path: Path, shape: tuple[int, ...], hidden: int
) -> Tensor:
    """Gate and up projections [..., size, hidden], as one parameter of all gates and then all ups. Published as one tensor
    whose rows are gate and up in turn, saved as two."""
    *outer, size = shape
    rows = math.prod(shape)

    def place(odd: int, view: Callable[[Any], Any]) -> Place:
        return Place(path, (2 * rows, hidden), (odd * rows, 0), lambda x: view(x).reshape(rows, hidden))

    def half(odd: int) -> Place:
        return place(odd, lambda x: x[..., odd::2, :])

    split = tuple(
        Tensor(f"model.{name}", (*shape, hidden), (place(odd, lambda x: x),))
        for odd, name in enumerate(saved)
    )
    return Tensor(f"model.llm.{published}", (*outer, 2 * size, hidden), (half(0), half(1)), split=split)


def _dense(config: ModelConfig, name: str, path: Path) -> list[Tensor]:
    hidden, size = config.hidden_size, config.intermediate_size
    saved = f"{name}.gate_proj.weight", f"{name}.up_proj.weight"
    return [
        _gate_up(f"{name}.w13_dn.weight", saved, (*path, "gate_up"), (size,), hidden),
        _named(f"{name}.w2_md.weight", f"{name}.down_proj.weight", (*path, "down"), (hidden, size)),
        _named(f"{name}.global_scale", f"{name}.global_scale", (*path, "scale"), (1,)),
    ]


def _experts(config: ModelConfig, name: str, path: Path) -> list[Tensor]:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    count, size, shared = moe.num_experts, moe.intermediate_size, moe.num_shared_experts
    gate, both = f"{name}.gate", (count, 2 * size, hidden)

    def half(odd: int) -> Place:
        return Place((*path, "experts_gate_up"), both, (0, odd * size, 0), lambda x: x[:, odd::2])

    experts = whole(f"model.{name}.experts.gate_up_proj", (*path, "experts_gate_up"), both)
    shared_down = Place(
        (*path, "shared_down"),
        (hidden, shared * size),
        view=lambda x: x.transpose(1, 0, 2).reshape(hidden, -1),
    )
    theirs = f"{name}.shared_experts"
    return [
        _named(f"{gate}.weight", f"{gate}.weight", (*path, "router"), (count + shared, hidden), float32=True),
        _named(
            f"{gate}.bias", f"{gate}.e_score_correction_bias", (*path, "router_bias"), (count,), float32=True
        ),
        _named(f"{gate}.global_scale", f"{gate}.global_scale", (*path, "router_scale"), (1,), float32=True),
        Tensor(f"model.llm.{name}.experts.w13_weight", both, (half(0), half(1)), split=(experts,)),
        _named(
            f"{name}.experts.w2_weight",
            f"{name}.experts.down_proj",
            (*path, "experts_down"),
            (count, hidden, size),
        ),
        _gate_up(
            f"{theirs}.shared_w13_weight",
            (f"{theirs}.gate_proj", f"{theirs}.up_proj"),
            (*path, "shared_gate_up"),
            (shared, size),
            hidden,
        ),
        Tensor(
            f"model.llm.{theirs}.shared_w2_weight",
            (shared, hidden, size),
            (shared_down,),
            alias=f"model.{theirs}.down_proj",
        ),
    ]


def skipped(config: ModelConfig) -> dict[str, str]:
    """Parts of a multimodal checkpoint that text does not need."""
    towers = ("model.visual.", "model.audio.")
    return dict.fromkeys(towers, "vision and audio") | {"model.mtp.": "layers for multi-token prediction"}


FAMILY = Family(read_config=read_config, tensors=tensors, skipped=skipped)
