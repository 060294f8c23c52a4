"""Nearly every public op under random transforms, meshes, x64 and symbolic shapes, against the reference on one device.

`pytest -m fuzz` looks for failures (docs/verification.md). KEPT holds the ones it found, and every test run tries them.
The reference runs on each slice of a mapped axis separately, outside of jit, vmap, scan and meshes.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import (
    EXPORT_CHECKS,
    Cache,
    PackedExperts,
    Span,
    dot_product_attention,
    dsv4_attention,
    dsv4_decode,
    fmha,
    fused_moe,
    gqa_decode,
    hyper_connection,
    indexer_scores,
    lightning_indexer,
    merge,
    mla_decode,
    route,
    sparse_fmha,
)
from jax_dsv4_fmha._definitions.experts import CODES, SLAB_BYTES
from jax_dsv4_fmha._definitions.slabs import SLAB, TILE

N = 2  # sizes of an axis that vmap or scan maps
pytestmark = pytest.mark.usefixtures("quick_to_compile")

OF_A_MODEL = {
    "m": 6,
    "u": 4,
    "g": 4,
    "w": 24,
    "r": 24,
    "i": 3,
    "f": 256,
}  # sizes that hyper_connection and fused_moe have
INTEGERS = ("start", "stop", "indices", "length", "lengths", "offset", "table", "chosen", "words", "tokens")
FP32 = ("lse", "sink", "post", "mix", "taken", "fn", "scale", "base", "norm", "weights", "logits", "bias")
"""whatever a case's dtype is"""


@dataclass(frozen=True)
class Case:
    """A call. `how` has the choices of its op; `sizes` those of its axes, by letters."""

    op: str
    sizes: Mapping[str, int]
    how: Mapping[str, Any]
    transforms: tuple[str, ...] = ()  # from the inside out: "checkpoint", and "vmap" and "scan" with what they map
    gradient: bool = False
    jit: bool = True
    kinds: tuple[str, ...] = ()  # sizes of the mesh's two axes; none: no mesh
    layout: tuple[tuple[str, str], ...] = ()  # the mesh axes of each axis
    replicated: tuple[str, ...] = ()  # operands that the layout leaves alone
    set_mesh: bool = False
    x64: bool = False
    symbolic: str = ""  # symbolic axes of jax.export
    dtype: str = "float32"
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.op}-{self.seed}"


# The ops: op(implementation, how, operands) -> results, and the axes of the operands that a choice gives it.
# b batch, s queries, h heads, k key heads, t keys, c compressed entries, x top-k, d, p pages of a sequence, n pages, e
# entries of a page; m hidden, u streams, g streams that they go to, w numbers of a token, r their channels, i parts of
# these and of logits, w experts too; f channels that experts take. A name that ends in 2 is of an operand like the one
# without.

Operands = dict[str, Any]


def _span(how: Mapping[str, Any], x: Operands, s_q: Any) -> Span | None:
    kinds: dict[str, Callable[[], Span | None]] = {
        "none": lambda: None,
        "given": lambda: Span(x["start"], x["stop"]),
        "causal": lambda: Span.causal(s_q, x["offset"]),
        "window": lambda: Span.sliding_window(s_q, 3, x["offset"]) & Span.lengths(x["lengths"]),
        "compressed": lambda: Span.compressed(s_q, 2, 5) & Span(1, 2**31 - 1),
        "ints": lambda: Span(-1, 4),
    }
    return kinds[how["span"]]()


def _fmha(i: str | None, how: Mapping[str, Any], x: Operands) -> Any:
    span = _span(how, x, x["q"].shape[1])
    return fmha(x["q"], x["k"], x.get("v"), span=span, sink=x.get("sink"), implementation=i)


def _listed(x: Operands) -> Any:
    """The indices, of which a row may have fewer, and then -1."""
    if "length" not in x:
        return x.get("indices")
    there = jnp.arange(x["indices"].shape[2])[None, None] < x["length"][..., None]
    return jnp.where(there, x["indices"], -1)


def _sparse(i: str | None, how: Mapping[str, Any], x: Operands) -> Any:
    return sparse_fmha(x["q"], x["kv"], _listed(x), sink=x.get("sink"), implementation=i)


