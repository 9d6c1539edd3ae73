"""Layers with recurrent state: any split of a prompt, padding, resuming from a state, dead rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.dense_cache import make_dense_cache
from ukv_jax.cache import CacheSpec
from ukv_jax.models import gdn, kda, mamba2
from ukv_jax.models.config import GDNConfig, KDAConfig, Mamba2Config

ROWS, TOKENS, HIDDEN = 2, 53, 12


def _kda():
    config = KDAConfig(num_heads=2, head_dim=8, conv_kernel=4)
    shapes = {
        "qkv_proj": (48, HIDDEN), "conv": (48, 4), "A_log": (2,), "dt_bias": (16,), "f_a_proj": (8, HIDDEN),
        "f_b_proj": (16, 8), "b_proj": (2, HIDDEN), "g_a_proj": (8, HIDDEN), "g_b_proj": (16, 8), "o_norm": (8,),
        "o_proj": (HIDDEN, 16),
    }  # fmt: skip
    return kda.attend, config, kda.state_parts(config, 1, "float32"), shapes


def _gdn():
    config = GDNConfig(num_k_heads=2, num_v_heads=4, k_head_dim=8, v_head_dim=6, conv_kernel=4)
    shapes = {
        "qkv_proj": (56, HIDDEN), "conv": (56, 4), "A_log": (4,), "dt_bias": (4,), "ba_proj": (8, HIDDEN),
        "z_proj": (24, HIDDEN), "o_norm": (6,), "o_proj": (HIDDEN, 24),
    }  # fmt: skip
    return gdn.attend, config, gdn.state_parts(config, 1, "float32"), shapes


def _mamba2(norm=None):
    config = Mamba2Config(
        num_heads=4, head_dim=6, state_size=8, num_groups=2, conv_kernel=3, norm_before_gate=norm and norm == "before",
        in_multiplier=0.7, multipliers=(1.1, 0.9, 0.8, 1.2, 0.5),
    )  # fmt: skip
    shapes = {
        "in_proj": (2 * 24 + 32 + 4, HIDDEN), "conv": (56, 3), "conv_bias": (56,), "A_log": (4,), "dt_bias": (4,),
        "D": (4,), "out_proj": (HIDDEN, 24),
    }  # fmt: skip
    if norm:
        shapes["norm"] = (24,)
    return mamba2.attend, config, mamba2.state_parts(config, 1, "float32"), shapes


LAYERS = {
    "kda": _kda,
    "gdn": _gdn,
    "mamba2": _mamba2,
    "mamba2 with a norm before the gate": partial(_mamba2, "before"),
    "mamba2 with a norm after the gate": partial(_mamba2, "after"),
}


class Layer:
    def __init__(self, name):
        function, config, self.parts, shapes = LAYERS[name]()
        rng = np.random.default_rng(0)
        self.params = {n: jnp.asarray(rng.normal(size=s) * 0.5, jnp.float32) for n, s in shapes.items()}

        def attend(params, x, state, new_len):
            cache = make_dense_cache(CacheSpec(None, self.parts), ROWS, 0)
            cache = replace(cache, state={n: s[None] for n, s in state.items()}).begin(x.shape[1], new_len)
            out, cache = function(params, config, 1e-5, 0, x, cache)
            return out, cache.read_state(0)

        self.attend = partial(jax.jit(attend), self.params)

    def zero_state(self):
        return {p.name: jnp.zeros((ROWS, p.blocks_per_layer, *p.block_shape)) for p in self.parts}


@pytest.fixture(scope="module", params=LAYERS)
def layer(request):
    return Layer(request.param)


def random_x(seed=0, tokens=TOKENS):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(ROWS, tokens, HIDDEN)), jnp.float32)


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=1e-5 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("splits", [(1, 52), (16, 37), (2, 1, 3, 47), (20, 20, 13)])
def test_any_split_of_a_prompt_gives_the_same(layer, splits):
    x = random_x()
    expected, final = layer.attend(x, layer.zero_state(), jnp.full(ROWS, TOKENS))
    state, outs, at = layer.zero_state(), [], 0
    for n in splits:
        # One padded width for all parts but single tokens, which take the recurrent form.
        part = x[:, at : at + n] if n == 1 else jnp.pad(x[:, at : at + n], ((0, 0), (0, TOKENS - n), (0, 0)))
        out, state = layer.attend(part, state, jnp.full(ROWS, n))
        outs.append(out[:, :n])
        at += n
    close(jnp.concatenate(outs, 1), expected)
    for name in final:
        close(state[name], final[name])


@pytest.mark.parametrize("garbage", [1e30, np.nan])
def test_padding_reaches_neither_state_nor_valid_outputs(layer, garbage):
    x = random_x(1)
    new_len = jnp.asarray([TOKENS - 9, 2])
    padded = (jnp.arange(TOKENS) >= new_len[:, None])[..., None]
    clean, state = layer.attend(jnp.where(padded, 0, x), layer.zero_state(), new_len)
    dirty, dirty_state = layer.attend(jnp.where(padded, garbage, x), layer.zero_state(), new_len)
    np.testing.assert_array_equal(np.where(padded, 0, clean), np.where(padded, 0, dirty))
    short_out, short_state = layer.attend(x[:, :2], layer.zero_state(), jnp.full(ROWS, 2))
    close(short_out[1], clean[1, :2])
    for name in state:
        np.testing.assert_array_equal(state[name], dirty_state[name])
        close(short_state[name][1], state[name][1])


@pytest.mark.parametrize("tokens", [1, 6])
def test_a_dead_row_keeps_its_state_bit_for_bit(layer, tokens):
    _, state = layer.attend(random_x(2, 6), layer.zero_state(), jnp.full(ROWS, 6))
    _, after = layer.attend(random_x(3, tokens), state, jnp.asarray([0, tokens]))
    for name in state:
        np.testing.assert_array_equal(after[name][0], state[name][0])
        assert np.any(after[name][1] != state[name][1])
