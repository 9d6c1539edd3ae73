"""How the fp8 MLA decode kernel moves e4m3 rows between shared memory and WGMMA operands: inline MLIR for Mosaic GPU. What is
not about e4m3, as votes, sums and stores of columns, serves `mosaic_few`, `mosaic_block` and `mosaic_parts` too.

A KV tile is 64 rows of e4m3 bytes in shared memory under the 128-byte swizzle. It is never written back as f16.

* S^T = K Q^T: K is an operand as it lies. q, which has the 8 bits of bf16, is the sum of two e4m3 terms of 4 bits.
* O^T = V^T P^T: e4m3 operands would have to lie the other way round. Each thread reads the bytes of its own fragment,
  converts them to f16 (exactly) and multiplies from registers. A fragment wants pairs of neighbouring tokens, and 16-byte
  reads want neighbouring columns: two rows are read and their bytes paired. The order of O^T's rows is undone when it is
  stored: of the half of V that a warpgroup owns, in n blocks, row ``16 w + g + 8 h`` of block b holds column
  ``16 n w + 2 n g + 2 b + h``, so a thread reads and stores 2 n neighbouring columns.

(h, q, g, w are those of PTX's fragment: w the warp, g = lane // 4, q = lane % 4, h the half of a fragment.)
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray, optimization_barrier
from jax.experimental.mosaic.gpu.mma_utils import encode_descriptor
from jax.experimental.mosaic.gpu.wgmma import WGMMAAccumulator
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector

_SCALAR = plgpu.Layout.WG_SPLAT(())
_WGMMA = plgpu.Layout.WGMMA
_STEP = 16  # summed elements of one WGMMA on f16
_LINE = 128  # bytes of a line of a swizzled box
_BOX = 8 * _LINE  # 8 rows of 128 bytes, after which the swizzle starts again


def scores_of(tile_ref, q_ref, transforms):
    """S^T = K Q^T, f32 [64, columns]; q_ref as `split_queries` leaves it.

    Tensor cores keep 14 bits of a sum of e4m3 products, and cut. So the second terms have sums of their own, where they
    would be cut for the size of the first, and the first terms have one for each 128 columns.
    """
    columns = q_ref.shape[0] // 2  # both terms in one product, which would wait for K to be read twice

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(transforms), plgpu.RefType(transforms)),
        return_type=plgpu.ShapeDtypeStruct((64, columns), jnp.float32, layout=_WGMMA),
    )
    def multiply(_, tile, q):
        n = 2 * columns
        k, queries = _operand(tile), _operand(q)
        whole = _boxes_of_row(tile) - 1  # boxes of 128 columns; of the last one the second half is none
        i64, f32 = ir.IntegerType.get_signless(64), ir.F32Type.get()
        layout = WGMMAAccumulator.zero(64, n)._value.layout

        def array(values, like, shape):
            registers = np.empty(like.registers_shape(shape), dtype=object)
            for index, value in zip(np.ndindex(registers.shape), values, strict=True):
                registers[index] = vector.broadcast(ir.VectorType.get((1,), f32), value)
            return FragmentedArray(_registers=registers, _layout=like, _is_signed=None)

        def values_of(x):
            return [_element(register, 0) for register in x.registers.flat]

        def sum_of(box, steps, place):
            """(what `steps` products of 32 columns from a box on come to, their registers): in `place`, which holds anything."""
            ahead = arith.muli(arith.extsi(i64, box), arith.constant(i64, ir.IntegerAttr.get(i64, _BOX >> 4)))
            a, b = arith.addi(k, ahead), arith.addi(queries, ahead)
            registers = array(place, layout, (64, n)).registers
            nvvm.wgmma_fence_aligned()
            for step in range(steps):
                registers = _multiply_e4m3(
                    registers, _ahead(a, 32 * step), _ahead(b, 32 * step), n, step == 0
                )
            nvvm.wgmma_commit_group_sync_aligned()
            nvvm.wgmma_wait_group_sync_aligned(0)
            part = optimization_barrier(
                FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
            )
            return part[:, :columns] + part[:, columns:], values_of(part)

        total, place = sum_of(_const(whole), 2, [llvm.mlir_undef(f32)] * (n // 2))

        def add(box, carry):
            part, place = sum_of(box, 4, carry[: n // 2])
            return [*place, *values_of(array(carry[n // 2 :], total.layout, total.shape) + part)]

        # A loop that nobody unrolls. In straight code ptxas 13.0 takes the registers of a sum for those of the next one that
        # starts over in them: it adds what both came to after the second, twice.
        carry = _repeat(_opaque(whole, k), add, [*place, *values_of(total)])
        return array(carry[n // 2 :], total.layout, total.shape).to_layout(_WGMMA.to_mgpu())

    return multiply(tile_ref, q_ref)


def any_above(values, limits):
    """Whether any element of f32 [64, n] in the WGMMA layout is above its column's limit, as int32; one barrier."""

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA, _WGMMA.reduce(0)),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR),
    )
    def vote(_, values, limits):
        places = _by_place(values)
        # How far each column's larger element is above its limit, and of these the largest: comparisons that all change one
        # predicate would wait for each other.
        above = [
            arith.subf(
                arith.maxnumf(_element(places[0, 8 * i], e), _element(places[8, 8 * i], e)),
                _element(limit, e),
            )
            for i, limit in enumerate(limits.registers.flat)  # of 8 columns each
            for e in range(2)
        ]
        while len(above) > 1:
            above = [
                arith.maxnumf(*pair) if len(pair := above[i : i + 2]) == 2 else pair[0]
                for i in range(0, len(above), 2)
            ]
        zero = arith.constant(above[0].type, ir.FloatAttr.get(above[0].type, 0.0))
        is_above = arith.cmpf(arith.CmpFPredicate.OGT, above[0], zero)
        i32 = ir.IntegerType.get_signless(32)
        count = utils.inline_ptx(
            "{ .reg .pred one, all; setp.ne.s32 one, $1, 0; bar.red.or.pred all, $2, 128, one;"
            " selp.s32 $0, 1, 0, all; }",
            arith.extui(i32, is_above),
            utils.warpgroup_barrier_idx(sync=False),
            result_types=i32,
            has_side_effects=True,
            convergent=True,
        )
        return FragmentedArray.splat(count, (), is_signed=True)

    return vote(values, limits)


