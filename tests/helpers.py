"""Helpers of several tests: operands, the comparison with the table's tolerances, collectives of a program."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsv4_fmha._testing.compare import KERNEL, compare


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def assert_right(got: Any, want: Any, tolerances: Any = KERNEL) -> None:
    """Results equal `want`, within the tolerances of `compare`."""
    for verdict in compare(got, want, tolerances):
        assert verdict.passed, verdict


def collectives(compiled: Any) -> dict[str, int]:
    """The kinds of collectives of a compiled program, and how many elements each moves."""
    kinds = "all-gather|(?:ragged-)?all-to-all|collective-permute|all-reduce|reduce-scatter|collective-broadcast"
    found: dict[str, int] = {}
    for types, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", compiled.as_text()):
        elements = sum(math.prod(map(int, n.split(","))) if n else 1 for n in re.findall(r"\[([\d,]*)\]", types))
        both = types.startswith("((")  # (operands, results), which are printed where several start at once
        found[kind] = found.get(kind, 0) + elements // (1 + both)
    return found
