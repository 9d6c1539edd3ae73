"""A warp as arrays of 32 lanes: what `mosaic_fp8_warp` asks of a thread, in numpy, with shared memory as bytes."""

import jax.numpy as jnp
import numpy as np

LANES = 32
_E4M3 = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float16)


class Lanes:
    """Values are int32, float32 or bool arrays of 32 lanes. `warp` is the warp's number in its warpgroup."""

    def __init__(self, memory: np.ndarray, warp: int):
        self.memory, self.warp = memory, warp

    def thread(self):
        return np.arange(LANES, dtype=np.int32) + LANES * self.warp

    def i(self, value):
        return np.full(LANES, value, np.int64).astype(np.int32)

    def f(self, value):
        return np.full(LANES, value, np.float32)

    add, sub, mul = (staticmethod(op) for op in (np.add, np.subtract, np.multiply))
    land, lor, xor = (staticmethod(op) for op in (np.bitwise_and, np.bitwise_or, np.bitwise_xor))
    div, rem, shl = (staticmethod(op) for op in (np.floor_divide, np.remainder, np.left_shift))
    fadd, fsub, fmul, fmax = (staticmethod(op) for op in (np.add, np.subtract, np.multiply, np.maximum))
    imax, imin, select = staticmethod(np.maximum), staticmethod(np.minimum), staticmethod(np.where)
    less, above, at_least = staticmethod(np.less), staticmethod(np.greater), staticmethod(np.greater_equal)
    exp2, log2 = staticmethod(np.exp2), staticmethod(np.log2)

    def shr(self, x, n):
        return (x.view(np.uint32) >> n.view(np.uint32)).view(np.int32)

    def bits(self, x):
        return x.view(np.int32)

    def number(self, x):
        return np.ascontiguousarray(x, np.int32).view(np.float32)

    def inverse(self, x):
        return (1 / x).astype(np.float32)

    def shuffle(self, x, distance):
        return x[np.arange(LANES) ^ distance]

    def any(self, x):
        return np.full(LANES, x.any())

    def when(self, condition, change, values):
        assert condition.all() or not condition.any(), "a warp has to agree"
        return change(list(values)) if condition.all() else list(values)

    def shared(self, address, offset, words):
        at = address + offset
        assert not (at % (4 * words)).any()
        if words == 4:  # eight lanes at a time: no two of them in one bank
            for lanes in at.reshape(4, 8):
                assert len(set(lanes // 16 % 8)) == 8 or len(set(lanes)) < 8
        return [self.memory[at // 4 + i] for i in range(words)]

    def halves(self, word):
        numbers = _E4M3[word.view(np.uint8).reshape(LANES, 4)]
        return [np.ascontiguousarray(numbers[:, i : i + 2]).view(np.int32)[:, 0] for i in (0, 2)]

    def permute(self, x, y, selector):
        both = np.concatenate([w.view(np.uint8).reshape(LANES, 4) for w in (x, y)], axis=1)
        chosen = both[:, [selector >> 4 * i & 7 for i in range(4)]]
        return np.ascontiguousarray(chosen).view(np.int32)[:, 0]

    def pack(self, low, high):
        return np.stack([low, high], 1).astype(np.float16).view(np.int32)[:, 0]

    def mma(self, c, a, b):
        """By the fragments of PTX ISA's mma.m16n8k16 for f16."""
        pair = lambda word: np.ascontiguousarray(word).view(np.float16).reshape(LANES, 2).astype(np.float64)
        g, q = np.arange(LANES) // 4, np.arange(LANES) % 4
        left, right, sums = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
        for e in range(2):
            for i, word in enumerate(a):
                left[g + 8 * (i % 2), 2 * q + e + 8 * (i // 2)] = pair(word)[:, e]
            for i, word in enumerate(b):
                right[2 * q + e + 8 * i, g] = pair(word)[:, e]
        for i, value in enumerate(c):
            sums[g + 8 * (i // 2), 2 * q + i % 2] = value
        sums = (sums + left @ right).astype(np.float32)
        return [sums[g + 8 * (i // 2), 2 * q + i % 2] for i in range(4)]
