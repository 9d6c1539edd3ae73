"""Jitted steps: prefill a chunk, decode one token, decode many tokens in a while_loop.

Everything happens on the device: pages are taken, KV and state written, attention read, tokens sampled, requests ended,
pages freed and, when room is short, pages moved. The host reads results between dispatches, never inside one.

A decode lane that gets no page *stalls*: it writes nothing, updates no state, emits no token and uses no random number.
When every active lane stalls, no release is pending and no move can gain anything, the loop ends with `starved`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from ukv_jax import compaction, pool, requests, sampling
from ukv_jax.attention import begin_step
from ukv_jax.layout import PoolLayout
from ukv_jax.pool import ACTIVE, PoolState
from ukv_jax.translator import Delivery

RUNNING, STOPPED, LENGTH = range(3)  # why a request ended
PENDING_PAGES = 64  # pages of ended requests that one decode step takes back

Forward = Callable[..., tuple[Float[Array, "rows vocab"], Any]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Generation:
    """What each request row wants and has made. All arrays but `short` have one row a request row.

    next_token: sampled, its KV not yet written. tokens, logprobs: the tokens made so far, `made` of them valid.
    finish: RUNNING, STOPPED (an eos or stop id) or LENGTH. decoding: the row takes part in decode steps.
    max_new: tokens to make. stop_ids: -1 = unused. park: keep the pages when it ends. stalls: steps waited for a page.
    short: the last decode step stalled a lane, so the next one makes room first.
    """

    next_token: Int32[Array, " max_requests"]
    tokens: Int32[Array, "max_requests max_new_tokens"]
    logprobs: Float[Array, "max_requests max_new_tokens"]
    made: Int32[Array, " max_requests"]
    finish: Int32[Array, " max_requests"]
    decoding: Bool[Array, " max_requests"]
    max_new: Int32[Array, " max_requests"]
    stop_ids: Int32[Array, "max_requests stops"]
    park: Bool[Array, " max_requests"]
    temperature: Float[Array, " max_requests"]
    top_k: Int32[Array, " max_requests"]
    top_p: Float[Array, " max_requests"]
    seed: Int32[Array, " max_requests"]
    stalls: Int32[Array, " max_requests"]
    short: Bool[Array, ""]


def init_generation(layout: PoolLayout, *, max_new_tokens: int, stops: int = 4) -> Generation:
    """Idle rows. max_new_tokens: most tokens one request may make. stops: stop ids a request may have."""
    rows = layout.max_requests

    def full(value, dtype=jnp.int32):
        return jnp.full(rows, value, dtype)

    return Generation(
        next_token=full(0),
        tokens=jnp.zeros((rows, max_new_tokens), jnp.int32),
        logprobs=jnp.zeros((rows, max_new_tokens), jnp.float32),
        made=full(0),
        finish=full(RUNNING),
        decoding=full(False, bool),
        max_new=full(0),
        stop_ids=jnp.full((rows, stops), -1, jnp.int32),
        park=full(False, bool),
        temperature=full(0.0, jnp.float32),
        top_k=full(0),
        top_p=full(1.0, jnp.float32),
        seed=full(0),
        stalls=full(0),
        short=jnp.bool_(False),
    )


def enroll(
    gen: Generation,
    rows: Int32[Array, " lanes"],
    *,
    max_new: Int32[Array, " lanes"] | int,
    stop_ids: Int32[Array, "lanes stops"] | None = None,
    temperature: Float[Array, " lanes"] | float = 0.0,
    top_k: Int32[Array, " lanes"] | int = 0,
    top_p: Float[Array, " lanes"] | float = 1.0,
    seed: Int32[Array, " lanes"] | int = 0,
    park: Bool[Array, " lanes"] | bool = False,
) -> Generation:
    """Sets what the requests in `rows` (-1 = idle lane) want and forgets what the rows made before.

    Decoding starts with the chunk that ends the prompt. stop_ids: -1 = unused; default: none. Other arguments as in
    `Generation`, a value a lane or one for all.
    """
    at = jnp.where(rows >= 0, rows, gen.tokens.shape[0])

    def put(array, value):
        return array.at[at].set(value, mode="drop")

    return replace(
        gen,
        made=put(gen.made, 0),
        finish=put(gen.finish, RUNNING),
        decoding=put(gen.decoding, False),
        stalls=put(gen.stalls, 0),
        max_new=put(gen.max_new, max_new),
        stop_ids=put(gen.stop_ids, -1 if stop_ids is None else stop_ids),
        temperature=put(gen.temperature, temperature),
        top_k=put(gen.top_k, top_k),
        top_p=put(gen.top_p, top_p),
        seed=put(gen.seed, seed),
        park=put(gen.park, park),
    )


class History(NamedTuple):
    """A row a step, for progress and plots. pages, holes: live pages and holes of each sub-pool, in chain order."""

    pages: Int32[Array, "steps subpools"]
    holes: Int32[Array, "steps subpools"]
    active: Int32[Array, " steps"]
    stalled: Int32[Array, " steps"]
    moved: Int32[Array, " steps"]


class LoopResult(NamedTuple):
    """steps: how many ran. starved: every active lane waits and nothing can make room; evict or retract a request."""

    steps: Int32[Array, ""]
    starved: Bool[Array, ""]
    history: History


def _emit(gen: Generation, rows, mask, token, logprob) -> tuple[Generation, Bool[Array, " rows"]]:
    """Stores a sampled token for the masked rows and says which of them end with it."""
    limit = gen.tokens.shape[0]
    row = jnp.where(mask, rows, 0)
    made = gen.made[row]
    at = jnp.where(mask, rows, limit)
    stop = jnp.any((gen.stop_ids[row] == token[:, None]) & (gen.stop_ids[row] >= 0), axis=1)
    full = made + 1 >= jnp.minimum(gen.max_new[row], gen.tokens.shape[1])
    ends = mask & (stop | full)
    finish = jnp.where(stop, STOPPED, jnp.where(full, LENGTH, RUNNING))
    gen = replace(
        gen,
        next_token=gen.next_token.at[at].set(token, mode="drop"),
        tokens=gen.tokens.at[at, made].set(token, mode="drop"),
        logprobs=gen.logprobs.at[at, made].set(logprob, mode="drop"),
        made=gen.made.at[at].add(1, mode="drop"),
        finish=gen.finish.at[at].set(finish, mode="drop"),
        decoding=gen.decoding.at[at].set(~ends, mode="drop"),
    )
    return gen, ends


def _end(state: PoolState, gen: Generation, rows, ends) -> PoolState:
    """Parks or releases rows that ended."""
    park = gen.park[jnp.where(ends, rows, 0)]
    state, _ = requests.park(state, jnp.where(ends & park, rows, -1))
    state, _ = requests.mark_release(state, jnp.where(ends & ~park, rows, -1))
    return state


def admit(
    state: PoolState, rows: Int32[Array, " lanes"], target_len: Int32[Array, " lanes"], *, pages_per_row: int
) -> tuple[PoolState, requests.Reserved]:
    """`requests.reserve` with the shortage ladder before it: if not all lanes fit, finish pending releases and compact."""
    wanted = (rows >= 0) & (target_len > 0)

    def short(state):
        return jnp.any(wanted & ~requests.available(state, rows, target_len, pages_per_row=pages_per_row))

    def make_room(state):
        state = lax.while_loop(
            requests.pending, lambda s: requests.release_pending(s, max_pages=requests.RELEASE_CHUNK), state
        )
        wants = requests.demand(state, rows, target_len, pages_per_row=pages_per_row)
        return compaction.relieve(state, wants, complete=True)[0]

    state = replace(state, buffer=lax.optimization_barrier(state.buffer))
    state = lax.cond(short(state), make_room, lambda s: s, state)
    return requests.reserve(state, rows, target_len, pages_per_row=pages_per_row)


def prefill_chunk(
    forward: Forward,
    params: Any,
    state: PoolState,
    gen: Generation,
    rows: Int32[Array, " lanes"],
    tokens: Int32[Array, "lanes chunk"],
    new_len: Int32[Array, " lanes"],
    last: Bool[Array, " lanes"],
    *,
    delivery: Delivery = "table",
    implementation: str | None = None,
) -> tuple[PoolState, Generation]:
    """Runs one right-padded chunk of each lane's prompt; pages must be reserved.

    Lanes of rows that are not ACTIVE are idle, and so are those that name a row again. A chunk that has no room in its
    row's pages, or in a stream, changes nothing and counts as a fault.

    forward: `(params, tokens, cache) -> (logits of each row's last valid token [lanes, vocab] f32, cache)`.
    last: the chunk ends the lane's prompt: its first new token is sampled and the row starts decoding.
    """
    r = state.requests
    own, row = requests.own_row(state, rows)
    wanted = own & (r.status[row] == ACTIVE) & (new_len > 0)
    room = r.page_count[row] * requests.tokens_per_page(state.layout) - r.seq_len[row]
    ready = wanted & (new_len <= jnp.minimum(room, tokens.shape[1]))
    state = pool.count(state, faults=jnp.sum(wanted & ~ready))
    rows, new_len = jnp.where(ready, rows, -1), jnp.where(ready, new_len, 0)
    step = begin_step(
        state, rows, new_len, tokens=tokens.shape[1], delivery=delivery, implementation=implementation
    )
    if delivery == "stream":  # which may lack room for rows that share pages
        state = pool.count(state, faults=jnp.sum(ready & (step.new_len == 0)))
        ready, new_len = step.new_len > 0, step.new_len
        rows = jnp.where(ready, rows, -1)
    logits, step = forward(params, tokens, step)
    state = replace(state, buffer=step.buffer)
    state, _ = requests.append(state, rows, new_len, max_tokens=tokens.shape[1])
    position = state.requests.seq_len[row]
    token, logprob = _sample(gen, row, logits, position)
    gen, ends = _emit(gen, rows, ready & last, token, logprob)
    return _end(state, gen, rows, ends), gen


def _sample(gen: Generation, row, logits, position) -> tuple[Int32[Array, " rows"], Float[Array, " rows"]]:
    return sampling.sample(
        logits,
        temperature=gen.temperature[row],
        top_k=gen.top_k[row],
        top_p=gen.top_p[row],
        seed=gen.seed[row],
        position=position,
    )


class StepReport(NamedTuple):
    """active: lanes that wanted a token. stalled: lanes that got none. progress: bytes moved or absorbed this step."""

    active: Int32[Array, ""]
    stalled: Int32[Array, ""]
    progress: Int32[Array, ""]


def decode_step(
    forward: Forward,
    params: Any,
    state: PoolState,
    gen: Generation,
    *,
    delivery: Delivery = "table",
    implementation: str | None = None,
) -> tuple[PoolState, Generation, StepReport]:
    """One token for every decoding row that has room.

    If the step before stalled a lane (`gen.short`, also across dispatches), it makes room first, bounded by the layout's
    move_bytes.
    """
    layout = state.layout
    rows = jnp.arange(layout.max_requests, dtype=jnp.int32)
    active = gen.decoding & (state.requests.status == ACTIVE)
    target = jnp.where(active, state.requests.seq_len + 1, 0)

    # Moves come first in the step, behind a barrier: XLA then never copies the pool.
    def make_room(state):
        return compaction.relieve(state, requests.demand(state, rows, target, pages_per_row=1))

    state = replace(state, buffer=lax.optimization_barrier(state.buffer))
    state, progress = lax.cond(gen.short, make_room, lambda s: (s, jnp.int32(0)), state)
    released = requests.pending(state)
    state = requests.release_pending(state, max_pages=PENDING_PAGES)
    state, dropped = requests.release_window(state, max_pages=layout.max_requests)
    progress += released + dropped

    state, reserved = requests.reserve(state, rows, target, pages_per_row=1)
    ready = active & reserved.granted
    step = begin_step(
        state, None, ready.astype(jnp.int32), tokens=1, delivery=delivery, implementation=implementation
    )
    new_len, ready = step.new_len, step.new_len > 0
    logits, step = forward(params, gen.next_token[:, None], step)
    state = replace(state, buffer=step.buffer)
    state, _ = requests.append(state, jnp.where(ready, rows, -1), new_len, max_tokens=1)
    token, logprob = _sample(gen, rows, logits, state.requests.seq_len)
    stalled = active & ~ready
    gen = replace(gen, stalls=gen.stalls + stalled, short=jnp.any(stalled))
    gen, ends = _emit(gen, rows, ready, token, logprob)
    state = _end(state, gen, rows, ends)
    return state, gen, StepReport(jnp.sum(active), jnp.sum(stalled), progress)


def decode_loop(
    forward: Forward,
    params: Any,
    state: PoolState,
    gen: Generation,
    max_steps: Int32[Array, ""] | int,
    *,
    history_len: int,
    delivery: Delivery = "table",
    implementation: str | None = None,
) -> tuple[PoolState, Generation, LoopResult]:
    """Decode steps in one while_loop, until no row decodes, `max_steps` (at most history_len) ran, or it starves.

    Jit it with `state` and `gen` donated. Shapes do not depend on how many rows are active or how long they are, so it
    compiles once.
    """
    layout = state.layout
    limit = jnp.minimum(jnp.int32(max_steps), history_len)
    kinds = len(layout.subpools)
    zeros = jnp.zeros(history_len, jnp.int32)
    history = History(
        jnp.zeros((history_len, kinds), jnp.int32),
        jnp.zeros((history_len, kinds), jnp.int32),
        zeros,
        zeros,
        zeros,
    )

    def running(carry):
        _, gen, step, starved, _ = carry
        return (step < limit) & ~starved & jnp.any(gen.decoding)

    def body(carry):
        state, gen, step, _, history = carry
        before, tried = state.counters.moved, gen.short
        state, gen, report = decode_step(
            forward, params, state, gen, delivery=delivery, implementation=implementation
        )
        # Room is made in the step after a shortage, so only a step that tried it can tell that nothing helps.
        starved = tried & (report.active > 0) & (report.stalled == report.active) & (report.progress == 0)
        starved &= ~requests.pending(state)
        live = jnp.stack([_live_pages(layout, i, p) for i, p in enumerate(state.subpools)])
        holes = jnp.stack([p.hole_count for p in state.subpools])
        history = History(
            history.pages.at[step].set(live),
            history.holes.at[step].set(holes),
            history.active.at[step].set(report.active),
            history.stalled.at[step].set(report.stalled),
            history.moved.at[step].set(state.counters.moved - before),
        )
        return state, gen, step + 1, starved, history

    state, gen, steps, starved, history = lax.while_loop(
        running, body, (state, gen, jnp.int32(0), jnp.bool_(False), history)
    )
    return state, gen, LoopResult(steps, starved, history)


def _live_pages(layout: PoolLayout, index: int, p: pool.SubPoolState) -> Int32[Array, ""]:
    spec = layout.subpools[index]
    if pool.pages_are_ids(layout, spec):
        return spec.num_virtual - 1 - p.free_count
    return p.high - p.low - p.hole_count
