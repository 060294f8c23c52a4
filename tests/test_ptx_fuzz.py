"""Random shapes, spans, absent indices and splits for attention's kernels, run by the interpreter.

`pytest -m fuzz` looks for failures (docs/verification.md). KEPT holds the ones it found, and every test run tries them.
"""

import functools
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interpreter.kernels import attention, gradients, mla_backward, native
from interpreter.kernels.launch import Kernel, combine, launch
from interpreter.kernels.verdict import judge
from interpreter.machine import scheduler
from kernels.abi import Combine, Forward, MlaBackward

ATTENTION = [v.key for family in (Forward, MlaBackward) for v in native.built(family)]
COMBINE = {(v.arch, v.dtype): v.key for v in native.built(Combine)}


@dataclass(frozen=True)
class Case:
    """A launch. `width` is that of `attention.operands`; `seed` decides the operands and the order of events."""

    key: str
    b: int = 1
    s_q: int = 1
    s_kv: int = 1
    h_q: int = 1
    h_kv: int = 1
    s_kv1: int = 1
    topk: int = 1
    width: int | None = None
    splits: int = 1
    processors: int = 1
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.key}-{self.seed}"

    def extents(self) -> dict[str, Any]:
        return {name: x for name, x in asdict(self).items() if name not in ("key", "splits", "processors")}


KEPT = [
    # whole tiles and a part of one, in four splits, some of which are empty
    Case("mha_fwd_sm_90a_d64_bfloat16", b=2, s_q=5, s_kv=290, h_q=6, h_kv=2, splits=4, processors=2, seed=1),
    Case("mla_sparse_fwd_sm_90a_d512_bfloat16_h8", s_q=3, s_kv=70, h_q=3, topk=131, splits=2, seed=2),
    Case("mla_span_bwd_sm_90a_d512_bfloat16", b=2, s_q=5, s_kv=70, h_q=3, processors=2, seed=3),
    Case("csa_bwd_sm_90a_d512_bfloat16", s_q=2, s_kv=66, h_q=3, s_kv1=9, topk=67, seed=4),
    # few rows that see whole tiles, whose scores are not masked: scores of rows that no query has were undefined
    Case("mha_fwd_sm_90a_d64_bfloat16", b=2, s_q=1, s_kv=217, h_q=4, seed=7),
    Case("mha_fwd_sm_90a_d256_bfloat16", s_q=4, s_kv=168, h_q=42, h_kv=3, seed=557),
]


@functools.cache
def kernel(key: str) -> Kernel:
    return Kernel.of(native.variant_of(key))


def check(case: Case) -> None:
    if native.variant_of(case.key).key not in ATTENTION:
        pytest.skip(f"{case.key} is not built")
    k, extents = kernel(case.key), case.extents()
    if isinstance(k.variant, MlaBackward):
        gradient = mla_backward.launch(
            k, gradients.operands(k.variant, **extents), processors=case.processors, seed=case.seed
        )
        mla_backward.judge(gradient, gradient.run())
        return
    x = attention.operands(k.variant, **extents)
    run = launch(k, x, splits=case.splits, processors=case.processors, seed=case.seed)
    scheduler.run(run.machine)
    if case.splits > 1:
        run = combine(kernel(COMBINE[k.variant.arch, k.variant.dtype]), run, seed=case.seed)
        scheduler.run(run.machine)
    judge(run.results(), x, run.scale)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    key = draw(st.sampled_from(ATTENTION))
    variant = kernel(key).variant
    is_forward, splits = isinstance(variant, Forward), isinstance(variant, Forward) and variant.splits
    heads = draw(st.integers(1, 72))
    h_kv = draw(st.sampled_from([1, 1, 2, 3])) if is_forward and variant.sources == ("span",) else 1
    h_q = native.heads_for(variant, heads) if is_forward else heads
    h_q = max(h_q // h_kv, 1) * h_kv
    return Case(
        key,
        b=draw(st.integers(1, 3)),
        s_q=draw(st.integers(1, max(1, min(40, (200 if variant.d < 512 else 96) // h_q)))),
        s_kv=draw(st.integers(1, 330)),
        h_q=h_q,
        h_kv=h_kv,
        s_kv1=draw(st.integers(1, 200)),
        topk=draw(st.integers(1, 200)),
        width=draw(st.none() | st.integers(0, 200)),
        splits=draw(st.sampled_from([1, 1, 2, 3, 7])) if splits else 1,
        processors=draw(st.integers(1, 3)) * kernel(key).facts["cluster"],
        seed=draw(st.integers(0, 2**20)),
    )


@pytest.mark.parametrize("case", KEPT, ids=str)
def test_kept(case):
    check(case)


@pytest.mark.fuzz
@pytest.mark.skipif(not ATTENTION, reason="no kernel is built")
@settings.get_profile("fuzz")
@given(cases())
def test_fuzz(case):
    check(case)
