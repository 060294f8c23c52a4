"""examples/deepseek_v4: the model by chunks, steps, pages and shards, and its programs.

test_deepseek_v4_checkpoint.py has its checkpoints, test_deepseek_v4_kernels.py its kernels,
test_deepseek_v4_training.py its training, and sequences over devices, test_deepseek_v4_times.py the programs that time
it. test_hf_model.py compares it with Hugging Face's.
"""

import functools
import json
import os
import re
import runpy
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from examples.deepseek_v4 import (
    choices,
    common,
    data,
    engram,
    load,
    metrics,
    serve,
    train,
)
from examples.deepseek_v4.drafts import DSpark
from examples.deepseek_v4.model import FIXED, Model
from examples.serving import Request, Server
from jax_dsv4_fmha import PackedMatrix

from . import model_float64
from .helpers import QUICK, assert_in_place, computed
from .test_layer_config import published

SIZES = {"head_dim": 32, "qk_rope_head_dim": 8, "index_head_dim": 16}
V41 = {
    name: x for name, x in common.SMALL.items() if name not in ("layer_types", "compress_rate_hca", "num_hash_layers")
}
V41 |= SIZES | {"index_head_dim": 32} | {
    "num_hidden_layers": 5, "compress_ratios": [0, 2, 1, 1, 1], "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 4], "candidate_source_layer_id": 2, "candidate_topk_blocks": 3,
    "candidate_block_size": 4, "gate_temp": 1.5, "engram_layer_ids": [1, 3], "engram_num_embeddings": [72, 204],
    "engram_max_ngram_size": 4, "engram_n_heads": 2, "engram_head_dim": 64, "engram_vocab_size": 5,
    "engram_compressed_vocab_size": 23, "engram_pad_token_id": 2, "sliding_window": 8,
    "dspark_target_layer_ids": [1, 4], "dspark_n_routed_experts": 6, "dspark_num_experts_per_tok": 2,
}  # fmt: skip
WINDOWS = {"layer_types": ["sliding_attention"] * 2, "num_hidden_layers": 2, "dspark_target_layer_ids": [0, 1]}
CONFIGS = {"v4": common.SMALL | SIZES, "v4.1": {"text_config": V41}}


@functools.cache
def small(name="v4"):
    """A model of every kind of layer, and parameters in which nothing is 0 or 1."""
    return random(Model.from_config(CONFIGS[name]))


def random(model):

    def changed(path, x):
        key = jax.random.fold_in(jax.random.key(1), zlib.crc32(jax.tree_util.keystr(path).encode()))
        return x + 0.3 * jax.random.normal(key, x.shape) if x.ndim == 1 or path[-1].key in "qk" else x

    params = model.init(jax.random.key(0), jnp.float32)
    fixed = {name: params.pop(name) for name in FIXED if name in params}
    biases = enumerate(fixed["routing"])
    fixed["routing"] = [x if x.ndim == 2 else x + 0.1 * jnp.cos(7 * i + jnp.arange(len(x))) for i, x in biases]
    for table in fixed.get("tables", {}).values():
        powers = jax.random.randint(jax.random.key(2), table["scales"].shape, -2, 2)
        table["scales"] = jnp.exp2(powers).astype(table["scales"].dtype)
    return model, {**jax.tree_util.tree_map_with_path(changed, params), **fixed}


def prompts(b, s, seed=3):
    return np.random.default_rng(seed).integers(0, 64, (b, s)).astype(np.int32)


def assert_close(got, want, tolerance=2e-5):
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize("name", ["v4", pytest.param("v4.1", marks=pytest.mark.slow)])
def test_whole_sequences(name):
    """Against loops in float64."""
    model, params = small(name)
    tokens = prompts(2, 21)
    got = jax.jit(model)(params, tokens)
    for i in range(2):
        assert_close(got[i], model_float64.logits(model, params, tokens[i]))


