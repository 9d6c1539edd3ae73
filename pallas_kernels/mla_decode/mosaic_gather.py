"""Single KV rows into swizzled shared memory, for sources that name tokens or pages of less than 8 rows.

TMA writes whole swizzle tiles of 8 rows, so such rows come by ``cp.async``, 16 bytes a thread: eight threads take 128 bytes
of a row, and thread t of the warpgroup has the rows t // 8, t // 8 + 16, ... of a tile. Vectors of ids and rows here are
int32 [8 * tile] in the layout of `gmem.lanes`: element i belongs to row i // 8, so a thread holds those of its own rows.

``cp.async`` writes through the generic proxy, WGMMA reads through the async one. The path from each write to each
read therefore has a proxy fence: `report` makes the copies arrive at a barrier as they complete, whoever waits for that
barrier calls `order_reads` behind it, and other warpgroups hear of the tile from that one alone.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels import gmem, l2_hints
from pallas_kernels.mla_decode.mosaic_schedule import TILE
from pallas_kernels.paged_mosaic import PAGE_SIZES
from pallas_kernels.read_source import PageTable, ReadSource, TokenStream, VirtualPages

_CHUNK_BYTES = 128  # of a row: the width of the swizzle
_PIECE = 16  # bytes of a copy
_THREADS = _CHUNK_BYTES // _PIECE  # of a row
_ROWS = gmem.WARPGROUP // _THREADS  # rows that the warpgroup copies at a time


def needed(source: ReadSource) -> bool:
    """Whether the rows of `source` can't come as TMA boxes of whole pages or whole parts of one."""
    return isinstance(source, TokenStream) or source.page_size not in PAGE_SIZES


def id_operands(source: ReadSource) -> list[jax.Array]:
    """What a kernel has to be given of `source`, besides the bounds of its rows, to find KV rows."""
    match source:
        case PageTable(table=table):
            return [table]
        case TokenStream(ids=ids, indptr=indptr):
            return [ids, indptr]
        case VirtualPages(req_to_page=pages, row_ids=row_ids, v2p=v2p):
            return [pages, row_ids, v2p]
    raise TypeError(f"no source of KV rows: {type(source).__name__}")


@dataclass(frozen=True)
class Tokens:
    """The tokens of one row of the batch, of which at least one is visible.

    line: of `line`. [first, stop): positions that some query sees. block_offset: int32 scalar; num_blocks: of the pool.
    """

    source: ReadSource
    refs: Any  # of `id_operands`
    line: jax.Array
    first: jax.Array
    stop: jax.Array
    block_offset: jax.Array
    num_blocks: int

    def positions(self, start: jax.Array) -> jax.Array:
        """Of the tile at position `start`; one that no query sees is replaced by a neighbour, for its id may be anything."""
        row = lax.shift_right_logical(gmem.iota(_THREADS * TILE), 3)
        return jnp.clip(start + row, self.first, self.stop - 1)

    def load_ids(self, position: jax.Array) -> jax.Array:
        """What the source says of these positions: ids of tokens, entries of pages, or physical pages."""
        refs, line = self.refs, self.line
        match self.source:
            case PageTable(page_size=ps):
                return gmem.load(refs[0].at[line], lax.div(position, ps))
            case TokenStream():
                return gmem.load(refs[0], jnp.clip(line + position, 0, refs[0].shape[0] - 1))
            case VirtualPages(page_size=ps):
                page = gmem.load(refs[0].at[line], lax.div(position, ps))
                return gmem.load(refs[2], jnp.where((page >= 0) & (page < refs[2].shape[0] - 1), page, 0))
        raise TypeError(f"no source of KV rows: {type(self.source).__name__}")

    def rows(self, ids: jax.Array, position: jax.Array) -> jax.Array:
        """Rows of the pool [num_blocks * page_size, width] that `load_ids` named; the padding page's for bad ids."""
        ps, offset = self.source.page_size, self.block_offset
        if isinstance(self.source, TokenStream):
            row = ids + offset * ps
            # A sum past 2^31 wraps below 0.
            return jnp.where((ids >= 0) & (row >= 0) & (row < self.num_blocks * ps), row, offset * ps)
        entry = ids
        if isinstance(self.source, VirtualPages):
            entry = jnp.maximum(ids, 0) * self.source.blocks_per_page
        block = entry + offset
        good = (entry >= 0) & (block >= 0) & (block < self.num_blocks)
        block = jnp.where(good, block, offset)
        return block if ps == 1 else block * ps + lax.rem(position, ps)


def line(source: ReadSource, refs, kv_start_ref, b) -> jax.Array:
    """Where the ids of row b of the batch are: a line of the table, or the place in the stream of position 0, if it had one."""
    match source:
        case PageTable():
            return b
        case TokenStream():
            return refs[1][b] - kv_start_ref[b]
        case VirtualPages():
            return jnp.clip(refs[1][b], 0, refs[0].shape[0] - 1)
    raise TypeError(f"no source of KV rows: {type(source).__name__}")


