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
    MLAConfig,
    ModelConfig,
    MoEConfig,
    read_dtype,
    token_ids,
)
from ukv_jax.models.families.family import Family
from ukv_jax.models.weights import Place, Tensor

MIXER_OF_LAYER_TYPE = {"full_attention": "mla", "linear_attention": "kda"}
MLP_OF_LAYER_TYPE = {"dense": "dense", "sparse": "moe"}


def read_config(reader: ConfigReader) -> ModelConfig:
    """Maps config.json; raises ValueError for what the layer kinds here don't compute."""
    layers = reader.positive("num_hidden_layers")
    heads = reader.positive("num_attention_heads")
    mla = MLAConfig(
        num_heads=heads,
        kv_lora_rank=reader.positive("kv_lora_rank"),
        qk_nope_head_dim=reader.positive("qk_nope_head_dim"),
        qk_rope_head_dim=reader.positive("qk_rope_head_dim"),
        v_head_dim=reader.positive("v_head_dim"),
        q_lora_rank=reader.get("q_lora_rank"),
    )
    linear = reader.get("linear_attn_config", default={})
    known = {"full_attn_layers", "kda_layers", "head_dim", "num_heads", "short_conv_kernel_size"}
    if set(linear) - known:
        raise reader.fail(
            f"linear_attn_config has fields that are not implemented: {sorted(set(linear) - known)}"
        )
    kda = KDAConfig(
        num_heads=_linear_field(reader, linear, "num_heads", "linear_num_heads"),
        head_dim=_linear_field(reader, linear, "head_dim", "linear_head_dim"),
        conv_kernel=_linear_field(reader, linear, "short_conv_kernel_size", "linear_conv_kernel_dim"),
    )
    mlps = _mlps(reader, layers)
    moe = _moe(reader) if "moe" in mlps else None

    reader.only("qk_head_dim", mla.qk_head_dim)
    reader.only("num_key_value_heads", heads)  # MLA: every head has its own up-projected key
    reader.only("hidden_act", "silu")
    reader.only("attention_bias", False)
    reader.only("mla_use_nope", True)
    reader.only("num_nextn_predict_layers", 0)
    # Unused without rotary embedding; head_dim is a left-over of the general config class.
    reader.inert(("rope_theta", "rope_scaling", "rope_parameters", "head_dim"))
    return ModelConfig(
        family="kimi_linear",
        vocab_size=reader.positive("vocab_size"),
        hidden_size=reader.positive("hidden_size"),
        intermediate_size=reader.positive("intermediate_size"),
        rms_norm_eps=float(reader.get("rms_norm_eps", default=1e-5)),
        mixers=_mixers(reader, layers, linear),
        mlps=mlps,
        dtype=read_dtype(reader),
        max_position=reader.get("model_max_length", "max_position_embeddings", default=1 << 20),
        eos_token_ids=token_ids(reader.get("eos_token_id")),
        bos_token_id=reader.get("bos_token_id"),
        pad_token_id=reader.get("pad_token_id"),
        tie_word_embeddings=bool(reader.get("tie_word_embeddings", default=False)),
        mla=mla,
        kda=kda,
        moe=moe,
    )


def _linear_field(reader: ConfigReader, linear: dict, published: str, flat: str) -> int:
    """A KDA dimension: the published config nests it, transformers also writes it at the top."""
    values = {value for value in (linear.get(published), reader.get(flat)) if value is not None}
    if len(values) != 1 or not all(isinstance(value, int) and value > 0 for value in values):
        raise reader.fail(
            f"linear_attn_config.{published} (or {flat}) must be one integer above 0, found {sorted(map(str, values))}"
        )
    return values.pop()


def _mixers(reader: ConfigReader, layers: int, linear: dict) -> tuple[str, ...]:
    """Layer kinds from `layer_types`, or from the lists of the published config, which count layers from 1."""
    types = reader.get("layer_types")
    full, kda = linear.get("full_attn_layers"), linear.get("kda_layers")
    if full is None or kda is None:
        if types is None:
            raise reader.fail(
                "layer kinds wanted: linear_attn_config.full_attn_layers and kda_layers, or layer_types"
            )
        return _kinds(reader, "layer_types", types, MIXER_OF_LAYER_TYPE, layers)
    if sorted(full + kda) != list(range(1, layers + 1)):
        raise reader.fail(
            f"full_attn_layers {full} and kda_layers {kda} do not name layers 1 to {layers} once each"
        )
    mixers = tuple("mla" if i + 1 in full else "kda" for i in range(layers))
    if types is not None and _kinds(reader, "layer_types", types, MIXER_OF_LAYER_TYPE, layers) != mixers:
        raise reader.fail(f"layer_types {types} contradict full_attn_layers {full}")
    return mixers


