"""Runs the MLA decode kernel for few query lines in Pallas' GPU interpreter, with race detection.

`python -m tests.kernels.mla_few_interpreter`; see mla_interpreter.py.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode import mosaic_block, mosaic_few, mosaic_parts, mosaic_schedule, mosaic_spread
from tests.kernels import mla_interpreter
from tests.kernels.mla_case import make_case


def add_products(accumulators, lefts, right):
    def product(left):
        def scoped(ref):
            plgpu.wgmma(ref, left.transpose((1, 0)), right.transpose((1, 0)))
            return ref[...]

        return pl.run_scoped(scoped, plgpu.ACC((64, right.shape[0]), jnp.float32))

    return [acc + product(left) for acc, left in zip(accumulators, lefts, strict=True)]


def zero_rows(tile_ref, first, stop, _):
    row = jnp.arange(64)[:, None]
    tile_ref[...] = jnp.where((row >= first) & (row < stop), tile_ref[...], jnp.bfloat16(0))


def any_above(scores, limits):
    return jnp.any(scores > limits).astype(jnp.int32)


def reduce_columns(scores, _, largest):
    return scores.max(axis=0) if largest else scores.sum(axis=0)


def leave(blocks, ref, line, scales_ref, scale, pitch, queries):
    """A part's lines, in an order of our own within them. Scales that do without a look at the elements."""
    scales_ref[pl.ds(scale, 4)] = jnp.exp2(jnp.arange(4) - 2.0)
    powers = jnp.exp2(jnp.arange(64)[:, None] // 16 - 2.0)
    for i, block in enumerate(blocks):
        for group in range(queries // 8):
            piece = (block[:, 8 * group : 8 * group + 8] / powers).astype(jnp.float16)
            ref[line + i * (pitch // 8) + group] = piece.reshape(-1)


def fetch(ref, scales_ref, lse_ref, line, scale, first, queries):
    powers = jnp.concatenate([jnp.full((16, 1), x) for x in scales_ref[pl.ds(scale, 4)]])
    pieces = [ref[line + i].reshape(64, 8).astype(jnp.float32) * powers for i in range(queries // 8)]
    return jnp.concatenate(pieces, axis=1), lse_ref[pl.ds(first, queries)]


def store_pairs(ref, values, first, live, block):
    """Rows lie straight here."""

    @pl.loop(0, live)
    def line(i):
        row = lax.dynamic_index_in_dim(values, i, 1, keepdims=False)
        ref[first + i, pl.ds(64 * block, 64)] = row.astype(jnp.bfloat16)


def add_parts(
    part_ref, scales_ref, lse_ref, sums_ref, group, count, block, tile,
    *, columns, q_tiles, v_width, groups, together,
):  # fmt: skip
    """All parts as one warp's; test_mla_spread.py runs the kernel's own code."""

    def add(i, carry):
        peak, total, acc = carry
        slot = jnp.where(i == 0, groups, i) + group
        line = mosaic_parts.line_of(slot, block // 4, q_tiles * columns, v_width) + tile
        part = slot * q_tiles + tile // (columns // 8)
        scale = mosaic_parts.first_scale(part, block // (v_width // 32)) + block % 4
        value = part_ref[line].reshape(4, 16, 8)[block % 4].astype(jnp.float32) * scales_ref[scale]
        log = lse_ref[pl.ds(slot * q_tiles * columns + tile * 8, 8)]
        new_peak = jnp.maximum(peak, log)
        decay, weight = jnp.exp2(peak - new_peak), jnp.exp2(log - new_peak)
        return new_peak, total * decay + weight, acc * decay + value * weight

    nothing = jnp.full(8, -1e30, jnp.float32), jnp.zeros(8, jnp.float32), jnp.zeros((16, 8), jnp.float32)
    peak, total, acc = lax.fori_loop(0, count, add, nothing)
    sums_ref[pl.ds(0, 144)] = jnp.concatenate([peak, total, acc.reshape(-1)])


def combine(sums_ref, out_ref, lse_ref, row, block, tile, *, queries, v_width, paired):
    peak, total, acc = jnp.split(sums_ref[pl.ds(0, 144)], [8, 16])
    safe, first = jnp.where(total > 0, total, 1), row * queries + tile * 8
    result = (acc.reshape(16, 8) / safe).T.astype(jnp.bfloat16)
    natural = jnp.where(total > 0, (peak + jnp.log2(safe)) * jnp.log(2.0), jnp.inf)

    @pl.loop(0, jnp.minimum(queries - tile * 8, 8))
    def line(i):
        out_ref[first + i, pl.ds(block * 16, 16)] = lax.dynamic_index_in_dim(result, i, 0, keepdims=False)

        @pl.when(block == 0)
        def store_lse():
            lse_ref[first + i] = natural[i]


def substitute_parts() -> None:
    mosaic_block.store_vector = mosaic_parts.store_vector = lambda ref, vector, first, count: (
        mla_interpreter.store_rows(ref, vector, first, count)
    )
    mosaic_parts.leave, mosaic_parts.fetch, mosaic_parts.store_pairs = leave, fetch, store_pairs
    mosaic_spread.add_parts, mosaic_spread.combine = add_parts, combine


def main() -> None:
    mla_interpreter.substitute(mosaic_few, add_products)
    # Right for any price of a row.
    mosaic_schedule.find_share = lambda *args, overhead, **options: mla_interpreter.find_share(
        *args, **options
    )
    mosaic_few.zero_rows, mosaic_few.any_above = zero_rows, any_above
    mosaic_few.reduce_columns = reduce_columns
    substitute_parts()
    # Rows cut between three blocks, windows, an empty row, drafts of three queries, ids translated in the kernel.
    mla_interpreter.check(
        make_case([77, 0, 130, 64, 900], heads=8, s_q=3, page_size=32, kv_start=[3, 0, 65, 0, 129]),
        "virtual",
        told=True,
        blocks=3,
    )
    # Lines that are padded; a row whole in one block and a row cut. So few rows are merged by `mosaic_spread`.
    mla_interpreter.check(make_case([40, 700], heads=3), "table", blocks=2)
    # Single rows.
    mla_interpreter.check(
        make_case([77, 0, 140], heads=8, page_size=1, kv_start=[3, 0, 65]), "stream", blocks=2
    )
    # Blocks for four parts a row: the merge takes 8 queries and 4 parts at a time.
    mla_interpreter.check(make_case([600, 0, 800, 64, 700], heads=16), "table", told=True, blocks=20)
    mla_interpreter.check(make_case(mla_interpreter.MANY_ROWS, heads=8), "table", told=True, blocks=6)
    print("right, no races")


if __name__ == "__main__":
    main()
