"""MHA, GQA and MQA over the pool: store K and V of new tokens, then attend to all rows of the request that are visible."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels.gqa_decode import KVScales, gqa_decode
from pallas_kernels.gqa_prefill import gqa_prefill
from pallas_kernels.mla_decode import MAX_DRAFT
from pallas_kernels.read_source import ReadSource
from ukv_jax import views
from ukv_jax.attention.fp8 import quantize
from ukv_jax.layout import SCALE, KVSpec, SubPool
from ukv_jax.translator import KernelTokens


def _spec(subpool: SubPool, k: Array, v: Array) -> KVSpec:
    spec = subpool.spec
    if not isinstance(spec, KVSpec):
        raise ValueError(f"sub-pool {subpool.name!r} holds {type(spec).__name__}, not K and V rows")
    want = (spec.num_kv_heads, spec.head_dim), (spec.num_kv_heads, spec.v_head_dim or spec.head_dim)
    if (k.shape[2:], v.shape[2:]) != want:
        raise ValueError(
            f"sub-pool {subpool.name!r} stores K and V of [kv_heads, width] {list(want[0])} and {list(want[1])}, got "
            f"{list(k.shape[2:])} and {list(v.shape[2:])}"
        )
    return spec


def _one_row(spec: KVSpec) -> bool:
    """K and V of different widths share a row, K first; otherwise each has a block of its own."""
    return spec.v_head_dim not in (None, spec.head_dim)


def write(
    subpool: SubPool,
    buffer: UInt8[Array, " total"],
    layer: int,
    locs: KernelTokens,
    k: Float[Array, "rows tokens kv_heads head_dim"],
    v: Float[Array, "rows tokens kv_heads v_head_dim"],
) -> UInt8[Array, " total"]:
    """Stores K and V of each token at cache-layer `layer`; loc 0 drops."""
    spec, ps = _spec(subpool, k, v), subpool.page_size
    loc = locs.ids.reshape(-1)
    tokens = loc.shape[0]
    blocks = []  # region, block in it, rows
    if spec.dtype == "float8_e4m3fn":
        (k, k_scale), (v, v_scale) = quantize(k), quantize(v)
        blocks += [(SCALE, 2 * layer, k_scale), (SCALE, 2 * layer + 1, v_scale)]
    k, v = k.astype(spec.dtype).reshape(tokens, -1), v.astype(spec.dtype).reshape(tokens, -1)
    if (
        spec.dtype == "float8_e4m3fn"
    ):  # as bytes: XLA for GPU widens an fp8 scatter, and with it the whole pool
        k, v = views.to_bytes(k), views.to_bytes(v)
    if _one_row(spec):
        blocks.append(("kv", layer, jnp.concatenate([k, v], axis=-1)))
    else:
        blocks += [("kv", 2 * layer, k), ("kv", 2 * layer + 1, v)]
    entry, slot = loc // ps, loc % ps
    for region, block, rows in blocks:
        at = entry * _blocks_per_entry(subpool, region) + subpool.block_offset(block, region)
        at, rows = jnp.where(loc > 0, at, -1), rows.reshape(tokens, -1)
        if region == SCALE:  # more rows than int32 counts
            buffer = views.write_slots(buffer, at, slot, ps, rows)
        else:
            buffer = views.write_rows(buffer, jnp.where(loc > 0, at * ps + slot, -1), rows)
    return buffer


def _blocks_per_entry(subpool: SubPool, region: str) -> int:
    """What makes a KV entry the entry of the same page in another region's blocks."""
    ratio, rest = divmod(subpool.stride(region), subpool.stride())
    if rest:
        raise ValueError(
            f"sub-pool {subpool.name!r}: a KV block of {subpool.region().block_bytes} bytes is no whole number of "
            f"{region} blocks of {subpool.region(region).block_bytes}; head dims that are multiples of 4 are"
        )
    return ratio


def attend(
    subpool: SubPool,
    buffer: UInt8[Array, " total"],
    layer: int,
    source: ReadSource,
    q: Float[Array, "rows tokens heads head_dim"],
    q_start: Int32[Array, " rows"],
    *,
    sm_scale: float,
    sinks: Float[Array, " heads"] | None,
    logit_cap: float | None,
    relative_bias: Float[Array, "rows tokens heads extent"] | None,
    implementation: str | None,
) -> tuple[Float[Array, "rows tokens heads v_head_dim"], Float[Array, "rows tokens heads"]]:
    """Output and log-sum-exp of each query, query i of a row at position q_start + i, within the sub-pool's window.

    More than `MAX_DRAFT` tokens a row go to `gqa_prefill`, to which what lies past the source's kv_end is padding.
    """
    spec = subpool.spec
    assert isinstance(spec, KVSpec)
    scales = None
    if spec.dtype == "float8_e4m3fn":
        k_scale, v_scale = (jnp.int32(subpool.block_offset(2 * layer + i, SCALE)) for i in range(2))
        scales = KVScales(k_scale, v_scale, _blocks_per_entry(subpool, SCALE))
    if _one_row(spec):
        k_offset, v_offset = jnp.int32(subpool.block_offset(layer)), None
    else:
        k_offset, v_offset = (jnp.int32(subpool.block_offset(2 * layer + i)) for i in range(2))
    options: dict[str, Any] = dict(
        kv_dtype=spec.dtype,
        num_kv_heads=spec.num_kv_heads,
        v_head_dim=spec.v_head_dim or spec.head_dim,
        sm_scale=sm_scale,
        scales=scales,
        window=spec.window,
        sinks=sinks,
        logit_cap=logit_cap,
        relative_bias=relative_bias,
    )
    if q.shape[1] > MAX_DRAFT:
        # Mosaic serves fewer heads and rows in chunks than in decode: by that name they take what is preferred on the device.
        name = None if implementation == "mosaic" else implementation
        return gqa_prefill(q, buffer, source, k_offset, v_offset, q_start, implementation=name, **options)
    return gqa_decode(
        q, buffer, source, k_offset, v_offset, q_start=q_start, implementation=implementation, **options
    )
