"""Merge of the parts that the MLA decode kernel left of cut rows, by log-sum-exp, in place."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

_FEW_ROWS = 16
_LINES = 4


def merge(
    out: BFloat16[Array, "rows_queries v_width"],
    lse: Float32[Array, " rows_queries"],
    part: Float32[Array, "slots_queries v_width"],
    part_lse: Float32[Array, " slots_queries"],
    leads: Int32[Array, "leads 3"],
    *,
    queries: int,
    groups: int,
) -> tuple[Array, Array]:
    """Returns out and lse with the cut rows written; the others stay as they are.

    A lead is (row, first group, last group), or has row -1. The parts of the row are slot ``groups + first`` and then the
    slots first + 1 to last, `queries` lines each. `part_lse` is in base 2, -inf for a line that saw nothing.
    """
    width = part.shape[1]
    if groups == 1:
        return out, lse
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // 128)
    # A batch of few rows can be cut into many parts a row: there the warpgroups of a block share a line, many parts in
    # flight each. In a larger batch most cut rows have two parts, and a warpgroup alone takes some lines at once.
    shared = out.shape[0] // queries <= _FEW_ROWS
    threads, lines, unroll = (4, 1, 8) if shared else (1, _LINES, 2)
    splat = lambda value: plgpu.layout_cast(jnp.full((width,), value, jnp.float32), layout)

    def kernel(part_ref, part_lse_ref, lead_ref, out_ref, lse_ref, acc_smem, stat_smem, ready):
        lead, block, wg = lax.axis_index("lead"), lax.axis_index("block"), lax.axis_index("wg")
        plgpu.griddepcontrol_wait()  # launched while the decode kernel still runs
        row, group, last = (lead_ref[lead, i] for i in range(3))
        count = last - group + 1
        # Lines past the last one repeat it: the same values to the same place.
        mine = [jnp.minimum(block * lines + i, queries - 1) for i in range(lines)]

        def add_parts(i, carry):
            at = [wg + (i * unroll + u) * threads for u in range(unroll)]
            safe = [jnp.minimum(a, count - 1) for a in at]
            slots = [jnp.where(a == 0, groups + group, group + a) for a in safe]
            loaded = [
                [
                    (
                        part_lse_ref[s * queries + line],
                        plgpu.load(part_ref.at[s * queries + line], layout=layout),
                    )
                    for s in slots
                ]
                for line in mine
            ]
            after = []
            for (peak, total, acc), parts in zip(carry, loaded, strict=True):
                weights = [
                    jnp.where(a < count, weight, -jnp.inf) for a, (weight, _) in zip(at, parts, strict=True)
                ]
                new_peak = peak
                for weight in weights:
                    new_peak = jnp.maximum(new_peak, weight)
                decay = jnp.exp2(peak - new_peak)
                total, acc = total * decay, acc * decay
                for weight, (_, value) in zip(weights, parts, strict=True):
                    weight = jnp.exp2(weight - new_peak)
                    total, acc = total + weight, acc + value * weight
                after.append((new_peak, total, acc))
            return tuple(after)

        def write(line, peak, total, acc):
            seen = total > 0
            safe = jnp.where(seen, total, 1.0)
            out_ref[row * queries + line] = (acc * (1 / safe)).astype(jnp.bfloat16)
            lse_ref[row * queries + line] = jnp.where(seen, (peak + jnp.log2(safe)) * math.log(2), jnp.inf)

        @pl.when(row >= 0)
        def run():
            trips = lax.div(jnp.maximum(count - wg, 0) + (unroll * threads - 1), unroll * threads)
            empty = (jnp.float32(-1e30), jnp.float32(0), splat(0))
            merged = lax.fori_loop(0, trips, add_parts, (empty,) * lines)
            if not shared:
                for line, result in zip(mine, merged, strict=True):
                    write(line, *result)
                return
            ((peak, total, acc),) = merged
            acc_smem[wg] = acc
            stat_smem[wg, 0], stat_smem[wg, 1] = peak, total
            plgpu.commit_smem()
            plgpu.barrier_arrive(ready)

            @pl.when(wg == 0)
            def combine():
                plgpu.barrier_wait(ready)
                peaks = [stat_smem[w, 0] for w in range(threads)]
                peak = peaks[0]
                for other in peaks[1:]:
                    peak = jnp.maximum(peak, other)
                total, acc = jnp.float32(0), splat(0)
                for w in range(threads):
                    weight = jnp.exp2(peaks[w] - peak)
                    total += stat_smem[w, 1] * weight
                    acc += plgpu.load(acc_smem.at[w], layout=layout) * weight
                write(mine[0], peak, total, acc)

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
            plgpu.SMEM((threads, 2), jnp.float32),
            plgpu.Barrier(num_arrivals=threads),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(part, part_lse, leads, out_box, lse_box)
    return jax.freeze(out_box), jax.freeze(lse_box)
