"""Barriers and SMEM, which the roles of `latent_bwd` share."""

from dataclasses import dataclass

import cutlass.cute as cute

from kernels.lib.launch import WARP, WARPGROUP

LEFT, RIGHT = 0, 1  # a warpgroup, and its half of dQ's columns
STAGES = 2  # numbers in the list of a tile of keys


@dataclass(frozen=True)
class Barriers:
    """mbarriers in SMEM, by what they announce."""

    first: cute.Pointer

    COUNT = 22

    def initialise(self, takers: int) -> None:
        """One thread initialises them; `takers` sides read P and dS. All others arrive thread by thread."""
        for barriers, count, arrivals in (
            (self.q_full, 4, WARPGROUP),
            (self.q_empty, 4, 2 * WARPGROUP),
            (self.full, 4, WARPGROUP),
            (self.empty, 2, WARPGROUP),
            (self.listed, 1, WARPGROUP),
            (self.shared, 1, WARPGROUP),
            (self.taken, 1, takers * WARPGROUP),
            (self.opened, 1, 1),
            (self.arrived, 2, WARPGROUP),
            (self.read, 2, WARPGROUP // WARP),
        ):
            for i in range(count):
                cute.arch.mbarrier_init(barriers + i, arrivals)

    @property
    def q_full(self) -> cute.Pointer:
        """By piece of the columns: Q and dO are in SMEM."""
        return self.first

    @property
    def q_empty(self) -> cute.Pointer:
        return self.first + 4

    @property
    def full(self) -> cute.Pointer:
        """By piece of the columns: a tile of keys is in SMEM."""
        return self.first + 8

    @property
    def empty(self) -> cute.Pointer:
        """By half of the columns: the side that reads it last is done."""
        return self.first + 12

    @property
    def listed(self) -> cute.Pointer:
        """The list of a tile's keys is in SMEM."""
        return self.first + 14

    @property
    def shared(self) -> cute.Pointer:
        """P and dS are in SMEM."""
        return self.first + 15

    @property
    def taken(self) -> cute.Pointer:
        return self.first + 16

    @property
    def opened(self) -> cute.Pointer:
        """The producer's findings about a row tile are in SMEM."""
        return self.first + 17

    @property
    def arrived(self) -> cute.Pointer:
        """By slot: the peer's part of a chunk is in SMEM."""
        return self.first + 18

    @property
    def read(self) -> cute.Pointer:
        """By slot: the peer has read the numbers that it got."""
        return self.first + 20


@dataclass(frozen=True)
class Shared:
    """SMEM beside the barriers."""

    q: cute.Tensor  # (64, d)
    do: cute.Tensor  # (64, d)
    k: cute.Tensor  # (64, d)
    p: cute.Tensor  # (64, keys): weight P
    ds: cute.Tensor  # (64, keys)
    out: cute.Tensor  # (float32, 2): a chunk of dKV on its way out of either side, or two from the peer
    keys: cute.Tensor  # (keys, stage): the place of each key in its source, or -1
    numbers: cute.Tensor  # (64, 3): for each row lse in units of log2, weight, and scaled delta
    spans: cute.Tensor | None  # (64, 2, source): start and stop, where rows differ
    info: cute.Tensor  # (PUBLISHED, row tile and each source, row tile & 1): numbers that the producer found
