"""examples/serving: a server that lasts. Its host work and memory do not grow, and what a request does is its own."""

import gc
import re
import statistics
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.serving import Pages, Request, Server, TooLong, checked_tokens
from examples.serving.lookup import SLOTS, Lookup
from examples.serving.sampling import among_likeliest, choose

from .counting_model import (
    LOGIT,
    VOCABULARY,
    Counting,
    assert_empty,
    assert_right,
    assert_served,
    calls_of,
    counting,
    done,
    server,
)  # fmt: skip


@pytest.mark.parametrize(
    "speculate, alike, count",
    [(0, 0, 1000), pytest.param(2, 20, 300, marks=pytest.mark.slow)],
)
@pytest.mark.usefixtures("few_objects")
def test_thousands_of_requests(speculate, alike, count):
    """A call takes as long, and the server as much memory, after ten times as many; and all are right."""
    rng = np.random.default_rng(0)
    serving = server(places=128, pages=600, speculate=speculate)
    serving.compile()
    times, sizes = [], []
    for tenth in range(10):
        if tenth == 8:
            tracemalloc.start()  # which makes calls slower
        requests = []
        for _ in range(count):
            n, first = int(rng.integers(1, 24)), 3 if alike else int(rng.integers(VOCABULARY))
            wanted = int(rng.integers(1, 6))
            requests.append(Request(counting(first, alike + n), wanted, float(rng.integers(2))))
            serving.submit(requests[-1])
        own = []
        while not serving.is_idle:
            began = time.thread_time()
            serving.work()
            own.append(time.thread_time() - began)
        for request in requests:
            assert_right(request)
            assert len(request.said) == request.wanted
        del requests, request
        gc.collect()
        times.append(statistics.median(own))
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert_empty(serving)
    assert min(times[5:8]) < 3 * min(times[1:4]), times
    assert sizes[9] < sizes[8] + 20 * count, sizes  # twenty bytes for each request


@pytest.mark.parametrize("speculate", [0, 2])
def test_a_step_is_as_long_whatever_contexts_are(speculate):
    """After 60 000 tokens the host calls as many functions in a step as after 600, and makes arrays as large."""

    def work(length):
        """Calls of functions in ten steps, and the most bytes that one takes for a time."""
        serving = server(places=4, room=length + 200, chunk=8192, page=128, speculate=speculate)
        requests = [Request(counting(i, length), 100) for i in range(4)]
        for request in requests:
            serving.submit(request)
        while any(len(request.said) < 10 for request in requests):
            serving.work()
        calls = calls_of(10, serving.work)
        tracemalloc.start()
        serving.work()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        serving.work()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return calls, peak - before

    (few, small), (many, large) = work(600), work(60_000)
    assert many < 1.2 * few and large < small + 30_000, (few, many, small, large)


@pytest.mark.parametrize("speculate", [0, 3])
def test_a_place_costs_few_calls(speculate):
    """Its token is handed out by a few functions, drafts or not; all else is done for all places at once."""

    def work(places):
        serving = server(places=places, room=128, chunk=32, speculate=speculate)
        for i in range(places):
            serving.submit(Request(counting(i, 20), 60))
        for _ in range(4):
            serving.work()
        return calls_of(10, serving.work)

    assert (work(40) - work(8)) / (32 * 10) < 8


@pytest.mark.parametrize("speculate", [0, 3])
def test_nobody_drafts_another_s_text(speculate):
    """A request that goes on as another has gone on has no drafts; one that repeats itself has."""
    serving = server(room=256, speculate=speculate)
    done(serving, Request(counting(0, 30), 40))
    done(serving, *(Request(counting(i, 20), 20) for i in range(4)))
    assert serving.drafted == 0
    done(serving, request := Request(counting(0, VOCABULARY + 20), 20))
    assert_right(request)
    assert (serving.drafted > 0) == bool(speculate) and serving.drafted == serving.accepted


