"""Problems for paged GQA attention: a poisoned pool, the ids to read it by in each form, and the exact answer."""

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gqa_decode import KVScales, gqa_decode
from tests.kernels.paged_case import PagedCase, bounds, shuffle_pages

RUN_TIME = ("scales", "sinks", "relative_bias")  # options that are arrays


@cache
def program(attend, implementation: str, **options):
    """An operation as one compiled program of its arrays and the options of RUN_TIME."""
    return jax.jit(lambda *args, **arrays: attend(*args, implementation=implementation, **options, **arrays))


@dataclass(frozen=True, kw_only=True)
class Case(PagedCase):
    """options: kv_dtype, num_kv_heads, v_head_dim, sm_scale, scales, window, sinks, logit_cap, relative_bias."""

    k: list[np.ndarray]  # for each row f64[kv_end, kv_heads, head_dim], as stored
    v: list[np.ndarray]  # for each row f64[kv_end, kv_heads, v_head_dim]
    num_pages: int
    offsets: tuple[int, int | None]  # of K and of V

    def run(self, implementation: str, delivery: str = "table", extra_columns: int = 0):
        """(out, lse) as numpy arrays in f64."""
        return self.run_on(self.pool, implementation, self.source(delivery, extra_columns))

    def run_on(self, pool, implementation: str | None, source):
        """`run` over another pool, with a source that names the same rows there."""
        offsets = [None if x is None else np.int32(x) for x in self.offsets]
        return self.call(gqa_decode, implementation, self.q, pool, source, *offsets, q_start=self.q_start)

    def call(self, attend, implementation: str | None, *args, **more):
        """(out, lse) of a compiled program with this problem's options, as numpy arrays in f64."""
        static = {name: value for name, value in self.options.items() if name not in RUN_TIME}
        arrays = {name: self.options[name] for name in RUN_TIME}
        out, lse = program(attend, implementation, **static)(*args, **arrays, **more)
        assert out.dtype == self.q.dtype
        assert lse.dtype == jnp.float32
        return np.asarray(out, np.float64), np.asarray(lse, np.float64)

    def expected(self):
        o = self.options
        rows, s_q, heads, _ = self.q.shape
        group = heads // o["num_kv_heads"]
        out, lse = np.zeros((rows, s_q, heads, o["v_head_dim"])), np.full((rows, s_q, heads), np.inf)
        for row, i, kv_head in np.ndindex(rows, s_q, o["num_kv_heads"]):
            at = self.first_query[row] + i
            begin, stop = self.kv_start[row], min(self.kv_end[row], at + 1)
            if o["window"] is not None:
                begin = max(begin, at - o["window"] + 1)
            if stop <= begin:
                continue
            of = slice(kv_head * group, (kv_head + 1) * group)  # the heads that share it
            k, v = (x[row][begin:stop, kv_head] for x in (self.k, self.v))
            s = self.q[row, i, of].astype(np.float64) @ k.T * o["sm_scale"]
            if o["logit_cap"] is not None:
                s = o["logit_cap"] * np.tanh(s / o["logit_cap"])
            if o["relative_bias"] is not None:
                bias = o["relative_bias"][row, i, of].astype(np.float64)
                distance = at - np.arange(begin, stop)
                extent = bias.shape[1]
                s = s + np.where(distance < extent, bias[:, np.minimum(distance, extent - 1)], 0)
            sinks = np.full(group, -np.inf) if o["sinks"] is None else o["sinks"][of].astype(np.float64)
            peak = np.maximum(s.max(axis=1), sinks)
            p = np.exp(s - peak[:, None])
            total = p.sum(axis=1) + np.exp(sinks - peak)
            out[row, i, of] = p @ v / total[:, None]
            lse[row, i, of] = peak + np.log(total)
        return out, lse


