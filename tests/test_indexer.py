"""The lightning indexer: its choice, against loops in float64; errors, transforms, kernels on a GPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dsv4_fmha as lib
from jax_dsv4_fmha import (
    Quantized,
    Span,
    indexer_blocks,
    indexer_loss,
    indexer_scores,
    lightning_indexer,
    quantize_indexer,
)  # fmt: skip
from jax_dsv4_fmha._definitions import indexer as definition
from jax_dsv4_fmha._host import indexer as raw
from jax_dsv4_fmha._host import library
from jax_dsv4_fmha._testing.cases import INDEXER
from jax_dsv4_fmha._testing.indexer import BlocksCase, ChoiceCase, ScoresCase, scored_float64
from tests.helpers import normal

B, S_Q, S_C, H, D = 2, 6, 23, 4, 16
H_A, D_A = 3, 8


def operands(dtype=jnp.float32, b=B, s_q=S_Q, s_c=S_C, h=H):
    return normal(0, b, s_q, h, D, dtype=dtype), normal(1, b, s_c, D, dtype=dtype), normal(2, b, s_q, h)


def f64(*arrays):
    return [np.asarray(x, np.float64) for x in arrays]


def scores_by_loop(q, k, weights):
    """float64 [b, s_q, s_c], one query and head at a time."""
    k, scales = (k.codes, np.asarray(k.scales)[:, None]) if isinstance(k, Quantized) else (k, 1)
    q, k, weights = f64(q, k, weights)
    s = np.zeros((q.shape[0], q.shape[1], k.shape[1]))
    for n, i, h in np.ndindex(*weights.shape):
        s[n, i] += weights[n, i, h] * np.maximum(k[n] @ q[n, i, h], 0.0)
    return s * scales


def chosen_by_loop(scores, visible, topk):
    """By sorting: greatest first, lower entry first, NaN last; then ascending."""
    indices = np.full((*scores.shape[:2], topk), -1)
    for n, i in np.ndindex(*scores.shape[:2]):
        entries = [j for j in range(scores.shape[2]) if visible[n, i, j]]
        best = sorted(entries, key=lambda j: (np.isnan(scores[n, i, j]), -scores[n, i, j], j))[:topk]
        indices[n, i, : len(best)] = sorted(best)
    return indices


def past(ratio, q_offset=0):
    position = np.arange(S_Q) + np.broadcast_to(np.asarray(q_offset), (B,))[:, None]
    return np.arange(S_C) < ((position + 1) // ratio)[..., None]


def named():
    indices = np.random.default_rng(5).integers(-2, S_C + 2, (B, S_Q, 7), np.int32)
    indices[0, 1] = -1  # a query without entries
    return jnp.asarray(indices)


def rows_of(*blocks):
    return jnp.broadcast_to(jnp.array(blocks, jnp.int32), (B, S_Q, len(blocks)))


def teacher():
    """attention_q, kv, lse over the entries and more keys, and a sink."""
    q, kv = normal(6, B, S_Q, H_A, D_A), normal(7, B, S_C, D_A)
    logits = np.einsum("bnhd,bsd->bnhs", *f64(q, kv)) * D_A**-0.5
    lse = np.logaddexp(np.log(np.exp(logits).sum(-1)), 0.7)
    return q, kv, jnp.asarray(lse, jnp.float32), jnp.array([0.3, -jnp.inf, 2.0], jnp.float32)


@pytest.mark.parametrize("topk", [1, 7, S_C, S_C + 5])
@pytest.mark.parametrize("ratio", [1, 4])
def test_chooses_what_a_loop_chooses(topk, ratio):
    q, k, weights = operands()
    offset = jnp.array([3, 60], jnp.int32)
    span = Span.compressed(S_Q, ratio, offset)
    indices, scores = lightning_indexer(q, k, weights, topk=topk, span=span, return_scores=True)
    want = scores_by_loop(q, k, weights)
    np.testing.assert_array_equal(indices, chosen_by_loop(want, past(ratio, offset), topk))
    there = np.asarray(indices) >= 0
    named = np.take_along_axis(want, np.where(there, indices, 0), -1)
    np.testing.assert_allclose(np.where(there, scores, 0), np.where(there, named, 0), rtol=1e-5, atol=1e-5)
    assert (np.asarray(scores)[~there] == -np.inf).all()


def test_ties_go_to_the_lower_entry_and_nan_loses():
    k = jnp.zeros((1, 9, D)).at[0, :, 0].set(jnp.array([1.0, 2, 2, jnp.nan, 0, 2, -5, -7, 1]))
    q = jnp.zeros((1, 1, 1, D)).at[..., 0].set(1.0)
    for sign, topk, want in (
        (1, 2, [1, 2]),  # the first two of three 2s
        (1, 4, [0, 1, 2, 5]),
        (1, 8, [0, 1, 2, 4, 5, 6, 7, 8]),  # NaN after the zeros
        (-1, 2, [4, 6]),  # -0 where ReLU cut, which equals 0
        (-1, 9, list(range(9))),
    ):
        got = lightning_indexer(q, k, jnp.full((1, 1, 1), float(sign)), topk=topk, span=Span.causal(1, 8))
        np.testing.assert_array_equal(got[0, 0], want)


def test_infinite_scores_keep_their_order():
    x = jnp.array([[[-jnp.inf, jnp.nan, 1.0, jnp.inf, -1.0, -0.0, 0.0, jnp.nan]]])
    for topk, want in ((1, [3]), (3, [2, 3, 5]), (4, [2, 3, 5, 6]), (5, [2, 3, 4, 5, 6]), (6, [0, 2, 3, 4, 5, 6])):
        indices, _ = definition.best(x, jnp.ones(x.shape, bool), topk)
        np.testing.assert_array_equal(indices[0, 0], want)


def test_what_nobody_sees_reaches_nobody():
    q, k, weights = operands()
    lengths = jnp.array([9, 20], jnp.int32)
    span = Span.compressed(S_Q, 1, 30) & Span.lengths(lengths)
    call = functools.partial(lightning_indexer, topk=6, span=span, return_scores=True)
    want = call(q, k, weights)
    hidden = np.arange(S_C) >= np.asarray(lengths)[:, None]
    for bad in (jnp.nan, 1e30):
        for x, y in zip(call(q, jnp.where(hidden[..., None], bad, k), weights), want, strict=True):
            np.testing.assert_array_equal(x, y)


def test_packed_segments():
    """Two documents in a row of a batch are two rows of a batch."""
    q, k, weights = operands(b=1, s_q=8, s_c=16)
    first = lightning_indexer(q[:, :4], k[:, :8], weights[:, :4], topk=3, span=Span.compressed(4, 1, 4))
    second = lightning_indexer(q[:, 4:], k[:, 8:], weights[:, 4:], topk=3, span=Span.compressed(4, 1, 4))
    start = jnp.array([0] * 4 + [8] * 4, jnp.int32)
    stop = start + jnp.array([5, 6, 7, 8] * 2, jnp.int32)
    both = lightning_indexer(q, k, weights, topk=3, span=Span(start, stop))
    np.testing.assert_array_equal(both, jnp.concatenate([first, second + 8], 1))


def test_8_bits_mean_the_same():
    q, k, weights = operands(jnp.bfloat16)
    q8, k8, w8 = quantize_indexer(q * 3, k.at[0, 5].set(0), weights)
    assert np.isfinite(f64(q8)[0]).all() and q8.dtype == k8.codes.dtype == jnp.float8_e4m3fn
    indices, scores = lightning_indexer(q8, k8, w8, topk=S_C, span=Span.compressed(S_Q, 1, S_C), return_scores=True)
    np.testing.assert_allclose(scores, scores_by_loop(q8, k8, w8), rtol=1e-5, atol=1e-4)
    exact = scores_by_loop(q * 3, k.at[0, 5].set(0), weights)
    assert np.linalg.norm(scores - exact) < 0.05 * np.linalg.norm(exact)
    np.testing.assert_array_equal(indices, np.broadcast_to(np.arange(S_C), indices.shape))


def test_blocks_of_queries_are_the_whole(monkeypatch):
    q, k, weights = operands()
    span = Span.compressed(S_Q, 1, 9)
    whole = lightning_indexer(q, k, weights, topk=5, span=span)
    monkeypatch.setattr(definition, "_BLOCK", 4 * B * H * S_C)  # queries: the last block is not full
    jax.clear_caches()
    np.testing.assert_array_equal(lightning_indexer(q, k, weights, topk=5, span=span), whole)
    jax.clear_caches()


def test_reference_has_namesakes():
    """They take what the ops take, and return what the ops return here; JAX's own gradient equals the written-out
    one.
    """
    q, k, weights = operands()
    span = Span.compressed(S_Q, 2, jnp.array([9, 60], jnp.int32)) & Span.lengths(jnp.array([20, 23], jnp.int32))
    seen = {"span": span}
    for name, how in (("lightning_indexer", {"topk": 5}), ("indexer_blocks", {"count": 3, "block": 4})):
        got, want = (getattr(of, name)(q, k, weights, **how, **seen) for of in (lib.reference, lib))
        np.testing.assert_array_equal(got, want)

    def loss(f, *x):
        return jnp.sum(jnp.sin(jnp.where(jnp.isfinite(s := f(*x, named())), s, 0)))

    by_jax, ours = (
        jax.grad(functools.partial(loss, of.indexer_scores), (0, 1, 2))(q, k, weights) for of in (lib.reference, lib)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), by_jax, ours)

    *given, sink = teacher()
    for entries in (seen, {"indices": named()}):
        by_jax, ours = (
            jax.value_and_grad(lambda *x: jnp.sum(of.indexer_loss(*x, *given, sink=sink, **entries)), (0, 1, 2))(  # noqa: B023
                q, k, weights
            )
            for of in (lib.reference, lib)
        )
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), by_jax, ours)


def test_no_entries_yet():
    q, k, weights = operands()
    for x in (k[:, :0], Quantized(k[:, :0], k[:, :0, 0])):
        indices, scores = lightning_indexer(q, x, weights, topk=3, span=Span.compressed(S_Q, 4), return_scores=True)
    assert (indices == -1).all() and (scores == -jnp.inf).all() and indices.shape == (B, S_Q, 3)


# Errors


def call(op, **operands):
    return jax.eval_shape(lambda: getattr(lib, op)(**operands))


def right(op):
    """Valid operands."""
    q, k, weights = operands(jnp.bfloat16)
    attention_q, kv, lse, sink = teacher()
    offset, lengths = jnp.zeros(B, jnp.int32), jnp.full(B, 9, jnp.int32)
    visible = {"span": Span.compressed(S_Q, 4, offset) & Span.lengths(lengths)}
    trained = {"q": q, "k": k, "weights": weights}
    return {
        "lightning_indexer": {**trained, **visible, "topk": 5, "return_scores": False, "implementation": None},
        "indexer_blocks": {**trained, **visible, "count": 3, "block": 4},
        "indexer_scores": {**trained, "indices": named(), "implementation": "reference"},
        "indexer_loss": {**trained, "attention_q": attention_q, "kv": kv, "lse": lse, "sink": sink,
                         **visible, "indices": None, "implementation": None},
        "quantize_indexer": trained,
    }[op]  # fmt: skip


OPS = ("lightning_indexer", "indexer_blocks", "indexer_scores", "indexer_loss", "quantize_indexer")


@pytest.mark.parametrize(
    "op, wrong, error, message",
    [
        ("lightning_indexer", {"q": jnp.zeros((B, S_Q, D))}, ValueError, r"q: got float32\[2, 6, 16\].*\[b, s_q, h"),
        ("lightning_indexer", {"k": jnp.zeros((B, S_C, D))}, ValueError, "k: got float32.*wanted bfloat16"),
        ("lightning_indexer", {"k": jnp.zeros((1, 0, D), jnp.bfloat16)}, ValueError, r"k: got bfloat16\[1, 0, 16\]"),
        ("lightning_indexer", {"weights": jnp.zeros((B, S_Q))}, ValueError, r"weights: got float32\[2, 6\]"),
        ("lightning_indexer", {"topk": 0}, ValueError, "topk: got 0, wanted an int >= 1"),
        ("lightning_indexer", {"topk": None}, TypeError, "topk: got None"),
        ("lightning_indexer", {"span": None}, TypeError, "span: got None, wanted a Span"),
        ("lightning_indexer", {"span": 3}, TypeError, "span: got 3, wanted a Span"),
        ("lightning_indexer", {"span": Span.lengths(jnp.zeros(3, jnp.int32))}, ValueError, r"span.stop: got int32\[3"),
        ("lightning_indexer", {"k": Quantized(jnp.zeros((B, S_C, D)), jnp.ones((B, S_C)))}, TypeError,
         r"k: got a Quantized, wanted bfloat16\[b=2, s_c, d=16\]"),
        ("lightning_indexer", {"implementation": "cubin"}, NotImplementedError, "implementation: got 'cubin'"),
        ("lightning_indexer", {"implementation": "xla"}, ValueError, "implementation: got 'xla'"),
        ("lightning_indexer", {"blocks": jnp.zeros((B, S_Q, 3))}, ValueError, "blocks: got float32.*wanted int32"),
        ("lightning_indexer", {"blocks": named(), "block": 0}, ValueError, "block: got 0, wanted an int >= 1"),
        ("lightning_indexer", {"blocks": rows_of(0, 4, 4)}, ValueError, r"blocks: got 4 before 4 in row \(0, 0\), "),
        ("lightning_indexer", {"blocks": rows_of(3, -1, 5)}, ValueError, r"blocks: got -1 before 5 in row \(0, 0\)"),
        ("indexer_blocks", {"count": 0}, ValueError, "count: got 0, wanted an int >= 1"),
        ("indexer_scores", {"indices": jnp.zeros((B, S_Q, 3))}, ValueError, "indices: got float32.*wanted int32"),
        ("indexer_scores", {"implementation": "cubin"}, NotImplementedError, "implementation: got 'cubin'"),
        ("indexer_loss", {"indices": named()}, ValueError, "span: got a Span, wanted None with indices"),
        ("indexer_loss", {"span": None}, TypeError, "span: got None, wanted a Span"),
        ("indexer_loss", {"kv": jnp.zeros((B, S_C + 1, D_A))}, ValueError, r"kv: got float32.*s_c=23"),
        ("indexer_loss", {"lse": jnp.zeros((B, S_Q, 1))}, ValueError, "lse: got float32.*h_q=3"),
        ("indexer_loss", {"lse": jnp.zeros((B, 3, S_Q))}, ValueError, "lse: got .*would fit if attention_q were "),
        ("quantize_indexer", {"k": jnp.zeros((B, S_C, D + 1))}, ValueError, r"k: got float32\[2, 23, 17\]"),
    ],
)  # fmt: skip
def test_error(op, wrong, error, message):
    with pytest.raises(error, match=f"^{op}: .*{message}") as raised:
        call(op, **{**right(op), **wrong})
    assert type(raised.value) is error
    assert (", built " in str(raised.value)) == (error is NotImplementedError)


def test_8_bits_want_scales():
    q, k, weights = quantize_indexer(*operands())
    for wrong, error in ((None, TypeError), (k.scales[:1], ValueError), (k.scales.astype(jnp.bfloat16), ValueError)):
        with pytest.raises(error, match=r"^lightning_indexer: k.scales: got .*wanted float32"):
            lightning_indexer(q, Quantized(k.codes, wrong), weights, topk=3, span=Span.causal(S_Q))
    with pytest.raises(ValueError, match=r"^lightning_indexer: k.codes: got float32.*wanted float8_e4m3fn"):
        lightning_indexer(q, Quantized(operands()[1], k.scales), weights, topk=3, span=Span.causal(S_Q))
    with pytest.raises(TypeError, match=r"^lightning_indexer: k: got float8_e4m3fn.*wanted a Quantized or a Cache"):
        lightning_indexer(q, k.codes, weights, topk=3, span=Span.causal(S_Q))


ANYTHING = st.one_of(
    st.builds(
        lambda shape, dtype: jnp.zeros(shape, dtype),
        st.lists(st.sampled_from([0, 1, B, S_Q, S_C, H, D]), max_size=4).map(tuple),
        st.sampled_from([jnp.bfloat16, jnp.float32, jnp.int32, jnp.float8_e4m3fn, jnp.bool_]),
    ),
    st.integers(-(2**70), 2**70), st.floats(), st.booleans(), st.none(), st.text(max_size=3), st.just(object()),
    st.builds(lambda x: Span(x, x), st.one_of(st.integers(), st.none())), st.just(np.zeros((B, S_C))),
)  # fmt: skip


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_operand_may_be_anything(op, data):
    """One operand is replaced by anything: a clear error, or a result."""
    given_ = dict(right(op))
    given_[data.draw(st.sampled_from(sorted(given_)))] = data.draw(ANYTHING)
    try:
        call(op, **given_)
    except (ValueError, NotImplementedError, TypeError) as e:
        assert type(e) in (ValueError, NotImplementedError, TypeError), e
        assert str(e).split(":")[0] in (op, "Span"), e


@pytest.mark.parametrize("setting", [lambda: jax.enable_x64(True), lambda: jax.numpy_rank_promotion("raise")])
def test_under_other_settings(setting):
    want = [jax.tree.map(lambda x: (x.shape, x.dtype), call(op, **right(op))) for op in OPS]
    given_ = [right(op) for op in OPS]
    with setting():
        got = [jax.tree.map(lambda x: (x.shape, x.dtype), call(op, **x)) for op, x in zip(OPS, given_, strict=True)]
    assert got == want


# Transforms


def of_op(op, q, k, weights, indices, attention_q, kv, lse):
    """An op as a function of everything that may be mapped or sharded."""
    if op == "lightning_indexer":
        return lightning_indexer(q, k, weights, topk=5, span=Span.compressed(S_Q, 4, S_C), return_scores=True)
    if op == "two levels":
        seen = {"span": Span.compressed(S_Q, 4, S_C), "block": 4}
        blocks = jnp.cumsum(indices % 2 + 1, -1)  # which ascend
        return (
            indexer_blocks(q, k, weights, count=3, **seen),
            *lightning_indexer(q, k, weights, topk=5, blocks=blocks, return_scores=True, **seen),
        )
    if op == "indexer_scores":
        return jnp.maximum(indexer_scores(q, k, weights, indices), -1e30)
    sink = np.array([0.3, -np.inf, 2.0], np.float32)
    if op == "indexer_loss":
        return indexer_loss(q, k, weights, attention_q, kv, lse, indices=indices, sink=sink)
    return indexer_loss(q, k, weights, attention_q, kv, lse, span=Span.compressed(S_Q, 4, S_C), sink=sink)


TRANSFORMED = ("lightning_indexer", "two levels", "indexer_scores", "indexer_loss", "warm-up")


def all_operands():
    q, k, weights = operands()
    return q, k, weights, named(), *teacher()[:3]


@pytest.mark.parametrize("op", TRANSFORMED)
@pytest.mark.parametrize("mapped", ["all", "queries"])
def test_vmap(op, mapped):
    """With keys mapped, or not: then they are not copied."""
    of_keys = (1, 5)
    axes = [None if mapped == "queries" and i in of_keys else 0 for i in range(7)]
    x = [jnp.stack([a, -a]) if axis == 0 and i < 3 else jnp.stack([a, a]) if axis == 0 else a
         for i, (a, axis) in enumerate(zip(all_operands(), axes, strict=True))]  # fmt: skip
    f = functools.partial(of_op, op)
    got = jax.vmap(f, axes)(*x)
    want = [f(*(a[i] if axis == 0 else a for a, axis in zip(x, axes, strict=True))) for i in range(2)]
    jax.tree.map(lambda g, *w: np.testing.assert_allclose(g, np.stack(w), rtol=1e-5, atol=1e-5), got, *want)


@pytest.mark.parametrize("op", TRANSFORMED)
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_meshes(op, kind):
    """Sharding batch and queries gathers nothing; only the gradient of k is summed over the queries' shards."""
    x, f = all_operands(), functools.partial(of_op, op)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices("cpu")[:4])
    placed = [
        jax.device_put(a, NamedSharding(mesh, P("data") if i in (1, 5) else P("data", "model")))
        for i, a in enumerate(x)
    ]

    def check(f, sums):
        program = jax.jit(f).lower(*placed).compile()
        found = set(re.findall("all-gather|all-to-all|collective-permute|reduce-scatter|all-reduce", program.as_text()))
        assert found == ({"all-reduce"} if sums else set())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), program(*placed), f(*x))

    check(f, sums=False)
    if op not in ("lightning_indexer", "two levels"):
        check(jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x))), (0, 1, 2)), sums=True)


