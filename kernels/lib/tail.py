"""A few keys behind the last pair of key tiles of `latent_sm90`, with products of their own.

A tile of rows with heads of several queries sees a window and a few keys more. As a third tile of keys these cost more
than the first two, for they wait for SMEM; as a tail they lie where O is staged, and are loaded when that has left.
The right side makes their scores, with those of the first odd tile, and their weights; both multiply them.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from .launch import WARP
from .selections import CHUNK, copy_or_zero
from .softmax import Softmax
from .spans import Span
from .wgmma import (
    K_MAJOR,
    SLAB,
    SW32_COLUMNS,
    accumulator,
    multiply_and_wait,
    narrow_layout,
    operand_a,
    operand_b,
    register_operand,
    round_to,
    slab_layout,
    store_rows,
    tiled_mma,
    transposed,
)

TAIL = SW32_COLUMNS  # keys at most: as many as one WGMMA of weights and values takes


@dataclass(frozen=True)
class TailTiles:
    """In SMEM."""

    keys: cute.Tensor  # (TAIL, d)
    weights: cute.Tensor  # (64, TAIL)

    @staticmethod
    def allocate(smem: SmemAllocator, o: cute.Tensor, dtype, d: int) -> "TailTiles":
        """The keys where O is staged."""
        keys, weights = slab_layout(dtype, TAIL, d), narrow_layout(dtype, 64)
        return TailTiles(
            cute.make_tensor(cute.recast_ptr(o.iterator, keys.inner, dtype=dtype), keys.outer),
            smem.allocate_tensor(dtype, weights.outer, 1024, swizzle=weights.inner),
        )

    @cute.jit
    def load(self, span: Span, place: tuple[cute.Pointer, Int64]):
        """By a warp: the keys behind the span's last tile, and zeros behind them. `place` is that of its first key."""
        lane, (first, step) = cute.arch.lane_idx(), place
        row_bytes, chunks = SLAB * 2, cute.size(self.keys, mode=[1]) // CHUNK
        start = span.tiles * span.tile_n
        for i in cutlass.range_constexpr(TAIL * chunks // WARP):
            row, column = i * WARP // chunks, i * WARP % chunks + lane
            slab, chunk = column // (SLAB // CHUNK), column % (SLAB // CHUNK)
            present = Int32(row < span.tail)
            source = first + ((start + row) * present * step + column * CHUNK)
            target = self.keys.iterator.toint() + (slab * TAIL + row) * row_bytes + (chunk ^ row % 8) * 16
            copy_or_zero(target, source.toint(), 16 * present)


@dataclass(frozen=True)
class Tail:
    """What a consumer thread keeps of it: operands and registers."""

    tiles: TailTiles
    qk: cute.TiledMma
    keys: cute.Tensor  # as K
    values: cute.Tensor  # this side's columns, as V
    a: cute.Tensor  # the weights, as right left them
    scores: cute.Tensor
    weights: cute.Tensor

    @staticmethod
    def of(tiles: TailTiles, side: int, pv: cute.TiledMma, half: int, dtype) -> "Tail":
        qk = tiled_mma(dtype, TAIL, K_MAJOR)
        return Tail(
            tiles,
            qk,
            keys=operand_b(qk, tiles.keys),
            values=operand_b(pv, transposed(cute.local_tile(tiles.keys, (TAIL, half), (0, side)))),
            a=operand_a(pv, tiles.weights),
            scores=accumulator(qk, TAIL),
            weights=register_operand(pv, TAIL, dtype),
        )

    def score(self, q: cute.Tensor, full: cute.Pointer, parity: Int32) -> None:
        """Q K'."""
        await_copies(full, parity)
        multiply_and_wait(self.qk, self.scores, q, self.keys, fresh=True)

    def mask(self, rows: Any) -> None:
        rows.mask(self.scores, rows.span.tiles)

    def weigh(self, softmax: Softmax, pv: cute.TiledMma, out: cute.Tensor, thread: Int32) -> None:
        """out <- weights times values. The weights stand in SMEM too, to be announced with those of a tile."""
        softmax.exponentiate(self.scores)
        round_to(self.weights, self.scores)
        store_rows(self.qk, self.scores, self.weights, self.tiles.weights, thread)
        multiply_and_wait(pv, out, self.weights, self.values, fresh=True)

    def multiply(self, pv: cute.TiledMma, out: cute.Tensor, full: cute.Pointer, parity: Int32) -> None:
        """out += the weights that right left times values."""
        await_copies(full, parity)
        multiply_and_wait(pv, out, self.a, self.values, fresh=False)


def await_copies(full: cute.Pointer, parity: Int32) -> None:
    cute.arch.mbarrier_wait(full, parity)
    cute.arch.fence_proxy("async.shared", space="cta")  # cp.async wrote through the generic proxy
