"""Compile-time choices of `indexer_scores_sm100`, and the counts, columns and sizes that follow from them."""

from kernels.lib.launch import WARPGROUP
from kernels.lib.rows import WARP
from kernels.lib.scores import ScoresConfig
from kernels.lib.tcgen05 import COLUMNS, LANES

GROUPS = 2  # warpgroups that sum up, each a half of a tile's products
SUM_WARPS = GROUPS * WARPGROUP // WARP  # then one that issues MMA, one that loads, and two that do nothing
BUFFERS = 2  # of a tile's products
CHUNK = 16  # columns of TMEM, of one query, that a thread loads at a time


class Config(ScoresConfig):
    """The choices, and what follows from them for Blackwell."""

    cluster = 1

    @property
    def parts(self) -> int:
        """Parts of a tile's keys, each the rows of a product."""
        return self.tile_n // LANES

    @property
    def buffer_columns(self) -> int:
        """The columns of TMEM for the products of a tile."""
        return self.parts * self.columns

    @property
    def threads(self) -> int:
        return (GROUPS + 1) * WARPGROUP

    @property
    def registers(self) -> tuple[int, int]:
        """The registers of a thread: of the warps that issue MMA and load, and of those that sum up."""
        return 72, 216

    @property
    def smem_bytes(self) -> int:
        return self.tile_bytes + 16 + 8 * sum(count for count, _ in self.barriers)

    @property
    def barriers(self) -> tuple[tuple[int, int], ...]:
        """(how many, arrivals in a phase), in the order in which they lie in memory. Warps arrive once each."""
        return (
            (self.stages_q, 1),  # q_full
            (self.stages_q, SUM_WARPS + 1 + 1),  # q_empty: all have read info, and the last products are done
            (self.stages_k, 1),  # k_full
            (self.stages_k, 1 + SUM_WARPS * bool(self.scale_bytes)),  # k_empty: the products are done, scales are read
            (BUFFERS, 1),  # s_full
            (BUFFERS, SUM_WARPS),  # s_empty
        )

    def __post_init__(self):
        super().__post_init__()
        if BUFFERS * self.buffer_columns > COLUMNS:
            raise ValueError(f"needs {BUFFERS * self.buffer_columns} columns of TMEM, there are {COLUMNS}: {self}")
