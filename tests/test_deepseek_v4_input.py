"""examples/deepseek_v4: texts, tokens, configs and options that come from outside."""

import functools
import io
import json
import random
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.deepseek_v4 import common, data, serve, speed, train
from examples.deepseek_v4.drafts import DSpark
from examples.deepseek_v4.model import Model
from examples.serving import Request, Server

from .counting_model import Counting, counting
from .test_deepseek_v4 import CONFIGS, SIZES
from .test_layer_config import published

SAMPLE = "the quick brown fox — naïve 日本語 テキスト 😀 👩‍👩‍👧 "


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A directory with a tokenizer of bytes, whose tokens may end inside of a character, and three special tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    directory = tmp_path_factory.mktemp("checkpoint")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<end>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([SAMPLE] * 3, trainer)
    made.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def words(checkpoint):
    return common.Words(str(checkpoint), 320)


def said(words, tokens):
    text = words.stream()
    return "".join(map(text.add, tokens)) + text.end()


def test_text_as_it_comes(words):
    """It is that of all tokens at once, wherever they end, special tokens and parts of characters included."""
    rng, count = random.Random(0), words.tokenizer.get_vocab_size()
    for _ in range(60):
        text = "".join(rng.choice(SAMPLE) for _ in range(30))
        tokens = words.encode(text).tolist()
        assert said(words, tokens) == text
        tokens = [x for token in tokens for x in (token, *[rng.randrange(3)] * (rng.random() < 0.2))]
        tokens = tokens[: rng.randrange(1, len(tokens))]
        assert said(words, tokens) == words.tokenizer.decode(tokens)
        anything = [rng.randrange(count) for _ in range(rng.randrange(1, 50))]
        assert said(words, anything) == words.tokenizer.decode(anything)


@pytest.mark.parametrize("of", ["text", "special tokens", "parts of characters"])
def test_a_token_s_text_takes_as_long_whatever_came_before(words, of):
    """The tokenizer decodes as many tokens for the last thousand as for the first, also where these are no text."""
    tokens = {
        "text": words.encode("the quick brown fox " * 4000).tolist()[:16_000],
        "special tokens": [1] * 16_000,
        "parts of characters": [words.tokenizer.token_to_id("ð")] * 16_000,  # a byte that begins one of four
    }[of]
    text, times = words.stream(), []
    for at in range(0, len(tokens), 1000):
        began = time.thread_time()
        for token in tokens[at : at + 1000]:
            text.add(token)
        times.append(time.thread_time() - began)
    assert min(times[-5:]) < 4 * min(times[:5]), times


def test_a_stream_that_the_library_gives_up(words):
    """It raises where tokens change the text before them: what was said stays, and more text comes."""
    text = words.stream()

    class Once:
        def step(self, *_):
            raise Exception("Invalid prefix encountered while decoding stream.")

    first, *others = words.encode("the fox").tolist()
    text.add(first)
    text.stream = Once()
    assert "".join(map(text.add, others)) == words.tokenizer.decode(others)


@pytest.mark.parametrize(
    "text, message",
    [
        ("5 64", "prompt: got 64 as token number 1, wanted integers from 0 to 63"),
        ("-1", "prompt: got -1 as token number 0"),
        ("9" * 19, f"prompt: got '{'9' * 19}', wanted tokens: numbers from 0 to 63"),
        ("4294967297", "prompt: got 4294967297 as token number 0"),
        ("1.0", r"prompt: got '1\.0', wanted tokens"),
        ("1_0", "prompt: got '1_0', wanted tokens"),
        ("٣", "prompt: got '٣', wanted tokens"),
    ],
)
def test_words_that_are_no_tokens(text, message):
    with pytest.raises(ValueError, match=message):
        common.Words(None, 64).encode(text)


def test_words(words):
    numbers = common.Words(None, 64)
    assert numbers.encode(" 5  63\n0 ").tolist() == [5, 63, 0] and numbers.encode("").dtype == np.int32
    assert said(numbers, [5, 63]) == "5 63 "
    with pytest.raises(ValueError, match=r"prompt: got \d+ as token number \d, wanted integers from 0 to 9"):
        common.Words.encode(type("Few", (), {"tokenizer": words.tokenizer, "vocabulary": 10})(), "the fox")
    with pytest.raises(ValueError, match=r"prompt: got '\\udcff' as character number 4, wanted a text in UTF-8"):
        words.encode("the \udcff")


