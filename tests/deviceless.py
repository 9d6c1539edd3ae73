"""Compiles programs for a GPU on a machine that has none, to assert what the compiler makes of them.

Needs the CUDA plugin wheels (``make deviceless`` installs them) and no CUDA library, driver or card. Use::

    from tests.deviceless import compile_for, requires_plugin, shape

    pytestmark = [pytest.mark.deviceless, requires_plugin]

    def test_step_copies_no_pool():
        temps = {}
        for pool_bytes in (4 << 30, 8 << 30):
            program = compile_for(step, shape((pool_bytes,), "uint8"), shape((64,), "int32"), donate=0)
            assert program.alias_bytes >= pool_bytes  # the donated pool is updated in place
            temps[pool_bytes] = program.temp_bytes
        assert temps[8 << 30] - temps[4 << 30] <= 32 * added_pages

`compile_for` takes any callable (jitted or not) and pytrees of arrays or ShapeDtypeStructs; put static values into a
closure or a `functools.partial`. While it traces, `jax.sharding.get_abstract_mesh().abstract_device` tells the target
and `jax.default_backend()` still says cpu, so name the implementation wherever code chooses one by backend. Mosaic
kernels compile for "h200" and fail with RESOURCE_EXHAUSTED where their shared memory does not fit. An index kernel takes less
than a CPU second, a kernel of attention 5 to 10, a decode loop half a minute.

`Program.thunks` is the run-time program. To have while loops and conds captured into the command buffer (CUDA graph),
compile with ``options=CAPTURE_LOOPS``; `Thunk.captured` then tells for each launch. Without it XLA captures runs of
five launches or more. A traceback about cuDNN on stderr is harmless.
"""

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

requires_plugin = pytest.mark.skipif(
    find_spec("jax_cuda13_plugin") is None
    or find_spec("jax_plugins") is None
    or find_spec("jax_plugins.xla_cuda13") is None,
    reason="the CUDA plugin wheels are absent (make deviceless installs them)",
)

# What `xla_gpu_enable_command_buffer` holds by default, and the loops. (A per-compile option takes the full list only;
# the environment form is XLA_FLAGS=--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL.)
CAPTURE_LOOPS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL",
    "xla_gpu_graph_min_graph_size": 1,
}
# Without a card nothing can be timed: autotuning would compile candidates and take a default one. That is half of the CPU
# time of a decode loop, for the same launches, aliases and temporaries.
_NO_AUTOTUNING = {"xla_gpu_autotune_level": 0}

# data/h200.txtpb describes the H200. The other targets are the same text with the figures that the compiler looks at
# changed. Shared memory and threads of each compute capability: CUDA C++ Programming Guide, table "Technical
# Specifications per Compute Capability". SM counts, L2, clocks and bandwidth: NVIDIA's whitepapers and data
# sheets (A100 SXM 80 GB; Ada AD102 as in the RTX 4090; HGX B200).
_DIFFERENCES: dict[str, dict[str, object]] = {
    "h200": {},
    "a100": {
        "core_count": 108,
        "fpus_per_core": 64,
        "shared_memory_per_core": 164 << 10,
        "shared_memory_per_block_optin": 163 << 10,
        "memory_bandwidth": 2_039_000_000_000,
        "l2_cache_size": 40 << 20,
        "clock_rate_ghz": 1.41,
        "device_memory_size": 80 << 30,
        "cuda_compute_capability": "{ major: 8 }",
        "platform_version": '"Compute Capability 8.0"',
        "name": '"NVIDIA A100-SXM4-80GB"',
        "device_description_str": '"NVIDIA A100-SXM4-80GB"',
    },
    "rtx4090": {
        "core_count": 128,
        "threads_per_core_limit": 1536,
        "shared_memory_per_core": 100 << 10,
        "shared_memory_per_block_optin": 99 << 10,
        "memory_bandwidth": 1_008_000_000_000,
        "l2_cache_size": 72 << 20,
        "clock_rate_ghz": 2.52,
        "device_memory_size": 24 << 30,
        "cuda_compute_capability": "{ major: 8 minor: 9 }",
        "platform_version": '"Compute Capability 8.9"',
        "name": '"NVIDIA GeForce RTX 4090"',
        "device_description_str": '"NVIDIA GeForce RTX 4090"',
    },
    "b200": {
        "core_count": 148,
        "memory_bandwidth": 8_000_000_000_000,
        "l2_cache_size": 126 << 20,
        "clock_rate_ghz": 1.965,
        "device_memory_size": 180 << 30,
        "cuda_compute_capability": "{ major: 10 }",
        "platform_version": '"Compute Capability 10.0a"',
        "name": '"NVIDIA B200"',
        "device_description_str": '"NVIDIA B200"',
    },
}
TARGETS = tuple(_DIFFERENCES)
CONTAINERS = ("kSequential", "kCommandBuffer", "kWhile", "kConditional")


