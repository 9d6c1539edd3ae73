"""What a Mosaic GPU kernel tells L2 about bytes that it brings by TMA."""

from functools import wraps

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

EVICT_FIRST = (
    0x12F0000000000000  # of all lines; as CUTLASS has it (cute/arch/copy_sm90_desc.hpp, CacheHintSm90)
)
_LOAD = "nvvm.cp.async.bulk.tensor.shared.cluster.global"


def bring_once() -> None:
    """L2 gives up what this kernel brings by TMA before anything else: KV is used once, and queries hardly more often.

    Pallas has no argument for that, so copies get it when they are lowered: each kernel has a launch context of its own, and
    its `async_copy` is what lowers them. A jax that lowers copies otherwise gives no hint, only a slower kernel;
    tests/kernels/test_mla_few.py looks for it in the PTX.
    """

    @plgpu.inline_mgpu()
    def hint(context):
        copy = getattr(context, "async_copy", None)
        if copy is None:
            return

        @wraps(copy)
        def copy_with_hint(*args, **kwargs):
            i64 = ir.IntegerType.get_signless(64)
            policy = arith.constant(i64, ir.IntegerAttr.get(i64, EVICT_FIRST))
            result = copy(*args, **kwargs)
            operations = list(ir.InsertionPoint.current.block.operations)
            for operation in operations[operations.index(policy.owner) :]:
                if operation.operation.name == _LOAD:
                    _add_hint(operation, policy)
            return result

        context.async_copy = copy_with_hint

    hint()


def _add_hint(load, policy) -> None:
    with ir.InsertionPoint(load):
        nvvm.cp_async_bulk_tensor_shared_cluster_global(
            load.dstMem, load.tmaDescriptor, load.coordinates, load.mbar, load.im2colOffsets,
            multicast_mask=load.multicastMask, predicate=load.predicate, l2_cache_hint=policy, mode=load.mode,
            is_cta_only=load.isCTAOnly, group=load.group,
        )  # fmt: skip
    load.operation.erase()
