"""Every op as a function of its operands, for tests of transforms: meshes, shardings, gradients, other processes."""

import functools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import (
    Span,
    dot_product_attention,
    dsv4_attention,
    fmha,
    merge,
    sparse_fmha,
)
from tests.helpers import collectives

B, S, S_KV, H, TOPK = 4, 16, 24, 8, 6
KINDS = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit}


@dataclass(frozen=True)
class Case:
    """op(implementation, **operands) -> (o, lse); axes: one letter each, b batch, s queries, h heads, k key heads."""

    op: Callable[..., Any]
    axes: dict[str, str]
    h_kv: int = 1

    def operands(self, d: int = 16, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
        rng = np.random.default_rng(0)
        size = {"b": B, "s": S, "h": H, "k": self.h_kv, "t": S_KV, "d": d, "x": TOPK}

        def array(name: str) -> Any:
            shape = [size[a] for a in self.axes[name]]
            if name in ("start", "stop", "indices", "length"):
                low, high = {"start": (-4, 8), "stop": (4, S_KV + 4), "indices": (-3, S_KV), "length": (0, TOPK + 2)}[
                    name
                ]
                return jnp.asarray(rng.integers(low, high, shape), jnp.int32)
            x = rng.standard_normal(shape)
            return jnp.asarray(x, jnp.float32 if name in ("sink", "lse", "lse2") else dtype)

        return {name: array(name) for name in self.axes}

    def differentiable(self) -> tuple[str, ...]:
        return tuple(name for name in self.axes if name not in ("start", "stop", "indices", "length"))


def _fmha(i, q, k, start, stop, sink, v=None):
    return fmha(q, k, v, span=Span(start, stop), sink=sink, implementation=i)


def _sparse(i, q, kv, indices, length, sink):
    return sparse_fmha(q, kv, shortened(indices, length), sink=sink, implementation=i)


def _fmha_part(i, q, k, start, stop, sink):
    return fmha(q, k, d_v=k.shape[3] * 3 // 4, span=Span(start, stop), sink=sink, implementation=i)


def _sparse_part(i, q, kv, indices, length, sink):
    return sparse_fmha(q, kv, shortened(indices, length), d_v=kv.shape[-1] * 3 // 4, sink=sink, implementation=i)


def shortened(indices, length):
    """These indices, of which a row has so many, and then -1."""
    return jnp.where(jnp.arange(indices.shape[2])[None, None] < length[..., None], indices, -1)


def _layer(i, q, window, kv=None, sink=None, indices=None, length=None, q_offset=8):
    kwargs = {} if kv is None else {"ratio": 4} if indices is None else {"indices": shortened(indices, length)}
    return dsv4_attention(q, window, kv, sink=sink, window=5, q_offset=q_offset, implementation=i, **kwargs)


def _two_passes(i, q, window, kv, sink):
    near, far = Span.sliding_window(q.shape[1], 5, 8), Span.compressed(q.shape[1], 4, 8)
    parts = (fmha(q, x[:, :, None], span=span, implementation=i) for x, span in ((window, near), (kv, far)))
    return merge([*parts], sink)


def _merge(i, q, lse, q2, lse2, sink):
    return merge([(q, lse), (q2, lse2)], sink)


def _drop_in(i, q, k, v, sink):
    return dot_product_attention(q, k, v, is_causal=True, sinks=sink, return_residual=True, implementation=i)


Q, SPAN, SINK = {"q": "bshd"}, {"start": "bs", "stop": "bs"}, {"sink": "h"}
ROWS = {"indices": "bsx", "length": "bs"}
OPS = {
    "latent": Case(_fmha, {**Q, "k": "btkd", **SPAN, **SINK}),
    "gqa": Case(_fmha, {**Q, "k": "btkd", **SPAN, **SINK, "v": "btkd"}, h_kv=4),
    "few_kv_heads": Case(_fmha, {**Q, "k": "btkd", **SPAN, **SINK, "v": "btkd"}, h_kv=2),
    "sparse": Case(_sparse, {**Q, "kv": "btd", **ROWS, **SINK}),
    "latent_part": Case(_fmha_part, {**Q, "k": "btkd", **SPAN, **SINK}),
    "sparse_part": Case(_sparse_part, {**Q, "kv": "btd", **ROWS, **SINK}),
    "window": Case(_layer, {**Q, "window": "btd", **SINK}),
    "two_pass": Case(_two_passes, {**Q, "window": "btd", "kv": "btd", **SINK}),
    "fused_dense": Case(_layer, {**Q, "window": "btd", "kv": "btd", **SINK}),
    "fused_sparse": Case(_layer, {**Q, "window": "btd", "kv": "btd", **SINK, **ROWS}),
    "merge": Case(_merge, {**Q, "lse": "bsh", "q2": "bshd", "lse2": "bsh", **SINK}),
    "drop_in": Case(_drop_in, {**Q, "k": "btkd", "v": "btkd", **SINK}, h_kv=4),
}
LAYOUTS = {
    "batch_heads": {"b": "data", "h": "model", "k": "model"},
    "queries_heads": {"s": "data", "h": "model", "k": "model"},
    "batch": {"b": "model"},
}


def loss(f: Callable[..., Any]) -> Callable[..., jax.Array]:
    """A number that o and lse enter with different weights everywhere; the lse of rows without a key has no weight."""

    def total(*operands: Any) -> jax.Array:
        o, lse = f(*operands)
        weights = jnp.cos(jnp.arange(math.prod(o.shape[1:]), dtype=jnp.float32)).reshape(o.shape[1:])
        return jnp.sum(o.astype(jnp.float32) * weights) + jnp.sum(jnp.where(jnp.isinf(lse), 0, lse) * weights[..., 0])

    return total


def assert_close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_array_equal(np.isinf(x), np.isinf(y))
        x, y = (np.where(np.isinf(z), 0, z) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(1, np.abs(y).max()))


def run(f: Callable[..., Any], *operands: Any) -> tuple[Any, dict[str, int]]:
    """The results of the compiled program, and its collectives: how many elements each kind moves."""
    program = jax.jit(f).lower(*operands).compile()
    return program(*operands), collectives(program)


def mesh_of(kind: str, shape: tuple[int, ...] = (2, 4), platform: str = "cpu") -> Any:
    devices = jax.devices(platform)[: math.prod(shape)]
    return jax.make_mesh(shape, ("data", "model"), axis_types=(KINDS[kind],) * 2, devices=devices)


def specs_of(case: Case, layout: dict[str, Any], mesh: Any) -> dict[str, P]:
    def entry(axis: str) -> Any:
        where = layout.get(axis)
        return None if axis == "k" and where and case.h_kv % mesh.shape[where] else where

    return {name: P(*map(entry, axes)) for name, axes in case.axes.items()}


def place(case: Case, operands: dict[str, Any], layout: dict[str, Any], mesh: Any) -> dict[str, Any]:
    specs = specs_of(case, layout, mesh)
    return {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in operands.items()}


def functions(case: Case, operands: dict[str, Any]) -> tuple[Callable[..., Any], Callable[..., Any], tuple[int, ...]]:
    """The op and its reference as functions of the operands in order, and which of these are differentiable."""
    names = list(operands)

    def of(implementation: str | None) -> Callable[..., Any]:
        return lambda *xs: case.op(implementation, **dict(zip(names, xs, strict=True)))

    return of(None), of("reference"), tuple(names.index(name) for name in case.differentiable())


@functools.cache
def expected(name: str) -> tuple[Any, Any]:
    operands = OPS[name].operands()
    _, f, wrt = functions(OPS[name], operands)
    return jax.jit(f)(*operands.values()), jax.jit(jax.grad(loss(f), wrt))(*operands.values())


def reduced_elements(case: Case, operands: dict[str, jax.Array], layout: dict[str, Any], mesh: Any) -> int:
    """The elements on one device that mathematics requires to be summed over devices: gradients of unsharded
    operands.
    """
    total = 0
    specs = specs_of(case, layout, mesh)
    sizes = {name: x.shape for name, x in operands.items()}
    rows = {a for axis in "bsh" for a in (lambda x: (x,) if isinstance(x, str) else x or ())(layout.get(axis))}
    for name in case.differentiable():
        split = {a for entry in specs[name] for a in ((entry,) if isinstance(entry, str) else entry or ())}
        if rows - split:
            total += math.prod(sizes[name]) // math.prod(mesh.shape[a] for a in split)
    return total


def loops(jaxpr: Any, target: str, inside: bool = False) -> tuple[int, int]:
    """Counts how often a primitive occurs in a jaxpr, and how often in a loop of it."""
    total = looped = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == target:
            total, looped = total + 1, looped + inside
        is_loop = eqn.primitive.name in ("scan", "while")
        for sub in _jaxprs(eqn):
            t, n = loops(sub, target, inside or is_loop)
            total, looped = total + t, looped + n
    return total, looped


def _jaxprs(eqn: Any) -> Any:
    for x in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
        if hasattr(x, "eqns"):
            yield x
        elif hasattr(x, "jaxpr") and hasattr(x.jaxpr, "eqns"):
            yield x.jaxpr


def run_python(code: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[1]), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
