"""A DeepSeek-V4 attention layer, from hidden states to hidden states: for prompts, training and generation.

    c  = norm(wq_a x);    q = rope(headnorm(wq_b c));    kv = rope(norm(wkv x))             one latent head: K and V
    o  = attention(q; kv of the window, entries of the compressor, sink)
    y  = wo_b(wo_a(inverse_rope(o)))                                                        wo_a group by group of heads

There are three kinds of layers: a window alone (ratio 0); a window and all past entries of ratio 128; a window and the
entries that an indexer chooses (ratio 4; 1 and 2 in V4.1, where most layers use an earlier layer's entries and
choices).

A layer is a function of arrays and pytrees: parameters are a dict, caches a NamedTuple of `Cache`. The static part is
`DSV4Attention`, a frozen dataclass that `from_config` makes from a model's config.json.

A field of it says what the model computes, rounding included. An argument says how one call runs, as in the ops:
`implementation`, `deterministic`, `batch_invariant`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .. import _check, indexer_loss
from .._definitions import explicit_axes
from .._dispatch.rope import normed_then_rotated, rotated
from . import _caches, _checks, _operands, _packing, _params
from ._checks import without_single_axes
from ._parts import Chunk, Prompt
from ._shape import LayerShape
from ._step import Step
from .outputs import LayerCache, Output, Shared
from .pooling import counted
from .zigzag import Order


@dataclasses.dataclass(frozen=True)
class DSV4Attention(LayerShape):
    """The shape of a layer; `layers.from_config` makes the layers of a model.

    Attributes:
      hidden: channels of x.
      heads: query heads.
      d: dimensions of a head, and of the latent that is K and V; 512 in the models.
      q_rank: size of the queries' low-rank projection.
      o_groups: groups of heads in the output's projection, a divisor of `heads`.
      o_rank: size of the projection of each group.
      window: tokens, the query's own included.
      rope: the rotation of queries, latents and entries.
      ratio: tokens of an entry; 0 means a window alone.
      compressor: makes the entries. With a ratio and no compressor the layer reads an earlier layer's entries.
      sparse: whether queries see only the entries that an indexer chose, or all past entries.
      indexer: chooses entries. If `sparse` and no indexer, the layer uses an earlier layer's choice.
      norm_heads: whether each query head is normalised (V4).
      fake_quantize: whether latents, entries, and the indexer's queries and keys are rounded in every call to the
        numbers that the model's caches hold in 8 and 4 bits, with a gradient that passes straight through. It is a
        part of V4.1; of V4 it is how the model was trained at last.
      eps: epsilon of the norms.
      precision: as in `dsv4_attention`, for attention in prompts and chunks, which then has no gradient. A chunk reads
        entries from the bytes of a packed cache, and unpacks none to bfloat16. Steps stay as they are: they wait for
        keys, not for products.

    Raises:
      ValueError, TypeError: sizes out of range, or a compressor or an indexer that does not fit the layer.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha.layers import DSV4Attention, Rope
      >>> layer = DSV4Attention(hidden=64, heads=4, d=32, q_rank=32, o_groups=2, o_rank=16, rope=Rope(8))
      >>> params = layer.init(jax.random.key(0))
      >>> jax.jit(layer)(params, jnp.ones((2, 6, 64))).y.shape
      (2, 6, 64)
    """

    def joined(self, params: Any) -> dict[str, Any]:
        """These parameters, as `init` makes them, for generation: the matrices that multiply x side by side in one.

        A step then has one product in place of two to five, of a few rows each. Join them once, when they are loaded:
        `step` and `__call__` take both forms. `__call__` copies the matrices out of the joined one. That is packed if
        all of these are, in a layer without compressor; else it has the dtype of those that are not.

        Raises:
          ValueError, TypeError: params differ from what `init` makes.
        """
        _operands.parameters(self, params)
        return _params.joined(self, params)

    def packed(self, params: Any, shardings: jax.sharding.Sharding | dict[str, Any] | None = None) -> dict[str, Any]:
        """These parameters with projections rounded to FP8, each a `PackedMatrix`: to the nearest numbers in e4m3, by
        the least powers of two for blocks of 128 x 128 that they fit in.

        `from_state_dict(..., packed=True)` keeps a checkpoint's own codes and scales. This method is for parameters in
        16 or 32 bits, random ones among them.

        Args:
          params: as `init` or `joined` makes them. Those that are packed stay as they are.
          shardings: of the matrices, as `from_state_dict` takes them: a matrix whose parts on devices are no whole
            tiles stays as it is.

        Raises:
          ValueError, TypeError: params differ from what `init` makes.

        Examples:
          >>> import jax
          >>> from jax_dsv4_fmha.layers import DSV4Attention, Rope
          >>> layer = DSV4Attention(hidden=128, heads=4, d=64, q_rank=128, o_groups=2, o_rank=128, rope=Rope(16))
          >>> params = layer.packed(layer.init(jax.random.key(0)))
          >>> params["wq_b"].shape, params["wq_b"].data.shape
          ((128, 4, 64), (4, 2, 4112))
        """
        _params.check(self, params)
        return _packing.packed(params, shardings)

    def cache(
        self,
        b: int,
        max_length: int,
        dtype: Any = jnp.bfloat16,
        *,
        keys: Any = None,
        steps: int = 1,
        block_table: jax.Array | None = None,
        page_tokens: int | None = None,
        pages: int | None = None,
    ) -> LayerCache:
        """An empty cache for b sequences of up to `max_length` tokens.

        Args:
          b, max_length: ints >= 1. A sequence must not become longer than `max_length`. Calls check a length that is
            known while they are traced, an int or an array of NumPy's; others are known only when a program runs.
          dtype: x's; or float8_e4m3fn (d 512, x bfloat16), for latents and entries in the model's FP8 layout:
            "v4_fp8", or "v41_fp8" for V4.1's layers; or float4_e2m1fn, for latents in that layout and entries in
            "v4_fp4" or "v41_fp4".
          keys: the dtype of the indexer's keys, if it has any: float4_e2m1fn for "index_fp4", float8_e4m3fn for
            "index_fp8" (either with index d 128), or that of entries that are not packed. Queries are quantized
            to the keys of "index_fp8". By default keys are packed where latents are, in pages that a kernel takes:
            with `fake_quantize`, as in V4.1, in "index_fp4", which holds exactly the rounded keys; V4's else in
            "index_fp8".
          steps: the greatest number of tokens that one call of `step` may add, or take back.
          block_table: int32 `[b, n]`, for compressed entries in pools of pages that all sequences share: page i of
            sequence m is page `block_table[m, i]` of the pool, and -1 is no page. Entries without a page are not kept.
            `LayerCache.with_block_table` changes it. None makes contiguous caches.
          page_tokens: how many tokens have their entries in a page, a multiple of the ratio; so layers of all ratios
            may have the same table. By default as few as n pages need for `max_length`.
          pages: how many pages a pool has, by default `b n`; fewer where sequences share pages, or are not all long.

        Raises:
          ValueError, TypeError: operands that differ from the above, or a table with too few pages for `max_length`,
            or with numbers above those of a pool's pages.
        """
        return _caches.empty(self, b, max_length, dtype, keys, steps, block_table, page_tokens, pages)

    @without_single_axes
    def __call__(
        self,
        params: Any,
        x: jax.Array,
        cache: LayerCache | None = None,
        shared: Shared | None = None,
        *,
        start: int | jax.Array = 0,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        indices: jax.Array | None = None,
        zigzag: int | None = None,
        implementation: _check.Implementation | None = None,
        deterministic: bool = False,
        batch_invariant: bool = False,
    ) -> Output:
        """Whole sequences, or a chunk of a prompt after cached tokens.

        Args:
          params: as `init` or `from_state_dict` make them, or as `joined` makes them of those; their matrices are used
            in x's dtype. `wq_a`, `wq_b`, `wkv`, `wo_a`, `wo_b` and the indexer's `wq_b` may each be a `PackedMatrix` of
            the same shape: steps read it in FP8, where a kernel does, and prompts and chunks unpack it in every call.
            x has a gradient then, and such a matrix has none.
          x: `[b, s, hidden]`. Without a cache token i has position i. Padding goes after a sequence's end, where
            no token of the sequence sees it.
          cache: as `cache` makes it or this layer returned it; donate it.
          shared: `Shared.after` the layers before this one in this pass; only V4.1 needs it.
          start: with a cache: int, or int32 `[b]`: token i has position `start + i`; earlier tokens are cached.
          lengths: with a cache: int32 `[b]`, tokens of each sequence, including these. Tokens at later positions, or
            below 0, are padding and not kept. None means `start + s`.
          segment_ids: without a cache: int32 `[b, s]`, the document of each token; tokens of a document stand side by
            side. A document gives the same result as alone: its positions begin at 0, and its blocks with its first
            token.
          indices: int32 `[b, s, n]`, of a layer that sees chosen entries: the choice, in place of its own or of an
            earlier layer's, such as `Output.indices` of another call or layer. An entry that is not past is absent, and
            so is -1. The indexer chooses nothing then, and `indexer_loss` is of these entries.
          zigzag: without a cache: an int, if the tokens of x are in `layers.zigzag` order over so many devices, which
            then have equal work and send each other as little as without it. All that has a token's row is in that
            order: segment_ids, indices, and results. Entries are in their own. Each of the `2 zigzag` chunks must have
            whole blocks, and at least `window - 1` tokens.
          implementation, deterministic, batch_invariant: arguments of `dsv4_attention`, to which they go. The layer has
            other gradients and products, which are XLA's (docs/bits.md).

        Raises:
          ValueError, TypeError: operands that differ from the above.
        """
        b, s = _checks.operands(self, params, x, cache, shared, indices)
        order = Order.checked(_OP, zigzag, s, self.ratio, self.window - 1)
        _checks.prompt_or_chunk(cache, start, lengths, segment_ids, zigzag)
        options = {"implementation": implementation, "deterministic": deterministic, "batch_invariant": batch_invariant}
        params = _params.separate(self, explicit_axes.on_mesh(params, x))
        x, indices = _checks.beside(x, "indices", indices)
        if cache is None:
            x, ids = _checks.beside(x, "segment_ids", segment_ids)
            return self._forward(x, Prompt.of(self, params, options, s, order, ids), shared, indices)
        first = jnp.broadcast_to(_check.offset(_OP, "start", start, {"b": b}), (b,))
        if lengths is None:
            _checks.fits_cache(self, cache, "start", start if isinstance(start, jax.Array) else start + s)
            lengths = first + s
        _checks.fits_cache(self, cache, "lengths", lengths)
        lengths = _check.operand(_OP, "lengths", lengths, "b", {"b": b}, _check.INT)
        of_batch = {"x": x, "start": first, "lengths": lengths, "cache": cache.window.rows}
        x, first, lengths, _ = explicit_axes.with_one_batch(_OP, **of_batch)
        part = Chunk(self, params, options, counted(first, 0, s), cache, first, lengths)
        return self._forward(x, part, shared, indices)

    @without_single_axes
    def step(
        self,
        params: Any,
        x: jax.Array,
        cache: LayerCache,
        shared: Shared | None = None,
        *,
        lengths: int | jax.Array,
        start: int | jax.Array | None = None,
        is_causal: bool = True,
        indices: jax.Array | None = None,
        implementation: _check.Implementation | None = None,
        batch_invariant: bool = False,
    ) -> Output:
        """A step of generation for the last tokens of every sequence, by `dsv4_decode`.

        Only implementation="reference" has a gradient.

        Args:
          params, shared, indices: as in `__call__`.
          x: `[b, s, hidden]`, s up to the `steps` that the cache was made for.
          cache: the cache of all earlier tokens; donate it.
          lengths: an int, or int32 `[b]`: tokens of each sequence, including the new ones. 0 marks an idle place in the
            batch. To take tokens back, pass a smaller length in the next step.
          start: an int, or int32 `[b]`: token i has position `start + i`, and is padding at `lengths` or later. So
            sequences may have different numbers of new tokens. Padding is not kept, and its y is 0. None means
            `lengths - s`.
          is_causal: whether a token sees no token after it. If not, all new tokens see each other and the `window`
            tokens before them, as DSpark's drafts do (see `dsv4_decode`); the cache must be for `s + 1` steps.
          implementation: as in `dsv4_attention`; "reference" makes products and insertions in `jnp`, too.
          batch_invariant: as in `dsv4_decode`. A sequence's y then has the same bits in any batch of up to 128 tokens,
            with parameters in x's dtype, or packed.

        Raises:
          ValueError, TypeError: operands that differ from the above.

        Examples:
          >>> import jax
          >>> import jax.numpy as jnp
          >>> from jax_dsv4_fmha.layers import DSV4Attention, Rope
          >>> layer = DSV4Attention(hidden=64, heads=4, d=32, q_rank=32, o_groups=2, o_rank=16, rope=Rope(8))
          >>> params, x = layer.init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (2, 9, 64))
          >>> cache = layer(params, x[:, :6], layer.cache(2, 100, x.dtype, steps=4)).cache
          >>> at = {"start": jnp.array([6, 6]), "lengths": jnp.array([9, 7])}
          >>> out = layer.step(params, x[:, 6:], cache, **at)  # three tokens of one sequence, one of the other
          >>> drafts = layer.step(params, x[:, :3], out.cache, lengths=at["lengths"] + 3, is_causal=False)
          >>> drafts.y.shape
          (2, 3, 64)
        """
        if cache is None:
            raise _check.error(TypeError, _OP, "cache", cache, "a LayerCache")
        b, s = _checks.operands(self, params, x, cache, shared, indices)
        options = {"implementation": implementation, "batch_invariant": batch_invariant}
        x, indices = _checks.beside(x, "indices", indices)
        _checks.steps(self, cache, x, is_causal)
        _checks.fits_cache(self, cache, "lengths", lengths)
        known = {"lengths": lengths} if start is None else {"lengths": lengths, "start": start}
        rows = {name: jnp.broadcast_to(_check.offset(_OP, name, n, {"b": b}), (b,)) for name, n in known.items()}
        x, lengths, *first, _ = explicit_axes.with_one_batch(_OP, x=x, **rows, cache=cache.window.rows)
        part = Step.of(self, explicit_axes.on_mesh(params, x), options, s, cache, lengths, *first, is_causal=is_causal)
        return self._forward(x, part, shared, indices)

    def _forward(self, x: jax.Array, part: Prompt | Chunk | Step, shared: Shared | None, indices: Any) -> Output:
        given = shared or Shared()
        made = part.products(x)
        q = part.queries(made)
        cache, keys, now = part.kept(x, made, given)
        query = None
        if self.indexer is not None and part.has_entries(now):
            query = part.index_query(x, made, now.keys)
            now = part.chosen(query, now, indices)
        o, lse = part.attention(q, keys, now, indices)
        return Output(part.projected_back(o), cache, now.without(given), part.indexed(query, q, lse))

    def indexer_loss(
        self,
        params: Any,
        out: Output,
        shared: Shared | None = None,
        *,
        implementation: _check.Implementation | None = None,
    ) -> jax.Array:
        """`jax_dsv4_fmha.indexer_loss` of the entries that a prompt's tokens saw, chosen by the indexer or given.

        Only parameters of indexers have a gradient by it: what they read of the layer is as if given (DeepSeek-V3.2's
        report, §2.1).

        Args:
          params: those of the call.
          out: the result of `__call__` without a cache.
          shared: what the call was given; only V4.1 needs it.
          implementation: as in `jax_dsv4_fmha.indexer_loss`.

        Returns:
          float32 `[b, s]`; 0 where there were no entries to choose from.

        Raises:
          ValueError, TypeError: a layer without an indexer, or a result that is not a prompt's.
        """
        _checks.trained(self, out)
        if out.indexed is None:
            return jnp.zeros_like(out.y[..., 0], jnp.float32)
        now = (shared or Shared()).after(out)
        q, weights, of_heads, table, lse = out.indexed
        # a pass of its own, which a kernel of attention does inside
        of_heads = normed_then_rotated(of_heads, table, self.eps) if self.norm_heads else rotated(of_heads, table, 1)
        seen: dict[str, Any] = {"indices": now.indices, "sink": params["sink"], "implementation": implementation}
        return indexer_loss(q, now.keys, weights, of_heads, now.compressed, lse, **seen)


_OP = "DSV4Attention"
