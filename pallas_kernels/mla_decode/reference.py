"""Paged MLA attention in plain XLA: an online softmax over chunks of KV positions.

The pool is gathered as stored bytes and the gathered rows are bitcast: a typed view of the whole pool costs nothing on
a GPU but is copied at every use on CPU. Temporaries are bounded by rows x chunk; the trip count is a run-time value, so
the work follows the longest live context and not the width of the tables.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32, UInt8

from pallas_kernels.read_source import PageTable, ReadSource, TokenStream, VirtualPages

_CHUNK_BYTES = 32 << 20  # f32 KV rows and scores of one chunk stay within this
_MIN_CHUNK, _MAX_CHUNK = 32, 256

# f32 products on every backend: the default precision of a GPU would round the operands to TF32.
_dot = partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

Fetch = Callable[[Int32[Array, "rows chunk"]], Int32[Array, "rows chunk"]]


# Jitted by itself: called eagerly, the closures of its loop would be compiled anew at every call.
@partial(jax.jit, static_argnames=("kv_dtype", "row_width", "v_width", "sm_scale", "logit_cap"))
def mla_decode_xla(
    q: Float[Array, "rows s_q heads qk_width"],
    buffer: UInt8[Array, " total_bytes"],
    source: ReadSource,
    block_offset: Int32[Array, ""] | int,
    *,
    kv_dtype: DTypeLike,
    row_width: int,
    v_width: int,
    sm_scale: float,
    logit_cap: float | None = None,
    q_start: Int32[Array, " rows"] | None = None,
) -> tuple[Float[Array, "rows s_q heads v_width"], Float[Array, "rows s_q heads"]]:
    """See `pallas_kernels.mla_decode.api.mla_decode`. Runs on every backend."""
    rows, s_q, heads, qk_width = q.shape
    pool = buffer.reshape(-1, row_width * jnp.dtype(kv_dtype).itemsize)
    row_of, kv_end = row_index(source, block_offset, pool.shape[0])
    if q_start is None:
        q_start = source.kv_end - s_q
    # A position that no query of the row reaches is as dead as one past the end: its bytes may be anything.
    kv_stop = jnp.minimum(kv_end, q_start + s_q)
    q_pos = q_start[:, None] + jnp.arange(s_q, dtype=jnp.int32)
    scaled_q = q.astype(jnp.float32) * sm_scale

    chunk = _chunk_tokens(rows, s_q * heads, row_width)
    seen = source.kv_start < kv_stop
    never = jnp.iinfo(jnp.int32).max
    first = jnp.min(jnp.where(seen, jnp.maximum(source.kv_start, 0) // chunk, never), initial=never)
    last = jnp.max(jnp.where(seen, (kv_stop + chunk - 1) // chunk, 0), initial=0)

    def body(c, carry):
        peak, total, acc = carry
        pos = jnp.broadcast_to(c * chunk + jnp.arange(chunk, dtype=jnp.int32), (rows, chunk))
        live = (pos >= source.kv_start[:, None]) & (pos < kv_stop[:, None])
        kv = load_rows(pool, row_of(pos), live, kv_dtype, qk_width)
        s = _dot("bqhd,bkd->bqhk", scaled_q, kv)
        if logit_cap is not None:
            s = logit_cap * jnp.tanh(s / logit_cap)
        visible = live[:, None, None, :] & (pos[:, None, None, :] <= q_pos[:, :, None, None])
        s = jnp.where(visible, s, -jnp.inf)
        new_peak = jnp.maximum(peak, s.max(axis=-1))
        base = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)  # nothing visible yet: -inf - -inf would be NaN
        p = jnp.exp(s - base[..., None])
        decay = jnp.exp(peak - base)
        acc = acc * decay[..., None] + _dot("bqhk,bkd->bqhd", p, kv[..., :v_width])
        return new_peak, total * decay + p.sum(axis=-1), acc

    shape = (rows, s_q, heads)
    start = (
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, v_width), jnp.float32),
    )
    peak, total, acc = lax.fori_loop(first, last, body, start)
    empty = total == 0
    out = jnp.where(empty[..., None], 0.0, acc / jnp.where(empty, 1.0, total)[..., None])
    lse = jnp.where(empty, jnp.inf, peak + jnp.log(jnp.where(empty, 1.0, total)))
    return out.astype(q.dtype), lse


def merge_partials(
    outs: Float[Array, "parts *shape v_width"], lses: Float[Array, "parts *shape"]
) -> tuple[Float[Array, "*shape v_width"], Float[Array, "*shape"]]:
    """Attention over a union of disjoint KV sets from the attention over each of them, by log-sum-exp.

    `outs` are normalised outputs, `lses` natural-log sums. A part that saw nothing has lse +inf (what `mla_decode`
    returns) or -inf; it has no weight and its `outs` are not looked at. Where all parts are empty the result is 0 and
    +inf. The result has the dtype of `outs`; lse is f32.
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


