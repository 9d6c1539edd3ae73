"""What people see: numbers against bytes counted by hand, and plots that draw."""

import numpy as np
import pytest

from tests.pool.cases import page_bytes_of
from tests.pool.test_verify import UNIFIED, static, unified
from ukv_jax import inspect, pool


def by_name(state):
    return {o.name: o for o in inspect.occupancy(state)}


def test_occupancy_of_a_unified_pool():
    o = by_name(unified())
    assert (o["state"].live_pages, o["state"].hole_pages, o["state"].free_ids) == (2, 1, 2)
    assert (o["swa"].live_pages, o["swa"].hole_pages, o["swa"].free_ids) == (4, 3, None)
    assert (o["full"].live, o["full"].holes) == (5 * 160, 1 * 160)
    assert (o["swa"].low, o["swa"].high) == (12 * 128, 19 * 128)
    # State reaches up to the window; the window has a gap on either side; full reaches down to the window.
    assert o["state"].free == 12 * 128 - 4 * 384
    assert o["swa"].free == (12 * 128 - 4 * 384) + (30 * 160 - 19 * 128)
    assert o["full"].free == 30 * 160 - 19 * 128 + (UNIFIED.total_bytes - 36 * 160)


def test_occupancy_of_an_empty_pool():
    """An empty float is transparent: both ends reach the whole gap."""
    o = by_name(pool.init(UNIFIED))
    assert all(x.live == x.holes == 0 for x in o.values())
    assert o["full"].free == UNIFIED.total_bytes - UNIFIED.reserved_bytes
    assert o["state"].free == UNIFIED.total_bytes - UNIFIED.reserved_bytes


def test_occupancy_of_a_static_split():
    o = by_name(static())
    assert (o["full"].live_pages, o["full"].holes, o["full"].free) == (5, 0, 7 * 160)
    assert (o["swa"].live_pages, o["swa"].hole_pages, o["swa"].free) == (4, 2, (8 - 6) * 128)
    assert (o["state"].live, o["state"].free) == (2 * 384, 2 * 384)


@pytest.mark.parametrize("make", [unified, static])
def test_a_static_split_and_a_pool_account_for_every_byte(make):
    state = make()
    layout = state.layout
    if make is static:
        total = sum(o.live + o.holes + o.free for o in inspect.occupancy(state)) + inspect.reserved(layout)
        assert total == layout.total_bytes
    else:
        bands = sum(o.high - o.low for o in inspect.occupancy(state))
        assert bands == sum(o.live + o.holes for o in inspect.occupancy(state))
        assert inspect.reserved(layout) == 384


def test_describe_shows_what_occupancy_counts():
    text = inspect.describe(unified())
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    assert "384 B" in rows["state"]
    assert "[1,536, 2,432)" in rows["swa"]
    assert "shared" in rows["swa"]
    assert rows["full"].split()[7:10] == ["5", "1", "30"] or " 30 " in rows["full"]
    assert "2 active" in text
    assert "2 free" in text
    assert "unified" in text
    assert "static split" in inspect.describe(static())
    assert "moves forbidden by 1" in inspect.describe(pool.hold(unified()))


@pytest.mark.parametrize(
    "size, text", [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 20, "3 MiB"), (5 << 40, "5 TiB")]
)
def test_human(size, text):
    assert inspect.human(size) == text


