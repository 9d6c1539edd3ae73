"""Bytes: which sub-pools share the buffer, how one page of each is laid out, and where a block of it lies.

Everything here is static and hashable. A layout knows no ids' lives: it is the arithmetic that every other room uses.

A sub-pool cuts the whole buffer into *pages* of its own size, from byte 0. A page is one *envelope* of *regions*; a
region is a run of equal *blocks* (for KV: one block of `page_size` rows for each cache layer; for recurrent state: one
block for each head matrix or conv row). Because a block's offset and the envelope are multiples of the block's bytes,
the whole buffer reshapes to `[num_blocks, *block_shape]`, and

    block(page, j) = page * stride + offset(j)

with a `stride` and an `offset` that do not depend on the page. Unified pages are page-major (stride = blocks a page);
a static split keeps each sub-pool in its own byte range, layer-major (stride = 1).
"""

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

INT32_LIMIT = 2**31
PADDING = 0  # page 0 of every sub-pool: never handed out, never written, zero bytes
SCALE = "scale"  # region of an fp8 KVSpec's scales
FP8_MAX = 448.0  # largest finite float8_e4m3fn
FP8_ROW_ALIGN = 128  # bytes of an fp8 latent row with its scale: a multiple of TMA's 128-byte swizzle
_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")


def _dtype(name: str) -> np.dtype:
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is not stored in a pool; allowed: {', '.join(_DTYPES)}")
    return np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True)
class MLASpec:
    """Latent attention cache: one row of `kv_lora_rank + qk_rope_head_dim` elements a token and layer, V its prefix.

    With `dtype="float8_e4m3fn"` a row is padded to a multiple of `FP8_ROW_ALIGN` bytes (576 elements: 640 bytes): the
    e4m3 elements, one f32 scale for the token behind them, zeros. (TMA takes no row of 576 + 4 bytes; a padded row
    keeps page and scale in one transfer.)
    """

    num_layers: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    dtype: str = "bfloat16"
    name: str = "full"

    def __post_init__(self):
        _dtype(self.dtype)
        _positive(num_layers=self.num_layers, kv_lora_rank=self.kv_lora_rank)
        if self.qk_rope_head_dim < 0:
            raise ValueError(f"qk_rope_head_dim must not be negative, got {self.qk_rope_head_dim}")


