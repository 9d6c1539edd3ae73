"""Envelopes, blocks, sizes and bounds: the arithmetic of bytes."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.pool import cases
from tests.pool.cases import LAYOUTS, page_bytes_of
from ukv_jax.layout import (
    KVSpec,
    MLASpec,
    PoolLayout,
    StatePart,
    StateSpec,
    StaticLayout,
    SubPool,
    UnifiedLayout,
)

# Kimi-Linear 48B: 20 KDA layers (32 heads, 128 x 128 f32 state; conv width 4 over q, k and v of 4096) and 7 MLA layers.
KDA = StateSpec(
    (StatePart("conv", 20, 3 * 3, (4096,), "bfloat16"), StatePart("recurrent", 20, 32, (128, 128), "float32"))
)
KIMI_MLA = MLASpec(num_layers=7, kv_lora_rank=512, qk_rope_head_dim=64)

LIMITS = dict(page_size=64, max_requests=8, max_tokens=4096)


def layout_of(*specs, total_bytes: int, **kwargs) -> UnifiedLayout:
    return UnifiedLayout.from_bytes(specs, total_bytes=total_bytes, **{**LIMITS, **kwargs})


def subpool(spec, page_size: int = 4) -> SubPool:
    """The sub-pool of one spec, in a pool of its own (state beside a small MLA sub-pool)."""
    specs = (spec, MLASpec(1, 4, 0)) if isinstance(spec, StateSpec) else (spec,)
    layout = layout_of(*specs, total_bytes=4 << 20, page_size=page_size, max_tokens=page_size, max_requests=1)
    return layout[spec.name]


def test_kimi_linear_slot_is_padded_to_its_blocks():
    slot = layout_of(KDA, KIMI_MLA, total_bytes=2 << 30)["state"]
    assert 20 * (3 * 3 * 4096 * 2 + 32 * 128 * 128 * 4) == 43_417_600
    assert slot.page_bytes == 43_450_368
    assert slot.region("recurrent").offset == 1_507_328  # 1,474,560 bytes of conv, up to a multiple of 65,536
    assert slot.stride("recurrent") * 65_536 == slot.page_bytes


@pytest.mark.parametrize(
    "spec, page_size, blocks, page_bytes",
    [
        (KIMI_MLA, 64, {"kv": 7}, 7 * 64 * 576 * 2),
        (MLASpec(2, 8, 4), 4, {"kv": 2}, 2 * 4 * 12 * 2),
        (MLASpec(1, 512, 64), 64, {"kv": 1}, 64 * 576 * 2),  # B = 1 and unified all the same
        (KVSpec(3, 8, 128), 16, {"kv": 6}, 6 * 16 * 1024 * 2),
        (KVSpec(3, 2, 8, v_head_dim=4, dtype="float32"), 4, {"kv": 3}, 3 * 4 * 24 * 4),
        # 640 bytes a row: 576 e4m3 elements, a 4-byte scale, padding
        (MLASpec(7, 512, 64, dtype="float8_e4m3fn"), 64, {"kv": 7}, 7 * 64 * 640),
    ],
)
def test_blocks_of_a_page(spec, page_size, blocks, page_bytes):
    s = subpool(spec, page_size)
    assert s.page_bytes == page_bytes
    assert {r.name: s.stride(r.name) for r in s.regions} == blocks
    assert {r.name: r.count for r in s.regions} == blocks


def test_fp8_kv_keeps_its_scales_beside_the_rows():
    s = subpool(KVSpec(2, 2, 16, dtype="float8_e4m3fn"), 4)
    kv, scale = s.region("kv"), s.region("scale")
    assert (kv.count, kv.block_bytes) == (4, 4 * 32)
    assert (scale.count, scale.block_bytes) == (
        4,
        4 * 2 * 4,
    )  # K and V of each layer: a token, a head, 4 bytes
    assert scale.offset >= kv.count * kv.block_bytes
    assert s.page_bytes % kv.block_bytes == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_offsets_and_envelopes_are_multiples_of_their_blocks(name):
    layout = LAYOUTS[name]
    for s in layout.subpools:
        for r in s.regions:
            assert r.offset % r.block_bytes == 0
            assert s.page_bytes % r.block_bytes == 0
            assert layout.total_bytes % r.block_bytes == 0, "a view would cut a tail"
        ends = [r.offset + r.count * r.block_bytes for r in s.regions]
        assert all(end <= start.offset for end, start in zip(ends, s.regions[1:]))
        assert ends[-1] <= s.page_bytes


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_of_one_subpool_never_overlap(name):
    """A pattern through (page, block) of every region: every byte is written once, inside the buffer."""
    layout = LAYOUTS[name]
    for s in layout.subpools:
        times = np.zeros(layout.total_bytes, int)
        for page in range(s.num_pages):
            at = page_bytes_of(s, page)
            assert at.min() >= 0
            np.add.at(times, at, 1)
            if isinstance(layout, UnifiedLayout):  # page-major: all of a page lies in its envelope
                assert page * s.page_bytes <= at.min()
                assert at.max() < (page + 1) * s.page_bytes
        assert times.max() == 1
        assert times.sum() == s.num_pages * sum(r.count * r.block_bytes for r in s.regions)


def test_static_regions_never_overlap():
    layout = LAYOUTS["static"]
    times = np.zeros(layout.total_bytes, int)
    for s in layout.subpools:
        for page in range(s.num_pages):
            np.add.at(times, page_bytes_of(s, page), 1)
    assert times.max() == 1


def test_static_split_is_layer_major():
    """Block j of a static page lies num_pages blocks behind block j - 1, and its entry is the page itself."""
    full = LAYOUTS["static"]["full"]
    assert full.stride() == 1
    assert full.block_offset(1) - full.block_offset(0) == full.num_pages


@pytest.mark.parametrize("name", [n for n in LAYOUTS if n != "static"])
def test_reserved_bottom_holds_every_padding_page(name):
    layout = LAYOUTS[name]
    assert layout.reserved_bytes == max(s.page_bytes for s in layout.subpools)
    for s in layout.subpools:
        assert s.first_page * s.page_bytes >= layout.reserved_bytes
        assert (s.first_page - 1) * s.page_bytes < layout.reserved_bytes, "a page was given away"


def test_chain_order():
    specs = (cases.FULL, cases.SWA, cases.STATE, cases.LONG_SWA)
    layout = layout_of(*specs, total_bytes=1 << 20, page_size=4, max_tokens=16)
    assert [s.name for s in layout.subpools] == ["state", "swa", "swa_long", "full"]
    assert layout.full.name == "full"
    assert [s.name for s in layout.windows] == ["swa", "swa_long"]
    assert not layout["swa"].owns_ids


def test_window_has_a_row_for_every_id_of_the_owner():
    """Not as many as it has pages: a narrow window page grid is longer or shorter than the owner's ids."""
    for name in ("swa_full", "state_swa_full", "two_floats", "static"):
        layout = LAYOUTS[name]
        for s in layout.windows:
            assert s.num_virtual == layout.full.num_virtual
    assert any(s.num_virtual > s.num_pages for s in LAYOUTS["static"].windows)


