"""Decode steps of recurrent state against float64, for every implementation."""

import io
import math
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import implementations
from pallas_kernels.state_step import StateBlocks, conv_step, delta_step, ssm_step
from pallas_kernels.state_step.mosaic_gpu import SUM_VECTOR, delta_lanes, ssm_rows
from tests.deviceless import CAPTURE_LOOPS, compile_for, requires_plugin, shape
from tests.kernels.paged_case import CAPTURED

# Plain XLA, the Mosaic kernels in Pallas' interpreter, and on a GPU the kernels themselves.
IMPLEMENTATIONS = ("xla", "interpreted", pytest.param("mosaic", marks=pytest.mark.gpu))
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
SLOTS = (3, -1, 7, 0, 1)  # 0 is padding, as good as none
ROWS = len(SLOTS)


@dataclass(frozen=True)
class Case:
    function: Any
    pieces: int
    piece: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    state: str = "float32"
    x: str = "float32"
    options: tuple[tuple[str, Any], ...] = ()


def _delta(key_heads, heads, depth, width, channels, **more):
    qkv = (ROWS, 2 * key_heads * depth + heads * width)
    inputs = qkv, (ROWS, heads, channels), (ROWS, heads), (heads,), (heads, channels)
    options = (("piece", (depth, width)),)
    return Case(delta_step, heads, (depth, width), inputs, options=options, **more)


def _ssm(heads, head_dim, groups, width, **more):
    inputs = (ROWS, heads, head_dim), (ROWS, heads), (heads,), (ROWS, groups, width), (ROWS, groups, width)
    return Case(ssm_step, heads, (head_dim, width), inputs, **more)


def _conv(channels, kernel, bias=False, residual=False, dtype="float32"):
    inputs = (ROWS, channels), (channels, kernel), *([(channels,)] if bias else [])
    return Case(conv_step, kernel - 1, (channels,), inputs, dtype, dtype, (("residual", residual),))


CASES = {
    "kda": _delta(3, 3, 32, 32, 32),
    "kda in two parts": _delta(2, 2, 32, 128, 32, x="bfloat16"),
    "kda bfloat16": _delta(2, 2, 32, 64, 32, state="bfloat16"),
    "gdn": _delta(2, 4, 32, 32, 1),
    "gdn bfloat16": _delta(1, 2, 32, 64, 1, x="bfloat16", state="bfloat16"),
    "gdn, wide keys": _delta(1, 2, 256, 96, 1, x="bfloat16"),
    "mamba2": _ssm(4, 32, 2, 64),
    "mamba2 in two parts": _ssm(2, 64, 1, 256),
    "mamba2 bfloat16": _ssm(2, 16, 2, 128, state="bfloat16"),
    "convolution": _conv(256, 4, bias=True),
    "convolution bfloat16": _conv(1024, 4, dtype="bfloat16"),
    "convolution of two taps": _conv(384, 2, residual=True),
}


