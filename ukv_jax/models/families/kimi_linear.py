"""Kimi-Linear: KDA and MLA layers, a dense MLP first and experts after it.

Field and tensor names are those of moonshotai/Kimi-Linear-48B-A3B-Instruct; fields may also carry the names that
transformers (5.24, models/kimi_linear) gives them. MLA has no rotary embedding: the 64 "rope" dimensions of query and
key are plain ones.
"""

from __future__ import annotations

from dataclasses import replace

from ukv_jax.models.config import (
    ConfigReader,
    KDAConfig,
    ModelConfig,
    MoEConfig,
    read_dtype,
)
from ukv_jax.models.families.common import (
    Path,
    check_groups,
    ends,
    experts,
    gated,
    layer_kinds,
    mla,
    norms,
    read_mla,
    stacked,
    whole,
)
from ukv_jax.models.families.family import Family
from ukv_jax.models.weights import Tensor

MIXER_OF_LAYER_TYPE = {"full_attention": "mla", "linear_attention": "kda"}
MLP_OF_LAYER_TYPE = {"dense": "dense", "sparse": "moe"}
# Fields that mean nothing where no layer has experts.
MOE_FIELDS = (
    "moe_router_activation_func", "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_token",
    "num_experts_per_tok", "moe_intermediate_size", "num_shared_experts", "n_shared_experts", "moe_renormalize",
    "norm_topk_prob", "routed_scaling_factor", "num_expert_group", "n_group", "topk_group", "use_grouped_topk",
)  # fmt: skip


def read_config(reader: ConfigReader) -> ModelConfig:
    """Maps config.json; raises ValueError for what the layer kinds here don't compute."""
    layers = reader.positive("num_hidden_layers")
    latent = read_mla(reader)
    linear = reader.section("linear_attn_config")
    kda = KDAConfig(
        num_heads=_linear_field(reader, linear, "num_heads", "linear_num_heads"),
        head_dim=_linear_field(reader, linear, "head_dim", "linear_head_dim"),
        conv_kernel=_linear_field(reader, linear, "short_conv_kernel_size", "linear_conv_kernel_dim"),
    )
    mixers = _mixers(reader, layers, linear)
    linear.finish()
    mlps = _mlps(reader, layers)
    moe = _moe(reader) if "moe" in mlps else None
    reader.inert(MOE_FIELDS)

    reader.only("hidden_act", "silu")
    reader.only("mla_use_nope", True)
    reader.only("num_nextn_predict_layers", 0)
    reader.inert(("rope_theta", "rope_scaling", "rope_parameters"))  # unused without rotary embedding
    return ModelConfig(
        family="kimi_linear",
        vocab_size=reader.positive("vocab_size"),
        hidden_size=reader.positive("hidden_size"),
        intermediate_size=reader.positive("intermediate_size"),
        rms_norm_eps=reader.number("rms_norm_eps", default=1e-5),
        mixers=mixers,
        mlps=mlps,
        dtype=read_dtype(reader),
        max_position=reader.positive("model_max_length", "max_position_embeddings", default=1 << 20),
        eos_token_ids=reader.token_ids("eos_token_id"),
        bos_token_id=reader.token_id("bos_token_id"),
        pad_token_id=reader.token_id("pad_token_id"),
        tie_word_embeddings=reader.flag("tie_word_embeddings", default=False),
        mla=latent,
        kda=kda,
        moe=moe,
    )


def _linear_field(reader: ConfigReader, linear: ConfigReader, published: str, flat: str) -> int:
    """A KDA dimension: the published config nests it, transformers also writes it at the top."""
    values = [value for value in (linear.get(published), reader.get(flat)) if value is not None]
    if not values or any(type(value) is not int or value <= 0 or value != values[0] for value in values):
        raise reader.fail(
            f"linear_attn_config.{published} (or {flat}) must be one integer above 0, found {values}"
        )
    return int(values[0])


def _mixers(reader: ConfigReader, layers: int, linear: ConfigReader) -> tuple[str, ...]:
    """Layer kinds from `layer_types`, or from the lists of the published config, which count layers from 1."""
    types = reader.maybe_list_of(str, "layer_types")
    full, kda = (linear.maybe_list_of(int, name) for name in ("full_attn_layers", "kda_layers"))
    if full is None or kda is None:
        if types is None:
            raise reader.fail(
                "layer kinds wanted: linear_attn_config.full_attn_layers and kda_layers, or layer_types"
            )
        return layer_kinds(reader, "layer_types", types, MIXER_OF_LAYER_TYPE, layers)
    if sorted(full + kda) != list(range(1, layers + 1)):
        raise reader.fail(
            f"full_attn_layers {full} and kda_layers {kda} do not name layers 1 to {layers} once each"
        )
    mixers = tuple("mla" if i + 1 in full else "kda" for i in range(layers))
    if types is not None and layer_kinds(reader, "layer_types", types, MIXER_OF_LAYER_TYPE, layers) != mixers:
        raise reader.fail(f"layer_types {types} contradict full_attn_layers {full}")
    return mixers


