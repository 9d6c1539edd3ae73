"""The compile harness itself, on programs whose answer is known."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.deviceless import CAPTURE_LOOPS, TARGETS, Thunk, compile_for, parse_thunks, requires_plugin, shape


def test_parse_thunks_nests_by_indentation():
    text = """\
001: kCopy         [source       | next=002 (1)] kCopy
000: kCommandBuffer [prev=001 (1) | sink] \n\
    002: kWhile        [prev=001 (1) | next=006 (1)]   \n\
condition:
        003: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
      body:
        004: kCustomKernel [source       | sink] input_scatter_fusion grid: [128, 1, 1]
007: kCustomCall [prev=002 (1) | sink] kernel
"""
    assert parse_thunks(text) == (
        Thunk("kCopy", "kCopy", ()),
        Thunk("kCommandBuffer", "", ()),
        Thunk("kWhile", "", ("kCommandBuffer",)),
        Thunk("kCustomKernel", "loop_compare_fusion", ("kCommandBuffer", "kWhile")),
        Thunk("kCustomKernel", "input_scatter_fusion", ("kCommandBuffer", "kWhile")),
        Thunk("kCustomCall", "kernel", ()),
    )
    assert parse_thunks(text)[3].captured
    assert not parse_thunks(text)[0].captured


def write_rows(pool, index, rows):
    """Scatter of bf16 rows through a typed view of a byte pool, then a read through the same view."""
    view = lax.bitcast_convert_type(pool.reshape(-1, 256, 2), jnp.bfloat16)
    view = view.at[index].set(rows, mode="drop")
    back = lax.bitcast_convert_type(view, jnp.uint8).reshape(-1)
    return back, view[index].astype(jnp.float32).sum()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.deviceless
@requires_plugin
def test_in_place_scatter(target):
    temps = []
    for size in (4 << 30, 8 << 30):
        args = shape((size,), "uint8"), shape((64,), "int32"), shape((64, 256), "bfloat16")
        program = compile_for(write_rows, *args, donate=0, target=target)
        assert program.alias_bytes >= size
        temps.append(program.temp_bytes)
    assert temps[0] == temps[1] < 1 << 20
    assert not any(thunk.kind == "kCopy" for thunk in program.launches)


@pytest.mark.deviceless
@requires_plugin
def test_a_copy_is_seen():
    """Without donation the pool is copied: the harness must say so."""
    size = 1 << 30
    args = shape((size,), "uint8"), shape((64,), "int32"), shape((64, 256), "bfloat16")
    program = compile_for(write_rows, *args)
    assert program.alias_bytes == 0
    assert any("opy" in thunk.kind + thunk.name for thunk in program.launches)


@pytest.mark.deviceless
@requires_plugin
def test_loop_is_captured_only_when_asked():
    def steps(pool, index, rows):
        return lax.while_loop(
            lambda carry: carry[1][0] < 8,
            lambda carry: (write_rows(carry[0], carry[1], rows)[0], carry[1] + 1),
            (pool, index),
        )

    args = shape((1 << 30,), "uint8"), shape((64,), "int32"), shape((64, 256), "bfloat16")
    plain = compile_for(steps, *args, donate=(0, 1))
    captured = compile_for(steps, *args, donate=(0, 1), options=CAPTURE_LOOPS)
    (loop,) = (thunk for thunk in plain.thunks if thunk.kind == "kWhile")
    assert not loop.captured
    assert all(thunk.captured for thunk in captured.launches)
    assert [thunk.kind for thunk in captured.thunks].count("kCommandBuffer") == 1


def copy_kernel(tile_rows):
    """A Mosaic kernel that brings a tile of 1 KiB rows through shared memory."""

    def kernel(x_ref, o_ref, tile, barrier):
        plgpu.copy_gmem_to_smem(x_ref, tile, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(tile, o_ref)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((tile_rows, 256), jnp.float32),
        scratch_types=[plgpu.SMEM((tile_rows, 256), jnp.float32), plgpu.Barrier()],
        grid=(1,),
        grid_names=("block",),
    )


@pytest.mark.deviceless
@requires_plugin
def test_shared_memory_of_the_target_counts():
    assert compile_for(copy_kernel(128), shape((128, 256), "float32")).launches
    with pytest.raises(Exception, match=r"RESOURCE_EXHAUSTED|[Ss]hared memory|smem"):
        compile_for(copy_kernel(256), shape((256, 256), "float32"))
