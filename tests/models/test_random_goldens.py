"""Models of random shape against transformers: reads what tools/make_random_goldens.py wrote into $UKV_RANDOM_GOLDENS."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import jax
import pytest

from tests.models import parity
from tests.models.pool_cache import make_pool_cache

ROOT = os.environ.get("UKV_RANDOM_GOLDENS")
CASES = sorted(path.parent for path in Path(ROOT).resolve().glob("*/case.json")) if ROOT else []
TWINS = [case for case in CASES if int(case.name.split("-")[1]) % 4 == 0]
MISSING = "UKV_RANDOM_GOLDENS names no directory with cases"


@pytest.fixture(autouse=True)
def _forget_programs():
    """No two cases have one in common."""
    yield
    jax.clear_caches()


def run(case: Path, *, unified: bool) -> parity.Run:
    page_size = json.loads((case / "case.json").read_text())["page_size"]
    return parity.run(str(case), partial(make_pool_cache, unified=unified, page_size=page_size))


@pytest.mark.skipif(not CASES, reason=MISSING)
@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_parity(case):
    """From a shared pool: logits and layers within 1e-4 of transformers, the same tokens."""
    parity.check_run(run(case, unified=True), parity.load_golden(str(case)))


@pytest.mark.skipif(not CASES, reason=MISSING)
@pytest.mark.parametrize("case", TWINS, ids=lambda path: path.name)
def test_twin(case):
    """Every bit is the same from a shared pool and from a static split."""
    parity.check_same_bits(run(case, unified=True), run(case, unified=False))
