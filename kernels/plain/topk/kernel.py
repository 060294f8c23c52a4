"""The greatest `topk` of each row of scores, exactly, in ascending order of entries; one CTA a row.

    guess     a histogram of every eighth score gives a rank that somewhat more than topk scores should reach; ranks are
              those of floats, so a bin may have many of the scores: then a histogram of this bin gives it
    collect   one pass over all scores: those that reach the rank go to SMEM, in order
    narrow    a radix select, 8 bits at a time: the rank of the last one to choose, and how many of that rank to choose
    emit      those above that rank, and the first of those equal to it, in order

Where the guess was wrong, or too many scores are equal, `narrow` and `emit` run over the row itself: slower, and
equally exact. So the choice depends on the scores alone. A score's rank is an unsigned number that orders as the score
does; -0 equals 0, NaN comes before -inf, and 0 is the rank of what the query does not see. Where rows are few and long,
shared_row.py has several CTAs for each.
"""

from pathlib import Path
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.runtime import make_ptr

from kernels.abi import TopK
from kernels.aot import Compiled
from kernels.lib.launch import Kernel, i32
from kernels.lib.rows import load, store

from .chooser import Chooser, Listed, Row, bit_length
from .config import CAPACITY, CTAS, LEAST, MAX_TOPK, Config


class Extents(NamedTuple):
    """The scalars of a launch, in the order of the kernel's parameters."""

    s_q: Int32
    queries: Int32  # queries of a block
    blocks_of_entry: Int32  # blocks of queries of a batch entry
    first_block: Int32  # first block of this launch, counted over all batch entries
    stride: Int32  # between two rows of scores, a multiple of VECTOR
    topk: Int32
    wants_values: Int32


class Arrays(NamedTuple):
    scores: cute.Pointer  # float32 as uint32 [rows, stride]
    start: cute.Pointer  # int32 [b, s_q]
    stop: cute.Pointer  # int32 [b, s_q]
    indices: cute.Pointer  # int32 [b, s_q, topk]
    values: cute.Pointer  # float32 as uint32 [b, s_q, topk], where wanted


class TopKKernel(Kernel):
    symbol = "indexer_topk"

    @cute.jit
    def __call__(
        self,
        scores: cute.Pointer,
        start: cute.Pointer,
        stop: cute.Pointer,
        indices: cute.Pointer,
        values: cute.Pointer,
        s_q: Int32,
        queries: Int32,
        blocks_of_entry: Int32,
        first_block: Int32,
        stride: Int32,
        topk: Int32,
        wants_values: Int32,
        rows: Int32,
        stream: cuda.CUstream,
    ):
        n = Extents(s_q, queries, blocks_of_entry, first_block, stride, topk, wants_values)
        arrays, cluster = Arrays(scores, start, stop, indices, values), self.config.cluster
        self.launch(arrays, n, ctas=rows * cluster, stream=stream, cluster=cluster)

    def chooser(self) -> Any:
        return Chooser.of()

    @cute.kernel
    def kernel(self, arrays: Arrays, n: Extents):
        line = cute.arch.block_idx()[0] // self.config.cluster
        block = n.first_block + line // n.queries
        entry, query = block // n.blocks_of_entry, block % n.blocks_of_entry * n.queries + line % n.queries
        chooser = self.chooser()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if query < n.s_q:
            at = Int64(entry) * n.s_q + query
            first = load(arrays.start + at)
            count = cutlass.max(load(arrays.stop + at) - first, 0)
            row = Row(arrays.scores + Int64(line) * n.stride, first, count)
            indices, values = arrays.indices + at * n.topk, arrays.values + at * n.topk
            if count <= n.topk:
                self.take_all(row, indices, values, n)
            else:
                self.choose(chooser, row, indices, values, n)

    @cute.jit
    def take_all(self, row: Row, indices: cute.Pointer, values: cute.Pointer, n: Extents):
        threads = self.config.threads
        step = self.config.cluster * threads
        begin = cute.arch.block_idx()[0] * threads % step + cute.arch.thread_idx()[0]
        for i in cutlass.range(begin, n.topk, step):
            there = i < row.count
            store(indices + i, row.first + i if there else Int32(-1))
            if n.wants_values != 0:
                bits = Uint32(0xFF800000)  # -inf
                if there:
                    bits = Uint32(load(row.line + row.first + i))
                store(values + i, bits)

    @cute.jit
    def choose(self, chooser: Chooser, row: Row, indices: cute.Pointer, values: cute.Pointer, n: Extents):
        lower = Uint32(LEAST)
        if row.count > CAPACITY:
            lower = chooser.guess(row, n.topk)
        collected, least, greatest = chooser.collect(row, lower)
        if (collected >= n.topk) & (collected <= CAPACITY):
            listed = Listed(chooser.smem.ranks, chooser.smem.entries, collected)
            shift = cutlass.max(bit_length(greatest - least) - 8, 0)
            rank, ties = chooser.narrow(listed, least, shift, n.topk)
            chooser.emit(listed, rank, ties, row, indices, values, n.wants_values)
        else:
            rank, ties = chooser.narrow(row, Uint32(LEAST), Int32(24), n.topk)
            chooser.emit(row, rank, ties, row, indices, values, n.wants_values)

    def examples(self, variant: TopK) -> tuple:
        arrays = (Uint32, Int32, Int32, Int32, Uint32)
        pointers = (make_ptr(t, 16, cute.AddressSpace.gmem, assumed_align=4) for t in arrays)
        return *pointers, *(i32() for _ in range(8))


def compile(variant: TopK, out_dir: Path) -> Compiled:
    if variant.max_topk > MAX_TOPK:
        raise ValueError(f"topk is {MAX_TOPK} at most, got {variant.max_topk}")
    return TopKKernel(Config()).compile(variant, out_dir, ctas=CTAS)
