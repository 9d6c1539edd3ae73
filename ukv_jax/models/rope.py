"""Rotary position embedding: one rotation for every family.

    rope = read_rope(reader, head_dim)          # from config.json; names every field that is not implemented
    q = apply_rope(rope, q, cache.positions)    # q [rows, tokens, heads, head_dim]
    k = apply_rope(rope, k, cache.positions)    # k [rows, tokens, kv_heads, head_dim] or [rows, tokens, head_dim]

The first `rope.dim` dimensions of each head turn, the others pass. Pair i turns by position * frequency i; it consists
of dimensions i and i + dim / 2 (half-split, as most checkpoints are stored) or 2i and 2i + 1 (interleaved, as
DeepSeek's are). Every layer of a step asks for the same angles; inside jit XLA computes them once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from ukv_jax.models.config import ConfigReader


@dataclass(frozen=True)
class LinearScaling:
    """Every frequency divided by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True)
class YarnScaling:
    """Fast dimensions keep their frequency, slow ones are divided by `factor` (YaRN, arXiv 2309.00071, section 3.2).

    beta_fast and beta_slow: rotations over original_max_position positions at which the ramp between both begins and
    ends. truncate: the ramp's ends are rounded outward to whole dimensions. attention_factor multiplies the rotated
    vectors. softmax_factor multiplies the softmax scale (DeepSeek only, see `yarn_mscale`; 1 elsewhere).
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    softmax_factor: float = 1.0


@dataclass(frozen=True)
class Llama3Scaling:
    """Wavelengths over original_max_position / low_freq_factor are stretched by `factor`, those under
    original_max_position / high_freq_factor are kept, with a smooth passage between (Llama 3.1)."""

    factor: float
    original_max_position: int
    low_freq_factor: float
    high_freq_factor: float


@dataclass(frozen=True)
class ProportionalScaling:
    """The first `pairs` pairs turn at the frequencies they would have if all did, divided by `factor`; the others do not
    turn (gemma-4's full attention)."""

    pairs: int
    factor: float = 1.0


KINDS = ("default", "linear", "yarn", "llama3", "proportional")  # what rope_type may be
Scaling = LinearScaling | YarnScaling | Llama3Scaling | ProportionalScaling


@dataclass(frozen=True)
class RopeConfig:
    """dim: dimensions of a head that turn; an even number."""

    dim: int
    theta: float = 10_000.0
    interleaved: bool = False
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        if self.dim <= 0 or self.dim % 2:
            raise ValueError(f"rotary embedding wants an even number of dimensions above 0, found {self.dim}")

    @property
    def softmax_factor(self) -> float:
        """What DeepSeek multiplies the softmax scale by; 1 without YaRN."""
        return self.scaling.softmax_factor if isinstance(self.scaling, YarnScaling) else 1.0


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Attention temperature for a context `factor` times as long: 0.1 mscale ln(factor) + 1 (arXiv 2309.00071,
    section 3.3). DeepSeek multiplies the softmax scale by its square, with mscale_all_dim for mscale."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(rope: RopeConfig) -> Float32[np.ndarray, " half_dim"]:
    """Radians a position, for each pair of dimensions, in float32 as the reference implementations have them."""
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    plain = np.float32(1) / np.float32(rope.theta) ** exponents
    match rope.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / np.float32(factor)
        case ProportionalScaling(pairs, factor):
            return np.where(np.arange(rope.dim // 2) < pairs, plain / np.float32(factor), np.float32(0))
        case YarnScaling():
            keep = _yarn_kept_share(rope, rope.scaling)
            return plain / np.float32(rope.scaling.factor) * (1 - keep) + plain * keep
        case Llama3Scaling(factor, length, low, high):
            rotations = length * plain / np.float32(2 * math.pi)
            keep = np.clip((rotations - low) / (high - low), 0, 1).astype(np.float32)
            return plain / np.float32(factor) * (1 - keep) + plain * keep


def _yarn_kept_share(rope: RopeConfig, yarn: YarnScaling) -> Float32[np.ndarray, " half_dim"]:
    """1 where a pair keeps its frequency, 0 where it is divided by the factor."""

    def pair_with(rotations: float) -> float:
        """The (fractional) pair that turns so many times over the original context."""
        wavelength = yarn.original_max_position / (rotations * 2 * math.pi)
        return rope.dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_with(yarn.beta_fast), pair_with(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(rope.dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    return 1 - np.clip(ramp, 0, 1)


def apply_rope(
    rope: RopeConfig, x: Float[Array, "rows tokens *heads head_dim"], positions: Int32[Array, "rows tokens"]
) -> Float[Array, "rows tokens *heads head_dim"]:
    """x with the first rope.dim dimensions of each head turned to its position; float32 inside, the dtype of x out.

    The layout of pairs stays as it is. Raises ValueError if a head has fewer than rope.dim dimensions.
    """
    if x.shape[-1] < rope.dim:
        raise ValueError(f"rotary embedding of {rope.dim} dimensions, but heads have {x.shape[-1]}")
    angles = positions.astype(jnp.float32)[..., None] * inverse_frequencies(rope)
    angles = angles.reshape(*positions.shape, *(1,) * (x.ndim - 3), rope.dim // 2)
    amplitude = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    cos, sin = jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude
    turned = x[..., : rope.dim].astype(jnp.float32)
    if rope.interleaved:
        pairs = turned.reshape(*x.shape[:-1], rope.dim // 2, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turned.shape)
    else:
        a, b = jnp.split(turned, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., rope.dim :]], axis=-1)


def read_rope(
    reader: ConfigReader,
    head_dim: int,
    *,
    interleaved: bool = False,
    default_partial: float = 1.0,
    inert: Iterable[str] = (),
) -> RopeConfig:
    """Reads rope_theta, partial_rotary_factor and rope_scaling, or rope_parameters, which transformers 5 nests them in.

    inert: fields of rope_parameters that change nothing for the inputs at hand (mrope_section for text). Reads
    max_position_embeddings for scalings that name no original length. Raises ValueError for scalings and fields that are
    not implemented.
    """
    section = reader.section("rope_parameters", "rope_scaling")
    section.inert(inert)
    return _read(reader, section, head_dim, interleaved, default_partial)


def read_ropes(reader: ConfigReader, head_dims: Mapping[str, int]) -> dict[str, RopeConfig]:
    """The rotation of each kind of layer, by the kinds of `head_dims`: rope_parameters has an entry for each of them, or
    holds one for all. Raises ValueError as `read_rope`, and where it is absent: there is no common default."""
    if reader.get("rope_parameters", "rope_scaling") is None:
        raise reader.fail(
            f"rope_parameters must be given, one for all of {sorted(head_dims)} or one for each"
        )
    section = reader.section("rope_parameters", "rope_scaling")
    given = [kind for kind in head_dims if section.get(kind) is not None]
    if not given:
        return {kind: _read(reader, section, dim) for kind, dim in head_dims.items()}
    if len(given) < len(head_dims):
        raise section.fail(f"entries wanted for each of {sorted(head_dims)}, found {given}")
    section.finish()
    return {kind: _read(reader, section.section(kind), dim) for kind, dim in head_dims.items()}


def _read(
    reader: ConfigReader,
    section: ConfigReader,
    head_dim: int,
    interleaved: bool = False,
    default_partial: float = 1.0,
) -> RopeConfig:
    """Reads one rotation from its section, and what it does not have from the top."""
    kind = section.get("rope_type", "type", default="default")
    if kind not in KINDS:
        raise section.fail(f"rope_type {kind!r} is not implemented; implemented: {', '.join(KINDS)}")
    theta = _number(reader, section, "rope_theta")
    partial = _number(reader, section, "partial_rotary_factor", default_partial)
    if kind == "proportional":
        factor = section.number("factor", default=1.0)
        section.finish()
        pairs = int(partial * head_dim // 2)
        return RopeConfig(head_dim, theta, interleaved, ProportionalScaling(pairs, factor))
    scaling = _read_scaling(reader, section, kind)
    section.finish()
    dim = int(head_dim * partial)
    if dim <= 0 or dim % 2:
        raise section.fail(f"rotary embedding wants an even number of dimensions above 0, found {dim}")
    return RopeConfig(dim, theta, interleaved, scaling)


def _number(reader: ConfigReader, section: ConfigReader, name: str, default: float | None = None) -> float:
    """A number of the section or of the top, where both have it the same one; required without a default."""
    inner, outer = section.get(name), reader.get(name)
    if inner is not None and outer is not None and inner != outer:
        raise section.fail(f"{name} {inner!r} contradicts {outer!r} outside")
    return (reader if inner is None else section).number(name, default=default)


def _read_scaling(
    reader: ConfigReader, section: ConfigReader, kind: str
) -> LinearScaling | YarnScaling | Llama3Scaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(section.number("factor"))
    longest = reader.get("max_position_embeddings")
    original = section.positive(
        "original_max_position_embeddings",
        default=reader.get("original_max_position_embeddings", default=longest),
    )
    if kind == "llama3":
        low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
        if low >= high:
            raise section.fail(f"low_freq_factor {low} must be below high_freq_factor {high}")
        return Llama3Scaling(section.number("factor"), original, low, high)
    stretch = None if longest is None else reader.positive("max_position_embeddings") / original
    factor = section.number("factor", default=stretch)
    mscale, all_dim = (section.real(name, default=0) for name in ("mscale", "mscale_all_dim"))
    if min(mscale, all_dim) < 0:
        raise section.fail(f"mscale {mscale} and mscale_all_dim {all_dim} must not be negative")
    both = mscale and all_dim
    attention = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim) if both else yarn_mscale(factor)
    return YarnScaling(
        factor,
        original,
        section.number("beta_fast", default=32),
        section.number("beta_slow", default=1),
        section.flag("truncate", default=True),
        section.number("attention_factor", default=attention),
        yarn_mscale(factor, all_dim) ** 2 if all_dim else 1.0,
    )
