"""Launches of kernels with tensor cores, each on a named case or on many keys: ready to be made, and judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernels.abi import (
    Forward,
    IndexerScores,
    IndexerScoresAt,
    IndexerScoresWithin,
    MlaBackward,
    Probabilities,
    Variant,
)
from kernels.variants import typical

from ..machine.state import Machine
from . import attention, cases, gradients, indexer, indexer_within, long, mla_backward, native, probabilities
from .launch import Kernel, launch
from .verdict import judge

OfIndexer = IndexerScores | IndexerScoresAt | IndexerScoresWithin
Interpreted = Forward | MlaBackward | OfIndexer | Probabilities
Judge = Callable[[Machine], None]


def is_typical(v: Variant) -> bool:
    """True if it stands for those that differ from it in numbers alone: in dtype, or an indexer's heads."""
    return typical(v, ("dtype", "heads")) == v


GRADIENT = {"b": 1, "s_q": 2, "s_kv": 149, "h_q": 8, "s_kv1": 81, "topk": 133, "width": 1 << 30}  # three tiles of keys


@dataclass(frozen=True)
class Prepared:
    """A launch that can be made several times."""

    shape: str
    make: Callable[[int, bool], tuple[Machine, Judge]]  # of a seed, and whether to record

    def machine(self, seed: int = 0) -> Machine:
        """Makes a machine for a run whose answer nobody asks for."""
        return self.make(seed, False)[0]

    @staticmethod
    def of_attention(kernel: Kernel[Forward], x: attention.Operands, processors: int, known: bool = True) -> Prepared:
        """`known`: whether the operands say what the answer is."""

        def make(seed: int, record: bool) -> tuple[Machine, Judge]:
            run = launch(kernel, x, processors=processors, seed=seed, record=record)
            return run.machine, lambda machine: judge(run.results(), x, run.scale) if known else None

        return Prepared(", ".join(f"{k} {v}" for k, v in x.shape._asdict().items() if v), make)

    @staticmethod
    def of_scores(kernel: Kernel[IndexerScores], x: indexer.Problem, processors: int) -> Prepared:
        call = indexer.Call.of(kernel, x, processors)

        def make(seed: int, record: bool) -> tuple[Machine, Judge]:
            return call.scoring(seed=seed, record=record), call.judge

        return Prepared(f"queries {x.q.shape}, keys {x.k.shape}", make)

    @staticmethod
    def of_scores_at(kernel: Kernel[IndexerScoresAt], x: indexer.ProblemAt) -> Prepared:
        return _of_call(indexer.CallAt(kernel, x), f"queries {x.q.shape}, {x.indices.shape[2]} of keys {x.k.shape}")

    @staticmethod
    def of_scores_within(kernel: Kernel[IndexerScoresWithin], x: indexer_within.Problem) -> Prepared:
        return _of_call(
            indexer_within.Call(kernel, x),
            f"queries {x.keys.q.shape}, {x.blocks.shape[2]} blocks of keys {x.keys.k.shape}",
        )

    @staticmethod
    def of_probabilities(kernel: Kernel[Probabilities], x: probabilities.Problem, processors: int) -> Prepared:
        return _of_call(
            probabilities.Call(kernel, x, processors), f"queries {x.q.shape}, {x.indices.shape[2]} of keys {x.k.shape}"
        )

    @staticmethod
    def of_gradients(kernel: Kernel[MlaBackward], x: gradients.Operands, processors: int) -> Prepared:
        def make(seed: int, record: bool) -> tuple[Machine, Judge]:
            run = mla_backward.launch(kernel, x, processors=processors, seed=seed, record=record)
            return run.machine, lambda machine: mla_backward.judge(run, run.results())

        return Prepared(", ".join(f"{k} {v}" for k, v in x.attention.shape._asdict().items() if v), make)

    @staticmethod
    def case(kernel: Kernel[Any], name: str, processors: int | None) -> Prepared:
        """One of `cases.CASES`. LookupError: it is none of this kernel."""
        processors = processors or cases.PROCESSORS[name]
        if isinstance(kernel.variant, IndexerScores):
            problem = indexer.Problem.case(kernel.variant, name)
            if problem is not None:
                return Prepared.of_scores(kernel, problem, processors)
        elif isinstance(kernel.variant, IndexerScoresAt):
            at = indexer.ProblemAt.case(kernel.variant, name)
            if at is not None:
                return Prepared.of_scores_at(kernel, at)
        elif isinstance(kernel.variant, IndexerScoresWithin):
            within = indexer_within.Problem.case(kernel.variant, name)
            if within is not None:
                return Prepared.of_scores_within(kernel, within)
        elif isinstance(kernel.variant, Probabilities):
            given = probabilities.Problem.case(kernel.variant, name)
            if given is not None:
                return Prepared.of_probabilities(kernel, given, processors)
        elif isinstance(kernel.variant, MlaBackward):
            if name == "tiles":
                heads = native.heads_for(kernel.variant, GRADIENT["h_q"])
                gradient = gradients.operands(kernel.variant, **{**GRADIENT, "h_q": heads})
                return Prepared.of_gradients(kernel, gradient, processors)
        else:
            x = cases.operands(kernel.variant, kernel.facts["tile_n"], name)
            if x is not None:
                return Prepared.of_attention(kernel, x, processors)
        raise LookupError(f"there is no case {name!r} for {kernel.variant.key}")

    @staticmethod
    def long(kernel: Kernel[Any], keys: int, queries: int | None, heads: int | None, processors: int) -> Prepared:
        """Few queries that see many keys."""
        v, tile_m = kernel.variant, kernel.facts["tile_m"] * kernel.facts["cluster"]
        if isinstance(v, IndexerScores):
            problem = indexer.Problem.seen_by_all(v, queries or tile_m // v.heads, keys)
            return Prepared.of_scores(kernel, problem, processors)
        if isinstance(v, IndexerScoresAt):
            return Prepared.of_scores_at(
                kernel, indexer.ProblemAt.of(v, 1, queries or kernel.facts["ctas"], 4 * keys, keys)
            )
        if isinstance(v, IndexerScoresWithin):
            some = indexer_within.Problem.of(v, 1, queries or kernel.facts["ctas"], 4 * keys, -(-keys // 8))
            return Prepared.of_scores_within(kernel, some)
        if isinstance(v, Probabilities):
            given = probabilities.Problem.of(v, 1, queries or 1, heads or tile_m, 4 * keys, keys)
            return Prepared.of_probabilities(kernel, given, processors)
        if isinstance(v, MlaBackward):
            x = long.operands(v, tile_m, keys, queries=queries or 1, heads=heads)
            return Prepared.of_gradients(kernel, gradients.of_attention(x, v.d**-0.5), processors)
        x = long.operands(v, tile_m, keys, queries=queries, heads=heads)
        return Prepared.of_attention(kernel, x, processors, known=all(source.pool is None for source in x.sources))


def _of_call(call: indexer.CallAt | indexer_within.Call | probabilities.Call, shape: str) -> Prepared:
    return Prepared(shape, lambda seed, record: (call.machine(seed=seed, record=record), call.judge))
