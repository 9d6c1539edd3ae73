"""Runs the bodies of the Mosaic GPU index kernels on a CPU, eagerly, over NumPy memory.

Mosaic's interpreter refuses inline code, and these kernels reach global memory through it. All of that is in
`pallas_kernels.gmem`, so replacing its functions is enough to run a kernel's own body: every address it computes, every
mask, every trip. The replacements are stricter than the card. A load out of bounds fails, also of a lane whose value is
thrown away, and so do a store out of bounds and two lanes of one store at one address. Fresh outputs hold poison, and
blocks run in a shuffled order. Warpgroups are Python threads that meet at barriers.
"""

import itertools
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import gmem, implementations

POISON = -123456789
MAX_GRID = 4096  # blocks that are worth emulating

_here = threading.local()


class Ref:
    """A global-memory ref: int32 or uint8 elements, or a row of them."""

    def __init__(self, data: np.ndarray):
        self.data, self.shape, self.dtype = data, data.shape, data.dtype

    @property
    def at(self) -> "Ref":
        return self

    def __getitem__(self, index: Any) -> Any:
        index = int(index)
        assert 0 <= index < self.shape[0], f"index {index} of {self.shape}"
        return jnp.asarray(self.data[index]) if self.data.ndim == 1 else Ref(self.data[index])


def _inside(ref: Ref, index: np.ndarray) -> None:
    assert ref.data.ndim == 1
    bad = index[(index < 0) | (index >= ref.data.size)]
    assert bad.size == 0, f"indices {bad[:5]} of {ref.data.size} elements"


def load(ref: Ref, index: jax.Array) -> jax.Array:
    index = np.asarray(index)
    _inside(ref, index)
    return jnp.asarray(ref.data[index])


def _live(ref: Ref, index, value, live) -> tuple[np.ndarray, np.ndarray]:
    """(index, value) of the live lanes, whose addresses lie inside the array."""
    live = np.asarray(live) != 0
    index, value = np.asarray(index)[live], np.asarray(value)[live]
    _inside(ref, index)
    return index, value


def store(ref: Ref, index: jax.Array, value: jax.Array, live: jax.Array) -> None:
    index, value = _live(ref, index, value, live)
    assert np.unique(index).size == index.size, "two lanes store at one address"
    ref.data[index] = value


def atomic_min(ref: Ref, index: jax.Array, value: jax.Array, live: jax.Array) -> None:
    index, value = _live(ref, index, value, live)
    with _here.block.lock:
        np.minimum.at(ref.data, index, value)


def atomic_add(ref: Ref, index: jax.Array, value: jax.Array, live: jax.Array) -> None:
    index, value = _live(ref, index, value, live)
    with _here.block.lock:
        np.add.at(ref.data, index, value)


def store_scalar(ref: Ref, index: Any, value: Any) -> None:
    store(ref, np.array([index]), np.array([value]), np.array([1]))


def store_quads(ref: Ref, index: jax.Array, values: Any, live: Any) -> None:
    whole = np.all([np.asarray(m) != 0 for m in live], axis=0)
    assert not np.any(np.asarray(index)[whole] % 4), "a store of 16 bytes is not aligned"
    every = jnp.concatenate([index + e for e in range(4)])
    store(ref, every, jnp.concatenate(values), jnp.concatenate(live))


def copy_within(
    ref: Ref, source: Any, target: Any, stride: int, offset: jax.Array, live: jax.Array, width: int
) -> None:
    assert stride % width == 0
    for at in np.asarray(offset)[np.asarray(live) != 0]:
        assert at % width == 0
        begin, end = (int(page) * stride + int(at) for page in (source, target))
        assert min(begin, end) >= 0
        assert max(begin, end) + width <= ref.data.size
        ref.data[end : end + width] = ref.data[begin : begin + width]


class _Block:
    def __init__(self, warpgroups: int):
        self.barrier = threading.Barrier(warpgroups, timeout=60)
        self.lock = threading.Lock()
        self.live: dict[int, np.ndarray] = {}


def block_barrier() -> None:
    _here.block.barrier.wait()


