"""The device that a program is being traced for."""

import jax

# For targets known by name alone (compiling without a device). NVIDIA's list of compute capabilities:
# https://developer.nvidia.com/cuda-gpus
_CAPABILITIES = {
    (8, 0): ("A100", "A800", "A30"),
    (8, 6): ("A10", "A40", "A6000", "RTX 30"),
    (8, 9): ("L4", "L40", "RTX 40", "6000 Ada"),
    (9, 0): ("H100", "H200", "H800", "H20", "GH200"),
    (10, 0): ("B200", "B100"),
    (10, 3): ("B300",),
    (12, 0): ("RTX 50", "RTX PRO"),
}


def target() -> tuple[str, tuple[int, int]]:
    """Platform ("cuda", "rocm", "cpu", ...) and compute capability, (0, 0) where there is none or it is unknown.

    The device of the mesh in context if there is one (it need not exist: see `jax.experimental.topologies`), else the
    device that an eager call would run on.
    """
    device = jax.config.jax_default_device or jax.devices()[0]  # type: ignore[attr-defined]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None and abstract.device_kind != device.device_kind:
        return _platform(abstract.platform, abstract.device_kind), _capability_of_name(abstract.device_kind)
    if device.platform not in ("gpu", "cuda"):
        return device.platform, (0, 0)
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    if major.isdigit() and minor.isdigit():
        return "cuda", (int(major), int(minor))
    return "rocm", (0, 0)  # an AMD device says "gfx..."


def core_count() -> int:
    """Streaming multiprocessors of the target; 132 (H100, H200) where it does not say."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None and abstract.num_cores:
        return abstract.num_cores
    return getattr(jax.devices()[0], "core_count", None) or 132


def _platform(platform: str, kind: str) -> str:
    if platform == "gpu":
        return "rocm" if "AMD" in kind or kind.startswith("gfx") else "cuda"
    return platform


def _capability_of_name(kind: str) -> tuple[int, int]:
    named = [
        (len(name), capability)
        for capability, names in _CAPABILITIES.items()
        for name in names
        if name in kind
    ]
    return max(named, default=(0, (0, 0)))[1]
