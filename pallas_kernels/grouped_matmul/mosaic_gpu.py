"""Grouped product on Hopper in Pallas Mosaic GPU: persistent blocks over (tile of rows, tile of columns).

Rows come padded to whole tiles of one group, so that every load and store is one plain TMA and a block needs to know
no more than its tile's group. Columns vary fastest: blocks that run together share rows, and matrices in L2.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels import device
from pallas_kernels.grouped_matmul.api import GroupedRows

BLOCK_K = 64  # one swizzled line of 16-bit elements
STAGES = 5


def multiply(x: Array, matrices: Array, rows: GroupedRows) -> Array:
    """See `grouped_matmul`."""
    slots, inner = x.shape
    outer = matrices.shape[1]
    tile = rows.tile
    problems = []
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        problems.append(f"dtype {x.dtype} (bfloat16 or float16)")
    if tile not in (64, 128):
        problems.append(f"tile {tile} (64 or 128)")
    if inner % BLOCK_K or outer % 64:
        problems.append(f"inner {inner} and outer {outer} (multiples of 64)")
    if problems:
        raise NotImplementedError(f"grouped_matmul, mosaic: no {'; no '.join(problems)}")
    block_n = 128 if outer % 128 == 0 else 64
    grid = (slots // tile, outer // block_n)
    stages = min(STAGES, inner // BLOCK_K)
    delay = min(1, stages - 1)  # a wgmma may still read its operands while the next is issued

    def kernel(group_ref, num_tiles_ref, x_ref, matrices_ref, out_ref, staged):
        num_tiles = num_tiles_ref[0]

        @plgpu.nd_loop(grid, collective_axes="block")
        def _(loop):
            t, n = loop.index

            @pl.when(t < num_tiles)
            def _():
                matrix = matrices_ref.at[group_ref[t]]

                def product(acc):
                    plgpu.emit_pipeline(
                        lambda _, a, b: plgpu.wgmma(acc, a, b.transpose((1, 0))),
                        grid=(inner // BLOCK_K,),
                        in_specs=[
                            plgpu.BlockSpec((tile, BLOCK_K), lambda k: (t, k), delay_release=delay),
                            plgpu.BlockSpec((block_n, BLOCK_K), lambda k: (n, k), delay_release=delay),
                        ],
                        max_concurrent_steps=stages,
                    )(x_ref, matrix)
                    return acc[...]

                value = pl.run_scoped(product, plgpu.ACC((tile, block_n), jnp.float32))
                plgpu.wait_smem_to_gmem(
                    0, wait_read_only=True
                )  # the last store still reads the staging buffer
                staged[...] = value.astype(staged.dtype)
                plgpu.commit_smem()
                target = out_ref.at[pl.ds(t * tile, tile), pl.ds(n * block_n, block_n)]
                plgpu.copy_smem_to_gmem(staged, target)

        plgpu.wait_smem_to_gmem(0)

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((slots, outer), x.dtype),
        scratch_types=[plgpu.SMEM((tile, block_n), x.dtype)],
        grid=(device.core_count(),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return run(rows.tile_group, rows.num_tiles.reshape(1), x, matrices)
