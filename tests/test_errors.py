"""Malformed operands always raise one of three errors while the call is traced: what was given, what is wanted, what is
built.
"""

import functools
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jax_dsv4_fmha as lib
from jax_dsv4_fmha import Cache, QueryRope, Span

B, S_Q, S_KV, H_Q, H_KV, D, TOPK = 2, 3, 5, 4, 2, 8, 6
ERRORS = (ValueError, NotImplementedError, TypeError)


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.zeros(shape, dtype)


Q, K = array(B, S_Q, H_Q, D), array(B, S_KV, H_KV, D)
KV = array(B, S_KV, D)
SINK = array(H_Q, dtype=jnp.float32)
INDICES = array(B, S_Q, TOPK, dtype=jnp.int32)
LENS, PLACES = array(B, dtype=jnp.int32), array(B, S_Q, dtype=jnp.int32)
CACHE = Cache(array(4, S_KV, D), array(B, 2, dtype=jnp.int32))
FP8 = Cache.zeros(B, S_KV, dtype=jnp.float8_e4m3fn)
PART = (Q, array(B, S_Q, H_Q, dtype=jnp.float32))

# for every op: valid operands
CALLS: dict[str, dict[str, Any]] = {
    "fmha": {"q": Q, "k": K, "v": K, "span": Span.causal(S_Q), "sink": SINK, "scale": 0.5, "implementation": None},
    "sparse_fmha": {
        "q": Q, "kv": KV, "indices": INDICES, "sink": SINK, "scale": 0.5, "implementation": "reference",
    },
    "dsv4_attention": {
        "q": Q, "window_kv": KV, "compressed_kv": KV, "window": 2, "ratio": 4, "indices": INDICES, "q_offset": LENS,
        "sink": SINK, "rope": QueryRope(array(1, S_Q, 4, dtype=jnp.float32), 1e-6), "precision": None, "scale": 0.5,
        "implementation": None,
    },
    "dsv4_decode": {
        "q": Q, "window_cache": CACHE, "compressed_cache": CACHE, "lengths": LENS, "sink": SINK, "indices": INDICES,
        "ratio": 4, "window": 2, "q_offset": LENS, "is_causal": True, "precision": None, "scale": 0.5,
        "implementation": None,
    },
    "dot_product_attention": {
        "query": Q, "key": K, "value": K, "bias": None, "mask": np.ones((1, 1, S_Q, S_KV), bool), "scale": 0.5,
        "is_causal": True, "query_seq_lengths": LENS, "key_value_seq_lengths": LENS, "local_window_size": (1, 1),
        "sinks": SINK, "implementation": None, "return_residual": True,
    },
    "merge": {"parts": [PART, PART], "sink": SINK},
}  # fmt: skip


def call(op: str, **operands: Any) -> Any:
    return jax.eval_shape(lambda: getattr(lib, op)(**operands))


@pytest.mark.parametrize("op", CALLS)
def test_the_calls_below_are_right_but_for_one_operand(op):
    o, lse = call(op, **CALLS[op])
    assert o.shape == Q.shape and o.dtype == Q.dtype
    assert lse.shape == Q.shape[:-1] and lse.dtype == jnp.float32


