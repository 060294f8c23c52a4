"""The first kernel: scores of all keys that a query sees, and its keys in a row, tile by tile.

It is `mla_fwd_sm90` as far as the scores: CTAs share a row tile's pairs of key tiles, and left computes the scores of
even tiles, right those of odd ones, each from its own half of the columns on. So a score has the bits that it has
there. Keys that were gathered, or unpacked, are left for the second kernel, which loads columns of them.
"""

from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from kernels.abi import RowScores
from kernels.aot import Compiled
from kernels.lib.forward import Source
from kernels.lib.launch import WARPGROUP, Shapes, i32, pointers
from kernels.lib.ptx import copy_out
from kernels.lib.rows import ROWS_OF_WARPGROUP, Extents, RowTile, divide, extents, row_of, store
from kernels.lib.selections import CHUNK as CHUNK_OF_KEYS
from kernels.lib.selections import LANES_A_ROW, SelectedRows
from kernels.lib.softmax import ROWS, Softmax, by_row
from kernels.lib.splits import total_tiles
from kernels.lib.wgmma import K_MAJOR, SLAB, accumulator, multiply, operand_a, operand_b, tiled_mma, tma_atom
from kernels.packings import PACKED

from .columns_config import CHUNK, EACH, SCORES, TILE, Between, query_of
from .config import Config
from .kernel import MlaFwdSm90
from .key_tiles import Work
from .smem import LEFT, RIGHT, Barriers, Shared


class ScoresConfig(Config):
    """Splits are of pairs of tiles, so that a tile is even or odd as in `mla_fwd_sm90`."""

    unit = 2