@dataclass(frozen=True)
class KVSpec:
    """MHA, GQA or MQA cache. `window` makes it a sliding-window sub-pool that shares the full sub-pool's virtual ids.

    K and V of one width: two blocks a layer, K then V. Different widths: one block of K-then-V rows a layer.
    `dtype="float8_e4m3fn"` adds a region of f32 scales, one a token and KV head, for K and for V; blocks of it, page_size *
    num_kv_heads * 4 bytes each, are numbered in int32 over the whole buffer.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    dtype: str = "bfloat16"
    window: int | None = None
    name: str = "full"

    def __post_init__(self):
        _dtype(self.dtype)
        _positive(num_layers=self.num_layers, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        if self.v_head_dim is not None:
            _positive(v_head_dim=self.v_head_dim)
        if self.window is not None:
            _positive(window=self.window)


@dataclass(frozen=True)
class StatePart:
    """One kind of recurrent state: `num_layers * blocks_per_layer` blocks of `block_shape` elements in each slot."""

    name: str
    num_layers: int
    blocks_per_layer: int
    block_shape: tuple[int, ...]
    dtype: str

    def __post_init__(self):
        _dtype(self.dtype)
        _positive(num_layers=self.num_layers, blocks_per_layer=self.blocks_per_layer)
        if not self.block_shape:
            raise ValueError(f"state part {self.name!r} needs a block shape")
        _positive(**{f"{self.name}.block_shape[{i}]": n for i, n in enumerate(self.block_shape)})


@dataclass(frozen=True)
class StateSpec:
    """Recurrent state: page size 1, one slot a request, its own virtual ids."""

    parts: tuple[StatePart, ...]
    name: str = "state"

    def __post_init__(self):
        names = [p.name for p in self.parts]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a state sub-pool needs parts with distinct names, got {names}")


Spec = MLASpec | KVSpec | StateSpec


@dataclass(frozen=True)
class Region:
    """A run of `count` equal blocks at byte `offset` of every page."""

    name: str
    count: int
    block_shape: tuple[int, ...]
    dtype: str
    offset: int = 0

    @property
    def block_bytes(self) -> int:
        return math.prod(self.block_shape) * _dtype(self.dtype).itemsize


def _align(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _envelope(regions: list[Region]) -> tuple[tuple[Region, ...], int]:
    """Regions with their offsets, each a multiple of its own block, and an envelope that is a multiple of every block."""
    placed, end = [], 0
    for region in regions:
        start = _align(end, region.block_bytes)
        placed.append(Region(region.name, region.count, region.block_shape, region.dtype, start))
        end = start + region.count * region.block_bytes
    return tuple(placed), _align(end, math.lcm(*(r.block_bytes for r in placed)))


def _regions(spec: Spec, page_size: int) -> tuple[tuple[Region, ...], int]:
    if isinstance(spec, MLASpec):
        row = spec.kv_lora_rank + spec.qk_rope_head_dim
        if spec.dtype == "float8_e4m3fn":
            row = _align(row + 4, FP8_ROW_ALIGN)
        return _envelope([Region("kv", spec.num_layers, (page_size, row), spec.dtype)])
    if isinstance(spec, KVSpec):
        k_row = spec.num_kv_heads * spec.head_dim
        v_row = spec.num_kv_heads * (spec.v_head_dim or spec.head_dim)
        if k_row == v_row:
            regions = [Region("kv", 2 * spec.num_layers, (page_size, k_row), spec.dtype)]
        else:
            regions = [Region("kv", spec.num_layers, (page_size, k_row + v_row), spec.dtype)]
        if spec.dtype == "float8_e4m3fn":
            regions.append(Region(SCALE, 2 * spec.num_layers, (page_size, spec.num_kv_heads), "float32"))
        return _envelope(regions)
    return _envelope(
        [Region(p.name, p.num_layers * p.blocks_per_layer, p.block_shape, p.dtype) for p in spec.parts]
    )


@dataclass(frozen=True)
class SubPool:
    """One sub-pool of a layout.

    num_pages: pages (or slots) of its grid, the padding page included. num_virtual: virtual ids, the padding id
    included. first_page: the first page that may be handed out. base: first byte of its range in a static split,
    None where the grid covers the whole buffer.
    """

    spec: Spec
    regions: tuple[Region, ...]
    page_bytes: int
    page_size: int
    first_page: int
    num_pages: int
    num_virtual: int
    base: int | None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_state(self) -> bool:
        return isinstance(self.spec, StateSpec)

    @property
    def window(self) -> int | None:
        return self.spec.window if isinstance(self.spec, KVSpec) else None

    @property
    def owns_ids(self) -> bool:
        """A sliding-window sub-pool shares the full sub-pool's virtual ids; the others issue their own."""
        return self.window is None

    def region(self, name: str = "kv") -> Region:
        for region in self.regions:
            if region.name == name:
                return region
        raise ValueError(
            f"sub-pool {self.name!r} has no region {name!r}; it has {[r.name for r in self.regions]}"
        )

    def stride(self, region: str = "kv") -> int:
        """Blocks from one page to the next: the multiplier of a kernel-facing entry (B; 1 in a static split)."""
        return self.page_bytes // self.region(region).block_bytes if self.base is None else 1

    def block_offset(self, index: int, region: str = "kv") -> int:
        """What a kernel adds to an entry to reach block `index` of the region.

        For KV of one width, block `2 * layer` is K and `2 * layer + 1` is V; otherwise block `layer`.
        """
        r = self.region(region)
        if not 0 <= index < r.count:
            raise ValueError(f"block {index} of region {region!r}: sub-pool {self.name!r} has {r.count}")
        if self.base is None:
            return r.offset // r.block_bytes + index
        return (self.base + self.num_pages * r.offset) // r.block_bytes + index * self.num_pages