@pytest.mark.parametrize(
    "op, wrong, error, message",
    [
        ("fmha", {"q": Q[0]}, ValueError, r"q: got bfloat16\[3, 4, 8\], wanted bfloat16 or .*\[b, s_q, h_q, d\]"),
        ("fmha", {"q": Q.astype(jnp.float8_e4m3fn)}, ValueError, r"q: got float8_e4m3fn.*wanted bfloat16 or float16"),
        ("fmha", {"q": np.zeros(Q.shape)}, ValueError, r"q: got float64.*wanted bfloat16 or float16 or float32"),
        ("fmha", {"q": "queries"}, TypeError, "q: got queries"),
        ("fmha", {"k": K.astype(jnp.float16)}, ValueError, r"k: got float16.*wanted bfloat16\[b=2, s_kv, h_kv, d=8\]"),
        ("fmha", {"k": K[:1], "v": None}, ValueError, r"k: got bfloat16\[1, 5, 2, 8\], wanted bfloat16\[b=2"),
        ("fmha", {"k": array(B, S_KV, 3, D), "v": None}, ValueError, "q: got 4 heads of 3 queries, wanted a mult"),
        ("fmha", {"k": K[:, :0], "v": None}, ValueError, r"k: got bfloat16\[2, 0, 2, 8\].*each >= 1"),
        ("fmha", {"v": K[..., :4]}, ValueError, r"v: got bfloat16\[2, 5, 2, 4\], wanted bfloat16\[b=2, s_kv=5, h_kv=2"),
        ("fmha", {"sink": SINK[:3]}, ValueError, r"sink: got float32\[3\], wanted float32\[h_q=4\]"),
        ("fmha", {"sink": SINK.astype(jnp.bfloat16)}, ValueError, r"sink: got bfloat16\[4\], wanted float32"),
        ("fmha", {"sink": [0.0] * H_Q}, TypeError, r"sink: got \[0.0"),
        ("fmha", {"span": Span.causal(S_Q + 1)}, ValueError, r"span.stop: got int32\[1, 4\], wanted int32 that"),
        ("fmha", {"span": Span(0, jnp.zeros((3, 1), jnp.int32))}, ValueError, r"span.stop: got int32\[3, 1\]"),
        ("fmha", {"span": Span(0, jnp.zeros(()))}, ValueError, r"span.stop: got float32\[\]"),
        ("fmha", {"span": (0, 3)}, TypeError, r"span: got \(0, 3\), wanted a Span or None"),
        ("fmha", {"scale": 0.0}, ValueError, "scale: got 0.0, wanted a finite fp32 number > 0"),
        ("fmha", {"scale": float("nan")}, ValueError, "scale: got nan"),
        ("fmha", {"scale": 1e39}, ValueError, "scale: got 1e\\+39"),
        ("fmha", {"scale": jnp.float32(1)}, TypeError, "scale: got float32"),
        ("fmha", {"implementation": "cudnn"}, ValueError, "implementation: got 'cudnn', wanted None or 'cubin' or"),
        ("sparse_fmha", {"indices": INDICES.astype(jnp.int16)}, ValueError, r"indices: got int16.*wanted int32\[b=2"),
        ("sparse_fmha", {"indices": np.zeros(INDICES.shape, np.int64)}, ValueError, "indices: got int64"),
        ("sparse_fmha", {"kv": CACHE}, TypeError, r"kv: got a Cache, wanted bfloat16\[b=2, s_kv, d=8\]"),
        ("sparse_fmha", {"kv": K}, ValueError, r"kv: got bfloat16\[2, 5, 2, 8\], wanted bfloat16\[b=2, s_kv, d=8\]"),
        ("sparse_fmha", {"implementation": "cubin"}, NotImplementedError, "got 'cubin' for bfloat16, d=8, wanted"),
        ("dsv4_attention", {"compressed_kv": None}, ValueError, "indices: got int32.*wanted None without comp"),
        ("dsv4_attention", {"compressed_kv": None, "indices": None, "ratio": Span.causal(S_Q)}, ValueError,
         "ratio: got a Span, wanted None without compressed_kv"),
        ("dsv4_attention", {"indices": None, "ratio": None}, ValueError,
         "ratio: got None, wanted an int >= 1, or a Span, or indices, with compressed_kv"),
        ("dsv4_attention", {"ratio": (0, 3)}, TypeError,
         r"ratio: got \(0, 3\), wanted an int >= 1, known while tracing, or a Span"),
        ("dsv4_attention", {"ratio": Span.causal(S_Q + 1)}, ValueError, r"ratio.stop: got int32\[1, 4\], wanted"),
        ("dsv4_attention", {"window": Span.causal(S_Q + 1)}, ValueError, r"window.stop: got int32\[1, 4\], wanted"),
        ("dsv4_attention", {"window": LENS}, TypeError, r"window: got int32\[2\], wanted an int >= 1, .* or a Span"),
        ("dsv4_attention", {"window": Span.causal(S_Q), "ratio": None}, ValueError,
         r"q_offset: got int32\[2\], wanted 0 where Spans alone say what is seen"),
        ("dsv4_attention", {"rope": SINK}, TypeError, r"rope: got float32\[4\], wanted a QueryRope or None"),
        ("dsv4_attention", {"precision": "float8"}, ValueError, "precision: got 'float8', wanted None or 'float8"),
        ("dsv4_attention", {"ratio": 0}, ValueError, "ratio: got 0, wanted an int >= 1"),
        ("dsv4_attention", {"window": 1.5}, TypeError, "window: got 1.5, wanted an int >= 1"),
        ("dsv4_attention", {"q_offset": LENS[:1]}, ValueError, r"q_offset: got int32\[1\], wanted int32\[b=2\]"),
        ("dsv4_attention", {"q_offset": 1.5}, TypeError, "q_offset: got 1.5, wanted an int, an int32 scalar or "),
        ("dsv4_attention", {"q_offset": 2**31}, ValueError, "q_offset: got 2147483648"),
        ("dsv4_decode", {"window_cache": KV}, TypeError, r"window_cache: got bfloat16\[2, 5, 8\], wanted a Cache"),
        ("dsv4_decode", {"window_cache": Cache(Q[0])}, ValueError, r"window_cache.entries: got bfloat16\[3, 4, 8\]"),
        ("dsv4_decode", {"compressed_cache": Cache(CACHE.entries, LENS)}, ValueError,
         r"compressed_cache.block_table: got int32\[2\], wanted int32\[b=2, n\]"),
        ("dsv4_decode", {"window_cache": Cache(KV.astype(jnp.float32))}, ValueError, "_cache.entries: got float32"),
        ("dsv4_decode", {"window_cache": FP8}, ValueError, r"entries: got uint8\[2, 3456\] with d = 8, wanted"),
        ("dsv4_decode", {"window_cache": Cache(1)}, TypeError, r"window_cache.entries: got 1, wanted bfloat16\[b=2"),
        ("dsv4_decode", {"window_cache": Cache(KV), "window": 4}, ValueError,
         "window_cache: got room for 5 entries of a sequence, wanted window \\+ s_q - 1 = 6 at least"),
        ("dsv4_decode", {"compressed_cache": None}, ValueError, "indices: got int32.*wanted None without compressed"),
        ("dsv4_decode", {"indices": None, "ratio": None}, ValueError, "ratio: got None"),
        ("dsv4_decode", {"ratio": Span.causal(S_Q)}, TypeError, "ratio: got a Span, wanted an int >= 1, known while"),
        ("dsv4_decode", {"precision": "float8"}, ValueError, "precision: got 'float8', wanted None or 'float8_e4m3fn'"),
        ("dsv4_decode", {"lengths": LENS[:1]}, ValueError, r"lengths: got int32\[1\], wanted int32\[b=2\]"),
        ("dsv4_decode", {"lengths": None}, TypeError, "lengths: got None"),
        ("dsv4_decode", {"window": 0}, ValueError, "window: got 0, wanted an int >= 1"),
        ("dsv4_decode", {"q_offset": LENS[:1]}, ValueError, r"q_offset: got int32\[1\], wanted int32\[b=2\]"),
        ("dsv4_decode", {"is_causal": None}, TypeError, "is_causal: got None, wanted a bool"),
        ("dsv4_decode", {"implementation": "cubin"}, NotImplementedError, "got 'cubin' for bfloat16, d=8, wanted"),
        ("merge", {"parts": []}, ValueError, r"parts: got \[\], wanted one or more pairs"),
        ("merge", {"parts": [Q, Q]}, TypeError, r"parts\[0\]: got bfloat16.*wanted a pair"),
        ("merge", {"parts": [PART, (Q, Q[..., 0])]}, ValueError, r"parts\[1\] lse: got bfloat16\[2, 3, 4\], wanted"),
        ("merge", {"parts": [PART, (Q[:1], PART[1])]}, ValueError, r"parts\[1\] o: got bfloat16\[1, 3, 4, 8\]"),
    ],
)  # fmt: skip
def test_error(op, wrong, error, message):
    with pytest.raises(error, match=f"^{op}: .*{message}") as raised:
        call(op, **{**CALLS[op], **wrong})
    assert type(raised.value) is error
    assert (", built " in str(raised.value)) == isinstance(raised.value, NotImplementedError)  # all of one kernel here


