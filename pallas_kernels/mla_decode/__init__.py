"""Paged MLA attention in absorbed form over a byte pool."""

from pallas_kernels.mla_decode.api import KV_DTYPES, MAX_DRAFT, mla_decode
from pallas_kernels.xla_attention import merge_partials

__all__ = ["KV_DTYPES", "MAX_DRAFT", "merge_partials", "mla_decode"]
