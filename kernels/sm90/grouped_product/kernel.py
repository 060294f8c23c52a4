"""y = w x for the rows of x in each group, with the group's matrix: the experts of a layer. Weights come packed, in
MXFP4 or FP8, and become bfloat16 in registers; or they come in bfloat16, as a model has them.

The operands are swapped: 64 rows of the matrix come from registers, and rows of x are a product's columns. So a few
rows of x are a narrow product.

    loader      w0 x0 | w1 x1 | w2 x2 | ...       bulk copies of codes and scales; rows of x
    consumer    decode 64 x 64 | product | decode the next, under that product | ...

For few rows (a step) reading the matrices takes the time. Four CTAs run on an SM, with a warpgroup each that decodes
and multiplies, by a warp's products, since a warpgroup's takes as long for 8 rows of x as for 64. Bulk copies bring
rows of x, one a lane. For many rows (a prompt) two warpgroups have 128 rows of the matrix each, and rows of x come by
cp.async.

Matrices in bfloat16 take the same way without decoding: cp.async brings rows of a slab, 128 bytes each, in the order of
a product's rows, and ldmatrix reads the operand. Of 64 rows a slab has 8 KB, 3.8 times as many as packed. So for few
rows two CTAs run on an SM, with five stages of two slabs (21 KB each, of which x has 4), and for many rows a CTA has
four stages of one slab (48 KB, of which x has 16). Sums, two operands and one that is being read take 176 registers.

A list, which `group_rows` makes, names tiles: a group, its first row and how many it has. A CTA takes a tile with some
rows of the matrix, all of k, and then its next one: the ring of stages runs on. What a row gets does not depend on the
other rows, neither on how many there are.

A gated product's rows are pairs of a gate and what it lets through: silu(gate) * up, times the row's weight.
"""

from pathlib import Path
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warpgroup

from kernels.abi import FEW_ROWS, MANY_ROWS, GroupedProduct
from kernels.aot import Compiled
from kernels.lib.columns import by_column, column_of
from kernels.lib.launch import WARP, WARPGROUP, Kernel, i32, pointers
from kernels.lib.pipeline import Ring
from kernels.lib.ptx import (
    bounded,
    copy_bulk,
    copy_bulk_once,
    copy_once_or_zero,
    copy_or_zero,
    in_a_register,
    least,
    load_four_words,
    load_matrices,
    multiply_warp,
    round_pair,
    store_shared_four,
)
from kernels.lib.rows import ROWS, ROWS_OF_WARPGROUP, ceil_div, divide, load, store
from kernels.lib.softmax import LOG2_E, exp2
from kernels.lib.tiles import TileAllocator
from kernels.lib.wgmma import K_MAJOR, SLAB, multiply, operand_b, register_operand, tiled_mma

from .config import BLOCK, LANES_A_ROW, Config
from .weights import STEPS

CHUNK = 8  # elements of one 16-byte copy
REGISTERS = warpgroup.OperandSource.RMEM


class Extents(NamedTuple):
    """The scalars of a launch, in the order of the kernel's parameters."""

    k: Int32
    n: Int32  # columns of y
    slabs: Int32  # of a matrix, along k: a multiple of those of stages at once
    tiles: Int32  # of a matrix, of 64 rows: a multiple of those of a CTA
    per_row: Int32  # entries of the list of rows for each row of x; 0 where x is sorted as y is


class Rows(NamedTuple):
    """Rows by group, and the tiles that they make up."""

    list: cute.Pointer  # int32 [rows]: which of x's rows times `per_row` each one is
    weights: cute.Pointer  # float32 [rows]
    tiles: cute.Pointer  # int32 [most, 4]: group, first row, rows, 0
    count: cute.Pointer  # int32 [1], of tiles


class Gate(NamedTuple):
    limit: Float32  # of |up|, and of gate from above


class Tile(NamedTuple):
    """Some rows of a group, and some of its matrix."""

    group: Int32
    first: Int32
    rows: Int32
    part: Int32  # of the matrix, `tiles_of_cta` tiles


