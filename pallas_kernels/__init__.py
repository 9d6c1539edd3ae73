"""GPU kernels and plain XLA references for paged attention over one byte pool. Imports nothing from `ukv_jax`."""
