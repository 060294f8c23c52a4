"""Counts the memory of training without a GPU: `python -m tests.kept > docs/kept.json`, in half a minute, where kernels
are built.

`kept` has the bytes that the traced forward pass of eight layers of V4-Flash's sizes with 16 experts, b 2 × 4096, in
bfloat16, keeps for the backward pass, without parameters and their gradients. `loss` has the temporary bytes of XLA's
program for a CPU that makes the head's loss and its gradient in float32, as it is and with all logits at once.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.deepseek_v4 import common, head, train
from examples.deepseek_v4.model import FIXED, Model

from .test_layer_config import published

B, S, LAYERS, GIB = 2, 4096, 8, 2**30
OTHERS = {
    "vocab_size": 129280, "n_routed_experts": 16, "num_experts_per_tok": 6, "moe_intermediate_size": 2048,
    "num_hash_layers": 3,
}  # fmt: skip


def kept(model: Model) -> dict[str, float]:
    """GiB of activations by policy: arrays that have shape and dtype of no parameter."""
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.float32))
    fixed, shapes = {x: params[x] for x in FIXED if x in params}, {(x.shape, x.dtype) for x in jax.tree.leaves(params)}
    tokens, found = jax.ShapeDtypeStruct((B, S), jnp.int32), {}
    for name, policy in train.POLICIES.items():

        def residuals(learned: Any, fixed: Any, tokens: Any, policy: Any = policy) -> Any:
            def loss(learned: Any) -> Any:
                return train.losses(model, jnp.bfloat16, policy, learned, fixed, tokens)

            return jax.vjp(loss, learned, has_aux=True)[1]

        arrays = jax.tree.leaves(jax.eval_shape(residuals, train.learnable(params), fixed, tokens))
        found[name] = round(sum(x.size * x.dtype.itemsize for x in arrays if (x.shape, x.dtype) not in shapes) / GIB, 1)
    return found


def of_all_logits(x: jax.Array, w: jax.Array, following: jax.Array, weights: jax.Array) -> jax.Array:
    logits = jnp.einsum("bsm,mv->bsv", x, w, preferred_element_type=jnp.float32)
    return (optax.softmax_cross_entropy_with_integer_labels(logits, following) * weights).sum()


def of_loss(model: Model) -> dict[str, float]:
    """GiB of temporary arrays."""
    shapes = {(B, S, model.hidden): jnp.float32, (model.hidden, model.vocabulary): jnp.float32}
    arrays = [jax.ShapeDtypeStruct(*x) for x in [*shapes.items(), ((B, S), jnp.int32), ((B, S), jnp.float32)]]
    found = {}
    for name, loss in (("parts", head.loss), ("all logits", of_all_logits)):
        program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arrays).compile()
        found[name] = round(program.memory_analysis().temp_size_in_bytes / GIB, 1)
    return found


if __name__ == "__main__":
    flash = published("flash")
    ratios = {"num_hidden_layers": LAYERS, "compress_ratios": flash["compress_ratios"][:LAYERS]}
    model = Model.from_config(flash | OTHERS | ratios)
    with common.mesh_of(1, 1, data=1):
        json.dump({"jax": jax.__version__, "kept": kept(model), "loss": of_loss(model)}, sys.stdout, indent=1)
    print()
