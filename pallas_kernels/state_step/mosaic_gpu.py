"""State steps in Pallas Mosaic GPU: one launch each, in place.

A block of 128 threads takes a tile of one piece of one row's state into registers with loads of 16 bytes, changes it, reads
it out and stores it where it came from. Two or more blocks an SM keep over 100 KB in flight there, which is what a card
of 4.8 TB/s asks for; nothing is staged in shared memory, and nothing but the small inputs is read twice.

Sums over the axis that a token is read out along stay within a warp: the layouts give each warp whole columns (delta rule)
or whole rows (Mamba-2) of a tile.
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
from pallas_kernels.state_step.api import StateBlocks

ACCESS_BYTES = 16  # of the widest load or store of a thread
TILE_ELEMENTS = 128  # float32 values of a tile in a thread's registers, at most
LANES_ALONG_ROW = 8  # of a warp, in tiles that are read out along rows


def column_layout(columns: int, vector: int) -> plgpu.Layout:
    """Of a tile [n, columns]: a warp has a quarter of the columns and all rows, a lane `vector` columns of every
    (128 * vector / columns)th row."""
    rows = gmem.WARPGROUP * vector // columns
    tiling = plgpu.Tiling(((rows, columns), (columns // 4,), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-4, -2), vector_dim=-1)


def row_layout(vector: int) -> plgpu.Layout:
    """Of a tile [16 n, 8 * vector * m]: a warp has 4 of 16 rows and all columns, a lane `vector` of 8 * vector columns."""
    columns = LANES_ALONG_ROW * vector
    tiling = plgpu.Tiling(((16, columns), (4, columns), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def tile_columns(depth: int, width: int, vector: int) -> int:
    """Columns of a delta rule tile [depth, columns]: as many as registers hold, so that a state's rows are read whole."""
    for columns in (128, 64, 32):
        rows = gmem.WARPGROUP * vector // columns
        if width % columns == 0 and depth % rows == 0 and depth * columns <= gmem.WARPGROUP * TILE_ELEMENTS:
            return columns
    raise NotImplementedError(f"the mosaic form has no tile for state matrices of {depth} x {width}")


def tile_rows(head_dim: int, width: int, vector: int) -> int:
    """Rows of a Mamba-2 tile [rows, width]."""
    if width % (LANES_ALONG_ROW * vector) == 0:
        for rows in (128, 64, 32, 16):
            if head_dim % rows == 0 and rows * width <= gmem.WARPGROUP * TILE_ELEMENTS:
                return rows
    raise NotImplementedError(f"the mosaic form has no tile for state matrices of {head_dim} x {width}")


