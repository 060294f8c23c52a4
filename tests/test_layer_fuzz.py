"""Layers in random histories: chunks and steps of ragged sequences, drafts that are taken back, idle places, pages, and
places that another sequence takes; every token's result is that of whole sequences. And random documents side by side,
whose results are those of each alone. Caches are donated.

`pytest -m fuzz` draws them; KEPT holds histories that failed once, and every test run tries them.
"""

import functools
import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_dsv4_fmha.layers import Shared, from_config
from tests.test_layers import MODELS, SMALL, random_params

LENGTH, STEPS, PLACES = 40, 4, 3
MODELS_HERE = MODELS | {
    "long blocks": SMALL | {"num_hidden_layers": 1, "layer_types": ["heavily_compressed_attention"],
                            "compress_rates": {"heavily_compressed_attention": 16}},
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """What every place does in a call of so many tokens: how many are right; the rest of a step is a draft that is
    taken back, and that of a chunk padding. None is an idle place, and "new" one that begins another sequence.
    """

    is_step: bool
    count: int
    right: tuple[int | str | None, ...]


@dataclass(frozen=True)
class History:
    model: str
    calls: tuple[Call, ...]
    paged: bool = False
    seed: int = 0


@functools.cache
def model(name):
    """Layers, parameters, x, and the results of whole sequences."""
    layers = from_config(MODELS_HERE[name])
    params = [random_params(layer, i) for i, layer in enumerate(layers)]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((PLACES, LENGTH, layers[0].hidden)), jnp.float32)
    shared, whole = Shared(), []
    for layer, p in zip(layers, params, strict=True):
        out = layer(p, x, shared=shared)
        shared, whole = shared.after(out), [*whole, np.asarray(out.y)]
    return layers, params, np.asarray(x), whole


@functools.cache
def program(name, is_step):
    layers, params, *_ = model(name)

    def run(caches, x, start, lengths):
        shared, ys, kept = Shared(), [], []
        for layer, p, cache in zip(layers, params, caches, strict=True):
            at = {"lengths": lengths} | ({} if is_step else {"start": start})
            out = (layer.step if is_step else layer)(p, x, cache, shared, **at)
            shared, ys, kept = shared.after(out), [*ys, out.y], [*kept, out.cache]
        return ys, kept

    return jax.jit(run, donate_argnums=0)


def check(history):
    layers, _, x, whole = model(history.model)
    rng = np.random.default_rng(history.seed)
    table = jnp.asarray(rng.permutation(3 * PLACES).reshape(PLACES, 3), jnp.int32) if history.paged else None
    pages = {"block_table": table, "page_tokens": 16} if history.paged else {}
    caches = [layer.cache(PLACES, LENGTH + STEPS, jnp.float32, steps=STEPS, **(pages if layer.ratio else {}))
              for layer in layers]  # fmt: skip
    at = np.zeros(PLACES, int)
    for call in history.calls:
        s = call.count
        given_x = rng.standard_normal((PLACES, s, x.shape[2])).astype(np.float32)
        right, start, lengths = np.zeros(PLACES, int), np.zeros(PLACES, np.int32), np.zeros(PLACES, np.int32)
        for n, wanted in enumerate(call.right):
            if wanted is None:
                start[n] = rng.integers(0, 99)  # any number will do, as the place has no tokens
                continue
            if wanted == "new":
                at[n], wanted = 0, s
            right[n] = min(wanted, s, LENGTH - at[n])
            start[n] = at[n]
            lengths[n] = at[n] + (s if call.is_step else right[n])
            given_x[n, : right[n]] = x[n, at[n] : at[n] + right[n]]
        ys, caches = program(history.model, call.is_step)(caches, given_x, start, lengths)
        for y, of_whole in zip(ys, whole, strict=True):
            for n in range(PLACES):
                want = of_whole[n, at[n] : at[n] + right[n]]
                np.testing.assert_allclose(y[n, : right[n]], want, atol=2e-4, rtol=2e-4)
        at += right


