"""Binding virtual pages to physical ones, and unbinding them."""

from pallas_kernels.bind_pages.api import bind, tombstone

__all__ = ["bind", "tombstone"]