def add_values(accumulators, tile_ref, p_ref, first_column, at_once: int, transforms):
    """``O^T + V^T P^T`` for the blocks of O^T that start at column `first_column` of V, as `v_fragments` orders their rows.

    p_ref: P^T, f16 [64, columns]. `at_once` blocks are multiplied while as many are converted; both take registers.
    """
    blocks, steps = len(accumulators), 64 // _STEP

    def products(refs):
        words = v_bytes(tile_ref, 0, first_column, blocks, transforms)
        for step in range(steps):
            weights, here = p_ref.at[pl.ds(step * _STEP, _STEP)], words
            for first in range(0, blocks, at_once):
                fragments = v_fragments(here, blocks, first=first, count=at_once)
                if first + at_once == blocks and step + 1 < steps:
                    words = v_bytes(tile_ref, step + 1, first_column, blocks, transforms)
                for ref, fragment in zip(refs[first : first + at_once], fragments, strict=True):
                    plgpu.wgmma(ref, fragment, weights)
                plgpu.wgmma_wait(at_once)

    return list(pl.run_state(products)(tuple(plgpu.ACC.init(acc) for acc in accumulators)))


def add_weights(sums, p, factors):
    """Adds p * factors[:, None], f32 [64, n] in the WGMMA layout, to f32 [n] sums of which each thread has a part.

    `sums` is in the layout of WGMMA columns, where threads should agree; `reduce_columns` makes them.
    """
    columns = sums.shape[0]

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA.reduce(0), _WGMMA, _WGMMA.reduce(1)),
        return_type=plgpu.ShapeDtypeStruct((columns,), jnp.float32, layout=_WGMMA.reduce(0)),
    )
    def add(_, sums, p, factors):
        places = _by_place(p)
        of_row = {
            row: factors.registers[i] for i, row in _row_places(factors.layout, factors.registers.shape)
        }
        registers = np.empty(sums.registers.shape, dtype=object)
        for i, index in enumerate(np.ndindex(registers.shape)):
            pair = sums.registers[index]
            for e in range(2):
                value = _element(pair, e)
                for row in (0, 8):
                    value = arith.addf(
                        value, arith.mulf(_element(places[row, 8 * i], e), _element(of_row[row], 0))
                    )
                pair = llvm.insertelement(pair, value, _const(e))
            registers[index] = pair
        return FragmentedArray(_registers=registers, _layout=sums.layout, _is_signed=None)

    return add(sums, p, factors)


