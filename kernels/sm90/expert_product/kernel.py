"""Products of rows by group, in bfloat16, as training has them: forward, and both gradients.

    rows         y[r] = b[g] a[r]     for the rows r of each group g; b [groups, n, k]; a list says where y[r] goes
    gated        the same of gates and up projections, b [groups, 2, n, k], and what gates let through (gates.py)
    turned       y[r] = a[r] b[g]     the same with a matrix [groups, k, n]: the gradient of rows
    gated_back   the same, and y is the gradient of gates and up projections, by what `gated` made of them
    outer        y[g] = Σ a[r] b[r]'  over the rows r of group g: the gradient of its matrix, zeros for an empty group

A warp loads stages of 64 of what is summed over, by TMA, and two warpgroups multiply 64 x 256, each rows of its own:

    loader            a0 b0 | a1 b1 | a2 b2 | ...       a ring of four stages, 48 KB each
    consumer WG 0     product | product | ... | store   rows  0 ..  63 of a tile
    consumer WG 1     product | product | ... | store   rows 64 .. 127

Where a group ends within the first 64 rows of a tile, the second warpgroup leaves the tensor cores to the first.

A CTA takes every n-th tile of results, and the ring runs on from one to the next: stages of the next tile arrive while
sums are stored. A tile of `gated` has 128 gates and the 128 up projections of the same channels, by two boxes of TMA.
Rows of a group follow one another in memory. In the forms of rows a tile may read rows of the group after, whose
results it does not store. In `outer` such rows would count, so consumers clear them in shared memory: not even what is
not a number reaches another group. How sums are taken depends on the group's rows and their order alone.
"""

from pathlib import Path
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from kernels.abi import ExpertProduct
from kernels.aot import Compiled
from kernels.lib.launch import WARP, WARPGROUP, Kernel, i32, pointers
from kernels.lib.output import store_output
from kernels.lib.pipeline import Ring
from kernels.lib.ptx import load_four_words, prefetch_bulk
from kernels.lib.rows import ROWS, ROWS_OF_WARPGROUP, ceil_div, divide, load, row_of
from kernels.lib.tiles import TileAllocator
from kernels.lib.wgmma import (
    K_MAJOR,
    MN_MAJOR,
    SLAB,
    accumulator,
    multiply,
    operand_a,
    operand_b,
    tiled_mma,
    tma_atom,
    tma_tiles,
    transposed,
    zero_rows,
)

from .config import CONSUMERS, Config
from .gates import Back, Gated, GatedBack, store_gated

CLEARED = 1  # a named barrier of all consumers


class Extents(NamedTuple):
    """The scalars of a launch, in the order of the kernel's parameters."""

    m: Int32  # columns of a: what the forms of rows sum over, and rows of `outer`'s results
    n: Int32  # columns of products: of `gated`, gates and up projections
    groups: Int32


class ByRows(NamedTuple):
    """The tiles of rows."""

    list: cute.Pointer  # int32 [rows]: the row of y that each row's result is; in `gated_back`, of what was made
    tiles: cute.Pointer  # int32 [most, 4]: group, first row, rows, 0
    count: cute.Pointer  # int32 [1], of tiles


class ByGroups(NamedTuple):
    """The rows of each group."""

    first: cute.Pointer  # int32 [groups]
    sizes: cute.Pointer  # int32 [groups]


class Tile(NamedTuple):
    """128 x 256 results, and the rows that they come from."""

    group: Int32
    first: Int32  # row of a
    rows: Int32  # of a that count
    row_tile: Int32  # of a group's results in `outer`
    column_tile: Int32


class OfRows(NamedTuple):
    """The results that a consumer stores of a tile of rows, in the form of rows for `store_output`."""

    list: cute.Pointer  # of the tile's rows
    rows: Int32  # of the tile
    row0: Int32  # the consumer's first
    thread: Int32

    def place(self, _, r: int) -> tuple[cutlass.Boolean, Int32, Int32]:
        row = self.row0 + row_of(self.thread, r)
        return row < self.rows, cutlass.min(row, self.rows - 1), Int32(0)

    def row_index(self, row: Int32, _: Int32) -> Int64:
        return Int64(load(self.list + row))


