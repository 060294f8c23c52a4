"""Every op under JAX's own options: 64 bits, no promotion of ranks or of types."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha import (
    Cache,
    Span,
    dequantize_cache,
    dot_product_attention,
    dsv4_attention,
    dsv4_decode,
    fmha,
    merge,
    quantize_cache,
    reference,
    sparse_fmha,
)
from tests.helpers import normal_in_numpy as normal

B, S_Q, S_KV, H, D = 2, 5, 9, 4, 16
MODES = {
    "64 bits": lambda: jax.enable_x64(True),
    "no rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "no type promotion": lambda: jax.numpy_dtype_promotion("strict"),
}


Q, K, KV, SINK = normal(0, B, S_Q, H, D), normal(1, B, S_KV, 1, D), normal(2, B, S_KV, D), normal(3, H)
INDICES = np.random.default_rng(4).integers(-2, S_KV, (B, S_Q, 3), np.int32)
LENGTHS = np.array([3, 5], np.int32)
IDS = np.array([[1, 1, 2, 2, 2, 3, 3, 0, 0]] * B, np.int32)
LAYER = {"window": 3, "q_offset": LENGTHS, "sink": SINK}
STEP = {"window": 3, "sink": SINK}
DROP_IN = {"is_causal": True, "local_window_size": (2, 3), "query_seq_lengths": LENGTHS}

# calls of an implementation and q; an int is also passed at a jit boundary
CALLS = {
    "fmha": lambda i, q: fmha(q, K, sink=SINK, implementation=i),
    "bounds": lambda i, q: fmha(q, K, span=Span(0, 5) & Span(1, 2**40) & Span.causal(S_Q), implementation=i),
    "bounds at a jit boundary": lambda i, q: jax.jit(lambda s: fmha(q, K, span=s, implementation=i))(Span(0, 5)),
    "windows": lambda i, q: jax.jit(
        lambda p: fmha(q, K, span=Span.sliding_window(S_Q, 3, p) & Span.compressed(S_Q, 2, p), implementation=i)
    )(3),
    "segments": lambda i, q: fmha(q, K, span=Span.segments(IDS[:, :S_Q], IDS), implementation=i),
    "sparse_fmha": lambda i, q: sparse_fmha(q, KV, INDICES, sink=SINK, implementation=i),
    "a pool": lambda i, q: sparse_fmha(q, KV[0], INDICES, sink=SINK, implementation=i),
    "top-k layer": lambda i, q: dsv4_attention(q, KV, KV, indices=INDICES, implementation=i, **LAYER),
    "dense layer": lambda i, q: dsv4_attention(q, KV, KV, ratio=2, implementation=i, **LAYER),
    "chunk": lambda i, q: dsv4_attention(
        q,
        KV,
        KV,
        window=Span.sliding_window(S_Q, 3, LENGTHS).keys_from(LENGTHS - 2) & Span.lengths(LENGTHS),
        ratio=2,
        q_offset=LENGTHS,
        implementation=i,
    ),
    "definition": lambda i, q: reference.dsv4_attention(q, KV, KV, ratio=2, **LAYER),
    "step": lambda i, q: jax.jit(
        lambda n: dsv4_decode(q, Cache(KV), Cache(KV), lengths=n, ratio=2, implementation=i, **STEP)
    )(LENGTHS),
    "top-k step": lambda i, q: dsv4_decode(
        q, Cache(KV), Cache(KV), lengths=5, indices=INDICES, implementation=i, **STEP
    ),
    "drop-in": lambda i, q: dot_product_attention(
        q, K, K, key_value_seq_lengths=LENGTHS, implementation=i, return_residual=True, **DROP_IN
    ),
    "mask": lambda i, q: dot_product_attention(q, K, K, mask=np.tri(S_Q, S_KV, dtype=bool)[None, None]),
    "merge": lambda i, q: merge([(q, q[..., 0]), (q, q[..., 1])], SINK),
    "append": lambda i, q: Cache(jnp.asarray(KV)).append(KV[:, :S_Q], INDICES[..., 0]),
    "FP8": lambda i, q: dequantize_cache(quantize_cache(jnp.tile(q, 32))),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_and_its_gradient_trace(name, mode):
    f, implementation = CALLS[name], None  # tracing the reference gives their shapes
    with MODES[mode]():
        got = jax.eval_shape(lambda q: f(implementation, q), Q)
        assert all(x.dtype.itemsize <= 4 for x in jax.tree.leaves(got))
        if name in ("bounds", "segments", "a pool", "top-k layer"):
            grad = jax.eval_shape(jax.grad(lambda q: jax.tree.leaves(f(implementation, q))[0].sum()), Q)
            assert grad.dtype == jnp.float32


@pytest.mark.parametrize("name", ["bounds at a jit boundary", "drop-in"])
def test_64_bits_change_nothing(name):
    for implementation in (None, "reference"):
        run = jax.jit(lambda q, i=implementation: CALLS[name](i, q))
        with jax.enable_x64(True):
            got = run(Q)
        for x, y in zip(got, run(Q), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("precision", [None, "highest"])
def test_16_bit_gradients_heed_the_default_precision(precision):
    q, k = (jnp.asarray(x, jnp.bfloat16) for x in (Q, K))
    with jax.default_matmul_precision(precision) if precision else contextlib.nullcontext():
        for f in (lambda q: fmha(q, k), lambda q: sparse_fmha(q, k[:, :, 0], INDICES)):
            text = str(jax.make_jaxpr(jax.grad(lambda q, f=f: f(q)[0].astype(jnp.float32).sum()))(q))
            assert "precision=(Precision.HIGHEST" in text  # always the reference's
            rest = text.count("dot_general[") - text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")
            assert (rest == 0) == (precision == "highest")


@pytest.mark.parametrize("scale", [np.float16(0.5), np.float32(0.5), np.float64(0.5), np.int8(2), 1])
def test_any_number_may_be_a_scale(scale):
    """Warnings are errors here."""
    jax.eval_shape(lambda q: fmha(q, K, scale=scale), Q)
