"""What the MLA decode kernel does with WGMMA registers beyond the array language: cut stores, skipped rescaling."""

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf

_SCALAR = plgpu.Layout.WG_SPLAT(())


def store_rows(ref, values, first_row, rows, column=0, skipped=0) -> None:
    """``ref[first_row + i, column + j] = values[i, j]`` for ``skipped <= i < rows``, straight from registers.

    `values` is [64, n] in the WGMMA layout; `ref` is a two-dimensional GMEM ref, or one-dimensional when `values` is a
    [64] vector in the layout of WGMMA rows. The address arithmetic is 64-bit.
    """
    layout = plgpu.Layout.WGMMA if values.ndim == 2 else plgpu.Layout.WGMMA.reduce(1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, *[_SCALAR] * 4), return_type=None)
    def store(_, ref, values, *scalars):
        _emit_store_rows(ref, values, *(scalar.registers.item() for scalar in scalars))

    store(ref, values, jnp.int32(first_row), jnp.int32(rows), jnp.int32(column), jnp.int32(skipped))


def sync_warpgroup() -> None:
    """Waits for the other warps of this warpgroup."""
    plgpu.inline_mgpu(arg_types=(), return_type=None)(lambda _: mgpu.utils.warpgroup_barrier())()


def uniform(x):
    """`x`, an int32 scalar, from the first lane of the warp.

    WGMMA takes addresses from uniform registers. Those that follow from `x` are computed there, where they are used; otherwise the
    compiler may compute them ahead of the loop, keep them in each thread's registers and move them for each instruction.
    """

    @plgpu.inline_mgpu(
        arg_types=(_SCALAR,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)
    )
    def first(_, x):
        word = mgpu.utils.inline_ptx(
            "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", x.registers.item(),
            result_types=ir.IntegerType.get_signless(32), has_side_effects=True, convergent=True,
        )  # fmt: skip
        return FragmentedArray.splat(word, (), is_signed=True)

    return first(jnp.int32(x))


def add_products(accumulators, left, rights, done=None):
    """``[acc + left @ right for acc, right in zip(accumulators, rights)]`` by WGMMA, all in flight together.

    ``done(i)`` is called when the i-th product is there and `rights[i]` has been read.
    """

    def products(refs):
        for ref, right in zip(refs, rights, strict=True):
            plgpu.wgmma(ref, left, right)
        if done is not None:
            for i in range(len(rights)):
                plgpu.wgmma_wait(len(rights) - 1 - i)
                done(i)

    return list(pl.run_state(products)(tuple(plgpu.ACC.init(acc) for acc in accumulators)))


def rescale(accumulators, factors):
    """``[acc * factors[:, None] for acc in accumulators]``, skipped by each warp whose 16 factors are all 1.

    `accumulators` are f32 [64, n] in the WGMMA layout, `factors` f32 [64] in the layout of its rows.
    """
    layout = plgpu.Layout.WGMMA
    types = tuple(plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=layout) for acc in accumulators)

    @plgpu.inline_mgpu(arg_types=(*[layout] * len(accumulators), layout.reduce(1)), return_type=types)
    def multiply(_, *args):
        *accs, factors = args
        one = arith.constant(factors.mlir_dtype, ir.FloatAttr.get(factors.mlir_dtype, 1.0))
        changed = None
        for register in factors.registers.flat:
            differs = arith.cmpf(arith.CmpFPredicate.UNE, _scalar(register), one)
            changed = differs if changed is None else arith.ori(changed, differs)
        changed = nvvm.vote_sync(_constant(-1), changed, nvvm.VoteSyncKind.any)
        branch = scf.IfOp(changed, [r.type for acc in accs for r in acc.registers.flat], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scaled = [acc * factors.broadcast_in_dim(acc.shape, (0,), acc.layout) for acc in accs]
            scf.yield_([r for acc in scaled for r in acc.registers.flat])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_([r for acc in accs for r in acc.registers.flat])
        results = iter(branch.results)
        return tuple(
            FragmentedArray(
                _registers=np.array([next(results) for _ in acc.registers.flat], dtype=object).reshape(
                    acc.registers.shape
                ),
                _layout=acc.layout,
                _is_signed=None,
            )
            for acc in accs
        )

    return list(multiply(*accumulators, factors))


def _constant(value: int):
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value))


