"""Run the tests marked `gpu`: `python -m tests.gpu`, which `make test-gpu` calls. Other arguments go to pytest.

Several workers, each a pytest process, share the GPU, and each may hold its part of the memory. A test marked `alone`,
and one that ran out of memory beside others, runs when all others have ended. Every result is printed and appended to
a file when it comes, so that a run that is cut off leaves names, and `--skip-passed` goes on where it ended. A test
over its time limit, or one that takes its process down, fails by name; a new worker takes the rest.

The exit status is 0 if every test passed or was skipped, 1 if one failed, 3 if none failed but some were not run.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

SHARD = 12  # tests of one file that a worker takes at a time: module fixtures last as long
OF_MEMORY = 0.9  # of a GPU, what all workers may hold together
MOST_WORKERS = 6  # more do not pay: each needs cores for compiling, and a context on the GPU
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "CUDA_ERROR_OUT_OF_MEMORY")
BAD = ("failed", "error", "crashed", "timeout")


@dataclass(frozen=True)
class Result:
    test: str
    outcome: str  # "passed", "skipped", or one of BAD
    seconds: float
    why: str = ""

    @property
    def brief(self) -> str:
        """The line of `why` that says most: the first of an error, or the last one."""
        lines = self.why.strip().splitlines() or [""]
        return next((line for line in lines if line.startswith("E ")), lines[-1]).removeprefix("E").strip()[:160]


@dataclass(frozen=True)
class Ready:
    """The first answer of a worker."""

    device: str  # the GPU, or why there is none
    has_device: bool
    tests: tuple[str, ...]
    alone: tuple[str, ...]  # those of them marked so
    broken: tuple[Result, ...]  # files that could not be collected


# ---- a worker


class Plugin:
    """Runs what the driver names, in a pytest session that has collected everything."""

    def __init__(self, driver: Connection, platform: str) -> None:
        self.driver = driver
        self.platform = platform
        self.broken: list[Result] = []
        self.reports: list[pytest.TestReport] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken.append(Result(report.nodeid, "error", 0.0, report.longreprtext))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        alone = tuple(name for name, item in items.items() if item.get_closest_marker("alone"))
        device, has_device = self.device()
        self.driver.send(Ready(device, has_device, tuple(items), alone, tuple(self.broken)))
        while shard := self.driver.recv():
            for name, following in zip(shard, [*shard[1:], None], strict=True):
                self.driver.send(name)
                self.reports = []
                session.config.hook.pytest_runtest_protocol(item=items[name], nextitem=items.get(following))
                result = result_of(name, self.reports)
                self.driver.send(result)
                if session.shouldstop or (result.outcome in BAD and not self.device()[1]):
                    return True  # nothing runs in this process any more
        return True

    def device(self) -> tuple[str, bool]:
        """Names the GPU after a computation on it, which fails for ever once a kernel has failed."""
        import jax

        try:
            device = jax.local_devices(backend=self.platform)[0]
            (jax.device_put(1.0, device) + 1.0).block_until_ready()
        except Exception as error:
            return str(error).splitlines()[0], False
        return f"{device.device_kind}, jax {jax.__version__}", True


def result_of(name: str, reports: Sequence[pytest.TestReport]) -> Result:
    """One result of the reports of set-up, call and tear-down."""
    seconds = sum(report.duration for report in reports)
    if failed := [report for report in reports if report.failed]:
        outcome = "failed" if failed[0].when == "call" else "error"
        said = [text for report in failed for text in (report.longreprtext, report.capstdout, report.capstderr)]
        return Result(name, outcome, seconds, "\n".join(filter(None, said)))
    if skipped := [report for report in reports if report.skipped and not hasattr(report, "wasxfail")]:
        reason = skipped[0].longrepr
        return Result(name, "skipped", seconds, str(reason[2] if isinstance(reason, tuple) else reason))
    return Result(name, "passed", seconds)


def work(driver: Connection, log: str, platform: str, arguments: Sequence[str]) -> None:
    """The process of a worker, whose output goes to `log`."""
    os.setpgid(0, 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    pytest.main(list(arguments), plugins=[Plugin(driver, platform)])


# ---- the driver


@dataclass
class Worker:
    process: Any
    driver: Connection
    log: Path
    ready: Ready | None = None
    shard: deque[str] = field(default_factory=deque)  # what it was given and has not ended
    runs: bool = False  # the first test of the shard
    began: float = 0.0  # when it did
    is_closed: bool = False

    def close(self) -> None:
        """Ends the process, and those that it started."""
        self.is_closed = True
        self.driver.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


class Stop(Exception):
    """Nothing can be run, and why."""


class Run:
    """All workers, what is left to do, and what came of the rest."""

    def __init__(self, options: argparse.Namespace, platform: str, logs: Path) -> None:
        self.options, self.platform, self.logs = options, platform, logs
        self.passed_before = passed(options.skip_passed)
        self.began = time.monotonic()
        self.results: dict[str, Result] = {}
        self.to_run: list[str] = []
        self.alone: list[str] = []
        self.started = 0
        options.results.parent.mkdir(parents=True, exist_ok=True)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def is_over(self) -> bool:
        return self.elapsed > self.options.limit

    def write(self, **line: Any) -> None:
        """Adds a line to the results at once."""
        with self.options.results.open("a") as file:
            print(json.dumps(line), file=file)

    def ended(self, result: Result) -> None:
        """Prints and keeps a result."""
        self.results[result.test] = result
        self.write(**asdict(result))
        minutes, seconds = divmod(int(self.elapsed), 60)
        mark = result.outcome.upper() if result.outcome in BAD else result.outcome
        print(
            f"[{len(self.results)}/{len(self.to_run)}] {minutes}:{seconds:02} {mark} {result.test} "
            f"{result.seconds:.1f} s{': ' * bool(result.why)}{result.brief}",
            flush=True,
        )

    def start(self, share: float) -> Worker:
        """A new process, which may hold that share of a GPU's memory."""
        os.environ |= {
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # plugins that a machine happens to have take no part
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.3f}",
        }
        self.started += 1
        log = self.logs / f"worker{self.started}.log"
        mine, its = multiprocessing.Pipe()
        limit = f"faulthandler_timeout={0.9 * self.options.test_limit:.0f}"  # says where a test hangs
        how = ["-q", "-p", "no:cacheprovider", "-o", limit, "--continue-on-collection-errors", *self.options.pytest]
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=work, args=(its, str(log), self.platform, how), daemon=True)
        process.start()
        its.close()
        return Worker(process, mine, log)

    def collected(self, ready: Ready) -> None:
        """Takes in what the first worker found: the tests of this run, and files that are broken."""
        if not ready.has_device:
            raise Stop(f"there is no {self.platform} device here: {ready.device}")
        self.to_run = [name for name in ready.tests if name not in self.passed_before]
        self.alone = [name for name in ready.alone if name in set(self.to_run)]
        head = ["git", "rev-parse", "--short=7", "HEAD"]  # nothing where there is no repository
        commit = subprocess.run(head, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
        began = time.strftime("%Y-%m-%dT%H:%M:%S")
        self.write(began=began, device=ready.device, tests=len(self.to_run), commit=commit)
        before = len(ready.tests) - len(self.to_run)
        print(f"{ready.device}: {len(self.to_run)} tests, {before} have passed before", flush=True)
        for result in ready.broken:
            self.to_run.append(result.test)
            self.ended(result)

    def share_out(self, count: int) -> None:
        """Runs all tests but those that run alone, by `count` workers at a time."""
        workers = [self.start(OF_MEMORY / count) for _ in range(count)]
        try:
            shards = deque(shards_of(self.before_others(workers)))
            self.work_off(shards, workers, OF_MEMORY / count)
        finally:
            for worker in workers:
                worker.close()

    def before_others(self, workers: list[Worker]) -> list[str]:
        """Waits for the first worker that has collected; names of what workers may do beside one another."""
        while not any(worker.ready for worker in workers):
            self.listen(workers)
            if all(worker.is_closed for worker in workers):
                raise Stop(f"no worker has started:\n{workers[0].said}")
            if self.is_over:
                raise Stop("the time was over before the tests were collected")
        self.collected(next(worker.ready for worker in workers if worker.ready))
        return [name for name in self.to_run if name not in self.alone and name not in self.results]

    def run_alone(self) -> None:
        """Runs the others by one worker, which may have all memory."""
        if self.alone and not self.is_over:
            print(f"alone: {len(self.alone)} tests", flush=True)
            workers = [self.start(OF_MEMORY)]
            try:
                self.work_off(deque(shards_of(self.alone)), workers, OF_MEMORY, is_alone=True)
            finally:
                for worker in workers:
                    worker.close()

    def work_off(self, shards: deque[list[str]], workers: list[Worker], share: float, is_alone: bool = False) -> None:
        """Hands shards out until none is left, or the time is over; a worker that ended has a successor."""
        while not self.is_over:
            for i, worker in enumerate(workers):
                if worker.is_closed and (shards or worker.shard):
                    if worker.ready is None:
                        raise Stop(f"a worker did not start:\n{worker.said}")
                    if worker.shard:
                        shards.appendleft(list(worker.shard))
                    workers[i] = self.start(share)
                elif not worker.is_closed and worker.ready and not worker.shard and shards:
                    shard = shards.popleft()
                    worker.shard = deque(shard)
                    worker.driver.send(shard)
            if not shards and not any(worker.shard for worker in workers):
                return
            self.listen(workers, is_alone)

    def listen(self, workers: list[Worker], is_alone: bool = False) -> None:
        """Takes what workers say for a second at most, and ends tests that are over their time."""
        listening = {worker.driver: worker for worker in workers if not worker.is_closed}
        for driver in wait(list(listening), timeout=1.0):
            worker = listening[driver]
            try:
                said = worker.driver.recv()
            except (EOFError, OSError):
                worker.close()
                if worker.runs:
                    self.failed(worker, "crashed", f"{worker.said}\nexit status {worker.process.exitcode}")
                continue
            if isinstance(said, Ready):
                worker.ready = said
            elif isinstance(said, Result):
                worker.shard.popleft()
                worker.runs = False
                if said.outcome in BAD and not is_alone and any(word in said.why for word in OUT_OF_MEMORY):
                    print(f"out of memory, runs again alone: {said.test}", flush=True)
                    self.alone.append(said.test)
                else:
                    self.ended(said)
            else:
                worker.runs, worker.began = True, time.monotonic()
        for worker in listening.values():
            if worker.runs and not worker.is_closed and time.monotonic() - worker.began > self.options.test_limit:
                worker.close()
                self.failed(worker, "timeout", f"{worker.said}\nstopped after {self.options.test_limit:g} s")

    def failed(self, worker: Worker, outcome: str, why: str) -> None:
        """The test that runs ended with its process; a successor takes the rest of the shard."""
        worker.runs = False
        self.ended(Result(worker.shard.popleft(), outcome, time.monotonic() - worker.began, why))

    def summary(self) -> int:
        """Prints what came of all tests; the exit status."""
        counts = Counter(result.outcome for result in self.results.values())
        missing = [name for name in self.to_run if name not in self.results]
        slowest = sorted(self.results.values(), key=lambda result: -result.seconds)[:10]
        print("\nslowest:", *(f"  {result.seconds:6.1f} s {result.test}" for result in slowest), sep="\n")
        for result in (result for result in self.results.values() if result.outcome in BAD):
            print(f"\n{result.outcome.upper()} {result.test}\n{result.why[-4000:]}")
        for result in (result for result in self.results.values() if result.outcome in BAD):
            print(f"{result.outcome.upper()} {result.test}")
        if missing:
            print(f"not run, for the time of {self.options.limit} s was over:", *missing, sep="\n  ")
        found = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        print(f"{found or 'nothing ran'}, {len(missing)} not run, in {self.elapsed:.0f} s; {self.options.results}")
        return 1 if any(counts[outcome] for outcome in BAD) else 3 if missing else 0


def shards_of(tests: Iterable[str]) -> Iterator[list[str]]:
    """Tests of one file each, at most SHARD; files with the most tests first."""
    files: dict[str, list[str]] = {}
    for test in tests:
        files.setdefault(test.partition("::")[0], []).append(test)
    for of_file in sorted(files.values(), key=len, reverse=True):
        yield from (of_file[i : i + SHARD] for i in range(0, len(of_file), SHARD))


def passed(results: Path | None) -> set[str]:
    """The tests whose last result in a file is that they passed."""
    if results is None or not results.exists():
        return set()
    last: dict[str, str] = {}
    for line in results.read_text().splitlines():
        try:
            result = json.loads(line)
        except ValueError:  # the last line of a run that was cut off
            continue
        if "test" in result:
            last[result["test"]] = result["outcome"]
    return {test for test, outcome in last.items() if outcome == "passed"}


def main(argv: Sequence[str] | None = None, platform: str = "cuda", marks: str = "gpu and not fuzz") -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # other options are pytest's
    )
    cores = os.cpu_count() or 1
    workers = max(1, min(MOST_WORKERS, cores // 2))
    parser.add_argument("--workers", type=int, default=workers, help=f"processes at a time (default here: {workers})")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for all tests (default: an hour)")
    parser.add_argument("--test-limit", type=float, default=300, help="seconds for one test (default: 300)")
    parser.add_argument("--results", type=Path, default=Path("build/gpu.jsonl"), help="file that results are added to")
    parser.add_argument("--skip-passed", type=Path, metavar="FILE", help="leave out what passed by such a file")
    options, others = parser.parse_known_args(argv)
    if options.skip_passed is not None and not options.skip_passed.exists():
        parser.error(f"--skip-passed: there is no {options.skip_passed}")
    options.pytest = ["-m", marks, *others]
    with tempfile.TemporaryDirectory() as logs:
        run = Run(options, platform, Path(logs))
        try:
            run.share_out(options.workers)
            run.run_alone()
        except Stop as stop:
            print(f"tests.gpu: {stop}", file=sys.stderr)
            return 2
        return run.summary()


if __name__ == "__main__":
    sys.exit(main())
