"""A cache of plain contiguous arrays: the reference that the pool-backed caches are compared with."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.state_step import formulas
from ukv_jax.cache import CacheSpec


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["latent", "kv", "state", "lengths", "positions", "new_len"],
    meta_fields=["spec"],
)
@dataclasses.dataclass(frozen=True)
class DenseCache:
    latent: jax.Array | None  # [layers, rows, max_len, kv_lora_rank + qk_rope_head_dim]
    kv: dict[str, tuple[jax.Array, jax.Array]]  # name -> K and V [layers, rows, max_len, kv_heads, width]
    state: dict[str, jax.Array]  # name -> [layers, rows, ...]
    lengths: jax.Array  # Int32[rows], tokens held
    positions: jax.Array  # Int32[rows, tokens] of this step
    new_len: jax.Array  # Int32[rows], valid tokens of this step
    spec: CacheSpec

    def begin(self, tokens: int, new_len: Any) -> DenseCache:
        """Opens a step of up to `tokens` tokens a row."""
        positions = self.lengths[:, None] + jnp.arange(tokens, dtype=jnp.int32)
        return dataclasses.replace(self, positions=positions, new_len=jnp.asarray(new_len, jnp.int32))

    def end(self) -> DenseCache:
        """Closes the step: its tokens are now part of the rows."""
        return dataclasses.replace(self, lengths=self.lengths + self.new_len)

    def mla(self, layer, q_nope, q_pe, kv_c, k_pe, w_uk, w_uv, *, sm_scale):
        ql_nope = jnp.einsum("rthn,hnl->rthl", q_nope, w_uk)
        new = jnp.concatenate([kv_c, k_pe], axis=-1)
        valid = jnp.arange(new.shape[1]) < self.new_len[:, None]
        max_len = self.latent.shape[2]
        latent = self._store(self.latent, layer, new)
        kv = latent[layer].astype(jnp.float32)
        q = jnp.concatenate([ql_nope, q_pe], axis=-1).astype(jnp.float32)
        high = lax.Precision.HIGHEST
        scores = jnp.einsum("rthw,rsw->rhts", q, kv, precision=high) * sm_scale
        seen = (jnp.arange(max_len) <= self.positions[..., None]) & valid[..., None]
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        top = jnp.where(valid[:, None, :, None], scores.max(-1, keepdims=True), 0)
        weights = jnp.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        weights = weights / jnp.where(total == 0, 1, total)
        out = jnp.einsum("rhts,rsl->rthl", weights, kv[..., : self.spec.latent.kv_lora_rank], precision=high)
        out = jnp.einsum("rthl,hvl->rthv", out.astype(q_nope.dtype), w_uv)
        return out, dataclasses.replace(self, latent=latent)

    def _store(self, array, layer, new):
        """New tokens' rows at their positions; padding is dropped."""
        valid = jnp.arange(new.shape[1]) < self.new_len[:, None]
        at = jnp.where(valid, self.positions, array.shape[2])
        rows = jnp.arange(new.shape[0])[:, None]
        return array.at[layer, rows, at].set(new.astype(array.dtype), mode="drop")

    def gqa(self, layer, q, k, v, *, pool="full", sm_scale, sinks=None, logit_cap=None, relative_bias=None):
        keys, values = self.kv[pool]
        if k is not None:
            keys, values = self._store(keys, layer, k), self._store(values, layer, v)
        window = next(kv.window for kv in self.spec.kv if kv.name == pool)
        rows, tokens, heads, _ = q.shape
        max_len, kv_heads = keys.shape[2:4]
        high = lax.Precision.HIGHEST
        grouped = q.astype(jnp.float32).reshape(rows, tokens, kv_heads, -1, q.shape[3])
        scores = jnp.einsum("rtkgd,rskd->rtkgs", grouped, keys[layer].astype(jnp.float32), precision=high)
        scores = scores.reshape(rows, tokens, heads, max_len) * sm_scale
        if logit_cap is not None:
            scores = logit_cap * jnp.tanh(scores / logit_cap)
        distance = self.positions[..., None] - jnp.arange(max_len)
        if relative_bias is not None:
            extent = relative_bias.shape[-1]
            near = jnp.clip(distance, 0, extent - 1)[:, :, None]
            bias = jnp.take_along_axis(relative_bias.astype(jnp.float32), near, axis=-1)
            scores = scores + jnp.where((distance < extent)[:, :, None], bias, 0)
        seen = (distance >= 0) & (distance < (window or max_len))
        scores = jnp.where(seen[:, :, None], scores, -jnp.inf)
        sink = -jnp.inf if sinks is None else sinks.astype(jnp.float32)[:, None]
        top = jnp.maximum(scores.max(-1, keepdims=True), sink)
        weights = jnp.exp(scores - top)
        weights = weights / (weights.sum(-1, keepdims=True) + jnp.exp(sink - top))
        grouped = weights.reshape(rows, tokens, kv_heads, -1, max_len)
        out = jnp.einsum("rtkgs,rskd->rtkgd", grouped, values[layer].astype(jnp.float32), precision=high)
        new = dataclasses.replace(self, kv=self.kv | {pool: (keys, values)})
        return out.reshape(rows, tokens, heads, -1).astype(q.dtype), new

    def conv_step(self, layer, part, x, weight, bias=None, *, residual=False):
        step = partial(formulas.convolution, x, weight, bias, residual=residual)
        return self._state_step(layer, part, step)

    def delta_step(self, layer, part, *inputs, piece):
        assert self.state[part].shape[-2:] == piece
        return self._state_step(layer, part, partial(formulas.delta_rule, *inputs))

    def ssm_step(self, layer, part, *inputs):
        return self._state_step(layer, part, partial(formulas.ssm, *inputs))

    def _state_step(self, layer, part, step):
        """Dead rows keep their state."""
        old = self.state[part][layer]
        out, new = step(old)
        live = (self.new_len > 0).reshape(-1, *(1,) * (old.ndim - 1))
        return out, self.write_state(layer, {part: jnp.where(live, new, old)})

    def read_state(self, layer, parts=None):
        return {name: self.state[name][layer] for name in parts or self.state}

    def write_state(self, layer, state):
        new = {name: self.state[name].at[layer].set(value) for name, value in state.items()}
        return dataclasses.replace(self, state=self.state | new)


def make_dense_cache(spec: CacheSpec, rows: int, max_len: int) -> DenseCache:
    latent = None
    if spec.latent is not None:
        width = spec.latent.kv_lora_rank + spec.latent.qk_rope_head_dim
        latent = jnp.zeros((spec.latent.num_layers, rows, max_len, width), spec.latent.dtype)

    def zeros(kv, width):
        return jnp.zeros((kv.num_layers, rows, max_len, kv.num_kv_heads, width), kv.dtype)

    kv = {c.name: (zeros(c, c.head_dim), zeros(c, c.v_head_dim or c.head_dim)) for c in spec.kv}
    state = {
        p.name: jnp.zeros((p.num_layers, rows, p.blocks_per_layer, *p.block_shape), p.dtype)
        for p in spec.state
    }
    zero = jnp.zeros(rows, jnp.int32)
    return DenseCache(latent, kv, state, zero, jnp.zeros((rows, 1), jnp.int32), zero, spec)
