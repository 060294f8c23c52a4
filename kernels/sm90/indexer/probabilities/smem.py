"""SMEM of `probabilities_sm90`: its barriers and its tiles."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int64

from kernels.lib.launch import WARPGROUP
from kernels.lib.tiles import TileAllocator

from .config import CONSUMERS, Config


@dataclass(frozen=True)
class Barriers:
    """mbarriers in SMEM: of each piece of Q, of each stage of keys."""

    q_full: cute.Pointer
    q_empty: cute.Pointer
    k_full: cute.Pointer
    k_empty: cute.Pointer

    def initialise(self, c: Config) -> None:
        """By one thread."""
        for i in range(c.pieces):
            cute.arch.mbarrier_init(self.q_full + i, WARPGROUP)
            cute.arch.mbarrier_init(self.q_empty + i, CONSUMERS * WARPGROUP)
        for i in range(c.stages):
            cute.arch.mbarrier_init(self.k_full + i, WARPGROUP)
            cute.arch.mbarrier_init(self.k_empty + i, WARPGROUP)


@dataclass(frozen=True)
class Shared:
    q: cute.Tensor  # (heads, d)
    k: cute.Tensor  # (keys, columns of a piece, stage)
    shift: cute.Tensor  # (heads, warpgroup): lse in units of log2; inf for a head that adds nothing


def allocate(c: Config, dtype) -> tuple[Barriers, Shared]:
    smem = TileAllocator(dtype)
    q, k = smem.tile(c.tile_m, c.d), smem.tile(c.tile_n, c.piece, c.stages)
    shift = smem.allocate_tensor(Float32, cute.make_layout((c.tile_m, CONSUMERS)), 16)
    rings = (c.pieces, c.pieces, c.stages, c.stages)
    return Barriers(*(smem.allocate_array(Int64, count) for count in rings)), Shared(q, k, shift)
