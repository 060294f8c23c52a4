import contextlib
import functools
import gc
import itertools
import logging
import os
import shutil
import tempfile
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, Phase, settings
from jax._src.interpreters import mlir

from interpreter.faults import PlantedFault
from interpreter.kernels.launch import Kernel
from interpreter.kernels.native import NoLibrary
from interpreter.machine import scheduler
from interpreter.machine.handwritten import Handwritten
from jax_dsv4_fmha._cli import check
from jax_dsv4_fmha._host import library
from kernels import build
from kernels.cache import default_folder, evict
from kernels.variants import TESTED, VARIANTS
from tests import times
from tests.contexts import StopsWhenLost
from tests.helpers import ONE_BUILT, QUICK, assert_in_place, every_kernel

jax.config.update("jax_num_cpu_devices", 8)  # for meshes; a program that names no device runs on the first
jax.config.update("jax_cpu_enable_async_dispatch", False)  # else threads take turns at programs of microseconds
jax.config.update("jax_traceback_in_locations_limit", 0)  # most of a test's time is tracing, lowering and compiling
gc.freeze()
gc.set_threshold(200_000, 20, 100)


def compile_quickly() -> None:
    """XLA reads its flags once, here; processes that tests start compile as users do, where they are not given them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {QUICK}")
        jax.local_devices()


def share_contexts(programs: int = 100) -> None:
    """The tests' thread lowers that many programs in one MLIR context, as any thread does ten with JAX 0.11.2. JAX 0.10
    makes one for each, and most programs here take less to lower than to load all dialects into it. Threads of XLA's
    lower as ever: they end without an interpreter, and may leave nothing to it.
    """
    make, thread = mlir.make_ir_context, threading.get_ident()
    lowered = itertools.count()
    context = None

    def shared() -> Any:
        nonlocal context
        if threading.get_ident() != thread:
            return make()
        if next(lowered) % programs == 0:  # a context keeps the constants of all its programs
            context = make()
        return context

    mlir.make_ir_context = shared


share_contexts()
if shutil.which("nvidia-smi") is None:
    compile_quickly()  # the level is of GPUs, too, where tests measure times
    library.variants = every_kernel  # what a program is on a GPU does not depend on what is compiled here


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-examples", type=int, default=100, help="of every test marked fuzz")
    parser.addoption(
        "--quick",
        action="store_true",
        help="run the shortest case of each test, and skip it where it would compile or interpret a kernel",
    )
    parser.addoption("--record-times", action="store_true", help="write how long tests take into tests/data/times.json")


def plants_a_fault(item: pytest.Item) -> bool:
    """True for a test of a fault in a kernel, and not for one of a fault in a program written by hand."""
    callspec = getattr(item, "callspec", None)
    faults = [x for x in callspec.params.values() if isinstance(x, PlantedFault)] if callspec else []
    return any(not isinstance(fault.kernel, Handwritten) for fault in faults)


NOT_TESTED = {v.key for v in VARIANTS} - {v.key for v in TESTED}
LATER = ("slow", "faults", "rest")  # which `make test-all` runs


def runs_the_rest(item: pytest.Item) -> bool:
    """True for a test of Blackwell, or of one kernel that `make test` does not build."""
    callspec = getattr(item, "callspec", None)
    values = callspec.params.values() if callspec else []
    keys = (getattr(getattr(x, "variant", x), "key", x) for x in values)
    return item.path.stem.endswith("_sm100") or any(isinstance(key, str) and key in NOT_TESTED for key in keys)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in filter(plants_a_fault, items):
        item.add_marker(pytest.mark.faults)
    for item in filter(runs_the_rest, items):
        item.add_marker(pytest.mark.rest)
    seconds = times.recorded()
    for item in times.long((x for x in items if not any(map(x.get_closest_marker, (*LATER, "gpu")))), seconds):
        item.add_marker(pytest.mark.slow)
    if config.getoption("--quick"):
        short = [item for item in items if not item.get_closest_marker("slow") and not item.get_closest_marker("gpu")]
        chosen = {id(item) for item, x in times.shortest(short, seconds) if x <= times.QUICK}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
        items[:] = [item for item in items if id(item) in chosen]


def pytest_report_header(config: pytest.Config) -> str:
    count = len(library.held())
    return f"kernels: {count} built" if count else "kernels: none built, so tests of built kernels have no cases"


@pytest.fixture(scope="module")
def few_objects() -> Iterator[None]:
    """Collections of garbage leave out all older objects. In a process that has run many tests one takes seconds, and
    `jax.checking_leaks` collects after each trace.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def no_kernel_is_compiled_or_interpreted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Skips tests with --quick when they come to it, for no list says which tests do that."""

    def skips(what: str) -> Any:
        return lambda *_, **__: pytest.skip(f"--quick: {what}")

    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--quick"):
            patch.setattr(build.Compiler, "__call__", skips("compiles a kernel"))
            patch.setattr(Kernel, "of", skips("interprets a kernel"))
            patch.setattr(scheduler, "run", skips("interprets PTX"))
        yield


class NothingTested:
    """Says which files had tests and ran none, and why: such a file that the command line names is an error. So is a
    test that `make test` skips for want of a kernel, unless `make test-all` runs it.
    """

    def __init__(self, config: pytest.Config) -> None:
        named = (config.invocation_params.dir / argument.partition("::")[0] for argument in config.args)
        self.named = {path.resolve() for path in named if path.is_file()}
        self.root = config.rootpath
        self.ran: set[str] = set()
        self.skipped: dict[str, str] = {}
        self.unmarked: list[str] = []
        self.is_for_tests = library.manifest().get("is_for_tests", False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            self.skipped.setdefault(file, reason)
            if self.is_for_tests and "not built" in reason and not {*LATER} & {*report.keywords}:
                self.unmarked.append(report.nodeid)
        elif report.when == "call" or report.failed:
            self.ran.add(file)

    def errors(self) -> list[str]:
        """A line for each file of the command line without a test that ran."""
        files = [file for file in self.skipped if file not in self.ran and (self.root / file).resolve() in self.named]
        nothing = [f"{file} tested nothing here: {self._why(self.skipped[file])}" for file in files]
        return nothing + [f"{test}: `make test` does not build its kernel, mark it `rest`" for test in self.unmarked]

    def _why(self, reason: str) -> str:
        of_kernels = any(words in reason for words in ("empty parameter set", "kernels", "not built", "native library"))
        return "no kernels are built; `make build` builds them" if of_kernels and not library.held() else reason

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> Iterator[None]:
        yield  # the last line counts skipped tests, and these stand above it
        for line in self.errors():
            terminalreporter.write_line(f"ERROR {line}", red=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and self.errors():
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


COMPILED = pytest.StashKey[tempfile.TemporaryDirectory[str]]()
KEPT = default_folder("xla")  # what XLA compiled in earlier runs


def share_compilations(directory: str) -> None:
    """Tests share XLA compilations: of sinks with other values, and of implementations that are the same program."""
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # a program's key would have the directory
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    log = logging.getLogger("jax._src.compiler")  # nothing else says what is taken
    log.setLevel(logging.DEBUG)
    log.addFilter(keep_what_is_taken)


def keep_what_is_taken(record: logging.LogRecord) -> bool:
    """A compilation that is taken from the cache is the newest there, so that `evict` removes what nobody takes."""
    if record.msg.startswith("Persistent compilation cache hit"):
        with contextlib.suppress(FileNotFoundError):
            os.utime(Path(jax.config.jax_compilation_cache_dir) / f"{record.args[1]}-cache")
    return record.levelno > logging.DEBUG


def link_files(source: Path, to: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*-cache"):
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.link(path, to / path.name)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["compiled"] = node.config.stash[COMPILED].name


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Keeps compilations for later runs; JAX may have been stopped while it wrote one, unless all went well."""
    if COMPILED in session.config.stash and exitstatus == pytest.ExitCode.OK:
        link_files(Path(session.config.stash[COMPILED].name), KEPT)
        evict(KEPT, limit=1 << 30)


