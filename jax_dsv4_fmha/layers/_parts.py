"""The parts of sequences that a layer is called with: a prompt, or a chunk of one. A step of generation is in _step.py.

A part says where its tokens stand, by which products q and entries are made, how entries are kept, and which op
attends. `DSV4Attention` takes the same road with all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import QueryRope, Span, dsv4_attention
from .._definitions.query_rope import GroupedRope
from .._definitions.span import positions_of
from .._dispatch.sequences import whole_sequences
from . import _entries, _few_rows
from ._few_rows import LowRank
from ._norm import rms_norm
from ._products import product, two_products
from ._rounding import rounded
from ._shape import LayerShape, roundings
from .compressor import kept_at
from .documents import packed_blocks
from .indexer import Indexer, IndexQuery, chosen, index_query
from .insert import Rows
from .outputs import Indexed, LayerCache, Shared
from .pooling import counted
from .rope import rope
from .zigzag import Order


class Products(NamedTuple):
    """The products of x with matrices."""

    c: LowRank
    """the low-rank query"""
    rows: Mapping[str, Rows]
    """by the matrices' names: rows that become entries, and in steps the indexer's weights"""


@dataclasses.dataclass(frozen=True)
class Part:
    """Some tokens of sequences, and the layer that takes them."""

    layer: LayerShape
    params: Any
    options: Mapping[str, Any]
    """how the op that attends is run"""
    positions: jax.Array
    """int32 `[b or 1, s]`"""

    @property
    def indexer(self) -> Indexer:
        assert self.layer.indexer is not None
        return self.layer.indexer

    def has_entries(self, shared: Shared) -> bool:
        """Returns whether there may be entries to choose from."""
        return True

    def indexed(self, query: IndexQuery | None, q: jax.Array, lse: jax.Array) -> Indexed | None:
        """Returns the operands of `DSV4Attention.indexer_loss`, if it trains on such tokens."""
        return None

    def seen(self, shared: Shared, given: jax.Array | None, own: Span | None = None) -> dict[str, Any]:
        """The operands that tell an op which entries are seen; own: the entries of a token's document."""
        if not self.layer.ratio:
            return {}
        past: dict[str, Any] = {"ratio": self.layer.ratio if own is None else own}
        return past | ({"indices": shared.indices if given is None else given} if self.layer.sparse else {})


class _Long(Part):
    """Many tokens, whose products are XLA's, and whose norm of heads and RoPE are parts of attention."""

    def products(self, x: jax.Array) -> Products:
        c, kv = two_products(x, *(_few_rows.array_of(self.params[name], x.dtype) for name in ("wq_a", "wkv")))
        c = rms_norm(c, self.params["q_norm"], self.layer.eps)
        return Products(LowRank(c), {"wkv": Rows(kv, 0, self.layer.d)})

    def queries(self, made: Products) -> jax.Array:
        """q `[b, s, h, d]`, before its norm and RoPE."""
        c = made.c.query
        return jnp.einsum("bsr,rhd->bshd", c, _few_rows.array_of(self.params["wq_b"], c.dtype))

    def _latents(self, made: Products) -> jax.Array:
        kv = rms_norm(made.rows["wkv"].product, self.params["kv_norm"], self.layer.eps)
        return rope(kv, self.positions, self.layer.rope)

    def index_query(self, x: jax.Array, made: Products, keys: Any) -> IndexQuery:
        its, (x, c) = self.params["indexer"], jax.lax.stop_gradient((x, made.c.query))  # it learns alone
        weights = product(x, its["weights_proj"])
        return index_query(self.indexer, its, c, weights, self.positions, self.layer.rope, keys)

    def _rope(self) -> QueryRope:
        """The `rope` of attention, by which it norms and turns q, and turns o back."""
        layer = self.layer
        return GroupedRope(layer.rope.table(self.positions), layer.eps if layer.norm_heads else None, layer.o_groups)

    def projected_back(self, o: jax.Array) -> jax.Array:
        return _few_rows.projected_back(o, self.params["wo_a"], self.params["wo_b"], None, False)


