"""Pieces of the Mosaic prefill kernels, MLA's and GQA's, that Pallas has no operation for (lane semantics).

Addresses are computed in 64 bits.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

_SCALAR = plgpu.Layout.WG_SPLAT(())
_WGMMA = plgpu.Layout.WGMMA
_QUERIES = 64  # M of a WGMMA
_SLICE = 16  # K of a WGMMA on bf16
_ROW_BYTES = 128  # of a chunk of 64 columns: the width of the swizzle
_GROUP_BYTES = 8 * _ROW_BYTES  # of 8 rows, after which the swizzle pattern starts again


def issue_products(q_ref, k_ref, v_ref, p, acc, transforms):
    """Starts S = q @ k^T and then acc += p @ v, each a group of WGMMAs, and returns (S, acc) still in flight.

    q_ref [qk_chunks, 64, 64], k_ref [qk_chunks, keys, 64] and v_ref [v_chunks, keys, 64] are bf16 in swizzled shared
    memory; q_ref may have its rows in several dimensions, and more than 64 of them, of which the first 64 are read. p is
    bf16 [64, keys] and acc f32 [64, 64 * v_chunks] in the WGMMA layout. Where q_ref and k_ref, or the other three, are
    None, only the other product is started, and its result alone returned. Nothing may touch the results or p before
    `plgpu.wgmma_wait`, after which `settle` orders their uses.

    One block of assembly: an operand that is made ready between two WGMMAs would make the compiler wait for the first.
    """
    scores, values = q_ref is not None, v_ref is not None
    keys = (k_ref if scores else v_ref).shape[-2]
    width = v_ref.shape[-3] * 64 if values else 0
    refs = [ref for ref in (q_ref, k_ref, v_ref) if ref is not None]
    arrays = (p, acc) if values else ()
    results = [(_QUERIES, keys)] * scores + [(_QUERIES, width)] * values

    @plgpu.inline_mgpu(
        arg_types=(*[plgpu.RefType(transforms)] * len(refs), *[_WGMMA] * len(arrays)),
        return_type=tuple(plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=_WGMMA) for shape in results),
    )
    def issue(_, *args):
        given = iter(args)
        asm = _Assembly("wgmma.fence.sync.aligned;")
        if scores:
            q, k = next(given), next(given)
            a, b = _descriptor(q), _descriptor(k)
            s = asm.accumulator(_QUERIES, keys)
            chunks, *rows, _ = ir.MemRefType(q.type).shape
            for c in range(chunks):
                for piece in range(0, _ROW_BYTES, 2 * _SLICE):
                    a_at = asm.descriptor(a, c * math.prod(rows) * _ROW_BYTES + piece)
                    b_at = asm.descriptor(b, c * keys * _ROW_BYTES + piece)
                    asm.wgmma(s, a_at, b_at, transpose="0, 0")
            asm.lines.append("wgmma.commit_group.sync.aligned;")
        if values:
            v, p, acc = next(given), next(given), next(given)
            b = _descriptor(v, leading=keys * _ROW_BYTES)
            o = asm.accumulator(_QUERIES, width, acc)
            words = _by_half(p)
            for k in range(0, keys, _SLICE):
                fragment = ", ".join(
                    asm.word(words[half][k + column]) for column in (0, 8) for half in (0, 8)
                )
                asm.wgmma(o, f"{{{fragment}}}", asm.descriptor(b, k * _ROW_BYTES), transpose="1")
            asm.lines.append("wgmma.commit_group.sync.aligned;")
        return tuple(asm.emit())

    return issue(*refs, *arrays)


def settle(x):
    """x, with all that uses the result ordered after the waits before this call. For arrays in the WGMMA layout."""

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=_WGMMA)
    )
    def order(_, x):
        return mgpu.optimization_barrier(x)

    return order(x)


def keep_columns(x, first, last):
    """x[i, j] where ``first[i] <= j <= last[i]``, else -inf. x: f32 in the WGMMA layout; bounds: int32 in that of its rows.

    Columns are immediate operands here. Those of `broadcasted_iota` the compiler keeps in registers, 32 of them and more.
    """
    bound = _WGMMA.reduce(1)

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA, bound, bound),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=_WGMMA),
    )
    def keep(_, x, first, last):
        lane, _row = _lane_and_row()
        own = arith.muli(arith.remui(lane, utils.c(4, _i32())), utils.c(2, _i32()))
        lower, upper = (
            {
                half: arith.subi(word, own)
                for half, [word] in ((h, r.values()) for h, r in _by_half(v).items())
            }
            for v in (first, last)
        )
        nothing = utils.c(-float("inf"), ir.F32Type.get())
        registers = np.empty(x.registers.shape, dtype=object)
        for index, row, column in _register_places(x.layout, x.shape, x.registers.shape):
            pair = x.registers[index]
            for e in range(2):
                at = utils.c(column + e, _i32())
                inside = arith.andi(
                    arith.cmpi(arith.CmpIPredicate.sle, lower[row], at),
                    arith.cmpi(arith.CmpIPredicate.sge, upper[row], at),
                )
                value = arith.select(inside, _element(x.registers[index], e), nothing)
                pair = llvm.insertelement(pair, value, utils.c(e, _i32()))
            registers[index] = pair
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return keep(x, first, last)


class _Assembly:
    """Text, operands and results of a block of inline assembly with WGMMAs."""

    def __init__(self, *lines: str):
        self.lines = list(lines)
        self.inputs: list[tuple[str, ir.Value]] = []
        self.outputs: list[tuple[tuple[int, int], list[ir.Value] | None]] = []
        self.scratch = 0

    def accumulator(self, rows: int, columns: int, start=None) -> int:
        """A result in the WGMMA layout that starts as `start`, or as 0."""
        registers = None
        if start is not None:
            halves = _by_half(start, _pair)
            registers = [x for c in range(0, columns, 8) for half in (0, 8) for x in halves[half][c]]
        self.outputs.append(((rows, columns), registers))
        return len(self.outputs) - 1

    def word(self, value: ir.Value) -> str:
        self.inputs.append(("r", value))
        return f"@{len(self.inputs) - 1}@"

    def descriptor(self, base: ir.Value, offset: int) -> str:
        """Descriptor of the matrix `offset` bytes behind that of `base`."""
        known = [i for i, (_, value) in enumerate(self.inputs) if value is base]
        if not known:
            self.inputs.append(("l", base))
            known = [len(self.inputs) - 1]
        name = f"d{self.scratch}"
        self.scratch += 1
        self.lines.append(f".reg .b64 {name}; add.s64 {name}, @{known[0]}@, {offset >> 4};")
        return name

    def wgmma(self, accumulator: int, a: str, b: str, *, transpose: str) -> None:
        (_, columns), start = self.outputs[accumulator]
        first = start is None and f"#{accumulator}#" not in "".join(self.lines)
        self.lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{columns}k{_SLICE}.f32.bf16.bf16 "
            f"#{accumulator}#, {a}, {b}, {'nil' if first else 'yes'}, 1, 1, {transpose};"
        )

    def emit(self):
        f32 = ir.F32Type.get()
        sizes = [rows * columns // utils.WARPGROUP_SIZE for (rows, columns), _ in self.outputs]
        firsts = [sum(sizes[:i]) for i in range(len(sizes))]
        tied = [
            (f"{firsts[i] + j}", x)
            for i, (_, start) in enumerate(self.outputs)
            for j, x in enumerate(start or [])
        ]
        operands = tied + self.inputs
        text = (
            "{ .reg .pred yes, nil; setp.eq.u32 yes, 0, 0; setp.ne.u32 nil, 0, 0;\n"
            + "\n".join(self.lines)
            + "\n}"
        )
        for i, (first, size) in enumerate(zip(firsts, sizes, strict=True)):
            text = text.replace(f"#{i}#", "{" + ", ".join(f"${first + j}" for j in range(size)) + "}")
        for i in range(len(self.inputs)):
            text = text.replace(f"@{i}@", f"${sum(sizes) + len(tied) + i}")
        result = llvm.inline_asm(
            llvm.StructType.get_literal([f32] * sum(sizes)),
            [value for _, value in operands],
            text,
            ",".join(["=f"] * sum(sizes) + [constraint for constraint, _ in operands]),
            asm_dialect=0,
            has_side_effects=True,
        )
        words = [llvm.extractvalue(f32, result, [i]) for i in range(sum(sizes))]
        for first, size, (shape, _) in zip(firsts, sizes, self.outputs, strict=True):
            yield _wgmma_array(words[first : first + size], shape)


def _wgmma_array(elements: list[ir.Value], shape: tuple[int, int]):
    """The f32 array whose registers a WGMMA returned in the order of its operand list."""
    layout = _WGMMA.to_mgpu()
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    f32 = ir.F32Type.get()
    pair = ir.VectorType.get((2,), f32)
    for index, row, column in _register_places(layout, shape, registers.shape):
        at = column // 8 * 4 + row // 8 * 2
        value = llvm.mlir_undef(pair)
        for e in range(2):
            value = llvm.insertelement(value, elements[at + e], utils.c(e, _i32()))
        registers[index] = value
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _descriptor(ref, leading: int = 16) -> ir.Value:
    """Shared-memory matrix descriptor (PTX ISA, "Matrix descriptor format") of 128-byte rows with 128-byte swizzle.

    `leading`: bytes between chunks of 64 columns, for an operand whose columns are not summed over.
    """
    constant = (leading >> 4) << 16 | (_GROUP_BYTES >> 4) << 32
    high = arith.shli(utils.c(1, _i64()), utils.c(62, _i64()))
    at = arith.shrui(
        arith.andi(arith.extui(_i64(), _shared(ref)), utils.c(0x3FFFF, _i64())), utils.c(4, _i64())
    )
    return arith.ori(arith.ori(at, utils.c(constant, _i64())), high)


def draw_ticket(queue_ref):
    """Adds 1 to queue_ref[0], an int32 in global memory; `ticket` makes what it held known to all threads.

    The answer takes the better part of a microsecond: draw early.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)
    )
    def draw(_, queue):
        i32 = _i32()
        thread = arith.remui(utils.thread_idx(), utils.c(utils.WARPGROUP_SIZE, i32))
        drawn = utils.inline_ptx(
            "{ .reg .pred p; setp.eq.u32 p, $2, 0; mov.u32 $0, 0; @p atom.relaxed.gpu.global.add.u32 $0, [$1], 1; }",
            _pointer(queue), thread, result_types=i32, has_side_effects=True,
        )  # fmt: skip
        return mgpu.FragmentedArray.splat(drawn, (), is_signed=True)

    return draw(queue_ref)


