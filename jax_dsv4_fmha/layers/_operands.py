"""Checks that a layer and its parts share: of their parameters, and of hidden states."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .. import _check
from .._definitions import explicit_axes
from .._definitions.packed_matrix import PackedMatrix
from .._definitions.slabs import BLOCK, SLAB, SLAB_BYTES, TILE

IN_FLOAT32 = ("norm", "sink", "ape", "k_norm", "k_bias", "q_norm", "kv_norm")
"""names of parameters that are in float32 whatever dtype the matrices have"""
PACKED = {"wq_a": (0, 1), "wkv": (0, 1), "wq_b": (0, 1), "wo_a": (1, 3), "wo_b": (0, 2)}
"""matrices that may be packed, the indexer's among them: where the axes of their columns begin, and where they end"""
JOINED = "wx"
"""the matrices that multiply x side by side, packed if all of them are"""
_AXES = PACKED | {JOINED: (0, 1)}


@functools.cache
def shapes(part: Any) -> dict[str, Any]:
    """Shapes of the parameters that `part.init` makes."""
    found: dict[str, Any] = jax.eval_shape(lambda: part.init(jax.random.key(0)))
    return found


def with_matrices_in(params: Any, dtype: Any) -> Any:
    """These parameters with their matrices in dtype, and all others in float32."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x.astype(jnp.float32 if path[-1].key in IN_FLOAT32 else dtype), params
    )


def parameters(part: Any, params: Any, packed: bool = True) -> None:
    """Raises unless params have the names and shapes of those that `part.init` makes, and are floats or packed."""
    agree(type(part).__name__, "params", params, shapes(part), packed)


def agree(op: str, name: str, got: Any, wanted: Any, packed: bool = True) -> None:
    """Raises unless these are floats with the wanted names and shapes, or, if they may be, packed matrices of these."""
    if packed and isinstance(got, PackedMatrix) and name.rpartition(".")[2] in _AXES:
        _agree_packed(op, name, got, wanted.shape)
        return
    if not isinstance(wanted, Mapping):
        shape = f"floats{list(wanted.shape)}" + _as_torch_has_it(got, wanted.shape)
        _check.array(op, name, got, shape, lambda x: x.shape == wanted.shape and jnp.issubdtype(x.dtype, jnp.floating))
        return
    if not isinstance(got, Mapping):
        raise _check.error(TypeError, op, name, got, f"a dict of {', '.join(wanted)}, as `init` makes it")
    missing = [key for key in wanted if key not in got]
    surplus = [str(key) for key in got if key not in wanted]
    if missing or surplus:
        found = [f"no {', '.join(missing)}"] * bool(missing) + [f"{', '.join(surplus)} too"] * bool(surplus)
        raise _check.error(ValueError, op, name, " and ".join(found), "what `init` makes")
    for key in wanted:
        agree(op, f"{name}.{key}", got[key], wanted[key], packed)


def _agree_packed(op: str, name: str, got: PackedMatrix, shape: tuple[int, ...]) -> None:
    several, rows, columns = extents(name, shape)
    if (got.shape, got.rows, got.columns) != (shape, rows, columns):
        found = f"a PackedMatrix{list(got.shape)} of {got.rows} rows and {got.columns} columns"
        wanted = f"one of {rows} rows and {columns} columns, for {list(shape)}: the shape is `pack_matrix`'s to be told"
        raise _check.error(ValueError, op, name, found, wanted)
    packed_data(op, name, got, *several)


def packed_data(op: str, name: str, got: PackedMatrix, *several: int) -> None:
    """Raises unless the data are those of so many matrices of its rows and columns."""
    rows, columns = got.rows, got.columns
    of_data = *several, -(-rows // BLOCK) * BLOCK // TILE, -(-columns // BLOCK) * BLOCK // SLAB, SLAB_BYTES
    fits = lambda x: x.shape == of_data and x.dtype == jnp.uint8  # noqa: E731
    _check.array(op, f"{name}.data", got.data, f"uint8{list(of_data)}", fits)


def extents(name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
    """The axes of several matrices, and the rows and columns of each, where one that may be packed has this shape."""
    first, last = _AXES[name.rpartition(".")[2]]
    return shape[:first], math.prod(shape[last:]), math.prod(shape[first:last])


def packed_spec(name: str, spec: PartitionSpec) -> PartitionSpec:
    """The PartitionSpec of a packed matrix's data, where the matrix has this one."""
    first, last = _AXES[name.rpartition(".")[2]]
    padded = (*spec, *[None] * (last + 1 - len(spec)))
    return PartitionSpec(*padded[:first], padded[last], padded[first], None)


