"""RoPE of an indexer's rows and then the Hadamard transform, in place; or back, which is also their gradient.

    x = H rotate(x);   back: x = rotate back(H x)           H is Sylvester's matrix over √128: its own inverse

16 lanes have a row, so the transform is butterflies: three in a lane's registers, four between lanes. It is bound by
HBM, like `rope.py`, which says what rotate is.
"""

from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.abi import Rope
from kernels.aot import Compiled
from kernels.lib.hadamard import hadamard, rounded

from .config import INDEX_D, VECTOR, Config
from .rope import RopeKernel
from .rows import as_float, index_rows, rotate, write


class RopeHadamardKernel(RopeKernel):
    """RopeKernel for rows of INDEX_D numbers, which it transforms."""

    symbol = "rope_hadamard"

    @cute.kernel
    def kernel(self, x: cute.Pointer, table: cute.Pointer, rows: Int32, heads: Int32, d: Int32, direction: Float32):
        c, thread = self.config, cute.arch.thread_idx()[0]
        lane = thread % c.lanes
        row0 = cute.arch.block_idx()[0] * c.tile_m + thread // c.lanes
        given, rotations = index_rows(c, x, table, rows, heads, row0, lane)
        for i in cutlass.range_constexpr(c.tile_n):
            row = row0 + i * c.at_once
            values = as_float(given[None, i])
            if direction > 0.0:
                rotate(values, rotations[None, i], direction)
                rounded(values, self.dtype)
            hadamard(values, lane, INDEX_D)
            if direction < 0.0:
                rounded(values, self.dtype)
                rotate(values, rotations[None, i], direction)
            if row < rows:
                write(x + (Int64(row) * INDEX_D + lane * VECTOR), values)


def compile(variant: Rope, out_dir: Path) -> Compiled:
    return RopeHadamardKernel(Config(variant.dtype, variant.dims, hadamard=True)).compile(variant, out_dir)