@pytest.mark.parametrize(
    "op, layout, wanted",
    [
        ("dsv4_decode", "v32_fp8", "v4_fp8 or v4_fp4 or v41_fp8 or v41_fp4"),
        ("dsv4_decode", "index_fp8", "v4_fp8 or v4_fp4 or v41_fp8 or v41_fp4"),
        ("dsv4_attention", "v32_fp8", "v4_fp8 or v4_fp4 or v41_fp8 or v41_fp4"),
        ("mla_decode", "index_fp4", "v4_fp8 or v4_fp4 or v41_fp8 or v41_fp4 or v32_fp8"),
    ],
)
def test_entries_of_another_op_are_refused(op, layout, wanted):
    """Not all of their numbers are V, or none is."""
    cache = Cache.zeros(B, 64, layout=layout)
    q = array(B, S_Q, H_Q, cache.packing.d)
    operands = {
        "dsv4_decode": {"window_cache": cache, "lengths": 5, "window": 8},
        "dsv4_attention": {"window_kv": q[:, :, 0], "compressed_kv": cache, "ratio": 4},
        "mla_decode": {"cache": cache, "lengths": 5, "d_v": None},
    }
    with pytest.raises(ValueError, match=rf"^{op}: \w+\.layout: got {layout}, wanted {wanted}\n"):
        call(op, q=q, **operands[op])


