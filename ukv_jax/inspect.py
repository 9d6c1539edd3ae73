"""What lies where: numbers, a table and pictures of a pool, for people.

Everything here reads a state on the host. matplotlib is imported by the plots alone (extra `plot`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ukv_jax.layout import PoolLayout, SubPool, UnifiedLayout
from ukv_jax.pool import ACTIVE, FREE, PARKED, RELEASING, PoolState, SubPoolState, pages_are_ids

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STATUS_NAMES = {FREE: "free", ACTIVE: "active", PARKED: "parked", RELEASING: "releasing"}
NOBODY, RESERVED, HOLE = -1, -2, -3  # owners in a strip that are no request


@dataclass(frozen=True)
class Occupancy:
    """Bytes and pages of one sub-pool.

    live and holes are inside its band. free is what it could still reach: the gaps beside its band in a unified pool
    (which its neighbours may take as well), the rest of its own range in a static split. Sizes in bytes.
    """

    name: str
    page_bytes: int
    live_pages: int
    hole_pages: int
    free_ids: int | None  # None: shares the ids of the full sub-pool
    live: int
    holes: int
    free: int
    low: int  # first byte of the band
    high: int  # first byte behind it


def _live_pages(pool: SubPoolState) -> int:
    return int(np.count_nonzero(np.asarray(pool.v2p)[1:-1] > 0))


def _band(layout: PoolLayout, spec: SubPool, pool: SubPoolState) -> tuple[int, int]:
    """Bytes [low, high) of a band. A static owner's pages lie anywhere in its range: the range is the band."""
    if isinstance(layout, UnifiedLayout):
        return int(pool.low) * spec.page_bytes, int(pool.high) * spec.page_bytes
    assert spec.base is not None
    return spec.base + spec.page_bytes, spec.base + spec.num_pages * spec.page_bytes


def occupancy(state: PoolState) -> tuple[Occupancy, ...]:
    """One record for each sub-pool, in chain order."""
    layout = state.layout
    bands = [_band(layout, s, p) for s, p in zip(layout.subpools, state.subpools)]
    records = []
    for i, (spec, pool) in enumerate(zip(layout.subpools, state.subpools)):
        live, holes = _live_pages(pool), int(pool.hole_count)
        if isinstance(layout, UnifiedLayout):
            taken = [b for k, b in enumerate(bands) if k != i and b[1] > b[0]]
            low, high = bands[i]
            below = max([b[1] for b in taken if b[1] <= low], default=layout.reserved_bytes)
            above = min([b[0] for b in taken if b[0] >= high], default=layout.total_bytes)
            free = above - below - (high - low)
        else:
            free = (spec.num_pages - 1 - live) * spec.page_bytes
            holes = 0 if pages_are_ids(layout, spec) else holes
            free -= holes * spec.page_bytes
        records.append(
            Occupancy(
                name=spec.name,
                page_bytes=spec.page_bytes,
                live_pages=live,
                hole_pages=holes,
                free_ids=int(pool.free_count) if spec.owns_ids else None,
                live=live * spec.page_bytes,
                holes=holes * spec.page_bytes,
                free=free,
                low=bands[i][0],
                high=bands[i][1],
            )
        )
    return tuple(records)


def reserved(layout: PoolLayout) -> int:
    """Bytes that no page may use: the reserved bottom of a unified pool; padding pages and alignment of a static split."""
    if isinstance(layout, UnifiedLayout):
        return layout.reserved_bytes
    return layout.total_bytes - sum((s.num_pages - 1) * s.page_bytes for s in layout.subpools)


def human(size: int) -> str:
    """Bytes with three figures and a binary unit."""
    value, units = float(size), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units[:-1]:
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} {units[-1]}"


