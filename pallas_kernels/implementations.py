"""Choice of an operation's implementation by name, or by the device at hand."""

from collections.abc import Sequence

import jax


def choose(implementation: str | None, available: Sequence[str], operation: str) -> str:
    """Returns the implementation to run: the one that was named, or the best one for the default device.

    A name that is not known raises ValueError; a known one is never replaced by another. Without a name,
    Hopper GPUs (compute capability 9.0) get "mosaic" where the operation has it, everything else plain XLA.
    """
    if implementation is not None:
        if implementation not in available:
            raise ValueError(
                f"{operation}: implementation={implementation!r} is unknown, choose from {tuple(available)}"
            )
        return implementation
    device = jax.devices()[0]
    hopper = device.platform == "gpu" and getattr(device, "compute_capability", "") == "9.0"
    return "mosaic" if hopper and "mosaic" in available else "xla"
