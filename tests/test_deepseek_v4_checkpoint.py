"""Checkpoints of the model in examples/deepseek_v4: saved, packed, in FP4 and FP8, by parts on devices."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.deepseek_v4 import common, packed, weights
from examples.deepseek_v4.checkpoint import Checkpoint, entries
from examples.deepseek_v4.drafts import DSpark
from examples.deepseek_v4.engram import words
from examples.deepseek_v4.model import Model
from examples.deepseek_v4.packed import Packed
from examples.deepseek_v4.save import save
from examples.deepseek_v4.weights import load, sources, sources_of_drafts
from jax_dsv4_fmha import PackedExperts, PackedMatrix, pack_experts, pack_matrix
from jax_dsv4_fmha.layers import from_state_dict, to_state_dict

from . import model_float64
from .test_deepseek_v4 import SIZES, V41, assert_close, prompts, small


def written(path, tensors):
    """A file of safetensors."""
    names = {np.dtype(np.float32): "F32", np.dtype(np.int32): "I32", np.dtype(np.uint8): "I8"}
    names |= {np.dtype(jnp.bfloat16): "BF16", np.dtype(jnp.float8_e4m3fn): "F8_E4M3"}
    names |= {np.dtype(jnp.float8_e8m0fnu): "F8_E8M0"}
    header, at = {}, 0
    for name, x in tensors.items():
        header[name] = {"dtype": names[x.dtype], "shape": x.shape, "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(x.tobytes() for x in tensors.values()))


def checkpoint(model, directory, block, experts="FP4"):
    """Random tensors of a model by DeepSeek's names in two files, as published: experts in FP4 or FP8, FP8 elsewhere.

    Layers have a window alone. Scales of FP8 are for square blocks. Returns what they stand for, in float32.
    """
    rng, files, values = np.random.default_rng(0), ({}, {}), {}
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

    def plain(name, *shape):
        values[name] = rng.standard_normal(shape).astype(np.float32)
        files[len(values) % 2][name] = values[name]

    def fp8(name, rows, columns, down=block, across=block):
        x = (64 * rng.standard_normal((rows, columns))).astype(jnp.float8_e4m3fn)
        scale = np.exp2(rng.integers(-9, -5, (-(-rows // down), -(-columns // across)))).astype(jnp.float8_e8m0fnu)
        whole = np.repeat(np.repeat(scale.astype(np.float32), down, 0), across, 1)[:rows, :columns]
        values[f"{name}.weight"] = x.astype(np.float32) * whole
        files[len(values) % 2].update({f"{name}.weight": x, f"{name}.scale": scale})

    def fp4(name, rows, columns):
        x = rng.integers(0, 256, (rows, columns // 2), np.uint8)
        scale = np.exp2(rng.integers(-5, -2, (rows, columns // 32))).astype(jnp.float8_e8m0fnu)
        whole = np.stack([table[x % 16], table[x // 16]], -1).reshape(rows, columns)
        values[f"{name}.weight"] = whole * np.repeat(scale.astype(np.float32), 32, 1)
        files[len(values) % 2].update({f"{name}.weight": x, f"{name}.scale": scale})

    def connections(name, rows, parts):
        plain(f"{name}_fn", rows, n * m), plain(f"{name}_base", rows), plain(f"{name}_scale", parts)

    drafts, model = (model, model.model) if isinstance(model, DSpark) else (None, model)
    m, n, i, v = model.hidden, model.streams, model.inner, model.vocabulary
    plain("embed.weight", v, m), plain("head.weight", v, m), plain("norm.weight", m)
    if not model.delayed:
        connections("hc_head", n, 1)
    layers = [("layers", number, layer) for number, layer in enumerate(model.layers)]
    if drafts:
        layers += [("mtp", number, layer) for number, layer in enumerate(drafts.stack.layers)]
        last = f"mtp.{layers[-1][1]}"
        plain(f"{last}.norm.weight", m), plain("mtp.0.main_norm.weight", m)
        fp8("mtp.0.main_proj", m, len(model.seen) * m), plain(f"{last}.confidence_head.proj.weight", 1, m + drafts.rank)
        for name in ("embed", "head") if model.delayed else ("markov_w1", "markov_w2"):
            plain(f"{last}.markov_head.{name}.weight", v, drafts.rank)
        if not model.delayed:
            connections(f"{last}.hc_head", n, 1)
    for of, number, layer in layers:
        at, e = f"{of}.{number}", model.experts if of == "layers" else drafts.stack.experts
        for part in ("attn", "ffn"):
            plain(f"{at}.{part}_norm.weight", m), connections(f"{at}.hc_{part}", (2 + n) * n, 3)
        if of == "layers" and model.engrams is not None and number in model.engrams.layers:
            grams = model.engrams
            fp8(f"{at}.engram.embed", grams.rows[grams.layers.index(number)], grams.d, 1, 32)
            fp8(f"{at}.engram.wkv", (n + 1) * m, grams.d * grams.heads * (grams.longest - 1))
            plain(f"{at}.engram.q_weight", n, m), plain(f"{at}.engram.k_weight", n, m)
        plain(f"{at}.ffn.gate.weight", e, m)
        if of == "layers" and number < model.hashed:
            files[0][f"{at}.ffn.gate.tid2eid"] = rng.integers(0, e, (v, model.chosen), np.int32)
        else:
            plain(f"{at}.ffn.gate.bias", e)
        for expert in ("shared_experts", *(f"experts.{x}" for x in range(e))):
            packed = fp8 if experts == "FP8" or expert == "shared_experts" else fp4
            packed(f"{at}.ffn.{expert}.w1", i, m), packed(f"{at}.ffn.{expert}.w3", i, m)
            packed(f"{at}.ffn.{expert}.w2", m, i)
        h, d, g, r = layer.heads, layer.d, layer.o_groups, layer.o_rank
        (
            fp8(f"{at}.attn.wq_a", layer.q_rank, m),
            fp8(f"{at}.attn.wq_b", h * d, layer.q_rank),
            fp8(f"{at}.attn.wkv", d, m),
        )
        fp8(f"{at}.attn.wo_a", g * r, h // g * d), fp8(f"{at}.attn.wo_b", m, g * r), plain(f"{at}.attn.attn_sink", h)
        plain(f"{at}.attn.q_norm.weight", layer.q_rank), plain(f"{at}.attn.kv_norm.weight", d)
    for part, tensors in enumerate(files):
        written(directory / f"model-{part}.safetensors", tensors)
    return values | {name: x for name, x in files[0].items() if "tid2eid" in name}


@pytest.mark.parametrize("name", ["v4", "v4.1"])
def test_save(name, tmp_path, monkeypatch):
    """What is loaded again is equal; a checkpoint that is saved like another has its names, files and stacks."""
    model, params = small(name)
    monkeypatch.setattr(weights, "words", lambda path: np.asarray(params["words"]))
    assert np.asarray(params.get("words", [22])).max() == 22
    save(model, params, tmp_path / "a", dtype=jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, load(model, tmp_path / "a", jnp.float32), params)
    with pytest.raises(ValueError, match="got a directory with a checkpoint"):
        save(model, params, tmp_path / "a")
    if name == "v4.1":
        return
    tensors = dict(Checkpoint(tmp_path / "a"))  # as transformers saves them: other names, and experts in one
    for i, layer in enumerate(model.layers):
        attention = {x: tensors.pop(x) for x in list(tensors) if x.startswith(f"layers.{i}.attn.")}
        p = from_state_dict(layer, attention, f"layers.{i}.attn.", jnp.float32)
        tensors |= jax.device_get(to_state_dict(layer, p, f"layers.{i}.self_attn.", hugging_face=True))
        w1, w2, w3 = (
            np.stack([tensors.pop(f"layers.{i}.ffn.experts.{e}.w{w}.weight") for e in range(8)]) for w in (1, 2, 3)
        )
        tensors[f"layers.{i}.mlp.experts.gate_up_proj"] = np.concatenate([w1, w3], 1)
        tensors[f"layers.{i}.mlp.experts.down_proj"] = w2
    (tmp_path / "b").mkdir()
    written(tmp_path / "b" / "model.safetensors", {f"model.{x}": tensor for x, tensor in tensors.items()})
    packed = {"quantization_config": {"quant_method": "fp8"}, "text_config": {"expert_dtype": "fp4", "rope_theta": 3}}
    (tmp_path / "b" / "config.json").write_text(json.dumps(packed))
    save(model, params, tmp_path / "c", tmp_path / "b", jnp.float32)
    got = {entry.name: entry.data for path in (tmp_path / "c").glob("*.safetensors") for entry in entries(path)}
    assert got.keys() == {f"model.{x}" for x in tensors}
    assert json.loads((tmp_path / "c" / "config.json").read_text()) == {"text_config": {"rope_theta": 3}}
    jax.tree.map(np.testing.assert_array_equal, load(model, tmp_path / "c", jnp.float32), params)


@pytest.mark.parametrize(("experts", "slab"), [("FP4", 2176), ("FP8", 4112)])
def test_packed_experts_of_a_checkpoint(experts, slab, tmp_path):
    """Of sizes that `fused_moe` takes: each device has its experts' bytes, and nothing is gathered."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "layer_types": ["sliding_attention"]}
    config = {**common.SMALL, **sizes, "num_hidden_layers": 1, "head_dim": 16, "qk_rope_head_dim": 8}
    model = Model.from_config({**config, "dspark_block_size": 0, "dspark_target_layer_ids": None})
    checkpoint(model, tmp_path, 128, experts)
    tokens = prompts(1, 9)
    want = model_float64.logits(model, jax.device_get(load(model, tmp_path, jnp.float32)), tokens[0])
    alone = load(model, tmp_path, jnp.float32, packed=True)
    assert_close(jax.jit(model)(alone, tokens)[0], want, 1e-4)
    shared = [alone["layers"][0]["moe"][name] for name in ("shared13", "shared2")]
    assert [w.shape for w in shared] == [(2, 256, 256), (256, 256)]  # as PackedMatrix
    assert_close(jax.jit(model)(model.joined(alone), tokens)[0], want, 1e-4)
    with common.mesh_of(2, 2) as mesh:  # an expert is in two devices: it stays as the file has it
        assert isinstance(load(model, tmp_path, jnp.float32, mesh, packed=True)["layers"][0]["moe"]["w2"], Packed)
    with common.mesh_of(data=2, tensor=1, expert=4) as mesh:
        params = load(model, tmp_path, jnp.float32, mesh, packed=True)
        moe = params["layers"][0]["moe"]
        assert isinstance(moe["shared2"], jax.Array)  # a device has less than a block of it
        for name, rows in (("w13", 512), ("w2", 256)):
            w = moe[name]
            assert isinstance(w, PackedExperts) and w.data.sharding.shard_shape(w.data.shape)[0] == 2
            assert w.rows == rows and w.data.nbytes == 8 * rows * 256 // 4096 * slab
        run = jax.jit(model).lower(params, tokens).compile()
        assert not re.search(r"u8\[.*all-gather", run.as_text())
        assert_close(run(params, tokens)[0], want, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "kinds"), [(0.3, "es"), (128, "es"), (129, "e"), (0, ""), (np.nan, "")])
