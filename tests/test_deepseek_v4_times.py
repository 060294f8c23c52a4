"""The programs that time the model of examples/deepseek_v4: mfu.py, speed.py, whole.py, and their parts.py."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.deepseek_v4 import common, mfu, packed, parts, speed, stand_in, whole
from examples.deepseek_v4.model import SPLIT, Model
from jax_dsv4_fmha import PackedMatrix
from jax_dsv4_fmha._host import library


def test_speed_s_parameters_in_a_checkpoint_s_form():
    """They are packed, and of such sizes that a step's numbers are neither lost nor great."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 1, "o_groups": 2}
    sizes |= {"o_lora_rank": 128}
    model = Model.from_config({**common.small(), **sizes, "layer_types": ["compressed_sparse_attention"]})
    params = speed.parameters(dataclasses.replace(model, hashed=0), packed=True)
    p, layer = params["layers"][0]["attention"], model.layers[0]
    of_step = (*(p[name] for name in ("wq_b", "wo_a", "wo_b")), p["indexer"]["wq_b"])
    assert all(isinstance(w, PackedMatrix) for w in of_step)
    x = jax.random.normal(jax.random.key(0), (2, 1, 256), p["wx"].dtype)
    y = layer.step(p, x, layer.cache(2, 32, x.dtype), lengths=1).y
    assert 2**-4 < np.std(np.asarray(y, np.float32)) < 2**4


@pytest.mark.slow
def test_speed(tmp_path, capsys):
    """A row for each piece of work, with the time of every kind of layer and the sum over all layers."""
    kinds = [f"{common.KINDS[i]}_attention" for i in (0, 1, 2, 1)]
    config, file = common.small() | {"num_hidden_layers": 4, "layer_types": kinds}, tmp_path / "speed.json"
    rows = speed.main(config=config, contexts=(32,), sequences=(1, 2), chunk=16, calls=1, file=str(file))
    assert [row["tokens"] for row in rows] == [1, 2, 16] and json.loads(file.read_text())["rows"] == rows
    for row in rows:
        of = row["ms"]
        assert row["all"] == pytest.approx(of["window"] + 2 * of["ratio 4"] + of["ratio 16"] + of["head"])
    assert "chunk of 16, 32 tokens" in capsys.readouterr().out


def test_options_of_xla():
    assert whole.option_of("xla_a=+B=1") == ("xla_a", "+B=1")
    for text in ("xla_a", "--xla_a=1"):
        with pytest.raises(ValueError, match=f"--xla: got {text}, wanted NAME=VALUE"):
            whole.option_of(text)


def test_parts_of_a_program():
    """The innermost scope of an operation, forward or backward; else whether it is a product. Programs may have
    operations of one name.
    """
    paths = {
        "dot.1": "jit(step)/transpose(jvp(moe))/while/body/dot_general",
        "fusion.2": "jit(step)/connections/norm/mul",
        "dot.3": "jit(step)/jvp(bsm,mn->bsn)/dot_general",
        "add.4": "jit(step)/layers/attention_norm/add",
    }
    text = "\n".join(f'  %{name} = f32[2]{{0}} f(%x), metadata={{op_name="{path}"}}' for name, path in paths.items())
    text = f"HloModule jit_f, is_scheduled=true\n{text}\nHloModule jit_g\n{text.replace('moe', 'head')}"
    want = {"dot.1": "moe", "fusion.2": "norm", "dot.3": "products", "add.4": "rest"}
    want = {(f"jit_{program}", name): part for program in "fg" for name, part in want.items()}
    assert parts.by_operation(text) == want | {("jit_g", "dot.1"): "head"}


def test_sums_over_devices_are_collectives() -> None:
    """A step has them by kernels of ours, in whatever scope, whose symbols the profiler tells."""
    symbols = [row["symbol"] for row in library.manifest()["variants"] if row["op"] == "all_reduce"]
    if not symbols:
        pytest.skip("the library has no kernels for H100 and H200")
    assert all(parts.KERNELS["collectives"].search(symbol) for symbol in symbols)


def test_the_first_layers_of_a_config():
    """By Hugging Face's names or DeepSeek's, and where the text model is a part of a larger one."""
    config = common.small() | {"n_layers": 3, "n_hash_layers": 1, "model_type": "deepseek_v4"}
    for given in (config, {"model_type": "other", "text_config": config}):
        model = Model.from_config(mfu.first_layers(given, 2, 4) | {"model_type": None})
        assert (len(model.layers), model.experts, model.hashed) == (2, 4, 0)
    with pytest.raises(ValueError, match="--layers: got 4, wanted at most the 3 of the model"):
        mfu.first_layers(config, 4, 4)