def test_gradients_of_what_is_chosen_are_none():
    q, k, weights = operands()

    def f(q, k, weights):
        _, scores = lightning_indexer(q, k, weights, topk=3, span=Span.compressed(S_Q, 1, 9), return_scores=True)
        return jnp.sum(scores)

    assert all((g == 0).all() for g in jax.grad(f, (0, 1, 2))(q, k, weights))


def kernel_operands(dtype=jnp.bfloat16, s_q=37, s_c=600, h=64):
    rng = np.random.default_rng(3)
    q, k = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((2, s_q, h, 128), (2, s_c, 128)))
    weights = jnp.asarray(rng.standard_normal((2, s_q, h)), jnp.float32)
    if dtype == jnp.float8_e4m3fn:
        return quantize_indexer(q, k, weights)
    return q.astype(dtype), k.astype(dtype), weights


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
@pytest.mark.parametrize("b", [2, "b"])
def test_export_for_cuda(dtype, b, monkeypatch):
    """One custom call, also with a symbolic batch."""
    monkeypatch.setattr(library, "local_architectures", lambda: ())

    def f(q, k, weights):
        span = Span.compressed(q.shape[1], 4, 2000)
        return lightning_indexer(q, k, weights, topk=64, span=span, implementation="cubin")

    (n,) = jax.export.symbolic_shape("b") if b == "b" else (2,)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct((n, *a.shape[1:]), a.dtype), kernel_operands(dtype))
    targets = ["dsv4_fmha_lightning_indexer"]
    exported = jax.export.export(
        jax.jit(f),
        platforms=["cuda"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(t) for t in targets],
    )(*shapes)
    assert exported.mlir_module().count("custom_call @dsv4_fmha_lightning_indexer") == 1
    assert exported.out_avals[0].shape[1:] == (37, 64)


