"""examples/serving with several steps in a call of the host: the same answers, and fewer calls."""

import numpy as np
import pytest

from examples.serving import Request

from .counting_model import VOCABULARY, assert_empty, assert_served, counting, done, server


def run(seed, rounds):
    """Requests over few pages, some of which end early or are forgotten: all are right, and all pages are free."""
    rng = np.random.default_rng(seed)
    serving = server(places=3, room=48, page=4, pages=20, prefixes=int(rng.choice([0, 3])), rounds=rounds, readers=2)
    requests = []
    for i in range(16):
        n = int(rng.integers(1, 30))
        wanted, ends = int(rng.integers(1, 49 - n)), rng.integers(0, VOCABULARY, int(rng.integers(0, 9))).tolist()
        requests.append(Request(counting(int(rng.integers(9)), n), wanted, float(rng.choice([0, 0.5])), end=ends))
        serving.submit(requests[-1])
        for _ in range(int(rng.integers(0, 6))):
            serving.work()
        if i % 7 == 5:
            serving.forget(requests[int(rng.integers(len(requests)))])
    done(serving)
    for request in requests:
        assert_served(request)
    assert_empty(serving)
    return serving


@pytest.mark.parametrize("rounds", [1, 2, 3, 8])
def test_answers_are_right(rounds):
    assert sum(run(seed, rounds).put_back for seed in range(4)) > 0


@pytest.mark.parametrize(("wanted", "calls"), [(1, 0), (2, 1), (5, 1), (6, 2), (21, 5)])
def test_as_few_calls_as_there_have_to_be(monkeypatch, wanted, calls):
    """The first token comes of the chunk, and each call says four; none is begun for tokens that are said already."""
    serving, begun = server(places=2, rounds=4), []
    right = serving._run
    monkeypatch.setattr(serving, "_run", lambda is_step, call: begun.append(is_step) or right(is_step, call))
    done(serving, Request(counting(0, 8), wanted), Request(counting(3, 8), 1))
    assert begun == [False, *[True] * calls]


def test_what_is_heard_is_in_order_and_ends_where_it_should():
    serving, heard = server(places=1, rounds=8), []
    first, second = (Request(counting(i, 3), 9, end=7, heard=lambda t, i=i: heard.append((i, t))) for i in (2, 40))
    assert done(serving, first, second) == [first, second]
    assert heard == [(2, 5), (2, 6), (2, 7), *((40, t) for t in range(43, 52))]
    assert_empty(serving)


def test_drafts_that_the_host_looks_up_take_a_call_each():
    with pytest.raises(ValueError, match="rounds: got 2 with drafts that the host looks up, wanted 1"):
        server(rounds=2, speculate=2)
    with pytest.raises(ValueError, match="rounds: got 0, wanted an integer of at least 1"):
        server(rounds=0)