INDEXER_Q, INDEXER_K, WEIGHTS = array(B, S_Q, H_Q, D), KV, array(B, S_Q, H_Q, dtype=jnp.float32)
INDEXER = {"q": INDEXER_Q, "k": INDEXER_K, "weights": WEIGHTS, "span": Span.compressed(S_Q, 4)}
MORE_CALLS: dict[str, dict[str, Any]] = {
    "lightning_indexer": INDEXER | {"topk": 2},
    "indexer_blocks": INDEXER | {"count": 2},
    "indexer_scores": {"q": INDEXER_Q, "k": INDEXER_K, "weights": WEIGHTS, "indices": INDICES},
    "indexer_loss": INDEXER | {"attention_q": Q, "kv": KV, "lse": WEIGHTS},
    "head_summed_probabilities": {"q": Q, "kv": KV, "lse": WEIGHTS, "indices": INDICES},
}
"""Valid operands of the other public ops."""

OPTIONS = [
    (op, name, parameter.default)
    for op in CALLS | MORE_CALLS
    for name, parameter in inspect.signature(getattr(lib, op)).parameters.items()
    if isinstance(parameter.default, bool) or name == "implementation"
]
"""Options of all public ops that are a bool, and which implementation."""


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("op, name, default", OPTIONS)
def test_options_are_checked_before_paths_part(op, name, default, implementation):
    """The same error, whatever runs in the end, also where there is nothing to choose from."""
    given = (CALLS | MORE_CALLS)[op] | {"implementation": implementation}
    few = [given, given | {"k": KV[:, :0]}] if op == "lightning_indexer" else [given]
    for operands in few:
        for wrong in ("yes", 1, None) if isinstance(default, bool) else ("yes",):
            with pytest.raises(
                (TypeError, ValueError), match=f"^{op}: {name}: got '?{wrong}'?, wanted (a bool|None or)"
            ):
                call(op, **operands | {name: wrong})


@pytest.mark.parametrize("name, wrong", [("block", 0), ("span", 1.5), ("span", None), ("blocks", KV)])
def test_options_of_a_choice_from_nothing(name, wrong):
    with pytest.raises((TypeError, ValueError), match=f"^lightning_indexer: {name}: got "):
        call("lightning_indexer", **MORE_CALLS["lightning_indexer"] | {"k": KV[:, :0], name: wrong})


