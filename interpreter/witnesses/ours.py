"""The forms of instructions that this project's own Blackwell kernels execute, for docs/witnesses.md.

    python -m interpreter.witnesses.ours docs/blackwell_forms.json

In the project's environment, with kernels built; the witnesses need another.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from kernels.variants import VARIANTS

from ..cute.forms import executed
from ..kernels.launch import Kernel
from ..kernels.prepared import Interpreted, Prepared, is_typical
from ..machine import scheduler

CASES = ("tiles", "turns", "groups")


def forms() -> Mapping[str, list[str]]:
    """Form -> the keys of the kernels that execute it. float16 is the same code up to conversions."""
    found: dict[str, set[str]] = {}
    for variant in VARIANTS:
        if not isinstance(variant, Interpreted) or variant.arch != "sm_100f" or not is_typical(variant):
            continue
        for case in CASES:
            try:
                prepared = Prepared.case(Kernel.of(variant), case, None)
            except LookupError:
                continue
            machine, _ = prepared.make(0, True)
            scheduler.run(machine)
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