def test_bytes_that_are_no_text_are_one_line_s(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"5 6\n\xff\n7\n"), "utf-8"))
    assert list(serve.standard_input()) == ["5 6\n", "\udcff\n", "7\n"]


@pytest.mark.parametrize(
    "config, generation, want",
    [
        ({}, None, set()),
        ({"eos_token_id": 1}, None, {1}),
        ({"eos_token_id": [1, 106]}, None, {1, 106}),
        ({"eos_token_id": None, "text_config": {"eos_token_id": 0}}, None, {0}),
        ({"eos_token_id": 1}, {"eos_token_id": [2, 3]}, {1, 2, 3}),
    ],
)
def test_all_tokens_that_end_a_text(config, generation, want, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert common.ends(str(tmp_path)) == want and common.ends(None) == set()


@pytest.mark.parametrize("eos", ["1", [1, None], 1.0, True, -1])
def test_what_ends_no_text(eos, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ValueError, match=r"config\.json: eos_token_id: got .*, wanted an integer of at least 0"):
        common.ends(str(tmp_path))


# ---- models


FLASH = {
    **published("flash"), "model_type": "deepseek_v4", "vocab_size": 1000, "n_routed_experts": 16,
    "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 2048, "num_hash_layers": 3,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "norm_topk_prob": True, "swiglu_limit": 7.0, "hc_mult": 2,
    "hc_sinkhorn_iters": 5, "hc_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "dspark_block_size": 5, "dspark_noise_token_id": 7, "dspark_target_layer_ids": [1, 2], "dspark_markov_rank": 16,
    "n_mtp_layers": 2, "compress_ratios": [*published("flash")["compress_ratios"], 0],
}  # fmt: skip
"""A config.json in which nothing about experts, connections and drafts is a default"""
OWN = sorted(FLASH.keys() - published("flash").keys() - {"model_type"})


@pytest.mark.parametrize("how", ["drop", "null", "rename"])
@pytest.mark.parametrize("name", OWN)
def test_an_entry_that_is_missing(name, how):
    """Whatever of a checkpoint's config.json is gone, it is an error, or the same model."""
    want = DSpark.from_config(FLASH)
    config = {key: x for key, x in FLASH.items() if key != name}
    config |= {"drop": {}, "null": {name: None}, "rename": {f"{name}s": FLASH[name]}}[how]
    try:
        assert DSpark.from_config(config) == want
    except (ValueError, NotImplementedError) as e:
        assert name in str(e) or "shared experts" in str(e)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vocab_size": "1000"}, "vocab_size: got '1000', wanted an integer of at least 1"),
        ({"head_dim": "512"}, "head_dim: .*got 512, wanted an int >= 1, known while tracing; '512' is a str"),
        ({"num_hidden_layers": 43.0}, r"num_hidden_layers: got 43\.0, wanted an int"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers: got 2147483648, wanted .*; at most 2\\*\\*31 - 1"),
        ({"vocab_size": 0}, "vocab_size: got 0, wanted"),
        ({"vocab_size": 64.0}, r"vocab_size: got 64\.0, wanted"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok: got 17, wanted an integer from 1 to 16"),
        ({"num_hash_layers": 44}, "num_hash_layers: got 44, wanted an integer from 0 to 43"),
        ({"routed_scaling_factor": "2"}, "routed_scaling_factor: got '2', wanted a number"),
        ({"hc_eps": float("nan")}, "hc_eps: got nan, wanted a number"),
        ({"norm_topk_prob": False}, "norm_topk_prob: got False, wanted True"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', wanted 'silu'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: got True, wanted False"),
        ({"num_local_experts": 8}, "got .*, which are two names of one entry, wanted one value"),
        ({"mlp_layer_types": ["hash_moe"] * 3 + ["dense"] * 40}, "wanted one of hash_moe or moe for each of 43 layers"),
        (
            {"mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 41},
            "got num_hash_layers 3, wanted 2, as mlp_layer_types says",
        ),
        ({"dspark_target_layer_ids": [43]}, "dspark_target_layer_ids: got 43, wanted an integer from 0 to 42"),
        ({"dspark_noise_token_id": 1000}, "dspark_noise_token_id: got 1000, wanted an integer from 0 to 999"),
        ({"dspark_markov_rank": None}, "got none of dspark_markov_rank, wanted it"),
        ({"dspark_target_layer_ids": [2, 1]}, r"dspark_target_layer_ids: got \(2, 1\), wanted each once"),
        ({"dspark_n_routed_experts": 4}, "wanted dspark_n_routed_experts and dspark_num_experts_per_tok, or neither"),
        ({"n_mtp_layers": 5}, "n_mtp_layers: got 5, wanted 2, as compress_ratios says"),
        ({"n_group": 8}, "n_group: got 8, wanted 1"),
        ({"topk_group": 4}, "topk_group: got 4, wanted 1"),
        ({"topk_method": "greedy"}, "topk_method: got 'greedy', wanted 'noaux_tc'"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace: got 3, wanted 0"),
        ({"moe_layer_freq": 2}, "moe_layer_freq: got 2, wanted 1"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers: got \[0\], wanted no entry that is not known"),
        ({"hc_sinkhorn_iter": 3}, "hc_sinkhorn_iter: got 3, wanted no entry that is not known"),
        ({"engram_heads": 3}, "engram_heads: got 3, wanted no entry that is not known"),
        ({"engram_n_heads": 3}, "got none of engram_layer_ids, wanted it"),
        ({"scoring_func": ["sigmoid"]}, r"got scores by \['sigmoid'\], wanted one of"),
        ({"mlp_layer_types": 3}, "mlp_layer_types: got 3, wanted a list"),
        ({"gate_temp": 0}, "gate_temp: got 0, wanted a number above 0"),
    ],
)
def test_entries_that_are_wrong(changes, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        DSpark.from_config(FLASH | changes)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt_oss", "num_local_experts": 32, "hidden_size": 2880, "num_hidden_layers": 24},
        {"model_type": "deepseek_v3", "hidden_size": 7168, "kv_lora_rank": 512, "n_routed_experts": 256},
        {"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2", "hidden_size": 7168}},
        {"model_type": "glm4_moe", "hidden_size": 5120, "n_routed_experts": 160},
    ],
    ids=lambda config: config["model_type"],
)
def test_other_models(config):
    """The error says which models are read."""
    with pytest.raises(ValueError, match=r"model_type: got \w+, wanted deepseek_v4 or deepseek_v41"):
        Model.from_config(config)


@pytest.mark.parametrize("name, x", [("n_routed_experts", 8), ("hc_mult", 3), ("tie_word_embeddings", True)])
def test_entries_around_the_text_model(name, x):
    """They were ignored, whatever they said."""
    with pytest.raises(ValueError, match=f"config: {name}: got {x}, wanted {FLASH[name]}, as in text_config"):
        Model.from_config({"text_config": FLASH, name: x})
    assert Model.from_config({"text_config": FLASH, name: FLASH[name]}) == Model.from_config(FLASH)


def test_a_file_that_says_an_entry_twice(tmp_path):
    """The last of two was taken."""
    text = json.dumps(FLASH)[:-1]
    for name, x in (("n_routed_experts", 32), ("sliding_window", 64), ("hc_mult", 3)):
        (tmp_path / "config.json").write_text(f'{text}, "{name}": {x}}}')
        with pytest.raises(ValueError, match=rf"config\.json: .*{name} is there twice"):
            common.model_of(str(tmp_path))


def test_a_text_model_that_is_none(tmp_path):
    (tmp_path / "config.json").write_text('{"text_config": [1]}')
    for read in (common.model_of, common.ends, functools.partial(common.model_of, drafts=True)):
        with pytest.raises((ValueError, TypeError), match=r"text_config: got \[1\], wanted a mapping"):
            read(str(tmp_path))


def test_a_config_that_is_none(tmp_path):
    for text, message in (("{", "got no JSON, wanted an object"), ("[]", r"got \[\], wanted a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"config\.json: {message}"):
            common.model_of(str(tmp_path))


# ---- programs


@pytest.mark.parametrize(
    "tokens, message",
    [
        (np.arange(10), r"got 10 tokens, wanted at least 16, those of a row"),
        (np.full(40, 64), r"from token 0 on: got 64 as token number 0, wanted integers from 0 to 63"),
        (np.array([*range(39), -1]), "got -1 as token number 39"),
        (np.array([5] * 39 + [2**32 + 5], np.int64), "got 4294967301 as token number 39"),
        (np.arange(40) / 2, r"got float64\[40\], wanted one line of integers"),
        (np.ones((4, 40), np.int32), r"got int32\[4, 40\], wanted one line of integers"),
        (np.ones(40, bool), r"got bool\[40\], wanted one line"),
        (b"", "got no array of NumPy, wanted tokens"),
        (b"not an array", "got no array of NumPy, wanted tokens"),
    ],
    ids=str,
)
def test_tokens_to_train_on(tokens, message, tmp_path, monkeypatch):
    """Wrong ones are refused before the model is there; good ones of any type are what batches have."""
    path = tmp_path / "tokens.npy"
    path.write_bytes(tokens) if isinstance(tokens, bytes) else np.save(path, tokens)
    monkeypatch.setattr(common, "parameters_of", lambda *_, **__: pytest.fail("the model was made before"))
    with pytest.raises(ValueError, match=f"tokens.npy.*: {message}|tokens.npy{message}|tokens.npy, {message}"):
        train.main(tokens=str(path), steps=1, b=2, s=16)


@pytest.mark.parametrize(
    "how, message",
    [
        ({"rate": float("nan")}, "rate: got nan, wanted a number from 0 to 1"),
        ({"rate": -1.0}, "rate: got -1.0, wanted a number"),
        ({"steps": 0}, "steps: got 0, wanted an integer of at least 1"),
        ({"s": 1}, "s: got 1, wanted an integer of at least 2"),
    ],
    ids=str,
)
def test_numbers_of_a_training(how, message, monkeypatch):
    monkeypatch.setattr(common, "parameters_of", lambda *_, **__: pytest.fail("the model was made before"))
    with pytest.raises(ValueError, match=message):
        train.main(**how)


@pytest.mark.parametrize("steps", [1, 2, 50])
def test_the_rate_of_a_step(steps):
    """Nothing at first, and the whole rate after a tenth of the steps, also of a single one."""
    with common.mesh_of(1, 1, data=1) as mesh:
        optimizer = train.Trainer(common.model_of(None), mesh, steps, 1e-2, "all").optimizer
    x, state, moved = jnp.ones(()), optimizer.init(jnp.ones(())), []
    for _ in range(max(steps // 10, 1) + 1):
        change, state = optimizer.update(jnp.ones(()), state, x)
        moved.append(-float(change))
    assert moved[0] == 0 and moved[-1] == pytest.approx(1e-2 * 1.1, rel=1e-3)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int32])
def test_rows_of_tokens(dtype, tmp_path):
    np.save(tmp_path / "tokens.npy", (np.arange(1000) % 64).astype(dtype))
    rows = data.rows_of(str(tmp_path / "tokens.npy"), 64, 16, seed=0)
    assert len(rows) == 62 and rows[61].tokens.dtype == np.int32 and rows[61].documents is None
    np.testing.assert_array_equal(rows[61].tokens, (61 * 16 + np.arange(16)) % 64)


@pytest.mark.parametrize("package", ["uvicorn", "starlette", "pydantic"])
def test_what_http_needs_is_asked_for_first(package, monkeypatch):
    """Before a model is read that takes minutes."""
    for name in [x for x in sys.modules if x.split(".")[0] == package or x == "examples.deepseek_v4.endpoint"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(common, "parameters_of", lambda *_, **__: pytest.fail("the model was made before"))
    with pytest.raises(
        SystemExit, match=rf"--port: got no package {package}, wanted those of `pip install '\.\[http\]'`"
    ):
        serve.main(port=0)


@pytest.mark.parametrize(
    "how, message",
    [
        ({"beginning": "5 64"}, "beginning: got 64 as token number 1"),
        ({"wanted": 0}, "wanted: got 0, wanted an integer"),
        ({"temperature": float("nan")}, "temperature: got nan, wanted a number from 0 to 2"),
        ({"port": 65536}, "port: got 65536, wanted an integer from 0 to 65535"),
        (
            {"kept": "float8_e4m3fn"},
            "--fp8 and --fp4: got head_dim 32, wanted a model whose entries have 512 dimensions",
        ),
        ({"kept": "float8_e4m3fn", "speculate": 2}, "--fp8 and --fp4: got head_dim 32, wanted a model whose entries"),
        ({"random": str(__file__)}, "got no JSON, wanted an object"),
        (
            {"tensor": 3, "expert": 3},
            "a mesh of data 1, context 1, tensor 3, expert 3: wanted no more devices than there",
        ),
    ],
    ids=str,
)
def test_options_are_checked_first(how, message, monkeypatch):
    monkeypatch.setattr(common, "parameters_of", lambda *_, **__: pytest.fail("the model was made before"))
    with pytest.raises(ValueError, match=message):
        serve.main([], **how)


def test_a_program_says_what_is_wrong_in_a_line():
    """And a traceback only with -X dev."""
    call = [sys.executable, "-m", "examples.deepseek_v4.train", "--tokens", "/none.npy"]
    for options, is_long in (([], False), (["-X", "dev"], True)):
        done = subprocess.run([call[0], *options, *call[1:]], capture_output=True, text=True, check=False)
        assert done.returncode == 1 and "No such file or directory: '/none.npy'" in done.stderr
        assert ("Traceback" in done.stderr) == is_long


@pytest.mark.parametrize("error", [MemoryError("1 TB"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 1 TB")])
def test_too_little_memory_is_said_in_a_line(error):
    def main():
        raise error

    with pytest.raises(SystemExit, match=r"error: not enough memory on .*: .*1 TB"):
        common.run(main)


def test_v4_flash_is_not_timed_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["speed"])
    with pytest.raises(SystemExit):
        speed.arguments()
    assert "sizes want a GPU" in capsys.readouterr().err


def test_the_program_says_what_it_does(monkeypatch, capsys):
    """While the model is made, and for each program that is compiled, before it takes its time."""

    class Small(Counting):
        joined = staticmethod(lambda params: params)

        def with_precision(self, precision):
            return self

        def cache(self, *args, **kwargs):
            return common.Caches(()), super().cache(*args, **kwargs)

    small = Small()
    monkeypatch.setattr(common, "model_of", lambda *_, **__: small)
    monkeypatch.setattr(common, "parameters_of", lambda *_: {})
    monkeypatch.setattr(common, "bytes_a_token", lambda *_: (1, 1))
    monkeypatch.setattr(Small, "cache", Counting.cache)
    monkeypatch.setattr(serve, "Reader", None)  # it has no layers that programs could be made of
    answers = serve.main(["5 6", "x"], wanted=3, places=2, room=64, page=16, chunk=8)
    assert answers[0].said == [7, 8, 9] and "got 'x', wanted tokens" in str(answers[1])
    out, err = capsys.readouterr()
    lines = [re.sub(r"\d+\.\d", "N", line) for line in err.splitlines()]
    assert lines == [
        "making random parameters", "compiling the program for chunks of 8 tokens", "compiled it in N s",
        "compiling the program for 4 steps of 1 token", "compiled it in N s", f"[1] {answers[1]}",
    ]  # fmt: skip
    assert "[0] 7" in out and "2 tokens read, 3 said" in out


def test_a_model_s_own_vocabulary_is_the_server_s():
    model = Model.from_config(common.SMALL | SIZES)
    assert model.vocabulary == DSpark.from_config(CONFIGS["v4"]).vocabulary == 64
    serving = Server(Counting(), {}, jnp.float32, 2, 64, 8, 8, 16)
    with pytest.raises(ValueError, match="prompt: got 97 as token number 4, wanted integers from 0 to 96"):
        serving.submit(Request(np.array([*counting(0, 4), 97]), 1))
