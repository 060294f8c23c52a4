"""Matrices in FP8 as operands of products in bfloat16: each thread's numbers lie where its registers want them.

A matrix [n, k] is packed once (`_definitions/slabs.py`), into tiles of 64 rows and slabs of 64 of k. A slab has 32
bytes of codes for each thread of a warpgroup, the first 16 of each thread before the last 16, and then its scales.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Uint32

from .launch import WARPGROUP
from .ptx import load_shared_word, load_shared_words, multiply_by_half

STEPS = 4  # of a product, of 16 dimensions, in a slab


@dataclass(frozen=True)
class E4m3:
    """e4m3 with a bfloat16 for a slab, or one for either 8 of 16 rows: gates, and what these let through."""

    scales: int = 1
    code_bytes: int = 32  # of a slab, for each thread
    scale_bytes: int = 16  # of a slab: two bfloat16, of either 8 rows, again and again

    @property
    def slab_bytes(self) -> int:
        return WARPGROUP * self.code_bytes + self.scale_bytes

    def load(self, slab: Int32, thread: Int32) -> tuple:
        """A thread's codes of a slab, and the scales; slab: an address in shared memory."""
        first, last = (load_shared_words(slab + thread * 16 + half * WARPGROUP * 16) for half in range(2))
        return (*first, *last), load_shared_word(slab + WARPGROUP * self.code_bytes)

    def decode(self, operand: cute.Tensor, loaded: tuple) -> None:
        """operand <- 64 rows by 64 of k, in bfloat16."""
        codes, scales = loaded
        pairs = cute.make_tensor(cute.recast_ptr(operand.iterator, dtype=Uint32), cute.make_layout(4 * STEPS))
        for i, word in enumerate(codes):
            for j, raw in enumerate(raw_pairs(word)):
                pairs[2 * i + j] = multiply_by_half(raw, scales, j % self.scales)


def raw_pairs(word: Uint32) -> list[Uint32]:
    """Four e4m3 as two pairs of bfloat16, each 2^-120 times its number: a register of a product's operand each.

    The bits s, e e e e and m m m of e4m3 are those of a bfloat16 at 15, 10 to 7, and 6 to 4, subnormal numbers among
    them. In either half of the word they lie at (15, 10 to 4), and at (11, 14 to 12 and 3 to 0).
    """
    return [word & Uint32(0x87F087F0), word << Uint32(4) & Uint32(0x80F080F0) | word >> Uint32(4) & Uint32(0x07000700)]
