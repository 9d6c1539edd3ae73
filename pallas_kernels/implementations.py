"""Running an operation by the implementation that was named, or by the best one for the device at hand."""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

from pallas_kernels import device

# Best first. What a device must be for kernels of a name: in words, and as a predicate of platform and capability.
_NEEDS: dict[str, tuple[str, Callable[[str, tuple[int, int]], bool]]] = {
    "mosaic": (
        "a Hopper GPU (compute capability 9.0)",
        lambda platform, c: platform == "cuda" and c == (9, 0),
    ),
    "triton": (
        "a GPU of compute capability 8.0 or more",
        lambda platform, c: platform == "cuda" and c >= (8, 0),
    ),
    "xla": ("any device", lambda platform, c: True),
}


def preferred(names: Iterable[str], platform: str, capability: tuple[int, int]) -> list[str]:
    """Of these names, those to try on a device, best first."""
    return [name for name, (_, runs) in _NEEDS.items() if name in names and runs(platform, capability)]


def run(
    operation: str, implementations: Mapping[str, tuple[str, str]], implementation: str | None
) -> Callable[..., Any]:
    """Returns a function that calls an implementation with the arguments it is given.

    Args:
      operation: name for errors.
      implementations: name -> (module, function), with "xla" among them. Modules are imported at first use: a GPU
        backend may need what a CPU machine lacks.
      implementation: a name, or None: of those that the operation has, the first that can serve the call. On Hopper
        GPUs (compute capability 9.0) "mosaic" comes first; on NVIDIA GPUs from Ampere on (8.0) "triton"; then "xla".

    Raises:
      ValueError: an unknown name.
      NotImplementedError: the named implementation needs another device; from the call, where it cannot serve it. It is
        never replaced.
    """
    target = device.target()
    if implementation is None:
        names = preferred(implementations, *target)
    elif implementation in implementations:
        names = [implementation]
        needs, runs = _NEEDS.get(implementation, _NEEDS["xla"])
        if not runs(*target):
            raise NotImplementedError(
                f"{operation}: implementation {implementation!r} needs {needs}, the device at hand is {target}"
            )
    else:
        raise ValueError(
            f"{operation}: implementation={implementation!r} is not one of {sorted(implementations)}"
        )

    def call(*args: Any, **options: Any) -> Any:
        for name in names:
            try:
                return _load(*implementations[name])(*args, **options)
            except NotImplementedError as error:
                if name == names[-1]:
                    raise NotImplementedError(f"{operation}: implementation {name!r}: {error}") from error
        raise AssertionError("unreachable: the last implementation returns or raises")

    return call


def _load(module: str, function: str) -> Callable[..., Any]:
    try:
        return getattr(import_module(module), function)  # type: ignore[no-any-return]
    except ImportError as error:
        raise NotImplementedError(f"cannot be imported here: {error}") from error
