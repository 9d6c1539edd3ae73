"""The host's side: which requests run, in which rows, and what came out.

Between two dispatches of the jitted functions of `loop` the host admits waiting requests into free rows, feeds prompts in
chunks, and takes what has ended. It reads a few small arrays then and touches nothing inside a dispatch. Shapes never
change, so every function compiles once for a layout.

When all running requests wait for a page and nothing can make room (`starved`), the youngest is *retracted*: its pages go
back and it starts anew later. It decodes its tokens again instead of feeding them back as a prompt: a chunk computes the
same numbers in another order than single steps do, and a last bit can turn a close choice. Since random numbers depend on
(seed, position) alone, a retracted request ends with exactly the tokens it would have had.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from ukv_jax import loop, pool, requests
from ukv_jax.attention import pool_specs
from ukv_jax.layout import PoolLayout, Spec, StaticLayout
from ukv_jax.models import decoder
from ukv_jax.models.config import ModelConfig
from ukv_jax.models.weights import load_model
from ukv_jax.translator import Delivery

FINISH = {loop.STOPPED: "stop", loop.LENGTH: "length"}


@dataclass(frozen=True, eq=False)
class Model:
    """Weights, configuration and tokenizer (None: prompts are token ids and results have no text).

    dtype: what the model computes in. kv_dtype: what it caches KV rows in ("float8_e4m3fn": with scales; None: dtype).
    experts: implementation of the routed experts (`models.experts`; None: the one preferred on the device).
    """

    params: decoder.Params
    config: ModelConfig
    tokenizer: Tokenizer | None = None
    dtype: str = "bfloat16"
    experts: str | None = None
    kv_dtype: str | None = None

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        dtype: str | None = None,
        experts: str | None = None,
        kv_dtype: str | None = None,
    ) -> "Model":
        """Reads a Hugging Face checkpoint directory; raises ValueError as `models.weights.load_model` does."""
        params, config = load_model(directory, dtype=dtype)
        return cls(params, config, load_tokenizer(directory), dtype or config.dtype, experts, kv_dtype)

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Sub-pools that the model needs: what a layout is built from."""
        return cache_specs(self.config, self.dtype, self.kv_dtype)

    @property
    def forward(self) -> loop.Forward:
        """`(params, tokens [rows, chunk], cache) -> (logits of each row's last valid token [rows, vocab] f32, cache)`."""
        return _forward(self.config, self.experts)

    def encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer.json; give prompts as token ids")
        return self.tokenizer.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode(list(tokens))


def load_tokenizer(directory: str | Path) -> Tokenizer | None:
    """The checkpoint's tokenizer.json, None if it has none; ValueError if it cannot be read."""
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises a bare Exception
        raise ValueError(f"{path}: not a tokenizer ({error})") from error


def cache_specs(config: ModelConfig, dtype: str, kv_dtype: str | None = None) -> tuple[Spec, ...]:
    """Sub-pools that a model of this configuration needs: known before its weights are read."""
    return pool_specs(decoder.cache_spec(config, dtype, kv_dtype))


@lru_cache
def _forward(config: ModelConfig, experts: str | None) -> loop.Forward:
    def forward(params, tokens, cache):
        return decoder.forward(params, config, tokens, cache, last_only=True, experts=experts)

    return forward


