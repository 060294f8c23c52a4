"""Hyper-connections between two sublayers: the definition, errors, transformations, and the kernel on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from interpreter.kernels import native
from jax_dsv4_fmha import EXPORT_CHECKS, HyperConnection, explain, hyper_connection
from jax_dsv4_fmha._host.hyper_connection import MOST_ITERATIONS
from jax_dsv4_fmha._testing import hyper_connection as cases
from jax_dsv4_fmha._testing.cases import MODEL
from jax_dsv4_fmha._testing.hyper_connection import (
    EPS,
    HC_EPS,
    ITERATIONS,
    HyperConnectionCase,
    Problem,
    complaints,
    complaints_of_gradients,
    operands,
    results,
)
from kernels.abi import HyperConnection as Variant
from kernels.abi import HyperConnectionBackward
from kernels.variants import VARIANTS
from tests.helpers import collectives
from tests.transformed import KINDS

HOW = {"iterations": ITERATIONS, "eps": EPS, "hc_eps": HC_EPS}
HIDDEN = [v.hidden for v in VARIANTS if isinstance(v, Variant)]
CASES = [case for case in MODEL if isinstance(case, HyperConnectionCase)]


@pytest.mark.parametrize("is_taken", [False, True])
def test_definition(is_taken):
    x = Problem.of(6, 32, is_taken)
    given, taken = operands(x, b=2)
    assert complaints(x, results(hyper_connection(*given, taken=taken, **HOW))) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_check_s_cases(case):
    assert case.complaints("reference") == []


@pytest.mark.parametrize(
    ("fault", "says"),
    [({"eps": 0.1}, "z: "), ({"iterations": 1}, "new_mix: "), ({"taken": None}, "z: "), ({"hc_eps": 0.0}, "new_mix: ")],
    ids=str,
)
def test_check_finds_what_is_wrong(monkeypatch, fault, says):
    right, taking = hyper_connection, next(case for case in CASES if case.features)
    monkeypatch.setattr(cases, "hyper_connection", lambda *given, **how: right(*given, **how | fault))
    assert any(complaint.startswith(says) for complaint in taking.complaints("reference"))


def test_a_mix_is_doubly_stochastic():
    given, _ = operands(Problem.of(3, 16))
    mix = hyper_connection(*given).mix
    np.testing.assert_allclose(mix.sum(-1), 1, atol=1e-3)
    np.testing.assert_allclose(mix.sum(-2), 1, atol=1e-5)


def test_transformations():
    given, _ = operands(Problem.of(4, 16))
    run = functools.partial(hyper_connection, **HOW)
    want = run(*given)
    for got in (jax.jit(run)(*given), jax.tree.map(lambda a: a[1], over_two(run, given))):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2**-7, atol=1e-5)


@pytest.mark.skipif(not native.built(Variant), reason="without kernels")
def test_vmap_does_not_run_the_definition_in_a_kernel_s_place():
    given, _ = operands(Problem.of(2, HIDDEN[0]))
    run = functools.partial(hyper_connection, implementation="cubin")
    with pytest.raises(NotImplementedError, match=r"implementation: got 'cubin' under jax\.vmap, wanted None"):
        over_two(run, given)


def over_two(run, given):
    tokens = [jnp.stack([a, a]) for a in given[:4]]
    return jax.vmap(run, (0,) * 4 + (None,) * 4)(*tokens, *given[4:])


def test_gradient_is_that_of_the_definition():
    given, taken = operands(Problem.of(4, 16, is_taken=True))
    given = tuple(a.astype(jnp.float32) for a in given)

    def loss(how, *given, taken):
        return sum(jnp.square(a).sum() for a in hyper_connection(*given, taken=taken, **HOW, **how))

    of = [
        jax.grad(functools.partial(loss, how, taken=taken), range(8)) for how in ({}, {"implementation": "reference"})
    ]
    for got, want in zip(of[0](*given), of[1](*given), strict=True):
        assert np.abs(want).max() > 0
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    step = 1e-2 * jnp.sign(of[0](*given)[4])
    near = [loss({}, *given[:4], given[4] + s * step, *given[5:], taken=taken) for s in (1, -1)]
    np.testing.assert_allclose((near[0] - near[1]) / 2, (of[0](*given)[4] * step).sum(), rtol=2e-2)


@pytest.mark.parametrize("is_taken", [False, True])
def test_gradients_are_right(is_taken):
    x = Problem.of(6, 32, is_taken)
    x = dataclasses.replace(x, x=x.x.astype(np.float32), y=x.y.astype(np.float32))
    made, found = gradients_of(x, b=2)
    assert complaints_of_gradients(x, made["new_x"], x.cotangents(), found) == []


def gradients_of(x, b=1, implementation=None):
    """The results, and the gradients by operands' names."""
    given, taken = operands(x, b)

    def run(taken, *given):
        return hyper_connection(*given, taken=taken, implementation=implementation, **HOW)

    @jax.jit
    def both(*given):
        made, back = jax.vjp(run, *given)
        of = (jnp.asarray(c).reshape(a.shape) for a, c in zip(made, x.cotangents(), strict=True))
        return made, back(HyperConnection(*of))

    made, (dtaken, *rest) = both(taken, *given)
    found = dict(zip(("x", "y", "post", "mix", "fn", "scale", "base", "norm"), rest, strict=True))
    found["taken"] = jnp.zeros(x.taken.shape) if taken is None else dtaken
    right = {name: np.asarray(a).reshape(getattr(x, name).shape) for name, a in found.items()}
    return results(made), right


