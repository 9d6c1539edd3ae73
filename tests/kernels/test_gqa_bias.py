"""The bias by distance of the Mosaic GQA kernel, run thread by thread without a GPU.

The kernel emits it as MLIR for one warpgroup. Here the same function runs on NumPy arrays of 128 threads in place of MLIR
values, over a table whose lines lie between NaN.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from jax.experimental.mosaic.gpu.fragmented_array import WGMMA_LAYOUT

from pallas_kernels.gqa_decode import mosaic_bias

THREADS = np.arange(128)
SHAPE = (64, 64)


def threads(value) -> np.ndarray:
    return np.broadcast_to(np.asarray(value), (128,))


@pytest.fixture
def add_bias(monkeypatch):
    """Puts a NumPy warpgroup in the place of the MLIR dialects."""
    compare = {
        "slt": np.less,
        "sge": np.greater_equal,
        "ult": lambda a, b: (a.astype(np.int64) & 0xFFFFFFFF) < (b.astype(np.int64) & 0xFFFFFFFF),
    }
    table = {}

    def load(_, address, live, *, result_types, has_side_effects):
        assert result_types == "f32"
        assert has_side_effects
        assert np.all(address % 4 == 0)
        at = np.where(live != 0, address // 4, 0)
        assert np.all((at >= 0) & (at < table["values"].size))
        return np.where(live != 0, table["values"][at], np.float32(0))

    element = lambda static_position: static_position[0]
    arith = SimpleNamespace(
        constant=lambda ty, value: threads({"i32": np.int32, "i64": np.int64, "f32": np.float32}[ty](value)),
        addi=np.add, subi=np.subtract, muli=np.multiply, addf=np.add, mulf=np.multiply, andi=np.logical_and,
        divui=np.floor_divide, remui=np.mod, extsi=lambda _, x: x.astype(np.int64),
        extui=lambda ty, x: (x.astype(np.int64) & 0xFFFFFFFF) if ty == "i64" else x.astype(np.int32),
        cmpi=lambda predicate, a, b: compare[predicate](a, b),
        CmpIPredicate=SimpleNamespace(slt="slt", sge="sge", ult="ult"),
    )  # fmt: skip
    ir = SimpleNamespace(
        IntegerType=SimpleNamespace(get_signless=lambda bits: f"i{bits}"),
        IntegerAttr=SimpleNamespace(get=lambda _, value: value),
        F32Type=SimpleNamespace(get=lambda: "f32"),
        FloatAttr=SimpleNamespace(get=lambda _, value: value),
        MemRefType=lambda ty: SimpleNamespace(shape=ty),
        DenseI64ArrayAttr=SimpleNamespace(get=lambda at: at),
    )

    def insert(value, register, *, dynamic_position, static_position):
        register = register.copy()
        register[:, element(static_position)] = value
        return register

    vector = SimpleNamespace(
        extract=lambda register, *, dynamic_position, static_position: register[:, element(static_position)],
        insert=insert,
    )
    strides = lambda shape: [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
    utils = SimpleNamespace(
        thread_idx=lambda: THREADS.astype(np.int32) + 128,
        memref_ptr=lambda ref: ref,
        inline_ptx=load,
        get_contiguous_strides=strides,
    )
    for name, value in dict(
        arith=arith, ir=ir, vector=vector, mgpu=SimpleNamespace(utils=utils),
        llvm=SimpleNamespace(ptrtoint=lambda _, ref: threads(np.int64(0))),
        FragmentedArray=lambda *, _registers, _layout, _is_signed: _registers,
    ).items():  # fmt: skip
        monkeypatch.setattr(mosaic_bias, name, value)

    # Where each thread's registers lie in the tile, by the layout itself.
    shape = WGMMA_LAYOUT.registers_shape(SHAPE)
    tile_strides = WGMMA_LAYOUT.tiling.tile_strides((SHAPE[1], 1))
    row = 16 * (THREADS // 32) + THREADS % 32 // 4
    column = 2 * (THREADS % 4)

    def run(scores, bias, line, first_row, end_row, distance, first_query_row, sharing, unit):
        table["values"] = bias.reshape(-1)
        registers = np.empty(shape, object)
        places = {}
        for index in np.ndindex(shape):
            offset = sum(i * s for i, s in zip(index, tile_strides, strict=False))
            places[index] = row + offset // SHAPE[1], column + offset % SHAPE[1]
            at = places[index]
            registers[index] = np.stack([scores[at[0], at[1]], scores[at[0], at[1] + 1]], axis=1)
        fragmented = SimpleNamespace(registers=registers, shape=SHAPE, layout=WGMMA_LAYOUT)
        scalars = [threads(np.int32(x)) for x in (line, first_row, end_row, distance, first_query_row)]
        ref = SimpleNamespace(type=bias.shape)
        got = mosaic_bias._emit(fragmented, ref, scalars, sharing, unit)
        out = np.full(SHAPE, np.nan, np.float32)
        for index, (r, c) in places.items():
            out[r, c], out[r, c + 1] = got[index][:, 0], got[index][:, 1]
        return out

    return run


@pytest.mark.parametrize(
    "line, rows, distance, first_query_row, sharing",
    [(3, (0, 8), 40, 0, None), (-1, (4, 8), 10, 0, None), (5, (0, 64), 70, 64, 5), (0, (0, 10), 1, 0, 5)],
)
def test_bias_by_distance(add_bias, line, rows, distance, first_query_row, sharing):
    rng = np.random.default_rng(0)
    extent = 33
    scores = rng.normal(size=SHAPE).astype(np.float32)
    bias = np.full((80, extent), np.nan, np.float32)
    live = slice(line + rows[0], line + rows[1])
    bias[live] = rng.normal(size=(rows[1] - rows[0], extent))
    want = scores.copy()
    for r in range(*rows):
        query = 0 if sharing is None else (first_query_row + r) // sharing
        for c in range(SHAPE[1]):
            d = distance + query - c
            if 0 <= d < extent:
                want[r, c] += 2.5 * bias[line + r, d]
    assert np.any(want != scores)
    got = add_bias(scores, bias, line, *rows, distance, first_query_row, sharing, 2.5)
    np.testing.assert_allclose(got, want, rtol=1e-6)