@pytest.mark.parametrize(
    "name, paged",
    [("v4", False), *(pytest.param(*x, marks=pytest.mark.slow) for x in (("v4", True), ("v4.1", False)))],
)
def test_chunks_and_steps(name, paged):
    """Prompts of different lengths in chunks, then steps: the logits of whole sequences."""
    model, params = small(name)
    lengths, chunk, steps = np.array([21, 4, 30], np.int32), 12, 20
    tokens = prompts(3, 50)
    want = np.asarray(jax.jit(model)(params, tokens))
    pages = {"block_table": np.arange(12).reshape(3, 4)[::-1].astype(np.int32), "page_tokens": 16} if paged else {}
    caches = model.cache(3, 50, jnp.float32, **pages)
    read, step = jax.jit(model.read, donate_argnums=2), jax.jit(model.step, donate_argnums=2)
    for at in range(0, 30, chunk):
        logits, caches = read(params, tokens[:, at : at + chunk], caches, np.int32(at), np.minimum(lengths, at + chunk))
        for i, n in enumerate(lengths):
            if at < n <= at + chunk:
                assert_close(logits[i], want[i, n - 1])
    joined = model.joined(params)
    for i in range(steps):
        at = lengths + i
        logits, caches = step(joined, tokens[range(3), at], caches, at + 1)
        assert_close(logits, want[range(3), at])


def test_several_steps_are_one_call():
    """The likeliest tokens, as steps one by one say them, and the same caches."""
    model, params = small()
    lengths, tokens = np.array([9, 4], np.int32), prompts(2, 12)
    logits, caches = jax.jit(model.read)(params, tokens, model.cache(2, 32, jnp.float32), np.int32(0), lengths)
    first = logits.argmax(-1).astype(np.int32)
    many = jax.jit(functools.partial(model.several, count=5))
    made, after = many(params, first, caches, lengths + 1)
    step, said, token = jax.jit(model.step), [], first
    for i in range(5):
        logits, caches = step(params, token, caches, lengths + 1 + i)
        token = logits.argmax(-1).astype(np.int32)
        said.append(token)
    np.testing.assert_array_equal(made, np.stack(said, 1))
    jax.tree.map(lambda x, y: assert_close(x, y), after, caches)


def test_stablehlo_grows_by_a_call_for_a_layer():
    """Steps and chunks have a function for each kind of layer, however many layers there are."""

    def text(layers, method, *tokens):
        kinds = [f"{common.KINDS[kind]}_attention" for kind in (0, *[1, 2] * layers)][:layers]
        model = Model.from_config(CONFIGS["v4"] | {"num_hidden_layers": layers, "layer_types": kinds})
        params, caches = jax.eval_shape(lambda: (model.init(jax.random.key(0)), model.cache(2, 64)))
        operands = params, jnp.zeros((2, *tokens), jnp.int32), caches, *[jnp.full(2, 40)] * (1 + len(tokens))
        traced = jax.jit(getattr(model, method), donate_argnums=2).trace(*operands)
        assert_in_place(traced)
        return traced.lower(lowering_platforms=("cuda",)).as_text().splitlines()

    for how in (("step",), ("read", 8)):
        few, many = text(5, *how), text(9, *how)
        assert len(many) == len(few) + 4


@pytest.mark.parametrize("data, asked", [(1, False), (2, True)])
@pytest.mark.parametrize("method, tokens", [("step", ()), ("read", (8,))])
def test_devices_that_share_heads_are_not_asked_for_each_op(data, asked, method, tokens):
    """Where devices share no sequences, a layer is one shard_map: XLA asks no op what a device computes."""
    model = Model.from_config(CONFIGS["v4"])
    operands = np.zeros((2, *tokens), np.int32), *[np.full(2, 12, np.int32)] * (1 + len(tokens))
    with common.mesh_of(1, 2, data):
        params, caches = jax.eval_shape(lambda: model.init(jax.random.key(0))), model.cache(2, 64)
        text = jax.jit(getattr(model, method)).lower(params, operands[0], caches, *operands[1:]).as_text()
    assert ("CustomSPMDPartitioning" in text) == asked


@pytest.mark.slow
def test_compiled_programs_are_kept(tmp_path):
    """A program that is run again finds in --compiled what the first one left there, and adds nothing."""
    left, env = [], {**os.environ, "XLA_FLAGS": QUICK}
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"  # otherwise what is kept depends on the machine's load
    for _ in range(2):
        command = [sys.executable, "-m", "examples.deepseek_v4.choices", "--compiled", str(tmp_path)]
        command += ["--length", "20", "--distances", "1"]
        subprocess.run(command, check=True, cwd=Path(__file__).parents[1], capture_output=True, env=env)
        left.append(sorted(path.name for path in tmp_path.glob("*-cache")))
    assert left[0] and left[0] == left[1]