def test_lookup():
    """Drafts are what came after the same three tokens, or two, the last time, in that place; tables do not grow."""

    def found(tokens, count):
        lookup = Lookup(3, 60)
        for place, others in ((0, tokens[::-1]), (2, [1, 2, 3])):
            lookup.read(place, np.array(others, np.int32))
        lookup.read(1, np.full(40, 5, np.int32))
        lookup.clear(1)
        lookup.read(1, np.array(tokens[: len(tokens) // 2], np.int32))
        for token in tokens[len(tokens) // 2 :]:
            lookup.add(np.array([1]), np.array([[token, 99]]), np.array([1]))
        drafts, counts = lookup.drafts(np.array([1]), count)
        return drafts[0, : counts[0]].tolist()

    assert found([1, 2, 3, 4, 9, 1, 2, 3], 3) == [4, 9, 1]
    assert found([7, 2, 3, 4, 9, 1, 2, 3], 2) == [4, 9]
    assert found([1, 2, 8, 1, 2, 7, 1, 2], 1) == [7]
    assert found([5, 6, 7], 4) == found([5], 4) == found([], 4) == found([1, 2, 3, 1, 2, 3, 1], 0) == []
    lines = np.random.default_rng(0).integers(0, 50, (2, 3 * SLOTS), np.int32)
    lookup, both, found = Lookup(2, lines.shape[1]), np.arange(2), 0
    size = lookup.after.nbytes
    followers = [{}, {}]
    for at in range(0, lines.shape[1], 3):
        drafts, counts = lookup.drafts(both, 1)
        for line, seen, (draft,), count in zip(lines, followers, drafts, counts, strict=True):
            if count:
                assert draft in seen[tuple(line[at - 2 : at])]
                found += 1
            for n in range(max(at, 2), at + 3):
                seen.setdefault(tuple(line[n - 2 : n]), set()).add(line[n])
        lookup.add(both, lines[:, at : at + 3], np.full(2, 3))
    assert found > 500 and lookup.after.nbytes == size


def test_an_exception_is_its_request_s_own():
    """Of three requests, one whose listener raises ends with that; the others, and later ones, say all."""
    serving = server()

    def raises(token):
        if token == 4:
            raise RuntimeError("nobody listens")

    requests = [Request(counting(i, 3), 6, heard=raises if i == 0 else lambda token: None) for i in range(3)]
    assert set(done(serving, *requests)) == set(requests)
    assert str(requests[0].error) == "nobody listens" and requests[0].said == [3, 4]
    for request in (*requests[1:], *done(serving, Request(counting(7, 2), 3))):
        assert_right(request)
        assert request.error is None and len(request.said) == request.wanted
    assert_empty(serving)


@pytest.mark.parametrize(
    "what, message",
    [
        ({"wanted": 0}, "wanted: got 0, wanted an integer from 1 to"),
        ({"wanted": 2.0}, r"wanted: got 2\.0, wanted an integer"),
        ({"wanted": True}, "wanted: got True, wanted an integer"),
        ({"temperature": float("nan")}, "temperature: got nan, wanted a number from 0 to 2"),
        ({"temperature": -1}, "temperature: got -1, wanted"),
        ({"temperature": 10**400}, "temperature: got a number of many digits, wanted"),
        ({"temperature": float("inf")}, "temperature: got inf, wanted"),
        ({"temperature": "1"}, "temperature: got '1', wanted"),
        ({"top_p": 0}, "top_p: got 0, wanted more"),
        ({"top_p": 1.5}, r"top_p: got 1\.5, wanted a number from 0 to 1"),
        ({"seed": 2**63}, "seed: got 9223372036854775808, wanted an integer from"),
        ({"seed": 0.5}, "seed: got 0.5, wanted"),
        ({"end": [1, "2"]}, "end: got '2', wanted an integer"),
    ],
    ids=str,
)
def test_numbers_of_a_request_have_ranges(what, message):
    with pytest.raises(ValueError, match=message):
        Request(**{"prompt": counting(0, 3), "wanted": 1, **what})


@pytest.mark.parametrize(
    "tokens, message",
    [
        ([], "got no tokens, wanted at least one"),
        ([1, VOCABULARY], r"got 97 as token number 1, wanted integers from 0 to 96"),
        ([-1], "got -1 as token number 0"),
        ([1.0, 2.0], r"got \[1.0, 2.0\], wanted one line of integers"),
        (np.array([0.5]), r"got float64\[1\], wanted one line"),
        ([2**32 + 1], "got 4294967297 as token number 0"),
        ([2**80], "wanted one line of integers"),
        ([[1], [2]], r"got \[\[1\], \[2\]\], wanted one line"),
        ([[1], [2, 3]], "wanted one line"),
        ([True, False], "wanted one line"),
        (5, "wanted one line"),
    ],
    ids=str,
)
def test_tokens_from_outside(tokens, message):
    """Whatever is no token of the vocabulary is refused, not rounded, cut or wrapped, when it is submitted, too."""
    with pytest.raises(ValueError, match=f"^here: .*{message}"):
        checked_tokens("here", tokens, VOCABULARY)
    with pytest.raises(ValueError, match=f"^prompt: .*{message}"):
        server().submit(Request(tokens, 1))
    assert checked_tokens("here", np.array([0, 96], np.uint64), VOCABULARY).dtype == np.int32


def test_numbers_are_looked_at_again():
    """A request that was changed after it was made is refused, and does not come to the server."""
    serving, request = server(), Request(counting(0, 3), 4)
    request.temperature = 10**400
    with pytest.raises(ValueError, match="temperature: got a number of many digits"):
        serving.submit(request)
    assert serving.is_idle


def test_what_never_fits():
    serving = server(places=2, room=64, page=16, pages=3)
    with pytest.raises(
        TooLong, match="a request of 60 tokens, 10 to be said, for which 3 pages of 16 and a room of 64"
    ):
        serving.submit(Request(counting(0, 50), 10))
    with pytest.raises(TooLong):
        server(places=2, room=60, page=16).submit(Request(counting(0, 3), 58))  # though its pages have room for it
    done(serving, request := Request(counting(0, 17), 31))
    assert_right(request)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"places": 0}, "places: got 0, wanted an integer of at least 1"),
        ({"chunk": 0}, "chunk: got 0"),
        ({"page": -8}, "page: got -8"),
        ({"pages": 0}, "pages: got 0"),
        ({"room": 1.5}, "room: got 1.5"),
        ({"speculate": -1}, "speculate: got -1, wanted an integer of at least 0"),
        ({"prefixes": -1}, "prefixes: got -1, wanted an integer of at least 0"),
    ],
    ids=str,
)
def test_sizes_of_a_server(sizes, message):
    with pytest.raises(ValueError, match=message):
        server(**{"pages": 8, **sizes})


