"""flax's own attention modules with this package's attention, and layers as flax modules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

flax = pytest.importorskip("flax", reason="flax is not installed: pip install 'jax_dsv4_fmha[flax]'")
optax = pytest.importorskip("optax", reason="optax is not installed")

from flax import linen, nnx  # noqa: E402

from jax_dsv4_fmha.layers.flax import NNX, Linen, attention_fn  # noqa: E402
from tests.test_layers import hidden, model  # noqa: E402

B, S, WIDTH, HEADS = 2, 12, 32, 4
X = jnp.asarray(np.random.default_rng(0).standard_normal((B, S, WIDTH)), jnp.float32)
LENGTHS = jnp.array([[7], [12]])
REAL = jnp.arange(S)[None] < LENGTHS
IDS = jnp.array([[1] * 3 + [2] * 6 + [3] * 3, [1] * 11 + [2]])


def masks(of):
    """The masks that flax makes, by linen's functions or nnx's, and the queries that see a key."""
    causal = of.make_causal_mask(X[..., 0])
    documents = of.make_attention_mask(IDS, IDS, jnp.equal)
    return {
        "causal": (causal, jnp.ones((B, S), bool)),
        "padding": (of.make_attention_mask(REAL, REAL), REAL),
        "causal and padding": (of.combine_masks(causal, of.make_attention_mask(REAL, REAL)), REAL),
        "causal and left padding": (
            of.combine_masks(causal, of.make_attention_mask(REAL[:, ::-1], REAL[:, ::-1])),
            REAL[:, ::-1],
        ),
        "causal documents": (of.combine_masks(causal, documents), jnp.ones((B, S), bool)),
        "bool": (of.make_causal_mask(X[..., 0], dtype=bool), jnp.ones((B, S), bool)),
    }


def run(kind, attention, x, mask, **how):
    """Returns what flax's module gives, and the gradient of its parameters; attention None is flax's own."""
    chosen = {} if attention is None else {"attention_fn": attention}
    if kind == "linen":
        module = linen.MultiHeadDotProductAttention(HEADS, **chosen)
        params = module.init(jax.random.key(0), X)

        def loss(params):
            y = module.apply(params, x, mask=mask)
            return jnp.cos(jnp.where(how["real"][..., None], y, 0)).sum(), y

        return jax.value_and_grad(loss, has_aux=True)(params)
    module = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=nnx.Rngs(0), **chosen)

    def loss_of(module):
        y = module(x, mask=mask)
        return jnp.cos(jnp.where(how["real"][..., None], y, 0)).sum(), y

    return nnx.value_and_grad(loss_of, has_aux=True)(module)


def assert_close(got, want, real):
    ((_, y), grads), ((_, exact), exactly) = got, want
    np.testing.assert_allclose(y[real], exact[real], rtol=1e-4, atol=1e-5)
    for x, z in zip(jax.tree.leaves(grads), jax.tree.leaves(exactly), strict=True):
        np.testing.assert_allclose(x, z, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", masks(linen))
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_flax_s_masks(kind, name):
    """Known while tracing, and traced. Queries without a key do not count: flax gives them the mean of all values."""
    mask, real = masks({"linen": linen, "nnx": nnx}[kind])[name]
    want = run(kind, None, X, mask, real=real)
    assert_close(run(kind, attention_fn, X, mask, real=real), want, real)
    traced = jax.jit(lambda x, mask, real: jax.tree.map(jnp.asarray, run(kind, attention_fn, x, mask, real=real)))
    assert_close(traced(X, mask, real), want, real)


def test_masks_without_axes_for_batch_and_heads():
    mask = np.tril(np.ones((S, S)))
    q = jnp.asarray(np.random.default_rng(1).standard_normal((B, S, HEADS, 8)), jnp.float32)
    want = linen.dot_product_attention(q, q, q, mask=mask)
    np.testing.assert_allclose(attention_fn(q, q, q, mask=mask), want, rtol=1e-4, atol=1e-5)
    alone = attention_fn(q[0], q[0], q[0], mask=mask[None])
    np.testing.assert_allclose(alone, want[0], rtol=1e-4, atol=1e-5)


def decode(kind, attention):
    """All tokens of X one by one, through the caches of flax's own module."""
    chosen = {} if attention is None else {"attention_fn": attention}
    if kind == "linen":
        module = linen.MultiHeadDotProductAttention(HEADS, decode=True, **chosen)
        variables = module.init(jax.random.key(0), X)
        params, cache = variables["params"], variables["cache"]
        step = jax.jit(lambda cache, x: module.apply({"params": params, "cache": cache}, x, mutable="cache"))
        out = []
        for i in range(S):
            y, kept = step(cache, X[:, i : i + 1])
            cache = kept["cache"]
            out.append(y)
        return jnp.concatenate(out, 1)
    module = nnx.MultiHeadAttention(HEADS, WIDTH, decode=True, rngs=nnx.Rngs(0), **chosen)
    module.init_cache(X.shape)
    step = nnx.jit(lambda module, x: module(x))
    return jnp.concatenate([step(module, X[:, i : i + 1]) for i in range(S)], 1)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_flax_s_decoding(kind):
    np.testing.assert_allclose(decode(kind, attention_fn), decode(kind, None), rtol=1e-4, atol=1e-5)


