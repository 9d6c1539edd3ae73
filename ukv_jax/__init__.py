"""One byte pool for hybrid models in JAX: attention, sliding windows and recurrent state share it."""
