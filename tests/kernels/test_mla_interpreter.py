import pytest

from tests.kernels.own_process import output_of


@pytest.mark.slow
@pytest.mark.parametrize("module", ["mla_interpreter", "mla_fp8_interpreter"])
def test_kernel_in_the_interpreter(module):
    assert "no races" in output_of(module, devices=16)
