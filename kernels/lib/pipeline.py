"""Pipelines in SMEM: places that one role fills and another one reads, over and over.

Each place, a stage, has two mbarriers: `full` says that it has been filled, `empty` that it has been read. Fills are
counted from 0, over all tiles of a CTA. A wait names the parity of a phase, so nobody may be two phases ahead.

    producer    state = ring.at(fill); state.wait_empty(); (fills it); state.arrive_full()
    consumer    state = ring.at(fill); state.wait_full();  (reads it); state.arrive_empty()
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class Ring:
    """Stages that are filled one after the other, and their barriers."""

    full: cute.Pointer  # the first stage's; the others' follow
    empty: cute.Pointer  # the same
    stages: int = 1

    def initialise(self, producers: int, consumers: int) -> None:
        """One thread initialises the barriers, for so many arrivals of either role at each fill."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.full + stage, producers)
            cute.arch.mbarrier_init(self.empty + stage, consumers)

    def at(self, fill: Int32) -> "PipelineState":
        if self.stages == 1:
            return PipelineState(self, 0, fill & 1)
        return PipelineState(self, fill % self.stages, fill // self.stages & 1)


@dataclass(frozen=True)
class PipelineState:
    """A fill of a ring: its stage, and the parity of the phase in which it is filled and read."""

    ring: Ring
    index: Int32 | int
    phase: Int32

    @property
    def full(self) -> cute.Pointer:
        return self.ring.full + self.index if self.ring.stages > 1 else self.ring.full

    @property
    def empty(self) -> cute.Pointer:
        return self.ring.empty + self.index if self.ring.stages > 1 else self.ring.empty

    def wait_empty(self) -> None:
        """Waits until what was here before has been read; at the first fill there was nothing."""
        cute.arch.mbarrier_wait(self.empty, self.phase ^ 1)

    def wait_full(self) -> None:
        cute.arch.mbarrier_wait(self.full, self.phase)

    def arrive_full(self) -> None:
        cute.arch.mbarrier_arrive(self.full)

    def expect_full(self, size: int | Int32) -> None:
        """Arrives, and expects so many bytes, which complete the phase."""
        cute.arch.mbarrier_arrive_and_expect_tx(self.full, size)

    def copy_full(self) -> None:
        """Arrives when this thread's cp.async so far are complete."""
        cute.arch.cp_async_mbarrier_arrive_noinc(self.full)

    def arrive_empty(self) -> None:
        cute.arch.mbarrier_arrive(self.empty)


def split_barriers(first: cute.Pointer, counts: tuple[int, ...]) -> list[cute.Pointer]:
    """The firsts of groups of so many barriers, one group after the other."""
    return [first + sum(counts[:i]) for i in range(len(counts))]


def wait_for(barrier: cute.Pointer, n: Int32) -> None:
    """Waits until a barrier has completed its phase n, counted from 0."""
    cute.arch.mbarrier_wait(barrier, n & 1)
