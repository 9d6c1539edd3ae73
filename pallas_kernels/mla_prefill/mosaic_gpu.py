"""Ragged MLA attention for Hopper in Pallas Mosaic GPU: persistent blocks, softmax of one half beside products of another.

A work item is a tile of 128 queries of one row and head against all the keys that it sees. Blocks draw items from a
device-side queue, the longest first. Warpgroup 2 loads: the queries of an item, then its K and V in tiles of 128
positions from the last to the first, into rings of two tiles. Warpgroups 0 and 1 own 64 queries each and compute, half a
step apart (`pallas_kernels.mosaic_prefill`). Only the first tile of an item holds masked positions.

A tile lies in shared memory in chunks of 64 columns, each loaded by a TMA box of its own. Its rows are then 128 bytes, the
width of the swizzle, so that a tile may start at any token of a ragged batch.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import device
from pallas_kernels import mosaic_prefill as pipeline
from pallas_kernels.mla_prefill import mosaic_inline as inline
from pallas_kernels.mla_prefill.rows import Rows
from pallas_kernels.mla_prefill.schedule import FIELDS, TILE, Item, Schedule, make_schedule
from pallas_kernels.mosaic_prefill import ACC, CHUNK, HALF, ROWS, SWIZZLED, across, filled

STAGES = 2  # tiles of K and of V in flight
_LOAD = 2  # the warpgroup that loads


def mla_attention_mosaic(
    q: Float[Array, "tokens heads qk_width"],
    k_nope: Float[Array, "kv_tokens heads nope"],
    k_pe: Float[Array, "kv_tokens rope"],
    v: Float[Array, "kv_tokens heads v_width"],
    queries: Rows,
    keys: Rows,
    *,
    causal: bool,
    sm_scale: float,
) -> tuple[Float[Array, "tokens heads v_width"], Float[Array, "tokens heads"]]:
    """See `pallas_kernels.mla_prefill.reference.mla_attention_xla`."""
    _decline(q, k_nope, k_pe, v, sm_scale)
    heads, v_width = q.shape[1], v.shape[2]
    if q.shape[0] == 0 or k_pe.shape[0] == 0 or queries.start.shape[0] == 0:
        return jnp.zeros((*q.shape[:2], v_width), q.dtype), jnp.full(q.shape[:2], jnp.inf, jnp.float32)
    kv_bytes = (q.shape[2] + v_width) * q.dtype.itemsize
    schedule = make_schedule(
        queries, keys, q.shape[0], k_pe.shape[0], causal=causal, heads=heads, kv_bytes=kv_bytes
    )
    return _attend(q, k_nope, k_pe, v, schedule, causal=causal, sm_scale=sm_scale, blocks=device.core_count())


def _decline(q, k_nope, k_pe, v, sm_scale) -> None:  # type: ignore[no-untyped-def]
    if any(x.dtype != jnp.bfloat16 for x in (q, k_nope, k_pe, v)):
        raise NotImplementedError(
            f"q, k_nope, k_pe and v must be bfloat16, got {q.dtype}, {k_nope.dtype}, {k_pe.dtype}, {v.dtype}"
        )
    nope, rope, v_width = k_nope.shape[2], k_pe.shape[1], v.shape[2]
    if nope % CHUNK or rope % CHUNK or v_width % CHUNK or nope + rope > 192 or v_width > 128:
        raise NotImplementedError(
            f"widths must be multiples of {CHUNK} with nope + rope at most 192 and v_width at most 128, got nope {nope}, "
            f"rope {rope}, v_width {v_width}"
        )
    if not sm_scale > 0:
        raise NotImplementedError(f"sm_scale must be positive, got {sm_scale}")


def _attend(q, k_nope, k_pe, v, schedule: Schedule, *, causal, sm_scale, blocks):  # type: ignore[no-untyped-def]
    tokens, heads, _ = q.shape
    nope_chunks, pe_chunks = k_nope.shape[2] // CHUNK, k_pe.shape[1] // CHUNK
    qk_chunks, v_width = nope_chunks + pe_chunks, v.shape[2]
    v_chunks = v_width // CHUNK
    to_log2 = sm_scale * math.log2(math.e)
    columns = lambda c: pl.ds(c * CHUNK, CHUNK)

    def kernel(q_ref, k_nope_ref, k_pe_ref, v_ref, items_ref, queue_ref, out_ref, lse_ref, *scratch):
        q_box, k_box, v_box, item_smem, ticket_smem, *barriers = scratch
        q_ready, q_free, k_ready, k_free, v_ready, v_landed, v_free, turn = barriers
        me = lax.axis_index("role")

        @pl.when(me == _LOAD)
        def load():
            plgpu.set_max_registers(40, action="decrease")

            def claim(free, n):
                """Waits until the ring's next slot is free and returns it."""
                slot = lax.rem(n, STAGES)
                pl.when(n >= STAGES)(lambda: plgpu.barrier_wait(free.at[slot]))
                return slot

            def load_k(slot, token, head):
                rows = pl.ds(token, TILE)
                for c in range(qk_chunks):
                    if c < nope_chunks:
                        source = k_nope_ref.at[rows, head, columns(c)]
                    else:
                        source = k_pe_ref.at[rows, columns(c - nope_chunks)]
                    plgpu.copy_gmem_to_smem(source, k_box.at[slot, c], k_ready.at[slot])

            def load_v(slot, token, head, barrier):
                for c in range(v_chunks):
                    source = v_ref.at[pl.ds(token, TILE), head, columns(c)]
                    plgpu.copy_gmem_to_smem(source, v_box.at[slot, c], barrier)

            def load_item(item, n):
                def one(i, n):
                    position = (item.kv_tiles - 1 - i) * TILE
                    token = item.kv_first + position
                    load_k(claim(k_free, n), token, item.head)
                    slot = claim(v_free, n)
                    tail = position + TILE > item.kv_length

                    @pl.when(jnp.logical_not(tail))
                    def whole():
                        load_v(slot, token, item.head, v_ready.at[slot])

                    @pl.when(tail)
                    def cut():
                        # P is 0 past the row's end, but 0 * NaN is NaN: V must be 0 there.
                        load_v(slot, token, item.head, v_landed)
                        plgpu.barrier_wait(v_landed)
                        inline.zero_rows(v_box.at[slot], item.kv_length - position, SWIZZLED)
                        plgpu.commit_smem()
                        for _ in range(v_chunks):
                            plgpu.barrier_arrive(v_ready.at[slot])

                    return n + 1

                return lax.fori_loop(0, item.kv_tiles, one, n)

            def visit(carry):
                ticket, first, n = carry
                drawn = inline.draw_ticket(queue_ref)
                item = schedule.item(items_ref, ticket)

                def free_queries():
                    for w in range(2):
                        plgpu.barrier_wait(q_free.at[w])

                pl.when(jnp.logical_not(first))(free_queries)
                inline.store_words(item_smem, item)
                for w in range(2):
                    for c in range(qk_chunks):
                        source = q_ref.at[pl.ds(item.q_first + w * HALF, HALF), item.head, columns(c)]
                        plgpu.copy_gmem_to_smem(source, q_box.at[w, c], q_ready.at[w])
                n = load_item(item, n)
                return inline.ticket(drawn, ticket_smem) + blocks, jnp.bool_(False), n

            count = schedule.count(items_ref) * heads
            start = lax.axis_index("block"), jnp.bool_(True), jnp.int32(0)
            _, idle, _ = lax.while_loop(lambda carry: carry[0] < count, visit, start)

            @pl.when(jnp.logical_not(idle))
            def last_is_read():
                for w in range(2):
                    plgpu.barrier_wait(q_free.at[w])

            inline.store_words(item_smem, Item.end())
            for w in range(2):
                for _ in range(qk_chunks):
                    plgpu.barrier_arrive(q_ready.at[w])

        @pl.when(me != _LOAD)
        def compute():
            plgpu.set_max_registers(232, action="increase")
            pl.when(me == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))

            def attend(item, n):
                """(sum of P V, maximum, sum of P) of an item whose K and V begin at the n-th tile of the rings."""
                return pipeline.attend(
                    q_box.at[me],
                    pipeline.Rings(k_box, v_box, k_ready, k_free, v_ready, v_free, turn),
                    n,
                    item.kv_tiles,
                    me=me,
                    following=1 - me,
                    v_width=v_width,
                    to_log2=to_log2,
                    mask=lambda s, _: mask(s, item),
                    masked=1,
                    score=lambda s: s,
                    queries_read=lambda: plgpu.barrier_arrive(q_free.at[me]),
                )

            def mask(s, item):
                position = (
                    plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=ACC) + (item.kv_tiles - 1) * TILE
                )
                seen = position < item.kv_length
                if causal:
                    query = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=ACC)
                    seen &= position <= query + (item.q_position + me * HALF)
                return jnp.where(seen, s, -jnp.inf)

            def visit(carry):
                n, item = carry
                first, live = item.q_first + me * HALF, item.q_rows - me * HALF

                def store(out, lse):
                    inline.store_rows(out_ref, out.astype(jnp.bfloat16), first, item.head, live)
                    inline.store_rows(lse_ref, lse, first, item.head, live)

                @pl.when(item.kv_tiles > 0)
                def some():
                    acc, peak, total, _ = attend(item, n)
                    seen = total > 0
                    safe = jnp.where(seen, total, 1)
                    lse = jnp.where(seen, (peak * to_log2 + jnp.log2(safe)) * math.log(2), jnp.inf)
                    store(acc * across(jnp.where(seen, 1 / safe, 0), acc), lse)

                @pl.when(item.kv_tiles == 0)
                def none():
                    plgpu.barrier_arrive(q_free.at[me])
                    store(filled((HALF, v_width), 0, ACC), filled((HALF,), jnp.inf, ROWS))

                return n + item.kv_tiles, wait_item()

            def wait_item():
                plgpu.barrier_wait(q_ready.at[me])
                return Item.read(item_smem)

            lax.while_loop(lambda carry: carry[1].q_rows > 0, visit, (jnp.int32(0), wait_item()))

    def ring(stages, chunks, rows):
        return plgpu.SMEM((stages, chunks, rows, CHUNK), jnp.bfloat16, transforms=SWIZZLED)

    barrier = plgpu.Barrier
    call = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((tokens, heads, v_width), jnp.bfloat16),
            jax.ShapeDtypeStruct((tokens, heads), jnp.float32),
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="role",
        scratch_types=[
            ring(2, qk_chunks, HALF),
            ring(STAGES, qk_chunks, TILE),
            ring(STAGES, v_chunks, TILE),
            plgpu.SMEM((FIELDS,), jnp.int32),
            plgpu.SMEM((1,), jnp.int32),
            barrier(num_arrivals=qk_chunks, num_barriers=2),
            barrier(num_barriers=2),
            barrier(num_arrivals=qk_chunks, num_barriers=STAGES),
            barrier(num_arrivals=2, num_barriers=STAGES),
            barrier(num_arrivals=v_chunks, num_barriers=STAGES),
            barrier(num_arrivals=v_chunks),
            barrier(num_arrivals=2, num_barriers=STAGES),
            barrier(num_barriers=2),
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    queue = jax.new_ref(jnp.zeros(1, jnp.int32))
    out, lse = call(q, k_nope, k_pe, v, schedule.items, queue)
    return out, lse