@pytest.mark.parametrize(("kind", "expert"), [("e", "experts.0"), ("s", "shared_experts")])
def test_scales_by_which_experts_in_fp8_stay_packed(tmp_path, scale, kinds, kind, expert):
    """Those that `pack_experts` takes, of routed experts, or `pack_matrix`, of a shared one."""
    name = f"layers.0.ffn.{expert}.w2"
    codes, scales = np.ones((256, 256), jnp.float8_e4m3fn), np.array([[1, scale], [2, 3]], np.float32)
    written(tmp_path / "model.safetensors", {f"{name}.weight": codes, f"{name}.scale": scales})
    names, block = np.array([f"{name}.weight"]), (128, 128)
    if kind == "e":
        found, pack = weights.fits_fused_moe(Checkpoint(tmp_path), names, block), pack_experts
    else:
        found, pack = weights.fits_step_product(Checkpoint(tmp_path), names, block, codes.shape), pack_matrix
    assert found == (kind in kinds)
    if found:
        pack(codes[None], scales[None])
    else:
        with pytest.raises(ValueError, match="scales"):
            pack(codes[None], scales[None])


def test_packed_projections_of_a_checkpoint(tmp_path):
    """Devices have their heads' tiles, of which nothing is gathered; steps take the parameters joined, too."""
    sizes = {"hidden_size": 128, "head_dim": 64, "qk_rope_head_dim": 16, "o_groups": 2, "o_lora_rank": 128}
    sizes |= {"moe_intermediate_size": 256}
    config = {**common.SMALL, **sizes, "q_lora_rank": 128, "layer_types": ["sliding_attention"], "num_hidden_layers": 1}
    model = Model.from_config({**config, "dspark_block_size": 0, "dspark_target_layer_ids": None})
    checkpoint(model, tmp_path, 128)
    tokens = prompts(1, 9)
    want = model_float64.logits(model, jax.device_get(load(model, tmp_path, jnp.float32)), tokens[0])
    with common.mesh_of(2, 1) as mesh:
        params = load(model, tmp_path, jnp.float32, mesh, packed=True)
        attention = params["layers"][0]["attention"]
        shards = {name: attention[name].data.sharding.shard_shape(attention[name].data.shape) for name in HAS_TILES}
        assert {name: shape[:-1] for name, shape in shards.items()} == HAS_TILES
        shared = (params["layers"][0]["moe"][name].data for name in ("shared13", "shared2"))
        assert [x.sharding.shard_shape(x.shape)[:-1] for x in shared] == [(2, 2, 2), (2, 2)]
        run = jax.jit(model).lower(params, tokens).compile()
        assert not re.search(r"u8\[.*all-gather", run.as_text())
        assert_close(run(params, tokens)[0], want, 1e-4)
        caches = jax.jit(model.read)(params, tokens[:, :8], model.cache(1, 16, jnp.float32), 0, jnp.array([8]))[1]
        step = jax.jit(model.step)(model.joined(params), tokens[:, 8], caches, jnp.array([9]))
        assert_close(step[0][0], want[8], 1e-4)


