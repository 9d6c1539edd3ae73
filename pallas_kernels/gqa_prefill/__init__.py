"""Paged MHA, GQA and MQA attention of chunks of new tokens over a byte pool."""

from pallas_kernels.gqa_prefill.api import gqa_prefill

__all__ = ["gqa_prefill"]
