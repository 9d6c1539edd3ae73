"""What a family consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ukv_jax.models.config import ConfigReader, ModelConfig

if TYPE_CHECKING:
    from ukv_jax.models.weights import Tensor


@dataclass(frozen=True)
class Family:
    """read_config maps config.json, tensors lists every tensor of the checkpoint and where it goes; layer_kinds
    are the mixers and MLPs that the family is made of."""

    read_config: Callable[[ConfigReader], ModelConfig]
    tensors: Callable[[ModelConfig], list[Tensor]]
    layer_kinds: tuple[str, ...]