def reduce_columns(values, scratch_ref, largest: bool):
    """Largest element, or sum, of each column of f32 [64, n] in the WGMMA layout, or of what `add_weights` has added.

    scratch_ref is f32 [4, n] and belongs to one warpgroup: Pallas' own reductions share one among all of them.
    """
    columns, whole = values.shape[-1], values.ndim == 2

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA if whole else _WGMMA.reduce(0), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((columns,), jnp.float32, layout=_WGMMA.reduce(0)),
    )
    def reduce(_, values, scratch):
        op = arith.maximumf if largest else arith.addf
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        lane, warp = _lane_and_warp()
        if whole:
            places = _by_place(values)
            of_thread = lambda n, e: op(_element(places[0, n], e), _element(places[8, n], e))
        else:
            sums = list(values.registers.flat)
            of_thread = lambda n, e: _element(sums[n // 8], e)
        q = _and(lane, 3)
        at = _add(_shared(scratch), _shl(q, 3))  # of this thread's first pair of columns
        mine = _add(at, _mul(warp, 4 * columns))
        leads = arith.cmpi(arith.CmpIPredicate.ult, lane, _const(4))
        for column in range(0, columns, 8):
            for e in range(2):
                value = of_thread(column, e)
                for distance in (4, 8, 16):
                    value = op(value, utils.shfl_bfly(value, distance))
                _store_shared(mine, 4 * (column + e), llvm.bitcast(i32, value), leads)
        utils.warpgroup_barrier()
        layout = _WGMMA.reduce(0).to_mgpu()
        registers = np.empty(layout.registers_shape((columns,)), dtype=object)
        for i, index in enumerate(np.ndindex(registers.shape)):
            pair = llvm.mlir_undef(ir.VectorType.get((2,), f32))
            loaded = [_load_shared(at, 4 * (8 * i + w * columns), 2) for w in range(4)]
            for e in range(2):
                value = llvm.bitcast(f32, loaded[0][e])
                for words in loaded[1:]:
                    value = op(value, llvm.bitcast(f32, words[e]))
                pair = llvm.insertelement(pair, value, _const(e))
            registers[index] = pair
        utils.warpgroup_barrier()
        return FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return reduce(values, scratch_ref)


def token_scales(tile_ref, byte: int, transforms):
    """f32 [64] at bytes `byte` to `byte` + 3 of the tile's rows, one a row of S^T."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(transforms),),
        return_type=plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=_WGMMA.reduce(1)),
    )
    def read(_, tile):
        boxes = _boxes_of_row(tile)
        row = _row_in_warpgroup()
        line, phase = _line_of(row, boxes)
        chunk = byte % _LINE // 16
        at = _add(_add(_shared(tile), line), _shl(_xor(_const(chunk), phase), 4))
        offset = byte // _LINE * _BOX + byte % 16
        f32 = ir.F32Type.get()
        layout = _WGMMA.reduce(1).to_mgpu()
        registers = np.empty(layout.registers_shape((64,)), dtype=object)
        for index, row_offset in _row_places(layout, registers.shape):
            (word,) = _load_shared(at, offset + (row_offset // 8) * boxes * _BOX, 1)
            value = llvm.bitcast(f32, word)
            registers[index] = vector.broadcast(ir.VectorType.get((1,), f32), value)
        return FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return read(tile_ref)


def v_bytes(tile_ref, step: int, first_column, blocks: int, transforms):
    """What this thread needs of V's rows m = 16 * step to 16 * step + 15, for `v_fragments`: 2 * blocks words.

    It covers ``64 * blocks`` columns from `first_column` on, a multiple of 128; `blocks` is 2 or 4.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), _SCALAR), return_type=_words_type(2 * blocks))
    def read(_, tile, first_column):
        boxes = _boxes_of_row(tile)
        lane, warp = _lane_and_warp()
        g, q = _shr(lane, 2), _and(lane, 3)
        column = _add(_mul(warp, 16 * blocks), _mul(g, 2 * blocks))
        column = _add(column, first_column.registers.item())
        inside = _and(column, _LINE - 1)
        chunk, byte = _shr(inside, 4), _and(inside, 15)
        base = _add(_add(_shared(tile), _mul(_shr(column, 7), _BOX)), byte)
        rows = [_or(_shl(q, 1), _const(e)) for e in (0, 1)]  # within 8
        at = [_add(base, _add(_mul(row, _LINE), _shl(_xor(chunk, row), 4))) for row in rows]
        return _words_array(
            [
                word
                for k in range(2)  # rows m and m + 8
                for e in range(2)
                for word in _load_shared(at[e], (2 * step + k) * boxes * _BOX, blocks // 2)
            ]
        )

    return read(tile_ref, jnp.int32(first_column))


def v_fragments(words, blocks: int, first: int, count: int):
    """V^T for 16 summed rows, a list of f16 [64, 16], from `v_bytes`: `count` of the `blocks`, from `first` on."""

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA,),
        return_type=(plgpu.ShapeDtypeStruct((64, _STEP), jnp.float16, layout=_WGMMA),) * count,
    )
    def convert(_, words):
        words = iter(_words_of(words))
        take = lambda: [next(words) for _ in range(blocks // 2)][first // 2 : (first + count) // 2]
        values: list[dict[tuple[int, int], ir.Value]] = [{} for _ in range(count)]
        for k in range(2):
            for i, (x, y) in enumerate(zip(take(), take(), strict=True)):
                for j, selector in enumerate((0x5140, 0x7362)):  # bytes 0, 1 and bytes 2, 3 of both rows
                    for h, pair in enumerate(_halves_to_f16(_prmt(x, y, selector))):
                        values[2 * i + j][8 * h, 8 * k] = pair
        return tuple(_f16_array(pairs, (64, _STEP)) for pairs in values)

    return list(convert(words))


def _power_and_unit(peak, threads: int):
    """(factor that fits a line into e4m3, its inverse): f32 powers of two as words.

    peak: the larger magnitudes of a thread's words of two bf16; a line's `threads` lie together.
    """
    peak = arith.maxui(_shl(peak, 16), _and(peak, -65536))  # non-negative floats compare as integers
    distance = 1
    while distance < threads:
        peak = arith.maxui(peak, utils.shfl_bfly(peak, distance))
        distance *= 2
    up = arith.minui(arith.subi(_const(261), _shr(peak, 23)), _const(253))
    return _shl(up, 23), _shl(arith.subi(_const(254), up), 23)


def split_queries(raw_ref, lines, part, parts: int, q_smem, unit_ref, transforms) -> None:
    """Queries as two e4m3 terms, each times a power of two; the inverse of that goes to `unit_ref`.

    raw_ref is bytes [64, width + 64] of up to 32 lines of bf16, of which `lines` count: row n holds the first ``width + 64``
    bytes of line n, row ``32 + n`` the last. q_smem is bytes [2 * columns, width + 64], the first terms and then what they leave,
    with zeros in lines past those; unit_ref f32 [columns]. The power takes a line's largest element to [2**7, 2**8). The sum of both
    terms is exact but for what is below 2**-17 of that element. Each of `parts` warpgroups calls it with its `part`. Follow with
    `plgpu.commit_smem`.
    """

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(transforms),
            *[_SCALAR] * 2,
            plgpu.RefType(transforms),
            plgpu.RefType(),
        ),
        return_type=None,
    )
    def convert(_, raw, lines, part, target, units):
        lines, part = lines.registers.item(), part.registers.item()
        groups, boxes, _, _ = ir.MemRefType(target.type).shape  # [2 * columns / 8, boxes, 8, 128]
        chunks, columns = 2 * boxes - 1, 4 * groups  # chunks of 64 columns: a line of a box of raw
        mine = columns // parts
        threads = utils.WARPGROUP_SIZE // mine  # of a line; each takes 16 bytes of a chunk
        wide = threads // 8  # chunks at once
        turns = -(-chunks // wide)
        thread = arith.remui(utils.thread_idx(), _const(utils.WARPGROUP_SIZE))
        piece, first_chunk = _and(thread, 7), _shr(_and(thread, threads - 1), 3)
        line = _add(_shr(thread, threads.bit_length() - 1), _mul(part, mine))
        inside = arith.cmpi(arith.CmpIPredicate.slt, line, lines)
        row, phase = _line_of(line, boxes)
        at = _add(_add(_shared(raw), row), _shl(_xor(piece, phase), 4))
        # The second half starts where the first has its last box but one.
        behind = 4 * boxes * _BOX - (boxes - 1) * _BOX

        def load(chunk):
            early = arith.cmpi(arith.CmpIPredicate.slt, chunk, _const(boxes))
            box = _add(_mul(chunk, _BOX), arith.select(early, _const(0), _const(behind)))
            return [arith.select(inside, w, _const(0)) for w in _load_shared(_add(at, box), 0, 4)]

        def chunk_of(turn):
            """(chunk of this thread, whether there is one)."""
            chunk = _add(first_chunk, _mul(turn, wide))
            exists = arith.cmpi(arith.CmpIPredicate.slt, chunk, _const(chunks))
            return arith.select(exists, chunk, _const(0)), exists

        peak = _const(0)
        for turn in range(turns):
            for word in load(chunk_of(_const(turn))[0]):
                peak = _larger_sizes(peak, word)
        power, unit = _power_and_unit(peak, threads)
        to = _add(_add(_shared(target), row), _shl(_and(piece, 1), 3))

        def store(turn):  # 8 bytes of a line of each term
            chunk, exists = chunk_of(turn)
            words = load(chunk)
            pairs = [_two_terms(words[i], words[i + 1], power) for i in (0, 2)]
            side = _xor(_or(_shr(piece, 1), _shl(_and(chunk, 1), 2)), phase)
            place = _add(_add(to, _shl(side, 4)), _mul(_shr(chunk, 1), _BOX))
            for term in range(2):
                at_term = term * groups // 2 * boxes * _BOX
                _store_shared_2(place, at_term, [pair[term] for pair in pairs], exists)

        _repeat(turns, store)
        leads = arith.cmpi(arith.CmpIPredicate.eq, _and(thread, threads - 1), _const(0))
        _store_shared(_add(_shared(units), _shl(line, 2)), 0, unit, leads)

    convert(raw_ref, jnp.int32(lines), jnp.int32(part), q_smem, unit_ref)


def zero_rows(tile_ref, first, stop, transforms) -> None:
    """Writes zeros over the rows of a tile of 64 outside [first, stop). The swizzle stays inside a line of 128 bytes."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), _SCALAR, _SCALAR), return_type=None)
    def zero(_, tile, first, stop):
        boxes = _boxes_of_row(tile)
        thread = arith.remui(utils.thread_idx(), _const(utils.WARPGROUP_SIZE))
        row, side = _shr(thread, 1), _and(thread, 1)
        at = _add(_shared(tile), _add(_line_of(row, boxes)[0], _shl(side, 6)))
        dead = arith.ori(
            arith.cmpi(arith.CmpIPredicate.slt, row, first.registers.item()),
            arith.cmpi(arith.CmpIPredicate.sge, row, stop.registers.item()),
        )
        with utils.when(dead):
            for box in range(boxes):
                for piece in range(0, _LINE // 2, 16):
                    utils.inline_ptx(
                        f"st.shared.v4.b32 [$0+{box * _BOX + piece}], {{$1, $1, $1, $1}};",
                        at, _const(0), has_side_effects=True,
                    )  # fmt: skip

    zero(tile_ref, jnp.int32(first), jnp.int32(stop))


def store_columns(ref, blocks, first_line, lines, column) -> None:
    """``ref[first_line + n, column + v] = O[v, n]`` for ``n < lines``; `blocks` are O^T as `v_fragments` orders its rows.

    They are two or four, f32 [64, n] in the WGMMA layout; `ref` is bf16 in GMEM. The address arithmetic is 64-bit.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[_WGMMA] * len(blocks), _SCALAR, _SCALAR, _SCALAR), return_type=None
    )
    def store(_, ref, *args):
        accs, (first_line, lines, column) = (
            args[: len(blocks)],
            (x.registers.item() for x in args[len(blocks) :]),
        )
        stride = ir.MemRefType(ref.type).shape[1]
        element = ir.MemRefType(ref.type).element_type
        i64 = ir.IntegerType.get_signless(64)
        lane, warp = _lane_and_warp()
        g, q = _shr(lane, 2), _and(lane, 3)
        neighbours = 2 * len(accs)
        mine = _add(column, _add(_mul(warp, 8 * neighbours), _mul(g, neighbours)))
        base = utils.memref_ptr(ref)
        places = [_by_place(acc) for acc in accs]
        for n in range(0, accs[0].shape[1], 8):
            for c in range(2):
                vec = llvm.mlir_undef(ir.VectorType.get((neighbours,), ir.F32Type.get()))
                values = [_element(place[8 * h, n], c) for place in places for h in range(2)]
                for i, value in enumerate(values):
                    vec = llvm.insertelement(vec, value, _const(i))
                vec = arith.truncf(ir.VectorType.get((neighbours,), element), vec)
                line = _add(_shl(q, 1), _const(n + c))
                with utils.when(arith.cmpi(arith.CmpIPredicate.slt, line, lines)):
                    at = arith.muli(
                        arith.extsi(i64, _add(first_line, line)),
                        arith.constant(i64, ir.IntegerAttr.get(i64, stride)),
                    )
                    at = arith.addi(at, arith.extsi(i64, mine))
                    pointer = utils.getelementptr(base, [at], element)
                    llvm.store(vec, pointer, alignment=neighbours * utils.bytewidth(element))

    store(ref, *blocks, jnp.int32(first_line), jnp.int32(lines), jnp.int32(column))


