"""From requests in a pool to addresses: the translator over real pool states."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gather_translate import api as gather_translate
from pallas_kernels.read_source import PageTable, TokenStream, VirtualPages
from tests.deviceless import compile_for, requires_plugin, shape
from ukv_jax import pool, requests, translator
from ukv_jax.layout import KVSpec, MLASpec, StatePart, StateSpec, StaticLayout, UnifiedLayout
from ukv_jax.translator import KernelTokens, VirtualTokens

PS = 4
MLA2 = MLASpec(num_layers=2, kv_lora_rank=8, qk_rope_head_dim=4)
SWA = KVSpec(num_layers=3, num_kv_heads=1, head_dim=8, window=6, name="swa")
STATE = StateSpec(
    (StatePart("conv", 2, 3, (8,), "bfloat16"), StatePart("recurrent", 2, 2, (4, 4), "float32"))
)
LIMITS = dict(page_size=PS, max_requests=4, max_tokens=32)


def worked_state():
    """The worked numbers: B = 2, v2p = [0, 5, 3, -1, 7 | -1], row 0 holds virtual pages 2, 4, 1, length 10."""
    layout = UnifiedLayout.from_bytes((MLA2,), total_bytes=1 << 13, num_virtual=9, **LIMITS)
    state = pool.init(layout)
    full = state.subpools[0]
    v2p = full.v2p.at[:6].set(jnp.array([0, 5, 3, -1, 7, -1], jnp.int32))
    pages = state.requests.pages.at[0, :3].set(jnp.array([2, 4, 1], jnp.int32))
    return replace(
        state,
        subpools=(replace(full, v2p=v2p),),
        requests=replace(state.requests, pages=pages, page_count=state.requests.page_count.at[0].set(3)),
    )


ROW0 = jnp.array([0], jnp.int32)
TEN = jnp.array([10], jnp.int32)


def live_ids(stream: TokenStream):
    return [int(i) for i in stream.ids[: int(stream.indptr[1])]]


def test_worked_numbers():
    state = worked_state()
    assert state.layout.full.stride() == 2
    table = translator.fill_read_table(state, ROW0, TEN)
    assert table.table[0, :3].tolist() == [6, 14, 10]
    assert table.kv_end.tolist() == [10]
    stream = translator.fill_packed_read_stream(state, ROW0, TEN, capacity=16)
    assert live_ids(stream) == [24, 25, 26, 27, 56, 57, 58, 59, 40, 41]
    window = translator.fill_packed_read_stream(
        state, ROW0, jnp.array([7], jnp.int32), capacity=16, kv_start=jnp.array([3], jnp.int32)
    )
    assert live_ids(window) == [27, 56, 57, 58]
    writes = VirtualTokens(jnp.array([9, 0, 3, -3, 13], jnp.int32))
    assert translator.translate_write_locs(state, writes).ids.tolist() == [25, 0, 0, 0, 0]
    # Layer 1 of kernel id 25 is in block 6 + 1, slot 1.
    assert (25 // PS + state.layout.full.block_offset(1), 25 % PS) == (7, 1)


@pytest.mark.parametrize("hole", ["tombstone", "hole"])
def test_worked_numbers_with_nothing_at_column_1(hole):
    state = worked_state()
    if hole == "tombstone":
        full = state.subpools[0]
        state = replace(state, subpools=(replace(full, v2p=full.v2p.at[4].set(-1)),))
    else:
        state = replace(state, requests=replace(state.requests, pages=state.requests.pages.at[0, 1].set(-1)))
    assert translator.fill_read_table(state, ROW0, TEN).table[0, :3].tolist() == [6, 0, 10]
    stream = translator.fill_packed_read_stream(state, ROW0, TEN, capacity=16)
    assert live_ids(stream) == [24, 25, 26, 27, 0, 1, 2, 3, 40, 41]


def test_worked_numbers_of_decode_context_parallelism():
    plain = worked_state()
    state = replace(plain, layout=replace(plain.layout, dcp=2))
    write = VirtualTokens(jnp.array([19], jnp.int32))
    assert translator.translate_write_locs(state, write, dcp_rank=1).ids.tolist() == [25]
    assert translator.translate_write_locs(state, write, dcp_rank=0).ids.tolist() == [0]
    page = VirtualTokens(jnp.arange(16, 24, dtype=jnp.int32))
    ids, own = translator.translate_dcp_read_ids(state, page, dcp_rank=1)
    assert ids.ids[own].tolist() == [24, 25, 26, 27]
    assert page.ids[own].tolist() == [17, 19, 21, 23]
    with pytest.raises(ValueError, match="2 ranks"):
        translator.fill_read_table(state, ROW0, TEN)


def test_read_ids_of_a_static_split_stay_in_their_region():
    """Ids of pages that are not live, or past the sub-pool, read the padding page, as they do from a unified pool."""
    layout = StaticLayout.from_pages((MLA2,), pages={"full": 12}, **LIMITS | {"dcp": 2})
    state, got = requests.reserve(pool.init(layout), ROW0, jnp.array([12], jnp.int32), pages_per_row=2)
    assert got.granted.tolist() == [True]
    held = state.requests.pages[0, :2].tolist()
    dead = next(page for page in range(1, 13) if page not in held)
    starts = jnp.array([page * 2 * PS for page in (held[0], held[1], dead, 13, 1 << 20)], jnp.int32)
    for rank in (0, 1):
        ids, own = translator.translate_dcp_read_ids(state, VirtualTokens(starts + 2 + rank), dcp_rank=rank)
        assert own.all()
        assert ids.ids.tolist() == [held[0] * PS + 1, held[1] * PS + 1, 1, 1, 1]


def filled(layout, lengths=(10, 7, 0, 25)):
    """Requests of these lengths, made with the pool's own functions."""
    state = pool.init(layout)
    rows = jnp.arange(4, dtype=jnp.int32)
    state, got = requests.reserve(state, rows, jnp.array(lengths, jnp.int32), pages_per_row=8)
    assert got.granted.tolist() == [n > 0 for n in lengths]
    state, _ = requests.append(state, rows, jnp.array(lengths, jnp.int32), max_tokens=32)
    assert int(state.counters.faults) == 0
    return state


