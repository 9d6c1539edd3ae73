"""verify must see every kind of damage: a sound state is broken in one place, and the message must name it."""

import functools
from dataclasses import replace

import pytest

from tests.pool.cases import FULL, LAYOUTS, STATE, SWA, craft, ints
from ukv_jax import pool, verify
from ukv_jax.layout import StaticLayout, UnifiedLayout

UNIFIED = UnifiedLayout.from_bytes(
    (STATE, SWA, FULL), total_bytes=5760, page_size=4, max_requests=4, max_tokens=24
)
STATIC = StaticLayout.from_pages(
    (STATE, SWA, FULL), pages={"state": 4, "swa": 8, "full": 12}, page_size=4, max_requests=4, max_tokens=24
)


@functools.cache
def unified():
    """Two requests; holes: slot 2; window pages 13, 15, 16; full page 32. Page 1 is a window tombstone."""
    return craft(
        UNIFIED,
        [[1, 2, 3], [4, 5]],
        {
            "state": {1: 3, 2: 1},
            "swa": {2: 14, 3: 17, 4: 12, 5: 18},
            "full": {1: 35, 2: 31, 3: 34, 4: 30, 5: 33},
        },
        {"state": (1, 4), "swa": (12, 19), "full": (30, 36)},
    )


@functools.cache
def static():
    return craft(
        STATIC,
        [[1, 2, 3], [4, 5]],
        {"state": {1: 1, 2: 2}, "swa": {2: 5, 3: 1, 4: 2, 5: 3}, "full": {v: v for v in range(1, 6)}},
        {"swa": (1, 7)},
    )


def edit(name, **changes):
    """Changes fields of one sub-pool: a value, or (index, value) in an array."""

    def apply(state):
        p = state.subpool(name)
        new = {}
        for field, change in changes.items():
            if isinstance(change, tuple):
                new[field] = getattr(p, field).at[change[0]].set(change[1])
            else:
                new[field] = ints(change)
        return pool.with_subpool(state, state.layout.index(name), replace(p, **new))

    return apply


def request(**changes):
    def apply(state):
        new = {
            field: getattr(state.requests, field).at[at].set(value) for field, (at, value) in changes.items()
        }
        return replace(state, requests=replace(state.requests, **new))

    return apply


def byte(at, value=1):
    return lambda state: replace(state, buffer=state.buffer.at[at].set(value))


@pytest.mark.parametrize("make", [unified, static])
def test_sound_states_have_no_message(make):
    assert verify.verify(make()) == []
    verify.check(make())


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_new_pool_is_sound(name):
    verify.check(pool.init(LAYOUTS[name]))


