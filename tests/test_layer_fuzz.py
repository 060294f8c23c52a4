"""Layers in random histories: chunks and steps of ragged sequences, drafts that are taken back, idle places, pages, and
places that another sequence takes; every token's result is that of whole sequences, and caches and compressors' states
have the bits of single steps. And random documents side by side, whose results are those of each alone.

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

from jax_dsv4_fmha.layers import RunningSums, Shared, from_config
from jax_dsv4_fmha.layers.pooling import last_tokens
from tests.test_layers import MODELS, SMALL, random_params

LENGTH, STEPS, PLACES = 40, 4, 3
MODELS_HERE = MODELS | {
    "long blocks": SMALL | {"num_hidden_layers": 1, "layer_types": ["heavily_compressed_attention"],
                            "compress_rates": {"heavily_compressed_attention": 16}},
}  # fmt: skip
OF_KERNELS = MODELS_HERE["v4"] | {
    "num_attention_heads": 16, "head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_n_heads": 32,
    "index_topk": 64, "compress_rates": {"heavily_compressed_attention": 16},
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """Every place's part in a call of so many tokens: how many are right; the rest of a step is a draft that is
    taken back, and that of a chunk padding. None is an idle place, and "new" one that begins another sequence.

    In a step that is not causal, tokens see each other, and all are taken back.
    """

    is_step: bool
    count: int
    right: tuple[int | str | None, ...]
    given: tuple[int, ...] | None = None
    """tokens of each place in a step; the rest is padding"""
    is_causal: bool = True


@dataclass(frozen=True)
class History:
    model: str
    calls: tuple[Call, ...]
    paged: bool = False
    seed: int = 0


@functools.cache
def model(name):
    """Layers, parameters, x, and the results of whole sequences."""
    layers = from_config(OF_KERNELS if name == "kernels" else MODELS_HERE[name])
    params = [random_params(layer, i) for i, layer in enumerate(layers)]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((PLACES, LENGTH, layers[0].hidden)), jnp.float32)
    x = x.astype(jnp.bfloat16) if name == "kernels" else x

    @jax.jit
    def whole(x):
        shared, ys = Shared(), []
        for layer, p in zip(layers, params, strict=True):
            out = layer(p, x, shared=shared)
            shared, ys = shared.after(out), [*ys, out.y]
        return ys

    return layers, params, np.asarray(x), [*map(np.asarray, whole(x))]


@functools.cache
def program(name, is_step, is_ragged=True, is_causal=True):
    layers, params, *_ = model(name)

    def run(caches, x, start, lengths):
        shared, ys, kept = Shared(), [], []
        at = (
            {"lengths": lengths} | ({"start": start} if is_ragged else {}) | ({} if is_causal else {"is_causal": False})
        )
        for layer, p, cache in zip(layers, params, caches, strict=True):
            out = (layer.step if is_step else layer)(p, x, cache, shared, **at)
            shared, ys, kept = shared.after(out), [*ys, out.y], [*kept, out.cache]
        return ys, kept

    return jax.jit(run, donate_argnums=0)


def empty(layers, paged, rng, dtype=jnp.float32):
    """Caches for as many steps as drafts that see each other need, one more than they are."""
    table = jnp.asarray(rng.permutation(3 * PLACES).reshape(PLACES, 3), jnp.int32) if paged else None
    pages = {"block_table": table, "page_tokens": 16} if paged else {}
    return [layer.cache(PLACES, LENGTH + 2 * STEPS, dtype, steps=STEPS + 1, **(pages if layer.ratio else {}))
            for layer in layers]  # fmt: skip


def check(history):
    layers, _, x, whole = model(history.model)
    rng = np.random.default_rng(history.seed)
    caches, at = empty(layers, history.paged, rng), np.zeros(PLACES, int)
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
            given = s if call.given is None else min(s, call.given[n])
            right[n] = min(wanted, given, LENGTH - at[n]) if call.is_causal else 0
            start[n] = at[n]
            lengths[n] = at[n] + (given if call.is_step else right[n])
            given_x[n, : right[n]] = x[n, at[n] : at[n] + right[n]]
        is_ragged = not call.is_step or call.given is not None
        run = program(history.model, call.is_step, is_ragged, call.is_causal)
        ys, caches = run(caches, given_x, start, lengths)
        for y, of_whole in zip(ys, whole, strict=True):
            for n in range(PLACES):
                want = of_whole[n, at[n] : at[n] + right[n]]
                np.testing.assert_allclose(y[n, : right[n]], want, atol=2e-4, rtol=2e-4)
                if call.is_step:
                    assert (y[n, lengths[n] - start[n] :] == 0).all() or not is_ragged
        at += right


def calls():
    place = st.one_of(st.none(), st.integers(1, 12), st.sampled_from(["new"] + [12] * 6))
    places = st.tuples(*[place] * PLACES)
    step = st.builds(Call, st.just(True), st.integers(1, STEPS), places)
    given = st.tuples(*[st.integers(0, STEPS)] * PLACES)
    ragged = st.builds(Call, st.just(True), st.integers(1, STEPS), places, given, st.booleans())
    chunk = st.builds(Call, st.just(False), st.sampled_from([1, 5, 12]), places)
    return st.lists(st.one_of(step, ragged, ragged, chunk), min_size=2, max_size=10).map(tuple)


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
    # drafts that see each other, then steps with different numbers of tokens
    *(
        History(name, (Call(False, 12, (12, 7, 3)), Call(True, 4, (0, 0, None), (4, 2, 1), False),
                       Call(True, 4, (2, 3, 1), (4, 3, 1)), Call(True, 3, (0, 0, 0), None, False),
                       Call(True, 4, (1, None, 4), (0, 2, 4)), Call(True, 4, (4, 2, "new"), (4, 2, 3)),
                       Call(True, 1, (1, 1, 1)), Call(False, 5, (5, 5, 5))), paged=name != "window")
        for name in ("v4", "v4.1", "long blocks")
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    "history", [pytest.param(x, id=x.model, marks=[pytest.mark.slow] * (x.model == "v4.1")) for x in KEPT]
)
def test_kept(history):
    check(history)


@jax.jit
def rows(part):
    """What a cache or a state has at every position of a sequence."""
    every = jnp.broadcast_to(jnp.arange(LENGTH + 2 * STEPS, dtype=jnp.int32), (PLACES, LENGTH + 2 * STEPS))
    return last_tokens(part, every) if isinstance(part, RunningSums) else part.take(every)


def read_later(layer, cache, n, place):
    """Returns what later tokens of a sequence of n tokens read of its caches and its compressors' states."""

    def taken(part, first, last):
        return np.asarray(rows(part))[place, first:last]

    found = [taken(cache.window, max(0, n - layer.window), n)]
    for part in (cache.compressed, cache.keys):
        found += [] if part is None else [taken(part, 0, n // layer.ratio)]
    for part, compressor in ((cache.tokens, layer.compressor), (cache.key_tokens, layer.indexer)):
        if isinstance(part, RunningSums):
            found += [np.asarray(x)[place] for x in (part.sums, part.folded)]
        if part is not None:
            compressor = getattr(compressor, "compressor", compressor)
            reach = part.capacity if isinstance(part, RunningSums) else compressor.reach
            found.append(taken(part, max(0, n - reach), n))
    return found


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn], ids=lambda x: x.__name__)
def test_accepted_tokens_leave_what_single_steps_leave_by_kernels(dtype):
    compare_with_single_steps("kernels", False, dtype)


