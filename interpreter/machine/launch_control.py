"""Clusters that another takes over before they begin (PTX ISA 9.7.14.17 clusterlaunchcontrol).

Where a kernel has these instructions, only the first cluster begins at once. The others begin when the scheduler lets
them, or never: `try_cancel` may take one, whose work the asking cluster then does.
"""

from __future__ import annotations

import numpy as np

from .barriers import complete_tx, lookup
from .decode import Decoder, Step, instruction
from .parser import Instruction
from .state import LANES, RANK_SHIFT, AsyncOp, Warp

BYTES = 16  # of an answer: whether it is one, and x, y, z of the cluster's first CTA


@instruction("clusterlaunchcontrol.try_cancel")
def try_cancel(i: Instruction, d: Decoder) -> Step:
    """Writes the answer to shared memory, of all CTAs of the cluster with .multicast, and counts its bytes there."""
    everywhere = "multicast::cluster::all"
    i.only("async", "shared::cta", "mbarrier::complete_tx::bytes", everywhere, "b128")
    (base, offset), (bar_base, bar_offset) = d.address(i.args[0]), d.address(i.args[1])

    def step(w: Warp) -> None:
        at = w.uniform(base, np.uint32, "a destination") + offset
        _, place = w.cta.at(at)
        _, bar_place = w.cta.at(w.place(bar_base, "the address of an mbarrier") + bar_offset)
        ctas = w.cta.cluster if i.has(everywhere) else [w.cta]
        words = w.cta.smem_span(place, BYTES, BYTES, "an answer of")
        bars = [lookup(w, cta.rank << RANK_SHIFT | bar_place) for cta in ctas]

        def run(op: AsyncOp) -> None:
            taken = w.machine.take_late()
            answer = (0, 0, 0, 0) if taken is None else (1, *taken)
            for cta, bar in zip(ctas, bars, strict=True):
                cta.visit(op, "answers to")
                cta.smem.shadow.write(op, words)
                cta.smem.words32[words] = answer
                complete_tx(bar, BYTES, op.completed())

        w.issue("tma", "asks for another cluster's work", run, ctas=ctas)

    return step


@instruction("clusterlaunchcontrol.query_cancel.is_canceled")
def is_canceled(i: Instruction, d: Decoder) -> Step:
    i.only("pred", "b128")
    target, answer = d.sink(i.args[0], "pred"), d.slot(i.args[1], "b128")
    return lambda w: w.put(target, words_of(w, answer)[:, 0] != 0, w.D[answer])


FIRST = "clusterlaunchcontrol.query_cancel.get_first_ctaid"


@instruction(FIRST, *(f"{FIRST}::{axis}" for axis in "xyz"))
def first_ctaid(i: Instruction, d: Decoder) -> Step:
    """Reads the first CTA's place on an axis; without an axis on all three, and then a number without a meaning."""
    i.only("v4", "b32", "b128")
    axes = [n for n, axis in enumerate("xyz") if f"ctaid::{axis}" in i.opcode] or [0, 1, 2, 2]
    targets, answer = d.vector(i.args[0], "b32", sink=True), d.slot(i.args[1], "b128")
    if len(targets) != len(axes):
        raise d.fail(f"{len(targets)} registers, wanted {len(axes)}")

    def step(w: Warp) -> None:
        for target, axis in zip(targets, axes, strict=True):
            w.put(target, np.ascontiguousarray(words_of(w, answer)[:, 1 + axis]), w.D[answer])

    return step


def words_of(w: Warp, slot: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint32]]:
    return w.read(slot, np.uint32).reshape(LANES, 4)
