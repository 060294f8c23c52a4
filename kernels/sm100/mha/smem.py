"""SMEM of `mha_fwd_sm100`: its barriers and its tiles."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Int64

from kernels.lib.pipeline import Ring, split_barriers
from kernels.lib.rows import PUBLISHED
from kernels.lib.tiles import TileAllocator

from .config import Config


@dataclass(frozen=True)
class Barriers:
    """mbarriers in SMEM, by what they announce."""

    q: Ring  # full: and info; empty: all warps except the loader have read info, and the last scores are computed
    keys: Ring  # full: a tile is there; empty: the products that read it are done
    values: Ring
    s_full: cute.Pointer  # by buffer: scores are computed
    p_full: cute.Pointer  # every softmax thread has read its scores, written its P and rescaled O
    o_full: cute.Pointer  # P V is done, and P is read

    def initialise(self, c: Config) -> None:
        """By one thread; they lie in memory in the order of `Config.barriers`."""
        for i, arrivals in enumerate(arrivals for count, arrivals in c.barriers for _ in range(count)):
            cute.arch.mbarrier_init(self.q.full + i, arrivals)


@dataclass(frozen=True)
class Shared:
    """SMEM beside the barriers."""

    q: cute.Tensor  # (tile_m, d)
    rings: cute.Tensor  # (tile_n, d, keys or values, stage)
    info: cute.Tensor  # (PUBLISHED, row tile and its span): numbers that the loader found
    tmem: cute.Pointer  # where TMEM was allocated


def allocate(c: Config, dtype) -> tuple[Barriers, Shared]:
    smem = TileAllocator(dtype)
    q, rings = smem.tile(c.tile_m, c.d), smem.tile(c.tile_n, c.d, 2, c.stages)
    info = smem.allocate_tensor(Int32, cute.make_layout((PUBLISHED, 1 + len(c.sources))), 16)
    tmem = smem.allocate_array(Int32, 1)
    counts = tuple(count for count, _ in c.barriers)
    q_full, q_empty, full, empty, *others = split_barriers(smem.allocate_array(Int64, sum(counts)), counts)
    key_ring, value_ring = (Ring(full + i * c.stages, empty + i * c.stages, c.stages) for i in range(2))
    return Barriers(Ring(q_full, q_empty), key_ring, value_ring, *others), Shared(q, rings, info, tmem)
