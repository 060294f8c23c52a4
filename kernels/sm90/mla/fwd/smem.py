"""Barriers and SMEM, which the roles of `mla_fwd` share."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from kernels.lib.cluster import Peer
from kernels.lib.launch import WARP, WARPGROUP
from kernels.lib.pipeline import Ring, split_barriers
from kernels.lib.rows import PUBLISHED
from kernels.lib.wgmma import SLAB, operand_layout, seen_as, slab_layout

EVEN, ODD = 0, 1  # the tiles of a pair
LEFT, RIGHT = 0, 1  # a warpgroup, which computes the scores of even, of odd tiles; and its half of the columns
REFILL_ORDER = ((EVEN, LEFT), (ODD, RIGHT), (EVEN, RIGHT), (ODD, LEFT))  # as they are read last


@dataclass(frozen=True)
class Barriers:
    """mbarriers in SMEM. Every thread of a consumer arrives, and `loaders` of the producer. A ring has one stage."""

    q_full: cute.Pointer
    q_empty: cute.Pointer
    k_full: cute.Pointer  # 4, indexed by 2 * (EVEN or ODD) + half, and so is
    k_empty: cute.Pointer
    max_shared: cute.Pointer  # 2, by side: its running maximum is in SMEM
    p_shared: cute.Pointer  # 2, by side: its P is in SMEM, with the last one its sum
    all_read: cute.Pointer  # nothing of a row tile's P and sums is still to be read
    peer: Peer | None  # the other CTA of a cluster, which fills the same key tiles

    COUNTS = (1, 1, 4, 4, 2, 2, 1)  # in that order

    @staticmethod
    def at(first: cute.Pointer, cluster: int) -> "Barriers":
        return Barriers(*split_barriers(first, Barriers.COUNTS), Peer.of(first) if cluster > 1 else None)

    def initialise(self, loaders: int, extra: int) -> None:
        """One thread initialises them, for so many threads that load a tile, and `extra` ones that load an odd tile."""
        consumers, readers = 2 * WARPGROUP, WARPGROUP  # a warpgroup reads a half as V
        if self.peer is not None:
            readers += WARPGROUP // WARP  # warps of the peer, which each arrive once
        arrivals = (1, consumers, loaders, readers, WARPGROUP, WARPGROUP, consumers)
        firsts = (getattr(self, field) for field in self.__dataclass_fields__)
        for first, count, arriving in zip(firsts, self.COUNTS, arrivals, strict=False):
            for i in range(count):
                cute.arch.mbarrier_init(first + i, arriving + (extra if first is self.k_full and i >= 2 * ODD else 0))

    @property
    def q(self) -> Ring:
        return Ring(self.q_full, self.q_empty)

    def k(self, which: int, half: int) -> Ring:
        """A half of a key tile, EVEN or ODD."""
        i = 2 * which + half
        return Ring(empty=self.k_empty + i, full=self.k_full + i)  # as the producer needs them, for the same PTX

    def release(self, which: int, half: int) -> None:
        """A half of a key tile has been read for the last time; arrives also at the peer, which fills it too."""
        empty = self.k(which, half).empty
        cute.arch.mbarrier_arrive(empty)
        if self.peer is not None:
            self.peer.arrive(empty)

    def await_readers(self, fills: tuple[Int32, Int32]) -> None:
        """Waits until all that was ever filled has been read, here and at the peer's."""
        for which, half in REFILL_ORDER:
            self.k(which, half).at(fills[which]).wait_empty()


@dataclass(frozen=True)
class Shared:
    """SMEM beside the barriers."""

    q: cute.Tensor  # (64, d)
    k: tuple[cute.Tensor, ...]  # (keys, d), by tile of the pair
    p: tuple[cute.Tensor, ...]  # (64, keys), by tile of the pair: the probabilities; if RoPE is apart, in its slab of k
    o: tuple[tuple[cute.Tensor, ...], ...]  # (64, SLAB), by warpgroup: O on its way out, in the end where p is, if any
    max: cute.Tensor  # (64, warpgroup): the running maximum that each hands over; then what the other's sum ends with
    squares: cute.Tensor | None  # (64, warpgroup): the sum of each half of a row of q, where q is turned
    info: cute.Tensor  # (PUBLISHED, row tile and each source, row tile & 1): numbers that the producer found

    @staticmethod
    def allocate(c: Any, dtype) -> tuple[Barriers, "Shared"]:
        smem = SmemAllocator()

        def tile(layout: cute.ComposedLayout) -> cute.Tensor:
            return smem.allocate_tensor(dtype, layout.outer, 1024, swizzle=layout.inner)

        q = tile(slab_layout(dtype, c.tile_m, c.d))
        k = tuple(tile(slab_layout(dtype, keys, c.d)) for keys in c.tile_keys)
        slab = slab_layout(dtype, c.tile_m, SLAB)
        if c.moves_o:
            p, o = tuple(cute.local_tile(x, (c.tile_n, SLAB), (0, c.d_v // SLAB)) for x in k), ((), ())
        else:
            p = tuple(tile(operand_layout(dtype, c.tile_m, keys)) for keys in c.tile_keys)
            o = tuple((*(tile(slab) for _ in range(c.slabs_of_o)), seen_as(x, slab)) for x in p)
        maxima = smem.allocate_tensor(Float32, cute.make_layout((c.tile_m, 2)), 16)
        rows = cute.make_layout((c.tile_m, 2))
        squares = smem.allocate_tensor(Float32, rows, 16) if c.turns else None
        info = smem.allocate_tensor(Int32, cute.make_layout((PUBLISHED, 1 + len(c.sources), 2)), 16)
        bar = Barriers.at(smem.allocate_array(Int64, sum(Barriers.COUNTS)), c.cluster)
        return bar, Shared(q, k, p, o, maxima, squares, info)
