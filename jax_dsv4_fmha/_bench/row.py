"""The rows that a suite is made of: each says what is timed, on which operands, and how much work it is."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import jax

from . import tables
from .measure import Contestant, Operands, Times, compiled

_CACHE_BYTES = 2**28  # bytes of inputs altogether, so that the cache does not hold them


@dataclass(frozen=True, kw_only=True)
class Row(ABC):
    """A line of a table, which times ours and peers beside it. Rows that differ only in their peers are equal."""

    kernels_named_by: ClassVar[str | None] = None
    """what the profile says of a kernel, in place of its name"""

    peers: tuple[str, ...] = field(default=(), compare=False)

    @property
    @abstractmethod
    def name(self) -> str:
        """Unique among all rows."""

    @property
    @abstractmethod
    def flops(self) -> float:
        """The operations of a call, on visible keys."""

    @property
    @abstractmethod
    def bytes(self) -> float:
        """The bytes moved if each operand is read once and each result written once."""

    op: ClassVar[str]

    @property
    def case(self) -> dict[str, Any]:
        """The op and sizes that a record has."""
        return {"op": self.op, **{name: x for name, x in asdict(self).items() if name != "peers"}}

    @property
    def calls(self) -> "set[CallRow]":
        """The rows whose operands this one draws."""
        return set()

    @property
    def sets(self) -> int:
        """The number of sets of operands that contestants take in turn."""
        return max(2, min(16, int(_CACHE_BYTES // self.bytes)))

    @abstractmethod
    def inputs(self, sets: int) -> list[Operands]:
        """So many sets of operands."""

    @abstractmethod
    def contestants(self, name: str, inputs: Sequence[Operands]) -> dict[str, Contestant]:
        """The functions to time for "ours" or for a peer, by the names that the profiler gets."""

    def times(self, measured: dict[str, Times], contestants: Mapping[str, Contestant]) -> dict[str, Times]:
        """The times to record, made of those that were measured of the contestants."""
        return measured


@dataclass(frozen=True, kw_only=True)
class CallRow(Row):
    """One call of an op."""

    @abstractmethod
    def operands(self, key: jax.Array) -> Operands:
        """A set of operands, by name."""

    @abstractmethod
    def ours(self, **operands: Any) -> Any:
        """Our call; the peers "batch_invariant" and "deterministic" are it with that argument."""

    def peer(self, name: str, **operands: Any) -> Any:
        """A peer's call."""
        raise NotImplementedError(f"{self.op}: no peer {name}")

    def of(self, name: str) -> "CallRow":
        """The row whose operands a contestant takes: a peer with another row is our call on that row."""
        return self

    def function(self, name: str) -> Callable[..., Any]:
        """The function that a contestant runs."""
        row = self.of(name)
        if name in _ARGUMENTS:
            return functools.partial(row.ours, **{name: True})
        return row.ours if name == "ours" or row != self else functools.partial(self.peer, name)

    @property
    def calls(self) -> "set[CallRow]":
        return {self.of(name) for name in ("ours", *self.peers)}

    def inputs(self, sets: int) -> list[Operands]:
        make = maker(self)
        return [make(key) for key in jax.random.split(jax.random.key(0), sets)]

    def contestants(self, name: str, inputs: Sequence[Operands]) -> dict[str, Contestant]:
        row = self.of(name)
        sets = inputs if row == self else row.inputs(len(inputs))
        return {name: compiled(name, self.function(name), sets)}


_ARGUMENTS = ("batch_invariant", "deterministic")
"""of our calls, by which they are peers of themselves"""


@functools.cache
def maker(row: CallRow) -> Callable[[jax.Array], Operands]:
    """The compiled program that makes a row's operands from a key."""
    return jax.jit(row.operands).lower(jax.random.key(0)).compile()


@dataclass(frozen=True)
class Suite:
    """Rows under one name, and how a table and a picture show their records."""

    name: str
    color: str
    rows: tuple[Row, ...]
    table: Callable[[Sequence[dict[str, Any]]], str] = tables.table
