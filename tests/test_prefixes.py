"""Prompts of examples/serving that begin alike: what is shared, what is kept, and what it costs."""

import numpy as np
import pytest

from examples.serving import Request, prefixes

from .counting_model import Caches, assert_empty, assert_right, calls_of, counting, done, server


def test_a_prompt_goes_on_from_an_earlier_one():
    """It shares the whole pages that chunks have read, and says what it says where nobody shares."""
    serving, alone = server(chunk=16), server(chunk=16, prefixes=0)
    rows = []
    run = serving._run
    serving._run = lambda is_step, call: (
        rows.extend([] if is_step else call.start[call.most > 0].tolist()) or run(is_step, call)
    )
    prompts = [
        counting(5, 40),
        counting(5, 45),
        np.r_[counting(5, 20), counting(90, 9)],
        counting(5, 32),
        counting(6, 40),
    ]
    for prompt, begins in zip(prompts, ([0, 16, 32], [40], [16], [16], [0, 16, 32]), strict=True):
        rows.clear()
        got, want = Request(prompt, 12), Request(prompt, 12)
        done(serving, got)
        done(alone, want)
        assert got.said == want.said and rows == begins and got.shared == begins[0]
    assert serving.shared == 40 + 16 + 16 and alone.shared == 0
    assert len(serving.prefixes.kept) == 6 and serving.pages.idle == 10
    assert_empty(serving)
    first, second = Request(counting(5, 48), 9), Request(counting(5, 60), 3)
    for request in (first, second):
        serving.submit(request)
    serving.work()
    assert (serving.pages.table[0, :5] == serving.pages.table[1, :5]).all()  # and no page is both's that is not full
    assert not set(serving.pages.table[0, 5:6]) & set(serving.pages.table[1, 5:8])
    done(serving)
    for request in (first, second):
        assert_right(request)


def test_prompts_that_come_together():
    """One reader: the second is looked up again when its turn comes, and gives back the pages that it does not need."""
    serving = server(readers=1, pages=16, places=2)
    first, second = (Request(counting(5, 40 + i), 9) for i in range(2))
    serving.submit(first)
    serving.submit(second)
    serving.work()
    assert len(serving.pages.free) == 16 - 5 - 6
    done(serving)
    assert (first.shared, second.shared) == (0, 40)
    for request in (first, second):
        assert_right(request)
    assert_empty(serving)


def test_who_waits_for_pages_shares_them():
    """Two prompts of 10 pages in a pool of 13: the second gets a place when the first has read as many as it lacks."""
    serving = server(places=2, room=104, pages=13, readers=1)
    first, second = (Request(np.r_[counting(5, 72), counting(i, 3)], 2) for i in range(2))
    serving.submit(first)
    serving.submit(second)
    serving.work()
    assert serving.places[1] is None
    while serving.places[1] is None:
        serving.work()
    assert not first.said and 0 < second.shared < 72
    done(serving)
    assert second.shared == 72
    assert_empty(serving)


def test_pages_of_prefixes_are_taken_when_no_others_are_free():
    """The prefix that was not used for longest goes first, and those whose pages are in use stay."""
    serving = server(places=2, room=64, page=8, pages=12)
    done(serving, Request(counting(1, 30), 2), Request(counting(2, 30), 2), Request(counting(1, 31), 2))
    assert serving.pages.idle == 6 and len(serving.pages.free) == 6
    done(serving, request := Request(counting(3, 52), 12))  # 8 pages
    assert_right(request)
    kept = [int(prefix.tokens[0]) for prefix in serving.prefixes.kept.values()]
    assert 2 not in kept and 1 in kept and 3 in kept
    serving.submit(long := Request(counting(1, 30), 30))
    for _ in range(3):
        serving.work()
    assert long.shared == 24
    serving.submit(other := Request(counting(4, 28), 20))
    done(serving)
    for request in (long, other):
        assert_right(request)
    assert 1 in [int(prefix.tokens[0]) for prefix in serving.prefixes.kept.values()]
    assert_empty(serving)


def test_as_many_prefixes_as_asked():
    serving = server(prefixes=3)
    for i in range(6):
        done(serving, Request(counting(i, 20), 2), Request(counting(0, 20), 2))
    kept = [(int(prefix.tokens[0]), len(prefix.tokens)) for prefix in serving.prefixes.kept.values()]
    assert len(kept) == 3 and (0, 16) in kept and (5, 16) in kept
    assert len({prefix.slot for prefix in serving.prefixes.kept.values()}) == 3
    assert_empty(serving)


def test_one_slot_for_many_readers():
    """In a call that keeps four prefixes the slot is the last one's."""
    serving = server(prefixes=1)
    done(serving, *(Request(counting(i, 9), 2) for i in range(4)))
    (prefix,) = serving.prefixes.kept.values()
    done(serving, request := Request(counting(int(prefix.tokens[0]), 12), 9))
    assert request.shared == 8
    assert_right(request)


def test_who_is_put_back_goes_on_from_its_own():
    """Those that wait again are not read from their first token, though what they said has been read by steps."""
    serving = server(places=3, pages=12)
    requests = [Request(counting(30 * i, 20), 40) for i in range(3)]
    done(serving, *requests)
    assert serving.put_back and serving.shared
    for request in requests:
        assert_right(request)
    assert_empty(serving)


def test_who_is_forgotten_leaves_what_was_read():
    serving = server(places=1)
    serving.submit(gone := Request(counting(5, 60), 3))
    for _ in range(3):
        serving.work()
    serving.forget(gone)
    done(serving, request := Request(counting(5, 40), 9))
    assert request.shared == 24
    assert_right(request)
    assert_empty(serving)


def test_tokens_of_one_hash(monkeypatch):
    """All hashes are equal: tokens tell who has begun alike."""
    monkeypatch.setattr(prefixes, "hash", lambda x: 7, raising=False)
    serving = server()
    requests = [Request(counting(first, 20), 9) for first in (1, 2, 1, 2)]
    for request in requests:
        done(serving, request)
        assert_right(request)
    assert [request.shared for request in requests] == [0, 0, 16, 0]
    assert_empty(serving)


def test_a_ring_that_is_not_restored_is_found(monkeypatch):
    """Were rings those of the place's last request, a request would say something else."""
    put = Caches.put

    def without(self, places, taken):
        return self if taken.tokens is None and self.tokens is not None else put(self, places, taken)

    monkeypatch.setattr(Caches, "put", without)
    serving = server(places=1)
    done(serving, Request(counting(1, 20), 2), Request(counting(50, 20), 2), request := Request(counting(1, 20), 9))
    assert request.shared == 16
    with pytest.raises(AssertionError):
        assert_right(request)


def test_prefixes_cost_steps_nothing():
    """Steps call as many functions with 32 prefixes as with one, and a prompt as many after 59 others as after 19."""

    def work(kept):
        serving = server(places=4, room=256, pages=400, prefixes=kept)
        done(serving, *(Request(counting(i, 24), 1) for i in range(40)))
        for i in range(4):
            serving.submit(Request(counting(i, 20), 100))
        for _ in range(6):
            serving.work()
        return calls_of(10, serving.work)

    assert work(32) == work(1)
    serving = server(places=1, room=256, prefixes=8)
    serving.compile()
    calls = []
    for i in range(60):
        serving.submit(Request(counting(i, 100), 1))
        calls.append(calls_of(14, serving.work))
        assert serving.is_idle
    assert max(calls[40:]) < 1.1 * max(calls[10:20])
