"""RoPE and its inverse, after a norm too, and the Hadamard transform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha._testing import rope as rope_cases
from jax_dsv4_fmha._testing.cases import ROPE
from jax_dsv4_fmha.layers import Rope, hadamard, inverse_rope, rope
from jax_dsv4_fmha.layers.rope import index_query, rope_hadamard, rope_of_normed
from tests import layers_float64
from tests.helpers import collectives
from tests.test_layers import hidden


def test_check_finds_what_is_wrong_with_rope(monkeypatch):
    assert [case.complaints("reference") for case in ROPE[:2]] == [[], []]
    monkeypatch.setattr(rope_cases, "rope", inverse_rope)
    (says,) = ROPE[1].complaints("reference")
    assert says.startswith("rope off by ")


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("shape", [(2, 600, 16, 512), (1, 7, 3, 128), (3, 5, 1, 64)], ids=str)
def test_rope_in_place_by_a_kernel(shape):
    """It overwrites an array that nothing else needs; any other array stays as it is."""
    rng, how = np.random.default_rng(0), Rope(64)
    w, x = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((shape[-1],) * 2, shape))
    at = jnp.asarray(rng.integers(0, 5000, shape[:2]), jnp.int32)
    product = jax.jit(lambda x: x @ w)(x)
    for turn in (rope, inverse_rope):
        run = jax.jit(lambda x, turn=turn: turn(x @ w, at, how))
        program = run.lower(x).compile().as_text()
        assert program.count('custom_call_target="dsv4_fmha_rope"') == 1 and " copy(" not in program
        want = turn(product.astype(jnp.float32), at, how)
        np.testing.assert_allclose(run(x).astype(jnp.float32), want, rtol=1e-2, atol=1e-2)
        both = jax.jit(lambda x, turn=turn: (turn(x, at, how), x))(product)
        np.testing.assert_array_equal(*(y.astype(jnp.float32) for y in (both[1], product)))
        np.testing.assert_allclose(both[0].astype(jnp.float32), want, rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_rope_of_a_slice():
    """XLA hands the kernel a part of a larger array, in place of a copy; the array stays as it is."""
    rng, how = np.random.default_rng(0), Rope(64)
    x = jnp.asarray(rng.standard_normal((8, 1, 64, 512)), jnp.bfloat16)
    at = jnp.asarray(rng.integers(0, 5000, (1, 1)), jnp.int32)
    first, kept = jax.jit(lambda x: (rope((x + 1)[2:3], at, how), x + 1))(x)
    np.testing.assert_array_equal(*(y.astype(jnp.float32) for y in (kept, x + 1)))
    np.testing.assert_allclose(
        first.astype(jnp.float32), rope((x + 1)[2:3].astype(jnp.float32), at, how), rtol=1e-2, atol=1e-3
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("shape", [(2, 60, 16, 512), (1, 7, 3, 512)], ids=str)
def test_rope_of_normed_by_a_kernel(shape):
    """The norm with RoPE, and its gradient, are one kernel each; both as in float32."""
    rng, how = np.random.default_rng(0), Rope(64, 160000, 16, 4096)
    x, dy = (jnp.asarray(3 * rng.standard_normal(shape), jnp.bfloat16) for _ in range(2))
    at = jnp.asarray(rng.integers(0, 5000, shape[:2]), jnp.int32)

    def pull(x, dy):
        y, vjp = jax.vjp(lambda x: rope_of_normed(x, at, how, 1e-3), x)
        return y, *vjp(dy)

    program = jax.jit(pull).lower(x, dy).compile()
    assert all(f'"dsv4_fmha_{op}"' in program.as_text() for op in ("norm_rope", "norm_rope_bwd"))
    want = jax.jit(pull)(*(x.astype(jnp.float32) for x in (x, dy)))
    for got, exactly in zip(program(x, dy), want, strict=True):
        np.testing.assert_allclose(got.astype(jnp.float32), exactly, rtol=8e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("shape", [(2, 60, 16, 128), (64, 1, 64, 128), (1, 7, 3, 128)], ids=str)
def test_index_query_by_a_kernel(shape):
    """Its codes and scales are those of RoPE with the transform, quantized by NumPy."""
    rng, how = np.random.default_rng(0), Rope(64, 160000, 16, 4096)
    x = jnp.asarray(3 * rng.standard_normal(shape) * (rng.integers(0, 9, shape[:3]) > 0)[..., None], jnp.bfloat16)
    at = jnp.asarray(rng.integers(0, 5000, shape[:2]), jnp.int32)
    run = jax.jit(lambda x: index_query(x, how.table(at))).lower(x).compile()
    assert run.as_text().count("dsv4_fmha_index_query") == 1
    rows = np.asarray(jax.jit(lambda x: rope_hadamard(x, at, how))(x), np.float32)
    wanted = np.maximum(np.abs(rows).max(-1), np.float32(1e-4)) * np.float32(1 / 448)
    codes, scales = (np.asarray(y) for y in run(x))
    np.testing.assert_array_equal(scales, wanted)
    np.testing.assert_array_equal(codes, np.clip(rows / wanted[..., None], -448, 448).astype(codes.dtype))
    assert not jax.grad(lambda x: jnp.sum(index_query(x, how.table(at))[1]))(x).any()


@pytest.mark.parametrize("how", [Rope(8), Rope(8, 160000, 16, 64), Rope(8, 160000, 16, 4)])
def test_rope(how):
    x = hidden(2, 6).reshape(2, 6, 2, 12)
    positions = jnp.array([[0, 1, 7, 100, 4095, 70000]], jnp.int32)
    got = rope(x, positions, how)
    for i, p in enumerate(positions[0].tolist()):
        want = layers_float64.turn(np.asarray(x[:, i], np.float64), p, how)
        np.testing.assert_allclose(got[:, i], want, atol=2e-7 * max(p, 20))  # an angle is a product in float32
    np.testing.assert_allclose(inverse_rope(got, positions, how), x, atol=1e-6)
    assert rope(x.astype(jnp.bfloat16), positions, how).dtype == jnp.bfloat16


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("d", [64, 72, 68])
def test_a_kernel_rotates_rows_of_whole_vectors(d):
    """Rows that do not begin at a multiple of 16 bytes are XLA's."""
    x, at = jax.ShapeDtypeStruct((1, 4, 2, d), jnp.bfloat16), jax.ShapeDtypeStruct((1, 4), jnp.int32)
    lowered = jax.jit(lambda x, at: rope(x, at, Rope(64))).trace(x, at).lower(lowering_platforms=("cuda",))
    assert ("dsv4_fmha_rope" in lowered.as_text()) == (d % 8 == 0)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_rope_of_normed_on_a_mesh(kind):
    """Every device turns the heads and queries that it has, if there is a kernel; the same under vmap."""
    how, x = Rope(64), hidden(4, 6)[..., None, :1] * jnp.ones((4, 6, 4, 512), jnp.bfloat16)
    x = x + hidden(1, 6, seed=3)[0, :, None, :1].astype(jnp.bfloat16) * jnp.arange(512, dtype=jnp.bfloat16)
    at = jnp.arange(6, dtype=jnp.int32)[None]

    def pull(x):
        y, vjp = jax.vjp(lambda x: inverse_rope(rope_of_normed(x, at, how, 1e-6) * 2, at + 3, how), x)
        return y, *vjp(y)

    want = jax.jit(pull)(x)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(kind,) * 2, devices=jax.devices("cpu")[:4])
    put = jax.device_put(x, NamedSharding(mesh, P("data", None, "tensor")))
    program = jax.jit(pull).lower(put).compile()
    assert not collectives(program)
    mapped = jax.jit(jax.vmap(pull))(x[:, None])
    for got, one, exactly in zip(program(put), mapped, want, strict=True):
        np.testing.assert_array_equal(got.astype(jnp.float32), exactly.astype(jnp.float32))
        np.testing.assert_array_equal(one[:, 0].astype(jnp.float32), exactly.astype(jnp.float32))


@pytest.mark.parametrize("positions", [jnp.zeros((1, 5), jnp.int32), jnp.zeros((1, 6)), jnp.zeros(6, jnp.int32)])
def test_rope_errors(positions):
    with pytest.raises(ValueError, match=r"rope: positions: got .*, wanted int32\[b=2 or 1, s=6\]"):
        rope(hidden(2, 6), positions, Rope(8))


def test_hadamard():
    x = hidden(1, 3)[0, :, :16]
    np.testing.assert_allclose(hadamard(x), np.asarray(x) @ scipy.linalg.hadamard(16) / 4, atol=1e-6)
    with pytest.raises(ValueError, match=r"got float32\[1, 3, 24\], wanted .*\[..., d\], d a power of two"):
        hadamard(hidden(1, 3))
