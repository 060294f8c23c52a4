"""examples/deepseek_v4/head.py: the loss of the next token by parts of the tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from examples.deepseek_v4 import common, head
from examples.deepseek_v4.layout import ALL, TOKENS

from .helpers import collectives, normal


def operands(dtype):
    x, w = normal(0, 4, 12, 16, dtype=dtype), normal(1, 16, 40)
    following = jnp.asarray(np.random.default_rng(2).integers(0, 40, (4, 12)))
    weights = jnp.where(jnp.arange(12) < 11, jnp.float32(1 / 44), 0) * jnp.ones((4, 1))
    return x, w, following, weights


def of_all_logits(x, w, following, weights):
    logits = jnp.matmul(x, w.astype(x.dtype), preferred_element_type=jnp.float32)
    return (optax.softmax_cross_entropy_with_integer_labels(logits, following) * weights).sum()


def gradients(loss):
    return jax.value_and_grad(lambda *x: 3 * loss(*x), argnums=(0, 1))


@pytest.mark.parametrize(
    "axes", [{}, {"data": 2, "context": 2, "tensor": 2}, {"data": 1, "context": 4, "expert": 2}], ids=str
)
@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 2e-6), (jnp.bfloat16, 1e-2)], ids=["float32", "bfloat16"])
def test_parts_of_the_tokens(monkeypatch, axes, dtype, tolerance):
    """Loss and gradients are those of all logits at once. No device has those of all its tokens, or all rows of its
    group, at once.
    """
    monkeypatch.setattr(head, "COUNT", 5)
    given = operands(dtype)
    want, (dx, dw) = gradients(of_all_logits)(*given)
    with common.mesh_of(axes.get("tensor", 1), axes.get("expert", 1), axes.get("data", 1), axes.get("context", 1)) as m:
        places = TOKENS, P(None, ALL), TOKENS, TOKENS
        given = [jax.device_put(a, NamedSharding(m, at)) for a, at in zip(given, places, strict=True)]
        program = jax.jit(gradients(head.loss)).lower(*given).compile()
        got, got_by = program(*given)
        without = jax.jit(head.loss)(*given)
    np.testing.assert_allclose([got, 3 * without], want, rtol=1e-6)
    for a, b in zip(got_by, (dx, dw), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max())
    group = m.shape["context"] * m.shape["expert"]
    tokens, columns = 48 // (m.shape["data"] * group), 40 // (m.shape["tensor"] * group)
    rows = -(-tokens // -(-tokens // 5))  # of a device in a part
    text = program.as_text()
    assert f"f32[{group * rows},{columns}]" in text and f"[{group * tokens},{columns}]" not in text
    gathered = (group > 1) * group * rows * (16 + 1 + 1) + (m.shape["data"] > 1) * 16 * columns  # rows, and the head
    gathered += (over := m.shape["tensor"] * group) * (over > 1) * 3 * group * rows  # numbers of each token
    assert collectives(program).get("all-gather", 0) == gathered
