"""Paged MHA, GQA and MQA attention over a byte pool."""

from pallas_kernels.gqa_decode.api import KVScales, gqa_decode
from pallas_kernels.xla_attention import merge_partials

__all__ = ["KVScales", "gqa_decode", "merge_partials"]
