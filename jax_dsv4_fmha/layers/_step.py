"""A step of generation: the last tokens of every sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .. import Cache, Span, dsv4_decode
from . import _entries, _few_rows, _params
from ._few_rows import LowRank
from ._norm import rms_norm
from ._parts import Part, Products
from ._rounding import rounded
from ._shape import LayerShape, roundings
from .indexer import IndexQuery, chosen, in_8_bits, index_query, rounding, weight_scale
from .insert import Entries, Rows, State, insert
from .outputs import LayerCache, Shared
from .pooling import counted


@dataclasses.dataclass(frozen=True)
class Step(Part):
    """The last tokens of every sequence: few rows, which a kernel multiplies with large matrices."""

    cache: LayerCache
    lengths: jax.Array
    """int32 `[b]`: tokens of each sequence, including these"""
    first: jax.Array
    """int32 `[b]`: the position of each sequence's first token here"""
    is_ragged: bool
    """whether sequences may have different numbers of new tokens; if not, all have as many as there are"""
    is_causal: bool
    table: jax.Array
    """of RoPE at the positions"""
    kernel: bool
    """whether kernels without a gradient may run, of products and of insertions"""

    @classmethod
    def of(
        cls,
        layer: LayerShape,
        params: Any,
        options: Mapping[str, Any],
        s: Any,
        cache: LayerCache,
        lengths: jax.Array,
        start: jax.Array | None = None,
        *,
        is_causal: bool,
    ) -> Step:
        """s tokens of each sequence, as `DSV4Attention.step` says."""
        first = lengths - s if start is None else start
        positions, kernel = counted(first, 0, s), options["implementation"] != "reference"
        kind = start is not None, is_causal, layer.rope.table(positions), kernel
        return cls(layer, params, options, positions, cache, lengths, first, *kind)

    def products(self, x: jax.Array) -> Products:
        """All products with x, in float32."""
        columns, gain = _params.of_x(self.layer, self.params), self.params["q_norm"]
        c, arrays = None, {}
        for array, _, width in columns.values():
            if id(array) in arrays:
                continue
            if self.kernel and width < array.shape[1] and self._norm_is_left(x, array):
                arrays[id(array)], c = _few_rows.product_and_low_rank(x, array, gain)
            else:
                arrays[id(array)] = _few_rows.plain_product(x, array, jnp.float32, self.kernel)
        rows = {name: Rows(arrays[id(array)], first, width) for name, (array, first, width) in columns.items()}
        return Products(c or LowRank(rms_norm(rows["wq_a"].take().astype(x.dtype), gain, self.layer.eps)), rows)

    def _norm_is_left(self, x: jax.Array, w: _few_rows.Matrix) -> bool:
        """Returns whether all products of the low-rank query, the first columns of x w, do its norm."""
        layer = self.layer
        eps = layer.eps if layer.norm_heads else None
        heads = _few_rows.makes_heads(x, self.params["wq_b"], layer.rope.dims, eps)
        return _few_rows.leaves_norm(
            x, w, layer.q_rank, heads, layer.indexer is None or self._indexes(x, self.cache.keys)
        )

    def queries(self, made: Products) -> jax.Array:
        """q `[b, s, h, d]`, after norm and RoPE."""
        eps = self.layer.eps if self.layer.norm_heads else None
        return _few_rows.query_heads(made.c, self.params["wq_b"], self.table, eps, self.kernel)

    def kept(self, x: jax.Array, made: Products, given: Shared) -> tuple[LayerCache, Cache, Shared]:
        """The cache with all that these tokens make; its window; and what layers share."""
        layer, rows = self.layer, made.rows

        def inserted(cache: Any, state: Any, rows: Rows, entries: Entries) -> Any:
            start = self.first if self.is_ragged else None
            return insert(cache, state, rows, entries, self.lengths, x.dtype, self.kernel, start)

        def write(source: _entries.Source, cache: Cache, state: State) -> _entries.Written:
            with jax.named_scope(source.name.partition(".")[0]):
                return _entries.Written(*inserted(cache, state, rows[f"{source.name}.w"], source.entries))

        of_window = Entries(self.params["kv_norm"], layer.rope, layer.eps, rounding=roundings(layer)[0])
        with jax.named_scope("append"):
            window, _ = inserted(self.cache.window, None, rows["wkv"], of_window)
        # keys that are made of latents need these before RoPE
        by_latents = layer.indexer is not None and layer.indexer.latent > 0
        writer = _entries.extending(x, self.first, self.lengths) if by_latents else write
        cache, shared = _entries.written(layer, self.params, self.cache._replace(window=window), given, writer)
        return cache, window, shared

    def _indexes(self, x: jax.Array, keys: Any) -> bool:
        """Returns whether a kernel makes the indexer's queries, for a step with the batch and dtype of x."""
        dims, w = self.layer.rope.dims, self.params["indexer"]["wq_b"]
        return self.indexer.transforms and _few_rows.makes_index_query(x, w, dims, in_8_bits(keys))

    def index_query(self, x: jax.Array, made: Products, keys: Any) -> IndexQuery:
        """An indexer's queries and their weights, where there is a kernel in one product."""
        (c, rows), layer, indexer, its = made, self.layer, self.indexer, self.params["indexer"]
        given = rows["indexer.weights_proj"]
        if not (self.kernel and self._indexes(c.query, keys)):
            # of few columns, so that XLA's product is faster
            in_kernel = self.kernel and self.options["batch_invariant"]
            made_of = its, c.query, given.take(), self.positions, layer.rope, keys
            return index_query(indexer, *made_of, in_kernel)
        with jax.named_scope("indexer"):
            numbers = {"column": given.column, "scale": weight_scale(indexer), "eps": layer.eps}
            quantized = in_8_bits(keys)
            q, weights = _few_rows.index_query(c, its["wq_b"], self.table, given.product, quantized, **numbers)
            return q if quantized else rounded(q, rounding(indexer)), weights

    def chosen(self, query: IndexQuery, shared: Shared, indices: jax.Array | None) -> Shared:
        past = Span.compressed(self.positions.shape[1], self.layer.ratio, self.first)
        if self.is_ragged:  # padding has nothing to choose from
            past &= Span(0, jnp.where(self.positions < self.lengths[:, None], 2**31 - 1, 0))
        return chosen(self.indexer, query, shared, past, indices)

    @jax.named_scope("attention")
    def attention(self, q: jax.Array, keys: Any, shared: Shared, indices: Any) -> tuple[jax.Array, jax.Array]:
        return dsv4_decode(
            q,
            keys,
            shared.compressed if self.layer.ratio else None,
            lengths=self.lengths,
            sink=self.params["sink"],
            window=self.layer.window,
            q_offset=self.first if self.is_ragged else None,
            is_causal=self.is_causal,
            **self.options,
            **self.seen(shared, indices),
        )

    def projected_back(self, o: jax.Array) -> jax.Array:
        return _few_rows.projected_back(o, self.params["wo_a"], self.params["wo_b"], self.table, self.kernel)
