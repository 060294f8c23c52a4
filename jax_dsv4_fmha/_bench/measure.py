"""Device times of compiled functions, by the profiler.

Contestants take turns in rounds of short bursts, because a GPU's clock drifts by some percent. Each takes its inputs
from several sets in turn, so that L2 holds none of them. A call's time is the sum of its kernels' durations; time under
two kernels counts once. A round gives the median of its calls, a contestant the median of its rounds. The spread is
that of the middle half of the rounds.
"""

import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from .machine_code import machine_code

MATMUL = 8192
COPY_BYTES = 2**30
KERNEL_BY_KERNEL: dict[str, str | bool] = {"xla_gpu_graph_min_graph_size": "10000"}  # no CUDA graphs
_BURST_SECONDS = 0.008
_SLOWEST_PEER = 0.05  # seconds a call

Operands = dict[str, Any]
Times = dict[str, Any]
"""of one contestant: seconds, rounds, kernels, how many kernels a call launches, its facts, and digests of the machine
code of our kernels"""


@dataclass(frozen=True)
class Contestant:
    """A function that queues its kernels, and the sets of operands that it takes in turn.

    Attributes:
      text: the compiled program, where it is one.
      is_outside: whether XLA does not launch its kernels, so that the profiler knows them by no HLO module.
      wait: returns when the result of `run` is there.
      facts: what is recorded beside its times.
    """

    run: Callable[[Operands], Any]
    sets: Sequence[Operands]
    text: str = ""
    is_outside: bool = False
    wait: Callable[[Any], Any] = jax.block_until_ready
    facts: Mapping[str, Any] = field(default_factory=dict)

    def module(self, name: str) -> str:
        """The name that the profiler has for the program of the contestant of this name; "" outside of XLA."""
        return "" if self.is_outside else f"jit_{name}"


def compiled(name: str, f: Callable[..., Any], sets: Sequence[Operands]) -> Contestant:
    """`f` as an executable that the profiler calls jit_NAME, without CUDA graphs, so that it sees each kernel."""

    def named(operands: Operands) -> Any:
        return f(**operands)

    named.__name__ = name
    run = jax.jit(named).lower(sets[0]).compile(compiler_options=KERNEL_BY_KERNEL)
    jax.block_until_ready(run(sets[0]))
    began = time.monotonic()
    jax.block_until_ready(run(sets[0]))
    seconds = time.monotonic() - began
    if name.startswith(("cudnn", "xla")) and seconds > _SLOWEST_PEER:
        raise TimeoutError(f"{seconds * 1e3:.0f} ms a call")
    return Contestant(run, sets, run.as_text() or "")


