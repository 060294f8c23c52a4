"""Attention for Hopper to few queries over a latent, head dimension 512, with the bits of `mla_fwd_sm90`.

Where tiles of rows are too few for the chip, CTAs share a tile's keys for the scores (`scores`), because a score
depends on no other one. The sums over keys have an order, so CTAs share out the columns of o: here each has 64 of them,
and adds all keys in the order in which `mla_fwd_sm90` does. Nothing is merged, and no sum is taken in parts.

    left    P of even tiles, as both halves of o want it    -> SMEM     P of the next pair
                                                                \\
    right   P of odd tiles -> SMEM                                > o += P0 V0, o += P1 V1, or in the other order

The greatest score of every tile is known from the start. So each side knows the running maxima without the other, and
a thread's exponentials, sums and factors are those of `kernels.lib.softmax`, in the same order. A warp loads scores and
columns of keys. All CTAs of a row tile compute the same P: what that costs is less than what another launch would.
"""

from dataclasses import dataclass
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from kernels.abi import RowColumns
from kernels.aot import Compiled
from kernels.lib.launch import WARPGROUP, Kernel, Shapes, i32, pointers
from kernels.lib.output import store_output
from kernels.lib.pipeline import Ring
from kernels.lib.ptx import arrive_if
from kernels.lib.rows import BoxedRows, Extents, PlacedTile, divide, extents, load, row_of
from kernels.lib.softmax import ROWS, RowResults, Softmax, rescale_rows, scale_rows
from kernels.lib.tiles import TileAllocator
from kernels.lib.wgmma import (
    K_MAJOR,
    MN_MAJOR,
    SLAB,
    accumulator,
    multiply,
    operand_a,
    operand_b,
    round_to,
    store_rows,
    tiled_mma,
    tma_atom,
    tma_tiles,
    transposed,
)

from .columns_config import CHUNK, EACH, SCORES, SCORES_BYTES, TILE, Between, Config, query_of
from .consumer import hand_over, take_over
from .smem import EVEN, LEFT, ODD, RIGHT

BOTH_MET = 1  # a named barrier: all threads of both sides


@dataclass(frozen=True)
class Shared:
    scores: cute.Tensor  # (SCORES, stage), as they lie in memory
    v: cute.Tensor  # (keys, columns, stage)
    p: cute.Tensor  # (64, keys, place): of both tiles of a pair, of two pairs by turns
    sums: cute.Tensor  # (64, 1): left's, at last
    ring: Ring  # of tiles of keys: scores and columns

    @staticmethod
    def allocate(c: Config, dtype) -> "Shared":
        smem = TileAllocator(dtype)
        v, p = smem.tile(TILE, c.tile_n, c.stages), smem.tile(c.tile_m, TILE, 4)
        scores = smem.allocate_tensor(Float32, cute.make_layout((SCORES, c.stages)), 128)
        sums = smem.allocate_tensor(Float32, cute.make_layout((c.tile_m, 1)), 16)
        return Shared(scores, v, p, sums, Ring(*(smem.allocate_array(Int64, c.stages) for _ in range(2)), c.stages))

    def initialise(self) -> None:
        """By one thread: right reads the columns of all tiles, left the scores of even ones."""
        for stage in range(self.ring.stages):
            readers = (2 if stage % 2 == EVEN else 1) * WARPGROUP
            Ring(self.ring.full + stage, self.ring.empty + stage).initialise(1, readers)

    @staticmethod
    def place(pair: Int32, which: int) -> Int32:
        """The place of P of a pair's tile."""
        return pair % 2 * 2 + which


