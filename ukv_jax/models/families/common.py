"""Parts of config maps and weight maps that several families have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ukv_jax.models.config import ConfigReader, GQAConfig, MLAConfig, ModelConfig, MoEConfig
from ukv_jax.models.rope import RopeConfig
from ukv_jax.models.weights import Place, Tensor

Path = tuple[str | int, ...]


def read_mla(reader: ConfigReader, rope: RopeConfig | None = None) -> MLAConfig:
    """Dimensions of latent attention; `rope` turns the qk_rope_head_dim part of queries and keys."""
    heads = reader.positive("num_attention_heads")
    mla = MLAConfig(
        num_heads=heads,
        kv_lora_rank=reader.positive("kv_lora_rank"),
        qk_nope_head_dim=reader.positive("qk_nope_head_dim"),
        qk_rope_head_dim=reader.positive("qk_rope_head_dim"),
        v_head_dim=reader.positive("v_head_dim"),
        q_lora_rank=None if reader.get("q_lora_rank") is None else reader.positive("q_lora_rank"),
        rope=rope,
    )
    reader.only("qk_head_dim", mla.qk_head_dim)
    reader.only("num_key_value_heads", heads)  # every head has its own up-projected key
    reader.only("attention_bias", False)
    reader.inert(("head_dim",))  # left over from the general config class
    return mla


def check_heads(reader: ConfigReader, config: GQAConfig) -> GQAConfig:
    """Raises ValueError if query heads do not divide evenly among the KV heads."""
    if config.num_heads % config.num_kv_heads:
        raise reader.fail(
            f"num_key_value_heads {config.num_kv_heads} does not divide num_attention_heads {config.num_heads}"
        )
    return config


def check_groups(reader: ConfigReader, moe: MoEConfig) -> MoEConfig:
    """Raises ValueError if the expert groups do not work out."""
    per_group, rest = divmod(moe.num_experts, moe.num_groups)
    least = 2 if moe.group_rank == "top2" and moe.num_groups > 1 else 1
    if rest or per_group < least:
        raise reader.fail(
            f"{moe.num_experts} experts do not make {moe.num_groups} groups of at least {least}"
        )
    if moe.experts_per_token > moe.groups_per_token * per_group:
        raise reader.fail(
            f"{moe.experts_per_token} experts a token wanted, but {moe.groups_per_token} groups hold "
            f"{moe.groups_per_token * per_group}"
        )
    return moe


def layer_kinds(
    reader: ConfigReader, name: str, types: Sequence[str], kinds: Mapping[str, str], layers: int
) -> tuple[str, ...]:
    """The kind of each layer, from what the config field `name` calls it. Raises ValueError for another number of entries or
    unknown ones."""
    unknown = sorted(set(types) - set(kinds))
    if unknown or len(types) != layers:
        raise reader.fail(
            f"{name}: {layers} entries out of {sorted(kinds)} wanted, found {len(types)} with unknown kinds {unknown}"
        )
    return tuple(kinds[t] for t in types)


def dense_then_moe(layers: int, dense: int) -> tuple[str, ...]:
    """MLP kinds: the first `dense` layers dense, the rest experts."""
    return tuple("moe" if i >= dense else "dense" for i in range(layers))


def whole(
    name: str, path: Path, shape: tuple[int, ...], to: tuple[int, ...] | None = None, float32: bool = False
) -> Tensor:
    """A tensor that is a parameter of its own, in the shape `to` if given."""
    return Tensor(name, shape, (Place(path, to or shape),), float32)


def stacked(names: Sequence[str], path: Path, shape: tuple[int, ...], to: tuple[int, ...]) -> list[Tensor]:
    """Tensors of one shape, put one after the other along the first axis of one parameter."""
    total = (len(names) * to[0], *to[1:])

    def place(i: int) -> Place:
        return Place(path, total, (i * to[0],) + (0,) * (len(to) - 1), lambda x: x.reshape(to))

    return [Tensor(name, shape, (place(i),)) for i, name in enumerate(names)]


def gated(name: str, path: Path, gate_up: str, down: str, hidden: int, size: int) -> list[Tensor]:
    """A gated MLP: gate_proj, up_proj and down_proj under `name`."""
    names = [f"{name}.gate_proj.weight", f"{name}.up_proj.weight"]
    return [
        *stacked(names, (*path, gate_up), (size, hidden), (size, hidden)),
        whole(f"{name}.down_proj.weight", (*path, down), (hidden, size)),
    ]


def ends(config: ModelConfig, prefix: str = "model") -> list[Tensor]:
    """Embedding, final norm and (unless tied) language model head."""
    hidden = config.hidden_size
    out = [
        whole(f"{prefix}.embed_tokens.weight", ("embed",), (config.vocab_size, hidden)),
        whole(f"{prefix}.norm.weight", ("final_norm",), (hidden,)),
    ]
    if not config.tie_word_embeddings:
        out.append(whole("lm_head.weight", ("lm_head",), (config.vocab_size, hidden)))
    return out


def or_on_its_own(tensor: Tensor, prefix: str) -> Tensor:
    """A tensor of a multimodal model's text part: the text model alone is saved with "model" for the prefix."""
    split = tuple(or_on_its_own(part, prefix) for part in tensor.split)
    if not tensor.name.startswith(prefix):
        return replace(tensor, split=split)
    return replace(tensor, alias=tensor.name.replace(prefix, "model", 1), split=split)


