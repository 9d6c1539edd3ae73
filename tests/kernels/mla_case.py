"""Problems for paged MLA attention: a poisoned pool, the ids to read it by in each form, and the exact answer."""

import math
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.mla_decode import mla_decode
from tests.kernels.paged_case import PagedCase, bounds, shuffle_pages


@cache
def program(implementation: str, **options):
    """`mla_decode` as one compiled program: q, pool, source, block_offset, q_start to (out, lse)."""
    attend = partial(mla_decode, implementation=implementation, **options)
    return jax.jit(
        lambda q, pool, source, offset, q_start=None: attend(q, pool, source, offset, q_start=q_start)
    )


@dataclass(frozen=True, kw_only=True)
class Case(PagedCase):
    """options: kv_dtype, row_width, v_width, sm_scale, logit_cap."""

    kv: list[np.ndarray]  # for each row f64[kv_end, qk_width], the rows as stored
    block_offset: int

    @property
    def num_pages(self) -> int:
        block = self.page_size * self.options["row_width"] * np.dtype(self.options["kv_dtype"]).itemsize
        return self.pool.size // block // self.blocks_per_page

    @property
    def lse_rounding(self) -> float:
        """With bf16 queries: over bf16 rows lse may be that of weights rounded to bf16, of which one may outweigh the others
        and whose unit roundoff this is; over e4m3 rows the products of a score are added in about 14 bits."""
        return 2**-8 if self.q.dtype == jnp.bfloat16 else 0.0

    def run(self, implementation: str, delivery: str = "table", extra_columns: int = 0):
        """(out, lse) as numpy arrays in f64."""
        return self.run_on(self.pool, implementation, self.source(delivery, extra_columns))

    def run_on(self, pool, implementation: str, source):
        """`run` over another pool, with a source that names the same rows there."""
        attend = program(implementation, **self.options)
        out, lse = attend(self.q, pool, source, np.int32(self.block_offset), self.q_start)
        assert out.dtype == self.q.dtype
        assert lse.dtype == jnp.float32
        return np.asarray(out, np.float64), np.asarray(lse, np.float64)

    def expected(self):
        rows, s_q, heads, _ = self.q.shape
        v_width, cap = self.options["v_width"], self.options["logit_cap"]
        out, lse = np.zeros((rows, s_q, heads, v_width)), np.full((rows, s_q, heads), np.inf)
        for row, i in np.ndindex(rows, s_q):
            stop = min(self.kv_end[row], self.first_query[row] + i + 1)
            if stop <= self.kv_start[row]:
                continue
            kv = self.kv[row][self.kv_start[row] : stop]
            s = self.q[row, i].astype(np.float64) @ kv.T * self.options["sm_scale"]
            if cap is not None:
                s = cap * np.tanh(s / cap)
            peak = s.max(axis=1, keepdims=True)
            p = np.exp(s - peak)
            out[row, i] = p @ kv[:, :v_width] / p.sum(axis=1, keepdims=True)
            lse[row, i] = peak[:, 0] + np.log(p.sum(axis=1))
        return out, lse


def make_case(
    lengths,
    *,
    heads: int = 4,
    s_q: int = 1,
    page_size: int = 64,
    kv_start=None,
    q_start=None,
    qk_width: int = 576,
    v_width: int = 512,
    row_width: int | None = None,
    dtype="bfloat16",
    kv_dtype=None,
    log10_scales: tuple[float, float] = (-2, -1),
    logit_cap: float | None = None,
    blocks_per_page: int = 3,
    block_offset: int = 1,
    spare_pages: int = 5,
    seed: int = 0,
) -> Case:
    """A random problem with permuted pages. Live: the slots [kv_start, kv_end) of the layer at `block_offset`."""
    rng = np.random.default_rng(seed)
    kv_dtype = np.dtype(jnp.dtype(kv_dtype or dtype))
    fp8 = kv_dtype.itemsize == 1
    row_width = row_width or (qk_width + 64 if fp8 else qk_width)
    kv_start, kv_end = bounds(lengths, kv_start)
    rows = len(kv_end)
    pages, num_pages = shuffle_pages(kv_end, page_size, spare_pages, seed)
    pool = np.full((num_pages, blocks_per_page, page_size, row_width * kv_dtype.itemsize), 0xFF, np.uint8)
    if fp8:  # NaN, infinity and subnormals as scales of slots that nobody wrote
        scales = np.array([0xFFFFFFFF, 0x00000001, 0x7F800000, 0x0000FFFF, 0xFF800000, 0x80000001], np.uint32)
        count = num_pages * blocks_per_page * page_size
        words = np.resize(scales, count).view(np.uint8).reshape(*pool.shape[:3], 4)
        pool[..., qk_width : qk_width + 4] = words
    pool[0] = 0
    kv = []
    for row in range(rows):
        values = rng.normal(size=(kv_end[row], qk_width)) * rng.uniform(0.5, 2)
        pos = np.arange(kv_start[row], kv_end[row])
        if fp8:
            scale = (10 ** rng.uniform(*log10_scales, (kv_end[row], 1))).astype(np.float32)
            stored = np.clip(values / scale, -448, 448).astype(kv_dtype)
            raw = np.hstack([stored.view(np.uint8), scale.view(np.uint8)])
            values = stored.astype(np.float64) * scale
        else:
            stored = values.astype(kv_dtype)
            raw = stored.view(np.uint8)
            values = stored.astype(np.float64)
        where = pages[row, pos // page_size], block_offset, pos % page_size
        pool[(*where, slice(0, raw.shape[1]))] = raw[pos]
        kv.append(values)
    return Case(
        q=rng.normal(size=(rows, s_q, heads, qk_width)).astype(jnp.dtype(dtype)),
        pool=pool.reshape(-1),
        pages=pages,
        kv=kv,
        kv_start=kv_start,
        kv_end=kv_end,
        q_start=None if q_start is None else np.asarray(q_start, np.int32),
        page_size=page_size,
        blocks_per_page=blocks_per_page,
        block_offset=block_offset,
        options={
            "kv_dtype": kv_dtype,
            "row_width": row_width,
            "v_width": v_width,
            "sm_scale": 1 / math.sqrt(192),
            "logit_cap": logit_cap,
        },
    )


def must_serve(implementation: str, case: Case, delivery: str) -> bool:
    """May the implementation not decline this problem on an H200? (Others it may, with a reason.)"""
    if implementation == "mosaic":
        row = case.options["kv_dtype"], case.options["row_width"]
        by_pages = delivery != "stream" and case.page_size in (8, 16, 32, 64, 128)
        return (
            case.q.dtype == jnp.bfloat16
            and (row == (jnp.bfloat16, 576) or (row == (jnp.float8_e4m3fn, 640) and by_pages))
            and case.q.shape[1] <= 8
        )
    if implementation == "triton":
        return (
            case.q.dtype == jnp.bfloat16
            and case.options["kv_dtype"] in (jnp.bfloat16, jnp.float8_e4m3fn)
            and case.q.shape[1] <= 8
        )
    return True
