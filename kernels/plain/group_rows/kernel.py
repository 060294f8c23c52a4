"""Sorts rows by group, a row to a thread, and lists the tiles of rows that `grouped_product` takes.

    count     how many rows each group has, and how many of them are before this CTA's, in shared memory
    place     where the rows of a group begin, and its tiles, by a prefix sum over groups, one to a thread
    sort      each of this CTA's rows goes to the next place of its group

CTAs do not talk to each other: each counts all rows, of which it reads four bytes. One CTA for all rows took 62 us for
24576 of them on an H200: each store to a place is a sector, and each 1024 rows waited for memory twice.

A row whose group is not one of these, as that of an expert of another device, gets no place. Rows of a group are in no
particular order: what a row gets does not depend on it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.memory import SmemAllocator

from kernels.abi import MOST_GROUPS, GroupRows
from kernels.aot import Compiled
from kernels.lib.launch import WARP, Kernel, i32, pointers
from kernels.lib.ptx import take_next
from kernels.lib.rows import ceil_div, load, store

NUMBERS = 4  # of a tile: group, first row, rows, 0
AT_ONCE = 8  # rows whose groups a thread asks for before it counts the first


@dataclass(frozen=True)
class Config:
    threads: int = MOST_GROUPS
    tile_m: int = MOST_GROUPS
    tile_n: int = 1

    @property
    def warps(self) -> int:
        return self.threads // WARP

    @property
    def smem_bytes(self) -> int:
        """Two counts of each group, and of warps the sums of rows and of tiles."""
        return 4 * 2 * (self.threads + self.warps)

    @property
    def launch_options(self) -> dict[str, int]:
        return {}


class Sorted(NamedTuple):
    """The arrays that a launch makes."""

    list: cute.Pointer  # int32 [rows]: the row in each place
    weights: cute.Pointer  # float32 [rows]: its weight
    places: cute.Pointer  # int32 [rows]: the place of each row, -1 for none
    tiles: cute.Pointer  # int32 [most, NUMBERS]
    count: cute.Pointer  # int32 [1], of tiles


class GroupRowsKernel(Kernel):
    symbol = "group_rows"

    @cute.jit
    def __call__(
        self,
        group: cute.Pointer,  # int32 [rows]
        chosen_weight: cute.Pointer,  # float32 [rows]
        list: cute.Pointer,
        weights: cute.Pointer,
        places: cute.Pointer,
        tiles: cute.Pointer,
        count: cute.Pointer,
        rows: Int32,
        groups: Int32,
        tile: Int32,  # rows of one at most
        stream: cuda.CUstream,
    ):
        made, ctas = Sorted(list, weights, places, tiles, count), ceil_div(rows, Int32(self.config.tile_m))
        self.launch(group, chosen_weight, made, rows, groups, tile, ctas=ctas, stream=stream)

    @cute.kernel
    def kernel(
        self, group: cute.Pointer, chosen_weight: cute.Pointer, made: Sorted, rows: Int32, groups: Int32, tile: Int32
    ):
        c, thread, cta = self.config, cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        smem = SmemAllocator()
        counts = smem.allocate_array(Int32, 2 * c.threads)  # of rows before this CTA's, then of all others
        sums = smem.allocate_array(Int32, 2 * c.warps)
        store(counts + thread, Int32(0))
        store(counts + (c.threads + thread), Int32(0))
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        row = cta * c.threads + thread
        there = cutlass.min(row, rows - 1)
        its, weight = load(group + there), load(chosen_weight + there)  # ahead of their use
        cute.arch.sync_threads()
        self.count(group, rows, groups, cta * c.threads, counts.toint(), thread)
        cute.arch.sync_threads()
        ahead = load(counts + thread)
        own = ahead + load(counts + (c.threads + thread))
        own_tiles = ceil_div(own, tile)
        first, first_tile = self.before(own, own_tiles, sums)
        store(counts + thread, first + ahead)  # from now on the next place of the group
        if cta == 0:
            for i in cutlass.range(own_tiles, unroll=1):
                at = made.tiles + (first_tile + i) * NUMBERS
                store(at, thread)
                store(at + 1, first + i * tile)
                store(at + 2, cutlass.min(own - i * tile, tile))
                store(at + 3, Int32(0))
            if thread == c.threads - 1:
                store(made.count, first_tile + own_tiles)
        cute.arch.sync_threads()
        if row < rows:
            place = Int32(-1)
            if (its >= 0) & (its < groups):
                place = take_next(counts.toint() + its * 4)
                store(made.list + place, row)
                store(made.weights + place, weight)
            store(made.places + row, place)

    @cute.jit
    def count(self, group: cute.Pointer, rows: Int32, groups: Int32, begin: Int32, counts: Int32, thread: Int32):
        """Counts all rows of each group; those from `begin` on apart."""
        c = self.config
        for i in cutlass.range(thread, rows, AT_ONCE * c.threads, unroll=1):
            found = [load(group + cutlass.min(i + j * c.threads, rows - 1)) for j in range(AT_ONCE)]
            for j in cutlass.range_constexpr(AT_ONCE):
                row, its = i + j * c.threads, found[j]
                if (row < rows) & (its >= 0) & (its < groups):
                    take_next(counts + ((c.threads if row >= begin else 0) + its) * 4)

    @cute.jit
    def before(self, rows: Int32, tiles: Int32, sums: cute.Pointer) -> tuple[Int32, Int32]:
        """The sums of rows and of tiles over all threads before this one."""
        c, lane, warp = self.config, cute.arch.lane_idx(), cute.arch.warp_idx()
        upto, tiles_upto = rows, tiles
        for i in cutlass.range_constexpr(WARP.bit_length() - 1):
            x, y = (cute.arch.shuffle_sync_up(z, 1 << i, mask_and_clamp=0) for z in (upto, tiles_upto))
            if lane >= 1 << i:
                upto, tiles_upto = upto + x, tiles_upto + y
        if lane == WARP - 1:
            store(sums + warp, upto)
            store(sums + (c.warps + warp), tiles_upto)
        cute.arch.sync_threads()
        of_warp, tiles_of_warp = Int32(0), Int32(0)
        if lane < warp:
            of_warp, tiles_of_warp = load(sums + lane), load(sums + (c.warps + lane))
        first = upto - rows + cute.arch.warp_redux_sync(of_warp, "add")
        first_tile = tiles_upto - tiles + cute.arch.warp_redux_sync(tiles_of_warp, "add")
        return first, first_tile

    def examples(self, variant: GroupRows) -> tuple:
        arrays = ("int32", "float32", "int32", "float32", "int32", "int32", "int32")
        return *pointers("bfloat16", *arrays), i32(), i32(), i32()


def compile(variant: GroupRows, out_dir: Path) -> Compiled:
    return GroupRowsKernel(Config()).compile(variant, out_dir)