def pytest_unconfigure(config: pytest.Config) -> None:
    if COMPILED in config.stash:
        config.stash[COMPILED].cleanup()


def pytest_configure(config: pytest.Config) -> None:
    """The profile of tests marked fuzz: a failing case is small already, so it is not shrunk for minutes."""
    config.pluginmanager.register(StopsWhenLost())
    if hasattr(config, "workerinput"):
        share_compilations(config.workerinput["compiled"])
    else:
        config.pluginmanager.register(NothingTested(config))
        if config.getoption("--record-times"):
            config.pluginmanager.register(times.Recorder())
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        config.stash[COMPILED] = tempfile.TemporaryDirectory(prefix="run", dir=KEPT.parent)
        link_files(KEPT, Path(config.stash[COMPILED].name))
        share_compilations(config.stash[COMPILED].name)
    settings.register_profile(
        "fuzz",
        max_examples=config.getoption("--fuzz-examples"),
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
        report_multiple_bugs=False,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Any:
    """Skips a test that asks for the native library if there is none."""
    try:
        return (yield)
    except NoLibrary as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def quick_to_compile() -> Iterator[None]:
    """Lets XLA optimise little, for modules of many small programs, each of which is compiled for one run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of functions that a test's programs jitted with donated arguments and called: each updates in place."""
    jit, called = jax.jit, []

    def watched(f: Any = None, **how: Any) -> Any:
        if f is None:
            return functools.partial(watched, **how)
        jitted = jit(f, **how)
        if all(how.get(name) in (None, ()) for name in ("donate_argnums", "donate_argnames")):
            return jitted

        def checked(run: Any) -> Any:
            @functools.wraps(f)
            def call(*args: Any, **kwargs: Any) -> Any:
                if f.__name__ not in called:
                    assert_in_place(jitted.trace(*args, **kwargs))
                    called.append(f.__name__)
                return run(*args, **kwargs)

            return call

        both = checked(jitted)
        both.lower = checked(jitted.lower)
        return both

    monkeypatch.setattr(jax, "jit", watched)
    return called


@pytest.fixture
def cuda() -> jax.Device:
    """A CUDA device; the test is skipped without one."""
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError as e:
        pytest.skip(f"needs a CUDA device: {str(e).splitlines()[0]}")


@pytest.fixture
def hopper(monkeypatch):
    """A machine with Hopper alone, as far as the choice of kernels goes."""
    monkeypatch.setattr(library, "local_architectures", lambda: ("sm_90a",))


@pytest.fixture
def on_hopper(monkeypatch):
    """As if this process compiled for a Hopper, with every kernel built."""
    jax.clear_caches()
    monkeypatch.setattr(library, "variants", every_kernel)
    monkeypatch.setattr(library, "local_architectures", lambda: ("sm_90a",))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    yield
    jax.clear_caches()


@pytest.fixture
def no_gpu(monkeypatch, request):
    """Behaves as if there were no GPU, except for a test that is marked gpu."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(library, "local_architectures", lambda: ())


@pytest.fixture
def one_built(monkeypatch):
    monkeypatch.setattr(library, "variants", lambda: (ONE_BUILT,))


@pytest.fixture
def as_if_gpu(monkeypatch, no_gpu, one_built):
    """Behaves as if there were a GPU with enough memory; the ops then run on the CPU."""
    monkeypatch.setattr(library, "local_architectures", lambda: ("sm_90a",))
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 2**30})
    monkeypatch.setattr(check, "_device", lambda: device)


@pytest.fixture
def built(monkeypatch):
    """Behaves as if every kernel were built, for an architecture that this machine does not have."""
    monkeypatch.setattr(library, "variants", every_kernel)
    monkeypatch.setattr(library, "shipped_for", lambda op, **_: ("sm_90a",))
    monkeypatch.setattr(library, "local_architectures", lambda: ())
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield
