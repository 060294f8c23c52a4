"""Hopper's asynchronous warpgroup products (PTX ISA 9.7.15): descriptors, fragments, fences, commit and wait groups.

D (64 x N, fp32, in registers) = A (64 x K, registers or shared memory) B (K x N, shared memory) + D, where K is what 32
bytes hold. The warps of a warpgroup issue it together; each holds 16 rows of D and A. Between the issue and the wait
the registers belong to the product: reading D, or writing D or A, is a race. Products of a warpgroup happen in order.

An accumulator lives as one matrix from its first product to the wait after its last, and only then goes to registers.
A row of A that is not defined (rows that TMA did not load) makes that row of D undefined, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from .copies import swizzled
from .decode import Decoder, Step, instruction
from .hazards import Clock, Misuse, OutOfBounds, Race, Undefined
from .parser import Instruction
from .state import FULL, LANES, Array, AsyncOp, Wait, Warp, lanes_of
from .storage import Memory

SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}
DTYPES: dict[str, type[np.generic]] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "e4m3": ml_dtypes.float8_e4m3fn}
K_BYTES = 32


# ---- operands in shared memory (9.7.15.5.1 Shared memory layouts and matrix descriptors)


@dataclass(frozen=True)
class Descriptor:
    start: int
    leading: int  # byte offsets
    stride: int
    swizzle: int

    atom: int = 16  # bytes that the swizzle moves together

    @staticmethod
    def decode(bits: int) -> Descriptor:
        return Descriptor.of_fields(bits, known=3 << 62, swizzle=SWIZZLES[bits >> 62])

    @staticmethod
    def of_fields(bits: int, known: int, swizzle: int, atom: int = 16) -> Descriptor:
        """Three numbers of 14 bits, in units of 16 bytes; the bits of `known` are the caller's, all others are 0."""
        if unknown := bits & ~(known | 0x3FFF_3FFF_3FFF):
            names = " (a base offset)" if unknown & 7 << 49 else ""
            raise Misuse(f"a descriptor 0x{bits:016x} with bits that have no meaning here: 0x{unknown:016x}{names}")
        start, leading, stride = ((bits >> low & 0x3FFF) << 4 for low in (0, 16, 32))
        return Descriptor(start, leading, stride, swizzle, atom)


