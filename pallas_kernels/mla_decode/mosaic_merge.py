"""Merge of the parts that the MLA decode kernel left of cut rows, by log-sum-exp, in place."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

_UNROLL = 2
_WARPGROUPS = 4


def merge(
    out: BFloat16[Array, "rows_queries v_width"],
    lse: Float32[Array, " rows_queries"],
    part: Float32[Array, "slots_queries v_width"],
    part_lse: Float32[Array, " slots_queries"],
    cuts: Int32[Array, "groups 2"],
    *,
    queries: int,
) -> tuple[Array, Array]:
    """Returns out and lse with the cut rows written; the others stay as they are.

    Group g leads a merge if ``cuts[g, 0]`` is a row and not -1: its parts are slot ``groups + g`` and then the slots
    g + 1 to ``cuts[g, 1]``, `queries` lines each. `part_lse` is in base 2, -inf for a line that saw nothing.
    """
    groups = cuts.shape[0]
    width = part.shape[1]
    if groups == 1:
        return out, lse
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // 128)
    # Few rows can be cut into many parts each: there the warpgroups of a block share a line. Otherwise each has its own.
    shared = out.shape[0] // queries <= 16
    lines = 1 if shared else _WARPGROUPS
    splat = lambda value: plgpu.layout_cast(jnp.full((width,), value, jnp.float32), layout)

    def kernel(part_ref, part_lse_ref, cut_ref, out_ref, lse_ref, acc_smem, stat_smem, ready):
        group, block, wg = lax.axis_index("group"), lax.axis_index("block"), lax.axis_index("wg")
        row, last = cut_ref[group, 0], cut_ref[group, 1]
        line = block if shared else block * lines + wg
        count = last - group + 1
        begin, step = (wg, _WARPGROUPS) if shared else (0, 1)

        def part_of(i, carry):
            peak, total, acc = carry
            loaded = []
            for u in range(_UNROLL):
                at = begin + (i * _UNROLL + u) * step
                safe = jnp.minimum(at, count - 1)
                slot = jnp.where(safe == 0, groups + group, group + safe)
                value = plgpu.load(part_ref.at[slot * queries + line], layout=layout)
                loaded.append((jnp.where(at < count, part_lse_ref[slot * queries + line], -jnp.inf), value))
            new_peak = peak
            for weight, _ in loaded:
                new_peak = jnp.maximum(new_peak, weight)
            decay = jnp.exp2(peak - new_peak)
            total, acc = total * decay, acc * decay
            for weight, value in loaded:
                weight = jnp.exp2(weight - new_peak)
                total, acc = total + weight, acc + value * weight
            return new_peak, total, acc

        def write(peak, total, acc):
            seen = total > 0
            safe = jnp.where(seen, total, 1.0)
            out_ref[row * queries + line] = (acc * (1 / safe)).astype(jnp.bfloat16)
            lse_ref[row * queries + line] = jnp.where(seen, (peak + jnp.log2(safe)) * math.log(2), jnp.inf)

        @pl.when((row >= 0) & (line < queries))
        def run():
            trips = lax.div(count - begin + (_UNROLL * step - 1), _UNROLL * step)
            peak, total, acc = lax.fori_loop(
                0, jnp.maximum(trips, 0), part_of, (jnp.float32(-1e30), jnp.float32(0), splat(0))
            )
            if not shared:
                write(peak, total, acc)
                return
            acc_smem[wg] = acc
            stat_smem[wg, 0], stat_smem[wg, 1] = peak, total
            plgpu.commit_smem()
            plgpu.barrier_arrive(ready)

            @pl.when(wg == 0)
            def combine():
                plgpu.barrier_wait(ready)
                peaks = [stat_smem[w, 0] for w in range(_WARPGROUPS)]
                peak = peaks[0]
                for other in peaks[1:]:
                    peak = jnp.maximum(peak, other)
                total, acc = jnp.float32(0), splat(0)
                for w in range(_WARPGROUPS):
                    weight = jnp.exp2(peaks[w] - peak)
                    total += stat_smem[w, 1] * weight
                    acc += plgpu.load(acc_smem.at[w], layout=layout) * weight
                write(peak, total, acc)

    out_box, lse_box = jax.new_ref(out), jax.new_ref(lse)
    plgpu.kernel(
        kernel,
        out_type=[],
        grid=(groups - 1, -(-queries // lines)),
        grid_names=("group", "block"),
        num_threads=_WARPGROUPS,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((_WARPGROUPS, width), jnp.float32),
            plgpu.SMEM((_WARPGROUPS, 2), jnp.float32),
            plgpu.Barrier(num_arrivals=_WARPGROUPS),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(part, part_lse, cuts, out_box, lse_box)
    return jax.freeze(out_box), jax.freeze(lse_box)