def delta_step(
    buffer: jax.Array,
    slots: jax.Array,
    blocks: StateBlocks,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    (rows, key_heads, depth), (_, heads, width) = q.shape, v.shape
    by_channel = g.shape[-1] > 1
    vector = ACCESS_BYTES // np.dtype(blocks.dtype).itemsize
    columns = tile_columns(depth, width, vector)
    layout = column_layout(columns, vector)
    along_rows, along_columns = layout.reduce(1), layout.reduce(0)

    def delta_step(refs: dict[str, Any]) -> None:
        row, head = lax.axis_index("row"), lax.axis_index("head")
        key_head = lax.div(head, heads // key_heads)
        part = pl.ds(lax.axis_index("part") * columns, columns)
        slot, out = refs["slots"][row], refs["out"].at[row, head, part]

        def spread(x: jax.Array, axis: int) -> jax.Array:
            return plgpu.layout_cast(lax.broadcast_in_dim(x, (depth, columns), (axis,)), layout)

        @pl.when(slot > 0)
        def live() -> None:
            stored = refs["pool"].at[_block(refs, blocks, slot, head), :, part]
            state = _load(stored, layout).astype(jnp.float32)
            if by_channel:
                state = state * spread(jnp.exp(_load(refs["g"].at[row, head], along_rows)), 0)
            else:
                state = state * jnp.exp(refs["g"][row, head, 0])
            key = spread(_load(refs["k"].at[row, key_head], along_rows), 0)
            delta = _load(refs["v"].at[row, head, part], along_columns) - jnp.sum(state * key, axis=0)
            state = state + key * spread(delta * refs["beta"][row, head], 1)
            stored[...] = state.astype(stored.dtype)
            query = spread(_load(refs["q"].at[row, key_head], along_rows), 0)
            out[...] = jnp.sum(state * query, axis=0)

        pl.when(slot <= 0)(lambda: _store_zeros(out, along_columns))

    return _launch(
        delta_step,
        buffer,
        slots,
        blocks,
        piece=(depth, width),
        inputs=dict(q=q, k=k, v=v, g=g, beta=beta),
        out=jax.ShapeDtypeStruct(v.shape, jnp.float32),
        grid=dict(row=rows, head=heads, part=width // columns),
    )


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
    tile = tile_rows(head_dim, width, vector)
    layout = row_layout(vector)
    along_rows, along_columns = layout.reduce(1), layout.reduce(0)

    def ssm_step(refs: dict[str, Any]) -> None:
        row, head = lax.axis_index("row"), lax.axis_index("head")
        group = lax.div(head, heads // groups)
        part = pl.ds(lax.axis_index("part") * tile, tile)
        slot, out = refs["slots"][row], refs["out"].at[row, head, part]

        def spread(x: jax.Array, axis: int) -> jax.Array:
            return plgpu.layout_cast(lax.broadcast_in_dim(x, (tile, width), (axis,)), layout)

        @pl.when(slot > 0)
        def live() -> None:
            stored = refs["pool"].at[_block(refs, blocks, slot, head), part, :]
            state = _load(stored, layout).astype(jnp.float32)
            dt = refs["dt"][row, head]
            x = _load(refs["x"].at[row, head, part], along_rows) * dt
            b = _load(refs["b"].at[row, group], along_columns)
            state = state * jnp.exp(dt * refs["a"][head]) + spread(x, 0) * spread(b, 1)
            stored[...] = state.astype(stored.dtype)
            c = _load(refs["c"].at[row, group], along_columns)
            out[...] = jnp.sum(state * spread(c, 1), axis=1)

        pl.when(slot <= 0)(lambda: _store_zeros(out, along_rows))

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

        @pl.when(slot > 0)
        def live() -> None:
            stored = [refs["pool"].at[_block(refs, blocks, slot, j), part] for j in range(kernel - 1)]
            window = [_load(ref, layout) for ref in [*stored, refs["x"].at[row, part]]]
            for ref, value in zip(stored, window[1:]):
                ref[...] = value
            window = [value.astype(jnp.float32) for value in window]
            taps = [_load(refs["taps"].at[i, part], layout).astype(jnp.float32) for i in range(kernel)]
            y = _sum([value * tap for value, tap in zip(window, taps)])
            if bias is not None:
                y = y + _load(refs["bias"].at[part], layout).astype(jnp.float32)
            y = window[-1] + y if residual else y / (1 + jnp.exp(-y))
            out[...] = y.astype(x.dtype)

        pl.when(slot <= 0)(lambda: _store_zeros(out, layout))

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
) -> tuple[jax.Array, jax.Array]:
    dtype = np.dtype(blocks.dtype)
    pool = lax.bitcast_convert_type(buffer.reshape(-1, dtype.itemsize), dtype).reshape(-1, *piece)
    first = jnp.asarray(blocks.first, jnp.int32).reshape(1)
    made = gmem.launch(
        body,
        inputs=dict(slots=slots, first=first, **inputs),
        in_place=dict(pool=pool),
        outputs=dict(out=out),
        grid=grid,
    )
    return lax.bitcast_convert_type(made["pool"], jnp.uint8).reshape(-1), made["out"]


def _block(refs: dict[str, Any], blocks: StateBlocks, slot: jax.Array, piece: jax.Array | int) -> jax.Array:
    """A block's number fits int32; Mosaic GPU multiplies it with the bytes of a block in 64 bits."""
    return slot * blocks.slot_stride + (refs["first"][0] + piece * blocks.piece_stride)


def _load(ref: Any, layout: plgpu.Layout) -> jax.Array:
    # From global memory no load is "optimized" in Mosaic's sense, which is about shared-memory banks.
    return plgpu.load(ref, layout=layout, optimized=False)


def _store_zeros(ref: Any, layout: plgpu.Layout) -> None:
    ref[...] = plgpu.layout_cast(jnp.zeros(ref.shape, ref.dtype), layout)


def _sum(terms: Sequence[jax.Array]) -> jax.Array:
    """In the order of the terms, as `formulas.convolution` adds them."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
