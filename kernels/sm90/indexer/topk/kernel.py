"""The greatest `topk` of each row of scores, exactly, in ascending order of entries; one CTA a row.

    guess     a histogram of every eighth score gives a rank that somewhat more than topk scores should reach
    collect   one pass over all scores: those that reach the rank go to SMEM, in order
    narrow    a radix select, 8 bits at a time: the rank of the last one to choose, and how many of that rank to choose
    emit      those above that rank, and the first of those equal to it, in order

Where the guess was wrong, or too many scores are equal, `narrow` and `emit` run over the row itself: slower, and
equally exact. So the choice depends on the scores alone. A score's rank is an unsigned number that orders as the score
does; -0 equals 0, NaN comes before -inf, and 0 is the rank of what the query does not see.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_ptr
from cutlass.memory import SmemAllocator

from kernels.abi import TopK
from kernels.aot import Compiled, compile_ahead
from kernels.lib.launch import WARP, i32, launch_facts
from kernels.lib.ptx import ptx
from kernels.lib.rows import ceil_div, load, store

VECTOR = 4  # scores of a load
SAMPLED = 8  # the sample takes one vector of this many
LEAST = 1  # the rank of NaN

THREADS = 256
CTAS = 5  # CTAs of an SM, by what its SMEM holds
WARPS = THREADS // WARP
CAPACITY = 4096  # scores that SMEM holds
MAX_TOPK = CAPACITY // 2  # otherwise the collected scores, somewhat more than topk, would not fit
BINS = 2048  # bins of the guess; `narrow` has one for each thread
VECTORS = 4  # vectors that a thread loads at a time
AT_A_TIME = WARP * VECTOR * VECTORS  # scores of a warp's load
SMEM_BYTES = 4 * (2 * CAPACITY + BINS + 2 * WARPS + 4)


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

    ranks: cute.Tensor  # (CAPACITY,)
    entries: cute.Tensor  # (CAPACITY,)
    bins: cute.Tensor  # (BINS,): the greatest ranks first
    notes: cute.Tensor  # (WARPS, 2): numbers of each warp, in two sets used in turn
    found: cute.Tensor  # (4,): numbers that one thread found
    thread: Int32
    warp: Int32
    lane: Int32

    @staticmethod
    def of() -> "Chooser":
        smem = SmemAllocator()

        def words(n: int, dtype=Int32) -> cute.Tensor:
            return smem.allocate_tensor(dtype, cute.make_layout(n), 16)

        thread = cute.arch.thread_idx()[0]
        warp, lane = cute.arch.make_warp_uniform(thread // WARP), cute.arch.lane_idx()
        notes = smem.allocate_tensor(Int32, cute.make_layout((WARPS, 2)), 16)
        lists = words(CAPACITY, Uint32), words(CAPACITY)
        return Chooser(*lists, words(BINS), notes, words(4), thread, warp, lane)

    # ---- the block as a whole

    @cute.jit
    def sums_before(self, x: Int32, turn: cutlass.Constexpr = 0) -> tuple[Int32, Int32]:
        """(the sum of the x of all warps before this one, of all), where a warp's threads have the same x."""
        if self.lane == 0:
            self.notes[self.warp, turn] = x
        cute.arch.sync_threads()
        before, total = Int32(0), Int32(0)
        for w in cutlass.range_constexpr(WARPS):
            note = self.notes[w, turn]
            before += note * Int32(w < self.warp)
            total += note
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
        least, greatest = (ptx(f"redux.sync.{name}.u32 $0, $1, 0xffffffff;", x, gives=(Uint32,))[0]
                           for name, x in (("min", least), ("max", greatest)))  # fmt: skip
        if self.lane == 0:
            self.notes[self.warp, 0] = Int32(least)
            self.notes[self.warp, 1] = Int32(greatest)
        cute.arch.sync_threads()
        for w in cutlass.range_constexpr(WARPS):
            least = smaller(least, Uint32(self.notes[w, 0]))
            greatest = greater(greatest, Uint32(self.notes[w, 1]))
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
                self.ranks[VECTOR * g + e] = rank
                least, greatest = smaller(least, rank), greater(greatest, rank)
        for i in cutlass.range(self.thread, BINS, THREADS):
            self.bins[i] = 0
        least, greatest = self.extremes(least, greatest)
        shift = cutlass.max(bit_length(greatest - least) - (BINS.bit_length() - 1), 0)
        for i in cutlass.range(self.thread, VECTOR * groups, THREADS):
            count_one(self.bins, BINS - 1 - Int32((Uint32(self.ranks[i]) - least) >> Uint32(shift)))
        cute.arch.sync_threads()
        expected = Float32(topk) * Float32(VECTOR * groups) / Float32(count)
        wanted = cutlass.min(Int32(expected + 4.0 * cute.math.sqrt(expected) + 8.0), VECTOR * groups)
        each = BINS // THREADS
        mine = Int32(0)
        for j in cutlass.range_constexpr(each):
            mine += self.bins[self.thread * each + j]
        reached = self.sum_before(mine)
        if (reached < wanted) & (wanted <= reached + mine):
            place = Int32(0)
            for j in cutlass.range_constexpr(each):
                if reached < wanted:
                    place = BINS - 1 - (self.thread * each + j)
                reached += self.bins[self.thread * each + j]
            self.found[0] = place
        cute.arch.sync_threads()
        return greater(least + (Uint32(self.found[0]) << Uint32(shift)), Uint32(LEAST))

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
                        least, greatest = smaller(least, rank), greater(greatest, rank)
                        if place < CAPACITY:
                            self.ranks[place] = rank
                            self.entries[place] = mine0 + (v * WARP * VECTOR + e)
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
                self.bins[self.thread] = 0
                cute.arch.sync_threads()
                for i in cutlass.range(self.thread, source.count, THREADS):
                    rank = source.rank(i)
                    if (rank >= low) & (rank - low <= width):
                        count_one(self.bins, THREADS - 1 - Int32((rank - low) >> Uint32(shift)))
                cute.arch.sync_threads()
                here = self.bins[self.thread]
                above = self.sum_before(here)
                if (above < need) & (need <= above + here):
                    for i, x in enumerate((THREADS - 1 - self.thread, above, here, Int32(0))):  # read as one vector
                        self.found[i] = x
                cute.arch.sync_threads()
                low = low + (Uint32(self.found[0]) << Uint32(shift))
                width = (Uint32(1) << Uint32(shift)) - 1
                need = need - self.found[1]
                all_of_them = need == self.found[2]
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
        """Whether the i-th score is above the rank, and whether it equals it."""
        its = source.rank(cutlass.min(i, last - 1))
        there = i < last
        return there & (its > rank), there & (its == rank)


