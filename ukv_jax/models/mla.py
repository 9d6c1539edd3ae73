"""Multi-head latent attention: one latent row and one shared positional key a token (arXiv:2405.04434, section 2.1).

The cache gets the up-projections of the latent (W_UK, W_UV) too: it knows how many tokens it has to read, and with that
whether to apply them to the queries and the output or to the rows.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Array

from ukv_jax.models.config import ModelConfig
from ukv_jax.models.layers import linear, rms_norm
from ukv_jax.models.rope import apply_rope


def apply(
    params: dict[str, Array], config: ModelConfig, layer: int, x: Array, cache: Any
) -> tuple[Array, Any]:
    """Mixer interface of the decoder; `layer` counts the MLA layers. x and result [rows, tokens, hidden].

    The cache gets q_nope [rows, tokens, heads, qk_nope_head_dim], q_pe [rows, tokens, heads, qk_rope_head_dim],
    kv_c [rows, tokens, kv_lora_rank], k_pe [rows, tokens, qk_rope_head_dim], w_uk [heads, qk_nope_head_dim, kv_lora_rank]
    and w_uv [heads, v_head_dim, kv_lora_rank], stores kv_c and k_pe at `cache.positions` and returns
    [rows, tokens, heads, v_head_dim].
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
    out, cache = cache.mla(
        layer, q_nope, q_pe, kv_c, k_pe, params["w_uk"], params["w_uv"], sm_scale=mla.sm_scale
    )
    return linear(out.reshape(rows, tokens, -1), params["o_proj"]), cache
