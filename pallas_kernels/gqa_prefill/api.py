"""Paged GQA attention of chunks: the public function and the table of its implementations."""

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels import implementations
from pallas_kernels.gqa_decode.api import KVScales, arguments
from pallas_kernels.read_source import ReadSource

# Every function takes what `gqa_prefill` takes, less `implementation`, and raises NotImplementedError with the reason, at
# trace time, when it cannot serve.
IMPLEMENTATIONS = {
    "mosaic": ("pallas_kernels.gqa_prefill.mosaic_gpu", "gqa_prefill_mosaic"),
    "triton": ("pallas_kernels.gqa_prefill.triton", "gqa_prefill_triton"),
    "xla": ("pallas_kernels.gqa_prefill.reference", "gqa_prefill_xla"),
}


def gqa_prefill(
    q: Float[Array, "rows tokens heads head_dim"],
    buffer: UInt8[Array, " total_bytes"],
    source: ReadSource,
    k_offset: Int32[Array, ""] | int,
    v_offset: Int32[Array, ""] | int | None,
    q_start: Int32[Array, " rows"],
    *,
    kv_dtype: DTypeLike,
    num_kv_heads: int,
    v_head_dim: int | None = None,
    sm_scale: float,
    scales: KVScales | None = None,
    window: int | None = None,
    sinks: Float[Array, " heads"] | None = None,
    logit_cap: float | None = None,
    relative_bias: Float[Array, "rows tokens heads extent"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows tokens heads v_head_dim"], Float[Array, "rows tokens heads"]]:
    """Causal attention of a right-padded chunk of new tokens of each request to its cached tokens and to themselves.

    K and V of the new tokens are read from the pool like those of the cached ones: store them first.

    Args:
      q: queries. Token i of row b sits at position ``q_start[b] + i``; those at or past ``kv_end[b]`` are padding and may
        hold anything, NaN included.
      source: where the rows of each request lie. ``kv_end`` is the end of the new tokens; a row with
        ``kv_end <= q_start`` has none.
      q_start: position of each row's first new token, the number of its cached ones.
      buffer, k_offset, v_offset, kv_dtype, num_kv_heads, v_head_dim, sm_scale, scales, window, sinks, logit_cap,
        relative_bias: as in `pallas_kernels.gqa_decode.gqa_decode`.
      implementation: "mosaic", "triton" or "xla". None takes the first that can serve of those preferred for the device at hand
        (`pallas_kernels.implementations.run`).

    Returns:
      out in q.dtype, and lse f32: the natural log of the sum of exp(score) over visible positions, the sink included.
      A padding query, and one that sees nothing, gets out 0 and lse +inf. What results do not depend on, and what ids
      that name nothing read, is as in `gqa_decode`. Temporaries grow with the chunk, not with what is cached.

    Raises:
      ValueError: shapes, dtypes or sizes that do not fit each other, or an unknown implementation. TypeError: a source
        of another class.
      NotImplementedError: the named implementation cannot serve this call on this device; the text says why.
    """
    operands, options = arguments(
        q, buffer, source, k_offset, v_offset, q_start, kv_dtype=kv_dtype, num_kv_heads=num_kv_heads,
        v_head_dim=v_head_dim, sm_scale=sm_scale, scales=scales, window=window, sinks=sinks, logit_cap=logit_cap,
        relative_bias=relative_bias,
    )  # fmt: skip
    call = implementations.run("gqa_prefill", IMPLEMENTATIONS, implementation)
    return call(*operands, q_start, **options)  # type: ignore[no-any-return]
