"""How a decode kernel tells the merge, which is launched while it still runs, that the parts of a row are there.

Each thread block clears the counts of its own slots and writes its leads, then lets the merge be launched. So the merge,
which is launched when all blocks have done that, finds leads and counts valid. A warpgroup that has written its share of a
part adds one to the part's count.
"""

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

# Of so few rows all parts come at the kernel's end: to tell of each takes longer than the launch that it saves.
_MERGED_AT_THE_END = 8

_SCALAR = plgpu.Layout.WG_SPLAT(())


def used(rows: int) -> bool:
    """Whether the merge of a batch of so many rows is launched early and waits for parts, or waits for the kernel's end.

    In `mosaic_gpu`; `mosaic_parts.merged_early` says it of the kernels with transposed products.
    """
    return rows > _MERGED_AT_THE_END


def launch_merge() -> None:
    """Lets the merge be launched; what this warpgroup has written before is there for it."""

    @plgpu.inline_mgpu(arg_types=(), return_type=None)
    def fence(_):
        utils.warpgroup_barrier()
        utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)
        utils.warpgroup_barrier()

    fence()
    plgpu.griddepcontrol_launch_dependents()


def tell(counts_ref, part) -> None:
    """Adds one to ``counts_ref[part]``, behind what this warpgroup has written."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR), return_type=None)
    def count(_, ref, part):
        utils.warpgroup_barrier()
        utils.inline_ptx(
            "{ .reg .pred first; setp.eq.u32 first, $1, 0; @first red.release.gpu.global.add.u32 [$0], 1; }",
            _address(ref, part.registers.item()), _thread(), has_side_effects=True,
        )  # fmt: skip

    count(counts_ref, jnp.int32(part))


def read_lead(leads_ref, lead):
    """(row, first group, last group) of a lead."""
    scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR), return_type=(scalar,) * 3)
    def load(_, ref, lead):
        i32 = ir.IntegerType.get_signless(32)
        words = utils.inline_ptx(
            " ".join(f"ld.relaxed.gpu.global.u32 ${i}, [$3+{4 * i}];" for i in range(3)),
            _address(ref, arith.muli(lead.registers.item(), _const(3))),
            result_types=[i32] * 3, has_side_effects=True,
        )  # fmt: skip
        return tuple(FragmentedArray.splat(word, (), is_signed=True) for word in words)

    return load(leads_ref, jnp.int32(lead))


def wait_for_parts(counts_ref, group, count, *, groups: int, tellers: int, tile=0, tiles: int = 1) -> None:
    """Waits until the parts of the row whose `count` parts start in `group` have been told of `tellers` times each.

    A part's count has the index ``slot * tiles + tile``.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[_SCALAR] * 3), return_type=None)
    def wait(_, ref, *scalars):
        group, count, tile = (x.registers.item() for x in scalars)
        utils.inline_ptx(
            "{ .reg .pred end, is; .reg .u32 part, slot, told; .reg .u64 at;"
            " mov.u32 part, $1; setp.ge.u32 end, part, 32; @end bra WAITED;"  # one warp looks at 32 parts
            " NEXT: setp.ge.s32 end, part, $3; @end bra WAITED;"
            f" add.u32 slot, $2, part; setp.eq.u32 is, part, 0; @is add.u32 slot, slot, {groups};"
            f" mad.lo.u32 slot, slot, {tiles}, $4; mad.wide.u32 at, slot, 4, $0;"
            f" AGAIN: ld.acquire.gpu.global.u32 told, [at]; setp.eq.u32 is, told, {tellers};"
            " @is bra THERE; nanosleep.u32 32; bra AGAIN;"
            " THERE: add.u32 part, part, 32; bra NEXT;"
            " WAITED: bar.warp.sync 0xffffffff; }",
            _address(ref, _const(0)), _thread(), group, count, tile, has_side_effects=True, convergent=True,
        )  # fmt: skip
        utils.warpgroup_barrier()

    wait(counts_ref, jnp.int32(group), jnp.int32(count), jnp.int32(tile))


def _address(ref, index):
    """Of an element of 4 bytes; 64-bit."""
    i64 = ir.IntegerType.get_signless(64)
    offset = arith.muli(arith.extsi(i64, index), _const(4, i64))
    return arith.addi(llvm.ptrtoint(i64, utils.memref_ptr(ref)), offset)


def _thread():
    return arith.remui(utils.thread_idx(), _const(utils.WARPGROUP_SIZE))


def _const(value: int, ty=None):
    ty = ir.IntegerType.get_signless(32) if ty is None else ty
    return arith.constant(ty, ir.IntegerAttr.get(ty, value))
