"""Layers of DeepSeek-V4 and V4.1: whole sequences against float64, and chunks and steps against whole sequences."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import Cache
from jax_dsv4_fmha._definitions.packed import quantize_rows
from jax_dsv4_fmha._testing import rope as rope_cases
from jax_dsv4_fmha._testing.cases import ROPE
from jax_dsv4_fmha.layers import Rope, Shared, from_config, from_state_dict, hadamard, inverse_rope, rope
from jax_dsv4_fmha.layers.rope import index_query, rope_hadamard, rope_of_normed
from tests import layers_float64
from tests.helpers import assert_in_place, collectives
from tests.test_config import MODES as MODES_OF_JAX

SMALL = {
    "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16, "qk_rope_head_dim": 8,
    "q_lora_rank": 12, "o_groups": 2, "o_lora_rank": 6, "sliding_window": 5, "index_n_heads": 8, "index_head_dim": 16,
    "index_topk": 3, "rope_theta": 10000, "compress_rope_theta": 160000, "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 64},
}  # fmt: skip
MODELS = {
    "v4": SMALL | {"layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
                   "compress_rates": {"heavily_compressed_attention": 8}},
    "v4.1": SMALL | {"num_hidden_layers": 6, "compress_ratios": [0, 2, 2, 1, 1, 1], "kv_source_layer_ids": [1, 3],
                     "index_source_layer_ids": [1, 3, 5], "candidate_source_layer_id": 3, "candidate_topk_blocks": 3,
                     "candidate_block_size": 2},
}  # fmt: skip


def random_params(layer, seed):
    """None of them is 0 or 1, which would hide a mistake."""
    rng = np.random.default_rng(seed)

    def leaf(path, x):
        noise = rng.standard_normal(x.shape)
        if "norm" in path[-1].key:
            return jnp.asarray(1 + 0.3 * noise, jnp.float32)
        fan_in = 1 if x.ndim == 1 or path[-1].key == "ape" else x.shape[0] if x.shape[0] > 8 else x.shape[1]
        return jnp.asarray(noise * fan_in**-0.5, jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, shapes(layer))


def shapes(layer):
    return jax.eval_shape(layer.init, jax.random.key(0))


@functools.cache
def model(name):
    layers = from_config(MODELS[name])
    return layers, [random_params(layer, i) for i, layer in enumerate(layers)]


def stack(name, run):
    """A pass over a model's layers, each added to its input: run(layer, params, x, shared, i) -> Output."""
    layers, params = model(name)

    def f(x, caches=None, **at):
        shared, kept = Shared(), []
        for i, (layer, p) in enumerate(zip(layers, params, strict=True)):
            out = run(layer, p, x, shared, None if caches is None else caches[i], **at)
            x, shared = x + out.y, shared.after(out)
            kept.append(out.cache)
        return x, kept

    return f


@functools.cache
def whole(name):
    """Three sequences, and a model's result for them at once."""
    x = hidden(3, 40)
    return x, jax.jit(stack(name, lambda layer, p, x, shared, _: layer(p, x, shared=shared)))(x)[0]


@functools.cache
def alone():
    """A layer with an indexer, its parameters, sequences and its result for them."""
    layers, params = model("v4")
    x = hidden(4, 24)
    return layers[1], params[1], x, jax.jit(lambda p, x: layers[1](p, x).y)(params[1], x)


def hidden(b, s, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((b, s, 24)), jnp.float32)


@pytest.mark.parametrize("name", MODELS)
def test_whole_sequences_against_float64(name):
    layers, params = model(name)
    x, got = whole(name)
    want, shared = np.asarray(x[1], np.float64), {}
    for layer, p in zip(layers, jax.tree.map(lambda p: np.asarray(p, np.float64), params), strict=True):
        want = want + layers_float64.layer(layer, p, want, shared)
    np.testing.assert_allclose(got[1], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name, mode", [*(("v4", mode) for mode in MODES_OF_JAX), ("v4.1", "no rank promotion")])
def test_under_jaxs_own_options(name, mode):
    """64 bits, no promotion of ranks or of types: whole sequences, their gradient, a chunk and a step, traced."""
    layers, params = model(name)
    with MODES_OF_JAX[mode]():
        x, caches = hidden(2, 8), [layer.cache(2, 20, jnp.float32) for layer in layers]
        of_whole = stack(name, lambda layer, p, x, shared, _: layer(p, x, shared=shared))
        of_chunk = stack(name, lambda layer, p, x, shared, cache: layer(p, x, cache, shared, start=2))
        of_step = stack(name, lambda layer, p, x, shared, cache: layer.step(p, x, cache, shared, lengths=9))
        given = [jax.eval_shape(lambda layer=layer: layer.init(jax.random.key(0))) for layer in layers]
        got = (
            jax.eval_shape(jax.grad(lambda x: of_whole(x)[0].sum()), x),
            *(jax.eval_shape(f, x[:, :s], caches)[0] for f, s in ((of_chunk, 8), (of_step, 1))),
        )
        assert jax.tree.map(lambda x: (x.shape, x.dtype), given) == jax.tree.map(lambda x: (x.shape, x.dtype), params)
        assert [(y.shape[1], y.dtype) for y in got] == [(s, jnp.float32) for s in (8, 8, 1)]


@pytest.mark.parametrize("name, paged", [("v4", True), ("v4.1", False)])
def test_ragged_chunks_and_steps_equal_whole_sequences(name, paged):
    """Three chunks of prompts of different lengths, then steps of two tokens, one of which is taken back every time."""
    layers, _ = model(name)
    b, room, steps = 3, 40, 2
    x, want = whole(name)
    table = None
    if paged:
        table = jnp.asarray(np.random.default_rng(1).permutation(b * 4).reshape(b, 4), jnp.int32)
    caches = [layer.cache(b, room, jnp.float32, steps=steps, block_table=table) for layer in layers]

    def call(layer, p, x, shared, cache, start, lengths):
        return layer(p, x, cache, shared, start=start, lengths=lengths)

    def next_tokens(layer, p, x, shared, cache, lengths):
        return layer.step(p, x, cache, shared, lengths=lengths)

    chunk, step = jax.jit(stack(name, call)), jax.jit(stack(name, next_tokens))
    lengths = np.array([22, 0, 9], np.int32)
    for start in (0, 8, 16):
        y, caches = chunk(x[:, start : start + 8], caches, start=jnp.int32(start), lengths=jnp.asarray(lengths))
        for n in range(b):
            to = min(max(lengths[n] - start, 0), 8)
            np.testing.assert_allclose(y[n, :to], want[n, start : start + to], rtol=2e-5, atol=2e-5)
    lengths[1] = 1  # begins by steps alone: its first has one token before position 0
    for _ in range(16):
        at = lengths[:, None] + np.arange(-1, 1)
        new = jnp.take_along_axis(x, jnp.maximum(at, 0)[..., None], 1)
        new = new.at[:, 1].set(jnp.where((lengths % 3 == 0)[:, None], 9.0, new[:, 1]))  # a guess, and a wrong one
        y, caches = step(new, caches, lengths=jnp.asarray(lengths + 1))
        some = lengths > 0
        np.testing.assert_allclose(y[some, 0], want[np.arange(b), lengths - 1][some], rtol=2e-5, atol=2e-5)
        lengths += 1


@pytest.mark.parametrize("name", MODELS)
def test_joined_parameters(name):
    """A chunk and a step give with joined parameters what they give with separate ones."""
    layers, _ = model(name)
    x, caches = hidden(2, 9), [layer.cache(2, 20, jnp.float32) for layer in layers]

    def run(form):
        read = stack(name, lambda layer, p, x, shared, cache: layer(form(layer, p), x, cache, shared))
        step = stack(name, lambda layer, p, x, shared, cache: layer.step(form(layer, p), x, cache, shared, lengths=9))
        y, kept = jax.jit(read)(x[:, :8], caches)
        return y, jax.jit(step)(x[:, 8:], kept)[0]

    got, want = run(lambda layer, p: layer.joined(p)), run(lambda layer, p: p)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), got, want)


