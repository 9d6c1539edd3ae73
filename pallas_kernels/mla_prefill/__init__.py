"""MLA attention of new tokens: among themselves, and to a cached prefix in the pool."""

from pallas_kernels.mla_prefill.api import mla_extend, mla_prefill
from pallas_kernels.mla_prefill.rows import Rows

__all__ = ["Rows", "mla_extend", "mla_prefill"]
