"""Trains a tiny DeepSeek-V4-like stack for 50 steps with optax, on whatever devices there are.

Three layers, one of each kind: a window alone; a window and, of a cache with one entry for 4 positions, the top-k; a
window and all of a cache with one entry for 16 (128 in the models). Each has one latent head that is K and V, RoPE on
its last dimensions, and a sink for every query head. Several devices make a (data, tensor) mesh, over which the batch
and the heads are sharded by annotation alone.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import dsv4_attention

VOCABULARY, WIDTH, HEADS, ROPE, WINDOW, TOPK = 64, 128, 8, 64, 16, 8
KINDS = ({"ratio": None}, {"ratio": 4, "topk": TOPK}, {"ratio": 16})


def rope(x, positions):
    """Rotates the last ROPE dimensions of x [b, s, …, d], pair by pair; positions [s]."""
    still, turned = x[..., :-ROPE], x[..., -ROPE:].astype(jnp.float32)
    angle = positions[:, None] * 10_000.0 ** -jnp.linspace(0, 1, ROPE // 2, endpoint=False)
    angle = angle.reshape(1, -1, *[1] * (x.ndim - 3), ROPE // 2)
    a, b = turned[..., ::2], turned[..., 1::2]
    turned = jnp.stack([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)
    return jnp.concatenate([still, turned.reshape(*x.shape[:-1], ROPE).astype(x.dtype)], -1)


def compress(latent, ratio):
    """One entry for `ratio` positions, rotated to where the last of them stands."""
    b, s, d = latent.shape
    return rope(latent.reshape(b, s // ratio, ratio, d).mean(2), jnp.arange(s // ratio) * ratio + ratio - 1)


def choose(latent, entries, ratio, topk):
    """The past entries [b, s, topk] that are most like a position; -1 where there are not so many."""
    scores = jnp.einsum("bsd,bwd->bsw", latent, entries, preferred_element_type=jnp.float32)
    past = jnp.arange(scores.shape[2]) < (jnp.arange(scores.shape[1])[:, None] + 1) // ratio
    best, indices = jax.lax.top_k(jnp.where(past, scores, -jnp.inf), topk)
    return jnp.where(jnp.isfinite(best), indices, -1)


def norm(x):
    return (x * jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-6)).astype(x.dtype)


def attend(weights, hidden, ratio, topk=None):
    positions = jnp.arange(hidden.shape[1])
    q = rope(norm(jnp.einsum("bsm,mhd->bshd", hidden, weights["q"])), positions)
    latent = norm(hidden @ weights["kv"])
    caches = {}
    if ratio is not None:
        caches = {"compressed_kv": compress(latent, ratio), "ratio": ratio}
    if topk is not None:
        caches["indices"] = jax.lax.stop_gradient(choose(latent, caches["compressed_kv"], ratio, topk))
    o, _ = dsv4_attention(q, rope(latent, positions), sink=weights["sink"], window=WINDOW, **caches)
    return jnp.einsum("bshd,hdm->bsm", rope(o, -positions), weights["o"])  # V was rotated with K: turn it back


def loss(parameters, tokens, dtype):
    weights = jax.tree.map(lambda x: x if x.ndim == 1 else x.astype(dtype), parameters)
    hidden = weights["embed"][tokens]
    for layer, kind in zip(weights["layers"], KINDS, strict=True):
        hidden += jax.checkpoint(functools.partial(attend, **kind))(layer, norm(hidden))
        hidden += jax.nn.silu(norm(hidden) @ layer["up"]) @ layer["down"]
    logits = (norm(hidden) @ weights["embed"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def initialize(key, d):
    """Parameters, and how they lie on a (data, tensor) mesh."""
    shapes = {
        "q": (WIDTH, HEADS, d),
        "kv": (WIDTH, d),
        "o": (HEADS, d, WIDTH),
        "up": (WIDTH, 256),
        "down": (256, WIDTH),
    }
    specs = {"q": P(None, "tensor"), "kv": P(), "o": P("tensor"), "up": P(), "down": P(), "sink": P("tensor")}

    def layer(key):
        keys = jax.random.split(key, len(shapes))
        fan_in = {"o": HEADS * d, "down": 256}
        return {
            name: jax.random.normal(k, shape) * fan_in.get(name, WIDTH) ** -0.5
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        } | {"sink": jnp.zeros(HEADS)}

    first, *keys = jax.random.split(key, 1 + len(KINDS))
    parameters = {"embed": 0.05 * jax.random.normal(first, (VOCABULARY, WIDTH)), "layers": [layer(k) for k in keys]}
    return parameters, {"embed": P(), "layers": [specs] * len(KINDS)}


def batches(key, b, s):
    """Walks through the vocabulary in steps of 1 to 4: a loss of log 4 is all that can be learned."""
    while True:
        key, k = jax.random.split(key)
        yield jnp.cumsum(jax.random.randint(k, (b, s), 1, 5), 1) % VOCABULARY


def main(steps=50, b=8, s=64):
    on_gpu = jax.default_backend() == "gpu"
    d, dtype = (512, jnp.bfloat16) if on_gpu else (128, jnp.float32)  # what is built for a GPU; what is quick without
    n = jax.device_count()
    data = 2 if n % 4 == 0 else 1
    mesh = jax.make_mesh((data, n // data), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    parameters, specs = initialize(jax.random.key(0), d)
    parameters = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), parameters, specs)
    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0, 3e-3, 5, steps))
    state = jax.jit(optimizer.init)(parameters)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(parameters, state, tokens):
        value, gradient = jax.value_and_grad(loss)(parameters, tokens, dtype)
        updates, state = optimizer.update(gradient, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    losses = []
    data_of = batches(jax.random.key(1), b, s)
    print(f"mesh {dict(mesh.shape)} of {jax.default_backend()} devices, d = {d}")
    for i in range(steps):
        tokens = jax.device_put(next(data_of), NamedSharding(mesh, P("data")))
        parameters, state, value = step(parameters, state, tokens)
        losses.append(float(value))
        if i % 10 == 0 or i == steps - 1:
            print(f"step {i:3}  loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    losses = main()
    assert losses[-1] < losses[0] - 1, losses