@dataclass(frozen=True)
class PoolLayout:
    """What `UnifiedLayout` and `StaticLayout` share. Build one with their `from_bytes` or `from_tokens`.

    subpools are in chain order, low bytes to high. page_size: tokens a KV page. max_requests: rows of the request
    maps. max_pages: columns of a request row, so max_pages * page_size * dcp tokens at most. move_bytes: bound of one
    bounded compaction call, in bytes. dcp: decode-context-parallel ranks; a virtual page then stands for page_size * dcp
    tokens, of which this rank's full sub-pool stores page_size and its (replicated) window sub-pools all.
    """

    subpools: tuple[SubPool, ...]
    total_bytes: int
    page_size: int
    max_requests: int
    max_pages: int
    move_bytes: int
    dcp: int = 1

    def __post_init__(self):
        for s in self.subpools:
            for r in s.regions:
                # Scales are reached by block and slot: their rows, of a few bytes, would limit the whole buffer.
                rows = 1 if s.is_state or r.name == SCALE else r.block_shape[0]
                # A block's number counts from byte 0 of the buffer, also where a static range begins further up.
                below, blocks = (s.base or 0) // r.block_bytes, s.page_bytes // r.block_bytes
                ids = (below + s.num_pages * blocks) * rows
                if ids >= INT32_LIMIT:
                    what, hint = (
                        ("blocks of scales", "; larger pages have fewer")
                        if r.name == SCALE
                        else ("kernel-facing ids", "")
                    )
                    raise ValueError(
                        f"sub-pool {s.name!r}: ({s.num_pages} pages * {blocks} blocks + {below} below) * {rows} rows "
                        f"= {ids} {what}, int32 allows {INT32_LIMIT - 1}{hint}"
                    )
            if not s.is_state and s.num_virtual * self.page_size * self.dcp >= INT32_LIMIT:
                raise ValueError(
                    f"sub-pool {s.name!r}: {s.num_virtual} virtual pages * {self.page_size} tokens * dcp {self.dcp} = "
                    f"{s.num_virtual * self.page_size * self.dcp}, int32 allows {INT32_LIMIT - 1}"
                )
        # `chain.plan` counts up to a grid's first page, all of its pages and one more.
        if (self.total_bytes + 3 * self.largest_page) // self.granule >= INT32_LIMIT:
            raise ValueError(
                f"{self.total_bytes} bytes in units of {self.granule} (gcd of the page sizes "
                f"{[s.page_bytes for s in self.subpools]}) do not fit int32; choose page sizes with a larger common divisor"
            )
        if self.move_bytes < self.largest_page:
            raise ValueError(
                f"move_bytes {self.move_bytes} is below the largest page of {self.largest_page} bytes: no page could move"
            )
        if self.total_bytes % self.block_lcm:
            raise ValueError(
                f"total bytes {self.total_bytes} are no multiple of every block ({self.block_lcm})"
            )

    @property
    def largest_page(self) -> int:
        return max(s.page_bytes for s in self.subpools)

    @property
    def granule(self) -> int:
        """Unit of all byte arithmetic on the device: every page border is a multiple of it, and it keeps int32 exact."""
        return math.gcd(*(s.page_bytes for s in self.subpools))

    @property
    def block_lcm(self) -> int:
        return math.lcm(*(r.block_bytes for s in self.subpools for r in s.regions))

    @property
    def full(self) -> SubPool:
        return next(s for s in self.subpools if s.owns_ids and not s.is_state)

    @property
    def windows(self) -> tuple[SubPool, ...]:
        return tuple(s for s in self.subpools if not s.owns_ids)

    @property
    def state(self) -> SubPool | None:
        return next((s for s in self.subpools if s.is_state), None)

    @property
    def max_tokens(self) -> int:
        """Longest request, in tokens."""
        return self.max_pages * self.page_size * self.dcp

    def index(self, name: str) -> int:
        for i, s in enumerate(self.subpools):
            if s.name == name:
                return i
        raise ValueError(f"no sub-pool {name!r}; this layout has {[s.name for s in self.subpools]}")

    def __getitem__(self, name: str) -> SubPool:
        return self.subpools[self.index(name)]


