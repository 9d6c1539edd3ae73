"""Planning a pool from a config.json: published models, the pool's own admission, the command."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.test_deepseek_loading import V3
from tests.models.test_gemma4 import GEMMA_E2B
from tests.models.test_gpt_oss import GPT_OSS_20B
from tests.models.test_inkling import INKLING_SMALL
from tests.models.test_loading import KIMI_48B
from tests.models.test_state_loading import FALCON_1_5B, QWEN
from ukv_jax import plan, pool, requests
from ukv_jax.attention import pool_specs
from ukv_jax.cli import main
from ukv_jax.engine import cache_specs
from ukv_jax.layout import KVSpec, MLASpec, StatePart, StateSpec, StaticLayout, UnifiedLayout
from ukv_jax.models.config import load_config
from ukv_jax.models.decoder import cache_spec

HUNDRED_GB = 100 * 10**9
PUBLISHED = {
    "Kimi-Linear-48B-A3B": KIMI_48B,
    "Qwen3.5-0.8B": QWEN,
    "Falcon-H1-1.5B": FALCON_1_5B,
    "gpt-oss-20b": GPT_OSS_20B,
    "gemma-4-E2B": GEMMA_E2B,
    "Inkling-Small": INKLING_SMALL,
    "DeepSeek-V3": V3,
}
DOCUMENT = Path(__file__).parent.parent / "docs" / "plan.md"
HYBRID = (
    MLASpec(2, 12, 4, "bfloat16"),
    StateSpec((StatePart("conv", 2, 3, (40,), "bfloat16"), StatePart("recurrent", 2, 2, (8, 8), "float32"))),
)


def write(tmp_path, config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_kimi_linear_48b(tmp_path):
    p = plan.plan(write(tmp_path, KIMI_48B), HUNDRED_GB)
    state, full = p.subpools
    assert (full.bytes_per_token, full.page_bytes) == (7 * 576 * 2, 64 * 7 * 576 * 2)
    assert state.bytes_per_request == p.reserved_bytes == p.one_page_bytes == 43_450_368
    assert 0 <= HUNDRED_GB - p.total_bytes < 1 << 20
    # A short request takes a slot and 16 pages, a long one a slot and 1024; neither is bounded by anything else.
    for name, pages in {"short": 16, "long": 1024}.items():
        per_request = state.page_bytes + pages * full.page_bytes
        room = p.total_bytes - p.reserved_bytes
        assert p.traffic[name].unified.requests in (room // per_request, room // per_request - 1)
    # With one page size, 84 blocks of 64 tokens share a page as large as a slot.
    pages = HUNDRED_GB // 43_450_368 - 1
    assert p.traffic["short"].one_page_size.requests == pages // 2
    assert p.traffic["long"].one_page_size.requests == pages // (1 + -(-1024 // 84))
    for t in p.traffic.values():
        assert t.unified.requests >= max(t.static.requests, t.one_page_size.requests)


def test_deepseek_v3_needs_no_split(tmp_path):
    p = plan.plan(write(tmp_path, V3), HUNDRED_GB)
    assert [s.bytes_per_token for s in p.subpools] == [61 * 576 * 2]
    assert round(p.parameters / 1e9) == 671
    expected = HUNDRED_GB // (64 * 61 * 1152) - 1
    for name, pages in {"short": 16, "long": 1024}.items():
        t = p.traffic[name]
        assert t.unified.requests == t.one_page_size.requests == expected // pages
        assert t.static.requests in (expected // pages, expected // pages - 1)


@pytest.mark.parametrize("name", PUBLISHED)
def test_unified_holds_what_static_holds_of_its_own_mix(tmp_path, name):
    """Less the reserved bottom and one page of each sub-pool."""
    p = plan.plan(write(tmp_path, PUBLISHED[name]), HUNDRED_GB)
    lost = p.reserved_bytes + sum(s.page_bytes for s in p.subpools)
    full = p.subpools[-1]
    t = p.traffic["mixed"]
    assert t.unified.tokens >= t.static.tokens - lost / full.bytes_per_token


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_document_says_what_the_plan_says(tmp_path, name):
    p = plan.plan(write(tmp_path, PUBLISHED[name]), HUNDRED_GB)
    *_, full = p.subpools
    held = [f"{s.bytes_per_request:,} {s.name}" for s in p.subpools[:-1]]
    first = f"| {name} | {full.bytes_per_token:,.0f} | {', '.join(held) or '-'} |"
    rows = []
    for traffic, t in p.traffic.items():
        counts = (t.unified.requests, t.static.requests, t.one_page_size.requests)
        rows.append(f"{first} {traffic} | " + " | ".join(f"{n:,}" for n in counts) + " |")
        first = "| | | |"
    assert "\n".join(rows) in DOCUMENT.read_text()


def test_gpt_oss_releases_what_lies_before_the_window(tmp_path):
    p = plan.plan(write(tmp_path, GPT_OSS_20B), HUNDRED_GB)
    window, full = p.subpools
    # 12 layers each, 8 heads of 64 for K and for V; 128 tokens touch three pages at most.
    assert window.bytes_per_token == full.bytes_per_token == 12 * 2 * 8 * 64 * 2
    assert window.bytes_per_request == 3 * 64 * window.bytes_per_token
    assert p.traffic["short"].unified.requests == (p.total_bytes // (64 * 24576) - 1) // (3 + 16)


def test_inkling_small_has_three_kinds(tmp_path):
    p = plan.plan(write(tmp_path, INKLING_SMALL), HUNDRED_GB)
    state, window, full = p.subpools
    # Three inputs of the convolutions over two sublayers' results and over K and V, of 42 layers, and no byte between.
    assert state.bytes_per_request == 42 * 3 * (2 * 4096 + 2 * 1024) * 2
    assert (window.bytes_per_token, full.bytes_per_token) == (35 * 2 * 1024 * 2, 7 * 2 * 1024 * 2)
    assert window.bytes_per_request == 9 * 64 * window.bytes_per_token
    assert p.reserved_bytes == window.page_bytes


def test_gemma_e2b_shares_caches_and_has_wider_heads_in_full_layers(tmp_path):
    p = plan.plan(write(tmp_path, GEMMA_E2B), HUNDRED_GB)
    window, full = p.subpools
    assert (window.bytes_per_token, full.bytes_per_token) == (12 * 2 * 256 * 2, 3 * 2 * 512 * 2)


# Bytes of a token in e4m3: MLA rows of 576 with their scale take 640, K and V of a head a scale each.
FP8 = {
    "Kimi-Linear-48B-A3B": 7 * 640,
    "DeepSeek-V3": 61 * 640,
    "gpt-oss-20b": 12 * 2 * 8 * (64 + 4),
    "Qwen3.5-0.8B": 6 * 2 * 2 * (256 + 4),
    "gemma-4-E2B": 3 * 2 * (512 + 4),
}


@pytest.mark.parametrize("name", FP8)
def test_e4m3_rows(tmp_path, name):
    """A pool of 100 GB holds the more requests; envelopes are padded to whole blocks of K and V."""
    path = write(tmp_path, PUBLISHED[name])
    plain, p = plan.plan(path, HUNDRED_GB), plan.plan(path, HUNDRED_GB, kv_dtype="float8_e4m3fn")
    assert (p.dtype, p.kv_dtype, p.weight_bytes) == ("bfloat16", "float8_e4m3fn", plain.weight_bytes)
    full = p.subpools[-1]
    block = max(r.block_bytes for r in _regions_of(path)) / full.page_tokens
    assert FP8[name] <= full.bytes_per_token < FP8[name] + block
    for traffic, t in p.traffic.items():
        assert t.unified.requests > plain.traffic[traffic].unified.requests


def _regions_of(path):
    specs = cache_specs(load_config(path), "bfloat16", "float8_e4m3fn")
    sizes = dict(total_bytes=HUNDRED_GB, page_size=64, max_requests=4, max_tokens=1024)
    return UnifiedLayout.from_bytes(specs, **sizes).full.regions


@pytest.mark.parametrize("kind", ["unified", "static"])
def test_the_pool_admits_what_the_plan_says(kind):
    """All that fit are granted pages in one call, and the next request is refused."""
    total, sizes = 60_000, dict(page_size=4, max_tokens=48)
    layout, traffic = plan.compare(HYBRID, total, page_size=4, short=5, long=48)
    found = traffic["mixed"]
    count = getattr(found, kind).requests
    rows = count + 1
    if kind == "unified":
        layout = UnifiedLayout.from_bytes(HYBRID, total_bytes=total, max_requests=rows, **sizes)
    else:
        means = plan._means(layout, found.lengths)
        layout = StaticLayout.from_bytes(HYBRID, total_bytes=total, max_requests=rows, **means, **sizes)
    lengths = jnp.asarray([found.lengths[i % len(found.lengths)] for i in range(rows)], jnp.int32)
    reserve = jax.jit(partial(requests.reserve, pages_per_row=layout.max_pages))
    _, got = reserve(pool.init(layout), jnp.arange(rows, dtype=jnp.int32), lengths)
    assert count > 10
    assert got.granted.tolist() == [True] * count + [False]


def shrunk(spec):
    """All layers and heads, rows narrower by 64, state by 1024, windows shorter by 16: a page of 4 tokens has the place
    among them that one of 64 has among the published ones."""
    if isinstance(spec, MLASpec):
        return replace(spec, kv_lora_rank=spec.kv_lora_rank // 64, qk_rope_head_dim=1)
    if isinstance(spec, KVSpec):
        return replace(spec, head_dim=spec.head_dim // 64, window=spec.window and spec.window // 16)
    narrow = [
        tuple(-(-n // (1024 if len(p.block_shape) == 1 else 32)) for n in p.block_shape) for p in spec.parts
    ]
    return StateSpec(tuple(replace(p, block_shape=shape) for p, shape in zip(spec.parts, narrow)))


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_unified_schedules_what_static_does_of_its_own_mix(tmp_path, name):
    """Requests one after the other in chunks, windows released before each, until a pool refuses a page: shrunk models."""
    config = load_config(write(tmp_path, PUBLISHED[name]))
    specs = tuple(map(shrunk, pool_specs(cache_spec(config))))
    limits = dict(page_size=4, max_tokens=1024)
    layout, _ = plan.compare(specs, 1 << 24, page_size=4, short=64, long=1024)
    mixed = (64,) * plan.MIXED_SHORT + (1024,)
    needs = [plan._needs(layout, n) for n in mixed]
    mean = sum(n[s.name] * s.page_bytes for n in needs for s in layout.subpools) / len(mixed)
    total = int(45 * mean)  # room for some of the long ones, and no whole number of turns
    sizes = dict(total_bytes=total, max_requests=64, **limits)
    unified = UnifiedLayout.from_bytes(specs, **sizes)
    static = StaticLayout.from_bytes(specs, **plan._means(layout, mixed), **sizes)
    held = [scheduled(layout, mixed) for layout in (unified, static)]
    lost = unified.reserved_bytes + sum(s.page_bytes for s in unified.subpools)
    full = unified.full
    assert held[1].requests > 35
    assert held[0].tokens >= held[1].tokens - lost * full.page_size / full.page_bytes


def scheduled(layout, lengths, chunk=64):
    """What lies in memory when the first request is refused."""
    rows = range(layout.max_requests)
    todo = [
        (r, min(n, at + chunk))
        for r in rows
        for n in [lengths[r % len(lengths)]]
        for at in range(0, n, chunk)
    ]

    def serve(carry, request):
        state, open_ = carry
        row, target = request
        state, _ = requests.release_window(state, max_pages=64)
        row = jnp.where(open_, row, -1)[None]
        state, got = requests.reserve(state, row, target[None], pages_per_row=chunk // 4)
        done = state.requests.seq_len[row]
        open_ &= got.granted[0]
        state, _ = requests.append(state, jnp.where(open_, row, -1), target[None] - done, max_tokens=chunk)
        return (state, open_), None

    todo = tuple(jnp.array(todo, jnp.int32).T)
    cheap = {"xla_backend_optimization_level": 0}  # the program is large, its inputs are tiny
    run = jax.jit(lambda state: jax.lax.scan(serve, (state, True), todo)[0], compiler_options=cheap)
    state, open_ = run(pool.init(layout))
    assert not open_
    assert int(state.counters.faults) == 0
    kept = np.asarray(state.requests.seq_len)
    wanted = np.array([lengths[r % len(lengths)] for r in rows])
    return plan.Capacity(int(np.sum(kept == wanted)), int(kept[kept == wanted].sum()))


@pytest.mark.parametrize("window", [1, 7, 8, 9])
@pytest.mark.parametrize("page_size", [1, 4, 8])
def test_pages_of_a_sliding_window(window, page_size):
    """As many as its positions touch where they touch most."""
    specs = (KVSpec(1, 1, 8), KVSpec(1, 1, 8, window=window, name="swa"))
    layout = UnifiedLayout.from_bytes(
        specs, total_bytes=1 << 20, page_size=page_size, max_requests=4, max_tokens=64
    )
    touched = [len({p // page_size for p in range(max(0, n - window), n)}) for n in range(1, 65)]
    assert plan._needs(layout, 64)["swa"] == max(touched)
    assert plan._needs(layout, 1) == {"swa": 1, "full": 1}


def test_the_command(tmp_path, capsys):
    path = str(write(tmp_path, KIMI_48B))
    common = ("plan", "--model", path, "--bytes", "100GB", "--compile-cache", "off")
    assert main([*common, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = plan.plan(path, HUNDRED_GB).traffic["mixed"]
    assert found["traffic"]["mixed"]["unified"] == vars(expected.unified)
    assert main(common) == 0
    text = capsys.readouterr().out
    assert "kimi_linear: 49.1 billion parameters, 98.3 GB in bfloat16" in text
    assert f"{expected.unified.requests:,} ({expected.unified.tokens:,} tokens)" in text
    assert main([*common, "--kv-dtype", "fp8"]) == 0
    text = capsys.readouterr().out
    expected = plan.plan(path, HUNDRED_GB, kv_dtype="float8_e4m3fn").traffic["mixed"]
    assert "reserved for padding pages; KV rows in float8_e4m3fn" in text
    assert f"{expected.unified.requests:,} ({expected.unified.tokens:,} tokens)" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--bytes", "100MB"), "cannot hold one request of 65536 tokens"),
        (("--bytes", "700MB"), "a static split of 700000000 bytes"),
        (("--bytes", "100GB", "--short", "70000"), "short requests of 70000 tokens and long ones of 65536"),
        (("--bytes", "many"), "'many' is no size"),
    ],
)
def test_bad_input(tmp_path, capsys, options, message):
    try:
        code = main(["plan", "--model", str(write(tmp_path, KIMI_48B)), "--compile-cache", "off", *options])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err
