"""A small model that finds a needle, trained in bfloat16, and what it answers by products of e4m3:
`python -m tests.retrieval`.

A sequence has n entries. Each says that a name, two of 128 tokens, has one of 256 values, and every name occurs once. A
query says a name; of the other entries 127 share a token with it, on average. Entries and queries are embedded by small
tables, projected and normed as in a layer of DeepSeek-V4: one latent of 512 is K and V, of all heads. The model learns
on short sequences, then on ones of n entries, by `dsv4_attention` and its gradient, with Adam. Then it answers new
sequences of n entries by products in bfloat16, by e4m3, by e4m3 from a cache in V4's FP8, and in bfloat16 from that.
"""

import argparse
import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsv4_fmha import Cache, Span, dsv4_attention, quantize_cache

TOKENS, VALUES, HEADS, D = 128, 256, 8, 512


def initial(key, rank):
    shapes = {
        "first": (TOKENS, rank), "second": (TOKENS, rank), "value": (VALUES, rank), "kv": (3 * rank, D),
        "q": (2 * rank, HEADS, D), "nothing": (D,), "o": (HEADS, D, VALUES),
    }  # fmt: skip
    keys = jax.random.split(key, len(shapes))
    made = {name: jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}
    q = made["kv"][: 2 * rank, None] + 0.5 * made["q"]  # so that a name is near itself from the beginning
    o = made["o"] * (HEADS * D) ** -0.5
    return made | {"q": q, "o": o, "gain": jnp.ones(HEADS), "sink": jnp.zeros(HEADS)}


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


def sequences(key, b, n, queries):
    """Names [b, n], as one number, their values, and which entries are asked for [b, queries]."""
    names, values, asked = jax.random.split(key, 3)
    names = jax.vmap(lambda k: jax.random.permutation(k, TOKENS**2)[:n])(jax.random.split(names, b))
    return names, jax.random.randint(values, (b, n), 0, VALUES), jax.random.randint(asked, (b, queries), 0, n)


def attend(params, names, values, asked, layout=None, **how):
    """o [b, queries, h, d], of what a query sees: all entries, and a latent that means nothing."""
    of = lambda x: [params["first"][x // TOKENS], params["second"][x % TOKENS]]  # noqa: E731
    latents = norm(jnp.concatenate([*of(names), params["value"][values]], -1) @ params["kv"]).astype(jnp.bfloat16)
    x = jnp.concatenate(of(jnp.take_along_axis(names, asked, 1)), -1)
    q = norm(jnp.einsum("bsr,rhd->bshd", x, params["q"])) * params["gain"][:, None]
    nothing = jnp.broadcast_to(norm(params["nothing"]).astype(jnp.bfloat16), (*asked.shape, D))
    if layout is not None and "precision" in how:
        latents = Cache(quantize_cache(latents, layout), None, layout)
    elif layout is not None:
        latents = Cache(quantize_cache(latents, layout), None, layout).take()
    past = Span(0, names.shape[1])
    how |= {"window": 1, "ratio": past, "sink": params["sink"]}
    return dsv4_attention(q.astype(jnp.bfloat16), nothing, latents, **how)[0]


def answers(params, o):
    return jnp.einsum("bshd,hdv->bsv", o.astype(jnp.float32), params["o"])


def loss(params, names, values, asked):
    logits = answers(params, attend(params, names, values, asked))
    right = jnp.take_along_axis(values, asked, 1)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), right[..., None], -1).mean()


@functools.partial(jax.jit, static_argnames=("b", "n", "queries"), donate_argnums=(0, 1))
def train(params, moments, step, rate, b, n, queries):
    key = jax.random.fold_in(jax.random.key(1), step)
    value, grads = jax.value_and_grad(loss)(params, *sequences(key, b, n, queries))
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
    square = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g**2, moments[1], grads)
    unbiased = (1 - 0.9 ** (step + 1), 1 - 0.99 ** (step + 1))
    move = lambda p, m, s: p - rate * (m / unbiased[0]) / (jnp.sqrt(s / unbiased[1]) + 1e-8)  # noqa: E731
    return jax.tree.map(move, params, mean, square), (mean, square), value


WAYS = {
    "bfloat16": {},
    "e4m3": {"precision": "float8_e4m3fn"},
    "bfloat16, V4's FP8": {"layout": "v4_fp8"},
    "e4m3, V4's FP8": {"layout": "v4_fp8", "precision": "float8_e4m3fn"},
}


@jax.jit
def judged(params, names, values, asked):
    """Returns for each way the share of right answers and of bfloat16's, how far o is from bfloat16's, and the loss."""
    right, made = jnp.take_along_axis(values, asked, 1), {}
    usual = attend(params, names, values, asked).astype(jnp.float32)
    said = answers(params, usual).argmax(-1)
    for way, how in WAYS.items():
        o = attend(params, names, values, asked, **how).astype(jnp.float32)
        logits = answers(params, o)
        cosine = jnp.sum(o * usual, -1) / (jnp.linalg.norm(o, axis=-1) * jnp.linalg.norm(usual, axis=-1))
        numbers = {
            "right": (logits.argmax(-1) == right).mean(), "as bfloat16": (logits.argmax(-1) == said).mean(),
            "o off": jnp.linalg.norm(o - usual) / jnp.linalg.norm(usual), "1 - cosine": 1 - cosine.mean(),
            "1 - least cosine": 1 - cosine.min(),
            "loss": -jnp.take_along_axis(jax.nn.log_softmax(logits), right[..., None], -1).mean(),
        }  # fmt: skip
        made[way] = numbers
    return made


def main(n=8192, steps=1500, b=8, queries=128, rank=16, rate=3e-3, tests=16):
    params, began = initial(jax.random.key(0), rank), time.perf_counter()
    moments = (jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))
    short = steps * 2 // 3
    for step in range(steps):
        size = {"n": min(n, 512)} if step < short else {"n": n}
        now = rate * min(1, (steps - step) / (steps // 3 + 1))
        params, moments, value = train(params, moments, step, now, b, queries=queries, **size)
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            print(
                f"step {step}, {size['n']} entries: loss {value:.4f}, {time.perf_counter() - began:.0f} s", flush=True
            )
    found = [judged(params, *sequences(jax.random.fold_in(jax.random.key(2), i), b, n, queries)) for i in range(tests)]
    for way in WAYS:
        means = {name: float(np.mean([x[way][name] for x in found])) for name in found[0][way]}
        means["1 - least cosine"] = float(np.max([x[way]["1 - least cosine"] for x in found]))
        print(
            json.dumps({"way": way, "queries": tests * b * queries} | {k: float(f"{v:.3g}") for k, v in means.items()})
        )
    return params, found


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--n", type=int, default=8192, help="entries (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1500, help="of training (default: %(default)s)")
    parser.add_argument("--b", type=int, default=8, help="sequences at once (default: %(default)s)")
    parser.add_argument("--queries", type=int, default=128, help="of a sequence (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="numbers that embed a token (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=3e-3, help="of Adam (default: %(default)s)")
    parser.add_argument("--tests", type=int, default=16, help="batches of new sequences (default: %(default)s)")
    return vars(parser.parse_args())


if __name__ == "__main__":
    main(**arguments())
