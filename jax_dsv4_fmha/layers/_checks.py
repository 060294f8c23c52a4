"""Checks of a call's operands, with errors in words, and of where they lie."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .. import Cache, _check
from .._definitions import explicit_axes
from .._definitions.packed_matrix import PackedMatrix
from . import _operands, _params
from ._shape import LayerShape
from .compressor import check_state
from .outputs import LayerCache, Output, Shared
from .pooling import RunningSums

_OP = "DSV4Attention"
F = TypeVar("F", bound=Callable[..., Output])


def operands(layer: LayerShape, params: Any, x: Any, cache: Any, shared: Any, indices: Any) -> tuple[Any, Any]:
    """Raises unless a call's operands are of this layer; (b, s)."""
    _params.check(layer, params)
    dims: dict[str, Any] = {"hidden": layer.hidden}
    x = _check.operand(_OP, "x", x, "b s hidden", dims, _check.FLOAT)
    b, s = dims["b"], dims["s"]
    whole_where_needed(layer, params, x)
    if cache is not None:
        caches(layer, cache, b, x)
    if not isinstance(shared, Shared | None):
        raise _check.error(TypeError, _OP, "shared", shared, "a Shared or None")
    if indices is not None and not layer.sparse:
        raise _check.error(ValueError, _OP, "indices", indices, "None in a layer that sees no chosen entries")
    what_is_shared(layer, shared or Shared(), x, cache, indices is not None)
    return b, s


def whole_where_needed(layer: LayerShape, params: Any, x: jax.Array) -> None:
    """Raises where Explicit axes of a mesh shard what has to be whole."""
    w = params["wq_b"]
    heads = explicit_axes.entries(w.data)[0] if isinstance(w, PackedMatrix) else explicit_axes.entries(w)[1]
    _operands.sharded_as(_OP, "params", params, layer.partition(heads))
    b, s, hidden = explicit_axes.entries(x)
    for name, entry in (("b", b), ("s", s), ("hidden", hidden)):
        got = explicit_axes.described(name, entry)
        if name == "hidden" and entry is not None:
            raise _check.error(ValueError, _OP, "x", got, "that axis whole: only b and s may be sharded")
        if set(explicit_axes.names(entry)) & set(explicit_axes.names(heads)):
            raise _check.error(ValueError, _OP, "x", got, "mesh axes that do not shard the parameters' heads")


def caches(layer: LayerShape, cache: Any, b: Any, x: jax.Array) -> None:
    """Raises unless a LayerCache has the caches of this kind of layer, for b sequences and x's dtype."""
    if not isinstance(cache, LayerCache):
        raise _check.error(TypeError, _OP, "cache", cache, "a LayerCache")
    packed = [part for part in (cache.window, cache.compressed) if isinstance(part, Cache) and part.is_packed]
    if packed and x.dtype != jnp.bfloat16:
        raise _check.error(ValueError, _OP, "x", x, f"bfloat16, with a cache in the layout {packed[0].layout}")
    channels = {"window": layer.d}
    if layer.compressor is not None:
        channels["compressed"] = layer.d
    if layer.indexer is not None and layer.indexer.owns_keys:
        channels["keys"] = layer.indexer.d
    states = {"tokens": layer.compressor, "key_tokens": None if layer.indexer is None else layer.indexer.compressor}
    for name, part in cache._asdict().items():
        if (compressor := states.get(name)) is not None:
            check_state(compressor, _OP, f"cache.{name}", part, b)
            continue
        if (part is None) == (name in channels) or not isinstance(part, Cache | None):
            wanted = "a Cache" if name in channels else "None in such a layer"
            raise _check.error(TypeError, _OP, f"cache.{name}", part, wanted)
        if part is not None:
            part.check(_OP, f"cache.{name}", {"b": b, "d": channels[name]}, (x.dtype,))


def prompt_or_chunk(cache: Any, start: Any, lengths: Any, segment_ids: Any, zigzag: Any) -> None:
    """Raises where operands of a chunk come without a cache, or those of a prompt with one."""
    for name, x in (("zigzag", zigzag), ("segment_ids", segment_ids)):
        if cache is not None and x is not None:
            raise _check.error(ValueError, _OP, name, x, "None with a cache")
    if cache is None and (lengths is not None or type(start) is not int or start != 0):
        raise _check.error(ValueError, _OP, "start", start, "0, and no lengths, without a cache")


def beside(x: jax.Array, name: str, of_tokens: Any) -> tuple[jax.Array, Any]:
    """x, and int32 `[b, s, …]` of its tokens or None, with sequences where they are in either."""
    if of_tokens is None:
        return x, None
    dims = dict(zip("bs", x.shape, strict=False))
    of_tokens = _check.operand(_OP, name, of_tokens, "b s n" if name == "indices" else "b s", dims, _check.INT)
    x, of_tokens = explicit_axes.with_one_batch(_OP, **{"x": x, name: of_tokens})
    return x, of_tokens


def steps(layer: LayerShape, cache: LayerCache, x: jax.Array, is_causal: Any) -> None:
    """Raises if there are more new tokens than a cache was made for."""
    _check.flags(_OP, is_causal=is_causal)
    of_sums = [x.capacity for x in (cache.tokens, cache.key_tokens) if isinstance(x, RunningSums)]
    for most in (cache.window.capacity - layer.window + bool(is_causal), *of_sums):
        if isinstance(most, int) and isinstance(x.shape[1], int) and x.shape[1] > most:
            wanted = (
                f"at most {most} tokens, {'' if is_causal else 'with is_causal=False fewer than '}the cache's steps"
            )
            raise _check.error(ValueError, _OP, "x", x, wanted)


