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

from pallas_kernels.mla_decode import (
    mosaic_fp8,
    mosaic_fp8_block,
    mosaic_fp8_few,
    mosaic_fp8_pairs,
)
from tests.kernels import mla_interpreter
from tests.kernels.mla_case import make_case

WIDTH = 576


def values(tile_ref):
    return lax.bitcast_convert_type(tile_ref[...], jnp.float8_e4m3fn).astype(jnp.float32)


def load_queries(q_ref, first_line, lines, q_smem, unit_ref, _, part=0, parts=1):
    columns = q_smem.shape[0] // 2
    mine = columns // parts

    @pl.loop(part * mine, (part + 1) * mine)
    def load(i):
        line = q_ref[first_line + jnp.minimum(i, lines - 1)]
        left = jnp.where(i < lines, line.astype(jnp.float32) * 32, 0)
        for term in range(2):
            rounded = left.astype(jnp.float8_e4m3fn)
            q_smem[term * columns + i, :WIDTH] = lax.bitcast_convert_type(rounded, jnp.uint8)
            left = left - rounded.astype(jnp.float32)
        unit_ref[i] = jnp.float32(1 / 32)


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


def prefetch_queries(*_):
    pass


def zero_rows(tile_ref, first, stop, _):
    row = jnp.arange(64)[:, None]
    tile_ref[...] = jnp.where((row >= first) & (row < stop), tile_ref[...], jnp.uint8(0))


def send(blocks, ref, _):
    sent = lax.bitcast_convert_type(jnp.stack(blocks).reshape(-1), jnp.uint8).reshape(-1)
    ref[...] = jnp.pad(sent, (0, ref.shape[0] * ref.shape[1] - sent.shape[0])).reshape(ref.shape)


def receive(blocks, ref, _):
    shape = (len(blocks), *blocks[0].shape)
    sent = ref[...].reshape(-1)[: 4 * int(np.prod(shape))].reshape(-1, 4)
    sent = lax.bitcast_convert_type(sent, jnp.float32).reshape(shape)
    return [block + sent[i] for i, block in enumerate(blocks)]


def store_columns(ref, blocks, first_line, lines, column, of_blocks=None, first=0):
    out = jnp.concatenate(blocks).T.astype(ref.dtype)

    @pl.loop(0, lines)
    def line(i):
        row = lax.dynamic_index_in_dim(out, i, 0, keepdims=False)
        ref[first_line + i, pl.ds(column + 64 * first, out.shape[1])] = row


def store_vector(ref, vector, first, count):
    @pl.loop(0, count)
    def element(i):
        ref[first + i] = lax.dynamic_index_in_dim(vector, i, 0, keepdims=False)


SUBSTITUTES = (
    load_queries, split_queries, scores_of, token_scales, any_above, reduce_columns, add_weights, add_values, zero_rows,
    prefetch_queries, send, receive, store_columns, store_vector,
)  # fmt: skip


def main() -> None:
    """Rows cut between three blocks, windows, an empty row, drafts, ids translated in the kernel; rings used again."""
    for module in (mosaic_fp8_block, mosaic_fp8_few, mosaic_fp8_pairs):
        mla_interpreter.substitute(module, None)
        for function in SUBSTITUTES:
            if hasattr(module, function.__name__):
                setattr(module, function.__name__, function)
    few = dict(heads=5, s_q=3, page_size=32)
    pairs = dict(heads=9, s_q=3, page_size=32)
    many = dict(heads=48, page_size=64)
    for shape, blocks in ((few, 3), (pairs, 3), (many, 4)):
        case = make_case(
            [77, 0, 130, 64, 700],
            kv_start=[3, 0, 65, 0, 129],
            kv_dtype="float8_e4m3fn",
            log10_scales=(-3, 0),
            **shape,
        )
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
    print("right, no races")


if __name__ == "__main__":
    main()