@pytest.mark.parametrize(
    "op, given, turned",
    [
        ("fmha", {"q": array(B, 2, 9, D), "k": array(B, 1, 5, D), "v": None}, "q"),
        ("fmha", {"q": array(B, 2, 9, D), "k": array(B, 5, 2, D), "v": None}, "q"),
        ("dot_product_attention", {"query": array(B, 2, 9, D), "key": array(B, 1, 5, D), "value": array(B, 1, 5, D)},
         "query"),
        ("sparse_fmha", {"q": Q.swapaxes(1, 2)}, "q"),
        ("dsv4_attention", {"q": Q.swapaxes(1, 2), "indices": None}, "q"),
        ("dsv4_decode", {"q": Q.swapaxes(1, 2), "indices": None}, "q"),
        ("merge", {"parts": [(Q.swapaxes(1, 2), PART[1].swapaxes(1, 2))]}, "parts[0] o"),
        ("merge", {"parts": [(Q.swapaxes(1, 2), PART[1])]}, "parts[0] o"),
        ("merge", {"parts": [(Q.swapaxes(1, 2), PART[1].swapaxes(1, 2)), PART]}, "parts[0] o"),
    ],
)  # fmt: skip
def test_heads_before_queries_are_noticed(op, given, turned):
    says = re.escape(f"; it would fit if {turned} were [b, h_q, s_q, d], and {turned} is to be [b, s_q, h_q, d]")
    with pytest.raises(ValueError, match=f"^{op}: .*{says}"):
        call(op, **{**CALLS[op], **given})


@pytest.mark.parametrize(
    "op, name",
    [("fmha", "q"), ("sparse_fmha", "kv"), ("dsv4_attention", "indices"), ("dot_product_attention", "sinks")],
)
def test_an_array_that_was_donated(op, name):
    given = CALLS[op][name] + 0
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(given))
    with pytest.raises(ValueError, match=rf"^{op}: {name}: got .*\] whose buffer was donated or deleted, wanted "):
        call(op, **{**CALLS[op], name: given})


@pytest.mark.parametrize("name", ["entries", "block_table"])
def test_a_cache_that_was_donated(name):
    cache = jax.tree.map(lambda x: x + 0, CACHE)
    kept = jax.jit(lambda x: x + 1, donate_argnums=0)(getattr(cache, name))
    with pytest.raises(
        ValueError, match=rf"window_cache.{name}: got .*\] whose buffer was donated or deleted, wanted "
    ):
        call("dsv4_decode", **{**CALLS["dsv4_decode"], "window_cache": cache})
    with pytest.raises(ValueError, match=rf"cache.{name}: got .*\] whose buffer was donated or deleted, wanted "):
        cache.append(KV[:, :1], jnp.zeros((B, 1), jnp.int32))
    assert not kept.is_deleted()


@pytest.mark.parametrize("op, operand", [("fmha", "k"), ("sparse_fmha", "kv")])
def test_more_keys_than_int32_counts(op, operand):
    huge = jax.ShapeDtypeStruct((B, 2**31, H_KV, D) if op == "fmha" else (B, 2**31, D), jnp.bfloat16)
    operands = {**CALLS[op], "v": None} if op == "fmha" else CALLS[op]
    with pytest.raises(ValueError, match=rf"^{op}: {operand}: got .*2147483648.*, each < 2\*\*31"):
        jax.eval_shape(lambda keys: getattr(lib, op)(**{**operands, operand: keys}), huge)


@pytest.mark.parametrize(
    "shape, fits", [((2**16, 2**15, 8), False), ((2**16, 2**14, 8), True), ((1, 2**22, 512), False)]
)
def test_more_entries_than_int32_counts(shape, fits):
    """In a pool, and numbers in a page."""
    take = functools.partial(
        jax.eval_shape,
        lambda pool: Cache(pool, LENS[:, None]).take(LENS[:, None]),
        jax.ShapeDtypeStruct(shape, "bfloat16"),
    )
    if fits:
        assert take().shape == (B, 1, shape[-1])
    else:
        with pytest.raises(ValueError, match=r"^Cache.take: cache.entries: got .*, wanted fewer than 2\*\*31 entries"):
            take()


