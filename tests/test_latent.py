"""`LatentAttention`: against heads' own keys and values in float64, chunks and steps against whole sequences,
documents, meshes, configs and errors. tests/test_hf_latent.py compares it with Hugging Face's modules.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jax_dsv4_fmha import explain
from jax_dsv4_fmha.layers import (
    Indexer,
    LatentAttention,
    LayerCache,
    Rope,
    Shared,
    from_state_dict,
    latent,
    to_state_dict,
)
from tests.helpers import assert_in_place, normal
from tests.transformed import mesh_of

M, H, S = 32, 4, 14
SIZES = {"hidden": M, "heads": H, "q_rank": 16, "latent": 24, "nope": 12, "v": 10, "rope": Rope(8)}
DENSE = LatentAttention(**SIZES)
SPARSE = LatentAttention(
    **SIZES, sparse=True, indexer=Indexer(M, 16, heads=16, d=16, topk=5, latent=M, layer_norm=True), sinks=True,
    gated=True, scale=0.3,
)  # fmt: skip
POOLED = dataclasses.replace(
    SPARSE, rope=None, indexer=Indexer(M, 16, heads=16, d=16, topk=6, latent=M, layer_norm=True, pool=3)
)
LAYERS = {"dense": DENSE, "sparse": SPARSE, "pooled": POOLED, "one matrix": dataclasses.replace(DENSE, q_rank=0)}
X = normal(1, 2, S, M)


@functools.cache
def params_of(name):
    """All random, because zeros and ones would hide a mistake."""
    params = LAYERS[name].init(jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    return tree.unflatten([x + 0.2 * normal(i, *x.shape) for i, x in enumerate(leaves)])


@functools.cache
def whole(name):
    return jax.jit(LAYERS[name])(params_of(name), X)


def assert_close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=tolerance * np.abs(want).max())


def in_float64(layer, params, x):
    """Not absorbed: each head has keys and values of its own. The choice by scores, in float64 too."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x, n = np.asarray(x, np.float64), layer.turned

    def rms(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + layer.eps) * weight

    def turned(x, at):
        if layer.rope is None:
            return x
        angle = at * layer.rope.frequencies().astype(np.float64)
        even, odd = x[..., -n::2], x[..., -n + 1 :: 2]
        x = x.copy()
        x[..., -n::2], x[..., -n + 1 :: 2] = (
            even * np.cos(angle) - odd * np.sin(angle),
            even * np.sin(angle) + odd * np.cos(angle),
        )
        return x

    c = rms(x @ p["wq_a"], p["q_norm"]) if layer.q_rank else x
    q = np.einsum("sr,rhd->shd", c, p["wq_b" if layer.q_rank else "wq"])
    kv = x @ p["wkv"]
    latents = rms(kv[:, : layer.latent], p["kv_norm"])
    k = np.concatenate(
        [np.einsum("sl,lhn->shn", latents, p["w_uk"]), np.repeat(kv[:, None, layer.latent :], layer.heads, 1)], -1
    )
    v = np.einsum("sl,lhv->shv", latents, p["w_uv"])
    q, k = (np.stack([turned(row, i) for i, row in enumerate(y)]) for y in (q, k))
    if layer.indexer is not None:
        its = p["indexer"]
        index_q = np.einsum("sr,rhd->shd", c, its["wq_b"])
        index_k = x @ its["wk"]
        index_k = index_k - index_k.mean(-1, keepdims=True)
        index_k = index_k / np.sqrt((index_k**2).mean(-1, keepdims=True) + 1e-6) * its["k_norm"] + its["k_bias"]
        index_q, index_k = (np.stack([turned(row, i) for i, row in enumerate(y)]) for y in (index_q, index_k))
        if pool := layer.indexer.pool:
            whole = len(x) // pool * pool
            gates = (x @ its["gate"])[:whole].reshape(-1, pool, 16) + its["ape"]
            shares = np.exp(gates) / np.exp(gates).sum(1, keepdims=True)
            index_k = (shares * index_k[:whole].reshape(-1, pool, 16)).sum(1)
        scores = np.einsum(
            "th,thk->tk", x @ its["weights_proj"], np.maximum(np.einsum("thd,kd->thk", index_q, index_k), 0)
        )
    out = []
    for i in range(len(x)):
        seen = np.arange(i + 1)
        if layer.indexer is not None:
            past = (i + 1) // (pool or 1)
            seen = np.argsort(-scores[i, :past])[: layer.indexer.topk // (pool or 1)]
            if pool:
                own = np.arange(past * pool, i + 1)
                seen = np.concatenate([(seen[:, None] * pool + np.arange(pool)).ravel(), own])
        s = np.einsum("hd,khd->hk", q[i], k[seen]) * (layer.scale or (layer.nope + n) ** -0.5)
        weights = np.exp(s)
        total = weights.sum(-1) + (np.exp(p["sink"]) if layer.sinks else 0)
        o = np.einsum("hk,khv->hv", weights / total[:, None], v[seen])
        if layer.gated:
            o = o / (1 + np.exp(-np.einsum("m,mhv->hv", x[i], p["gate"])))
        out.append(np.einsum("hv,hvm->m", o, p["wo"]))
    return np.stack(out)


@pytest.mark.parametrize("name", LAYERS)
def test_against_heads_with_keys_of_their_own(name):
    for x, y in zip(X, whole(name).y, strict=True):
        assert_close(y, in_float64(LAYERS[name], params_of(name), x))


@pytest.mark.parametrize("name", ["dense", "sparse", "pooled"])
@pytest.mark.parametrize("pages", [None, 12])
def test_chunks_and_steps_are_the_whole(name, pages):
    """Also of a batch whose sequences are not equally long, with an idle place, and after a token was taken back."""
    layer, params, want = LAYERS[name], params_of(name), whole(name).y
    table = jnp.array([[9, 2, 0, 7], [1, 11, 3, 6], [4, 5, 8, 10]], jnp.int32) if pages else None
    x = jnp.concatenate([X, X[:1]])
    cache = layer.cache(3, 16, x.dtype, steps=2, block_table=table, pages=pages)
    call = jax.jit(layer, donate_argnums=2)
    step = jax.jit(layer.step, donate_argnums=2)
    assert_in_place(step.trace(params, x[:, :1], cache, lengths=jnp.array([1, 1, 1])))
    got, cache, *_ = call(params, x[:, :6], cache, lengths=jnp.array([6, 4, 0]))
    assert_close(got[0], want[0, :6])
    assert_close(got[1, :4], want[1, :4])
    assert not got[1, 4:].any() and not got[2].any()
    for more in range(1, 4):
        new = jnp.stack([x[0, 5 + more], x[1, 3 + more], x[2, 0]])[:, None]
        out = step(params, new, cache, lengths=jnp.array([6 + more, 4 + more, 0]))
        cache = out.cache
        assert_close(out.y[0, 0], want[0, 5 + more])
        assert_close(out.y[1, 0], want[1, 3 + more])
        assert not out.y[2].any()
    two = {"start": jnp.array([8, 6, 0]), "lengths": jnp.array([10, 7, 0])}  # the first takes its last token back
    new = jnp.stack([x[0, 8:10], jnp.stack([x[1, 6], x[1, 0]]), x[2, :2]])
    out = step(params, new, cache, **two)
    assert_close(out.y[0], want[0, 8:10])
    assert_close(out.y[1, 0], want[1, 6])


def test_a_prompt_makes_q_by_one_product():
    """No array of all queries is copied for RoPE's numbers; a step's is, whose weights are larger."""
    params, cache = params_of("dense"), DENSE.cache(2, S, X.dtype)
    of_q = re.compile(rf"concatenate .*-> tensor<2x\d+x{H}x{DENSE.latent + 8}xf32>")
    prompt, chunk = jax.jit(DENSE).lower(params, X), jax.jit(DENSE).lower(params, X, cache)
    step = jax.jit(functools.partial(DENSE.step, lengths=9)).lower(params, X[:, :1], cache)
    assert [bool(of_q.search(x.as_text())) for x in (prompt, chunk, step)] == [False, False, True]


@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_documents_give_what_they_give_alone(name):
    layer, params = LAYERS[name], params_of(name)
    ids = jnp.array([[0] * 6 + [1] * 8, [0] * S])
    got = jax.jit(layer)(params, X, segment_ids=ids).y
    alone = jax.jit(layer)
    assert_close(got[0, :6], alone(params, X[:1, :6]).y[0])
    assert_close(got[0, 6:], alone(params, X[:1, 6:]).y[0])
    assert_close(got[1], whole(name).y[1])


def test_a_choice_that_is_handed_over():
    """A layer with an indexer takes it, and caches its keys all the same; so do layers without one."""
    params, want = params_of("sparse"), whole("sparse")
    assert want.indices.shape == (2, S, 5)
    assert_close(jax.jit(SPARSE)(params, X, indices=want.indices).y, want.y)
    follower, own = dataclasses.replace(SPARSE, indexer=None), {k: x for k, x in params.items() if k != "indexer"}
    by_shared = jax.jit(follower)(own, X, shared=Shared().after(want))
    assert_close(by_shared.y, want.y)
    assert by_shared.indices is None and Shared().after(want).after(by_shared).indices is want.indices
    future = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (2, S, S))  # tokens see none after them
    assert_close(jax.jit(follower)(own, X, indices=future).y[:, :5], jax.jit(SPARSE)(params, X).y[:, :5])
    cache = SPARSE.cache(2, S, X.dtype)
    out = SPARSE(params, X[:, :9], cache, indices=want.indices[:, :9])
    assert_close(SPARSE(params, X[:, 9:], out.cache, start=9).y, want.y[:, 9:])


