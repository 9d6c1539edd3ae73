"""Runs a checkpoint over a cache as its golden data was made: a prompt in padded chunks, then greedy tokens.

A golden directory (tools/make_golden_*.py) holds a checkpoint and golden.npz with ids, positions, logits, hidden,
greedy and greedy_logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.models.dense_cache import make_dense_cache
from tests.models.pool_cache import jit, make_pool_cache
from ukv_jax.models.decoder import cache_spec, forward, run_layers
from ukv_jax.models.decoder import logits as logits_of
from ukv_jax.models.weights import load_model

GOLDEN = Path(__file__).parent / "golden"
CHUNK = 64


def caches(page_size: int = 64) -> dict[str, Callable[..., Any]]:
    """Every cache that a model can run on, by name: make(spec, rows, max_len) of one with begin(tokens, new_len), end()."""
    pool = partial(make_pool_cache, page_size=page_size)
    return {
        "dense": make_dense_cache,
        "static-table": partial(pool, unified=False),
        "unified-table": partial(pool, unified=True),
        "unified-stream": partial(pool, unified=True, delivery="stream"),
        "unified-virtual": partial(pool, unified=True, delivery="virtual"),
    }


def exact_on_pools(*values: str, slow: bool = False, repeated: tuple[str, ...] = ()) -> Any:
    """Parameters of a test, the last the name of a cache: what runs on a pool is to be compared bit by bit.

    `slow`: streams and virtual ids are among the slow tests. `repeated`: caches on which another model with such memory
    runs.
    """
    marks = [] if values[-1] == "dense" else [pytest.mark.exact]
    if slow and values[-1] in ("unified-stream", "unified-virtual"):
        marks.append(pytest.mark.slow)
    if values[-1] in repeated:
        marks.append(pytest.mark.repeated)
    return pytest.param(*values, marks=marks)


@dataclass(frozen=True)
class Run:
    logits: np.ndarray  # [prompt, vocab]
    hidden: np.ndarray  # [layers + 1, prompt, hidden]: the embedding, then each layer's output
    greedy: np.ndarray  # [steps]
    greedy_logits: np.ndarray  # [steps, vocab]


def load_golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / name / "golden.npz") as file:
        return {key: file[key] for key in file.files}


_load = lru_cache(maxsize=2)(lambda name, dtype: load_model(GOLDEN / name, dtype=dtype))


def run(name: str, make_cache, dtype: str = "float32") -> Run:
    """The golden prompt of directory `name` in row 1 of a batch of two (row 0 lies idle), then as many greedy tokens."""
    golden = load_golden(name)
    params, config = _load(name, dtype)
    ids, steps = golden["ids"], len(golden["greedy"])
    live = jnp.asarray([0, 1], jnp.int32)
    cache = make_cache(cache_spec(config, dtype), 2, len(ids) + steps)

    @jit
    def chunk(params, tokens, cache, new_len):
        cache = cache.begin(tokens.shape[1], new_len)
        *outputs, (x, cache) = run_layers(params, config, tokens, cache)
        hidden = jnp.stack([y[1] for y in (*(y for y, _ in outputs), x)])
        return logits_of(params, config, x)[1], hidden, cache.end()

    @jit
    def decode(params, first, cache):
        def body(carry, _):
            logits, cache = carry
            token = jnp.argmax(logits).astype(jnp.int32)
            tokens = jnp.stack([jnp.int32(0), token])[:, None]
            out, cache = forward(params, config, tokens, cache.begin(1, live), last_only=True)
            return (out[1], cache.end()), (token, logits)

        cache = cache.begin(1, live * 0).end()  # the shapes of a decode step
        return lax.scan(body, (first, cache), None, length=steps)[1]

    logits, hidden = [], []
    for at in range(0, len(ids), CHUNK):
        part = ids[at : at + CHUNK]
        tokens = np.full((2, CHUNK), -7, np.int32)
        tokens[1, : len(part)] = part
        out, outputs, cache = chunk(params, tokens, cache, live * len(part))
        logits.append(np.asarray(out[: len(part)]))
        hidden.append(np.asarray(outputs[:, : len(part)]))
    logits = np.concatenate(logits)
    greedy, greedy_logits = decode(params, jnp.asarray(logits[-1]), cache)
    return Run(logits, np.concatenate(hidden, axis=1), np.asarray(greedy), np.asarray(greedy_logits))


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """max |difference| / max |expected|"""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def check_run(found: Run, golden: dict[str, np.ndarray]) -> None:
    """Float32 logits, layer outputs and greedy logits within 1e-4 of the golden ones, greedy tokens equal."""
    assert relative(found.logits, golden["logits"]) <= 1e-4
    for i, expected in enumerate(golden["hidden"]):
        assert relative(found.hidden[i][golden["positions"]], expected) <= 1e-4, f"layer {i}"
    np.testing.assert_array_equal(found.greedy, golden["greedy"])
    assert relative(found.greedy_logits, golden["greedy_logits"]) <= 1e-4


def check_same_bits(found: Run, expected: Run) -> None:
    """Every number of two runs is the same, to the last bit."""
    for name in ("logits", "hidden", "greedy", "greedy_logits"):
        assert getattr(found, name).tobytes() == getattr(expected, name).tobytes(), name
