"""Whole steps of models with state and K and V in one pool: compiled for CPU and GPU, they copy no pool."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import pytest

from tests.models.parity import GOLDEN
from tests.test_step_programs import BACKENDS, ROWS, abstract, check_no_copy, lanes
from ukv_jax import loop
from ukv_jax.attention import pool_specs
from ukv_jax.layout import UnifiedLayout
from ukv_jax.models.config import load_config
from ukv_jax.models.decoder import cache_spec, forward
from ukv_jax.models.weights import abstract_params


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cpu", BACKENDS)
@pytest.mark.parametrize(
    ("model", "program"), [("qwen3_5", "prefill"), ("falcon_h1", "decode"), ("inkling", "decode")]
)
def test_no_pool_is_copied(model, program, cpu):
    config = load_config(GOLDEN / model)
    config = replace(config, mixers=config.mixers[:2], mlps=config.mlps[:2])  # a layer of each kind

    def run(params, tokens, cache):
        return forward(params, config, tokens, cache, last_only=True)

    def make(total):
        specs = pool_specs(cache_spec(config))
        layout = UnifiedLayout.from_bytes(
            specs, total_bytes=total, page_size=64, max_requests=ROWS, max_tokens=4096
        )
        arguments = (abstract_params(config, jnp.bfloat16), *abstract(layout))
        if program == "decode":
            step = partial(loop.decode_loop, run, history_len=64, implementation="xla")
            return layout, (lambda params, state, gen: step(params, state, gen, 64), arguments, (1, 2))
        more = (lanes(), lanes("int32", 16), lanes(), lanes("bool"))
        return layout, (partial(loop.prefill_chunk, run, implementation="xla"), (*arguments, *more), (1, 2))

    check_no_copy(make, cpu)
