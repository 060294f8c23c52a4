"""`python -m jax_dsv4_fmha check`: the table of cases on this machine.

With a GPU that kernels are built for: every kernel against the reference in float32. Each runs twice, into buffers with
different contents, and must give the same bits. Without: the reference against loops in float64, for the small cases.
"""

import fnmatch
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

from .._check import Implementation
from .._host import library
from .._testing.case import Case
from .._testing.cases import CASES
from .info import machine, no_devices
from .report import Progress, output, write_json

PASSED, FAILED, NOT_BUILT, SKIPPED = "passed", "FAILED", "not built", "skipped"


@dataclass(frozen=True)
class Outcome:
    name: str
    status: str
    detail: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.status:9} {self.seconds:5.1f} s  {self.name}\n{'':19}{self.detail}"


def check(
    pattern: str | None,
    json_path: str | None,
    progress: bool | None,
    *,
    is_quick: bool = False,
    is_list: bool = False,
) -> int:
    out = output(json_path)
    if why := no_devices():
        print(why, file=out)
        return 2
    on_gpu, why = _mode()
    print(why, file=out, flush=True)
    cases = CASES if on_gpu else small_cases()
    cases = [x for x in (quick(cases) if is_quick else cases) if matches(x.name, pattern) or matches(x.id, pattern)]
    if not cases:
        print(f"No case matches {pattern!r}; --list prints their names.", file=out)
        return 2
    if is_list:
        print(*(x.name for x in cases), sep="\n", file=out)
        if json_path is not None:
            write_json({"cases": [{"name": x.name, "id": x.id} for x in cases]}, json_path)
        return 0
    bar = Progress(len(cases), progress, out)
    outcomes: list[Outcome] = []
    interrupted = False
    try:
        for x in cases:
            bar.begin(x.name)
            outcomes.append(_outcome(x, "cubin" if on_gpu else "reference"))
            bar.print(str(outcomes[-1]))
    except KeyboardInterrupt:
        interrupted = True
    bar.clear()
    counts = Counter(outcome.status for outcome in outcomes)
    summary = ", ".join(f"{n} {status}" for status, n in counts.items())
    if interrupted:
        print(f"Interrupted after {len(outcomes)} of {len(cases)} cases: {summary or 'none'}", file=out)
        return 130
    print(summary, file=out)
    if json_path is not None:
        against = "kernels, reference" if on_gpu else "reference, float64"
        write_json({**machine(), "compared": against, "cases": [asdict(x) for x in outcomes]}, json_path)
    if counts[FAILED]:
        return 1
    return 0 if counts[PASSED] or counts[SKIPPED] else 2


def matches(name: str, pattern: str | None) -> bool:
    """True if a shell pattern fits the whole name, or is a part of it, or if there is none."""
    return pattern is None or pattern in name or fnmatch.fnmatchcase(name, pattern)


def small_cases() -> list[Case]:
    """The cases for the reference."""
    return [case for case in CASES if case.is_small]


def quick(cases: Sequence[Case]) -> list[Case]:
    """A few small cases in which every feature of a case occurs at least once."""

    def has(x: Case) -> set[tuple[Any, ...]]:
        c = x.facts
        kind = (x.op, c["topk"] > 0, c["ratio"] > 0)
        features = (c["dtype"], c["sink"], c["d"], c["page"] > 0, *c["span"].split("+"), *c["features"])
        return {kind, *((feature,) for feature in features)}

    left, chosen = set().union(*map(has, cases)), list[Case]()
    while left:
        best = max(cases, key=lambda x: (len(has(x) & left), -x.work))
        chosen.append(best)
        left -= has(best)
    return sorted(chosen, key=lambda x: x.work)


def _mode() -> tuple[bool, str]:
    """Tells whether kernels can be checked here, with the message about it."""
    local, built = library.local_architectures(), {v.arch for v in library.variants()}
    if built.intersection(local):
        return True, "Kernels against the reference in float32, each run twice into buffers of other content."
    why = "This machine has no CUDA device" if not local else f"No kernels are built for {', '.join(local)}"
    return False, f"{why}: the reference against loops in float64, small cases only."


def _device() -> jax.Device:
    return jax.local_devices(backend="cuda")[0]


def _outcome(x: Case, implementation: Implementation) -> Outcome:
    began = time.monotonic()
    try:
        status, detail = _check_one(x, implementation)
    except Exception as e:  # one broken case must not hide the others
        is_ours = isinstance(e, NotImplementedError) and ", built " in str(e)  # JAX and NumPy raise it too
        status, detail = NOT_BUILT if is_ours else FAILED, reason(e)
    return Outcome(x.name, status, detail, time.monotonic() - began)


def _check_one(x: Case, implementation: Implementation) -> tuple[str, str]:
    if implementation == "cubin":
        wanted = x.device_bytes
        limit = (_device().memory_stats() or {}).get("bytes_limit", wanted)
        if wanted > limit:
            return SKIPPED, f"needs {wanted / 2**30:.0f} GiB of device memory, has {limit / 2**30:.0f} GiB"
    is_right, detail = x.judge(implementation)
    return PASSED if is_right else FAILED, detail


def reason(e: Exception) -> str:
    """An error in one line, without the list of kernels that `info` shows."""
    first = (str(e).strip().splitlines() or ["no reason given"])[0]
    return f"{type(e).__name__}: {first.split(', built ')[0][:300]}"
