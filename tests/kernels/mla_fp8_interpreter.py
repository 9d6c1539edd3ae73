"""Runs the fp8 MLA decode kernel in Pallas' GPU interpreter, with race detection: `python -m tests.kernels.mla_fp8_interpreter`.

See mla_interpreter.py. What the kernel does in inline MLIR is replaced by its meaning (test_mla_fp8.py runs those functions
lane by lane), so this shows its control: rings, barriers, masks, splits and the scale of a token.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode import mosaic_fp8
from pallas_kernels.mla_decode.mosaic_fp8_registers import token_of
from tests.kernels import mla_interpreter
from tests.kernels.mla_case import make_case

WIDTH = 576


def ordered(rows):
    return jnp.take(rows, token_of(lax.iota(jnp.int32, 64)), axis=0, mode="clip")


def values(tile_ref):
    return ordered(lax.bitcast_convert_type(tile_ref[...], jnp.float8_e4m3fn).astype(jnp.float32))


def load_queries(q_ref, first_line, lines, q_smem, unit_ref, bit_chunks, _):
    for i in range(q_smem.shape[0]):
        line = q_ref[first_line + jnp.minimum(i, lines - 1)]
        q_smem[i] = jnp.where(i < lines, line.astype(jnp.float32) / 4, 0).astype(jnp.float16)
    unit_ref[...] = jnp.full(unit_ref.shape, 4, jnp.float32)


def scores_of(tile_ref, q_ref, bit_chunks, _):
    return values(tile_ref)[:, :WIDTH] @ q_ref[...].astype(jnp.float32).T


def token_scales(tile_ref, byte, _):
    return ordered(lax.bitcast_convert_type(tile_ref[...][:, byte : byte + 4], jnp.float32))


def first_values(tile_ref, first_column, blocks, by_bits, _):
    return ()


def add_values(accumulators, tile_ref, p_ref, first, first_column, in_flight, by_bits, _):
    v = lax.dynamic_slice(values(tile_ref), (0, first_column), (64, 64 * len(accumulators)))
    product = v.T @ p_ref[...].astype(jnp.float32)
    return [acc + product[64 * i : 64 * i + 64] for i, acc in enumerate(accumulators)]


def zero_rows(tile_ref, first, stop, _):
    row = jnp.arange(64)[:, None]
    tile_ref[...] = jnp.where((row >= first) & (row < stop), tile_ref[...], jnp.uint8(0))


def store_columns(ref, blocks, first_line, lines, column):
    out = jnp.concatenate(blocks).T.astype(ref.dtype)

    @pl.loop(0, lines)
    def line(i):
        ref[first_line + i, pl.ds(column, out.shape[1])] = lax.dynamic_index_in_dim(out, i, 0, keepdims=False)


def store_vector(ref, vector, first, count):
    @pl.loop(0, count)
    def element(i):
        ref[first + i] = lax.dynamic_index_in_dim(vector, i, 0, keepdims=False)


def main() -> None:
    """Rows cut between three blocks, windows, an empty row, drafts of three queries, ids translated in the kernel."""
    mla_interpreter.substitute(mosaic_fp8, None)
    for replacement in (
        load_queries, scores_of, first_values, token_scales, add_values, zero_rows, store_columns, store_vector,
    ):  # fmt: skip
        setattr(mosaic_fp8, replacement.__name__, replacement)
    case = make_case(
        [77, 0, 130, 64, 300], heads=9, s_q=3, page_size=32, kv_start=[3, 0, 65, 0, 129], kv_dtype="float8_e4m3fn",
        log10_scales=(-3, 0),
    )  # fmt: skip
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        out, lse = mosaic_fp8.mla_decode_mosaic_fp8(
            jnp.asarray(case.q),
            jnp.asarray(case.pool),
            case.source("virtual"),
            case.block_offset,
            config=mosaic_fp8.TuningConfig(blocks=3),
            **case.options,
        )
        out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
        assert not mla_interpreter.gpu_callbacks.get_races().races_found
    case.check(out, lse)
    print("right, no races")


if __name__ == "__main__":
    main()
