"""Barriers and SMEM, which the roles of `mla_few_heads_spans_sm90` share."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.lib.launch import WARPGROUP
from kernels.lib.pipeline import Ring
from kernels.lib.rows import WARP
from kernels.lib.tiles import TileAllocator
from kernels.lib.wgmma import SLAB

from .config import ADDERS, PLACES_OF_P, Config

WARPS = WARPGROUP // WARP  # each arrives once when it has read, for all of its lanes


@dataclass(frozen=True)
class Barriers:
    """mbarriers in SMEM."""

    k: Ring  # pieces of key tiles, one after the other
    q: Ring
    info: Ring
    p: Ring  # with the factors by which O decays
    last: Ring  # the factors that normalise O
    o: tuple[Ring, ...]  # of each adder: O's half, in the place of the keys that it read last

    def initialise(self) -> None:
        """One thread initialises them."""
        self.k.initialise(1, 2 * WARPS)
        self.q.initialise(1, WARPS)
        self.info.initialise(WARP, (1 + ADDERS) * WARPS + ADDERS)
        self.p.initialise(WARPGROUP, ADDERS * WARPS)
        self.last.initialise(WARPGROUP, ADDERS * WARPS)
        for o in self.o:
            o.initialise(WARPS, 1)


@dataclass(frozen=True)
class Shared:
    """SMEM beside the barriers."""

    q: cute.Tensor  # (rows, piece, pieces)
    k: cute.Tensor  # (tile_n, piece, stages)
    p: cute.Tensor  # (rows, keys, place)
    factors: cute.Tensor  # (rows, place)
    last: cute.Tensor  # (rows)
    info: cute.Tensor  # (numbers, place): what the producer found

    @staticmethod
    def allocate(c: Config, dtype) -> tuple[Barriers, "Shared"]:
        smem = TileAllocator(dtype)
        k = smem.tile(c.tile_n, c.piece, c.stages)
        q = smem.tile(c.rows, c.piece, c.pieces)
        p = smem.tile(c.rows, SLAB, PLACES_OF_P)
        factors = smem.allocate_tensor(Float32, cute.make_layout((c.rows, PLACES_OF_P)), 16)
        last = smem.allocate_tensor(Float32, cute.make_layout(c.rows), 16)
        info = smem.allocate_tensor(Int32, cute.make_layout((c.numbers, 2)), 16)
        sizes = (c.stages, 1, 2, PLACES_OF_P, 1, *(1 for _ in range(ADDERS)))
        first = smem.allocate_array(Int64, 2 * sum(sizes))
        rings = []
        for i, stages in enumerate(sizes):
            at = first + 2 * sum(sizes[:i])
            rings.append(Ring(at, at + stages, stages))
        return Barriers(*rings[:5], tuple(rings[5:])), Shared(q, k, p, factors, last, info)
