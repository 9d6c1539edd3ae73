"""One decode step of recurrent state: the public functions and the tables of their implementations."""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32, UInt8

from pallas_kernels import implementations

_MOSAIC, _XLA = "pallas_kernels.state_step.mosaic_gpu", "pallas_kernels.state_step.reference"
DELTA = {"mosaic": (_MOSAIC, "delta_step"), "xla": (_XLA, "delta_step")}
SSM = {"mosaic": (_MOSAIC, "ssm_step"), "xla": (_XLA, "ssm_step")}
_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
CONV = {"mosaic": (_MOSAIC, "conv_step"), "xla": (_XLA, "conv_step")}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateBlocks:
    """Where one layer's state lies in the pool: piece j (a head's matrix, an input of a convolution) of slot s is block

        s * slot_stride + first + j * piece_stride

    and block i are the bytes [i * n, (i + 1) * n), n the bytes of a piece. Blocks are numbered below 2**31, bytes are not.
    A slot that is not positive, or lies outside the pool, is dead: slot 0 is padding, -1 no slot at all. Live slots of one
    call are distinct.

    first: int32 scalar, a run-time operand, so that all layers run one kernel. dtype: float32, bfloat16 or float16, as
    stored. shape: [pieces, *piece] of what lies there; a step of another shape is an error. None: not known.
    """

    first: Int32[Array, ""] | int
    slot_stride: int = field(metadata={"static": True})
    piece_stride: int = field(metadata={"static": True})
    dtype: DTypeLike = field(metadata={"static": True}, default="float32")
    shape: tuple[int, ...] | None = field(metadata={"static": True}, default=None)


def last_slot(blocks: StateBlocks, num_blocks: int, first: Array | int, pieces: int) -> Array:
    """The last slot whose `pieces` pieces all lie in a pool of that many blocks."""
    room = num_blocks - 1 - (pieces - 1) * blocks.piece_stride - jnp.asarray(first, jnp.int32)
    return lax.div(room, jnp.int32(blocks.slot_stride))


def delta_step(
    buffer: UInt8[Array, " total_bytes"],
    slots: Int32[Array, " rows"],
    blocks: StateBlocks,
    qkv: Float[Array, "rows channels"],
    f: Float[Array, "rows heads #k"],
    b: Float[Array, "rows heads"],
    a_log: Float32[Array, " heads"],
    dt_bias: Float32[Array, "heads #k"],
    *,
    piece: tuple[int, int],
    implementation: str | None = None,
) -> tuple[UInt8[Array, " total_bytes"], Float32[Array, "rows heads v"]]:
    """The gated delta rule (KDA, GDN) for one token of every row; the state of a row is read once and written once.

    The arithmetic is `formulas.delta_rule`'s, in float32, gates included.

    Args:
      buffer: the whole byte pool, updated in place where it is donated. 100 GB and more.
      slots: physical slot of each row. A dead row changes nothing and its out is zeros.
      qkv: q and k of key_heads heads of k, then v of `heads` heads of v, side by side, float32 or bfloat16: what the
        convolution gives. q and k are made unit vectors here. Each key head serves heads / key_heads consecutive heads.
      f, a_log, dt_bias: the decay is exp(-exp(a_log) softplus(f + dt_bias)), one for each key channel or one a head.
      b: the step size is its sigmoid. f and b are float32 or bfloat16.
      piece: (k, v), the shape of a head's state.
      implementation: "mosaic" (Hopper), "xla", or None for the best that can serve on the device at hand.

    Returns:
      The pool and out, what the new state reads with q. Bytes of other slots are neither read nor written.

    Raises:
      ValueError: shapes, dtypes or numbers that do not fit together, an unknown implementation.
      NotImplementedError: the named implementation cannot serve these sizes; the text says why.
    """
    name = "delta_step"
    depth, width = piece
    rows, heads = _shape(name, "b", b, 2)
    if f.shape not in ((rows, heads, 1), (rows, heads, depth)):
        raise ValueError(f"{name}: f has shape {list(f.shape)}, need [{rows}, {heads}, 1 or {depth}]")
    _check(name, float32=dict(a_log=(a_log, (heads,)), dt_bias=(dt_bias, (heads, f.shape[2]))))
    key_channels = _shape(name, "qkv", qkv, 2)[1] - heads * width
    key_heads = key_channels // (2 * depth)
    if qkv.shape[0] != rows or key_heads < 1 or key_channels != 2 * key_heads * depth or heads % key_heads:
        raise ValueError(
            f"{name}: qkv has shape {list(qkv.shape)}, need [{rows}, {heads * width} + {2 * depth} * key heads] with "
            f"key heads that divide {heads} heads"
        )
    for label, x in (("qkv", qkv), ("f", f), ("b", b)):
        _check_float(name, label, x)
    _check_pool(name, buffer, slots, blocks, rows, (heads, *piece))
    run = implementations.run(name, DELTA, implementation)
    return run(buffer, slots, blocks, qkv, f, b, a_log, dt_bias, piece=piece)  # type: ignore[no-any-return]


