"""Selected keys that are kept packed, in FP8, in pages of a pool: gathered into a key tile and unpacked there.

A page of n entries is n * 576 bytes, each 448 e4m3 numbers and 64 of bf16, then n * 8 bytes, each seven scales and one
of padding; it is padded up to a multiple of 576. Scale s is 2^(s - 127), one for 64 e4m3 numbers; 255 is NaN.

Four lanes have a key. Sixteen e4m3 numbers become two 16-byte chunks of a row of a slab, by way of registers, or of the
place itself: then they are copied to where the first of the two belongs, by `cp.async`, and the lane that writes the
two reads them there before it does. So what is packed needs no SMEM of its own, and no lane waits for another. Numbers
of bf16 are copied to where they belong.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernels.lib.ptx import ptx
from kernels.lib.rows import RowTile, ceil_div
from kernels.lib.selections import Selection, copy_or_zero
from kernels.lib.wgmma import SLAB

from .cluster import Peer

D = 512
PACKED_SLABS = 7
ENTRY, ENTRY_SCALES = PACKED_SLABS * SLAB + 2 * SLAB, 8  # bytes
LANES_A_KEY = 4


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


@dataclass(frozen=True)
class Places:
    """What a thread knows of the keys that it copies of one tile."""

    address: cute.Tensor  # int64 [keys]: of this lane's first part
    size: cute.Tensor  # int32 [keys]: 16 bytes of a part, or none where the key is absent
    scales: cute.Tensor  # uint32 [2, keys]: seven bytes

    @staticmethod
    def of(keys: int) -> "Places":
        return Places(*(cute.make_rmem_tensor(*x) for x in ((keys, Int64), (keys, Int32), ((2, keys), Uint32))))


@dataclass(frozen=True)
class PackedSelection(Selection):
    """The selected keys of one query. Neighbouring quads of lanes copy neighbouring keys."""

    @property
    def lanes_a_key(self) -> int:
        return LANES_A_KEY

    @cute.jit
    def locate(self, t: Int32, places: Places, wanted: cute.Tensor, thread: Int32, threads: cutlass.Constexpr):
        """places <- where the keys of tile t are that were looked up, and their scales. Of an absent one nothing is
        copied, and the scales are those of the pool's first."""
        n = self.operands.page
        page_bytes = ceil_div(n * (ENTRY + ENTRY_SCALES), Int32(ENTRY)) * ENTRY
        for i in cutlass.range_constexpr(cute.size(wanted)):
            here = self.is_present(self.position(t, i, thread, threads), wanted[i])
            index = wanted[i] if here else Int32(0)
            entry = index % n
            page = self.keys.toint() + Int64(index // n) * page_bytes
            places.address[i] = page + (entry * ENTRY + thread % LANES_A_KEY * 16)
            places.size[i] = Int32(16) if here else Int32(0)
            places.scales[0, i], places.scales[1, i] = load_words(
                "global.nc.L1::no_allocate", page + (n * ENTRY + entry * ENTRY_SCALES), 2
            )


@dataclass(frozen=True)
class Part:
    """What a thread has of every key: sixteen numbers in a row of each slab."""

    tile: cute.Tensor  # (tile_n, d) in slabs
    part: Int32
    row0: Int32
    step: int  # rows from key to key

    @staticmethod
    def of(tile: cute.Tensor, thread: Int32, threads: int) -> "Part":
        return Part(tile, thread % LANES_A_KEY, thread // LANES_A_KEY, threads // LANES_A_KEY)

    def at(self, slab: int, key: int, chunk: Int32) -> Int32:
        """The address of a 16-byte chunk of a row, which the swizzle moves."""
        row = self.row0 + (slab * cute.size(self.tile, mode=[0]) + key * self.step)
        return self.tile.iterator.toint() + row * (SLAB * 2) + (chunk ^ self.row0 % 8) * 16


@cute.jit
def gather(tile: cute.Tensor, places: Places, slabs: cutlass.Constexpr, thread: Int32, threads: cutlass.Constexpr):
    """Issue the copies of some slabs into a (tile_n, d) slab tile; of absent keys, zeros."""
    mine = Part.of(tile, thread, threads)
    for key in cutlass.range_constexpr(cute.size(places.size)):
        for slab in slabs:
            source, size = places.address[key] + slab * SLAB, places.size[key]
            if cutlass.const_expr(slab < PACKED_SLABS):
                copy_or_zero(mine.at(slab, key, 2 * mine.part), source, size)
            else:
                for half in cutlass.range_constexpr(2):
                    copy_or_zero(mine.at(slab, key, LANES_A_KEY * half + mine.part), source + half * SLAB, size)


@cute.jit
def unpack(tile: cute.Tensor, places: Places, slabs: cutlass.Constexpr, thread: Int32, threads: cutlass.Constexpr):
    """What this thread gathered packed, some slabs of a (tile_n, d) slab tile, becomes bf16.

    All of it is read before any is written: else each read waits for the writes before it, for all that is known of
    where they go.
    """
    mine = Part.of(tile, thread, threads)
    parts = [(slab, key) for key in range(cute.size(places.size)) for slab in slabs if slab < PACKED_SLABS]
    packed = [load_words("shared", mine.at(slab, key, 2 * mine.part), 4) for slab, key in parts]
    for (slab, key), words in zip(parts, packed, strict=True):
        for chunk, eight in enumerate(unpacked(words, scale_of(places, slab, key))):
            store_words(mine.at(slab, key, 2 * mine.part + chunk), eight)


@dataclass(frozen=True)
class Held:
    """Registers for what a thread has of some slabs: its part of a packed one, or two chunks of bf16."""

    words: cute.Tensor  # uint32 [4, chunk, key]

    @staticmethod
    def chunks(slabs: range) -> list[tuple[int, int]]:
        """(slab, chunk of this thread's in it)"""
        return [(slab, chunk) for slab in slabs for chunk in range(1 if slab < PACKED_SLABS else 2)]

    @staticmethod
    def of(slabs: range, keys: int) -> "Held":
        return Held(cute.make_rmem_tensor((4, len(Held.chunks(slabs)), keys), Uint32))


@cute.jit
def fetch(held: Held, places: Places, slabs: cutlass.Constexpr):
    """Ask for some slabs of this thread's keys; of absent ones, zeros."""
    for key in cutlass.range_constexpr(cute.size(places.size)):
        for i, (slab, chunk) in enumerate(Held.chunks(slabs)):
            source = places.address[key] + (slab + chunk) * SLAB
            for word, value in enumerate(load_or_zero(source, places.size[key])):
                held.words[word, i, key] = value


@cute.jit
def pass_on(
    held: Held,
    tile: cute.Tensor,
    places: Places,
    slabs: cutlass.Constexpr,
    thread: Int32,
    threads: cutlass.Constexpr,
    full: cute.Pointer,
    peer: Peer | None,
):
    """What was fetched becomes bf16 in a (tile_n, d) slab tile, and in the peer's, where it is counted on `full`."""
    mine = Part.of(tile, thread, threads)
    for key in cutlass.range_constexpr(cute.size(places.size)):
        for i, (slab, chunk) in enumerate(Held.chunks(slabs)):
            words = tuple(held.words[word, i, key] for word in range(4))
            if cutlass.const_expr(slab < PACKED_SLABS):
                eights = enumerate(unpacked(words, scale_of(places, slab, key)))
                chunks = [(2 * mine.part + half, eight) for half, eight in eights]
            else:
                chunks = [(LANES_A_KEY * chunk + mine.part, words)]
            for place, eight in chunks:
                store_words(mine.at(slab, key, place), eight)
                if cutlass.const_expr(peer is not None):
                    peer.send(mine.at(slab, key, place), eight, full)


@cute.jit
def scale_of(places: Places, slab: cutlass.Constexpr, key: cutlass.Constexpr) -> Uint32:
    """A pair of bf16."""
    four = places.scales[slab // 4, key] if places.size[key] != 0 else Uint32(0)
    byte = four >> Uint32(slab % 4 * 8) & Uint32(0xFF)
    scale = byte << Uint32(7) if byte != Uint32(0xFF) else Uint32(0x7FC0)
    return scale | scale << Uint32(16)


def unpacked(words: tuple[Uint32, ...], scale: Uint32) -> list[tuple[Uint32, ...]]:
    """Sixteen numbers: two chunks of a row."""
    pairs = [e4m3_to_bf16(word, scale) for word in words]
    return [(*pairs[i], *pairs[i + 1]) for i in (0, 2)]


def e4m3_to_bf16(packed: Uint32, scale: Uint32) -> tuple[Uint32, Uint32]:
    """Four numbers times a pair of equal scales, exactly but for what bf16 cannot hold: all that e4m3 has, f16 has, and
    bf16 too."""
    one_pair = """
        cvt.rn.f16x2.e4m3x2 x, {packed};
        mov.b32 {{low, high}}, x;
        cvt.f32.f16 f, low;
        cvt.f32.f16 g, high;
        cvt.rn.bf16x2.f32 x, g, f;
        mul.rn.bf16x2 {result}, x, $3;"""
    pairs = (one_pair.format(packed=pair, result=f"${i}") for i, pair in enumerate(("first", "second")))
    return ptx(
        "{ .reg .b16 first, second, low, high;\n .reg .b32 x;\n .reg .f32 f, g;\n mov.b32 {first, second}, $2;"
        + "".join(pairs)
        + "\n}",
        Uint32(packed),
        Uint32(scale),
        gives=(Uint32,) * 2,
        early=True,
        pure=True,
    )


def load_words(space: str, address: Int32 | Int64, count: int) -> tuple[Uint32, ...]:
    """2 or 4 words of memory, read here: not where they are first used."""
    words = ", ".join(f"${i}" for i in range(count))
    return ptx(f"ld.{space}.v{count}.b32 {{{words}}}, [${count}];", address, gives=(Uint32,) * count)


def load_or_zero(address: Int64, present: Int32) -> tuple[Uint32, ...]:
    """16 bytes of global memory, asked for here, or zeros."""
    return ptx(
        "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
        " @p ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {$0, $1, $2, $3}, [$4]; }",
        Int64(address),
        Int32(present),
        gives=(Uint32,) * 4,
        early=True,
    )


def store_words(address: Int32, words: tuple[Uint32, ...]) -> None:
    """16 bytes to shared memory."""
    ptx("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", Int32(address), *map(Uint32, words))
