"""dsv4_attention; its values against float64 stand in test_reference.py, for every case of the table."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jax_dsv4_fmha import (
    Cache,
    QueryRope,
    Span,
    dsv4_attention,
    dsv4_decode,
    fmha,
    merge,
    quantize_cache,
    reference,
    sparse_fmha,
)  # fmt: skip
from jax_dsv4_fmha._definitions.query_rope import GroupedRope
from jax_dsv4_fmha._dispatch.rope import normed_then_rotated, rotated
from jax_dsv4_fmha._host import library
from jax_dsv4_fmha._testing.attention import KV_STD, Q_STD, LayerCase, run, run_reference
from jax_dsv4_fmha._testing.cases import CASES
from jax_dsv4_fmha.layers import DSV4Attention, Rope, inverse_rope, rope
from jax_dsv4_fmha.layers._norm import rms_norm
from tests.helpers import assert_right, normal

LAYERS = [case for case in CASES if isinstance(case, LayerCase) and not case.by_e4m3]
SOME = [
    next(c for c in LAYERS if bool(c.s_c) == compressed and bool(c.topk) == topk and c.is_small)
    for compressed, topk in ((False, False), (True, False), (True, True))
]


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.id)
def test_it_equals_the_definition(case):
    assert_right(run(case), run_reference(case))


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("case", SOME, ids=lambda case: case.id)
def test_one_launch_equals_the_definition(case):
    assert_right(run(case), run_reference(case))


def in_two_passes(q, w, c, *, window=128, ratio=None, indices=None, q_offset=0, sink=None, **how):
    """The window and the entries in a launch each, merged."""
    near = window if isinstance(window, Span) else Span.sliding_window(q.shape[1], window, q_offset)
    far = ratio if not isinstance(ratio, int) else Span.compressed(q.shape[1], ratio, q_offset)
    parts = [fmha(q, w[:, :, None], span=near, **how)]
    if indices is None:
        parts += [fmha(q, c[:, :, None], span=far, **how)]
    else:
        start, stop = (far or Span(0, 2**31 - 1)).bounds(*q.shape[:2], c.shape[1])
        seen = (start[..., None] <= indices) & (indices < stop[..., None])
        parts += [sparse_fmha(q, c, jnp.where(seen, indices, -1), **how)]
    return merge(parts, sink)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    "f, compressed, targets",
    [
        (dsv4_attention, {}, ["mla_span_fwd"]),
        (dsv4_attention, {"ratio": 4}, ["hca_fwd"]),
        (dsv4_attention, {"indices": jnp.zeros((2, 6, 2), jnp.int32)}, ["csa_fwd"]),
        (in_two_passes, {"ratio": 4}, ["mla_span_fwd", "mla_span_fwd"]),
        (in_two_passes, {"indices": jnp.zeros((2, 6, 2), jnp.int32)}, ["mla_span_fwd", "mla_sparse_fwd"]),
    ],
)
def test_launches(f, compressed, targets):
    q, w, c, sink = operands()
    f = jax.jit(lambda q, w, c, f=f: f(q, w, c if compressed else None, sink=sink, **compressed))
    text = f.trace(q, w, c).lower(lowering_platforms=("cuda",)).as_text()
    assert sorted(re.findall(r"custom_call @dsv4_fmha_(\w+)", text)) == targets


def test_the_reference_is_the_definition():
    q, w, c, sink = operands()
    for x, y in zip(
        dsv4_attention(q, w, c, ratio=4, sink=sink, implementation="reference"),
        reference.dsv4_attention(q, w, c, ratio=4, sink=sink),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("chosen", [False, True])
def test_spans_say_what_numbers_say(implementation, chosen):
    q, w, c, sink = operands()
    how = {"sink": sink, "implementation": implementation} | ({"indices": INDICES} if chosen else {})
    f = functools.partial(dsv4_attention, q, w, c, **how)
    want = f(window=3, ratio=2, q_offset=2)
    near, far = Span.sliding_window(6, 3, 2), Span.compressed(6, 2, 2)
    for spans in ({"window": near, "ratio": far}, {"window": near, "ratio": 2, "q_offset": 2}):
        jax.tree.map(np.testing.assert_array_equal, f(**spans), want)
    with pytest.raises(ValueError, match=r"^dsv4_attention: q_offset: got 2, wanted 0 where Spans"):
        f(window=near, ratio=far, q_offset=2)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("case", [c for c in LAYERS if c.s_c], ids=lambda case: case.id)
def test_one_launch_and_two_agree(case):
    args, kwargs = case.operands()
    numbers = {name: kwargs.pop(name) for name in ("window", "ratio") if isinstance(kwargs.get(name), int)}
    for op in (in_two_passes, dsv4_attention):
        f = jax.jit(lambda args, kwargs, op=op: op(*args, **kwargs, **numbers, implementation="cubin"))
        assert_right(f(args, kwargs), run_reference(case))


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.id)
def test_kernel(case):
    got = run(case, "cubin" if case.has_kernel else None)
    assert_right(got, run_reference(case))


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("h_q", [16, 128])
@pytest.mark.parametrize("chosen", [False, True], ids=["dense", "topk"])
def test_packed_documents_by_kernels(chosen, h_q):
    """Packing is one fused launch, forward and backward, and each document gives its own result, as in float32."""
    rng, ratio, lengths = np.random.default_rng(0), 4, (130, 1, 3, 77, 301)
    s, n = sum(lengths), sum(length // ratio for length in lengths)
    shapes = {(1, s, h_q, 512): Q_STD, (1, s, 512): KV_STD, (1, n, 512): KV_STD, (h_q,): 1}  # as the cases have them
    q, w, c, sink = (jnp.asarray(std * rng.standard_normal(x), jnp.float32) for x, std in shapes.items())
    q, w, c = (x.astype(jnp.bfloat16) for x in (q, w, c))
    ids = jnp.repeat(jnp.arange(5, dtype=jnp.int32), jnp.array(lengths), total_repeat_length=s)[None]
    window = Span.sliding_window(s, 128) & Span.segments(ids)
    how = {"window": window, "ratio": Span.compressed_segments(ids, ratio), "sink": sink}
    if chosen:
        how["indices"] = jnp.asarray(rng.permuted(np.tile(np.arange(n), (s, 1)), axis=1)[None, :, :64], jnp.int32)
    f = jax.jit(lambda q, w, c: dsv4_attention(q, w, c, **how, implementation="cubin"))
    assert f.lower(q, w, c).as_text().count("custom_call @dsv4_fmha") == 1
    exact = [x.astype(jnp.float32) for x in (q, w, c)]
    want = jax.jit(lambda *x: reference.dsv4_attention(*x, **how))
    assert_right(f(q, w, c), want(*exact))

    def pull(f, *x):
        o, vjp = jax.vjp(lambda *x: f(*x)[0], *x)
        return vjp(jnp.roll(o, 1, 1))

    gradients = (jax.jit(functools.partial(pull, of))(*x) for of, x in ((f, (q, w, c)), (want, exact)))
    for got, exactly in zip(*gradients, strict=True):
        error = jnp.linalg.norm(got.astype(jnp.float32) - exactly) / jnp.linalg.norm(exactly)
        assert error < 2e-2, error


INDICES = jnp.tile(jnp.array([0, 2], jnp.int32), (2, 6, 1))


def operands(b=2, s_q=6, s_w=9, s_c=3, h=2, d=8):
    rng = np.random.default_rng(0)
    q, w, c, sink = (
        jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((b, s_q, h, d), (b, s_w, d), (b, s_c, d), (h,))
    )
    return q, w, c, sink


def test_traced_offsets_equal_ints():
    q, w, c, sink = operands()

    def f(i, j):
        window = Span.sliding_window(6, 3, i).keys_from(j)
        return dsv4_attention(q, w, c, ratio=4, sink=sink, window=window, q_offset=i)

    want = jax.jit(lambda: f(7, 4))()
    for offsets in ((jnp.int32(7), jnp.int32(4)), (jnp.full(2, 7, jnp.int32), jnp.int32(4))):
        for x, y in zip(jax.jit(f)(*offsets), want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first_key", [-5, jnp.array([-5, -2], jnp.int32)])
@pytest.mark.parametrize("compressed", [{}, {"ratio": 4}])
def test_positions_below_0_are_not_seen(first_key, compressed):
    """A chunk at the front of a prompt, with an empty carry, whose contents do not matter."""
    q, w, c, sink = operands()
    first = np.broadcast_to(-np.asarray(first_key), 2)
    window = Span.sliding_window(6, 128).keys_from(first_key)
    f = jax.jit(lambda w: dsv4_attention(q, w, c, sink=sink, window=window, **(compressed or {"indices": INDICES})))
    below = np.arange(w.shape[1]) < first[:, None]
    got = f(jnp.where(below[..., None], 7.0, w))
    for x, y in zip(got, f(jnp.where(below[..., None], jnp.nan, w)), strict=True):
        np.testing.assert_array_equal(x, y)
    alone = [
        dsv4_attention(q[n : n + 1], w[n : n + 1, first[n] :], c[n : n + 1], sink=sink,
                       **(compressed or {"indices": INDICES[n : n + 1]}))
        for n in range(2)
    ]  # fmt: skip
    for x, y in zip(got, zip(*alone, strict=True), strict=True):
        np.testing.assert_allclose(x, jnp.concatenate(y), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_ratio_hides_indices_that_are_not_past(implementation):
    q, w, c, sink = operands()
    f = functools.partial(dsv4_attention, q, w, c, sink=sink, implementation=implementation)
    past = ((jnp.arange(6) + 1) // 2)[:, None] > INDICES
    for x, y in zip(f(indices=INDICES, ratio=2), f(indices=jnp.where(past, INDICES, -1)), strict=True):
        np.testing.assert_array_equal(x, y)
    caches = Cache(w), Cache(c)
    f = functools.partial(dsv4_decode, q, *caches, lengths=6, window=4, sink=sink, implementation=implementation)
    for x, y in zip(f(indices=INDICES, ratio=2), f(indices=jnp.where(past, INDICES, -1)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_nothing_to_choose_from():
    """An indexer's result over no entries, and a config's ratio of 0, make a window alone."""
    q, w, c, sink = operands()
    nothing, no_index = c[:, :0], jnp.zeros((2, 6, 0), jnp.int32)
    want = dsv4_attention(q, w, sink=sink)
    for args, kwargs in [
        ((nothing,), {"indices": no_index, "ratio": 4}), ((c,), {"indices": no_index}), ((), {"ratio": 0}),
        ((nothing,), {"indices": INDICES}), ((nothing,), {"ratio": 128}),
    ]:  # fmt: skip
        for x, y in zip(dsv4_attention(q, w, *args, sink=sink, **kwargs), want, strict=True):
            np.testing.assert_array_equal(x, y)
    decoded = dsv4_decode(q, Cache(w), lengths=6, window=4, sink=sink)
    for x, y in zip(
        dsv4_decode(q, Cache(w), Cache(c), lengths=6, window=4, sink=sink, indices=no_index), decoded, strict=True
    ):
        np.testing.assert_array_equal(x, y)
    assert Cache(w).append(nothing, jnp.zeros((2, 0), jnp.int32)).entries is w
    with pytest.raises(ValueError, match="ratio: got 0, wanted an int >= 1"):
        dsv4_attention(q, w, c, ratio=0)


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("chosen", [False, True])
def test_packed_documents(implementation, chosen):
    """In one call each document gives the result that it gives alone, wherever it begins."""
    lengths, ratio, rng = (5, 1, 7, 6), 2, np.random.default_rng(0)
    s, n = sum(lengths), sum(length // ratio for length in lengths)
    q, w, c = (jnp.asarray(rng.standard_normal(x), jnp.float32) for x in ((1, s, 2, 8), (1, s, 8), (1, n, 8)))
    ids = jnp.repeat(jnp.arange(4, dtype=jnp.int32), jnp.array(lengths), total_repeat_length=s)[None]
    indices = jnp.asarray(rng.permuted(np.tile(np.arange(n), (s, 1)), axis=1)[None, :, :6], jnp.int32)
    f = functools.partial(dsv4_attention, implementation=implementation)
    spans = {
        "window": Span.sliding_window(s, 3) & Span.segments(ids),
        "ratio": Span.compressed_segments(ids, ratio),
    }
    got = f(q, w, c, **spans, **({"indices": indices} if chosen else {}))
    at = entry = 0
    for length in lengths:
        mine, entries = slice(at, at + length), slice(entry, entry + length // ratio)
        own = indices[:, mine] - entry
        own = {"indices": jnp.where(own < length // ratio, own, -1)} if chosen and length >= ratio else {}
        want = f(q[:, mine], w[:, mine], c[:, entries], window=3, ratio=ratio, **own)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x[:, mine], y, rtol=1e-5, atol=1e-6)
        at, entry = at + length, entry + length // ratio


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("chosen", [False, True])
def test_a_chunk_over_pages(implementation, chosen):
    """The same as over entries in a row. Two sequences share a page; entries without one are absent, and no other is
    read."""
    b, s_q, s_c, d, page, ratio = 2, 9, 12, 16, 4, 2
    q, window, entries = normal(0, b, s_q, 3, d), normal(1, b, s_q + 4, d), normal(2, b, s_c, d)
    entries = entries.at[1, :page].set(entries[0, :page])
    table = jnp.array([[5, 0, 2], [5, 7, -1]], jnp.int32)
    pool = jnp.full((9, page, d), jnp.nan).at[table].set(entries.reshape(b, -1, page, d), mode="drop")
    how = {"ratio": ratio, "window": Span.sliding_window(s_q, 5, 4), "q_offset": jnp.array([20, 13])}
    indices = jnp.asarray(np.random.default_rng(3).integers(-1, s_c + 1, (b, s_q, 7)), jnp.int32)
    there = jnp.arange(s_c) < jnp.array([[s_c], [2 * page]])
    if chosen:
        how |= {"indices": indices}
        listed = jnp.where(jnp.take_along_axis(there[:, None], indices.clip(0, s_c - 1), 2), indices, -1)
    else:
        listed = jnp.broadcast_to(jnp.where(there, jnp.arange(s_c), -1)[:, None], (b, s_q, s_c))
    got = dsv4_attention(q, window, Cache(pool, table), implementation=implementation, **how)
    want = dsv4_attention(q, window, entries, **how | {"indices": listed})
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="dsv4_attention"):
        jax.grad(lambda q: dsv4_attention(q, window, Cache(pool, table), **how)[0].sum())(q)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("layout", [None, "v41_fp8", "v41_fp4"])
def test_a_chunk_over_pages_launches(layout):
    """One kernel that is handed the pool as it is; of packed pages a kernel for each source."""
    q, window = jnp.zeros((2, 6, 64, 512), jnp.bfloat16), jnp.zeros((2, 133, 512), jnp.bfloat16)
    cache = Cache.zeros(50, 64, block_table=jnp.zeros((2, 16), jnp.int32), layout=layout)
    near = Span.sliding_window(6, 128, 127)
    f = jax.jit(functools.partial(dsv4_attention, window=near, ratio=4, q_offset=900, implementation="cubin"))
    indices = jnp.zeros((2, 6, 9), jnp.int32)
    text = f.trace(q, window, cache, indices=indices).lower(lowering_platforms=("cuda",)).as_text()
    targets = ["csa_fwd"] if layout is None else ["mla_span_fwd", "dsv4_decode"]
    assert re.findall(r"custom_call @dsv4_fmha_(\w+)", text) == targets
    assert not re.search(r"stablehlo.(gather|concatenate|pad|slice)[^\n]*x(bf16|ui8)>\n", text)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["v4_fp8", "v41_fp8", "v41_fp4"])
def test_a_chunk_over_packed_pages_by_kernels(cuda, layout):
    """Entries alone in each layout, some of them absent."""
    b, s_q, s_c, page = 2, 9, 640, 64
    rng = np.random.default_rng(0)
    with jax.default_device(cuda):
        shapes = (8, (b, s_q, 64, 512)), (0.125, (b, s_q + 127, 512)), (0.125, (b * s_c // page, page, 512))
        q, window, entries = (jnp.asarray(std * rng.standard_normal(s), jnp.bfloat16) for std, s in shapes)
        table = jnp.asarray(rng.permutation(b * s_c // page).reshape(b, -1), jnp.int32).at[1, 3].set(-1)
        how = {"window": Span.sliding_window(s_q, 128, 127), "ratio": 2, "q_offset": jnp.array([1200, 900])}
        indices = rng.integers(-3, s_c + 3, (b, s_q, 300)).astype(np.int32)
        cache = Cache(quantize_cache(entries, layout), table, layout)
        got = dsv4_attention(q, window, cache, indices=jnp.asarray(indices), **how, implementation="cubin")
        indices[1][indices[1] // page == 3] = -1
        fp32 = (x.astype(jnp.float32) for x in (q, window, cache.take()))
        assert_right(got, dsv4_attention(*fp32, indices=jnp.asarray(indices), **how))


def test_no_compressed_entries_is_the_window_alone():
    q, w, _, sink = operands()
    want = dsv4_attention(q, w, sink=sink)
    for x, y in zip(dsv4_attention(q, w, jnp.zeros((2, 0, 8)), ratio=128, sink=sink), want, strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_sink_enters_once():
    """The window is everything and the compressed cache repeats it: every key counts twice, the sink once."""
    q, w, _, sink = operands(s_q=1)
    o, lse = dsv4_attention(q, w, w, sink=sink, ratio=1, q_offset=8)
    alone, lse_alone = fmha(q, w[:, :, None])
    np.testing.assert_allclose(lse, lse_alone + np.log(2), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(o, alone * jax.nn.sigmoid(lse - sink)[..., None], rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("op", [dsv4_attention, in_two_passes])
@pytest.mark.parametrize("indices", [None, jnp.array([[[0, 2, -1]] * 6] * 2, jnp.int32)], ids=["dense", "topk"])
def test_gradients_equal_the_definitions(indices, op):
    q, w, c, sink = operands()
    kwargs = {"ratio": 4} if indices is None else {"indices": indices}

    def grads(op):
        def loss(q, w, c, sink):
            o, lse = op(q, w, c, sink=sink, window=3, **kwargs)
            return (o * jnp.cos(jnp.arange(o.size).reshape(o.shape))).sum() + lse.sum()

        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(q, w, c, sink)

    for x, y in zip(grads(op), grads(reference.dsv4_attention), strict=True):
        assert jnp.isfinite(x).all()
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_vmap():
    q, w, c, sink = (jnp.stack([x, x[::-1]]) for x in operands())
    f = jax.jit(lambda q, w, c, sink: dsv4_attention(q, w, c, sink=sink, ratio=4))
    got = jax.jit(jax.vmap(f))(q, w, c, sink)
    for i in range(2):
        for x, y in zip(got, f(q[i], w[i], c[i], sink[i]), strict=True):
            np.testing.assert_allclose(x[i], y, rtol=1e-5, atol=1e-6)


# q before its norm and RoPE


TABLE = Rope(4).table(jnp.arange(6, dtype=jnp.int32)[None] + 3)


@pytest.mark.parametrize("eps", [None, 0.1])
@pytest.mark.parametrize("how", [{}, {"ratio": 4}, {"indices": INDICES}, {"ratio": 4, "implementation": "reference"}])
def test_norm_and_rope_are_those_apart(how, eps):
    q, w, c, sink = operands()
    positions, rotation = jnp.arange(6, dtype=jnp.int32)[None] + 3, Rope(4)

    def apart(q, w, c):
        q = rope(q if eps is None else rms_norm(q, None, eps), positions, rotation)
        o, lse = dsv4_attention(q, w, c if how else None, sink=sink, **how)
        return inverse_rope(o, positions, rotation), lse

    def together(q, w, c):
        return dsv4_attention(q, w, c if how else None, sink=sink, **how, rope=QueryRope(TABLE, eps))

    for x, y in zip(together(q, w, c), apart(q, w, c), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    "turn, error, message",
    [
        (TABLE, TypeError, r"rope: got float32\[1, 6, 4\], wanted a QueryRope or None"),
        (QueryRope(jnp.ones((1, 5, 4))), ValueError, r"rope.table: got .*, wanted float32\[b=2 or 1, s_q=6, n\]"),
        (QueryRope(jnp.ones((1, 6, 10))), ValueError, r"rope.table: got .* n even, from 2 to 8"),
        (
            QueryRope(jnp.ones((1, 6, 0))),
            ValueError,
            r"rope.table: got float32\[1, 6, 0\], wanted .* n even, from 2 to 8",
        ),
        (QueryRope(None), TypeError, "rope.table: got None, wanted float32"),
        (QueryRope(TABLE, 0.0), ValueError, "rope.eps: got 0.0, wanted a float > 0"),
    ],
)
def test_a_turn_that_does_not_fit(turn, error, message):
    q, w, _, _ = operands()
    with pytest.raises(error, match=f"^dsv4_attention: {message}"):
        dsv4_attention(q, w, rope=turn)


def loss_of_table(f, eps, **how):
    """A number that depends on all of o and lse, of q and a table."""
    q, w, _, sink = operands()

    def loss(q, table):
        o, lse = f(q, w, sink=sink, **how, rope=QueryRope(table, eps))
        return (o * jnp.cos(jnp.arange(o.size).reshape(o.shape))).sum() + jnp.sin(3 * lse).sum()

    return loss, (q, TABLE)


@pytest.mark.parametrize("eps", [None, 0.1])
@pytest.mark.slow
def test_the_reference_has_every_derivative_in_a_table(eps):
    """Those of finite differences, in both modes, and the second ones."""
    loss, x = loss_of_table(dsv4_attention, eps, implementation="reference")
    check_grads(loss, x, order=2, modes=["fwd", "rev"], atol=3e-2, rtol=3e-2, eps=1e-2)


@pytest.mark.parametrize("eps", [None, 0.1])
@pytest.mark.parametrize("outer", [lambda f: f, jax.jit, jax.checkpoint])
def test_elsewhere_a_derivative_in_a_table_is_an_error(outer, eps):
    """And one in q alone is none, also where the table is traced."""
    loss, (q, table) = loss_of_table(dsv4_attention, eps)
    loss = outer(loss)
    says = r"^dsv4_attention: gradient: got a derivative in rope.table, wanted jax.lax.stop_gradient\(rope.table\), or"
    with pytest.raises(NotImplementedError, match=says):
        jax.grad(loss, argnums=1)(q, table)
    with pytest.raises(NotImplementedError, match=says):
        jax.jvp(functools.partial(loss, q), (table,), (table,))
    want, _ = loss_of_table(dsv4_attention, eps, implementation="reference")
    got = jax.jit(jax.grad(lambda q, table: loss(q, jax.lax.stop_gradient(table)), (0, 1)))(q, table)
    np.testing.assert_allclose(got[0], jax.grad(want)(q, table), rtol=1e-4, atol=1e-5)
    assert not got[1].any()


def large(h, dtype, s=7, kinds=""):
    """Operands of d 512 with a turn of 64 dimensions, for a window alone, or with entries: all, or chosen ones."""
    rng = np.random.default_rng(1)
    shapes = {"q": (1, s, h, 512), "window_kv": (1, s, 512), "compressed_kv": (1, s // 2, 512)}
    x = {name: jnp.asarray(2 * rng.standard_normal(shape), dtype) for name, shape in shapes.items()}
    if not kinds:
        del x["compressed_kv"]
    how = {"sink": jnp.asarray(rng.standard_normal(h), jnp.float32), "window": min(s, 128)}
    how["rope"] = QueryRope(Rope(64).table(jnp.arange(s, dtype=jnp.int32)[None]), 1e-2)
    how |= {
        "": {},
        "all": {"ratio": 2},
        "chosen": {"indices": jnp.tile(jnp.arange(s // 2, dtype=jnp.int32), (1, s, 1))},
    }[kinds]
    return x, how


def in_passes(x, how):
    """The same attention by passes of their own."""
    plain = {name: y for name, y in how.items() if name != "rope"}
    q = normed_then_rotated(x["q"], how["rope"].table, how["rope"].eps)
    o, lse = dsv4_attention(**(x | {"q": q}), **plain)
    return rotated(o, how["rope"].table, -1), lse


OF_KINDS = {"": "mla_span_fwd", "all": "hca_fwd", "chosen": "csa_fwd"}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kinds", OF_KINDS)
@pytest.mark.parametrize("h, turns", [(64, True), (128, True), (8, False)])
def test_a_kernel_turns_where_it_is_made_for_the_heads(kinds, h, turns):
    x, how = large(h, jnp.bfloat16, kinds=kinds)
    f = jax.jit(lambda x: dsv4_attention(**x, **how))
    found = re.findall(r"custom_call @dsv4_fmha_(\w+)", f.trace(x).lower(lowering_platforms=("cuda",)).as_text())
    turns = turns or (kinds == "all")  # whose kernel is the same for any heads
    op = OF_KINDS[kinds]
    assert sorted(found) == ([f"{op}_turned"] if turns else sorted(["norm_rope", op, "rope"]))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kinds", OF_KINDS)
def test_gradients_where_a_kernel_turns(kinds):
    """They are those of passes of their own, and of the size of q only q and o are kept."""
    x, how = large(64, jnp.bfloat16, s=3, kinds=kinds)

    def pull(f):
        (o, lse), vjp = jax.vjp(f, x)
        kept = [y for y in jax.tree.leaves(vjp) if getattr(y, "shape", ()) == x["q"].shape]
        return vjp((jnp.roll(o, 1, 1), lse)), len(kept)

    got, kept = pull(lambda x: dsv4_attention(**x, **how))
    want, kept_apart = pull(lambda x: in_passes(x, how))
    assert (kept, kept_apart) == (2, 3)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (y.astype(jnp.float32) for y in (a, b))
        assert jnp.linalg.norm(a - b) <= 5e-3 * jnp.linalg.norm(b)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kinds", OF_KINDS)
@pytest.mark.parametrize("h, deterministic, turns", [(64, False, True), (128, False, False), (64, True, False)])
def test_a_gradient_is_one_kernel_where_it_is_made_for_the_heads(kinds, h, deterministic, turns):
    """It takes do in the groups of heads in which a product makes it."""
    x, how = large(h, jnp.bfloat16, s=4, kinds=kinds)
    w, d = jnp.ones((4, h // 4 * 512, 8), jnp.bfloat16), jnp.ones((1, 4, 4, 8), jnp.bfloat16)
    how |= {"rope": GroupedRope(how["rope"].table, how["rope"].eps, groups=4)}

    def gradient(x):
        def project(x):
            o, _ = dsv4_attention(**x, **how, deterministic=deterministic)
            return jnp.einsum("bsgk,gkr->bsgr", o.reshape(1, 4, 4, -1), w)

        return jax.vjp(project, x)[1](d)

    turns = turns or (kinds == "all" and not deterministic)  # whose kernel is the same for any heads
    text = jax.jit(gradient).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    found, op = re.findall(r"custom_call @dsv4_fmha_(\w+)", text), OF_KINDS[kinds].replace("fwd", "bwd")
    bounds = [op.replace("bwd", "bounds")] if deterministic else []
    passes = sorted(["norm_rope", "norm_rope_bwd", op, "rope", *bounds])
    assert [name for name in sorted(found) if "fwd" not in name] == ([f"{op}_turned"] if turns else passes)
    if turns:
        (call,) = (line for line in text.splitlines() if f"@dsv4_fmha_{op}_turned" in line)
        assert f"tensor<4x1x4x{h // 4}x512xbf16>" in call


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("kinds", OF_KINDS)
@pytest.mark.parametrize("h", [64, 128])
def test_a_kernel_turns_as_passes_do(kinds, h):
    """It rounds less: beside passes in float32 its error is no greater than that of passes in 16 bits."""
    x, how = large(h, jnp.bfloat16, s=601, kinds=kinds)
    together, apart = jax.jit(lambda x: dsv4_attention(**x, **how)), jax.jit(lambda x: in_passes(x, how))
    if not takes_turns_here():
        pytest.skip("needs a kernel that turns q")
    assert f"dsv4_fmha_{OF_KINDS[kinds]}_turned" in together.lower(x).as_text()
    exact = apart(jax.tree.map(lambda y: y.astype(jnp.float32), x))
    for got, passes, want in zip(together(x), apart(x), exact, strict=True):
        error, of_passes = (jnp.linalg.norm(y.astype(jnp.float32) - want) for y in (got, passes))
        assert error <= 1.02 * of_passes and error <= 1e-2 * jnp.linalg.norm(want)

    def pull(f):
        (o, lse), vjp = jax.vjp(f, x)
        return vjp((jnp.roll(o, 1, 1), jnp.sin(lse)))

    for a, b in zip(jax.tree.leaves(pull(together)), jax.tree.leaves(pull(apart)), strict=True):
        a, b = (y.astype(jnp.float32) for y in (a, b))
        assert jnp.linalg.norm(a - b) <= 1e-2 * jnp.linalg.norm(b)


def takes_turns_here():
    return "sm_90a" in library.local_architectures()


@pytest.mark.usefixtures("hopper")
def test_a_layer_has_no_pass_over_its_queries():
    layer = DSV4Attention(hidden=64, heads=64, q_rank=32, o_groups=2, o_rank=16)
    params, x = layer.init(jax.random.key(0), jnp.bfloat16), jnp.ones((1, 5, 64), jnp.bfloat16)
    chunk = jax.jit(lambda params, x: layer(params, x, layer.cache(1, 9), start=2).y)
    for prompt in (jax.jit(lambda params, x: layer(params, x).y), chunk):
        text = prompt.trace(params, x).lower(lowering_platforms=("cuda",)).as_text()
        found = re.findall(r"custom_call @dsv4_fmha_(\w+)", text)
        assert "mla_span_fwd_turned" in found and not {"norm_rope", "mla_span_fwd"} & set(found)
        assert found.count("rope") == 1  # of the latents
