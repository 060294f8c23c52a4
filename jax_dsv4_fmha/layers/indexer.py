"""DeepSeek-V4's indexer: it chooses the entries of a compressed cache that each query attends to.

    I[t, s] = Σ_h w[t, h] · ReLU(q[t, h] · k[s])                     float32; the topk greatest past entries
    q = rope(wq_b c);   w = (weights_proj x) · d^-½ · heads^-½       c the attention's low-rank query

The keys come from a separate compressor (V4), `rope(compressor x)`, or from the latents of the layer's compressor
(V4.1), `rope(k_norm(wk latent))`. V4 also multiplies queries and keys by a Hadamard matrix: products stay the same, but
the values of a row become similar in size, which suits the 8 bits in which they are kept.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import Cache, _check, indexer_blocks, lightning_indexer
from .._definitions import explicit_axes
from .._definitions.packed import LAYOUTS, quantize_rows
from .._definitions.span import Span
from . import _operands
from ._few_rows import array_of, plain_product
from ._norm import layer_norm, rms_norm
from ._products import product
from ._rounding import Rounding, rounded
from .compressor import Compressor
from .hadamard import is_power
from .outputs import Shared
from .rope import Rope, rope, rope_hadamard
from .rope import index_query as rotated_and_quantized
from .zigzag import NATURAL, Order

IndexQuery = tuple[jax.Array, jax.Array]
"""queries `[b, s, heads, d]`, as the keys want them, and weights float32 `[b, s, heads]`"""


@dataclasses.dataclass(frozen=True)
class Indexer:
    """The shape of an indexer.

    Its parameters are a dict: `wq_b [q_rank, heads, d]`, `weights_proj [hidden, heads]`, and `compressor`, or
    `wk [latent, d]` and `k_norm [d]`, or none of them, where the layer uses another layer's keys.

    Attributes:
      hidden: channels of x.
      q_rank: channels of the attention's low-rank query.
      heads: the indexer's heads.
      d: dimensions of a head, and of a key.
      topk: entries that a query attends to.
      compressor: the compressor of the keys, or None.
      latent: channels of the latents from which the keys are made, or 0.
      layer_norm: whether keys made of latents are normed by LayerNorm, with a bias `k_bias [d]`, as in DeepSeek-V3.2,
        whose latents are x.
      pool: of keys made of latents: 0, or how many tokens have one key, as in GLM-5.3-Flash. `keys` are then those of
        tokens, and `LatentAttention` pools them with two parameters more, `gate [latent, d]` and `ape [pool, d]`.
      block: entries of a block, for a choice in two levels (V4.1).
      candidate_blocks: how many blocks this layer also chooses, for later layers to choose entries from.
      within_candidates: whether this layer chooses only from such blocks.
      fake_quantize: whether `queries` and `keys` are rounded to 4 bits, as in the layout "index_fp4", with a gradient
        that passes straight through.
      eps: epsilon of the norm.

    Raises:
      ValueError, TypeError: here or in its methods: sizes, parameters or operands that differ from what is documented.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import Span, lightning_indexer
      >>> from jax_dsv4_fmha.layers import Compressor, Indexer, Rope
      >>> indexer = Indexer(64, q_rank=32, heads=2, d=16, compressor=Compressor(64, 16, ratio=4))
      >>> params, x = indexer.init(jax.random.key(0)), jnp.ones((1, 8, 64))
      >>> q, weights = indexer.queries(params, x, x[..., :32], jnp.arange(8)[None], Rope(8))
      >>> latents = indexer.compressor(params["compressor"], x)
      >>> k = indexer.keys(params, latents, jnp.array([[0, 4]]), Rope(8))
      >>> lightning_indexer(q, k, weights, topk=2, span=Span.compressed(8, ratio=4))[0, -1].tolist()
      [0, 1]
    """

    hidden: int
    q_rank: int
    heads: int = 64
    d: int = 128
    topk: int = 512
    compressor: Compressor | None = None
    latent: int = 0
    layer_norm: bool = False
    pool: int = 0
    block: int = 8
    candidate_blocks: int = 0
    within_candidates: bool = False
    fake_quantize: bool = False
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("hidden", "q_rank", "heads", "d", "topk", "block"):
            _check.positive(_OP, name, getattr(self, name))
        for name in ("latent", "pool", "candidate_blocks"):
            _check.integer(_OP, name, getattr(self, name), 0)
        for name in ("layer_norm", "within_candidates", "fake_quantize"):
            _check.flags(_OP, **{name: getattr(self, name)})
        if self.pool and not self.latent:
            raise _check.error(ValueError, _OP, "pool", self.pool, "0 without latent")
        own = self.compressor
        if not isinstance(own, Compressor | None):
            raise _check.error(TypeError, _OP, "compressor", own, "a Compressor or None")
        if own is not None and (own.hidden, own.d, self.latent) != (self.hidden, self.d, 0):
            got = f"hidden={own.hidden}, d={own.d} with latent={self.latent}"
            raise _check.error(ValueError, _OP, "compressor", got, f"hidden={self.hidden}, d={self.d} with latent=0")
        if own is not None and not is_power(self.d):
            raise _check.error(ValueError, _OP, "d", self.d, "a power of two with a compressor, for `hadamard`")
        if self.fake_quantize and self.d % (group := LAYOUTS[KEPT].group):
            raise _check.error(ValueError, _OP, "d", self.d, f"a multiple of {group} with fake_quantize")
        _check.epsilon(_OP, self.eps)

    @property
    def owns_keys(self) -> bool:
        """True if it makes keys; otherwise the layer takes another layer's."""
        return self.compressor is not None or self.latent > 0

    @property
    def in_two_levels(self) -> bool:
        """True if it chooses blocks of entries, or entries within blocks that were chosen."""
        return self.candidate_blocks > 0 or self.within_candidates

    @property
    def transforms(self) -> bool:
        """True if queries and keys are multiplied by the Hadamard matrix, as V4's are."""
        return self.compressor is not None

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Random parameters, in float32."""
        a, b, c = jax.random.split(key, 3)
        params: dict[str, Any] = {
            "wq_b": jax.random.normal(a, (self.q_rank, self.heads, self.d), jnp.float32) * self.q_rank**-0.5,
            "weights_proj": jax.random.normal(b, (self.hidden, self.heads), jnp.float32) * self.hidden**-0.5,
        }
        if self.compressor is not None:
            params["compressor"] = self.compressor.init(c)
        if self.latent:
            params["wk"] = jax.random.normal(c, (self.latent, self.d), jnp.float32) * self.latent**-0.5
            params["k_norm"] = jnp.ones(self.d, jnp.float32)
            params |= {"k_bias": jnp.zeros(self.d, jnp.float32)} if self.layer_norm else {}
            if self.pool:
                gate = jax.random.normal(jax.random.fold_in(c, 1), (self.latent, self.d), jnp.float32)
                params |= {"gate": gate * self.latent**-0.5, "ape": jnp.zeros((self.pool, self.d), jnp.float32)}
        return params

    def queries(
        self, params: Any, x: jax.Array, low_rank: jax.Array, positions: jax.Array, rotation: Rope | None
    ) -> tuple[jax.Array, jax.Array]:
        """q `[b, s, heads, d]` in x's dtype, and weights float32 `[b, s, heads]`, for `lightning_indexer`.

        Args:
          params: as `init` makes them.
          x: `[b, s, hidden]`, bfloat16, float16 or float32.
          low_rank: `[b, s, q_rank]`, the attention's low-rank query.
          positions: int32 `[b or 1, s]`.
          rotation: the layer's, None of a layer without RoPE.
        """
        _operands.parameters(self, params)
        x = _operands.hidden(_OP, "x", x, self.hidden)
        low_rank = _operands.hidden(_OP, "low_rank", low_rank, self.q_rank, x.shape[:2])
        params = explicit_axes.on_mesh(params, x)
        q = rounded(rotated_queries(self, params, low_rank, positions, rotation), rounding(self))
        return q, product(x, params["weights_proj"]) * weight_scale(self)

    def keys(self, params: Any, latents: jax.Array, positions: jax.Array, rotation: Rope | None) -> jax.Array:
        """k `[b, n, d]`, in the dtype of latents.

        Args:
          params: as `init` makes them.
          latents: those of `compressor`, `[b, n, d]`, or the layer's own, `[b, n, latent]`.
          positions: int32 `[b or 1, n]`, of each block's first token.
          rotation: as in `queries`.
        """
        _operands.parameters(self, params)
        latents = _operands.hidden(_OP, "latents", latents, self.latent or self.d)
        params = explicit_axes.on_mesh(params, latents)
        return rounded(rotated_keys(self, params, latents, positions, rotation), rounding(self))


def rounding(indexer: Indexer) -> Rounding:
    """The rounding of queries and keys by `fake_quantize`."""
    return (KEPT, 0) if indexer.fake_quantize else None


def weight_scale(indexer: Indexer) -> float:
    """The factor of x times `weights_proj` in the weights of heads."""
    return float(indexer.d**-0.5 * indexer.heads**-0.5)


def rotated_queries(
    indexer: Indexer,
    params: Any,
    low_rank: jax.Array,
    positions: jax.Array,
    rotation: Rope | None,
    kernel: bool = False,
) -> jax.Array:
    """q of `Indexer.queries`, not rounded; kernel: as in `_few_rows`."""
    return _rotated(indexer, _projected(params, low_rank, kernel), positions, rotation)


def quantized_queries(
    indexer: Indexer,
    params: Any,
    low_rank: jax.Array,
    positions: jax.Array,
    rotation: Rope | None,
    kernel: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """q of `Indexer.queries` in float8_e4m3fn, as `quantize_indexer` makes it, and scales float32 `[b, s, heads]`."""
    q = _projected(params, low_rank, kernel)
    if indexer.transforms and rotation is not None:
        return rotated_and_quantized(q, rotation.table(positions))
    return quantize_rows(_rotated(indexer, q, positions, rotation))


@jax.named_scope("indexer")
def rotated_keys(
    indexer: Indexer, params: Any, latents: jax.Array, positions: jax.Array, rotation: Rope | None
) -> jax.Array:
    """k of `Indexer.keys`, not rounded."""
    if indexer.latent:
        latents = jnp.matmul(latents, params["wk"].astype(latents.dtype))
        if indexer.layer_norm:
            latents = layer_norm(latents, params["k_norm"], params["k_bias"], indexer.eps)
        else:
            latents = rms_norm(latents, params["k_norm"], indexer.eps)
    return _rotated(indexer, latents, positions, rotation)


def in_8_bits(keys: Any) -> bool:
    """Returns whether an indexer's queries are quantized, as its keys are."""
    return isinstance(keys, Cache) and keys.is_packed and keys.layout == "index_fp8"


