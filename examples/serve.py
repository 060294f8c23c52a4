"""Serves requests that come and go, with a small DeepSeek-V4-style model: all kinds of layers, random weights.

A batch has places. The server reads a new request in chunks, for all places at once that have something to read. Then a
place says a token in each step, greedily or by chance, until it has said enough, and goes to the next request. Caches
are updated in place and never cleared: the entries of a former request are at positions that the new one does not see.

Compressed entries are in pages, of which there are fewer than all places could fill. A request gets pages as it grows
and gives them back at its end. It waits while there are none for its prompt. Where a request cannot grow, the last one
that came gives its pages back and waits to be read again. One that could never fit is refused. All requests begin
alike (as with a system prompt): the pages of this beginning are read once and belong to all of them.

With `--speculate N` a step takes up to N more tokens of a place: drafts, which the model reads at once. It says those
that it would have said, and the token after them; the others are taken back, by a smaller length in the next step.
Places have different numbers of drafts in a call. A model may make its own drafts (`propose`), as a part of the step.
Here the drafter is a stand-in: where the last tokens of a request stood before, in it or in a request that is done, it
proposes what came after them then. With `--again M` the
last M requests ask what the first M asked.

There are three jitted functions: `read` takes a chunk of prompts, `say` a step, `begin` gives a place the beginning. At
the end the program reads some greedy requests alone and whole, which must have said the same.
"""

import argparse
import collections
import dataclasses
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsv4_fmha.layers import STEP_OPTIONS, LayerCache, from_config

VOCABULARY, WIDTH = 128, 64


class Caches(NamedTuple):
    """The caches of all layers, which have the same table of pages."""

    layers: list[LayerCache]

    def with_block_table(self, table):
        return Caches([cache.with_block_table(table) for cache in self.layers])

    def fork(self, source, target):
        return Caches([cache.fork(source, target) for cache in self.layers])


class Tiny:
    """A model of four layers. `Server` takes any model with these methods: see `examples/deepseek_v4`."""

    def __init__(self, d):
        kinds = ("sliding", "compressed_sparse", "heavily_compressed", "compressed_sparse")
        self.layers = from_config(
            {  # the entries of a config.json, small
                "hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 16, "head_dim": d,
                "qk_rope_head_dim": d // 8, "q_lora_rank": 32, "o_groups": 4, "o_lora_rank": 16, "sliding_window": 16,
                "layer_types": [f"{kind}_attention" for kind in kinds], "compress_rate_hca": 16,  # a model's is 128
                "index_n_heads": 16, "index_head_dim": d // 4, "index_topk": 8,
                "rope_theta": 10000, "compress_rope_theta": 160000,
            }
        )  # fmt: skip

    def init(self, key, dtype):
        def one(layer, key):
            a, b, c = jax.random.split(key, 3)
            up = jax.random.normal(a, (WIDTH, 2 * WIDTH), dtype) * WIDTH**-0.5
            down = jax.random.normal(c, (2 * WIDTH, WIDTH), dtype) * WIDTH**-0.5
            return {"attention": layer.init(b, dtype), "up": up, "down": down}

        first, last, *keys = jax.random.split(key, 2 + len(self.layers))
        embed, head = (jax.random.normal(k, (VOCABULARY, WIDTH), dtype) for k in (first, last))
        return {"embed": embed, "head": head.T, "layers": [one(*x) for x in zip(self.layers, keys, strict=True)]}

    def cache(self, *args, **kwargs):
        return Caches([layer.cache(*args, **kwargs) for layer in self.layers])

    def __call__(self, parameters, tokens):
        """float32 logits `[b, s, VOCABULARY]` of whole sequences `[b, s]`."""
        nothing = [None] * len(self.layers)
        return self._forward(parameters, tokens, nothing, lambda layer, p, x, _: layer(p, x))[0]

    def read(self, parameters, tokens, caches, start, lengths):
        """A chunk of prompts: the logits `[b, VOCABULARY]` of each one's last token, and the new caches."""

        def attend(layer, p, x, cache):
            return layer(p, x, cache, start=start, lengths=lengths)

        logits, caches = self._forward(parameters, tokens, caches.layers, attend)
        last = jnp.maximum(lengths - start - 1, 0)[:, None, None]
        return jnp.take_along_axis(logits, last, 1)[:, 0], caches

    def steps(self, parameters, tokens, caches, start, lengths):
        """New tokens `[b, s]` of each sequence from `start` on: logits `[b, s, VOCABULARY]`, and the new caches."""

        def attend(layer, p, x, cache):
            return layer.step(p, x, cache, start=start, lengths=lengths)

        return self._forward(parameters, tokens, caches.layers, attend)

    def _forward(self, parameters, tokens, caches, attend):
        x, kept = parameters["embed"][tokens], []
        for layer, p, cache in zip(self.layers, parameters["layers"], caches, strict=True):
            out = attend(layer, p["attention"], norm(x), cache)
            x = x + out.y
            x = x + jax.nn.silu(norm(x) @ p["up"]) @ p["down"]
            kept.append(out.cache)
        return (norm(x) @ parameters["head"]).astype(jnp.float32), Caches(kept)


