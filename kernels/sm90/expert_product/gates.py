"""SwiGLU at the end of a tile's products: what gates let through, and its gradient.

    gated        gates and up projections -> memory, rounded; of these numbers silu(gate) up, times the row's weight
    gated_back   the gradient of that product, in registers -> those of gates, up projections and weights

A thread has the same columns of gates and of up projections, so each makes its channels alone.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernels.lib.output import BLOCK, transpose_in_quad
from kernels.lib.ptx import bounded, float_of, least, load_four_words, round_pair
from kernels.lib.rows import ROWS, load, store
from kernels.lib.softmax import LOG2_E, by_row, exp2

GROUP = 4 * BLOCK  # columns that a quad moves at a time, 16 bytes a lane
AT_ONCE = 1  # groups of gates and up projections that are read at a time
BUFFERS = 5  # for what is read; all but one are filled ahead


class Gated(NamedTuple):
    inner: cute.Pointer  # [rows, channels]: what gates let through, times weights; by group, as rows of a are
    weights: cute.Pointer  # float32 [rows of y], of each row's result
    limit: Float32  # of |up|, and of a gate from above


class Back(NamedTuple):
    inner: cute.Pointer
    weights: cute.Pointer
    made: cute.Pointer  # [rows of y, 2, channels]: gates and up projections, where `Gated` stored them
    of_weights: cute.Pointer  # float32 [rows of y, column tiles]: parts of the gradient of weights
    limit: Float32


class Channel(NamedTuple):
    """The number that a gate lets through, and the factors by which it grows with gate and up projection."""

    value: Float32
    by_gate: Float32
    by_up: Float32


@cute.jit
def channel(gate: Float32, up: Float32, limit: Float32) -> Channel:
    opens, passes = least(gate, limit), bounded(up, limit)
    share = cute.arch.rcp_approx(1.0 + exp2(-opens * LOG2_E))
    silu = opens * share
    by_gate = passes * (share + silu * (1.0 - share)) * slope(gate, limit)
    return Channel(silu * passes, by_gate, silu * slope(cute.arch.fmax(up, -up), limit))


@cute.jit
def slope(x: Float32, limit: Float32) -> Float32:
    """The derivative of min(x, limit): half of 1 where they are equal, as JAX has it."""
    beyond = Float32(0.5) if x == limit else Float32(0.0)
    return Float32(1.0) if x < limit else beyond


def halves(word: Uint32) -> tuple[Float32, Float32]:
    """The two numbers in bfloat16 of a word."""
    return float_of(Int32(word << 16)), float_of(Int32(word & 0xFFFF0000))


@cute.jit
def store_words(p: cute.Pointer, words: cute.Tensor):
    """16 bytes."""
    cute.autovec_copy(words, cute.make_tensor(cute.recast_ptr(p, dtype=Uint32).align(16), cute.make_layout(4)))


@cute.jit
def store_gated(
    acc: cute.Tensor, y: cute.Pointer, gates: Gated, mine: NamedTuple, first: Int32, column0: Int32, n: Int32
):
    """Stores the rows of a consumer, `mine`: gates from column0 on and as many up projections, of n of both, and the
    channels that these make; first: the tile's row.
    """
    lane = mine.thread % 4
    odd, high = lane % 2 == 1, lane // 2 == 1
    sums, channels = by_row(acc), n // 2
    groups = cute.size(sums, mode=[1]) // 16  # of gates
    made, inner = cute.make_rmem_tensor((4, 2 * groups), Uint32), cute.make_rmem_tensor((4, groups), Uint32)
    for r in cutlass.range_constexpr(ROWS):
        exists, row, _ = mine.place(None, r)
        choice, column = mine.row_index(row, Int32(0)), column0 + lane * BLOCK
        weight = load(gates.weights + choice)
        for i in cutlass.range_constexpr(8 * groups):
            made[i] = round_pair(sums[r, 2 * i], sums[r, 2 * i + 1], y.dtype)
        for i in cutlass.range_constexpr(4 * groups):
            gate, up = halves(made[i]), halves(made[4 * groups + i])
            through = [channel(gate[j], up[j], gates.limit).value * weight for j in range(2)]
            inner[i] = round_pair(*through, y.dtype)
        for group in cutlass.range_constexpr(groups):
            for words in (made[None, group], made[None, groups + group], inner[None, group]):
                transpose_in_quad(words, odd, high)
        if exists:
            for group in cutlass.range_constexpr(groups):
                to = y + (choice * n + (column + group * GROUP))
                store_words(to, made[None, group])
                store_words(to + channels, made[None, groups + group])
                at = Int64(first + row) * channels + (column + group * GROUP)
                store_words(gates.inner + at, inner[None, group])


@dataclass(frozen=True)
class GatedBack:
    """A consumer's gradients. What it reads of gates and up projections comes ahead of its use: first under products,
    then under the arithmetic of what came before.
    """

    gates: Back
    n: Int32  # channels
    thread: Int32
    read_words: cute.Tensor  # (4, gates or up projections, AT_ONCE, BUFFERS)

    @staticmethod
    def of(gates: Back, n: Int32, thread: Int32) -> "GatedBack":
        return GatedBack(gates, n, thread, cute.make_rmem_tensor((4, 2, AT_ONCE, BUFFERS), Uint32))

    @property
    def lane(self) -> Int32:
        return self.thread % 4

    def place(self, mine: NamedTuple, r: int, column0: Int32) -> Int64:
        """The address of a lane's first gates of a row."""
        _, row, _ = mine.place(None, r)
        column = column0 + self.lane * BLOCK
        return (self.gates.made + (mine.row_index(row, Int32(0)) * (2 * self.n) + column)).toint()

    @cute.jit
    def read(self, batch: cutlass.Constexpr, batches: cutlass.Constexpr, places: list):
        """Reads a batch of all of a tile's, row after row."""
        r, part = batch // (batches // ROWS), batch % (batches // ROWS)
        for j in cutlass.range_constexpr(AT_ONCE):
            for half in cutlass.range_constexpr(2):
                at = places[r] + (Int64(half * self.n) + (part * AT_ONCE + j) * GROUP) * 2
                words = load_four_words(at)
                for i in cutlass.range_constexpr(4):
                    self.read_words[i, half, j, batch % BUFFERS] = Uint32(words[i])

    @cute.jit
    def begin(self, acc: cute.Tensor, mine: NamedTuple, column0: Int32):
        """Reads ahead for a tile."""
        batches = cute.size(acc) // (8 * AT_ONCE)
        places = [self.place(mine, r, column0) for r in range(ROWS)]
        for batch in cutlass.range_constexpr(BUFFERS - 1):
            self.read(batch, batches, places)

    @cute.jit
    def store(self, acc: cute.Tensor, y: cute.Pointer, mine: NamedTuple, first: Int32, column0: Int32, part: Int32):
        """Stores the rows `mine` of gradients of gates and up projections, and of inner, from column0 on; first: the
        tile's row, part: the number of its columns among such.
        """
        odd, high = self.lane % 2 == 1, self.lane // 2 == 1
        sums, gates, parts = by_row(acc), self.gates, cute.size(acc) // (8 * AT_ONCE * ROWS)
        places = [self.place(mine, r, column0) for r in range(ROWS)]
        of_gate, of_up, inner = (cute.make_rmem_tensor(4, Uint32) for _ in range(3))
        for r in cutlass.range_constexpr(ROWS):
            exists, row, _ = mine.place(None, r)
            choice, total = mine.row_index(row, Int32(0)), Float32(0.0)
            weight = load(gates.weights + choice)
            at = Int64(first + row) * self.n + (column0 + self.lane * BLOCK)
            to = Int64(first + row) * (2 * self.n) + (column0 + self.lane * BLOCK)
            for batch in cutlass.range_constexpr(r * parts, (r + 1) * parts):
                if cutlass.const_expr(batch + BUFFERS - 1 < parts * ROWS):
                    self.read(batch + BUFFERS - 1, parts * ROWS, places)
                for j in cutlass.range_constexpr(AT_ONCE):
                    group = batch % parts * AT_ONCE + j
                    read = [self.read_words[None, half, j, batch % BUFFERS] for half in range(2)]
                    for words in read:
                        transpose_in_quad(words, odd, high)
                    for i in cutlass.range_constexpr(4):
                        gate, up = (halves(words[i]) for words in read)
                        made = [channel(gate[k], up[k], gates.limit) for k in range(2)]
                        given = [sums[r, 8 * group + 2 * i + k] for k in range(2)]
                        weighted = [given[k] * weight for k in range(2)]
                        of_gate[i] = round_pair(*(weighted[k] * made[k].by_gate for k in range(2)), y.dtype)
                        of_up[i] = round_pair(*(weighted[k] * made[k].by_up for k in range(2)), y.dtype)
                        inner[i] = round_pair(*(made[k].value * weight for k in range(2)), y.dtype)
                        total = total + given[0] * made[0].value + given[1] * made[1].value
                    for words in (of_gate, of_up, inner):
                        transpose_in_quad(words, odd, high)
                    if exists:
                        store_words(y + (to + group * GROUP), of_gate)
                        store_words(y + (to + self.n + group * GROUP), of_up)
                        store_words(gates.inner + (at + group * GROUP), inner)
            total = cute.arch.warp_reduction_sum(total, threads_in_group=4)
            if exists & (self.lane == 0):
                store(gates.of_weights + (choice * (self.n // (parts * AT_ONCE * GROUP)) + part), total)