def test_export_with_entries_left_open():
    """One program for fewer entries than topk, and for more."""
    (n,) = jax.export.symbolic_shape("n")
    f = jax.jit(lambda *x: lightning_indexer(*x, topk=9, span=Span.compressed(7, 1), return_scores=True))
    shapes = ((2, 7, 16, 128), (2, n, 128), (2, 7, 16))
    exported = jax.export.export(f)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    for s_c in (3, 20):
        rng = np.random.default_rng(s_c)
        x = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((2, 7, 16, 128), (2, s_c, 128), (2, 7, 16))]
        for got, want in zip(exported.call(*x), f(*x), strict=True):
            np.testing.assert_array_equal(got, want)


def test_a_workspace_is_bounded(monkeypatch):
    """65536 queries of 16384 entries: half a GiB of scores at a time."""
    seen = []
    monkeypatch.setattr(
        jax.ffi, "ffi_call", lambda name, results, **_: lambda *_, **__: seen.extend(results) or results
    )
    q, k = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 65536, 64, 128), (1, 16384, 128)))
    weights, k_scale = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 65536, 64), (1, 16384)))
    start = stop = jax.ShapeDtypeStruct((1, 65536), jnp.int32)
    raw.lightning_indexer(q, weights, k, k_scale, start, stop, topk=512, return_scores=False)
    indices, values, scores = seen
    assert indices.shape == (1, 65536, 512) and values.shape == (1, 65536, 0)
    assert scores.size * 4 <= 2**29 and scores.shape == (8192, 16384)


