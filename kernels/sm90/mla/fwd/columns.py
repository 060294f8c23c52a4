"""Attention for Hopper to few queries over a latent, head dimension 512, with the bits of `mla_fwd_sm90`.

Where tiles of rows are too few for the chip, CTAs share a tile's keys for the scores (`scores`), because a score
depends on no other one. The sums over keys have an order, so CTAs share out the columns of o: here each has 64 of them,
and adds all keys in the order in which `mla_fwd_sm90` does. Nothing is merged, and no sum is taken in parts.

    left    P of even tiles, as this half of o wants it -> SMEM  \\
    right   P of odd tiles                              -> SMEM   > middle   o += P0 V0, o += P1 V1, or the other way

The greatest score of every tile is known from the start. So each side knows the running maxima without the other, and
runs ahead of the products as far as there are places for P; a thread's exponentials, sums and factors are those of
`kernels.lib.softmax`, in the same order. A warp loads scores and columns of keys. All CTAs of a row tile compute the
same P: what that costs is less than what another launch would.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
from kernels.lib.softmax import ROWS, RowResults, Softmax, scale_rows
from kernels.lib.tiles import TileAllocator
from kernels.lib.wgmma import (
    K_MAJOR,
    MN_MAJOR,
    SLAB,
    accumulator,
    multiply,
    not_,
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

ALL_MET = 1  # a named barrier: all threads but those of the warp that loads


@dataclass(frozen=True)
class Shared:
    scores: cute.Tensor  # (SCORES, stage), as they lie in memory
    v: cute.Tensor  # (keys, columns, stage)
    p: cute.Tensor  # (64, keys, place)
    sums: cute.Tensor  # (64, side), at last
    keys: Ring  # of tiles of keys: scores and columns
    weights: Ring  # of tiles of keys: P

    @staticmethod
    def allocate(c: Config, dtype) -> "Shared":
        smem = TileAllocator(dtype)
        v, p = smem.tile(TILE, c.tile_n, c.stages), smem.tile(c.tile_m, TILE, c.places)
        scores = smem.allocate_tensor(Float32, cute.make_layout((SCORES, c.stages)), 128)
        sums = smem.allocate_tensor(Float32, cute.make_layout((c.tile_m, 2)), 16)
        rings = (Ring(*(smem.allocate_array(Int64, n) for _ in range(2)), n) for n in (c.stages, c.places))
        return Shared(scores, v, p, sums, *rings)

    def initialise(self) -> None:
        """Initialises both rings, by one thread: a side reads a tile's scores, and the middle its columns."""
        self.keys.initialise(1, 2 * WARPGROUP)
        self.weights.initialise(WARPGROUP, WARPGROUP)


@dataclass(frozen=True)
class Tops:
    """The greatest scores of a pair's tiles, by (tile, ROWS): of this pair, and of the next one."""

    now: cute.Tensor
    next: cute.Tensor

    @staticmethod
    def of() -> "Tops":
        return Tops(*(cute.make_rmem_tensor((2, ROWS), Float32) for _ in range(2)))


