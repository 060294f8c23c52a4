"""Sums arrays over the devices of a process: every device sends its array to all others, and sums what it gets.

    send      each thread writes its lines (kernels/lib/lines.py) into the inbox of every other device
    receive   it waits for the same lines of the others in its own inbox, and sums them in the order of the devices

This is a one-shot all-reduce by pushes. A step's arrays are small, so it takes the time of a launch, and of a store to
another device and a load that sees it. Every device sums in float32 and in the same order, so all have the same bits.

An inbox has room for two messages, the even and the odd ones. A device sends message n + 2 after it has got message
n + 1, which another one sent after it had read message n: so no line is written over before it was read. Threads know
nothing of each other: each counts its own messages, and takes the same lines on all devices.
"""

from dataclasses import dataclass
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_ptr

from kernels.abi import AllReduce
from kernels.aot import Compiled
from kernels.lib.launch import Kernel, i32, pointers
from kernels.lib.lines import BYTES, LINE, received, send
from kernels.lib.ptx import float_of, round_pair
from kernels.lib.rows import load, store


@dataclass(frozen=True)
class Config:
    dtype: str
    threads: int = 256
    smem_bytes: int = 0
    tile_m: int = 1
    tile_n: int = 256  # lines of a CTA at a time

    @property
    def launch_options(self) -> dict[str, int]:
        return {}


class AllReduceKernel(Kernel):
    symbol = "all_reduce"

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        y: cute.Pointer,
        inbox: cute.Pointer,  # this device's: lines [2, devices, lines]
        messages: cute.Pointer,  # int32 [ctas, threads]: how many each thread has sent
        outboxes: cute.Pointer,  # int64 [devices]: where its lines lie in the inbox of each device
        device: Int32,
        devices: Int32,
        lines: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        self.launch(x, y, inbox, messages, outboxes, device, devices, lines, ctas=ctas, stream=stream)

    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,
        y: cute.Pointer,
        inbox: cute.Pointer,
        messages: cute.Pointer,
        outboxes: cute.Pointer,
        device: Int32,
        devices: Int32,
        lines: Int32,
    ):
        c = self.config
        first, step = (
            cute.arch.block_idx()[0] * c.threads + cute.arch.thread_idx()[0],
            cute.arch.grid_dim()[0] * c.threads,
        )
        message = load(messages + first) + 1
        half = Int64(message & 1) * devices * lines
        for i in cutlass.range(first, lines, step, unroll=1):
            words = self.words_of(x, i)
            for other in cutlass.range(devices, unroll=1):
                if other != device:
                    send(load(outboxes + other) + (half + i) * LINE, words, message)
        own = inbox.toint() + half * LINE
        for i in cutlass.range(first, lines, step, unroll=1):
            words, sums = self.words_of(x, i), (Float32(0.0),) * (BYTES // 2)
            for other in cutlass.range(devices, unroll=1):
                its = words
                if other != device:
                    its = received(own + (Int64(other) * lines + i) * LINE, message)
                numbers = [float_of(part) for word in its for part in (word << 16, word & -65536)]
                sums = tuple(total + number for total, number in zip(sums, numbers, strict=True))
            self.put(y, i, sums)
        store(messages + first, message)

    def words_of(self, x: cute.Pointer, i: Int32) -> tuple[Int32, Int32]:
        words = cute.recast_ptr(x, dtype=Int32) + Int64(i) * (BYTES // 4)
        return load(words), load(words + 1)

    def put(self, y: cute.Pointer, i: Int32, sums: tuple[Float32, ...]) -> None:
        target = cute.recast_ptr(y, dtype=Int32) + Int64(i) * (BYTES // 4)
        for n in range(2):
            store(target + n, Int32(round_pair(*sums[2 * n : 2 * n + 2], self.dtype)))

    def examples(self, variant: AllReduce) -> tuple:
        arrays = pointers(variant.dtype, "x", "y", "bytes", "int32")
        addresses = make_ptr(Int64, 16, cute.AddressSpace.gmem, assumed_align=8)
        return *arrays, addresses, *(i32() for _ in range(4))


def compile(variant: AllReduce, out_dir: Path) -> Compiled:
    return AllReduceKernel(Config(variant.dtype)).compile(variant, out_dir)
