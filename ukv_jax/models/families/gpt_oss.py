"""gpt-oss: sliding-window and full attention in turn, with sinks; experts with biases in every layer.

Field and tensor names are those of openai/gpt-oss-20b and -120b, whose experts are stored as MXFP4 blocks and scales;
transformers (5.24, models/gpt_oss) saves them in the dtype it computes in.
"""

from __future__ import annotations

from dataclasses import replace

from ukv_jax.models.config import ConfigReader, GQAConfig, ModelConfig, MoEConfig, read_dtype
from ukv_jax.models.families.common import (
    Path,
    check_groups,
    check_heads,
    ends,
    gqa,
    layer_kinds,
    norms,
    whole,
)
from ukv_jax.models.families.family import Family
from ukv_jax.models.quantization import check_mxfp4, mxfp4
from ukv_jax.models.rope import read_rope
from ukv_jax.models.weights import Place, Tensor

MIXER_OF_LAYER_TYPE = {"sliding_attention": "swa", "full_attention": "gqa"}


def read_config(reader: ConfigReader) -> ModelConfig:
    """Maps config.json; raises ValueError for what the layer kinds here don't compute."""
    layers = reader.positive("num_hidden_layers")
    head_dim = reader.positive("head_dim")
    if reader.get("rope_parameters", "rope_scaling") is None:
        # Its own configuration class would take YaRN, and plain rotation is no guess of ours.
        raise reader.fail('rope_scaling or rope_parameters must be given ({"rope_type": "default"} for none)')
    full = check_heads(
        reader,
        GQAConfig(
            num_heads=reader.positive("num_attention_heads"),
            num_kv_heads=reader.positive("num_key_value_heads"),
            head_dim=head_dim,
            rope=read_rope(reader, head_dim),
        ),
    )
    in_turn = [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
    types = reader.list_of(str, "layer_types", default=in_turn)
    mixers = layer_kinds(reader, "layer_types", types, MIXER_OF_LAYER_TYPE, layers)
    if "gqa" not in mixers:
        raise reader.fail("layer_types without full_attention are not implemented: a pool has full attention")
    reader.only("attention_bias", True)
    reader.only("hidden_act", "silu")
    check_mxfp4(reader)
    # The length that YaRN starts from is rope_scaling's original_max_position_embeddings; this repeats it.
    reader.inert(("initial_context_length",))
    size = reader.positive("intermediate_size")
    moe = MoEConfig(
        num_experts=reader.positive("num_local_experts", "num_experts"),
        experts_per_token=reader.positive("num_experts_per_tok", "experts_per_token"),
        intermediate_size=size,
        num_shared_experts=0,
        # A softmax over the chosen experts' logits is the softmax over all of them, renormalised.
        renormalize=True,
        scaling_factor=1.0,
        score_function="softmax",
        clamp=(
            reader.number("swiglu_alpha", default=1.702),
            reader.number("swiglu_limit", default=7.0),
        ),
    )
    return ModelConfig(
        family="gpt_oss",
        vocab_size=reader.positive("vocab_size"),
        hidden_size=reader.positive("hidden_size"),
        intermediate_size=size,
        rms_norm_eps=reader.number("rms_norm_eps", default=1e-5),
        mixers=mixers,
        mlps=("moe",) * layers,
        dtype=read_dtype(reader),
        max_position=reader.positive("max_position_embeddings"),
        eos_token_ids=reader.token_ids("eos_token_id"),
        bos_token_id=reader.token_id("bos_token_id"),
        pad_token_id=reader.token_id("pad_token_id"),
        tie_word_embeddings=reader.flag("tie_word_embeddings", default=False),
        gqa=full,
        swa=replace(full, window=reader.positive("sliding_window")),
        moe=check_groups(reader, moe),
    )


def tensors(config: ModelConfig) -> list[Tensor]:
    """Every tensor of the published checkpoint and where it goes in the decoder's parameters."""
    out = ends(config)
    for i, mixer in enumerate(config.mixers):
        name, path = f"model.layers.{i}", ("layers", i)
        attention = config.gqa if mixer == "gqa" else config.swa
        assert attention is not None
        out += norms(config, name, path)
        out += gqa(attention, config.hidden_size, f"{name}.self_attn", (*path, "mixer"), bias=True)
        sinks = (attention.num_heads,)
        out.append(whole(f"{name}.self_attn.sinks", (*path, "mixer", "sinks"), sinks, float32=True))
        out += _experts(config, f"{name}.mlp", (*path, "mlp"))
    return out


def _experts(config: ModelConfig, name: str, path: Path) -> list[Tensor]:
    """Router and experts. Gate and up of an expert are interleaved in the files and one after the other in memory."""
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    count, size = moe.num_experts, moe.intermediate_size
    experts = f"{name}.experts"

    def halves(parameter: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[Place, ...]:
        """Even columns (gate), then odd ones (up), with axes reordered so that theirs is the second."""
        rest = (0,) * (len(shape) - 2)

        def half(odd: int) -> Place:
            start = (0, odd * size, *rest)
            return Place((*path, parameter), shape, start, lambda x: x[..., odd::2].transpose(axes))

        return half(0), half(1)

    return [
        whole(f"{name}.router.weight", (*path, "router"), (count, hidden), float32=True),
        whole(f"{name}.router.bias", (*path, "router_logit_bias"), (count,), float32=True),
        mxfp4(
            Tensor(
                f"{experts}.gate_up_proj",
                (count, hidden, 2 * size),
                halves("experts_gate_up", (count, 2 * size, hidden), (0, 2, 1)),
            )
        ),
        Tensor(
            f"{experts}.gate_up_proj_bias",
            (count, 2 * size),
            halves("experts_gate_up_bias", (count, 2 * size), (0, 1)),
        ),
        mxfp4(
            Tensor(
                f"{experts}.down_proj",
                (count, size, hidden),
                (Place((*path, "experts_down"), (count, hidden, size), view=lambda x: x.transpose(0, 2, 1)),),
            )
        ),
        whole(f"{experts}.down_proj_bias", (*path, "experts_down_bias"), (count, hidden)),
    ]


FAMILY = Family(read_config=read_config, tensors=tensors)
