"""Serves requests that come and go, with a small DeepSeek-V4-style model: all kinds of layers, random weights.

A batch has places. The server reads a new request in chunks, for all places at once that have something to read. Then a
place says a token in each step, greedily or by chance, until it has said enough, and goes to the next request. Caches
are updated in place and never cleared: the entries of a former request are at positions that the new one does not see.

There are two jitted functions: `read` takes a chunk of prompts, `say` a step. At the end the program reads some greedy
requests alone and whole, which must have said the same.
"""

import argparse
import collections
import dataclasses
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsv4_fmha.layers import from_config

VOCABULARY, WIDTH = 128, 64


def layers_of(d):
    """The entries of a config.json, small."""
    return from_config(
        {
            "hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 16, "head_dim": d,
            "qk_rope_head_dim": d // 8, "q_lora_rank": 32, "o_groups": 4, "o_lora_rank": 16, "sliding_window": 16,
            "compress_ratios": [0, 4, 128, 4], "index_n_heads": 16, "index_head_dim": d // 4, "index_topk": 8,
            "rope_theta": 10000, "compress_rope_theta": 160000,
        }
    )  # fmt: skip


def initialize(key, layers):
    def one(layer, key):
        a, b, c = jax.random.split(key, 3)
        up = jax.random.normal(a, (WIDTH, 2 * WIDTH)) * WIDTH**-0.5
        return {"attention": layer.init(b), "up": up, "down": jax.random.normal(c, (2 * WIDTH, WIDTH)) * WIDTH**-0.5}

    first, last, *keys = jax.random.split(key, 2 + len(layers))
    embed, head = jax.random.normal(first, (VOCABULARY, WIDTH)), jax.random.normal(last, (WIDTH, VOCABULARY))
    return {"embed": embed, "head": head, "layers": [one(*x) for x in zip(layers, keys, strict=True)]}


def norm(x):
    return (x * jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-6)).astype(x.dtype)


def forward(layers, parameters, tokens, caches, attend):
    """float32 logits `[b, s, VOCABULARY]` and the new caches; attend(layer, parameters, x, cache) -> Output."""
    x, kept = parameters["embed"][tokens], []
    for layer, p, cache in zip(layers, parameters["layers"], caches, strict=True):
        out = attend(layer, p["attention"], norm(x), cache)
        x = x + out.y
        x = x + jax.nn.silu(norm(x) @ p["up"]) @ p["down"]
        kept.append(out.cache)
    return (norm(x) @ parameters["head"]).astype(jnp.float32), kept


def choose(logits, temperature, key):
    """A token for each row of logits `[b, VOCABULARY]`: the likeliest where temperature `[b]` is 0, else a random
    one.
    """
    by_chance = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6)[:, None])
    return jnp.where(temperature > 0, by_chance, logits.argmax(-1)).astype(jnp.int32)


@dataclasses.dataclass
class Request:
    prompt: np.ndarray
    wanted: int
    """tokens"""
    temperature: float
    said: list[int] = dataclasses.field(default_factory=list)
    read: int = 0
    """tokens of the prompt that the caches hold"""