@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_heads_over_devices(name):
    """By shardings alone; a step too."""
    layer, params, mesh = LAYERS[name], params_of(name), mesh_of("Auto")
    specs = layer.partition("model")
    placed = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs)
    assert_close(jax.jit(layer)(placed, X).y, whole(name).y)
    cache = layer(params, X[:, :-1], layer.cache(2, S, X.dtype)).cache
    step = jax.jit(lambda p, x, c: layer.step(p, x, c, lengths=S).y)
    assert_close(step(placed, X[:, -1:], cache)[:, 0], whole(name).y[:, -1])
    assert not any(any(spec) for spec in jax.tree.leaves(layer.partition()))


# ---- caches in FP8

WIDE = {"hidden": 64, "heads": 4, "q_rank": 32, "nope": 16, "v": 16}
INDEXER = Indexer(64, 32, heads=32, d=128, topk=40, latent=64, layer_norm=True)
PACKED = {
    "dense": LatentAttention(**WIDE),
    "sparse": LatentAttention(**WIDE, sparse=True, indexer=INDEXER, sinks=True, gated=True),
    "pooled": LatentAttention(**WIDE, rope=None, sparse=True, indexer=dataclasses.replace(INDEXER, pool=4)),
}
FP8 = jnp.float8_e4m3fn


