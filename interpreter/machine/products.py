"""Blackwell's products and the copies that feed them (PTX ISA 9.7.16.4, 9.7.16.5, 9.7.16.9 cp, 9.7.16.10 mma).

A product D (128 or 64 x N, fp32) = A (x K, TMEM or shared memory) B (K x N, shared memory) + D is issued by one
thread; K is what 32 bytes hold. It is asynchronous; `tmem.py` says what orders it.

With .cta_group::2 one thread of a pair of CTAs issues a product of 256 or 128 rows. Each CTA has half of the rows of A
and of D, in its own memories and at the same places in both, and half of the columns of B (9.7.16.10.5, data path
layouts A and B). Of 128 rows, the columns of D are folded: the second half lies in lanes 64 to 127. A product with .ws
of 64 or 32 rows folds them over two or four groups of lanes (layouts E and G). Where columns are folded and A is in
TMEM, every group of lanes has an A of its own, for its columns of D.

A row of A that is not defined (rows that TMA did not load) makes that row of D undefined, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from .decode import Decoder, Step, instruction
from .hazards import Misuse, Undefined
from .parser import Address, Instruction
from .rules import Rule
from .scheduler import remark
from .state import Array, AsyncOp, Cta, Warp
from .tmem import COLUMNS, Access, group_of, issuer, members, tmem_of
from .wgmma import TF32, Descriptor, chunks_of, element_bytes, fetch, widen

PAIRS = 16  # depth of a product in pairs of bytes
A_COLUMNS = 8  # of TMEM, for a row of A
SWIZZLES = {0: (0, 16), 1: (128, 32), 2: (128, 16), 4: (64, 16), 6: (32, 16)}  # bytes of a row, and of an atom
FORMATS: dict[str, dict[int, Any]] = {  # of A and B, by the descriptor's number
    "f16": {0: np.float16, 1: ml_dtypes.bfloat16},
    "tf32": {2: TF32},
    "f8f6f4": {0: ml_dtypes.float8_e4m3fn, 1: ml_dtypes.float8_e5m2},
    "i8": {0: np.uint8, 1: np.int8},
}
FLOAT32, INT32 = 1, 2  # of D, by the descriptor's number
ROWS = {1: (64, 128), 2: (128, 256), "ws": (32, 64, 128)}


@dataclass(frozen=True)
class InstructionDescriptor:
    """Table 42."""

    m: int
    n: int
    dtypes: tuple[Any, Any]  # of A, B
    negated: bool  # A B
    mn_major: tuple[bool, bool]  # A, B

    @property
    def depth(self) -> int:
        return 2 * PAIRS // element_bytes(self.dtypes[0])

    @staticmethod
    @lru_cache
    def decode(bits: int, kind: str, group: int, ws: bool) -> InstructionDescriptor:
        def part(low: int, size: int) -> int:
            return bits >> low & (1 << size) - 1

        m, n = part(24, 5) << 4, part(17, 6) << 3
        a, b = (FORMATS[kind].get(part(low, 3)) for low in (7, 10))
        number, wanted = (INT32, "int32") if kind == "i8" else (FLOAT32, "fp32")
        if a is None or b is None or (kind == "f16" and a is not b) or part(4, 2) != number:
            raise Misuse(f"instruction descriptor {bits:#010x}: wanted dense operands of kind::{kind} and {wanted}")
        if unknown := part(0, 4) | part(6, 1) << 6 | part(23, 1) << 23 | part(29, 3) << 29:
            raise Misuse(f"instruction descriptor {bits:#010x} with bits that have no meaning here: {unknown:#010x}")
        unit = 64 if ws else 32 if group == 2 else 8 if m == 64 else 16
        if m not in ROWS["ws" if ws else group] or not 0 < n <= 256 or n % unit:
            how = ".ws" if ws else f".cta_group::{group}"
            raise Misuse(f"instruction descriptor {bits:#010x}: a product of {m} x {n} with {how}")
        negated = bool(part(13, 1) ^ part(14, 1))
        return InstructionDescriptor(m, n, (a, b), negated, (bool(part(15, 1)), bool(part(16, 1))))


@lru_cache(maxsize=256)
def smem_descriptor(bits: int) -> Descriptor:
    """9.7.16.4.1. In units of 16 bytes; bits 46 to 48 are 0b001, or 0 as on Hopper (`Rule.DESCRIPTOR_VERSION`)."""
    if bits >> 46 & 7 > 1 or bits >> 61 not in SWIZZLES:
        raise Misuse(f"shared memory descriptor 0x{bits:016x}")
    return Descriptor.of_fields(bits, 7 << 46 | 7 << 61, *SWIZZLES[bits >> 61])


def descriptor_of(w: Warp, slot: int) -> int:
    """A descriptor of shared memory, as this warp has it in a register."""
    bits = w.uniform(slot, np.uint64, "a descriptor")
    if not bits >> 46 & 7:
        text = f"shared memory descriptor 0x{bits:016x} with 0b000 in bits 46 to 48, wanted 0b001"
        remark(w.machine, Rule.DESCRIPTOR_VERSION, Misuse(text))
    return bits


@lru_cache(maxsize=1024)
def matrix(m: int, lane: int, column: int, columns: int, folds: int = 1) -> Array:
    """The words of rows x columns of one CTA (9.7.16.10.5, data path layouts).

    64 rows that are not folded take 16 lanes of every 32 (layout F); of folded ones every group of m lanes has an equal
    share of the columns (layouts B, E and G).
    """
    row, place, share = np.arange(m)[:, None], np.arange(columns), columns // folds
    if folds > 1:
        return (row + place // share * m) * COLUMNS + column + place % share
    lanes = lane + (row if m == 128 else row // 16 * 32 + row % 16)
    return lanes * COLUMNS + column + place


@dataclass(frozen=True)
class Product:
    """One product: its shape, where A, B and D are, and whether it adds to D."""

    shape: InstructionDescriptor
    rows: int  # of one CTA
    folds: int  # of D's columns
    a: int | Array  # a descriptor of shared memory, or words of TMEM
    b: int  # a descriptor
    d: Array  # words of TMEM
    adds: bool

    @property
    def form(self) -> str:
        """The product's form in words: its extents, A in TMEM if it is there, and what is not K-major."""
        shape = self.shape
        across = [f"{name} MN-major" for name, mn_major in zip("AB", shape.mn_major, strict=True) if mn_major]
        where = [] if isinstance(self.a, int) else ["A in TMEM"]
        return ", ".join([f"product {shape.m}x{shape.n}x{shape.depth}", *where, *across])


