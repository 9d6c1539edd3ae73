"""The PTX that merges the parts of few rows, run on a CPU lane by lane over NumPy memory.

Of PTX there is here what this code uses. What the compiler makes of it, and what it gives on a GPU, is in test_mla_few.py.
"""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_decode import mosaic_spread

LANES = np.arange(32)
INT = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "and": lambda a, b: a & b,
    "shr": lambda a, b: a >> b,
    "mul": lambda a, b: a * b,
    "mad": lambda a, b, c: a * b + c,
    "cvt": lambda a: a,
    "mov": lambda a: a,
}
FLOAT = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "fma": lambda a, b, c: a * b + c,
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda a: 1 / a,
    "mov": lambda a: a,
}
COMPARE = {"ge": np.greater_equal, "gt": np.greater, "eq": np.equal, "lt": np.less}


class Memory:
    """Arrays of 4-byte words at addresses far apart; an access outside of them, or to a word never written, fails."""

    def __init__(self, **arrays: np.ndarray):
        self.start = {
            name: (i + 1) << 40 if array.ndim == 2 else 1 << 10
            for i, (name, array) in enumerate(arrays.items())
        }
        self.arrays = {name: array.reshape(-1) for name, array in arrays.items()}

    def words(self, address: np.ndarray):
        """(the array, indices in it) of the lanes' addresses."""
        for name, array in self.arrays.items():
            index, rest = np.divmod(address - self.start[name], 4)
            if ((index >= 0) & (index < array.size)).all():
                assert not rest.any()
                return array, index
        raise AssertionError(f"addresses {address}")


def run_warp(text: str, operands, warp: int, memory: Memory) -> int:
    """Runs ``text``, whose ``$i`` are `operands`; returns how often the warp came to the barrier."""
    code, labels = [], {}
    for statement in re.sub(r"\$(\d+)", lambda m: str(operands[int(m[1])]), text.strip()[1:-1]).split(";"):
        statement = statement.strip()
        while label := re.match(r"([A-Z]+):\s*", statement):
            labels[label[1]] = len(code)
            statement = statement[label.end() :]
        if statement and not statement.startswith("."):
            code.append(statement)
    registers = {"%tid.x": 32 * warp + LANES}

    def value(name: str):
        if re.fullmatch(r"0f[0-9A-F]{8}", name):
            return np.full(32, np.uint32(int(name[2:], 16)).view(np.float32))
        return np.full(32, int(name)) if re.fullmatch(r"-?\d+", name) else registers[name]

    def assign(name: str, new, live):
        registers[name] = new if live.all() else np.where(live, new, registers[name])

    barriers = at = 0
    while at < len(code):
        predicate, opcode, rest = re.fullmatch(r"(?:@(\w+) )?(\S+)\s*(.*)", code[at]).groups()
        at += 1
        live = np.ones(32, bool) if predicate is None else registers[predicate]
        name, *kinds = opcode.split(".")
        arguments = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
        if name == "bra":
            assert live.all() or not live.any(), "lanes part"
            if live.all():
                at = labels[arguments[0]]
        elif name == "bar":
            barriers += 1
        elif name in ("ld", "st"):
            names, place = arguments if name == "ld" else arguments[::-1]
            base, _, offset = place[1:-1].partition("+")
            names = re.findall(r"\w+", names)
            if not live.any():
                continue
            assert not ((value(base) + int(offset or 0))[live] % (4 * len(names))).any(), "not aligned"
            for i, register in enumerate(names):
                array, index = memory.words((value(base) + int(offset or 0) + 4 * i)[live])
                if name == "st":
                    array[index] = value(register)[live]
                else:
                    loaded = np.zeros(32, array.dtype)
                    loaded[live] = array[index]
                    assert (loaded[live].view(np.uint32) != POISON.view(np.uint32)).all(), "never written"
                    assign(register, loaded, live)
        elif name == "setp":
            assign(arguments[0], COMPARE[kinds[0]](*map(value, arguments[1:])), live)
        elif name == "selp":
            yes, no, condition = map(value, arguments[1:])
            assign(arguments[0], np.where(condition, yes, no), live)
        elif arguments[0].startswith("{"):  # the halves of a register
            low, high = re.findall(r"\w+", arguments[0])
            assign(low, (value(arguments[1]) & 0xFFFF).astype(np.uint16), live)
            assign(high, (value(arguments[1]) >> 16).astype(np.uint16), live)
        elif kinds[-1] == "f16":
            assign(arguments[0], value(arguments[1]).view(np.float16).astype(np.float32), live)
        elif "bf16x2" in kinds:
            high, low = (
                value(x).astype(jnp.bfloat16).view(np.uint16).astype(np.uint32) for x in arguments[1:]
            )
            assign(arguments[0], (high << 16) | low, live)
        else:
            operation = (FLOAT if kinds[-1] == "f32" else INT)[name]
            with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
                result = operation(*map(value, arguments[1:]))
            if kinds[-1] == "u32" and "wide" not in kinds:
                assert ((result >= 0) & (result < 2**32))[live].all(), "more than 32 bits"
            assign(arguments[0], result, live)
    return barriers