def norm(x):
    return (x * jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-6)).astype(x.dtype)


def choose(logits, temperature, key):
    """A token for each row of logits `[b, s, VOCABULARY]`: the likeliest where temperature `[b]` is 0, else a random
    one.
    """
    by_chance = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6)[:, None, None])
    return jnp.where(temperature[:, None] > 0, by_chance, logits.argmax(-1)).astype(jnp.int32)


def drafts(tokens, others, count):
    """Up to `count` tokens that may come next: what came after the last place where the last three stood, or the last
    two, in these tokens or in one of the others.
    """
    for n in (3, 2):
        for text in (tokens, *reversed(others)):
            if min(len(text) - 1, len(tokens)) >= n:
                earlier = np.lib.stride_tricks.sliding_window_view(text[:-1], n)
                found = np.flatnonzero((earlier == tokens[-n:]).all(1))
                if len(found):
                    return text[found[-1] + n :][:count]
    return tokens[:0]


class TooLong(ValueError):
    """A request that could never fit."""


@dataclasses.dataclass
class Request:
    prompt: np.ndarray
    wanted: int
    """tokens"""
    temperature: float
    heard: Callable[[int], None] = lambda token: None
    """called with each token as it is said"""
    end: int = -1
    """the token after which it says no more"""
    gone: bool = False
    """whether nobody listens any more: the server forgets it before its next call"""
    said: list[int] = dataclasses.field(default_factory=list)
    read: int = 0
    """tokens that the caches hold"""
    proposed: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    """the model's drafts of what follows"""
    came: int = 0
    """how many requests had got a place when it got its, for the last time"""

    @property
    def tokens(self):
        return np.asarray([*self.prompt, *self.said], np.int32)