def yardsticks() -> dict[str, Contestant]:
    a, b = (jax.random.normal(key, (MATMUL, MATMUL), jnp.bfloat16) for key in jax.random.split(jax.random.key(1)))
    matmul = [{"a": a, "b": b}, {"a": b, "b": a}]
    copy = [{"x": jnp.full((COPY_BYTES // 4,), i, jnp.float32)} for i in range(2)]
    return {
        "matmul": compiled("matmul", lambda a, b: a @ b, matmul),
        "copy": compiled("copy", lambda x: x.copy(), copy),
    }


def interleaved(contestants: Mapping[str, Contestant], rounds: int, named_by: str | None = None) -> dict[str, Times]:
    """The times of every contestant, from one trace; the names of kernels are those of `kernels`."""
    if len(outside := [name for name, x in contestants.items() if x.is_outside]) > 1:
        raise ValueError(
            f"{' and '.join(outside)}: the profiler cannot tell the kernels of two peers outside of XLA apart"
        )
    bursts = {name: _burst(contestant) for name, contestant in contestants.items()}
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        for _ in range(rounds):
            for name, x in contestants.items():
                x.wait([x.run(x.sets[i % len(x.sets)]) for i in range(bursts[name])][-1])
        jax.profiler.stop_trace()
        (path,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
        events, symbols = kernels(profile, named_by), kernels(profile)
    found: dict[str, Times] = {}
    for name, x in contestants.items():
        of_it, left_out = events.get(x.module(name), []), dict[str, int]()
        if x.is_outside:
            of_it, left_out = of_every_call(of_it, bursts[name] * rounds)
        found[name] = {**summary(name, of_it, bursts[name], rounds), **x.facts}
        if left_out:
            found[name]["left_out"] = left_out
        if code := machine_code({kernel for _, _, kernel in symbols.get(x.module(name), ())}, x.text):
            found[name]["machine_code"] = code
    return found


def _burst(contestant: Contestant) -> int:
    """The number of calls in a row that take about `_BURST_SECONDS`, from 3 to 20."""
    began = time.monotonic()
    contestant.wait([contestant.run(operands) for operands in contestant.sets[:2]][-1])
    return max(3, min(20, int(_BURST_SECONDS * 2 / (time.monotonic() - began))))


def under_graphs(f: Callable[..., Any], operands: Operands, rounds: int) -> Times:
    """A step's time by the host's clock, many in a row, compiled with XLA's defaults.

    Each step gets the previous one's o as its q, donated. As with donated caches, no address changes from step to step,
    so CUDA graphs stay as they are.
    """
    q, rest = operands["q"].copy(), {name: x for name, x in operands.items() if name != "q"}
    run = jax.jit(lambda q, rest: f(q=q, **rest), donate_argnums=0).lower(q, rest).compile()

    def step() -> jax.Array:
        nonlocal q
        q = run(q, rest)
        return q

    return by_the_host_s_clock(step, rounds)


def by_the_host_s_clock(step: Callable[[], Any], rounds: int) -> Times:
    """The time of a step, many in a row, each of which waits on the device for the one before it."""
    steps, times = 3, []
    for _ in range(rounds + 1):
        began = time.monotonic()
        last = None
        for _ in range(steps):
            last = step()
        jax.block_until_ready(last)
        times.append((time.monotonic() - began) / steps)
        steps = max(3, min(100, int(20 * _BURST_SECONDS / times[-1])))
    times = times[1:]  # the first call makes the graphs
    return {"seconds": statistics.median(times), "rounds": times, "kernels": {}}


Event = tuple[float, float, str]
"""start and duration in ns, name"""


def kernels(profile: Any, named_by: str | None = None) -> dict[str, list[Event]]:
    """The kernels that ran on the GPU for every HLO module, in order, by their names or by what the profile says of
    them.
    """
    events: dict[str, list[Event]] = defaultdict(list)
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):  # the other lines are derived from these
                continue
            for event in line.events:
                stats = dict(event.stats)
                kernel = event.name if named_by is None else str(stats.get(named_by, ""))
                events[str(stats.get("hlo_module", ""))].append((event.start_ns, event.duration_ns, kernel))
    return {module: sorted(found) for module, found in events.items()}


def of_every_call(events: Sequence[Event], calls: int) -> tuple[list[Event], dict[str, int]]:
    """The events of kernels that ran equally often in each of so many calls, and the others' names and numbers.

    What ran outside of XLA's programs may be JAX's own, as a copy is.
    """
    numbers = Counter(kernel for _, _, kernel in events)
    others = {kernel: n for kernel, n in numbers.items() if n % calls}
    return [event for event in events if event[2] not in others], others


def without_overlap(events: Sequence[Event]) -> list[tuple[float, str]]:
    """Durations and names. Of a kernel that begins before another ends, as `combine` does, only the time after that
    counts.
    """
    alone, end = [], 0.0
    for start, ns, kernel in events:
        alone.append((max(0.0, start + ns - max(start, end)), kernel))
        end = max(end, start + ns)
    return alone


def summary(name: str, events: Sequence[Event], burst: int, rounds: int) -> Times:
    """The time of a call: the median over the rounds, every round's, and the share of each kernel."""
    of_a_call, left = divmod(len(events), burst * rounds)
    if of_a_call == 0 or left:
        raise RuntimeError(f"{name}: the profiler saw {len(events)} kernels in {burst * rounds} calls")
    calls = [without_overlap(events[i : i + of_a_call]) for i in range(0, len(events), of_a_call)]
    seconds = [1e-9 * sum(ns for ns, _ in call) for call in calls]
    medians = [statistics.median(seconds[i : i + burst]) for i in range(0, len(seconds), burst)]
    names = dict.fromkeys(kernel for _, _, kernel in events)
    totals = {x: [1e-9 * sum(ns for ns, kernel in call if kernel == x) for call in calls] for x in names}
    return {
        "seconds": statistics.median(medians),
        "rounds": medians,
        "kernels": {kernel: statistics.median(total) for kernel, total in totals.items()},
        "launches": of_a_call,
    }
