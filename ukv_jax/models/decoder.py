"""The decoder skeleton: embeddings, layers of a mixer and an MLP with pre-norms, final norm, language model head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from ukv_jax.cache import CacheSpec, HeadKV, LatentKV, StatePart
from ukv_jax.models import gdn, gqa, kda, mamba2, mamba2_gqa, mla, moe, per_layer, short_conv
from ukv_jax.models.config import ModelConfig
from ukv_jax.models.layers import gated_mlp, rms_norm

Params = dict[str, Any]
Mixer = Callable[[dict[str, Array], ModelConfig, int, Array, Any], tuple[Array, Any]]
MIXERS: dict[str, Mixer] = {
    "mla": mla.apply,
    "gqa": gqa.apply,
    "swa": gqa.apply_window,
    "kda": kda.apply,
    "gdn": gdn.apply,
    "mamba2_gqa": mamba2_gqa.apply,
}


def cache_spec(config: ModelConfig, dtype: str | None = None, kv_dtype: str | None = None) -> CacheSpec:
    """Memory that one request needs. `dtype` is the dtype the model computes in (default: the checkpoint's), `kv_dtype`
    that of cached KV rows (default: `dtype`).

    State parts reach the model as [rows, blocks_per_layer, *block_shape].
    """
    dtype = dtype or config.dtype
    kv_dtype = kv_dtype or dtype
    latent = None
    if "mla" in config.mixers:
        assert config.mla is not None
        layers = config.mixers.count("mla")
        latent = LatentKV(layers, config.mla.kv_lora_rank, config.mla.qk_rope_head_dim, kv_dtype)
    kv = tuple(
        HeadKV(config.cache_layers(kind), c.num_kv_heads, c.head_dim, kv_dtype, c.v_head_dim, c.window, name)
        for kind, name, c in (
            ("gqa", "full", config.gqa),
            ("mamba2_gqa", "full", config.gqa),
            ("swa", "swa", config.swa),
        )
        if c is not None and kind in config.mixers
    )
    state: tuple[StatePart, ...] = ()
    if config.kda is not None:
        state = kda.state_parts(config.kda, config.mixers.count("kda"), dtype)
    if config.gdn is not None:
        state = gdn.state_parts(config.gdn, config.mixers.count("gdn"), dtype)
    if config.mamba2 is not None:
        state = mamba2.state_parts(config.mamba2, config.mixers.count("mamba2_gqa"), dtype)
    if config.residual_conv_kernel:
        state = short_conv.residual_state_parts(config, dtype)
    return CacheSpec(latent, state, kv)


def forward(
    params: Params,
    config: ModelConfig,
    tokens: Int32[Array, "rows tokens"],
    cache: Any,
    *,
    last_only: bool = False,
    experts: str | None = None,
) -> tuple[Float[Array, "rows ..."], Any]:
    """Runs `tokens` through the model, on top of what `cache` holds of each row.

    tokens are right-padded: row b has `cache.new_len[b]` of them, 0 for a dead row. Returns float32 logits
    [rows, tokens, vocab], or with last_only [rows, vocab] of the last valid token of each row (undefined for a dead
    row), and the new cache. `experts` names the implementation of the routed experts
    (experts.EXPERTS; None: the one preferred on the device at hand).
    """
    *_, (x, cache) = run_layers(params, config, tokens, cache, experts)
    if last_only:
        last = jnp.maximum(cache.new_len - 1, 0)
        x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
    return logits(params, config, x), cache


def logits(
    params: Params, config: ModelConfig, x: Float[Array, "*batch hidden"]
) -> Float32[Array, "*batch vocab"]:
    """Final norm and language model head, over what the last layer gave."""
    x = rms_norm(x, params["final_norm"], config.rms_norm_eps)
    head = params.get("lm_head", params["embed"])
    contract_hidden = (((x.ndim - 1,), (1,)), ((), ()))
    out = lax.dot_general(x, head, contract_hidden, preferred_element_type=jnp.float32)
    out = out * config.multipliers.logits
    if config.final_logit_cap is not None:
        out = config.final_logit_cap * jnp.tanh(out / config.final_logit_cap)
    return out


def run_layers(
    params: Params,
    config: ModelConfig,
    tokens: Int32[Array, "rows tokens"],
    cache: Any,
    experts: str | None = None,
) -> Iterator[tuple[Float[Array, "rows tokens hidden"], Any]]:
    """Hidden states and cache after the embedding and after each layer; arguments as in `forward`."""
    valid = jnp.arange(tokens.shape[1], dtype=jnp.int32) < cache.new_len[:, None]
    scale = config.multipliers
    x = params["embed"][jnp.where(valid, tokens, 0)] * scale.embedding
    if "embed_norm" in params:
        x = rms_norm(x, params["embed_norm"], config.rms_norm_eps)
    extra = per_layer.inputs(params["per_layer"], config, tokens, x) if "per_layer" in params else None
    yield x, cache
    for i, layer in enumerate(params["layers"]):
        h = rms_norm(x, layer["mixer_norm"], config.rms_norm_eps)
        h, cache = MIXERS[config.mixers[i]](layer["mixer"], config, config.cache_layer(i), h, cache)
        h, cache = _after(h, layer, "mixer", config, i, cache)
        x = x + h
        h = rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)
        if config.mlps[i] == "moe":
            assert config.moe is not None
            h = moe.apply(layer["mlp"], config.moe, h, valid, experts)
        else:
            h = gated_mlp(
                h,
                layer["mlp"]["gate_up"],
                layer["mlp"]["down"],
                activation=config.activation,
                gate_multiplier=scale.mlp_gate,
            )
            h = h * layer["mlp"].get("scale", scale.mlp_out)
        if config.mlps[i] == "dense_moe":
            assert config.moe is not None
            h = moe.beside_dense(layer["mlp"], config.moe, config.rms_norm_eps, x, h, valid, experts)
        h, cache = _after(h, layer, "mlp", config, i, cache)
        x = x + h
        if extra is not None:
            x = per_layer.apply(layer["per_layer"], config, x, extra[:, :, i])
        if "scale" in layer:
            x = x * layer["scale"]
        yield x, cache


def _after(h: Array, layer: Params, name: str, config: ModelConfig, i: int, cache: Any) -> tuple[Array, Any]:
    """A sublayer's result, through the norm and the short convolution that some models have behind it."""
    if f"{name}_post_norm" in layer:
        h = rms_norm(h, layer[f"{name}_post_norm"], config.rms_norm_eps)
    if f"{name}_conv" in layer:
        h, cache = short_conv.residual_conv(h, layer[f"{name}_conv"], i, f"{name}_conv", cache)
    return h, cache