def test_options_of_this_package():
    """A window, beside flax's module whose mask is that window."""
    mask = np.tril(np.ones((1, 1, S, S))) - np.tril(np.ones((1, 1, S, S)), -3)
    everything = jnp.ones((B, S), bool)
    local = functools.partial(attention_fn, local_window_size=(2, 0), implementation="reference")
    assert_close(run("nnx", local, X, None, real=everything), run("nnx", None, X, mask, real=everything), everything)


def test_dropout_is_refused_where_it_would_happen():
    module = nnx.MultiHeadAttention(
        HEADS, WIDTH, decode=False, dropout_rate=0.1, attention_fn=attention_fn, rngs=nnx.Rngs(0)
    )
    with pytest.raises(NotImplementedError, match=r"attention_fn: dropout_rate: got 0.1, wanted 0, or deterministic"):
        module(X, deterministic=False)
    plain = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(module(X, deterministic=True), plain(X), rtol=1e-4, atol=1e-5)
    of_linen = linen.MultiHeadDotProductAttention(HEADS, dropout_rate=0.1, attention_fn=attention_fn)
    with pytest.raises(NotImplementedError, match=r"dropout_rate: got 0\.1"):
        of_linen.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X, deterministic=False)


@pytest.mark.parametrize(
    "how, error, message",
    [
        ({"bias": np.zeros((1, 1, S, S), np.float32)}, NotImplementedError, r"bias: got float32\[1, 1, 12, 12\]"),
        ({"module": object()}, NotImplementedError, r"module \(sow_weights\): got object, wanted None"),
        ({"qk_attn_weights_einsum": jnp.einsum}, NotImplementedError, "qk_attn_weights_einsum: got function"),
        ({"mask": np.ones((1, HEADS, S, S))}, NotImplementedError, "mask: got bool.*wanted one mask for all heads"),
        ({"mask": np.eye(S)[None, None] != 1}, NotImplementedError, "mask: got bool.*wanted one interval of keys"),
        ({"mask": np.ones((1, 1, 3, S))}, ValueError, "mask: got bool.*wanted a 4-D bool array that broadcasts to"),
    ],
)  # fmt: skip
def test_errors(how, error, message):
    q = jnp.ones((B, S, HEADS, 8))
    with pytest.raises(error, match=message):
        attention_fn(q, q, q, **how)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_layers_as_modules_train(kind):
    """Ten steps of Adam towards a target; the loss falls, and the first result is the layer's."""
    layer, x = model("v4")[0][1], hidden(2, 12)
    target = hidden(2, 12, seed=1)
    optimizer = optax.adam(3e-2)
    if kind == "linen":
        module = Linen(layer)
        params = jax.jit(module.init)(jax.random.key(0), x)
        run = module.apply
        own = params["params"]["layer"]
    else:
        graph, params = nnx.split(NNX(layer, rngs=nnx.Rngs(0)))
        own = nnx.to_pure_dict(params)["params"]

        def run(params, x):
            return nnx.merge(graph, params)(x)

    def loss(params):
        return jnp.mean((run(params, x).y - target) ** 2)

    @jax.jit
    def step(params, state):
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    want = jax.jit(lambda p: jnp.mean((layer(p, x).y - target) ** 2))(own)
    state, values = optimizer.init(params), []
    for _ in range(10):
        params, state, value = step(params, state)
        values.append(float(value))
    np.testing.assert_allclose(values[0], want, rtol=1e-5)
    assert values[-1] < 0.8 * values[0]


def test_a_train_step_of_nnx_compiles_once():
    """It learns by flax's own optimizer; every parameter of `layer.init` is a Param."""
    layer, x = model("v4")[0][0], hidden(2, 12)
    module = NNX(layer, rngs=nnx.Rngs(0))
    optimizer, traced = nnx.Optimizer(module, optax.adam(1e-2), wrt=nnx.Param), []

    @nnx.jit
    def step(module, optimizer, x):
        traced.append(x)
        loss, gradient = nnx.value_and_grad(lambda module: jnp.mean(module(x).y ** 2))(module)
        optimizer.update(module, gradient)
        return loss

    losses = [float(step(module, optimizer, x)) for _ in range(3)]
    assert len(traced) == 1 and losses[2] < losses[0]
    params = nnx.to_flat_state(nnx.state(module, nnx.Param))
    assert len(params) == len(jax.tree.leaves(jax.eval_shape(layer.init, jax.random.key(0))))
    assert all(isinstance(p.get_value(), jax.Array) for _, p in params)
