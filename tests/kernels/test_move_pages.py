"""Page moves against NumPy, for every implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.move_pages import addressing, mosaic_gpu, move_pages
from tests.kernels.emulation import IMPLEMENTATIONS, run

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def moved(buffer: np.ndarray, src, dst, page_bytes: int) -> np.ndarray:
    result = buffer.copy()
    pages = len(buffer) // page_bytes
    for s, d in zip(src, dst, strict=True):
        if 0 < s < pages and 0 < d < pages:
            result[d * page_bytes : (d + 1) * page_bytes] = buffer[s * page_bytes : (s + 1) * page_bytes]
    return result


@every_implementation
class TestMove:
    @given(seed=st.integers(0, 2**32 - 1))
    @settings(max_examples=8)
    @pytest.mark.parametrize(
        "page_bytes, block_bytes, pages, tail",
        [
            (96, 32, 40, 32),  # the buffer ends in part of a page
            (27, 9, 40, 9),  # one byte at a time
            (10, 10, 40, 0),
            (12, 4, 40, 8),
            (24, 24, 40, 0),
            (20_480, 4096, 9, 4096),  # more than one piece, the last one short
        ],
    )
    def test_any_moves(self, implementation, page_bytes, block_bytes, pages, tail, seed):
        rng = np.random.default_rng(seed)
        buffer = rng.integers(0, 256, page_bytes * pages + tail, dtype=np.uint8)
        lanes = 4
        src, dst = np.split(rng.permutation(np.arange(1, pages))[: 2 * lanes], 2)
        src[rng.random(lanes) < 0.3] = rng.choice([-1, 0, -5, pages, 2**31 - 1])
        dst[rng.random(lanes) < 0.1] = rng.choice([-1, 0, pages, pages + 3])
        got = run(
            implementation, move_pages, jnp.asarray(buffer), jnp.asarray(src, jnp.int32),
            jnp.asarray(dst, jnp.int32), page_bytes=page_bytes, block_bytes=block_bytes,
        )  # fmt: skip
        np.testing.assert_array_equal(np.array(got), moved(buffer, src, dst, page_bytes))

    def test_many_lanes_on_few_blocks(self, implementation, monkeypatch):
        monkeypatch.setattr(mosaic_gpu, "BLOCKS", 3)
        rng = np.random.default_rng(0)
        buffer = rng.integers(0, 256, 64 * 101, dtype=np.uint8)
        src, dst = np.arange(1, 51), rng.permutation(np.arange(51, 101))
        got = run(
            implementation, move_pages, jnp.asarray(buffer), jnp.asarray(src, jnp.int32),
            jnp.asarray(dst, jnp.int32), page_bytes=64, block_bytes=64,
        )  # fmt: skip
        np.testing.assert_array_equal(np.array(got), moved(buffer, src, dst, 64))

    def test_no_lanes(self, implementation):
        nothing = jnp.zeros((0,), jnp.int32)
        buffer = jnp.arange(8, dtype=jnp.uint8)
        got = run(implementation, move_pages, buffer, nothing, nothing, page_bytes=4, block_bytes=4)
        assert got.tolist() == list(range(8))

    @pytest.mark.parametrize(
        "size, page, block, message",
        [
            (64, 24, 16, "page_bytes=24 must be a positive multiple of block_bytes=16"),
            (60, 16, 8, "block_bytes=8 must divide the buffer's 60 bytes"),
            (64, 0, 8, "page_bytes=0"),
        ],
    )
    def test_sizes_that_do_not_fit(self, implementation, size, page, block, message):
        one = jnp.ones((1,), jnp.int32)
        with pytest.raises(ValueError, match=message):
            run(
                implementation,
                move_pages,
                jnp.zeros(size, jnp.uint8),
                one,
                one,
                page_bytes=page,
                block_bytes=block,
            )


def test_access_width():
    assert [addressing.access_width(n) for n in (1152 * 64, 24, 20, 6, 27)] == [16, 8, 4, 2, 1]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="asks the CPU compiler")
def test_no_copy_of_the_pool_on_a_cpu():
    total, lanes, page = 1 << 28, 16, 8192
    move = jax.jit(
        lambda b, s, d: move_pages(b, s, d, page_bytes=page, block_bytes=4096, implementation="xla"),
        donate_argnums=0,
    )
    pages = jax.ShapeDtypeStruct((lanes,), jnp.int32)
    memory = move.lower(jax.ShapeDtypeStruct((total,), jnp.uint8), pages, pages).compile().memory_analysis()
    assert memory.alias_size_in_bytes == total
    assert memory.temp_size_in_bytes < 3 * lanes * page


@pytest.mark.gpu
@pytest.mark.xdist_group("large pools")
def test_pool_past_2_to_the_32_bytes():
    """Pages on both sides of 2^32 bytes, moved across it; the rest of the pool stays."""
    page = 27 * 64 * 1152
    pages = (5 << 30) // page
    high = (1 << 32) // page + 5
    words = jax.jit(lambda: jnp.arange(page * pages // 4, dtype=jnp.uint32) * jnp.uint32(2654435761))()
    buffer = jax.jit(lambda x: jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(-1))(words)
    window = jax.jit(lambda b, p: jax.lax.dynamic_slice(b.reshape(pages, page), (p, 0), (1, page))[0])
    before = {p: np.array(window(buffer, p)) for p in (3, 4, 7, high, high + 1, high + 2)}
    src, dst = jnp.array([high, 4, -1], jnp.int32), jnp.array([3, high + 2, 5], jnp.int32)
    move = jax.jit(
        lambda b, s, d: move_pages(b, s, d, page_bytes=page, block_bytes=64 * 1152, implementation="mosaic"),
        donate_argnums=0,
    )
    buffer = move(buffer, src, dst)
    for now, then in [(3, high), (high + 2, 4), (4, 4), (high, high), (7, 7), (high + 1, high + 1)]:
        np.testing.assert_array_equal(np.array(window(buffer, now)), before[then])
