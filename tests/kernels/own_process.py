"""Runs a module of the tests in a process of its own, where an interpreter must be set up before anything is imported."""

import os
import subprocess
import sys
from pathlib import Path


def output_of(module: str, *arguments: str, devices: int = 1, timeout: float = 600) -> str:
    """What ``python -m tests.kernels.MODULE`` prints on a CPU, on both streams; fails where it fails.

    `devices`: of the process. Pallas's GPU interpreter needs one for each warpgroup: a CPU thread to block in, and XLA fixes
    their number at its start.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, "-m", f"tests.kernels.{module}", *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr
