"""One small problem of every GPU kernel, run and checked: ``python -m tests.kernels.small_cases NAME`` (tools/sanitize.sh)."""

import sys
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np

from pallas_kernels.bind_pages import bind, tombstone
from pallas_kernels.gather_translate import (
    fill_packed_read_stream,
    fill_read_table,
    packed_indptr,
    translate_write_locs,
)
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.move_pages import move_pages
from tests.kernels import chunk_case, gqa_case, mla_case, prefill_case, test_grouped_matmul, test_state_step
from tests.kernels.test_bind_pages import VIRTUAL, random_maps, tombstone_in_python
from tests.kernels.test_move_pages import moved
from tests.pool import test_requests_gpu
from ukv_jax import pool, requests

LENGTHS = [0, 1, 63, 64, 65, 200]


def mla(implementation: str, kv_dtype: str, heads: int, page_size: int = 64, times: int = 1) -> None:
    for delivery, s_q in (("table", 1), ("virtual", 2)) if page_size > 1 else (("stream", 2),):
        case = mla_case.make_case(
            LENGTHS * times, heads=heads, s_q=s_q, page_size=page_size, kv_dtype=kv_dtype
        )
        case.check(*case.run(implementation, delivery))


def mla_parts(implementation: str, kv_dtype: str, heads: int) -> None:
    """One row in many parts, and one of two in more than its merge takes at once."""
    for lengths, s_q in (([3000], 1), ([70, 5000], 2)):
        case = mla_case.make_case(lengths, heads=heads, s_q=s_q, kv_dtype=kv_dtype)
        case.check(*case.run(implementation, "table"))


def gqa(implementation: str, kv_dtype: str = "bfloat16", delivery: str = "virtual") -> None:
    bias = {"bias_extent": 16} if kv_dtype == "bfloat16" else {}
    for options in ({"sinks": True, "window": 70}, {"s_q": 4, "logit_cap": 5.0, **bias}):
        case = gqa_case.make_case(
            LENGTHS, head_dim=128, heads=8, dtype="bfloat16", kv_dtype=kv_dtype, page_size=64, **options
        )
        case.check(*case.run(implementation, delivery))


def gqa_chunk(implementation: str) -> None:
    few = dict(head_dim=128, window=70)
    # More tiles than multiprocessors: Mosaic deals no tile's positions to several blocks.
    many = dict(head_dim=64, heads=48, kv_heads=24, sinks=True)
    for options in (few, many):
        case = chunk_case.make_chunk([0, 100, 64], [90, 17, 1], 90, dtype="bfloat16", **options)
        case.check(*case.run(implementation))


def mla_chunk(implementation: str) -> None:
    case = prefill_case.make_prefill([0, 1, 63, 64, 65, 200, 0, 128], gap=5)
    case.check(*case.run(implementation))


