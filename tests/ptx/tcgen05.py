"""Blackwell's tensor cores and their memory (PTX ISA 9.7.16), one CTA: allocation, products, loads and stores, order.

TMEM has 128 lanes x 512 columns of 32 bits. A product D (128 or 64 x N, fp32) = A (x 16, TMEM or shared memory)
B (16 x N, shared memory) + D is issued by one thread; tcgen05.ld and st move 32 lanes of it by a warp. All of them are
asynchronous, and nothing but this orders what they do to TMEM (9.7.16.6):

    products of one thread on the same accumulator happen in order
    tcgen05.wait::ld, ::st       what the warp loaded or stored is done, for the warp itself
    tcgen05.commit               arrives at an mbarrier when all earlier products of the thread are done
    fence::before_thread_sync    what the warp knows to be done goes with what it tells from now on
    fence::after_thread_sync     what the warp was told holds for what it does to TMEM from now on

So a warp has a clock of its own for TMEM: it takes over the warp's clock at fence::after, and gives to it at
fence::before. A missing fence, wait or commit is then a Race like any other.

A row of A that is not defined (rows that TMA did not load) makes that row of D undefined, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from .barriers import arrive, lookup
from .decode import Decoder, Step, instruction
from .hazards import Clock, Leak, Misuse, Shadow, Undefined, Words
from .parser import Address, Instruction
from .state import FULL, LANES, SMEM_BASE, Array, AsyncOp, Cta, Wait, Warp, lanes_of, mask_of
from .wgmma import DTYPES, Descriptor, chunks_of, fetch, widen

DATAPATHS, COLUMNS = 128, 512
SWIZZLES = {0: 0, 2: 128, 4: 64, 6: 32}
K = 16  # of a product of 16-bit elements


class TmemShadow(Shadow):
    def describe(self, words: Words, where: Array) -> str:
        assert not isinstance(words, slice)
        lanes, columns = np.divmod(words[where], COLUMNS)
        return f"{self.name} lanes {lanes.min()}..{lanes.max()}, columns {columns.min()}..{columns.max()}"


@dataclass(eq=False)
class Tmem:
    """Of one CTA: the only one on its SM."""

    name: str
    words: Array  # uint32 [lanes * columns]
    shadow: TmemShadow
    allocated: Array  # bool [columns]
    allocations: dict[int, tuple[int, int]] = field(default_factory=dict)  # first column -> (columns, line)
    relinquished: int | None = None  # in which line

    def check(self, columns: range, what: str) -> None:
        if columns.stop > COLUMNS or not self.allocated[columns.start : columns.stop].all():
            raise Misuse(f"{what} TMEM columns {columns.start}..{columns.stop - 1}, which are not allocated")


def tmem_of(cta: Cta) -> Tmem:
    if (tmem := cta.extra.get("tmem")) is None:
        name, size = cta.smem.shadow.name.replace("SMEM", "TMEM"), DATAPATHS * COLUMNS
        shadow = TmemShadow(name, size, 2 * cta.warp_total, cta.machine.events)
        words = np.full(size, 0xFFFFFFFF, np.uint32)
        tmem = cta.extra["tmem"] = Tmem(name, words, shadow, np.zeros(COLUMNS, bool))
        cta.machine.at_exit(lambda: check_freed(tmem))
    return tmem


def check_freed(tmem: Tmem) -> None:
    for first, (columns, line) in tmem.allocations.items():
        raise Leak(f"{tmem.name} columns {first}..{first + columns - 1}, allocated in line {line}, are never freed")


@dataclass(eq=False)
class Issuer:
    """Of one warp."""

    known: Clock  # for what it does to TMEM
    own: int = 0  # bits of its operations that it has waited for
    loads: list[tuple[AsyncOp, list[int], Any]] = field(default_factory=list)  # not waited for: (.., registers, result)
    stores: list[AsyncOp] = field(default_factory=list)
    products: dict[int, list[AsyncOp]] = field(default_factory=dict)  # by lane, not known to be done
    product_bits: dict[int, int] = field(default_factory=dict)  # by lane, of all
    chains: dict[tuple[int, ...], tuple[AsyncOp, int]] = field(
        default_factory=dict
    )  # by accumulator: last, bits of all

    def clock(self) -> Clock:
        clock = self.known.copy()
        clock.ops |= self.own
        return clock


def issuer(w: Warp) -> Issuer:
    if (mine := w.extra.get("tcgen05")) is None:
        mine = w.extra["tcgen05"] = Issuer(w.clock.copy())
    return mine


@dataclass(eq=False)
class Access:
    """Somebody as TMEM sees him."""

    clock: Clock
    reader: int
    by: AsyncOp | Warp
    proxy: str = "async"

    def event(self) -> int:
        return self.by.event()


# ---- allocation (9.7.16.7.1)


@instruction("tcgen05.alloc")
def allocate(i: Instruction, d: Decoder) -> Step:
    """Writes the address of the first of the columns, which begin at a multiple of their number, to shared memory."""
    i.only("cta_group::1", "sync", "aligned", "shared::cta", "b32")
    base, offset = d.address(i.args[0])
    count = d.slot(i.args[1], "u32")

    def step(w: Warp) -> Wait | None:
        w.converged(i.opcode)
        tmem, columns = tmem_of(w.cta), size_of(w, count)
        if tmem.relinquished is not None:
            raise Misuse(f"allocates TMEM after the right to was given up in line {tmem.relinquished}")
        free = [x for x in range(0, COLUMNS, columns) if not tmem.allocated[x : x + columns].any()]
        if not free:
            return Wait(lambda: False, lambda: f"{columns} columns of TMEM; allocated are {tmem.allocations}")
        tmem.allocated[free[0] : free[0] + columns] = True
        tmem.allocations[free[0]] = columns, i.line
        cta, at = w.cta.at(w.uniform(base, np.uint32, "an address") + offset)
        words = cta.smem_span(at, 4, 4, "writes")
        cta.smem.shadow.write(w, words)
        cta.smem.words[words] = free[0]
        return None

    return step


def size_of(w: Warp, slot: int) -> int:
    columns = w.uniform(slot, np.uint32, "a number of columns")
    if columns not in (32, 64, 128, 256, 512):
        raise Misuse(f"{columns} columns of TMEM, wanted a power of two from 32 to 512")
    return columns


@instruction("tcgen05.dealloc")
def free(i: Instruction, d: Decoder) -> Step:
    i.only("cta_group::1", "sync", "aligned", "b32")
    where, count = d.slot(i.args[0], "u32"), d.slot(i.args[1], "u32")

    def step(w: Warp) -> None:
        w.converged(i.opcode)
        tmem, columns = tmem_of(w.cta), size_of(w, count)
        first = w.uniform(where, np.uint32, "an address in TMEM")
        if tmem.allocations.get(first, (0, 0))[0] != columns:
            raise Misuse(f"frees {columns} columns at {first:#x}; allocated are {tmem.allocations}")
        words = (np.arange(DATAPATHS)[:, None] * COLUMNS + np.arange(first, first + columns)).ravel()
        tmem.shadow.write(Access(issuer(w).clock(), w.number, w), words, defined=False)
        tmem.shadow.writer[words], tmem.shadow.readers[:, words] = 0, 0
        tmem.allocated[first : first + columns] = False
        del tmem.allocations[first]

    return step


@instruction("tcgen05.relinquish_alloc_permit")
def relinquish(i: Instruction, d: Decoder) -> Step:
    i.only("cta_group::1", "sync", "aligned")

    def step(w: Warp) -> None:
        w.converged(i.opcode)
        tmem_of(w.cta).relinquished = i.line

    return step


# ---- order (9.7.16.6, 9.7.16.11, 9.7.16.12)


@instruction("tcgen05.fence::before_thread_sync")
def before(i: Instruction, d: Decoder) -> Step:
    i.only()

    def step(w: Warp) -> None:
        mine = issuer(w)
        w.clock.ops |= mine.own
        w.clock.fenced_ops |= mine.own

    return step


@instruction("tcgen05.fence::after_thread_sync")
def after(i: Instruction, d: Decoder) -> Step:
    i.only()

    def step(w: Warp) -> None:
        issuer(w).known = w.clock.copy()

    return step


@instruction("tcgen05.wait::ld")
def wait_loads(i: Instruction, d: Decoder) -> Step:
    i.only("sync", "aligned")

    def step(w: Warp) -> Wait | None:
        w.converged(i.opcode)
        mine = issuer(w)
        if not all(op.done for op, _, _ in mine.loads):
            return Wait(lambda: all(op.done for op, _, _ in mine.loads), lambda: "its loads from TMEM")
        for op, slots, result in mine.loads:
            mine.own |= 1 << op.number
            w.release(slots, op)
            for slot, values, defined in zip(slots, result["values"], result["defined"], strict=True):
                w.put(slot, values, FULL if defined.all() else mask_of(defined))
        mine.loads.clear()
        return None

    return step


@instruction("tcgen05.wait::st")
def wait_stores(i: Instruction, d: Decoder) -> Step:
    i.only("sync", "aligned")

    def step(w: Warp) -> Wait | None:
        w.converged(i.opcode)
        mine = issuer(w)
        if not all(op.done for op in mine.stores):
            return Wait(lambda: all(op.done for op in mine.stores), lambda: "its stores to TMEM")
        for op in mine.stores:
            mine.own |= 1 << op.number
        mine.stores.clear()
        return None

    return step


@instruction("tcgen05.commit")
def commit(i: Instruction, d: Decoder) -> Step:
    """9.7.16.13: one arrival, once all products that this thread has issued are done. It tells of these, and of what
    they were told, but not of what else the thread has done."""
    i.only("cta_group::1", "mbarrier::arrive::one", "shared::cluster", "b64")
    base, offset = d.address(i.args[0])

    def step(w: Warp) -> None:
        w.demand(base, "the address of an mbarrier")
        mine = issuer(w)
        for lane in np.flatnonzero(w.lanes).tolist():
            bar = lookup(w, int(w.read(base, np.uint32)[lane]) + offset)
            clock = w.clock.copy()
            clock.seen[:, w.index] = 0
            bits = mine.product_bits.get(lane, 0)
            clock.ops |= bits
            clock.fenced_ops |= bits
            pending = mine.products[lane] = [op for op in mine.products.get(lane, []) if not op.done]

            def run(op: AsyncOp, bar: Any = bar, clock: Clock = clock) -> None:
                arrive(bar, 1, clock, op)

            w.issue("tcgen05.commit", f"arrival at mbarrier +{bar.offset - SMEM_BASE}", run, after=pending, clock=clock)

    return step


# ---- loads and stores (9.7.16.2.3, 9.7.16.8)


@lru_cache
def cells(shape: str, count: int, split: int) -> tuple[Array, Array]:
    """(lanes, columns) of registers x threads, from the address on."""
    thread, register = np.arange(LANES), np.arange(count)[:, None]
    if shape == "32x32b":
        return np.broadcast_to(thread, (count, LANES)), np.broadcast_to(register, (count, LANES))
    return np.broadcast_to(thread % 16, (count, LANES)), register + thread // 16 * split  # 16x32bx2


def movement(i: Instruction, d: Decoder, registers: Any) -> tuple[list[int], Callable[[Warp, Tmem], Array]]:
    """(registers, the words that a warp's access means)"""
    shape, times, _ = i.mods
    if shape not in ("32x32b", "16x32bx2"):
        raise d.fail(f"shape {shape} of {i.opcode}")
    load = "tcgen05.ld" in i.opcode
    slots, count = d.vector(registers, "b32", sink=load), int(times[1:])
    if len(slots) != count:
        raise d.fail(f"{len(slots)} registers for {times}")
    base, offset = d.address(next(x for x in i.args if isinstance(x, Address)))
    split = d.immediate(i.args[2] if load else i.args[1]) if shape == "16x32bx2" else 0

    def words(w: Warp, tmem: Tmem) -> Array:
        lane, column = divmod(w.uniform(base, np.uint32, "an address in TMEM") + offset, 1 << 16)
        first = 32 * (w.number % 4)
        if lane != first and (lane != first + 16 or shape == "32x32b"):
            raise Misuse(f"{shape} at lane {lane} by a warp that may access lanes {first}..{first + 31}")
        lanes, columns = cells(shape, count, split)
        tmem.check(range(column, column + int(columns.max()) + 1), "loads" if load else "stores to")
        return (lane + lanes) * COLUMNS + column + columns

    return slots, words


def renamed_first(d: Decoder) -> None:
    """The compiler puts moves of a load's registers before its wait. To the assembler they are other names, not reads:
    here they come after the wait."""
    code, first = d.program.code, d.index + 1
    last = next(n for n in range(first, len(code)) if not code[n].opcode.startswith("mov."))
    if code[last].opcode.startswith("tcgen05.wait::ld") and not any(
        first <= n <= last for n in d.program.labels.values()
    ):
        code.insert(first, code.pop(last))


@instruction("tcgen05.ld.sync.aligned")
def load(i: Instruction, d: Decoder) -> Step:
    """The registers are in flight until tcgen05.wait::ld."""
    slots, where = movement(i, d, i.args[0])
    renamed_first(d)

    def step(w: Warp) -> None:
        w.converged(i.opcode)
        tmem, mine = tmem_of(w.cta), issuer(w)
        words, clock, result = where(w, tmem), mine.clock(), {}

        def run(op: AsyncOp) -> None:
            known = tmem.shadow.read(Access(clock, w.number, op), words.ravel(), partial=True)
            result["values"], result["defined"] = tmem.words[words], known.reshape(words.shape)

        before = tuple(op for op, _, _ in mine.loads[-1:])
        op = w.issue("tcgen05.ld", "load of " + ".".join(i.mods[:2]), run, after=before)
        w.hold(slots, op)
        mine.loads.append((op, slots, result))

    return step


@instruction("tcgen05.st.sync.aligned")
def store(i: Instruction, d: Decoder) -> Step:
    slots, where = movement(i, d, i.args[-1])

    def step(w: Warp) -> None:
        w.converged(i.opcode)
        tmem, mine = tmem_of(w.cta), issuer(w)
        words, clock = where(w, tmem), mine.clock()
        values = np.stack([w.read(s, np.uint32) for s in slots])
        defined: Any = True
        if any(w.D[s] != FULL for s in slots):
            defined = np.stack([lanes_of(w.D[s]) for s in slots]).ravel()

        def run(op: AsyncOp) -> None:
            tmem.shadow.write(Access(clock, w.number, op), words.ravel(), defined)
            tmem.words[words] = values

        mine.stores.append(w.issue("tcgen05.st", "store of " + ".".join(i.mods[:2]), run, after=mine.stores[-1:]))

    return step


# ---- products (9.7.16.4, 9.7.16.5, 9.7.16.10)


@dataclass(frozen=True)
class InstructionDescriptor:
    """Table 42, .kind::f16."""

    m: int
    n: int
    dtype: str
    negated: bool  # A B
    mn_major: tuple[bool, bool]  # A, B

    @staticmethod
    @lru_cache
    def decode(bits: int) -> InstructionDescriptor:
        def part(low: int, size: int) -> int:
            return bits >> low & (1 << size) - 1

        m, n = part(24, 5) << 4, part(17, 6) << 3
        a, b = part(7, 3), part(10, 3)
        if part(0, 4) or part(4, 2) != 1 or a != b or a > 1 or part(6, 1) or part(23, 1) or part(29, 3):
            raise Misuse(f"instruction descriptor {bits:#010x}: wanted dense fp16 or bf16 operands and fp32")
        if m not in (64, 128) or not 0 < n <= 256 or n % (8 if m == 64 else 16):
            raise Misuse(f"instruction descriptor {bits:#010x}: a product of {m} x {n}")
        negated = bool(part(13, 1) ^ part(14, 1))
        return InstructionDescriptor(m, n, ("f16", "bf16")[a], negated, (bool(part(15, 1)), bool(part(16, 1))))


@lru_cache(maxsize=256)
def smem_descriptor(bits: int) -> Descriptor:
    """9.7.16.4.1. In units of 16 bytes; bits 46 to 48 are 0b001."""
    if bits >> 46 & 7 != 1 or bits >> 49 & 0x1F or bits >> 61 not in SWIZZLES:
        raise Misuse(f"shared memory descriptor 0x{bits:016x}")
    return Descriptor(
        (bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, SWIZZLES[bits >> 61]
    )


@lru_cache(maxsize=1024)
def matrix(m: int, lane: int, column: int, columns: int) -> Array:
    """The words of rows x columns. 64 rows take 16 lanes of every 32 (9.7.16.10.5, data path layouts D and F)."""
    row = np.arange(m)
    lanes = lane + (row if m == 128 else row // 16 * 32 + row % 16)
    return lanes[:, None] * COLUMNS + column + np.arange(columns)


@instruction("tcgen05.mma")
def product(i: Instruction, d: Decoder) -> Step:
    i.only("cta_group::1", "kind::f16", *(f"collector::a::{x}" for x in ("fill", "use", "lastuse", "discard")))
    d_base, d_offset = d.address(i.args[0])
    a_address = d.address(i.args[1]) if isinstance(i.args[1], Address) else None
    a_desc = d.slot(i.args[1], "b64") if a_address is None else 0
    b_desc, descriptor = d.slot(i.args[2], "b64"), d.slot(i.args[3], "b32")
    masks = d.vector(i.args[4], "b32") if isinstance(i.args[4], tuple) else []
    accumulate, negated = d.predicate(i.args[-1])

    def step(w: Warp) -> None:
        if w.active.bit_count() != 1:
            raise Misuse(f"a product is issued by {w.active.bit_count()} threads, wanted one")
        lane = w.active.bit_length() - 1
        shape = InstructionDescriptor.decode(w.uniform(descriptor, np.uint32, "an instruction descriptor"))
        if any(w.uniform(s, np.uint32, "a mask of lanes") for s in masks):
            raise Misuse("a product that leaves lanes of D out")
        w.demand(accumulate, "whether to accumulate")
        adds = bool(w.R[accumulate][lane]) ^ negated
        at = w.uniform(d_base, np.uint32, "an address in TMEM") + d_offset
        row, column = divmod(at, 1 << 16)
        if row not in ((0,) if shape.m == 128 else (0, 16)):
            raise Misuse(f"D of {shape.m} rows at lane {row}")
        tmem, mine = tmem_of(w.cta), issuer(w)
        tmem.check(range(column, column + shape.n), "has D in")
        d_words = matrix(shape.m, row, column, shape.n)
        if a_address is None:
            a_words = None
            a = w.uniform(a_desc, np.uint64, "a descriptor")
        else:
            a_row, a_column = divmod(w.uniform(a_address[0], np.uint32, "an address in TMEM") + a_address[1], 1 << 16)
            if a_row != row:
                raise Misuse(f"A at lane {a_row}, D at lane {row}")
            tmem.check(range(a_column, a_column + K // 2), "has A in")
            a_words = matrix(shape.m, a_row, a_column, K // 2)
            a = 0
        b = w.uniform(b_desc, np.uint64, "a descriptor")
        key = (lane, at, shape.m, shape.n)
        last, bits = mine.chains.get(key, (None, 0))
        clock = mine.clock()
        clock.ops |= bits

        def run(op: AsyncOp) -> None:
            access = Access(clock, w.cta.warp_total + w.number, op)
            multiply(op, access, w.cta, tmem, shape, a, a_words, b, d_words, adds)

        what = f"product {shape.m}x{shape.n}x{K} into lane {row}, column {column}"
        op = w.issue("tcgen05.mma", what, run, after=() if last is None else (last,), reader=w.cta.first_stream)
        clock.ops |= 1 << op.number  # it reads D before it writes it
        mine.chains[key] = op, bits | 1 << op.number
        mine.products.setdefault(lane, []).append(op)
        mine.product_bits[lane] = mine.product_bits.get(lane, 0) | 1 << op.number

    return step


def multiply(
    op: AsyncOp,
    access: Access,
    cta: Cta,
    tmem: Tmem,
    shape: InstructionDescriptor,
    a: int,
    a_words: Array | None,
    b: int,
    d_words: Array,
    adds: bool,
) -> None:
    smem, dtype, m, n = cta.smem, DTYPES[shape.dtype], shape.m, shape.n
    if a_words is None:
        if shape.mn_major[0]:
            raise Misuse("an MN-major A, which this interpreter does not know")
        x = smem_descriptor(a)
        left = fetch(smem, x, m, K, False, dtype)
        rows = smem.shadow.read(op, chunks_of(x, m, K, False)[1], partial=True).reshape(m, -1).all(1)
    else:
        known = tmem.shadow.read(access, a_words.ravel(), partial=True)
        left = widen(np.ascontiguousarray(tmem.words[a_words]).view(np.uint16), dtype)
        rows = known.reshape(m, -1).all(1)
    x = smem_descriptor(b)
    right = fetch(smem, x, n, K, shape.mn_major[1], dtype)
    if not smem.shadow.read(op, chunks_of(x, n, K, shape.mn_major[1])[1]).all():
        raise Undefined("operand B has elements that are not defined")
    with np.errstate(all="ignore"):
        values = left @ (-right if shape.negated else right).T
        if adds:
            known = tmem.shadow.read(access, d_words.ravel())
            rows = rows & known.reshape(m, -1).all(1)
            values += tmem.words[d_words].view(np.float32)
    tmem.shadow.write(access, d_words.ravel(), np.repeat(rows, n))
    tmem.words[d_words] = values.astype(np.float32).view(np.uint32)