@instruction("tcgen05.mma")
def product(i: Instruction, d: Decoder) -> Step:
    ws = i.has("ws")
    kind = next((m for m in i.mods if m.startswith("kind::")), "no kind").removeprefix("kind::")
    if kind not in FORMATS:
        raise d.fail(f"modifier .kind::{kind}")
    buffers = [f"b{n}" for n in range(4)] if ws else ["a"]
    collectors = [f"collector::{x}::{does}" for x in buffers for does in ("fill", "use", "lastuse", "discard")]
    i.only("cta_group::1", "cta_group::2", "ws", f"kind::{kind}", *collectors)
    buffer, keeps = next((tuple(m.split("::")[1:]) for m in i.mods if m in collectors), (buffers[0], "discard"))
    group = group_of(i, d)
    if ws and group != 1:
        raise d.fail(".ws of a pair")
    d_base, d_offset = d.address(i.args[0])
    a_address = d.address(i.args[1]) if isinstance(i.args[1], Address) else None
    a_desc = d.slot(i.args[1], "b64") if a_address is None else 0
    b_desc, descriptor = d.slot(i.args[2], "b64"), d.slot(i.args[3], "b32")
    masks = d.vector(i.args[4], "b32") if isinstance(i.args[4], tuple) else []
    if len(masks) not in (0, 4 * group):
        raise d.fail(f"{len(masks)} masks of lanes, wanted {4 * group}")
    if ws and len(i.args) > 5 and i.args[5] != "0":
        raise d.fail("a mask of columns that are zero")
    accumulate, negated = d.predicate(i.args[4] if ws else i.args[-1])

    def step(w: Warp) -> None:
        if w.active.bit_count() != 1:
            raise Misuse(f"a product is issued by {w.active.bit_count()} threads, wanted one")
        lane, ctas = w.active.bit_length() - 1, members(w.cta, group)
        bits = w.uniform(descriptor, np.uint32, "an instruction descriptor")
        shape = InstructionDescriptor.decode(bits, kind, group, ws)
        rows = shape.m // group
        folds = 128 // rows if ws or (group == 2 and rows == 64) else 1
        if any(w.uniform(s, np.uint32, "a mask of lanes") for s in masks):
            raise Misuse("a product that leaves lanes of D out")
        w.demand(accumulate, "whether to accumulate")
        at = w.uniform(d_base, np.uint32, "an address in TMEM") + d_offset
        row, column = divmod(at, 1 << 16)
        if row not in ((0, 16) if folds == 1 and rows == 64 else (0,)):
            raise Misuse(f"D of {rows} rows at lane {row}")
        for cta in ctas:
            tmem_of(cta).check(range(column, column + shape.n // folds), "has D in")
        a: int | Array
        place_of_a: object
        if a_address is None:
            a = place_of_a = descriptor_of(w, a_desc)
        else:
            a_row, a_column = divmod(w.uniform(a_address[0], np.uint32, "an address in TMEM") + a_address[1], 1 << 16)
            if a_row != row:
                raise Misuse(f"A at lane {a_row}, D at lane {row}")
            for cta in ctas:
                tmem_of(cta).check(range(a_column, a_column + A_COLUMNS), "has A in")
            a, place_of_a = matrix(rows, a_row, a_column, A_COLUMNS * folds, folds), (a_row, a_column)
        b = descriptor_of(w, b_desc)
        adds = bool(w.R[accumulate][lane]) ^ negated
        operand = (b, shape.n) if ws else (place_of_a, shape.m)
        for cta in ctas:
            collect(tmem_of(cta).collectors, buffer, keeps, (w.index, lane, kind, group, *operand))
        x = Product(shape, rows, folds, a, b, matrix(rows, row, column, shape.n, folds), adds)
        mine = issuer(w)
        chain, before, clock = mine.following(lane, (at, shape.m, shape.n))

        def run(op: AsyncOp) -> None:
            right = operand_b(op, ctas, x)
            for cta in ctas:
                cta.visit(op, "multiplies in")
                multiply(op, Access(clock, tensor_core(w, cta), op), cta, x, right)

        what = f"{x.form} into lane {row}, column {column}"
        reader = w.cta.first_stream + w.cta.rank % 2
        op = w.issue("tcgen05.mma", what, run, after=before, reader=reader)
        clock.ops |= 1 << op.number  # it reads D before it writes it
        mine.issued(lane, op, chain)

    return step


def collect(collectors: dict[str, object], buffer: str, keeps: str, operand: object) -> None:
    """A collector keeps an operand of a product for the next ones: A, or of `.ws` B. A product of another thread, or of
    another operand, may put it out."""
    if keeps in ("use", "lastuse") and collectors.get(buffer) != operand:
        held = "another operand" if collectors.get(buffer) is not None else "nothing"
        raise Misuse(f"a product takes an operand from collector {buffer}, which has {held}")
    collectors[buffer] = operand if keeps in ("fill", "use") else None


def tensor_core(w: Warp, cta: Cta) -> int:
    """The reader of a CTA's TMEM that the products and copies of a warp are, its own or its pair's."""
    return w.cta.warp_total * (1 if cta is w.cta else 2) + w.number


def operand_b(op: AsyncOp, ctas: list[Cta], x: Product) -> Array:
    """fp32 [N, K], an equal share of N from each CTA."""
    place, share, mn_major = smem_descriptor(x.b), x.shape.n // len(ctas), x.shape.mn_major[1]
    dtype, parts = x.shape.dtypes[1], []
    for cta in ctas:
        parts.append(fetch(cta.smem, place, share, PAIRS, mn_major, dtype))
        words = chunks_of(place, share, PAIRS, mn_major, element_bytes(dtype))[1]
        if not cta.smem.shadow.read(op, words).all():
            raise Undefined("operand B has elements that are not defined")
    right = np.concatenate(parts)
    return -right if x.shape.negated else right


def operand_a(op: AsyncOp, access: Access, cta: Cta, x: Product) -> tuple[Array, Array]:
    """(fp32 [folds, rows, K], which are defined [rows, folds]); from shared memory there is one for all folds."""
    dtype, mn_major = x.shape.dtypes[0], x.shape.mn_major[0]
    if not isinstance(x.a, int):
        tmem = tmem_of(cta)
        known = tmem.shadow.read(access, x.a.ravel(), partial=True)
        values = widen(np.ascontiguousarray(tmem.words32[x.a]).view(np.uint16), dtype)
        values = values.reshape(x.rows, x.folds, -1).transpose(1, 0, 2)
        return values, np.asarray(known.reshape(x.rows, x.folds, -1).all(2))
    place, size = smem_descriptor(x.a), element_bytes(dtype)
    left = fetch(cta.smem, place, x.rows, PAIRS, mn_major, dtype)
    known = cta.smem.shadow.read(op, chunks_of(place, x.rows, PAIRS, mn_major, size)[1], partial=True)
    if mn_major:  # words of rows for every element of the depth
        known = np.repeat(known.reshape(x.shape.depth, -1).all(0), 4 // size)
    return left[None], np.asarray(known.reshape(x.rows, -1).all(1, keepdims=True))


def multiply(op: AsyncOp, access: Access, cta: Cta, x: Product, right: Array) -> None:
    """The rows of one CTA."""
    tmem, n = tmem_of(cta), x.shape.n
    left, known = operand_a(op, access, cta, x)
    integers = x.shape.dtypes[0] in (np.uint8, np.int8)
    with np.errstate(all="ignore"):
        # [folds, rows, N / folds] of [folds, rows, K] and [folds, K, N / folds]; in float64, as in `wgmma.product`
        columns = right.reshape(len(left), n // len(left), -1).transpose(0, 2, 1)
        values = left.astype(np.float64) @ columns.astype(np.float64)
        values = values.transpose(1, 0, 2).reshape(x.rows, n).astype(np.int32 if integers else np.float32)
        defined = np.repeat(known, n // known.shape[1], 1)
        if x.adds:
            defined &= tmem.shadow.read(access, x.d.ravel()).reshape(x.rows, n)
            values += tmem.words32[x.d].view(values.dtype)
    tmem.shadow.write(access, x.d.ravel(), defined.ravel())
    tmem.words32[x.d] = values.view(np.uint32)


# ---- copies from shared memory

PARTS = {  # which quarters of the lanes get every 32 rows of a copy
    "128x256b": ((0,), (1,), (2,), (3,)),
    "128x128b": ((0,), (1,), (2,), (3,)),
    "64x128b.warpx2::02_13": ((0, 2), (1, 3)),
    "64x128b.warpx2::01_23": ((0, 1), (2, 3)),
    "32x128b.warpx4": ((0, 1, 2, 3),),
}


@instruction("tcgen05.cp")
def copy(i: Instruction, d: Decoder) -> Step:
    """Rows of 128 or 256 bits from shared memory to TMEM, in every CTA of the group."""
    form = ".".join(m for m in i.mods if not m.startswith("cta_group"))
    if form not in PARTS:
        raise d.fail(f"shape {form} of {i.opcode}")
    group, parts = group_of(i, d), PARTS[form]
    rows, bits = (int(x) for x in form.split(".")[0].removesuffix("b").split("x"))
    columns = bits // 32
    base, offset = d.address(i.args[0])
    descriptor = d.slot(i.args[1], "b64")

    def step(w: Warp) -> None:
        if w.active.bit_count() != 1:
            raise Misuse(f"a copy to TMEM is issued by {w.active.bit_count()} threads, wanted one")
        lane, ctas = w.active.bit_length() - 1, members(w.cta, group)
        row, column = divmod(w.uniform(base, np.uint32, "an address in TMEM") + offset, 1 << 16)
        if row:
            raise Misuse(f"a copy to lane {row} of TMEM, wanted 0")
        chunks, words = chunks_of(smem_descriptor(descriptor_of(w, descriptor)), rows, bits // 16, False)
        for cta in ctas:
            tmem_of(cta).check(range(column, column + columns), "copies to")
        mine = issuer(w)
        chain, before, clock = mine.following(lane, None)

        def run(op: AsyncOp) -> None:
            for cta in ctas:
                cta.visit(op, "copies in")
                tmem, access = tmem_of(cta), Access(clock, tensor_core(w, cta), op)
                known = cta.smem.shadow.read(op, words, partial=True).reshape(rows, columns)
                data = cta.smem.chunks[chunks].view(np.uint32).reshape(rows, columns)
                for part, quarters in enumerate(parts):
                    of_part = slice(32 * part, 32 * part + 32)
                    for quarter in quarters:
                        to = matrix(128, 0, column, columns)[32 * quarter : 32 * quarter + 32]
                        tmem.shadow.write(access, to.ravel(), known[of_part].ravel())
                        tmem.words32[to] = data[of_part]

        reader = w.cta.first_stream + w.cta.rank % 2
        op = w.issue("tcgen05.cp", f"copy of {form} to column {column}", run, after=before, reader=reader)
        mine.issued(lane, op, chain)

    return step
