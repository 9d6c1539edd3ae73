"""Stores from WGMMA registers to rows of a GMEM array, cut at a run-time row count."""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

_SCALAR = plgpu.Layout.WG_SPLAT(())


def store_rows(ref, values, first_row, rows, column: int = 0) -> None:
    """``ref[first_row + i, column + j] = values[i, j]`` for ``i < rows``, straight from registers.

    `values` is [64, n] in the WGMMA layout; `ref` is a two-dimensional GMEM ref, or one-dimensional when `values` is a
    [64] vector in the layout of WGMMA rows. The address arithmetic is 64-bit.
    """
    layout = plgpu.Layout.WGMMA if values.ndim == 2 else plgpu.Layout.WGMMA.reduce(1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, _SCALAR, _SCALAR), return_type=None)
    def store(_, ref, values, first_row, rows):
        _emit_store_rows(ref, values, first_row.registers.item(), rows.registers.item(), column)

    store(ref, values, jnp.int32(first_row), jnp.int32(rows))


def _emit_store_rows(ref, values, first_row, rows, column):
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    const = lambda value, ty: arith.constant(ty, ir.IntegerAttr.get(ty, value))
    stride = ir.MemRefType(ref.type).shape[1] if len(values.shape) == 2 else 1
    thread = mgpu.utils.thread_idx()
    lane, warp = arith.remui(thread, const(32, i32)), arith.divui(arith.remui(thread, const(128, i32)), const(32, i32))
    # A thread of a WGMMA accumulator holds rows 16 * warp + lane / 4 + {0, 8} and, in each 8 columns, 2 * (lane % 4) + {0, 1}.
    row = arith.addi(arith.muli(warp, const(16, i32)), arith.divui(lane, const(4, i32)))
    first_column = arith.muli(arith.remui(lane, const(4, i32)), const(2, i32))

    by_half = {0: [], 8: []}
    tile_strides = values.layout.tiling.tile_strides(tuple(mgpu.utils.get_contiguous_strides(values.shape)))
    width = values.shape[1] if len(values.shape) == 2 else 1
    for index in np.ndindex(values.registers.shape):
        row_offset, column_offset = divmod(sum(i * s for i, s in zip(index, tile_strides, strict=False)), width)
        by_half[row_offset].append((column_offset, values.registers[index]))

    element = values.mlir_dtype
    base = mgpu.utils.memref_ptr(ref)
    for half, registers in by_half.items():
        at = arith.addi(row, const(half, i32))
        inside = scf.IfOp(arith.cmpi(arith.CmpIPredicate.slt, at, rows))
        with ir.InsertionPoint(inside.then_block):
            flat = arith.muli(arith.extsi(i64, arith.addi(first_row, at)), const(stride, i64))
            if len(values.shape) == 2:
                flat = arith.addi(flat, arith.extsi(i64, arith.addi(first_column, const(column, i32))))
            pointer = mgpu.utils.getelementptr(base, [flat], element)
            for offset, register in registers:
                llvm.store(register, mgpu.utils.getelementptr(pointer, [offset], element))
            scf.yield_([])

