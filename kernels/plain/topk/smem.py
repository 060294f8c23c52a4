"""SMEM of `indexer_topk`."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.memory import SmemAllocator

from .config import BINS, CAPACITY, WARPS


@dataclass(frozen=True)
class Shared:
    ranks: cute.Tensor  # (CAPACITY,)
    entries: cute.Tensor  # (CAPACITY,)
    bins: cute.Tensor  # (BINS,): the greatest ranks first
    of_warps: cute.Tensor  # (WARPS, 2): numbers of each warp, in two sets used alternately
    found: cute.Tensor  # (4,): numbers that one thread found


def allocate() -> Shared:
    smem = SmemAllocator()
    of_warps = smem.allocate_tensor(Int32, cute.make_layout((WARPS, 2)), 16)
    ranks, entries, bins, found = (
        smem.allocate_tensor(dtype, cute.make_layout(n), 16)
        for n, dtype in ((CAPACITY, Uint32), (CAPACITY, Int32), (BINS, Int32), (4, Int32))
    )
    return Shared(ranks, entries, bins, of_warps, found)