class OfMatrix(NamedTuple):
    """The same of rows of a group's matrix, which are all there."""

    row0: Int64  # among those of all groups
    thread: Int32

    def place(self, _, r: int) -> tuple[bool, Int32, Int32]:
        return True, row_of(self.thread, r), Int32(0)

    def row_index(self, row: Int32, _: Int32) -> Int64:
        return self.row0 + row


class ExpertProductSm90(Kernel):
    symbol = "expert_product_sm90"

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # [rows, m]
        b: cute.Pointer,  # [groups, n, m], [groups, m, n] or [rows, n]
        y: cute.Pointer,  # [rows, n], [rows, 2, n] of `gated_back`, or [groups, m, n]
        list: cute.Pointer,  # `ByRows`
        tiles: cute.Pointer,
        count: cute.Pointer,
        first: cute.Pointer,  # `ByGroups`
        sizes: cute.Pointer,
        inner: cute.Pointer,  # `Gated`
        weights: cute.Pointer,
        made: cute.Pointer,  # `Back`
        of_weights: cute.Pointer,
        limit: Float32,
        rows: Int32,
        m: Int32,
        n: Int32,
        groups: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        c, copy = self.config, cpasync.CopyBulkTensorTileG2SOp()
        of_a = cute.make_layout((rows, m), stride=(m, 1))
        of_b = cute.make_layout((n, m, groups), stride=(m, 1, Int64(m) * n))
        where, gates = ByRows(list, tiles, count), ()
        if cutlass.const_expr(c.form == "gated"):
            gates = Gated(inner, weights, limit)
        if cutlass.const_expr(c.form == "gated_back"):
            gates = Back(inner, weights, made, of_weights, limit)
        if cutlass.const_expr(c.is_turned):
            of_b = cute.make_layout((m, n, groups), stride=(n, 1, Int64(m) * n))
        if cutlass.const_expr(c.is_outer):
            of_b, where = cute.make_layout((rows, n), stride=(n, 1)), ByGroups(first, sizes)
        maps = tuple(
            tma_atom(copy, cute.make_tensor(x, layout), *box)
            for x, layout, box in ((a, of_a, c.box_a), (b, of_b, (c.box_b[0] // c.boxes_b, c.box_b[1])))
        )
        self.launch(maps, y, where, gates, Extents(m, n, groups), ctas=ctas, stream=stream)

    @cute.kernel
    def kernel(self, maps: tuple, y: cute.Pointer, where: tuple, gates: tuple, n: Extents):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = TileAllocator(self.dtype)
        a, b = (smem.tile(*box, c.stages) for box in (c.box_a, c.box_b))
        ring = Ring(*(smem.allocate_array(Int64, c.stages) for _ in range(2)), c.stages)
        if warp == 0:
            for atom, _ in maps:
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                ring.initialise(1, CONSUMERS * 4)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp < 4 * CONSUMERS:
            cute.arch.setmaxregister_increase(c.registers[1])
            self.consume(ring, a, b, y, where, gates, n)
        else:
            cute.arch.setmaxregister_decrease(c.registers[0])
            if warp == 4 * CONSUMERS:
                self.produce(ring, a, b, maps, where, gates, n)

    def parts(self, n: Extents) -> tuple[Int32, Int32]:
        """The numbers of tiles of results along rows, of a group in `outer`, and along columns."""
        c = self.config
        return n.m // c.tile_m, n.n // c.tile_n

    def items(self, where: tuple, n: Extents) -> Int32:
        """The number of tiles of results."""
        of_rows, of_columns = self.parts(n)
        if self.config.is_outer:
            return n.groups * of_rows * of_columns
        return load(where.count) * of_columns

    @cute.jit
    def tile(self, where: tuple, n: Extents, item: Int32) -> Tile:
        of_rows, of_columns = self.parts(n)
        which, column_tile = divide(item, of_columns)
        row_tile = Int32(0)
        if cutlass.const_expr(self.config.is_outer):
            group, row_tile = divide(which, of_rows)
            first, rows = load(where.first + group), load(where.sizes + group)
        else:
            group, first, rows, _ = load_four_words((where.tiles + which * 4).toint())
        return Tile(group, first, rows, row_tile, column_tile)

    def steps(self, tile: Tile, n: Extents) -> Int32:
        """The number of stages of a tile."""
        return ceil_div(tile.rows if self.config.is_outer else n.m, Int32(SLAB))

    @cute.jit
    def produce(self, ring: Ring, a: cute.Tensor, b: cute.Tensor, maps: tuple, where: tuple, gates: tuple, n: Extents):
        """One warp loads."""
        c, fill = self.config, Int32(0)
        (tma_a, mA), (tma_b, mB) = maps
        items = self.items(where, n)
        for item in cutlass.range(cute.arch.block_idx()[0], items, cute.arch.grid_dim()[0], unroll=1):
            tile = self.tile(where, n, item)
            of_a = cute.domain_offset((tile.first, 0), mA)
            if cutlass.const_expr(c.is_outer):
                of_a = cute.local_tile(of_a, c.box_a, (None, tile.row_tile))
                of_b = cute.local_tile(cute.domain_offset((tile.first, 0), mB), c.box_b, (None, tile.column_tile))
            else:
                of_a = cute.local_tile(of_a, c.box_a, (0, None))
                place = (None, tile.column_tile) if cutlass.const_expr(c.is_turned) else (tile.column_tile, None)
                box = c.box_b[0] // c.boxes_b, c.box_b[1]
                of_b = cute.local_tile(mB[None, None, tile.group], box, place)
            gA, sA = tma_tiles(tma_a, of_a, a)
            if cutlass.const_expr(c.boxes_b == 2):
                ups = (self.parts(n)[1] + tile.column_tile, None)
                ups = cute.local_tile(mB[None, None, tile.group], box, ups)
                (gB, sB), (gU, sU) = (
                    tma_tiles(tma_b, x, cute.local_tile(b, box, (i, 0, None))) for i, x in enumerate((of_b, ups))
                )
            else:
                gB, sB = tma_tiles(tma_b, of_b, b)
            if cutlass.const_expr(c.form == "gated_back"):
                self.prefetch(tile, where, gates, n)
            steps = self.steps(tile, n)
            for t in cutlass.range(steps, unroll=1):
                state = ring.at(fill + t)
                state.wait_empty()
                with cute.arch.elect_one():
                    state.expect_full(c.stage_bytes)
                cute.copy(tma_a, gA[None, t], sA[None, state.index], tma_bar_ptr=state.full)
                cute.copy(tma_b, gB[None, t], sB[None, state.index], tma_bar_ptr=state.full)
                if cutlass.const_expr(c.boxes_b == 2):
                    cute.copy(tma_b, gU[None, t], sU[None, state.index], tma_bar_ptr=state.full)
            fill = fill + steps

    @cute.jit
    def prefetch(self, tile: Tile, where: ByRows, gates: Back, n: Extents):
        """Brings the gates and up projections of a tile into L2, where they are when its sums are there."""
        c = self.config
        for i in cutlass.range_constexpr(c.tile_m // WARP):
            row = i * WARP + cute.arch.lane_idx()
            if row < tile.rows:
                place = Int64(load(where.list + (tile.first + row))) * (2 * n.n) + tile.column_tile * c.tile_n
                for half in cutlass.range_constexpr(2):
                    prefetch_bulk((gates.made + (place + half * n.n)).toint(), c.tile_n * self.dtype.width // 8)

    @cute.jit
    def consume(
        self, ring: Ring, a: cute.Tensor, b: cute.Tensor, y: cute.Pointer, where: tuple, gates: tuple, n: Extents
    ):
        """A warpgroup: 64 rows of each tile of results."""
        c, fill, thread = self.config, Int32(0), cute.arch.thread_idx()[0] % WARPGROUP
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4)
        half = (ROWS_OF_WARPGROUP, SLAB)
        if cutlass.const_expr(c.is_outer):
            mma = tiled_mma(self.dtype, c.tile_n, MN_MAJOR, a_major=MN_MAJOR)
            of_a = operand_a(mma, transposed(cute.local_tile(a, half, (0, group, None))))
        else:
            mma = tiled_mma(self.dtype, c.tile_n, MN_MAJOR if c.is_turned else K_MAJOR)
            of_a = operand_a(mma, cute.local_tile(a, half, (group, 0, None)))
        of_b = operand_b(mma, transposed(b) if cutlass.const_expr(c.is_outer or c.is_turned) else b)
        sums, factors = accumulator(mma, c.tile_n), cute.make_rmem_tensor(ROWS, Float32)
        factors.fill(1.0)
        if cutlass.const_expr(c.form == "gated_back"):
            back = GatedBack.of(gates, n.n, thread)
        items = self.items(where, n)
        for item in cutlass.range(cute.arch.block_idx()[0], items, cute.arch.grid_dim()[0], unroll=1):
            tile = self.tile(where, n, item)
            steps = self.steps(tile, n)
            row0 = group * ROWS_OF_WARPGROUP
            if cutlass.const_expr(c.form == "gated_back"):
                back.begin(sums, self.results(where, tile, row0, thread, n), tile.column_tile * c.tile_n)
            if cutlass.const_expr(c.is_outer):  # noqa: SIM114, at compile time
                self.multiply(ring, fill, steps, a, b, of_a, of_b, mma, sums, tile, group, thread)
            elif row0 < tile.rows:
                self.multiply(ring, fill, steps, a, b, of_a, of_b, mma, sums, tile, group, thread)
            else:  # the other consumer has the tensor cores alone
                self.pass_over(ring, fill, steps)
            mine = self.results(where, tile, row0, thread, n)
            if cutlass.const_expr(c.form == "gated"):
                store_gated(sums, y, gates, mine, tile.first, tile.column_tile * (c.tile_n // 2), n.n)
            elif cutlass.const_expr(c.form == "gated_back"):
                back.store(sums, y, mine, tile.first, tile.column_tile * c.tile_n, tile.column_tile)
            else:
                store_output(sums, factors, y, mine, None, tile.column_tile * c.tile_n, thread, n.n)
            fill = fill + steps

    def results(self, where: tuple, tile: Tile, row0: Int32, thread: Int32, n: Extents) -> OfRows | OfMatrix:
        """The results that a consumer stores of a tile."""
        if self.config.is_outer:
            return OfMatrix(Int64(tile.group) * n.m + (tile.row_tile * self.config.tile_m + row0), thread)
        return OfRows(where.list + tile.first, tile.rows, row0, thread)

    @cute.jit
    def multiply(
        self,
        ring: Ring,
        fill: Int32,
        steps: Int32,
        a: cute.Tensor,
        b: cute.Tensor,
        of_a: cute.Tensor,
        of_b: cute.Tensor,
        mma: cute.TiledMma,
        sums: cute.Tensor,
        tile: Tile,
        group: Int32,
        thread: Int32,
    ):
        """sums <- the products of all stages of a tile."""
        sums.fill(0.0)
        for t in cutlass.range(steps, unroll=1):
            state = ring.at(fill + t)
            state.wait_full()
            if cutlass.const_expr(self.config.is_outer):
                left = tile.rows - t * SLAB
                if left < SLAB:
                    clear(a, b, state.index, left, group, thread)
            multiply(mma, sums, of_a[None, None, None, state.index], of_b[None, None, None, state.index])
            warpgroup.wait_group(1)
            if t > 0:
                with cute.arch.elect_one():
                    ring.at(fill + (t - 1)).arrive_empty()
        warpgroup.wait_group(0)
        if steps > 0:
            with cute.arch.elect_one():
                ring.at(fill + (steps - 1)).arrive_empty()

    @cute.jit
    def pass_over(self, ring: Ring, fill: Int32, steps: Int32):
        """Reads no stage of a tile."""
        for t in cutlass.range(steps, unroll=1):
            state = ring.at(fill + t)
            state.wait_full()
            with cute.arch.elect_one():
                state.arrive_empty()

    def examples(self, variant: ExpertProduct) -> tuple:
        arrays = "a", "b", "y", *("int32",) * 5, "inner", "float32", "made", "float32"
        return *pointers(variant.dtype, *arrays), Float32(10.0), *(i32() for _ in range(5))


@cute.jit
def clear(a: cute.Tensor, b: cute.Tensor, stage: Int32, first: Int32, group: Int32, thread: Int32):
    """Consumers clear the rows of a stage from `first` on: each its own columns of a, and half of those of b."""
    zero_rows(cute.local_tile(a, (SLAB, ROWS_OF_WARPGROUP), (0, group, stage)), first, thread, WARPGROUP)
    columns = cute.size(b, mode=[1]) // CONSUMERS
    zero_rows(cute.local_tile(b, (SLAB, columns), (0, group, stage)), first, thread, WARPGROUP)
    cute.arch.barrier(barrier_id=CLEARED, number_of_threads=CONSUMERS * WARPGROUP)


def compile(variant: ExpertProduct, out_dir: Path) -> Compiled:
    return ExpertProductSm90(Config(variant.dtype, variant.form)).compile(variant, out_dir)
