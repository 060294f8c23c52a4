"""SMEM of `indexer_scores_at_sm90`."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32

from kernels.lib.indexer import KEYS, D
from kernels.lib.tiles import TileAllocator

from .config import WARPS, Config


@dataclass(frozen=True)
class Shared:
    q: cute.Tensor  # (heads, D)
    k: cute.Tensor  # (KEYS, D, stage)
    ds: cute.Tensor | None  # (heads, KEYS)
    sums: cute.Tensor | None  # float32 (heads, warp)


def allocate(c: Config, dtype) -> Shared:
    smem = TileAllocator(dtype)
    q, k = smem.tile(c.heads, D), smem.tile(KEYS, D, c.stages)
    if not c.gradient:
        return Shared(q, k, None, None)
    ds = smem.tile(c.heads, KEYS)
    return Shared(q, k, ds, smem.allocate_tensor(Float32, cute.make_layout((c.heads, WARPS)), 16))
