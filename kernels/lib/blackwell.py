"""The frame of every kernel for Blackwell: its start and end, the barriers of its warps, and its columns of TMEM."""

from dataclasses import dataclass, fields
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects.nvvm import MemScopeKind

from .pipeline import Ring, split_barriers
from .tcgen05 import COLUMNS, after_thread_sync, before_thread_sync
from .tiles import TileAllocator


class InOrder:
    """The base class of a kernel's mbarriers: they lie in SMEM in the order of `Config.barriers`, which has (how many,
    arrivals in a phase) of each kind. Their first field comes first, of a ring its `full`."""

    def initialise(self, config: Any) -> None:
        """Initialises all the barriers, each with its number of arrivals; one thread does so."""
        first = getattr(self, fields(self)[0].name)
        first = first.full if isinstance(first, Ring) else first
        for i, arrivals in enumerate(arrivals for count, arrivals in config.barriers for _ in range(count)):
            cute.arch.mbarrier_init(first + i, arrivals)


def allocate_barriers(smem: TileAllocator, config: Any) -> list[cute.Pointer]:
    """The first of each kind."""
    counts = tuple(count for count, _ in config.barriers)
    return split_barriers(smem.allocate_array(Int64, sum(counts)), counts)


@dataclass(frozen=True)
class Cta:
    """State that all warps share."""

    bar: Any
    smem: Any
    tmem: cute.Pointer
    n: Any  # Extents
    rank: Int32  # in a pair; its CTA 0 leads


class BlackwellKernel:
    """The base class of kernels, beside what they share with other chips'. Its config has `cluster` and `barriers`."""

    @property
    def paired(self) -> bool:
        """True if both CTAs of a cluster make a product together."""
        return self.config.cluster == 2

    @property
    def columns(self) -> int:
        """The columns of TMEM that a CTA allocates: all, where it is alone on its SM."""
        return COLUMNS

    @cute.jit
    def start(self, warp: Int32, bar: Any, smem: Any, n: Any, followed: cutlass.Constexpr = False) -> Cta:
        """`followed`: the next grid may begin early; where it reads what this one writes, it waits for it itself."""
        if warp == 0:
            with cute.arch.elect_one():
                bar.initialise(self.config)
            cute.arch.mbarrier_init_fence()
            cute.arch.alloc_tmem(self.columns, smem.tmem, is_two_cta=self.paired)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.paired)
        self.sync()
        if cutlass.const_expr(followed):
            cute.arch.griddepcontrol_launch_dependents()
        rank = Int32(0)
        if cutlass.const_expr(self.config.cluster == 2):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        return Cta(bar, smem, cute.arch.retrieve_tmem_ptr(Float32, 16, smem.tmem), n, rank)

    @cute.jit
    def end(self, warp: Int32, cta: Cta):
        self.sync()  # nothing may arrive in a CTA that has ended, nor may TMEM of either go
        if warp == 0:
            cute.arch.dealloc_tmem(cta.tmem, self.columns, is_two_cta=self.paired)

    @cute.jit
    def sync(self):
        """All threads of the cluster."""
        before_thread_sync()
        if cutlass.const_expr(self.config.cluster == 2):
            cute.arch.sync_warp()
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        after_thread_sync()

    @cute.jit
    def arrive(self, barrier: cute.Pointer):
        """A warp arrives, once."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def hand_over(self, barrier: cute.Pointer):
        """A warp arrives, once, after its accesses to TMEM: at the barrier of the CTA that issues the products."""
        before_thread_sync()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            if cutlass.const_expr(self.paired):
                cute.arch.mbarrier_arrive(barrier, 0, scope=MemScopeKind.CLUSTER)
            else:
                cute.arch.mbarrier_arrive(barrier)
