"""Matrix products whose matrix depends on the row: the experts of a mixture."""

from pallas_kernels.grouped_matmul.api import GroupedRows, group_rows, grouped_matmul

__all__ = ["GroupedRows", "group_rows", "grouped_matmul"]