def ticket(drawn, scratch_ref):
    """The ticket that `draw_ticket` drew. scratch_ref: int32[1] of shared memory that nothing else uses."""

    @plgpu.inline_mgpu(
        arg_types=(_SCALAR, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR),
    )
    def tell(_, drawn, scratch):
        i32 = _i32()
        utils.warpgroup_barrier()  # all have read the last ticket
        thread = arith.remui(utils.thread_idx(), utils.c(utils.WARPGROUP_SIZE, i32))
        first = arith.cmpi(arith.CmpIPredicate.eq, thread, utils.c(0, i32))
        utils.inline_ptx(
            "st.shared.b32 [$0], $1;",
            _shared(scratch), drawn.registers.item(), predicate=first, has_side_effects=True,
        )  # fmt: skip
        utils.warpgroup_barrier()
        ticket = utils.inline_ptx(
            "ld.volatile.shared.b32 $0, [$1];", _shared(scratch), result_types=i32, has_side_effects=True
        )
        return mgpu.FragmentedArray.splat(ticket, (), is_signed=True)

    return tell(drawn, scratch_ref)


def store_words(ref, words) -> None:
    """``ref[i] = words[i]`` by the first thread of the warpgroup; int32 scalars, an int32 ref in shared memory."""
    words = tuple(words)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), (_SCALAR,) * len(words)), return_type=None)
    def store(_, ref, words):
        thread = arith.remui(utils.thread_idx(), utils.c(utils.WARPGROUP_SIZE, _i32()))
        first = arith.cmpi(arith.CmpIPredicate.eq, thread, utils.c(0, _i32()))
        for i, word in enumerate(words):
            utils.inline_ptx(
                f"st.shared.b32 [$0+{4 * i}], $1;",
                _shared(ref), word.registers.item(), predicate=first, has_side_effects=True,
            )  # fmt: skip

    store(ref, words)


