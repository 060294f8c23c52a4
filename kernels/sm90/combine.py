"""Merges the partial results of split-KV: from the splits of a forward kernel it makes o and lse, with the sink.

One thread merges four columns of a row, for any d, so neighbouring threads read a row's parts. It first reads the lse
of all splits, for their maximum. A split that saw no key of a row has written no part of it, and the thread reads none.
"""

from dataclasses import dataclass
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.abi import Combine as Merged
from kernels.aot import Compiled, compile_ahead
from kernels.lib.launch import i32, launch_facts, pointers
from kernels.lib.rows import ceil_div, load, store
from kernels.lib.softmax import LN_2, LOG2_E, exp2
from kernels.lib.wgmma import round_pair


@dataclass(frozen=True)
class Config:
    dtype: str  # dtype of o
    threads: int = 128
    smem_bytes: int = 0
    tile_m: int = 1  # rows and
    tile_n: int = 4  # columns of a thread


class Combine:
    def __init__(self, config: Config):
        self.config = config

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
        self.kernel(o_parts, lse_parts, o, sink, lse, rows, h_q, d, splits).launch(
            grid=(ceil_div(rows * (d // c.tile_n), Int32(c.threads)), 1, 1), block=(c.threads, 1, 1), stream=stream
        )

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
        cute.arch.griddepcontrol_wait()
        if row < rows:
            first = Int64(row) * splits
            top = -Float32.inf
            for s in cutlass.range(splits, unroll=8):
                top = cute.arch.fmax(top, load(lse_parts + (first + s)))
            shift = Float32(0.0) if top == -Float32.inf else top
            total = Float32(0.0)
            acc = cute.make_rmem_tensor(c.tile_n, Float32)
            acc.fill(0.0)
            for s in cutlass.range(splits, unroll=4):
                part = load(lse_parts + (first + s))
                if part != -Float32.inf:
                    weight = exp2((part - shift) * LOG2_E)
                    total += weight
                    values = cute.make_rmem_tensor(c.tile_n, Float32)
                    source = (o_parts + ((first + s) * d + column)).align(16)
                    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(c.tile_n)), values)
                    acc.store(acc.load() + values.load() * weight)
            factor, merged = Float32(0.0), -Float32.inf
            if total != 0.0:
                factor = 1.0 / (total + exp2((load(sink + row % h_q) - shift) * LOG2_E))
                merged = cute.math.log2(total, fastmath=True) * LN_2 + shift
            packed = cute.make_rmem_tensor(c.tile_n // 2, cutlass.Uint32)
            for j in cutlass.range_constexpr(c.tile_n // 2):
                packed[j] = round_pair(acc[2 * j] * factor, acc[2 * j + 1] * factor, o.dtype)
            target = cute.recast_ptr(o + (Int64(row) * d + column), dtype=cutlass.Uint32).align(8)
            cute.autovec_copy(packed, cute.make_tensor(target, cute.make_layout(c.tile_n // 2)))
            if column == 0:
                store(lse + row, merged)


def compile(variant: Merged, out_dir: Path) -> Compiled:
    config = Config(variant.dtype)
    return compile_ahead(
        Combine(config),
        Combine.kernel,
        *pointers(variant.dtype, "float32", "float32", "o", "float32", "float32"),
        *(i32() for _ in range(5)),
        name="combine",
        arch=variant.arch,
        out_dir=out_dir,
        facts=launch_facts(config),
    )
