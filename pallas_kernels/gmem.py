"""Global memory, lane by lane, inside Pallas Mosaic GPU kernels. `launch` is of lane semantics; the functions serve both kinds.

Mosaic GPU has no vector index on a global-memory ref; these functions reach it through inline code. A vector here is
int32 in the layout of `lanes`: element i * 128 + t lies in register i of thread t of the warpgroup. A mask is such a
vector, live where not 0. An index is relative to the ref that is passed, and widened to 64 bits at the address: slice a
row off first (`ref.at[row]`), and no product of row and width has to fit in 32 bits. Loads are not masked: the index of
a lane whose value is of no use must be in bounds too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector

WARPGROUP = 128


def launch(
    body: Callable[..., None],
    *,
    inputs: Mapping[str, Any],
    in_place: Mapping[str, Any],
    outputs: Mapping[str, Any],
    grid: Mapping[str, int],
    warpgroups: int = 1,
    scratch: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Runs `body(refs, **scratch)` on a grid of blocks; returns the arrays named in `in_place` and `outputs`.

    refs holds a global-memory ref for each array of the three mappings, whose values are pytrees (None has no ref).
    Arrays of `in_place` are updated where they lie if the caller donates them; `outputs` are ShapeDtypeStructs, which
    nothing initialises. Axes are named by `grid`, and "warpgroup" where there is more than one.
    """
    refs = {name: jax.tree.map(jax.new_ref, value) for name, value in in_place.items()}
    operands, tree = jax.tree.flatten({**inputs, **refs})
    results, result_tree = jax.tree.flatten(dict(outputs))

    def kernel_body(*args, **scratch_refs):
        given = jax.tree.unflatten(tree, args[: len(operands)])
        made = jax.tree.unflatten(result_tree, args[len(operands) : len(operands) + len(results)])
        body({**given, **made}, **scratch_refs)

    kernel_body.__name__ = body.__name__  # the kernel's name in a profile
    made = plgpu.kernel(
        kernel_body,
        out_type=tuple(results),
        scratch_types=dict(scratch or {}),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups if warpgroups > 1 else None,
        thread_name="warpgroup" if warpgroups > 1 else None,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*operands)
    frozen = {name: jax.tree.map(jax.freeze, value) for name, value in refs.items()}
    return {**frozen, **jax.tree.unflatten(result_tree, made)}


def lanes(count: int) -> plgpu.Layout:
    """Layout of a vector of `count` elements, a multiple of 128, one a register."""
    return plgpu.Layout.WG_STRIDED((count,), vec_size=1)


def iota(count: int) -> jax.Array:
    """[0, 1, ..., count - 1] in the layout of `lanes`."""
    return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (count,), 0), lanes(count))


def splat(value: jax.Array | int) -> jax.Array:
    """A scalar in all of 128 lanes."""
    return plgpu.layout_cast(jnp.full((WARPGROUP,), value, jnp.int32), lanes(WARPGROUP))


def mask(condition: jax.Array) -> jax.Array:
    """A bool vector as a mask."""
    return condition.astype(jnp.int32)


def load(ref, index: jax.Array) -> jax.Array:
    """ref[index] of an int32 ref."""
    return _load(ref, index, "ld.global.b32")


def load_coherent(ref, index: jax.Array) -> jax.Array:
    """`load` of what other threads may have written in this kernel: it does not read the L1 cache."""
    return _load(ref, index, "ld.relaxed.gpu.global.b32")


def store(ref, index: jax.Array, value: jax.Array, live: jax.Array) -> None:
    """ref[index] = value where live."""
    _write(ref, index, value, live, "st.global.b32")


def store_bool(ref, index: jax.Array, value: jax.Array, live: jax.Array) -> None:
    """ref[index] = value where live, of a bool ref (a byte an element). value is a mask."""
    _write(ref, index, value, live, "st.global.b8", element_bytes=1)


def atomic_min(ref, index: jax.Array, value: jax.Array, live: jax.Array) -> None:
    """ref[index] = min(ref[index], value) where live, one lane at a time."""
    _write(ref, index, value, live, "red.relaxed.gpu.global.min.s32")


def atomic_add(ref, index: jax.Array, value: jax.Array, live: jax.Array) -> None:
    """ref[index] += value where live, one lane at a time."""
    _write(ref, index, value, live, "red.relaxed.gpu.global.add.s32")


def shared_load(ref, index: jax.Array) -> jax.Array:
    """ref[index] of an int32 ref in shared memory."""
    return _load(ref, index, "ld.shared.b32")


def shared_store(ref, index: jax.Array, value: jax.Array, live: jax.Array) -> None:
    """ref[index] = value where live, in shared memory."""
    _write(ref, index, value, live, "st.shared.b32")


def shared_min(ref, index: jax.Array, value: jax.Array, live: jax.Array) -> None:
    """ref[index] = min(ref[index], value) where live, one lane at a time, in shared memory."""
    _write(ref, index, value, live, "red.shared.min.s32")


