"""What `mosaic_fp8_many` does with e4m3 rows in registers and shared memory, beyond `mosaic_fp8_registers`: inline MLIR.

Scores are S = Q K^T here, not transposed: a query is a row, its statistics lie in one quad of lanes.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray, optimization_barrier
from jax.experimental.mosaic.gpu.wgmma import WGMMAAccumulator, wgmma_m64
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector

from pallas_kernels.mla_decode import mosaic_fp8_registers as common

_SCALAR = plgpu.Layout.WG_SPLAT(())
_WGMMA = plgpu.Layout.WGMMA
_ROWS = _WGMMA.reduce(1)
_STEP = 16  # tokens of one WGMMA of P V


def convert_queries(first_ref, second_ref, lines, part, q_smem, unit_ref, transforms) -> None:
    """32 lines of bf16 queries, from line ``32 * part`` on, as two e4m3 terms; see `mosaic_fp8_registers.load_queries`.

    The lines lie in shared memory: `first_ref` and `second_ref` are bytes [64, width + 64], the first and the last
    ``width + 64`` of the ``2 * width`` bytes of 64 lines, of which `lines` count. q_smem bytes [128, width + 64], unit_ref f32
    [64]. Follow with `plgpu.commit_smem`.
    """

    @plgpu.inline_mgpu(
        arg_types=(
            *[plgpu.RefType(transforms)] * 2,
            *[_SCALAR] * 2,
            plgpu.RefType(transforms),
            plgpu.RefType(),
        ),
        return_type=None,
    )
    def convert(_, first, second, lines, part, target, units):
        lines, part = lines.registers.item(), part.registers.item()
        groups, boxes, _, _ = ir.MemRefType(target.type).shape  # [2 * 64 / 8, boxes, 8, 128]
        chunks = 2 * boxes - 1  # of 64 columns
        thread = arith.remui(utils.thread_idx(), common._const(utils.WARPGROUP_SIZE))
        quad = common._and(thread, 3)  # a quad a line
        line = common._add(common._shr(thread, 2), common._shl(part, 5))
        inside = arith.cmpi(arith.CmpIPredicate.slt, line, lines)
        row, phase = common._line_of(line, boxes)
        sides = [
            common._shl(common._xor(common._or(common._shl(quad, 1), common._const(half)), phase), 4)
            for half in range(2)
        ]
        at = [
            [common._add(common._add(common._shared(ref), row), side) for side in sides]
            for ref in (first, second)
        ]
        peak = common._const(0)
        for c in range(chunks):
            side, box = (0, c) if c < boxes else (1, c - boxes + 1)  # they share a box
            for place in at[side]:
                for word in common._load_shared(place, box * common._BOX, 4):
                    peak = common._larger_sizes(peak, arith.select(inside, word, common._const(0)))
        peak = arith.maxui(common._shl(peak, 16), common._and(peak, -65536))  # as integers, none is negative
        for distance in (1, 2):
            peak = arith.maxui(peak, utils.shfl_bfly(peak, distance))
        up = arith.minui(arith.subi(common._const(261), common._shr(peak, 23)), common._const(253))
        power = common._shl(up, 23)
        unit = common._shl(arith.subi(common._const(254), up), 23)
        to = common._add(common._shared(target), row)
        all_threads = arith.cmpi(arith.CmpIPredicate.slt, line, common._const(4 * groups))

        # A loop, because code that runs once is slow.
        def store(c):  # 16 bytes of a line of each term
            early = arith.cmpi(arith.CmpIPredicate.slt, c, common._const(boxes))
            box = common._mul(arith.select(early, c, arith.subi(c, common._const(boxes - 1))), common._BOX)
            words = [
                arith.select(inside, word, common._const(0))
                for half in range(2)
                for word in common._load_shared(
                    common._add(arith.select(early, at[0][half], at[1][half]), box), 0, 4
                )
            ]
            pairs = [common._two_terms(words[i], words[i + 1], power) for i in range(0, 8, 2)]
            side = common._xor(common._or(quad, common._shl(common._and(c, 1), 2)), phase)
            place = common._add(
                common._add(to, common._shl(side, 4)), common._mul(common._shr(c, 1), common._BOX)
            )
            for term in range(2):
                offset = term * groups // 2 * boxes * common._BOX
                common._store_shared_4(place, offset, [pair[term] for pair in pairs], all_threads)

        _for_each(chunks, store)
        first_of_quad = arith.cmpi(arith.CmpIPredicate.eq, quad, common._const(0))
        common._store_shared(common._add(common._shared(units), common._shl(line, 2)), 0, unit, first_of_quad)

    convert(first_ref, second_ref, jnp.int32(lines), jnp.int32(part), q_smem, unit_ref)


def row_scores(q_ref, tile_ref, transforms):
    """S = Q K^T, f32 [64, 64]; q_ref as `convert_queries` leaves it.

    As in `scores_of` the second terms have a sum of their own, and the first terms have one for each 128 columns.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(transforms), plgpu.RefType(transforms)),
        return_type=plgpu.ShapeDtypeStruct((64, 64), jnp.float32, layout=_WGMMA),
    )
    def multiply(_, q, tile):
        k, queries, boxes = common._operand(tile), common._operand(q), common._boxes_of_row(tile)
        chunks = 2 * boxes - 1  # of 64 columns; the last 64 bytes of a row are none
        e4m3 = ir.Float8E4M3FNType.get()

        def product(queries, first, stop):
            acc = WGMMAAccumulator.zero(64, 64)._value
            registers = acc.registers
            for chunk in range(first, stop):
                at = chunk // 2 * common._BOX + chunk % 2 * (common._LINE // 2)
                registers = wgmma_m64(
                    registers, common._ahead(queries, at), common._ahead(k, at), n=64, swizzle=64, a_transpose=False,
                    b_transpose=False, a_k_stride=32, b_k_stride=32, a_element_type=e4m3, b_element_type=e4m3,
                )  # fmt: skip
            nvvm.wgmma_commit_group_sync_aligned()
            nvvm.wgmma_wait_group_sync_aligned(0)  # registers for one at a time
            return optimization_barrier(
                FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=None)
            )

        total = product(common._ahead(queries, 8 * boxes * common._BOX), 0, chunks)
        for first in range(0, chunks, 2):
            total += product(queries, first, min(first + 2, chunks))
        return total.to_layout(_WGMMA.to_mgpu())

    return multiply(q_ref, tile_ref)


