"""What the plain-XLA forms of paged attention share: ids to rows, bounds of the KV loop, softmax in pieces."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.read_source import PageTable, ReadSource, TokenStream, VirtualPages

_CHUNK_BYTES = 32 << 20  # f32 KV rows and scores of one chunk stay within this
_MIN_CHUNK, _MAX_CHUNK = 32, 256

# f32 products on every backend: the default precision of a GPU would round the operands to TF32.
dot = partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

Fetch = Callable[[Int32[Array, "rows chunk"]], Int32[Array, "rows chunk"]]


def page_entries(
    source: ReadSource, num_entries: Int32[Array, ""] | int
) -> tuple[Fetch, Int32[Array, " rows"]]:
    """(positions [rows, chunk] -> entry of their page, the ends that the ids cover).

    The ends are `kv_end` cut at the width of the table or stream. Positions outside the row's range give any entry. An
    entry outside [0, num_entries) counts as 0, the padding page.
    """
    ps = source.page_size
    rows = source.kv_end.shape[0]
    lanes = jnp.arange(rows, dtype=jnp.int32)[:, None]

    def known(entry):
        return jnp.where((entry >= 0) & (entry < num_entries), entry, 0)

    match source:
        case PageTable(table=table):
            width = table.shape[1]

            def from_table(pos):
                return known(table[lanes, jnp.clip(pos // ps, 0, width - 1)])

            return from_table, jnp.minimum(source.kv_end, width * ps)
        case TokenStream(ids=ids, indptr=indptr):
            begin, end = indptr[:rows], jnp.minimum(indptr[1 : rows + 1], ids.shape[0])

            def from_stream(pos):
                at = begin[:, None] + pos - source.kv_start[:, None]
                phi = ids[jnp.clip(at, 0, ids.shape[0] - 1)]
                return known(jnp.where(phi < 0, -1, phi // ps))

            return from_stream, jnp.minimum(source.kv_end, source.kv_start + end - begin)
        case VirtualPages(req_to_page=pages, v2p=v2p):
            num_virtual, width = v2p.shape[0] - 1, pages.shape[1]
            request = jnp.clip(source.row_ids, 0, pages.shape[0] - 1)[:, None]

            def from_virtual(pos):
                page = pages[request, jnp.clip(pos // ps, 0, width - 1)]
                page = jnp.where((page >= 0) & (page < num_virtual), page, 0)
                return known(jnp.maximum(v2p[page], 0) * source.blocks_per_page)

            return from_virtual, jnp.minimum(source.kv_end, width * ps)
        case _:
            raise TypeError(
                f"source must be a PageTable, TokenStream or VirtualPages, got {type(source).__name__}"
            )


def row_index(
    source: ReadSource, block_offset: Int32[Array, ""] | int, num_rows: int
) -> tuple[Fetch, Int32[Array, " rows"]]:
    """(positions [rows, chunk] -> index of their row in the pool seen as [num_rows, row], the ends that the ids cover).

    Every index lies inside the pool; otherwise as `page_entries`.
    """
    ps = source.page_size
    offset = jnp.asarray(block_offset, jnp.int32)
    entry_of, ends = page_entries(source, num_rows // ps - offset)
    return lambda pos: (entry_of(pos) + offset) * ps + pos % ps, ends


def chunk_tokens(rows: int, queries: int, width: int) -> int:
    """KV positions a trip: a power of two that keeps `width` f32 elements a position and the scores of `queries`
    queries a row within `_CHUNK_BYTES`."""
    fit = _CHUNK_BYTES // max(1, 4 * rows * (width + 2 * queries))
    chunk = _MIN_CHUNK
    while 2 * chunk <= min(fit, _MAX_CHUNK):
        chunk *= 2
    return chunk


def chunk_range(
    kv_start: Int32[Array, " rows"], kv_stop: Int32[Array, " rows"], chunk: int
) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
    """First and last (exclusive) chunk of positions that some row sees."""
    seen = kv_start < kv_stop
    never = jnp.iinfo(jnp.int32).max
    first = jnp.min(jnp.where(seen, jnp.maximum(kv_start, 0) // chunk, never), initial=never)
    last = jnp.max(jnp.where(seen, (kv_stop + chunk - 1) // chunk, 0), initial=0)
    return first, last


class Softmax(NamedTuple):
    """Softmax-weighted sum over scores that arrive in pieces: largest score, sum of exp, weighted values."""

    peak: Float[Array, "*shape"]
    total: Float[Array, "*shape"]
    acc: Float[Array, "*shape v_width"]

    @classmethod
    def begin(cls, shape: tuple[int, ...], v_width: int) -> "Softmax":
        return cls(
            jnp.full(shape, -jnp.inf, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, v_width), jnp.float32),
        )

    def add(
        self, scores: Float[Array, "*shape chunk"], weigh: Callable[[Array], Float[Array, "*shape v_width"]]
    ) -> "Softmax":
        """One more piece. A score of -inf has no weight. weigh: weights [*shape, chunk] -> weighted values."""
        peak = jnp.maximum(self.peak, scores.max(axis=-1))
        base = jnp.where(peak == -jnp.inf, 0.0, peak)  # nothing visible yet: -inf - -inf would be NaN
        p = jnp.exp(scores - base[..., None])
        decay = jnp.exp(self.peak - base)
        return Softmax(peak, self.total * decay + p.sum(axis=-1), self.acc * decay[..., None] + weigh(p))

    def with_sink(self, sink: Float[Array, "..."]) -> "Softmax":
        """One more score without a value, for those that saw something."""
        peak = jnp.where(self.total == 0, self.peak, jnp.maximum(self.peak, sink))
        base = jnp.where(peak == -jnp.inf, 0.0, peak)
        decay = jnp.exp(self.peak - base)
        total = jnp.where(self.total == 0, 0.0, self.total * decay + jnp.exp(sink - base))
        return Softmax(peak, total, self.acc * decay[..., None])

    def result(self) -> tuple[Float[Array, "*shape v_width"], Float[Array, "*shape"]]:
        """Output and natural log of the sum; 0 and +inf where nothing was seen."""
        empty = self.total == 0
        total = jnp.where(empty, 1.0, self.total)
        out = jnp.where(empty[..., None], 0.0, self.acc / total[..., None])
        return out, jnp.where(empty, jnp.inf, self.peak + jnp.log(total))


def merge_partials(
    outs: Float[Array, "parts *shape v_width"], lses: Float[Array, "parts *shape"]
) -> tuple[Float[Array, "*shape v_width"], Float[Array, "*shape"]]:
    """Attention over a union of disjoint KV sets from the attention over each of them, by log-sum-exp.

    `outs` are normalised outputs, `lses` natural-log sums. A part that saw nothing has lse +inf (what the attention
    operations return) or -inf; it has no weight and its `outs` are not looked at. Where all parts are empty the result
    is 0 and +inf. The result has the dtype of `outs`; lse is f32.
    """
    if outs.shape[:-1] != lses.shape:
        raise ValueError(f"outs {outs.shape} without its last axis must have the shape of lses {lses.shape}")
    lses = lses.astype(jnp.float32)
    empty = jnp.isinf(lses)
    masked = jnp.where(empty, -jnp.inf, lses)
    peak = masked.max(axis=0)
    base = jnp.where(peak == -jnp.inf, 0.0, peak)
    weight = jnp.exp(masked - base)
    total = weight.sum(axis=0)
    none = total == 0
    weight = weight / jnp.where(none, 1.0, total)
    out = jnp.where(empty[..., None], 0.0, outs.astype(jnp.float32) * weight[..., None]).sum(axis=0)
    lse = jnp.where(none, jnp.inf, base + jnp.log(jnp.where(none, 1.0, total)))
    return out.astype(outs.dtype), lse