def test_any_of_several_ends():
    serving = server()
    one, other, neither, by_number = (
        Request(counting(first, 3), 9, end=end) for first, end in ((0, {4, 44}), (40, [4, 44]), (20, (4, 44)), (7, 11))
    )
    done(serving, one, other, neither, by_number)
    assert (one.said, other.said, by_number.said) == ([3, 4], [43, 44], [10, 11])
    assert len(neither.said) == 9


@pytest.mark.parametrize("speculate", [0, 2])
def test_a_call_begins_before_the_last_one_is_heard(speculate):
    """Always, except where drafts are looked up; and the host waits once for each."""
    serving, log = server(places=3, room=256, speculate=speculate), []
    run = serving._run

    class Found:
        def __init__(self, found):
            self.found = found

        def __array__(self, *how):
            log.append("heard")
            return np.asarray(self.found)

    def logged(*call):
        log.append("begun")
        return Found(run(*call))

    serving._run = logged
    done(serving, *(Request(counting(i, 5), 20) for i in range(3)))
    calls = log.count("begun")
    assert log == (["begun", "heard"] * calls if speculate else ["begun", *["begun", "heard"] * (calls - 1), "heard"])
    assert calls == 20 or speculate


def test_what_is_said_after_the_end_is_dropped():
    """A token that ends a request is heard when the next step has begun: nobody hears what that one says."""
    serving, heard = server(places=1), []
    first, second = (Request(counting(i, 3), 9, end=5, heard=lambda t, i=i: heard.append((i, t))) for i in (2, 40))
    assert done(serving, first, second) == [first, second]
    assert heard == [(2, 5), *((40, t) for t in range(43, 52))]
    assert serving.steps == 9 - 1
    assert_empty(serving)


