"""Trains a tiny DeepSeek-V4-like stack for 50 steps with optax, on whatever devices there are.

It has three attention layers from `jax_dsv4_fmha.layers`, one of each kind: a window alone; a window and the entries
that an indexer chooses from a cache with one for 4 tokens; a window and a whole cache with one for 16 (128 in the
models). The indexer learns from attention to the entries it chose (`indexer_loss`), everything else from the next
token. Several devices make a (data, tensor) mesh; annotations alone shard the batch and the heads over it.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha.layers import from_config

VOCABULARY, WIDTH = 64, 128


def layers_of(d):
    """The entries of a config.json, small."""
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    return from_config(
        {
            "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 8, "head_dim": d,
            "qk_rope_head_dim": d // 8, "q_lora_rank": 64, "o_groups": 4, "o_lora_rank": 32, "sliding_window": 16,
            "layer_types": kinds, "compress_rates": {kinds[2]: 16}, "index_n_heads": 16, "index_head_dim": d // 4,
            "index_topk": 8, "rope_theta": 10000, "compress_rope_theta": 160000,
        }
    )  # fmt: skip


def norm(x):
    return (x * jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-6)).astype(x.dtype)


def loss(parameters, tokens, layers, dtype):
    """The loss of the next token plus the indexer's; and each of them."""
    hidden = parameters["embed"].astype(dtype)[tokens]
    of_indexers = 0.0

    for layer, weights in zip(layers, parameters["layers"], strict=True):
        out = jax.checkpoint(layer)(weights["attention"], norm(hidden))
        if layer.indexer is not None:
            of_indexers += layer.indexer_loss(weights["attention"], out).mean()
        hidden += out.y
        hidden += jax.nn.silu(norm(hidden) @ weights["up"].astype(dtype)) @ weights["down"].astype(dtype)
    logits = (norm(hidden) @ parameters["embed"].astype(dtype).T).astype(jnp.float32)
    of_tokens = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()
    return of_tokens + of_indexers, (of_tokens, of_indexers)


def initialize(key, layers):
    def one(layer, key):
        a, b, c = jax.random.split(key, 3)
        up = jax.random.normal(a, (WIDTH, 256)) * WIDTH**-0.5
        return {"attention": layer.init(b), "up": up, "down": jax.random.normal(c, (256, WIDTH)) * 256**-0.5}

    first, *keys = jax.random.split(key, 1 + len(layers))
    embed = 0.05 * jax.random.normal(first, (VOCABULARY, WIDTH))
    return {"embed": embed, "layers": [one(layer, k) for layer, k in zip(layers, keys, strict=True)]}


def batches(key, b, s):
    """Walks through the vocabulary in steps of 1 to 4: a loss of log 4 is all that can be learned."""
    while True:
        key, k = jax.random.split(key)
        yield jnp.cumsum(jax.random.randint(k, (b, s), 1, 5), 1) % VOCABULARY


def main(steps=50, b=8, s=64):
    """Prints the losses as they fall, and returns them: (tokens', indexer's) for each step."""
    on_gpu = jax.default_backend() == "gpu"
    d, dtype = (512, jnp.bfloat16) if on_gpu else (64, jnp.float32)  # a size with kernels on a GPU; a quick one without
    layers = layers_of(d)
    n = jax.device_count()
    data = 2 if n % 4 == 0 else 1
    mesh = jax.make_mesh((data, n // data), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = [{"attention": layer.partition("tensor"), "up": P(), "down": P()} for layer in layers]
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), {"embed": P(), "layers": specs})
    parameters = jax.jit(lambda key: initialize(key, layers), out_shardings=shardings)(jax.random.key(0))
    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0, 3e-3, 5, steps))
    state = jax.jit(optimizer.init)(parameters)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(parameters, state, tokens):
        gradient, losses = jax.grad(loss, has_aux=True)(parameters, tokens, layers, dtype)
        updates, state = optimizer.update(gradient, state, parameters)
        return optax.apply_updates(parameters, updates), state, losses

    losses = []
    data_of = batches(jax.random.key(1), b, s)
    print(f"mesh {dict(mesh.shape)} of {jax.default_backend()} devices, d = {d}")
    for i in range(steps):
        tokens = jax.device_put(next(data_of), NamedSharding(mesh, P("data")))
        parameters, state, both = step(parameters, state, tokens)
        losses.append(tuple(map(float, both)))
        if i % 10 == 0 or i == steps - 1:
            print(f"step {i:3}  loss {losses[-1][0]:.3f}, of the indexer {losses[-1][1]:.4f}")
    return losses


if __name__ == "__main__":
    losses = main()
    assert losses[-1][0] < losses[0][0] - 1, losses
