"""SMEM of `indexer_scores_sm100`: its barriers and its tiles."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels.lib.blackwell import InOrder, allocate_barriers
from kernels.lib.indexer import D
from kernels.lib.pipeline import Ring
from kernels.lib.scores import PUBLISHED
from kernels.lib.tiles import TileAllocator

from .config import BUFFERS, Config


@dataclass(frozen=True)
class Barriers(InOrder):
    """mbarriers in SMEM, by what they announce."""

    q: Ring  # full: Q of a block and its numbers; empty: the numbers are read, and the products with Q done
    k: Ring  # full: a tile of keys is there; empty: the products that read it are done, and its scales are read
    s: Ring  # full: the products of a tile are in TMEM; empty: they are read


@dataclass(frozen=True)
class Shared:
    """SMEM beside the barriers."""

    q: cute.Tensor  # (columns, D, stage)
    k: cute.Tensor  # (tile_n, D, stage)
    k_scale: cute.Tensor | None  # (tile_n, stage), for pages
    info: cute.Tensor  # (PUBLISHED, stage of q)
    tmem: cute.Pointer  # where TMEM was allocated


def allocate(c: Config, dtype) -> tuple[Barriers, Shared]:
    smem = TileAllocator(dtype)
    q, k = smem.tile(c.columns, D, c.stages_q), smem.tile(c.tile_n, D, c.stages_k)
    k_scale = smem.allocate_tensor(Float32, cute.make_layout((c.tile_n, c.stages_k)), 128) if c.scale_bytes else None
    info = smem.allocate_tensor(Int32, cute.make_layout((PUBLISHED, c.stages_q)), 16)
    tmem = smem.allocate_array(Int32, 1)
    first = allocate_barriers(smem, c)
    rings = (Ring(*first[2 * i : 2 * i + 2], n) for i, n in enumerate((c.stages_q, c.stages_k, BUFFERS)))
    return Barriers(*rings), Shared(q, k, k_scale, info, tmem)
