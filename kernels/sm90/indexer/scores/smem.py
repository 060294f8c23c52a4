"""SMEM of `indexer_scores_sm90`: its barriers and its tiles."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.lib.indexer import D
from kernels.lib.launch import WARP
from kernels.lib.tiles import TileAllocator

from .config import CONSUMERS, PUBLISHED, Config


@dataclass(frozen=True)
class Barriers:
    """mbarriers in SMEM, one for each stage."""

    q_full: cute.Pointer
    q_empty: cute.Pointer
    k_full: cute.Pointer
    k_empty: cute.Pointer

    def initialise(self, c: Config) -> None:
        """By one thread."""
        for s in range(c.stages_q):
            cute.arch.mbarrier_init(self.q_full + s, 1)
            cute.arch.mbarrier_init(self.q_empty + s, CONSUMERS // WARP)
        for s in range(c.stages_k):
            cute.arch.mbarrier_init(self.k_full + s, 1)
            cute.arch.mbarrier_init(self.k_empty + s, CONSUMERS // WARP)


@dataclass(frozen=True)
class Shared:
    q: cute.Tensor  # (columns, D, stage)
    k: cute.Tensor  # (tile_n, D, stage)
    k_scale: cute.Tensor | None  # (tile_n, stage), for pages
    info: cute.Tensor  # (PUBLISHED, stage of q)


def allocate(c: Config, dtype) -> tuple[Barriers, Shared]:
    smem = TileAllocator(dtype)
    q, k = smem.tile(c.columns, D, c.stages_q), smem.tile(c.tile_n, D, c.stages_k)
    k_scale = smem.allocate_tensor(Float32, cute.make_layout((c.tile_n, c.stages_k)), 128) if c.scale_bytes else None
    info = smem.allocate_tensor(Int32, cute.make_layout((PUBLISHED, c.stages_q)), 16)
    rings = (c.stages_q, c.stages_q, c.stages_k, c.stages_k)
    return Barriers(*(smem.allocate_array(Int64, stages) for stages in rings)), Shared(q, k, k_scale, info)