def zero_rows(ref, first, transforms, before=None) -> None:
    """``ref[:, r, :] = 0`` for r >= first, and for r < before where that is given, in bf16 shared memory
    [chunks, rows, 64] of at most 128 rows of 128 bytes each.

    The 128-byte swizzle permutes bytes inside a row, so it does not matter here.
    """
    bounds = (first,) if before is None else (first, before)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), (_SCALAR,) * len(bounds)), return_type=None)
    def zero(_, ref, bounds):
        i32 = _i32()
        chunks, rows, width = ir.MemRefType(ref.type).shape
        if utils.WARPGROUP_SIZE % rows or width != 64:
            raise ValueError(f"expected [chunks, a divisor of 128, 64], got {[chunks, rows, width]}")
        row = arith.remui(utils.thread_idx(), utils.c(rows, i32))
        first, *before = (x.registers.item() for x in bounds)
        dead = arith.cmpi(arith.CmpIPredicate.sge, row, first)
        for x in before:
            dead = arith.ori(dead, arith.cmpi(arith.CmpIPredicate.slt, row, x))
        at = arith.addi(_shared(ref), arith.muli(row, utils.c(128, i32)))
        nothing = utils.c(0, i32)
        for offset in range(0, chunks * rows * 128, rows * 128):
            for piece in range(0, 128, 16):
                utils.inline_ptx(
                    f"st.shared.v4.b32 [$0+{offset + piece}], {{$1, $1, $1, $1}};",
                    at, nothing, predicate=dead, has_side_effects=True,
                )  # fmt: skip

    zero(ref, tuple(map(jnp.int32, bounds)))