def make_case(
    lengths,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    one_row: bool | None = None,
    s_q: int = 1,
    page_size: int = 16,
    kv_start=None,
    q_start=None,
    window: int | None = None,
    sinks: bool = False,
    logit_cap: float | None = None,
    bias_extent: int | None = None,
    dtype="float32",
    kv_dtype=None,
    offsets: tuple[int, int] = (1, 2),
    blocks_per_page: int = 4,
    spare_pages: int = 5,
    seed: int = 0,
) -> Case:
    """A random problem with permuted pages. Live: what a query of the row sees, at the blocks `offsets`.

    one_row: K-then-V rows (default: where the widths differ); their block is offsets[0]. fp8: the last block of a page
    holds the scales.
    """
    rng = np.random.default_rng(seed)
    kv_dtype = np.dtype(jnp.dtype(kv_dtype or dtype))
    fp8 = kv_dtype.itemsize == 1
    v_head_dim = v_head_dim or head_dim
    one_row = v_head_dim != head_dim if one_row is None else one_row
    row = kv_heads * (head_dim + v_head_dim if one_row else head_dim) * kv_dtype.itemsize
    kv_start, kv_end = bounds(lengths, kv_start)
    rows = len(kv_end)
    starts = kv_end - s_q if q_start is None else np.asarray(q_start, np.int32)
    pages, num_pages = shuffle_pages(kv_end, page_size, spare_pages, seed)
    pool = np.full((num_pages, blocks_per_page, page_size, row), 0xFF, np.uint8)
    pool[0] = 0
    ratio = row // (4 * kv_heads)
    scale_at = (blocks_per_page - 1) * ratio
    scale_pool = pool.reshape(num_pages, -1, page_size, 4 * kv_heads)
    stored: dict[str, list[np.ndarray]] = {"k": [], "v": []}
    for b in range(rows):
        first = kv_start[b] if window is None else max(kv_start[b], starts[b] - window + 1)
        pos = np.arange(first, kv_end[b])
        page, slot = pages[b, pos // page_size], pos % page_size
        raws = {}
        for i, (name, width) in enumerate((("k", head_dim), ("v", v_head_dim))):
            values = rng.normal(size=(kv_end[b], kv_heads, width)) * rng.uniform(0.5, 2)
            if fp8:
                scale = rng.uniform(0.01, 0.1, (kv_end[b], kv_heads, 1)).astype(np.float32)
                cast = np.clip(values / scale, -448, 448).astype(kv_dtype)
                values = cast.astype(np.float64) * scale
                scale_pool[page, scale_at + i, slot] = scale.reshape(kv_end[b], kv_heads).view(np.uint8)[pos]
            else:
                cast = values.astype(kv_dtype)
                values = cast.astype(np.float64)
            raws[name] = np.ascontiguousarray(cast.reshape(kv_end[b], kv_heads * width)).view(np.uint8)
            stored[name].append(values)
        if one_row:
            pool[page, offsets[0], slot] = np.hstack([raws["k"], raws["v"]])[pos]
        else:
            for name, offset in zip("kv", offsets, strict=True):
                pool[page, offset, slot] = raws[name][pos]
    scales = KVScales(scale_at, scale_at + 1, ratio) if fp8 else None
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return Case(
        q=normal(rows, s_q, heads, head_dim).astype(jnp.dtype(dtype)),
        pool=pool.reshape(-1),
        pages=pages,
        k=stored["k"],
        v=stored["v"],
        kv_start=kv_start,
        kv_end=kv_end,
        q_start=None if q_start is None else starts,
        page_size=page_size,
        blocks_per_page=blocks_per_page,
        num_pages=num_pages,
        offsets=(offsets[0], None if one_row else offsets[1]),
        options={
            "kv_dtype": kv_dtype,
            "num_kv_heads": kv_heads,
            "v_head_dim": v_head_dim,
            "sm_scale": head_dim**-0.5,
            "scales": scales,
            "window": window,
            "sinks": normal(heads) * 2 if sinks else None,
            "logit_cap": logit_cap,
            "relative_bias": None if bias_extent is None else normal(rows, s_q, heads, bias_extent),
        },
    )
