"""Serves random requests that come and go, with a small DeepSeek-V4-style model: all kinds of layers, random weights.

`python -m examples.serve` runs it, from the root of a clone. The server is `Server` of examples/serving: it reads
prompts in chunks, says a token of every place in each step, hands out pages of the caches, and reads a prompt
from where an earlier one was the same. With `--speculate N` a step takes up to N drafts of a place, too. `Tiny` shows
what it wants of a model.

There are three jitted functions: `read` takes a chunk of prompts, `say` a step, `begin` lets a place go on from what
was read of an earlier prompt. At the end the program reads some greedy requests alone and whole, which must have said
the same.
"""

import argparse
import functools
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from examples.serving import Pages, Request, Server, TooLong, option
from jax_dsv4_fmha.layers import LayerCache, from_config

__all__ = ["Pages", "Request", "Server", "Tiny", "TooLong", "main"]

VOCABULARY, WIDTH = 128, 64


class Caches(NamedTuple):
    """The caches of all layers, which have the same table of pages."""

    layers: list[LayerCache]

    def with_block_table(self, table):
        return Caches([cache.with_block_table(table) for cache in self.layers])

    def rings(self):
        return Caches([cache.rings() for cache in self.layers])

    def take(self, places):
        return Caches([cache.take(places) for cache in self.layers])

    def put(self, places, taken):
        return Caches([cache.put(places, new) for cache, new in zip(self.layers, taken.layers, strict=True)])


class Tiny:
    """A model of four layers. `Server` takes any model with these methods: see `examples/deepseek_v4`."""

    vocabulary = VOCABULARY

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


def main(
    requests=10, places=4, chunk=32, longest=150, wanted=24, page=32, pages=8, beginning=64, speculate=0, progress=True
):
    """Serves random requests; returns the finished requests and the server."""
    if longest <= beginning:
        raise ValueError(
            f"longest: got {longest} tokens of a prompt, wanted more than the {beginning} of the beginning"
        )
    rng = np.random.default_rng(0)
    alike = rng.integers(0, VOCABULARY, beginning, dtype=np.int32)
    tell = functools.partial(print, flush=True) if progress else lambda text: None
    tell("making random parameters and empty caches")
    on_gpu = jax.default_backend() == "gpu"
    d, dtype = (512, jnp.bfloat16) if on_gpu else (64, jnp.float32)  # a size with kernels on a GPU; a quick one without
    model = Tiny(d)
    parameters = jax.jit(model.init, static_argnums=1)(jax.random.key(0), dtype)
    how = {"speculate": speculate, "progress": lambda text: tell(f"{jax.default_backend()}: {text}")}
    server = Server(model, parameters, dtype, places, longest + wanted, chunk, page, pages, **how)
    for i in range(requests):
        own = rng.integers(0, VOCABULARY, rng.integers(1, longest - beginning + 1), dtype=np.int32)
        prompt, temperature = np.concatenate([alike, own]), 0.8 if i % 2 else 0.0
        server.submit(Request(prompt, int(rng.integers(1, wanted + 1)), temperature))
    server.compile()
    done, calls, began = [], 0, time.perf_counter()
    while not server.is_idle:
        done += server.work()
        calls += 1
        if progress and sys.stdout.isatty():
            print(f"\r{len(done)} of {requests} requests, {len(server.waiting)} wait", end="", flush=True)
    seconds = time.perf_counter() - began
    said, read = (sum(len(x) for x in xs) for xs in ([r.said for r in done], [r.prompt for r in done]))
    print(f"\r{jax.default_backend()}: {requests} requests in {places} places, {calls} calls")
    print(f"{read} tokens read, {said} said, in {seconds:.2f} s: {(read + said) / seconds:.0f} tokens/s")
    could_fill = places * server.pages.needed(longest + wanted)
    print(f"{pages} pages of {page} tokens; {places} places could fill {could_fill}")
    print(f"{server.shared} tokens were kept from earlier prompts; {server.put_back} times one had to wait again")
    if speculate:
        drafted, accepted, steps = server.drafted, server.accepted, server.steps
        print(f"{accepted} of {drafted} drafts were right; a place said {1 + accepted / steps:.2f} tokens a step")
    return done, server


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name, default, least, what in (
        ("requests", 10, 1, "how many"),
        ("places", 4, 1, "requests served at once"),
        ("chunk", 32, 1, "tokens read at once"),
        ("longest", 150, 1, "tokens of a prompt, at most"),
        ("wanted", 24, 1, "tokens to say, at most"),
        ("page", 32, 16, "tokens of a page, a multiple of 16"),
        ("pages", 8, 1, "pages in the pool of each cache"),
        ("beginning", 64, 0, "tokens with which all prompts begin"),
        ("speculate", 0, 0, "drafts of a request in a step, at most"),
    ):
        kind = functools.partial(option, least)
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{what} (default: %(default)s)")
    return vars(parser.parse_args())


if __name__ == "__main__":
    with jax.default_matmul_precision("float32"):
        try:
            done, server = main(**arguments())
        except ValueError as e:
            sys.exit(f"error: {e}")
        greedy = [r for r in done if not r.temperature]
        same = [float(np.mean(server.alone(r) == r.said)) for r in greedy[:3]]
    print(f"of {len(same)} greedy ones read alone, {np.mean(same):.0%} of the tokens are the same")
    assert np.mean(same) > (0.9 if jax.default_backend() == "gpu" else 0.999), same