def of_packed(name, topk=None):
    layer = PACKED[name]
    if topk:
        layer = dataclasses.replace(layer, indexer=dataclasses.replace(layer.indexer, topk=topk))
    params = layer.init(jax.random.key(0), jnp.bfloat16)
    return layer, jax.tree.map(lambda x: x + 0.1 * normal(x.size, *x.shape).astype(x.dtype), params)


def generated(layer, params, x, cache, prompt=8, **how):
    """y and the indices of a prompt and of 20 steps."""
    lengths = jnp.array([prompt, prompt - 3])
    call, step = (jax.jit(functools.partial(f, **how), donate_argnums=2) for f in (layer, layer.step))
    outs = [call(params, x[:, :prompt], cache, lengths=lengths)]
    for _ in range(20):
        new, lengths = x[jnp.arange(2), lengths][:, None], lengths + 1
        outs.append(step(params, new, outs[-1].cache, lengths=lengths))
    return jnp.concatenate([out.y for out in outs], 1), [out.indices for out in outs], outs[-1].cache


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_steps_over_packed_caches_are_near_those_of_bfloat16(name, paged):
    """A chunk of a prompt and 20 steps of ragged sequences, who see all tokens, chosen or not."""
    layer, params = of_packed(name)
    x = normal(5, 2, 40, 64, dtype=jnp.bfloat16)
    pages = {"block_table": jnp.array([[3, 0], [1, 2]])} if paged else {}
    length = 256 if paged else 40
    want, _, _ = generated(layer, params, x, layer.cache(2, length, **pages))
    cache = layer.cache(2, length, FP8, **pages)
    window = "v41_fp8" if layer.rope is None else "v32_fp8"
    keys = {} if layer.indexer is None else {"keys": "index_fp8"}
    layouts = {k: x.layout for k, x in cache._asdict().items() if x is not None and x.is_packed}
    assert layouts == {"window": window, **keys}
    got, indices, cache = generated(layer, params, x, cache)
    difference = np.linalg.norm(np.asarray(got - want, np.float64)) / np.linalg.norm(np.asarray(want, np.float64))
    assert 1e-4 < difference < 0.06
    if layer.indexer is not None:
        assert [len({*row} - {-1}) for row in indices[-1][:, 0].tolist()] == [28, 25]  # all tokens are chosen
    assert cache.window.is_packed


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, FP8])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_steps_by_kernels_are_those_of_the_reference(name, paged, dtype):
    layer, params = of_packed(name)
    x = normal(5, 2, 40, 64, dtype=jnp.bfloat16)
    pages = {"block_table": jnp.array([[3, 0], [1, 2]])} if paged else {}
    (got, *_), (want, *_) = (
        generated(layer, params, x, layer.cache(2, 256 if paged else 40, dtype, **pages), implementation=how)
        for how in (None, "reference")
    )
    got, want = (np.asarray(y, np.float64) for y in (got, want))
    assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)


