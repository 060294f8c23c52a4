"""examples/deepseek_v4: the model by chunks, steps, pages and shards, its checkpoints, and its programs.

test_deepseek_v4_training.py has its training, and sequences over devices. test_hf_model.py compares it with Hugging
Face's.
"""

import dataclasses
import functools
import json
import re
import runpy
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from examples.deepseek_v4 import choices, common, engram, grouped, packed, serve, sinkhorn, speed, train
from examples.deepseek_v4.drafts import DSpark
from examples.deepseek_v4.engram import words
from examples.deepseek_v4.grouped import blocks, products
from examples.deepseek_v4.model import FIXED, Model
from examples.deepseek_v4.packed import Packed
from examples.deepseek_v4.sinkhorn import doubly_stochastic
from examples.deepseek_v4.weights import load, sources, sources_of_drafts
from examples.serving import Request, Server
from jax_dsv4_fmha import PackedExperts, PackedMatrix

from . import model_float64
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
    return first, second, jax.jit(jax.grad(loss))(learned, fixed) if name == "v4" else None


@functools.cache
def of_one_device(name):
    return results(name, small(name)[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, shape", [*(("v4", shape) for shape in ((1, 2, 2), (2, 2, 2), (1, 1, 8))), ("v4.1", (2, 2, 1))]
)
def test_shards(name, shape):
    """Logits, steps and gradients over 2, 4 and 8 devices are those of one device, up to rounding."""
    model, params = small(name)
    data, tensor, expert = shape
    with common.mesh_of(tensor, expert, data) as mesh:
        params = jax.tree.map(lambda x, p: jax.device_put(x, NamedSharding(mesh, p)), params, model.partition())
        got = results(name, params)
    jax.tree.map(functools.partial(assert_close, tolerance=3e-4), got, of_one_device(name))
    if name == "v4":
        w13 = got[2]["layers"][1]["moe"]["w13"]
        assert w13.sharding.shard_shape(w13.shape) == (8 // expert, 64, 2, 32 // tensor)


def test_speed_s_parameters_in_a_checkpoint_s_form():
    """They are packed, and of such sizes that a step's numbers are neither lost nor great."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 1, "o_groups": 2}
    model = Model.from_config({**common.small(), **sizes, "layer_types": ["compressed_sparse_attention"]})
    params = speed.parameters(dataclasses.replace(model, hashed=0), packed=True)
    p, layer = params["layers"][0]["attention"], model.layers[0]
    of_step = (*(p[name] for name in ("wq_b", "wo_a", "wo_b")), p["indexer"]["wq_b"])
    assert all(isinstance(w, PackedMatrix) for w in of_step)
    x = jax.random.normal(jax.random.key(0), (2, 1, 256), p["wx"].dtype)
    y = layer.step(p, x, layer.cache(2, 32, x.dtype), lengths=1).y
    assert 2**-8 < np.std(np.asarray(y, np.float32)) < 2**6


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


@pytest.mark.parametrize("rows, experts", [(7, 3), (400, 5), (600, 2)])
def test_blocks(rows, experts):
    """Each row with an expert has one place, in a block of its expert; there is no more than one part block each."""
    expert = np.random.default_rng(0).integers(0, experts + 1, rows)
    expert[expert == 1] = 0  # an expert without rows
    at = jax.jit(blocks, static_argnums=1)(jnp.asarray(expert), experts)
    source, place, size = np.asarray(at.source), np.asarray(at.place), at.source.shape[1]
    for block, its in enumerate(source):
        assert all(row == rows or expert[row] == at.expert[block] for row in its)
    there = expert < experts
    np.testing.assert_array_equal(source.ravel()[place[there]], np.flatnonzero(there))
    assert (place[~there] == source.size).all() and (source < rows).sum() == there.sum()
    blocks_of = [-(-(expert == e).sum() // size) for e in range(experts)]
    np.testing.assert_array_equal(at.begin, np.cumsum([0, *blocks_of]))


def of_products(rows, experts, k, c):
    """A product of rows with their experts' matrices, and its gradients; the operands are random."""
    rng = np.random.default_rng(1)
    expert = jnp.asarray(rng.integers(0, experts - 1, rows))  # one has no rows
    x, w, dy = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((rows, k), (experts, k, c), (rows, c)))

    def f(x, w):
        at = blocks(expert, experts)
        y = products(jnp.take(x, at.source, 0, mode="fill", fill_value=0), w, at)
        return y.reshape(-1, c)[at.place], y

    def value_and_gradients(x, w, dy):
        (y, blockwise), vjp = jax.vjp(f, x, w)
        return y, blockwise, vjp((dy, jnp.zeros_like(blockwise)))

    want = np.einsum("rk,rkc->rc", *(np.asarray(a, np.float64) for a in (x, w[expert])))
    return value_and_gradients, (x, w, dy), expert, want


@pytest.mark.parametrize("rows, experts, k, c", [(7, 3, 64, 32), (300, 4, 96, 64)])
def test_products_by_the_kernel(rows, experts, k, c, monkeypatch):
    """The kernel, interpreted by Pallas, agrees with the loop, which agrees with float64."""
    f, operands, _, want = of_products(rows, experts, k, c)
    loop = f(*operands)
    np.testing.assert_allclose(np.asarray(loop[0], np.float64), want, rtol=0.02, atol=0.1)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *operands, cuda, default: cuda(*operands))
    calls, real = [], grouped.pl.pallas_call
    monkeypatch.setattr(
        grouped.pl, "pallas_call", lambda *a, compiler_params, **b: calls.append(a) or real(*a, **b, interpret=True)
    )
    for got, y in zip(jax.tree.leaves(f(*operands)), jax.tree.leaves(loop), strict=True):
        np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (got, y)), rtol=0.02, atol=0.1)
    assert len(calls) == 3  # the product, and two gradients