every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@contextmanager
def interpreted():
    """Inside, the Mosaic kernels run in Pallas' interpreter, as if on a Hopper GPU; it prints the races that it sees."""
    with (
        redirect_stdout(io.StringIO()) as printed,
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(implementations, "device", SimpleNamespace(target=lambda: ("cuda", (9, 0))))
        yield
    assert "RACE DETECTED" not in printed.getvalue()


def run(implementation, case, buffer, slots, blocks, *inputs):
    with interpreted() if implementation == "interpreted" else nullcontext():
        return jax.block_until_ready(_compiled(implementation, case)(buffer, slots, blocks, *inputs))


@cache
def _compiled(implementation, case):
    name = "mosaic" if implementation == "interpreted" else implementation
    return jax.jit(partial(case.function, **dict(case.options), implementation=name))


def random_inputs(case, rng):
    """As the operations get them: Mamba-2's steps positive, its a negative."""
    values = [rng.normal(size=s) / math.sqrt(s[-1] if len(s) > 2 else 1) for s in case.inputs]
    if case.function is delta_step:  # of every size: from no decay at all to one at once
        values[1] *= 20
    if case.function is ssm_step:
        values[1], values[2] = np.abs(values[1]), -np.abs(values[2])
    return [jnp.asarray(x, dtype) for x, dtype in zip(values, dtypes(case))]


def dtypes(case):
    """Of the inputs: those that a model computes in its own dtype, and those that it keeps in float32."""
    own = 3 if case.function is delta_step else len(case.inputs)
    return [case.x] * own + ["float32"] * (len(case.inputs) - own)


def exact(case, inputs, state):
    """(out, state) in float64."""
    inputs = [np.asarray(x, np.float64) for x in inputs]
    if case.function is delta_step:
        qkv, f, b, a_log, dt_bias = inputs
        g, beta = -np.exp(a_log)[:, None] * np.log1p(np.exp(f + dt_bias)), 1 / (1 + np.exp(-b))
        (depth, width), heads = case.piece, b.shape[1]
        v = qkv[:, -heads * width :].reshape(-1, heads, width)
        q, k = qkv[:, : -heads * width].reshape(len(qkv), 2, -1, depth).swapaxes(0, 1)
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        q, k = (np.repeat(x, heads // x.shape[1], 1) for x in (q / np.sqrt(depth), k))
        state = state * np.exp(g)[..., None]
        delta = (v - np.einsum("rhkv,rhk->rhv", state, k)) * beta[..., None]
        state = state + np.einsum("rhk,rhv->rhkv", k, delta)
        return np.einsum("rhkv,rhk->rhv", state, q), state
    if case.function is ssm_step:
        x, dt, a, b, c = inputs
        b, c = (np.repeat(y, x.shape[1] // y.shape[1], 1) for y in (b, c))
        state = state * np.exp(dt * a)[..., None, None] + np.einsum("rh,rhp,rhn->rhpn", dt, x, b)
        return np.einsum("rhpn,rhn->rhp", state, c), state
    x, weight, *bias = inputs
    window = np.concatenate([state, x[:, None]], axis=1)
    y = np.einsum("rkc,ck->rc", window, weight) + (bias[0] if bias else 0)
    out = x + y if dict(case.options)["residual"] else y / (1 + np.exp(-y))
    return out, window[:, 1:]


def error(found, expected):
    return np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)


class Pool:
    """A buffer whose state slots lie apart, `first` blocks into each, and which is NaN everywhere else."""

    def __init__(self, case, rng, *, first=2, gap=3, piece_stride=1, slots=9):
        self.case = case
        self.stride = 1 if piece_stride > 1 else first + case.pieces + gap
        self.blocks = StateBlocks(jnp.int32(first), self.stride, piece_stride, case.state)
        count = max(slots * self.stride, first + case.pieces * piece_stride + slots)
        self.values = np.full((count, *case.piece), np.nan).astype(case.state)
        for slot in SLOTS:
            if slot > 0:
                self.values[self.at(slot)] = rng.normal(size=(case.pieces, *case.piece))
        self.buffer = jnp.asarray(np.frombuffer(self.values.tobytes(), np.uint8))

    def at(self, slot):
        pieces = np.arange(self.case.pieces)
        return slot * self.stride + int(self.blocks.first) + pieces * self.blocks.piece_stride

    def state(self):
        """[rows, pieces, *piece] in float64; zeros for a dead row."""
        rows = [self.values[self.at(max(s, 1))].astype(np.float64) * (s > 0) for s in SLOTS]
        return np.stack(rows)

    def after(self, buffer):
        return np.frombuffer(np.asarray(buffer).tobytes(), self.values.dtype).reshape(self.values.shape)


@every_implementation
class TestStep:
    @every_case
    def test_equals_the_formula_and_touches_nothing_else(self, implementation, case):
        rng = np.random.default_rng(len(case.piece))
        # A unified pool's slots are contiguous; in a static one the pieces of a slot lie num_pages blocks apart.
        pool = Pool(case, rng, piece_stride=1 if case.pieces % 2 else 11)
        inputs = random_inputs(case, rng)
        live = np.array(SLOTS) > 0
        inputs = [
            jnp.where(live.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.nan) if x.shape[0] == ROWS else x
            for x in inputs
        ]  # what dead rows bring does not matter
        buffer, out = run(
            implementation, case, pool.buffer, jnp.asarray(SLOTS, jnp.int32), pool.blocks, *inputs
        )
        expected, state = exact(case, inputs, pool.state())
        narrow = np.dtype(case.state) == jnp.bfloat16
        assert error(out[live], expected[live]) < (5e-3 if out.dtype == jnp.bfloat16 else 1e-6)
        assert not np.any(np.asarray(out)[~live])
        after, touched = pool.after(buffer), np.zeros(len(pool.values), bool)
        for row, slot in enumerate(SLOTS):
            if slot > 0:
                assert error(after[pool.at(slot)], state[row]) < (5e-3 if narrow else 1e-6)
                touched[pool.at(slot)] = True
        np.testing.assert_array_equal(
            after[~touched].view(np.uint8), pool.values[~touched].view(np.uint8), err_msg="other slots"
        )

    @pytest.mark.parametrize("name", ["kda", "mamba2", "convolution"])
    def test_no_row_is_live(self, implementation, name):
        case, rng = CASES[name], np.random.default_rng(1)
        pool, inputs = Pool(case, rng), random_inputs(case, rng)
        slots = jnp.array([-1, 9 + 10**6, 2**30, 2**31 - 1, -(2**31)], jnp.int32)
        buffer, out = run(implementation, case, pool.buffer, slots, pool.blocks, *inputs)
        np.testing.assert_array_equal(buffer, pool.buffer)
        assert not np.any(np.asarray(out))


def with_rows(case, rows):
    """The case with another number of rows."""
    return replace(case, inputs=tuple((rows, *s[1:]) if s[0] == ROWS else s for s in case.inputs))


@pytest.mark.parametrize("implementation", ["xla", pytest.param("mosaic", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["kda", "gdn bfloat16", "mamba2", "convolution bfloat16"])
def test_small_batch_after_a_large_one(implementation, name):
    """One program of 8 lanes, on a GPU a captured one that updates one pool, of which 8, 3, 8, 1, 8 are live, each time in
    other slots: lanes past the batch bring NaN and a slot that is none."""
    case, rng = with_rows(CASES[name], 8), np.random.default_rng(4)
    pool = Pool(case, rng, slots=13)
    where = np.stack([pool.at(slot) for slot in range(13)])
    pool.values[where[1:]] = rng.normal(size=(12, case.pieces, *case.piece))
    step = partial(case.function, **dict(case.options), implementation=implementation)
    program = jax.jit(step, donate_argnums=0, compiler_options=CAPTURED)
    narrow = np.dtype(case.state) == jnp.bfloat16
    buffer, before = jnp.asarray(np.frombuffer(pool.values.tobytes(), np.uint8)), pool.values
    for live in (8, 3, 8, 1, 8):
        lanes = np.arange(8) < live
        slots = np.where(lanes, rng.permutation(12)[:8] + 1, rng.choice([-1, 0, 13, 2**31 - 1], 8))
        inputs = [
            jnp.where(lanes.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.nan) if x.shape[0] == 8 else x
            for x in random_inputs(case, rng)
        ]
        buffer, out = program(buffer, jnp.asarray(slots, jnp.int32), pool.blocks, *inputs)
        named = where[np.where(lanes, slots, 0)]
        expected, state = exact(case, inputs, before[named].astype(np.float64))
        after, touched = pool.after(buffer), np.zeros(len(before), bool)
        touched[named[lanes]] = True
        assert error(out[lanes], expected[lanes]) < (5e-3 if out.dtype == jnp.bfloat16 else 1e-6)
        assert not np.any(np.asarray(out)[~lanes])
        assert error(after[named[lanes]], state[lanes]) < (5e-3 if narrow else 1e-6)
        np.testing.assert_array_equal(after[~touched].view(np.uint8), before[~touched].view(np.uint8))
        before = after
    assert program._cache_size() == 1


@pytest.mark.parametrize("name", ["kda", "mamba2 bfloat16", "convolution"])
def test_float16_runs_in_xla_and_the_mosaic_kernel_declines_it(name):
    case = CASES[name]
    if case.function is not ssm_step:
        case = replace(case, x="float16")
    case, rng = replace(case, state="float16"), np.random.default_rng(2)
    pool, inputs = Pool(case, rng), random_inputs(case, rng)
    slots, live = jnp.asarray(SLOTS, jnp.int32), np.array(SLOTS) > 0
    buffer, out = run("xla", case, pool.buffer, slots, pool.blocks, *inputs)
    expected, state = exact(case, inputs, pool.state())
    assert error(out[live], expected[live]) < 1e-3
    after = pool.after(buffer)
    assert all(error(after[pool.at(slot)], state[row]) < 1e-3 for row, slot in enumerate(SLOTS) if slot > 0)
    with pytest.raises(NotImplementedError, match="float16"):
        run("interpreted", case, pool.buffer, slots, pool.blocks, *inputs)


def test_tiles_fit_registers_and_divide_the_state():
    for depth, width in ((128, 128), (256, 256), (64, 96), (512, 512)):
        columns = delta_lanes(depth, width) * SUM_VECTOR
        assert width % columns == 0
        assert depth * columns <= 128 * 128
    for head_dim, width, vector in ((64, 128, 4), (64, 256, 4), (128, 64, 8)):
        rows = ssm_rows(head_dim, width, vector)
        assert head_dim % rows == 0
        assert rows * width <= 128 * 128


class TestBadInput:
    case = CASES["gdn"]

    def call(self, **changes):
        names = ["qkv", "f", "b", "a_log", "dt_bias"]
        inputs = dict(zip(names, map(jnp.ones, self.case.inputs)), piece=self.case.piece)
        arguments = dict(
            buffer=jnp.zeros(40 * 4096, jnp.uint8),
            slots=jnp.zeros(ROWS, jnp.int32),
            blocks=StateBlocks(0, 4, 1),
        )
        return delta_step(**(arguments | inputs | changes))

    @pytest.mark.parametrize(
        "changes, message",
        [
            (
                dict(buffer=jnp.zeros(4095, jnp.uint8)),
                "buffer of 4095 bytes is no whole number of blocks of 4096",
            ),
            (dict(buffer=jnp.zeros((4, 4), jnp.uint8)), r"buffer is uint8\[4, 4\]"),
            (dict(slots=jnp.zeros(2, jnp.int32)), r"slots is int32\[2\], need int32\[5\]"),
            (dict(f=jnp.ones((ROWS, 4, 2))), r"f has shape \[5, 4, 2\], need \[5, 4, 1 or 32\]"),
            (dict(a_log=jnp.ones(3)), r"a_log is float32\[3\], need float32\[4\]"),
            (dict(dt_bias=jnp.ones((4, 1), jnp.bfloat16)), "dt_bias is bfloat16"),
            (dict(b=jnp.ones((ROWS, 4), jnp.int32)), "b is int32, need float32, bfloat16 or float16"),
            (
                dict(qkv=jnp.ones((ROWS, 320))),
                r"qkv has shape \[5, 320\], need \[5, 128 \+ 64 \* key heads\]",
            ),
            (dict(qkv=jnp.ones((ROWS, 256), jnp.int32)), "qkv is int32, need float32, bfloat16 or float16"),
            (
                dict(blocks=StateBlocks(0, 4, 1, shape=(4, 32, 64))),
                r"state of shape \[4, 32, 32\], the pool holds \[4, 32, 64\]",
            ),
            (dict(blocks=StateBlocks(0, 4, 1, "int32")), "stored as int32"),
            (dict(blocks=StateBlocks(0, 0, 1)), "slot_stride 0"),
            (dict(implementation="cuda"), "'cuda' is not one of"),
        ],
    )
    def test_delta_step(self, changes, message):
        with pytest.raises(ValueError, match=message):
            self.call(**changes)

    def test_blocks_past_int32(self):
        with pytest.raises(ValueError, match="2147483648 blocks of 4096 bytes, need fewer than 2147483648"):
            jax.eval_shape(self.call_with, jax.ShapeDtypeStruct((1 << 43,), jnp.uint8))

    def call_with(self, buffer):
        return self.call(buffer=buffer)

    def test_convolution(self):
        x, slots = jnp.ones((2, 128)), jnp.zeros(2, jnp.int32)
        buffer = jnp.zeros(1024, jnp.uint8)
        with pytest.raises(ValueError, match=r"weight has shape \[64, 4\], need \[128"):
            conv_step(buffer, slots, StateBlocks(0, 3, 1), x, jnp.ones((64, 4)))
        with pytest.raises(ValueError, match="x is float32, its last values are stored as bfloat16"):
            conv_step(buffer, slots, StateBlocks(0, 3, 1, "bfloat16"), x, jnp.ones((128, 4)))

    def test_a_named_kernel_says_what_it_cannot_serve(self, named_for_hopper):
        inputs = map(jnp.ones, _delta(1, 1, 5, 7, 1).inputs)
        with interpreted(), pytest.raises(NotImplementedError, match="no tile for state matrices of 5 x 7"):
            delta_step(
                jnp.zeros(1400, jnp.uint8), jnp.zeros(ROWS, jnp.int32), StateBlocks(0, 1, 1), *inputs,
                piece=(5, 7), implementation="mosaic",
            )  # fmt: skip


# The published models' sizes: Kimi-Linear-48B, Qwen3.5-0.8B, Falcon-H1-0.5B.
MODELS = {
    "kda": _delta(32, 32, 128, 128, 128, x="bfloat16"),
    "kda bfloat16": _delta(32, 32, 128, 128, 128, x="bfloat16", state="bfloat16"),
    "gdn": _delta(16, 16, 128, 128, 1, x="bfloat16"),
    "mamba2": _ssm(24, 64, 1, 128),
    "convolution": _conv(12288, 4, dtype="bfloat16"),
}
models = pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)


def compiled_step(case, total, implementation, **how):
    def step(buffer, slots, first, *inputs):
        blocks = StateBlocks(first, 600, 1, case.state)
        return case.function(
            buffer, slots, blocks, *inputs, **dict(case.options), implementation=implementation
        )

    inputs = [shape(s, dtype) for s, dtype in zip(case.inputs, dtypes(case))]
    return compile_for(
        step, shape((total,), "uint8"), shape((ROWS,), "int32"), shape((), "int32"), *inputs, donate=0, **how
    )


def pool_bytes(case, gib):
    piece = math.prod(case.piece) * np.dtype(case.state).itemsize
    return (gib << 30) // piece * piece


@pytest.mark.deviceless
@requires_plugin
class TestOnAnH200:
    @models
    @pytest.mark.parametrize("implementation", ["mosaic", "xla"])
    def test_no_copy_of_the_pool(self, case, implementation):
        temps = []
        for gib in (4, 8):
            program = compiled_step(case, pool_bytes(case, gib), implementation)
            assert program.alias_bytes == pool_bytes(case, gib)
            temps.append(program.temp_bytes)
        assert temps[0] == temps[1]
        if implementation == "mosaic":
            assert sum(launch.kind == "kCustomCall" for launch in program.launches) == 1
            assert temps[0] <= 100_000  # the convolution's weights, a tap a row

    @models
    def test_is_captured(self, case):
        program = compiled_step(case, pool_bytes(case, 4), "mosaic", options=CAPTURE_LOOPS)
        assert all(launch.captured for launch in program.launches)

    @pytest.mark.parametrize("target, kernels", [("h200", 1), ("a100", 0)])
    def test_a_hopper_gets_the_kernel_by_default(self, target, kernels):
        program = compiled_step(MODELS["gdn"], pool_bytes(MODELS["gdn"], 4), None, target=target)
        assert sum(launch.kind == "kCustomCall" for launch in program.launches) == kernels


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="asks the CPU compiler")
@every_case
def test_no_copy_of_the_pool_on_a_cpu(case):
    temps = []
    for gib in (1, 2):
        total = pool_bytes(case, gib)
        step = jax.jit(
            lambda b, s, *x: case.function(b, s, StateBlocks(0, 20, 1, case.state), *x, **dict(case.options)),
            donate_argnums=0,
        )
        inputs = [
            jax.ShapeDtypeStruct(x.shape, x.dtype) for x in random_inputs(case, np.random.default_rng(0))
        ]
        slots = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
        lowered = step.lower(jax.ShapeDtypeStruct((total,), jnp.uint8), slots, *inputs)
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes == total
        temps.append(memory.temp_size_in_bytes)
    assert temps[0] == temps[1]


@pytest.mark.gpu
@pytest.mark.xdist_group("large pools")
@models
def test_slots_past_2_to_the_32_bytes_and_2_to_the_31_elements(case):
    """The last slots of a pool of 12 GiB and one near its start, in one call."""
    piece = math.prod(case.piece) * np.dtype(case.state).itemsize
    stride = case.pieces + 5
    total = pool_bytes(case, 12)
    last = total // piece // stride - 1
    slots = np.array([last, 1, -1, last // 2, last - 1], np.int32)
    assert last * stride * piece > 1 << 32
    rng = np.random.default_rng(3)
    inputs = random_inputs(case, rng)
    state = rng.normal(size=(ROWS, case.pieces, *case.piece)).astype(case.state)
    index = slots[:, None] * stride + 2 + np.arange(case.pieces)
    live = slots > 0
    view = jax.jit(lambda b, i: _typed(b, case)[i])
    put = jax.jit(lambda b, i, x: _as_bytes(_typed(b, case).at[i].set(x)), donate_argnums=0)
    buffer = put(jax.jit(lambda: jnp.full(total, 0xFF, jnp.uint8))(), index[live], jnp.asarray(state[live]))
    step = jax.jit(partial(case.function, **dict(case.options), implementation="mosaic"), donate_argnums=0)
    buffer, out = step(buffer, jnp.asarray(slots), StateBlocks(2, stride, 1, case.state), *inputs)
    expected, new = exact(case, inputs, state.astype(np.float64))
    narrow = np.dtype(case.state) == jnp.bfloat16
    assert error(out[live], expected[live]) < (5e-3 if out.dtype == jnp.bfloat16 else 1e-6)
    assert error(view(buffer, index[live]), new[live]) < (5e-3 if narrow else 1e-6)
    beside = np.concatenate([index[live, 0] - 1, index[live, -1] + 1])
    assert np.isnan(np.asarray(view(buffer, beside), np.float32)).all()


def _typed(buffer, case):
    item = np.dtype(case.state).itemsize
    return jax.lax.bitcast_convert_type(buffer.reshape(-1, item), case.state).reshape(-1, *case.piece)


def _as_bytes(values):
    return jax.lax.bitcast_convert_type(values, jnp.uint8).reshape(-1)
