"""Merge of the parts of few rows: each has so many parts that a few blocks would read them for long.

A block merges 16 of V's columns of 8 queries: a quarter of a line of each part (`mosaic_parts`), 256 bytes, one warp's of those
that wrote it, with its scale. Here each warp reads such quarters of every fourth part, where a lane finds what it would hold in the WGMMA
layout, all or most of them at once; then the four sums meet in shared memory. It is in PTX, because a kernel this short
waits for its own instructions, and these are few.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.mla_decode import mosaic_signals

MOST_ROWS = 4
COLUMNS, QUERIES = 16, 8  # of a block
_WARPS = 4
_MOST_TOGETHER = 33  # parts of a warp: for more there are no registers
_QUARTER = 2 * COLUMNS * QUERIES  # bytes
_SCALES = 4 * 8  # bytes, of a part

# What a warp leaves in shared memory, in f32: sums by query, then maxima, then sums of weights.
_PITCH = 20  # from query to query, so that the lanes of a warp meet all banks
_PEAKS = QUERIES * _PITCH
_TOTALS = _PEAKS + QUERIES
_SHARE = _TOTALS + QUERIES

_SCALAR = plgpu.Layout.WG_SPLAT(())


def merge(
    out, lse, part, part_lse, leads, scales, *, queries: int, groups: int, columns: int, q_tiles: int, paired: bool
):  # fmt: skip
    """As `mosaic_parts.merge`, of up to `MOST_ROWS` rows; the parts are there when the decode kernel has ended."""
    rows, v_width = out.shape[0] // queries, out.shape[1]
    together = parts_together(rows, groups)

    def kernel(part_ref, part_lse_ref, lead_ref, scales_ref, out_ref, lse_ref, sums_smem):
        lead, block, tile = (lax.axis_index(name) for name in ("lead", "block", "tile"))
        plgpu.griddepcontrol_wait()
        row, group, last = mosaic_signals.read_lead(lead_ref, lead)
        count = last - group + 1

        @pl.when((row >= 0) & (count > 0))
        def run():
            add_parts(
                part_ref, scales_ref, part_lse_ref, sums_smem, group, count, block, tile,
                columns=columns, q_tiles=q_tiles, v_width=v_width, groups=groups, together=together,
            )  # fmt: skip
            combine(
                sums_smem, out_ref, lse_ref, row, block, tile, queries=queries, v_width=v_width, paired=paired
            )

    out_box, lse_box = jax.new_ref(out), jax.new_ref(lse)
    plgpu.kernel(
        kernel,
        out_type=[],
        grid=(leads.shape[0], v_width // COLUMNS, -(-queries // QUERIES)),
        grid_names=("lead", "block", "tile"),
        num_threads=1,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((_WARPS * _SHARE,), jnp.float32)],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
    )(part, part_lse, leads, scales, out_box, lse_box)
    return jax.freeze(out_box), jax.freeze(lse_box)


def parts_together(rows: int, groups: int) -> int:
    """Parts that a warp loads together: what it has of rows of one length. A longer row takes some trips."""
    return max(min(-(-(groups // rows) // _WARPS), _MOST_TOGETHER), 1)


def add_parts(
    part_ref, scales_ref, part_lse_ref, sums_smem, group, count, block, tile, *,
    columns: int, q_tiles: int, v_width: int, groups: int, together: int,
) -> None:  # fmt: skip
    """Leaves in `sums_smem` what each warp's parts come to, and waits until all warps have.

    The row's `count` parts are slot ``groups + group`` and the slots behind `group`.
    """
    text = _add_text(columns=columns, q_tiles=q_tiles, v_width=v_width, groups=groups, together=together)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 4 + (_SCALAR,) * 4, return_type=None)
    def add(_, part_ref, scales_ref, part_lse_ref, sums_smem, *scalars):
        utils.inline_ptx(
            text, _address(part_ref, 64), _address(scales_ref, 64), _address(part_lse_ref, 64), _address(sums_smem, 32),
            *(x.registers.item() for x in scalars), has_side_effects=True, convergent=True,
        )  # fmt: skip

    add(part_ref, scales_ref, part_lse_ref, sums_smem, *(jnp.int32(x) for x in (group, count, block, tile)))


def combine(
    sums_smem, out_ref, lse_ref, row, block, tile, *, queries: int, v_width: int, paired: bool
) -> None:
    """Stores what the warps' sums come to, and lse if `block` is 0."""
    text = _combine_text(queries, v_width, paired)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3 + (_SCALAR,) * 3, return_type=None)
    def store(_, sums_smem, out_ref, lse_ref, *scalars):
        utils.inline_ptx(
            text, _address(sums_smem, 32), _address(out_ref, 64), _address(lse_ref, 64),
            *(x.registers.item() for x in scalars), has_side_effects=True, convergent=True,
        )  # fmt: skip

    store(sums_smem, out_ref, lse_ref, *(jnp.int32(x) for x in (row, block, tile)))


