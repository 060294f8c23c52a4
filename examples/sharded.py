"""A DeepSeek-V4 layer on a (data, tensor) mesh: batch over one axis, query heads over the other.

Every device of a row has the one latent head. The forward pass communicates nothing. In the backward pass, the latent's
gradient is summed over the heads' devices, and the sink's over the batch's. Without GPUs the mesh has virtual CPU
devices.
"""

import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import dsv4_attention


def collectives(compiled):
    return sorted(re.findall(r" (all-\w+|reduce-scatter|collective-\w+)(?:-start)?\(", compiled.as_text()))


def layer(q, window_kv, compressed_kv, sink):
    return dsv4_attention(q, window_kv, compressed_kv, ratio=128, sink=sink)[0]


def main(b=4, s=256, h=16, d=512):
    n = jax.device_count()
    data = 2 if n % 2 == 0 and n > 2 else 1
    mesh = jax.make_mesh((data, n // data), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    shapes = {(b, s, h, d): P("data", None, "tensor"), (b, s, d): P("data"), (b, s // 128, d): P("data")}
    keys = jax.random.split(jax.random.key(0), 4)
    operands = [
        jax.device_put(jax.random.normal(key, shape, jnp.bfloat16), NamedSharding(mesh, spec))
        for key, (shape, spec) in zip(keys, shapes.items(), strict=False)
    ]
    operands.append(jax.device_put(jax.random.normal(keys[3], (h,)), NamedSharding(mesh, P("tensor"))))

    forward = jax.jit(layer).lower(*operands).compile()
    gradient = jax.jit(jax.grad(lambda *x: layer(*x).astype(jnp.float32).sum(), (0, 1, 2, 3)))
    print(f"mesh {dict(mesh.shape)} of {jax.default_backend()} devices")
    print(f"o {forward(*operands).sharding.spec}, collectives {collectives(forward) or 'none'}")
    print(f"gradient: collectives {collectives(gradient.lower(*operands).compile()) or 'none'}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
