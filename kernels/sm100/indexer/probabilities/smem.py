"""SMEM of `probabilities_sm100`: its barriers and its tiles."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.lib.pipeline import Ring, split_barriers
from kernels.lib.tiles import TileAllocator

from .config import GROUPS, Config


@dataclass(frozen=True)
class Barriers:
    """mbarriers in SMEM, by what they announce."""

    q: Ring  # its stages are the pieces of Q
    k: Ring  # pieces of keys
    s: Ring  # full: the products of a tile are in TMEM; empty: they are read

    def initialise(self, c: Config) -> None:
        """By one thread; they lie in memory in the order of `Config.barriers`."""
        for i, arrivals in enumerate(arrivals for count, arrivals in c.barriers for _ in range(count)):
            cute.arch.mbarrier_init(self.q.full + i, arrivals)


@dataclass(frozen=True)
class Shared:
    q: cute.Tensor  # (heads, d)
    k: cute.Tensor  # (keys, columns of a piece, stage)
    shift: cute.Tensor  # (heads, warpgroup): lse in units of log2; inf for a head that adds nothing
    tmem: cute.Pointer  # where TMEM was allocated


def allocate(c: Config, dtype) -> tuple[Barriers, Shared]:
    smem = TileAllocator(dtype)
    q, k = smem.tile(c.tile_m, c.d), smem.tile(c.tile_n, c.piece, c.stages)
    shift = smem.allocate_tensor(Float32, cute.make_layout((c.tile_m, GROUPS)), 16)
    tmem = smem.allocate_array(Int32, 1)
    counts = tuple(count for count, _ in c.barriers)
    first = split_barriers(smem.allocate_array(Int64, sum(counts)), counts)
    rings = (Ring(*first[2 * i : 2 * i + 2], n) for i, n in enumerate((c.pieces, c.stages, c.buffers)))
    return Barriers(*rings), Shared(q, k, shift, tmem)
