"""examples/deepseek_v4: training, and sequences whose tokens devices share out in zigzag order."""

import dataclasses
import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from examples.deepseek_v4 import common, layout, train
from examples.deepseek_v4.checkpoint import Checkpoint
from examples.deepseek_v4.mfu import first_layers
from examples.deepseek_v4.model import FIXED, Model
from examples.deepseek_v4.save import save
from examples.deepseek_v4.speed import FLASH
from examples.deepseek_v4.weights import load
from jax_dsv4_fmha.layers import unzigzag, zigzag

from .helpers import assert_in_place, collectives, computed, trained
from .kept import kept
from .test_deepseek_v4 import assert_close, prompts, small


def unrounded(model):
    """Without V4.1's rounding, by which a number near a tie goes to either side."""

    def plain(layer):
        indexer = layer.indexer and dataclasses.replace(layer.indexer, fake_quantize=False)
        return dataclasses.replace(layer, fake_quantize=False, indexer=indexer)

    return dataclasses.replace(model, layers=tuple(map(plain, model.layers)))


def placed(model, params, mesh):
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, model.partition())


@pytest.mark.parametrize("name", ["v4", pytest.param("v4.1", marks=pytest.mark.slow)])
def test_logits_in_zigzag_order(name):
    """Over 2 devices that share tokens, and 2 of experts; V4.1's engrams hash words of tokens in their own order."""
    model, params = small(name)
    model, tokens = unrounded(model), prompts(2, 64)
    want = jax.jit(model)(params, tokens)
    with common.mesh_of(1, 2, data=1, context=2) as mesh:
        x = jax.device_put(zigzag(tokens, 2), NamedSharding(mesh, P("data", "context")))
        got = jax.jit(functools.partial(model, zigzag=2))(placed(model, params, mesh), x)
        assert got.sharding.shard_shape(got.shape)[1] == 32
    assert_close(unzigzag(np.asarray(got), 2), want, 3e-4)


TOKENS = prompts(2, 128, seed=4)
"""No match of an engram is so near 0 with these tokens that the slope of its square root amplifies rounding."""


ONE_LAYER = {
    **common.small(), "num_hidden_layers": 1, "layer_types": ["compressed_sparse_attention"], "hc_sinkhorn_iters": 1,
    "dspark_target_layer_ids": [0],
}  # fmt: skip


def of_a_step(name, tokens, **axes):
    """Losses and loads, gradients, and what collectives move."""
    model, params = small(name)
    model = unrounded(model)
    sizes = (axes.get(axis, 1) for axis in ("tensor", "expert", "data", "context"))
    with common.mesh_of(*sizes) as mesh:
        params = placed(model, params, mesh)
        learned, fixed = ({k: x for k, x in params.items() if (k in FIXED) == is_it} for is_it in (False, True))
        f = functools.partial(train.losses, model, jnp.float32, train.POLICIES["but-attention"])
        x = jax.device_put(tokens, NamedSharding(mesh, P("data")))
        step = jax.jit(jax.value_and_grad(f, has_aux=True)).lower(learned, fixed, x).compile()
        return jax.device_get(computed(step, learned, fixed, x)), collectives(step)


@functools.cache
def on_one_device(name):
    return of_a_step(name, TOKENS)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, axes",
    [
        ("v4", {"data": 2, "context": 2, "tensor": 2}),
        ("v4", {"expert": 2, "context": 4}),
        ("v4.1", {"context": 4}),
    ],
)
def test_a_step_in_zigzag_order(name, axes):
    """Losses, the experts' loads and every gradient are those of one device."""
    got, moved = of_a_step(name, TOKENS, **axes)
    jax.tree.map(functools.partial(assert_close, tolerance=3e-4), got, on_one_device(name))
    assert "collective-permute" in moved


@pytest.mark.slow
def test_train_over_devices_that_share_sequences(tmp_path, capsys):
    """The program has the same losses, and goes on from a state that one device kept."""
    (config := tmp_path.with_name("config.json")).write_text(json.dumps(ONE_LAYER))
    how = {"steps": 8, "b": 2, "s": 64, "every": 1, "data": 1, "keep": tmp_path, "random": str(config)}
    trained(train.main, **how, until=1)
    shutil.copytree(tmp_path, want := tmp_path.with_name("want"))
    got = trained(train.main, **how, context=2, tensor=2, expert=2, until=3)
    assert (
        "mesh {'data': 1, 'context': 2, 'tensor': 2, 'expert': 2} of cpu devices, from step 1 on"
        in capsys.readouterr().out
    )
    np.testing.assert_allclose(got, trained(train.main, **how | {"keep": want}, until=3), rtol=1e-4)


@pytest.mark.slow
def test_train(tmp_path, capsys):
    """Both losses fall; a program that goes on from a kept state has the same ones."""
    how = {"steps": 24, "b": 4, "s": 48, "every": 8, "data": 1}
    losses = np.array(trained(train.main, **how))
    assert losses[-1, 0] < losses[0, 0] - 0.7 and losses[-1, 1] < losses[0, 1]
    said = r"^step   16  loss [\d.]+, of indexers [\d.]+, gradient [\d.]+, load [\d.]+, recall [\d.]+; \d+ tokens/s$"
    assert re.search(said, capsys.readouterr().out, re.M)
    first = trained(train.main, **how, keep=tmp_path / "a", until=9)
    (tmp_path / "config.json").write_text(json.dumps(common.small()))
    second = trained(train.main, **how, keep=tmp_path / "a", random=str(tmp_path / "config.json"))
    assert len(first) == 9 and len(second) == 15
    np.testing.assert_array_equal([*first, *second], losses)