@dataclasses.dataclass(frozen=True)
class Prompt(_Long):
    """Whole sequences, or documents that ids tell apart, without a cache."""

    order: Order
    ids: jax.Array | None
    """int32 `[b, s]`, in the tokens' own order, whole on every device"""
    near: Span | None
    """which tokens each one sees of its window, where its position does not say it"""
    own: Span | None
    """which entries each token may see, where its position does not say it"""

    @classmethod
    def of(cls, layer: LayerShape, params: Any, options: Mapping[str, Any], s: Any, order: Order, ids: Any) -> Prompt:
        """s tokens in an order, with segment ids `[b, s]` in that order, or None."""
        positions, near, own = order.numbers(s), None, None
        has_entries = bool(layer.ratio) and s // layer.ratio > 0
        if ids is not None:
            ids = order.undone(whole_sequences(ids))
            positions, near = (jax.tree.map(order.of, _everywhere(f(ids))) for f in (positions_of, Span.segments))
            near = near & Span.sliding_window(s, layer.window) if order.is_natural else near
            if has_entries:
                own = jax.tree.map(order.of, _everywhere(Span.compressed_segments(ids, layer.ratio)))
        elif has_entries and not order.is_natural:
            own = Span(jnp.zeros_like(positions), (positions + 1) // layer.ratio)
        return cls(layer, params, options, positions, order, ids, order.seen(s, layer.window, near), own)

    def kept(self, x: jax.Array, made: Products, given: Shared) -> tuple[None, jax.Array, Shared]:
        """No cache; the window's latents; and what layers share."""
        kv = rounded(self._latents(made), roundings(self.layer)[0])
        packed = None
        if self.ids is not None and self.layer.compressor is not None:
            packed = _everywhere(packed_blocks(self.ids, self.layer.ratio))
        return None, kv, _entries.of_prompt(self.layer, self.params, x, packed, self.order, given)

    def has_entries(self, shared: Shared) -> bool:
        return bool(self.layer.ratio) and shared.compressed.shape[1] > 0

    def chosen(self, query: IndexQuery, shared: Shared, indices: jax.Array | None) -> Shared:
        past = Span.compressed(query[0].shape[1], self.layer.ratio) if self.own is None else self.own
        return chosen(self.indexer, query, shared, past, indices, order=self.order)

    def attention(self, q: jax.Array, keys: Any, shared: Shared, indices: Any) -> tuple[jax.Array, jax.Array]:
        layer, order, has_entries = self.layer, self.order, self.has_entries(shared)

        def attend(keys: Any, q: jax.Array, rope: QueryRope, chosen: Any, near: Any, own: Any) -> Any:
            return dsv4_attention(
                q,
                keys,
                shared.compressed if has_entries else None,
                window=layer.window if near is None else near,
                sink=self.params["sink"],
                rope=rope,
                precision=layer.precision,
                **self.options,
                **(self.seen(shared, chosen, own) if has_entries else {}),
            )

        rows = {"chosen": shared.indices if indices is None else indices, "near": self.near, "own": self.own}
        with jax.named_scope("attention"):
            keys = order.keys(keys, layer.window)
            o, lse = order.over_queries(attend, keys, q=q, rope=self._rope(), **rows)
        return o, lse

    def indexed(self, query: IndexQuery | None, q: jax.Array, lse: jax.Array) -> Indexed | None:
        return None if query is None else Indexed(*query, q, self.layer.rope.table(self.positions), lse)


@dataclasses.dataclass(frozen=True)
class Chunk(_Long):
    """Tokens of prompts after cached ones."""

    cache: LayerCache
    first: jax.Array
    """int32 `[b]`: the position of each sequence's first token here"""
    lengths: jax.Array
    """int32 `[b]`: tokens of each sequence, including these"""

    def kept(self, x: jax.Array, made: Products, given: Shared) -> tuple[LayerCache, tuple[jax.Array, ...], Shared]:
        """The cache with these tokens; earlier latents, and theirs as the cache holds them; and what layers share."""
        cache, window = self.cache, self.cache.window
        kv = whole_sequences(self._latents(made))
        kv = kv if window.is_packed else rounded(kv, roundings(self.layer)[0])
        earlier = window.take(counted(self.first, 1 - self.layer.window, 0))
        cache = cache._replace(window=window.append(kv, kept_at(self.first, self.lengths, x.shape[1])))
        kv = window.as_held(kv)
        write = _entries.extending(x, self.first, self.lengths)
        cache, shared = _entries.written(self.layer, self.params, cache, given, write)
        return cache, (earlier, kv), shared

    def chosen(self, query: IndexQuery, shared: Shared, indices: jax.Array | None) -> Shared:
        return chosen(self.indexer, query, shared, self._past(), indices, unpacks=True)

    def _past(self) -> Span:
        """The entries that are past for each token."""
        return Span.compressed(self.positions.shape[1], self.layer.ratio, self.first)

    def attention(self, q: jax.Array, keys: Any, shared: Shared, indices: Any) -> tuple[jax.Array, jax.Array]:
        layer, (earlier, kv) = self.layer, keys
        entries = shared.compressed if layer.ratio else None
        if entries is not None and layer.precision is None:
            entries = entries.take()
        window = Span.sliding_window(kv.shape[1], layer.window, self.first)
        with jax.named_scope("attention"):
            o, lse = dsv4_attention(
                q,
                jnp.concatenate([earlier.astype(kv.dtype), kv], 1),
                entries,
                window=window.keys_from(self.first - (layer.window - 1)),
                sink=self.params["sink"],
                rope=self._rope(),
                precision=layer.precision,
                **self.options,
                **self.seen(shared, indices, self._past() if layer.ratio else None),
            )
        return o, lse


def _everywhere(of_documents: Any) -> Any:
    """Arrays that documents determine, `[b, s]` or `[b, n]`, whole on every device: XLA computes none by shards."""
    return jax.tree.map(whole_sequences, of_documents)
