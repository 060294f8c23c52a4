"""Packed matrices as operands of products in bfloat16: each thread's numbers lie where its registers want them.

A matrix [n, k] is packed once (`_definitions/experts.py`), into tiles of 64 rows and slabs of 64 of k. A slab's codes
come first: 16 bytes for each thread of a warpgroup, a word for each 16 of k. The scales of its rows follow.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Uint32

from kernels.lib.launch import WARPGROUP
from kernels.lib.ptx import load_shared_word, load_shared_words, multiply_by_half, permute_bytes

STEPS = 4  # of a product, of 16 dimensions, in a slab


@dataclass(frozen=True)
class Format:
    """MXFP4: e2m1 with a power of two for 32 numbers of a row."""

    code_bytes: int = 16  # of a slab, for each thread
    scale_bytes: int = 4  # of a slab, for each two rows

    @property
    def slab_bytes(self) -> int:
        return WARPGROUP * (self.code_bytes + self.scale_bytes // 4)

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


FORMATS = {"mxfp4": Format()}
