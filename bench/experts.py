"""Routed experts of one Kimi-Linear-48B layer: 256 experts of 3 x 2304 x 1024 bfloat16, 8 a token, random choices.

Every candidate is checked first, against float32 products with each token's own experts. Bandwidth counts the bytes of
the chosen experts once; where all are chosen and many tokens share them, TFLOP/s is the figure to look at.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import timing
from pallas_kernels.grouped_matmul import group_rows, grouped_matmul
from ukv_jax.models.experts import EXPERTS

EXPERTS_COUNT, HIDDEN, SIZE, CHOICES = 256, 2304, 1024, 8
EXPERT_BYTES = 3 * HIDDEN * SIZE * 2
TOKENS = (1, 4, 8, 16, 32, 64, 256, 2048, 8192)
GATHER_UP_TO = 32  # tokens


@jax.jit
def make_weights() -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    gate_up = jax.random.normal(keys[0], (EXPERTS_COUNT, 2 * SIZE, HIDDEN), jnp.bfloat16) * HIDDEN**-0.5
    down = jax.random.normal(keys[1], (EXPERTS_COUNT, HIDDEN, SIZE), jnp.bfloat16) * SIZE**-0.5
    return gate_up, down


@jax.jit
def one_by_one(
    x: jax.Array, chosen: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array
) -> jax.Array:
    """Float32 products of each token with its own experts."""

    def token(args: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        x, chosen, weights = args
        high = jax.lax.Precision.HIGHEST
        x = x.astype(jnp.float32)
        gate, up = jnp.split(
            jnp.einsum("kwh,h->kw", gate_up[chosen].astype(jnp.float32), x, precision=high), 2, -1
        )
        hidden = jax.nn.silu(gate) * up * weights[:, None]
        return jnp.einsum("khw,kw->h", down[chosen].astype(jnp.float32), hidden, precision=high)

    return jax.lax.map(token, (x, chosen, weights))


def bench(tokens: int, gate_up: jax.Array, down: jax.Array, iters: int, peers: Any) -> dict[str, Any]:
    rng = np.random.default_rng(tokens)
    chosen = jnp.asarray(rng.random((tokens, EXPERTS_COUNT)).argsort(1)[:, :CHOICES], jnp.int32)
    x = jnp.asarray(rng.normal(size=(tokens, HIDDEN)), jnp.bfloat16)
    weights = jnp.asarray(rng.random((tokens, CHOICES)), jnp.float32)
    names = ["grouped"] + (["gather"] if tokens <= GATHER_UP_TO else [])
    candidates = {}
    check = slice(0, min(tokens, 64))
    expected = np.asarray(one_by_one(x[check], chosen[check], weights[check], gate_up, down))
    for name in names:
        run = jax.jit(EXPERTS[name])
        found = np.asarray(run(x, chosen, weights, gate_up, down)[check], np.float32)
        np.testing.assert_allclose(
            found, expected, atol=0.02 * np.abs(expected).max(), err_msg=f"{name}, {tokens}"
        )
        candidates[name] = lambda run=run: run(x, chosen, weights, gate_up, down)
    for tile in (64, 128):  # the two products alone, on rows that are already grouped
        rows = group_rows(chosen.reshape(-1), EXPERTS_COUNT, tile=tile)
        wide = jnp.asarray(rng.normal(size=(rows.source.shape[0], HIDDEN)), jnp.bfloat16)
        narrow = wide[:, :SIZE]
        run = jax.jit(
            lambda a, b, rows, gate_up, down: (
                grouped_matmul(a, gate_up, rows),
                grouped_matmul(b, down, rows),
            )
        )
        candidates[f"products, tile {tile}"] = lambda run=run, a=wide, b=narrow, rows=rows: run(
            a, b, rows, gate_up, down
        )
    times = timing.flat(timing.measure(candidates, iters, peers))
    read = len(np.unique(chosen)) * EXPERT_BYTES
    flops = 2 * tokens * CHOICES * 3 * HIDDEN * SIZE
    for t in times.values():
        t["gb_per_s"] = round(read / t["us"] / 1e3, 1)
        t["tflop_per_s"] = round(flops / t["us"] / 1e6, 1)
    return dict(operation="experts", tokens=tokens, experts_read=read // EXPERT_BYTES, times=times)


def main(argv: list[str]) -> None:
    parser = timing.arguments(__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    options = parser.parse_args(argv)
    peers = timing.load_peers(options.peers)
    gate_up, down = make_weights()
    rows = []
    for tokens in options.tokens:
        rows.append(bench(tokens, gate_up, down, options.iters, peers))
        print(f"{tokens} tokens, {rows[-1]['experts_read']} experts read")
        for name, t in rows[-1]["times"].items():
            print(
                f"    {name:<20}{t['us']:>9.1f} us  {t['gb_per_s']:>7.0f} GB/s  {t['tflop_per_s']:>6.1f} TFLOP/s  "
                f"{t['launches']} launches",
                flush=True,
            )
    timing.write(options.json, timing.record("experts", rows, peers))