def store_vector(ref, values, first, count) -> None:
    """``ref[first + n] = values[n]`` for ``n < count``; f32 [n] in the layout of WGMMA columns, `ref` in GMEM."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _WGMMA.reduce(0), _SCALAR, _SCALAR), return_type=None)
    def store(_, ref, values, first, count):
        first, count = first.registers.item(), count.registers.item()
        i64 = ir.IntegerType.get_signless(64)
        thread = arith.remui(utils.thread_idx(), _const(utils.WARPGROUP_SIZE))
        base = utils.memref_ptr(ref)
        with utils.when(arith.cmpi(arith.CmpIPredicate.ult, thread, _const(4))):
            for i, register in enumerate(values.registers.flat):
                for c in range(2):
                    n = _add(_shl(thread, 1), _const(8 * i + c))
                    with utils.when(arith.cmpi(arith.CmpIPredicate.slt, n, count)):
                        at = arith.extsi(i64, _add(first, n))
                        llvm.store(_element(register, c), utils.getelementptr(base, [at], values.mlir_dtype))

    store(ref, values, jnp.int32(first), jnp.int32(count))


def _multiply_e4m3(accumulator: np.ndarray, a: ir.Value, b: ir.Value, n: int, fresh: bool) -> np.ndarray:
    """One WGMMA of [64, 32] by [32, n] bytes, by their descriptors, on an array of registers; `fresh` forgets what they held."""
    f32 = ir.F32Type.get()
    one = ir.VectorType.get((1,), f32)
    values = [_element(register, 0) for register in accumulator.flat]
    count = len(values)
    names = ", ".join(f"${i}" for i in range(count))
    result = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * count),
        [*values, a, b],
        f"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {{{names}}}, ${2 * count}, ${2 * count + 1},"
        f" {int(not fresh)}, 1, 1;",
        ",".join(["=f"] * count + [str(i) for i in range(count)] + ["l", "l"]),
        asm_dialect=0,
        has_side_effects=True,
    )
    registers = np.empty(accumulator.shape, dtype=object)
    for i, index in enumerate(np.ndindex(registers.shape)):
        registers[index] = vector.broadcast(one, llvm.extractvalue(f32, result, [i]))
    return registers


def _lane_and_warp() -> tuple[ir.Value, ir.Value]:
    thread = arith.remui(utils.thread_idx(), _const(utils.WARPGROUP_SIZE))
    return _and(thread, 31), _shr(thread, 5)


def _row_in_warpgroup() -> ir.Value:
    """The row 16 * warp + g of S^T."""
    lane, warp = _lane_and_warp()
    return _add(_shl(warp, 4), _shr(lane, 2))


def _line_of(row: ir.Value, boxes: int) -> tuple[ir.Value, ir.Value]:
    """(byte offset of the row's line in its first box, what the swizzle adds to a 16-byte chunk)."""
    phase = _and(row, 7)
    return _add(_mul(_shr(row, 3), boxes * _BOX), _mul(phase, _LINE)), phase


def _boxes_of_row(tile: ir.Value) -> int:
    """Boxes of [8, 128] bytes that lie side by side. `tile` is [rows / 8, boxes, 8, 128]."""
    return ir.MemRefType(tile.type).shape[1]


def _load_shared(address: ir.Value, offset: int, words: int) -> list[ir.Value]:
    i32 = ir.IntegerType.get_signless(32)
    names = [f"${i}" for i in range(words)]
    target = names[0] if words == 1 else "{" + ", ".join(names) + "}"
    kind = "b32" if words == 1 else f"v{words}.b32"
    loaded = utils.inline_ptx(
        f"ld.shared.{kind} {target}, [${words}+{offset}];",
        address,
        result_types=i32 if words == 1 else [i32] * words,
        has_side_effects=True,
    )
    return [loaded] if words == 1 else list(loaded)


def _store_shared(address: ir.Value, offset: int, word: ir.Value, where: ir.Value) -> None:
    utils.inline_ptx(
        f"st.shared.b32 [$0+{offset}], $1;", address, word, predicate=where, has_side_effects=True
    )


def _store_shared_2(address: ir.Value, offset: int, words: list[ir.Value], where: ir.Value) -> None:
    utils.inline_ptx(
        f"st.shared.v2.b32 [$0+{offset}], {{$1, $2}};",
        address,
        *words,
        predicate=where,
        has_side_effects=True,
    )


def _larger_sizes(sizes: ir.Value, word: ir.Value) -> ir.Value:
    """Of two bf16 pairs the larger magnitudes; `sizes` has none below 0."""
    return _ptx("{ .reg .b32 size; and.b32 size, $2, 0x7fff7fff; max.bf16x2 $0, $1, size; }", sizes, word)


def _two_terms(low: ir.Value, high: ir.Value, power: ir.Value) -> list[ir.Value]:
    """Two bf16 pairs times an f32, given by its bits, as four e4m3 bytes, and as many of what those leave."""
    i32 = ir.IntegerType.get_signless(32)
    text = ".reg .b32 w; .reg .b16 e, f; .reg .f32 a, b, c, d, p; mov.b32 p, $4;"
    for word, (x, y) in (("$2", "ab"), ("$3", "cd")):
        text += f" shl.b32 w, {word}, 16; mov.b32 {x}, w; and.b32 w, {word}, 0xffff0000; mov.b32 {y}, w;"
    text += " mul.f32 a, a, p; mul.f32 b, b, p; mul.f32 c, c, p; mul.f32 d, d, p;"
    to_bytes = (
        " cvt.rn.satfinite.e4m3x2.f32 e, b, a; cvt.rn.satfinite.e4m3x2.f32 f, d, c; mov.b32 {out}, {{e, f}};"
    )
    text += to_bytes.format(out="$0")
    for half, (x, y) in (("e", "ab"), ("f", "cd")):
        text += f" cvt.rn.f16x2.e4m3x2 w, {half}; {{ .reg .b16 l, h; .reg .f32 t; mov.b32 {{l, h}}, w;"
        text += f" cvt.f32.f16 t, l; sub.f32 {x}, {x}, t; cvt.f32.f16 t, h; sub.f32 {y}, {y}, t; }}"
    text += to_bytes.format(out="$1")
    return list(utils.inline_ptx(f"{{ {text} }}", low, high, power, result_types=[i32, i32]))


def _ptx(text: str, *args: ir.Value) -> ir.Value:
    return utils.inline_ptx(text, *args, result_types=ir.IntegerType.get_signless(32))


def _words_type(words: int):
    """Words of a thread pass between functions as an int32 array, whose shape and layout mean nothing else."""
    return plgpu.ShapeDtypeStruct((64, 2 * words), jnp.int32, layout=_WGMMA)


def _words_array(words: list[ir.Value]) -> FragmentedArray:
    layout = _WGMMA.to_mgpu()
    i32 = ir.IntegerType.get_signless(32)
    registers = np.empty(layout.registers_shape((64, 2 * len(words))), dtype=object)
    for i, index in enumerate(np.ndindex(registers.shape)):
        pair = llvm.mlir_undef(ir.VectorType.get((2,), i32))
        for e in range(2):
            pair = llvm.insertelement(pair, words[2 * i + e], _const(e))
        registers[index] = pair
    return FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)