def _emit_store_rows(ref, values, first_row, rows, column, skipped):
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    const = lambda value, ty: arith.constant(ty, ir.IntegerAttr.get(ty, value))
    stride = ir.MemRefType(ref.type).shape[1] if len(values.shape) == 2 else 1
    thread = mgpu.utils.thread_idx()
    lane, warp = (
        arith.remui(thread, const(32, i32)),
        arith.divui(arith.remui(thread, const(128, i32)), const(32, i32)),
    )
    # A thread of a WGMMA accumulator holds rows 16 * warp + lane / 4 + {0, 8} and, in each 8 columns, 2 * (lane % 4) + {0, 1}.
    row = arith.addi(arith.muli(warp, const(16, i32)), arith.divui(lane, const(4, i32)))
    first_column = arith.muli(arith.remui(lane, const(4, i32)), const(2, i32))

    by_half: dict[int, list] = {0: [], 8: []}
    tile_strides = values.layout.tiling.tile_strides(tuple(mgpu.utils.get_contiguous_strides(values.shape)))
    width = values.shape[1] if len(values.shape) == 2 else 1
    for index in np.ndindex(values.registers.shape):
        row_offset, column_offset = divmod(
            sum(i * s for i, s in zip(index, tile_strides, strict=False)), width
        )
        by_half[row_offset].append((column_offset, values.registers[index]))

    element = values.mlir_dtype
    base = mgpu.utils.memref_ptr(ref)
    for half, registers in by_half.items():
        at = arith.addi(row, const(half, i32))
        inside = arith.andi(
            arith.cmpi(arith.CmpIPredicate.sge, at, skipped), arith.cmpi(arith.CmpIPredicate.slt, at, rows)
        )
        inside = scf.IfOp(inside)
        with ir.InsertionPoint(inside.then_block):
            flat = arith.muli(arith.extsi(i64, arith.addi(first_row, at)), const(stride, i64))
            if len(values.shape) == 2:
                flat = arith.addi(flat, arith.extsi(i64, arith.addi(first_column, column)))
            pointer = mgpu.utils.getelementptr(base, [flat], element)
            for offset, register in registers:
                llvm.store(register, mgpu.utils.getelementptr(pointer, [offset], element))
            scf.yield_([])


def round_pairs(values):
    """f32 [64, n] in the WGMMA layout rounded to bf16, two at a time: conversions of single values are slow."""
    return _halves(values, _emit_round)


