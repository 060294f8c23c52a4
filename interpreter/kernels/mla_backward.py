"""Backward kernels of latent attention in the interpreter: a launch, and the errors of its gradients."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jax_dsv4_fmha._host import fixed_point
from jax_dsv4_fmha._host.gradients import unshuffle_accumulator_columns
from kernels.abi import MlaBackward

from ..machine import scheduler
from ..machine.reductions import add_cleared, additions
from ..machine.state import Array, Machine, new_memory
from . import gradients, native
from .launch import Kernel, machine
from .verdict import Wrong

KEYS_OF_TILE = 64
MARGIN = 1 + 2.0**-6  # of a bound


@dataclass
class Launch:
    """A machine that is about to run a backward kernel on operands."""

    machine: Machine
    operands: gradients.Operands
    scale: float
    units: list[
        Array
    ]  # of fixed point, to 1, for every source those of its keys; empty where sums are in floating point
    bounds: bool = False  # whether it makes bounds, with one unit

    def run(self) -> tuple[Array, ...]:
        """`results`, once the machine has run."""
        scheduler.run(self.machine)
        return self.results()

    def results(self) -> tuple[Array, ...]:
        """dq, and for every source dkv; or a bound of each key, NaN where it is marked."""
        attention = self.operands.attention
        results = []
        for i, keys in enumerate(attention.sources):
            sums = self.sums(i)
            if self.bounds:
                found = sums.view(np.uint64).reshape(*keys.k.shape[:-1], 1)
                results.append(np.where(found >> np.uint64(63), np.nan, found / np.float64(self.units[0][0])))
                continue
            if self.units:
                of_source = jnp.asarray(sums.view(np.uint32).reshape(keys.k.shape)), jnp.asarray(self.units[i])
                sums = np.asarray(fixed_point.to_float32(*of_source))
            results.append(unshuffle_accumulator_columns(sums.view(np.float32).reshape(keys.k.shape)))
        if self.bounds:
            return tuple(results)
        written = self.machine.memory.named("dq")
        return written.bytes[: written.size].view(attention.q.dtype).reshape(attention.q.shape), *results

    def sums(self, source: int) -> Array:
        buffer = self.machine.memory.named(f"dkv{source}")
        return buffer.bytes[: buffer.size]

    def added(self) -> list[Array]:
        """Returns how often each number of every dkv, or each bound, was added to."""
        found = []
        for i, keys in enumerate(self.operands.attention.sources):
            often = additions(self.machine.memory.named(f"dkv{i}"))[: self.sums(i).size // 4]
            often = often.reshape(*keys.k.shape[:-1], -1)
            found.append(often[..., :1] if self.bounds else unshuffle_accumulator_columns(often))
        return found


def launch(
    kernel: Kernel[MlaBackward], x: gradients.Operands, *, processors: int = 2, seed: int = 0, record: bool = False
) -> Launch:
    """A launch on this many processors."""
    a, memory, v, scale = x.attention, new_memory(), kernel.variant, kernel.variant.d**-0.5
    given = {"q": a.q, "dout": x.given_do, "lse": x.lse, "sink_factor": x.sink_factor, "delta": x.delta}
    if a.table is not None:
        given["table"] = a.table
    units: list[Array] = []
    if v.deterministic:
        q, do, lse, sink_factor, delta, *k = map(
            jnp.asarray, (a.q, x.do, x.lse, x.sink_factor, x.delta, *(keys.k for keys in a.sources))
        )
        rows, of_bounds = fixed_point.of_rows(q, do, lse, sink_factor, delta, k, scale)
        units = [np.asarray(of_bounds)]
        if v.bounds:
            given |= zip(("sink_factor", "delta", "table"), map(np.asarray, rows), strict=True)
        else:  # as the kernel of bounds gives them
            units = [units_of(bound[..., 0], of_bounds) for bound in gradients.bounds(x, scale)]
        given["resolution"] = np.concatenate([y.ravel() for y in units])
    for i, keys in enumerate(a.sources):
        given |= {f"k{i}": keys.k, f"from{i}": keys.seen_from, f"to{i}": keys.seen_to}
    addresses = {name: memory.add(name, array) for name, array in given.items()}
    if not v.bounds:
        addresses["dq"] = memory.add("dq", None, a.q.nbytes)
    for i, keys in enumerate(a.sources):
        addresses[f"dkv{i}"] = add_cleared(memory, f"dkv{i}", 8 * keys.k[..., 0].size if v.bounds else 4 * keys.k.size)
    tiles = {name: kernel.facts[name] for name in ("tile_m", "tile_n", "cluster")}
    plan = native.plan(v, a.shape, scale, **tiles, processors=processors, addresses=addresses)
    return Launch(machine(kernel, plan, memory, seed=seed, record=record), x, scale, units, v.bounds)


def units_of(bounds: Array, of_bounds: jnp.ndarray) -> Array:
    """The units of keys, of bounds in float64."""
    integers = np.ceil(bounds * float(of_bounds[0]) * MARGIN).astype(np.uint64)
    return np.asarray(fixed_point.resolution(jnp.asarray(integers[..., None].view(np.uint32)), of_bounds))


def judge(run: Launch, got: tuple[Array, ...]) -> None:
    """Raises Wrong unless all gradients are right and every number of a key was added to equally often."""
    faults = [text for i, added in enumerate(run.added()) for text in uneven(f"dkv{i}", added)]
    x = run.operands
    if run.bounds:
        for i, (bound, want) in enumerate(zip(got, gradients.bounds(x, run.scale), strict=True)):
            faults += wrong_bounds(f"bound{i}", bound, want)
        if faults:
            raise Wrong("; ".join(faults))
        return
    for name, wrong, g, want in gradients.wrong(got, x, run.scale):
        if wrong.any():
            faults.append(describe_dq(wrong, g, want, x) if name == "dq" else describe_dkv(name, wrong, g, want))
    if faults:
        raise Wrong("; ".join(faults))


def wrong_bounds(name: str, got: Array, want: Array) -> list[str]:
    """Keys whose bound is below the sum, or far above it."""
    with np.errstate(invalid="ignore"):
        wrong = ~((got >= want) & (got <= want * (MARGIN + 2.0**-6) + 1e-30))
    if not wrong.any():
        return []
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return [
        f"{name} is wrong of {wrong.sum()} of {wrong.size} keys, first of {at[:3]}: {got[at]:.6g} of {want[at]:.6g}"
    ]


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