def test_total_is_rounded_down_to_whole_blocks():
    layout = layout_of(KDA, KIMI_MLA, total_bytes=(2 << 30) + 12_345)
    unit = math.lcm(65_536, 8192, 64 * 576 * 2)
    assert layout.total_bytes == ((2 << 30) + 12_345) // unit * unit


@pytest.mark.parametrize(
    "specs",
    [
        (cases.MLA,),
        (cases.MLA, cases.STATE),
        (cases.SWA, cases.FULL_WIDE),
        (cases.STATE, cases.SWA, cases.FULL),
        (cases.STATE, cases.LONG_SWA, cases.SWA, cases.FULL),
        (KDA, KIMI_MLA),
    ],
    ids=["mla", "mla-state", "swa-full", "state-swa-full", "two-floats", "kimi"],
)
def test_smallest_pool(specs):
    """The error names the smallest pool; that size is accepted, one block less is not."""
    with pytest.raises(ValueError, match="cannot hold one request of 24 tokens") as error:
        layout_of(*specs, total_bytes=1, page_size=4, max_tokens=24)
    need = int(str(error.value).split("has ")[-1].split(" bytes")[0])
    smallest = layout_of(*specs, total_bytes=need, page_size=4, max_tokens=24)
    assert smallest.total_bytes == need
    with pytest.raises(ValueError, match=f"has {need} bytes"):
        layout_of(*specs, total_bytes=need - 1, page_size=4, max_tokens=24)


