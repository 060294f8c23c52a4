"""jax.export: every way of saying who sees what, with symbolic shapes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jax_dsv4_fmha as lib
from jax_dsv4_fmha import Cache, Span, dot_product_attention, dsv4_attention, dsv4_decode, fmha, layers, sparse_fmha
from jax_dsv4_fmha._host import library
from jax_dsv4_fmha.layers.documents import PackedBlocks
from tests.test_layers import MODELS

pytestmark = pytest.mark.usefixtures("quick_to_compile")

SIZES = {"b": 2, "s": 5, "t": 11, "c": 3, "x": 4, "h": 4, "k": 2, "d": 16, "1": 1, "2": 2}
"""sizes of the axes; a case says which stay symbolic"""


def spans(q, k, n):
    t, s = k.shape[1], q.shape[1]
    return fmha(q, k, span=Span.causal(s, t - s) & Span.lengths(n) & Span(1, t - 1))


def part(q, k, n):
    return fmha(q, k, d_v=12, span=Span.causal(q.shape[1], k.shape[1] - q.shape[1]) & Span.lengths(n))


def segments(q, k, i, j):
    return fmha(q, k, span=Span.segments(i, j) & Span.segments(i, i))


def layer(q, w, c, n):
    s = q.shape[1]
    near, _ = dsv4_attention(q, w, window=Span.sliding_window(s, 3, w.shape[1] - s) & Span.lengths(n))
    return dsv4_attention(near, w, c, window=Span.sliding_window(s, 3, s) & Span(s, n[:, None]), ratio=4)


def decode(q, w, c):
    return dsv4_decode(q, Cache(w), Cache(c), lengths=w.shape[1], ratio=4, window=3)


def drop_in(q, k, n, m):
    sees = {"is_causal": True, "local_window_size": 3, "query_seq_lengths": n, "key_value_seq_lengths": m}
    mask = jnp.ones((q.shape[0], 1, q.shape[1], 1), bool)
    return dot_product_attention(q, k, k, mask=mask, return_residual=True, **sees)


# the function, the axes of its operands, and the symbolic ones
CASES = {
    "spans": (spans, "bshd bt1d b", "bst"),
    "segments": (segments, "bshd bt1d bs bt", "bst"),
    "layer": (layer, "bshd btd bcd b", "bstc"),
    "decode": (decode, "bshd btd bcd", "btc"),
    "drop-in": (drop_in, "bshd btkd b b", "bst"),
    "gradient of spans": (spans, "bshd bt1d b", "bst"),
    "gradient of spans of a part": (part, "bshd bt1d b", "bst"),
    "gradient of top-k of a part": (functools.partial(sparse_fmha, d_v=12), "bshd btd bsx", "bstx"),
    "gradient of top-k": (sparse_fmha, "bshd btd bsx", "bstx"),
    "gradient of a pool": (sparse_fmha, "bshd td bsx", "bstx"),
}


def operand(axes, seed):
    shape, rng = [SIZES[a] for a in axes], np.random.default_rng(seed)
    if axes == "b":
        return jnp.array([4, 9], jnp.int32)
    if axes in ("bs", "bt"):
        return jnp.asarray(np.sort(rng.integers(1, 4, shape)), jnp.int32)
    if axes == "bsx":
        return jnp.asarray(rng.integers(-2, SIZES["t"], shape), jnp.int32)
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("name", CASES)
def test_symbolic_shapes(name):
    """One program for all sizes; and its answer is right for one of them, where shapes decide what is seen."""
    f, axes, left_open = CASES[name]
    operands = [operand(a, i) for i, a in enumerate(axes.split())]
    symbols = dict(zip(left_open, jax.export.symbolic_shape(", ".join(left_open)), strict=True))
    like = [
        jax.ShapeDtypeStruct([symbols.get(a, n) for a, n in zip(names, x.shape, strict=True)], x.dtype)
        for names, x in zip(axes.split(), operands, strict=True)
    ]
    run = f
    if name.startswith("gradient"):
        run = lambda q, k, *xs: jax.grad(lambda *qk: jnp.sin(f(*qk, *xs)[0]).sum(), (0, 1))(q, k)  # noqa: E731
    exported = jax.export.export(jax.jit(run), platforms=["cpu"])(*like)
    assert [x.shape for x in exported.out_avals] == [x.shape for x in jax.eval_shape(run, *like)]
    if name in ("spans", "segments"):
        for x, y in zip(exported.call(*operands), jax.jit(run)(*operands), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_a_size_that_may_be_zero():
    """Entries for every 4 positions: an error says which constraint is missing, and with it the program is right."""

    def program(q, w):
        c = w[:, : w.shape[1] // 4 * 4].reshape(w.shape[0], w.shape[1] // 4, 4, w.shape[2]).mean(2)
        return dsv4_attention(q, w, c, ratio=4, window=3)[0]

    def exported(*constraints):
        b, s = jax.export.symbolic_shape("b, s", constraints=constraints)
        like = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((b, s, 4, 16), (b, s, 16)))
        return jax.export.export(jax.jit(program), platforms=["cpu"])(*like)

    wanted = r"dsv4_attention: compressed_kv: got float32\[b, floordiv\(s, 4\), 16\], wanted .*\['s >= 4'\] for s // 4"
    with pytest.raises(ValueError, match=wanted):
        exported()
    q, w = operand("bthd", 1), operand("btd", 2)
    np.testing.assert_allclose(exported("s >= 4").call(q, w), jax.jit(program)(q, w), rtol=1e-5, atol=1e-5)


def test_without_kernels(monkeypatch):
    """A program that would run slowly on another machine is not exported without a warning."""
    monkeypatch.setattr(library, "variants", tuple)
    x = jnp.ones((1, 4, 2, 64), jnp.bfloat16)
    with pytest.warns(RuntimeWarning, match="fmha, forward, is exported for cuda without a kernel: no kernels are bu"):
        jax.export.export(jax.jit(lambda x: fmha(x, x, x)), platforms=["cuda"])(x)
    for platform, implementation in (("cpu", None), ("cuda", "reference")):  # warnings are errors
        f = jax.jit(lambda x, i=implementation: fmha(x, x, x, implementation=i))
        jax.export.export(f, platforms=[platform])(x)


# ---- serialization


def example_of(kind):
    """An instance of a public class whose fields are arrays, but for static ones; None of a class that is no pytree."""
    names = getattr(kind, "_fields", None)
    static = {}
    if names is None and dataclasses.is_dataclass(kind):
        fields = dataclasses.fields(kind)
        names = [x.name for x in fields if not x.metadata.get("static")]
        static = {x.name: STATIC.get(x.name, x.default) for x in fields if x.metadata.get("static")}
    if names is None:
        return None
    instance = object.__new__(kind) if not issubclass(kind, tuple) else kind(*map(jnp.float32, range(len(names))))
    if not issubclass(kind, tuple):
        for name, x in {**dict(zip(names, map(jnp.float32, range(len(names))), strict=True)), **static}.items():
            object.__setattr__(instance, name, x)
    return None if jax.tree_util.all_leaves([instance]) else instance


STATIC = {
    "layout": "v41_fp4", "rules": frozenset({"segments", "compressed"}), "width": 7, "from_first": True, "reach": 6,
    "eps": 1e-6, "gated": True, "rows": 256, "columns": 128, "shape": (128, 256),
}  # fmt: skip
PUBLIC = {name: getattr(module, name) for module in (lib, layers) for name in module.__all__}
PUBLIC["PackedBlocks"] = PackedBlocks  # which Compressor takes
PYTREES = {name: x for name, kind in PUBLIC.items() if isinstance(kind, type) and (x := example_of(kind)) is not None}


def test_public_pytrees_are_found():
    named = {"Cache", "Span", "QueryRope", "Quantized", "LayerCache", "Output", "RunningSums", "PackedExperts"}
    assert named | {"PackedMatrix"} <= PYTREES.keys()


@pytest.mark.parametrize("name", PYTREES)
def test_a_public_pytree_is_an_argument_and_a_result_of_what_is_serialized(name):
    x = PYTREES[name]
    exported = export.export(jax.jit(lambda x: jax.tree.map(lambda y: y + 1, x)))(x)
    got = export.deserialize(exported.serialize()).call(x)
    assert jax.tree.structure(got) == jax.tree.structure(x)
    assert jax.tree.leaves(got) == [y + 1 for y in jax.tree.leaves(x)]


def test_a_step_is_serialized():
    """Of an op, and of layers of every kind, with their caches."""
    q, k = (jnp.asarray(np.random.default_rng(0).standard_normal(x), jnp.bfloat16) for x in ((2, 1, 4, 8), (2, 16, 8)))
    f = jax.jit(lambda q, c: dsv4_decode(q, c, lengths=5, window=4)[0])
    blob = export.export(f)(q, Cache(k)).serialize()
    np.testing.assert_array_equal(export.deserialize(blob).call(q, Cache(k)), f(q, Cache(k)))
    for layer in layers.from_config(MODELS["v4"]):
        params, x = layer.init(jax.random.key(0)), jnp.ones((2, 1, layer.hidden))
        step = jax.jit(lambda params, x, cache, layer=layer: layer.step(params, x, cache, lengths=3))
        cache = layer.cache(2, 32, x.dtype)
        got = export.deserialize(export.export(step)(params, x, cache).serialize()).call(params, x, cache)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, step(params, x, cache))
