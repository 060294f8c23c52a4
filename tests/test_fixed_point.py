"""Sums in fixed point: their units and values, that none overflows, and what they leave out."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha._host.fixed_point import of_rows, resolution, to_float32


def bounds_of(integers):
    return jnp.asarray(np.asarray(integers, np.uint64)[:, None].view(np.uint32))


def operands(most, b=1, s_q=40, h=4, d=512):
    """q, do, lse, sink_factor, delta and keys, of which one number is the greatest."""
    rng = np.random.default_rng(0)
    shapes = {"q": (b, s_q, h, d), "do": (b, s_q, h, d), "delta": (b, s_q, h), "k": (b, 9, d)}
    x = {name: most[name] * rng.uniform(0, 1, shape).astype(np.float32) for name, shape in shapes.items()}
    for name, array in x.items():
        array.flat[rng.integers(array.size)] = -most[name]
    keys = [jnp.asarray(0.1 * x["k"][:, :5]), jnp.asarray(x["k"])]
    factor = rng.uniform(0, 1, (b, s_q, h)).astype(np.float32)
    return *(jnp.asarray(y) for y in (x["q"], x["do"], np.zeros((b, s_q, h)), factor, x["delta"])), keys


@pytest.mark.parametrize("size", [1e-12, 1, 1e4])
@pytest.mark.parametrize("greatest", ["keys", "delta", "do"])
def test_no_bound_leaves_61_bits(greatest, size):
    """All rows add as much as they can."""
    most = {"q": 3.0, "do": size, "delta": 1e4 * size * (greatest == "delta"), "k": 2.0 * (greatest == "keys")}
    q, do, lse, factor, delta, keys = operands(most)
    _, (units,) = of_rows(q, do, lse, factor, delta, keys, 0.1)
    ds = 0.1 * (512 * most["do"] * most["k"] + most["delta"])
    bound = lse.size * (ds * most["q"] + most["do"]) * float(units)
    assert 2.0**60 * (1 - 1e-6) < bound < 2.0**61 * (1 + 1e-6)
    assert np.frexp(float(units))[0] == 0.5


def test_a_row_s_part_is_never_below_what_it_adds():
    """Whatever order dO K' - delta is rounded in: |dS| max|q| + f P max|do|, of P and dO K' as they are."""
    q, do, lse, factor, delta, keys = operands({"q": 3.0, "do": 2.0, "delta": 40.0, "k": 1.0})
    rows, _ = of_rows(q, do, lse, factor, delta, keys, 0.1)
    dp = np.einsum("bshd,bkd->bshk", do, keys[1]).astype(np.float64)
    x = [np.asarray(y, np.float64)[..., None] for y in (factor, delta, *rows)]
    got = np.abs(0.1 * (x[2] * dp - x[3])) + x[4]
    want = 0.1 * np.abs(x[0] * dp - x[1]) * np.abs(q).max(-1, keepdims=True) + x[0] * np.abs(do).max(-1, keepdims=True)
    assert (got >= want * (1 - 1e-6)).all() and (got <= want * (1 + 1e-4)).all()


def test_the_unit_of_a_key():
    """The power of two by which its bound is at most 2^30, and NaN where the highest bit of the bound is set."""
    given = [1, 2**20 - 1, 2**20, 2**33 + 1, 2**61, 3 * 2**40]
    units = np.asarray(resolution(bounds_of(given), jnp.array([2.0**20], jnp.float32)), np.float64)
    bound = np.array(given, np.float64) / 2.0**20 * units
    assert (np.frexp(units)[0] == 0.5).all() and (bound <= 2.0**30).all() and (bound >= 2.0**29 * (1 - 1e-6)).all()
    assert np.isnan(resolution(bounds_of([2**63 + 5]), jnp.ones(1))).all()


def test_a_key_that_nobody_sees_has_a_unit():
    (units,) = resolution(bounds_of([0]), jnp.array([2.0**40], jnp.float32))
    assert 1 < units < jnp.inf
    np.testing.assert_array_equal(to_float32(jnp.zeros((1, 3), jnp.uint32), units[None]), np.zeros((1, 3)))


def test_what_sums_stand_for():
    sums = np.array([[0, 1, -1, 7, -8], [2**31 - 1, -(2**31), 5, 0, -3]], np.int32)
    units = jnp.array([2.0**20, 2.0**-3], jnp.float32)
    got = to_float32(jnp.asarray(sums.view(np.uint32)), units)
    np.testing.assert_allclose(got, sums / np.asarray(units, np.float64)[:, None], rtol=1e-7)
    assert np.isnan(to_float32(jnp.zeros((1, 2), jnp.uint32), jnp.array([jnp.nan]))).all()


def test_nothing_at_all_has_a_unit():
    x = [jnp.zeros(shape) for shape in ((1, 3, 2, 8), (1, 3, 2, 8), (1, 3, 2), (1, 3, 2), (1, 3, 2), (1, 5, 8))]
    _, (units,) = of_rows(*x[:5], x[5:], 0.5)
    assert 1 < units < jnp.inf


def test_what_is_not_finite_makes_no_unit():
    """Rows without a key, keys and rows that are not finite."""
    shapes = ((1, 3, 2, 512), (1, 3, 2, 512), (1, 3, 2), (1, 3, 2), (1, 3, 2), (1, 5, 512))
    x = [np.ones(shape, np.float32) for shape in shapes]
    _, want = of_rows(*x[:5], x[5:], 0.5)
    q, do, lse, factor, delta, k = (y.copy() for y in x)
    lse[0, 1, 0] = -np.inf
    q[0, 1, 0], do[0, 1, 0], delta[0, 1, 0], k[0, 2], k[0, 3, 1] = np.nan, np.inf, np.nan, np.nan, -np.inf
    q[0, 0, 0, 3], do[0, 2, 1, 4] = np.inf, np.nan
    rows, got = of_rows(q, do, lse, factor, delta, [k], 0.5)
    np.testing.assert_array_equal(got, want)
    assert not np.isfinite(rows.sink_factor[0, 0, 0]) and not np.isfinite(rows.most_of_p[0, 2, 1])
