"""The same pages as a page table, as a token stream and as untranslated request maps."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from pallas_kernels.read_source import PageTable, ReadSource, TokenStream, VirtualPages

ABSURD = np.array([-7, 2**31 - 1, -(2**31), 1 << 20], np.int32)  # what the ids nobody may look at hold
DELIVERIES = ("table", "stream", "virtual")


def deliver(
    delivery: str,
    pages: np.ndarray,
    kv_start: np.ndarray,
    kv_end: np.ndarray,
    *,
    page_size: int,
    blocks_per_page: int,
    num_pages: int,
    extra_columns: int = 0,
) -> ReadSource:
    """A source for physical pages int32[rows, width], absurd past kv_end. extra_columns: more of those."""
    ps, rows = page_size, len(kv_end)
    pages = np.hstack([pages, np.resize(ABSURD, (rows, extra_columns))])
    live = np.arange(pages.shape[1]) * ps < kv_end[:, None]
    with np.errstate(over="ignore"):
        entries = np.where(live, pages * np.int32(blocks_per_page), pages)
    bounds = jnp.asarray(kv_start), jnp.asarray(kv_end)
    match delivery:
        case "table":
            return PageTable(jnp.asarray(entries), *bounds, page_size=ps)
        case "stream":
            ids = []
            for row in range(rows):
                pos = np.arange(kv_start[row], max(kv_start[row], kv_end[row]))
                ids.append(entries[row, pos // ps] * ps + pos % ps)
            indptr = np.cumsum([0] + [len(x) for x in ids])
            packed = np.concatenate([*ids, ABSURD]).astype(np.int32)
            return TokenStream(jnp.asarray(packed), jnp.asarray(indptr, jnp.int32), *bounds, page_size=ps)
        case "virtual":
            # Virtual page v of physical page p is an unrelated number; the request rows lie in another order.
            rng = np.random.default_rng(7)
            v2p = np.zeros(num_pages + 1, np.int32)
            v2p[1:-1] = rng.permutation(num_pages - 1) + 1
            v2p[-1] = -1
            p2v = np.argsort(v2p[:-1])
            virtual = np.where(live, p2v[np.where(live, pages, 0)], pages).astype(np.int32)
            row_ids = rng.permutation(rows + 3)[:rows].astype(np.int32)
            requests = np.resize(ABSURD, (rows + 3, virtual.shape[1]))
            requests[row_ids] = virtual
            maps = jnp.asarray(requests), jnp.asarray(row_ids), jnp.asarray(v2p)
            return VirtualPages(*maps, *bounds, page_size=ps, blocks_per_page=blocks_per_page)
    raise ValueError(delivery)


def spoil(source: ReadSource, columns: tuple[int, int]) -> ReadSource:
    """Two live columns of row 0 name nothing any more: their ids are absurd, or one of a request map and one tombstone."""
    first, second = columns
    match source:
        case PageTable():
            table = np.array(source.table)
            table[0, [first, second]] = ABSURD[:2]
            return replace(source, table=jnp.asarray(table))
        case TokenStream():
            ids, ps = np.array(source.ids), source.page_size
            for column, absurd in zip(columns, ABSURD):
                ids[column * ps : (column + 1) * ps] = absurd
            return replace(source, ids=jnp.asarray(ids))
        case VirtualPages():
            pages, v2p = np.array(source.req_to_page), np.array(source.v2p)
            row = np.asarray(source.row_ids)[0]
            pages[row, first] = ABSURD[1]
            v2p[pages[row, second]] = -1
            return replace(source, req_to_page=jnp.asarray(pages), v2p=jnp.asarray(v2p))
    raise TypeError(type(source))
