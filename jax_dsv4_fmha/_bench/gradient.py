"""The suite grad: the backward pass alone, which is the time of both passes less the forward one of the same round."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from . import tables
from .attention import PromptRow, causal, layer, top_k, window
from .measure import Contestant, Operands, Times, compiled
from .row import CallRow, Row, Suite

_FORWARD = "_forward"
"""the end of the name of a contestant that runs the forward pass alone"""


@dataclass(frozen=True, kw_only=True)
class GradientRow(Row):
    attention: PromptRow

    @property
    def name(self) -> str:
        return f"gradient of {self.attention.name}"

    @property
    def flops(self) -> float:
        """Five products in place of two: three with as many columns as K has, and two with as many as V has."""
        d, d_v = self.attention.d, self.attention.d_v
        return self.attention.flops * (3 * d + 2 * d_v) / (d + d_v)

    @property
    def bytes(self) -> float:
        """The bytes of the forward pass, and those of o, do and dq, and of the gradients of keys."""
        x = self.attention
        return x.bytes + x.b * x.s_q * x.h_q * 2.0 * (x.d + x.d_v) + x.key_rows * 4.0 * x.d

    @property
    def case(self) -> dict[str, Any]:
        return self.attention.case

    @property
    def calls(self) -> set[CallRow]:
        return self.attention.calls

    def inputs(self, sets: int) -> list[Operands]:
        d_v = self.attention.d_v
        return [x | {"do": jnp.roll(x["q"], 1, axis=1)[..., :d_v]} for x in self.attention.inputs(sets)]

    def contestants(self, name: str, inputs: Sequence[Operands]) -> dict[str, Contestant]:
        """Both passes, and the forward one."""
        attention = self.attention.function(name)
        passes = {name: functools.partial(_both, attention), name + _FORWARD: functools.partial(_forward, attention)}
        return {function: compiled(function, f, inputs) for function, f in passes.items()}

    def times(self, measured: dict[str, Times], contestants: Mapping[str, Contestant]) -> dict[str, Times]:
        """The times of the backward pass by the contestants' names, and of both passes as `_name_of_both` has them."""
        alone: dict[str, Times] = {}
        passes: dict[str, Times] = {}
        for name, both in measured.items():
            if (forward := measured.get(name + _FORWARD)) is None:
                continue
            rounds = [x - y for x, y in zip(both["rounds"], forward["rounds"], strict=True)]
            middle = sorted(rounds)[len(rounds) // 2]
            kernels = {k: t for k, t in both["kernels"].items() if k not in forward["kernels"]}
            alone[name] = {"seconds": middle, "rounds": rounds, "kernels": kernels}
            passes[_name_of_both(name)] = both
        return alone | passes


def _both(attention: Callable[..., Any], do: jax.Array, **operands: Any) -> Any:
    floats = {n: x for n, x in operands.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    rest = {n: x for n, x in operands.items() if n not in floats}

    def o_of(floats: Operands) -> Any:
        results = attention(**floats, **rest)
        return results[0] if isinstance(results, tuple) else results

    _, vjp = jax.vjp(o_of, floats)
    return vjp(do)


def _forward(attention: Callable[..., Any], do: jax.Array, **operands: Any) -> Any:
    return attention(**operands)


def _name_of_both(name: str) -> str:
    """The name of the time of both passes: "both" for ours, "both by PEER" for a peer."""
    return "both" if name == "ours" else f"both by {name}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A suite's table with the times of both passes, ours first."""
    names = {name for row in rows for name in row["times"] if name.split(" ")[0] == "both"}
    return tables.table(rows, sorted(names), "us: the backward pass alone, both: the forward one too")


def _rows(peers: tuple[str, ...], *rows: PromptRow) -> list[GradientRow]:
    return [GradientRow(attention=replace(row, peers=peers), peers=peers) for row in rows]


SUITE = Suite(
    "grad",
    "#7b2d8b",
    (
        *_rows(
            ("deterministic",),
            *(layer(h, topk=k, ratio=4, s_c=s_c) for h, k in ((128, 1024), (64, 512)) for s_c in (8192, 65536)),
            layer(16, topk=512, ratio=4, s_c=8192),
            layer(128, ratio=128, s_c=512),
            *(top_k(h, 8192, 2048, d=576) for h in (128, 64, 16)),
            causal(576, 1, 4096, 128, 1),
        ),
        *_rows(
            ("xla", "deterministic"),
            *(window(512, 1, 4096, h, 1, has_sink=True) for h in (128, 64)),
            causal(512, 1, 4096, 128, 1),
        ),
        *_rows(
            ("xla",),  # deterministic already
            causal(512, 1, 8192, 32, 4),  # as in Gemma 4's global layers, which have V of their own
            causal(512, 1, 4096, 16, 2),
        ),
        *_rows(
            ("cudnn", "flash_attention_3", "deterministic"),
            causal(64, 4, 8192, 16, 16),
            causal(128, 2, 8192, 16, 16),
            *(causal(d, 1, 8192, 64, 8) for d in (64, 128)),
        ),
        *_rows(
            ("flash_attention_3", "deterministic"),  # jax.nn has no segments
            causal(64, 1, 8192, 64, 8, segments=8, has_sink=True),
        ),
        *_rows(
            ("cudnn", "flash_attention_3"),  # our gradients are deterministic already
            causal(256, 2, 8192, 8, 1),
            window(128, 2, 8192, 16, 1),
            window(64, 2, 8192, 64, 8, has_sink=True),
            causal(128, 64, 128, 16, 16),
        ),
    ),
    table,
)
