"""Attention of new tokens to the cached prefix of their rows, in two forms, and the merge of partial results."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels import device
from pallas_kernels.mla_decode import MAX_DRAFT, merge_partials, mla_decode
from pallas_kernels.mla_decode.reference import load_rows
from pallas_kernels.mla_prefill.rows import Rows
from pallas_kernels.xla_attention import row_index

_CHUNK_BYTES = 256 << 20  # expanded K and V of one chunk stay within this
_MIN_CHUNK, _MAX_CHUNK = 128, 4096  # below the least, fewer heads at a time

Partial = tuple[Array, Array]

# Full f32 products on every backend; no effect on bf16.
_project = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def preferred_form(
    queries: int, *, rank: int, nope: int, rope: int, v_width: int
) -> Literal["absorbed", "expanded"]:
    """The form with fewer FLOPs a cached row and head when that many queries read it; on a GPU "absorbed" only for as
    many as the decode kernels serve."""
    if queries > MAX_DRAFT and device.target()[0] == "cuda":
        return "expanded"
    absorbed = queries * (2 * rank + rope)
    expanded = queries * (nope + rope + v_width) + rank * (nope + v_width)
    return "absorbed" if absorbed <= expanded else "expanded"


def merge(parts: Sequence[Partial], dtype: Any) -> Partial:
    """Results over disjoint sets of keys -> the result over their union."""
    out, lse = merge_partials(
        jnp.stack([out.astype(jnp.float32) for out, _ in parts]), jnp.stack([lse for _, lse in parts])
    )
    return out.astype(dtype), lse


def absorbed(  # type: ignore[no-untyped-def]
    q,
    rows: Rows,
    w_uk,
    w_uv,
    pool: dict[str, Any],
    *,
    max_new: int,
    sm_scale: float,
    implementation: str | None,
) -> Partial:
    """Latent queries [rows, max_new] through `mla_decode`."""
    tokens, heads, _ = q.shape
    nope, rank = w_uk.shape[1:]
    lane = jnp.arange(max_new, dtype=jnp.int32)
    live = lane < rows.length[:, None]
    at = jnp.where(live, rows.start[:, None] + lane, tokens)
    taken = q.at[at].get(mode="fill", fill_value=0)
    latent = _project("rthn,hnl->rthl", taken[..., :nope], w_uk).astype(q.dtype)
    out, lse = mla_decode(
        jnp.concatenate([latent, taken[..., nope:]], axis=-1),
        v_width=rank,
        sm_scale=sm_scale,
        q_start=pool["source"].kv_end,  # behind the prefix: every query sees all of it
        implementation=implementation,
        **pool,
    )
    out = _project("rthl,hvl->rthv", out, w_uv).astype(jnp.float32)
    full = jnp.zeros((tokens, heads, out.shape[-1]), jnp.float32)
    nothing = jnp.full((tokens, heads), jnp.inf, jnp.float32)
    return full.at[at].set(out, mode="drop"), nothing.at[at].set(lse, mode="drop")


def expanded(  # type: ignore[no-untyped-def]
    q,
    rows: Rows,
    w_uk,
    w_uv,
    pool: dict[str, Any],
    new: Partial,
    *,
    sm_scale: float,
    attention: Callable[..., Partial],
) -> Partial:
    """`new` merged with the attention to the prefix, whose latents are gathered and up-projected chunk by chunk, and where
    there are many rows a group of heads after the other."""
    source, row_width = pool["source"], pool["row_width"]
    kv_dtype = jnp.dtype(pool["kv_dtype"])
    num_rows, (heads, nope, rank), v_width = rows.start.shape[0], w_uk.shape, w_uv.shape[1]
    rope = q.shape[-1] - nope
    rows_of_pool = pool["buffer"].reshape(-1, row_width * kv_dtype.itemsize)
    row_of, kv_end = row_index(source, pool["block_offset"], rows_of_pool.shape[0])
    kv_start = jnp.maximum(source.kv_start, 0)
    length = jnp.where(rows.length > 0, jnp.maximum(kv_end - kv_start, 0), 0)
    chunk, group = _pieces(num_rows * (nope + v_width) * q.dtype.itemsize, heads)
    lane = jnp.arange(chunk, dtype=jnp.int32)
    at = jnp.arange(num_rows, dtype=jnp.int32) * chunk

    def body(q, w_uk, w_uv, c, carry: Partial) -> Partial:
        here = jnp.clip(length - c * chunk, 0, chunk)
        position = kv_start[:, None] + c * chunk + lane
        kv = load_rows(rows_of_pool, row_of(position), lane < here[:, None], kv_dtype, rank + rope).astype(
            q.dtype
        )
        kv = kv.reshape(num_rows * chunk, rank + rope)
        k_nope = _project("tl,hnl->thn", kv[:, :rank], w_uk).astype(q.dtype)
        v = _project("tl,hvl->thv", kv[:, :rank], w_uv).astype(q.dtype)
        part = attention(q, k_nope, kv[:, rank:], v, rows, Rows(at, here), causal=False, sm_scale=sm_scale)
        return merge([carry, part], jnp.float32)

    def of_heads(q, w_uk, w_uv, out, lse) -> Partial:
        # A row's own order of chunks: nothing but its length decides it.
        last = -(-jnp.max(length, initial=0) // chunk)
        carry = out.astype(jnp.float32), lse
        out, lse = lax.fori_loop(0, last, partial(body, q, w_uk, w_uv), carry)
        return out.astype(q.dtype), lse

    if group == heads:
        return of_heads(q, w_uk, w_uv, *new)

    def apart(x: Array, axis: int) -> Array:
        return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, group, *x.shape[axis + 1 :]), axis, 0)

    pieces = apart(q, 1), apart(w_uk, 0), apart(w_uv, 0), *(apart(x, 1) for x in new)
    found = lax.map(lambda piece: of_heads(*piece), pieces)
    out, lse = (jnp.moveaxis(x, 0, 1).reshape(full.shape) for x, full in zip(found, new, strict=True))
    return out, lse


def _pieces(bytes_each: int, heads: int) -> tuple[int, int]:
    """(positions of each row in one chunk, heads at a time) that keep expanded K and V within `_CHUNK_BYTES`, where a
    position and head takes bytes_each in all rows together. Positions are a power of two, of at least `_MIN_CHUNK` unless
    those of one head are too many; heads are all, or a divisor of them."""
    group = max(
        (n for n in range(1, heads + 1) if heads % n == 0 and n * _MIN_CHUNK * bytes_each <= _CHUNK_BYTES),
        default=1,
    )
    chunk = 1
    while 2 * chunk <= _MAX_CHUNK and 2 * chunk * group * bytes_each <= _CHUNK_BYTES:
        chunk *= 2
    return chunk, group