def with_gradient(x):
    w = jnp.cos(jnp.arange(16.0)).reshape(4, 4)
    return jax.value_and_grad(lambda x: (doubly_stochastic(x, 20, 1e-6) * w).sum())(x)


LOGITS = [(64, 1, 4, 4), (3, 7, 4, 4)]


@pytest.mark.parametrize("shape", LOGITS, ids=str)
def test_sinkhorn_by_the_kernel(shape, monkeypatch):
    """Pallas's interpreter runs it, also with matrices that fill no whole block; a loop makes what is wanted. Rows and
    columns have the sum 1.
    """
    x = jax.random.normal(jax.random.key(0), shape)
    want = jax.jit(with_gradient)(x)
    mixed = doubly_stochastic(x, 20, 1e-6)
    for axis in (-1, -2):
        np.testing.assert_allclose(mixed.sum(axis), 1, atol=1e-3)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *operands, cuda, default: cuda(*operands))
    monkeypatch.setattr(sinkhorn.pl, "pallas_call", functools.partial(sinkhorn.pl.pallas_call, interpret=True))
    for got, wanted in zip(with_gradient(x), want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LOGITS, ids=str)
def test_sinkhorn_on_a_gpu(shape, cuda):
    x = 3 * jax.random.normal(jax.random.key(0), shape)
    got = jax.device_get(jax.jit(with_gradient)(jax.device_put(x, cuda)))
    want = jax.jit(with_gradient)(jax.device_put(x, jax.devices("cpu")[0]))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_experts_are_lowered_for_cuda():
    """Every product with experts in a model's step is a kernel, in a mesh too, and those of float32 are not."""
    model = Model.from_config(common.small() | {"head_dim": 32, "qk_rope_head_dim": 8, "index_head_dim": 8})
    with common.mesh_of(1, 1, 1):
        for dtype, kernels in ((jnp.bfloat16, 2), (jnp.float32, 0)):
            params = jax.eval_shape(lambda dtype=dtype: model.init(jax.random.key(0), dtype))
            moe = params["layers"][0]["moe"], params["routing"][0]
            x = jax.ShapeDtypeStruct((4, 1, model.hidden), dtype), jax.ShapeDtypeStruct((4, 1), jnp.int32)
            text = jax.jit(model.moe).trace(*moe, *x).lower(lowering_platforms=("cuda",)).as_text()
            assert text.count("__gpu$xla.gpu.triton") == kernels, text