def index(implementation: str) -> None:
    rng = np.random.default_rng(0)
    rows, columns = 5, 7
    v2p = np.concatenate([[0], rng.permutation(60) + 1, [-1]])
    words = rng.permutation(np.arange(1, 61))[: rows * columns].reshape(rows, columns)
    for page_size in (1, 4, 64):
        lengths = np.array([columns * page_size, 0, 1, page_size + 1, 3 * page_size - 1])
        lengths = np.minimum(lengths, columns * page_size)
        arrays = [jnp.asarray(x, jnp.int32) for x in (words, v2p, lengths)]
        options = dict(page_size=page_size, blocks_per_page=3, implementation=implementation)
        table, _ = fill_read_table(*arrays, **options)
        indptr = packed_indptr(arrays[2])
        ids, _ = fill_packed_read_stream(*arrays, indptr, capacity=int(lengths.sum()), **options)
        pos = [np.arange(n) for n in lengths]
        expected = [v2p[words[b]][p // page_size] * 3 * page_size + p % page_size for b, p in enumerate(pos)]
        np.testing.assert_array_equal(ids, np.concatenate(expected))
        for b, n in enumerate(-(-lengths // page_size)):
            np.testing.assert_array_equal(table[b, :n], v2p[words[b, :n]] * 3)
        last = words[:, 0] * page_size
        locs = translate_write_locs(jnp.asarray(last, jnp.int32), arrays[1], **options)
        np.testing.assert_array_equal(locs, v2p[words[:, 0]] * 3 * page_size)


def maps(implementation: str) -> None:
    rng = np.random.default_rng(1)
    v2p, p2v = random_maps(rng, 250)
    free, holes = np.full(2 * VIRTUAL, -7), np.full(2 * VIRTUAL + 200, -7)
    virtual = rng.integers(-3, VIRTUAL + 4, 700)
    state = [jnp.asarray(x, jnp.int32) for x in (v2p, p2v, free, 17, holes, 0)]
    got = tombstone(*state, jnp.asarray(virtual, jnp.int32), implementation=implementation)
    for found, expected in zip(got, tombstone_in_python(v2p, p2v, free, 17, holes, 0, virtual), strict=True):
        np.testing.assert_array_equal(found, expected)
    pages = got[2][17:57], got[4][:40]
    bound, _ = bind(got[0], got[1], *pages, implementation=implementation)
    np.testing.assert_array_equal(bound[pages[0]], pages[1])


def whole_requests(implementation: str) -> None:
    """Reserve and release, whole: several warpgroups and trips, and a pool too small for all."""
    rows = 200
    state, every = pool.init(test_requests_gpu.many(rows)), jnp.arange(rows, dtype=jnp.int32)
    check = partial(test_requests_gpu.check, implementation)
    state, _ = check(requests.reserve, state, every, 4 + every % 31, pages_per_row=8)
    state, _ = check(requests.reserve, state, every, 4 + every % 31, pages_per_row=1)
    state, _ = requests.mark_release(state, every[::2])
    state = check(requests.release_pending, state, max_pages=64)
    state, _ = check(requests.release, state, every[1::2])
    assert not int(state.requests.page_count.sum())


def moves(implementation: str) -> None:
    rng = np.random.default_rng(2)
    for page, block, pages in ((96, 32, 40), (27, 9, 40), (20_480, 4096, 9)):
        buffer = rng.integers(0, 256, page * pages, dtype=np.uint8)
        src, dst = np.split(rng.permutation(np.arange(1, pages))[:8], 2)
        lanes = [jnp.asarray(x, jnp.int32) for x in (src, dst)]
        options = dict(page_bytes=page, block_bytes=block, implementation=implementation)
        np.testing.assert_array_equal(
            move_pages(jnp.asarray(buffer), *lanes, **options), moved(buffer, src, dst, page)
        )


def state(implementation: str, *names: str) -> None:
    for name in names:
        case, rng = test_state_step.CASES[name], np.random.default_rng(3)
        pool, inputs = test_state_step.Pool(case, rng), test_state_step.random_inputs(case, rng)
        slots, live = jnp.asarray(test_state_step.SLOTS, jnp.int32), np.array(test_state_step.SLOTS) > 0
        _, out = test_state_step.run(implementation, case, pool.buffer, slots, pool.blocks, *inputs)
        expected, _ = test_state_step.exact(case, inputs, pool.state())
        assert test_state_step.error(out[live], expected[live]) < 5e-3


def experts(implementation: str) -> None:
    x, matrices, layout, expected, slot = test_grouped_matmul.case(150, 256, 128, jnp.bfloat16, 64)
    found = grouped_matmul(x, matrices, layout, implementation=implementation)
    np.testing.assert_allclose(np.asarray(found, np.float32)[slot], expected, rtol=2e-2, atol=0.5)


CASES: dict[str, tuple[Callable[..., None], tuple]] = {
    "mla-few": (mla, ("mosaic", "bfloat16", 16)),
    "mla-few-late": (mla, ("mosaic", "bfloat16", 16, 64, 11)),
    "mla-few-parts": (mla_parts, ("mosaic", "bfloat16", 16)),
    "mla-many": (mla, ("mosaic", "bfloat16", 128)),
    "mla-late": (mla, ("mosaic", "bfloat16", 128, 64, 11)),  # a row for every group of blocks
    "mla-rows-few": (mla, ("mosaic", "bfloat16", 16, 1)),
    "mla-rows-many": (mla, ("mosaic", "bfloat16", 128, 1)),
    "mla-rows-late": (mla, ("mosaic", "bfloat16", 128, 1, 11)),
    "mla-fp8-few": (mla, ("mosaic", "float8_e4m3fn", 16)),
    "mla-fp8-tiles": (mla, ("mosaic", "float8_e4m3fn", 35)),
    "mla-fp8-many": (mla, ("mosaic", "float8_e4m3fn", 128)),
    "mla-fp8-late": (mla, ("mosaic", "float8_e4m3fn", 35, 64, 11)),
    "mla-fp8-parts": (mla_parts, ("mosaic", "float8_e4m3fn", 35)),
    "mla-triton": (mla, ("triton", "bfloat16", 16)),
    "gqa": (gqa, ("mosaic",)),
    "gqa-rows": (gqa, ("mosaic", "bfloat16", "stream")),
    "gqa-fp8": (gqa, ("mosaic", "float8_e4m3fn")),
    "gqa-triton": (gqa, ("triton",)),
    "gqa-chunk": (gqa_chunk, ("mosaic",)),
    "gqa-chunk-triton": (gqa_chunk, ("triton",)),
    "mla-chunk": (mla_chunk, ("mosaic",)),
    "index": (index, ("mosaic",)),
    "maps": (maps, ("mosaic",)),
    "requests": (whole_requests, ("mosaic",)),
    "moves": (moves, ("mosaic",)),
    "delta": (state, ("mosaic", "kda", "kda in two parts", "gdn")),
    "ssm": (state, ("mosaic", "mamba2", "mamba2 bfloat16")),
    "convolution": (state, ("mosaic", "convolution", "convolution bfloat16")),
    "experts": (experts, ("mosaic",)),
}


def main(names: list[str]) -> None:
    """Runs the named problems; with none prints all names. "NAME=IMPLEMENTATION" takes another implementation."""
    if not names:
        print(*CASES)
    for name in names:
        name, _, other = name.partition("=")
        function, (implementation, *arguments) = CASES[name]
        function(other or implementation, *arguments)
        print(f"{name}: right")


if __name__ == "__main__":
    main(sys.argv[1:])
