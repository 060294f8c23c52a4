"""examples/deepseek_v4: the tokens that training sees, and what it says of a step."""

import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from examples.deepseek_v4 import common, data, metrics, train
from examples.deepseek_v4.model import FIXED
from examples.deepseek_v4.states import States
from jax_dsv4_fmha import head_summed_probabilities
from jax_dsv4_fmha.layers import Shared, rope

from .test_deepseek_v4 import assert_close, prompts, small
from .test_deepseek_v4_training import unrounded

TEXT = "1 2 3 4 5\n\n6 7\n8 9 10 11 12 13 14 15 16\n17\n18 19 20\n"


@pytest.fixture
def shards(tmp_path):
    """Documents of 6, 3, 10, 2 and 4 tokens with the token that ends each, in two shards."""
    (tmp_path / "text.txt").write_text(TEXT)
    data.main([str(tmp_path / "text.txt")], str(tmp_path / "shards"), end=63, most=19)
    return tmp_path / "shards"


def read(shards, s):
    rows = data.rows_of(str(shards), 64, s, seed=0)
    return [rows[i] for i in range(len(rows))]


def test_shards_of_a_text(shards, tmp_path, capsys):
    """A row has the next tokens of its shard, and tells documents apart, also one that began in the row before."""
    index = json.loads((shards / "shards.json").read_text())
    checksum = index.pop("checksum")
    assert index == {"vocabulary": 64, "tokens": {"00000": 19, "00001": 6}}
    whole = [int(x) for row in read(shards, 1) for x in row.tokens]
    documents = [[int(x) for x in line.split()] + [63] for line in TEXT.splitlines() if line]
    text = " ".join(map(str, whole)) + " "
    assert len(whole) == 25 and all(" ".join(map(str, x)) + " " in text for x in documents)
    for s, count in ((5, 4), (6, 4), (19, 1)):
        rows = read(shards, s)
        assert len(rows) == count
        for row in rows:
            begins = [0, *(np.flatnonzero(row.tokens[:-1] == 63) + 1)]
            assert row.tokens.dtype == row.documents.dtype == np.int32
            np.testing.assert_array_equal(np.flatnonzero(np.diff(row.documents, prepend=-1)), begins)
    assert np.load(shards / "00000.tokens.npy").dtype == np.uint8
    lines = [json.dumps({"text": line, "other": 1}) for line in TEXT.splitlines()]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    data.main([str(tmp_path / "text.jsonl")], str(tmp_path / "others"), end=63, most=19)
    jax.tree.map(np.testing.assert_array_equal, read(tmp_path / "others", 5), read(shards, 5))
    assert "5 documents, 25 tokens, 2 shards in " in capsys.readouterr().out
    said = str(data.rows_of(str(shards), 64, 5, seed=0))
    assert said == f"25 tokens of 5 documents, checksum {checksum}"  # a state of training knows its tokens by this
    data.main([str(tmp_path / "text.txt")], str(tmp_path / "again"), end=63, most=19, seed=1)
    assert str(data.rows_of(str(tmp_path / "again"), 64, 5, seed=0)) != said


@pytest.mark.parametrize(
    "name, text, how, message",
    [
        ("a.txt", "1 2\n3 64\n", {}, r"a\.txt:2: got 64 as token number 1, wanted integers from 0 to 63"),
        ("a.txt", "1 2\nword\n", {}, r"a\.txt:2: got 'word', wanted tokens"),
        ("a.txt", "\n\n", {}, "got no document to write"),
        ("a.txt", "1", {"end": 64}, "--end: got 64 as token number 0"),
        ("a.jsonl", '{"words": "1"}', {}, r'a\.jsonl:1: got .*, wanted an object with a "text"'),
        ("a.txt", "1 2\n3 \udcff\n", {}, r"a\.txt:2: got '\\udcff', wanted tokens"),
        ("a.jsonl", "1 2", {}, r'a\.jsonl:1: got .*, wanted an object with a "text"'),
    ],
)
def test_texts_that_make_no_shards(name, text, how, message, tmp_path):
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message):
        data.main([str(tmp_path / name)], str(tmp_path / "shards"), **how)
    assert not (tmp_path / "shards" / data.INDEX).exists()


