"""The model in examples/deepseek_v4 multiplies by these: exact products, experts, doubly stochastic matrices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.deepseek_v4 import common, sinkhorn
from examples.deepseek_v4.exact import exact_product
from examples.deepseek_v4.model import Model
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
    """Experts of a model are one call of ours, in a mesh too, and three of its gradient; those of float32 are none."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256}
    model = Model.from_config(common.small() | sizes | {"head_dim": 32, "qk_rope_head_dim": 8, "index_head_dim": 8})
    with common.mesh_of(1, 1, 1):
        params = jax.eval_shape(lambda: model.init(jax.random.key(0), dtype))
        moe = params["layers"][0]["moe"], params["routing"][0]
        x = jax.ShapeDtypeStruct((4, 1, model.hidden), dtype), jax.ShapeDtypeStruct((4, 1), jnp.int32)
        text = jax.jit(model.moe).trace(*moe, *x).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @dsv4_fmha_fused_moe") == (dtype == "bfloat16"), text