def _mlps(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    types = reader.maybe_list_of(str, "mlp_layer_types")
    dense = reader.natural("first_k_dense_replace", default=1)
    every = reader.positive("moe_layer_freq", default=1)
    if types is None:
        return tuple("moe" if i >= dense and i % every == 0 else "dense" for i in range(layers))
    return layer_kinds(reader, "mlp_layer_types", types, MLP_OF_LAYER_TYPE, layers)


def _moe(reader: ConfigReader) -> MoEConfig:
    reader.only("moe_router_activation_func", "sigmoid")
    moe = MoEConfig(
        num_experts=reader.positive("num_experts", "num_local_experts", "n_routed_experts"),
        experts_per_token=reader.positive("num_experts_per_token", "num_experts_per_tok"),
        intermediate_size=reader.positive("moe_intermediate_size"),
        num_shared_experts=reader.natural("num_shared_experts", "n_shared_experts", default=0),
        renormalize=reader.flag("moe_renormalize", "norm_topk_prob", default=True),
        scaling_factor=reader.number("routed_scaling_factor", default=1.0),
        num_groups=reader.positive("num_expert_group", "n_group", default=1),
        groups_per_token=reader.positive("topk_group", default=1),
    )
    # With one group both values mean the same.
    if not reader.flag("use_grouped_topk", default=True) and moe.num_groups > 1:
        raise reader.fail(
            f"use_grouped_topk = False is not implemented with num_expert_group {moe.num_groups}"
        )
    return check_groups(reader, moe)


def tensors(config: ModelConfig) -> list[Tensor]:
    """Every tensor of the published checkpoint and where it goes in the decoder's parameters."""
    out = ends(config)
    for i, (mixer, mlp) in enumerate(zip(config.mixers, config.mlps, strict=True)):
        name, path = f"model.layers.{i}", ("layers", i)
        out += norms(config, name, path)
        attention = mla if mixer == "mla" else _kda
        out += attention(config, f"{name}.self_attn", (*path, "mixer"))
        if mlp == "dense":
            hidden, size = config.hidden_size, config.intermediate_size
            # transformers 5.24 saves the dense layer under the name of the sparse ones.
            dense = gated(f"{name}.mlp", (*path, "mlp"), "gate_up", "down", hidden, size)
            out += [replace(t, alias=t.name.replace(".mlp.", ".block_sparse_moe.")) for t in dense]
        else:
            out += experts(
                config, f"{name}.block_sparse_moe", (*path, "mlp"), names=("w1", "w3", "w2"), bias=True
            )
    return out


def _kda(config: ModelConfig, name: str, path: Path) -> list[Tensor]:
    kda, hidden = config.kda, config.hidden_size
    assert kda is not None
    channels, dim, heads, kernel = kda.channels, kda.head_dim, kda.num_heads, kda.conv_kernel
    qkv = [f"{name}.{x}_proj.weight" for x in "qkv"]
    conv = [f"{name}.{x}_conv1d.weight" for x in "qkv"]
    return [
        *stacked(qkv, (*path, "qkv_proj"), (channels, hidden), (channels, hidden)),
        *stacked(conv, (*path, "conv"), (channels, 1, kernel), (channels, kernel)),
        whole(f"{name}.A_log", (*path, "A_log"), (1, 1, heads, 1), (heads,), float32=True),
        whole(f"{name}.dt_bias", (*path, "dt_bias"), (channels,), float32=True),
        whole(f"{name}.f_a_proj.weight", (*path, "f_a_proj"), (dim, hidden)),
        whole(f"{name}.f_b_proj.weight", (*path, "f_b_proj"), (channels, dim)),
        whole(f"{name}.b_proj.weight", (*path, "b_proj"), (heads, hidden)),
        whole(f"{name}.g_a_proj.weight", (*path, "g_a_proj"), (dim, hidden)),
        whole(f"{name}.g_b_proj.weight", (*path, "g_b_proj"), (channels, dim)),
        whole(f"{name}.o_norm.weight", (*path, "o_norm"), (dim,)),
        whole(f"{name}.o_proj.weight", (*path, "o_proj"), (hidden, channels)),
    ]


FAMILY = Family(read_config=read_config, tensors=tensors)