def _words_of(array: FragmentedArray) -> list[ir.Value]:
    return [_element(register, e) for register in array.registers.flat for e in range(2)]


def _halves_to_f16(word: ir.Value) -> list[ir.Value]:
    """The four e4m3 bytes of a word as two words of f16 pairs, lower bytes first."""
    i32 = ir.IntegerType.get_signless(32)
    return list(
        utils.inline_ptx(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2;"
            " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            word,
            result_types=[i32, i32],
        )
    )


def _prmt(x: ir.Value, y: ir.Value, selector: int) -> ir.Value:
    return _ptx(f"prmt.b32 $0, $1, $2, {selector};", x, y)


def _f16_array(words: dict[tuple[int, int], ir.Value], shape: tuple[int, int]) -> FragmentedArray:
    """From words of f16 pairs by (row offset 0 or 8, column offset)."""
    layout = _WGMMA.to_mgpu()
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    pair = ir.VectorType.get((2,), ir.F16Type.get())
    for index, row, column in _places(layout, shape, registers.shape):
        registers[index] = llvm.bitcast(pair, words[row, column])
    return FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _by_place(values: FragmentedArray) -> dict[tuple[int, int], ir.Value]:
    return {
        (row, column): values.registers[index]
        for index, row, column in _places(values.layout, values.shape, values.registers.shape)
    }


