"""Calls of CuTe DSL functions go to the interpreter, for a while, and not to a GPU.

    report = interpreted(function, x, y, 2.0)        # a @cute.jit function, with NumPy's or torch's arrays of the CPU
    print(report)                                    # what was found; x and y hold what the function wrote

`python -m interpreter run SCRIPT.py` does the same for all calls of a script.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import clocks
from ..machine.hazards import Fault
from ..machine.rules import MANUAL, Rule
from ..machine.state import Array
from .forms import by_family, executed
from .launches import Argument, Launch, Role, Run, run
from .record import AsCuda, as_numpy, pretend, record_arguments, typed


@dataclass
class Call:
    """One call of a function: its launches, in several orders of events."""

    launches: Sequence[Launch]
    seeds: int
    seconds: float = 0.0  # a run
    compared: bool = True  # whether all orders gave the same bits
    fault: Fault | None = None  # the first that was found
    seed: int = 0  # in which order
    instructions: list[tuple[int, int]] = field(default_factory=list)  # of each launch: executed, of all
    unreached: list[str] = field(default_factory=list)  # PTX that no launch executed
    forms: set[str] = field(default_factory=set)
    written: dict[str, int] = field(default_factory=dict)  # bytes, by array
    remarks: list[str] = field(default_factory=list)
    timings: list[clocks.Timing] = field(default_factory=list)  # of each launch, where they are wanted

    def __str__(self) -> str:
        lines = []
        for launch, (ran, total) in zip(self.launches, self.instructions, strict=False):
            sizes = " x ".join(f"{tuple(x)}" for x in (launch.grid, launch.block))
            cluster = f" in clusters of {tuple(launch.cluster)}" if tuple(launch.cluster) != (1, 1, 1) else ""
            share = f"{ran} of {total} instructions executed"
            lines.append(f"{launch.kernel}: {sizes}{cluster}, {launch.smem_bytes} bytes of shared memory; {share}")
        if self.fault is not None:
            where = source_of(self.fault, self.launches)
            lines.append(
                f"  seed {self.seed}: {type(self.fault).__name__}: {self.fault}" + (f"\n    {where}" * bool(where))
            )
            return "\n".join(lines)
        same = "the same bits in all" if self.compared else "NOT the same bits in all"
        lines.append(f"  nothing to complain about in {self.seeds} orders, {same}; {self.seconds:.1f} s a run")
        lines += [f"  wrote {size} bytes of {name}" for name, size in self.written.items()]
        lines += [f"  remark: {remark}" for remark in self.remarks]
        for launch, timing in zip(self.launches, self.timings, strict=False):
            lines += [f"  {launch.kernel}:", *(f"    {line}" for line in str(timing).splitlines())]
        return "\n".join(lines)


@dataclass
class Report:
    """All calls of a session, with the faults and other findings of each."""

    calls: list[Call] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.calls) and not any(call.fault for call in self.calls)

    def forms(self) -> dict[str, list[str]]:
        """Returns the forms of instructions that ran in any call, by family."""
        return by_family(set().union(*(call.forms for call in self.calls)))

    def __str__(self) -> str:
        return "\n".join(map(str, self.calls)) or "nothing was launched"


def source_of(fault: Fault, launches: Sequence[Launch]) -> str:
    """The line of Python that an instruction at fault comes from, if its PTX says so."""
    found = re.search(r"\bline (\d+): (.*)", str(fault))
    if found is None:
        return ""
    for launch in launches:
        lines = launch.ptx.splitlines()
        line = int(found[1])
        if line > len(lines) or found[2].split(" ")[0] not in lines[line - 1]:
            continue
        files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', launch.ptx, re.M))
        for text in reversed(lines[:line]):
            if place := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", text):
                return f"{files.get(place[1], '?')}:{place[2]}" if place[2] != "0" else ""
    return ""


class Session:
    """Runs calls, on all arrays that the DSL was given so far."""

    def __init__(
        self, seeds: int, rules: Collection[Rule], arch: str, processors: int, stops: bool, time: bool = False
    ):
        self.seeds, self.rules, self.arch, self.processors, self.stops = seeds, rules, arch, processors, stops
        self.time = time
        self.report = Report()
        self.arrays: dict[int, Array] = {}  # by address

    def know(self, x: Any) -> Array:
        array = as_numpy(x)
        if not array.flags.writeable:
            raise ValueError("an array that cannot be written: a kernel's arguments must be writable")
        self.arrays[array.__array_interface__["data"][0]] = array
        return array

    def arguments(self) -> list[Argument]:
        """Arrays that are parts of others are of these."""
        bounds = sorted((np.lib.array_utils.byte_bounds(x), n) for n, x in self.arrays.items() if x.size)
        found, end = list[Argument](), 0
        for (first, last), n in sorted(bounds, key=lambda x: (x[0][0], -x[0][1])):
            if last > end:
                if first < end:
                    raise NotImplementedError("arrays that share a part of their memory")
                x = self.arrays[n]
                found.append(Argument.of(f"array {len(found)} ({x.dtype}{list(x.shape)})", x, Role.BOTH))
                end = last
        return found

    def execute(self, compiled: Any, arguments: Sequence[Any]) -> None:
        launches = record_arguments(compiled, arguments, arch=self.arch, processors=self.processors)
        call = Call(launches, self.seeds)
        self.report.calls.append(call)
        given, results, start = self.arguments(), list[dict[str, Array]](), time.monotonic()
        for seed in range(self.seeds):
            started = Run(given)
            try:
                run(launches, given, seed=seed, rules=self.rules, record=seed == 0, started=started)
                results.append(started.results())
            except Fault as fault:
                call.fault, call.seed = fault, seed
            if seed == 0:
                call.instructions = [(len(m.executed), len(m.program.code)) for m in started.machines]
                call.forms = set().union(*map(executed, started.machines))
                call.unreached = [i.text for m in started.machines for i in unreached(m)]
            if call.fault is not None:
                if self.stops:
                    raise call.fault
                return
            call.remarks = sorted({*call.remarks, *started.remarks})
        call.seconds = (time.monotonic() - start) / self.seeds
        if self.time:
            run(launches, given, rules=self.rules, by=lambda m: call.timings.append(clocks.run(m)))
        first = results[0]
        call.compared = all(x[name].tobytes() == first[name].tobytes() for x in results for name in x)
        for x in given:
            if size := 4 * int(started.written(x.name).sum()):
                call.written[x.name] = size
                self.arrays[x.address + x.start][...] = first[x.name]


def unreached(machine: Any) -> list[Any]:
    return [i for n, i in enumerate(machine.program.code) if n not in machine.executed]


@contextlib.contextmanager
def interpreting(
    *,
    seeds: int = 3,
    rules: Collection[Rule] = MANUAL,
    arch: str = "sm_100a",
    processors: int = 4,
    stops: bool = True,
    time: bool = False,
) -> Iterator[Report]:
    """While this lasts, compiled functions run in the interpreter; the report grows with every call.

    `arch`: what is compiled for; sm_90a or sm_100a. `processors`: how many the DSL is told that the GPU has. `stops`:
    whether a fault is raised. `time`: whether a last run is by clocks. What the DSL has compiled before is not seen.
    """
    session = Session(seeds, rules, arch, processors, stops, time)
    with contextlib.ExitStack() as stack:
        dump = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Cache is disabled")  # which the DSL says of whoever wants PTX
        stack.enter_context(pretend(processors))
        for target, name, value in (*replacements(session), *settings(arch, dump)):
            stack.callback(setattr, target, name, getattr(target, name))
            setattr(target, name, value)
        yield session.report


def settings(arch: str, dump: str) -> list[tuple[Any, str, Any]]:
    """Returns settings by which the DSL's compiler keeps PTX, with the lines of Python that it comes from."""
    from cutlass.cutlass_dsl import CuTeDSL

    environment = CuTeDSL._get_dsl().envar
    wanted = {"arch": arch, "dump_dir": dump, "disable_file_caching": True}
    wanted |= dict.fromkeys(("keep_ptx", "keep_cubin", "lineinfo"), True)
    return [(environment, name, value) for name, value in wanted.items()]