Q512 = array(B, S_Q, H_Q, 512)


@pytest.mark.parametrize(
    "caches, q, error, message",
    [
        ((FP8, FP8), Q512.astype(jnp.float16), ValueError, r"q: got float16\[2, 3, 4, 512\], wanted bfloat16, wit"),
        ((FP8, Cache(array(B, 4, 512))), Q512, ValueError, "compressed_cache.entries: got bfloat16.*that are packed"),
        ((Cache(array(B, 4, 512)), FP8), Q512, ValueError, "compressed_cache.entries: got uint8.*wanted entries of b"),
        ((Cache(FP8.entries[:, 1:]), FP8), Q512, ValueError, r"window_cache.entries: got uint8\[2, 3455\] with d = 51"),
        ((FP8, Cache(FP8.entries[:, 1:], None, "v41_fp4")), Q512, ValueError, r".*in 288 n bytes, as v41_fp4 has them"),
        ((Cache(FP8.entries, None, "fp4"), FP8), Q512, ValueError, "layout: got 'fp4', wanted 'v4_fp8' or 'v4_fp4'"),
    ],
)  # fmt: skip
def test_error_of_fp8(caches, q, error, message):
    with pytest.raises(error, match=f"^dsv4_decode: {message}"):
        call("dsv4_decode", q=q, window_cache=caches[0], compressed_cache=caches[1], ratio=4, lengths=9, window=2)


@pytest.mark.parametrize(
    "f, error, message",
    [
        (lambda: lib.quantize_cache(KV), ValueError, r"quantize_cache: entries: got bfloat16\[2, 5, 8\]"),
        (lambda: lib.quantize_cache(3), TypeError, "quantize_cache: entries: got 3"),
        (lambda: lib.dequantize_cache(FP8.entries[:, :-1]), ValueError, r"quantize_cache: pages: got uint8\[2, 3455\]"),
        (lambda: lib.dequantize_cache(LENS), ValueError, r"dequantize_cache: pages: got int32\[2\], wanted uint8"),
        (lambda: Cache.zeros(2, 3, 256, jnp.float8_e4m3fn), ValueError, "Cache.zeros: d: got 256, wanted 512 for v4"),
        (lambda: Cache.zeros(2, -3), ValueError, "^Cache.zeros: page: got -3, wanted an int >= 1"),
        (lambda: Cache.zeros(2, 3, 8, jnp.int32), ValueError, "^Cache.zeros: dtype: got int32, wanted bfloat16"),
        (lambda: Cache.zeros(2, 3, layout="fp4"), ValueError, "Cache.zeros: layout: got 'fp4', wanted 'v4_fp8' or"),
        (lambda: lib.quantize_cache(Q512[0], "v4"), ValueError, "^quantize_cache: layout: got 'v4', wanted 'v4_fp8'"),
        (lambda: lib.dequantize_cache(FP8.entries, "v41_fp8"), ValueError, r"wanted uint8\[..., 528 n bytes\], n >= 1"),
        (lambda: CACHE.append(KV[..., :4], INDICES[:, 0]), ValueError, r"Cache.append: positions: got int32\[2, 6\]"),
        (lambda: CACHE.append(KV[..., :4], INDICES[:, 0, :5]), ValueError, r"append: cache.entries: got bfloat16"),
        (lambda: Cache(3).take(PLACES), TypeError, r"^Cache.take: cache.entries: got 3, wanted an array"),
        (lambda: Cache(KV, 1.5).take(PLACES), TypeError, r"^Cache.take: cache.block_table: got 1.5, wanted an array"),
        (lambda: Cache(KV, LENS).take(), TypeError, r"^Cache.take: cache.block_table: got int32\[2\], wanted an array"),
        (lambda: Cache(KV.astype(jnp.int8)).take(), ValueError, r"^Cache.take: cache.entries: got int8\[2, 5, 8\], w"),
        (lambda: Cache(FP8.entries, None, "fp4").take(), ValueError, r"^Cache.take: layout: got 'fp4', wanted"),
        (lambda: Cache(FP8.entries[:, 1:]).take(), ValueError, r"^Cache.take: cache.entries: got uint8\[2, 3455\]"),
        (lambda: lib.explain(KV, KV), TypeError, r"^explain: f: got bfloat16\[2, 5, 8\], wanted a function"),
        (lambda: Cache(3).append(KV, INDICES[:, 0, :5]), TypeError, r"append: cache.entries: got 3, wanted bfloat16"),
        (lambda: CACHE.append(KV.astype(jnp.float32), INDICES[:, 0, :5]), ValueError, "append: entries: got float32"),
        (lambda: lib.sparse_fmha(Q, KV[0, :, :4], INDICES), ValueError, r"kv: got bfloat16\[5, 4\], wanted bfloat16"),
    ],
)  # fmt: skip
def test_error_of_caches(f, error, message):
    with pytest.raises(error, match=message) as raised:
        jax.eval_shape(f)
    assert type(raised.value) is error
    assert (", built " in str(raised.value)) == isinstance(raised.value, NotImplementedError)


