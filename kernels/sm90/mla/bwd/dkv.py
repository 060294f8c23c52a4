"""How `mla_bwd` makes the gradient of a tile of keys, and adds it to memory.

A lane's accumulator has four of 16 columns: two of the first eight and two of the others. These four lie together in
memory, so that a lane adds 16 bytes without an exchange with others; `_host/gradients.py` puts the columns back.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.nvgpu import warp as cute_warp
from cutlass.cute.nvgpu import warpgroup

from kernels.lib.cluster import Peer
from kernels.lib.launch import WARP, WARPGROUP
from kernels.lib.ptx import (
    add_fixed,
    add_four,
    address_again,
    arrive_if,
    load_again,
    load_shared,
    load_shared_four,
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
    operand_b,
    register_operand,
    tiled_mma,
    transposed,
)

from .smem import RIGHT, Barriers, Shared

FOUR_ROWS = 4 * 128  # bytes of 32 columns of four keys


@dataclass(frozen=True)
class Destination:
    """Where a thread adds to dKV."""

    first: Int64  # address of key 0, in the thread's column of a chunk
    keys: tuple[Int32, ...] | cute.Tensor  # negative where there is no key: the thread's numbers, or the tile's in SMEM
    step: Int32  # bytes from a key to the next

    def of_key(self, i: int) -> tuple[Int64, Int32]:
        """The address of the thread's i-th key, and a number that is negative where there is no such key."""
        key = self.keys[i] if isinstance(self.keys, tuple) else self.keys[staged_row(thread_again(), i)]
        return self.first + Int64(cutlass.max(key, Int32(0))) * self.step, key