@dataclass(frozen=True)
class Side:
    """A thread's state."""

    smem: Shared
    thread: Int32
    softmax: Softmax  # of this side's tiles
    scores: cute.Tensor  # of this side's tile of a pair; then their exponentials
    tops: cute.Tensor  # (tile of a pair, ROWS): the greatest of each row
    next_tops: cute.Tensor
    qk: cute.TiledMma  # whose accumulator scores are
    p: cute.Tensor  # rounded
    out: cute.Tensor  # right's alone, as what follows
    steps: Softmax  # its maximum rises by single tiles
    pv: cute.TiledMma
    a: cute.Tensor
    b: cute.Tensor

    @staticmethod
    def of(smem: Shared, dtype, scale_log2: Float32) -> "Side":
        qk, pv = tiled_mma(dtype, TILE, K_MAJOR), tiled_mma(dtype, SLAB, MN_MAJOR)
        scores, tops = accumulator(qk, TILE), cute.make_rmem_tensor((2, ROWS), Float32)
        return Side(
            smem,
            cute.arch.thread_idx()[0] % WARPGROUP,
            Softmax.of(scale_log2),
            scores,
            tops,
            next_tops=cute.make_rmem_tensor((2, ROWS), Float32),
            qk=qk,
            p=cute.make_rmem_tensor(EACH, dtype),
            out=accumulator(pv, SLAB),
            steps=Softmax.of(scale_log2),
            pv=pv,
            a=operand_a(pv, smem.p),
            b=operand_b(pv, transposed(smem.v)),
        )


