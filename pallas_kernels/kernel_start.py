"""What a Mosaic GPU kernel asks memory for before Pallas has made its barriers.

A kernel begins with code of Pallas' that each warp runs once, cold: about as long as DRAM takes to answer.
"""

import math
from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

_LINE = 128  # bytes
_WARP = 32
_FIRST_WARP = 4  # those before it find the share


def insertion_point() -> ir.InsertionPoint:
    """The start of the kernel, for the code of an `inline_mgpu` function. What that code is given is not known there: see `outer`.

    That is ahead of any `griddepcontrol_wait`, so not for what a kernel reads of one that it may overlap.
    """
    operation = ir.InsertionPoint.current.block.owner
    while operation.name != "gpu.launch":
        operation = operation.parent
    return ir.InsertionPoint.at_block_begin(operation.regions[0].blocks[0])


def outer(ref: ir.Value) -> ir.Value:
    """What an `inline_mgpu` function was given as its argument `ref`, an operand of the kernel."""
    argument = ir.BlockArgument(ref)
    return argument.owner.owner.operands[argument.arg_number]


def fetch(own: Sequence[Any], spread: Sequence[Any], blocks: int) -> None:
    """Asks L2 for the arrays `own`, in each block, and for `spread`, a share in each of `blocks`.

    All are refs of int32. An array that takes more than a line a lane is left alone, for most of a large one may be of no use
    to this batch. Called by all threads of a kernel of `blocks` blocks, with at most 2 grid axes. Each array has a warp of its own.
    """

    @plgpu.inline_mgpu(
        arg_types=(tuple(plgpu.RefType() for _ in own), tuple(plgpu.RefType() for _ in spread))
    )
    def ask(_, own, spread):
        with insertion_point():
            _ask([outer(ref) for ref in own], [outer(ref) for ref in spread], blocks)

    ask(tuple(own), tuple(spread))


def _ask(own: Sequence[ir.Value], spread: Sequence[ir.Value], blocks: int) -> None:
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    index = lambda value: arith.index_cast(i32, value)
    x, y = gpu.Dimension.x, gpu.Dimension.y
    block = arith.addi(arith.muli(index(gpu.block_id(y)), index(gpu.grid_dim(x))), index(gpu.block_id(x)))
    # A lane asks for line ``lane * stride + first`` of the array.
    jobs = [(ref, 1, utils.c(0, i32)) for ref in own] + [(ref, blocks, block) for ref in spread]
    # One piece of inline code: branches of MLIR would keep variables of the kernel from becoming registers.
    code, operands = "", [index(gpu.thread_id(x))]
    for warp, (ref, stride, first) in enumerate(jobs, _FIRST_WARP):
        lines = -(-4 * math.prod(ir.MemRefType(ref.type).shape) // _LINE)
        if lines > _WARP * stride:
            continue
        at, array = len(operands), len(operands) + 1
        operands += [first, llvm.ptrtoint(i64, utils.memref_ptr(ref))]
        code += (
            f"setp.ne.u32 p, warp, {warp}; @p bra AFTER_{warp}; mad.lo.u32 line, lane, {stride}, ${at}; "
            f"mad.wide.u32 at, line, {_LINE}, ${array}; setp.lt.u32 p, line, {lines}; @p prefetch.global.L2 [at]; "
            f"AFTER_{warp}: "
        )
    utils.inline_ptx(
        "{ .reg .pred p; .reg .b32 warp, lane, line; .reg .b64 at; "
        f"shr.u32 warp, $0, 5; and.b32 lane, $0, {_WARP - 1}; "
        f"setp.lt.u32 p, warp, {_FIRST_WARP}; @p bra END; {code} END: }}",
        *operands, has_side_effects=True,
    )  # fmt: skip
