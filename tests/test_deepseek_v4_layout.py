"""examples/deepseek_v4/layout.py: where tokens and parameters lie in training, and what devices send each other."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from examples.deepseek_v4 import common, layout, mfu, train
from examples.deepseek_v4.model import Model

KINDS = "all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter"


def sent(text):
    """The types that collectives of several devices give, such as "f32[8,2]"."""
    found = []
    for types, kind, rest in re.findall(rf"= (.*?) ({KINDS})(?:-start)?\((.*)", text):
        if kind != "all-reduce" or not re.search(r"replica_groups=\{\{0\},\{1\}\}|replica_groups=\[2,1\]", rest):
            found += re.findall(r"\w+\[[\d,]*\]", types)
    return found


def test_a_parameter_travels_in_the_dtype_of_products():
    """It is rounded before it is gathered, and its gradient is summed as products make it. Of an array in float64,
    because XLA's CPU sends bfloat16 as float32.
    """
    with common.mesh_of(1, 2, data=1), jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(0), (8, 6), jnp.float64)
        rows = jax.random.normal(jax.random.key(1), (4, 8), jnp.float32)
        mesh = jax.sharding.get_mesh()
        placed = jax.device_put(x, NamedSharding(mesh, P(layout.REST)))
        tokens = jax.device_put(rows, NamedSharding(mesh, P(layout.SEQUENCES)))

        def loss(x, rows):
            return jnp.square(rows @ layout.gathered(jnp.float32, P(), x)).sum()

        program = jax.jit(jax.grad(loss)).lower(placed, tokens).compile()
        got = program(placed, tokens)
        want = jax.grad(lambda x: jnp.square(rows @ x.astype(jnp.float32)).sum())(x)
    assert got.dtype == jnp.float64 and got.sharding.shard_shape(got.shape) == (4, 6)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    moved = sent(program.as_text())
    assert "f32[8,6]" in moved and all(x.startswith("f32") for x in moved)


def test_the_gradient_of_a_frequent_token():
    """It is the sum over all its tokens. In bfloat16 that would be 256: 256 + 1 is rounded to 256."""
    with common.mesh_of(1, 2, data=1) as mesh:
        embed = jax.device_put(jnp.zeros((4, 6), jnp.bfloat16), NamedSharding(mesh, P(None, layout.GROUP)))
        tokens = jax.device_put(jnp.full((2, 512), 3), NamedSharding(mesh, layout.TOKENS))
        rows, back = jax.jit(lambda embed: jax.vjp(lambda x: layout.looked_up(x, tokens), embed))(embed)
        (got,) = jax.jit(back)(jnp.ones_like(rows))
    assert got.dtype == rows.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(jnp.float32), [[0] * 6] * 3 + [[1024] * 6])


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"expert": 2}, {"context": 2}], ids=str)
def test_experts_stay_and_tokens_are_shared_out(axes):
    """No device has the streams of all tokens. Of the embedding, the experts and the head nothing travels. Each device
    finds its own tokens, and those that follow, in the batch.
    """
    sizes = {"num_hidden_layers": 1, "layer_types": ["compressed_sparse_attention"], "dspark_target_layer_ids": [0]}
    sizes |= {"vocab_size": 88, "moe_intermediate_size": 40, "hc_sinkhorn_iters": 1, "num_hash_layers": 0}
    model = Model.from_config({**common.small(), **sizes})
    with common.mesh_of(1, axes.get("expert", 1), data=1, context=axes.get("context", 1)) as mesh:
        trainer = train.Trainer(model, mesh, steps=10, rate=1e-3, remat="but-parameters")
        tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32, sharding=layout.sequences(mesh, 2))
        text = trainer.step.lower(trainer.shapes(), train.Row(tokens, None)).compile().as_text()
    dims = [{*map(int, re.findall(r"\d+", types.partition("[")[2]))} for types in sent(text)]
    assert dims and not any(x & {88, 44, 40, 20} for x in dims)
    assert not re.search(r"= (s32|pred)\S* (all-to-all|collective-permute)", text)
    assert "f32[1,128,4,64]" in text or "f32[2,64,4,64]" in text
    assert "f32[2,128,4,64]" not in text


def test_stored():
    with common.mesh_of(2, 2, data=2):
        x = jax.ShapeDtypeStruct((6, 8), jnp.float32)
        assert layout.stored(P(), x) == P(None, layout.REST)
        assert layout.stored(P(None, "tensor"), x) == P(None, ("tensor", *layout.REST))
        assert layout.stored(P(None, layout.ALL), x) == P("data", layout.ALL)
        assert layout.stored(P(), jax.ShapeDtypeStruct((8,), jnp.float32)) == P(None)
        assert layout.stored(P(), jax.ShapeDtypeStruct((3, 5), jnp.float32)) == P(None, None)


def test_what_devices_cannot_share_out():
    with pytest.raises(ValueError, match=r"b: got 2, wanted a multiple of 4, over which data and expert share it out"):
        train.main(b=2, expert=2, data=2)
    with pytest.raises(ValueError, match=r"b: got 1, wanted a multiple of 2"):
        mfu.main(config=common.small(), layers=1, experts=4, b=1, expert=2, data=1)
    wanted = r"layers/0/moe/w13: got an axis of 6, wanted a multiple of 4: context and expert share it out"
    with pytest.raises(ValueError, match=wanted):
        mfu.main(config=common.small(), layers=1, experts=6, b=2, expert=2, context=2, data=1)
