"""Orbax saves and restores what a layer has: parameters, an optimizer's state and a cache, sharded or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

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