@pytest.mark.parametrize("program", [mfu, speed, whole])
def test_a_file_that_cannot_be_written_is_known_first(program, tmp_path, monkeypatch):
    monkeypatch.setattr(Model, "from_config", lambda *_: pytest.fail("the model was made before"))
    with pytest.raises(FileNotFoundError, match="missing"):
        program.main(config=common.small(), file=str(tmp_path / "missing" / "rows.json"))


def test_a_timed_step_begins_before_the_last_one_is_waited_for(monkeypatch):
    events, numbers = [], itertools.count()

    def call():
        events.append(f"begins {(n := next(numbers))}")
        return n

    monkeypatch.setattr(jax, "block_until_ready", lambda n: events.append(f"waits for {n}") or n)
    last, seconds = mfu.in_a_row(call, 2)
    begun_and_waited_for = "begins 1", "waits for 0", "begins 2", "waits for 1", "begins 3", "waits for 2"
    assert events == ["begins 0", *begun_and_waited_for, "waits for 3"]
    assert last == 3 and len(seconds) == 2


@pytest.mark.slow
def test_mfu(tmp_path, capsys):
    """Two devices train the first layers of a model: a row, and its lines."""
    file = tmp_path / "mfu.json"
    row = mfu.main(config=common.small(), layers=3, experts=4, s=64, calls=1, expert=2, data=1, file=str(file))
    assert json.loads(file.read_text()) == row and row["devices"] == 2 and row["mfu"] is None
    assert row["tokens/s"] == pytest.approx(128e3 / row["ms"]) and "GiB of state" in capsys.readouterr().out


@pytest.mark.slow
def test_whole(tmp_path, capsys, monkeypatch):
    """Over two devices: a row for each piece of work, of parameters whose experts lie apart."""
    program, made = whole.program, []

    def noted(*given, **options):
        made.append((*given[:2], program(*given, **options)))
        return made[-1][-1]

    monkeypatch.setattr(whole, "program", noted)
    kinds = [f"{common.KINDS[i]}_attention" for i in (0, 1, 2, 1)]
    config = common.small() | {"num_hidden_layers": 4, "layer_types": kinds, "num_hash_layers": 1}
    config |= {"hidden_size": 256, "moe_intermediate_size": 256, "o_groups": 2, "o_lora_rank": 128}
    file, works = tmp_path / "whole.json", {"contexts": (16, 32), "sequences": (2,), "chunk": 32}
    rows = whole.main(
        config=config, **works, calls=1, expert=2, xla=["xla_cpu_enable_fast_min_max=True"], file=str(file)
    )
    assert [row["work"] for row in rows] == ["step, b 2, 16 tokens", "chunk of 32, 32 tokens"]
    assert json.loads(file.read_text())["rows"] == rows and "chunk of 32, 32 tokens" in capsys.readouterr().out
    assert [row["rounds"] for row in rows] == [4, 1]
    model, params, (step, *_) = made[0]
    of_step = set(parts.by_operation(step.as_text()).values())
    assert {"attention", "products", "moe", "connections", "head"} <= of_step
    wanted = stand_in.thinned(jax.eval_shape(lambda key: model.joined(model.init(key, jnp.float32)), jax.random.key(0)))
    found = stand_in.thinned(packed.whole(params, jnp.float32))
    for layer in found["layers"]:  # whose gate is before what it lets through
        layer["moe"]["shared13"] = layer["moe"]["shared13"].swapaxes(0, 1)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, wanted)
    for layer in params["layers"]:
        of_step = [layer["attention"][name] for name in ("wq_b", "wo_a", "wo_b")]
        of_step += [layer["moe"][name] for name in ("shared13", "shared2")]
        assert [w.data.sharding.spec.index(SPLIT) for w in of_step] == [0, 0, 1, 1, 1]
        assert all(x.sharding.spec[0] == "expert" for x in jax.tree.leaves((layer["moe"]["w13"], layer["moe"]["w2"])))
    gates = [np.asarray(layer["moe"]["gate"]) for layer in params["layers"]]
    assert not np.array_equal(gates[1], gates[3])
    with pytest.raises(NotImplementedError, match="got a model of 64 channels, and 32 in an expert, wanted V4's"):
        whole.main(config=common.small(), **works)
    with pytest.raises(ValueError, match="--parts: got cpu, wanted GPUs"):
        whole.main(config=config, **works, parts=True)
