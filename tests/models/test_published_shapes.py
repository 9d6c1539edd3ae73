"""Which kernels serve the published models on a Hopper GPU: a decode step and a chunk are traced, not compiled, for one layer
of every kind that a config has, at its own widths, in bfloat16, over pages of 64 and by table.

MLPs and vocabulary are small ones. What the kernels give is the matter of tests/kernels.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import device, implementations
from tests.deviceless import requires_plugin
from tests.models.pool_cache import PoolCache
from tests.models.test_deepseek_loading import V2_LITE, V3
from tests.models.test_gemma4 import GEMMA_E2B
from tests.models.test_gpt_oss import GPT_OSS_20B
from tests.models.test_inkling import INKLING_SMALL
from tests.models.test_loading import KIMI_48B
from tests.models.test_state_loading import FALCON_1_5B, QWEN
from ukv_jax import pool
from ukv_jax.attention import pool_specs
from ukv_jax.layout import UnifiedLayout
from ukv_jax.models.config import load_config
from ukv_jax.models.decoder import cache_spec, run_layers
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
HOPPER, ROWS = ("cuda", (9, 0)), 2


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


@pytest.fixture(params=[
    pytest.param("described", marks=[pytest.mark.deviceless, requires_plugin]),
    pytest.param("at hand", marks=pytest.mark.gpu),
])  # fmt: skip
def hopper(request, monkeypatch):
    """A Hopper GPU, there or not."""
    if request.param == "described":
        monkeypatch.setattr(device, "target", lambda: HOPPER)
    elif device.target() != HOPPER:
        pytest.skip("no Hopper GPU")


@pytest.mark.parametrize("name", MODELS)
def test_what_is_chosen(name, tmp_path, hopper):
    config, (_, decode, chunk) = published(name, tmp_path), MODELS[name]
    layout = UnifiedLayout.from_tokens(
        pool_specs(cache_spec(config)), tokens=4096, requests=ROWS, page_size=64, max_tokens=1024
    )
    cache = PoolCache(jax.eval_shape(partial(pool.init, layout)), None, "table")

    def step(params, tokens, new_len, cache):
        *_, (x, cache) = run_layers(params, config, tokens, cache.begin(tokens.shape[1], new_len))
        return x, cache.end()

    for tokens, expected in ((1, decode), (320, chunk)):
        ids, lengths = (jax.ShapeDtypeStruct(dims, jnp.int32) for dims in ((ROWS, tokens), (ROWS,)))
        with recorded() as served:
            jax.eval_shape(step, abstract_params(config), ids, lengths, cache)
        assert served == expected
