"""Moving whole pages inside a byte pool, in place."""

from pallas_kernels.move_pages.api import move_pages

__all__ = ["move_pages"]
