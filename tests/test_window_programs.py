"""Steps of a model with full and sliding-window layers: no copy of the pool, bf16 and fp8 caches."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import pytest

from tests.models import parity
from tests.test_step_programs import BACKENDS, ROWS, abstract, check_no_copy, lanes
from ukv_jax import loop
from ukv_jax.attention import pool_specs
from ukv_jax.layout import UnifiedLayout
from ukv_jax.models.config import load_config
from ukv_jax.models.decoder import cache_spec, forward
from ukv_jax.models.weights import abstract_params

CONFIG = load_config(parity.GOLDEN / "gpt_oss")


def unified(total_bytes, kv_dtype):
    specs = tuple(replace(s, dtype=kv_dtype) for s in pool_specs(cache_spec(CONFIG)))
    return UnifiedLayout.from_bytes(
        specs, total_bytes=total_bytes, page_size=64, max_requests=ROWS, max_tokens=4096, move_bytes=1 << 20
    )


def model(params, tokens, cache):
    return forward(params, CONFIG, tokens, cache, last_only=True)


def decode(params, state, gen):
    return loop.decode_loop(model, params, state, gen, 64, history_len=64, implementation="xla")


prefill = partial(loop.prefill_chunk, model, implementation="xla")


@pytest.mark.parametrize("cpu", BACKENDS)
@pytest.mark.parametrize("step, kv_dtype", [("decode", "float8_e4m3fn"), ("prefill", "bfloat16")])
def test_step_copies_no_pool(step, kv_dtype, cpu):
    def make(total):
        layout = unified(total, kv_dtype)
        state, gen = abstract(layout)
        args = abstract_params(CONFIG), state, gen
        if step == "prefill":
            args += (lanes(), lanes("int32", 64), lanes(), lanes(jnp.bool_))
        return layout, (decode if step == "decode" else prefill, args, 1)

    check_no_copy(make, cpu)
