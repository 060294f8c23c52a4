"""Places, pages and rings that former sequences used: nothing that they left reaches the next sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha.layers import Compressor, DSV4Attention, Rope, Shared, from_config
from tests.test_layers import MODELS, hidden, random_params

pytestmark = pytest.mark.usefixtures("quick_to_compile")

TOKENS = 20
WIDE = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
RATES = {"compress_rates": {"heavily_compressed_attention": 16}}  # long blocks, of which a cache keeps running sums


def left_behind(caches, number):
    """Caches with `number` in every place of floats, and bytes that read as NaN; counts stay as they are."""

    def spoilt(x):
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.full_like(x, number)
        return jnp.full_like(x, 0xFF) if x.dtype == jnp.uint8 else x

    return jax.tree.map(spoilt, caches)


def answers(layers, params, x, caches):
    """A sequence by a chunk and then steps, and by steps alone."""

    def tokens(caches, x, method, **at):
        shared, kept = Shared(), []
        for layer, p, cache in zip(layers, params, caches, strict=True):
            out = getattr(layer, method)(p, x, cache, shared, **at)
            x, shared = x + out.y, shared.after(out)
            kept.append(out.cache)
        return kept, x

    chunk = jax.jit(lambda caches, x: tokens(caches, x, "__call__", lengths=jnp.array([10], jnp.int32)))
    step = jax.jit(lambda caches, x, n: tokens(caches, x, "step", lengths=n))

    def from_(first, caches):
        found = []
        if first:
            caches, y = chunk(caches, x[:, : first + 1])  # and one of padding
            found.append(y[:, :first])
        for n in range(first, TOKENS):
            caches, y = step(caches, x[:, n : n + 1], jnp.int32(n + 1))
            found.append(y)
        return np.concatenate([np.asarray(y, np.float32) for y in found], 1)

    return [[from_(first, given) for first in (10, 0)] for given in caches]


@pytest.mark.parametrize(
    "name, changes, dtype, paged",
    [
        ("v4", {}, "float32", False),
        ("v4", RATES, "float32", True),
        pytest.param("v4.1", {}, "float32", False, marks=pytest.mark.slow),
        pytest.param("v4", WIDE | RATES, "float8_e4m3fn", False, marks=pytest.mark.slow),
        pytest.param("v4.1", WIDE, "float4_e2m1fn", True, marks=pytest.mark.slow),
    ],
)
def test_nothing_need_be_cleared(name, changes, dtype, paged):
    layers = from_config(MODELS[name] | changes)
    params = [random_params(layer, i) for i, layer in enumerate(layers)]
    x = hidden(1, TOKENS).astype(jnp.float32 if dtype == "float32" else jnp.bfloat16)
    table = jnp.array([[1, 0]], jnp.int32) if paged else None
    caches = [layer.cache(1, TOKENS, jnp.dtype(dtype), steps=2, block_table=table) for layer in layers]
    given = [caches, *(left_behind(caches, number) for number in (np.nan, np.inf))]
    want, *others = answers(layers, params, x, given)
    assert np.isfinite(want).all()
    for got in others:  # keys that are not finite are multiplied in another order
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("ratio, overlap", [(4, True), (4, False), (16, False)])
def test_tokens_of_a_former_sequence(ratio, overlap, number):
    """A compressor alone, after a chunk that was not finite."""
    compressor = Compressor(16, 8, ratio, overlap)
    params, x = compressor.init(jax.random.key(0)), hidden(1, 2 * ratio)[..., :16]
    at = jnp.zeros(1, jnp.int32)
    _, _, state = compressor.extend(params, jnp.full_like(x, number), compressor.state(1), at, at + 2 * ratio)
    extend, found = jax.jit(compressor.extend), []
    for i in range(2 * ratio):
        latents, entry, state = extend(params, x[:, i : i + 1], state, at + i, at + i + 1)
        found += [latents[:, 0]] if entry[0, 0] >= 0 else []
    np.testing.assert_allclose(jnp.stack(found, 1), compressor(params, x), rtol=1e-5, atol=1e-6)


def test_a_gradient_through_a_place_that_is_used_again():
    """Zero times NaN is not zero in a gradient either."""
    layer = DSV4Attention(
        24, 2, 16, q_rank=8, o_groups=2, o_rank=8, window=4, rope=Rope(8), ratio=4,
        compressor=Compressor(24, 16, 4, overlap=True),
    )  # fmt: skip
    params, x = random_params(layer, 0), hidden(1, 4)
    cache = layer.cache(1, 8, jnp.float32, steps=4)

    @jax.jit
    def gradient(cache):
        return jax.grad(lambda p: jnp.sum(layer.step(p, x, cache, lengths=4, implementation="reference").y))(params)

    jax.tree.map(np.testing.assert_array_equal, gradient(left_behind(cache, np.nan)), gradient(cache))


def test_documents_whose_scores_are_far_below_zero():
    """Before a row's first token there is no block: it is left out, and does not count as one with scores of 0."""
    compressor = Compressor(16, 8, 4, overlap=True)
    params = compressor.init(jax.random.key(0)) | {"ape": jnp.full((4, 16), -200.0)}
    layer = DSV4Attention(16, 2, 8, q_rank=8, o_groups=2, o_rank=8, rope=Rope(8), ratio=4, compressor=compressor)
    p, x = random_params(layer, 0) | {"compressor": params}, hidden(1, 12)[..., :16]
    whole, packed = (
        jax.jit(lambda x, ids: layer(p, x, segment_ids=ids).y)(x, ids) for ids in (None, jnp.ones((1, 12), jnp.int32))
    )
    np.testing.assert_allclose(packed, whole, rtol=1e-5, atol=1e-6)
