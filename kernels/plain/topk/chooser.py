"""The steps of the choice, each by all threads of a CTA; kernel.py names them."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from kernels.lib.launch import WARP
from kernels.lib.ptx import count_in_shared, leading_zeros, max_u32, min_u32, rank_of, warp_max_u32, warp_min_u32
from kernels.lib.rows import ceil_div, load, store

from .config import AT_A_TIME, BINS, CAPACITY, COARSE, LEAST, SAMPLED, THREADS, VECTOR, VECTORS, WARPS
from .smem import Shared, allocate


@dataclass(frozen=True)
class Row:
    """A query's scores in memory, as far as it sees them."""

    line: cute.Pointer
    first: Int32
    count: Int32

    def rank(self, i: Int32) -> Uint32:
        return rank_of(load(self.line + self.first + i))

    def entry(self, i: Int32) -> Int32:
        return self.first + i


@dataclass(frozen=True)
class Listed:
    """The scores that were collected, in SMEM."""

    ranks: cute.Tensor
    entries: cute.Tensor
    count: Int32

    def rank(self, i: Int32) -> Uint32:
        return Uint32(self.ranks[i])

    def entry(self, i: Int32) -> Int32:
        return self.entries[i]


@dataclass(frozen=True)
class Chooser:
    """A thread of the CTA, with the CTA's SMEM."""

    smem: Shared
    thread: Int32
    warp: Int32
    lane: Int32

    @staticmethod
    def of() -> "Chooser":
        smem, thread = allocate(), cute.arch.thread_idx()[0]
        return Chooser(smem, thread, cute.arch.make_warp_uniform(thread // WARP), cute.arch.lane_idx())

    # ---- the block as a whole

    @cute.jit
    def sums_before(self, x: Int32, which: cutlass.Constexpr = 0) -> tuple[Int32, Int32]:
        """(the sum of the x of all warps before this one, of all), where a warp's threads have the same x."""
        if self.lane == 0:
            self.smem.of_warps[self.warp, which] = x
        cute.arch.sync_threads()
        before, total = Int32(0), Int32(0)
        for w in cutlass.range_constexpr(WARPS):
            of_warp = self.smem.of_warps[w, which]
            before += of_warp * Int32(w < self.warp)
            total += of_warp
        return before, total

    @cute.jit
    def sum_before(self, x: Int32) -> Int32:
        """The sum of the x of all threads before this one."""
        total = x
        for i in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(total, 1 << i, mask_and_clamp=0)
            if self.lane >= 1 << i:
                total += below
        before, _ = self.sums_before(cute.arch.shuffle_sync(total, WARP - 1))
        return before + total - x

    @cute.jit
    def extremes(self, least: Uint32, greatest: Uint32) -> tuple[Uint32, Uint32]:
        """The extremes over all threads."""
        least, greatest = warp_min_u32(least), warp_max_u32(greatest)
        if self.lane == 0:
            self.smem.of_warps[self.warp, 0] = Int32(least)
            self.smem.of_warps[self.warp, 1] = Int32(greatest)
        cute.arch.sync_threads()
        for w in cutlass.range_constexpr(WARPS):
            least = min_u32(least, Uint32(self.smem.of_warps[w, 0]))
            greatest = max_u32(greatest, Uint32(self.smem.of_warps[w, 1]))
        cute.arch.sync_threads()
        return least, greatest

    # ---- the steps

    @cute.jit
    def guess(self, row: Row, topk: Int32) -> Uint32:
        """A rank that, by a sample, a few more than topk scores of the row reach."""
        begin = ceil_div(row.first, Int32(VECTOR)) * VECTOR
        count = row.first + row.count - begin
        groups = cutlass.min(count // (VECTOR * SAMPLED), CAPACITY // VECTOR)
        step = count // groups // VECTOR * VECTOR
        least, greatest = Uint32(0xFFFFFFFF), Uint32(0)
        for g in cutlass.range(self.thread, groups, THREADS):
            bits = cute.make_rmem_tensor(VECTOR, Uint32)
            load_vector(row.line + begin + g * step, bits)
            for e in cutlass.range_constexpr(VECTOR):
                rank = rank_of(bits[e])
                self.smem.ranks[VECTOR * g + e] = rank
                least, greatest = min_u32(least, rank), max_u32(greatest, rank)
        least, greatest = self.extremes(least, greatest)
        expected = Float32(topk) * Float32(VECTOR * groups) / Float32(count)
        wanted = cutlass.min(Int32(expected + 4.0 * cute.math.sqrt(expected) + 8.0), VECTOR * groups)
        low, width, need, more = least, greatest - least, wanted, Boolean(True)
        for _ in cutlass.range(2, unroll=1):
            if more:
                shift = cutlass.max(bit_length(width) - (BINS.bit_length() - 1), 0)
                self.find(VECTOR * groups, low, width, shift, need)
                low = low + (Uint32(self.smem.found[0]) << Uint32(shift))
                width = (Uint32(1) << Uint32(shift)) - 1
                need = need - self.smem.found[1]
                more = self.smem.found[2] * COARSE > wanted
        return max_u32(low, Uint32(LEAST))

    @cute.jit
    def find(self, sampled: Int32, low: Uint32, width: Uint32, shift: Int32, need: Int32):
        """Finds the bin of the sample's `need`-th greatest rank in [low, low + width]: (its number, how many are above
        it, how many in it).
        """
        for i in cutlass.range(self.thread, BINS, THREADS):
            self.smem.bins[i] = 0
        cute.arch.sync_threads()
        for i in cutlass.range(self.thread, sampled, THREADS):
            rank = Uint32(self.smem.ranks[i])
            if (rank >= low) & (rank - low <= width):
                count_one(self.smem.bins, BINS - 1 - Int32((rank - low) >> Uint32(shift)))
        cute.arch.sync_threads()
        bins_of_thread = BINS // THREADS
        mine = Int32(0)
        for j in cutlass.range_constexpr(bins_of_thread):
            mine += self.smem.bins[self.thread * bins_of_thread + j]
        reached = self.sum_before(mine)
        if (reached < need) & (need <= reached + mine):
            place, above, here = Int32(0), Int32(0), Int32(0)
            for j in cutlass.range_constexpr(bins_of_thread):
                count = self.smem.bins[self.thread * bins_of_thread + j]
                if (reached < need) & (need <= reached + count):
                    place, above, here = BINS - 1 - (self.thread * bins_of_thread + j), reached, count
                reached += count
            for i, x in enumerate((place, above, here, Int32(0))):  # read as one vector
                self.smem.found[i] = x
        cute.arch.sync_threads()

    @cute.jit
    def collect(self, row: Row, lower: Uint32) -> tuple[Int32, Uint32, Uint32]:
        """Collects all scores of at least this rank, in SMEM as far as they fit: (how many, their least rank,
        greatest).
        """
        last = row.first + row.count
        begin = row.first // VECTOR * VECTOR
        collected, least, greatest = Int32(0), Uint32(0xFFFFFFFF), Uint32(0)
        lanes_below = (Int32(1) << self.lane) - 1
        bits = cute.make_rmem_tensor((VECTOR, VECTORS), Uint32)
        offset = cute.make_rmem_tensor(VECTORS, Int32)
        for first in cutlass.range(begin, last, WARPS * AT_A_TIME, unroll=1):
            mine0 = first + self.warp * AT_A_TIME + self.lane * VECTOR
            bits.fill(0)
            for v in cutlass.range_constexpr(VECTORS):
                if mine0 + v * WARP * VECTOR < last:
                    load_vector(row.line + mine0 + v * WARP * VECTOR, bits[None, v])
            mine = Int32(0)
            for v in cutlass.range_constexpr(VECTORS):
                offset[v] = mine
                for e in cutlass.range_constexpr(VECTOR):
                    entry = mine0 + (v * WARP * VECTOR + e)
                    seen = (entry >= row.first) & (entry < last)
                    rank = rank_of(bits[e, v]) if seen else Uint32(0)
                    bits[e, v] = rank
                    reach = cute.arch.vote_ballot_sync(rank >= lower)
                    offset[v] += cute.arch.popc(reach & lanes_below)
                    mine += cute.arch.popc(reach)
            before, total = self.sums_before(mine)
            for v in cutlass.range_constexpr(VECTORS):
                place = collected + before + offset[v]
                for e in cutlass.range_constexpr(VECTOR):
                    rank = Uint32(bits[e, v])
                    if rank >= lower:
                        least, greatest = min_u32(least, rank), max_u32(greatest, rank)
                        if place < CAPACITY:
                            self.smem.ranks[place] = rank
                            self.smem.entries[place] = mine0 + (v * WARP * VECTOR + e)
                        place += 1
            collected += total
            cute.arch.sync_threads()
        least, greatest = self.extremes(least, greatest)
        return collected, least, greatest

    @cute.jit
    def narrow(self, source, low: Uint32, shift: Int32, topk: Int32) -> tuple[Uint32, Int32]:
        """(rank, ties): the topk greatest are those above the rank, and the first `ties` of those equal to it.

        All ranks are in [low, low + (256 << shift)).
        """
        need, more, width = topk, Boolean(True), Uint32(0xFFFFFFFF)
        for _ in cutlass.range(4, unroll=1):
            if more:
                self.smem.bins[self.thread] = 0
                cute.arch.sync_threads()
                for i in cutlass.range(self.thread, source.count, THREADS):
                    rank = source.rank(i)
                    if (rank >= low) & (rank - low <= width):
                        count_one(self.smem.bins, THREADS - 1 - Int32((rank - low) >> Uint32(shift)))
                cute.arch.sync_threads()
                here = self.smem.bins[self.thread]
                above = self.sum_before(here)
                if (above < need) & (need <= above + here):
                    for i, x in enumerate((THREADS - 1 - self.thread, above, here, Int32(0))):  # read as one vector
                        self.smem.found[i] = x
                cute.arch.sync_threads()
                low = low + (Uint32(self.smem.found[0]) << Uint32(shift))
                width = (Uint32(1) << Uint32(shift)) - 1
                need = need - self.smem.found[1]
                all_of_them = need == self.smem.found[2]
                if all_of_them:
                    low, need = low - 1, Int32(0)
                more = (shift > 0) & (all_of_them == Boolean(False))
                shift = cutlass.max(shift - 8, 0)
        return low, need

    @cute.jit
    def emit(self, source, rank: Uint32, ties: Int32, row: Row, indices: cute.Pointer, values: cute.Pointer, wants):
        """Emits what `narrow` found, in order: each warp looks through a part of the source, twice."""
        part = ceil_div(source.count, Int32(THREADS)) * WARP
        first = self.warp * part
        last = cutlass.min(first + part, source.count)
        lanes_below = (Int32(1) << self.lane) - 1
        over, equal = Int32(0), Int32(0)
        for i0 in cutlass.range(first, last, WARP, unroll=1):
            is_over, is_equal = self.judge(source, i0 + self.lane, last, rank)
            over += cute.arch.popc(cute.arch.vote_ballot_sync(is_over))
            equal += cute.arch.popc(cute.arch.vote_ballot_sync(is_equal))
        over, _ = self.sums_before(over)
        equal, _ = self.sums_before(equal, 1)
        for i0 in cutlass.range(first, last, WARP, unroll=1):
            i = i0 + self.lane
            is_over, is_equal = self.judge(source, i, last, rank)
            overs, equals = cute.arch.vote_ballot_sync(is_over), cute.arch.vote_ballot_sync(is_equal)
            equal_before = equal + cute.arch.popc(equals & lanes_below)
            if is_over | (is_equal & (equal_before < ties)):
                place = over + cute.arch.popc(overs & lanes_below) + cutlass.min(equal_before, ties)
                entry = source.entry(i)
                store(indices + place, entry)
                if wants != 0:
                    store(values + place, load(row.line + entry))
            over += cute.arch.popc(overs)
            equal += cute.arch.popc(equals)

    @cute.jit
    def judge(self, source, i: Int32, last: Int32, rank: Uint32) -> tuple[Boolean, Boolean]:
        """Tells whether the i-th score is above the rank, and whether it equals it."""
        its = source.rank(cutlass.min(i, last - 1))
        there = i < last
        return there & (its > rank), there & (its == rank)


def bit_length(x: Uint32) -> Int32:
    return 32 - leading_zeros(x)


def count_one(bins: cute.Tensor, place: Int32) -> None:
    count_in_shared(Int32((bins.iterator + place).toint()))


def load_vector(p: cute.Pointer, to: cute.Tensor) -> None:
    cute.autovec_copy(cute.make_tensor(p.align(4 * VECTOR), cute.make_layout(VECTOR)), to)
