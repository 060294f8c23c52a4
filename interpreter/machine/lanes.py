"""Between the lanes of a warp (PTX ISA 9.7.9.6 shfl.sync, 9.7.14.9 vote, 9.7.14.11 activemask, 9.7.14.12 redux,
9.7.14.15 elect, 9.7.14.5.15 ldmatrix, 9.7.14.5.16 stmatrix).

All members of a member mask must be on the same way. What a vote or a reduction makes of a lane that is not defined is
some value: kernels may vote on rows that do not exist, when the outcome only saves work.
"""

from __future__ import annotations

import functools

import numpy as np

from .barriers import meet
from .decode import Decoder, Step, instruction
from .memory import addresses, refuse_barriers, shared_words
from .parser import Instruction
from .state import FULL, LANES, Array, Warp, lanes_of, mask_of

ME = np.arange(LANES)


@instruction("shfl.sync")
def shuffle(i: Instruction, d: Decoder) -> Step:
    i.only("idx", "bfly", "up", "down", "b32")
    mode = i.mods[0]
    targets = str(i.args[0]).split("|")
    target = d.sink(targets[0], "b32")
    valid = d.sink(targets[1], "pred") if len(targets) > 1 else None
    value, by, clamp, members = (
        d.slot(i.args[1], "b32"),
        d.slot(i.args[2], "u32"),
        d.slot(i.args[3], "u32"),
        d.slot(i.args[4], "u32"),
    )

    @functools.lru_cache(maxsize=64)
    def ways(by: bytes, clamp: bytes) -> tuple[Array, Array]:
        """The lane from which each gets its value, and whether that is another lane."""
        b, c = (np.frombuffer(x, np.uint32).astype(np.int64) for x in (by, clamp))
        b, segment = b & 31, c >> 8 & 31
        low, high = ME & segment, ME & segment | c & 31 & ~segment
        source = {"idx": low | b & ~segment, "bfly": ME ^ b, "up": ME - b, "down": ME + b}[mode]
        inside = source >= (c & 31 | low if mode == "up" else 0)
        inside &= True if mode == "up" else source <= high
        return np.where(inside, source, ME), inside

    def step(w: Warp) -> None:
        if w.held:
            w.check_read(value)
        meet(w, members, i)
        source, inside = ways(w.read(by, np.uint32).tobytes(), w.read(clamp, np.uint32).tobytes())
        defined = w.D[value]
        if defined & w.active != FULL:
            defined = mask_of((lanes_of(defined & w.active))[source])
        w.put(target, w.R[value][source], defined)
        if valid is not None:
            w.put(valid, inside)

    return step


@instruction("vote.sync")
def vote(i: Instruction, d: Decoder) -> Step:
    i.only("any", "all", "uni", "ballot", "pred", "b32")
    mode = i.mods[0]
    target = d.sink(i.args[0], "b32" if mode == "ballot" else "pred")
    p, negated = d.predicate(i.args[1])
    members = d.slot(i.args[2], "u32")

    def step(w: Warp) -> None:
        meet(w, members, i)
        votes = (mask_of(w.R[p]) ^ (FULL if negated else 0)) & w.active
        if mode == "ballot":
            w.put(target, np.full(LANES, votes, np.uint32))
        else:
            answer = {"any": votes != 0, "all": votes == w.active, "uni": votes in (0, w.active)}[mode]
            w.put(target, np.full(LANES, answer))

    return step


@instruction("redux.sync")
def reduce(i: Instruction, d: Decoder) -> Step:
    name, kind = i.mods
    dtype = {"s32": np.int32, "u32": np.uint32, "b32": np.uint32}.get(kind)
    functions: dict[str, np.ufunc] = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    if dtype is None or name not in functions:
        raise d.fail(i.opcode)
    target, value, members = d.sink(i.args[0], kind), d.slot(i.args[1], kind), d.slot(i.args[2], "u32")

    def step(w: Warp) -> None:
        meet(w, members, i)
        result = functions[name].reduce(w.read(value, dtype)[w.lanes])
        defined = FULL if w.D[value] & w.active == w.active else 0
        w.put(target, np.full(LANES, result, dtype), defined)

    return step


