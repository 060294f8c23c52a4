"""A layer as a flax module: `Linen` and `NNX`. The rest of the package does not need flax."""

from typing import Any

import jax
from flax import linen, nnx

from .attention import DSV4Attention, Output


class Linen(linen.Module):
    """`Linen(layer)(x, …)` is `layer(params, x, …)`; the one parameter, `layer`, is the pytree of `layer.init`."""

    layer: DSV4Attention

    @linen.compact
    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> Output:
        return self.layer(self.param("layer", self.layer.init), x, *args, **kwargs)


class NNX(nnx.Module):
    """`NNX(layer, rngs=…)(x, …)` is `layer(params, x, …)`; the one Param, `params`, is the pytree of `layer.init`."""

    def __init__(self, layer: DSV4Attention, *, rngs: nnx.Rngs):
        self.layer = layer
        self.params = nnx.Param(jax.jit(layer.init)(rngs.params()))

    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> Output:
        return self.layer(self.params.get_value(), x, *args, **kwargs)
