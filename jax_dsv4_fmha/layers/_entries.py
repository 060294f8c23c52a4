"""Entries and index keys: those of whole prompts, and those that new tokens write into a layer's caches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import Cache
from .._dispatch.sequences import rounded_sequences
from . import indexer as of_indexer
from ._rounding import Rounding, rounded
from ._shape import LayerShape, plain_dims, roundings
from .compressor import Compressor, entries_of
from .documents import PackedBlocks
from .insert import Entries, State
from .outputs import LayerCache, Shared
from .rope import rope, rope_hadamard
from .zigzag import NATURAL, Order


class Source(NamedTuple):
    """A compressor, and the form of the entries that it makes of x for one cache."""

    name: str
    """of the compressor among the layer's parameters"""
    compressor: Compressor
    params: Any
    entries: Entries


class Written(NamedTuple):
    """A cache and its compressor's state with what new tokens make; and that itself, where it was needed."""

    cache: Cache
    state: State
    latents: jax.Array | None = None
    """`[b, n, d]`, before RoPE"""
    first: jax.Array | None = None
    """int32 `[b, n]`: the position of the first token of each one's block"""
    number: jax.Array | None = None
    """int32 `[b, n]`: which entries they are, -1 for none"""


Writer = Callable[[Source, Cache, State], Written]


def written(
    layer: LayerShape, params: Any, cache: LayerCache, shared: Shared, write: Writer
) -> tuple[LayerCache, Shared]:
    """The caches of entries and keys with all that new tokens make, and shared with these caches."""
    own, indexer = layer.compressor, layer.indexer
    if own is None:
        return cache, shared
    assert cache.compressed is not None
    of_own = params["compressor"]
    entries = entries_of(own, of_own, layer.rope, roundings(layer)[1])
    made = write(Source("compressor", own, of_own, entries), cache.compressed, cache.tokens)
    cache = cache._replace(compressed=made.cache, tokens=made.state)
    shared = shared._replace(compressed=made.cache)
    if indexer is None or not indexer.owns_keys:
        return cache, shared
    keys = cache.keys
    assert keys is not None
    its, rounding, second = params["indexer"], of_indexer.rounding(indexer), indexer.compressor
    if second is not None:
        entries = entries_of(second, its["compressor"], layer.rope, rounding, indexer.transforms)
        made = write(Source("indexer.compressor", second, its["compressor"], entries), keys, cache.key_tokens)
        cache = cache._replace(keys=made.cache, key_tokens=made.state)
    else:
        assert made.latents is not None and made.first is not None and made.number is not None
        rotated = of_indexer.rotated_keys(indexer, its, made.latents, made.first, layer.rope)
        cache = cache._replace(keys=_appended(keys, rotated, made.number, rounding))
    return cache, shared._replace(keys=cache.keys)


def extending(x: jax.Array, first: jax.Array, lengths: jax.Array) -> Writer:
    """A writer for any number of tokens: x `[b, s, hidden]`, from position `first[n]` of sequence n on."""

    def write(source: Source, cache: Cache, state: State) -> Written:
        _, compressor, params, entries = source
        latents, number, state = compressor.extend(params, x, state, first, lengths)
        at = jnp.maximum(number, 0) * compressor.ratio
        if entries.is_transformed:
            with jax.named_scope("indexer"):
                rotated = rope_hadamard(latents, at, entries.rotation)
        else:
            rotated = rope(latents, at, entries.rotation)
        return Written(_appended(cache, rotated, number, entries.rounding), state, latents, at, number)

    return write


def _appended(cache: Cache, entries: jax.Array, number: jax.Array, rounding: Rounding) -> Cache:
    return cache.append(entries if cache.is_packed else rounded(entries, rounding), number)


def of_prompt(
    layer: LayerShape, params: Any, x: jax.Array, packed: PackedBlocks | None, order: Order, shared: Shared
) -> Shared:
    """Shared with the entries and keys of whole sequences, or of packed documents, in their own order.

    What is rounded stays where its tokens are until then, because devices send each other its codes.
    """
    if layer.compressor is None:
        return shared
    in_codes = layer.fake_quantize and packed is None and not plain_dims(layer)
    made_in = order if in_codes else NATURAL
    first = made_in.numbers(x.shape[1] // layer.ratio) * layer.ratio if packed is None else packed.first
    given: dict[str, Any] = {"packed": packed, "whole": not in_codes, "zigzag": order.devices}

    def whole(rotated: jax.Array, rounding: Rounding) -> jax.Array:
        if in_codes and rounding is not None:
            return made_in.undone(rounded_sequences(rotated, rounding[0]))
        return made_in.undone(rounded(rotated, rounding))

    latents = layer.compressor(params["compressor"], x, **given)
    rotated = rope(latents, first, layer.rope)
    shared = shared._replace(compressed=whole(rotated, roundings(layer)[1]))
    indexer = layer.indexer
    if indexer is None or not indexer.owns_keys:
        return shared
    second, (x, latents) = indexer.compressor, jax.lax.stop_gradient((x, latents))  # the indexer learns alone
    of_keys = latents if second is None else second(params["indexer"]["compressor"], x, **given)
    rotated = of_indexer.rotated_keys(indexer, params["indexer"], of_keys, first, layer.rope)
    return shared._replace(keys=whole(rotated, of_indexer.rounding(indexer)))
