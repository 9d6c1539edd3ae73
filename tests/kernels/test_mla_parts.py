"""Parts of cut rows as `mosaic_parts.leave` writes them, run on a CPU lane by lane over NumPy memory."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_decode import mosaic_parts
from tests.kernels.test_mla_spread import column_of, in_lines

LANES = 128
THREAD = np.arange(LANES)
WARP, G, Q = THREAD // 32, THREAD % 32 // 4, THREAD % 4


@pytest.fixture
def memories(monkeypatch):
    """Puts 128 NumPy lanes in the place of the MLIR builders; returns the arrays that stores go to, of 4-byte words."""
    memories = {}
    bits = lambda value: value.astype(np.float32).view(np.uint32).astype(np.int64)

    def store(address, values, live):
        name = address.name
        byte = address.byte
        assert not (byte % (4 * len(values))).any()
        for i, value in enumerate(values):
            index = byte[live] // 4 + i
            assert (memories[name][index] == POISON).all(), "written twice"
            memories[name][index] = value[live]

    def inline_ptx(text, *args, **_):
        if "abs.f32" in text:
            return np.fmax(*map(np.abs, args))
        if "redux" in text:
            return args[0].reshape(4, 32).max(axis=1).repeat(32)
        if "cvt.rn.f16x2" in text:
            low, high = (x.astype(np.float16).view(np.uint16).astype(np.uint32) for x in args)
            return low | high << 16
        if "cvt.rn.bf16x2" in text:
            low, high = (x.astype(jnp.bfloat16).view(np.uint16).astype(np.uint32) for x in args)
            return low | high << 16
        if "setp.lt" in text:
            offset = int(re.search(r"\[\$0\+(\d+)\]", text)[1])
            return store(args[0] + offset, args[3:], args[1] < args[2])
        if "@one" in text:
            return store(args[0], [bits(args[2]).astype(np.uint32)], args[1] % 32 == 0)
        offset = int(re.search(r"\[\$0\+(\d+)\]", text)[1])
        return store(args[0] + offset, args[1:], np.ones(LANES, bool))

    class Address:
        def __init__(self, name, byte):
            self.name, self.byte = name, byte

        def __add__(self, more):
            return Address(self.name, self.byte + more)

        __radd__, __array_ufunc__ = __add__, None

    scalar = lambda value: SimpleNamespace(registers=SimpleNamespace(item=lambda: np.full(LANES, int(value))))
    replaced = dict(
        plgpu=SimpleNamespace(
            inline_mgpu=lambda **_: lambda body: lambda *args: body(
                None, *(scalar(x) if isinstance(x, jax.Array) else x for x in args)
            ),
            RefType=lambda *_: None,
        ),
        ir=SimpleNamespace(
            IntegerType=SimpleNamespace(get_signless=lambda bits: bits), F32Type=SimpleNamespace(get=lambda: "f32"),
            MemRefType=lambda type_: type_,
        ),
        arith=SimpleNamespace(
            addi=lambda a, b: a + b, muli=np.multiply, subi=np.subtract, shrui=np.right_shift, shli=np.left_shift,
            andi=np.bitwise_and, extsi=lambda _, x: x, minui=np.minimum, maxnumf=np.fmax, mulf=np.multiply,
            cmpi=lambda kind, a, b: np.less(a, b) if kind == "ult" else None, select=np.where,
            divui=np.floor_divide, remui=np.mod,
            CmpIPredicate=SimpleNamespace(ult="ult"),
        ),
        llvm=SimpleNamespace(
            ptrtoint=lambda _, name: Address(getattr(name, "name", name), 0), extractelement=lambda register, e: register[:, int(e[0])],
            bitcast=lambda kind, x: x.astype(np.uint32).view(np.float32) if kind == "f32" else bits(x),
        ),
        utils=SimpleNamespace(
            thread_idx=lambda: THREAD + 256, WARPGROUP_SIZE=LANES, memref_ptr=lambda name: name, inline_ptx=inline_ptx
        ),
        _const=lambda value, _=None: np.full(LANES, value),
        _places=lambda layout, shape, queries: ((place, place) for place in layout),
    )  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(mosaic_parts, name, value)
    return memories


POISON = 0xDEADBEEF


class Registers(dict):
    shape = ()


def registers(block: np.ndarray):
    """[64, queries] in the WGMMA layout."""
    places = [(half, query) for half in (0, 8) for query in range(0, block.shape[1], 8)]
    of = {
        (half, query): np.stack([block[16 * WARP + half + G, query + 2 * Q + e] for e in range(2)], axis=1)
        for half, query in places
    }
    return SimpleNamespace(layout=places, registers=Registers(of), shape=block.shape)


def left(memories, part):
    """(words, scales) that two warpgroups leave of f32 [queries, 512] in the second of two slots."""
    queries, slot = len(part), 1
    memories["part"] = np.full((slot + 1) * queries * 256, POISON, np.uint32)
    memories["scales"] = np.full((slot + 1) * 8, POISON, np.uint32)
    for half in range(2):
        blocks = [
            registers(part[:, first : first + 64].T) for first in range(256 * half, 256 * half + 256, 64)
        ]
        line = mosaic_parts.line_of(slot, 4 * half, queries, 512)
        mosaic_parts.leave(
            blocks,
            "part",
            line,
            "scales",
            mosaic_parts.first_scale(slot, half),
            pitch=queries,
            queries=queries,
        )
    assert (memories["part"][: queries * 256] == POISON).all()
    assert (memories["scales"][:8] == POISON).all()
    return memories["part"][queries * 256 :].reshape(-1, 256), memories["scales"][8:].view(np.float32)


@pytest.mark.parametrize("queries", [8, 24, 32])
def test_parts_lie_as_the_merges_read_them(memories, queries):
    part = np.random.default_rng(queries).normal(size=(queries, 512)).astype(np.float32)
    part *= np.exp2(np.random.default_rng(0).integers(-60, 60, 8).repeat(64))
    words, scales = left(memories, part)
    want, want_scales = in_lines(part)
    np.testing.assert_array_equal(scales, want_scales)
    np.testing.assert_array_equal(words, want)


@pytest.mark.parametrize(
    "columns, queries, pitch, tile", [(16, 8, 8, 0), (32, 24, 24, 0), (32, 32, 96, 1), (32, 32, 64, 0)]
)
def test_a_tile_of_a_part_takes_its_own_lines(memories, columns, queries, pitch, tile):
    """The last of a block's columns may be none of the part's, and a slot may have lines of other tiles between its own."""
    values = np.random.default_rng(columns).normal(size=(columns, 256)).astype(np.float32)
    values[queries:] = 1e30
    memories.update(part=np.full(pitch * 128, POISON, np.uint32), scales=np.full(4, POISON, np.uint32))
    blocks = [registers(values[:, first : first + 64].T) for first in range(0, 256, 64)]
    mosaic_parts.leave(blocks, "part", tile * columns // 8, "scales", 0, pitch=pitch, queries=queries)
    lines = np.full((4, pitch // 8, 256), POISON, np.uint32)
    want, scales = in_lines(np.hstack([values[:queries], values[:queries]]))
    lines[:, tile * columns // 8 :][:, : queries // 8] = want.reshape(8, queries // 8, 256)[:4]
    np.testing.assert_array_equal(memories["part"], lines.reshape(-1))
    np.testing.assert_array_equal(memories["scales"].view(np.float32), scales[:4])


@pytest.mark.parametrize("queries, of", [(8, 8), (24, 21), (32, 32)])
@pytest.mark.parametrize("v_width, block", [(256, 3), (512, 0), (512, 6)])
def test_paired_rows_reach_their_columns(memories, queries, of, v_width, block):
    """Of the row of a batch that has lines 3 to 3 + `of`."""
    values = np.random.default_rng(queries).normal(size=(64, queries)).astype(np.float32)
    memories["out"] = np.full((of + 7) * v_width // 2, POISON, np.uint32)
    out = SimpleNamespace(name="out", type=SimpleNamespace(shape=(of + 7, v_width)))
    mosaic_parts.store_pairs(out, registers(values), 3, of, block)
    want = np.full((of + 7, v_width // 2), POISON, np.uint32).view(np.uint16)
    columns = column_of(v_width, paired=True)[64 * block : 64 * block + 64]
    want[3 : 3 + of, columns] = values[:, :of].T.astype(jnp.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(memories["out"].view(np.uint16).reshape(of + 7, v_width), want)


@pytest.mark.parametrize("tiny", [0.0, 1e-38])
def test_a_part_of_almost_nothing(memories, tiny):
    words, scales = left(memories, np.full((8, 512), tiny, np.float32))
    assert np.isfinite(scales).all()
    assert (scales > 0).all()
    assert np.isfinite(words.view(np.float16)).all()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_an_element_that_is_no_number_spoils_no_other(memories, bad):
    part = np.random.default_rng(1).normal(size=(8, 512)).astype(np.float32)
    good, good_scales = (x.copy() for x in left(memories, part))
    part[3, 70] = bad
    words, scales = left(memories, part)
    scale = lambda scales: scales.reshape(2, 1, 4, 1).repeat(4, axis=1).repeat(128, axis=3).reshape(8, 512)
    value = lambda words, scales: words.view(np.float16).astype(np.float32) * scale(scales)
    spoilt = ~np.isfinite(words.view(np.float16))
    assert spoilt.sum() == 1
    np.testing.assert_array_equal(value(words, scales)[spoilt], np.float32(bad))
    np.testing.assert_allclose(
        value(words, scales)[~spoilt], value(good, good_scales)[~spoilt], rtol=2**-10, atol=1e-6
    )
