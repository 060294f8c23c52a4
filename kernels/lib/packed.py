"""Selected keys that are kept packed, in FP8, in pages of a pool: read into registers and unpacked into a key tile.

A page of n entries is n * 576 bytes, each 448 e4m3 numbers and 64 of bf16, then n * 8 bytes, each seven scales and one
of padding; it is padded up to a multiple of 576. Scale s is 2^(s - 127), one for 64 e4m3 numbers; 255 is NaN. The bytes
0x7f and 0xff, e4m3's NaN, are read as 480 and -480.

An entry is nine pieces of 64 bytes, four lanes' 16 each: seven slabs of a key tile, and two halves of its last slab.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from .rows import RowTile, ceil_div
from .selections import Selection
from .wgmma import SLAB

D = 512
PACKED_SLABS = 7
ENTRY, ENTRY_SCALES = PACKED_SLABS * SLAB + 2 * SLAB, 8  # bytes
PIECE = 64  # bytes
LANES_A_PIECE = 4
HALVES = (range(4), range(4, 9))  # pieces of the left and the right columns
TWO_TO_120 = 0x7B807B80  # a pair in bf16


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

    address: cute.Tensor  # int64 [keys]: of this lane's part of the first piece
    scales: cute.Tensor  # uint32 [2, keys]: seven bytes, and one whose bits say whether the key is there

    @staticmethod
    def of(keys: int) -> "Places":
        return Places(cute.make_rmem_tensor(keys, Int64), cute.make_rmem_tensor((2, keys), Uint32))


@dataclass(frozen=True)
class PackedSelection(Selection):
    """The selected keys of one query. Neighbouring quads of lanes copy neighbouring keys."""

    @property
    def lanes_a_key(self) -> int:
        return LANES_A_PIECE

    @cute.jit
    def locate(self, places: Places, wanted: cute.Tensor, t: Int32, thread: Int32, threads: cutlass.Constexpr):
        """places <- where the keys of tile t are that were looked up, and their scales. For an absent one the first of
        the pool is read, as zeros."""
        n = self.operands.page
        page_bytes = ceil_div(n * (ENTRY + ENTRY_SCALES), Int32(ENTRY)) * ENTRY
        for i in cutlass.range_constexpr(cute.size(wanted)):
            here = self.is_present(self.position(t, i, thread, threads), wanted[i])
            index = wanted[i] if here else Int32(0)
            entry = index % n
            page = self.keys.toint() + Int64(index // n) * page_bytes
            places.address[i] = page + (entry * ENTRY + thread % LANES_A_PIECE * 16)
            low, high = load_words(page + (n * ENTRY + entry * ENTRY_SCALES), 2)
            places.scales[0, i] = low if here else Uint32(0)
            places.scales[1, i] = high | Uint32(0xFF000000) if here else Uint32(0)


@cute.jit
def fetch(raw: cute.Tensor, places: Places, piece: cutlass.Constexpr, key: cutlass.Constexpr):
    """raw [4] <- this lane's part of a piece of a key."""
    words = load_words(places.address[key] + piece * PIECE, 4)
    for word in cutlass.range_constexpr(4):
        raw[word] = words[word]


@cute.jit
def unpack(
    tile: cute.Tensor,
    raw: cute.Tensor,
    places: Places,
    piece: cutlass.Constexpr,
    key: cutlass.Constexpr,
    thread: Int32,
    threads: cutlass.Constexpr,
):
    """What was fetched of a key, as bf16 into a (tile_n, d) slab tile."""
    part, row0 = thread % LANES_A_PIECE, thread // LANES_A_PIECE
    rows = min(piece, PACKED_SLABS) * cute.size(tile, mode=[0]) + key * (threads // LANES_A_PIECE)
    row = tile.iterator.toint() + (row0 + rows) * (SLAB * 2)
    if cutlass.const_expr(piece < PACKED_SLABS):
        byte = places.scales[piece // 4, key] >> Uint32(piece % 4 * 8) & Uint32(0xFF)
        scale = byte << Uint32(7) if byte != Uint32(0xFF) else Uint32(0x7FC0)
        scale = scale | scale << Uint32(16)
        for chunk in cutlass.range_constexpr(2):
            low, high = (e4m3_to_bf16(raw[2 * chunk + word], scale) for word in range(2))
            store_words(row + (2 * part + chunk ^ row0 % 8) * 16, (*low, *high))
    else:
        chunk = (piece - PACKED_SLABS) * LANES_A_PIECE + part
        present = Uint32(Int32(places.scales[1, key]) >> 31)
        store_words(row + (chunk ^ row0 % 8) * 16, tuple(raw[word] & present for word in range(4)))


@dsl_user_op
def e4m3_to_bf16(packed: Uint32, scale: Uint32, *, loc=None, ip=None) -> tuple[Uint32, Uint32]:
    """Four numbers times a pair of equal scales. Both products are exact, but for what bf16 cannot hold.

    Sign, exponent and mantissa are moved to where bf16 has them, which divides by 2^120: the biases are 7 and 127.
    """
    one_pair = """
        prmt.b32 x, $2, 0, {selector};
        shr.b32 y, x, 4;
        and.b32 y, y, 0x07F007F0;
        lop3.b32 x, x, 0x80008000, y, 0xEA;
        mul.rn.bf16x2 x, x, {bias};
        mul.rn.bf16x2 {result}, x, $3;"""
    pairs = (
        one_pair.format(selector=selector, bias="c", result=f"${i}") for i, selector in enumerate(("0x1404", "0x3424"))
    )
    result = llvm.inline_asm(
        llvm.StructType.get_literal([Uint32.mlir_type] * 2),
        [Uint32(x).ir_value(loc=loc, ip=ip) for x in (packed, scale)],
        "{ .reg .b32 x, y, c;\n mov.b32 c, " + hex(TWO_TO_120) + ";" + "".join(pairs) + "\n}",
        "=r,=r,r,r",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return tuple(Uint32(llvm.extractvalue(Uint32.mlir_type, result, [i], loc=loc, ip=ip)) for i in range(2))


@dsl_user_op
def load_words(address: Int64, count: int, *, loc=None, ip=None) -> tuple[Uint32, ...]:
    """2 or 4 words of global memory, issued here: not where they are first used."""
    result = llvm.inline_asm(
        llvm.StructType.get_literal([Uint32.mlir_type] * count),
        [Int64(address).ir_value(loc=loc, ip=ip)],
        f"ld.global.nc.L1::no_allocate.v{count}.b32 {{{', '.join(f'${i}' for i in range(count))}}}, [${count}];",
        ",".join(["=r"] * count) + ",l",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return tuple(Uint32(llvm.extractvalue(Uint32.mlir_type, result, [i], loc=loc, ip=ip)) for i in range(count))


@dsl_user_op
def store_words(address: Int32, words: tuple[Uint32, ...], *, loc=None, ip=None) -> None:
    """16 bytes to shared memory."""
    llvm.inline_asm(
        None,
        [Int32(address).ir_value(loc=loc, ip=ip), *(Uint32(x).ir_value(loc=loc, ip=ip) for x in words)],
        "st.shared.v4.b32 [$0], {$1, $2, $3, $4};",
        "r,r,r,r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
