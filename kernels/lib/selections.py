"""Keys that are selected by index: a list per query, gathered row by row.

An index < 0 or >= s_kv is absent, and so is all behind the query's length. What is absent is filled with zeros and
masked, so that nothing of a key that no query selects is ever read.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from .rows import ROWS, BoxedRows, RowTile, load
from .softmax import by_row
from .wgmma import SLAB

CHUNK = 8  # elements of one 16-byte copy
LANES_A_ROW = SLAB // CHUNK  # neighbouring lanes copy one 128-byte row of a slab


class SelectionOperands(NamedTuple):
    """Query i sees the keys indices[i, :length[i]] of s_kv."""

    keys: cute.Pointer  # [b, s_kv, d], or a pool [s_kv, d]
    indices: cute.Pointer  # int32 [b, s_q, topk]
    length: cute.Pointer  # int32 [b, s_q], any value
    s_kv: Int32
    s_batch: Int32  # keys from one batch entry's to the next's: s_kv, or 0 where all share a pool
    topk: Int32

    def of_query(self, tile: RowTile, tile_n: int, d: int, skipped: Int32, length: Int32) -> "Selection":
        keys = self.keys + Int64(tile.batch) * self.s_batch * d
        indices = tile.at_query(self.indices, tile.first_query, self.topk) + skipped
        return Selection(self, tile_n, d, keys, indices, skipped, length)


@dataclass(frozen=True)
class Selection:
    """The selected keys of the one query whose heads make up a tile."""

    operands: SelectionOperands
    tile_n: int
    d: int
    keys: cute.Pointer  # of this tile's batch entry
    indices: cute.Pointer  # of this query, of which `skipped` come before
    skipped: Int32
    length: Int32

    @property
    def tiles(self) -> Int32:
        return (self.length + self.tile_n - 1) // self.tile_n

    @cute.jit
    def read(self, position: Int32) -> Int32:
        """The list's entry at any position, to be judged by `is_present` where it is needed: loads stay in flight."""
        return load(self.indices + cutlass.max(cutlass.min(position, self.length - 1), Int32(0)))

    def is_present(self, position: Int32, index: Int32) -> cutlass.Boolean:
        return (position < self.length) & (index >= 0) & (index < self.operands.s_kv)

    def publish(self, slot: cute.Tensor) -> None:
        """To SMEM, for `read_selection`."""
        slot[0], slot[1] = self.skipped, self.length

    def part(self, first: Int32, count: Int32) -> "Selection":
        """The key tiles first .. first + count alone."""
        before = first * self.tile_n
        skipped = cutlass.max(cutlass.min(before, self.length - 1), Int32(0))
        length = cutlass.max(cutlass.min(self.length - before, count * self.tile_n), Int32(0))
        return replace(self, indices=self.indices + skipped, skipped=skipped, length=length)

    def of_rows(self, rows: BoxedRows) -> "SelectedRows":
        return SelectedRows(self, cute.make_rmem_tensor(self.tile_n // 32, Int32))

    @property
    def lanes_a_key(self) -> int:
        """Eight lanes copy a row of a slab, so a thread has every (threads / 8)th row and always the same swizzle."""
        return LANES_A_ROW

    def position(self, t: Int32, i: int, thread: Int32, threads: int) -> Int32:
        """Of the i-th key of tile t that a thread copies."""
        return t * self.tile_n + i * (threads // self.lanes_a_key) + thread // self.lanes_a_key

    @cute.jit
    def look_up(self, wanted: cute.Tensor, t: Int32, thread: Int32, threads: cutlass.Constexpr):
        """wanted <- the entries for the keys of tile t that this thread will copy."""
        for i in cutlass.range_constexpr(cute.size(wanted)):
            wanted[i] = self.read(self.position(t, i, thread, threads))

    @cute.jit
    def settle(self, wanted: cute.Tensor, t: Int32, thread: Int32, threads: cutlass.Constexpr):
        """What was looked up for tile t is judged: an absent key becomes -1."""
        for i in cutlass.range_constexpr(cute.size(wanted)):
            wanted[i] = wanted[i] if self.is_present(self.position(t, i, thread, threads), wanted[i]) else Int32(-1)

    @cute.jit
    def gather(
        self,
        tile: cute.Tensor,
        wanted: cute.Tensor,
        thread: Int32,
        slabs: cutlass.Constexpr,
        threads: cutlass.Constexpr,
    ):
        """Issue the copies of some slabs of keys into a (tile_n, d) slab tile; of absent ones, zeros."""
        chunk, row0 = thread % LANES_A_ROW, thread // LANES_A_ROW
        target0 = tile.iterator.toint() + row0 * (SLAB * 2) + (chunk ^ row0 % 8) * 16
        for i in cutlass.range_constexpr(cute.size(wanted)):
            key, size = cutlass.max(wanted[i], Int32(0)), Int32(16) if wanted[i] >= 0 else Int32(0)
            source = self.keys + (Int64(key) * self.d + chunk * CHUNK)
            for slab in slabs:
                offset = (slab * self.tile_n + i * (threads // LANES_A_ROW)) * SLAB * 2
                copy_or_zero(target0 + offset, (source + slab * SLAB).toint(), size)


@dataclass(frozen=True)
class SelectedRows:
    """What a consumer warp knows of a key tile: the list's entries, one a lane and 32 keys."""

    selection: Selection
    entries: cute.Tensor  # int32 [tile_n / 32]

    @cute.jit
    def foresee(self, t: Int32):
        """Read the entries of tile t, ahead of `mask`."""
        s = self.selection
        for word in cutlass.range_constexpr(cute.size(self.entries)):
            self.entries[word] = s.read(t * s.tile_n + word * 32 + cute.arch.lane_idx())

    @cute.jit
    def absent(self, t: Int32) -> cute.Tensor:
        """A bit for every key of tile t: whether it is absent."""
        selection = self.selection
        bits = cute.make_rmem_tensor(cute.size(self.entries), Uint32)
        for word in cutlass.range_constexpr(cute.size(bits)):
            position = t * selection.tile_n + word * 32 + cute.arch.lane_idx()
            here = selection.is_present(position, self.entries[word])
            bits[word] = ~Uint32(cute.arch.vote_ballot_sync(here))
        return bits

    @cute.jit
    def mask(self, scores: cute.Tensor, t: Int32):
        """-inf for every absent key of tile t."""
        absent, lane = self.absent(t), cute.arch.lane_idx()
        anything = Uint32(0)
        for word in cutlass.range_constexpr(cute.size(absent)):
            anything = anything | absent[word]
        if anything != Uint32(0):
            s = by_row(scores)
            for i in cutlass.range_constexpr(cute.size(s, mode=[1])):
                column = i % 2 + i // 2 * 8
                bits = absent[column // 32] >> Uint32(lane % 4 * 2)
                if bits & Uint32(1 << column % 32) != Uint32(0):
                    for r in cutlass.range_constexpr(ROWS):
                        s[r, i] = -Float32.inf


@cute.jit
def open_selection(
    operands: SelectionOperands, tile: RowTile, tile_n: cutlass.Constexpr, d: cutlass.Constexpr
) -> Selection:
    length = cute.arch.make_warp_uniform(load(tile.at_query(operands.length, tile.first_query)))
    length = cutlass.max(cutlass.min(length, operands.topk), Int32(0))
    return operands.of_query(tile, tile_n, d, Int32(0), length)


def read_selection(operands: SelectionOperands, tile: RowTile, tile_n: int, d: int, slot: cute.Tensor) -> Selection:
    return operands.of_query(tile, tile_n, d, *(cute.arch.make_warp_uniform(slot[i]) for i in range(2)))


@dsl_user_op
def copy_or_zero(smem: Int32, gmem: Int64, present: Int32, *, loc=None, ip=None) -> None:
    """cp.async of 16 bytes through L2 only; `present` of them are read, the rest are zeros."""
    llvm.inline_asm(
        None,
        [
            Int32(smem).ir_value(loc=loc, ip=ip),
            Int64(gmem).ir_value(loc=loc, ip=ip),
            Int32(present).ir_value(loc=loc, ip=ip),
        ],
        "cp.async.cg.shared.global.L2::256B [$0], [$1], 16, $2;",
        "r,l,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
