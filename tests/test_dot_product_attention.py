"""dot_product_attention against `jax.nn`, where the two overlap, and what it adds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha import dot_product_attention, fmha

B, T, S, N, K, H = 2, 11, 14, 4, 2, 16
LENGTHS = np.array([5, 9], np.int32)


def operands(dtype=jnp.float32, shape=(B,)):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal((*shape, *s)), dtype) for s in ((T, N, H), (S, K, H), (S, K, H)))


ARGUMENTS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (3, 2)},
    "causal_window": {"local_window_size": 4, "is_causal": True},
    "lengths": {"key_value_seq_lengths": LENGTHS},
    "both_lengths": {"key_value_seq_lengths": LENGTHS, "query_seq_lengths": LENGTHS[::-1].copy(), "is_causal": True},
    "mask": {"mask": np.tril(np.ones((1, 1, T, S), bool), 2)},
    "mask_of_a_band": {"mask": np.triu(np.tril(np.ones((1, 1, T, S), bool), 2), -1)},
    "mask_of_batches": {"mask": np.arange(S)[None, None, None] < LENGTHS[:, None, None, None]},
}


@pytest.mark.parametrize("kwargs", ARGUMENTS.values(), ids=ARGUMENTS)
def test_equals_jax_nn(kwargs):
    q, k, v = operands()
    want, want_lse = jax.nn.dot_product_attention(q, k, v, **kwargs, return_residual=True)
    got, lse = jax.jit(lambda q, k, v: dot_product_attention(q, k, v, **kwargs, return_residual=True))(q, k, v)
    seen = np.arange(T)[None] < kwargs.get("query_seq_lengths", np.full(B, T))[:, None]
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(lse[seen], want_lse[seen], rtol=1e-4, atol=1e-5)
    assert (lse[~seen] == -jnp.inf).all() and (got[~seen] == 0).all()


@pytest.mark.parametrize("name", ["causal", "causal_window", "lengths"])
def test_gradients_equal_jax_nn(name):
    how = ARGUMENTS[name]
    grads = [
        jax.jit(jax.grad(lambda *x, op=op: (op(*x, **how) ** 2).sum(), (0, 1, 2)))(*operands())
        for op in (dot_product_attention, jax.nn.dot_product_attention)
    ]
    for x, y in zip(*grads, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)


MODELS = {  # tokens, width, heads of q and of keys, head dimension, window, steps
    "small": (24, 16, 8, 2, 8, 6, 10),
    "gpt-oss": (384, 256, 64, 8, 64, 128, 20),
}


@pytest.mark.parametrize("name", ["small", pytest.param("gpt-oss", marks=pytest.mark.gpu)])
def test_a_model_with_sinks_and_windows_trains_to_the_same_losses(name, request):
    """Two layers: a window in the first, all that came before in the other; beside it the same model with attention in
    plain jnp, in float32."""
    s, width, heads, of_keys, d, window, steps = MODELS[name]
    dtype, implementation = jnp.float32, None
    if name == "gpt-oss":
        request.getfixturevalue("cuda")
        dtype, implementation = jnp.bfloat16, "cubin"
    rng = np.random.default_rng(0)

    def matrix(*shape):
        return jnp.asarray(rng.standard_normal(shape) * shape[0] ** -0.5, jnp.float32)

    def layer():
        projections = {"q": matrix(width, heads * d), "k": matrix(width, of_keys * d), "v": matrix(width, of_keys * d)}
        return projections | {"o": matrix(heads * d, width), "sink": matrix(heads)}

    params = [layer(), layer()]
    x, target = (jnp.asarray(rng.standard_normal((2, s, width)), jnp.float32) for _ in range(2))

    def ours(q, k, v, sink, local):
        how = {"is_causal": True, "local_window_size": local and (local - 1, 0), "implementation": implementation}
        return dot_product_attention(q, k, v, sinks=sink, **how)

    def plain(q, k, v, sink, local):
        q, k, v = (y.astype(jnp.float32) for y in (q, k, v))
        k, v = (jnp.repeat(y, heads // of_keys, axis=2) for y in (k, v))
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * d**-0.5
        i, j = jnp.arange(s)[:, None], jnp.arange(s)[None]
        logits = jnp.where((j <= i) & (i - j < (local or s)), logits, -jnp.inf)
        logits = jnp.concatenate([logits, jnp.broadcast_to(sink[None, :, None, None], (*logits.shape[:3], 1))], -1)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits)[..., :-1], v)

    def losses(attention):
        def loss(params):
            y = x
            for p, local in zip(params, (window, None), strict=True):
                q, k, v = ((y @ p[name]).reshape(2, s, -1, d).astype(dtype) for name in "qkv")
                y = y + attention(q, k, v, p["sink"], local).astype(jnp.float32).reshape(2, s, -1) @ p["o"]
            return jnp.mean((y - target) ** 2)

        def step(params, _):
            value, slopes = jax.value_and_grad(loss)(params)
            return jax.tree.map(lambda p, g: p - 0.5 * g, params, slopes), value

        return np.asarray(jax.jit(lambda params: jax.lax.scan(step, params, length=steps)[1])(params))

    got, want = losses(ours), losses(plain)
    assert (np.diff(want) < 0).all() and want[-1] < 0.95 * want[0], want
    np.testing.assert_allclose(got, want, rtol=1e-4 if dtype == jnp.float32 else 4e-3)


def test_three_dimensions():
    q, k, v = operands(shape=())
    got, lse = dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    assert got.shape == q.shape and lse.shape == q.shape[:-1]
    np.testing.assert_allclose(got, jax.nn.dot_product_attention(q, k, v, is_causal=True), rtol=2e-4, atol=1e-5)
    assert dot_product_attention(q, k, v, key_value_seq_lengths=LENGTHS[:1]).shape == q.shape


def test_sinks_and_shared_kv():
    q, k, _ = operands(jnp.bfloat16)
    sinks = jnp.linspace(-1, 1, N)
    got = dot_product_attention(q, k, k, sinks=sinks, return_residual=True)
    for x, y in zip(got, fmha(q, k, sink=sinks), strict=True):
        np.testing.assert_array_equal(x, y)
    assert got[1].dtype == jnp.float32


def test_residual_is_differentiable():
    q, k, v = operands()
    grad = jax.grad(lambda q: dot_product_attention(q, k, v, return_residual=True)[1].sum())(q)
    assert jnp.abs(grad).sum() > 0


def test_mask_of_rows_may_be_traced():
    q, k, v = operands()
    rows = np.arange(T)[None, None, :, None] < 4
    got = jax.jit(lambda q, k, v, mask: dot_product_attention(q, k, v, mask=mask))(q, k, v, rows)
    assert (got[:, 4:] == 0).all()
    np.testing.assert_allclose(got[:, :4], jax.nn.dot_product_attention(q, k, v)[:, :4], rtol=2e-4, atol=1e-5)


def test_a_mask_of_keys_may_be_traced_and_hide_any():
    q, k, v = operands()
    how = {"is_causal": True, "local_window_size": (5, 0)}
    mask = np.random.default_rng(1).random((B, 1, 1, S)) < 0.6
    mask[:, :, :, 0] = True  # so that every query sees a key: if it sees none, jax.nn gives the mean of all

    def total(op):
        return jax.jit(jax.value_and_grad(lambda x, mask: (op(*x, mask=mask, **how) ** 2).sum()))((q, k, v), mask)

    for x, y in zip(
        *map(jax.tree.leaves, map(total, (dot_product_attention, jax.nn.dot_product_attention))), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(  # known, and the same for the whole batch
        dot_product_attention(q, k, k, mask=mask[:1]),
        jax.nn.dot_product_attention(q, k, k, mask=mask[:1]),
        rtol=2e-4,
        atol=1e-5,
    )


def test_a_mask_of_keys_that_hides_all():
    q, k, v = operands()
    got = jax.jit(lambda mask: dot_product_attention(q, k, v, mask=mask))(
        np.arange(B)[:, None, None, None] == np.ones(S)
    )
    assert (got[0] == 0).all() and (got[1] != 0).all()


@pytest.mark.parametrize(
    "kwargs, error, message",
    [
        ({"bias": np.zeros((1, 1, T, S), np.float32)}, NotImplementedError, "bias: got float32.*wanted None"),
        ({"mask": np.ones((1, N, T, S), bool)}, NotImplementedError, "mask: got bool.*wanted one mask for all heads"),
        (
            {"mask": np.ones((T, 1), bool) & (np.arange(S)[None, None, None] % 2 == 0)},
            NotImplementedError,
            "wanted one interval of keys",
        ),
        (
            {"mask": (np.arange(T * S) != S + 2).reshape(1, 1, T, S)},  # one row has a hole
            NotImplementedError,
            "wanted one interval of keys",
        ),
        ({"mask": np.ones((T, S), bool)}, ValueError, "wanted a 4-D bool array"),
        ({"mask": np.ones((1, 1, T, S))}, ValueError, "wanted a 4-D bool array"),
        ({"local_window_size": -1}, ValueError, "local_window_size: got -1"),
        ({"local_window_size": (1, 2, 3)}, TypeError, "local_window_size"),
        ({"local_window_size": (1, True)}, TypeError, "local_window_size"),
        ({"is_causal": 1.0}, TypeError, "is_causal: got 1.0, wanted a bool"),
        ({"sinks": np.zeros(N + 1, np.float32)}, ValueError, r"sinks: got float32\[5\], wanted float32\[n=4\]"),
        ({"query_seq_lengths": LENGTHS.astype(np.int16)}, ValueError, r"query_seq_lengths: got int16"),
        ({"implementation": "cubin"}, NotImplementedError, "^dot_product_attention: implementation: got 'cubin' for"),
        ({"implementation": "cudnn"}, ValueError, "implementation: got 'cudnn', wanted None or 'cubin' or 'reference'"),
    ],
)
def test_errors(kwargs, error, message):
    with pytest.raises(error, match=message):
        dot_product_attention(*operands(), **kwargs)


@pytest.mark.parametrize("name", ["mask", "mask_of_a_band", "mask_of_batches"])
def test_a_traced_mask_of_intervals(name):
    """Also where it has rows of no key, which give 0."""
    q, k, v = operands()
    mask = np.broadcast_to(ARGUMENTS[name]["mask"], (B, 1, T, S)).copy()
    mask[1, :, 2:4] = False

    def total(op):
        def run(x, mask):
            o = jnp.where(mask.any(-1)[:, 0, :, None, None], op(*x, mask=mask), 0)
            return (o**2).sum(), o

        return jax.jit(jax.value_and_grad(run, has_aux=True))((q, k, v), mask)

    got, want = total(dot_product_attention), total(jax.nn.dot_product_attention)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


def test_a_traced_mask_of_other_rows_gives_nan_there():
    q, k, v = operands()
    mask = np.tril(np.ones((1, 1, T, S), bool), 2)
    mask[0, 0, 5, 2] = False
    o, lse = jax.jit(lambda mask: dot_product_attention(q, k, v, mask=mask, return_residual=True))(mask)
    broken = np.arange(T) == 5
    assert np.isnan(o[:, broken]).all() and np.isnan(lse[:, broken]).all()
    want = jax.nn.dot_product_attention(q, k, v, mask=mask)
    np.testing.assert_allclose(o[:, ~broken], want[:, ~broken], rtol=2e-4, atol=1e-5)


def test_errors_name_the_operands_as_here():
    q, k, v = operands()
    with pytest.raises(
        ValueError, match=rf"^dot_product_attention: query: got {N} heads of {T} queries, .* heads of key"
    ):
        dot_product_attention(q, k[:, :, :1].repeat(3, 2), v[:, :, :1].repeat(3, 2))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices("cpu")[:2])
    sharded = jax.device_put(k, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x")))
    with pytest.raises(
        ValueError, match=r"^dot_product_attention: key: got s_kv sharded over x, wanted that axis whole"
    ):
        dot_product_attention(
            jax.device_put(q, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())), sharded, sharded
        )