@pytest.mark.parametrize("b", [2, "b"])
def test_scores_are_exported_for_cuda(b, monkeypatch):
    """One custom call, and one of their gradients."""
    monkeypatch.setattr(library, "local_architectures", lambda: ())
    x = kernel_operands(s_q=5, s_c=60)
    (n,) = jax.export.symbolic_shape("b") if b == "b" else (2,)
    shapes = [jax.ShapeDtypeStruct((n, *a.shape[1:]), a.dtype) for a in x]

    def loss(q, k, weights, indices):
        scores = indexer_scores(q, k, weights, indices, implementation="cubin")
        return jnp.sum(jnp.where(indices < 0, 0, scores))

    exported = jax.export.export(
        jax.jit(jax.grad(loss, (0, 1, 2))), platforms=["cuda"], disabled_checks=lib.EXPORT_CHECKS
    )(*shapes, jax.ShapeDtypeStruct((n, 5, 7), jnp.int32))
    text = exported.mlir_module()
    assert text.count("custom_call @dsv4_fmha_indexer_scores_at_bwd(") == 1
    assert [x.dtype for x in exported.out_avals] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]


@pytest.mark.usefixtures("built")
def test_a_chip_that_has_scores_and_not_their_gradient(monkeypatch):
    """There the definition's gradient runs behind the kernel's scores."""
    monkeypatch.setattr(library, "shipped_for", lambda op, **_: ("sm_90a", "sm_100f")[: 2 - op.endswith("_bwd")])
    x = kernel_operands(s_q=5, s_c=60)
    indices = jnp.zeros((2, 5, 7), jnp.int32)

    def calls(arch):
        monkeypatch.setattr(library, "local_architectures", lambda: (arch,))
        scored = jax.jit(jax.value_and_grad(lambda *x: jnp.sum(indexer_scores(*x, implementation="cubin"))))
        text = scored.trace(*x, indices).lower(lowering_platforms=("cuda",)).as_text()
        return [text.count(f"@dsv4_fmha_indexer_scores_at{x}(") for x in ("", "_bwd")]

    assert calls("sm_90a") == [1, 1]
    assert calls("sm_100f") == [1, 0]


