"""The keys of a query's listed blocks, gathered tile by tile from an array or from pages."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from kernels.abi import INDEX_BLOCK
from kernels.lib.indexer import KEYS
from kernels.lib.ptx import copy_or_zero
from kernels.lib.rows import WARP, load, store
from kernels.lib.scores_at import THREADS
from kernels.lib.selections import LANES_A_ROW
from kernels.lib.wgmma import SLAB

from .config import BLOCKS, Config
from .smem import Shared


class Pages(NamedTuple):
    """The table and the sizes by which the keys of a cache are found."""

    table: cute.Pointer  # int32 [b, width]
    width: Int32  # pages of a batch entry
    count: Int32  # pages of the pool
    page: Int32  # keys of a page


@dataclass(frozen=True)
class ListedBlocks:
    """The blocks of one query. Of a tile, lane i of every warp looks up number i % 8: two tiles ahead its number, one
    tile ahead its page."""

    config: Config
    keys: Int64  # address of the batch entry's keys, or of the pool
    scales: Int64  # of the batch entry's keys, where they are no part of pages
    s_c: Int32
    pages: Pages | None  # with the batch entry's table
    blocks: cute.Pointer
    count: Int32  # blocks of the list
    base: Int32  # the entry with which block 0 begins
    last: Int32  # tile after the last of this CTA
    found: cute.Tensor  # int32 (2,): the lane's block of the tile after the next, and of the next
    page: cute.Tensor  # int32 (1,): the page of the latter

    @cute.jit
    def begin(self, t: Int32):
        """Looks up tile t, and the tile after it."""
        self.found[0] = self.read(t)
        self.advance(t + 1)

    @cute.jit
    def advance(self, t: Int32):
        """Moves on: what was read is the next tile now, and tile t comes after it."""
        self.found[1] = self.found[0]
        if cutlass.const_expr(self.pages is not None):
            which = cutlass.max(self.found[1], Int32(0)) * INDEX_BLOCK // self.pages.page
            self.page[0] = load(self.pages.table + cutlass.min(which, self.pages.width - 1))
        self.found[0] = self.read(t)

    @cute.jit
    def read(self, t: Int32) -> Int32:
        """This lane's block of tile t; -1 after the list."""
        i = t * BLOCKS + cute.arch.lane_idx() % BLOCKS
        block = load(self.blocks + cutlass.min(i, self.count - 1))
        return block if i < self.count else Int32(-1)

    @cute.jit
    def place(self) -> tuple[Int64, Int64, Int32]:
        """(address of the keys of this lane's block of the next tile, of their scales, how many of them there are)"""
        c, block = self.config, self.found[1]
        key = self.base + block * INDEX_BLOCK
        there = cutlass.min(cutlass.max(self.s_c - key, Int32(0)), Int32(INDEX_BLOCK))
        there = there if block >= 0 else Int32(0)
        if cutlass.const_expr(self.pages is None):
            of_key = Int64(key if there > 0 else Int32(0))
            return self.keys + of_key * c.key_bytes, self.scales + of_key * 4, there
        page = self.page[0]
        there = there if (page >= 0) & (page < self.pages.count) else Int32(0)
        row = Int64(key % self.pages.page)
        begin = self.keys + Int64(page) * (self.pages.page * (c.key_bytes + 4 * c.scaled))
        at, scale = begin + row * c.key_bytes, begin + Int64(self.pages.page) * c.key_bytes + row * 4
        return at if there > 0 else self.keys, scale if there > 0 else self.keys, there

    @cute.jit
    def gather(self, smem: Shared, t: Int32, stage: Int32, thread: Int32):
        """Gathers tile t, which was looked up, as one group; then looks ahead. Zeros stand for absent keys."""
        c = self.config
        if t < self.last:
            at, scale, there = self.place()
            if cutlass.const_expr(c.of_4_bits):
                self.copy_codes(smem.k[None, None, stage], at, there, thread)
            else:
                self.copy_rows(smem.k[None, None, stage], at, there, thread)
            if cutlass.const_expr(c.scaled):
                lane = thread % KEYS // INDEX_BLOCK
                source = of_lane(scale, lane) + thread % INDEX_BLOCK * 4
                there = thread % INDEX_BLOCK < cute.arch.shuffle_sync(there, lane)
                if thread < KEYS:
                    to = cute.recast_ptr(smem.scale.iterator, dtype=Float32) + (stage * KEYS + thread)
                    copy_number(to, source, there)
            self.advance(t + 2)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def copy_codes(self, tile: cute.Tensor, at: Int64, there: Int32, thread: Int32):
        """Copies a tile's keys of 4 bits, bytes (KEYS, KEY_BYTES): a warp a block at a time."""
        c = self.config
        for i in cutlass.range_constexpr(BLOCKS * WARP // THREADS):
            block, part = i * (THREADS // WARP) + thread // WARP, thread % WARP
            size = Int32(16) if part * 16 // c.key_bytes < cute.arch.shuffle_sync(there, block) else Int32(0)
            target = tile.iterator.toint() + (block * WARP + part) * 16
            copy_or_zero(target, of_lane(at, block) + part * 16, size)

    @cute.jit
    def copy_rows(self, tile: cute.Tensor, at: Int64, there: Int32, thread: Int32):
        """Copies a tile's keys into slabs."""
        c = self.config
        row0, chunk = thread // LANES_A_ROW, thread % LANES_A_ROW  # of every 16 rows, a thread copies from one
        target0 = tile.iterator.toint() + row0 * (SLAB * 2) + (chunk ^ row0 % 8) * 16
        row = row0 % INDEX_BLOCK
        for i in cutlass.range_constexpr(KEYS * LANES_A_ROW // THREADS):
            lane = i * (THREADS // LANES_A_ROW // INDEX_BLOCK) + row0 // INDEX_BLOCK
            source = of_lane(at, lane) + (row * c.key_bytes + chunk * 16)
            size = Int32(16) if row < cute.arch.shuffle_sync(there, lane) else Int32(0)
            for slab in cutlass.range_constexpr(c.slabs):
                offset = (slab * KEYS + i * (THREADS // LANES_A_ROW)) * SLAB * 2
                copy_or_zero(target0 + offset, source + slab * SLAB * 2, size)


@cute.jit
def of_lane(address: Int64, lane: Int32) -> Int64:
    """Returns the address that another lane of the warp has."""
    low, high = (cute.arch.shuffle_sync(Int32(address >> n), lane) for n in (0, 32))
    return Int64(high) << 32 | Int64(Uint32(low))


@cute.jit
def copy_number(to: cute.Pointer, source: Int64, there: cutlass.Boolean):
    """cp.async of one number, or 0."""
    one = cute.make_layout(1)
    if there:
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32)
        given = cute.make_ptr(Float32, source, cute.AddressSpace.gmem, assumed_align=4)
        cute.copy(atom, cute.make_tensor(given, one), cute.make_tensor(to, one))
    else:
        store(to, Float32(0.0))