def test_a_chunk_reads_those_that_came_first():
    """With one reader a prompt of five chunks is read whole before the next, and is not read among idle places."""
    serving, said = server(places=3, readers=1), []
    rows = []
    run = serving._run
    serving._run = lambda is_step, call: rows.append((is_step, len(call.tokens))) or run(is_step, call)
    done(serving, *(Request(counting(i, 40), 1, heard=lambda _, i=i: said.append(i)) for i in range(3)))
    assert said == [0, 1, 2] and rows == [(False, 1)] * 15


def test_who_says_does_not_wait_until_others_have_read():
    """A prompt of 20 chunks: between them others say a token each."""
    serving = server(room=256)
    serving.submit(short := Request(counting(0, 3), 100))
    while len(short.said) < 5:
        serving.work()
    serving.submit(long := Request(counting(1, 160), 1))
    said = len(short.said)
    while not long.said:
        serving.work()
    assert len(short.said) - said >= 18
    done(serving)
    assert_right(short)


def test_who_is_forgotten():
    """One that is served, and ones that wait, at the head and elsewhere: nobody waits for them or hears of them."""
    serving = server(places=1)
    heard = []
    requests = [Request(counting(i, 3), 5, heard=lambda token, i=i: heard.append(i)) for i in range(5)]
    for request in requests:
        serving.submit(request)
    for _ in range(3):
        serving.work()
    for i in (0, 1, 3):
        serving.forget(requests[i])
    count = heard.count(0)
    serving.work()
    assert list(serving.waiting) == [requests[4]]
    assert set(done(serving)) == {requests[2], requests[4]}
    assert heard.count(0) == count and 1 not in heard and 3 not in heard
    assert_empty(serving)


def test_chance_is_a_request_s_own():
    """With a seed a request says the same alone, beside others, and with drafts; with another seed, something else."""

    class Even(Counting):
        def steps(self, *operands):
            logits, caches = super().steps(*operands)
            return logits / LOGIT, caches

    def said(places, speculate, seed, others=0):
        serving = Server(Even(), {}, jnp.float32, places, 64, 8, 8, 8 * places, speculate=speculate)
        mine = Request(counting(5, 9), 30, 1.0, seed=seed)
        done(serving, *(Request(counting(i, 3 + i), 20, 0.7) for i in range(others)), mine)
        return mine.said

    want = said(1, 0, 7)
    assert said(3, 0, 7, others=5) == said(2, 3, 7, others=2) == want
    assert said(1, 0, 8) != want and len(set(want)) > 10
    same, other = (Request(counting(0, 3), 20, 1.0) for _ in range(2))
    done(Server(Even(), {}, jnp.float32, 2, 64, 8, 8, 16), same, other)
    assert same.said != other.said  # without seeds


def test_choose():
    """By the probabilities of a softmax with the temperature; among the likeliest alone with top_p."""
    b, p = 20_000, np.array([0.5, 0.3, 0.15, 0.05])
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(p, jnp.float32)), (b, 1, 4))

    def shares(temperature, top_p):
        numbers = (jnp.full(b, x, jnp.float32) for x in (temperature, top_p))
        chosen = jax.jit(choose)(logits, jnp.full((b, 1), 3), *numbers, jnp.arange(b, dtype=jnp.uint32))
        return np.bincount(np.asarray(chosen)[:, 0], minlength=4) / b

    for temperature, top_p, want in (
        (1, 1, p), (0, 1, [1, 0, 0, 0]), (1e-30, 1, [1, 0, 0, 0]), (2, 1, p**0.5 / (p**0.5).sum()),
        (1, 0.8, [0.625, 0.375, 0, 0]), (1, 0.81, p * [1, 1, 1, 0] / 0.95), (1, 0.01, [1, 0, 0, 0]),
    ):  # fmt: skip
        np.testing.assert_allclose(shares(temperature, top_p), want, atol=0.015)
    mixed = jax.jit(choose)(
        logits[:3], jnp.zeros((3, 1)), jnp.array([0.0, 2.0, 0.0]), jnp.array([0.1, 0.3, 1.0]), jnp.zeros(3, jnp.uint32)
    )
    assert mixed[0] == mixed[2] == 0


