"""Layers that are handed their choice of entries: replayed from generation, or another layer's."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha.layers import Shared
from tests.test_layers import hidden, model, random_params, stack

CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def replayed(name, x, choices):
    """A prompt through a model whose layers get these choices, by their numbers."""

    def run(layer, p, x, shared, _):
        return layer(p, x, shared=shared, indices=choices.get(run.i))

    layers, params = model(name)
    shared = Shared()
    for run.i, (layer, p) in enumerate(zip(layers, params, strict=True)):
        out = run(layer, p, x, shared, None)
        x, shared = x + out.y, shared.after(out)
    return x


@pytest.mark.parametrize("name", ["v4", pytest.param("v4.1", marks=pytest.mark.slow)])
def test_replay_of_generation(name):
    """A chunk and steps leave the choice of each token; a prompt that is given them sees the same entries."""
    layers, _ = model(name)
    x, n = hidden(2, 20), 13
    caches = [layer.cache(2, 20, jnp.float32) for layer in layers]
    kept = {i: [] for i, layer in enumerate(layers) if layer.indexer}

    def observed(f):
        """A pass over the model that also returns the choices, in the order of the layers that choose."""

        def run(x, caches, **at):
            found = []

            def call(layer, p, x, shared, cache, **at):
                out = getattr(layer, f)(p, x, cache, shared, **at)
                found.append(out.indices)
                return out

            y, caches = stack(name, call)(x, caches, **at)
            return y, caches, [i for i in found if i is not None]

        return jax.jit(run)

    y, caches, found = observed("__call__")(x[:, :n], caches, start=0)
    said = [y]
    step = observed("step")
    for i, chosen in zip(kept, found, strict=True):
        kept[i].append(chosen)
    for at in range(n + 1, 21):
        y, caches, found = step(x[:, at - 1 : at], caches, lengths=at)
        said.append(y)
        for i, chosen in zip(kept, found, strict=True):
            kept[i].append(chosen)
    choices = {i: jnp.concatenate(x, 1) for i, x in kept.items()}
    replay = jax.jit(functools.partial(replayed, name))
    got = replay(x, choices)
    np.testing.assert_allclose(got, jnp.concatenate(said, 1), **CLOSE)
    other = {i: jnp.zeros_like(x).at[..., 1:].set(-1) for i, x in choices.items()}
    assert np.abs(replay(x, other) - got).max() > 1e-2


@pytest.mark.parametrize("method", ["__call__", "step"])
def test_a_given_choice_over_a_cache(method):
    """Entries that are not past are absent, whatever is given; what is given comes back."""
    layers, params = model("v4")
    layer, p, x = layers[1], params[1], hidden(2, 14)
    cache = jax.jit(layer)(p, x[:, :12], layer.cache(2, 16, jnp.float32, steps=2)).cache
    at = {"lengths": jnp.array([14, 14])} | ({"start": 12} if method == "__call__" else {})
    given = jnp.array([[[2, 0], [2, 3]], [[-1, 1], [9, 0]]], jnp.int32)
    f = jax.jit(lambda indices: getattr(layer, method)(p, x[:, 12:], cache, indices=indices, **at))
    out = f(given)
    np.testing.assert_array_equal(out.indices, given)
    past = jnp.array([[[2, 0], [2, -1]], [[-1, 1], [-1, 0]]], jnp.int32)  # 13 and 14 tokens have 3 entries
    past = jnp.pad(past, ((0, 0), (12, 0), (0, 0)), constant_values=-1)
    want = jax.jit(lambda indices: layer(p, x, indices=indices).y)(past)
    np.testing.assert_allclose(out.y, want[:, 12:], **CLOSE)
    own = f(None)
    jax.tree.map(functools.partial(np.testing.assert_allclose, **CLOSE), out.cache, own.cache)


def test_gradient_and_loss_of_a_replay():
    """They are those of the layer's own choice, if that is given; the loss is of the given entries."""
    layers, params = model("v4")
    layer, p, x = layers[1], params[1], hidden(2, 24)
    chosen = jax.jit(layer)(p, x).indices

    def loss(p, indices):
        out = layer(p, x, indices=indices)
        return (out.y**2).sum(), layer.indexer_loss(p, out).sum()

    @jax.jit
    def gradients(indices):
        _, vjp = jax.vjp(lambda p: loss(p, indices), p)
        return [vjp(of)[0] for of in ((1.0, 0.0), (0.0, 1.0))]

    own, given, fewer = map(gradients, (None, chosen, chosen.at[..., 0].set(-1)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, **CLOSE), given, own)
    for i, (one, other) in enumerate(zip(own, fewer, strict=True)):
        assert not np.allclose(one["compressor"]["w"], other["compressor"]["w"]) or i == 1
        trained = [np.any(x) for x in jax.tree.leaves(one["indexer"])]
        assert all(trained) if i else not any(trained)
        assert not np.allclose(one["indexer"]["wq_b"], other["indexer"]["wq_b"]) or i == 0


@pytest.mark.parametrize("name", ["v4", pytest.param("v4.1", marks=pytest.mark.slow)])
def test_indexers_alone_learn_from_their_loss(name):
    """Neither the rest of their layers, nor layers before them, have a gradient by it."""
    layers, params = model(name)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradient(params, x):
        loss, shared = 0.0, Shared()
        for layer, p in zip(layers, params, strict=True):
            out = layer(p, x, shared=shared)
            loss += layer.indexer_loss(p, out, shared).sum() if layer.indexer is not None else 0.0
            x, shared = x + out.y, shared.after(out)
        return loss

    of_params, of_x = gradient(params, hidden(1, 24))
    assert not of_x.any()
    for path, dx in jax.tree_util.tree_leaves_with_path(of_params):
        assert np.any(dx) == ("indexer" in [getattr(key, "key", None) for key in path]), path