def _layer(i: str | None, how: Mapping[str, Any], x: Operands) -> Any:
    s_q, first, far, at = x["q"].shape[1], x.get("offset", 7), x.get("compressed"), {}
    window: int | Span = how["window"]
    if how["spans"]:
        window = Span.sliding_window(s_q, window, first).keys_from(x.get("offset2", -2))
        window = window & Span.lengths(x["lengths"]) if "lengths" in x else window
    if far is not None or not how["spans"]:
        at = {"q_offset": first}
    rest = {"window": window, "ratio": None if far is None else how["ratio"], "indices": _listed(x), **at}
    return dsv4_attention(x["q"], x["window"], far, **rest, sink=x.get("sink"), implementation=i)


def _decode(i: str | None, how: Mapping[str, Any], x: Operands) -> Any:
    rest = {"sink": x.get("sink"), "indices": _listed(x)}
    window = Cache(x["window"], x.get("table"))
    far = Cache(x["compressed"], x.get("table")) if "compressed" in x else None
    rest |= {"ratio": how["ratio"], "window": how["window"], "is_causal": how.get("causal", True)}
    rest |= {"q_offset": x.get("offset")}
    return dsv4_decode(x["q"], window, far, lengths=x["lengths"], **rest, implementation=i)


def _latent_step(i: str | None, how: Mapping[str, Any], x: Operands) -> Any:
    d = x["q"].shape[-1]
    how = {"d_v": max(1, d * 3 // 4) if how.get("part") else d, "sink": x.get("sink"), "q_offset": x.get("offset")}
    cache = Cache(x["window"], x.get("table"))
    return mla_decode(x["q"], cache, x["lengths"], _listed(x), **how, implementation=i)


def _heads_step(i: str | None, how: Mapping[str, Any], x: Operands) -> Any:
    caches = [Cache(x[name], x.get(table)) for name, table in (("keys", "table"), ("values", "table2"))]
    how = {"window": how["window"], "sink": x.get("sink"), "q_offset": x.get("offset")}
    return gqa_decode(x["q"], *caches, x["lengths"], **how, implementation=i)


def _merge(i: str | None, how: Mapping[str, Any], x: Operands) -> Any:
    return merge([(x["q"], x["lse"]), (x["q2"], x["lse2"])], x.get("sink"))


def _drop_in(i: str | None, how: Mapping[str, Any], x: Operands) -> Any:
    lengths = {"key_value_seq_lengths": x.get("lengths"), "query_seq_lengths": x.get("lengths2")}
    rest = {"is_causal": how["causal"], "local_window_size": how["local"], "sinks": x.get("sink"), **lengths}
    return dot_product_attention(x["q"], x["k"], x["v"], **rest, return_residual=True, implementation=i)


def _indexer(i: str | None, how: Mapping[str, Any], x: Operands) -> Any:
    span = Span.compressed(x["q"].shape[1], 2, x.get("offset", 3))
    span = span & Span.lengths(x["lengths"]) if "lengths" in x else span
    chosen = lightning_indexer(x["q"], x["k"], x["weights"], topk=how["topk"], span=span, return_scores=True)
    return chosen[1], chosen[0].astype(jnp.float32)


def _scores(i: str | None, how: Mapping[str, Any], x: Operands) -> Any:
    return (indexer_scores(x["q"], x["k"], x["weights"], x["indices"]),)


def _connections(i: str | None, how: Mapping[str, Any], x: Operands) -> Any:
    return hyper_connection(**x, iterations=how["iterations"], implementation=i)


@functools.cache
def _matrices() -> tuple[PackedExperts, PackedExperts]:
    """Those of two experts: any codes, and scales of 2^-9 to 2^-4."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, gated: bool) -> PackedExperts:
        data = rng.integers(0, 256, (2, rows // TILE, 256 // SLAB, SLAB_BYTES), np.uint8)
        data[..., CODES:] = rng.integers(244, 250, data[..., CODES:].shape)
        return PackedExperts(data, np.array([1.0, 2.0], np.float32), gated)

    return matrix(512, True), matrix(256, False)


def _experts(i: str | None, how: Mapping[str, Any], x: Operands) -> Any:
    y = fused_moe(x["x"], *_matrices(), x["chosen"], x["weights"], limit=how["limit"], implementation=i)
    return (y,)


def _route(i: str | None, how: Mapping[str, Any], x: Operands) -> Any:
    of = (
        {"table": x["words"], "tokens": x["tokens"]} if "words" in x else {"bias": x.get("bias"), "top_k": how["top_k"]}
    )
    weights, chosen = route(x["logits"], **of, score=how["score"], temperature=0.5, implementation=i)
    return weights, chosen.astype(jnp.float32)


Q, SINK = {"q": "bshd"}, {"sink": "h"}
OPS: dict[str, Callable[..., Any]] = {
    "fmha": _fmha,
    "sparse_fmha": _sparse,
    "dsv4_attention": _layer,
    "dsv4_decode": _decode,
    "mla_decode": _latent_step,
    "gqa_decode": _heads_step,
    "merge": _merge,
    "dot_product_attention": _drop_in,
    "lightning_indexer": _indexer,
    "indexer_scores": _scores,
    "hyper_connection": _connections,
    "route": _route,
    "fused_moe": _experts,
}


def axes_of(op: str, how: Mapping[str, Any]) -> dict[str, str]:
    """The operands of a call."""
    sink = SINK if how.get("sink") else {}
    length = {"length": "bs"} if how.get("length") else {}
    rows = {"indices": "bsx", **length} if how.get("indices") else {}
    some = {name: "b" for name in ("lengths", "lengths2", "offset", "offset2") if how.get(name)}
    if op == "fmha":
        ends = {"start": how["start"], "stop": how["stop"]} if how["span"] == "given" else {}
        needs = {"causal": {"offset": "b"}, "window": {"offset": "b", "lengths": "b"}}.get(how["span"], {})
        return {**Q, "k": "btkd", **({"v": "btkd"} if how["v"] else {}), **ends, **needs, **sink}
    if op == "sparse_fmha":
        return {**Q, "kv": "td" if how["pool"] else "btd", "indices": "bsx", **length, **sink}
    if op == "dsv4_attention":
        return {**Q, "window": "btd", **({"compressed": "bcd", **rows} if how["compressed"] else {}), **some, **sink}
    if op == "dsv4_decode":
        one, two, table = ("ned", "ned", {"table": "bp"}) if how["paged"] else ("btd", "bcd", {})
        far = {"compressed": two, **rows} if how["compressed"] else {}
        return {
            **Q,
            "window": one,
            **far,
            **table,
            "lengths": "b",
            **({"offset": "b"} if how.get("offset") else {}),
            **sink,
        }
    if op == "mla_decode":
        cache = {"window": "ned", "table": "bp"} if how.get("paged") else {"window": "btd"}
        return {**Q, **cache, **rows, "lengths": "b", **({"offset": "b"} if how.get("offset") else {}), **sink}
    if op == "gqa_decode":
        entries, tables = ("nej", {"table": "bp", "table2": "bp"}) if how.get("paged") else ("btj", {})
        return {**Q, "keys": entries, "values": entries, **tables, "lengths": "b", **some, **sink}
    if op == "merge":
        return {**Q, "lse": "bsh", "q2": "bshd", "lse2": "bsh", **sink}
    if op == "dot_product_attention":
        return {**Q, "k": "btkd", "v": "btkd", **some, **sink}
    if op == "hyper_connection":
        taken = {"taken": "bsu"} if how["taken"] else {}
        tokens = {"x": "bsum", "y": "bsm", "post": "bsu", "mix": "bsug", **taken}
        return {**tokens, "fn": "wr", "scale": "i", "base": "w", "norm": "m"}
    if op == "route":
        of_choice = {"words": "nx", "tokens": "bs"} if how["table"] else {"bias": "w"} if how["bias"] else {}
        return {"logits": "bsiw" if how["parts"] else "bsw", **of_choice}
    if op == "fused_moe":
        return {"x": "bsf", "chosen": "bsx", "weights": "bsx"}
    scored = {**Q, "k": "bcd", "weights": "bsh"}
    return {**scored, **some} if op == "lightning_indexer" else {**scored, "indices": "bsx"}


def hows(op: str) -> st.SearchStrategy[dict[str, Any]]:
    yes, ends = st.booleans(), st.sampled_from(["bs", "b1", "1s", "s", "11"])
    rows = {"sink": yes, "indices": yes, "length": yes}
    layer = {**rows, "compressed": yes, "ratio": st.sampled_from([1, 4]), "window": st.sampled_from([1, 3])}
    table: dict[str, dict[str, Any]] = {
        "fmha": {
            "sink": yes,
            "v": yes,
            "span": st.sampled_from(["none", "given", "causal", "window", "compressed", "ints"]),
            "start": ends,
            "stop": ends,
        },
        "sparse_fmha": {**rows, "pool": yes},
        "dsv4_attention": {
            **layer,
            "spans": yes,
            **dict.fromkeys(("lengths", "offset", "offset2"), yes),
        },
        "dsv4_decode": {**layer, "paged": yes, "causal": yes, "offset": yes},
        "mla_decode": {"part": yes, **dict.fromkeys(("paged", "indices", "length", "offset", "sink"), yes)},
        "gqa_decode": {"window": st.sampled_from([None, 1, 3]), **dict.fromkeys(("paged", "offset", "sink"), yes)},
        "merge": {"sink": yes},
        "dot_product_attention": {
            "sink": yes,
            "causal": yes,
            "local": st.sampled_from([None, 2, (0, 3)]),
            "lengths": yes,
            "lengths2": yes,
        },
        "lightning_indexer": {"topk": st.integers(1, 9), "lengths": yes, "offset": yes},
        "indexer_scores": {},
        "hyper_connection": {"taken": yes, "iterations": st.integers(1, 4)},
        "route": {
            **dict.fromkeys(("table", "bias", "parts"), yes),
            "top_k": st.integers(1, 5),
            "score": st.sampled_from(["sqrtsoftplus", "sigmoid"]),
        },
        "fused_moe": {"limit": st.sampled_from([None, 2.0])},
    }
    return st.fixed_dictionaries(table[op])


# Operands


def operands(case: Case) -> Operands:
    """The operands of one call, with an axis in front for every transform that maps one, the outermost first."""
    rng, sizes = np.random.default_rng(case.seed), {**case.sizes, "1": 1}
    ends = {
        "start": (-2, 4),
        "stop": (2, sizes["t"] + 3),
        "indices": (-2, max(sizes["t"], sizes["c"])),
        "length": (-1, sizes["x"] + 2),
        "lengths": (-1, sizes["t"] + 4),
        "offset": (-3, 12),
        "table": (-1, sizes["n"]),
        "table2": (-1, sizes["n"]),
        "chosen": (-1, 3),
        "words": (0, sizes["w"]),
        "tokens": (-1, sizes["n"] + 1),
    }
    made = {}
    for name, axes in axes_of(case.op, case.how).items():
        leading = [N for of in reversed(case.transforms) if name in mapped_by(of)]
        shape = (*leading, *(sizes[a] for a in axes))
        if (kind := name.rstrip("2")) in INTEGERS:
            made[name] = rng.integers(*ends[kind], shape, dtype=np.int32)
        elif case.op in ("lightning_indexer", "indexer_scores"):
            made[name] = rng.integers(-3, 4, shape).astype(np.float32)  # exact, in any order of sums
        else:
            made[name] = rng.standard_normal(shape).astype(np.float32)
            if kind in ("lse", "sink"):
                made[name][rng.random(shape) < 0.1] = -np.inf
            elif case.dtype != "float32" and kind not in FP32:
                made[name] = made[name].astype(case.dtype)
    return made


def mapped_by(transform: str) -> list[str]:
    """The operands: transforms that map read "vmap q sink"."""
    return transform.split()[1:]


def differentiable(names: Any) -> tuple[int, ...]:
    return tuple(i for i, name in enumerate(names) if name.rstrip("2") not in INTEGERS)


# What is computed


def call(case: Case, implementation: str | None, names: tuple[str, ...]) -> Callable[..., Any]:
    """A function of the operands in the order of their names."""
    return lambda *xs: OPS[case.op](implementation, case.how, dict(zip(names, xs, strict=True)))


def transformed(f: Callable[..., Any], transform: str, names: tuple[str, ...]) -> Callable[..., Any]:
    kind, is_mapped = transform.split()[0], [name in mapped_by(transform) for name in names]
    if kind == "checkpoint":
        return jax.checkpoint(f)
    if kind == "vmap":
        return jax.vmap(f, in_axes=tuple(0 if m else None for m in is_mapped))

    def scanned(*xs: Any) -> Any:
        def step(_: Any, given: Any) -> Any:
            each = iter(given)
            return None, f(*(next(each) if m else x for x, m in zip(xs, is_mapped, strict=True)))

        return jax.lax.scan(step, None, [x for x, m in zip(xs, is_mapped, strict=True) if m])[1]

    return scanned


def one_by_one(f: Callable[..., Any], transform: str, names: tuple[str, ...]) -> Callable[..., Any]:
    """The meaning of the transform, without it."""
    if not mapped_by(transform):
        return f

    def looped(*xs: Any) -> Any:
        of = lambda i: (x[i] if name in mapped_by(transform) else x for name, x in zip(names, xs, strict=True))  # noqa: E731
        return jax.tree.map(lambda *ys: jnp.stack(ys), *(f(*of(i)) for i in range(N)))

    return looped


def with_gradient(case: Case, f: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """The results, or the gradient of a number that every element of the results enters with a different weight."""

    def loss(*xs: Any) -> jax.Array:
        total = jnp.float32(0)
        for y in f(*xs):
            size = math.prod(y.shape[-3:]) if not case.symbolic else 1
            weights = jnp.cos(jnp.arange(size, dtype=jnp.float32)).reshape(y.shape[-3:] if not case.symbolic else ())
            total += jnp.sum(jnp.where(jnp.isinf(y), 0, y).astype(jnp.float32) * weights)
        return total

    return jax.grad(loss, differentiable(names)) if case.gradient else f


def place(case: Case, name: str, x: Any, mesh: Any) -> Any:
    axes, layout = axes_of(case.op, case.how)[name], dict(case.layout)
    leading = x.ndim - len(axes)
    entries = [layout.get(a) if n > 1 else None for a, n in zip(axes, x.shape[leading:], strict=True)]
    spec = P() if name in case.replicated else P(*[None] * leading, *entries)
    return jax.device_put(x, NamedSharding(mesh, spec))


def check(case: Case) -> None:
    x = operands(case)
    names = tuple(x)
    f, want = call(case, None, names), jax.jit(call(case, "reference", names))
    for transform in case.transforms:
        f, want = transformed(f, transform, names), one_by_one(want, transform, names)
    f, want = with_gradient(case, f, names), with_gradient(case, want, names)
    given = [jnp.asarray(y) for y in x.values()]
    wanted = want(*given)
    scope = contextlib.ExitStack()
    with scope:
        if case.x64:
            scope.enter_context(jax.enable_x64(True))
        if case.kinds:
            kinds = tuple(getattr(AxisType, kind) for kind in case.kinds)
            mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=kinds, devices=jax.devices("cpu")[:4])
            given = [place(case, name, y, mesh) for name, y in zip(names, given, strict=True)]
            if case.set_mesh:
                scope.enter_context(jax.set_mesh(mesh))
        if case.symbolic:
            f = exported(case, f, x)
        got = (jax.jit(f) if case.jit else f)(*given)
    compare(case, got, wanted)


def exported(case: Case, f: Callable[..., Any], x: Operands) -> Callable[..., Any]:
    symbols = dict(zip(case.symbolic, jax.export.symbolic_shape(", ".join(case.symbolic)), strict=True))
    like = []
    for name, axes in axes_of(case.op, case.how).items():
        leading = x[name].shape[: x[name].ndim - len(axes)]
        own = [symbols.get(a, n) for a, n in zip(axes, x[name].shape[len(leading) :], strict=True)]
        like.append(jax.ShapeDtypeStruct((*leading, *own), x[name].dtype))
    made = jax.export.export(jax.jit(f), platforms=["cpu"], disabled_checks=EXPORT_CHECKS)(*like)
    return lambda *xs: made.call(*xs)


def compare(case: Case, got: Any, want: Any) -> None:
    tolerance = 5e-5 if case.dtype == "float32" else 2.0**-5
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert (g.shape, g.dtype) == (w.shape, w.dtype), i
        g, w = np.asarray(g, np.float32), np.asarray(w, np.float32)
        np.testing.assert_array_equal(np.isinf(g), np.isinf(w), err_msg=f"result {i}")
        g, w = np.where(np.isinf(g), 0, g), np.where(np.isinf(w), 0, w)
        assert np.isfinite(w).all(), i
        np.testing.assert_allclose(g, w, rtol=0, atol=tolerance * max(1, np.abs(w).max(initial=0)), err_msg=f"{i}")


# What is drawn


@st.composite
def cases(draw: st.DrawFn, op: str) -> Case:
    how = draw(hows(op))
    if op == "dsv4_decode":
        how["ratio"] = how["ratio"] if how["compressed"] else None
        how["window"] = how["window"] if how["causal"] else 1  # a ring has room for one token more
    if op == "dsv4_attention" and not how["compressed"]:
        how["ratio"] = None
    is_indexer = "index" in op
    kinds = draw(st.just(()) | st.tuples(*[st.sampled_from(["Auto", "Explicit"])] * 2))
    symbolic = "" if kinds else draw(st.sampled_from(["", "", "b", "bs", "bst", "bstc"]))
    set_mesh = bool(kinds) and draw(st.booleans())
    gradient = op not in ("dsv4_decode", "mla_decode", "gqa_decode", "lightning_indexer", "fused_moe") and draw(
        st.booleans()
    )
    # outside of jit, JAX's own code that makes numbers wants a set mesh: in `loss` and around `jax.lax.scan`
    needs_jit = bool(symbolic) or ("Explicit" in kinds and not set_mesh and gradient)
    even = st.sampled_from([2, 4])
    sizes = {a: draw(even) for a in "bs"} if kinds else {a: draw(st.integers(1, 5)) for a in "bs"}
    sizes |= {"k": draw(st.sampled_from([1, 2])), "d": draw(st.sampled_from([4, 8])), "t": draw(st.integers(7, 9))}
    sizes |= {"h": draw(st.sampled_from([2, 4])), "c": draw(st.integers(1, 5)), "x": draw(st.integers(1, 4))}
    sizes |= {"p": 3, "n": draw(st.integers(3, 7)), "e": 3, "j": 2 * sizes["d"], **OF_A_MODEL}
    names = list(axes_of(op, how))
    transforms = []
    for kind in draw(st.lists(st.sampled_from(["checkpoint", "vmap", "scan"]), max_size=2)):
        some = draw(st.lists(st.sampled_from(names), min_size=1, unique=True)) if kind != "checkpoint" else []
        transforms.append(" ".join([kind, *some]))
    layout = []
    if kinds:
        free = draw(st.permutations(["data", "model"]))
        whole = "s" if how.get("pool") else "h" if is_indexer and "Explicit" in kinds else ""  # otherwise it is refused
        splits = draw(st.permutations([a for a in "bsh" if a != whole]))
        layout = list(zip(splits, free[: draw(st.integers(0, 2))], strict=False))
        layout += [("k", axis) for a, axis in layout if a == "h" and sizes["k"] == 2]
    return Case(
        op,
        sizes,
        how,
        tuple(transforms),
        gradient=gradient,
        jit=needs_jit or draw(st.sampled_from([True, True, False])),
        kinds=kinds,
        layout=tuple(layout),
        replicated=tuple(draw(st.lists(st.sampled_from(names), unique=True, max_size=2))) if kinds else (),
        set_mesh=set_mesh,
        x64=draw(st.booleans()),
        symbolic=symbolic,
        dtype=draw(st.sampled_from(["float32", "float32", "bfloat16"])) if not is_indexer else "float32",
        seed=draw(st.integers(0, 2**20)),
    )


@pytest.fixture(autouse=True)
def programs_are_not_kept():
    """Each is compiled for one run."""
    yield
    jax.clear_caches()


SIZES = {"b": 2, "s": 4, "t": 9, "h": 4, "k": 2, "d": 4, "c": 3, "x": 3, "p": 3, "n": 5, "e": 3, "j": 8, **OF_A_MODEL}
BATCH_HEADS = (("b", "data"), ("h", "model"), ("k", "model"))
KEPT = [
    Case(
        "fmha",
        SIZES,
        {"span": "given", "start": "b1", "stop": "s", "v": True, "sink": True},
        ("vmap k start sink",),
        gradient=True,
        kinds=("Auto", "Explicit"),
        layout=BATCH_HEADS,
        replicated=("v",),
        x64=True,
    ),
    Case("fmha", SIZES, {"span": "window", "v": False, "sink": False}, symbolic="bst", x64=True, seed=1),
    Case(
        "sparse_fmha",
        SIZES,
        {"pool": True, "length": True, "sink": True},
        ("scan indices",),
        gradient=True,
        kinds=("Explicit", "Explicit"),
        layout=(("b", "data"),),
        set_mesh=True,
    ),
    Case(
        "dsv4_attention",
        SIZES,
        {"compressed": True, "indices": True, "ratio": 4, "window": 3, "spans": True, "offset": True},
        kinds=("Auto", "Auto"),
        layout=(("s", "data"), ("h", "model")),
        dtype="bfloat16",
    ),
    Case(
        "dsv4_decode",
        SIZES | {"s": 2},
        {"compressed": True, "paged": True, "ratio": 1, "window": 3, "sink": True},
        ("vmap q table",),
        jit=False,
    ),
    Case(  # how many indices count was an int64
        "mla_decode",
        SIZES | {"s": 2},
        {"indices": True, "paged": True, "part": True, "offset": True},
        kinds=("Auto", "Auto"),
        layout=(("b", "data"),),
        x64=True,
    ),
    Case(  # outside of jit, on a mesh that is not set
        "mla_decode",
        SIZES | {"s": 2},
        {"indices": True},
        ("vmap q lengths window",),
        jit=False,
        kinds=("Explicit", "Explicit"),
        layout=(("b", "model"),),
    ),
    Case(
        "gqa_decode",
        SIZES | {"s": 2},
        {"paged": True, "window": 3, "sink": True, "offset": True},
        ("vmap values table2",),
        kinds=("Auto", "Explicit"),
        layout=BATCH_HEADS[:2],
        x64=True,
    ),
    Case("merge", SIZES, {"sink": True}, ("vmap sink",), gradient=True, x64=True),
    Case(
        "dot_product_attention",
        SIZES,
        {"causal": True, "local": (0, 3), "lengths": True},
        symbolic="bs",
        x64=True,
        dtype="bfloat16",
    ),
    Case("lightning_indexer", SIZES, {"topk": 5, "lengths": True}, ("vmap q", "scan k"), x64=True),
    Case(  # zeros like a sharded array, outside of jit
        "dsv4_attention",
        SIZES,
        {"compressed": True, "ratio": 4, "window": 3, "spans": False, "offset": True},
        ("checkpoint",),
        jit=False,
        kinds=("Explicit", "Auto"),
        layout=(("b", "data"),),
        seed=17628,
    ),
    Case(  # a jax.shard_map outside of jit, over one of two axes, under vmap
        "indexer_scores",
        SIZES,
        {},
        ("checkpoint", "vmap q"),
        jit=False,
        kinds=("Explicit", "Auto"),
        layout=(("b", "data"),),
        replicated=("q",),
        set_mesh=True,
        seed=28055,
    ),
    Case(
        "hyper_connection",
        SIZES,
        {"taken": True, "iterations": 3},
        ("vmap x fn",),
        gradient=True,
        kinds=("Explicit", "Auto"),
        layout=(("b", "data"), ("s", "model")),
        set_mesh=True,
        x64=True,
    ),
    Case("route", SIZES, {"table": False, "bias": True, "parts": True, "top_k": 3, "score": "sigmoid"}, symbolic="bs"),
    Case(
        "route",
        SIZES,
        {"table": True, "parts": True, "score": "sqrtsoftplus"},
        ("checkpoint", "vmap logits words"),
        gradient=True,
        kinds=("Explicit", "Auto"),
        layout=(("b", "data"), ("s", "model")),
        set_mesh=True,
        x64=True,
    ),
    Case("fused_moe", SIZES, {"limit": 2.0}, symbolic="bs"),  # the length of an axis that is a symbol
    Case("fused_moe", SIZES, {"limit": 2.0}, ("scan x",), x64=True, seed=1),  # scales were float64
]


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("case", KEPT, ids=str)
def test_kept(case):
    check(case)


@pytest.mark.fuzz
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("op", OPS)
@settings.get_profile("fuzz")
@given(data=st.data())
def test_fuzz(op, data):
    check(data.draw(cases(op)))
