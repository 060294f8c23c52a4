"""dsv4_attention by products of e4m3: what is rounded, what is refused, and the kernel beside the definition."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_dsv4_fmha import Cache, dsv4_attention, quantize_cache, reference
from jax_dsv4_fmha._definitions import e4m3
from jax_dsv4_fmha._testing.compare import E4M3
from tests.helpers import assert_right

E4M3_PRODUCTS = "float8_e4m3fn"
LOG2_E = np.log2(np.e)


def operands(b=2, s_q=12, h=3, s_c=40, topk=20, d=64, std=1.0, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    q, w, c = (jnp.asarray(std * rng.standard_normal(x), dtype) for x in ((b, s_q, h, d), (b, s_q, d), (b, s_c, d)))
    indices = jnp.asarray(rng.integers(-2, s_c + 2, (b, s_q, topk)), jnp.int32)
    return (q, w, c), {"indices": indices, "sink": jnp.asarray(rng.standard_normal(h), jnp.float32), "window": 5}


by_e4m3 = functools.partial(dsv4_attention, products=E4M3_PRODUCTS)


def rounded(x, unit):
    return (x / unit).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * unit


def in_float64(q, w, c, indices, sink, window):
    """By loops over batch entries, queries and heads."""
    q, w, c, sink = (np.asarray(x).astype(np.float64) for x in (q, w, c, sink))
    (b, s_q, h, d), (o, lse) = q.shape, (np.zeros(q.shape), np.zeros(q.shape[:3]))
    power = lambda x: 2.0 ** (np.floor(np.log2(x)) - 7)  # noqa: E731
    for n in range(b):
        unit = power(max(np.abs(w[n]).max(), np.abs(c[n]).max()))
        near, far = rounded(w[n], unit), rounded(c[n], unit)
        for i in range(s_q):
            seen = [x for x in np.asarray(indices)[n, i] if 0 <= x < len(far)]
            keys = np.concatenate([near[max(i - window + 1, 0) : i + 1], far[seen]])
            for head in range(h):
                x = rounded(q[n, i, head], power(np.abs(q[n, i, head]).max()))
                t = keys @ x * d**-0.5 * LOG2_E
                ref = np.round(t.max()) - 5
                lse[n, i, head] = np.log(np.exp2(t - t.max()).sum()) + t.max() / LOG2_E
                p = rounded(np.exp2(t - ref), 1.0)
                o[n, i, head] = p @ keys * np.exp2(ref) / (np.exp(lse[n, i, head]) + np.exp(sink[head]))
    return o, lse


def test_the_definition_rounds_q_keys_and_weights():
    """Of both sources apart: so weights of either are rounded in another power of two, which changes the least ones."""
    args, how = operands()
    o, lse = by_e4m3(*args, **how)
    want_o, want_lse = in_float64(*args, **how)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)
    error = np.linalg.norm(np.asarray(o, np.float64) - want_o) / np.linalg.norm(want_o)
    assert error < 4e-3  # of which o's rounding to bfloat16 is 1.7e-3
    exact, _ = dsv4_attention(*args, **how)
    assert 0.02 < jnp.linalg.norm((o - exact).astype(jnp.float32)) / jnp.linalg.norm(exact.astype(jnp.float32)) < 0.08


def test_numbers_of_four_bits_are_exact():
    """A query and keys of few bits, of any size, have the lse that bfloat16 gives."""
    args, how = operands()
    few = [
        (jnp.round(x.astype(jnp.float32) * 2) * 2.0**n).astype(x.dtype)
        for x, n in zip(args, (9, -20, -20), strict=True)
    ]
    (_, lse), (_, want) = (f(*few, **how) for f in (by_e4m3, dsv4_attention))
    np.testing.assert_allclose(lse, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("compressed", ["chosen", "dense", "none"])
def test_it_is_one_op_whatever_the_sources(compressed):
    (q, w, c), how = operands()
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


def test_a_cache_may_be_a_pool():
    """Its unit is that of all batch entries."""
    (q, w, c), how = operands(s_c=8, topk=6)
    cache = Cache(c, None)
    assert_right(by_e4m3(q, w, cache, **how), by_e4m3(q, w, c, **how), E4M3)


def test_keys_that_nobody_sees_may_be_anything():
    (q, w, c), how = operands()
    how["indices"] = jnp.maximum(how["indices"], 1)
    want = by_e4m3(q, w, c, **how)
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        assert_right(by_e4m3(q, w, c.at[:, 0].set(bad), **how), want)


def test_what_there_are_no_such_products_for():
    (q, w, c), how = operands()
    wanted = [
        ({"products": "float8_e5m2"}, ValueError, "products: got 'float8_e5m2', wanted None or 'float8_e4m3fn'"),
        ({"method": "two_pass"}, ValueError, "method: got two_pass, wanted 'fused' or None with products="),
        ({"batch_invariant": True}, ValueError, "products: got float8_e4m3fn, wanted None with batch_invariant=True"),
    ]
    for changed, error, message in wanted:
        with pytest.raises(error, match=message):
            by_e4m3(q, w, c, **{**how, **changed})
    with pytest.raises(ValueError, match=r"q: got float16.*wanted bfloat16 with products="):
        by_e4m3(*(x.astype(jnp.float16) for x in (q, w, c)), **how)
    full = jnp.ones((2, 12, 3, 512), jnp.bfloat16), jnp.ones((2, 12, 512), jnp.bfloat16)
    packed = Cache(quantize_cache(jnp.ones((2, 64, 512), jnp.bfloat16)), None)
    with pytest.raises(ValueError, match="products: got float8_e4m3fn, wanted None with a packed Cache"):
        by_e4m3(*full, packed, indices=jnp.zeros((2, 12, 4), jnp.int32))


def test_there_is_no_gradient():
    args, how = operands()
    with pytest.raises(NotImplementedError, match="gradient: got a call to differentiate"):
        jax.grad(lambda q: by_e4m3(q, *args[1:], **how)[0].astype(jnp.float32).sum())(args[0])


def test_units_are_powers_of_two_and_numbers():
    x = jnp.array([0.0, 1e-45, 2.0**-126, 1.0, 1.99, 2.0, 3.0e38, -5.0, jnp.inf, jnp.nan], jnp.float32)
    units = jax.vmap(lambda y: e4m3.unit_of(y[None], axes=0)[0])(x)
    mantissas, _ = jnp.frexp(units)
    assert (mantissas == 0.5).all() and jnp.isfinite(1 / units).all()
    np.testing.assert_array_equal(units[3:6], [2.0**-7, 2.0**-7, 2.0**-6])
    assert (jnp.abs(x[3:8] / units[3:8]) < 256).all() and (jnp.abs(x[3:8] / units[3:8]) >= 128).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("h", [5, 64, 80, 128])
@pytest.mark.parametrize("compressed", ["chosen", "dense", "none"])
def test_the_kernel_equals_the_definition(compressed, h):
    (q, w, c), how = operands(s_q=70, h=h, s_c=300, topk=130, d=512)
    if compressed != "chosen":
        del how["indices"]
    args, how = (
        ((q, w), how) if compressed == "none" else ((q, w, c), how | {"ratio": 4} if compressed == "dense" else how)
    )
    got = jax.jit(lambda *x: by_e4m3(*x, **how, implementation="cubin"))(*args)
    want = jax.jit(lambda *x: reference.dsv4_attention(*x, **how, products=E4M3_PRODUCTS))(*args)
    assert_right(got, want, E4M3)
