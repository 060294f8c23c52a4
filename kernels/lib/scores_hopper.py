"""The roles in Hopper's kernels of scores of an indexer: four warpgroups multiply and sum up, and a warp loads."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .indexer import KEYS, D
from .launch import WARP, WARPGROUP
from .pipeline import Ring
from .scores import PUBLISHED, Arrays, Extents, Pages, ScoresConfig, ScoresKernel, prefetch_maps
from .tiles import TileAllocator

GROUPS = 4  # warpgroups that share a block's columns and a tile's keys
CONSUMERS = GROUPS * WARPGROUP  # threads


class HopperScoresConfig(ScoresConfig):
    """The choices, and what follows from them for Hopper."""

    @property
    def parts(self) -> int:
        """Parts of a tile's keys, one for each consumer."""
        return self.tile_n // KEYS

    @property
    def threads(self) -> int:
        return CONSUMERS + WARPGROUP

    @property
    def registers(self) -> tuple[int, int]:
        """(producer, consumer) registers a thread."""
        return 24, 112

    @property
    def smem_bytes(self) -> int:
        return self.tile_bytes + 8 * 2 * (self.stages_q + self.stages_k)


@dataclass(frozen=True)
class Barriers:
    """The rings of tiles."""

    q: Ring  # and what the producer found about the block
    k: Ring

    def initialise(self) -> None:
        """Initialises both rings; one thread does so. A warp of consumers arrives once."""
        self.q.initialise(1, CONSUMERS // WARP)
        self.k.initialise(1, CONSUMERS // WARP)


@dataclass(frozen=True)
class Shared:
    q: cute.Tensor  # (columns, D, stage)
    k: cute.Tensor  # (tile_n, elements of a key, stage)
    k_scale: cute.Tensor | None  # 4 bytes (tile_n, stage), for pages
    info: cute.Tensor  # (PUBLISHED, stage of q)


class HopperScoresKernel(ScoresKernel):
    """The kernel, of `consume(bar, smem, arrays, n)`, which one warpgroup of consumers runs."""

    @cute.kernel
    def kernel(self, maps: tuple, arrays: Arrays, n: Extents, pages: Pages | None):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bar, smem = self.allocate()
        if warp == 0:
            prefetch_maps(maps)
            with cute.arch.elect_one():
                bar.initialise()
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()  # the choice that follows waits for this grid itself

        if warp * WARP >= CONSUMERS:
            cute.arch.setmaxregister_decrease(c.registers[0])
            if warp * WARP == CONSUMERS:
                self.produce(bar, smem, maps, arrays, n, pages)
        else:
            cute.arch.setmaxregister_increase(c.registers[1])
            self.consume(bar, smem, arrays, n)

    def allocate(self) -> tuple[Barriers, Shared]:
        c, smem = self.config, TileAllocator(self.dtype)
        q, k = smem.tile(c.columns, D, c.stages_q), self.allocate_keys(smem)
        of_scales = cute.make_layout((c.tile_n, c.stages_k))
        k_scale = smem.allocate_tensor(self.scale_type, of_scales, 128) if c.scale_bytes else None
        info = smem.allocate_tensor(Int32, cute.make_layout((PUBLISHED, c.stages_q)), 16)
        rings = (Ring(*(smem.allocate_array(Int64, n) for _ in range(2)), n) for n in (c.stages_q, c.stages_k))
        return Barriers(*rings), Shared(q, k, k_scale, info)

    scale_type: type[cutlass.Numeric] = Float32

    def allocate_keys(self, smem: TileAllocator) -> cute.Tensor:
        """(tile_n, elements of a key, stage)"""
        return smem.tile(self.config.tile_n, D, self.config.stages_k)
