"""The bytes of a cache are the same if a prompt comes in two chunks; one rounding changes a group of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha import quantize_cache
from jax_dsv4_fmha.layers import from_config

CONFIG = {
    "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 64, "o_groups": 2, "o_lora_rank": 16, "sliding_window": 128, "index_n_heads": 4,
    "index_head_dim": 128, "index_topk": 8, "rope_theta": 10000, "compress_rope_theta": 160000,
    "compress_ratios": [0, 4],
}  # fmt: skip
TOKENS = 40


@functools.cache
def prompt(ratio):
    """A layer, parameters and x, whose products with x are sums of small integers: exact in any order."""
    layer = next(layer for layer in from_config(CONFIG) if layer.ratio == ratio)
    keys = iter(jax.random.split(jax.random.key(0), 40))

    def integers(x):
        return jax.random.randint(next(keys), x.shape, -2, 3).astype(jnp.bfloat16) if x.ndim > 1 else x

    params = jax.tree.map(integers, layer.init(next(keys)))
    x = jax.random.randint(next(keys), (2, TOKENS, layer.hidden), -2, 3).astype(jnp.bfloat16)
    run = jax.jit(lambda cache, x, start: layer(params, x, cache, start=start).cache)
    return layer, x, run


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("ratio", [0, 4])
@pytest.mark.parametrize("cut", [1, 15])
def test_two_chunks_fill_a_cache_with_the_bytes_of_one(ratio, dtype, cut):
    """XLA's products have the same bits here. Products of few rows may have others, as docs/layouts.md says."""
    layer, x, run = prompt(ratio)
    empty = layer.cache(2, TOKENS, jnp.dtype(dtype))
    one = run(empty, x, 0)
    two = run(run(empty, x[:, :cut], 0), x[:, cut:], cut)
    assert one.window.entries.any()
    for path, want in jax.tree_util.tree_leaves_with_path(one):
        got = functools.reduce(lambda tree, key: getattr(tree, key.name, None), path, two)
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8), str(path))


@pytest.mark.parametrize("layout, group", [("v4_fp8", 64), ("v41_fp8", 32)])
def test_one_rounding_may_change_a_whole_group(layout, group):
    """A greatest value of 3.5 is the last that a scale of 2^-7 holds; the next bfloat16 doubles the scale."""
    entry = np.asarray(jax.random.uniform(jax.random.key(0), (512,), minval=1, maxval=3), jnp.bfloat16)
    below, above = entry.copy(), entry.copy()
    below[5] = 3.5
    above[5] = np.nextafter(below[5], np.asarray(4, below.dtype))
    pages = (np.asarray(quantize_cache(jnp.asarray(x)[None], layout)) for x in (below, above))
    assert np.not_equal(*pages).sum() == group + 1