def row_index(
    source: ReadSource, block_offset: Int32[Array, ""] | int, num_rows: int
) -> tuple[Fetch, Int32[Array, " rows"]]:
    """(positions [rows, chunk] -> index of their row in the pool seen as [num_rows, row], the ends that the ids cover).

    The ends are `kv_end` cut at the width of the table or stream. Positions outside the row's range give some index
    inside the pool. An entry that is negative or past the pool counts as 0, the padding page.
    """
    ps = source.page_size
    rows = source.kv_end.shape[0]
    lanes = jnp.arange(rows, dtype=jnp.int32)[:, None]
    offset = jnp.asarray(block_offset, jnp.int32)

    def locate(entry, pos):
        block = entry + offset
        good = (entry >= 0) & (block >= 0) & (block < num_rows // ps)  # a sum past 2^31 wraps below 0
        return jnp.where(good, block, offset) * ps + pos % ps

    match source:
        case PageTable(table=table):
            width = table.shape[1]

            def from_table(pos):
                return locate(table[lanes, jnp.clip(pos // ps, 0, width - 1)], pos)

            return from_table, jnp.minimum(source.kv_end, width * ps)
        case TokenStream(ids=ids, indptr=indptr):
            begin, end = indptr[:rows], jnp.minimum(indptr[1 : rows + 1], ids.shape[0])

            def from_stream(pos):
                at = begin[:, None] + pos - source.kv_start[:, None]
                phi = ids[jnp.clip(at, 0, ids.shape[0] - 1)]
                return locate(jnp.where(phi < 0, -1, phi // ps), pos)

            return from_stream, jnp.minimum(source.kv_end, source.kv_start + end - begin)
        case VirtualPages(req_to_page=pages, v2p=v2p):
            num_virtual, width = v2p.shape[0] - 1, pages.shape[1]
            request = jnp.clip(source.row_ids, 0, pages.shape[0] - 1)[:, None]

            def from_virtual(pos):
                page = pages[request, jnp.clip(pos // ps, 0, width - 1)]
                page = jnp.where((page >= 0) & (page < num_virtual), page, 0)
                return locate(jnp.maximum(v2p[page], 0) * source.blocks_per_page, pos)

            return from_virtual, jnp.minimum(source.kv_end, width * ps)
        case _:
            raise TypeError(
                f"source must be a PageTable, TokenStream or VirtualPages, got {type(source).__name__}"
            )


def load_rows(
    pool: UInt8[Array, "num_rows row_bytes"],
    index: Int32[Array, "rows chunk"],
    live: Bool[Array, "rows chunk"],
    kv_dtype: DTypeLike,
    width: int,
) -> Float[Array, "rows chunk width"]:
    """First `width` elements of the pool rows at `index` in f32; rows that are not live read as 0, NaN included."""
    itemsize = jnp.dtype(kv_dtype).itemsize
    raw = pool.at[index].get(mode="clip")
    if itemsize == 1:
        kv = lax.bitcast_convert_type(raw[..., :width], kv_dtype).astype(jnp.float32)
        scale = lax.bitcast_convert_type(raw[..., width : width + 4], jnp.float32)
        kv = kv * scale[..., None]
    else:
        values = raw[..., : width * itemsize].reshape(*index.shape, width, itemsize)
        kv = lax.bitcast_convert_type(values, kv_dtype).astype(jnp.float32)
    return jnp.where(live[..., None], kv, 0.0)


def _chunk_tokens(rows: int, queries: int, row_width: int) -> int:
    """KV positions a trip: a power of two that keeps the f32 rows and scores within `_CHUNK_BYTES`."""
    fit = _CHUNK_BYTES // max(1, 4 * rows * (row_width + 2 * queries))
    chunk = _MIN_CHUNK
    while 2 * chunk <= min(fit, _MAX_CHUNK):
        chunk *= 2
    return chunk
