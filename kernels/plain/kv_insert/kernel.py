"""New entries of a cache, from a step's products to where they belong.

    pooled      state[p % ring] = row + ape[p % ratio];   x = Σ_t kv[t] softmax_t(score[t])    a CTA a sequence
    otherwise   x = row                                                                        a warp a token
    then        norm, RoPE of the last 64 numbers, Hadamard transform; packed, to slot or page  a warp an entry

A row of a pooled token has kv and then the score. With two blocks an entry pools the block before too, by the first
half of kv's columns, and its own by the second. The norm may cover the first 512 numbers of a token's row alone; then
RoPE turns the 64 after them, and each lane has a pair of these. `layers/compressor.py` says what is computed. Where
blocks are long, the ring has only the tokens that may be taken back; those before them are in the running sums of the
block.

It is bound by latency: a step brings a few kilobytes. So an entry is pooled only in the step that completes its block,
all of a thread's loads are under way together, and what follows needs no other thread than those of one warp.
"""

from pathlib import Path
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from kernels.abi import KvInsert
from kernels.aot import Compiled
from kernels.lib.hadamard import hadamard, rounded
from kernels.lib.launch import Kernel, i32, pointers
from kernels.lib.ptx import round_pair
from kernels.lib.rows import WARP, ceil_div, load, store
from kernels.lib.softmax import LOG2_E, exp2
from kernels.packings import ROPE

from .config import AT_ONCE, COLUMNS, PARTS, Config
from .packed import write_packed


class Arrays(NamedTuple):
    rows: cute.Pointer  # float32 [b, s, columns]: the width columns from `column` on
    ape: cute.Pointer  # float32 [ratio, width / 2], or none
    norm: cute.Pointer  # float32 [d]
    table: cute.Pointer  # float32 [b, n, ROPE]: cos and sin of an entry's position, by turns
    bounds: cute.Pointer  # int32 [b, n_bounds], tokens with the new ones; and where these begin, if not s before that
    block_table: cute.Pointer  # int32 [b, table_width]
    state: cute.Pointer  # float32 [b, ring, width]
    sums: cute.Pointer  # float32 [b, PARTS, d], or none
    folded: cute.Pointer  # int32 [b], or none
    cache: cute.Pointer  # [pages, page, d], or packed [pages, page_bytes]


class Extents(NamedTuple):
    """The scalars of a launch, in the order of the kernel's parameters."""

    b: Int32
    s: Int32  # new tokens of a sequence
    n: Int32  # entries that they may complete
    width: Int32
    columns: Int32
    column: Int32
    has_ape: Int32
    n_bounds: Int32
    ratio: Int32
    ring: Int32
    pages: Int32
    page: Int32  # entries
    page_bytes: Int32
    table_width: Int32  # pages of a sequence; 0 where each has one, its own
    eps: Float32


