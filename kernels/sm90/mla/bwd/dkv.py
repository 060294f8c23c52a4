"""The gradient of a tile of keys: `mla_bwd` makes it here, and adds it to memory.

A lane's accumulator has four of 16 columns: two of the first eight and two of the others. These four lie together in
memory, so that a lane adds 16 bytes without an exchange with others; `_host/gradients.py` puts the columns back.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warp as cute_warp
from cutlass.cute.nvgpu import warpgroup

from kernels.lib.cluster import Peer
from kernels.lib.launch import WARP, WARPGROUP
from kernels.lib.ptx import (
    add_four,
    add_word,
    address_again,
    arrive_if,
    bits_of,
    cluster_among,
    load_again,
    load_shared,
    load_shared_four,
    nearest,
    send_words,
    store_shared_four,
    thread_id_again,
)
from kernels.lib.rows import Extents, row_of
from kernels.lib.softmax import ROWS, by_row
from kernels.lib.wgmma import (
    MN_MAJOR,
    accumulator,
    multiply,
    operand_a,
    operand_b,
    register_operand,
    tiled_mma,
    transposed,
)

from .smem import RIGHT, Barriers, Shared

KEYS = 16  # of a tile that a warp has
FOUR_ROWS = 4 * 128  # bytes of 32 columns of four keys


@dataclass(frozen=True)
class Destination:
    """The places in dKV to which a thread adds."""

    first: Int64  # address of key 0, in the thread's column of a chunk
    keys: tuple[Int32, ...] | cute.Tensor  # negative where there is no key: the thread's numbers, or the tile's in SMEM
    step: Int32  # bytes from a key to the next
    units: tuple[Float32, ...] | None = None  # to 1, of the thread's keys in an accumulator, where sums are integers

    def of_key(self, i: int) -> tuple[Int64, Int32]:
        """The address of the thread's i-th key, and a number that is negative where there is no such key."""
        key = self.keys[i] if isinstance(self.keys, tuple) else self.keys[staged_row(thread_again(), i)]
        return self.first + Int64(cutlass.max(key, Int32(0))) * self.step, key


@dataclass(frozen=True)
class Consecutive:
    """The places in dKV to which a thread adds, if keys follow one another."""

    first: Int64  # address of the thread's first key, in its column of a chunk
    after: Int32  # how many keys come after that one; negative where it is not there itself
    step: Int32  # bytes from a key to the next
    keys: int  # from one of the thread's to the next

    def of_key(self, i: int) -> tuple[Int64, Int32]:
        return self.first + Int64(self.step * self.keys) * i, self.after - i * self.keys


class Chunk(NamedTuple):
    """Some columns of a tile's dKV. In a cluster chunks come in pairs: in each a CTA has its `own` one, to which it
    adds its peer's result, and one that it sends to the peer."""

    column0: int  # number of the chunk, or of the pair
    own: bool = True
    pair: int = 0  # one of those of a tile


