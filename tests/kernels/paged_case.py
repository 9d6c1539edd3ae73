"""What problems of paged attention share: pages in a shuffled pool, sources that name them, and how an answer is judged."""

from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest

from pallas_kernels.read_source import ReadSource
from tests.kernels.delivered import ABSURD, deliver

# A program on a GPU is captured in one command buffer (a CUDA graph), however few its kernels.
CAPTURED = {"xla_gpu_graph_min_graph_size": 1}


@dataclass(frozen=True, kw_only=True)
class PagedCase(ABC):
    """A problem. Every byte that the answer may not depend on is NaN, every id an absurd one.

    Subclasses add what the pool stores, and num_pages, the pages of the pool.
    """

    q: np.ndarray  # [rows, s_q, heads, width]
    pool: np.ndarray  # uint8[total_bytes]
    pages: np.ndarray  # int32[rows, width]: physical page of each column, absurd past kv_end
    kv_start: np.ndarray
    kv_end: np.ndarray
    q_start: np.ndarray | None
    page_size: int
    blocks_per_page: int
    options: dict  # of the operation

    @abstractmethod
    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse) in f64, by the definition."""

    @cached_property
    def answer(self) -> tuple[np.ndarray, np.ndarray]:
        """What `check` expects: of the case as it is when first asked for."""
        return self.expected()

    @property
    def lse_rounding(self) -> float:
        """What lse may be off by however exact the scores are."""
        return 0.0

    @property
    def first_query(self) -> np.ndarray:
        """Position of each row's first query."""
        return self.kv_end - self.q.shape[1] if self.q_start is None else self.q_start

    def source(self, delivery: str, extra_columns: int = 0) -> ReadSource:
        """The ids of this problem as "table", "stream" or "virtual". More columns add absurd ids only."""
        return deliver(
            delivery,
            self.pages,
            self.kv_start,
            self.kv_end,
            page_size=self.page_size,
            blocks_per_page=self.blocks_per_page,
            num_pages=self.num_pages,
            extra_columns=extra_columns,
        )

    def check(self, out, lse, *, tolerance: float | None = None) -> None:
        """Norm of the difference over the norm for each request, and lse; nothing visible is exactly 0 and +inf."""
        if tolerance is None:
            tolerance = 3e-3 if self.q.dtype.itemsize == 2 else 1e-5
        want, want_lse = self.answer
        np.testing.assert_array_equal(np.isposinf(lse), np.isposinf(want_lse))
        visible = np.isfinite(want_lse)
        atol = max(tolerance, self.lse_rounding)
        np.testing.assert_allclose(lse[visible], want_lse[visible], rtol=0, atol=atol)
        assert not np.any(out[~visible])
        for row in range(len(want)):
            error = np.linalg.norm(out[row] - want[row])
            assert error <= tolerance * np.linalg.norm(want[row]), (
                f"row {row}: {error / np.linalg.norm(want[row]):.3g}"
            )


def run_or_skip(must_serve, implementation: str, case: PagedCase, delivery: str = "table", **options):
    """(out, lse) of ``case.run``, or a skip as of `or_skip`."""
    with or_skip(must_serve, implementation, case, delivery):
        return case.run(implementation, delivery, **options)


@contextmanager
def or_skip(must_serve, implementation: str, case: PagedCase, delivery: str = "table"):
    """For a call inside: skips where the implementation declines and `must_serve` says that it may."""
    try:
        yield
    except NotImplementedError as reason:
        if must_serve(implementation, case, delivery):
            raise
        pytest.skip(f"{implementation} declines: {reason}")


def bounds(lengths, kv_start) -> tuple[np.ndarray, np.ndarray]:
    """(kv_start, kv_end) as int32[rows]; None starts all rows at 0."""
    kv_end = np.asarray(lengths, np.int32)
    return np.zeros(len(kv_end), np.int32) if kv_start is None else np.asarray(kv_start, np.int32), kv_end


def shuffle_pages(kv_end: np.ndarray, page_size: int, spare_pages: int, seed: int) -> tuple[np.ndarray, int]:
    """(pages int32[rows, width], number of pages of the pool): physical pages of each row in random order, not page 0."""
    counts = -(-kv_end // page_size)
    num_pages = int(counts.sum()) + spare_pages + 1
    pages = np.resize(ABSURD, (len(kv_end), max(1, int(counts.max(initial=0)))))
    order = np.random.default_rng([seed, num_pages]).permutation(num_pages - 1) + 1
    taken = 0
    for row, count in enumerate(counts):
        pages[row, :count] = order[taken : taken + count]
        taken += count
    return pages.astype(np.int32), num_pages
