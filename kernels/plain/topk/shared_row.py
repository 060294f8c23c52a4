"""The greatest `topk` of each row of scores where rows are few and long: the CTAs of a cluster share a row.

    load      each CTA has a part of the row in SMEM, as ranks; a row that is too long for that is read again by each
              step below
    narrow    a radix select, 8 bits at a time: each CTA counts its part, then each adds up the counts of all, which it
              reads through DSMEM, and finds the bucket of the last one to choose, within which the next step counts
    emit      each CTA those of its part, from the place on that the counts of the parts before it give

There is no guess, so neither the distribution of the scores nor equal ones make it read them again. Ranks are those of
kernel.py.
"""

from dataclasses import dataclass
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32
from cutlass.memory import SmemAllocator

from kernels.abi import TopK
from kernels.aot import Compiled
from kernels.lib.launch import WARP
from kernels.lib.ptx import load_of, max_u32, min_u32, rank_of
from kernels.lib.rows import ceil_div, load, store

from .chooser import Row, count_one, load_vector
from .config import (
    AT_ONCE,
    BUCKETS,
    CLUSTER,
    COPIES,
    MOST_VECTORS,
    SHARED_THREADS,
    SHARED_WARPS,
    STEPS,
    VECTOR,
    SharedConfig,
)
from .kernel import Extents, TopKKernel

OF_WARP = WARP * VECTOR  # scores that a warp loads at a time


@dataclass(frozen=True)
class Part:
    """The part of a row that a warp has: `vectors` loads one after the other, once in each round."""

    line: cute.Pointer
    first: Int32  # that the query sees
    stop: Int32
    begin: Int32  # the thread's, of its first vector in the first round
    vectors: Int32
    rounds: Int32
    stride: Int32  # from a round to the next

    @staticmethod
    def of(row: Row, rank: Int32, warp: Int32, lane: Int32) -> "Part":
        begin, stop = row.first // VECTOR * VECTOR, row.first + row.count
        of_warp = ceil_div(stop - begin, Int32(CLUSTER * SHARED_WARPS * OF_WARP))
        rounds = ceil_div(of_warp, Int32(MOST_VECTORS))
        vectors = ceil_div(of_warp, rounds)
        stride = vectors * (SHARED_WARPS * OF_WARP)
        begin = begin + rank * rounds * stride + warp * vectors * OF_WARP + lane * VECTOR
        return Part(row.line, row.first, stop, begin, vectors, rounds, stride)