class Server:
    def __init__(self, places, room, chunk, seed=0):
        on_gpu = jax.default_backend() == "gpu"
        d, dtype = (
            (512, jnp.bfloat16) if on_gpu else (64, jnp.float32)
        )  # a size with kernels on a GPU; a quick one without
        self.layers, self.chunk, self.key = layers_of(d), chunk, jax.random.key(seed + 1)
        layers = self.layers
        self.parameters = jax.jit(
            lambda key: jax.tree.map(lambda x: x.astype(dtype) if x.ndim > 1 else x, initialize(key, layers))
        )(jax.random.key(seed))
        self.caches = [layer.cache(places, room, dtype) for layer in layers]
        self.places: list[Request | None] = [None] * places
        self.waiting: collections.deque[Request] = collections.deque()

        def read(parameters, caches, tokens, start, lengths, temperature, key):
            def attend(layer, p, x, cache):
                return layer(p, x, cache, start=start, lengths=lengths)

            logits, caches = forward(layers, parameters, tokens, caches, attend)
            last = jnp.take_along_axis(logits, jnp.maximum(lengths - start - 1, 0)[:, None, None], 1)[:, 0]
            return choose(last, temperature, key), caches

        def say(parameters, caches, tokens, lengths, temperature, key):
            def attend(layer, p, x, cache):
                return layer.step(p, x, cache, lengths=lengths)

            logits, caches = forward(layers, parameters, tokens[:, None], caches, attend)
            return choose(logits[:, 0], temperature, key), caches

        self._read, self._say = (jax.jit(f, donate_argnums=1) for f in (read, say))

    def compile(self):
        """Calls both functions once, with every place idle."""
        idle, greedy = np.zeros(len(self.places), np.int32), np.zeros(len(self.places), np.float32)
        tokens = np.zeros((len(self.places), self.chunk), np.int32)
        _, self.caches = self._read(self.parameters, self.caches, tokens, idle, idle, greedy, self.key)
        _, self.caches = self._say(self.parameters, self.caches, idle, idle, greedy, self.key)

    def work(self):
        """One call: a chunk for the places that still read, if there are any, else a step for all that say."""
        for i, request in enumerate(self.places):
            if request is None and self.waiting:
                self.places[i] = self.waiting.popleft()
        reading = [r is not None and r.read < len(r.prompt) for r in self.places]
        n, self.key, key = len(self.places), *jax.random.split(self.key)
        lengths, temperature = np.zeros(n, np.int32), np.zeros(n, np.float32)
        tokens, start = np.zeros((n, self.chunk), np.int32), np.zeros(n, np.int32)
        for i, request in enumerate(self.places):
            if request is None or reading[i] != any(reading):
                continue  # its lengths are 0, so it does not take part
            temperature[i] = request.temperature
            if reading[i]:
                part = request.prompt[request.read : request.read + self.chunk]
                tokens[i, : len(part)], start[i] = part, request.read
                request.read += len(part)
                lengths[i] = request.read
            else:
                tokens[i, 0], lengths[i] = request.said[-1], len(request.prompt) + len(request.said)
        if any(reading):
            chosen, self.caches = self._read(self.parameters, self.caches, tokens, start, lengths, temperature, key)
        else:
            chosen, self.caches = self._say(self.parameters, self.caches, tokens[:, 0], lengths, temperature, key)
        done, chosen = [], np.asarray(chosen)
        for i, request in enumerate(self.places):
            if request is not None and lengths[i] and request.read == len(request.prompt):
                request.said.append(int(chosen[i]))
                if len(request.said) == request.wanted:
                    done.append(request)
                    self.places[i] = None
        return done

    def alone(self, request):
        """The likeliest token after each said one, with the request read whole and without a cache."""
        whole = np.zeros((1, len(request.prompt) + request.wanted), np.int32)
        whole[0] = [*request.prompt, *request.said]
        nothing = [None] * len(self.layers)
        logits, _ = jax.jit(forward, static_argnums=(0, 4))(
            self.layers, self.parameters, whole, nothing, lambda layer, p, x, _: layer(p, x)
        )
        return np.asarray(logits[0, len(request.prompt) - 1 : -1].argmax(-1))


def main(requests=10, places=4, chunk=32, longest=150, wanted=24, progress=True):
    """Serves random requests; returns the finished requests and the server."""
    rng = np.random.default_rng(0)
    server = Server(places, longest + wanted, chunk)
    for i in range(requests):
        prompt = rng.integers(0, VOCABULARY, rng.integers(1, longest + 1), dtype=np.int32)
        server.waiting.append(Request(prompt, int(rng.integers(1, wanted + 1)), 0.8 if i % 2 else 0.0))
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
    return done, server


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=10, help="how many (default: %(default)s)")
    parser.add_argument("--places", type=int, default=4, help="requests served at once (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=32, help="tokens read at once (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=150, help="tokens of a prompt, at most (default: %(default)s)")
    parser.add_argument("--wanted", type=int, default=24, help="tokens to say, at most (default: %(default)s)")
    return vars(parser.parse_args())


if __name__ == "__main__":
    with jax.default_matmul_precision("float32"):
        done, server = main(**arguments())
        greedy = [r for r in done if not r.temperature]
        same = [float(np.mean(server.alone(r) == r.said)) for r in greedy[:3]]
    print(f"of {len(same)} greedy ones read alone, {np.mean(same):.0%} of the tokens are the same")
    assert np.mean(same) > (0.9 if jax.default_backend() == "gpu" else 0.999), same
