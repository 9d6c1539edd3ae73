import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("module", ["mla_interpreter", "mla_fp8_interpreter"])
def test_kernel_in_the_interpreter(module):
    """In a process of its own: every warpgroup needs a CPU thread to block in, and XLA fixes their number at its start."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=16"
    done = subprocess.run(
        [sys.executable, "-m", f"tests.kernels.{module}"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "no races" in done.stdout
