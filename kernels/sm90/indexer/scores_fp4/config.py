"""Compile-time choices of `indexer_scores_fp4_sm90`, and the sizes that follow from them."""

from kernels.lib.index_fp4 import KEY_BYTES
from kernels.sm90.indexer.scores import config


class Config(config.Config):
    """As of keys in 8 bits, with fewer bytes. A product has the columns of one query."""

    @property
    def key_elements(self) -> int:
        return KEY_BYTES

    @property
    def scale_bytes(self) -> int:
        return 4 * self.tile_n

    @property
    def k_bytes(self) -> int:
        return self.tile_n * KEY_BYTES + self.scale_bytes