class GroupedProductSm90(Kernel):
    symbol = "grouped_product_sm90"

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,  # [rows, k]
        w: cute.Pointer,  # bytes [groups, tiles, slabs, slab_bytes]; or bfloat16 [groups, n, k], [groups, 2, n, k]
        factor: cute.Pointer,  # float32 [groups], that a packed matrix is multiplied by
        y: cute.Pointer,  # [rows, n], by group
        list: cute.Pointer,
        weights: cute.Pointer,
        tiles_of_rows: cute.Pointer,
        count: cute.Pointer,
        limit: Float32,
        k: Int32,
        n: Int32,
        slabs: Int32,
        tiles: Int32,
        per_row: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        extents, rows = Extents(k, n, slabs, tiles, per_row), Rows(list, weights, tiles_of_rows, count)
        self.launch(x, w, factor, y, rows, Gate(limit), extents, ctas=ctas, stream=stream)

    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,
        w: cute.Pointer,
        factor: cute.Pointer,
        y: cute.Pointer,
        rows: Rows,
        gate: Gate,
        n: Extents,
    ):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = TileAllocator(self.dtype)
        if cutlass.const_expr(c.is_few):
            of_x = smem.allocate_array(Uint32, c.depth * c.x_bytes // 4).align(128)
            clear(of_x.toint(), c.depth * c.x_bytes, c.threads)  # products read all rows of a tile, also absent ones
        else:
            of_x = smem.tile(c.max_rows, c.slabs * SLAB, c.depth)
        of_w = smem.allocate_array(Uint32, c.depth * c.weight_bytes // 4).align(128)
        ring = Ring(*(smem.allocate_array(Int64, c.depth) for _ in range(2)), c.depth)
        if warp == 0:
            with cute.arch.elect_one():
                ring.initialise(c.arrivals, c.consumers * 4)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp < 4 * c.consumers:
            if cutlass.const_expr(not c.is_few):
                cute.arch.setmaxregister_increase(c.registers[1])
            cute.arch.griddepcontrol_wait()
            self.consume(ring, of_x, of_w.toint(), factor, y, rows, gate, n)
        else:
            if cutlass.const_expr(not c.is_few):
                cute.arch.setmaxregister_decrease(c.registers[0])
            cute.arch.griddepcontrol_wait()
            if cutlass.const_expr(c.is_few):
                self.produce_few(ring, of_x.toint(), of_w.toint(), x, w, rows, n)
            else:
                self.produce(ring, of_x, of_w.toint(), x, w, rows, n)
            cute.arch.griddepcontrol_launch_dependents()  # what follows may begin, and waits for this grid itself

    @cute.jit
    def tile(self, rows: Rows, n: Extents, item: Int32) -> Tile:
        parts = n.tiles // self.config.tiles_of_cta
        which, part = divide(item, parts)
        group, first, count, _ = load_four_words((rows.tiles + which * 4).toint())
        return Tile(group, first, count, part)

    def items(self, rows: Rows, n: Extents) -> Int32:
        return load(rows.count) * (n.tiles // self.config.tiles_of_cta)

    # ---- loader

    @cute.jit
    def produce_few(
        self, ring: Ring, of_x: Int32, of_w: Int32, x: cute.Pointer, w: cute.Pointer, rows: Rows, n: Extents
    ):
        """A lane copies a row of x, and the first one codes too."""
        c, lane = self.config, cute.arch.lane_idx()
        stages, fill, size = n.slabs // c.slabs, Int32(0), c.slabs * c.row_bytes
        first_item, items = cute.arch.block_idx()[0], self.items(rows, n)
        for item in cutlass.range(first_item, items, cute.arch.grid_dim()[0], unroll=1):
            tile = self.tile(rows, n, item)
            row = self.row_of_x(tile, cutlass.min(lane, tile.rows - 1), rows, n)
            source = (x + Int64(row) * n.k).toint()
            if cutlass.const_expr(c.is_packed):
                codes = self.codes_of(tile, w, n)
            else:
                rows_of_w = self.rows_of_matrix(tile, w, lane, n)
            for s in cutlass.range(stages, unroll=1):
                state = ring.at(fill + s)
                state.wait_empty()
                if lane == 0:
                    if cutlass.const_expr(c.is_packed):
                        state.expect_full(c.weight_bytes + tile.rows * size)
                        copy_bulk_once(
                            of_w + state.index * c.weight_bytes, codes + s * c.tile_bytes, c.tile_bytes, state.full
                        )
                    else:
                        state.expect_full(tile.rows * size)
                cute.arch.sync_warp()
                if lane < tile.rows:
                    copy_bulk(of_x + (state.index * c.x_bytes + lane * c.pitch), source + s * size, size, state.full)
                if cutlass.const_expr(not c.is_packed):
                    self.copy_matrix(of_w + state.index * c.weight_bytes, rows_of_w, s, lane, n)
                    state.copy_full()
            fill = fill + stages

    def row_of_x(self, tile: Tile, i: Int32, rows: Rows, n: Extents) -> Int32:
        """The row of x that is the i-th one of a tile."""
        return load(rows.list + (tile.first + i)) // n.per_row if self.config.gated else tile.first + i

    def codes_of(self, tile: Tile, w: cute.Pointer, n: Extents) -> Int64:
        """Returns the address at which this tile's rows of the matrix begin."""
        place = (Int64(tile.group) * n.tiles + tile.part * self.config.tiles_of_cta) * n.slabs
        return w.toint() + place * self.config.format.slab_bytes

    def rows_of_matrix(self, tile: Tile, w: cute.Pointer, thread: Int32, n: Extents) -> list[Int64]:
        """The addresses of 16 bytes in rows of the matrix that a thread copies, in the first block of 16 of a tile."""
        c, found = self.config, []
        block = tile.part * (c.tiles_of_cta * ROWS_OF_WARPGROUP // BLOCK)
        for turn in range(c.turns_of_block):
            row = turn * c.rows_at_a_time + thread // LANES_A_ROW
            upper, row = row // (BLOCK // 2), row % (BLOCK // 2)
            if c.gated:
                place = (Int64(tile.group) * 2 + upper) * n.n + (block * (BLOCK // 2) + row)
            else:
                place = Int64(tile.group) * n.n + (block * BLOCK + row * 2 + upper)
            found.append(w.toint() + (place * n.k + thread % LANES_A_ROW * CHUNK) * 2)
        return found

    @cute.jit
    def copy_matrix(self, target: Int32, sources: list, stage: Int32, thread: Int32, n: Extents):
        """Copies a stage's slabs of this CTA's rows of the matrix; sources: `rows_of_matrix`."""
        c = self.config
        pitch = Int64(n.k) * (2 * (BLOCK // 2 if c.gated else BLOCK))  # bytes from a block of 16 rows to the next
        blocks = ROWS_OF_WARPGROUP // BLOCK
        for turn in cutlass.range_constexpr(c.turns_of_block):
            row = turn * c.rows_at_a_time + thread // LANES_A_ROW
            swizzled = row * c.format.row_bytes + (thread % LANES_A_ROW ^ row % 8) * 16
            first = in_a_register(target + swizzled)
            for i in cutlass.range_constexpr(c.tiles_of_cta * blocks):
                to = first + (i // blocks * c.tile_bytes + i % blocks * BLOCK * c.format.row_bytes)
                source = sources[turn] + i * pitch + Int64(stage) * (c.slabs * c.format.row_bytes)
                for slab in cutlass.range_constexpr(c.slabs):
                    copy_once_or_zero(to + slab * c.format.slab_bytes, source + slab * c.format.row_bytes, Int32(16))

    @cute.jit
    def produce(
        self, ring: Ring, of_x: cute.Tensor, of_w: Int32, x: cute.Pointer, w: cute.Pointer, rows: Rows, n: Extents
    ):
        c = self.config
        thread = cute.arch.thread_idx()[0] - c.consumers * WARPGROUP
        row0, chunk = thread // LANES_A_ROW, thread % LANES_A_ROW
        target0 = of_x.iterator.toint() + row0 * c.row_bytes
        stages, fill = n.slabs // c.slabs, Int32(0)
        source = cute.make_rmem_tensor(c.rows_of_loader, Int32)  # rows of x
        first_item, items = cute.arch.block_idx()[0], self.items(rows, n)
        for item in cutlass.range(first_item, items, cute.arch.grid_dim()[0], unroll=1):
            tile = self.tile(rows, n, item)
            for i in cutlass.range_constexpr(c.rows_of_loader):
                row = i * c.rows_at_a_time + row0
                source[i] = self.row_of_x(tile, cutlass.min(row, tile.rows - 1), rows, n)
            padded = ceil_div(tile.rows, Int32(c.step)) * c.step  # a product reads zeros in place of rows
            if cutlass.const_expr(c.is_packed):
                codes = self.codes_of(tile, w, n)
            else:
                rows_of_w = self.rows_of_matrix(tile, w, thread, n)
            for s in cutlass.range(stages, unroll=1):
                state = ring.at(fill + s)
                state.wait_empty()
                if cutlass.const_expr(not c.is_packed):
                    self.copy_matrix(of_w + state.index * c.weight_bytes, rows_of_w, s, thread, n)
                elif thread == 0:
                    state.expect_full(c.weight_bytes)
                    for i in cutlass.range_constexpr(c.tiles_of_cta):
                        copy_bulk_once(
                            of_w + (state.index * c.weight_bytes + i * c.tile_bytes),
                            codes + (Int64(i * n.slabs) + s * c.slabs) * c.format.slab_bytes,
                            c.tile_bytes,
                            state.full,
                        )
                target = target0 + state.index * c.x_bytes
                for i in cutlass.range_constexpr(c.rows_of_loader):
                    if i * c.rows_at_a_time < padded:
                        row = i * c.rows_at_a_time + row0
                        to = target + i * c.rows_at_a_time * c.row_bytes + (chunk ^ row % 8) * 16
                        for slab in cutlass.range_constexpr(c.slabs):
                            column = (s * c.slabs + slab) * SLAB
                            there = (row < tile.rows) & (column + chunk * CHUNK < n.k)
                            copy_or_zero(
                                to + slab * (c.max_rows * c.row_bytes),
                                (x + (Int64(source[i]) * n.k + (column + chunk * CHUNK))).toint(),
                                Int32(16) if there else Int32(0),
                            )
                state.copy_full()
            fill = fill + stages

    # ---- consumers

    @cute.jit
    def consume(
        self,
        ring: Ring,
        of_x: cute.Tensor,
        of_w: Int32,
        factor: cute.Pointer,
        y: cute.Pointer,
        rows: Rows,
        gate: Gate,
        n: Extents,
    ):
        c, thread = self.config, cute.arch.thread_idx()[0] % WARPGROUP
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4)
        sums = [cute.make_rmem_tensor(c.max_rows // 2, Float32) for _ in range(c.units)]
        of_rows = cute.make_rmem_tensor(c.max_rows // 4, Float32)
        stages, fill = n.slabs // c.slabs, Int32(0)
        first_item, items = cute.arch.block_idx()[0], self.items(rows, n)
        for item in cutlass.range(first_item, items, cute.arch.grid_dim()[0], unroll=1):
            tile = self.tile(rows, n, item)
            scale = load(factor + tile.group) if cutlass.const_expr(c.is_packed) else Float32(1.0)
            if cutlass.const_expr(c.gated and c.is_few):  # ahead of their use, where registers are free
                self.read_weights(of_rows, rows, tile, thread)
            codes = of_w + group * c.units * c.tile_bytes + c.format.place(thread)
            if cutlass.const_expr(c.is_few):
                for j in cutlass.range_constexpr(len(c.columns)):
                    if (tile.rows > c.columns[j] - c.step) & (tile.rows <= c.columns[j]):
                        self.multiply_few(c.columns[j], ring, fill, stages, of_x, codes, sums[0])
            else:
                for j in cutlass.range_constexpr(len(c.columns)):
                    if (tile.rows > c.columns[j] - c.step) & (tile.rows <= c.columns[j]):
                        self.multiply(c.columns[j], ring, fill, stages, of_x, codes, sums)
            if cutlass.const_expr(c.gated and not c.is_few):
                self.read_weights(of_rows, rows, tile, thread)
            first_tile = tile.part * c.tiles_of_cta + group * c.units
            for unit in cutlass.range_constexpr(c.units):
                if cutlass.const_expr(c.gated):
                    self.store_gated(sums[unit], first_tile + unit, scale, of_rows, tile, y, gate, n)
                else:
                    self.store_plain(sums[unit], first_tile + unit, scale, tile, y, n)
            fill = fill + stages

    @cute.jit
    def multiply_few(
        self,
        columns: cutlass.Constexpr,
        ring: Ring,
        fill: Int32,
        stages: Int32,
        of_x: cute.Pointer,
        codes: Int32,
        sums: cute.Tensor,
    ):
        """sums <- 64 rows of the matrix times so many rows of x, by products of a warp: one of a warpgroup takes as
        long for 8 rows of x as for 32.
        """
        c, form = self.config, self.config.format
        thread, lane = cute.arch.thread_idx()[0] % WARPGROUP, cute.arch.lane_idx()
        operand = cute.make_rmem_tensor(4 * STEPS, Uint32)
        sums.fill(0.0)
        place = of_x.toint() + lane % 8 * c.pitch + lane // 8 * 16  # of a matrix that a lane names
        for s in cutlass.range(stages, unroll=1):
            state = ring.at(fill + s)
            state.wait_full()
            stage, x_of_stage = codes + state.index * c.weight_bytes, place + state.index * c.x_bytes
            for i in cutlass.range_constexpr(c.slabs):
                form.decode(operand, form.load(stage + i * form.slab_bytes, thread))
                for block in cutlass.range_constexpr(columns // 8):
                    at = x_of_stage + (8 * block * c.pitch + i * c.row_bytes)
                    x = [load_matrices(at + half * 64) for half in range(2)]
                    acc = tuple(sums[4 * block + r] for r in range(4))
                    for step in cutlass.range_constexpr(STEPS):
                        a = tuple(operand[4 * step + r] for r in range(4))
                        acc = multiply_warp(acc, a, x[step // 2][step % 2 * 2 : step % 2 * 2 + 2])
                    for r in cutlass.range_constexpr(4):
                        sums[4 * block + r] = acc[r]
            with cute.arch.elect_one():
                state.arrive_empty()

    @cute.jit
    def multiply(
        self,
        columns: cutlass.Constexpr,
        ring: Ring,
        fill: Int32,
        stages: Int32,
        of_x: cute.Tensor,
        codes: Int32,
        sums: list,
    ):
        """sums <- rows of the matrix times so many rows of x.

        An operand is decoded under the product before it. ptxas lets no product run on into the next
        iteration of a loop in which registers of another one are defined: there the other warpgroup fills in.
        """
        c, form = self.config, self.config.format
        mma = tiled_mma(self.dtype, columns, K_MAJOR, REGISTERS)
        operands = [register_operand(mma, SLAB, self.dtype) for _ in range(2)]
        layout = cute.make_layout(mma.partition_shape_C((64, columns)))
        b = [operand_b(mma, cute.local_tile(of_x, (columns, SLAB), (0, i, None))) for i in range(c.slabs)]
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        at_once = c.stages_at_once
        for first in cutlass.range(0, stages, at_once, unroll=1):
            for j in cutlass.range_constexpr(at_once * c.slabs * c.units):
                slab, unit = j // c.units, j % c.units
                if cutlass.const_expr(j % (c.slabs * c.units) == 0):
                    state = ring.at(fill + (first + slab // c.slabs))
                    state.wait_full()
                    cute.arch.fence_proxy("async.shared", space="cta")  # cp.async wrote through the generic proxy
                    stage = codes + state.index * c.weight_bytes
                loaded = form.load(stage + (unit * c.tile_bytes + slab % c.slabs * form.slab_bytes), thread)
                if cutlass.const_expr(j >= 2):
                    warpgroup.wait_group(1)  # the product before the last one, which had the same operand
                form.decode(operands[j % 2], loaded)
                acc = cute.make_tensor(sums[unit].iterator, layout)
                fresh = first == 0 if cutlass.const_expr(slab == 0) else False
                of_slab = b[slab % c.slabs][None, None, None, state.index]
                multiply(mma, acc, operands[j % 2], of_slab, fresh=fresh)
            warpgroup.wait_group(0)
            for i in cutlass.range_constexpr(at_once):
                with cute.arch.elect_one():
                    ring.at(fill + (first + i)).arrive_empty()

    @cute.jit
    def read_weights(self, of_rows: cute.Tensor, rows: Rows, tile: Tile, thread: Int32):
        """of_rows <- the weights of a thread's rows of the tile."""
        for i in cutlass.range_constexpr(cute.size(of_rows)):
            row = cutlass.min(column_of(thread, i), tile.rows - 1)
            of_rows[i] = load(rows.weights + (tile.first + row))

    @cute.jit
    def store_gated(
        self,
        acc: cute.Tensor,
        of_matrix: Int32,
        scale: Float32,
        of_rows: cute.Tensor,
        tile: Tile,
        y: cute.Pointer,
        gate: Gate,
        n: Extents,
    ):
        """32 columns of y: a thread has one of them, of its rows."""
        thread, sums = cute.arch.thread_idx()[0] % WARPGROUP, by_column(acc)
        column = of_matrix * 32 + thread // WARP * 8 + thread % WARP // 4
        for i in cutlass.range_constexpr(cute.size(of_rows)):
            row = column_of(thread, i)
            opens, up = least(sums[i, 0] * scale, gate.limit), bounded(sums[i, 1] * scale, gate.limit)
            z = opens * up * of_rows[i] * cute.arch.rcp_approx(1.0 + exp2(-opens * LOG2_E))
            if (row < tile.rows) & (column < n.n):
                store(y + (Int64(tile.first + row) * n.n + column), z.to(self.dtype))

    @cute.jit
    def store_plain(self, acc: cute.Tensor, of_matrix: Int32, scale: Float32, tile: Tile, y: cute.Pointer, n: Extents):
        """64 columns of y: a thread has two neighbours of them, of its rows."""
        thread, sums = cute.arch.thread_idx()[0] % WARPGROUP, by_column(acc)
        column = of_matrix * ROWS_OF_WARPGROUP + thread // WARP * 16 + thread % WARP // 4 * ROWS
        for i in cutlass.range_constexpr(cute.size(sums, mode=[0])):
            row = column_of(thread, i)
            if (row < tile.rows) & (column < n.n):
                place = cute.recast_ptr(y + (Int64(tile.first + row) * n.n + column), dtype=Uint32).align(4)
                store(place, round_pair(sums[i, 0] * scale, sums[i, 1] * scale, self.dtype))

    def examples(self, variant: GroupedProduct) -> tuple:
        arrays = pointers(variant.dtype, "x", "bytes", "float32", "y", "int32", "float32", "int32", "int32")
        return *arrays, Float32(10.0), *(i32() for _ in range(6))


@cute.jit
def clear(place: Int32, size: cutlass.Constexpr, threads: cutlass.Constexpr):
    """All threads write zeros to shared memory, which bulk copies will write next."""
    zero = Float32(0.0)
    for i in cutlass.range(cute.arch.thread_idx()[0] * 16, size, threads * 16, unroll=1):
        store_shared_four(place + i, zero, zero, zero, zero)
    cute.arch.fence_proxy("async.shared", space="cta")


def compile(variant: GroupedProduct, out_dir: Path) -> Compiled:
    rows = FEW_ROWS if variant.max_rows <= FEW_ROWS else MANY_ROWS
    config = Config(variant.dtype, variant.weights, variant.gated, rows)
    return GroupedProductSm90(config).compile(variant, out_dir, ctas=config.ctas)
