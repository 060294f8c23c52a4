"""Attention to few queries on the interpreter: both launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kernels.abi import RowColumns, RowScores

from ..machine import scheduler
from ..machine.state import Array, Machine, new_memory
from . import attention, native
from .launch import Kernel, add_outputs, machine, outputs_of

LEFT = ("scores", "tops", "gathered", "counts")


def typical(variant: RowScores) -> attention.Operands:
    """Two queries: one sees nothing, the other one more tiles of keys than the second kernel has places for."""
    whole = f"{variant.op}_{variant.arch}_d{variant.d}_{variant.dtype}" + f"_{variant.packing}".rstrip("_")
    return attention.operands(native.variant_of(whole), b=1, s_q=2, h_q=33, s_kv=230, s_kv1=90, topk=64 * 13)


def room_for(x: attention.Operands) -> int:
    """The tiles of keys that a query may see."""
    return sum(-(-(k.seen_from.shape[2] if k.seen_from.ndim == 3 else k.k.shape[1]) // 64) for k in x.sources)


def left_by_scores(x: attention.Operands, room: int) -> dict[str, Array]:
    """Arrays like those that the first launch leaves."""
    (b, s_q, h_q, d), tile = x.q.shape, 64
    rows = (b, s_q, -(-h_q // tile), room)
    return {
        "scores": np.zeros((*rows, tile * tile), np.float32),
        "tops": np.zeros((*rows, tile), np.float32),
        "gathered": np.zeros((b, s_q, room, tile, d), x.q.dtype),
        "counts": np.zeros((b, s_q), np.int32),
    }


def score(
    kernel: Kernel[RowScores], x: attention.Operands, *, room: int = 0, processors: int = 2, seed: int = 0
) -> Machine:
    """About to make the first launch."""
    memory, room = new_memory(), room or room_for(x)
    given = {"q": x.q}
    for n, keys in enumerate(x.sources):
        given |= {f"k{n}": keys.given, f"v{n}": keys.v, f"from{n}": keys.seen_from, f"to{n}": keys.seen_to}
    addresses = {name: memory.add(name, array) for name, array in given.items()}
    addresses |= add_outputs(memory, left_by_scores(x, room))
    tiles = {name: kernel.facts[name] for name in ("tile_m", "tile_n")}
    plan = native.plan_row_scores(kernel.variant, x.shape, room, **tiles, processors=processors, addresses=addresses)
    return machine(kernel, plan, memory, seed=seed)


def add_columns(kernel: Kernel[RowColumns], x: attention.Operands, scored: Machine, *, seed: int = 0) -> Machine:
    """About to make the second one, of what the first has left."""
    memory, left = new_memory(), {name: scored.memory.named(name) for name in LEFT}
    room = left["tops"].size // (4 * 64) // (x.q[..., 0, 0].size * -(-x.q.shape[2] // 64))
    addresses = {name: memory.add(name, y.bytes[: y.size].copy()) for name, y in left.items()}
    addresses["sink"] = memory.add("sink", x.sink)
    addresses |= add_outputs(memory, outputs_of(x))
    tiles = {name: kernel.facts[name] for name in ("tile_m", "tile_n")}
    scale = kernel.variant.d**-0.5
    plan = native.plan_row_columns(kernel.variant.dtype, x.shape, room, scale, **tiles, addresses=addresses)
    return machine(kernel, plan, memory, seed=seed)


def run(
    scores: Kernel[RowScores],
    columns: Kernel[RowColumns],
    x: attention.Operands,
    *,
    seed: int = 0,
    edits: tuple[Callable[[str], str], Callable[[str], str]] = (str, str),
    between: Callable[[Array, Array], None] = lambda scores, gathered: None,
    **how: int,
) -> tuple[Array, Array]:
    """o and lse. `edits` plant faults in the PTX of either kernel, `between` in scores and keys, by tiles on axis -2 or
    -3, that the first one leaves.
    """
    scores, columns = replace(scores, ptx=edits[0](scores.ptx)), replace(columns, ptx=edits[1](columns.ptx))
    scheduler.run(scored := score(scores, x, seed=seed, **how))
    like = left_by_scores(x, how.get("room", 0) or room_for(x))
    between(*(view(scored, name, like[name]) for name in ("scores", "gathered")))
    scheduler.run(added := add_columns(columns, x, scored, seed=seed))
    o, lse = (view(added, name, like) for name, like in outputs_of(x).items())
    return o, lse


def view(ran: Machine, name: str, like: Array) -> Array:
    """An array that a machine has, of this shape and dtype."""
    found = ran.memory.named(name)
    return found.bytes[: found.size].view(like.dtype).reshape(like.shape)
