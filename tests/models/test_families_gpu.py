"""The golden models on a GPU: parity with transformers in float32, and the same bits from both kinds of pool in bfloat16."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from tests.models import parity
from tests.models.pool_cache import make_pool_cache

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.* not loaded.*")]

MODELS = (
    "deepseek_v2", "deepseek_v3", "falcon_h1", "gemma4", "gpt_oss", "inkling", "qwen3_5", "qwen3_5_moe",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _on_a_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU")


@pytest.mark.parametrize("model", MODELS)
def test_float32_equals_transformers(model):
    make = parity.caches(page_size=16)["unified-table"]
    with jax.default_matmul_precision("highest"):  # the default rounds operands to TF32
        parity.check_run(parity.run(model, make), parity.load_golden(model))


@pytest.mark.parametrize("model", MODELS)
def test_bfloat16_is_the_same_from_both_pools(model):
    """As computed by whatever kernels serve the model, which translate as they read."""
    options = dict(page_size=16, delivery="virtual")
    unified, static = (
        parity.run(model, partial(make_pool_cache, unified=kind, **options), "bfloat16")
        for kind in (True, False)
    )
    parity.check_same_bits(unified, static)
    assert np.isfinite(unified.greedy_logits).all()
