"""Mamba-2 (arXiv 2405.21060): a short convolution, then a linear recurrence with one decay per head.

Per head, with state S [head_dim, state], step dt_t > 0 and A < 0:

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T        y_t = S_t C_t + D x_t

B and C are shared by the heads of a group. `pallas_kernels.state_step` is that formula for one token, `chunked` computes the
same for many in matrix products (section 6, SSD). A padded token is one with dt = 0: it leaves the state as it was.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.state_step.formulas import einsum
from ukv_jax.cache import StatePart
from ukv_jax.models.config import Mamba2Config
from ukv_jax.models.delta_rule import CHUNK, join_chunks, split_chunks, sum_after
from ukv_jax.models.layers import linear, rms_normalize
from ukv_jax.models.short_conv import short_conv


def _segment_sums(g: Float[Array, "*batch chunk"]) -> Float[Array, "*batch chunk chunk"]:
    """[i, j]: sum of g over (j, i] for j <= i, else -inf. Added up entry by entry: a difference of two prefix sums would
    lose what small entries have beside large ones."""
    i, j = np.ogrid[: g.shape[-1], : g.shape[-1]]
    sums = lax.cumsum(jnp.where(i > j, g[..., :, None], 0), axis=g.ndim - 1)
    return jnp.where(i >= j, sums, -jnp.inf)


def chunked(
    x: Float[Array, "rows tokens heads head_dim"],
    dt: Float[Array, "rows tokens heads"],
    a: Float[Array, " heads"],
    b: Float[Array, "rows tokens groups state"],
    c: Float[Array, "rows tokens groups state"],
    state: Float[Array, "rows heads head_dim state"],
    chunk: int = CHUNK,
) -> tuple[Float[Array, "rows tokens heads head_dim"], Float[Array, "rows heads head_dim state"]]:
    """The recurrence over many tokens, `chunk` at a time, all in float32, without the D x_t term."""
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, found {chunk}")
    heads, groups = x.shape[2], b.shape[2]
    x, g, b, c = (split_chunks(part, chunk) for part in (dt[..., None] * x, dt * a, b, c))
    # [chunks, rows, groups, heads of a group, chunk]
    grouped = (*g.shape[:2], groups, heads // groups, *g.shape[3:])
    x, g = x.reshape(*grouped, x.shape[-1]), g.reshape(grouped)
    # What does not depend on the state, for all chunks at once.
    scores = einsum("zrgin,zrgjn->zrgij", c, b)[:, :, :, None] * jnp.exp(_segment_sums(g))
    fresh = einsum("zrghij,zrghjp->zrghip", scores, x)
    from_start = jnp.exp(jnp.cumsum(g, axis=-1))
    to_end = jnp.exp(sum_after(g[..., None]))
    added = einsum("zrghip,zrgin->zrghpn", x * to_end, b)

    def body(state: Array, block: tuple[Array, ...]) -> tuple[Array, Array]:
        fresh, added, c, from_start = block
        out = fresh + einsum("rghpn,rgin->rghip", state, c) * from_start[..., None]
        return state * from_start[..., -1, None, None] + added, out

    shape = state.shape
    state = state.reshape(shape[0], groups, heads // groups, *shape[2:])
    state, out = lax.scan(body, state, (fresh, added, c, from_start))
    out = out.reshape(*out.shape[:2], heads, *out.shape[4:])
    return join_chunks(out, dt.shape[1]), state.reshape(shape)


def state_parts(config: Mamba2Config, layers: int, dtype: str) -> tuple[StatePart, ...]:
    """What `layers` layers keep of each request."""
    return (
        StatePart("conv", layers, config.conv_kernel - 1, (config.conv_channels,), dtype),
        StatePart("recurrent", layers, config.num_heads, (config.head_dim, config.state_size), "float32"),
    )


def attend(
    params: dict[str, Array],
    config: Mamba2Config,
    norm_eps: float,
    layer: int,
    x: Float[Array, "rows tokens hidden"],
    cache: Any,
) -> tuple[Float[Array, "rows tokens hidden"], Any]:
    """The whole layer, over state parts conv [rows, kernel - 1, x, B and C channels] (inputs of the convolution, model dtype)
    and recurrent [rows, num_heads, head_dim, state_size] (float32) of `layer`.

    Tokens beyond cache.new_len change neither state nor the outputs of valid tokens; a row with new_len 0 keeps its state
    bit for bit.
    """
    rows, tokens = x.shape[:2]
    channels, shared = config.channels, config.num_groups * config.state_size
    heads = (rows, tokens, config.num_heads, config.head_dim)
    valid = jnp.arange(tokens, dtype=jnp.int32) < cache.new_len[:, None]
    x = jnp.where(valid[..., None], x, 0)
    projected = linear(x * config.in_multiplier, params["in_proj"])
    widths = (channels, channels, shared, shared, config.num_heads)
    projected = projected * np.repeat(config.multipliers, widths).astype(projected.dtype)
    gate, conv_in, dt = jnp.split(projected, (channels, channels + config.conv_channels), axis=-1)

    conv_out, cache = short_conv(conv_in, params["conv"], layer, cache, params.get("conv_bias"))
    inner, b, c = jnp.split(conv_out.astype(jnp.float32), (channels, channels + shared), axis=-1)
    inner = inner.reshape(heads)
    b, c = (part.reshape(rows, tokens, config.num_groups, config.state_size) for part in (b, c))
    dt = jax.nn.softplus(dt.astype(jnp.float32) + params["dt_bias"])
    dt = jnp.where(valid[..., None], dt, 0)
    out, cache = _ssm(inner, dt, -jnp.exp(params["A_log"]), b, c, layer, cache)

    out = out + params["D"][:, None] * inner
    out = _gated_norm(out.reshape(rows, tokens, channels), gate, params, config, norm_eps)
    return linear(out.astype(x.dtype), params["out_proj"]), cache


def _ssm(
    x: Array, dt: Array, a: Array, b: Array, c: Array, layer: int, cache: Any
) -> tuple[Float[Array, "rows tokens heads head_dim"], Any]:
    """Over the state in part "recurrent" of `layer`: one token a row in one step in place, more in chunks."""
    if x.shape[1] == 1:
        out, cache = cache.ssm_step(layer, "recurrent", x[:, 0], dt[:, 0], a, b[:, 0], c[:, 0])
        return out[:, None], cache
    state = cache.read_state(layer, ("recurrent",))["recurrent"]
    out, new = chunked(x, dt, a, b, c, state.astype(jnp.float32))
    new = jnp.where((cache.new_len > 0)[:, None, None, None], new.astype(state.dtype), state)
    return out, cache.write_state(layer, {"recurrent": new})


def _gated_norm(out: Array, gate: Array, params: dict[str, Array], config: Mamba2Config, eps: float) -> Array:
    """out * silu(gate), and a root mean square norm of each group's channels before or after that, if there is one."""
    gate = jax.nn.silu(gate.astype(jnp.float32))
    if config.norm_before_gate is None:
        return out * gate
    if not config.norm_before_gate:
        out = out * gate
    by_group = out.reshape(*out.shape[:-1], config.num_groups, -1)
    out = rms_normalize(by_group, eps).reshape(out.shape) * params["norm"].astype(jnp.float32)
    return out * gate if config.norm_before_gate else out
