"""Rows of a batch laid out in one array of tokens."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32


class Rows(NamedTuple):
    """Row b holds the tokens ``start[b] <= t < start[b] + length[b]``. Rows come in order and do not overlap.

    Serves both layouts of a ragged batch at no cost. Packed: ``Rows(indptr[:-1], indptr[1:] - indptr[:-1])``.
    Right-padded [rows, width, ...] reshaped to [rows * width, ...]: ``Rows(arange(rows) * width, lengths)``.
    """

    start: Int32[Array, " rows"]
    length: Int32[Array, " rows"]

    def clipped(self, tokens: int) -> "Rows":
        """The part that lies in an array of that many tokens."""
        start = jnp.clip(self.start, 0, tokens)
        return Rows(start, jnp.clip(self.length, 0, tokens - start))
