"""Every op under every transform, on meshes of 8 virtual CPU devices and, where there are GPUs, on meshes of GPUs.

No kernel runs on a CPU: the tests claim that all are built. Then a call traces the path to the kernel, with types and
shapes, and lowers the reference on the same operands of one device.
"""

import functools
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import (
    EXPORT_CHECKS,
    Span,
    _ffi,
    dot_product_attention,
    dsv4_attention,
    fmha,
    indexer_loss,
    indexer_scores,
    merge,
    reference,
    sparse_fmha,
)
from tests.helpers import collectives

B, S, S_KV, H, TOPK = 4, 16, 24, 8, 6
KINDS = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit}


@pytest.fixture(autouse=True, scope="module")
def quick_to_compile():
    """Each of these hundreds of small programs is compiled for one run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


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
    return sparse_fmha(q, kv, indices, topk_length=length, sink=sink, implementation=i)


def _layer(i, q, window, kv=None, sink=None, indices=None, length=None, method=None):
    kwargs = {} if kv is None else {"ratio": 4} if indices is None else {"indices": indices, "topk_length": length}
    method = None if i == "reference" else method
    return dsv4_attention(q, window, kv, sink=sink, window=5, q_offset=8, method=method, implementation=i, **kwargs)


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
    "window": Case(_layer, {**Q, "window": "btd", **SINK}),
    "two_pass": Case(functools.partial(_layer, method="two_pass"), {**Q, "window": "btd", "kv": "btd", **SINK}),
    "fused_dense": Case(functools.partial(_layer, method="fused"), {**Q, "window": "btd", "kv": "btd", **SINK}),
    "fused_sparse": Case(
        functools.partial(_layer, method="fused"), {**Q, "window": "btd", "kv": "btd", **SINK, **ROWS}
    ),
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


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    "name, layout, kind",
    [
        (name, layout, kind)
        for name in OPS
        for layout in LAYOUTS
        for kind in KINDS
        if layout == "batch_heads" or name in ("latent", "few_kv_heads", "fused_sparse")
    ],
)
def test_meshes(name, layout, kind):
    check_sharded(name, LAYOUTS[layout], mesh_of(kind))


def check_sharded(name: str, layout: dict[str, Any], mesh: Any, tolerance: float = 2e-5, **operands: Any) -> None:
    case = OPS[name]
    plain = case.operands(**operands)
    f, g, wrt = functions(case, plain)
    xs = place(case, plain, layout, mesh).values()
    if operands:
        want = jax.jit(g)(*plain.values()), jax.jit(jax.grad(loss(g), wrt))(*plain.values())
    else:
        want = expected(name)
    grad = jax.grad(loss(f), wrt)
    got, moved = run(f, *xs)
    assert_close(got, want[0], tolerance)
    assert moved == {}
    got, moved = run(grad, *xs)
    assert_close(got, want[1], tolerance)
    assert set(moved) <= {"all-reduce"}
    # the gradient of K summed and then added to that of V may be summed as two
    assert moved.get("all-reduce", 0) <= reduced_elements(case, plain, layout, mesh)


def _vmapped(f):
    """Every batch entry separately, with a shared sink."""

    def one(q, k, start, stop, sink):
        return jax.tree.map(lambda x: x[0], f(q[None], k[None], start[None], stop[None], sink))

    return jax.vmap(one, in_axes=(0, 0, 0, 0, None))


def _scanned(f):
    def scanned(q, *rest):
        def step(q, _):
            o, lse = f(q, *rest)
            return o, lse

        _, lse = jax.lax.scan(step, q, None, length=2)
        return f(q, *rest)[0], lse[0]

    return scanned


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "checkpoint": jax.checkpoint,
    "scan": _scanned,
    "vmap": _vmapped,
    "checkpoint_of_vmap": lambda f: jax.checkpoint(_vmapped(f)),
}


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", KINDS)
class TestTransformsOnMeshes:
    @pytest.mark.parametrize("transform", TRANSFORMS)
    def test_of_one_program(self, transform, kind):
        case = OPS["latent"]
        f, _, wrt = functions(case, case.operands())
        f = TRANSFORMS[transform](f)
        xs = place(case, case.operands(), LAYOUTS["batch_heads"], mesh_of(kind)).values()
        grad = jax.grad(loss(f), wrt)
        got, moved = run(f, *xs)
        assert_close(got, expected("latent")[0])
        assert moved == {}
        got, moved = run(grad, *xs)
        assert_close(got, expected("latent")[1])
        assert set(moved) == {"all-reduce"}

    @pytest.mark.parametrize("check_vma", [True, False])
    @pytest.mark.parametrize("name", ["gqa", "fused_sparse"])
    def test_shard_map(self, name, check_vma, kind):
        case, mesh = OPS[name], mesh_of(kind)
        f, _, wrt = functions(case, case.operands())
        specs = specs_of(case, LAYOUTS["batch_heads"], mesh)
        xs = place(case, case.operands(), LAYOUTS["batch_heads"], mesh).values()
        out = P("data", None, "model")
        f = jax.shard_map(f, mesh=mesh, in_specs=(*specs.values(),), out_specs=(out, out), check_vma=check_vma)
        grad = jax.grad(loss(f), wrt)
        got, moved = run(f, *xs)
        assert_close(got, expected(name)[0])
        assert moved == {}
        got, moved = run(grad, *xs)
        assert_close(got, expected(name)[1])
        assert set(moved) == {"all-reduce"}

    @pytest.mark.parametrize("name, manual", [("gqa", "model"), ("latent", "data")])
    def test_partial_shard_map(self, name, manual, kind):
        """JAX itself gathers what is Explicit at the edge of a partial shard_map; values are right everywhere."""
        case, mesh = OPS[name], mesh_of(kind)
        f, _, wrt = functions(case, case.operands())
        specs = specs_of(case, {a: x for a, x in LAYOUTS["batch_heads"].items() if x == manual}, mesh)
        xs = place(case, case.operands(), LAYOUTS["batch_heads"], mesh).values()
        out = P(*(a if a == manual else None for a in ("data", None, "model")))
        f = jax.shard_map(f, mesh=mesh, in_specs=(*specs.values(),), out_specs=(out, out), axis_names={manual})
        grad = jax.grad(loss(f), wrt)
        got, moved = run(f, *xs)
        assert_close(got, expected(name)[0])
        assert moved == {} or kind == "Explicit"
        got, moved = run(grad, *xs)
        assert_close(got, expected(name)[1])
        assert set(moved) == {"all-reduce"} or kind == "Explicit" or manual == "data"

    def test_under_set_mesh(self, kind):
        with jax.set_mesh(mesh_of(kind)):
            check_sharded("few_kv_heads", LAYOUTS["batch_heads"], mesh_of(kind))

    def test_sharded_keys(self, kind):
        """An error where types know of the sharding, a gather where they do not."""
        case, mesh = OPS["latent"], mesh_of(kind)
        f, _, _ = functions(case, case.operands())
        xs = place(case, case.operands(), {"t": "data"}, mesh).values()
        if kind == "Explicit":
            with pytest.raises(ValueError, match="fmha: k: got s_kv sharded over data, wanted that axis whole"):
                jax.jit(f)(*xs)
        else:
            got, moved = run(f, *xs)
            assert_close(got, expected("latent")[0])
            assert set(moved) == {"all-gather"}


def test_a_mesh_that_does_not_fit_heads_is_refused():
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Explicit,), devices=jax.devices("cpu")[:4])
    q = jax.device_put(jnp.zeros((1, 4, 12, 16)), NamedSharding(mesh, P(None, None, "model")))
    k = jax.device_put(jnp.zeros((1, 4, 6, 16)), NamedSharding(mesh, P()))
    with pytest.raises(ValueError, match="query heads of whole key heads, or of one, on a device; there are 12 and 6"):
        jax.jit(fmha)(q, k)
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((1, 4, 12, 16), (1, 4, 6, 16)))
    got = jax.jit(fmha)(
        *(jax.device_put(x, NamedSharding(mesh, p)) for x, p in ((q, P(None, None, "model")), (k, P())))
    )
    assert_close(got, reference.fmha(q, k))


# vmap


def loops(jaxpr: Any, target: str, inside: bool = False) -> tuple[int, int]:
    """How often a primitive occurs in a jaxpr, and how often in a loop of it."""
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


N = 3
MAPPED = {
    "latent": ["q", "sink", "q k start stop sink"],
    "gqa": ["v"],
    "sparse": ["q", "indices", "kv sink"],
    "fused_dense": ["q sink"],
    "fused_sparse": ["kv indices"],
    "two_pass": ["q window"],
}


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("name, mapped", [(name, m) for name, ms in MAPPED.items() for m in ms])
def test_vmap(name, mapped):
    """Any operands, at any axis: the same as one at a time, in one launch, with the gradient."""
    case = OPS[name]
    operands = case.operands()
    f, g, wrt = functions(case, operands)
    xs, axes = [], []
    for i, (key, x) in enumerate(operands.items()):
        axis = i % (x.ndim + 1) if key in mapped.split() else None
        axes.append(axis)
        xs.append(x if axis is None else jnp.stack([jnp.roll(x, n, 0) for n in range(N)], axis))
    vmapped = jax.vmap(f, in_axes=tuple(axes))
    take = lambda n: [x if a is None else jnp.take(x, n, a) for x, a in zip(xs, axes, strict=True)]  # noqa: E731
    one, one_grad = jax.jit(g), jax.jit(jax.grad(loss(g), wrt))
    assert_close(jax.jit(vmapped)(*xs), [np.stack(y) for y in zip(*(one(*take(n)) for n in range(N)), strict=True)])
    launches = 2 if name == "two_pass" else 1
    assert loops(jax.make_jaxpr(vmapped)(*xs).jaxpr, "ffi_call") == (launches, 0)

    grads = jax.jit(jax.vmap(jax.grad(loss(f), wrt), in_axes=tuple(axes)))(*xs)
    assert_close(grads, [np.stack(y) for y in zip(*(one_grad(*take(n)) for n in range(N)), strict=True)])
    summed = jax.jit(jax.grad(lambda *xs: jax.vmap(loss(f), in_axes=tuple(axes))(*xs).sum(), wrt))(*xs)
    for i, x, y in zip(wrt, summed, grads, strict=True):
        assert_close(x, y.sum(0) if axes[i] is None else jnp.moveaxis(y, 0, axes[i]))


@pytest.mark.usefixtures("built")
def test_vmap_of_vmap():
    case = OPS["latent"]
    f, g, _ = functions(case, case.operands())
    q, k, start, stop, sink = case.operands().values()
    both = jax.vmap(jax.vmap(f, in_axes=(0, None, None, None, None)), in_axes=(None, 0, None, None, 0))
    xs = jnp.stack([q, -q]), jnp.stack([k, 2 * k, 3 * k]), start, stop, jnp.stack([sink, sink + 1, sink + 2])
    o, lse = jax.jit(both)(*xs)
    for i, j in np.ndindex(3, 2):
        assert_close((o[i, j], lse[i, j]), g(xs[0][j], xs[1][i], start, stop, xs[4][i]))
    assert loops(jax.make_jaxpr(both)(*xs).jaxpr, "ffi_call") == (1, 0)


@pytest.mark.usefixtures("built")
def test_keys_that_are_not_mapped_are_not_copied():
    """The kernel sees the mapped axis as more queries of the same keys."""
    case = OPS["latent"]
    f, _, _ = functions(case, case.operands())
    q, k, *rest = (x[:1] if x.ndim > 1 else x for x in case.operands().values())
    vmapped = jax.vmap(f, in_axes=(0, None, None, None, None))
    text = jax.jit(vmapped).trace(jnp.stack([q] * N), k, *rest).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if "custom_call @dsv4_fmha" in line)
    assert f"tensor<1x{N * S}x{H}x16xf32>" in call and f"tensor<1x{S_KV}x1x16xf32>" in call


# Kinds of meshes, pools, and operands with different shardings


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kinds", [("Explicit", "Auto"), ("Auto", "Explicit")], ids="-".join)
@pytest.mark.parametrize("transform", ["", "gradient", "vmap"])
def test_a_mesh_of_two_kinds(kinds, transform):
    """Right with and without jax.set_mesh, which saves Auto operands from being gathered."""
    devices = jax.devices("cpu")[:8]
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=tuple(KINDS[k] for k in kinds), devices=devices)
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((4, 8, 4, 16), (4, 9, 1, 16)))
    of = {"": lambda f: f, "gradient": lambda f: jax.grad(lambda q: f(q, k)[0].sum()), "vmap": jax.vmap}[transform]
    xs = (q,) if transform == "gradient" else (q[:, None], k[:, None]) if transform == "vmap" else (q, k)
    want = jax.jit(of(functools.partial(reference.fmha)))(*xs)
    specs = {"vmap": (P("data"), P("data"))}.get(transform, (P("data", None, "model"), P("data")))
    placed = [jax.device_put(x, NamedSharding(mesh, p)) for x, p in zip(xs, specs, strict=False)]
    assert_close(run(of(fmha), *placed)[0], want)
    if not transform:
        with jax.set_mesh(mesh):
            got, moved = run(fmha, *placed)
        assert_close(got, want)
        assert moved == {}


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [P("data"), P(None, None, "model"), P("data", None, "model")], ids=str)
def test_sparse_over_a_pool(spec, kind):
    mesh, case = mesh_of(kind), OPS["sparse"]
    q, kv, indices, _, _ = case.operands().values()
    want = jax.jit(lambda *xs: reference.sparse_fmha(*xs)[0])(q, kv[0], indices)
    places = (spec, P(), P(*spec[:2]))
    xs = [jax.device_put(x, NamedSharding(mesh, p)) for x, p in zip((q, kv[0], indices), places, strict=True)]
    got, moved = run(lambda *xs: sparse_fmha(*xs)[0], *xs)
    assert_close(got, want)
    assert moved == {}
    _, moved = run(jax.grad(lambda q, kv: sparse_fmha(q, kv, xs[2])[0].sum(), (0, 1)), *xs[:2])
    assert set(moved) == {"all-reduce"}
    if kind == "Explicit":
        q = jax.device_put(q, NamedSharding(mesh, P(None, "data")))
        with pytest.raises(ValueError, match="sparse_fmha: q: got s_q sharded over data, wanted s_q whole, of a pool"):
            jax.jit(sparse_fmha)(q, *xs[1:])


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("sharded", ["window", "kv"])
def test_two_passes_with_one_cache_sharded(sharded):
    case, mesh = OPS["two_pass"], mesh_of("Explicit")
    f, _, _ = functions(case, case.operands())
    xs = case.operands() | {sharded: jax.device_put(case.operands()[sharded], NamedSharding(mesh, P("data")))}
    got, moved = run(f, *xs.values())
    assert_close(got, expected("two_pass")[0])
    assert moved == {}
    # a sink with another sharding than the heads is this package's error, not JAX's
    xs = {"q": jax.device_put(xs["q"], NamedSharding(mesh, P(None, None, "model")))} | {
        "sink": jax.device_put(xs["sink"], NamedSharding(mesh, P("data")))
    }
    with pytest.raises(ValueError, match="sink: got h_q sharded over data, wanted h_q sharded over model"):
        jax.jit(f)(*(case.operands() | xs).values())


# What is not there


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("name", ["latent", "sparse", "fused_dense"])
def test_vmap_over_nothing(name):
    case = OPS[name]
    f, _, wrt = functions(case, case.operands())
    xs = [jnp.zeros((0, *x.shape), x.dtype) for x in case.operands().values()]
    o, lse = jax.vmap(f)(*xs)
    assert o.shape == xs[0].shape and lse.shape == xs[0].shape[:-1]
    for x, i in zip(jax.vmap(jax.grad(loss(f), wrt))(*xs), wrt, strict=True):
        assert x.shape == xs[i].shape


@pytest.mark.usefixtures("built")
def test_vmap_of_queries_over_the_keys_of_one_sequence():
    """Each query has its own gradient of the keys."""
    rng = np.random.default_rng(0)
    q, kv = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((N, 1, 4, 2, 8), (1, 9, 8)))
    indices = jnp.asarray(rng.integers(-1, 9, (1, 4, 3)), jnp.int32)
    f, g = (
        lambda q, kv, i=i: jnp.sin(sparse_fmha(q, kv, indices, implementation=i)[0]).sum() for i in (None, "reference")
    )
    got = jax.vmap(jax.grad(f, (0, 1)), in_axes=(0, None))(q, kv)
    assert_close(got, jax.vmap(jax.grad(g, (0, 1)), in_axes=(0, None))(q, kv))


NO_DERIVATIVE = "gradient: got a second derivative, or one forward, wanted jax.grad or .* implementation='reference'"


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("name", ["latent", "sparse"])
def test_a_second_derivative_is_refused(name):
    case = OPS[name]
    f, _, _ = functions(case, case.operands())
    _, *rest = case.operands().values()
    for twice in (jax.hessian, lambda f: jax.grad(lambda q: jax.grad(f)(q).sum())):
        with pytest.raises(NotImplementedError, match=NO_DERIVATIVE):
            twice(lambda q: f(q, *rest)[0].sum())(case.operands()["q"])


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("where", ["plain", "jit", "vmap", "scan", "checkpoint", "shard_map", "within shard_map"])
def test_a_derivative_forward_is_refused(where):
    """Our error refuses it, wherever jax.jvp stands; a function that is only transposed works."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
    q, k = (OPS["latent"].operands()[name] for name in ("q", "k"))
    f, push = (lambda q: fmha(q, k[: len(q)])[0]), (lambda f: lambda q: jax.jvp(f, (q,), (q,)))
    on_mesh = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    calls = {
        "plain": push(f),
        "jit": push(jax.jit(f)),
        "vmap": lambda q: jax.vmap(push(f))(q[:, None]),
        "scan": push(lambda q: jax.lax.scan(lambda c, q: (c, f(q)), 0, q[:, None])),
        "checkpoint": jax.jit(push(jax.checkpoint(f))),
        "shard_map": push(on_mesh(f)),
        "within shard_map": on_mesh(push(f)),
    }
    with pytest.raises(NotImplementedError, match=NO_DERIVATIVE):
        calls[where](q)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("op", ["indexer_scores", "indexer_loss"])
