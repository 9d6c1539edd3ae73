"""Settings for every test: CPU unless the machine has an NVIDIA GPU, and the same examples at every run."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

if not Path("/dev/nvidiactl").exists():
    # The CUDA plugin wheels may be here to compile with; there is no device for them to run on.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("default")


@pytest.fixture
def named_for_hopper(monkeypatch):
    """Named implementations find the device that they need: for what they refuse before they compile."""
    from pallas_kernels import implementations

    monkeypatch.setattr(implementations, "device", SimpleNamespace(target=lambda: ("cuda", (9, 0))))