def test_a_loss_without_a_choice():
    layers, params = model("v4")
    layer, p, x = layers[1], params[1], hidden(2, 9)
    loss = layer.indexer_loss(p, jax.jit(layer)(p, x[:, :3]))
    assert loss.shape == (2, 3) and not loss.any()
    with pytest.raises(ValueError, match="indexer_loss: layer: got one without an indexer, wanted one that chooses"):
        layers[0].indexer_loss(params[0], layers[0](params[0], x))
    out = jax.eval_shape(lambda: layer(p, x, layer.cache(2, 9, jnp.float32)))
    with pytest.raises(ValueError, match="indexer_loss: out: got that of a chunk or a step, wanted a prompt's"):
        layer.indexer_loss(p, out)
    with pytest.raises(TypeError, match=r"indexer_loss: out: got float32\[2, 9, 24\], wanted an Output"):
        layer.indexer_loss(p, x)


def test_the_loss_of_a_layer_whose_keys_another_made():
    """V4.1's: of the keys and entries that it was given."""
    layers, params = model("v4.1")
    x, shared = hidden(1, 12), Shared()
    for layer, p in zip(layers, params, strict=True):
        out = jax.jit(layer)(p, x, shared=shared)
        if layer.indexer is not None:
            loss = layer.indexer_loss(p, out, shared)
            assert loss.shape == (1, 12) and float(loss.max()) > 0
        x, shared = x + out.y, shared.after(out)


def test_a_layer_that_never_chooses():
    """Without an indexer a V4 layer takes the choice of the one before it, as an argument or in `Shared`."""
    layers, params = model("v4")
    first, x = layers[1], hidden(2, 24)
    second = dataclasses.replace(first, indexer=None)
    out = jax.jit(first)(params[1], x)
    own = random_params(second, 5)
    want = jax.jit(first)({**random_params(first, 5), **own}, x, indices=out.indices).y
    follow = jax.jit(second)
    np.testing.assert_allclose(follow(own, x, shared=Shared().after(out)).y, want, **CLOSE)
    cache = second.cache(2, 24, jnp.float32)
    assert cache.keys is None
    np.testing.assert_allclose(follow(own, x, cache, indices=out.indices).y, want, **CLOSE)


def test_choices_of_packed_documents():
    """Entries of all documents of a row are counted on; those of other documents are absent."""
    layers, params = model("v4")
    layer, p, x = layers[1], params[1], hidden(1, 24)
    ids = jnp.repeat(jnp.arange(2), jnp.array([9, 15]))[None]
    out = jax.jit(lambda x: layer(p, x, segment_ids=ids))(x)
    more = jnp.concatenate([out.indices, jnp.zeros((1, 24, 1), jnp.int32)], 2)
    again = jax.jit(lambda indices: layer(p, x, segment_ids=ids, indices=indices))(more)
    np.testing.assert_allclose(again.y[:, 9:], out.y[:, 9:], **CLOSE)  # entry 0 is of the first document
    alone = jax.jit(layer)(p, x[:, 9:]).indices
    np.testing.assert_array_equal(out.indices[:, 9:], jnp.where(alone < 0, -1, alone + 9 // 4))


def test_errors():
    layers, params = model("v4")
    x, indices = hidden(2, 8), jnp.zeros((2, 8, 3), jnp.int32)
    with pytest.raises(ValueError, match=r"indices: .*wanted None in a layer that sees no chosen entries"):
        layers[0](params[0], x, indices=indices)
    with pytest.raises(ValueError, match=r"indices: got int32\[2, 8, 3\], wanted int32\[b=2, s=7, n\]"):
        layers[1](params[1], x[:, :7], indices=indices)
    with pytest.raises(ValueError, match=r"indices: got float32"):
        layers[1].step(params[1], x[:, :1], layers[1].cache(2, 9, jnp.float32), lengths=1, indices=indices[:, :1] * 1.0)


@pytest.mark.parametrize("form", ["prompt", pytest.param("chunk", marks=pytest.mark.slow), "step"])
def test_a_layer_that_chooses_blocks_chooses_within_them(form):
    """Enough blocks have all of the greatest entries, so it chooses what it would choose of everything."""
    layers, params = model("v4.1")
    layer, p, (x, n) = layers[3], params[3], (hidden(2, 30), 30)
    assert layer.indexer.topk == layer.indexer.candidate_blocks == 3  # too few blocks

    @functools.partial(jax.jit, static_argnums=0)
    def chosen(count, x):
        of = dataclasses.replace(layer, indexer=dataclasses.replace(layer.indexer, candidate_blocks=count))
        if form == "prompt":
            return of(p, x).indices
        before = of(p, x[:, : n - 4], of.cache(2, n, jnp.float32, steps=4)).cache
        return (
            of(p, x[:, -4:], before, start=n - 4) if form == "chunk" else of.step(p, x[:, -4:], before, lengths=n)
        ).indices

    some = np.asarray(chosen(4, x))
    np.testing.assert_array_equal(some, chosen(0, x))
    assert (some[:, -1] >= 0).all()
