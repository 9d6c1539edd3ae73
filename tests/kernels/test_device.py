import jax
import pytest

from pallas_kernels import device, implementations
from pallas_kernels.mla_decode.api import IMPLEMENTATIONS
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
    "platform, capability, names",
    [
        ("cpu", (0, 0), ["xla"]),
        ("rocm", (9, 0), ["xla"]),
        ("cuda", (7, 5), ["xla"]),
        ("cuda", (8, 0), ["triton", "xla"]),
        ("cuda", (9, 0), ["mosaic", "triton", "xla"]),
        ("cuda", (10, 0), ["triton", "xla"]),
    ],
)
def test_preferred_implementations(platform, capability, names):
    assert implementations.preferred(IMPLEMENTATIONS, platform, capability) == names
    assert implementations.preferred({"xla": (), "mosaic": ()}, platform, capability) == [
        name for name in names if name != "triton"
    ]


# Stand-ins for the modules of an operation.


def declines(x):
    raise NotImplementedError(f"not for {x}")


def serves(x):
    return "served", x


TABLE = {
    "mosaic": ("no.such.module", "kernel"),
    "triton": (__name__, "declines"),
    "xla": (__name__, "serves"),
}


def test_the_first_that_can_serve(named_for_hopper):
    assert implementations.run("add", TABLE, None)(3) == ("served", 3)


@pytest.mark.parametrize(
    "name, words",
    [
        ("mosaic", "add: implementation 'mosaic': cannot be imported here: No module named 'no'"),
        ("triton", "add: implementation 'triton': not for 3"),
    ],
)
def test_a_named_implementation_is_never_replaced(named_for_hopper, name, words):
    with pytest.raises(NotImplementedError, match=words):
        implementations.run("add", TABLE, name)(3)


@pytest.mark.parametrize(
    "name, words",
    [("mosaic", r"needs a Hopper GPU .* at hand is \('cuda', \(8, 9\)\)"), ("triton", "not for 3")],
)
def test_a_named_implementation_may_need_another_device(monkeypatch, name, words):
    monkeypatch.setattr(device, "target", lambda: ("cuda", (8, 9)))
    with pytest.raises(NotImplementedError, match=words):
        implementations.run("add", TABLE, name)(3)


def test_unknown_names():
    with pytest.raises(
        ValueError, match=r"add: implementation='cuda' is not one of \['mosaic', 'triton', 'xla'\]"
    ):
        implementations.run("add", TABLE, "cuda")
