"""What a step of generation does with the rows of its tokens: products, and new entries of caches."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .. import Cache
from . import _few_rows, _joined
from ._norm import rms_norm
from .insert import Entries, Rows, insert
from .outputs import LayerCache, Shared

if TYPE_CHECKING:
    from .attention import DSV4Attention


def products(
    layer: DSV4Attention, params: Any, x: jax.Array, cache: LayerCache, kernel: bool
) -> tuple[dict[str, Rows], _few_rows.LowRank]:
    """x times the matrices that a step multiplies it with, in float32, by their names; and the low-rank query."""
    found, column = {}, 0
    if _joined.JOINED not in params:
        for name, width in _joined.of_x(layer).items():
            matrix = functools.reduce(operator.getitem, name.split("."), params)
            found[name] = Rows(_few_rows.plain_product(x, matrix, jnp.float32, kernel), 0, width)
        return found, _low_rank(layer, params, found["wq_a"].take(), x.dtype)
    c, w = None, params[_joined.JOINED]
    if kernel and _leaves_norm(layer, params, x, cache):
        whole, c = _few_rows.product_and_low_rank(x, w, params["q_norm"])
    else:
        whole = _few_rows.plain_product(x, w, jnp.float32, kernel)
    for name, width in _joined.of_x(layer).items():
        found[name] = Rows(whole, column, width)
        column += width
    return found, c or _low_rank(layer, params, found["wq_a"].take(), x.dtype)


def _low_rank(layer: DSV4Attention, params: Any, rows: jax.Array, dtype: Any) -> _few_rows.LowRank:
    return _few_rows.LowRank(rms_norm(rows.astype(dtype), params["q_norm"], layer.eps))


def _leaves_norm(layer: DSV4Attention, params: Any, x: jax.Array, cache: LayerCache) -> bool:
    """Whether all products of the low-rank query do its norm."""
    heads = _few_rows.makes_heads(x, params["wq_b"], layer.rope.dims, layer.eps if layer.norm_heads else None)
    indexes = layer.indexer is None or _makes_index_query(layer, params, x, cache.keys)
    return _few_rows.leaves_norm(x, params[_joined.JOINED], layer.q_rank, heads, indexes)


def _makes_index_query(layer: DSV4Attention, params: Any, x: jax.Array, keys: Any) -> bool:
    """Whether a kernel makes an indexer's queries, for a step with the batch and dtype of x."""
    assert layer.indexer is not None
    w = params["indexer"]["wq_b"]
    return layer.indexer.transforms and _few_rows.makes_index_query(x, w, layer.rope.dims, in_8_bits(keys))


def index_query(
    layer: DSV4Attention,
    params: Any,
    c: _few_rows.LowRank,
    rows: Mapping[str, Rows],
    positions: jax.Array,
    table: jax.Array,
    keys: Any,
    kernel: bool,
) -> tuple[jax.Array, jax.Array]:
    """An indexer's queries and their weights, where there is a kernel in one product."""
    assert layer.indexer is not None
    given = rows["indexer.weights_proj"]
    if not (kernel and _makes_index_query(layer, params, c.query, keys)):
        # of few columns, so that XLA's product is faster
        in_kernel = kernel and layer.batch_invariant
        return layer._index_query(params, c.query, given.take(), positions, keys, in_kernel)
    with jax.named_scope("indexer"):
        numbers = {"column": given.column, "scale": layer.indexer.weight_scale, "eps": layer.eps}
        w, quantized = params["indexer"]["wq_b"], in_8_bits(keys)
        q, weights = _few_rows.index_query(c, w, table, given.product, quantized, **numbers)
        return q if quantized else layer.indexer.rounded(q), weights


def inserted(
    layer: DSV4Attention,
    params: Any,
    x: jax.Array,
    rows: Mapping[str, Rows],
    cache: LayerCache,
    shared: Shared,
    start: jax.Array | None,
    lengths: jax.Array,
    kernel: bool,
) -> tuple[LayerCache, Shared]:
    """The cache with all that a step's tokens make, and the entries that the queries see; start: as in `insert`."""
    own, indexer = layer.compressor, layer.indexer
    near, far = ((x, layer._plain) if layer.fake_quantize else None for x in layer._formats)
    of_window = Entries(params["kv_norm"], layer.rope, layer.eps, rounded_as=near)
    with jax.named_scope("append"):
        window, _ = insert(cache.window, None, rows["wkv"], of_window, lengths, x.dtype, kernel, start)
    cache = cache._replace(window=window)
    if indexer is not None and indexer.latent > 0:  # whose keys are made of the entries before RoPE
        return layer._compressed(params, x, lengths - x.shape[1] if start is None else start, cache, shared, lengths)
    if own is None:
        return cache, shared
    assert cache.compressed is not None
    with jax.named_scope("compressor"):
        made = own.entries(params["compressor"], layer.rope)._replace(rounded_as=far)
        entries, tokens = insert(
            cache.compressed, cache.tokens, rows["compressor.w"], made, lengths, x.dtype, kernel, start
        )
    cache, shared = cache._replace(compressed=entries, tokens=tokens), shared._replace(compressed=entries)
    if indexer is not None and indexer.compressor is not None:
        assert cache.keys is not None
        with jax.named_scope("indexer"):
            made = indexer.compressor.entries(params["indexer"]["compressor"], layer.rope, indexer.transforms)
            made = made._replace(rounded_as=indexer.rounded_as)
            keys, tokens = insert(
                cache.keys, cache.key_tokens, rows["indexer.compressor.w"], made, lengths, x.dtype, kernel, start
            )
        cache, shared = cache._replace(keys=keys, key_tokens=tokens), shared._replace(keys=keys)
    return cache, shared


def in_8_bits(keys: Any) -> bool:
    """Whether an indexer's queries are quantized, as its keys are."""
    return isinstance(keys, Cache) and keys.is_packed and keys.layout == "index_fp8"
