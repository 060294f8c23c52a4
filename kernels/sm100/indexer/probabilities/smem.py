"""SMEM of `probabilities_sm100`: its barriers and its tiles."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels.lib.blackwell import InOrder, allocate_barriers
from kernels.lib.pipeline import Ring
from kernels.lib.tiles import TileAllocator

from .config import GROUPS, Config


@dataclass(frozen=True)
class Barriers(InOrder):
    """mbarriers in SMEM, by what they announce."""

    q: Ring  # its stages are the pieces of Q
    k: Ring  # pieces of keys
    s: Ring  # full: the products of a tile are in TMEM; empty: they are read


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
    first = allocate_barriers(smem, c)
    rings = (Ring(*first[2 * i : 2 * i + 2], n) for i, n in enumerate((c.pieces, c.stages, c.buffers)))
    return Barriers(*rings), Shared(q, k, shift, tmem)