HAS_TILES = {"wq_a": (2, 2), "wkv": (2, 2), "wq_b": (4, 2), "wo_a": (1, 2, 4), "wo_b": (2, 2)}
"""attention's projections that stay in FP8, and the extents in tiles of one of two devices' part"""


def test_checkpoint(tmp_path):
    """In FP4 and FP8, with odd sizes: each device gets its part of what the file stands for."""
    sizes = {"hidden_size": 192, "moe_intermediate_size": 160, "layer_types": ["sliding_attention"] * 2}
    config = {**common.SMALL, **sizes, "num_hidden_layers": 2, "head_dim": 16, "qk_rope_head_dim": 8}
    model = DSpark.from_config({**config, "index_head_dim": 16, "dspark_target_layer_ids": [0, 1]})
    values = checkpoint(model, tmp_path, 128)
    lines = []
    with common.mesh_of(2, 2) as mesh:
        whole, parts = load(model, tmp_path, jnp.float32), load(model, tmp_path, jnp.float32, mesh, lines.append)
        kept = load(model, tmp_path, jnp.float32, mesh, packed=True)
        tokens = prompts(1, 9)
        logits = jax.jit(model)(kept, tokens)[0]
    jax.tree.map(np.testing.assert_array_equal, whole, parts)
    jax.tree.map(np.testing.assert_array_equal, whole, packed.whole(kept, jnp.float32))
    assert_close(logits, model_float64.logits(model.model, jax.device_get(whole), tokens[0]), 1e-4)
    for name, bits in (("w13", 4), ("w2", 4)):
        x, y = (params["layers"][1]["moe"][name] for params in (kept, parts))
        assert x.codes.nbytes * 8 == bits * y.size and x.scales.nbytes * 8 <= y.size  # blocks of 8 at least, here
        assert common.gib(x) < 0.3 * common.gib(y)
    assert isinstance(kept["layers"][1]["moe"]["shared13"], jax.Array)  # of which devices have no whole blocks
    w13 = parts["layers"][1]["moe"]["w13"]
    assert w13.sharding.shard_shape(w13.shape) == (4, 2, 80, 192)
    kept_whole = {name for name, w in kept["layers"][1]["attention"].items() if isinstance(w, PackedMatrix)}
    assert kept_whole == {"wq_a", "wkv"}  # the others are in parts of less than a tile of 64
    assert re.fullmatch(r"layer 2 of 2, [\d.]+ GiB, [\d.]+ GiB/s", lines[-1])
    of, drafts, of_drafts = sources(model.model), whole["drafts"], sources_of_drafts(model)
    for name in ("main", "main_norm", "norm", "w1", "w2"):
        tensor, axes = of_drafts[name]
        np.testing.assert_array_equal(drafts[name], values[tensor].transpose(axes))
    np.testing.assert_array_equal(drafts["hc"]["fn"], values["mtp.1.hc_head_fn"])
    np.testing.assert_array_equal(drafts["layers"][1]["attention"]["wkv"], values["mtp.1.attn.wkv.weight"].T)
    np.testing.assert_array_equal(drafts["layers"][0]["moe"]["w2"][3], values["mtp.0.ffn.experts.3.w2.weight"])
    np.testing.assert_array_equal(drafts["routing"][1], values["mtp.1.ffn.gate.bias"])
    for i in range(2):
        np.testing.assert_array_equal(whole["layers"][i]["attention"]["wq_a"], values[f"layers.{i}.attn.wq_a.weight"].T)
        for name, (names, axes) in of["layers"][i]["moe"].items():
            names = np.array(names, object)
            want = np.stack([values[x] for x in names.flat]).reshape(*names.shape, *values[names.flat[0]].shape)
            np.testing.assert_array_equal(whole["layers"][i]["moe"][name], want.transpose(axes), name)
        np.testing.assert_array_equal(whole["routing"][i], values[of["routing"][i][0]])
    jax.tree.map(
        lambda x, y: (
            np.testing.assert_array_equal(x.astype(jnp.bfloat16), y, strict=True)
            if y.dtype == jnp.bfloat16
            else np.testing.assert_array_equal(x, y, strict=True)
        ),
        {name: x for name, x in whole.items() if name != "drafts"},
        load(model.model, tmp_path),
    )


