"""Public pytrees: for transforms, and for the serialization of what `jax.export` makes."""

import dataclasses
import json
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def public_pytree(kind: type[T]) -> type[T]:
    """Registers a NamedTuple, or a dataclass whose fields are arrays or, with `metadata={"static": True}`, static."""
    name: Any = f"jax_dsv4_fmha.{kind.__name__}"
    if issubclass(kind, tuple):
        jax.export.register_namedtuple_serialization(kind, serialized_name=name)
        return kind
    made: Any = jax.tree_util.register_dataclass(kind)
    fields = dataclasses.fields(made)
    data, static = (
        [x.name for x in fields if bool(x.metadata.get("static")) is is_static] for is_static in (False, True)
    )

    def with_children(aux_data: Any, children: Any) -> T:
        given = dict(zip(data, children, strict=True)) | dict(zip(static, aux_data, strict=True))
        instance: T = made(**given)
        return instance

    jax.export.register_pytree_node_serialization(
        made, serialized_name=name, serialize_auxdata=_to_bytes, deserialize_auxdata=_from_bytes,
        from_children=with_children,
    )  # fmt: skip
    found: type[T] = made
    return found


def _to_bytes(values: tuple[Any, ...]) -> bytes:
    return json.dumps([_to_json(x) for x in values]).encode()


def _from_bytes(text: bytes | bytearray) -> tuple[Any, ...]:
    return tuple(_from_json(x) for x in json.loads(bytes(text)))


def _to_json(x: Any) -> Any:
    """A frozenset as a list, a tuple as an object."""
    return sorted(x) if isinstance(x, frozenset) else {"tuple": x} if isinstance(x, tuple) else x


def _from_json(x: Any) -> Any:
    return frozenset(x) if isinstance(x, list) else tuple(x["tuple"]) if isinstance(x, dict) else x