def describe(state: PoolState) -> str:
    """A table of the sub-pools and a line each on bytes, requests and counters."""
    layout = state.layout
    header = (
        "sub-pool",
        "page",
        "live",
        "holes",
        "reachable",
        "live pages",
        "hole pages",
        "free ids",
        "band (bytes)",
    )
    rows = [header]
    for o in occupancy(state):
        ids = "shared" if o.free_ids is None else str(o.free_ids)
        rows.append(
            (
                o.name,
                human(o.page_bytes),
                human(o.live),
                human(o.holes),
                human(o.free),
                str(o.live_pages),
                str(o.hole_pages),
                ids,
                f"[{o.low:,}, {o.high:,})",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(w) if i in (0, len(row) - 1) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(len(line) for line in lines))
    status = np.asarray(state.requests.status)
    requests = ", ".join(f"{np.count_nonzero(status == code)} {name}" for code, name in STATUS_NAMES.items())
    kind = "unified" if isinstance(layout, UnifiedLayout) else "static split"
    used = sum(o.live for o in occupancy(state))
    lines += [
        "",
        f"{kind}: {human(used)} live of {human(layout.total_bytes)} ({used / layout.total_bytes:.0%}), "
        f"{human(reserved(layout))} reserved",
        f"requests: {requests}",
        f"faults {int(state.counters.faults)}, refused {int(state.counters.refused)}, pages moved {int(state.counters.moved)}"
        + (f", moves forbidden by {int(state.gate)} holders" if int(state.gate) else ""),
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class Strip:
    """The buffer cut into equal byte ranges, each with what lies at its middle.

    subpool: Int[width] index of the sub-pool, -1 = free bytes or reserved. owner: Int[width] request row that last wrote
    the page (any holder, if nobody wrote it), NOBODY for free bytes, RESERVED for padding and alignment, HOLE for a free
    page inside a band. edges: Int[width + 1] byte borders of the cells.
    """

    subpool: np.ndarray
    owner: np.ndarray
    edges: np.ndarray


def _page_owners(state: PoolState, index: int) -> np.ndarray:
    """Request row of each physical page of one sub-pool, NOBODY where it is not live."""
    layout, r = state.layout, state.requests
    spec, pool = layout.subpools[index], state.subpools[index]
    holder = np.full(spec.num_virtual, NOBODY)
    if spec.is_state:
        slots = np.asarray(r.slots)
        rows = np.flatnonzero(slots > 0)
        holder[slots[rows]] = rows
    else:
        pages = np.asarray(r.pages)
        row, column = np.nonzero(pages > 0)
        holder[pages[row, column]] = row
        writer = np.asarray(r.page_to_req)
        holder = np.where(writer >= 0, writer, holder)
    p2v = np.asarray(pool.p2v)[:-1]
    return np.where(p2v > 0, holder[np.maximum(p2v, 0)], NOBODY)


def strip(state: PoolState, width: int = 512) -> Strip:
    """Who owns which bytes, in `width` equal cells from byte 0 to the end of the buffer.

    In a static split, whose pages are layer-major, a cell shows the page whose share of the range it covers.
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    layout = state.layout
    edges = np.linspace(0, layout.total_bytes, width + 1).astype(np.int64)
    middle = (edges[:-1] + edges[1:]) // 2
    subpool, owner = np.full(width, -1), np.full(width, NOBODY)
    if isinstance(layout, UnifiedLayout):
        owner[middle < layout.reserved_bytes] = RESERVED
    else:
        owner[:] = RESERVED
    for i, (spec, pool) in enumerate(zip(layout.subpools, state.subpools)):
        low, high = _band(layout, spec, pool)
        inside = (middle >= low) & (middle < high)
        page = (middle[inside] - (spec.base or 0)) // spec.page_bytes
        owners = _page_owners(state, i)[page]
        live = np.asarray(pool.p2v)[page] > 0
        free: int | np.ndarray = HOLE
        if not isinstance(layout, UnifiedLayout):
            free = np.where((page < int(pool.high)) & (not pages_are_ids(layout, spec)), HOLE, NOBODY)
        subpool[inside] = i
        owner[inside] = np.where(live, owners, free)
    return Strip(subpool, owner, edges)


def plot_strip(
    state: PoolState, ax: "Axes | None" = None, *, width: int = 1024, by: str = "request"
) -> "Axes":
    """Draws the buffer as a bar: one colour a request (`by="request"`) or a sub-pool (`by="subpool"`); holes are hatched grey.

    Raises ValueError where `by` is neither.
    """
    import matplotlib.pyplot as plt
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    if by not in ("request", "subpool"):
        raise ValueError(f"by must be 'request' or 'subpool', got {by!r}")
    s, names = strip(state, width), [p.name for p in state.layout.subpools]
    if ax is None:
        _, ax = plt.subplots(figsize=(10, 1.6), layout="constrained")
    palette = np.array([to_rgb(c) for c in _palette(max(len(names), 1) if by == "subpool" else 20)])
    colour = np.ones((width, 3))
    live = s.owner >= 0
    key = s.subpool if by == "subpool" else s.owner
    colour[live] = palette[key[live] % len(palette)]
    colour[s.owner == HOLE] = to_rgb(HOLE_COLOUR)
    colour[s.owner == RESERVED] = to_rgb(RESERVED_COLOUR)
    unit, scale = _unit(state.layout.total_bytes)
    ax.imshow(
        colour[None],
        aspect="auto",
        interpolation="nearest",
        extent=(0, state.layout.total_bytes / scale, 0, 1),
    )
    for i, name in enumerate(names):
        cells = np.flatnonzero(s.subpool == i)
        if cells.size:
            low, high = s.edges[cells[0]] / scale, s.edges[cells[-1] + 1] / scale
            inset = min(0.002 * state.layout.total_bytes / scale, (high - low) / 4)  # neighbours stay apart
            ax.plot(
                [low + inset, high - inset],
                [1.06, 1.06],
                color="0.25",
                lw=1.5,
                clip_on=False,
                solid_capstyle="butt",
            )
            ax.text((low + high) / 2, 1.12, name, ha="center", va="bottom", fontsize=9)
    handles = [Patch(color=HOLE_COLOUR, label="hole"), Patch(color=RESERVED_COLOUR, label="reserved")]
    handles.append(Patch(facecolor="white", edgecolor="0.6", label="free"))
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.05), frameon=False, fontsize=8)
    ax.set(
        xlabel=f"byte offset ({unit}); one colour a {by.replace('subpool', 'sub-pool')}",
        yticks=[],
        ylim=(0, 1),
    )
    for side in ("top", "left", "right"):
        ax.spines[side].set_visible(False)
    return ax


HOLE_COLOUR, RESERVED_COLOUR = "#b0b0b0", "#404040"


def _palette(n: int) -> list[str]:
    import matplotlib as mpl

    name = "Dark2" if n <= 8 else "tab20"
    return [mpl.colors.to_hex(c) for c in mpl.colormaps[name].colors[:n]]  # type: ignore[attr-defined]


def _unit(size: int) -> tuple[str, int]:
    """The binary unit in which a plot shows `size` bytes."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return unit, scale
    return "B", 1


def plot_occupancy(
    layout: PoolLayout,
    live: np.ndarray,
    holes: np.ndarray,
    *,
    steps: np.ndarray | None = None,
    state: PoolState | None = None,
    title: str | None = None,
) -> "Figure":
    """Draws occupancy over time, live bytes stacked by sub-pool with holes on top of each; below it the buffer strip.

    Args:
      layout: names the sub-pools and their sizes.
      live, holes: [steps, sub-pools] bytes, in chain order.
      steps: [steps] numbers of the x axis (default 0, 1, ...).
      state: draws its buffer as a strip below, where given.

    Raises ValueError where the shapes do not fit together.
    """
    import matplotlib.pyplot as plt

    live, holes = np.asarray(live, float), np.asarray(holes, float)
    expected = (live.shape[0], len(layout.subpools))
    if live.shape != expected or holes.shape != expected:
        raise ValueError(
            f"live {live.shape} and holes {holes.shape} must both be [steps, {len(layout.subpools)}]"
        )
    x = np.arange(live.shape[0]) if steps is None else np.asarray(steps)
    if x.shape != (live.shape[0],):
        raise ValueError(f"steps {x.shape} does not match {live.shape[0]} rows of live bytes")
    unit, scale = _unit(layout.total_bytes)
    if state is None:
        figure, ax = plt.subplots(figsize=(10, 4), layout="constrained")
    else:
        figure, (ax, below) = plt.subplots(
            2, 1, figsize=(10, 5.6), height_ratios=(4, 1), layout="constrained"
        )
        plot_strip(state, below)
    base = np.full(live.shape[0], reserved(layout) / scale)
    ax.fill_between(x, 0, base, color=RESERVED_COLOUR, lw=0, step="post", label="reserved")
    for i, (spec, colour) in enumerate(zip(layout.subpools, _palette(len(layout.subpools)))):
        top = base + live[:, i] / scale
        ax.fill_between(x, base, top, color=colour, lw=0, step="post", label=f"{spec.name}: live")
        rim = top + holes[:, i] / scale
        if holes[:, i].any():
            label = f"{spec.name}: holes"
            ax.fill_between(
                x, top, rim, facecolor="white", edgecolor=colour, hatch="////", lw=0, step="post", label=label
            )
        base = rim
    ax.axhline(layout.total_bytes / scale, color="0.25", lw=1, ls="--")
    ax.annotate(
        f"pool: {human(layout.total_bytes)}",
        (1, layout.total_bytes / scale),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=8,
    )
    ax.set(xlabel="step", ylabel=f"bytes ({unit})", ylim=(0, layout.total_bytes / scale * 1.1), xmargin=0)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    if title:
        ax.set_title(title)
    return figure
