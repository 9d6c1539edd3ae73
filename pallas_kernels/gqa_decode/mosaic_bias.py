"""A bias by distance, added to scores in WGMMA registers: Mosaic has no load of single elements by index."""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

_SCALAR = plgpu.Layout.WG_SPLAT(())
_ACC = plgpu.Layout.WGMMA


def add_bias(scores, bias_ref, line, rows, distance, first_query_row, *, sharing: int | None, unit: float):
    """``scores[r, c] + unit * bias_ref[line + r, d]`` with ``d = distance + (first_query_row + r) // sharing - c``.

    0 is added where d lies outside the table and in the rows outside ``rows[0] <= r < rows[1]``.

    Args:
      scores: f32 [64, n] in the WGMMA layout.
      bias_ref: f32 [lines, extent] in global memory; addresses are computed in 64 bits.
      line, rows, distance, first_query_row: int32 scalars.
      sharing: rows of one query; None where all rows are of the same, whose `distance` is the whole.
    """
    result = plgpu.ShapeDtypeStruct(scores.shape, scores.dtype, layout=_ACC)

    @plgpu.inline_mgpu(arg_types=(_ACC, plgpu.RefType(), *[_SCALAR] * 5), return_type=result)
    def add(_, scores, bias_ref, *scalars):
        values = [scalar.registers.item() for scalar in scalars]
        return _emit(scores, bias_ref, values, sharing, unit)

    return add(scores, bias_ref, *(jnp.int32(x) for x in (line, *rows, distance, first_query_row)))


def _emit(scores, bias_ref, scalars, sharing, unit):
    line, first_row, end_row, distance, first_query_row = scalars
    i32, i64, f32 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64), ir.F32Type.get()
    const = lambda value, ty=i32: arith.constant(ty, ir.IntegerAttr.get(ty, value))
    below = lambda a, b: arith.cmpi(arith.CmpIPredicate.slt, a, b)
    extent = ir.MemRefType(bias_ref.type).shape[1]
    thread = mgpu.utils.thread_idx()
    lane = arith.remui(thread, const(32))
    warp = arith.divui(arith.remui(thread, const(128)), const(32))
    # A thread of a WGMMA accumulator holds rows 16 * warp + lane / 4 + {0, 8} and, in each 8 columns, 2 * (lane % 4) + {0, 1}.
    first = arith.addi(arith.muli(warp, const(16)), arith.divui(lane, const(4)))
    first_column = arith.muli(arith.remui(lane, const(4)), const(2))
    base = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(bias_ref))
    scale = arith.constant(f32, ir.FloatAttr.get(f32, unit))

    by_row = {}
    for half in (0, 8):
        row = arith.addi(first, const(half))
        live = arith.andi(below(row, end_row), arith.cmpi(arith.CmpIPredicate.sge, row, first_row))
        nearest = arith.subi(distance, first_column)
        if sharing is not None:
            query = arith.divui(arith.addi(first_query_row, row), const(sharing))
            nearest = arith.addi(nearest, query)
        start = arith.muli(arith.extsi(i64, arith.addi(line, row)), const(4 * extent, i64))
        by_row[half] = live, nearest, arith.addi(base, start)

    strides = scores.layout.tiling.tile_strides(tuple(mgpu.utils.get_contiguous_strides(scores.shape)))
    registers = np.empty_like(scores.registers)
    for index in np.ndindex(scores.registers.shape):
        half, column = divmod(sum(i * s for i, s in zip(index, strides, strict=False)), scores.shape[1])
        live, nearest, start = by_row[half]
        register = scores.registers[index]
        for element in (0, 1):
            d = arith.subi(nearest, const(column + element))
            # Unsigned, so that a distance below 0 is past the end as well.
            inside = arith.andi(live, arith.cmpi(arith.CmpIPredicate.ult, d, const(extent)))
            value = mgpu.utils.inline_ptx(
                "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.global.f32 $0, [$1]; }",
                arith.addi(start, arith.muli(arith.extui(i64, d), const(4, i64))),
                arith.extui(i32, inside),
                result_types=f32,
                has_side_effects=True,
            )
            old = vector.extract(
                register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([element])
            )
            new = arith.addf(old, arith.mulf(value, scale))
            register = vector.insert(
                new, register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([element])
            )
        registers[index] = register
    return FragmentedArray(_registers=registers, _layout=scores.layout, _is_signed=None)
