"""Moves rows to and from a layer's experts, a warp each, only those that experts here have.

    taken    row r of y is that of the token whose choice list[r] is, for r below a number that is on the device
    summed   row t of y is the sum, in float32, over the choices of token t that are experts here

A lane has 8 columns at a time, of PARTS parts of a row before it uses any. XLA moves rows of all choices.
"""

from dataclasses import dataclass
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernels.abi import ExpertRows
from kernels.aot import Compiled
from kernels.lib.launch import Kernel, i32, pointers
from kernels.lib.ptx import float_of, load_four_words, round_pair
from kernels.lib.rows import WARP, ceil_div, load

LANE = 8  # columns of a lane at a time
WORDS = LANE // 2


@dataclass(frozen=True)
class Config:
    dtype: str
    is_sum: bool
    tile_m: int = 8  # rows, a warp each
    tile_n: int = WARP * LANE
    smem_bytes: int = 0

    @property
    def parts(self) -> int:
        """Parts of a row that a warp loads at a time."""
        return 1 if self.is_sum else 4

    @property
    def threads(self) -> int:
        return self.tile_m * WARP

    @property
    def launch_options(self) -> dict[str, int]:
        """40 registers. Without a carve-out the DSL asks a driver for one."""
        return {"min_blocks_per_mp": 6, "preferred_smem_carveout": 0}


class ExpertRowsKernel(Kernel):
    symbol = "expert_rows"

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,  # T [tokens, k] or [rows, k]
        which: cute.Pointer,  # int32 [rows] or [tokens, choices]
        count: cute.Pointer,  # int32 [1], the rows that are taken; of a sum nothing
        y: cute.Pointer,  # T [rows, k] or [tokens, k]
        rows: Int32,  # of y
        choices: Int32,  # of a token
        k: Int32,  # a multiple of tile_n
        experts: Int32,  # that are here, from 0 on, of a sum
        stream: cuda.CUstream,
    ):
        ctas = ceil_div(rows, Int32(self.config.tile_m))
        self.launch(x, which, count, y, rows, choices, k, experts, ctas=ctas, stream=stream)

    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,
        which: cute.Pointer,
        count: cute.Pointer,
        y: cute.Pointer,
        rows: Int32,
        choices: Int32,
        k: Int32,
        experts: Int32,
    ):
        c = self.config
        row = cute.arch.block_idx()[0] * c.tile_m + cute.arch.warp_idx()
        column = cute.arch.lane_idx() * LANE
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        end = rows
        if cutlass.const_expr(not c.is_sum):
            end = cutlass.min(load(count), rows)
        if row < end:
            line = y + Int64(row) * k
            if cutlass.const_expr(c.is_sum):
                self.add(x, which + row * choices, line, row * choices, column, choices, k, experts)
            else:
                self.copy(x + Int64(load(which + row) // choices) * k, line, column, k)

    @cute.jit
    def copy(self, x: cute.Pointer, y: cute.Pointer, column: Int32, k: Int32):
        c = self.config
        for first in cutlass.range(column, k, c.parts * c.tile_n, unroll=1):
            places = [first + i * c.tile_n for i in range(c.parts)]
            loaded = [load_four_words((x + cutlass.min(place, k - LANE)).toint()) for place in places]
            for i in cutlass.range_constexpr(c.parts):
                if places[i] < k:
                    self.store(y + places[i], loaded[i])

    @cute.jit
    def add(
        self,
        x: cute.Pointer,
        chosen: cute.Pointer,
        y: cute.Pointer,
        first: Int32,
        column: Int32,
        choices: Int32,
        k: Int32,
        experts: Int32,
    ):
        """The sum over those rows of x, from the first of a token on, whose experts are here."""
        for place in cutlass.range(column, k, self.config.tile_n, unroll=1):
            sums = cute.make_rmem_tensor(LANE, Float32)
            sums.fill(0.0)
            for j in cutlass.range(choices, unroll=1):
                its = load(chosen + j)
                if (its >= 0) & (its < experts):
                    words = load_four_words((x + (Int64(first + j) * k + place)).toint())
                    for i in cutlass.range_constexpr(WORDS):
                        sums[2 * i] += float_of(words[i] << 16)
                        sums[2 * i + 1] += float_of(words[i] & -65536)
            self.store(y + place, [round_pair(sums[2 * i], sums[2 * i + 1], self.dtype) for i in range(WORDS)])

    @cute.jit
    def store(self, place: cute.Pointer, words: tuple):
        made = cute.make_rmem_tensor(WORDS, Uint32)
        for i in cutlass.range_constexpr(WORDS):
            made[i] = Uint32(words[i])
        cute.autovec_copy(
            made, cute.make_tensor(cute.recast_ptr(place.align(16), dtype=Uint32), cute.make_layout(WORDS))
        )

    def examples(self, variant: ExpertRows) -> tuple:
        return *pointers(variant.dtype, "x", "int32", "int32", "y"), *(i32() for _ in range(4))


def compile(variant: ExpertRows, out_dir: Path) -> Compiled:
    return ExpertRowsKernel(Config(variant.dtype, variant.form == "summed")).compile(variant, out_dir)
