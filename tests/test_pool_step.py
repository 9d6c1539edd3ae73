"""What a step takes of its lanes: a row once, and in a stream no more tokens than it has room for."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from ukv_jax import loop, pool, requests
from ukv_jax.attention import begin_step
from ukv_jax.layout import KVSpec, StatePart, StateSpec, StaticLayout, UnifiedLayout
from ukv_jax.translator import stream_capacity
from ukv_jax.verify import check

PS = 4
FULL = KVSpec(num_layers=1, num_kv_heads=1, head_dim=16)
STATE = StateSpec((StatePart("recurrent", 1, 1, (4, 4), "float32"),))


def ints(*values) -> jax.Array:
    return jnp.array(values, jnp.int32)


@pytest.mark.parametrize("delivery", ["table", "stream", "virtual"])
def test_of_lanes_that_name_one_row_the_first_lives(delivery):
    layout = UnifiedLayout.from_bytes(
        (FULL, STATE), total_bytes=8192, page_size=PS, max_requests=4, max_tokens=16
    )
    state, got = requests.reserve(pool.init(layout), ints(0, 1), ints(8, 8), pages_per_row=2)
    assert got.granted.all()
    step = partial(begin_step, state, tokens=2, delivery=delivery)
    found, expected = jax.jit(
        lambda: (step(ints(1, 1, 0, -1, 9), ints(2, 1, 0, 2, 2)), step(ints(1), ints(2)))
    )()
    assert found.new_len.tolist() == [2, 0, 0, 0, 0]
    assert found.write_locs["full"].ids.tolist() == [*expected.write_locs["full"].ids.tolist(), *[[0, 0]] * 4]
    assert found.sources["full"].kv_end.tolist() == [2, 0, 0, 0, 0]
    assert found.slots.tolist() == [expected.slots[0], -1, -1, -1, -1]


def forward(params, tokens, cache):
    """A stand-in for a model: its next token tells how many rows attention would read."""
    source = cache.sources["full"]
    return jax.nn.one_hot((source.kv_end - source.kv_start) % 64, 64, dtype=jnp.float32), cache


LIMITS = dict(page_size=PS, max_requests=4, max_tokens=16)
SHARING = {
    "unified": UnifiedLayout.from_bytes((FULL,), total_bytes=10 * PS * 64, **LIMITS),
    "static": StaticLayout.from_pages((FULL,), pages={"full": 9}, **LIMITS),
}


@pytest.mark.parametrize("kind", SHARING)
def test_rows_that_share_pages_wait_for_room_in_a_stream(kind):
    """Four requests of 12 tokens on the same two pages, then a page of their own each: 48 of them, room for 36."""
    layout = SHARING[kind]
    assert stream_capacity(layout, layout.full, 4) == 36
    rows = jnp.arange(4, dtype=jnp.int32)
    state, _ = requests.reserve(pool.init(layout), rows[:1], ints(8), pages_per_row=2)
    state, _ = requests.append(state, rows[:1], ints(8), max_tokens=8)
    shared = jnp.broadcast_to(state.requests.pages[0, :2], (3, 2))
    state, ok = requests.attach(state, rows[1:], shared, ints(8, 8, 8))
    assert ok.all()
    gen = loop.enroll(loop.init_generation(layout, max_new_tokens=4), rows, max_new=4)
    chunk = jax.jit(partial(loop.prefill_chunk, forward, delivery="stream"))
    decode = jax.jit(partial(loop.decode_loop, forward, history_len=16, delivery="stream"))
    state, got = requests.reserve(state, rows, ints(9, 9, 9, 9), pages_per_row=1)
    assert got.granted.all()
    # The prompt's last token: 9 tokens of each row are 36, which just fit.
    state, gen = chunk({}, state, gen, rows, jnp.zeros((4, 1), jnp.int32), jnp.ones(4, jnp.int32), rows >= 0)
    assert state.requests.seq_len.tolist() == [9, 9, 9, 9]
    state, gen, result = decode({}, state, gen, 16)
    # Three rows of 10, 11, 12 tokens decode; the fourth waits and has the stream to itself then.
    assert not bool(result.starved)
    assert result.history.stalled[:6].tolist() == [1, 1, 1, 0, 0, 0]
    assert int(result.steps) == 6
    assert gen.tokens.tolist() == [[9, 10, 11, 12]] * 4
    assert gen.stalls.tolist() == [0, 0, 0, 3]
    assert int(state.counters.faults) == 0
    check(state)


def test_a_chunk_without_room_in_a_stream_is_a_fault():
    layout = SHARING["unified"]
    rows = jnp.arange(4, dtype=jnp.int32)
    state, _ = requests.reserve(pool.init(layout), rows[:1], ints(8), pages_per_row=2)
    state, _ = requests.append(state, rows[:1], ints(8), max_tokens=8)
    state, _ = requests.attach(
        state, rows[1:], jnp.broadcast_to(state.requests.pages[0, :2], (3, 2)), ints(8, 8, 8)
    )
    state, _ = requests.reserve(state, rows, ints(10, 10, 10, 10), pages_per_row=1)
    gen = loop.enroll(loop.init_generation(layout, max_new_tokens=4), rows, max_new=4)
    state, gen = jax.jit(partial(loop.prefill_chunk, forward, delivery="stream"))(
        {}, state, gen, rows, jnp.zeros((4, 2), jnp.int32), jnp.full(4, 2, jnp.int32), rows >= 0
    )
    assert state.requests.seq_len.tolist() == [10, 10, 10, 8]
    assert gen.made.tolist() == [1, 1, 1, 0]
    assert int(state.counters.faults) == 1
    check(state)
