"""Loads safetensors checkpoints into a parameter tree, tensor by tensor.

Files are memory-mapped and each tensor goes from the map to the device on its own; the host never holds a second copy
of the checkpoint. The format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}},
then the bytes (https://huggingface.co/docs/safetensors). Read here because the safetensors library (0.8) has no float8
for numpy.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Array

from ukv_jax.models.config import ModelConfig, load_config, read_json

# Stored dtypes by safetensors' name: those of plain values, and those that mean something only with their scales.
DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
PACKED_DTYPES: dict[str, Any] = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "U8": np.uint8}
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Place:
    """Where (a view of) a checkpoint tensor goes in the parameter tree.

    `path` leads to the parameter, `shape` is the parameter's whole shape, `start` the corner at which the view is
    put; a parameter may be assembled from several tensors (stacked projections, experts). `view` reshapes and slices;
    of small tensors it may make others (float32 values).
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    start: tuple[int, ...] | None = None
    view: Callable[[Any], Any] = field(default=lambda x: x, compare=False)


@dataclass(frozen=True)
class Part:
    """One of the stored tensors that make up a quantised one; dtype is a key of DTYPES or PACKED_DTYPES."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Packed:
    """A quantised form of a tensor: `unpack(*parts, dtype=...)` gives its values."""

    parts: tuple[Part, ...]
    unpack: Callable[..., Array] = field(compare=False)


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint. float32: kept so whatever the model computes in. alias: another name in use.

    packed: the form in which the checkpoint may hold it instead; a checkpoint chooses for each tensor, by the dtype
    of the first part. split: the tensors that a checkpoint without this one has instead.
    """

    name: str
    shape: tuple[int, ...]
    places: tuple[Place, ...]
    float32: bool = False
    alias: str | None = None
    packed: Packed | None = None
    split: tuple[Tensor, ...] = ()


class CheckpointFiles:
    """The tensors of all safetensors files of a directory, by name, as memory-mapped arrays."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._entries: dict[str, tuple[Path, dict[str, Any], int]] = {}
        self._maps: dict[Path, np.memmap] = {}
        for path in self._files():
            self._read_header(path)

    def _files(self) -> list[Path]:
        index = self.directory / "model.safetensors.index.json"
        if index.is_file():
            shards = read_json(index).get("weight_map")
            if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
                raise ValueError(f"{index}: no weight_map from tensors to files found")
            paths = [self.directory / name for name in sorted(set(shards.values()))]
            absent = [p.name for p in paths if not p.is_file()]
            if absent:
                raise ValueError(f"{index} names files that are absent: {absent}")
            return paths
        paths = sorted(self.directory.glob("*.safetensors"))
        if not paths:
            pickles = sorted(p.name for p in self.directory.glob("*") if p.suffix in PICKLE_SUFFIXES)
            if pickles:
                raise ValueError(
                    f"{self.directory}: found only pickle checkpoints {pickles}, which can run code when read; "
                    "only safetensors are allowed"
                )
            raise ValueError(f"{self.directory}: no .safetensors file found")
        if len(paths) > 1:
            found = [p.name for p in paths]
            raise ValueError(f"{self.directory}: several safetensors files {found} but no {index.name}")
        return paths

    def _read_header(self, path: Path) -> None:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or 8 + length > size:
                raise ValueError(f"{path}: not a safetensors file, or cut short ({size} bytes)")
            try:
                header = json.loads(file.read(length))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{path}: the safetensors header is not valid JSON ({error})") from error
        if not isinstance(header, dict):
            raise ValueError(f"{path}: the safetensors header is no object, found {type(header).__name__}")
        data = 8 + length
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if not _is_entry(entry):
                raise ValueError(
                    f"{path}: tensor {name} wants dtype, shape and data_offsets, found {entry!r}"
                )
            if name in self._entries:
                raise ValueError(f"{path}: tensor {name} is also in {self._entries[name][0].name}")
            end = data + entry["data_offsets"][1]
            if end > size:
                raise ValueError(f"{path}: tensor {name} ends at byte {end}, but the file has {size} bytes")
            self._entries[name] = (path, entry, data)
        self._maps[path] = np.memmap(path, mode="r", dtype=np.uint8)

    @property
    def names(self) -> set[str]:
        return set(self._entries)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Stored dtype (safetensors' name) and shape."""
        _, entry, _ = self._entries[name]
        return entry["dtype"], tuple(entry["shape"])

    def read(self, name: str) -> np.ndarray:
        """The tensor as a view of the mapped file."""
        path, entry, data = self._entries[name]
        begin, end = entry["data_offsets"]
        dtype = np.dtype((DTYPES | PACKED_DTYPES)[entry["dtype"]])
        shape = tuple(entry["shape"])
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(
                f"{path}: tensor {name} has {end - begin} bytes, its shape {shape} wants another number"
            )
        return self._maps[path][data + begin : data + end].view(dtype).reshape(shape)


def _is_entry(entry: Any) -> bool:
    """A tensor's line of a safetensors header: dtype, shape and the two ends of its bytes."""

    def naturals(x: Any) -> bool:
        return isinstance(x, list) and all(type(n) is int and n >= 0 for n in x)

    return (
        isinstance(entry, dict)
        and isinstance(entry.get("dtype"), str)
        and naturals(entry.get("shape"))
        and naturals(entry.get("data_offsets"))
        and len(entry["data_offsets"]) == 2
    )


