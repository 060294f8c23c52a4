"""The pytrees of arrays and caches that a layer keeps, makes and returns."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import Cache, _check
from .._definitions.pytree import public_pytree
from .pooling import RunningSums


@public_pytree
class LayerCache(NamedTuple):
    """The caches of a layer; None where the kind of layer does not have them.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha.layers import DSV4Attention, Rope
      >>> layer = DSV4Attention(hidden=64, heads=4, d=32, q_rank=32, o_groups=2, o_rank=16, rope=Rope(8))
      >>> params, x = layer.init(jax.random.key(0)), jnp.ones((2, 6, 64))
      >>> cache = layer.cache(2, max_length=100, dtype=x.dtype)
      >>> cache = jax.jit(layer, donate_argnums=2)(params, x, cache).cache  # a prompt of 6 tokens
      >>> step = jax.jit(layer.step, donate_argnums=2)
      >>> step(params, x[:, :1], cache, lengths=7).y.shape
      (2, 1, 64)
    """

    window: Cache
    """the last latents, a ring; of a `LatentAttention` all keys"""
    compressed: Cache | None = None
    """the compressor's entries"""
    tokens: Cache | RunningSums | None = None
    """tokens that the compressor has not pooled yet, as `Compressor.state` keeps them"""
    keys: Cache | None = None
    """the indexer's keys, one for each entry"""
    key_tokens: Cache | RunningSums | None = None
    """tokens that the indexer's compressor has not pooled yet"""

    def with_block_table(self, block_table: jax.Array) -> "LayerCache":
        """The same caches with another table, of the same shape, in each that has one: sequences get and lose pages.

        No entry moves. A page may stand in the rows of several sequences, which then share its entries.

        Raises:
          ValueError, TypeError: a table of another shape or dtype, or an array of NumPy's with a page that the pools do
            not have.
        """
        paged = self._pools()
        for name, part in paged.items():
            check_pages("with_block_table", block_table, part.entries.shape[0])
            b, n = part.block_table.shape
            table = _check.operand("with_block_table", "block_table", block_table, "b n", {"b": b, "n": n}, _check.INT)
            sharding = jax.typeof(part.block_table).sharding
            table = jax.sharding.reshard(table, sharding) if any(sharding.spec) else table
            own = jax.lax.dynamic_update_slice(part.block_table, table, (0, 0))  # each has one, so all may be donated
            paged[name] = dataclasses.replace(part, block_table=own)
        return self._replace(**paged)

    def fork(self, source: int | jax.Array, target: int | jax.Array) -> "LayerCache":
        """The same caches, with sequence `target` at the token where sequence `source` is.

        Rings and contiguous entries are copied. Pages are not: put those of `source` into the table's row of `target`,
        too. Do this at the end of a page: a page that both have must get no more entries.

        Args:
          source, target: an int or a scalar int32, from 0 to b - 1. Where a number is known only when the program runs
            and there is no such sequence, nothing changes.

        Raises:
          ValueError, TypeError: a number of no sequence in the batch, or not an integer.
          NotImplementedError: Explicit axes of a mesh shard the batch.
        """
        b = self._batch("fork")
        source, target = (_check.index("fork", name, x, b) for name, x in (("source", source), ("target", target)))
        at = jnp.where((source >= 0) & (source < b) & (target >= 0), target, b)  # row b is none
        return self._replace(**jax.tree.map(lambda x: x.at[at].set(x[source], mode="drop"), self._own()))

    def take(self, sequences: jax.Array) -> "LayerCache":
        """The caches of some sequences alone, to read a prompt without those that have nothing to read.

        Rings, contiguous entries and rows of the table are copied. Pools of pages are those of all: donate the caches
        that this is called on, and give what comes of the taken ones to `put`.

        Args:
          sequences: int32 `[n]`, each at most once. A number of no sequence takes any, for a row that is idle.

        Raises:
          ValueError, TypeError: no int32 `[n]`.
          NotImplementedError: Explicit axes of a mesh shard the batch.
        """
        self._batch("take")
        sequences = _check.operand("take", "sequences", sequences, "n", {}, _check.INT)
        whole = self._pools()
        tables = {name: dataclasses.replace(x, block_table=x.block_table[sequences]) for name, x in whole.items()}
        return self._replace(**jax.tree.map(lambda x: x[sequences], self._own()), **tables)

    def put(self, sequences: jax.Array, taken: "LayerCache") -> "LayerCache":
        """The caches of all, with what came of those that `take` gave. A number of no sequence changes nothing.

        Pools stay as they are where `taken` has none: see `rings`.
        """
        pools = {
            name: dataclasses.replace(x, entries=new.entries)
            for name, x in self._pools().items()
            if (new := getattr(taken, name)) is not None
        }
        b, new = self._batch("put"), taken._own()
        at = jnp.where(sequences >= 0, sequences, b)  # row b is none
        own = jax.tree.map(lambda x, y: x.at[at].set(y, mode="drop"), self._own(), new)
        return self._replace(**own, **pools)

    def rings(self) -> "LayerCache":
        """The caches without those in pages, which are None: all else that a sequence has at its last token.

        A copy of some of its rows is a snapshot. With the pages of that time, `put` lets a sequence go on from
        there.

        Examples:
          >>> import jax.numpy as jnp
          >>> from jax_dsv4_fmha.layers import Compressor, DSV4Attention, Rope
          >>> sizes = dict(hidden=64, heads=4, d=32, q_rank=32, o_groups=2, o_rank=16, rope=Rope(8))
          >>> layer = DSV4Attention(**sizes, ratio=16, compressor=Compressor(64, 32, 16))
          >>> cache = layer.cache(2, 64, jnp.float32, block_table=jnp.arange(4).reshape(2, 2))
          >>> snapshot = cache.rings().take(jnp.array([0]))
          >>> cache = cache.put(jnp.array([1]), snapshot)
        """
        nothing: dict[str, Any] = dict.fromkeys(self._pools())
        return self._replace(**nothing)

    def _batch(self, op: str) -> int:
        """The number of sequences, whose rows an op gathers or scatters."""
        if self.window is None:  # it is in pages, and so is all else
            return 0
        if axes := jax.typeof(self.window.entries).sharding.spec[0]:
            got, wanted = f"the batch sharded over {axes}", "it whole, or over Auto axes"
            raise _check.error(NotImplementedError, op, "cache", got, wanted)
        return self.window.rows.shape[0]

    def _pools(self) -> dict[str, Any]:
        """The caches in pages."""
        return {name: x for name, x in self._asdict().items() if isinstance(x, Cache) and x.block_table is not None}

    def _own(self) -> dict[str, Any]:
        """The others, in which each sequence has a row."""
        pools = self._pools()
        return {name: x for name, x in self._asdict().items() if x is not None and name not in pools}


