"""A server of requests in the places of a batch, over pages of caches, without a thread or a socket of its own.

A batch has places. The server reads a new request in chunks, for all places at once that have something to read. Then a
place says a token in each step, until it has said enough, and goes to the next request. While some read and others say,
chunks and steps take turns. Caches are updated in place and never cleared: the entries of a former request are at
positions that the new one does not see.

Compressed entries are in pages, of which there are fewer than all places could fill. A request gets pages as it grows
and gives them back at its end. It waits while there are none for its prompt. Where a request cannot grow, the last one
that came gives its pages back and waits to be read again. One that could never fit is refused. All requests may begin
alike (as with a system prompt): the pages of this beginning are read once and belong to all of them.

With drafts a step takes several tokens of a place, which the model reads at once. The place says those that it would
have said, and the token after them. The others are taken back, by a smaller length in the next step.

The host's work for a call grows with the tokens that are new in it, and with nothing else: not with the lengths of
contexts, not with the requests that have come. What places have in common is an array with a number for each.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsv4_fmha.layers import STEP_OPTIONS

from .lookup import Lookup
from .pages import Pages
from .request import Request, TooLong, checked_tokens, integer
from .sampling import choose


class Call(NamedTuple):
    """The arrays that a chunk or a step gets from the host, for each place. Length 0 is a place that takes no part."""

    tokens: np.ndarray
    """int32 `[places, s]`: those that are new"""
    start: np.ndarray
    """int32 `[places]`: the position of the first of them"""
    lengths: np.ndarray
    """int32 `[places]`: tokens with them"""
    pages: np.ndarray
    """int32 `[places, n]`: the pages of the new tokens, from that of the first on"""
    temperature: np.ndarray
    top_p: np.ndarray
    """float32 `[places]`"""
    seed: np.ndarray
    """uint32 `[places]`"""


class Server:
    """Requests in `places`, each of at most `room` tokens, over pools of `pages` pages of `page` tokens.

    Args:
      model: has `vocabulary`; `cache(b, room, dtype, block_table=, page_tokens=, pages=, steps=)`, which makes caches
        with `with_block_table(table)` and `fork(source, target)`; `read` and `steps`, from (parameters, tokens
        `[b, s]`, caches, start `[b]`, lengths `[b]`) to logits `[b, vocabulary]` of the last tokens, or
        `[b, s, vocabulary]` of all, and new caches; and a call from (parameters, tokens) to logits. A model that
        drafts has `block`, too, and `propose`: see examples/deepseek_v4/drafts.py.
      chunk: tokens of a prompt that are read at once.
      beginning: tokens with which all requests begin, whose whole pages are read once. One more place reads them, and
        is idle from then on.
      speculate: drafts of a place in a step, at most: the model's own, or what came after the same tokens before in
        the same request.
      seed: from which requests that have none get one.
      progress: called with what is compiled and read before the first request, and how long it took.

    Raises:
      ValueError: a size out of range, or a beginning for which there are not enough pages.
    """

    def __init__(
        self,
        model: Any,
        parameters: Any,
        dtype: Any,
        places: int,
        room: int,
        chunk: int,
        page: int,
        pages: int,
        beginning: Sequence[int] | np.ndarray = (),
        speculate: int = 0,
        seed: int = 0,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        for name, size in {"places": places, "room": room, "chunk": chunk, "page": page, "pages": pages}.items():
            integer(name, size, 1)
        integer("speculate", speculate, 0)
        self.parameters, self.room, self.chunk, self.vocabulary = parameters, room, chunk, model.vocabulary
        self.own_drafts = speculate > 0 and hasattr(model, "propose")
        self.ahead = 1 + (min(speculate, model.block) if self.own_drafts else speculate)
        """tokens of a step, at most"""
        self.longest = min(room, pages * page)
        """tokens of a request, at most"""
        whole = len(beginning) // page * page
        self.beginning = checked_tokens("beginning", beginning, self.vocabulary)[:whole] if whole else _none()
        if whole >= self.longest:
            raise ValueError(f"beginning: got {len(beginning)} tokens, wanted fewer than {self.longest} of whole pages")
        b = places + (whole > 0)
        self.served = range(places)
        self.places: list[Request | None] = [None] * b
        self.pages = Pages(b, room, page, pages)
        self.waiting: deque[Request] = deque()
        self.lock = threading.Lock()
        self.has_gone = self.has_begun = self.was_chunk = False
        self.came = self.put_back = self.steps = self.drafted = self.accepted = 0
        self.seeds, self.progress = np.random.default_rng(seed), progress

        # Arrays with a number for each place, 0 where it is free.
        self.cached, self.count = _none(b), _none(b)
        """tokens that the caches hold; tokens that there are"""
        self.left, self.last = _none(b), _none(b)
        """how many tokens are still to be said; the last token"""
        self.since = _none(b)
        """the number of its request among all that got a place"""
        self.temperature, self.top_p = np.zeros((2, b), np.float32)
        self.seed = np.zeros(b, np.uint32)
        self.offered, self.proposed = _none(b), np.zeros((b, self.ahead - 1), np.int32)
        """how many drafts of the model's own follow the last token, and which"""
        self.lookups: list[Lookup | None] = [None] * b
        """other drafts"""

        table = np.full_like(self.pages.table, -1)
        caches = model.cache(b, room, dtype, block_table=table, page_tokens=page, pages=pages, steps=self.ahead)
        table = jnp.asarray(table)
        if not jax.sharding.get_abstract_mesh().empty:
            table = jax.device_put(table, jax.sharding.PartitionSpec())
        where = jax.tree.map(lambda x: x.sharding, (table, caches))
        # Both stay where they are, and are bound to it: programs for what is not would be compiled again for results.
        self.table, self.caches = jax.device_put((table, caches), where)

        def with_pages(state: Any, call: Call) -> Any:
            """The table and the caches with the pages of new tokens in it."""
            table, caches = state
            which = call.start[:, None] // page + jnp.arange(call.pages.shape[1])
            which = jnp.where((call.lengths > 0)[:, None] & (call.pages >= 0), which, table.shape[1])
            table = table.at[jnp.arange(b)[:, None], which].set(call.pages, mode="drop")
            return table, caches.with_block_table(table)

        def read(parameters: Any, state: Any, call: Call) -> Any:
            table, caches = with_pages(state, call)
            logits, caches = model.read(parameters, call.tokens, caches, call.start, call.lengths)
            return choose(logits[:, None], call.lengths[:, None], *call[-3:]), (table, caches)

        def say(parameters: Any, state: Any, call: Call) -> Any:
            table, caches = with_pages(state, call)
            tokens, start, lengths = call[:3]
            logits, caches = model.steps(parameters, tokens, caches, start, lengths)
            chosen = choose(logits, start[:, None] + jnp.arange(1, self.ahead + 1), *call[-3:])
            if self.own_drafts:
                right = accepted(tokens, start, lengths, chosen)
                last = jnp.take_along_axis(chosen, right[:, None], 1)[:, 0]
                n = jnp.where(lengths > 0, start + 1 + right, 0)
                proposed, caches = model.propose(parameters, last, caches, n)
                chosen = jnp.concatenate([chosen, proposed], 1)
            return chosen, (table, caches)

        def begin(state: Any, place: int) -> Any:
            table, caches = state
            return table.at[place].set(table[places]), caches.fork(places, place)

        self._read = jax.jit(read, donate_argnums=1, out_shardings=(None, where))
        self._say = jax.jit(say, donate_argnums=1, out_shardings=(None, where), compiler_options=STEP_OPTIONS)
        self._begin = jax.jit(begin, donate_argnums=0, out_shardings=where)
        self._alone = jax.jit(lambda parameters, tokens: model(parameters, tokens)[0].argmax(-1))

    # ---- what others call

    def compile(self) -> None:
        """Calls all programs once, with every place idle, and reads the beginning of all requests."""
        of_step = f"steps of {self.ahead} {'token' if self.ahead == 1 else 'tokens'}"
        programs = [(f"chunks of {self.chunk} tokens", self._read, self.chunk), (of_step, self._say, self.ahead)]
        for what, f, s in programs:
            self.progress(f"compiling the program for {what}")
            began, nobody = time.perf_counter(), _none(len(self.places))
            self._run(f, self._call(np.zeros((len(nobody), s), np.int32), nobody))
            self.progress(f"compiled it in {time.perf_counter() - began:.1f} s")
        self._read_beginning()
        if len(self.beginning):
            self._begin_as_all(len(self.places) - 1)

    @property
    def is_idle(self) -> bool:
        """True if nobody waits and nobody is served."""
        return not self.waiting and not any(self.places)

    def submit(self, request: Request) -> None:
        """Lets a request wait for a place and for pages. Another thread than `work`'s may call it.

        Raises:
          ValueError: the prompt has no tokens, has one that is not in the vocabulary, or begins otherwise than all do;
            or a number is out of its range.
          TooLong: the request can never fit.
        """
        alike = len(self.beginning)
        request.check()
        request.prompt = checked_tokens("prompt", request.prompt, self.vocabulary)
        if len(request.prompt) <= alike or not np.array_equal(request.prompt[:alike], self.beginning):
            raise ValueError(f"prompt: it does not go on from the {alike} tokens with which all requests begin")
        n = len(request.prompt) + request.wanted
        if n > self.longest:
            room = f"{len(self.pages.owners)} pages of {self.pages.page} and a room of {self.room}"
            raise TooLong(f"prompt: a request of {n} tokens, {request.wanted} to be said, for which {room} are too few")
        with self.lock:
            if request.seed is None:
                request.seed = int(self.seeds.integers(2**63))
            self.waiting.append(request)

    def forget(self, request: Request) -> None:
        """Lets a request end before the next call. Another thread than `work`'s may call it."""
        request.gone = self.has_gone = True

    def work(self) -> list[Request]:
        """Makes one call, a chunk for the places that read or a step for those that say.

        Returns the requests that it ended. One whose `heard` raised has this as its `error`, and no other request knows
        of it. What the call itself raises is raised: then caches are lost, and the server with them.
        """
        self._read_beginning()
        self._forget_gone()
        self._admit()
        reads, says = self.count - self.cached > 1, self.count - self.cached == 1
        self.was_chunk = bool(reads.any() and not (self.was_chunk and says.any()))
        call = self._chunk(reads) if self.was_chunk else self._step(says)
        if not call.lengths.any():
            return []
        chosen = self._run(self._read if self.was_chunk else self._say, call)
        return self._heard_of_chunk(call, chosen) if self.was_chunk else self._heard_of_step(call, chosen)

    def alone(self, request: Request) -> np.ndarray:
        """The likeliest token after each said one, with the request read whole and without a cache."""
        whole, n = np.zeros((1, self.room), np.int32), len(request)
        whole[0, :n] = request.tokens
        return np.asarray(self._alone(self.parameters, whole))[len(request.prompt) - 1 : n - 1]

    # ---- who has a place, and pages

    def _read_beginning(self) -> None:
        """Reads the beginning of all requests in the last place, which is idle from then on and keeps its pages."""
        if not self.has_begun and len(self.beginning):
            spare, n = len(self.places) - 1, len(self.beginning)
            self.progress(f"reading the {n} tokens with which all requests begin")
            self._take(spare, Request(self.beginning, 1))
            self.pages.grow(spare, n)
            for start in range(0, n, self.chunk):
                self.cached[spare] = start
                self._run(self._read, self._chunk(np.arange(len(self.places)) == spare))
            self._clear(spare)
        self.has_begun = True

    def _forget_gone(self) -> None:
        if self.has_gone:
            self.has_gone = False
            with self.lock:
                self.waiting = deque(request for request in self.waiting if not request.gone)
            for i in self.served:
                if self.places[i] and self.places[i].gone:
                    self._leave(i)

    def _admit(self) -> None:
        """Gives free places to requests that wait, while there are pages for their prompts."""
        for i in self.served if self.waiting else ():
            if self.places[i] is None and self.waiting:
                if len(self.beginning):
                    self.pages.share(len(self.places) - 1, i)
                if not self.pages.grow(i, len(self.waiting[0])):
                    self.pages.leave(i)
                    return
                self._take(i, self.waiting.popleft())
                if len(self.beginning):
                    self._begin_as_all(i)
                    self.cached[i] = len(self.beginning)

    def _begin_as_all(self, place: int) -> None:
        self.table, self.caches = self._begin((self.table, self.caches), place)

    def _take(self, place: int, request: Request) -> None:
        self.came += 1
        self.places[place], self.count[place], self.since[place] = request, len(request), self.came
        self.left[place], self.last[place] = request.wanted - len(request.said), request.part(len(request) - 1)[0]
        self.temperature[place], self.top_p[place] = request.temperature, request.top_p
        self.seed[place] = np.random.SeedSequence((request.seed or 0) % 2**64).generate_state(1)[0]
        self.lookups[place] = Lookup() if self.ahead > 1 and not self.own_drafts else None

    def _leave(self, place: int) -> None:
        self.pages.leave(place)
        self._clear(place)

    def _clear(self, place: int) -> None:
        self.places[place] = self.lookups[place] = None
        for numbers in (self.cached, self.count, self.left, self.last, self.since, self.temperature, self.offered):
            numbers[place] = 0

    def _grow(self, place: int, tokens: int) -> None:
        """Gives a place pages for this many tokens. While there are none, the last request that came waits again."""
        while self.places[place] and not self.pages.grow(place, tokens):
            last = int(self.since.argmax())
            self.waiting.appendleft(self.places[last])
            self._leave(last)
            self.put_back += 1

    # ---- the two kinds of calls

    def _chunk(self, reads: np.ndarray) -> Call:
        """The next tokens of the places that read."""
        tokens = np.zeros((len(reads), self.chunk), np.int32)
        lengths = np.where(reads, np.minimum(self.count, self.cached + self.chunk), 0)
        for i in np.flatnonzero(reads).tolist():
            new = self.places[i].part(self.cached[i], lengths[i])
            tokens[i, : len(new)] = new
            self._learn(i, lengths[i])
        return self._call(tokens, lengths)

    def _heard_of_chunk(self, call: Call, chosen: np.ndarray) -> list[Request]:
        """Counts what was read, and hands out the first token of the places that have read all."""
        self.cached = np.where(call.lengths > 0, call.lengths, self.cached)
        return self._heard((call.lengths > 0) & (self.cached == self.count), chosen, _none(len(chosen)))

    def _step(self, says: np.ndarray) -> Call:
        """The last token of the places that say, and drafts of what follows it."""
        for i in sorted(np.flatnonzero(says & (self.pages.room < self.count)).tolist(), key=self.since.__getitem__):
            self._grow(i, int(self.count[i]))  # those that came first do not wait for later ones
        says = says & (self.count > 0)  # without those that wait again
        tokens, lengths = np.zeros((len(says), self.ahead), np.int32), np.where(says, self.count, 0)
        tokens[:, 0] = self.last
        if self.ahead > 1:
            tokens[:, 1:], drafts = self._drafts(says)
            for i in np.flatnonzero(self.pages.room < lengths + drafts).tolist():
                if not self.pages.grow(i, int(lengths[i] + drafts[i])):
                    drafts[i] = self.pages.room[i] - lengths[i]
            lengths = lengths + drafts
        return self._call(tokens, lengths)

    def _drafts(self, says: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drafts int32 `[places, ahead - 1]`, and how many of them each place has and wants."""
        wanted = np.where(says, np.minimum(self.left, self.ahead) - 1, 0)
        if self.own_drafts:
            return self.proposed, np.minimum(wanted, self.offered)
        drafts, count = np.zeros_like(self.proposed), np.zeros_like(wanted)
        which = np.flatnonzero(wanted)
        for i, n, there in zip(which.tolist(), wanted[which].tolist(), self.count[which].tolist(), strict=True):
            self._learn(i, there)
            if found := self.lookups[i].drafts(n):
                drafts[i, : len(found)], count[i] = found, len(found)
        return drafts, count

    def _learn(self, place: int, count: int) -> None:
        """Lets drafts be found among the first `count` tokens of a place."""
        if (lookup := self.lookups[place]) and len(lookup.tokens) < count:
            lookup.extend(self.places[place].part(len(lookup.tokens), count).tolist())

    def _heard_of_step(self, call: Call, chosen: np.ndarray) -> list[Request]:
        """Counts what was read, without drafts that were wrong, and hands out the tokens."""
        speaks, right = call.lengths > 0, accepted(call.tokens, call.start, call.lengths, chosen)
        self.steps += int(speaks.sum())
        self.drafted += int((call.lengths - call.start - 1)[speaks].sum())
        self.accepted += int(right.sum())
        self.cached = np.where(speaks, call.start + 1 + right, self.cached)
        if self.own_drafts:
            self.proposed = chosen[:, self.ahead :][:, : self.ahead - 1]
            self.offered = np.where(speaks, self.ahead - 1, 0)
        return self._heard(speaks, chosen, right)

    def _heard(self, speaks: np.ndarray, chosen: np.ndarray, right: np.ndarray) -> list[Request]:
        """Hands out the first tokens in rows of `chosen`, `right` and one more. Returns the requests that are done."""
        self.count = np.where(speaks, self.cached + 1, self.count)
        self.left = np.where(speaks, self.left - 1 - right, self.left)
        self.last = np.where(speaks, chosen[np.arange(len(right)), right], self.last)
        done, which = [], np.flatnonzero(speaks)
        for i, n, tokens in zip(which.tolist(), (right[which] + 1).tolist(), chosen[which].tolist(), strict=True):
            request = self.places[i]
            if request.hears(tokens[:n]):
                done.append(request)
                self._leave(i)
            elif (lookup := self.lookups[i]) and len(lookup.tokens) == len(request) - n:
                lookup.extend(tokens[:n])
        return done

    def _call(self, tokens: np.ndarray, lengths: np.ndarray) -> Call:
        start = np.where(lengths > 0, self.cached, 0)
        sampling = self.temperature.copy(), self.top_p.copy(), self.seed.copy()  # the call may outlast a change of them
        return Call(tokens, start, lengths, self.pages.holding(start, tokens.shape[1]), *sampling)

    def _run(self, f: Callable[..., Any], call: Call) -> np.ndarray:
        chosen, (self.table, self.caches) = f(self.parameters, (self.table, self.caches), call)
        return np.asarray(chosen)


def _none(b: int = 0) -> np.ndarray:
    return np.zeros(b, np.int32)


def accepted(tokens: Any, start: Any, lengths: Any, chosen: Any) -> Any:
    """Counts the drafts of a step that each place would have said, int32 `[places]`: the first that it has chosen, too.

    tokens: int32 `[places, s]`, the last token and its drafts; chosen: what follows each of them, in NumPy or in JAX.
    """
    xp = jnp if isinstance(chosen, jax.Array) else np
    s = tokens.shape[1]
    is_drafted = xp.arange(1, s) < (lengths - start)[:, None]
    return xp.cumprod(is_drafted & (tokens[:, 1:] == chosen[:, : s - 1]), 1).sum(1, dtype=xp.int32)
