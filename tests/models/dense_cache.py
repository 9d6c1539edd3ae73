"""A cache of plain contiguous arrays: the reference that the pool-backed caches are compared with."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ukv_jax.cache import CacheSpec


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["latent", "state", "lengths", "positions", "new_len"],
    meta_fields=["kv_lora_rank"],
)
@dataclasses.dataclass(frozen=True)
class DenseCache:
    latent: jax.Array  # [layers, rows, max_len, kv_lora_rank + qk_rope_head_dim]
    state: dict[str, jax.Array]  # name -> [layers, rows, ...]
    lengths: jax.Array  # Int32[rows], tokens held
    positions: jax.Array  # Int32[rows, tokens] of this step
    new_len: jax.Array  # Int32[rows], valid tokens of this step
    kv_lora_rank: int

    def begin(self, tokens: int, new_len: Any) -> DenseCache:
        """Opens a step of up to `tokens` tokens a row."""
        positions = self.lengths[:, None] + jnp.arange(tokens, dtype=jnp.int32)
        return dataclasses.replace(self, positions=positions, new_len=jnp.asarray(new_len, jnp.int32))

    def end(self) -> DenseCache:
        """Closes the step: its tokens are now part of the rows."""
        return dataclasses.replace(self, lengths=self.lengths + self.new_len)

    def mla(self, layer, ql_nope, q_pe, kv_c, k_pe, *, sm_scale):
        new = jnp.concatenate([kv_c, k_pe], axis=-1)
        valid = jnp.arange(new.shape[1]) < self.new_len[:, None]
        max_len = self.latent.shape[2]
        at = jnp.where(valid, self.positions, max_len)
        rows = jnp.arange(new.shape[0])[:, None]
        latent = self.latent.at[layer, rows, at].set(new.astype(self.latent.dtype), mode="drop")
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
        out = jnp.einsum("rhts,rsl->rthl", weights, kv[..., : self.kv_lora_rank], precision=high)
        return out.astype(ql_nope.dtype), dataclasses.replace(self, latent=latent)

    def read_state(self, layer):
        return {name: value[layer] for name, value in self.state.items()}

    def write_state(self, layer, state):
        new = {name: value.at[layer].set(state[name]) for name, value in self.state.items()}
        return dataclasses.replace(self, state=new)


def make_dense_cache(spec: CacheSpec, rows: int, max_len: int) -> DenseCache:
    assert spec.latent is not None
    width = spec.latent.kv_lora_rank + spec.latent.qk_rope_head_dim
    state = {
        p.name: jnp.zeros((p.num_layers, rows, p.blocks_per_layer, *p.block_shape), p.dtype)
        for p in spec.state
    }
    zero = jnp.zeros(rows, jnp.int32)
    latent = jnp.zeros((spec.latent.num_layers, rows, max_len, width), spec.latent.dtype)
    return DenseCache(latent, state, zero, jnp.zeros((rows, 1), jnp.int32), zero, spec.latent.kv_lora_rank)