def test_so_of_what_the_indexer_learns_by(op):
    """Forward derivatives and second ones are refused; gradients go through vmap on either side."""
    x = {name: jnp.ones(s) for name, s in {"q": (1, 3, 2, 8), "k": (1, 5, 8), "w": (1, 3, 2), "kv": (1, 5, 4)}.items()}
    indices = jnp.arange(9, dtype=jnp.int32).reshape(1, 3, 3) - 2

    def f(q):
        if op == "indexer_scores":
            return indexer_scores(q, x["k"], x["w"], indices).sum()
        return indexer_loss(q, x["k"], x["w"], q[..., :4], x["kv"], x["w"], ratio=1).sum()

    for derivative in (jax.jacfwd, jax.hessian, lambda f: lambda q: jax.jvp(f, (q,), (q,))):
        with pytest.raises(NotImplementedError, match=NO_DERIVATIVE):
            derivative(f)(x["q"])
    q = jnp.stack([x["q"], 2 * x["q"]])
    want = jnp.stack([jax.grad(f)(q[0]), jax.grad(f)(q[1])])
    np.testing.assert_allclose(jax.grad(lambda q: jax.vmap(f)(q).sum())(q), want, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("built")
def test_a_linear_function_is_transposed():
    q, k = (OPS["latent"].operands()[name] for name in ("q", "k"))
    f = lambda q: fmha(q, k)[0]  # noqa: E731
    _, tangent = jax.linearize(f, q)
    (got,) = jax.linear_transpose(tangent, q)(q)
    np.testing.assert_array_equal(got, jax.vjp(f, q)[1](q)[0])


@pytest.mark.parametrize("here", [("sm_80",), ("sm_80", "sm_90a")], ids="-".join)
def test_what_is_exported_does_not_depend_on_this_machine(here, built, monkeypatch):
    """It has the kernel, for the target device; a call here gets the reference, or an error if it insists."""
    monkeypatch.setattr(_ffi, "local_architectures", lambda: here)
    q = jax.ShapeDtypeStruct((1, 2, 4, 16), jnp.float32)
    exported = jax.export.export(jax.jit(fmha), platforms=["cuda"], disabled_checks=EXPORT_CHECKS)(q, q)
    assert "custom_call @dsv4_fmha_fwd" in exported.mlir_module()
    text = jax.jit(fmha).trace(q, q).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @dsv4_fmha" not in text
    insists = jax.jit(functools.partial(fmha, implementation="cubin"))
    exported = jax.export.export(insists, platforms=["cuda"], disabled_checks=EXPORT_CHECKS)(q, q)
    assert "custom_call @dsv4_fmha_fwd" in exported.mlir_module()
    if "sm_90a" not in here:
        with pytest.raises(NotImplementedError, match="fmha: implementation: got 'cubin' on sm_80, wanted what is bui"):
            insists.trace(q, q).lower(lowering_platforms=("cuda",))


# Residuals


@pytest.mark.usefixtures("built")
def test_a_policy_saves_o_and_lse():
    case = OPS["latent"]
    f, _, wrt = functions(case, case.operands())
    xs = case.operands().values()

    def launches(policy):
        step = jax.value_and_grad(loss(jax.checkpoint(f, policy=policy)), wrt)
        return loops(jax.make_jaxpr(step)(*xs).jaxpr, "ffi_call")[0]

    names = jax.checkpoint_policies.save_only_these_names("dsv4_fmha_o", "dsv4_fmha_lse")
    backward = 1
    assert (launches(None), launches(names)) == (2 + backward, 1 + backward)


# Export and caches


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("name", ["latent", "sparse", "fused_dense", "fused_sparse"])
def test_export_with_symbolic_batch_and_lengths(name, with_gradient):
    case = OPS[name]
    f, _, wrt = functions(case, case.operands())
    f = jax.grad(loss(f), wrt) if with_gradient else f
    sizes = dict(zip("bst", jax.export.symbolic_shape("b, s, t"), strict=True))
    operands = [
        jax.ShapeDtypeStruct([sizes.get(a, n) for a, n in zip(case.axes[key], x.shape, strict=True)], x.dtype)
        for key, x in case.operands().items()
    ]
    exported = jax.export.export(jax.jit(f), platforms=["cuda"], disabled_checks=EXPORT_CHECKS)(*operands)
    assert "custom_call @dsv4_fmha_" in exported.mlir_module()


def run_python(code: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[1]), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


CACHED = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
from jax import monitoring
from jax_dsv4_fmha import fmha
hits = []
monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)
q, k = jnp.ones((2, 4, 2, 16)), jnp.ones((2, 4, 1, 16))
f = lambda q, k: fmha(q, k)[0]
counts = []
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
for g in (f, jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))):
    jax.block_until_ready((q, k))
    before = len(hits)
    jax.jit(g).lower(q, k).compile()
    counts.append(len(hits) - before)
