"""An indexer's queries for products in 8 bits: RoPE, the Hadamard transform, and e4m3 with a scale for each row.

    codes, scale = quantized(H rotate(x))                   scale = max(max |row|, 1e-4) / 448

16 lanes have a row, as in `rope_hadamard.py`. After each of the three steps numbers are rounded as an array is that
has them in memory, so codes are those of the steps apart.
"""

from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.abi import IndexQuery
from kernels.aot import Compiled
from kernels.lib.fp8_rows import quantized, write_words
from kernels.lib.hadamard import hadamard, rounded
from kernels.lib.launch import Kernel, i32, pointers
from kernels.lib.rows import ceil_div, store

from .config import INDEX_D, VECTOR, Config
from .rows import as_float, index_rows, rotate


class IndexQueryKernel(Kernel):
    """Queries to codes and scales."""

    symbol = "index_query"

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,  # [rows, INDEX_D]
        table: cute.Pointer,  # float32 [rows / heads, dims / 2, 2]: cos and sin
        codes: cute.Pointer,  # e4m3 [rows, INDEX_D]
        scales: cute.Pointer,  # float32 [rows]
        rows: Int32,
        heads: Int32,
        stream: cuda.CUstream,
    ):
        ctas = ceil_div(rows, Int32(self.config.tile_m))
        self.launch(x, table, codes, scales, rows, heads, ctas=ctas, stream=stream)

    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,
        table: cute.Pointer,
        codes: cute.Pointer,
        scales: cute.Pointer,
        rows: Int32,
        heads: Int32,
    ):
        c, thread = self.config, cute.arch.thread_idx()[0]
        lane = thread % c.lanes
        row0 = cute.arch.block_idx()[0] * c.tile_m + thread // c.lanes
        given, rotations = index_rows(c, x, table, rows, heads, row0, lane)
        for i in cutlass.range_constexpr(c.tile_n):
            row = row0 + i * c.at_once
            values = as_float(given[None, i])
            rotate(values, rotations[None, i], Float32(1.0))
            rounded(values, self.dtype)
            hadamard(values, lane, INDEX_D)
            rounded(values, self.dtype)
            words, scale = quantized(values, c.lanes)
            if row < rows:
                write_words(words, codes + (Int64(row) * INDEX_D + lane * VECTOR), VECTOR // 4)
                if lane == 0:
                    store(scales + row, scale)

    def examples(self, variant: IndexQuery) -> tuple:
        return *pointers(variant.dtype, "x", "float32", "bytes", "float32"), i32(), i32()


def compile(variant: IndexQuery, out_dir: Path) -> Compiled:
    return IndexQueryKernel(Config(variant.dtype, variant.dims, hadamard=True)).compile(variant, out_dir)