def trained(layer: LayerShape, out: Any) -> None:
    """Raises unless `indexer_loss` can train the layer's indexer by this result."""
    if not isinstance(out, Output):
        raise _check.error(TypeError, "indexer_loss", "out", out, "an Output")
    if layer.indexer is None:
        raise _check.error(ValueError, "indexer_loss", "layer", "one without an indexer", "one that chooses entries")
    if out.cache is not None:
        raise _check.error(
            ValueError, "indexer_loss", "out", "that of a chunk or a step", "a prompt's, without a cache"
        )


def fits_cache(layer: LayerShape, cache: LayerCache, name: str, length: Any) -> None:
    """Raises if a length, an int or NumPy's ints, is known while tracing and its entries do not fit the cache."""
    if cache.compressed is None or not isinstance(length, int | np.integer | np.ndarray):
        return
    most = cache.compressed.capacity
    if isinstance(most, int) and int(np.max(length)) // layer.ratio > most:
        wanted = f"a sequence whose entries of {layer.ratio} tokens are at most the {most} that the cache has room for"
        raise _check.error(ValueError, _OP, name, f"{int(np.max(length))} tokens", wanted)


def what_is_shared(layer: LayerShape, shared: Shared, x: jax.Array, cache: LayerCache | None, chosen: bool) -> None:
    """Raises unless shared has what this layer takes from earlier ones."""
    (b, s, _), cached = x.shape, cache is not None
    dims: dict[str, Any] = {"b": b, "s": s}
    taken = {"compressed": layer.d} if layer.ratio and layer.compressor is None else {}
    if layer.indexer is not None and not layer.indexer.owns_keys:
        taken["keys"] = layer.indexer.d
    for name, d in taken.items():
        part = getattr(shared, name)
        if cache is None:
            _operands.hidden(_OP, f"shared.{name}", part, d, (b, s // layer.ratio), x.dtype)
        elif not isinstance(part, Cache):
            raise _check.error(TypeError, _OP, f"shared.{name}", part, "a Cache, as an earlier layer returned it")
        else:
            part.check(_OP, f"shared.{name}", {"b": b, "d": d}, (x.dtype,))
            if name == "compressed" and part.is_packed != cache.window.is_packed:
                wanted = "entries that are packed as cache.window is, or as little"
                raise _check.error(ValueError, _OP, f"shared.{name}.entries", part.entries, wanted)
    if chosen or not (layer.sparse and (cached or s // layer.ratio > 0)):
        return
    if layer.indexer is None:
        _check.operand(_OP, "shared.indices", shared.indices, "b s topk", dims, _check.INT)
    elif layer.indexer.within_candidates:
        _check.operand(_OP, "shared.blocks", shared.blocks, "b s n", dims, _check.INT)


# Where operands lie


def without_single_axes(call: F) -> F:
    """The call of a layer, `call(layer, params, x, …)`, whose operands no mesh axis of size 1 shards. Results lie where
    the operands would have had them.
    """

    @functools.wraps(call)
    def on_others(layer: Any, params: Any, x: Any, *caches: Any, **operands: Any) -> Output:
        given = params, x, caches, operands
        kept = explicit_axes.without_single(given)
        if all(map(_lie_alike, jax.tree.leaves(given), jax.tree.leaves(kept))):
            return call(layer, params, x, *caches, **operands)
        batch = [y for y in jax.tree.leaves((x, caches, operands)) if isinstance(y, jax.Array) and y.ndim]
        sequences = next((entry for y in batch if (entry := explicit_axes.entries(y)[0]) is not None), None)
        tokens = explicit_axes.entries(x)[1] if isinstance(x, jax.Array) and x.ndim > 1 else None
        params, x, caches, operands = kept
        return _placed(call(layer, params, x, *caches, **operands), sequences, tokens)

    return on_others  # type: ignore[return-value]


def _lie_alike(x: Any, y: Any) -> bool:
    return not isinstance(x, jax.Array) or explicit_axes.entries(x) == explicit_axes.entries(y)


def _placed(out: Output, sequences: explicit_axes.Entry, tokens: explicit_axes.Entry) -> Output:
    """The same results with these axes for sequences, and for the tokens of x."""
    b = out.y.shape[0]

    def rows(x: Any, *of_tokens: explicit_axes.Entry) -> Any:
        def place(x: jax.Array) -> jax.Array:
            own = explicit_axes.entries(x)
            batch = own[0] if x.shape[0] == 1 != b else sequences  # one row for all sequences, as of positions
            return explicit_axes.placed(x, batch, *of_tokens, *own[1 + len(of_tokens) :], of=out.y)

        return jax.tree.map(place, x)

    def part(x: Any) -> Any:
        if isinstance(x, Cache) and x.block_table is not None:  # whose pool is whole on every device
            return Cache(x.entries, rows(x.block_table), x.layout)
        return rows(x)

    entries = {name: rows(getattr(out.made, name)) for name in ("compressed", "keys")}
    chosen = {name: rows(getattr(out.made, name), tokens) for name in ("indices", "blocks")}
    cache = jax.tree.map(part, out.cache, is_leaf=lambda x: isinstance(x, Cache))
    return Output(rows(out.y, tokens), cache, out.made._replace(**entries, **chosen), rows(out.indexed, tokens))
