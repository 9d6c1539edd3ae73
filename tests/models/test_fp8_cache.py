"""An e4m3 cache of latent rows (`--kv-dtype fp8`) against the same model in float32, on the tiny checkpoints.

A row is stored in e4m3, 4 bits of precision, with one scale: each value is off by up to 1/16 of itself. Nothing else of the
model is narrow here, so what the logits are off by is the cache's doing.
"""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.models import parity
from tests.models.dense_cache import DenseCache, make_dense_cache
from tests.models.pool_cache import make_pool_cache
from ukv_jax.cli import KV_DTYPES
from ukv_jax.models.decoder import cache_spec, forward
from ukv_jax.models.weights import load_model

CHECKPOINTS = {
    "kimi-linear-tiny": Path(__file__).parents[2] / "checkpoints" / "kimi-linear-tiny",
    "deepseek_v3": parity.GOLDEN / "deepseek_v3",
}
TOKENS, DRAFT = 192, 8  # up to 8 tokens at once read all rows from the cache, their own too
ROUNDED = "rounded"  # a float32 cache whose rows have been e4m3


@cache
def prompt(name: str) -> np.ndarray:
    if name != "kimi-linear-tiny":
        return parity.load_golden(name)["ids"][:TOKENS]
    with np.load(parity.GOLDEN / "kimi_linear_tiny.npz") as file:
        return max((file[key] for key in file.files if key.startswith("ids_")), key=len)[:TOKENS]


@cache
def logits(name: str, kv_dtype: str | None, chunk: int) -> np.ndarray:
    """Float32 logits of every token of the prompt, which comes in chunks of that many."""
    params, config = load_model(CHECKPOINTS[name], dtype="float32")
    ids = prompt(name)
    spec = cache_spec(config, "float32", None if kv_dtype == ROUNDED else kv_dtype)
    make = make_rounded_cache if kv_dtype == ROUNDED else partial(make_pool_cache, unified=True)
    pool = make(spec, 1, len(ids) + chunk)

    @partial(parity.jit, donate_argnums=2)
    def step(params, tokens, pool, new_len):
        out, pool = forward(params, config, tokens, pool.begin(chunk, new_len))
        return out[0], pool.end()

    found = []
    for at in range(0, len(ids), chunk):
        part = ids[at : at + chunk]
        tokens = jnp.asarray(np.pad(part, (0, chunk - len(part))))[None]
        out, pool = step(params, tokens, pool, jnp.asarray([len(part)], jnp.int32))
        found.append(np.asarray(out[: len(part)]))
    return np.concatenate(found)


# What it costs, with the whole prompt through the cache: logits off by, in the norm; tokens for which another is likeliest.
# The trained checkpoint hardly notices. The random one has sharp scores and routers that hang on little.
BOUNDS = {"kimi-linear-tiny": (0.003, 0.0), "deepseek_v3": (0.35, 0.4)}


def norm_of_difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_stay_near_float32(name):
    exact, found = logits(name, None, DRAFT), logits(name, KV_DTYPES["fp8"], DRAFT)
    most, others = BOUNDS[name]
    assert 1e-4 < norm_of_difference(found, exact) < most  # not 0: the cache is narrow indeed
    assert (found.argmax(-1) != exact.argmax(-1)).mean() <= others


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_chunks_lose_no_more_than_single_tokens(name):
    """A chunk reads its own tokens before they are rounded."""
    exact = logits(name, None, DRAFT)
    whole, drafts = (norm_of_difference(logits(name, KV_DTYPES["fp8"], n), exact) for n in (64, DRAFT))
    assert 1e-4 < whole < 1.1 * drafts


class RoundedCache(DenseCache):
    """Plain arrays, whose latent rows are what NumPy makes of them in e4m3."""

    def _store(self, array, layer, new):
        return super()._store(array, layer, jax.pure_callback(round_rows, new, new))


jax.tree_util.register_dataclass(
    RoundedCache,
    data_fields=["latent", "kv", "state", "lengths", "positions", "new_len"],
    meta_fields=["spec"],
)


def round_rows(rows: np.ndarray) -> np.ndarray:
    rows = np.asarray(rows, np.float32)
    peak = np.abs(rows).max(-1, keepdims=True)
    scale = np.where(peak > 0, peak / np.float32(448), np.float32(1))
    return (rows / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


def make_rounded_cache(spec, rows, max_len):
    dense = make_dense_cache(spec, rows, max_len)
    return RoundedCache(**{f.name: getattr(dense, f.name) for f in dataclasses.fields(dense)})


@pytest.mark.parametrize("name", [pytest.param("kimi-linear-tiny", marks=pytest.mark.slow), "deepseek_v3"])
def test_nothing_is_lost_but_the_digits_of_rows(name):
    """Another cache, whose rows NumPy has rounded, gives the same; a last digit may turn out otherwise here and there."""
    rounded = logits(name, ROUNDED, DRAFT)
    lost = norm_of_difference(rounded, logits(name, None, DRAFT))
    assert norm_of_difference(logits(name, KV_DTYPES["fp8"], DRAFT), rounded) < lost / 20
