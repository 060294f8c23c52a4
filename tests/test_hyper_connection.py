"""Hyper-connections between two sublayers: the definition, errors, transformations, and the kernel on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from interpreter.kernels import native
from interpreter.kernels.hyper_connection import EPS, HC_EPS, ITERATIONS, NUMBERS, RESULTS, Problem, judge
from jax_dsv4_fmha import EXPORT_CHECKS, explain, hyper_connection
from kernels.abi import HyperConnection
from kernels.variants import VARIANTS

HOW = {"iterations": ITERATIONS, "eps": EPS, "hc_eps": HC_EPS}
HIDDEN = [v.hidden for v in VARIANTS if isinstance(v, HyperConnection)]


def operands(x, b=1):
    """Operands, and `taken`, with the tokens as b sequences."""
    given = (jnp.asarray(a).reshape(b, -1, *a.shape[1:]) for a in (x.x, x.y, x.post, x.mix))
    taken = jnp.asarray(x.taken)[None].reshape(b, -1, x.taken.shape[1]) if x.taken.shape[1] else None
    return (*given, jnp.asarray(x.fn).reshape(NUMBERS, -1), *map(jnp.asarray, (x.scale, x.base, x.norm))), taken


def made(found):
    """Results as `judge` wants them."""
    return {name: np.asarray(a).reshape(-1, *a.shape[2:]) for name, a in zip(RESULTS, found, strict=True)}


@pytest.mark.parametrize("is_taken", [False, True])
def test_definition(is_taken):
    x = Problem.of(6, 32, is_taken)
    given, taken = operands(x, b=2)
    judge(x, made(hyper_connection(*given, taken=taken, **HOW)))


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


def test_devices_share_out_tokens():
    given, _ = operands(Problem.of(8, 16), b=4)
    mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, P("data", "context")) for a in given[:4]]
        run = jax.jit(functools.partial(hyper_connection, **HOW))
        got = run(*placed, *given[4:])
        assert "all-gather" not in run.lower(*placed, *given[4:]).compile().as_text()
    for a, b in zip(got, hyper_connection(*given, **HOW), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2**-7, atol=1e-5)


@pytest.mark.skipif(not native.built(HyperConnection), reason="without kernels")
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
@pytest.mark.parametrize("tokens", [1, 37, 300])
@pytest.mark.parametrize("is_taken", [False, True])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_kernel(hidden, is_taken, tokens):
    x = Problem.of(tokens, hidden, is_taken)
    given, taken = operands(x)
    run = jax.jit(functools.partial(hyper_connection, implementation="cubin", **HOW))
    judge(x, made(run(*given, taken=taken)))


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_a_token_has_the_same_bits_in_any_batch():
    given, _ = operands(Problem.of(200, HIDDEN[0]))
    run = jax.jit(functools.partial(hyper_connection, implementation="cubin"))
    whole = run(*given)
    for part in (slice(0, 1), slice(5, 30), slice(100, 164)):
        for a, b in zip(run(*(a[:, part] for a in given[:4]), *given[4:]), whole, strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b[:, part]).tobytes()