def place(thread, tile_stride: int):
    """(piece of a chunk of 128 bytes, byte in a column of swizzle tiles that it goes to) for a thread's first row.

    tile_stride: bytes from one swizzle tile of 8 rows to that of the next 8 rows. A tile holds its rows one after the other,
    and piece p of row r at place p ^ r.
    """
    row, piece = thread >> 3, thread & (_THREADS - 1)
    line = row & 7
    return piece, (row >> 3) * tile_stride + line * _CHUNK_BYTES + (piece ^ line) * _PIECE


def copy_rows(
    ref, rows: jax.Array, target, column: int | jax.Array, transforms: Any, once: bool = False
) -> None:
    """Starts ``target[i] = ref[rows of i, column : column + width]`` by cp.async; `column` is a multiple of 8.

    `ref` is bf16 [n, row_width] in global memory with rows of a multiple of 16 bytes; `target` bf16 [tile, width] in shared
    memory, tiled (8, 64) with 128-byte swizzle, as `transforms` say. Addresses are computed in 64 bits. `once`: L2 gives these
    rows up before anything else, as of `l2_hints.bring_once`.
    """

    chunks = target.shape[1] * 2 // _CHUNK_BYTES
    tile_bytes = 8 * _CHUNK_BYTES
    row_bytes = 2 * ref.shape[1]
    piece, to = place(gmem.iota(gmem.WARPGROUP), chunks * tile_bytes)
    lanes = gmem.lanes(gmem.WARPGROUP)
    fixed, moving = (column, 0) if isinstance(column, int) else (0, column)

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(), gmem.lanes(rows.shape[0]), plgpu.RefType(transforms), lanes, lanes,
            plgpu.Layout.WG_SPLAT(()),
        ),
        return_type=None,
    )  # fmt: skip
    def copy(_, ref, rows, target, piece, to, moving):
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        [(piece, to)] = gmem.registers(piece, to)
        shared = arith.addi(llvm.ptrtoint(i32, utils.memref_ptr(target)), to)
        if once:
            # The sum again, but of one register for ptxas: of an address and a policy that are both in uniform registers
            # ptxas 13.0 makes an instruction that the card calls illegal.
            shared = arith.maxui(shared, to)
        base = llvm.ptrtoint(i64, utils.memref_ptr(ref))
        piece = arith.addi(
            arith.muli(piece, utils.c(_PIECE, i32)), arith.shli(moving.registers.item(), utils.c(1, i32))
        )
        base = arith.addi(base, arith.extui(i64, piece))
        for k, (row,) in enumerate(gmem.registers(rows)):
            at = [(k * (_ROWS // 8) * chunks + c) * tile_bytes for c in range(chunks)]
            hint, policy = (".L2::cache_hint", ", $3") if once else (".L2::128B", "")
            copies = " ".join(
                f"cp.async.cg.shared.global{hint} [$0+{at[c]}], [a+{2 * fixed + c * _CHUNK_BYTES}], {_PIECE}{policy};"
                for c in range(chunks)
            )
            # The address is made anew for each box: kept, those of all rows would take a third of the registers.
            utils.inline_ptx(
                f"{{ .reg .b64 a; mad.wide.s32 a, $1, {row_bytes}, $2; {copies} }}",
                shared, row, base, *([utils.c(l2_hints.EVICT_FIRST, i64)] if once else []), has_side_effects=True,
            )  # fmt: skip

    copy(ref, rows, target, piece, to, jnp.int32(moving))


def order_reads() -> None:
    """After a wait for a barrier that was told by `report`: lets WGMMA, here and in threads that hear of it from here, read."""

    @plgpu.inline_mgpu()
    def fence(_):
        utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)

    fence()


def report(barrier) -> None:
    """Arrives at the barrier when all copies that this warpgroup has started are done; does not wait for that."""
    primitive, get_ref_and_transforms = _report_primitive()
    barrier, transforms = get_ref_and_transforms(barrier, None, "report")
    leaves, tree = jax.tree.flatten(transforms)
    primitive.bind(barrier, *leaves, tree=tree)


@cache
def _report_primitive():
    """(the primitive, what takes a ref apart for it). Inline code of Pallas' can't be given a barrier."""
    try:
        from jax._src.pallas.mosaic_gpu.core import _memory_effect
        from jax._src.pallas.mosaic_gpu.lowering import register_lowering_rule
        from jax._src.pallas.mosaic_gpu.primitives import _get_barrier_base_index
        from jax._src.state.primitives import get_ref_and_transforms
    except ImportError as error:
        raise NotImplementedError(f"single rows need parts of jax that this one lacks: {error}") from error

    primitive = Primitive("report_copies")
    primitive.multiple_results = True

    @primitive.def_effectful_abstract_eval
    def type_of(barrier, *transforms, tree):
        return (), {_memory_effect}

    @register_lowering_rule(primitive, mgpu.LoweringSemantics.Warpgroup)
    def lower(ctx, barrier, *transforms, tree):
        index = _get_barrier_base_index(ctx.avals_in[0], tree.unflatten(transforms))
        barrier = barrier if index is None else barrier[index]
        utils.inline_ptx(
            "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", barrier.get_ptr(), has_side_effects=True
        )
        return ()

    return primitive, get_ref_and_transforms
