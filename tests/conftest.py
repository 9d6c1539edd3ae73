"""Settings for every test: CPU unless the machine has an NVIDIA GPU, and the same examples at every run."""

import gc
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

if not Path("/dev/nvidiactl").exists():
    # The CUDA plugin wheels may be here to compile with; there is no device for them to run on.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
else:
    # Many processes share a card: each gives back what it no longer holds, where jax's own allocator keeps it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    # Products by cuBLAS as it stands. XLA would compile and time dozens of kernels for each, on a card that others use.
    os.environ["XLA_FLAGS"] = (
        f"--xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0 {os.environ.get('XLA_FLAGS', '')}"
    )

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # there is a worker for every core
    if cards := len(list(Path("/dev").glob("nvidia[0-9]*"))):
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(int(worker.removeprefix("gw")) % cards))

settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("default")


def pytest_collection_finish():
    """What is imported by now stays, and tracing makes objects by the hundred thousand: collect garbage less often."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """By file, and the files of the pool together: they compile the same operations."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByPrograms(LoadFileScheduling):
        def _split_scope(self, nodeid):
            path = super()._split_scope(nodeid)
            return "tests/pool" if path.startswith("tests/pool/") else path

    return ByPrograms(config, log)


@pytest.fixture
def ptxas_reports(capfd, monkeypatch):
    """A function that returns what ptxas said of each Mosaic kernel compiled since the test began."""
    # MOSAIC_GPU_DUMP_TO would leave it in files, with the text of every MLIR pass beside it: four times the CPU time.
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")

    def reports():
        said = capfd.readouterr()
        return re.findall(
            r".*?^ptxas info +: Compile time = .*?$", said.out + said.err, re.DOTALL | re.MULTILINE
        )

    return reports


@pytest.fixture
def named_for_hopper(monkeypatch):
    """Named implementations find the device that they need: for what they refuse before they compile."""
    from pallas_kernels import implementations

    monkeypatch.setattr(implementations, "device", SimpleNamespace(target=lambda: ("cuda", (9, 0))))