@pytest.mark.parametrize("name", ["sparse", "pooled"])
def test_choices_by_keys_in_fp8_are_near_those_by_bfloat16(name):
    layer, params = of_packed(name, topk=12)
    x = normal(5, 2, 40, 64, dtype=jnp.bfloat16)
    caches = [layer.cache(2, 40, keys=keys) for keys in (None, FP8)]
    assert not caches[0].keys.is_packed and caches[1].keys.layout == "index_fp8" and not caches[1].window.is_packed
    (_, want, _), (_, got, _) = (generated(layer, params, x, cache) for cache in caches)
    common = [
        len({*a} & {*b}) / len({*b}) for a, b in zip(got[-1][:, 0].tolist(), want[-1][:, 0].tolist(), strict=True)
    ]
    assert min(common) > 0.6 and layer.cache(2, 40, FP8, keys=jnp.bfloat16).keys.entries.dtype == jnp.bfloat16


def test_index_keys_in_pages_that_no_kernel_takes_stay_in_bfloat16(caplog):
    table = jnp.array([[0, 1], [2, 3]])
    assert PACKED["sparse"].cache(2, 80, FP8, block_table=table).keys.entries.dtype == jnp.bfloat16
    assert "LatentAttention.cache: index keys stay in bfloat16 in pages of 40 entries" in caplog.text
    assert PACKED["sparse"].cache(2, 80, FP8, keys=FP8, block_table=table).keys.is_packed


@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_a_step_over_packed_pages_runs_on_kernels(name, on_hopper):
    layer, params = of_packed(name)
    cache = layer.cache(2, 128, FP8, block_table=jnp.array([[3, 0], [1, 2]]))
    x = jnp.zeros((2, 1, 64), jnp.bfloat16)
    found = explain(functools.partial(layer.step, lengths=9), params, x, cache)
    ops = ["kv_insert", "mla_decode"] + ["lightning_indexer", "seen_slots"] * (name == "sparse")
    assert {d.op: d.implementation for d in found if d.op != "rope"} == dict.fromkeys(ops, "kernel")
    assert any("v32_fp8 caches" in d.reason for d in found)


def test_bfloat16():
    layer = LatentAttention(hidden=64, heads=2, q_rank=32, nope=16, v=16)
    params = jax.tree.map(lambda x: x, layer.init(jax.random.key(0), jnp.bfloat16))
    assert params["wo"].dtype == jnp.bfloat16 and params["kv_norm"].dtype == jnp.float32
    out = jax.jit(layer)(params, normal(2, 1, 9, 64, dtype=jnp.bfloat16))
    assert out.y.dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", [jnp.bfloat16, FP8])