@dataclass(frozen=True)
class SharedChooser:
    """A thread of a CTA, with the CTA's SMEM."""

    copies: cute.Tensor  # (COPIES, BUCKETS): counts of this CTA, the greatest ranks first
    counts: cute.Tensor  # (BUCKETS, STEPS): their sums, of each step
    of_warps: cute.Tensor  # (warps, 2, 2): two numbers of each warp, in two sets used alternately
    found: cute.Tensor  # (4,): numbers that one thread found
    ranks: cute.Tensor  # (VECTOR, SHARED_THREADS, MOST_VECTORS): a thread reads its own
    rank: Int32  # of the CTA
    thread: Int32
    warp: Int32
    lane: Int32

    @staticmethod
    def of() -> "SharedChooser":
        smem, thread = SmemAllocator(), cute.arch.thread_idx()[0]
        shapes = ((COPIES, BUCKETS), (BUCKETS, STEPS), (SHARED_WARPS, 2, 2), 4)
        shared = (smem.allocate_tensor(Int32, cute.make_layout(shape), 16) for shape in shapes)
        ranks = smem.allocate_tensor(Uint32, cute.make_layout((VECTOR, SHARED_THREADS, MOST_VECTORS)), 16)
        warp = cute.arch.make_warp_uniform(thread // WARP)
        return SharedChooser(*shared, ranks, cute.arch.block_idx_in_cluster(), thread, warp, cute.arch.lane_idx())

    # ---- the block as a whole

    @cute.jit
    def over_warps(self, x: Int32, y: Int32, which: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """(the sum of the x of all warps before this one, of all; the same of y), where a warp's threads agree."""
        if self.lane == 0:
            self.of_warps[self.warp, 0, which] = x
            self.of_warps[self.warp, 1, which] = y
        cute.arch.sync_threads()
        x_before, x_all, y_before, y_all = Int32(0), Int32(0), Int32(0), Int32(0)
        for w in cutlass.range_constexpr(SHARED_WARPS):
            x_of_warp, y_of_warp = self.of_warps[w, 0, which], self.of_warps[w, 1, which]
            x_before += x_of_warp * Int32(w < self.warp)
            y_before += y_of_warp * Int32(w < self.warp)
            x_all += x_of_warp
            y_all += y_of_warp
        return x_before, x_all, y_before, y_all

    @cute.jit
    def sum_before(self, x: Int32, which: Int32) -> Int32:
        """The sum of the x of all threads before this one."""
        total = x
        for i in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(total, 1 << i, mask_and_clamp=0)
            if self.lane >= 1 << i:
                total += below
        before, *_ = self.over_warps(cute.arch.shuffle_sync(total, WARP - 1), Int32(0), which)
        return before + total - x

    # ---- the steps

    @cute.jit
    def load(self, part: Part, turn: Int32):
        """Loads the ranks of a round, each thread its own; 0 is what the query does not see."""
        bits = cute.make_rmem_tensor((VECTOR, AT_ONCE), Uint32)
        for v0 in cutlass.range(0, part.vectors, AT_ONCE, unroll=1):
            begin = part.begin + turn * part.stride + v0 * OF_WARP
            bits.fill(0)
            for v in cutlass.range_constexpr(AT_ONCE):
                if (v0 + v < part.vectors) & (begin + v * OF_WARP < part.stop):
                    load_vector(part.line + begin + v * OF_WARP, bits[None, v])
            for v in cutlass.range_constexpr(AT_ONCE):
                at = begin + v * OF_WARP
                for e in cutlass.range_constexpr(VECTOR):
                    bits[e, v] = rank_of(bits[e, v])
                if (at < part.first) | (at + VECTOR > part.stop):
                    for e in cutlass.range_constexpr(VECTOR):
                        seen = (at + e >= part.first) & (at + e < part.stop)
                        bits[e, v] = Uint32(bits[e, v]) if seen else Uint32(0)
                if v0 + v < part.vectors:
                    cute.autovec_copy(bits[None, v], self.ranks[None, self.thread, v0 + v])

    @cute.jit
    def ranks_of(self, v: Int32) -> cute.Tensor:
        """Returns the ranks of the thread's v-th vector."""
        mine = cute.make_rmem_tensor(VECTOR, Uint32)
        cute.autovec_copy(self.ranks[None, self.thread, v], mine)
        return mine

    @cute.jit
    def count(self, part: Part, low: Uint32, width: Uint32, shift: Int32):
        """Counts this CTA's ranks in [low, low + width], by bits from `shift` on."""
        for turn in cutlass.range(part.rounds, unroll=1):
            if part.rounds > 1:
                self.load(part, turn)
            for v in cutlass.range(part.vectors, unroll=2):
                mine = self.ranks_of(v)
                nearest = Uint32(0xFFFFFFFF)
                for e in cutlass.range_constexpr(VECTOR):
                    mine[e] = Uint32(mine[e]) - low
                    nearest = min_u32(nearest, Uint32(mine[e]))
                if nearest <= width:  # mostly none is
                    for e in cutlass.range_constexpr(VECTOR):
                        if Uint32(mine[e]) <= width:
                            bucket = BUCKETS - 1 - Int32(Uint32(mine[e]) >> Uint32(shift))
                            count_one(self.copies, bucket * COPIES + self.lane % COPIES)
        cute.arch.sync_threads()

    @cute.jit
    def share(self, step: Int32) -> tuple[Int32, Int32]:
        """(how many the parts before this one have in this thread's bucket, how many all have); the copies are 0
        again."""
        of_all, before = Int32(0), Int32(0)
        if self.thread < BUCKETS:
            mine = Int32(0)
            for i in cutlass.range_constexpr(COPIES):
                mine += self.copies[i, self.thread]
                self.copies[i, self.thread] = 0
            self.counts[self.thread, step] = mine
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if self.thread < BUCKETS:
            here = (self.counts.iterator + (step * BUCKETS + self.thread)).toint()
            for r in cutlass.range_constexpr(CLUSTER):
                of_part = load_of(Int32(here), r)
                before += of_part * Int32(r < self.rank)
                of_all += of_part
        return before, of_all

    @cute.jit
    def narrow(self, part: Part, topk: Int32) -> tuple[Uint32, Int32, Int32, Int32]:
        """(rank, ties, over, equal): the topk greatest are those above the rank, and the first `ties` of those equal to
        it; the parts before this one have `over` of the former, and `equal` of the latter.
        """
        for i in cutlass.range(self.thread, COPIES * BUCKETS, SHARED_THREADS):
            self.copies[i % COPIES, i // COPIES] = 0
        cute.arch.sync_threads()
        low, width, shift = Uint32(0), Uint32(0xFFFFFFFF), Int32(24)  # what is not seen ranks last, and is not needed
        need, more, over, equal = topk, Boolean(True), Int32(0), Int32(0)
        for step in cutlass.range(STEPS, unroll=1):
            if more:
                self.count(part, low, width, shift)
                before, here = self.share(step)
                above = self.sum_before(here, Int32(0))
                if (above < need) & (need <= above + here):
                    for i, x in enumerate((self.thread, above, here, Int32(0))):  # read as one vector
                        self.found[i] = x
                cute.arch.sync_threads()
                bucket = self.found[0]
                low = low + (Uint32(BUCKETS - 1 - bucket) << Uint32(shift))
                width = (Uint32(1) << Uint32(shift)) - 1
                need = need - self.found[1]
                all_of_them = need == self.found[2]
                if (self.thread < bucket) | ((self.thread == bucket) & all_of_them):
                    over += before
                equal = before if self.thread == bucket else Int32(0)
                if all_of_them:
                    low, need, equal = low - 1, Int32(0), Int32(0)
                more = (shift > 0) & (all_of_them == Boolean(False))
                shift = cutlass.max(shift - 8, 0)
        over, equal = cute.arch.warp_redux_sync(over, "add"), cute.arch.warp_redux_sync(equal, "add")
        _, over, _, equal = self.over_warps(over, equal, Int32(1))
        return low, need, over, equal

    @cute.jit
    def emit(self, part: Part, rank: Uint32, ties: Int32, over: Int32, equal: Int32, row: Row, indices, values, wants):
        """Emits what `narrow` found, in order."""
        for turn in cutlass.range(part.rounds, unroll=1):
            if part.rounds > 1:
                self.load(part, turn)
            mine_over, mine_equal = Int32(0), Int32(0)
            for v in cutlass.range(part.vectors, unroll=2):
                mine = self.ranks_of(v)
                for e in cutlass.range_constexpr(VECTOR):
                    mine_over += Int32(Uint32(mine[e]) > rank)
                    mine_equal += Int32(Uint32(mine[e]) == rank)
            mine_over = cute.arch.warp_redux_sync(mine_over, "add")
            mine_equal = cute.arch.warp_redux_sync(mine_equal, "add")
            over_before, of_over, equal_before, of_equal = self.over_warps(mine_over, mine_equal, turn % 2)
            over_before, equal_before = over + over_before, equal + equal_before
            if mine_over + mine_equal > 0:
                for v in cutlass.range(part.vectors, unroll=1):
                    entry = part.begin + turn * part.stride + v * OF_WARP
                    over_before, equal_before = self.emit_vector(
                        v, entry, rank, ties, over_before, equal_before, row, indices, values, wants
                    )
            over, equal = over + of_over, equal + of_equal

    @cute.jit
    def emit_vector(
        self, v: Int32, entry: Int32, rank: Uint32, ties: Int32, over: Int32, equal: Int32, row: Row,
        indices: cute.Pointer, values: cute.Pointer, wants: Int32,
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """Emits of a warp's vectors, of which the thread's begins at `entry`, what is to be: (how many were over, equal
        before the next ones).
        """
        mine, lanes_below = self.ranks_of(v), (Int32(1) << self.lane) - 1
        greatest = Uint32(0)
        for e in cutlass.range_constexpr(VECTOR):
            greatest = max_u32(greatest, Uint32(mine[e]))
        floor = rank if equal < ties else rank + 1
        if cute.arch.vote_ballot_sync(greatest >= floor) != 0:
            over_before, equal_before = over, equal
            for e in cutlass.range_constexpr(VECTOR):
                overs = cute.arch.vote_ballot_sync(Uint32(mine[e]) > rank)
                equals = cute.arch.vote_ballot_sync(Uint32(mine[e]) == rank)
                over_before += cute.arch.popc(overs & lanes_below)
                equal_before += cute.arch.popc(equals & lanes_below)
                over += cute.arch.popc(overs)
                equal += cute.arch.popc(equals)
            for e in cutlass.range_constexpr(VECTOR):
                is_over, is_equal = Uint32(mine[e]) > rank, Uint32(mine[e]) == rank
                if is_over | (is_equal & (equal_before < ties)):
                    place = over_before + cutlass.min(equal_before, ties)
                    store(indices + place, entry + e)
                    if wants != 0:
                        store(values + place, load(row.line + entry + e))
                over_before += Int32(is_over)
                equal_before += Int32(is_equal)
        return over, equal


class SharedTopKKernel(TopKKernel):
    symbol = "indexer_topk_shared"

    def chooser(self) -> SharedChooser:
        return SharedChooser.of()

    @cute.jit
    def choose(self, chooser: SharedChooser, row: Row, indices: cute.Pointer, values: cute.Pointer, n: Extents):
        part = Part.of(row, chooser.rank, chooser.warp, chooser.lane)
        if part.rounds == 1:
            chooser.load(part, Int32(0))
        rank, ties, over, equal = chooser.narrow(part, n.topk)
        cute.arch.cluster_arrive()
        chooser.emit(part, rank, ties, over, equal, row, indices, values, n.wants_values)
        cute.arch.cluster_wait()  # nobody leaves while others read its counts


def compile(variant: TopK, out_dir: Path) -> Compiled:
    config = SharedConfig()
    return SharedTopKKernel(config).compile(variant, out_dir, ctas=config.ctas, cluster=config.cluster)
