"""gemma-4, the text model: sliding-window layers with a full one after every few, whose heads are wider.

Field and tensor names are those of google/gemma-4-E2B and its larger siblings, as transformers (5.24,
models/gemma4) has them. A published checkpoint is a multimodal one: the text model's fields are under text_config and its
tensors under model.language_model; vision and audio are left alone. Text alone, saved on its own, is read too. Layers
without keys and values of their own (num_kv_shared_layers) read the cache of the last earlier layer of their kind.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ukv_jax.models.config import (
    INERT_FIELDS,
    ConfigReader,
    GQAConfig,
    ModelConfig,
    MoEConfig,
    Multipliers,
    read_dtype,
)
from ukv_jax.models.families.common import (
    Path,
    check_groups,
    check_heads,
    gated,
    layer_kinds,
    or_on_its_own,
    whole,
)
from ukv_jax.models.families.family import Family
from ukv_jax.models.rope import read_ropes
from ukv_jax.models.weights import Place, Tensor

MIXER_OF_LAYER_TYPE = {"sliding_attention": "swa", "full_attention": "gqa"}
PREFIX = "model.language_model"
MULTIMODAL = (
    "vision_config", "audio_config", "boi_token_id", "eoi_token_id", "image_token_id", "video_token_id",
    "boa_token_id", "eoa_token_id", "eoa_token_index", "audio_token_id", "vision_soft_tokens_per_image", "eos_token_id",
)  # fmt: skip


def read_config(top: ConfigReader) -> ModelConfig:
    """Maps config.json; raises ValueError for what the layer kinds here don't compute."""
    nested = top.get("text_config") is not None
    reader = top.section("text_config") if nested else top
    if nested:
        top.inert(MULTIMODAL)
        reader.inert(INERT_FIELDS)
        reader.only("model_type", "gemma4_text")
    layers, hidden = reader.positive("num_hidden_layers"), reader.positive("hidden_size")
    mixers = _mixers(reader, layers)
    full, swa = _attention(reader, mixers)
    shared = reader.natural("num_kv_shared_layers", default=0)
    lacking = {m for m in mixers[layers - shared :] if m not in mixers[: layers - shared]}
    if lacking:
        raise reader.fail(
            f"the last {shared} of {layers} layers share keys and values of earlier ones, but no earlier layer is of the "
            f"kinds {sorted(lacking)}"
        )
    reader.only("hidden_activation", "gelu_pytorch_tanh")
    moe = _moe(reader) if reader.flag("enable_moe_block", default=False) else None
    reader.inert(("num_experts", "top_k_experts", "moe_intermediate_size", "expert_intermediate_size"))
    reader.only("use_bidirectional_attention", "vision")  # text is causal then too
    vocab = reader.positive("vocab_size_per_layer_input", default=262_144)
    width = reader.natural("hidden_size_per_layer_input", default=256)
    capped = reader.get("final_logit_softcapping") is not None
    config = ModelConfig(
        family="gemma4",
        vocab_size=reader.positive("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.positive("intermediate_size"),
        rms_norm_eps=reader.number("rms_norm_eps", default=1e-6),
        mixers=mixers,
        mlps=("dense_moe" if moe else "dense",) * layers,
        dtype=read_dtype(reader if reader.get("dtype", "torch_dtype") is not None else top),
        max_position=reader.positive("max_position_embeddings"),
        eos_token_ids=reader.token_ids("eos_token_id"),
        bos_token_id=reader.token_id("bos_token_id"),
        pad_token_id=reader.token_id("pad_token_id"),
        tie_word_embeddings=reader.flag("tie_word_embeddings", default=True),
        gqa=full,
        swa=swa,
        moe=moe,
        multipliers=Multipliers(embedding=hidden**0.5),
        activation="gelu_tanh",
        final_logit_cap=reader.number("final_logit_softcapping") if capped else None,
        kv_shared_layers=shared,
        shared_mlp_factor=2 if reader.flag("use_double_wide_mlp", default=False) else 1,
        per_layer_width=width,
        per_layer_vocab=vocab if width else 0,
    )
    top.get("dtype", "torch_dtype")
    if nested:
        top.only("tie_word_embeddings", config.tie_word_embeddings)
        reader.finish()
    return config


def _moe(reader: ConfigReader) -> MoEConfig:
    return check_groups(
        reader,
        MoEConfig(
            num_experts=reader.positive("num_experts"),
            experts_per_token=reader.positive("top_k_experts"),
            intermediate_size=reader.positive("moe_intermediate_size", "expert_intermediate_size"),
            num_shared_experts=0,
            renormalize=True,
            scaling_factor=1.0,
            score_function="softmax",
            activation="gelu_tanh",
        ),
    )


def _mixers(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    every_sixth = [
        "full_attention" if i % 6 == 5 or i == layers - 1 else "sliding_attention" for i in range(layers)
    ]
    types = reader.list_of(str, "layer_types", default=every_sixth)
    mixers = layer_kinds(reader, "layer_types", types, MIXER_OF_LAYER_TYPE, layers)
    if types[-1] != "full_attention":
        raise reader.fail(f"the last of layer_types must be full_attention, found {types[-1]!r}")
    return mixers


def _attention(reader: ConfigReader, mixers: tuple[str, ...]) -> tuple[GQAConfig, GQAConfig]:
    """Attention of full layers and of sliding-window ones."""
    heads, kv_heads = reader.positive("num_attention_heads"), reader.positive("num_key_value_heads")
    k_is_v = reader.flag("attention_k_eq_v", default=False)
    reader.only("attention_bias", False)
    wide = _of_full_layers(reader, mixers, k_is_v)
    head_dim = {"full_attention": wide.get("head_dim", 512), "sliding_attention": reader.positive("head_dim")}
    ropes = read_ropes(reader, head_dim)
    # Queries and keys are normalised; scores are not scaled.
    swa = GQAConfig(
        heads,
        kv_heads,
        head_dim["sliding_attention"],
        rope=ropes["sliding_attention"],
        sm_scale=1.0,
        window=reader.positive("sliding_window"),
        v_norm=True,
    )
    full = replace(
        swa,
        num_kv_heads=wide.get("num_key_value_heads", kv_heads),
        head_dim=head_dim["full_attention"],
        rope=ropes["full_attention"],
        window=None,
        k_is_v=k_is_v,
    )
    return check_heads(reader, full), check_heads(reader, swa)


def _of_full_layers(reader: ConfigReader, mixers: tuple[str, ...], k_is_v: bool) -> dict[str, int]:
    """What full layers have otherwise: from per_layer_config, or from the fields that stood for it before."""
    by_layer = reader.get("per_layer_config")
    before = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    given = {name: reader.positive(old) for name, old in before.items() if reader.get(old) is not None}
    if by_layer is None:
        return given if k_is_v else {name: value for name, value in given.items() if name == "head_dim"}
    full = [str(i) for i, mixer in enumerate(mixers) if mixer == "gqa"]
    if by_layer == {}:  # full layers are like the others: head_dim and num_key_value_heads are theirs too
        return {"head_dim": reader.positive("head_dim")}
    layers = reader.section("per_layer_config")
    values = [layers.get(i) for i in full]
    if sorted(by_layer) != sorted(full) or any(v != values[0] for v in values):
        raise reader.fail(
            f"per_layer_config is implemented for the full-attention layers {full} alone and alike, found {by_layer}"
        )
    layer = layers.section(full[0])
    found = {name: layer.positive(name) for name in before if layer.get(name) is not None}
    layer.finish()
    return found


def tensors(config: ModelConfig) -> list[Tensor]:
    """Every tensor of the published checkpoint and where it goes in the decoder's parameters."""
    hidden, width = config.hidden_size, config.per_layer_width
    out = [
        whole(f"{PREFIX}.embed_tokens.weight", ("embed",), (config.vocab_size, hidden)),
        whole(f"{PREFIX}.norm.weight", ("final_norm",), (hidden,)),
    ]
    if not config.tie_word_embeddings:
        out.append(whole("lm_head.weight", ("lm_head",), (config.vocab_size, hidden)))
    if width:
        total = config.num_layers * width
        table, path = (config.per_layer_vocab, total), ("per_layer",)
        out += [
            whole(f"{PREFIX}.embed_tokens_per_layer.weight", (*path, "embed"), table),
            whole(f"{PREFIX}.per_layer_model_projection.weight", (*path, "proj"), (total, hidden)),
            whole(f"{PREFIX}.per_layer_projection_norm.weight", (*path, "norm"), (width,)),
        ]
    for i in range(config.num_layers):
        out += _layer(config, i)
    return [or_on_its_own(tensor, PREFIX) for tensor in out]


def _layer(config: ModelConfig, i: int) -> list[Tensor]:
    name, path = f"{PREFIX}.layers.{i}", ("layers", i)
    hidden, width = config.hidden_size, config.per_layer_width
    attention = config.gqa if config.mixers[i] == "gqa" else config.swa
    assert attention is not None
    shared = i >= config.num_layers - config.kv_shared_layers
    around = {
        "input_layernorm": "mixer_norm",
        "post_attention_layernorm": "mixer_post_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    }
    out = [whole(f"{name}.{norm}.weight", (*path, to), (hidden,)) for norm, to in around.items()]
    out.append(whole(f"{name}.layer_scalar", (*path, "scale"), (1,)))
    out += _attention_tensors(attention, hidden, f"{name}.self_attn", (*path, "mixer"), shared)
    size = config.intermediate_size * (config.shared_mlp_factor if shared else 1)
    out += gated(f"{name}.mlp", (*path, "mlp"), "gate_up", "down", hidden, size)
    if config.moe is not None:
        out += _experts(config.moe, hidden, name, (*path, "mlp"))
    if width:
        extra = (*path, "per_layer")
        out += [
            whole(f"{name}.per_layer_input_gate.weight", (*extra, "gate"), (width, hidden)),
            whole(f"{name}.per_layer_projection.weight", (*extra, "proj"), (hidden, width)),
            whole(f"{name}.post_per_layer_input_norm.weight", (*extra, "norm"), (hidden,)),
        ]
    return out


def _experts(config: MoEConfig, hidden: int, name: str, path: Path) -> list[Tensor]:
    """Experts beside the dense MLP of a layer. The router's input is normalised, scaled by its weight and by
    hidden^-0.5: both make the weight of one norm."""
    count, size = config.num_experts, config.intermediate_size
    norms = {
        "pre_feedforward_layernorm_2": "experts_norm",
        "post_feedforward_layernorm_1": "dense_post_norm",
        "post_feedforward_layernorm_2": "experts_post_norm",
    }
    router_norm = Place((*path, "router_norm"), (hidden,), view=lambda x: x.astype(np.float32) * hidden**-0.5)
    return [
        *(whole(f"{name}.{norm}.weight", (*path, to), (hidden,)) for norm, to in norms.items()),
        Tensor(f"{name}.router.scale", (hidden,), (router_norm,), float32=True),
        whole(f"{name}.router.proj.weight", (*path, "router"), (count, hidden), float32=True),
        whole(f"{name}.router.per_expert_scale", (*path, "expert_scale"), (count,), float32=True),
        whole(f"{name}.experts.gate_up_proj", (*path, "experts_gate_up"), (count, 2 * size, hidden)),
        whole(f"{name}.experts.down_proj", (*path, "experts_down"), (count, hidden, size)),
    ]


def _attention_tensors(config: GQAConfig, hidden: int, name: str, path: Path, shared: bool) -> list[Tensor]:
    dim = config.head_dim
    width, kv_width = config.num_heads * dim, config.num_kv_heads * dim
    out = [
        whole(f"{name}.q_proj.weight", (*path, "q_proj"), (width, hidden)),
        whole(f"{name}.q_norm.weight", (*path, "q_norm"), (dim,)),
        whole(f"{name}.o_proj.weight", (*path, "o_proj"), (hidden, width)),
    ]
    if not shared:
        out += [
            whole(f"{name}.k_proj.weight", (*path, "k_proj"), (kv_width, hidden)),
            whole(f"{name}.k_norm.weight", (*path, "k_norm"), (dim,)),
        ]
        if not config.k_is_v:
            out.append(whole(f"{name}.v_proj.weight", (*path, "v_proj"), (kv_width, hidden)))
    return out


def skipped(config: ModelConfig) -> dict[str, str]:
    """Parts of a multimodal checkpoint that text does not need, and projections that no layer uses."""
    what = {
        f"model.{part}": "vision and audio"
        for part in ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
    }
    for i in range(config.num_layers - config.kv_shared_layers, config.num_layers):
        for prefix in (PREFIX, "model"):
            for part in ("k_proj", "v_proj", "k_norm", "v_norm"):
                what[f"{prefix}.layers.{i}.self_attn.{part}."] = "this layer reads another layer's cache"
    return what


FAMILY = Family(read_config=read_config, tensors=tensors, skipped=skipped)