@pytest.mark.parametrize("name", MODELS)
def test_pages_come_go_and_are_shared(name):
    """Three sequences with one table and 5 pages of 16 tokens, where each alone would need 3.

    The first 16 tokens of two of them are the same: the second takes their page and the rings from the first. When it
    ends, the third gets its other page.
    """
    layers, _ = model(name)
    x = whole(name)[0].at[1, :16].set(whole(name)[0][0, :16])
    want = jax.jit(stack(name, lambda layer, p, x, shared, _: layer(p, x, shared=shared)))(x)[0]
    table = np.full((3, 3), -1, np.int32)
    caches = [layer.cache(3, 48, jnp.float32, block_table=table, page_tokens=16, pages=5) for layer in layers]
    assert {x.compressed.entries.shape[:2] for x in caches if x.compressed} == {
        (5, 16 // layer.ratio) for layer in layers if layer.compressor
    }

    def call(layer, p, x, shared, cache, table, start, lengths):
        return layer(p, x, cache.with_block_table(table), shared, start=start, lengths=lengths)

    def step(layer, p, x, shared, cache, table, lengths):
        return layer.step(p, x, cache.with_block_table(table), shared, lengths=lengths)

    call, step = (jax.jit(stack(name, f), donate_argnums=1) for f in (call, step))

    def chunk(start, lengths):
        nonlocal caches
        take = jnp.clip(start[:, None] + jnp.arange(16), 0, 39)
        y, caches = call(
            jnp.take_along_axis(x, take[..., None], 1), caches, table=table, start=start, lengths=jnp.asarray(lengths)
        )
        for n in range(3):
            some = slice(0, max(lengths[n] - start[n], 0))
            np.testing.assert_allclose(y[n, some], want[n, start[n] :][some], rtol=2e-5, atol=2e-5)

    def token(lengths):
        nonlocal caches
        new = jnp.take_along_axis(x, jnp.maximum(jnp.asarray(lengths) - 1, 0)[:, None, None], 1)
        y, caches = step(new, caches, table=table, lengths=jnp.asarray(lengths))
        some = np.array(lengths) > 0
        np.testing.assert_allclose(y[some, 0], want[np.arange(3), np.array(lengths) - 1][some], rtol=2e-5, atol=2e-5)

    table[0, 0] = 4
    chunk(np.zeros(3, np.int32), [16, 0, 0])
    table[1, 0] = 4  # both have it; the rings are each sequence's own
    caches = jax.jit(lambda caches: [cache.fork(0, jnp.int32(1)) for cache in caches], donate_argnums=0)(caches)
    table[:2, 1] = 0, 2
    chunk(np.array([16, 16, 0], np.int32), [29, 32, 0])
    for n in range(30, 33):
        token([n, 0, 0])
    table[1] = -1  # the second ends
    table[2, :2], table[0, 2] = (2, 3), 1
    chunk(np.zeros(3, np.int32), [0, 0, 16])
    chunk(np.array([0, 0, 16], np.int32), [0, 0, 20])
    for n in range(8):
        token([33 + n, 0, 21 + n])
    assert {int(table.max()) for cache in caches if cache.compressed for table in [cache.compressed.block_table]} == {4}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_tables_and_forks_on_a_mesh(kind):
    """A table that is whole on every device is put where the caches' are; forks are not for Explicit batches."""
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(kind,), devices=jax.devices("cpu")[:4])
    table = np.arange(12, dtype=np.int32).reshape(4, 3)
    cache = model("v4")[0][1].cache(4, 24, jnp.float32, block_table=0 * table)
    cache = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P("batch"))), cache)
    changed = jax.jit(lambda cache, table: cache.with_block_table(table))(cache, table)
    np.testing.assert_array_equal(changed.compressed.block_table, table)
    np.testing.assert_array_equal(changed.keys.block_table, table)
    if kind is AxisType.Explicit:
        assert jax.typeof(changed.keys.block_table).sharding.spec == P("batch", None)
        with pytest.raises(NotImplementedError, match="fork: cache: got the batch sharded over batch, wanted it whole"):
            changed.fork(0, 1)
    else:
        ring = changed._replace(window=Cache(changed.window.entries.at[2].set(3.0))).fork(2, 0).window.entries
        assert (ring[0] == 3).all() and (ring[1] == 0).all()


