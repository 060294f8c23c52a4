"""SMEM of `indexer_scores_within_sm90`."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32

from kernels.lib.indexer import KEYS, D
from kernels.lib.tiles import TileAllocator

from .config import Config


@dataclass(frozen=True)
class Shared:
    q: cute.Tensor  # (heads, D)
    k: cute.Tensor  # (KEYS, D, stage)
    scale: cute.Tensor | None  # float32 (KEYS, stage)


def allocate(c: Config, dtype) -> Shared:
    smem = TileAllocator(dtype)
    q, k = smem.tile(c.heads, D), smem.tile(KEYS, D, c.stages)
    scale = smem.allocate_tensor(Float32, cute.make_layout((KEYS, c.stages)), 16) if c.scaled else None
    return Shared(q, k, scale)
