"""The whole model of examples/deepseek_v4 in float64, one token at a time, for tests to compare with."""

import jax
import numpy as np

from . import layers_float64
from .layers_float64 import norm


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def connections(model, p, x, eps):
    """pre, post [n] and mix [n, n] of a token's streams x [n, hidden]."""
    n = len(x)
    numbers = norm(x.ravel(), eps=eps) @ p["fn"].T
    pre, post = (numbers[i * n : (i + 1) * n] * p["scale"][i] + p["base"][i * n : (i + 1) * n] for i in (0, 1))
    mix = np.exp((numbers[2 * n :] * p["scale"][2] + p["base"][2 * n :]).reshape(n, n))
    mix = mix / mix.sum(1, keepdims=True) + model.hc_eps
    mix = mix / (mix.sum(0, keepdims=True) + model.hc_eps)
    for _ in range(model.sinkhorn - 1):
        mix = mix / (mix.sum(1, keepdims=True) + model.hc_eps)
        mix = mix / (mix.sum(0, keepdims=True) + model.hc_eps)
    return sigmoid(pre) + model.hc_eps, 2 * sigmoid(post), mix


def expert(model, w13, w2, x):
    gate, up = w13 @ x
    gate, up = np.minimum(gate, model.limit), np.clip(up, -model.limit, model.limit)
    return w2 @ (gate * sigmoid(gate) * up)


def moe(model, p, routing, x, token):
    scores = np.sqrt(np.log1p(np.exp(x @ p["gate"] / model.temperature)))
    chosen = routing[token] if routing.ndim == 2 else np.argsort(-(scores + routing))[: model.chosen]
    weights = model.scale * scores[chosen] / scores[chosen].sum()
    routed = sum(w * expert(model, p["w13"][e], p["w2"][e], x) for e, w in zip(chosen, weights, strict=True))
    return routed + expert(model, p["shared13"].transpose(1, 2, 0), p["shared2"].T, x)


def rows(engrams, layer, word, tokens, t):
    """The rows of a layer's table that token t finds, in integers of any size."""
    index = engrams.layers.index(layer)
    factors = np.random.default_rng(10007 * layer).integers(
        0, (2**63 - 1) // engrams.words // 2, engrams.longest, np.int64
    )
    found, before, mixed = [], 0, 0
    for n in range(engrams.longest):
        mixed ^= int(word[tokens[t - n] if t >= n else engrams.pad]) * (2 * int(factors[n]) + 1)
        if n:
            for prime in engrams.primes[index, n - 1]:
                found.append(before + mixed % int(prime))
                before += int(prime)
    return found


def recalled(p, table, x, rows, eps):
    n, m = x.shape
    values = [table["rows"][r] * np.repeat(table["scales"][r], 32) for r in rows]
    made = np.concatenate(values) @ p["wkv"]
    y = x.copy()
    for j in range(n):
        q, k = norm(x[j], p["q"][j], eps), norm(made[j * m : (j + 1) * m], p["k"][j], eps)
        match = q @ k / np.sqrt(m)
        y[j] += sigmoid(np.sign(match) * np.sqrt(max(abs(match), 1e-6))) * made[n * m :]
    return y


def exactly(params):
    return jax.tree.map(lambda x: np.asarray(x, np.int64 if x.dtype == np.int32 else np.float64), params)


def logits(model, params, tokens):
    """[s, vocabulary] of one sequence."""
    return run(model, exactly(params), tokens)[0]


def run(model, params, tokens, main=None):
    """Logits of one sequence, and the streams' means [s, hidden] that drafts see. main: of a model that drafts."""
    n, eps, shared, means = model.streams, model.layers[0].eps, {}, []
    x = [np.stack([params["embed"][token]] * n) for token in tokens]
    before = [np.eye(n)[0]] * len(tokens)
    for i, (layer, p) in enumerate(zip(model.layers, params["layers"], strict=True)):
        if "engram" in p:
            found = [rows(model.engrams, i, params["words"], tokens, t) for t in range(len(tokens))]
            x = [recalled(p["engram"], params["tables"][str(i)], *y, eps) for y in zip(x, found, strict=True)]
        entering = x
        for part in ("attention", "moe"):
            made = [connections(model, p[f"{part}_hc"], y, eps) for y in x]
            pre = before if model.delayed else [c[0] for c in made]
            y = [norm(c @ z, p[f"{part}_norm"], eps) for c, z in zip(pre, x, strict=True)]
            if part == "moe":
                y = [moe(model, p["moe"], params["routing"][i], *z) for z in zip(y, tokens, strict=True)]
            elif main is None:
                y = layers_float64.layer(layer, p["attention"], np.stack(y), shared)
            else:
                y = layers_float64.drafted(layer, p["attention"], main, y)
            x = [mix.T @ z + post[:, None] * f for (_, post, mix), z, f in zip(made, x, y, strict=True)]
            before = [c[0] for c in made]
        if i in model.seen:
            means.append(np.stack([y.mean(0) for y in (entering if model.delayed else x)]))
    if not model.delayed:
        p = params["hc"]
        before = [sigmoid(norm(y.ravel(), eps=eps) @ p["fn"].T * p["scale"] + p["base"]) + model.hc_eps for y in x]
    return np.stack([norm(c @ y, params["norm"], eps) @ params["head"] for c, y in zip(before, x, strict=True)]), means


def drafts(dspark, params, tokens):
    """Returns what a model of drafts.py proposes after the last of these tokens, which it has not read yet."""
    params = exactly(params)
    p, eps = params["drafts"] | {name: params[name] for name in ("embed", "head")}, dspark.stack.layers[0].eps
    means = np.concatenate(run(dspark.model, params, tokens[:-1])[1], -1)
    main = [norm(x @ p["main"], p["main_norm"], eps) for x in means]
    scores, _ = run(dspark.stack, p, [tokens[-1], *[dspark.placeholder] * (dspark.block - 1)], main)
    said = [tokens[-1]]
    for score in scores:
        said.append(int(np.argmax(score + p["w1"][said[-1]] @ p["w2"])))
    return said[1:]