class MlaColumnsSm90(Kernel):
    symbol = "mla_columns_sm90"

    @cute.jit
    def __call__(
        self,
        gathered: cute.Pointer,  # [b * s_q, tiles, keys, d]
        scores: cute.Pointer,
        tops: cute.Pointer,
        counts: cute.Pointer,
        tiles: Int32,
        o: cute.Pointer,
        sink: cute.Pointer,
        lse: cute.Pointer,
        scale_log2: Float32,
        b: Int32,
        s_q: Int32,
        h_q: Int32,
        stream: cuda.CUstream,
    ):
        c = self.config
        n = extents(c.tile_m, True, b, s_q, h_q, Int32(1), Int32(1), Int32(1))
        keys = Shapes(c.d, b * s_q, n).keys(gathered, tiles * TILE)
        columns = tuple(tma_atom(cpasync.CopyBulkTensorTileG2SOp(), keys, TILE, c.tile_n))
        left, ctas = Between(scores, tops, counts, tiles), n.tiles * (c.d // c.tile_n)
        self.launch(columns, left, o, sink, lse, scale_log2, n, ctas=ctas, stream=stream)

    @cute.kernel
    def kernel(
        self,
        columns: tuple,
        left: Between,
        o: cute.Pointer,
        sink: cute.Pointer,
        lse: cute.Pointer,
        scale_log2: Float32,
        n: Extents,
    ):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = Shared.allocate(c, self.dtype)
        if warp == 0:
            with cute.arch.elect_one():
                smem.initialise()
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        i, column = divide(cute.arch.block_idx()[0], Int32(c.d // c.tile_n))
        query, inner = divide(i, n.tiles_inner)
        batch, outer = divide(query, n.s_q)
        tile = PlacedTile(n, Int32(0), batch, Int32(0), inner * n.box_inner, outer, outer)
        results = RowResults(sink, lse, lse)
        cute.arch.griddepcontrol_wait()
        if warp == 8:
            self.load(smem, columns, left, tile, column, load(left.counts + query))
        elif column < c.d // c.tile_n // 2:
            if warp < 4:
                self.attend(LEFT, LEFT, smem, left, tile, results, o, column, scale_log2)
            else:
                self.attend(RIGHT, LEFT, smem, left, tile, results, o, column, scale_log2)
        else:
            if warp < 4:
                self.attend(LEFT, RIGHT, smem, left, tile, results, o, column, scale_log2)
            else:
                self.attend(RIGHT, RIGHT, smem, left, tile, results, o, column, scale_log2)

    @cute.jit
    def load(self, smem: Shared, columns: tuple, left: Between, tile: PlacedTile, column: Int32, count: Int32):
        """A warp loads the scores of all keys, and this CTA's columns of them."""
        c, (atom, keys) = self.config, columns
        keys = cute.local_tile(keys[None, None, 0, query_of(tile)], (TILE, c.tile_n), (None, None))
        gV, sV = tma_tiles(atom, keys, smem.v)
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=8 * SCORES_BYTES)
        first = left.scores + left.of_rows(tile) * SCORES
        for t in cutlass.range(count, unroll=1):
            state = smem.ring.at(t)
            state.wait_empty()
            source = cute.make_tensor((first + t * SCORES).align(16), cute.make_layout(SCORES))
            with cute.arch.elect_one():
                state.expect_full(c.stage_bytes)
                cute.copy(bulk, source, smem.scores[None, state.index], mbar_ptr=state.full)
            cute.copy(atom, gV[None, t, column], sV[None, state.index], tma_bar_ptr=state.full)

    @cute.jit
    def attend(
        self,
        side: cutlass.Constexpr,
        half: cutlass.Constexpr,
        smem: Shared,
        left: Between,
        tile: PlacedTile,
        results: RowResults,
        o: cute.Pointer,
        column: Int32,
        scale_log2: Float32,
    ):
        """One warpgroup, in a CTA with columns of this half of o."""
        c, w = self.config, Side.of(smem, self.dtype, scale_log2)
        s, boxed = w.softmax, BoxedRows.of(tile.n, Int32(0), w.thread, one_query=True)
        s.start(tile, boxed, results)
        w.steps.reset()
        w.out.fill(0.0)
        count, first = load(left.counts + query_of(tile)), left.of_rows(tile)
        self.read_ahead(w, left, first, 0, count)
        for pair in cutlass.range(count // 2, unroll=1):
            self.pair(side, half, w, left, first, pair, count)
        if count % 2 == 1:
            self.pair(side, half, w, left, first, count // 2, count, has_odd=False)
        s.sum_columns()
        if cutlass.const_expr(side == LEFT):
            hand_over(w.smem.sums, 0, s.row_sum, w.thread)
            cute.arch.barrier(barrier_id=BOTH_MET, number_of_threads=2 * WARPGROUP)
        else:
            warpgroup.wait_group(0)
            cute.arch.barrier(barrier_id=BOTH_MET, number_of_threads=2 * WARPGROUP)
            take_over(w.smem.sums, 0, s.factor, w.thread)
            s.row_sum.store(s.row_sum.load() + s.factor.load())
            writer = w.thread if column == 0 else Int32(1)  # a lane that writes nothing, where another CTA does
            s.finish(tile, boxed, writer, results, writes_lse=half == LEFT)
            store_output(w.out, s.factor, o, tile, boxed, column * c.tile_n, w.thread, c.d)

    @cute.jit
    def read_ahead(self, w: Side, left: Between, first: Int64, pair: Int32 | int, count: Int32):
        """Reads the greatest scores of a pair's tiles; a tile that is not there has none."""
        w.next_tops.fill(-Float32.inf)
        for which in (EVEN, ODD):
            t = 2 * pair + which
            if t < count:
                for r in cutlass.range_constexpr(ROWS):
                    place = (first + t) * self.config.tile_m + row_of(w.thread, r)
                    w.next_tops[which, r] = load(left.tops + place)

    @cute.jit
    def read_scores(self, side: cutlass.Constexpr, w: Side, pair: Int32):
        """Reads the scores of this side's tile."""
        state = w.smem.ring.at(2 * pair + side)
        state.wait_full()
        for i in cutlass.range_constexpr(EACH // CHUNK):
            place = w.smem.scores.iterator + (state.index * SCORES + (i * WARPGROUP + w.thread) * CHUNK)
            chunk = cute.make_tensor(w.scores.iterator + i * CHUNK, cute.make_layout(CHUNK))
            cute.autovec_copy(cute.make_tensor(place.align(16), cute.make_layout(CHUNK)), chunk)

    @cute.jit
    def pair(
        self,
        side: cutlass.Constexpr,
        half: cutlass.Constexpr,
        w: Side,
        left: Between,
        first: Int64,
        pair: Int32,
        count: Int32,
        has_odd: cutlass.Constexpr = True,
    ):
        """P of this side's tile of a pair; right then adds both tiles to o."""
        w.tops.store(w.next_tops.load())
        self.read_ahead(w, left, first, pair + 1, count)
        if cutlass.const_expr(side == LEFT or has_odd):
            self.read_scores(side, w, pair)
        if cutlass.const_expr(side == LEFT):
            w.smem.ring.at(2 * pair).arrive_empty()
            self.left_weights(half, w, pair, has_odd)
        else:
            self.right_weights(w, pair, has_odd)
        cute.arch.fence_proxy("async.shared", space="cta")
        if cutlass.const_expr(side == RIGHT):
            warpgroup.wait_group(0)
            for which in (EVEN, ODD):  # of the pair before
                arrive_if(w.smem.ring.at(2 * pair - 2 + which).empty, Int32(pair > 0))
        cute.arch.barrier(barrier_id=BOTH_MET, number_of_threads=2 * WARPGROUP)
        if cutlass.const_expr(side == RIGHT):
            self.add(half, w, pair, has_odd)

    def left_weights(self, half: int, w: Side, pair: Int32, has_odd: bool) -> None:
        """P of an even tile under the maximum so far, or for the right half of o under that with the odd tile."""
        s = w.softmax
        self.rise(s, w, EVEN)
        s.exponentiate(w.scores)
        if has_odd:
            if half == LEFT:
                round_to(w.p, w.scores)
            self.rise(s, w, ODD)
            if half == RIGHT:
                scale_rows(w.scores, s.factor)
                round_to(w.p, w.scores)
        else:
            round_to(w.p, w.scores)
        self.store_weights(w, pair, EVEN)

    def right_weights(self, w: Side, pair: Int32, has_odd: bool) -> None:
        """P of an odd tile; what the whole pair does to the maximum."""
        s = w.softmax
        self.rise(s, w, *((EVEN, ODD) if has_odd else (EVEN,)))
        if has_odd:
            s.exponentiate(w.scores)
            round_to(w.p, w.scores)
            self.store_weights(w, pair, ODD)

    @cute.jit
    def rise(self, s: Softmax, w: Side, *tiles: cutlass.Constexpr):
        """The maximum rises by these tiles of the pair at once; updates factor and sum."""
        s.remember_max()
        for r in cutlass.range_constexpr(ROWS):
            for which in tiles:
                s.row_max[r] = cute.arch.fmax(s.row_max[r], w.tops[which, r])
        s.decay()

    @cute.jit
    def step(self, s: Softmax, w: Side, which: cutlass.Constexpr):
        """`rise` of a maximum that has no sum."""
        s.remember_max()
        for r in cutlass.range_constexpr(ROWS):
            s.row_max[r] = cute.arch.fmax(s.row_max[r], w.tops[which, r])
            s.factor[r] = s.factor_of(r)

    def store_weights(self, w: Side, pair: Int32, which: int) -> None:
        store_rows(w.qk, w.scores, w.p, w.smem.p[None, None, w.smem.place(pair, which)], w.thread)

    @cute.jit
    def add(self, half: cutlass.Constexpr, w: Side, pair: Int32, has_odd: cutlass.Constexpr):
        """o += P V of both tiles, in the order of this half; the last products stay in flight."""
        if cutlass.const_expr(half == LEFT):
            self.step(w.steps, w, EVEN)
            rescale_rows(w.out, w.steps.factor, pair == 0)
            self.multiply(w, pair, EVEN, pair == 0)
            if cutlass.const_expr(has_odd):
                warpgroup.wait_group(0)
                self.step(w.steps, w, ODD)
                rescale_rows(w.out, w.steps.factor)
                self.multiply(w, pair, ODD, False)
        else:
            rescale_rows(w.out, w.softmax.factor, pair == 0)
            if cutlass.const_expr(has_odd):
                self.multiply(w, pair, ODD, pair == 0)
                self.multiply(w, pair, EVEN, False)
            else:
                self.multiply(w, pair, EVEN, pair == 0)

    def multiply(self, w: Side, pair: Int32, which: int, fresh: bool | cutlass.Boolean) -> None:
        state = w.smem.ring.at(2 * pair + which)
        state.wait_full()
        a, b = w.a[None, None, None, w.smem.place(pair, which)], w.b[None, None, None, state.index]
        multiply(w.pv, w.out, a, b, fresh)

    def examples(self, variant: RowColumns) -> tuple:
        arrays = pointers(variant.dtype, "keys", "float32", "float32", "int32")
        results = pointers(variant.dtype, "o", "float32", "float32")
        return *arrays, i32(), *results, Float32(1.0), *(i32() for _ in range(3))


def compile(variant: RowColumns, out_dir: Path) -> Compiled:
    return MlaColumnsSm90(Config(variant.d, variant.dtype)).compile(variant, out_dir)
