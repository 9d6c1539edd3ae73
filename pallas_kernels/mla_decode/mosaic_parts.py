"""Parts of cut rows as the registers that hold them: how O^T of a part is left, heads being columns, and the merge of such parts.

A part lies in lines of 512 f16, a line for 64 of V's columns and 8 queries, in which each thread of a warpgroup has four
neighbours: what it holds of them in the WGMMA layout. So a part is written by whole cache lines straight from registers and
read back into the same ones, and nothing is exchanged or waited for in the decode kernel. Of what a warp leaves the largest
element is scaled to [2^14, 2^15) by a power of two: f16 has 11 bits, so that rounding a part adds an eighth of what rounding the
result to bf16 does, and it takes half of the time that f32 would.

Row r of O^T's block c is column ``64 c + r`` of V, or, where rows are `paired`, what `mosaic_fp8_registers` says: with n blocks
of a half of V, rows ``16 w + g`` and ``16 w + g + 8`` of its block b are columns ``16 n w + 2 n g + 2 b`` and the next of that half.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, BFloat16, Float16, Float32, Int32

from pallas_kernels.mla_decode import mosaic_signals, mosaic_spread
from pallas_kernels.mla_decode.mosaic_columns import ACC, COLUMNS, down, full
from pallas_kernels.mla_decode.mosaic_fp8_registers import store_vector

_SCALAR = plgpu.Layout.WG_SPLAT(())
_BLOCK, _QUERIES = 64, 8  # of V's columns and of queries, in a line
_LINE = _BLOCK * _QUERIES
_HALVES, _WARPS = 2, 4  # of V, of a warpgroup
_TILED = (plgpu.TilingTransform((8, _BLOCK)), plgpu.SwizzleTransform(128))


def part_type(slots: int, queries: int, v_width: int) -> jax.ShapeDtypeStruct:
    """The array for parts of `queries` queries, a multiple of 8, in `slots` slots."""
    return jax.ShapeDtypeStruct((slots * queries * v_width // _LINE, _LINE), jnp.float16)


def scales_type(parts: int) -> jax.ShapeDtypeStruct:
    """The array for what the elements that a warp has left of a part are multiplied by, see `first_scale`."""
    return jax.ShapeDtypeStruct((parts * _HALVES * _WARPS,), jnp.float32)


def line_of(slot, block, queries: int, v_width: int):
    """First line of the `block`-th 64 columns of the part in `slot`."""
    return (slot * (v_width // _BLOCK) + block) * (queries // _QUERIES)


def merged_early(rows: int) -> bool:
    """Whether parts are told of (`mosaic_signals`) and merged when a row's are there, or all when the decode kernel has ended."""
    return rows > mosaic_spread.MOST_ROWS


def first_scale(part, half):
    """Where the scales of a half of V of a part begin, one for each of four warps. Each query tile of a slot is a part."""
    return (part * _HALVES + half) * _WARPS


