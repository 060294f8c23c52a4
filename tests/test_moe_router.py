"""A router: the definition against float64, ties, gradients, meshes, errors, and kernels on a GPU."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from interpreter.kernels import native
from interpreter.kernels.moe_router import SCALE, TEMPERATURE, Problem, judge
from jax_dsv4_fmha import EXPORT_CHECKS, explain, moe_router
from jax_dsv4_fmha._definitions.router import SCORES
from jax_dsv4_fmha._host import moe_router as raw
from jax_dsv4_fmha._testing.cases import ROUTER
from kernels.abi import MoeRouter
from kernels.sm90.moe_router import config

FLOAT32 = 1e-5
"""of a weight: sums of some thousand products of float32"""
REFERENCE = {"implementation": "reference"}


def route(x, dtype=jnp.bfloat16, **how):
    how |= {"top_k": x.chosen} if x.given is None else {"given": jnp.asarray(x.given)[None]}
    bias = {"bias": jnp.asarray(x.bias)} if x.given is None else {}
    how |= {"score": "sigmoid" if x.sigmoid else "sqrtsoftplus", "temperature": TEMPERATURE, "scale": SCALE}
    return moe_router(jnp.asarray(x.x, dtype)[None], jnp.asarray(x.gate), **bias, **how)


CASES = {
    "chosen": lambda: Problem.of(9),
    "chosen by a sigmoid": lambda: Problem.of(9, sigmoid=True),
    "given": lambda: Problem.of(9, is_given=True),
    "odd sizes": lambda: Problem.of(3, 100, 13, 4),
    "all": lambda: Problem.of(2, 64, 5, 5),
}


@pytest.mark.parametrize("case", CASES)
def test_definition(case):
    x = CASES[case]()
    for dtype in (jnp.bfloat16, jnp.float32):
        weights, chosen = route(x, dtype)
        assert weights.dtype == jnp.float32 and chosen.dtype == jnp.int32
        judge(x, np.asarray(weights[0]), np.asarray(chosen[0]), FLOAT32)


def test_of_equal_scores_the_lower_number_is_first():
    weights, chosen = moe_router(jnp.ones((1, 1, 4)), jnp.ones((4, 7)), jnp.arange(7.0) // 4, top_k=5)
    assert chosen[0, 0].tolist() == [4, 5, 6, 0, 1]
    np.testing.assert_allclose(weights, 0.2, rtol=1e-6)


def test_without_a_bias():
    x = replace(Problem.of(4), bias=np.zeros(48, np.float32))
    weights, chosen = moe_router(jnp.asarray(x.x)[None], jnp.asarray(x.gate), top_k=6)
    wanted = moe_router(jnp.asarray(x.x)[None], jnp.asarray(x.gate), jnp.asarray(x.bias), top_k=6)
    np.testing.assert_array_equal(weights, wanted[0])
    np.testing.assert_array_equal(chosen, wanted[1])


def test_a_given_expert_that_does_not_exist():
    x = Problem.of(3, is_given=True)
    for number in (-1, 48):
        x.given[1, 2] = number
        weights = np.asarray(route(x)[0][0])
        assert np.isnan(weights[1]).all() and np.isfinite(weights[[0, 2]]).all()


@pytest.mark.parametrize("is_given", [False, True])
def test_gradient(is_given):
    """It is that of the definition, to which finite differences agree; a bias has none."""
    x = Problem.of(5, 64, 16, 4, is_given=is_given)
    given = jnp.asarray(x.x, jnp.float32)[None], jnp.asarray(x.gate), jnp.asarray(x.bias)
    factors = jax.random.normal(jax.random.key(0), (1, 5, 4))

    def loss(tokens, gate, bias, **how):
        of_choice = {"given": jnp.asarray(x.given)[None]} if is_given else {"bias": bias, "top_k": 4}
        weights, _ = moe_router(tokens, gate, **of_choice, temperature=TEMPERATURE, scale=SCALE, **how)
        return (weights * factors).sum()

    ours, wanted = (jax.grad(functools.partial(loss, **how), (0, 1, 2))(*given) for how in ({}, REFERENCE))
    for a, b in zip(ours, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    assert (ours[2] == 0).all() and np.abs(ours[0]).max() > 0
    step = jax.random.normal(jax.random.key(1), given[0].shape) * 1e-3
    moved = (loss(given[0] + step, *given[1:]) - loss(given[0] - step, *given[1:])) / 2
    np.testing.assert_allclose(moved, (ours[0] * step).sum(), rtol=2e-3)


def test_transformations():
    x = Problem.of(6)
    args = jnp.asarray(x.x)[None], jnp.asarray(x.gate), jnp.asarray(x.bias)
    run = functools.partial(moe_router, top_k=6)
    weights, chosen = run(*args)
    for got in (
        jax.jit(run)(*args),
        [a[1] for a in jax.vmap(run, (0, None, None))(jnp.stack([args[0]] * 2), *args[1:])],
    ):
        np.testing.assert_allclose(got[0], weights, rtol=1e-5)
        np.testing.assert_array_equal(got[1], chosen)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_devices_share_tokens(kind):
    """Each device routes its own tokens, of sequences and of a part of each, and nobody gathers any."""
    x = Problem.of(8)
    mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=(kind, kind))
    tokens = jnp.asarray(x.x).reshape(2, 4, -1)
    gate, bias = jnp.asarray(x.gate), jnp.asarray(x.bias)
    want = moe_router(tokens, gate, bias, top_k=6)
    squares = lambda *args: (moe_router(*args, top_k=6)[0] ** 2).sum()  # noqa: E731
    wanted = jax.grad(squares, (0, 1))(tokens, gate, bias)
    with jax.set_mesh(mesh):
        placed = jax.device_put(tokens, NamedSharding(mesh, P("data", "context")))
        run = jax.jit(functools.partial(moe_router, top_k=6))
        args = placed, *jax.device_put((x.gate, x.bias), NamedSharding(mesh, P()))
        assert "all-gather" not in run.lower(*args).compile().as_text()
        weights, chosen = run(*args)
        grad = jax.jit(jax.grad(squares, (0, 1)))(*args)
    np.testing.assert_allclose(weights, want[0], rtol=1e-5)
    np.testing.assert_array_equal(chosen, want[1])
    for a, b in zip(grad, wanted, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=2e-2, atol=1e-6)


def test_errors():
    x, gate, bias = jnp.ones((1, 2, 8), jnp.bfloat16), jnp.ones((8, 4)), jnp.ones(4)
    given = jnp.zeros((1, 2, 3), jnp.int32)
    cases = [
        ((x, gate, bias), {}, "top_k and given: got neither, wanted one of them"),
        ((x, gate), {"top_k": 2, "given": given}, "top_k and given: got both"),
        ((x, gate, bias), {"given": given}, "bias: got .*, wanted None where experts are given"),
        ((x, gate, bias), {"top_k": 5}, "top_k: got 5, wanted at most e=4"),
        ((x, gate, bias), {"top_k": 0}, "top_k"),
        ((x, gate, bias[:3]), {"top_k": 2}, "bias"),
        ((x, gate.T, bias), {"top_k": 2}, "gate"),
        ((x, gate.astype(jnp.bfloat16), bias), {"top_k": 2}, "gate"),
        ((x[0], gate, bias), {"top_k": 2}, "x"),
        ((x, gate), {"given": given.astype(jnp.float32)}, "given"),
        ((x, gate, bias), {"top_k": 2, "score": "softmax"}, "score: got 'softmax', wanted 'sqrtsoftplus' or 'sigmoid'"),
        ((x, gate, bias), {"top_k": 2, "temperature": 0.0}, "temperature"),
        ((x, gate, bias), {"top_k": 2, "scale": "2"}, "scale"),
        ((x, gate, bias), {"top_k": 2, "implementation": "cubin"}, "k=8, 2 of 4 experts"),
    ]
    for args, how, says in cases:
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=says):
            moe_router(*args, **how)


def test_the_package_knows_what_kernels_take():
    numbers = (config.UNIT, config.UNIT * config.PARTS, config.BLOCK, config.MOST_EXPERTS, config.MOST_CHOSEN)
    assert numbers == (raw.UNIT, raw.LEAST_K, raw.BLOCK, raw.MOST_EXPERTS, raw.MOST_CHOSEN)
    assert set(SCORES) == {"sqrtsoftplus", "sigmoid"}  # which ffi/moe_router.h has too


@pytest.mark.skipif(not native.built(MoeRouter), reason="without kernels")
def test_every_size_that_the_package_takes_has_a_launch():
    for k in (raw.LEAST_K, raw.MOST_K):
        sizes = Problem.of(1).sizes | {"k": k, "experts": raw.MOST_EXPERTS, "chosen": raw.MOST_CHOSEN}
        assert native.plan_moe_router(sizes, 1.0, 1.0, tile_m=16).grid == config.PARTS


def test_the_call_is_exported():
    x = jnp.ones((1, 2, 512), jnp.bfloat16), jnp.ones((512, 16))
    (decision,) = explain(functools.partial(moe_router, top_k=2), *x)
    assert "k=512, 2 of 16 experts" in str(decision)
    if not native.built(MoeRouter):
        pytest.skip("without kernels")
    run = jax.jit(functools.partial(moe_router, top_k=2))
    exported = jax.export.export(run, platforms=["cuda"], disabled_checks=EXPORT_CHECKS)(*x)
    assert "dsv4_fmha_moe_router" in exported.mlir_module()


GPU_CASES = {
    "a token": lambda: Problem.of(1, 4096, 256),
    "a step": lambda: Problem.of(64, 4096, 256),
    "a step of V4-Pro": lambda: Problem.of(17, 7168, 384),
    "a prompt": lambda: Problem.of(300, 4096, 256),
    "a prompt of V4-Pro": lambda: Problem.of(261, 7168, 384),
    "given": lambda: Problem.of(40, 4096, 256, is_given=True),
    "given, of a prompt": lambda: Problem.of(290, 4096, 256, is_given=True),
    "a sigmoid": lambda: Problem.of(33, 7168, 256, 8, sigmoid=True),
    "parts of several sizes": lambda: Problem.of(20, 1088, 144, 7),
    "most of all": lambda: Problem.of(259, 512, 512, 32),
}


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("case", GPU_CASES)
def test_kernel(case):
    x = GPU_CASES[case]()
    weights, chosen = jax.jit(lambda: route(x, implementation="cubin"))()
    judge(x, np.asarray(weights[0]), np.asarray(chosen[0]), FLOAT32)


@pytest.mark.parametrize("case", [case for case in ROUTER if case.s_q < 100], ids=lambda case: case.name)
def test_definition_in_cases_of_check(case):
    right, says = case.judge("reference")
    assert right, says


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("case", ROUTER, ids=lambda case: case.name)
def test_kernel_in_cases_of_check(case):
    right, says = case.judge("cubin")
    assert right, says


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_a_token_has_the_same_bits_in_any_batch():
    x = Problem.of(600, 4096, 256)
    run = jax.jit(functools.partial(moe_router, top_k=6, implementation="cubin"))
    tokens, gate, bias = jnp.asarray(x.x)[None], jnp.asarray(x.gate), jnp.asarray(x.bias)
    weights, chosen = map(np.asarray, run(tokens, gate, bias))
    for part in (slice(0, 1), slice(5, 9), slice(100, 164), slice(300, 599)):
        some = run(tokens[:, part], gate, bias)
        np.testing.assert_array_equal(np.asarray(some[0]).view(np.uint32), weights[:, part].view(np.uint32))
        np.testing.assert_array_equal(some[1], chosen[:, part])


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_numbers_that_are_not_finite_end():
    """Experts exist and are chosen once, whatever x and the gate hold; other tokens have what they had."""
    x = Problem.of(40, 512, 256)
    usual = [np.asarray(a[0]) for a in route(x, implementation="cubin")]
    x.x[3], x.x[7, 5], x.x[20] = np.nan, np.inf, -np.inf
    weights, chosen = (np.asarray(a[0]) for a in route(x, implementation="cubin"))
    others = [i for i in range(40) if i not in (3, 7, 20)]
    np.testing.assert_array_equal(weights[others], usual[0][others])
    assert (chosen >= 0).all() and (chosen < 256).all() and chosen[3].tolist() == list(range(6))
    assert all(len(set(experts)) == 6 for experts in chosen.tolist())


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_gradient_of_the_kernel():
    x = Problem.of(33, 512, 64)
    tokens, gate, bias = jnp.asarray(x.x)[None], jnp.asarray(x.gate), jnp.asarray(x.bias)
    factors = jax.random.normal(jax.random.key(0), (1, 33, 6))

    def loss(tokens, gate, implementation):
        return (moe_router(tokens, gate, bias, top_k=6, implementation=implementation)[0] * factors).sum()

    ours, wanted = (jax.grad(loss, (0, 1))(tokens, gate, how) for how in ("cubin", "reference"))
    for a, b in zip(ours, wanted, strict=True):
        a, b = (np.asarray(y, np.float32) for y in (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3 * np.abs(b).max())