def store_scalar(ref, index: jax.Array | int, value: jax.Array) -> None:
    """ref[index] = value, by one thread of the warpgroup. Both are int32 scalars."""
    thread = iota(WARPGROUP)
    store(ref, splat(index), splat(value), mask(thread == 0))


def store_quads(ref, index: jax.Array, values: Sequence[jax.Array], live: Sequence[jax.Array]) -> None:
    """ref[index + e] = values[e] where live[e], e < 4; one store of 16 bytes where all four are live.

    Every index is a multiple of 4, and `ref` starts at a multiple of 16 bytes.
    """
    layout = lanes(index.shape[0])

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, (layout,) * 4, (layout,) * 4))
    def write(_, ref, index, values, live):
        base = _base(ref)
        for i, *rest in registers(index, *values, *live):
            address = _address(base, i, 4)
            elements, lives = rest[:4], [_is_live(m) for m in rest[4:]]
            whole = arith.andi(arith.andi(lives[0], lives[1]), arith.andi(lives[2], lives[3]))
            utils.inline_ptx(
                "st.global.v4.b32 [$0], {$1, $2, $3, $4};",
                address, *elements, predicate=whole, has_side_effects=True,
            )  # fmt: skip
            for e in range(4):
                single = arith.andi(lives[e], arith.xori(whole, utils.c(1, whole.type)))
                utils.inline_ptx(
                    f"st.global.b32 [$0+{4 * e}], $1;",
                    address, elements[e], predicate=single, has_side_effects=True,
                )  # fmt: skip

    write(ref, index, tuple(values), tuple(live))


def block_barrier() -> None:
    """All threads of the block meet; what each wrote before is seen by the others after."""

    @plgpu.inline_mgpu()
    def barrier(_):
        gpu.barrier()

    barrier()


def block_rank(live: jax.Array, counts, warpgroups: int) -> tuple[jax.Array, jax.Array]:
    """Live lanes before each lane, and live lanes in all, counted over the block in the order (warpgroup, lane).

    Args:
      live: mask of 128 lanes; every one of the block's `warpgroups` (at most 8) calls with its own.
      counts: int32 shared memory [warpgroups * 4]. A block_barrier must separate two calls.

    Returns:
      Two vectors; the second holds the same number everywhere.
    """
    layout, warps = lanes(WARPGROUP), warpgroups * 4
    vectors = plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.int32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=(vectors, vectors))
    def rank(_, live, counts):
        i32 = _i32()
        [(bit,)] = registers(live)
        ballot = utils.inline_ptx(
            "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }",
            bit, result_types=i32, has_side_effects=True, convergent=True,
        )  # fmt: skip
        below = utils.inline_ptx("mov.u32 $0, %lanemask_lt;", result_types=i32)
        before = llvm.intr_ctpop(arith.andi(ballot, below))

        earlier, total = _across_warps(llvm.intr_ctpop(ballot), 0, counts, warps)
        return _vector_like(live, [arith.addi(before, earlier)]), _vector_like(live, [total])

    return rank(live, counts)


def block_scan(values: jax.Array, sums, warpgroups: int) -> tuple[jax.Array, jax.Array]:
    """Sum of the values before each lane, and of all, over the block in the order (warpgroup, lane). See `block_rank`."""
    layout = lanes(WARPGROUP)
    vectors = plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.int32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=(vectors, vectors))
    def scan(_, values, sums):
        [(value,)] = registers(values)
        steps = " ".join(
            f"shfl.sync.up.b32 y|p, $0, {distance}, 0, 0xffffffff; @p add.s32 $0, $0, y;"
            for distance in (1, 2, 4, 8, 16)
        )
        through = utils.inline_ptx(
            "{ .reg .pred p; .reg .b32 y; mov.b32 $0, $1; " + steps + " }",
            value, result_types=_i32(), has_side_effects=True, convergent=True,
        )  # fmt: skip
        earlier, total = _across_warps(through, 31, sums, warpgroups * 4)
        before = arith.addi(arith.subi(through, value), earlier)
        return _vector_like(values, [before]), _vector_like(values, [total])

    return scan(values, sums)