def calls():
    place = st.one_of(st.none(), st.integers(1, 12), st.sampled_from(["new"] + [12] * 6))
    places = st.tuples(*[place] * PLACES)
    step = st.builds(Call, st.just(True), st.integers(1, STEPS), places)
    chunk = st.builds(Call, st.just(False), st.sampled_from([1, 5, 12]), places)
    return st.lists(st.one_of(step, step, chunk), min_size=2, max_size=10).map(tuple)


KEPT = [
    # a place that is idle in a step of others, and then goes on
    History("long blocks", (Call(False, 12, (12, 12, 12)), Call(True, 1, (1, None, 1)), Call(False, 5, (5, 5, 5)))),
    History("long blocks", (Call(False, 12, (12, 9, 2)), Call(True, 4, (1, 4, 2)), Call(True, 4, (3, 4, 4)),
                            Call(True, 4, (4, "new", 1)), Call(False, 12, (12, 12, 12)))),
    # an idle place of a chunk, whatever its start
    History("long blocks", (Call(False, 12, (12, 12, 12)), Call(False, 5, (5, None, 5)), Call(False, 5, (5, 5, 5)))),
    History("v4", (Call(False, 12, (12, 5, 1)), Call(True, 4, (1, 4, None)), Call(True, 3, (3, 1, 2)),
                   Call(False, 5, ("new", 5, 2)), Call(True, 1, (1, 1, 1))), paged=True),
    History("v4.1", (Call(False, 5, (5, 5, 4)), Call(True, 2, (2, 1, 2)), Call(False, 5, (3, None, 5)))),
]  # fmt: skip


@pytest.mark.parametrize("history", KEPT, ids=lambda x: x.model)
def test_kept(history):
    check(history)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", sorted(MODELS_HERE))
@settings.get_profile("fuzz")
@given(data=st.data())
def test_fuzz(name, data):
    check(data.draw(st.builds(History, st.just(name), calls(), st.booleans(), st.integers(0, 99))))


@functools.cache
def alone(name, i):
    """A layer's results for sequences without documents."""
    layers, params, *_ = model(name)
    return jax.jit(lambda x: layers[i](params[i], x).y)


@functools.cache
def packed(name, i):
    layers, params, *_ = model(name)
    return jax.jit(lambda x, ids: layers[i](params[i], x, segment_ids=ids).y)


def check_documents(name, rows):
    """Rows of documents, by their lengths; what is left of a row is one more."""
    layers, _, x, _ = model(name)
    ids, begins = np.zeros((PLACES, LENGTH), np.int32), []
    for n, lengths in enumerate(rows):
        ends = np.minimum(np.cumsum(lengths), LENGTH).tolist()
        bounds = sorted({0, *ends, LENGTH})
        begins += [(n, start, stop) for start, stop in itertools.pairwise(bounds)]
        for k, end in enumerate(ends):
            ids[n, end:] = k + 1
    for i in range(len(layers)):
        got = np.asarray(packed(name, i)(x, ids))
        for n, start, stop in begins:
            after = np.zeros((1, LENGTH, x.shape[2]), np.float32)
            after[0, : stop - start] = x[n, start:stop]
            want = alone(name, i)(after)[0, : stop - start]
            np.testing.assert_allclose(got[n, start:stop], want, atol=2e-5, rtol=2e-5)


ROWS = st.tuples(*[st.lists(st.integers(1, 20), max_size=6).map(tuple)] * PLACES)


@pytest.mark.parametrize("name", ["v4", "long blocks"])
def test_documents(name):
    """As long as blocks, shorter, one token longer."""
    check_documents(name, ((8, 1, 1, 16, 3), (), (17, 15, 4, 4)))


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ["v4", "long blocks"])
@settings.get_profile("fuzz")
@given(rows=ROWS)
def test_documents_fuzz(name, rows):
    check_documents(name, rows)
