"""What a model asks of its cache, in terms that know neither pages nor ids.

Models name it (`models.decoder.cache_spec`), `attention.pool_specs` turns it into sub-pools.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class StatePart:
    """One part of a request's recurrent state: `blocks_per_layer` blocks of `block_shape` for each of num_layers."""

    name: str
    num_layers: int
    blocks_per_layer: int
    block_shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class LatentKV:
    """Rows that MLA caches: kv_lora_rank + qk_rope_head_dim elements a token and layer."""

    num_layers: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    dtype: str


@dataclass(frozen=True)
class CacheSpec:
    """What a model asks of its cache; either may be absent."""

    latent: LatentKV | None
    state: tuple[StatePart, ...]