@jax.named_scope("indexer")
def index_query(
    indexer: Indexer,
    params: Any,
    c: jax.Array,
    weights: jax.Array,
    positions: jax.Array,
    rotation: Rope | None,
    keys: Any,
    kernel: bool = False,
) -> IndexQuery:
    """The query for such keys, of the low-rank query c, and of weights that are not scaled yet; kernel: as in
    `_few_rows`.
    """
    weights, made_of = weights * weight_scale(indexer), (indexer, params, c, positions, rotation, kernel)
    if in_8_bits(keys):
        q, scales = quantized_queries(*made_of)
        return q, weights * scales
    return rounded(rotated_queries(*made_of), rounding(indexer)), weights


@jax.named_scope("indexer")
def chosen(
    indexer: Indexer,
    query: IndexQuery,
    shared: Shared,
    past: Span,
    given: jax.Array | None,
    unpacks: bool = False,
    order: Order = NATURAL,
) -> Shared:
    """Shared with the entries that each query sees among the past ones, and with blocks for later indexers.

    Args:
      past: the entries that are past.
      given: these entries, if they were chosen elsewhere.
      unpacks: whether keys in 4 bits are unpacked once for all queries, because there are many.
    """
    keys, (q, weights) = shared.keys, query
    if unpacks and isinstance(keys, Cache) and keys.is_packed and not in_8_bits(keys):
        keys = keys.take().astype(q.dtype)
    block = {"block": indexer.block} if indexer.in_two_levels else {}

    def best(op: Callable[..., Any], more: Any, **sizes: int) -> Any:
        def of_rows(_: None, q: jax.Array, weights: jax.Array, span: Span, more: Any) -> Any:
            return op(q, keys, weights, span=span, **block, **more, **sizes)

        return order.over_queries(of_rows, None, q=q, weights=weights, span=past, more=more)

    blocks = shared.blocks if indexer.within_candidates else None
    if count := indexer.candidate_blocks:
        shared = shared._replace(blocks=best(indexer_blocks, {}, count=count))
        if blocks is None and count > indexer.topk:
            blocks = shared.blocks  # which have all of the greatest entries
    if given is None:
        n = keys.capacity if isinstance(keys, Cache) else keys.shape[1]
        given = best(lightning_indexer, {"blocks": blocks}, topk=min(indexer.topk, n))
        assert isinstance(given, jax.Array)  # because no scores are asked for
    return shared._replace(indices=given)


def _projected(params: Any, low_rank: jax.Array, kernel: bool) -> jax.Array:
    low_rank = lax.optimization_barrier(low_rank)  # or XLA merges this product with attention's, and cuts it apart
    w = params["wq_b"]
    if kernel:
        q = plain_product(low_rank, w.reshape(w.shape[0], -1), low_rank.dtype, kernel)
        return q.reshape(*q.shape[:2], *w.shape[1:])
    return jnp.einsum("bsr,rhd->bshd", low_rank, array_of(w, low_rank.dtype))


def _rotated(indexer: Indexer, x: jax.Array, positions: jax.Array, rotation: Rope | None) -> jax.Array:
    if rotation is None:
        return x
    return (rope_hadamard if indexer.transforms else rope)(x, positions, rotation)


_OP = "Indexer"
KEPT = "index_fp4"  # the layout in which the models keep index keys
