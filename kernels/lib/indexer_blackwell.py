"""Products of the indexer's kernels for Blackwell."""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import tcgen05

from .tcgen05 import LANES, tiled_mma
from .wgmma import K_MAJOR


def product(dtype, columns: int) -> cute.TiledMma:
    """128 keys by so many columns, each a head of a query."""
    if dtype.width == 16:
        return tiled_mma(dtype, LANES, columns, K_MAJOR)
    one, source = tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM
    op = tcgen05.MmaF8F6F4Op(dtype, dtype, Float32, (LANES, columns, 32), one, source, K_MAJOR, K_MAJOR)
    return cute.make_tiled_mma(cute.make_mma_atom(op))