@pytest.mark.gpu
@pytest.mark.parametrize("rows, experts, k, c", [(40, 16, 512, 256), (3000, 8, 256, 512)])
def test_products_on_a_gpu(rows, experts, k, c, cuda):
    f, operands, _, want = of_products(rows, experts, k, c)
    with jax.default_device(cuda):
        y, blockwise, (dx, dw) = jax.jit(f)(*operands)
    with jax.default_device(jax.devices("cpu")[0]):
        loop = jax.jit(f)(*map(np.asarray, operands))
    np.testing.assert_allclose(np.asarray(y, np.float64), want, rtol=0.02, atol=0.5)
    for got, want in zip(jax.tree.leaves((blockwise, dx, dw)), jax.tree.leaves(loop[1:]), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=0.02, atol=0.5)


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


def checkpoint(model, directory, block):
    """Random tensors of a model by DeepSeek's names in two files, as published: FP4 experts, FP8 elsewhere.

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
            packed = fp8 if expert == "shared_experts" else fp4
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


def test_packed_experts_of_a_checkpoint(tmp_path):
    """In MXFP4, of sizes that `fused_moe` takes: each device has its experts' bytes, and nothing is gathered."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "layer_types": ["sliding_attention"]}
    config = {**common.SMALL, **sizes, "num_hidden_layers": 1, "head_dim": 16, "qk_rope_head_dim": 8}
    model = Model.from_config({**config, "dspark_block_size": 0, "dspark_target_layer_ids": None})
    checkpoint(model, tmp_path, 128)
    tokens = prompts(1, 9)
    want = model_float64.logits(model, jax.device_get(load(model, tmp_path, jnp.float32)), tokens[0])
    alone = load(model, tmp_path, jnp.float32, packed=True)
    assert_close(jax.jit(model)(alone, tokens)[0], want, 1e-4)
    with common.mesh_of(2, 2) as mesh:  # an expert is in two devices: it stays as the file has it
        assert isinstance(load(model, tmp_path, jnp.float32, mesh, packed=True)["layers"][0]["moe"]["w2"], Packed)
    with common.mesh_of(data=2, tensor=1, expert=4) as mesh:
        params = load(model, tmp_path, jnp.float32, mesh, packed=True)
        moe = params["layers"][0]["moe"]
        for name, rows in (("w13", 512), ("w2", 256)):
            w = moe[name]
            assert isinstance(w, PackedExperts) and w.data.sharding.shard_shape(w.data.shape)[0] == 2
            assert w.rows == rows and w.data.nbytes == 8 * rows * 256 * 17 // 32
        run = jax.jit(model).lower(params, tokens).compile()
        assert not re.search(r"u8\[.*all-gather", run.as_text())
        assert_close(run(params, tokens)[0], want, 1e-4)


def test_packed_projections_of_a_checkpoint(tmp_path):
    """Devices have their heads' tiles, of which nothing is gathered; steps take the parameters joined, too."""
    sizes = {"hidden_size": 128, "head_dim": 64, "qk_rope_head_dim": 16, "o_groups": 2, "o_lora_rank": 128}
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
    for name, bits in (("w13", 4), ("w2", 4), ("shared13", 8), ("shared2", 8)):
        x, y = (params["layers"][1]["moe"][name] for params in (kept, parts))
        assert x.codes.nbytes * 8 == bits * y.size and x.scales.nbytes * 8 <= y.size  # blocks of 8 at least, here
        assert common.gib(x) < 0.3 * common.gib(y)
    w13 = parts["layers"][1]["moe"]["w13"]
    assert w13.sharding.shard_shape(w13.shape) == (4, 192, 2, 80)
    kept_whole = {name for name, w in kept["layers"][1]["attention"].items() if isinstance(w, PackedMatrix)}
    assert kept_whole == {"wq_a", "wkv"}  # the others are in parts of less than a tile of 64
    assert re.fullmatch(r"layer 2 of 2, [\d.]+ GiB, [\d.]+ GiB/s", lines[-1])
    of, drafts, of_drafts = sources(model.model), whole["drafts"], sources_of_drafts(model)
    for name in ("main", "main_norm", "norm", "w1", "w2"):
        tensor, axes = of_drafts[name]
        np.testing.assert_array_equal(drafts[name], values[tensor].transpose(axes))
    np.testing.assert_array_equal(drafts["hc"]["fn"], values["mtp.1.hc_head_fn"])
    np.testing.assert_array_equal(drafts["layers"][1]["attention"]["wkv"], values["mtp.1.attn.wkv.weight"].T)
    np.testing.assert_array_equal(drafts["layers"][0]["moe"]["w2"][3], values["mtp.0.ffn.experts.3.w2.weight"].T)
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


