"""Scheduling: the same tokens from every pool, whatever had to wait, move or start anew."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny_model import CONFIG, random_model
from ukv_jax import loop, pool, requests
from ukv_jax.engine import Engine, Sampling
from ukv_jax.layout import KVSpec, StaticLayout, UnifiedLayout
from ukv_jax.pool import FREE, PARKED
from ukv_jax.verify import check

pytestmark = pytest.mark.long
SIZES = dict(page_size=4, max_requests=6, max_tokens=128)
FAST_COMPILE = {"xla_backend_optimization_level": "0"}  # the programs are large and their inputs tiny
OPTIONS = dict(max_new_tokens=48, steps=16, prefill_chunk=32)
LENGTHS = (5, 40, 17, 70, 3, 9, 30, 21)
PROMPTS = [np.random.default_rng(n).integers(0, CONFIG.vocab_size, n).tolist() for n in LENGTHS]
# Greedy and sampled requests, of different lengths.
WISHES = [
    Sampling(24 + 8 * (i % 3), 0.0 if i % 2 else 0.9, top_k=20 * (i % 4 == 0), top_p=0.95, seed=100 + i)
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def model():
    return random_model()


def make(model, layout):
    engine = Engine(model, layout, **OPTIONS)
    engine.compile(FAST_COMPILE)
    return engine


@pytest.fixture(scope="module")
def roomy(model):
    return make(
        model, UnifiedLayout.from_tokens(model.specs, tokens=800, requests=6, page_size=4, max_tokens=128)
    )


@pytest.fixture(scope="module")
def tight(model):
    """Room for one request of the maximum length and little more."""
    return make(model, UnifiedLayout.from_bytes(model.specs, total_bytes=17_000, **SIZES))


@pytest.fixture(scope="module")
def static(model):
    return make(model, StaticLayout.from_bytes(model.specs, total_bytes=30_000, mean_tokens=60, **SIZES))


@pytest.fixture(scope="module")
def expected(roomy):
    results = roomy.generate(PROMPTS, WISHES)
    assert [r.finish for r in results] == ["length"] * len(PROMPTS)
    assert [len(r.tokens) for r in results] == [s.max_new_tokens for s in WISHES]
    assert sum(r.stalls + r.retractions for r in results) == 0
    check(roomy.state)
    return results


def assert_same(results, expected):
    for r, e in zip(results, expected, strict=True):
        assert (r.error, r.finish, r.text) == (None, e.finish, e.text)
        assert r.tokens == e.tokens
        assert r.logprobs == e.logprobs  # to the last bit


def test_static_split_gives_the_same_bits(static, expected):
    assert_same(static.generate(PROMPTS, WISHES), expected)
    assert int(static.state.counters.faults) == 0
    check(static.state)


def test_tight_pool_stalls_moves_retracts_and_gives_the_same_bits(tight, expected):
    results = tight.generate(PROMPTS, WISHES)
    assert_same(results, expected)
    assert sum(r.stalls for r in results) > 0
    assert sum(r.retractions for r in results) > 0
    assert int(tight.state.counters.moved) > 0
    assert int(tight.state.counters.faults) == 0
    assert np.all(np.asarray(tight.state.requests.status) == FREE)
    check(tight.state)


def test_trace_adds_up(tight, expected):
    trace, steps = tight.trace(), tight.decode_steps
    tight.generate(PROMPTS[:2], WISHES[:2])
    longer = tight.trace()
    assert len(trace.active) == steps
    assert len(longer.active) == tight.decode_steps > steps
    layout = tight.layout
    page_bytes = np.array([s.page_bytes for s in layout.subpools])
    assert ((longer.pages + longer.holes) @ page_bytes).max() <= layout.total_bytes
    assert longer.pages[:, layout.index("state")].max() <= longer.active.max() + layout.max_requests
    assert np.all(longer.stalled <= longer.active)


def test_random_numbers_belong_to_the_request(roomy, expected):
    # Other lanes, other neighbours, another order.
    order = [4, 0, 2]
    results = roomy.generate([PROMPTS[i] for i in order], [WISHES[i] for i in order])
    assert_same(results, [expected[i] for i in order])


def test_seed_of_a_shared_setting_counts_up(roomy):
    shared = Sampling(16, temperature=1.0, seed=7)
    both = roomy.generate([PROMPTS[0], PROMPTS[0]], shared)
    alone = roomy.generate([PROMPTS[0]], [replace(shared, seed=8)])
    assert both[0].tokens != both[1].tokens
    assert both[1].tokens == alone[0].tokens


def test_stop_ids_and_strings(roomy, expected):
    i = 1
    whole = expected[i]
    stop_id = whole.tokens[9]
    end = whole.tokens.index(stop_id) + 1
    part = whole.text[11:13]
    results = roomy.generate(
        [PROMPTS[i]] * 2, [replace(WISHES[i], stop_ids=(stop_id,)), replace(WISHES[i], stop=(part,))]
    )
    assert results[0].tokens == whole.tokens[:end]
    assert (results[0].finish, results[1].finish) == ("stop", "stop")
    at = whole.text.index(part)
    assert results[1].text == whole.text[:at]
    assert results[1].tokens == whole.tokens[: at + len(part)]
    assert len(results[1].logprobs) == len(results[1].tokens)
    check(roomy.state)


def test_bad_requests_get_one_error_each_and_disturb_nobody(roomy, expected):
    bad = [[], [0, CONFIG.vocab_size], [-1], [1] * 120, [1] * 500]
    results = roomy.generate([*bad, PROMPTS[0]], [Sampling(24)] * len(bad) + [WISHES[0]])
    assert_same(results[-1:], expected[:1])
    assert all(r.finish == "error" and r.tokens == [] for r in results[:-1])
    texts = [r.error for r in results[:-1]]
    assert "empty" in texts[0]
    assert "token id 96 is outside the vocabulary [0, 96)" in texts[1]
    assert "token id -1" in texts[2]
    assert "120 tokens and 24 new ones" in texts[3]
    assert "128 tokens" in texts[3]
    assert "500 tokens" in texts[4]
    too_many = roomy.generate([PROMPTS[0]], Sampling(49))[0].error
    assert "max_new_tokens 49" in too_many
    assert "48" in too_many
    with pytest.raises(ValueError, match="2 prompts and 1 sampling"):
        roomy.generate([[1], [2]], [Sampling()])


def test_positions_of_the_model_are_a_limit(roomy, expected):
    """A prompt of 17 tokens and 8 new ones takes 24 positions: the last token is never fed."""
    whole = roomy.model
    try:
        for positions, error in (
            (24, None),
            (23, "17 tokens and 8 new ones do not fit the model: it has 23 positions"),
        ):
            roomy.model = replace(whole, config=replace(whole.config, max_position=positions))
            result = roomy.generate([PROMPTS[2]], [replace(WISHES[2], max_new_tokens=8)])[0]
            assert (result.error or "").endswith(error or "")
            assert result.tokens == ([] if error else expected[2].tokens[:8])
    finally:
        roomy.model = whole


@pytest.mark.parametrize("raised", [RuntimeError, KeyboardInterrupt])
def test_what_on_progress_raises_leaves_nothing_behind(tight, expected, raised):
    """After the first dispatch, with requests in the pool and others waiting."""

    def stop(progress):
        assert progress.running > 0
        assert progress.waiting > 0
        raise raised("stop")

    rows, faults = sorted(tight._rows), int(tight.state.counters.faults)
    with pytest.raises(raised, match="stop"):
        tight.generate(PROMPTS, WISHES, on_progress=stop)
    assert sorted(tight._rows) == rows
    assert np.all(np.asarray(tight.state.requests.status) == FREE)
    assert not np.any(np.asarray(tight.gen.decoding))
    assert int(tight.state.counters.faults) == faults
    check(tight.state)
    assert_same(tight.generate(PROMPTS[:2], WISHES[:2]), expected[:2])


WRONG = [
    dict(max_new_tokens=0),
    dict(temperature=-1.0),
    dict(temperature=float("nan")),
    dict(top_k=-1),
    dict(top_p=0.0),
    dict(top_p=1.5),
    dict(seed=2**31),
    dict(stop=("",)),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_sampling_refuses(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong)).removesuffix("s")):
        Sampling(**wrong)


def test_parked_request_keeps_its_pages_and_goes_on(roomy, expected):
    """Ended at 10 tokens and parked; resumed, it makes the tokens that it would have made anyway."""
    i, row = 0, 2
    e, s, prompt = roomy, WISHES[0], PROMPTS[0]
    rows = np.full(e.lanes, -1, np.int32)
    rows[0] = row
    target, chunk = np.zeros(e.lanes, np.int32), np.zeros((e.lanes, e.chunk), np.int32)
    target[0], chunk[0, : len(prompt)] = len(prompt), prompt
    assert e._reserve(rows, target, rows >= 0, [replace(s, max_new_tokens=10)] * e.lanes)[0]
    e.gen = replace(e.gen, park=e.gen.park.at[row].set(True))
    e._prefill(rows, chunk, target, rows >= 0)
    made, finish, _, _ = e._decode(16)
    assert (made[row], finish[row]) == (10, loop.LENGTH)
    assert int(e.state.requests.status[row]) == PARKED
    assert int(e.state.requests.page_count[row]) == -(-(len(prompt) + 9) // 4)
    check(e.state)

    e.state, resumed = requests.resume(e.state, jnp.array([row]))
    assert bool(resumed[0])
    e.gen = replace(
        e.gen,
        park=e.gen.park.at[row].set(False),
        decoding=e.gen.decoding.at[row].set(True),
        finish=e.gen.finish.at[row].set(loop.RUNNING),
        max_new=e.gen.max_new.at[row].set(s.max_new_tokens),
    )
    e._decode(16)
    assert np.asarray(e.gen.tokens)[row, : s.max_new_tokens].tolist() == expected[i].tokens
    e._release([])
    assert int(e.state.requests.status[row]) == FREE
    check(e.state)


def test_request_that_starves_alone_ends_with_an_error(tight, expected):
    """Somebody else holds most of the pool: what can be served is served, the rest gets an error, and nothing hangs."""
    rows = [tight.layout.max_requests - 2, tight.layout.max_requests - 1]
    taken, target = np.full(tight.lanes, -1, np.int32), np.zeros(tight.lanes, np.int32)
    taken[:2], target[:2] = rows, (128, 40)
    assert tight._reserve(taken, target, taken >= 0, [Sampling()] * tight.lanes)[:2].all()
    for row in rows:
        tight._rows.remove(row)
    try:
        never_in, starves = PROMPTS[3], [5] * 10
        results = tight.generate([never_in, PROMPTS[4], starves], [Sampling(40), WISHES[4], Sampling(48)])
        assert_same(results[1:2], expected[4:5])
        for r, tokens in ((results[0], 70), (results[2], 10)):
            assert (r.finish, r.tokens) == ("error", [])
            assert "the pool is too small" in r.error
            assert f"prompt of {tokens} tokens" in r.error
            assert str(tight.layout.total_bytes) in r.error
        assert np.all(np.asarray(tight.state.requests.status)[rows] != FREE)
        check(tight.state)
    finally:
        tight._release(rows)
        tight._rows.extend(rows)
    check(tight.state)


# A stand-in for a model with a sliding window: the next token is known, so only the pool is under test.


def next_token(token: int, position: int) -> int:
    return (5 * token + 3 * position + 1) % 64


def windowed_forward(params, tokens, cache):
    last = jnp.maximum(cache.new_len - 1, 0)[:, None]
    token = jnp.take_along_axis(tokens, last, axis=1)[:, 0]
    position = jnp.take_along_axis(cache.positions, last, axis=1)[:, 0]
    return jax.nn.one_hot((5 * token + 3 * position + 1) % 64, 64, dtype=jnp.float32), cache


def test_prefill_leaves_out_lanes_that_name_a_row_again_and_chunks_without_room():
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=16)
    layout = UnifiedLayout.from_bytes((spec,), total_bytes=8192, page_size=4, max_requests=4, max_tokens=16)
    gen = loop.enroll(loop.init_generation(layout, max_new_tokens=4), jnp.arange(3), max_new=4)
    state, got = requests.reserve(
        pool.init(layout), jnp.arange(3), jnp.array([3, 2, 4], jnp.int32), pages_per_row=1
    )
    assert got.granted.all()
    rows = jnp.array([0, 0, 1, 2, -1, 9], jnp.int32)
    tokens = jnp.arange(6 * 8, dtype=jnp.int32).reshape(6, 8)
    new_len = jnp.array([3, 2, 2, 5, 3, 3], jnp.int32)
    state, gen = jax.jit(partial(loop.prefill_chunk, windowed_forward))(
        {}, state, gen, rows, tokens, new_len, rows >= 0
    )
    assert state.requests.seq_len.tolist() == [3, 2, 0, 0]
    assert gen.made.tolist() == [1, 1, 0, 0]
    assert gen.next_token[:2].tolist() == [next_token(2, 2), next_token(17, 1)]
    assert gen.decoding.tolist() == [True, True, False, False]
    assert int(state.counters.faults) == 1  # 5 tokens for a page of 4
    check(state)


def test_windows_are_fed_chunk_by_chunk():
    """A prompt's window pages would not fit at once; chunk by chunk they do, and the window stays small."""
    window, chunk = 16, 16
    specs = (
        KVSpec(num_layers=1, num_kv_heads=1, head_dim=16, name="full"),
        KVSpec(num_layers=1, num_kv_heads=1, head_dim=16, window=window, name="swa"),
    )
    layout = UnifiedLayout.from_bytes(specs, total_bytes=17_000, page_size=4, max_requests=4, max_tokens=128)
    config = SimpleNamespace(vocab_size=64, eos_token_ids=(), max_position=128)
    model = SimpleNamespace(
        params={}, config=config, tokenizer=None, forward=windowed_forward, decode=lambda tokens: None
    )
    engine = Engine(model, layout, max_new_tokens=40, steps=8, prefill_chunk=chunk, prefill_lanes=2)
    engine.compile(FAST_COMPILE)
    prompts = [[i + 1] * n for i, n in enumerate((80, 7, 88, 33, 60))]
    results = engine.generate(prompts, Sampling(30))
    for prompt, r in zip(prompts, results):
        tokens = [prompt[-1]]
        for i in range(30):
            tokens.append(next_token(tokens[-1], len(prompt) - 1 + i))
        assert (r.error, r.tokens) == (None, tokens[1:])
    pages = engine.trace().pages
    per_row = (window - 1) // 4 + 2  # after a step the last page may have just begun
    assert pages[:, layout.index("swa")].max() <= per_row * layout.max_requests
    assert pages[:, layout.index("full")].max() > pages[:, layout.index("swa")].max()
    assert int(engine.state.counters.faults) == 0
    check(engine.state)
