"""Whole decode loops on a GPU: the same tokens and log-probabilities from a unified pool and from a static split."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from tests.tiny_model import CONFIG, random_model
from ukv_jax import verify
from ukv_jax.engine import Engine, Sampling
from ukv_jax.layout import StaticLayout, UnifiedLayout
from ukv_jax.models.config import KDAConfig, MLAConfig

pytestmark = [pytest.mark.gpu, pytest.mark.long]

# Kimi-Linear's latent and head widths, so that the kernels for real models serve it.
WIDE = replace(
    CONFIG,
    hidden_size=256,
    mla=MLAConfig(num_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    kda=KDAConfig(num_heads=4, head_dim=128, conv_kernel=4),
)
LIMITS = dict(page_size=64, max_requests=8, max_tokens=512)


@pytest.fixture(scope="module")
def model():
    return random_model(3, WIDE)


def generate(model, layout, delivery, implementation=None):
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 96, n).tolist() for n in (3, 64, 65, 200, 17, 129, 40, 77, 90, 12)]
    engine = Engine(model, layout, max_new_tokens=80, delivery=delivery, implementation=implementation)
    results = engine.generate(prompts, Sampling(max_new_tokens=80, temperature=0.8, seed=1, ignore_eos=True))
    assert all(r.finish == "length" for r in results), [r.error for r in results]
    verify.check(engine.state)
    return [(r.tokens, r.logprobs) for r in results]


def unified(model, pages):
    slots = next(
        s
        for s in UnifiedLayout.from_tokens(model.specs, tokens=512, requests=8, **limits()).subpools
        if s.is_state
    )
    full = UnifiedLayout.from_tokens(model.specs, tokens=512, requests=8, **limits()).full
    return UnifiedLayout.from_bytes(
        model.specs, total_bytes=slots.page_bytes * 10 + full.page_bytes * pages, **LIMITS
    )


def limits():
    return {k: v for k, v in LIMITS.items() if k != "max_requests"}


@pytest.fixture(scope="module")
def expected(model):
    """What a roomy pool gives, by delivery: each is compiled once by the worker that has its tests."""
    return cache(lambda delivery: generate(model, unified(model, 64), delivery))


by_table = pytest.mark.xdist_group("decode loops by tables")


@pytest.mark.parametrize("delivery", [pytest.param("table", marks=by_table), "stream", "virtual"])
def test_unified_equals_static(model, expected, delivery):
    if jax.default_backend() != "gpu":
        pytest.fail("marked gpu, but JAX runs on " + jax.default_backend())
    static = StaticLayout.from_pages(model.specs, pages={"full": 64, "state": 8}, **LIMITS)
    assert generate(model, static, delivery) == expected(delivery)


@by_table
def test_a_tight_pool_that_compacts_gives_the_tokens_of_a_roomy_one(model, expected):
    assert generate(model, unified(model, 26), "table") == expected("table")