@instruction("activemask")
def active(i: Instruction, d: Decoder) -> Step:
    i.only("b32")
    target = d.sink(i.args[0], "b32")
    return lambda w: w.put(target, np.full(LANES, w.active, np.uint32))


@instruction("elect.sync")
def elect(i: Instruction, d: Decoder) -> Step:
    """One lane, which one is not said: a lane that the seed picks, if it is a member."""
    i.only()
    names = str(i.args[0]).split("|")
    target, chosen, members = d.sink(names[0], "b32"), d.sink(names[1], "pred"), d.slot(i.args[1], "u32")

    def step(w: Warp) -> None:
        meet(w, members, i)
        lane = w.machine.elected if w.active >> w.machine.elected & 1 else int(np.flatnonzero(w.lanes)[0])
        w.put(target, np.full(LANES, lane, np.uint32))
        w.put(chosen, np.equal(ME, lane))

    return step


@instruction("stmatrix.sync.aligned")
def store_matrix(i: Instruction, d: Decoder) -> Step:
    """8 x 8 matrices of 16 bits: lanes 8 n .. 8 n + 7 give the addresses of the rows of matrix n."""
    i.only("m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16")
    base, offset = d.address(i.args[0])
    sources = d.vector(i.args[1], "b32")
    count, transpose = int(next(m for m in i.mods if m in ("x1", "x2", "x4"))[1:]), i.has("trans")
    if len(sources) != count:
        raise d.fail(f"{len(sources)} registers for {count} matrices")

    def step(w: Warp) -> None:
        w.converged(i.opcode)
        at = addresses(w, base, offset, "an address")[: 8 * count]
        cta, words = shared_words(w, at, 16, "stores", own=True)
        refuse_barriers(cta, words)
        for s in sources:
            w.check_read(s)
        data = np.stack([w.R[s].view(np.uint32) for s in sources])  # [matrix, lane]: row lane / 4, columns 2 (lane % 4)
        defined: Array | bool = True
        if any(w.D[s] != FULL for s in sources):
            defined = np.stack([lanes_of(w.D[s]) for s in sources])
        if transpose:
            square = data.view(np.uint16).reshape(count, 8, 8).transpose(0, 2, 1)
            data = np.ascontiguousarray(square).reshape(count, 64).view(np.uint32)
            if not isinstance(defined, bool):
                defined = np.broadcast_to(np.all(defined, 1, keepdims=True), defined.shape)
        if not isinstance(defined, bool):
            defined = defined.reshape(8 * count, 4)
        cta.smem.shadow.write(w, words, defined)
        cta.smem.words32[words] = data.reshape(8 * count, 4)

    return step


@instruction("ldmatrix.sync.aligned")
def load_matrix(i: Instruction, d: Decoder) -> Step:
    """The other way round; a matrix that is not defined everywhere is defined nowhere."""
    i.only("m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16")
    targets = d.vector(i.args[0], "b32", sink=True)
    base, offset = d.address(i.args[1])
    count, transpose = int(next(m for m in i.mods if m in ("x1", "x2", "x4"))[1:]), i.has("trans")
    if len(targets) != count:
        raise d.fail(f"{len(targets)} registers for {count} matrices")

    def step(w: Warp) -> None:
        w.converged(i.opcode)
        at = addresses(w, base, offset, "an address")[: 8 * count]
        cta, words = shared_words(w, at, 16, "loads", own=True)
        defined = np.asarray(cta.smem.shadow.read(w, words).reshape(count, -1).all(1))
        data = cta.smem.words32[words].reshape(count, 32)
        if transpose:
            square = data.view(np.uint16).reshape(count, 8, 8).transpose(0, 2, 1)
            data = np.ascontiguousarray(square).reshape(count, 64).view(np.uint32)
        for n, target in enumerate(targets):
            w.put(target, data[n].copy(), FULL if defined[n] else 0)

    return step
