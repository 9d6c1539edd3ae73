"""The split of a decode batch over thread blocks, run lane by lane without a GPU.

The kernel emits the split as MLIR for one warp. Here the same function runs on NumPy arrays of 32 lanes in place of MLIR
values, and its answer is compared with the definition.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from pallas_kernels.mla_decode import mosaic_schedule as schedule

LANES = np.arange(32)
TILE = schedule.TILE


def lanes(value) -> np.ndarray:
    return np.broadcast_to(np.asarray(value), (32,))


def unsigned(function):
    return lambda a, b: function(a.astype(np.int64) & 0xFFFFFFFF, b.astype(np.int64) & 0xFFFFFFFF).astype(
        np.int32
    )


def shuffle(_, value, other, clamp, kind):
    if kind == "up":
        source = LANES - other
        return np.where(source >= 0, value[np.maximum(source, 0)], value)
    assert kind == "idx"
    return value[other]


def lowest_bit(mask, _):
    return lanes([(int(m) & -int(m)).bit_length() - 1 if m else 32 for m in mask])


@pytest.fixture
def warp(monkeypatch):
    """Puts a NumPy warp in the place of the MLIR dialects. Arithmetic wraps at 32 bits, as on the device."""
    compare = {"slt": np.less, "eq": np.equal, "ne": np.not_equal, "ule": unsigned(np.less_equal)}
    arith = SimpleNamespace(
        constant=lambda _, value: lanes(np.int32(value)),
        addi=np.add, subi=np.subtract, muli=np.multiply, andi=np.logical_and,
        maxsi=np.maximum, minsi=np.minimum, maxui=unsigned(np.maximum), minui=unsigned(np.minimum),
        divui=unsigned(np.floor_divide), remui=unsigned(np.mod),
        select=np.where, index_cast=lambda _, value: value,
        cmpi=lambda predicate, a, b: compare[predicate](a, b).astype(bool),
        CmpIPredicate=SimpleNamespace(slt="slt", eq="eq", ne="ne", ule="ule"),
    )  # fmt: skip
    kinds = SimpleNamespace(up="up", idx="idx")
    reductions = SimpleNamespace(ADD=np.sum, MIN=np.min, MAX=np.max)
    reduce = lambda value, _, kind: lanes(np.int32(kind(value)))
    ballot = lambda _, flag, kind: lanes(
        np.int32(np.uint32(sum(int(f) << i for i, f in enumerate(flag))).view(np.int32))
    )
    nvvm = SimpleNamespace(
        shfl_sync=shuffle, ShflKind=kinds, vote_sync=ballot, VoteSyncKind=SimpleNamespace(ballot="ballot")
    )
    ir = SimpleNamespace(
        IntegerType=SimpleNamespace(get_signless=lambda _: None),
        IndexType=SimpleNamespace(get=lambda: None),
        IntegerAttr=SimpleNamespace(get=lambda _, value: value),
    )

    def store(value, out, at):
        assert (value == value[0]).all()  # every lane must agree
        out[at[0][0]] = value[0]

    def repeat(trips, carry, body):
        for i in range(trips):
            carry = body(lanes(np.int32(i)), carry)
        return carry

    for name, value in dict(
        arith=arith, nvvm=nvvm, ir=ir, _repeat=repeat,
        gpu=SimpleNamespace(thread_id=lambda _: LANES.astype(np.int32) + 64, Dimension=SimpleNamespace(x="x")),
        llvm=SimpleNamespace(intr_cttz=lowest_bit),
        memref=SimpleNamespace(load=lambda ref, at: ref[at[0]], store=store),
        mgpu=SimpleNamespace(utils=SimpleNamespace(redux=reduce, ReductionKind=reductions)),
        kernel_start=SimpleNamespace(insertion_point=nullcontext, outer=lambda ref: ref),
    ).items():  # fmt: skip
        monkeypatch.setattr(schedule, name, value)

    def shares(kv_start, kv_end, groups, q_start=None, s_q=1, width_tokens=1 << 30, reach=None, **stream):
        ranges = [np.asarray(x, np.int32) for x in (kv_start, kv_end, q_start) if x is not None]
        found = []
        for group in range(groups):
            out = np.full(8, -9, np.int32)
            schedule._emit_find_share(
                ranges,
                len(ranges[0]),
                lanes(np.int32(group)),
                groups,
                out,
                width_tokens,
                s_q,
                reach,
                **stream,
            )
            found.append(schedule.Share(*(int(x) for x in out[: len(schedule.Share._fields)])))
        return found

    return shares


def parts(shares, tiles):
    """{row: [(group, start, stop)]} of the tiles, and {row: groups that own its first unit}."""
    rows, owners = {}, {}
    for group, share in enumerate(shares):
        for row in range(share.first, min(share.last + 1, len(tiles))):
            start = max(share.first_offset - share.overhead, 0) if row == share.first else 0
            stop = max(share.last_offset - share.overhead, 0) if row == share.last else tiles[row]
            if stop > start:
                rows.setdefault(row, []).append((group, start, stop))
            if bool(schedule.owns_start(share, row)):
                owners.setdefault(row, []).append(group)
    return rows, owners


def check(shares, tiles):
    """Every tile once, in order, parts of a row in consecutive groups, one owner a row."""
    rows, owners = parts(shares, tiles)
    for row, count in enumerate(tiles):
        covered = 0
        for group, start, stop in rows.get(row, []):
            assert start == covered
            assert group == rows[row][0][0] + len([p for p in rows[row] if p[0] < group])
            covered = stop
        assert covered == count
        assert len(owners.get(row, [])) == 1


@pytest.mark.parametrize("batch", [1, 2, 31, 32, 33, 64, 100, 128, 129, 300, 512, 1100])
@pytest.mark.parametrize("groups", [1, 8, 66, 132])
def test_every_tile_is_dealt_once(warp, batch, groups):
    rng = np.random.default_rng([batch, groups])
    kv_end = rng.integers(0, 9000, batch) * rng.integers(0, 2, batch)
    tiles = -(-kv_end // TILE)
    shares = warp(np.zeros(batch), kv_end, groups)
    check(shares, tiles)
    busiest = max(
        sum(stop - start for p in parts([s], tiles)[0].values() for _, start, stop in p) for s in shares
    )
    assert busiest <= -(-(tiles.sum() + batch * schedule._OVERHEAD) // groups)


def test_windows_causal_ends_and_narrow_tables(warp):
    rng = np.random.default_rng(0)
    kv_end = rng.integers(0, 3000, 70)
    kv_start = rng.integers(-5, 2000, 70)
    q_start = kv_end - rng.integers(0, 9, 70)
    shares = warp(kv_start, kv_end, 20, q_start=q_start, s_q=4, width_tokens=2048)
    start, stop = np.maximum(kv_start, 0), np.minimum(np.minimum(kv_end, 2048), q_start + 4)
    check(shares, np.where(stop > start, -(-stop // TILE) - start // TILE, 0))


@pytest.mark.parametrize(
    "batch, length, groups, parts_of_a_row, most_tiles",
    [
        (128, 4096, 132, 1, 64),  # a row a group, four groups idle
        (32, 8192, 132, 4, 32),
        (8, 8192, 132, 16, 8),
        (1, 131072, 132, 128, 16),
        (256, 4096, 132, 1, 128),
        (128, 4096, 66, 1, 128),
    ],
)
def test_rows_of_one_length_are_cut_evenly(warp, batch, length, groups, parts_of_a_row, most_tiles):
    tiles = np.full(batch, length // TILE)
    shares = warp(np.zeros(batch), np.full(batch, length), groups)
    check(shares, tiles)
    rows, _ = parts(shares, tiles)
    assert {len(p) for p in rows.values()} == {parts_of_a_row}
    assert (
        max(sum(stop - start for p in parts([s], tiles)[0].values() for _, start, stop in p) for s in shares)
        == most_tiles
    )


@pytest.mark.parametrize(
    "batch, tiles, groups, most", [(8, 512, 33, 126), (11, 129, 33, 43), (64, 128, 66, 128)]
)
def test_even_cuts_may_be_asked_to_cost_no_balance(warp, batch, tiles, groups, most):
    """8 rows in 4 groups each would leave one of 33 idle, 11 rows would not; whole rows may leave two of 66 idle."""
    shares = warp(np.zeros(batch), np.full(batch, tiles * TILE), groups, cut_evenly=False)
    tiles = np.full(batch, tiles)
    check(shares, tiles)
    assert most == max(
        sum(stop - start for p in parts([s], tiles)[0].values() for _, start, stop in p) for s in shares
    )


def test_one_length_that_would_leave_a_quarter_idle_is_cut_anyway(warp):
    tiles = np.full(100, 64)
    shares = warp(np.zeros(100), np.full(100, 4096), 132)
    check(shares, tiles)
    assert max(len(p) for p in parts(shares, tiles)[0].values()) > 1


def test_all_rows_empty(warp):
    shares = warp(np.zeros(40), np.zeros(40), 132)
    check(shares, np.zeros(40, int))


@pytest.mark.parametrize("s_q", [None, 3])
def test_a_window_moves_the_start_of_rows(warp, s_q):
    rng = np.random.default_rng(5)
    kv_end = rng.integers(0, 5000, 70)
    kv_start = np.minimum(rng.integers(0, 800, 70), kv_end)
    q_start = None if s_q is None else kv_end - rng.integers(1, s_q + 1, 70)
    q_stop = kv_end if s_q is None else q_start + s_q
    options = {"q_start": q_start, "s_q": s_q or 1}
    windowed = warp(kv_start, kv_end, 9, reach=600, **options)
    assert windowed == warp(np.maximum(kv_start, q_stop - 600), kv_end, 9, **options)
    assert windowed != warp(kv_start, kv_end, 9, **options)


def test_a_row_of_a_stream_has_no_more_tiles_than_ids(warp):
    """Where `indptr` gives a row less room than its range, or the stream ends in it."""
    rng = np.random.default_rng(6)
    kv_start, room = rng.integers(-3, 300, 70), rng.integers(0, 2000, 70)
    kv_end = kv_start + room + rng.integers(-5, 400, 70) * rng.integers(0, 2, 70)
    indptr = np.concatenate([[0], np.cumsum(room)]).astype(np.int32)
    capacity = int(indptr[60]) + 100
    shares = warp(kv_start, kv_end, 20, indptr=indptr, capacity=capacity)
    stop = np.minimum(kv_end, kv_start + np.minimum(indptr[1:], capacity) - indptr[:-1])
    start = np.maximum(kv_start, 0)
    check(shares, np.where(stop > start, -(-stop // TILE) - start // TILE, 0))
