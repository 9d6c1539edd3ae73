"""Batched sampling on the device. Every row has its own settings and its own seed.

The random numbers of a token depend on the request's seed and the token's position alone: not on the lane that the
request sits in, on its neighbours, or on how many steps were refused in between.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32


def sample(
    logits: Float[Array, "rows vocab"],
    *,
    temperature: Float[Array, " rows"],
    top_k: Int32[Array, " rows"],
    top_p: Float[Array, " rows"],
    seed: Int32[Array, " rows"],
    position: Int32[Array, " rows"],
) -> tuple[Int32[Array, " rows"], Float[Array, " rows"]]:
    """Draws one token a row.

    temperature <= 0 takes the best token (the lowest id of equals). Otherwise logits are divided by it, then cut to
    the top_k best (<= 0: all), then to the smallest set of best tokens whose probabilities, renormalised after top_k,
    reach top_p (>= 1: all; at least one token stays). Among equal logits the lower id ranks first. `position` is that
    of the token being drawn.

    Returns the tokens and their log-probabilities under the model's own distribution: before temperature and cuts.
    A token with logit -inf is never drawn while a finite one is left.
    """
    logits = logits.astype(jnp.float32)
    greedy = temperature <= 0
    best = jnp.max(logits, axis=-1, keepdims=True)
    # The best token at 0: no temperature, however low, can then overflow into a tie.
    scaled = (logits - jnp.where(jnp.isfinite(best), best, 0)) / jnp.where(greedy, 1.0, temperature)[:, None]
    cut = ~greedy & ((top_k > 0) | (top_p < 1))
    # Sorting is the dear part. Rows without a cut keep every token either way, so neighbours make no difference.
    kept = lax.cond(
        cut.any(),
        lambda: _kept(scaled, jnp.where(cut, top_k, 0), jnp.where(cut, top_p, 1.0)),
        lambda: jnp.ones(logits.shape, bool),
    )
    noise = lax.cond(
        greedy.all(), lambda: jnp.zeros(logits.shape), lambda: _gumbel(seed, position, logits.shape[1])
    )
    drawn = jnp.where(kept, scaled, -jnp.inf) + noise
    tokens = jnp.argmax(jnp.where(greedy[:, None], logits, drawn), axis=-1).astype(jnp.int32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen


def _gumbel(seed: Array, position: Array, vocab: int) -> Float[Array, "rows vocab"]:
    """Gumbel noise a row: argmax(logits + noise) is a draw from softmax(logits)."""

    def row(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, (vocab,), jnp.float32)

    return jax.vmap(row)(seed, position)


def _kept(logits: Array, top_k: Array, top_p: Array) -> Bool[Array, "rows vocab"]:
    """The tokens that survive top_k and top_p.

    The survivors are a prefix of the ranking; its last member is the border that every token is compared with.
    """
    vocab = logits.shape[1]
    ids = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32), logits.shape)
    negative, ranked = lax.sort((-logits, ids), num_keys=2)
    rank = jnp.arange(vocab, dtype=jnp.int32)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)
    probs = jax.nn.softmax(jnp.where(rank < k[:, None], -negative, -jnp.inf), axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    by_p = jnp.where(top_p >= 1, vocab, (before < top_p[:, None]).sum(-1))
    count = jnp.clip(jnp.minimum(k, by_p), 1, vocab)
    border = jnp.take_along_axis(-negative, count[:, None] - 1, axis=1)
    border_id = jnp.take_along_axis(ranked, count[:, None] - 1, axis=1)
    return (logits > border) | ((logits == border) & (ids <= border_id))