def copy_within(
    ref, source: jax.Array, target: jax.Array, stride: int, offset: jax.Array, live: jax.Array, width: int
) -> None:
    """Copies `width` bytes a lane from source * stride + offset to target * stride + offset, in bytes, where live.

    ref is uint8; source and target are int32 scalars, offset an int32 vector. The addresses are computed in 64 bits.
    width is 1, 2, 4, 8 or 16 and divides stride and offset. All loads come before the first store.
    """
    layout, scalar = lanes(offset.shape[0]), lanes(WARPGROUP)
    kind = {1: "b8", 2: "b16", 4: "b32", 8: "v2.b32", 16: "v4.b32"}[width]
    words = max(width // 4, 1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar, scalar, layout, layout))
    def copy(_, ref, source, target, offset, live):
        base, i64 = _base(ref), _i64()
        [(source, target)] = registers(source, target)
        source, target = (_address(base, page, stride) for page in (source, target))
        taken = ir.IntegerType.get_signless(16) if width < 4 else _i32()
        out = ", ".join(f"${i}" for i in range(words))
        zero = " ".join(f"mov.b{16 if width < 4 else 32} ${i}, 0;" for i in range(words))
        loaded = []
        for at, m in registers(offset, live):
            at = arith.extsi(i64, at)
            values = utils.inline_ptx(
                f"{{ .reg .pred p; setp.ne.s32 p, ${words + 1}, 0; {zero} "
                f"@p ld.global.{kind} {'{' + out + '}' if words > 1 else out}, [${words}]; }}",
                arith.addi(source, at), m, result_types=(taken,) * words, has_side_effects=True,
            )  # fmt: skip
            loaded.append((at, m, values))
        for at, m, values in loaded:
            arguments = ", ".join(f"${i + 1}" for i in range(words))
            utils.inline_ptx(
                f"st.global.{kind} [$0], {'{' + arguments + '}' if words > 1 else arguments};",
                arith.addi(target, at), *values, predicate=_is_live(m), has_side_effects=True,
            )  # fmt: skip

    copy(ref, splat(source), splat(target), offset, live)


def _across_warps(value: ir.Value, holder: int, sums: ir.Value, warps: int) -> tuple[ir.Value, ir.Value]:
    """Sum over the warps before this one, and over all `warps` of the block, of what lane `holder` of each has."""
    i32, index = _i32(), ir.IndexType.get()
    one = ir.VectorType.get((1,), i32)
    thread = arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x))
    warp = arith.shrui(thread, utils.c(5, i32))
    lane = arith.andi(thread, utils.c(31, i32))
    with utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, utils.c(holder, i32))):
        vector.store(vector.broadcast(one, value), sums, [arith.index_cast(index, warp)])
    gpu.barrier()
    # Every warp sums the warps' values: lane l takes warp l.
    own = arith.minui(lane, utils.c(warps - 1, i32))
    count = _element(vector.load(one, sums, [arith.index_cast(index, own)]))
    in_use = arith.cmpi(arith.CmpIPredicate.ult, lane, utils.c(warps, i32))
    count = arith.select(in_use, count, utils.c(0, i32))
    earlier = arith.select(arith.cmpi(arith.CmpIPredicate.ult, lane, warp), count, utils.c(0, i32))
    return _warp_sum(earlier), _warp_sum(count)


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _base(ref: ir.Value) -> ir.Value:
    return llvm.ptrtoint(_i64(), utils.memref_ptr(ref))


def _address(base: ir.Value, index: ir.Value, element_bytes: int) -> ir.Value:
    return arith.addi(base, arith.muli(arith.extsi(_i64(), index), utils.c(element_bytes, _i64())))


def _element(register: ir.Value) -> ir.Value:
    return vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))


def registers(*vectors: mgpu.FragmentedArray) -> list[tuple[ir.Value, ...]]:
    """For each register, the element of every vector."""
    return [tuple(map(_element, rs)) for rs in zip(*(v.registers.flat for v in vectors), strict=True)]


def _vector_like(like: mgpu.FragmentedArray, elements: Sequence[ir.Value]) -> mgpu.FragmentedArray:
    registers = np.empty_like(like.registers)
    for i, element in enumerate(elements):
        registers.flat[i] = vector.broadcast(ir.VectorType.get((1,), _i32()), element)
    return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=True)


def _is_live(element: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.ne, element, utils.c(0, _i32()))


def _warp_sum(x: ir.Value) -> ir.Value:
    full = utils.c(-1, _i32())
    return utils.redux(x, full, utils.ReductionKind.ADD)


def _load(ref, index: jax.Array, instruction: str) -> jax.Array:
    layout = lanes(index.shape[0])
    result = plgpu.ShapeDtypeStruct(index.shape, jnp.int32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout), return_type=result)
    def read(_, ref, index):
        base = _base(ref)
        return _vector_like(
            index,
            [
                utils.inline_ptx(
                    f"{instruction} $0, [$1];",
                    _address(base, i, 4),
                    result_types=_i32(),
                    has_side_effects=True,
                )
                for (i,) in registers(index)
            ],
        )

    return read(ref, index)


def _write(
    ref, index: jax.Array, value: jax.Array, live: jax.Array, instruction: str, element_bytes: int = 4
) -> None:
    layout = lanes(index.shape[0])

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout, layout))
    def write(_, ref, index, value, live):
        base = _base(ref)
        for i, v, m in registers(index, value, live):
            utils.inline_ptx(
                f"{instruction} [$0], $1;",
                _address(base, i, element_bytes),
                v,
                predicate=_is_live(m),
                has_side_effects=True,
            )

    write(ref, index, value, live)
