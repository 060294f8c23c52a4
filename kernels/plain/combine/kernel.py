"""Merges the partial results of split-KV: from the splits of a forward kernel it makes o and lse, with the sink.

One thread merges four columns of a row, for any d, so neighbouring threads read a row's parts. A small merge takes as
long as the loads that wait for one another. So a thread loads the parts of the first splits together with their lse,
before it knows which of them saw a key of the row: one that saw none has written no part, and what is read there is
dropped. It loads later parts where a key was seen, as many at a time; their lse has come with the splits before.
"""

from dataclasses import dataclass
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.abi import Combine
from kernels.aot import Compiled
from kernels.lib.launch import Kernel, i32, pointers
from kernels.lib.ptx import add_weighted, load_four_if, load_or_minus_inf, round_pair
from kernels.lib.rows import ceil_div, load, store
from kernels.lib.softmax import LN_2, LOG2_E, exp2

from .config import AT_ONCE, FOR_MAXIMUM, Config


class CombineKernel(Kernel):
    symbol = "combine"

    @cute.jit
    def __call__(
        self,
        o_parts: cute.Pointer,  # float32 [rows, splits, d]
        lse_parts: cute.Pointer,  # float32 [rows, splits], natural
        o: cute.Pointer,  # [rows, d]
        sink: cute.Pointer,  # float32 [h_q]
        lse: cute.Pointer,  # float32 [rows]
        b: Int32,
        s_q: Int32,
        h_q: Int32,
        d: Int32,
        splits: Int32,
        stream: cuda.CUstream,
    ):
        c = self.config
        rows = b * s_q * h_q
        ctas = ceil_div(rows * (d // c.tile_n), Int32(c.threads))
        self.launch(o_parts, lse_parts, o, sink, lse, rows, h_q, d, splits, ctas=ctas, stream=stream)

    @cute.kernel
    def kernel(
        self,
        o_parts: cute.Pointer,
        lse_parts: cute.Pointer,
        o: cute.Pointer,
        sink: cute.Pointer,
        lse: cute.Pointer,
        rows: Int32,
        h_q: Int32,
        d: Int32,
        splits: Int32,
    ):
        c = self.config
        i = cute.arch.block_idx()[0] * c.threads + cute.arch.thread_idx()[0]
        row, column = i // (d // c.tile_n), i % (d // c.tile_n) * c.tile_n
        if row < rows:
            first = Int64(row) * splits
            head_sink = load(sink + row % h_q)  # no kernel that is still at work writes it
            cute.arch.griddepcontrol_wait()
            parts = Parts((o_parts + (first * d + column)).toint(), (lse_parts + first).toint(), d, splits)
            shift, total, acc = parts.merge()
            factor, merged = Float32(0.0), -Float32.inf
            if total != 0.0:
                factor = 1.0 / (total + exp2((head_sink - shift) * LOG2_E))
                merged = cute.math.log2(total, fastmath=True) * LN_2 + shift
            packed = cute.make_rmem_tensor(c.tile_n // 2, cutlass.Uint32)
            for j in cutlass.range_constexpr(c.tile_n // 2):
                packed[j] = round_pair(acc[2 * j] * factor, acc[2 * j + 1] * factor, o.dtype)
            target = cute.recast_ptr(o + (Int64(row) * d + column), dtype=cutlass.Uint32).align(8)
            cute.autovec_copy(packed, cute.make_tensor(target, cute.make_layout(c.tile_n // 2)))
            if column == 0:
                store(lse + row, merged)

    def examples(self, variant: Combine) -> tuple:
        return *pointers(variant.dtype, "float32", "float32", "o", "float32", "float32"), *(i32() for _ in range(5))


@dataclass(frozen=True)
class Parts:
    """The parts of a row that its splits have left: four columns of o, from an address on, and lse."""

    o: Int64
    lse: Int64
    d: Int32
    splits: Int32

    @cute.jit
    def merge(self):
        """The greatest lse, or 0 where no split saw a key; sums of factors exp(lse - it), and of columns times them."""
        n = AT_ONCE
        lse, ahead = cute.make_rmem_tensor(n, Float32), cute.make_rmem_tensor(n, Float32)
        columns = cute.make_rmem_tensor((4, n), Float32)
        for s in cutlass.range_constexpr(n):
            lse[s] = self.lse_of(s)
            self.load_columns(columns[None, s], s, s < self.splits)
        for s in cutlass.range_constexpr(n):
            ahead[s] = self.lse_of(n + s)
        top = -Float32.inf
        for begin in cutlass.range(2 * n, self.splits, FOR_MAXIMUM, unroll=1):
            rest = self.since(begin)
            for x in [rest.lse_of(s) for s in range(FOR_MAXIMUM)]:
                top = cute.arch.fmax(top, x)
        for s in cutlass.range_constexpr(n):
            top = cute.arch.fmax(top, cute.arch.fmax(lse[s], ahead[s]))
        shift = Float32(0.0) if top == -Float32.inf else top
        total, acc = Float32(0.0), (Float32(0.0),) * 4
        for s in cutlass.range_constexpr(n):
            total, acc = add(total, acc, lse[s], shift, columns[None, s])
        for begin in cutlass.range(n, self.splits, n, unroll=1):
            rest = self.since(begin)
            for s in cutlass.range_constexpr(n):
                lse[s] = ahead[s]
                rest.load_columns(columns[None, s], s, lse[s] != -Float32.inf)
                ahead[s] = rest.lse_of(n + s)
            for s in cutlass.range_constexpr(n):
                total, acc = add(total, acc, lse[s], shift, columns[None, s])
        return shift, total, acc

    def since(self, split: Int32) -> "Parts":
        """Those of this split and the ones after it."""
        return Parts(self.o + Int64(split) * self.d * 4, self.lse + Int64(split) * 4, self.d, self.splits - split)

    def lse_of(self, split: int) -> Float32:
        """The lse of a split, or that of no keys after the last one."""
        return load_or_minus_inf(self.lse, split, self.splits)

    def load_columns(self, columns: cute.Tensor, split: int, wanted) -> None:
        """Loads the columns of a split, if wanted; otherwise they are undefined."""
        address = self.o + Int64(self.d) * 4 * split
        for j, x in enumerate(load_four_if(address, wanted)):
            columns[j] = x


def add(total: Float32, acc: tuple, lse: Float32, shift: Float32, columns: cute.Tensor):
    """Adds a split's factor, and its columns by that factor, unless it saw no key: then they may be anything."""
    factor = exp2((lse - shift) * LOG2_E)
    total, *acc = add_weighted(total, acc, tuple(columns[j] for j in range(4)), factor, lse)
    return total, tuple(acc)


def compile(variant: Combine, out_dir: Path) -> Compiled:
    return CombineKernel(Config(variant.dtype)).compile(variant, out_dir)
