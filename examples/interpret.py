"""A CuTe DSL kernel that runs without a GPU, in the interpreter, which finds its mistake.

    python -m interpreter run examples/interpret.py                  sums rows; nothing is wrong
    python -m interpreter run examples/interpret.py --no-barrier     a race: which instructions, and where

It needs nvidia-cutlass-dsl and a C compiler, and nothing else of this project.
"""

import sys

import cutlass
import numpy as np
from cutlass import Constexpr, Float32, cute, memory
from cutlass.cute.runtime import from_dlpack

THREADS = 128


@cute.kernel
def sum_row(x: cute.Tensor, sums: cute.Tensor, synchronizes: Constexpr):
    """A CTA for each row: threads add pairs of numbers in shared memory until one is left."""
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    shared = memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(THREADS))
    shared[thread] = x[row, thread]
    for step in cutlass.range_constexpr(7):
        if synchronizes:
            cute.arch.barrier()
        rest = THREADS >> step + 1
        if thread < rest:
            shared[thread] = shared[thread] + shared[thread + rest]
    if thread == 0:
        sums[row] = shared[0]


@cute.jit
def sum_rows(x: cute.Tensor, sums: cute.Tensor, synchronizes: Constexpr):
    sum_row(x, sums, synchronizes).launch(grid=(cute.size(x, mode=[0]), 1, 1), block=(THREADS, 1, 1))


def main(synchronizes: bool) -> None:
    x = np.random.default_rng(0).standard_normal((3, THREADS)).astype(np.float32)
    sums = np.zeros(3, np.float32)
    sum_rows(from_dlpack(x), from_dlpack(sums), synchronizes)
    print("greatest difference to float64:", f"{np.abs(sums - x.sum(1, dtype=np.float64)).max():.1e}")


if __name__ == "__main__":
    main("--no-barrier" not in sys.argv[1:])
