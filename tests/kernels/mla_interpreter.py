"""Runs the Mosaic MLA decode kernel in Pallas' GPU interpreter, with race detection: `python -m tests.kernels.mla_interpreter`.

The interpreter runs TMA, barriers, WGMMA and the warpgroups of a block as threads, on CPU. It can't run inline MLIR, nor a
WGMMA with operands in registers, so what the kernel writes in MLIR is replaced by its meaning: cut stores, rescaling and
the split of the batch (test_mla_schedule.py tests that one lane by lane).
"""

from collections import Counter
from contextlib import redirect_stdout
from io import StringIO

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import shared_memory
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import gmem, kernel_start, l2_hints
from pallas_kernels.mla_decode import mosaic_gather, mosaic_gpu, mosaic_schedule, mosaic_signals
from tests.kernels.mla_case import make_case


def store_rows(ref, values, first_row, rows, column=0, skipped=0):
    @pl.loop(skipped, rows)
    def line(i):
        value = lax.dynamic_index_in_dim(values, i, 0, keepdims=False)
        at = first_row + i if values.ndim == 1 else (first_row + i, pl.ds(column, values.shape[1]))
        ref[at] = value


def add_products(accumulators, left, rights, done=None):
    def product(right):
        def scoped(ref):
            plgpu.wgmma(ref, left, right)
            return ref[...]

        return pl.run_scoped(scoped, plgpu.ACC((64, right.shape[1]), jnp.float32))

    sums = [acc + product(right) for acc, right in zip(accumulators, rights, strict=True)]
    for i in range(len(rights) if done else 0):
        done(i)
    return sums


def upper_half(values):
    bits = lax.bitcast_convert_type(values, jnp.uint32) & jnp.uint32(0xFFFF0000)
    return lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)


def lower_half(values):
    return (values - upper_half(values).astype(jnp.float32)).astype(jnp.bfloat16)


def copy_rows(ref, rows, target, column, transforms, once=False):
    target[...] = ref[:, pl.ds(column, target.shape[1])][rows[::8]]


def round_pairs(values):
    return values.astype(jnp.bfloat16)


def widen(values):
    return values.astype(jnp.float32)


def fold(values):
    return values.astype(jnp.float32).reshape(len(values), -1, 8).sum(axis=1)


def raise_peak(scores, peak, slack, scale):
    top = scores.max(axis=1)
    new_peak = jnp.where(top > peak + slack, top, peak)
    return new_peak, jnp.exp2((peak - new_peak) * scale)


