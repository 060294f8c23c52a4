"""Barriers and SMEM, which the roles of `mla_fwd_e4m3` share."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint16, Uint32
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from kernels.lib.launch import WARP, WARPGROUP
from kernels.lib.pipeline import PipelineState, Ring
from kernels.lib.rows import PUBLISHED
from kernels.lib.wgmma import slab_layout

WARPS = WARPGROUP // WARP
ROWS_BY_TURNS = 2  # row tiles of which numbers are kept


@dataclass(frozen=True)
class Barriers:
    """mbarriers in SMEM. Each warp of the consumers arrives once."""

    info: Ring  # what the producer found of a row tile
    q: Ring  # tiles of q, in codes
    k: Ring  # tiles of keys, one after the other
    p: Ring  # of P, with factors for what was summed before; a place comes free with the tile of keys that it is of
    sums: Ring  # of a row tile: what its O is multiplied with

    @staticmethod
    def allocate(smem: SmemAllocator, c: Any) -> "Barriers":
        def some(n: int) -> cute.Pointer:
            return smem.allocate_array(Int64, n)

        info, q, k = (Ring(some(n), some(n), n) for n in (ROWS_BY_TURNS, c.stages_q, c.stages_k))
        p = Ring(some(c.stages_k), k.empty, c.stages_k)
        return Barriers(info, q, k, p, Ring(some(ROWS_BY_TURNS), some(ROWS_BY_TURNS), ROWS_BY_TURNS))

    def initialise(self, warps_of_q: int) -> None:
        """Initialises all barriers, by one thread; `warps_of_q` of the loading warps have q, and the others keys."""
        warps_of_k = WARPS - warps_of_q
        self.info.initialise(1, 3 * WARPS)
        self.q.initialise(warps_of_q, WARPS)
        self.k.initialise(warps_of_k * (WARP + 1), 3 * WARPS)  # a thread's copies, and which keys of a warp are there
        for stage in range(self.p.stages):
            cute.arch.mbarrier_init(self.p.full + stage, WARPS)
        self.sums.initialise(WARPS, 2 * WARPS)


@dataclass(frozen=True)
class Shared:
    """SMEM beside the barriers."""

    q: cute.Tensor  # (64, d, row tile & 1)
    k: cute.Tensor  # (tile_n, d, stage)
    q_rope: cute.Tensor | None  # bfloat16 (64, rope, row tile & 1), in the units of the codes
    k_rope: cute.Tensor | None  # bfloat16 (tile_n, rope, stage), likewise
    p: cute.Tensor  # (64, tile_n, stage)
    given: cute.Tensor  # bfloat16 (d, row, warp): rows of q before they are rounded
    factor: cute.Tensor  # (64, stage of p): of the sums before
    rose: cute.Tensor  # (warp, stage of p): whether a factor of its rows is not 1
    sums: cute.Tensor  # (64, row tile & 1)
    scale: cute.Tensor  # (64, row tile & 1): of the scores of a row
    tiles: cute.Tensor  # (row tile & 1): how many tiles of keys
    absent: cute.Tensor  # (word, stage of k): a bit for every key, whether it is absent
    units: cute.Tensor  # (parity, pair, eight keys, stage of k): bits of the units of keys in bfloat16
    info: cute.Tensor  # (PUBLISHED, row tile & 1)

    @staticmethod
    def allocate(c: Any) -> tuple[Barriers, "Shared"]:
        smem = SmemAllocator()

        def tile(layout: cute.ComposedLayout, dtype: Any = Float8E4M3FN) -> cute.Tensor:
            return smem.allocate_tensor(dtype, layout.outer, 1024, swizzle=layout.inner)

        def of_rope(*shape: int) -> cute.Tensor | None:
            return tile(slab_layout(BFloat16, *shape), BFloat16) if c.rope else None

        # a thread of the scores has two of every eight columns
        by_thread = cute.make_layout((2, 4, c.tile_n // 8, c.stages_k), stride=(1, c.tile_n // 4, 2, c.tile_n))

        def numbers(dtype: Any, *shape: int) -> cute.Tensor:
            return smem.allocate_tensor(dtype, cute.make_layout(shape), 16)

        q = tile(slab_layout(Float8E4M3FN, c.tile_m, c.d, c.stages_q))
        k = tile(slab_layout(Float8E4M3FN, c.tile_n, c.d, c.stages_k))
        q_rope, k_rope = of_rope(c.tile_m, c.rope, c.stages_q), of_rope(c.tile_n, c.rope, c.stages_k)
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, Float8E4M3FN)
        p = tile(cute.tile_to_shape(atom, (c.tile_m, c.tile_n, c.stages_k), order=(0, 1, 2)))
        shared = Shared(
            q,
            k,
            q_rope,
            k_rope,
            p,
            numbers(BFloat16, c.d, c.staged, c.warps_of_q),
            numbers(Float32, c.tile_m, c.stages_k),
            numbers(Int32, WARPS, c.stages_k),
            numbers(Float32, c.tile_m, ROWS_BY_TURNS),
            numbers(Float32, c.tile_m, ROWS_BY_TURNS),
            numbers(Int32, ROWS_BY_TURNS),
            numbers(Uint32, c.tile_n // WARP, c.stages_k),
            smem.allocate_tensor(Uint16, by_thread, 16),
            numbers(Int32, PUBLISHED, ROWS_BY_TURNS),
        )
        return Barriers.allocate(smem, c), shared


def filled(ring: Ring, fill: Int32) -> PipelineState:
    """`Ring.at`, without the division of a signed number where stages are a power of two."""
    if ring.stages & ring.stages - 1:
        return ring.at(fill)
    return PipelineState(ring, fill & ring.stages - 1, fill >> ring.stages.bit_length() - 1 & 1)
