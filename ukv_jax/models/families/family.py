"""What a family consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ukv_jax.models.config import ConfigReader, ModelConfig

if TYPE_CHECKING:
    from ukv_jax.models.weights import Tensor


@dataclass(frozen=True)
class Family:
    """read_config maps config.json to the layer kinds of the decoder and their sizes; tensors lists every tensor of
    the checkpoint and where it goes in the decoder's parameters; skipped gives beginnings of tensor names that the
    decoder makes no use of, and what they are."""

    read_config: Callable[[ConfigReader], ModelConfig]
    tensors: Callable[[ModelConfig], list[Tensor]]
    skipped: Callable[[ModelConfig], Mapping[str, str]] = lambda config: {}
