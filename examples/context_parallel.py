"""Context parallelism: queries and keys sharded along the sequence, keys passed around a ring of devices.

Every device attends from its own queries to the keys that it holds, merges the result, and hands the keys to its
neighbour. After as many steps as there are devices it has seen all keys. The merge is exact, so results and gradients
equal those of one device; autodiff passes the keys' gradients around the ring the other way. Without GPUs the ring has
four virtual CPU devices.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import Span, fmha, merge


def attention(q, k, mesh, sink=None):
    """Causal attention, V is K: q [b, s, h, d] and k [b, s, 1, d], both sharded along s over the axis of `mesh`."""
    (ring,) = mesh.axis_names
    n = mesh.shape[ring]
    sequence = P(None, ring)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(sequence, sequence, P()), out_specs=(sequence, sequence), axis_names={ring}
    )
    def local(q, k, sink):
        me, s = jax.lax.axis_index(ring), q.shape[1]

        @jax.checkpoint  # for the gradient it keeps each step's inputs, not its results
        def step(o, lse, k, i):
            holder = (me - i) % n  # the keys of this holder begin at position holder * s, these queries at me * s
            part = fmha(q, k, span=Span.causal(s, jnp.int32((me - holder) * s)))
            return merge([(o, lse), part])

        o, lse = jnp.zeros_like(q), jnp.full_like(q[..., 0], -jnp.inf, jnp.float32)
        for i in range(n):
            o, lse = step(o, lse, k, i)
            if i < n - 1:
                k = jax.lax.ppermute(k, ring, [(j, (j + 1) % n) for j in range(n)])
        return merge([(o, lse)], sink)  # the sink enters once, when all keys have been seen

    return local(q, k, jnp.full(q.shape[2], -jnp.inf) if sink is None else sink)


def main(b=1, s=1024, h=8, d=64):
    mesh = jax.make_mesh((jax.device_count(),), ("ring",), axis_types=(AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 3)
    q, k = (jax.random.normal(key, (b, s, n, d), jnp.bfloat16) for key, n in zip(keys, (h, 1), strict=False))
    sink = jax.random.normal(keys[2], (h,))
    want = jax.jit(lambda q, k: fmha(q, k, span=Span.causal(s), sink=sink)[0])(q, k)
    q, k = (jax.device_put(x, NamedSharding(mesh, P(None, "ring"))) for x in (q, k))
    got = jax.jit(lambda q, k: attention(q, k, mesh, sink)[0])(q, k)
    error = jnp.linalg.norm((got - want).astype(jnp.float32)) / jnp.linalg.norm(want.astype(jnp.float32))
    print(
        f"{mesh.size} {jax.default_backend()} devices, {s // mesh.size} positions on each, relative error {error:.1e}"
    )
    assert error < 1e-2


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    main()
