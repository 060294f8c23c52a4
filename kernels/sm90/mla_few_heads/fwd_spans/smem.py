"""Barriers and SMEM, which the roles of `mla_few_heads_spans_sm90` share."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.lib.column_softmax import WARPS
from kernels.lib.launch import WARPGROUP
from kernels.lib.pipeline import Ring
from kernels.lib.tiles import TileAllocator
from kernels.lib.wgmma import SLAB

from .config import CONSUMERS, Config


@dataclass(frozen=True)
class Barriers:
    """mbarriers in SMEM."""

    q: cute.Pointer  # full and empty, of each consumer's queries
    k: Ring  # pieces of key tiles, one after the other

    def of_queries(self, consumer: Int32 | int) -> Ring:
        return Ring(self.q + 2 * consumer, self.q + (2 * consumer + 1))

    def initialise(self) -> None:
        """One thread initialises them."""
        for consumer in range(CONSUMERS):
            self.of_queries(consumer).initialise(1, WARPGROUP)
        self.k.initialise(1, CONSUMERS * WARPGROUP)


@dataclass(frozen=True)
class Shared:
    """SMEM beside the barriers."""

    q: cute.Tensor  # (heads, piece, pieces, queries of the CTA)
    k: cute.Tensor  # (tile_n, piece, stages)
    p: cute.Tensor  # (heads, keys, place, consumer): P first; O on its way out
    found: cute.Tensor  # (warp, heads, queries of the CTA): see ColumnSoftmax
    info: cute.Tensor  # (numbers, consumer): what the producer found

    @staticmethod
    def allocate(c: Config, dtype) -> tuple[Barriers, "Shared"]:
        smem = TileAllocator(dtype)
        k = smem.tile(c.tile_n, c.piece, c.stages)
        q = smem.tile(c.tile_m, c.piece, c.pieces, c.group)
        p = smem.tile(c.tile_m, SLAB, c.places, CONSUMERS)
        found = smem.allocate_tensor(Float32, cute.make_layout((WARPS, c.tile_m, c.group)), 16)
        info = smem.allocate_tensor(Int32, cute.make_layout((c.numbers, CONSUMERS)), 16)
        first = smem.allocate_array(Int64, 2 * CONSUMERS + 2 * c.stages)
        ring = Ring(first + 2 * CONSUMERS, first + (2 * CONSUMERS + c.stages), c.stages)
        return Barriers(first, ring), Shared(q, k, p, found, info)