def target_config(target: str) -> str:
    """Text proto (xla.gpu.GpuTargetConfigProto) of a target."""
    text = (Path(__file__).parent / "data" / "h200.txtpb").read_text()
    for name, value in _DIFFERENCES[target].items():
        pattern = rf"^(\s*{name}):? (?:\{{.*\}}|.*)$"
        separator = " " if str(value).startswith("{") else ": "
        text, count = re.subn(pattern, rf"\g<1>{separator}{value}", text, flags=re.MULTILINE)
        assert count == 1, f"{name} occurs {count} times in h200.txtpb"
    return text


@cache
def device_mesh(target: str) -> Mesh:
    """A mesh of one device of the target."""
    jax.devices()  # registers the plugins
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(target), topology="1x1x1"
    )
    return topologies.make_mesh(topology, (1,), ("device",))


def shape(dims: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Shorthand for an argument of `compile_for`."""
    return jax.ShapeDtypeStruct(dims, dtype)


@dataclass(frozen=True)
class Thunk:
    """One line of the run-time program. `parents` are the kinds of the thunks around it, outermost first."""

    kind: str  # "kCustomKernel", "kCopy", "kCustomCall", "kWhile", "kConditional", "kCommandBuffer", ...
    name: str  # of a kernel: its fusion or its function
    parents: tuple[str, ...]

    @property
    def captured(self) -> bool:
        """Part of a command buffer (a CUDA graph)."""
        return "kCommandBuffer" in self.parents


@dataclass(frozen=True)
class Program:
    """A compiled program and what the compiler said about it."""

    compiled: jax.stages.Compiled
    thunks: tuple[Thunk, ...]

    @property
    def alias_bytes(self) -> int:
        """Bytes of results that live in a donated argument."""
        return self.compiled.memory_analysis().alias_size_in_bytes

    @property
    def temp_bytes(self) -> int:
        """Bytes of temporaries at their peak."""
        return self.compiled.memory_analysis().temp_size_in_bytes

    @property
    def launches(self) -> tuple[Thunk, ...]:
        """Thunks that put work on the device (kernels, copies, library calls): all but the containers."""
        return tuple(thunk for thunk in self.thunks if thunk.kind not in CONTAINERS)


def compile_for(
    fn: Callable[..., Any],
    *args: Any,
    donate: int | tuple[int, ...] = (),
    target: str = "h200",
    options: dict[str, Any] | None = None,
) -> Program:
    """Compiles ``fn(*args)`` for one GPU of `target`, with the arguments at the positions `donate` donated.

    `options` are XLA's debug options by name, for this compilation alone; autotuning is off where they do not name it.
    A jitted `fn` is wrapped, so its own donation does not count: name it in `donate`. Raises what the compiler raises.
    """
    mesh = device_mesh(target)
    replicated = NamedSharding(mesh, PartitionSpec())
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), args)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        # A new function object: a trace cached for another target must not be found again.
        lowered = (
            jax.jit(lambda *xs: fn(*xs), donate_argnums=donate)
            .trace(*args)
            .lower(lowering_platforms=("cuda",))
        )
    with tempfile.TemporaryDirectory(prefix="xla-dump-") as dump:
        compiled = lowered.compile(
            compiler_options={**_NO_AUTOTUNING, **(options or {}), "xla_dump_to": dump}
        )
        # Autotuning may compile modules of its own on the way; the program is the longest.
        before = max(Path(dump).glob("*.thunk_sequence.txt"), key=lambda path: path.stat().st_size)
        # Absent where the passes over thunks (which form command buffers) had nothing to do.
        after = before.with_name(before.name.replace("sequence", "sequence_after_thunk_passes"))
        text = (after if after.exists() else before).read_text()
    return Program(compiled, parse_thunks(text))


def parse_thunks(text: str) -> tuple[Thunk, ...]:
    """Thunks of a dump. A line is ``  004: kKind [links] name ...``; deeper lines are inside the one above."""
    thunks: list[Thunk] = []
    open_: list[tuple[int, str]] = []
    for line in text.splitlines():
        found = re.match(r"^(\s*)\d+: (k\w+)\s*\[[^\]]*\]\s*(\S*)", line)
        if found is None:  # "condition:", "body:" and the like
            continue
        indent, kind, name = len(found[1]), found[2], found[3]
        while open_ and open_[-1][0] >= indent:
            open_.pop()
        thunks.append(Thunk(kind, name, tuple(parent for _, parent in open_)))
        open_.append((indent, kind))
    return tuple(thunks)
