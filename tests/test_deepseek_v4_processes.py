"""examples/deepseek_v4: training by two processes of four devices each."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.deepseek_v4 import cluster, common, data, metrics, train
from examples.deepseek_v4.model import Model
from examples.deepseek_v4.save import save
from examples.deepseek_v4.weights import load

from .helpers import QUICK

ROOT = Path(__file__).resolve().parents[1]
CONFIG = {
    **common.SMALL, "num_hidden_layers": 1, "layer_types": ["compressed_sparse_attention"], "num_hash_layers": 0,
    "hc_sinkhorn_iters": 1, "head_dim": 32, "qk_rope_head_dim": 8, "index_head_dim": 8, "dspark_target_layer_ids": [0],
}  # fmt: skip
HOW = {"b": 4, "s": 64, "steps": 7, "every": 2, "context": 2, "expert": 2}
PROGRAM = """
import json, os, signal, sys
import jax.numpy as jnp
from examples.deepseek_v4 import common, metrics, train
from examples.deepseek_v4.checkpoint import Checkpoint

how, lost_at = json.loads(sys.argv[1])
add, parameters_of, piece, read = metrics.Log.add, common.parameters_of, Checkpoint.piece, []

def noted(checkpoint, name, *where):
    made = piece(checkpoint, name, *where)
    read.append(made[0].nbytes if ".experts." in name else 0)
    return made

def loaded(*which, **how):  # over another mesh first, in which each device has its own part of the experts
    with common.mesh_of(2, 4) as mesh:
        parameters_of(*which[:2], mesh, jnp.float32)
    print("bytes of experts:", sum(read))
    return parameters_of(*which, **how)

def dies(log, step, *others):
    if step == lost_at:
        os.kill(os.getpid(), signal.SIGKILL)
    add(log, step, *others)

Checkpoint.piece, common.parameters_of, metrics.Log.add = noted, loaded, dies
train.main(**how)
"""
"""trains, says how much of the experts' weights it read, and dies at a step"""


def started(devices, lost_at=None, **how):
    env = dict(os.environ, JAX_NUM_CPU_DEVICES=str(devices), XLA_FLAGS=QUICK, PYTHONUNBUFFERED="1")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    call = [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps([how, lost_at])]
    return subprocess.Popen(call, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def address():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def measured(directory):
    lines = metrics.read(Path(directory) / "metrics.jsonl")
    names = ("loss", "of_indexers", "grad_norm", "load", "recall", "length")
    return {line["step"]: [line[name] for name in names] for line in lines}


@pytest.mark.slow
def test_two_processes(tmp_path):
    """They have the numbers of one process to the bit, if its devices add up by gloo, too. One is lost, and a process
    of four devices goes on with the others' last state.
    """
    model = Model.from_config(CONFIG)
    save(model, model.init(jax.random.key(0), jnp.float32), tmp_path / "model", dtype=jnp.float32)
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    walks, random = data.Walks(64, 100, 0), np.random.default_rng(0)
    text = "\n".join(" ".join(map(str, walks[i].tokens[: random.integers(5, 100)])) for i in range(100))
    (tmp_path / "text").write_text(text)
    data.main([str(tmp_path / "text")], str(tmp_path / "shards"))
    how = {**HOW, "checkpoint": str(tmp_path / "model"), "tokens": str(tmp_path / "shards")}

    one = started(8, **how, keep=str(tmp_path / "one"), coordinator=address(), processes=1, process=0)
    said, _ = one.communicate()
    assert one.returncode == 0, said
    want = measured(tmp_path / "one")
    assert sorted(want) == list(range(7))

    two, at = {**how, "keep": str(tmp_path / "two"), "processes": 2}, address()
    others = [started(4, [None, 5][i], **two, coordinator=at, process=i) for i in range(2)]
    try:
        of_lost, _ = others[1].communicate()
        assert others[1].returncode == -signal.SIGKILL, of_lost
        lines = []
        for line in others[0].stdout:  # it waits for the lost process when it has said its error
            lines.append(line)
            if line.startswith("jax.errors.JaxRuntimeError"):
                break
        else:
            pytest.fail("".join(lines))
    finally:
        for process in others:
            process.kill()
            process.wait()
            process.stdout.close()
    read = [int(re.search(r"bytes of experts: (\d+)", text)[1]) for text in (said, "".join(lines), of_lost)]
    assert read[0] == 8 * 3 * 64 * 32 * 4 and read[1] == read[2] == read[0] / 2
    got = measured(tmp_path / "two")
    assert 4 in got and got == {step: want[step] for step in got}

    train.main(**how, keep=str(tmp_path / "two"), data=1)
    later = measured(tmp_path / "two")
    assert sorted(later) == list(range(7))
    for step in range(7):
        for x, y in zip(later[step], want[step], strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4)


SAVES = """
import json, sys
import jax.numpy as jnp
from examples.deepseek_v4 import cluster, common, save
from examples.deepseek_v4.model import Model

config, directory, joins = json.loads(sys.argv[1])
save.PIECE = 5000
with cluster.joined(**joins), common.mesh_of(2, 2, data=1) as mesh:
    model = Model.from_config(config)
    params = common.parameters_of(model, None, mesh, jnp.float32)
    assert not all(x.is_fully_replicated for x in (params["head"], params["layers"][0]["moe"]["w13"]))
    save.save(model, params, directory, dtype=jnp.float32)
"""


@pytest.mark.slow
def test_two_processes_save(tmp_path):
    """They gather in pieces what each has a part of, and the first one writes it."""
    env = dict(os.environ, JAX_NUM_CPU_DEVICES="2", XLA_FLAGS=QUICK, PYTHONPATH=str(ROOT))
    joins = [{"coordinator": at, "processes": 2, "process": i} for at in [address()] for i in range(2)]
    calls = [[sys.executable, "-c", SAVES, json.dumps([CONFIG, str(tmp_path / "saved"), x])] for x in joins]
    both = [subprocess.Popen(x, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for x in calls]
    for process in both:
        said, _ = process.communicate(timeout=200)
        assert process.returncode == 0, said
    model = Model.from_config(CONFIG)
    want = jax.jit(model.init, static_argnums=1)(jax.random.key(0), jnp.float32)
    got = load(model, tmp_path / "saved", jnp.float32)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), got, want)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"coordinator": "host:1", "processes": 2}, "wanted --coordinator, --processes and --process together"),
        ({"cluster": True, "process": 0}, "or --cluster alone"),
        ({"coordinator": "host:1", "processes": 2, "process": 2}, "--process: got 2, wanted 0 to 1"),
    ],
    ids=str,
)
def test_options_of_processes(given, message):
    with pytest.raises(ValueError, match=message), cluster.joined(**given):
        pytest.fail("joined")


def test_no_cluster(monkeypatch):
    """JAX finds none around a test; the error says the option."""
    monkeypatch.setattr(jax._src.xla_bridge, "backends_are_initialized", lambda: False)
    with pytest.raises(ValueError, match="--cluster: got no Slurm, Kubernetes or Open MPI"), cluster.joined(True):
        pytest.fail("joined")