@pytest.mark.parametrize(
    "damage, message",
    [
        # 1: v2p and p2v are inverse.
        (edit("full", v2p=(2, 34)), r"full: v2p\[2\] = 34, but p2v\[34\] = 3"),
        (edit("full", p2v=(32, 2)), r"full: p2v\[32\] = 2, but v2p\[2\] = 31"),
        (edit("full", v2p=(2, 99)), r"full: v2p rows 2 hold 99: neither -1 nor in \[1, 36\)"),
        (edit("full", v2p=(2, 0)), "full: v2p rows 2 hold 0"),
        (edit("full", p2v=(31, -3)), "full: p2v rows 31 hold -3"),
        # 3: live, holes, free ids.
        (
            edit("swa", hole_count=2),
            r"swa: 4 live pages \+ 2 holes are not the 7 pages of the band \[12, 19\)",
        ),
        (edit("swa", holes=(1, 13)), "swa: holes hold 13 more than once"),
        (edit("swa", holes=(0, 14)), "swa: holes hold 14, which are live"),
        (edit("swa", holes=(0, 0)), r"swa: holes hold 0: outside \[1, 45\)"),
        (edit("swa", holes=(0, -1)), "swa: holes hold -1"),
        (edit("swa", holes=(0, 20)), r"swa: holes 20 lie outside the band \[12, 19\)"),
        (edit("swa", high=18), "swa: live pages 18 lie outside the band"),
        (edit("swa", hole_count=-1), r"swa: holes count -1 is outside \[0, 45\]"),
        (edit("full", free_ids=(0, 3)), "full: free ids hold 3, which are live"),
        (edit("full", free_ids=(0, 0)), r"full: free ids hold 0: outside \[1, 36\)"),
        (edit("full", free_ids=(0, -1)), "full: free ids hold -1"),
        (edit("full", free_ids=(0, 34)), "full: free ids hold 34 more than once"),
        (edit("full", free_count=29), r"full: 5 live ids \+ 29 free ids are not the 35 ids"),
        (edit("state", free_count=3), r"state: 2 live ids \+ 3 free ids are not the 4 ids"),
        # 4: bands.
        (edit("swa", low=2, high=9), r"swa: band \[2, 9\) does not lie in \[3, 45\)"),
        (edit("full", high=35), "full: grows down from page 36, its band ends at 35"),
        (edit("state", low=2), "state: grows up from page 1, its band begins at 2"),
        (edit("state", high=5), r"swa: band begins at byte 1536, state ends at 1920"),
        (edit("full", low=12), r"full: band begins at byte 1920, swa ends at 2432"),
        # 5: padding rows, last rows, padding bytes.
        (edit("full", v2p=(0, 5)), r"full: v2p\[0\] is 5, the padding row must be 0"),
        (edit("full", p2v=(0, -1)), r"full: p2v\[0\] is -1"),
        (edit("full", v2p=(36, 0)), r"full: v2p\[36\] is 0, the last row must be -1"),
        (edit("full", p2v=(36, 7)), r"full: p2v\[36\] is 7, the last row must be -1"),
        (byte(0), "full: padding page has bytes that are not zero in blocks 0 of region 'kv'"),
        (byte(130), "state: padding page has bytes that are not zero in blocks 0 of region 'recurrent'"),
        # 6: request maps.
        (edit("full", refs=(2, 2)), r"full: refs\[2\] is 2, 1 requests hold the page"),
        (edit("full", refs=(9, 1)), "full: virtual pages 9 have holders and are not live"),
        (edit("full", refs=(2, 0)), "full: virtual pages 2 are live and have no holder"),
        (edit("full", refs=(2, -1)), "full: refs of pages 2 are negative"),
        (edit("swa", refs=(2, 3)), r"swa: refs\[2\] is 3, 1 requests hold the page"),
        (edit("state", refs=(1, 2)), r"state: refs\[1\] is 2, 1 requests hold the page"),
        (request(pages=((1, 0), 2)), r"full: refs\[2\] is 1, 2 requests hold the page"),
        (request(pages=((0, 1), 1)), "requests 0 hold a page twice"),
        (request(pages=((0, 1), -1)), "requests 0 have a hole or the padding page among their pages"),
        (request(pages=((0, 1), 0)), "requests 0 have a hole or the padding page among their pages"),
        (request(pages=((0, 1), 77)), r"full: requests hold ids 77, outside \[1, 36\)"),
        (request(pages=((0, 4), 3)), "requests 0 name pages behind their page count"),
        (request(page_count=(1, 9)), r"requests 1 have a page count outside \[0, 6\]"),
        (request(seq_len=(1, 9)), "requests 1 are longer than their pages"),
        (request(seq_len=(3, 1)), "requests 3 are free, yet hold something"),
        (request(slots=(3, 2)), "requests 3 are free, yet hold something"),
        (request(slots=(1, 1)), r"state: refs\[1\] is 1, 2 requests hold the page"),
        (request(status=(0, 7)), "requests 0 have no known status"),
        (request(window_first=((0, 0), 4)), "requests 0 begin their window behind their pages"),
        (request(window_first=((0, 0), 0)), r"swa: refs\[1\] is 0, 1 requests hold the page"),
        (request(page_to_req=(2, 1)), r"page_to_req\[2\] is 1, which does not hold the page"),
        (request(page_to_req=(9, 0)), r"page_to_req\[9\] is 0, which does not hold the page"),
        (request(page_to_req=(0, 0)), r"page_to_req\[0\] is 0, nobody writes the padding page"),
        (request(page_to_req=(1, 4)), r"page_to_req\[1\] is 4, which does not hold the page"),
        (lambda state: replace(state, gate=ints(-1)), "gate is -1, below zero"),
    ],
)
def test_damage_is_named(damage, message):
    with pytest.raises(AssertionError, match=message):
        verify.check(damage(unified()))


@pytest.mark.parametrize(
    "damage, message",
    [
        (edit("full", v2p=(2, 7), p2v=(7, 2)), r"full: p2v\[2\] = 2, but v2p\[2\] = 7"),
        (edit("full", hole_count=1), "full: 1 holes listed, a static owner keeps none"),
        (edit("swa", high=8), r"swa: 4 live pages \+ 2 holes are not the 7 pages"),
        (edit("swa", holes=(0, 5)), "swa: holes hold 5, which are live"),
    ],
)
def test_damage_of_a_static_split_is_named(damage, message):
    with pytest.raises(AssertionError, match=message):
        verify.check(damage(static()))


def test_padding_of_every_static_region_is_watched():
    state = static()
    for spec in STATIC.subpools:
        for region in spec.regions:
            block = spec.block_offset(region.count - 1, region.name)
            (message,) = verify.verify(byte(block * region.block_bytes)(state))
            assert message.startswith(
                f"{spec.name}: padding page has bytes that are not zero in blocks {region.count - 1}"
            )


def test_wrong_shapes_and_dtypes_are_named():
    state = unified()
    p = replace(state.subpool("full"), v2p=state.subpool("full").v2p[:-1])
    with pytest.raises(AssertionError, match=r"full: v2p is int32\[36\], expected int32\[37\]"):
        verify.check(pool.with_subpool(state, 2, p))
    p = replace(state.subpool("full"), refs=state.subpool("full").refs.astype("int16"))
    with pytest.raises(AssertionError, match=r"full: refs is int16\[36\], expected int32\[36\]"):
        verify.check(pool.with_subpool(state, 2, p))


def test_check_counts_its_messages():
    state = request(page_to_req=(0, 0))(byte(0)(unified()))
    with pytest.raises(AssertionError, match=r"^4 broken rules:"):
        verify.check(state)  # byte 0 belongs to the padding page of all three
