"""GPU kernel times by CUPTI, with a cold L2 cache and candidates interleaved, and the record a benchmark writes.

A time is the time in which kernels of one call ran, in microseconds; where they overlap it counts once. Gaps between launches
do not count, nor do copies by the driver, so the number of launches is reported beside it. Before every run 256 MB are written and
another 256 MB are read, which leaves foreign clean lines in L2. A call is queued behind that: while it lasts, the host launches, so
that a kernel which is made to begin while another runs, as the merges of MLA decode, does.
"""

import argparse
import datetime
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from bench import cupti


@dataclass(frozen=True)
class Timing:
    """Microseconds over the runs, and the kernels that one call launches."""

    us: float
    p10: float
    p90: float
    launches: int


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--iters", type=int, default=20, help="runs of each candidate (default: %(default)s)")
    parser.add_argument(
        "--peers",
        type=Path,
        help="folder with a module `peers` that offers other projects' kernels, to be timed in the same run",
    )
    return parser


def load_peers(folder: Path | None) -> ModuleType | None:
    """The module `peers` of that folder. Must come before the first use of a JAX device: both share the card."""
    if folder is None:
        return None
    sys.path.insert(0, str(folder))
    return importlib.import_module("peers")


_WARM_UP = 3


def measure(
    candidates: Mapping[str, Callable[[], Any]], iters: int, peers: ModuleType | None = None
) -> dict[str, Timing]:
    """Times each candidate's call, one run of each in turn, all by one clock.

    A candidate that returns no JAX array is a peer's: `peers` has a ``flush()`` that fills L2 behind what its calls have queued,
    and a ``finish(result)`` that waits. Raises RuntimeError if CUPTI does not work, or runs of a candidate differ in their kernels.
    """
    recorder = _recorder()
    ways = {}  # to flush and to finish, and the kernels of a flush
    for name, call in candidates.items():
        for _ in range(_WARM_UP):
            result = call()
        ours = peers is None or any(isinstance(x, jax.Array) for x in jax.tree.leaves(result))
        flush, finish = (_flush_l2, jax.block_until_ready) if ours else (peers.flush, peers.finish)
        finish((result, flush()))
        ways[name] = flush, finish, len(recorder.spans(lambda finish=finish, flush=flush: finish(flush())))
    runs: dict[str, list[list[cupti.Span]]] = {name: [] for name in candidates}
    for _ in range(iters):
        for name, call in candidates.items():
            flush, finish, kernels = ways[name]
            spans = recorder.spans(lambda finish=finish, flush=flush, call=call: finish((flush(), call())))
            runs[name].append(spans[kernels:])
    for name, kernels in runs.items():
        if len(counts := sorted({len(spans) for spans in kernels})) > 1:
            raise RuntimeError(f"{name}: runs of {' or '.join(map(str, counts))} kernels")
    return {name: _summary(kernels) for name, kernels in runs.items()}


@cache
def _recorder() -> cupti.Recorder:
    return cupti.Recorder()


def _summary(runs: list[list[cupti.Span]]) -> Timing:
    p10, median, p90 = np.percentile([cupti.covered_us(spans) for spans in runs], [10, 50, 90]).tolist()
    return Timing(median, p10, p90, len(runs[0]))


_CACHE_FILL: list[jax.Array] = []


@jax.jit
def _overwrite_and_read(written: jax.Array, read: jax.Array) -> tuple[jax.Array, jax.Array]:
    written, read = jax.lax.optimization_barrier((written + 1, read))
    return written, read.max()


def _flush_l2() -> tuple[jax.Array, jax.Array]:
    if not _CACHE_FILL:
        _CACHE_FILL.extend(jnp.arange(64 << 20, dtype=jnp.int32) + i for i in range(2))
    return _overwrite_and_read(*_CACHE_FILL)


def record(benchmark: str, rows: list[dict[str, Any]], peers: ModuleType | None) -> dict[str, Any]:
    """What a results file holds: the rows, and on what and with which versions they were measured."""
    versions = {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "python": sys.version.split()[0]}
    for name in ("torch", "triton") if peers is not None else ():
        versions[name] = importlib.import_module(name).__version__
    versions |= getattr(peers, "VERSIONS", {})
    return {
        "benchmark": benchmark,
        "date": datetime.date.today().isoformat(),
        "card": jax.devices()[0].device_kind,
        "driver": _driver(),
        "commit": _commit(),
        "versions": versions,
        "unit": "us, median of CUPTI kernel times, overlap counted once, L2 cold and clean, candidates interleaved and queued",
        "rows": rows,
    }


def _commit() -> str:
    """Short name of the commit that was measured, "+" behind it where files differ; of a copy without .git, $BENCH_COMMIT."""
    if name := os.environ.get("BENCH_COMMIT"):
        return name
    root = Path(__file__).parent
    try:
        name, changed = (
            subprocess.run(
                ["git", *command], cwd=root, capture_output=True, text=True, check=True
            ).stdout.strip()
            for command in (
                ["rev-parse", "--short", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no"],
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + "+" * bool(changed)


def _driver() -> str:
    """Version of NVIDIA's kernel module."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found.group() if found else "unknown"


def flat(timings: Mapping[str, Timing]) -> dict[str, dict[str, float]]:
    return {
        name: {k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(timing).items()}
        for name, timing in timings.items()
    }


def write(path: Path | None, results: dict[str, Any], quiet: bool = False) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
        if not quiet:
            print(f"wrote {path}")
