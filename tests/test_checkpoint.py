"""Orbax saves and restores what a layer has: parameters, an optimizer's state and a cache, sharded or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha.layers import DSV4Attention, Rope, from_state_dict
from tests.test_layers import hidden, model

ocp = pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")


def saved(tree, path, like):
    """What comes back, placed as `like` is."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, jax.tree.map(ocp.utils.to_shape_dtype_struct, like))


def equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["window", "sparse", "dense"])
def test_generation_goes_on_from_a_checkpoint(kind, tmp_path):
    layers, params = model("v4")
    layer, p, x = layers[kind], params[kind], hidden(2, 12)
    step = jax.jit(lambda p, x, cache, n: layer.step(p, x, cache, lengths=n)[:2])
    _, cache = layer(p, x[:, :11], layer.cache(2, 16, jnp.float32))[:2]
    state = {"params": p, "cache": cache}
    got = saved(state, tmp_path / "state", state)
    equal(got, state)
    equal(step(got["params"], x[:, 11:], got["cache"], 12), step(p, x[:, 11:], cache, 12))


def test_training_goes_on_on_another_mesh(tmp_path):
    layers, params = model("v4")
    layer, p = layers[1], params[1]
    optimizer = optax.adam(1e-3)
    state = {"params": p, "optimizer": optimizer.init(p)}
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])

    def place(params):
        return jax.tree.map(
            lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, layer.partition("heads")
        )

    whole = lambda x: jax.device_put(x, NamedSharding(mesh, P()))  # noqa: E731
    like = {"params": place(p), "optimizer": jax.tree.map(whole, state["optimizer"])}
    got = saved(state, tmp_path / "state", like)
    equal(got, state)
    assert got["params"]["wq_b"].sharding == like["params"]["wq_b"].sharding

    @jax.jit
    def train(state, x):
        gradient = jax.grad(lambda p: jnp.mean(layer(p, x).y ** 2))(state["params"])
        updates, of_optimizer = optimizer.update(gradient, state["optimizer"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": of_optimizer}

    for x, y in zip(*(jax.tree.leaves(train(each, hidden(2, 12))) for each in (got, state)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_a_state_dict_goes_to_its_shardings():
    """Each part to its device, and nothing to the default one; one sharding for all will do, too."""
    layer = DSV4Attention(hidden=64, heads=4, d=32, q_rank=32, o_groups=2, o_rank=16, rope=Rope(8))
    shapes = {
        "wq_a.weight": (32, 64), "q_norm.weight": (32,), "wq_b.weight": (128, 32), "wkv.weight": (32, 64),
        "kv_norm.weight": (32,), "attn_sink": (4,), "wo_a.weight": (32, 64), "wo_b.weight": (64, 32),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[2:4])
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), layer.partition("heads"))
    want, got = from_state_dict(layer, tensors), from_state_dict(layer, tensors, shardings=shardings)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), got, want)
    assert jax.tree.map(lambda x: x.sharding, got) == shardings
    whole = from_state_dict(layer, tensors, shardings=NamedSharding(mesh, P()))
    assert all(x.sharding.is_fully_replicated and len(x.devices()) == 2 for x in jax.tree.leaves(whole))
