"""In-place moves of whole pages, for compaction."""

import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt8

from pallas_kernels import implementations

MOVE = {
    "xla": ("pallas_kernels.move_pages.reference", "move"),
    "mosaic": ("pallas_kernels.move_pages.mosaic_gpu", "move"),
}


def move_pages(
    buffer: UInt8[Array, " bytes"],
    src: Int32[Array, " n"],
    dst: Int32[Array, " n"],
    *,
    page_bytes: int,
    block_bytes: int,
    implementation: str | None = None,
) -> UInt8[Array, " bytes"]:
    """Copies page src[i] over page dst[i]; page p lies in bytes [p * page_bytes, (p + 1) * page_bytes).

    A lane is dropped where either page is <= 0 or reaches past the buffer. Targets are distinct, and no live
    lane's target is a live lane's source. The buffer is updated in place where it is donated.

    Args:
      buffer: the whole pool, of any number of bytes that block_bytes divides (100 GB and more).
      src, dst: physical pages of one sub-pool.
      page_bytes: bytes a page, a multiple of block_bytes.
      block_bytes: bytes of a block, the unit that is addressed: bytes / block_bytes stays below 2**31.
      implementation: "xla", "mosaic", or None for the best on the default device.

    Temporaries: the XLA form holds the moved pages, n * page_bytes; bound n by bytes.

    Raises:
      ValueError: shapes, dtypes or numbers that do not fit together.
    """
    name = "move_pages"
    if buffer.ndim != 1 or buffer.dtype != jnp.uint8:
        raise ValueError(f"{name}: buffer is {buffer.dtype}{list(buffer.shape)}, need uint8 of one dimension")
    for label, pages in (("src", src), ("dst", dst)):
        if pages.ndim != 1 or pages.dtype != jnp.int32 or pages.shape != src.shape:
            raise ValueError(
                f"{name}: {label} is {pages.dtype}{list(pages.shape)}, need int32{list(src.shape)}"
            )
    if block_bytes < 1 or page_bytes < 1 or page_bytes % block_bytes:
        raise ValueError(
            f"{name}: page_bytes={page_bytes} must be a positive multiple of block_bytes={block_bytes}"
        )
    if buffer.shape[0] % block_bytes:
        raise ValueError(
            f"{name}: block_bytes={block_bytes} must divide the buffer's {buffer.shape[0]} bytes"
        )
    if buffer.shape[0] // block_bytes >= 2**31:
        raise ValueError(
            f"{name}: {buffer.shape[0]} bytes in blocks of {block_bytes} are "
            f"{buffer.shape[0] // block_bytes} blocks, need fewer than {2**31}"
        )
    if src.shape[0] == 0:
        return buffer
    move = implementations.run(name, MOVE, implementation)
    return move(buffer, src, dst, page_bytes=page_bytes, block_bytes=block_bytes)
