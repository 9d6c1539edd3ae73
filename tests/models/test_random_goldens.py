"""Models of random shape against transformers: reads what tools/make_random_goldens.py wrote into $UKV_RANDOM_GOLDENS."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.models import parity
from tests.models.pool_cache import make_pool_cache

ROOT = os.environ.get("UKV_RANDOM_GOLDENS")
CASES = sorted(path.parent for path in Path(ROOT).resolve().glob("*/case.json")) if ROOT else []


@pytest.fixture(autouse=True)
def _forget_programs():
    """No two cases have one in common."""
    yield
    jax.clear_caches()


@pytest.mark.skipif(not CASES, reason="UKV_RANDOM_GOLDENS names no directory with cases")
@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_both_pools(case):
    """Within 1e-4 of transformers, the same tokens, and the same bits from a shared pool and a static split."""
    golden, options = parity.load_golden(str(case)), json.loads((case / "case.json").read_text())
    unified, static = (
        parity.run(str(case), partial(make_pool_cache, unified=unified, page_size=options["page_size"]))
        for unified in (True, False)
    )
    assert parity.relative(unified.logits, golden["logits"]) <= 1e-4
    for i, expected in enumerate(golden["hidden"]):
        assert parity.relative(unified.hidden[i][golden["positions"]], expected) <= 1e-4, f"layer {i}"
    np.testing.assert_array_equal(unified.greedy, golden["greedy"])
    assert parity.relative(unified.greedy_logits, golden["greedy_logits"]) <= 1e-4
    for name in ("logits", "hidden", "greedy", "greedy_logits"):
        assert getattr(unified, name).tobytes() == getattr(static, name).tobytes(), name
