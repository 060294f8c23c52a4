"""The launch of the DSL's own host stub, recorded by running the stub without a GPU.

The build leaves the stub of every variant beside its cubin, as an object file.  Linked against the stand-in for CUDA of
the interpreter, it runs anywhere; the launch configuration and the bytes of every parameter are recorded.
"""

import ctypes
import json
from pathlib import Path
from typing import Any

from interpreter.cute.record import HostCode, Recorded
from kernels import build
from kernels.abi import Variant
from kernels.cubin import read_kernel

ROOT = Path(__file__).parents[2]


def build_of(variant: Variant, directory: Path) -> Path:
    """Where a variant's cubin and stub are: a build that is up to date, else `directory`, where they are made."""
    for built in sorted(ROOT.glob("build/*/kernels")):
        if (built / f"{variant.key}.o").exists() and build.cached(variant, built):
            return built
    build.compile_one(variant, directory)
    return directory


class HostStub:
    """The host side of one variant's kernel, linked in `directory`."""

    def __init__(self, variant: Variant, directory: Path) -> None:
        key = variant.key
        built = build_of(variant, directory)
        kernel = read_kernel((built / f"{key}.cubin").read_bytes())
        self.arguments: list[str] = json.loads((built / f"{key}.host.json").read_text())
        self.host = HostCode(built / f"{key}.o", key, directory / f"{key}.oracle.so")
        self.host.load({kernel.name: kernel.params}, variant.arch)

    def run(self, values: dict[str, Any]) -> Recorded:
        """Call the stub with ctypes values, by the names of its parameters."""
        (launch,) = self.host.run([ctypes.addressof(values[name]) for name in self.arguments])
        return launch