def _places(layout, shape, registers_shape):
    """(index of a register, its row offset 0 or 8, its first column less what the thread adds) of a WGMMA layout."""
    strides = layout.tiling.tile_strides(tuple(utils.get_contiguous_strides(shape)))
    for index in np.ndindex(registers_shape):
        yield index, *divmod(sum(i * s for i, s in zip(index, strides, strict=False)), shape[1])


def _row_places(layout, registers_shape):
    strides = layout.tiling.tile_strides((1,))
    for index in np.ndindex(registers_shape):
        yield index, sum(i * s for i, s in zip(index, strides, strict=False))


def _element(register: ir.Value, e: int) -> ir.Value:
    return vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([e]))


def _repeat(trips: int | ir.Value, body, carry=None) -> list[ir.Value]:  # type: ignore[no-untyped-def]
    """Emits ``for i in range(trips): carry = body(i, carry)`` with int32 i; without a list to carry, body(i)."""
    stop = _const(trips) if isinstance(trips, int) else trips
    loop = scf.ForOp(_const(0), stop, _const(1), carry or [])
    with ir.InsertionPoint(loop.body):
        i = loop.induction_variable
        scf.yield_(body(i, list(loop.inner_iter_args)) if carry else body(i) or [])
    return list(loop.results)


def _opaque(trips: int, descriptor: ir.Value) -> ir.Value:
    """A number of trips that the compilers can't unroll by: no WGMMA descriptor has its bit 31."""
    return _add(_const(trips), _shr(arith.trunci(ir.IntegerType.get_signless(32), descriptor), 31))


