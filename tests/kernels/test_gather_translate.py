"""Tables, streams and write locations against plain Python, for every implementation."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.gather_translate import (
    addressing,
    fill_packed_read_stream,
    fill_read_table,
    fill_read_tables,
    mosaic_gpu,
    packed_indptr,
    translate_dcp_read_ids,
    translate_write_locs,
)
from tests.kernels.emulation import IMPLEMENTATIONS, run
from tests.kernels.paged_case import CAPTURED

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
POISON = -777

# The worked example: page size 4, two layers (B = 2); the request holds virtual pages 2, 4, 1.
V2P = [0, 5, 3, -1, 7, -1]
PAGES = [2, 4, 1]


def ints(*values) -> jax.Array:
    return jnp.array(values, jnp.int32)


def request_table(pages, granularity, page_size) -> jax.Array:
    if granularity == "page":
        return jnp.array([pages], jnp.int32)
    # Only a page's first token may be read: the others hold ids of a page that gives another answer.
    words = np.full((len(pages), page_size), page_size)
    words[:, 0] = [p * page_size if p >= 0 else p for p in pages]
    return jnp.asarray(words.reshape(1, -1), jnp.int32)


@every_implementation
@pytest.mark.parametrize("granularity", ["page", "token"])
class TestWorkedNumbers:
    def table(self, implementation, granularity, pages, v2p, length):
        words = request_table(pages, granularity, 4)
        table, tokens = run(
            implementation, fill_read_table, words, ints(*v2p), ints(length), page_size=4, blocks_per_page=2,
            granularity=granularity, zero_tail=True,
        )  # fmt: skip
        assert tokens.tolist() == [length]
        return table[0].tolist()

    def stream(self, implementation, granularity, pages, v2p, start, length):
        words = request_table(pages, granularity, 4)
        ids, lengths = run(
            implementation, fill_packed_read_stream, words, ints(*v2p), ints(start + length), ints(0, length),
            page_size=4,
            blocks_per_page=2, granularity=granularity, kv_start=ints(start), capacity=length,
        )  # fmt: skip
        assert lengths.tolist() == [length]
        return ids.tolist()

    def test_table(self, implementation, granularity):
        assert self.table(implementation, granularity, PAGES, V2P, 10) == [6, 14, 10]

    def test_stream(self, implementation, granularity):
        assert self.stream(implementation, granularity, PAGES, V2P, 0, 10) == [
            24, 25, 26, 27, 56, 57, 58, 59, 40, 41,
        ]  # fmt: skip

    def test_window(self, implementation, granularity):
        assert self.stream(implementation, granularity, PAGES, V2P, 3, 4) == [27, 56, 57, 58]

    @pytest.mark.parametrize("kind", ["tombstone", "hole"])
    def test_unbound_page_reads_as_padding(self, implementation, granularity, kind):
        pages = PAGES if kind == "tombstone" else [2, -1, 1]
        v2p = [0, 5, 3, -1, -1, -1] if kind == "tombstone" else V2P
        assert self.table(implementation, granularity, pages, v2p, 10) == [6, 0, 10]
        ids = self.stream(implementation, granularity, pages, v2p, 0, 10)
        assert ids == [24, 25, 26, 27, 0, 1, 2, 3, 40, 41]

    def test_static_pool_passes_pages_through(self, implementation, granularity):
        words = request_table([2, -1, 1], granularity, 4)
        table, _ = run(
            implementation, fill_read_table, words, None, ints(10), page_size=4, blocks_per_page=1,
            granularity=granularity,
        )  # fmt: skip
        assert table.tolist() == [[2, 0, 1]]


@every_implementation
class TestWriteLocations:
    translate = partial(translate_write_locs, page_size=4, blocks_per_page=2)

    def test_worked_numbers(self, implementation):
        locs = run(implementation, self.translate, ints(9, 0, 3, -3, 13, 5), ints(*V2P))
        assert locs.tolist() == [25, 0, 0, 0, 0, 41]

    def test_ids_past_the_table_are_dropped(self, implementation):
        locs = run(implementation, self.translate, ints(20, 23, 24, 10**6, 2**31 - 1, -(2**31)), ints(*V2P))
        assert locs.tolist() == [0] * 6

    @pytest.mark.parametrize("live", [0, 1, 2, 3, 99, jnp.int32(2)])
    def test_lanes_past_the_live_count(self, implementation, live):
        locs = run(implementation, self.translate, ints(9, 5, 18), ints(*V2P), live=live)
        assert locs.tolist() == [25, 41, 58][: int(live)] + [0] * max(3 - int(live), 0)

    @pytest.mark.parametrize("rank", [0, 1, jnp.int32(0), jnp.int32(1)])
    def test_only_the_owner_writes(self, implementation, rank):
        locs = run(implementation, self.translate, ints(19, 7, 0, -1), ints(*V2P), dcp_rank=rank, dcp_size=2)
        assert locs.tolist() == [25 if int(rank) == 1 else 0, 0, 0, 0]  # 7 < 4 * 2 is in page 0

    def test_static_pool(self, implementation):
        locs = run(
            implementation, translate_write_locs, ints(9, 3, -1, 4), None, page_size=4, blocks_per_page=1
        )
        assert locs.tolist() == [9, 0, 0, 4]

    @given(seed=st.integers(0, 2**32 - 1))
    @settings(max_examples=8)
    @pytest.mark.parametrize("page_size, dcp", [(1, 1), (4, 3), (16, 2), (12, 1)])
    def test_any_locations(self, implementation, page_size, dcp, seed):
        rng = np.random.default_rng(seed)
        v2p = rng.integers(-1, 60, 41)
        v2p[0], v2p[-1] = 0, -1
        locs = rng.integers(-5, 42 * page_size * dcp, 300)
        live, rank = rng.integers(0, 310), rng.integers(0, dcp)
        got = run(
            implementation, translate_write_locs, ints(*locs), ints(*v2p), page_size=page_size,
            blocks_per_page=3, live=jnp.int32(live), dcp_rank=jnp.int32(rank), dcp_size=dcp,
        )  # fmt: skip
        expected = []
        for lane, loc in enumerate(locs.tolist()):
            page = loc // (page_size * dcp) if loc >= 0 else 0
            if lane >= live or page <= 0 or page >= 41 or loc % dcp != rank or v2p[page] <= 0:
                expected.append(0)
            else:
                expected.append(int(v2p[page]) * 3 * page_size + loc // dcp % page_size)
        assert got.tolist() == expected


class TestDcpReads:
    translate = partial(translate_dcp_read_ids, page_size=4, blocks_per_page=2, dcp_size=2)

    def test_share_of_a_page(self):
        ids, own = self.translate(ints(17, 19, 21, 23), ints(*V2P), dcp_rank=1)
        assert ids.tolist() == [24, 25, 26, 27]
        assert own.tolist() == [True] * 4

    def test_ids_of_other_ranks(self):
        ids, own = self.translate(ints(16, 17, 18, 19), ints(*V2P), dcp_rank=jnp.int32(0))
        assert own.tolist() == [True, False, True, False]
        assert ids.tolist() == [24, 0, 25, 0]

    def test_bad_ids_read_the_padding_page(self):
        ids, _ = self.translate(ints(-1, 27, 10**6 + 1), ints(*V2P), dcp_rank=1)
        assert ids.tolist() == [0, 13 % 4, (10**6 + 1) // 2 % 4]


@dataclass(frozen=True)
class Case:
    """Static shape of a random batch."""

    page_size: int
    granularity: str = "page"
    rows: int = 4
    columns: int = 7
    width: int = 7
    capacity: int = 90
    blocks_per_page: int = 3
    identity: bool = False
    out: bool = True


CASES = {
    "ps 1, tokens": Case(1, "token", columns=40, width=50),
    "ps 1, pages, narrow": Case(1, columns=200, width=170, capacity=700),
    "ps 2": Case(2, "token"),
    "ps 3": Case(3, width=5),
    "ps 4": Case(4),
    "ps 8, tokens": Case(8, "token", width=3),
    "ps 12": Case(12, "page", capacity=333),
    "ps 64": Case(64, "page", rows=5, capacity=2047, width=9),
    "ps 64, fresh": Case(64, "token", capacity=1500, out=False),
    "static": Case(4, identity=True, blocks_per_page=1),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
REQUESTS, VIRTUAL = 6, 30


def draw_batch(case: Case, seed: int) -> dict[str, np.ndarray]:
    """Ids, lengths and rows of a batch: mostly plausible, with every kind of bad value in between."""
    rng = np.random.default_rng(seed)
    stride = case.page_size if case.granularity == "token" else 1
    words = case.columns * stride - (rng.integers(0, stride) if case.rows == 5 else 0)
    pages = rng.integers(-2, VIRTUAL + 3, (REQUESTS, words))
    offsets = rng.integers(0, case.page_size, (REQUESTS, words))
    table = np.where(pages < 0, pages, pages * case.page_size + offsets) if stride > 1 else pages
    v2p = rng.integers(-1, 50, VIRTUAL + 1)
    v2p[0], v2p[-1] = 0, -1
    tokens = case.columns * case.page_size
    kv_end = rng.integers(-2, tokens + 9, case.rows)
    kv_end[rng.random(case.rows) < 0.2] = 0
    row_ids = rng.integers(0, REQUESTS, case.rows)
    row_ids[rng.random(case.rows) < 0.15] = rng.choice([-1, -7, REQUESTS, 10**6])
    kv_start = np.maximum(kv_end - rng.integers(-2, tokens + 1, case.rows), 0)
    room = np.maximum(kv_end - kv_start + rng.integers(-6, 9, case.rows), 0)
    indptr = np.concatenate([[rng.integers(0, 6)], room]).cumsum()
    return dict(
        table=table, v2p=v2p, kv_end=kv_end, row_ids=row_ids, kv_start=kv_start, indptr=indptr,
        delta=rng.integers(-3, 6, case.rows),
    )  # fmt: skip


def page_of(batch, case: Case, row: int, column: int) -> int:
    word = int(batch["table"][row, column * (case.page_size if case.granularity == "token" else 1)])
    page = word // case.page_size if case.granularity == "token" and word >= 0 else word
    return 0 if page < 0 or (not case.identity and page > VIRTUAL) else page


def entry_of(batch, case: Case, row: int, column: int) -> int:
    page = page_of(batch, case, row, column)
    return max(page if case.identity else int(batch["v2p"][page]), 0) * case.blocks_per_page


def readable(batch, case: Case, b: int) -> int:
    words = batch["table"].shape[1]
    if batch["kv_end"][b] <= 0 or not 0 <= batch["row_ids"][b] < REQUESTS:
        return 0
    limit = words if case.granularity == "token" else words * case.page_size
    return min(max(int(batch["kv_end"][b] + batch["delta"][b]), 0), limit)


def arrays(batch) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value, jnp.int32) for name, value in batch.items()}


@every_implementation
@every_case
class TestRandomBatches:
    @given(seed=st.integers(0, 2**32 - 1))
    @settings(max_examples=8)
    @pytest.mark.parametrize("zero_tail", [False, True])
    def test_table(self, implementation, case, zero_tail, seed):
        batch = draw_batch(case, seed)
        x = arrays(batch)
        rows_out = case.rows + 2
        out = jnp.full((rows_out, case.width), POISON, jnp.int32) if case.out else None
        table, tokens = run(
            implementation, fill_read_table, x["table"], None if case.identity else x["v2p"], x["kv_end"],
            page_size=case.page_size, blocks_per_page=case.blocks_per_page, width=case.width,
            row_ids=x["row_ids"], seq_len_delta=x["delta"], out=out, zero_tail=zero_tail,
            granularity=case.granularity,
        )  # fmt: skip
        assert table.shape == ((rows_out if case.out else case.rows), case.width)
        table, tokens = np.array(table), np.asarray(tokens)
        for b in range(case.rows):
            length = min(readable(batch, case, b), case.width * case.page_size)
            assert tokens[b] == length
            live = -(-length // case.page_size)
            row = int(batch["row_ids"][b])
            assert table[b, :live].tolist() == [entry_of(batch, case, row, c) for c in range(live)]
            if zero_tail:
                assert not table[b, live:].any()
            elif case.out:
                assert (table[b, live:] == POISON).all()
        assert (table[case.rows :] == POISON).all()

    @given(seed=st.integers(0, 2**32 - 1))
    @settings(max_examples=8)
    def test_stream(self, implementation, case, seed):
        batch = draw_batch(case, seed)
        x = arrays(batch)
        out = jnp.full((case.capacity,), POISON, jnp.int32) if case.out else None
        ids, lengths = run(
            implementation, fill_packed_read_stream, x["table"], None if case.identity else x["v2p"],
            x["kv_end"], x["indptr"], page_size=case.page_size, blocks_per_page=case.blocks_per_page,
            capacity=case.capacity, row_ids=x["row_ids"], kv_start=x["kv_start"], seq_len_delta=x["delta"],
            out=out, granularity=case.granularity,
        )  # fmt: skip
        ids, lengths = np.array(ids), np.asarray(lengths)
        written = np.zeros(case.capacity, bool)
        for b in range(case.rows):
            begin, end = int(batch["indptr"][b]), min(int(batch["indptr"][b + 1]), case.capacity)
            start = int(batch["kv_start"][b])
            length = max(min(readable(batch, case, b) - start, end - begin), 0)
            assert lengths[b] == length
            row = int(batch["row_ids"][b])
            for i in range(length):
                column, offset = divmod(start + i, case.page_size)
                assert ids[begin + i] == entry_of(batch, case, row, column) * case.page_size + offset
            written[begin : begin + length] = True
        if case.out:
            assert (ids[~written] == POISON).all()


@every_implementation
class TestOptions:
    words = jnp.array([[2, 4, 1], [1, 2, 4], [4, 1, 2]], jnp.int32)

    def test_two_sub_pools_in_one_pass(self, implementation):
        swa = [0, -1, 9, -1, 2, -1]
        (full, window), tokens = run(
            implementation, fill_read_tables, self.words, (ints(*V2P), ints(*swa)), ints(10, 5, 0),
            page_size=4, blocks_per_page=(2, 5), zero_tail=True,
        )  # fmt: skip
        assert full.tolist() == [[6, 14, 10], [10, 6, 0], [0, 0, 0]]
        assert window.tolist() == [[45, 10, 0], [0, 45, 0], [0, 0, 0]]
        assert tokens.tolist() == [10, 5, 0]

    def test_defaults_read_row_b_for_request_b(self, implementation):
        table, tokens = run(
            implementation, fill_read_table, self.words, ints(*V2P), ints(4, 12), page_size=4,
            blocks_per_page=1, zero_tail=True,
        )  # fmt: skip
        assert table.tolist() == [[3, 0, 0], [5, 3, 7]]
        assert tokens.tolist() == [4, 12]

    @pytest.mark.parametrize("delta", [3, jnp.int32(3), ints(3, 3)])
    def test_delta_is_read_back_but_wakes_no_padding_row(self, implementation, delta):
        table, tokens = run(
            implementation, fill_read_table, self.words, ints(*V2P), ints(2, 0), page_size=4,
            blocks_per_page=1, seq_len_delta=delta, zero_tail=True,
        )  # fmt: skip
        assert tokens.tolist() == [5, 0]
        assert table.tolist() == [[3, 7, 0], [0, 0, 0]]

    def test_packed_indptr_makes_a_dense_stream(self, implementation):
        lengths = ints(10, 0, 3)
        ids, read = run(
            implementation, fill_packed_read_stream, self.words, ints(*V2P), lengths, packed_indptr(lengths),
            page_size=4, blocks_per_page=2, capacity=13,
        )  # fmt: skip
        assert read.tolist() == [10, 0, 3]
        assert ids.tolist() == [24, 25, 26, 27, 56, 57, 58, 59, 40, 41, 56, 57, 58]

    def test_rows_beyond_the_capacity_are_cut(self, implementation):
        ids, read = run(
            implementation, fill_packed_read_stream, self.words, ints(*V2P), ints(10, 10, 10),
            ints(0, 10, 20, 30), page_size=4, blocks_per_page=1, capacity=12,
        )  # fmt: skip
        assert read.tolist() == [10, 2, 0]
        assert ids[10:].tolist() == [20, 21]

    def test_indptr_outside_the_stream_writes_nothing(self, implementation):
        out = jnp.full((8,), POISON, jnp.int32)
        ids, read = run(
            implementation, fill_packed_read_stream, self.words, ints(*V2P), ints(4, 4), ints(-2, 9, 13),
            page_size=4, blocks_per_page=1, out=out,
        )  # fmt: skip
        assert read.tolist() == [0, 0]
        assert (ids == POISON).all()

    def test_empty_batch(self, implementation):
        nothing = jnp.zeros((0,), jnp.int32)
        table, tokens = run(
            implementation, fill_read_table, self.words, ints(*V2P), nothing, page_size=4, blocks_per_page=1
        )
        ids, lengths = run(
            implementation, fill_packed_read_stream, self.words, ints(*V2P), nothing, ints(0), page_size=4,
            blocks_per_page=1, out=ints(5, 6),
        )  # fmt: skip
        locs = run(implementation, translate_write_locs, nothing, ints(*V2P), page_size=4, blocks_per_page=1)
        assert (table.shape, tokens.shape, lengths.shape, locs.shape) == ((0, 3), (0,), (0,), (0,))
        assert ids.tolist() == [5, 6]

    def test_small_batch_after_a_large_one_leaves_no_stale_row(self, implementation):
        """A captured step keeps its buffer: the lengths, not the table, say what is live."""
        table = jnp.full((3, 3), POISON, jnp.int32)
        for lengths in [(10, 9, 8), (3, 0, 0), (12, 1, 0), (10, 9, 8)]:
            table, tokens = run(
                implementation, fill_read_table, self.words, ints(*V2P), ints(*lengths), page_size=4,
                blocks_per_page=2, out=table,
            )  # fmt: skip
            assert tokens.tolist() == list(lengths)
            for b, length in enumerate(lengths):
                live = -(-length // 4)
                assert table[b, :live].tolist() == [2 * V2P[p] for p in self.words[b, :live].tolist()]


@every_implementation
@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_ids_up_to_the_end_of_int32(implementation, page_size):
    """The last page that a layout allows: entry * page_size + page_size - 1 is just below 2^31."""
    page = (2**31 // (7 * page_size)) - 1
    v2p = ints(0, page, -1)
    length = ints(page_size)
    options = dict(page_size=page_size, blocks_per_page=7)
    words = jnp.array([[1]], jnp.int32)
    table, _ = run(implementation, fill_read_table, words, v2p, length, **options)
    ids, _ = run(
        implementation,
        fill_packed_read_stream,
        words,
        v2p,
        length,
        ints(0, page_size),
        capacity=page_size,
        **options,
    )
    locs = run(implementation, translate_write_locs, ints(2 * page_size - 1), v2p, **options)
    assert table.tolist() == [[7 * page]]
    assert ids.tolist() == list(range(7 * page * page_size, 7 * page * page_size + page_size))
    assert locs.tolist() == [7 * page * page_size + page_size - 1]


@pytest.mark.gpu
def test_replays_of_a_captured_step():
    """One command buffer (CUDA graph), buffers kept, batches of 8, 3, 8, 1, 8 rows: no row of an earlier batch is read."""
    rng = np.random.default_rng(5)
    rows, pages, ps = 8, 6, 4
    v2p = np.concatenate([[0], rng.permutation(60) + 1, [-1]])
    words = rng.permutation(np.arange(1, 61))[: rows * pages].reshape(rows, pages)

    def step(table, ids, words, v2p, lengths, locs, live):
        options = dict(page_size=ps, blocks_per_page=7, implementation="mosaic")
        table, tokens = fill_read_table(words, v2p, lengths, out=table, **options)
        indptr = packed_indptr(lengths)
        ids, read = fill_packed_read_stream(words, v2p, lengths, indptr, out=ids, **options)
        return table, ids, tokens, read, translate_write_locs(locs, v2p, live=live, **options)

    step = jax.jit(step, donate_argnums=(0, 1), compiler_options=CAPTURED)
    table = jnp.full((rows, pages), POISON, jnp.int32)
    ids = jnp.full((rows * pages * ps,), POISON, jnp.int32)
    for batch in (8, 3, 8, 1, 8):
        lengths = np.where(np.arange(rows) < batch, rng.integers(1, pages * ps + 1, rows), 0)
        last = words[np.arange(rows), np.maximum(lengths - 1, 0) // ps] * ps + np.maximum(lengths - 1, 0) % ps
        table, ids, tokens, read, locs = step(
            table, ids, ints(*words.reshape(-1)).reshape(rows, pages), ints(*v2p), ints(*lengths), ints(*last),
            jnp.int32(batch),
        )  # fmt: skip
        assert tokens.tolist() == read.tolist() == lengths.tolist()
        expected = []
        for b in range(rows):
            entries = v2p[words[b]] * 7
            live = -(-lengths[b] // ps)
            assert table[b, :live].tolist() == entries[:live].tolist()
            expected += [entries[i // ps] * ps + i % ps for i in range(lengths[b])]
        assert ids[: lengths.sum()].tolist() == expected
        ends = np.cumsum(lengths)[:batch] - 1
        assert locs.tolist() == [*np.array(ids)[ends].tolist(), *[0] * (rows - batch)]


@every_implementation
@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_long_rows_take_several_trips(implementation, page_size, monkeypatch):
    """Few blocks a row, so that each walks its row in many trips; ids scattered far over the pool."""
    monkeypatch.setattr(mosaic_gpu, "BLOCKS", 4)
    rng = np.random.default_rng(7)
    columns = 5000 // page_size
    pages = rng.permutation(np.arange(1, 2 * columns + 1)).reshape(2, columns)
    v2p = np.concatenate([[0], rng.permutation(np.arange(40_000, 40_000 + 2 * columns)), [-1]])
    lengths = np.array([columns * page_size - 1, 3 * page_size + 1])
    ids, read = run(
        implementation, fill_packed_read_stream, ints(*pages.reshape(-1)).reshape(2, -1), ints(*v2p),
        ints(*lengths), packed_indptr(ints(*lengths)), page_size=page_size, blocks_per_page=27,
        capacity=int(lengths.sum()),
    )  # fmt: skip
    position = [np.arange(n) for n in lengths]
    entries = [v2p[pages[b][position[b] // page_size]] * 27 for b in range(2)]
    expected = np.concatenate([entries[b] * page_size + position[b] % page_size for b in range(2)])
    np.testing.assert_array_equal(np.array(ids), expected)
    assert read.tolist() == lengths.tolist()


class TestAddressing:
    """Corners of the arithmetic that a batch reaches seldom."""

    @pytest.mark.parametrize("by", [1, 2, 3, 4, 12, 64])
    def test_divide_and_remainder(self, by):
        x = np.array([0, 1, by - 1, by, 10**6, 2**31 - 1], np.int32)
        np.testing.assert_array_equal(addressing.divide(x, by), x // by)
        np.testing.assert_array_equal(addressing.remainder(x, by), x % by)

    def test_page_size_one_keeps_minus_one_off_the_table(self):
        assert addressing.page_of_word(ints(-1, -5, 7), 1, "token").tolist() == [0, 0, 7]

    @given(
        start=st.integers(0, 300), length=st.integers(0, 70), at=st.integers(0, 9),
        page_size=st.sampled_from([4, 8, 12, 64]),
    )  # fmt: skip
    def test_quads_are_the_stream(self, start, length, at, page_size):
        quad = jnp.arange(24, dtype=jnp.int32)
        count = int(addressing.quad_count(length, at))
        columns = addressing.quad_columns(quad, start, length, at, page_size)
        entries = tuple(5 * c + 1 for c in columns)
        values, live = addressing.quad_ids(quad, entries, start, length, at, page_size)
        ids = {}
        for e in range(4):
            shown = np.array(live[e]) & (np.arange(24) < count)
            places = at - at % 4 + 4 * np.flatnonzero(shown) + e
            ids |= dict(zip(places.tolist(), np.array(values[e])[shown].tolist(), strict=True))
        assert ids == {
            at + i: (5 * ((start + i) // page_size) + 1) * page_size + (start + i) % page_size
            for i in range(length)
        }

    def test_lengths_near_the_end_of_int32(self):
        most = addressing.MAX_ITEMS
        end = addressing.readable_end(jnp.int32(2**31 - 1), 0, jnp.int32(0), 1, most)
        start, length = addressing.stream_span(jnp.int32(5), end, jnp.int32(0), jnp.int32(2**31 - 1), most)
        assert (int(start), int(length)) == (5, most - 5)


class TestErrors:
    words = jnp.ones((2, 3), jnp.int32)
    table = partial(fill_read_table, page_size=4, blocks_per_page=1)
    stream = partial(fill_packed_read_stream, page_size=4, blocks_per_page=1)

    @pytest.mark.parametrize(
        "call, message",
        [
            (lambda s: s.table(s.words, ints(0, -1), ints(1), page_size=0), "page_size=0"),
            (lambda s: s.table(s.words, ints(0, -1), ints(1), blocks_per_page=0), "blocks_per_page=0"),
            (lambda s: s.table(s.words, ints(0, -1), ints(1), width=0), "width=0"),
            (lambda s: s.table(s.words, ints(0, -1), ints(1, 1, 1)), "3 rows without row_ids"),
            (lambda s: s.table(s.words, ints(0, -1), ints(1), row_ids=ints(1, 2)), "row_ids is"),
            (lambda s: s.table(s.words, ints(0, -1), ints(1), seq_len_delta=ints(1, 2)), "seq_len_delta"),
            (lambda s: s.table(s.words, ints(0, -1), ints(1), out=jnp.zeros((1, 3))), "out is float32"),
            (lambda s: s.table(s.words, ints(0, -1), ints(1), out=s.words, width=9), r"need int32\[>= 1, 9\]"),
            (lambda s: s.table(s.words, ints(0), ints(1)), "v2p is"),
            (lambda s: s.table(s.words[0], ints(0, -1), ints(1)), "request_table is"),
            (lambda s: s.table(s.words, ints(0, -1), ints(1), granularity="block"), "granularity='block'"),
            (lambda s: s.table(s.words, ints(0, -1), ints(1), dtype=jnp.int16), "must be int32 or int64"),
            (lambda s: s.table(s.words, ints(0, -1), ints(1), implementation="cuda"), "implementation='cuda'"),
            (lambda s: s.stream(s.words, ints(0, -1), ints(1), ints(0, 1)), "capacity=None"),
            (lambda s: s.stream(s.words, ints(0, -1), ints(1), ints(0, 1), capacity=2**31), "capacity=2147483648"),
            (lambda s: s.stream(s.words, ints(0, -1), ints(1), ints(0), capacity=4), "indptr is"),
            (lambda s: s.stream(s.words, ints(0, -1), ints(1), ints(0, 1), out=ints(1, 2), capacity=4), "out is"),
            (lambda s: translate_write_locs(ints(1), None, page_size=4, blocks_per_page=1, dcp_size=0), "dcp_size=0"),
            (
                lambda s: translate_write_locs(
                    ints(1), None, page_size=4, blocks_per_page=1, dcp_rank=2, dcp_size=2
                ),
                "dcp_rank=2",
            ),
            (lambda s: translate_write_locs(jnp.ones(3), None, page_size=4, blocks_per_page=1), "locs is float32"),
        ],
    )  # fmt: skip
    def test_bad_arguments(self, call, message):
        with pytest.raises(ValueError, match=message):
            call(self)

    @pytest.mark.skipif(jax.config.jax_enable_x64, reason="only an error where x64 is off")
    def test_int64_needs_x64(self):
        with pytest.raises(ValueError, match="int64 ids need jax_enable_x64"):
            self.table(self.words, ints(0, -1), ints(1), dtype=jnp.int64)

    def test_int64_with_x64(self, named_for_hopper):
        with jax.enable_x64(True):
            wide = dict(page_size=64, blocks_per_page=2**20, dtype=jnp.int64)
            batch = self.words, ints(0, 3000, -1), ints(64)
            table, _ = run("xla", fill_read_table, *batch, **wide)
            assert table.dtype == jnp.int64
            assert table[0, 0] == 3000 * 2**20
            ids, _ = run("xla", fill_packed_read_stream, *batch, ints(0, 64), capacity=64, **wide)
            assert int(ids[63]) == 3000 * 2**20 * 64 + 63
            with pytest.raises(NotImplementedError, match="int32 ids, not int64"):
                fill_read_table(*batch, **wide, implementation="mosaic")
            locs = jnp.array([2**32 + 9, 9], jnp.int64)
            written = run("xla", translate_write_locs, locs, ints(*V2P), page_size=4, blocks_per_page=2)
            assert written.tolist() == [0, 25]