def leave(blocks, ref, line, scales_ref, scale, pitch: int, queries: int) -> None:
    """Writes O^T, f32 arrays [64, n] in the WGMMA layout for a half of V, to ``ref[line:]``, its scales to ``scales_ref[scale:]``.

    It writes the first `queries` of n, a multiple of 8; a slot has `pitch` in all, of one query tile or of several.
    Elements below 2^-28 of the largest that the warp has lose bits. With an infinity among them the scale is 1, and what is
    above 65504 becomes infinite too.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _SCALAR, plgpu.RefType(), _SCALAR, *[ACC] * len(blocks)), return_type=None
    )
    def store(_, ref, line, scales_ref, scale, *blocks):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        lines = []  # what a thread has of each, in order
        for block in blocks:
            of = {
                place: block.registers[index]
                for index, place in _places(block.layout, block.registers.shape, block.shape[1])
            }
            lines += [
                [llvm.extractelement(of[half, query], _const(e)) for half in (0, 8) for e in range(2)]
                for query in range(0, queries, _QUERIES)
            ]
        larger = lambda a, b: utils.inline_ptx(
            "{ .reg .f32 a, b; abs.f32 a, $1; abs.f32 b, $2; max.f32 $0, a, b; }", a, b, result_types=f32
        )
        tops = [larger(*values[j : j + 2]) for values in lines for j in (0, 2)]
        while len(tops) > 1:
            pairs = [tops[j : j + 2] for j in range(0, len(tops), 2)]
            tops = [arith.maxnumf(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
        top = utils.inline_ptx(
            "redux.sync.max.u32 $0, $1, 0xffffffff;", llvm.bitcast(i32, tops[0]),
            result_types=i32, has_side_effects=True, convergent=True,
        )  # fmt: skip
        # Exponents with their bias of 127: the factor brings the largest element's to 14, and neither it nor its inverse, which is
        # stored, may leave the normal numbers.
        exponent = arith.minui(
            arith.subi(_const(2 * 127 + 14), arith.shrui(top, _const(23))), _const(2 * 127 - 1)
        )
        # An infinity is as large in any scale: it must not take the others' bits.
        finite = arith.cmpi(arith.CmpIPredicate.ult, top, _const(0xFF << 23))
        exponent = arith.select(finite, exponent, _const(127))
        power = lambda exponent: llvm.bitcast(f32, arith.shli(exponent, _const(23)))
        factor, inverse = power(exponent), power(arith.subi(_const(2 * 127), exponent))
        at = _address(ref, line)
        for i, values in enumerate(lines):
            scaled = [arith.mulf(value, factor) for value in values]
            pairs = [
                utils.inline_ptx("cvt.rn.f16x2.f32 $0, $2, $1;", *scaled[j : j + 2], result_types=i32)
                for j in (0, 2)
            ]
            block, group = divmod(i, queries // _QUERIES)
            ahead = block * (pitch // _QUERIES) + group
            utils.inline_ptx(
                f"st.global.v2.b32 [$0+{2 * _LINE * ahead}], {{$1, $2}};", at, *pairs, has_side_effects=True
            )
        utils.inline_ptx(
            "{ .reg .pred one; .reg .b32 lane; and.b32 lane, $1, 31; setp.eq.u32 one, lane, 0; @one st.global.f32 [$0], $2; }",
            _scale_address(scales_ref, scale), _thread(), inverse, has_side_effects=True,
        )  # fmt: skip

    store(ref, jnp.int32(line), scales_ref, jnp.int32(scale), *blocks)


def fetch(ref, scales_ref, lse_ref, line, scale, first, queries: int):
    """What `leave` has left in ``ref[line:]``, f32 [64, queries] in the WGMMA layout, and ``lse_ref[first : first + queries]``."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),) * 3 + (_SCALAR,) * 3,
        return_type=(
            plgpu.ShapeDtypeStruct((_BLOCK, queries), jnp.float32, layout=ACC),
            plgpu.ShapeDtypeStruct((queries,), jnp.float32, layout=COLUMNS),
        ),
    )
    def load(_, ref, scales_ref, lse_ref, line, scale, first):
        f32, i32, i64 = ir.F32Type.get(), *(ir.IntegerType.get_signless(bits) for bits in (32, 64))
        groups = range(queries // _QUERIES)
        mine = arith.addi(first.registers.item(), arith.shli(arith.andi(_thread(), _const(3)), _const(1)))
        base = llvm.ptrtoint(i64, utils.memref_ptr(lse_ref))
        at_lse = arith.addi(base, arith.muli(arith.extsi(i64, mine), _const(4, i64)))
        read = lambda of, at, offset: utils.inline_ptx(
            f"ld.global.v2.b32 {{$0, $1}}, [$2+{offset}];", at, result_types=[of] * 2, has_side_effects=True
        )
        at = _address(ref, line)
        logs = [read(f32, at_lse, 4 * _QUERIES * j) for j in groups]
        pairs = [read(i32, at, 2 * _LINE * j) for j in groups]
        factor = utils.inline_ptx(
            "ld.global.f32 $0, [$1];",
            _scale_address(scales_ref, scale),
            result_types=f32,
            has_side_effects=True,
        )
        widen = lambda pair: utils.inline_ptx(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
            pair,
            result_types=[f32] * 2,
        )
        words = [[arith.mulf(x, factor) for pair in line for x in widen(pair)] for line in pairs]

        layout, columns = ACC.to_mgpu(), COLUMNS.to_mgpu()
        registers = np.empty(layout.registers_shape((_BLOCK, queries)), dtype=object)
        for index, (half, query) in _places(layout, registers.shape, queries):
            registers[index] = _pair(*words[query // _QUERIES][half // 4 : half // 4 + 2])
        of_lse = np.empty(columns.registers_shape((queries,)), dtype=object)
        for pair, index in zip(logs, np.ndindex(of_lse.shape), strict=True):
            of_lse[index] = _pair(*pair)
        return (
            FragmentedArray(_registers=registers, _layout=layout, _is_signed=None),
            FragmentedArray(_registers=of_lse, _layout=columns, _is_signed=None),
        )

    return load(ref, scales_ref, lse_ref, jnp.int32(line), jnp.int32(scale), jnp.int32(first))


def store_pairs(ref, values, first, live, block) -> None:
    """Writes `paired` f32 [64, queries] in the WGMMA layout, O^T of V's `block`, to bf16 ``ref[first : first + live]``."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ACC, *[_SCALAR] * 3), return_type=None)
    def store(_, ref, values, *scalars):
        first, live, block = (x.registers.item() for x in scalars)
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        v_width = ir.MemRefType(ref.type).shape[1]
        of_half = v_width // _BLOCK // _HALVES
        lane, warp = arith.andi(_thread(), _const(31)), arith.shrui(_thread(), _const(5))
        half, b = arith.divui(block, _const(of_half)), arith.remui(block, _const(of_half))
        times = lambda x, n: arith.muli(x, _const(n))
        # Of a warp in a half, of a lane in a warp, of a block.
        column = arith.addi(times(half, v_width // _HALVES), times(warp, 16 * of_half))
        column = arith.addi(column, times(arith.shrui(lane, _const(2)), 2 * of_half))
        column = arith.addi(column, times(b, 2))
        mine = times(arith.andi(lane, _const(3)), 2)
        at = arith.muli(arith.extsi(i64, arith.addi(first, mine)), _const(2 * v_width, i64))
        at = arith.addi(at, arith.extsi(i64, times(column, 2)))
        at = arith.addi(at, llvm.ptrtoint(i64, utils.memref_ptr(ref)))
        of = {
            place: values.registers[index]
            for index, place in _places(values.layout, values.registers.shape, values.shape[1])
        }
        for query in range(0, values.shape[1], _QUERIES):
            for e in range(2):
                low, high = (llvm.extractelement(of[row, query], _const(e)) for row in (0, 8))
                word = utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", low, high, result_types=i32)
                utils.inline_ptx(
                    f"{{ .reg .pred is; setp.lt.s32 is, $1, $2; @is st.global.b32 [$0+{2 * v_width * (query + e)}], $3; }}",
                    at, arith.addi(mine, _const(query + e)), live, word, has_side_effects=True,
                )  # fmt: skip

    store(ref, values, jnp.int32(first), jnp.int32(live), jnp.int32(block))


def merge(
    out: BFloat16[Array, "rows_queries v_width"],
    lse: Float32[Array, " rows_queries"],
    part: Float16[Array, "lines 512"],
    part_lse: Float32[Array, " slots_queries"],
    leads: Int32[Array, "leads 3"],
    counts: Int32[Array, " parts"],
    scales: Float32[Array, " parts_8"],
    *,
    queries: int,
    groups: int,
    columns: int,
    q_tiles: int,
    paired: bool,
) -> tuple[Array, Array]:
    """As `mosaic_merge.merge`, of parts of type `part_type` with scales of `scales_type`.

    A part has `columns` queries of each of `q_tiles` query tiles, a multiple of 8, of which a row has the first `queries`.
    `paired`: how the rows of O^T lie; if they are not, `queries` is a multiple of 8.
    """
    v_width = out.shape[1]
    if groups == 1:
        return out, lse
    rows = out.shape[0] // queries
    if rows <= mosaic_spread.MOST_ROWS:
        return mosaic_spread.merge(
            out, lse, part, part_lse, leads, scales,
            queries=queries, groups=groups, columns=columns, q_tiles=q_tiles, paired=paired,
        )  # fmt: skip
    part_queries = columns * q_tiles
    # Few rows have many parts: little of each for a block, and many on their way together. Many rows have two parts each.
    few = rows <= groups // 4
    tile_columns, together = (_QUERIES, min(groups // rows, 16)) if few else (columns, 2)

    def kernel(part_ref, part_lse_ref, lead_ref, counts_ref, scales_ref, out_ref, lse_ref, *out_smem_if_any):
        lead, block, tile = (lax.axis_index(name) for name in ("lead", "block", "tile"))
        row, group, last = mosaic_signals.read_lead(lead_ref, lead)
        count = last - group + 1
        q_tile = lax.div(tile * tile_columns, columns) if q_tiles > 1 else 0

        def add_parts(i, carry):
            peak, total, acc = carry
            parts = []
            for a in [i * together + j for j in range(together)]:
                safe = jnp.minimum(a, count - 1)
                slot = jnp.where(safe == 0, groups + group, group + safe)
                line = line_of(slot, block, part_queries, v_width) + tile * (tile_columns // _QUERIES)
                scale = first_scale(slot * q_tiles + q_tile, lax.div(block, v_width // _BLOCK // _HALVES))
                first = slot * part_queries + tile * tile_columns
                value, log = fetch(part_ref, scales_ref, part_lse_ref, line, scale, first, tile_columns)
                parts.append((value, log + jnp.where(a < count, jnp.float32(0), -jnp.inf)))
            new_peak = peak
            for _, log in parts:
                new_peak = jnp.maximum(new_peak, log)
            decay = jnp.exp2(peak - new_peak)
            total, acc = total * decay, acc * down(decay, acc)
            for value, log in parts:
                weight = jnp.exp2(log - new_peak)
                total, acc = total + weight, acc + value * down(weight, value)
            return new_peak, total, acc

        @pl.when((row >= 0) & (count > 0))
        def run():
            mosaic_signals.wait_for_parts(
                counts_ref, group, count, groups=groups, tellers=_HALVES, tile=q_tile, tiles=q_tiles
            )
            empty = (
                full((tile_columns,), -1e30, COLUMNS),
                full((tile_columns,), 0, COLUMNS),
                full((_BLOCK, tile_columns), 0, ACC),
            )
            peak, total, acc = lax.fori_loop(0, lax.div(count + (together - 1), together), add_parts, empty)
            safe = jnp.where(total > 0, total, 1)
            result, first = acc * down(1 / safe, acc), row * queries + tile * tile_columns
            natural = jnp.where(total > 0, (peak + jnp.log2(safe)) * math.log(2), jnp.inf)
            live = (
                jnp.minimum(queries - tile * tile_columns, tile_columns)
                if queries % tile_columns
                else tile_columns
            )
            store_lse = lambda: pl.when(block == 0)(lambda: store_vector(lse_ref, natural, first, live))
            if paired:
                store_pairs(out_ref, result, first, live, block)
                store_lse()
                return
            (out_smem,) = out_smem_if_any
            out_smem.transpose((1, 0))[...] = result.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                out_smem, out_ref.at[pl.ds(first, tile_columns), pl.ds(block * _BLOCK, _BLOCK)]
            )
            store_lse()
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        # Launched while the decode kernel still runs, this one must not end before it.
        pl.when((lead == 0) & (block == 0) & (tile == 0))(plgpu.griddepcontrol_wait)

    out_box, lse_box = jax.new_ref(out), jax.new_ref(lse)
    plgpu.kernel(
        kernel,
        out_type=[],
        grid=(leads.shape[0], v_width // _BLOCK, -(-queries // tile_columns)),
        grid_names=("lead", "block", "tile"),
        num_threads=1,
        thread_name="wg",
        scratch_types=[] if paired else [plgpu.SMEM((tile_columns, _BLOCK), jnp.bfloat16, transforms=_TILED)],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
    )(part, part_lse, leads, counts, scales, out_box, lse_box)
    return jax.freeze(out_box), jax.freeze(lse_box)


def _places(layout, registers_shape, queries: int):
    """(index of a register, (its row, 0 or 8, and its first query, less what the thread adds)) of [64, queries]."""
    strides = layout.tiling.tile_strides((queries, 1))
    for index in np.ndindex(registers_shape):
        yield index, divmod(sum(i * s for i, s in zip(index, strides, strict=False)), queries)


def _thread():
    return arith.remui(utils.thread_idx(), _const(utils.WARPGROUP_SIZE))


def _address(ref, line):
    """Of this thread's four elements of a line; 64-bit."""
    i64 = ir.IntegerType.get_signless(64)
    bytes_ = arith.addi(
        arith.muli(arith.extsi(i64, line.registers.item()), _const(2 * _LINE, i64)),
        arith.extsi(i64, arith.shli(_thread(), _const(3))),
    )
    return arith.addi(llvm.ptrtoint(i64, utils.memref_ptr(ref)), bytes_)


def _scale_address(ref, scale):
    """Of this thread's warp's scale; 64-bit."""
    i64 = ir.IntegerType.get_signless(64)
    at = arith.addi(scale.registers.item(), arith.shrui(_thread(), _const(5)))
    return arith.addi(
        llvm.ptrtoint(i64, utils.memref_ptr(ref)), arith.muli(arith.extsi(i64, at), _const(4, i64))
    )


def _pair(first, second):
    pair = llvm.mlir_undef(ir.VectorType.get((2,), ir.F32Type.get()))
    for i, value in enumerate((first, second)):
        pair = llvm.insertelement(pair, value, _const(i))
    return pair


def _const(value: int, ty=None):
    ty = ir.IntegerType.get_signless(32) if ty is None else ty
    return arith.constant(ty, ir.IntegerAttr.get(ty, value))
