"""Which kernels serve the published models on a Hopper GPU, and that they give there what XLA gives, from both kinds of pool.

One layer of every kind that a published config has, at its own widths and in bfloat16, over pages of 64 and by table: two
chunks of a prompt, then a decode step. MLPs and vocabulary are small ones.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device, implementations
from tests.deviceless import requires_plugin
from tests.models.pool_cache import make_pool_cache
from tests.models.test_deepseek_loading import V2_LITE, V3
from tests.models.test_gemma4 import GEMMA_E2B
from tests.models.test_gpt_oss import GPT_OSS_20B
from tests.models.test_inkling import INKLING_SMALL
from tests.models.test_loading import KIMI_48B
from tests.models.test_state_loading import FALCON_1_5B, QWEN
from ukv_jax.models.config import load_config
from ukv_jax.models.decoder import cache_spec, run_layers
from ukv_jax.models.decoder import logits as logits_of
from ukv_jax.models.weights import abstract_params

MLA = {"mla_decode mosaic_gpu"}, {"mla_prefill mosaic_gpu"}
GQA = {"gqa_decode mosaic_gpu"}, {"gqa_prefill mosaic_gpu"}
STATE = "state_step mosaic_gpu"
# Config, and what serves a decode step and a chunk. A chunk of recurrent state is matrix products of XLA.
MODELS = {
    "Kimi-Linear-48B-A3B": (KIMI_48B, MLA[0] | {STATE}, MLA[1]),
    "DeepSeek-V3": (V3, *MLA),
    "DeepSeek-V2-Lite": (V2_LITE, *MLA),
    "Qwen3.5-0.8B": (QWEN, GQA[0] | {STATE}, GQA[1]),
    "Falcon-H1-1.5B": (FALCON_1_5B, GQA[0] | {STATE}, GQA[1]),
    "gpt-oss-20b": (GPT_OSS_20B, *GQA),
    "gemma-4-E2B": (GEMMA_E2B, GQA[0], GQA[1] | {"gqa_prefill triton"}),  # heads of 512
    "Inkling-Small": (INKLING_SMALL, GQA[0] | {STATE}, {"gqa_prefill triton"}),  # a bias by distance
}
ROWS, CHUNK = 2, 320  # two chunks are longer than every window


def published(name, tmp_path):
    """The config with one layer of each kind and small MLPs."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name][0]))
    config = load_config(tmp_path)
    mixers = tuple(sorted(set(config.mixers), key=config.mixers.index))
    small = dict(vocab_size=64, intermediate_size=128, moe=None, logits_width=None, kv_shared_layers=0)
    mlp = "dense"
    if config.family == "gpt_oss":  # has no dense ones
        mlp = "moe"
        small["moe"] = replace(config.moe, num_experts=2, experts_per_token=2, intermediate_size=128)
    if config.per_layer_width:
        small["per_layer_vocab"] = 64
    return replace(config, mixers=mixers, mlps=(mlp,) * len(mixers), **small)


def step_of(config):
    """params, tokens, cache, new_len -> logits, cache"""

    def step(params, tokens, cache, new_len):
        *_, (x, cache) = run_layers(params, config, tokens, cache.begin(tokens.shape[1], new_len))
        return logits_of(params, config, x), cache.end()

    return step


@contextmanager
def recorded():
    """Attention and state steps that are traced inside, each with the module that served it."""
    served, load = set(), implementations._load

    def watched(module, function):
        call = load(module, function)

        def run(*args, **options):
            out = call(*args, **options)
            name = " ".join(module.split(".")[1:3])
            if name.startswith(("gqa", "mla", "state")):
                served.add(name)
            return out

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(implementations, "_load", watched)
        yield served


@pytest.mark.deviceless
@requires_plugin
@pytest.mark.parametrize("name", MODELS)
def test_what_is_chosen(name, tmp_path, monkeypatch):
    config, (_, decode, chunk) = published(name, tmp_path), MODELS[name]
    params = abstract_params(config)
    cache = make_pool_cache(cache_spec(config), ROWS, 3 * CHUNK, unified=True)
    new_len = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    monkeypatch.setattr(device, "target", lambda: ("cuda", (9, 0)))
    for tokens, expected in ((1, decode), (CHUNK, chunk)):
        with recorded() as served:
            jax.eval_shape(
                step_of(config), params, jax.ShapeDtypeStruct((ROWS, tokens), jnp.int32), cache, new_len
            )
        assert served == expected


# V2-Lite's kernels are Kimi's.
@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in MODELS if name != "DeepSeek-V2-Lite"])
def test_both_pools_give_the_same_bits_and_what_xla_gives(name, tmp_path):
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU")
    config, (_, decode, chunk) = published(name, tmp_path), MODELS[name]
    params = random_params(config)
    unified, served = run(config, params, None)
    assert served == [chunk, set(), decode]  # the second chunk runs the first one's program
    static, _ = run(config, params, None, unified=False)
    xla, _ = run(config, params, "xla")
    for ours, twin, want in zip(unified, static, xla, strict=True):
        assert ours.tobytes() == twin.tobytes()
        assert np.linalg.norm(ours - want) <= 2e-2 * np.linalg.norm(want)


def random_params(config):
    def fill(i, x):
        noise = jax.random.normal(jax.random.key(i), x.shape)
        return (noise * x.shape[-1] ** -0.5 if x.ndim > 1 else 1 + 0.1 * noise).astype(x.dtype)

    leaves, tree = jax.tree.flatten(abstract_params(config))
    return jax.jit(lambda: tree.unflatten(map(fill, range(len(leaves)), leaves)))()


def run(config, params, implementation, *, unified=True):
    """Logits of every step's valid tokens, and what served in its trace."""
    rng = np.random.default_rng(0)
    options = dict(unified=unified, implementation=implementation)
    cache = make_pool_cache(cache_spec(config), ROWS, 3 * CHUNK, **options)
    step, found, traced = jax.jit(step_of(config)), [], []
    for tokens, lengths in ((CHUNK, (CHUNK, 65)), (CHUNK, (CHUNK, 7)), (1, (1, 1))):
        ids = jnp.asarray(rng.integers(0, 64, (ROWS, tokens)), jnp.int32)
        with recorded() as served:
            logits, cache = step(params, ids, cache, jnp.asarray(lengths, jnp.int32))
        valid = np.arange(tokens) < np.array(lengths)[:, None]
        found.append(np.asarray(logits)[valid])
        traced.append(served)
    return found, traced