DTYPES = [
    jnp.bfloat16,
    jnp.float16,
    jnp.float32,
    jnp.int32,
    jnp.int8,
    jnp.uint32,
    jnp.bool_,
    jnp.complex64,
    jnp.float8_e4m3fn,
]
SHAPES = st.lists(st.sampled_from([0, 1, B, S_Q, S_KV, H_Q, D, 7]), max_size=5).map(tuple)
ARRAYS = st.builds(lambda shape, dtype: jnp.zeros(shape, dtype), SHAPES, st.sampled_from(DTYPES))
NUMPY = st.builds(
    lambda shape, dtype: np.zeros(shape, dtype), SHAPES, st.sampled_from(["f8", "i8", "f4", "O", "U3", "?"])
)
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(allow_nan=True), st.booleans(), st.just(10**400), st.complex_numbers()
)
CACHES = st.builds(Cache, *[st.one_of(ARRAYS, NUMBERS, st.none())] * 2)
SPANS = st.builds(Span, *[st.one_of(ARRAYS, NUMBERS, st.none())] * 2)
ROPES = st.builds(QueryRope, *[st.one_of(ARRAYS, NUMBERS, st.none())] * 2)
OTHER = st.one_of(
    st.none(), st.text(max_size=3), st.just(object()), st.just([PART]), st.just([1, 2]), st.just(jax.random.key(0)),
    st.sampled_from(["cubin", "reference", "float8_e4m3fn"]), st.tuples(ARRAYS, ARRAYS), st.just(jnp.bfloat16(1)),
)  # fmt: skip
ANYTHING = st.one_of(ARRAYS, NUMPY, NUMBERS, SPANS, ROPES, CACHES, OTHER)


@pytest.mark.parametrize("op", CALLS)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_operand_may_be_anything(op, data):
    """One or two operands are replaced by anything: a clear error, or a result of the right shape."""
    operands = dict(CALLS[op])
    for name in data.draw(st.lists(st.sampled_from(sorted(operands)), min_size=1, max_size=2, unique=True)):
        operands[name] = data.draw(ANYTHING)
    try:
        got = call(op, **operands)
    except ERRORS as e:
        assert type(e) in ERRORS, e
        assert str(e).split(":")[0] in CALLS, e  # op, or the op that it calls
        assert all(word in str(e) for word in (": got ", ", wanted ")), e
        assert (", built " in str(e)) == (": got 'cubin' " in str(e)), e
    else:
        q = operands["parts"][0][0] if op == "merge" else operands.get("q", operands.get("query"))
        o, lse = got if isinstance(got, tuple) else (got, None)
        assert o.shape == q.shape and o.dtype == q.dtype
        assert lse is None or (lse.shape == q.shape[:-1] and lse.dtype == jnp.float32)
