"""Layers, their parts and their weights: whatever is wrong raises a clear error before anything is computed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Pspec

from jax_dsv4_fmha import Cache, pack_matrix
from jax_dsv4_fmha.layers import (
    Compressor,
    Indexer,
    LayerCache,
    Rope,
    RunningSums,
    Shared,
    from_config,
    from_state_dict,
    hadamard,
    inverse_rope,
    rope,
    step_product,
    unzigzag,
    zigzag,
)
from jax_dsv4_fmha.layers.documents import packed_blocks
from tests.test_layers import MODELS, checkpoint, hidden, model, stack

LAYERS, PARAMS = model("v4")
LAYER, P = LAYERS[1], PARAMS[1]  # with an indexer
OF_V41, P_V41 = model("v4.1")
COMPRESSOR, INDEXER = LAYER.compressor, LAYER.indexer
PC, PI = P["compressor"], P["indexer"]
X, LOW_RANK, START = hidden(2, 8), jnp.zeros((2, 8, 12)), jnp.zeros(2, jnp.int32)
AT = jnp.arange(8, dtype=jnp.int32)[None]
STATE, CACHE = COMPRESSOR.state(2, 2), LAYER.cache(2, 16, jnp.float32)
TABLE = np.arange(4, dtype=np.int32).reshape(2, 2)
OF_WINDOW = LAYERS[0].cache(2, 16, jnp.float32)
ONE = pack_matrix(jnp.ones((128, 128), jnp.float8_e4m3fn), jnp.ones((1, 1)))
SEVERAL = pack_matrix(jnp.ones((2, 128, 128), jnp.float8_e4m3fn), jnp.ones((2, 1, 1)))


WIDE = from_config(MODELS["v4"] | {"head_dim": 512, "index_head_dim": 128})[1]  # whose caches may be packed
WIDE_P = jax.tree.map(lambda x: jnp.zeros(x.shape), jax.eval_shape(WIDE.init, jax.random.key(0)))


def extend(x=X, state=STATE, start=START, lengths=START + 8, of=COMPRESSOR, p=PC):
    return of.extend(p, x, state, start, lengths)


def queries(p=PI, x=X, low_rank=LOW_RANK, positions=AT, rotation=LAYER.rope):
    return INDEXER.queries(p, x, low_rank, positions, rotation)


def without(params, name):
    return {key: x for key, x in params.items() if key != name}


def changed(**sizes):
    return dataclasses.replace(LAYER, **sizes)


class Foreign:
    """An array of another library, with a shape and a dtype."""

    shape, dtype = (2, 8, 24), "torch.float32"


# a call, and what its error says
SIZES = [
    (lambda: Compressor(0, 4, 4), r"Compressor: hidden: got 0, wanted an int >= 1"),
    (lambda: Compressor(24, 4, 2.5), r"Compressor: ratio: got 2.5, wanted an int >= 1"),
    (lambda: Compressor(24, 4, 1, overlap=True), r"Compressor: overlap: got True, wanted False with ratio 1"),
    (lambda: Compressor(24, 4, 4, eps="small"), r"Compressor: eps: got small, wanted a finite number >= 0"),
    (lambda: COMPRESSOR.state(2, 0), r"Compressor: steps: got 0, wanted an int >= 1"),
    (lambda: Indexer(24, 12, heads=0), r"Indexer: heads: got 0, wanted an int >= 1"),
    (lambda: Indexer(24, 12, topk=1.5), r"Indexer: topk: got 1.5, wanted an int >= 1"),
    (lambda: Indexer(24, 12, latent=-1), r"Indexer: latent: got -1, wanted an int >= 0"),
    (lambda: Indexer(24, 12, compressor=3), r"Indexer: compressor: got 3, wanted a Compressor or None"),
    (lambda: Indexer(24, 12, d=24, compressor=Compressor(24, 24, 4)), r"Indexer: d: got 24, wanted a power of two"),
    (lambda: Indexer(24, 12, d=16, compressor=Compressor(24, 32, 4)), r"compressor: got hidden=24, d=32 .*d=16 with"),
    (lambda: Rope("8"), r"Rope: dims: got 8, wanted an int >= 1"),
    (lambda: Rope(8, 1), r"Rope: theta: got 1, wanted a finite number > 1"),
    (lambda: Rope(8, factor=0.5), r"Rope: factor: got 0.5, wanted a finite number >= 1"),
    (lambda: Rope(8, original="4096"), r"Rope: original: got 4096, wanted an int >= 0.*; '4096' is a str"),
    (lambda: Rope(8, beta_fast=None), r"Rope: beta_fast: got None, wanted a finite number > 0"),
    (lambda: Rope(8, factor=4), r"Rope: original: got 0, wanted an int >= 1"),
    (lambda: Rope(8, factor=4, original=64, beta_slow=0), r"Rope: beta_slow: got 0, wanted a finite number > 0"),
    (lambda: changed(heads=0), r"DSV4Attention: heads: got 0, wanted an int >= 1"),
    (lambda: changed(o_groups=0), r"DSV4Attention: o_groups: got 0, wanted an int >= 1"),
    (lambda: changed(window=None), r"DSV4Attention: window: got None, wanted an int >= 1"),
    (lambda: changed(ratio=-1), r"DSV4Attention: ratio: got -1, wanted an int >= 0"),
    (lambda: changed(rope=None), r"DSV4Attention: rope: got None, wanted a Rope"),
    (lambda: changed(rope=Rope(64)), r"DSV4Attention: rope: got 64 dims, wanted at most d=16"),
    (lambda: changed(ratio=8), r"DSV4Attention: compressor: got hidden=24, d=16, ratio=4, wanted .*, ratio=8"),
    (lambda: changed(compressor=None), r"compressor: got None, wanted one with an indexer that makes keys"),
    (lambda: changed(sparse=False), r"DSV4Attention: sparse: got False, wanted True with an indexer"),
    (lambda: changed(indexer=dataclasses.replace(INDEXER, q_rank=13)), r"indexer.q_rank: got 13, wanted 12"),
    (lambda: changed(ratio=0, compressor=None, indexer=None), r"sparse: got True, wanted False with ratio 0"),
    (lambda: LAYER.cache(2, "8"), r"DSV4Attention: max_length: got 8, wanted an int >= 1"),
    (lambda: LAYER.cache(2, 8, steps=0), r"DSV4Attention: steps: got 0, wanted an int >= 1"),
    (lambda: LAYER.cache(2, 8, "fp8"), r"DSV4Attention: dtype: got fp8, wanted bfloat16"),
    (lambda: LAYER.cache(2, 8, block_table=[[0]]), r"block_table: got \[\[0\]\], wanted int32\[b=2, n\]"),
    (lambda: LAYER.cache(2, 8, block_table=jnp.zeros((3, 1), jnp.int32)), r"block_table: got int32\[3, 1\], wanted"),
    (lambda: LAYER.cache(2, 8, pages=3), r"DSV4Attention: pages: got 3, wanted None without a block_table"),
    (lambda: LAYER.cache(2, 8, page_tokens=8), r"page_tokens: got 8, wanted None without a block_table"),
    (lambda: LAYER.cache(2, 8, block_table=TABLE, pages=0), r"pages: got 0, wanted an int >= 1"),
    (lambda: LAYER.cache(2, 8, block_table=TABLE, page_tokens=6), r"page_tokens: got 6, wanted a multiple of the r"),
    (lambda: LAYER.cache(2, 18, block_table=TABLE, page_tokens=8),
     r"block_table: got 2 pages of 8 tokens for a sequence, wanted enough for max_length=18"),
    (lambda: LAYER.cache(2, 8, block_table=TABLE, pages=3), r"block_table: got page 3, wanted pages below the pool"),
    (lambda: LAYER.cache(2, 8, block_table=TABLE).with_block_table(TABLE[:, :1]),
     r"with_block_table: block_table: got int32\[2, 1\], wanted int32\[b=2, n=2\]"),
    (lambda: LAYER.cache(2, 8, block_table=TABLE).with_block_table(TABLE + 1),
     r"with_block_table: block_table: got page 4, wanted pages below the pool's 4"),
    (lambda: changed(sparse=1), r"DSV4Attention: sparse: got 1, wanted a bool"),
    (lambda: changed(norm_heads="no"), r"DSV4Attention: norm_heads: got no, wanted a bool.*; 'no' is a str"),
    (lambda: Compressor(24, 4, 4, overlap=None), r"Compressor: overlap: got None, wanted a bool"),
    (lambda: dataclasses.replace(INDEXER, within_candidates=2), r"Indexer: within_candidates: got 2, wanted a bool"),
    (lambda: CACHE.fork(5, 0), r"fork: source: got 5, wanted an int, or an int32 scalar, of 0 to 1"),
    (lambda: CACHE.fork(0, 7), r"fork: target: got 7, wanted"),
    (lambda: CACHE.fork(-1, 0), r"fork: source: got -1, wanted"),
    (lambda: CACHE.fork(0, np.int64(2)), r"fork: target: got 2, wanted"),
    (lambda: CACHE.fork(1.0, 0), r"fork: source: got 1.0, wanted"),
    (lambda: CACHE.fork(True, 0), r"fork: source: got True, wanted"),
    (lambda: CACHE.fork("1", 0), r"fork: source: got 1, wanted .*; '1' is a str"),
    (lambda: CACHE.fork(0, START), r"fork: target: got int32\[2\], wanted"),
    (lambda: CACHE.fork(0, START[0] * 1.0), r"fork: target: got float32\[\], wanted"),
]  # fmt: skip
OPERANDS = [
    (lambda: COMPRESSOR(PC, None), r"Compressor: x: got None, wanted bfloat16 or float16 or float32\[b, s, 24\]"),
    (lambda: COMPRESSOR(PC, Foreign()), r"Compressor: x: got torch.float32\[2, 8, 24\], wanted"),
    (lambda: COMPRESSOR(PC, X.astype(jnp.int32)), r"Compressor: x: got int32\[2, 8, 24\], wanted"),
    (lambda: jax.vmap(lambda x: COMPRESSOR(PC, x))(X), r"Compressor: x: got float32\[8, 24\], wanted"),
    (lambda: COMPRESSOR(None, X), r"Compressor: params: got None, wanted a dict of ape, norm, w, as `init` makes it"),
    (lambda: COMPRESSOR(without(PC, "ape"), X), r"Compressor: params: got no ape, wanted what `init` makes"),
    (lambda: COMPRESSOR(PC | {"bias": X}, X), r"Compressor: params: got bias too, wanted what `init` makes"),
    (lambda: COMPRESSOR(without(PC, "w") | {"wkv": X}, X), r"params: got no w and wkv too, wanted what `init` makes"),
    (lambda: COMPRESSOR(PC | {"ape": PC["ape"][:1]}, X), r"params.ape: got float32\[1, 32\], wanted floats\[4, 32\]"),
    (lambda: COMPRESSOR(PC | {"norm": PC["norm"][:1]}, X), r"params.norm: got float32\[1\], wanted floats\[16\]"),
    (lambda: COMPRESSOR(PC | {"w": PC["w"].astype(jnp.int8)}, X), r"params.w: got int8\[24, 64\], wanted floats"),
    (lambda: COMPRESSOR(PC | {"w": [1]}, X), r"Compressor: params.w: got \[1\], wanted floats\[24, 64\]"),
    (lambda: COMPRESSOR(PC, X, zigzag=3), r"Compressor: zigzag: got 3, wanted of 8 tokens 6 chunks of whole blocks"),
    (lambda: LAYER(P, X, zigzag=0), r"DSV4Attention: zigzag: got 0, wanted an int >= 1"),
    (lambda: LAYER(P, X, zigzag=2), r"zigzag: got 2, wanted of 8 tokens 4 chunks of whole blocks, of 4 tokens"),
    (lambda: LAYER(P, X, CACHE, zigzag=1), r"DSV4Attention: zigzag: got 1, wanted None with a cache"),
    (lambda: zigzag(X, 3), r"zigzag: x: got float32\[2, 8, 24\], wanted a multiple of 6 on axis 1"),
    (lambda: zigzag(X, 2, axis=None), "zigzag: axis: got None, wanted an axis of float32"),
    (lambda: unzigzag(X, 1.5), r"unzigzag: devices: got 1.5, wanted an int >= 1"),
    (lambda: zigzag(X[0, :, 0], 2), r"zigzag: axis: got 1, wanted an axis of float32\[8\]"),
    (lambda: unzigzag(X, 2, axis=-4), r"unzigzag: axis: got -4, wanted an axis of float32\[2, 8, 24\]"),
    (lambda: zigzag(X, 2, axis=1.0), r"zigzag: axis: got 1.0, wanted an axis"),
    (lambda: COMPRESSOR(PC, X, AT), r"Compressor: packed: got int32\[1, 8\], wanted what `packed_blocks` finds, or N"),
    (lambda: COMPRESSOR(PC, X, packed_blocks(AT, 4)), r"packed.place: got int32\[1, 8\], wanted int32\[2, 8\]"),
    (lambda: COMPRESSOR.tokens(PC, X, AT[0]), r"Compressor: positions: got int32\[8\], wanted int32\[b=2 or 1, s=8\]"),
    (lambda: extend(x=X[:, :0]), r"Compressor: x: got float32\[2, 0, 24\], wanted .*, each >= 1"),
    (lambda: extend(start=0), r"Compressor: start: got 0, wanted int32\[b=2\]"),
    (lambda: extend(lengths=START[:1]), r"Compressor: lengths: got int32\[1\], wanted int32\[b=2\]"),
    (lambda: extend(state=None), r"Compressor: state: got None, wanted what `Compressor"),
    (lambda: extend(state=Cache.zeros(2, 3, 64, jnp.float32)), r"state: got room for 3 tokens, wanted 8 at least"),
    (lambda: extend(state=COMPRESSOR.state(3)), r"Compressor: state.entries: got float32\[3, .*wanted float32\[b=2"),
    (lambda: extend(of=OF_V41[3].compressor, p=P_V41[3]["compressor"]), r"state: got a Cache, wanted None with rat"),
    (lambda: queries(p={}), r"Indexer: params: got no compressor, weights_proj, wq_b, wanted what `init` makes"),
    (lambda: queries(p=PI | {"weights_proj": PI["weights_proj"][:, :4]}), r"params.weights_proj: .*floats\[24, 8\]"),
    (lambda: queries(p=PI | {"compressor": PC | {"w": X}}), r"Indexer: params.compressor.w: got float32\[2, 8, 24\]"),
    (lambda: queries(x=X[0]), r"Indexer: x: got float32\[8, 24\], wanted"),
    (lambda: queries(low_rank=jnp.zeros((1, 8, 12))), r"low_rank: got float32\[1, 8, 12\], wanted .*\[b=2, s=8, 12\]"),
    (lambda: queries(rotation=64), r"rope: rotation: got 64, wanted a Rope"),
    (lambda: INDEXER.keys(PI, X, AT, LAYER.rope), r"Indexer: latents: got float32\[2, 8, 24\], wanted .*\[b, s, 16\]"),
    (lambda: hadamard(3.0), r"hadamard: x: got 3.0, wanted .*\[..., d\], d a power of two"),
    (lambda: hadamard(jnp.zeros((3, 0))), r"hadamard: x: got float32\[3, 0\], wanted"),
    (lambda: hadamard(jnp.zeros(8, jnp.int32)), r"hadamard: x: got int32\[8\], wanted"),
    (lambda: step_product(X, jnp.zeros((2, 24, 8))), r"step_product: w: got float32\[2, 24, 8\], wanted .*\[k, n\]"),
    (lambda: step_product(X[0], jnp.zeros((24, 8))), r"step_product: x: got float32\[8, 24\], wanted .*\[b, s, 24\]"),
    (lambda: step_product(X, jnp.zeros((8, 24))), r"step_product: x: got float32\[2, 8, 24\], wanted .*\[b, s, 8\]"),
    (lambda: step_product(X, jnp.zeros((24, 8)), dtype="bfloat16"), r"dtype: got bfloat16, wanted float32"),
    (lambda: step_product(X, jnp.zeros((24, 8)), dtype="wide"), r"dtype: got wide, wanted float32"),
    (lambda: step_product(X, dataclasses.replace(ONE, data=ONE.data[:1])), r"w.data: got uint8\[1, 2, 4112\], wanted"),
    (lambda: step_product(X, SEVERAL), r"step_product: w: got 2 packed matrices, wanted one"),
    (lambda: rope(X, jnp.zeros((3, 8), jnp.int32), Rope(8)), r"rope: positions: got int32\[3, 8\], wanted int32\[b=2"),
    (lambda: inverse_rope(X, AT, None), r"inverse_rope: rotation: got None, wanted a Rope"),
    (lambda: COMPRESSOR(PC, X, whole="no"), r"Compressor: whole: got no, wanted a bool"),
    (lambda: RunningSums.zeros(2, 1.5, 8), r"RunningSums: steps: got 1.5, wanted an int >= 1"),
    (lambda: RunningSums.zeros(True, 1, 8), r"RunningSums: b: got True, wanted an int >= 1"),
]  # fmt: skip
LAYER_CALLS = [
    (lambda: LAYER(None, X), r"params: got None, wanted a dict of compressor, indexer, kv_norm"),
    (lambda: LAYER(PARAMS[0], X), r"params: got no compressor, indexer, wanted what `init` makes"),
    (lambda: LAYERS[0](P, X), r"params: got compressor, indexer too, wanted what `init` makes"),
    (lambda: LAYER(P | {"wq_b": P["wq_b"][:, :2]}, X), r"params.wq_b: got float32\[12, 2, 16\], wanted floats\[12, 4"),
    (lambda: LAYER(P | {"wq_a": P["wq_a"].T}, X), r"params.wq_a: got float32\[12, 24\], wanted .*; it is \[out, in\]"),
    (lambda: LAYER(P | {"wq_b": P["wq_b"].reshape(12, 64).T}, X), r"params.wq_b: .*\[64, 12\], .*from_state_dict"),
    (lambda: LAYER(P | {"q_norm": P["q_norm"][:1]}, X), r"params.q_norm: got float32\[1\], wanted floats\[12\]"),
    (lambda: LAYER(P | {"compressor": {}}, X), r"params.compressor: got no ape, norm, w, wanted what `init` makes"),
    (lambda: LAYER(P, X, OF_WINDOW), r"cache.compressed: got None, wanted a Cache"),
    (lambda: LAYERS[0](PARAMS[0], X, CACHE), r"cache.compressed: got a Cache, wanted None in such a layer"),
    (lambda: LAYER.step(P, X, CACHE._replace(tokens=None), lengths=8), r"cache.tokens: got None, wanted what `Compr"),
    (lambda: LAYER(P, X, LayerCache(*[c.entries for c in CACHE])), r"cache.window: got float32.*, wanted a Cache"),
    (lambda: LAYER(P, X, LAYER.cache(2, 16)), r"cache.window.entries: got bfloat16.*, wanted float32\[b=2, page, d=16"),
    (lambda: WIDE(WIDE_P, X, WIDE.cache(2, 16, jnp.float8_e4m3fn)),
     r"x: got float32\[2, 8, 24\], wanted bfloat16, with a cache in the layout v4_fp8"),
    (lambda: WIDE.step(WIDE_P, X.astype(jnp.float16), WIDE.cache(2, 16, jnp.float4_e2m1fn, steps=8), lengths=8),
     r"x: got float16\[2, 8, 24\], wanted bfloat16, with a cache in the layout v4_fp8"),
    (lambda: LAYER(P, X, LAYER.cache(3, 16, jnp.float32)), r"cache.window.entries: got float32\[3, .*\[b=2, page, d"),
    (lambda: LAYER.step(P, X[:, :1], None, lengths=1), r"cache: got None, wanted a LayerCache"),
    (lambda: LAYER.step(P, X[:, :1], CACHE, lengths=1, start=START[:1]), r"start: got int32\[1\], wanted int32\[b=2\]"),
    (lambda: LAYER.step(P, X[:, :1], CACHE, lengths=1, is_causal=False),
     r"x: got float32\[2, 1, 24\], wanted at most 0 tokens, with is_causal=False fewer than the cache's steps"),
    (lambda: LAYERS[0].step(PARAMS[0], X, OF_WINDOW, lengths=8),
     r"x: got float32\[2, 8, 24\], wanted at most \d tokens, the cache's steps"),
    (lambda: LAYER.step(P, X[:, :1], CACHE, lengths=1, is_causal=0), r"is_causal: got 0, wanted a bool"),
    (lambda: LAYER(P, X, start=False), r"start: got False, wanted 0, and no lengths, without a cache"),
    (lambda: LAYER.step(P, X[:, :1], CACHE, lengths=20),
     r"lengths: got 20 tokens, wanted a sequence whose entries of 4 tokens are at most the 4 that the cache has room"),
    (lambda: LAYER.step(P, X[:, :1], CACHE, lengths=np.array([3, 20], np.int32)), r"lengths: got 20 tokens, wanted a"),
    (lambda: LAYER(P, X, CACHE, start=12), r"start: got 20 tokens, wanted a sequence whose entries of 4 tokens are at"),
    (lambda: LAYER(P, X, CACHE, start=START, lengths=np.full(2, 20, np.int32)), r"lengths: got 20 tokens, wanted a se"),
    (lambda: LAYER(P, X, shared=X), r"shared: got float32\[2, 8, 24\], wanted a Shared or None"),
    (lambda: OF_V41[4](P_V41[4], X), r"shared.compressed: got None, wanted .*\[b=2, s=8, 32\]"),
    (lambda: OF_V41[4](P_V41[4], X, shared=Shared(jnp.zeros((2, 8, 32)))), r"shared.indices: got None, wanted int32"),
    (lambda: OF_V41[2](P_V41[2], X, shared=Shared(jnp.zeros((2, 3, 32)))), r"shared.compressed: .*wanted .*\[b=2, s=4"),
    (lambda: OF_V41[4](P_V41[4], X, shared=Shared(jnp.zeros((2, 8, 32), jnp.bfloat16))),
     r"shared.compressed: got bfloat16\[2, 8, 32\], wanted float32\[b=2, s=8, 32\]"),
    (lambda: OF_V41[5](P_V41[5], X, shared=Shared(jnp.zeros((2, 8, 32)))), r"shared.keys: got None, wanted"),
    (lambda: OF_V41[5](P_V41[5], X, shared=Shared(*[jnp.zeros((2, 8, 32))] * 2)), r"shared.blocks: got None, wanted"),
    (lambda: OF_V41[4].step(P_V41[4], X, OF_V41[4].cache(2, 9, jnp.float32), lengths=8),
     r"shared.compressed: got None, wanted a Cache, as an earlier layer returned it"),
]  # fmt: skip


@pytest.mark.parametrize("call, message", SIZES + OPERANDS + [(f, f"DSV4Attention: {m}") for f, m in LAYER_CALLS])
def test_error(call, message):
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        jax.eval_shape(lambda: (call(), None)[1])
    assert type(raised.value) in (ValueError, TypeError)


def test_a_fork_by_numbers_that_are_known_when_it_runs():
    """Nothing is copied from a sequence that the batch does not have, and nothing to one."""
    cache = OF_WINDOW._replace(window=Cache(OF_WINDOW.window.entries.at[1].set(1.0)))
    fork = jax.jit(lambda cache, source, target: cache.fork(source, target).window.entries[:, 0, 0])
    forks = {(0, 1): [0, 0], (1, 0): [1, 1], (5, 0): [0, 1], (-1, 0): [0, 1], (0, -1): [0, 1], (0, 7): [0, 1]}
    assert {at: fork(cache, *at).tolist() for at in forks} == forks


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_shorter_than_an_entry(name):
    """There are no entries then, and nothing to choose: no error, whole and as the first chunk."""
    caches = [layer.cache(2, 8, jnp.float32) for layer in model(name)[0]]
    whole = stack(name, lambda layer, p, x, shared, _: layer(p, x, shared=shared))
    chunk = stack(name, lambda layer, p, x, shared, cache: layer(p, x, cache, shared))
    for y in (jax.eval_shape(whole, X[:, :1])[0], jax.eval_shape(chunk, X[:, :1], caches)[0]):
        assert y.shape == (2, 1, 24)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_hidden_layers": "3"}, r"num_hidden_layers: got 3, wanted an int >= 1"),
        ({"hidden_size": 24.0}, r"hidden: got 24.0, wanted an int >= 1"),
        ({"sliding_window": 0}, r"window: got 0, wanted an int >= 1"),
        ({"layer_types": 3}, r"from_config: layer_types: got 3, wanted a list"),
        ({"compress_rates": [4]}, r"from_config: compress_rates: got \[4\], wanted a mapping"),
        ({"text_config": 3}, r"from_config: text_config: got 3, wanted a mapping"),
        ({"rope_scaling": 3}, r"from_config: rope_scaling: got 3, wanted a mapping"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4}},
            r"rope_scaling: .*wanted original_max_position_embeddings wit",
        ),
        ({"rope_theta": "10000"}, r"Rope: theta: got 10000, wanted a finite number > 1"),
        (
            {"kv_source_layer_ids": 1, "compress_ratios": [2] * 3, "layer_types": None},
            r"kv_source_layer_ids: got 1, wanted a list",
        ),
        ({"compress_ratios": [0, 4, 128]}, r"compress_ratios: got 128, wanted 8 in layer 2, a heavily_compressed_att"),
    ],
)
def test_config_error(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        from_config(MODELS["v4"] | changes)


@functools.cache
def good():
    return checkpoint(LAYER, P, "a.")


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("wkv.weight", np.transpose, r"got float32\[24, 16\], wanted floats\[16, 24\] for wkv; .* transposed"),
        ("wo_a.weight", np.ravel, r"got float32\[384\], wanted floats\[12, 32\] for wo_a"),
        ("wo_b.weight", np.transpose, r"got float32\[12, 24\], wanted floats\[24, 12\] for wo_b"),
        ("attn_sink", lambda x: x[:3], r"got float32\[3\], wanted floats\[4\] for sink"),
        ("attn_sink", lambda _: None, r"got None, wanted floats\[4\] for sink"),
        ("compressor.ape", np.transpose, r"got float32\[32, 4\], wanted floats\[4, 32\] for compressor.ape$"),
        ("compressor.wgate.weight", lambda x: x[:1], r"got float32\[1, 24\], wanted floats\[32, 24\] for compressor.w"),
        ("indexer.wq_b.weight", lambda x: x.tolist(), r"got list .*, wanted floats\[128, 12\] for indexer.wq_b"),
        ("wq_a.weight", lambda x: x.astype(np.uint8), r"got uint8\[12, 24\], wanted floats\[12, 24\] for wq_a"),
        ("wq_b.weight", lambda x: x.astype(jnp.float8_e4m3fn), r"got float8_e4m3fn\[64, 12\], wanted wq_b.scale, its"),
    ],
)  # fmt: skip
def test_state_dict_error(name, change, message):
    with pytest.raises((ValueError, TypeError), match=rf"^from_state_dict: a\.{name}: {message}"):
        from_state_dict(LAYER, good() | {f"a.{name}": change(good()[f"a.{name}"])}, "a.")


@pytest.mark.parametrize(
    "operands, message",
    [
        ({"layer": COMPRESSOR}, r"layer: got a Compressor, wanted a DSV4Attention"),
        ({"tensors": [1]}, r"tensors: got \[1\], wanted a mapping"),
        ({"prefix": None}, r"prefix: got None, wanted a str"),
        ({"dtype": "fp8"}, r"dtype: got fp8, wanted bfloat16 or float16 or float32"),
        ({"dtype": jnp.int8}, r"dtype: got int8, wanted bfloat16 or float16 or float32"),
    ],
)
def test_state_dict_operands(operands, message):
    with pytest.raises((ValueError, TypeError), match=f"^from_state_dict: {message}"):
        from_state_dict(**{"layer": LAYER, "tensors": good(), "prefix": "a."} | operands)


@pytest.mark.parametrize(
    "names", [("wq_a.weight", "layers.{}.attn."), ("q_a_proj.weight", "model.layers.{}.self_attn.")]
)
@pytest.mark.parametrize("prefix", ["", "layers.0.self_attn.", "model.layers.0.self_attn", "layers.0.attn"])
def test_state_dict_under_a_wrong_prefix(names, prefix):
    """The error names the prefixes under which there are layers."""
    name, pattern = names
    tensors = {pattern.format(i) + name: np.zeros((12, 24), np.float32) for i in range(5)} | {"head.weight": 0}
    wanted = rf"got none .*, wanted {prefix}wq_a.weight or .*; prefixes of layers there are '{pattern.format(0)}', '"
    with pytest.raises(ValueError, match=wanted + ".* or 2 others$"):
        from_state_dict(LAYER, tensors, prefix)
    with pytest.raises(ValueError, match=f"wanted {prefix}wq_a.weight or {prefix}q_a_proj.weight$"):
        from_state_dict(LAYER, {"model.layers.0.self_attn.q_proj.weight": 0}, prefix)  # another model's


def test_state_dict_of_v41_under_v4s_names():
    tensors = {"q_a_proj.weight": np.zeros((12, 24), np.float32)}
    for name in ("compressor.kv_proj.weight", "compressor.gate_proj.weight"):
        tensors[name] = np.zeros((32, 24), np.float32)
    tensors |= {"compressor.kv_norm.weight": np.zeros(32, np.float32)}
    with pytest.raises(
        ValueError, match=r"tensors: got no indexer.k_norm under these names, wanted indexer.k_norm.wei"
    ):
        from_state_dict(OF_V41[1], tensors)


def test_a_scale_that_is_left_over():
    """The matrix was multiplied by it before, in bfloat16 say."""
    scale = {"a.wq_b.scale": np.ones((1, 1), np.float32)}
    with pytest.raises(
        ValueError, match=r"a.wq_b.weight: got float32\[64, 12\], wanted no wq_b.scale, which scales e4m3"
    ):
        from_state_dict(LAYER, good() | scale, "a.")


def test_heads_over_more_devices_than_there_are_groups():
    """o_groups is named where the mesh is known; JAX names neither it nor a parameter."""
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])
    message = r"DSV4Attention: o_groups: got 2 for the 4 devices of heads, wanted a multiple of the devices that share"
    with pytest.raises(ValueError, match=message):
        LAYER.partition("heads", mesh)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        LAYER.partition("heads")
    with pytest.raises(ValueError, match=r"heads: got tensor, wanted axes of the mesh, heads"):
        LAYER.partition("tensor", mesh)
    specs = LAYER.partition("heads")
    with jax.set_mesh(mesh):
        assert LAYER.partition("another mesh's")["wo_a"] == Pspec("another mesh's")
    where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    with pytest.raises(
        ValueError, match=r"from_state_dict: shardings of wo_a: got NamedSharding.*wanted one for \[2, 2"
    ):
        from_state_dict(LAYER, good(), "a.", shardings=where)


def test_state_dict_with_scales_twice_or_without_values():
    scales = {f"a.wq_b{end}": np.ones((1, 1), np.float32) for end in (".scale", ".weight_scale_inv")}
    with pytest.raises(ValueError, match=r"tensors: got wq_b\.weight_scale_inv under 'a.', wanted a layer's alone"):
        from_state_dict(LAYER, good() | scales, "a.")
    with pytest.raises(TypeError, match=r"a.compressor.ape: got float32\[4, 32\], wanted .*, with values"):
        jax.eval_shape(lambda tensors: from_state_dict(LAYER, tensors, "a."), good())
