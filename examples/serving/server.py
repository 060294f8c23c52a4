"""A server of requests in the places of a batch, over pages of caches, without a thread or a socket of its own.

A batch has places. The server reads new requests in chunks, some places at once, those that came first. Then a place
says a token in each step, until it has said enough, and goes to the next request. While some read and others say,
chunks and steps take turns. Caches are updated in place and never cleared: the entries of a former request are at
positions that the new one does not see.

Compressed entries are in pages, of which there are fewer than all places could fill. A request gets pages as it grows
and gives them back at its end. It waits while there are none for its prompt. Where a request cannot grow, the last one
that came gives its pages back and waits to be read again. One that could never fit is refused.

A prompt may begin as an earlier one (as with a system prompt, or a chat that goes on). What was read of that one is
kept up to the end of each chunk that is the end of a page (prefixes.py), and the later one is read from there on.

With drafts a step takes several tokens of a place, which the model reads at once. The place says those that it would
have said, and the token after them. The others are taken back, by a smaller length in the next step.

The device keeps the last token of each place, and how many it has read (calls.py). So the next call begins before the
host has heard what the last one said, and tokens become text while the device works. A token after one that ends its
request is then said in vain, and dropped. The host waits for what was said where it must know: for drafts that it looks
up, and where pages are short.

The host's work for a call grows with the tokens that are new in it, and with nothing else: not with the lengths of
contexts, not with the requests that have come. What places have in common is an array with a number for each.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .calls import Call, Flight, Programs
from .lookup import Lookup
from .pages import Pages
from .prefixes import Prefix, Prefixes, chained
from .request import Request, TooLong, checked_tokens, integer


class Server:
    """Requests in `places`, each of at most `room` tokens, over pools of `pages` pages of `page` tokens.

    Args:
      model: has `vocabulary`; `cache(b, room, dtype, block_table=, page_tokens=, pages=, steps=)`, which makes caches
        with `with_block_table(table)`, `take(places)`, `put(places, taken)` and `rings()`; `read` and `steps`, from
        (parameters, tokens `[b, s]`, caches, start `[b]`, lengths `[b]`) to logits `[b, vocabulary]` of the last
        tokens, or `[b, s, vocabulary]` of all, and new caches; and a call from (parameters, tokens) to logits. A model
        that drafts has `block`, too, and `propose`: see examples/deepseek_v4/drafts.py.
      chunk: tokens of a prompt that are read at once.
      readers: prompts that are read at once, at most.
      prefixes: beginnings of prompts that are kept for later ones, at most. Each takes as many bytes as a place has
        besides pages. Its pages are taken from it when no others are free.
      rounds: steps of a call. More of them leave the host more time for each call. But a place may say up to so many
        tokens in vain after the end of its request, and a prompt that comes waits for as many steps.
      speculate: drafts of a place in a step, at most: the model's own, or what came after the same tokens before in
        the same request.
      reader: makes of the model and operands what is called in place of `read`, which is a part of one program
        otherwise. The caches have `pools()` and `with_pools(pools)` then: see examples/deepseek_v4/reader.py.
      seed: from which requests that have none get one.
      progress: called with what is compiled and read before the first request, and how long it took.

    Raises:
      ValueError: a size out of range.
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
        speculate: int = 0,
        seed: int = 0,
        progress: Callable[[str], None] = lambda text: None,
        readers: int = 1,
        prefixes: int = 64,
        rounds: int = 1,
        reader: Callable[..., Any] | None = None,
    ) -> None:
        sizes = {"places": places, "room": room, "chunk": chunk, "page": page, "pages": pages}
        sizes |= {"readers": readers, "rounds": rounds}
        for name, size in sizes.items():
            integer(name, size, 1)
        integer("speculate", speculate, 0)
        integer("prefixes", prefixes, 0)
        self.parameters, self.room, self.chunk, self.vocabulary = parameters, room, chunk, model.vocabulary
        own_drafts = speculate > 0 and hasattr(model, "propose")
        self.ahead = 1 + (min(speculate, model.block) if own_drafts else speculate)
        """tokens of a step, at most"""
        if self.ahead > 1 and not own_drafts and rounds > 1:
            got, wanted = f"{rounds} with drafts that the host looks up", "1, after which it has looked them up again"
            raise ValueError(f"rounds: got {got}, wanted {wanted}")
        self.rounds, self.each = rounds, rounds * self.ahead
        """steps of a call, and its tokens of a place, at most"""
        self.readers = min(readers, places)
        self.longest = min(room, pages * page)
        """tokens of a request, at most"""
        self.served, b = range(places), places
        self.places: list[Request | None] = [None] * b
        self.pages = Pages(b, room, page, pages)
        self.prefixes = Prefixes(prefixes, self.pages) if prefixes else None
        self.waiting: deque[Request] = deque()
        self.lock = threading.Lock()
        self.has_gone = self.was_chunk = False
        self.came = self.put_back = self.shared = self.steps = self.drafted = self.accepted = 0
        self.is_stuck = False
        """whether the first request that waits has found too few pages, and nothing has changed since then"""
        self.seeds, self.progress = np.random.default_rng(seed), progress
        self.flight: Flight | None = None
        """the call that the host has not heard of"""

        # Arrays with a number for each place, 0 where it is free.
        self.read, self.goal = _none(b), _none(b)
        """tokens that chunks have read, or are about to; how many there are for them"""
        self.count, self.total = _none(b), _none(b)
        """tokens that the host knows; how many there will be, at most"""
        self.flying = _none(b)
        """tokens that the call in flight says, at most"""
        self.is_new = np.zeros(b, bool)
        """whether no chunk of it has been read"""
        self.since = _none(b)
        """the number of its request among all that got a place"""
        self.temperature, self.top_p = np.zeros((2, b), np.float32)
        self.seed = np.zeros(b, np.uint32)
        self.lookup = Lookup(b, room) if self.ahead > 1 and not own_drafts else None
        """other drafts than the model's own"""

        cache = {"page_tokens": page, "pages": pages, "steps": self.ahead}
        caches = model.cache(b, room, dtype, block_table=np.full_like(self.pages.table, -1), **cache)
        self.programs = Programs(
            model, caches, self.pages.table.shape, page, chunk, self.ahead, own_drafts, prefixes, rounds, reader
        )
        self.state = self.programs.state
        self._alone = jax.jit(lambda parameters, tokens: model(parameters, tokens)[0].argmax(-1))

    @property
    def caches(self) -> Any:
        return self.state.caches

    # ---- what others call

    def compile(self) -> None:
        """Calls all programs once, with every place idle."""
        of_step = f"{self.rounds} steps of" if self.rounds > 1 else "steps of"
        of_step += f" {self.ahead} {'token' if self.ahead == 1 else 'tokens'}"
        what_reads = f"chunks of {self.chunk} tokens"
        for what, is_step in ((what_reads, False), (of_step, True)):
            self.progress(f"compiling the program for {what}")
            began, nobody = time.perf_counter(), np.zeros(len(self.places), bool)
            jax.block_until_ready(self._run(is_step, self._step(nobody) if is_step else self._chunk(nobody)))
            self.progress(f"compiled it in {time.perf_counter() - began:.1f} s")
        if self.prefixes:
            self._begin(len(self.places), 0, np.full_like(self.pages.table[0], -1))

    def keep(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Reads whole pages of tokens with which prompts will begin, so that these are read from there on.

        Call it while nobody else is served.

        Raises:
          ValueError: as `submit`.
        """
        n = len(tokens) // self.pages.page * self.pages.page
        if n and self.prefixes:
            self.progress(f"reading {n} tokens with which prompts will begin")
            self.submit(Request(tokens[:n], 1))
            while not self.is_idle:
                self.work()

    @property
    def is_idle(self) -> bool:
        """True if nobody waits and nobody is served."""
        return not self.waiting and not any(self.places)

    def submit(self, request: Request) -> None:
        """Lets a request wait for a place and for pages. Another thread than `work`'s may call it.

        Raises:
          ValueError: the prompt has no tokens, or has one that is not in the vocabulary; or a number is out of its
            range.
          TooLong: the request can never fit.
        """
        request.check()
        request.prompt = checked_tokens("prompt", request.prompt, self.vocabulary)
        n = len(request.prompt) + request.wanted
        if n > self.longest:
            room = f"{len(self.pages.owners)} pages of {self.pages.page} and a room of {self.room}"
            raise TooLong(f"prompt: a request of {n} tokens, {request.wanted} to be said, for which {room} are too few")
        request.chain = []
        if self.prefixes:
            chained(request, self.pages.page)
        with self.lock:
            if request.seed is None:
                request.seed = int(self.seeds.integers(2**63))
            self.waiting.append(request)

    def forget(self, request: Request) -> None:
        """Lets a request end before the next call. Another thread than `work`'s may call it."""
        request.gone = self.has_gone = True

    def work(self) -> list[Request]:
        """Begins a call, a chunk for places that read or a step for those that say, and hears what the last one said.

        Returns the requests that have ended. One whose `heard` raised has this as its `error`, and no other request
        knows of it. What a call itself raises is raised: then caches are lost, and the server with them.
        """
        self._forget_gone()
        self._admit()
        ended = self._land() if self.lookup or self._is_short() else []
        reads, says = self._turns()
        self.was_chunk = bool(reads.any() and not (self.was_chunk and says.any()))
        call = self._chunk(reads) if self.was_chunk else self._step(says)
        new = self._begun(call) if call.most.any() else None
        return ended + self._land(new)

    def alone(self, request: Request) -> np.ndarray:
        """The likeliest token after each said one, with the request read whole and without a cache."""
        whole, n = np.zeros((1, self.room), np.int32), len(request)
        whole[0, :n] = request.tokens
        return np.asarray(self._alone(self.parameters, whole))[len(request.prompt) - 1 : n - 1]

    # ---- who has a place, and pages

    def _forget_gone(self) -> None:
        if self.has_gone:
            self.has_gone = False
            with self.lock:
                self.waiting = deque(request for request in self.waiting if not request.gone)
            self.is_stuck = False
            for i in self.served:
                if self.places[i] and self.places[i].gone:
                    self._leave(i)

    def _admit(self) -> None:
        """Gives free places to requests that wait, while there are pages for their prompts."""
        for i in self.served if self.waiting and not self.is_stuck else ():
            if self.places[i] is None and self.waiting:
                request = self.waiting[0]
                found = self.prefixes.longest(request) if self.prefixes else None
                if found:
                    self.pages.share(i, found.pages)
                if not self._has_pages(i, len(request)):
                    self.pages.leave(i)
                    self.is_stuck = True
                    return
                self._take(i, self.waiting.popleft())
                if found:
                    self._go_on(i, found)

    def _go_on(self, place: int, prefix: Prefix) -> None:
        """Lets a place, which shares the pages of a prefix, go on from it."""
        self._begin(place, prefix.slot, self.pages.table[place])
        new, self.read[place] = prefix.tokens[self.read[place] :], len(prefix.tokens)
        if self.lookup:
            self.lookup.read(place, new)
        self.shared += len(new)
        self.places[place].shared = len(prefix.tokens)

    def _begin(self, place: int, slot: int, pages: np.ndarray) -> None:
        self.state = self.programs.begin(self.state, np.array([place, slot, *pages], np.int32))

    def _has_pages(self, place: int, tokens: int) -> bool:
        """Gives a place pages for this many tokens, those of prefixes if no others are free; False if too few are."""
        if self.prefixes:
            self.prefixes.make_room(int(self.pages.needed(tokens) - self.pages.counts[place]))
        return self.pages.grow(place, tokens)

    def _take(self, place: int, request: Request) -> None:
        self.came += 1
        self.places[place], self.since[place] = request, self.came
        self.goal[place] = self.count[place] = len(request)
        self.is_new[place], request.shared = True, 0
        self.total[place] = len(request.prompt) + request.wanted
        self.temperature[place], self.top_p[place] = request.temperature, request.top_p
        self.seed[place] = np.random.SeedSequence((request.seed or 0) % 2**64).generate_state(1)[0]

    def _leave(self, place: int) -> None:
        self.pages.leave(place)
        self.is_stuck = False
        self._clear(place)

    def _clear(self, place: int) -> None:
        self.places[place] = None
        for numbers in (
            self.read,
            self.goal,
            self.count,
            self.total,
            self.flying,
            self.since,
            self.is_new,
            self.temperature,
        ):
            numbers[place] = 0
        if self.lookup:
            self.lookup.clear(place)

    def _grow(self, place: int, tokens: int) -> None:
        """Gives a place pages for this many tokens. While there are none, the last request that came waits again."""
        while self.places[place] and not self._has_pages(place, tokens):
            last = int(self.since.argmax())
            self.waiting.appendleft(self.places[last])
            self._leave(last)
            self.put_back += 1

    # ---- the two kinds of calls

    def _turns(self) -> tuple[np.ndarray, np.ndarray]:
        """The places that have something to read, and those that have something to say, bool `[places]`."""
        has_read = self.read == self.goal
        surely_said = np.minimum(self.flying, self.rounds)  # one in each step, without drafts
        return ~has_read, has_read & (self.count + surely_said < self.total)

    def _most(self, more: np.ndarray | int) -> np.ndarray:
        """int32 `[places]`: tokens that caches hold after a call, at most, of one token and so many more. A request's
        last one comes after them.
        """
        return np.minimum(self.count + self.flying + more, self.total - 1)

    def _is_short(self) -> bool:
        """True if there may be too few pages for the next step: whoever gives his back then has to be known whole."""
        more = self.pages.needed(self._most(self.each - 1)) - self.pages.counts
        return bool(more[self._turns()[1]].clip(0).sum() > len(self.pages.free) + self.pages.idle)

    def _chunk(self, reads: np.ndarray) -> Call:
        """The next tokens of the places that read, as many of them as a call takes: those that came first."""
        which = np.flatnonzero(reads)
        which = which[np.argsort(self.since[which])][: self.readers]
        for i in which[self.is_new[which]].tolist():  # what others have read since it came counts, too
            if self.prefixes and (found := self.prefixes.longest(self.places[i], int(self.read[i]))):
                self.pages.share(i, found.pages)
                self._go_on(i, found)
                self.is_stuck = False
        self.is_new[which] = False
        place, (start, most) = np.full(self.readers, len(reads), np.int32), np.zeros((2, self.readers), np.int32)
        slot = np.full(self.readers, -1, np.int32)
        place[: len(which)], start[: len(which)] = which, self.read[which]
        self.read[which] = most[: len(which)] = np.minimum(self.goal, self.read + self.chunk)[which]
        tokens = np.zeros((self.readers, self.chunk), np.int32)
        for row, (i, first, end) in enumerate(zip(which.tolist(), start.tolist(), most.tolist(), strict=False)):
            new = self.places[i].part(first, end)
            tokens[row, : len(new)] = new
            if self.lookup:
                self.lookup.read(i, new)
            if self.prefixes and end % self.pages.page == 0:
                kept = self.prefixes.keep(self.places[i], self.pages.table[i, : end // self.pages.page])
                slot[slot == kept] = -1  # of a row before, if it is gone again
                slot[row] = kept
                self.is_stuck = False
        return self._call(place, start, most, tokens, self.chunk, slot)

    def _step(self, says: np.ndarray) -> Call:
        """The last token of the places that say, and drafts of what follows it."""
        for i in sorted(np.flatnonzero(says & (self.pages.room < self.count)).tolist(), key=self.since.__getitem__):
            self._grow(i, int(self.count[i]))  # those that came first do not wait for later ones
        says = says & (self.count > 0)  # without those that wait again
        more, tokens = self.each - 1, np.zeros((len(says), 0), np.int32)
        if self.lookup:
            tokens, more = self.lookup.drafts(np.arange(len(says)), self.ahead - 1)
        most = np.where(says, self._most(more), 0)
        for i in np.flatnonzero(self.pages.room < most).tolist():
            if not self._has_pages(i, int(most[i])):
                most[i] = self.pages.room[i]
        # The call in flight may say as many tokens as this one, and the new ones begin after them.
        place = np.arange(len(says), dtype=np.int32)
        return self._call(place, (self.count - 1).clip(0), most, tokens, 2 * self.each, np.full_like(place, -1))

    def _call(
        self, place: np.ndarray, start: np.ndarray, most: np.ndarray, tokens: np.ndarray, span: int, slot: np.ndarray
    ) -> Call:
        """A call of these rows; span: tokens from `start` on whose pages the device has to know."""
        of = np.minimum(place, len(self.places) - 1)
        pages = self.pages.holding(of, start, span)
        return Call(place, start, most, self.temperature[of], self.top_p[of], self.seed[of], slot, tokens, pages)

    def _run(self, is_step: bool, call: Call) -> jax.Array:
        """Begins a call, and a copy to the host of what it will have found."""
        f = self.programs.say if is_step else self.programs.read
        found, self.state = f(self.parameters, self.state, call.packed())
        found.copy_to_host_async()
        return found

    def _begun(self, call: Call) -> Flight:
        takes_part = call.most > 0
        place = call.place[takes_part]
        says = np.where(self.was_chunk, call.most[takes_part] == self.goal[place], self.each).astype(np.int32)
        found = self._run(not self.was_chunk, call)
        return Flight(takes_part, place, self.since[place], says, found, not self.was_chunk)

    def _land(self, new: Flight | None = None) -> list[Request]:
        """Hands out what the call in flight has said; `new` is in flight then. Returns the requests that are done."""
        flight, self.flight = self.flight, new
        self.flying[:] = 0
        if new:
            self.flying[new.place] = new.says
        if flight is None:
            return []
        found = np.asarray(flight.found)[flight.rows]
        is_meant = (flight.since == self.since[flight.place]) & (flight.says > 0)  # others have left their place
        place, found = flight.place[is_meant], found[is_meant]
        said, drafted, tokens = found[..., 0], found[..., 1], found[..., 2:]
        if flight.is_step:
            self.steps += int((said > 0).sum())
            self.drafted += int(drafted.sum())
            self.accepted += int((said - 1).clip(0).sum())
        self.count[place] += said.sum(1)
        if self.lookup:
            self.lookup.add(place, tokens[:, 0], said[:, 0])
        ended = []
        for i, counts, lines in zip(place.tolist(), said.tolist(), tokens.tolist(), strict=True):
            request = self.places[i]
            if request.hears([token for n, line in zip(counts, lines, strict=True) for token in line[:n]]):
                ended.append(request)
                self._leave(i)
        return ended


def _none(b: int = 0) -> np.ndarray:
    return np.zeros(b, np.int32)
