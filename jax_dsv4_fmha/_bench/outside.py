"""Peers outside of XLA: packages for torch that the user built or installed, in turns with ours on the same operands.

The profiler of JAX sees every kernel that the process launches, so that one trace times XLA's programs and a peer's
calls in the same way. Operands go to torch through dlpack, without a copy, before anything is timed.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .measure import Contestant, Operands
from .row import CallRow, Row

Call = Callable[[], Any]
"""a call whose operands are ready; it queues kernels on torch's stream"""


@dataclass(frozen=True)
class Peer:
    """A package beside ours.

    Attributes:
      name: in records and tables.
      facts: what a record says of it, such as versions.
      takes: the row whose operands it takes beside a row of ours, or None where it computes no such thing.
      prepare: the call for operands of such a row.
      differs: how far its result is from ours on the same operands.
      most: the most that this may be.
    """

    name: str
    facts: dict[str, Any]
    takes: Callable[[CallRow], CallRow | None]
    prepare: Callable[[Any, Operands], Call]
    differs: Callable[[Any, Any], float]
    most: float

    def contestant(self, row: Row, inputs: Sequence[Operands], ours: Contestant | None) -> Contestant | None:
        """The package's contestant beside a row of ours; None where it computes no such thing.

        Raises:
          ValueError: its result on the operands of ours is not ours.
        """
        other = self.takes(row) if isinstance(row, CallRow) else None
        if other is None:
            return None
        calls = [self.prepare(other, x) for x in (inputs if other == row else other.inputs(len(inputs)))]
        wait = torch().cuda.synchronize
        theirs = calls[0]()  # what a first call alone does is not timed
        wait()
        facts = {}
        if ours is not None and other == row:
            facts["differs"] = difference = self.differs(theirs, ours.run(inputs[0]))
            if not difference <= self.most:
                raise ValueError(f"{self.name}: its result differs from ours by {difference:.2g}, wanted {self.most:g}")
        sets = [{"call": call} for call in calls]
        return Contestant(_call, sets, is_outside=True, wait=lambda _: wait(), facts=facts)


def _call(operands: Operands) -> Any:
    return operands["call"]()


def torch() -> Any:
    """torch, which runs every peer outside of XLA.

    Raises:
      ImportError: it is not installed, or sees no GPU.
    """
    try:
        found = importlib.import_module("torch")
    except ImportError as e:
        raise ImportError(f"torch: not found ({e}), wanted one built for CUDA: peers outside of XLA run in it") from e
    if not found.cuda.is_available():
        raise ImportError(f"torch {found.__version__}: sees no GPU, wanted one built for CUDA")
    return found


def to_torch(x: jax.Array) -> Any:
    """The same memory."""
    return torch().from_dlpack(jax.block_until_ready(x))


def from_torch(x: Any) -> jax.Array:
    return jnp.from_dlpack(x)


def require(package: ModuleType, *names: str) -> None:
    """Raises ImportError unless the package has functions of these names."""
    missing = [name for name in names if not callable(getattr(package, name, None))]
    if missing:
        at = getattr(package, "__file__", None)
        raise ImportError(f"{package.__name__} ({at}): has no {', '.join(missing)}: another version of its API")


def numbers_differ(theirs: jax.Array, ours: jax.Array) -> float:
    """The greatest difference, as a part of the greatest number of ours."""
    a, b = (x.astype(jnp.float32).reshape(-1) for x in (theirs, ours))
    return float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)))


def choices_differ(theirs: jax.Array, ours: jax.Array) -> float:
    """The part of the entries that we chose and they did not; equal scores may be chosen in either order."""
    found, wanted = (np.asarray(x).reshape(-1, x.shape[-1]) for x in (theirs, ours))
    rows = np.arange(len(wanted))[:, None]
    chosen = np.zeros((len(wanted), max(found.max(), wanted.max()) + 2), bool)  # the last column is that of absent ones
    chosen[rows, found] = True
    return float(1 - chosen[rows, wanted].mean())
