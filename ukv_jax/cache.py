"""What a model asks of its cache, in terms that know neither pages nor ids.

Models name it (`models.decoder.cache_spec`), `attention.pool_specs` turns it into sub-pools.
"""

from dataclasses import dataclass

from ukv_jax.layout import StatePart as StatePart


@dataclass(frozen=True)
class LatentKV:
    """Rows that MLA caches: kv_lora_rank + qk_rope_head_dim elements a token and layer."""

    num_layers: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    dtype: str


@dataclass(frozen=True)
class HeadKV:
    """K and V of MHA, GQA or MQA: num_kv_heads * head_dim elements of K (and v_head_dim of V) a token and layer.

    window: layers whose queries see the last `window` positions only, their own included. `name` is how a layer says
    which of several such caches is its own.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    v_head_dim: int | None = None
    window: int | None = None
    name: str = "full"


@dataclass(frozen=True)
class CacheSpec:
    """What a model asks of its cache; each part may be absent. Full attention is either `latent` or one HeadKV of `kv`."""

    latent: LatentKV | None
    state: tuple[StatePart, ...]
    kv: tuple[HeadKV, ...] = ()
