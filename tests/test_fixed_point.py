"""Sums in fixed point: their values, that none overflows, and what they leave out."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha._fixed_point import resolution, to_float32


def test_what_sums_stand_for():
    sums = np.array([0, 1, -1, 7, -8, 2**31, -(2**31) - 5, 2**32, -(2**40) + 3, 2**61 - 1, -(2**61)], np.int64)
    unit = np.array([2.0**20], np.float32)
    got = to_float32(jnp.asarray(sums.view(np.uint32).reshape(-1, 2)), unit, jnp.ones(3))
    np.testing.assert_allclose(got, sums / 2.0**20, rtol=2e-7, atol=2.0**-20)
    assert got[0] == 0
    assert np.isnan(to_float32(jnp.zeros((2, 2), jnp.uint32), unit, jnp.array([1, jnp.inf]))).all()


@pytest.mark.parametrize("size", [1e-12, 1, 1e4])
def test_no_sum_leaves_them(size):
    """All rows add in the same direction, as much as they can."""
    b, s_q, h, d = 1, 40, 4, 512
    q, do, k = np.full((b, s_q, h, d), 3.0), np.full((b, s_q, h, d), size), np.full((b, 9, d), 2.0)
    delta, lse = np.full((b, s_q, h), -size), np.zeros((b, s_q, h))
    ds = 0.1 * (d * size * 2 + size)
    (unit,) = resolution(
        *(jnp.asarray(x, jnp.float32) for x in (q, do, lse, delta)), [jnp.asarray(k, jnp.float32)], 0.1
    )
    most = b * s_q * h * (ds * 3 + size) * float(unit)
    assert 2.0**59 < most < 2.0**62
    assert np.frexp(float(unit))[0] == 0.5


def test_what_nobody_sees_is_not_counted():
    """Rows without a key, and keys that are not finite."""
    x = [np.ones(shape, np.float32) for shape in ((1, 3, 2, 512), (1, 3, 2, 512), (1, 3, 2), (1, 3, 2), (1, 5, 512))]
    want = resolution(*x[:4], x[4:], 0.5)
    q, do, lse, delta, k = (y.copy() for y in x)
    lse[0, 1, 0] = -np.inf
    q[0, 1, 0], do[0, 1, 0], delta[0, 1, 0], k[0, 2], k[0, 3, 1] = np.nan, np.inf, np.nan, np.nan, -np.inf
    np.testing.assert_array_equal(resolution(q, do, lse, delta, [k], 0.5), want)