def block_rank(live: jax.Array, counts: Any, warpgroups: int) -> tuple[jax.Array, jax.Array]:
    block, me = _here.block, _here.axes.get("warpgroup", 0)
    block.live[me] = np.asarray(live)
    block.barrier.wait()
    before = sum(int(block.live[w].sum()) for w in range(me))
    total = sum(int(block.live[w].sum()) for w in range(warpgroups))
    block.barrier.wait()
    rank = np.cumsum(live) - np.asarray(live) + before
    return jnp.asarray(rank, jnp.int32), jnp.full(len(live), total, jnp.int32)


def block_scan(values: jax.Array, sums: Any, warpgroups: int) -> tuple[jax.Array, jax.Array]:
    return block_rank(values, sums, warpgroups)


def launch(
    body: Any,
    *,
    inputs: Any,
    in_place: Any,
    outputs: Any,
    grid: Any,
    warpgroups: int = 1,
    scratch: Any = None,
) -> dict[str, Any]:
    refs = jax.tree.map(lambda x: Ref(np.array(x)), {**inputs, **in_place})
    refs |= jax.tree.map(lambda x: Ref(np.full(x.shape, POISON, x.dtype)), dict(outputs))
    blocks = list(itertools.product(*map(range, grid.values())))
    assert len(blocks) <= MAX_GRID
    random.Random(0).shuffle(blocks)
    for block in blocks:
        shared, failures = _Block(warpgroups), []
        memory = {name: Ref(np.full(x.shape, POISON, x.dtype)) for name, x in (scratch or {}).items()}

        def run(warpgroup: int, block=block, shared=shared, failures=failures, memory=memory) -> None:
            _here.block = shared
            _here.axes = dict(zip(grid, block, strict=True)) | {"warpgroup": warpgroup}
            try:
                with jax.disable_jit():
                    body(refs, **memory)
            except BaseException as error:
                failures.append(error)
                shared.barrier.abort()

        threads = [threading.Thread(target=run, args=(w,)) for w in range(1, warpgroups)]
        for thread in threads:
            thread.start()
        run(0)
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
    results = {name: refs[name] for name in (*in_place, *outputs)}
    return jax.tree.map(lambda ref: jnp.asarray(ref.data), results, is_leaf=lambda x: isinstance(x, Ref))


@contextmanager
def emulated() -> Iterator[None]:
    """Inside, implementation="mosaic" of the index operations runs on NumPy."""
    with pytest.MonkeyPatch.context() as patch:
        for function in (load, store, atomic_min, store_scalar, store_quads, copy_within):
            patch.setattr(gmem, function.__name__, function)
        for function in (atomic_add, block_barrier, block_rank, block_scan, launch):
            patch.setattr(gmem, function.__name__, function)
        for name, function in (
            ("load_coherent", load),
            ("store_bool", store),
            ("shared_load", load),
            ("shared_store", store),
            ("shared_min", atomic_min),
        ):
            patch.setattr(gmem, name, function)
        patch.setattr(gmem, "iota", lambda count: jnp.arange(count, dtype=jnp.int32))
        patch.setattr(gmem, "splat", lambda value: jnp.full((gmem.WARPGROUP,), value, jnp.int32))
        patch.setattr(implementations, "device", SimpleNamespace(target=lambda: ("cuda", (9, 0))))
        patch.setattr(lax, "axis_index", lambda name: jnp.int32(_here.axes[name]))
        yield


# What a contract suite runs: plain XLA, the Mosaic kernels' bodies on NumPy, and on a GPU the kernels themselves.
IMPLEMENTATIONS = ("xla", "emulated", pytest.param("mosaic", marks=pytest.mark.gpu))


def run(implementation: str, function, *args: Any, **options: Any) -> Any:  # type: ignore[no-untyped-def]
    """Calls an index operation with one of `IMPLEMENTATIONS`, compiled once for its shapes and static options."""
    if implementation == "emulated":
        with emulated():
            return function(*args, **options, implementation="mosaic")
    arrays = {name: value for name, value in options.items() if isinstance(value, jax.Array)}
    static = {name: value for name, value in options.items() if name not in arrays and value is not None}
    return _compiled(function, implementation, tuple(sorted(static.items())))(*args, **arrays)


@cache
def _compiled(function, implementation: str, static: tuple[tuple[str, Any], ...]):  # type: ignore[no-untyped-def]
    return jax.jit(partial(function, **dict(static), implementation=implementation))
