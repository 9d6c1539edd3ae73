"""Multi-head latent attention in absorbed form.

The cache holds one latent row and one shared positional key a token. The up-projections of the latent are applied to
the query (W_UK) and to the output (W_UV) instead of to every cached row (arXiv 2405.04434, section 2.1.2), so all
heads read the same rows, and V is a prefix of the row.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from ukv_jax.models.config import ModelConfig
from ukv_jax.models.layers import linear, rms_norm
from ukv_jax.models.rope import apply_rope


def apply(
    params: dict[str, Array], config: ModelConfig, layer: int, x: Array, cache: Any
) -> tuple[Array, Any]:
    """Mixer interface of the decoder; `layer` counts the MLA layers. x and result [rows, tokens, hidden].

    The cache gets ql_nope [rows, tokens, heads, kv_lora_rank], q_pe [rows, tokens, heads, qk_rope_head_dim],
    kv_c [rows, tokens, kv_lora_rank] and k_pe [rows, tokens, qk_rope_head_dim], stores the latter two at
    `cache.positions` and returns [rows, tokens, heads, kv_lora_rank].
    """
    mla = config.mla
    assert mla is not None
    rows, tokens = x.shape[:2]
    if mla.q_lora_rank is None:
        q = linear(x, params["q_proj"])
    else:
        q_latent = rms_norm(linear(x, params["q_a_proj"]), params["q_a_norm"], mla.latent_norm_eps)
        q = linear(q_latent, params["q_b_proj"])
    q = q.reshape(rows, tokens, mla.num_heads, mla.qk_head_dim)
    q_nope, q_pe = q[..., : mla.qk_nope_head_dim], q[..., mla.qk_nope_head_dim :]

    latent = linear(x, params["kv_a_proj"])
    kv_c = rms_norm(latent[..., : mla.kv_lora_rank], params["kv_a_norm"], mla.latent_norm_eps)
    k_pe = latent[..., mla.kv_lora_rank :]

    if mla.rope is not None:
        q_pe, k_pe = (apply_rope(mla.rope, pe, cache.positions) for pe in (q_pe, k_pe))
    ql_nope = jnp.einsum("rthn,hnl->rthl", q_nope, params["w_uk"])
    out, cache = cache.mla(layer, ql_nope, q_pe, kv_c, k_pe, sm_scale=mla.sm_scale)
    out = jnp.einsum("rthl,hvl->rthv", out.astype(x.dtype), params["w_uv"])
    return linear(out.reshape(rows, tokens, -1), params["o_proj"]), cache
