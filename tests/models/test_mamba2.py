"""Mamba-2: the chunked form against the recurrence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.state_step import formulas
from ukv_jax.models import mamba2

ROWS, TOKENS, HEADS, GROUPS, DIM, STATE = 2, 53, 6, 2, 5, 8
chunked = jax.jit(mamba2.chunked, static_argnames="chunk")


def inputs(seed=0, decay=1.0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    dt = jax.nn.softplus(normal(ROWS, TOKENS, HEADS))
    a = -decay * jnp.asarray(rng.uniform(0.01, 3, HEADS), jnp.float32)
    b, c = normal(ROWS, TOKENS, GROUPS, STATE), normal(ROWS, TOKENS, GROUPS, STATE)
    return normal(ROWS, TOKENS, HEADS, DIM), dt, a, b, c, normal(ROWS, HEADS, DIM, STATE)


def recurrence(x, dt, a, b, c, state):
    """The formula, token by token, in float64 numpy."""
    x, dt, a, b, c, state = (np.asarray(v, np.float64) for v in (x, dt, a, b, c, state))
    state, out = state.copy(), np.zeros_like(x)
    for r, t, h in np.ndindex(x.shape[:3]):
        group = h // (HEADS // GROUPS)
        state[r, h] = np.exp(dt[r, t, h] * a[h]) * state[r, h]
        state[r, h] += dt[r, t, h] * np.outer(x[r, t, h], b[r, t, group])
        out[r, t, h] = state[r, h] @ c[r, t, group]
    return out, state


def close(found, expected, tolerance=2e-6):
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(f, e, atol=tolerance * max(1, np.abs(e).max()))


@pytest.mark.parametrize("chunk", [1, 16, 20, 64])
def test_chunked_equals_the_recurrence(chunk):
    args = inputs()
    close(chunked(*args, chunk=chunk), recurrence(*args))


@pytest.mark.parametrize("decay", [0.0, 1e-3, 30.0, 3000.0])
def test_extreme_decay(decay):
    """None at all, and so strong that a token forgets all before it."""
    args = inputs(1, decay)
    close(chunked(*args), recurrence(*args))


def test_a_slow_step_after_fast_ones():
    """Prefix sums would swallow the small decays behind the large ones."""
    x, dt, a, b, c, state = inputs(2)
    dt = dt.at[:, :4].set(1e5).at[:, 4:].mul(1e-2)
    close(chunked(x, dt, a, b, c, state), recurrence(x, dt, a, b, c, state))


def test_single_steps_equal_the_recurrence():
    x, dt, a, b, c, state = inputs(3)
    expected, final = recurrence(x, dt, a, b, c, state)
    step, outs = jax.jit(formulas.ssm), []
    for t in range(TOKENS):
        out, state = step(x[:, t], dt[:, t], a, b[:, t], c[:, t], state)
        outs.append(out)
    close((jnp.stack(outs, 1), state), (expected, final))


def test_chunk_must_be_positive():
    with pytest.raises(ValueError, match="at least 1, found 0"):
        mamba2.chunked(*inputs(), chunk=0)