def test_among_likeliest():
    """Beside a sort in float64: whatever the shares of tokens are, and whichever rows stand beside a row."""
    rng = np.random.default_rng(0)
    scores = rng.normal(0, np.array([0.0, 0.1, 1, 5, 30])[:, None, None], (5, 3, 1000)).astype(np.float32)
    scores = np.repeat(scores - scores.max(-1, keepdims=True), 4, 0)
    top_p = np.tile(np.array([1e-40, 0.3, 0.9, 1], np.float32), 5)
    kept = np.isfinite(jax.jit(among_likeliest)(scores, top_p))
    p = np.exp(scores.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    in_order = -np.sort(-p)
    is_needed = np.cumsum(in_order, -1) - in_order < np.where(top_p < 1, top_p - 1e-6, 1)[:, None, None]
    least = np.where(is_needed, in_order, 1).min(-1, keepdims=True)
    assert kept[p >= least * (1 + 1e-5)].all() and kept[top_p == 1].all()
    may = np.where(is_needed | (np.cumsum(in_order, -1) - in_order < top_p[:, None, None] + 1e-6), in_order, 1)
    assert not kept[p < may.min(-1, keepdims=True) * (1 - 2**-12)].any()
    assert kept.any(-1).all() and not kept[top_p < 1].all()


@pytest.mark.gpu
def test_a_gpu_chooses_as_a_cpu(cuda):
    """Among V4's 129280 tokens, for requests of all kinds side by side."""
    rng, b = np.random.default_rng(0), 64
    logits = rng.normal(0, 3, (b, 2, 129280)).astype(np.float32)
    after, seed = rng.integers(0, 8192, (b, 2), np.int32), rng.integers(0, 2**32, b, np.uint32)
    temperature, top_p = rng.choice(np.float32([0, 0.3, 1, 2]), b), rng.choice(np.float32([1e-9, 0.5, 0.95, 1]), b)
    operands = logits, after, temperature, top_p, seed
    got, want = (jax.jit(choose)(*jax.device_put(operands, device)) for device in (cuda, jax.devices("cpu")[0]))
    np.testing.assert_array_equal(got, want)
    likeliest = logits.argmax(-1)
    assert (np.asarray(want)[temperature == 0] == likeliest[temperature == 0]).all()
    assert (np.asarray(want) != likeliest).mean() > 0.2


def test_a_call_has_no_branch():
    """Outside of a CUDA graph the host would wait for the number on the device by which a program branches."""
    serving = server(places=2, rounds=4)
    says = np.zeros(2, bool)
    for f, call in ((serving.programs.say, serving._step(says)), (serving.programs.read, serving._chunk(says))):
        text = f.lower(serving.parameters, serving.state, call.packed()).as_text()
        assert "stablehlo.case" not in text and "stablehlo.if" not in text


def test_pages():
    """Whoever has pages, has as many as its tokens need; nobody else has them, unless they are shared."""
    rng, pages, kept = np.random.default_rng(0), Pages(6, 64, 8, 20), []
    for _ in range(3000):
        place, tokens = int(rng.integers(6)), int(rng.integers(1, 65))
        if rng.random() < 0.3:
            pages.leave(place)
        elif rng.random() < 0.2:
            kept.append(pages.table[place, : rng.integers(pages.counts[place] + 1)].copy())
            pages.keep(kept[-1])
        elif kept and rng.random() < 0.3:
            pages.let_go(kept.pop(int(rng.integers(len(kept)))))
        elif kept and rng.random() < 0.3:
            pages.share(place, kept[int(rng.integers(len(kept)))])
        else:
            more, free = max(pages.needed(tokens) - int(pages.counts[place]), 0), len(pages.free)
            assert pages.grow(place, tokens) == (more <= free)
        there = [row[row >= 0].tolist() for row in pages.table]
        assert [len(x) for x in there] == pages.counts.tolist()
        assert np.bincount(np.concatenate(there).astype(int), minlength=20).tolist() == pages.owners.tolist()
        assert np.bincount(np.concatenate([[], *kept]).astype(int), minlength=20).tolist() == pages.keepers.tolist()
        assert sorted(pages.free) == np.flatnonzero(pages.owners + pages.keepers == 0).tolist()
        assert pages.idle == ((pages.owners == 0) & (pages.keepers > 0)).sum()
        assert (pages.room == 8 * pages.counts).all()
    start = np.array([0, 7, 8, 60, 63, 20])
    for n in (1, 2, 9, 17):
        found = pages.holding(np.arange(6), start, n)
        for i, at in enumerate(start):
            for t in range(at, at + n):
                want = pages.table[i, t // 8] if t // 8 < 8 else -1
                assert found[i, t // 8 - at // 8] == want


@pytest.mark.parametrize("prefixes", [0, 20])
def test_nothing_is_compiled_after_compile(prefixes):
    said = []
    serving = server(prefixes=prefixes, progress=said.append)
    serving.compile()
    serving.keep(counting(0, 20))
    assert [line for line in said if line.startswith("compiling")] == [
        "compiling the program for chunks of 8 tokens", "compiling the program for steps of 1 token",
    ]  # fmt: skip
    assert sum(bool(re.fullmatch(r"compiled it in \d+\.\d s", line)) for line in said) == 2
    assert ("reading 16 tokens with which prompts will begin" in said) == bool(prefixes)
    made, count = serving.programs, len(said)
    programs = (made.read, made.say, *[made.begin] * bool(prefixes))
    assert [f._cache_size() for f in programs] == [1] * len(programs)
    done(serving, *(Request(counting(0, 21 + i), 9) for i in range(9)))
    assert (serving.shared > 0) == bool(prefixes)
    assert [f._cache_size() for f in programs] == [1] * len(programs) and len(said) == count


def random_run(seed):
    """Requests of all kinds over few pages, some of which are forgotten: all are right, and all pages are free."""
    rng = np.random.default_rng(seed)
    page, room = int(rng.choice([4, 8, 16])), int(rng.integers(20, 90))
    alike = counting(11, int(rng.integers(0, 12)) if rng.random() < 0.5 else 0)
    prefixes = int(rng.choice([0, 1, 2, 5, 20]))
    least = -(-room // page)
    serving = server(
        places=int(rng.integers(1, 6)), room=room, chunk=int(rng.integers(1, 20)), page=page,
        pages=int(rng.integers(least, 3 * least)), prefixes=prefixes, speculate=int(rng.integers(0, 4)), seed=seed,
        readers=int(rng.integers(1, 6)),
    )  # fmt: skip
    requests = []
    for _ in range(int(rng.integers(1, 25))):
        n = int(rng.integers(1, room - len(alike)))
        request = Request(
            counting(11 if len(alike) else int(rng.integers(VOCABULARY)), len(alike) + n),
            int(rng.integers(1, room - len(alike) - n + 1)),
            float(rng.choice([0, 1e-30, 0.5])),
            end=rng.integers(0, VOCABULARY, int(rng.integers(0, 4))).tolist(),
        )
        requests.append(request)
        serving.submit(request)
        for _ in range(int(rng.integers(0, 12))):
            serving.work()
        if rng.random() < 0.1:
            serving.forget(requests[int(rng.integers(len(requests)))])
    done(serving)
    for request in requests:
        assert_served(request)
    assert_empty(serving)
    return serving


@pytest.mark.parametrize("seed", range(2))
def test_random_requests(seed):
    random_run(seed)


def test_who_cannot_grow_waits_again():
    """Three requests that grow to 60 tokens over pages for 80: the last that came begins anew, and says the same."""
    serving = server(places=3, pages=10, seed=3)
    requests = [Request(counting(30 * i, 20), 40, 1.0) for i in range(3)]
    ended = done(serving, *requests)
    assert serving.put_back >= 2 and ended[0] is requests[0]
    for request in requests:
        assert_right(request)
    assert_empty(serving)


@pytest.mark.fuzz
@settings.get_profile("fuzz")
@given(st.integers(2, 2**31))
def test_any_requests(seed):
    random_run(seed)
