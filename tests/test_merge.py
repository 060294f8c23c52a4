"""merge: one softmax from parts, safe at all infinities."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jax_dsv4_fmha import Span, fmha, merge

B, S, H, D = 2, 3, 4, 8
INF = np.inf


def part(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    o, lse = rng.standard_normal((B, S, H, D), np.float32), rng.standard_normal((B, S, H), np.float32)
    return jnp.asarray(o, dtype), jnp.asarray(lse)


def formula(parts, sink):
    """float64, from the docstring's formula"""
    lse = np.logaddexp.reduce([np.asarray(lse, np.float64) for _, lse in parts])
    with_sink = lse if sink is None else np.logaddexp(lse, np.asarray(sink, np.float64))
    return sum(np.exp(x - with_sink)[..., None] * np.asarray(o, np.float64) for o, x in parts), lse


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("sink", [None, np.array([0.5, -1.0, -INF, INF], np.float32)], ids=["no_sink", "sink"])
def test_formula(n, sink):
    parts = [part(i) for i in range(n)]
    for x, y in zip(merge(parts, sink), formula(parts, sink), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_associative():
    a, b, c = (part(i) for i in range(3))
    sink = jnp.linspace(-2, 2, H)
    want = merge([a, b, c], sink)
    for got in (merge([merge([a, b]), c], sink), merge([a, merge([b, c])], sink), merge([c, a, b], sink)):
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_is_attention_over_the_union():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, n, 2, D), np.float32)) for n in (5, 9))
    sink = jnp.array([0.3, -0.7])
    parts = [fmha(q, k, span=Span(i, i + 3)) for i in (0, 3, 6)]
    for x, y in zip(merge(parts, sink), fmha(q, k, sink=sink), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ends", list(itertools.product([False, True], [False, True], [0.2, -INF, INF])), ids=str)
def test_empty_sides_and_infinite_sinks(ends):
    """Never NaN, gradients included, even where the empty part's o is NaN."""
    *empty, end = ends
    parts = [part(0), part(1)]
    parts = [
        (o.at[:, 1].set(jnp.nan), lse.at[:, 1].set(-INF)) if e else (o, lse)
        for (o, lse), e in zip(parts, empty, strict=True)
    ]
    sink = jnp.full((H,), end)
    o, lse = merge(parts, sink)
    assert jnp.isfinite(o).all() and not jnp.isnan(lse).any()
    assert bool((lse[:, 1] == -INF).all()) == all(empty)
    if all(empty) or end == INF:
        assert (o[:, 1] == 0).all()
    elif any(empty) and end == -INF:
        np.testing.assert_array_equal(o[:, 1], parts[empty.index(False)][0][:, 1])

    def loss(parts, sink):
        o, lse = merge(parts, sink)
        return o.sum() + jnp.where(jnp.isinf(lse), 0, lse).sum()

    for x in jax.tree.leaves(jax.grad(loss, (0, 1))(parts, sink)):
        assert jnp.isfinite(x).all()


@pytest.mark.parametrize("mode", ["fwd", "rev"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_gradients_in_everything(n, mode):
    sink = jnp.linspace(-1, 1, H)
    check_grads(jax.jit(merge), ([part(i) for i in range(n)], sink), 1, (mode,), 1e-2, 1e-2)


def test_second_order():
    check_grads(jax.jit(merge), ([part(0), part(1)], jnp.linspace(-1, 1, H)), 2, ("rev",), 3e-2, 3e-2)


def test_dtypes_and_vmap():
    parts = [part(i, jnp.bfloat16) for i in range(2)]
    o, lse = merge(parts)
    assert o.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), parts)
    o2, lse2 = jax.vmap(merge)(stacked)
    np.testing.assert_array_equal(o2[0], o)
    np.testing.assert_array_equal(lse2[0], lse)
