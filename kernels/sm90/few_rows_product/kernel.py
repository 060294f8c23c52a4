"""y = x w for few rows of x, as a step of generation has them: bound by reading w once.

A warp loads, and two warpgroups multiply 64 x columns, each half of the columns; or, with 128 rows, half of the rows.

    producer warp    x0 w0 | x1 w1 | x2 w2 | ...       TMA, 64 of k at a time
    consumer WG 0        columns of the first half     product | product | ...
    consumer WG 1        columns of the second half    product | product | ...
    then             partial sums into SMEM; the cluster meets; a CTA finishes some of the rows, a warp a row

Where w is packed, the operands are swapped: 64 columns of w, decoded in registers, are a product's rows, and rows of x
its columns. A consumer has 64 columns, and leaves the same sums: two of them, or four where a CTA has half of a query
head. Where a CTA has an SM to itself, four warpgroups finish its rows in either case.

    producer warp    x0 w0 | x1 w1 | x2 w2 | ...       bulk copies of codes and scales; x as before
    consumer         decode | product | decode the next, under that product | ...

Where the rows are heads, consumers turn their last 64 numbers back in SMEM, a tile of k in eight, before they multiply.

The CTAs of a cluster share k: each has a part of it, and a row is the sum of the parts, in their order, which a warp
reads from every CTA's shared memory (DSMEM). Or they share the columns of a query head, of which a warp then reads all,
for the norm and RoPE. How k is cut does not depend on the rows, so neither do the bits of a row.

The norm of a low-rank query has no pass of its own. Whoever makes the query leaves it times the norm's weight, and the
sum of squares of each tile of columns. Whoever multiplies it divides the sums by the root mean square.
"""

from pathlib import Path
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync, warpgroup

from kernels.abi import FewRowsProduct
from kernels.aot import Compiled
from kernels.lib.columns import by_column
from kernels.lib.fp8_rows import quantized, write_words
from kernels.lib.hadamard import hadamard, rounded
from kernels.lib.launch import WARP, WARPGROUP, Kernel, i32, pointers
from kernels.lib.pipeline import Ring
from kernels.lib.ptx import copy_bulk_once, load_four_of, round_pair, store_shared_two
from kernels.lib.rows import ROWS, ROWS_OF_WARPGROUP, ceil_div, load, row_of, store
from kernels.lib.softmax import by_row
from kernels.lib.tiles import TileAllocator
from kernels.lib.turned import CHUNK as TURNED_AT_ONCE
from kernels.lib.turned import MINE, QUAD, chunk_of, turn_chunk, turned
from kernels.lib.wgmma import (
    K_MAJOR,
    MN_MAJOR,
    SLAB,
    accumulator,
    multiply,
    operand_a,
    operand_b,
    register_operand,
    tiled_mma,
    tma_atom,
    tma_tiles,
    transposed,
)
from kernels.packings import ROPE

from .config import CHUNK, HEAD, INDEX_D, LINE, MOST_ROWS, Config

CONSUMED, TURNED = 1, 2  # named barriers of all consumers
REGISTERS = warpgroup.OperandSource.RMEM


class Extents(NamedTuple):
    """The scalars of a launch, in the order of the kernel's parameters."""

    rows: Int32
    k: Int32
    n: Int32  # columns of w
    groups: Int32  # matrices, each with its own part of a row of x


class LowRank(NamedTuple):
    """The first columns of y, as a low-rank query before its norm."""

    gain: cute.Pointer  # float32 [columns], the norm's weight
    query: cute.Pointer  # [rows, columns] like x: these columns times the weight
    squares: cute.Pointer  # float32 [rows, columns / tile_n]: the sum of squares of each tile
    columns: Int32  # a multiple of tile_n; 0 for none


class Norm(NamedTuple):
    """The norm of x, whose rows are yet to be divided by their root mean square; query heads have the same eps."""

    eps: Float32
    squares: cute.Pointer  # float32 [rows, tiles]: sums of squares, which add up to that of a row of k numbers
    tiles: Int32  # at most WARP; 0 where x is as it should be


