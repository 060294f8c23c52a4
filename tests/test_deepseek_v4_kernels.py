"""The model in examples/deepseek_v4 multiplies by these: exact products, experts, doubly stochastic matrices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.deepseek_v4 import common, sinkhorn, stand_in
from examples.deepseek_v4.exact import exact_product
from examples.deepseek_v4.model import Model, in_three, logits_of
from examples.deepseek_v4.packed import BLOCK
from examples.deepseek_v4.sinkhorn import doubly_stochastic

from .helpers import normal


def with_gradient(x):
    w = jnp.cos(jnp.arange(16.0)).reshape(4, 4)
    return jax.value_and_grad(lambda x: (doubly_stochastic(x, 20, 1e-6) * w).sum())(x)


LOGITS = [(64, 1, 4, 4), (3, 7, 4, 4)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_exact_products(dtype):
    """As in float64, and so are gradients; that of a bfloat16 operand but for its own rounding."""
    x, w, dy = normal(0, 2, 9, 64, dtype=dtype), normal(1, 24, 64), normal(2, 2, 9, 24)
    y, back = jax.vjp(jax.jit(exact_product), x, w)
    x64, w64, dy64 = (np.asarray(a, np.float64) for a in (x, w, dy))
    wanted = x64 @ w64.T, dy64 @ w64, np.einsum("bsn,bsk->nk", dy64, x64)
    for got, want, rounding in zip((y, *back(dy)), wanted, (0, 2**-8 if dtype == "bfloat16" else 0, 0), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=rounding, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("shape", LOGITS, ids=str)
def test_sinkhorn_by_the_kernel(shape, monkeypatch):
    """Pallas's interpreter runs it, also with matrices that fill no whole block; a loop makes what is wanted. Rows and
    columns have the sum 1.
    """
    x = jax.random.normal(jax.random.key(0), shape)
    want = jax.jit(with_gradient)(x)
    mixed = doubly_stochastic(x, 20, 1e-6)
    for axis in (-1, -2):
        np.testing.assert_allclose(mixed.sum(axis), 1, atol=1e-3)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *operands, cuda, default: cuda(*operands))
    monkeypatch.setattr(sinkhorn.pl, "pallas_call", functools.partial(sinkhorn.pl.pallas_call, interpret=True))
    for got, wanted in zip(with_gradient(x), want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LOGITS, ids=str)
def test_sinkhorn_on_a_gpu(shape, cuda):
    x = 3 * jax.random.normal(jax.random.key(0), shape)
    got = jax.device_get(jax.jit(with_gradient)(jax.device_put(x, cuda)))
    want = jax.jit(with_gradient)(jax.device_put(x, jax.devices("cpu")[0]))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_are_lowered_for_cuda(dtype):
    """Experts of a model are a call of ours, in a mesh too; those of float32 are none."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256}
    model = Model.from_config(common.small() | sizes | {"head_dim": 32, "qk_rope_head_dim": 8, "index_head_dim": 8})
    with common.mesh_of(1, 1, 1):
        params = jax.eval_shape(lambda: model.init(jax.random.key(0), dtype))
        moe = params["layers"][0]["moe"], params["routing"][0]
        x = jax.ShapeDtypeStruct((4, 1, model.hidden), dtype), jax.ShapeDtypeStruct((4, 1), jnp.int32)
        f = jax.jit(functools.partial(model.moe, is_trained=True))
        text = f.trace(*moe, *x).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @dsv4_fmha_fused_moe") == (dtype == "bfloat16"), text


