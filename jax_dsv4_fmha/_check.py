"""Operands -> one form of error: "op: operand: got …, wanted …", raised while the call is traced.

ValueError: a shape, a dtype or a value that the op does not mean. NotImplementedError: it has a meaning, but no kernel
or no implementation. TypeError: not an array, a number or a Span at all.
"""

import dataclasses
import math
import numbers
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

INT = (jnp.dtype(jnp.int32),)
FP32 = (jnp.dtype(jnp.float32),)
FLOAT = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32))

Implementation = Literal["cubin", "reference"]

_TINY, _MAX = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def error(kind: type[Exception], op: str, name: str, got: Any, wanted: str) -> Exception:
    """Makes an error in the one form; the caller raises it."""
    return kind(f"{op}: {name}: got {describe(got)}, wanted {wanted}")


def describe(x: Any) -> str:
    if isinstance(x, str):
        return x
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype}[{', '.join(map(str, x.shape))}]"
    if dataclasses.is_dataclass(x) and not isinstance(x, type):  # of arrays
        return f"a {type(x).__name__}"
    text = " ".join(repr(x).split())
    return text if len(text) <= 60 else f"{type(x).__name__} {text[:57]}..."


def operand(
    op: str,
    name: str,
    x: Any,
    shape: str,
    dims: dict[str, Any],
    dtypes: tuple[Any, ...],
    first: str = "q",
) -> jax.Array:
    """`x` as an array of `shape`, as in "b s_q h_q d".

    A dimension in `dims` must agree with it; any other is entered there. None may be 0. `first` names the operand that
    entered s_q and h_q, for the error of one that would fit if these two changed places.
    """
    names = shape.split()
    wanted = _wanted(names, dims, dtypes)
    _an_array(op, name, x, wanted)
    if getattr(x, "dtype", None) not in dtypes:  # before JAX sees it: JAX would narrow a 64-bit type silently
        raise error(ValueError, op, name, x, wanted)
    array = jnp.asarray(x)
    if may_be_empty := [n for n in array.shape if not _is_decided(n)]:
        least = f"{wanted}: give jax.export.symbolic_shape a constraint by which {may_be_empty[0]} is not 0"
        raise error(ValueError, op, name, array, f"{least}, such as ['s >= 4'] for s // 4")
    if not _fits(array.shape, names, dims):
        turned = dims | {"s_q": dims["h_q"], "h_q": dims["s_q"]} if {"s_q", "h_q"} <= dims.keys() else dims
        raise error(ValueError, op, name, array, wanted + _heads_first(first) * _fits(array.shape, names, turned))
    if any(isinstance(n, int) and n >= 2**31 for n in array.shape):
        raise error(ValueError, op, name, array, f"{wanted}, each < 2**31")
    dims.update(zip(names, array.shape, strict=True))
    return array


def _is_decided(n: Any) -> bool:
    """True if it is known whether a dimension is 0; it is not for some that `jax.export` leaves open."""
    try:
        return isinstance(n >= 1, bool)
    except jax.errors.InconclusiveDimensionOperation:
        return False


def _fits(shape: tuple[Any, ...], names: list[str], dims: Mapping[str, Any]) -> bool:
    return len(shape) == len(names) and all(n == dims.get(d, n) and n >= 1 for d, n in zip(names, shape, strict=True))


def _heads_first(name: str) -> str:
    return f"; it would fit if {name} were [b, h_q, s_q, d], and {name} is to be [b, s_q, h_q, d]"


def array(op: str, name: str, x: Any, wanted: str, fits: Callable[[Any], bool]) -> jax.Array:
    """`x` as an array; `fits` judges its shape and dtype, and `wanted` says in words what it accepts."""
    _an_array(op, name, x, wanted)
    if not fits(x):
        raise error(ValueError, op, name, x, wanted)
    return jnp.asarray(x)


def _an_array(op: str, name: str, x: Any, wanted: str) -> None:
    if not (isinstance(x, jax.Array | np.ndarray) or hasattr(x, "__jax_array__")):
        raise error(TypeError, op, name, x, wanted)
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted():
        raise error(ValueError, op, name, f"{describe(x)} whose buffer was donated or deleted", wanted)


