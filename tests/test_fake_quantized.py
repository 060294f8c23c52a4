"""Layers that round as the models' caches do: V4.1 in every run, V4 where asked."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_dsv4_fmha import dequantize_cache, quantize_cache
from jax_dsv4_fmha._definitions.packed import LAYOUTS, rounded
from jax_dsv4_fmha.layers import DSV4Attention, Indexer, Rope, from_config
from tests import layers_float64
from tests.helpers import normal
from tests.test_layers import MODELS, hidden, random_params

V4 = MODELS["v4"] | {"head_dim": 72, "index_head_dim": 32}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_numbers_that_a_cache_holds(layout, dtype):
    """Where a rounding to bfloat16 comes right before it, in one program, which XLA could leave out."""
    plain = LAYOUTS[layout].d - LAYOUTS[layout].packed
    x = normal(0, 3, 40, LAYOUTS[layout].d) * 10.0 ** normal(1, 3, 40, 1)
    made = jax.jit(lambda x: (x * 1.7).astype(dtype))
    got = jax.jit(lambda x: rounded(made(x), layout, plain))(x)
    want = np.array(dequantize_cache(quantize_cache(made(x), layout), layout), np.float32)
    want[..., -plain or 512 :] = np.asarray(made(x), np.float32)[..., -plain or 512 :]
    np.testing.assert_array_equal(np.asarray(got, np.float32), want if dtype == "float32" else want.astype(got.dtype))
    assert got.dtype == dtype and np.any(np.asarray(got) != np.asarray(made(x)))


def test_index_fp4_byte_by_byte():
    """Groups of zeros, at the least scale, half-way between two codes, and at and right above 6 times a power of 2."""
    entries = normal(0, 2, 9, 128) * 10.0 ** normal(1, 2, 9, 1)
    entries = entries.at[0, 0, :32].set(0).at[0, 1, :32].set(2.0**-126).at[1, 2, 96:].set(jnp.arange(32) / 4)
    entries = entries.at[1, 0, :64].set(jnp.repeat(jnp.array([6.0, 6.03125]), 32)).astype(jnp.bfloat16)
    for page, of_page in zip(jax.jit(lambda x: quantize_cache(x, "index_fp4"))(entries), entries, strict=True):
        groups = np.asarray(of_page, np.float64).reshape(9, 4, 32)
        exponent = np.ceil(np.log2(np.maximum(np.abs(groups).max(-1), 6 * 2.0**-126) / 6))
        codes = (groups / 2 ** exponent[..., None]).astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(9, 128) & 15
        want = np.concatenate(
            [(codes[:, ::2] | codes[:, 1::2] << 4).ravel(), (exponent + 127).astype(np.uint8).ravel()]
        )
        np.testing.assert_array_equal(page, want)
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64).reshape(groups.shape) * 2 ** exponent[..., None]
        values = values.reshape(9, 128)
        got = np.asarray(dequantize_cache(page, "index_fp4"), np.float64)
        np.testing.assert_array_equal(np.where(np.abs(values) < 2.0**-126, 0, values), got)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_index_fp4_keeps_what_is_no_number(bad):
    x = jnp.ones((1, 128)).at[0, 40].set(bad)
    got = np.asarray(dequantize_cache(quantize_cache(x, "index_fp4"), "index_fp4"))
    np.testing.assert_array_equal(np.isnan(got), (np.arange(128) // 32 == 1)[None])


def test_gradient_passes_straight_through():
    x, dy = normal(0, 3, 64), normal(1, 3, 64)
    f = functools.partial(rounded, layout="v41_fp4")
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: jnp.vdot(f(x), dy)))(x), dy)
    np.testing.assert_array_equal(jax.jvp(f, (x,), (dy,))[1], dy)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_v4_where_asked(kind):
    """Against float64; by default it rounds nothing."""
    layer = from_config(V4, fake_quantize=True)[kind]
    p, x = random_params(layer, kind), hidden(1, 30)
    got = jax.jit(lambda p, x: layer(p, x).y)(p, x)[0]
    want = layers_float64.layer(layer, jax.tree.map(lambda x: np.asarray(x, np.float64), p), np.asarray(x[0]), {})
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    exact = from_config(V4)[kind]
    assert not exact.fake_quantize and np.abs(jax.jit(exact)(p, x).y[0] - want).max() > 1e-2


@pytest.mark.slow
def test_v4_in_steps():
    """Plain caches hold what a prompt without caches computes with."""
    layer = from_config(V4, fake_quantize=True)[1]
    p, x = random_params(layer, 1), hidden(2, 26)
    want = jax.jit(lambda p, x: layer(p, x).y)(p, x)
    y, cache = jax.jit(lambda p, x, c: layer(p, x, c)[:2])(p, x[:, :17], layer.cache(2, 30, jnp.float32))
    np.testing.assert_allclose(y, want[:, :17], rtol=2e-5, atol=2e-5)
    step = jax.jit(lambda p, x, c, n: layer.step(p, x, c, lengths=n)[:2])
    for n in range(18, 27):
        y, cache = step(p, x[:, n - 1 : n], cache, n)
        np.testing.assert_allclose(y[:, 0], want[:, n - 1], rtol=2e-5, atol=2e-5)


def test_gradient_of_every_parameter():
    """Of V4.1's first layer with a choice: none is lost in rounding, but choosing has none."""
    layer = from_config(MODELS["v4.1"])[1]
    p, x = random_params(layer, 0), hidden(2, 12)
    got = jax.jit(jax.grad(lambda p: (layer(p, x).y ** 2).sum()))(p)
    for path, g in jax.tree_util.tree_leaves_with_path(got):
        assert np.any(g) == (path[0].key != "indexer") and np.all(np.isfinite(g)), path


def test_what_cannot_be_rounded():
    sizes = {"hidden": 64, "heads": 4, "q_rank": 32, "o_groups": 2, "o_rank": 16, "rope": Rope(8)}
    with pytest.raises(ValueError, match="d: got 48, wanted a multiple of 32 with fake_quantize"):
        DSV4Attention(**sizes, d=48, norm_heads=False, fake_quantize=True)
    with pytest.raises(ValueError, match="d: got 64, wanted a multiple of 64 with fake_quantize, and 8 for RoPE"):
        DSV4Attention(**sizes, d=64, fake_quantize=True)
    with pytest.raises(ValueError, match="Indexer: d: got 16, wanted a multiple of 32 with fake_quantize"):
        Indexer(64, 32, d=16, fake_quantize=True)
    with pytest.raises(ValueError, match=r"indexer\.fake_quantize: got False, wanted True"):
        DSV4Attention(
            **sizes, d=32, ratio=2, sparse=True, norm_heads=False, fake_quantize=True, indexer=Indexer(64, 32)
        )


@pytest.mark.parametrize("rounds", [None, True, False])
def test_option_of_config(rounds):
    wanted = {"v4": bool(rounds), "v4.1": rounds is not False}
    for name, config in (("v4", V4), ("v4.1", MODELS["v4.1"])):
        layers = from_config(config, fake_quantize=rounds)
        assert {layer.fake_quantize for layer in layers} == {wanted[name]}
        assert {layer.indexer.fake_quantize for layer in layers if layer.indexer} == {wanted[name]}
