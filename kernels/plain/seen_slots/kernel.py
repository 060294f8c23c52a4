"""Which slots of its caches each query of a step sees: what `dsv4_decode` hands to attention.

    near[row, j]  the slot of position begin + j, from the first that a query sees on
    far[row, j]   the slot of entry indices[row, j]; without indices, of entry oldest + j

It is bound by latency: a thread waits for an index beside the query's length, and then for the pages of its numbers
together, which are on their way by then. XLA takes four kernels for it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernels.abi import SeenSlots
from kernels.aot import Compiled
from kernels.lib.launch import Kernel, i32, pointers
from kernels.lib.ptx import prefetch_unless
from kernels.lib.rows import ceil_div, divide, load, store

PAGES_OF_LINE = 32  # 128 bytes


@dataclass(frozen=True)
class Config:
    threads: int = 128
    numbers: int = 4  # of a thread
    smem_bytes: int = 0
    tile_m: int = 1  # rows of a CTA

    @property
    def tile_n(self) -> int:
        """Numbers of a CTA, all of the window or all of compressed entries."""
        return self.threads * self.numbers

    @property
    def launch_options(self) -> dict[str, int]:
        return {}


def quotient(a: Int32, b: Int32) -> Int32:
    """Divides nonnegative numbers, as unsigned ones."""
    return Int32(Uint32(a) // Uint32(b))


def remainder(a: Int32, b: Int32) -> Int32:
    return a - quotient(a, b) * b


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
    """The numbers that lead to a cache's entries, through a table of pages or without one."""

    table: cute.Pointer  # int32 [b, width]
    width: Int32  # pages of a sequence
    room: Int32  # entries of a sequence
    page: Int32  # entries; 0 without a table, where entries are slots
    pages: Int32  # of the pool
    stride: Int32  # without a table: slots from the first one of a sequence to that of the next


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
        position: cute.Pointer,  # int32 [b, s_q], if not those of a sequence's last tokens
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
        window_stride: Int32,
        table: cute.Pointer,
        width: Int32,
        room: Int32,
        page: Int32,
        pages: Int32,
        stride: Int32,
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
        of_window = Pages(window_table, window_width, window_room, window_page, window_pages, window_stride)
        compressed = Pages(table, width, room, page, pages, stride)
        n = Queries(b, s_q, window, ratio, has_position, has_length, n_far, topk)
        tile = Int32(self.config.tile_n)
        ctas = b * s_q * (ceil_div(window, tile) + ceil_div(n_far, tile))
        self.launch(given, made, of_window, compressed, n, ctas=ctas, stream=stream)

    @cute.kernel
    def kernel(self, given: Given, made: Made, of_window: Pages, compressed: Pages, n: Queries):
        c, thread = self.config, cute.arch.thread_idx()[0]
        ctas_of_window = ceil_div(n.window, Int32(c.tile_n))
        ctas_of_row = ctas_of_window + ceil_div(n.n_far, Int32(c.tile_n))
        row, part = divide(cute.arch.block_idx()[0], ctas_of_row)
        sequence, query = divide(row, n.s_q)
        at = (part - ctas_of_window) * c.tile_n + thread  # among the compressed entries
        entries = cute.make_rmem_tensor(c.numbers, Int32)
        entries.fill(-1)
        if part >= ctas_of_window:  # asked for beside the length, not after it
            for i in cutlass.range_constexpr(c.numbers):
                if at + i * c.threads < n.topk:
                    entries[i] = load(given.indices + (Int64(row) * n.topk + at + i * c.threads))
        if part < ctas_of_window:
            self.prefetch_table(of_window, sequence, thread)
        else:
            self.prefetch_table(compressed, sequence, thread)
        of_far = n.topk
        if n.has_length > 0:
            of_far = load(given.topk_length + row)
        length = cutlass.max(load(given.lengths + sequence), 0)
        position = length - n.s_q + query
        if n.has_position > 0:
            position = load(given.position + row)
        begin, end = cutlass.max(position + 1 - n.window, 0), cutlass.max(position + 1, 0)
        past = Int32(0)  # compressed entries that are past at `position`
        oldest = Int32(0)  # of a cache that has run over, what is left
        if n.ratio > 0:
            past = quotient(end, n.ratio)
            oldest = cutlass.max(quotient(length, n.ratio) - compressed.room, 0)
        if part < ctas_of_window:
            column = part * c.tile_n + thread
            for i in cutlass.range_constexpr(c.numbers):
                entries[i] = remainder(begin + column + i * c.threads, of_window.room)
            self.write(made.near + Int64(row) * n.window, column, n.window, entries, of_window, sequence)
        else:
            for i in cutlass.range_constexpr(c.numbers):
                if n.topk == 0:
                    entries[i] = remainder(oldest + at + i * c.threads, compressed.room)
                elif (n.ratio > 0) & (entries[i] >= past):
                    entries[i] = Int32(-1)
            self.write(made.far + Int64(row) * n.n_far, at, n.n_far, entries, compressed, sequence)
        if (part == 0) & (thread == 0):
            if n.topk == 0:
                of_far = past - oldest
            there = (position >= 0) & (position < length)
            store(made.near_length + row, end - begin if there else Int32(0))
            store(made.far_length + row, of_far if there else Int32(0))

    @cute.jit
    def prefetch_table(self, pool: Pages, sequence: Int32, thread: Int32):
        """Calls a sequence's pages into L2, a line of a thread, while its indices and its length come."""
        first = thread * PAGES_OF_LINE
        here = cutlass.min(first, pool.width - 1)
        wanted = Uint32((pool.page > 0) & (first < pool.width + PAGES_OF_LINE - 1))
        prefetch_unless(0, (pool.table + (Int64(sequence) * pool.width + here)).toint(), wanted)

    @cute.jit
    def write(
        self, to: cute.Pointer, column: Int32, limit: Int32, entries: cute.Tensor, pool: Pages, sequence: Int32
    ) -> None:
        """The slots of a thread's entries, -1 for one that does not exist; all their pages are asked for together."""
        c = self.config
        slots = cute.make_rmem_tensor(c.numbers, Int32)
        for i in cutlass.range_constexpr(c.numbers):
            there = (entries[i] >= 0) & (entries[i] < pool.room)
            slots[i] = entries[i] if there else Int32(-1)
        if pool.page > 0:
            pages = cute.make_rmem_tensor(c.numbers, Int32)
            for i in cutlass.range_constexpr(c.numbers):
                which = quotient(cutlass.max(slots[i], 0), pool.page)
                pages[i] = load(pool.table + (Int64(sequence) * pool.width + which))
            for i in cutlass.range_constexpr(c.numbers):
                there = (slots[i] >= 0) & (pages[i] >= 0) & (pages[i] < pool.pages)
                slot = pages[i] * pool.page + remainder(cutlass.max(slots[i], 0), pool.page)
                slots[i] = slot if there else Int32(-1)
        else:
            for i in cutlass.range_constexpr(c.numbers):
                slots[i] = slots[i] + sequence * pool.stride if slots[i] >= 0 else Int32(-1)
        for i in cutlass.range_constexpr(c.numbers):
            if column + i * c.threads < limit:
                store(to + column + i * c.threads, slots[i])

    def examples(self, variant: SeenSlots) -> tuple:
        return *pointers("bfloat16", *["int32"] * 8), *self._pool(), *self._pool(), *[i32()] * 8

    @staticmethod
    def _pool() -> tuple:
        return *pointers("bfloat16", "int32"), *[i32()] * 5


def compile(variant: SeenSlots, out_dir: Path) -> Compiled:
    return SeenSlotsKernel(Config()).compile(variant, out_dir)
