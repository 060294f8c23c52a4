"""SMEM of the kernels of this gradient: their barriers and their tiles."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.lib.launch import WARP, WARPGROUP
from kernels.lib.rows import PUBLISHED
from kernels.lib.tiles import TileAllocator

from .config import CLEARERS, CONSUMERS, DqConfig, KeyTileConfig


@dataclass(frozen=True)
class DqBarriers:
    """mbarriers in SMEM, one for each stage."""

    rows_full: cute.Pointer  # Q and dO landed, and what there is to see is known
    rows_empty: cute.Pointer
    k_landed: cute.Pointer
    k_full: cute.Pointer  # and cleared
    k_empty: cute.Pointer
    v_full: cute.Pointer
    v_empty: cute.Pointer

    def initialise(self, c: DqConfig) -> None:
        """By one thread."""
        for s in range(c.stages_q):
            cute.arch.mbarrier_init(self.rows_full + s, 1)
            cute.arch.mbarrier_init(self.rows_empty + s, c.consumers * WARPGROUP + CLEARERS)
        for s in range(c.stages):
            cute.arch.mbarrier_init(self.k_landed + s, 1)
            cute.arch.mbarrier_init(self.k_full + s, CLEARERS)
            cute.arch.mbarrier_init(self.k_empty + s, c.consumers * WARPGROUP)
            cute.arch.mbarrier_init(self.v_full + s, 1)
            cute.arch.mbarrier_init(self.v_empty + s, c.consumers * WARPGROUP)


@dataclass(frozen=True)
class DqShared:
    """SMEM beside the barriers."""

    q: cute.Tensor  # (tile_m, d, stage)
    do: cute.Tensor
    k: cute.Tensor  # (tile_n, d, stage)
    v: cute.Tensor
    info: cute.Tensor  # (PUBLISHED, row tile and span, slot): numbers that the producer found


def allocate_dq(c: DqConfig, dtype) -> tuple[DqBarriers, DqShared]:
    smem = TileAllocator(dtype)
    q, do = (smem.tile(c.tile_m, c.d, c.stages_q) for _ in range(2))
    k, v = (smem.tile(c.tile_n, c.d, c.stages) for _ in range(2))
    info = smem.allocate_tensor(Int32, cute.make_layout((PUBLISHED, 2, c.slots)), 16)
    bars = (smem.allocate_array(Int64, count) for count in (*2 * [c.stages_q], *5 * [c.stages]))
    return DqBarriers(*bars), DqShared(q, do, k, v, info)


@dataclass(frozen=True)
class KeyTileBarriers:
    """mbarriers in SMEM; one for each stage, except the first."""

    keys: cute.Pointer  # K and V landed
    landed: cute.Pointer  # Q and dO
    published: cute.Pointer  # the numbers of rows
    empty: cute.Pointer
    p_full: cute.Pointer  # P is there; single
    p_empty: cute.Pointer
    ds_full: cute.Pointer | None  # dS is there; two, where dQ is made
    ds_empty: cute.Pointer | None

    def initialise(self, c: KeyTileConfig) -> None:
        """By one thread."""
        cute.arch.mbarrier_init(self.keys, 1)
        cute.arch.mbarrier_init(self.p_full, WARPGROUP)
        cute.arch.mbarrier_init(self.p_empty, WARPGROUP)
        for s in range(2 * c.adds_rows):
            cute.arch.mbarrier_init(self.ds_full + s, CONSUMERS * WARPGROUP)
            cute.arch.mbarrier_init(self.ds_empty + s, CONSUMERS * WARPGROUP)
        for s in range(c.stages):
            cute.arch.mbarrier_init(self.landed + s, 1)
            cute.arch.mbarrier_init(self.published + s, c.row_warps * WARP)
            cute.arch.mbarrier_init(self.empty + s, CONSUMERS * WARPGROUP)


@dataclass(frozen=True)
class KeyTileShared:
    """SMEM beside the barriers."""

    k: cute.Tensor  # (tile_n, d)
    v: cute.Tensor
    q: cute.Tensor  # (tile_m, d, stage)
    do: cute.Tensor
    numbers: cute.Tensor  # (tile_m, 3, stage) float32: lse in units of log2, sink factor, delta
    spans: cute.Tensor  # (tile_m, 2, stage) int32: start, and how many keys from there on are seen
    p: cute.Tensor | None  # (4, thread, accumulator's elements / 4) float32, from the warpgroup of dV to that of dK
    ds: cute.Tensor | None  # (tile_m, tile_n, 2), where dQ is made
    places: cute.Tensor | None  # (tile_m, stage) int32: which of all rows, or -1
    boxed: cute.Tensor  # (4, tile_m) int32: `BoxedRows` of every row of a tile
    flags: cute.Tensor  # (64 rows, stage) int32: for these rows HAS_SINK, and SEES and HIDES for each 64 keys
    found: cute.Tensor  # (first tile of rows and how many, warp): of those that a warp has looked at
    covered: cute.Tensor | None  # (32 keys, warp): a bit for each key that these tiles of rows load, where dQ is made


def allocate_key_tiles(c: KeyTileConfig, dtype) -> tuple[KeyTileBarriers, KeyTileShared]:
    smem = TileAllocator(dtype)
    k, v = (smem.tile(c.tile_n, c.d) for _ in range(2))
    q, do = (smem.tile(c.tile_m, c.d, c.stages) for _ in range(2))
    numbers = smem.allocate_tensor(Float32, cute.make_layout((c.tile_m, 3, c.stages)), 16)
    spans = smem.allocate_tensor(Int32, cute.make_layout((c.tile_m, 2, c.stages)), 16)
    p = None
    if c.by_role:
        p = smem.allocate_tensor(Float32, cute.make_layout((4, WARPGROUP, c.tile_m // 8)), 16)
    ds, places, covered = None, None, None
    if c.adds_rows:
        ds = smem.tile(c.tile_m, c.tile_n, 2)
        places = smem.allocate_tensor(Int32, cute.make_layout((c.tile_m, c.stages)), 16)
        covered = smem.allocate_tensor(Int32, cute.make_layout((c.tile_n // WARP, c.threads // WARP)), 16)
    boxed = smem.allocate_tensor(Int32, cute.make_layout((4, c.tile_m)), 16)
    flags = smem.allocate_tensor(Int32, cute.make_layout((c.row_warps, c.stages)), 16)
    found = smem.allocate_tensor(Int32, cute.make_layout((2, c.threads // WARP)), 16)
    counts = (1, c.stages, c.stages, c.stages, 1, 1, *2 * [2 * c.adds_rows])
    bars = (smem.allocate_array(Int64, count) if count else None for count in counts)
    return KeyTileBarriers(*bars), KeyTileShared(
        k, v, q, do, numbers, spans, p, ds, places, boxed, flags, found, covered
    )
