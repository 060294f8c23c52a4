"""Writes a matrix in FP8 (`kernels/lib/e4m3.py`) as an array in bfloat16, [rows, columns]: e4m3 times a bfloat16.

    load       a thread its codes of SLABS slabs of 64 x 64, all before it uses any: of two rows, pairs of columns
    transpose  in each quad of lanes, so that a lane has 8 neighbouring columns
    write      what exists of them, 16 bytes of a row at a time, 128 bytes of it by a quad

It is bound by memory: a byte is read for two that are written. XLA takes a chain of transposes and concatenations.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernels.abi import UnpackMatrix
from kernels.aot import Compiled
from kernels.lib.e4m3 import STEPS, E4m3, raw_pairs
from kernels.lib.launch import WARPGROUP, Kernel, i32, pointers
from kernels.lib.output import transpose_in_quad
from kernels.lib.ptx import load_four_words, multiply_by_half
from kernels.lib.rows import WARP, ceil_div, divide, load

FORMAT = E4m3()
SIDE = 64  # rows of a tile, and columns of a slab
QUAD = 4  # lanes that have the same rows
ROW = 8  # columns that a lane writes of each row at a time


@dataclass(frozen=True)
class Config:
    slabs: int = 4  # of a CTA
    tile_m: int = SIDE
    threads: int = WARPGROUP
    smem_bytes: int = 0

    @property
    def tile_n(self) -> int:
        return self.slabs * SIDE

    @property
    def launch_options(self) -> dict[str, int]:
        """64 registers. Without a carve-out the DSL asks a driver for one."""
        return {"min_blocks_per_mp": 8, "preferred_smem_carveout": 0}


class Extents(NamedTuple):
    """The scalars of a launch, in the order of the kernel's parameters."""

    matrices: Int32
    rows: Int32
    columns: Int32  # a multiple of 8
    tiles: Int32  # of a matrix, which may have more rows and columns
    slabs: Int32


class UnpackMatrixKernel(Kernel):
    symbol = "unpack_matrix"

    @cute.jit
    def __call__(
        self,
        data: cute.Pointer,  # bytes [matrices, tiles, slabs, FORMAT.slab_bytes]
        w: cute.Pointer,  # bfloat16 [matrices, rows, columns]
        matrices: Int32,  # `Extents`
        rows: Int32,
        columns: Int32,
        tiles: Int32,
        slabs: Int32,
        stream: cuda.CUstream,
    ):
        n, c = Extents(matrices, rows, columns, tiles, slabs), self.config
        ctas = matrices * ceil_div(rows, Int32(c.tile_m)) * ceil_div(columns, Int32(c.tile_n))
        self.launch(data, w, n, ctas=ctas, stream=stream)

    @cute.kernel
    def kernel(self, data: cute.Pointer, w: cute.Pointer, n: Extents):
        c, thread = self.config, cute.arch.thread_idx()[0]
        rest, part = divide(cute.arch.block_idx()[0], ceil_div(n.columns, Int32(c.tile_n)))
        matrix, tile = divide(rest, ceil_div(n.rows, Int32(c.tile_m)))
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        loaded = []
        for i in cutlass.range_constexpr(c.slabs):
            slab = cutlass.min(part * c.slabs + i, n.slabs - 1)  # that exists
            place = data + ((Int64(matrix) * n.tiles + tile) * n.slabs + slab) * FORMAT.slab_bytes
            codes = [load_four_words((place + (half * WARPGROUP + thread) * 16).toint()) for half in range(2)]
            scale = cute.recast_ptr((place + WARPGROUP * FORMAT.code_bytes).align(4), dtype=Uint32)
            loaded.append((codes, load(scale)))
        lane = thread % QUAD
        row = tile * c.tile_m + thread // WARP * 16 + thread % WARP // QUAD * 2
        line = w + (Int64(matrix) * n.rows + row) * n.columns
        for i in cutlass.range_constexpr(c.slabs):
            codes, scale = loaded[i]
            for half in cutlass.range_constexpr(2):
                column = part * c.tile_n + i * SIDE + (half * QUAD + lane) * ROW
                self.write(line, row, column, codes[half], scale, n)

    @cute.jit
    def write(self, line: cute.Pointer, row: Int32, column: Int32, codes: tuple, scale: Uint32, n: Extents):
        """Writes the two rows from `row` on. Each of a lane's words has two columns of both."""
        lane = cute.arch.thread_idx()[0] % QUAD
        words = cute.make_rmem_tensor(STEPS, Uint32)
        for j in cutlass.range_constexpr(STEPS):
            words[j] = Uint32(codes[j])
        transpose_in_quad(words, lane % 2 == 1, lane >= 2)
        pairs = cute.make_rmem_tensor((STEPS, 2), Uint32)
        for j in cutlass.range_constexpr(STEPS):
            for r, raw in enumerate(raw_pairs(words[j])):
                pairs[j, r] = multiply_by_half(raw, scale, 0)
        for r in cutlass.range_constexpr(2):
            if (row + r < n.rows) & (column < n.columns):
                place = cute.recast_ptr((line + (r * Int64(n.columns) + column)).align(16), dtype=Uint32)
                cute.autovec_copy(pairs[None, r], cute.make_tensor(place, cute.make_layout(STEPS)))

    def examples(self, variant: UnpackMatrix) -> tuple:
        return *pointers("bfloat16", "bytes", "w"), *(i32() for _ in range(5))


def compile(variant: UnpackMatrix, out_dir: Path) -> Compiled:
    assert FORMAT.scales == 1
    return UnpackMatrixKernel(Config()).compile(variant, out_dir)
