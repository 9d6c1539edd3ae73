"""Page moves: 64 MB in place inside a pool of 8 GB, in pages of real layouts.

Bandwidth counts bytes read and bytes written. The ceiling is XLA's elementwise copy of as many bytes from one buffer to
another.
Every candidate is checked first: each page's checksum must be where the page went, and all others unchanged.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import timing
from pallas_kernels.move_pages import move_pages

POOL = 8 << 30
MOVED = 64 << 20
LATENT = 576 * 2  # bytes of an MLA row in bf16: kv_lora_rank 512 and 64 rotary dimensions
# name: (bytes of a page, bytes of a block)
LAYOUTS = {
    "Kimi-Linear MLA, 7 layers, page size 64": (7 * 64 * LATENT, 64 * LATENT),
    "DeepSeek-V3 MLA, 61 layers, page size 64": (61 * 64 * LATENT, 64 * LATENT),
    "Kimi-Linear MLA, 7 layers, page size 1": (7 * LATENT, LATENT),
    "Kimi-Linear KDA state slot": (43_450_368, 65_536),
    "gpt-oss-120b window KV, 18 layers, page size 16": (36 * 16 * 1024, 16 * 1024),
}


@partial(jax.jit, static_argnames=("page_bytes",))
def checksums(buffer: jax.Array, page_bytes: int) -> jax.Array:
    """One number a page, which depends on where in the page each byte lies."""
    pages = buffer.shape[0] // page_bytes

    def one(p):
        page = jax.lax.dynamic_slice(
            buffer.reshape(-1, 128), (p * (page_bytes // 128), 0), (page_bytes // 128, 128)
        )
        weight = jnp.arange(page_bytes, dtype=jnp.uint32).reshape(-1, 128) * jnp.uint32(2654435761) | 1
        return (page.astype(jnp.uint32) * weight).sum(dtype=jnp.uint32)

    return jax.lax.map(
        one, jnp.arange(pages, dtype=jnp.int32), batch_size=64 if page_bytes < 1 << 20 else None
    )


def bench(name: str, page_bytes: int, block_bytes: int, iters: int, peers) -> dict[str, Any]:  # type: ignore[no-untyped-def]
    total = POOL // block_bytes * block_bytes
    pages, lanes = total // page_bytes, max(MOVED // page_bytes, 1)
    rng = np.random.default_rng(lanes)
    src, dst = rng.choice(np.arange(1, pages, dtype=np.int32), (2, lanes), replace=False)
    words = jax.jit(lambda: jax.random.bits(jax.random.key(1), (total // 4,), jnp.uint32))()
    buffer = jax.jit(lambda w: jax.lax.bitcast_convert_type(w, jnp.uint8).reshape(-1))(words)
    del words
    candidates = {}
    state = {"buffer": buffer}
    del buffer
    for implementation in ("mosaic", "xla"):
        move = jax.jit(
            partial(
                move_pages, page_bytes=page_bytes, block_bytes=block_bytes, implementation=implementation
            ),
            donate_argnums=0,
        )

        def call(move=move):
            state["buffer"] = move(state["buffer"], jnp.asarray(src), jnp.asarray(dst))
            return state["buffer"]

        if page_bytes % 128 == 0:
            before = np.asarray(checksums(state["buffer"], page_bytes))
            call()
            after = before.copy()
            after[dst] = before[src]
            np.testing.assert_array_equal(
                checksums(state["buffer"], page_bytes), after, err_msg=implementation
            )
            src, dst = (
                dst,
                src[rng.permutation(lanes)],
            )  # so that the next implementation has something to move
        candidates[implementation] = call
    moved = lanes * page_bytes
    plain = jnp.arange(moved // 4, dtype=jnp.int32)
    candidates["copy (ceiling)"] = partial(jax.jit(lambda x: x ^ 1), plain)
    times = timing.flat(timing.measure(candidates, iters, peers))
    for t in times.values():
        t["gb_per_s"] = round(2 * moved / t["us"] / 1e3, 1)
    return dict(
        operation="move", layout=name, page_bytes=page_bytes, pages=lanes, moved_bytes=moved, times=times
    )


def main(argv: list[str]) -> None:
    options = timing.arguments(__doc__.splitlines()[0]).parse_args(argv)
    peers = timing.load_peers(options.peers)
    rows = []
    for name, sizes in LAYOUTS.items():
        rows.append(bench(name, *sizes, options.iters, peers))
        print(f"{name}: {rows[-1]['pages']} pages of {sizes[0]} bytes")
        for candidate, t in rows[-1]["times"].items():
            share = t["gb_per_s"] / rows[-1]["times"]["copy (ceiling)"]["gb_per_s"]
            print(
                f"    {candidate:<18}{t['us']:>9.2f} us  {t['gb_per_s']:>7.0f} GB/s  {share:.2f}", flush=True
            )
    timing.write(options.json, timing.record("move", rows, peers))