ONE_OF_EACH = {(type(case), getattr(case, "page", None)): case for case in INDEXER}.values()


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda c: c.id)
def test_reference_against_float64(case):
    assert case.complaints("reference") == []


def test_complaints_are_found(monkeypatch):
    """An entry that was swapped for a worse one, a newest block for another, a gradient that lacks a factor."""
    case, right = INDEXER[0], ChoiceCase.choose

    def worst(*x):
        indices, scores = map(np.copy, right(*x))
        entries = np.setdiff1d(np.flatnonzero(case.visible()[1, 0]), indices[1, 0])
        indices[1, 0, -1] = max(entries[-1], indices[1, 0, -2] + 1)
        return indices, scores

    monkeypatch.setattr(ChoiceCase, "choose", worst)
    assert any("query 0 of batch entry 1" in x for x in case.complaints("reference"))

    def without_the_newest(*x):
        blocks = np.copy(rightly(*x))
        others = np.setdiff1d(np.arange(blocks[1, 0, -1]), blocks[1, 0])
        blocks[1, 0] = np.sort([*blocks[1, 0, :-1], others[0]])
        return blocks

    rightly = BlocksCase.choose_blocks
    monkeypatch.setattr(BlocksCase, "choose_blocks", without_the_newest)
    monkeypatch.setattr(ChoiceCase, "choose", right)
    says = "query 0 of batch entry 1 left out a block with a greater score, or the newest"
    case = next(case for case in INDEXER if isinstance(case, BlocksCase))
    assert case.complaints("reference") == [says]
    monkeypatch.setattr(ScoresCase, "results", lambda _, x, *__: {k: 2 * v for k, v in scored_float64(x).items()})
    assert len(INDEXER[-1].complaints("reference")) == 4


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("h", [32, 64])
def test_scores_at_entries_by_kernels(cuda, h):
    """Scores and gradients equal the reference's, up to rounding to 16 bits."""
    with jax.default_device(cuda):
        q, k, weights = kernel_operands(s_q=65, s_c=700, h=h)
        rng = np.random.default_rng(6)
        indices = jnp.asarray(rng.integers(-20, 720, (2, 65, 130)), jnp.int32)
        cotangent = jnp.asarray(rng.standard_normal(indices.shape), jnp.float32)
        there = (indices >= 0) & (indices < 700)

        def run(implementation):
            def f(*x):
                return indexer_scores(*x, indices, implementation=implementation)

            scores, back = jax.vjp(f, q, k, weights)
            return jnp.where(there, scores, 0), *back(cotangent)

        limits = {"scores": 1e-5, "dq": 6e-3, "dk": 6e-3, "dweights": 1e-4}
        for (name, limit), got, want in zip(limits.items(), run("cubin"), run("reference"), strict=True):
            got, want = f64(got, want)
            assert np.linalg.norm(got - want) <= limit * np.linalg.norm(want), name