@pytest.mark.slow
def test_choices_in_common(capsys):
    """The program's tables against sets, of a model of V4.1 whose layers choose from the same entries."""
    layers = {
        "compress_ratios": [0, 2, 2],
        "num_hidden_layers": 3,
        "kv_source_layer_ids": [1],
        "engram_layer_ids": None,
    }
    sizes = {"index_source_layer_ids": [1, 2], "index_topk": 4, "candidate_source_layer_id": -1}
    model, params = random(Model.from_config(V41 | layers | sizes))
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
        np.testing.assert_array_equal(own["layers"][0]["moe"]["w2"][5], values["mtp.0.ffn.experts.5.w2.weight"].T)
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
    assert train.flops(model, 128) == pytest.approx(6 * of_token, rel=0.02)
    assert 6.1 * of_token < train.flops(model, 4096) < 6.8 * of_token


@pytest.mark.parametrize(
    "program, options",
    [
        (serve, ("--fp8", "--fp4", "--fp8-products", "--fp8-products-bf16-rope", "--random", "--pages")),
        (train, ("--remat", "--keep")),
    ],
)
def test_a_program_says_how_it_is_called(program, options, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["program", "--help"])
    with pytest.raises(SystemExit) as done:
        program.arguments()
    said = capsys.readouterr().out
    runpy.run_module("examples.deepseek_v4", run_name="__main__")
    assert f"python -m {program.__name__} --help\n" in capsys.readouterr().out
    assert not done.value.code and all(option in said for option in ("checkpoint", "--expert", *options))


@pytest.mark.slow
def test_serve(capsys, in_place):
    """More requests than places, over too few pages: each says what it says alone, and prints it as it comes."""
    rng = np.random.default_rng(0)
    prompts = ["7 " * 17 + " ".join(map(str, rng.integers(0, 64, n))) for n in (33, 3, 21, 23, 9)]
    sizes = {"wanted": 12, "places": 2, "room": 64, "chunk": 16, "page": 16, "pages": 6}
    requests = serve.main(prompts, **sizes)
    said = capsys.readouterr().out
    assert sorted(in_place) == ["read", "say"]
    tails = [line.removeprefix("7 " * 17) for line in prompts]
    others = serve.main(tails, **sizes, beginning="7 " * 17, speculate=2, tensor=2, expert=2)
    assert [r.said for r in others] == [r.said for r in requests] and "begin" in in_place
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
    for line, request in zip(prompts, requests, strict=True):
        (alone,) = serve.main([line], **how, places=1, speculate=2)
        assert alone.said == request.said and len(request.said) == 6
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
    server = Server(model, params, jnp.float32, 2, 64, chunk=16, page=16, pages=7, speculate=4)
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
    """V4.1, whose engrams remember words: the place that read the beginning keeps its own while others come and go."""
    model, params = random(DSpark.from_config(CONFIGS["v4.1"])) if own else small("v4.1")
    rng, beginning = np.random.default_rng(0), np.arange(34, dtype=np.int32)
    how = {"chunk": 16, "page": 16, "pages": 6, "beginning": beginning, "speculate": speculate}
    server = Server(model, model.joined(params), jnp.float32, 2, 64, **how)
    requests = [Request(np.r_[beginning, rng.integers(0, 64, n, np.int32)], 6, 0.0) for n in (5, 5, 12, 12)]
    for request in requests:
        server.submit(request)
    while not server.is_idle:
        server.work()
    for request in requests:
        assert server.alone(request).tolist() == request.said
    assert bool(server.drafted) == bool(speculate)


def test_random_models_are_known_by_name_or_file():
    with pytest.raises(SystemExit, match=r"--random: got 'v5', wanted v4, v4.1 or a config.json"):
        common.config_of("v5")
