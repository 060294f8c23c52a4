"""SMEM of the kernels of this gradient: their barriers and their tiles."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.lib.launch import WARP, WARPGROUP
from kernels.lib.pipeline import Ring
from kernels.lib.rows import PUBLISHED
from kernels.lib.tiles import TileAllocator

from .config import CLEARERS, CONSUMERS, DqConfig, KeyTileConfig


@dataclass(frozen=True)
class DqBarriers:
    """The rings of tiles."""

    rows: Ring  # Q and dO, and what the producer found about the row tile
    k_landed: Ring  # K as TMA brings it
    k: Ring  # K, and cleared
    v: Ring

    def initialise(self, c: DqConfig) -> None:
        """Initialises the barriers of all rings; one thread does so."""
        consumers = c.consumers * WARPGROUP
        self.rows.initialise(1, consumers + CLEARERS)
        arrivals = (self.k_landed.full, 1), (self.k.full, CLEARERS), (self.k.empty, consumers)
        for s in range(c.stages):
            for barrier, count in (*arrivals, (self.v.full, 1), (self.v.empty, consumers)):
                cute.arch.mbarrier_init(barrier + s, count)


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
    rows_full, rows_empty = (smem.allocate_array(Int64, c.stages_q) for _ in range(2))
    k_landed, k_full, k_empty, v_full, v_empty = (smem.allocate_array(Int64, c.stages) for _ in range(5))
    bar = DqBarriers(
        Ring(rows_full, rows_empty, c.stages_q),
        Ring(k_landed, k_empty, c.stages),
        Ring(k_full, k_empty, c.stages),
        Ring(v_full, v_empty, c.stages),
    )
    return bar, DqShared(q, do, k, v, info)


@dataclass(frozen=True)
class KeyTileBarriers:
    """The rings of tiles, and the barriers of what is there once."""

    keys: cute.Pointer  # K and V landed
    landed: Ring  # Q and dO as TMA brings them
    rows: Ring  # Q and dO, with the numbers of their rows
    p: Ring | None  # P, where one warpgroup hands it to the other, by this ring
    ds: Ring | None  # dS, where dQ is made

    def initialise(self, c: KeyTileConfig) -> None:
        """Initialises the rings and the other barriers; one thread does so."""
        consumers = CONSUMERS * WARPGROUP
        cute.arch.mbarrier_init(self.keys, 1)
        self.p.initialise(WARPGROUP, WARPGROUP)
        if self.ds is not None:
            self.ds.initialise(consumers, consumers)
        for s in range(c.stages):
            cute.arch.mbarrier_init(self.landed.full + s, 1)
            cute.arch.mbarrier_init(self.rows.full + s, c.row_warps * WARP)
            cute.arch.mbarrier_init(self.rows.empty + s, consumers)


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
    keys = smem.allocate_array(Int64, 1)
    landed, full, empty = (smem.allocate_array(Int64, c.stages) for _ in range(3))
    p_ring = Ring(smem.allocate_array(Int64, 1), smem.allocate_array(Int64, 1))
    ds_ring = Ring(smem.allocate_array(Int64, 2), smem.allocate_array(Int64, 2), 2) if c.adds_rows else None
    bar = KeyTileBarriers(keys, Ring(landed, empty, c.stages), Ring(full, empty, c.stages), p_ring, ds_ring)
    return bar, KeyTileShared(k, v, q, do, numbers, spans, p, ds, places, boxed, flags, found, covered)