def test_from_tokens_holds_what_it_says():
    layout = UnifiedLayout.from_tokens(
        (cases.STATE, cases.SWA, cases.FULL), tokens=100, requests=3, page_size=4, max_tokens=40
    )
    assert layout.max_requests == 3
    edge = layout.reserved_bytes
    for s, pages in zip(layout.subpools, (3, 25, 25)):
        edge = -(-edge // s.page_bytes) * s.page_bytes + pages * s.page_bytes
    assert edge <= layout.total_bytes < edge + layout.block_lcm
    assert layout.full.num_virtual > 25
    assert layout["state"].num_virtual == 4


# Bounds: every one is an error at construction, with the numbers in its text.


def test_kernel_facing_ids_fit_int32():
    # 1 layer, page size 64, rows of 2 bytes: a byte budget of 2**32 has 2**31 rows.
    spec = MLASpec(1, 1, 0)
    with pytest.raises(
        ValueError,
        match=r"\(33554432 pages \* 1 blocks \+ 0 below\) \* 64 rows = 2147483648 .* int32 allows 2147483647",
    ):
        layout_of(spec, total_bytes=2**32, num_virtual=1000)
    layout_of(spec, total_bytes=2**32 - 128, num_virtual=1000)


@pytest.mark.parametrize("heads, width", [(8, 64), (8, 128), (2, 256), (1, 512)])
@pytest.mark.parametrize("page_size", [16, 64])
def test_scales_of_a_hundred_gigabytes_are_counted_in_blocks(heads, width, page_size):
    """More rows of scales than int32 counts, in a pool whose rows of K and V are few."""
    spec = KVSpec(12, heads, width, dtype="float8_e4m3fn")
    layout = layout_of(spec, total_bytes=100 * 10**9, page_size=page_size)
    assert layout.total_bytes // (4 * heads) > 2**31
    static = StaticLayout.from_pages(
        (spec,), pages={"full": layout.full.num_pages - 1}, **{**LIMITS, "page_size": page_size}
    )
    for s in (layout.full, static.full):
        assert s.block_offset(23, "scale") + (s.num_pages - 1) * s.stride("scale") < 2**31


def test_blocks_of_scales_fit_int32():
    """Page size 1: a block is a row, and 8.6 GB have 2**31 of 4 bytes."""
    spec = KVSpec(1, 1, 64, dtype="float8_e4m3fn")
    with pytest.raises(
        ValueError, match=r"= 2147\d{6} blocks of scales, int32 allows 2147483647; larger pages"
    ):
        layout_of(spec, total_bytes=2**33 + 8192, page_size=1, num_virtual=5000)
    layout_of(spec, total_bytes=2**33 - 8192, page_size=1, num_virtual=5000)


def test_virtual_ids_fit_int32_under_dcp():
    spec = MLASpec(1, 512, 64)
    text = r"8388608 virtual pages \* 64 tokens \* dcp 4 = 2147483648"
    with pytest.raises(ValueError, match=text):
        layout_of(spec, total_bytes=1 << 30, num_virtual=2**23, dcp=4)
    layout_of(spec, total_bytes=1 << 30, num_virtual=2**23 - 1, dcp=4)


def test_granules_fit_int32():
    # Pages of 1024 and 1028 bytes: byte arithmetic counts in units of 4, and 9 GB are more than 2**31 of them.
    specs = (KVSpec(1, 1, 256, window=8, name="swa"), KVSpec(1, 1, 257))
    with pytest.raises(ValueError, match=r"in units of 4 .*\[1024, 1028\].* larger common divisor"):
        layout_of(*specs, total_bytes=9_000_000_000, page_size=1, max_tokens=16)
    layout_of(*specs, total_bytes=8_000_000_000, page_size=1, max_tokens=16)


def test_move_bound_below_a_page():
    with pytest.raises(ValueError, match=r"move_bytes 1000 is below the largest page of 43450368 bytes"):
        layout_of(KDA, KIMI_MLA, total_bytes=2 << 30, move_bytes=1000)


def test_ids_for_one_request():
    with pytest.raises(ValueError, match=r"64 virtual ids cannot name the 64 pages"):
        layout_of(KIMI_MLA, total_bytes=1 << 30, num_virtual=64)
    layout_of(KIMI_MLA, total_bytes=1 << 30, num_virtual=65)


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: MLASpec(0, 8, 4), "num_layers must be at least 1, got 0"),
        (lambda: MLASpec(1, 8, -1), "qk_rope_head_dim must not be negative, got -1"),
        (lambda: MLASpec(1, 8, 4, dtype="int8"), "dtype 'int8' is not stored"),
        (lambda: KVSpec(1, 0, 8), "num_kv_heads must be at least 1, got 0"),
        (lambda: KVSpec(1, 1, 8, window=0), "window must be at least 1, got 0"),
        (lambda: StateSpec(()), "distinct names"),
        (lambda: StatePart("conv", 1, 1, (), "float32"), "needs a block shape"),
        (
            lambda: StatePart("conv", 1, 1, (4, 0), "float32"),
            r"conv.block_shape\[1\] must be at least 1, got 0",
        ),
        (lambda: layout_of(cases.MLA, cases.FULL, total_bytes=1 << 20), "sub-pool names must differ"),
        (
            lambda: layout_of(cases.MLA, KVSpec(1, 1, 8, name="other"), total_bytes=1 << 20),
            "one full-attention sub-pool and at most one state sub-pool, got 2 and 0",
        ),
        (lambda: layout_of(cases.STATE, total_bytes=1 << 20), "got 0 and 1"),
        (
            lambda: layout_of(cases.MLA, total_bytes=1 << 20, page_size=0),
            "page_size must be at least 1, got 0",
        ),
        (lambda: layout_of(cases.MLA, total_bytes=1 << 20, dcp=0), "dcp must be at least 1, got 0"),
        (lambda: LAYOUTS["mla"]["swa"], r"no sub-pool 'swa'; this layout has \['full'\]"),
        (lambda: LAYOUTS["mla"].full.region("conv"), r"no region 'conv'; it has \['kv'\]"),
        (lambda: LAYOUTS["mla"].full.block_offset(2), "block 2 of region 'kv': sub-pool 'full' has 2"),
        (
            lambda: StaticLayout.from_pages((cases.MLA,), pages={"full": 5}, **cases.COMMON),
            "has 5 pages; one request of 24 tokens takes 6",
        ),
        (lambda: StaticLayout.from_pages((cases.MLA,), pages={"kv": 9}, **cases.COMMON), "pages given for"),
        (
            lambda: layout_of(cases.MLA, total_bytes=1 << 20, move_bytes=0),
            "move_bytes 0 is below the largest page",
        ),
        (lambda: layout_of(cases.MLA, total_bytes=1 << 20, num_virtual=0), "0 virtual ids cannot name"),
        (
            # 8 GiB of state lie below blocks of 4 bytes: alone the ids of the upper range would fit.
            lambda: StaticLayout.from_pages(
                (
                    StateSpec((StatePart("recurrent", 1, 1, (1 << 20,), "float32"),)),
                    MLASpec(1, 1, 1, "bfloat16"),
                ),
                pages={"state": 2047, "full": 16},
                page_size=1,
                max_requests=4,
                max_tokens=16,
            ),
            r"'full': \(17 pages \* 1 blocks \+ 2147483648 below\) \* 1 rows = 2147483665 kernel-facing ids",
        ),
    ],
)
def test_errors_name_what_was_given(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_total_bytes_must_be_whole_blocks():
    layout = LAYOUTS["mla"]
    with pytest.raises(ValueError, match=f"total bytes {layout.total_bytes - 1} are no multiple"):
        replace(layout, total_bytes=layout.total_bytes - 1)


def test_layouts_are_hashable_and_compare_by_value():
    again: PoolLayout = UnifiedLayout.from_bytes((cases.MLA,), total_bytes=192 * 18, **cases.COMMON)
    assert again == LAYOUTS["mla"]
    assert hash(again) == hash(LAYOUTS["mla"])


# Numbers that the smallest page sizes make.


def test_reserved_bottom_of_mixed_envelopes():
    """24 bytes a token at page size 4 and a slot of 100 bytes: 100 bytes, page 2 of the first, slot 1 of the state."""
    kv = MLASpec(1, 12, 0)  # 12 bfloat16
    state = StateSpec((StatePart("recurrent", 1, 1, (25,), "float32"),))
    layout = layout_of(kv, state, total_bytes=100_000, page_size=4, max_tokens=16)
    assert (layout["full"].page_bytes, layout["state"].page_bytes) == (96, 100)
    assert layout.reserved_bytes == 100
    assert layout["full"].first_page == 2
    assert layout["state"].first_page == 1


def test_static_split_in_proportion():
    """A static split by bytes holds its mean requests in every sub-pool and stays within the bytes."""
    specs = (cases.STATE, cases.SWA, cases.FULL)
    layout = StaticLayout.from_bytes(
        specs, total_bytes=20_000, mean_tokens=16, page_size=4, max_requests=32, max_tokens=24
    )
    assert layout.total_bytes <= 20_000
    # A mean request takes one slot, 7 of 4 tokens in the window and 16 of 4 in full attention.
    held = [(s.num_pages - 1) / {"state": 1, "swa": 7 / 4, "full": 16 / 4}[s.name] for s in layout.subpools]
    assert max(held) - min(held) < 1, "one sub-pool runs out long before another"
    assert min(held) > 14_000 / (384 + 128 * 7 / 4 + 160 * 16 / 4), "bytes were left over"
    with pytest.raises(ValueError, match="one mean request takes"):
        StaticLayout.from_bytes(
            specs, total_bytes=700, mean_tokens=16, page_size=4, max_requests=32, max_tokens=24
        )
    # Under DCP a page holds twice the tokens, so the longest request takes half the pages.
    cramped = dict(total_bytes=5400, mean_tokens=16, page_size=4, max_requests=1, max_tokens=40)
    with pytest.raises(ValueError, match=r"one request of 40 tokens takes .*'full': 10"):
        StaticLayout.from_bytes((cases.STATE, cases.FULL), **cramped)
    assert StaticLayout.from_bytes((cases.STATE, cases.FULL), dcp=2, **cramped).full.num_pages == 6


def test_dcp_pages_stand_for_more_tokens():
    """Under DCP a virtual page is page_size * dcp tokens: the full pool stores a rank's share of them, windows all."""
    specs = (cases.STATE, cases.SWA, cases.FULL)
    one = layout_of(*specs, total_bytes=1 << 16, page_size=4, max_tokens=64)
    two = layout_of(*specs, total_bytes=1 << 16, page_size=4, max_tokens=64, dcp=2)
    assert (one.max_pages, two.max_pages) == (16, 8)
    assert (one.max_tokens, two.max_tokens) == (64, 64)
    assert (two["full"].page_size, two["full"].page_bytes) == (4, one["full"].page_bytes)
    assert (two["swa"].page_size, two["swa"].page_bytes) == (8, 2 * one["swa"].page_bytes)
