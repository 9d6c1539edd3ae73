"""DeepSeek-V2 and -V3 against transformers on tiny random checkpoints (tools/make_golden_deepseek.py)."""

from __future__ import annotations

from functools import cache

import pytest

from tests.models import parity

MODELS = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3")
CACHES = parity.caches()
# Every delivery on one model; the others differ from it in what lies outside the cache.
RUNS = [
    (m, c)
    for m in MODELS
    for c in CACHES
    if m == "deepseek_v3" or c in ("dense", "static-table", "unified-table")
]
run = cache(lambda model, kind: parity.run(model, CACHES[kind]))


@pytest.mark.parametrize(("model", "kind"), RUNS)
def test_logits_layers_and_tokens(model, kind):
    parity.check_run(run(model, kind), parity.load_golden(model))


@pytest.mark.parametrize(("model", "kind"), [(m, c) for m, c in RUNS if c.startswith("unified")])
def test_unified_pools_equal_the_static_one_bit_for_bit(model, kind):
    parity.check_same_bits(run(model, kind), run(model, "static-table"))