@pytest.mark.slow
def test_packed_documents():
    """In one call each document gives the result that it gives alone, to the last of three layers; so do the
    gradients.
    """
    lengths = ((13, 3, 17, 7), (1, 22, 9, 8))
    ids = jnp.asarray([np.repeat([5, 2, 9, 0], n) for n in lengths], jnp.int32)
    rows = [(n, at, of) for n, row in enumerate(lengths) for at, of in zip(np.cumsum((0, *row)), row, strict=False)]
    x, dy = hidden(2, 40), hidden(2, 40, seed=1)

    def apart(x):
        return jnp.stack([jnp.pad(x[n, at : at + of], ((0, 22 - of), (0, 0))) for n, at, of in rows])

    def pull(x, dy, **how):
        run = stack("v4", lambda layer, p, x, shared, _: layer(p, x, **how))

        def both(x, dy):
            y, vjp = jax.vjp(lambda x: run(x)[0], x)
            return y, *vjp(dy)

        # by fused multiply-adds, since the tolerance is a few units of the largest numbers here
        return jax.jit(both, compiler_options={"xla_backend_optimization_level": 1})(x, dy)

    for packed, alone in zip(pull(x, dy, segment_ids=ids), pull(apart(x), apart(dy)), strict=True):
        for i, (n, at, of) in enumerate(rows):
            np.testing.assert_allclose(packed[n, at : at + of], alone[i, :of], rtol=2e-5, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("kind", [0, 1, 2], ids=["window", "sparse", "dense"])
def test_kernels(kind, packed):
    """A layer of kernels in bfloat16 is near the reference in float32, and so is the gradient."""
    layer, p, x = of_kernels(kind)
    ids = jnp.asarray([np.repeat([3, 1, 2], n) for n in ((40, 7, 43), (1, 60, 29))], jnp.int32)

    def run(x, implementation):
        f = functools.partial(layer, segment_ids=ids if packed else None, implementation=implementation)
        y, vjp = jax.vjp(lambda x: f(p, x).y, x)
        return y, *vjp(jnp.roll(y, 1, 1))

    got = jax.jit(functools.partial(run, implementation=None))(x)
    with jax.default_device(jax.devices("cpu")[0]):
        want = jax.jit(functools.partial(run, implementation="reference"))(np.asarray(x, np.float32))
    assert got[0].dtype == x.dtype
    near(got[0], want[0], 2e-2)
    near(got[1], want[1], 8e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("kind", [0, 1, 2], ids=["window", "sparse", "dense"])
def test_steps_by_kernels(kind):
    """A chunk and steps after it are near the whole sequence, all by kernels."""
    layer, p, x = of_kernels(kind)
    whole = jax.jit(lambda x: layer(p, x).y)(x)
    y, cache = jax.jit(lambda x, c: layer(p, x, c)[:2])(x[:, :80], layer.cache(2, 96))
    near(y, whole[:, :80], 2e-2)
    step = jax.jit(lambda x, c, n: layer.step(p, x, c, lengths=n)[:2], donate_argnums=1)
    for n in range(81, 91):
        y, cache = step(x[:, n - 1 : n], cache, jnp.int32(n))
        near(y[:, 0], whole[:, n - 1], 3e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("is_causal", [True, False], ids=["ragged", "drafts"])
@pytest.mark.parametrize("kind", [0, 1, 2], ids=["window", "sparse", "dense"])
def test_ragged_steps_by_kernels(kind, is_causal):
    """Three new tokens of one sequence and one of the other, in one call, are near the definition's."""
    layer, p, x = of_kernels(kind)
    start, lengths = jnp.asarray([80, 63]), jnp.asarray([83, 64])

    def run(x, implementation):
        cache = layer(p, x[:, :80], layer.cache(2, 96, x.dtype, steps=4), lengths=start, implementation=implementation)
        new = jnp.stack([x[0, 80:83], x[1, 63:66]])
        at = {"start": start, "lengths": lengths, "is_causal": is_causal, "implementation": implementation}
        return layer.step(p, new, cache.cache, **at).y

    got = jax.jit(functools.partial(run, implementation=None))(x)
    with jax.default_device(jax.devices("cpu")[0]):
        want = jax.jit(functools.partial(run, implementation="reference"))(np.asarray(x, np.float32))
    near(got, want, 3e-2)
    assert (got[1, 1:] == 0).all()


def of_kernels(kind):
    """A layer that kernels run, its parameters, and sequences."""
    sizes = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_n_heads": 16, "index_topk": 64}
    layer = from_config(MODELS["v4"] | sizes | {"num_attention_heads": 16})[kind]
    return layer, random_params(layer, kind), hidden(2, 90).astype(jnp.bfloat16)


def near(got, want, most):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < most, error


def test_check_finds_what_is_wrong_with_rope(monkeypatch):
    assert [case.complaints("reference") for case in ROPE[2:4]] == [[], []]
    monkeypatch.setattr(rope_cases, "rope", inverse_rope)
    (says,) = ROPE[2].complaints("reference")
    assert says.startswith("rope off by ")


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("shape", [(2, 600, 16, 512), (1, 7, 3, 128), (3, 5, 1, 64)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rope_in_place_by_a_kernel(dtype, shape):
    """It overwrites an array that nothing else needs; any other array stays as it is."""
    rng, how = np.random.default_rng(0), Rope(64)
    w, x = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((shape[-1],) * 2, shape))
    at = jnp.asarray(rng.integers(0, 5000, shape[:2]), jnp.int32)
    product = jax.jit(lambda x: x @ w)(x)
    for turn in (rope, inverse_rope):
        run = jax.jit(lambda x, turn=turn: turn(x @ w, at, how))
        program = run.lower(x).compile().as_text()
        assert program.count('custom_call_target="dsv4_fmha_rope"') == 1 and " copy(" not in program
        want = turn(product.astype(jnp.float32), at, how)
        np.testing.assert_allclose(run(x).astype(jnp.float32), want, rtol=1e-2, atol=1e-2)
        both = jax.jit(lambda x, turn=turn: (turn(x, at, how), x))(product)
        np.testing.assert_array_equal(*(y.astype(jnp.float32) for y in (both[1], product)))
        np.testing.assert_allclose(both[0].astype(jnp.float32), want, rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("shape", [(2, 60, 16, 512), (1, 7, 3, 512)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rope_of_normed_by_a_kernel(dtype, shape):
    """The norm with RoPE, and its gradient, are one kernel each; both as in float32."""
    rng, how = np.random.default_rng(0), Rope(64, 160000, 16, 4096)
    x, dy = (jnp.asarray(3 * rng.standard_normal(shape), dtype) for _ in range(2))
    at = jnp.asarray(rng.integers(0, 5000, shape[:2]), jnp.int32)

    def pull(x, dy):
        y, vjp = jax.vjp(lambda x: rope_of_normed(x, at, how, 1e-3), x)
        return y, *vjp(dy)

    program = jax.jit(pull).lower(x, dy).compile()
    assert all(f'"dsv4_fmha_{op}"' in program.as_text() for op in ("norm_rope", "norm_rope_bwd"))
    want = jax.jit(pull)(*(x.astype(jnp.float32) for x in (x, dy)))
    for got, exactly in zip(program(x, dy), want, strict=True):
        np.testing.assert_allclose(got.astype(jnp.float32), exactly, rtol=8e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("shape", [(2, 60, 16, 128), (64, 1, 64, 128), (1, 7, 3, 128)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_index_query_by_a_kernel(dtype, shape):
    """Its codes and scales are those of RoPE with the transform, and then quantization, each by itself."""
    rng, how = np.random.default_rng(0), Rope(64, 160000, 16, 4096)
    x = jnp.asarray(3 * rng.standard_normal(shape) * (rng.integers(0, 9, shape[:3]) > 0)[..., None], dtype)
    at = jnp.asarray(rng.integers(0, 5000, shape[:2]), jnp.int32)
    run = jax.jit(lambda x: index_query(x, at, how)).lower(x).compile()
    assert run.as_text().count("dsv4_fmha_index_query") == 1
    want = jax.jit(quantize_rows)(jax.jit(lambda x: rope_hadamard(x, at, how))(x))
    (codes, scales), (codes_apart, scales_apart) = run(x), want
    np.testing.assert_array_equal(scales, scales_apart)
    codes, codes_apart = (np.asarray(y, np.float32) for y in (codes, codes_apart))
    off = codes != codes_apart  # a quotient halfway between two codes, which XLA divides by another instruction
    assert off.mean() < 1e-3
    np.testing.assert_allclose(codes[off], codes_apart[off], rtol=0.13, atol=2**-7)  # XLA loses subnormal float16


def test_caches_are_updated_in_place_in_a_scan():
    layer, p, x, want = alone()
    cache = layer.cache(4, 64, jnp.float32)

    def generate(cache, x):
        def step(carry, x):
            cache, n = carry
            out = layer.step(p, x[:, None], cache, lengths=n + 1)
            return (out.cache, n + 1), out.y[:, 0]

        (cache, _), y = jax.lax.scan(step, (cache, jnp.int32(0)), x.swapaxes(0, 1))
        return cache, y.swapaxes(0, 1)

    compiled = jax.jit(generate, donate_argnums=0).lower(cache, x).compile()
    size = sum(c.nbytes for c in jax.tree.leaves(cache))
    assert compiled.memory_analysis().alias_size_in_bytes >= size
    np.testing.assert_allclose(compiled(cache, x)[1], want, rtol=2e-5, atol=2e-5)


def test_fp8_caches():
    """Steps over FP8 caches equal a chunk over them, which rounds its own latents as the cache does."""
    layer = from_config(MODELS["v4"] | {"head_dim": 512})[1]
    p, x = random_params(layer, 0), hidden(2, 21).astype(jnp.bfloat16)
    step = jax.jit(lambda x, c, n: layer.step(p, x, c, lengths=n)[:2], donate_argnums=1)
    chunk = jax.jit(lambda x, c: layer(p, x, c)[:2])
    want, cache = chunk(x, layer.cache(2, 24, jnp.float8_e4m3fn))
    assert cache.window.is_packed and cache.compressed.is_packed
    cache = layer.cache(2, 24, jnp.float8_e4m3fn)
    for n in range(1, 22):
        y, cache = step(x[:, n - 1 : n], cache, jnp.int32(n))
        error = jnp.linalg.norm(y[:, 0].astype(jnp.float32) - want[:, n - 1]) / jnp.linalg.norm(want[:, n - 1])
        assert error < 2e-2, (n, error)
    exact = jax.jit(lambda x: layer(p, x).y)(x.astype(jnp.float32))
    error = jnp.linalg.norm(exact - want, axis=-1) / jnp.linalg.norm(exact, axis=-1)
    assert jnp.median(error) < 4e-2 and jnp.all(error > 0)


@pytest.mark.parametrize(
    "dtype, layouts", [("float8_e4m3fn", ("v41_fp8", "v41_fp8")), ("float4_e2m1fn", ("v41_fp8", "v41_fp4"))]
)
def test_packed_caches_of_v41(dtype, layouts):
    """Its own layouts; a step over them is near one over bfloat16."""
    layers = from_config(MODELS["v4.1"] | {"head_dim": 512})
    layer, x = layers[1], hidden(2, 9).astype(jnp.bfloat16)
    p = random_params(layer, 0)
    got, want = (
        jax.jit(lambda x, c: layer(p, x, c)[:2])(x, layer.cache(2, 12, kind)) for kind in (dtype, jnp.bfloat16)
    )
    assert (got[1].window.layout, got[1].compressed.layout) == layouts
    assert got[1].window.is_packed and got[1].compressed.is_packed and not got[1].keys.is_packed
    error = jnp.linalg.norm((got[0] - want[0]).astype(jnp.float32)) / jnp.linalg.norm(want[0].astype(jnp.float32))
    assert 0 < error < 0.3, error
    with pytest.raises(ValueError, match=r"dtype: got float4_e2m1fn, wanted .*float8_e4m3fn for a layer like this"):
        from_config(MODELS["v4"] | {"head_dim": 512})[1].cache(2, 12, "float4_e2m1fn")


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["window", "sparse", "dense"])
def test_a_window_of_one_token_takes_chunks(kind):
    layer = from_config(MODELS["v4"] | {"sliding_window": 1})[kind]
    p, x = random_params(layer, 0), hidden(2, 16)
    want, cache = jax.jit(lambda x: layer(p, x).y)(x), layer.cache(2, 16, jnp.float32)
    chunk = jax.jit(lambda x, cache, start: layer(p, x, cache, start=start)[:2])
    for start in (0, 8):
        y, cache = chunk(x[:, start : start + 8], cache, jnp.int32(start))
        np.testing.assert_allclose(y, want[:, start : start + 8], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_batch_sequence_and_heads_sharded_at_once(kind):
    layer, p, x, want = alone()
    axes = ("batch", "sequence", "heads")
    mesh = jax.make_mesh((2, 2, 2), axes, axis_types=(kind,) * 3, devices=jax.devices("cpu")[:8])
    p = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), p, layer.partition("heads"))
    x = jax.device_put(x, NamedSharding(mesh, P("batch", "sequence")))
    compiled = jax.jit(lambda p, x: layer(p, x).y).lower(p, x).compile()
    np.testing.assert_allclose(compiled(p, x), want, rtol=2e-5, atol=2e-5)
    assert set(collectives(compiled)) == {"all-reduce", "all-gather"}


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_donated_caches_are_updated_in_place(name, paged):
    """Layer by layer as the pages say, and a whole model in one program: XLA copies what a program returns twice."""
    layers, params = model(name)
    table = jnp.asarray(np.random.default_rng(3).permutation(6).reshape(2, 3), jnp.int32) if paged else None
    caches = [layer.cache(2, 24, jnp.float32, steps=2, block_table=table) for layer in layers]
    x, shared = hidden(2, 2), Shared()
    for layer, p, cache in zip(layers, params, caches, strict=True):
        for f, at in ((layer.step, {"lengths": 9}), (layer, {"start": 7})):
            traced = jax.jit(f, donate_argnums=2).trace(p, x, cache, shared, **at)
            assert_in_place(traced)
        shared = shared.after(jax.eval_shape(functools.partial(layer.step, lengths=9), p, x, cache, shared))
    run = stack(name, lambda layer, p, x, shared, cache, **at: layer.step(p, x, cache, shared, **at))
    traced = jax.jit(run, donate_argnums=1).trace(x, caches, lengths=9)
    assert_in_place(traced)


def test_a_result_that_is_returned_twice_is_noticed():
    layers, params = model("v4")
    cache = layers[1].cache(2, 24, jnp.float32)

    def twice(p, x, cache):
        out = layers[1].step(p, x, cache, lengths=9)
        return out, out.cache.compressed

    traced = jax.jit(twice, donate_argnums=2).trace(params[1], hidden(2, 1), cache)
    with pytest.raises(AssertionError):
        assert_in_place(traced)


def published(name):
    """The entries of a published config.json about attention."""
    yarn = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
    both = {
        "head_dim": 512, "qk_rope_head_dim": 64, "o_lora_rank": 1024, "sliding_window": 128, "index_head_dim": 128,
        "rope_theta": 10000, "compress_rope_theta": 160000, "rope_scaling": yarn,
    }  # fmt: skip
    flash = both | {
        "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64, "q_lora_rank": 1024, "o_groups": 8,
        "index_n_heads": 64, "index_topk": 512, "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
        "rms_norm_eps": 1e-6,
    }  # fmt: skip
    pro = flash | {
        "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "q_lora_rank": 1536, "o_groups": 16,
        "index_topk": 1024, "compress_ratios": [128, 128] + [4, 128] * 29 + [4, 0],
    }  # fmt: skip
    v41 = both | {
        "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 64, "q_lora_rank": 1280, "o_groups": 8,
        "index_n_heads": 32, "index_topk": 512, "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20], "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "candidate_block_size": 8,
        "rms_norm_eps": 1e-20,
    }  # fmt: skip
    return {"flash": flash, "pro": pro, "v4.1": {"text_config": v41}}[name]


def test_config_of_v4(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(published("flash")))
    layers = from_config(path)
    assert len(layers) == 43 and [layer.ratio for layer in layers[:5]] == [0, 0, 4, 128, 4]
    assert layers[0].rope == Rope(64, 10000) and layers[0].compressor is None
    for layer in layers[2:]:
        assert layer.rope == Rope(64, 160000, 16, 65536, 32, 1) and layer.norm_heads
        assert layer.compressor.overlap == layer.sparse == (layer.indexer is not None) == (layer.ratio == 4)
        assert layer.indexer is None or layer.indexer.compressor.overlap
    assert (layers[2].indexer.heads, layers[2].indexer.topk) == (64, 512)
    pro = from_config(published("pro"))
    assert (len(pro), pro[0].ratio, pro[2].heads, pro[2].indexer.topk, pro[0].o_groups) == (61, 128, 128, 1024, 16)


def test_config_of_v41():
    layers = from_config(published("v4.1"))
    assert [i for i, layer in enumerate(layers) if layer.compressor] == [2, 8, 14, 20]
    assert [i for i, layer in enumerate(layers) if layer.indexer] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [i for i, layer in enumerate(layers) if layer.indexer and layer.indexer.within_candidates] == [
        24,
        28,
        32,
        36,
    ]
    assert [i for i, layer in enumerate(layers) if layer.indexer and layer.indexer.candidate_blocks == 2048] == [20]
    assert len(layers) == 40 and all(layer.sparse == (i > 1) for i, layer in enumerate(layers))
    assert not any(layer.norm_heads for layer in layers) and layers[0].eps == 1e-20
    assert not layers[2].compressor.has_ape and not layers[2].compressor.overlap and layers[20].ratio == 1
    assert [layers[i].rope.theta for i in (1, 2, 20)] == [10000, 160000, 160000]
    without = {name: x for name, x in published("v4.1")["text_config"].items() if not name.startswith("candidate")}
    assert [layer.indexer.in_two_levels for layer in from_config(without) if layer.indexer] == [False] * 8
    names = [path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(shapes(layers[20])["compressor"])]
    assert names == ["norm", "w"] and layers[20].compressor.width == 512  # of ratio 1


def test_config_as_transformers_saves_it():
    """Kinds of layers by name, with their own ratios, and RoPE by kind of layer."""
    theirs = published("flash")
    kinds = dict(zip((0, 4, 128), MODELS["v4"]["layer_types"], strict=True))
    rates = {"compress_rates": None, "layer_types": [kinds[ratio] for ratio in theirs.pop("compress_ratios")]}
    yarn = {**theirs.pop("rope_scaling"), "rope_type": "yarn", "rope_theta": theirs.pop("compress_rope_theta")}
    main = {"rope_type": "default", "rope_theta": theirs.pop("rope_theta")}
    dims = {"partial_rotary_factor": theirs.pop("qk_rope_head_dim") / 512}
    theirs |= rates | dims | {"rope_parameters": {"main": main, "compress": yarn}}
    assert from_config(theirs) == from_config(published("flash"))


def test_config_of_deepseeks_own_code():
    theirs = {
        "dim": 4096, "n_layers": 4, "n_heads": 64, "q_lora_rank": 1024, "head_dim": 512, "rope_head_dim": 64,
        "norm_eps": 1e-6, "o_groups": 8, "o_lora_rank": 1024, "window_size": 128, "compress_ratios": [0, 4, 128, 4, 0],
        "compress_rope_theta": 160000.0, "original_seq_len": 65536, "rope_theta": 10000.0, "rope_factor": 16,
        "beta_fast": 32, "beta_slow": 1, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
    }  # fmt: skip
    flash = from_config(published("flash"))
    assert from_config(theirs) == (flash[0], flash[2], flash[3], flash[2])
    assert from_config(theirs | {"original_seq_len": 0})[1].rope == Rope(64, 160000)  # no YaRN


def test_config_of_v41_in_deepseeks_own_code():
    """The lists of layers have other names there; read as V4's, layers would load and be wrong."""
    theirs = dict(published("v4.1")["text_config"])
    for ours, name in (("kv_source_layer_ids", "kv_source_layers"), ("index_source_layer_ids", "index_source_layers"),
                       ("candidate_source_layer_id", "candidate_source_layer")):  # fmt: skip
        theirs[name] = theirs.pop(ours)
    assert from_config(theirs) == from_config(published("v4.1"))


def test_config_with_rope_parameters_that_are_not_nested():
    theirs = published("flash")
    yarn = theirs.pop("rope_scaling")
    theirs["rope_parameters"] = yarn | {"rope_type": yarn.pop("type"), "rope_theta": 10000.0}
    assert from_config(theirs) == from_config(published("flash"))


def test_config_of_another_model():
    """Llama's entries, without the name of the model: what is wrong is said by name."""
    llama = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
             "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "head_dim": 128}  # fmt: skip
    with pytest.raises(ValueError, match="num_key_value_heads: got 8, wanted 1"):
        from_config(llama)
    with pytest.raises(ValueError, match="compress_ratios: got none, wanted it in the config"):
        from_config(llama | {"num_key_value_heads": 1})


def test_config_with_rates_as_entries_of_their_own():
    rates = {"compress_rate_csa": 8, "compress_rate_hca": 64}
    layers = from_config(MODELS["v4"] | {"compress_rates": None} | rates)
    assert [layer.ratio for layer in layers] == [0, 8, 64]


def test_config_with_entries_of_other_parts_of_a_model():
    others = {
        "model_type": "deepseek_v4", "vocab_size": 9, "hc_mult": 4, "n_routed_experts": 256, "use_cache": True,
        "norm_topk_prob": True, "num_key_value_heads": 1, "attention_bias": False, "attention_dropout": 0.0,
        "mlp_layer_types": ["moe"], "engram_n_heads": 8, "engram_head_dim": 64, "dspark_block_size": 5,
        "_attn_implementation_autoset": True, "attn_implementation": "eager", "output_attentions": False,
        "tie_word_embeddings": False, "quantization_config": {}, "num_nextn_predict_layers": 1, "expert_dtype": "fp4",
        "routed_scaling_factor": 1.5, "max_position_embeddings": 2**20, "transformers_version": "5.0", "mlp_bias": 0,
        "topk_method": "noaux_tc", "scoring_func": "sqrtsoftplus", "swiglu_limit": 10.0, "num_hash_layers": 3,
    }  # fmt: skip
    assert from_config(published("flash") | others) == from_config(published("flash"))


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"q_lora_rank": None}, "q_lora_rank: got none"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling: got .*linear"),
        ({"rope_scaling": {"type": "yarn", "attention_factor": 2}}, "wanted yarn with attention_factor 1"),
        ({"compress_ratios": None, "layer_types": ["full_attention"] * 43}, "layer_types: got full_attention"),
        ({"compress_ratios": [-1] * 43}, "compress_ratios: got -1"),
        ({"compress_ratios": [4]}, "compress_ratios: got 1, wanted one for each layer"),
        ({"compress_ratios": [0, 4, 8] * 15}, "compress_ratios: got 8, wanted 0, 4 or 128"),
        ({"attention_bias": True}, "attention_bias: got True, wanted False"),
        ({"num_key_value_heads": 8}, "num_key_value_heads: got 8, wanted 1"),
        ({"index_share_layers": 2}, "index_share_layers: got 2, wanted no entries that are not known"),
        ({"clip_qkv": 8.0, "use_qk_norm": True}, r"clip_qkv, use_qk_norm: got 8\.0, True, wanted no entries"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "mscale": 0.7}}, "rope_scaling: got mscale, wanted only"),
        ({"rope_parameters": {"main": {"rope_type": "yarn", "factor": 4}}}, "wanted no YaRN in layers with a window"),
        ({"rope_parameters": {"rope_theta": 500.0}}, r"rope_theta: got 10000, wanted .*500\.0.* of rope_parameters"),
        ({"model_type": "llama"}, "model_type: got llama, wanted deepseek_v4 or deepseek_v41, whose attention this is"),
        ({"o_groups": 3}, "o_groups: got 3, wanted a divisor of the 64 heads"),
        ({"qk_rope_head_dim": 7}, "dims: got 7, wanted an even int"),
    ],
)
def test_config_errors(changes, error):
    with pytest.raises(ValueError, match=error):
        from_config(published("flash") | changes)


def checkpoint(layer, params, prefix):
    """A layer's parameters under DeepSeek's names, [out, in]."""
    tensors = {}
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name, x = ".".join(p.key for p in path), np.asarray(x)
        if name == "wo_a":
            x = x.transpose(0, 3, 1, 2).reshape(layer.o_groups * layer.o_rank, -1)
        elif name in ("wq_b", "indexer.wq_b"):
            x = x.reshape(x.shape[0], -1).T
        elif name == "wo_b":
            x = x.reshape(-1, x.shape[-1]).T
        elif x.ndim == 2 and not name.endswith("ape"):
            x = x.T
        if name.endswith("compressor.w"):
            own = layer.compressor if name == "compressor.w" else layer.indexer.compressor
            both = zip(("kv", "gate"), np.split(x, [own.channels]), strict=True)
            tensors |= {f"{prefix}{name}{which}.weight": part for which, part in both if len(part)}
            continue
        name = "attn_sink" if name == "sink" else name if name.endswith("ape") else name + ".weight"
        tensors[prefix + name] = x
    return tensors


@pytest.mark.parametrize("name", MODELS)
def test_state_dict_of_deepseek(name):
    layers, params = model(name)
    tensors = {"embed.weight": np.zeros(3)}
    for i, (layer, p) in enumerate(zip(layers, params, strict=True)):
        tensors |= checkpoint(layer, p, f"layers.{i}.attn.")
    for i, (layer, p) in enumerate(zip(layers, params, strict=True)):
        got = from_state_dict(layer, tensors, f"layers.{i}.attn.", jnp.float32)
        jax.tree.map(np.testing.assert_array_equal, got, p)


def test_dtypes_of_random_parameters():
    """`init` gives each parameter the dtype that a checkpoint's has."""
    for layer, params in zip(*model("v4"), strict=True):
        wanted = from_state_dict(layer, checkpoint(layer, params, ""))
        made = layer.init(jax.random.key(0), jnp.bfloat16)
        assert jax.tree.map(lambda x: x.dtype, made) == jax.tree.map(lambda x: x.dtype, wanted)
        assert {x.dtype for x in jax.tree.leaves(layer.init(jax.random.key(0)))} == {jnp.dtype("float32")}


def test_state_dict_in_fp8():
    layers, params = model("v4")
    layer, tensors = layers[0], checkpoint(layers[0], params[0], "")
    scale = np.float32(0.25)
    tensors["wq_b.weight"] = np.asarray(tensors["wq_b.weight"] / scale).astype(jnp.float8_e4m3fn)
    tensors["wq_b.scale"] = np.full((1, 1), scale)
    got = from_state_dict(layer, tensors, dtype=jnp.float32)["wq_b"]
    np.testing.assert_allclose(got, params[0]["wq_b"], rtol=0.07, atol=1e-3)
    tensors["wq_b.scale"] = np.full((7, 1), scale)
    with pytest.raises(ValueError, match=r"wq_b.weight: got scales \[7, 1\], wanted one for a block"):
        from_state_dict(layer, tensors)


@pytest.mark.parametrize("block", [128, 32])
def test_scales_of_blocks_and_dtypes(block):
    """A scale belongs to a square of an e4m3 matrix; matrices come in bfloat16, all else in float32."""
    sizes = {"hidden_size": 160, "q_lora_rank": 130, "num_hidden_layers": 1, "compress_ratios": [0]}
    (layer,) = from_config(SMALL | sizes)
    rng, tensors = np.random.default_rng(0), checkpoint(layer, random_params(layer, 0), "")
    scale = 2.0 ** rng.integers(-3, 3, (-(-130 // block), -(-160 // block)))
    code = rng.integers(-8, 9, (130, 160)).astype(np.float32)
    tensors |= {"wq_a.weight": code.astype(jnp.float8_e4m3fn), "wq_a.weight_scale_inv": scale.astype(np.float32)}
    got = from_state_dict(layer, tensors)
    want = [[code[i, j] * scale[i // block, j // block] for i in range(130)] for j in range(160)]
    np.testing.assert_array_equal(got["wq_a"].astype(jnp.float32), want)
    in_float32 = {name for name, x in got.items() if x.dtype == jnp.float32}
    assert in_float32 == {"q_norm", "kv_norm", "sink"} and all(
        x.dtype == jnp.bfloat16 for name, x in got.items() if name not in in_float32
    )


def test_state_dict_errors():
    layers, params = model("v4")
    layer, good = layers[1], checkpoint(layers[1], params[1], "a.")
    with pytest.raises(ValueError, match=r"got none that is called so, wanted b.wq_a.weight or b.q_a_proj.weight"):
        from_state_dict(layer, good, "b.")
    with pytest.raises(ValueError, match=r"a.indexer.wq_b.weight: got none, wanted floats\[128, 12\] for indexer.wq_b"):
        from_state_dict(layer, {k: x for k, x in good.items() if k != "a.indexer.wq_b.weight"}, "a.")
    with pytest.raises(ValueError, match=r"a.wkv.weight: got float64\[3, 24\], wanted floats\[16, 24\] for wkv"):
        from_state_dict(layer, good | {"a.wkv.weight": np.zeros((3, 24))}, "a.")
    with pytest.raises(ValueError, match=r"got bias under 'a.', wanted a layer's alone"):
        from_state_dict(layer, good | {"a.bias": np.zeros(3)}, "a.")


@pytest.mark.parametrize("how", [Rope(8), Rope(8, 160000, 16, 64), Rope(8, 160000, 16, 4)])
def test_rope(how):
    x = hidden(2, 6).reshape(2, 6, 2, 12)
    positions = jnp.array([[0, 1, 7, 100, 4095, 70000]], jnp.int32)
    got = rope(x, positions, how)
    for i, p in enumerate(positions[0].tolist()):
        want = layers_float64.turn(np.asarray(x[:, i], np.float64), p, how)
        np.testing.assert_allclose(got[:, i], want, atol=2e-7 * max(p, 20))  # an angle is a product in float32
    np.testing.assert_allclose(inverse_rope(got, positions, how), x, atol=1e-6)
    assert rope(x.astype(jnp.bfloat16), positions, how).dtype == jnp.bfloat16


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("d", [64, 72, 68])
def test_a_kernel_rotates_rows_of_whole_vectors(d):
    """Rows that do not begin at a multiple of 16 bytes are XLA's."""
    x, at = jax.ShapeDtypeStruct((1, 4, 2, d), jnp.bfloat16), jax.ShapeDtypeStruct((1, 4), jnp.int32)
    lowered = jax.jit(lambda x, at: rope(x, at, Rope(64))).trace(x, at).lower(lowering_platforms=("cuda",))
    assert ("dsv4_fmha_rope" in lowered.as_text()) == (d % 8 == 0)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_rope_of_normed_on_a_mesh(kind):
    """Where there is a kernel, every device turns the heads and queries that it has; the same under vmap."""
    how, x = Rope(64), hidden(4, 6)[..., None, :1] * jnp.ones((4, 6, 4, 512), jnp.bfloat16)
    x = x + hidden(1, 6, seed=3)[0, :, None, :1].astype(jnp.bfloat16) * jnp.arange(512, dtype=jnp.bfloat16)
    at = jnp.arange(6, dtype=jnp.int32)[None]

    def pull(x):
        y, vjp = jax.vjp(lambda x: inverse_rope(rope_of_normed(x, at, how, 1e-6) * 2, at + 3, how), x)
        return y, *vjp(y)

    want = jax.jit(pull)(x)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(kind,) * 2, devices=jax.devices("cpu")[:4])
    put = jax.device_put(x, NamedSharding(mesh, P("data", None, "tensor")))
    program = jax.jit(pull).lower(put).compile()
    assert not collectives(program)
    mapped = jax.jit(jax.vmap(pull))(x[:, None])
    for got, one, exactly in zip(program(put), mapped, want, strict=True):
        np.testing.assert_array_equal(got.astype(jnp.float32), exactly.astype(jnp.float32))
        np.testing.assert_array_equal(one[:, 0].astype(jnp.float32), exactly.astype(jnp.float32))


@pytest.mark.parametrize("positions", [jnp.zeros((1, 5), jnp.int32), jnp.zeros((1, 6)), jnp.zeros(6, jnp.int32)])
def test_rope_errors(positions):
    with pytest.raises(ValueError, match=r"rope: positions: got .*, wanted int32\[b=2 or 1, s=6\]"):
        rope(hidden(2, 6), positions, Rope(8))


def test_hadamard():
    x = hidden(1, 3)[0, :, :16]
    np.testing.assert_allclose(hadamard(x), np.asarray(x) @ scipy.linalg.hadamard(16) / 4, atol=1e-6)
    with pytest.raises(ValueError, match=r"got float32\[1, 3, 24\], wanted .*\[..., d\], d a power of two"):
        hadamard(hidden(1, 3))


def test_init():
    """The result is about as large as the input."""
    layer = model("v4")[0][1]
    params = jax.jit(layer.init)(jax.random.key(0))
    y = jax.jit(lambda p, x: layer(p, x).y)(params, hidden(4, 24))
    assert 0.1 < jnp.sqrt(jnp.mean(y**2)) < 2


def test_errors():
    layers, params = model("v4")
    layer, p = layers[1], params[1]
    with pytest.raises(ValueError, match=r"DSV4Attention: x: got float32\[2, 6, 23\], wanted .*hidden=24"):
        layer(p, hidden(2, 6)[..., :23])
    with pytest.raises(ValueError, match="DSV4Attention: params: got no wq_b, wanted what `init` makes"):
        layer({name: x for name, x in p.items() if name != "wq_b"}, hidden(2, 6))
    with pytest.raises(ValueError, match="start: got 3, wanted 0, and no lengths, without a cache"):
        layer(p, hidden(2, 6), start=3)
    ids = jnp.zeros((2, 6), jnp.int32)
    with pytest.raises(ValueError, match=r"segment_ids: got int32\[2, 6\], wanted None with a cache"):
        layer(p, hidden(2, 6), layer.cache(2, 8, jnp.float32), segment_ids=ids)
    in_two_levels, its = (x[3] for x in model("v4.1"))
    with pytest.raises(NotImplementedError, match=r"segment_ids: got int32\[2, 6\], wanted None, with two levels"):
        in_two_levels(its, hidden(2, 6), segment_ids=ids)
    with pytest.raises(TypeError, match=r"cache: got .*, wanted a LayerCache"):
        layer(p, hidden(2, 6), Cache.zeros(2, 6, 16, jnp.float32))
    with pytest.raises(
        ValueError, match=r"window_cache: got room for 5 entries of a sequence, wanted window \+ s_q - 1"
    ):
        layer.step(p, hidden(2, 2), layer.cache(2, 8, jnp.float32), lengths=2)


def test_index_keys_of_an_fp8_cache():
    """They are packed where a kernel takes the pages; a step then quantizes its queries."""
    sizes = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_n_heads": 16}
    layer = from_config(MODELS["v4"] | sizes)[1]
    fp8, table = jnp.float8_e4m3fn, jnp.zeros((2, 2), jnp.int32)
    assert (layer.cache(2, 90, fp8).keys.layout, layer.cache(2, 90, fp8).keys.capacity) == ("index_fp8", 24)
    assert layer.cache(2, 256, fp8, block_table=table, page_tokens=128).keys.layout == "index_fp8"
    for cache in (layer.cache(2, 90), layer.cache(2, 32, fp8, block_table=table, page_tokens=16)):
        assert cache.keys.entries.dtype == jnp.bfloat16
    x = jnp.zeros((2, 1, layer.hidden), jnp.bfloat16)
    out = jax.eval_shape(lambda p, c: layer.step(p, x, c, lengths=1), shapes(layer), layer.cache(2, 90, fp8))
    assert out.cache.keys.entries.dtype == jnp.uint8
