"""A router after its product: the definition against float64, ties, gradients, meshes, errors, the kernel on a GPU."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from interpreter.kernels import native
from jax_dsv4_fmha import EXPORT_CHECKS, explain, route
from jax_dsv4_fmha._definitions.router import SCORES
from jax_dsv4_fmha._host import route as raw
from jax_dsv4_fmha._testing import router as cases
from jax_dsv4_fmha._testing.cases import MODEL
from jax_dsv4_fmha._testing.router import Problem, RouteCase, complaints, routed
from kernels import abi
from kernels.abi import Route
from tests.helpers import collectives
from tests.transformed import KINDS

CASES = [case for case in MODEL if isinstance(case, RouteCase)]
PROBLEMS = {
    "a token": lambda: Problem.of(1),
    "a step": lambda: Problem.of(64),
    "a step of V4-Pro": lambda: Problem.of(17, 384),
    "a prompt": lambda: Problem.of(4099),
    "a logit of one part, by a sigmoid": lambda: Problem.of(33, 256, 8, parts=1, is_sigmoid=True),
    "two parts": lambda: Problem.of(5, 100, 4, parts=2),
    "a table": lambda: Problem.of(70, vocabulary=500),
    "a table, by a sigmoid": lambda: Problem.of(3, 12, 12, vocabulary=5, is_sigmoid=True),
    "few experts": lambda: Problem.of(3, 4, 1),
    "all experts": lambda: Problem.of(2, 32, 32),
    "most of all": lambda: Problem.of(9, 512, 32),
}


def results(x, **how):
    run = jax.jit(functools.partial(routed, x, **how))
    return tuple(np.asarray(a[0]) for a in run(jnp.asarray(x.logits)[None]))


def at_the_ends(e=256):
    """Tokens with logits that are not finite, one after the other, and biases of -inf but for a few experts."""
    x = Problem.of(40, e)
    for token, value in enumerate((np.nan, np.inf, -np.inf)):
        x.logits[token, 0, [5, 77]] = value
        x.logits[8 + token] = value
    x.logits[3, 0, [3, 9]] = np.inf, np.nan
    x.logits[4] *= 10
    x.logits[5, 0] -= 40  # small scores
    bias = x.bias.copy()
    bias[[4, 50]] = np.inf, -np.inf
    return x, replace(x, bias=bias), replace(x, bias=np.where(np.arange(e) < e - 3, -np.inf, 0).astype(np.float32))


def ties():
    """Sums that are equal, and the experts that win by their numbers."""
    x = Problem.of(3, 300, 32)
    x.logits[:], x.bias[:] = 0.5, 0
    x.bias[[290, 7, 130, 39, 263]] = 1, 1, 2, 1, 2
    first = [130, 263, 7, 39, 290]
    return x, [*first, *[expert for expert in range(300) if expert not in first][:27]]


@pytest.mark.parametrize("case", PROBLEMS)
def test_definition(case):
    x = PROBLEMS[case]()
    assert complaints(x, *results(x)) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_check_s_cases(case):
    assert case.complaints("reference") == []


@pytest.mark.parametrize(
    ("fault", "says"),
    [({"temperature": 1.0}, "token|weights"), ({"scale": 1.0}, "weights"), ({"score": "sigmoid"}, "token|weights")],
    ids=str,
)
@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=lambda case: case.id)
def test_check_finds_what_is_wrong(monkeypatch, case, fault, says):
    monkeypatch.setattr(cases, "route", lambda *given, **how: route(*given, **how | fault))
    (found,) = case.complaints("reference")
    assert any(word in found for word in says.split("|")), found


def test_check_finds_another_choice():
    x = Problem.of(4)
    weights, chosen = results(x)
    chosen = chosen.copy()
    chosen[2, [4, 5]] = chosen[2, [5, 4]]
    assert complaints(x, weights, chosen)[0].startswith("experts of token 2 are")
    assert "are wrong" in complaints(x, weights[:, ::-1], results(x)[1])[0]


def test_of_equal_sums_the_lower_number_is_first():
    x, want = ties()
    assert (results(x)[1] == want).all()


def test_what_is_not_finite():
    for x in at_the_ends():
        assert complaints(x, *results(x)) == []


def test_nan_of_either_sign_is_first():
    bias = jnp.array([0.0, jnp.inf, -jnp.nan, 1.0, jnp.nan])
    weights, chosen = route(jnp.zeros((1, 1, 5)), bias, top_k=4)
    assert chosen[0, 0].tolist() == [2, 4, 1, 3]
    np.testing.assert_allclose(weights, 0.25, rtol=1e-6)  # a bias has no say in them


def test_without_a_bias():
    x = Problem.of(4)
    for got, want in zip(route(x.logits[None], top_k=6), route(x.logits[None], jnp.zeros(256), top_k=6), strict=True):
        np.testing.assert_array_equal(got, want)


def test_parts_are_added_from_the_last_on():
    parts = jnp.array([1.0, 2**-24, 2**-24])[None, None, :, None] * jnp.ones((1, 1, 3, 2))
    wanted = np.float32(1 + 2**-23)
    weights, _ = route(parts.at[..., 1].set(0), top_k=2, score="sigmoid", scale=1.0)
    want, _ = route(jnp.array([[[wanted, 0]]]), top_k=2, score="sigmoid", scale=1.0)
    np.testing.assert_array_equal(weights, want)


def without_a_row():
    """Tokens that the table has no row for, and experts that do not exist."""
    x = Problem.of(6, vocabulary=9)
    tokens = np.array([-1, 9, 2**31 - 1, -(2**31), 4, 5], np.int32)
    table = x.table.copy()
    table[4, 2], table[5, 0] = -1, 256
    return replace(x, table=table, tokens=tokens)


def test_tables_have_no_bounds():
    x = without_a_row()
    weights, chosen = results(x)
    assert complaints(x, weights, chosen) == []
    assert np.isnan(weights[4:]).all() and np.isfinite(weights[:4]).all()
    np.testing.assert_array_equal(chosen[:4], x.table[[0, 8, 8, 0]])


@pytest.mark.parametrize("vocabulary", [0, 9])
@pytest.mark.parametrize("is_sigmoid", [False, True])
def test_gradient(vocabulary, is_sigmoid):
    """It is that of the definition, to which finite differences agree; a bias has none."""
    x = Problem.of(5, 16, 4, vocabulary=vocabulary, is_sigmoid=is_sigmoid)
    x = replace(x, bias=np.arange(16, dtype=np.float32))  # so that small steps lead to no other choice
    factors = jax.random.normal(jax.random.key(0), (1, 5, 4))

    def loss(logits, **how):
        return (routed(x, logits, **how)[0] * factors).sum()

    logits = jnp.asarray(x.logits)[None]
    ours, wanted = (jax.grad(functools.partial(loss, **how))(logits) for how in ({}, {"implementation": "reference"}))
    np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-7)
    assert np.abs(ours).max() > 0
    step = 1e-3 * jnp.sign(ours)
    moved = (loss(logits + step) - loss(logits - step)) / 2
    np.testing.assert_allclose(moved, (ours * step).sum(), rtol=2e-3)
    if not vocabulary:
        of_bias = jax.grad(lambda bias: route(logits, bias, top_k=4)[0][..., 0].sum())(jnp.asarray(x.bias))
        assert (of_bias == 0).all()


@pytest.mark.parametrize("vocabulary", [0, 9])
def test_transformations(vocabulary):
    x = Problem.of(6, vocabulary=vocabulary)
    run = functools.partial(routed, x)
    logits = jnp.asarray(x.logits)[None]
    want = run(logits)
    for got in (jax.jit(run)(logits), [a[1] for a in jax.vmap(run)(jnp.stack([logits] * 2))]):
        np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
        np.testing.assert_array_equal(got[1], want[1])


@pytest.mark.skipif(not native.built(Route), reason="without kernels")
def test_vmap_does_not_run_the_definition_in_a_kernel_s_place():
    run = functools.partial(route, top_k=6, implementation="cubin")
    with pytest.raises(NotImplementedError, match=r"implementation: got 'cubin' under jax\.vmap, wanted None"):
        jax.vmap(run)(jnp.zeros((2, 1, 3, 256)))


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("vocabulary", [0, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_devices_share_out_tokens(kind, vocabulary):
    """Each device routes its own tokens, of sequences and of a part of each, and nobody gathers any."""
    x = Problem.of(8, vocabulary=vocabulary)
    mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=(KINDS[kind],) * 2)
    by_tokens = NamedSharding(mesh, P("data", "context"))
    logits = jnp.asarray(x.logits).reshape(2, 4, 3, -1)

    def run(logits, tokens):
        if x.table is None:
            return route(logits, x.bias, top_k=6)
        return route(logits, table=x.table, tokens=tokens)

    tokens = jnp.zeros((2, 4), jnp.int32) if x.tokens is None else jnp.asarray(x.tokens).reshape(2, 4)
    want = run(logits, tokens)
    squares = lambda logits, tokens: (run(logits, tokens)[0] ** 2).sum()  # noqa: E731
    wanted = jax.grad(squares)(logits, tokens)
    placed = jax.device_put((logits, tokens), by_tokens)
    with jax.set_mesh(mesh):
        program = jax.jit(run).lower(*placed).compile()
        weights, chosen = program(*placed)
        grad = jax.jit(jax.grad(squares))(*placed)
    assert collectives(program) == {}
    np.testing.assert_allclose(weights, want[0], rtol=1e-5)
    np.testing.assert_array_equal(chosen, want[1])
    np.testing.assert_allclose(grad, wanted, rtol=1e-4, atol=1e-6)


def test_errors():
    logits, bias = jnp.ones((1, 2, 4)), jnp.ones(4)
    table, tokens = jnp.zeros((9, 3), jnp.int32), jnp.zeros((1, 2), jnp.int32)
    of_table = {"table": table, "tokens": tokens}
    wrong = [
        ((logits, bias), {}, "top_k and table: got neither, wanted one of them"),
        ((logits,), {"top_k": 2, **of_table}, "top_k and table: got both"),
        ((logits, bias), of_table, "bias: got .*, wanted None with a table"),
        ((logits, bias), {"top_k": 2, "tokens": tokens}, "tokens: got .*, wanted None without a table"),
        ((logits,), {"table": table}, "tokens: got None"),
        ((logits,), {"table": table, "tokens": tokens[:, :1]}, "tokens"),
        (
            (logits,),
            {"table": table[:0], "tokens": tokens},
            r"table: got int32\[0, 3\], wanted int32\[v, c\], each >= 1",
        ),
        ((logits,), {"table": table.astype(jnp.float32), "tokens": tokens}, "table"),
        ((logits, bias), {"top_k": 5}, "top_k: got 5, wanted at most e=4"),
        ((logits, bias), {"top_k": 0}, "top_k"),
        ((logits, bias[:3]), {"top_k": 2}, "bias"),
        ((logits.astype(jnp.bfloat16), bias), {"top_k": 2}, "logits"),
        ((logits[0], bias), {"top_k": 2}, r"logits: .*wanted float32\[b, s, e\]"),
        ((logits, bias), {"top_k": 2, "score": "softmax"}, "score: got 'softmax', wanted 'sqrtsoftplus' or 'sigmoid'"),
        ((logits, bias), {"top_k": 2, "temperature": 0.0}, "temperature"),
        ((logits, bias), {"top_k": 2, "scale": "2"}, "scale"),
        ((jnp.ones((1, 2, 4, 4)), bias), {"top_k": 2, "implementation": "cubin"}, "2 of 4 experts, 4 parts"),
        ((jnp.ones((1, 2, 513)),), {"top_k": 2, "implementation": "cubin"}, "up to 512 experts"),
        ((jnp.ones((1, 2, 6)),), {"top_k": 2, "implementation": "cubin"}, "in multiples of 4"),
    ]
    for args, how, says in wrong:
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=says):
            route(*args, **how)


def test_the_package_knows_what_the_kernel_takes():
    assert (raw.MOST_EXPERTS, raw.MOST_CHOSEN, raw.MOST_PARTS) == (abi.MOST_ROUTED, abi.MOST_CHOSEN, abi.MOST_PARTS)
    assert set(SCORES) == {"sqrtsoftplus", "sigmoid"}  # which ffi/route.h has too


@pytest.mark.skipif(not native.built(Route), reason="without kernels")
@pytest.mark.parametrize("vocabulary", [0, 9])
def test_the_call_is_exported(vocabulary):
    x = Problem.of(2, vocabulary=vocabulary)
    run = functools.partial(routed, x)
    logits = jnp.asarray(x.logits)[None]
    (decision,) = explain(run, logits)
    assert "6 of 256 experts, 3 parts" in str(decision)
    exported = jax.export.export(jax.jit(run), platforms=["cuda"], disabled_checks=EXPORT_CHECKS)(logits)
    assert "dsv4_fmha_route" in exported.mlir_module()


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("case", PROBLEMS)
def test_kernel(case):
    x = PROBLEMS[case]()
    assert complaints(x, *results(x, implementation="cubin")) == []


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_kernel_in_check_s_cases(case):
    assert case.complaints("cubin") == []


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_kernel_at_the_ends():
    """Ties, numbers that are not finite, tokens without a row: what the definition gives."""
    x, want = ties()
    assert (results(x, implementation="cubin")[1] == want).all()
    for x in (*at_the_ends(), *at_the_ends(384), without_a_row()):
        assert complaints(x, *results(x, implementation="cubin")) == []


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_a_token_has_the_same_bits_in_any_batch():
    x = Problem.of(600)
    weights, chosen = results(x, implementation="cubin")
    for rows in (slice(0, 1), slice(5, 9), slice(100, 164), slice(300, 599)):
        some = results(x.of_rows(rows), implementation="cubin")
        assert some[0].tobytes() == weights[rows].tobytes() and some[1].tobytes() == chosen[rows].tobytes()


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_launches_that_overlap_wait_for_one_another():
    """A program in which each router has logits of what the one before it made, and each of them alone."""
    x = Problem.of(300)

    def one(logits):
        weights, chosen = routed(x, logits, implementation="cubin")
        return logits + weights[..., :1, None], weights, chosen

    def several(logits, run):
        made = []
        for _ in range(12):
            logits, *of = run(logits)
            made.append(of)
        return made

    logits = jnp.asarray(x.logits)[None]
    together, apart = jax.jit(functools.partial(several, run=one)), functools.partial(several, run=jax.jit(one))
    for _ in range(5):
        for got, want in zip(jax.tree.leaves(together(logits)), jax.tree.leaves(apart(logits)), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("vocabulary", [0, 500])
def test_gradient_of_the_kernel(vocabulary):
    x = Problem.of(33, vocabulary=vocabulary)
    factors = jax.random.normal(jax.random.key(0), (1, 33, 6))
    loss = lambda logits, how: (routed(x, logits, implementation=how)[0] * factors).sum()  # noqa: E731
    ours, wanted = (np.asarray(jax.grad(loss)(jnp.asarray(x.logits)[None], how)) for how in ("cubin", "reference"))
    np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-6 * np.abs(wanted).max())
