"""The forms of instructions that this project's own Blackwell kernels execute, for docs/witnesses.md.

    python -m interpreter.witnesses.ours docs/blackwell_forms.json

In the project's environment, with kernels built; the witnesses need another.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kernels.abi import Forward, MlaBackward
from kernels.variants import VARIANTS

from ..cute.forms import executed
from ..kernels import cases, gradients, mla_backward
from ..kernels.launch import Kernel, launch
from ..kernels.orders import SHAPE
from ..machine.state import Machine

CASES = ("tiles", "turns", "groups")


def machines(variant: Forward | MlaBackward) -> Iterator[Machine]:
    """About to run the variant on each of its cases."""
    kernel: Kernel[Any] = Kernel.of(variant)
    if isinstance(variant, MlaBackward):
        yield mla_backward.launch(kernel, gradients.operands(variant, **SHAPE), record=True).machine
        return
    for case in CASES:
        x = cases.operands(variant, kernel.facts["tile_n"], case)
        if x is not None:
            yield launch(kernel, x, processors=cases.PROCESSORS[case], record=True).machine


def forms() -> Mapping[str, list[str]]:
    """Form -> the keys of the kernels that execute it. float16 is the same code up to conversions."""
    found: dict[str, set[str]] = {}
    for variant in VARIANTS:
        if not isinstance(variant, Forward | MlaBackward) or variant.arch != "sm_100f" or variant.dtype != "bfloat16":
            continue
        for machine in machines(variant):
            machine.run()
            for form in executed(machine):
                found.setdefault(form, set()).add(variant.key)
    return {form: sorted(found[form]) for form in sorted(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    file: Path = parser.parse_args().file
    file.write_text(json.dumps(forms(), indent=1) + "\n")


if __name__ == "__main__":
    main()