@dataclass(frozen=True)
class Sampling:
    """What one request wants.

    temperature 0 is greedy; top_k 0 and top_p 1 leave every token in. A request's random numbers depend on its seed and
    the position alone. It ends at max_new_tokens, at an eos id of the model (unless ignore_eos), at one of stop_ids, or
    where its text contains one of the strings `stop` (which the result's text then leaves out).
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature must not be negative, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative (0 = all tokens), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if not -(2**31) <= self.seed < 2**31:
            raise ValueError(f"seed must fit int32, got {self.seed}")
        if "" in self.stop:
            raise ValueError("a stop string must not be empty")


@dataclass(frozen=True)
class Result:
    """One request's outcome. finish: "stop", "length" or "error" (then `error` says why and there are no tokens).

    logprobs: natural log of the probability of each token under the model, before temperature and cuts. stalls: decode
    steps that it waited for a page. retractions: times that it was sent back and started anew.
    """

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str | None = None
    finish: str = "error"
    error: str | None = None
    stalls: int = 0
    retractions: int = 0


class Progress(NamedTuple):
    """Where `generate` stands, after a dispatch: tokens made (of requests that run or ended), and requests by state."""

    tokens: int
    done: int
    running: int
    waiting: int


class Trace(NamedTuple):
    """A row a decode step, as `loop.History`, on the host."""

    pages: np.ndarray  # [steps, subpools]
    holes: np.ndarray  # [steps, subpools]
    active: np.ndarray  # [steps]
    stalled: np.ndarray  # [steps]
    moved: np.ndarray  # [steps]


@dataclass
class _Running:
    """A request that has a row. `prefilled` tokens of its prompt are in the pool; `made` new ones came out."""

    request: int
    row: int
    prefilled: int = 0
    made: int = 0


class _Wishes(NamedTuple):
    """`loop.enroll`'s arguments for the lanes of one admission."""

    max_new: np.ndarray
    stop_ids: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    seed: np.ndarray


class _Functions(NamedTuple):
    admit: Callable
    prefill: Callable
    decode: Callable
    release: Callable


@lru_cache
def _functions(
    forward: loop.Forward, chunk_pages: int, history_len: int, delivery: Delivery, implementation: str | None
) -> _Functions:
    """The jitted functions, shared by engines of one model; state and generation are donated."""

    def admit(state, gen, rows, target_len, fresh, wishes):
        # A window's older pages pay for the next chunk.
        state, _ = requests.release_window(
            state, max_pages=rows.shape[0] * chunk_pages + state.layout.max_requests
        )
        state, reserved = loop.admit(state, rows, target_len, pages_per_row=state.layout.max_pages)
        gen = loop.enroll(gen, jnp.where(reserved.granted & fresh, rows, -1), **wishes._asdict())
        return state, gen, reserved.granted

    def release(state, gen, rows):
        state, _ = requests.release(state, rows)
        at = jnp.where(rows >= 0, rows, gen.decoding.shape[0])
        return state, replace(gen, decoding=gen.decoding.at[at].set(False, mode="drop"))

    options: dict[str, Any] = dict(delivery=delivery, implementation=implementation)
    return _Functions(
        jax.jit(admit, donate_argnums=(0, 1)),
        jax.jit(partial(loop.prefill_chunk, forward, **options), donate_argnums=(1, 2)),
        jax.jit(
            partial(loop.decode_loop, forward, history_len=history_len, **options), donate_argnums=(1, 2)
        ),
        jax.jit(release, donate_argnums=(0, 1)),
    )


