"""How a warp packs an entry: the encoders of `_definitions/packed.py`, bit for bit. A lane's numbers are neighbours."""

import struct

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32

from kernels.lib.fp8_rows import GREATEST, amax, quantized, write_words
from kernels.lib.ptx import clip, power_of_two, round_pair, to_e4m3
from kernels.lib.rows import WARP, store

from .config import DIMS, Config

INFINITY = 0x7F800000  # bits of a float32
MANTISSA = 0x7FFFFF
THREE_QUARTERS = 0x600000  # of the mantissa: 448 is 7/8 of a power of two
LEAST = {"v4_fp8": -13, "v41_fp8": -22}  # exponents of the least scales


@cute.jit
def write_packed(numbers: cute.Tensor, page: cute.Pointer, at: Int32, entries: Int32, c: cutlass.Constexpr[Config]):
    """Writes entry `at` of a page of so many entries."""
    if cutlass.const_expr(c.packing == "index_fp8"):
        write_key(numbers, page, at, entries, c)
    else:
        write_latent(numbers, page, at, entries, c)


@cute.jit
def write_latent(numbers: cute.Tensor, page: cute.Pointer, at: Int32, entries: Int32, c: cutlass.Constexpr[Config]):
    """e4m3 with a scale of ue8m0 for each group; in V4's layout the last numbers are bf16."""
    lane, layout, group = cute.arch.lane_idx(), c.layout, c.layout.group // c.numbers
    entry, scales = page + at * layout.entry, page + (at * layout.entry + layout.values)
    if cutlass.const_expr(layout.separate_scales):
        entry, scales = page + at * layout.values, page + (entries * layout.values + at * layout.scales)
    most = amax(numbers, group)
    finite = most < INFINITY
    (least,) = struct.unpack("<i", struct.pack("<f", GREATEST * 2.0 ** LEAST[c.packing]))
    most = cutlass.max(most if finite else Int32(0), Int32(least))
    exponent = most // (MANTISSA + 1) - 126 - (8 if most % (MANTISSA + 1) > THREE_QUARTERS else 9)
    limit = Float32(GREATEST) if exponent < 120 else Float32(240.0)  # or the greatest would round to 2^128
    factor = power_of_two(127 - exponent)
    for_bf16 = WARP - DIMS // c.numbers if cutlass.const_expr(c.packing == "v4_fp8") else WARP
    words = cute.make_rmem_tensor(c.numbers // 2, Uint32)
    if lane < for_bf16:
        codes = cute.make_rmem_tensor(c.numbers, Float32)
        for j in cutlass.range_constexpr(c.numbers):
            codes[j] = clip(numbers[j] * factor, limit) if finite else Float32(0.0)
        for j in cutlass.range_constexpr(c.numbers // 4):
            words[j] = to_e4m3(*(codes[4 * j + i] for i in range(4)))
        write_words(words, entry + lane * c.numbers, c.numbers // 4)
    else:
        for j in cutlass.range_constexpr(c.numbers // 2):
            words[j] = round_pair(numbers[2 * j], numbers[2 * j + 1], BFloat16)
        write_words(words, entry + (for_bf16 * c.numbers + (lane - for_bf16) * 2 * c.numbers), c.numbers // 2)
    scale = exponent + 127 if finite else Int32(255)
    word = (scale if lane < for_bf16 else Int32(0)) << lane // group % 4 * 8
    for offset in (group, 2 * group):  # the scales of four groups
        word = word | cute.arch.shuffle_sync_bfly(word, offset=offset)
    if lane % (4 * group) == 0:
        words[0] = Uint32(word)
        write_words(words, scales + lane // group, 1)


@cute.jit
def write_key(numbers: cute.Tensor, page: cute.Pointer, at: Int32, entries: Int32, c: cutlass.Constexpr[Config]):
    """e4m3 with a float32 scale."""
    lane, layout = cute.arch.lane_idx(), c.layout
    words, scale = quantized(numbers, WARP)
    write_words(words, page + (at * layout.values + lane * c.numbers), 1)
    if lane == 0:
        place = page + (entries * layout.values + at * layout.scales)
        store(cute.recast_ptr(place.align(4), dtype=Float32), scale)
