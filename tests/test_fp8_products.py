"""dsv4_attention by products of e4m3: what is rounded, what is refused, and what a query does not see."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_dsv4_fmha import Cache, Span, dsv4_attention, dsv4_decode, quantize_cache, quantize_indexer
from jax_dsv4_fmha._definitions import e4m3, packed
from jax_dsv4_fmha._definitions.packed import LAYOUTS
from jax_dsv4_fmha.layers import Compressor, DSV4Attention, Rope
from tests import retrieval
from tests.helpers import assert_right, normal

E4M3_PRODUCTS, BF16_ROPE = e4m3.PRODUCTS
ROPE = e4m3.ROPE
LOG2_E = np.log2(np.e)


def operands(b=2, s_q=12, h=3, s_c=40, topk=20, d=64, std=1.0, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    q, w, c = (jnp.asarray(std * rng.standard_normal(x), dtype) for x in ((b, s_q, h, d), (b, s_q, d), (b, s_c, d)))
    indices = jnp.asarray(rng.integers(-2, s_c + 2, (b, s_q, topk)), jnp.int32)
    return (q, w, c), {"indices": indices, "sink": jnp.asarray(rng.standard_normal(h), jnp.float32), "window": 5}


by_e4m3 = functools.partial(dsv4_attention, precision=E4M3_PRODUCTS)


def relative(x, want):
    x, want = (np.asarray(y, np.float64) for y in (x, want))
    return np.linalg.norm(x - want) / np.linalg.norm(want)


def rounded(x, unit):
    return (x / unit).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * unit


def in_float64(q, w, c, indices, sink, window, scale, kept=0):
    """By loops over batch entries, queries and heads; scores have the last `kept` dimensions as they are given."""
    q, w, c, sink = (np.asarray(x).astype(np.float64) for x in (q, w, c, sink))
    (b, s_q, h, _), (o, lse) = q.shape, (np.zeros(q.shape), np.zeros(q.shape[:3]))
    power = lambda x: 2.0 ** (np.floor(np.log2(x)) - 7)  # noqa: E731
    for n in range(b):
        units = [power(np.abs(x[n]).max(-1, keepdims=True)) for x in (w, c)]
        near, far = (rounded(x[n], unit) for x, unit in zip((w, c), units, strict=True))
        split = q.shape[-1] - kept
        for i in range(s_q):
            seen = [x for x in np.asarray(indices)[n, i] if 0 <= x < len(far)]
            here = slice(max(i - window + 1, 0), i + 1)
            keys, given, unit = (np.concatenate([x[here], y[seen]]) for x, y in ((near, far), (w[n], c[n]), units))
            for head in range(h):
                x = rounded(q[n, i, head], power(np.abs(q[n, i, head]).max()))
                t = keys[:, :split] @ x[:split] + given[:, split:] @ q[n, i, head, split:]
                t = t * scale * LOG2_E
                lse[n, i, head] = np.log(np.exp2(t - t.max()).sum()) + t.max() / LOG2_E
                in_units = t + np.log2(unit[:, 0])
                ref = np.round(in_units.max()) - 5
                p = rounded(np.exp2(in_units - ref), 1.0)
                whole = np.logaddexp(lse[n, i, head], sink[head]) * LOG2_E
                o[n, i, head] = p @ (keys / unit) * np.exp2(ref - whole)
    return o, lse


@pytest.mark.parametrize("precision", e4m3.PRODUCTS)
@pytest.mark.parametrize("sizes", [(0, 0), (-30, -30), (9, -3)])
def test_the_definition_rounds_q_keys_and_weights(precision, sizes):
    """Of both sources apart: so weights of either are rounded in another power of two, which changes the least ones."""
    (q, *keys), how = operands(d=128)
    args = (q, *(x * jnp.exp2(jnp.float32(n)).astype(x.dtype) for x, n in zip(keys, sizes, strict=True)))
    how |= {"scale": 128**-0.5 * 2.0 ** -max(sizes)}
    o, lse = dsv4_attention(*args, **how, precision=precision)
    want_o, want_lse = in_float64(*args, **how, kept=ROPE * (precision == BF16_ROPE))
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)
    error = np.linalg.norm(np.asarray(o, np.float64) - want_o) / np.linalg.norm(want_o)
    assert error < 4e-3  # of which o's rounding to bfloat16 is 1.7e-3
    exact, _ = dsv4_attention(*args, **how)
    assert 0.02 < jnp.linalg.norm((o - exact).astype(jnp.float32)) / jnp.linalg.norm(exact.astype(jnp.float32)) < 0.08


def test_great_numbers_of_rope_are_kept():
    """Channels of RoPE that are 30 times as great make most of a score."""
    (q, w, c), how = operands(d=128)
    w, c = (x.at[..., -ROPE::16].multiply(30) for x in (w, c))
    q = (q / 5).astype(q.dtype)
    exact, exact_lse = dsv4_attention(q, w, c, **how)
    off, off_lse = zip(
        *(
            (relative(o, exact), jnp.abs(lse - exact_lse).max())
            for o, lse in (dsv4_attention(q, w, c, **how, precision=x) for x in e4m3.PRODUCTS)
        ),
        strict=True,
    )
    assert 1.5 * off[1] < off[0] and 10 * off_lse[1] < off_lse[0]


def test_numbers_of_four_bits_are_exact():
    """A query and keys of few bits, of any size, have the lse that bfloat16 gives."""
    args, how = operands()
    few = [
        (jnp.round(x.astype(jnp.float32) * 2) * 2.0**n).astype(x.dtype)
        for x, n in zip(args, (9, -20, -20), strict=True)
    ]
    (_, lse), (_, want) = (f(*few, **how) for f in (by_e4m3, dsv4_attention))
    np.testing.assert_allclose(lse, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("precision", e4m3.PRODUCTS)
@pytest.mark.parametrize("compressed", ["chosen", "dense", "none"])
def test_it_is_one_op_whatever_the_sources(compressed, precision):
    (q, w, c), how = operands(d=128)
    by_e4m3 = functools.partial(dsv4_attention, precision=precision)
    if compressed != "chosen":
        del how["indices"]
    args, how = (
        ((q, w), how) if compressed == "none" else ((q, w, c), how | {"ratio": 4} if compressed == "dense" else how)
    )
    want = by_e4m3(*args, **how, implementation="reference")
    assert_right(by_e4m3(*args, **how), want)
    mapped = jax.vmap(lambda *xs: by_e4m3(*(x[None] for x in xs[: len(args)]), **one(how, xs[len(args) :])))
    o, lse = mapped(*args, *([how["indices"]] if "indices" in how else []))
    assert_right((o[:, 0], lse[:, 0]), want)


def one(how, chosen):
    return how | ({"indices": chosen[0][None]} if chosen else {})


def paged(x, layout=None, page=4, seed=1):
    """A cache of entries [b, n, d] in pages, which are in any order, and a few of nobody's, which are great."""
    b, n, d = x.shape
    pages = -(-n // page)
    order = np.random.default_rng(seed).permutation(b * pages + 2)
    filled = jnp.pad(x, ((0, 0), (0, pages * page - n), (0, 0))).reshape(-1, page, d)
    pool = jnp.full((len(order), page, d), 1e4, x.dtype).at[order[: b * pages]].set(filled)
    table = jnp.asarray(order[: b * pages].reshape(b, pages), jnp.int32)
    return Cache(pool, table) if layout is None else Cache(quantize_cache(pool, layout), table, layout)


@pytest.mark.parametrize("compressed", ["chosen", "dense"])
@pytest.mark.parametrize("layout", [None, "v4_fp8", "v41_fp8", "v4_fp4", "v41_fp4"])
def test_a_cache_is_the_entries_that_it_holds(layout, compressed):
    """In a unit of each sequence's own, in pages as in rows: what is in other pages of the pool has no say in it."""
    (q, w, c), how = operands(s_q=6, s_c=8, topk=6, d=64 if layout is None else 512)
    if compressed == "dense":
        how = {name: x for name, x in how.items() if name != "indices"} | {"ratio": 1}
    cache = paged(c, layout)
    want = by_e4m3(q, w, cache.take()[:, :8], **how)
    for implementation in (None, "reference"):
        assert_right(by_e4m3(q, w, cache, **how, implementation=implementation), want)
    rows = Cache(c if layout is None else quantize_cache(c, layout), None, layout or "v4_fp8")
    assert_right(by_e4m3(q, w, rows, **how), want)


@pytest.mark.parametrize("layout", ["v4_fp8", "v41_fp4"])
def test_rope_is_kept_as_a_cache_has_it(layout):
    (q, w, c), how = operands(s_q=6, s_c=8, topk=6, d=512)
    cache, how = paged(c, layout), how | {"precision": BF16_ROPE}
    want = dsv4_attention(q, w, cache.take()[:, :8], **how)
    for implementation in (None, "reference"):
        assert_right(dsv4_attention(q, w, cache, **how, implementation=implementation), want)
    args, how = chunk(layout, in_pages=True)
    got = [dsv4_decode(*args, **how, precision=BF16_ROPE, implementation=x) for x in (None, "reference")]
    assert_right(*got)
    assert relative(got[0][0], chunk_by_e4m3(*args, **how)[0]) > 1e-3


NEAR = Span.sliding_window(12, 5)
HIDDEN = {  # how, and places of window keys and of entries, with which queries may still see these
    "below position 0": ({"window": NEAR.keys_from(-3)}, np.s_[:, :3], None, np.s_[:]),
    "after a length": ({"window": NEAR & Span.lengths(np.array([5, 5], np.int32))}, np.s_[:, 5:], None, np.s_[:]),
    "outside of a span": ({"window": NEAR & Span(4, 12)}, np.s_[:, :4], None, np.s_[:]),
    "before the window": ({"window": 3}, np.s_[:, :2], None, np.s_[:, 4:]),
    "a later token": ({}, np.s_[:, 7:], None, np.s_[:, :7]),
    "an entry that is not past": ({"ratio": 2}, None, np.s_[:, 5:], np.s_[:, :10]),
    "an entry that nobody names": ({"indices": True}, None, np.s_[:, 0], np.s_[:]),
    "an entry that is named too late": ({"indices": True, "ratio": 2}, None, np.s_[:, 5:], np.s_[:, :10]),
    "an entry outside of its span": ({"ratio": Span(0, 11)}, None, np.s_[:, 11:], np.s_[:]),
    "another sequence": ({"ratio": 2}, np.s_[1], np.s_[1], np.s_[0]),
}


@pytest.mark.parametrize("precision", e4m3.PRODUCTS)
@pytest.mark.parametrize("great", [3e7, 1e-30, 1e30, np.nan])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_what_a_query_does_not_see_has_no_say(hidden, great, precision):
    """Not in a bit of its o and lse, in arrays and in caches, and nor has a later token in a causal prompt."""
    (q, w, c), how = operands(d=128, s_c=16)
    changes, of_window, of_entries, unaware = HIDDEN[hidden]
    how = {"sink": how["sink"], "window": 5, "precision": precision} | changes
    if how.get("indices"):
        rng = np.random.default_rng(1)
        chosen = rng.integers(1, 16, (2, 12, 10))
        chosen[..., 9] = 3
        how["indices"] = jnp.asarray(chosen, jnp.int32)
    has_entries = bool({"ratio", "indices"} & how.keys())
    spoilt_w = w if of_window is None else w.at[of_window].set(great)
    spoilt_c = c if of_entries is None else c.at[of_entries].set(great)
    caches = (lambda x: x, Cache, lambda x: Cache(x.reshape(8, 4, 128), jnp.arange(8, dtype=jnp.int32).reshape(2, 4)))
    for kept in caches if has_entries else caches[:1]:
        for implementation in (None, "reference"):
            run = functools.partial(dsv4_attention, **how, implementation=implementation)
            got, want = (run(q, x, kept(y) if has_entries else None) for x, y in ((spoilt_w, spoilt_c), (w, c)))
            for x, y in zip(got, want, strict=True):
                np.testing.assert_array_equal(x[unaware], y[unaware])


@pytest.mark.parametrize("precision", e4m3.PRODUCTS)
@pytest.mark.parametrize("chosen", [False, True])
def test_a_chunk_is_causal(chosen, precision):
    """What later tokens left in caches changes no bit of what a query gets, and nor does another sequence."""
    (q, *caches), how = chunk(chosen=chosen, b=2)
    how["precision"] = precision
    (q, *_), d = (jnp.concatenate([q, q], -1), *caches), 128
    near, far = (Cache(jnp.concatenate([x.entries, x.entries], -1)) for x in caches)
    at = 40  # of the first sequence, at position 90 - 64 + 40
    later = near.entries.at[0, (90 - 64 + at + np.arange(24)) % near.capacity].set(3e7)
    entries = far.entries.at[0, (90 - 64 + at) // 3 :].set(3e7).at[1].set(-3e7)
    assert q.shape[-1] == d
    for implementation in (None, "reference"):
        run = functools.partial(dsv4_decode, **how, implementation=implementation)
        for x, y in zip(run(q, Cache(later), Cache(entries)), run(q, near, far), strict=True):
            np.testing.assert_array_equal(x[0, :at], y[0, :at])


@pytest.mark.parametrize("precision", e4m3.PRODUCTS)
def test_keys_of_any_size_are_seen_beside_others(precision):
    """A query that sees a key of 10**7 with a weight of 10**-7 gets its part of o, and its parts of others."""
    (q, w, c), how = operands(d=128)
    q = jnp.broadcast_to(q[:1, :1, :1], q.shape)
    away = (-(2.0**23) * q[0, 0, 0]).astype(w.dtype)
    how |= {"scale": float(15 / jnp.abs(q[0, 0, 0].astype(jnp.float32) @ away.astype(jnp.float32)))}
    run = functools.partial(dsv4_attention, q, w.at[:, 3].set(away), c, **how)
    got, exact = (run(precision=x)[0].astype(jnp.float32) for x in (precision, None))
    size = lambda x: jnp.linalg.norm(x, axis=-1)  # noqa: E731
    assert (size(got - exact) < 0.15 * size(exact)).all()
    without = dsv4_attention(q, w.at[:, 3].set(0), c, **how)[0].astype(jnp.float32)
    assert (size(without - exact)[:, 3:8] > 0.3 * size(exact)[:, 3:8]).all()


def test_what_there_are_no_such_products_for():
    (q, w, c), how = operands()
    wanted = [
        ({"precision": "float8_e5m2"}, ValueError, "precision: got 'float8_e5m2', wanted None or 'float8_e4m3fn' or"),
        ({"precision": BF16_ROPE}, ValueError, "wanted d > 64, of which the last 64 are RoPE's, with precision="),
        ({"batch_invariant": True}, ValueError, "precision: got float8_e4m3fn, wanted None with batch_invariant=True"),
    ]
    for changed, error, message in wanted:
        with pytest.raises(error, match=message):
            by_e4m3(q, w, c, **{**how, **changed})
    with pytest.raises(ValueError, match=r"q: got float16.*wanted bfloat16 with precision="):
        by_e4m3(*(x.astype(jnp.float16) for x in (q, w, c)), **how)
    caches, how = (Cache(w, None), Cache(c, None)), {"lengths": 12, "indices": how["indices"], "window": 1}
    with pytest.raises(ValueError, match=r"got float8_e4m3fn with s_q=12, wanted None with fewer than 64 queries"):
        chunk_by_e4m3(q, *caches, **how)
    with pytest.raises(ValueError, match="precision: got 'float8_e5m2', wanted None or"):
        dsv4_decode(q, *caches, **how, precision="float8_e5m2")
    with pytest.raises(ValueError, match="precision: got float8_e4m3fn, wanted None with batch_invariant=True"):
        chunk_by_e4m3(q, *caches, **how, batch_invariant=True)


def test_there_is_no_gradient():
    args, how = operands()
    says = "gradient: got a call to differentiate, wanted stop_gradient around it, or precision=None, or implementat"
    with pytest.raises(NotImplementedError, match=says):
        jax.grad(lambda q: by_e4m3(q, *args[1:], **how)[0].astype(jnp.float32).sum())(args[0])
    args, how = chunk()
    with pytest.raises(NotImplementedError, match=says):
        jax.grad(lambda q: chunk_by_e4m3(q, *args[1:], **how)[0].astype(jnp.float32).sum())(args[0])


def weighted(o, lse):
    return (o.astype(jnp.float32) * jnp.cos(jnp.arange(o.size).reshape(o.shape))).sum() + jnp.sin(lse).sum()


@pytest.mark.parametrize("precision", e4m3.PRODUCTS)
def test_the_reference_has_a_gradient_as_if_nothing_were_rounded(precision):
    """That of bfloat16 products within what is rounded; it grows with the loss, however small or great that is."""
    (q, w, c), how = operands(d=128)
    args = q, w, c, how.pop("sink")

    def loss(size, chosen):
        def f(q, w, c, sink):
            o = dsv4_attention(q, w, c, sink=sink, **how, precision=chosen, implementation="reference")
            return size * weighted(*o)

        return f

    got = jax.grad(loss(1.0, precision), range(4))(*args)
    for x, want in zip(got, jax.grad(loss(1.0, None), range(4))(*args), strict=True):
        assert 0.002 < relative(x, want) < 0.15
    for size in (2.0**-40, 2.0**40):
        for x, y in zip(jax.grad(loss(size, precision), range(4))(*args), got, strict=True):
            np.testing.assert_array_equal(x, y * size)
    pushed = jax.jvp(loss(1.0, precision), args, tuple(map(jnp.ones_like, args)))[1]
    np.testing.assert_allclose(pushed, sum(x.astype(jnp.float32).sum() for x in got), rtol=1e-2)


@pytest.mark.parametrize("round", [*LAYOUTS, "weights", "rounded"])
def test_no_rounding_rounds_cotangents(round):
    """The derivative of every rounding of ours is that of what it rounds, in both modes."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 128)), jnp.float32)
    lse = jnp.ones(3)
    rounds, exact = {
        "weights": (lambda x: e4m3.weights(x, lse, jnp.float32(3), lse + 2), lambda x: jnp.exp(x - lse[:, None])),
        "rounded": (lambda x: e4m3.rounded(x, e4m3.unit_of(x)), lambda x: x),
    }.get(round, (lambda x: packed.rounded(x, round), lambda x: x))
    assert (rounds(x) != exact(x)).mean() > 0.5
    for size in (1e-20, 1.0, 1e20):
        dy = size * jnp.cos(jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape))
        for of in (lambda f: jax.vjp(f, x)[1](dy)[0], lambda f: jax.jvp(f, (x,), (dy,))[1]):  # noqa: B023
            np.testing.assert_allclose(of(rounds), of(exact), rtol=2e-5)


def test_codes_of_a_choice_have_no_gradient():
    q, k, weights = (normal(i, *x) for i, x in enumerate([(1, 4, 2, 128), (1, 3, 128), (1, 4, 2)]))

    def loss(q, k, weights):
        return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(quantize_indexer(q, k, weights)))

    of_q, of_k, of_weights = jax.grad(loss, (0, 1, 2))(q, k, weights)
    assert not of_q.any() and not of_k.any() and of_weights.all()


chunk_by_e4m3 = functools.partial(dsv4_decode, precision=E4M3_PRODUCTS)


def chunk(layout=None, in_pages=False, s_q=64, h=2, window=5, s_c=30, topk=9, chosen=True, ring=False, b=3):
    """A chunk of prompts, of which one is shorter than it and one is idle, over caches that are full of nonsense.

    Nonsense is NaN, and great numbers in packed caches, but for what queries may see.
    """
    rng, d = np.random.default_rng(0), 64 if layout is None else 512
    layout = None if layout == "bfloat16" else layout
    lengths = jnp.asarray((90, 50, 0)[:b], jnp.int32)
    room = s_q + window + 7 * in_pages
    q, w, c = (jnp.asarray(rng.standard_normal(x), jnp.bfloat16) for x in ((b, s_q, h, d), (b, room, d), (b, s_c, d)))
    seen = np.zeros((b, room), bool)
    for n, length in enumerate(np.asarray(lengths)):
        seen[n, np.arange(max(0, length - room + 7 * in_pages), length) % room] = True
    past = np.asarray(lengths)[:, None] // 3 if not ring else 2**30
    nonsense = jnp.nan if layout is None else 3e4
    w = jnp.where(seen[..., None], w, nonsense)
    c = jnp.where((np.arange(s_c)[None] < past)[..., None], c, nonsense)
    near = None if layout is None else layout.replace("fp4", "fp8")
    if in_pages:
        caches = paged(w, near, page=room // 2 + 1), paged(c, layout)
        caches = tuple(_without_pages(x, n) for x, n in zip(caches, (lengths, lengths // 3), strict=True))
    else:
        caches = tuple(
            Cache(x) if form is None else Cache(quantize_cache(x, form), None, form)
            for x, form in ((w, near), (c, layout))
        )
    how = {"lengths": lengths, "sink": jnp.asarray(rng.standard_normal(h), jnp.float32), "window": window, "ratio": 3}
    if chosen:
        how["indices"] = jnp.asarray(rng.integers(-2, s_c + 2, (b, s_q, topk)), jnp.int32)
    return (q, *caches), how


def _without_pages(cache, lengths):
    """A cache whose table names no page where a sequence has no entries, and lacks one of those of the first."""
    begins = np.arange(cache.block_table.shape[1]) * cache.page
    table = jnp.where(begins[None] < np.asarray(lengths)[:, None], cache.block_table, -1)
    return Cache(cache.entries, table.at[0, 1].set(10**6), cache.layout)


CHUNKS = {
    "rows": {},
    "rows, dense": {"chosen": False},
    "rows, dense, that have run over": {"chosen": False, "s_c": 13, "ring": True, "b": 2},
    "pages": {"in_pages": True},
    "pages, dense": {"in_pages": True, "chosen": False},
}


@pytest.mark.parametrize("layout", [None, "v4_fp8", "v41_fp8", "v4_fp4", "v41_fp4"])
@pytest.mark.parametrize("case", CHUNKS)
def test_a_chunk_equals_its_definition(case, layout):
    args, how = chunk(layout, **CHUNKS[case])
    want = chunk_by_e4m3(*args, **how, implementation="reference")
    assert jnp.isfinite(want[0].astype(jnp.float32)).all()
    assert_right(chunk_by_e4m3(*args, **how), want)


@pytest.mark.parametrize("how_long", [{"q_offset": jnp.array([30, -9, 0])}, {"is_causal": False}])
@pytest.mark.parametrize("in_pages", [False, True])
def test_a_chunk_in_other_places(in_pages, how_long):
    args, how = chunk(in_pages=in_pages)
    got = [chunk_by_e4m3(*args, **how, **how_long, implementation=x) for x in (None, "reference")]
    assert_right(*got)


def test_the_definition_of_a_chunk_is_that_of_its_keys():
    """The same by `dsv4_attention`, of arrays that hold what each sequence may see and nothing else."""
    args, how = chunk(b=1)
    q, near, far = args
    first, window = 90 - 64, how["window"]
    kv = near.take(first - window + 1 + jnp.arange(64 + window - 1)[None])
    entries = jnp.where(jnp.arange(30)[None, :, None] < 30, far.take(), 0)
    at = {"window": Span.sliding_window(64, window, window - 1), "q_offset": first}
    want = by_e4m3(q, kv, entries, **{name: x for name, x in how.items() if name != "lengths"} | at)
    assert_right(chunk_by_e4m3(*args, **how, implementation="reference"), want)


def test_other_sequences_have_no_say():
    """Not even by their size, in one pool: bits stay as they are."""
    args, how = chunk("v4_fp8", in_pages=True)
    q, near, far = args
    want = chunk_by_e4m3(*args, **how)
    great = quantize_cache(jnp.full((1, far.page, 512), 2.0**30, jnp.bfloat16))[0]
    pages = far.entries.at[far.block_table[1, 0]].set(great)
    o, lse = chunk_by_e4m3(q, near, Cache(pages, far.block_table), **how)
    assert (o[0] == want[0][0]).all() and (lse[0] == want[1][0]).all()
    assert not (o[1] == want[0][1]).all()


def test_a_chunk_is_mapped_and_sharded_as_without():
    args, how = chunk(in_pages=True)
    q, near, far = args
    want = chunk_by_e4m3(*args, **how)
    arrays = {name: how[name] for name in ("lengths", "indices")}
    others = {name: how[name] for name in ("sink", "window", "ratio")}

    def one(q, table, table2, arrays):
        caches = Cache(near.entries, table[None]), Cache(far.entries, table2[None])
        o, lse = chunk_by_e4m3(q[None], *caches, **others, **{name: x[None] for name, x in arrays.items()})
        return o[0], lse[0]

    assert_right(jax.vmap(one)(q, near.block_table, far.block_table, arrays), want)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    sharded = {"q": jax.device_put(q, over), "indices": jax.device_put(how["indices"], over)}
    run = jax.jit(lambda q, indices: chunk_by_e4m3(q, near, far, **how | {"indices": indices}))
    assert_right(run(**sharded), want)


@pytest.mark.parametrize("in_pages", [False, True])
def test_a_chunk_on_explicit_axes(in_pages):
    args, how = chunk(b=2, in_pages=in_pages)
    want = [np.asarray(x) for x in chunk_by_e4m3(*args, **how)]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        of_all, over = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*x)) for x in ((), ("x",)))
        q, *caches = args
        placed = [
            Cache(jax.device_put(x.entries, over))
            if x.block_table is None
            else Cache(jax.device_put(x.entries, of_all), jax.device_put(x.block_table, over))
            for x in caches
        ]
        how |= {name: jax.device_put(how[name], over) for name in ("lengths", "indices")}
        got = chunk_by_e4m3(jax.device_put(q, over), *placed, **how)
        assert_right([np.asarray(x) for x in got], want)


def test_a_chunk_of_unknown_size_is_exported():
    args, how = chunk()
    b, s_q = jax.export.symbolic_shape("b, s_q")
    q, near, far = args
    like = lambda x, *shape: jax.ShapeDtypeStruct(shape, x.dtype)  # noqa: E731
    f = lambda q, near, far, lengths, indices: chunk_by_e4m3(  # noqa: E731
        q, Cache(near), Cache(far), **how | {"lengths": lengths, "indices": indices}
    )
    shapes = (
        *(like(q, b, s_q, *q.shape[2:]), like(q, b, *near.entries.shape[1:]), like(q, b, *far.entries.shape[1:])),
        *(like(how["lengths"], b), like(how["indices"], b, s_q, 9)),
    )
    exported = jax.export.export(jax.jit(f))(*shapes)
    got = exported.call(q, near.entries, far.entries, how["lengths"], how["indices"])
    assert_right(got, chunk_by_e4m3(*args, **how))


def test_units_are_powers_of_two_and_numbers():
    x = jnp.array([0.0, 1e-45, 2.0**-126, 1.0, 1.99, 2.0, 3.0e38, -5.0, jnp.inf, jnp.nan], jnp.float32)
    units = e4m3.unit_of(x[:, None])[:, 0]
    mantissas, _ = jnp.frexp(units)
    of_keys = e4m3.unit_of_key(x[:, None])[:, 0]
    np.testing.assert_array_equal(of_keys, jnp.clip(units, 2.0**-64, 2.0**48))
    codes = e4m3.codes(x, of_keys).astype(jnp.float32)
    assert jnp.isnan(codes[jnp.array([6, 8, 9])]).all() and not codes[:3].any()
    assert (mantissas == 0.5).all() and jnp.isfinite(1 / units).all()
    np.testing.assert_array_equal(units[3:6], [2.0**-7, 2.0**-7, 2.0**-6])
    assert (jnp.abs(x[3:8] / units[3:8]) < 256).all() and (jnp.abs(x[3:8] / units[3:8]) >= 128).all()


def layer_of(rope=8, **choices):
    compressor = Compressor(64, 512, 4, overlap=False)
    sizes = {"hidden": 64, "heads": 4, "d": 512, "q_rank": 32, "o_groups": 2, "o_rank": 16, "window": 8}
    return DSV4Attention(**sizes, rope=Rope(rope), ratio=4, compressor=compressor, **choices)


@pytest.mark.parametrize(
    ("cache", "precision"),
    [("bfloat16", E4M3_PRODUCTS), ("float8_e4m3fn", E4M3_PRODUCTS), ("float8_e4m3fn", BF16_ROPE)],
)
def test_a_layer_passes_products_to_prompts_and_chunks(cache, precision):
    """Chunks are those of a whole prompt, but for what the cache rounds; a step is as without."""
    layer, usual = layer_of(ROPE, precision=precision), layer_of(ROPE)
    params = usual.init(jax.random.key(0), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (2, 32, 64)).astype(jnp.bfloat16)
    length = lambda y: jnp.linalg.norm(y.astype(jnp.float32))  # noqa: E731

    def chunked(layer, implementation=None):
        empty = layer.cache(2, 40, jnp.dtype(cache))
        first = layer(params, x[:, :16], empty, implementation=implementation)
        second = layer(params, x[:, 16:], first.cache, start=16, implementation=implementation)
        return jnp.concatenate([first.y, second.y], 1), second.cache

    y, kept = chunked(layer)
    want, kept_as_usual = chunked(usual)
    assert 0.005 < length(y - want) / length(want) < 0.1
    assert length(y - chunked(layer, "reference")[0]) < 1e-2 * length(y)
    whole = layer(params, x).y
    assert length(y - whole) < (0.01 if cache == "bfloat16" else 0.1) * length(whole)
    jax.tree.map(np.testing.assert_array_equal, kept, kept_as_usual)
    new, at = x[:, :1], {"lengths": 33}
    np.testing.assert_array_equal(layer.step(params, new, kept, **at).y, usual.step(params, new, kept, **at).y)


def test_a_layer_with_products():
    with pytest.raises(ValueError, match="precision: got 'float8', wanted None or 'float8_e4m3fn'"):
        layer_of(precision="float8")
    with pytest.raises(ValueError, match="rope: got 8 dims, wanted 64 with precision='float8_e4m3fn_bf16_rope'"):
        layer_of(precision=BF16_ROPE)
    layer = layer_of(precision=E4M3_PRODUCTS)
    params, x = layer.init(jax.random.key(0), jnp.bfloat16), jnp.ones((1, 8, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="precision: got float8_e4m3fn, wanted None with batch_invariant=True"):
        layer(params, x, batch_invariant=True)
    with pytest.raises(NotImplementedError, match="gradient: got a call to differentiate"):
        jax.grad(lambda x: layer(params, x).y.astype(jnp.float32).sum())(x)


@pytest.mark.slow
def test_a_needle_is_found(capsys):
    """By a model that learned to in bfloat16, in a smaller size than docs/lab/fp8-prompts.md has."""
    _, (found,) = retrieval.main(n=96, steps=120, b=2, queries=32, tests=1)
    assert capsys.readouterr().out.count("entries: loss") > 9
    assert found["bfloat16"]["right"] > 0.8
    for numbers in found.values():
        assert numbers["as bfloat16"] > 0.9 and numbers["o off"] < 0.06
