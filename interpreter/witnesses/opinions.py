"""A second opinion on what a kernel means: JAX's interpret mode and this interpreter run the same text, in Pallas.

    python -m interpreter.witnesses.opinions ours            compiled by Mosaic GPU to PTX, which this interpreter runs
    python -m interpreter.witnesses.opinions jax             by JAX's interpret mode; wants jax 0.12, and so Python 3.12
    python -m interpreter.witnesses.opinions jax race --record docs/opinions.json

Each fault is run in a process of its own, and one that waits for ever is ended. `--answers` keeps the answers of the
kernel without a fault in a folder, and compares them when both are there. Exit status 1 if a verdict differs from that
of `VERDICTS`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .drivers import mosaic as texts

WITHOUT = "none"
FAULTS = {
    WITHOUT: "",
    "commit": "the products P V are not committed",
    "phase": "a wait for P V is left out, and those after it wait for a phase before theirs",
    "race": "P is stored before the products that read the last P are waited for",
}
WAITS = "waits for ever"
VERDICTS = {  # a part of what each interpreter says
    "commit": {"jax": WAITS, "ours": "Deadlock: "},
    "phase": {"jax": "RACE DETECTED", "ours": "Race: tcgen05.ld"},
    "race": {"jax": "RACE DETECTED", "ours": "Race: tcgen05.st"},
}
TOLERANCE = 2e-3  # of the answer without a fault, as a share of the greatest number
SEEDS = 3
LENGTH = 400  # of what is kept of a message


def said(found: BaseException) -> str:
    """The last error that a message has, without folders and clocks of threads."""
    text = f"{type(found).__name__}: {found}"
    last = [x.start() for x in re.finditer(r"^\s*\w+Error: ", text, re.M)][-1]
    lines = [line for line in text[last:].splitlines() if "clock:" not in line]
    return re.sub(r"\S*/", "", " ".join(" ".join(lines).split()))[:LENGTH]


def installed(package: str) -> str:
    """Its version, or nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def uncompiled() -> str:
    """Why Mosaic GPU cannot compile the kernel here, or nothing."""
    return "" if installed("jax-cuda12-plugin") else "jax-cuda12-plugin is not installed"


def uninterpreted() -> str:
    """Why JAX's interpret mode cannot run the kernel here, or nothing."""
    if not (version := installed("jax")):
        return "jax is not installed"
    if tuple(map(int, version.split(".")[:2])) < (0, 12):
        return f"jax {version} is installed; its interpret mode knows no tensor memory"
    return ""


