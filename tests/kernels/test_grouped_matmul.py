"""Grouped matrix products: the layout of the rows, and every implementation against numpy."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul as gm
from pallas_kernels.grouped_matmul import group_rows, grouped_matmul
from tests.deviceless import compile_for, requires_plugin, shape

GROUPS = 5


@pytest.mark.parametrize("rows", [1, 37, 3000])
@pytest.mark.parametrize("tile", [4, 64])
def test_rows_are_sorted_into_tiles(rows, tile):
    group = np.random.default_rng(rows).integers(-1, GROUPS + 1, rows).astype(np.int32)
    out = jax.jit(partial(group_rows, num_groups=GROUPS, tile=tile))(group)
    known = (group >= 0) & (group < GROUPS)
    sizes = np.bincount(group[known], minlength=GROUPS)
    used = -(-sizes // tile)
    assert out.num_tiles == used.sum() <= len(out.tile_group)
    np.testing.assert_array_equal(out.tile_group[: used.sum()], np.repeat(np.arange(GROUPS), used))
    slot = np.asarray(out.slot)
    assert (slot[~known] >= len(out.source)).all()
    np.testing.assert_array_equal(out.source[slot[known]], np.flatnonzero(known))
    np.testing.assert_array_equal(out.tile_group[slot[known] // tile], group[known])
    assert np.isin(np.delete(np.asarray(out.source), slot[known]), 0).all()


def test_everything_in_one_group_and_nothing_anywhere():
    one = group_rows(jnp.full(100, 3, jnp.int32), GROUPS, tile=64)
    assert one.num_tiles == 2
    np.testing.assert_array_equal(one.slot, np.arange(100))
    none = group_rows(jnp.full(100, GROUPS, jnp.int32), GROUPS, tile=64)
    assert none.num_tiles == 0


def case(rows, inner, outer, dtype, tile, seed=0):
    rng = np.random.default_rng(seed)
    group = jnp.asarray(rng.integers(0, GROUPS + 1, rows), jnp.int32)
    x = jnp.asarray(rng.normal(size=(rows, inner)), dtype)
    matrices = jnp.asarray(rng.normal(size=(GROUPS, outer, inner)), dtype)
    layout = group_rows(group, GROUPS, tile=tile)
    expected = np.zeros((rows, outer))
    for g in range(GROUPS):
        own = np.asarray(group) == g
        expected[own] = np.asarray(x, np.float64)[own] @ np.asarray(matrices[g], np.float64).T
    known = np.asarray(group) < GROUPS
    return x[layout.source], matrices, layout, expected[known], np.asarray(layout.slot)[known]


def test_xla():
    x, matrices, layout, expected, slot = case(50, 12, 7, jnp.float32, 8)
    found = jax.jit(partial(grouped_matmul, implementation="xla"))(x, matrices, layout)
    np.testing.assert_allclose(np.asarray(found)[slot], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tile", "inner", "outer"), [(64, 192, 64), (128, 64, 128)])
def test_mosaic_interpreted(monkeypatch, capfd, tile, inner, outer):
    """The kernel's own body with TMA, barriers and wgmma simulated."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.grouped_matmul import mosaic_gpu

    interpret = plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(mosaic_gpu.plgpu, "kernel", partial(plgpu.kernel, interpret=interpret))
    monkeypatch.setattr(mosaic_gpu.device, "core_count", lambda: 3)
    x, matrices, layout, expected, slot = case(30, inner, outer, jnp.bfloat16, tile)
    found = mosaic_gpu.multiply(x, matrices, layout)
    np.testing.assert_allclose(np.asarray(found, np.float32)[slot], expected, rtol=2e-2, atol=0.2)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())  # the interpreter prints what it sees


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize(("inner", "outer"), [(2304, 2048), (1024, 2304), (64, 64)])
def test_mosaic_on_the_card(tile, inner, outer):
    x, matrices, layout, expected, slot = case(300, inner, outer, jnp.bfloat16, tile)
    found = jax.jit(partial(grouped_matmul, implementation="mosaic"))(x, matrices, layout)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(found, np.float32)[slot] / scale, expected / scale, atol=1e-2)


@pytest.mark.deviceless
@requires_plugin
@pytest.mark.parametrize("rows", [8, 16384])
def test_no_product_of_every_row_with_every_matrix(rows):
    """Kimi-Linear's gate and up projections for an H200: temporaries are the padded rows and the result."""
    tile = 64 if rows < 4096 else 128

    def program(x, group, matrices):
        layout = group_rows(group, 256, tile=tile)
        return grouped_matmul(x[layout.source], matrices, layout, implementation="mosaic")

    compiled = compile_for(
        program,
        shape((rows, 2304), "bfloat16"),
        shape((rows,), "int32"),
        shape((256, 2048, 2304), "bfloat16"),
    )
    slots = (rows // tile + min(rows, 256)) * tile
    assert compiled.temp_bytes <= slots * 2304 * 2 + (64 << 20)


@pytest.mark.parametrize(
    ("x", "matrices", "error", "message"),
    [
        ((63, 64), (GROUPS, 64, 64), ValueError, r"x has shape \[63, 64\], need \[64, inner\]"),
        ((64, 32), (GROUPS, 64, 64), ValueError, r"need \[groups, outer, 32\]"),
        ((64, 96), (GROUPS, 64, 96), NotImplementedError, r"no inner 96 and outer 64 \(multiples of 64\)"),
    ],
)
def test_refusals(named_for_hopper, x, matrices, error, message):
    layout = group_rows(jnp.zeros(1, jnp.int32), GROUPS, tile=64)
    with pytest.raises(error, match=message):
        grouped_matmul(
            jnp.zeros(x, jnp.bfloat16), jnp.zeros(matrices, jnp.bfloat16), layout, implementation="mosaic"
        )


def test_mixed_dtypes_are_refused():
    layout = group_rows(jnp.zeros(1, jnp.int32), GROUPS, tile=64)
    with pytest.raises(ValueError, match="x is bfloat16 but the matrices are float32"):
        gm.grouped_matmul(jnp.zeros((64, 64), jnp.bfloat16), jnp.zeros((GROUPS, 64, 64)), layout)
