"""Running an operation by the implementation that was named, or by the best one for the device at hand."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from pallas_kernels import device


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
      NotImplementedError: from the call, where the named implementation cannot serve it. It is never replaced.
    """
    if implementation is None:
        platform, capability = device.target()
        order = ["xla"]
        if platform == "cuda" and capability >= (8, 0):
            order = ["mosaic", "triton", "xla"] if capability == (9, 0) else ["triton", "xla"]
        names = [name for name in order if name in implementations]
    elif implementation in implementations:
        names = [implementation]
    else:
        raise ValueError(
            f"{operation}: implementation={implementation!r} is not one of {sorted(implementations)}"
        )

    def call(*args: Any, **options: Any) -> Any:
        for name in names:
            module, function = implementations[name]
            try:
                return getattr(import_module(module), function)(*args, **options)
            except NotImplementedError:
                if name == names[-1]:
                    raise
        raise AssertionError("unreachable: the last implementation returns or raises")

    return call
