"""Barriers and SMEM, which the roles of `mla_few_heads_bwd` share."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.lib.launch import WARPGROUP
from kernels.lib.pipeline import Ring
from kernels.lib.rows import PUBLISHED
from kernels.lib.tiles import TileAllocator
from kernels.lib.wgmma import SLAB

STAGES = 2  # of the list of a tile's keys, and of the numbers of a query


@dataclass(frozen=True)
class Barriers:
    """mbarriers in SMEM. All threads of a warpgroup arrive. Every ring has one stage."""

    first: cute.Pointer

    COUNT = 9

    def initialise(self) -> None:
        for i in range(self.COUNT):
            cute.arch.mbarrier_init(self.first + i, WARPGROUP)

    @property
    def published(self) -> cute.Pointer:
        """The producer's findings about a query are in SMEM."""
        return self.first

    @property
    def q(self) -> Ring:
        """Q and dO."""
        return Ring(self.first + 1, self.first + 2)

    @property
    def listed(self) -> cute.Pointer:
        """The list of a tile's keys is in SMEM."""
        return self.first + 3

    def k(self, piece: int = 0) -> Ring:
        """A piece of the columns of a tile of keys; all of them are freed together."""
        return Ring(self.first + 5 + piece, self.first + 4)


@dataclass(frozen=True)
class Shared:
    """SMEM beside the barriers."""

    rows: cute.Tensor  # (2 heads, d): Q, then dO
    k: cute.Tensor  # (keys, d)
    ds: cute.Tensor  # (heads, keys)
    out: cute.Tensor  # float32: a chunk of dKV on its way out, 2 KiB a warp
    dq: cute.Tensor  # (heads, 64, slab) in the same place: dQ on its way out
    keys: cute.Tensor  # (keys, stage): the place of each key in its source, or -1
    numbers: cute.Tensor  # (heads, 3, stage): for each lse in units of log2, the sink's factor, and scaled delta
    info: cute.Tensor  # (PUBLISHED, row tile and each source, stage): numbers that the producer found

    @staticmethod
    def allocate(c: Any, dtype) -> tuple[Barriers, "Shared"]:
        smem = TileAllocator(dtype)
        rows, k, ds = smem.tile(2 * c.tile_m, c.d), smem.tile(c.tile_n, c.d), smem.tile(c.tile_m, c.tile_n)
        dq = smem.tile(c.tile_m, SLAB, c.slabs_at_a_time)
        out = cute.make_tensor(cute.recast_ptr(dq.iterator, dtype=Float32), cute.make_layout(c.slot_bytes // 4))
        keys = smem.allocate_tensor(Int32, cute.make_layout((c.tile_n, STAGES)), 16)
        numbers = smem.allocate_tensor(Float32, cute.make_layout((c.tile_m, 3, STAGES)), 16)
        info = smem.allocate_tensor(Int32, cute.make_layout((PUBLISHED, 1 + len(c.sources), STAGES)), 16)
        bar = Barriers(smem.allocate_array(Int64, Barriers.COUNT))
        return bar, Shared(rows, k, ds, out, dq, keys, numbers, info)