def results(name, params):
    """Logits of a prompt and of a step, and in V4 a gradient."""
    model, tokens = small(name)[0], prompts(2, 24)

    def loss(learned, fixed):
        logits = model({**learned, **fixed}, tokens)[:, :-1]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1).mean()

    caches = model.cache(2, 32, jnp.float32)
    first, caches = jax.jit(model.read)(params, tokens, caches, np.int32(0), np.full(2, 24, np.int32))
    second, _ = jax.jit(model.step)(params, tokens[:, 0], caches, np.full(2, 25, np.int32))
    learned, fixed = ({k: x for k, x in params.items() if (k in FIXED) == is_fixed} for is_fixed in (False, True))
    return first, second, computed(jax.jit(jax.grad(loss)), learned, fixed) if name == "v4" else None


@functools.cache
def of_one_device(name):
    return results(name, small(name)[1])


@pytest.mark.slow
@pytest.mark.parametrize("name, shape", [("v4", (2, 2, 2)), ("v4", (1, 1, 8)), ("v4.1", (2, 2, 1))])
def test_shards(name, shape):
    """Logits, steps and gradients over 4 and 8 devices are those of one device, up to rounding."""
    model, params = small(name)
    data, tensor, expert = shape
    with common.mesh_of(tensor, expert, data) as mesh:
        params = jax.tree.map(lambda x, p: jax.device_put(x, NamedSharding(mesh, p)), params, model.partition())
        got = results(name, params)
    jax.tree.map(functools.partial(assert_close, tolerance=3e-4), got, of_one_device(name))
    if name == "v4":
        w13 = got[2]["layers"][1]["moe"]["w13"]
        assert w13.sharding.shard_shape(w13.shape) == (8 // expert, 2, 32 // tensor, 64)


@pytest.mark.slow
def test_choices_in_common(capsys):
    """The program's tables against sets, of a model of V4.1 whose layers choose from the same entries."""
    layers = {
        "compress_ratios": [0, 2, 2],
        "num_hidden_layers": 3,
        "kv_source_layer_ids": [1],
    }
    sizes = {"index_source_layer_ids": [1, 2], "index_topk": 4, "candidate_source_layer_id": -1}
    without_tables = {name: x for name, x in V41.items() if not name.startswith("engram_")}
    model, params = random(Model.from_config(without_tables | layers | sizes))
    tokens = np.random.default_rng(0).integers(0, model.vocabulary, 60)
    found = {i: np.asarray(x) for i, x in choices.choices(model, params, jnp.asarray(tokens, jnp.int32)).items()}
    assert found.keys() == {1, 2} and not np.array_equal(found[1], found[2])
    sets = {i: [set(row[row >= 0].tolist()) for row in x] for i, x in found.items()}
    late = range(20, 60)
    want = np.mean([len(sets[2][t] & sets[1][t]) / 4 for t in late])
    assert choices.overlap(found[2], found[1], np.arange(60) >= 20) == pytest.approx(want)
    assert choices.overlap(found[1][3:], found[1][:-3], np.arange(3, 60) >= 20) == pytest.approx(
        np.mean([len(sets[1][t] & sets[1][t - 3]) / 4 for t in late])
    )
    shares = choices.main(length=64, distances=(1, 2))
    assert {(1, 1), (1, 2), (1, "by chance")} == shares.keys() and all(0 <= x <= 1 for x in shares.values())
    assert capsys.readouterr().out.count("%") == 3


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"num_hash_layers": None}, "got none of num_hash_layers, n_hash_layers"),
        ({"n_shared_experts": 2}, "got 2 shared experts, wanted 1"),
        ({"scoring_func": "softmax"}, "got scores by softmax, wanted one of sqrtsoftplus, sigmoid"),
        (
            {"mlp_layer_types": ["moe", "hash_moe", "moe"]},
            "wanted one of hash_moe or moe for each of 3 layers, hash_moe in the first",
        ),
        (V41 | {"engram_num_embeddings": [72, 205]}, r"got tables of \(72, 205\) rows, wanted \(72, 204\)"),
    ],
)
def test_config_errors(changes, error):
    with pytest.raises((ValueError, NotImplementedError), match=error):
        Model.from_config(changes if "engram_layer_ids" in changes else common.SMALL | SIZES | changes)