def exp2(x):
    """2**x of f32 [64, n] in the WGMMA layout; subnormal results are 0: the care for them is three instructions each."""

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=_WGMMA)
    )
    def power(_, x):
        registers = np.empty(x.registers.shape, dtype=object)
        for index, pair in np.ndenumerate(x.registers):
            for e in range(2):
                value = utils.inline_ptx(
                    "ex2.approx.ftz.f32 $0, $1;", common._element(pair, e), result_types=ir.F32Type.get()
                )
                pair = llvm.insertelement(pair, value, common._const(e))
            registers[index] = pair
        return FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return power(x)


def add_row_weights(sums, p, factor_ref):
    """Adds ``p * factors[None, :]`` to the sums of p's rows, of which each thread has a part; `whole_rows` makes them.

    p f32 [64, 64] in the WGMMA layout, factor_ref f32 [64].
    """

    @plgpu.inline_mgpu(
        arg_types=(_ROWS, _WGMMA, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=_ROWS),
    )
    def add(_, sums, p, factors):
        f32 = ir.F32Type.get()
        multiply_add = lambda *args: utils.inline_ptx("fma.rn.f32 $0, $1, $2, $3;", *args, result_types=f32)
        places = common._by_place(p)
        lane, _ = common._lane_and_warp()
        at = common._add(common._shared(factors), common._shl(common._and(lane, 3), 3))
        zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
        rows = {row: i for i, row in common._row_places(sums.layout, sums.registers.shape)}
        totals = {row: [common._element(sums.registers[i], 0), zero] for row, i in rows.items()}
        for column in range(0, p.shape[1], 8):
            words = [llvm.bitcast(f32, word) for word in common._load_shared(at, 4 * column, 2)]
            for row, total in totals.items():
                for e in range(2):
                    total[e] = multiply_add(common._element(places[row, column], e), words[e], total[e])
        registers = np.empty(sums.registers.shape, dtype=object)
        for row, i in rows.items():
            registers[i] = _single(arith.addf(*totals[row]))
        return FragmentedArray(_registers=registers, _layout=sums.layout, _is_signed=None)

    return add(sums, p, factor_ref)


