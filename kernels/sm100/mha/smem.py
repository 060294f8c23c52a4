"""SMEM of `mha_fwd_sm100`: its barriers and its tiles."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels.lib.blackwell import InOrder, allocate_barriers
from kernels.lib.pipeline import Ring
from kernels.lib.rows import PUBLISHED
from kernels.lib.tcgen05 import LANES
from kernels.lib.tiles import TileAllocator
from kernels.lib.wgmma import seen_as, slab_layout

from .config import Config


@dataclass(frozen=True)
class Barriers(InOrder):
    """mbarriers in SMEM, by what they announce.

    A pair's MMA warp is in the leading CTA. What it waits for arrives there from both CTAs, and what it announces
    arrives in both.
    """

    info: Ring  # full: numbers of a tile of rows; empty: all warps except the loader have read them
    q: Ring  # full: Q is there; empty: the last scores of these rows are computed
    keys: Ring  # full: a tile of keys or of values is there; empty: the products that read it are done
    s_full: cute.Pointer  # by tile of rows: scores are computed
    s_empty: cute.Pointer  # by tile of rows: scores are read
    p_full: cute.Pointer  # by buffer: the first part of P is there, and O is rescaled
    p_more: cute.Pointer  # by buffer, then by part: another part of P is there
    p_empty: cute.Pointer  # by buffer: P V is done
    factor: tuple[cute.Pointer, cute.Pointer]  # by row tile: factors of O's rows are there; they are read
    v_full: cute.Pointer  # values that have to be cleared are there

    def factor_of(self, i: Int32 | int) -> Ring:
        full, empty = self.factor
        return Ring(full + i, empty + i)


@dataclass(frozen=True)
class Shared:
    """SMEM beside the barriers."""

    q: cute.Tensor  # (tile_m, d)
    keys: cute.Tensor  # (tile_n, d, stage): tiles of keys
    values: cute.Tensor  # (tile_n, columns_v, box, stage): tiles of values, in the same places by turns
    factor: cute.Tensor  # float32 [row]: what O is multiplied with
    info: cute.Tensor  # (PUBLISHED, row tile and its span, parity): numbers that the loader found
    tmem: cute.Pointer  # where TMEM was allocated


def allocate(c: Config, dtype) -> tuple[Barriers, Shared]:
    smem = TileAllocator(dtype)
    q, values = smem.tile(c.tile_m, c.d), smem.tile(c.tile_n, c.columns_v, c.cluster, c.stages)
    keys = seen_as(values, slab_layout(dtype, c.tile_n, c.d, c.stages))
    factor = smem.allocate_tensor(Float32, cute.make_layout(c.row_tiles * LANES), 16)
    info = smem.allocate_tensor(Int32, cute.make_layout((PUBLISHED, 1 + len(c.sources), 2)), 16)
    tmem = smem.allocate_array(Int32, 1)
    first = allocate_barriers(smem, c)
    barriers = Barriers(
        Ring(*first[:2], 2),
        Ring(*first[2:4]),
        Ring(*first[4:6], c.stages),
        *first[6:11],
        (first[11], first[12]),
        first[13],
    )
    return barriers, Shared(q, keys, values, factor, info, tmem)