def test_an_indexer_of_16_heads_runs_on_kernels(dtype, on_hopper, monkeypatch):
    """With 16 more of zeros it chooses the same."""
    its = dataclasses.replace(INDEXER, heads=16, topk=9)
    layer = dataclasses.replace(PACKED["sparse"], indexer=its)
    params, x = layer.init(jax.random.key(0), jnp.bfloat16), normal(3, 2, 30, 64, dtype=jnp.bfloat16)
    cache = layer.cache(2, 64, dtype)
    found = explain(layer, params, x, cache) + explain(
        functools.partial(layer.step, lengths=9), params, x[:, :1], cache
    )
    assert [d.implementation for d in found if d.op == "lightning_indexer"] == ["kernel"] * 2
    monkeypatch.undo()
    got = layer(params, x, cache).indices
    monkeypatch.setattr(latent, "_filled", lambda *x: x)
    assert (got == layer(params, x, cache).indices).all() and (got >= 0).any()


@pytest.mark.parametrize("name", ["V3", "V32", "K2", "GLM"])
def test_kernels_serve_published_sizes(name, on_hopper):
    config = globals()[name] | {"hidden_size": 64, "q_lora_rank": 32}
    layer = LatentAttention.from_config(config, layer=0)
    x = jax.ShapeDtypeStruct((1, 64, 64), jnp.bfloat16)
    params = jax.eval_shape(lambda: layer.init(jax.random.key(0), jnp.bfloat16))
    found = {d.op: d.implementation for d in explain(layer, params, x) if d.op != "rope"}
    ops = ["fmha"] if name in ("V3", "K2") else ["lightning_indexer", "sparse_fmha"]
    assert found == dict.fromkeys(ops, "kernel")


@pytest.mark.parametrize("order", [{}, {"halves": True}, {"index_halves": True, "index_rope_first": True}])
@pytest.mark.parametrize("name", LAYERS)
def test_tensors_there_and_back(name, order):
    layer, params = dataclasses.replace(LAYERS[name], **order), params_of(name)
    tensors = to_state_dict(layer, params, "model.layers.3.self_attn.")
    assert tensors["model.layers.3.self_attn.kv_b_proj.weight"].shape == (H * 22, 24)
    back = from_state_dict(layer, tensors | {"other": 1}, "model.layers.3.self_attn.", jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, back, params)


# ---- configs

V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000, "attention_bias": False, "attention_dropout": 0.0,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rms_norm_eps": 1e-6, "n_routed_experts": 256, "topk_method": "noaux_tc", "quantization_config": {"fmt": "e4m3"},
}  # fmt: skip
INDEX = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
V32 = V3 | INDEX | {"model_type": "deepseek_v32"}
K2 = V3 | {
    "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64,
    "rope_scaling": V3["rope_scaling"] | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
}  # fmt: skip
KIMI = {"model_type": "kimi_k25", "text_config": K2}
GLM = {
    **V32, "model_type": "glm_moe_dsa", "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "q_lora_rank": 2048, "index_n_heads": 32, "rope_interleave": True,
    "indexer_rope_interleave": True, "rope_scaling": None, "rope_theta": None, "rms_norm_eps": 1e-5, "head_dim": 64,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "qk_head_dim": 256,
}  # fmt: skip
FLASH = {
    **INDEX, "model_type": "glm5_next_text", "hidden_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 64,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256,
    "rms_norm_eps": 1e-5, "index_kpool": 4, "layer_types": (["linear_attention"] * 3 + ["indexed_attention"]) * 2,
    "linear_num_heads": 64, "head_dim": 0, "hc_mult": 4,
}  # fmt: skip
HY4 = {**GLM, "model_type": "hy_v4", "rope_interleave": None, "indexer_rope_interleave": None, "index_n_heads": 16,
       "learnable_sink_init": 0.0, "hc_mult": 4}  # fmt: skip


def test_config_of_v3_and_kimi():
    layer = LatentAttention.from_config(V3, layer=60)
    mscale = 0.1 * np.log(40) + 1
    assert (layer.hidden, layer.heads, layer.q_rank, layer.latent, layer.nope, layer.v) == (
        7168,
        128,
        1536,
        512,
        128,
        128,
    )
    assert layer.rope == Rope(64, 10000, 40, 4096, 32, 1) and np.isclose(layer.scale, 192**-0.5 * mscale**2)
    assert not (layer.sparse or layer.sinks or layer.gated or layer.halves)
    kimi = LatentAttention.from_config(KIMI, layer=0)
    assert kimi.heads == 64 and kimi.rope == Rope(64, 10000, 32, 4096, 1, 1)
    halves = LatentAttention.from_config(V3 | {"rope_interleave": False, "q_lora_rank": None}, layer=0)
    assert halves.halves and halves.q_rank == 0


