"""Barriers and SMEM, which the roles of `mla_fwd_e4m3` share."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from kernels.lib.launch import WARP, WARPGROUP
from kernels.lib.pipeline import Ring
from kernels.lib.rows import PUBLISHED
from kernels.lib.wgmma import slab_layout

WARPS = WARPGROUP // WARP
ROWS_BY_TURNS = 2  # row tiles of which numbers are kept


@dataclass(frozen=True)
class Barriers:
    """mbarriers in SMEM. Each warp of the consumers arrives once."""

    info: Ring  # what the producer found of a row tile
    k: Ring  # tiles of keys, one after the other
    p: Ring  # of P, with factors for what was summed before
    sums: Ring  # of a row tile: what its O is multiplied with

    @staticmethod
    def allocate(smem: SmemAllocator, c: Any) -> "Barriers":
        counts = (ROWS_BY_TURNS, c.stages_k, c.stages_p, ROWS_BY_TURNS)
        return Barriers(*(Ring(*(smem.allocate_array(Int64, n) for _ in range(2)), n) for n in counts))

    def initialise(self) -> None:
        """By one thread."""
        self.info.initialise(1, 3 * WARPS)
        self.k.initialise(WARPGROUP, 3 * WARPS)
        self.p.initialise(WARPS, 2 * WARPS)
        self.sums.initialise(WARPS, 2 * WARPS)


@dataclass(frozen=True)
class Shared:
    """SMEM beside the barriers."""

    q: cute.Tensor  # (64, d)
    k: cute.Tensor  # (tile_n, d, stage)
    p: cute.Tensor  # (64, tile_n, stage)
    factor: cute.Tensor  # (64, stage of p): of the sums before
    rose: cute.Tensor  # (warp, stage of p): whether a factor of its rows is not 1
    sums: cute.Tensor  # (64, row tile & 1)
    tiles: cute.Tensor  # (row tile & 1): how many tiles of keys
    info: cute.Tensor  # (PUBLISHED, row tile and each source, row tile & 1)

    @staticmethod
    def allocate(c: Any) -> tuple[Barriers, "Shared"]:
        smem = SmemAllocator()

        def tile(layout: cute.ComposedLayout) -> cute.Tensor:
            return smem.allocate_tensor(Float8E4M3FN, layout.outer, 1024, swizzle=layout.inner)

        def numbers(dtype: Any, *shape: int) -> cute.Tensor:
            return smem.allocate_tensor(dtype, cute.make_layout(shape), 16)

        q = tile(slab_layout(Float8E4M3FN, c.tile_m, c.d))
        k = tile(slab_layout(Float8E4M3FN, c.tile_n, c.d, c.stages_k))
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, Float8E4M3FN)
        p = tile(cute.tile_to_shape(atom, (c.tile_m, c.tile_n, c.stages_p), order=(0, 1, 2)))
        shared = Shared(
            q,
            k,
            p,
            numbers(Float32, c.tile_m, c.stages_p),
            numbers(Int32, WARPS, c.stages_p),
            numbers(Float32, c.tile_m, ROWS_BY_TURNS),
            numbers(Int32, ROWS_BY_TURNS),
            numbers(Int32, PUBLISHED, 1 + len(c.sources), ROWS_BY_TURNS),
        )
        return Barriers.allocate(smem, c), shared
