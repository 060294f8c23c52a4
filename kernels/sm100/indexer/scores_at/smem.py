"""SMEM of `indexer_scores_at_sm100`."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from kernels.lib.blackwell import InOrder, allocate_barriers
from kernels.lib.indexer import D
from kernels.lib.tiles import TileAllocator

from .config import Config


@dataclass(frozen=True)
class Barriers(InOrder):
    """mbarriers in SMEM, by what they announce."""

    made: cute.Pointer  # the products of a tile of keys are in TMEM


@dataclass(frozen=True)
class Shared:
    q: cute.Tensor  # (heads, D)
    k: cute.Tensor  # (tile_n, D, stage)
    tmem: cute.Pointer  # where TMEM was allocated


def allocate(c: Config, dtype) -> tuple[Barriers, Shared]:
    smem = TileAllocator(dtype)
    q, k = smem.tile(c.heads, D), smem.tile(c.tile_n, D, c.stages)
    tmem = smem.allocate_array(Int32, 1)
    return Barriers(*allocate_barriers(smem, c)), Shared(q, k, tmem)
