"""Drivers that call the classes of each family, with operands and what is wanted of them."""

from __future__ import annotations

import importlib.util
import math
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from ...cute.launches import Role
from ...cute.record import placed
from ...machine.state import Array

OPERAND, RESULT, BOTH = Role.OPERAND, Role.RESULT, Role.BOTH
TYPES: dict[str, DTypeLike] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float16": np.float16,
    "float32": np.float32,
}


@dataclass
class Case:
    """A function of somebody's, with what it is compiled for and called with."""

    function: Any
    args: Sequence[Any]
    arrays: Mapping[str, tuple[Array, Role]]
    wanted: Mapping[str, Array]  # float64, by the name of an array
    tolerance: float  # of the greatest number that is wanted
    static: Sequence[tuple[int, Any]] = ()  # arguments that only the compiler gets, by their place
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: str = ""
    compiler: Any = None  # another form of cute.compile

    @property
    def compile_args(self) -> list[Any]:
        args = list(self.args)
        for place, value in self.static:
            args.insert(place, value)
        return args


def folder(package: str) -> Path:
    """Returns where an installed package lies, without an import of it; raises ModuleNotFoundError if there is none."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed; `make test-witnesses` installs it")
    return Path(found.submodule_search_locations[0])


def bare(package: str, path: Path) -> None:
    """Makes a package's modules importable without what its own __init__ wants."""
    module = sys.modules[package] = types.ModuleType(package)
    module.__path__ = [str(path)]


def module_at(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"witness_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def example(path: str) -> Any:
    """One of CUTLASS's examples for CuTe DSL, as a module."""
    examples = folder("flashinfer") / "data/cutlass/examples/python/CuTeDSL"
    if str(examples) not in sys.path:
        sys.path.append(str(examples))
    return module_at(examples / path)


def normal(*shape: int, scale: float = 1.0, dtype: DTypeLike = ml_dtypes.bfloat16, seed: int = 1) -> Array:
    return placed((scale * np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(dtype))


def attention(q: Array, k: Array, v: Array, scale: float, visible: Array | None = None) -> tuple[Array, Array, Array]:
    """float64 (o [b, s, h, d_v], lse [b, h, s], logits [b, h, s_q, s_kv]) of q [b, s, h, d]; fewer heads of k, v do for
    several."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if visible is not None:
        logits = np.where(visible, logits, -math.inf)
    lse = np.logaddexp.reduce(logits, -1)
    return np.einsum("bhqk,bkhd->bqhd", np.exp(logits - lse[..., None]), v), lse, logits


def causal(s_q: int, s_kv: int) -> Array:
    """The last query sees all keys."""
    return np.tri(s_q, s_kv, s_kv - s_q, dtype=bool)