@pytest.mark.parametrize(
    "name, moe, everything, active",
    [
        ("flash", {"n_routed_experts": 256, "moe_intermediate_size": 2048, "num_hash_layers": 3}, 284e9, 13e9),
        ("pro", {"n_routed_experts": 384, "moe_intermediate_size": 3072, "num_hash_layers": 3}, 1.6e12, 49e9),
    ],
)
def test_sizes_of_models(name, moe, everything, active):
    """Parameters as DeepSeek says, all and those of a token, without the embedding; and six FLOPs for each of these."""
    model = Model.from_config(published(name) | moe | {"vocab_size": 129280, "num_experts_per_tok": 6})
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    sizes = [(path[-1], x.size) for path, x in jax.tree_util.tree_leaves_with_path(shapes)]
    routed = sum(size for key, size in sizes if getattr(key, "key", "") in ("w13", "w2"))
    total = sum(size for _, size in sizes)
    of_token = total - routed * (1 - 6 / model.experts) - shapes["embed"].size
    assert total == pytest.approx(everything, rel=0.02) and of_token == pytest.approx(active, rel=0.03)
    assert metrics.flops(model, 128) == pytest.approx(6 * of_token, rel=0.02)
    assert 6.1 * of_token < metrics.flops(model, 4096) < 6.8 * of_token


@pytest.mark.parametrize(
    "program, options",
    [
        (
            serve,
            (
                "checkpoint",
                "--expert",
                "--fp8",
                "--fp4",
                "--fp8-products",
                "--fp8-products-bf16-rope",
                "--random",
                "--pages",
            ),
        ),
        (train, ("checkpoint", "--expert", "--remat", "--keep", "--coordinator")),
        (
            load,
            (
                "--concurrency",
                "--input",
                "--output",
                "--url",
                "--minutes",
                "--alike",
                "--prefixes",
                "--readers",
                "--fp8",
            ),
        ),
        (data, ("--to", "--vocabulary")),
        (metrics, ("--plot",)),
    ],
)
def test_a_program_says_how_it_is_called(program, options, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["program", "--help"])
    with pytest.raises(SystemExit) as done:
        program.arguments()
    said = capsys.readouterr().out
    runpy.run_module("examples.deepseek_v4", run_name="__main__")
    assert f"python -m {program.__name__} --help\n" in capsys.readouterr().out
    assert not done.value.code and all(option in said for option in options)


@pytest.mark.slow
def test_serve(capsys, in_place):
    """More requests than places, over too few pages: each says what it says alone, and prints it as it comes."""
    rng = np.random.default_rng(0)
    prompts = ["7 " * 17 + " ".join(map(str, rng.integers(0, 64, n))) for n in (33, 3, 21, 23, 9)]
    sizes = {"wanted": 12, "places": 2, "room": 64, "chunk": 16, "page": 16, "pages": 6}
    requests = serve.main(prompts, **sizes, prefixes=0)
    said = capsys.readouterr().out
    layers = [f"chunk_{i}" for i in (1, 2, 3, 5)]  # before and after them nothing is donated; 5: caches of drafts
    assert sorted(in_place) == ["after", *layers, "say"]
    tails = [line.removeprefix("7 " * 17) for line in prompts]
    others = serve.main(tails, **sizes, beginning="7 " * 17, speculate=2, tensor=2, expert=2)
    assert [r.said for r in others] == [r.said for r in requests] and "begin" in in_place
    assert all(r.shared >= 16 for r in others)
    assert re.search(r"^\d+ tokens of these prompts were kept from earlier ones$", capsys.readouterr().out, re.M)
    with common.mesh_of(1, 1, data=1) as mesh:
        model, params = common.opened(None, mesh, jnp.float32)
    whole = np.zeros((5, 64), np.int32)
    for row, r in zip(whole, requests, strict=True):
        row[: len(r.prompt) + 12] = [*r.prompt, *r.said]
    best = np.asarray(jax.jit(model)(params, whole).argmax(-1))
    for i, r in enumerate(requests):
        assert best[i, len(r.prompt) - 1 :][:12].tolist() == r.said
        assert re.findall(rf"^\[{i}\] (\d+)", said, re.M) == [str(t) for t in r.said]
    assert re.search(r"^174 tokens read, 60 said, in [\d.]+ s: \d+ tokens/s$", said, re.M)


