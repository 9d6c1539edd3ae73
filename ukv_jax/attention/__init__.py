"""Write this step's KV rows or state into the pool and read them back: what a model sees of the memory."""

from ukv_jax.attention.step import PoolStep, begin_step, pool_specs

__all__ = ["PoolStep", "begin_step", "pool_specs"]
