"""What one warp does with e4m3 K and V rows of one KV head: warp-level MMA, rows converted in registers.

A warp takes 32 or 64 rows of a tile that TMA brought (bytes under the 128-byte swizzle) and up to 16 query lines. Neither the
order of summed columns nor that of tokens matters to a product, so both are chosen for reads of 16 bytes without bank
conflicts and for conversions of neighbouring bytes:

* S = Q K^T. Thread (g, q) of a warp, g = lane // 4 and q = lane % 4, holds token ``token_of(g)`` of each 8. Of each 64 columns
  it reads 16 q to 16 q + 15; word i of these is its part of the i-th product, so Q's fragments are 4 neighbouring columns.
* O = P V. A thread's scores belong to the tokens ``token_of(2 q)`` and ``token_of(2 q + 1)`` of each 8, and it reads V of
  just these: of each 128 columns 16 g to 16 g + 15, bytes of two tokens paired. Column n of product j is 16 n + j, so at the
  end a thread holds 32 neighbouring columns of a line.

Everything goes through `OPS`, a table of what a thread can do, so that a test on a CPU can put arrays of 32 lanes in its place.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf

_LINE = 128  # bytes of a line of a swizzled box
_BOX = 8 * _LINE
_SLACK = 8.0  # a weight stays below 2**8 ...
LIFT = 6.0  # ... times 2**6: in f16, weights vanish below 2**-25
MASKED = -1e30  # below every score, and finite: a difference of two of them is 0, not NaN
_MIN_SCALE = float(np.finfo(np.float32).tiny)  # no written scale is smaller
_LOG2E = math.log2(math.e)


class _Mlir:
    """Scalars of one thread as MLIR values: i32, f32 and i1."""

    def i(self, value: int):
        return arith.constant(_i32(), ir.IntegerAttr.get(_i32(), value))

    def f(self, value: float):
        return arith.constant(_f32(), ir.FloatAttr.get(_f32(), value))

    add, sub, mul = (staticmethod(op) for op in (arith.addi, arith.subi, arith.muli))
    land, lor, xor = (staticmethod(op) for op in (arith.andi, arith.ori, arith.xori))
    shl, shr, div, rem = (staticmethod(op) for op in (arith.shli, arith.shrui, arith.divui, arith.remui))
    fadd, fsub, fmul, fmax = (staticmethod(op) for op in (arith.addf, arith.subf, arith.mulf, arith.maximumf))
    imax, imin = staticmethod(arith.maxsi), staticmethod(arith.minsi)
    select = staticmethod(arith.select)

    def less(self, a, b):
        return arith.cmpi(arith.CmpIPredicate.slt, a, b)

    def above(self, a, b):
        return arith.cmpf(arith.CmpFPredicate.OGT, a, b)

    def at_least(self, a, b):
        return arith.cmpf(arith.CmpFPredicate.OGE, a, b)

    def bits(self, x):
        return arith.bitcast(_i32(), x)

    def number(self, x):
        return arith.bitcast(_f32(), x)

    def exp2(self, x):
        return utils.inline_ptx("ex2.approx.ftz.f32 $0, $1;", x, result_types=_f32())

    def log2(self, x):
        return utils.inline_ptx("lg2.approx.f32 $0, $1;", x, result_types=_f32())

    def inverse(self, x):
        return utils.inline_ptx("rcp.approx.f32 $0, $1;", x, result_types=_f32())

    def shuffle(self, x, distance: int):
        return utils.shfl_bfly(x, distance)

    def any(self, x):
        return nvvm.vote_sync(self.i(-1), x, nvvm.VoteSyncKind.any)

    def thread(self):
        return arith.remui(utils.thread_idx(), self.i(utils.WARPGROUP_SIZE))

    def when(self, condition, change: Callable[[list], list], values: list) -> list:
        """change(values) where the warp's condition holds, else values."""
        branch = scf.IfOp(condition, [v.type for v in values], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scf.yield_(change(values))
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(values)
        return list(branch.results)

    def shared(self, address, offset: int, words: int) -> list:
        """Words of shared memory."""
        names = [f"${i}" for i in range(words)]
        target = names[0] if words == 1 else "{" + ", ".join(names) + "}"
        kind = "b32" if words == 1 else f"v{words}.b32"
        loaded = utils.inline_ptx(
            f"ld.shared.{kind} {target}, [${words}+{offset}];",
            address, result_types=_i32() if words == 1 else [_i32()] * words, has_side_effects=True,
        )  # fmt: skip
        return [loaded] if words == 1 else list(loaded)

    def halves(self, word) -> list:
        """Four e4m3 bytes as two pairs of f16, the lower bytes first."""
        return list(
            utils.inline_ptx(
                "{ .reg .b16 low, high; mov.b32 {low, high}, $2;"
                " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
                word, result_types=[_i32(), _i32()],
            )
        )  # fmt: skip

    def permute(self, x, y, selector: int):
        return utils.inline_ptx(f"prmt.b32 $0, $1, $2, {selector};", x, y, result_types=_i32())

    def pack(self, low, high):
        """Two f32 rounded to a pair of f16."""
        return utils.inline_ptx("cvt.rn.f16x2.f32 $0, $2, $1;", low, high, result_types=_i32())

    def mma(self, c: Sequence, a: Sequence, b: Sequence) -> list:
        """c + a b for one m16n8k16 of f16, by PTX's fragments."""
        names = lambda first, count: "{" + ", ".join(f"${first + i}" for i in range(count)) + "}"
        result = llvm.inline_asm(
            llvm.StructType.get_literal([_f32()] * 4),
            [*a, *b, *c],
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            f"{names(0, 4)}, {names(4, 4)}, {names(8, 2)}, {names(10, 4)};",
            ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4),
            has_side_effects=False,
        )
        return [llvm.extractvalue(_f32(), result, [i]) for i in range(4)]


