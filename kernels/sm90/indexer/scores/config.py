"""Compile-time choices of `indexer_scores_sm90`, and the counts and sizes that follow from them."""

from kernels.lib.indexer import KEYS
from kernels.lib.launch import WARPGROUP
from kernels.lib.scores import ScoresConfig

GROUPS = 4  # warpgroups that share a block's columns and a tile's keys
CONSUMERS = GROUPS * WARPGROUP  # threads


class Config(ScoresConfig):
    """The choices, and what follows from them for Hopper."""

    @property
    def parts(self) -> int:
        """Parts of a tile's keys, one for each consumer."""
        return self.tile_n // KEYS

    @property
    def threads(self) -> int:
        return CONSUMERS + WARPGROUP

    @property
    def registers(self) -> tuple[int, int]:
        """(producer, consumer) registers a thread."""
        return 24, 112

    @property
    def smem_bytes(self) -> int:
        return self.tile_bytes + 8 * 2 * (self.stages_q + self.stages_k)