@pytest.mark.gpu
@pytest.mark.parametrize("h", [32, 64])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
@pytest.mark.parametrize(("s_q", "s_c", "topk"), [(37, 600, 64), (129, 5000, 512), (3, 9000, 2048)])
def test_kernel(cuda, h, dtype, s_q, s_c, topk):
    """Its scores equal the reference's, up to rounding; its choice is exact for its own scores of all entries."""
    with jax.default_device(cuda):
        x, span = kernel_operands(dtype, s_q=s_q, s_c=s_c, h=h), Span.compressed(s_q, 1, s_c - s_q - 3)
        call = functools.partial(lightning_indexer, *x, span=span, return_scores=True)
        everything, scores = call(topk=min(s_c, 2048), implementation="cubin")
        _, want = call(topk=s_c, implementation="reference")
        limit = np.abs(np.where(np.isfinite(want), want, 0)).max() * (1e-3 if dtype == jnp.float8_e4m3fn else 1e-5)
        there = np.asarray(everything) >= 0
        of_entry = np.take_along_axis(np.asarray(want), np.where(there, everything, 0), -1)  # in order, so by entry
        np.testing.assert_allclose(np.where(there, scores, 0), np.where(there, of_entry, 0), rtol=0, atol=limit)
        indices, values = call(topk=topk, implementation="cubin")
        again, _ = call(topk=topk, implementation="cubin")
        np.testing.assert_array_equal(indices, again)
        if s_c <= 2048:
            n, i, j = np.nonzero(there)
            dense = np.full((*there.shape[:2], s_c), -np.inf, np.float32)
            dense[n, i, np.asarray(everything)[n, i, j]] = np.asarray(scores)[n, i, j]
            seen = np.zeros(dense.shape, bool)
            seen[n, i, np.asarray(everything)[n, i, j]] = True
            np.testing.assert_array_equal(indices, chosen_by_loop(dense, seen, topk))
        least = np.where(np.asarray(indices) >= 0, values, np.inf).min(-1)
        greater = (np.where(np.isfinite(want), want, -np.inf) > least[..., None] + 2 * limit).sum(-1)
        assert (greater <= topk).all()  # no entry with a clearly greater score was left out


