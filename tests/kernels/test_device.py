import jax
import pytest

from pallas_kernels import device
from pallas_kernels.mla_decode.api import preferred
from tests.deviceless import device_mesh, requires_plugin


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a CPU machine answers")
def test_cpu():
    assert device.target() == ("cpu", (0, 0))


@pytest.mark.deviceless
@requires_plugin
@pytest.mark.parametrize(
    "name, capability", [("h200", (9, 0)), ("a100", (8, 0)), ("rtx4090", (8, 9)), ("b200", (10, 0))]
)
def test_device_of_the_mesh_in_context(name, capability):
    with jax.sharding.use_abstract_mesh(device_mesh(name).abstract_mesh):
        assert device.target() == ("cuda", capability)


@pytest.mark.parametrize(
    "kind, capability",
    [
        ("NVIDIA H200", (9, 0)),
        ("NVIDIA L40S", (8, 9)),
        ("NVIDIA L4", (8, 9)),
        ("NVIDIA GB200", (10, 0)),
        ("NVIDIA A100-SXM4-80GB", (8, 0)),
        ("NVIDIA A10G", (8, 6)),
        ("Tesla V100", (0, 0)),
    ],
)
def test_capability_of_a_name(kind, capability):
    assert device._capability_of_name(kind) == capability


@pytest.mark.parametrize(
    "platform, capability, first",
    [("cpu", (0, 0), "xla"), ("cuda", (9, 0), "mosaic"), ("cuda", (8, 0), "triton")],
)
def test_preferred_implementation(platform, capability, first):
    names = preferred(platform, capability)
    assert names[0] == first
    assert names[-1] == "xla"
