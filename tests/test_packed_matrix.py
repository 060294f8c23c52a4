"""Matrices in FP8 that are laid out for a step's products: they keep all numbers, and refuse what they cannot keep."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_dsv4_fmha import PackedMatrix, pack_matrix
from jax_dsv4_fmha._definitions.packed_matrix import FORMAT
from jax_dsv4_fmha._definitions.slabs import BLOCK, SLAB_BYTES
from kernels.abi import FewRowsProduct
from kernels.variants import VARIANTS

E4M3 = ml_dtypes.float8_e4m3fn


def operands(rows, columns, several=(), least=-113, most=7):
    """Codes, all but NaN, and scales as exponents."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 254, (*several, rows, columns)).astype(np.uint8)
    codes += codes >= 0x7F  # 0x7f and 0xff are not numbers
    blocks = (*several, -(-rows // BLOCK), -(-columns // BLOCK))
    return codes.view(E4M3), rng.integers(least, most + 1, blocks)


def numbers(codes, exponents):
    """float32 `[…, columns, rows]`"""
    whole = np.repeat(np.repeat(2.0**exponents, BLOCK, -2), BLOCK, -1)[..., : codes.shape[-2], : codes.shape[-1]]
    return np.swapaxes(codes.astype(np.float32) * whole.astype(np.float32), -1, -2)


def with_mantissas(exponents):
    """float32: scales that are up to twice as large, and no powers of two."""
    return np.ldexp(np.random.default_rng(1).uniform(1, 2, exponents.shape), exponents).astype(np.float32)


def rounded(codes, scales):
    """bfloat16 `[…, columns, rows]`, from scales in float32: these are rounded, and then products with them."""
    kept = scales.astype(ml_dtypes.bfloat16).astype(np.float32)
    whole = np.repeat(np.repeat(kept, BLOCK, -2), BLOCK, -1)[..., : codes.shape[-2], : codes.shape[-1]]
    return np.swapaxes((codes.astype(np.float32) * whole).astype(ml_dtypes.bfloat16), -1, -2)


def pack(codes, exponents, *shape):
    return pack_matrix(codes, np.asarray(exponents + 127, np.uint8), *shape)


@pytest.mark.parametrize(
    ("rows", "columns", "several"),
    [(128, 128, ()), (200, 136, ()), (64, 320, ()), (256, 384, (3,)), (72, 8, (1,))],
    ids=["a block", "no whole blocks", "half of a block", "several", "one of several"],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_packing_keeps_all_numbers(rows, columns, several, dtype):
    codes, exponents = operands(rows, columns, several)
    w = pack(codes, exponents)
    assert w.data.shape == (*several, -(-rows // 128) * 2, -(-columns // 128) * 2, SLAB_BYTES)
    got = w.unpacked(dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got, np.float32), numbers(codes, exponents))
    np.testing.assert_array_equal(np.asarray(jax.jit(lambda w: w.unpacked(dtype))(w)), np.asarray(got))


def test_what_scales_may_be():
    codes, exponents = operands(256, 128, least=-9)
    want = pack(codes, exponents)
    as_float32 = (2.0**exponents).astype(np.float32)
    in_other_dtypes = (as_float32.astype(dtype) for dtype in (ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16))
    for scales in (as_float32, jnp.asarray(as_float32), *in_other_dtypes):
        np.testing.assert_array_equal(pack_matrix(codes, scales).data, want.data)
        np.testing.assert_array_equal(jax.jit(pack_matrix)(codes, scales).data, want.data)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scales_that_are_no_powers_of_two(dtype):
    """They are rounded to bfloat16, and so are products with them: either is off by half a unit at most."""
    codes, exponents = operands(300, 520, least=-100, most=6)
    scales = with_mantissas(exponents)
    w = pack_matrix(codes, scales)
    got = np.asarray(w.unpacked(dtype), np.float64)
    np.testing.assert_array_equal(got, rounded(codes, scales).astype(np.float64))
    exact = (codes.astype(np.float64) * np.repeat(np.repeat(scales, BLOCK, 0), BLOCK, 1)[:300, :520]).T
    assert 2**-8 < (np.abs(got - exact)[exact != 0] / np.abs(exact[exact != 0])).max() < 2**-7 * (1 + 2**-8)
    np.testing.assert_array_equal(jax.jit(pack_matrix)(codes, scales).data, w.data)
    np.testing.assert_array_equal(pack_matrix(codes, scales.astype(ml_dtypes.bfloat16)).data, w.data)


def test_a_scale_that_bfloat16_has_no_normal_number_for_is_0():
    codes, _ = operands(128, 256)
    scales = np.array([[2.0**-127, 2.0**-126]], np.float32)
    got = np.asarray(pack_matrix(codes, scales).unpacked())
    assert not got[:128].any() and got[128:].any()


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_not_a_number_makes_its_slab_nan(code):
    codes, exponents = operands(256, 256, least=-9)
    want, codes = numbers(codes, exponents), codes.copy()
    codes[70, 130] = np.uint8(code).view(E4M3)
    got = pack(codes, exponents).unpacked()
    want[128:192, 64:128] = np.nan
    np.testing.assert_array_equal(got, want)


def test_a_scale_that_nobody_sees_makes_its_block_nan():
    """Inside of a program, where no error can be raised."""
    codes, exponents = operands(256, 256)
    cases = [(np.uint8, 127, 127 + 8), (np.uint8, 127, 255)]
    cases += [(np.float32, 1, bad) for bad in (256, 2.0**127, -1, -(2.0**-100), np.inf, np.nan, -np.nan)]
    for dtype, usual, bad in cases:
        scales = np.full(exponents.shape, usual, dtype)
        scales[1, 0] = bad
        got = np.asarray(jax.jit(pack_matrix)(codes, scales).unpacked())
        assert np.isnan(got[:128, 128:]).all() and np.isfinite(got[:, :128]).all() and np.isfinite(got[128:]).all()


def test_shapes_of_a_layer():
    """The columns of a matrix are the first axes of what it stands for, and its rows the last ones."""
    codes, exponents = operands(256, 128, least=-9)
    w = pack(codes, exponents, (128, 2, 128))
    np.testing.assert_array_equal(w.unpacked(), numbers(codes, exponents).reshape(128, 2, 128))
    assert w.reshape(2, -1, 256).shape == (2, 64, 256)
    np.testing.assert_array_equal(w.reshape(2, -1, 256).unpacked(), numbers(codes, exponents).reshape(2, 64, 256))
    codes, exponents = operands(128, 256, (2,), least=-9)
    w = pack(codes, exponents, (2, 4, 64, 128))
    np.testing.assert_array_equal(w.unpacked(), numbers(codes, exponents).reshape(2, 4, 64, 128))


def test_it_is_a_pytree():
    w = pack(*operands(128, 128))
    again = jax.tree.map(lambda x: x, w)
    assert isinstance(again, PackedMatrix) and (again.rows, again.columns, again.shape) == (128, 128, (128, 128))
    assert jax.jit(lambda w: w)(w).shape == w.shape
    exported = jax.export.export(jax.jit(lambda w: w.unpacked()))(w)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(w), w.unpacked())


def test_errors():
    codes, exponents = operands(200, 136, least=-9)
    scales = (2.0**exponents).astype(np.float32)
    cases = [
        ((codes.astype(np.float32), scales), "codes: got float32"),
        ((codes[0], scales), "codes"),
        ((codes, scales[:1]), "scales: got float32.*row_blocks=2"),
        ((codes, scales.astype(np.float64)), "scales: got float64"),
        ((codes, scales.astype(np.float16)), "scales: got float16"),
        ((codes, -scales), "scales: got -.* among them, wanted numbers above 0 and up to 128"),
        ((codes, scales * np.float32(np.nan)), "scales: got nan among them, wanted numbers above 0"),
        ((codes, scales * 0), "scales: got 0 among them"),
        ((codes, np.full_like(scales, 129)), "got 129 among them, wanted numbers above 0 and up to 128"),
        ((codes, jnp.full(scales.shape, 129, jnp.bfloat16)), "got 129 among them"),
        ((codes, np.full(scales.shape, 127 + 8, np.uint8)), "got 256 among them"),
        ((codes, np.full(scales.shape, 255, np.uint8)), "got nan among them"),
        ((codes, scales, (136, 201)), "shape: got .136, 201., wanted axes of 136 columns, then axes of 200 rows"),
        ((codes, scales, (200, 136)), "shape: got .200, 136., wanted axes of 136 columns, then"),
        ((codes, scales, (-136, -200)), "shape: got .-136, -200., wanted axes of 136 columns, then"),
        ((codes, scales, "ab"), "shape: got .'a', 'b'., wanted axes of 136 columns, then"),
    ]
    for args, says in cases:
        with pytest.raises((ValueError, TypeError), match=says):
            pack_matrix(*args)
    w = pack_matrix(codes, scales)
    assert w.reshape(8, 17, -1).shape == (8, 17, 200) and w.reshape(8, -1, 2, 100).shape == (8, 17, 2, 100)
    for shape in ((200, 136), (-1, 136), (-1, -1), (137, -1), (0, -1)):
        with pytest.raises(ValueError, match=r"PackedMatrix.reshape: shape: got .*, wanted axes of 136 columns, then"):
            w.reshape(*shape)


def test_kernels_take_this_format():
    assert {v.weights for v in VARIANTS if isinstance(v, FewRowsProduct)} == {"", FORMAT}
