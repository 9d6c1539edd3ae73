"""KDA: the chunked form against the recurrence, padding, and resuming from a state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ukv_jax.models import kda
from ukv_jax.models.config import KDAConfig

ROWS, TOKENS, HEADS, DIM = 2, 53, 2, 8
chunked = jax.jit(kda.chunked, static_argnames="chunk")


def inputs(seed=0, decay=1.0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    q, k, v = (normal(ROWS, TOKENS, HEADS, DIM) for _ in range(3))
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g = -decay * jax.nn.softplus(normal(ROWS, TOKENS, HEADS, DIM))
    beta = jax.nn.sigmoid(normal(ROWS, TOKENS, HEADS))
    return q, k, v, g, beta, normal(ROWS, HEADS, DIM, DIM)


def recurrence(q, k, v, g, beta, state):
    """The formula, token by token, in float64 numpy."""
    q, k, v, g, beta, state = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, state))
    state, out = state.copy(), np.zeros_like(v)
    for r, t, h in np.ndindex(q.shape[:3]):
        s = state[r, h] * np.exp(g[r, t, h])[:, None]
        s += beta[r, t, h] * np.outer(k[r, t, h], v[r, t, h] - k[r, t, h] @ s)
        state[r, h], out[r, t, h] = s, q[r, t, h] @ s
    return out, state


def close(found, expected, tolerance=2e-6):
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(f, e, atol=tolerance * max(1, np.abs(e).max()))


@pytest.mark.parametrize("chunk", [1, 4, 16, 64])
def test_chunked_equals_the_recurrence(chunk):
    args = inputs()
    close(chunked(*args, chunk=chunk), recurrence(*args))


def test_recurrent_step_equals_the_recurrence():
    q, k, v, g, beta, state = inputs(1)
    expected, final = recurrence(q, k, v, g, beta, state)
    step, outs = jax.jit(kda.recurrent_step), []
    for t in range(TOKENS):
        out, state = step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state)
        outs.append(out)
    close((jnp.stack(outs, 1), state), (expected, final))


@pytest.mark.parametrize("decay", [0.0, 30.0, 3000.0])
def test_extreme_decay(decay):
    """None at all, and so strong that exp(-sum g) over a chunk overflows float32."""
    args = inputs(2, decay)
    close(chunked(*args), recurrence(*args))


def test_equal_keys_without_decay():
    """The worst case of the triangular inverse: every off-diagonal entry of A is 1."""
    q, k, v, g, beta, state = inputs(3)
    args = q, jnp.broadcast_to(k[:, :1], k.shape), v, 0 * g, jnp.ones_like(beta), state
    close(chunked(*args), recurrence(*args))


def test_chunk_must_be_a_power_of_two():
    with pytest.raises(ValueError, match="power of two, found 48"):
        kda.chunked(*inputs(), chunk=48)


CONFIG = KDAConfig(num_heads=HEADS, head_dim=DIM, conv_kernel=4)
HIDDEN = 12


def layer(seed=0):
    rng = np.random.default_rng(seed)
    channels = CONFIG.channels
    shapes = {
        "qkv_proj": (3 * channels, HIDDEN), "conv": (3 * channels, 4), "A_log": (HEADS,), "dt_bias": (channels,),
        "f_a_proj": (DIM, HIDDEN), "f_b_proj": (channels, DIM), "b_proj": (HEADS, HIDDEN),
        "g_a_proj": (DIM, HIDDEN), "g_b_proj": (channels, DIM), "o_norm": (DIM,), "o_proj": (HIDDEN, channels),
    }  # fmt: skip
    return {name: jnp.asarray(rng.normal(size=shape) * 0.5, jnp.float32) for name, shape in shapes.items()}


def zero_state(rows=ROWS):
    return {
        "conv": jnp.zeros((rows, 3, 3 * CONFIG.channels)),
        "recurrent": jnp.zeros((rows, HEADS, DIM, DIM)),
    }


@jax.jit
def attend(params, x, state, new_len):
    valid = jnp.arange(x.shape[1]) < new_len[:, None]
    return kda.attend(params, CONFIG, 1e-5, x, state, valid, new_len)


def random_x(seed=0, tokens=TOKENS):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(ROWS, tokens, HIDDEN)), jnp.float32)


@pytest.mark.parametrize("splits", [(53,), (1, 52), (16, 37), (2, 1, 3, 47), (20, 20, 13)])
def test_any_split_of_a_prompt_gives_the_same(splits):
    params, x = layer(), random_x()
    expected, final = attend(params, x, zero_state(), jnp.full(ROWS, TOKENS))
    state, outs, at = zero_state(), [], 0
    for n in splits:
        # One padded width for all parts but single tokens, which take the recurrent form.
        part = x[:, at : at + n] if n == 1 else jnp.pad(x[:, at : at + n], ((0, 0), (0, TOKENS - n), (0, 0)))
        out, state = attend(params, part, state, jnp.full(ROWS, n))
        outs.append(out[:, :n])
        at += n
    close((jnp.concatenate(outs, 1), state["recurrent"]), (expected, final["recurrent"]), 1e-5)
    np.testing.assert_allclose(state["conv"], final["conv"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("garbage", [1e30, np.nan])
def test_padding_reaches_neither_state_nor_valid_outputs(garbage):
    params, x = layer(), random_x(1)
    new_len = jnp.asarray([TOKENS - 9, 2])
    padded = jnp.arange(TOKENS) >= new_len[:, None]
    clean = attend(params, jnp.where(padded[..., None], 0, x), zero_state(), new_len)
    dirty = attend(params, jnp.where(padded[..., None], garbage, x), zero_state(), new_len)
    for name in ("conv", "recurrent"):
        np.testing.assert_array_equal(clean[1][name], dirty[1][name])
    np.testing.assert_array_equal(
        np.where(padded[..., None], 0, clean[0]), np.where(padded[..., None], 0, dirty[0])
    )
    alone = attend(params, x[1:, :2], {k: v[1:] for k, v in zero_state().items()}, new_len[1:])
    np.testing.assert_allclose(alone[1]["recurrent"][0], clean[1]["recurrent"][1], atol=1e-5)
    np.testing.assert_array_equal(alone[1]["conv"][0], clean[1]["conv"][1])


@pytest.mark.parametrize("tokens", [1, 6])
def test_a_dead_row_keeps_its_state_bit_for_bit(tokens):
    params = layer()
    _, state = attend(params, random_x(2, 6), zero_state(), jnp.full(ROWS, 6))
    _, after = attend(params, random_x(3, tokens), state, jnp.asarray([0, tokens]))
    for name in ("conv", "recurrent"):
        np.testing.assert_array_equal(after[name][0], state[name][0])
        assert np.any(after[name][1] != state[name][1])
