"""Whole decode steps of Kimi-Linear's published layers, captured in one command buffer: shared pool against static split.

Random bfloat16 weights made on the device. A call decodes `--steps` tokens for every row in one while_loop; the two pools
take turns, and which one goes first alternates. Reported are the median of the paired differences, relative to the static
call beside it, and its confidence interval (percentiles of the medians of pairs drawn anew with replacement).
Both pools decode the same requests: their tokens must be equal, and how many log-probabilities are equal to the last bit
is reported.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench import timing
from ukv_jax import loop, pool, requests
from ukv_jax.attention import begin_step, mla, pool_specs
from ukv_jax.attention.mla import latent_spec
from ukv_jax.layout import PoolLayout, StaticLayout, UnifiedLayout
from ukv_jax.loop import Generation
from ukv_jax.models.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from ukv_jax.models.decoder import cache_spec, forward
from ukv_jax.models.weights import abstract_params
from ukv_jax.pool import PoolState

PAGE_SIZE = 64
ADMIT_TOKENS = 512  # a row in one go, so that the pages of the rows lie among each other
WARM_UP = 3  # calls of each pool before the first that counts
RESAMPLES = 10_000
CONFIDENCE = 95  # per cent
# XLA's defaults, and loops and conditions (tests/deviceless.py).
CAPTURE_LOOPS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL",
    "xla_gpu_graph_min_graph_size": 1,
}


def kimi_linear(layers: int) -> ModelConfig:
    """The first layers of Kimi-Linear-48B-A3B (its config.json on Hugging Face); all 27 are the whole model."""
    mixers = tuple("mla" if i % 4 == 3 or i == 26 else "kda" for i in range(layers))
    return ModelConfig(
        family="kimi_linear",
        vocab_size=163840,
        hidden_size=2304,
        intermediate_size=9216,
        rms_norm_eps=1e-5,
        mixers=mixers,
        mlps=("dense",) + ("moe",) * (layers - 1),
        dtype="bfloat16",
        max_position=1 << 20,
        mla=MLAConfig(
            num_heads=32, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ),
        kda=KDAConfig(num_heads=32, head_dim=128, conv_kernel=4),
        moe=MoEConfig(
            num_experts=256,
            experts_per_token=8,
            intermediate_size=1024,
            num_shared_experts=1,
            renormalize=True,
            scaling_factor=2.446,
        ),
    )


def random_params(config: ModelConfig) -> dict[str, Any]:
    """A parameter tree on the device: matrices that keep the scale of their input, norms of 1, decays as trained ones."""

    @partial(jax.jit, static_argnums=(1, 2, 3))
    def make(key, name: str, shape: tuple[int, ...], dtype):
        if name == "A_log":
            return jnp.log(jax.random.uniform(key, shape, dtype, 1, 16))
        if name == "dt_bias":
            return jax.random.normal(key, shape, dtype) - 3
        if name == "conv":
            return jax.random.normal(key, shape, dtype) * 0.5
        if len(shape) == 1:
            return jnp.zeros(shape, dtype) if name == "bias" else jnp.ones(shape, dtype)
        return jax.random.normal(key, shape, dtype) * jnp.asarray(shape[-1] ** -0.5, dtype)

    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract_params(config, jnp.bfloat16))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    made = [make(k, str(path[-1].key), x.shape, x.dtype) for k, (path, x) in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, made)


def layouts(config: ModelConfig, rows: int, max_tokens: int) -> dict[str, PoolLayout]:
    """Room for `rows` requests of max_tokens tokens in either pool."""
    specs = pool_specs(cache_spec(config))
    limits = dict(page_size=PAGE_SIZE, max_tokens=max_tokens, max_requests=rows)
    pages = rows * math.ceil(max_tokens / PAGE_SIZE)
    return {
        "unified": UnifiedLayout.from_tokens(specs, tokens=pages * PAGE_SIZE, requests=rows, **limits),
        "static": StaticLayout.from_pages(specs, pages={"full": pages, "state": rows}, **limits),
    }


def decode(config: ModelConfig, steps: int, delivery: str) -> Callable[..., Any]:
    """(params, state, gen) -> (state, gen, result) of `steps` decode steps."""

    def model(params, tokens, cache):
        return forward(params, config, tokens, cache, last_only=True)

    def run(params, state: PoolState, gen: Generation):
        return loop.decode_loop(model, params, state, gen, steps, history_len=steps, delivery=delivery)

    return run


def fill_chunk(state: PoolState, rows: jax.Array, new: jax.Array) -> PoolState:
    """Random KV rows of the next `new` tokens of each request: the same for a request and position in either pool."""
    step = begin_step(state, rows, new, tokens=ADMIT_TOKENS)
    full = state.layout.full
    spec = latent_spec(full)
    buffer, width = step.buffer, spec.kv_lora_rank + spec.qk_rope_head_dim
    for layer in range(spec.num_layers):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), layer), state.requests.seq_len.max())
        kv = jax.random.normal(key, (*step.positions.shape, width), jnp.bfloat16)
        kv_c, k_pe = jnp.split(kv, [spec.kv_lora_rank], axis=-1)
        buffer = mla.write(full, buffer, layer, step.write_locs[full.name], kv_c, k_pe)
    return replace(state, buffer=buffer)


def fill_states(state: PoolState, rows: jax.Array) -> PoolState:
    """Random recurrent and convolution states."""
    step = begin_step(state, rows, jnp.ones_like(rows), tokens=1)
    for layer in range(state.layout.state.spec.parts[0].num_layers):
        key = jax.random.fold_in(jax.random.key(2), layer)
        parts = step.read_state(layer)
        step = step.write_state(
            layer, {name: jax.random.normal(key, x.shape, x.dtype) for name, x in parts.items()}
        )
    return replace(state, buffer=step.buffer)


def begin(layout: PoolLayout, lengths: np.ndarray, max_new: int) -> tuple[PoolState, Generation]:
    """Requests that have `lengths` tokens behind them, with random KV rows and states, and are decoding."""
    rows = jnp.arange(layout.max_requests, dtype=jnp.int32)
    final = jnp.asarray(lengths, jnp.int32)
    most = int(lengths.max())
    admit = jax.jit(partial(loop.admit, pages_per_row=ADMIT_TOKENS // PAGE_SIZE), donate_argnums=0)
    append = jax.jit(partial(requests.append, max_tokens=ADMIT_TOKENS), donate_argnums=0)
    state = jax.jit(partial(pool.init, layout))()
    fill = jax.jit(fill_chunk, donate_argnums=0)
    for tokens in range(ADMIT_TOKENS, most + ADMIT_TOKENS, ADMIT_TOKENS):
        state, reserved = admit(state, rows, jnp.minimum(final, tokens))
        if not bool(reserved.granted.all()):
            raise RuntimeError(
                f"the pool of {layout.total_bytes} bytes has no room for {tokens} tokens a row"
            )
        new = jnp.clip(final - (tokens - ADMIT_TOKENS), 0, ADMIT_TOKENS)
        state = fill(state, rows, new)
        state, appended = append(state, rows, new)
        if not bool((appended.ok | (new == 0)).all()):
            raise RuntimeError("a row has no pages for its tokens")
    state = jax.jit(fill_states, donate_argnums=0)(state, rows)
    gen = loop.init_generation(layout, max_new_tokens=max_new)
    gen = loop.enroll(gen, rows, max_new=max_new, seed=rows)
    decoding = jnp.ones_like(gen.decoding)
    return state, replace(gen, decoding=decoding, next_token=rows + 1)


@dataclass
class Twin:
    """A pool, its compiled loop and what it has decoded."""

    run: Callable[..., Any]
    params: dict[str, Any]
    state: PoolState
    gen: Generation
    steps: int

    def call(self) -> float:
        """Seconds of one call."""
        start = time.perf_counter()
        self.state, self.gen, result = self.run(self.params, self.state, self.gen)
        steps = int(result.steps)
        seconds = time.perf_counter() - start
        if steps != self.steps or bool(result.starved):
            raise RuntimeError(f"{steps} of {self.steps} steps ran")
        return seconds


def paired_difference(static: np.ndarray, unified: np.ndarray) -> dict[str, float]:
    """Median of unified / static - 1 over pairs, in per cent, and its confidence interval."""
    difference = 100 * (unified / static - 1)
    drawn = np.random.default_rng(0).integers(0, len(difference), (RESAMPLES, len(difference)))
    tails = ((100 - CONFIDENCE) / 2, (100 + CONFIDENCE) / 2)
    low, high = np.percentile(np.median(difference[drawn], axis=1), tails)
    return dict(median_pct=float(np.median(difference)), low_pct=float(low), high_pct=float(high))


def bench(
    config: ModelConfig,
    params: dict[str, Any],
    rows: int,
    context: int,
    steps: int,
    pairs: int,
    delivery: str,
) -> dict[str, Any]:
    rng = np.random.default_rng(rows)
    lengths = rng.integers(context // 4, context + 1, rows)
    new = steps * (pairs + WARM_UP)
    twins = {}
    compile_seconds = {}
    for name, layout in layouts(config, rows, context + new).items():
        state, gen = begin(layout, lengths, max_new=new + 1)
        start = time.perf_counter()
        lowered = jax.jit(decode(config, steps, delivery), donate_argnums=(1, 2)).lower(params, state, gen)
        run = lowered.compile(compiler_options=CAPTURE_LOOPS)
        compile_seconds[name] = round(time.perf_counter() - start, 1)
        print(f"{name}: compiled in {compile_seconds[name]} s", flush=True)
        twins[name] = Twin(run, params, state, gen, steps)
    seconds: dict[str, list[float]] = {name: [] for name in twins}
    for i in range(WARM_UP + pairs):
        order = list(twins) if i % 2 else list(twins)[::-1]
        for name in order:
            took = twins[name].call()
            if i >= WARM_UP:
                seconds[name].append(took)
    unified, static = twins["unified"].gen, twins["static"].gen
    made = slice(0, new)
    same = np.asarray(unified.tokens[:, made] == static.tokens[:, made])
    if not same.all():
        raise RuntimeError(f"{rows} rows: {1 - same.mean():.2%} of the tokens differ between the pools")
    bits = [np.asarray(lax.bitcast_convert_type(g.logprobs[:, made], jnp.int32)) for g in (unified, static)]
    us = {name: np.array(values) / steps * 1e6 for name, values in seconds.items()}
    return dict(
        operation="step",
        layers=config.num_layers,
        mixers={kind: config.mixers.count(kind) for kind in sorted(set(config.mixers))},
        rows=rows,
        context=context,
        steps=steps,
        pairs=pairs,
        delivery=delivery,
        us_per_step={
            name: dict(zip(("p10", "median", "p90"), np.percentile(values, (10, 50, 90)).round(1).tolist()))
            for name, values in us.items()
        },
        difference={k: round(v, 3) for k, v in paired_difference(us["static"], us["unified"]).items()},
        equal_tokens=float(same.mean()),
        equal_logprob_bits=float((bits[0] == bits[1]).mean()),
        compile_seconds=compile_seconds,
    )


def main(argv: list[str]) -> None:
    parser = timing.arguments(__doc__.splitlines()[0])
    parser.set_defaults(iters=30)
    parser.add_argument("--layers", type=int, default=8, help="of the model's 27 (default: %(default)s)")
    parser.add_argument("--rows", type=int, nargs="*", default=[64], help="requests (default: 64)")
    parser.add_argument(
        "--context", type=int, default=8192, help="tokens behind the longest (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=16, help="of a call (default: %(default)s)")
    parser.add_argument("--delivery", choices=("table", "stream", "virtual"), default="table")
    options = parser.parse_args(argv)
    if options.peers is not None:
        parser.error("there is no peer of a whole step")
    config = kimi_linear(options.layers)
    params = random_params(config)
    results = []
    for rows in options.rows:
        row = bench(config, params, rows, options.context, options.steps, options.iters, options.delivery)
        results.append(row)
        each, d = row["us_per_step"], row["difference"]
        print(
            f"{rows} rows, up to {options.context} tokens: unified {each['unified']['median']} us a step, static "
            f"{each['static']['median']} us; {d['median_pct']:+.3f} % [{d['low_pct']:+.3f}, {d['high_pct']:+.3f}]; "
            f"{row['equal_tokens']:.1%} of tokens and {row['equal_logprob_bits']:.1%} of log-probabilities equal",
            flush=True,
        )
    record = timing.record("step", results, None)
    record["unit"] = f"us of wall clock a decode step; difference: per cent, {CONFIDENCE} % interval"
    timing.write(options.json, record)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
