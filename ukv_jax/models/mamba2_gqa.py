"""Mamba-2 and grouped-query attention side by side on the same input, their results added (Falcon-H1,
arXiv 2507.22448, section 2)."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array

from ukv_jax.models import gqa, mamba2
from ukv_jax.models.config import ModelConfig


def apply(params: dict[str, Any], config: ModelConfig, layer: int, x: Array, cache: Any) -> tuple[Array, Any]:
    """Mixer interface of the decoder; `layer` counts these layers, both in the state and in the K and V cache.

    params: those of `mamba2.attend` under "mamba2" and of `gqa.attend` under "gqa".
    """
    assert config.mamba2 is not None
    assert config.gqa is not None
    eps, scale = config.rms_norm_eps, config.multipliers
    recurrent, cache = mamba2.attend(params["mamba2"], config.mamba2, eps, layer, x, cache)
    attention, cache = gqa.attend(
        params["gqa"], config.gqa, eps, layer, x * scale.attention_in, cache, pool="full"
    )
    return recurrent * scale.mamba_out + attention * scale.attention_out, cache
