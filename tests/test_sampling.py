"""Sampling: distributions, cuts, and independence of the lane."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ukv_jax.sampling import sample

VOCAB = 11


@jax.jit
def draw(logits, temperature, top_k, top_p, seed, position):
    return sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, position=position)


def settings(rows, temperature=1.0, top_k=0, top_p=1.0, seed=None, position=0):
    seed = np.arange(rows) if seed is None else seed
    full = lambda value, dtype: jnp.broadcast_to(jnp.asarray(value, dtype), (rows,))
    return (
        full(temperature, jnp.float32),
        full(top_k, jnp.int32),
        full(top_p, jnp.float32),
        full(seed, jnp.int32),
        full(position, jnp.int32),
    )


def random_logits(rows, seed=0, scale=2.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, VOCAB)) * scale, jnp.float32)


def reference(logits, temperature, top_k, top_p):
    """Probabilities after all cuts, one row, in float64."""
    scaled = np.asarray(logits, np.float64) / temperature
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if top_k > 0:
        order = order[:top_k]
    p = np.exp(scaled[order] - scaled[order[0]])
    p /= p.sum()
    count = max(1, int((np.cumsum(p) - p < top_p).sum()))
    out = np.zeros(len(scaled))
    out[order[:count]] = p[:count] / p[:count].sum()
    return out


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 3, 1.0), (1.0, 0, 0.6), (1.3, 5, 0.8), (1.0, VOCAB + 5, 1.0)],
)
def test_draws_follow_the_cut_distribution(temperature, top_k, top_p):
    rows = 20_000
    logits = random_logits(1)
    tokens, _ = draw(jnp.repeat(logits, rows, 0), *settings(rows, temperature, top_k, top_p))
    expected = reference(logits[0], temperature, top_k, top_p)
    found = np.bincount(tokens, minlength=VOCAB) / rows
    assert np.all(found[expected == 0] == 0)
    np.testing.assert_allclose(found, expected, atol=4 * np.sqrt(0.25 / rows))


def test_positions_of_one_request_are_independent_draws():
    rows = 20_000
    logits = jnp.repeat(random_logits(1), rows, 0)
    tokens, _ = draw(logits, *settings(rows, seed=7, position=np.arange(rows)))
    expected = reference(logits[0], 1.0, 0, 1.0)
    np.testing.assert_allclose(np.bincount(tokens, minlength=VOCAB) / rows, expected, atol=0.015)
    pairs = np.bincount(np.asarray(tokens[:-1]) * VOCAB + np.asarray(tokens[1:]), minlength=VOCAB**2)
    np.testing.assert_allclose(
        pairs.reshape(VOCAB, VOCAB) / (rows - 1), np.outer(expected, expected), atol=0.015
    )


def test_lanes_and_neighbours_do_not_matter():
    rows = 32
    rng = np.random.default_rng(1)
    logits = random_logits(rows, seed=2)
    args = settings(
        rows,
        temperature=rng.choice([0.0, 0.7, 1.5], rows),
        top_k=rng.choice([0, 1, 4], rows),
        top_p=rng.choice([0.3, 0.9, 1.0], rows),
        seed=rng.integers(-(2**31), 2**31, rows),
        position=rng.integers(0, 1000, rows),
    )
    tokens, logprobs = draw(logits, *args)
    order = rng.permutation(rows)
    shuffled_tokens, shuffled_logprobs = draw(logits[order], *(a[order] for a in args))
    np.testing.assert_array_equal(shuffled_tokens, tokens[order])
    np.testing.assert_array_equal(shuffled_logprobs, logprobs[order])
    for row in range(rows):  # alone, a row may take the branch without sorting or without noise
        alone, _ = draw(logits[row : row + 1], *(a[row : row + 1] for a in args))
        assert alone[0] == tokens[row]


def test_seed_and_position_matter():
    logits = jnp.zeros((1, 1000))
    one = [int(draw(logits, *settings(1, seed=s, position=p))[0][0]) for s in range(4) for p in range(4)]
    assert len(set(one)) > 12


def test_temperature_zero_takes_the_lowest_id_of_equals():
    logits = jnp.zeros((2, VOCAB)).at[0, 4].set(1.0).at[0, 7].set(1.0)
    tokens, logprobs = draw(logits, *settings(2, temperature=0.0, top_k=3, top_p=0.2))
    assert tokens.tolist() == [4, 0]
    np.testing.assert_allclose(logprobs, jax.nn.log_softmax(logits)[jnp.arange(2), tokens], rtol=1e-6)


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (0, 1e-9), (0, 0.0), (1, 0.5)])
def test_the_tightest_cut_keeps_the_best_token(top_k, top_p):
    rows = 200
    logits = random_logits(rows, seed=3, scale=0.1)
    tokens, _ = draw(logits, *settings(rows, 5.0, top_k, top_p))
    np.testing.assert_array_equal(tokens, jnp.argmax(logits, -1))


def test_top_k_cuts_equals_by_id():
    tokens, _ = draw(jnp.zeros((500, VOCAB)), *settings(500, top_k=3))
    assert set(tokens.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("top_p", [1.0, 0.95])
@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0, 50.0])
def test_impossible_tokens_are_never_drawn(temperature, top_p):
    rows = 500
    logits = jnp.full((rows, VOCAB), -jnp.inf).at[:, 3].set(-200.0).at[:, 8].set(-200.5)
    tokens, logprobs = draw(logits, *settings(rows, temperature, top_p=top_p))
    assert set(tokens.tolist()) <= {3, 8}
    assert np.isfinite(logprobs).all()


def test_a_very_low_temperature_is_greedy():
    logits = random_logits(64, seed=5) * 1e3
    tokens, _ = draw(logits, *settings(64, temperature=1e-38))
    np.testing.assert_array_equal(tokens, jnp.argmax(logits, -1))


def test_logprobs_are_those_of_the_model():
    logits = random_logits(64, seed=4)
    tokens, logprobs = draw(logits, *settings(64, temperature=3.0, top_k=5))
    np.testing.assert_allclose(logprobs, jax.nn.log_softmax(logits)[jnp.arange(64), tokens], rtol=1e-5)