def widen(values):
    """bf16 [64, n] in the WGMMA layout as f32, by bits."""
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(values.shape, jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def convert(_, values):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        registers = np.empty(values.registers.shape, dtype=object)
        for index, register in np.ndenumerate(values.registers):
            word = mgpu.utils.bitcast(register, i32)
            pair = llvm.mlir_undef(ir.VectorType.get((2,), f32))
            halves = arith.shli(word, _constant(16)), arith.andi(word, _constant(-65536))
            for i, half in enumerate(halves):
                pair = llvm.insertelement(pair, llvm.bitcast(f32, half), _constant(i))
            registers[index] = pair
        return FragmentedArray(_registers=registers, _layout=values.layout, _is_signed=None)

    return convert(values)


def fold(values):
    """Sums of bf16 [64, n] over columns that lie 8 apart, f32 [64, 8]: what each thread can add up by itself."""
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct((values.shape[0], 8), jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def add(_, values):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        by_column = np.moveaxis(values.registers, 1, -1)
        registers = np.empty(by_column.shape[:-1], dtype=object)
        for index in np.ndindex(registers.shape):
            words = [mgpu.utils.bitcast(register, i32) for register in by_column[index]]
            halves = (
                [arith.shli(word, _constant(16)) for word in words],
                [arith.andi(word, _constant(-65536)) for word in words],
            )
            pair = llvm.mlir_undef(ir.VectorType.get((2,), f32))
            for i, half in enumerate(halves):
                total = _tree(arith.addf, [llvm.bitcast(f32, word) for word in half])
                pair = llvm.insertelement(pair, total, _constant(i))
            registers[index] = pair
        return FragmentedArray(
            _registers=np.expand_dims(registers, 1), _layout=values.layout, _is_signed=None
        )

    return add(values)


def raise_peak(scores, peak, slack: float, scale: float):
    """(peaks, factors) after f32 scores [64, n] in the WGMMA layout, all f32 [64] in the layout of its rows.

    A row with a score above `peak` by more than `slack` takes its largest score, and the factor
    ``2 ** (scale * (old peak - new peak))``; other rows keep their peak and have factor 1. A warp without such a row
    reduces nothing. A NaN raises no peak.
    """
    layout = plgpu.Layout.WGMMA
    rows = layout.reduce(1)
    row = plgpu.ShapeDtypeStruct(peak.shape, jnp.float32, layout=rows)

    @plgpu.inline_mgpu(arg_types=(layout, rows), return_type=(row, row))
    def look(_, scores, peak):
        f32 = ir.F32Type.get()
        real = lambda value: arith.constant(f32, ir.FloatAttr.get(f32, value))
        # A thread holds two rows: of an accumulator's registers the fifth index tells which.
        by_row = np.moveaxis(scores.registers, 4, 0)
        tops = [
            _tree(
                arith.maxnumf, [llvm.extractelement(x, _constant(i)) for x in of_row.flat for i in range(2)]
            )
            for of_row in by_row
        ]
        olds = [_scalar(register) for register in peak.registers.flat]
        above = lambda top, old: arith.cmpf(arith.CmpFPredicate.OGT, top, arith.addf(old, real(slack)))
        any_above = _tree(arith.ori, [above(*pair) for pair in zip(tops, olds, strict=True)])
        any_above = nvvm.vote_sync(_constant(-1), any_above, nvvm.VoteSyncKind.any)
        branch = scf.IfOp(any_above, [f32] * (2 * len(olds)), has_else=True)
        with ir.InsertionPoint(branch.then_block):
            news, factors = [], []
            for top, old in zip(tops, olds, strict=True):
                for distance in (1, 2):
                    top = arith.maxnumf(top, mgpu.utils.shfl_bfly(top, distance))
                news.append(arith.select(above(top, old), top, old))
                gap = arith.mulf(arith.subf(old, news[-1]), real(scale))
                factors.append(llvm.inline_asm(f32, [gap], "ex2.approx.ftz.f32 $0, $1;", "=f,f"))
            scf.yield_([*news, *factors])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_([*olds, *[real(1.0)] * len(olds)])

        def rows_of(values):
            registers = np.empty(peak.registers.shape, dtype=object)
            for index, value in zip(np.ndindex(registers.shape), values, strict=True):
                kind = peak.registers[index].type
                if isinstance(kind, ir.VectorType):
                    value = llvm.insertelement(llvm.mlir_undef(kind), value, _constant(0))
                registers[index] = value
            return FragmentedArray(_registers=registers, _layout=peak.layout, _is_signed=None)

        results = list(branch.results)
        return rows_of(results[: len(olds)]), rows_of(results[len(olds) :])

    return look(scores, peak)


def _tree(combine, terms):
    while len(terms) > 1:
        pairs = [combine(*pair) for pair in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs + terms[2 * len(pairs) :]
    return terms[0]


def _scalar(register):
    """A register that holds one value, which may come as a vector of one."""
    if isinstance(register.type, ir.VectorType):
        return llvm.extractelement(register, _constant(0))
    return register


def upper_half(values):
    """f32 [64, n] cut to bf16 (towards zero), in the WGMMA layout."""
    return _halves(values, _emit_upper)


def lower_half(values):
    """What `upper_half` leaves of f32 [64, n], rounded to bf16: the sum of both has 16 bits of mantissa."""
    return _halves(values, _emit_lower)


def _halves(values, emit):
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(values.shape, jnp.bfloat16, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def convert(_, values):
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        registers = [
            mgpu.utils.bitcast(emit(*(llvm.extractelement(register, _constant(i)) for i in range(2))), pair)
            for register in values.registers.flat
        ]
        return FragmentedArray(
            _registers=np.array(registers, dtype=object).reshape(values.registers.shape),
            _layout=values.layout,
            _is_signed=None,
        )

    return convert(values)


# Both work on bits, so that the compiler finds nothing common that it would keep in registers from one to the other.
def _emit_upper(first, second):
    i32 = ir.IntegerType.get_signless(32)
    words = [arith.bitcast(i32, x) for x in (first, second)]
    return llvm.inline_asm(i32, words, "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r")


def _emit_round(first, second):
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, [second, first], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f")


def _emit_lower(first, second):
    i32 = ir.IntegerType.get_signless(32)
    cut = lambda x: arith.bitcast(x.type, arith.andi(arith.bitcast(i32, x), _constant(-65536)))
    rests = [arith.subf(x, cut(x)) for x in (second, first)]  # the first operand goes to the upper half
    return llvm.inline_asm(i32, rests, "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f")