@pytest.mark.gpu
@pytest.mark.parametrize("case", INDEXER, ids=lambda c: c.id)
def test_case(cuda, case):
    with jax.default_device(cuda):
        assert case.complaints("cubin") == []


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "s"), [(1, 16384), (15, 40000), (20, 70000), (60, 262144), (3, 600000)])
def test_choice_among_long_rows(cuda, rows, s):
    """Exact where CTAs share a row: the greatest, and of those equal to the last one the first, as a stable sort."""
    rng = np.random.default_rng(s)
    scores = np.minimum(rng.standard_normal((1, rows, s)), 2).astype(np.float32)
    scores[..., ::97], scores[..., ::5] = 3 * rng.random(scores[..., ::97].shape), np.nan
    start, stop = rng.integers(0, 9, (1, rows), np.int32), s - rng.integers(0, 9, (1, rows), np.int32)
    with jax.default_device(cuda):
        got = raw.indexer_topk(scores, start, stop, topk=512, return_scores=True)
    for mine, values, row, a, b in zip(*(np.asarray(x)[0] for x in (*got, scores, start, stop)), strict=True):
        seen = np.where(np.isnan(row[a:b]), -np.inf, row[a:b])
        np.testing.assert_array_equal(mine, a + np.sort(np.argsort(-seen, kind="stable")[:512]))
        np.testing.assert_array_equal(values, row[mine])