class Weights(NamedTuple):
    """The weights of an indexer's query heads, as they are given and as they are made."""

    given: cute.Pointer  # float32 [rows, columns]: those from `column` on, one for each head
    made: cute.Pointer  # float32 [rows, heads]: times `scale`, and times the scale of a quantized row
    columns: Int32
    column: Int32
    scale: Float32


class FewRowsProductSm90(Kernel):
    symbol = "few_rows_product_sm90"

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,  # [rows, groups, k]
        w: cute.Pointer,  # [groups, k, n], or packed, bytes [groups, tiles of n, slabs of k, slab_bytes]
        y: cute.Pointer,  # [rows, groups, n]
        table: cute.Pointer,  # float32 [rows, ROPE]: cos and sin by turns, of each row; read where heads are turned
        eps: Float32,
        gain: cute.Pointer,  # `LowRank`
        low: cute.Pointer,
        squares: cute.Pointer,
        low_columns: Int32,
        square_tiles: Int32,  # `Norm`
        given: cute.Pointer,  # `Weights`
        weights: cute.Pointer,
        columns: Int32,
        column: Int32,
        scale: Float32,
        rows: Int32,
        k: Int32,
        n: Int32,
        groups: Int32,
        stream: cuda.CUstream,
    ):
        c, load = self.config, cpasync.CopyBulkTensorTileG2SOp()
        of_x = cute.make_layout((rows, k, groups), stride=(Int64(k) * groups, 1, k))
        of_w = cute.make_layout((k, n, groups), stride=(n, 1, Int64(k) * n))
        maps = (tma_atom(load, cute.make_tensor(x, of_x), c.tile_m, SLAB), w)
        if cutlass.const_expr(not c.weights):
            maps = (maps[0], tma_atom(load, cute.make_tensor(w, of_w), SLAB, c.tile_n))
        tiles = ceil_div(rows, Int32(c.tile_m)) * ceil_div(n, Int32(c.tile_n)) * groups
        ctas = tiles if cutlass.const_expr(c.norms) else tiles * c.cluster
        how = (table,) if cutlass.const_expr(c.turns_back) else LowRank(gain, low, squares, low_columns)
        if cutlass.const_expr(c.norms or c.indexes):
            how = (table, Norm(eps, squares, square_tiles))
        if cutlass.const_expr(c.indexes):
            how = (*how, Weights(given, weights, columns, column, scale))
        self.launch(maps, y, how, Extents(rows, k, n, groups), ctas=ctas, stream=stream, cluster=c.cluster)

    @cute.kernel
    def kernel(self, maps: tuple, y: cute.Pointer, how: tuple, n: Extents):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = TileAllocator(self.dtype)
        x = smem.tile(c.tile_m, SLAB, c.stages * c.slabs)
        if cutlass.const_expr(c.weights):
            w = smem.allocate_array(Uint32, c.stages * c.weight_bytes // 4).align(128).toint()
        else:
            w = smem.tile(SLAB, c.tile_n, c.stages)
        ring = Ring(*(smem.allocate_array(Int64, c.stages) for _ in range(2)), c.stages)
        if warp == 0:
            with cute.arch.elect_one():
                ring.initialise(1, c.consumers * 4)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        rank, unit = cute.arch.block_idx()[0] % c.cluster, cute.arch.block_idx()[0] // c.cluster
        k_tiles, column_tiles = ceil_div(n.k, Int32(c.slabs * SLAB)), ceil_div(n.n, Int32(c.tile_n))
        first, last = k_tiles * rank // c.cluster, k_tiles * (rank + 1) // c.cluster
        if cutlass.const_expr(c.norms):
            column_tiles, first, last = column_tiles // c.cluster, Int32(0), k_tiles
        row_tiles = ceil_div(n.rows, Int32(c.tile_m))
        row_tile, column_tile = unit % row_tiles, unit // row_tiles % column_tiles
        group = unit // row_tiles // column_tiles
        tile = column_tile
        if cutlass.const_expr(c.norms):
            tile = column_tile * c.cluster + rank
        partial = x.iterator.toint()
        if warp < 4 * c.consumers:
            if cutlass.const_expr(c.weights):
                slab = self.slab_of(tile, group, n) + first * c.slabs
                self.consume_packed(ring, x, w, partial, (first, last), slab, how, row_tile * c.tile_m, n)
            else:
                self.consume(ring, x, w, partial, first, last, how, row_tile * c.tile_m, n.rows)
        elif warp >= 4 * c.warpgroups:
            produce = self.produce_packed if cutlass.const_expr(c.weights) else self.produce
            produce(ring, x, w, maps, (row_tile, tile, group), first, last, n)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if warp < 4 * c.warpgroups:
            row0 = row_tile * c.tile_m
            if cutlass.const_expr(c.norms):
                self.finish_head(partial, rank, row0, column_tile, y, how, n)
            elif cutlass.const_expr(c.indexes):
                self.finish_index_query(partial, rank, row0, column_tile, y, how, n)
            else:
                self.finish_sum(partial, rank, row0, column_tile, group, y, how, n)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()  # nobody leaves while others read its sums

    @cute.jit
    def produce(
        self,
        ring: Ring,
        x: cute.Tensor,
        w: cute.Tensor,
        maps: tuple,
        tile: tuple,
        first: Int32,
        last: Int32,
        n: Extents,
    ):
        """One warp loads the tiles of k from first to last."""
        c = self.config
        (tma_x, mX), (tma_w, mW) = maps
        row_tile, column_tile, group = tile
        gX, sX = tma_tiles(tma_x, cute.local_tile(mX[None, None, group], (c.tile_m, SLAB), (row_tile, None)), x)
        gW, sW = tma_tiles(tma_w, cute.local_tile(mW[None, None, group], (SLAB, c.tile_n), (None, column_tile)), w)
        for t in cutlass.range(first, last, unroll=1):
            state = ring.at(t - first)
            state.wait_empty()
            with cute.arch.elect_one():
                state.expect_full(c.loaded_bytes)
            cute.copy(tma_w, gW[None, t], sW[None, state.index], tma_bar_ptr=state.full)
            cute.copy(tma_x, gX[None, t], sX[None, state.index], tma_bar_ptr=state.full)

    @cute.jit
    def produce_packed(
        self,
        ring: Ring,
        x: cute.Tensor,
        of_w: Int32,
        maps: tuple,
        tile: tuple,
        first: Int32,
        last: Int32,
        n: Extents,
    ):
        """`produce` where w is packed: n in whole tiles of 128, and k in whole pairs of slabs."""
        c, form = self.config, self.config.format
        (tma_x, mX), w = maps
        row_tile, column_tile, group = tile
        gX, sX = tma_tiles(tma_x, cute.local_tile(mX[None, None, group], (c.tile_m, SLAB), (row_tile, None)), x)
        slabs, slab = slabs_of(n.k), self.slab_of(column_tile, group, n)
        for t in cutlass.range(first, last, unroll=1):
            state = ring.at(t - first)
            state.wait_empty()
            with cute.arch.elect_one():
                state.expect_full(c.loaded_bytes)
                for i in cutlass.range_constexpr(c.tiles):
                    at = slab + i * slabs + t * c.slabs
                    copy_bulk_once(
                        of_w + (state.index * c.tiles + i) * c.tile_room + self.into_line(at),
                        w.toint() + Int64(at) * form.slab_bytes,
                        c.tile_bytes,
                        state.full,
                    )
            for i in cutlass.range_constexpr(c.slabs):
                cute.copy(tma_x, gX[None, t * c.slabs + i], sX[None, state.index * c.slabs + i], tma_bar_ptr=state.full)

    def slab_of(self, column_tile: Int32, group: Int32, n: Extents) -> Int32:
        """The number of the first slab of a packed matrix that has these columns."""
        return (group * slabs_of(n.n) + column_tile * self.config.tiles) * slabs_of(n.k)

    def into_line(self, slab: Int32) -> Int32:
        """The bytes before a slab in its line of memory. It has as many in shared memory: else a bulk copy writes each
        line in two pieces, while products read.
        """
        return slab * self.config.format.slab_bytes & LINE - 1

    @cute.jit
    def consume(
        self,
        ring: Ring,
        x: cute.Tensor,
        w: cute.Tensor,
        partial: Int32,
        first: Int32,
        last: Int32,
        how: tuple,
        row0: Int32,
        rows: Int32,
    ):
        """A warpgroup's products, of the tiles of k from first to last, and their sums into shared memory, float32
        [tile_m, pitch]."""
        c = self.config
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4)
        row_tile, part = (group, 0) if cutlass.const_expr(c.row_tiles > 1) else (0, group)
        mma, thread = tiled_mma(self.dtype, c.mma_n, MN_MAJOR), cute.arch.thread_idx()[0] % WARPGROUP
        a = operand_a(mma, cute.local_tile(x, (ROWS_OF_WARPGROUP, SLAB), (row_tile, 0, None)))
        b = operand_b(mma, transposed(cute.local_tile(w, (SLAB, c.mma_n), (0, part, None))))
        acc = accumulator(mma, c.mma_n)
        rotations = cute.make_rmem_tensor((MINE * TURNED_AT_ONCE, c.row_tiles), Float32)
        if cutlass.const_expr(c.turns_back):
            read_rotations(how[0], rotations, row0, rows)
        for t in cutlass.range(last - first, unroll=1):
            state = ring.at(t)
            state.wait_full()
            if cutlass.const_expr(c.turns_back):  # noqa: SIM102, at compile time
                if (first + t) % (HEAD // SLAB) == HEAD // SLAB - 1:
                    self.turn_back(x, state.index, rotations)
            multiply(mma, acc, a[None, None, None, state.index], b[None, None, None, state.index], fresh=t == 0)
            warpgroup.wait_group(1)
            if t > 0:
                with cute.arch.elect_one():
                    ring.at(t - 1).arrive_empty()
        warpgroup.wait_group(0)
        cute.arch.barrier(barrier_id=CONSUMED, number_of_threads=c.consumers * WARPGROUP)  # all stages have been read
        sums = by_row(acc)
        for r in cutlass.range_constexpr(ROWS):
            row = row_tile * ROWS_OF_WARPGROUP + row_of(thread, r)
            place = partial + (row * c.pitch + part * c.mma_n + thread % 4 * 2) * 4
            for j in cutlass.range_constexpr(c.mma_n // 8):
                store_shared_two(place, j * 8 * 4, sums[r, 2 * j], sums[r, 2 * j + 1])

    @cute.jit
    def consume_packed(
        self,
        ring: Ring,
        x: cute.Tensor,
        w: Int32,
        partial: Int32,
        span: tuple,
        slab: Int32,
        how: tuple,
        row0: Int32,
        n: Extents,
    ):
        """`consume` where w is packed: a warpgroup has 64 columns of all rows.

        An operand is decoded under the product before it. ptxas lets no product run on into the next iteration of a
        loop in which registers of another one are defined: there the other warpgroup fills in.
        """
        c, form, (first, last) = self.config, self.config.format, span
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4)
        mma, thread = tiled_mma(self.dtype, c.tile_m, K_MAJOR, REGISTERS), cute.arch.thread_idx()[0] % WARPGROUP
        operands = [register_operand(mma, SLAB, self.dtype) for _ in range(c.slabs)]
        b = operand_b(mma, cute.local_tile(x, (c.tile_m, SLAB), (0, 0, None)))
        acc = accumulator(mma, c.tile_m)
        rotations = cute.make_rmem_tensor((MINE * TURNED_AT_ONCE, c.row_tiles), Float32)
        if cutlass.const_expr(c.turns_back):
            read_rotations(how[0], rotations, row0, n.rows)
        for t in cutlass.range(last - first, unroll=1):
            state = ring.at(t)
            state.wait_full()
            if cutlass.const_expr(c.turns_back):  # noqa: SIM102, at compile time
                if (first + t + 1) * c.slabs % (HEAD // SLAB) == 0:
                    self.turn_back(x, (state.index + 1) * c.slabs - 1, rotations)
            at = slab + group * slabs_of(n.k) + t * c.slabs
            place = w + (state.index * c.tiles + group) * c.tile_room + self.into_line(at)
            for i in cutlass.range_constexpr(c.slabs):
                form.decode(operands[i], form.load(place + i * form.slab_bytes, thread))
                of_slab = b[None, None, None, state.index * c.slabs + i]
                multiply(mma, acc, operands[i], of_slab, fresh=t == 0 if cutlass.const_expr(i == 0) else False)
            warpgroup.wait_group(0)
            with cute.arch.elect_one():
                state.arrive_empty()
        cute.arch.barrier(barrier_id=CONSUMED, number_of_threads=c.consumers * WARPGROUP)  # all stages have been read
        sums = by_column(acc)
        column = group * ROWS_OF_WARPGROUP + thread // WARP * 16 + thread % WARP // 4 * ROWS
        place = partial + (thread % 4 * 2 * c.pitch + column) * 4
        for i in cutlass.range_constexpr(cute.size(sums, mode=[0])):
            store_shared_two(place, (i // 2 * 8 + i % 2) * c.pitch * 4, sums[i, 0], sums[i, 1])

    @cute.jit
    def turn_back(self, x: cute.Tensor, stage: Int32, rotations: cute.Tensor):
        """All consumers turn a tile of x, which is a slab: a thread MINE chunks of one row of 64."""
        c, thread = self.config, cute.arch.thread_idx()[0]
        for i in cutlass.range_constexpr(c.row_tiles):
            row = i * ROWS_OF_WARPGROUP + thread // QUAD
            if row < c.tile_m or c.tile_m >= ROWS_OF_WARPGROUP:
                for j in cutlass.range_constexpr(MINE):
                    turn_chunk(chunk_of(x, stage, row, thread, j), rotations[None, i], TURNED_AT_ONCE * j)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=TURNED, number_of_threads=c.consumers * WARPGROUP)

    @cute.jit
    def finish_sum(
        self,
        partial: Int32,
        rank: Int32,
        row0: Int32,
        column_tile: Int32,
        group: Int32,
        y: cute.Pointer,
        low: tuple,
        n: Extents,
    ):
        """A CTA's rows of the cluster's tile: the sums of all parts, in order."""
        c, lane = self.config, cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        for i in cutlass.range(warp, self.rows_of(rank), 4 * c.warpgroups, unroll=1):
            row = rank * c.rows_of_cta + i
            if row0 + row < n.rows:
                for chunk in cutlass.range_constexpr(c.tile_n // (WARP * CHUNK)):
                    column = (chunk * WARP + lane) * CHUNK
                    total = self.total(partial + (row * c.pitch + column) * 4)
                    at = column_tile * c.tile_n + column
                    if at < n.n:
                        put(y + ((Int64(row0 + row) * n.groups + group) * n.n + at), total)
                    if cutlass.const_expr(y.dtype is Float32):
                        self.put_low_rank(low, row0 + row, column_tile, column, total)

    def total(self, place: Int32) -> list:
        """A lane's numbers of a row: the sums of all parts, in order."""
        first, *others = [load_four_of(place, p) for p in range(self.config.cluster)]
        for part in others:
            first = [a + b for a, b in zip(first, part, strict=True)]
        return list(first)

    def rows_of(self, rank: Int32) -> Int32 | int:
        """The number of rows that a CTA of the cluster finishes."""
        c = self.config
        is_even = c.cluster * c.rows_of_cta == c.tile_m
        return c.rows_of_cta if is_even else cutlass.min(c.tile_m - rank * c.rows_of_cta, c.rows_of_cta)

    @cute.jit
    def put_low_rank(self, low: LowRank, row: Int32, column_tile: Int32, column: Int32, numbers: list):
        """A warp's row of a tile of columns, if it is of the low-rank query."""
        c, lane = self.config, cute.arch.lane_idx()
        at = column_tile * c.tile_n + column
        if at < low.columns:
            squares = Float32(0.0)
            for x in numbers:
                squares += x * x
            squares = cute.arch.warp_reduction_sum(squares)
            gains = four_of(low.gain + at)
            put(low.query + (Int64(row) * low.columns + at), [x * g for x, g in zip(numbers, gains, strict=True)])
            if lane == 0:
                store(low.squares + (Int64(row) * (low.columns // c.tile_n) + column_tile), squares)

    @cute.jit
    def finish_head(
        self,
        partial: Int32,
        rank: Int32,
        row0: Int32,
        head: Int32,
        y: cute.Pointer,
        how: tuple,
        n: Extents,
    ):
        """A CTA's rows of the cluster's head: its columns from all CTAs, divided by their root mean square, the last
        ones turned."""
        c, lane, (table, norm) = self.config, cute.arch.lane_idx(), how
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        for i in cutlass.range(warp, self.rows_of(rank), 4 * c.warpgroups, unroll=1):
            row = rank * c.rows_of_cta + i
            if row0 + row < n.rows:
                of_x, cos_sin, chunks = squares_of(norm, row0 + row), rotation(table, row0 + row), []
                for chunk in cutlass.range_constexpr(HEAD // (WARP * CHUNK)):
                    column = (chunk * WARP + lane) * CHUNK
                    here = partial + (row * c.pitch + column % c.tile_n) * 4
                    chunks.append(load_four_of(here, chunk * WARP * CHUNK // c.tile_n))
                of_row = factor(norm, of_x, n.k)
                chunks = [[x * of_row for x in chunk] for chunk in chunks]
                squares = Float32(0.0)
                for x in [x for chunk in chunks for x in chunk]:
                    squares += x * x
                squares = cute.arch.warp_reduction_sum(squares)
                of_head = cute.math.rsqrt(squares * (1.0 / HEAD) + norm.eps, fastmath=True)
                for chunk in cutlass.range_constexpr(HEAD // (WARP * CHUNK)):
                    z = [x * of_head for x in chunks[chunk]]
                    if cutlass.const_expr(chunk == HEAD // (WARP * CHUNK) - 1):
                        z = turned_by(z, cos_sin)
                    at = Int64(row0 + row) * n.n + head * HEAD + (chunk * WARP + lane) * CHUNK
                    put(y + at, z)

    @cute.jit
    def finish_index_query(
        self, partial: Int32, rank: Int32, row0: Int32, head: Int32, y: cute.Pointer, how: tuple, n: Extents
    ):
        """A CTA's rows of the cluster's head of an indexer's query: turned, transformed and perhaps quantized, rounded
        after each step as an array is; and the head's weights."""
        c, lane, (table, norm, weights) = self.config, cute.arch.lane_idx(), how
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        for i in cutlass.range(warp, self.rows_of(rank), 4 * c.warpgroups, unroll=1):
            row = rank * c.rows_of_cta + i
            if row0 + row < n.rows:
                at, of_x, cos_sin = Int64(row0 + row), squares_of(norm, row0 + row), rotation(table, row0 + row)
                weight = load(weights.given + (at * weights.columns + weights.column + head))
                total = self.total(partial + (row * c.pitch + lane * CHUNK) * 4)
                of_row, weight = factor(norm, of_x, n.k), weight * weights.scale
                values = cute.make_rmem_tensor(CHUNK, Float32)
                fill(values, [x * of_row for x in total])
                rounded(values, self.dtype)
                fill(values, turned_by([values[j] for j in range(CHUNK)], cos_sin))
                rounded(values, self.dtype)
                hadamard(values, lane, INDEX_D)
                place = y + ((at * n.n + head * INDEX_D) + lane * CHUNK)
                if cutlass.const_expr(c.to_fp8):
                    rounded(values, self.dtype)
                    words, of_codes = quantized(values, WARP)
                    write_words(words, place, CHUNK // 4)
                    weight *= of_codes
                else:
                    put(place, [values[j] for j in range(CHUNK)])
                if lane == 0:
                    store(weights.made + (at * (n.n // INDEX_D) + head), weight)

    def examples(self, variant: FewRowsProduct) -> tuple:
        result = "float32" if variant.to_float32 else "bytes" if variant.to_fp8 else variant.dtype
        x, w, y, table, gain, low, squares, given, weights = pointers(
            *(variant.dtype, "x", "bytes" if variant.weights else "w", result, "float32"),
            "float32",
            "x",
            *["float32"] * 3,
        )
        number = Float32(1e-6)
        return (
            *(x, w, y, table, number, gain, low, squares, i32(), i32()),
            *(given, weights, i32(), i32(), number, *(i32() for _ in range(4))),
        )


def slabs_of(n: Int32) -> Int32:
    """The number of slabs of a packed matrix, or of its tiles, that have so much of k, or so many columns."""
    return ceil_div(n, Int32(2 * SLAB)) * 2


@cute.jit
def squares_of(norm: Norm, row: Int32) -> Float32:
    """A lane's sum of squares of a row of x: asked for, and not yet waited for."""
    lane, found = cute.arch.lane_idx(), Float32(0.0)
    if lane < norm.tiles:
        found = load(norm.squares + (Int64(row) * norm.tiles + lane))
    return found


@cute.jit
def factor(norm: Norm, squares: Float32, k: Int32) -> Float32:
    """Returns what a row of x is left to be multiplied by, out of `squares_of` it."""
    found = Float32(1.0)
    if norm.tiles > 0:
        found = cute.math.rsqrt(cute.arch.warp_reduction_sum(squares) / Float32(k) + norm.eps, fastmath=True)
    return found


@cute.jit
def rotation(table: cute.Pointer, row: Int32) -> list:
    """cos and sin of a lane's two pairs of the last numbers of a row's head; 1 and 0 where they are not turned."""
    lane, first_lane = cute.arch.lane_idx(), WARP - ROPE // CHUNK
    numbers = cute.make_rmem_tensor(CHUNK, Float32)
    for j in cutlass.range_constexpr(CHUNK):
        numbers[j] = Float32((j + 1) % 2)
    if lane >= first_lane:
        place = table + (Int64(row) * ROPE + (lane - first_lane) * CHUNK)
        cute.autovec_copy(cute.make_tensor(place.align(16), cute.make_layout(CHUNK)), numbers)
    return [numbers[j] for j in range(CHUNK)]


def turned_by(z: list, cos_sin: list) -> list:
    """A lane's two pairs."""
    return [x for j in (0, 2) for x in turned(z[j], z[j + 1], cos_sin[j], cos_sin[j + 1])]


def four_of(place: cute.Pointer) -> list:
    numbers = cute.make_rmem_tensor(CHUNK, Float32)
    cute.autovec_copy(cute.make_tensor(place.align(16), cute.make_layout(CHUNK)), numbers)
    return [numbers[j] for j in range(CHUNK)]


def fill(values: cute.Tensor, numbers: list) -> None:
    for j, x in enumerate(numbers):
        values[j] = x


@cute.jit
def read_rotations(table: cute.Pointer, rotations: cute.Tensor, row0: Int32, rows: Int32):
    """cos and -sin for a thread's chunks of each row of 64."""
    thread, numbers = cute.arch.thread_idx()[0], cute.size(rotations, mode=[0])
    for i in cutlass.range_constexpr(cute.size(rotations, mode=[1])):
        row = cutlass.min(row0 + i * ROWS_OF_WARPGROUP + thread // QUAD, rows - 1)
        place = (table + (Int64(row) * ROPE + thread % QUAD * numbers)).align(16)
        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(numbers)), rotations[None, i])
        for j in cutlass.range_constexpr(numbers // 2):
            rotations[2 * j + 1, i] = -rotations[2 * j + 1, i]


def put(target: cute.Pointer, values: list) -> None:
    """Writes CHUNK numbers, rounded to the target's dtype."""
    if target.dtype is Float32:
        words = cute.make_rmem_tensor(CHUNK, Float32)
        for i, x in enumerate(values):
            words[i] = x
        cute.autovec_copy(words, cute.make_tensor(target.align(16), cute.make_layout(CHUNK)))
    else:
        pairs = cute.make_rmem_tensor(CHUNK // 2, Uint32)
        for i in range(CHUNK // 2):
            pairs[i] = round_pair(values[2 * i], values[2 * i + 1], target.dtype)
        place = cute.recast_ptr(target, dtype=Uint32).align(8)
        cute.autovec_copy(pairs, cute.make_tensor(place, cute.make_layout(CHUNK // 2)))


def compile(variant: FewRowsProduct, out_dir: Path) -> Compiled:
    tile_m = min(variant.max_rows, MOST_ROWS)
    makes = {"norms": variant.norms, "turns_back": variant.turns_back}
    makes |= {"indexes": variant.indexes, "to_fp8": variant.to_fp8, "weights": variant.weights}
    config = Config(variant.dtype, variant.parts, tile_m, **makes)
    return FewRowsProductSm90(config).compile(variant, out_dir, ctas=config.ctas, cluster=config.cluster)
