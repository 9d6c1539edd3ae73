"""GQA attention of chunks in bf16: against attention over dense K and V, and the XLA form where something is cached.

K and V of one layer in pages of 64 tokens placed at random, as in `bench.gqa`; all rows have the same lengths. TFLOP/s count
the visible pairs alone, 4 * head_dim for each query head: no masked part of a block. cuDNN (where nothing is cached) and
torch's SDPA (where the module `peers` is given, without windows) read dense arrays that are made beforehand; neither takes
part where there are sinks or a bias. Every candidate is checked against f32 attention of sampled rows, heads and queries
first.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import timing
from bench.gqa import Batch
from pallas_kernels.gqa_prefill import gqa_prefill
from pallas_kernels.gqa_prefill.mosaic_gpu import HEAD_DIMS

TOLERANCE = 4e-3
SAMPLED = 64  # queries at the start and at the end of a row that are checked
# rows, new tokens, cached tokens, heads, kv_heads, head_dim, window, sinks, extent of a relative bias, what has these heads
SHAPES = [
    (8, 4096, 0, 32, 8, 128, None, False, None, "Llama-3.1-8B, Qwen3-8B"),
    (64, 512, 0, 32, 8, 128, None, False, None, "Llama-3.1-8B, Qwen3-8B"),
    (4, 1024, 16384, 32, 8, 128, None, False, None, "Llama-3.1-8B, Qwen3-8B"),
    (8, 4096, 0, 64, 8, 64, None, False, None, "gpt-oss, full layers"),
    (8, 4096, 0, 64, 8, 64, 128, False, None, "gpt-oss, sliding layers"),
    (8, 4096, 0, 64, 8, 64, None, True, None, "gpt-oss, full layers"),
    (8, 4096, 0, 16, 4, 256, None, False, None, "Qwen3.5 has 256"),
    (4, 1024, 4096, 32, 8, 64, None, False, 1024, "Inkling has a bias"),
    (4, 2048, 0, 8, 1, 512, None, False, None, "gemma-4 E2B, full layers"),
    (16, 256, 8192, 64, 8, 64, 128, True, None, "gpt-oss, sliding layers"),
    (16, 256, 8192, 64, 8, 64, None, False, None, "gpt-oss, full layers"),
    (8, 64, 8192, 32, 8, 128, None, False, None, "Llama-3.1-8B, Qwen3-8B"),
    (1, 64, 32768, 32, 8, 128, None, False, None, "Llama-3.1-8B, Qwen3-8B"),
    (1, 2048, 65536, 32, 8, 128, None, False, None, "Llama-3.1-8B, Qwen3-8B"),
]


@partial(jax.jit, static_argnames=("window",))
def dense(q, k, v, first, window, sink, bias):
    """f32 attention of one head: q [n, head_dim] from position `first` on, k and v [kv_tokens, head_dim], a sink's logit or
    None, bias [n, extent] or None."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    s = jnp.einsum("qd,kd->qk", q, k, precision="highest") * q.shape[1] ** -0.5
    distance = first + jnp.arange(len(q))[:, None] - jnp.arange(len(k))
    if bias is not None:
        extent = bias.shape[1]
        near = jnp.take_along_axis(bias.astype(jnp.float32), jnp.clip(distance, 0, extent - 1), axis=1)
        s += jnp.where(distance < extent, near, 0)
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    s = jnp.where(seen, s, -jnp.inf)
    if sink is not None:  # joins the sum without a value
        s = jnp.pad(s, ((0, 0), (0, 1)), constant_values=sink)
        v = jnp.pad(v, ((0, 1), (0, 0)))
    return jnp.einsum("qk,kd->qd", jax.nn.softmax(s), v, precision="highest")