@pytest.mark.skipif(not native.built(HyperConnectionBackward), reason="without kernels")
@pytest.mark.parametrize(
    ("iterations", "parts"), [(MOST_ITERATIONS, ["forward", "gradient"]), (MOST_ITERATIONS + 1, ["forward"])]
)
def test_which_gradients_have_kernels(iterations, parts):
    """The definition leaves no mark in `explain`."""
    given, _ = operands(Problem.of(2, HIDDEN[0]))

    def loss(*given):
        return hyper_connection(*given, iterations=iterations).z.astype(jnp.float32).sum()

    found = explain(jax.grad(loss), *given)
    assert [decision.part for decision in found] == parts
    assert all("hyper_connection" in decision.reason for decision in found)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_over_devices(kind):
    """Each device adds up what its tokens say of the parameters, and then all do."""
    given, taken = operands(Problem.of(8, HIDDEN[0], is_taken=True), b=4)
    mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=(KINDS[kind],) * 2)

    def loss(*given, taken):
        return sum(jnp.square(a.astype(jnp.float32)).sum() for a in hyper_connection(*given, taken=taken, **HOW))

    gradient = jax.jit(jax.grad(loss, range(8)))
    by_tokens, whole = (NamedSharding(mesh, spec) for spec in (P("data", "context"), P()))
    placed = [jax.device_put(a, by_tokens if i < 4 else whole) for i, a in enumerate(given)]
    with jax.set_mesh(mesh):
        got = gradient(*placed, taken=jax.device_put(taken, by_tokens))
    for a, b in zip(got, gradient(*given, taken=taken), strict=True):
        b = np.asarray(b, np.float32)
        np.testing.assert_allclose(np.asarray(a, np.float32), b, rtol=2**-6, atol=1e-4 * np.abs(b).max())


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("is_taken", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_devices_share_out_tokens(kind, is_taken):
    given, taken = operands(Problem.of(8, HIDDEN[0], is_taken), b=4)
    mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=(KINDS[kind],) * 2)

    def run(*given, taken=None):
        return hyper_connection(*given, taken=taken, **HOW)

    by_tokens, whole = (NamedSharding(mesh, spec) for spec in (P("data", "context"), P()))
    placed = [jax.device_put(a, by_tokens if i < 4 else whole) for i, a in enumerate(given)]
    part = {"taken": jax.device_put(taken, by_tokens)} if is_taken else {}
    with jax.set_mesh(mesh):
        program = jax.jit(run).lower(*placed, **part).compile()
        got = program(*placed, **part)
    assert collectives(program) == {}
    assert all(a.sharding.is_equivalent_to(by_tokens, a.ndim) for a in got)
    for a, b in zip(got, run(*given, taken=taken), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2**-7, atol=1e-5)


