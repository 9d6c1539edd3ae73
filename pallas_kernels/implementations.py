"""Choice of an operation's implementation by name, or by the device at hand."""

from collections.abc import Sequence

from pallas_kernels import device


def choose(implementation: str | None, available: Sequence[str], operation: str) -> str:
    """Returns the implementation to run: the one that was named, or the best one for the device at hand.

    A name that is not known raises ValueError; a known one is never replaced by another. Without a name,
    Hopper GPUs (compute capability 9.0) get "mosaic" where the operation has it, everything else plain XLA.
    """
    if implementation is not None:
        if implementation not in available:
            raise ValueError(
                f"{operation}: implementation={implementation!r} is unknown, choose from {tuple(available)}"
            )
        return implementation
    hopper = device.target() == ("cuda", (9, 0))
    return "mosaic" if hopper and "mosaic" in available else "xla"
