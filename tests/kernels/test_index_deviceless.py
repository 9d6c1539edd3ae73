"""What the H200's compiler makes of the index operations: launches, temporaries, copies. No GPU is needed."""

from functools import partial

import jax.numpy as jnp
import pytest

from pallas_kernels.bind_pages import bind, tombstone
from pallas_kernels.gather_translate import (
    fill_packed_read_stream,
    fill_read_table,
    fill_read_tables,
    translate_write_locs,
)
from pallas_kernels.move_pages import move_pages
from tests.deviceless import CAPTURE_LOOPS, compile_for, requires_plugin, shape

pytestmark = [pytest.mark.deviceless, requires_plugin]
ROWS, VIRTUAL = 64, 1_000_001


def int32(*dims):
    return shape(dims, jnp.int32)


def kernels(program) -> int:
    """Launches of a program."""
    return len(program.launches)


@pytest.mark.parametrize("granularity", ["page", "token"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
class TestReads:
    def test_table_is_one_launch_in_place(self, page_size, granularity):
        def fill(words, v2p, kv_end, row_ids, delta, out):
            return fill_read_table(
                words, v2p, kv_end, page_size=page_size, blocks_per_page=7, row_ids=row_ids, seq_len_delta=delta,
                out=out, granularity=granularity, implementation="mosaic",
            )  # fmt: skip

        out = int32(ROWS + 5, 8192 // page_size)
        args = int32(ROWS, 8192), int32(VIRTUAL), int32(ROWS), int32(ROWS), int32(ROWS), out
        program = compile_for(fill, *args, donate=5)
        assert kernels(program) == 1
        assert program.alias_bytes == 4 * (ROWS + 5) * (8192 // page_size)
        assert program.temp_bytes < 4096

    def test_stream_is_one_launch_in_place(self, page_size, granularity):
        def fill(words, v2p, kv_end, indptr, kv_start, out):
            return fill_packed_read_stream(
                words, v2p, kv_end, indptr, page_size=page_size, blocks_per_page=7, kv_start=kv_start, out=out,
                granularity=granularity, implementation="mosaic",
            )  # fmt: skip

        args = int32(ROWS, 8192), int32(VIRTUAL), int32(ROWS), int32(ROWS + 1), int32(ROWS), int32(1 << 22)
        program = compile_for(fill, *args, donate=5)
        assert kernels(program) == 1
        assert program.alias_bytes == 4 << 22
        assert program.temp_bytes < 4096


def test_two_tables_are_one_launch():
    def fill(words, full, window, kv_end):
        return fill_read_tables(
            words, (full, window), kv_end, page_size=64, blocks_per_page=(7, 36), zero_tail=True,
            implementation="mosaic",
        )  # fmt: skip

    assert kernels(compile_for(fill, int32(ROWS, 512), int32(VIRTUAL), int32(VIRTUAL), int32(ROWS))) == 1


def test_write_locations_are_one_launch_tail_included():
    def translate(locs, v2p, live, rank):
        return translate_write_locs(
            locs,
            v2p,
            page_size=64,
            blocks_per_page=7,
            live=live,
            dcp_rank=rank,
            dcp_size=2,
            implementation="mosaic",
        )

    program = compile_for(translate, int32(300), int32(VIRTUAL), int32(), int32())
    assert kernels(program) == 1
    assert program.temp_bytes == 0


def test_stream_is_bounded_by_the_pool_and_not_by_the_context():
    """256 requests of up to 1 M tokens that share a pool of 8.15 M, page size 1."""
    rows, context, resident = 256, 1 << 20, 8_150_000

    def stream(words, v2p, kv_end, indptr, row_ids):
        return fill_packed_read_stream(
            words, v2p, kv_end, indptr, page_size=1, blocks_per_page=7, capacity=resident, row_ids=row_ids,
            implementation="mosaic",
        )  # fmt: skip

    def table(words, v2p, kv_end, indptr, row_ids):
        return fill_read_table(
            words, v2p, kv_end, page_size=1, blocks_per_page=7, row_ids=row_ids, implementation="mosaic"
        )

    args = int32(rows, context), int32(resident + 2), int32(rows), int32(rows + 1), int32(rows)
    needed = {}
    for form in (stream, table):
        memory = compile_for(form, *args).compiled.memory_analysis()
        needed[form.__name__] = memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert needed["stream"] <= 33_000_000
    assert needed["table"] == pytest.approx(4 * rows * context, rel=1e-4)  # 1.07 GB


class TestPages:
    maps = int32(1 << 20), int32(1 << 20)

    def test_bind_is_one_launch_in_place(self):
        program = compile_for(
            partial(bind, implementation="mosaic"), *self.maps, int32(256), int32(256), donate=(0, 1)
        )
        assert kernels(program) == 1
        assert program.alias_bytes == 2 * (4 << 20)

    @pytest.mark.parametrize("implementation, most", [("mosaic", 2), ("xla", 12)])
    def test_tombstone_copies_no_map(self, implementation, most):
        """Mosaic: the kernel, and the comparison that turns its int32 flags to bool."""
        args = *self.maps, int32(1 << 20), int32(), int32(1 << 20), int32(), int32(256)
        program = compile_for(
            partial(tombstone, implementation=implementation), *args, donate=tuple(range(6))
        )
        assert kernels(program) <= most
        assert program.alias_bytes == 4 * (4 << 20) + 8
        assert program.temp_bytes < 16_384


@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
@pytest.mark.parametrize("page_bytes, block_bytes", [(7 * 73_728, 73_728), (43_450_368, 65_536), (60, 12)])
def test_moves_need_no_copy_of_the_pool(implementation, page_bytes, block_bytes):
    lanes = max((64 << 20) // page_bytes, 1) if page_bytes > 60 else 4096

    def move(buffer, src, dst):
        return move_pages(
            buffer, src, dst, page_bytes=page_bytes, block_bytes=block_bytes, implementation=implementation
        )

    temps = {}
    for gigabytes in (4, 8):
        total = (gigabytes << 30) // block_bytes * block_bytes
        program = compile_for(move, shape((total,), jnp.uint8), int32(lanes), int32(lanes), donate=0)
        assert program.alias_bytes == total
        assert not any("kCopy" in launch.kind for launch in program.launches)
        temps[gigabytes] = program.temp_bytes
    assert temps[8] == temps[4] <= lanes * page_bytes * 1.01 + 4096
    if implementation == "mosaic":
        assert kernels(program) == 1
        assert temps[8] < 4096


def test_pool_of_100_gigabytes():
    total = 1_356_337 * 73_728
    program = compile_for(
        partial(move_pages, page_bytes=7 * 73_728, block_bytes=73_728, implementation="mosaic"),
        shape((total,), jnp.uint8), int32(64), int32(64), donate=0,
    )  # fmt: skip
    assert program.alias_bytes == total
    assert program.temp_bytes < 4096


def test_a_step_is_one_command_buffer():
    """Release, bind, table and write locations of a decode step, captured together."""

    def step(v2p, p2v, free_ids, free_count, holes, hole_count, virtual, words, kv_end, locs):
        mosaic = dict(implementation="mosaic")
        state = tombstone(v2p, p2v, free_ids, free_count, holes, hole_count, virtual, **mosaic)
        v2p, p2v = bind(state[0], state[1], state[2][:ROWS], state[4][:ROWS], **mosaic)
        table = fill_read_table(words, v2p, kv_end, page_size=64, blocks_per_page=7, **mosaic)
        return (
            v2p,
            p2v,
            state[2:6],
            table,
            translate_write_locs(locs, v2p, page_size=64, blocks_per_page=7, **mosaic),
        )

    args = *TestPages.maps, int32(1 << 20), int32(), int32(1 << 20), int32()
    args = *args, int32(ROWS), int32(ROWS, 512), int32(ROWS), int32(ROWS)
    program = compile_for(step, *args, donate=tuple(range(6)), options=CAPTURE_LOOPS)
    assert sum(launch.kind == "kCustomCall" for launch in program.launches) == 4
    assert all(launch.captured for launch in program.launches)


@pytest.mark.parametrize("target, kind", [("h200", "kCustomCall"), ("a100", "kCustomKernel")])
def test_a_hopper_gets_the_mosaic_kernel_by_default(target, kind):
    translate = partial(translate_write_locs, page_size=64, blocks_per_page=7)
    program = compile_for(translate, int32(256), int32(VIRTUAL), target=target)
    assert [launch.kind for launch in program.launches] == [kind]
