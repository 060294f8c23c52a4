"""Compile-time choices of `mha_fwd_sm100`, and the tiles, counts, columns and sizes that follow from them."""

from dataclasses import dataclass
from typing import ClassVar

from kernels.lib.launch import SMEM_LIMIT, WARPGROUP
from kernels.lib.rows import PUBLISHED
from kernels.lib.tcgen05 import COLUMNS
from kernels.lib.wgmma import SLAB

SCORE_BUFFERS = 2
SOFTMAX_WARPS = 4  # then one that issues MMA, then one that loads


@dataclass(frozen=True)
class Config:
    """Compile-time choices; every tile, count, column and size follows from them."""

    d: int
    dtype: str
    stages: int = 2

    sources: ClassVar[tuple[str, ...]] = ("span",)
    shared_kv: ClassVar[bool] = False
    gathers: ClassVar[bool] = False
    cluster: ClassVar[int] = 1

    @property
    def tile_m(self) -> int:
        """A thread of the softmax has a row, and so has a lane of TMEM."""
        return WARPGROUP

    @property
    def tile_n(self) -> int:
        return 128 if self.d <= 128 else 64

    @property
    def threads(self) -> int:
        return 32 * (SOFTMAX_WARPS + 2)

    @property
    def columns_q(self) -> int:
        return self.d

    @property
    def columns_k(self) -> int:
        return self.d

    @property
    def launch_options(self) -> dict[str, int]:
        return {}

    @property
    def ring_tile_bytes(self) -> int:
        return self.tile_n * self.d * 2

    # First columns in TMEM of scores and P, after O.

    @property
    def scores_column(self) -> int:
        return self.d

    @property
    def p_column(self) -> int:
        return self.scores_column + SCORE_BUFFERS * self.tile_n

    @property
    def columns(self) -> int:
        return self.p_column + self.tile_n // 2

    @property
    def smem_bytes(self) -> int:
        small = 4 * PUBLISHED * (1 + len(self.sources)) + 16 + 8 * sum(count for count, _ in self.barriers)
        return 1024 + self.tile_m * self.d * 2 + 2 * self.stages * self.ring_tile_bytes + small

    @property
    def barriers(self) -> tuple[tuple[int, int], ...]:
        """(how many, arrivals in a phase), in the order in which they lie in memory."""
        return (
            (1, 1),  # q_full
            (1, WARPGROUP + 32 + 1),  # q_empty: the softmax and MMA warps, and the products
            (2 * self.stages, 1),  # full
            (2 * self.stages, 1),  # empty
            (SCORE_BUFFERS, 1),  # s_full
            (1, WARPGROUP),  # p_full
            (1, 1),  # o_full
        )

    def __post_init__(self):
        if self.d % SLAB or self.d > 256:
            raise ValueError(f"d must be whole slabs of {SLAB}, of at most 256 (one MMA's N): {self}")
        if self.columns > COLUMNS:
            raise ValueError(f"needs {self.columns} columns of TMEM, there are {COLUMNS}: {self}")
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"needs {self.smem_bytes} bytes of SMEM, {SMEM_LIMIT} fit: {self}")
