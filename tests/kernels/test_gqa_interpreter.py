import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.gqa_interpreter import CASES


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if i else ()) for i, name in enumerate(CASES)]
)
def test_kernel_in_the_interpreter(name):
    """In a process of its own: every warpgroup needs a CPU thread to block in, and XLA fixes their number at its start."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=16"
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.gqa_interpreter", name],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "right" in done.stdout
    # The interpreter reports a race by printing it; the state it leaves behind is that of the last kernel, the merge.
    assert "RACE DETECTED" not in done.stdout + done.stderr
