"""Loads, stores, atomics and cp.async (PTX ISA 9.7.9.8 ld, 9.7.9.11 st, 9.7 atom and red, 9.7.9.25.3 cp.async).

Every address is checked against its allocation and for alignment, and every word for who wrote it. Stored values that
are not defined make the word undefined in shared memory, and are an error in global memory.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from .barriers import arrive, lookup_all
from .decode import DTYPES, Decoder, Step, bits_of, instruction
from .hazards import Misuse, Race, Undefined, Words
from .parser import Instruction
from .rules import Rule
from .state import FULL, LANES, PARAM_BASE, RANK_SHIFT, Array, AsyncOp, Cta, Wait, Warp, lanes_of

SPACES = ("shared", "shared::cta", "shared::cluster", "global", "param")
HINTS = (
    "relaxed",
    "weak",
    "volatile",
    "cta",
    "cluster",
    "gpu",
    "sys",
    "nc",
    "L1::no_allocate",
    "L1::evict_last",
    "L2::evict_normal",
    "L2::evict_first",
    "L2::evict_last",
    "L2::128B",
    "L2::256B",
)


def size_of(kind: str) -> int:
    return 2 if kind in ("bf16", "f16") else int(re.sub(r"\D", "", kind)) // 8


def wider_than(declared: str | None, kind: str) -> str:
    """The type of a register that holds a value of some type, which may be a wider one's: 9.4.1."""
    return declared if declared is not None and size_of(declared) > size_of(kind) else kind


def lower(x: Array, dtype: DTypeLike) -> Array:
    """The lower bits of registers, as many as the unsigned dtype has."""
    wider = x.dtype.itemsize > np.dtype(dtype).itemsize
    return x.view(f"u{x.dtype.itemsize}").astype(dtype) if wider else x.view(dtype)


def addresses(w: Warp, slot: int, offset: int, what: str) -> Array:
    """int64 addresses of the active lanes."""
    if w.active & ~w.D[slot]:
        w.demand(slot, what)
    x = w.R[slot]
    x = x.view(np.uint32 if x.dtype.itemsize == 4 else np.int64)
    return x.astype(np.int64)[w.lanes] + offset if w.active != FULL else x.astype(np.int64) + offset