def norms(config: ModelConfig, name: str, path: Path) -> list[Tensor]:
    """The two norms of a layer called `name`."""
    hidden = (config.hidden_size,)
    return [
        whole(f"{name}.input_layernorm.weight", (*path, "mixer_norm"), hidden),
        whole(f"{name}.post_attention_layernorm.weight", (*path, "mlp_norm"), hidden),
    ]


def mla(config: ModelConfig, name: str, path: Path) -> list[Tensor]:
    """Latent attention; the up-projection of the latent is kept as its key and value halves, by head."""
    mla, hidden = config.mla, config.hidden_size
    assert mla is not None
    rank, q_width = mla.kv_lora_rank, mla.num_heads * mla.qk_head_dim
    if mla.q_lora_rank is None:
        query = [whole(f"{name}.q_proj.weight", (*path, "q_proj"), (q_width, hidden))]
    else:
        query = [
            whole(f"{name}.q_a_proj.weight", (*path, "q_a_proj"), (mla.q_lora_rank, hidden)),
            whole(f"{name}.q_a_layernorm.weight", (*path, "q_a_norm"), (mla.q_lora_rank,)),
            whole(f"{name}.q_b_proj.weight", (*path, "q_b_proj"), (q_width, mla.q_lora_rank)),
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
        whole(
            f"{name}.kv_a_proj_with_mqa.weight", (*path, "kv_a_proj"), (rank + mla.qk_rope_head_dim, hidden)
        ),
        whole(f"{name}.kv_a_layernorm.weight", (*path, "kv_a_norm"), (rank,)),
        kv_b,
        whole(f"{name}.o_proj.weight", (*path, "o_proj"), (hidden, mla.num_heads * mla.v_head_dim)),
    ]


def gqa(config: GQAConfig, hidden: int, name: str, path: Path, *, bias: bool = False) -> list[Tensor]:
    """Projections of grouped-query attention, each with a bias or none with one."""
    v_width = config.v_head_dim or config.head_dim
    widths = {
        "q": config.num_heads * config.head_dim,
        "k": config.num_kv_heads * config.head_dim,
        "v": config.num_kv_heads * v_width,
    }
    shapes = {x: (width, hidden) for x, width in widths.items()}
    shapes["o"] = (hidden, config.num_heads * v_width)
    out = [whole(f"{name}.{x}_proj.weight", (*path, f"{x}_proj"), shape) for x, shape in shapes.items()]
    if bias:
        out += [
            whole(f"{name}.{x}_proj.bias", (*path, f"{x}_bias"), shape[:1]) for x, shape in shapes.items()
        ]
    return out


def experts(
    config: ModelConfig,
    name: str,
    path: Path,
    names: tuple[str, str, str],
    bias: bool,
    shared_name: str = "shared_experts",
) -> list[Tensor]:
    """Router, routed and shared experts. names: what a routed expert calls its gate, up and down projection."""
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    count, size = moe.num_experts, moe.intermediate_size
    gate_up, down = (*path, "experts_gate_up"), (*path, "experts_down")

    def part(
        expert: int, which: str, shape: tuple[int, int], path: Path, total: tuple[int, int], row: int
    ) -> Tensor:
        place = Place(path, (count, *total), (expert, row, 0))
        return Tensor(f"{name}.experts.{expert}.{which}.weight", shape, (place,))

    out = [whole(f"{name}.gate.weight", (*path, "router"), (count, hidden), float32=True)]
    if bias:
        out.append(
            whole(f"{name}.gate.e_score_correction_bias", (*path, "router_bias"), (count,), float32=True)
        )
    for e in range(count):
        out += [
            part(e, names[0], (size, hidden), gate_up, (2 * size, hidden), 0),
            part(e, names[1], (size, hidden), gate_up, (2 * size, hidden), size),
            part(e, names[2], (hidden, size), down, (hidden, size), 0),
        ]
    if moe.num_shared_experts:
        shared = moe.num_shared_experts * size
        out += gated(f"{name}.{shared_name}", path, "shared_gate_up", "shared_down", hidden, shared)
    return out
