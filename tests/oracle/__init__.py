"""The launch of the DSL's own host stub, recorded by running the stub without a GPU.

The build leaves the stub of every variant beside its cubin, as an object file.  Linked against `recorder.c` it runs
anywhere, and records the launch configuration and the bytes of every parameter.
"""

import ctypes
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels import build
from kernels.abi import Variant
from kernels.cubin import read_kernel

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@dataclass(frozen=True)
class Launch:
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    params: tuple[bytes, ...]


def build_of(variant: Variant, directory: Path) -> Path:
    """Where a variant's cubin and stub are: a build that is up to date, else `directory`, where they are made."""
    for built in sorted(ROOT.glob("build/*/kernels")):
        if (built / f"{variant.key}.o").exists() and build.cached(variant, built):
            return built
    build.compile_one(variant, directory)
    return directory


class LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class HostStub:
    """The host side of one variant's kernel, linked in `directory`."""

    def __init__(self, variant: Variant, directory: Path) -> None:
        key = variant.key
        built = build_of(variant, directory)
        self.kernel = read_kernel((built / f"{key}.cubin").read_bytes())
        stub, library = built / f"{key}.o", directory / f"{key}.oracle.so"
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(HERE / "recorder.c"), str(stub)], check=True)
        symbols = subprocess.run(["nm", str(stub)], check=True, capture_output=True, text=True).stdout
        entry = re.search(rf"T (_mlir_{key}__mlir_ciface_\S+)", symbols)
        assert entry is not None, symbols
        self.arguments: list[str] = json.loads((built / f"{key}.host.json").read_text())
        self.library = ctypes.CDLL(str(library))
        self.entry = self.library[entry[1]]
        self._load(key)

    def _load(self, key: str) -> None:
        handle, result, device = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        where = ctypes.pointer(handle)
        self.library[f"_mlir_{key}_cuda_init"](_pointers(where, result))
        assert result.value == 0
        self.library[f"_mlir_{key}_cuda_load_to_device"](_pointers(where, device, result))
        assert result.value == 0

    def run(self, values: dict[str, Any]) -> Launch:
        """Call the stub with ctypes values, by the names of its parameters."""
        arguments = [values[name] for name in self.arguments]
        sizes = self.kernel.params
        ctypes.c_int.in_dll(self.library, "param_count").value = len(sizes)
        (ctypes.c_int * 64).in_dll(self.library, "param_sizes")[: len(sizes)] = sizes
        before, result = self._launches(), ctypes.c_int()
        self.entry(_pointers(*arguments, result), len(arguments) + 1)
        assert result.value == 0
        assert self._launches() == before + 1
        config = LaunchConfig.in_dll(self.library, "launched")
        params = (ctypes.c_char * 128 * 64).in_dll(self.library, "params")
        blobs = tuple(params[i].raw[:size] for i, size in enumerate(sizes))
        cluster = (ctypes.c_uint * 3).in_dll(self.library, "cluster")
        return Launch(tuple(config.grid), tuple(config.block), tuple(cluster), config.smem_bytes, blobs)

    def _launches(self) -> int:
        return ctypes.c_int.in_dll(self.library, "launches").value


def _pointers(*values: Any) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
