"""SMEM of `mha_fwd_sm90`: its barriers and its tiles."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8

from kernels.lib.pipeline import Ring
from kernels.lib.rows import PUBLISHED
from kernels.lib.tiles import TileAllocator

from .config import CLEARERS, Config


@dataclass(frozen=True)
class Barriers:
    """The rings of tiles."""

    q: Ring  # Q, and what the producer found about the row tile
    k: Ring
    v_landed: Ring  # V as TMA brings it
    v: Ring  # V as products take it: cleared, or made of codes
    codes: Ring  # of K and of V by turns; it has no stages where keys come as products take them

    def initialise(self, c: Config, consumers: Int32) -> None:
        """Initialises the barriers of all rings, by one thread; `consumers` threads have rows."""
        self.q.initialise(1, consumers + CLEARERS)
        if c.stages_of_codes:
            for ring, producers, readers in (
                (self.codes, 1, CLEARERS), (self.k, CLEARERS, consumers), (self.v, CLEARERS, consumers)
            ):  # fmt: skip
                ring.initialise(producers, readers)
            return
        arrivals = (self.k.full, 1), (self.v_landed.full, 1), (self.v.full, CLEARERS)
        for s in range(c.stages):
            for barrier, count in (*arrivals, (self.k.empty, consumers), (self.v.empty, consumers)):
                cute.arch.mbarrier_init(barrier + s, count)


@dataclass(frozen=True)
class Shared:
    """SMEM beside the barriers."""

    q: cute.Tensor  # (tile_m, d, stage)
    k: cute.Tensor  # (tile_n, d, stage)
    v: cute.Tensor  # (tile_n, d, stage)
    info: cute.Tensor  # (PUBLISHED, row tile and span, slot): numbers that the producer found
    codes: cute.Tensor | None  # (tile_n, d, stage), as they lie in memory


def allocate(c: Config, dtype, products) -> tuple[Barriers, Shared]:
    """dtype: of Q; products: of K and V."""
    smem = TileAllocator(dtype)
    q = smem.tile(c.tile_m, c.d, c.stages_q)
    smem.dtype = products
    k, v = (smem.tile(c.tile_n, c.d, c.stages) for _ in range(2))
    codes = None
    if c.stages_of_codes:
        shape = (c.tile_n, c.d, c.stages_of_codes)
        codes = smem.allocate_tensor(Uint8, cute.make_ordered_layout(shape, order=(1, 0, 2)), 128)
    info = smem.allocate_tensor(Int32, cute.make_layout((PUBLISHED, 2, c.slots)), 16)
    q_full, q_empty = (smem.allocate_array(Int64, c.stages_q) for _ in range(2))
    landed = 0 if c.stages_of_codes else c.stages
    k_full, k_empty, v_landed, v_full, v_empty, codes_full, codes_empty = (
        smem.allocate_array(Int64, n) if n else None
        for n in (*[c.stages] * 2, landed, *[c.stages] * 2, *[c.stages_of_codes] * 2)
    )
    bar = Barriers(
        Ring(q_full, q_empty, c.stages_q),
        Ring(k_full, k_empty, c.stages),
        Ring(v_landed, v_empty, c.stages),
        Ring(v_full, v_empty, c.stages),
        Ring(codes_full, codes_empty, c.stages_of_codes),
    )
    return bar, Shared(q, k, v, info, codes)
