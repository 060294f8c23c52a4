"""Generates with a tiny DeepSeek-V4-style model: one scan of steps over donated caches, compared with prefill.

It has four layers. One sees a window alone. Two see a window and the top-k entries, chosen by an indexer, of a cache
with one entry for 4 positions. One sees a window and a whole cache with one entry for 128. Each has one latent head
that is K and V, RoPE on its last 64 dimensions, and a sink for every query head. The sequences of a batch have prompts
of different lengths.

The program reads the prompts at once (dsv4_attention), which fills the caches. Then each step appends the new token's
entries to the caches and attends to them (dsv4_decode). At the end the program reads all tokens at once: the same
logits must come out. The weights are random, so the text makes no sense. To be short, compressors are means of blocks
without overlap; `examples/serve.py` serves with a model's own, from `jax_dsv4_fmha.layers`.
"""

import argparse
import functools
import string
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsv4_fmha import Cache, dsv4_attention, dsv4_decode

LETTERS = string.ascii_lowercase + string.ascii_uppercase + string.digits + " ."
WIDTH, HEADS, ROPE, WINDOW, TOPK, KEY = 128, 16, 64, 24, 8, 32
LAYERS = ((None, None), (4, TOPK), (128, None), (4, TOPK))
"""(ratio, topk) of each layer"""


class State(NamedTuple):
    """The state that a layer keeps between steps."""

    window: Cache
    """a ring, for sequences of any length"""
    compressed: Any = None
    keys: Any = None
    """the indexer's keys, one for each compressed entry"""
    total: Any = None
    """[b, d + KEY], sums over the positions of the next compressed entry"""