def resolve(
    tensors: Iterable[Tensor], files: CheckpointFiles, skipped: Mapping[str, str] | None = None
) -> list[Tensor]:
    """The tensors under the names and in the form (plain: packed is None) that the checkpoint uses.

    skipped: beginnings of names that the model has no use for, and what they are; a warning says how many there were.
    ValueError lists missing and unexpected tensors, wrong shapes and dtypes.
    """
    names, problems, found = files.names, [], []
    left = set(names)
    for t in _as_stored(tensors, names):
        first = t.packed.parts[0] if t.packed else None
        if first is None or first.name not in names or files.describe(first.name)[0] != first.dtype:
            t = replace(t, packed=None)
        parts = t.packed.parts if t.packed else (Part(t.name, t.shape, ""),)
        left -= {part.name for part in parts}
        problems += [problem for part in parts if (problem := _misfit(part, files))]
        found.append(t)
    for beginning, what in (skipped or {}).items():
        matching = {name for name in left if name.startswith(beginning)}
        if matching:
            warnings.warn(
                f"{files.directory}: {len(matching)} tensors {beginning}* not loaded: {what}", stacklevel=3
            )
        left -= matching
    problems += [f"unexpected {name}" for name in sorted(left)]
    if problems:
        more = f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ValueError(
            f"{files.directory}: the checkpoint does not fit its config: " + "; ".join(problems[:20]) + more
        )
    return found


def _as_stored(tensors: Iterable[Tensor], names: set[str]) -> Iterator[Tensor]:
    """The tensors with aliases for names and in pieces, where the checkpoint has those."""
    for t in tensors:
        if t.name not in names and t.alias in names:
            yield replace(t, name=t.alias)
        elif t.name not in names and any({part.name, part.alias} & names for part in t.split):
            yield from _as_stored(t.split, names)
        else:
            yield t


def _misfit(part: Part, files: CheckpointFiles) -> str | None:
    """What is wrong with a stored tensor; a part without dtype may have any of DTYPES."""
    if part.name not in files.names:
        return f"missing {part.name}, wanted {list(part.shape)}"
    dtype, shape = files.describe(part.name)
    if shape != part.shape:
        return f"{part.name} has shape {list(shape)}, wanted {list(part.shape)}"
    if dtype not in ((part.dtype,) if part.dtype else DTYPES):
        return f"{part.name} has dtype {dtype}, wanted {part.dtype or f'one of {sorted(DTYPES)}'}"
    return None


@partial(jax.jit, donate_argnums=0)
def _put(whole: Array, part: Array, start: tuple[int, ...]) -> Array:
    part = part.astype(whole.dtype).reshape((1,) * (whole.ndim - part.ndim) + part.shape)
    return lax.dynamic_update_slice(whole, part, start)


def build_tree(
    tensors: Iterable[Tensor],
    read: Callable[[Tensor], Any],
    dtype: Any,
    device: jax.Device | jax.sharding.Sharding | None = None,
) -> dict[str, Any]:
    """Assembles the parameter tree from `read(tensor)`. A parameter made of several tensors is filled in place."""
    flat: dict[tuple[str | int, ...], Array] = {}
    for tensor in tensors:
        target = jnp.float32 if tensor.float32 else dtype
        stored = read(tensor)
        for place in tensor.places:
            part = jnp.asarray(place.view(stored))
            if place.start is None:
                flat[place.path] = part.astype(target).reshape(place.shape)
            else:
                whole = (
                    flat.pop(place.path)
                    if place.path in flat
                    else jnp.zeros(place.shape, target, device=device)
                )
                flat[place.path] = _put(whole, part, place.start)
    return _unflatten(flat)


def _unflatten(flat: dict[tuple[str | int, ...], Any]) -> dict[str, Any]:
    """{("layers", 0, "x"): v} -> {"layers": [{"x": v}]}; integer keys become list positions."""
    tree: dict[Any, Any] = {}
    for path, value in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value

    def lists(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        if all(isinstance(key, int) for key in node):
            return [lists(node[i]) for i in range(len(node))]
        return {key: lists(value) for key, value in node.items()}

    return lists(tree)


def abstract_params(config: ModelConfig, dtype: Any = None) -> dict[str, Any]:
    """The parameter tree as ShapeDtypeStructs, for tracing without a checkpoint."""
    from ukv_jax.models.families import FAMILIES

    dtype = jnp.dtype(dtype or config.dtype)
    flat = {}
    for tensor in FAMILIES[config.family].tensors(config):
        for place in tensor.places:
            flat[place.path] = jax.ShapeDtypeStruct(place.shape, jnp.float32 if tensor.float32 else dtype)
    return _unflatten(flat)


def load_model(
    directory: str | Path, *, dtype: Any = None, device: jax.Device | jax.sharding.Sharding | None = None
) -> tuple[dict[str, Any], ModelConfig]:
    """Loads a Hugging Face checkpoint directory: config.json and safetensors, single or sharded with an index.

    dtype: what to cast to (default: the dtype that config.json names). device: a device or sharding for every
    tensor. Quantised tensors are unpacked to that dtype, one by one. Raises ValueError for an unknown or unsupported
    config, missing, unexpected or misshapen tensors, dtypes other than F32, F16, BF16 and what the config says of
    quantisation, cut files, and pickle checkpoints. Warns of tensors that the family makes no use of.
    """
    from ukv_jax.models.families import FAMILIES

    config = load_config(directory)
    files = CheckpointFiles(directory)
    family = FAMILIES[config.family]
    tensors = resolve(family.tensors(config), files, family.skipped(config))
    target = jnp.dtype(dtype or config.dtype)

    def read(tensor: Tensor) -> Array:
        if tensor.packed is None:
            return jax.device_put(files.read(tensor.name), device)
        parts = [jax.device_put(files.read(part.name), device) for part in tensor.packed.parts]
        return tensor.packed.unpack(*parts, dtype=jnp.dtype("float32") if tensor.float32 else target)

    return build_tree(tensors, read, target, device), config
