"""Loads and stores of tensor memory, and what orders them and products (PTX ISA 9.7.16).

tcgen05.ld and st move lanes of TMEM between it and a warp's registers, within a CTA. They are asynchronous, as products
are (`products.py`); `tmem.py` says what orders them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from .barriers import arrive, lookup
from .clusters import ranks
from .decode import Decoder, Step, instruction
from .hazards import Clock, Misuse
from .parser import Address, Arg, Instruction
from .rules import Rule
from .state import FULL, LANES, RANK_SHIFT, SMEM_BASE, Array, AsyncOp, MBarrier, Wait, Warp, lanes_of
from .tmem import COLUMNS, Access, Tmem, group_of, issuer, tmem_of

REGISTERS = {"32x32b": 1, "16x32bx2": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}  # of a thread, for .x1

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
        for load in mine.loads:
            mine.deliver(load)
        for op in mine.used:
            mine.waited(op)
        mine.loads.clear()
        mine.used.clear()
        w.scoreboard = None
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
            mine.waited(op)
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
            address = int(w.read(base, w.width(base))[lane]) + offset
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
            op = w.issue("tcgen05.commit", what, run, after=pending, clock=clock)
            mine.committed(lane, op)

    return step


# ---- loads and stores (9.7.16.2.3, 9.7.16.8)


@lru_cache
def cells(shape: str, count: int, split: int) -> tuple[Array, Array]:
    """(lanes, columns) of registers x threads, from the address on."""
    thread, register = np.arange(LANES), np.arange(count)[:, None]
    if shape == "32x32b":
        return np.broadcast_to(thread, (count, LANES)), np.broadcast_to(register, (count, LANES))
    if shape == "16x32bx2":
        return np.broadcast_to(thread % 16, (count, LANES)), register + thread // 16 * split
    if shape == "16x64b":
        return np.broadcast_to(thread // 4 + 8 * (thread % 2), (count, LANES)), 2 * register + thread // 2 % 2
    if shape == "16x128b":
        return thread // 4 + 8 * (register % 2), register // 2 * 4 + thread % 4
    assert shape == "16x256b"
    return thread // 4 + 8 * (register // 2 % 2), register // 4 * 8 + 2 * (thread % 4) + register % 2


def movement(i: Instruction, d: Decoder, registers: Arg) -> tuple[list[int], Callable[[Warp, Tmem], Array]]:
    """(registers, the words that a warp's access means)"""
    shape, times, *more = i.mods
    if shape not in REGISTERS or more != ["b32"]:
        raise d.fail(f"shape {shape} of {i.opcode}")
    load = "tcgen05.ld" in i.opcode
    slots, count = d.vector(registers, "b32", sink=load), int(times[1:]) * REGISTERS[shape]
    if len(slots) != count:
        raise d.fail(f"{len(slots)} registers for {times}")
    base, offset = d.address(next(x for x in i.args if isinstance(x, Address)))
    split = d.immediate(i.args[2] if load else i.args[1]) if shape == "16x32bx2" else 0

    def words(w: Warp, tmem: Tmem) -> Array:
        lane, column = divmod(w.uniform(base, np.uint32, "an address in TMEM") + offset, 1 << 16)
        first = 32 * (w.number % 4)
        if Rule.OWN_LANES not in w.machine.rules:
            lane = first + lane % 32
        if lane != first and (lane != first + 16 or shape == "32x32b"):
            raise Misuse(f"{shape} at lane {lane} by a warp that may access lanes {first}..{first + 31}")
        lanes, columns = cells(shape, count, split)
        tmem.check(range(column, column + int(columns.max()) + 1), "loads" if load else "stores to")
        return (lane + lanes) * COLUMNS + column + columns

    return slots, words


def form_of(i: Instruction, words: Array) -> str:
    """Says in words which cells are moved; and from where, if that is not the first of the warp's lanes."""
    lane = int(words.min()) // COLUMNS % LANES
    return ".".join(i.mods[:2]) + (f", lane {lane}" if lane else "")


def renamed_first(d: Decoder, loaded: tuple[str, ...]) -> None:
    """The compiler puts moves of a load's registers before the wait for it, and next to the load. To the assembler they
    are other names, not reads: here they come after the wait, if nothing but addresses and other loads stand between.
    """
    code, first = d.program.code, d.index + 1
    between = ("mov.", "add.", "or.", "tcgen05.ld.")
    last = next(n for n in range(first, len(code)) if not code[n].opcode.startswith(between))
    if code[last].opcode.startswith("tcgen05.wait::ld") and not any(
        first <= n <= last for n in d.program.labels.values()
    ):

        def is_renaming(i: Instruction) -> bool:
            given = i.args[1] if i.opcode.startswith("mov.") else ()
            return not set(loaded).isdisjoint(given if isinstance(given, tuple) else (given,))

        code[first : last + 1] = sorted(code[first : last + 1], key=is_renaming)


@instruction("tcgen05.ld.sync.aligned")
def load(i: Instruction, d: Decoder) -> Step:
    """The registers are in flight until tcgen05.wait::ld."""
    slots, where = movement(i, d, i.args[0])
    registers = i.args[0]
    renamed_first(d, registers if isinstance(registers, tuple) else (str(registers),))

    def step(w: Warp) -> None:
        w.converged(i.opcode)
        tmem, mine = tmem_of(w.cta), issuer(w)
        words, clock, result = where(w, tmem), mine.clock(), {}

        def run(op: AsyncOp) -> None:
            known = tmem.shadow.read(Access(clock, w.number, op), words.ravel(), partial=True)
            result["values"], result["defined"] = tmem.words32[words], known.reshape(words.shape)

        before = tuple(op for op, _, _ in mine.loads[-1:])
        op = w.issue("tcgen05.ld", f"load of {form_of(i, words)}", run, after=before)
        w.hold(slots, op)
        mine.loads.append((op, slots, result))
        if Rule.WAIT_LD not in w.machine.rules:
            w.scoreboard = mine

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

        what = f"store of {form_of(i, words)}"
        mine.stores.append(w.issue("tcgen05.st", what, run, after=mine.stores[-1:]))

    return step
