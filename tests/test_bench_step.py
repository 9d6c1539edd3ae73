"""The figures that the step benchmark reports."""

import numpy as np
import pytest

from bench.step import kimi_linear, layouts, paired_difference


def test_paired_difference_is_of_pairs_and_not_of_medians():
    """A card that slows down over the run changes both pools' times and no difference."""
    static = np.linspace(1000.0, 2000.0, 31)
    found = paired_difference(static, static * 1.01)
    assert found == pytest.approx(dict(median_pct=1, low_pct=1, high_pct=1))


def test_interval_holds_the_median_and_narrows_with_more_pairs():
    rng = np.random.default_rng(0)
    widths = []
    for pairs in (10, 1000):
        unified = 1000 * (1 + 0.002 + 0.01 * rng.normal(size=pairs))
        found = paired_difference(np.full(pairs, 1000.0), unified)
        assert found["low_pct"] <= found["median_pct"] <= found["high_pct"]
        widths.append(found["high_pct"] - found["low_pct"])
    assert widths[1] < widths[0] / 3
    assert abs(found["median_pct"] - 0.2) < 0.2


def test_both_pools_have_room_for_the_same_requests():
    pools = layouts(kimi_linear(8), rows=64, max_tokens=8192 + 600)
    pages = {name: layout.full.num_pages for name, layout in pools.items()}
    assert pages["static"] == 64 * 138 + 1
    assert pages["unified"] >= pages["static"]
    assert all(layout.state.num_virtual == 65 for layout in pools.values())


def test_layers_are_those_of_the_published_model():
    config = kimi_linear(27)
    assert [i for i, kind in enumerate(config.mixers) if kind == "mla"] == [3, 7, 11, 15, 19, 23, 26]
    assert config.mlps == ("dense", *["moe"] * 26)
