"""The sizes that the indexer's kernels of scores share, and their products of keys by heads."""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import warpgroup

from .wgmma import K_MAJOR, tiled_mma

D = 128  # of queries and keys
HEADS = (16, 32, 64)
KEYS = 64  # of a warpgroup's product
BLOCK = 8  # columns of an accumulator; a quad's lanes hold two of each eight


def product(dtype, columns: int) -> cute.TiledMma:
    """KEYS keys by so many columns, each a head of a query."""
    if dtype.width == 16:
        return tiled_mma(dtype, columns, K_MAJOR)
    source = warpgroup.OperandSource.SMEM
    op = warpgroup.MmaF8Op(dtype, dtype, Float32, (KEYS, columns, 32), source, K_MAJOR, K_MAJOR)
    return cute.make_tiled_mma(cute.make_mma_atom(op))