POISON = np.float32(-1.2345e33)


def in_lines(part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[queries, v_width] as `mosaic_parts.leave` leaves it, two f16 a word, and the scales of each half of V and warp.

    A thread has its (column, query), the next query, and these 8 columns on.
    """
    queries, v_width = part.shape
    # Query in fours of pairs; column in halves of V, blocks, warps, halves, rows.
    lines = part.reshape(queries // 8, 4, 2, 2, v_width // 128, 4, 2, 8)
    largest = np.maximum(np.abs(lines).max(axis=(0, 1, 2, 4, 6, 7)), 1e-30)
    scales = np.exp2(np.floor(np.log2(largest)) - 14).astype(np.float32)
    scaled = (lines / scales[:, None, :, None, None]).astype(np.float16)
    return scaled.transpose(3, 4, 0, 5, 7, 1, 6, 2).reshape(-1, 512).view(np.uint32), scales.reshape(-1)


def column_of(v_width: int, paired: bool) -> np.ndarray:
    """Column of V of each row of O^T, block after block."""
    of_half = v_width // 128
    half, b, w, h, g = np.unravel_index(np.arange(v_width), (2, of_half, 4, 2, 8))
    if not paired:
        return np.arange(v_width)
    return half * (v_width // 2) + 16 * of_half * w + 2 * of_half * g + 2 * b + h


PAIRED = [
    # queries, v_width, groups, rows, group, count, query tiles
    (16, 512, 132, 1, 0, 132, 1),
    (3, 256, 132, 2, 66, 66, 1),
    (31, 512, 66, 2, 1, 33, 1),
    (64, 512, 66, 1, 0, 66, 2),
    (70, 256, 44, 2, 20, 24, 3),
]


@pytest.mark.parametrize(
    "queries, v_width, groups, rows, group, count",
    [
        (8, 256, 132, 1, 0, 132),
        (8, 256, 132, 1, 0, 131),
        (8, 512, 132, 2, 1, 131),  # in two trips
        (32, 512, 132, 2, 66, 66),
        (8, 256, 132, 2, 130, 2),
        (16, 256, 9, 2, 0, 5),  # one part a warp at a time
        (8, 256, 9, 2, 0, 9),
        (8, 256, 9, 1, 2, 3),
        (8, 256, 3, 4, 0, 3),  # more rows than groups of blocks
        (24, 256, 400, 1, 0, 400),  # more than there are registers for
    ],
)
def test_parts_become_their_row(queries, v_width, groups, rows, group, count):
    check_merge(queries, v_width, groups, rows, group, count)


@pytest.mark.parametrize("queries, v_width, groups, rows, group, count, q_tiles", PAIRED)
def test_parts_with_paired_rows(queries, v_width, groups, rows, group, count, q_tiles):
    check_merge(queries, v_width, groups, rows, group, count, q_tiles, paired=True)


def check_merge(lines_of_row, v_width, groups, rows, group, count, q_tiles=1, paired=False) -> None:
    rng = np.random.default_rng(count)
    columns = 32 if q_tiles > 1 else -(-lines_of_row // 8) * 8
    queries = q_tiles * columns  # of a part
    slots = [groups + group, *range(group + 1, group + count)]
    part = np.full((2 * groups, v_width // 64, q_tiles, columns // 8, 256), POISON, np.float32).view(
        np.uint32
    )
    scales = np.full((2 * groups, q_tiles, 8), POISON, np.float32)
    values = rng.normal(size=(count, queries, v_width)).astype(np.float32)  # rows of O^T
    # Parts that outweigh each other by far or little, parts that see nothing, and queries of which all see nothing.
    logs = rng.normal(size=(count, queries)) * np.resize([1, 3000, 30], queries)
    logs[rng.random(logs.shape) < 0.3] = -np.inf
    logs[:, 2] = -np.inf
    values[np.isneginf(logs)] = 0
    part_lse = np.full((2 * groups, queries), POISON, np.float32)
    values *= np.exp2(rng.integers(-60, 60, (count, 1, 1)))
    logs[:, lines_of_row:] = np.nan  # lines that nobody writes
    part_lse[slots] = logs
    for slot, value in zip(slots, values, strict=True):
        for tile in range(q_tiles):
            lines, scales[slot, tile] = in_lines(value[columns * tile : columns * tile + columns])
            part[slot, :, tile] = lines.reshape(v_width // 64, columns // 8, 256)

    row, column = rows - 1, column_of(v_width, paired)
    out = np.full((rows * lines_of_row, v_width // 2), POISON, np.float32)
    poisoned = out.copy()
    lse = np.full((1, rows * lines_of_row), POISON, np.float32)
    add = mosaic_spread._add_text(
        columns=columns, q_tiles=q_tiles, v_width=v_width, groups=groups,
        together=mosaic_spread.parts_together(rows, groups),
    )  # fmt: skip
    combine = mosaic_spread._combine_text(lines_of_row, v_width, paired)
    for block, tile in [(0, 0), (5, -(-lines_of_row // 8) - 1), (v_width // 16 - 1, 0)]:
        sums = np.full(4 * mosaic_spread._SHARE, POISON, np.float32)
        memory = Memory(
            part=part.reshape(1, -1),
            scales=scales.reshape(1, -1),
            lse=part_lse,
            out=out.view(np.uint32),
            row_lse=lse,
            sums=sums,
        )
        at = memory.start
        barriers = [
            run_warp(
                add,
                [at["part"], at["scales"], at["lse"], at["sums"], group, count, block, tile],
                warp,
                memory,
            )
            for warp in range(4)
        ]
        assert barriers == [1] * 4
        for warp in range(4):
            run_warp(combine, [at["sums"], at["out"], at["row_lse"], row, block, tile], warp, memory)

        mine = slice(8 * tile, min(8 * tile + 8, lines_of_row))
        peak = np.maximum(logs[:, mine].max(axis=0), -1e30)
        weights = np.exp2(logs[:, mine] - peak)
        total = weights.sum(axis=0)
        want = np.einsum("pq,pqc->qc", weights, values[:, mine, 16 * block : 16 * block + 16])
        want /= np.where(total > 0, total, 1)[:, None]
        lines = slice(row * lines_of_row + mine.start, row * lines_of_row + mine.stop)
        at_columns = column[16 * block : 16 * block + 16]
        stored = out.view(jnp.bfloat16)[lines, at_columns].astype(np.float64)
        size = np.maximum(np.linalg.norm(want, axis=1, keepdims=True) / 4, 1e-30)  # of a query's 16 elements
        np.testing.assert_allclose(stored / size, want / size, rtol=2**-8, atol=2**-10)
        out.view(np.uint16)[lines, at_columns] = poisoned.view(np.uint16)[lines, at_columns]
        if block == 0:
            with np.errstate(divide="ignore"):
                natural = np.where(total > 0, (peak + np.log2(total)) * np.log(2), np.inf)
            np.testing.assert_allclose(lse[0, lines], natural, rtol=1e-5, atol=1e-5)
            lse[0, lines] = POISON
    # Nothing else was written.
    assert (out == POISON).all()
    assert (lse == POISON).all()
