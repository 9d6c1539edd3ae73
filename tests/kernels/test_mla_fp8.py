"""The fp8 MLA decode kernel without a GPU: its shared-memory accesses lane by lane, and compiled for an H200.

The kernel emits its loads and conversions as MLIR for a warpgroup. Here the same functions run on NumPy arrays of 128
lanes in place of MLIR values, over a shared memory of bytes that counts bank conflicts, and their fragments are
multiplied as PTX says WGMMA does.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.mla_decode import mosaic_fp8_registers as registers
from pallas_kernels.mla_decode.mosaic_fp8 import TuningConfig, mla_decode_mosaic_fp8
from tests.deviceless import requires_plugin, shape
from tests.kernels.abstract import MLA_DECLINES, PAGE_DECLINES, compile_mla, source
from tests.kernels.test_mla_spread import column_of

LANES = 128
THREAD = np.arange(LANES)
WARP, G, Q = THREAD // 32, THREAD % 32 // 4, THREAD % 4
E4M3 = ml_dtypes.float8_e4m3fn


class Shared:
    """A ref of [rows, 128 * boxes] bytes under the 128-byte swizzle in tiles of [8, 128]."""

    def __init__(self, rows: int, boxes: int):
        self.type = SimpleNamespace(shape=(rows // 8, boxes, 8, 128))
        self.memory = np.zeros(rows * boxes * 128, np.uint8)
        row, byte = np.divmod(np.arange(rows * boxes * 128), boxes * 128)
        chunk = (byte % 128 // 16) ^ (row % 8)
        self.place = (row // 8 * boxes + byte // 128) * 1024 + row % 8 * 128 + chunk * 16 + byte % 16

    def write(self, rows: np.ndarray) -> None:
        self.memory[self.place] = rows.view(np.uint8).reshape(-1)

    def read(self) -> np.ndarray:
        return self.memory[self.place].reshape(self.type.shape[0] * 8, -1)


def conflict_free(addresses: np.ndarray, size: int) -> bool:
    """Whether each phase of a warp's access (lanes that move 128 bytes together) touches a bank once, or one word."""
    for lanes in addresses.reshape(-1, 128 // size):
        words = np.unique(np.concatenate([lanes // 4 + i for i in range(size // 4)]))
        if np.unique(words % 32).size != words.size:
            return False
    return True


def as_words(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint32).astype(np.int64)


@pytest.fixture
def warpgroup(monkeypatch):
    """Puts 128 NumPy lanes in the place of the MLIR builders; returns the list of what each memory access was."""
    accesses = []
    number = lambda value: np.full(LANES, int(value), np.int64)
    wrap = lambda value: value & 0xFFFFFFFF

    def load_shared(at, offset, words):
        memory, address = at.memory, at.address + offset
        accesses.append(("load", conflict_free(address, 4 * words)))
        assert (address % (4 * words) == 0).all()
        return [
            memory[address[:, None] + 4 * i + np.arange(4)] @ (1 << np.arange(0, 32, 8)) for i in range(words)
        ]

    def store_shared(at, offset, word, where):
        address = (at.address + offset)[where]
        accesses.append(("store", conflict_free(at.address + offset, 4)))
        at.memory[address[:, None] + np.arange(4)] = word[where][:, None] >> np.arange(0, 32, 8) & 0xFF

    def store_shared_words(at, offset, words, where):
        for i, word in enumerate(words):
            address = (at.address + offset + 4 * i)[where]
            at.memory[address[:, None] + np.arange(4)] = word[where][:, None] >> np.arange(0, 32, 8) & 0xFF

    class Address:
        def __init__(self, memory, address):
            self.memory, self.address = memory, address

    live = [np.ones(LANES, bool)]

    @contextmanager
    def when(condition):
        live.append(condition)
        yield
        live.pop()

    def store_global(values, pointer, alignment):
        assert not (2 * pointer.address % alignment).any()
        for i, value in enumerate(values):
            index = (pointer.address + i)[live[-1]]
            assert np.isnan(pointer.memory[index]).all(), "written twice"
            pointer.memory[index] = value[live[-1]]

    def add(a, b):
        if isinstance(a, Address):
            return Address(a.memory, a.address + b)
        return a + b

    def halves(word):
        raw = wrap(word)[:, None] >> np.arange(0, 32, 8) & 0xFF
        pairs = raw.astype(np.uint8).view(E4M3).astype(np.float16)
        return [pairs[:, :2], pairs[:, 2:]]

    def prmt(x, y, selector):
        raw = (wrap(x) | wrap(y) << 32)[:, None] >> np.arange(0, 64, 8) & 0xFF
        return raw[:, [selector >> 4 * i & 7 for i in range(4)]] @ (1 << np.arange(0, 32, 8))

    def bf16(word):
        return np.stack([wrap(word) << 16, wrap(word) & 0xFFFF0000], 1).astype(np.uint32).view(np.float32)

    def two_terms(low, high, power):
        left = (
            np.concatenate([bf16(low), bf16(high)], 1)
            * wrap(power).astype(np.uint32).view(np.float32)[:, None]
        )
        words = []
        for _ in range(2):
            term = left.astype(E4M3)
            words.append(as_words(term.view(np.uint8))[:, 0])
            left = left - term.astype(np.float32)
        return words

    def larger(sizes, word):
        value = (
            np.maximum(bf16(sizes), np.abs(bf16(word))).astype(np.float32).view(np.uint32).astype(np.int64)
        )
        return value[:, 0] >> 16 | value[:, 1]

    def repeat(trips, body):
        for i in range(trips):
            body(number(i))

    compare = {"slt": np.less, "eq": np.equal}
    scalar = lambda value: SimpleNamespace(registers=SimpleNamespace(item=lambda: number(value)))
    replaced = dict(
        plgpu=SimpleNamespace(
            inline_mgpu=lambda **_: lambda body: lambda *args: body(
                None, *(scalar(x) if isinstance(x, jax.Array) else x for x in args)
            ),
            RefType=lambda *_: None, ShapeDtypeStruct=lambda *_, **__: None,
        ),
        arith=SimpleNamespace(
            remui=np.mod, muli=np.multiply, addi=np.add, subi=np.subtract, extsi=lambda _, x: x, select=np.where,
            maxui=np.maximum, minui=np.minimum, andi=np.logical_and, constant=lambda _, value: number(value),
            cmpi=lambda predicate, a, b: compare[predicate](a, b),
            CmpIPredicate=SimpleNamespace(slt="slt", eq="eq"),
            truncf=lambda _, values: [value.astype(ml_dtypes.bfloat16) for value in values],
        ),
        ir=SimpleNamespace(
            MemRefType=lambda type_: type_, IntegerType=SimpleNamespace(get_signless=lambda _: None),
            IntegerAttr=SimpleNamespace(get=lambda _, value: value), VectorType=SimpleNamespace(get=lambda *_: None),
            F32Type=SimpleNamespace(get=lambda: None),
        ),
        llvm=SimpleNamespace(
            mlir_undef=lambda _: [], insertelement=lambda values, value, _: [*values, value], store=store_global
        ),
        utils=SimpleNamespace(
            thread_idx=lambda: THREAD + 256, WARPGROUP_SIZE=LANES, memref_ptr=lambda ref: Address(ref.memory, number(0)),
            shfl_bfly=lambda value, distance: value[THREAD ^ distance], when=when, bytewidth=lambda _: 2,
            getelementptr=lambda base, index, _: Address(base.memory, base.address + index[0]),
        ),
        _element=lambda register, e: register[:, e], _by_place=lambda block: block.places,
        _words_array=lambda words: words, _words_of=lambda words: words, _f16_array=lambda words, _: words,
        _words_type=lambda _: None,
        _shared=lambda ref: Address(ref.memory, number(0)), _load_shared=load_shared, _store_shared=store_shared,
        _repeat=repeat, _halves_to_f16=halves, _prmt=prmt, _larger_sizes=larger,
        _two_terms=two_terms, _store_shared_2=store_shared_words,
        _const=number, _add=add, _mul=lambda a, b: a * b, _and=lambda a, b: a & b & 0xFFFFFFFF, _or=np.bitwise_or,
        _xor=np.bitwise_xor, _shl=lambda a, b: wrap(a << b), _shr=lambda a, b: wrap(a) >> b,
    )  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(registers, name, value)
    return accesses


def matrix(fragment: dict, columns: int) -> np.ndarray:
    """[64, columns] that the 128 threads' registers make up: PTX ISA, register fragments of wgmma.m64nNk16."""
    out = np.full((64, columns), np.nan, np.float32)
    for (row, column), pairs in fragment.items():
        for b in range(2):
            out[16 * WARP + G + row, column + 2 * Q + b] = pairs[:, b]
    return out


def tile(boxes=5, seed=0):
    rng = np.random.default_rng(seed)
    rows = np.where(rng.random((64, 128 * boxes)) < 0.01, 0x7E, rng.integers(0, 256, (64, 128 * boxes)))
    rows[(rows & 0x7F) == 0x7F] = 0x80  # no NaN
    rows = rows.astype(np.uint8)
    shared = Shared(64, boxes)
    shared.write(rows)
    return shared, rows.view(E4M3).astype(np.float32)


@pytest.mark.parametrize("boxes, blocks, side", [(5, 4, 0), (5, 4, 1), (3, 2, 0), (3, 2, 1)])
def test_fragments_of_v(warpgroup, boxes, blocks, side):
    shared, values = tile(boxes)
    first = 64 * blocks * side
    row = np.arange(64)
    w, h, g = row // 16, row % 16 // 8, row % 8
    for step in range(4):
        words = registers.v_bytes(shared, step, first, blocks, None)
        fragments = [
            fragment
            for block in range(0, blocks, 2)
            for fragment in registers.v_fragments(words, blocks, block, 2)
        ]
        for b, fragment in enumerate(fragments):
            columns = first + 16 * blocks * w + 2 * blocks * g + 2 * b + h
            v = values[16 * step : 16 * step + 16, columns]
            np.testing.assert_array_equal(matrix(fragment, 16), v.T)
    assert blocks == 2 or all(free for _, free in warpgroup)


@pytest.mark.parametrize(
    "columns, lines, boxes", [(16, 9, 5), (16, 16, 5), (32, 32, 5), (32, 27, 5), (32, 30, 3)]
)
def test_queries_in_shared_memory_become_two_terms(warpgroup, columns, lines, boxes):
    rng = np.random.default_rng(1)
    width = 128 * boxes - 64
    q = (rng.normal(size=(columns, width)) * 2.0 ** rng.integers(-40, 40, (columns, 1))).astype(
        ml_dtypes.bfloat16
    )
    rows = np.full((64, width + 64), 0xFF, np.uint8)  # NaN where no line is
    rows[:columns] = q.view(np.uint8)[:, : width + 64]
    rows[32 : 32 + columns] = q.view(np.uint8)[:, -width - 64 :]
    raw, target = Shared(64, boxes), Shared(2 * columns, boxes)
    raw.write(rows)
    units = SimpleNamespace(memory=np.zeros(4 * columns, np.uint8))
    for part in range(2):
        registers.split_queries(raw, jnp.int32(lines), jnp.int32(part), 2, target, units, None)
    assert all(free for kind, free in warpgroup if kind == "load")
    check_terms(target, units, q[:lines])


@pytest.mark.parametrize("v_width", [256, 512])
@pytest.mark.parametrize("queries, lines", [(16, 3), (16, 16), (32, 27)])
def test_rows_of_the_result_reach_their_columns(warpgroup, v_width, queries, lines):
    result = np.random.default_rng(lines).normal(size=(v_width, queries)).astype(ml_dtypes.bfloat16)
    out = SimpleNamespace(
        memory=np.full((lines + 7) * v_width, np.nan, ml_dtypes.bfloat16),
        type=SimpleNamespace(shape=(lines + 7, v_width), element_type=None),
    )
    rows = result[column_of(v_width, paired=True)].reshape(2, v_width // 128, 64, queries).astype(np.float32)
    for side in range(2):
        blocks = [
            SimpleNamespace(
                shape=block.shape,
                places={
                    (h, n): np.stack([block[16 * WARP + h + G, n + 2 * Q + e] for e in range(2)], axis=1)
                    for h in (0, 8)
                    for n in range(0, queries, 8)
                },
            )
            for block in rows[side]
        ]
        registers.store_columns(out, blocks, 3, lines, side * v_width // 2)
    want = np.full((lines + 7, v_width), np.nan, ml_dtypes.bfloat16)
    want[3 : 3 + lines] = result.T[:lines]
    np.testing.assert_array_equal(out.memory.view(np.uint16).reshape(want.shape), want.view(np.uint16))


def check_terms(target: Shared, units: SimpleNamespace, q: np.ndarray) -> None:
    unit = units.memory.view(np.float32).astype(np.float64)
    (lines, width), columns = q.shape, len(unit)
    terms = target.read().view(E4M3)[:, :width].astype(np.float64).reshape(2, columns, width)
    want = q.astype(np.float64)
    largest = np.abs(want).max(axis=1, keepdims=True)
    got = (terms.sum(axis=0) * unit[:, None])[:lines]
    assert (np.abs(got - want) <= 2.0**-17 * largest).all()
    assert (got == want)[np.abs(want) >= 2.0**-9 * largest].all()  # both terms together have bf16's 8 bits
    assert not terms[:, lines:].any()
    assert (np.abs(terms[0, :lines]).max(axis=1) >= 2**7).all()
    assert np.isfinite(terms).all()


OPTIONS = {"kv_dtype": jnp.float8_e4m3fn, "row_width": 640, "v_width": 512, "sm_scale": 0.1}


def compiled(rows, heads, delivery="table", page_size=64, s_q=1, logit_cap=None, v_width=512):
    """From a pool of 100 GB: a copy of it, or a byte for each of its rows, is more than all that the tests allow."""
    row_width = v_width + 128
    options = {**OPTIONS, "row_width": row_width, "v_width": v_width, "logit_cap": logit_cap}
    pool_blocks = 100_000_000_000 // (page_size * row_width)
    return compile_mla(rows, heads, delivery, page_size, s_q, pool_blocks, row_width, **options)


@pytest.mark.deviceless
@requires_plugin
@pytest.mark.parametrize(
    "rows, heads, options",
    [
        (300, 16, {}),
        (5, 9, {"delivery": "virtual", "page_size": 8}),
        (4, 128, {"s_q": 8, "page_size": 128, "logit_cap": 30.0}),
        (40, 32, {"v_width": 256}),
    ],
    ids=["table", "virtual ids, pages of 8", "draft of 8, 32 query tiles", "half as wide"],
)
def test_fits_the_gpu(rows, heads, options):
    """Shared memory in budget; two kernels, and no temporaries but the parts of cut rows and queries padded to eights: no copy of
    the pool, no row in another dtype."""
    program = compiled(rows, heads, **options)
    queries = options.get("s_q", 1) * heads
    columns = 16 if queries <= 16 else 32
    q_tiles = -(-queries // columns)
    groups = 132 // q_tiles
    # Of each query f16 and lse, of each tile of them 8 scales and a count.
    parts = 2 * groups * q_tiles * (columns * (2 * options.get("v_width", 512) + 4) + 9 * 4)
    padded = 0 if queries % 8 == 0 else rows * (queries + 8) * 2 * (options.get("v_width", 512) + 64)
    assert program.temp_bytes <= parts + padded + 16 * (rows + groups) + 4096
    assert [thunk.kind for thunk in program.launches][-2:] == ["kCustomCall"] * 2
    assert len(program.launches) == (3 if padded else 2)


@pytest.mark.deviceless
@requires_plugin
@pytest.mark.parametrize(
    "rows, heads, v_width", [(64, 16, 512), (64, 32, 512), (64, 3, 512), (1, 35, 512), (64, 35, 256)]
)
def test_products_run_side_by_side(rows, heads, v_width, ptxas_reports):
    """For want of registers ptxas waits after each WGMMA."""
    compiled(rows, heads, v_width=v_width)
    reports = ptxas_reports()
    assert len(reports) == 2
    for report in reports:
        assert " 0 bytes spill stores" in report
        assert "serialized" not in report
        assert "warpgroup.wait is injected" not in report


GOOD = dict(
    q=shape((2, 1, 16, 576), "bfloat16"),
    buffer=shape((64 * 640,), "uint8"),
    source=source("table", 2, 64),
    block_offset=0,
)


@pytest.mark.parametrize(
    "changes, reason",
    [
        *MLA_DECLINES,
        *PAGE_DECLINES,
        ({"q": shape((2, 1, 16, 576), "float32")}, "q must be bfloat16 and KV float8_e4m3fn, got float32"),
        ({"kv_dtype": jnp.bfloat16}, "got bfloat16 and bfloat16"),
        ({"row_width": 592}, "row_width v_width \\+ 128, got 576, 592 and v_width 512"),
        (
            {"q": shape((2, 1, 16, 192), "bfloat16"), "row_width": 256, "v_width": 128},
            "v_width must be 256 or 512",
        ),
    ],
)
def test_declines_with_the_reason(changes, reason):
    with pytest.raises(NotImplementedError, match=reason):
        mla_decode_mosaic_fp8(**{**GOOD, **OPTIONS, **changes})


def test_config_is_checked():
    with pytest.raises(ValueError, match="blocks must be at least 1, got 0"):
        TuningConfig(blocks=0)
