"""Runs the fp8 MLA decode kernels in Pallas' GPU interpreter, with race detection.

Run it as `python -m tests.kernels.mla_fp8_interpreter`.

See mla_interpreter.py. What the kernels do in inline MLIR is replaced by its meaning (test_mla_fp8.py runs those functions
lane by lane), so this shows their control: rings, barriers, masks, splits, exchange and the scale of a token.
"""

from contextlib import redirect_stdout
from io import StringIO

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode import mosaic_fp8, mosaic_fp8_pairs, mosaic_parts
from tests.kernels import mla_few_interpreter, mla_interpreter
from tests.kernels.mla_case import make_case

WIDTH = 576


def values(tile_ref):
    return lax.bitcast_convert_type(tile_ref[...], jnp.float8_e4m3fn).astype(jnp.float32)


def split_queries(raw_ref, lines, part, parts, q_smem, unit_ref, _):
    mine = q_smem.shape[0] // 2 // parts
    raw = jnp.concatenate([raw_ref[...][:32], raw_ref[...][32:, 2 * 64 :]], axis=1)
    raw = lax.dynamic_slice(raw, (part * mine, 0), (mine, 2 * WIDTH)).reshape(mine, WIDTH, 2)
    q, columns = lax.bitcast_convert_type(raw, jnp.bfloat16), q_smem.shape[0] // 2
    left = jnp.where(part * mine + jnp.arange(mine)[:, None] < lines, q.astype(jnp.float32) * 32, 0)
    for term in range(2):
        rounded = left.astype(jnp.float8_e4m3fn)
        q_smem[pl.ds(term * columns + part * mine, mine), :WIDTH] = lax.bitcast_convert_type(
            rounded, jnp.uint8
        )
        left = left - rounded.astype(jnp.float32)
    unit_ref[pl.ds(part * mine, mine)] = jnp.full((mine,), 1 / 32, jnp.float32)
    plgpu.commit_smem()  # see `add_values`


def scores_of(tile_ref, q_ref, _):
    terms = values(q_ref)[:, :WIDTH].reshape(2, -1, WIDTH)
    return values(tile_ref)[:, :WIDTH] @ terms.sum(axis=0).T


def token_scales(tile_ref, byte, _):
    return lax.bitcast_convert_type(tile_ref[...][:, byte : byte + 4], jnp.float32)


def any_above(scores, limits):
    return jnp.any(scores > limits).astype(jnp.int32)


def add_weights(sums, p, factors):
    return sums + factors @ p


def reduce_columns(values, scratch_ref, largest):
    if values.ndim == 1:  # sums of `add_weights`, whole here
        return values
    return values.max(axis=0) if largest else values.sum(axis=0)


def add_values(accumulators, tile_ref, p_ref, first_column, at_once, _):
    v = lax.dynamic_slice(values(tile_ref), (0, first_column), (64, 64 * len(accumulators)))
    # The interpreter wants a fence between a read and a later TMA write. Here a value has reached its register before its
    # reader frees the slot, and there is nothing to fence.
    plgpu.commit_smem()
    product = v.T @ p_ref[...].astype(jnp.float32)
    return [acc + product[64 * i : 64 * i + 64] for i, acc in enumerate(accumulators)]


def zero_rows(tile_ref, first, stop, _):
    row = jnp.arange(64)[:, None]
    tile_ref[...] = jnp.where((row >= first) & (row < stop), tile_ref[...], jnp.uint8(0))


def store_columns(ref, blocks, first_line, lines, column):
    out = jnp.concatenate(blocks).T.astype(ref.dtype)

    @pl.loop(0, lines)
    def line(i):
        row = lax.dynamic_index_in_dim(out, i, 0, keepdims=False)
        ref[first_line + i, pl.ds(column, out.shape[1])] = row


SUBSTITUTES = (
    split_queries, scores_of, token_scales, any_above, reduce_columns, add_weights, add_values, zero_rows, store_columns,
)  # fmt: skip


def main() -> None:
    """Rows cut between three blocks, windows, an empty row, drafts, ids translated in the kernel; rings used again."""
    mla_interpreter.substitute(mosaic_fp8_pairs, None)
    mla_few_interpreter.substitute_parts()
    for function in SUBSTITUTES:
        assert hasattr(mosaic_fp8_pairs, function.__name__)
        setattr(mosaic_fp8_pairs, function.__name__, function)
    lengths, starts = [77, 0, 900, 64, 130], [3, 0, 129, 0, 65]
    for shape, rows, blocks in (
        (dict(heads=5, s_q=3, page_size=32), 5, 3),
        (dict(heads=9, s_q=3, page_size=32), 5, 3),
        (dict(heads=48, page_size=64), 5, 6),
        # So few rows are merged by `mosaic_spread`; more than blocks, two parts at a time.
        (dict(heads=9, page_size=64), 3, 4),
        (dict(heads=33, page_size=64), 3, 4),
        (dict(heads=35, page_size=64), 11, 12),
        # So many blocks that the merge takes 8 queries at a time.
        (dict(heads=35, page_size=64), 5, 40),
    ):
        case = make_case(
            (lengths * 3)[:rows],
            kv_start=(starts * 3)[:rows],
            kv_dtype="float8_e4m3fn",
            log10_scales=(-3, 0),
            **shape,
        )
        mla_interpreter.forget_parts()
        with (
            redirect_stdout(StringIO()) as printed,
            plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
        ):
            out, lse = mosaic_fp8.mla_decode_mosaic_fp8(
                jnp.asarray(case.q),
                jnp.asarray(case.pool),
                case.source("virtual"),
                case.block_offset,
                config=mosaic_fp8.TuningConfig(blocks=blocks),
                **case.options,
            )
            out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
        assert "RACE DETECTED" not in printed.getvalue(), printed.getvalue()
        case.check(out, lse)
        mla_interpreter.check_parts(told=mosaic_parts.merged_early(rows))
    print("right, no races")


if __name__ == "__main__":
    main()
