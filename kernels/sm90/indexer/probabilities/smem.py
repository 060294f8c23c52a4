"""SMEM of `probabilities_sm90`: its barriers and its tiles."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int64

from kernels.lib.launch import WARPGROUP
from kernels.lib.pipeline import Ring
from kernels.lib.tiles import TileAllocator

from .config import CONSUMERS, Config


@dataclass(frozen=True)
class Barriers:
    """The rings of tiles."""

    q: Ring  # its stages are the pieces of Q
    k: Ring  # pieces of keys

    def initialise(self) -> None:
        """Initialises both rings; one thread does so."""
        self.q.initialise(WARPGROUP, CONSUMERS * WARPGROUP)
        self.k.initialise(WARPGROUP, WARPGROUP)


@dataclass(frozen=True)
class Shared:
    q: cute.Tensor  # (heads, d)
    k: cute.Tensor  # (keys, columns of a piece, stage)
    shift: cute.Tensor  # (heads, warpgroup): lse in units of log2; inf for a head that adds nothing


def allocate(c: Config, dtype) -> tuple[Barriers, Shared]:
    smem = TileAllocator(dtype)
    q, k = smem.tile(c.tile_m, c.d), smem.tile(c.tile_n, c.piece, c.stages)
    shift = smem.allocate_tensor(Float32, cute.make_layout((c.tile_m, CONSUMERS)), 16)
    rings = (Ring(*(smem.allocate_array(Int64, n) for _ in range(2)), n) for n in (c.pieces, c.stages))
    return Barriers(*rings), Shared(q, k, shift)