LAYOUTS = {
    "unified": lambda: UnifiedLayout.from_bytes((MLA2, SWA, STATE), total_bytes=1 << 15, **LIMITS),
    "static": lambda: StaticLayout.from_pages(
        (MLA2, SWA, STATE), pages={"full": 20, "swa": 18, "state": 4}, **LIMITS
    ),
}


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("name", ["full", "swa"])
def test_deliveries_name_the_same_rows(kind, name):
    state = filled(LAYOUTS[kind]())
    rows = jnp.array([3, 1, 0, -1], jnp.int32)
    kv_end = jnp.array([25, 7, 10, 9], jnp.int32)
    subpool = state.layout[name]
    v2p = np.asarray(state.subpool(name).v2p)
    pages = np.asarray(state.requests.pages)
    table = translator.fill_read_table(state, rows, kv_end, name)
    stream = translator.fill_packed_read_stream(state, rows, kv_end, name, capacity=64)
    virtual = translator.virtual_source(state, rows, kv_end, name)
    for source in (table, stream, virtual):
        assert (source.kv_end - source.kv_start).tolist() == [25, 7, 10, 0]
    for lane, row in enumerate([3, 1, 0]):
        for pos in range(int(kv_end[lane])):
            entry = max(v2p[pages[row, pos // PS]], 0) * subpool.stride()
            want = entry * PS + pos % PS
            assert entry > 0
            assert int(table.table[lane, pos // PS]) * PS + pos % PS == want
            assert int(stream.ids[int(stream.indptr[lane]) + pos]) == want
            ids = translator.virtual_tokens(state, rows[lane : lane + 1], jnp.array([[pos]]))
            assert translator.translate_write_locs(state, ids, name).ids.tolist() == [[want]]
    assert virtual.blocks_per_page == subpool.stride()
    assert np.array_equal(virtual.v2p, v2p)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_writes_to_dead_pages_and_past_the_ids_are_dropped(kind):
    state = filled(LAYOUTS[kind]())
    of_row = translator.virtual_tokens(state, jnp.array([1, 3]), jnp.array([[0, 6], [0, 24]]))
    beyond = state.layout.full.num_virtual * PS
    ids = jnp.concatenate([of_row.ids.reshape(-1), jnp.array([beyond, beyond + 1, 2**31 - 1], jnp.int32)])
    state, _ = requests.release(state, jnp.array([1]))
    for name in ("full", "swa"):
        written = translator.translate_write_locs(state, VirtualTokens(ids), name).ids.tolist()
        assert [loc > 0 for loc in written] == [False, False, True, True, False, False, False]


def test_a_static_table_of_the_first_rows_has_their_number():
    state = filled(LAYOUTS["static"]())
    table = translator.fill_read_table(state, None, state.requests.seq_len[:2])
    assert table.table.shape[0] == table.kv_end.shape[0] == table.kv_start.shape[0] == 2
    assert table.table[0, :3].tolist() == state.requests.pages[0, :3].tolist()


@pytest.mark.parametrize("kind", LAYOUTS)
def test_one_pass_builds_the_full_and_the_window_table(kind):
    state = filled(LAYOUTS[kind]())
    rows, kv_end = jnp.array([3, 1, 0], jnp.int32), jnp.array([25, 7, 10], jnp.int32)
    tables = translator.fill_read_tables(state, rows, kv_end, zero_tail=True)
    assert set(tables) == {"full", "swa"}
    for name, table in tables.items():
        alone = translator.fill_read_table(state, rows, kv_end, name, zero_tail=True)
        assert np.array_equal(table.table, alone.table)
        assert np.array_equal(table.kv_end, alone.kv_end)
    assert tables["full"].kv_start.tolist() == [0, 0, 0]
    assert tables["swa"].kv_start.tolist() == [25 - SWA.window, 7 - SWA.window, 10 - SWA.window]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_sources_of_a_chunk_reach_back_to_its_first_query(kind):
    """The window of a chunk begins where its first query's does; every delivery gives the same range."""
    state = filled(LAYOUTS[kind]())
    rows, kv_end = jnp.array([3, 1, -1], jnp.int32), jnp.array([25, 7, 0], jnp.int32)
    q_start = jnp.array([20, 3, 0], jnp.int32)
    for delivery in ("table", "stream", "virtual"):
        sources = translator.read_sources(state, rows, kv_end, q_start=q_start, delivery=delivery)
        assert sorted(sources) == ["full", "swa"]
        for name, start in (("full", [0, 0]), ("swa", [20 - SWA.window + 1, 0])):
            assert sources[name].kv_start.tolist()[:2] == start, delivery
            assert sources[name].kv_end.tolist() == [25, 7, 0], delivery


def test_static_split_hands_its_ids_through_without_a_copy():
    state = filled(LAYOUTS["static"]())
    compiled = jax.jit(
        lambda s: translator.fill_read_table(s, None, s.requests.seq_len).table, donate_argnums=0
    )
    analysis = compiled.lower(state).compile().memory_analysis()
    assert analysis.alias_size_in_bytes >= state.requests.pages.nbytes
    assert analysis.temp_size_in_bytes == 0
    table = translator.fill_read_table(state, None, state.requests.seq_len)
    assert np.array_equal(table.table, state.requests.pages)


def test_state_slots():
    for kind in LAYOUTS:
        state = filled(LAYOUTS[kind]())
        slots = translator.translate_state_slots(state, jnp.array([0, 1, 2, 3, -1, 9], jnp.int32))
        assert (slots[jnp.array([0, 1, 3])] > 0).all()
        assert len(set(slots[jnp.array([0, 1, 3])].tolist())) == 3
        assert slots[jnp.array([2, 4, 5])].tolist() == [-1, -1, -1]
    with pytest.raises(ValueError, match="no state sub-pool"):
        translator.translate_state_slots(worked_state(), ROW0)


def test_translated_ids_cannot_be_translated_again():
    state = worked_state()
    once = translator.translate_write_locs(state, VirtualTokens(jnp.array([9], jnp.int32)))
    with pytest.raises(TypeError, match="translated already"):
        translator.translate_write_locs(state, once)
    with pytest.raises(TypeError, match="takes VirtualTokens"):
        translator.translate_write_locs(state, jnp.array([9], jnp.int32))


def test_reads_are_translated():
    state = worked_state()
    for delivery, translated in (("table", True), ("stream", True), ("virtual", False)):
        source = translator.read_source(state, ROW0, TEN, delivery=delivery)
        assert isinstance(
            source, {"table": PageTable, "stream": TokenStream, "virtual": VirtualPages}[delivery]
        )
        assert translator.reads_are_translated(source) is translated
        if not translated:
            with pytest.raises(ValueError, match="deferred"):
                translator.require_translated(source, "flash decode")
    assert translator.reads_are_translated(KernelTokens(TEN))
    assert not translator.reads_are_translated(VirtualTokens(TEN))
    with pytest.raises(ValueError, match="delivery"):
        translator.read_source(state, ROW0, TEN, delivery="rectangle")


@pytest.mark.deviceless
@requires_plugin
def test_read_metadata_is_bounded_by_the_pool():
    """ps 1, 256 rows, 1 M context, 8.15 M resident tokens: the stream is bounded by the pool, a rectangle by the context."""
    rows, context, resident, virtual = 256, 1 << 20, 8_150_000, 8_150_001
    args = (shape((rows, context), "int32"), shape((virtual + 1,), "int32"), shape((rows,), "int32"))

    def stream(table, v2p, kv_end, out):
        indptr = gather_translate.packed_indptr(kv_end)
        return gather_translate.fill_packed_read_stream(
            table, v2p, kv_end, indptr, page_size=1, blocks_per_page=7, out=out, implementation="mosaic"
        )

    fill = partial(
        gather_translate.fill_read_table,
        page_size=1,
        blocks_per_page=7,
        width=context,
        implementation="mosaic",
    )
    packed = compile_for(stream, *args, shape((resident,), "int32"), donate=3)
    rectangle = compile_for(lambda table, v2p, kv_end: fill(table, v2p, kv_end), *args)

    def metadata(program):
        return program.compiled.memory_analysis().output_size_in_bytes + program.temp_bytes

    assert metadata(packed) <= 33e6, metadata(packed)
    assert metadata(rectangle) >= rows * context * 4
    print(
        f"request map {rows * context * 4 / 1e6:.1f} MB, stream {metadata(packed) / 1e6:.1f} MB, "
        f"rectangle {metadata(rectangle) / 1e6:.1f} MB"
    )
