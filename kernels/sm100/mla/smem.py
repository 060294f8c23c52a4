"""SMEM of `mla_fwd_sm100`: its barriers and its tiles."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels.lib.blackwell import InOrder, allocate_barriers
from kernels.lib.launch import WARPGROUP
from kernels.lib.pipeline import Ring
from kernels.lib.rows import PUBLISHED
from kernels.lib.tiles import TileAllocator

from .config import BUFFERS, Config


@dataclass(frozen=True)
class Barriers(InOrder):
    """mbarriers in SMEM, by what they announce.

    A pair's MMA warp is in the leading CTA. What it waits for arrives there from both CTAs, and what it announces
    arrives in both.
    """

    info: Ring  # full: numbers of a tile of rows; empty: the softmax and MMA warps have read them
    keys: Ring  # full: a tile of keys is there, in both CTAs, or in this one unpacked; empty: its products are done
    q_full: cute.Pointer  # Q of a tile of rows is in TMEM
    q_empty: cute.Pointer  # the last scores of a tile of rows are computed
    s_full: cute.Pointer  # by buffer: scores are computed
    p: Ring  # full: every warp of the softmax has written its P, and rescaled O; empty: P V is done
    o_empty: cute.Pointer  # O of a tile of rows is read
    factor: Ring  # full: the factors of O's rows; empty: they are read
    peer_full: cute.Pointer  # by stage, where keys are unpacked: the other CTA's columns of a tile are there


@dataclass(frozen=True)
class Shared:
    """SMEM beside the barriers."""

    keys: cute.Tensor  # (tile_n, columns_k, stage), in slabs
    p: cute.Tensor  # (tile_m, tile_n, buffer), a slab each
    exchange: cute.Pointer  # float32 [keys_per_thread / 4, thread, 4]: scores of one rail, for the row's other thread
    of_thread: cute.Tensor  # float32 [thread]: the maximum of a thread's scores, at the end its sum
    factor: cute.Tensor  # float32 [row]: what O is multiplied with in the end
    tiles: cute.Pointer  # int32: tiles of keys that the rows have seen
    info: cute.Tensor  # (PUBLISHED, tile of rows and each source, parity): numbers that the loader found
    tmem: cute.Pointer  # where TMEM was allocated


def allocate(c: Config, dtype) -> tuple[Barriers, Shared]:
    smem = TileAllocator(dtype)
    keys, p = smem.tile(c.tile_n, c.columns_k, c.stages), smem.tile(c.tile_m, c.tile_n, BUFFERS)
    exchange = smem.allocate_array(Float32, c.exchange_words, byte_alignment=16)
    of_thread = smem.allocate_tensor(Float32, cute.make_layout(WARPGROUP), 16)
    factor = smem.allocate_tensor(Float32, cute.make_layout(c.tile_m), 16)
    info = smem.allocate_tensor(Int32, cute.make_layout((PUBLISHED, 1 + len(c.sources), 2)), 16)
    tiles, tmem = smem.allocate_array(Int32, 1), smem.allocate_array(Int32, 1)
    first = allocate_barriers(smem, c)
    barriers = Barriers(
        Ring(*first[:2], 2),
        Ring(*first[2:4], c.stages),
        *first[4:6],
        first[6],
        Ring(*first[7:9], BUFFERS),
        first[9],
        Ring(*first[10:12]),
        first[12],
    )
    return barriers, Shared(keys, p, exchange, of_thread, factor, tiles, info, tmem)
