"""SMEM of `indexer_scores_fp4_sm90`: its tiles, beside the barriers of `indexer_scores_sm90`."""

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32

from kernels.lib.index_fp4 import KEY_BYTES
from kernels.lib.indexer import D
from kernels.lib.pipeline import Ring
from kernels.lib.scores import PUBLISHED
from kernels.lib.tiles import TileAllocator
from kernels.sm90.indexer.scores.smem import Barriers, Shared

from .config import Config


def allocate(c: Config, dtype) -> tuple[Barriers, Shared]:
    """Keys are bytes (tile_n, KEY_BYTES, stage), their scales words (tile_n, stage), one a key."""
    smem = TileAllocator(dtype)
    q = smem.tile(c.columns, D, c.stages_q)
    of_keys = cute.make_layout((c.tile_n, KEY_BYTES, c.stages_k), stride=(KEY_BYTES, 1, c.tile_n * KEY_BYTES))
    k = smem.allocate_tensor(Uint8, of_keys, 128)
    k_scale = smem.allocate_tensor(Uint32, cute.make_layout((c.tile_n, c.stages_k)), 128)
    info = smem.allocate_tensor(Int32, cute.make_layout((PUBLISHED, c.stages_q)), 16)
    rings = (Ring(*(smem.allocate_array(Int64, n) for _ in range(2)), n) for n in (c.stages_q, c.stages_k))
    return Barriers(*rings), Shared(q, k, k_scale, info)
