"""Packed matrices as arrays for products of many rows: by definition on a CPU and on meshes, by the kernel on a GPU."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import explain, pack_matrix
from jax_dsv4_fmha._dispatch import unpack_matrix
from jax_dsv4_fmha._host import library
from jax_dsv4_fmha.layers import _few_rows

from .helpers import collectives
from .test_packed_matrix import operands, pack, rounded, with_mantissas

SHAPES = {  # rows, columns, several, and the shape that it stands for
    "a matrix": (256, 384, (), None),
    "heads": (256, 384, (), (384, 2, 128)),
    "a sum over groups": (256, 384, (), (3, 128, 256)),
    "a matrix for each group": (256, 384, (3,), None),
    "no whole blocks": (200, 136, (), None),
    "columns that are no multiple of 8": (64, 100, (), None),
}
SUMS = {
    "a matrix": "bsk,kn->bsn",
    "heads": "bsk,khd->bshd",
    "a sum over groups": "bsgk,gkn->bsn",
    "a matrix for each group": "bsgk,gkn->bsgn",
    "no whole blocks": "bsk,kn->bsn",
    "columns that are no multiple of 8": "bsk,kn->bsn",
}
SHAPE = pytest.mark.parametrize("kind", SHAPES)
needs_kernels = pytest.mark.skipif(not library.architectures(), reason="without kernels")


def matrix(kind, least=-9, most=3):
    *sizes, shape = SHAPES[kind]
    return pack(*operands(*sizes, least=least, most=most), shape)


def rows_of(w, sums, tokens=(2, 80)):
    several, columns, _ = w.parts()
    of_x = sums.split(",")[0]
    shape = (*tokens, *several, *columns)
    assert len(shape) == len(of_x)
    return jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)


@SHAPE
def test_rows_stand_first(kind):
    w = matrix(kind)
    several, columns, rows = w.parts()
    want = np.asarray(w.unpacked(jnp.bfloat16))
    at = [len(several) + n for n in (*range(len(columns), len(columns) + len(rows)), *range(len(columns)))]
    for dtype in (jnp.bfloat16, jnp.float32):
        found = jax.jit(unpack_matrix.rows_first, static_argnums=1)(w, dtype)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, want.transpose(*range(len(several)), *at))
        np.testing.assert_array_equal(unpack_matrix.unpacked(w, dtype), want)


@SHAPE
def test_products(kind):
    """Of a packed matrix and of an array they are alike, and so are their gradients in x."""
    w, sums = matrix(kind), SUMS[kind]
    x, plain = rows_of(w, sums).astype(jnp.float32), w.unpacked()

    def both(w):
        y, back = jax.vjp(lambda x: _few_rows.product_of(sums, x, w), x)
        return y, back(y)[0]

    for got, want in zip(jax.jit(both)(w), jax.jit(both)(plain), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * float(jnp.abs(want).max()))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_gradient_beside_packed_parameters(dtype):
    """Packed data among what is differentiated, under jax.checkpoint in a scan, have none, and x has its own."""
    w = matrix("a matrix")
    square = pack(*operands(384, 256, least=-9, most=-7), None)
    x = jax.random.normal(jax.random.key(0), (1, 130, 384), jnp.bfloat16)

    def loss(params, unpack):
        @jax.checkpoint
        def layer(x, _):
            for name in ("w", "square"):
                x = _few_rows.plain_product(x, unpack(params[name]), dtype, False).astype(x.dtype)
            return x, None

        return jnp.sum(jax.lax.scan(layer, params["x"], None, length=2)[0].astype(jnp.float32) ** 2)

    params = {"x": x, "w": w, "square": square}
    got = jax.grad(loss, allow_int=True)(params, lambda w: w)
    want = jax.grad(loss, allow_int=True)(params, lambda w: w.unpacked(jnp.bfloat16))
    assert got["w"].data.dtype == jax.dtypes.float0
    got, want = (np.asarray(g["x"], np.float32) for g in (got, want))
    assert np.abs(want).max() > 0
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2 * np.abs(want).max())


def test_under_vmap():
    w = matrix("a matrix for each group")
    one = pack(*operands(256, 384))
    found = jax.vmap(lambda data: unpack_matrix.rows_first(replace(one, data=data), jnp.bfloat16))(w.data)
    np.testing.assert_array_equal(found, unpack_matrix.rows_first(w, jnp.bfloat16))


CUT = {"rows": ("a matrix", P("x")), "columns": ("a matrix", P(None, "x")), "groups": ("groups", P("x"))}


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize("what", CUT)
def test_a_device_unpacks_its_part(what, axes):
    kind, spec = CUT[what]
    several = (2,) if kind == "groups" else ()
    w = pack(*operands(256, 384, several, least=-9, most=3))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axes,), devices=jax.devices("cpu")[:2])
    placed = jax.device_put(w, NamedSharding(mesh, spec))
    run = jax.jit(unpack_matrix.rows_first, static_argnums=1)
    compiled = run.lower(placed, jnp.bfloat16).compile()
    found = compiled(placed)
    np.testing.assert_array_equal(found, run(w, jnp.bfloat16))
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, spec), found.ndim)
    assert not collectives(compiled)


def lowered(f, *operands):
    return jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@needs_kernels
@SHAPE
def test_a_product_reads_what_the_kernel_writes(kind):
    """Nothing stands between them but a change of shape, or a cut of columns that the kernel does not take."""
    w, sums = matrix(kind), SUMS[kind]
    text = lowered(functools.partial(_few_rows.product_of, sums), rows_of(w, sums), w)
    assert text.count("custom_call @dsv4_fmha_unpack_matrix") == 1
    others = set(re.findall(r"stablehlo\.(\w+)", text)) - {"custom_call", "reshape", "dot_general", "case", "return"}
    assert others <= {"constant", "transpose"} | ({"slice"} if w.columns % 8 else set())
    turned = re.findall(r"stablehlo\.transpose .*-> tensor<([\dx]+)xbf16>", text)
    assert all(shape.startswith("2x80x") for shape in turned)  # y, of groups


@needs_kernels
def test_where_no_kernel_is_taken():
    """The kernel writes bfloat16 alone."""
    w = matrix("a matrix")
    assert "unpack_matrix" not in lowered(functools.partial(_few_rows.array_of, dtype=jnp.float32), w)
    assert "unpack_matrix" in lowered(functools.partial(_few_rows.array_of, dtype=jnp.bfloat16), w)


@needs_kernels
def test_explain_says_it():
    decisions = explain(functools.partial(_few_rows.array_of, dtype=jnp.bfloat16), matrix("heads"))
    assert [d.op for d in decisions] == ["unpack_matrix"]


ON_GPU = {
    "wq_b of V4-Flash": (32768, 1024, (), (1024, 64, 512)),
    "wo_a of V4-Flash": (1024, 4096, (8,), None),
    "wo_b of V4-Flash": (4096, 8192, (), (8, 1024, 4096)),
    "wkv of V3": (576, 7168, (), None),
    "a row": (1, 8, (), None),
}


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("kind", [*SHAPES, *ON_GPU])
def test_bits_on_a_gpu(kind):
    *sizes, shape = (SHAPES | ON_GPU)[kind]
    codes, exponents = operands(*sizes, least=-60)
    scales = with_mantissas(exponents - 1)
    found = jax.jit(unpack_matrix.rows_first, static_argnums=1)(pack_matrix(codes, scales, shape), jnp.bfloat16)
    assert np.asarray(found).tobytes() == np.ascontiguousarray(np.swapaxes(rounded(codes, scales), -1, -2)).tobytes()


def same_sum(x, w, sums, dtype):
    return _few_rows.product_of(sums, x, w) if dtype == jnp.bfloat16 else _few_rows.plain_product(x, w, dtype, False)


ON_A_GPU = [(kind, jnp.bfloat16) for kind in SHAPES if SHAPES[kind][1] % 8 == 0] + [("a matrix", jnp.float32)]


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("kind", "dtype"), ON_A_GPU)
def test_products_on_a_gpu(kind, dtype):
    """XLA copies no matrix: what it does beside products is of the rows of x and y."""
    w, sums = matrix(kind), SUMS[kind]
    x = rows_of(w, sums, (1, 264))  # no product has another array with as many numbers
    run = jax.jit(functools.partial(same_sum, sums=sums, dtype=dtype))
    text = run.lower(x, w).compile().as_text()
    made = re.findall(r"= bf16\[([\d,]+)\]\S* (?:copy|transpose|fusion|slice)\(.*", text)
    assert w.unpacked().size not in [np.prod([int(n) for n in shape.split(",")]) for shape in made]
    got, want = (np.asarray(run(x, w), np.float32) for w in (w, w.unpacked(jnp.bfloat16)))
    assert np.abs(got - want).max() <= 1e-2 * np.abs(want).max()