@pytest.mark.slow
def test_serving_by_fp8_products(monkeypatch, capsys):
    """Prompts are read by them, in every layer and with drafts too, and a request says what it says alone."""
    rng = np.random.default_rng(0)
    prompts = [" ".join(map(str, rng.integers(0, 64, n))) for n in (40, 21)]
    monkeypatch.setattr("sys.argv", ["program", "--fp8-products-bf16-rope"])
    assert serve.arguments()["precision"] == "float8_e4m3fn_bf16_rope"
    monkeypatch.setattr("sys.argv", ["program", "--fp8-products"])
    how = {"wanted": 6, "room": 48, "chunk": 16, "page": 16, "precision": serve.arguments()["precision"]}
    requests = serve.main(prompts, **how, places=2)
    alone = serve.main(prompts, **how, places=1, speculate=2)  # one after the other
    assert [r.said for r in alone] == [r.said for r in requests] and all(len(r.said) == 6 for r in requests)
    with common.mesh_of(1, 1, data=1) as mesh:
        model, params = common.opened(None, mesh, jnp.bfloat16)
    tokens = requests[0].prompt[None, :32]
    usual, rounded = (m(params, tokens) for m in (model, model.with_precision("float8_e4m3fn")))
    assert 1e-3 < np.linalg.norm(rounded - usual) / np.linalg.norm(usual) < 0.2


def test_a_random_v41(monkeypatch, capsys):
    """It has every kind of layer, and float32 entries and index keys of 32 numbers, for two tokens and for one.
    (`test_requests_that_begin_alike` serves such a model.)
    """
    monkeypatch.setattr(Server, "compile", lambda self: None)
    assert serve.main([], places=2, room=48, page=16, pages=5, random="v4.1") == []
    assert f"\n{2 * 32 * 4 * 3 // 2} bytes of pages a token, " in capsys.readouterr().out
    layers = Model.from_config(common.small("v4.1")).layers
    owns = [(layer.ratio, layer.compressor is not None, layer.indexer is not None) for layer in layers]
    assert owns == [(0, False, False), (2, True, True), (1, True, True), (1, False, False), (1, False, True)]
    assert layers[2].indexer.candidate_blocks and layers[4].indexer.within_candidates


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(common.SMALL | SIZES | WINDOWS, id="v4"),
        pytest.param(CONFIGS["v4.1"], id="v4.1", marks=pytest.mark.slow),
    ],
)
def test_drafts(config):
    """Against loops in float64, after a prompt in chunks and steps whose drafts are taken back. V4.1's layers
    for drafts see the streams behind an engram and before the last layer, round latents, and have fewer experts.
    """
    model, params = random(DSpark.from_config(config))
    read, steps, propose = (jax.jit(f) for f in (model.read, model.steps, model.propose))
    tokens, caches, ends = prompts(2, 40), model.cache(3, 48, jnp.float32, steps=4), np.array([19, 9, 0], np.int32)
    rows = np.concatenate([tokens, tokens[:1]])
    for at in (0, 12):
        _, caches = read(params, rows[:, at : at + 12], caches, np.int32(at), np.minimum(ends, at + 12))
    for more, kept in ((np.array([4, 3, 0]), np.array([2, 3, 0])), (np.array([1, 4, 0]), np.array([1, 1, 0]))):
        new = np.stack([row[n : n + 4] for row, n in zip(rows, ends, strict=True)])
        wrong = np.where(np.arange(4) < kept[:, None], new, (new + 1) % 64)
        _, caches = steps(params, wrong, caches, ends, ends + more)
        ends = ends + kept
        got, caches = propose(params, rows[range(3), ends], caches, ends)
    for i in range(2):
        assert got[i].tolist() == model_float64.drafts(model, params, tokens[i, : ends[i] + 1])


