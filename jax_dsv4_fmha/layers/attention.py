"""A DeepSeek-V4 attention layer, from hidden states to hidden states: for prompts, training and generation.

    c  = norm(wq_a x);    q = rope(headnorm(wq_b c));    kv = rope(norm(wkv x))             one latent head: K and V
    o  = attention(q; kv of the window, entries of the compressor, sink)
    y  = wo_b(wo_a(inverse_rope(o)))                                                        wo_a group by group of heads

There are three kinds of layers: a window alone (ratio 0); a window and all past entries of ratio 128; a window and the
entries that an indexer chooses (ratio 4; 1 and 2 in V4.1, where most layers use an earlier layer's entries and
choices).

A layer is a function of arrays and pytrees: parameters are a dict, caches a NamedTuple of `Cache`. The static part is
`DSV4Attention`, a frozen dataclass that `from_config` makes from a model's config.json.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .. import Cache, Span, _check, dsv4_attention, dsv4_decode, indexer_blocks, lightning_indexer
from .._definitions import explicit_axes
from .._definitions.packed import rounded
from .._definitions.span import positions_of
from .._dispatch.sequences import rounded_sequences, whole_sequences
from . import _caches, _checks, _few_rows, _joined, _operands, _step
from ._norm import rms_norm
from ._single_axes import without_single_axes
from ._step import in_8_bits
from .compressor import Compressor, kept_at, product
from .documents import packed_blocks
from .indexer import Indexer
from .outputs import IndexQuery, LayerCache, Output, Shared
from .pooling import RunningSums, counted
from .rope import Rope, rope, rope_of_normed
from .zigzag import NATURAL, Order


@dataclasses.dataclass(frozen=True)
class DSV4Attention:
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
      batch_invariant: as in `dsv4_attention`, for attention in prompts, chunks and steps. A sequence's y of a step then
        has the same bits in any batch of up to 128 tokens, with parameters in x's dtype. Products of prompts are XLA's
        (docs/semantics.md).
      products: as in `dsv4_attention`, for attention in prompts and chunks, which then has no gradient. A chunk reads
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

    hidden: int
    heads: int
    d: int = 512
    q_rank: int = 1024
    o_groups: int = 8
    o_rank: int = 1024
    window: int = 128
    rope: Rope = dataclasses.field(default_factory=Rope)
    ratio: int = 0
    compressor: Compressor | None = None
    sparse: bool = False
    indexer: Indexer | None = None
    norm_heads: bool = True
    fake_quantize: bool = False
    eps: float = 1e-6
    batch_invariant: bool = False
    products: str | None = None

    def __post_init__(self) -> None:
        _checks.fitting(self)

    @property
    def _formats(self) -> tuple[str, str]:
        """The layouts in which the model keeps latents and entries."""
        return ("v4_fp8", "v4_fp8") if self.norm_heads else ("v41_fp8", "v41_fp4")

    @property
    def _plain(self) -> int:
        """How many dimensions of them, the last, are not codes."""
        return self.rope.dims if self.norm_heads else 0

    def _rounded(self, latents: jax.Array, of_window: bool = False) -> jax.Array:
        """Entries or the window's latents as `fake_quantize` has them."""
        layout = self._formats[0 if of_window else 1]
        return rounded(latents, layout, self._plain) if self.fake_quantize else latents

    def init(self, key: jax.Array, dtype: Any = jnp.float32) -> dict[str, Any]:
        """Random parameters: matrices in dtype; norms, sinks and `ape` in float32, as `from_state_dict` has them."""
        dtype = _check.dtype(_OP, "dtype", dtype, _check.FLOAT, " or ".join(map(str, _check.FLOAT)))
        keys = iter(jax.random.split(key, 7))

        def normal(fan_in: int, *shape: int) -> jax.Array:
            return jax.random.normal(next(keys), shape, jnp.float32) * fan_in**-0.5

        m, h, d, g = self.hidden, self.heads, self.d, self.o_groups
        params: dict[str, Any] = {
            "wq_a": normal(m, m, self.q_rank),
            "q_norm": jnp.ones(self.q_rank, jnp.float32),
            "wq_b": normal(self.q_rank, self.q_rank, h, d),
            "wkv": normal(m, m, d),
            "kv_norm": jnp.ones(d, jnp.float32),
            "sink": jnp.zeros(h, jnp.float32),
            "wo_a": normal(h // g * d, g, h // g, d, self.o_rank),
            "wo_b": normal(g * self.o_rank, g, self.o_rank, m),
        }
        if self.compressor is not None:
            params["compressor"] = self.compressor.init(next(keys))
        if self.indexer is not None:
            params["indexer"] = self.indexer.init(next(keys))
        return _operands.with_matrices_in(params, dtype)

    def joined(self, params: Any) -> dict[str, Any]:
        """These parameters for generation: the matrices that multiply x side by side in one, under "wx".

        A step then has one product in place of two to five, of a few rows each. Join them once, when they are loaded:
        `step` and `__call__` take both forms. `__call__` copies the matrices out of the joined one.

        Args:
          params: as `init` or `from_state_dict` make them.

        Returns:
          A new dict; parameters that are not joined are the same arrays.

        Raises:
          ValueError, TypeError: params differ from what `init` makes.
        """
        _operands.parameters(self, params)
        return _joined.joined(self, params)

    def partition(self, heads: str | tuple[str, ...] | None = None, mesh: Any = None) -> dict[str, Any]:
        """The PartitionSpec of each parameter on a mesh whose axis (or axes) `heads` shards the query heads.

        All other parameters, and the indexer's, are whole on each device. The one collective is the sum over groups of
        heads.

        Args:
          heads: names of axes; None shards nothing.
          mesh: the Mesh or AbstractMesh; by default that of `jax.set_mesh`, if there is one.

        Raises:
          ValueError: the mesh does not have these axes, or more devices share the heads than `o_groups` can be divided
            over. Without a mesh, placing the parameters is then JAX's error, which names none of them.
        """
        _checks.heads_of(self, heads, mesh)
        specs = jax.tree.map(lambda _: PartitionSpec(), _operands.shapes(self))
        split = {name: PartitionSpec(heads) for name in ("sink", "wo_a", "wo_b")}
        return {**specs, **split, "wq_b": PartitionSpec(None, heads)}

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
    ) -> Output:
        """Whole sequences, or a chunk of a prompt after cached tokens.

        Args:
          params: as `init` or `from_state_dict` make them, or as `joined` makes them of those; their matrices are used
            in x's dtype.
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
            so is -1. The indexer chooses nothing then; `Output.choice` has its queries and these entries.
          zigzag: without a cache: an int, if the tokens of x are in `layers.zigzag` order over so many devices, which
            then have equal work and send each other as little as without it. All that has a token's row is in that
            order: segment_ids, indices, and results. Entries are in their own. Each of the `2 zigzag` chunks must have
            whole blocks, and at least `window - 1` tokens.
          implementation: as in `dsv4_attention`.

        Raises:
          ValueError, TypeError: operands that differ from the above.
        """
        _checks.operands(self, params, x, cache, shared, indices)
        call = functools.partial(self._call, zigzag=zigzag, implementation=implementation)
        return without_single_axes(call, params, x, cache, shared, start, lengths, segment_ids, indices)

    def _call(
        self,
        params: Any,
        x: jax.Array,
        cache: LayerCache | None,
        shared: Shared | None,
        start: Any,
        lengths: Any,
        segment_ids: Any,
        indices: Any,
        *,
        zigzag: int | None,
        implementation: _check.Implementation | None,
    ) -> Output:
        b, s = x.shape[:2]
        order = Order.checked(_OP, zigzag, s, self.ratio, self.window - 1)
        if zigzag is not None and cache is not None:
            raise _check.error(ValueError, _OP, "zigzag", zigzag, "None with a cache")
        params = _joined.separate(self, params)
        if indices is not None:
            x, indices = explicit_axes.with_one_batch(_OP, x=x, indices=indices)
        if segment_ids is not None:
            segment_ids = _check.operand(_OP, "segment_ids", segment_ids, "b s", {"b": b, "s": s}, _check.INT)
            if cache is not None:
                raise _check.error(ValueError, _OP, "segment_ids", segment_ids, "None with a cache")
            x, segment_ids = explicit_axes.with_one_batch(_OP, x=x, segment_ids=segment_ids)
            segment_ids = whole_sequences(segment_ids)
        if cache is None:
            if lengths is not None or not (isinstance(start, int) and start == 0):
                raise _check.error(ValueError, _OP, "start", start, "0, and no lengths, without a cache")
            return self._whole(params, x, segment_ids, shared or Shared(), indices, order, implementation)
        first = jnp.broadcast_to(_check.offset(_OP, "start", start, {"b": b}), (b,))
        if lengths is None:
            _checks.room(self, cache, "start", start if isinstance(start, jax.Array) else start + s)
            lengths = first + s
        _checks.room(self, cache, "lengths", lengths)
        lengths = _check.operand(_OP, "lengths", lengths, "b", {"b": b}, _check.INT)
        x, first, lengths, _ = explicit_axes.with_one_batch(
            _OP, x=x, start=first, lengths=lengths, cache=cache.window.rows
        )
        positions = counted(first, 0, s)
        c, q, kv = self._projected(params, x, positions)
        kv = whole_sequences(kv)
        kv = kv if cache.window.is_packed else self._rounded(kv, of_window=True)
        earlier = cache.window.take(counted(first, 1 - self.window, 0))
        cache = cache._replace(window=cache.window.append(kv, kept_at(first, lengths, s)))
        kv = cache.window.as_held(kv)
        given = shared or Shared()
        cache, shared = self._compressed(params, x, first, cache, given, lengths)
        if self.indexer is not None:
            weights = product(x, params["indexer"]["weights_proj"])
            past = {"ratio": self.ratio, "q_offset": first}
            query = self._index_query(params, c, weights, positions, shared.keys)
            shared, _ = self._choose(query, shared, past, indices, unpacks=True)
        entries = shared.compressed if self.ratio else None
        if entries is not None and self.products is None:
            entries = entries.take()
        with jax.named_scope("attention"):
            o, _ = dsv4_attention(
                q,
                jnp.concatenate([earlier.astype(kv.dtype), kv], 1),
                entries,
                batch_invariant=self.batch_invariant,
                products=self.products,
                sink=params["sink"],
                window=self.window,
                q_offset=first,
                kv_offset=first - (self.window - 1),
                implementation=implementation,
                **self._turn(positions),
                **self._seen(shared, indices),
            )
        return Output(self._projected_back(params, o), cache, _made(shared, given), None)

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
    ) -> Output:
        """A step of generation for the last tokens of every sequence, by `dsv4_decode`.

        Only implementation="reference" has a gradient.

        Args:
          params: as in `__call__`.
          shared, indices, implementation: as in `__call__`.
          x: `[b, s, hidden]`, s up to the `steps` that the cache was made for.
          cache: the cache of all earlier tokens; donate it.
          lengths: an int, or int32 `[b]`: tokens of each sequence, including the new ones. 0 marks an idle place in the
            batch. To take tokens back, pass a smaller length in the next step.
          start: an int, or int32 `[b]`: token i has position `start + i`, and is padding at `lengths` or later. So
            sequences may have different numbers of new tokens. Padding is not kept, and its y is 0. None means
            `lengths - s`.
          is_causal: whether a token sees no token after it. If not, all new tokens see each other and the `window`
            tokens before them, as DSpark's drafts do (see `dsv4_decode`); the cache must be for `s + 1` steps.

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
        _checks.operands(self, params, x, cache, shared, indices)
        call = functools.partial(self._step, is_causal=is_causal, implementation=implementation)
        return without_single_axes(call, params, x, cache, shared, lengths, start, indices)

    def _step(
        self,
        params: Any,
        x: jax.Array,
        cache: LayerCache,
        shared: Shared | None,
        lengths: Any,
        start: Any,
        indices: Any,
        *,
        is_causal: bool,
        implementation: _check.Implementation | None,
    ) -> Output:
        b, s = x.shape[:2]
        if indices is not None:
            x, indices = explicit_axes.with_one_batch(_OP, x=x, indices=indices)
        _checks.room(self, cache, "lengths", lengths)
        lengths = jnp.broadcast_to(_check.offset(_OP, "lengths", lengths, {"b": b}), (b,))
        for state in (cache.tokens, cache.key_tokens):
            if isinstance(state, RunningSums) and s > state.capacity:
                raise _check.error(ValueError, _OP, "x", x, f"at most the {state.capacity} steps of the cache")
        starts = (
            {} if start is None else {"start": jnp.broadcast_to(_check.offset(_OP, "start", start, {"b": b}), (b,))}
        )
        x, lengths, _, *begin = explicit_axes.with_one_batch(
            _OP, x=x, lengths=lengths, cache=cache.window.rows, **starts
        )
        first = begin[0] if begin else lengths - s
        positions = counted(first, 0, s)
        kernel = implementation != "reference"
        table = self.rope.table(positions)
        rows, c = _step.products(self, params, x, cache, kernel)
        q = _few_rows.query_heads(c, params["wq_b"], table, self.eps if self.norm_heads else None, kernel)
        given = shared or Shared()
        start = first if begin else None
        cache, shared = _step.inserted(self, params, x, rows, cache, given, start, lengths, kernel)
        if self.indexer is not None:
            past: dict[str, Any] = {"ratio": self.ratio, "q_offset": first}
            if begin:  # padding has nothing to choose from
                past["span"] = Span(0, jnp.where(positions < lengths[:, None], 2**31 - 1, 0))
            query = _step.index_query(self, params, c, rows, positions, table, shared.keys, kernel)
            shared, _ = self._choose(query, shared, past, indices)
        with jax.named_scope("attention"):
            o, _ = dsv4_decode(
                q,
                cache.window,
                shared.compressed if self.ratio else None,
                batch_invariant=self.batch_invariant,
                lengths=lengths,
                sink=params["sink"],
                window=self.window,
                q_offset=start,
                is_causal=is_causal,
                implementation=implementation,
                **self._seen(shared, indices),
            )
        return Output(self._projected_back(params, o, table, kernel), cache, _made(shared, given), None)

    def _whole(
        self,
        params: Any,
        x: jax.Array,
        ids: jax.Array | None,
        given: Shared,
        indices: jax.Array | None,
        order: Order,
        implementation: _check.Implementation | None,
    ) -> Output:
        """Sequences from their first token on, or documents that ids tell apart, without a cache."""
        ids = None if ids is None else order.undone(ids)
        positions = order.numbers(x.shape[1]) if ids is None else order.of(_everywhere(positions_of(ids)))
        c, q, kv = self._projected(params, x, positions)
        kv, chosen, shared = self._rounded(kv, of_window=True), None, given
        if self.compressor is not None:
            packed = None if ids is None else _everywhere(packed_blocks(ids, self.ratio))
            in_codes = self.fake_quantize and packed is None and not self._plain  # devices send each other codes
            made_in = order if in_codes else NATURAL
            first = made_in.numbers(x.shape[1] // self.ratio) * self.ratio if packed is None else packed.first
            pool: dict[str, Any] = {"packed": packed, "whole": not in_codes, "zigzag": order.devices}
            latents = self.compressor(params["compressor"], x, **pool)
            turned = rope(latents, first, self.rope)
            made = rounded_sequences(turned, self._formats[1]) if in_codes else self._rounded(turned)
            shared = shared._replace(compressed=made_in.undone(made))
            if self.indexer is not None and self.indexer.owns_keys:
                second = self.indexer.compressor
                of_keys = latents if second is None else second(params["indexer"]["compressor"], x, **pool)
                keys = self.indexer.turned_keys(params["indexer"], of_keys, first, self.rope)
                shared = shared._replace(keys=made_in.undone(self.indexer.rounded(keys, whole=in_codes)))
        entries = shared.compressed if self.ratio else None
        there = entries is not None and entries.shape[1] > 0
        own, near = None, None
        if ids is not None:
            near = jax.tree.map(order.of, _everywhere(Span.segments(ids)))
            own = jax.tree.map(order.of, _everywhere(Span.compressed_segments(ids, self.ratio))) if there else None
        elif there and not order.is_natural:
            own = Span(jnp.zeros_like(positions), (positions + 1) // self.ratio)
        near = order.seen(x.shape[1], self.window, near)
        if self.indexer is not None and there:
            past = {"ratio": self.ratio} if own is None else {"span": own, "from_start": ids is not None}
            weights = product(x, params["indexer"]["weights_proj"])
            query = self._index_query(params, c, weights, positions, shared.keys)
            shared, chosen = self._choose(query, shared, past, indices, order=order)
        turn = self._turn(positions)

        def attend(kv: Any, q: jax.Array, table: jax.Array, chosen: Any, near: Any, own: Any) -> Any:
            seen = self._seen(shared, chosen, own) if there else {}
            if near is not None:
                seen["span"] = near
            # if not in their own order, `near` alone says which keys are seen
            first = 0 if order.is_natural else kv.shape[1]
            return dsv4_attention(
                q,
                kv,
                entries if there else None,
                batch_invariant=self.batch_invariant,
                products=self.products,
                sink=params["sink"],
                window=self.window if order.is_natural else first + q.shape[1],
                q_offset=first,
                implementation=implementation,
                o_groups=self.o_groups,
                **(turn | {"rope_table": table}),
                **seen,
            )

        with jax.named_scope("attention"):
            rows = {"q": q, "chosen": shared.indices if indices is None else indices, "near": near, "own": own}
            keys = order.keys(kv, self.window)
            o, lse = order.over_queries(attend, keys, table=turn["rope_table"], **rows)
        # where a kernel turns q inside of attention, this is a pass of its own, unless nobody asks for it
        index_query = None if chosen is None else IndexQuery(*chosen, self._turned(q, positions), lse)
        return Output(self._projected_back(params, o), None, _made(shared, given), index_query)

    def _compressed(
        self, params: Any, x: jax.Array, first: jax.Array, cache: LayerCache, shared: Shared, lengths: jax.Array
    ) -> tuple[LayerCache, Shared]:
        """The cache with the entries and keys that new tokens complete, and the entries that the queries see."""
        if self.compressor is not None:
            assert cache.compressed is not None
            latents, entry, tokens = self.compressor.extend(params["compressor"], x, cache.tokens, first, lengths)
            at = jnp.maximum(entry, 0) * self.ratio
            turned = rope(latents, at, self.rope)
            entries = cache.compressed.append(turned if cache.compressed.is_packed else self._rounded(turned), entry)
            cache = cache._replace(compressed=entries, tokens=tokens)
            shared = shared._replace(compressed=entries)
            if self.indexer is not None and self.indexer.owns_keys:
                own = self.indexer.compressor
                if own is not None:
                    latents, _, tokens = own.extend(
                        params["indexer"]["compressor"], x, cache.key_tokens, first, lengths
                    )
                    cache = cache._replace(key_tokens=tokens)
                assert cache.keys is not None
                turned = self.indexer.turned_keys(params["indexer"], latents, at, self.rope)
                keys = cache.keys.append(turned if cache.keys.is_packed else self.indexer.rounded(turned), entry)
                cache = cache._replace(keys=keys)
                shared = shared._replace(keys=keys)
        return cache, shared

    @jax.named_scope("indexer")
    def _index_query(
        self,
        params: Any,
        c: jax.Array,
        weights: jax.Array,
        positions: jax.Array,
        keys: Any,
        kernel: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        """The indexer's queries and weights, for such keys; c: the low-rank query; kernel: as in `_few_rows`."""
        assert self.indexer is not None
        weights, made_of = self.indexer.scaled(weights), (params["indexer"], c, positions, self.rope, kernel)
        if in_8_bits(keys):
            q, scales = self.indexer.turned_and_quantized(*made_of)
            return q, weights * scales
        return self.indexer.rounded(self.indexer.turned(*made_of)), weights

    @jax.named_scope("indexer")
    def _choose(
        self,
        query: tuple[jax.Array, jax.Array],
        shared: Shared,
        past: Mapping[str, Any],
        given: jax.Array | None = None,
        unpacks: bool = False,
        order: Order = NATURAL,
    ) -> tuple[Shared, tuple[jax.Array, jax.Array]]:
        """The entries that each query sees among the past ones, and the indexer's queries and weights, which are given;
        given: these entries, chosen elsewhere; unpacks: keys in 4 bits, once for all queries, of which there are many.
        """
        assert self.indexer is not None
        keys, (q, weights) = shared.keys, query
        if unpacks and isinstance(keys, Cache) and keys.is_packed and not in_8_bits(keys):
            keys = keys.take().astype(q.dtype)
        if self.indexer.in_two_levels:
            past = {**past, "block": self.indexer.block}

        def best(op: Callable[..., Any], more: Any, **sizes: int) -> Any:
            def of_rows(_: None, q: jax.Array, weights: jax.Array, span: Span | None, more: Any) -> Any:
                return op(q, keys, weights, **{**past, "span": span, **more, **sizes})

            return order.over_queries(of_rows, None, q=q, weights=weights, span=past.get("span"), more=more)

        blocks = shared.blocks if self.indexer.within_candidates else None
        if count := self.indexer.candidate_blocks:
            shared = shared._replace(blocks=best(indexer_blocks, {}, count=count))
            if blocks is None and count > self.indexer.topk:
                blocks = shared.blocks  # which have all of the greatest entries
        if given is None:
            n = keys.capacity if isinstance(keys, Cache) else keys.shape[1]
            given = best(lightning_indexer, {"blocks": blocks}, topk=min(self.indexer.topk, n))
            assert isinstance(given, jax.Array)  # because no scores are asked for
        return shared._replace(indices=given), (q, weights)

    def _seen(self, shared: Shared, given: jax.Array | None, own: Span | None = None) -> dict[str, Any]:
        """The operands that tell an op which entries are seen; own: the entries of a token's document."""
        if not self.ratio:
            return {}
        past = {"ratio": self.ratio} if own is None else {"compressed_span": own}
        return past | ({"indices": shared.indices if given is None else given} if self.sparse else {})

    def _projected(self, params: Any, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The low-rank query `[b, s, q_rank]`, q `[b, s, h, d]` before norm and RoPE, and latents `[b, s, d]`."""
        c, kv = _joined.two_products(x, *(params[name].astype(x.dtype) for name in ("wq_a", "wkv")))
        c = rms_norm(c, params["q_norm"], self.eps)
        q = self._queries(params, c)
        kv = rms_norm(kv, params["kv_norm"], self.eps)
        return c, q, rope(kv, positions, self.rope)

    def _queries(self, params: Any, c: jax.Array) -> jax.Array:
        """q `[b, s, h, d]` of the low-rank query, before its norm and RoPE."""
        return jnp.einsum("bsr,rhd->bshd", c, params["wq_b"].astype(c.dtype))

    def _turn(self, positions: jax.Array) -> dict[str, Any]:
        """The operands by which attention norms and turns q, and turns o back."""
        return {"rope_table": self.rope.table(positions), "norm_eps": self.eps if self.norm_heads else None}

    def _turned(self, q: jax.Array, positions: jax.Array) -> jax.Array:
        """q as attention sees it."""
        return rope_of_normed(q, positions, self.rope, self.eps) if self.norm_heads else rope(q, positions, self.rope)

    def _projected_back(
        self, params: Any, o: jax.Array, table: jax.Array | None = None, kernel: bool = False
    ) -> jax.Array:
        """y of o `[b, s, h, d]`, which is first turned back by a table, if any; kernel: as in `_few_rows`."""
        w = params["wo_a"].reshape(self.o_groups, self.heads // self.o_groups * self.d, -1)
        low_rank = _few_rows.grouped_product(o, w, table, kernel)
        return _few_rows.summed_product(low_rank, params["wo_b"], kernel)


def _everywhere(of_documents: Any) -> Any:
    """What documents determine, `[b, s]` or `[b, n]`, whole on every device: XLA does not compute it shard by shard."""
    return jax.tree.map(whole_sequences, of_documents)


def _made(shared: Shared, given: Shared) -> Shared:
    """What a layer that was given `given` made of `shared`, without caches, which its own cache holds."""
    made = (None if x is old or isinstance(x, Cache) else x for x, old in zip(shared, given, strict=True))
    return Shared(*made)


_OP = "DSV4Attention"
