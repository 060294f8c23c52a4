"""One witness, compiled and recorded in a process of its own; what comes out is kept in the user's cache."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..cute.launches import Argument, Launch
from ..machine.state import Array
from . import mosaic
from .catalogue import CLOCKED, MOSAIC, WITNESSES, Witness
from .drivers import Case

PROCESSORS = 2  # of the GPU that kernels are told of
HERE = Path(__file__).parent
CUTE = HERE.parent / "cute"
SOURCES = (
    *sorted(HERE.glob("drivers/*.py")),
    Path(__file__),
    *(HERE / x for x in ("mosaic.py", "libcuda.c")),
    *(CUTE / x for x in ("record.py", "recorder.c", "launches.py")),
)


@dataclass(frozen=True)
class Recording:
    launches: Sequence[Launch]
    arguments: Sequence[Argument]
    wanted: Mapping[str, Array]
    tolerance: float
    seconds: float  # to compile


class NotRecorded(Exception):
    """A witness that does not compile, or whose host code asks for what the stand-in does not know."""


def version(package: str) -> str:
    return importlib.metadata.version(package)


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "jax_dsv4_fmha/witnesses"


def recording(witness: Witness) -> Recording:
    """Returns a witness's recording from the cache, or compiles it now; raises NotRecorded if that fails."""
    packages = [f"{x}=={version(x)}" for x in (witness.package, *witness.compiler)]
    contents = [path.read_bytes() for path in SOURCES]
    digest = hashlib.sha256(b"\\0".join([repr((witness, packages)).encode(), *contents])).hexdigest()
    path = cache() / f"{digest}.pickle"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", f"from {__name__} import write; write()", witness.name, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"CUTE_DSL_ARCH": witness.arch})
        if done.returncode:
            raise NotRecorded(f"cannot be compiled:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return pickle.loads(path.read_bytes())  # which this module has written


def case_of(witness: Witness) -> Case:
    module, function = witness.driver.split(".")
    case: Case = getattr(importlib.import_module(f"{__package__}.drivers.{module}"), function)(**witness.options)
    return case


def compile_one(witness: Witness) -> Recording:
    if witness.compiler is MOSAIC:
        case = case_of(witness)
        made = mosaic.record(case.function, case.args, list(case.wanted), witness.arch, PROCESSORS)
        return Recording(made.launches, made.arguments, dict(case.wanted), case.tolerance, made.seconds)
    return compile_by_dsl(witness)


def compile_by_dsl(witness: Witness) -> Recording:
    from ..cute.record import compiled, pretend, record

    with pretend(PROCESSORS):
        case = case_of(witness)
        start = time.monotonic()
        made = compiled(
            case.function,
            *case.compile_args,
            arch=witness.arch,
            options=case.options,
            compiler=case.compiler,
            **case.kwargs,
        )
        seconds = time.monotonic() - start
        launches = record(made, *case.args, arch=witness.arch, processors=PROCESSORS, **case.kwargs)
    arguments = [Argument.of(name, array, role) for name, (array, role) in case.arrays.items()]
    return Recording(launches, arguments, dict(case.wanted), case.tolerance, seconds)


def write() -> None:
    """Compiles the witness that the process's first argument names, into the file that the second one names."""
    name, file = sys.argv[1:]
    (witness,) = (x for x in (*WITNESSES, *CLOCKED) if x.name == name)
    made = compile_one(witness)
    partial = Path(f"{file}.{os.getpid()}")
    partial.write_bytes(pickle.dumps(made))
    partial.rename(file)
    if witness.compiler is MOSAIC:  # XLA's plugin is ended by a signal, if Python takes it down
        os._exit(0)
