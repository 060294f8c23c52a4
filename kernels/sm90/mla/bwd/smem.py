"""Barriers and SMEM, which the roles of `mla_bwd` share."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.lib.launch import WARP, WARPGROUP
from kernels.lib.pipeline import Ring
from kernels.lib.rows import PUBLISHED
from kernels.lib.tiles import TileAllocator

LEFT, RIGHT = 0, 1  # a warpgroup, and its half of dQ's columns
STAGES = 2  # numbers in the list of a tile of keys


@dataclass(frozen=True)
class Barriers:
    """mbarriers in SMEM. Every ring has one stage."""

    first: cute.Pointer

    COUNT = 22

    def initialise(self, consumers: int, takers: int) -> None:
        """One thread initialises them; so many warpgroups read Q, and `takers` of them P and dS. All others arrive
        thread by thread."""
        for barriers, count, arrivals in (
            (self.q(0).full, 4, WARPGROUP),
            (self.q(0).empty, 4, consumers * WARPGROUP),
            (self.k(0).full, 4, WARPGROUP),
            (self.k(0).empty, 2, WARPGROUP),
            (self.listed, 1, WARPGROUP),
            (self.p_ds.full, 1, WARPGROUP),
            (self.p_ds.empty, 1, takers * WARPGROUP),
            (self.published, 1, 1),
            (self.received(0).full, 2, WARPGROUP),
            (self.received(0).empty, 2, WARPGROUP // WARP),
        ):
            for i in range(count):
                cute.arch.mbarrier_init(barriers + i, arrivals)

    def q(self, piece: int) -> Ring:
        """A piece of the columns of Q and dO."""
        return Ring(self.first + piece, self.first + (4 + piece))

    def k(self, piece: int) -> Ring:
        """A piece of the columns of a tile of keys; the two of a half are freed together, by the side that reads them
        last."""
        return Ring(self.first + (8 + piece), self.first + (12 + piece // 2))

    def release_k(self, half: int) -> None:
        cute.arch.mbarrier_arrive(self.first + (12 + half))

    @property
    def listed(self) -> cute.Pointer:
        """The list of a tile's keys is in SMEM."""
        return self.first + 14

    @property
    def p_ds(self) -> Ring:
        """P and dS."""
        return Ring(self.first + 15, self.first + 16)

    @property
    def published(self) -> cute.Pointer:
        """The producer's findings about a row tile are in SMEM."""
        return self.first + 17

    def received(self, slot: int) -> Ring:
        """The peer's part of a chunk; the peer learns when it has been read."""
        return Ring(self.first + (18 + slot), self.first + (20 + slot))


@dataclass(frozen=True)
class Shared:
    """SMEM beside the barriers."""

    q: cute.Tensor  # (64, d)
    do: cute.Tensor  # (64, d_v)
    k: cute.Tensor  # (64, d)
    p: cute.Tensor  # (64, keys): P, times the sink's factor
    ds: cute.Tensor  # (64, keys)
    out: cute.Tensor  # (float32, 2): a chunk of dKV on its way out of either side, or two from the peer; or P's place
    keys: cute.Tensor  # (keys that are listed, stage): the place of each key in its source, or -1
    numbers: (
        cute.Tensor
    )  # (64, 3): for each row lse in units of log2, the sink's factor, scaled delta; two more if turned
    spans: cute.Tensor | None  # (64, 2, source): start and stop, where rows differ
    info: cute.Tensor  # (PUBLISHED, row tile and each source, row tile & 1): numbers that the producer found

    @staticmethod
    def allocate(c: Any, dtype) -> tuple[Barriers, "Shared"]:
        smem = TileAllocator(dtype)
        q, do, k = smem.tile(c.tile_m, c.d), smem.tile(c.tile_m, c.d_v), smem.tile(c.tile_n, c.d)
        p, ds = (smem.tile(c.tile_m, c.tile_n) for _ in range(2))
        if c.slots:
            out = smem.allocate_tensor(Float32, cute.make_layout((c.slot_bytes // 4, c.slots)), 1024)
        else:
            place = cute.make_layout((c.slot_bytes // 4, 2), stride=(1, 0))
            out = cute.make_tensor(cute.recast_ptr(p.iterator, dtype=Float32), place)
        keys = smem.allocate_tensor(Int32, cute.make_layout((c.listed, STAGES)), 16)
        info = smem.allocate_tensor(Int32, cute.make_layout((PUBLISHED, 1 + len(c.sources), 2)), 16)
        numbers = smem.allocate_tensor(Float32, cute.make_layout((c.tile_m, c.numbers)), 16)
        spans = smem.allocate_tensor(Int32, cute.make_layout((c.tile_m, 2, c.spans)), 16) if c.spans else None
        bar = Barriers(smem.allocate_array(Int64, Barriers.COUNT))
        return bar, Shared(q, do, k, p, ds, out, keys, numbers, spans, info)
