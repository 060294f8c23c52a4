"""`batch_invariant=True` in the API: which calls a program makes of it, what layers do with it, and what it refuses."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha import (
    Cache,
    Span,
    dot_product_attention,
    dsv4_attention,
    dsv4_decode,
    fmha,
    sparse_fmha,
)
from jax_dsv4_fmha._dispatch import plan
from jax_dsv4_fmha._host import attention as attention_calls
from jax_dsv4_fmha._host import library
from jax_dsv4_fmha._host.split_kv import columns_pay
from jax_dsv4_fmha._ops.decode import seen_slots
from jax_dsv4_fmha.layers import Compressor, DSV4Attention, Rope
from jax_dsv4_fmha.layers.pooling import joined, over_tokens, pool_chunk

from .helpers import every_kernel

Q, KV = jax.ShapeDtypeStruct((2, 6, 64, 512), jnp.bfloat16), jax.ShapeDtypeStruct((2, 6, 512), jnp.bfloat16)
FAR, LIST = jax.ShapeDtypeStruct((2, 40, 512), jnp.bfloat16), jax.ShapeDtypeStruct((2, 6, 16), jnp.int32)


def decode(q, kv, far, listed, **how):
    caches = Cache(kv), Cache(far)
    return dsv4_decode(q[:, :2], *caches, indices=listed[:, :2], lengths=6, window=4, ratio=4, **how)


CALLS = {
    "fmha": ("mla_span_fwd", lambda q, kv, far, listed, **how: fmha(q, kv[:, :, None], span=Span.causal(6), **how)),
    "sparse": ("mla_sparse_fwd", lambda q, kv, far, listed, **how: sparse_fmha(q, far, listed, **how)),
    "pool": ("mla_sparse_fwd", lambda q, kv, far, listed, **how: sparse_fmha(q, far[0], listed, **how)),
    "window": ("mla_span_fwd", lambda q, kv, far, listed, **how: dsv4_attention(q, kv, window=4, **how)),
    "65 heads": (
        "csa_fwd",
        lambda q, kv, *_, **how: dsv4_attention(jnp.pad(q, ((0, 0), (0, 0), (0, 1), (0, 0))), kv, window=4, **how),
    ),
    "list": (
        "csa_fwd",
        lambda q, kv, far, listed, **how: dsv4_attention(q, kv, far, indices=listed, window=4, ratio=4, **how),
    ),
    "all": ("hca_fwd", lambda q, kv, far, listed, **how: dsv4_attention(q, kv, far, window=4, ratio=4, **how)),
    "all, 32 heads": (
        "csa_fwd",
        lambda q, kv, far, listed, **how: dsv4_attention(q[:, :, :32], kv, far, window=4, ratio=4, **how),
    ),
    "step": ("dsv4_decode", decode),
    "causal": ("mha_fwd", lambda q, kv, far, listed, **how: fmha(*[q[..., :64]] * 3, span=Span.causal(6), **how)),
    "all keys": ("mha_fwd", lambda q, kv, far, listed, **how: fmha(q[..., :64], q[:, :, :2, :64], **how)),
    "causal lengths": (
        "mha_fwd",
        lambda q, kv, far, listed, **how: dot_product_attention(
            *[q[..., :64]] * 3, is_causal=True, key_value_seq_lengths=jnp.array([3, 5]), return_residual=True, **how
        ),
    ),
}


@pytest.fixture
def hopper(monkeypatch):
    """A process with all kernels and no device."""
    monkeypatch.setattr(library, "variants", every_kernel)
    monkeypatch.setattr(library, "local_architectures", lambda: ())


def custom_call(f, **how):
    text = jax.jit(functools.partial(f, **how)).trace(Q, KV, FAR, LIST).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if "custom_call @dsv4" in line and "seen_slots" not in line)
    return call


@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_one_launch_over_whole_keys(hopper, monkeypatch, name):
    jax.clear_caches()
    monkeypatch.setattr(plan, "columns_pay", lambda *_: False)
    op, f = CALLS[name]
    call = custom_call(f, batch_invariant=True)
    assert f"@dsv4_fmha_{op}(" in call and f"order = {attention_calls.ORDER} : i64" in call
    assert re.search(r"x0x\d+xf32>", call), "there are parts of split keys"
    assert "order = 0 : i64" in custom_call(f)


@pytest.mark.parametrize("name", CALLS)
def test_few_queries_share_out_keys_and_then_columns(hopper, monkeypatch, name):
    """Of d 512 with more than 32 heads; spans are gathered then."""
    jax.clear_caches()  # of what was traced with other choices
    monkeypatch.setattr(plan, "columns_pay", lambda *_: True)
    op, f = CALLS[name]
    op = {"mla_span_fwd": "csa_fwd", "hca_fwd": "csa_fwd"}.get(op, op)
    call = custom_call(f, batch_invariant=True)
    assert (f"@dsv4_fmha_{op}_by_columns(" in call) == (op != "mha_fwd" and "32 heads" not in name)
    assert f"order = {attention_calls.ORDER} : i64" in call
    few = custom_call(lambda q, *x, **how: f(q[:, :, :32], *x, **how), batch_invariant=True)
    assert ("_by_columns(" in few) == (name == "65 heads")  # of which 33 are left


def test_columns_pay_for_few_queries_alone():
    """Four queries of 128 heads are eight tiles of rows."""
    assert columns_pay(8, 18, 132) and columns_pay(4, 10, 132)
    assert not columns_pay(132, 18, 132) and not columns_pay(64, 18, 132) and not columns_pay(8, 1, 132)


def test_a_step_lists_its_window_as_a_prompt_does(hopper):
    """In ascending order of positions, whatever the ring."""
    rows = jnp.zeros((2, 8, 512), jnp.bfloat16)
    (window,) = seen_slots(2, Cache(rows), None, jnp.array([11, 2]), None, None, 4)
    slots, seen = window.indices.reshape(4, -1).tolist(), window.length.ravel().tolist()
    assert [x[:n] for x, n in zip(slots, seen, strict=True)] == [[6, 7, 0, 1], [7, 0, 1, 2], [0], [0, 1]]


@pytest.mark.parametrize("ratio", [2, 4, 7, 100, 128])
def test_pooled_tokens_of_a_prompt(ratio):
    """Of the same tokens, whatever the batch and how long the prompt; by chunks of whole blocks, too."""
    compressor = Compressor(64, 128, ratio, overlap=ratio == 4)
    rng, n = np.random.default_rng(0), 512 // ratio
    ape = rng.standard_normal((ratio, compressor.channels)).astype(np.float32)
    tokens = rng.standard_normal((20, n * ratio, compressor.width)).astype(np.float32)
    pooled = jax.jit(lambda x: joined([compressor._sums(x, ape)]))
    whole = np.asarray(pooled(tokens))
    for some, count in ((slice(3, 4), n), (slice(5, 12), n), (slice(0, 1), 1), (slice(2, 20), n // 2)):
        np.testing.assert_array_equal(pooled(tokens[some, : count * ratio]), whole[some, :count])
    if ratio >= 100:
        tokens[:, :, compressor.channels :] += np.tile(ape, (n, 1))
        state = compressor.state(20)
        whole, _ = pool_chunk(state, tokens, *(np.full(20, i, np.int32) for i in (0, n * ratio)), ratio)
        done, first = state, np.full(20, ratio, np.int32)
        begun, done = pool_chunk(state, tokens[:, :ratio], 0 * first, first, ratio)
        rest, _ = pool_chunk(done, tokens[:, ratio:], first, n * first, ratio)
        np.testing.assert_array_equal(np.concatenate([begun, rest[:, : n - 1]], 1), whole)


def test_the_gradient_of_pooled_tokens():
    x = np.random.default_rng(0).standard_normal((2, 3, 13, 5)).astype(np.float32)
    (got, tangent), transposed = jax.jvp(over_tokens, (x,), (x,)), jax.vjp(over_tokens, x)[1]
    np.testing.assert_allclose(got, x.sum(2, dtype=np.float64), atol=1e-5)
    np.testing.assert_allclose(tangent, got, atol=1e-5)
    np.testing.assert_array_equal(transposed(got)[0], np.broadcast_to(np.asarray(got)[:, :, None], x.shape))


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_a_layer_hands_the_mode_on(hopper, ratio):
    """To attention of whole sequences, of chunks and of steps."""
    compressor = Compressor(64, 512, ratio, overlap=ratio == 4) if ratio else None
    sizes = {"hidden": 64, "heads": 64, "q_rank": 32, "o_groups": 2, "o_rank": 16, "rope": Rope(64)}
    layer = DSV4Attention(**sizes, ratio=ratio, compressor=compressor, sparse=ratio == 4)
    x, indices = jnp.ones((2, 128, 64), jnp.bfloat16), jnp.zeros((2, 128, 8), jnp.int32)
    params, cache = jax.eval_shape(lambda: (layer.init(jax.random.key(0)), layer.cache(2, 300, x.dtype, steps=2)))
    chosen = {"batch_invariant": True} | ({"indices": indices} if ratio == 4 else {})
    a_step = {"batch_invariant": True} | ({"indices": indices[:, :1]} if ratio == 4 else {})
    for f in (
        lambda p, c: layer(p, x, **chosen).y,
        lambda p, c: layer(p, x, c, start=5, **chosen).y,
        lambda p, c: layer.step(p, x[:, :1], c, lengths=7, **a_step).y,
    ):
        text = jax.jit(f).trace(params, cache).lower(lowering_platforms=("cuda",)).as_text()
        assert re.findall(r"order = (\d) : i64", text) == [str(attention_calls.ORDER)]


REFUSED = [
    (NotImplementedError, "d=96, separate K and V", lambda q, kv: fmha(*[q[..., :96]] * 3, batch_invariant=True)),
    (NotImplementedError, "64 KV heads", lambda q, kv: fmha(q, q, batch_invariant=True)),
    (
        NotImplementedError,
        "keys that may begin after the first",
        lambda q, kv: fmha(*[q[..., :64]] * 3, span=Span.sliding_window(6, 3), batch_invariant=True),
    ),
    (
        NotImplementedError,
        "d=64, V=K, keys that may begin after the first",
        lambda q, kv: fmha(
            q[..., :64], kv[:, :, None, :64], span=Span(jnp.zeros((2, 6), int), 9), batch_invariant=True
        ),
    ),
    (NotImplementedError, "float32", lambda q, kv: dsv4_attention(*map(jnp.float32, (q, kv)), batch_invariant=True)),
    (
        NotImplementedError,
        "implementation='reference'",
        lambda q, kv: dsv4_attention(q, kv, batch_invariant=True, implementation="reference"),
    ),
    (
        NotImplementedError,
        "a sink for every batch entry",
        lambda q, kv: jax.vmap(lambda s: dsv4_attention(q, kv, sink=s, batch_invariant=True))(jnp.zeros((3, 64))),
    ),
    (
        NotImplementedError,
        "v4_fp8 caches",
        lambda q, kv: dsv4_attention(q, kv, Cache.zeros(2, 64, 512, layout="v4_fp8"), ratio=4, batch_invariant=True),
    ),
    (TypeError, "wanted a bool", lambda q, kv: dsv4_attention(q, kv, batch_invariant=1)),
    (ValueError, "on platform cpu", lambda q, kv: dsv4_attention(q, kv, batch_invariant=True)),
]


@pytest.mark.parametrize(("kind", "says", "f"), REFUSED, ids=[says for _, says, _ in REFUSED])
def test_what_the_mode_does_not_cover_is_an_error(hopper, kind, says, f):
    with pytest.raises(kind, match=says):
        jax.jit(f).trace(Q, KV).lower(lowering_platforms=("cpu",))


def test_blackwell_is_not_covered(hopper, monkeypatch):
    monkeypatch.setattr(library, "local_architectures", lambda: ("sm_100f",))
    with pytest.raises(NotImplementedError, match="on sm_100f"):
        custom_call(CALLS["window"][1], batch_invariant=True)
