"""Blackwell's tensor cores (PTX ISA 9.7.16): products, loads and stores of tensor memory, and their order.

A product D (128 or 64 x N, fp32) = A (x 16, TMEM or shared memory) B (16 x N, shared memory) + D is issued by one
thread; tcgen05.ld and st move 32 lanes of it by a warp. All of them are asynchronous; `tmem.py` says what orders them.

With .cta_group::2 one thread of a pair of CTAs issues a product of 256 or 128 rows. Each CTA has half of the rows of A
and of D, in its own memories and at the same places in both, and half of the columns of B (9.7.16.10.5, data path
layouts A and B). Of 128 rows, the columns of D are folded: the second half
lies in lanes 64 to 127. tcgen05.ld and st stay within a CTA.

A row of A that is not defined (rows that TMA did not load) makes that row of D undefined, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .barriers import MBarrier, arrive, lookup
from .clusters import ranks
from .decode import Decoder, Step, instruction
from .hazards import Clock, Misuse, Undefined, Unsupported
from .parser import Address, Arg, Instruction
from .state import FULL, LANES, RANK_SHIFT, SMEM_BASE, Array, AsyncOp, Cta, Wait, Warp, lanes_of, mask_of
from .tmem import COLUMNS, Access, Tmem, group_of, issuer, members, tmem_of
from .wgmma import DTYPES, Descriptor, chunks_of, fetch, widen

SWIZZLES = {0: 0, 2: 128, 4: 64, 6: 32}
K = 16  # depth of a product of 16-bit elements


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
    i.only("cta_group::1", "cta_group::2", "mbarrier::arrive::one", "shared::cluster", "multicast::cluster", "b64")
    group_of(i, d)
    base, offset = d.address(i.args[0])
    mask = d.slot(i.args[1], "b16") if i.has("multicast::cluster") else None

    def step(w: Warp) -> None:
        w.demand(base, "the address of an mbarrier")
        mine = issuer(w)
        for lane in np.flatnonzero(w.lanes).tolist():
            address = int(w.read(base, np.uint32)[lane]) + offset
            bars = [lookup(w, address)]
            if mask is not None:  # the mbarriers at the same place in all CTAs of the mask
                _, place = w.cta.at(address)
                ctas = ranks(w, w.uniform(mask, np.uint16, "a mask of CTAs"))
                bars = [lookup(w, cta.rank << RANK_SHIFT | place) for cta in ctas]
            clock = w.clock.copy()
            clock.forget(w.index)
            bits = mine.product_bits.get(lane, 0)
            clock.ops |= bits
            clock.fenced_ops |= bits
            pending = mine.products[lane] = [op for op in mine.products.get(lane, []) if not op.done]

            def run(op: AsyncOp, bars: list[MBarrier] = bars, clock: Clock = clock) -> None:
                clock.ops |= 1 << op.number
                for bar in bars:
                    arrive(bar, 1, clock, op)

            what = f"arrival at mbarrier +{bars[0].offset - SMEM_BASE}" + f" of {len(bars)} CTAs" * (len(bars) > 1)
            w.issue("tcgen05.commit", what, run, after=pending, clock=clock)

    return step


# ---- loads and stores (9.7.16.2.3, 9.7.16.8)


@lru_cache
def cells(shape: str, count: int, split: int) -> tuple[Array, Array]:
    """(lanes, columns) of registers x threads, from the address on."""
    thread, register = np.arange(LANES), np.arange(count)[:, None]
    if shape == "32x32b":
        return np.broadcast_to(thread, (count, LANES)), np.broadcast_to(register, (count, LANES))
    return np.broadcast_to(thread % 16, (count, LANES)), register + thread // 16 * split  # 16x32bx2


def movement(i: Instruction, d: Decoder, registers: Arg) -> tuple[list[int], Callable[[Warp, Tmem], Array]]:
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
            result["values"], result["defined"] = tmem.words32[words], known.reshape(words.shape)

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
        defined: Array | bool = True
        if any(w.D[s] != FULL for s in slots):
            defined = np.stack([lanes_of(w.D[s]) for s in slots]).ravel()

        def run(op: AsyncOp) -> None:
            tmem.shadow.write(Access(clock, w.number, op), words.ravel(), defined)
            tmem.words32[words] = values

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
    def decode(bits: int, group: int) -> InstructionDescriptor:
        def part(low: int, size: int) -> int:
            return bits >> low & (1 << size) - 1

        m, n = part(24, 5) << 4, part(17, 6) << 3
        a, b = part(7, 3), part(10, 3)
        if part(0, 4) or part(4, 2) != 1 or a != b or a > 1 or part(6, 1) or part(23, 1) or part(29, 3):
            raise Misuse(f"instruction descriptor {bits:#010x}: wanted dense fp16 or bf16 operands and fp32")
        unit = 32 if group == 2 else 8 if m == 64 else 16
        if m not in (64 * group, 128 * group) or not 0 < n <= 256 or n % unit:
            raise Misuse(f"instruction descriptor {bits:#010x}: a product of {m} x {n} with .cta_group::{group}")
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
def matrix(m: int, lane: int, column: int, columns: int, folded: bool = False) -> Array:
    """The words of rows x columns of one CTA (9.7.16.10.5, data path layouts A, B, D and F).

    64 rows take 16 lanes of every 32; `folded`, lanes 0 to 63, and the second half of their columns lanes 64 to 127.
    """
    row, place = np.arange(m)[:, None], np.arange(columns)
    if folded:
        return (row + place // (columns // 2) * 64) * COLUMNS + column + place % (columns // 2)
    lanes = lane + (row if m == 128 else row // 16 * 32 + row % 16)
    return lanes * COLUMNS + column + place


@instruction("tcgen05.mma")
def product(i: Instruction, d: Decoder) -> Step:
    collectors = (f"collector::a::{x}" for x in ("fill", "use", "lastuse", "discard"))
    i.only("cta_group::1", "cta_group::2", "kind::f16", *collectors)
    group = group_of(i, d)
    d_base, d_offset = d.address(i.args[0])
    a_address = d.address(i.args[1]) if isinstance(i.args[1], Address) else None
    a_desc = d.slot(i.args[1], "b64") if a_address is None else 0
    b_desc, descriptor = d.slot(i.args[2], "b64"), d.slot(i.args[3], "b32")
    masks = d.vector(i.args[4], "b32") if isinstance(i.args[4], tuple) else []
    if len(masks) not in (0, 4 * group):
        raise d.fail(f"{len(masks)} masks of lanes, wanted {4 * group}")
    accumulate, negated = d.predicate(i.args[-1])

    def step(w: Warp) -> None:
        if w.active.bit_count() != 1:
            raise Misuse(f"a product is issued by {w.active.bit_count()} threads, wanted one")
        lane, ctas = w.active.bit_length() - 1, members(w.cta, group)
        shape = InstructionDescriptor.decode(w.uniform(descriptor, np.uint32, "an instruction descriptor"), group)
        rows, folded = shape.m // group, shape.m == 128 and group == 2
        if any(w.uniform(s, np.uint32, "a mask of lanes") for s in masks):
            raise Misuse("a product that leaves lanes of D out")
        w.demand(accumulate, "whether to accumulate")
        adds = bool(w.R[accumulate][lane]) ^ negated
        at = w.uniform(d_base, np.uint32, "an address in TMEM") + d_offset
        row, column = divmod(at, 1 << 16)
        if row not in ((0, 16) if group == 1 and rows == 64 else (0,)):
            raise Misuse(f"D of {rows} rows at lane {row}")
        for cta in ctas:
            tmem_of(cta).check(range(column, column + (shape.n // 2 if folded else shape.n)), "has D in")
        d_words = matrix(rows, row, column, shape.n, folded)
        if a_address is None:
            a_words = None
            a = w.uniform(a_desc, np.uint64, "a descriptor")
        else:
            a_row, a_column = divmod(w.uniform(a_address[0], np.uint32, "an address in TMEM") + a_address[1], 1 << 16)
            if folded:
                raise Unsupported("A of a pair's 128 rows in TMEM")
            if a_row != row:
                raise Misuse(f"A at lane {a_row}, D at lane {row}")
            for cta in ctas:
                tmem_of(cta).check(range(a_column, a_column + K // 2), "has A in")
            a_words = matrix(rows, a_row, a_column, K // 2)
            a = 0
        b = w.uniform(b_desc, np.uint64, "a descriptor")
        mine = issuer(w)
        key = (lane, at, shape.m, shape.n)
        last, bits = mine.chains.get(key, (None, 0))
        clock = mine.clock()
        clock.ops |= bits

        def run(op: AsyncOp) -> None:
            right = operand_b(op, ctas, shape, b)
            for cta in ctas:
                cta.visit(op, "multiplies in")
                access = Access(clock, w.cta.warp_total * (1 if cta is w.cta else 2) + w.number, op)
                multiply(op, access, cta, shape, rows, a, a_words, right, d_words, adds)

        what = f"product {shape.m}x{shape.n}x{K} into lane {row}, column {column}"
        reader = w.cta.first_stream + w.cta.rank % 2
        op = w.issue("tcgen05.mma", what, run, after=() if last is None else (last,), reader=reader)
        clock.ops |= 1 << op.number  # it reads D before it writes it
        mine.chains[key] = op, bits | 1 << op.number
        mine.products.setdefault(lane, []).append(op)
        mine.product_bits[lane] = mine.product_bits.get(lane, 0) | 1 << op.number

    return step


def operand_b(op: AsyncOp, ctas: list[Cta], shape: InstructionDescriptor, b: int) -> Array:
    """fp32 [N, K], an equal share of N from each CTA."""
    x, share, mn_major, parts = smem_descriptor(b), shape.n // len(ctas), shape.mn_major[1], []
    for cta in ctas:
        parts.append(fetch(cta.smem, x, share, K, mn_major, DTYPES[shape.dtype]))
        if not cta.smem.shadow.read(op, chunks_of(x, share, K, mn_major)[1]).all():
            raise Undefined("operand B has elements that are not defined")
    right = np.concatenate(parts)
    return -right if shape.negated else right


def multiply(
    op: AsyncOp,
    access: Access,
    cta: Cta,
    shape: InstructionDescriptor,
    m: int,
    a: int,
    a_words: Array | None,
    right: Array,
    d_words: Array,
    adds: bool,
) -> None:
    """The rows of one CTA."""
    smem, tmem, dtype = cta.smem, tmem_of(cta), DTYPES[shape.dtype]
    if a_words is None:
        if shape.mn_major[0]:
            raise Misuse("an MN-major A, which this interpreter does not know")
        x = smem_descriptor(a)
        left = fetch(smem, x, m, K, False, dtype)
        rows = smem.shadow.read(op, chunks_of(x, m, K, False)[1], partial=True).reshape(m, -1).all(1)
    else:
        known = tmem.shadow.read(access, a_words.ravel(), partial=True)
        left = widen(np.ascontiguousarray(tmem.words32[a_words]).view(np.uint16), dtype)
        rows = known.reshape(m, -1).all(1)
    with np.errstate(all="ignore"):
        values = left @ right.T
        if adds:
            known = tmem.shadow.read(access, d_words.ravel())
            rows = rows & known.reshape(m, -1).all(1)
            values += tmem.words32[d_words].view(np.float32)
    tmem.shadow.write(access, d_words.ravel(), np.repeat(rows, shape.n))
    tmem.words32[d_words] = values.astype(np.float32).view(np.uint32)
