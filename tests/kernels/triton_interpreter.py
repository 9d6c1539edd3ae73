"""Runs the Triton kernels of paged attention in Triton's own interpreter, on NumPy memory: no GPU, no torch.

`python -m tests.kernels.triton_interpreter` in an environment with triton and jax-triton's requirements. The interpreter
runs programs one after another and lane by lane loads and stores really go to the addresses computed, so it shows wrong
arithmetic, masks and splits. It does not show what the compiler does, nor races.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is defined

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from pallas_kernels import device
from pallas_kernels.gqa_decode import triton as gqa
from tests.kernels.delivered import DELIVERIES
from tests.kernels.gqa_case import make_case


class _Dtype:
    def __init__(self, name: str):
        self.name = name

    def __str__(self) -> str:
        return f"torch.{self.name}"

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Dtype) and other.name == self.name


class _Memory:
    """What Triton takes for a tensor."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.dtype = _Dtype(array.dtype.name)

    def data_ptr(self) -> int:
        return self.array.ctypes.data


def call(
    kernel: Any,
    operands: Sequence[Any],
    out: Sequence[jax.ShapeDtypeStruct] = (),
    *,
    update: Sequence[Any] = (),
    grid: tuple[int, ...],
    compute_capability: tuple[int, int],
    num_warps: int,
    num_stages: int,
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """What `jax_triton_call.triton_call` does, eagerly. Results that the kernel leaves alone hold NaN."""
    changed = [np.array(x) for x in update]
    new = [np.full(x.shape, np.nan, x.dtype) for x in out]
    arguments = [_Memory(np.asarray(x)) for x in operands] + [_Memory(x) for x in (*changed, *new)]
    kernel[grid](*arguments, **constants)
    return tuple(jnp.asarray(x) for x in (*new, *changed))


def dot(_, a, b, acc, *_options):
    """A matrix product in f32. The interpreter holds bfloat16 as its bits and would multiply those."""

    def values(x):
        return (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype == tl.bfloat16 else x.data

    product = np.matmul(values(a), values(b), dtype=np.float32)
    return interpreter.TensorHandle(product + acc.data, acc.dtype.scalar)


def substitute(cores: int) -> None:
    """Makes the launchers run here, as on a Hopper GPU with that many multiprocessors."""
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(
            tensor, "__index__", lambda self: self.handle.data.item()
        )  # int() no longer takes vectors

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.GridExecutor._init_args_hst = lambda self, args, options: (args, options)
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
    gqa.triton_call = call
    device.target = lambda: ("cuda", (9, 0))
    device.core_count = lambda: cores


def main() -> None:
    substitute(cores=3)
    for options in (
        {"heads": 8, "kv_heads": 2},
        {"heads": 6, "kv_heads": 2, "s_q": 3, "sinks": True, "window": 9},
        {
            "heads": 4,
            "kv_heads": 1,
            "head_dim": 96,
            "v_head_dim": 64,
            "kv_start": [0, 3, 0, 64, 5],
            "logit_cap": 2.0,
        },
        {"kv_dtype": "float8_e4m3fn", "bias_extent": 20, "s_q": 2, "page_size": 1},
    ):
        case = make_case([0, 77, 130, 64, 300], dtype="bfloat16", **options)
        with jax.disable_jit():
            results = [case.run("triton", delivery) for delivery in DELIVERIES]
        case.check(*results[0], tolerance=8e-3)  # this interpreter cuts bits off where a GPU rounds
        for result in results[1:]:
            for one, other in zip(result, results[0], strict=True):
                np.testing.assert_array_equal(one, other)
        print("right:", options, flush=True)


if __name__ == "__main__":
    main()