def test_config_of_layers_that_choose():
    v32 = LatentAttention.from_config(V32, layer=0)
    assert v32.indexer == Indexer(7168, 1536, 64, 128, 2048, latent=7168, layer_norm=True)
    assert (v32.halves, v32.index_halves, v32.index_rope_first) == (False, True, True)
    glm = LatentAttention.from_config(GLM, layer=77)
    assert (glm.halves, glm.index_halves, glm.index_rope_first) == (False, False, True)
    assert glm.rope == Rope(64, 1e6) and glm.scale == 1 / 16 and glm.eps == glm.indexer.eps == 1e-6
    shared = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    chooses = [LatentAttention.from_config(GLM | shared, layer=i).indexer is not None for i in range(12)]
    assert chooses == [True] * 3 + [False] * 3 + [True] + [False] * 3 + [True, False]
    pattern = GLM | {"index_topk_pattern": "FS" * 39}
    assert [LatentAttention.from_config(pattern, layer=i).indexer is None for i in (0, 1)] == [False, True]
    hy4 = [LatentAttention.from_config(HY4, layer=i) for i in range(3)]
    assert [x.indexer is not None for x in hy4] == [True, True, False] and all(x.sparse and x.sinks for x in hy4)
    assert hy4[0].halves and hy4[0].index_halves and not hy4[0].index_rope_first and hy4[0].indexer.eps == 1e-5


def test_config_of_glm_flash():
    layer = LatentAttention.from_config({"model_type": "glm5_next", "text_config": FLASH}, layer=7)
    assert layer.rope is None and layer.turned == 0 and layer.scale is None and layer.eps == 1e-5
    assert (layer.indexer.pool, layer.indexer.topk, layer.indexer.eps) == (4, 2048, 1e-6)
    with pytest.raises(ValueError, match="layer_types: got linear_attention, wanted indexed_attention or full_att"):
        LatentAttention.from_config(FLASH, layer=0)
    for entries, words in (
        ({"index_kpool": None}, "index_kpool: got none, wanted it in the config"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail: got False, wanted True"),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim: got 64, wanted 0"),
    ):
        with pytest.raises(ValueError, match=words):
            LatentAttention.from_config(FLASH | entries, layer=3)


YARN = V3["rope_scaling"]