def store_rows(ref, values, first, head, rows, sharing=1) -> None:
    """``ref[first + i // sharing, head + i % sharing] = values[i]`` for i < rows, straight from registers.

    `values`: bf16 or f32 [64, width] in the WGMMA layout, width a multiple of 32, for a ref [tokens, heads, width]; or f32
    [64] in the layout of WGMMA rows, for a ref [tokens, heads].
    """
    layout = plgpu.Layout.WGMMA if values.ndim == 2 else plgpu.Layout.WGMMA.reduce(1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, _SCALAR, _SCALAR, _SCALAR), return_type=None)
    def store(_, ref, values, first, head, rows):
        first, head, rows = (x.registers.item() for x in (first, head, rows))

        def place(at):
            """(token, head) of a line."""
            if sharing == 1:
                return arith.addi(first, at), head
            shared = utils.c(sharing, _i32())
            return (
                arith.addi(first, arith.divui(at, shared)),
                arith.addi(head, arith.remui(at, shared)),
            )

        if len(values.shape) == 1:
            _store_vector(ref, values, place, rows)
        elif utils.bytewidth(values.mlir_dtype) == 4:
            _store_pairs(ref, values, place, rows)
        else:
            _store_tile(ref, values, place, rows)

    store(ref, values, jnp.int32(first), jnp.int32(head), jnp.int32(rows))