class RowTopK:
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
        self.kernel(Arrays(scores, start, stop, indices, values), n).launch(
            grid=(rows, 1, 1),
            block=(THREADS, 1, 1),
            smem=SMEM_BYTES,
            stream=stream,
            min_blocks_per_mp=CTAS,
            preferred_smem_carveout=100,  # otherwise the DSL asks a driver
        )

    @cute.kernel
    def kernel(self, arrays: Arrays, n: Extents):
        line = cute.arch.block_idx()[0]
        block = n.first_block + line // n.queries
        entry, query = block // n.blocks_of_entry, block % n.blocks_of_entry * n.queries + line % n.queries
        chooser = Chooser.of()
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
        for i in cutlass.range(cute.arch.thread_idx()[0], n.topk, THREADS):
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
            listed = Listed(chooser.ranks, chooser.entries, collected)
            shift = cutlass.max(bit_length(greatest - least) - 8, 0)
            rank, ties = chooser.narrow(listed, least, shift, n.topk)
            chooser.emit(listed, rank, ties, row, indices, values, n.wants_values)
        else:
            rank, ties = chooser.narrow(row, Uint32(LEAST), Int32(24), n.topk)
            chooser.emit(row, rank, ties, row, indices, values, n.wants_values)


def rank_of(bits: Uint32) -> Uint32:
    """The rank of a score, by its bits."""
    text = (
        "{ .reg .pred p; .reg .b32 x, s; setp.eq.u32 p, $1, 0x80000000; selp.b32 x, 0, $1, p;"
        " shr.s32 s, x, 31; or.b32 s, s, 0x80000000; xor.b32 s, s, x;"
        " and.b32 x, x, 0x7fffffff; setp.gt.u32 p, x, 0x7f800000; selp.b32 $0, 1, s, p; }"
    )
    return ptx(text, Uint32(bits), gives=(Uint32,), pure=True)[0]


def bit_length(x: Uint32) -> Int32:
    return 32 - ptx("clz.b32 $0, $1;", Uint32(x), gives=(Int32,), pure=True)[0]


def smaller(a: Uint32, b: Uint32) -> Uint32:
    return ptx("min.u32 $0, $1, $2;", Uint32(a), Uint32(b), gives=(Uint32,), pure=True)[0]


def greater(a: Uint32, b: Uint32) -> Uint32:
    return ptx("max.u32 $0, $1, $2;", Uint32(a), Uint32(b), gives=(Uint32,), pure=True)[0]


def count_one(bins: cute.Tensor, place: Int32) -> None:
    ptx("red.shared.add.u32 [$0], 1;", Int32((bins.iterator + place).toint()))


def load_vector(p: cute.Pointer, to: cute.Tensor) -> None:
    cute.autovec_copy(cute.make_tensor(p.align(4 * VECTOR), cute.make_layout(VECTOR)), to)


@dataclass(frozen=True)
class Config:
    """Facts that a caller must know."""

    tile_m: int = 1  # rows of a CTA
    tile_n: int = CAPACITY
    threads: int = THREADS
    smem_bytes: int = SMEM_BYTES


def compile(variant: TopK, out_dir: Path) -> Compiled:
    if variant.max_topk > MAX_TOPK:
        raise ValueError(f"topk is {MAX_TOPK} at most, got {variant.max_topk}")
    return compile_ahead(
        RowTopK(),
        RowTopK.kernel,
        *(make_ptr(t, 16, cute.AddressSpace.gmem, assumed_align=4) for t in (Uint32, Int32, Int32, Int32, Uint32)),
        *(i32() for _ in range(8)),
        name="indexer_topk_sm90",
        arch=variant.arch,
        out_dir=out_dir,
        facts=launch_facts(Config(), ctas=CTAS),
    )
