import pytest

from tests.kernels.gqa_interpreter import CASES
from tests.kernels.own_process import output_of


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if i else ()) for i, name in enumerate(CASES)]
)
def test_kernel_in_the_interpreter(name):
    output = output_of("gqa_interpreter", name, devices=16)
    assert "right" in output
    # The interpreter reports a race by printing it; the state it leaves behind is that of the last kernel, the merge.
    assert "RACE DETECTED" not in output