@pytest.mark.parametrize(
    ("name", "paged"),
    [("v4", True), pytest.param("v4.1", False, marks=pytest.mark.slow), ("long blocks", True)],
)
def test_accepted_tokens_leave_what_single_steps_leave(name, paged):
    compare_with_single_steps(name, paged)


def compare_with_single_steps(name, paged, dtype=jnp.float32):
    """After drafts that were accepted in part, taken back, or saw each other, further tokens have the same results, and
    leave the same caches and states, as after single tokens; bit by bit. All calls have the same shape, so products add
    in the same order. (How many tokens are in running sums depends on the history, until `steps` tokens later.)
    """
    layers, _, x, _ = model(name)
    rng = np.random.default_rng(5)
    step, drafts = program(name, True), program(name, True, is_causal=False)
    read = np.array([9, 5, 0])  # tokens of prompts

    def called(f, caches, at, counts, right):
        """So many tokens of each place, of which some are right."""
        some = rng.standard_normal((PLACES, STEPS, x.shape[2])).astype(x.dtype)
        for n, count in enumerate(right):
            some[n, :count] = x[n, at[n] : at[n] + count]
        return f(caches, some, at.astype(np.int32), (at + counts).astype(np.int32))[1]

    def later(caches, at):
        """The results of two more calls, and what they leave."""
        caches, results = jax.tree.map(jnp.copy, caches), []
        for i in (0, STEPS):
            some = np.random.default_rng(i).standard_normal((PLACES, STEPS, x.shape[2])).astype(x.dtype)
            ys, caches = step(caches, some, (at + i).astype(np.int32), (at + i + STEPS).astype(np.int32))
            results += ys
        for layer, cache in zip(layers, caches, strict=True):
            for n in range(PLACES):
                results += read_later(layer, cache, int(at[n]) + 2 * STEPS, n)
        return results

    def prompts():
        caches = empty(layers, paged, np.random.default_rng(6), dtype)
        return program(name, False)(caches, x[:, :9], np.zeros(PLACES, np.int32), read.astype(np.int32))[1]

    by_drafts, by_one, at = prompts(), prompts(), read
    for _ in range(16):
        counts = rng.integers(0, STEPS + 1, PLACES)
        right = np.minimum(rng.integers(0, counts + 1), LENGTH - at)
        if rng.random() < 0.4:
            by_drafts = called(drafts, by_drafts, at, counts, 0 * counts)
        by_drafts = called(step, by_drafts, at, counts, right)
        for i in range(STEPS):
            one = (right > i).astype(int)
            by_one = called(step, by_one, at + np.minimum(i, right), one, one)
        at = at + right
        for a, b in zip(later(by_drafts, at), later(by_one, at), strict=True):
            np.testing.assert_array_equal(a, b)


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
    """Prompts are as long as blocks, shorter, and one token longer."""
    check_documents(name, ((8, 1, 1, 16, 3), (), (17, 15, 4, 4)))


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ["v4", "long blocks"])
@settings.get_profile("fuzz")
@given(rows=ROWS)
def test_documents_fuzz(name, rows):
    check_documents(name, rows)