def tokenizer(directory, tokens):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({x: i for i, x in enumerate(tokens)}, unk_token=tokens[0]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(directory / "tokenizer.json"))


TOKENS = ["the", "The", " the", "THE", "thé", "then", " ", "  ", "\t", "\ufffd", "\ufffda", "a"]
WORDS = [0, 0, 0, 0, 0, 1, 2, 2, 2, 3, 4, 5]


def test_words_of_tokens(tmp_path):
    tokenizer(tmp_path, TOKENS)
    assert words(tmp_path / "tokenizer.json").tolist() == WORDS


def test_checkpoint_of_v41(tmp_path):
    """Tables stay in FP8, by parts on every device; the tokenizer gives words."""
    sizes = {"num_hidden_layers": 2, "compress_ratios": [0, 0], "kv_source_layer_ids": [], "index_source_layer_ids": []}
    sizes |= {"engram_layer_ids": [1], "engram_num_embeddings": [72], "engram_compressed_vocab_size": 6}
    drafts = DSpark.from_config(V41 | sizes | {"dspark_target_layer_ids": [0, 1]})
    values, model = checkpoint(drafts, tmp_path, 32), drafts.model
    tokenizer(tmp_path, TOKENS)
    with common.mesh_of(1, 2) as mesh:
        params = load(drafts, tmp_path, jnp.float32, mesh)
        own = params.pop("drafts")
        jax.tree.map(np.testing.assert_array_equal, params, load(model, tmp_path, jnp.float32, mesh))
        for name, tensor in (("w1", "embed"), ("w2", "head")):
            want = values[f"mtp.1.markov_head.{tensor}.weight"]
            np.testing.assert_array_equal(own[name], want if name == "w1" else want.T)
        assert drafts.stack.chosen == 2 and own["layers"][1]["moe"]["w2"].shape[0] == 6 and "hc" not in own
        np.testing.assert_array_equal(own["layers"][0]["moe"]["w2"][5], values["mtp.0.ffn.experts.5.w2.weight"])
        table, engram = params["tables"]["1"], params["layers"][1]["engram"]
        assert table["rows"].dtype == jnp.float8_e4m3fn and table["rows"].sharding.shard_shape((72, 64)) == (72, 32)
        got = np.asarray(table["rows"], np.float32) * np.repeat(np.asarray(table["scales"], np.float32), 32, 1)
        np.testing.assert_array_equal(got, values["layers.1.engram.embed.weight"])
        np.testing.assert_array_equal(engram["wkv"], values["layers.1.engram.wkv.weight"].T)
        assert params["words"][: len(WORDS)].tolist() == WORDS
        tokens = prompts(1, 9)
        got = jax.jit(model)(params, tokens)[0]
    assert_close(got, model_float64.logits(model, jax.device_get(params), tokens[0]), 1e-4)
    tokenizer(tmp_path, TOKENS[:-1])
    with pytest.raises(ValueError, match="got 5 words, wanted the config's 6"):
        load(model, tmp_path)


def test_checkpoint_errors(tmp_path):
    model = Model.from_config(common.SMALL | SIZES)
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors in"):
        load(model, tmp_path)
    written(tmp_path / "model.safetensors", {"embed.weight": np.zeros((64, 63), np.float32)})
    with pytest.raises(ValueError, match=r"embed.weight: got float32\[64, 63\], wanted \[64, 64\]"):
        load(model, tmp_path)
    written(tmp_path / "model.safetensors", {"embed.weight": np.zeros((64, 64), np.float32)})
    with pytest.raises(ValueError, match=r"hc_head_base: got none"):
        load(model, tmp_path)