def _mlps(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    types = reader.get("mlp_layer_types")
    dense = reader.get("first_k_dense_replace", default=1)
    every = reader.get("moe_layer_freq", default=1)
    if types is None:
        return tuple("moe" if i >= dense and i % every == 0 else "dense" for i in range(layers))
    return _kinds(reader, "mlp_layer_types", types, MLP_OF_LAYER_TYPE, layers)


def _kinds(
    reader: ConfigReader, name: str, types: list[str], kinds: dict[str, str], layers: int
) -> tuple[str, ...]:
    unknown = sorted(set(types) - set(kinds))
    if unknown or len(types) != layers:
        raise reader.fail(
            f"{name}: {layers} entries out of {sorted(kinds)} wanted, found {len(types)} with unknown kinds {unknown}"
        )
    return tuple(kinds[t] for t in types)


def _moe(reader: ConfigReader) -> MoEConfig:
    reader.only("moe_router_activation_func", "sigmoid")
    moe = MoEConfig(
        num_experts=reader.positive("num_experts", "num_local_experts", "n_routed_experts"),
        experts_per_token=reader.positive("num_experts_per_token", "num_experts_per_tok"),
        intermediate_size=reader.positive("moe_intermediate_size"),
        num_shared_experts=reader.get("num_shared_experts", "n_shared_experts", default=0),
        renormalize=bool(reader.get("moe_renormalize", "norm_topk_prob", default=True)),
        scaling_factor=float(reader.get("routed_scaling_factor", default=1.0)),
        num_groups=reader.get("num_expert_group", "n_group", default=1),
        groups_per_token=reader.get("topk_group", default=1),
    )
    if moe.num_groups > 1:
        reader.only("use_grouped_topk", True)
    reader.inert(("use_grouped_topk",))  # with one group both values mean the same
    per_group, rest = divmod(moe.num_experts, moe.num_groups)
    if rest or (moe.num_groups > 1 and per_group < 2):
        raise reader.fail(f"{moe.num_experts} experts do not make {moe.num_groups} groups of at least 2")
    if moe.experts_per_token > moe.groups_per_token * per_group:
        raise reader.fail(
            f"{moe.experts_per_token} experts a token wanted, but {moe.groups_per_token} groups hold "
            f"{moe.groups_per_token * per_group}"
        )
    return moe


def tensors(config: ModelConfig) -> list[Tensor]:
    """Every tensor of the published checkpoint and where it goes in the decoder's parameters."""
    hidden = config.hidden_size
    out = [
        _whole("model.embed_tokens.weight", ("embed",), (config.vocab_size, hidden)),
        _whole("model.norm.weight", ("final_norm",), (hidden,)),
    ]
    if not config.tie_word_embeddings:
        out.append(_whole("lm_head.weight", ("lm_head",), (config.vocab_size, hidden)))
    for i, (mixer, mlp) in enumerate(zip(config.mixers, config.mlps, strict=True)):
        name, path = f"model.layers.{i}", ("layers", i)
        out.append(_whole(f"{name}.input_layernorm.weight", (*path, "mixer_norm"), (hidden,)))
        out.append(_whole(f"{name}.post_attention_layernorm.weight", (*path, "mlp_norm"), (hidden,)))
        attention = _mla if mixer == "mla" else _kda
        out += attention(config, f"{name}.self_attn", (*path, "mixer"))
        if mlp == "dense":
            size = config.intermediate_size
            # transformers 5.24 saves the dense layer under the name of the sparse ones.
            dense = _gated(f"{name}.mlp", (*path, "mlp"), "gate_up", "down", hidden, size)
            out += [replace(t, alias=t.name.replace(".mlp.", ".block_sparse_moe.")) for t in dense]
        else:
            out += _experts(config, f"{name}.block_sparse_moe", (*path, "mlp"))
    return out


Path = tuple[str | int, ...]


def _whole(
    name: str, path: Path, shape: tuple[int, ...], to: tuple[int, ...] | None = None, float32: bool = False
) -> Tensor:
    return Tensor(name, shape, (Place(path, to or shape),), float32)


def _stacked(names: list[str], path: Path, shape: tuple[int, ...], to: tuple[int, ...]) -> list[Tensor]:
    """Tensors of one shape, put one after the other along the first axis of one parameter."""
    whole = (len(names) * to[0], *to[1:])

    def place(i: int) -> Place:
        return Place(path, whole, (i * to[0],) + (0,) * (len(to) - 1), lambda x: x.reshape(to))

    return [Tensor(name, shape, (place(i),)) for i, name in enumerate(names)]


def _gated(name: str, path: Path, gate_up: str, down: str, hidden: int, size: int) -> list[Tensor]:
    names = [f"{name}.gate_proj.weight", f"{name}.up_proj.weight"]
    return [
        *_stacked(names, (*path, gate_up), (size, hidden), (size, hidden)),
        _whole(f"{name}.down_proj.weight", (*path, down), (hidden, size)),
    ]


def _mla(config: ModelConfig, name: str, path: Path) -> list[Tensor]:
    mla, hidden = config.mla, config.hidden_size
    assert mla is not None
    rank, q_width = mla.kv_lora_rank, mla.num_heads * mla.qk_head_dim
    if mla.q_lora_rank is None:
        query = [_whole(f"{name}.q_proj.weight", (*path, "q_proj"), (q_width, hidden))]
    else:
        query = [
            _whole(f"{name}.q_a_proj.weight", (*path, "q_a_proj"), (mla.q_lora_rank, hidden)),
            _whole(f"{name}.q_a_layernorm.weight", (*path, "q_a_norm"), (mla.q_lora_rank,)),
            _whole(f"{name}.q_b_proj.weight", (*path, "q_b_proj"), (q_width, mla.q_lora_rank)),
        ]
    nope, per_head = mla.qk_nope_head_dim, mla.qk_nope_head_dim + mla.v_head_dim
    by_head = (mla.num_heads, per_head, rank)
    kv_b = Tensor(
        f"{name}.kv_b_proj.weight",
        (mla.num_heads * per_head, rank),
        (
            Place((*path, "w_uk"), (mla.num_heads, nope, rank), view=lambda x: x.reshape(by_head)[:, :nope]),
            Place(
                (*path, "w_uv"),
                (mla.num_heads, mla.v_head_dim, rank),
                view=lambda x: x.reshape(by_head)[:, nope:],
            ),
        ),
    )
    return [
        *query,
        _whole(
            f"{name}.kv_a_proj_with_mqa.weight", (*path, "kv_a_proj"), (rank + mla.qk_rope_head_dim, hidden)
        ),
        _whole(f"{name}.kv_a_layernorm.weight", (*path, "kv_a_norm"), (rank,)),
        kv_b,
        _whole(f"{name}.o_proj.weight", (*path, "o_proj"), (hidden, mla.num_heads * mla.v_head_dim)),
    ]


def _kda(config: ModelConfig, name: str, path: Path) -> list[Tensor]:
    kda, hidden = config.kda, config.hidden_size
    assert kda is not None
    channels, dim, heads, kernel = kda.channels, kda.head_dim, kda.num_heads, kda.conv_kernel
    qkv = [f"{name}.{x}_proj.weight" for x in "qkv"]
    conv = [f"{name}.{x}_conv1d.weight" for x in "qkv"]
    return [
        *_stacked(qkv, (*path, "qkv_proj"), (channels, hidden), (channels, hidden)),
        *_stacked(conv, (*path, "conv"), (channels, 1, kernel), (channels, kernel)),
        _whole(f"{name}.A_log", (*path, "A_log"), (1, 1, heads, 1), (heads,), float32=True),
        _whole(f"{name}.dt_bias", (*path, "dt_bias"), (channels,), float32=True),
        _whole(f"{name}.f_a_proj.weight", (*path, "f_a_proj"), (dim, hidden)),
        _whole(f"{name}.f_b_proj.weight", (*path, "f_b_proj"), (channels, dim)),
        _whole(f"{name}.b_proj.weight", (*path, "b_proj"), (heads, hidden)),
        _whole(f"{name}.g_a_proj.weight", (*path, "g_a_proj"), (dim, hidden)),
        _whole(f"{name}.g_b_proj.weight", (*path, "g_b_proj"), (channels, dim)),
        _whole(f"{name}.o_norm.weight", (*path, "o_norm"), (dim,)),
        _whole(f"{name}.o_proj.weight", (*path, "o_proj"), (hidden, channels)),
    ]


def _experts(config: ModelConfig, name: str, path: Path) -> list[Tensor]:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    experts, size = moe.num_experts, moe.intermediate_size
    gate_up, down = (*path, "experts_gate_up"), (*path, "experts_down")

    def part(
        expert: int, which: str, shape: tuple[int, int], path: Path, whole: tuple[int, int], row: int
    ) -> Tensor:
        place = Place(path, (experts, *whole), (expert, row, 0))
        return Tensor(f"{name}.experts.{expert}.{which}.weight", shape, (place,))

    out = [
        _whole(f"{name}.gate.weight", (*path, "router"), (experts, hidden), float32=True),
        _whole(f"{name}.gate.e_score_correction_bias", (*path, "router_bias"), (experts,), float32=True),
    ]
    for e in range(experts):
        out += [
            part(e, "w1", (size, hidden), gate_up, (2 * size, hidden), 0),
            part(e, "w3", (size, hidden), gate_up, (2 * size, hidden), size),
            part(e, "w2", (hidden, size), down, (hidden, size), 0),
        ]
    if moe.num_shared_experts:
        shared = moe.num_shared_experts * size
        out += _gated(f"{name}.shared_experts", path, "shared_gate_up", "shared_down", hidden, shared)
    return out


FAMILY = Family(read_config=read_config, tensors=tensors)
