"""Read tables, token streams and write locations from virtual ids."""

from pallas_kernels.gather_translate.api import (
    fill_packed_read_stream,
    fill_read_table,
    fill_read_tables,
    packed_indptr,
    translate_dcp_read_ids,
    translate_write_locs,
)

__all__ = [
    "fill_packed_read_stream",
    "fill_read_table",
    "fill_read_tables",
    "packed_indptr",
    "translate_dcp_read_ids",
    "translate_write_locs",
]