@dataclass(frozen=True)
class Consecutive:
    """Where a thread adds to dKV, if keys follow one another."""

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
    mma: cute.TiledMma
    of_keys: tuple[cute.Tensor, ...]  # P', times the sink's factor, and dS', in registers
    of_rows: tuple[tuple[cute.Tensor, ...], ...]  # dO and Q, by chunk
    acc: tuple[cute.Tensor, ...]  # accumulators of chunks under way
    resolution: cute.Pointer  # the unit of fixed point, where sums are made in that
    slots: tuple[cute.Tensor, ...]  # SMEM: one slot to go through, or two for the peer's numbers

    @staticmethod
    def of(c: Any, side: int, dtype, smem: Shared, resolution: cute.Pointer) -> "KvGradient":
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

        of_rows = tuple(tuple(operand(x, chunk) for x in (smem.do, smem.q)) for chunk in chunks)
        of_keys = tuple(register_operand(mma, c.tile_m, dtype) for _ in range(2))
        acc = tuple(accumulator(mma, c.chunk) for _ in range(c.under_way))
        slots = (smem.out[None, 0], smem.out[None, 1]) if merges else (smem.out[None, side],)
        return KvGradient(c, chunks, merges, rank, mma, of_keys, of_rows, acc, resolution, slots)

    @property
    def thread(self) -> Int32:
        return cute.arch.thread_idx()[0] % WARPGROUP

    @cute.jit
    def load(self, smem: Shared):
        """Loads P and dS of a tile from SMEM, where they are rows x keys."""
        atom = cute.make_copy_atom(cute_warp.LdMatrix8x8x16bOp(True, 4), smem.p.element_type)
        copy = cute.make_tiled_copy_A(atom, self.mma).get_slice(thread_again())
        for tile, operand in zip((smem.p, smem.ds), self.of_keys, strict=True):
            cute.copy(atom, copy.partition_S(transposed(tile)), copy.retile(operand))

    @cute.jit
    def make(self, i: cutlass.Constexpr):
        """Makes the i-th chunk, by two groups of products."""
        for j in cutlass.range_constexpr(2):
            multiply(self.mma, self.acc[i % self.config.under_way], self.of_keys[j], self.of_rows[i][j], fresh=j == 0)

    @cute.jit
    def start(self):
        for i in cutlass.range_constexpr(self.config.under_way):
            self.make(i)

    def destination(self, gradient: Int64, listed: cute.Tensor, stop: Int32, n: Extents) -> Destination | Consecutive:
        """The places to which this thread adds, for the tile whose keys are listed; a span's end at `stop`."""
        c, thread = self.config, self.thread
        column = thread % 4 * 4
        if c.deterministic:  # a column of all keys of a warp
            column = thread % WARP
        elif c.cluster == 1:  # four keys, 16 of 128 bytes of each
            column = thread % 8 * 4
            if c.gathers:  # where rows are masked one by one, there are no registers for them
                listed = tuple(listed[staged_row(thread, i)] for i in range(4))
        elif not c.consecutive:
            listed = tuple(listed[row_of(thread, r)] for r in range(ROWS))
        if self.merges:
            column = column + self.rank * c.chunk
        step = Int32(1) if c.gathers else n.h_kv  # whose keys have one head
        step = step * (c.d * c.sum_bytes)
        if c.consecutive:
            row, keys = (staged_row(thread, 0), 4) if c.cluster == 1 else (row_of(thread, 0), 8)
            key = listed[0] + row
            return Consecutive(gradient + column * c.sum_bytes + Int64(key) * step, stop - 1 - key, step, keys)
        return Destination(gradient + column * c.sum_bytes, listed, step)

    @cute.jit
    def finish(self, bar: Barriers, to: Destination | Consecutive, k: Int32, last: Int32):
        """Sends out all chunks of the CTA's k-th tile of keys; the first are under way already. With the last tile of a
        row tile it frees Q and dO."""
        c, of_piece = self.config, self.config.d // self.config.chunk // self.config.pieces
        for i in cutlass.range_constexpr(len(self.chunks)):
            chunk, acc = self.chunks[i], self.acc[i % c.under_way]
            warpgroup.wait_group(2 * min(c.under_way - 1, len(self.chunks) - 1 - i))
            if cutlass.const_expr((i + 1) % of_piece == 0):
                arrive_if(bar.q(chunk.column0 * c.pieces // c.d).empty, last)
            if cutlass.const_expr(self.merges):
                state = bar.received(chunk.pair % 2).at(k * (len(self.chunks) // 4) + chunk.pair // 2)
                if cutlass.const_expr(chunk.own):
                    state.expect_full(c.slot_bytes // WARPGROUP)
                    state.wait_full()
                    add_received(acc, self.place_of(chunk))
                else:
                    state.wait_empty()
                    send(self.peer(bar), acc, self.place_of(chunk), state.full)
            has_next, taken = i + c.under_way < len(self.chunks), self.merges and chunk.own
            if cutlass.const_expr(chunk.own and c.stages_sums):
                stage = self.stage_of(chunk)
                stage_rows(acc, stage, self.four_rows)
                if cutlass.const_expr(has_next):
                    self.make(i + c.under_way)
                if cutlass.const_expr(c.deterministic):
                    add_in_fixed_point(stage, self.four_rows, to, chunk.column0, self.resolution)
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
        return {chunk.column0 * self.config.pieces // self.config.d for chunk in self.chunks}

    @cute.jit
    def release_unread(self, bar: Barriers, last: Int32):
        """Frees the other pieces of Q and dO on this side, with the last tile of keys."""
        for piece in cutlass.range_constexpr(self.config.pieces):
            if cutlass.const_expr(piece not in self.pieces):
                arrive_if(bar.q(piece).empty, last)


def place_of_row(row: Int32 | int, four_rows: int) -> Int32 | int:
    """Of 32 columns of a warp's key in its SMEM."""
    return row * 128 if four_rows == FOUR_ROWS else row // 4 * four_rows + row % 4 * 128


def staged_row(thread: Int32, i: int) -> Int32:
    """The i-th key of a tile that a thread adds to out of `stage_rows`' SMEM."""
    return thread // WARP * 16 + i * 4 + thread % WARP // 8


@cute.jit
def stage_rows(acc: cute.Tensor, stage: Int32, four_rows: cutlass.Constexpr = FOUR_ROWS):
    """Writes 32 columns of a warp's 16 keys to its own 2 KiB of SMEM, row by row as they lie in memory; odd rows have
    their halves swapped, because two rows are written at once.
    """
    lane = cute.arch.lane_idx()
    rows = by_row(acc)
    row0 = stage + place_of_row(lane // 4, four_rows) + lane % 8 * 16
    for r in cutlass.range_constexpr(ROWS):
        for i in cutlass.range_constexpr(cute.size(rows, mode=[1]) // 4):
            store_shared_four((row0 ^ i * 64) + r * 2 * four_rows, *(rows[r, 4 * i + j] for j in range(4)))
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
def add_in_fixed_point(
    stage: Int32,
    four_rows: cutlass.Constexpr,
    to: Destination,
    column0: cutlass.Constexpr,
    resolution: cute.Pointer,
):
    """Adds from there to memory in fixed point, in which sums do not depend on order: 32 columns of a key at a time."""
    lane, warp = cute.arch.lane_idx(), thread_again() // WARP
    unit = load_again(resolution.toint())
    for row in cutlass.range_constexpr(16):
        value = load_shared(stage + place_of_row(row, four_rows) + (lane ^ row % 2 * 16) * 4)
        key = to.keys[warp * 16 + row]
        place = to.first + Int64(cutlass.max(key, Int32(0))) * to.step
        add_fixed(place, key, column0 * 8, value * unit)
    cute.arch.sync_warp()


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