@lru_cache(maxsize=4096)
def chunks_of(x: Descriptor, rows: int, depth: int, mn_major: bool, element: int = 2) -> tuple[Array, Array]:
    """Locates an operand of `rows` x `depth` pairs of bytes, in elements of so many bytes: (16-byte chunks, words).

    K-major: [rows, depth / 8], groups of 8 rows `stride` apart, each row a swizzle span. MN-major: [elements of the
    depth, chunks of rows], spans of rows `leading` apart, groups of 8 of the depth (4, where atoms have 32 bytes)
    `stride` apart.
    """
    span = x.swizzle or 16
    if mn_major:
        k, mn = np.arange(2 * depth // element)[:, None], 16 * np.arange(rows * element // 16)
        group = 128 // x.atom
        offsets = mn // span * x.leading + mn % span + k // group * x.stride + k % group * span
    else:
        row, k = np.arange(rows)[:, None], 16 * np.arange(depth // 8)
        inside = k if x.swizzle else k // 16 * x.leading
        offsets = row // 8 * x.stride + row % 8 * span + inside
    chunks = swizzled(x.start + offsets, x.swizzle, x.atom) // 16
    return chunks, (chunks[..., None] * 4 + np.arange(4)).ravel()


def fetch(smem: Memory, x: Descriptor, rows: int, depth: int, mn_major: bool, dtype: DTypeLike) -> Array:
    """fp32 [rows, elements in `depth` pairs of bytes]."""
    chunks, _ = chunks_of(x, rows, depth, mn_major, element_bytes(dtype))
    if int(chunks.max()) >= len(smem.chunks):
        raise OutOfBounds(f"an operand reaches past shared memory: {x}")
    values = widen(smem.chunks[chunks], dtype)
    return values.reshape(-1, rows).T if mn_major else values.reshape(rows, -1)


class TF32:
    """fp32, of which products use the upper 19 bits."""


def element_bytes(dtype: DTypeLike) -> int:
    return 4 if dtype is TF32 else np.dtype(dtype).itemsize


def widen(bits: Array, dtype: DTypeLike) -> Array:
    """uint16 bits -> fp32; of 8-bit elements there are two in each, of 32-bit ones a half."""
    if dtype is ml_dtypes.bfloat16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype is TF32:
        return (bits.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return bits.view(dtype).astype(np.float32)


# ---- fragments in registers (9.7.15.5.1.1)
# Register (j, h, c) of a lane is row lane / 4 + 8 h, column 8 j + 2 (lane % 4) + c.


def to_fragment(matrix: Array) -> Array:
    """[16, N] -> [N / 2 registers, 32 lanes]."""
    n = matrix.shape[1]
    return np.ascontiguousarray(matrix.reshape(2, 8, n // 8, 4, 2).transpose(2, 0, 4, 1, 3)).reshape(n // 2, LANES)


def from_fragment(registers: Array) -> Array:
    """[N / 2 registers, 32 lanes] -> [16, N]."""
    n = 2 * len(registers)
    return registers.reshape(n // 8, 2, 2, 8, 4).transpose(1, 3, 0, 4, 2).reshape(16, n)


def rows_defined(w: Warp, slots: list[int]) -> Array:
    """Returns which of a warp's 16 rows of a fragment are defined; slots alternate as (.., h, c)."""
    masks = [w.D[s] for s in slots]
    if all(m == FULL for m in masks):
        return np.ones(16, bool)
    lanes = np.stack([lanes_of(m) for m in masks])  # [registers, lanes]
    half = np.arange(len(slots)) // 2 % 2 if len(slots) > 4 else np.arange(len(slots)) % 2
    return np.concatenate([lanes[half == h].all(0).reshape(8, 4).all(1) for h in (0, 1)])


# ---- products


@dataclass(eq=False)
class Product:
    """One wgmma of a warpgroup, from the first warp that issues it."""

    line: int
    place: int  # among those of its warpgroup
    key: tuple[int, bool, int, int]  # operands on which all warps must agree
    n: int
    d: tuple[int, ...]  # slots of the accumulator
    a: tuple[int, ...]  # slots of A, where it is in registers
    accumulates: bool
    clock: Clock | None = None
    warps: int = 0  # how many have issued it
    fragments: dict[int, tuple[Array, Array]] = field(default_factory=dict)  # A by warp: values, rows that are defined
    initial: dict[int, tuple[Array, Array]] = field(default_factory=dict)  # D by warp
    op: AsyncOp | None = None

    def __str__(self) -> str:
        return f"the wgmma of line {self.line}"

    @property
    def complete(self) -> bool:
        return self.op is not None and self.op.done


@dataclass(eq=False)
class Chain:
    """The products of one warp on one accumulator, from the first on: what holds its registers."""

    last: Product

    def __str__(self) -> str:
        return str(self.last)


@dataclass(eq=False)
class Accumulator:
    values: Array  # fp32 [64, n]
    defined: Array  # [64]


@dataclass(eq=False)
class Warpgroup:
    number: int
    products: list[Product] = field(default_factory=list)
    accumulators: dict[tuple[int, ...], Accumulator] = field(default_factory=dict)

    def name(self, w: Warp) -> str:
        return f"wgmma of warpgroup {self.number} of CTA {w.cta.number}"


@dataclass(eq=False)
class Issued:
    """The products that one warp has issued."""

    group: Warpgroup
    count: int = 0
    open: list[Product] = field(default_factory=list)
    groups: list[list[Product]] = field(default_factory=list)
    fenced: dict[int, Array] = field(default_factory=dict)  # slot of a product -> as it was at the last wgmma.fence


def issued_by(w: Warp) -> Issued:
    if (mine := w.extra.get("wgmma")) is None:
        groups = w.cta.extra.setdefault("warpgroups", {})
        group = groups.setdefault(w.number // 4, Warpgroup(w.number // 4))
        mine = w.extra["wgmma"] = Issued(group)
    return mine


@instruction("wgmma.fence.sync.aligned")
def fence(i: Instruction, d: Decoder) -> Step:
    """9.7.15.7.1: orders this warp's accesses of registers before the products that follow."""
    i.only()

    def step(w: Warp) -> None:
        w.converged(i.opcode)
        R = w.R
        issued_by(w).fenced = {s: R[s] for s in d.fenced}

    return step


def check_fenced(w: Warp, mine: Issued, slots: tuple[int, ...]) -> None:
    R, fenced = w.R, mine.fenced
    for s in slots:
        if R[s] is not fenced.get(s):
            raise Race(f"register {w.code.name_of(s)} was written with no wgmma.fence between that and this product")


@instruction("wgmma.mma_async.sync.aligned")
def product(i: Instruction, d: Decoder) -> Step:
    shape, *kinds = i.mods
    m, n, k = (int(x) for x in shape[1:].replace("n", " ").replace("k", " ").split())
    if m != 64 or kinds[0] != "f32" or kinds[1] != kinds[2] or kinds[1] not in DTYPES:
        raise d.fail(i.opcode)
    dtype, depth = DTYPES[kinds[1]], K_BYTES // 2
    if k * np.dtype(dtype).itemsize != K_BYTES:
        raise d.fail(i.opcode)
    accumulator = tuple(d.vector(i.args[0], "f32", sink=True))
    if len(accumulator) != n // 2:
        raise d.fail(f"{len(accumulator)} registers for 64 x {n}")
    in_registers = isinstance(i.args[1], tuple)
    a_slots = tuple(d.vector(i.args[1], "b32")) if in_registers else ()
    a_desc = None if in_registers else d.slot(i.args[1], "b64")
    d.fenced.update((*accumulator, *a_slots))
    b_desc = d.slot(i.args[2], "b64")
    scale, negated = d.predicate(i.args[3])
    signs = [d.immediate(x) for x in i.args[4:6]]
    majors = [d.immediate(x) for x in i.args[6:]] or [0, 0]  # 8-bit operands are K-major
    if in_registers and len(majors) == 1:
        majors = [0, *majors]

    def step(w: Warp) -> None:
        w.converged("wgmma")
        mine = issued_by(w)
        group = mine.group
        w.demand(scale, "whether to accumulate")
        accumulates = bool(w.R[scale][0]) ^ negated
        a = 0 if a_desc is None else w.uniform(a_desc, np.uint64, "a descriptor")
        b = w.uniform(b_desc, np.uint64, "a descriptor")
        key = (i.line, accumulates, a, b)
        if mine.count == len(group.products):
            group.products.append(Product(i.line, mine.count, key, n, accumulator, a_slots, accumulates))
        p = group.products[mine.count]
        mine.count += 1
        if p.key != key:
            raise Misuse(f"the warps of warpgroup {group.number} issue different products: {p.key} and {key}")
        rank = w.number % 4
        chain = w.held.get(accumulator[0], (None,))[0]
        if isinstance(chain, Chain) and chain.last.d == accumulator:
            chain.last = p
        else:
            for s in accumulator:
                if s in w.held:
                    raise Race(f"accumulator {w.code.name_of(s)} is still in use by {w.held[s][0]}")
            check_fenced(w, mine, accumulator)
            if accumulates:
                values = np.stack([w.R[s].view(np.float32) for s in accumulator])
                p.initial[rank] = from_fragment(values), rows_defined(w, list(accumulator))
            w.hold(accumulator, Chain(p))
        if a_slots:
            check_fenced(w, mine, a_slots)
            for s in a_slots:
                w.check_read(s)
            bits = np.stack([w.R[s].view(np.uint32) for s in a_slots])
            half = bits.view(np.uint16).reshape(4, LANES, 2).transpose(0, 2, 1).reshape(8, LANES)  # (j, h, c) by lane
            p.fragments[rank] = widen(from_fragment(np.ascontiguousarray(half)), dtype), rows_defined(w, list(a_slots))
        w.hold(a_slots, p, writes=False)
        mine.open.append(p)
        if p.clock is None:
            p.clock = w.clock.copy()
        else:
            p.clock.meet(w.clock)
        p.warps += 1
        if (tape := w.machine.tape) is not None:
            tape.arrives(group.name(w), phase=p.place)
            if p.warps == 4:
                tape.completes(group.name(w))
        if p.warps == 4:
            issue(w, p, group, a, b)

    def issue(w: Warp, p: Product, group: Warpgroup, a: int, b: int) -> None:
        smem = w.cta.smem
        before = group.products[p.place - 1].op if p.place else None

        def run(op: AsyncOp) -> None:
            if a_desc is None:
                parts = [p.fragments[r] for r in range(4)]
                left, defined = np.concatenate([v for v, _ in parts]), np.concatenate([v for _, v in parts])
            else:
                x = Descriptor.decode(a)
                left = fetch(smem, x, 64, depth, bool(majors[0]), dtype)
                parts_of_a = words_by_warp(x, depth, bool(majors[0]))
                known = [smem.shadow.read(Part.of(op, r), words, partial=True) for r, words in enumerate(parts_of_a)]
                defined = np.concatenate([rows_known(part, bool(majors[0])) for part in known])
            x = Descriptor.decode(b)
            right = fetch(smem, x, n, depth, bool(majors[1]), dtype)
            if not smem.shadow.read(op, chunks_of(x, n, depth, bool(majors[1]))[1]).all():
                raise Undefined("operand B has elements that are not defined")
            right = right.T
            for factor in signs:
                if factor == -1:
                    left = -left
            # BLAS adds float32 in an order that depends on where a row stands; in float64 nothing is rounded that shows
            values = (left.astype(np.float64) @ right.astype(np.float64)).astype(np.float32)
            accumulator_ = group.accumulators.get(p.d)
            if accumulator_ is None and p.accumulates:
                parts = [p.initial[r] for r in range(4)]
                accumulator_ = Accumulator(np.concatenate([v for v, _ in parts]), np.concatenate([v for _, v in parts]))
            if p.accumulates:
                assert accumulator_ is not None
                values += accumulator_.values
                defined = defined & accumulator_.defined
            group.accumulators[p.d] = Accumulator(values, defined)
            p.fragments.clear()
            p.initial.clear()

        p.op = w.issue(
            "wgmma",
            f"{shape} of warpgroup {group.number}",
            run,
            after=() if before is None else (before,),
            reader=w.cta.first_stream + min(group.number, 2),
            clock=p.clock,
        )
        p.op.product = slice(first := w.index - w.number % 4, first + 4), p.place + 1

    return step


@lru_cache(maxsize=4096)
def words_by_warp(x: Descriptor, depth: int, mn_major: bool) -> tuple[Array, ...]:
    """The words of the 16 rows of A that each warp reads."""
    chunks, _ = chunks_of(x, 64, depth, mn_major)
    parts = np.split(chunks, 4, axis=1 if mn_major else 0)
    return tuple((part[..., None] * 4 + np.arange(4)).ravel() for part in parts)


def rows_known(known: Array, mn_major: bool) -> Array:
    """Returns which of a warp's 16 rows of A are defined, from its words."""
    if mn_major:
        return np.repeat(np.all(known.reshape(16, 2, 4), 0).ravel(), 2)
    return np.asarray(known.reshape(16, -1).all(1))


@dataclass
class Part:
    """The reads of a product that it makes for one warp: those of its rows of A. All warps read B."""

    clock: Clock
    proxy: str
    reader: int
    number: int  # of its event
    atomic: bool = False

    @staticmethod
    def of(op: AsyncOp, rank: int) -> Part:
        assert op.product is not None
        warps, count = op.product
        one = slice(warps.start + rank, warps.start + rank + 1)
        return Part(op.clock, op.proxy, op.reader, op.new_event((one, count)))

    def event(self) -> int:
        return self.number


@instruction("wgmma.commit_group.sync.aligned")
def commit(i: Instruction, d: Decoder) -> Step:
    i.only()

    def step(w: Warp) -> None:
        w.converged(i.opcode)
        mine = issued_by(w)
        mine.groups.append(mine.open)
        mine.open = []

    return step


@instruction("wgmma.wait_group.sync.aligned")
def wait(i: Instruction, d: Decoder) -> Step:
    """9.7.15.7.3: until at most this many of the warp's latest groups are pending. Their registers come back."""
    i.only()
    keep = d.immediate(i.args[0])

    def step(w: Warp) -> Wait | None:
        w.converged(i.opcode)
        mine = issued_by(w)
        wanted = [p for group in mine.groups[: len(mine.groups) - keep] for p in group]
        if wanted and not wanted[-1].complete:  # they happen in order
            return Wait(lambda: wanted[-1].complete, lambda: unfinished(wanted))
        if wanted and w.machine.tape is not None:
            w.machine.tape.passes(mine.group.name(w), wanted[-1].place)
        for p in wanted:
            assert p.op is not None
            w.learn(p.op)
            w.clock.seen[3, w.index] = p.place + 1
            give_back(w, mine.group, p)
        del mine.groups[: len(mine.groups) - keep]
        return None

    return step


def unfinished(wanted: list[Product]) -> str:
    late = next(p for p in wanted if not p.complete)
    return f"{late}, which {late.warps} of 4 warps have issued" if late.warps < 4 else f"{late}"


def give_back(w: Warp, group: Warpgroup, p: Product) -> None:
    """Registers of p that no later product holds return to the warp."""
    w.release(p.a, p)
    chain = w.held.get(p.d[0], (None,))[0]
    if not isinstance(chain, Chain) or chain.last is not p:
        return
    w.release(p.d, chain)
    result = group.accumulators[p.d]
    rows = slice(16 * (w.number % 4), 16 * (w.number % 4) + 16)
    fragment = to_fragment(result.values[rows])
    known = result.defined[rows]
    masks = [FULL, FULL]
    if not known.all():
        for h in (0, 1):
            lanes = np.repeat(known[8 * h : 8 * h + 8], 4)
            masks[h] = int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")
    for n, slot in enumerate(p.d):
        w.R[slot], w.D[slot] = fragment[n], masks[n // 2 % 2]
    waiting = w.cta.extra.setdefault("returned", {}).setdefault(id(p), set())
    waiting.add(w.number)
    if len(waiting) == 4:
        del group.accumulators[p.d]
