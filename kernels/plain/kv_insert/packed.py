"""A warp packs an entry by the encoders of `_definitions/packed.py`, bit for bit. A lane's numbers are neighbours."""

import math
import struct

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint16, Uint32

from kernels.lib.fp8_rows import GREATEST, INFINITY, amax, quantized, write_words
from kernels.lib.ptx import bits_of, clip, float_of, power_of_two, round_pair, to_e4m3
from kernels.lib.rows import WARP, store
from kernels.packings import ROPE

from .config import Config

MANTISSA = 0x7FFFFF  # bits of a float32
GREATEST_OF_E2M1 = 6.0
MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between magnitudes of e2m1; in the middle the even code is next
IN_E2M1 = ("v4_fp4", "index_fp4")
LEAST = {"v4_fp8": -13, "v41_fp8": -22} | dict.fromkeys(IN_E2M1, -126)  # exponents of the least scales
MOST = dict.fromkeys(IN_E2M1, 121)  # of the greatest, if there are such
LEAST_OF_LATENTS = 2.0**-100  # the least amax, where scales are float32
WITH_BF16 = ("v4_fp8", "v4_fp4")  # the last numbers are in bf16


@cute.jit
def write_packed(
    numbers: cute.Tensor,
    after: cute.Tensor | None,
    page: cute.Pointer,
    at: Int32,
    entries: Int32,
    c: cutlass.Constexpr[Config],
):
    """Writes entry `at` of a page of so many entries; after: the numbers of RoPE, if they follow."""
    if cutlass.const_expr(c.packing == "index_fp8"):
        write_key(numbers, page, at, entries, c)
    elif cutlass.const_expr(c.rope):
        write_latent_beside_rope(numbers, after, page, at, c)
    else:
        write_latent(numbers, page, at, entries, c)


@cute.jit
def write_latent(numbers: cute.Tensor, page: cute.Pointer, at: Int32, entries: Int32, c: cutlass.Constexpr[Config]):
    """e4m3 or e2m1 with a scale of ue8m0 for each group; in V4's layouts the last numbers are bf16."""
    lane, layout, group = cute.arch.lane_idx(), c.layout, c.layout.group // c.numbers
    entry, scales = page + at * layout.entry, page + (at * layout.entry + layout.values)
    if cutlass.const_expr(layout.separate_scales):
        entry, scales = page + at * layout.values, page + (entries * layout.values + at * layout.scales)
    most = amax(numbers, group)
    finite = most < INFINITY
    greatest = GREATEST_OF_E2M1 if c.packing in IN_E2M1 else GREATEST
    most = cutlass.max(most if finite else Int32(0), Int32(bits(greatest * 2.0 ** LEAST[c.packing])))
    if cutlass.const_expr(c.packing in MOST):
        most = cutlass.min(most, Int32(bits(greatest * 2.0 ** MOST[c.packing])))
    power = math.frexp(greatest)[1]
    above = most % (MANTISSA + 1) > bits(greatest) % (MANTISSA + 1)
    exponent = most // (MANTISSA + 1) - 126 - (power - 1 if above else power)
    limit = Float32(greatest) if exponent < 120 else Float32(240.0)  # or the greatest would round to 2^128
    factor = power_of_two(127 - exponent)
    for_bf16 = WARP - ROPE // c.numbers if cutlass.const_expr(c.packing in WITH_BF16) else WARP
    words = cute.make_rmem_tensor(c.numbers // 2, Uint32)
    a_word = 8 if c.packing in IN_E2M1 else 4
    code_words = c.numbers // a_word  # 0 where two lanes' codes are a word
    if lane < for_bf16:
        codes = cute.make_rmem_tensor(c.numbers, Float32)
        for j in cutlass.range_constexpr(c.numbers):
            codes[j] = clip(numbers[j] * factor, limit) if finite else Float32(0.0)
        for j in cutlass.range_constexpr(code_words):
            words[j] = codes_of([codes[a_word * j + i] for i in range(a_word)], a_word)
        if cutlass.const_expr(code_words > 0):
            write_words(words, entry + lane * (4 * code_words), code_words)
        else:
            half = codes_of([codes[i] for i in range(c.numbers)], a_word)
            store(cute.recast_ptr((entry + lane * 2).align(2), dtype=Uint16), Uint16(half))
    else:
        for j in cutlass.range_constexpr(c.numbers // 2):
            words[j] = round_pair(numbers[2 * j], numbers[2 * j + 1], BFloat16)
        first = for_bf16 * (4 * code_words) + (layout.scales if layout.after else 0)
        write_words(words, entry + (first + (lane - for_bf16) * 2 * c.numbers), c.numbers // 2)
    scale = exponent + 127 if finite else Int32(255)
    word = (scale if lane < for_bf16 else Int32(0)) << lane // group % 4 * 8
    for offset in (group, 2 * group):  # the scales of four groups
        word = word | cute.arch.shuffle_sync_bfly(word, offset=offset)
    if lane % (4 * group) == 0:
        words[0] = Uint32(word)
        write_words(words, scales + lane // group, 1)


def bits(x: float) -> int:
    """Returns the bits of a float32, as a signed integer."""
    return int(struct.unpack("<i", struct.pack("<f", x))[0])


def codes_of(numbers: list[Float32], a_word: int) -> Uint32:
    """e4m3 where a word has four codes, else e2m1, which comparisons find; the first code is in the lowest bits."""
    if a_word == 4:
        return to_e4m3(*numbers)
    word = Uint32(0)
    for i, x in enumerate(numbers):
        size, code = float_of(bits_of(x) & 0x7FFFFFFF), Uint32(bits_of(x)) >> 31 << 3
        for below, middle in enumerate(MIDDLES):
            code = code + Uint32(size >= middle if below % 2 else size > middle)
        word = word | code << (4 * i)
    return word


@cute.jit
def write_latent_beside_rope(
    numbers: cute.Tensor, after: cute.Tensor, page: cute.Pointer, at: Int32, c: cutlass.Constexpr[Config]
):
    """e4m3 with a float32 scale for each group, and RoPE's numbers in bf16 after the scales."""
    lane, layout, group = cute.arch.lane_idx(), c.layout, c.layout.group // c.numbers
    entry = page + at * layout.entry
    words, scale = quantized(numbers, group, LEAST_OF_LATENTS, True)
    write_words(words, entry + lane * c.numbers, c.numbers // 4)
    if lane % group == 0:
        store(cute.recast_ptr((entry + (layout.values + lane // group * 4)).align(4), dtype=Float32), scale)
    words[0] = round_pair(after[0], after[1], BFloat16)
    write_words(words, entry + (layout.values + layout.scales + lane * 4), 1)


@cute.jit
def write_key(numbers: cute.Tensor, page: cute.Pointer, at: Int32, entries: Int32, c: cutlass.Constexpr[Config]):
    """e4m3 with a float32 scale."""
    lane, layout = cute.arch.lane_idx(), c.layout
    words, scale = quantized(numbers, WARP)
    write_words(words, page + (at * layout.values + lane * c.numbers), 1)
    if lane == 0:
        place = page + (entries * layout.values + at * layout.scales)
        store(cute.recast_ptr(place.align(4), dtype=Float32), scale)