def test_strip_of_a_unified_pool_byte_by_byte():
    """One cell a byte: every byte of every live page belongs to its request."""
    state = unified()
    s = inspect.strip(state, UNIFIED.total_bytes)
    assert (s.edges == np.arange(UNIFIED.total_bytes + 1)).all()
    expected = np.full(UNIFIED.total_bytes, inspect.NOBODY)
    expected[:384] = inspect.RESERVED
    for name, low, high in (("state", 1, 4), ("swa", 12, 19), ("full", 30, 36)):
        size = UNIFIED[name].page_bytes
        expected[low * size : high * size] = inspect.HOLE
    owner = {1: 0, 2: 0, 3: 0, 4: 1, 5: 1}
    for name in ("swa", "full"):
        v2p = np.asarray(state.subpool(name).v2p)
        for v, row in owner.items():
            if v2p[v] > 0:
                size = UNIFIED[name].page_bytes
                expected[v2p[v] * size : (v2p[v] + 1) * size] = row
    for slot, row in ((3, 0), (1, 1)):
        expected[slot * 384 : (slot + 1) * 384] = row
    np.testing.assert_array_equal(s.owner, expected)
    assert set(s.subpool[s.owner == inspect.NOBODY]) == {-1}


def test_strip_names_the_last_writer_of_a_shared_page():
    state = unified()
    r = state.requests
    shared = pool.replace(r, page_to_req=r.page_to_req.at[5].set(1))
    s = inspect.strip(pool.replace(state, requests=shared), UNIFIED.total_bytes)
    page = int(state.subpool("full").v2p[5])
    assert set(s.owner[page * 160 : (page + 1) * 160]) == {1}


def test_strip_of_a_static_split():
    state = static()
    layout = state.layout
    s = inspect.strip(state, layout.total_bytes)
    for i, spec in enumerate(layout.subpools):
        share = (s.subpool == i) & (s.owner >= 0)
        assert share.sum() == by_name(state)[spec.name].live
        inside = np.concatenate([page_bytes_of(spec, p) for p in range(spec.num_pages)])
        assert set(np.flatnonzero(s.subpool == i)) <= set(
            range(inside.min(), spec.base + spec.num_pages * spec.page_bytes)
        )


def test_strip_needs_a_width():
    with pytest.raises(ValueError, match="width must be at least 1, got 0"):
        inspect.strip(unified(), 0)


@pytest.fixture
def plt():
    mpl = pytest.importorskip("matplotlib")
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


@pytest.mark.parametrize("make", [unified, static])
@pytest.mark.parametrize("by", ["request", "subpool"])
def test_plot_strip(plt, make, by):
    ax = inspect.plot_strip(make(), by=by)
    labels = {text.get_text() for text in ax.texts}
    assert labels == {"state", "swa", "full"}
    ax.figure.canvas.draw()


def test_plot_occupancy(plt, tmp_path):
    random = np.random.default_rng(0)
    live = random.integers(0, 1500, (30, 3))
    holes = random.integers(0, 200, (30, 3))
    figure = inspect.plot_occupancy(UNIFIED, live, holes, state=unified(), title="Bytes in use")
    figure.savefig(tmp_path / "occupancy.png")
    assert (tmp_path / "occupancy.png").stat().st_size > 10_000
    above, _ = figure.axes
    labels = [text.get_text() for text in above.get_legend().get_texts()]
    assert labels[0] == "reserved"
    assert {"state: live", "swa: live", "full: live", "state: holes"} <= set(labels)
    # The stack's top is the sum of everything, in the unit of the axis.
    top = max(path.vertices[:, 1].max() for c in above.collections for path in c.get_paths())
    assert top == pytest.approx((384 + (live + holes).sum(1).max()) / 1024)


@pytest.mark.parametrize(
    "live, holes, steps, text",
    [
        ((4, 2), (4, 2), None, r"must both be \[steps, 3\]"),
        ((4, 3), (3, 3), None, r"must both be \[steps, 3\]"),
        ((4, 3), (4, 3), 5, "does not match 4 rows"),
    ],
)
def test_plot_occupancy_wants_matching_shapes(plt, live, holes, steps, text):
    steps = None if steps is None else np.arange(steps)
    with pytest.raises(ValueError, match=text):
        inspect.plot_occupancy(UNIFIED, np.zeros(live), np.zeros(holes), steps=steps)


def test_plot_strip_refuses_other_colourings(plt):
    with pytest.raises(ValueError, match="'request' or 'subpool', got 'page'"):
        inspect.plot_strip(unified(), by="page")
