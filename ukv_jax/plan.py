"""What a pool of a given size holds for a model, from its config.json alone.

    python -m ukv_jax plan --model DIR_OR_CONFIG --bytes 100GB

Three ways to spend the same bytes are compared by the finished requests that lie in memory at once:

- unified: every sub-pool takes pages from the whole buffer (`UnifiedLayout`);
- static: a split made once, in proportion to the mean request of the mixed traffic (`StaticLayout`);
- one page size: all sub-pools take pages of one size, that of the largest; a KV page then stores as many blocks of
  page_size tokens as fit into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ukv_jax.layout import PoolLayout, Spec, StaticLayout, SubPool, UnifiedLayout

MIXED_SHORT = 9  # short requests to each long one


@dataclass(frozen=True)
class Capacity:
    """What lies in memory at once: requests, and their tokens."""

    requests: int
    tokens: int


@dataclass(frozen=True)
class SubPoolPlan:
    """bytes_per_token: of each token kept, 0 for state. bytes_per_request: what a request takes at most, however long
    it grows; None where it has no bound. pages: if the sub-pool had the unified pool to itself."""

    name: str
    page_bytes: int
    page_tokens: int
    bytes_per_token: float
    bytes_per_request: int | None
    pages: int


@dataclass(frozen=True)
class Traffic:
    """Requests of these lengths in turn, and what each kind of pool holds of them."""

    lengths: tuple[int, ...]
    unified: Capacity
    static: Capacity
    one_page_size: Capacity


@dataclass(frozen=True)
class Plan:
    """weight_bytes: the parameters in `dtype`. kv_dtype: of cached KV rows (fp8: with scales); state is kept as the model
    keeps it. one_page_bytes: the page of the one-page-size pool."""

    family: str
    dtype: str
    kv_dtype: str
    parameters: int
    weight_bytes: int
    total_bytes: int
    reserved_bytes: int
    one_page_bytes: int
    subpools: tuple[SubPoolPlan, ...]
    traffic: Mapping[str, Traffic]


def plan(
    model: str | Path,
    total_bytes: int,
    *,
    page_size: int = 64,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    short: int = 1024,
    long: int = 65536,
) -> Plan:
    """Plans a pool of total_bytes for the model of a checkpoint directory or a config.json.

    dtype: of weights (default: the checkpoint's). kv_dtype: of cached KV rows (default: dtype). short, long: tokens of
    finished requests; long is cut at the model's own maximum. Raises ValueError for configs that are not implemented, and
    where the pool, or the static split of it, has no room for one long request.
    """
    import jax

    from ukv_jax.attention import pool_specs
    from ukv_jax.models.config import load_config
    from ukv_jax.models.decoder import cache_spec
    from ukv_jax.models.weights import abstract_params

    config = load_config(model)
    long = min(long, config.max_position)
    if not 1 <= short <= long:
        raise ValueError(
            f"short requests of {short} tokens and long ones of {long}: 1 <= short <= long wanted"
        )
    dtype = dtype or config.dtype
    params = jax.tree.leaves(abstract_params(config, dtype))
    specs = pool_specs(cache_spec(config, dtype, kv_dtype))
    unified, traffic = compare(specs, total_bytes, page_size, short, long)
    return Plan(
        config.family,
        dtype,
        kv_dtype or dtype,
        sum(x.size for x in params),
        sum(x.size * x.dtype.itemsize for x in params),
        unified.total_bytes,
        unified.reserved_bytes,
        unified.largest_page,
        tuple(_describe(unified, s) for s in unified.subpools),
        traffic,
    )


def compare(
    specs: tuple[Spec, ...], total_bytes: int, page_size: int, short: int, long: int
) -> tuple[UnifiedLayout, dict[str, Traffic]]:
    """The unified pool, and what the three kinds of pool hold of short, long and mixed requests."""
    mixed = (short,) * MIXED_SHORT + (long,)
    limits = dict(page_size=page_size, max_tokens=long, max_requests=total_bytes)
    unified = UnifiedLayout.from_bytes(specs, total_bytes=total_bytes, **limits)
    static = StaticLayout.from_bytes(specs, total_bytes=total_bytes, **_means(unified, mixed), **limits)
    page = unified.largest_page
    grown = {s.name: s.page_size * (page // s.page_bytes) for s in unified.subpools}

    def capacities(lengths: tuple[int, ...]) -> Traffic:
        own = [_needs(unified, length) for length in lengths]
        one = [_needs(unified, length, grown) for length in lengths]
        return Traffic(
            lengths,
            _most(lengths, own, lambda pages: fits_unified(unified, pages)),
            _most(lengths, own, lambda pages: all(pages[s.name] < s.num_pages for s in static.subpools)),
            _most(lengths, one, lambda pages: sum(pages.values()) < total_bytes // page),  # page 0 is padding
        )

    return unified, {
        "short": capacities((short,)),
        "long": capacities((long,)),
        "mixed": capacities(mixed),
    }


def fits_unified(layout: PoolLayout, pages: Mapping[str, int]) -> bool:
    """Whether so many pages of each sub-pool lie side by side in the buffer, each on its own grid."""
    edge = layout.largest_page  # the padding pages
    *lower, full = layout.subpools
    for s in lower:
        edge = (-(-edge // s.page_bytes) + pages[s.name]) * s.page_bytes
    return edge <= (full.num_pages - pages[full.name]) * full.page_bytes


def _needs(layout: PoolLayout, length: int, page_tokens: Mapping[str, int] | None = None) -> dict[str, int]:
    """Pages of each sub-pool that a request of `length` tokens holds; page_tokens: tokens of a page, if not the layout's.

    A sliding window can begin at any offset in a page. Pages before it are given back from step to step; while a prompt
    is read, a request holds more of them.
    """
    needs = {}
    for s in layout.subpools:
        tokens = page_tokens[s.name] if page_tokens else s.page_size
        pages = 1 if s.is_state else -(-length // tokens)
        needs[s.name] = pages if s.window is None else min(pages, _window_pages(s.window, tokens))
    return needs


def _window_pages(window: int, page_tokens: int) -> int:
    return (window + page_tokens - 2) // page_tokens + 1


def _means(layout: PoolLayout, lengths: tuple[int, ...]) -> dict[str, float]:
    """Tokens in whole pages that a mean request keeps, as StaticLayout.from_bytes takes them."""
    needs = [_needs(layout, length) for length in lengths]
    kept = {
        s.name: sum(n[s.name] for n in needs) * s.page_size / len(lengths)
        for s in layout.subpools
        if not s.is_state
    }
    means = {"mean_tokens": kept[layout.full.name]}
    if layout.windows:
        means["mean_window_tokens"] = max(kept[s.name] for s in layout.windows)
    return means


def _most(
    lengths: tuple[int, ...], needs: list[dict[str, int]], fits: Callable[[dict[str, int]], bool]
) -> Capacity:
    """The most requests, taken in turn, whose pages fit."""

    def pages(requests: int) -> dict[str, int]:
        turns, rest = divmod(requests, len(needs))
        return {name: sum(n[name] * (turns + (i < rest)) for i, n in enumerate(needs)) for name in needs[0]}

    low, high = 0, 1
    while fits(pages(high)):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(pages(middle)) else (low, middle)
    turns, rest = divmod(low, len(lengths))
    return Capacity(low, turns * sum(lengths) + sum(lengths[:rest]))


def _describe(layout: PoolLayout, s: SubPool) -> SubPoolPlan:
    if s.is_state:
        bound: int | None = s.page_bytes
    elif s.window is not None:
        bound = _window_pages(s.window, s.page_size) * s.page_bytes
    else:
        bound = None
    return SubPoolPlan(
        s.name,
        s.page_bytes,
        s.page_size,
        0.0 if s.is_state else s.page_bytes / s.page_size,
        bound,
        s.num_pages - s.first_page,
    )


def lines(p: Plan) -> Iterator[str]:
    """The plan as text."""
    yield f"{p.family}: {p.parameters / 1e9:.1f} billion parameters, {p.weight_bytes / 1e9:.1f} GB in {p.dtype}"
    rows_in = "" if p.kv_dtype == p.dtype else f"; KV rows in {p.kv_dtype}"
    yield f"pool of {p.total_bytes:,} bytes, {p.reserved_bytes:,} of them reserved for padding pages{rows_in}"
    yield ""
    rows: list[tuple[str, ...]] = [
        ("sub-pool", "page bytes", "tokens a page", "bytes a token", "bytes a request", "pages alone")
    ]
    for s in p.subpools:
        token = f"{s.bytes_per_token:,.0f}" if s.bytes_per_token else "-"
        request = f"{s.bytes_per_request:,}" if s.bytes_per_request is not None else "grows"
        rows.append((s.name, f"{s.page_bytes:,}", str(s.page_tokens), token, request, f"{s.pages:,}"))
    yield from _table(rows)
    yield ""
    head = f"one page size ({p.one_page_bytes:,} bytes)"
    rows = [("requests of", "unified", "static split", head)]
    for name, t in p.traffic.items():
        of = f": {t.lengths[0]:,} tokens" if len(t.lengths) == 1 else f", {MIXED_SHORT} short to 1 long"
        rows.append((name + of, *(_held(c) for c in (t.unified, t.static, t.one_page_size))))
    yield from _table(rows)


def _held(c: Capacity) -> str:
    return f"{c.requests:,} ({c.tokens:,} tokens)"


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        yield "  ".join(
            [name.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))]
        )
