"""What a Mosaic GPU kernel tells L2 about bytes that it brings by TMA."""

from functools import wraps

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

EVICT_FIRST = 0x12F0000000000000  # what createpolicy.fractional.L2::evict_first.b64 of all lines returns
_LOAD = "nvvm.cp.async.bulk.tensor.shared.cluster.global"


def bring_once() -> None:
    """All that the kernel brings by TMA from here on is used once: L2 gives it up before anything else.

    Pallas has no argument for that, so copies get it when they are lowered: each kernel has a launch context of its own, and
    its `async_copy` is what lowers them.
    """

    @plgpu.inline_mgpu()
    def hint(context):
        copy = context.async_copy

        @wraps(copy)
        def copy_with_hint(*args, **kwargs):
            i64 = ir.IntegerType.get_signless(64)
            policy = arith.constant(i64, ir.IntegerAttr.get(i64, EVICT_FIRST))
            copy(*args, **kwargs)
            operations = list(ir.InsertionPoint.current.block.operations)
            for operation in operations[operations.index(policy.owner) :]:
                if operation.operation.name == _LOAD:
                    _add_hint(operation, policy)

        context.async_copy = copy_with_hint

    hint()


def _add_hint(load, policy) -> None:
    with ir.InsertionPoint(load):
        nvvm.cp_async_bulk_tensor_shared_cluster_global(
            load.dstMem, load.tmaDescriptor, load.coordinates, load.mbar, load.im2colOffsets,
            multicast_mask=load.multicastMask, predicate=load.predicate, l2_cache_hint=policy,
        )  # fmt: skip
    load.operation.erase()
