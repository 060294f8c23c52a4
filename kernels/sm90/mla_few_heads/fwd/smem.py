"""Barriers and SMEM, which the roles of `mla_few_heads_fwd` share."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernels.lib.column_softmax import WARPS
from kernels.lib.launch import WARPGROUP
from kernels.lib.pipeline import Ring
from kernels.lib.rows import PUBLISHED
from kernels.lib.tiles import TileAllocator


@dataclass(frozen=True)
class Barriers:
    """mbarriers in SMEM."""

    q: Ring
    k: Ring  # pieces of key tiles, one after the other

    @staticmethod
    def at(first: cute.Pointer, stages: int) -> "Barriers":
        return Barriers(Ring(first, first + 1), Ring(first + 2, first + (2 + stages), stages))

    def initialise(self) -> None:
        """One thread initialises them. A producer's thread arrives after its copies, and its warp after the rest."""
        self.q.initialise(1, WARPGROUP)
        self.k.initialise(WARPGROUP + WARPS, WARPGROUP)


@dataclass(frozen=True)
class Shared:
    """SMEM beside the barriers."""

    q: cute.Tensor  # (heads, piece, pieces)
    k: cute.Tensor  # (tile_n, piece, stages)
    p: cute.Tensor  # (heads, tile_n, slabs_at_a_time): P first; O on its way out
    found: cute.Tensor  # (warp, heads): see ColumnSoftmax
    seen: cute.Tensor  # (warp of the producer, key_tiles): see `present`
    info: cute.Tensor  # (PUBLISHED, row tile and each source): numbers that the producer found

    @staticmethod
    def allocate(c: Any, dtype) -> tuple[Barriers, "Shared"]:
        smem = TileAllocator(dtype)
        q, k = smem.tile(c.tile_m, c.piece, c.pieces), smem.tile(c.tile_n, c.piece, c.stages)
        p = smem.tile(c.tile_m, c.tile_n, c.slabs_at_a_time)
        found = smem.allocate_tensor(Float32, cute.make_layout((WARPS, c.tile_m)), 16)
        info = smem.allocate_tensor(Int32, cute.make_layout((PUBLISHED, 1 + len(c.sources))), 16)
        seen = smem.allocate_tensor(Uint32, cute.make_layout((WARPS, c.key_tiles)), 16)
        bar = Barriers.at(smem.allocate_array(Int64, 2 + 2 * c.stages), c.stages)
        return bar, Shared(q, k, p, found, seen, info)
