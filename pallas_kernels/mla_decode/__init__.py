"""Paged MLA attention in absorbed form over a byte pool."""

from pallas_kernels.mla_decode.api import mla_decode
from pallas_kernels.xla_attention import merge_partials

__all__ = ["merge_partials", "mla_decode"]