def shared_words(w: Warp, at: Array, size: int, what: str, own: bool = False) -> tuple[Cta, Array]:
    """The words of `size` bytes at each address in one CTA's shared memory: numbers [lanes, words].

    `own`: it must be the executing CTA's, for .shared and .shared::cta.
    """
    key = at.tobytes(), size
    if (words := w.cta.places.get(key)) is not None:
        return w.cta, words
    cta, _ = w.cta.at(int(at[0]))
    offsets = at - cta.base
    low, high = int(offsets.min()), int(offsets.max())
    if own and cta is not w.cta:
        raise Misuse(f"{what} in shared memory of CTA {cta.number}, which takes .shared::cluster")
    if (at >> RANK_SHIFT != cta.rank).any():
        raise Misuse(f"{what} in shared memory of several CTAs at once")
    if size > 1 and (bad := offsets & (size - 1)).any():
        low = high = int(offsets[bad != 0][0])
    cta.smem_span(low, size, size, what)
    cta.smem_span(high, size, size, what)
    words = (offsets >> 2)[:, None] + np.arange(max(size // 4, 1))
    if cta is w.cta:
        cta.places[key] = words
    return cta, words


@instruction("ld")
def load(i: Instruction, d: Decoder) -> Step:
    space = next((m for m in i.mods if m in SPACES), None)
    kind = i.mods[-1]
    count = next((int(m[1:]) for m in i.mods if m in ("v2", "v4", "v8")), 1)
    i.only(*SPACES, *HINTS, "v2", "v4", "v8", kind)
    size = size_of(kind)
    held = wider_than(d.program.register_type(str(i.args[0])), kind)
    targets = d.vector(i.args[0], held, sink=True)
    if len(targets) != count or space is None:
        raise d.fail(i.opcode)
    base, offset = d.address(i.args[1])
    dtype, total = DTYPES[f"b{8 * size}"], size * count
    register = DTYPES[bits_of(held)]

    def widened(values: Array) -> Array:
        """As a wider register has them: 9.4.1, of a signed type with the sign."""
        signed = kind[0] == "s" and register().itemsize > size
        return values.view(DTYPES[kind]).astype(f"i{register().itemsize}").view(register) if signed else values

    def spread(w: Warp, data: Array, defined: Array | None) -> None:
        """data: uint8 [active lanes, total]."""
        values = np.ascontiguousarray(data).view(dtype)
        for n, target in enumerate(targets):
            out = np.zeros(LANES, register)
            out[... if w.active == FULL else w.lanes] = widened(values[:, n])
            mask = FULL
            if defined is not None:
                lanes = np.zeros(LANES, bool)
                lanes[w.lanes] = defined[:, n * size // 4 : max((n + 1) * size // 4, n * size // 4 + 1)].all(1)
                mask = int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")
            w.put(target, out, mask)

    def parameter(w: Warp) -> None:
        at = w.uniform(base, np.uint64, "an address of a parameter") + offset - PARAM_BASE
        values = w.machine.params[at : at + total].view(dtype)
        if held != kind:
            values = values.view(DTYPES[kind]).astype(DTYPES[f"s{8 * size_of(held)}"]).view(register)
        for target, value in zip(targets, values, strict=True):
            w.put(target, np.full(LANES, value, register))

    def shared(w: Warp) -> None:
        at = addresses(w, base, offset, "an address")
        cta, words = shared_words(w, at, total, "loads", own=space != "shared::cluster")
        cta.visit(w, "loads from")
        defined = cta.smem.shadow.read(w, words)
        data = cta.smem.words32[words].view(np.uint8).reshape(len(words), -1)
        if size < 4:
            data = data[np.arange(len(data))[:, None], (at & 3)[:, None] + np.arange(total)]
        spread(w, data, None if defined.all() else defined)

    def global_(w: Warp) -> None:
        at = addresses(w, base, offset, "an address")
        data = np.empty((len(at), total), np.uint8)
        for buffer, which, offsets in w.machine.memory.find_all(at, total, "loads"):
            data[which] = buffer.read(w, offsets, total)
        spread(w, data, None)

    return {"param": parameter, "global": global_}.get(space, shared)


@instruction("st")
def store(i: Instruction, d: Decoder) -> Step:
    space = next((m for m in i.mods if m in SPACES), None)
    kind = i.mods[-1]
    count = next((int(m[1:]) for m in i.mods if m in ("v2", "v4", "v8")), 1)
    i.only(*SPACES, *HINTS, "v2", "v4", "v8", kind)
    size = size_of(kind)
    names = i.args[1] if isinstance(i.args[1], tuple) else (i.args[1],)
    sources = [d.slot(name, wider_than(d.program.register_type(str(name)), kind)) for name in names]
    if len(sources) != count or space in (None, "param"):
        raise d.fail(i.opcode)
    base, offset = d.address(i.args[0])
    dtype, total = DTYPES[f"b{8 * size}"], size * count

    def values(w: Warp) -> Array:
        for slot in sources:
            w.check_read(slot)
        return np.stack([lower(w.R[s], dtype)[w.lanes] for s in sources], 1).view(np.uint8)

    def shared(w: Warp) -> None:
        at = addresses(w, base, offset, "an address")
        cta, words = shared_words(w, at, total, "stores", own=space != "shared::cluster")
        cta.visit(w, "stores to")
        if len(at) > 1 and len(np.unique(at)) < len(at):
            data = values(w)
            first = np.unique(at, return_index=True, return_inverse=True)
            if (data != data[first[1]][first[2]]).any():
                raise Race("two lanes store different values at the same address")
        refuse_barriers(cta, words)
        defined: Array | bool = True
        if any(w.active & ~w.D[s] for s in sources):
            lanes = [np.repeat(lanes_of(w.D[s])[w.lanes][:, None], max(size // 4, 1), 1) for s in sources]
            defined = np.concatenate(lanes, 1)
        cta.smem.shadow.write(w, words, defined)
        if size >= 4:
            cta.smem.words32[words] = values(w).view(np.uint32)
        else:
            cta.smem.bytes[(at - cta.base)[:, None] + np.arange(total)] = values(w)

    def global_(w: Warp) -> None:
        at = addresses(w, base, offset, "an address")
        for slot in sources:
            w.demand(slot, "what is stored to global memory")
        data = values(w)
        for buffer, which, offsets in w.machine.memory.find_all(at, total, "stores"):
            buffer.write(w, offsets, data[which])

    return global_ if space == "global" else shared


def refuse_barriers(cta: Cta, words: Words) -> None:
    if cta.barrier_words[words].any():
        raise Misuse("writes over an mbarrier")


ATOMIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "min": min,
    "max": max,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "exch": lambda old, new: new,
}


@instruction("atom", "red")
def atomic(i: Instruction, d: Decoder) -> Step:
    """An atomic on 32-bit integers in shared memory; relaxed, so it tells nobody anything. The lanes go in any
    order.
    """
    kind, name = i.mods[-1], i.mods[-2]
    i.only("shared", "shared::cta", "shared::cluster", "relaxed", "cta", "cluster", "gpu", name, kind)
    if kind not in ("u32", "s32", "b32") or not (name in ATOMIC or name == "cas"):
        raise d.fail(i.opcode)
    returns, own = i.opcode.startswith("atom."), not i.has("shared::cluster")
    target = d.sink(i.args[0], kind) if returns else None
    base, offset = d.address(i.args[int(returns)])
    operands = [d.slot(x, kind) for x in i.args[int(returns) + 1 :]]
    dtype = DTYPES[kind]

    def step(w: Warp) -> None:
        at = addresses(w, base, offset, "an address")
        cta, words = shared_words(w, at, 4, "changes", own)
        refuse_barriers(cta, words)
        for slot in operands:
            w.demand(slot, "an operand of an atomic")
        given = [w.read(slot, dtype)[w.lanes] for slot in operands]
        w.atomic = True
        try:
            cta.visit(w, "changes")
            if not cta.smem.shadow.read(w, words).all():
                raise Undefined("an atomic on what is not defined")
            cta.smem.shadow.write(w, words)
        finally:
            w.atomic = False
        memory, old = cta.smem.words32.view(dtype), np.zeros(LANES, dtype)
        for n in w.machine.rng.sample(range(len(at)), len(at)):
            word, (x, *more) = int(words[n, 0]), [int(y[n]) for y in given]
            before = int(memory[word])
            after = ATOMIC[name](before, x) if not more else more[0] if before == x else before
            old[np.flatnonzero(w.lanes)[n]] = before
            memory[word] = np.array(after & 0xFFFFFFFF, np.uint32).view(dtype)
        if target is not None:
            w.put(target, old.view(np.uint32))

    return step


# ---- cp.async: a copy of a lane's own, by the generic proxy


def copies_of(w: Warp) -> dict[str, Any]:
    """Those in no group yet, in groups, and not known to be done; and a bit for each of all."""
    return w.extra.setdefault("cp.async", {"open": [], "groups": [], "pending": [], "bits": 0})


@instruction("cp.async.ca", "cp.async.cg")
def copy(i: Instruction, d: Decoder) -> Step:
    """16 bytes (or 4, 8) a lane; zeros replace bytes after the source's size."""
    i.only("shared", "shared::cta", "global", "L2::cache_hint", "L2::64B", "L2::128B", "L2::256B")
    to, to_offset = d.address(i.args[0])
    source, source_offset = d.address(i.args[1])
    size = d.immediate(i.args[2])
    given = d.slot(i.args[3], "u32") if len(i.args) - i.has("L2::cache_hint") > 3 else None

    def step(w: Warp) -> None:
        at = addresses(w, to, to_offset, "an address")
        cta, words = shared_words(w, at, size, "copies to", own=True)
        refuse_barriers(cta, words)
        sizes = np.full(len(at), size)
        if given is not None:
            w.demand(given, "a size")
            sizes = w.read(given, np.uint32).astype(np.int64)[w.lanes]
        if (sizes > size).any():
            raise Misuse(f"copies {int(sizes.max())} of {size} bytes")
        sources = addresses(w, source, source_offset, "an address")
        reads = sizes > 0

        def run(op: AsyncOp) -> None:
            data = np.zeros((len(at), size), np.uint8)
            for buffer, which, offsets in w.machine.memory.find_all(sources[reads], size, "copies from"):
                data[np.flatnonzero(reads)[which]] = buffer.read(op, offsets, size)
            data[np.arange(size) >= sizes[:, None]] = 0
            cta.smem.shadow.write(op, words)
            cta.smem.words32[words] = data.view(np.uint32)

        op = w.issue("cp.async", f"cp.async {len(at)} x {size} bytes", run, proxy="generic")
        state = copies_of(w)
        state["open"].append(op)
        state["pending"].append(op)
        state["bits"] |= 1 << op.number

    return step


@instruction("cp.async.mbarrier.arrive")
def copy_arrive(i: Instruction, d: Decoder) -> Step:
    """9.7.14.16.15: each lane arrives when all its copies so far are complete.

    They are known to who waits, and so is what the warp had been told when it issued them; its own stores are not
    (OWN_STORES). Products may read what they wrote after a fence.proxy.async (CP_ASYNC_PROXY).
    """
    i.only("noinc", "shared", "shared::cta", "b64")
    if not i.has("noinc"):
        raise d.fail("without .noinc")
    base, offset = d.address(i.args[0])

    def step(w: Warp) -> None:
        groups = lookup_all(w, addresses(w, base, offset, "the address of an mbarrier"))
        state = copies_of(w)
        before = state["pending"] = [op for op in state["pending"] if not op.done]
        everything = state["bits"]

        def run(op: AsyncOp) -> None:
            clock = op.clock.copy()
            if Rule.OWN_STORES in w.machine.rules:
                clock.forget(w.index)
            clock.ops |= everything
            if Rule.CP_ASYNC_PROXY not in w.machine.rules:
                clock.fenced_ops |= everything
            for bar, lanes in groups:
                arrive(bar, lanes, clock, op)

        w.issue("cp.async arrival", f"arrives on {groups[0][0]}", run, after=before, proxy="generic")

    return step


@instruction("cp.async.commit_group")
def commit(i: Instruction, d: Decoder) -> Step:
    i.only()

    def step(w: Warp) -> None:
        state = copies_of(w)
        state["groups"].append(state["open"])
        state["open"] = []

    return step


@instruction("cp.async.wait_group", "cp.async.wait_all")
def wait_copies(i: Instruction, d: Decoder) -> Step:
    i.only()
    keep = d.immediate(i.args[0]) if i.args else 0

    def step(w: Warp) -> Wait | None:
        state = copies_of(w)
        if not i.args:
            state["groups"].append(state["open"])
            state["open"] = []
        wanted = [op for group in state["groups"][: len(state["groups"]) - keep] for op in group]
        if all(op.done for op in wanted):
            for op in wanted:
                w.learn(op)
            return None
        return Wait(lambda: all(op.done for op in wanted), lambda: "its cp.async groups")

    return step
