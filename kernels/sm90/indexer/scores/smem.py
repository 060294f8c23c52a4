"""SMEM of `indexer_scores_sm90`: its barriers and its tiles."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.lib.indexer import D
from kernels.lib.launch import WARP
from kernels.lib.pipeline import Ring
from kernels.lib.scores import PUBLISHED
from kernels.lib.tiles import TileAllocator

from .config import CONSUMERS, Config


@dataclass(frozen=True)
class Barriers:
    """The rings of tiles."""

    q: Ring  # and what the producer found about the block
    k: Ring

    def initialise(self) -> None:
        """By one thread; a warp of consumers arrives once."""
        self.q.initialise(1, CONSUMERS // WARP)
        self.k.initialise(1, CONSUMERS // WARP)


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
    rings = (Ring(*(smem.allocate_array(Int64, n) for _ in range(2)), n) for n in (c.stages_q, c.stages_k))
    return Barriers(*rings), Shared(q, k, k_scale, info)