class Problem:
    """A chunk of each row over the pool of `bench.gqa.Batch`."""

    def __init__(self, rows, new, cached, heads, kv_heads, head_dim, window, sinks, extent, model):
        self.window, self.cached = window, cached
        self.batch = Batch.draw(rows, heads, kv_heads, head_dim, cached + new, False)
        self.q = jax.random.normal(jax.random.key(2), (rows, new, heads, head_dim), jnp.bfloat16)
        seen = np.arange(cached + 1, cached + new + 1, dtype=np.float64)
        pairs = float(np.minimum(seen, window or np.inf).sum())
        self.flops = 4 * head_dim * heads * rows * pairs
        self.row = dict(
            rows=rows, new=new, cached=cached, heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window,
            sinks=sinks, bias=extent, model=model,
        )  # fmt: skip
        self.sinks = jax.random.normal(jax.random.key(3), (heads,)) * 2 if sinks else None
        self.bias = None
        if extent is not None:
            self.bias = jax.random.normal(jax.random.key(4), (rows, new, heads, extent), jnp.bfloat16)
        self.options: dict[str, Any] = dict(
            kv_dtype=jnp.bfloat16, num_kv_heads=kv_heads, sm_scale=head_dim**-0.5, window=window
        )

    def call(self, implementation: str, source: Any) -> Callable[[], Any]:
        start = jnp.full(len(self.batch.lengths), self.cached, jnp.int32)
        run = jax.jit(partial(gqa_prefill, implementation=implementation, **self.options))
        more = {"sinks": self.sinks, "relative_bias": self.bias}
        return partial(run, self.q, self.batch.pool, source, jnp.int32(0), jnp.int32(1), start, **more)

    def dense(self) -> tuple[jax.Array, jax.Array]:
        """K and V, [rows, cached + new, kv_heads, head_dim]."""
        rows, tokens = len(self.batch.lengths), self.cached + self.q.shape[1]
        k, v = (jnp.concatenate(x) for x in zip(*(self.batch.row(b) for b in range(rows)), strict=True))
        k, v = (x.reshape(rows, -1, *x.shape[-2:])[:, :tokens] for x in (k, v))
        return k, v

    def sdpa(self, peers: Any) -> Callable[[], Any]:
        """torch's, on the same dense arrays."""
        bias = importlib.import_module("torch.nn.attention.bias")
        attention = importlib.import_module("torch.nn.functional").scaled_dot_product_attention
        q, k, v = (peers.as_torch(x).transpose(1, 2) for x in (self.q, *self.dense()))
        if self.cached == 0:
            call = partial(attention, is_causal=True)
        else:
            call = partial(attention, attn_mask=bias.causal_lower_right(q.shape[2], k.shape[2]))
        scale = self.options["sm_scale"]
        return lambda: (call(q, k, v, scale=scale, enable_gqa=True).transpose(1, 2),)

    def candidates(self, xla: bool, peers: Any = None) -> dict[str, Callable[[], Any]]:
        """Name -> call whose result begins with the output."""
        batch = self.batch
        ours = "mosaic" if self.bias is None and self.q.shape[3] in HEAD_DIMS else "triton"
        calls = {
            ours: self.call(ours, batch.table),
            f"{ours}, virtual ids": self.call(ours, batch.virtual),
            "triton": self.call("triton", batch.table),
        }
        if self.sinks is not None or self.bias is not None:
            return calls
        if self.cached == 0:
            k, v = self.dense()
            attention = jax.jit(
                partial(
                    jax.nn.dot_product_attention,
                    scale=self.options["sm_scale"],
                    is_causal=True,
                    local_window_size=None if self.window is None else (self.window - 1, 0),
                    implementation="cudnn",
                )
            )
            calls["cuDNN, dense"] = lambda: (attention(self.q, k, v),)
        elif xla:
            calls["xla"] = self.call("xla", batch.table)
        if peers is not None and self.window is None:
            calls["torch SDPA, dense"] = self.sdpa(peers)
        return calls

    def check(self, name: str, out: jax.Array) -> float:
        """Largest relative error of sampled queries over the first and the last row and head."""
        worst, new = 0.0, self.q.shape[1]
        group = self.q.shape[2] // self.batch.kv_heads
        for b, h in {(0, 0), (len(self.batch.lengths) - 1, self.q.shape[2] - 1)}:
            kv = self.batch.row(b)
            k, v = (x.reshape(-1, *x.shape[-2:])[: self.cached + new, h // group] for x in (kv[0], kv[1]))
            for first in {0, max(0, new - SAMPLED)}:
                at = slice(first, first + SAMPLED)
                sink, bias = (
                    None if self.sinks is None else self.sinks[h],
                    None if self.bias is None else self.bias[b, at, h],
                )
                want = dense(self.q[b, at, h], k, v, self.cached + first, self.window, sink, bias)
                got = out[b, at, h].astype(jnp.float32)
                worst = max(worst, float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)))
        if not worst <= TOLERANCE:
            raise AssertionError(f"{name}: relative error {worst:.3g} is over {TOLERANCE}")
        return worst

    def measure(self, calls: dict[str, Callable[[], Any]], iters: int, peers: Any = None) -> dict[str, Any]:
        errors = {}
        for name in list(calls):
            try:
                out = calls[name]()[0]
                errors[name] = self.check(name, out if isinstance(out, jax.Array) else peers.as_jax(out))
            except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as reason:
                if not name.endswith("dense"):
                    raise
                print(f"    {name} is left out: {str(reason)[:120]}", flush=True)
                del calls[name]
        times = timing.flat(timing.measure(calls, iters, peers))
        for name, t in times.items():
            t["relative_error"] = float(f"{errors[name]:.2e}")
            t["tflops"] = round(self.flops / t["us"] / 1e6, 1)
        return self.row | {"times": times}


def show(row: dict[str, Any]) -> None:
    print(" ".join(f"{k} {v}" for k, v in row.items() if k != "times"))
    for name, t in row["times"].items():
        print(
            f"    {name:<22}{t['us']:>10.1f} us{t['tflops']:>8.1f} TFLOP/s, {t['launches']} launches, "
            f"error {t['relative_error']:.1e}",
            flush=True,
        )


def main(argv: list[str]) -> None:
    parser = timing.arguments(__doc__.splitlines()[0])
    parser.add_argument("--only", type=int, nargs="*", help="indices of shapes (default: all)")
    parser.add_argument(
        "--no-xla", action="store_true", help="leave out the XLA form, which takes most of the time"
    )
    options = parser.parse_args(argv)
    peers = timing.load_peers(options.peers)
    rows = []
    for i in options.only if options.only is not None else range(len(SHAPES)):
        problem = Problem(*SHAPES[i])
        rows.append(problem.measure(problem.candidates(not options.no_xla, peers), options.iters, peers))
        show(rows[-1])
        timing.write(options.json, timing.record("gqa_prefill", rows, peers), quiet=True)