@dataclass(frozen=True)
class KvGradient:
    """One side's part of a tile's dKV, chunk by chunk, and the way into memory."""

    config: Any  # kernel.Config
    chunks: tuple[Chunk, ...]
    merges: bool  # whether the chunks are those of a cluster
    rank: Int32  # rank of the CTA
    mma: tuple[cute.TiledMma, ...]  # with P', and with dS'
    of_keys: tuple[cute.Tensor, ...]  # P', times the sink's factor, and dS': in registers, or dS' in SMEM
    of_rows: tuple[tuple[cute.Tensor, ...], ...]  # dO and Q, by chunk; of RoPE's columns Q alone
    acc: tuple[cute.Tensor, ...]  # accumulators of chunks under way
    slots: tuple[cute.Tensor, ...]  # SMEM: one slot to go through, or two for the peer's numbers

    @staticmethod
    def of(c: Any, side: int, dtype, smem: Shared) -> "KvGradient":
        rank = cute.arch.block_idx()[0] % c.cluster
        mma = tiled_mma(dtype, c.chunk, MN_MAJOR, warpgroup.OperandSource.RMEM)
        merges = c.cluster > 1 and side == RIGHT
        columns = [i * c.chunk for i in c.chunks(side)]
        chunks = tuple(map(Chunk, columns))
        if merges:  # two are sent before the wait for the first
            pairs = range(len(columns) // 2)
            chunks = tuple(
                Chunk(columns[2 * pair], own, pair)
                for first in pairs[::2]
                for own in (False, True)
                for pair in (first, first + 1)
            )

        def operand(x: cute.Tensor, chunk: Chunk) -> cute.Tensor:
            if not merges:
                return operand_b(
                    mma, transposed(cute.local_tile(x, (c.tile_m, c.chunk), (0, chunk.column0 // c.chunk)))
                )
            pair = cute.local_tile(x, (c.tile_m, 2 * c.chunk), (0, chunk.column0 // (2 * c.chunk)))
            return operand_b(
                mma, transposed(cute.local_tile(pair, (c.tile_m, c.chunk), (0, rank if chunk.own else 1 - rank)))
            )

        of_rows = tuple(
            tuple(operand(x, chunk) for x in (smem.do, smem.q)[chunk.column0 >= c.d_v :]) for chunk in chunks
        )
        of_keys = tuple(register_operand(mma, c.tile_m, dtype) for _ in range(2 - c.reads_ds))
        with_ds = mma
        if c.reads_ds:
            with_ds = tiled_mma(dtype, c.chunk, MN_MAJOR, a_major=MN_MAJOR)
            of_keys = (*of_keys, operand_a(with_ds, transposed(smem.ds)))
        acc = tuple(accumulator(mma, c.chunk) for _ in range(c.under_way))
        slots = (smem.out[None, 0], smem.out[None, 1]) if merges else (smem.out[None, side],)
        return KvGradient(c, chunks, merges, rank, (mma, with_ds), of_keys, of_rows, acc, slots)

    @property
    def thread(self) -> Int32:
        return cute.arch.thread_idx()[0] % WARPGROUP

    @cute.jit
    def load(self, smem: Shared):
        """Loads P and dS of a tile, or P alone, from SMEM, where they are rows x keys."""
        atom = cute.make_copy_atom(cute_warp.LdMatrix8x8x16bOp(True, 4), smem.p.element_type)
        copy = cute.make_tiled_copy_A(atom, self.mma[0]).get_slice(thread_again())
        tiles = (smem.p, smem.ds)[: 2 - self.config.reads_ds]
        for tile, operand in zip(tiles, self.of_keys, strict=False):
            cute.copy(atom, copy.partition_S(transposed(tile)), copy.retile(operand))

    @cute.jit
    def make(self, i: cutlass.Constexpr):
        """Makes the i-th chunk, by a group of products for each operand."""
        count = len(self.of_rows[i])
        for j in cutlass.range_constexpr(count):
            which = 2 - count + j
            mma, of_keys = self.mma[which], self.of_keys[which]
            multiply(mma, self.acc[i % self.config.under_way], of_keys, self.of_rows[i][j], fresh=j == 0)

    def groups(self, chunks: range) -> int:
        """The number of groups of products that make these chunks, as far as there are such."""
        return sum(len(self.of_rows[i]) for i in chunks if i < len(self.chunks))

    @cute.jit
    def start(self):
        for i in cutlass.range_constexpr(self.config.under_way):
            self.make(i)

    def destination(
        self, gradient: Int64, listed: cute.Tensor, stop: Int32, n: Extents, units: Int64
    ) -> Destination | Consecutive:
        """The places to which this thread adds, for the tile whose keys are listed; a span's end at `stop`.

        units: the address of the first key's, in fixed point.
        """
        c, thread = self.config, self.thread
        heads = Int32(1) if c.gathers else n.h_kv  # of a key; those that are gathered have one
        column = thread % 4 * 4
        if c.deterministic:  # a column of all keys of a warp
            column = thread % WARP
        elif c.stages_sums:  # four keys, 16 of 128 bytes of each
            column = thread % 8 * 4
            if c.gathers:  # where rows are masked one by one, there are no registers for them
                listed = tuple(listed[staged_row(thread, i)] for i in range(4))
        elif not c.consecutive:
            listed = tuple(listed[row_of(thread, r)] for r in range(ROWS))
        if self.merges:
            column = column + self.rank * c.chunk
        step = heads * (c.d * 4)
        if c.consecutive:
            row, keys = (staged_row(thread, 0), 4) if c.stages_sums else (row_of(thread, 0), 8)
            key = listed[0] + row
            return Consecutive(gradient + column * 4 + Int64(key) * step, stop - 1 - key, step, keys)
        place = gradient + column * 4
        if c.deterministic:
            return Destination(place, listed, step, units_of_keys(units, listed, heads * 4))
        return Destination(place, listed, step)

    @cute.jit
    def finish(self, bar: Barriers, places: cutlass.Constexpr, k: Int32, last: Int32):
        """Sends out all chunks of the CTA's k-th tile of keys; the first are under way already. With the last tile of a
        row tile it frees Q and dO.

        places: gives the places to which it adds, once they are needed.
        """
        c = self.config
        for i in cutlass.range_constexpr(len(self.chunks)):
            chunk, acc = self.chunks[i], self.acc[i % c.under_way]
            warpgroup.wait_group(self.groups(range(i + 1, i + c.under_way)))
            piece = c.piece_of(chunk.column0)
            if cutlass.const_expr(piece not in {c.piece_of(later.column0) for later in self.chunks[i + 1 :]}):
                arrive_if(bar.q(piece).empty, last)
            if cutlass.const_expr(self.merges):
                state = bar.received(chunk.pair % 2).at(k * (len(self.chunks) // 4) + chunk.pair // 2)
                if cutlass.const_expr(chunk.own):
                    state.expect_full(c.slot_bytes // WARPGROUP)
                    state.wait_full()
                    add_received(acc, self.place_of(chunk))
                else:
                    state.wait_empty()
                    send(self.peer(bar), acc, self.place_of(chunk), state.full)
            if cutlass.const_expr(chunk.own and not any(earlier.own for earlier in self.chunks[:i])):
                to = places()
            has_next, taken = i + c.under_way < len(self.chunks), self.merges and chunk.own
            if cutlass.const_expr(chunk.own and c.stages_sums):
                stage = self.stage_of(chunk)
                stage_rows(acc, stage, self.four_rows, to.units if c.deterministic else None)
                if cutlass.const_expr(has_next):
                    self.make(i + c.under_way)
                if cutlass.const_expr(c.deterministic):
                    add_in_fixed_point(stage, self.four_rows, to, chunk.column0)
                else:
                    add_staged(stage, to, chunk.column0)
                if cutlass.const_expr(taken):
                    self.peer(bar).arrive(bar.received(chunk.pair % 2).empty)
            else:
                if cutlass.const_expr(chunk.own):
                    add_by_quads(acc, to, chunk.column0)
                if cutlass.const_expr(taken):
                    self.peer(bar).arrive(bar.received(chunk.pair % 2).empty)
                if cutlass.const_expr(has_next):
                    self.make(i + c.under_way)

    def peer(self, bar: Barriers) -> Peer:
        """The other CTA of the cluster; it asks again where that is."""
        here, rank = bar.first.toint(), 1 - self.rank
        return Peer(rank, address_again(here, rank) - here)

    def place_of(self, chunk: Chunk) -> Int32:
        """The place of this thread's part of the peer's numbers. No two chunks of a tile have the same place; otherwise
        ptxas keeps the addresses from one to the next, and there are no registers for them."""
        return self.slots[chunk.pair % 2].iterator.toint() + (self.thread ^ chunk.pair // 2) * 16

    def stage_of(self, chunk: Chunk) -> Int32:
        """A warp's own SMEM, through which its 16 keys go out: in a cluster, where the peer's numbers for it were."""
        slot = self.slots[chunk.pair % len(self.slots)].iterator.toint()
        if self.merges:
            return slot + thread_again() // WARP * FOUR_ROWS
        return slot + self.thread // WARP * (self.config.slot_bytes // 4)

    @property
    def four_rows(self) -> int:
        """Bytes there from four keys to the next four."""
        return 4 * FOUR_ROWS if self.merges else FOUR_ROWS

    @property
    def pieces(self) -> set[int]:
        """The pieces of Q and dO that are read."""
        return {self.config.piece_of(chunk.column0) for chunk in self.chunks}

    @cute.jit
    def release_unread(self, bar: Barriers, last: Int32):
        """Frees the other pieces of Q and dO on this side, with the last tile of keys."""
        for piece in cutlass.range_constexpr(self.config.pieces):
            if cutlass.const_expr(piece not in self.pieces):
                arrive_if(bar.q(piece).empty, last)


def place_of_row(row: Int32 | int, four_rows: int) -> Int32 | int:
    """Returns the offset in bytes of 32 columns of a warp's key in its SMEM."""
    return row * 128 if four_rows == FOUR_ROWS else row // 4 * four_rows + row % 4 * 128


def staged_row(thread: Int32, i: int) -> Int32:
    """The i-th key of a tile that a thread adds to out of `stage_rows`' SMEM."""
    return thread // WARP * 16 + i * 4 + thread % WARP // 8


@cute.jit
def stage_rows(
    acc: cute.Tensor,
    stage: Int32,
    four_rows: cutlass.Constexpr = FOUR_ROWS,
    units: tuple[Float32, ...] | None = None,
):
    """Writes 32 columns of a warp's 16 keys to its own 2 KiB of SMEM, row by row as they lie in memory; odd rows have
    their halves swapped, because two rows are written at once.

    units: to 1, of the thread's rows, for integers.
    """
    lane = cute.arch.lane_idx()
    rows = by_row(acc)
    row0 = stage + place_of_row(lane // 4, four_rows) + lane % 8 * 16
    for r in cutlass.range_constexpr(ROWS):
        for i in cutlass.range_constexpr(cute.size(rows, mode=[1]) // 4):
            four = [rows[r, 4 * i + j] for j in range(4)]
            if cutlass.const_expr(units is not None):
                four = [nearest(x * units[r]) for x in four]
            store_shared_four((row0 ^ i * 64) + r * 2 * four_rows, *four)
    cute.arch.sync_warp()


@cute.jit
def add_staged(stage: Int32, to: Destination | Consecutive, column0: cutlass.Constexpr):
    """Adds from there to memory, 128 bytes of a key at a time, because L2 takes the same number of requests a second
    whatever their size.
    """
    lane = cute.arch.lane_idx()
    of_lane = stage + lane // 8 * 128 + (lane % 8 ^ lane // 8 % 2 * 4) * 16
    for first in cutlass.range_constexpr(0, 4, 2):
        values = tuple(load_shared_four(of_lane + i * FOUR_ROWS) for i in (first, first + 1))
        for i in cutlass.range_constexpr(2):
            add_four(*to.of_key(first + i), column0 * 4, *values[i])
    cute.arch.sync_warp()


@cute.jit
def add_in_fixed_point(stage: Int32, four_rows: cutlass.Constexpr, to: Destination, column0: cutlass.Constexpr):
    """Adds integers from there to memory, whose sums do not depend on order: 32 columns of a key at a time.

    For an absent key 0 is added to another one: each condition would be a branch, and all would wait for SMEM in turn.
    """
    lane, warp = cute.arch.lane_idx(), thread_again() // WARP
    listed = to.keys.iterator.toint() + warp * (KEYS * 4)
    keys = [bits_of(x) for i in range(0, KEYS, 4) for x in load_shared_four(listed + i * 4)]
    for row in cutlass.range_constexpr(KEYS):
        value = load_shared(stage + place_of_row(row, four_rows) + (lane ^ row % 2 * 16) * 4)
        add_word(to.first + Int64(key_or_other(keys[row])) * to.step, column0 * 4, value)
    cute.arch.sync_warp()


def place_of_absent(sources: tuple, cluster: int) -> Int32:
    """Returns what the list of keys has for an absent one, where sums are in fixed point: less than 0, and its
    complement is the key to which 0 is added in its place, another one for each cluster."""
    s_kv = functools.reduce(cutlass.min, (source.s_kv for source in sources))
    return -1 - cluster_among(s_kv, cluster)


def key_or_other(key: Int32) -> Int32:
    """A key that is listed, or the one in its place."""
    return key ^ (key >> 31)


def units_of_keys(first: Int64, listed: cute.Tensor, step: Int32) -> tuple[Float32, ...]:
    """Loads how many units are 1, of the keys that this thread has in an accumulator. first: the address of key 0's."""
    keys = (listed[row_of(thread_again(), r)] for r in range(ROWS))
    return tuple(load_again(first + Int64(key_or_other(key)) * step) for key in keys)


@cute.jit
def add_received(acc: cute.Tensor, received: Int32):
    """Adds the peer's numbers to the accumulator."""
    rows = by_row(acc)
    quads = cute.size(rows, mode=[1]) // 4
    theirs = [load_shared_four(received + i * WARPGROUP * 16) for i in range(ROWS * quads)]
    for r in cutlass.range_constexpr(ROWS):
        for i in cutlass.range_constexpr(4 * quads):
            rows[r, i] = rows[r, i] + theirs[r * quads + i // 4][i % 4]
    cute.arch.sync_warp()


@cute.jit
def add_by_quads(acc: cute.Tensor, to: Destination | Consecutive, column0: cutlass.Constexpr):
    """Adds the numbers directly, 64 bytes of a key at a time."""
    rows = by_row(acc)
    quads = cute.size(rows, mode=[1]) // 4
    for r in cutlass.range_constexpr(ROWS):
        where, there = to.of_key(r)
        for i in cutlass.range_constexpr(quads):
            add_four(where, there, (column0 + 16 * i) * 4, *(rows[r, 4 * i + j] for j in range(4)))


@cute.jit
def send(peer: Peer, acc: cute.Tensor, slot: Int32, full: cute.Pointer):
    """Sends to where the peer's same thread has the same slot, one row of the accumulator after the other."""
    rows = by_row(cute.make_tensor(cute.recast_ptr(acc.iterator, dtype=Uint32), acc.layout))
    pairs = cute.size(rows, mode=[1]) // 4
    for r in cutlass.range_constexpr(ROWS):
        for pair in cutlass.range_constexpr(pairs):
            words = tuple(rows[r, 4 * pair + i] for i in range(4))
            offset = (r * pairs + pair) * WARPGROUP * 16
            send_words(slot + peer.shift, words, full.toint() + peer.shift, offset)


def thread_again() -> Int32:
    """This thread of its warpgroup, asked for where it is needed, so that nothing derived from it stays in
    registers.
    """
    return thread_id_again() % WARPGROUP
