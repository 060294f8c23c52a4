"""Hundreds of steps of a model's layers on a GPU, in CUDA graphs: kernels at the same time make the bits that they make
one by one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha._bench.measure import KERNEL_BY_KERNEL
from jax_dsv4_fmha.layers import STEP_OPTIONS, from_config

SIZES = {
    "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 256, "o_groups": 8, "o_lora_rank": 128, "sliding_window": 128, "index_n_heads": 64,
    "index_head_dim": 128, "index_topk": 64, "rope_theta": 1e4, "compress_rope_theta": 1.6e5,
    "compress_ratios": [0, 4, 128],
}  # fmt: skip
B, LENGTH, DRAFTS = 32, 700, 3
GRAPHS = STEP_OPTIONS | {"xla_gpu_graph_min_graph_size": "1"}


def model(dtype):
    """Two passes over layers of all kinds, their parameters, and empty caches."""
    layers = from_config(SIZES) * 2
    made = [
        layer.joined(layer.init(key)) for layer, key in zip(layers, jax.random.split(jax.random.key(0), 6), strict=True)
    ]
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 2 or x.shape[0] == 512 < x.size else x, made)
    return layers, params, [layer.cache(B, LENGTH + DRAFTS, dtype, steps=DRAFTS) for layer in layers]


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_soak(dtype):
    """Sequences begin, grow by one to three tokens, take some back, end, and leave idle places."""
    layers, params, caches = model(jnp.dtype(dtype))

    def step(params, x, caches, lengths):
        kept = []
        for layer, p, cache in zip(layers, params, caches, strict=True):
            out = layer.step(p, x, cache, lengths=lengths)
            x, kept = x + out.y, [*kept, out.cache]
        return x, kept

    at_once, one_by_one = (
        jax.jit(step, donate_argnums=2, compiler_options=options) for options in (GRAPHS, KERNEL_BY_KERNEL)
    )
    other, rng = jax.tree.map(jnp.copy, caches), np.random.default_rng(0)
    lengths, key = np.zeros(B, np.int32), jax.random.key(1)
    for i in range(400):
        begins = (lengths == 0) & (rng.random(B) < 0.2)
        ends = (lengths > LENGTH - DRAFTS) | (rng.random(B) < 0.005)
        back = np.where(lengths > 8, rng.integers(0, DRAFTS, B), 0) * (rng.random(B) < 0.3)
        lengths = np.where(ends, 0, np.where(begins | (lengths > 0), lengths - back + DRAFTS, 0)).astype(np.int32)
        x = jax.random.normal(jax.random.fold_in(key, i), (B, DRAFTS, 512), jnp.bfloat16)
        y, caches = at_once(params, x, caches, jnp.asarray(lengths))
        z, other = one_by_one(params, x, other, jnp.asarray(lengths))
        if i % 40 == 39:
            assert np.isfinite(np.asarray(y, np.float32)[lengths > 0]).all()
            for a, b in zip(jax.tree.leaves((y, caches)), jax.tree.leaves((z, other)), strict=True):
                assert bool(((a == b) | (a != a) & (b != b)).all()), i  # or both are NaN
