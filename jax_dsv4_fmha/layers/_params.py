"""The matrices that multiply x: each alone, or side by side in one. Only this file knows that params have two forms."""

import functools
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._definitions.packed_matrix import PackedMatrix
from .._definitions.slabs import BLOCK, TILE
from . import _operands
from ._few_rows import Matrix, array_of
from ._operands import JOINED
from ._shape import LayerShape


class Columns(NamedTuple):
    """A matrix: some columns of an array."""

    array: Matrix
    """`[hidden, columns]`"""
    first: int
    width: int


def of_x(layer: LayerShape, params: Any) -> dict[str, Columns]:
    """The matrices that a step multiplies x with, by their names."""
    if JOINED not in params:
        return {name: Columns(_leaf(params, name), 0, width) for name, width in widths(layer).items()}
    found, first = {}, 0
    for name, width in widths(layer).items():
        found[name] = Columns(params[JOINED], first, width)
        first += width
    return found


def joined(layer: LayerShape, params: Any) -> dict[str, Any]:
    """These parameters with the matrices that multiply x side by side in one array.

    One array is one product. It is packed if all matrices are, and are whole blocks: those of a layer without
    compressor, which is never packed. Else packed ones are unpacked, to the dtype of the others, or to bfloat16, which
    has all their numbers.
    """
    found = [_leaf(params, name) for name in widths(layer)]
    return {**_without(widths(layer), params), JOINED: _side_by_side(found)}


def _side_by_side(found: list[Matrix]) -> Matrix:
    packed = [w for w in found if isinstance(w, PackedMatrix)]
    if len(packed) == len(found) and not any(w.rows % BLOCK for w in packed):
        rows, columns = sum(w.rows for w in packed), packed[0].columns
        return PackedMatrix(jnp.concatenate([w.data for w in packed], 0), rows, columns, (columns, rows))
    dtype = next((w.dtype for w in found if not isinstance(w, PackedMatrix)), jnp.bfloat16)
    return jnp.concatenate([array_of(w, dtype) for w in found], 1)


def _columns(w: Matrix, first: int, width: int) -> Matrix:
    """So many columns of a matrix; of a packed one, whole blocks."""
    if isinstance(w, PackedMatrix):
        data = jax.lax.slice_in_dim(w.data, first // TILE, (first + width) // TILE, axis=0)
        return PackedMatrix(data, width, w.columns, (w.columns, width))
    return jax.lax.slice_in_dim(w, first, first + width, axis=1)


def separate(layer: LayerShape, params: Any) -> Any:
    """These parameters as `init` makes them, whether they are joined or not."""
    if JOINED not in params:
        return params
    found = jax.tree.map(lambda x: x, {name: x for name, x in params.items() if name != JOINED})
    for name, (array, first, width) in of_x(layer, params).items():
        *path, last = name.split(".")
        _leaf(found, path)[last] = _columns(array, first, width)
    return found


def check(layer: LayerShape, params: Any) -> None:
    """Raises unless params are of this layer, in either form."""
    is_joined = isinstance(params, Mapping) and JOINED in params
    _operands.agree(type(layer).__name__, "params", params, (_shapes_joined if is_joined else _operands.shapes)(layer))


@functools.cache
def _shapes_joined(layer: LayerShape) -> Any:
    return jax.eval_shape(functools.partial(joined, layer), _operands.shapes(layer))


def widths(layer: LayerShape) -> dict[str, int]:
    """Returns the columns of each of these matrices, in the order in which they are joined."""
    found = {"wq_a": layer.q_rank, "wkv": layer.d}
    keys = layer.indexer
    if layer.compressor is not None and not (keys is not None and keys.latent):
        found["compressor.w"] = layer.compressor.width
    if keys is not None:
        if keys.compressor is not None:
            found["indexer.compressor.w"] = keys.compressor.width
        found["indexer.weights_proj"] = keys.heads
    return found


def _leaf(params: Any, name: str | list[str]) -> Any:
    return functools.reduce(operator.getitem, name.split(".") if isinstance(name, str) else name, params)


def _without(names: Mapping[str, int], params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    return {
        name: _without(names, x, f"{prefix}{name}.") if isinstance(x, Mapping) else x
        for name, x in params.items()
        if prefix + name not in names
    }