def whole_rows(sums):
    """What `add_row_weights` has added, f32 [64], added up over the threads of a row."""

    @plgpu.inline_mgpu(
        arg_types=(_ROWS,), return_type=plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=_ROWS)
    )
    def reduce(_, sums):
        registers = np.empty(sums.registers.shape, dtype=object)
        for index, register in np.ndenumerate(sums.registers):
            value = common._element(register, 0)
            for distance in (1, 2):
                value = arith.addf(value, utils.shfl_bfly(value, distance))
            registers[index] = _single(value)
        return FragmentedArray(_registers=registers, _layout=sums.layout, _is_signed=None)

    return reduce(sums)


def flag_changes(factors, flags_ref) -> None:
    """Each warp notes in int32 [4] whether some factor of its 16 rows is not 1."""

    @plgpu.inline_mgpu(arg_types=(_ROWS, plgpu.RefType()), return_type=None)
    def note(_, factors, flags):
        one = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), 1.0))
        changed = None
        for register in factors.registers.flat:
            differs = arith.cmpf(arith.CmpFPredicate.UNE, common._element(register, 0), one)
            changed = differs if changed is None else arith.ori(changed, differs)
        changed = nvvm.vote_sync(common._const(-1), changed, nvvm.VoteSyncKind.any)
        lane, warp = common._lane_and_warp()
        leads = arith.cmpi(arith.CmpIPredicate.eq, lane, common._const(0))
        word = arith.extui(ir.IntegerType.get_signless(32), changed)
        common._store_shared(common._add(common._shared(flags), common._shl(warp, 2)), 0, word, leads)

    note(factors, flags_ref)


def any_flag(flags_ref):
    """Whether a warp has noted a change in int32 [4], as int32."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)
    )
    def look(_, flags):
        words = common._load_shared(common._shared(flags), 0, 4)
        value = common._or(common._or(words[0], words[1]), common._or(words[2], words[3]))
        return FragmentedArray.splat(value, (), is_signed=True)

    return look(flags_ref)


def add_row_values(accumulators, tile_ref, p_ref, first_column, at_once: int, transforms):
    """`mosaic_fp8_registers.add_values` with weights of queries in rows: p_ref f16 [64 queries, 64 tokens]."""
    blocks, steps = len(accumulators), 64 // _STEP

    def products(refs):
        words = common.v_bytes(tile_ref, 0, first_column, blocks, transforms)
        for step in range(steps):
            weights, here = p_ref.at[:, pl.ds(step * _STEP, _STEP)].transpose((1, 0)), words
            for first in range(0, blocks, at_once):
                fragments = common.v_fragments(here, blocks, first=first, count=at_once)
                if first + at_once == blocks and step + 1 < steps:
                    words = common.v_bytes(tile_ref, step + 1, first_column, blocks, transforms)
                for ref, fragment in zip(refs[first : first + at_once], fragments, strict=True):
                    plgpu.wgmma(ref, fragment, weights)
                plgpu.wgmma_wait(at_once)

    return list(pl.run_state(products)(tuple(plgpu.ACC.init(acc) for acc in accumulators)))


def _for_each(trips: int, body) -> None:  # type: ignore[no-untyped-def]
    loop = scf.ForOp(common._const(0), common._const(trips), common._const(1), [])
    with ir.InsertionPoint(loop.body):
        body(loop.induction_variable)
        scf.yield_([])


def _single(value: ir.Value) -> ir.Value:
    return vector.broadcast(ir.VectorType.get((1,), ir.F32Type.get()), value)