class Products(NamedTuple):
    """o += P V"""

    pv: cute.TiledMma
    a: cute.Tensor
    b: cute.Tensor
    out: cute.Tensor


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
        count, first = load(left.counts + query), left.of_rows(tile)
        is_left = column < c.d // c.tile_n // 2
        if warp == 12:
            self.load(smem, columns, left, tile, column, count)
        elif warp >= 8:
            if is_left:
                self.add(LEFT, smem, left, tile, results, o, column, scale_log2, count, first)
            else:
                self.add(RIGHT, smem, left, tile, results, o, column, scale_log2, count, first)
        elif warp >= 4:
            self.weigh(RIGHT, RIGHT, smem, left, scale_log2, count, first)
        elif is_left:
            self.weigh(LEFT, LEFT, smem, left, scale_log2, count, first)
        else:
            self.weigh(LEFT, RIGHT, smem, left, scale_log2, count, first)

    @cute.jit
    def load(self, smem: Shared, columns: tuple, left: Between, tile: PlacedTile, column: Int32, count: Int32):
        """A warp loads the scores of all keys, and this CTA's columns of them."""
        c, (atom, keys) = self.config, columns
        keys = cute.local_tile(keys[None, None, 0, query_of(tile)], (TILE, c.tile_n), (None, None))
        gV, sV = tma_tiles(atom, keys, smem.v)
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=8 * SCORES_BYTES)
        first = left.scores + left.of_rows(tile) * SCORES
        for t in cutlass.range(count, unroll=1):
            state = smem.keys.at(t)
            state.wait_empty()
            source = cute.make_tensor((first + t * SCORES).align(16), cute.make_layout(SCORES))
            with cute.arch.elect_one():
                state.expect_full(c.stage_bytes)
                cute.copy(bulk, source, smem.scores[None, state.index], mbar_ptr=state.full)
            cute.copy(atom, gV[None, t, column], sV[None, state.index], tma_bar_ptr=state.full)

    @cute.jit
    def weigh(
        self,
        side: cutlass.Constexpr,
        half: cutlass.Constexpr,
        smem: Shared,
        left: Between,
        scale_log2: Float32,
        count: Int32,
        first: Int64,
    ):
        """One warpgroup: P of every other tile, in a CTA with columns of this half of o."""
        s, tops, thread = Softmax.of(scale_log2), Tops.of(), cute.arch.thread_idx()[0] % WARPGROUP
        s.reset()
        self.read_ahead(tops, left, first, 0, count, thread)
        for pair in cutlass.range(count // 2, unroll=1):
            self.weigh_pair(side, half, smem, s, tops, left, first, pair, count, thread)
        if count % 2 == 1:
            self.weigh_pair(side, half, smem, s, tops, left, first, count // 2, count, thread, has_odd=False)
        s.sum_columns()
        hand_over(smem.sums, side, s.row_sum, thread)
        self.meet()

    @cute.jit
    def weigh_pair(
        self,
        side: cutlass.Constexpr,
        half: cutlass.Constexpr,
        smem: Shared,
        s: Softmax,
        tops: Tops,
        left: Between,
        first: Int64,
        pair: Int32,
        count: Int32,
        thread: Int32,
        has_odd: cutlass.Constexpr = True,
    ):
        """P of this side's tile of a pair."""
        qk = tiled_mma(self.dtype, TILE, K_MAJOR)  # whose accumulator scores are
        scores, p = accumulator(qk, TILE), cute.make_rmem_tensor(EACH, self.dtype)
        self.go_on(tops, left, first, pair, count, thread)
        t = 2 * pair + side
        if cutlass.const_expr(side == LEFT or has_odd):
            self.read_scores(smem, scores, t, thread)
        if cutlass.const_expr(side == LEFT):
            self.left_weights(half, s, tops, scores, p, has_odd)
        else:
            self.rise(s, tops, *((EVEN, ODD) if has_odd else (EVEN,)))
            if cutlass.const_expr(has_odd):
                s.exponentiate(scores)
                round_to(p, scores)
        if cutlass.const_expr(side == LEFT or has_odd):
            place = smem.weights.at(t)
            place.wait_empty()
            store_rows(qk, scores, p, smem.p[None, None, place.index], thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            place.arrive_full()

    def left_weights(
        self, half: int, s: Softmax, tops: Tops, scores: cute.Tensor, p: cute.Tensor, has_odd: bool
    ) -> None:
        """P of an even tile under the maximum so far, or for the right half of o under that with the odd tile."""
        self.rise(s, tops, EVEN)
        s.exponentiate(scores)
        if half == LEFT or not has_odd:
            round_to(p, scores)
        if has_odd:
            self.rise(s, tops, ODD)
            if half == RIGHT:
                scale_rows(scores, s.factor)
                round_to(p, scores)

    @cute.jit
    def add(
        self,
        half: cutlass.Constexpr,
        smem: Shared,
        left: Between,
        tile: PlacedTile,
        results: RowResults,
        o: cute.Pointer,
        column: Int32,
        scale_log2: Float32,
        count: Int32,
        first: Int64,
    ):
        """One warpgroup, in the middle: o += P V of all tiles, in a CTA with columns of this half of o."""
        c, thread = self.config, cute.arch.thread_idx()[0] % WARPGROUP
        s, tops, boxed = Softmax.of(scale_log2), Tops.of(), BoxedRows.of(tile.n, Int32(0), thread, one_query=True)
        pv = tiled_mma(self.dtype, SLAB, MN_MAJOR)
        w = Products(pv, operand_a(pv, smem.p), operand_b(pv, transposed(smem.v)), accumulator(pv, SLAB))
        s.start(tile, boxed, results)
        w.out.fill(0.0)
        self.read_ahead(tops, left, first, 0, count, thread)
        for pair in cutlass.range(count // 2, unroll=1):
            self.go_on(tops, left, first, pair, count, thread)
            if cutlass.const_expr(half == LEFT):
                self.add_tiles(smem, w, s, tops, pair, EVEN)
                self.add_tiles(smem, w, s, tops, pair, ODD)
            else:
                self.add_tiles(smem, w, s, tops, pair, ODD, EVEN)
        if count % 2 == 1:
            self.go_on(tops, left, first, count // 2, count, thread)
            self.add_tiles(smem, w, s, tops, count // 2, EVEN)
        warpgroup.wait_group(0)
        self.meet()
        take_over(smem.sums, LEFT, s.factor, thread)
        take_over(smem.sums, RIGHT, s.row_sum, thread)
        s.row_sum.store(s.row_sum.load() + s.factor.load())
        writer = thread if column == 0 else Int32(1)  # a lane that writes nothing, where another CTA does
        s.finish(tile, boxed, writer, results, writes_lse=half == LEFT)
        store_output(w.out, s.factor, o, tile, boxed, column * c.tile_n, thread, c.d)

    @cute.jit
    def add_tiles(self, smem: Shared, w: Products, s: Softmax, tops: Tops, pair: Int32, *tiles: cutlass.Constexpr):
        """o += P V of one or both tiles of a pair, under one maximum; the products stay in flight."""
        s.remember_max()
        self.raise_max(s, tops, *tiles)
        for r in cutlass.range_constexpr(ROWS):
            s.factor[r] = s.factor_of(r)
        fresh = pair == 0 if len(tiles) > 1 or tiles[0] == EVEN else False
        rises = not_(fresh) & cute.arch.vote_any_sync((s.factor[0] != 1.0) | (s.factor[1] != 1.0))
        for i, which in enumerate(tiles):
            state, place = (ring.at(2 * pair + which) for ring in (smem.keys, smem.weights))
            state.wait_full()
            place.wait_full()
            if cutlass.const_expr(i == 0):
                warpgroup.wait_group(0)
                if rises:
                    scale_rows(w.out, s.factor)
            a, b = w.a[None, None, None, place.index], w.b[None, None, None, state.index]
            multiply(w.pv, w.out, a, b, fresh if i == 0 else False)
        for before in range(len(tiles)):  # which have been read
            self.release(smem, 2 * pair + min(tiles) - 1 - before)

    def release(self, smem: Shared, t: Int32) -> None:
        """Gives back the places of a tile, if there is one of this number."""
        for ring in (smem.keys, smem.weights):
            arrive_if(ring.at(t).empty, Int32(t >= 0))

    @cute.jit
    def go_on(self, tops: Tops, left: Between, first: Int64, pair: Int32, count: Int32, thread: Int32):
        """To a pair: what was read ahead is of this one now."""
        tops.now.store(tops.next.load())
        self.read_ahead(tops, left, first, pair + 1, count, thread)

    @cute.jit
    def read_ahead(self, tops: Tops, left: Between, first: Int64, pair: Int32 | int, count: Int32, thread: Int32):
        """Reads the greatest scores of a pair's tiles; a tile that is not there has none."""
        tops.next.fill(-Float32.inf)
        for which in (EVEN, ODD):
            t = 2 * pair + which
            if t < count:
                for r in cutlass.range_constexpr(ROWS):
                    place = (first + t) * self.config.tile_m + row_of(thread, r)
                    tops.next[which, r] = load(left.tops + place)

    @cute.jit
    def read_scores(self, smem: Shared, scores: cute.Tensor, t: Int32, thread: Int32):
        """Reads the scores of a tile, and gives their place back."""
        state = smem.keys.at(t)
        state.wait_full()
        for i in cutlass.range_constexpr(EACH // CHUNK):
            place = smem.scores.iterator + (state.index * SCORES + (i * WARPGROUP + thread) * CHUNK)
            chunk = cute.make_tensor(scores.iterator + i * CHUNK, cute.make_layout(CHUNK))
            cute.autovec_copy(cute.make_tensor(place.align(16), cute.make_layout(CHUNK)), chunk)
        state.arrive_empty()

    @cute.jit
    def rise(self, s: Softmax, tops: Tops, *tiles: cutlass.Constexpr):
        """The maximum rises by these tiles of the pair at once; updates factor and sum."""
        s.remember_max()
        self.raise_max(s, tops, *tiles)
        s.decay()

    @cute.jit
    def raise_max(self, s: Softmax, tops: Tops, *tiles: cutlass.Constexpr):
        for r in cutlass.range_constexpr(ROWS):
            for which in tiles:
                s.row_max[r] = cute.arch.fmax(s.row_max[r], tops.now[which, r])

    def meet(self) -> None:
        cute.arch.barrier(barrier_id=ALL_MET, number_of_threads=3 * WARPGROUP)

    def examples(self, variant: RowColumns) -> tuple:
        arrays = pointers(variant.dtype, "keys", "float32", "float32", "int32")
        results = pointers(variant.dtype, "o", "float32", "float32")
        return *arrays, i32(), *results, Float32(1.0), *(i32() for _ in range(3))


def compile(variant: RowColumns, out_dir: Path) -> Compiled:
    return MlaColumnsSm90(Config(variant.d, variant.dtype)).compile(variant, out_dir)