class Pages:
    """The pages of the caches' pools, each of `page` tokens: `table[i]` are those of place i, and -1 is none.

    One table serves all layers. Places may share pages; a page is free when nobody has it.
    """

    def __init__(self, places, room, page, count):
        self.page, self.free, self.owners = page, list(range(count)), np.zeros(count, int)
        self.table = np.full((places, self.needed(room)), -1, np.int32)

    def needed(self, tokens):
        return -(-tokens // self.page)

    def grow(self, place, tokens):
        """Gives a place pages for this many tokens; False if there are too few."""
        there = (self.table[place] >= 0).sum()
        more = max(self.needed(tokens) - there, 0)
        if more > len(self.free):
            return False
        new, self.free = self.free[:more], self.free[more:]
        self.owners[new] = 1
        self.table[place, there : there + more] = new
        return True

    def room(self, place):
        """Tokens for which a place has pages."""
        return int((self.table[place] >= 0).sum()) * self.page

    def share(self, source, target):
        """Gives a place without pages those of another, which has no page that is not full."""
        self.table[target] = self.table[source]
        self.owners[self.table[source][self.table[source] >= 0]] += 1

    def leave(self, place):
        gone = self.table[place][self.table[place] >= 0]
        self.owners[gone] -= 1
        self.free += gone[self.owners[gone] == 0].tolist()
        self.table[place] = -1


class Server:
    """Requests in `places`, each of at most `room` tokens, over pools of `pages` pages of `page` tokens.

    One more place reads the beginning of all requests, as far as it fills pages, and is idle from then on. So its rings
    and pages stay as they are, and other places get them.
    """

    def __init__(self, model, parameters, dtype, places, room, chunk, page, pages, beginning=(), speculate=0, seed=0):
        self.parameters, self.chunk, self.key = parameters, chunk, jax.random.key(seed)
        self.own_drafts = speculate > 0 and hasattr(model, "propose")
        speculate = min(speculate, model.block) if self.own_drafts else speculate
        self.room, self.ahead = room, speculate + 1  # tokens of a request, and of a step, at most
        self.pages = Pages(places + 1, room, page, pages)
        how = {"block_table": self.pages.table, "page_tokens": page, "pages": pages, "steps": self.ahead}
        self.caches = model.cache(places + 1, room, dtype, **how)
        self.places: list[Request | None] = [None] * (places + 1)
        self.waiting: collections.deque[Request] = collections.deque()
        self.done: list[np.ndarray] = []
        """tokens of the requests that are done"""
        self.came = self.put_back = self.steps = self.drafted = self.accepted = 0

        def read(parameters, caches, table, tokens, start, lengths, temperature, key):
            logits, caches = model.read(parameters, tokens, caches.with_block_table(table), start, lengths)
            return choose(logits[:, None], temperature, key), caches

        def say(parameters, caches, table, tokens, start, lengths, temperature, key):
            logits, caches = model.steps(parameters, tokens, caches.with_block_table(table), start, lengths)
            chosen = choose(logits, temperature, key)
            if not self.own_drafts:
                return chosen, caches
            drafted = jnp.arange(1, self.ahead) < (lengths - start)[:, None]
            right = jnp.cumprod(drafted & (tokens[:, 1:] == chosen[:, :-1]), 1).sum(1)
            last, n = jnp.take_along_axis(chosen, right[:, None], 1)[:, 0], jnp.where(lengths > 0, start + 1 + right, 0)
            proposed, caches = model.propose(parameters, last, caches, n)
            return jnp.concatenate([chosen, proposed], 1), caches

        def begin(caches, place):
            return caches.fork(places, place)

        where = jax.tree.map(lambda x: x.sharding, self.caches)  # they stay where they are
        self._read = jax.jit(read, donate_argnums=1, out_shardings=(None, where))
        self._say = jax.jit(say, donate_argnums=1, out_shardings=(None, where), compiler_options=STEP_OPTIONS)
        self._begin = jax.jit(begin, donate_argnums=0, out_shardings=where)
        self._alone = jax.jit(lambda parameters, tokens: model(parameters, tokens)[0].argmax(-1))
        self.beginning = np.asarray(beginning[: len(beginning) // page * page], np.int32)
        if len(self.beginning):
            self.places[-1] = Request(self.beginning, 1, 0.0)
            while not self._call([places]):
                pass
            self.places[-1] = None

    def compile(self):
        """Calls all functions once, with every place idle."""
        for f, s in ((self._read, self.chunk), (self._say, self.ahead)):
            self._run(f, *self._idle(s))
        self.caches = self._begin(self.caches, len(self.places) - 1)

    def submit(self, request):
        """Lets a request wait for a place and for pages. Another thread than `work`'s may call it.

        Raises ValueError if the request begins otherwise or wants nothing, TooLong if it can never fit.
        """
        n, alike, count = len(request.prompt) + request.wanted, len(self.beginning), len(self.pages.owners)
        if len(request.prompt) <= alike or not np.array_equal(request.prompt[:alike], self.beginning):
            raise ValueError(f"a request that does not go on from the {alike} tokens with which all begin")
        if request.wanted < 1:
            raise ValueError(f"a request that wants {request.wanted} tokens")
        if self.pages.needed(n) > min(count, self.pages.table.shape[1]):
            raise TooLong(f"a request of {n} tokens, for which {count} pages of {self.pages.page} are too few")
        self.waiting.append(request)

    def work(self):
        """One call: a chunk for the places that still read, if there are any, else a step for all that say."""
        for i in range(len(self.places) - 1):
            if self.places[i] and self.places[i].gone:
                self._leave(i)
            while self.waiting and self.waiting[0].gone:
                self.waiting.popleft()
            if self.places[i] is None and self.waiting and not self._admit(i, self.waiting[0]):
                break
        done = self._call(range(len(self.places) - 1))
        requests = [self.places[i] for i in done]
        self.done += [request.tokens for request in requests]
        for i in done:
            self._leave(i)
        return requests

    def _admit(self, place, request):
        """Gives a request a place and pages for its prompt, if there are any; it begins as all do."""
        self.pages.share(len(self.places) - 1, place)
        if not self.pages.grow(place, len(request.tokens)):
            self.pages.leave(place)
            return False
        self.places[place] = self.waiting.popleft()
        self.came += 1
        request.read, request.came = len(self.beginning), self.came
        self.caches = self._begin(self.caches, place)
        return True

    def _leave(self, place):
        self.pages.leave(place)
        self.places[place] = None

    def _grow(self, place, tokens):
        """Gives a place pages for this many tokens. While there are none, the last request that came waits again."""
        while self.places[place] and not self.pages.grow(place, tokens):
            last = max((i for i, r in enumerate(self.places) if r), key=lambda i: self.places[i].came)
            self.waiting.appendleft(self.places[last])
            self._leave(last)
            self.put_back += 1
        return self.places[place] is not None

    def _call(self, places):
        """One call for these places. Returns those whose requests are done."""
        left = {i: len(r.tokens) - r.read for i in places if (r := self.places[i])}
        reads = any(n > 1 for n in left.values())
        tokens, start, lengths, temperature = self._idle(self.chunk if reads else self.ahead)
        for i in sorted(left, key=lambda i: self.places[i].came):  # those that came first do not wait for later ones
            request, n = self.places[i], min(left[i], self.chunk)
            if (n > 1) == reads and request and self._grow(i, request.read + n):
                new = request.tokens[request.read : request.read + n]
                new = new if reads else np.concatenate([new, self._drafts(i)])
                tokens[i, : len(new)], start[i] = new, request.read
                lengths[i], temperature[i] = request.read + len(new), request.temperature
        chosen, done = self._run(self._read if reads else self._say, tokens, start, lengths, temperature), []
        for i in np.flatnonzero(lengths):
            request, n = self.places[i], 0
            if reads:
                request.read = int(lengths[i])
            else:
                proposed = tokens[i, 1 : lengths[i] - start[i]]
                n = int(np.cumprod(proposed == chosen[i, : len(proposed)]).sum())  # as many as the model would say
                request.read += 1
                self.steps, self.drafted, self.accepted = (
                    self.steps + 1,
                    self.drafted + len(proposed),
                    self.accepted + n,
                )
            if request.read == len(request.tokens):
                request.read, request.proposed = request.read + n, chosen[i, self.ahead :]  # of a chunk there are none
                for token in chosen[i, : n + 1].tolist():
                    request.said.append(token)
                    request.heard(token)
                    if token == request.end:
                        break
                if len(request.said) == request.wanted or request.said[-1] == request.end:
                    done.append(i)
        return done

    def _drafts(self, place):
        """Drafts of a greedy request, as many as it wants and as there are pages for."""
        request = self.places[place]
        count = 0 if request.temperature else min(self.ahead, request.wanted - len(request.said)) - 1
        found = request.proposed[:count] if self.own_drafts else drafts(request.tokens, self.done, count)
        if not self.pages.grow(place, request.read + 1 + len(found)):
            found = found[: self.pages.room(place) - request.read - 1]
        return found

    def _idle(self, chunk):
        """tokens, start, lengths and temperature of a call in which no place takes part: their lengths are 0."""
        b = len(self.places)
        return np.zeros((b, chunk), np.int32), *np.zeros((2, b), np.int32), np.zeros(b, np.float32)

    def _run(self, f, tokens, *of_places):
        self.key, key = jax.random.split(self.key)
        chosen, self.caches = f(self.parameters, self.caches, self.pages.table, tokens, *of_places, key)
        return np.asarray(chosen)

    def alone(self, request):
        """The likeliest token after each said one, with the request read whole and without a cache."""
        whole, n = np.zeros((1, self.room), np.int32), len(request.tokens)
        whole[0, :n] = request.tokens
        return np.asarray(self._alone(self.parameters, whole))[len(request.prompt) - 1 : n - 1]


def main(
    requests=10, places=4, chunk=32, longest=150, wanted=24, page=32, pages=8, beginning=64, speculate=0, again=0,
    progress=True,
):  # fmt: skip
    """Serves random requests; returns the finished requests and the server."""
    rng = np.random.default_rng(0)
    alike = rng.integers(0, VOCABULARY, beginning, dtype=np.int32)
    if progress:
        print("making random parameters and empty caches", flush=True)
    on_gpu = jax.default_backend() == "gpu"
    d, dtype = (512, jnp.bfloat16) if on_gpu else (64, jnp.float32)  # a size with kernels on a GPU; a quick one without
    model = Tiny(d)
    parameters = jax.jit(model.init, static_argnums=1)(jax.random.key(0), dtype)
    server = Server(model, parameters, dtype, places, longest + wanted, chunk, page, pages, alike, speculate)
    asked = []
    for i in range(requests - again):
        own = rng.integers(0, VOCABULARY, rng.integers(1, longest - beginning + 1), dtype=np.int32)
        prompt, temperature = np.concatenate([alike, own]), 0.8 if i % 2 else 0.0
        asked.append((prompt, int(rng.integers(1, wanted + 1)), temperature))
    for request in asked + asked[:again]:
        server.submit(Request(*request))
    if progress:
        print(f"{jax.default_backend()}: compiling the programs that read and say", flush=True)
    server.compile()
    done, calls, began = [], 0, time.perf_counter()
    while server.waiting or any(server.places):
        done += server.work()
        calls += 1
        if progress and sys.stdout.isatty():
            print(f"\r{len(done)} of {requests} requests, {len(server.waiting)} wait", end="", flush=True)
    seconds = time.perf_counter() - began
    said, read = (sum(len(x) for x in xs) for xs in ([r.said for r in done], [r.prompt for r in done]))
    print(f"\r{jax.default_backend()}: {requests} requests in {places} places, {calls} calls")
    print(f"{read} tokens read, {said} said, in {seconds:.2f} s: {(read + said) / seconds:.0f} tokens/s")
    print(
        f"{pages} pages of {page} tokens; {places} places could fill {places * server.pages.needed(longest + wanted)}"
    )
    print(f"all requests have {len(server.beginning) // page} of them; {server.put_back} times one had to wait again")
    if speculate:
        drafted, accepted, steps = server.drafted, server.accepted, server.steps
        print(f"{accepted} of {drafted} drafts were right; a place said {1 + accepted / steps:.2f} tokens a step")
    return done, server


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name, default, what in (
        ("requests", 10, "how many"),
        ("places", 4, "requests served at once"),
        ("chunk", 32, "tokens read at once"),
        ("longest", 150, "tokens of a prompt, at most"),
        ("wanted", 24, "tokens to say, at most"),
        ("page", 32, "tokens of a page, a multiple of 16"),
        ("pages", 8, "pages in the pool of each cache"),
        ("beginning", 64, "tokens with which all prompts begin; whole pages of them are shared"),
        ("speculate", 0, "drafts of a request in a step, at most"),
        ("again", 0, "requests that ask what another one asked"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: %(default)s)")
    return vars(parser.parse_args())


if __name__ == "__main__":
    with jax.default_matmul_precision("float32"):
        done, server = main(**arguments())
        greedy = [r for r in done if not r.temperature]
        same = [float(np.mean(server.alone(r) == r.said)) for r in greedy[:3]]
    print(f"of {len(same)} greedy ones read alone, {np.mean(same):.0%} of the tokens are the same")
    assert np.mean(same) > (0.9 if jax.default_backend() == "gpu" else 0.999), same
