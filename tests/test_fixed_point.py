"""Sums in fixed point: their values, that none overflows, and what they leave out."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha._host.fixed_point import resolution, to_float32


def test_what_sums_stand_for():
    sums = np.array([0, 1, -1, 7, -8, 2**31, -(2**31) - 5, 2**32, -(2**40) + 3, 2**61 - 1, -(2**61)], np.int64)
    unit = np.array([2.0**20], np.float32)
    got = to_float32(jnp.asarray(sums.view(np.uint32).reshape(-1, 2)), unit, jnp.ones(3))
    np.testing.assert_allclose(got, sums / 2.0**20, rtol=2e-7, atol=2.0**-20)
    assert got[0] == 0
    assert np.isnan(to_float32(jnp.zeros((2, 2), jnp.uint32), unit, jnp.array([1, jnp.inf]))).all()


@pytest.mark.parametrize("size", [1e-12, 1, 1e4])
@pytest.mark.parametrize("greatest", ["keys", "delta", "do"])
def test_no_sum_leaves_them(greatest, size):
    """All rows add in the same direction, as much as they can: one number of an array is its greatest."""
    b, s_q, h, d, scale = 1, 40, 4, 512, 0.1
    rng = np.random.default_rng(0)
    most = {"q": 3.0, "do": size, "delta": 1e4 * size * (greatest == "delta"), "k": 2.0 * (greatest == "keys")}
    shapes = {"q": (b, s_q, h, d), "do": (b, s_q, h, d), "delta": (b, s_q, h), "k": (b, 9, d)}
    x = {name: most[name] * rng.uniform(0, 1, shape).astype(np.float32) for name, shape in shapes.items()}
    for name, array in x.items():
        array.flat[rng.integers(array.size)] = -most[name]
    keys = [jnp.asarray(0.1 * x["k"][:, :5]), jnp.asarray(x["k"])]
    (unit,) = resolution(
        *(jnp.asarray(x[name]) for name in ("q", "do")), jnp.zeros((b, s_q, h)), x["delta"], keys, scale
    )
    ds = scale * (d * most["do"] * most["k"] + most["delta"])
    bound = b * s_q * h * (ds * most["q"] + most["do"]) * float(unit)
    assert 2.0**60 * (1 - 1e-6) < bound < 2.0**61 * (1 + 1e-6)
    assert np.frexp(float(unit))[0] == 0.5


def test_nothing_at_all_has_a_unit():
    x = [jnp.zeros(shape) for shape in ((1, 3, 2, 8), (1, 3, 2, 8), (1, 3, 2), (1, 3, 2), (1, 5, 8))]
    (unit,) = resolution(*x[:4], x[4:], 0.5)
    assert 1 < unit < jnp.inf


def test_what_nobody_sees_is_not_counted():
    """Rows without a key, and keys that are not finite."""
    x = [np.ones(shape, np.float32) for shape in ((1, 3, 2, 512), (1, 3, 2, 512), (1, 3, 2), (1, 3, 2), (1, 5, 512))]
    want = resolution(*x[:4], x[4:], 0.5)
    q, do, lse, delta, k = (y.copy() for y in x)
    lse[0, 1, 0] = -np.inf
    q[0, 1, 0], do[0, 1, 0], delta[0, 1, 0], k[0, 2], k[0, 3, 1] = np.nan, np.inf, np.nan, np.nan, -np.inf
    np.testing.assert_array_equal(resolution(q, do, lse, delta, [k], 0.5), want)
