"""Selected keys that are kept packed, in pages of a pool: fetched into registers, and unpacked into a key tile.

How an entry is packed is a `Format`; `kernels.packings` says where its bytes are. Numbers of 8 bits are e4m3, numbers
of 4 are e2m1. Numbers that share a scale are a group. A scale is float32, or a byte: ue8m0,
2^(byte - 127), of which 255 is NaN; or e4m3. Scales of e2m1 are at most 2^121.

Four or eight lanes have a key. A lane has a part of each slab, sixteen or eight numbers, which become 16-byte chunks of
a row of the slab. Slabs of bf16 are copied. The scales of a half of the slabs come with it.
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernels.packings import PACKED, Packing

from .cluster import Peer
from .ptx import (
    e4m3_times_float32,
    e4m3_to_bf16,
    fma_bf16x2,
    load_words_unless,
    permute_bytes,
    prefetch_unless,
    scale_of_e4m3,
    scale_of_ue8m0,
    store_shared_words,
)
from .rows import RowTile, ceil_div
from .selections import CHUNK, Selection
from .wgmma import SLAB

WORD, UNIT = 4, 16  # bytes; entries begin at multiples of a unit
LINE = 128  # bytes, of L2
ABSENT = 0xFFFFFFFF  # units that no pool has
HALF_IN_BF16, MINUS_96_IN_BF16 = 0x3F00, 0xC2C0
MIDDLE_IN_BF16 = 0x4340  # 192; the byte 0x40 + n in place of its lower one makes it 192 + n
POSITIVE = (0x43424140, 0x4C484644)  # 0x40 + n where n is twice the magnitude 0, 0.5, 1, 1.5, 2, 3, 4, 6 of e2m1
NEGATIVE = (0x3D3E3F40, 0x34383A3C)  # 0x40 - n


@dataclass(frozen=True)
class Format:
    """The packing of an entry, as a lane sees it that has a part of each slab."""

    packing: Packing
    bits: int  # of a number
    slabs: int  # that are packed; those after them are bf16
    scales: str = "ue8m0"
    lanes: int = 4  # that have a key
    late: bool = False  # slabs of bf16 are loaded only when they are unpacked, where registers are short

    @property
    def slab_bytes(self) -> int:
        return SLAB * self.bits // 8

    @property
    def part_bytes(self) -> int:
        return self.slab_bytes // self.lanes

    @property
    def part_words(self) -> int:
        return self.part_bytes // WORD

    @property
    def group(self) -> int:
        """Numbers that share a scale."""
        return self.packing.group

    @property
    def scales_a_slab(self) -> int:
        """Bytes; of float32 on average, where slabs share one."""
        return SLAB * (4 if self.scales == "float32" else 1) // self.group

    def scale_words(self, slabs: range) -> int:
        """Words that hold the scales of so many slabs."""
        return len(slabs) * self.scales_a_slab // WORD

    def pieces(self, slabs: range) -> list[tuple[int, int]]:
        """(slab, which of a lane's): what it has of a packed slab is in one piece, of bf16 in chunks."""
        return [(slab, i) for slab in slabs for i in range(1 if slab < self.slabs else self.chunks)]

    def pieces_ahead(self, slabs: range) -> list[tuple[int, int]]:
        """Those that are loaded before their place is free."""
        return [(slab, i) for slab, i in self.pieces(slabs) if slab < self.slabs or not self.late]

    @property
    def chunks(self) -> int:
        """The number of 16-byte chunks that a lane has of a row of a slab."""
        return SLAB // CHUNK // self.lanes

    def piece_words(self, slab: int) -> int:
        return self.part_words if slab < self.slabs else 4

    def loads(self, slabs: range) -> list[int]:
        """Words of each load that brings a lane so many slabs: their scales, then the pieces that are held."""
        return [self.scale_words(slabs), *(self.piece_words(slab) for slab, _ in self.pieces_ahead(slabs))]

    def slots(self, slabs: range) -> list[int]:
        """Returns where each load begins among the lane's words: wide ones come first. They want aligned registers, and
        formats that share registers then want the same ones aligned."""
        loads = self.loads(slabs)
        order = sorted(range(len(loads)), key=lambda i: -loads[i])
        first = accumulate((loads[i] for i in order), initial=0)
        return [at for _, at in sorted(zip(order, first, strict=False))]

    def words(self, slabs: range) -> int:
        """Counts the words that a lane holds of so many slabs."""
        return sum(self.loads(slabs))

    def offset(self, slab: int, chunk: int) -> int:
        """Returns the bytes from the beginning of an entry to the first lane's piece."""
        before = slab * self.slab_bytes + chunk * self.lanes * 16
        return before + self.packing.scales if slab >= self.slabs and self.packing.after else before


FORMATS = {
    "v4_fp8": Format(PACKED["v4_fp8"], bits=8, slabs=7),
    "v4_fp4": Format(PACKED["v4_fp4"], bits=4, slabs=7),
    "v41_fp8": Format(PACKED["v41_fp8"], bits=8, slabs=8),
    "v41_fp4": Format(PACKED["v41_fp4"], bits=4, slabs=8, scales="e4m3"),
    "v32_fp8": Format(PACKED["v32_fp8"], bits=8, slabs=8, scales="float32"),
}


class PackedOperands(NamedTuple):
    """As SelectionOperands, of a pool. Index i is entry i % page of page i // page."""

    keys: cute.Pointer  # bytes
    indices: cute.Pointer
    length: cute.Pointer
    s_kv: Int32  # of all pages
    page: Int32  # entries
    topk: Int32

    def of_query(self, tile: RowTile, tile_n: int, d: int, skipped: Int32, length: Int32) -> "PackedSelection":
        indices = tile.at_query(self.indices, tile.first_query, self.topk) + skipped
        return PackedSelection(self, tile_n, d, self.keys, indices, skipped, length)


def packed_operands(kind: str, lanes: int, late: bool = False) -> type:
    """PackedOperands that know their format, of which so many lanes have a key."""
    form = replace(FORMATS[kind], lanes=lanes, late=late and FORMATS[kind].bits == 8)
    return type(kind, (PackedOperands,), {"__slots__": (), "format": form})


@dataclass(frozen=True)
class Places:
    """A thread's view of the keys that it copies of one tile."""

    units: cute.Tensor  # uint32 [keys]: where an entry begins in the pool, by `UNIT`; ABSENT where the key is
    scales: cute.Tensor | None  # int32 [keys]: from there to the entry's scales, in bytes, where these are separate

    @staticmethod
    def of(keys: int, with_scales: bool = True) -> "Places":
        """Without a place for the way to scales, it is computed anew: registers may be dearer than a division."""
        units = cute.make_rmem_tensor((keys,), Uint32)
        return Places(units, cute.make_rmem_tensor((keys,), Int32) if with_scales else None)


@dataclass(frozen=True)
class Held:
    """Registers for what a thread has of some slabs, in any of these formats: of a key the scales, then the pieces."""

    words: cute.Tensor  # uint32 [word, key]

    @staticmethod
    def of(formats: tuple[Format, ...], halves: list[range], keys: int) -> "Held":
        """For the largest of these halves of the slabs."""
        words = max(x.words(slabs) for x in formats for slabs in halves)
        return Held(cute.make_rmem_tensor((words, keys), Uint32))

    def put(self, key: int, first: int, words: tuple[Uint32, ...]) -> None:
        for i, word in enumerate(words):
            self.words[first + i, key] = word

    def get(self, key: int, first: int, count: int) -> tuple[Uint32, ...]:
        return tuple(self.words[first + i, key] for i in range(count))


@dataclass(frozen=True)
class PackedSelection(Selection):
    """The selected keys of one query. Neighbouring quads of lanes copy neighbouring keys."""

    @property
    def format(self) -> Format:
        return self.operands.format

    @property
    def lanes_a_key(self) -> int:
        return self.format.lanes

    @cute.jit
    def locate(self, t: Int32, places: Places, wanted: cute.Tensor, thread: Int32, threads: cutlass.Constexpr):
        """places <- those of the keys of tile t, whose indices were prefetched. Nothing is read of an absent one."""
        packing, n = self.format.packing, self.operands.page
        step = packing.values if packing.separate_scales else packing.entry
        page_units = self.page_bytes // UNIT
        for i in cutlass.range_constexpr(cute.size(wanted)):
            here = self.is_present(self.position(t, i, thread, threads), wanted[i])
            index = wanted[i] if here else Int32(0)
            entry, page = index % n, index // n
            units = Uint32(page) * Uint32(page_units) + Uint32(entry * (step // UNIT))
            places.units[i] = units if here else Uint32(ABSENT)
            if cutlass.const_expr(packing.separate_scales and places.scales is not None):
                places.scales[i] = self.from_entry_to_scales(entry)

    @property
    def page_bytes(self) -> Int32:
        packing = self.format.packing
        return ceil_div(self.operands.page * packing.entry, Int32(packing.multiple)) * packing.multiple

    def from_entry_to_scales(self, entry: Int32) -> Int32:
        """Bytes, from an entry of a page to its scales, which are separate."""
        packing = self.format.packing
        return self.operands.page * packing.values + entry * (packing.scales - packing.values)

    def entry_at(self, places: Places, key: int) -> Int64:
        return self.keys.toint() + Int64(places.units[key]) * UNIT

    def scales_at(self, places: Places, key: int, slab: int) -> Int64:
        """Returns the address at which the scales of a slab begin."""
        form, packing = self.format, self.format.packing
        to_scales: Any = packing.values
        if packing.separate_scales and places.scales is not None:
            to_scales = places.scales[key]
        elif packing.separate_scales:  # then a page has room for a whole number of entries' values
            entry = places.units[key] // Uint32(packing.values // UNIT) % Uint32(self.page_bytes // packing.values)
            to_scales = self.from_entry_to_scales(Int32(entry))
        return self.entry_at(places, key) + (to_scales + slab * form.scales_a_slab)

    @cute.jit
    def prefetch_keys(self, t: Int32, places: Places, thread: Int32):
        """Have this thread's keys brought into L2: the lanes of a key share out its lines; that of its scales, or its
        last one, comes after the others."""
        packing, lanes = self.format.packing, self.lanes_a_key
        part = thread % lanes
        size = packing.values if packing.separate_scales else packing.entry
        lines = (size + LINE - 1) // LINE
        for key in cutlass.range_constexpr(cute.size(places.units)):
            first, units = self.entry_at(places, key), places.units[key]
            for i in cutlass.range_constexpr(0, lines + 1, lanes):
                address = first + (i + part) * LINE
                if cutlass.const_expr(i + lanes > lines):
                    last = self.scales_at(places, key, 0) + (packing.scales + packing.after - 1)
                    address = address if i + part < lines else last
                prefetch_unless(ABSENT, address, units)

    @cute.jit
    def fetch(self, t: Int32, held: Held, places: Places, slabs: cutlass.Constexpr, thread: Int32):
        """Loads some slabs of this thread's keys, and their scales, with zeros for absent keys."""
        for key in cutlass.range_constexpr(cute.size(places.units)):
            self.fetch_key(held, places, slabs, thread % self.lanes_a_key, key)

    def fetch_key(self, held: Held, places: Places, slabs: range, part: Int32, key: int) -> None:
        form, units = self.format, places.units[key]
        scales, *slots = form.slots(slabs)
        its_words = load_words_unless(ABSENT, self.scales_at(places, key, slabs[0]), units, form.scale_words(slabs))
        held.put(key, scales, its_words)
        for piece, at in zip(form.pieces_ahead(slabs), slots, strict=True):
            held.put(key, at, self.load_piece(places, key, part, *piece))

    def load_piece(self, places: Places, key: int, part: Int32, slab: int, piece: int) -> tuple[Uint32, ...]:
        count = self.format.piece_words(slab)
        address = self.entry_at(places, key) + part * (count * WORD) + self.format.offset(slab, piece)
        return load_words_unless(ABSENT, address, places.units[key], count)

    @cute.jit
    def unpack(
        self,
        t: Int32,
        held: Held,
        slabs: cutlass.Constexpr,
        mine: "Part",
        places: Places,
        then: cutlass.Constexpr,
    ):
        """Turns what was fetched into bf16 in a key tile. A key's registers get its slabs `then`, if there are any, as
        soon as they are free."""
        for key in cutlass.range_constexpr(cute.size(held.words, mode=[1])):
            self.unpack_key(held, places, slabs, mine, key)
            if cutlass.const_expr(len(then) > 0):
                self.fetch_key(held, places, then, mine.part, key)

    def unpack_key(self, held: Held, places: Places, slabs: range, mine: Any, key: int) -> None:
        """Unpacks a key by `mine.put(slab, key, chunk, words)`, for a thread with the part `mine.part` of a slab."""
        form = self.format
        first, *slots = form.slots(slabs)
        scales = held.get(key, first, form.scale_words(slabs))
        ahead = dict(zip(form.pieces_ahead(slabs), slots, strict=True))
        for slab, piece in form.pieces(slabs):
            if (slab, piece) in ahead:
                words = held.get(key, ahead[slab, piece], form.piece_words(slab))
            else:
                words = self.load_piece(places, key, mine.part, slab, piece)
            chunks = [(form.lanes * piece + mine.part, words)]
            if slab < form.slabs:
                eights = unpacked(form, words, scale_of(form, scales, slab - slabs[0], mine.part))
                chunks = [(form.chunks * mine.part + i, eight) for i, eight in enumerate(eights)]
            for chunk, eight in chunks:
                mine.put(slab, key, chunk, eight)


@dataclass(frozen=True)
class Part:
    """A thread's part of every key of a tile: numbers in a row of each slab."""

    tile: cute.Tensor  # (tile_n, d) in slabs
    part: Int32
    row0: Int32
    step: int  # rows from key to key
    full: cute.Pointer  # the tile's barrier
    peer: Peer | None  # whose tile gets the same

    @staticmethod
    def of(tile: cute.Tensor, lanes: int, thread: Int32, threads: int, full: cute.Pointer, peer: Peer | None) -> "Part":
        return Part(tile, thread % lanes, thread // lanes, threads // lanes, full, peer)

    def put(self, slab: int, key: int, chunk: Int32, words: tuple[Uint32, ...]) -> None:
        """Stores 16 bytes where they belong; the peer's barrier counts those that it gets."""
        store_shared_words(self.at(slab, key, chunk), words)
        if self.peer is not None:
            self.peer.send(self.at(slab, key, chunk), words, self.full)

    def at(self, slab: int, key: int, chunk: Int32) -> Int32:
        """The address of a 16-byte chunk of a row, which the swizzle moves."""
        row = self.row0 + (slab * cute.size(self.tile, mode=[0]) + key * self.step)
        return self.tile.iterator.toint() + row * (SLAB * 2) + (chunk ^ self.row0 % 8) * 16


def scale_of(form: Format, scales: tuple[Uint32, ...], slab: int, part: Int32) -> tuple[Uint32, ...]:
    """Returns a scale as `unpacked` takes it, for a part of the slab-th of those slabs that these words are for."""
    word, byte = divmod(slab * form.scales_a_slab, WORD)
    if form.scales == "float32":
        return (scales[word],)
    mine = Uint32(part * form.scales_a_slab // form.lanes) if form.scales_a_slab > 1 else Uint32(0)
    if form.scales == "ue8m0":
        scale = scale_of_ue8m0(scales[word], mine * Uint32(0x1010) + Uint32(0x0404 + byte * 0x1010))
        return (scale,) if form.bits == 8 else half_and_middle(scale)
    return scale_of_e4m3(scales[word] >> (mine + Uint32(byte)) * Uint32(8) & Uint32(0xFF), MIDDLE_IN_BF16)


def half_and_middle(scale: Uint32) -> tuple[Uint32, Uint32]:
    """Half of a scale, and -192 times that half, as pairs of bf16: `scale_of_e4m3` of one in bf16."""
    half, middle, zeros = (Uint32(x * 0x10001) for x in (HALF_IN_BF16, MINUS_96_IN_BF16, 0))
    return fma_bf16x2(scale, half, zeros), fma_bf16x2(scale, middle, zeros)


def unpacked(form: Format, words: tuple[Uint32, ...], scale: tuple[Uint32, ...]) -> list[tuple[Uint32, ...]]:
    """Chunks of a row."""
    of_8_bits = e4m3_times_float32 if form.scales == "float32" else e4m3_to_bf16
    to_bf16 = of_8_bits if form.bits == 8 else e2m1_to_bf16
    pairs = [pair for word in words for pair in to_bf16(word, *scale)]
    return [tuple(pairs[i : i + CHUNK // 2]) for i in range(0, len(pairs), CHUNK // 2)]


def e2m1_to_bf16(word: Uint32, half_scale: Uint32, middle: Uint32) -> tuple[Uint32, ...]:
    """Eight numbers times a scale, exactly.

    The bytes 0x40 + n and 0x43 are 192 + n in bf16. A permutation of bytes looks up 0x40 + n for four numbers n / 2 at
    a time. It has eight entries, and gives 0 for a code whose sign is set: so it is done for either sign.
    """
    signs = word ^ Uint32(0x88888888)
    fours = []
    for bits in (0, 16):
        positive = permute_bytes(*POSITIVE, word >> Uint32(bits))
        negative = permute_bytes(*NEGATIVE, signs >> Uint32(bits))
        fours.append(positive | negative)
    pairs = [permute_bytes(four, POSITIVE[0], Uint32(order)) for four in fours for order in (0x7170, 0x7372)]
    return tuple(fma_bf16x2(pair, half_scale, middle) for pair in pairs)
