"""Keys as products of e4m3 take them: from the bytes of a cache, or from bfloat16, to codes in one unit of a sequence.

    key_codes         codes[b, i] = e4m3(x / u)      x: entry slots[b, i] of the pool, as its layout means it
    key_codes_again   the same, where u was not the unit of all keys

The unit is a power of two of the greatest finite |x| of a sequence, which nobody knows before all keys are read. So a
CTA of `key_codes` takes the greatest so far: `top[b]`, which it raises to that of its own keys. It says what it took.
Where that is not the unit in the end, mostly of CTAs that began before others, `key_codes_again` makes its codes anew.

A key is read once, as it is packed, and written once, in 512 bytes. With `rope` the last 64 of x / u follow in
bfloat16, which has them exactly: 128 bytes more. Both kernels are bound by memory. A warp has a few keys, whose loads
are under way together, and a lane 16 neighbouring numbers of each. A key in a slot below 0 is neither read nor written.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from kernels.abi import KeyCodes
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
from kernels.lib.rows import WARP, ceil_div, divide, load, store

D = 512
ROPE = 64  # the last of them
NUMBERS = D // WARP  # of a key, that a lane has
INFINITY = 0x7F800000  # bits of a float32
NAN = 0x7FC00000
TOP = 7  # log2 of the least that the greatest number is in its unit
LEAST_EXPONENT = -119  # of a greatest number, so that all units are numbers
FIRST_BYTE = 0x0404  # makes the bytes 0, code, 0, code of a word's lowest one


@dataclass(frozen=True)
class Config:
    dtype: str  # of keys that are not packed
    packing: str  # of `packed.FORMATS`; "" where they are not
    is_again: bool
    rope: bool
    threads: int = 256
    tile_n: int = 4  # keys of a warp

    @property
    def warps(self) -> int:
        return self.threads // WARP

    @property
    def smem_bytes(self) -> int:
        """A number of each warp, and one of all."""
        return 0 if self.is_again else 4 * (self.warps + 1)

    @property
    def tile_m(self) -> int:
        """Keys of a CTA."""
        return self.warps * self.tile_n

    @property
    def row_bytes(self) -> int:
        """The bytes that are made of a key."""
        return D + 2 * ROPE * self.rope

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
    top: cute.Pointer  # int32 [b]: bits of the greatest |x| so far
    taken: cute.Pointer  # int32 [b, CTAs of a sequence]: what each found there, or had itself
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
        top: cute.Pointer,
        taken: cute.Pointer,
        codes: cute.Pointer,
        b: Int32,
        n: Int32,
        page: Int32,
        page_bytes: Int32,
        stream: cuda.CUstream,
    ):
        ctas = b * ceil_div(n, Int32(self.config.tile_m))
        self.launch(Arrays(keys, slots, top, taken, codes), Extents(b, n, page, page_bytes), ctas=ctas, stream=stream)

    @cute.kernel
    def kernel(self, arrays: Arrays, n: Extents):
        c, lane = self.config, cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP)
        cta = cute.arch.block_idx()[0]
        sequence, part = divide(cta, ceil_div(n.n, Int32(c.tile_m)))
        first, taken = part * c.tile_m + warp * c.tile_n, arrays.taken + cta
        if cutlass.const_expr(c.is_again):
            top = load(arrays.top + sequence)
            if exponent_of(load(taken)) != exponent_of(top):
                slots, numbers = self.slots_and_numbers(arrays, n, sequence, first, lane)
                self.write(arrays, n, sequence, first, slots, numbers, top, lane)
        else:
            slots, numbers = self.slots_and_numbers(arrays, n, sequence, first, lane)
            most = Int32(0)
            for i in cutlass.range_constexpr(c.tile_n):
                for j in cutlass.range_constexpr(NUMBERS):
                    size = bits_of(numbers[j, i]) & 0x7FFFFFFF
                    most = cutlass.max(most, size if size < INFINITY else Int32(0))
            tops = SmemAllocator().allocate_tensor(Int32, cute.make_layout(c.warps + 1), 4)
            tops[warp] = Int32(warp_max_u32(Uint32(most)))
            cute.arch.sync_threads()
            if warp == 0:
                most = Int32(warp_max_u32(Uint32(tops[lane % c.warps])))
                if lane == 0:
                    most = cutlass.max(most, cute.arch.atomic_max(arrays.top + sequence, most))
                    tops[c.warps] = most
                    store(taken, most)
            cute.arch.sync_threads()
            self.write(arrays, n, sequence, first, slots, numbers, tops[c.warps], lane)

    def slots_and_numbers(self, arrays: Arrays, n: Extents, sequence: Int32, first: Int32, lane: Int32) -> tuple:
        """Where a warp's keys are, -1 for none, and a lane's numbers of each."""
        slots = cute.make_rmem_tensor(self.config.tile_n, Int32)
        numbers = cute.make_rmem_tensor((NUMBERS, self.config.tile_n), Float32)
        self.read_slots(slots, arrays, n, sequence, first)
        self.read(numbers, arrays, n, slots, lane)
        return slots, numbers

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
        top: Int32,
        lane: Int32,
    ):
        """Codes of a warp's keys in the unit of this top."""
        inverse = power_of_two(2 * 127 + TOP - exponent_of(top))
        for i in cutlass.range_constexpr(self.config.tile_n):
            words = cute.make_rmem_tensor(NUMBERS // 4, Uint32)
            for j in cutlass.range_constexpr(NUMBERS // 4):
                words[j] = to_e4m3(*(finite(numbers[4 * j + k, i]) * inverse for k in range(4)))
            if slots[i] >= 0:
                row = arrays.codes + (Int64(sequence) * n.n + first + i) * self.config.row_bytes
                write_words(words, row + lane * NUMBERS, NUMBERS // 4)
                if cutlass.const_expr(self.config.rope):
                    write_rope(numbers[None, i], inverse, row + D, lane)

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
        return *pointers("bfloat16", "bytes", "int32", "int32", "int32", "bytes"), *[i32()] * 4


def exponent_of(top: Int32) -> Int32:
    """The biased exponent of the greatest number, as the unit has it."""
    return cutlass.max(top >> 23, Int32(127 + LEAST_EXPONENT))


@cute.jit
def finite(x: Float32) -> Float32:
    """x, or NaN if it is infinite."""
    return x if bits_of(x) & 0x7FFFFFFF < INFINITY else float_of(Int32(NAN))


@cute.jit
def write_rope(numbers: cute.Tensor, inverse: Float32, place: cute.Pointer, lane: Int32):
    """RoPE's numbers of a key, by the last lanes."""
    before = lane - (D - ROPE) // NUMBERS
    if before >= 0:
        words = cute.make_rmem_tensor(NUMBERS // 2, Uint32)
        for j in cutlass.range_constexpr(NUMBERS // 2):
            words[j] = round_pair(*(finite(numbers[2 * j + k]) * inverse for k in range(2)), BFloat16)
        write_words(words, place + before * (2 * NUMBERS), NUMBERS // 2)


def as_numbers(numbers: cute.Tensor, words: cute.Tensor) -> None:
    """Of pairs of bfloat16."""
    for j in range(NUMBERS // 2):
        numbers[2 * j] = float_of(Int32(words[j] << Uint32(16)))
        numbers[2 * j + 1] = float_of(Int32(words[j] & Uint32(0xFFFF0000)))


def read_words(words: cute.Tensor, source: cute.Pointer, count: int) -> None:
    """The first so many words of a lane, 16 bytes at a time."""
    aligned = cute.recast_ptr(source.align(min(4 * count, 16)), dtype=Uint32)
    place = cute.make_tensor(aligned, cute.make_layout(count))
    cute.autovec_copy(place, cute.make_tensor(words.iterator, cute.make_layout(count)))


def compile(variant: KeyCodes, out_dir: Path) -> Compiled:
    config = Config(variant.dtype, variant.packing, variant.op == "key_codes_again", variant.rope)
    return KeyCodesKernel(config).compile(variant, out_dir)