def rope(x, positions, ratio):
    """Rotates the last ROPE dimensions of x [b, s, …, d], pair by pair, to positions [b or 1, s]."""
    theta = 10_000.0 if ratio is None else 160_000.0
    still, turned = x[..., :-ROPE], x[..., -ROPE:]
    angle = positions[..., None] * theta ** -jnp.linspace(0, 1, ROPE // 2, endpoint=False)
    angle = angle.reshape(*positions.shape, *[1] * (x.ndim - 3), ROPE // 2)
    a, b = turned[..., ::2], turned[..., 1::2]
    turned = jnp.stack([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)
    return jnp.concatenate([still, turned.reshape(*x.shape[:-1], ROPE)], -1)


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


def choose(query, keys, past, topk):
    """The entries [b, s, topk] with the greatest scores among the first `past` [b or 1, s]; -1 where there are no
    more.
    """
    scores = jnp.einsum("bsk,bwk->bsw", query, keys)
    there = jnp.arange(keys.shape[1]) < past[..., None]
    best, indices = jax.lax.top_k(jnp.where(there, scores, -jnp.inf), min(topk, keys.shape[1]))
    return jnp.where(jnp.isfinite(best), indices, -1)


def attention(weights, x, positions, ratio, dtype, attend):
    """x [b, s, WIDTH] -> the same, with attend(q, latent) -> o in a cache's dtype."""
    q = rope(norm(jnp.einsum("bsm,mhd->bshd", x, weights["q"])), positions, ratio)
    o = attend(q.astype(dtype), rope(norm(x @ weights["kv"]), positions, ratio).astype(dtype)).astype(x.dtype)
    return jnp.einsum("bshd,hdm->bsm", rope(o, -positions, ratio), weights["o"])  # V was rotated with K: rotate it back


def model(parameters, tokens, attend):
    """Logits [b, s, letters], with attend(i, weights, x) for the attention of layer i."""
    hidden = parameters["embed"][tokens]
    for i, weights in enumerate(parameters["layers"]):
        hidden += attend(i, weights, norm(hidden))
        hidden += jax.nn.silu(norm(hidden) @ weights["up"]) @ weights["down"]
    return norm(hidden) @ parameters["head"]


def read(parameters, tokens, lengths, empty):
    """Reads tokens [b, s], of which the first `lengths` [b] count; returns logits, and the state of every layer.

    `empty` are the states before the first token.
    """
    b, s = tokens.shape
    positions = jnp.arange(s, dtype=jnp.int32)[None]
    states = list(empty)

    def attend(i, weights, x):
        (ratio, topk), state = LAYERS[i], empty[i]

        def over_all(q, latent):
            kwargs = {}
            window = state.window.append(latent, jnp.where(positions < lengths[:, None], positions, -1))
            if ratio is None:
                states[i] = State(window)
            else:
                n, d = s // ratio, latent.shape[-1]
                parts = x @ weights["compress"]
                whole = parts[:, : n * ratio].reshape(b, n, ratio, d + KEY).mean(2)
                last = jnp.arange(1, n + 1, dtype=jnp.int32)[None] * ratio - 1
                first = last - (ratio - 1)  # the position of an entry
                entries, keys = rope(norm(whole[..., :d]), first, ratio).astype(latent.dtype), whole[..., d:]
                begun = (positions >= lengths[:, None] // ratio * ratio) & (positions < lengths[:, None])
                number = jnp.where(last < lengths[:, None], last // ratio, -1)
                total = jnp.where(begun[..., None], parts, 0).sum(1)
                caches = (
                    (state.compressed.append(entries, number), state.keys.append(keys, number)) if n else state[1:3]
                )
                states[i] = State(window, *caches, total)
                kwargs = {"compressed_kv": state.compressed.as_held(entries), "ratio": ratio}
                if topk and n:
                    kwargs["indices"] = choose(x @ weights["index"], keys, (positions + 1) // ratio, topk)
            latent = state.window.as_held(latent)
            return dsv4_attention(q, latent, sink=weights["sink"], window=WINDOW, **kwargs)[0]

        return attention(weights, x, positions, ratio, dtype_of(state.window), over_all)

    return model(parameters, tokens, attend), states


def dtype_of(cache):
    """The dtype of queries for this cache, and of its results."""
    return jnp.bfloat16 if cache.is_packed else cache.entries.dtype


def step(parameters, states, token, lengths):
    """The token [b] that follows `lengths` [b] others; returns logits [b, letters], and the states after it."""
    after = list(states)
    position = lengths[:, None]

    def attend(i, weights, x):
        (ratio, topk), state = LAYERS[i], states[i]

        def over_caches(q, latent):
            kwargs = {}
            window = state.window.append(latent, position)
            if ratio is None:
                after[i] = State(window)
            else:
                d = latent.shape[-1]
                part = (x @ weights["compress"])[:, 0]
                total = jnp.where(position % ratio == 0, part, state.total + part)
                whole = total[:, None] / ratio
                number = jnp.where((position + 1) % ratio == 0, position // ratio, -1)  # only complete ones
                entry = rope(norm(whole[..., :d]), position // ratio * ratio, ratio).astype(latent.dtype)
                compressed = state.compressed.append(entry, number)
                keys = state.keys.append(whole[..., d:], number)
                after[i] = State(window, compressed, keys, total)
                kwargs = {"compressed_cache": compressed, "ratio": ratio}
                if topk:
                    past = (position + 1) // ratio
                    kwargs["indices"] = choose(x @ weights["index"], keys.entries, past, topk)
            return dsv4_decode(q, window, lengths=lengths + 1, sink=weights["sink"], window=WINDOW, **kwargs)[0]

        return attention(weights, x, position, ratio, dtype_of(state.window), over_caches)

    return model(parameters, token[:, None], attend)[:, 0], after


@functools.partial(jax.jit, static_argnames="steps", donate_argnames="states")
def generate(parameters, states, token, lengths, steps):
    """The likeliest letters one after the other, [steps, b], their logits, and the states after them."""

    def body(carry, _):
        states, token, lengths = carry
        logits, states = step(parameters, states, token, lengths)
        token = logits.argmax(-1).astype(jnp.int32)
        return (states, token, lengths + 1), (token, logits)

    (states, *_), (tokens, logits) = jax.lax.scan(body, (states, token, lengths), length=steps)
    return tokens, logits, states


def empty_states(b, s, d, page, dtype):
    """Room for b sequences of s tokens, in pages of this size and in random order; contiguous for 0."""
    random = np.random.default_rng(0)

    def cache(entries):
        if not page:
            return Cache.zeros(b, entries, d, dtype)
        each = -(-entries // page)
        table = jnp.asarray(random.permutation(b * each).reshape(b, each), jnp.int32)
        return Cache.zeros(b * each, page, d, dtype, table)

    def state(ratio, topk):
        if ratio is None:
            return State(cache(WINDOW))
        n = max(-(-s // ratio), topk or 1)
        return State(cache(WINDOW), cache(n), Cache.zeros(b, n, KEY, jnp.float32), jnp.zeros((b, d + KEY)))

    return [state(*kind) for kind in LAYERS]


def initialize(key, d):
    shapes = {
        "q": (WIDTH, HEADS, d), "kv": (WIDTH, d), "compress": (WIDTH, d + KEY), "index": (WIDTH, KEY),
        "o": (HEADS * d, WIDTH), "up": (WIDTH, 256), "down": (256, WIDTH),
    }  # fmt: skip

    def layer(key):
        *keys, last = jax.random.split(key, len(shapes) + 1)
        weights = {
            name: jax.random.normal(k, shape) * shape[0] ** -0.5
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        weights["o"] = weights["o"].reshape(HEADS, d, WIDTH)
        return weights | {"sink": jax.random.normal(last, (HEADS,))}

    first, last, *keys = jax.random.split(key, 2 + len(LAYERS))
    embed, head = (jax.random.normal(k, (len(LETTERS), WIDTH)) for k in (first, last))
    return {"embed": embed, "head": head.T * WIDTH**-0.5, "layers": [layer(k) for k in keys]}


def main(batch=4, prompt=120, steps=40, page=16, fp8=False):
    """Prints the text, and returns the relative difference of each step's logits from prefill's, [batch, steps]."""
    small = jax.default_backend() == "cpu" and not fp8
    d, dtype = (128, jnp.float32) if small else (512, jnp.float8_e4m3fn if fp8 else jnp.bfloat16)
    parameters = initialize(jax.random.key(0), d)
    lengths = jnp.asarray(prompt - 7 * np.arange(batch), jnp.int32)  # ragged
    tokens = jax.random.randint(jax.random.key(1), (batch, prompt), 0, len(LETTERS), jnp.int32)

    states = empty_states(batch, prompt + steps, d, page, dtype)
    size = sum(x.nbytes for x in jax.tree.leaves(states))
    logits, states = jax.jit(read)(parameters, tokens, lengths, states)
    rows = jnp.arange(batch)
    first = logits[rows, lengths - 1].argmax(-1).astype(jnp.int32)
    compiled = generate.lower(parameters, states, first, lengths, steps).compile()
    in_place = compiled.memory_analysis().alias_size_in_bytes
    began = time.perf_counter()
    said, got, _ = jax.block_until_ready(compiled(parameters, states, first, lengths))
    seconds = time.perf_counter() - began

    at = lengths[:, None] + jnp.arange(steps)
    whole = jnp.pad(tokens, ((0, 0), (0, steps))).at[rows[:, None], at].set(jnp.c_[first, said[:-1].T])
    none = empty_states(batch, prompt + steps, d, page, dtype)
    want = jax.jit(lambda *x: read(*x)[0])(parameters, whole, lengths + steps, none)[rows[:, None], at]
    error = jnp.linalg.norm(got.swapaxes(0, 1) - want, axis=-1) / jnp.linalg.norm(want, axis=-1)

    kind = f"pages of {page}" if page else "contiguous"
    print(
        f"{jax.default_backend()}, {len(LAYERS)} layers, {HEADS} heads of {d}, {jnp.dtype(dtype).name} caches, {kind}"
    )
    for n, length in enumerate(lengths.tolist()):
        text = "".join(LETTERS[i] for i in whole[n])
        print(f"  {length:4} tokens …{text[length - 16 : length]} | {text[length : length + steps]}")
    print(f"caches of {size / 2**10:.0f} KiB, {in_place / 2**10:.0f} KiB updated in place")
    rate = f"{seconds / steps * 1e6:.0f} us a step, {steps * batch / seconds:.0f} tokens/s"
    print(f"{steps} steps of {batch} sequences, {rate}")
    far = f"median {jnp.median(error):.1e}, at most {error.max():.1e}"  # larger where 16 bits decide a tie of top-k
    print(f"logits of a step against those of prefill, relative difference: {far}")
    return error


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--batch", type=int, default=4, help="sequences (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=120, help="tokens of the longest prompt (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--page", type=int, default=16, help="entries of a page; 0: contiguous (default: %(default)s)")
    parser.add_argument("--fp8", action="store_true", help="caches in DeepSeek-V4's FP8 layout, with 512 dimensions")
    given = vars(parser.parse_args())
    for name, least in {"batch": 1, "prompt": 7 * given["batch"] - 6, "steps": 1, "page": 0}.items():
        if given[name] < least:
            parser.error(f"argument --{name}: got {given[name]}, wanted at least {least}")
    return given


if __name__ == "__main__":
    with jax.default_matmul_precision("float32"):
        error = main(**arguments())
    assert jnp.median(error) < 1e-2, error
