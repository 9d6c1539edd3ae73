"""Model families: each is a config map and a weight map over shared layer kinds."""

from ukv_jax.models.families import deepseek, kimi_linear
from ukv_jax.models.families.family import Family

FAMILIES: dict[str, Family] = {
    "deepseek_v2": deepseek.V2,
    "deepseek_v3": deepseek.V3,
    "kimi_linear": kimi_linear.FAMILY,
}

__all__ = ["FAMILIES", "Family"]
