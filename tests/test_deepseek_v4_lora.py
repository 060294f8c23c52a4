"""examples/deepseek_v4/lora.py: additions of low rank to attention's matrices."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.deepseek_v4 import common, lora, train
from examples.deepseek_v4 import save as saving
from examples.deepseek_v4.checkpoint import Checkpoint
from examples.deepseek_v4.model import FIXED, Model
from examples.deepseek_v4.packed import Packed, whole
from examples.deepseek_v4.weights import load
from jax_dsv4_fmha import PackedMatrix

from .helpers import computed, normal, trained
from .test_deepseek_v4 import prompts
from .test_deepseek_v4_checkpoint import checkpoint, written

SIZES = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "dspark_target_layer_ids": [0]}
CONFIG = {**common.small(), **SIZES, "num_hash_layers": 0, "hc_sinkhorn_iters": 1}
MODEL = Model.from_config(CONFIG)


def random(only="", rank=2):
    """An adapter whose B are not zeros."""
    adapter = lora.init(MODEL, rank, only)
    return jax.tree.map(lambda x: normal(len(x), *x.shape) * 0.1, adapter)


def test_what_is_added():
    """A product with the sum is that of both parts."""
    params, (adapter,) = MODEL.init(jax.random.key(0), jnp.float32), random()
    attention = params["layers"][0]["attention"]
    sums = lora.merged(attention, adapter)
    assert {name for name in sums if sums[name] is not attention[name]} == {"wq_a", "wq_b", "wkv", "wo_b"}
    for name, (rows, columns) in lora.sizes(MODEL, 0).items():
        x, w = normal(1, 5, rows), attention[name].reshape(rows, columns)
        want = x @ w + 2 * (x @ adapter[name]["a"]) @ adapter[name]["b"]
        np.testing.assert_allclose(x @ sums[name].reshape(rows, columns), want, atol=1e-4)


def test_what_is_added_to_packed_matrices():
    """The sum is of the numbers that they stand for, in the dtype that is asked for."""
    params, (adapter,) = MODEL.init(jax.random.key(0), jnp.float32), random("wq_b|wkv")
    packed = MODEL.layers[0].packed(params["layers"][0]["attention"])
    plain = whole(packed, jnp.float32)
    assert isinstance(packed["wq_b"], PackedMatrix) and isinstance(packed["wkv"], PackedMatrix)
    for dtype in (jnp.float32, jnp.bfloat16):
        sums = lora.merged(packed, adapter, dtype)
        assert sums["wq_a"] is packed["wq_a"] and sums["wkv"].dtype == dtype
        want = lora.merged({name: plain[name].astype(dtype) for name in adapter}, adapter)
        for name in ("wq_b", "wkv"):
            np.testing.assert_array_equal(sums[name], want[name])


def test_packed_matrices_do_not_learn(tmp_path):
    """Without an adapter there is an error, and they are not saved."""
    params = MODEL.init(jax.random.key(0), jnp.float32)
    params["layers"][0]["attention"] = MODEL.layers[0].packed(params["layers"][0]["attention"])
    with common.mesh_of(1, 1, data=1) as mesh:
        trainer = train.Trainer(MODEL, mesh, steps=2, rate=1e-3, remat="all")
        with pytest.raises(ValueError, match="params: layers/0/attention/wkv: got a PackedMatrix, wanted an array"):
            trainer.begin(params)
    with pytest.raises(ValueError, match="params: layers/0/attention/wkv: got PackedMatrix, wanted"):
        saving.save(MODEL, params, tmp_path / "there")


def test_files_of_peft(tmp_path):
    """What is written is read again, and has a checkpoint's own names; another alpha is another sum."""
    written(tmp_path / "model.safetensors", names_of_hugging_face())
    adapter = random("wq_b|wo_b", rank=4)
    lora.save(MODEL, adapter, tmp_path / "adapter", str(tmp_path))
    prefix = "base_model.model.model.layers.0.self_attn"
    shapes = {x.name: x.shape for x in Checkpoint(tmp_path / "adapter").entries.values()}
    assert shapes == {
        f"{prefix}.q_b_proj.lora_A.weight": (4, 32), f"{prefix}.q_b_proj.lora_B.weight": (256, 4),
        f"{prefix}.o_b_proj.lora_A.weight": (4, 64), f"{prefix}.o_b_proj.lora_B.weight": (64, 4),
    }  # fmt: skip
    said = json.loads((path := tmp_path / "adapter" / "adapter_config.json").read_text())
    assert said["peft_type"] == "LORA" and (said["r"], said["lora_alpha"]) == (4, 8)
    assert said["target_modules"] == ["model.layers.0.self_attn.o_b_proj", "model.layers.0.self_attn.q_b_proj"]
    jax.tree.map(np.testing.assert_array_equal, lora.load(MODEL, tmp_path / "adapter", tmp_path), adapter)
    path.write_text(json.dumps(said | {"lora_alpha": 2}))
    quarter = jax.tree_util.tree_map_with_path(lambda at, x: x / 4 if at[-1].key == "b" else x, adapter)
    jax.tree.map(np.testing.assert_array_equal, lora.load(MODEL, tmp_path / "adapter", tmp_path), quarter)