def replacements(session: Session) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Returns replacements in the DSL: of where it gets arrays, and of where it runs what it has compiled."""
    from cutlass.base_dsl.jit_executor import JitCompiledFunction
    from cutlass.cute import runtime

    make = runtime._Tensor.__init__

    def tensor(self: Any, x: Any, *args: Any, **kwargs: Any) -> None:
        array = session.know(x)
        make(self, AsCuda(array), *args, **kwargs)
        typed(self, array)

    def run_compiled(compiled: Any, arguments: Sequence[Any]) -> int:
        session.execute(compiled, arguments)
        return 0

    return [(runtime._Tensor, "__init__", tensor), (JitCompiledFunction, "run_compiled_program", run_compiled)]


def interpreted(
    function: Callable[..., Any],
    *args: Any,
    seeds: int = 3,
    rules: Collection[Rule] = MANUAL,
    arch: str = "sm_100a",
    processors: int = 4,
    **kwargs: Any,
) -> Report:
    """Calls a @cute.jit function, or one that calls such, in the interpreter.

    args: NumPy's or torch's arrays of the CPU become tensors of the DSL with a dynamic layout; all else stays as it is.
        To choose a layout, give `from_dlpack(x, …)` made by a function that is called here.
    Returns what was found; where that is no fault, the arrays hold what the function wrote.
    """
    with interpreting(seeds=seeds, rules=rules, arch=arch, processors=processors, stops=False) as report:
        from cutlass.cute import runtime

        function(*(runtime.from_dlpack(x) if is_array(x) else x for x in args), **kwargs)
    return report


def is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray) or (hasattr(x, "__dlpack__") and hasattr(x, "dtype") and hasattr(x, "numpy"))
