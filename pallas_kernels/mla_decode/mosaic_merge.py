"""Merge of the parts that a decode kernel left of cut rows, by log-sum-exp, in place."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels.mla_decode import mosaic_signals

_FEW_ROWS = 16  # of a batch whose rows may be cut into many parts each
_LINES = 4
_TOGETHER = 8  # parts that a warpgroup loads together where few rows are cut into many


def merge(
    out: BFloat16[Array, "rows_queries v_width"],
    lse: Float32[Array, " rows_queries"],
    part: Float32[Array, "slots_queries v_width"] | BFloat16[Array, "2 slots_queries v_width"],
    part_lse: Float32[Array, " slots_queries"],
    leads: Int32[Array, "leads 3"],
    *,
    queries: int,
    groups: int,
    counts: Int32[Array, " slots_tiles"] | None = None,
    tile: int = 1,
) -> tuple[Array, Array]:
    """Returns out and lse with the cut rows written; the others stay as they are.

    A lead is (row, first group, last group), or has row -1. The parts of the row are slot ``groups + first`` and then the
    slots first + 1 to last, `queries` lines each, in f32 or as two bf16 arrays to add. `part_lse` is in base 2, -inf for a
    line that saw nothing. `counts`: of `mosaic_signals`, three for each part of `tile` lines; None if the parts are there
    when the kernel has ended.
    """
    v_width = part.shape[-1]
    if groups == 1:
        return out, lse
    # As many lines as fill whole registers of a warpgroup are merged side by side.
    abreast = 128 // math.gcd(v_width, 128)
    if queries % abreast:
        raise NotImplementedError(
            f"lines of {v_width} are merged {abreast} at a time, which does not divide {queries} a row"
        )
    width, queries = abreast * v_width, queries // abreast
    out_shape, out, part = out.shape, out.reshape(-1, width), part.reshape(*part.shape[:-2], -1, width)
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // 128)
    # A batch of few rows can be cut into many parts a row: there the warpgroups of a block share a line, many parts in
    # flight each. In a larger batch most cut rows have two parts, and a warpgroup alone takes some lines at once.
    shared = out.shape[0] // queries <= _FEW_ROWS
    threads, lines, unroll = (4, 1, _TOGETHER) if shared else (1, _LINES, 2)
    splat = lambda value: plgpu.layout_cast(jnp.full((width,), value, jnp.float32), layout)

    tiles = -(-queries * abreast // tile)
    told = [] if counts is None else [counts]

    def kernel(part_ref, part_lse_ref, lead_ref, *refs):
        *counts_ref, out_ref, lse_ref, acc_smem, stat_smem, ready = refs
        lead, block, wg = lax.axis_index("lead"), lax.axis_index("block"), lax.axis_index("wg")
        # Launched while the decode kernel still runs: leads and counts are there, or nothing is before it has ended.
        if told:
            row, group, last = mosaic_signals.read_lead(lead_ref, lead)
        else:
            plgpu.griddepcontrol_wait()
            row, group, last = (lead_ref[lead, i] for i in range(3))
        count = last - group + 1
        # Lines past the last one repeat it: the same values to the same place.
        mine = [jnp.minimum(block * lines + i, queries - 1) for i in range(lines)]

        def over_lines(factors):
            """One factor for each of the lines abreast, as a factor of their elements."""
            if abreast == 1:
                return factors[0]
            line = lax.div(plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout), v_width)
            spread = splat(factors[0])
            for i, factor in enumerate(factors[1:], start=1):
                spread = jnp.where(line == i, factor, spread)
            return spread

        summands = [part_ref] if part.ndim == 2 else [part_ref.at[0], part_ref.at[1]]

        def add_parts(i, carry):
            at = [wg + (i * unroll + u) * threads for u in range(unroll)]
            safe = [jnp.minimum(a, count - 1) for a in at]
            slots = [jnp.where(a == 0, groups + group, group + a) for a in safe]
            loaded = [
                [
                    (
                        [part_lse_ref[(s * queries + line) * abreast + j] for j in range(abreast)],
                        [plgpu.load(ref.at[s * queries + line], layout=layout) for ref in summands],
                    )
                    for s in slots
                ]
                for line in mine
            ]
            after = []
            for (peaks, totals, acc), parts in zip(carry, loaded, strict=True):
                logs = [
                    [jnp.where(a < count, log, -jnp.inf) for log in part_logs]
                    for a, (part_logs, _) in zip(at, parts, strict=True)
                ]
                new_peaks = peaks
                for part_logs in logs:
                    new_peaks = [jnp.maximum(*pair) for pair in zip(new_peaks, part_logs, strict=True)]
                decays = [jnp.exp2(old - new) for old, new in zip(peaks, new_peaks, strict=True)]
                totals = [total * decay for total, decay in zip(totals, decays, strict=True)]
                acc = acc * over_lines(decays)
                for part_logs, (_, values) in zip(logs, parts, strict=True):
                    value, *low = (x.astype(jnp.float32) for x in values)
                    value = value + low[0] if low else value
                    weights = [jnp.exp2(log - peak) for log, peak in zip(part_logs, new_peaks, strict=True)]
                    totals = [total + weight for total, weight in zip(totals, weights, strict=True)]
                    acc = acc + value * over_lines(weights)
                after.append((new_peaks, totals, acc))
            return tuple(after)

        def write(line, peaks, totals, acc):
            safe = [jnp.where(total > 0, total, 1.0) for total in totals]
            out_ref[row * queries + line] = (acc * over_lines([1 / s for s in safe])).astype(jnp.bfloat16)
            for j, (peak, total, s) in enumerate(zip(peaks, totals, safe, strict=True)):
                natural = (peak + jnp.log2(s)) * math.log(2)
                lse_ref[(row * queries + line) * abreast + j] = jnp.where(total > 0, natural, jnp.inf)

        # All of a lead in one condition, so that it is loaded at once: the second holds wherever the first does.
        @pl.when((row >= 0) & (count > 0))
        def run():
            if told:
                mosaic_signals.wait_for_parts(
                    counts_ref[0], group, count, groups=groups, tellers=3,
                    tile=lax.div(block * (lines * abreast), tile), tiles=tiles,
                )  # fmt: skip
            trips = lax.div(jnp.maximum(count - wg, 0) + (unroll * threads - 1), unroll * threads)
            empty = ([jnp.float32(-1e30)] * abreast, [jnp.float32(0)] * abreast, splat(0))
            merged = lax.fori_loop(0, trips, add_parts, (empty,) * lines)
            if not shared:
                for line, result in zip(mine, merged, strict=True):
                    write(line, *result)
                return
            ((peaks, totals, acc),) = merged
            acc_smem[wg] = acc
            for j in range(abreast):
                stat_smem[wg, 2 * j], stat_smem[wg, 2 * j + 1] = peaks[j], totals[j]
            plgpu.commit_smem()
            plgpu.barrier_arrive(ready)

            @pl.when(wg == 0)
            def combine():
                plgpu.barrier_wait(ready)
                last_peaks = []
                for j in range(abreast):
                    peak = stat_smem[0, 2 * j]
                    for w in range(1, threads):
                        peak = jnp.maximum(peak, stat_smem[w, 2 * j])
                    last_peaks.append(peak)
                totals, acc = [jnp.float32(0)] * abreast, splat(0)
                for w in range(threads):
                    weights = [jnp.exp2(stat_smem[w, 2 * j] - last_peaks[j]) for j in range(abreast)]
                    totals = [t + stat_smem[w, 2 * j + 1] * weights[j] for j, t in enumerate(totals)]
                    acc += plgpu.load(acc_smem.at[w], layout=layout) * over_lines(weights)
                write(mine[0], last_peaks, totals, acc)

        if told:  # this kernel must not end before the other
            pl.when((lead == 0) & (block == 0))(plgpu.griddepcontrol_wait)

    out_box, lse_box = jax.new_ref(out), jax.new_ref(lse)
    plgpu.kernel(
        kernel,
        out_type=[],
        grid=(leads.shape[0], -(-queries // lines)),
        grid_names=("lead", "block"),
        num_threads=threads,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((threads, width), jnp.float32),
            plgpu.SMEM((threads, 2 * abreast), jnp.float32),
            plgpu.Barrier(num_arrivals=threads),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(part, part_lse, leads, *told, out_box, lse_box)
    return jax.freeze(out_box).reshape(out_shape), jax.freeze(lse_box)
