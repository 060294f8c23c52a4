"""Keys as products of e4m3 take them: from the bytes of a cache, or from bfloat16, to codes, each in a unit of its own.

    codes[b, i] = e4m3(x / u), u     x: entry slots[b, i] of the pool, as its layout means it

The unit u of a key is a power of two by which its greatest finite |x| is between 128 and 256, or the nearest to that
from 2^-64 to 2^48: so the logs of the units that a row of scores meets are not so far apart that float32 loses a sum.

A key is read once, as it is packed, and written once: 512 bytes, with `rope` the last 64 of x / u in bfloat16, which
has them exactly, 128 bytes more, and its unit, in bfloat16 and 16 bytes. The kernel is bound by memory. A warp has a
few keys, whose loads are under way together, and a lane 16 neighbouring numbers of each. A key in a slot below 0 is
neither read nor written.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32

from kernels.abi import UNIT_BYTES, KeyCodes
from kernels.aot import Compiled
from kernels.lib.fp8_rows import write_words
from kernels.lib.launch import Kernel, i32, pointers
from kernels.lib.packed import FORMATS, MIDDLE_IN_BF16, Format, half_and_middle, unpacked
from kernels.lib.ptx import (
    bits_of,
    float_of,
    power_of_two,
    round_pair,
    scale_of_e4m3,
    scale_of_ue8m0,
    to_e4m3,
    warp_max_u32,
)
from kernels.lib.rows import WARP, ceil_div, divide, load
from kernels.packings import ROPE

D = 512
NUMBERS = D // WARP  # of a key, that a lane has
INFINITY = 0x7F800000  # bits of a float32
NAN = 0x7FC00000
TOP = 7  # log2 of the least that the greatest number is in its unit
LEAST_UNIT, GREATEST_UNIT = -64, 48  # as exponents
GREATEST = 127 + GREATEST_UNIT + 8 << 23 | 0x600000  # bits of 448 such units
FIRST_BYTE = 0x0404  # makes the bytes 0, code, 0, code of a word's lowest one


@dataclass(frozen=True)
class Config:
    dtype: str  # of keys that are not packed
    packing: str  # of `packed.FORMATS`; "" where they are not
    rope: bool
    threads: int = 256
    tile_n: int = 2  # keys of a warp
    smem_bytes: int = 0

    @property
    def tile_m(self) -> int:
        """Keys of a CTA."""
        return self.threads // WARP * self.tile_n

    @property
    def unit(self) -> int:
        """The byte at which a key's unit begins in what is made of the key."""
        return D + 2 * ROPE * self.rope

    @property
    def row_bytes(self) -> int:
        """The bytes that are made of a key."""
        return self.unit + UNIT_BYTES

    @property
    def form(self) -> Format | None:
        return FORMATS[self.packing] if self.packing else None

    @property
    def code_words(self) -> int:
        """Words of a lane's 16 numbers, where they are packed."""
        return NUMBERS * self.form.bits // 32 if self.form else 0

    @property
    def packed_lanes(self) -> int:
        """Those whose numbers are packed; the others' are bfloat16."""
        return self.form.slabs * 64 // NUMBERS if self.form else 0

    @property
    def launch_options(self) -> dict[str, int]:
        return {}


class Arrays(NamedTuple):
    keys: cute.Pointer  # bytes: bfloat16 [rows, D], or pages
    slots: cute.Pointer  # int32 [b, n]
    codes: cute.Pointer  # bytes [b, n, row_bytes]


class Extents(NamedTuple):
    b: Int32
    n: Int32  # keys of a sequence
    page: Int32  # entries
    page_bytes: Int32


