"""The common part of the cases of all ops: names, the random numbers that the short one determines, and a judgement."""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from .._check import Implementation
from .words import said

_USUAL: dict[str, Any] = {
    "b": 1, "s_q": 64, "s_kv": 64, "h_q": 1, "h_kv": 1, "d": 64, "dtype": "bfloat16", "shared_kv": False,
    "span": "full", "sink": "none", "window": 128, "ratio": 0, "topk": 0, "s_c": 0, "decode": False, "page": 0,
    "features": (),
}  # fmt: skip
"""All fields of cases, in the order that an id has them, and what an id leaves out."""

Judgement = tuple[bool, str]
"""whether results are right, and in which way they are or are not"""


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    """One call of one op. The id determines the operands, on every machine."""

    op: ClassVar[str]
    b: int = 1
    s_q: int = 64
    h_q: int = 1
    dtype: str = "bfloat16"

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of any op's case; one that this op does not have holds its usual value."""
        return {field: getattr(self, field, usual) for field, usual in _USUAL.items()}

    @property
    def name(self) -> str:
        """Unique, and in words."""
        return said(self.op, self.facts)

    @property
    def id(self) -> str:
        """Unique, without spaces, for pytest: the op, and everything that is not usual."""
        unusual = [_coded(field, x) for field, x in self.facts.items() if x != _USUAL[field]]
        return "-".join([self.op, *unusual])

    @property
    def has_kernel(self) -> bool:
        """True if every pass of the op can run on a kernel, so that a test may insist on it."""
        return True

    @property
    def is_small(self) -> bool:
        """Quick enough for a CPU, including the float64 loop."""
        return self.b * self.s_q * self.h_q <= 80_000 and self.work <= 2**31

    @property
    @abstractmethod
    def work(self) -> int:
        """About how many products of numbers a call takes."""

    @property
    def device_bytes(self) -> int:
        """About how many bytes of device memory `judge` takes, where that may be too many."""
        return 0

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(self.id.encode()))

    @abstractmethod
    def judge(self, implementation: Implementation) -> Judgement:
        """The kernels beside the reference in float32, or the reference beside NumPy in float64."""


def judgement(complaints: Collection[str], right: str) -> Judgement:
    """The first complaints, or else `right`."""
    return not complaints, "; ".join(list(complaints)[:3]) or right


def normal(rng: np.random.Generator, shape: tuple[int, ...], std: float, dtype: str) -> Any:
    """Normal values; a large array repeats with a prime period, which divides no row length."""
    size = min(int(np.prod(shape)), 4_194_301)
    x = (std * rng.standard_normal(size, np.float32)).astype(getattr(ml_dtypes, dtype, dtype))
    return np.resize(x, shape)


def poison(x: Any, where: Any) -> None:
    x[np.broadcast_to(where, x.shape[:2])] = np.nan


def _coded(field: str, value: Any) -> str:
    if isinstance(value, str | tuple):
        return value if isinstance(value, str) else "+".join(value)
    return field if value is True else f"{field}{value}"
