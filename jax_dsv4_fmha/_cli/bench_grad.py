"""The grad suite of `bench`: the backward pass alone, which is the time of both passes less the forward one of the same
round.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from .._testing.cases import Case

FORWARD = "_forward"
"""the end of the name of a contestant that runs the forward pass alone"""


def work(c: Case, flops: float, moved: float) -> tuple[float, float]:
    """`bench.work` of the same arguments: five products in place of two; o, do and dq, and the gradients of keys."""
    rows, keys = c.b * c.s_q * c.h_q, c.b * c.h_kv * (c.s_kv + c.s_c)
    return 2.5 * flops, moved + rows * 4.0 * c.d + keys * 4.0 * c.d


def contestants(name: str, attention: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """By name: both passes of `attention`, and the forward one."""

    def both(do: jax.Array, **operands: Any) -> Any:
        floats = {n: x for n, x in operands.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        rest = {n: x for n, x in operands.items() if n not in floats}

        def o_of(floats: dict[str, Any]) -> Any:
            results = attention(**floats, **rest)
            return results[0] if isinstance(results, tuple) else results

        _, vjp = jax.vjp(o_of, floats)
        return vjp(do)

    def forward(do: jax.Array, **operands: Any) -> Any:
        return attention(**operands)

    return {name: both, name + FORWARD: forward}


def backward_alone(times: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A row's times by rounds, from those of both passes and of the forward one; the times of both passes as `both`
    names them.
    """
    alone: dict[str, dict[str, Any]] = {}
    together: dict[str, dict[str, Any]] = {}
    for name, passes in times.items():
        if (forward := times.get(name + FORWARD)) is None:
            continue
        rounds = [x - y for x, y in zip(passes["rounds"], forward["rounds"], strict=True)]
        middle = sorted(rounds)[len(rounds) // 2]
        kernels = {k: t for k, t in passes["kernels"].items() if k not in forward["kernels"]}
        alone[name] = {"seconds": middle, "rounds": rounds, "kernels": kernels}
        together[both(name)] = passes
    return alone | together


def both(name: str) -> str:
    """The name of the time of both passes: "both" for ours, "both by PEER" for a peer."""
    return "both" if name == "ours" else f"both by {name}"


def names_of_both(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Those among rows' times, ours first."""
    found = dict.fromkeys(name for times in rows for name in times if name.split(" ")[0] == both("ours"))
    return sorted(found)