@pytest.mark.parametrize(
    ("config", "layer", "words"),
    [
        (V3 | {"model_type": "llama"}, 0, "model_type: got llama, wanted deepseek_v3, .*layers.from_config for V4"),
        (V3 | {"sliding_window": 128}, 0, "sliding_window: got 128, wanted no entries that are not known"),
        (V3 | INDEX, 0, "index_n_heads, index_head_dim, index_topk: got 64, 128, 2048, wanted no entries"),
        (V32 | {"index_kpool": 4}, 0, "index_kpool: got 4, wanted no entries that are not known"),
        (V32 | {"indexer_types": ["full"] * 61}, 0, "indexer_types: got .*, wanted no entries that are not known"),
        (V3 | {"attention_bias": True}, 0, "attention_bias: got True, wanted False"),
        (V3 | {"num_key_value_heads": 8}, 0, "num_key_value_heads: got 8, wanted 128"),
        (V3 | {"qk_head_dim": 128}, 0, "qk_head_dim: got 128, wanted 192"),
        (V3 | {"kv_lora_rank": None}, 0, "kv_lora_rank: got none, wanted it in the config"),
        (
            V3 | {"layer_types": ["sliding_attention"] * 61},
            0,
            "layer_types: got sliding_attention, wanted full_attention",
        ),
        (V32 | {"q_lora_rank": None}, 0, "q_lora_rank: got none, wanted it in the config"),
        (V32 | {"rope_interleave": False}, 0, "rope_interleave: got False, wanted True of deepseek_v32"),
        (GLM | {"indexer_rope_interleave": False}, 0, "indexer_rope_interleave: got False, wanted True"),
        (GLM | {"indexer_types": ["shared"] * 78}, 0, "indexer_types: got .*, wanted full or shared for each of 78"),
        (V3 | {"rope_scaling": YARN | {"mscale_all_dim": 0.5}}, 0, "mscale: got 1.0, wanted 0.5, as mscale_all_dim"),
        (V3 | {"rope_scaling": YARN | {"type": "linear"}}, 0, "rope_type: got linear, wanted default or yarn"),
        (V3 | {"rope_scaling": YARN | {"short": 1}}, 0, "rope_scaling: got short, wanted only"),
        (
            V3 | {"rope_scaling": {"type": "yarn", "factor": 2}},
            0,
            "rope_parameters: got .*, wanted original_max_pos.* with yarn",
        ),
        (V3 | {"rope_parameters": {"rope_theta": 5.0}}, 0, "rope_theta: got 10000, wanted one number"),
        (
            V3 | {"rope_scaling": {"type": "default", "factor": 2}},
            0,
            "factor: got 2, wanted none with rope_type default",
        ),
        (V3 | {"layer_types": ["full_attention"]}, 0, "layer_types: got 1, wanted one for each of 61 layers"),
        (KIMI | {"kv_lora_rank": 256}, 0, "kv_lora_rank: got 256, wanted 512, as in text_config"),
        (V3 | {"model_type": ["deepseek_v3"]}, 0, r"model_type: got \['deepseek_v3'\], wanted deepseek_v3"),
        (HY4 | {"rms_norm_eps": -1}, 0, "rms_norm_eps: .*eps: got -1, wanted a finite number >= 0"),
        (V3, 61, "layer: got 61, wanted a layer of the 61"),
        (V3, -1, "layer: got -1, wanted an int >= 0"),
    ],
)
def test_configs_that_are_refused(config, layer, words):
    with pytest.raises(ValueError, match=f"^from_config: {words}"):
        LatentAttention.from_config(config, layer=layer)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (V3 | {"rope_interleave": "False"}, "rope_interleave: got False, wanted a bool"),
        (V3 | {"rope_interleave": 0}, "rope_interleave: got 0, wanted a bool"),
        (GLM | {"indexer_rope_interleave": "true"}, "indexer_rope_interleave: got true, wanted a bool"),
        (FLASH | {"index_kpool_always_select_tail": "no"}, "index_kpool_always_select_tail: got no, wanted a bool"),
        (V3 | {"layer_types": 61}, "layer_types: got 61, wanted a list"),
        (FLASH | {"layer_types": {}}, "layer_types: got {}, wanted a list"),
        (GLM | {"index_topk_pattern": 4}, "index_topk_pattern: got 4, wanted a list"),
        (
            V3 | {"rope_scaling": YARN | {"mscale": "1", "mscale_all_dim": "1"}},
            "mscale_all_dim: got 1, wanted a number",
        ),
    ],
)
def test_entries_of_another_type_are_refused(config, words):
    with pytest.raises(TypeError, match=f"^from_config: {words}"):
        LatentAttention.from_config(config, layer=3)


# ---- errors

