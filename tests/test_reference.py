"""The definition: against loops in float64, its gradients, and keys that must not reach a result."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jax_dsv4_fmha import Span, reference
from jax_dsv4_fmha._testing.attention import AttentionCase, DecodeCase, run_float64, run_reference
from jax_dsv4_fmha._testing.cases import ATTENTION, CASES
from jax_dsv4_fmha._testing.compare import FP32, FP32_LARGE
from tests.helpers import assert_right


def small(case: AttentionCase) -> AttentionCase:
    """The reference does not depend on d, which is given where caches are packed, or on 16-bit types."""
    packed = isinstance(case, DecodeCase) and any(case.layouts)
    return dataclasses.replace(case, d=case.d if packed else 64, dtype="bfloat16")


# 70000 queries are more than a kernel's grid may have; to the reference they are more blocks than 2048 are
SMALL = dict.fromkeys(small(case) for case in ATTENTION if case.is_small and case.s_q < 70_000)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def grad(f, argnums=0):
    return jax.jit(jax.grad(f, argnums))


def test_names_of_cases_are_unique():
    assert len({case.name for case in CASES}) == len({case.id for case in CASES}) == len(CASES)
    assert not any("  " in case.name or " 1 tokens" in case.name for case in CASES)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_equals_float64(case):
    tolerances = FP32_LARGE if "large" in case.features else FP32
    assert_right(run_reference(case), run_float64(case), tolerances)


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks and tiles, ragged ones too, from small operands."""
    monkeypatch.setattr(reference, "_ROWS", 12)
    monkeypatch.setattr(reference, "_KEYS", 4)
    monkeypatch.setattr(reference, "_GATHERED", 64)
    jax.clear_caches()
    yield
    jax.clear_caches()


B, S_Q, S_KV, H_Q, H_KV, D = 1, 7, 10, 4, 2, 8
SPAN = Span(jnp.array([[0, 3, 5, 2, 9, 0, 8]], jnp.int32), jnp.array([[10, 4, 5, 9, 3, 1, 10]], jnp.int32))
EMPTY = np.array([2, 4])  # rows of SPAN


def operands():
    q, k, v = normal(0, B, S_Q, H_Q, D), normal(1, B, S_KV, H_KV, D), normal(2, B, S_KV, H_KV, D)
    return q, k, v, normal(3, H_Q)