def of_form(params: Any, specs: dict[str, Any]) -> dict[str, Any]:
    """The PartitionSpecs of the parameters that `init` makes, for these, which may be `joined`: the matrix is whole."""
    if not isinstance(params, Mapping) or JOINED not in params:
        return specs

    def those(params: Any, specs: Any) -> Any:
        if not isinstance(specs, Mapping) or not isinstance(params, Mapping):
            return specs
        return {key: those(params[key], spec) for key, spec in specs.items() if key in params}

    return {**those(params, specs), JOINED: PartitionSpec()}


def of_data(op: str, name: str, params: Any, specs: Mapping[str, Any]) -> dict[str, Any]:
    """The PartitionSpecs of parameters, or of their shapes; where one is packed, that of its data."""
    if not isinstance(params, Mapping) or params.keys() != specs.keys():
        got = ", ".join(map(str, params)) if isinstance(params, Mapping) else params
        raise _check.error(TypeError, op, name, got, f"a dict of {', '.join(specs)}, as `init` makes it")
    found = dict[str, Any]()
    for key, spec in specs.items():
        if isinstance(spec, Mapping):
            found[key] = of_data(op, f"{name}.{key}", params[key], spec)
        else:
            found[key] = packed_spec(key, spec) if isinstance(params[key], PackedMatrix) else spec
    return found


def _as_torch_has_it(got: Any, wanted: tuple[int, ...]) -> str:
    """Returns the end of an error about a matrix whose shape shows that it is [out, in]."""
    shape = getattr(got, "shape", ())
    is_matrix = len(shape) == 2 and math.prod(shape) == math.prod(wanted) and shape != wanted
    turned = is_matrix and (len(wanted) > 2 or shape == wanted[::-1])
    return "; it is [out, in], as torch has it: `from_state_dict` turns and reshapes matrices" * turned


def sharded_as(op: str, name: str, params: Any, specs: Any) -> None:
    """Raises unless Explicit axes of a mesh shard params as the PartitionSpecs say, and no others."""
    if isinstance(params, Mapping):
        for key in params:
            sharded_as(op, f"{name}.{key}", params[key], specs.get(key, PartitionSpec()))
        return
    if isinstance(params, PackedMatrix):
        name, params, specs = f"{name}.data", params.data, packed_spec(name, specs)
    found = explicit_axes.entries(params)
    wanted = (*specs, *[None] * (len(found) - len(specs)))
    if found != wanted:
        got = f"it sharded as {PartitionSpec(*found)}"
        raise _check.error(ValueError, op, name, got, f"{PartitionSpec(*wanted)}, as `partition` says")


def hidden(
    op: str, name: str, x: Any, last: int, first: tuple[Any, ...] = (None, None), dtype: Any = None
) -> jax.Array:
    """x `[b, s, last]` as an array of floats; `first` has b and s where they must be some number. Both may be 0. dtype:
    the one that x must have; None is any.
    """
    dtypes = _check.FLOAT if dtype is None else (dtype,)

    def fits(x: Any) -> bool:
        there = x.dtype in dtypes and x.ndim == 3 and x.shape[2] == last
        return there and all(n is None or n == m for n, m in zip(first, x.shape, strict=False))

    sizes = [letter if n is None else f"{letter}={n}" for letter, n in zip("bs", first, strict=True)]
    return _check.array(op, name, x, f"{' or '.join(map(str, dtypes))}[{', '.join([*sizes, str(last)])}]", fits)


def positions(op: str, name: str, x: Any, b: Any, s: Any) -> jax.Array:
    """int32 `[b or 1, s]`."""
    wanted = f"int32[b={b} or 1, s={s}]" if b != 1 else f"int32[1, s={s}]"
    return _check.array(
        op,
        name,
        x,
        wanted,
        lambda x: x.dtype in _check.INT and x.ndim == 2 and x.shape[0] in (1, b) and x.shape[1] == s,
    )