def _wanted(names: list[str], dims: Mapping[str, Any], dtypes: tuple[Any, ...]) -> str:
    sizes = ", ".join(f"{n}={dims[n]}" if n in dims else n for n in names)
    return f"{' or '.join(str(t) for t in dtypes)}[{sizes}]" + ("" if sizes.count("=") == len(names) else ", each >= 1")


def heads(op: str, h_q: Any, h_kv: Any, s_q: Any, s_kv: Any, names: tuple[str, str] = ("q", "k")) -> None:
    """Checks that q's heads are a multiple of k's; `names` are the caller's names of q and k."""
    if h_q % h_kv != 0:
        heads_first = h_q > s_q and (s_q % s_kv == 0 or s_q % h_kv == 0)
        wanted = f"a multiple of the {h_kv} heads of {names[1]}" + _heads_first(names[0]) * heads_first
        raise error(ValueError, op, names[0], f"{h_q} heads of {s_q} queries", wanted)


def sink(op: str, x: Any, dims: dict[str, Any], first: str = "q") -> jax.Array | None:
    return None if x is None else operand(op, "sink", x, "h_q", dims, FP32, first)


def selection(op: str, indices: Any, dims: dict[str, Any]) -> jax.Array | None:
    """indices int32 `[b, s_q, topk]`, or None."""
    if indices is None:
        return None
    wanted = f"int32[b={dims['b']}, s_q={dims['s_q']}, topk]"
    if getattr(indices, "shape", None) == (dims["b"], dims["s_q"], 0):  # of an indexer with nothing to choose from
        return array(op, "indices", indices, wanted, lambda x: x.dtype in INT)
    return operand(op, "indices", indices, "b s_q topk", dims, INT)


def ratio(op: str, name: str, keys: Any, indices: Any, x: Any, also: str = "") -> Any:
    """The ratio, or None. Compressed keys need a rule that says which of them are seen; without keys there is no rule
    to check. also: what else than an int may say it, for errors; the caller has taken it out of x.

    Without keys a ratio of 0 means None: configs write it for a layer with a window alone.
    """
    if keys is None:
        x = None if type(x) is int and x == 0 else x
        for of_keys, given in (("indices", indices), ("ratio", x)):
            if given is not None:
                raise error(ValueError, op, of_keys, given, f"None without {name}")
    elif indices is None and x is None:
        raise error(ValueError, op, "ratio", x, f"an int >= 1{also}, or indices, with {name}")
    return None if x is None else positive(op, "ratio", x, also)


def scale(op: str, x: Any, d: int) -> float:
    """A number that fp32 holds and that is above 0, known while tracing; d**-0.5 where none was given."""
    if x is None:
        return 1 / math.sqrt(d)
    return number(op, "scale", x, "a finite fp32 number > 0", lambda x: _TINY <= x <= _MAX)


def positive(op: str, name: str, x: Any, also: str = "") -> Any:
    """An int >= 1, or a dimension that `jax.export` leaves open; also: what else the caller takes, for errors."""
    return integer(op, name, x, 1, also)


def integer(op: str, name: str, x: Any, least: int, also: str = "") -> Any:
    """An int >= least, or a dimension that `jax.export` leaves open; also: as in `positive`."""
    wanted = f"an int >= {least}, known while tracing{also}"
    if jax.export.is_symbolic_dim(x):
        return x
    try:
        n = operator.index(x)
    except (TypeError, jax.errors.JAXTypeError) as e:
        raise error(TypeError, op, name, x, wanted + _but_a_str(x)) from e
    if isinstance(x, bool) or not least <= n < 2**31:
        raise error(ValueError, op, name, x, wanted + "; at most 2**31 - 1" * (n >= 2**31))
    return n


def index(op: str, name: str, x: Any, n: Any) -> jax.Array | int:
    """A number of one of n things: an int, or an int32 scalar, whose value is checked where it is known."""
    x = narrow(x)
    wanted = f"an int, or an int32 scalar, of 0 to {n - 1}" if isinstance(n, int) else "an int or an int32 scalar"
    is_array = getattr(x, "shape", None) == () and not isinstance(x, np.generic)
    if not is_array and (isinstance(x, bool) or not isinstance(x, int | np.integer)):
        raise error(TypeError, op, name, x, wanted + _but_a_str(x))
    if is_array and x.dtype not in INT:
        raise error(ValueError, op, name, x, wanted)
    is_known = not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)
    if is_known and isinstance(n, int) and not 0 <= int(x) < n:
        raise error(ValueError, op, name, int(x), wanted)
    return x if is_array else int(x)


