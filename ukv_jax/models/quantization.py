"""Weights that checkpoints hold in fewer bits: what config.json says of them, and their values.

Weights are unpacked on the device, tensor by tensor, while a checkpoint is loaded; the model computes in its own dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, UInt8

from ukv_jax.models.config import ConfigReader
from ukv_jax.models.weights import Packed, Part, Tensor


def read_fp8_block(reader: ConfigReader) -> tuple[int, int] | None:
    """Rows and columns of a weight that share a scale, from quantization_config; None without one.

    Raises ValueError for other quantisations than block-scaled e4m3 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
    """
    if reader.get("quantization_config") is None:
        return None
    section = reader.section("quantization_config")
    if section.get("quant_method") != "fp8":
        raise section.fail(
            f"quant_method {section.get('quant_method')!r} is not implemented; implemented: 'fp8'"
        )
    section.only("fmt", "e4m3")
    section.only("activation_scheme", "dynamic")
    # Which tensors are stored as fp8 shows in the files; how activations would be scaled concerns fp8 products only.
    section.inert(("modules_to_not_convert", "scale_fmt"))
    block = section.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block)):
        raise section.fail(f"weight_block_size must be two integers above 0, found {block!r}")
    section.finish()
    return block[0], block[1]


def block_scaled(tensors: Iterable[Tensor], block: tuple[int, int] | None) -> list[Tensor]:
    """The tensors, every matrix of which may also be stored as e4m3 with float32 scales in NAME_scale_inv."""
    if block is None:
        return list(tensors)
    return [_block_scaled(t, block) if len(t.shape) == 2 else t for t in tensors]


def _block_scaled(tensor: Tensor, block: tuple[int, int]) -> Tensor:
    grid = tuple(-(-n // b) for n, b in zip(tensor.shape, block, strict=True))
    parts = (
        Part(tensor.name, tensor.shape, "F8_E4M3"),
        Part(f"{tensor.name}_scale_inv", grid, "F32"),
    )
    return replace(tensor, packed=Packed(parts, partial(dequantize_blocks, block=block)))


@partial(jax.jit, static_argnames=("block", "dtype"))
def dequantize_blocks(
    weight: Float[Array, "rows columns"],
    scale: Float32[Array, "row_blocks column_blocks"],
    *,
    block: tuple[int, int],
    dtype: Any,
) -> Float[Array, "rows columns"]:
    """weight * the scale of its block, multiplied in float32; the last row and column of blocks may be partial."""
    rows, columns = weight.shape
    by_element = jnp.repeat(jnp.repeat(scale, block[0], axis=0)[:rows], block[1], axis=1)[:, :columns]
    return (weight.astype(jnp.float32) * by_element).astype(dtype)


MXFP4_BLOCK = 32  # values that share a scale
# What the 16 codes of e2m1 stand for (OCP Microscaling Formats, version 1.0, section 5.3.3).
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def check_mxfp4(reader: ConfigReader) -> None:
    """Raises ValueError for a quantization_config other than MXFP4's. Which tensors are packed shows in the files."""
    if reader.get("quantization_config") is None:
        return
    section = reader.section("quantization_config")
    if section.get("quant_method") != "mxfp4":
        raise section.fail(
            f"quant_method {section.get('quant_method')!r} is not implemented; implemented: 'mxfp4'"
        )
    section.inert(("modules_to_not_convert", "dequantize"))
    section.finish()


def mxfp4(tensor: Tensor) -> Tensor:
    """A tensor [experts, in, out] that may also be stored as blocks [experts, out, in / 32, 16] of two codes a byte
    (low half first) and scales [experts, out, in / 32] that are powers of two with a bias of 127."""
    experts, inner, outer = tensor.shape
    groups = -(-inner // MXFP4_BLOCK)
    parts = (
        Part(f"{tensor.name}_blocks", (experts, outer, groups, MXFP4_BLOCK // 2), "U8"),
        Part(f"{tensor.name}_scales", (experts, outer, groups), "U8"),
    )
    return replace(tensor, packed=Packed(parts, partial(dequantize_mxfp4, inner=inner)))


@partial(jax.jit, static_argnames=("inner", "dtype"))
def dequantize_mxfp4(
    blocks: UInt8[Array, "experts out groups 16"],
    scales: UInt8[Array, "experts out groups"],
    *,
    inner: int,
    dtype: Any,
) -> Float[Array, "experts {inner} out"]:
    """The values in the layout of the plain tensor; every one is exact in bfloat16."""
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, MXFP4_BLOCK)
    exponent = scales.astype(jnp.int32)[..., None] - 127
    values = jnp.ldexp(jnp.asarray(MXFP4_VALUES, jnp.float32)[codes], exponent)
    return values.reshape(*scales.shape[:2], -1)[..., :inner].astype(dtype).swapaxes(1, 2)