def ssm_step(
    buffer: UInt8[Array, " total_bytes"],
    slots: Int32[Array, " rows"],
    blocks: StateBlocks,
    x: Float32[Array, "rows heads head_dim"],
    dt: Float32[Array, "rows heads"],
    a: Float32[Array, " heads"],
    b: Float32[Array, "rows groups state"],
    c: Float32[Array, "rows groups state"],
    *,
    implementation: str | None = None,
) -> tuple[UInt8[Array, " total_bytes"], Float32[Array, "rows heads head_dim"]]:
    """Mamba-2 for one token of every row, without the D x term; `formulas.ssm` in float32.

    A piece is a head's [head_dim, state] matrix; each group's b and c serve heads / groups consecutive heads. The other
    arguments, results and errors are those of `delta_step`.
    """
    name = "ssm_step"
    rows, heads, head_dim = _shape(name, "x", x, 3)
    _, groups, width = _shape(name, "b", b, 3)
    if groups < 1 or heads % groups:
        raise ValueError(f"{name}: {groups} groups do not divide {heads} heads")
    _check(
        name,
        float32=dict(
            x=(x, (rows, heads, head_dim)),
            dt=(dt, (rows, heads)),
            a=(a, (heads,)),
            b=(b, (rows, groups, width)),
            c=(c, (rows, groups, width)),
        ),
    )
    _check_pool(name, buffer, slots, blocks, rows, (heads, head_dim, width))
    run = implementations.run(name, SSM, implementation)
    return run(buffer, slots, blocks, x, dt, a, b, c)  # type: ignore[no-any-return]


def conv_step(
    buffer: UInt8[Array, " total_bytes"],
    slots: Int32[Array, " rows"],
    blocks: StateBlocks,
    x: Float[Array, "rows channels"],
    weight: Float[Array, "channels kernel"],
    bias: Float[Array, " channels"] | None = None,
    *,
    residual: bool = False,
    implementation: str | None = None,
) -> tuple[UInt8[Array, " total_bytes"], Float[Array, "rows channels"]]:
    """A short causal convolution for one token of every row; `formulas.convolution`: float32, then silu, or with
    `residual` the input added.

    The pieces are the last kernel - 1 inputs of [channels], oldest first, in the dtype of x, which becomes the last of them.
    out has the dtype of x. The other arguments, results and errors are those of `delta_step`.
    """
    name = "conv_step"
    rows, channels = _shape(name, "x", x, 2)
    _, kernel = _shape(name, "weight", weight, 2)
    if weight.shape[0] != channels or kernel < 2:
        raise ValueError(f"{name}: weight has shape {list(weight.shape)}, need [{channels}, at least 2 taps]")
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"{name}: bias has shape {list(bias.shape)}, need [{channels}]")
    _check_float(name, "x", x)
    if x.dtype != np.dtype(blocks.dtype):
        raise ValueError(f"{name}: x is {x.dtype}, its last values are stored as {np.dtype(blocks.dtype)}")
    _check_pool(name, buffer, slots, blocks, rows, (kernel - 1, channels))
    run = implementations.run(name, CONV, implementation)
    return run(buffer, slots, blocks, x, weight, bias, residual=residual)  # type: ignore[no-any-return]


def _shape(operation: str, name: str, x: Array, rank: int) -> tuple[int, ...]:
    if x.ndim != rank:
        raise ValueError(f"{operation}: {name} has shape {list(x.shape)}, need {rank} dimensions")
    return tuple(x.shape)


def _check(operation: str, float32: dict[str, tuple[Array, tuple[int, ...]]]) -> None:
    for name, (x, shape) in float32.items():
        if x.dtype != jnp.float32 or x.shape != shape:
            raise ValueError(f"{operation}: {name} is {x.dtype}{list(x.shape)}, need float32{list(shape)}")


def _check_float(operation: str, name: str, x: Array) -> None:
    if x.dtype not in _FLOATS:
        raise ValueError(f"{operation}: {name} is {x.dtype}, need float32, bfloat16 or float16")


def _check_pool(
    operation: str, buffer: Array, slots: Array, blocks: StateBlocks, rows: int, shape: tuple[int, ...]
) -> None:
    """shape: [pieces, *piece] that the step changes."""
    if buffer.ndim != 1 or buffer.dtype != jnp.uint8:
        raise ValueError(
            f"{operation}: buffer is {buffer.dtype}{list(buffer.shape)}, need uint8[total_bytes]"
        )
    if slots.shape != (rows,) or slots.dtype != jnp.int32:
        raise ValueError(f"{operation}: slots is {slots.dtype}{list(slots.shape)}, need int32[{rows}]")
    dtype = np.dtype(blocks.dtype)
    if dtype not in _FLOATS:
        raise ValueError(f"{operation}: the state is stored as {dtype}, need float32, bfloat16 or float16")
    if min(blocks.slot_stride, blocks.piece_stride) < 1:
        raise ValueError(
            f"{operation}: slot_stride {blocks.slot_stride} and piece_stride {blocks.piece_stride} must be positive"
        )
    if blocks.shape is not None and tuple(blocks.shape) != tuple(shape):
        raise ValueError(
            f"{operation}: the step changes state of shape {list(shape)}, the pool holds {list(blocks.shape)}"
        )
    size = math.prod(shape[1:]) * dtype.itemsize
    if size == 0 or buffer.shape[0] % size:
        raise ValueError(
            f"{operation}: buffer of {buffer.shape[0]} bytes is no whole number of blocks of {size} bytes"
        )
    if buffer.shape[0] // size >= 2**31:
        raise ValueError(
            f"{operation}: {buffer.shape[0] // size} blocks of {size} bytes, need fewer than {2**31}"
        )