print(counts)
"""


def test_the_persistent_cache_hits_in_another_process(tmp_path):
    outputs = []
    for _ in range(2):
        process = run_python(CACHED, str(tmp_path))
        outputs.append(process.communicate(timeout=120)[0])
        assert process.returncode == 0, outputs[-1]
    assert [text.splitlines()[-1] for text in outputs] == ["[0, 0]", "[1, 1]"]


# Processes


DISTRIBUTED = """
import sys
import numpy as np
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
port, process, examples = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", 2, int(process))
sys.path.insert(0, examples)
import context_parallel
from jax_dsv4_fmha import Span, fmha, reference
assert jax.device_count() == 8 and jax.local_device_count() == 4
rng = np.random.default_rng(0)
q, k, weights = (rng.standard_normal((2, 16, h, 16)).astype(np.float32) for h in (8, 1, 8))

def check(f, specs, mesh):
    place = lambda x, spec: jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])
    xs = [place(x, spec) for x, spec in zip((q, k, weights), specs)]
    loss = lambda f: lambda q, k, w: jnp.sum(f(q, k) * w)
    got = jax.jit(jax.value_and_grad(loss(f), (0, 1)))(*xs)
    want = jax.jit(jax.value_and_grad(loss(lambda q, k: reference.fmha(q, k, span=Span.causal(16))[0]), (0, 1)))(
        *map(jnp.asarray, (q, k, weights)))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        for shard in x.addressable_shards:
            np.testing.assert_allclose(shard.data, np.asarray(y)[shard.index], rtol=1e-4, atol=1e-4)

mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
heads = P("data", None, "model")
check(lambda q, k: fmha(q, k, span=Span.causal(16))[0], (heads, P("data"), heads), mesh)
ring = jax.make_mesh((8,), ("ring",), axis_types=(AxisType.Auto,))
check(lambda q, k: context_parallel.attention(q, k, ring)[0], (P(None, "ring"),) * 3, ring)
print("right")
"""


def test_two_processes():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    examples = str(Path(__file__).parents[1] / "examples")
    processes = [run_python(DISTRIBUTED, port, str(i), examples) for i in range(2)]
    for process in processes:
        text = process.communicate(timeout=180)[0]
        assert process.returncode == 0 and text.splitlines()[-1] == "right", text


# On GPUs, with the kernels


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["batch_heads", "queries_heads"])
@pytest.mark.parametrize("name", [name for name in OPS if name != "merge"])
def test_on_gpus(name, layout, kind):
    count = len(jax.devices("cuda"))
    shape = {1: (1, 1), 2: (1, 2), 3: (1, 2)}.get(count, (2, 2))
    d = 64 if name in ("gqa", "few_kv_heads", "drop_in") else 512
    check_sharded(name, LAYOUTS[layout], mesh_of(kind, shape, "cuda"), tolerance=3e-2, d=d, dtype=jnp.bfloat16)
