"""Problems for MLA attention of new tokens, and the exact answer."""

from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.mla_prefill import Rows, mla_prefill


@cache
def program(implementation: str, sm_scale: float):
    """`mla_prefill` as one compiled program."""
    return jax.jit(partial(mla_prefill, sm_scale=sm_scale, implementation=implementation))


@dataclass(frozen=True)
class Prefill:
    """A ragged batch. What belongs to no row is NaN."""

    q: np.ndarray  # [tokens, heads, nope + rope]
    k_nope: np.ndarray  # [tokens, heads, nope]
    k_pe: np.ndarray  # [tokens, rope]
    v: np.ndarray  # [tokens, heads, v_width]
    start: np.ndarray
    length: np.ndarray
    sm_scale: float

    @property
    def rows(self) -> Rows:
        return Rows(jnp.asarray(self.start, jnp.int32), jnp.asarray(self.length, jnp.int32))

    @property
    def arrays(self):
        return tuple(jnp.asarray(x) for x in (self.q, self.k_nope, self.k_pe, self.v))

    def run(self, implementation: str):
        """(out, lse) as numpy arrays in f64."""
        out, lse = program(implementation, self.sm_scale)(*self.arrays, self.rows)
        assert out.dtype == self.q.dtype
        assert lse.dtype == jnp.float32
        return np.asarray(out, np.float64), np.asarray(lse, np.float64)

    def row(self, b: int) -> slice:
        return slice(self.start[b], self.start[b] + self.length[b])

    def expected(self, prefix=None):
        """(out, lse) in f64, by the definition. prefix: for each row (K f64[n, heads, qk], V f64[n, heads, v]) before it."""
        out = np.zeros((*self.q.shape[:2], self.v.shape[2]))
        lse = np.full(self.q.shape[:2], np.inf)
        for b in range(len(self.start)):
            at, n = self.row(b), self.length[b]
            q, nope, pe, v = (x[at].astype(np.float64) for x in (self.q, self.k_nope, self.k_pe, self.v))
            k = np.concatenate([nope, np.broadcast_to(pe[:, None], (*nope.shape[:2], pe.shape[1]))], axis=-1)
            before = 0
            if prefix is not None:
                k, v = np.concatenate([prefix[b][0], k]), np.concatenate([prefix[b][1], v])
                before = len(prefix[b][0])
            if n == 0:
                continue
            s = q.swapaxes(0, 1) @ k.transpose(1, 2, 0) * self.sm_scale
            s = np.where(np.arange(before + n) <= before + np.arange(n)[:, None], s, -np.inf)
            peak = s.max(axis=-1, keepdims=True)
            p = np.exp(s - peak)
            total = p.sum(axis=-1, keepdims=True)
            out[at] = (p / total @ v.swapaxes(0, 1)).swapaxes(0, 1)
            lse[at] = (peak + np.log(total))[..., 0].T
        return out, lse

    def check(self, out, lse, *, prefix=None, tolerance=None, lse_tolerance=None) -> None:
        """Norm of the difference over the norm for each row, and lse; a token of no row has exactly 0 and +inf."""
        if tolerance is None:
            tolerance = 3e-3 if self.q.dtype == jnp.bfloat16 else 1e-5
        want, want_lse = self.expected(prefix)
        np.testing.assert_array_equal(np.isposinf(lse), np.isposinf(want_lse))
        seen = np.isfinite(want_lse)
        np.testing.assert_allclose(lse[seen], want_lse[seen], rtol=0, atol=lse_tolerance or tolerance)
        assert not np.any(out[~seen])
        for b in range(len(self.start)):
            error, size = (np.linalg.norm(x[self.row(b)]) for x in (out - want, want))
            assert error <= tolerance * size, f"row {b}: {error / size:.3g}"


def make_prefill(
    lengths,
    *,
    heads: int = 2,
    nope: int = 128,
    rope: int = 64,
    v_width: int = 128,
    width: int | None = None,
    gap: int = 0,
    dtype="bfloat16",
    seed: int = 0,
) -> Prefill:
    """Right-padded to `width` tokens a row, or packed with `gap` tokens of no row before each and after the last."""
    rng = np.random.default_rng(seed)
    length = np.asarray(lengths, np.int32)
    if width is None:
        start = (np.cumsum(length) - length + gap * np.arange(1, len(length) + 1)).astype(np.int32)
        tokens = int(length.sum()) + gap * (len(length) + 1)
    else:
        start = np.arange(len(length), dtype=np.int32) * width
        tokens = len(length) * width
    dead = np.ones(tokens, bool)
    for s, n in zip(start, length, strict=True):
        dead[s : s + n] = False

    def draw(*shape):
        x = rng.standard_normal((tokens, *shape), np.float32)
        x[dead] = np.nan
        return x.astype(jnp.dtype(dtype))

    return Prefill(
        q=draw(heads, nope + rope),
        k_nope=draw(heads, nope),
        k_pe=draw(rope),
        v=draw(heads, v_width),
        start=start,
        length=length,
        sm_scale=float((nope + rope) ** -0.5),
    )
