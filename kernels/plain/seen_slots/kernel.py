"""Which slots of its caches each query of a step sees: what `dsv4_decode` hands to attention.

    near[row, j]  the slot of position begin + j, from the first that a query sees on
    far[row, j]   the slot of entry indices[row, j]; without indices, of entry oldest + j

A thread has a number of a row. Those of one query have no more than three dependent loads each, its length, an index
and an entry of a block table, so the launch is as short as one can be; XLA takes four kernels for it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kernels.abi import SeenSlots
from kernels.aot import Compiled
from kernels.lib.launch import Kernel, i32, pointers
from kernels.lib.rows import ceil_div, divide, load, store


@dataclass(frozen=True)
class Config:
    threads: int = 128
    smem_bytes: int = 0
    tile_m: int = 1  # rows and
    tile_n: int = 128  # numbers of a CTA

    @property
    def launch_options(self) -> dict[str, int]:
        return {}


class Given(NamedTuple):
    lengths: cute.Pointer
    position: cute.Pointer
    indices: cute.Pointer
    topk_length: cute.Pointer


class Made(NamedTuple):
    near: cute.Pointer
    near_length: cute.Pointer
    far: cute.Pointer
    far_length: cute.Pointer


class Pages(NamedTuple):
    """Where a cache has its entries."""

    table: cute.Pointer  # int32 [b, width]
    width: Int32  # pages of a sequence
    room: Int32  # entries of a sequence
    page: Int32  # entries; 0 without a table, where entries are slots
    pages: Int32  # of the pool

    @cute.jit
    def slot(self, sequence: Int32, entry: Int32) -> Int32:
        """-1 for an entry that does not exist."""
        slot = Int32(-1)
        if (entry >= 0) & (entry < self.room):
            slot = entry
            if self.page > 0:
                page = load(self.table + (Int64(sequence) * self.width + entry // self.page))
                slot = page * self.page + entry % self.page
                if (page < 0) | (page >= self.pages):
                    slot = Int32(-1)
        return slot


class Queries(NamedTuple):
    """A launch's queries, and what they see."""

    b: Int32
    s_q: Int32
    window: Int32
    ratio: Int32  # tokens of an entry; 0 where all indices count as they are
    has_position: Int32
    has_length: Int32
    n_far: Int32
    topk: Int32  # n_far, or 0 where a query sees all past entries


class SeenSlotsKernel(Kernel):
    symbol = "seen_slots"

    @cute.jit
    def __call__(
        self,
        lengths: cute.Pointer,  # int32 [b]: tokens, the new ones included
        position: cute.Pointer,  # int32 [b, s_q], if not that of a sequence's last token
        indices: cute.Pointer,  # int32 [b, s_q, topk]
        topk_length: cute.Pointer,  # int32 [b, s_q]: how many of them count, if not all
        near: cute.Pointer,  # int32 [b, s_q, window], and how many of them count: [b, s_q]
        near_length: cute.Pointer,
        far: cute.Pointer,  # int32 [b, s_q, n_far]
        far_length: cute.Pointer,
        window_table: cute.Pointer,
        window_width: Int32,
        window_room: Int32,
        window_page: Int32,
        window_pages: Int32,
        table: cute.Pointer,
        width: Int32,
        room: Int32,
        page: Int32,
        pages: Int32,
        b: Int32,
        s_q: Int32,
        window: Int32,
        ratio: Int32,
        has_position: Int32,
        has_length: Int32,
        n_far: Int32,
        topk: Int32,
        stream: cuda.CUstream,
    ):
        given = Given(lengths, position, indices, topk_length)
        made = Made(near, near_length, far, far_length)
        of_window = Pages(window_table, window_width, window_room, window_page, window_pages)
        compressed = Pages(table, width, room, page, pages)
        n = Queries(b, s_q, window, ratio, has_position, has_length, n_far, topk)
        ctas = b * s_q * ceil_div(window + n_far, Int32(self.config.tile_n))
        self.launch(given, made, of_window, compressed, n, ctas=ctas, stream=stream)

    @cute.kernel
    def kernel(self, given: Given, made: Made, of_window: Pages, compressed: Pages, n: Queries):
        c, cta = self.config, cute.arch.block_idx()[0]
        ctas_of_row = ceil_div(n.window + n.n_far, Int32(c.tile_n))
        row, part = divide(cta, ctas_of_row)
        column = part * c.tile_n + cute.arch.thread_idx()[0]
        sequence = divide(row, n.s_q)[0]
        at = column - n.window  # among the compressed entries
        index = Int32(-1)  # asked for beside the length, not after it
        if (at >= 0) & (at < n.topk):
            index = load(given.indices + (Int64(row) * n.topk + at))
        of_far = n.topk
        if (column == 0) & (n.has_length > 0):
            of_far = load(given.topk_length + row)
        length = cutlass.max(load(given.lengths + sequence), 0)
        position = length - 1
        if n.has_position > 0:
            position = load(given.position + row)
        there = (position >= 0) & (position < length)
        begin, end = cutlass.max(position + 1 - n.window, 0), cutlass.max(position + 1, 0)
        past = Int32(0)  # compressed entries that are past at `position`
        oldest = Int32(0)  # of a cache that has run over, what is left
        if n.ratio > 0:
            past = end // n.ratio
            oldest = cutlass.max(length // n.ratio - compressed.room, 0)
        if at < 0:
            entry = (begin + column) % of_window.room
            store(made.near + (Int64(row) * n.window + column), of_window.slot(sequence, entry))
        elif at < n.n_far:
            entry = index
            if n.topk == 0:
                entry = (oldest + at) % compressed.room
            elif (n.ratio > 0) & (index >= past):
                entry = Int32(-1)
            store(made.far + (Int64(row) * n.n_far + at), compressed.slot(sequence, entry))
        if column == 0:
            if n.topk == 0:
                of_far = past - oldest
            seen = end - begin
            if not there:
                seen, of_far = Int32(0), Int32(0)
            store(made.near_length + row, seen)
            store(made.far_length + row, of_far)

    def examples(self, variant: SeenSlots) -> tuple:
        return *pointers("bfloat16", *["int32"] * 8), *self._pool(), *self._pool(), *[i32()] * 8

    @staticmethod
    def _pool() -> tuple:
        return *pointers("bfloat16", "int32"), *[i32()] * 4


def compile(variant: SeenSlots, out_dir: Path) -> Compiled:
    return SeenSlotsKernel(Config()).compile(variant, out_dir)
