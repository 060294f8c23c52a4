"""The backward kernels for separate K and V in the interpreter: three launches in a row, as ffi/ plans them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jax_dsv4_fmha._host import gradients as raw
from kernels.abi import MhaBackward, TileSpans

from ..machine import scheduler
from ..machine.reductions import add_cleared
from ..machine.state import Array, Machine, new_memory
from . import gradients, native
from .launch import Kernel, machine

Step = MhaBackward | TileSpans


def run(
    kernels: Mapping[str, Kernel[Step]], x: gradients.Operands, scale: float, *, seed: int = 0
) -> tuple[Array, ...]:
    """dq, dk and dv, or where one array is K and V dq and the sum of both; the kernels are by op."""
    keys, seen = x.attention.sources[0], tiles_seen(kernels, x, scale, seed=seed)
    if "mha_dqdkdv" in kernels:
        sums, dk, *dv = run_step(kernels["mha_dqdkdv"], x, scale, seen, seed=seed)
        return dq_of_sums(sums, scale).astype(x.attention.q.dtype), *(y.reshape(keys.k.shape) for y in (dk, *dv))
    dk, *dv = run_step(kernels["mha_dkdv"], x, scale, seen, seed=seed)
    (dq,) = run_step(kernels["mha_dq"], x, scale, seen, seed=seed)
    return dq, *(part.reshape(keys.k.shape) for part in (dk, *dv))


def dq_of_sums(sums: Array, scale: float) -> Array:
    """dq of what `mha_dqdkdv` leaves."""
    return np.asarray(np.float32(scale) * raw.unshuffle_accumulator_columns(sums))


def tiles_seen(kernels: Mapping[str, Kernel[Step]], x: gradients.Operands, scale: float, *, seed: int = 0) -> Array:
    """Runs `tile_spans`, and returns what it leaves for the kernel of keys."""
    (tile_m,) = {kernels[op].facts["tile_m"] for op in ("mha_dqdkdv", "mha_dkdv") if op in kernels}
    (seen,) = run_step(kernels["tile_spans"], x, scale, None, seed=seed, tile_m=tile_m)
    return seen


def run_step(
    kernel: Kernel[Step],
    x: gradients.Operands,
    scale: float,
    seen: Array | None,
    *,
    tile_m: int | None = None,
    seed: int = 0,
) -> tuple[Array, ...]:
    """The results of one launch."""
    step, results = launch(kernel, x, scale, seen, tile_m=tile_m, seed=seed)
    scheduler.run(step)
    found = {name: step.memory.named(name) for name in results}
    return tuple(
        found[name].bytes[: found[name].size].view(like.dtype).reshape(like.shape) for name, like in results.items()
    )


def launch(
    kernel: Kernel[Step],
    x: gradients.Operands,
    scale: float,
    seen: Array | None,
    *,
    tile_m: int | None = None,
    seed: int = 0,
) -> tuple[Machine, dict[str, Array]]:
    """A machine that is about to run it, and like what its results are."""
    a, memory = x.attention, new_memory()
    (keys,) = a.sources
    given = {"q": a.q, "dout": x.do, "k0": keys.k, "v0": keys.v, "from0": keys.seen_from, "to0": keys.seen_to}
    given |= {"lse": x.lse, "sink_factor": x.sink_factor, "delta": x.delta} | ({} if seen is None else {"seen": seen})
    shape = a.shape
    of_keys = {"dk": keys.k} | ({} if keys.v is keys.k else {"dv": keys.k})
    results: dict[str, Array] = {
        "tile_spans": {"seen": np.empty((shape.b, shape.s_q * (shape.h_q // shape.h_kv), 2), np.int32)},
        "mha_dkdv": of_keys,
        "mha_dqdkdv": {"sums": np.empty(a.q.shape, np.float32)} | of_keys,
        "mha_dq": {"dq": a.q},
    }[kernel.variant.op]
    addresses = {name: memory.add(name, array) for name, array in given.items()}
    for name, like in results.items():
        if name == "sums":
            addresses["dq"] = add_cleared(memory, name, like.nbytes)
        else:
            addresses[name] = memory.add(name, None, like.nbytes)
    tiles = {"tile_m": tile_m or kernel.facts["tile_m"], "tile_n": kernel.facts["tile_n"], "addresses": addresses}
    if isinstance(kernel.variant, TileSpans):
        plan = native.plan_tile_spans(shape, **tiles)
    else:
        about = {"processors": 2, "cluster": kernel.facts["cluster"]}
        plan = native.plan_mha_backward(kernel.variant, shape, scale, **about, **tiles)
    return machine(kernel, plan, memory, seed=seed), results
