"""The golden models on a GPU: parity with transformers in float32, and the same bits from both kinds of pool in bfloat16."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from tests.models import parity
from tests.models.pool_cache import make_pool_cache

pytestmark = [pytest.mark.gpu, pytest.mark.long, pytest.mark.filterwarnings("ignore:.* not loaded.*")]

MODELS = ("deepseek_v3", "falcon_h1", "gemma4", "gpt_oss", "inkling", "kimi_linear", "qwen3_5")


@pytest.fixture(autouse=True)
def _on_a_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU")


@pytest.mark.parametrize("model", MODELS)
def test_float32_equals_transformers(model):
    make = parity.caches(page_size=16)["unified-table"]
    with jax.default_matmul_precision("highest"):  # the default rounds operands to TF32
        parity.check_run(parity.run(model, make), parity.load_golden(model))


def test_three_kinds_of_memory_in_bfloat16_are_the_same_from_both_pools():
    """Inkling, by whatever kernels serve it, which translate as they read. Kimi-Linear's loops: tests/test_loop_gpu.py."""
    options = dict(page_size=16, delivery="virtual")
    unified, static = (
        parity.run("inkling", partial(make_pool_cache, unified=kind, **options), "bfloat16")
        for kind in (True, False)
    )
    parity.check_same_bits(unified, static)
    assert np.isfinite(unified.greedy_logits).all()
