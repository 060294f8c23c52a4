"""SMEM of `mha_fwd_sm90`: its barriers and its tiles."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Int64

from kernels.lib.rows import PUBLISHED
from kernels.lib.tiles import TileAllocator

from .config import CLEARERS, Config


@dataclass(frozen=True)
class Barriers:
    """mbarriers in SMEM, one for each stage."""

    q_full: cute.Pointer
    q_empty: cute.Pointer
    k_full: cute.Pointer
    k_empty: cute.Pointer
    v_landed: cute.Pointer
    v_full: cute.Pointer  # and cleared
    v_empty: cute.Pointer

    def initialise(self, c: Config, consumers: Int32) -> None:
        """By one thread; so many threads of consumers have rows."""
        for s in range(c.stages_q):
            cute.arch.mbarrier_init(self.q_full + s, 1)
            cute.arch.mbarrier_init(self.q_empty + s, consumers + CLEARERS)
        for s in range(c.stages):
            cute.arch.mbarrier_init(self.k_full + s, 1)
            cute.arch.mbarrier_init(self.v_landed + s, 1)
            cute.arch.mbarrier_init(self.v_full + s, CLEARERS)
            cute.arch.mbarrier_init(self.k_empty + s, consumers)
            cute.arch.mbarrier_init(self.v_empty + s, consumers)


@dataclass(frozen=True)
class Shared:
    """SMEM beside the barriers."""

    q: cute.Tensor  # (tile_m, d, stage)
    k: cute.Tensor  # (tile_n, d, stage)
    v: cute.Tensor  # (tile_n, d, stage)
    info: cute.Tensor  # (PUBLISHED, row tile and span, slot): numbers that the producer found


def allocate(c: Config, dtype) -> tuple[Barriers, Shared]:
    smem = TileAllocator(dtype)
    q = smem.tile(c.tile_m, c.d, c.stages_q)
    k, v = (smem.tile(c.tile_n, c.d, c.stages) for _ in range(2))
    info = smem.allocate_tensor(Int32, cute.make_layout((PUBLISHED, 2, c.slots)), 16)
    rings = 2 * [c.stages_q] + 5 * [c.stages]
    return Barriers(*(smem.allocate_array(Int64, stages) for stages in rings)), Shared(q, k, v, info)