class KvInsertKernel(Kernel):
    symbol = "kv_insert"

    @cute.jit
    def __call__(
        self,
        rows: cute.Pointer,
        ape: cute.Pointer,
        norm: cute.Pointer,
        table: cute.Pointer,
        bounds: cute.Pointer,
        block_table: cute.Pointer,
        state: cute.Pointer,
        sums: cute.Pointer,
        folded: cute.Pointer,
        cache: cute.Pointer,
        b: Int32,
        s: Int32,
        n: Int32,
        width: Int32,
        columns: Int32,
        column: Int32,
        has_ape: Int32,
        n_bounds: Int32,
        ratio: Int32,
        ring: Int32,
        pages: Int32,
        page: Int32,
        page_bytes: Int32,
        table_width: Int32,
        eps: Float32,
        stream: cuda.CUstream,
    ):
        c = self.config
        arrays = Arrays(rows, ape, norm, table, bounds, block_table, state, sums, folded, cache)
        cached = (pages, page, page_bytes, table_width)
        x = Extents(b, s, n, width, columns, column, has_ape, n_bounds, ratio, ring, *cached, eps)
        self.launch(arrays, x, ctas=ceil_div(b if c.pooled else b * s, Int32(c.tile_m)), stream=stream)

    @cute.kernel
    def kernel(self, arrays: Arrays, n: Extents):
        if cutlass.const_expr(self.config.running):
            self.pool_running(arrays, n)
        elif cutlass.const_expr(self.config.pooled):
            self.pool_blocks(arrays, n)
        else:
            self.insert_token(arrays, n)

    @cute.jit
    def insert_token(self, arrays: Arrays, n: Extents):
        c, thread = self.config, cute.arch.thread_idx()[0]
        token = cute.arch.block_idx()[0] * c.warps + cute.arch.make_warp_uniform(thread // WARP)
        if token < n.b * n.s:
            sequence, i = token // n.s, token % n.s
            start, length = self.bounds(sequence, arrays, n)
            position = start + i
            if (position >= 0) & (position < length):
                numbers = cute.make_rmem_tensor(c.numbers, Float32)
                read(arrays.rows + (Int64(token) * n.columns + n.column + thread % WARP * c.numbers), numbers)
                after = None
                if cutlass.const_expr(c.rope):
                    after = cute.make_rmem_tensor(c.after, Float32)
                    column = n.column + (c.d + thread % WARP * c.after)
                    read(arrays.rows + (Int64(token) * n.columns + column), after)
                self.insert(numbers, after, sequence, i, position, arrays, n)

    @cute.jit
    def pool_blocks(self, arrays: Arrays, n: Extents):
        c, thread, sequence = self.config, cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        smem = SmemAllocator()
        parts = smem.allocate_tensor(Float32, cute.make_layout((c.d, PARTS, c.groups)), 16)
        pooled = smem.allocate_tensor(Float32, cute.make_layout(c.d), 16)
        start, length = self.bounds(sequence, arrays, n)
        ring = arrays.state + Int64(sequence) * n.ring * n.width
        self.keep_tokens(ring, start, length, sequence, arrays, n)
        cute.arch.sync_threads()
        first = start // n.ratio if start >= 0 else -((n.ratio - 1 - start) // n.ratio)
        for k in cutlass.range(n.n, unroll=1):
            entry = first + k
            end = (entry + 1) * n.ratio
            if (entry >= 0) & (end <= length) & (end > start):
                self.pool(ring, end, parts, n)
                cute.arch.sync_threads()
                pooled[thread] = merged(parts, thread, c.groups)
                cute.arch.sync_threads()
                if thread < WARP:
                    numbers = cute.make_rmem_tensor(c.numbers, Float32)
                    for j in cutlass.range_constexpr(c.numbers):
                        numbers[j] = pooled[thread * c.numbers + j]
                    self.insert(numbers, None, sequence, k, entry, arrays, n)

    @cute.jit
    def pool_running(self, arrays: Arrays, n: Extents):
        """A thread has a column: it folds the token that a new one displaces from the ring into the block's sums.

        Tokens are folded in their order, one by one, whenever it happens: an entry's bits depend on its tokens alone.
        """
        c, column, sequence = self.config, cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        pooled = SmemAllocator().allocate_tensor(Float32, cute.make_layout(c.d), 16)
        start, length = self.bounds(sequence, arrays, n)
        folded = load(arrays.folded + sequence)
        begin = cutlass.max(start, 0)
        if length > begin:  # in an idle place all stays as it is
            folded = cutlass.min(folded, begin)  # fewer if a sequence begins
        ring = arrays.state + (Int64(sequence) * n.ring * n.width + column)
        rows = arrays.rows + (Int64(sequence) * n.s * n.columns + n.column + column)
        sums = arrays.sums + (Int64(sequence) * PARTS * c.d + column)
        block = cute.make_rmem_tensor(PARTS, Float32)
        for j in cutlass.range_constexpr(PARTS):
            block[j] = load(sums + j * c.d)
        for i in cutlass.range(n.s, unroll=1):
            position = start + i
            if (position >= 0) & (position < length):
                slot = ring + Int64(position % n.ring) * n.width
                row = rows + Int64(i) * n.columns
                kv, score = load(row), load(row + c.d)
                if n.has_ape != 0:
                    score = score + load(arrays.ape + (Int64(position % n.ratio) * c.d + column))
                if position - n.ring >= folded:
                    folded = position - n.ring
                    if folded % n.ratio == 0:
                        clear(block)
                    fold(block, load(slot), load(slot + c.d))
                    folded += 1
                store(slot, kv)
                store(slot + c.d, score)
        for j in cutlass.range_constexpr(PARTS):
            store(sums + j * c.d, block[j])
        cute.arch.sync_threads()  # all have read the number
        if column == 0:
            store(arrays.folded + sequence, folded)
        entry = start // n.ratio
        end = (entry + 1) * n.ratio
        if (start >= 0) & (end <= length):
            if folded <= end - n.ratio:
                clear(block)
            for position in cutlass.range(cutlass.max(folded, end - n.ratio), end, unroll=4):
                slot = ring + Int64(position % n.ring) * n.width
                fold(block, load(slot), load(slot + c.d))
            pooled[column] = block[2] / block[1]
            cute.arch.sync_threads()
            if column < WARP:
                numbers = cute.make_rmem_tensor(c.numbers, Float32)
                for j in cutlass.range_constexpr(c.numbers):
                    numbers[j] = pooled[column * c.numbers + j]
                self.insert(numbers, None, sequence, Int32(0), entry, arrays, n)

    @cute.jit
    def bounds(self, sequence: Int32, arrays: Arrays, n: Extents) -> tuple[Int32, Int32]:
        """The position of a sequence's first row, and its tokens. Rows at later positions are padding."""
        length = load(arrays.bounds + sequence * n.n_bounds)
        start = length - n.s
        if n.n_bounds > 1:
            start = load(arrays.bounds + (sequence * n.n_bounds + 1))
        return start, length

    @cute.jit
    def keep_tokens(self, ring: cute.Pointer, start: Int32, length: Int32, sequence: Int32, arrays: Arrays, n: Extents):
        """Writes the new tokens to the ring."""
        channels = n.width // 2
        for i in cutlass.range(n.s, unroll=1):
            position = start + i
            if (position >= 0) & (position < length):
                source = arrays.rows + ((Int64(sequence) * n.s + i) * n.columns + n.column)
                target = ring + Int64(position % n.ring) * n.width
                ape = arrays.ape + Int64(position % n.ratio) * channels
                for column in cutlass.range(
                    cute.arch.thread_idx()[0] * COLUMNS, n.width, self.config.threads * COLUMNS, unroll=1
                ):
                    numbers, more = (cute.make_rmem_tensor(COLUMNS, Float32) for _ in range(2))
                    read(source + column, numbers)
                    if (n.has_ape != 0) & (column >= channels):
                        read(ape + (column - channels), more)
                        for j in cutlass.range_constexpr(COLUMNS):
                            numbers[j] = numbers[j] + more[j]
                    place = cute.make_tensor((target + column).align(16), cute.make_layout(COLUMNS))
                    cute.autovec_copy(numbers, place)

    @cute.jit
    def pool(self, ring: cute.Pointer, end: Int32, parts: cute.Tensor, n: Extents):
        """Pools the tokens of an entry whose block ends before position `end`: each group of threads a part of them.

        A part is the greatest score of every column, the sum of weights, and the sum of weights times kv.
        """
        c, thread = self.config, cute.arch.thread_idx()[0]
        group, column = thread // c.lanes, thread % c.lanes * COLUMNS
        channels = n.width // 2
        blocks = channels // c.d
        total = blocks * n.ratio
        top, weights, sums = (cute.make_rmem_tensor(COLUMNS, Float32) for _ in range(3))
        top.fill(-Float32.inf)
        weights.fill(0.0)
        sums.fill(0.0)
        kv, score = (cute.make_rmem_tensor((COLUMNS, AT_ONCE), Float32) for _ in range(2))
        for begin in cutlass.range(group, total, c.groups * AT_ONCE, unroll=1):
            for i in cutlass.range_constexpr(AT_ONCE):
                t = begin + i * c.groups
                position = end - total + t
                there = (t < total) & (position >= 0)
                slot = (position if there else Int32(0)) % n.ring
                is_before = (blocks == 2) & (t < n.ratio)
                part = Int32(0) if is_before else (blocks - 1) * c.d
                place = ring + (Int64(slot) * n.width + part + column)
                read(place, kv[None, i])
                read(place + channels, score[None, i])
                for j in cutlass.range_constexpr(COLUMNS):  # an absent token's slot may hold anything
                    kv[j, i] = kv[j, i] if there else Float32(0.0)
                    score[j, i] = score[j, i] if there else -Float32.inf
            for j in cutlass.range_constexpr(COLUMNS):
                before, most = top[j], top[j]
                for i in cutlass.range_constexpr(AT_ONCE):
                    most = cute.arch.fmax(most, score[j, i])
                shift = Float32(0.0) if most == -Float32.inf else most
                factor = exp2((before - shift) * LOG2_E)
                weight_sum, sum_ = weights[j] * factor, sums[j] * factor
                for i in cutlass.range_constexpr(AT_ONCE):
                    weight = exp2((score[j, i] - shift) * LOG2_E)
                    weight_sum, sum_ = weight_sum + weight, sum_ + weight * kv[j, i]
                top[j], weights[j], sums[j] = most, weight_sum, sum_
        for i, numbers in enumerate((top, weights, sums)):
            for j in cutlass.range_constexpr(COLUMNS):
                parts[column + j, i, group] = numbers[j]

    @cute.jit
    def insert(
        self,
        numbers: cute.Tensor,
        after: cute.Tensor | None,
        sequence: Int32,
        k: Int32,
        index: Int32,
        arrays: Arrays,
        n: Extents,
    ):
        """A warp inserts entry `index` of a sequence, whose row of the table is k, from each lane's numbers of it.

        after: those of RoPE, if they follow the ones that the norm covers; else they are the last of these.
        """
        c, lane = self.config, cute.arch.lane_idx()
        turned, count = (after, c.after) if cutlass.const_expr(c.rope) else (numbers, c.numbers)
        first = WARP - ROPE // count  # of the lanes whose numbers are turned
        weight, turns = (cute.make_rmem_tensor(x, Float32) for x in (c.numbers, count))
        read(arrays.norm + lane * c.numbers, weight)
        at = (Int64(sequence) * n.n + k) * ROPE + cutlass.max(lane - first, 0) * count
        read(arrays.table + at, turns)
        rounded(numbers, self.dtype)
        if cutlass.const_expr(c.rope):
            rounded(after, self.dtype)
        squares = Float32(0.0)
        for j in cutlass.range_constexpr(c.numbers):
            squares = squares + numbers[j] * numbers[j]
        for offset in (16, 8, 4, 2, 1):
            squares = squares + cute.arch.shuffle_sync_bfly(squares, offset=offset)
        r = cute.math.rsqrt(squares * (1.0 / c.d) + n.eps, fastmath=True)
        for j in cutlass.range_constexpr(c.numbers):
            numbers[j] = numbers[j] * r * weight[j]
        rounded(numbers, self.dtype)
        for j in cutlass.range_constexpr(0, count, 2):
            a, b = turned[j], turned[j + 1]
            cos = turns[j] if lane >= first else Float32(1.0)
            sin = turns[j + 1] if lane >= first else Float32(0.0)
            turned[j], turned[j + 1] = a * cos - b * sin, a * sin + b * cos
        rounded(turned, self.dtype)
        if cutlass.const_expr(c.hadamard):
            hadamard(numbers, lane, c.d)
            rounded(numbers, self.dtype)
        self.write(numbers, after, sequence, index, arrays, n)

    @cute.jit
    def write(
        self,
        numbers: cute.Tensor,
        after: cute.Tensor | None,
        sequence: Int32,
        index: Int32,
        arrays: Arrays,
        n: Extents,
    ):
        """To its slot of the sequence's page, or of the page that the table names, if there is one."""
        c = self.config
        page, at, there = sequence, index % n.page, True
        if n.table_width != 0:
            which = index // n.page % n.table_width
            page = load(arrays.block_table + (Int64(sequence) * n.table_width + which))
            there = (page >= 0) & (page < n.pages)
        if there:
            if cutlass.const_expr(c.layout is not None):
                write_packed(numbers, after, arrays.cache + Int64(page) * n.page_bytes, at, n.page, c)
            else:
                entry = arrays.cache + (Int64(page) * n.page + at) * c.entry
                write_rounded(numbers, entry + cute.arch.lane_idx() * c.numbers)
                if cutlass.const_expr(c.rope):
                    write_rounded(after, entry + (c.d + cute.arch.lane_idx() * c.after))

    def examples(self, variant: KvInsert) -> tuple:
        cache = "bytes" if variant.packing else "cache"
        arrays = pointers(variant.dtype, *["float32"] * 4, *["int32"] * 2, *["float32"] * 2, "int32", cache)
        return *arrays, *(i32() for _ in range(14)), Float32(1e-6)


def read(source: cute.Pointer, target: cute.Tensor) -> None:
    count = cute.size(target)
    cute.autovec_copy(cute.make_tensor(source.align(min(4 * count, 16)), cute.make_layout(count)), target)


def clear(block: cute.Tensor) -> None:
    """No tokens."""
    block[0], block[1], block[2] = -Float32.inf, Float32(0.0), Float32(0.0)


def fold(block: cute.Tensor, kv: Float32, score: Float32) -> None:
    """Adds a token to the greatest score, the sum of weights, and the sum of weights times kv."""
    most = cute.arch.fmax(block[0], score)
    factor, weight = exp2((block[0] - most) * LOG2_E), exp2((score - most) * LOG2_E)
    block[0], block[1], block[2] = most, block[1] * factor + weight, block[2] * factor + weight * kv


@cute.jit
def merged(parts: cute.Tensor, column: Int32, groups: cutlass.Constexpr) -> Float32:
    """A column of the entry that all parts make; at least one of them has a token."""
    top = -Float32.inf
    for g in cutlass.range_constexpr(groups):
        top = cute.arch.fmax(top, parts[column, 0, g])
    weights, sums = Float32(0.0), Float32(0.0)
    for g in cutlass.range_constexpr(groups):
        factor = exp2((parts[column, 0, g] - top) * LOG2_E)
        weights, sums = weights + parts[column, 1, g] * factor, sums + parts[column, 2, g] * factor
    return sums / weights


def write_rounded(numbers: cute.Tensor, target: cute.Pointer) -> None:
    count = cute.size(numbers)
    words = cute.make_rmem_tensor(count // 2, Uint32)
    for j in range(count // 2):
        words[j] = round_pair(numbers[2 * j], numbers[2 * j + 1], target.dtype)
    place = cute.recast_ptr(target, dtype=Uint32).align(min(2 * count, 16))
    cute.autovec_copy(words, cute.make_tensor(place, cute.make_layout(count // 2)))


def compile(variant: KvInsert, out_dir: Path) -> Compiled:
    kind = variant.packing, variant.pooled, variant.hadamard, variant.running, variant.rope
    return KvInsertKernel(Config(variant.dtype, variant.d, *kind)).compile(variant, out_dir)
