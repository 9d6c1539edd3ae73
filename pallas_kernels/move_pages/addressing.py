"""The arithmetic of page moves, shared by the implementations and tested as plain functions."""

import math

import jax

MAX_WIDTH = 16  # bytes of the widest load or store of one thread


def is_movable(source: jax.Array, target: jax.Array, pages: int) -> jax.Array:
    """Whether a lane moves a page: neither the padding page 0 nor anything outside the buffer's whole pages."""
    return (source > 0) & (source < pages) & (target > 0) & (target < pages)


def access_width(page_bytes: int) -> int:
    """Widest access that is aligned in every page of a buffer that starts aligned."""
    return math.gcd(page_bytes, MAX_WIDTH)


def pieces(page_bytes: int, piece_bytes: int) -> int:
    """Pieces that a page is moved in."""
    return -(-page_bytes // piece_bytes)
