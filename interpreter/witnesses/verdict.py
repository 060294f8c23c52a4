"""Runs of a witness: its answers, the rules of the manual that it breaks, and faults planted in it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..cute.forms import executed
from ..cute.launches import Launch, Run, run
from ..machine.hazards import Fault
from ..machine.rules import CHIP, Rule
from .recording import Recording


@dataclass
class Answer:
    """A witness's results under the chip's rules, in several orders of events."""

    seeds: int
    right: bool
    errors: dict[str, float]  # by result, the greatest difference to float64, of the greatest number wanted
    seconds: float  # a run
    instructions: tuple[int, int]  # executed, of all
    forms: list[str]
    fault: str = ""  # what was raised, if something was
    remarks: list[str] = field(default_factory=list)


def difference(got: np.ndarray, wanted: np.ndarray) -> float:
    """Relative to the greatest finite number wanted; infinity for a NaN, and for an infinity that is not wanted."""
    with np.errstate(invalid="ignore"):
        errors = np.where(got == wanted, 0.0, np.abs(got.astype(np.float64) - wanted))
    error = errors.max() / np.abs(wanted[np.isfinite(wanted)]).max()
    return float(error) if np.isfinite(error) else float("inf")


def judged(x: Recording, finished: Run) -> dict[str, float]:
    results = finished.results()
    return {name: difference(results[name], wanted) for name, wanted in x.wanted.items()}


def answer(x: Recording, seeds: int) -> Answer:
    errors, forms, remarks = dict.fromkeys(x.wanted, 0.0), set[str](), set[str]()
    ran = total = 0
    start, fault = time.monotonic(), ""
    for seed in range(seeds):
        try:
            finished = run(x.launches, x.arguments, seed=seed, rules=CHIP, record=seed == 0)
        except Fault as found:
            fault = f"seed {seed}: {type(found).__name__}: {found}"
            break
        for name, error in judged(x, finished).items():
            errors[name] = max(errors[name], error)
        remarks |= set(finished.remarks)
        if seed == 0:
            forms = set().union(*map(executed, finished.machines))
            ran = sum(len(m.executed) for m in finished.machines)
            total = sum(len(m.program.code) for m in finished.machines)
    right = not fault and all(error <= x.tolerance for error in errors.values())
    seconds = (time.monotonic() - start) / seeds
    return Answer(seeds, right, errors, seconds, (ran, total), sorted(forms), fault, sorted(remarks))


def broken(x: Recording) -> list[str]:
    """The rules that it breaks: with one of them alone, a fault is found, which is none on the chip."""
    found = []
    for rule in Rule:
        try:
            run(x.launches, x.arguments, rules={rule})
        except Fault:
            found.append(rule.name)
    return found


# ---- planted faults


@dataclass(frozen=True)
class Edit:
    """A line of PTX, and what stands there instead."""

    kind: str
    line: int  # from 0 on
    text: str

    def planted_in(self, ptx: str) -> str:
        lines = ptx.splitlines()
        lines[self.line] = self.text
        return "\n".join(lines)


KINDS: Sequence[tuple[str, str, str]] = (  # of a fault: its name, the line that has it, what replaces the line
    ("a wait", r"(.*)mbarrier\.try_wait\S+\s+(\S+?),.*", r"\1setp.eq.u32 \2, 0, 0;"),
    ("an arrival", r"(.*)mbarrier\.arrive\.(?!expect).*", r"\1"),
    ("a commit", r"(.*)tcgen05\.commit.*", r"\1"),
    ("a proxy fence", r"(.*)fence\.proxy\.async.*", r"\1"),
    ("a wait for stores", r"(.*)tcgen05\.wait::st.*", r"\1"),
    ("a barrier of warps", r"(.*)bar(?:rier)?\.(?:sync|cluster\.wait).*", r"\1"),
)
NUMBERS: Sequence[
    tuple[str, str, Callable[[int], int]]
] = (  # a name, the line with the number, what the number becomes
    ("a phase", r"(.*mbarrier\.try_wait.*,\s*)([01])(,.*|;.*)", lambda n: 1 - n),
    ("a swizzle", r"(.*\s)(-?\d{18,})(;.*)", lambda n: n ^ 6 << 61),  # of 128 bytes, for one of 64
)
REGISTERS: Sequence[tuple[str, str, Callable[[int], int]]] = (  # the same, of a number in a register: where it is used
    ("bytes expected", r"mbarrier\.arrive\.expect_tx\S*\s[^;]*,\s*([%\w]+)\s*;", lambda n: n // 2),
    ("B's major", r"tcgen05\.mma\S*\s+\[[^,]*,[^,]*,[^,]*,\s*([%\w]+)", lambda n: n ^ 1 << 16),  # of its descriptor
)


def edits(launch: Launch, executed_lines: Collection[int]) -> Iterator[Edit]:
    """Every place of every kind of fault, in a line that a run has executed."""
    numbers = [*NUMBERS]
    for kind, used, change in REGISTERS:
        names = "|".join(sorted(map(re.escape, set(re.findall(used, launch.ptx)))))
        numbers += [(kind, rf"(.*mov\.b32\s+(?:{names}),\s*)(0x[\da-f]+|\d+)(;.*)", change)] if names else []
    for line, text in enumerate(launch.ptx.splitlines()):
        if line + 1 not in executed_lines:
            continue
        for kind, pattern, to in KINDS:
            if found := re.fullmatch(pattern, text):
                yield Edit(kind, line, found.expand(to))
        for kind, pattern, change in numbers:
            if (found := re.fullmatch(pattern, text)) and (kind != "a swizzle" or is_descriptor(int(found[2], 0))):
                yield Edit(kind, line, f"{found[1]}{change(int(found[2], 0))}{found[3]}")


def is_descriptor(number: int) -> bool:
    """True for a descriptor of shared memory with a swizzle of 128 bytes."""
    return number & 7 << 46 == 1 << 46 and number >> 61 & 7 == 2


@dataclass
class Planted:
    """Faults of one kind: how many were planted, and how they were found; the others had no effect in any run."""

    planted: int = 0
    raised: int = 0  # the interpreter raised a fault
    wrong: int = 0  # the answer was wrong


def plant(x: Recording, *, seeds: int = 2) -> dict[str, Planted]:
    """Plants faults under the chip's rules and counts them by kind."""
    first = run(x.launches, x.arguments, rules=CHIP, record=True)
    found: dict[str, Planted] = {}
    for n, (launch, machine) in enumerate(zip(x.launches, first.machines, strict=True)):
        lines = {machine.program.code[k].line for k in machine.executed}
        for edit in edits(launch, lines):
            changed = list(x.launches)
            changed[n] = replace(launch, ptx=edit.planted_in(launch.ptx))
            count = found.setdefault(edit.kind, Planted())
            count.planted += 1
            symptom = symptom_of(replace(x, launches=changed), seeds)
            count.raised += symptom == "raised"
            count.wrong += symptom == "wrong"
    return found


def symptom_of(x: Recording, seeds: int) -> str:
    for seed in range(seeds):
        try:
            errors = judged(x, run(x.launches, x.arguments, seed=seed, rules=CHIP))
        except Fault:
            return "raised"
        if any(error > x.tolerance for error in errors.values()):
            return "wrong"
    return "none"