class Engine:
    """Serves requests from one pool, unified or static: the same code for both.

    Args:
      model: weights and configuration.
      layout: the pool; `layout.max_requests` rows decode side by side. XLA's CPU compiler takes rows 16 at a time and
        rounds those that are left over in another way: a multiple of 16 makes a request's bits independent of its row.
      max_new_tokens: most tokens that one request may make.
      prefill_lanes, prefill_chunk: requests and prompt tokens of one prefill dispatch.
      steps: decode steps of one dispatch, at most.
      headroom: tokens beyond its prompt that a request must get room for when it is admitted (0: only what it needs
        to start; more means fewer stalls and retractions, and fewer requests at once).
      stops: stop ids that one request may have.
      delivery, implementation: how attention gets its addresses, and which kernel runs (None: the one preferred on the
        device); `attention.begin_step` says what takes the preferred one all the same.

    The pool lives as long as the engine and is empty again after every `generate`, also an interrupted one. `trace()`,
    `peak_requests`, `decode_steps` and `decode_seconds` tell what has happened since it was made.
    """

    def __init__(
        self,
        model: Model,
        layout: PoolLayout,
        *,
        max_new_tokens: int = 512,
        prefill_lanes: int = 4,
        prefill_chunk: int = 64,
        steps: int = 32,
        headroom: int = 0,
        stops: int = 8,
        delivery: Delivery = "table",
        implementation: str | None = None,
    ):
        least = dict(max_new_tokens=1, prefill_lanes=1, prefill_chunk=1, steps=1, headroom=0, stops=1)
        given = (max_new_tokens, prefill_lanes, prefill_chunk, steps, headroom, stops)
        for (name, low), value in zip(least.items(), given):
            if value < low:
                raise ValueError(f"{name} must be at least {low}, got {value}")
        for swa in layout.windows if isinstance(layout, StaticLayout) else ():
            # A chunk holds the pages behind its first token's window until it is written.
            per_page, most = layout.page_size * layout.dcp, swa.num_pages - swa.first_page
            need = min(layout.max_pages, -(-((swa.window or 1) - 1 + prefill_chunk) // per_page) + 1)
            if most < need:
                raise ValueError(
                    f"sub-pool {swa.name!r} has {most} pages, a chunk of {prefill_chunk} tokens behind a window of "
                    f"{swa.window} takes up to {need}: make the pool larger or prefill_chunk smaller"
                )
        self.model, self.layout = model, layout
        self.max_new_tokens, self.stops, self.headroom = max_new_tokens, stops, headroom
        self.lanes, self.chunk, self.steps = min(prefill_lanes, layout.max_requests), prefill_chunk, steps
        self.state = pool.init(layout)
        self.gen = loop.init_generation(layout, max_new_tokens=max_new_tokens, stops=stops)
        pages = prefill_chunk // layout.page_size + 2
        self._jit = _functions(model.forward, pages, steps, delivery, implementation)
        self._rows: deque[int] = deque(range(layout.max_requests))
        self._history: list[loop.History] = []
        self.peak_requests = 0
        self.decode_steps, self.decode_seconds = 0, 0.0

    def compile(self, options: dict[str, str | bool] | None = None) -> None:
        """Compiles everything now, side by side, instead of at first use. options: XLA's, as `jax.jit` takes them.

        To have the decode loop captured into a CUDA graph, give xla_gpu_enable_command_buffer with WHILE and CONDITIONAL
        among its kinds: here it wants the full list, the defaults too.
        """
        idle, zeros = np.full(self.lanes, -1, np.int32), np.zeros(self.lanes, np.int32)
        tokens = np.zeros((self.lanes, self.chunk), np.int32)
        params, state, gen = self.model.params, self.state, self.gen
        arguments: dict[str, tuple[Any, ...]] = dict(
            admit=(state, gen, idle, zeros, zeros > 0, self._wishes([Sampling()] * self.lanes)),
            prefill=(params, state, gen, idle, tokens, zeros, zeros > 0),
            decode=(params, state, gen, np.int32(0)),
            release=(state, gen, np.full(self.layout.max_requests, -1, np.int32)),
        )

        def compiled(name: str) -> Any:
            return getattr(self._jit, name).lower(*arguments[name]).compile(compiler_options=options)

        # XLA compiles outside the interpreter's lock.
        with ThreadPoolExecutor(len(arguments)) as threads:
            jobs = {name: threads.submit(compiled, name) for name in arguments}
        self._jit = _Functions(**{name: job.result() for name, job in jobs.items()})

    def trace(self) -> Trace:
        """What the pool held at every decode step since the engine was made."""
        kinds = len(self.layout.subpools)
        empty = [np.zeros((0, kinds), np.int32)] * 2 + [np.zeros(0, np.int32)] * 3
        columns = zip(*self._history) if self._history else ([] for _ in empty)
        return Trace(*(np.concatenate([e, *parts]) for e, parts in zip(empty, columns)))

    def check(self, tokens: Sequence[int], sampling: Sampling) -> str | None:
        """Why a request can never be served, or None."""
        vocab, longest = self.model.config.vocab_size, self.layout.max_tokens
        wrong = next((t for t in tokens if not 0 <= t < vocab), None)
        stop_ids = self._stop_ids(sampling)
        if not tokens:
            return "the prompt is empty; it needs at least one token"
        if wrong is not None:
            return f"token id {wrong} is outside the vocabulary [0, {vocab})"
        if sampling.max_new_tokens > self.max_new_tokens:
            return f"max_new_tokens {sampling.max_new_tokens} is more than the {self.max_new_tokens} this engine was built for"
        positions = len(tokens) + sampling.max_new_tokens - 1  # the last token is never fed
        request = f"a prompt of {len(tokens)} tokens and {sampling.max_new_tokens} new ones do not fit"
        if positions > longest:
            pages = f"{self.layout.max_pages} pages of {self.layout.page_size}"
            return f"{request} a request of the pool: {longest} tokens ({pages})"
        if positions > self.model.config.max_position:
            return f"{request} the model: it has {self.model.config.max_position} positions"
        if len(stop_ids) > self.stops:
            return f"{len(stop_ids)} stop ids (eos included), this engine was built for {self.stops}"
        if sampling.stop and self.model.tokenizer is None:
            return "stop strings need a tokenizer.json in the checkpoint; use stop ids"
        return None

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[Result]:
        """Runs all prompts (text, or token ids) to their end and returns their results in the same order.

        sampling: one for all, where prompt i then takes seed + i, or one a prompt. A request that cannot be served gets a
        result with `finish="error"`; the others are not disturbed. What on_progress raises ends them all.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts is a list of prompts, got one string")
        wishes = _spread_sampling(sampling, len(prompts))
        ids = [self.model.encode(p) if isinstance(p, str) else [int(t) for t in p] for p in prompts]
        return _Session(self, ids, wishes, on_progress).run()

    def _stop_ids(self, sampling: Sampling) -> tuple[int, ...]:
        eos = () if sampling.ignore_eos else self.model.config.eos_token_ids
        return tuple(dict.fromkeys((*eos, *sampling.stop_ids)))

    # The four dispatches. Arrays are padded to fixed shapes with idle lanes (row -1).

    def _wishes(self, sampling: list[Sampling]) -> _Wishes:
        stop_ids = np.full((self.lanes, self.stops), -1, np.int32)
        for lane, s in enumerate(sampling):
            ids = self._stop_ids(s)
            stop_ids[lane, : len(ids)] = ids
        return _Wishes(
            np.array([s.max_new_tokens for s in sampling], np.int32),
            stop_ids,
            np.array([s.temperature for s in sampling], np.float32),
            np.array([s.top_k for s in sampling], np.int32),
            np.array([s.top_p for s in sampling], np.float32),
            np.array([s.seed for s in sampling], np.int32),
        )

    def _reserve(self, rows, target_len, fresh, sampling: list[Sampling]) -> np.ndarray:
        wishes = self._wishes(sampling)
        self.state, self.gen, granted = self._jit.admit(self.state, self.gen, rows, target_len, fresh, wishes)
        return np.asarray(granted)

    def _prefill(self, rows, tokens, new_len, last) -> None:
        self.state, self.gen = self._jit.prefill(
            self.model.params, self.state, self.gen, rows, tokens, new_len, last
        )

    def _decode(self, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, loop.LoopResult]:
        """Decodes, and reads made, finish, stalls and the loop's result."""
        jax.block_until_ready(self.state.buffer)  # so that the clock counts decode steps alone
        begin = time.perf_counter()
        self.state, self.gen, result = self._jit.decode(
            self.model.params, self.state, self.gen, np.int32(steps)
        )
        read = jax.device_get((self.gen.made, self.gen.finish, self.gen.stalls, result))
        self.decode_seconds += time.perf_counter() - begin
        result = read[-1]
        self.decode_steps += int(result.steps)
        self._history.append(loop.History(*(column[: int(result.steps)] for column in result.history)))
        return read

    def _release(self, rows: list[int]) -> None:
        """Ends these rows and finishes all pending releases."""
        padded = np.full(self.layout.max_requests, -1, np.int32)
        padded[: len(rows)] = rows
        self.state, self.gen = self._jit.release(self.state, self.gen, padded)


def _spread_sampling(sampling: Sampling | Sequence[Sampling] | None, n: int) -> list[Sampling]:
    if sampling is None:
        sampling = Sampling()
    if isinstance(sampling, Sampling):
        return [_with_seed(sampling, sampling.seed + i) for i in range(n)]
    if len(sampling) != n:
        raise ValueError(f"{n} prompts and {len(sampling)} sampling settings; give one for all or one each")
    return list(sampling)


def _with_seed(sampling: Sampling, seed: int) -> Sampling:
    return replace(sampling, seed=(seed + 2**31) % 2**32 - 2**31)


def _first_with(strings: tuple[str, ...], tokens: list[int], decode: Callable) -> int | None:
    """The shortest prefix of `tokens` whose text contains one of the strings: it does not depend on when the host looks."""
    if not strings or not any(s in decode(tokens) for s in strings):
        return None
    low, high = 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        if any(s in decode(tokens[:middle]) for s in strings):
            high = middle
        else:
            low = middle + 1
    return low


class _Session:
    """One call of `Engine.generate`: who waits, who runs, and the order in which they came."""

    def __init__(self, engine: Engine, prompts: list[list[int]], wishes: list[Sampling], on_progress):
        self.engine, self.prompts, self.wishes, self.on_progress = engine, prompts, wishes, on_progress
        self.results: list[Result | None] = [None] * len(prompts)
        self.retractions = [0] * len(prompts)
        self.waiting: deque[int] = deque()
        self.running: list[_Running] = []  # oldest first
        self.tokens_done = 0
        self.rows = tuple(engine._rows)  # those that this session may take
        # No admission while requests inside wait for pages (a newcomer would take what they need), nor after a
        # retraction until somebody leaves.
        self.closed = self.held = False
        for i, (tokens, sampling) in enumerate(zip(prompts, wishes)):
            error = engine.check(tokens, sampling)
            if error is None:
                self.waiting.append(i)
            else:
                self.results[i] = Result(len(tokens), error=error)

    def run(self) -> list[Result]:
        try:
            self._serve()
        except BaseException:  # interrupted, or on_progress raised: nothing stays behind
            taken = [row for row in self.rows if row not in self.engine._rows]
            status = np.asarray(self.engine.state.requests.status)
            self.engine._release([row for row in taken if status[row] in (pool.ACTIVE, pool.PARKED)])
            self.engine._rows.extend(taken)
            raise
        return [r for r in self.results if r is not None]

    def _serve(self) -> None:
        while self.waiting or self.running:
            fed = self._feed()
            self.engine.peak_requests = max(self.engine.peak_requests, len(self.running))
            if self._decode() and not fed:
                self._give_way()
            if self.on_progress is not None:
                made = self.tokens_done + sum(r.made for r in self.running)
                done = sum(r is not None for r in self.results)
                self.on_progress(Progress(made, done, len(self.running), len(self.waiting)))

    def _feed(self) -> bool:
        """Admits and prefills until every admitted prompt is in, or waits for pages. Says whether anything was fed."""
        e, fed, admitting = self.engine, False, not (self.closed or self.held)
        while True:
            lanes = [r for r in self.running if r.prefilled < len(self.prompts[r.request])][: e.lanes]
            fresh: list[_Running] = []
            while admitting and self.waiting and e._rows and len(lanes) + len(fresh) < e.lanes:
                fresh.append(_Running(self.waiting.popleft(), e._rows.popleft()))
            lanes += fresh
            if not lanes:
                return fed
            if fresh or e.layout.windows:
                granted = self._admit(lanes, fresh)
                for r in reversed([r for r, ok in zip(lanes, granted) if not ok]):
                    if r in fresh:
                        admitting = False
                        self.waiting.appendleft(r.request)
                        e._rows.appendleft(r.row)
                self.running += [r for r, ok in zip(lanes, granted) if ok and r in fresh]
                lanes = [r for r, ok in zip(lanes, granted) if ok]
            if not lanes:
                return fed
            self._prefill(lanes)
            fed = True

    def _admit(self, lanes: list[_Running], fresh: list[_Running]) -> np.ndarray:
        e = self.engine
        rows, target = np.full(e.lanes, -1, np.int32), np.zeros(e.lanes, np.int32)
        wishes = [Sampling()] * e.lanes
        for lane, r in enumerate(lanes):
            length, sampling = len(self.prompts[r.request]), self.wishes[r.request]
            end = length + min(e.headroom, sampling.max_new_tokens - 1)
            if e.layout.windows and r.prefilled + e.chunk < length:
                # Chunk by chunk: the window's pages of the whole prompt might not fit.
                end = r.prefilled + e.chunk
            rows[lane], target[lane], wishes[lane] = r.row, end, sampling
        is_fresh = np.array([lane < len(lanes) and lanes[lane] in fresh for lane in range(e.lanes)])
        return e._reserve(rows, target, is_fresh, wishes)[: len(lanes)]

    def _prefill(self, lanes: list[_Running]) -> None:
        e = self.engine
        rows, new_len = np.full(e.lanes, -1, np.int32), np.zeros(e.lanes, np.int32)
        tokens, last = np.zeros((e.lanes, e.chunk), np.int32), np.zeros(e.lanes, bool)
        for lane, r in enumerate(lanes):
            prompt = self.prompts[r.request]
            part = prompt[r.prefilled : r.prefilled + e.chunk]
            rows[lane], new_len[lane] = r.row, len(part)
            tokens[lane, : len(part)] = part
            r.prefilled += len(part)
            last[lane] = r.prefilled == len(prompt)
        e._prefill(rows, tokens, new_len, last)

    def _decode(self) -> bool:
        """Dispatches decode steps and takes what ended. Says whether that was a dead end."""
        e = self.engine
        left = [self.wishes[r.request].max_new_tokens - r.made for r in self.running]
        # With others waiting, stop as soon as a row may be free. (Two at least: room is made in the step after a shortage.)
        steps = max(2, min([e.steps, *left])) if self.waiting else e.steps
        made, finish, stalls, result = e._decode(steps)
        n = int(result.steps)
        self.closed = n > 0 and bool(result.history.stalled[n - 1] > 0)

        for r in self.running:
            r.made = int(made[r.row])
        ended, dropped = [], []
        arrays = None
        for r in self.running:
            stop = self.wishes[r.request].stop
            if r.prefilled < len(self.prompts[r.request]) or (finish[r.row] == loop.RUNNING and not stop):
                continue
            if arrays is None:
                arrays = jax.device_get((e.gen.tokens, e.gen.logprobs))
            tokens, logprobs = (a[r.row, : r.made].tolist() for a in arrays)
            reason, text = FINISH.get(int(finish[r.row])), e.model.decode(tokens)
            cut = _first_with(stop, tokens, e.model.decode)
            if cut is not None:
                dropped += [r.row] if reason is None else []
                tokens, reason = tokens[:cut], "stop"
                text = e.model.decode(tokens)
                text = text[: min(text.find(s) for s in stop if s in text)]
            if reason is None:
                continue
            self.results[r.request] = Result(
                len(self.prompts[r.request]),
                tokens,
                logprobs[: len(tokens)],
                text,
                reason,
                stalls=int(stalls[r.row]),
                retractions=self.retractions[r.request],
            )
            self.tokens_done += len(tokens)
            ended.append(r)
        if ended:
            self._leave(ended, dropped)
        # A dispatch that ran out of steps while all wait is no dead end: the next one moves pages.
        return bool(result.starved) or (n == 0 and not ended)

    def _leave(self, gone: list[_Running], rows: list[int]) -> None:
        """Gives rows back; `rows` still hold their pages."""
        e = self.engine
        e._release(rows)
        e._rows.extend(r.row for r in gone)
        self.running = [r for r in self.running if r not in gone]
        self.closed = self.held = False

    def _give_way(self) -> None:
        """Nothing moves: sends the youngest request back, or ends one that cannot be served even alone."""
        if len(self.running) > 1:
            r = self.running[-1]
            self._leave([r], [r.row])
            self.retractions[r.request] += 1
            self.waiting.appendleft(r.request)
            self.held = True
            return
        alone = self.running[0].request if self.running else self.waiting.popleft()
        if self.running:
            self._leave(self.running, [self.running[0].row])
        e, n = self.engine, len(self.prompts[alone])
        sizes = ", ".join(f"{s.name} {s.num_pages - s.first_page} pages" for s in e.layout.subpools)
        self.results[alone] = Result(
            n,
            error=f"the pool is too small: a prompt of {n} tokens and {self.wishes[alone].max_new_tokens} new ones starved "
            f"alone in {e.layout.total_bytes} bytes ({sizes} of {e.layout.page_size} tokens)",
            retractions=self.retractions[alone],
        )