# A lane of a warp has two queries q, 2 * (lane % 4) and the next, of two columns c, lane / 4 and 8 further. In the names of
# registers: s is at 2 * c + q; of part j, both queries of a column are in one h, and f is its scale.
_QUERY = (0, 1)
_VALUE = (0, 1, 2, 3)


def _add_text(*, columns: int, q_tiles: int, v_width: int, groups: int, together: int) -> str:
    """PTX of `add_parts`, for a thread."""
    part_queries = columns * q_tiles
    slot_bytes, lse_bytes, tiles = 2 * part_queries * v_width, 4 * part_queries, part_queries // QUERIES
    slot_scales = q_tiles * _SCALES
    assert q_tiles == 1 or columns == 4 * QUERIES  # what a shift divides by
    of_q_tile = f" shr.u32 x, {{tile}}, 2; mad.lo.u32 slot, x, {_SCALES // 4}, slot;" if q_tiles > 1 else ""
    parts, scales, logs, sums, group, count, block, tile = (f"${i}" for i in range(8))
    js = range(together)
    pairs = [[f"h{j}_{c}" for c in range(2)] for j in js]  # of queries, two f16 a register
    lses = [[f"l{j}_{q}" for q in _QUERY] for j in js]
    text = [
        "{ .reg .pred end, is; .reg .b32 part, left, lane, slot, x, share; .reg .b16 low, high;"
        " .reg .b64 mine, my_scale, my_lse, at, at_scale, at_lse, to, to_scale, to_lse;",
        f" .reg .b32 {', '.join(name for names in pairs for name in names)};",
        f" .reg .f32 {', '.join(name for names in lses for name in names)}, {', '.join(f'f{j}' for j in js)};",
        " .reg .f32 s0, s1, s2, s3, v0, v1, peak0, peak1, total0, total1, new0, new1, decay0, decay1, w0, w1;",
        *(f" mov.f32 s{i}, 0f00000000;" for i in _VALUE),
        *(f" mov.f32 peak{q}, 0fF149F2CA; mov.f32 total{q}, 0f00000000;" for q in _QUERY),  # -1e30
        # The first part of a warp is that of its own number.
        f" mov.u32 x, %tid.x; shr.u32 part, x, 5; and.b32 lane, x, 31; mad.lo.u32 share, part, {4 * _SHARE}, {sums};",
        # In slot 0: the quarter block % 4 of line (block / 4) * tiles + tile, its scale, and the lse of the lane's queries.
        f" shr.u32 x, {block}, 2; mad.lo.u32 x, x, {tiles}, {tile}; and.b32 slot, {block}, 3; mad.lo.u32 x, x, 4, slot;"
        f" mul.lo.u32 x, x, {_QUARTER}; mad.lo.u32 x, lane, 8, x; cvt.u64.u32 mine, x; add.u64 mine, mine, {parts};",
        f" setp.ge.u32 is, {block}, {v_width // COLUMNS // 2}; @is add.u32 slot, slot, 4;{of_q_tile.format(tile=tile)}"
        " mul.wide.u32 my_scale, slot, 4;"
        f" add.u64 my_scale, my_scale, {scales};",
        f" and.b32 x, lane, 3; mad.lo.u32 x, {tile}, {QUERIES // 2}, x; mul.wide.u32 my_lse, x, 8;"
        f" add.u64 my_lse, my_lse, {logs};",
        f' NEXT: .pragma "nounroll"; setp.ge.s32 end, part, {count}; @end bra END;',
        f" add.u32 slot, {group}, part; mad.wide.u32 at, slot, {slot_bytes}, mine; mad.wide.u32 at_scale, slot, {slot_scales}, my_scale;"
        f" mad.wide.u32 at_lse, slot, {lse_bytes}, my_lse; sub.s32 left, {count}, part;",
        # Only the first part of a row lies elsewhere.
        f" setp.eq.u32 is, part, 0; add.u32 slot, slot, {groups}; mov.b64 to, at; mov.b64 to_scale, at_scale;"
        f" mov.b64 to_lse, at_lse; @is mad.wide.u32 to, slot, {slot_bytes}, mine;"
        f" @is mad.wide.u32 to_scale, slot, {slot_scales}, my_scale; @is mad.wide.u32 to_lse, slot, {lse_bytes}, my_lse;",
    ]
    for j in js:  # a part that there isn't weighs nothing
        text += [f" mov.b32 {x}, 0;" for x in pairs[j]]
        text += [f" mov.f32 f{j}, 0f00000000;", *(f" mov.f32 {x}, 0fFF800000;" for x in lses[j])]  # -inf
        base, base_scale, base_lse = ("at", "at_scale", "at_lse") if j else ("to", "to_scale", "to_lse")
        text.append(
            f" setp.gt.s32 is, left, {_WARPS * j};"
            f" @is ld.global.v2.f32 {{{', '.join(lses[j])}}}, [{base_lse}+{_WARPS * j * lse_bytes}];"
            f" @is ld.global.f32 f{j}, [{base_scale}+{_WARPS * j * slot_scales}];"
            f" @is ld.global.v2.b32 {{{', '.join(pairs[j])}}}, [{base}+{_WARPS * j * slot_bytes}];"
        )
    for q in _QUERY:
        text.append(f" mov.f32 new{q}, peak{q};")
        text += [f" max.f32 new{q}, new{q}, {lses[j][q]};" for j in js]
        text.append(
            f" sub.f32 decay{q}, peak{q}, new{q}; ex2.approx.ftz.f32 decay{q}, decay{q}; mov.f32 peak{q}, new{q};"
            f" mul.f32 total{q}, total{q}, decay{q};"
        )
        text += [f" mul.f32 s{i}, s{i}, decay{q};" for i in (q, q + 2)]
    for j in js:
        for q in _QUERY:
            text.append(
                f" sub.f32 w{q}, {lses[j][q]}, new{q}; ex2.approx.ftz.f32 w{q}, w{q}; add.f32 total{q}, total{q}, w{q};"
                f" mul.f32 w{q}, w{q}, f{j};"
            )
        for c, pair in enumerate(pairs[j]):
            text.append(f" mov.b32 {{low, high}}, {pair}; cvt.f32.f16 v0, low; cvt.f32.f16 v1, high;")
            text += [f" fma.rn.f32 s{2 * c + q}, v{q}, w{q}, s{2 * c + q};" for q in _QUERY]
    text += [
        f" add.u32 part, part, {_WARPS * together}; bra NEXT;",
        f" END: and.b32 x, lane, 3; shr.u32 slot, lane, 2; mad.lo.u32 slot, x, {2 * _PITCH}, slot;"
        " mad.lo.u32 slot, slot, 4, share;",
        *(f" st.shared.f32 [slot+{4 * (i % 2 * _PITCH + i // 2 * 8)}], s{i};" for i in _VALUE),
        " setp.lt.u32 is, lane, 4; mad.lo.u32 slot, x, 8, share;",
        f" @is st.shared.v2.f32 [slot+{4 * _PEAKS}], {{peak0, peak1}};"
        f" @is st.shared.v2.f32 [slot+{4 * _TOTALS}], {{total0, total1}};",
        " bar.sync 0; }",
    ]
    return "".join(text)