def d_v(op: str, x: Any, d: Any, v: Any = None) -> int | None:
    """The number of K's numbers that are V, an int of 1 to d; None for all. v: the caller's V, which is then None."""
    if x is None:
        return None
    n: int = integer(op, "d_v", x, 1)
    if v is not None:
        raise error(ValueError, op, "d_v", n, "None with v: V is as wide as v is")
    if not n <= d:
        raise error(ValueError, op, "d_v", n, f"an int of 1 to d={d}: V is the first d_v numbers of K")
    return None if n == d else n


def number(op: str, name: str, x: Any, wanted: str, fits: Callable[[float], bool]) -> float:
    """A finite number that fits, known while tracing; `wanted` says in words which ones do."""
    wanted += ", known while tracing"
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise error(TypeError, op, name, x, wanted + _but_a_str(x))
    try:
        value = float(x)
    except OverflowError:  # an int without end
        value = math.inf
    if not (math.isfinite(value) and fits(value)):
        raise error(ValueError, op, name, x, wanted)
    return value


def _but_a_str(x: Any) -> str:
    """The end of an error for a number that came as text, which looks like one."""
    return f"; {x!r} is a str" if isinstance(x, str) else ""


def epsilon(op: str, x: Any) -> None:
    """Raises unless x is a norm's epsilon."""
    number(op, "eps", x, "a finite number >= 0", lambda x: x >= 0)


def dtype(op: str, name: str, x: Any, dtypes: Collection[Any], wanted: str) -> Any:
    """`x` as one of these dtypes; `wanted` says in words which they are."""
    try:
        found = None if x is None else jnp.dtype(x)
    except (TypeError, ValueError) as e:
        raise error(TypeError, op, name, x, wanted) from e
    if found not in dtypes:
        raise error(ValueError, op, name, x if found is None else found.name, wanted)
    return found


def offset(op: str, name: str, x: Any, dims: dict[str, Any]) -> jax.Array:
    """An int, a dimension that `jax.export` leaves open, an int32 scalar or int32 [b], as int32 [1] or [b]."""
    if isinstance(x, int | np.integer) and not isinstance(x, bool):
        if not -(2**31) <= x < 2**31:
            raise error(ValueError, op, name, x, "an int32")
        return jnp.full((1,), x, jnp.int32)
    x = narrow(x)
    if getattr(x, "shape", None) == () and x.dtype in INT:
        return jnp.asarray(x)[None]
    if not hasattr(x, "shape"):
        raise error(TypeError, op, name, x, "an int, an int32 scalar or " + _wanted(["b"], dims, INT))
    return operand(op, name, x, "b", dims, INT)


def narrow(x: Any) -> Any:
    """Makes int32 of a value that stands for an int: a dimension that `jax.export` leaves open, or one that `jax.jit`
    made 64 bits wide. Any other value stays unchanged.
    """
    if jax.export.is_symbolic_dim(x) or (getattr(x, "weak_type", False) and x.dtype == jnp.int64):
        return jnp.clip(x, -(2**31), 2**31 - 1).astype(jnp.int32)
    return x


def one_of(op: str, name: str, x: Any, choices: tuple[str | None, ...]) -> None:
    if not any(x is c or (isinstance(x, str) and x == c) for c in choices):
        raise error(ValueError, op, name, repr(x), " or ".join(map(repr, choices)))


def implementation(op: str, x: Any) -> None:
    one_of(op, "implementation", x, (None, *get_args(Implementation)))


def flags(op: str, **options: Any) -> None:
    """Raises unless all of these options, by name, are bools."""
    for name, x in options.items():
        if not isinstance(x, bool | np.bool):
            raise error(TypeError, op, name, x, "a bool, known while tracing" + _but_a_str(x))


def batch_invariant(op: str, x: Any, implementation: Any) -> None:
    """Raises where the reference is to have the bits of a kernel's order."""
    flags(op, batch_invariant=x)
    if x and implementation == "reference":
        wanted = "False, or another implementation: XLA chooses the reference's order of sums"
        raise error(NotImplementedError, op, "batch_invariant", "True with implementation='reference'", wanted)
