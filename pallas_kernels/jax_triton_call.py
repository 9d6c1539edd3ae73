"""Calls a Triton kernel from JAX through jax-triton 0.3.1 or 0.4, whichever is installed.

Through 0.4 (0.4.1, Triton 3.7.0) the MLA decode kernels have been compiled for A100, RTX 4090 and H200, never run; for a
B200 its PTX is newer than the assembler of CUDA 13.0 reads. The two differ in three ways that matter here. 0.4 emits the
typed custom call that XLA can put into a command buffer (CUDA graph), 0.3.1 a legacy one that splits the graph; so with
0.3.1 only its compiler is used, and the call is emitted here. 0.4 takes `out_type` where 0.3.1 took `out_shape`. And a
buffer that is updated in place is a `Ref` in 0.4.
"""

import os
import zlib
from collections.abc import Sequence
from typing import Any

import jax
from jax import Array


def triton_call(
    kernel: Any,
    operands: Sequence[Array],
    out: Sequence[jax.ShapeDtypeStruct] = (),
    *,
    update: Sequence[Array] = (),
    grid: tuple[int, ...],
    compute_capability: tuple[int, int],
    num_warps: int,
    num_stages: int,
    **constants: Any,
) -> tuple[Array, ...]:
    """Runs ``kernel(*operands, *update, *out, **constants)`` on every program of the grid.

    Args:
      kernel: a `triton.jit` function. Its parameters are pointers, then constexprs.
      out: what the kernel writes anew.
      update: arrays that it changes in place. XLA copies the ones that are used afterwards.
      grid: up to three sizes.
      compute_capability: (major, minor) of the GPU to compile for; no GPU need be there.
      constants: constexpr parameters by name.

    Returns the results: `out`, then `update` as changed.

    Raises NotImplementedError if jax-triton, or a jaxlib with CUDA support, is not installed.
    """
    jax_triton = _import()
    capability = 10 * compute_capability[0] + compute_capability[1]
    options = {"num_warps": num_warps, "num_stages": num_stages, "compute_capability": capability}
    if tuple(map(int, jax_triton.__version__.split(".")[:2])) >= (0, 4):
        refs = [jax.new_ref(x) for x in update]
        new = jax_triton.triton_call(
            *operands, *refs, kernel=kernel, out_type=list(out), grid=grid, **options, **constants
        )
        return *new, *map(jax.freeze, refs)
    call = _compile_with_0_3(kernel, [*operands, *update, *out], grid, options, constants)
    types = [*out, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in update)]
    aliases = {len(operands) + i: len(out) + i for i in range(len(update))}
    run = jax.ffi.ffi_call("triton_kernel_call_ffi", types, input_output_aliases=aliases)
    return tuple(run(*operands, *update, opaque=call))


def _compile_with_0_3(
    kernel: Any, buffers: list, grid: tuple[int, ...], options: dict, constants: dict
) -> bytes:
    """The serialized call. Results that alias operands come last, and the kernel takes no parameter for them."""
    from jax._src.lib import gpu_triton
    from jax_triton import triton_lib

    compiled, attributes = triton_lib.get_or_create_triton_kernel(
        triton_lib.get_cuda_backend,
        "cuda",
        kernel,
        [triton_lib.get_triton_type(jax.core.ShapedArray(x.shape, x.dtype)) for x in buffers],
        (),
        num_ctas=1,
        enable_fp_fusion=True,
        metaparams=constants,
        dump=False,
        **options,
    )
    alignments = [16 if ["tt.divisibility", 16] in attributes[(i,)] else 0 for i in range(len(buffers))]
    parameters = [gpu_triton.create_array_parameter(0, alignment) for alignment in alignments]
    x, y, z = (*grid, 1, 1)[:3]
    call = gpu_triton.TritonKernelCall(compiled, x, y, z, parameters)
    return zlib.compress(call.to_proto(kernel.fn.__name__, b""))


def _import() -> Any:
    cache_dir = os.environ.get("TRITON_CACHE_DIR")
    try:
        import jax_triton
    except ImportError as error:
        raise NotImplementedError(f"jax-triton with a CUDA jaxlib is needed: {error}") from error
    finally:  # jax-triton blanks or deletes it
        if cache_dir is not None:
            os.environ["TRITON_CACHE_DIR"] = cache_dir
        else:
            os.environ.pop("TRITON_CACHE_DIR", None)
    return jax_triton
