"""Matrices as operands of products in bfloat16, whose registers a thread fills from shared memory.

A matrix [n, k] has tiles of 64 rows and slabs of 64 of k. One in MXFP4 or FP8 is packed so once
(`_definitions/experts.py`): each thread's numbers lie where its registers want them. A slab's codes come first, in
MXFP4 16 bytes for each thread of a warpgroup, a word for each 16 of k. The scales of its rows follow. A matrix in
bfloat16 stays as it is, and its loader puts rows where the tile wants them.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Uint32

from kernels.lib.e4m3 import STEPS, E4m3
from kernels.lib.launch import WARP, WARPGROUP
from kernels.lib.ptx import load_matrices, load_shared_word, load_shared_words, multiply_by_half, permute_bytes
from kernels.lib.rows import ROWS_OF_WARPGROUP
from kernels.lib.wgmma import SLAB


@dataclass(frozen=True)
class Mxfp4:
    """e2m1 with a power of two for 32 numbers of a row."""

    is_packed = True
    code_bytes: int = 16  # of a slab, for each thread
    scale_bytes: int = 4  # of a slab, for each two rows

    @property
    def slab_bytes(self) -> int:
        return WARPGROUP * (self.code_bytes + self.scale_bytes // 4)

    def place(self, thread: Int32) -> Int32:
        """The offset in a slab at which a thread reads."""
        return thread * self.code_bytes

    def load(self, slab: Int32, thread: Int32) -> tuple:
        """A thread's codes and scales of a slab; slab: an address in shared memory, of the thread's codes."""
        to_scales = WARPGROUP * self.code_bytes - thread * self.code_bytes + thread // 4 * self.scale_bytes
        return load_shared_words(slab), load_shared_word(slab + to_scales)

    def decode(self, operand: cute.Tensor, loaded: tuple) -> None:
        """operand <- 64 rows by 64 of k, in bfloat16."""
        codes, scales = loaded
        pairs = cute.make_tensor(cute.recast_ptr(operand.iterator, dtype=Uint32), cute.make_layout(4 * STEPS))
        # of either 32 of k, the powers of two of two rows, as a pair of bfloat16
        factors = [permute_bytes(scales, Uint32(0), Uint32(0x2404 + i * 0x1010)) >> Uint32(1) for i in range(2)]
        for step in range(STEPS):
            for i, raw in enumerate(raw_pairs(codes[step])):
                pairs[4 * step + i] = multiply_by_half(raw, factors[step // 2], i % 2)


@dataclass(frozen=True)
class Fp8(E4m3):
    """e4m3 with a bfloat16 for the gates of a slab, and one for what these let through."""

    is_packed = True
    scales: int = 2

    def place(self, thread: Int32) -> Int32:
        """The offset in a slab that `load` begins at: a thread adds its own."""
        return Int32(0)


@dataclass(frozen=True)
class Bfloat16:
    """Slabs of 64 rows of 128 bytes, swizzled: the i-th 16 bytes of row r lie at i ^ r % 8."""

    is_packed = False
    row_bytes: int = 2 * SLAB

    @property
    def slab_bytes(self) -> int:
        return ROWS_OF_WARPGROUP * self.row_bytes

    def place(self, thread: Int32) -> Int32:
        """The offset in a slab of the first row that a thread names. Lanes name rows of four matrices of 8 x 8 in turn:
        the upper and the lower rows of a warp, then both of the next 8 of k.
        """
        lane = thread % WARP
        row = thread // WARP * 16 + lane % 16
        return row * self.row_bytes + (lane // 16 ^ row % 8) * 16

    def load(self, slab: Int32, thread: Int32) -> tuple:
        """A thread's numbers of a slab, four registers for each 16 of k; slab: an address, of the thread's `place`."""
        return tuple(word for step in range(STEPS) for word in load_matrices(slab ^ step * 32))

    def decode(self, operand: cute.Tensor, loaded: tuple) -> None:
        """operand <- 64 rows by 64 of k."""
        words = cute.make_tensor(cute.recast_ptr(operand.iterator, dtype=Uint32), cute.make_layout(4 * STEPS))
        for i, word in enumerate(loaded):
            words[i] = Uint32(word)


def raw_pairs(word: Uint32) -> list[Uint32]:
    """Eight e2m1 as four pairs of bfloat16, each 2^-126 times its number: a register of a product's operand each.

    The bits s, e e m of e2m1 are those of a bfloat16 at 15, 8, 7 and 6, subnormal numbers among them. In either half of
    the word they lie at (15, 8 7 6), (12, 5 4 3), (14, 2 1 0) and (13, 11 10 9).
    """
    both, sign, rest = Uint32(0x81C081C0), Uint32(0x80008000), Uint32(0x01C001C0)
    return [
        word & both,
        word << Uint32(3) & both,
        word << Uint32(6) & rest | word << Uint32(1) & sign,
        word >> Uint32(3) & rest | word << Uint32(2) & sign,
    ]


FORMATS = {"mxfp4": Mxfp4(), "e4m3": Fp8(), "bfloat16": Bfloat16()}
