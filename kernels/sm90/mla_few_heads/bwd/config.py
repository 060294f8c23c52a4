"""Compile-time choices of `mla_few_heads_bwd_sm90`, and the counts and sizes that follow from them."""

from dataclasses import dataclass

from kernels.lib.launch import SMEM_LIMIT, WARPGROUP
from kernels.lib.rows import PUBLISHED
from kernels.lib.wgmma import SLAB

from .smem import STAGES, Barriers

CTAS_PER_SM = 2


@dataclass(frozen=True)
class Config:
    """Compile-time choices; every tile, count and size follows from them."""

    d: int
    dtype: str
    sources: tuple[str, ...]  # of keys, in the order in which the kernel takes them: "span" or "selection"
    tile_m: int  # heads
    tile_n: int = 64  # keys: the rows of one WGMMA
    pieces: int = 4  # of the columns, in which keys arrive
    chunk: int = 32  # columns of dKV that are made at a time
    under_way: int = 2  # chunks
    deterministic: bool = False  # sums of dKV in fixed point, by the unit of each key, independent of order
    gathers: bool = True
    cluster: int = 1

    @property
    def threads(self) -> int:
        return 2 * WARPGROUP

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": CTAS_PER_SM, "preferred_smem_carveout": 100}  # otherwise the DSL asks the device

    @property
    def registers(self) -> tuple[int, int]:
        """(producer, consumer) registers a thread, out of what a launch of two CTAs an SM gives to both alike."""
        return 56, 200

    @property
    def slot_bytes(self) -> int:
        """The bytes of a chunk of dKV in SMEM."""
        return 4 * self.tile_n * self.chunk

    @property
    def slabs(self) -> int:
        return self.d // SLAB

    @property
    def slabs_at_a_time(self) -> int:
        """The number of slabs of dQ that fit in the place of a chunk of dKV."""
        return self.slot_bytes // (self.tile_m * SLAB * 2)

    @property
    def smem_limit(self) -> int:
        """A CTA's share of an SM's 228 KiB, less the 1 KiB that the system keeps."""
        return (SMEM_LIMIT + 1024) // CTAS_PER_SM - 1024

    @property
    def smem_bytes(self) -> int:
        tiles = 2 * self.d * (2 * self.tile_m + self.tile_n) + 2 * self.tile_m * self.tile_n
        infos = 4 * PUBLISHED * (1 + len(self.sources))
        numbers = 4 * 3 * self.tile_m
        return tiles + self.slot_bytes + STAGES * (4 * self.tile_n + infos + numbers) + 8 * Barriers.COUNT + 64

    def __post_init__(self):
        if self.d % (SLAB * self.pieces) or self.tile_n != SLAB:
            raise ValueError(f"wanted d in {self.pieces} pieces of slabs and tiles of {SLAB} keys, got {self}")
        if self.tile_m != 16:
            raise ValueError(f"wanted the 16 heads of one step of a product, got {self}")
        if self.smem_bytes > self.smem_limit:
            raise ValueError(f"needs {self.smem_bytes} bytes of SMEM, {self.smem_limit} fit: {self}")
