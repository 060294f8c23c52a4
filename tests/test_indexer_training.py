"""The training of the lightning indexer: scores, losses and gradients, against loops in float64 and differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha import Span, indexer_loss, indexer_scores, lightning_indexer
from jax_dsv4_fmha._definitions import indexer as definition
from tests.test_indexer import D_A, H_A, S_C, S_Q, B, H, f64, named, operands, past, scores_by_loop, teacher


def scores_at_by_loop(q, k, weights, indices):
    scores, indices = scores_by_loop(q, k, weights), np.asarray(indices)
    there = (indices >= 0) & (indices < S_C)
    return np.where(there, np.take_along_axis(scores, np.where(there, indices, 0), -1), -np.inf)


def difference(f, x, direction, step=1e-6):
    """The derivative of f, float64, along `direction`."""
    up, down = ([a + sign * step * d for a, d in zip(x, direction, strict=True)] for sign in (1, -1))
    return (f(*up) - f(*down)) / (2 * step)


def check_gradients(f, f64_of, x):
    """Both along random directions, one for each operand and one for all."""
    gradients = jax.grad(lambda *x: f(*x), tuple(range(len(x))))(*x)
    directions = [np.random.default_rng(i).standard_normal(a.shape) for i, a in enumerate(x)]
    for moved in ({0}, {1}, {2}, {0, 1, 2}):
        direction = [d if i in moved else 0 * d for i, d in enumerate(directions)]
        want = difference(f64_of, f64(*x), direction)
        got = sum(np.vdot(np.asarray(g, np.float64), d) for g, d in zip(gradients, direction, strict=True))
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_scores_and_their_gradients():
    x, indices = operands(), named()
    want = scores_at_by_loop(*x, indices)
    np.testing.assert_allclose(indexer_scores(*x, indices), want, rtol=1e-5, atol=1e-5)
    cotangent = np.random.default_rng(9).standard_normal(indices.shape)
    there = np.isfinite(want)

    def f(*x):
        return jnp.sum(jnp.where(there, indexer_scores(*x, indices), 0) * cotangent.astype(np.float32))

    check_gradients(f, lambda *x: np.sum(np.where(there, scores_at_by_loop(*x, indices), 0) * cotangent), x)


def loss_by_loop(x, taught, entries):
    """Σ over queries of (1 + query) · KL, float64; entries(n, i) gives a query's entries."""
    attention_q, kv, lse, sink = taught
    scores, logits = scores_by_loop(*x), np.einsum("bnhd,bsd->bnhs", *f64(attention_q, kv)) * D_A**-0.5
    p = np.exp(logits - np.logaddexp(*np.broadcast_arrays(*f64(lse, sink)))[..., None]).sum(2)
    total = 0.0
    for n, i in np.ndindex(B, S_Q):
        if seen := entries(n, i):
            teacher, student = p[n, i, seen] / p[n, i, seen].sum(), scores[n, i, seen]
            student = student - np.log(np.exp(student - student.max()).sum()) - student.max()
            total += (1 + i) * np.sum(teacher * (np.log(teacher) - student))
    return total


def weighted_sum(loss):
    return jnp.sum(loss * (1 + jnp.arange(S_Q)))


def test_loss_over_indices():
    x, taught = operands(), teacher()
    indices = lightning_indexer(*x, topk=5, span=Span.compressed(S_Q, 1, jnp.array([-2, 9], jnp.int32)))

    def f(*x):
        *given, sink = taught
        return weighted_sum(indexer_loss(*x, *given, indices=indices, sink=sink))

    def loop(*x):
        return loss_by_loop(x, taught, lambda n, i: [int(j) for j in indices[n, i] if j >= 0])

    np.testing.assert_allclose(f(*x), loop(*x), rtol=1e-5)
    check_gradients(f, loop, x)


@pytest.mark.parametrize("block", [None, 4])
def test_loss_over_all_visible(block, monkeypatch):
    if block:
        monkeypatch.setattr(definition, "_BLOCK", block * B * (H + H_A) * S_C)
        jax.clear_caches()
    x, taught, offset = operands(), teacher(), jnp.array([0, 60], jnp.int32)

    def f(*x):
        *given, sink = taught
        return weighted_sum(indexer_loss(*x, *given, span=Span.compressed(S_Q, 4, offset), sink=sink))

    visible = past(4, offset)

    def loop(*x):
        return loss_by_loop(x, taught, lambda n, i: [j for j in range(S_C) if visible[n, i, j]])

    np.testing.assert_allclose(f(*x), loop(*x), rtol=1e-5)
    check_gradients(f, loop, x)
    jax.clear_caches()


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_query_without_entries_reaches_no_gradient(bad):
    x, (attention_q, kv, lse, sink), none = operands(), teacher(), (0, 1)
    indices = named()
    span = Span(0, jnp.where(jnp.arange(S_Q) == none[1], 0, 9)[None])

    def gradients(*x, **which):
        def f(q, k, weights, attention_q, lse):
            given = q, k, weights, attention_q, kv, lse
            scores = indexer_scores(q, k, weights, indices) if "indices" in which else 0
            return jnp.where(jnp.isfinite(scores), scores, 0).sum() + indexer_loss(*given, sink=sink, **which).sum()

        return jax.grad(f, (0, 1, 2))(*x)

    for which in {"indices": indices}, {"span": span}:
        rows = none if "indices" in which else (slice(None), none[1])
        want = gradients(*x, attention_q, lse, **which)
        spoilt = [a.at[rows].set(bad) for a in (x[0], x[2], attention_q, lse)]
        got = gradients(spoilt[0], x[1], *spoilt[1:], **which)
        np.testing.assert_array_equal(got[1], want[1])
        for a, b in zip(got[::2], want[::2], strict=True):
            np.testing.assert_array_equal(a.at[rows].set(0), b.at[rows].set(0))