@pytest.mark.usefixtures("built")
def test_parameters_over_devices_are_refused():
    """Where types know of the sharding: each device needs fn whole."""
    given, _ = operands(Problem.of(8, HIDDEN[0]), b=4)
    mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=(KINDS["Explicit"],) * 2)
    fn = jax.device_put(given[4], NamedSharding(mesh, P(None, "data")))
    with pytest.raises(ValueError, match="fn: got streams sharded over data, wanted that axis whole"):
        jax.jit(hyper_connection)(*given[:4], fn, *given[5:])


@pytest.mark.skipif(not native.built(Variant), reason="without kernels")
def test_the_call_is_exported():
    given, _ = operands(Problem.of(2, HIDDEN[0]))
    (decision,) = explain(hyper_connection, *given)
    assert "hyper_connection" in decision.reason
    exported = jax.export.export(jax.jit(hyper_connection), platforms=["cuda"], disabled_checks=EXPORT_CHECKS)(*given)
    assert "dsv4_fmha_hyper_connection" in exported.mlir_module()


def test_errors():
    given, _ = operands(Problem.of(2, 16))
    x, y, post, mix, fn, scale, base, norm = given
    cases = [
        ((x[:, :, :3], *given[1:]), "x"),
        ((x, y[..., :8], *given[2:]), "y"),
        ((x, y.astype(jnp.float32), *given[2:]), "y"),
        ((x, y, post[..., :2], *given[3:]), "post"),
        ((x, y, post, mix[..., :2], *given[4:]), "mix"),
        ((x, y, post, mix, fn.T, *given[5:]), "fn"),
        ((x, y, post, mix, fn, scale[:2], base, norm), "scale"),
        ((x, y, post, mix, fn, scale, base[:4], norm), "base"),
        ((x, y, post, mix, fn, scale, base, norm[:4]), "norm"),
        ((x, y, post, mix, fn.astype(jnp.bfloat16), scale, base, norm), "fn"),
    ]
    for args, name in cases:
        with pytest.raises((ValueError, TypeError), match=rf"hyper_connection: {name}: got"):
            hyper_connection(*args)
    for how in ({"iterations": 0}, {"iterations": 2.5}, {"eps": -1.0}, {"hc_eps": "3"}, {"taken": post[..., :1]}):
        with pytest.raises((ValueError, TypeError), match=next(iter(how))):
            hyper_connection(*given, **how)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("tokens", [1, 37, 300, 1111])  # the last: four tiles and more for a cluster
@pytest.mark.parametrize("is_taken", [False, True])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_kernel(hidden, is_taken, tokens):
    x = Problem.of(tokens, hidden, is_taken)
    given, taken = operands(x)
    run = jax.jit(functools.partial(hyper_connection, implementation="cubin", **HOW))
    assert complaints(x, results(run(*given, taken=taken))) == []


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("tokens", [1, 37, 300, 1111])
@pytest.mark.parametrize("is_taken", [False, True])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_kernels_of_the_gradient(hidden, is_taken, tokens):
    x = Problem.of(tokens, hidden, is_taken)
    made, found = gradients_of(x, implementation="cubin")
    assert complaints_of_gradients(x, made["new_x"], x.cotangents(), found, 2**-13) == []


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_gradients_have_the_same_bits_again():
    """All of them in another run, and a token's in any batch."""
    x = Problem.of(200, HIDDEN[0])
    _, first = gradients_of(x)
    _, again = gradients_of(x)
    assert all(first[name].tobytes() == again[name].tobytes() for name in first)
    part = dataclasses.replace(x, **{name: getattr(x, name)[:37] for name in ("x", "y", "post", "mix", "taken")})
    cotangents = tuple(a[:37] for a in x.cotangents())
    object.__setattr__(part, "cotangents", lambda: cotangents)
    _, of_part = gradients_of(part)
    for name in ("x", "y", "post", "mix"):
        assert of_part[name].tobytes() == first[name][:37].tobytes()


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_a_token_has_the_same_bits_in_any_batch():
    given, _ = operands(Problem.of(200, HIDDEN[0]))
    run = jax.jit(functools.partial(hyper_connection, implementation="cubin"))
    whole = run(*given)
    for part in (slice(0, 1), slice(5, 30), slice(100, 164)):
        for a, b in zip(run(*(a[:, part] for a in given[:4]), *given[4:]), whole, strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b[:, part]).tobytes()
