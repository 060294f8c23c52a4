"""Compile-time choices of `mha_fwd_sm90`, and the tiles, counts and sizes that follow from them."""

from dataclasses import dataclass

from kernels.lib.launch import SMEM_LIMIT, WARP, WARPGROUP
from kernels.lib.rows import PUBLISHED
from kernels.params import PAGES

CLEARERS = WARPGROUP - WARP  # threads besides the producer's warp
TILE_N = {64: 128, 128: 160, 256: 80}  # keys by d: 160 holds a window of 128 for 33 queries; 80 is what fits into SMEM
TILE_N_OF_PAGES = {64: 128, 128: 64, 256: 64}  # whole boxes of any size
STAGES_OF_CODES = {64: 4, 128: 3, 256: 2}  # what fits
BOX, LARGEST_BOX = 8, 64  # keys of a page that TMA loads at a time: this many rows of 128 bytes are swizzled alike


@dataclass(frozen=True)
class Config:
    """Compile-time choices; every tile, count and size follows from them."""

    d: int
    dtype: str
    sources: tuple[str, ...] = ("span",)
    gathers: bool = False
    shared_kv: bool = False
    cluster: int = 1

    @property
    def paged(self) -> bool:
        """True if keys are in pages: of a step, which has few rows, and whose time is that of reading keys."""
        return self.sources[0] in PAGES

    @property
    def stages_of_codes(self) -> int:
        """Places for codes of a tile of K or of V, by turns; 0 where keys come as products take them."""
        return STAGES_OF_CODES[self.d] if "e4m3" in self.sources[0] else 0

    @property
    def q_in_registers(self) -> bool:
        """True where SMEM, which codes pass once and their numbers twice, has no time to read Q for every tile."""
        return bool(self.stages_of_codes) and self.ctas == 2

    @property
    def stages(self) -> int:
        """Stages of K and of V."""
        return 2

    @property
    def ctas(self) -> int:
        """CTAs of an SM: two, where a step has few keys for each, and hides what one waits for under the other."""
        return 2 if self.paged and self.d < 256 else 1

    @property
    def consumers(self) -> int:
        """Consumer warpgroups, of 64 rows each."""
        if self.ctas == 2:
            return 1
        return 3 if self.d == 64 else 2

    @property
    def tile_m(self) -> int:
        return 64 * self.consumers

    @property
    def tile_n(self) -> int:
        return (TILE_N_OF_PAGES if self.paged else TILE_N)[self.d]

    @property
    def few(self) -> int:
        """At most this many keys are few: a window of 128 for 16 queries."""
        return 144 if self.d == 128 and not self.paged else 0

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + self.consumers)

    @property
    def registers(self) -> tuple[int, int]:
        """(producer, consumer) registers a thread; together they fill the file of 65536."""
        if self.stages_of_codes:
            return {1: (56, 200), 2: (56, 224)}[self.consumers]
        return {1: (40, 216), 2: (40, 232), 3: (32, 160)}[self.consumers]

    @property
    def row_bytes(self) -> int:
        return self.d * 2

    @property
    def key_tile_bytes(self) -> int:
        """Bytes that TMA brings of a tile of K or of V."""
        return self.tile_n * (self.d if self.stages_of_codes else self.row_bytes)

    @property
    def smem_limit(self) -> int:
        """Bytes of a CTA: of each one an SM keeps 1024 more."""
        return (SMEM_LIMIT + 1024) // self.ctas - 1024

    @property
    def stages_q(self) -> int:
        return 2 if self.smem_with(2) <= self.smem_limit and not self.q_in_registers else 1

    @property
    def slots(self) -> int:
        """For the producer's findings about a tile of rows, which are read until its end, long after Q is gone."""
        return 2 * self.stages_q

    @property
    def smem_bytes(self) -> int:
        return self.smem_with(self.stages_q)

    def smem_with(self, stages_q: int) -> int:
        """Bytes of SMEM with this many stages of Q."""
        tiles = (stages_q * self.tile_m + 2 * self.stages * self.tile_n) * self.row_bytes
        codes, landed = self.stages_of_codes * self.key_tile_bytes, 0 if self.stages_of_codes else self.stages
        info, rings = 4 * PUBLISHED * 2 * 2 * stages_q, 2 * (stages_q + 2 * self.stages + self.stages_of_codes)
        return 1024 + tiles + codes + info + 8 * (rings + landed)

    @property
    def columns_q(self) -> int:
        return self.d

    @property
    def columns_k(self) -> int:
        return self.d

    @property
    def launch_options(self) -> dict[str, int]:
        one = {"min_blocks_per_mp": self.ctas}  # without it ptxas silently drops setmaxnreg
        return one if self.ctas == 1 else one | {"preferred_smem_carveout": 100}  # otherwise the DSL asks the device

    def __post_init__(self):
        if self.d not in TILE_N:
            raise ValueError(f"got d = {self.d}, wanted one that has tiles: {', '.join(map(str, TILE_N))}")
        if self.smem_bytes > self.smem_limit:
            raise ValueError(f"needs {self.smem_bytes} bytes of SMEM, {self.smem_limit} fit: {self}")
