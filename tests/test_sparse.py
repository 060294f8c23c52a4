"""sparse_fmha; its values against float64 stand in test_reference.py, for every case of the table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha import fmha, reference, sparse_fmha
from jax_dsv4_fmha._dispatch.sources import SelectionSource
from jax_dsv4_fmha._testing.attention import SparseCase, run, run_reference
from jax_dsv4_fmha._testing.cases import CASES
from tests.helpers import assert_right

B, S_Q, S_KV, H, D, TOPK = 2, 5, 20, 3, 16, 8


def operands(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    q, kv = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((B, S_Q, H, D), (B, S_KV, D)))
    indices = np.stack([rng.permutation(S_KV - 1)[:TOPK] for _ in range(B * S_Q)]).reshape(B, S_Q, TOPK)
    return q, kv, jnp.asarray(indices, jnp.int32), jnp.asarray(rng.standard_normal(H), jnp.float32)


TABLE = [case for case in CASES if isinstance(case, SparseCase)]
CASE = next(case for case in TABLE if "nan" in case.features)


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_rounds_once(implementation):
    assert_right(run(CASE, implementation), run_reference(CASE))


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("case", [case for case in TABLE if case.has_kernel], ids=lambda case: case.id)
def test_kernel(case):
    assert_right(run(case, "cubin"), run_reference(case))


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize(
    ("s_q", "s_kv", "h_q", "d", "topk"),
    [(1_000_000, 5000, 16, 512, 40), (300, 10_000_000, 64, 512, 1000), (70_000, 256, 128, 576, 256)],
    ids=["s_q", "s_kv", "s_q of latents of 576"],
)
def test_a_million_queries_and_ten_million_keys(cuda, s_q, s_kv, h_q, d, topk):
    """16 GiB of queries, then 10 GiB of keys: some rows, including the last, equal the reference of these rows
    alone.
    """
    with jax.default_device(cuda):
        key_q, key_kv, key_i = jax.random.split(jax.random.key(0), 3)
        q = jax.random.normal(key_q, (1, s_q, h_q, d), jnp.bfloat16)
        kv = jax.random.normal(key_kv, (1, s_kv, d), jnp.bfloat16) / 8
        indices = jax.random.randint(key_i, (1, s_q, topk), 0, s_kv).at[0, -1, 0].set(s_kv - 1)
        rows = np.unique(np.append(np.random.default_rng(0).integers(0, s_q, 200), [0, s_q - 1]))
        o, lse = sparse_fmha(q, kv, indices, d_v=512, implementation="cubin")
        want = reference.sparse_fmha(q[:, rows].astype(jnp.float32), kv, indices[:, rows], d_v=512)
        assert_right((o[:, rows], lse[:, rows]), want)


def test_every_key_named_is_dense():
    q, kv, _, sink = operands()
    everything = jnp.broadcast_to(jnp.arange(S_KV, dtype=jnp.int32)[::-1], (B, S_Q, S_KV))
    got, want = sparse_fmha(q, kv, everything, sink=sink), fmha(q, kv[:, :, None], sink=sink)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_a_key_named_twice_counts_twice():
    q, kv, _, _ = operands()
    _, once = sparse_fmha(q, kv, jnp.full((B, S_Q, 1), 4, jnp.int32))
    o, twice = sparse_fmha(q, kv, jnp.full((B, S_Q, 2), 4, jnp.int32))
    np.testing.assert_allclose(twice, once + np.log(2), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(o, jnp.broadcast_to(kv[:, None, None, 4], o.shape), rtol=1e-5)


def test_a_length_of_a_source_cuts_like_absent_indices():
    """As kernels take selections."""
    q, kv, indices, sink = operands()
    length = jnp.array([[0, 3, 8, 100, -1]] * B, jnp.int32)
    cut = jnp.where(jnp.arange(TOPK) < length[..., None], indices, -1)
    want = sparse_fmha(q, kv, cut, sink=sink)
    got = SelectionSource(kv, indices, length).reference(q, sink, q.shape[-1] ** -0.5)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)
    assert (got[0][:, [0, 4]] == 0).all() and (got[1][:, [0, 4]] == -jnp.inf).all()


def test_gradients():
    """They equal those of the dense softmax over gathered keys; a key that nobody names has none, and may even be
    NaN.
    """
    q, kv, indices, sink = operands()
    indices = indices.at[0, 0].set(-1)

    def loss(op, q, kv, sink):
        o, lse = op(q, kv, sink)
        return (o * jnp.cos(jnp.arange(o.size).reshape(o.shape))).sum() + jnp.where(jnp.isinf(lse), 0, lse).sum()

    def dense(q, kv, sink):
        named = (indices[..., None] == jnp.arange(S_KV)).any(2)
        s = jnp.where(named[:, :, None], jnp.einsum("bnhd,bkd->bnhk", q, kv) * D**-0.5, -1e30)
        lse = jnp.where(named.any(-1)[..., None], jax.nn.logsumexp(s, -1), -jnp.inf)
        p = jnp.exp(s - jnp.logaddexp(jnp.where(jnp.isinf(lse), -1e30, lse), sink)[..., None])
        return jnp.einsum("bnhk,bkd->bnhd", p, kv), lse

    want = jax.jit(jax.grad(lambda *x: loss(dense, *x), (0, 1, 2)))(q, kv, sink)
    sparse = jax.jit(jax.grad(lambda *x: loss(lambda q, kv, s: sparse_fmha(q, kv, indices, sink=s), *x), (0, 1, 2)))
    for x in (kv, kv.at[:, S_KV - 1].set(jnp.nan)):  # nobody names the last
        for got, y in zip(sparse(q, x, sink), want, strict=True):
            np.testing.assert_allclose(got, y, rtol=1e-4, atol=1e-5)


def test_vmap():
    q, kv, indices, sink = (jnp.stack([x, x[::-1]]) for x in operands())
    f = jax.jit(lambda q, kv, i, s: sparse_fmha(q, kv, i, sink=s))
    got = jax.vmap(f)(q, kv, indices, sink)
    for i in range(2):
        for x, y in zip(got, f(q[i], kv[i], indices[i], sink[i]), strict=True):
            np.testing.assert_allclose(x[i], y, rtol=1e-5, atol=1e-6)
