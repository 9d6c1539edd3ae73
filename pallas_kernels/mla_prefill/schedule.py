"""Which tiles of queries the Mosaic kernel visits, and in which order.

Blocks draw numbered tickets from a queue; ticket i stands for one tile of queries and one head. The order serves two
ends. The tiles with the most keys come first, so that no block starts a long one when the others are done. And heads
and rows come in sections of few (row, head) pairs, so that several blocks read the same keys while these are in L2.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from pallas_kernels.mla_prefill.rows import Rows

TILE = 128  # queries of a work item, and keys of a step
# K and V of a section: what a Hopper GPU's L2 of 50 MB holds. 16 rows x 4096 tokens x 32 heads on an H200 gave 688 TFLOP/s
# with sections of 42 MB, 659 with 84, 626 with 168 and 576 without sections.
_SECTION_BYTES = 44 << 20

FIELDS = 8  # an Item as int32 in shared memory, padded


class Item(NamedTuple):
    """A work item: queries ``q_first + i`` for i < q_rows of `head`; query i has position q_position + i in its row.

    The row's keys are ``kv_first + j`` for j < kv_length, of which the item needs the first kv_tiles tiles. An item
    with kv_tiles 0 sees nothing: it only writes results.
    """

    q_first: Array
    q_rows: Array
    q_position: Array
    kv_first: Array
    kv_length: Array
    kv_tiles: Array
    head: Array

    @classmethod
    def read(cls, ref) -> "Item":  # type: ignore[no-untyped-def]
        return cls(*(ref[i] for i in range(len(cls._fields))))

    @classmethod
    def end(cls) -> "Item":
        """What stands for the end of the queue: an item without queries."""
        return cls(*(jnp.int32(0) for _ in cls._fields))


class Section(NamedTuple):
    """How many rows and heads are worked on together."""

    rows: int
    heads: int


class Schedule(NamedTuple):
    """items: int32 [tiles + 1, 6], the fields of `Item` but the head; first of the last row: how many are live."""

    items: Int32[Array, "tiles_plus_1 6"]
    section_heads: int

    def count(self, items_ref):  # type: ignore[no-untyped-def]
        """Live tiles."""
        return items_ref[self.items.shape[0] - 1, 0]

    def item(self, items_ref, ticket) -> Item:  # type: ignore[no-untyped-def]
        """The item of a ticket, 0 <= ticket < live tiles * heads. `items_ref` holds `items`."""
        size = self.count(items_ref) * self.section_heads
        section = lax.div(ticket, size)
        within = ticket - section * size
        tile = lax.div(within, self.section_heads)
        head = section * self.section_heads + (within - tile * self.section_heads)
        return Item._make([*(items_ref[tile, i] for i in range(6)), head])


def make_schedule(
    queries: Rows, keys: Rows, q_tokens: int, kv_tokens: int, *, causal: bool, heads: int, kv_bytes: int
) -> Schedule:
    """Tiles of all rows, and of the gaps between them: no query token is left without a result.

    kv_bytes: of one token's K and V in one head.
    """
    queries, keys = queries.clipped(q_tokens), keys.clipped(kv_tokens)
    rows = queries.start.shape[0]
    end = queries.start + queries.length
    following = jnp.concatenate([queries.start[1:], jnp.full(1, q_tokens, jnp.int32)])
    following = lax.cummin(following, reverse=True)
    # Segments: the gap before the first row, then each row and the gap behind it.
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.stack([queries.start, end], 1).reshape(-1)])
    size = jnp.concatenate(
        [queries.start[:1], jnp.stack([queries.length, jnp.maximum(following - end, 0)], 1).reshape(-1)]
    )
    none = jnp.zeros(rows, jnp.int32)
    kv_first = jnp.concatenate([none[:1], jnp.stack([keys.start, none], 1).reshape(-1)])
    kv_length = jnp.concatenate([none[:1], jnp.stack([keys.length, none], 1).reshape(-1)])

    ends = jnp.cumsum((size + TILE - 1) // TILE)
    tiles = q_tokens // TILE + 2 * rows + 1  # no segments of that many tokens have more
    index = jnp.arange(tiles, dtype=jnp.int32)
    segment = jnp.sum(ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    live = segment < 2 * rows + 1
    segment = jnp.minimum(segment, 2 * rows)
    before = jnp.where(segment > 0, ends[segment - 1], 0)
    position = (index - before) * TILE
    reach = jnp.minimum(kv_length[segment], position + TILE) if causal else kv_length[segment]
    fields = jnp.stack(
        [
            first[segment] + position,
            jnp.minimum(size[segment] - position, TILE),
            position,
            kv_first[segment],
            kv_length[segment],
            (reach + TILE - 1) // TILE,
        ],
        axis=1,
    )
    section = choose_section(rows, heads, -(-kv_tokens // rows) * kv_bytes)
    number = jnp.where(live, jnp.maximum(segment - 1, 0) // (2 * section.rows), 2 * rows + 1)
    _, _, order = lax.sort((number, -fields[:, 5], index), num_keys=2, is_stable=True)
    count = jnp.zeros((1, 6), jnp.int32).at[0, 0].set(jnp.minimum(ends[-1], tiles))
    items = jnp.concatenate([fields[order], count])
    return Schedule(items, section.heads)


def choose_section(rows: int, heads: int, pair_bytes: int) -> Section:
    """As many (row, head) pairs of that many bytes as `_SECTION_BYTES` hold. Its heads divide `heads`."""
    pairs = max(1, _SECTION_BYTES // pair_bytes)
    section_rows = -(-rows // -(-rows // pairs))  # sections of equal size
    most = min(heads, pairs // section_rows)
    return Section(section_rows, max(d for d in range(1, most + 1) if heads % d == 0))