class KeyCodesKernel(Kernel):
    symbol = "key_codes"

    @cute.jit
    def __call__(
        self,
        keys: cute.Pointer,
        slots: cute.Pointer,
        codes: cute.Pointer,
        b: Int32,
        n: Int32,
        page: Int32,
        page_bytes: Int32,
        stream: cuda.CUstream,
    ):
        ctas = b * ceil_div(n, Int32(self.config.tile_m))
        self.launch(Arrays(keys, slots, codes), Extents(b, n, page, page_bytes), ctas=ctas, stream=stream)

    @cute.kernel
    def kernel(self, arrays: Arrays, n: Extents):
        c, lane = self.config, cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP)
        sequence, part = divide(cute.arch.block_idx()[0], ceil_div(n.n, Int32(c.tile_m)))
        first = part * c.tile_m + warp * c.tile_n
        slots = cute.make_rmem_tensor(c.tile_n, Int32)
        numbers = cute.make_rmem_tensor((NUMBERS, c.tile_n), Float32)
        self.read_slots(slots, arrays, n, sequence, first)
        self.read(numbers, arrays, n, slots, lane)
        self.write(arrays, n, sequence, first, slots, numbers, lane)

    @cute.jit
    def read_slots(self, slots: cute.Tensor, arrays: Arrays, n: Extents, sequence: Int32, first: Int32):
        for i in cutlass.range_constexpr(self.config.tile_n):
            slots[i] = Int32(-1)
            if first + i < n.n:
                slots[i] = load(arrays.slots + (Int64(sequence) * n.n + first + i))

    @cute.jit
    def write(
        self,
        arrays: Arrays,
        n: Extents,
        sequence: Int32,
        first: Int32,
        slots: cute.Tensor,
        numbers: cute.Tensor,
        lane: Int32,
    ):
        """Writes what is made of a warp's keys: codes, with `rope` some numbers in bfloat16, and a unit for each."""
        c = self.config
        exponents = cute.make_rmem_tensor(c.tile_n, Int32)
        for i in cutlass.range_constexpr(c.tile_n):
            exponents[i] = exponent_of(numbers[None, i])
        for i in cutlass.range_constexpr(c.tile_n):
            inverse = power_of_two(2 * 127 + TOP - exponents[i])
            words = cute.make_rmem_tensor(NUMBERS // 4, Uint32)
            for j in cutlass.range_constexpr(NUMBERS // 4):
                words[j] = to_e4m3(*(up_to(numbers[4 * j + k, i], GREATEST) * inverse for k in range(4)))
            if slots[i] >= 0:
                row = arrays.codes + (Int64(sequence) * n.n + first + i) * c.row_bytes
                write_words(words, row + lane * NUMBERS, NUMBERS // 4)
                if cutlass.const_expr(c.rope):
                    write_rope(numbers[None, i], inverse, row + D, lane)
                if lane == 0:
                    unit = cute.make_rmem_tensor(UNIT_BYTES // 4, Uint32)
                    unit.fill(0)
                    unit[0] = Uint32((exponents[i] - TOP) << 7)  # of bfloat16
                    write_words(unit, row + c.unit, UNIT_BYTES // 4)

    @cute.jit
    def read(self, numbers: cute.Tensor, arrays: Arrays, n: Extents, slots: cute.Tensor, lane: Int32):
        """A lane's numbers of each key, 0 where it has no slot. All loads stand before what is made of them."""
        c = self.config
        words = cute.make_rmem_tensor((8, c.tile_n), Uint32)
        scales = cute.make_rmem_tensor(c.tile_n, Uint32)
        words.fill(0)
        scales.fill(0)
        for i in cutlass.range_constexpr(c.tile_n):
            if slots[i] >= 0:
                self.read_words(words[None, i], scales, i, arrays.keys, n, slots[i], lane)
        for i in cutlass.range_constexpr(c.tile_n):
            if cutlass.const_expr(c.packed_lanes == 0):
                as_numbers(numbers[None, i], words[None, i])
            elif cutlass.const_expr(c.packed_lanes == WARP):
                self.unpack(words[None, i], scales[i])
                as_numbers(numbers[None, i], words[None, i])
            else:
                if lane < c.packed_lanes:
                    self.unpack(words[None, i], scales[i])
                as_numbers(numbers[None, i], words[None, i])

    @cute.jit
    def read_words(
        self,
        words: cute.Tensor,
        scales: cute.Tensor,
        key: cutlass.Constexpr,
        keys: cute.Pointer,
        n: Extents,
        slot: Int32,
        lane: Int32,
    ):
        c = self.config
        if cutlass.const_expr(c.packed_lanes == 0):
            read_words(words, keys + (Int64(slot) * (2 * D) + lane * (2 * NUMBERS)), 8)
        else:
            packing = c.form.packing
            page, at = divide(slot, n.page)
            begin = keys + Int64(page) * n.page_bytes
            entry, to_scales = begin + at * packing.entry, begin + (at * packing.entry + packing.values)
            if cutlass.const_expr(packing.separate_scales):
                entry = begin + at * packing.values
                to_scales = begin + (n.page * packing.values + at * packing.scales)
            if lane < c.packed_lanes:
                read_words(words, entry + lane * (4 * c.code_words), c.code_words)
                byte = lane * NUMBERS // packing.group
                word = load(cute.recast_ptr((to_scales + byte // 4 * 4).align(4), dtype=Uint32))
                scales[key] = word >> Uint32(byte % 4 * 8) & Uint32(0xFF)
            else:
                after = c.packed_lanes * 4 * c.code_words + (packing.scales if packing.after else 0)
                read_words(words, entry + (after + (lane - c.packed_lanes) * (2 * NUMBERS)), 8)

    @cute.jit
    def unpack(self, words: cute.Tensor, scale: Uint32):
        """A lane's codes become pairs of bfloat16."""
        c = self.config
        given = tuple(words[i] for i in range(c.code_words))
        if cutlass.const_expr(c.form.scales == "e4m3"):
            factor = scale_of_e4m3(scale, MIDDLE_IN_BF16)
        elif cutlass.const_expr(c.form.bits == 4):
            factor = half_and_middle(scale_of_ue8m0(scale, Uint32(FIRST_BYTE)))
        else:
            factor = (scale_of_ue8m0(scale, Uint32(FIRST_BYTE)),)
        pairs = [pair for chunk in unpacked(c.form, given, factor) for pair in chunk]
        for i in cutlass.range_constexpr(NUMBERS // 2):
            words[i] = pairs[i]

    def examples(self, variant: KeyCodes) -> tuple:
        return *pointers("bfloat16", "bytes", "int32", "bytes"), *[i32()] * 4


@cute.jit
def exponent_of(numbers: cute.Tensor) -> Int32:
    """The biased exponent of a key's greatest finite number, of which a lane has some, as its unit has it."""
    most = Int32(0)
    for j in cutlass.range_constexpr(NUMBERS):
        size = bits_of(numbers[j]) & 0x7FFFFFFF
        most = cutlass.max(most, size if size < INFINITY else Int32(0))
    exponent = Int32(warp_max_u32(Uint32(most))) >> 23
    return cutlass.min(cutlass.max(exponent, Int32(127 + TOP + LEAST_UNIT)), Int32(127 + TOP + GREATEST_UNIT))


@cute.jit
def up_to(x: Float32, limit: cutlass.Constexpr) -> Float32:
    """x, or NaN if its size has greater bits than this."""
    return x if bits_of(x) & 0x7FFFFFFF <= limit else float_of(Int32(NAN))


@cute.jit
def write_rope(numbers: cute.Tensor, inverse: Float32, place: cute.Pointer, lane: Int32):
    """RoPE's numbers of a key, by the last lanes."""
    before = lane - (D - ROPE) // NUMBERS
    if before >= 0:
        words = cute.make_rmem_tensor(NUMBERS // 2, Uint32)
        for j in cutlass.range_constexpr(NUMBERS // 2):
            words[j] = round_pair(*(up_to(numbers[2 * j + k], INFINITY - 1) * inverse for k in range(2)), BFloat16)
        write_words(words, place + before * (2 * NUMBERS), NUMBERS // 2)


def as_numbers(numbers: cute.Tensor, words: cute.Tensor) -> None:
    """Takes pairs of bfloat16 apart, into float32 numbers."""
    for j in range(NUMBERS // 2):
        numbers[2 * j] = float_of(Int32(words[j] << Uint32(16)))
        numbers[2 * j + 1] = float_of(Int32(words[j] & Uint32(0xFFFF0000)))


def read_words(words: cute.Tensor, source: cute.Pointer, count: int) -> None:
    """The first so many words of a lane, 16 bytes at a time."""
    aligned = cute.recast_ptr(source.align(min(4 * count, 16)), dtype=Uint32)
    place = cute.make_tensor(aligned, cute.make_layout(count))
    cute.autovec_copy(place, cute.make_tensor(words.iterator, cute.make_layout(count)))


def compile(variant: KeyCodes, out_dir: Path) -> Compiled:
    return KeyCodesKernel(Config(variant.dtype, variant.packing, variant.rope)).compile(variant, out_dir)
