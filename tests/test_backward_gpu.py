"""Gradients by kernels, on a GPU, over the adversarial rows of the case table.

The expected gradient is computed in `jnp` in float32 from the same 16-bit operands. No element may differ from it by
more than twice the greatest error of the 16-bit gradients in `jnp`, or half a unit in the last place of the largest
element: in some rows there are so few elements that none of them is rounded by that much.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha import dot_product_attention, dsv4_attention, fmha, sparse_fmha
from jax_dsv4_fmha._dispatch import attend
from jax_dsv4_fmha._dispatch.op import KernelUse
from jax_dsv4_fmha._host import library
from jax_dsv4_fmha._testing.attention import DecodeCase, FmhaCase, SparseCase, split
from jax_dsv4_fmha._testing.cases import ATTENTION

pytestmark = pytest.mark.gpu
SIZES = {"d": 512, "s_kv": 300, "s_q": 20, "h_q": 16}
TABLE = [
    case
    for case in ATTENTION
    if not isinstance(case, DecodeCase) and case.is_small and case.s_q > 1
    if case.op == "fmha" or case.d == 512  # all that kernels are built for
    if case.features
    or case.sink not in ("none", "normal")
    or case.h_q in (7, 128)
    or case.facts["h_kv"] > 1
    or case.facts["topk"]
] + [
    SparseCase(**SIZES, topk=64, sink="20", features=("absent", "lengths", "nan")),  # as large as lse
    FmhaCase(**SIZES, shared_kv=True, sink="20", span="causal"),
    FmhaCase(**SIZES, shared_kv=True, dtype="float16", span="causal"),  # by the kernels of separate K and V
]


BITS = {"bfloat16": 8, "float16": 11}  # elements of a number, the first included


def cos_diff(x, y):
    return np.sum((x - y) ** 2) / max(np.sum(x**2) + np.sum(y**2), 1e-300)


def split_operands(case):
    """(the differentiated operands, the other arrays, f of both)"""
    args, kwargs = case.operands()
    numbers, arrays = split(kwargs)
    given = {f"operand {i}": x for i, x in enumerate(args)}
    floats = {name: x for name, x in given.items() if x is not None and jnp.issubdtype(x.dtype, jnp.floating)}
    floats |= {"sink": arrays.pop("sink")} if "sink" in arrays else {}
    rest = {name: x for name, x in given.items() if name not in floats}

    def f(floats, rest, arrays, **choices):
        given = {**floats, **rest}
        sink = {"sink": given["sink"]} if "sink" in given else {}
        positional = (given[f"operand {i}"] for i in range(len(args)))
        return case.function(*positional, **arrays, **numbers, **sink, **choices)

    return floats, (rest, arrays), f


def cotangents(case, only):
    q = case.operands()[0][0]
    rng = np.random.default_rng(3)
    do = rng.standard_normal(q.shape).astype(q.dtype)
    dlse = rng.standard_normal(q.shape[:-1]).astype(np.float32)
    return do * (only != "lse"), dlse * (only != "o")


def gradients(case, only, dtype=None, **choices):
    floats, rest, f = split_operands(case)
    if dtype is not None:
        floats = {i: np.asarray(x).astype(dtype) for i, x in floats.items()}

    def pull(floats, rest, do, dlse):
        (o, lse), vjp = jax.vjp(lambda x: f(x, *rest, **choices), floats)
        return vjp((do.astype(o.dtype), jnp.where(jnp.isinf(lse), 0, dlse)))[0]

    with jax.default_matmul_precision("highest" if dtype is not None else "default"):
        got = jax.jit(pull, compiler_options={"xla_gpu_autotune_level": "0"})(floats, rest, *cotangents(case, only))
    return {i: np.asarray(x, np.float64) for i, x in got.items()}


@pytest.mark.parametrize("only", ["both", "lse"])
@pytest.mark.parametrize("case", TABLE, ids=lambda x: x.id)
def test_gradients_by_kernels(case, only, cuda, monkeypatch):
    if only == "lse" and case.sink != "20" and "nan" not in case.features:
        pytest.skip("lse's cotangent alone: of some cases")
    is_latent = case.d == 512 and (case.op != "fmha" or (case.shared_kv and case.dtype == "bfloat16"))
    op = "mla_span_bwd" if is_latent else "mha_dq"
    if not {v.arch for v in library.variants_for(op, d=case.d)} >= set(library.local_architectures()):
        pytest.skip("no backward kernel for this GPU")
    got = gradients(case, only, implementation="cubin")
    monkeypatch.setattr(attend, "choose_backward", lambda *_: KernelUse.NEVER)
    plain = gradients(case, only)
    want = gradients(case, only, jnp.float32)
    for name, x in got.items():
        assert np.isfinite(x).all(), name
        largest = np.abs(want[name]).max()
        half_unit = 0 if name == "sink" else 2.0 ** (np.floor(np.log2(max(largest, 1e-30))) - BITS[case.dtype])
        bound = 2 * max(np.abs(plain[name] - want[name]).max(), half_unit) + 1e-6 * largest
        distance = np.abs(x - want[name])
        assert distance.max() <= bound, (name, distance.max(), bound)
        if name != "sink":  # D is a sum over the rounded o, with a kernel for the gradient or without
            assert cos_diff(x, want[name]) < 1e-5, (name, cos_diff(x, want[name]))


@pytest.mark.parametrize("op", ["fmha", "sparse_fmha", "sparse layer", "dense layer"])
def test_deterministic_gradients_have_the_same_bits(op, cuda):
    """20 times, with sums over many queries and heads; they equal the default gradients up to rounding."""
    if not library.variants_for("mla_span_bwd", d=512, deterministic=True):
        pytest.skip("no deterministic kernel")
    keys = jax.random.split(jax.random.key(0), 5)
    q, do = (jax.random.normal(key, (1, 300, 72, 512), jnp.bfloat16) for key in keys[:2])
    kv, window_kv = (
        jax.random.normal(key, (1, n, 512), jnp.bfloat16) for key, n in zip(keys[2:4], (90, 300), strict=True)
    )
    indices = jax.random.randint(keys[4], (1, 300, 64), -5, 95, jnp.int32)
    sink = jnp.linspace(-1, 1, 72)

    def gradients(deterministic, q, kv, window_kv, sink):
        how = {"sink": sink, "implementation": "cubin", "deterministic": deterministic}
        calls = {
            "fmha": lambda: fmha(q, kv[:, :, None], **how),
            "sparse_fmha": lambda: sparse_fmha(q, kv, indices, **how),
            "sparse layer": lambda: dsv4_attention(q, window_kv, kv, indices=indices, **how),
            "dense layer": lambda: dsv4_attention(q, window_kv, kv, ratio=3, **how),
        }
        o, lse = calls[op]()
        return jnp.sum(o.astype(jnp.float32) * do) + jnp.sum(jnp.sin(lse))

    f = {x: jax.jit(jax.grad(partial(gradients, x), range(4))) for x in (True, False)}
    first, *others = (jax.tree.map(np.asarray, f[True](q, kv, window_kv, sink)) for _ in range(20))
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{a.itemsize}"))
    for a, b in zip(first, f[False](q, kv, window_kv, sink), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert cos_diff(a, b) < 1e-5 and np.abs(a).max() < 1e3


def test_every_kind_of_source_is_among_them():
    assert {(c.op, bool(c.facts["topk"])) for c in TABLE} >= {
        ("fmha", False),
        ("sparse_fmha", True),
        ("dsv4_attention", False),
        ("dsv4_attention", True),
    }


OVERLAPS = {  # with jax.nn, whose cuDNN takes them: heads of q and of keys, and what is shown
    "causal": (64, 4, 4, {"is_causal": True}),
    "groups": (128, 8, 2, {"is_causal": True}),
    "window": (128, 4, 1, {"is_causal": True, "local_window_size": (63, 0)}),
    "lengths": (64, 4, 2, {"key_value_seq_lengths": (430, 640), "query_seq_lengths": (640, 640)}),
    "wide": (256, 4, 1, {"is_causal": True}),
}


@pytest.mark.parametrize("case", OVERLAPS)
def test_gradients_equal_those_of_jax_nn(case, cuda):
    """Beside cuDNN, by what XLA makes of the same numbers in float32: no further from it than cuDNN is twice."""
    d, h_q, h_kv, how = OVERLAPS[case]
    how = {name: jnp.array(x) if "lengths" in name else x for name, x in how.items()}
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((2, 640, h_q, d), *2 * ((2, 640, h_kv, d),), (2, 640, h_q, d))  # of many keys, but for the window
    *x, do = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))

    def gradients(op, implementation, *x):
        o, vjp = jax.vjp(lambda *x: op(*x, **how, implementation=implementation), *x)
        return vjp(do.astype(o.dtype))

    f32 = jax.jit(partial(gradients, jax.nn.dot_product_attention, "xla"))
    with jax.default_matmul_precision("highest"):
        want = f32(*(y.astype(jnp.float32) for y in x))
    ours = jax.jit(partial(gradients, dot_product_attention, "cubin"))(*x)
    cudnn = jax.jit(partial(gradients, jax.nn.dot_product_attention, "cudnn"))(*x)
    for name, *found in zip(("dq", "dk", "dv"), ours, cudnn, want, strict=True):
        a, b, c = (np.asarray(y, np.float64) for y in found)
        assert np.abs(a - c).max() <= 2 * np.abs(b - c).max(), (name, np.abs(a - c).max(), np.abs(b - c).max())
        assert cos_diff(a, c) < 1e-5, (name, cos_diff(a, c), cos_diff(b, c))
