"""The gated delta rule: the chunked form against the recurrence, with a decay per key channel (KDA) or per head (GDN)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.state_step import formulas
from ukv_jax.models import delta_rule

ROWS, TOKENS, HEADS, K, V = 2, 53, 2, 8, 6
chunked = jax.jit(delta_rule.chunked, static_argnames="chunk")
decays = pytest.mark.parametrize("channels", [K, 1], ids=["per channel", "per head"])


def inputs(channels, seed=0, decay=1.0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    q, k = normal(ROWS, TOKENS, HEADS, K), normal(ROWS, TOKENS, HEADS, K)
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g = -decay * jax.nn.softplus(normal(ROWS, TOKENS, HEADS, channels))
    beta = jax.nn.sigmoid(normal(ROWS, TOKENS, HEADS))
    return q, k, normal(ROWS, TOKENS, HEADS, V), g, beta, normal(ROWS, HEADS, K, V)


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


@decays
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_chunked_equals_the_recurrence(channels, chunk):
    args = inputs(channels)
    close(chunked(*args, chunk=chunk), recurrence(*args))


@decays
def test_single_steps_equal_the_recurrence(channels):
    q, k, v, f, b, state = inputs(channels, 1)
    a_log, dt_bias = jnp.asarray([0.5, -2.0]), jnp.linspace(-3, 3, HEADS * channels).reshape(HEADS, channels)
    g = -jnp.exp(a_log)[:, None] * jnp.logaddexp(f + dt_bias, 0)
    expected, final = recurrence(q * K**-0.5, k, v, g, 1 / (1 + jnp.exp(-b)), state)
    # Of any length: they are made unit vectors.
    qkv = jnp.concatenate([x.reshape(ROWS, TOKENS, -1) for x in (100 * q, 10 * k, v)], axis=-1)
    step, outs = jax.jit(formulas.delta_rule), []
    for t in range(TOKENS):
        out, state = step(qkv[:, t], f[:, t], b[:, t], a_log, dt_bias, state)
        outs.append(out)
    close((jnp.stack(outs, 1), state), (expected, final))


@decays
@pytest.mark.parametrize("decay", [0.0, 30.0, 3000.0])
def test_extreme_decay(channels, decay):
    """None at all, and so strong that exp(-sum g) over a chunk overflows float32."""
    args = inputs(channels, 2, decay)
    close(chunked(*args), recurrence(*args))


def test_equal_keys_without_decay():
    """The worst case of the triangular inverse: every off-diagonal entry of A is 1."""
    q, k, v, g, beta, state = inputs(K, 3)
    args = q, jnp.broadcast_to(k[:, :1], k.shape), v, 0 * g, jnp.ones_like(beta), state
    close(chunked(*args), recurrence(*args))


def test_chunk_must_be_a_power_of_two():
    with pytest.raises(ValueError, match="power of two, found 48"):
        delta_rule.chunked(*inputs(K), chunk=48)
