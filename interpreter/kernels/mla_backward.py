"""Backward kernels of latent attention in the interpreter: a launch, and the errors of its gradients."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jax_dsv4_fmha._host import fixed_point
from jax_dsv4_fmha._host.gradients import unshuffle_accumulator_columns
from kernels.abi import MlaBackward

from ..machine.reductions import add_cleared, additions
from ..machine.state import Array, Machine, new_memory
from . import gradients, native
from .launch import Kernel, machine
from .verdict import Wrong

KEYS_OF_TILE = 64


@dataclass
class Launch:
    """A machine that is about to run a backward kernel on operands."""

    machine: Machine
    operands: gradients.Operands
    scale: float
    resolution: Array  # empty where sums are in floating point

    def run(self) -> tuple[Array, ...]:
        """`results`, once the machine has run."""
        self.machine.run()
        return self.results()

    def results(self) -> tuple[Array, ...]:
        """dq, and for every source dkv."""
        attention, memory = self.operands.attention, self.machine.memory
        written = memory.named("dq")
        dq = written.bytes[: written.size].view(attention.q.dtype).reshape(attention.q.shape)
        results = []
        for i, keys in enumerate(attention.sources):
            sums = memory.named(f"dkv{i}")
            dkv = sums.bytes[: sums.size].view(np.uint32 if len(self.resolution) else np.float32)
            if len(self.resolution):
                sums_of, resolution = jnp.asarray(dkv.reshape(-1, 2)), jnp.asarray(self.resolution)
                dkv = np.asarray(fixed_point.to_float32(sums_of, resolution, jnp.asarray(dq)))
            results.append(unshuffle_accumulator_columns(dkv.reshape(keys.k.shape)))
        return dq, *results

    def added(self) -> list[Array]:
        """How often a number of each dkv was added to."""
        memory, words32 = self.machine.memory, 1 + len(self.resolution)  # of a sum
        return [
            unshuffle_accumulator_columns(
                additions(memory.named(f"dkv{i}"))[: keys.k.size * words32 : words32].reshape(keys.k.shape)
            )
            for i, keys in enumerate(self.operands.attention.sources)
        ]


def launch(
    kernel: Kernel[MlaBackward], x: gradients.Operands, *, processors: int = 2, seed: int = 0, record: bool = False
) -> Launch:
    """A launch on this many processors."""
    a, memory, scale = x.attention, new_memory(), kernel.variant.d**-0.5
    given = {"q": a.q, "dout": x.given_do, "lse": x.lse, "sink_factor": x.sink_factor, "delta": x.delta}
    if a.table is not None:
        given["table"] = a.table
    resolution = np.zeros(0, np.float32)
    if kernel.variant.deterministic:
        q, do, lse, delta, *k = map(jnp.asarray, (a.q, x.do, x.lse, x.delta, *(keys.k for keys in a.sources)))
        resolution = np.asarray(fixed_point.resolution(q, do, lse, delta, k, scale))
        given["resolution"] = resolution
    for i, keys in enumerate(a.sources):
        given |= {f"k{i}": keys.k, f"from{i}": keys.seen_from, f"to{i}": keys.seen_to}
    addresses = {name: memory.add(name, array) for name, array in given.items()}
    addresses["dq"] = memory.add("dq", None, a.q.nbytes)
    for i, keys in enumerate(a.sources):
        addresses[f"dkv{i}"] = add_cleared(memory, f"dkv{i}", keys.k.size * (4 + 4 * len(resolution)))
    tiles = {name: kernel.facts[name] for name in ("tile_m", "tile_n", "cluster")}
    plan = native.plan(kernel.variant, a.shape, scale, **tiles, processors=processors, addresses=addresses)
    return Launch(machine(kernel, plan, memory, seed=seed, record=record), x, scale, resolution)


def judge(run: Launch, got: tuple[Array, ...]) -> None:
    """Raises Wrong unless all gradients are right and every number of a key was added to equally often."""
    faults = [text for i, added in enumerate(run.added()) for text in uneven(f"dkv{i}", added)]
    x = run.operands
    for name, wrong, g, want in gradients.wrong(got, x, run.scale):
        if wrong.any():
            faults.append(describe_dq(wrong, g, want, x) if name == "dq" else describe_dkv(name, wrong, g, want))
    if faults:
        raise Wrong("; ".join(faults))


def uneven(name: str, added: Array) -> list[str]:
    """Keys of which some columns were added to more seldom than those of other keys, next to the rest of the key: a
    cluster adds some columns once, for all of its CTAs, and others once for each."""
    most = added.max(-1, keepdims=True)
    share = added / np.maximum(most, 1)
    lost = (share < share.max((0, 1, 2))) & (most > 0)
    if not lost.any():
        return []
    b, key, head, _ = (int(i) for i in np.argwhere(lost)[0])
    columns = np.flatnonzero(lost[b, key, head])
    return [
        f"{name}: a reduction is lost: columns {columns[0]}..{columns[-1]} of key {key} were added to "
        f"{added[b, key, head, columns[0]]} times, the others {most[b, key, head, 0]} times"
    ]


def describe_dq(wrong: Array, got: Array, want: Array, x: gradients.Operands) -> str:
    """dq: which rows, and what they look like."""
    rows = wrong.any(-1)
    b, query, head = (int(i) for i in np.argwhere(rows)[0])
    columns = np.flatnonzero(wrong.any((0, 1, 2)))
    some = f", columns {columns[0]}..{columns[-1]}" if columns[0] > 0 else ""
    text = f"dq is wrong in {int(rows.sum())} of {rows.size} rows{some}, first in query {query}, head {head}"
    if x.attention.table is not None and agrees(got[rows], gradients.without_norm(x)[rows]):
        return f"{text}: what it is where the norm's scale is a constant"
    if (factor := factor_of(got[rows], want[rows])) is not None:
        return f"{text}: everywhere {factor:.4g} times what it should be"
    for other in (tuple(at) for at in np.argwhere(np.isfinite(x.lse)).tolist()):
        if other != (b, query, head) and agrees(got[b, query, head], swapped(x, (b, query, head), other)):
            return f"{text}: what it is with the delta of query {other[1]}, head {other[2]}"
    return text


def swapped(x: gradients.Operands, row: tuple[int, ...], other: tuple[int, ...]) -> Array:
    """dq of a row whose delta is another's."""
    one = gradients.row_of(x, row)
    one.delta[:] = x.delta[other]
    return gradients.gradient(one, x.attention.shape.d**-0.5)[0].reshape(-1)


