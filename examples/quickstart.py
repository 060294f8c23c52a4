"""One DeepSeek-V4 attention layer under `jax.jit`, on whatever this machine has."""

import jax
import jax.numpy as jnp

from jax_dsv4_fmha import dsv4_attention, explain, reference

b, s, h, d = 1, 512, 16, 512  # one latent head serves all query heads, as K and as V
keys = jax.random.split(jax.random.key(0), 4)
q = jax.random.normal(keys[0], (b, s, h, d), jnp.bfloat16)
window_kv = jax.random.normal(keys[1], (b, s, d), jnp.bfloat16)  # a query sees the last 128 of these
compressed_kv = jax.random.normal(keys[2], (b, s // 128, d), jnp.bfloat16)  # one entry for every 128 positions
sink = jax.random.normal(keys[3], (h,))


@jax.jit
def layer(q, window_kv, compressed_kv, sink):
    return dsv4_attention(q, window_kv, compressed_kv, ratio=128, window=128, sink=sink)


o, lse = layer(q, window_kv, compressed_kv, sink)
in_float32 = (x.astype(jnp.float32) for x in (q, window_kv, compressed_kv))
want, want_lse = reference.dsv4_attention(*in_float32, ratio=128, window=128, sink=sink)

print(f"device          {q.devices().pop()}")
for decision in explain(layer, q, window_kv, compressed_kv, sink):
    print(f"implementation  {decision.implementation}: {decision.reason}")
print("results         beside the same layer in float32; an ulp is a unit in the last place, here of the largest value")
for name, x, y in (("o", o, want), ("lse", lse, want_lse)):
    largest = jnp.abs(y).max()
    unit = jnp.finfo(x.dtype).eps * 2 ** jnp.floor(jnp.log2(largest))  # of the last place
    ulps = jnp.abs(x.astype(jnp.float32) - y).max() / unit
    print(f"  {name:13} {x.dtype}{list(x.shape)}, values up to {largest:.1f}: at most {ulps:.1f} ulp away")
