"""The three kinds of attention layer of a DeepSeek-V4-like model, from hidden states to hidden states.

  swa   a sliding window
  hca   a window, and every past entry of a cache that holds one entry for 128 positions
  csa   a window, and the top-k past entries of a cache that holds one for 4

Each runs on this machine's best implementation and, in float32, on the reference, and the program compares the two. To
be short, compressors are means of blocks without overlap, and the indexer is a product. `jax_dsv4_fmha.layers` has the
learned ones of a model.
"""

import functools

import jax
import jax.numpy as jnp

from jax_dsv4_fmha import dsv4_attention, reference

HEADS, D, ROPE, WINDOW, TOPK, HIDDEN = 16, 512, 64, 128, 32, 256
RATIO = {"swa": None, "hca": 128, "csa": 4}


def rope(x, positions, kind):
    """Rotates the last ROPE dimensions of x [b, s, …, D], pair by pair, to positions [s]."""
    theta = 10_000.0 if RATIO[kind] is None else 160_000.0
    x, turned = x[..., :-ROPE], x[..., -ROPE:].astype(jnp.float32)
    angle = positions[:, None] * theta ** -jnp.linspace(0, 1, ROPE // 2, endpoint=False)
    angle = angle.reshape(1, -1, *[1] * (x.ndim - 3), ROPE // 2)
    a, b = turned[..., ::2], turned[..., 1::2]
    turned = jnp.stack([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)
    return jnp.concatenate([x, turned.reshape(*x.shape[:-1], ROPE).astype(x.dtype)], -1)


def compress(latent, kind):
    """One entry for `ratio` positions [b, s // ratio, D], rotated to the position of the first of them."""
    ratio = RATIO[kind]
    b, s, d = latent.shape
    entries = latent[:, : s // ratio * ratio].reshape(b, s // ratio, ratio, d)
    entries = entries.mean(2, dtype=jnp.float32).astype(latent.dtype)
    return rope(entries, jnp.arange(s // ratio) * ratio, kind)


def choose(hidden, compressed_kv, ratio):
    """The past entries [b, s, TOPK] with the greatest scores, and -1 where there are fewer."""
    scores = jnp.einsum("bsh,bwh->bsw", hidden, compressed_kv[..., :HIDDEN], preferred_element_type=jnp.float32)
    past = jnp.arange(scores.shape[2]) < (jnp.arange(scores.shape[1])[:, None] + 1) // ratio
    best, indices = jax.lax.top_k(jnp.where(past, scores, -jnp.inf), TOPK)
    return jnp.where(jnp.isfinite(best), indices, -1)


def layer(parameters, hidden, kind, attention):
    """hidden [b, s, HIDDEN] -> [b, s, HIDDEN], with attention(q, window_kv, compressed_kv, …) -> (o, lse)"""
    positions, ratio = jnp.arange(hidden.shape[1]), RATIO[kind]
    q = rope(jnp.einsum("bsm,mhd->bshd", hidden, parameters["q"]), positions, kind)
    latent = hidden @ parameters["kv"]
    caches = {} if ratio is None else {"compressed_kv": compress(latent, kind), "ratio": ratio}
    if kind == "csa":
        caches["indices"] = choose(hidden, caches["compressed_kv"], ratio)
    o, _ = attention(q, rope(latent, positions, kind), sink=parameters["sink"], window=WINDOW, **caches)
    return jnp.einsum("bshd,hdm->bsm", rope(o, -positions, kind), parameters["o"])  # V was rotated with K: undo it


def in_float32(q, *caches, **kwargs):
    o, lse = reference.dsv4_attention(q.astype(jnp.float32), *caches, **kwargs)
    return o.astype(q.dtype), lse


def main(b=1, s=512):
    shapes = {"q": (HIDDEN, HEADS, D), "kv": (HIDDEN, D), "o": (HEADS, D, HIDDEN)}
    keys = jax.random.split(jax.random.key(0), 5)
    parameters = {
        name: (jax.random.normal(key, shape) * HIDDEN**-0.5).astype(jnp.bfloat16)
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    parameters["sink"] = jax.random.normal(keys[3], (HEADS,))
    hidden = jax.random.normal(keys[4], (b, s, HIDDEN), jnp.bfloat16)

    print(f"{jax.default_backend()}, hidden {list(hidden.shape)}, {HEADS} heads of {D}")
    for kind in RATIO:
        run = jax.jit(functools.partial(layer, kind=kind, attention=dsv4_attention))
        definition = jax.jit(functools.partial(layer, kind=kind, attention=in_float32))
        got, want = (f(parameters, hidden).astype(jnp.float32) for f in (run, definition))
        error = jnp.linalg.norm(got - want) / jnp.linalg.norm(want)
        text = run.lower(parameters, hidden).compile().as_text()
        print(f"{kind}  {'cubin' if 'dsv4_fmha_fwd' in text else 'reference':9}  relative error {error:.1e}")
        assert error < 1e-2, (kind, error)


if __name__ == "__main__":
    main()