@pytest.mark.slow
def test_serving_with_drafts():
    """Of the model's own: most are right, others are not, and requests say what they say without them."""
    model, params = random(DSpark.from_config(common.SMALL | SIZES | WINDOWS))
    embed = np.linalg.qr(np.random.default_rng(0).standard_normal((64, 64)))[0]
    after = (np.arange(64) * 5 + 3) % 64  # this token follows each
    head = np.zeros((64, 64))
    head[:, after] = 40 * embed.T
    wrong = (np.arange(64) % 5 == 0)[:, None]
    params |= {"embed": jnp.float32(1000 * embed), "head": jnp.float32(head)}
    params["drafts"] |= {"w1": jnp.float32(np.where(wrong, -embed, embed)), "w2": jnp.float32(100 * head)}
    server = Server(model, params, jnp.float32, 2, 64, chunk=16, page=16, pages=7, speculate=4, rounds=2)
    requests = [Request(np.arange(n, dtype=np.int32), wanted, 0.0) for n, wanted in ((21, 30), (5, 24), (9, 17))]
    for request in requests:
        server.submit(request)
    while not server.is_idle:
        server.work()
    for request in requests:
        token = request.prompt[-1]
        assert request.said == [token := after[token] for _ in range(request.wanted)]
    assert 0.5 * server.drafted < server.accepted < server.drafted and server.accepted > 1.5 * server.steps


def test_engrams_take_words_back():
    """Rows of tokens as they come, some of which are wrong and taken back, are those of the whole line."""
    engrams, rng = Model.from_config(CONFIGS["v4.1"]).engrams, np.random.default_rng(0)
    word, tokens = rng.integers(0, engrams.words, 64), rng.integers(0, 64, (2, 40), np.int32)
    whole, _ = engrams.found(jnp.asarray(word), jnp.asarray(tokens), None, 0, None)
    kept = engrams.longest - 1 + 3
    history, at = engram.History(jnp.full((2, kept), 5), jnp.zeros(2, jnp.int32)), np.array([0, 0])
    for _ in range(9):
        right, count = rng.integers(1, 5, 2), rng.integers(0, 5, 2)
        right = np.where(count, np.minimum(right, count), 0)
        new = np.stack([row[n : n + 4] for row, n in zip(tokens, at, strict=True)])
        new = np.where(np.arange(4) < right[:, None], new, (new + 1) % 64)
        rows, history = engrams.found(jnp.asarray(word), jnp.asarray(new), history, jnp.asarray(at), jnp.asarray(count))
        for i in range(2):
            np.testing.assert_array_equal(rows[i, : right[i]], whole[i, at[i] : at[i] + right[i]])
        at += right
    assert (at > engrams.longest + 4).all()


@pytest.mark.slow
@pytest.mark.parametrize("speculate, own", [(0, False), (3, True)], ids=["", "its own drafts"])
def test_requests_that_begin_alike(speculate, own):
    """V4.1, whose engrams remember words: what they were at the end of a prefix is kept while others come and go."""
    model, params = random(DSpark.from_config(CONFIGS["v4.1"])) if own else small("v4.1")
    rng, beginning = np.random.default_rng(0), np.arange(34, dtype=np.int32)
    how = {"chunk": 16, "page": 16, "pages": 6, "speculate": speculate}
    server = Server(model, model.joined(params), jnp.float32, 2, 64, **how)
    requests = [Request(np.r_[beginning, rng.integers(0, 64, n, np.int32)], 6, 0.0) for n in (5, 5, 12, 12)]
    for request in requests:
        server.submit(request)
    while not server.is_idle:
        server.work()
    for request in requests:
        assert server.alone(request).tolist() == request.said
    assert bool(server.drafted) == bool(speculate) and server.shared >= 2 * 32


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_after_a_shared_prefix(name):
    """They are, to the bit, those of a server that shares nothing, of the prompt and of each step."""
    model, params = small(name)
    rng, heard = np.random.default_rng(0), {}

    class Heard:
        vocabulary, cache, __call__ = model.vocabulary, model.cache, model.__call__

        def read(self, params, tokens, caches, start, lengths):
            logits, caches = model.read(params, tokens, caches, start, lengths)
            jax.debug.callback(lambda n, x: heard.update({int(n): np.array(x)}), lengths[0], logits[0])
            return logits, caches

        def steps(self, params, tokens, caches, start, lengths):
            logits, caches = model.steps(params, tokens, caches, start, lengths)
            jax.debug.callback(lambda n, x: heard.update({int(n): np.array(x)}), lengths[0], logits[0, 0])
            return logits, caches

    alike, ends = rng.integers(0, 64, 40, np.int32), [rng.integers(0, 64, 9, np.int32) for _ in range(2)]
    found = []
    for prefixes in (0, 4):
        server = Server(Heard(), model.joined(params), jnp.float32, 1, 64, 16, 16, 8, prefixes=prefixes)
        for end in ends:
            heard.clear()
            server.submit(request := Request(np.r_[alike, end], 6))
            while not server.is_idle:
                server.work()
            jax.effects_barrier()
            found.append((request.said, {n: heard[n] for n in range(49, 55)}))
        assert request.shared == (32 if prefixes else 0)
    for (said, logits), (want, others) in zip(found[:2], found[2:], strict=True):
        assert said == want
        jax.tree.map(np.testing.assert_array_equal, logits, others)


