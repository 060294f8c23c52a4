"""Products of one warp (PTX ISA 9.7.14.5 mma.sync), by fragments in registers: m16n8k16 of 16-bit numbers,
and m16n8k8 of tf32."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .decode import Decoder, Step, instruction
from .parser import Instruction
from .state import FULL, LANES, Array, Warp
from .wgmma import TF32, from_fragment, to_fragment, widen

DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


@instruction("mma.sync.aligned.m16n8k16")
def product(i: Instruction, d: Decoder) -> Step:
    """d = a b + c. Sums are rounded once, as those of `wgmma` here; a result is defined if all operands are."""
    kinds = i.mods
    if kinds[:3] != ("row", "col", "f32") or kinds[3] != kinds[4] or kinds[3] not in DTYPES or kinds[5:] != ("f32",):
        raise d.fail(i.opcode)
    dtype = DTYPES[kinds[3]]
    targets = d.vector(i.args[0], "f32", sink=True)
    a_slots, b_slots = (tuple(d.vector(x, "b32")) for x in i.args[1:3])
    c_slots = tuple(d.vector(i.args[3], "f32"))
    if [len(x) for x in (targets, a_slots, b_slots, c_slots)] != [4, 4, 2, 4]:
        raise d.fail("wanted 4, 4, 2 and 4 registers")

    def halves(w: Warp, slots: tuple[int, ...]) -> Array:
        """[2 numbers of each register, 32 lanes], widened."""
        bits = np.stack([w.read(s, np.uint32) for s in slots])
        pairs = np.ascontiguousarray(bits).view(np.uint16).reshape(len(slots), LANES, 2)
        return widen(np.ascontiguousarray(pairs.transpose(0, 2, 1)).reshape(2 * len(slots), LANES), dtype)

    def step(w: Warp) -> None:
        w.converged(i.opcode)
        a, b = from_fragment(halves(w, a_slots)), halves(w, b_slots)
        # register (h, c) of a lane is row 8 h + 2 (lane % 4) + c, column lane / 4
        b = b.reshape(2, 2, 8, 4).transpose(0, 3, 1, 2).reshape(16, 8)
        c = from_fragment(np.stack([w.read(s, np.float32) for s in c_slots]))
        sums = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32) + c
        known = all(w.D[s] == FULL for s in (*a_slots, *b_slots, *c_slots))
        for target, values in zip(targets, to_fragment(sums), strict=True):
            w.put(target, values.copy(), FULL if known else 0)

    return step


@instruction("mma.sync.aligned.m16n8k8")
def product_of_tf32(i: Instruction, d: Decoder) -> Step:
    """d = a b + c, as above; of a and b the lower 13 bits do not count."""
    if i.mods != ("row", "col", "f32", "tf32", "tf32", "f32"):
        raise d.fail(i.opcode)
    targets = d.vector(i.args[0], "f32", sink=True)
    a_slots, b_slots = (tuple(d.vector(x, "b32")) for x in i.args[1:3])
    c_slots = tuple(d.vector(i.args[3], "f32"))
    if [len(x) for x in (targets, a_slots, b_slots, c_slots)] != [4, 4, 2, 4]:
        raise d.fail("wanted 4, 4, 2 and 4 registers")

    def numbers(w: Warp, slots: tuple[int, ...]) -> Array:
        return widen(np.stack([w.read(s, np.uint32) for s in slots]), TF32).astype(np.float64)

    def step(w: Warp) -> None:
        w.converged(i.opcode)
        # register 2 c + h of a lane is row lane / 4 + 8 h, column lane % 4 + 4 c
        a = numbers(w, a_slots).reshape(2, 2, 8, 4).transpose(1, 2, 0, 3).reshape(16, 8)
        b = numbers(w, b_slots).reshape(2, 8, 4).transpose(0, 2, 1).reshape(8, 8)  # c: row lane % 4 + 4 c
        c = from_fragment(np.stack([w.read(s, np.float32) for s in c_slots]))
        sums = (a @ b).astype(np.float32) + c
        known = all(w.D[s] == FULL for s in (*a_slots, *b_slots, *c_slots))
        for target, values in zip(targets, to_fragment(sums), strict=True):
            w.put(target, values.copy(), FULL if known else 0)

    return step