def _combine_text(queries: int, v_width: int, paired: bool) -> str:
    """PTX of `combine`, for a thread."""
    sums, out, lse, row, block, tile = (f"${i}" for i in range(6))
    shares = [4 * _SHARE * w for w in range(_WARPS)]
    text = [
        "{ .reg .pred is, here; .reg .b32 t, query, pair, stats, values, line, word, of; .reg .b64 to;"
        " .reg .f32 peak, total, s0, s1, p, x, y;",
        # A thread has two neighbouring columns of a query. Where rows are paired, they lie 8 apart in the sums.
        " mov.u32 t, %tid.x; setp.ge.u32 is, t, 64; @is bra END; shr.u32 query, t, 3; and.b32 pair, t, 7;",
        f" mad.lo.u32 stats, query, 4, {sums}; mad.lo.u32 values, query, {4 * _PITCH}, {sums};"
        f" mad.lo.u32 values, pair, {4 if paired else 8}, values;",
        " mov.f32 peak, 0fF149F2CA; mov.f32 total, 0f00000000; mov.f32 s0, total; mov.f32 s1, total;",  # -1e30
    ]
    text += [f" ld.shared.f32 p, [stats+{at + 4 * _PEAKS}]; max.f32 peak, peak, p;" for at in shares]
    text += [
        f" ld.shared.f32 p, [stats+{at + 4 * _PEAKS}]; sub.f32 p, p, peak; ex2.approx.ftz.f32 p, p;"
        f" ld.shared.f32 x, [stats+{at + 4 * _TOTALS}]; fma.rn.f32 total, x, p, total;"
        + (
            f" ld.shared.f32 x, [values+{at}]; ld.shared.f32 y, [values+{at + 32}];"
            if paired
            else f" ld.shared.v2.f32 {{x, y}}, [values+{at}];"
        )
        + " fma.rn.f32 s0, x, p, s0; fma.rn.f32 s1, y, p, s1;"
        for at in shares
    ]
    of_half = v_width // 64 // 2  # blocks of 64 columns
    if paired:  # the first of both columns, halved
        place = (
            f" shr.u32 of, {block}, 2; shr.u32 t, of, {of_half.bit_length() - 1}; mul.lo.u32 t, t, {v_width // 4};"
            f" and.b32 of, of, {of_half - 1}; add.u32 t, t, of; and.b32 of, {block}, 3; mad.lo.u32 t, of, {8 * of_half}, t;"
            f" mad.lo.u32 t, pair, {of_half}, t;"
        )
    else:
        place = f" mad.lo.u32 t, {block}, {COLUMNS // 2}, pair;"
    # Queries of the last eight that there are not are not stored.
    some = f" setp.lt.u32 here, line, {queries};" if queries % QUERIES else ""
    last = " selp.u32 t, t, 1, here;" if some else ""
    text += [
        # A query that saw nothing has zeros and an lse of inf.
        " setp.gt.f32 is, total, 0f00000000; selp.f32 x, total, 0f3F800000, is; rcp.approx.ftz.f32 y, x;"
        " mul.f32 s0, s0, y; mul.f32 s1, s1, y; cvt.rn.bf16x2.f32 word, s1, s0;",
        f" mad.lo.u32 line, {tile}, {QUERIES}, query;{some} mad.lo.u32 line, {row}, {queries}, line;",
        place,
        f" mad.wide.u32 to, line, {2 * v_width}, {out}; mad.wide.u32 to, t, 4, to;"
        f" {'@here ' if some else ''}st.global.b32 [to], word;{last}",
        # From base 2, by log 2; one thread of a query stores it.
        " lg2.approx.ftz.f32 y, x; add.f32 y, y, peak; mul.f32 y, y, 0f3F317218; selp.f32 y, y, 0f7F800000, is;",
        f" mad.wide.u32 to, line, 4, {lse}; setp.eq.u32 is, t, 0; @is st.global.f32 [to], y;",
        " END: }",
    ]
    return "".join(text)


def _address(ref, bits: int):
    return llvm.ptrtoint(ir.IntegerType.get_signless(bits), utils.memref_ptr(ref))
