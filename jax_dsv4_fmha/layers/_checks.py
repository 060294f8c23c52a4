"""What a layer's parts and the operands of a call have to be, in words where they are not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import Cache, _check
from .._definitions import explicit_axes
from .._definitions.e4m3 import BF16_ROPE, PRODUCTS, ROPE
from .._definitions.packed import LAYOUTS
from . import _operands
from ._joined import JOINED
from .compressor import Compressor
from .indexer import Indexer
from .outputs import LayerCache, Shared
from .rope import Rope

if TYPE_CHECKING:
    from .attention import DSV4Attention

_OP = "DSV4Attention"


def fitting(layer: DSV4Attention) -> None:
    """Raises unless the sizes and parts of a layer fit together."""
    for name in ("hidden", "heads", "d", "q_rank", "o_groups", "o_rank", "window"):
        _check.positive(_OP, name, getattr(layer, name))
    _check.integer(_OP, "ratio", layer.ratio, 0)
    _check.epsilon(_OP, layer.eps)
    for name in ("sparse", "norm_heads", "fake_quantize"):
        _check.boolean(_OP, name, getattr(layer, name))
    _check.batch_invariant(_OP, layer.batch_invariant, None)
    _check.one_of(_OP, "products", layer.products, (None, *PRODUCTS))
    if layer.products is not None and layer.batch_invariant:
        raise _check.error(ValueError, _OP, "products", layer.products, "None with batch_invariant=True")
    if layer.heads % layer.o_groups:
        raise _check.error(ValueError, _OP, "o_groups", layer.o_groups, f"a divisor of the {layer.heads} heads")
    for name, kind in (("rope", Rope), ("compressor", Compressor | None), ("indexer", Indexer | None)):
        if not isinstance(getattr(layer, name), kind):
            raise _check.error(TypeError, _OP, name, getattr(layer, name), f"a {name.title()}")
    if layer.products == BF16_ROPE and layer.rope.dims != ROPE:
        raise _check.error(ValueError, _OP, "rope", f"{layer.rope.dims} dims", f"{ROPE} with products={BF16_ROPE!r}")
    if layer.rope.dims > layer.d:
        raise _check.error(ValueError, _OP, "rope", f"{layer.rope.dims} dims", f"at most d={layer.d}")
    own = layer.compressor
    if own is not None and (own.hidden, own.d, own.ratio) != (layer.hidden, layer.d, layer.ratio):
        got, wanted = (f"hidden={x.hidden}, d={x.d}, ratio={x.ratio}" for x in (own, layer))
        raise _check.error(ValueError, _OP, "compressor", got, wanted)
    if layer.fake_quantize:
        rounded_dims = layer.d - layer._plain
        for layout in layer._formats[: 1 + (own is not None)]:
            if rounded_dims % (group := LAYOUTS[layout].group):
                wanted = (
                    f"a multiple of {group} with fake_quantize" + f", and {layer._plain} for RoPE" * layer.norm_heads
                )
                raise _check.error(ValueError, _OP, "d", layer.d, wanted)
    if layer.sparse and not layer.ratio:
        raise _check.error(ValueError, _OP, "sparse", layer.sparse, "False with ratio 0")
    if layer.indexer is not None:
        fitting_indexer(layer, layer.indexer)


def fitting_indexer(layer: DSV4Attention, indexer: Indexer) -> None:
    """Raises unless the indexer fits the layer."""
    wanted = {"hidden": layer.hidden, "q_rank": layer.q_rank, "fake_quantize": layer.fake_quantize}
    if indexer.latent:
        wanted["latent"] = layer.d
    for name, n in wanted.items():
        if getattr(indexer, name) != n:
            raise _check.error(ValueError, _OP, f"indexer.{name}", getattr(indexer, name), str(n))
    if layer.rope.dims > indexer.d:
        raise _check.error(ValueError, _OP, "indexer.d", indexer.d, f"at least the {layer.rope.dims} dims of rope")
    if not layer.sparse:
        raise _check.error(ValueError, _OP, "sparse", layer.sparse, "True with an indexer")
    if indexer.owns_keys and layer.compressor is None:
        raise _check.error(ValueError, _OP, "compressor", None, "one with an indexer that makes keys")
    if indexer.compressor is not None and indexer.compressor.ratio != layer.ratio:
        raise _check.error(
            ValueError, _OP, "indexer.compressor.ratio", indexer.compressor.ratio, f"the layer's {layer.ratio}"
        )


def heads_of(layer: DSV4Attention, heads: str | tuple[str, ...] | None, mesh: Any) -> None:
    """Raises if a mesh, that of `jax.set_mesh` by default, cannot share out heads over these axes."""
    names, is_given = explicit_axes.names(heads), mesh is not None
    sizes = (mesh if is_given else jax.sharding.get_abstract_mesh()).shape
    if missing := [name for name in names if name not in sizes]:
        if is_given:
            raise _check.error(ValueError, _OP, "heads", ", ".join(missing), f"axes of the mesh, {', '.join(sizes)}")
        return
    devices = math.prod(sizes[name] for name in names)
    if layer.o_groups % devices:
        got = f"{layer.o_groups} for the {devices} devices of {', '.join(names)}"
        raise _check.error(ValueError, _OP, "o_groups", got, "a multiple of the devices that share the heads")


def operands(layer: DSV4Attention, params: Any, x: Any, cache: Any, shared: Any, indices: Any) -> tuple[Any, Any]:
    """Raises unless a call's operands are of this layer; (b, s)."""
    is_joined = isinstance(params, Mapping) and JOINED in params
    _operands.parameters(layer, params, "joined" if is_joined else "")
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
    if indices is not None:
        _check.operand(_OP, "indices", indices, "b s n", dims, _check.INT)
    what_is_shared(layer, shared or Shared(), x, cache, indices is not None)
    return b, s


