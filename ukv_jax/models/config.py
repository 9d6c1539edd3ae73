"""Model configuration: what the decoder needs to know, read from a Hugging Face config.json.

A family (`ukv_jax.models.families`) maps its own config fields onto `ModelConfig`. Everything here is static and
hashable, so that a configuration can be closed over by, or be a static argument of, a jitted function.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from ukv_jax.models.rope import RopeConfig

T = TypeVar("T", str, int)
_PLURALS = {str: "strings", int: "integers"}


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). Without `rope` the qk_rope_head_dim
    part of queries and keys is a plain one."""

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    latent_norm_eps: float = 1e-6
    rope: RopeConfig | None = None

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def sm_scale(self) -> float:
        return self.qk_head_dim**-0.5 * (self.rope.softmax_factor if self.rope else 1.0)


@dataclass(frozen=True)
class GQAConfig:
    """Grouped-query attention; num_kv_heads divides num_heads.

    sm_scale: what scores are multiplied by (default 1 / sqrt(head_dim)). window: positions that a query sees, its own
    included (None: all). logit_cap: scores become logit_cap * tanh(scores / logit_cap). v_norm: values are normalised,
    without a weight. k_is_v: keys before their norm and rotation are the values. relative: width and extent of the
    relative-position bias (None: there is none). log_scaling: floor n and gain a; scores of a query at position p and
    their bias grow by 1 + a * log((p + 1) / n) where p + 1 > n (None: not at all).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    rope: RopeConfig | None = None
    sm_scale: float | None = None
    window: int | None = None
    logit_cap: float | None = None
    v_norm: bool = False
    k_is_v: bool = False
    relative: tuple[int, int] | None = None
    log_scaling: tuple[int, float] | None = None

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.sm_scale is None else self.sm_scale


@dataclass(frozen=True)
class KDAConfig:
    """Kimi delta attention (arXiv 2510.26692): keys and values are equally wide in every head."""

    num_heads: int
    head_dim: int
    conv_kernel: int

    @property
    def channels(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class GDNConfig:
    """Gated delta net (arXiv 2412.06464): num_k_heads divides num_v_heads. state_dtype: what the recurrent state is kept
    in; a step computes in float32 all the same."""

    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    conv_kernel: int
    state_dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def conv_channels(self) -> int:
        return 2 * self.num_k_heads * self.k_head_dim + self.num_v_heads * self.v_head_dim


@dataclass(frozen=True)
class Mamba2Config:
    """Mamba-2 (arXiv 2405.21060). norm_before_gate says where a norm of the output stands (None: there is none).
    in_multiplier scales the layer's input, `multipliers` the projected gate, x, B, C and step size."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int
    conv_bias: bool = True
    norm_before_gate: bool | None = None
    in_multiplier: float = 1.0
    multipliers: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @property
    def channels(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        return self.channels + 2 * self.num_groups * self.state_size


@dataclass(frozen=True)
class MoEConfig:
    """Routed experts, optional expert groups, and shared experts.

    group_rank: what a group of experts is ranked by, the sum of its two best scores or its best score. clamp: gain and
    limit of gpt-oss's gated activation (`layers.clamped_product`); None is activation(gate) * up. shared_sink: the router
    scores the shared experts too, and their scores join the sum that the chosen ones' are divided by.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    num_shared_experts: int
    renormalize: bool
    scaling_factor: float
    num_groups: int = 1
    groups_per_token: int = 1
    score_function: Literal["sigmoid", "softmax"] = "sigmoid"
    group_rank: Literal["top2", "max"] = "top2"
    clamp: tuple[float, float] | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    shared_sink: bool = False

    @property
    def router_outputs(self) -> int:
        """Experts that the router scores."""
        return self.num_experts + (self.num_shared_experts if self.shared_sink else 0)


@dataclass(frozen=True)
class Multipliers:
    """Constants that activations are scaled by: embeddings, logits, the gate and the result of a dense MLP, the input and
    the result of attention beside a Mamba-2 layer, and that layer's result."""

    embedding: float = 1.0
    logits: float = 1.0
    mlp_gate: float = 1.0
    mlp_out: float = 1.0
    attention_in: float = 1.0
    attention_out: float = 1.0
    mamba_out: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """One decoder. `mixers[i]` and `mlps[i]` name the layer kinds of layer i (keys of decoder.MIXERS and MLPS)."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    mixers: tuple[str, ...]
    mlps: tuple[str, ...]
    dtype: str
    max_position: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False
    mla: MLAConfig | None = None
    gqa: GQAConfig | None = None
    swa: GQAConfig | None = None  # of sliding-window layers
    kda: KDAConfig | None = None
    gdn: GDNConfig | None = None
    mamba2: Mamba2Config | None = None
    moe: MoEConfig | None = None
    multipliers: Multipliers = Multipliers()
    activation: Literal["silu", "gelu_tanh"] = "silu"  # of dense MLPs
    final_logit_cap: float | None = None  # logits become cap * tanh(logits / cap)
    # The last layers that have no keys and values of their own: each reads those of the last earlier layer of its kind.
    # Their dense MLPs are shared_mlp_factor times as wide.
    kv_shared_layers: int = 0
    shared_mlp_factor: int = 1
    # Width of what each layer gets of a token besides the hidden state, and rows of the table it comes from (0: none).
    per_layer_width: int = 0
    per_layer_vocab: int = 0
    # Taps of the short convolutions over keys, over values and over the result of each sublayer (0: there are none).
    residual_conv_kernel: int = 0
    # Rows of the language model head that count (None: all); the others only pad the vocabulary.
    logits_width: int | None = None
    # Layers for multi-token prediction that the checkpoint holds after these; not loaded.
    mtp_layers: int = 0
    # Rows and columns that share a scale where the checkpoint's weights are fp8.
    fp8_block: tuple[int, int] | None = None

    @property
    def num_layers(self) -> int:
        return len(self.mixers)

    def cache_layer(self, layer: int) -> int:
        """Index of `layer` among the layers of its own mixer kind: the layer index that a cache is asked with."""
        kind = self.mixers[layer]
        return min(self.mixers[:layer].count(kind), self.cache_layers(kind) - 1)

    def cache_layers(self, kind: str) -> int:
        """Layers of a mixer kind that have something of their own in the cache."""
        return self.mixers[: self.num_layers - self.kv_shared_layers].count(kind)


class ConfigReader:
    """Reads fields of a config.json and remembers which: what nobody asked for is an error, never ignored."""

    def __init__(self, raw: Mapping[str, Any], where: str):
        self._raw = raw
        self._where = where
        self._seen: set[str] = {"model_type"}

    def fail(self, text: str) -> ValueError:
        return ValueError(f"{self._where}: {text}")

    def get(self, *names: str, default: Any = None) -> Any:
        """Value under the first of `names` that is present and not null (aliases that disagree are an error)."""
        self._seen.update(names)
        found = {name: self._raw[name] for name in names if self._raw.get(name) is not None}
        if len({json.dumps(value, sort_keys=True) for value in found.values()}) > 1:
            raise self.fail(f"fields that mean the same disagree: {found}")
        return next(iter(found.values()), default)

    def positive(self, *names: str, default: int | None = None) -> int:
        """An integer above zero; required without a default."""
        return self._integer(names, 1, "above 0", default)

    def natural(self, *names: str, default: int | None = None) -> int:
        """An integer of 0 or more; required without a default."""
        return self._integer(names, 0, "of 0 or more", default)

    def _integer(self, names: tuple[str, ...], least: int, words: str, default: int | None) -> int:
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.fail(f"{' or '.join(names)} must be an integer {words}, found {value!r}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """A finite number above zero; required without a default."""
        value = self.get(*names, default=default)
        if not is_number(value) or value <= 0:
            raise self.fail(f"{' or '.join(names)} must be a number above 0, found {value!r}")
        return float(value)

    def real(self, name: str, default: float) -> float:
        """A finite number of any sign."""
        value = self.get(name, default=default)
        if not is_number(value):
            raise self.fail(f"{name} must be a number, found {value!r}")
        return float(value)

    def flag(self, *names: str, default: bool) -> bool:
        value = self.get(*names, default=default)
        if not isinstance(value, bool):
            raise self.fail(f"{' or '.join(names)} must be true or false, found {value!r}")
        return value

    def list_of(self, kind: type[T], name: str, default: list[T]) -> list[T]:
        """A list of strings or of integers."""
        value = self.get(name, default=default)
        if not isinstance(value, list) or any(type(item) is not kind for item in value):
            raise self.fail(f"{name} must be a list of {_PLURALS[kind]}, found {value!r}")
        return value

    def maybe_list_of(self, kind: type[T], name: str) -> list[T] | None:
        """`list_of`, or None where the field is absent or null."""
        return None if self.get(name) is None else self.list_of(kind, name, [])

    def token_id(self, name: str) -> int | None:
        """An integer, absent or null."""
        value = self.get(name)
        if value is not None and type(value) is not int:
            raise self.fail(f"{name} must be an integer, found {value!r}")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """An integer, a list of them, absent or null."""
        value = self.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(i) is not int for i in ids):
            raise self.fail(f"{name} must be an integer or a list of integers, found {value!r}")
        return tuple(ids)

    def section(self, *names: str) -> ConfigReader:
        """Reader of a nested object (empty if none of the names is present); its `finish` is the caller's to call."""
        value = self.get(*names, default={})
        if not isinstance(value, dict):
            raise self.fail(f"{' or '.join(names)} must be an object, found {value!r}")
        name = next((name for name in names if self._raw.get(name) is not None), names[0])
        return ConfigReader(value, f"{self._where}: {name}")

    def only(self, name: str, *allowed: Any) -> None:
        """Accepts an absent or null field, or one of the values that the implementation stands for."""
        value = self.get(name)
        if value is not None and not any(
            value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed
        ):
            raise self.fail(f"{name} = {value!r} is not implemented; implemented: {list(allowed) or 'unset'}")

    def inert(self, names: Iterable[str]) -> None:
        """Fields that do not change what the model computes at inference."""
        self._seen.update(names)

    def finish(self) -> None:
        """Names every field that was set and that nobody read; null is unset."""
        left = {
            k: v
            for k, v in self._raw.items()
            if k not in self._seen and v is not None and not (k in OFF_WHEN_FALSE and v in (False, 0))
        }
        if left:
            raise self.fail(f"fields that are not implemented: {left}")


# Bookkeeping that any Hugging Face config.json may carry.
INERT_FIELDS = (
    "architectures", "auto_map", "transformers_version", "initializer_range", "use_cache", "attention_dropout",
    "output_router_logits", "pretraining_tp", "_name_or_path", "return_dict", "output_hidden_states",
    "output_attentions", "id2label", "label2id", "problem_type", "chunk_size_feed_forward", "is_encoder_decoder",
    "aux_loss_alpha", "seq_aux", "ep_size", "_attn_implementation", "router_aux_loss_coef",
)  # fmt: skip

# Options of that class which ask for nothing where they are false or 0; with any other value they are named.
OFF_WHEN_FALSE = frozenset((
    "is_decoder", "add_cross_attention", "tie_encoder_decoder", "torchscript", "use_bfloat16", "tf_legacy_loss",
    "remove_invalid_values", "do_sample", "early_stopping", "output_scores", "return_dict_in_generate", "min_length",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "diversity_penalty",
))  # fmt: skip


def is_number(value: Any) -> bool:
    """A finite one; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ValueError if it is missing or holds something else."""
    if not path.is_file():
        raise ValueError(
            f"{path.parent}: no {path.name} found; a Hugging Face checkpoint directory is wanted"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON object is wanted, found {type(value).__name__}")
    return value


def load_config(directory: str | Path) -> ModelConfig:
    """Reads `directory`/config.json; the path of the file itself will do.

    Raises ValueError if the file is missing or malformed, if no family implements its model_type, or if a field
    asks for something that is not implemented (each is named).
    """
    from ukv_jax.models.families import FAMILIES

    path = Path(directory)
    path = path if path.is_file() else path / "config.json"
    raw = read_json(path)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"{path}: model_type {model_type!r} is not implemented; families: {sorted(FAMILIES)}"
        )
    reader = ConfigReader(raw, str(path))
    reader.inert(INERT_FIELDS)
    config = FAMILIES[model_type].read_config(reader)
    reader.finish()
    return config


def read_dtype(reader: ConfigReader) -> str:
    """The dtype that the checkpoint's authors compute in."""
    dtype = reader.get("dtype", "torch_dtype", default="bfloat16")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise reader.fail(f"dtype {dtype!r} is not implemented; implemented: bfloat16, float16, float32")
    return dtype