@pytest.mark.slow
def test_train_as_caches_round(tmp_path):
    """The loss is another one, and falls; without the option V4 rounds nothing."""
    sizes = {"num_hidden_layers": 1, "layer_types": ["compressed_sparse_attention"], "dspark_target_layer_ids": [0]}
    sizes |= {"head_dim": 80, "qk_rope_head_dim": 16, "index_head_dim": 32, "hc_sinkhorn_iters": 1}
    (path := tmp_path / "config.json").write_text(json.dumps(common.small() | sizes))
    model, rounded = (common.model_of(None, random=str(path), fake_quantize=x) for x in (None, True))
    assert unrounded(rounded) == model and rounded.layers[0].fake_quantize and rounded.layers[0].indexer.fake_quantize
    how = {"steps": 16, "b": 4, "s": 48, "data": 1, "random": str(path)}
    plain, losses = (np.array(trained(train.main, **how, fake_quantize=x)) for x in (False, True))
    assert (losses[0] != plain[0]).all() and losses[-1, 0] < losses[0, 0] - 0.1
    np.testing.assert_allclose(losses[:, 0], plain[:, 0], rtol=0.05)


@pytest.mark.slow
def test_attention_learns_alone(tmp_path):
    """From a checkpoint, and over devices; what is saved has all else as it was, under the same names."""
    config = {**ONE_LAYER, "num_hash_layers": 0}
    model = Model.from_config(config)
    params = model.init(jax.random.key(0), jnp.float32)
    save(model, params, tmp_path / "before", dtype=jnp.float32)
    (tmp_path / "before" / "config.json").write_text(json.dumps(config))
    how = {"checkpoint": str(tmp_path / "before"), "steps": 4, "b": 4, "s": 48, "data": 2, "expert": 2}
    losses = trained(train.main, **how, only="attention/(w|sink)", save=str(tmp_path / "after"))
    assert losses[-1] != losses[0]
    assert {*Checkpoint(tmp_path / "after")} == {*Checkpoint(tmp_path / "before")}
    assert json.loads((tmp_path / "after" / "config.json").read_text()) == config
    got = load(model, tmp_path / "after", jnp.float32)
    for (path, x), want in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(params), strict=True):
        learns = re.search("attention/(w|sink)", jax.tree_util.keystr(path, simple=True, separator="/"))
        assert (np.asarray(x) != np.asarray(want)).any() == bool(learns), path


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{}, {"data": 2, "expert": 2}], ids=str)
def test_no_copy_of_a_state(axes):
    """A step updates every parameter and moment in place."""
    model = Model.from_config(ONE_LAYER)
    with common.mesh_of(1, axes.get("expert", 1), data=axes.get("data", 1)) as mesh:
        trainer = train.Trainer(model, mesh, steps=10, rate=1e-3, remat="but-attention")
        batch = train.Row(jax.ShapeDtypeStruct((4, 32), jnp.int32, sharding=layout.sequences(mesh, 4)), None)
        assert_in_place(trainer.step.trace(trainer.shapes(), batch))


@pytest.mark.slow
@pytest.mark.usefixtures("built")
def test_a_policy_keeps_what_those_before_it_keep_and_more():
    """A layer of V4-Flash's sizes keeps the experts' gates and up projections, then products, then parameters."""
    model = Model.from_config(first_layers(FLASH, 1, 16))
    with common.mesh_of(1, 1, data=1):
        of = kept(model)
    assert list(of) == list(train.POLICIES) and list(of.values()) == sorted(set(of.values()))
    gates = 8192 * 6 * 2 * 2048 * 2 / 2**30
    assert of["but-experts"] - of["but-attention"] == pytest.approx(gates, abs=0.1)
    experts = 16 * 3 * 2048 * 4096 * 2 / 2**30
    assert of["but-parameters"] - of["but-products"] > experts


def test_only_is_a_regular_expression():
    with pytest.raises(ValueError, match=r"--only: got 'layers/\[', wanted a regular expression: unterminated"):
        train.main(only="layers/[")


@pytest.mark.parametrize("how", [{"save": "file/x"}, {"adapter": "file/x", "rank": 2}])
def test_a_directory_that_cannot_be_made_is_known_first(how, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(common, "model_of", lambda *_, **__: pytest.fail("the model was made before"))
    with pytest.raises(NotADirectoryError):
        train.main(**how)


def test_what_learns(monkeypatch):
    monkeypatch.setattr(common, "parameters_of", lambda *_, **__: pytest.fail("the model was made before"))
    model = common.model_of(None)
    names = jax.tree_util.tree_leaves_with_path(train.learning(model, "0/attention/sink$|^head"))
    assert [jax.tree_util.keystr(path) for path, x in names if x] == ["['head']", "['layers'][0]['attention']['sink']"]
    with pytest.raises(ValueError, match="--only: got 'sinks', wanted a part of a path such as"):
        train.main(only="sinks")


@pytest.mark.gpu
def test_train_on_a_gpu(tmp_path, cuda):
    """In bfloat16 with kernels: both losses fall, and a program that goes on has nearly the same ones."""
    how = {"steps": 24, "b": 4, "s": 256, "every": 8}
    losses = np.array(trained(train.main, **how))
    assert losses[-1, 0] < losses[0, 0] - 0.7 and losses[-1, 1] < losses[0, 1]
    first = trained(train.main, **how, keep=tmp_path, until=9)
    np.testing.assert_allclose([*first, *trained(train.main, **how, keep=tmp_path)], losses, rtol=0.05)