def whole_where_needed(layer: DSV4Attention, params: Any, x: jax.Array) -> None:
    """Raises where Explicit axes of a mesh shard what has to be whole."""
    heads = explicit_axes.entries(params["wq_b"])[1]
    _operands.sharded_as(_OP, "params", params, layer.partition(heads))
    b, s, hidden = explicit_axes.entries(x)
    for name, entry in (("b", b), ("s", s), ("hidden", hidden)):
        got = explicit_axes.described(name, entry)
        if name == "hidden" and entry is not None:
            raise _check.error(ValueError, _OP, "x", got, "that axis whole: only b and s may be sharded")
        if set(explicit_axes.names(entry)) & set(explicit_axes.names(heads)):
            raise _check.error(ValueError, _OP, "x", got, "mesh axes that do not shard the parameters' heads")


def caches(layer: DSV4Attention, cache: Any, b: Any, x: jax.Array) -> None:
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
            compressor.check_state(_OP, f"cache.{name}", part, b)
            continue
        if (part is None) == (name in channels) or not isinstance(part, Cache | None):
            wanted = "a Cache" if name in channels else "None in such a layer"
            raise _check.error(TypeError, _OP, f"cache.{name}", part, wanted)
        if part is not None:
            part.check(_OP, f"cache.{name}", {"b": b, "d": channels[name]}, (x.dtype,))


def room(layer: DSV4Attention, cache: LayerCache, name: str, length: Any) -> None:
    """Raises if a length, an int or NumPy's ints, is known while tracing and its entries do not fit the cache."""
    if cache.compressed is None or not isinstance(length, int | np.integer | np.ndarray):
        return
    most = cache.compressed.capacity
    if isinstance(most, int) and int(np.max(length)) // layer.ratio > most:
        wanted = f"a sequence whose entries of {layer.ratio} tokens are at most the {most} that the cache has room for"
        raise _check.error(ValueError, _OP, name, f"{int(np.max(length))} tokens", wanted)


def what_is_shared(layer: DSV4Attention, shared: Shared, x: jax.Array, cache: LayerCache | None, chosen: bool) -> None:
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