P, CACHE = params_of("sparse"), SPARSE.cache(2, 16, X.dtype)
OWN = {k: x for k, x in P.items() if k != "indexer"}
ERRORS = [
    (lambda: LatentAttention(**SIZES | {"latent": 0}), ValueError, "latent: got 0, wanted an int >= 1"),
    (lambda: LatentAttention(**SIZES, scale=-1.0), ValueError, "scale: got -1.0"),
    (lambda: LatentAttention(**SIZES, sinks=1), TypeError, "sinks: got 1, wanted a bool"),
    (lambda: LatentAttention(**SIZES | {"rope": 8}), TypeError, "rope: got 8, wanted a Rope"),
    (lambda: dataclasses.replace(SPARSE, sparse=False), ValueError, "sparse: got False, wanted True with an indexer"),
    (lambda: dataclasses.replace(SPARSE, q_rank=8), ValueError, "indexer.q_rank: got 16, wanted 8"),
    (lambda: dataclasses.replace(SPARSE, rope=Rope(32)), ValueError, "indexer.d: got 16, wanted at least the 32 dims"),
    (lambda: SPARSE(OWN, X), ValueError, "params: got no indexer, wanted what `init` makes"),
    (lambda: dataclasses.replace(POOLED, rope=Rope(8)), ValueError, "indexer.pool: got 3, wanted 0 with RoPE"),
    (lambda: POOLED(params_of("pooled"), X, segment_ids=jnp.zeros((2, S), jnp.int32)), ValueError,
     "segment_ids: got .*, wanted None where index keys are pooled"),
    (lambda: SPARSE(P, X[..., :8]), ValueError, r"x: got float32\[2, 14, 8\], wanted"),
    (lambda: SPARSE(P, X, start=3), ValueError, "start: got 3, wanted 0, and no lengths, without a cache"),
    (lambda: SPARSE(P, X, CACHE, segment_ids=X), ValueError, "segment_ids: got .* wanted None with a cache"),
    (lambda: SPARSE(P, X, CACHE, start=3), ValueError, "lengths: got 17 tokens, wanted at most the 16 tokens"),
    (lambda: SPARSE.step(P, X, CACHE, lengths=17), ValueError, "lengths: got 17 tokens, wanted at most the 16 tokens"),
    (lambda: SPARSE.step(P, X, None, lengths=1), TypeError, "cache: got None, wanted a LayerCache"),
    (lambda: SPARSE(P, X, CACHE.window), TypeError, "cache: got a Cache, wanted a LayerCache or None"),
    (lambda: SPARSE(P, X, LayerCache(CACHE.window)), TypeError, "cache.keys: got None, wanted a Cache"),
    (lambda: DENSE(params_of("dense"), X, CACHE), TypeError, "cache.keys: got a Cache, wanted None in such a layer"),
    (lambda: SPARSE(P, X[:1], CACHE), ValueError, r"cache.window.entries: got float32\[2, 16, 32\], wanted"),
    (lambda: DENSE(params_of("dense"), X, indices=jnp.zeros((2, S, 1), jnp.int32)), ValueError,
     "indices: got .*, wanted None in a layer that sees all keys"),
    (lambda: dataclasses.replace(SPARSE, indexer=None)(OWN, X), TypeError, "shared.indices: got None, wanted int32"),
    (lambda: SPARSE.cache(2, 16, FP8), ValueError,
     "dtype: got float8_e4m3fn for latents of 24 and 8 for RoPE, wanted it for 512 and 64, or 512 alone"),
    (lambda: SPARSE.cache(2, 16, jnp.int8), ValueError, "dtype: got int8, wanted bfloat16 or .* or float8_e4m3fn"),
    (lambda: SPARSE.cache(2, 16, keys=FP8), ValueError, "keys: got float8_e4m3fn, wanted an indexer with d=128 for it"),
    (lambda: SPARSE.cache(2, 16, keys=jnp.float32), ValueError, "keys: got float32, wanted None, bfloat16 or float8"),
    (lambda: PACKED["dense"].step(of_packed("dense")[1], jnp.ones((2, 1, 64)), PACKED["dense"].cache(2, 16, FP8),
                                  lengths=1),
     ValueError, r"x: got float32\[2, 1, 64\], wanted bfloat16, with a packed cache.window"),
    (lambda: SPARSE.cache(2, 16, pages=4), ValueError, "pages: got 4, wanted None without a block_table"),
    (lambda: SPARSE.cache(2, 16, block_table=np.full((2, 2), 4, np.int32)), ValueError, "block_table: got page 4"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "words"), ERRORS, ids=map(str, range(len(ERRORS))))
def test_errors(call, kind, words):
    with pytest.raises(kind, match=f"LatentAttention: {words}"):
        call()


def test_errors_of_tensors():
    with pytest.raises(TypeError, match="from_state_dict: layer: got 1, wanted a DSV4Attention or a LatentAttention"):
        from_state_dict(1, {})
    tensors = to_state_dict(SPARSE, P, "a.")
    with pytest.raises(ValueError, match=r"wanted b\.kv_a_proj_with_mqa\.weight; prefixes of layers there are 'a\.'"):
        from_state_dict(SPARSE, tensors, "b.")
    with pytest.raises(ValueError, match=r"a.sinks: got none, wanted floats\[4\] for sink"):
        from_state_dict(SPARSE, {name: x for name, x in tensors.items() if name != "a.sinks"}, "a.")
    with pytest.raises(ValueError, match=r"got q_bias under 'a.', wanted a layer's alone"):
        from_state_dict(SPARSE, tensors | {"a.q_bias": X}, "a.")
