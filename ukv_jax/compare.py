"""Teacher-forced comparison of two pools: the same text, the same model, the logits of every position side by side."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ukv_jax import loop, pool, requests
from ukv_jax.attention import begin_step
from ukv_jax.engine import Model
from ukv_jax.layout import PoolLayout
from ukv_jax.models import decoder
from ukv_jax.translator import Delivery


@dataclass(frozen=True)
class Comparison:
    """tokens: predictions compared. perplexity: exp of the mean negative log-likelihood, of each pool. agreement: share of
    positions where both prefer the same next token. max_difference: largest |logit difference|; identical: all bits
    equal."""

    tokens: int
    perplexity: tuple[float, float]
    agreement: float
    max_difference: float
    identical: bool


@lru_cache
def _chunk_logits(
    config, experts: str | None, chunk: int, delivery: Delivery, implementation: str | None
) -> Callable[..., tuple[pool.PoolState, jax.Array, jax.Array]]:
    def run(params, state, rows, tokens, new_len):
        target = jnp.where(new_len > 0, state.requests.seq_len[jnp.maximum(rows, 0)] + new_len, 0)
        pages = chunk // state.layout.page_size + 2
        state, reserved = loop.admit(state, rows, target, pages_per_row=min(pages, state.layout.max_pages))
        new_len = jnp.where(reserved.granted, new_len, 0)
        options: dict[str, Any] = dict(delivery=delivery, implementation=implementation)
        step = begin_step(state, rows, new_len, tokens=chunk, **options)
        logits, step = decoder.forward(params, config, tokens, step, experts=experts)
        state = replace(state, buffer=step.buffer)
        state, _ = requests.append(state, jnp.where(new_len > 0, rows, -1), new_len, max_tokens=chunk)
        return state, logits, jnp.all(reserved.granted | (target == 0))

    return jax.jit(run, donate_argnums=1)


@jax.jit
def _compare(a, b, targets):
    """Sums over the positions with a target (-1 = none): two negative log-likelihoods, agreements, and the differences."""
    valid = targets >= 0
    target = jnp.maximum(targets, 0)[..., None]

    def nll(logits):
        return -jnp.sum(
            jnp.where(valid, jnp.take_along_axis(jax.nn.log_softmax(logits), target, -1)[..., 0], 0)
        )

    agree = jnp.sum(valid & (jnp.argmax(a, -1) == jnp.argmax(b, -1)))
    difference = jnp.max(jnp.where(valid[..., None], jnp.abs(a - b), 0))
    bits = [jax.lax.bitcast_convert_type(x, jnp.int32) for x in (a, b)]
    equal = jnp.all((bits[0] == bits[1]) | ~valid[..., None])
    return nll(a), nll(b), agree, difference, equal


def compare(
    model: Model,
    layouts: tuple[PoolLayout, PoolLayout],
    text: list[int],
    *,
    chunk: int = 64,
    delivery: Delivery = "table",
    implementation: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Feeds `text` to two pools, in stretches of at most `max_tokens` of the layouts, `max_requests` of them side by side.

    chunk: tokens a step; 1 takes the decode path. Pages are taken chunk by chunk, so those of several requests mix, and
    are given back after each stretch. on_progress: called with tokens done and in all.

    Raises ValueError for a text of fewer than two tokens, ids out of range, layouts of different limits, or a pool that
    cannot hold `max_requests` stretches at once.
    """
    first, second = layouts
    rows, width = first.max_requests, first.max_tokens
    if (second.max_requests, second.max_tokens) != (rows, width):
        raise ValueError(
            f"both layouts must have the same limits, got {rows} requests of {width} tokens and "
            f"{second.max_requests} of {second.max_tokens}"
        )
    vocab = model.config.vocab_size
    if len(text) < 2:
        raise ValueError(f"a text of at least 2 tokens is wanted, got {len(text)}")
    if not (min(text) >= 0 and max(text) < vocab):
        raise ValueError(
            f"token ids of the text lie in [{min(text)}, {max(text)}], the vocabulary is [0, {vocab})"
        )
    states = [pool.init(layout) for layout in layouts]
    run = _chunk_logits(model.config, model.experts, chunk, delivery, implementation)
    release = jax.jit(lambda s, r: requests.release(s, r)[0], donate_argnums=0)
    stretches = [text[i : i + width] for i in range(0, len(text) - 1, width)]
    sums, largest, identical, done = np.zeros(3), 0.0, True, 0
    for begin in range(0, len(stretches), rows):
        batch = stretches[begin : begin + rows]
        lanes = np.array([i if i < len(batch) else -1 for i in range(rows)], np.int32)
        padded = np.full((rows, -(-width // chunk) * chunk + 1), -1, np.int32)
        for i, stretch in enumerate(batch):
            padded[i, : len(stretch)] = stretch
        for at in range(0, max(map(len, batch)), chunk):
            tokens = padded[:, at : at + chunk]
            new_len = np.sum(tokens >= 0, axis=1, dtype=np.int32)
            logits = []
            for k in range(2):
                states[k], out, fits = run(model.params, states[k], lanes, np.maximum(tokens, 0), new_len)
                if not bool(fits):
                    raise ValueError(
                        f"a pool of {layouts[k].total_bytes} bytes cannot hold {rows} requests of {width} tokens"
                    )
                logits.append(out)
            *parts, difference, equal = jax.device_get(_compare(*logits, padded[:, at + 1 : at + chunk + 1]))
            sums += np.array(parts, float)
            largest, identical = max(largest, float(difference)), identical and bool(equal)
            done += int(new_len.sum())
            if on_progress is not None:
                on_progress(done, len(text))
        states = [release(s, lanes) for s in states]
    n = sum(len(stretch) - 1 for stretch in stretches)  # the last token of a stretch predicts nothing
    return Comparison(n, tuple(np.exp(sums[:2] / n).tolist()), float(sums[2] / n), largest, identical)