def _chain(specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
    """Chain order: state grows up, windows float, full KV grows down (a window takes the low end if there is no state)."""
    names = [s.name for s in specs]
    if len(set(names)) != len(names):
        raise ValueError(f"sub-pool names must differ, got {names}")
    state = [s for s in specs if isinstance(s, StateSpec)]
    windows = [s for s in specs if isinstance(s, KVSpec) and s.window is not None]
    full = [s for s in specs if s not in state and s not in windows]
    if len(full) != 1 or len(state) > 1:
        raise ValueError(
            f"a pool has one full-attention sub-pool and at most one state sub-pool, got {len(full)} and {len(state)} "
            f"(give a sliding-window sub-pool its window)"
        )
    return tuple(state + windows + full)


def _limits(page_size: int, max_requests: int, max_tokens: int, dcp: int) -> int:
    _positive(page_size=page_size, max_requests=max_requests, max_tokens=max_tokens, dcp=dcp)
    return -(-max_tokens // (page_size * dcp))


def _page_size(spec: Spec, page_size: int, dcp: int) -> int:
    """Rows of one page. A window sub-pool is replicated under DCP: it stores all tokens that a virtual page stands for."""
    if isinstance(spec, StateSpec):
        return 1
    return page_size * dcp if isinstance(spec, KVSpec) and spec.window is not None else page_size


@dataclass(frozen=True)
class UnifiedLayout(PoolLayout):
    """All sub-pools share every byte: each grid starts at byte 0 and covers the whole buffer, pages are page-major."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes at the bottom that hold every sub-pool's padding page: the largest envelope."""
        return self.largest_page

    @classmethod
    def from_bytes(
        cls,
        specs: tuple[Spec, ...],
        *,
        total_bytes: int,
        page_size: int,
        max_requests: int,
        max_tokens: int,
        move_bytes: int | None = None,
        num_virtual: int | None = None,
        dcp: int = 1,
    ) -> "UnifiedLayout":
        """A pool of at most `total_bytes`, rounded down so that no view cuts a tail.

        max_tokens: longest request. move_bytes: bytes one bounded compaction call may move (default: 64 MiB, or the
        largest page). num_virtual: token page ids to issue, padding included (default: as many as there are pages).
        Raises ValueError with the numbers where one request of max_tokens does not fit or an id would not fit int32.
        """
        specs = _chain(tuple(specs))
        max_pages = _limits(page_size, max_requests, max_tokens, dcp)
        sized = [(spec, *_regions(spec, _page_size(spec, page_size, dcp))) for spec in specs]
        largest = max(page_bytes for _, _, page_bytes in sized)
        unit = math.lcm(*(r.block_bytes for _, regions, _ in sized for r in regions))
        total = total_bytes // unit * unit
        need = cls._smallest(sized, largest, max_pages, unit)
        if total < need:
            raise ValueError(
                f"a pool of {total_bytes} bytes ({total} in whole blocks) cannot hold one request of {max_tokens} tokens "
                f"({max_pages} pages of {page_size}); the smallest pool that can has {need} bytes"
            )
        full_pages = total // sized[-1][2]
        subpools = []
        for spec, regions, page_bytes in sized:
            state = isinstance(spec, StateSpec)
            pages = total // page_bytes
            first = -(-largest // page_bytes)
            if state:
                virtual = min(max_requests, pages - first) + 1
            else:
                virtual = full_pages if num_virtual is None else num_virtual
            subpools.append(
                SubPool(
                    spec,
                    regions,
                    page_bytes,
                    _page_size(spec, page_size, dcp),
                    first,
                    pages,
                    virtual,
                    base=None,
                )
            )
        if num_virtual is not None and num_virtual - 1 < max_pages:
            raise ValueError(f"{num_virtual} virtual ids cannot name the {max_pages} pages of one request")
        if move_bytes is None:
            move_bytes = max(64 << 20, largest)
        return cls(tuple(subpools), total, page_size, max_requests, max_pages, move_bytes, dcp)

    @staticmethod
    def _smallest(sized, largest: int, max_pages: int, unit: int) -> int:
        """Bytes of the smallest pool that serves one request of `max_pages` pages, in whole units."""
        edge = largest
        for spec, _, page_bytes in sized[:-1]:
            edge = _align(edge, page_bytes) + (1 if isinstance(spec, StateSpec) else max_pages) * page_bytes
        page_bytes = sized[-1][2]
        return _align(_align(edge, page_bytes) + max_pages * page_bytes, unit)

    @classmethod
    def from_tokens(cls, specs: tuple[Spec, ...], *, tokens: int, requests: int, **kwargs) -> "UnifiedLayout":
        """A pool that holds `tokens` tokens (in every KV sub-pool) and the state of `requests` requests at once.

        Other arguments as in `from_bytes`; max_requests defaults to `requests`.
        """
        _positive(tokens=tokens, requests=requests)
        page_size = kwargs["page_size"]
        chain = _chain(tuple(specs))
        dcp = kwargs.get("dcp", 1)
        sized = [(spec, *_regions(spec, _page_size(spec, page_size, dcp))) for spec in chain]
        largest = max(page_bytes for _, _, page_bytes in sized)
        unit = math.lcm(*(r.block_bytes for _, regions, _ in sized for r in regions))
        edge = largest
        for spec, _, page_bytes in sized:
            pages = requests if isinstance(spec, StateSpec) else -(-tokens // (page_size * dcp))
            edge = _align(edge, page_bytes) + pages * page_bytes
        kwargs.setdefault("max_requests", requests)
        return cls.from_bytes(specs, total_bytes=_align(edge, unit), **kwargs)


def _least_pages(spec: Spec, tokens_per_page: int, max_pages: int) -> int:
    """Pages (slots) that one request takes of a static sub-pool while it decodes token by token."""
    if isinstance(spec, StateSpec):
        return 1
    if isinstance(spec, KVSpec) and spec.window is not None:
        # The new token and window - 1 before it, which may begin with a page's last token.
        return min(-(-(spec.window - 1) // tokens_per_page) + 1, max_pages)
    return max_pages


@dataclass(frozen=True)
class StaticLayout(PoolLayout):
    """The split that unified memory replaces: each sub-pool in a byte range of its own, layer-major, ids passed through.

    Owner sub-pools use virtual page = physical page. A sliding-window sub-pool has fewer pages than ids, so it keeps
    its map; its entries are pages (stride 1).
    """

    @classmethod
    def from_pages(
        cls,
        specs: tuple[Spec, ...],
        *,
        pages: dict[str, int],
        page_size: int,
        max_requests: int,
        max_tokens: int,
        dcp: int = 1,
    ) -> "StaticLayout":
        """A split with `pages[name]` usable pages (slots for state) in each sub-pool, plus its padding page.

        Each must serve one request of max_tokens. A sliding window's pages are given back as it moves on
        (`requests.release_window` before every step), so its sub-pool needs those that one token sees; a chunk of n
        tokens takes ceil(n / (page_size * dcp)) more.
        """
        specs = _chain(tuple(specs))
        max_pages = _limits(page_size, max_requests, max_tokens, dcp)
        if set(pages) != {s.name for s in specs}:
            raise ValueError(
                f"pages given for {sorted(pages)}, sub-pools are {sorted(s.name for s in specs)}"
            )
        full_virtual = pages[specs[-1].name] + 1
        subpools, end = [], 0
        for spec in specs:
            state = isinstance(spec, StateSpec)
            size = _page_size(spec, page_size, dcp)
            regions, page_bytes = _regions(spec, size)
            need = _least_pages(spec, page_size * dcp, max_pages)
            if pages[spec.name] < need:
                raise ValueError(
                    f"sub-pool {spec.name!r} has {pages[spec.name]} pages; one request of {max_tokens} tokens takes {need}"
                )
            num_pages = pages[spec.name] + 1
            base = _align(end, math.lcm(*(r.block_bytes for r in regions)))
            virtual = num_pages if state else full_virtual
            subpools.append(SubPool(spec, regions, page_bytes, size, 1, num_pages, virtual, base))
            end = base + num_pages * page_bytes
        unit = math.lcm(*(r.block_bytes for s in subpools for r in s.regions))
        largest = max(s.page_bytes for s in subpools)
        return cls(tuple(subpools), _align(end, unit), page_size, max_requests, max_pages, largest, dcp)

    @classmethod
    def from_bytes(
        cls,
        specs: tuple[Spec, ...],
        *,
        total_bytes: int,
        mean_tokens: float,
        mean_window_tokens: float | None = None,
        **kwargs,
    ) -> "StaticLayout":
        """Splits `total_bytes` in proportion to what a mean request takes of each sub-pool.

        mean_tokens: tokens a mean request keeps in full attention; mean_window_tokens: in a window sub-pool (default:
        the smaller of mean_tokens and the window). Other arguments as in `from_pages`.
        """
        page_size = kwargs["page_size"]
        chain = _chain(tuple(specs))
        dcp = kwargs.get("dcp", 1)
        share, blocks = {}, []
        for spec in chain:
            regions, page_bytes = _regions(spec, _page_size(spec, page_size, dcp))
            blocks += [r.block_bytes for r in regions]
            if isinstance(spec, StateSpec):
                need = 1.0
            else:
                tokens = mean_tokens
                if isinstance(spec, KVSpec) and spec.window is not None:
                    tokens = (
                        min(mean_tokens, spec.window) if mean_window_tokens is None else mean_window_tokens
                    )
                need = tokens / (page_size * dcp)
            share[spec.name] = (need, page_bytes)
        unit = math.lcm(*blocks)
        per_request = sum(need * page_bytes for need, page_bytes in share.values())
        spare = total_bytes - unit * (len(chain) + 1) - sum(page_bytes for _, page_bytes in share.values())
        requests = spare / per_request
        if requests <= 0:
            raise ValueError(
                f"a static split of {total_bytes} bytes has {spare} left after padding pages and alignment; "
                f"one mean request takes {per_request:.0f}"
            )
        pages = {name: int(need * requests) for name, (need, _) in share.items()}
        max_pages = -(-kwargs["max_tokens"] // (page_size * dcp))
        needs = {c.name: _least_pages(c, page_size * dcp, max_pages) for c in chain}
        if any(pages[name] < need for name, need in needs.items()):
            raise ValueError(
                f"a static split of {total_bytes} bytes for mean requests of {mean_tokens:.0f} tokens has pages {pages}; "
                f"one request of {kwargs['max_tokens']} tokens takes {needs}"
            )
        return cls.from_pages(specs, pages=pages, **kwargs)
