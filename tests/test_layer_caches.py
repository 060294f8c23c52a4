"""A layer's caches: updated in place, and packed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha import EXPORT_CHECKS
from jax_dsv4_fmha._host import library
from jax_dsv4_fmha.layers import Shared, from_config
from tests.helpers import assert_in_place
from tests.test_layers import MODELS, alone, hidden, model, random_params, shapes, stack


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


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_rings_are_all_but_pages(dtype):
    """A sequence that gets a snapshot has what the other had then, to the bit, and nothing else changes."""
    rng, table = np.random.default_rng(0), np.arange(9, dtype=np.int32).reshape(3, 3)
    for layer in from_config(MODELS["v4"] | {"head_dim": 512}):
        cache = layer.cache(3, 48, dtype, block_table=table, page_tokens=16, pages=9)
        cache = jax.tree.map(lambda x: jnp.asarray(rng.integers(0, 99, x.shape)).astype(x.dtype), cache)
        snapshot = jax.jit(lambda cache: cache.rings().take(jnp.array([0])))(cache)
        got = jax.jit(lambda cache, snapshot: cache.put(jnp.array([2]), snapshot))(cache, snapshot)
        paged = {name for name in ("compressed", "keys") if getattr(cache, name) is not None}
        assert {name for name, part in snapshot._asdict().items() if part is None} >= paged
        for name, part in cache._asdict().items():
            for x, y in zip(jax.tree.leaves(part), jax.tree.leaves(getattr(got, name)), strict=True):
                x, y = (np.asarray(z).view(np.uint8) for z in (x, y))
                np.testing.assert_array_equal(y, x if name in paged else np.stack([x[0], x[1], x[0]]))


@pytest.mark.parametrize(
    "dtype, layouts", [("float8_e4m3fn", ("v41_fp8", "v41_fp8")), ("float4_e2m1fn", ("v41_fp8", "v41_fp4"))]
)
def test_packed_caches_of_v41(dtype, layouts):
    """Its own layouts; a chunk and steps over them are what they are over bfloat16, or near it where entries are in 8
    bits."""
    layers = from_config(MODELS["v4.1"] | {"head_dim": 512})
    layer, x = layers[1], hidden(2, 9).astype(jnp.bfloat16)
    p = random_params(layer, 0)
    got, want = (
        jax.jit(lambda x, c: layer(p, x, c)[:2])(x, layer.cache(2, 12, kind)) for kind in (dtype, jnp.bfloat16)
    )
    assert (got[1].window.layout, got[1].compressed.layout) == layouts
    assert got[1].window.is_packed and got[1].compressed.is_packed
    assert not got[1].keys.is_packed  # whose d is no layout's
    error = jnp.linalg.norm((got[0] - want[0]).astype(jnp.float32)) / jnp.linalg.norm(want[0].astype(jnp.float32))
    assert 0 < error < 0.3 if dtype == "float8_e4m3fn" else error == 0, error
    if dtype == "float4_e2m1fn":
        step = jax.jit(lambda x, c, n: layer.step(p, x, c, lengths=n)[:2])
        (_, one), (_, other) = got, want
        for n in (10, 11, 12):
            (y, one), (same, other) = (step(x[:, n - 10 : n - 9], c, n) for c in (one, other))
            np.testing.assert_array_equal(y, same)


@pytest.mark.slow
def test_fp4_caches_of_v4():
    """Entries in "v4_fp4", latents in "v4_fp8": steps equal a chunk, and both are near what bfloat16 caches give."""
    layer = from_config(MODELS["v4"] | {"head_dim": 512})[1]
    p, x = random_params(layer, 0), hidden(2, 21).astype(jnp.bfloat16)
    step = jax.jit(lambda x, c, n: layer.step(p, x, c, lengths=n)[:2], donate_argnums=1)
    chunk = jax.jit(lambda x, c: layer(p, x, c)[:2])
    cache = layer.cache(2, 24, jnp.float4_e2m1fn)
    assert (cache.window.layout, cache.compressed.layout) == ("v4_fp8", "v4_fp4")
    assert cache.compressed.entries.shape[1] == 368 * cache.compressed.page
    kinds = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float4_e2m1fn
    exact, fp8, fp4 = (chunk(x, layer.cache(2, 24, kind))[0].astype(jnp.float32) for kind in kinds)
    for n in range(1, 22):
        y, cache = step(x[:, n - 1 : n], cache, jnp.int32(n))
        assert _off(y[:, 0], fp4[:, n - 1]) < 2e-2, n
    assert 0 < _off(fp8, exact) < 4e-2 and _off(fp8, exact) < _off(fp4, exact) < 0.15


def _off(x, wanted):
    return jnp.linalg.norm(x.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)


@pytest.mark.fuzz
def test_many_steps_of_v41():
    """200 steps of a ragged batch over pages, past every boundary, after chunks; one sequence begins with a step. They
    compute with the rounded numbers of the whole sequences."""
    layers, _ = model("v4.1")
    x, lengths = hidden(3, 260), np.array([57, 0, 30], np.int32)
    want = np.asarray(jax.jit(stack("v4.1", lambda layer, p, x, shared, _: layer(p, x, shared=shared)))(x)[0])
    table = jnp.asarray(np.random.default_rng(1).permutation(51).reshape(3, 17), jnp.int32)
    caches = [layer.cache(3, 260, jnp.float32, block_table=table) for layer in layers]
    chunk, step = (
        jax.jit(
            stack("v4.1", lambda layer, p, x, shared, cache, f=f, **at: getattr(layer, f)(p, x, cache, shared, **at)),
            donate_argnums=1,
        )
        for f in ("__call__", "step")
    )
    for at in (0, 32):
        _, caches = chunk(x[:, at : at + 32], caches, start=at, lengths=jnp.minimum(lengths, at + 32))
    errors = []
    for _ in range(200):
        lengths = lengths + 1
        y, caches = step(x[jnp.arange(3), lengths - 1][:, None], caches, lengths=jnp.asarray(lengths))
        errors.append(np.abs(np.asarray(y[:, 0]) - want[np.arange(3), lengths - 1]).max(-1) / np.abs(want).max())
    assert np.median(errors) < 1e-6 and np.max(errors) < 1e-3, (np.median(errors), np.max(errors))


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


def test_index_keys_of_an_fp8_cache():
    """They are packed where a kernel takes the pages; a step then quantizes its queries."""
    sizes = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_n_heads": 32}
    layer = from_config(MODELS["v4"] | sizes)[1]
    fp8, table = jnp.float8_e4m3fn, jnp.zeros((2, 2), jnp.int32)
    assert (layer.cache(2, 90, fp8).keys.layout, layer.cache(2, 90, fp8).keys.capacity) == ("index_fp8", 24)
    assert layer.cache(2, 256, fp8, block_table=table, page_tokens=128).keys.layout == "index_fp8"
    for cache in (layer.cache(2, 90), layer.cache(2, 32, fp8, block_table=table, page_tokens=16)):
        assert cache.keys.entries.dtype == jnp.bfloat16
    x = jnp.zeros((2, 1, layer.hidden), jnp.bfloat16)
    out = jax.eval_shape(lambda p, c: layer.step(p, x, c, lengths=1), shapes(layer), layer.cache(2, 90, fp8))
    assert out.cache.keys.entries.dtype == jnp.uint8


def test_index_keys_that_are_not_packed_are_told(caplog):
    """It is the default in pages that no kernel takes; who asks for a format gets it."""
    sizes = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    layer = from_config(MODELS["v4"] | sizes)[1]
    how = {"block_table": jnp.zeros((2, 2), jnp.int32), "page_tokens": 64}
    assert layer.cache(2, 128, jnp.float8_e4m3fn, **how).keys.entries.dtype == jnp.bfloat16
    (said,) = caplog.messages
    assert said == (
        "DSV4Attention.cache: index keys stay in bfloat16 in pages of 16 entries, since kernels take packed ones in"
        " pages of a multiple of 32; page_tokens, or keys, changes this"
    )
    caplog.clear()
    for keys in (jnp.bfloat16, jnp.float8_e4m3fn):
        layer.cache(2, 128, jnp.float8_e4m3fn, keys=keys, **how)
    layer.cache(2, 256, jnp.float8_e4m3fn, **how | {"page_tokens": 128})
    assert not caplog.messages


WIDE = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}


def passes(layers, params, x, shared_by, caches, method, **at):
    """A pass over layers with their caches: y, and the caches after it."""
    shared, kept = shared_by(), []
    for layer, p, cache in zip(layers, params, caches, strict=True):
        out = getattr(layer, method)(p, x, cache, shared, **at)
        x, shared = x + out.y, shared.after(out)
        kept.append(out.cache)
    return x, kept


@pytest.mark.slow
def test_index_keys_of_v41_in_4_bits():
    """Bit by bit a model's chunk and steps are what they are over keys in bfloat16, in one level and in two: packed
    caches have the keys in 4 bits, because they lose nothing so."""
    layers = from_config(MODELS["v4.1"] | WIDE)
    params, x = [random_params(layer, i) for i, layer in enumerate(layers)], hidden(2, 24).astype(jnp.bfloat16)
    table = jnp.asarray(np.random.default_rng(3).permutation(4).reshape(2, 2), jnp.int32)
    paged = {"block_table": table, "page_tokens": 64}
    chunk, step = (
        jax.jit(functools.partial(passes, layers, params, shared_by=Shared, method=f)) for f in ("__call__", "step")
    )
    results = []
    for keys, how in ((None, paged), (None, {}), (jnp.bfloat16, {})):
        caches = [layer.cache(2, 64, jnp.float4_e2m1fn, keys=keys, **how) for layer in layers]
        of_keys = [c.keys for c in caches if c.keys is not None]
        assert len(of_keys) == 2 and all(k.is_packed == (keys is None) for k in of_keys)
        assert keys is not None or all(k.layout == "index_fp4" for k in of_keys)
        y, caches = chunk(x=x[:, :17], caches=caches, lengths=jnp.array([17, 11], jnp.int32))
        ys = [y[0, :17], y[1, :11]]
        for n in range(1, 8):
            y, caches = step(x=x[:, 16 + n : 17 + n], caches=caches, lengths=jnp.array([17, 11]) + n)
            ys.append(y)
        results.append([np.asarray(y) for y in ys])
    for *got, want in zip(*results, strict=True):
        for y in got:
            np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize("name, keys", [("v4.1", "float4_e2m1fn"), ("v4.1", "float8_e4m3fn"), ("v4", "float4_e2m1fn")])
def test_index_keys_in_a_layout_of_their_own(name, keys):
    """Beside float32 caches. Steps choose what a chunk chooses; in the layout in which the model rounds its keys, what
    whole sequences choose, and else nearly."""
    sizes = MODELS[name] | WIDE | {"index_topk": 3}
    layer = from_config(sizes)[1]
    p, x = random_params(layer, 0), hidden(2, 33)
    whole = jax.jit(lambda x: layer(p, x)[0])(x)
    cache = layer.cache(2, 33, jnp.float32, keys=keys)
    assert cache.keys.layout == {"float4_e2m1fn": "index_fp4", "float8_e4m3fn": "index_fp8"}[keys]
    assert cache.keys.is_packed and cache.compressed.entries.dtype == jnp.float32
    at_once = jax.jit(lambda x, c: layer(p, x, c)[0])(x, cache)
    step = jax.jit(lambda x, c, n: layer.step(p, x, c, lengths=n)[:2], donate_argnums=1)
    for n in range(1, 34):
        y, cache = step(x[:, n - 1 : n], cache, jnp.int32(n))
        np.testing.assert_allclose(y[:, 0], at_once[:, n - 1], rtol=2e-5, atol=2e-4)
    same = jnp.all(jnp.isclose(at_once, whole, rtol=2e-5, atol=2e-4), -1)
    assert jnp.mean(same) == 1 if (name, keys) == ("v4.1", "float4_e2m1fn") else 0.5 < jnp.mean(same) < 1


def test_who_reads_index_keys_in_4_bits(monkeypatch):
    """A step's kernel reads pages; a chunk's has keys that were unpacked for all its queries."""
    monkeypatch.setattr(library, "local_architectures", lambda: ("sm_90a",))
    layer = from_config(MODELS["v4.1"] | WIDE | {"index_n_heads": 32})[1]
    cache = jax.eval_shape(lambda: layer.cache(2, 4096, jnp.float4_e2m1fn))

    def calls(f, s):
        x = jax.ShapeDtypeStruct((2, s, layer.hidden), jnp.bfloat16)
        exported = jax.export.export(jax.jit(f), platforms=["cuda"], disabled_checks=EXPORT_CHECKS)
        text = exported(shapes(layer), x, cache).mlir_module()
        names = ("lightning_indexer", "paged_lightning_indexer")
        return [text.count(f"custom_call @dsv4_fmha_{name}(") for name in names]

    assert calls(lambda p, x, c: layer(p, x, c, start=8)[:2], 32) == [1, 0]
    assert calls(lambda p, x, c: layer.step(p, x, c, lengths=40)[:2], 1) == [0, 1]


def test_formats_of_index_keys():
    """The defaults, and what is refused."""
    v41, v4 = from_config(MODELS["v4.1"] | WIDE)[1], from_config(MODELS["v4"] | WIDE)[1]
    trained = from_config(MODELS["v4"] | WIDE, fake_quantize=True)[1]
    not_rounded = from_config(MODELS["v4.1"] | WIDE, fake_quantize=False)[1]
    fp8, fp4, small = jnp.float8_e4m3fn, jnp.float4_e2m1fn, from_config(MODELS["v4.1"])[1]
    for layer, dtype, keys, layout in (
        (v41, fp4, None, "index_fp4"), (v41, fp8, None, "index_fp4"), (v41, jnp.bfloat16, None, None),
        (v41, jnp.float16, fp4, "index_fp4"), (v41, fp4, jnp.bfloat16, None), (not_rounded, fp8, None, None),
        (v4, fp4, None, "index_fp8"), (v4, fp8, fp4, "index_fp4"), (trained, fp8, None, "index_fp4"),
        (small, jnp.float32, jnp.float32, None),
    ):  # fmt: skip
        made = layer.cache(1, 32, dtype, keys=keys).keys
        assert (made.layout if made.is_packed else None) == layout, (dtype, keys)
    table = jnp.zeros((2, 2), jnp.int32)
    asked = v41.cache(2, 32, jnp.bfloat16, keys=fp4, block_table=table, page_tokens=16).keys
    assert asked.is_packed and asked.page == 8  # which XLA reads
    assert from_config(MODELS["v4.1"] | WIDE)[0].cache(1, 32, keys=fp4).keys is None  # a layer without any
    with pytest.raises(ValueError, match=r"keys: got float16, wanted None, bfloat16, float8_e4m3fn or float4_e2m1fn"):
        v41.cache(1, 32, keys=jnp.float16)
    with pytest.raises(TypeError, match=r"keys: got index_fp4, wanted None, bfloat16, float8_e4m3fn or float4"):
        v41.cache(1, 32, keys="index_fp4")
    with pytest.raises(ValueError, match=r"keys: got float4_e2m1fn, wanted float32 or None for .* of d=32"):
        small.cache(1, 32, jnp.float32, keys=fp4)