@public_pytree
class Shared(NamedTuple):
    """The arrays that a V4.1 layer takes from earlier layers in the same pass over the model.

    A pass begins with `Shared()`; after each layer `shared = shared.after(out)` is what the next one takes.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha.layers import Compressor, DSV4Attention, Rope, Shared
      >>> sizes = dict(hidden=64, heads=4, d=32, q_rank=32, o_groups=2, o_rank=16, rope=Rope(8), ratio=2)
      >>> makes, reads = DSV4Attention(**sizes, compressor=Compressor(64, 32, 2)), DSV4Attention(**sizes)
      >>> x, shared = jnp.ones((1, 6, 64)), Shared()
      >>> for layer in (makes, reads):
      ...     out = jax.jit(layer)(layer.init(jax.random.key(0)), x, shared=shared)
      ...     x, shared = x + out.y, shared.after(out)
      >>> shared.compressed.shape
      (1, 3, 32)
    """

    compressed: Any = None
    """entries, an array `[b, n, d]` or a Cache"""
    keys: Any = None
    """the indexer's keys, `[b, n, index d]` or a Cache"""
    indices: jax.Array | None = None
    """int32 `[b, s, topk]`"""
    blocks: jax.Array | None = None
    """int32 `[b, s, n]`: the blocks of entries that later indexers choose from"""

    def without(self, given: "Shared") -> "Shared":
        """Returns what a layer that was given `given` added, without caches, which the layer's own cache holds."""
        return Shared(*(None if x is old or isinstance(x, Cache) else x for x, old in zip(self, given, strict=True)))

    def after(self, out: "Output") -> "Shared":
        """Returns what the next layer takes: what the layer with this output made, and the rest as it was."""
        cached = Shared() if out.cache is None else Shared(out.cache.compressed, out.cache.keys)
        return Shared(
            *(next((x for x in xs if x is not None), None) for xs in zip(out.made, cached, self, strict=True))
        )


@public_pytree
class Indexed(NamedTuple):
    """The queries of an indexer and of attention for a prompt, which `DSV4Attention.indexer_loss` takes."""

    q: jax.Array
    """the indexer's queries `[b, s, index heads, index d]`"""
    weights: jax.Array
    """float32 `[b, s, index heads]`"""
    attention_q: jax.Array
    """`[b, s, h, d]`, before the norm of heads and RoPE"""
    table: jax.Array
    """float32 `[b or 1, s, dims]`, RoPE of these queries"""
    lse: jax.Array
    """float32 `[b, s, h]`, over the window and the chosen entries"""


@public_pytree
class Output(NamedTuple):
    """The results of a layer. It holds no array twice, so that a jitted function may return it and XLA copies none.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha.layers import DSV4Attention, Rope
      >>> layer = DSV4Attention(hidden=64, heads=4, d=32, q_rank=32, o_groups=2, o_rank=16, rope=Rope(8))
      >>> params = layer.init(jax.random.key(0))
      >>> out = jax.jit(layer)(params, jnp.ones((2, 6, 64)))
      >>> out.y.shape, out.cache, out.indices
      ((2, 6, 64), None, None)
    """

    y: jax.Array
    """`[b, s, hidden]`, in x's dtype"""
    cache: LayerCache | None
    """the new cache, if there was one"""
    made: Shared
    """what this layer made for the layers after it, without what its cache holds; `Shared.after` puts both together"""
    indexed: Indexed | None
    """what `DSV4Attention.indexer_loss` takes; only from an indexer with entries to choose from, and without a cache"""

    @property
    def indices(self) -> jax.Array | None:
        """int32 `[b, s, topk]`: the entries that each token sees, chosen by the layer's indexer or given in its place;
        None from a layer without an indexer.
        """
        return self.made.indices


def check_pages(op: str, block_table: Any, pages: Any) -> None:
    """Raises if a table on the host has a page that a pool of so many does not have; below 0 there is no page."""
    most = int(block_table.max(initial=-1)) if isinstance(block_table, np.ndarray) else -1
    if isinstance(pages, int) and most >= pages:
        raise _check.error(ValueError, op, "block_table", f"page {most}", f"pages below the pool's {pages}")