def _shared(ref: ir.Value) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))


def _operand(ref: ir.Value) -> ir.Value:
    """WGMMA's descriptor of bytes [8 * n, boxes of 128] whose summed dimension lies along the rows."""
    descriptor = encode_descriptor(
        ref, leading_byte_offset=0, stride_byte_offset=_boxes_of_row(ref) * _BOX, swizzle=_LINE
    )
    # See `mosaic_registers.uniform`.
    i64 = ir.IntegerType.get_signless(64)
    return utils.inline_ptx(
        "{ .reg .b32 low, high; mov.b64 {low, high}, $1; shfl.sync.idx.b32 low, low, 0, 31, -1;"
        " mov.b64 $0, {low, high}; }",
        descriptor, result_types=i64, has_side_effects=True, convergent=True,
    )  # fmt: skip


def _ahead(descriptor: ir.Value, offset: int) -> ir.Value:
    i64 = ir.IntegerType.get_signless(64)
    return arith.addi(descriptor, arith.constant(i64, ir.IntegerAttr.get(i64, offset >> 4)))


def _const(value: int) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value))


def _add(a: ir.Value, b: ir.Value) -> ir.Value:
    return arith.addi(a, b)


def _mul(a: ir.Value, b: int) -> ir.Value:
    return arith.muli(a, _const(b))


def _and(a: ir.Value, b: int) -> ir.Value:
    return arith.andi(a, _const(b))


def _or(a: ir.Value, b: ir.Value) -> ir.Value:
    return arith.ori(a, b)


def _xor(a: ir.Value, b: ir.Value) -> ir.Value:
    return arith.xori(a, b)


def _shl(a: ir.Value, b: int) -> ir.Value:
    return arith.shli(a, _const(b))


def _shr(a: ir.Value, b: int) -> ir.Value:
    return arith.shrui(a, _const(b))
