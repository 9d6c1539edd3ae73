"""One step of a batch over the pool: translated once, used by every layer.

`PoolStep` is the cache that models talk to. Its methods write before they read, so a new token sees itself, and return a
new step that holds the new buffer.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels import state_step
from pallas_kernels.mla_decode import KV_DTYPES, MAX_DRAFT
from pallas_kernels.read_source import ReadSource
from ukv_jax import requests, translator
from ukv_jax.attention import gqa, mla, recurrent
from ukv_jax.cache import CacheSpec
from ukv_jax.layout import KVSpec, MLASpec, PoolLayout, Spec, StateSpec
from ukv_jax.pool import UNBOUND, PoolState
from ukv_jax.translator import Delivery, KernelTokens


def pool_specs(spec: CacheSpec) -> tuple[Spec, ...]:
    """Sub-pools that a model's cache needs. ValueError for a dtype of latent rows that no attention over them reads."""
    specs: list[Spec] = []
    if spec.latent is not None:
        latent = spec.latent
        if latent.dtype not in KV_DTYPES:
            raise ValueError(
                f"latent attention (MLA) caches its rows in one of {', '.join(KV_DTYPES)}, not in {latent.dtype}: "
                f"choose another dtype, or a kv_dtype"
            )
        specs.append(MLASpec(latent.num_layers, latent.kv_lora_rank, latent.qk_rope_head_dim, latent.dtype))
    specs += [
        KVSpec(kv.num_layers, kv.num_kv_heads, kv.head_dim, kv.v_head_dim, kv.dtype, kv.window, kv.name)
        for kv in spec.kv
    ]
    if spec.state:
        specs.append(StateSpec(spec.state))
    return tuple(specs)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PoolStep:
    """positions [rows, tokens] of the new tokens, right-padded; new_len [rows] valid ones, 0 = dead row.

    sources and write_locs: addresses in the full and in every sliding-window sub-pool, by its name.
    """

    buffer: UInt8[Array, " total_bytes"]
    positions: Int32[Array, "rows tokens"]
    new_len: Int32[Array, " rows"]
    sources: dict[str, ReadSource]
    write_locs: dict[str, KernelTokens]
    slots: Int32[Array, " rows"] | None
    layout: PoolLayout = field(metadata={"static": True})
    implementation: str | None = field(metadata={"static": True})

    def mla(
        self,
        layer: int,
        q_nope: Float[Array, "rows tokens heads nope"],
        q_pe: Float[Array, "rows tokens heads rope"],
        kv_c: Float[Array, "rows tokens kv_lora_rank"],
        k_pe: Float[Array, "rows tokens rope"],
        w_uk: Float[Array, "heads nope kv_lora_rank"],
        w_uv: Float[Array, "heads v kv_lora_rank"],
        *,
        sm_scale: float,
    ) -> tuple[Float[Array, "rows tokens heads v"], "PoolStep"]:
        """Stores kv_c and k_pe of the new tokens at cache-layer `layer`, then attends.

        Up to `MAX_DRAFT` tokens a row attend in absorbed form: the up-projections go to the query and to the output, and
        all heads read the same rows (arXiv:2405.04434, section 2.1.2). Longer chunks expand K and V for each head.
        """
        full = self.layout.full
        source, start = self.sources[full.name], self.positions[:, 0]
        options: dict[str, Any] = dict(sm_scale=sm_scale, implementation=self.implementation)
        buffer = mla.write(full, self.buffer, layer, self.write_locs[full.name], kv_c, k_pe)
        if kv_c.shape[1] > MAX_DRAFT:
            q = jnp.concatenate([q_nope, q_pe], axis=-1)
            out = mla.extend(
                full, buffer, layer, source, q, kv_c, k_pe, w_uk, w_uv, start, self.new_len, **options
            )
        else:
            ql_nope = jnp.einsum("rthn,hnl->rthl", q_nope, w_uk)
            out, _ = mla.attend(full, buffer, layer, source, ql_nope, q_pe, start, **options)
            out = jnp.einsum("rthl,hvl->rthv", out.astype(q_nope.dtype), w_uv)
        return out, replace(self, buffer=buffer)

    def gqa(
        self,
        layer: int,
        q: Array,
        k: Array | None,
        v: Array | None,
        *,
        pool: str = "full",
        sm_scale: float,
        sinks: Array | None = None,
        logit_cap: float | None = None,
        relative_bias: Array | None = None,
    ) -> tuple[Array, "PoolStep"]:
        """Stores k and v of the new tokens at cache-layer `layer` of sub-pool `pool`, then attends within its window.

        Without k and v it reads what another layer has stored there in this step. Shapes as in `attention.gqa`; options
        as in `pallas_kernels.gqa_decode.gqa_decode`. More than `MAX_DRAFT` tokens a row go to `gqa_prefill`; there
        what padding tokens give is 0.
        """
        if pool not in self.sources:
            raise ValueError(f"no KV sub-pool {pool!r}; this layout has {sorted(self.sources)}")
        if (k is None) != (v is None):
            missing = "v" if v is None else "k"
            raise ValueError(f"k and v must both be given or both be None; {missing} is missing")
        subpool = self.layout[pool]
        buffer = self.buffer
        if k is not None and v is not None:
            buffer = gqa.write(subpool, buffer, layer, self.write_locs[pool], k, v)
        out, _ = gqa.attend(
            subpool,
            buffer,
            layer,
            self.sources[pool],
            q,
            self.positions[:, 0],
            sm_scale=sm_scale,
            sinks=sinks,
            logit_cap=logit_cap,
            relative_bias=relative_bias,
            implementation=self.implementation,
        )
        return out, replace(self, buffer=buffer)

    def conv_step(
        self,
        layer: int,
        part: str,
        x: Float[Array, "rows channels"],
        weight: Float[Array, "channels kernel"],
        bias: Float[Array, " channels"] | None = None,
        *,
        residual: bool = False,
    ) -> tuple[Float[Array, "rows channels"], "PoolStep"]:
        """One token a row through a short convolution whose last inputs are state part `part` of `layer`.

        As `pallas_kernels.state_step.conv_step`, like the next two methods of theirs.
        """
        return self._state_step(state_step.conv_step, layer, part, x, weight, bias, residual=residual)

    def delta_step(
        self,
        layer: int,
        part: str,
        qkv: Array,
        f: Array,
        b: Array,
        a_log: Array,
        dt_bias: Array,
        *,
        piece: tuple[int, int],
    ) -> tuple[Float[Array, "rows heads v"], "PoolStep"]:
        inputs = (qkv, f, b, a_log, dt_bias)
        return self._state_step(state_step.delta_step, layer, part, *inputs, piece=piece)

    def ssm_step(
        self, layer: int, part: str, x: Array, dt: Array, a: Array, b: Array, c: Array
    ) -> tuple[Float[Array, "rows heads head_dim"], "PoolStep"]:
        return self._state_step(state_step.ssm_step, layer, part, x, dt, a, b, c)

    def _state_step(
        self, step: Callable[..., Any], layer: int, part: str, *inputs: Array | None, **options: Any
    ) -> tuple[Array, "PoolStep"]:
        blocks = recurrent.blocks(self.layout.state, part, layer)
        implementation = None if self.implementation == "triton" else self.implementation
        buffer, out = step(self.buffer, self.slots, blocks, *inputs, **options, implementation=implementation)
        return out, replace(self, buffer=buffer)

    def read_state(self, layer: int, parts: Iterable[str] | None = None) -> dict[str, Array]:
        return recurrent.read(self.layout.state, self.buffer, layer, self.slots, parts)

    def write_state(self, layer: int, state: dict[str, Array]) -> "PoolStep":
        return replace(self, buffer=recurrent.write(self.layout.state, self.buffer, layer, self.slots, state))


