"""Compile-time choices of `indexer_scores_sm90`, and the tiles, counts and sizes that follow from them."""

from dataclasses import dataclass

from kernels.lib.indexer import HEADS, KEYS, D
from kernels.lib.launch import SMEM_LIMIT, WARPGROUP, element_type

HALF = 128  # columns of a warpgroup's product
GROUPS = 4  # warpgroups that share a block's columns and a tile's keys
CONSUMERS = GROUPS * WARPGROUP  # threads
BOX = 8  # keys of the least box: this many rows of 128 bytes are swizzled alike
PUBLISHED = 4  # numbers that the producer publishes of a block


@dataclass(frozen=True)
class Config:
    """Compile-time choices; every tile, count and size follows from them."""

    heads: int
    dtype: str
    paged: bool = False

    @property
    def stages_q(self) -> int:
        return 1 if self.paged else 2  # few queries: one block a CTA, more keys at a time

    @property
    def columns(self) -> int:
        """(query, head) pairs of a block."""
        return HALF if self.paged else 2 * HALF

    @property
    def parts(self) -> int:
        """Parts of a tile's keys, one for each consumer."""
        return GROUPS * HALF // self.columns

    @property
    def element_bytes(self) -> int:
        return element_type(self.dtype).width // 8

    @property
    def scaled(self) -> bool:
        return self.dtype == "float8_e4m3fn"

    @property
    def queries(self) -> int:
        """Queries of a block."""
        return self.columns // self.heads

    @property
    def q_bytes(self) -> int:
        return self.columns * D * self.element_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales that come with a tile's keys."""
        return 4 * self.tile_n * (self.paged and self.scaled)

    @property
    def k_bytes(self) -> int:
        return self.tile_n * D * self.element_bytes + self.scale_bytes

    @property
    def stages_k(self) -> int:
        return min(6, (SMEM_LIMIT - 2048 - self.stages_q * self.q_bytes) // self.k_bytes)

    @property
    def tile_m(self) -> int:
        return self.columns

    @property
    def tile_n(self) -> int:
        """Keys of a tile."""
        return self.parts * KEYS

    @property
    def threads(self) -> int:
        return CONSUMERS + WARPGROUP

    @property
    def registers(self) -> tuple[int, int]:
        """(producer, consumer) registers a thread."""
        return 24, 112

    @property
    def smem_bytes(self) -> int:
        tiles = self.stages_q * self.q_bytes + self.stages_k * self.k_bytes
        return 1024 + tiles + 4 * PUBLISHED * self.stages_q + 8 * 2 * (self.stages_q + self.stages_k)

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": 1}  # without it ptxas silently drops setmaxnreg

    def __post_init__(self):
        if self.heads not in HEADS:
            raise ValueError(f"heads must be 16, 32 or 64, got {self.heads}")
        if self.stages_k < 2:
            raise ValueError(f"SMEM holds {self.stages_k} stages of keys, wanted 2 at least: {self}")
