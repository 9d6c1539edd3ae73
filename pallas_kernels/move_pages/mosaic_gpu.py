"""Page moves in Pallas Mosaic GPU: one launch, in place.

Pages are cut into pieces, and a grid of as many blocks as the card holds at once walks the pieces of all moves, so that
one big page and a thousand small ones are spread alike. A thread has `ITEMS` loads of up to 16 bytes in flight.
"""

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import gmem
from pallas_kernels.move_pages import addressing

BLOCKS = 132 * 12
ITEMS = 8


def move(
    buffer: jax.Array, src: jax.Array, dst: jax.Array, *, page_bytes: int, block_bytes: int
) -> jax.Array:
    del block_bytes  # the unit of the XLA form
    width = addressing.access_width(page_bytes)
    piece = gmem.WARPGROUP * ITEMS * width
    pieces = addressing.pieces(page_bytes, piece)
    lanes, pages = src.shape[0], buffer.shape[0] // page_bytes
    total = lanes * pieces
    if page_bytes + piece >= 2**31 or total + BLOCKS >= 2**31:
        raise NotImplementedError(
            f"{lanes} pages of {page_bytes} bytes: a page and the pieces of all moves must be numbered below 2**31"
        )
    blocks = min(total, BLOCKS)

    def move_pages(refs: dict[str, Any]) -> None:
        block = lax.axis_index("block")

        def one(i, carry):
            task = i * blocks + block
            lane = lax.div(task, pieces)
            source, target = refs["src"][lane], refs["dst"][lane]

            @pl.when(addressing.is_movable(source, target, pages))
            def copy():
                offset = lax.rem(task, pieces) * piece + gmem.iota(gmem.WARPGROUP * ITEMS) * width
                gmem.copy_within(
                    refs["buffer"], source, target, page_bytes, offset, gmem.mask(offset < page_bytes), width
                )

            return carry

        lax.fori_loop(0, lax.div(total - block + blocks - 1, blocks), one, ())

    return gmem.launch(
        move_pages,
        inputs=dict(src=src, dst=dst),
        in_place=dict(buffer=buffer),
        outputs={},
        grid=dict(block=blocks),
    )["buffer"]
