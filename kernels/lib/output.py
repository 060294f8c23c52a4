"""O from the accumulator's registers to memory: slab by slab through SMEM, or directly; final or partial."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from .launch import WARP, WARPGROUP
from .rows import ROWS, BoxedRows, RowTile
from .softmax import Softmax, by_row
from .wgmma import round_pair, round_to, store_rows, tma_tiles

BLOCK = 8  # columns of which a quad's lanes hold two each: 16 bytes when rounded


@dataclass(frozen=True)
class SlabStores:
    """One warpgroup's columns of O, by TMA, which leaves out rows that do not exist."""

    atom: cute.CopyAtom
    places: tuple[cute.Tensor, ...]  # in SMEM, (rows, columns) each, taken in turn
    barrier_id: int
    thread: Int32

    @cute.jit
    def store(
        self, i: cutlass.Constexpr, mma: cute.TiledMma, acc: cute.Tensor, rounded: cute.Tensor, target: cute.Tensor
    ):
        """Stores slab i: acc, rounded on the way, to `target`. Before the first slab, all earlier stores must have been
        awaited.
        """
        if cutlass.const_expr(i >= len(self.places)):
            self.await_reads(len(self.places) - 1)
        place = self.places[i % len(self.places)]
        round_to(rounded, acc)
        store_rows(mma, acc, rounded, place, self.thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=self.barrier_id, number_of_threads=WARPGROUP)
        if self.is_issuer():
            gmem, smem = tma_tiles(self.atom, target, place)
            with cute.arch.elect_one():
                cute.copy(self.atom, smem, gmem)
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def await_reads(self, under_way: cutlass.Constexpr = 0):
        """Waits until TMA has read all slabs except so many out of SMEM."""
        if self.is_issuer():
            cute.arch.cp_async_bulk_wait_group(under_way, read=True)
        cute.arch.barrier(barrier_id=self.barrier_id, number_of_threads=WARPGROUP)

    def is_issuer(self) -> cutlass.Boolean:
        return cute.arch.make_warp_uniform(self.thread // WARP) == 0


@cute.jit
def store_output(
    acc: cute.Tensor,
    factor: cute.Tensor,
    o: cute.Pointer,
    tile: RowTile,
    boxed: BoxedRows,
    column0: Int32,
    thread: Int32,
    d: int,
):
    """o[row, column0:] <- factor * acc, rounded, for the rows that exist.

    A lane of a quad holds two columns of each block of eight. Four blocks at a time are transposed within the quad, so
    that each lane has a whole block, 16 bytes, to store, and the quad 64 bytes of a row. All of a row are rounded, then
    transposed, then stored: group by group, each would wait for its own shuffles.
    """
    lane = thread % 4
    odd, high = lane % 2 == 1, lane // 2 == 1
    rows = by_row(acc)
    groups = cute.size(rows, mode=[1]) // 8
    packed = cute.make_rmem_tensor((4, groups), Uint32)
    for r in cutlass.range_constexpr(ROWS):
        exists, query, head = tile.place(boxed, r)
        target = o + (tile.row_index(query, head) * d + column0 + lane * BLOCK)
        for i in cutlass.range_constexpr(4 * groups):
            packed[i] = round_pair(rows[r, 2 * i] * factor[r], rows[r, 2 * i + 1] * factor[r], o.dtype)
        for group in cutlass.range_constexpr(groups):
            transpose_in_quad(packed[None, group], odd, high)
        if exists:
            for group in cutlass.range_constexpr(groups):
                place = cute.make_tensor(
                    cute.recast_ptr(target + group * 4 * BLOCK, dtype=Uint32).align(16), cute.make_layout(4)
                )
                cute.autovec_copy(packed[None, group], place)


@cute.jit
def store_part(
    acc: cute.Tensor,
    softmax: Softmax,
    parts: cute.Pointer,
    tile: RowTile,
    boxed: BoxedRows,
    column0: Int32,
    thread: Int32,
    d: int,
):
    """`store_output` in fp32; it stores nothing for a row that saw no key, whose lse says so.

    Columns go out two blocks of eight at a time: lanes 0 and 2 of a quad take the first, lanes 1 and 3 the second.
    """
    lane = thread % 4
    odd = lane % 2 == 1
    rows = by_row(acc)
    values = cute.make_rmem_tensor(4, Float32)
    for r in cutlass.range_constexpr(ROWS):
        exists, query, head = tile.place(boxed, r)
        target = parts + (tile.row_index(query, head) * d + column0 + lane % 2 * BLOCK + lane // 2 * 4)
        exists = exists & (softmax.row_sum[r] != 0.0)
        for pair in cutlass.range_constexpr(cute.size(rows, mode=[1]) // 4):
            for i in cutlass.range_constexpr(2):
                first, second = (rows[r, 4 * pair + 2 * block + i] * softmax.factor[r] for block in range(2))
                received = cute.arch.shuffle_sync_bfly(first if odd else second, offset=1)
                values[i], values[2 + i] = received if odd else first, second if odd else received
            if exists:
                cute.autovec_copy(values, cute.make_tensor((target + pair * 2 * BLOCK).align(16), cute.make_layout(4)))


@cute.jit
def transpose_in_quad(x: cute.Tensor, odd: cutlass.Boolean, high: cutlass.Boolean):
    """x[i] of lane j <-> x[j] of lane i, for the four lanes of a quad."""
    for bit, offset, pairs in ((odd, 1, ((0, 1), (2, 3))), (high, 2, ((0, 2), (1, 3)))):
        for i, j in pairs:
            received = cute.arch.shuffle_sync_bfly(x[i] if bit else x[j], offset=offset)
            x[i], x[j] = received if bit else x[i], x[j] if bit else received
