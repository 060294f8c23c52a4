"""A layer as a flax module, `Linen` and `NNX`; and `attention_fn`, for flax's own attention modules.

The rest of the package does not need flax.
"""

from typing import Any

import jax
import numpy as np
from flax import linen, nnx
from flax.linen.dtypes import promote_dtype

from .. import _check, dot_product_attention
from .attention import DSV4Attention
from .outputs import Output


class Linen(linen.Module):
    """`Linen(layer)(x, …)` is `layer(params, x, …)`; its parameter `layer` is the pytree of `layer.init`."""

    layer: DSV4Attention

    @linen.compact
    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> Output:
        return self.layer(self.param("layer", self.layer.init), x, *args, **kwargs)


class NNX(nnx.Module):
    """`NNX(layer, rngs=…)(x, …)` is `layer(params, x, …)`; `params` is `layer.init`'s pytree, a Param for each leaf."""

    def __init__(self, layer: DSV4Attention, *, rngs: nnx.Rngs):
        self.layer = layer
        self.params = nnx.data(jax.tree.map(nnx.Param, jax.jit(layer.init)(rngs.params())))

    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> Output:
        params = jax.tree.map(lambda p: p.get_value(), self.params, is_leaf=lambda p: isinstance(p, nnx.Variable))
        return self.layer(params, x, *args, **kwargs)


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    is_causal: bool = False,
    **options: Any,
) -> jax.Array:
    """`dot_product_attention` with the arguments of flax's, linen's and nnx's.

    Pass it as `attention_fn` to `MultiHeadAttention`. Softmax and products are in float32 whatever `precision` and
    `force_fp32_for_softmax` say.

    Args:
      query, key, value, is_causal: as in `jax_dsv4_fmha.dot_product_attention`.
      bias: must be None.
      mask: of any dtype, broadcasts to `[B, N, T, S]`; a query sees the keys where it is not 0. Which masks there may
        be is as in `dot_product_attention`. flax's own are: causal, of padding, of documents packed side by side,
        and those of `decode=True`.
      dropout_rng, dropout_rate, broadcast_dropout: there is no dropout: with a rate, `deterministic` must be True.
      deterministic: without dropout. (It does not choose how gradients are computed.)
      dtype: query, key and value are converted to it; None promotes them to a common one.
      module, qk_attn_weights_einsum, attn_weights_value_einsum: must be None: nothing makes attention's weights.
      options: `scale`, `sinks`, `local_window_size`, `implementation`, … of `dot_product_attention`, by
        `functools.partial`.

    Raises:
      ValueError, TypeError: operands that differ from the above.
      NotImplementedError: dropout, a bias, weights or products of one's own, or a mask that shows a query more than
        one interval of keys.
    """
    if dropout_rate and not deterministic:
        raise _check.error(NotImplementedError, _OP, "dropout_rate", dropout_rate, "0, or deterministic=True")
    for name, x in (
        ("module (sow_weights)", module),
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        if x is not None:
            wanted = "None: attention's weights are never made"
            raise _check.error(NotImplementedError, _OP, name, type(x).__name__, wanted)
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    if mask is not None:
        known = mask if isinstance(mask, jax.core.Tracer) else np.asarray(mask)  # known while tracing, it stays so
        mask = (known != 0).reshape((1,) * (4 - known.ndim) + known.shape)
    o = dot_product_attention(query, key, value, bias, mask, is_causal=is_causal, **options)
    assert isinstance(o, jax.Array)  # because no residual is asked for
    return o


_OP = "attention_fn"
