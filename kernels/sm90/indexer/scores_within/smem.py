"""SMEM of `indexer_scores_within_sm90`."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Uint8, Uint32

from kernels.lib.indexer import KEYS, D
from kernels.lib.tiles import TileAllocator

from .config import Config


@dataclass(frozen=True)
class Shared:
    q: cute.Tensor  # (heads, D)
    k: cute.Tensor  # (KEYS, D, stage), of 4 bits bytes (KEYS, key_bytes, stage)
    scale: cute.Tensor | None  # (KEYS, stage): float32, or the four of a key in a word


def allocate(c: Config, dtype) -> Shared:
    smem = TileAllocator(dtype)
    q, scale = smem.tile(c.heads, D), None
    if c.of_4_bits:
        rows = cute.make_layout((KEYS, c.key_bytes, c.stages), stride=(c.key_bytes, 1, KEYS * c.key_bytes))
        k = smem.allocate_tensor(Uint8, rows, 128)
    else:
        k = smem.tile(KEYS, D, c.stages)
    if c.scaled:
        of_keys = cute.make_layout((KEYS, c.stages))
        scale = smem.allocate_tensor(Uint32 if c.of_4_bits else Float32, of_keys, 16)
    return Shared(q, k, scale)