def names_of_hugging_face():
    found = saving.of_attention(
        MODEL.layers[0], *[MODEL.init(jax.random.key(0))["layers"][0]["attention"]] * 2, "", None
    )
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, (_, theirs) in lora.MATRICES.items()}
    return {f"model.layers.0.self_attn.{names.get(name, name)}": x for name, x in found.items()}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"r": 3}, r"lora_A.weight: got \[2, .*\], wanted \[3, "),
        ({"use_dora": True}, "use_dora: got True, wanted none"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out: got True, wanted none"),
        ({"r": None}, "adapter_config.json: r: got None, wanted an integer of at least 1"),
        ({"r": "2"}, "adapter_config.json: r: got '2', wanted an integer of at least 1"),
        ({"lora_alpha": None}, "adapter_config.json: lora_alpha: got None, wanted a number from 0"),
    ],
    ids=str,
)
def test_another_adapter(tmp_path, change, message):
    lora.save(MODEL, random(), tmp_path)
    config = json.loads((tmp_path / lora.FILES[1]).read_text())
    (tmp_path / lora.FILES[1]).write_text(json.dumps(config | change))
    with pytest.raises((ValueError, NotImplementedError), match=message):
        lora.load(MODEL, tmp_path)
    with pytest.raises(ValueError, match="got a directory with an adapter, wanted another"):
        lora.save(MODEL, random(), tmp_path)


def test_parts_that_are_not_taken(tmp_path):
    tensors = {"base_model.model.layers.0.ffn.gate.lora_A.weight": np.zeros((2, 64), np.float32)}
    saving.write(tmp_path / lora.FILES[0], tensors)
    (tmp_path / lora.FILES[1]).write_text('{"r": 2, "lora_alpha": 4}')
    with pytest.raises(ValueError, match=r"gate.lora_A.weight.*: got it, wanted additions to attention's wq_a"):
        lora.load(MODEL, tmp_path)
    tensors = {"base_model.model.layers.0.attn.wkv.lora_A.weight": np.zeros((2, 64), np.float32)}
    saving.write(tmp_path / lora.FILES[0], tensors)
    with pytest.raises(ValueError, match="layer 0: wkv: got one of A and B, wanted both"):
        lora.load(MODEL, tmp_path)
    with pytest.raises(ValueError, match="--only: got 'wo_a', wanted a part of a path such as"):
        lora.init(MODEL, 2, "wo_a")
    for options in ({"packed": True}, {"adapter": str(tmp_path)}):
        with pytest.raises(ValueError, match="--adapter: wanted --lora, too"):
            train.main(**options)
    with pytest.raises(ValueError, match=r"--adapter: got .*, which has one"):
        train.main(rank=2, adapter=str(tmp_path))
    with pytest.raises(ValueError, match="--save: got --packed, wanted --adapter"):
        train.main(rank=2, packed=True, save="there")


@pytest.mark.slow
def test_additions_learn_alone(tmp_path):
    """The loss falls, over devices and after a stop, too. The adapter gives the logits of the merged checkpoint."""
    params = MODEL.init(jax.random.key(0), jnp.float32)
    saving.save(MODEL, params, tmp_path / "before", dtype=jnp.float32)
    (tmp_path / "before" / "config.json").write_text(json.dumps(CONFIG))
    how = {"checkpoint": str(tmp_path / "before"), "steps": 12, "b": 4, "s": 48, "rate": 0.03, "rank": 4}
    how |= {"data": 2, "expert": 2, "every": 4}
    whole = {"adapter": str(tmp_path / "adapter"), "save": str(tmp_path / "after")}
    losses = trained(train.main, **how, **whole)
    assert losses[-1][0] < losses[0][0] - 0.1
    some = trained(train.main, **how, keep=tmp_path / "states", until=5)
    np.testing.assert_array_equal([*some, *trained(train.main, **how, keep=tmp_path / "states")], losses)
    adapter = lora.load(MODEL, whole["adapter"], how["checkpoint"])
    sums, after = lora.applied(params, adapter), load(MODEL, whole["save"], jnp.float32)
    for (path, x), y, old in zip(
        jax.tree_util.tree_leaves_with_path(sums), *map(jax.tree.leaves, (after, params)), strict=True
    ):
        learns = path[2:3] and path[2].key == "attention" and path[3].key in lora.MATRICES
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7 if learns else 0, err_msg=path)
        assert (np.asarray(y) != np.asarray(old)).any() == bool(learns), path
    tokens = prompts(1, 16)
    logits = [jax.jit(MODEL)(p, tokens) for p in (sums, after, params)]
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-5)
    assert np.abs(logits[0] - logits[2]).max() > 0.01


@pytest.mark.slow
def test_beside_packed_matrices(tmp_path):
    """Gradients of an adapter beside experts in MXFP4 and matrices in FP8 are those beside what they stand for."""
    checkpoint(MODEL, tmp_path, 128)
    adapter, tokens, found = random(), prompts(2, 24), []
    with common.mesh_of(1, 2, data=1) as mesh:
        for packed in (True, False):
            params = load(MODEL, tmp_path, jnp.float32, mesh, packed=packed, fused=False)
            p = params["layers"][0]
            assert isinstance(p["moe"]["w13"], Packed) == isinstance(p["attention"]["wq_b"], PackedMatrix) == packed
            fixed, beside = {x: params[x] for x in FIXED if x in params}, train.learnable(params)

            def loss(adapter, beside, fixed):
                policy = train.POLICIES["but-attention"]
                return train.losses(MODEL, jnp.float32, policy, lora.beside(beside, adapter), fixed, tokens)[0]

            found.append(computed(jax.jit(jax.value_and_grad(loss)), adapter, beside, fixed))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max()), *found)
