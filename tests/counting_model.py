"""A model for `Server` that costs nothing: after token n comes n + 1, so what requests have to say is known."""

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from examples.serving import Request, Server

VOCABULARY = 97
RING = 8
"""tokens that each place has in a ring; the last one before a call is looked at, and drafts may be taken back"""
LOGIT = 1000.0
"""of the next token, beside 0 of all others: chance does not choose these"""


class Caches(NamedTuple):
    """Caches in a real model's form that hold, instead of entries, the tokens of each place, in pages and in a ring."""

    tokens: jax.Array
    """int32 `[pages, page]`"""
    table: jax.Array
    ring: jax.Array
    """int32 `[places, RING]`"""

    def with_block_table(self, table):
        return self._replace(table=table)

    def rings(self):
        return Caches(None, None, self.ring)

    def take(self, places):
        return self._replace(table=None if self.table is None else self.table[places], ring=self.ring[places])

    def put(self, places, taken):
        tokens = self.tokens if taken.tokens is None else taken.tokens
        return self._replace(tokens=tokens, ring=self.ring.at[places].set(taken.ring, mode="drop"))


class Counting:
    """It says the next number where the tokens at a sequence's beginning, middle and end, as its pages have them, count
    on, and so does the last token before the call, as its ring has it. Otherwise it says the one after it: a wrong
    page, a wrong ring or a wrong length is a wrong answer.
    """

    vocabulary = VOCABULARY

    def cache(self, b, room, dtype, block_table, page_tokens, pages, steps):
        assert steps <= RING
        tokens, ring = (jnp.zeros(shape, jnp.int32) for shape in ((pages, page_tokens), (b, RING)))
        return Caches(tokens, jnp.asarray(block_table), ring)

    def read(self, parameters, tokens, caches, start, lengths):
        logits, caches = self.steps(parameters, tokens, caches, start, lengths)
        last = jnp.maximum(lengths - start - 1, 0)
        return jnp.take_along_axis(logits, last[:, None, None], 1)[:, 0], caches

    def steps(self, parameters, tokens, caches, start, lengths):
        (pages, page), table = caches.tokens.shape, caches.table
        at = start[:, None] + jnp.arange(tokens.shape[1])

        def page_of(at):
            return jnp.take_along_axis(table, jnp.minimum(at // page, table.shape[1] - 1), 1)

        where = jnp.where((at < lengths[:, None]) & (page_of(at) >= 0), page_of(at), pages)
        is_last = (at < lengths[:, None]) & (at >= lengths[:, None] - RING)
        ring = caches.ring.at[jnp.arange(len(at))[:, None], jnp.where(is_last, at % RING, RING)].set(
            tokens, mode="drop"
        )
        kept = caches._replace(tokens=caches.tokens.at[where, at % page].set(tokens, mode="drop"), ring=ring)
        first, middle, end = (kept.tokens[page_of(x), x % page] for x in (0 * at, at // 2, at))
        counts = ((middle - first - at // 2) % VOCABULARY == 0) & ((end - first - at) % VOCABULARY == 0)
        before = caches.ring[jnp.arange(len(at)), (start - 1) % RING]
        counts &= ((start == 0) | ((before - first[:, 0] - start + 1) % VOCABULARY == 0))[:, None]
        said = (first + at + jnp.where(counts, 1, 2)) % VOCABULARY
        return LOGIT * jax.nn.one_hot(said, VOCABULARY), kept

    def __call__(self, parameters, tokens):
        at = jnp.arange(tokens.shape[1])
        return LOGIT * jax.nn.one_hot((tokens[:, :1] + at + 1) % VOCABULARY, VOCABULARY)


def counting(first: int, n: int) -> np.ndarray:
    return ((first + np.arange(n)) % VOCABULARY).astype(np.int32)


def server(
    places: int = 4, room: int = 64, chunk: int = 8, page: int = 8, pages: int | None = None, **how: Any
) -> Server:
    pages = places * -(-room // page) if pages is None else pages
    return Server(Counting(), {}, jnp.float32, places, room, chunk, page, pages, **{"readers": max(places, 1), **how})


def assert_served(request: Request) -> None:
    """It is right, and has said all that it wanted, or up to a token that ends it, unless it was forgotten."""
    assert_right(request)
    ended = request.said[-1:] and request.said[-1] in request.end
    assert request.gone or ended or len(request.said) == request.wanted
    assert not set(request.said[:-1]) & request.end


def assert_right(request: Request) -> None:
    """It has said what comes after its prompt."""
    assert request.said == counting(int(request.prompt[0]) + len(request.prompt), len(request.said)).tolist()


def done(serving, *requests):
    """Serves these, and what else there is, to the end."""
    for request in requests:
        serving.submit(request)
    ended = []
    while not serving.is_idle:
        ended += serving.work()
    return ended


def assert_empty(serving):
    """Nobody has a page but the prefixes, which have what they should."""
    pages, keepers = serving.pages, np.zeros_like(serving.pages.keepers)
    for prefix in serving.prefixes.kept.values() if serving.prefixes else ():
        keepers[prefix.pages] += 1
    assert (keepers == pages.keepers).all() and sorted(pages.free) == np.flatnonzero(keepers == 0).tolist()
    assert pages.idle == (keepers > 0).sum() and not pages.owners.any() and not pages.counts.any()
    assert not any(serving.places) and not serving.count.any() and not serving.read.any()


def calls_of(steps, work):
    """Counts the calls of functions in so many steps."""
    calls = 0

    def count(frame, event, what):
        nonlocal calls
        calls += event.endswith("call")

    sys.setprofile(count)
    try:
        for _ in range(steps):
            work()
    finally:
        sys.setprofile(None)
    return calls
