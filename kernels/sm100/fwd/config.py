"""Compile-time choices of `fwd_sm100`, and the tiles, counts, columns and sizes that follow from them."""

from dataclasses import dataclass

from kernels.abi import gathers
from kernels.lib.launch import SMEM_LIMIT, WARPGROUP
from kernels.lib.rows import PUBLISHED
from kernels.lib.wgmma import SLAB

from .tcgen05 import COLUMNS, LANES

SCORE_BUFFERS = 2
SOFTMAX_WARPS = 4  # then one that issues MMA, then one or four that load


@dataclass(frozen=True)
class Config:
    """Compile-time choices; every tile, count, column and size follows from them."""

    d: int
    dtype: str
    sources: tuple[str, ...]  # kinds of the sources, in the order in which the kernel walks them: "span" or "selection"
    shared_kv: bool
    stages: int = 2
    cluster: int = 1

    @property
    def gathers(self) -> bool:
        """Whether the keys differ from query to query: then a tile holds heads of one query only."""
        return gathers(self.sources)

    @property
    def loaders(self) -> int:
        """Threads that load: a lane issues TMA, four warps gather."""
        return WARPGROUP if self.gathers else 1

    @property
    def tile_m(self) -> int:
        return 128 if self.d <= 256 else 64

    @property
    def tile_n(self) -> int:
        return 128 if self.d <= 128 else 64

    @property
    def threads(self) -> int:
        return 32 * (SOFTMAX_WARPS + 1) + max(self.loaders, 32)

    @property
    def lanes_per_row(self) -> int:
        """Lanes of TMEM, and so threads, that share a row of scores and of O."""
        return LANES // self.tile_m

    @property
    def scores_per_thread(self) -> int:
        return self.tile_n // self.lanes_per_row

    @property
    def outputs_per_thread(self) -> int:
        return self.d // self.lanes_per_row

    @property
    def ring_d(self) -> int:
        """Columns of a ring's tiles: one ring of K and one of V, or one for each half of an array that is both."""
        return self.d // 2 if self.shared_kv else self.d

    @property
    def columns_q(self) -> int:
        return self.d

    @property
    def columns_k(self) -> int:
        return self.ring_d

    @property
    def launch_options(self) -> dict[str, int]:
        return {}

    @property
    def key_rings(self) -> tuple[int, ...]:
        return (0, 1) if self.shared_kv else (0,)

    @property
    def value_rings(self) -> tuple[int, ...]:
        return (0, 1) if self.shared_kv else (1,)

    @property
    def ring_tile_bytes(self) -> int:
        return self.tile_n * self.ring_d * 2

    @property
    def p_in_tmem(self) -> bool:
        return self.lanes_per_row == 1

    # First columns in TMEM of O, scores and P.

    @property
    def scores_column(self) -> int:
        return self.outputs_per_thread

    @property
    def p_column(self) -> int:
        return self.scores_column + SCORE_BUFFERS * self.tile_n // self.lanes_per_row

    @property
    def columns(self) -> int:
        return self.p_column + (self.tile_n // 2 if self.p_in_tmem else 0)

    @property
    def smem_bytes(self) -> int:
        p = 0 if self.p_in_tmem else self.tile_m * self.tile_n * 2
        staged = self.lanes_per_row * self.tile_m * SLAB * 2 if self.shared_kv else 0
        small = 4 * PUBLISHED * (1 + len(self.sources)) + 16 + 8 * sum(count for count, _ in self.barriers)
        return 1024 + self.tile_m * self.d * 2 + 2 * self.stages * self.ring_tile_bytes + p + staged + small

    @property
    def barriers(self) -> tuple[tuple[int, int], ...]:
        """(how many, arrivals in a phase), in the order in which they lie in memory."""
        return (
            (1, 1),  # q_full
            (1, WARPGROUP + 32 + 1),  # q_empty: the softmax and MMA warps, and the products
            (2 * self.stages, self.loaders),  # full
            (2 * self.stages, 1),  # empty
            (SCORE_BUFFERS, 1),  # s_full
            (1, WARPGROUP),  # p_full
            (1, 1),  # o_full
        )

    def __post_init__(self):
        if self.d % (2 * SLAB if self.shared_kv else SLAB) or self.ring_d > 256:
            raise ValueError(f"d must be whole slabs of {SLAB} in each ring of at most 256 (one MMA's N): {self}")
        if (self.lanes_per_row == 2 or self.gathers) and not self.shared_kv:
            raise ValueError(f"64 rows, and keys by index, need rings of two halves, which only a latent has: {self}")
        if self.columns > COLUMNS:
            raise ValueError(f"needs {self.columns} columns of TMEM, there are {COLUMNS}: {self}")
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"needs {self.smem_bytes} bytes of SMEM, {SMEM_LIMIT} fit: {self}")