def begin_step(
    state: PoolState,
    rows: Int32[Array, " rows"] | None,
    new_len: Int32[Array, " rows"],
    *,
    tokens: int,
    delivery: Delivery = "table",
    implementation: str | None = None,
) -> PoolStep:
    """Translates for a step of up to `tokens` new tokens a row, at positions seq_len onward.

    The rows' pages must be reserved. delivery chooses how attention gets its addresses, implementation which kernel runs:
    the one of that name, or else NotImplementedError. By the name triton chunks of MLA and state steps, by the name mosaic
    chunks of GQA take the one preferred for the device all the same.

    Args:
      rows: request row of each lane; None = every request row, in order. Of lanes that name one row the first counts.
      new_len: new tokens of each lane. 0 makes a lane dead: it writes nothing and reads nothing, as does one that names
        no row of its own.

    The result's `new_len` says which lanes live. Rows that share pages can hold more tokens in all than a sub-pool has
    room for, and a stream has room for those (`translator.stream_capacity`): delivered by "stream", the first lane whose
    tokens do not fit and all later ones that have any are dead.
    """
    if rows is None:
        rows = row = jnp.arange(state.layout.max_requests, dtype=jnp.int32)
    else:
        own, row = requests.own_row(state, rows)
        new_len = jnp.where(own, new_len, 0)
    start = state.requests.seq_len[row]
    if delivery == "stream":
        room = translator.fit_in_streams(state, jnp.where(new_len > 0, start + new_len, 0), q_start=start)
        new_len = jnp.where(room, new_len, 0)
    offset = jnp.arange(tokens, dtype=jnp.int32)
    positions = start[:, None] + offset
    virtual = translator.virtual_tokens(state, rows, positions)
    valid = offset < new_len[:, None]
    virtual = replace(virtual, ids=jnp.where(valid, virtual.ids, UNBOUND))
    live = new_len > 0
    kv_end = jnp.where(live, start + new_len, 0)
    sources = translator.read_sources(state, rows, kv_end, q_start=start, delivery=delivery)
    slots = None
    if state.layout.state is not None:
        slots = jnp.where(live, translator.translate_state_slots(state, rows), -1)
    return PoolStep(
        state.buffer,
        positions,
        new_len,
        sources,
        {name: translator.translate_write_locs(state, virtual, name) for name in sources},
        slots,
        state.layout,
        implementation,
    )