def dense(q, k, v, sink, span=SPAN):
    """fmha with a mask and jax.nn.softmax: the whole matrix, the sink as one more key."""
    start, stop = span.bounds(B, S_Q, S_KV)
    j = jnp.arange(S_KV)
    visible = (start[..., None] <= j) & (j < stop[..., None])
    k, v = (jnp.repeat(x, H_Q // H_KV, axis=2) for x in (k, v))
    s = jnp.einsum("bnhd,bkhd->bnhk", q, k, precision="highest") * D**-0.5
    s = jnp.where(visible[:, :, None], s, -jnp.inf)
    with_sink = jnp.concatenate([s, jnp.broadcast_to(sink[:, None], (*s.shape[:3], 1))], -1)
    return jnp.einsum("bnhk,bkhd->bnhd", jax.nn.softmax(with_sink)[..., :-1], v, precision="highest")


@pytest.mark.usefixtures("small_blocks")
def test_gradients_equal_those_of_a_dense_softmax():
    q, k, v, sink = operands()
    do = normal(4, *q.shape)
    got = grad(lambda *x: jnp.vdot(reference.fmha(*x[:3], span=SPAN, sink=x[3])[0], do), (0, 1, 2, 3))(q, k, v, sink)
    want = grad(lambda *x: jnp.vdot(dense(*x), do), (0, 1, 2, 3))(q, k, v, sink)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6, rtol=2e-5)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("mode", ["fwd", "rev"])
def test_check_grads_with_lse(mode):
    q, k, v, sink = operands()
    seen = jnp.where(jnp.arange(S_Q)[:, None] == EMPTY, 1, 0).sum(1) == 0

    def f(q, k, v, sink):
        o, lse = reference.fmha(q, k, v, span=SPAN, sink=sink)
        return o, jnp.where(seen[:, None], lse, 0)

    check_grads(jax.jit(f), (q, k, v, sink), order=1, modes=(mode,), atol=2e-2, rtol=2e-2, eps=1e-2)

    indices = jnp.asarray(np.random.default_rng(5).integers(-3, S_KV + 3, (B, S_Q, 6), np.int32)).at[0, :, 0].set(1)
    sparse = functools.partial(reference.sparse_fmha, indices=indices)
    check_grads(
        jax.jit(lambda q, kv, sink: sparse(q, kv, sink=sink)), (q, k[:, :, 0], sink), 1, (mode,), 2e-2, 2e-2, 1e-2
    )


@pytest.mark.usefixtures("small_blocks")
def test_shared_kv_gradient_is_the_sum_of_both():
    q, k, _, sink = operands()
    do = normal(4, *q.shape)
    dk, dv = grad(lambda k, v: jnp.vdot(reference.fmha(q, k, v, span=SPAN, sink=sink)[0], do), (0, 1))(k, k)
    dkv = grad(lambda k: jnp.vdot(reference.fmha(q, k, span=SPAN, sink=sink)[0], do))(k)
    np.testing.assert_allclose(dkv, dk + dv, atol=2e-6)


@pytest.mark.parametrize("end", [-np.inf, np.inf])
def test_infinite_sinks_have_gradient_0(end):
    q, k, v, sink = operands()
    sink = sink.at[1].set(end)
    o, lse = reference.fmha(q, k, v, span=SPAN, sink=sink)
    assert bool(jnp.all(o[:, :, 1] == 0)) == (end > 0)
    np.testing.assert_array_equal(lse, reference.fmha(q, k, v, span=SPAN)[1])
    grads = grad(lambda *x: reference.fmha(*x[:3], span=SPAN, sink=x[3])[0].sum(), (0, 1, 2, 3))(q, k, v, sink)
    assert all(jnp.isfinite(x).all() for x in grads)
    assert grads[3][1] == 0 and grads[3][0] != 0


@pytest.mark.usefixtures("small_blocks")
def test_empty_rows():
    q, k, v, sink = operands()
    q = q.at[:, EMPTY].set(jnp.nan)  # a row that sees nothing may hold anything
    loss = lambda *x: sum(jnp.where(jnp.isinf(y), 0, y).sum() for y in reference.fmha(*x[:3], span=SPAN, sink=x[3]))  # noqa: E731
    o, lse = reference.fmha(q, k, v, span=SPAN, sink=sink)
    assert (o[:, EMPTY] == 0).all() and (lse[:, EMPTY] == -jnp.inf).all()
    grads = grad(loss, (0, 1, 2, 3))(q, k, v, sink)
    assert all(jnp.isfinite(x).all() for x in grads)
    assert (grads[0][:, EMPTY] == 0).all()


@pytest.mark.usefixtures("small_blocks")
def test_no_unseen_key_reaches_a_row():
    """Some rows see key 9, others do not: these keep their bits."""
    q, k, v, sink = operands()
    sees = np.array([0, 6])
    rest = np.setdiff1d(np.arange(S_Q), sees)
    good = reference.fmha(q, k, v, span=SPAN, sink=sink)
    for bad in (np.nan, np.inf):
        o, lse = reference.fmha(q, k.at[:, 9].set(bad), v.at[:, 9].set(bad), span=SPAN, sink=sink)
        np.testing.assert_array_equal(o[:, rest], good[0][:, rest])
        np.testing.assert_array_equal(lse[:, rest], good[1][:, rest])
        assert not jnp.isfinite(o[:, sees]).any()


def test_rows_of_one_head_keep_their_bits():
    """A row alone, with one head, would be a vector, which XLA sums in another order than a row of a matrix."""
    q, k = normal(0, 1, 20, 1, 32), normal(1, 1, 20, 1, 32)
    for x, y in zip(
        *(reference.fmha(q, keys, span=Span.causal(20)) for keys in (k, k.at[:, 18].set(np.nan))), strict=True
    ):
        np.testing.assert_array_equal(x[:, :18], y[:, :18])


@pytest.mark.usefixtures("small_blocks")
def test_no_unseen_key_reaches_a_gradient():
    """Key 9 is seen by nobody."""
    q, k, v, sink = operands()
    span = Span(SPAN.start, jnp.minimum(SPAN.stop, 9))

    def loss(q, k, v):
        o, lse = reference.fmha(q, k, v, span=span, sink=sink)
        return o.sum() + jnp.where(jnp.isinf(lse), 0, lse).sum()

    alone, under_vmap = grad(loss, (0, 1, 2)), grad(lambda *x: jax.vmap(loss)(*(y[None] for y in x)).sum(), (0, 1, 2))
    want = alone(q, k, v)
    for bad in (np.nan, np.inf):
        for f in (alone, under_vmap):
            for x, y in zip(f(q, k.at[:, 9].set(bad), v.at[:, 9].set(bad)), want, strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_blocks_and_tiles_do_not_matter(small_blocks, monkeypatch):
    q, k, v, sink = operands()
    indices = jnp.asarray(np.random.default_rng(5).integers(-3, S_KV + 3, (B, S_Q, 6), np.int32))

    def run():
        return reference.fmha(q, k, v, span=SPAN, sink=sink), reference.sparse_fmha(q, k[:, :, 0], indices)

    got = run()
    monkeypatch.undo()
    jax.clear_caches()
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(run()), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_vmap_and_jit():
    q, k, sink = normal(0, 3, 2, S_Q, H_Q, D), normal(1, 3, 2, S_KV, H_KV, D), normal(2, 3, H_Q)
    length = jnp.array([[4, 9], [0, 10], [7, 1]], jnp.int32)
    f = jax.jit(lambda q, k, sink, length: reference.fmha(q, k, span=Span.lengths(length), sink=sink))
    got = jax.jit(jax.vmap(f))(q, k, sink, length)
    want = [jnp.stack(x) for x in zip(*(f(q[i], k[i], sink[i], length[i]) for i in range(3)), strict=True)]
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_dtypes():
    q, k, v, _ = (x.astype(jnp.bfloat16) for x in operands())
    o, lse = reference.fmha(q, k, v)
    assert o.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    np.testing.assert_array_equal(o, reference.fmha(q.astype(jnp.float32), k, v)[0].astype(jnp.bfloat16))
