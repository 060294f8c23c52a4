"""Tiles in SMEM."""

import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from .wgmma import slab_layout


class TileAllocator(SmemAllocator):
    """Gives a CTA its SMEM; tiles of one dtype in `slab_layout`, at multiples of 1024 bytes, as TMA and WGMMA want."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def tile(self, *shape: int) -> cute.Tensor:
        layout = slab_layout(self.dtype, *shape)
        return self.allocate_tensor(self.dtype, layout.outer, 1024, swizzle=layout.inner)
