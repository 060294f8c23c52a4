"""`python -m jax_dsv4_fmha check`: the table of cases on this machine.

With a GPU that kernels are built for: every kernel against the reference in float32. Each runs twice, into buffers with
different contents, and must give the same bits. Without: the reference against loops in float64, for the small cases.
"""

import fnmatch
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._check import Method
from .._host import library
from .._testing import indexer, rope
from .._testing.cases import CASES, Case, run_float64, run_into, run_reference
from .._testing.compare import FP32, FP32_LARGE, Verdict, compare
from .info import machine, no_devices
from .report import Progress, output, write_json

PASSED, FAILED, NOT_BUILT, SKIPPED = "passed", "FAILED", "not built", "skipped"

_OTHERS = {op: module for module in (indexer, rope) for op in module.OPS}
"""by op: the modules whose results are not (o, lse), so that each says what is wrong with its own"""

_BYTES_PER_ELEMENT = 32  # of q, at the peak: q and two results in 16 bits, the reference and the comparison in fp32


@dataclass(frozen=True)
class Check:
    """A case; for a whole layer, with one of the methods."""

    case: Case
    method: Method | None = None

    @property
    def name(self) -> str:
        return self.case.name if self.method is None else f"{self.case.name} {self.method}"


@dataclass(frozen=True)
class Outcome:
    name: str
    status: str
    detail: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.status:9} {self.seconds:5.1f} s  {self.name}: {self.detail}"


def check(pattern: str | None, json_path: str | None, progress: bool | None, is_quick: bool = False) -> int:
    out = output(json_path)
    if why := no_devices():
        print(why, file=out)
        return 2
    on_gpu, why = _mode()
    print(why, file=out, flush=True)
    one = _check_kernel if on_gpu else _check_reference
    checks = kernel_checks() if on_gpu else reference_checks()
    checks = [x for x in (quick(checks) if is_quick else checks) if matches(x.name, pattern)]
    if not checks:
        print(f"No case matches {pattern!r}.", file=out)
        return 2
    bar = Progress(len(checks), progress, out)
    outcomes: list[Outcome] = []
    interrupted = False
    try:
        for x in checks:
            bar.begin(x.name)
            outcomes.append(_outcome(x, one))
            bar.print(str(outcomes[-1]))
    except KeyboardInterrupt:
        interrupted = True
    bar.clear()
    counts = Counter(outcome.status for outcome in outcomes)
    summary = ", ".join(f"{n} {status}" for status, n in counts.items())
    if interrupted:
        print(f"Interrupted after {len(outcomes)} of {len(checks)} cases: {summary or 'none'}", file=out)
        return 130
    print(summary, file=out)
    if json_path is not None:
        against = "kernels, reference" if on_gpu else "reference, float64"
        write_json({**machine(), "compared": against, "cases": [asdict(x) for x in outcomes]}, json_path)
    if counts[FAILED]:
        return 1
    return 0 if counts[PASSED] or counts[SKIPPED] else 2


def matches(name: str, pattern: str | None) -> bool:
    """Whether a shell pattern fits the whole name, or is a part of it."""
    return pattern is None or pattern in name or fnmatch.fnmatchcase(name, pattern)


def kernel_checks() -> list[Check]:
    return [
        Check(case, method)
        for case in CASES
        for method in (("two_pass", "fused") if case.op == "dsv4_attention" else (None,))
    ] + [Check(case) for case in (*indexer.CASES, *rope.CASES)]


def reference_checks() -> list[Check]:
    return [Check(case) for case in (*CASES, *indexer.CASES, *rope.CASES) if case.is_small]


def quick(checks: Sequence[Check]) -> list[Check]:
    """A few small checks in which every feature of a case occurs at least once."""

    def has(x: Check) -> set[tuple[Any, ...]]:
        c = x.case
        sources = (c.op, c.topk > 0, c.ratio > 0, x.method)
        words = (c.dtype, c.sink, c.d, c.page > 0, *c.span.split("+"), *c.features)
        return {sources, *((word,) for word in words)}

    left, chosen = set().union(*map(has, checks)), list[Check]()
    while left:
        best = max(checks, key=lambda x: (len(has(x) & left), -x.case.work))
        chosen.append(best)
        left -= has(best)
    return sorted(chosen, key=lambda x: x.case.work)


def _mode() -> tuple[bool, str]:
    """Whether kernels can be checked here, and the message about it."""
    local, built = library.local_architectures(), {v.arch for v in library.variants()}
    if built.intersection(local):
        return True, "Kernels against the reference in float32, each run twice into buffers of other content."
    why = "This machine has no CUDA device" if not local else f"No kernels are built for {', '.join(local)}"
    return False, f"{why}: the reference against loops in float64, small cases only."


def _device() -> jax.Device:
    return jax.local_devices(backend="cuda")[0]


def _outcome(x: Check, one: Callable[[Check], tuple[str, str]]) -> Outcome:
    began = time.monotonic()
    try:
        status, detail = one(x)
    except Exception as e:  # one broken case must not hide the others
        is_ours = isinstance(e, NotImplementedError) and ", built " in str(e)  # JAX and NumPy raise it too
        status, detail = NOT_BUILT if is_ours else FAILED, reason(e)
    return Outcome(x.name, status, detail, time.monotonic() - began)


def _check_kernel(x: Check) -> tuple[str, str]:
    case = x.case
    if case.op in _OTHERS:
        return _check_other(case, "cubin")
    wanted = case.b * case.s_q * case.h_q * case.d * _BYTES_PER_ELEMENT
    limit = (_device().memory_stats() or {}).get("bytes_limit", wanted)
    if wanted > limit:
        return SKIPPED, f"needs {wanted / 2**30:.0f} GiB of device memory, has {limit / 2**30:.0f} GiB"
    choices = {} if x.method is None else {"method": x.method}
    got, again = run_into(case, (0.0, np.nan), implementation="cubin", **choices)
    changed = sum(int(_differing(a, b)) for a, b in zip(got, again, strict=True))
    del again
    return _judge(compare(got, run_reference(case)), f"{changed} elements differ in the second run" if changed else "")


def _check_other(case: Case, implementation: str) -> tuple[str, str]:
    wrong = _OTHERS[case.op].complaints(case, implementation)
    return (FAILED, "; ".join(wrong[:3])) if wrong else (PASSED, _OTHERS[case.op].PASSES)


def _check_reference(x: Check) -> tuple[str, str]:
    if x.case.op in _OTHERS:
        return _check_other(x.case, "reference")
    tolerances = FP32_LARGE if "large" in x.case.features else FP32
    return _judge(compare(run_reference(x.case), run_float64(x.case), tolerances))


def _judge(verdicts: Sequence[Verdict], complaint: str = "") -> tuple[str, str]:
    if complaint or not all(v.passed for v in verdicts):
        return FAILED, "; ".join([*map(str, verdicts), complaint] if complaint else map(str, verdicts))
    return PASSED, ", ".join(f"{v.name} within {v.max_abs:.1e}" for v in verdicts)


@jax.jit
def _differing(x: Any, y: Any) -> jax.Array:
    """How many elements differ in their bits."""
    bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return jnp.sum(jax.lax.bitcast_convert_type(x, bits) != jax.lax.bitcast_convert_type(y, bits))


def reason(e: Exception) -> str:
    """An error in one line, without the list of kernels that `info` shows."""
    first = (str(e).strip().splitlines() or ["no reason given"])[0]
    return f"{type(e).__name__}: {first.split(', built ')[0][:300]}"
