"""The forms of instructions that this project's own Blackwell kernels execute, for docs/witnesses.md.

    python -m interpreter.witnesses.ours docs/blackwell_forms.json

In the project's environment, with kernels built; the witnesses need another.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from kernels.abi import Forward, IndexerScores, Probabilities, Variant
from kernels.variants import VARIANTS

from ..cute.forms import executed
from ..kernels import cases, indexer, probabilities
from ..kernels.launch import Kernel, launch
from ..machine.state import Machine

CASES = ("tiles", "turns", "groups")


def forms() -> Mapping[str, list[str]]:
    """Form -> the keys of the kernels that execute it. float16 is the same code up to conversions."""
    found: dict[str, set[str]] = {}
    for variant in VARIANTS:
        if variant.arch != "sm_100f":
            continue
        for machine in machines(variant):
            machine.run()
            for form in executed(machine):
                found.setdefault(form, set()).add(variant.key)
    return {form: sorted(found[form]) for form in sorted(found)}


def machines(variant: Variant) -> Iterator[Machine]:
    """About to run, of a kernel that has tensor cores."""
    if isinstance(variant, Forward) and variant.dtype == "bfloat16":
        kernel = Kernel.of(variant)
        for case in CASES:
            x = cases.operands(variant, kernel.facts["tile_n"], case)
            if x is not None:
                yield launch(kernel, x, processors=cases.PROCESSORS[case], record=True).machine
    if isinstance(variant, IndexerScores) and variant.dtype != "float16" and variant.heads == 64:
        for case in CASES:
            problem = indexer.Problem.case(variant, case)
            if problem is not None:
                yield indexer.Call.of(Kernel.of(variant), problem, cases.PROCESSORS[case]).scoring(record=True)
    if isinstance(variant, Probabilities) and variant.dtype == "bfloat16":
        for case in CASES:
            teacher = probabilities.Problem.case(variant, case)
            if teacher is not None:
                yield probabilities.Call(Kernel.of(variant), teacher, cases.PROCESSORS[case]).machine(record=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    file: Path = parser.parse_args().file
    file.write_text(json.dumps(forms(), indent=1) + "\n")


if __name__ == "__main__":
    main()
