"""SMEM of `mla_bwd_sm100`: its barriers and its tiles."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels.lib.blackwell import InOrder, allocate_barriers
from kernels.lib.pipeline import Ring
from kernels.lib.rows import PUBLISHED
from kernels.lib.tiles import TileAllocator

from .config import LISTS, Config


@dataclass(frozen=True)
class Barriers(InOrder):
    """mbarriers in SMEM, by what they announce. A pair of something has a barrier each; every ring but two has one
    stage."""

    info: Ring  # full: numbers of a tile of rows; empty: everybody else has read them
    rows_full: cute.Pointer  # Q, and dO
    rows_empty: cute.Pointer  # the products of a tile of rows are done
    key_full: cute.Pointer  # by half: a tile of keys is there
    key_empty: cute.Pointer  # dQ has read all of it, after S and dP
    listed: Ring  # full: the list of a tile's keys is there
    scores_full: cute.Pointer  # partial S, and partial dP, are in TMEM
    scores_empty: cute.Pointer  # and read
    given_full: cute.Pointer  # the peer's partial S, and partial dP
    given_empty: cute.Pointer  # the peer has read both of this CTA's
    p_full: cute.Pointer  # P, and dS, of all rows are there
    p_empty: cute.Pointer  # and both CTAs have made dQ and dKV of them
    q_full: cute.Pointer  # the first half of Q is in TMEM, and dQ of the rows before is read
    dkv: Ring  # full: a half of dKV of a tile of keys is in TMEM; empty: and read
    dq_full: cute.Pointer  # dQ of a tile of rows is in TMEM

    def rows(self, which: int) -> Ring:
        return Ring(self.rows_full + which, self.rows_empty)

    def keys(self, half: int) -> Ring:
        return Ring(self.key_full + half, self.key_empty)

    def scores(self, which: int) -> Ring:
        return Ring(self.scores_full + which, self.scores_empty)

    def given(self, which: int) -> Ring:
        return Ring(self.given_full + which, self.given_empty)

    def p(self, which: int) -> Ring:
        return Ring(self.p_full + which, self.p_empty + which)


@dataclass(frozen=True)
class Shared:
    """SMEM beside the barriers. Rows are those of both CTAs, columns the CTA's own."""

    rows: tuple[cute.Tensor, cute.Tensor]  # Q and dO: (rows, columns), in slabs
    k: cute.Tensor  # (tile_n, columns), in slabs
    p: tuple[cute.Tensor, cute.Tensor]  # P, times the sink's factor, and dS: (rows, tile_n), a slab each
    given: cute.Pointer  # float32 [S or dP, keys_per_thread / 4, thread, 4]: the peer's part for this CTA's rows
    keys: cute.Tensor  # (tile_n, list): the place of each key in its source, or -1
    info: cute.Tensor  # (PUBLISHED, tile of rows and each source, parity): numbers that the loader found
    tmem: cute.Pointer  # where TMEM was allocated


def allocate(c: Config, dtype) -> tuple[Barriers, Shared]:
    smem = TileAllocator(dtype)
    q, do, k = smem.tile(c.rows, c.columns), smem.tile(c.rows, c.columns), smem.tile(c.tile_n, c.columns)
    p, ds = (smem.tile(c.rows, c.tile_n) for _ in range(2))
    given = smem.allocate_array(Float32, 2 * c.partial_bytes // 4, byte_alignment=16)
    keys = smem.allocate_tensor(Int32, cute.make_layout((c.tile_n, LISTS)), 16)
    info = smem.allocate_tensor(Int32, cute.make_layout((PUBLISHED, 1 + len(c.sources), 2)), 16)
    tmem = smem.allocate_array(Int32, 1)
    first = allocate_barriers(smem, c)
    bar = Barriers(
        Ring(*first[:2], 2),
        *first[2:6],
        Ring(first[6], first[6], LISTS),
        *first[7:14],
        Ring(*first[14:16]),
        first[16],
    )
    return bar, Shared((q, do), k, (p, ds), given, keys, info, tmem)