def describe_dkv(name: str, wrong: Array, got: Array, want: Array) -> str:
    """dkv: which keys, and what they look like."""
    keys = wrong.any((0, 2, 3))
    first, last = np.flatnonzero(keys)[[0, -1]]
    columns = np.flatnonzero(wrong.any((0, 1, 2)))
    text = f"{name} is wrong in {int(keys.sum())} of {keys.size} keys, {first}..{last}"
    text += f", columns {columns[0]}..{columns[-1]}"
    excess, width = (got - want)[..., columns[0] : columns[-1] + 1], columns[-1] + 1 - columns[0]
    for tile in range(KEYS_OF_TILE, want.shape[1], KEYS_OF_TILE):  # added to the tile of keys before
        here, there = excess[:, tile : tile + KEYS_OF_TILE], want[:, tile - KEYS_OF_TILE : tile]
        if here.shape[1] < KEYS_OF_TILE:
            break
        for column in range(0, want.shape[-1] - width + 1, width):
            if agrees(summed_by_quads(here), summed_by_quads(there[..., column : column + width])):
                return (
                    f"{text}: keys from {tile} on have in columns {columns[0]}..{columns[-1]} besides their own what "
                    f"those from {tile - KEYS_OF_TILE} on have in columns {column}..{column + width - 1}"
                )
    return text


def summed_by_quads(x: Array) -> Array:
    """Sums over the numbers that lanes exchange before they go out: four columns of a key and of the key 8 after it."""
    whole = np.zeros((x.shape[0], KEYS_OF_TILE, *x.shape[2:]))
    whole[:, : x.shape[1]] = x
    return whole.reshape(x.shape[0], -1, 2, 8, x.shape[2], x.shape[3] // 4, 4).sum((2, -1))


def factor_of(got: Array, want: Array) -> float | None:
    """The factor by which all of it is multiplied, if there is one."""
    factor = float(np.sum(got * want) / max(np.sum(want * want), 1e-300))
    return factor if agrees(got, factor * want) and not 0.9 < factor < 1.1 else None


def agrees(got: Array, want: Array) -> bool:
    norm = np.sum(want * want)
    return bool(np.isfinite(got).all() and norm > 0 and np.sum((got - want) ** 2) < 1e-3 * norm)
