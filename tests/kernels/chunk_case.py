"""Problems for GQA attention of chunks: `gqa_case`, with new tokens at the end of each request and padding behind them."""

from dataclasses import fields

import numpy as np

from pallas_kernels.gqa_prefill import gqa_prefill
from tests.kernels.gqa_case import Case, make_case


class Chunk(Case):
    """Padding queries are NaN, and must give 0 and +inf."""

    def run(self, implementation: str | None, delivery: str = "table", extra_columns: int = 0):
        """(out, lse) as numpy arrays in f64."""
        return self.run_on(self.pool, implementation, self.source(delivery, extra_columns))

    def run_on(self, pool, implementation: str | None, source):
        """`run` over another pool, with a source that names the same rows there."""
        offsets = [None if x is None else np.int32(x) for x in self.offsets]
        return self.call(gqa_prefill, implementation, self.q, pool, source, *offsets, self.q_start)

    @property
    def padding(self) -> np.ndarray:
        """bool[rows, tokens]: which queries are none."""
        return self.q_start[:, None] + np.arange(self.q.shape[1]) >= self.kv_end[:, None]

    def expected(self):
        o = self.options
        rows, tokens, heads, _ = self.q.shape
        out, lse = np.zeros((rows, tokens, heads, o["v_head_dim"])), np.full((rows, tokens, heads), np.inf)
        for row, head in np.ndindex(rows, heads):
            at = self.q_start[row] + np.arange(tokens)[~self.padding[row]][:, None]
            pos = np.arange(self.kv_start[row], self.kv_end[row])
            if not at.size or not pos.size:
                continue
            k, v = (x[row][pos, head * o["num_kv_heads"] // heads] for x in (self.k, self.v))
            s = self.q[row, : len(at), head].astype(np.float64) @ k.T * o["sm_scale"]
            if o["logit_cap"] is not None:
                s = o["logit_cap"] * np.tanh(s / o["logit_cap"])
            distance = at - pos
            if o["relative_bias"] is not None:
                bias = o["relative_bias"][row, : len(at), head].astype(np.float64)
                near = np.take_along_axis(bias, np.clip(distance, 0, bias.shape[1] - 1), axis=1)
                s += np.where(distance < bias.shape[1], near, 0)
            visible = (distance >= 0) & (distance < (o["window"] or np.inf))
            s = np.where(visible, s, -np.inf)
            peak = s.max(axis=1, keepdims=True)
            if o["sinks"] is not None:
                peak = np.maximum(peak, float(o["sinks"][head]))
            some = visible.any(axis=1)
            peak[~some] = 0
            p = np.exp(s - peak)
            total = p.sum(axis=1)
            if o["sinks"] is not None:
                total += np.exp(float(o["sinks"][head]) - peak[:, 0])
            found = np.flatnonzero(some)
            out[row, found, head] = (p[some] @ v) / total[some, None]
            lse[row, found, head] = peak[some, 0] + np.log(total[some])
        return out, lse


def make_chunk(cached, new, tokens: int, **options) -> Chunk:
    """Rows of `new` tokens after `cached` ones, in a chunk of `tokens`. Options of `make_case`."""
    cached, new = np.asarray(cached, np.int32), np.asarray(new, np.int32)
    case = make_case(cached + new, s_q=tokens, q_start=cached, **options)
    chunk = Chunk(**{field.name: getattr(case, field.name) for field in fields(case)})
    chunk.q[chunk.padding] = np.nan
    return chunk
