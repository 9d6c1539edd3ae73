"""Serving a model with sliding-window layers: prompts in chunks, pages that leave the window pay for the rest."""

import numpy as np
import pytest

from tests.models import parity
from ukv_jax.engine import Engine, Model, Sampling
from ukv_jax.layout import StaticLayout, UnifiedLayout

PAGE, ROWS, CHUNK, NEW = 16, 3, 32, 64


@pytest.fixture(scope="module")
def model():
    return Model.load(parity.GOLDEN / "gpt_oss", dtype="float32")


def make_layout(model, unified):
    limits = dict(page_size=PAGE, max_requests=ROWS, max_tokens=224)
    if not unified:
        return StaticLayout.from_pages(model.specs, pages={"full": ROWS * 14, "swa": 13}, **limits)
    page = 2 * 2 * PAGE * 2 * 16 * 4  # two layers of K and V in either sub-pool
    # 14 pages of full attention a request and 5 of a window in decoding; all of its pages would be 84.
    return UnifiedLayout.from_bytes(model.specs, total_bytes=63 * page, **limits)


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "static"])
def test_tokens_of_transformers_with_windows_released(model, unified):
    golden = parity.load_golden("gpt_oss")
    ids = golden["ids"].tolist()
    layout = make_layout(model, unified)
    engine = Engine(model, layout, max_new_tokens=NEW, prefill_lanes=2, prefill_chunk=CHUNK, steps=16)
    engine.compile({"xla_backend_optimization_level": "0"})  # the programs are large and their inputs tiny
    prompts = [ids, ids[:40], ids, ids]
    wish = Sampling(max_new_tokens=NEW, ignore_eos=True)
    results = engine.generate(prompts, [wish] * 4)
    for i in (0, 2, 3):
        assert results[i].finish == "length"
        np.testing.assert_array_equal(results[i].tokens, golden["greedy"])
    assert len(results[1].tokens) == NEW
    assert engine.peak_requests == ROWS
    swa = layout.index("swa")
    full = layout.index("full")
    pages = engine.trace().pages
    # A decoding row holds the pages of window - 1 older tokens and of its own, which start anywhere in a page.
    assert pages[:, swa].max() <= ROWS * (2 + (20 + PAGE - 2) // PAGE)
    assert pages[:, full].max() > 2 * pages[:, swa].max()
    state = engine.state
    assert int(state.counters.faults) == 0
    for p, spec in zip(state.subpools, layout.subpools, strict=True):
        assert int(np.sum(np.asarray(p.v2p)[1:-1] > 0)) == 0, spec.name


def test_a_static_window_too_small_for_a_chunk_is_refused(model):
    layout = StaticLayout.from_pages(
        model.specs, pages={"full": 42, "swa": 13}, page_size=PAGE, max_requests=ROWS, max_tokens=224
    )
    with pytest.raises(ValueError, match=r"'swa' has 13 pages, a chunk of 192 tokens .* takes up to 14"):
        Engine(model, layout, prefill_chunk=192)
