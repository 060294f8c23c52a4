"""Probabilities at given entries, summed over heads: against float64, absent and repeated entries, meshes, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import head_summed_probabilities

B, S_Q, S_C, H, D, TOPK = 2, 6, 11, 4, 16, 7
SINK = np.array([0.3, -np.inf, 2.0, np.inf], np.float32)


def operands(dtype=jnp.float32):
    """Operands with NaN in an entry that nobody names, absent and repeated entries, and heads that saw nothing."""
    rng = np.random.default_rng(0)
    q, kv = rng.standard_normal((B, S_Q, H, D)), rng.standard_normal((B, S_C, D))
    kv[:, 5] = np.nan
    lse = rng.standard_normal((B, S_Q, H)) + 3
    lse[0, 1], lse[1, 2, 1] = -np.inf, np.inf
    indices = rng.choice([-(2**31), -1, 0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 2**31 - 1], (B, S_Q, TOPK))
    indices[0, 0, :2] = 3
    return (
        *(jnp.asarray(x, dtype) for x in (q, kv)),
        jnp.asarray(lse, jnp.float32),
        jnp.asarray(indices, jnp.int32),
    )


def by_loop(q, kv, lse, indices, sink=None, scale=D**-0.5):
    q, kv, lse = (np.asarray(x, np.float64) for x in (q, kv, lse))
    p = np.zeros(indices.shape)
    for n, i, j in np.ndindex(*p.shape):
        e = int(indices[n, i, j])
        if not 0 <= e < kv.shape[1]:
            continue
        for h in range(q.shape[2]):
            total = np.logaddexp(lse[n, i, h], -np.inf if sink is None else float(sink[h]))
            if np.isfinite(lse[n, i, h]) and np.isfinite(total):
                p[n, i, j] += np.exp(scale * q[n, i, h] @ kv[n, e] - total)
    return p


@pytest.mark.parametrize("sink", [None, SINK])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_is_what_a_loop_sums(dtype, sink):
    x = operands(dtype)
    got = head_summed_probabilities(*x, sink=sink, scale=0.3)
    np.testing.assert_allclose(got, by_loop(*x, sink, 0.3), rtol=1e-5, atol=1e-6)


def test_is_a_constant():
    q, kv, lse, indices = operands()
    gradients = jax.grad(lambda *x: jnp.sum(head_summed_probabilities(*x, indices)), (0, 1, 2))(q, kv, lse)
    assert all((g == 0).all() for g in gradients)


def test_vmap():
    q, kv, lse, indices = operands()
    f = functools.partial(head_summed_probabilities, sink=SINK)
    got = jax.vmap(f, (0, None, 0, 0))(jnp.stack([q, -q]), kv, jnp.stack([lse, lse]), jnp.stack([indices, indices]))
    np.testing.assert_allclose(got, jnp.stack([f(x, kv, lse, indices) for x in (q, -q)]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_meshes(kind):
    """Nothing is gathered; over shards of heads the result is summed."""
    x, f = operands(), functools.partial(head_summed_probabilities, sink=SINK)
    devices = jax.devices("cpu")[:8]
    mesh = jax.make_mesh((2, 2, 2), ("data", "queries", "heads"), axis_types=(kind,) * 3, devices=devices)
    specs = (P("data", "queries", "heads"), P("data"), P("data", "queries", "heads"), P("data", "queries"))
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(x, specs, strict=True)]
    program = jax.jit(f).lower(*placed).compile()
    assert not any(word in program.as_text() for word in ("all-gather", "all-to-all", "collective-permute"))
    np.testing.assert_allclose(program(*placed), f(*x), rtol=1e-5, atol=1e-6)


RIGHT = dict(zip(("q", "kv", "lse", "indices"), operands(), strict=True))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"kv": jnp.zeros((B, S_C, D + 1))}, ValueError, "kv: got float32.*d=16"),
        ({"lse": jnp.zeros((B, S_Q, 1))}, ValueError, "lse: got float32.*h_q=4"),
        ({"indices": jnp.zeros((B, S_Q, 2))}, ValueError, "indices: got float32"),
        ({"sink": jnp.zeros(3)}, ValueError, "sink: got float32.*h_q=4"),
        ({"scale": 0}, ValueError, "scale: got 0"),
        ({"implementation": "gpu"}, ValueError, "implementation: got 'gpu'"),
        ({"implementation": "cubin"}, NotImplementedError, "got 'cubin' for float32, d=16"),
    ],
)
def test_error(wrong, error, message):
    with pytest.raises(error, match=f"head_summed_probabilities: .*{message}"):
        head_summed_probabilities(**{**RIGHT, **wrong})


@pytest.mark.gpu
@pytest.mark.parametrize(("b", "s_q", "h", "topk"), [(2, 37, 1, 5), (1, 140, 64, 300), (1, 33, 200, 257)])
def test_kernel(cuda, b, s_q, h, topk):
    keys = jax.random.split(jax.random.key(0), 4)
    q, kv = (jax.random.normal(keys[i], s, jnp.bfloat16) for i, s in enumerate(((b, s_q, h, 512), (b, 700, 512))))
    indices = jax.random.randint(keys[2], (b, s_q, topk), -20, 720, jnp.int32)
    indices = jnp.where(indices == 699, 698, indices)
    kv = kv.at[:, 699].set(jnp.nan)
    lse = jax.random.normal(keys[3], (b, s_q, h)) + jnp.log(1.0 * topk)
    lse = lse.at[0, 0, 0].set(-jnp.inf).at[-1, -1, -1].set(jnp.inf)
    sink = jnp.linspace(-1, 1, h)
    want = by_loop_in_numpy(q, kv, lse, indices, sink)
    got = [head_summed_probabilities(q, kv, lse, indices, sink=sink, implementation="cubin") for _ in range(2)]
    np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-5 * want.max())
    np.testing.assert_array_equal(got[0], got[1])


def by_loop_in_numpy(q, kv, lse, indices, sink):
    """float64, a query at a time."""
    q, kv, lse, sink = (np.asarray(x, np.float64) for x in (q, kv, lse, sink))
    indices, p = np.asarray(indices), np.zeros(indices.shape)
    for n, i in np.ndindex(*p.shape[:2]):
        there = (indices[n, i] >= 0) & (indices[n, i] < kv.shape[1])
        adds = np.isfinite(lse[n, i])
        s = q.shape[-1] ** -0.5 * q[n, i, adds] @ kv[n, indices[n, i, there]].T
        p[n, i, there] = np.exp(s - np.logaddexp(lse[n, i, adds], sink[adds])[:, None]).sum(0)
    return p