class MlaScoresSm90(MlaFwdSm90):
    symbol = "mla_scores_sm90"

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        scores: cute.Pointer,
        tops: cute.Pointer,
        counts: cute.Pointer,
        tiles: Int32,
        gathered: cute.Pointer,  # [queries, tiles, keys, d], with zeros for absent ones
        b: Int32,
        s_q: Int32,
        h_q: Int32,
        h_kv: Int32,
        splits: Int32,
        ctas: Int32,
        k0: cute.Pointer,
        v0: cute.Pointer,
        from0: cute.Pointer,
        to0: cute.Pointer,
        s_kv0: Int32,
        s_batch0: Int32,
        topk0: Int32,
        k1: cute.Pointer,
        v1: cute.Pointer,
        from1: cute.Pointer,
        to1: cute.Pointer,
        s_kv1: Int32,
        s_batch1: Int32,
        topk1: Int32,
        stream: cuda.CUstream,
    ):
        c = self.config
        n = extents(c.tile_m, c.gathers, b, s_q, h_q, h_kv, splits, ctas)
        shapes = Shapes(c.d, b, n)
        rows = tuple(tma_atom(cpasync.CopyBulkTensorTileG2SOp(), shapes.rows(q), c.tile_m, c.columns_q))
        given = (
            Source(k0, v0, from0, to0, s_kv0, s_batch0, topk0),
            Source(k1, v1, from1, to1, s_kv1, s_batch1, topk1),
        )
        sources = tuple(self.source(kind, shapes, x) for kind, x in zip(c.sources, given, strict=False))
        left = Between(scores, tops, counts, tiles)
        self.launch_persistent(rows, sources, left, gathered, n=n, ctas=ctas, stream=stream)

    @cute.kernel
    def kernel(self, rows_of_q: tuple, sources: tuple, left: Between, gathered: cute.Pointer, n: Extents):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bar, smem = Shared.allocate(c, self.dtype)
        if warp == 0:
            with cute.arch.elect_one():
                bar.initialise(c.fillers, 0)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()  # the second kernel waits for this grid itself
        if warp < 4 * c.producers:
            self.produce(bar, smem, rows_of_q, sources, n)
        else:
            operands = tuple(source[-1] for source in sources)
            if warp < 4 * c.producers + 4:
                self.leave(LEFT, bar, smem, operands, left, gathered, n)
            else:
                self.leave(RIGHT, bar, smem, operands, left, gathered, n)

    @cute.jit
    def leave(
        self,
        side: cutlass.Constexpr,
        bar: Barriers,
        smem: Shared,
        operands: tuple,
        left: Between,
        gathered: cute.Pointer,
        n: Extents,
    ):
        """One warpgroup: every other tile of keys, of each row tile of this CTA."""
        c, thread = self.config, cute.arch.thread_idx()[0] % WARPGROUP
        qk = tiled_mma(self.dtype, TILE, K_MAJOR)
        a, b, scores = operand_a(qk, smem.q), operand_b(qk, smem.k[side]), accumulator(qk, TILE)
        softmax, fills = Softmax.of(Float32(1.0)), (Int32(0), Int32(0))
        for wave in cutlass.range(self.tile_scheduler(n, operands[0]).waves, unroll=1):
            bar.q.at(wave).wait_full()
            tile = RowTile.read(smem.info[None, 0, wave & 1], n)
            work = Work(
                tuple(self.reopen(x, tile, smem.info[None, 1 + i, wave & 1]) for i, x in enumerate(operands)),
                (),
                fills,
            )
            begin = tile.split * c.unit  # for there are as many splits as pairs, at least
            rows_before = divide(tile.inner0, n.box_inner)[0]
            first = left.of_rows(tile) + begin
            mine = work.evens if cutlass.const_expr(side == LEFT) else work.odds
            seen = SelectedRows.of(work.sources)
            for pair in cutlass.range(mine, unroll=1):
                t = 2 * pair + side
                seen.prefetch(t)
                for half in (side, 1 - side):
                    bar.k(side, half).at(work.fill(side, pair)).wait_full()
                    cute.arch.fence_proxy("async.shared", space="cta")  # the producer wrote through the generic proxy
                    multiply(qk, scores, a, b, half == side, c.blocks(side, half))
                if rows_before == cutlass.min(side, n.tiles_inner - 1):  # under the products; row tiles share the work
                    place = Int64(query_of(tile)) * left.tiles + begin + t
                    copy_keys(smem.k[side], gathered, place, thread, c.d)
                warpgroup.wait_group(0)
                for half in (LEFT, RIGHT):
                    bar.release(side, half)
                seen.mask(scores, t)
                leave_out(scores, thread, n.box_inner)
                softmax.reset()
                softmax.raise_max(scores)
                self.store(scores, softmax.row_max, left, first + t, thread)
            cute.arch.mbarrier_arrive(bar.q_empty)
            if cutlass.const_expr(side == LEFT):
                self.count(operands, tile, left, thread)
            fills = work.fills_after()

    @cute.jit
    def count(self, operands: tuple, tile: RowTile, left: Between, thread: Int32):
        """Leaves the number of tiles of keys of a query: at last, for lengths come after keys that are on their way."""
        if (tile.split == 0) & (tile.inner0 == 0):
            count = total_tiles(tuple(self.open(x, tile) for x in operands))
            if thread == 0:
                store(left.counts + query_of(tile), count)

    @cute.jit
    def store(self, scores: cute.Tensor, tops: cute.Tensor, left: Between, place: Int64, thread: Int32):
        for i in cutlass.range_constexpr(EACH // CHUNK):
            target = left.scores + (place * SCORES + (i * WARPGROUP + thread) * CHUNK)
            chunk = cute.make_tensor(scores.iterator + i * CHUNK, cute.make_layout(CHUNK))
            cute.autovec_copy(chunk, cute.make_tensor(target.align(16), cute.make_layout(CHUNK)))
        if thread % 4 == 0:
            for r in cutlass.range_constexpr(ROWS):
                store(left.tops + (place * self.config.tile_m + row_of(thread, r)), tops[r])

    def examples(self, variant: RowScores) -> tuple:
        """A second source that the variant lacks is like the first."""
        sources = [
            (*pointers(variant.dtype, keys, keys, "int32", "int32"), i32(), i32(), i32())
            for kind in (variant.sources[0], variant.sources[-1])
            for keys in ("bytes" if kind in PACKED else "keys",)
        ]
        left = (*pointers(variant.dtype, "float32", "float32", "int32"), i32(), *pointers(variant.dtype, "keys"))
        return *pointers(variant.dtype, "q"), *left, *(i32() for _ in range(6)), *sources[0], *sources[1]


@cute.jit
def leave_out(scores: cute.Tensor, thread: Int32, rows: Int32):
    """-inf for every row from this one on, which is no head."""
    if rows < ROWS_OF_WARPGROUP:
        s = by_row(scores)
        for r in cutlass.range_constexpr(ROWS):
            for i in cutlass.range_constexpr(cute.size(s, mode=[1])):
                s[r, i] = s[r, i] if row_of(thread, r) < rows else -Float32.inf


@cute.jit
def copy_keys(tile: cute.Tensor, target: cute.Pointer, place: Int64, thread: Int32, d: cutlass.Constexpr):
    """A slab tile of keys -> the tile of this number in memory; a warp moves half a row at once."""
    chunks = d // CHUNK_OF_KEYS
    rows = WARPGROUP // chunks  # that are moved at once; the swizzle is the same every LANES_A_ROW rows
    column, row0 = thread % chunks, thread // chunks
    slab, chunk = column // LANES_A_ROW, column % LANES_A_ROW
    source = tile.iterator.toint() + slab * TILE * SLAB * 2
    there = (target + ((place * TILE + row0) * d + column * CHUNK_OF_KEYS)).toint()
    for row in cutlass.range(0, TILE, LANES_A_ROW, unroll=1):
        for first in cutlass.range_constexpr(0, LANES_A_ROW, rows):
            here = source + (row + first + row0) * SLAB * 2 + (chunk ^ (first + row0)) * 16
            copy_out(there + (row + first) * d * 2, here)


def compile(variant: RowScores, out_dir: Path) -> Compiled:
    config = ScoresConfig(variant.d, variant.dtype, variant.sources)
    return MlaScoresSm90(config).compile(variant, out_dir, unit=config.unit)