def _store_tile(ref, values, place, rows):
    # A thread of a WGMMA accumulator holds, of row 16 * warp + lane / 4 + {0, 8} and of every 8 columns, the columns
    # 2 * (lane % 4) + {0, 1}. Four threads exchange theirs, so that each holds 8 neighbours: 16 bytes.
    width = values.shape[1]
    lane, row = _lane_and_row()
    quad = arith.remui(lane, utils.c(4, _i32()))
    for half, registers in _by_half(values).items():
        words = [registers[column] for column in range(0, width, 8)]
        for group in range(0, width // 8, 4):
            words[group : group + 4] = _transpose_quad(words[group : group + 4], quad)
        at = arith.addi(row, utils.c(half, _i32()))
        inside = arith.cmpi(arith.CmpIPredicate.slt, at, rows)
        column = arith.muli(quad, utils.c(8, _i32()))
        token, head = place(at)
        address = _row_pointer(ref, token, head, column)
        for group in range(0, width // 8, 4):
            utils.inline_ptx(
                f"st.global.v4.b32 [$0+{group * 16}], {{$1, $2, $3, $4}};",
                address, *words[group : group + 4], predicate=inside, has_side_effects=True,
            )  # fmt: skip


def _store_pairs(ref, values, place, rows):
    """f32: two neighbours a thread, and 32 bytes a quad."""
    lane, row = _lane_and_row()
    column = arith.muli(arith.remui(lane, utils.c(4, _i32())), utils.c(2, _i32()))
    for half, registers in _by_half(values, _pair).items():
        at = arith.addi(row, utils.c(half, _i32()))
        inside = arith.cmpi(arith.CmpIPredicate.slt, at, rows)
        token, head = place(at)
        address = _row_pointer(ref, token, head, column)
        for offset, pair in registers.items():
            utils.inline_ptx(
                f"st.global.v2.f32 [$0+{4 * offset}], {{$1, $2}};",
                address, *pair, predicate=inside, has_side_effects=True,
            )  # fmt: skip


def _store_vector(ref, values, place, rows):
    lane, row = _lane_and_row()
    one_of_quad = arith.cmpi(
        arith.CmpIPredicate.eq, arith.remui(lane, utils.c(4, _i32())), utils.c(0, _i32())
    )
    for half, registers in _by_half(values).items():
        [word] = registers.values()
        at = arith.addi(row, utils.c(half, _i32()))
        inside = arith.andi(one_of_quad, arith.cmpi(arith.CmpIPredicate.slt, at, rows))
        token, head = place(at)
        utils.inline_ptx(
            "st.global.b32 [$0], $1;",
            _row_pointer(ref, token, head, None), word, predicate=inside, has_side_effects=True,
        )  # fmt: skip


def _register_places(layout, shape, registers_shape):
    """(index of a register, its row offset 0 or 8, its first column less what the thread adds) of a WGMMA layout."""
    strides = layout.tiling.tile_strides(tuple(utils.get_contiguous_strides(shape)))
    width = shape[1] if len(shape) == 2 else 1
    for index in np.ndindex(registers_shape):
        yield index, *divmod(sum(i * s for i, s in zip(index, strides, strict=False)), width)


def _word(register: ir.Value) -> ir.Value:
    """A register of 32 bits as an i32."""
    return _element(vector.bitcast(ir.VectorType.get((1,), _i32()), register), 0)


def _pair(register: ir.Value) -> list[ir.Value]:
    return [_element(register, e) for e in range(2)]


def _element(register: ir.Value, e: int) -> ir.Value:
    return vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([e]))


def _by_half(values, convert=_word) -> dict[int, dict[int, Any]]:
    """Row offset 0 or 8 -> column offset -> register of a thread."""
    halves: dict[int, dict[int, Any]] = {0: {}, 8: {}}
    for index, row, column in _register_places(values.layout, values.shape, values.registers.shape):
        halves[row][column] = convert(values.registers[index])
    return halves


def _transpose_quad(words: list[ir.Value], quad: ir.Value) -> list[ir.Value]:
    """Word s of thread t of a quad becomes word t of thread s: a 4 x 4 transposition in two exchanges."""
    words = list(words)
    for distance in (1, 2):
        bit = arith.andi(quad, utils.c(distance, _i32()))
        upper = arith.cmpi(arith.CmpIPredicate.ne, bit, utils.c(0, _i32()))
        for low in [i for i in range(4) if not i & distance]:
            high = low + distance
            sent = arith.select(upper, words[low], words[high])
            received = utils.shfl_bfly(sent, distance)
            words[low] = arith.select(upper, received, words[low])
            words[high] = arith.select(upper, words[high], received)
    return words


def _lane_and_row() -> tuple[ir.Value, ir.Value]:
    i32 = _i32()
    thread = arith.remui(utils.thread_idx(), utils.c(utils.WARPGROUP_SIZE, i32))
    lane = arith.remui(thread, utils.c(32, i32))
    warp = arith.divui(thread, utils.c(32, i32))
    return lane, arith.addi(arith.muli(warp, utils.c(16, i32)), arith.divui(lane, utils.c(4, i32)))


def _row_pointer(ref, token, head, column) -> ir.Value:
    ty = ir.MemRefType(ref.type)
    heads, width = ty.shape[1], (ty.shape[2] if ty.rank == 3 else 1)
    wide = lambda x: arith.extsi(_i64(), x)
    flat = arith.addi(arith.muli(wide(token), utils.c(heads, _i64())), wide(head))
    flat = arith.muli(flat, utils.c(width, _i64()))
    if column is not None:
        flat = arith.addi(flat, wide(column))
    return arith.addi(_pointer(ref), arith.muli(flat, utils.c(utils.bytewidth(ty.element_type), _i64())))


def _pointer(ref) -> ir.Value:
    return llvm.ptrtoint(_i64(), utils.memref_ptr(ref))


def _shared(ref) -> ir.Value:
    return llvm.ptrtoint(_i32(), utils.memref_ptr(ref))


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)
