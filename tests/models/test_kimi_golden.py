"""Kimi-Linear against transformers on two tiny checkpoints (tools/make_golden_kimi.py): a random one as the other families
have it, logits, layers and tokens; and the trained one, logits and tokens."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.models import parity
from tests.models.test_loading import KIMI_48B
from ukv_jax.models.config import load_config
from ukv_jax.models.decoder import cache_spec, forward
from ukv_jax.models.weights import load_model

ROOT = Path(__file__).parents[2]
CHUNK, STEPS = 64, 256
CACHES = parity.caches()
UNIFIED = [kind for kind in CACHES if kind.startswith("unified")]
on_pools = partial(parity.exact_on_pools, slow=True)
# The trained checkpoint goes through streams and virtual ids too.
random_on_pools = partial(on_pools, repeated=("unified-stream", "unified-virtual"))
# Whole numbers of the published config that choose a form and are no size.
SAME = {
    "first_k_dense_replace", "moe_layer_freq", "num_shared_experts", "num_expert_group", "topk_group",
    "num_nextn_predict_layers",
}  # fmt: skip


run_random = cache(lambda kind: parity.run("kimi_linear", CACHES[kind]))


def test_the_random_checkpoint_has_every_published_field_and_the_values_of_all_that_is_no_size():
    read = load_config(parity.GOLDEN / "kimi_linear")
    assert read.mixers == ("kda", "kda", "mla") * 2
    assert read.mlps == ("dense", *["moe"] * 5)
    config = json.loads((parity.GOLDEN / "kimi_linear" / "config.json").read_text())
    sizes = {name for name, value in KIMI_48B.items() if type(value) is int and name not in SAME}
    assert config.keys() | {"transformers_version"} == KIMI_48B.keys()
    assert config["linear_attn_config"].keys() == KIMI_48B["linear_attn_config"].keys()
    for name in KIMI_48B.keys() - sizes - {"transformers_version", "linear_attn_config"}:
        assert config[name] == KIMI_48B[name], name


@pytest.mark.parametrize("kind", [random_on_pools(kind) for kind in CACHES])
def test_logits_layers_and_tokens(kind):
    parity.check_run(run_random(kind), parity.load_golden("kimi_linear"))


@pytest.mark.parametrize("kind", [random_on_pools(kind) for kind in UNIFIED])
def test_unified_pools_equal_the_static_one_bit_for_bit(kind):
    parity.check_same_bits(run_random(kind), run_random("static-table"))


# The trained checkpoint.


@pytest.fixture(scope="module")
def golden():
    with np.load(Path(__file__).parent / "golden" / "kimi_linear_tiny.npz") as file:
        count = sum(name.startswith("ids_") for name in file.files)
        return [
            {name: file[f"{name}_{i}"] for name in ("ids", "positions", "logits", "greedy")}
            for i in range(count)
        ]


@pytest.fixture(scope="module")
def run(golden):
    """Name of a cache -> float32 logits of every prompt (all rows at once, in padded chunks), then greedy tokens."""
    prompts = [g["ids"] for g in golden]
    return cache(lambda name: generate(CACHES[name], prompts, "float32", STEPS))


on_every_cache = pytest.mark.parametrize("name", [on_pools(kind) for kind in CACHES])


def generate(make_cache, prompts, dtype, steps):
    params, config = load_model(ROOT / "checkpoints" / "kimi-linear-tiny", dtype=dtype)
    longest = max(map(len, prompts))
    cache = make_cache(cache_spec(config, dtype), len(prompts), longest + steps)

    @parity.jit  # a few chunks do not pay for LLVM's passes, 256 steps do
    def step(params, tokens, cache, new_len):
        logits, cache = forward(params, config, tokens, cache.begin(tokens.shape[1], new_len))
        return logits, cache.end()

    @jax.jit
    def greedy(params, first, cache):
        def body(carry, _):
            token, cache = carry
            cache = cache.begin(1, jnp.ones(len(prompts), jnp.int32))
            logits, cache = forward(params, config, token[:, None], cache, last_only=True)
            return (jnp.argmax(logits, -1).astype(jnp.int32), cache.end()), token

        cache = cache.begin(1, jnp.zeros(len(prompts), jnp.int32)).end()  # the shapes of a decode step
        return lax.scan(body, (first, cache), None, length=steps)[1].T

    logits = [[] for _ in prompts]
    for at in range(0, longest, CHUNK):
        parts = [p[at : at + CHUNK] for p in prompts]
        tokens = np.stack([np.pad(p, (0, CHUNK - len(p)), constant_values=-7) for p in parts])
        out, cache = step(params, jnp.asarray(tokens), cache, jnp.asarray([len(p) for p in parts]))
        for row, part in enumerate(parts):
            logits[row].append(np.asarray(out[row, : len(part)]))
    logits = [np.concatenate(parts) for parts in logits]
    if not steps:
        return logits, None
    first = jnp.asarray([row[-1].argmax() for row in logits], jnp.int32)
    return logits, np.asarray(greedy(params, first, cache))


def test_prompts_span_pages(golden):
    lengths = [len(g["ids"]) for g in golden]
    assert min(lengths) == 1
    assert 64 in lengths
    assert max(lengths) > 128


@on_every_cache
def test_float32_logits(run, name, golden):
    for found, g in zip(run(name)[0], golden, strict=True):
        assert parity.relative(found[g["positions"]], g["logits"]) <= 1e-4


@on_every_cache
def test_greedy_tokens(run, name, golden):
    for found, g in zip(run(name)[1], golden, strict=True):
        np.testing.assert_array_equal(found, g["greedy"])


def test_bfloat16_stays_near(golden):
    found, _ = generate(CACHES["dense"], [g["ids"] for g in golden], "bfloat16", 0)
    for logits, g in zip(found, golden, strict=True):
        assert parity.relative(logits[g["positions"]], g["logits"]) <= 0.1


@pytest.mark.parametrize("name", [on_pools(kind) for kind in UNIFIED])
def test_pools_and_deliveries_agree_bit_for_bit(run, name):
    """The same kernel over a unified pool and a static split: only block ids differ, so no bit of the logits may."""
    for found, expected in zip(run(name), run("static-table"), strict=True):
        for ours, static in zip(found, expected, strict=True):
            assert ours.tobytes() == static.tobytes()
