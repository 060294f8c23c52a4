"""Runs Blackwell's forward kernels, which nobody has run on hardware, for tests, and plants faults in them."""

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interpreter.faults import PlantedFault
from interpreter.kernels import attention, cases, native
from interpreter.kernels.launch import Kernel, Launch, combine, launch
from interpreter.kernels.verdict import Wrong, judge
from interpreter.machine import scheduler
from interpreter.machine.hazards import Fault
from interpreter.machine.state import SMEM_BASE, Array
from kernels import build
from kernels.abi import Forward
from kernels.cache import KernelCache, default_folder
from kernels.packings import PACKED
from kernels.variants import VARIANTS
from tests import wrong_answers

NEEDS_DSL = pytest.mark.skipif(util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")
QUIET = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow)")  # NumPy's, about NaN and inf

ROOT = Path(__file__).parent.parent
SM100 = {v.key: v for v in VARIANTS if isinstance(v, Forward) and v.arch == "sm_100f"}


def seen(case: str, b: int, s_q: int, s_kv: int) -> tuple[Array, Array]:
    """start and stop of every query."""
    i, zero = np.arange(s_q), np.zeros(s_q, np.int64)
    position = i + s_kv - s_q  # the last query is at the last key
    start, stop = {
        "full": (zero, zero + s_kv),
        "causal": (zero, position + 1),
        "window": (position - 40, position + 1),
        "compressed": (zero, (position + 1) // 4),
        "rising": (zero, zero + s_kv),
        "empty rows": (zero + 3, np.where(i % 3 == 1, 3, s_kv - 2)),  # no query sees the last keys
    }[case]
    start, stop = (np.tile(np.clip(x, 0, s_kv).astype(np.int32), (b, 1)) for x in (start, stop))
    if case == "empty rows" and b > 1:
        stop[1] = start[1]  # nobody of this sequence sees anything
    return start, stop


def operands(variant: Forward, case: str, **extents: int) -> attention.Operands:
    """Random ones. All keys after the last that somebody sees are NaN. In the case "rising" later keys are larger."""
    x = attention.operands(variant, **extents)
    b, s_q, s_kv, _, h_kv, d, *_ = x.shape
    start, stop = seen(case, b, s_q, s_kv)
    j = np.arange(s_kv)
    counts = ((j >= start[..., None]) & (j < stop[..., None])).astype(np.int64)
    rng = np.random.default_rng(1)
    size = np.linspace(0.02, 0.5, s_kv)[:, None, None] if case == "rising" else 0.125
    k = (size * rng.standard_normal((b, s_kv, h_kv, d))).astype(x.q.dtype)
    v = k if variant.shared_kv else (0.125 * rng.standard_normal(k.shape)).astype(x.q.dtype)
    for array in (k, v):
        array[j >= stop.max(1)[:, None]] = np.nan
    return dataclasses.replace(x, sources=(attention.Keys(k, v, start, stop, counts),))


RISES = "maxima that rise"
CASES: dict[str, tuple[str, dict[str, int]]] = {
    "three tiles, ragged": ("full", {"b": 1, "s_q": 9, "h_q": 8, "s_kv": 300}),
    "causal, several row tiles a CTA": ("causal", {"b": 1, "s_q": 70, "h_q": 4, "s_kv": 150}),
    "window, grouped heads": ("window", {"b": 1, "s_q": 33, "h_q": 12, "h_kv": 2, "s_kv": 170}),
    "a head for each head of keys": ("causal", {"b": 1, "s_q": 150, "h_q": 2, "h_kv": 2, "s_kv": 160}),
    "empty rows and an empty sequence": ("empty rows", {"b": 2, "s_q": 5, "h_q": 7, "s_kv": 140}),
    "more heads than rows in a tile": ("compressed", {"b": 1, "s_q": 2, "h_q": 130, "s_kv": 600}),
    RISES: ("rising", {"b": 1, "s_q": 20, "h_q": 8, "s_kv": 300}),
    "one key": ("full", {"b": 3, "s_q": 1, "h_q": 1, "s_kv": 1}),
    "one tile": ("full", {"b": 1, "s_q": 5, "h_q": 8, "s_kv": 60}),
}


RISING = "rising"


def rising(x: attention.Operands) -> attention.Operands:
    """`mixed` with later keys, which are larger, later in every list, and so large that O is rescaled."""
    (keys,) = x.sources
    indices = keys.seen_from.copy()
    for n, i in np.ndindex(indices.shape[:2]):
        indices[n, i, : keys.seen_to[n, i]].sort()
    q = (4 * x.q.astype(np.float32)).astype(x.q.dtype)
    return dataclasses.replace(x, q=q, sources=(dataclasses.replace(keys, seen_from=indices),))


SPLIT = "split "  # before a case: in three parts, which `combine` merges; some rows have fewer tiles of keys
TWICE = ("three tiles, ragged", "causal, several row tiles a CTA", "tiles", "turns")


def started(kernel: Kernel, case: str, seed: int = 0, processors: int = 1) -> Launch:
    case, splits = case.removeprefix(SPLIT), 3 if case.startswith(SPLIT) else 1
    if case in CASES:
        name, extents = CASES[case]
        x = operands(kernel.variant, name, **extents)
    else:
        x = cases.operands(kernel.variant, kernel.facts["tile_n"], "mixed" if case == RISING else case)
        assert x is not None
        x = rising(x) if case == RISING else x
    return launch(kernel, x, processors=processors * kernel.facts["cluster"], seed=seed, splits=splits)


def results(run: Launch, seed: int) -> tuple[Array, ...]:
    """(o, lse), where keys are split of what `combine` makes of the parts."""
    if run.operands.shape.splits == 1:
        return run.run()
    scheduler.run(run.machine)
    return combine(Kernel.of(native.variant_of(f"combine_sm_100f_{run.operands.q.dtype.name}")), run, seed=seed).run()


def interpret(kernel: Kernel, case: str, seed: int = 0, processors: int = 1) -> tuple[Array, ...]:
    """(o, lse); raises what is wrong with them, or with how they came about."""
    run = started(kernel, case, seed, processors)
    got = results(run, seed)
    attention.assert_right(got, run.operands, run.scale)
    return got


def assert_right(key: str, case: str, first: int) -> None:
    """Interprets a kernel in one order; a case of `TWICE` gives the same bits in two, on one and on two CTAs or pairs.
    A kernel that unpacks keys runs in one order: the rest of its code is that of a kernel that does not.
    """
    kernel, variant = Kernel.of(SM100[key]), SM100[key]
    twice = case in TWICE and variant.dtype == "bfloat16" and not {*variant.sources} & PACKED.keys()
    seeds = (first, first + 1) if twice else (first,)
    found = [interpret(kernel, case, seed, processors=1 + seed % 2) for seed in seeds]
    for one, another in zip(found[0], found[-1], strict=True):
        assert one.tobytes() == another.tobytes()


# Planted faults: an edit of the source, which is compiled, or of the PTX.

KIB = 1024
OF_DENSE = {"q": 64 * KIB, "keys": 160 * KIB}, {"o": 256, "scores": 128, "p": 128}
OF_LATENT = {"keys": 192 * KIB, "p": 16 * KIB, "exchange": 16 * KIB}, {"o": 256, "q": 128, "scores": 128}
"""The regions of shared memory, in order, and the columns of TMEM."""


def by_name(message: str, kernel: Kernel) -> str:
    """The interpreter's message, with names for places in memory; a load from TMEM after the last store to it is
    called final."""

    def named(regions: dict[str, int], place: int) -> str:
        for name, size in regions.items():
            if 0 <= place < size:
                return name
            place -= size
        return "the rest"

    smem, tmem = OF_LATENT if kernel.variant.shared_kv else OF_DENSE
    lines = kernel.ptx.splitlines()
    last = max(n for n, line in enumerate(lines, 1) if line.strip().startswith("tcgen05.st"))
    message = re.sub(r"line (\d+): (?=tcgen05\.ld)", lambda m: "final " * (int(m[1]) > last), message)
    message = re.sub(
        r"SMEM (?:of CTA \d+ )?bytes (\d+)\.\.\d+",
        lambda m: "SMEM of " + named(smem, int(m[1]) - SMEM_BASE),
        message,
    )
    return re.sub(
        r"TMEM (?:of CTA \d+ )?lanes \S+ columns (\d+)", lambda m: "TMEM of " + named(tmem, int(m[1])), message
    )


def unordered(one: str, other: str, region: str, says: str = "") -> str:
    """Two accesses to a region of memory, whichever comes first."""

    def then(a: str, b: str) -> str:
        access = rf"{a}[^\n]*\n\s+(reads|overwrites) {region}\b[^\n]*"
        return rf"{access}nothing orders this and the (read|write) by [^\n]*{b}[^\n]*{says}"

    return f"{then(one, other)}|{then(other, one)}"


def unfenced(reader: str, region: str, writer: str) -> str:
    after = rf"no fence\.proxy\.async after the generic write by [^\n]*{writer}"
    return rf"{reader}[^\n]*\n\s+reads {region}\b[^\n]*{after}"


MMA, LD, ST = r"tcgen05\.mma", r"(?<!final )tcgen05\.ld\.sync", r"tcgen05\.st\.sync"
UNTOLD = r"(?<!thread_sync)(?<!wait::[ls][dt])$"  # nor would a fence or a wait have been enough
WRONG = (Wrong, r"^o is wrong in .*; lse is wrong in ")
WRONG_O = (Wrong, r"^o is wrong in .*; lse is right")
HANDED_OVER_UNFENCED = (("before_thread_sync()\n        cute.arch.sync_warp()", "cute.arch.sync_warp()"),)
ENDS_ALONE = (
    "self.sync()  # nothing may arrive",
    "before_thread_sync(), cute.arch.sync_threads(), after_thread_sync()  # nothing may arrive",
)


@pytest.fixture(scope="module")
def compiler() -> Iterator[build.Compiler]:
    with contextlib.closing(build.Compiler()) as process:
        yield process


def mutant(fault: PlantedFault[str, str], directory: Path, compiler: build.Compiler) -> Kernel[Any]:
    kernel: Kernel[Any] = Kernel.of(native.variant_of(fault.kernel))
    if not fault.source:
        return dataclasses.replace(kernel, ptx=fault.planted_in(kernel.ptx))
    shutil.copytree(ROOT / "kernels", directory / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    *folder, _ = kernel.variant.module.split(".")
    names = ("blackwell", "tcgen05", "row_softmax", "splits", "scores", "scores_at", "packed")
    shared = (directory / "kernels/lib" / f"{name}.py" for name in names)
    files = [*directory.joinpath(*folder).glob("*.py"), *shared]
    for old, new in fault.source:
        assert sum(file.read_text().count(old) for file in files) == 1, old
        for file in files:
            file.write_text(file.read_text().replace(old, new))
    ptx, name, cache = (
        directory / f"{fault.kernel}.ptx",
        build.digest(kernel.variant, directory),
        KernelCache(default_folder()),
    )
    if not cache.take(name, directory):
        compiler(kernel.variant, directory, root=directory)
        cache.keep(name, [ptx])
    return dataclasses.replace(kernel, ptx=ptx.read_text())


def find(fault: PlantedFault[str, str], directory: Path, compiler: build.Compiler) -> None:
    """The interpreter finds a planted fault in any order of events; its very answer is compared before it is judged."""
    kernel = mutant(fault, directory, compiler)

    def run_with(fault: PlantedFault[str, str], seed: int) -> None:
        run = started(kernel, fault.case or "three tiles, ragged", seed)
        try:
            got = results(run, seed)
            if fault.answers is not None:
                wrong_answers.assert_given(got, fault.answers(run.operands, run.scale))
            judge(got, run.operands, run.scale)
        except Fault as found:
            raise type(found)(by_name(str(found), kernel)) from None

    fault.check(run_with)