@pytest.mark.slow
@pytest.mark.parametrize("name, parts", [("v4", ("window", "tokens", "key_tokens")), ("v4.1", ("window", "history"))])
def test_a_snapshot_has_all_that_pages_have_not(name, parts):
    """With it a sequence goes on, to the bit, after another had its place; without a part of it, otherwise."""
    model, params = small(name)
    tokens = np.random.default_rng(0).integers(0, 64, (2, 64), np.int32)
    table = np.arange(8, dtype=np.int32).reshape(2, 1, 4)
    read = jax.jit(
        lambda tokens, caches, table, start: model.read(
            params, tokens, caches.with_block_table(table), start, start + 16
        )
    )
    empty = model.cache(1, 64, jnp.float32, block_table=table[0], page_tokens=16, pages=8)

    def after(caches, which, chunks):
        for i in chunks:
            at = slice(16 * i, 16 * i + 16)
            logits, caches = read(tokens[which, at][None], caches, table[which], jnp.array([at.start]))
        return logits, caches

    _, caches = after(empty, 0, range(2))
    snapshot, (want, _) = caches.rings().take(jnp.array([0])), after(caches, 0, [2, 3])
    _, caches = after(caches, 1, range(3))

    def restored(snapshot):
        return after(caches.put(jnp.array([0]), snapshot), 0, [2, 3])[0]

    np.testing.assert_array_equal(restored(snapshot), want)
    others = caches.rings().take(jnp.array([0]))
    for part in parts:
        if part == "history":
            faulty = snapshot._replace(history=others.history)
        else:
            of = zip(snapshot.layers, others.layers, strict=True)
            faulty = snapshot._replace(layers=[a._replace(**{part: getattr(b, part)}) for a, b in of])
        assert (restored(faulty) != want).any(), part


def test_random_models_are_known_by_name_or_file():
    with pytest.raises(SystemExit, match=r"--random: got 'v5', wanted v4, v4.1 or a config.json"):
        common.config_of("v5")


@pytest.mark.slow
def test_a_packed_model_without_drafts_is_served(tmp_path):
    """It says one token a step. Its projections are in FP8, and a step takes those of a window's x side by side."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "o_groups": 2, "o_lora_rank": 128, "q_lora_rank": 128}
    config = {**common.small(), **sizes, "head_dim": 128, "qk_rope_head_dim": 16, "num_hidden_layers": 1}
    config |= {"layer_types": ["sliding_attention"], "dspark_block_size": None, "dspark_target_layer_ids": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    how = {"random": str(tmp_path / "config.json"), "places": 1, "room": 32, "chunk": 16, "page": 16}
    with serve.served(packed=True, **how) as (server, *_):
        attention = server.parameters["layers"][0]["attention"]
        assert server.ahead == 1
        assert {x for x, w in attention.items() if isinstance(w, PackedMatrix)} == {"wx", "wq_b", "wo_a", "wo_b"}
