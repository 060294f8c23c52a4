"""Gradients in q, k, v and sink, with cotangents of o and of lse: against finite differences in float64, and autodiff.

JAX differentiates the reference; the tests check the backward op of `autodiff.Differentiable`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha import Span, dsv4_attention, fmha, merge, reference, sparse_fmha
from jax_dsv4_fmha._definitions import attention_gradient
from jax_dsv4_fmha._testing import float64
from tests.helpers import normal_in_numpy as normal

B, S, S_KV, H, D = 2, 5, 9, 4, 8
SINKS = {
    "small": np.linspace(-1, 1, H),
    "twenty": np.linspace(18, 22, H),  # as large as logits: an implementation without the sink is far off
    "infinite": np.array([0.5, -np.inf, np.inf, -2.0]),
}


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


def problem(op, sink):
    """(f of the library, the same in float64, operands): row 1 of the first batch entry sees nothing."""
    rng = np.random.default_rng(7)
    q, sink = normal(0, B, S, H, D, scale=3), sink.astype(np.float32)
    start, stop = (rng.integers(low, high, (B, S), np.int32) for low, high in ((-2, 4), (5, 12)))
    indices, length = rng.integers(-3, S_KV + 3, (B, S, 6), np.int32), rng.integers(1, 8, (B, S), np.int32)
    stop[0, 1], length[0, 1] = start[0, 1], 0
    indices = np.where(np.arange(6) < length[..., None], indices, -1)
    kv, more = normal(1, B, S_KV, D), normal(2, B, 7, D)
    if op in ("fmha", "gqa"):
        h_kv = 1 if op == "fmha" else 2
        keys = tuple(normal(i, B, S_KV, h_kv, D) for i in range(3, 3 + h_kv))  # V is K, or not

        def f(q, *keys_and_sink):
            *keys, sink = keys_and_sink
            return fmha(q, *keys, span=Span(start, stop), sink=sink, scale=1.0)

        def f64(q, *keys_and_sink):
            k, v, sink = (*keys_and_sink[:1], None, keys_and_sink[1]) if op == "fmha" else keys_and_sink
            return float64.fmha(q, k, v, start, stop, sink, 1.0)

        return f, f64, (q, *keys, sink)
    if op == "sparse":
        return (
            lambda q, kv, sink: sparse_fmha(q, kv, indices, sink=sink, scale=1.0),
            lambda q, kv, sink: float64.sparse_fmha(q, kv, indices, sink=sink, scale=1.0),
            (q, kv, sink),
        )
    lengths = np.array([0, S_KV], np.int32)
    window = Span.sliding_window(S, 3, 6) & Span.lengths(lengths)
    far = {"ratio": Span.compressed(S, 4, 6)} if op == "dense layer" else {"indices": indices}
    of_float64 = {"window": 3, "q_offset": 6, "lengths": lengths, "scale": 1.0}
    of_float64 |= {"ratio": 4} if op == "dense layer" else far
    return (
        lambda q, w, c, sink: dsv4_attention(q, w, c, window=window, sink=sink, scale=1.0, **far),
        lambda q, w, c, sink: float64.dsv4_attention(q, w, c, sink=sink, **of_float64),
        (q, kv, more, sink),
    )


def weighted(xp, attention):
    """A number that every element of o and lse enters with a weight of its own; an lse of -inf has no weight."""
    o, lse = attention
    weights = np.random.default_rng(9).standard_normal((*o.shape[:-1], D + 1)).astype(np.float32)
    return (o * weights[..., :-1]).sum() + (xp.where(xp.isinf(lse), 0, lse) * weights[..., -1]).sum()


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("op", ["fmha", "gqa", "sparse", "dense layer", "sparse layer"])
@pytest.mark.usefixtures("built")
def test_differences_in_float64(op, sink):
    f, f64, operands = problem(op, SINKS[sink])
    finite = np.isfinite(operands[-1])
    grads = jax.jit(jax.grad(lambda *x: weighted(jnp, f(*x)), tuple(range(len(operands)))))(*operands)
    assert all(np.isfinite(g).all() for g in grads)
    assert (grads[-1][~finite] == 0).all()
    for i, grad in enumerate(grads):
        for seed in range(3):
            u = np.random.default_rng(seed).standard_normal(grad.shape)
            if i == len(grads) - 1:
                u = np.where(finite, u, 0)

            def along(t, i=i, u=u):
                moved = [x.astype(np.float64) for x in operands]
                moved[i] = moved[i] + t * u
                return weighted(np, f64(*moved))

            want = (along(1e-5) - along(-1e-5)) / 2e-5
            np.testing.assert_allclose(np.sum(np.asarray(grad, np.float64) * u), want, rtol=1e-4, atol=1e-4)


def test_a_sink_that_is_dropped_is_noticed():
    f, f64, operands = problem("fmha", SINKS["twenty"])
    with_sink, without = f64(*operands)[0], f64(*operands[:-1], np.full(H, -np.inf))[0]
    assert np.abs(with_sink - without).max() > 0.1
    np.testing.assert_allclose(f(*operands)[0], with_sink, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("op", ["fmha", "sparse", "merge"])
@pytest.mark.parametrize("implementation", [None, "reference"])
def test_a_sink_far_below_lse_keeps_its_gradient(op, implementation):
    """dsink = -Σ exp(sink - Ls) D to all digits; 1 - sigmoid(lse - sink) would lose them."""
    q, kv, do = normal(0, 1, 1, H, D), normal(1, 1, S_KV, D), normal(2, 1, 1, H, D)
    indices = np.arange(S_KV, dtype=np.int32)[None, None]
    o, lse = float64.sparse_fmha(q.astype(np.float64), kv.astype(np.float64), indices, scale=1.0)
    sink = (lse[0, 0] - np.array([5, 14, 18, 60])).astype(np.float32)

    def f(sink):
        if op == "fmha":
            return fmha(q, kv[:, :, None], sink=sink, scale=1.0, implementation=implementation)[0]
        if op == "sparse":
            return sparse_fmha(q, kv, indices, sink=sink, scale=1.0, implementation=implementation)[0]
        return merge([(o.astype(np.float32), lse.astype(np.float32))], sink)[0]

    got = jax.grad(lambda sink: jnp.sum(f(sink) * do))(sink)
    share = 1 / (1 + np.exp(lse[0, 0] - sink))
    want = -share * (1 - share) * np.sum(o * do, -1)[0, 0]
    np.testing.assert_allclose(got, want, rtol=1e-4)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_cotangent_of_nothing_reaches_no_sink(bad):
    """A row that sees no key, and a head whose sink takes everything: o is 0 whatever the sink is."""
    q, kv, sink = normal(0, 1, S, H, D), normal(1, 1, S_KV, 1, D), np.array([0.5, np.inf, -np.inf, 1], np.float32)
    stop = np.array([[4, 0, 8, 6, 7]], np.int32)
    do = normal(2, 1, S, H, D)
    do[0, 1], do[0, 2, 1], do[0, 3, 2] = bad, bad, bad
    _, vjp = jax.vjp(lambda sink: fmha(q, kv, span=Span(0, stop), sink=sink)[0], sink)
    _, vjp_finite = jax.vjp(lambda sink: fmha(q, kv, span=Span(0, stop), sink=sink)[0], sink)
    (got,), (want,) = vjp(do), vjp_finite(np.where(np.isfinite(do), do, 0))
    np.testing.assert_array_equal(got, want)
    assert (got[1:3] == 0).all()


@pytest.fixture(params=[False, True], ids=["one_block", "many_blocks"])
def blocks(request, monkeypatch):
    if request.param:
        for name, n in (("_ROWS", 64), ("_QUERIES", 16), ("_KEYS", 32), ("_GATHERED", 2**12)):
            monkeypatch.setattr(attention_gradient, name, n)
        jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("op", ["latent", "gqa", "sparse"])
def test_equals_autodiff_of_the_reference(op):
    s, s_kv, h, d = 70, 130, 4, 32
    q, sink = normal(0, 1, s, h, d), normal(1, h)
    keys = [normal(i, 1, s_kv, 2, d) for i in (2, 3)] if op == "gqa" else [normal(2, 1, s_kv, 1, d)]
    indices = np.random.default_rng(4).integers(-9, s_kv, (1, s, 40), np.int32)
    span = Span.sliding_window(s, 50, s_kv - s)

    def loss(implementation, q, *rest):
        *keys, sink = rest
        if op == "sparse":
            o, lse = sparse_fmha(q, keys[0][:, :, 0], indices, sink=sink, implementation=implementation)
        else:
            o, lse = fmha(q, *keys, span=span, sink=sink, implementation=implementation)
        return (o * jnp.cos(jnp.arange(o.size).reshape(o.shape))).sum() + jnp.sin(lse).sum()

    got, want = (
        jax.jit(jax.grad(functools.partial(loss, i), tuple(range(2 + len(keys)))))(q, *keys, sink)
        for i in (None, "reference")
    )
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("op", ["fmha", "sparse"])
def test_what_nobody_sees_reaches_no_gradient(op, bad):
    q, kv, sink = normal(0, 1, S, H, D), normal(1, 1, S_KV, D), normal(2, H)
    unseen = np.where(np.arange(S_KV) == S_KV - 1, bad, 0).astype(np.float32)[None, :, None]
    indices = np.random.default_rng(3).integers(0, S_KV - 1, (1, S, 6), np.int32)
    indices[0, 1] = -1
    stop = np.array([[4, 0, 8, 6, 7]], np.int32)
    q_bad = q + np.where(np.arange(S) == 1, bad, 0).astype(np.float32)[None, :, None, None]

    def loss(q, kv, sink):
        if op == "sparse":
            o, lse = sparse_fmha(q, kv, indices, sink=sink)
        else:
            o, lse = fmha(q, kv[:, :, None], span=Span(0, stop), sink=sink)
        return (o**2).sum() + jnp.where(jnp.isinf(lse), 0, lse).sum()

    grad = jax.jit(jax.grad(loss, (0, 1, 2)))
    for x, y in zip(grad(q_bad, kv + unseen, sink), grad(q, kv, sink), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_gradients_are_no_worse_than_plain_ones(dtype):
    """Beside the same attention written out in 16 bits and differentiated by JAX."""
    s, h, d = 96, 4, 64
    q, k, v, do = (jnp.asarray(normal(i, 1, s, n, d), dtype) for i, n in enumerate((h, 2, 2, h)))

    def plain(q, k, v):
        k, v = (jnp.repeat(x, h // 2, 2) for x in (k, v))
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * d**-0.5
        p = jax.nn.softmax(jnp.where(jnp.tri(s, dtype=bool), logits, -jnp.inf), -1)
        return jnp.einsum("bhqk,bkhd->bqhd", p, v)

    def grads(f, *operands):
        out, vjp = jax.vjp(f, *operands)
        return [x.astype(jnp.float32) for x in vjp(do.astype(out.dtype))]

    causal = Span.causal(s)
    want = grads(lambda *x: reference.fmha(*x, span=causal)[0], *(x.astype(jnp.float32) for x in (q, k, v)))
    ours = grads(lambda *x: fmha(*x, span=causal)[0], q, k, v)
    theirs = grads(plain, q, k, v)
    for x, y, z in zip(ours, theirs, want, strict=True):
        assert jnp.linalg.norm(x - z) <= 2 * jnp.linalg.norm(y - z)
