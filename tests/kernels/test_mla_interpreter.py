import pytest

from tests.kernels.own_process import output_of


@pytest.mark.parametrize(
    "module", ["mla_interpreter", pytest.param("mla_fp8_interpreter", marks=pytest.mark.slow)]
)
def test_kernel_in_the_interpreter(module):
    assert "no races" in output_of(module, devices=16)
