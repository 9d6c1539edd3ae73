"""Rotary embedding: frequencies against transformers', rotation against complex numbers, refused configurations."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from ukv_jax.models.config import ConfigReader
from ukv_jax.models.rope import (
    LinearScaling,
    RopeConfig,
    YarnScaling,
    apply_rope,
    inverse_frequencies,
    read_rope,
    read_ropes,
    yarn_mscale,
)

with np.load(Path(__file__).parent / "golden" / "rope.npz") as file:
    GOLDEN = {name: file[name] for name in file.files}
CASES = sorted(name.removeprefix("config_") for name in GOLDEN if name.startswith("config_"))


YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 4096}


def read(fields, head_dim=64, **options):
    reader = ConfigReader(fields, "config.json")
    rope = read_rope(reader, head_dim, **options)
    reader.inert(("head_dim", "max_position_embeddings"))
    reader.finish()
    return rope


@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_those_of_transformers(name):
    fields = json.loads(str(GOLDEN[f"config_{name}"]))
    rope = read(fields, fields["head_dim"])
    np.testing.assert_allclose(inverse_frequencies(rope), GOLDEN[f"inv_freq_{name}"], rtol=5e-7)
    amplitude = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    assert amplitude == pytest.approx(float(GOLDEN[f"amplitude_{name}"]), rel=1e-12)


def test_fields_at_the_top_mean_the_same():
    """rope_theta and rope_scaling as published before transformers 5."""
    scaling = {
        "type": "yarn",
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    scaling["original_max_position_embeddings"] = 4096
    old = read({"rope_theta": 50000, "rope_scaling": scaling}, interleaved=True)
    new = read({"rope_parameters": {**scaling, "rope_theta": 50000}}, interleaved=True)
    assert old == new
    assert old.softmax_factor == yarn_mscale(40, 1.0) ** 2 == pytest.approx(1.8738542070926265)
    assert read({"rope_theta": 50000}) == RopeConfig(64, 50000.0)


def test_parameters_by_kind_of_layer():
    fields = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    kinds = {"full_attention": 64, "sliding_attention": 32}
    ropes = read_ropes(ConfigReader(fields, "config.json"), kinds)
    assert ropes["full_attention"] == RopeConfig(64, 1e6, scaling=LinearScaling(8.0))
    assert ropes["sliding_attention"] == RopeConfig(32, 1e4)
    one = {"rope_parameters": {"rope_theta": 1e4}}
    assert read_ropes(ConfigReader(one, "config.json"), kinds)["full_attention"] == RopeConfig(64, 1e4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {},
            "config.json: rope_parameters must be given, one for all of ['full', 'sliding'] or one for each",
        ),
        (
            {"rope_parameters": {"full": {"rope_theta": 1e4}, "sliding": {"rope_theta": 1e4}, "factor": 8}},
            "rope_parameters: fields that are not implemented: {'factor': 8}",
        ),
        (
            {"rope_parameters": {"full": {"rope_theta": 1e4}}},
            "rope_parameters: entries wanted for each of ['full', 'sliding'], found ['full']",
        ),
    ],
)
def test_refused_parameters_by_kind_of_layer(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_ropes(ConfigReader(fields, "config.json"), {"full": 64, "sliding": 32})


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads", [(), (3,)])
def test_rotation(interleaved, heads):
    """Each pair is a complex number, turned by position * frequency; what lies behind `dim` passes."""
    rng = np.random.default_rng(0)
    rope = RopeConfig(8, 100.0, interleaved)
    x = rng.normal(size=(2, 5, *heads, 12)).astype(np.float32)
    positions = rng.integers(0, 1000, (2, 5)).astype(np.int32)
    pairs = (slice(0, 8, 2), slice(1, 8, 2)) if interleaved else (slice(0, 4), slice(4, 8))
    angle = positions.reshape(2, 5, *(1 for _ in heads), 1) * 100.0 ** -(np.arange(4) / 4)
    turned = (x[..., pairs[0]] + 1j * x[..., pairs[1]]) * np.exp(1j * angle)
    expected = x.copy()
    expected[..., pairs[0]], expected[..., pairs[1]] = turned.real, turned.imag
    found = apply_rope(rope, jnp.asarray(x), jnp.asarray(positions))
    np.testing.assert_allclose(found, expected, atol=2e-4)
    np.testing.assert_array_equal(found[..., 8:], x[..., 8:])


def test_attention_factor_and_dtype():
    plain = RopeConfig(8)
    scaled = RopeConfig(8, scaling=YarnScaling(1.0, 4096, attention_factor=1.5))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 3, 8)), jnp.bfloat16)
    positions = jnp.arange(3, dtype=jnp.int32)[None]
    assert apply_rope(plain, x, positions).dtype == jnp.bfloat16
    x = x.astype(jnp.float32)
    np.testing.assert_allclose(
        apply_rope(scaled, x, positions), 1.5 * apply_rope(plain, x, positions), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling: rope_type 'longrope' is not implemented"),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a number above 0, found None"),
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [11, 11, 10]}},
            "rope_parameters: fields that are not implemented: {'mrope_section': [11, 11, 10]}",
        ),
        ({"rope_scaling": "yarn"}, "rope_parameters or rope_scaling must be an object, found 'yarn'"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4}},
            "original_max_position_embeddings must be an integer",
        ),
        ({"partial_rotary_factor": 0.01}, "wants an even number of dimensions above 0, found 0"),
        ({"rope_theta": None}, "rope_theta must be a number above 0, found None"),
        ({"rope_theta": [1]}, "rope_theta must be a number above 0, found [1]"),
        (
            {"rope_parameters": {"rope_theta": 1e6}},
            "rope_parameters: rope_theta 1000000.0 contradicts 10000.0",
        ),
        ({"rope_scaling": {"type": "default", "warmup": 0}}, "not implemented: {'warmup': 0}"),
        ({"rope_scaling": YARN | {"mscale": "abc"}}, "mscale must be a number, found 'abc'"),
        ({"rope_scaling": YARN | {"mscale": -1}}, "mscale -1.0 and mscale_all_dim 0.0 must not be negative"),
        ({"rope_scaling": YARN | {"beta_fast": [1]}}, "beta_fast must be a number above 0, found [1]"),
        ({"rope_scaling": YARN | {"truncate": 0}}, "truncate must be true or false, found 0"),
    ],
)
def test_refused_parameters(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read({"rope_theta": 1e4, **fields})


def test_inert_fields_and_narrow_heads():
    fields = {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [11, 11, 10]}}
    assert read(fields, inert=("mrope_section",)) == RopeConfig(64)
    with pytest.raises(ValueError, match="of 64 dimensions, but heads have 32"):
        apply_rope(RopeConfig(64), jnp.zeros((1, 1, 32)), jnp.zeros((1, 1), jnp.int32))
