"""Attention whose V is the first d_v numbers of K: values by loops in float64, gradients by autodiff of a dense
softmax, vmap, and words where there is no kernel.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha import Span, explain, fmha, merge, reference, sparse_fmha
from jax_dsv4_fmha._testing import float64
from jax_dsv4_fmha._testing.compare import FP32
from tests.helpers import assert_right, normal

B, S_Q, S_KV, H, D, D_V, TOPK = 2, 5, 20, 4, 24, 16, 8
Q, K, SINK = normal(0, B, S_Q, H, D), normal(1, B, S_KV, 2, D), normal(2, H)
KV, POOL = K[:, :, 0], normal(3, S_KV, D)
INDICES = jnp.asarray(np.random.default_rng(4).integers(-2, S_KV, (B, S_Q, TOPK)), jnp.int32).at[0, 0].set(-1)
SPAN = Span(jnp.array([[0, 3, 7, 2, 5]] * B), jnp.array([[9, 20, 7, 3, 12]] * B))  # the third query sees nothing


def span(q, k, sink, **how):
    return fmha(q, k, d_v=D_V, span=SPAN, sink=sink, **how)


def selection(q, kv, sink, **how):
    return sparse_fmha(q, kv, INDICES, d_v=D_V, sink=sink, **how)


CALLS = {"span": (span, K), "selection": (selection, KV), "pool": (selection, POOL)}


def in_float64(name, k):
    """By loops, V an array of its own."""
    q, sink, k = (np.asarray(x) for x in (Q, SINK, k))
    if name == "span":
        start, stop = (np.broadcast_to(x, (B, S_Q)) for x in (SPAN.start, SPAN.stop))
        o, lse = float64.fmha(q, k, None, start, stop, sink)
    else:
        o, lse = float64.sparse_fmha(q, np.broadcast_to(k, (B, S_KV, D)), np.asarray(INDICES), sink)
    return o[..., :D_V], lse


def dense(name, q, k, sink):
    """The same over all keys, with how often each is seen."""
    if name == "span":
        i = jnp.arange(S_KV)
        count = ((SPAN.start[..., None] <= i) & (i < SPAN.stop[..., None])).astype(jnp.float32)
    else:
        count = (INDICES[..., None] == jnp.arange(S_KV)).sum(2).astype(jnp.float32)
    k = jnp.repeat(k, 2, 2) if name == "span" else jnp.broadcast_to(k, (B, S_KV, D))[:, :, None].repeat(H, 2)
    s = jnp.einsum("bnhd,bkhd->bnhk", q, k) * D**-0.5
    s = jnp.where(count[:, :, None] > 0, s + jnp.log(jnp.maximum(count, 1))[:, :, None], -1e30)
    is_seen = (count > 0).any(-1)[..., None]
    lse = jnp.where(is_seen, jax.nn.logsumexp(s, -1), -jnp.inf)
    p = jnp.exp(s - jnp.logaddexp(jnp.where(is_seen, lse, 0), sink)[..., None]) * is_seen[..., None]
    return jnp.einsum("bnhk,bkhd->bnhd", p, k[..., :D_V]), lse


def loss(f):
    def total(*x):
        o, lse = f(*x)
        return (o * jnp.cos(jnp.arange(o.size).reshape(o.shape))).sum() + jnp.where(jnp.isinf(lse), 0, lse).sum()

    return total


def assert_same(got, want, tolerance=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), got, want)


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("name", CALLS)
def test_values(name, implementation):
    f, k = CALLS[name]
    got = f(Q, k, SINK, implementation=implementation)
    assert got[0].shape == (B, S_Q, H, D_V)
    assert_right(got, in_float64(name, k), FP32)


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("name", CALLS)
def test_gradients(name, implementation):
    """They reach q, the sink, and both parts of a key."""
    f, k = CALLS[name]
    got = jax.jit(jax.grad(loss(functools.partial(f, implementation=implementation)), (0, 1, 2)))(Q, k, SINK)
    want = jax.jit(jax.grad(loss(functools.partial(dense, name)), (0, 1, 2)))(Q, k, SINK)
    assert_same(got, want, 1e-4)


def test_all_of_d_is_what_it_is_without():
    for given, plain in (
        (fmha(Q, K, d_v=D, span=SPAN), fmha(Q, K, span=SPAN)),
        (sparse_fmha(Q, KV, INDICES, d_v=D), sparse_fmha(Q, KV, INDICES)),
    ):
        jax.tree.map(np.testing.assert_array_equal, given, plain)
    texts = [jax.jit(lambda q, k, n=n: fmha(q, k, d_v=n)).lower(Q, K).as_text() for n in (D, None)]
    assert texts[0] == texts[1]


def test_16_bits_and_the_published_sizes():
    """Latents of 512 dimensions and 64 for RoPE."""
    q, kv = normal(5, 1, 2, 3, 576, dtype=jnp.bfloat16), normal(6, 1, 7, 576, dtype=jnp.bfloat16)
    indices = jnp.array([[[0, 3, -1], [6, 2, 5]]])
    o, lse = sparse_fmha(q, kv, indices, d_v=512)
    assert o.shape == (1, 2, 3, 512) and o.dtype == jnp.bfloat16
    want = reference.sparse_fmha(q.astype(jnp.float32), kv.astype(jnp.float32), indices)
    assert_right((o, lse), (want[0][..., :512], want[1]))


def test_merged_halves_are_the_whole():
    parts = [fmha(Q, k, d_v=D_V) for k in (K[:, :7], K[:, 7:])]
    assert_same(merge(parts, SINK), fmha(Q, K, d_v=D_V, sink=SINK))


@pytest.mark.parametrize("name", CALLS)
def test_vmap_and_its_gradient(name):
    f, k = CALLS[name]
    xs = [jnp.stack([x, x[::-1]]) for x in (Q, k, SINK)]
    want = [f(*(x[i] for x in xs)) for i in range(2)]
    assert_same(jax.jit(jax.vmap(f))(*xs), jax.tree.map(lambda *x: jnp.stack(x), *want))
    one = jax.jit(jax.vmap(jax.grad(loss(f), (0, 1, 2))))(*xs)
    both = jax.jit(jax.grad(lambda *x: jax.vmap(loss(f))(*x).sum(), (0, 1, 2)))(*xs)
    assert_same(one, both, 1e-4)


def of_width(d, d_v, **how):
    q, kv = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((1, 4, 64, d), (1, 16, d)))
    i = jax.ShapeDtypeStruct((1, 4, 8), jnp.int32)
    return {
        "span": (lambda q, k: fmha(q, k[:, :, None], d_v=d_v, span=Span.causal(4, 12), **how), (q, kv)),
        "selection": (lambda q, k, i: sparse_fmha(q, k, i, d_v=d_v, **how), (q, kv, i)),
    }


@pytest.mark.parametrize(("d", "d_v"), [(576, 448), (512, 448), (128, 64)])
@pytest.mark.parametrize("name", ["span", "selection"])
def test_no_kernel_has_a_part_of_k_as_v(on_hopper, name, d, d_v):
    """Kernels of that d take all of K."""
    f, x = of_width(d, d_v)[name]
    (decision,) = explain(f, *x)
    assert decision.implementation == "reference"
    assert f"no kernel takes bfloat16, d={d}, d_v={d_v};" in decision.reason
    for how, words in (
        ({"implementation": "cubin"}, "implementation: got 'cubin'"),
        ({"batch_invariant": True}, "batch_invariant: got True"),
    ):
        f, x = of_width(d, d_v, **how)[name]
        with pytest.raises(NotImplementedError, match=f"{words} for bfloat16, d={d}, d_v={d_v}"):
            jax.eval_shape(f, *x)


@pytest.mark.parametrize("how", [{}, {"batch_invariant": True}, {"implementation": "cubin"}], ids=str)
@pytest.mark.parametrize("name", ["span", "selection"])
def test_kernels_take_latents_of_576(on_hopper, name, how):
    f, x = of_width(576, 512, **how)[name]
    (decision,) = explain(f, *x)
    assert decision.implementation == "kernel", decision
    o, lse = jax.eval_shape(f, *x)
    assert o.shape == (1, 4, 64, 512) and lse.shape == (1, 4, 64)
    text = jax.jit(f).trace(*x).lower(lowering_platforms=("cuda",)).as_text()
    assert ("mla_span_fwd_v512" if name == "span" else "mla_sparse_fwd_v512") in text


def gradient_of(f):
    return jax.grad(lambda q, kv, *rest: f(q, kv, *rest)[0].astype(jnp.float32).sum(), (0, 1))


def test_deterministic_gradients(on_hopper):
    """As elsewhere where there is no kernel: of selections XLA adds in no fixed order, of spans in one."""
    how = {"deterministic": True}
    for name, is_error in (("span", False), ("selection", True)):
        f, x = of_width(576, 448, **how)[name]
        if not is_error:
            jax.eval_shape(gradient_of(f), *x)
            continue
        with pytest.raises(NotImplementedError, match="deterministic: got True for bfloat16, d=576, d_v=448"):
            jax.eval_shape(gradient_of(f), *x)


@pytest.mark.parametrize("how", [{}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("name", ["span", "selection"])
def test_kernels_make_gradients_of_latents_of_576(on_hopper, name, how):
    f, x = of_width(576, 512, **how)[name]
    *_, decision = explain(gradient_of(f), *x)
    assert decision.implementation == "kernel", decision
    text = jax.jit(gradient_of(f)).trace(*x).lower(lowering_platforms=("cuda",)).as_text()
    op = "mla_span" if name == "span" else "mla_sparse"
    assert (f"{op}_bounds_v512" in text) == bool(how) and f"{op}_bwd_v512" in text


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: fmha(Q, K, K, d_v=D_V), ValueError, "fmha: d_v: got 16, wanted None with v: V is as wide as v is"),
        (lambda: fmha(Q, K, d_v=25), ValueError, "fmha: d_v: got 25, wanted an int of 1 to d=24: V is the first"),
        (lambda: fmha(Q, K, d_v=0), ValueError, "fmha: d_v: got 0, wanted an int >= 1"),
        (lambda: fmha(Q, K, d_v=True), ValueError, "fmha: d_v: got True, wanted an int >= 1"),
        (lambda: fmha(Q, K, d_v="16"), TypeError, "fmha: d_v: got 16, wanted an int .*; '16' is a str"),
        (lambda: sparse_fmha(Q, KV, INDICES, d_v=25), ValueError, "sparse_fmha: d_v: got 25, wanted an int of 1 to"),
        (lambda: sparse_fmha(Q, KV, INDICES, d_v=1.5), TypeError, "sparse_fmha: d_v: got 1.5, wanted an int >= 1"),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error, match=words):
        call()


# ---- on a GPU

S = 200
HEADS = 1, 8, 16, 24, 64, 128
SPANS = {
    "causal": Span.causal(S),
    "window": Span.sliding_window(S, 33),
    "packed": Span.causal(S) & Span.segments(jnp.stack([jnp.arange(S, dtype=jnp.int32) // 50] * 2)),
    "lengths": Span.causal(S) & Span.lengths(jnp.array([0, 150], jnp.int32)),
}


def latents(h, b=2, s_kv=S):
    """Keys of a size at which the rounding of P to bfloat16 stays within the tolerance, however few are seen."""
    q, kv = normal(0, b, S, h, 576, dtype=jnp.bfloat16), (normal(1, b, s_kv, 576) / 8).astype(jnp.bfloat16)
    return q, kv, normal(2, h)


def assert_as_in_float32(f, *x):
    got = jax.jit(functools.partial(f, implementation="cubin"))(*x)
    wide = [y.astype(jnp.float32) if y.dtype == jnp.bfloat16 else y for y in x]
    assert_right(got, jax.jit(functools.partial(f, implementation="reference"))(*wide))


def assert_gradients_as_in_float32(f, deterministic, *x):
    """Of both results; P, dS and gradients are rounded to bfloat16. With deterministic, the same bits again.

    Cotangents are arguments, for XLA would fold pads and sums of constants of 100 MB; and it tries no products out.
    """
    cotangents = normal(7, *x[0].shape[:-1], 512), normal(8, *x[0].shape[:-1])

    def gradients(implementation, *, options=None, **how):
        def loss(q, kv, sink, *cotangents):
            o, lse = f(q, kv, sink, implementation=implementation, **how)
            return sum(jnp.sum(a.astype(jnp.float32) * b) for a, b in zip((o, lse), cotangents, strict=True))

        return jax.jit(jax.grad(loss, (0, 1, 2)), compiler_options=options)

    run = gradients("cubin", deterministic=deterministic)
    got = run(*x, *cotangents)
    quickly = {"xla_gpu_autotune_level": "0"}
    want = gradients("reference", options=quickly)(*(y.astype(jnp.float32) for y in x), *cotangents)
    for name, g, w in zip(("dq", "dkv", "dsink"), got, want, strict=True):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        bound = 0.02 * np.abs(w) + 0.02 * np.sqrt(np.mean(np.square(w), -1, keepdims=True)) + 1e-6
        assert np.mean(np.abs(g - w) <= bound) > 0.999, name
        assert np.sum(np.square(g - w)) < 1e-4 * np.sum(np.square(w)), name
    if deterministic:
        again = run(*x, *cotangents)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(as_bits, got), jax.tree.map(as_bits, again))


def as_bits(x):
    return np.asarray(x).view(np.uint8)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
class TestKernel:
    """Latents of 576 numbers, whose first 512 are V."""

    @pytest.mark.parametrize(
        ("name", "h"),
        [*(("causal", h) for h in HEADS), *((x, h) for x in ("window", "packed", "lengths") for h in (8, 64))],
    )
    def test_spans(self, name, h):
        q, kv, sink = latents(h)
        f = lambda q, kv, sink, **how: fmha(q, kv[:, :, None], d_v=512, span=SPANS[name], sink=sink, **how)  # noqa: E731
        assert_as_in_float32(f, q, kv, sink)

    @pytest.mark.parametrize(("topk", "h"), [*((64, h) for h in HEADS), *((n, h) for n in (3, 500) for h in (16, 64))])
    def test_selections(self, topk, h):
        q, kv, sink = latents(h, s_kv=900)
        indices = jax.random.randint(jax.random.key(3), (2, S, topk), -50, 900, jnp.int32).at[1, 7].set(-1)
        f = lambda *x, **how: sparse_fmha(*x[:3], d_v=512, sink=x[3], **how)  # noqa: E731
        assert_as_in_float32(f, q, kv, indices, sink)

    @pytest.mark.parametrize("deterministic", [False, True])
    @pytest.mark.parametrize(("name", "h"), [("causal", 1), ("causal", 128), ("window", 24), ("packed", 64)])
    def test_gradients_over_spans(self, name, h, deterministic):
        q, kv, sink = latents(h)
        f = lambda q, kv, sink, **how: fmha(q, kv[:, :, None], d_v=512, span=SPANS[name], sink=sink, **how)  # noqa: E731
        assert_gradients_as_in_float32(f, deterministic, q, kv, sink)

    @pytest.mark.parametrize("deterministic", [False, True])
    @pytest.mark.parametrize(("topk", "h"), [*((64, h) for h in (1, 16, 64, 128)), (500, 72)])
    def test_gradients_over_selections(self, topk, h, deterministic):
        q, kv, sink = latents(h, s_kv=900)
        indices = jax.random.randint(jax.random.key(3), (2, S, topk), -50, 900, jnp.int32).at[1, 7].set(-1)
        f = lambda q, kv, sink, **how: sparse_fmha(q, kv, indices, d_v=512, sink=sink, **how)  # noqa: E731
        assert_gradients_as_in_float32(f, deterministic, q, kv, sink)

    @pytest.mark.parametrize("h", [16, 64])
    def test_few_queries_over_many_keys(self, h):
        """By split-KV."""
        q, kv, sink = latents(h, s_kv=9000)
        q = q[:, :3]
        span = Span.lengths(jnp.array([9000, 4321], jnp.int32))
        f = lambda q, kv, sink, **how: fmha(q, kv[:, :, None], d_v=512, span=span, sink=sink, **how)  # noqa: E731
        assert_as_in_float32(f, q, kv, sink)
        indices = jax.random.randint(jax.random.key(3), (2, 3, 2048), -50, 9000, jnp.int32)
        f = lambda *x, **how: sparse_fmha(*x[:3], d_v=512, sink=x[3], **how)  # noqa: E731
        assert_as_in_float32(f, q, kv, indices, sink)

    @pytest.mark.parametrize("name", ["span", "selection"])
    def test_the_same_bits_whatever_the_batch(self, name):
        q, kv, sink = latents(64)
        indices = jax.random.randint(jax.random.key(3), (2, S, 128), 0, S, jnp.int32)

        def f(q, kv, indices):
            if name == "span":
                return fmha(q, kv[:, :, None], d_v=512, span=Span.causal(S), sink=sink, batch_invariant=True)
            return sparse_fmha(q, kv, indices, d_v=512, sink=sink, batch_invariant=True)

        both = jax.jit(f)(q, kv, indices)
        for i in range(2):
            one = jax.jit(f)(*(x[i : i + 1] for x in (q, kv, indices)))
            for x, y in zip(one, both, strict=True):
                assert np.asarray(x[0]).tobytes() == np.asarray(y[i]).tobytes()

    @pytest.mark.parametrize("name", ["span", "selection"])
    def test_gradient(self, name):
        """By the kernels that are chosen by themselves, of 8 heads."""
        q, kv, sink = latents(8)
        indices = jax.random.randint(jax.random.key(3), (2, S, 64), 0, S, jnp.int32)

        def f(q, kv, sink, **how):
            if name == "span":
                return fmha(q, kv[:, :, None], d_v=512, span=Span.causal(S), sink=sink, **how)
            return sparse_fmha(q, kv, indices, d_v=512, sink=sink, **how)

        def total(*x, **how):
            o, lse = f(*x, **how)
            return (o.astype(jnp.float32) * jnp.cos(jnp.arange(512.0))).sum() + lse.sum()

        got = jax.jit(jax.grad(total, (0, 1, 2)))(q, kv, sink)
        wide = [x.astype(jnp.float32) for x in (q, kv, sink)]
        want = jax.jit(jax.grad(functools.partial(total, implementation="reference"), (0, 1, 2)))(*wide)
        for x, y in zip(got, want, strict=True):
            assert jnp.linalg.norm(x.astype(jnp.float32) - y) < 2e-2 * jnp.linalg.norm(y)
