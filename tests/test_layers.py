"""Layers of DeepSeek-V4 and V4.1: whole sequences against float64, and chunks and steps against whole sequences."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import Cache
from jax_dsv4_fmha.layers import Compressor, Shared, from_config, from_state_dict, to_state_dict
from tests import layers_float64
from tests.helpers import collectives
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
    "v4.1": SMALL | {"head_dim": 32, "index_head_dim": 32, "num_hidden_layers": 6,
                     "compress_ratios": [0, 2, 2, 1, 1, 1], "kv_source_layer_ids": [1, 3],
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


@pytest.mark.parametrize("name", ["v4", pytest.param("v4.1", marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("name", ["v4", pytest.param("v4.1", marks=pytest.mark.slow)])
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


def test_a_chunk_of_some_sequences():
    """Two of three sequences are read alone, beside a row that is none: caches are as if all had been there."""
    layers, _ = model("v4")
    table, x, at = np.arange(9, dtype=np.int32).reshape(3, 3), hidden(3, 16), jnp.array([2, 0, 3])
    caches = [layer.cache(3, 48, jnp.float32, block_table=table, page_tokens=16, pages=9) for layer in layers]
    caches = jax.tree.map(lambda x: x if x.dtype == jnp.int32 else x + 0.5, caches)

    def call(layer, p, x, shared, cache, lengths):
        return layer(p, x, cache, shared, start=jnp.zeros(3, jnp.int32), lengths=lengths)

    def alone(x, caches):
        y, taken = stack("v4", call)(x[at], [cache.take(at) for cache in caches], lengths=jnp.array([9, 16, 0]))
        return y, [cache.put(at, of_some) for cache, of_some in zip(caches, taken, strict=True)]

    (y, got), (want_y, want) = (
        jax.jit(alone)(x, caches),
        jax.jit(stack("v4", call))(x, caches, lengths=jnp.array([16, 0, 9])),
    )
    np.testing.assert_allclose(y[0, :9], want_y[2, :9], rtol=2e-5, atol=2e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), got, want)


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
@pytest.mark.parametrize("name", MODELS)
def test_packed_documents(name):
    """Each document gives in one call the result that it gives alone, to the last of three layers; so do the
    gradients.
    """
    lengths = ((13, 3, 17, 7), (1, 22, 9, 8))
    ids = jnp.asarray([np.repeat([5, 2, 9, 0], n) for n in lengths], jnp.int32)
    rows = [(n, at, of) for n, row in enumerate(lengths) for at, of in zip(np.cumsum((0, *row)), row, strict=False)]
    x, dy = hidden(2, 40), hidden(2, 40, seed=1)

    def apart(x):
        return jnp.stack([jnp.pad(x[n, at : at + of], ((0, 22 - of), (0, 0))) for n, at, of in rows])

    def pull(x, dy, **how):
        run = stack(name, lambda layer, p, x, shared, _: layer(p, x, shared=shared, **how))

        def both(x, dy):
            y, vjp = jax.vjp(lambda x: run(x)[0], x)
            return y, *vjp(dy)

        # by fused multiply-adds, since the tolerance is a few units of the largest numbers here
        return jax.jit(both, compiler_options={"xla_backend_optimization_level": 1})(x, dy)

    for packed, alone in zip(pull(x, dy, segment_ids=ids), pull(apart(x), apart(dy)), strict=True):
        for i, (n, at, of) in enumerate(rows):
            units = 3 * np.spacing(np.abs(alone[i, :of]).max())  # above 2e-5 for gradients of more than 64
            np.testing.assert_allclose(packed[n, at : at + of], alone[i, :of], rtol=2e-5, atol=max(2e-5, units))


def test_documents_in_two_levels():
    """Blocks of entries begin with each document, also inside of a block that another row would have there."""
    x = hidden(3, 13)
    (source, later), (p, its) = ([x[3], x[5]] for x in model("v4.1"))

    def both(x, ids=None):
        out = source(p, x, segment_ids=ids)
        return later(its, x + out.y, shared=Shared().after(out), segment_ids=ids).y

    packed = jax.jit(both)(x.reshape(1, 39, -1), jnp.arange(39)[None] // 13)
    np.testing.assert_allclose(packed.reshape(x.shape), jax.jit(both)(x), rtol=2e-5, atol=2e-5)


def test_a_nan_stays_in_its_document():
    """A block of 4 tokens may end next to the rest of another document."""
    layers, params = model("v4")
    ids, x = jnp.asarray([[1] * 6 + [2] * 11 + [3] * 7], jnp.int32), hidden(1, 24)
    f = jax.jit(lambda x: layers[1](params[1], x, segment_ids=ids).y)
    got, want = f(jnp.where((ids == 2)[..., None], jnp.nan, x)), f(x)
    assert jnp.isnan(got[ids == 2]).all()
    np.testing.assert_array_equal(got[ids != 2], want[ids != 2])


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", [0, 1, 2], ids=["window", "sparse", "dense"])
def test_a_deterministic_gradient(kind, deterministic):
    """Attention's gradient is then by kernels that find bounds of each key's gradient first."""
    layer, p, x = of_kernels(kind)
    loss = lambda p: layer(p, x, deterministic=deterministic).y.astype(jnp.float32).sum()  # noqa: E731
    text = jax.jit(jax.grad(loss)).trace(p).lower(lowering_platforms=("cuda",)).as_text()
    assert "_bwd" in text and ("_bounds" in text) == deterministic


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
@pytest.mark.alone
@pytest.mark.usefixtures("cuda")
def test_a_long_prompt_compiles_soon():
    """XLA took minutes to compile the sums of 128 tokens where there are many blocks."""
    compressor = Compressor(4096, 512, 128)
    params = jax.eval_shape(compressor.init, jax.random.key(0))
    lowered = jax.jit(compressor).lower(params, jax.ShapeDtypeStruct((1, 65536, 4096), jnp.bfloat16))
    began = time.monotonic()
    lowered.compile()
    assert time.monotonic() - began < 60


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
    sizes = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 64}
    layer = from_config(MODELS["v4"] | sizes | {"num_attention_heads": 16})[kind]
    return layer, random_params(layer, kind), hidden(2, 90).astype(jnp.bfloat16)


def near(got, want, most):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < most, error


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
    assert set(collectives(compiled)) == {"all-reduce", "all-gather", "collective-permute"}


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
        back, want = to_state_dict(layer, layer.joined(p), "a."), checkpoint(layer, p, "a.")
        jax.tree.map(np.testing.assert_array_equal, dict(sorted(back.items())), dict(sorted(want.items())))


def test_state_dict_of_hugging_face():
    for layer, p in zip(*model("v4"), strict=True):
        tensors = to_state_dict(layer, p, "b.", hugging_face=True)
        assert "b.q_a_proj.weight" in tensors and "b.wq_a.weight" not in tensors
        jax.tree.map(np.testing.assert_array_equal, from_state_dict(layer, tensors, "b.", jnp.float32), p)
    layers, params = model("v4.1")
    with pytest.raises(ValueError, match=r"to_state_dict: params: got indexer\.k_norm, wanted a parameter that"):
        for layer, p in zip(layers, params, strict=True):
            to_state_dict(layer, p, hugging_face=True)
    with pytest.raises(TypeError, match="to_state_dict: layer"):
        to_state_dict(None, params[0])
    with pytest.raises(ValueError, match="params"):
        to_state_dict(layers[0], {})


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
    with pytest.raises(TypeError, match=r"cache: got .*, wanted a LayerCache"):
        layer(p, hidden(2, 6), Cache.zeros(2, 6, 16, jnp.float32))
    with pytest.raises(ValueError, match=r"x: got float32\[2, 2, 24\], wanted at most 1 tokens, the cache's steps"):
        layer.step(p, hidden(2, 2), layer.cache(2, 8, jnp.float32), lengths=2)
