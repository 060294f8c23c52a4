"""Multi-head latent attention (MLA) in its absorbed form, as DeepSeek-V3 has it, and with a choice of keys as V3.2 has.

    c  = norm(wq_a x);    q = wq_b c                                       for each head: nope numbers, and RoPE's
    kv = [norm(wkv x), rope(…)]                                            one latent head: 512 and 64 numbers
    o  = attention([w_uk q_nope, rope(q_rope)]; kv)                        V is the first 512 numbers of K
    y  = wo (w_uv o)

Keys and values of heads, `w_uk kv` and `w_uv kv`, are never made: these matrices multiply queries and outputs. With an
indexer, queries see the keys that it chose of all past ones (DeepSeek Sparse Attention, DSA).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .. import Cache, Span, _check, fmha, lightning_indexer, mla_decode, sparse_fmha
from .._definitions.packed import LAYOUTS
from .._definitions.span import positions_of
from . import _latent_config, _operands, _pooled_keys
from ._caches import that_kernels_take
from ._norm import rms_norm
from ._products import product
from .compressor import kept_at
from .indexer import Indexer, in_8_bits, index_query
from .insert import Entries, Rows, insert
from .outputs import LayerCache, Output, Shared, check_pages
from .pooling import counted
from .rope import Rope, rope


@dataclasses.dataclass(frozen=True)
class LatentAttention:
    """The shape of a layer of DeepSeek-V3, V3.2, Kimi K2, GLM-5, GLM-5.3-Flash or Hy4.

    Its parameters are a dict: `wq_a [hidden, q_rank]`, `q_norm [q_rank]`, `wq_b [q_rank, heads, nope + rope.dims]`, or
    with q_rank 0 `wq [hidden, heads, nope + rope.dims]`; `wkv [hidden, latent + rope.dims]`, `kv_norm [latent]`,
    `w_uk [latent, heads, nope]`, `w_uv [latent, heads, v]`, `wo [heads, v, hidden]`; and where the layer has them
    `sink [heads]`, `gate [hidden, heads, v]`, `indexer`.

    Attributes:
      hidden: channels of x.
      heads: query heads.
      q_rank: size of the queries' low-rank projection; 0: there is none.
      latent: numbers of a key without RoPE's, which are its value too.
      nope: numbers of a query head without RoPE's.
      v: numbers of a head's output.
      rope: the rotation of the other numbers of queries and keys; None: there are none (GLM-5.3-Flash).
      scale: the factor of logits; None means `(nope + rope.dims)**-0.5`. YaRN's mscale is a part of it.
      sparse: whether queries see only chosen keys.
      indexer: chooses keys. If `sparse` and no indexer, the layer takes an earlier layer's choice.
      sinks: whether each head has a sink (Hy4).
      gated: whether a sigmoid of x scales the heads' outputs (Hy4).
      halves: whether a checkpoint has the pairs that RoPE turns as two halves, of queries and keys. `from_state_dict`
        puts pairs side by side, where the layer has them.
      index_halves: the same of the indexer's queries and keys.
      index_rope_first: whether a checkpoint has RoPE's numbers first in the indexer's queries and keys. The layer has
        them last.
      eps: epsilon of the norms of latents and low-rank queries.

    Raises:
      ValueError, TypeError: sizes out of range, or an indexer that does not fit.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha.layers import LatentAttention, Rope
      >>> layer = LatentAttention(hidden=64, heads=4, q_rank=32, latent=32, nope=16, v=16, rope=Rope(8))
      >>> params, x = layer.init(jax.random.key(0)), jnp.ones((2, 6, 64))
      >>> whole = jax.jit(layer)(params, x).y
      >>> out = layer(params, x[:, :5], layer.cache(2, 100, x.dtype))
      >>> last = layer.step(params, x[:, 5:], out.cache, lengths=6).y
      >>> last.shape, bool(jnp.allclose(last[:, 0], whole[:, 5], atol=1e-5))
      ((2, 1, 64), True)
    """

    hidden: int
    heads: int
    q_rank: int = 1536
    latent: int = 512
    nope: int = 128
    v: int = 128
    rope: Rope | None = dataclasses.field(default_factory=Rope)
    scale: float | None = None
    sparse: bool = False
    indexer: Indexer | None = None
    sinks: bool = False
    gated: bool = False
    halves: bool = False
    index_halves: bool = False
    index_rope_first: bool = False
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("hidden", "heads", "latent", "nope", "v"):
            _check.positive(_OP, name, getattr(self, name))
        _check.integer(_OP, "q_rank", self.q_rank, 0)
        _check.scale(_OP, self.scale, self.nope)
        _check.epsilon(_OP, self.eps)
        for name in ("sparse", "sinks", "gated", "halves", "index_halves", "index_rope_first"):
            _check.flags(_OP, **{name: getattr(self, name)})
        for name, kind in (("rope", Rope | None), ("indexer", Indexer | None)):
            if not isinstance(getattr(self, name), kind):
                raise _check.error(TypeError, _OP, name, getattr(self, name), f"a {name.title()}")
        if (its := self.indexer) is None:
            return
        if not self.sparse:
            raise _check.error(ValueError, _OP, "sparse", self.sparse, "True with an indexer")
        wanted = {"hidden": self.hidden, "q_rank": self.q_rank, "latent": self.hidden, "in_two_levels": False}
        for name, n in wanted.items():
            if getattr(its, name) != n:
                raise _check.error(ValueError, _OP, f"indexer.{name}", getattr(its, name), str(n))
        if self.turned > its.d:
            raise _check.error(ValueError, _OP, "indexer.d", its.d, f"at least the {self.turned} dims of rope")
        if its.pool and self.turned:
            raise _check.error(ValueError, _OP, "indexer.pool", its.pool, "0 with RoPE")

    @property
    def turned(self) -> int:
        """The numbers of queries and keys that RoPE turns."""
        return 0 if self.rope is None else self.rope.dims

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | Path, *, layer: int) -> "LatentAttention":
        """The layer of this number of a model: `deepseek_v3`, `kimi_k2`, `deepseek_v32`, `glm_moe_dsa`, `hy_v4`, or an
        indexed layer of `glm5_next_text`.

        As in `transformers`, epsilons of the norms inside of attention are 1e-6, whatever `rms_norm_eps` is. Hy4's
        indexer and GLM-5.3-Flash's latents take that.

        Args:
          config: the path of a config.json, or its contents: as published with the weights, or as `transformers` saves
            it.
          layer: an int from 0 on.

        Raises:
          ValueError: an entry is missing, has a value that these layers do not support, contradicts another entry, or
            is not known: it may change attention.
          TypeError: neither a path nor a mapping, or an entry of another type.

        Examples:
          >>> from jax_dsv4_fmha.layers import LatentAttention
          >>> config = {  # or the path of a config.json
          ...     "model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          ...     "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
          ...     "v_head_dim": 16, "rope_theta": 1e4,
          ... }
          >>> LatentAttention.from_config(config, layer=1).latent
          32
        """
        return cls(**_latent_config.attributes(config, layer))

    def init(self, key: jax.Array, dtype: Any = jnp.float32) -> dict[str, Any]:
        """Random parameters, matrices in dtype and the others in float32.

        Args:
          key: a key of `jax.random`.
          dtype: of the matrices.
        """
        keys = iter(jax.random.split(key, 8))

        def normal(fan_in: int, *shape: int) -> jax.Array:
            return jax.random.normal(next(keys), shape, jnp.float32) * fan_in**-0.5

        m, h, d = self.hidden, self.heads, self.nope + self.turned
        params: dict[str, Any] = {
            "wkv": normal(m, m, self.latent + self.turned),
            "kv_norm": jnp.ones(self.latent, jnp.float32),
            "w_uk": normal(self.latent, self.latent, h, self.nope),
            "w_uv": normal(self.latent, self.latent, h, self.v),
            "wo": normal(h * self.v, h, self.v, m),
        }
        if self.q_rank:
            params |= {"wq_a": normal(m, m, self.q_rank), "q_norm": jnp.ones(self.q_rank, jnp.float32)}
            params["wq_b"] = normal(self.q_rank, self.q_rank, h, d)
        else:
            params["wq"] = normal(m, m, h, d)
        if self.sinks:
            params["sink"] = jnp.zeros(h, jnp.float32)
        if self.gated:
            params["gate"] = normal(m, m, h, self.v)
        if self.indexer is not None:
            params["indexer"] = self.indexer.init(next(keys))
        return _operands.with_matrices_in(params, dtype)

    def partition(self, heads: str | tuple[str, ...] | None = None) -> dict[str, Any]:
        """The PartitionSpec of each parameter on a mesh whose Auto axis (or axes) `heads` shards the query heads.

        All other parameters, and the indexer's, are whole on each device. The one collective is the sum over heads.

        Args:
          heads: names of axes; None shards nothing.
        """
        specs = jax.tree.map(lambda _: PartitionSpec(), _operands.shapes(self))
        of_heads = dict.fromkeys(("wq", "wq_b", "w_uk", "w_uv", "gate"), 1) | {"wo": 0, "sink": 0}
        split = {name: PartitionSpec(*[None] * axis, heads) for name, axis in of_heads.items() if name in specs}
        return specs | split

    def cache(
        self,
        b: int,
        max_length: int,
        dtype: Any = jnp.bfloat16,
        *,
        keys: Any = None,
        steps: int = 1,
        block_table: jax.Array | None = None,
        pages: int | None = None,
    ) -> LayerCache:
        """An empty cache for b sequences of up to `max_length` tokens: `window` has all their keys, and `keys` those of
        the indexer, if there is one. Where these are pooled, `key_tokens` has the last tokens.

        Args:
          b, max_length: ints >= 1. A sequence must not become longer than `max_length`.
          dtype: x's: bfloat16, float16 or float32; or float8_e4m3fn (x bfloat16), for latents of 512 in "v32_fp8", or
            without RoPE in "v41_fp8".
          keys: the dtype of the indexer's keys, if there is one: that of entries that are not packed, or float8_e4m3fn
            for "index_fp8" (index d 128). Queries are quantized to these. By default keys are packed where latents
            are, in pages that a kernel takes.
          steps: where index keys are pooled, the greatest number of tokens that may be taken back.
          block_table: int32 `[b, n]`, for pools of pages that all sequences share: page i of sequence m is page
            `block_table[m, i]`, and -1 is no page. `LayerCache.with_block_table` changes it. None makes contiguous
            caches.
          pages: how many pages a pool has, by default `b n`.

        Raises:
          ValueError, TypeError: operands that differ from the above.
        """
        b, length = _check.positive(_OP, "b", b), _check.positive(_OP, "max_length", max_length)
        plain, layout, of_keys = self._kept_as(dtype, keys)
        steps, rows = _check.positive(_OP, "steps", steps), b
        pool = self.indexer.pool or 1 if self.indexer else 1
        if block_table is not None:
            dims: dict[str, Any] = {"b": b}
            table = _check.operand(_OP, "block_table", block_table, "b n", dims, _check.INT)
            rows = b * dims["n"] if pages is None else _check.positive(_OP, "pages", pages)
            check_pages(_OP, block_table, rows)
            length = -(-length // dims["n"])
            length += -length % pool
        elif pages is not None:
            raise _check.error(ValueError, _OP, "pages", pages, "None without a block_table")

        def empty(d: int, length: int, layout: str | None) -> Cache:
            own = None if block_table is None else jnp.array(table)  # each has one, so all may be donated
            return Cache.zeros(rows, length, d, plain, own, layout=layout)

        window, its = empty(self.latent + self.turned, length, layout), self.indexer
        if its is None:
            return LayerCache(window)
        of_keys, page = that_kernels_take(_OP, keys, of_keys, block_table, -(-length // pool), plain, "max_length")
        last = Cache.zeros(b, pool - 1 + steps, 2 * its.d, plain) if its.pool else None
        return LayerCache(window, keys=empty(its.d, page, of_keys), key_tokens=last)

    def _kept_as(self, dtype: Any, keys: Any) -> tuple[Any, str | None, str | None]:
        """The dtype of what is not packed in a cache, and the layouts of latents and index keys; None: not packed."""
        wanted = f"{' or '.join(map(str, _check.FLOAT))} or {_FP8}"
        dtype = _check.dtype(_OP, "dtype", dtype, (*_check.FLOAT, _FP8), wanted)
        layout = None
        if dtype == _FP8:
            sizes = {(512, 64): "v32_fp8", (512, 0): "v41_fp8"}
            layout = sizes.get((self.latent, self.turned))
            if layout is None:
                got = f"{dtype} for latents of {self.latent} and {self.turned} for RoPE"
                raise _check.error(ValueError, _OP, "dtype", got, "it for 512 and 64, or 512 alone")
        plain = jnp.dtype(jnp.bfloat16) if layout else dtype
        if keys is not None:
            keys = _check.dtype(_OP, "keys", keys, (plain, _FP8), f"None, {plain} or {_FP8}")
        has_layout = self.indexer is not None and self.indexer.d == LAYOUTS[_KEYS_IN_FP8].d
        if keys == _FP8 and not has_layout:
            raise _check.error(ValueError, _OP, "keys", _FP8.name, "an indexer with d=128 for it")
        packs = keys == _FP8 or (keys is None and layout is not None)
        return plain, layout, _KEYS_IN_FP8 if packs and has_layout else None

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
        implementation: _check.Implementation | None = None,
        deterministic: bool = False,
        batch_invariant: bool = False,
    ) -> Output:
        """Whole sequences, differentiable, or a chunk of a prompt after cached tokens.

        Args:
          params: as `init` or `from_state_dict` make them; their matrices are used in x's dtype.
          x: `[b, s, hidden]`, bfloat16, float16 or float32. Without a cache token i has position i.
          cache: as `cache` makes it or this layer returned it; donate it.
          shared: `Shared.after` the layers before this one in this pass, for a layer that takes their choice.
          start: with a cache: int, or int32 `[b]`: token i has position `start + i`; earlier tokens are cached.
          lengths: with a cache: int32 `[b]`, tokens of each sequence, including these. Tokens at later positions, or
            below 0, are padding: they are not kept, and their y is 0. None means `start + s`.
          segment_ids: without a cache: int32 `[b, s]`, the document of each token; tokens of a document stand side by
            side, and a document gives the same result as alone.
          indices: int32 `[b, s, n]`, of a layer that sees chosen keys: the choice, in place of its own or of an earlier
            layer's. A key that a token may not see is absent, and so is -1.
          implementation, deterministic, batch_invariant: arguments of `fmha` and `sparse_fmha`, to which they go.

        Returns:
          An `Output`; its `indices` are the keys that an indexer chose, or that were given.

        Raises:
          ValueError, TypeError: operands that differ from the above.
        """
        b, s = self._checked(params, x, cache, shared, indices)
        options = {"implementation": implementation, "deterministic": deterministic, "batch_invariant": batch_invariant}
        if cache is None:
            if lengths is not None or type(start) is not int or start != 0:
                raise _check.error(ValueError, _OP, "start", start, "0, and no lengths, without a cache")
            positions, seen = jnp.arange(s, dtype=jnp.int32)[None], Span.causal(s)
            if segment_ids is not None:
                if self.indexer is not None and self.indexer.pool:
                    raise _check.error(ValueError, _OP, "segment_ids", segment_ids, "None where index keys are pooled")
                ids = _check.operand(_OP, "segment_ids", segment_ids, "b s", {"b": b, "s": s}, _check.INT)
                positions, seen = positions_of(ids), seen & Span.segments(ids)
            return self._attended(params, x, positions, seen, None, shared, indices, options)
        if segment_ids is not None:
            raise _check.error(ValueError, _OP, "segment_ids", segment_ids, "None with a cache")
        first = jnp.broadcast_to(_check.offset(_OP, "start", start, {"b": b}), (b,))
        if lengths is None:
            self._fits(cache, start if isinstance(start, jax.Array) else start + s)
            lengths = first + s
        of_chunk = {"is_step": False, "is_ragged": True}
        return self._continued(params, x, first, lengths, cache, shared, indices, options, **of_chunk)

    def step(
        self,
        params: Any,
        x: jax.Array,
        cache: LayerCache,
        shared: Shared | None = None,
        *,
        lengths: int | jax.Array,
        start: int | jax.Array | None = None,
        indices: jax.Array | None = None,
        implementation: _check.Implementation | None = None,
        batch_invariant: bool = False,
    ) -> Output:
        """A step of generation for the last tokens of every sequence.

        Args:
          params, x, cache, shared, indices: as in `__call__`.
          lengths: an int, or int32 `[b]`: tokens of each sequence, including the new ones. 0 marks an idle place in the
            batch. To take tokens back, pass a smaller length in the next step.
          start: an int, or int32 `[b]`: token i has position `start + i`, and is padding at `lengths` or later. None
            means `lengths - s`.
          implementation, batch_invariant: as in `__call__`.

        Raises:
          ValueError, TypeError: operands that differ from the above.
        """
        if cache is None:
            raise _check.error(TypeError, _OP, "cache", cache, "a LayerCache")
        b, s = self._checked(params, x, cache, shared, indices)
        if isinstance(lengths, int):
            self._fits(cache, lengths)
            lengths = jnp.full(b, lengths, jnp.int32)
        options = {"implementation": implementation, "batch_invariant": batch_invariant}
        lengths = jnp.broadcast_to(_check.offset(_OP, "lengths", lengths, {"b": b}), (b,))
        first = lengths - s if start is None else _check.offset(_OP, "start", start, {"b": b})
        first = jnp.broadcast_to(first, (b,))
        of_step = {"is_step": True, "is_ragged": start is not None}
        return self._continued(params, x, first, lengths, cache, shared, indices, options, **of_step)

    def _checked(self, params: Any, x: Any, cache: Any, shared: Any, indices: Any) -> tuple[Any, Any]:
        """Raises unless a call's operands are of this layer; (b, s)."""
        _operands.parameters(self, params, packed=False)
        dims: dict[str, Any] = {"hidden": self.hidden}
        x = _check.operand(_OP, "x", x, "b s hidden", dims, _check.FLOAT)
        for name, kind, thing in (("cache", LayerCache, cache), ("shared", Shared, shared)):
            if not isinstance(thing, kind | None):
                raise _check.error(TypeError, _OP, name, thing, f"a {kind.__name__} or None")
        if cache is not None:
            widths = {"window": self.latent + self.turned} | ({"keys": self.indexer.d} if self.indexer else {})
            if self.indexer and self.indexer.pool:
                widths["key_tokens"] = 2 * self.indexer.d
            for name, part in cache._asdict().items():
                if isinstance(part, Cache) != (name in widths):
                    wanted = "a Cache" if name in widths else "None in such a layer"
                    raise _check.error(TypeError, _OP, f"cache.{name}", part, wanted)
                if part is not None:
                    part.check(_OP, f"cache.{name}", {"b": dims["b"], "d": widths[name]}, (x.dtype,))
                    if part.is_packed and x.dtype != jnp.bfloat16:
                        raise _check.error(ValueError, _OP, "x", x, f"bfloat16, with a packed cache.{name}")
        if indices is not None and not self.sparse:
            raise _check.error(ValueError, _OP, "indices", indices, "None in a layer that sees all keys")
        if self.sparse and self.indexer is None and indices is None:
            given = None if shared is None else shared.indices
            _check.operand(_OP, "shared.indices", given, "b s topk", dims, _check.INT)
        if indices is not None:
            _check.operand(_OP, "indices", indices, "b s n", dims, _check.INT)
        return dims["b"], dims["s"]

    def _fits(self, cache: LayerCache, length: Any) -> None:
        most = cache.window.capacity
        if isinstance(length, int | np.integer | np.ndarray) and isinstance(most, int) and np.max(length) > most:
            wanted = f"at most the {most} tokens that the cache has room for"
            raise _check.error(ValueError, _OP, "lengths", f"{int(np.max(length))} tokens", wanted)

    def _continued(
        self,
        params: Any,
        x: jax.Array,
        first: jax.Array,
        lengths: Any,
        cache: LayerCache,
        shared: Shared | None,
        indices: jax.Array | None,
        options: Mapping[str, Any],
        is_step: bool,
        is_ragged: bool,
    ) -> Output:
        """Tokens after cached ones, with y 0 where they are padding."""
        b, s = x.shape[:2]
        self._fits(cache, lengths)
        lengths = _check.operand(_OP, "lengths", lengths, "b", {"b": b}, _check.INT)
        new, seen = (
            _New(cache, kept_at(first, lengths, s), first, lengths, is_step, is_ragged),
            Span.causal(s, first) & Span.lengths(lengths),
        )
        out = self._attended(params, x, counted(first, 0, s), seen, new, shared, indices, options)
        return out._replace(y=jnp.where(new.kept[..., None] >= 0, out.y, 0))

    def _attended(
        self,
        params: Any,
        x: jax.Array,
        positions: jax.Array,
        seen: Span,
        new: "_New | None",
        shared: Shared | None,
        given: jax.Array | None,
        options: Mapping[str, Any],
    ) -> Output:
        """Tokens at positions, of which each sees some keys."""
        weights = {name: w if name == "indexer" else w.astype(x.dtype) for name, w in params.items() if name != "sink"}
        held: Any
        c, cache = x, None
        if new is None:
            held = self._latents(params, weights, x, positions)
        else:
            held = self._extended(params, weights, x, positions, new, options["implementation"] != "reference")
            cache = new.cache._replace(window=held)
        if self.q_rank:
            c = rms_norm(x @ weights["wq_a"], params["q_norm"], self.eps)
        q = jnp.einsum("bsr,rhd->bshd", c, weights["wq_b" if self.q_rank else "wq"])
        q = self._absorbed(q, weights["w_uk"], positions, new is not None and new.is_step)
        chosen, cache = self._chosen(params, x, c, positions, seen, new, cache, given)
        options = {"d_v": self.latent, "sink": params.get("sink"), "scale": self._scale, **options}
        indices = chosen if chosen is not None or not self.sparse else (shared or Shared()).indices
        with jax.named_scope("attention"):
            if new is not None and (new.is_step or (self.sparse and held.is_packed)):
                options.pop("deterministic", None)  # there is no gradient
                o, _ = mla_decode(q, held, new.lengths, indices, q_offset=new.first, **options)
            elif not self.sparse:
                keys = held.take() if isinstance(held, Cache) else held
                o, _ = fmha(q, keys[:, :, None], span=seen, **options)
            else:
                assert indices is not None  # as `_checked` saw to
                o, _ = _sparse(q, held, indices, seen, options)
        o = jnp.einsum("bshl,lhv->bshv", o, weights["w_uv"])
        if self.gated:
            o = o * jax.nn.sigmoid(jnp.einsum("bsm,mhv->bshv", x, weights["gate"]))
        y = jnp.einsum("bshv,hvm->bsm", o, weights["wo"])
        return Output(y, cache, Shared(indices=chosen), None)

    def _absorbed(self, q: jax.Array, w_uk: jax.Array, positions: jax.Array, is_step: bool) -> jax.Array:
        """`[b, s, heads, latent + turned]`: w_uk q_nope, then RoPE's numbers. In a prompt one product writes both, by
        w_uk beside ones: a concatenation would copy all of q. A step's q is smaller than w_uk.
        """
        if self.rope is None:
            return jnp.einsum("bshn,lhn->bshl", q, w_uk)
        q = rope(q, positions, self.rope)
        if is_step:
            q_latent = jnp.einsum("bshn,lhn->bshl", q[..., : self.nope], w_uk)
            return jnp.concatenate([q_latent, q[..., self.nope :]], -1)
        n, ones = self.turned, jnp.eye(self.turned, dtype=w_uk.dtype)[:, None]
        w = jnp.pad(w_uk, ((0, n), (0, 0), (0, n))) + jnp.pad(ones, ((self.latent, 0), (0, 0), (self.nope, 0)))
        return jnp.einsum("bshn,lhn->bshl", q, w)

    def _latents(self, params: Any, weights: Any, x: jax.Array, positions: jax.Array) -> jax.Array:
        """`[b, s, latent + turned]`"""
        kv = x @ weights["wkv"]
        kv = jnp.concatenate(
            [rms_norm(kv[..., : self.latent], params["kv_norm"], self.eps), kv[..., self.latent :]], -1
        )
        return kv if self.rope is None else rope(kv, positions, self.rope)

    def _extended(
        self, params: Any, weights: Any, x: jax.Array, positions: jax.Array, new: "_New", kernel: bool
    ) -> Cache:
        """The window with new tokens; kernel: whether one may insert a step's, which has no gradient."""
        window = new.cache.window
        if not new.is_step or self.rope is None:
            return window.append(self._latents(params, weights, x, positions), new.kept)
        with jax.named_scope("append"):
            rows = Rows(product(x, weights["wkv"]), 0, self.latent + self.turned)
            entries = Entries(params["kv_norm"], self.rope, self.eps)
            start = new.first if new.is_ragged else None
            return insert(window, None, rows, entries, new.lengths, x.dtype, kernel, start)[0]

    @property
    def _scale(self) -> float:
        return _check.scale(_OP, self.scale, self.nope + self.turned)

    def _chosen(
        self,
        params: Any,
        x: jax.Array,
        c: jax.Array,
        positions: jax.Array,
        seen: Span,
        new: "_New | None",
        cache: LayerCache | None,
        given: jax.Array | None,
    ) -> tuple[jax.Array | None, LayerCache | None]:
        """The given choice or the indexer's, None of a layer with neither; and the cache with the indexer's keys."""
        if self.indexer is None:
            return given, cache
        indexer, its, pool = self.indexer, params["indexer"], self.indexer.pool
        keys: Any
        if new is None:
            keys = _pooled_keys.of_prompt(indexer, its, x) if pool else indexer.keys(its, x, positions, self.rope)
        else:
            assert cache is not None and new.cache.keys is not None
            if pool:
                cache = _pooled_keys.extended(indexer, its, x, cache, new.kept, new.first, new.lengths)
            else:
                keys = indexer.keys(its, x, positions, self.rope)
                cache = cache._replace(keys=new.cache.keys.append(keys, new.kept))
            keys = cache.keys
        if given is not None:
            return given, cache
        if in_8_bits(keys):
            given_weights = product(x, its["weights_proj"])
            q, weights = index_query(indexer, its, c, given_weights, positions, self.rope, keys)
        else:
            q, weights = indexer.queries(its, x, c, positions, self.rope)
        n, most = keys.capacity if isinstance(keys, Cache) else keys.shape[1], indexer.topk
        if pool:
            most, seen = most // pool, Span.compressed(x.shape[1], pool, 0 if new is None else new.first)
        q, weights = _filled(q, weights)
        found = lightning_indexer(q, keys, weights, max(min(most, n), 1), span=seen)
        assert isinstance(found, jax.Array)  # because no scores are asked for
        return _pooled_keys.tokens(indexer, found, positions) if pool else found, cache