OPS: Any = _Mlir()


def token_of(c: int) -> int:
    """Which of 8 tokens column c of a product is: neighbours in c lie in different halves of the banks."""
    return c ^ ((c & 1) << 2)


@dataclass(frozen=True)
class Warp:
    """Static numbers. `heads`: KV heads of the tile; `sharing`: warps of a head, each with `tokens` rows of its own.

    lines: 8 or 16 query lines, the last of which may be padding. k_width, v_width: of a head, multiples of 64.
    scale_heads: KV heads of a row of scales.
    """

    heads: int
    sharing: int
    tokens: int
    lines: int
    queries_a_head: int  # query heads that share a KV head
    k_width: int
    v_width: int
    scale_heads: int
    s_q: int
    sm_scale: float
    window: int | None
    logit_cap: float | None

    @property
    def halves(self) -> int:
        """Lines of a thread: g, and g + 8."""
        return self.lines // 8

    @property
    def k_steps(self) -> int:
        return self.k_width // 16

    @property
    def q_words(self) -> int:
        return 2 * self.halves * self.k_steps

    @property
    def sums(self) -> int:
        """Elements of O that a thread holds."""
        return 2 * self.halves * (self.v_width // 8)

    @property
    def v_groups(self) -> list[tuple[int, int]]:
        """(first column, width) of the parts of V's columns: 128 each, the last may be 64."""
        return [(c, min(128, self.v_width - c)) for c in range(0, self.v_width, 128)]

    def place(self, warpgroup):
        """(g, q, head of the tile, first row of this warp in the tile) of a thread."""
        thread = OPS.thread()
        lane = OPS.land(thread, OPS.i(31))
        warp = OPS.add(OPS.shl(warpgroup, OPS.i(2)), OPS.shr(thread, OPS.i(5)))
        head, part = OPS.div(warp, OPS.i(self.sharing)), OPS.rem(warp, OPS.i(self.sharing))
        return (
            OPS.shr(lane, OPS.i(2)),
            OPS.land(lane, OPS.i(3)),
            head,
            OPS.mul(part, OPS.i(self.tokens)),
        )

    def queries(self, words: list[list]) -> tuple[list, list]:
        """(fragments of Q in f16, what makes a base-2 exponent of a product) from bf16 pairs.

        words: for each of the thread's lines, 8 for each 64 columns: its 16 columns of them, in order. A line is first
        multiplied by a power of two that takes its largest element to [1, 2).
        """
        scaled, units = [], []
        for line in words:
            numbers = [
                (
                    OPS.number(OPS.shl(word, OPS.i(16))),
                    OPS.number(OPS.land(word, OPS.i(-65536))),
                )
                for word in line
            ]
            size = OPS.i(0)
            for pair in numbers:
                for x in pair:
                    size = OPS.imax(size, OPS.land(OPS.bits(x), OPS.i(0x7FFFFFFF)))
            for distance in (1, 2):
                size = OPS.imax(size, OPS.shuffle(size, distance))
            # Zero, the smallest and what is not finite stay as they are, near enough.
            exponent = OPS.imin(OPS.imax(OPS.shr(size, OPS.i(23)), OPS.i(1)), OPS.i(253))
            power = OPS.number(OPS.shl(OPS.sub(OPS.i(254), exponent), OPS.i(23)))
            unit = OPS.number(OPS.shl(exponent, OPS.i(23)))
            units.append(OPS.fmul(unit, OPS.f(self.sm_scale * _LOG2E)))
            scaled.append([OPS.pack(OPS.fmul(low, power), OPS.fmul(high, power)) for low, high in numbers])
        fragments = [
            line[2 * step + half] for step in range(self.k_steps) for half in range(2) for line in scaled
        ]
        return fragments, units

    @staticmethod
    def _address(base, row, byte):
        """Of a byte of a row within 8 rows of a tile; a run of 16 aligned bytes stays together."""
        box, inside = OPS.shr(byte, OPS.i(7)), OPS.land(byte, OPS.i(_LINE - 1))
        chunk = OPS.xor(OPS.shr(inside, OPS.i(4)), row)
        address = OPS.add(OPS.mul(box, OPS.i(_BOX)), OPS.mul(row, OPS.i(_LINE)))
        address = OPS.add(address, OPS.add(OPS.shl(chunk, OPS.i(4)), OPS.land(inside, OPS.i(15))))
        return OPS.add(base, address)

    def step(
        self, q: list, units: list, peaks: list, totals: list, sums: list, *, tiles, scales, at, warpgroup
    ) -> tuple[list, list, list]:
        """(peaks, totals, sums) after this warp's rows of a tile.

        peaks: base-2 exponents, of each line; totals: of each line and, unlike peaks, of this thread's tokens alone.
        tiles, scales: addresses in shared memory, of K and V each; scales are those of the worker's first head.
        at: (position of the tile, [first, stop) of the positions that the row sees, position of its first query).
        """
        g, q_lane, head, first_row = self.place(warpgroup)
        position, first, stop, q_position = at
        k_boxes, v_boxes = (self.heads * width // _LINE for width in (self.k_width, self.v_width))
        groups = OPS.shr(first_row, OPS.i(3))  # of 8 rows, before this warp's
        k_base = OPS.add(tiles[0], OPS.mul(groups, OPS.i(k_boxes * _BOX)))
        v_base = OPS.add(tiles[1], OPS.mul(groups, OPS.i(v_boxes * _BOX)))
        even = OPS.shl(q_lane, OPS.i(1))
        rows = [even, OPS.xor(OPS.add(even, OPS.i(1)), OPS.i(4))]  # of this thread's columns of S, in each 8

        # Scores.
        own = OPS.xor(g, OPS.shl(OPS.land(g, OPS.i(1)), OPS.i(2)))
        scores = [[OPS.f(0.0)] * 4 for _ in range(self.tokens // 8)]
        for chunk in range(self.k_width // 64):
            byte = OPS.add(OPS.mul(head, OPS.i(self.k_width)), OPS.i(64 * chunk))
            byte = OPS.add(byte, OPS.shl(q_lane, OPS.i(4)))
            address = self._address(k_base, own, byte)
            loaded = [OPS.shared(address, i * k_boxes * _BOX, 4) for i in range(self.tokens // 8)]
            for word in range(4):
                a = self._fragment(q, 4 * chunk + word)
                for i, words in enumerate(loaded):
                    scores[i] = OPS.mma(scores[i], a, OPS.halves(words[word]))

        # V and what belongs to its tokens, long before they are needed.
        scale_row = OPS.add(OPS.mul(first_row, OPS.i(self.scale_heads)), head)
        scale_at = [
            OPS.shl(OPS.add(OPS.mul(row, OPS.i(self.scale_heads)), scale_row), OPS.i(2)) for row in rows
        ]

        def scale(kind: int, i: int, e: int):
            (word,) = OPS.shared(OPS.add(scales[kind], scale_at[e]), 32 * self.scale_heads * i, 1)
            value = OPS.number(word)
            # 0 in the padding page, anything in slots that nobody wrote: NaN, or a subnormal whose inverse is infinite.
            good = OPS.land(OPS.at_least(value, OPS.f(_MIN_SCALE)), OPS.above(OPS.f(math.inf), value))
            return OPS.select(good, value, OPS.f(1.0))

        places = [(i, e) for i in range(self.tokens // 8) for e in range(2)]
        k_scale, v_scale = ({(i, e): scale(kind, i, e) for i, e in places} for kind in range(2))
        exponents = {place: OPS.log2(value) for place, value in v_scale.items()}
        inverses = {place: OPS.inverse(value) for place, value in v_scale.items()}

        values = {}
        for r, (i, e) in [(r, place) for r in range(self.halves) for place in places]:
            x = OPS.fmul(scores[i][2 * r + e], OPS.fmul(k_scale[i, e], units[r]))
            if self.logit_cap is not None:
                # tanh by exp2: the hardware's own tanh has 11 bits.
                cap = self.logit_cap * _LOG2E
                power = OPS.exp2(OPS.fmul(x, OPS.f(2 * _LOG2E / cap)))
                x = OPS.fsub(OPS.f(cap), OPS.fmul(OPS.f(2 * cap), OPS.inverse(OPS.fadd(power, OPS.f(1.0)))))
            values[r, i, e] = OPS.fadd(x, exponents[i, e])

        # Where not every query sees every row.
        base = OPS.add(position, first_row)
        tail = OPS.lor(OPS.less(base, first), OPS.less(stop, OPS.add(base, OPS.i(self.tokens))))
        edge = tail
        if self.s_q > 1:
            edge = OPS.lor(edge, OPS.less(OPS.add(q_position, OPS.i(1)), OPS.add(base, OPS.i(self.tokens))))
            if self.window is not None:
                oldest = OPS.add(q_position, OPS.i(self.s_q - self.window))
                edge = OPS.lor(edge, OPS.less(base, oldest))
        token = {(i, e): OPS.add(OPS.add(base, rows[e]), OPS.i(8 * i)) for i, e in places}
        inside = lambda i, e: OPS.land(
            OPS.less(token[i, e], stop), OPS.less(OPS.sub(first, OPS.i(1)), token[i, e])
        )

        def hide(values):
            hidden = []
            for value, (r, i, e) in zip(values, keys, strict=True):
                keep = inside(i, e)
                if self.s_q > 1:
                    line = OPS.add(g, OPS.i(8 * r))
                    at = OPS.add(q_position, OPS.div(line, OPS.i(self.queries_a_head)))
                    keep = OPS.land(keep, OPS.less(token[i, e], OPS.add(at, OPS.i(1))))
                    if self.window is not None:
                        keep = OPS.land(keep, OPS.less(OPS.sub(at, OPS.i(self.window)), token[i, e]))
                hidden.append(OPS.select(keep, value, OPS.f(-math.inf)))
            return hidden

        keys = list(values)
        values = dict(zip(keys, OPS.when(edge, hide, list(values.values())), strict=True))

        # The subtrahend follows the maximum only when it falls behind by 2**_SLACK: most tiles rescale nothing.
        new_peaks, behind = [], None
        for r in range(self.halves):
            tile_peak = values[r, 0, 0]
            for i, e in places[1:]:
                tile_peak = OPS.fmax(tile_peak, values[r, i, e])
            for distance in (1, 2):
                tile_peak = OPS.fmax(tile_peak, OPS.shuffle(tile_peak, distance))
            late = OPS.above(tile_peak, OPS.fadd(peaks[r], OPS.f(_SLACK)))
            new_peaks.append(OPS.select(late, tile_peak, peaks[r]))
            behind = late if behind is None else OPS.lor(behind, late)

        def rescale(values):
            decays = [OPS.exp2(OPS.fsub(old, new)) for old, new in zip(peaks, new_peaks, strict=True)]
            return [OPS.fmul(x, decays[self.line_of(i)]) for i, x in enumerate(values)]

        changed = OPS.when(OPS.any(behind), rescale, [*totals, *sums])
        totals, sums = changed[: self.halves], changed[self.halves :]
        weights = {}
        for r in range(self.halves):
            subtrahend = OPS.fsub(new_peaks[r], OPS.f(LIFT))
            for i, e in places:
                weights[r, i, e] = OPS.exp2(OPS.fsub(values[r, i, e], subtrahend))
                totals[r] = OPS.fadd(totals[r], OPS.fmul(weights[r, i, e], inverses[i, e]))

        # O.
        zero = OPS.i(0)
        for step in range(self.tokens // 16):
            a = [
                OPS.pack(weights[r, i, 0], weights[r, i, 1]) if r < self.halves else zero
                for i in (2 * step, 2 * step + 1)
                for r in range(2)
            ]
            for column, width in self.v_groups:
                words = width // 32  # of a token, for this thread
                byte = OPS.add(OPS.mul(head, OPS.i(self.v_width)), OPS.i(column))
                byte = OPS.add(byte, OPS.mul(g, OPS.i(width // 8)))
                addresses = [self._address(v_base, row, byte) for row in rows]
                v_words = {
                    (i, e): OPS.shared(addresses[e], i * v_boxes * _BOX, words)
                    for i in (2 * step, 2 * step + 1)
                    for e in range(2)
                }

                def clear(flat, v_words=v_words, words=words):
                    # A weight is 0 there, but 0 * NaN is NaN.
                    alive = [inside(*place) for place in v_words for _ in range(words)]
                    return [OPS.select(ok, w, zero) for ok, w in zip(alive, flat, strict=True)]

                flat = OPS.when(tail, clear, [w for of_token in v_words.values() for w in of_token])
                v_words = {place: flat[n * words : (n + 1) * words] for n, place in enumerate(v_words)}
                for word in range(words):
                    pairs = {
                        i: [
                            half
                            for selector in (0x5140, 0x7362)  # bytes 0, 1 and bytes 2, 3 of both tokens
                            for half in OPS.halves(
                                OPS.permute(v_words[i, 0][word], v_words[i, 1][word], selector)
                            )
                        ]
                        for i in (2 * step, 2 * step + 1)
                    }
                    for n in range(4):
                        product = column // 8 + 4 * word + n
                        at_sum = 2 * self.halves * product
                        mine = sums[at_sum : at_sum + 2 * self.halves]
                        c = [*mine, *[OPS.f(0.0)] * (4 - len(mine))]
                        c = OPS.mma(c, a, [pairs[2 * step][n], pairs[2 * step + 1][n]])
                        sums[at_sum : at_sum + 2 * self.halves] = c[: 2 * self.halves]
        return new_peaks, totals, sums

    def _fragment(self, q: list, step: int) -> list:
        """A's registers of a product from `queries`' fragments."""
        mine = q[2 * self.halves * step : 2 * self.halves * (step + 1)]
        if self.halves == 2:
            return mine
        return [mine[0], OPS.i(0), mine[1], OPS.i(0)]

    def line_of(self, index: int) -> int:
        """Which of the thread's lines an element of [*totals, *sums] belongs to."""
        if index < self.halves:
            return index
        return (index - self.halves) % (2 * self.halves) // 2

    def columns_of(self, q_lane, r: int, sums: list) -> list[tuple[Any, list]]:
        """(first column, its neighbours' elements of O) for line g + 8 r: runs of 32 columns, or of 16."""
        runs = []
        for column, width in self.v_groups:
            products = range(column // 8, (column + width) // 8)
            elements = [sums[2 * self.halves * j + 2 * r + e] for e in range(2) for j in products]
            runs.append((OPS.add(OPS.i(column), OPS.mul(q_lane, OPS.i(width // 4))), elements))
        return runs


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _f32() -> ir.Type:
    return ir.F32Type.get()