def test_shards_that_are_refused(shards, tmp_path, monkeypatch):
    """Before the model is made, if they say it; and otherwise when the row is read that has a wrong token."""
    monkeypatch.setattr(common, "parameters_of", lambda *_, **__: pytest.fail("the model was made before"))
    for how, message in (
        ({"tokens": str(tmp_path), "s": 4}, r"got no shards\.json"),
        ({"tokens": str(shards), "s": 20}, "got no shard of 20 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            train.main(**how)
    with pytest.raises(ValueError, match="got shards of 64 tokens, wanted the model's 63"):
        data.Shards(shards, 63, 4)
    with pytest.raises(ValueError, match=r"shards: got a directory with shards\.json, wanted a new one"):
        data.main([str(tmp_path / "text.txt")], str(shards))
    tokens = np.load(shards / "00000.tokens.npy")
    tokens[7] = 64
    np.save(shards / "00000.tokens.npy", tokens)
    rows = data.Shards(shards, 64, 4)
    assert rows[0].tokens.shape == (4,)
    with pytest.raises(ValueError, match="00000, from token 4 on: got 64 as token number 3"):
        rows[1]
    np.save(shards / "00000.tokens.npy", tokens[:-1])
    with pytest.raises(ValueError, match="00000: got 18 tokens, wanted 19"):
        data.Shards(shards, 64, 4)


def test_what_shards_need_is_asked_for_first(shards, monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    monkeypatch.setattr(common, "parameters_of", lambda *_, **__: pytest.fail("the model was made before"))
    with pytest.raises(SystemExit, match=r"--tokens: got no package grain, wanted .*pip install '\.\[examples\]'"):
        train.main(tokens=str(shards), s=4)


@pytest.mark.parametrize("of", ["shards", "walks"])
def test_batches(of, shards):
    """All rows of each pass over them, in another order; the same after a stop, and on however many devices."""
    rows = data.rows_of(str(shards) if of == "shards" else None, 64, 3, seed=0)
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    batches = data.Batches(rows, 4, NamedSharding(mesh, P("data")), seed=0)
    found = list(batches.between(0, 6))
    assert [list(x) for x in found] == [[0, 1, 2, 3]] * 6
    jax.tree.map(np.testing.assert_array_equal, list(batches.between(4, 6)), found[4:])
    if of == "shards":
        every = [tuple(row.tokens) for x in found for row in x.values()]
        passes = [every[:8], every[8:16], every[16:]]
        assert all(sorted(x) == sorted(passes[0]) for x in passes) and len(set(map(tuple, passes))) == 3
    batches.own = [2, 3]  # as in the second of two processes
    for part, whole in zip(batches.between(0, 6), found, strict=True):
        jax.tree.map(np.testing.assert_array_equal, part, {row: whole[row] for row in (2, 3)})
    batch = batches.on_devices(found[0])
    assert batch.tokens.sharding.shard_shape(batch.tokens.shape) == (1, 3)
    np.testing.assert_array_equal(batch.tokens, [row.tokens for row in found[0].values()])
    assert (batch.documents is None) == (of == "walks")


def test_states(tmp_path):
    """The last ones, and the very last; a program whose batches would be others does not go on with them."""
    states = States(tmp_path, 2, {"b": 4})
    assert states.last() is None
    for step in range(4):
        if states.wants(step, is_last=step == 3):
            states.save(step, {"x": jnp.full(2, step)})
    states.close()
    states = States(tmp_path, 2, {"b": 4})
    assert states.last() == 3 and {path.name for path in tmp_path.iterdir()} == {"2", "3"}
    assert states.restore(3, {"x": jax.ShapeDtypeStruct((2,), jnp.int32)})["x"].tolist() == [3, 3]
    for other in ({"y": jax.ShapeDtypeStruct((2,), jnp.int32)}, {"x": jax.ShapeDtypeStruct((3,), jnp.int32)}):
        with pytest.raises(ValueError, match="got a state of other arrays, wanted those of this model") as raised:
            states.restore(3, other)
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 400 + len(str(tmp_path))
    states.close()
    states = States(tmp_path, 2, {"b": 8})
    with pytest.raises(ValueError, match=r"got a state of training by \{.b.: 4\}, wanted one by \{.b.: 8\}"):
        states.restore(3, None)
    states.close()
    assert not States(None, 2, {}).wants(2, is_last=True)


def test_batches_that_devices_cannot_share(monkeypatch):
    monkeypatch.setattr(common, "parameters_of", lambda *_, **__: pytest.fail("the model was made before"))
    with pytest.raises(ValueError, match="b: got 6, wanted a multiple of 4, over which data and expert share it out"):
        train.main(b=6, data=4)


@pytest.mark.parametrize("name", ["v4", pytest.param("v4.1", marks=pytest.mark.slow)])
def test_documents_see_no_other(name, monkeypatch):
    """The losses and loads of three documents in a row are those of the three alone, also where no block ends."""
    model, params = small(name)
    monkeypatch.setattr(metrics, "SAMPLED", 1 << 20)  # every query, in both
    model, tokens = unrounded(model), prompts(1, 135, seed=2)
    learned, fixed = ({k: x for k, x in params.items() if (k in FIXED) == is_it} for is_it in (False, True))
    with common.mesh_of(1, 1, data=1):
        of = jax.jit(functools.partial(train.losses, model, jnp.float32, train.POLICIES["all"]))
        got = of(learned, fixed, tokens, np.repeat([[4, 2, 5]], 45, 1).astype(np.int32))
        want = of(learned, fixed, tokens.reshape(3, 45))
    jax.tree.map(functools.partial(assert_close, tolerance=1e-5), got, want)
    assert_close(want[1][4], 45)  # the length that MFU counts with
    assert (want[1][3] < 1).any()  # some queries had more entries than are chosen


@pytest.mark.slow
def test_documents_over_devices():
    """Two devices that share out the tokens of packed documents have the numbers of one."""
    model, params = small()
    learned, fixed = ({k: x for k, x in params.items() if (k in FIXED) == is_it} for is_it in (False, True))
    documents = np.repeat(range(6), [3, 50, 11, 33, 30, 1]).reshape(2, 64).astype(np.int32)
    found = []
    for context in (1, 2):
        with common.mesh_of(1, 1, data=1, context=context) as mesh:
            of = jax.jit(functools.partial(train.losses, model, jnp.float32, train.POLICIES["all"]))
            found.append(of(*jax.device_put((learned, fixed, prompts(2, 64), documents), NamedSharding(mesh, P()))))
    jax.tree.map(functools.partial(assert_close, tolerance=1e-5), *jax.device_get(found))


def test_recall():
    """The chosen entries' part of the attention that all past ones get, of queries that have more than are chosen."""
    model, params = small()
    layer, p = model.layers[1], params["layers"][1]["attention"]
    b, s, n = 2, 64, 16
    x = jax.random.normal(jax.random.key(0), (b, s, model.hidden))
    place = jnp.broadcast_to(jnp.arange(s), (b, s))
    out = jax.jit(layer)(p, x)
    past = jnp.zeros_like(place), (place + 1) // layer.ratio
    got = metrics.recall(layer, out, Shared(), place, past)
    q, lse, places = (x[:, 1::2] for x in (out.indexed.attention_q, out.indexed.lse, place))
    q = rope(q * jax.lax.rsqrt(jnp.square(q).mean(-1, keepdims=True) + layer.eps), places, layer.rope)
    seen = jnp.arange(n) < past[1][:, 1::2, None]
    mass = functools.partial(head_summed_probabilities, q, out.made.compressed, lse, implementation="reference")
    chosen, every = mass(out.indices[:, 1::2]).sum(-1), mass(jnp.where(seen, jnp.arange(n), -1)).sum(-1)
    counts = seen.sum(-1) > layer.indexer.topk
    assert_close(got, (chosen / every)[counts].mean(), 1e-4)
    assert 0 < got < 0.99
    everything = metrics.recall(layer, out, Shared(), place, (past[0], jnp.minimum(past[1], 8)))
    assert everything == 1


def numbers(loss, recall=(0.75,)):
    some = np.float32(loss), np.float32(0.1), np.float32(1.5), np.array([1.5, 2.25], np.float32)
    return metrics.Step(*some, np.array(recall, np.float32), np.float32(16))


def test_a_log(tmp_path, capsys, monkeypatch):
    """A line at every other step, JSON at each; who goes on writes over the steps that were not kept; a picture."""
    monkeypatch.setitem(metrics.PEAK, "cpu", 1e12)
    how = {"devices": 2, "tokens": 32, "every": 2, "directory": tmp_path, "last": 4}
    log = metrics.Log(common.model_of(None), **how, first=0)
    for i in range(4):
        log.add(i, {}, numbers(4 - i / 8))
        assert len(log.found) == i  # it waits for the step before alone
    log.look()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # of a program that died
    log = metrics.Log(common.model_of(None), **how, first=2)
    for i in (2, 3, 4):
        log.add(i, {}, numbers(3 - i / 8, recall=()))
    log.look()
    lines = metrics.read(tmp_path / "metrics.jsonl")
    assert [(x["step"], x["loss"]) for x in lines] == [(0, 4), (1, 3.875), (2, 2.75), (3, 2.625), (4, 2.5)]
    assert lines[1]["load"] == [1.5, 2.25] and lines[0]["tokens_per_second"] is None and lines[1]["mfu"] > 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "step    0  loss 4.000, of indexers 0.1000, gradient 1.500, load 2.25, recall 0.750"
    assert re.fullmatch(r"step    4  loss 2.500, .*, load 2.25; \d+ tokens/s, MFU [\d.]+%", said[-1]) and len(said) == 4
    metrics.main([str(tmp_path / "metrics.jsonl")] * 2, str(tmp_path / "run.svg"))
    assert "busiest expert" in (tmp_path / "run.svg").read_text()
    (tmp_path / "other.jsonl").write_text("1\n2\n")
    with pytest.raises(ValueError, match=r"other\.jsonl: got other lines"):
        metrics.main([str(tmp_path / "other.jsonl")], str(tmp_path / "run.svg"))


def test_a_loss_that_is_no_number(tmp_path):
    """The program stops, says the step, and keeps this process's rows of the batch; the file has the step's line."""
    log = metrics.Log(common.model_of(None), 1, 32, 2, tmp_path, 0, 4)
    rows = {2: data.Row(np.arange(3), np.zeros(3)), 3: data.Row(np.arange(3, 6), np.ones(3))}
    log.add(0, rows, numbers(4))
    log.add(1, rows, numbers(np.nan))
    with pytest.raises(
        FloatingPointError, match=r"step 1: got loss nan, .*; the batch is in .*batch-of-step-1-process-0"
    ):
        log.look()
    with np.load(tmp_path / "batch-of-step-1-process-0.npz") as kept:
        assert kept["rows"].tolist() == [2, 3] and kept["tokens"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert [x["loss"] for x in metrics.read(tmp_path / "metrics.jsonl")] == [4, None]
