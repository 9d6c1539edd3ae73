"""State steps in Pallas Mosaic GPU: one launch each, in place.

A block of 128 threads takes a tile of one piece of one row's state into registers with loads of 16 bytes, changes it, reads
it out and stores it where it came from. Tiles of 16 or 32 KB let several blocks share an SM, which keeps enough bytes in
flight; nothing of the state is staged in shared memory, and nothing but the small inputs is read twice. What was tried and
measured: docs/state_step.md.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import gmem
from pallas_kernels.state_step.api import StateBlocks, last_slot
from pallas_kernels.state_step.formulas import UNIT_EPS

ACCESS_BYTES = 16  # of the widest load or store of a thread
MAX_TILE = 128 * gmem.WARPGROUP  # elements of a tile: float32 values in as many registers of each thread
GOOD_TILE = 64 * gmem.WARPGROUP
SUM_VECTOR = 4  # elements a lane at most in tiles that warps add up: more is not implemented in Mosaic GPU


def tile_layout(lanes: int, vector: int) -> plgpu.Layout:
    """Of a tile whose rows are read by `lanes` lanes of a warp, `vector` elements each; the warps split the rows."""
    columns, rows = lanes * vector, 32 // lanes
    tiling = plgpu.Tiling(((4 * rows, columns), (rows, columns), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def vector_layout(length: int) -> plgpu.Layout:
    """Of a vector that every warp holds whole, so that its sum needs no other warp."""
    vector = math.gcd(length // 32, 4)
    tiling = plgpu.Tiling(((32 * vector,), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1)


def delta_lanes(depth: int, width: int) -> int:
    """Lanes along a row of a delta rule tile [depth, lanes * SUM_VECTOR]: as many as leave registers to spare."""
    for lanes, most in ((16, GOOD_TILE), (8, MAX_TILE)):
        columns = lanes * SUM_VECTOR
        if width % columns == 0 and depth % 32 == 0 and depth * columns <= most:
            return lanes
    raise NotImplementedError(f"the mosaic form has no tile for state matrices of {depth} x {width}")


def ssm_rows(head_dim: int, width: int, vector: int) -> int:
    """Rows of a Mamba-2 tile [rows, width], which 8 lanes read along."""
    rows = 16
    if head_dim % rows or width % (8 * vector) or rows * width > MAX_TILE:
        raise NotImplementedError(f"the mosaic form has no tile for state matrices of {head_dim} x {width}")
    return rows


def delta_step(
    buffer: jax.Array,
    slots: jax.Array,
    blocks: StateBlocks,
    qkv: jax.Array,
    f: jax.Array,
    b: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    *,
    piece: tuple[int, int],
) -> tuple[jax.Array, jax.Array]:
    """With D the decayed state, out = D^T q + (k . q) delta: both sums over D come from one pass, before it is changed.

    What a head needs besides its state is made while that is on its way, by every warp the same: the unit vectors q and k
    and the decays, which go through shared memory into the layout of a tile's rows.
    """
    (rows, heads), (depth, width) = b.shape, piece
    key_heads = (qkv.shape[1] - heads * width) // (2 * depth)
    by_channel = f.shape[-1] > 1
    lanes = delta_lanes(depth, width)
    columns = lanes * SUM_VECTOR
    layout, whole = tile_layout(lanes, SUM_VECTOR), vector_layout(depth)
    along_rows, along_columns = layout.reduce(1), layout.reduce(0)

    def delta_step(refs: dict[str, Any], vectors: Any, raw: Any, raw_f: Any = None) -> None:
        row, head, part = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("part") * columns
        slot, out = refs["slots"][row], refs["out"].at[row, head, pl.ds(part, columns)]
        key_head = lax.div(head, heads // key_heads)
        q_ref = refs["qkv"].at[row, pl.ds(key_head * depth, depth)]
        k_ref = refs["qkv"].at[row, pl.ds((key_heads + key_head) * depth, depth)]
        v_ref = refs["qkv"].at[row, pl.ds(2 * key_heads * depth + head * width + part, columns)]

        def spread(x: jax.Array, axis: int) -> jax.Array:
            return plgpu.layout_cast(lax.broadcast_in_dim(x, (depth, columns), (axis,)), layout)

        inside = _inside(refs, blocks, slot, heads)

        @pl.when(inside)
        def live() -> None:
            stored = refs["pool"].at[_block(refs, blocks, slot, head), :, pl.ds(part, columns)]
            q, k, v = _load_raw(q_ref, whole), _load_raw(k_ref, whole), _load_raw(v_ref, along_columns)
            a_log, b, f_ref = refs["a_log"][head], refs["b"][row, head], refs["f"].at[row, head]
            f = _load_raw(f_ref, whole) if by_channel else f_ref[0]
            state = _load(stored, layout)
            # Left alone, the compiler puts the state's loads behind all arithmetic that needs none of it. What that
            # arithmetic starts from therefore goes through shared memory, behind a barrier, which no load crosses.
            raw.at[0][...], raw.at[1][...] = q, k
            if by_channel:
                raw_f[...] = f
                f = _load(raw_f, whole) + _load(refs["dt_bias"].at[head], whole)
            else:
                f = f.astype(jnp.float32) + refs["dt_bias"][head, 0]
            decay = jnp.exp(-jnp.exp(a_log) * _softplus(f))
            q, k = (
                x * lax.rsqrt(jnp.sum(x * x, axis=0) + UNIT_EPS)
                for x in (_load(raw.at[0], whole), _load(raw.at[1], whole))
            )
            q = q * depth**-0.5
            kq = jnp.sum(k * q, axis=0)
            vectors.at[0][...], vectors.at[1][...] = q, k
            if by_channel:
                vectors.at[2][...] = decay

            # Each vector is loaded where it is used: few registers, so that four blocks share an SM.
            def vector(i: int) -> jax.Array:
                return spread(_load(vectors.at[i], along_rows), 0)

            state = state * (vector(2) if by_channel else decay)
            recalled = jnp.sum(state * vector(1), axis=0)
            read = jnp.sum(state * vector(0), axis=0)
            beta = 1 / (1 + jnp.exp(-b.astype(jnp.float32)))
            delta = (v.astype(jnp.float32) - recalled) * beta
            state = state + vector(1) * spread(delta, 1)
            stored[...] = state.astype(stored.dtype)
            out[...] = read + delta * kq

        pl.when(jnp.logical_not(inside))(lambda: _store_zeros(out, along_columns))

    scratch = dict(
        vectors=plgpu.SMEM((3 if by_channel else 2, depth), jnp.float32),
        raw=plgpu.SMEM((2, depth), qkv.dtype),
    )
    if by_channel:
        scratch["raw_f"] = plgpu.SMEM((depth,), f.dtype)
    return _launch(
        delta_step,
        buffer,
        slots,
        blocks,
        piece=piece,
        inputs=dict(qkv=qkv, f=f, b=b, a_log=a_log, dt_bias=dt_bias),
        out=jax.ShapeDtypeStruct((rows, heads, width), jnp.float32),
        grid=dict(row=rows, head=heads, part=width // columns),
        scratch=scratch,
    )


def _softplus(x: jax.Array) -> jax.Array:
    """log(1 + exp(x)), as exact for large -x as log1p makes it: what log makes of the rounded sum is scaled back."""
    small = jnp.exp(-jnp.abs(x))
    total = 1 + small
    exact = total == 1
    log = jnp.where(exact, small, jnp.log(total) * (small / jnp.where(exact, 1.0, total - 1)))
    return jnp.maximum(x, 0) + log


def ssm_step(
    buffer: jax.Array,
    slots: jax.Array,
    blocks: StateBlocks,
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    (rows, heads, head_dim), (_, groups, width) = x.shape, b.shape
    vector = ACCESS_BYTES // np.dtype(blocks.dtype).itemsize
    tile = ssm_rows(head_dim, width, vector)
    layout = tile_layout(8, vector)
    along_rows, along_columns = layout.reduce(1), layout.reduce(0)

    def ssm_step(refs: dict[str, Any]) -> None:
        row, head = lax.axis_index("row"), lax.axis_index("head")
        group = lax.div(head, heads // groups)
        part = pl.ds(lax.axis_index("part") * tile, tile)
        slot, out = refs["slots"][row], refs["out"].at[row, head, part]

        def spread(x: jax.Array, axis: int) -> jax.Array:
            return plgpu.layout_cast(lax.broadcast_in_dim(x, (tile, width), (axis,)), layout)

        inside = _inside(refs, blocks, slot, heads)

        @pl.when(inside)
        def live() -> None:
            stored = refs["pool"].at[_block(refs, blocks, slot, head), part, :]
            state = _load(stored, layout)
            b = _load(refs["b"].at[row, group], along_columns)
            c = _load(
                refs["c"].at[row, group], along_columns
            )  # here, for no load comes before an earlier store
            dt = refs["dt"][row, head]
            x = _load(refs["x"].at[row, head, part], along_rows) * dt
            state = state * jnp.exp(dt * refs["a"][head]) + spread(x, 0) * spread(b, 1)
            stored[...] = state.astype(stored.dtype)
            out[...] = jnp.sum(state * spread(c, 1), axis=1)

        pl.when(jnp.logical_not(inside))(lambda: _store_zeros(out, along_rows))

    return _launch(
        ssm_step,
        buffer,
        slots,
        blocks,
        piece=(head_dim, width),
        inputs=dict(x=x, dt=dt, a=a, b=b, c=c),
        out=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        grid=dict(row=rows, head=heads, part=head_dim // tile),
    )


def conv_step(
    buffer: jax.Array,
    slots: jax.Array,
    blocks: StateBlocks,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    *,
    residual: bool,
) -> tuple[jax.Array, jax.Array]:
    (rows, channels), kernel = x.shape, weight.shape[1]
    if channels % gmem.WARPGROUP:
        raise NotImplementedError(f"the mosaic form serves multiples of 128 channels, found {channels}")
    vector = math.gcd(channels // gmem.WARPGROUP, ACCESS_BYTES // x.dtype.itemsize)
    tile = gmem.WARPGROUP * vector
    layout = plgpu.Layout.WG_STRIDED((tile,), vec_size=vector)

    def conv_step(refs: dict[str, Any]) -> None:
        row = lax.axis_index("row")
        part = pl.ds(lax.axis_index("part") * tile, tile)
        slot, out = refs["slots"][row], refs["out"].at[row, part]

        inside = _inside(refs, blocks, slot, kernel - 1)

        @pl.when(inside)
        def live() -> None:
            stored = [refs["pool"].at[_block(refs, blocks, slot, j), part] for j in range(kernel - 1)]
            window = [_load(ref, layout) for ref in [*stored, refs["x"].at[row, part]]]
            taps = [_load(refs["taps"].at[i, part], layout) for i in range(kernel)]
            added = None if bias is None else _load(refs["bias"].at[part], layout)
            for ref, value in zip(
                stored, window[1:]
            ):  # after all loads, for none comes before an earlier store
                ref[...] = value.astype(ref.dtype)
            y = _sum([value * tap for value, tap in zip(window, taps)])
            if added is not None:
                y = y + added
            y = window[-1] + y if residual else y / (1 + jnp.exp(-y))
            out[...] = y.astype(x.dtype)

        pl.when(jnp.logical_not(inside))(lambda: _store_zeros(out, layout))

    return _launch(
        conv_step,
        buffer,
        slots,
        blocks,
        piece=(channels,),
        inputs=dict(x=x, taps=weight.T, bias=bias),
        out=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=dict(row=rows, part=channels // tile),
    )


def _launch(
    body: Any,
    buffer: jax.Array,
    slots: jax.Array,
    blocks: StateBlocks,
    *,
    piece: tuple[int, ...],
    inputs: dict[str, Any],
    out: jax.ShapeDtypeStruct,
    grid: dict[str, int],
    scratch: dict[str, Any] | None = None,
) -> tuple[jax.Array, jax.Array]:
    dtype = np.dtype(blocks.dtype)
    if slots.shape[0] == 0:
        return buffer, jnp.zeros(out.shape, out.dtype)
    if half := [name for name, x in inputs.items() if x is not None and x.dtype == jnp.float16]:
        raise NotImplementedError(f"the mosaic form serves no float16, found it in {half}")
    if dtype == np.float16:
        raise NotImplementedError("the mosaic form serves state in float32 and bfloat16, found float16")
    pool = lax.bitcast_convert_type(buffer.reshape(-1, dtype.itemsize), dtype).reshape(-1, *piece)
    first = jnp.asarray(blocks.first, jnp.int32).reshape(1)
    made = gmem.launch(
        body,
        inputs=dict(slots=slots, first=first, **inputs),
        in_place=dict(pool=pool),
        outputs=dict(out=out),
        grid=grid,
        scratch=scratch,
    )
    return lax.bitcast_convert_type(made["pool"], jnp.uint8).reshape(-1), made["out"]


def _inside(refs: dict[str, Any], blocks: StateBlocks, slot: jax.Array, pieces: int) -> jax.Array:
    """Whether all pieces of a slot lie in the pool; without a product that could overflow."""
    last = last_slot(blocks, refs["pool"].shape[0], refs["first"][0], pieces)
    return (slot > 0) & (slot <= last)


def _block(refs: dict[str, Any], blocks: StateBlocks, slot: jax.Array, piece: jax.Array | int) -> jax.Array:
    """A block's number fits int32; Mosaic GPU multiplies it with the bytes of a block in 64 bits."""
    return slot * blocks.slot_stride + (refs["first"][0] + piece * blocks.piece_stride)


def _load_raw(ref: Any, layout: plgpu.Layout) -> jax.Array:
    """From global memory no load is "optimized" in Mosaic's sense, which is about shared-memory banks."""
    return plgpu.load(ref, layout=layout, optimized=False)


def _load(ref: Any, layout: plgpu.Layout) -> jax.Array:
    return _load_raw(ref, layout).astype(jnp.float32)


def _store_zeros(ref: Any, layout: plgpu.Layout) -> None:
    ref[...] = plgpu.layout_cast(jnp.zeros(ref.shape, ref.dtype), layout)


def _sum(terms: Sequence[jax.Array]) -> jax.Array:
    """In the order of the terms, as `formulas.convolution` adds them."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
