"""Every op under jax.vmap, over any of its operands: one launch, and the same as one at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha import (
    sparse_fmha,
)
from tests.transformed import OPS, S_KV, H, S, assert_close, functions, loops, loss

pytestmark = pytest.mark.usefixtures("quick_to_compile")


N = 3


@functools.cache
def one_at_a_time(name):
    """The reference of an op, and its gradient: compiled once for all tests."""
    _, g, wrt = functions(OPS[name], OPS[name].operands())
    return jax.jit(g), jax.jit(jax.grad(loss(g), wrt))


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
    f, _, wrt = functions(case, operands)
    one, one_grad = one_at_a_time(name)
    xs, axes = [], []
    for i, (key, x) in enumerate(zip(operands, map(np.asarray, operands.values()), strict=True)):
        axis = i % (x.ndim + 1) if key in mapped.split() else None
        axes.append(axis)
        xs.append(x if axis is None else np.stack([np.roll(x, n, 0) for n in range(N)], axis))
    vmapped = jax.vmap(f, in_axes=tuple(axes))
    take = lambda n: [x if a is None else np.take(x, n, a) for x, a in zip(xs, axes, strict=True)]  # noqa: E731
    assert_close(jax.jit(vmapped)(*xs), [np.stack(y) for y in zip(*(one(*take(n)) for n in range(N)), strict=True)])
    launches = 2 if name == "two_pass" else 1
    assert loops(jax.make_jaxpr(vmapped)(*xs).jaxpr, "ffi_call") == (launches, 0)

    grads = jax.jit(jax.vmap(jax.grad(loss(f), wrt), in_axes=tuple(axes)))(*xs)
    assert_close(grads, [np.stack(y) for y in zip(*(one_grad(*take(n)) for n in range(N)), strict=True)])
    summed = jax.jit(jax.grad(lambda *xs: jax.vmap(loss(f), in_axes=tuple(axes))(*xs).sum(), wrt))(*xs)
    for i, x, y in zip(wrt, summed, grads, strict=True):
        assert_close(x, np.sum(y, 0) if axes[i] is None else np.moveaxis(y, 0, axes[i]))


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
