"""Index keys in e2m1 as operands of products in bfloat16: `index_fp4` of `kernels.packings`.

A quad of lanes has a key, and a lane of it a group of 32 numbers, which share a scale: 16 bytes, so one load. The order
of dimensions in a product is free if queries have the same: so a lane's numbers lie where a product's operand in
registers wants them, and `reorder_queries` puts those of queries beside them. Of a word's eight numbers, the pairs of i
and i + 4 are what two steps of a product, of 16 dimensions each, take from this lane.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from .ptx import fma_bf16x2, permute_bytes, power_of_two, store_shared_words
from .rows import load
from .wgmma import SLAB

GROUP = 32  # numbers that share a scale
KEY_BYTES = 64  # of a key's numbers; its four scales are a word
WORDS = 4  # of a lane's numbers, eight in each
CHUNK = 16  # bytes, that a swizzle moves
NEGATIVE_ZERO = 0x80008000  # which a sum leaves as it is
NAN = 0x7FC07FC0
GREATEST = 128  # the code of the greatest scale that decodes without another one for the key: 2
LARGE = 0x7F7F7F7F  # added to codes below 128 it carries into the highest bit unless they are 0


@cute.jit
def scales_of(codes: Uint32, lane: Int32) -> tuple[Uint32, Float32]:
    """Returns a lane's factor for raw numbers, as a pair of bf16, and the factor of the key's product.

    A raw number is 2^-126 of what it stands for. So one power of two brings it where it belongs, if the scale is 2 at
    most. A key with a greater one is divided by half of its greatest; then a number below 2^-133 is 0.
    """
    code = codes >> Uint32(lane * 8) & Uint32(0xFF)
    factor, whole = times_two(code + Uint32(126)), Float32(1.0)
    if is_large(codes):
        greatest = Uint32(0)
        for i in cutlass.range_constexpr(4):
            greatest = cutlass.max(greatest, codes >> Uint32(8 * i) & Uint32(0xFF))
        exponent = Int32(code + Uint32(254)) - Int32(greatest)
        factor = times_two(Uint32(cutlass.max(exponent, Int32(0))))
        if code == 255:
            factor = Uint32(NAN)
        whole = power_of_two(Int32(greatest) - 1)
    return factor, whole


def is_large(codes: Uint32) -> Boolean:
    """Tells whether any of four codes is greater than `GREATEST`."""
    return ((codes & Uint32(LARGE)) + Uint32(LARGE)) & codes & Uint32(0x80808080) != 0


def times_two(exponent: Uint32) -> Uint32:
    """A pair of powers of two, by their biased exponent."""
    return exponent * Uint32(0x00800080)


def decoded(word: Uint32, factor: Uint32) -> tuple[Uint32, ...]:
    """Eight numbers as four pairs of bf16: the numbers i and i + 4.

    The bits s, e e, m of e2m1 are those of a bf16 at 15, 8, 7 and 6, subnormal numbers among them: 2^-126 times the
    number. One product moves a pair's bits to either place.
    """
    pairs = []
    for half in (word, word >> Uint32(8)):
        for moved in (0x1040, 0x104):
            nibbles = half & Uint32(0x000F000F if moved == 0x1040 else 0x00F000F0)
            pairs.append(fma_bf16x2(nibbles * Uint32(moved) & Uint32(0x81C081C0), factor, Uint32(NEGATIVE_ZERO)))
    return tuple(pairs)


def load_words(address: Int32) -> tuple[Uint32, ...]:
    """16 bytes of SMEM."""
    words = cute.make_rmem_tensor(WORDS, Uint32)
    place = cute.make_ptr(Uint32, address, cute.AddressSpace.smem, assumed_align=CHUNK)
    cute.autovec_copy(cute.make_tensor(place, cute.make_layout(WORDS)), words)
    return tuple(words[i] for i in range(WORDS))


@cute.jit
def decode_rows(operand: cute.Tensor, keys: cute.Tensor, codes: cute.Tensor, row: Int32, lane: Int32):
    """operand <- the rows `row` and `row` + 8 of keys, bytes (keys, KEY_BYTES), whose scales are words; what the
    products of either are to be multiplied by, float32 (2,).
    """
    pairs = cute.make_tensor(cute.recast_ptr(operand.iterator, dtype=Uint32), cute.make_layout(cute.size(operand) // 2))
    whole = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        key = row + 8 * r
        words = load_words(keys.iterator.toint() + (key * KEY_BYTES + lane * CHUNK))
        factor, whole[r] = scales_of(load(codes.iterator + key), lane)
        for i in cutlass.range_constexpr(WORDS):
            four = decoded(words[i], factor)
            for j in cutlass.range_constexpr(4):
                # of a step's four registers: row, row + 8, then both again eight dimensions on
                pairs[4 * (2 * i + j // 2) + 2 * (j % 2) + r] = four[j]
    return whole


@cute.jit
def reorder_queries(q: cute.Tensor, thread: Int32, threads: cutlass.Constexpr, barrier: cutlass.Constexpr):
    """Queries (rows, D) in slabs, reordered in place by so many threads, four a row, which wait for each other.

    Thread m of a row takes the 8 dimensions from 8 m on of every group, and makes 32 of them that lie side by side.
    """
    rows, at_a_time = cute.size(q, mode=[0]), threads // 4
    m = thread // at_a_time
    for first in cutlass.range_constexpr(0, rows, at_a_time):
        row = first + thread % at_a_time
        begin = q.iterator.toint() + row * (2 * SLAB)
        given = [load_words(place(begin, rows, i // 2, 4 * (i % 2) + m, row)) for i in range(4)]
        cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
        for n in cutlass.range_constexpr(4):
            order = Uint32(0x7632 if n % 2 else 0x5410)
            words = tuple(permute_bytes(x[n // 2], x[2 + n // 2], order) for x in given)
            store_shared_words(place(begin, rows, m // 2, m % 2 * 4 + n, row), words)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)


def place(begin: Int32, rows: int, slab: Int32 | int, chunk: Int32, row: Int32) -> Int32:
    """The address of a chunk of a row of a slab, which the swizzle moves."""
    return begin + slab * (rows * 2 * SLAB) + (chunk ^ row % 8) * CHUNK
