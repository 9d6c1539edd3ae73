"""Qwen3.5 (GDN) and Falcon-H1 (Mamba-2) against transformers on tiny random checkpoints (tools/make_golden_qwen3_5.py and
tools/make_golden_falcon_h1.py)."""

from __future__ import annotations

import json
from functools import cache

import pytest

from tests.models import parity
from ukv_jax.engine import Engine, Model, Sampling
from ukv_jax.layout import UnifiedLayout
from ukv_jax.verify import check

pytestmark = pytest.mark.filterwarnings("ignore:.* not loaded")

MODELS = ("qwen3_5", "qwen3_5_moe", "falcon_h1", "falcon_h1_norm")
CACHES = parity.caches()
# Every delivery with one model of each family: the others differ in what lies outside the cache.
RUNS = [
    *((model, "dense") for model in MODELS),
    *((model, kind) for model in MODELS[:3] for kind in ("static-table", "unified-table")),
    *((model, kind) for model in ("qwen3_5", "falcon_h1") for kind in ("unified-stream", "unified-virtual")),
]
run = cache(lambda model, kind: parity.run(model, CACHES[kind]))
# Falcon-H1 goes through streams and virtual ids among the fast tests.
on_pools = lambda model, kind: (
    parity.exact_on_pools(model, kind, slow=True, repeated=("unified-stream", "unified-virtual"))
    if model == "qwen3_5"
    else parity.exact_on_pools(model, kind)
)


@pytest.mark.parametrize(("model", "kind"), [on_pools(*pair) for pair in RUNS])
def test_logits_layers_and_tokens(model, kind):
    parity.check_run(run(model, kind), parity.load_golden(model))


@pytest.mark.parametrize("model", ["qwen3_5", pytest.param("falcon_h1", marks=pytest.mark.slow)])
def test_bfloat16_stays_near(model):
    golden, found = parity.load_golden(model), parity.run(model, CACHES["dense"], "bfloat16")
    assert parity.relative(found.logits, golden["logits"]) <= 0.1


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """Qwen3.5 whose config wants the recurrent state in bfloat16: transformers keeps float32 whatever it says."""
    directory = tmp_path_factory.mktemp("narrow")
    for file in ("model.safetensors", "golden.npz"):
        (directory / file).symlink_to(parity.GOLDEN / "qwen3_5" / file)
    config = json.loads((parity.GOLDEN / "qwen3_5" / "config.json").read_text())
    config["text_config"]["mamba_ssm_dtype"] = "bfloat16"
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.mark.slow
@pytest.mark.exact
def test_a_state_in_bfloat16_stays_near_and_is_the_same_from_both_pools(narrow):
    golden, static = parity.load_golden(narrow), run(narrow, "static-table")
    assert 1e-4 < parity.relative(static.logits, golden["logits"]) <= 2e-2
    parity.check_same_bits(run(narrow, "unified-table"), static)


@pytest.mark.parametrize(("model", "kind"), [on_pools(m, c) for m, c in RUNS if c.startswith("unified")])
def test_unified_pools_equal_the_static_one_bit_for_bit(model, kind):
    parity.check_same_bits(run(model, kind), run(model, "static-table"))


@pytest.mark.parametrize(
    "model", ["falcon_h1", *(pytest.param(m, marks=pytest.mark.slow) for m in ("qwen3_5", "inkling"))]
)
def test_the_engine_writes_the_golden_tokens_from_a_crowded_pool(model):
    """Room for one request of full length and a half: others wait, stall and are sent back beside the golden one."""
    golden = parity.load_golden(model)
    ids, steps = golden["ids"].tolist(), len(golden["greedy"])
    loaded = Model.load(parity.GOLDEN / model, dtype="float32")
    layout = UnifiedLayout.from_tokens(loaded.specs, tokens=320, requests=3, page_size=16, max_tokens=224)
    engine = Engine(loaded, layout, max_new_tokens=steps, steps=16, prefill_lanes=2)
    engine.compile({"xla_backend_optimization_level": "0"})
    results = engine.generate([ids[:40], ids, ids[:99], ids], Sampling(steps, ignore_eos=True))
    assert [r.error for r in results] == [None] * 4
    assert sum(r.stalls + r.retractions for r in results) > 0
    assert results[1].tokens == results[3].tokens == golden["greedy"].tolist()
    assert int(engine.state.counters.faults) == 0
    check(engine.state)