def of_step(weights, tokens, hidden=512, inner=256):
    """A model's shared expert in a step, a router's scores, and what float64 makes of both."""
    sizes = {"hidden_size": hidden, "moe_intermediate_size": inner, "num_hidden_layers": 1}
    model = Model.from_config(common.small() | sizes | {"layer_types": None, "compress_ratios": [0]})
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (tokens, 1, hidden), jnp.bfloat16)
    w13, w2 = (
        (jax.random.normal(key, shape) * shape[0] ** -0.5).astype(jnp.bfloat16)
        for key, shape in zip(keys[1:], ((hidden, 2, inner), (inner, hidden)), strict=False)
    )
    gate = jax.random.normal(keys[3], (hidden, 64))

    def f(x, w13, w2, gate):
        return model.of_shared(w13, w2, x, False), logits_of(x, gate).sum(2)

    in_float64 = tuple(np.asarray(a, np.float64) for a in (x, w13, w2, gate))
    if weights == "FP8":
        w13, w2 = stand_in.in_fp8(w13.swapaxes(0, 1)), stand_in.in_fp8(w2)
        unpacked = (np.asarray(w.unpacked(), np.float64) for w in (w13, w2))
        in_float64 = (in_float64[0], next(unpacked).swapaxes(0, 1), *unpacked, in_float64[3])
    return f, (x, w13, w2, in_three(gate)), by_float64(model.limit, *in_float64)


def by_float64(limit, x, w13, w2, gate):
    gates, up = np.moveaxis(np.einsum("bsm,mgi->bsgi", x, w13), 2, 0)
    gates = np.minimum(gates, limit)
    return gates / (1 + np.exp(-gates)) * np.clip(up, -limit, limit) @ w2, x @ gate


def are_right(got, wanted):
    """The shared expert's result to bfloat16's precision, a router's scores of 20 to 60 to float32's."""
    y, scores = (np.asarray(x, np.float64) for x in got)
    np.testing.assert_allclose(y, wanted[0], rtol=0.01, atol=0.02)
    np.testing.assert_allclose(scores, wanted[1], rtol=0, atol=2e-3)


WEIGHTS = pytest.mark.parametrize("weights", ["bfloat16", "FP8"])


@WEIGHTS
def test_shared_expert_and_router_of_a_step(weights):
    """Both have the numbers of float64; on Hopper a step has kernels for all three products, and a prompt for none."""
    f, operands, wanted = of_step(weights, 3)
    are_right(jax.jit(f)(*operands), wanted)
    for tokens, kernels in ((3, 3), (129, 0)):
        x = jax.ShapeDtypeStruct((tokens, 1, 512), jnp.bfloat16)
        text = jax.jit(f).trace(x, *operands[1:]).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("dsv4_fmha_few_rows_product") == kernels


@pytest.mark.gpu
@WEIGHTS
@pytest.mark.parametrize("tokens", [1, 64, 128, 200])
def test_shared_expert_and_router_on_a_gpu(weights, tokens, cuda):
    f, operands, wanted = of_step(weights, tokens, 4096, 2048)
    are_right(jax.jit(f)(*jax.device_put(operands, cuda)), wanted)


@pytest.mark.parametrize("of_table", [False, True])
def test_a_router_of_a_step_is_two_launches(of_table):
    """The product with its gate, and all that follows."""
    model = Model.from_config(common.small() | {"hidden_size": 512})
    gate = in_three(jnp.zeros((512, model.experts)))
    routing = jnp.zeros((1000, model.chosen), jnp.int32) if of_table else jnp.zeros(model.experts)
    x, tokens = jnp.zeros((3, 1, 512), jnp.bfloat16), jnp.zeros((3, 1), jnp.int32)
    text = jax.jit(model.routed).trace(gate, routing, x, tokens).lower(lowering_platforms=("cuda",)).as_text()
    calls = ["dsv4_fmha_few_rows_product", "dsv4_fmha_route_by_table" if of_table else "dsv4_fmha_route"]
    assert re.findall(r"custom_call @(\w+)", text) == calls
    rest = set(re.findall(r"stablehlo\.(\w+)", text)) - {"custom_call", "case", "constant", "return"}
    assert rest <= {"reshape", "broadcast_in_dim"}, text  # by 1, which moves nothing


def test_gate_in_three_numbers_of_bfloat16():
    """Their sum is the gate's number, whatever its size, in a compiled program too."""
    gate = jax.random.normal(jax.random.key(0), (BLOCK, 8)) * jnp.geomspace(1e-20, 1e20, 8)
    first, second, third = np.split(np.asarray(jax.jit(in_three)(gate), np.float64), 3, 1)
    np.testing.assert_array_equal(first + second + third, gate)