def find_share(
    row_range_refs, batch, group, groups, out_ref, *,
    width_tokens, s_q, reach=None, indptr_ref=None, capacity=0, cut_evenly=True,
):  # fmt: skip
    """The split for rows of unequal lengths, by its definition."""
    start, q_stop, *q_start = (ref[...] for ref in row_range_refs)
    stop = jnp.minimum(q_stop, width_tokens)
    if indptr_ref is not None:
        indptr = indptr_ref[...]
        stop = jnp.minimum(stop, start + jnp.minimum(indptr[1:], capacity) - indptr[:-1])
    start = jnp.maximum(start, 0)
    if q_start:
        q_stop = q_start[0] + s_q
        stop = jnp.minimum(stop, q_stop)
    if reach is not None:
        start = jnp.maximum(start, q_stop - reach)
    cost = jnp.where(stop > start, (stop + 63) // 64 - start // 64, 0) + mosaic_schedule._OVERHEAD
    end = jnp.cumsum(cost)
    size = (end[-1] + groups - 1) // groups
    found = []
    for i in (0, 1):
        at = jnp.minimum((group + i) * size, end[-1])
        row = jnp.sum(end <= at)
        inside = jnp.minimum(row, batch - 1)
        found += [row, jnp.where(row < batch, at - (end[inside] - cost[inside]), 0)]
    for i, value in enumerate([*found, size, mosaic_schedule._OVERHEAD]):
        out_ref[i] = jnp.int32(value)


# So many that the merge takes its form for large batches.
MANY_ROWS = [70, 0, 130, 64, 200, 1, 128, 65, 90, 63, 140, *[5] * 6]

_told: Counter[int] = Counter()  # by part
_awaited: dict[int, int] = {}  # how often the merge wants to hear of a part


def tell(ref, part):
    """Tells the host: the interpreter has no atomic addition."""
    jax.debug.callback(lambda part: _told.update([int(part)]), part)


def wait_for_parts(ref, group, count, *, groups, tellers, tile=0, tiles=1):
    def note(group, count, tile):
        slots = [groups + group, *range(group + 1, group + count)]
        _awaited.update({int(slot * tiles + tile): tellers for slot in slots})

    jax.debug.callback(note, group, count, tile)


def substitute(kernel, add_products) -> None:
    """In the module of a decode kernel."""
    kernel.store_rows = store_rows
    kernel.add_products = add_products
    kernel.rescale = lambda accumulators, factors: [acc * factors[:, None] for acc in accumulators]
    kernel.upper_half, kernel.lower_half = upper_half, lower_half
    kernel.round_pairs, kernel.widen = round_pairs, widen
    kernel.fold, kernel.raise_peak = fold, raise_peak
    kernel.sync_warpgroup, kernel.uniform = lambda: None, lambda x: x  # a warpgroup is one thread here
    mosaic_schedule.find_share = find_share
    mosaic_gather.copy_rows, mosaic_gather.report = copy_rows, plgpu.barrier_arrive
    mosaic_gather.order_reads = lambda: None
    gmem.load, gmem.iota = lambda ref, index: ref[...][index], jnp.arange
    plgpu.async_prefetch = lambda ref: None
    # The interpreter runs one kernel after the other.
    l2_hints.bring_once, kernel_start.fetch = lambda: None, lambda own, spread, blocks: None
    mosaic_signals.launch_merge, mosaic_signals.tell = lambda: None, tell
    mosaic_signals.read_lead = lambda ref, lead: tuple(ref[lead, i] for i in range(3))
    mosaic_signals.wait_for_parts = wait_for_parts
    plgpu.griddepcontrol_wait = plgpu.griddepcontrol_launch_dependents = lambda: None
    # A kernel may end with slots of its ring free and nobody waiting for that; the interpreter takes it for a mistake.
    deallocate = shared_memory.Barrier.deallocate

    def lenient(barrier):
        try:
            deallocate(barrier)
        except ValueError as error:
            if "had only observed" not in str(error):
                raise

    shared_memory.Barrier.deallocate = lenient


def forget_parts() -> None:
    _told.clear()
    _awaited.clear()


def check_parts(told: bool) -> None:
    """Whether parts were told of as the merge wants, or no part if it waits for the kernel's end, since `forget_parts`."""
    jax.effects_barrier()
    assert _told == _awaited, (_told, _awaited)
    assert bool(_told) == told, (_told, told)


def check(case, delivery: str, told: bool = False, **tuning: int) -> None:
    """`told`: whether the merge waits for parts instead of the kernel's end, which must then be told of as it wants."""
    forget_parts()
    # Races are printed as they are found; what the interpreter keeps of them is that of its last kernel, the merge.
    with (
        redirect_stdout(StringIO()) as printed,
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
    ):
        out, lse = mosaic_gpu.mla_decode_mosaic(
            jnp.asarray(case.q),
            jnp.asarray(case.pool),
            case.source(delivery),
            case.block_offset,
            config=mosaic_gpu.TuningConfig(q_boxes_in_registers=0, **tuning),
            **case.options,
        )
        results = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    assert "RACE DETECTED" not in printed.getvalue(), printed.getvalue()
    case.check(*results)
    check_parts(told)


def main() -> None:
    substitute(mosaic_gpu, add_products)
    # Rows cut between three blocks, windows, an empty row, drafts of three queries, ids translated in the kernel.
    check(
        make_case([77, 0, 130, 64, 300], heads=16, s_q=3, page_size=32, kv_start=[3, 0, 65, 0, 129]),
        "virtual",
        blocks=3,
    )
    # A number of queries that TMA can't store, in two tiles; a row whole and a row cut.
    check(make_case([40, 150], heads=70), "table", blocks=4)
    # Single rows.
    check(make_case([77, 0, 140], heads=40, page_size=1, kv_start=[3, 0, 65]), "stream", blocks=2)
    # More rows than are merged at the kernel's end, cut between six pairs of blocks for two query tiles.
    check(make_case(MANY_ROWS, heads=70), "table", told=True, blocks=12)
    print("right, no races")


if __name__ == "__main__":
    main()