def by_jax(fault: str) -> dict[str, object]:
    """The kernel in JAX's interpret mode, with its detection of races."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    plgpu = importlib.import_module("jax.experimental.pallas.mosaic_gpu")  # types are checked with an older one
    case = texts.steady(fault=FAULTS[fault] and fault)
    params = plgpu.InterpretGPUParams(detect_races=True)
    function = functools.partial(case.function, interpret=params)
    try:
        got = np.asarray(jax.block_until_ready(jax.jit(function)(*case.args)))
    except Exception as found:  # whatever type an interpreter of others raises is its verdict
        return {"verdict": said(found)}
    return {"verdict": "", "o": got.tolist(), "error": difference(got, case.wanted["o"])}


def by_ours(fault: str) -> dict[str, object]:
    """The kernel's PTX in this interpreter, in several orders of events, under the chip's rules."""
    from ..cute.launches import run
    from ..machine.rules import CHIP
    from . import mosaic
    from .recording import PROCESSORS, Recording
    from .verdict import answer

    case = texts.steady(fault=FAULTS[fault] and fault)
    made = mosaic.record(case.function, case.args, list(case.wanted), "sm_100a", PROCESSORS)
    recording = Recording(made.launches, made.arguments, dict(case.wanted), case.tolerance, made.seconds)
    found = answer(recording, SEEDS)
    if found.fault:
        return {"verdict": found.fault.partition(": ")[2][:LENGTH]}
    got = run(recording.launches, recording.arguments, rules=CHIP).results()["o"]
    return {"verdict": "", "o": got.tolist(), "error": found.errors["o"]}


def difference(got: np.ndarray, wanted: np.ndarray) -> float:
    error = np.abs(got.astype(np.float64) - wanted).max() / np.abs(wanted).max()
    return float(error) if np.isfinite(error) else float("inf")


BY: dict[str, Callable[[str], dict[str, object]]] = {"jax": by_jax, "ours": by_ours}


def idle(seconds: float, report: Callable[[dict[str, object]], None]) -> None:
    """Ends the process when it has done nothing for so long: its threads wait for one another."""
    before = time.process_time()
    while True:
        time.sleep(seconds)
        if (now := time.process_time()) - before < seconds / 1000:
            report({"verdict": WAITS})
            os._exit(0)
        before = now


def one(by: str, fault: str, seconds: float) -> None:
    """Runs a fault in this process, and prints a line of JSON."""

    def report(found: dict[str, object]) -> None:
        print(json.dumps(found), flush=True)

    threading.Thread(target=idle, args=(seconds, report), daemon=True).start()
    report(BY[by](fault))
    os._exit(0)  # without the end of others' threads


def opinion(by: str, fault: str, seconds: float) -> dict[str, object]:
    command = [sys.executable, "-c", f"from {__name__} import one; one({by!r}, {fault!r}, {seconds})"]
    if __name__ == "__main__":
        command[2] = command[2].replace("__main__", "interpreter.witnesses.opinions")
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [x for x in done.stdout.splitlines() if x.startswith("{")]
    if not lines:
        raise RuntimeError(f"{by}, {fault}: no verdict\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    found: dict[str, object] = json.loads(lines[0])
    return found


def is_expected(by: str, fault: str, found: dict[str, Any]) -> bool:
    """True if this is the fault's own verdict; without a fault, if there is none and the answer is right."""
    if fault == WITHOUT:
        return found["verdict"] == "" and found["error"] < TOLERANCE
    return VERDICTS[fault][by] in found["verdict"]


def compared(folder: Path, by: str, o: np.ndarray) -> dict[str, object]:
    """Keeps an answer; where the other one is there, the greatest difference, as a share of the greatest number."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / f"{by}.npy", o)
    other = folder / f"{next(x for x in BY if x != by)}.npy"
    return {"apart": difference(o, np.load(other).astype(np.float64))} if other.exists() else {}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m interpreter.witnesses.opinions", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("by", choices=BY, help="which interpreter")
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"of {', '.join(FAULTS)} (default: all)")
    parser.add_argument("--idle", type=float, default=30, help="seconds without work that are waiting for ever")
    parser.add_argument("--answers", type=Path, metavar="FOLDER", help="keep the answers without a fault here")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write what was found into this JSON")
    args = parser.parse_args(arguments)
    if why := {"jax": uninterpreted, "ours": uncompiled}[args.by]():
        parser.error(why)
    kept = json.loads(args.record.read_text()) if args.record and args.record.exists() else {}
    wrong = []
    for fault in args.faults or FAULTS:
        found = opinion(args.by, fault, args.idle) | {"jax": importlib.metadata.version("jax")}
        o = found.pop("o", None)
        if args.answers and fault == WITHOUT and o is not None:
            found |= compared(args.answers, args.by, np.array(o, np.float32))
        print(f"{args.by}, {fault}: {found['verdict'] or found['error']}", flush=True)
        wrong += [] if is_expected(args.by, fault, found) else [fault]
        kept.setdefault(fault, {})[args.by] = found
        if args.record:
            args.record.write_text(json.dumps(kept, indent=1) + "\n")
    for fault in wrong:
        print(
            f"{args.by}, {fault}: wanted {VERDICTS[fault][args.by] if fault in VERDICTS else 'the right answer'}",
            file=sys.stderr,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
