"""Model families: each is a config map and a weight map over shared layer kinds."""

from ukv_jax.models.families import deepseek, falcon_h1, gemma4, gpt_oss, inkling, kimi_linear, qwen3_5
from ukv_jax.models.families.family import Family

FAMILIES: dict[str, Family] = {
    "deepseek_v2": deepseek.V2,
    "deepseek_v3": deepseek.V3,
    "falcon_h1": falcon_h1.FAMILY,
    "gemma4": gemma4.FAMILY,
    "gemma4_text": gemma4.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "inkling_mm_model": inkling.FAMILY,
    "inkling_text": inkling.FAMILY,
    "kimi_linear": kimi_linear.FAMILY,
    "qwen3_5": qwen3_5.DENSE,
    "qwen3_5_moe": qwen3_5.MOE,
    "qwen3_5_moe_text": qwen3_5.MOE,
    "qwen3_5_text": qwen3_5.DENSE,
}

__all__ = ["FAMILIES", "Family"]