class _New(NamedTuple):
    """Tokens after cached ones."""

    cache: LayerCache
    kept: jax.Array
    """int32 `[b, s]`: their positions, -1 for padding"""
    first: jax.Array
    """int32 `[b]`"""
    lengths: jax.Array
    """int32 `[b]`"""
    is_step: bool
    """whether they are few"""
    is_ragged: bool
    """whether sequences may have different numbers of them; if not, all have as many as there are"""


def _filled(q: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index queries of 128 numbers and their weights with heads of zeros, which change no score: kernels have multiples
    of 32 heads, and Hy4's indexer has 16.
    """
    more = -q.shape[2] % 32 if q.shape[3] == LAYOUTS[_KEYS_IN_FP8].d else 0
    of_heads = ((0, 0), (0, 0), (0, more))
    return jnp.pad(q, (*of_heads, (0, 0))), jnp.pad(weights, of_heads)


def _sparse(
    q: jax.Array, held: jax.Array | Cache, indices: jax.Array, seen: Span, options: Mapping[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """Attention over the keys with these indices that each query may see."""
    n = held.capacity if isinstance(held, Cache) else held.shape[1]
    first, end = (x[..., None] for x in seen.bounds(q.shape[0], q.shape[1], n))
    indices = jnp.where((first <= indices) & (indices < end), indices, -1)
    if not isinstance(held, Cache):
        return sparse_fmha(q, held, indices, **options)
    if held.block_table is None:
        return sparse_fmha(q, held.entries, indices, **options)
    return sparse_fmha(q, held.pool()[0], held.slots(indices), **options)


_OP = "LatentAttention"
_FP8, _KEYS_IN_FP8 = jnp.dtype(jnp.float8_e4m3fn), "index_fp8"
